"""The figures of a view (views.py), one function each. Each returns None where the view has no values for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ..kernel import catalogue
from ..problem import DTYPE_BYTES
from ..row import CEILING, problem_of
from . import style
from .style import BARS, COLUMN, GREY, HOLLOW, MARK, NOTE, RED, ceiling
from .views import View, families, flops_an_exp, gemm, intensity, picojoules, roofs, work_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

TENSORS = ("O", "logsumexp", "dQ", "dK", "dV", "dsinks")


def kernel_comparison(view: View, title: str, footer: str) -> Figure | None:
    """TFLOP/s of each kernel over the shapes by name, as bars side by side in the order of the legend."""
    if not view.timed:
        return None
    figure, axes = style.sheet(view, title, _common(view), footer, (COLUMN, 2.9))
    _bars(axes[0], view, lambda row: row.TFLOPS and row.TFLOPS * _unit(view)[1], -1)
    _rates(axes[0], view)
    style.legend(figure, view, bars=True)
    return figure


def energy(view: View, title: str, footer: str) -> Figure | None:
    """pJ/FLOP of each kernel, settled and alone on the GPU, next to the matrix product's: lines over S for a family, else bars by shape."""
    view = view.only(row for row in view.rows if row.energy_mj and row.timing == view.timing)
    if not view.timed:
        return None
    over = [len(family.rows) for family in families(view)] == [len(view.rows)]
    figure, axes = style.sheet(view, title, style.family_words(view) if over else _common(view), footer, (COLUMN, 2.7))
    axis = axes[0]
    if over:
        style.series(axis, view, picojoules, 0, lambda row: float(row.SeqLen))
        style.lengths(axis, view)
        axis.set_ylim(0, axis.get_ylim()[1])
    else:
        _bars(axis, view, picojoules, 0)
    axis.set_ylabel("pJ/FLOP")
    extra = []
    if (product := gemm(view)) and (least := picojoules(product)):
        words = f"GEMM {product.Kernel.rpartition('-')[2]} {least:.3g} pJ/FLOP"  # in the legend: bars or lines stand where the line is
        extra.append(axis.axhline(least, color="0.2", linestyle="--", linewidth=0.8, zorder=1.5 if over else 2.5, label=words))
    style.legend(figure, view, extra, bars=not over, order=picojoules if over else None)
    return figure


def _bars(axis: Axes, view: View, value: Callable[[Row], float | None], power: int) -> None:
    """Bars of a value side by side within each shape; power as in style.series."""
    kernels, shapes = view.timed, view.shapes
    width = 0.86 / len(kernels)
    for place, kernel in enumerate(kernels):
        rows = [(shapes.index(shape), row) for shape, row in view.cells(kernel).items() if row.KernelTime_ms and value(row)]
        xs = [shape + (place - (len(kernels) - 1) / 2) * width for shape, _ in rows]
        ys = [float(value(row) or 0) for _, row in rows]
        axis.bar(xs, ys, width=width, label=kernel, zorder=2, **style.block(view, kernel))
        if power and rows:
            axis.errorbar(xs, ys, yerr=style.spread([row for _, row in rows], ys, power), **{**BARS, "capsize": 1.1, "elinewidth": 0.5})
    few, labels = len(shapes) <= 4, [re.sub("-?_causal|-$|-(?= [(])", "", view.label(shape)) for shape in shapes]
    if len(shapes) == 1:  # the title has it
        labels = [""]
    axis.set_xticks(range(len(shapes)), [label.replace(" (", "\n(") if few else label for label in labels])
    if not few:
        plt.setp(axis.get_xticklabels(), fontsize=5, rotation=35, ha="right", rotation_mode="anchor", va="center")
    axis.set_xlim(-0.5, len(shapes) - 0.5)
    axis.grid(visible=False, axis="x")
    axis.set_ylim(0, None)


def _common(view: View) -> str:
    """The sizes that all shapes of a view share, if most are."""
    first = view.rows[0]
    sizes = {"B": "Batch", "H": "Heads", "S": "SeqLen", "D": "HeadDim"}
    alike = [f"{short}{getattr(first, name)}" for short, name in sizes.items() if len({getattr(row, name) for row in view.rows}) == 1]
    return " ".join(alike) if len(alike) > 2 else ""


