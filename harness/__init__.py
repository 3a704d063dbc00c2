"""The harness: from a kernel file and a problem to outputs, verdicts, times and pictures.

Modules load when first used (PEP 562), so that `fa-cli --help` needs neither numpy nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backends, dataset, doctor, errors, experiment, kernel, new, problem, reference, report, results, run, show, verify


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            raise AttributeError(name) from None
        raise
