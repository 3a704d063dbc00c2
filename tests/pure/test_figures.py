"""Figures of a run: what is on each axis, which kernels, their colours, and that they can be read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from rows import CPU, RUN, ceilings, lengths, row

from harness.problem import Problem
from harness.report import compose as report
from harness.report import figures
from harness.report.summary import summary
from harness.report.views import views
from harness.row import TYPES

ROOT = Path(__file__).resolve().parent.parent.parent


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
    """TFLOP/s over log2 S, linear from 0, under the measured product; a burst is hollow. The title has the shape, once."""
    rows = lengths("torch-math", "fa2")
    burst = replace(rows[-1], timing="burst", TFLOPS=10 * float(rows[-1].TFLOPS or 0))
    report.draw([*rows, burst, *ceilings(gemm_float32=60.0)], tmp_path, title="Lengths")
    (axis,) = drawn["seqlen_analysis.png"].axes
    assert axis.get_xscale() == "log" and set(curves(axis)) == {"torch-math", "fa2"}
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["128", "256", "512", "1024"]
    by_hand = 4 * 4 * 8 * 64 * 128 * 128 / (2e-3 * 1e12)
    assert curves(axis)["fa2"] == [(s, pytest.approx(by_hand)) for s in (128, 256, 512, 1024)]
    assert axis.get_yscale() == "linear" and axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 60
    assert axis.get_ylabel().startswith("TFLOP/s") and axis.get_xlabel() == "sequence length S"
    dashed = [line for line in axis.lines if line.get_linestyle() == "--" and str(line.get_label()).startswith("_")]
    assert [list(line.get_ydata()) for line in dashed] == [[60.0, 60.0]]
    hollow = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in hollow] == [([1024], [pytest.approx(10 * by_hand)])]
    words = texts(drawn["seqlen_analysis.png"])
    assert "Lengths: forward, B4 H8 D64, float32, not causal" in words
    assert words.count("float32, not causal") == 1 and "burst after a rest" in words and "GEMM float32 60 TFLOP/s" in words


def test_headdim_analysis(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """D over x where only D differs; no figure of shapes by name beside it."""
    report.draw([row("fa2", f"D{d}", 1.0, Problem.of(4, 8, 1024, d)) for d in (32, 59, 64, 128)], tmp_path, "headdim")
    assert set(drawn) == {"headdim_analysis.png"}
    (axis,) = drawn["headdim_analysis.png"].axes
    work = 4 * 4 * 8 * 1024**2 / 1e9  # TFLOP/s of a head dim of 1 in a millisecond
    assert curves(axis)["fa2"] == [(d, pytest.approx(work * d)) for d in (32, 59, 64, 128)]
    assert axis.get_xlabel() == "head dimension D" and "B4 H8 S1024" in texts(drawn["headdim_analysis.png"])


def test_energy(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """pJ/FLOP as bars by shape, the matrix product's as a line; nothing of what has no energy; the summary's table has power and clock.

    One shape is in the title alone.
    """
    rows = lengths("fa2", "torch-flash")
    flops = 4 * 4 * 8 * 64 * 1024**2
    rows[6] = replace(rows[6], energy_mj=2.0 * flops / 1e9, power_w=690.4, sm_clock_mhz=1665.0)
    rows[7] = replace(rows[7], energy_mj=3.0 * flops / 1e9, power_w=500.0, sm_clock_mhz=1980.0)
    (product,) = ceilings(gemm_float32=50.0)  # 1 ms: 5e10 FLOPs
    rows.append(replace(product, energy_mj=75.0))
    report.draw(rows, tmp_path)
    (axis,) = drawn["energy.png"].axes
    assert [(bar.get_label(), [b.get_height() for b in bar]) for bar in axis.containers] == [
        ("fa2", [pytest.approx(2.0)]),
        ("torch-flash", [pytest.approx(3.0)]),
    ]
    assert axis.get_ylabel() == "pJ/FLOP" and axis.get_ylim()[0] == 0 and [t.get_text() for t in axis.get_xticklabels()] == [""]
    words = texts(drawn["energy.png"])
    assert "GEMM float32 1.5 pJ/FLOP" in words and words.count("S1024") == 1
    text = summary(rows, {})
    assert "| shape | fa2 | torch-flash |\n|---|---:|---:|\n| S1024 | **2** (690 W, 1665 MHz) | 3 (500 W, 1980 MHz) |" in text
    assert "gemm-float32 1.5 pJ/FLOP" in text and "energy.png" not in text
    drawn.clear()
    report.draw(lengths("fa2"), tmp_path)
    assert "energy.png" not in drawn and "pJ/FLOP" not in summary(lengths("fa2"), {})


def test_energy_over_lengths(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """A line a kernel over S from 0, without bars, a figure a head dim; bars by shape where some shapes are of no family."""
    flops = 4 * 4 * 8 * 64
    rows = [
        replace(r, energy_mj=flops * r.SeqLen**2 / 1e9 * (2 + i % 2), causal=False) for i, r in enumerate(lengths("fa2", "torch-flash"))
    ]
    report.draw(rows, tmp_path)
    (axis,) = drawn["energy.png"].axes
    assert curves(axis)["fa2"] == [(s, pytest.approx(2.0)) for s in (128, 256, 512, 1024)] and axis.get_ylim()[0] == 0
    assert axis.get_xlabel() == "sequence length S" and not axis.containers and not axis.collections
    drawn.clear()
    wide = [replace(r, HeadDim=128) for r in rows]
    report.draw([*rows, *wide], tmp_path)
    assert {"energy_D64.png", "energy_D128.png"} <= set(drawn) and "energy.png" not in drawn
    drawn.clear()
    report.draw([*rows, replace(rows[0], Test="other-", Batch=7)], tmp_path)
    (axis,) = drawn["energy.png"].axes
    assert [len(list(bars)) for bars in axis.containers] == [5, 4]
    assert [t.get_text() for t in axis.get_xticklabels()][-1] == "other (B7 S128)"


def test_a_ceilings_text_stands_where_no_line_does(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """At the left end, or where lines cross it there at the right end."""
    for most, side in ((1.0, "left"), (100.0, "right")):  # TFLOP/s below the ceiling, and through it at the second length
        rows = [replace(r, TFLOPS=most * (i + 0.2) ** 2) for i, r in enumerate(lengths("fa2"))]
        report.draw([*rows, *ceilings(gemm_float32=60.0)], tmp_path)
        (note,) = (text for text in drawn["seqlen_analysis.png"].findobj(plt.Annotation) if text.get_text().startswith("GEMM"))
        assert note.get_horizontalalignment() == side


def test_bars_are_p20_to_p80(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """In the time and, turned over, in the rates; with caps, above the marks."""
    rows = lengths("fa2")
    report.draw([*rows, *(replace(r, timing="cold") for r in rows)], tmp_path)
    (time,), (flops,) = drawn["latency_scaling.png"].axes, drawn["seqlen_analysis.png"].axes
    (low, high) = time.collections[0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(0.9), pytest.approx(1.2))
    (low, high) = flops.collections[0].get_segments()[0][:, 1]
    middle = curves(flops)["fa2"][0][1]
    assert (low, high) == (pytest.approx(middle / 1.2), pytest.approx(middle / 0.9))
    caps = [line for line in flops.lines if line.get_marker() == "_"]
    (fa2,) = (line for line in flops.lines if line.get_label() == "fa2")
    assert len(caps) == 2 and all(cap.get_zorder() > fa2.get_zorder() for cap in caps)


def test_kernel_comparison(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Shapes by name, a bar a kernel side by side in each; the peers hatched."""
    shapes = {"Small-1": Problem.of(1, 1, 128, 64), "Stress-1": Problem.of(8, 16, 2048, 64)}
    report.draw([row(k, t, ms, p) for t, p in shapes.items() for k, ms in (("torch-math", 2.0), ("fa2", 0.5))], tmp_path)
    assert set(drawn) == {"kernel_comparison.png"}  # two unlike shapes are no family
    (axis,) = drawn["kernel_comparison.png"].axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["Small-1\n(B1 H1 S128)", "Stress-1\n(B8 H16 S2048)"]
    bars = {bar.get_label(): list(bar) for bar in axis.containers if bar.get_label() in ("fa2", "torch-math")}
    rates = [p.flops("forward") / (0.5 * 1e9) for p in shapes.values()]
    assert [b.get_height() for b in bars["fa2"]] == pytest.approx(rates)
    assert [round(b.get_x() + b.get_width() / 2) for b in bars["fa2"]] == [0, 1] and bars["torch-math"][0].get_x() < bars["fa2"][0].get_x()
    assert bars["torch-math"][0].get_hatch() and not bars["fa2"][0].get_hatch() and axis.get_ylim()[0] == 0