def seqlen_analysis(view: View, title: str, footer: str) -> Figure | None:
    """TFLOP/s over the sequence length, a line a kernel; hollow where it was measured in a burst after a rest."""
    return _over(view, title, footer, "SeqLen")


def headdim_analysis(view: View, title: str, footer: str) -> Figure | None:
    """TFLOP/s over the head dimension, a line a kernel."""
    return _over(view, title, footer, "HeadDim")


def _over(view: View, title: str, footer: str, column: str) -> Figure | None:
    if not view.timed:
        return None

    def place(row: Row) -> float:
        return float(getattr(row, column))

    def rate(row: Row) -> float | None:
        return row.TFLOPS and row.TFLOPS * _unit(view)[1]

    figure, axes = style.sheet(view, title, style.family_words(view), footer, (COLUMN, 2.7))
    axis = axes[0]
    style.series(axis, view, rate, -1, place)
    marks = _hollow(axis, view, "burst", place, rate, "burst after a rest")
    if column == "SeqLen":
        style.lengths(axis, view)
    else:
        axis.set_xticks(sorted({row.HeadDim for row in view.rows}))
        axis.set_xlabel("head dimension D")
    _rates(axis, view)
    style.legend(figure, view, marks, order=rate)
    return figure


def _unit(view: View) -> tuple[str, float]:
    """The unit of a view's rates, and how many of it a TFLOP/s is: rates of the CPU engine are small."""
    small = view.cpu and max((row.TFLOPS or 0) for row in view.rows) < 0.1
    return ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1.0)


def _rates(axis: Axes, view: View) -> None:
    """An axis of rates: linear from 0, under the measured ceiling."""
    axis.set_ylabel(f"{_unit(view)[0]} (p20 to p80)")
    axis.set_ylim(bottom=0)
    if (product := gemm(view)) and product.TFLOPS:
        axis.set_ylim(top=max(axis.get_ylim()[1], 1.06 * product.TFLOPS))
        words = f"GEMM {product.Kernel.rpartition('-')[2]} {product.TFLOPS:,.4g} TFLOP/s"
        ceiling(axis, product.TFLOPS, words, right=style.crossed(axis, product.TFLOPS))
    axis.set_ylim(0, axis.get_ylim()[1] * 1.02)


def _hollow(
    axis: Axes, view: View, timing: str, place: Callable[[Row], float], value: Callable[[Row], float | None], words: str
) -> list[Line2D]:
    """Draw the rows of another timing as hollow marks; what the legend says of them."""
    drawn = False
    for kernel, look in view.looks.items():
        points = [(place(row), found) for row in view.rows if row.Kernel == kernel and row.timing == timing and (found := value(row))]
        if points:
            shape = {"linestyle": "", "marker": look["marker"], "markeredgecolor": look["color"]}
            axis.plot([x for x, _ in points], [y for _, y in points], **shape, **HOLLOW)
            drawn = True
    return [Line2D([], [], color=GREY, linestyle="", marker="o", **HOLLOW, label=words)] if drawn else []


def latency_scaling(view: View, title: str, footer: str) -> Figure | None:
    """Time over S with the L2 cache warm and cold (hollow), next to the growth of the work. Rates show warm times alone as well."""
    timed = [row for kernel in view.kernels for row in view.cells(kernel).values() if row.KernelTime_ms]
    if view.timing != "warm" or not any(row.timing == "cold" and row.KernelTime_ms for row in view.rows):
        return None
    figure, axes = style.sheet(view, title, style.family_words(view), footer, (COLUMN, 2.7))
    axis = axes[0]
    style.series(axis, view, lambda row: row.KernelTime_ms, 1, lambda row: float(row.SeqLen))
    marks = _hollow(axis, view, "cold", lambda row: float(row.SeqLen), lambda row: row.KernelTime_ms, "cold, L2 flushed")
    fastest = {s: min(float(row.KernelTime_ms or 0) for row in timed if row.SeqLen == s) for s in sorted({row.SeqLen for row in timed})}
    work = {row.SeqLen: work_of(row, view.mode) for row in timed}
    last = max(fastest)
    growth = [fastest[last] * work[s] / work[last] for s in fastest]
    axis.set_yscale("log")
    low, _ = axis.get_ylim()
    axis.plot(list(fastest), growth, color=GREY, linestyle=":", linewidth=0.9, label="the work")
    axis.set_ylim(bottom=low)
    style.plain_log(axis)
    axis.set_ylabel("ms (p20 to p80)")
    style.lengths(axis, view)
    marks.append(Line2D([], [], color=GREY, linestyle=":", linewidth=0.9, label="as the work grows"))
    style.legend(figure, view, marks, order=lambda row: row.KernelTime_ms)
    return figure


