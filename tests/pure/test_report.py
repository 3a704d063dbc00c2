"""Figures and summary of a run: what is on each axis, that nothing is dropped in silence, and that the files alone are enough."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from rows import CPU, RUN, append_row, row

from harness import results
from harness.fault import DataFault, DiskFault
from harness.problem import Problem
from harness.report import compose as report
from harness.report import figures, style
from harness.report.summary import summary
from harness.report.views import by_head_dim, families, latest, limiter, roofs, views
from harness.row import TYPES, Row

ROOT = Path(__file__).resolve().parent.parent.parent


def lengths(*kernels: str, upto: int = 4, **other: Any) -> list[Row]:
    """Rows of kernels over the lengths 128, 256 ..., the later kernel half as fast."""
    return [row(k, f"S{128 << i}", 4.0**i * 2.0**j, **other) for i in range(upto) for j, k in enumerate(kernels)]


def ceilings(**rates: float) -> list[Row]:
    """Rows of ceilings: gemm_float32 in TFLOP/s, copy in GB/s, exp in 10^12 a second."""
    found = []
    for name, rate in rates.items():
        kind = {"Bandwidth_GBps": rate, "TFLOPS": None} if name == "copy" else {"Bandwidth_GBps": None, "TFLOPS": rate}
        found.append(row("ceiling-" + name.replace("_", "-"), "S8192", 1.0, **kind))
    return found


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    """No figure is left open."""
    yield
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, plt.Figure]:
    """The figures that draw saved, by file name, kept to look at."""
    found: dict[str, plt.Figure] = {}

    def keep(figure: plt.Figure, path: Path, dpi: int = 300) -> Path:
        found[path.name] = figure
        return path

    monkeypatch.setattr(report, "save", keep)
    return found


def curves(axis: Any) -> dict[str, list[tuple[float, float]]]:
    """The labelled lines of an axis: kernel -> points."""
    return {
        str(line.get_label()): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in axis.lines
        if not str(line.get_label()).startswith("_")
    }


def texts(figure: plt.Figure) -> str:
    """Every word of a figure: titles, axis labels, ticks, notes, legends, footer."""
    figure.draw_without_rendering()  # which makes the tick labels
    return "\n".join(text.get_text() for text in figure.findobj(plt.Text))


# -- the figures ------------------------------------------------------------------------------------------------------------


def test_seqlen_analysis(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Four panels over log2 S: time, speed-up over the fastest torch backend, TFLOP/s, GB/s, each the row's own value."""
    both = lengths("torch-math", "fa2")
    rows = [found for pair in zip(both[::2], both[1::2], strict=True) for found in results.with_torch(pair)]
    report.draw(rows, tmp_path)
    figure = drawn["seqlen_analysis.png"]
    time, speed, flops, bandwidth = figure.axes
    for axis in figure.axes:
        assert axis.get_xscale() == "log" and set(curves(axis)) == {"torch-math", "fa2"}
    for axis in (flops, bandwidth):
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["128", "256", "512", "1024"]
    assert time.get_yscale() == "log" and time.get_ylabel().startswith("time, ms")
    assert curves(time)["fa2"] == [(128, 2), (256, 8), (512, 32), (1024, 128)]
    assert speed.get_ylabel() == "speed-up over the fastest torch backend"
    assert curves(speed)["fa2"] == [(s, 0.5) for s in (128, 256, 512, 1024)]
    by_hand = 4 * 4 * 8 * 64 * 128 * 128 / (2e-3 * 1e12)
    assert flops.get_ylabel() == "TFLOP/s" and curves(flops)["fa2"][0] == (128, pytest.approx(by_hand))
    assert bandwidth.get_ylabel().startswith("GB/s")
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", "sequence length S", "sequence length S"]


