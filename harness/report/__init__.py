"""Rows -> a DataFrame, figures, tables and a summary. Its modules load when first used: matplotlib takes a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import doors

if TYPE_CHECKING:
    from .compose import draw as draw
    from .compose import error_picture as error_picture
    from .compose import frame as frame
    from .compose import redraw as redraw

_open = doors(__name__)


def __getattr__(name: str) -> object:
    return getattr(_open("compose"), name) if name in ("draw", "error_picture", "frame", "redraw") else _open(name)
