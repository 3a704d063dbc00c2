"""The picture of a sweep: drawn from rows, failed rows named and not drawn."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from harness import report
from harness.results import Row


def row(kernel: str, length: int, time: float | None, test: str = "", type_: str = "FOR", heads: int = 8) -> Row:
    """A row with what the picture needs."""
    return Row(
        Test=test or f"S{length}", Kernel=kernel, Type=type_, Batch=4, Heads=heads, SeqLen=length, HeadDim=64,
        Status="PASS" if time else "FAIL", KernelTime_ms=time, heads_kv=heads, seq_kv=length, dtype="float32", causal=False, scale=0.125,
        device="cpu", device_name="a processor",
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[plt.Figure]:
    """The figures that were saved, kept open to look at."""
    figures: list[plt.Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def test_time_over_length(drawn: list[plt.Figure], tmp_path: Path) -> None:
    """Both axes logarithmic, a line a kernel with the times given, and the words that keep CPU time apart."""
    rows = [row("naive", 64, 1.5), row("fa2", 64, 0.5), row("naive", 128, 6.0), row("fa2", 128, 2.0)]
    assert report.times(rows, "Title", tmp_path / "x.png") == tmp_path / "x.png"
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    (axis,) = drawn[0].axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    lines = {tuple(line.get_ydata()) for line in axis.lines if len(line.get_ydata())}
    assert lines == {(1.5, 6.0), (0.5, 2.0)}
    assert "not GPU performance" in drawn[0].get_suptitle()


def test_failed_rows_are_named_and_not_drawn(drawn: list[plt.Figure], tmp_path: Path) -> None:
    """A FAIL has no time, so no point; the picture says that it is missing."""
    rows = [row("naive", 64, 1.5), row("fa2", 64, None), row("naive", 128, 6.0), row("fa2", 128, None)]
    report.times(rows, "Title", tmp_path / "x.png")
    assert drawn[0].get_supxlabel() == "not drawn: fa2 FAIL (2)"
    assert {tuple(line.get_ydata()) for line in drawn[0].axes[0].lines if len(line.get_ydata())} == {(1.5, 6.0)}


def test_nothing_passed_is_no_picture(tmp_path: Path) -> None:
    """No empty axes."""
    assert report.times([row("fa2", 64, None)], "Title", tmp_path / "x.png") is None
    assert not (tmp_path / "x.png").exists()


def test_unlike_shapes_are_points_by_test(drawn: list[plt.Figure], tmp_path: Path) -> None:
    """A line would join shapes that have nothing between them; one panel a pass."""
    rows = [row("fa2", 64, 1.0, "Small", t) for t in ("FOR", "BAC")] + [row("fa2", 128, 3.0, "Large", t, heads=16) for t in ("FOR", "BAC")]
    report.times(rows, "Title", tmp_path / "x.png")
    assert [axis.get_title() for axis in drawn[0].axes] == ["forward", "backward"]
    points = drawn[0].axes[0].collections[0].get_offsets().tolist()
    assert points == [[0.0, 1.0], [1.0, 3.0]]


def test_frame_has_a_column_a_field() -> None:
    """For notebooks."""
    frame = report.frame([row("fa2", 64, 1.0)])
    assert frame.loc[0, "KernelTime_ms"] == 1.0 and list(frame.columns[:3]) == ["Test", "Kernel", "Type"]
