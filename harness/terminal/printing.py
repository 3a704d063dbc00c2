"""Ways to print: tables (plain text where stdout is no terminal), one JSON document, notes. Verbs use them through show/.

Results go to stdout, the rest to stderr. Verdicts are words, never only colours. What is printed first takes the line of progress away.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..fault import printable
from ..problem import Problem
from .errors import shown
from .progress import clear
from .tables import Laid, lay_out

QUIET, VERBOSE = -1, 1
_STYLES = {"PASS": "bold green", "OK": "green", "FAIL": "bold red", "ERROR": "bold red", "SPILLS": "bold red", "WARN": "yellow"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, numbers right-aligned. Where stdout is no terminal it is plain aligned text, nothing left out or wrapped.

    On a terminal that is too narrow it loses columns or is turned (tables.py), never a part of a number or a name; a note says so.
    """
    clear()
    console = Console(highlight=False)
    width = console.width if console.is_terminal else None
    laid = lay_out(columns, list(rows), width, lambda text: _STYLES.get(text, ""))
    if width is None:
        print(plain(laid))
        return
    console.print(laid.body, soft_wrap=laid.turned)
    if laid.shared:
        console.print(Text("in every row: " + ", ".join(f"{name} {value}" for name, value in laid.shared)))
    how = "a wider terminal, --json or | cat shows"
    if laid.left_out:
        note(f"left out at {width} columns: {', '.join(laid.left_out)}; {how} them")
    if laid.turned:
        note(f"turned, as {width} columns are too few for {len(columns)} columns; {how} the table")


def plain(laid: Laid) -> str:
    """A table that was laid out as plain text, without spaces at the ends of lines."""
    console = Console(highlight=False, width=100_000, color_system=None)
    with console.capture() as captured:
        console.print(laid.body)
    return "\n".join(text.rstrip() for text in captured.get().splitlines())


def line(*parts: str) -> None:
    """One line of result on stdout; of one that starts with a verdict, the verdict is coloured on a terminal."""
    clear()
    word, space, rest = printable(" ".join(p for p in parts if p)).partition(" ")
    Console(highlight=False, soft_wrap=True).print(Text(word, style=_STYLES.get(word, "")) + space + rest)


def note(text: str) -> None:
    """A line about the result, on stderr."""
    clear()
    print(f"note: {shown(text)}", file=sys.stderr)


def document(value: object) -> None:
    """The one JSON document of a verb. What is not finite or not measured is null."""
    clear()
    print(json.dumps(_json(value), indent=2, allow_nan=False))


def near(path: Path) -> Path:
    """A path as a person would type it: relative where it lies below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


# -- details ----------------------------------------------------------------------------------------------------------


def _json(value: object) -> object:
    """A value as JSON has it: dataclasses and mappings as objects, paths as text, NaN and infinity as null."""
    if isinstance(value, Problem):
        value = value.record
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = value.item() if hasattr(value, "item") else value  # a numpy scalar
    return None if isinstance(value, float) and not math.isfinite(value) else value
