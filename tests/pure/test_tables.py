"""Tables at the widths of terminals: what leaves, what wraps, what is said, and that no number is cut."""

from __future__ import annotations

import io
import random
import re

import narrow
import pytest
from rich.console import Console
from rich.text import Text

from harness.terminal import printing, tables

COLUMNS = ("test", "kernel", "arithmetic", "pass", "timing", "max |error|", "ms", "TFLOP/s", "vs torch", "verdict", "why")
ROWS = [
    ("S512", "fa2", "f32", "FOR", "warm", 3.87e-07, 0.01234, None, None, "PASS", ""),
    ("S512", "scalar2d_row_tile", "f32", "FOR", "warm", 1.25e-07, 12345.0, None, None, "REFUSED", "head dim 200 is wider than 128"),
]


@pytest.mark.parametrize("width", [40, *narrow.WIDTHS, 200])
def test_no_number_is_cut(width: int) -> None:
    """Every word of a column that stays is whole; a wide terminal loses nothing, a narrow one says what it lost."""
    laid = narrow.hold(COLUMNS, ROWS, width)
    if width >= 140:
        assert not (laid.shared or laid.left_out or laid.turned)
    if width == 80:
        assert laid.shared and not laid.turned and "max |error|" not in laid.left_out
    assert laid.turned == (width <= 60)


def test_the_check_sees_a_cut_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is too narrow for its numbers."""
    right = tables._widths
    monkeypatch.setattr(
        tables,
        "_widths",
        lambda columns, width: [w - 4 * (c.name == "max |error|") for c, w in zip(columns, right(columns, width), strict=True)],
    )
    with pytest.raises(AssertionError, match="cut or lost"):
        narrow.hold(COLUMNS, ROWS, 80)


def test_random_tables() -> None:
    """Names and numbers of random lengths under the names of columns that verbs print."""
    draw = random.Random(7)
    names = [*tables.LEAST, *tables.PROSE, *tables.STAY, "ms", "B / A", "counter"]
    for _ in range(60):
        columns = draw.sample(names, draw.randint(2, 12))
        rows = [
            [draw.choice([None, "", draw.random() * 10 ** draw.randint(-9, 9), "x" * draw.randint(1, 30), "two words"]) for _ in columns]
            for _ in range(draw.randint(1, 5))
        ]
        for width in narrow.WIDTHS:
            narrow.hold(columns, rows, width)


@pytest.mark.parametrize("width", [60, 140])
def test_what_is_said(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal, which columns have one value and which were left out; on a pipe the whole table, whatever COLUMNS is."""
    monkeypatch.setenv("COLUMNS", str(width))
    printing.table(COLUMNS, ROWS)
    found = capsys.readouterr()
    assert all(name in found.out for name in COLUMNS) and not found.err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    printing.table(COLUMNS, [ROWS[0], ("S33", "naive", *ROWS[0][2:])])
    found = capsys.readouterr()
    text = Text.from_ansi(found.out).plain
    assert ("in every row: arithmetic f32" in text) == (width == 60)
    assert re.search(r" 3\.87e-07 ", text)
    printing.table(("shape", "idea", "some name"), [("B1", "x" * width, "y" * 30)])
    assert f"turned, as {width} columns are too few for 3" in capsys.readouterr().err
    printing.table(("kernel", "from", "ms"), [("fa2", "x" * width, 1.5)])
    assert f"left out at {width} columns: from; a wider terminal, --json or | cat shows them" in capsys.readouterr().err


def test_a_long_sentence_takes_few_lines_and_nothing_takes_none() -> None:
    """Why a variant was left out is a sentence of 200 letters: other columns make room. A column in which nothing stands is not shown."""
    why = " ".join(["it needs more shared memory"] * 8)
    rows = [(f"BLOCK_Q={size}", "PRUNED", None, "", 168, why) for size in (32, 64)]
    laid = tables.lay_out(("variant", "status", "ms", "energy", "registers", "why"), rows, 100)
    text = printing_of(laid)
    assert "ms" not in text.split("\n")[0] and "energy" not in text
    assert len(text.split("\n")) <= 2 + 2 * (tables.LINES + 1), text


def printing_of(laid: tables.Laid) -> str:
    """A table as a terminal of 100 columns shows it."""
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(laid.body)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
