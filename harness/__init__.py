"""The harness: from a kernel file and a problem to outputs, verdicts, times and pictures.

Modules load when first used (PEP 562), so that `fa-cli --help` needs neither numpy nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backends as backends
    from . import bind as bind
    from . import ceilings as ceilings
    from . import climb as climb
    from . import command as command
    from . import compare as compare
    from . import compile as compile
    from . import contender as contender
    from . import counters as counters
    from . import dataset as dataset
    from . import doctor as doctor
    from . import drawing as drawing
    from . import draws as draws
    from . import environment as environment
    from . import errors as errors
    from . import experiment as experiment
    from . import expression as expression
    from . import figures as figures
    from . import files as files
    from . import header as header
    from . import kernel as kernel
    from . import ladder as ladder
    from . import measure as measure
    from . import new as new
    from . import peers as peers
    from . import plan as plan
    from . import printing as printing
    from . import problem as problem
    from . import profile as profile
    from . import reference as reference
    from . import report as report
    from . import results as results
    from . import rounding as rounding
    from . import run as run
    from . import show as show
    from . import show_report as show_report
    from . import summary as summary
    from . import sweep as sweep
    from . import tune as tune
    from . import verify as verify
    from . import views as views
    from . import watch as watch


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            raise AttributeError(name) from None
        raise
