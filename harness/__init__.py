"""The harness: from a kernel file and a problem to outputs, verdicts, times and figures.

Rooms and modules load when first used (PEP 562), so that `fa-cli --help` needs neither numpy nor pandas.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it, whose import takes 8 ms: before it, Ctrl-C would be a traceback (terminal/interrupt.py)
if TYPE_CHECKING:  # what the command line opens
    from collections.abc import Callable
    from types import ModuleType

    from . import choose as choose
    from . import compare as compare
    from . import compile as compile
    from . import dataset as dataset
    from . import doctor as doctor
    from . import experiment as experiment
    from . import kernel as kernel
    from . import profile as profile
    from . import report as report
    from . import ring as ring
    from . import run as run
    from . import selftest as selftest
    from . import sweep as sweep
    from . import terminal as terminal
    from . import tune as tune
    from . import verify as verify


def doors(package: str) -> Callable[[str], ModuleType]:
    """A package's __getattr__ that imports a module of it when it is first named."""

    def open_door(name: str) -> ModuleType:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f".{name}", package)
        except ModuleNotFoundError as error:
            if error.name == f"{package}.{name}":
                raise AttributeError(name) from None
            raise

    return open_door


__getattr__ = doors(__name__)
