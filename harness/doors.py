"""Rooms whose modules load when they are first used (PEP 562), so that `fa-cli --help` needs neither numpy nor pandas."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it, whose import takes 8 ms: before it, Ctrl-C would be a traceback (terminal/interrupt.py)
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


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
