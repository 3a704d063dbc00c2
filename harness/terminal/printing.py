"""Ways to print: tables (plain text where stdout is no terminal), one JSON document, notes. Verbs use them through show.py.

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
from rich.table import Table
from rich.text import Text

from .options import shown
from .progress import clear

QUIET, VERBOSE = -1, 1
_STYLES = {"PASS": "bold green", "OK": "green", "FAIL": "bold red", "ERROR": "bold red", "SPILLS": "bold red", "WARN": "yellow"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, numbers right-aligned. Where stdout is no terminal it is plain aligned text, nothing cut or wrapped."""
    clear()
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = any(isinstance(row[index], (int, float)) for row in cells)
        made.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        made.add_row(*(Text(text := _text(value), style=_STYLES.get(text, "")) for value in row))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(made)
        return
    console = Console(highlight=False, width=100_000)
    with console.capture() as captured:
        console.print(made)
    print("\n".join(text.rstrip() for text in captured.get().splitlines()))


def line(*parts: str) -> None:
    """One line of result on stdout; of one that starts with a verdict, the verdict is coloured on a terminal."""
    clear()
    word, space, rest = " ".join(p for p in parts if p).partition(" ")
    Console(highlight=False, soft_wrap=True).print(Text(word, style=_STYLES.get(word, "")) + space + rest)


def note(text: str) -> None:
    """A line about the result, on stderr."""
    clear()
    print(f"note: {shown(text)}", file=sys.stderr)


def document(value: object) -> None:
    """The one JSON document of a verb. What is not finite or not measured is null."""
    clear()
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def near(path: Path) -> Path:
    """A path as a person would type it: relative where it lies below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


# -- details ----------------------------------------------------------------------------------------------------------


def _cell(value: object) -> object:
    return value.item() if hasattr(value, "item") else value  # a numpy scalar


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) and (value == 0 or 1e-2 <= abs(value) < 1e5) else f"{value:.2e}"
    return str(value)


def _plain(value: object) -> object:
    """A value as JSON has it: dataclasses and mappings as objects, paths as text, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = _cell(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