def memory(view: View, title: str, footer: str) -> Figure | None:
    """Peak device bytes of each kernel over S, next to its tensors alone and to the S x S matrix that it may have to store.

    None too at a fixed number of tokens, where only the matrix grows, if no kernel stores it.
    """
    rows = [row for row in view.rows if row.peak_bytes]
    peaks = {k: sorted((row.SeqLen, row.peak_bytes) for row in view.cells(k).values() if row.peak_bytes) for k in view.kernels}
    peaks = {kernel: points for kernel, points in peaks.items() if points}
    sizes = [[size for _, size in points] for points in peaks.values()]
    if not rows or (len({row.Batch for row in rows}) > 1 and all(max(each) < 1.1 * min(each) for each in sizes)):
        return None
    figure, axes = style.sheet(view, title, style.family_words(view), footer, (COLUMN, 2.7))
    axis = axes[0]
    problems = {row.SeqLen: problem_of(row) for row in sorted(rows, key=lambda row: row.SeqLen)}
    dtype = next(iter(problems.values())).dtype
    matrix = [p.batch * p.heads_q * p.seq_q * p.seq_kv * DTYPE_BYTES[dtype] for p in problems.values()]
    tensors = [p.bytes(view.mode) for p in problems.values()]
    for text, values, dash in ((f"the S × S matrix in {dtype}", matrix, "--"), ("inputs and outputs", tensors, ":")):
        axis.plot(list(problems), values, color=GREY, linestyle=dash, linewidth=0.9, label=text, zorder=1)
    for place, (kernel, points) in enumerate(peaks.items()):
        mark = style.ringed(place, len(peaks))
        axis.plot([s for s, _ in points], [size for _, size in points], **view.looks[kernel], **mark, label=kernel)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.bytes_words(value)))
    axis.set_ylabel("peak memory of one run")
    style.lengths(axis, view)
    grey = [Line2D([], [], color=GREY, linewidth=0.9, linestyle=line.get_linestyle(), label=line.get_label()) for line in axis.lines[:2]]
    style.legend(figure, view, grey, of=list(peaks), order=lambda row: row.peak_bytes)
    return figure


