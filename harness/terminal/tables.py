"""A table as text for a terminal of some width. A number or a name is never cut in two.

On a terminal a column in which nothing stands is left out. What does not fit is made narrower in this order, and each step is said:
- headers, and columns of prose (PROSE), wrap at spaces;
- columns that have one value in every row stand in a line below the table instead;
- the columns of LEAST are left out, in that order;
- the table is turned: each row becomes a few lines, a column a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ..fault import printable

#: Columns whose cells are words, of a sentence, a list or a shape: they wrap at spaces, to no fewer letters than this.
PROSE = {"why": 20, "idea": 24, "question": 20, "found": 20, "what": 20, "shape": 14, "dtypes": 16, "passes": 8, "also": 6}
#: Columns that a narrow table does without: the first leaves first.
LEAST = (
    *("from", "arithmetic", "deterministic", "mean |error|", "MSE", "p20", "p80", "samples", "GB/s", "MB sent"),
    *("max |difference| to one device", "peak MB a step", "ms a step", "seconds", "shared", "budget", "also", "arch", "D up to"),
    *("TFLOP/s", "A ms", "B ms", "95% interval"),
)
#: Columns that stay columns, whatever their values: what a row is, and what is asked of it.
STAY = ("verdict", "status", "kernel", "test", "tensor")
#: Lines of a row at most, as long as other columns can make room.
LINES = 4
GAP = 2
NOTHING = ("", "-")


@dataclass(frozen=True)
class Laid:
    """A table laid out: what is printed, what all rows share as (column, value), which columns were left out, whether it was turned."""

    body: Table | Text
    shared: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    turned: bool = False


def lay_out(
    columns: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None, styles: Callable[[str], str] = lambda text: ""
) -> Laid:
    """Lay out a table, numbers right-aligned, in `width` columns of a terminal; None: however wide it becomes, nothing is left out."""
    made = [_Column.of(name, [row[index] for row in rows]) for index, name in enumerate(columns)]
    shared: list[tuple[str, str]] = []
    left_out: list[str] = []
    if width is None:
        return Laid(_drawn(made, None, styles))
    made = [made[0], *(column for column in made[1:] if column.name in STAY or set(column.cells) - set(NOTHING))]
    same = [column for column in made[1:] if len(rows) > 1 and column.name not in STAY and len(set(column.cells)) == 1]
    for column in sorted(same, key=lambda column: column.cells[0] not in NOTHING):
        if _least(made) <= width:
            break
        made.remove(column)
        if column.cells[0] not in NOTHING:
            shared.append((column.name, column.cells[0]))
    for name in LEAST:
        if _least(made) <= width:
            break
        gone = [column for column in made[1:] if column.name == name]
        made = [column for column in made if column not in gone]
        left_out += [name for _ in gone]
    if _least(made) <= width:
        return Laid(_drawn(made, width, styles), shared, left_out)
    return Laid(_turned(columns, rows, styles), turned=True)


def text_of(value: object) -> str:
    """A cell: - where nothing is known, a float to four digits, of text what can be printed."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) and (value == 0 or 1e-2 <= abs(value) < 1e5) else f"{value:.2e}"
    return printable(str(value))


# -- details ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Column:
    name: str
    cells: tuple[str, ...]
    numbers: bool

    @classmethod
    def of(cls, name: str, values: Sequence[object]) -> _Column:
        plain = [value.item() if hasattr(value, "item") else value for value in values]  # numpy scalars
        return cls(name, tuple(map(text_of, plain)), any(isinstance(value, (int, float)) for value in plain))

    @property
    def most(self) -> int:
        """The width of the widest cell, the header among them."""
        return max(map(cell_len, (self.name, *self.cells)))

    @property
    def least(self) -> int:
        """The narrowest that cuts nothing: headers wrap at spaces, and so do cells of prose, over LINES lines or one more."""
        header = max(map(cell_len, self.name.split() or [""]))
        if self.name not in PROSE:
            return max(header, max(map(cell_len, self.cells), default=0))
        words = max((cell_len(word) for cell in self.cells for word in cell.split()), default=0)
        longest = max(map(cell_len, self.cells), default=0)
        return min(self.most, max(header, words, PROSE[self.name], -(-longest // LINES)))


def _least(columns: Sequence[_Column]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """The width of each column: the widest is narrowed first, none below its least."""
    found = [column.most for column in columns]
    while sum(found) + GAP * (len(columns) - 1) > width:
        index = max((i for i, c in enumerate(columns) if found[i] > c.least), key=lambda i: found[i])
        found[index] -= 1
    return found


def _drawn(columns: Sequence[_Column], width: int | None, styles: Callable[[str], str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, letters in zip(columns, _widths(columns, width) if width else [column.most for column in columns], strict=True):
        table.add_column(Text(column.name), justify="right" if column.numbers else "left", overflow="fold", width=letters)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell, style=styles(cell)) for cell in row))
    return table


def _turned(columns: Sequence[str], rows: Sequence[Sequence[object]], styles: Callable[[str], str]) -> Text:
    """Each row as lines: its first cell, then name and value of every other one that is there."""
    made = [_Column.of(name, [row[index] for row in rows]) for index, name in enumerate(columns)]
    letters = max((cell_len(column.name) for column in made[1:]), default=0)
    text = Text()
    for index in range(len(rows)):
        text.append(f"{made[0].name} {made[0].cells[index]}\n" if made[0].name else f"{made[0].cells[index]}\n", style="bold")
        for column in made[1:]:
            if (cell := column.cells[index]) not in NOTHING:
                text.append(f"  {column.name:{letters}}  ")
                text.append(f"{cell}\n", style=styles(cell))
    text.right_crop(1)
    return text