def test_bars_are_p20_to_p80(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """In the time and, turned over, in the rates."""
    report.draw(lengths("fa2"), tmp_path)
    time, _, flops, _ = drawn["seqlen_analysis.png"].axes
    (low, high) = time.collections[0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(0.9), pytest.approx(1.2))
    (low, high) = flops.collections[0].get_segments()[0][:, 1]
    middle = curves(flops)["fa2"][0][1]
    assert (low, high) == (pytest.approx(middle / 1.2), pytest.approx(middle / 0.9))


def test_kernel_comparison(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Shapes by name, points side by side and not joined."""
    shapes = {"Small-1": Problem.of(1, 1, 128, 64), "Stress-1": Problem.of(8, 16, 2048, 64)}
    report.draw([row(k, t, ms, p) for t, p in shapes.items() for k, ms in (("naive", 2.0), ("fa2", 0.5))], tmp_path)
    assert set(drawn) == {"kernel_comparison.png"}  # two unlike shapes are no family
    axes = drawn["kernel_comparison.png"].axes
    assert [tick.get_text() for tick in axes[2].get_xticklabels()] == ["Small-1 (B1 H1 S128)", "Stress-1 (B8 H16 S2048)"]
    assert [round(x) for x, _ in curves(axes[0])["fa2"]] == [0, 1] and [y for _, y in curves(axes[0])["fa2"]] == [0.5, 0.5]
    assert curves(axes[0])["naive"][0][0] < curves(axes[0])["fa2"][0][0]
    assert all(line.get_linestyle() == "None" for line in axes[0].lines)
    assert axes[1].get_ylabel() == "speed-up over naive"  # without torch, the first kernel with every time
    assert curves(axes[1])["fa2"][0][1] == 4.0


def test_a_row_without_a_time_is_a_word(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """A failure in part stands at its shape and in the legend; a kernel without any time stands in the legend of every figure."""
    rows = lengths("fa2", "naive") + [row("fa3", f"S{s}", None, Status="ABSENT") for s in (128, 256)]
    rows[-3] = row("naive", "S1024", None)
    report.draw(rows, tmp_path)
    assert {"kernel_comparison.png", "seqlen_analysis.png", "latency_scaling.png"} <= set(drawn)
    for name in ("kernel_comparison.png", "seqlen_analysis.png", "latency_scaling.png"):
        words = texts(drawn[name])
        assert "naive FAIL" in words and "naive (FAIL in part)" in words and "fa3: ABSENT" in words, name
        assert "fa3 ABSENT" not in words  # not again at every shape
        assert len(curves(drawn[name].axes[0])["naive"]) == 3
        assert "fa3" not in curves(drawn[name].axes[0])


def test_nothing_passed_is_no_picture(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """No empty axes of times; the errors that made them fail are a picture all the same."""
    assert report.draw([row("fa2", "S128", None)], tmp_path) == []
    report.draw([row("fa2", f"S{s}", None, MaxError_O=float("inf")) for s in (128, 256)], tmp_path)
    assert set(drawn) == {"error_vs_S.png"} and "fa2 FAIL" in texts(drawn["error_vs_S.png"])


def test_cpu_and_gpu_never_share_a_figure(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Separate files, and the words that keep CPU time apart; the GPU's figures do not have them."""
    report.draw(lengths("fa2") + lengths("numpy", **CPU), tmp_path)
    for name, figure in drawn.items():
        cpu = name.endswith("_cpu.png")
        assert ("CPU time (host backend), not GPU performance" in texts(figure)) == cpu
        assert ("NVIDIA H200" in texts(figure)) != cpu
        for axis in figure.axes:
            assert not ({"fa2", "numpy"} - ({"numpy"} if cpu else {"fa2"})) & set(curves(axis))
    assert {"seqlen_analysis.png", "seqlen_analysis_cpu.png"} <= set(drawn)


def test_passes_dtypes_and_masks_have_files_of_their_own(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """BACKWARD_ and BOTH_ as seed 002 names them; what varies is in the name, what does not is not."""
    report.draw([row("fa2", "x", 1.0, Problem.of(), mode) for mode in TYPES], tmp_path, "three")
    assert set(drawn) == {f"three_{prefix}kernel_comparison.png" for prefix in ("", "BACKWARD_", "BOTH_")}
    drawn.clear()
    report.draw([row("fa2", "x", 1.0, Problem.of(dtype=d, causal=c)) for d in ("float16", "float32") for c in (True, False)], tmp_path)
    assert set(drawn) == {f"kernel_comparison_{d}_{c}.png" for d in ("float16", "float32") for c in ("causal", "full")}


def test_latency_scaling(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Warm as lines, cold as hollow marks, and how the work grows: four times for each doubling of S."""
    rows = lengths("fa2")
    report.draw([*rows, *(replace(r, timing="cold", KernelTime_ms=float(r.KernelTime_ms or 0) * 3) for r in rows)], tmp_path)
    axis = drawn["latency_scaling.png"].axes[0]
    found = curves(axis)
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [y for _, y in found["fa2"]] == [1, 4, 16, 64] == pytest.approx([y for _, y in found["the work"]])
    hollow = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_ydata()) for line in hollow] == [[3, 12, 48, 192]]
    assert "hollow: cold" in texts(drawn["latency_scaling.png"])
    assert [y for _, y in curves(drawn["seqlen_analysis.png"].axes[0])["fa2"]] == [1, 4, 16, 64]  # warm alone


def test_memory(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Each kernel's peak beside the S x S matrix and the tensors, in bytes on a base-2 axis with binary units."""
    report.draw(lengths("fa2"), tmp_path)
    axis = drawn["memory.png"].axes[0]
    found = curves(axis)
    assert found["fa2"][0] == (128, 1 << 20)
    assert found["the S × S matrix in float32"][-1] == (1024, 4 * 8 * 1024 * 1024 * 4)
    assert found["inputs and outputs"][-1] == (1024, 4 * 8 * 1024 * (4 * 64 + 1) * 4)
    assert "MiB" in texts(drawn["memory.png"]) and "memory" in axis.get_ylabel()


def test_roofline(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Kernels at (FLOPs a byte, TFLOP/s); ceilings as dashed lines with their values, and in the panels of rates."""
    report.draw(lengths("fa2") + ceilings(gemm_float32=50.0, copy=4000.0, exp=3.0), tmp_path)
    axis = drawn["roofline.png"].axes[0]
    p = Problem.of(4, 8, 128, 64)
    assert curves(axis)["fa2"][0] == pytest.approx((p.flops("forward") / p.bytes("forward"), p.flops("forward") / 1e9))
    slope = curves(axis)["ceiling-copy"]
    assert slope[0][1] == pytest.approx(slope[0][0] * 4.0) and max(y for _, y in slope) <= 50
    levels = {line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--" and len(set(line.get_ydata())) == 1}
    assert {50.0, 3.0 * 4 * 64} <= levels
    words = texts(drawn["roofline.png"])
    assert "GEMM float32 50 TFLOP/s, measured in this run" in words and "copy 4,000 GB/s, measured in this run" in words
    assert "TFLOP/s" in axis.get_ylabel() and "FLOPs a byte" in axis.get_xlabel()
    assert "GEMM float32 50 TFLOP/s" in texts(drawn["seqlen_analysis.png"])
    assert not any("ceiling" in name for axis in drawn["seqlen_analysis.png"].axes for name in curves(axis))


def test_error_vs_s(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """A panel a tensor, the class of arithmetic in the legend, a failure in words."""
    rows = [replace(r, MaxError_O=1e-6 * r.SeqLen, MaxError_logsumexp=1e-7) for r in lengths("fa2", "torch-math")]
    rows.append(row("naive", "S1024", None, MaxError_O=0.5))
    report.draw(rows, tmp_path)
    figure = drawn["error_vs_S.png"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["max |error| of O", "max |error| of logsumexp"]
    assert curves(figure.axes[0])["fa2"] == [(s, pytest.approx(1e-6 * s)) for s in (128, 256, 512, 1024)]
    assert "fa2 [f32]" in texts(figure) and "naive FAIL" in texts(figure) and "half an ulp of 1 in float32" in texts(figure)


def test_a_kernel_looks_the_same_in_every_figure(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Colour and marker by name; no two kernels or peers look alike."""
    report.draw(lengths("fa2", "naive", "mine"), tmp_path)
    looks: dict[str, set[Any]] = {"fa2": set(), "naive": set(), "mine": set()}
    for name in ("kernel_comparison.png", "seqlen_analysis.png", "latency_scaling.png", "memory.png"):
        for line in drawn[name].axes[0].lines:
            if line.get_label() in looks:
                looks[line.get_label()].add((line.get_color(), line.get_marker()))
    assert all(len(found) == 1 for found in looks.values())
    names = [*dict.fromkeys(k.name for k in style.catalogue()), *style.peers.names()]
    assert len({(s["color"], s["marker"], str(s["linestyle"])) for s in map(style.look_of, names)}) == len(names)


def test_footer_says_what_when_and_where(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Device, pass, dtype, mask, timing, day and commit, so that a picture alone can be traced."""
    report.draw(lengths("fa2"), tmp_path, env={"run_id": RUN, "git_commit": "0123456789abcdef"})
    assert "NVIDIA H200 · forward, float32, not causal, warm · 2026-11-20 · commit 0123456789" in texts(drawn["seqlen_analysis.png"])


def test_files_are_pictures_and_the_folder_is_enough(tmp_path: Path) -> None:
    """results.csv and env.json alone give every figure at 300 dpi and the summary; elsewhere the names start with the experiment's."""
    for each in lengths("fa2", "naive", upto=2):
        append_row(tmp_path / "results.csv", each)
    (tmp_path / "env.json").write_text(json.dumps({"git_commit": "feedbeef00", "command": ["fa-cli", "experiment"]}))
    made = report.redraw(tmp_path, title="Title")
    wanted = {"kernel_comparison", "seqlen_analysis", "latency_scaling", "memory", "error_vs_S"}
    assert {path.name for path in made} == {"summary.md"} | {f"{name}.png" for name in wanted}
    from PIL import Image

    for path in made[1:]:
        with Image.open(path) as image:
            assert image.format == "PNG" and round(image.info["dpi"][0]) == 300
    assert "fa-cli experiment" in (tmp_path / "summary.md").read_text()
    elsewhere = report.redraw(tmp_path, tmp_path / "plots", "seqlen")
    assert {path.name for path in elsewhere[1:]} == {f"seqlen_{name}.png" for name in wanted}


def test_faults(tmp_path: Path) -> None:
    """No rows is a data fault, a folder that cannot be made a disk fault."""
    with pytest.raises(DataFault, match=r"results\.csv is missing"):
        report.redraw(tmp_path)
    append_row(tmp_path / "results.csv", row("fa2", "S128", 1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault):
        report.redraw(tmp_path, tmp_path / "file" / "plots")


def test_error_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst cell is marked and named; what is not finite is worse than any number; all zeros is no fault."""
    kept: list[plt.Figure] = []
    monkeypatch.setattr(plt, "close", kept.append)
    errors = np.full((64, 8), 1e-6)
    errors[40, 3] = 0.25
    assert report.error_picture(errors, "O of fa2", tmp_path / "error_O.png").read_bytes()[:4] == b"\x89PNG"
    errors[50, 1] = np.inf
    report.error_picture(errors, "O of fa2", tmp_path / "error_O.png")
    report.error_picture(np.zeros((4, 1)), "zero", tmp_path / "zero.png")
    assert "worst: row 40, block 3: 0.25" in kept[0].axes[0].get_title()
    assert "worst: row 50, block 1: not finite" in kept[1].axes[0].get_title()
    assert (kept[0].axes[0].lines[0].get_xdata()[0], kept[0].axes[0].lines[0].get_ydata()[0]) == (3, 40)
    assert "|error|" in kept[0].axes[1].get_ylabel()


# -- views and the summary ---------------------------------------------------------------------------------------------------


def test_the_latest_row_counts() -> None:
    """A row measured again replaces the old one; a failure replaces every timing; a time replaces a failure."""
    warm = row("fa2", "S128", 1.0)
    cold, again, failed = replace(warm, timing="cold"), replace(warm, KernelTime_ms=2.0), row("fa2", "S128", None)
    assert latest([warm, cold, again]) == [again, cold]
    assert latest([warm, cold, failed]) == [failed]
    assert latest([failed, warm]) == [warm]


def test_families() -> None:
    """Shapes that differ in S only; at a fixed number of tokens too; not the ten mixed shapes of a comparison."""
    assert [f.suffix for f in families(views(lengths("fa2"))[0])] == [""]
    tokens = [row("fa2", f"S{s}", 1.0, Problem.of(4096 // s, 2048 // d, s, d)) for d in (64, 128) for s in (512, 1024, 2048, 4096)]
    (view,) = views(tokens)
    assert [f.suffix for f in families(view)] == ["_D64", "_D128"] and [len(f.rows) for f in families(view)] == [4, 4]
    mixed = [row("fa2", str(i), 1.0, Problem.of(*shape)) for i, shape in enumerate([(1, 1, 128), (2, 8, 256), (2, 8, 512), (8, 16, 32)])]
    assert families(views(mixed)[0]) == []
    assert [v.suffix for v in by_head_dim(view, most=7)] == ["_D64", "_D128"] and by_head_dim(view) == [view]


def test_what_limits_a_kernel() -> None:
    """The lowest ceiling is named with the part of it that is reached, at the largest problem; by hand for S = 1024."""
    rows = [row("fa2", "S1024", 1.0), row("naive", "S1024", 100.0)]
    (view,) = views(rows + ceilings(gemm_float32=10.0, copy=100.0, exp=0.01))
    work = 4 * 4 * 8 * 64 * 1024**2 / 1e9  # TFLOP/s in a millisecond: 8.59
    byte = 4 * 8 * 1024 * (4 * 64 + 1) * 4
    roof = {each.name: each.tflops for each in roofs(view, rows[0])}
    assert roof == pytest.approx({"memory bandwidth": 0.1 * work * 1e9 / byte, "arithmetic": 10.0, "exponentials": 0.01 * 256})
    assert [each.name for each in roofs(view, rows[0])] == ["exponentials", "arithmetic", "memory bandwidth"]
    assert "faster units" in str(limiter(view, "fa2")) and "no ceiling is near" in str(limiter(view, "naive"))
    (view,) = views(rows + ceilings(gemm_float32=10.0, copy=1e6, exp=100.0))
    assert "86% of the lowest ceiling, arithmetic (10 TFLOP/s by GEMM float32 10 TFLOP/s" in str(limiter(view, "fa2"))
    assert str(limiter(view, "fa2")).endswith("arithmetic limits it.")
    assert limiter(views(rows)[0], "fa2") is None


def test_summary() -> None:
    """Times by shape with the best in bold, failures in words, geometric means over the shapes all kernels have, machine, command."""
    rows = [row("naive", "S128", 2.0), row("fa2", "S128", 0.5), row("naive", "S256", 8.0), row("fa2", "S256", 1.0)]
    rows += [
        row("naive", "S512", None),
        row("fa2", "S512", 4.0, ErrorMessage="THROTTLED (power brake)"),
        row("fa3", "S512", None, Status="ABSENT"),
    ]
    text = summary(rows, {"device_name": "NVIDIA H200", "command": ["fa-cli", "experiment", "--seqlen"]}, "Title")
    assert text.startswith("# Title\n\n## forward, float32, not causal, warm — NVIDIA H200\n")
    assert "| shape | naive | fa2 | fa3 |" in text
    assert "| S128 | 2 | **0.5** |  |" in text and "| S512 | FAIL | **4†** | ABSENT |" in text
    assert "over the 2 of 3 shapes" in text
    assert "| naive | 4 |" in text and "| fa2 | 0.7071 |" in text  # sqrt(2 * 8), sqrt(0.5 * 1)
    assert "- naive FAIL (S512): naive is wrong" in text and "THROTTLED (power brake)" in text
    assert "Command: `fa-cli experiment --seqlen`" in text and "date 2026-11-20" in text
    assert "not GPU performance" not in text and "not GPU performance" in summary(lengths("fa2", **CPU), {})


def test_frame_has_a_column_a_field() -> None:
    """For notebooks."""
    frame = report.frame([row("fa2", "S128", 1.0)])
    assert frame.loc[0, "KernelTime_ms"] == 1.0 and list(frame.columns[:3]) == ["Test", "Kernel", "Type"]


#: The functions of figures.py that draw a View.
OF_A_VIEW = {
    n: f for n, f in inspect.getmembers(figures, inspect.isfunction) if list(inspect.signature(f).parameters) == ["view", "title", "footer"]
}


def test_a_view_with_nothing_to_draw_is_no_figure() -> None:
    """Each function returns None for it."""
    (view,) = views([row("fa2", "S128", None, MaxError_O=None)])
    assert all(function(view, "t", "f") is None for function in OF_A_VIEW.values())


def test_every_figure_is_in_the_table_of_plots(drawn: dict[str, plt.Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has values for all of them draws what plots/README.md lists, and nothing else."""
    for name in OF_A_VIEW:
        monkeypatch.setattr(figures, name, lambda *_: plt.figure())
    report.draw(lengths("naive", "tiled", "flash_naive", "fa1", "flash_2d", "fa2_naive", "fa2"), tmp_path)
    table = re.findall(r"(?m)^\| `(\w+)` \|", (ROOT / "plots" / "README.md").read_text())
    assert sorted(path.removesuffix(".png") for path in drawn) == sorted(table)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """README's cells, with the checkout's name of the package; tests/torch/test_torch_op.py runs the one that needs torch."""
    cells = re.findall(r"```python\n(?!import torch)(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    for cell in cells:
        homes = {"Problem": "problem", "experiment": "experiment", "frame": "report", "run": "run"}
        names = re.search(r"^from fa_cli import (.*)$", cell, re.M)[1].split(", ")
        exec(re.sub(r"^from fa_cli .*$", "; ".join(f"from harness.{homes[n]} import {n}" for n in names), cell, flags=re.M), {})
    said = capsys.readouterr().out
    assert len(cells) == 2 and "KernelTime_ms" in said and "True" in said
