"""The verbs: what each command does, without printing, a module or a folder each. They load when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..doors import doors

if TYPE_CHECKING:
    from . import compare as compare
    from . import compile as compile
    from . import doctor as doctor
    from . import experiment as experiment
    from . import profile as profile
    from . import run as run
    from . import selftest as selftest
    from . import sweep as sweep
    from . import tune as tune
    from . import verify as verify

__getattr__ = doors(__name__)
