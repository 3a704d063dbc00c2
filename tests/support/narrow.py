"""Tables on terminals of several widths: whatever a verb prints, no number and no name is cut in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from harness.terminal import tables

WIDTHS = (60, 80, 100, 140)


def words(laid: tables.Laid, width: int) -> list[str]:
    """The lines of a table as a terminal of that width has them; a table that was turned has lines as long as they are."""
    console = Console(width=width, color_system=None, force_terminal=True, highlight=False)
    with console.capture() as captured:
        console.print(laid.body, soft_wrap=laid.turned)
    return [line.rstrip() for line in captured.get().splitlines()]


def hold(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> tables.Laid:
    """Lay a table out for a width and hold it against its rows. Raises AssertionError where a word is cut, lost or past the edge."""
    laid = tables.lay_out(columns, rows, width)
    lines = words(laid, width)
    cells = {name: [name, *(tables.text_of(row[i]) for row in rows)] for i, name in enumerate(columns)}
    gone = {*laid.left_out, *(name for name, _ in laid.shared)}
    if laid.turned:
        told = [word for line in lines for word in line.split()]
        wanted = {word for some in cells.values() for cell in some[1:] for word in cell.split() if cell not in tables.NOTHING}
        assert wanted <= set(told), f"lost in {width} columns: {wanted - set(told)}"
        return laid
    assert max(map(len, lines)) <= width, f"past the edge of {width} columns: {max(lines, key=len)!r}"
    empty = {name for name, some in cells.items() if all(cell in tables.NOTHING for cell in some[1:])}
    told_ = Counter(word for line in lines for word in line.split())
    kept = [cell for name, some in cells.items() if name not in gone | (empty - told_.keys()) for cell in some]
    lost = Counter(word for cell in kept for word in cell.split()) - told_
    assert not {word for word in lost if word != "-"}, f"cut or lost in {width} columns: {dict(lost)}\n" + "\n".join(lines)
    return laid
