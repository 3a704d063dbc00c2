"""The figure of the climb: which shapes it takes, its bars and lines with their values, and that a recorded folder gives it again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
from rows import CPU, GPU, append_row, row

from harness.problem import Problem
from harness.report import compose as report
from harness.report import ladder, views
from harness.row import Row

LARGE, WIDE, OTHER = (
    Problem.of(8, 16, 2048, 64),
    Problem.of(4, 16, 4096, 128, dtype="bfloat16"),
    Problem.of(1, 2, 128, 128, dtype="bfloat16"),
)
STEPS = {f"step{number}": number for number in range(12)}


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder of twelve steps, the last four of them on tensor cores."""
    kernels = [
        SimpleNamespace(name=name, number=n, pass_="forward", aliases=(), arithmetic="f32", tensor_cores=n > 7, float16_products=1)
        for name, n in STEPS.items()
    ]
    for module in (views, ladder):
        monkeypatch.setattr(module, "catalogue", lambda: kernels)


def at(kernel: str, test: str, tflops: float, problem: Problem, **other: Any) -> Row:
    """A row of a rate."""
    return row(kernel, test, problem.flops("forward") / (tflops * 1e9), problem, **other)


def rows(count: int = 8) -> list[Row]:
    """Steps 0 to 7 in float32, 6 to 11 in bfloat16 on one shape and two of them on another, and peers."""
    found = [at(f"step{n}", "float32", 3.0 + n * n, LARGE) for n in range(count)]
    found += [at(f"step{n}", "bfloat16", 10.0 * n, WIDE) for n in (11, 6, 7, 8, 9, 10)]
    found += [at(f"step{n}", "small", 900.0, OTHER) for n in (8, 9)]
    return [
        *found,
        at("torch-flash", "bfloat16", 345.0, WIDE),
        at("torch-cudnn", "bfloat16", 590.0, WIDE),
        at("mine", "bfloat16", 1.0, WIDE),
    ]


def drawn(found: list[Row], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, plt.Figure]:
    """The figures report draws of the climb, by file name."""
    figures: dict[str, plt.Figure] = {}
    monkeypatch.setattr(report, "save", lambda figure, path: figures.setdefault(path.name, figure) and path)
    report.draw(found, folder, "ladder", "The ladder")
    return {
        name: figure
        for name, figure in figures.items()
        if name.removesuffix(".png").split("_")[-1] == "ladder" or name.startswith("ladder_c")
    }


def test_bars_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel a dtype, the shape most steps have, steps in order with value and gain; peers are lines, name and value in the legend."""
    figure = drawn(rows(), tmp_path, monkeypatch)["ladder.png"]
    left, right = figure.axes
    assert left.get_title() == "float32, B8 H16 S2048 D64" and right.get_title() == "bfloat16, B4 H16 S4096 D128"
    assert [bar.get_height() for bar in left.patches] == pytest.approx([3.0 + n * n for n in range(8)])
    assert [bar.get_height() for bar in right.patches] == pytest.approx([60, 70, 80, 90, 100, 110])
    assert [text.get_text() for text in right.get_xticklabels()] == [f"{n:02} step{n}" for n in range(6, 12)]
    said = [text.get_text() for text in right.texts]
    assert {"60", "×1.17", "110", "×1.1"} <= set(said) and said[1] == "×1.17"
    assert {line.get_ydata()[0] for line in right.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == 0} >= {345.0, 590.0}
    low, high = right.get_ylim()
    assert low == 0 and high > 590
    colours = [bar.get_facecolor() for bar in right.patches]
    assert colours[0] == colours[1] != colours[2] == colours[5]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:2] == ["products on CUDA cores", "products on tensor cores"] and {"torch-flash 345", "torch-cudnn 590"} <= set(legend)
    assert "not causal" in figure.get_suptitle() and any("NVIDIA H200" in text.get_text() for text in figure.texts)


def test_the_legend_is_no_wider_than_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow panel with all that a legend can have: both units and three peers."""
    found = [at(f"step{n}", "float32", 3.0 + n, LARGE) for n in range(4, 10)]
    found += [at(name, "float32", rate, LARGE) for name, rate in (("torch-math", 19.0), ("torch-efficient", 34.0), ("triton", 11.5))]
    figure = drawn(found, tmp_path, monkeypatch)["ladder.png"]
    figure.draw_without_rendering()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert len(figure.legends[0].get_texts()) == 6 and box.x0 >= whole.x0 and box.x1 <= whole.x1


def test_other_runs_have_no_such_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel needs six timed steps on one shape; processor and GPU do not share one."""
    left_out = rows(5)
    alone = drawn(left_out, tmp_path, monkeypatch)["ladder.png"]
    assert [axis.get_title() for axis in alone.axes] == [""] and "B4 H16 S4096 D128, bfloat16, not causal" in alone.get_suptitle()
    assert not drawn([r for r in left_out if r.dtype == "float32"], tmp_path, monkeypatch)
    mixed = [at(f"step{n}", "float32", 1e-3 * (n + 1), LARGE, **(CPU if n < 6 else GPU)) for n in range(8)]
    found = drawn(mixed, tmp_path, monkeypatch)
    assert list(found) == ["ladder_cpu.png"] and "CPU time" in found["ladder_cpu.png"].get_suptitle()
    assert found["ladder_cpu.png"].axes[0].get_ylabel().startswith("GFLOP/s")


def test_report_of_a_folder(tmp_path: Path) -> None:
    """results.csv alone gives ladder.png."""
    for each in rows():
        append_row(tmp_path / "results.csv", each)
    assert tmp_path / "ladder.png" in report.redraw(tmp_path, None, "ladder", "The ladder")
    assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"
