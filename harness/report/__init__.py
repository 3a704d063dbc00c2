"""Rows -> a DataFrame, figures, tables and a summary. Its modules load when first used: matplotlib takes a second."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..doors import doors

if "ipykernel" not in sys.modules:  # what Jupyter names for its own kernels may not be there in the commands of a terminal
    os.environ["MPLBACKEND"] = "Agg"  # read when matplotlib loads, which refuses a backend that it does not know

if TYPE_CHECKING:
    from .compose import draw as draw
    from .compose import frame as frame
    from .compose import redraw as redraw
    from .picture import error_picture as error_picture

_open = doors(__name__)


def __getattr__(name: str) -> object:
    module = "picture" if name == "error_picture" else "compose" if name in ("draw", "frame", "redraw") else None
    return getattr(_open(module), name) if module else _open(name)