def roofline(view: View, title: str, footer: str) -> Figure | None:
    """Every kernel at (FLOPs a byte of its problem, TFLOP/s), under the ceilings that were measured in the same run."""
    rows = [row for row in view.rows if row.TFLOPS and row.timing == view.timing]
    if not rows or not roofs(view, rows[0]):
        return None
    figure, axes = style.sheet(view, title, _common(view), footer, (COLUMN, 3.0))
    axis = axes[0]
    kernels = list(dict.fromkeys(row.Kernel for row in rows))
    for place, kernel in enumerate(kernels):
        beside = 1.06 ** (place - (len(kernels) - 1) / 2)  # those of one problem would hide one another
        points = [(intensity(row) * beside, float(row.TFLOPS or 0)) for row in rows if row.Kernel == kernel]
        look = view.looks[kernel] | {"linestyle": ""}
        axis.plot([x for x, _ in points], [y for _, y in points], **look, **MARK, label=kernel)
    at = [intensity(row) for row in rows]
    copy, product, exp = view.ceilings.get("copy"), gemm(view), view.ceilings.get("exp")
    top = product.TFLOPS if product and product.TFLOPS else math.inf
    ridge = top / copy.Bandwidth_GBps * 1e3 if copy and copy.Bandwidth_GBps and math.isfinite(top) else min(at)
    xs = np.geomspace(min(*at, ridge) / 3, max(*at, ridge) * 2, 200)
    if copy and copy.Bandwidth_GBps:
        slope = copy.Bandwidth_GBps / 1e3
        axis.plot(xs[xs <= ridge], xs[xs <= ridge] * slope, color="0.2", linestyle="--", linewidth=0.8, label=f"{CEILING}copy", zorder=1.5)
        middle = math.sqrt(xs[0] * ridge)  # to the right of the line, where the axes end nowhere near
        axis.annotate(f"copy {copy.Bandwidth_GBps:,.0f} GB/s", (middle, middle * slope), **NOTE, va="top", color="0.2")
    if product and product.TFLOPS:
        ceiling(axis, product.TFLOPS, f"GEMM {product.Kernel.rpartition('-')[2]} {product.TFLOPS:,.4g} TFLOP/s")
    if exp and exp.TFLOPS:
        for dim, row in {row.HeadDim: row for row in rows}.items():
            rate = exp.TFLOPS * flops_an_exp(row)
            ceiling(axis, rate, f"exp {exp.TFLOPS:,.3g} T/s × {flops_an_exp(row):g} FLOPs (D{dim}): {rate:,.4g} TFLOP/s")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(xs[0], xs[-1])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style.plain_log(axis)
    axis.set_xlabel("FLOPs a byte (inputs and outputs once)")
    axis.set_ylabel("TFLOP/s")
    style.legend(figure, view, lines=False, order=lambda row: row.TFLOPS)
    return figure


def error_vs_s(view: View, title: str, footer: str) -> Figure | None:
    """The largest error of each tensor against float64 over S. The legend has each kernel's arithmetic, which sets its budget."""
    tensors = [name for name in TENSORS if any(_error(row, name) for row in view.rows)]
    if not tensors:
        return None
    columns = 1 if len(tensors) <= 3 else 2
    rows = -(-len(tensors) // columns)
    size = (COLUMN * columns, 1.35 * rows + 1.1)
    figure, axes = style.sheet(view, title, style.family_words(view), footer, size, rows, columns, sharex=columns == 1)
    for place, (axis, tensor) in enumerate(zip(axes, tensors, strict=False)):
        _errors(axis, view, tensor)
        if place < len(tensors) - columns:
            axis.set_xlabel("")
    for axis in axes[len(tensors) :]:
        axis.set_axis_off()
    classes = {k.name: f" [{k.arithmetic}]" for k in catalogue() if k.pass_ == view.mode or view.mode == "both"}
    wrong = [kernel for kernel in view.kernels if any(_error(row, tensor) for tensor in tensors for row in view.cells(kernel).values())]
    style.legend(figure, view, of=wrong, suffix=classes)
    return figure


def _errors(axis: Axes, view: View, tensor: str) -> None:
    for place, kernel in enumerate(view.kernels):
        cells = sorted((row for row in view.cells(kernel).values() if _error(row, tensor)), key=lambda row: row.SeqLen)
        points = [(row.SeqLen, _error(row, tensor)) for row in cells if math.isfinite(_error(row, tensor))]
        mark = style.ringed(place, len(view.kernels))
        axis.plot([s for s, _ in points], [error for _, error in points], **view.looks[kernel], **mark, label=kernel)
        for row in cells:
            if row.Status == "FAIL":
                y = _error(row, tensor) if math.isfinite(_error(row, tensor)) else 1.0
                axis.annotate(
                    f"{kernel} FAIL", (row.SeqLen, y), xytext=(0, 5), textcoords="offset points", fontsize=5.5, color=RED, ha="center"
                )
    dtype = "float32" if tensor == "logsumexp" and view.dtype != "float64" else view.dtype
    unit = 2.0 ** -{"float16": 11, "tf32": 11, "bfloat16": 8, "float64": 53}.get(dtype, 24)
    axis.set_yscale("log")
    ceiling(axis, unit, f"half an ulp of 1 in {dtype}", right=True)  # most errors fall with S
    axis.set_ylabel(f"max |error|, {tensor}")
    axis.margins(y=0.1)
    style.plain_log(axis)
    style.lengths(axis, view)


def _error(row: Row, tensor: str) -> float:
    return getattr(row, f"MaxError_{tensor}") or 0.0