def test_a_row_without_a_time_is_in_the_summary_only(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Refused, absent and failed kernels are told with their reason there; legends have what is drawn."""
    rows = lengths("fa2", "naive") + [row("fa3", f"S{s}", None, Status="ABSENT") for s in (128, 256)]
    rows[-3] = row("naive", "S1024", None)
    report.draw(rows, tmp_path)
    words = texts(drawn["seqlen_analysis.png"])
    assert "fa3" not in words and "FAIL" not in words and len(curves(drawn["seqlen_analysis.png"].axes[0])["naive"]) == 3
    assert "- fa3 ABSENT (S128, S256)" in summary(rows, {}) and "- naive FAIL (S1024)" in summary(rows, {})
    assert "naive FAIL" in texts(drawn["error_vs_S.png"]), "where its error is drawn"


def test_six_kernels_the_fastest_of_ours_among_them(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Three of ours and three peers first, however fast the others are; the footer counts those left out."""
    peers = ("torch-cudnn", "fa3", "fa4", "torch-flash", "triton")
    report.draw(lengths(*peers, "mma_qreg_async", "fa2", "naive", "tiled"), tmp_path)
    assert set(curves(drawn["seqlen_analysis.png"].axes[0])) == {*peers[:3], "mma_qreg_async", "fa2", "naive"}
    assert "3 more in summary.md" in texts(drawn["seqlen_analysis.png"])
    drawn.clear()
    report.draw(lengths(*peers, "mma_qreg_async"), tmp_path)
    assert set(curves(drawn["seqlen_analysis.png"].axes[0])) == {*peers, "mma_qreg_async"}
    drawn.clear()
    rows = lengths("a", "b", "c", "d", "e", "f", "g")  # g is slow, but the only one with the last shape
    report.draw([each for each in rows if each.Kernel == "g" or each.Test != "S1024"], tmp_path)
    assert set(curves(drawn["seqlen_analysis.png"].axes[0])) == {"a", "b", "c", "d", "e", "g"}


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
        assert ("CPU time (CPU engine), not GPU performance" in texts(figure)) == cpu
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


def test_what_compares_nothing_beside_what_does_has_no_figure(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """One kernel where another dtype has two, one shape where the other mask has two; alone they are drawn."""
    causal, half = (Problem.of(1, 1, 512, 64, dtype=d, causal=c) for d, c in (("float32", True), ("bfloat16", False)))
    one = [row(kernel, "causal", 1.0, causal) for kernel in ("fa2", "naive")]
    rows = [row(k, f"B{b} H{h}", 1.0, Problem.of(b, h, 512, 64)) for k in ("fa2", "naive") for b, h in ((1, 2), (2, 1))]
    report.draw([*rows, *one, *(row("fa2", name, 1.0, half) for name in ("x", "y"))], tmp_path)
    assert list(drawn) == ["kernel_comparison_float32_full.png"]
    for some, name in ((one, "kernel_comparison.png"), ([*rows[:2], row("fa2", "x", 1.0, half)], "kernel_comparison_bfloat16.png")):
        drawn.clear()
        report.draw(some, tmp_path)
        assert name in drawn
    for some, name in (
        ([*one, *(each for each in rows if each.Kernel == "fa2")], "kernel_comparison_causal.png"),  # the other mask has one kernel
        ([*(replace(each, **CPU) for each in rows), rows[0]], "kernel_comparison.png"),  # the other device has two
    ):
        drawn.clear()
        report.draw(some, tmp_path)
        assert name in drawn, sorted(drawn)


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
    assert "cold, L2 flushed" in texts(drawn["latency_scaling.png"])
    drawn.clear()
    report.draw(rows, tmp_path)
    assert "latency_scaling.png" not in drawn, "warm times alone are shown as rates"


def test_memory(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Each kernel's peak beside the S x S matrix and the tensors, in bytes on a base-2 axis with binary units."""
    report.draw(lengths("fa2"), tmp_path)
    axis = drawn["memory.png"].axes[0]
    found = curves(axis)
    assert found["fa2"][0] == (128, 1 << 20)
    assert found["the S × S matrix in float32"][-1] == (1024, 4 * 8 * 1024 * 1024 * 4)
    assert found["inputs and outputs"][-1] == (1024, 4 * 8 * 1024 * (4 * 64 + 1) * 4)
    assert "MiB" in texts(drawn["memory.png"]) and "memory" in axis.get_ylabel()


def test_memory_that_no_length_changes_is_no_figure(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """At a fixed number of tokens: every line would be flat, unless a kernel stores the S x S matrix."""
    flat = [row("fa2", f"S{s}", 1.0, Problem.of(4096 // s, 8, s, 64)) for s in (256, 512, 1024, 2048)]
    report.draw(flat, tmp_path)
    assert "seqlen_analysis.png" in drawn and "memory.png" not in drawn
    report.draw([*flat, *(replace(r, Kernel="naive", peak_bytes=r.SeqLen << 20) for r in flat)], tmp_path)
    assert set(curves(drawn["memory.png"].axes[0])) >= {"fa2", "naive"}


def test_lines_of_equal_values_can_be_seen(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Errors and bytes are often the same: marks and lines that are drawn later are smaller."""
    report.draw(lengths("fa2", "naive", "torch-math"), tmp_path)
    for name in ("error_vs_S.png", "memory.png"):
        lines = [line for line in drawn[name].axes[0].lines if line.get_label() in ("fa2", "naive", "torch-math")]
        sizes = [(line.get_markersize(), line.get_linewidth()) for line in sorted(lines, key=lambda line: line.get_zorder())]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3, name


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
    assert "GEMM float32 50 TFLOP/s" in words and "copy 4,000 GB/s" in words and "kernel_comparison.png" not in drawn
    assert "TFLOP/s" in axis.get_ylabel() and "FLOPs a byte" in axis.get_xlabel()
    assert "GEMM float32 50 TFLOP/s" in texts(drawn["seqlen_analysis.png"])
    assert not any("ceiling" in name for axis in drawn["seqlen_analysis.png"].axes for name in curves(axis))


def test_error_vs_s(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """A panel a tensor, the class of arithmetic in the legend, a failure in words."""
    rows = [replace(r, MaxError_O=1e-6 * r.SeqLen, MaxError_logsumexp=1e-7) for r in lengths("fa2", "torch-math")]
    rows.append(row("naive", "S1024", None, MaxError_O=0.5))
    report.draw(rows, tmp_path)
    figure = drawn["error_vs_S.png"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["max |error|, O", "max |error|, logsumexp"]
    assert curves(figure.axes[0])["fa2"] == [(s, pytest.approx(1e-6 * s)) for s in (128, 256, 512, 1024)]
    assert "fa2 [f32]" in texts(figure) and "naive FAIL" in texts(figure) and "half an ulp of 1 in float32" in texts(figure)


def test_a_kernel_looks_the_same_in_every_figure(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Colour and marker by name."""
    rows = [replace(r, MaxError_O=1e-6) for r in lengths("fa2", "naive", "mine")]
    report.draw([*rows, *(replace(r, timing="cold") for r in rows)], tmp_path)
    looks: dict[str, set[Any]] = {"fa2": set(), "naive": set(), "mine": set()}
    for name in ("seqlen_analysis.png", "latency_scaling.png", "memory.png", "error_vs_S.png"):
        for line in drawn[name].axes[0].lines:
            if line.get_label() in looks:
                looks[line.get_label()].add((line.get_color(), line.get_marker()))
    assert all(len(found) == 1 for found in looks.values())


def test_letters_can_be_read_in_a_column(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Figures are as wide as a column of a paper, no letter is below 5 points there, and none lies outside the figure."""
    rows = [replace(r, energy_mj=1.0) for r in lengths("mma_qreg_async", "fa2_naive", "naive", "torch-efficient", "torch-cudnn", "fa4")]
    shapes = [row("fa2", f"Edge-NonPowerOf2-{i}", 1.0, Problem.of(i, i, 100, 64)) for i in range(1, 11)]
    report.draw([*rows, *(replace(r, timing="cold", energy_mj=None) for r in rows), *ceilings(gemm_float32=60.0)], tmp_path, "a")
    report.draw(shapes, tmp_path, "b")
    assert len(drawn) == 7 and "a_energy.png" in drawn
    for name, figure in drawn.items():
        assert figure.get_size_inches()[0] == 3.35 and figure.get_size_inches()[1] < 4, name
        figure.draw_without_rendering()
        letters = [text for text in figure.findobj(plt.Text) if text.get_text()]
        assert min(text.get_fontsize() for text in letters) >= 5, name
        box, whole = figure.get_tightbbox(), figure.bbox_inches
        assert box.x0 >= -0.02 and box.y0 >= -0.02 and box.x1 <= whole.x1 + 0.02 and box.y1 <= whole.y1 + 0.02, (name, box, whole)


def test_footer_says_what_when_and_where(drawn: dict[str, plt.Figure], tmp_path: Path) -> None:
    """Device, timing, day and commit, so that a picture alone can be traced; pass, dtype and mask are in the title."""
    report.draw(lengths("fa2"), tmp_path, env={"run_id": RUN, "git_commit": "0123456789abcdef"})
    words = texts(drawn["seqlen_analysis.png"])
    assert "NVIDIA H200 · warm · 2026-11-20 · commit 0123456789 · fa-cli" in words
    assert "forward, B4 H8 D64, float32, not causal" in words


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
    monkeypatch.setattr(report, "OVER_S", {name: lambda *_: plt.figure() for name in report.OVER_S})
    rows = lengths("naive", "tiled", "flash_naive", "fa1", "flash_2d", "fa2_naive", "fa2")
    rows += [row("fa2", f"D{d}", 1.0, Problem.of(1, 1, 64, d)) for d in (8, 16, 32, 64)]
    report.draw([*rows, row("fa2", "x", 1.0, Problem.of(7, 7, 7, 7))], tmp_path)
    report.draw(rows[:2], tmp_path)
    report.draw([rows[0], row("fa4", "S128", 1.0)], tmp_path, env={"seed": 1})
    table = re.findall(r"(?m)^\| `(\w+)` \|", (ROOT / "plots" / "README.md").read_text())
    assert sorted(path.removesuffix(".png") for path in drawn) == sorted(table)
