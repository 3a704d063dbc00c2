"""The figures of a view (views.py), one function each. Each returns None where the view has no values for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ..array import Array
from ..kernel.kernel import catalogue
from ..problem import DTYPE_BYTES
from ..row import CEILING
from . import style
from .style import GREY, HOLLOW, MARK, NOTE, RED, Keywords, ceiling, look_of
from .views import View, flops_an_exp, gemm, intensity, problem_of, roofs, shape_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

TENSORS = ("O", "logsumexp", "dQ", "dK", "dV")


def kernel_comparison(view: View, title: str, footer: str) -> Figure | None:
    """2x2 over the shapes by name: time, speed-up, TFLOP/s, GB/s. Points, not lines: there is no order between shapes."""
    kernels = style.drawn(view)
    if not kernels:
        return None
    shapes = view.shapes
    figure, axes = style.sheet(view, title, footer, (min(100.0, max(10.0, 0.5 * len(shapes) + 3)), 7.6), 2, 2, sharex=True)
    labels = [view.label(shape) for shape in shapes]

    def place(row: Row) -> float:  # kernels side by side within a shape, in the order of the legend
        return shapes.index(shape_of(row)) + (kernels.index(row.Kernel) - (len(kernels) - 1) / 2) / max(len(kernels), 5) * 0.84

    for axis in axes:
        for start in range(0, len(shapes), 2):
            axis.axvspan(start - 0.5, start + 0.5, color="0.955", zorder=0, linewidth=0)
        axis.set_xticks(range(len(shapes)), labels, rotation=38, ha="right", rotation_mode="anchor", fontsize=7)
        axis.set_xlim(-0.5, len(shapes) - 0.5)
        axis.grid(visible=False, axis="x")
    _four(axes, view, place, joined=False)
    style.legend(figure, view, lines=False)
    return figure


def seqlen_analysis(view: View, title: str, footer: str) -> Figure | None:
    """2x2 over the sequence length, a line a kernel: time, speed-up, TFLOP/s, GB/s."""
    if not style.drawn(view):
        return None
    figure, axes = style.sheet(view, f"{title}, {style.family_words(view)}", footer, (10, 7.4), 2, 2, sharex=True)
    for axis in axes:
        style.lengths(axis, view)
    for axis in axes[:2]:
        axis.set_xlabel("")
    _four(axes, view, lambda row: float(row.SeqLen), joined=True)
    style.legend(figure, view)
    return figure


def _four(axes: Sequence[Axes], view: View, place: Callable[[Row], float], joined: bool) -> None:
    time, speed, flops, bandwidth = axes
    style.series(time, view, lambda row: row.KernelTime_ms, 1, place, joined)
    time.set_ylabel("time, ms (median; bars p20 to p80)")
    style.series(speed, view, view.speedup, -1, place, joined)
    if speed.lines:
        speed.axhline(1, color="0.2", linestyle="--", linewidth=1, zorder=1.5)
        speed.set_ylabel(f"speed-up over {view.reference}")
    else:
        speed.text(
            0.5, 0.5, "nothing to compare with:\nno kernel has a time in every shape", ha="center", transform=speed.transAxes, color=GREY
        )
    small = view.cpu and max((row.TFLOPS or 0) for row in view.rows) < 0.1
    style.series(flops, view, lambda row: row.TFLOPS and row.TFLOPS * (1e3 if small else 1), -1, place, joined)
    flops.set_ylabel("GFLOP/s" if small else "TFLOP/s")
    if (product := gemm(view)) and product.TFLOPS:
        ceiling(flops, product.TFLOPS, f"GEMM {product.Kernel.rpartition('-')[2]} {product.TFLOPS:,.4g} TFLOP/s, measured in this run")
    style.series(bandwidth, view, lambda row: row.Bandwidth_GBps, -1, place, joined)
    bandwidth.set_ylabel("GB/s (inputs and outputs once)")
    if (copy := view.ceilings.get("copy")) and copy.Bandwidth_GBps:
        ceiling(bandwidth, copy.Bandwidth_GBps, f"copy {copy.Bandwidth_GBps:,.0f} GB/s, measured in this run")
    for axis in (time, speed, flops, bandwidth):
        style.scale(axis)
    style.words(time, view, place, dodged=not joined)


def latency_scaling(view: View, title: str, footer: str) -> Figure | None:
    """Time over S with the growth of the work beside it; filled: warm, hollow: cold (the L2 cache flushed before each run)."""
    timed = [row for kernel in view.kernels for row in view.cells(kernel).values() if row.KernelTime_ms]
    if not timed:
        return None
    figure, axes = style.sheet(view, f"{title}, {style.family_words(view)}", footer, (7.6, 4.6))
    axis = axes[0]
    style.series(axis, view, lambda row: row.KernelTime_ms, 1, lambda row: float(row.SeqLen), joined=True)
    cold = view.timing == "warm" and any(row.timing == "cold" and row.KernelTime_ms for row in view.rows)
    for kernel in view.kernels if cold else ():
        points = [(row.SeqLen, row.KernelTime_ms) for row in view.cells(kernel, "cold").values() if row.KernelTime_ms]
        look = look_of(kernel)
        axis.plot(
            [s for s, _ in points], [ms for _, ms in points], linestyle="", marker=look["marker"], markeredgecolor=look["color"], **HOLLOW
        )
    fastest = {s: min(float(row.KernelTime_ms or 0) for row in timed if row.SeqLen == s) for s in sorted({row.SeqLen for row in timed})}
    work = {row.SeqLen: problem_of(row).flops(view.mode) for row in timed}
    last = max(fastest)
    growth = [fastest[last] * work[s] / work[last] for s in fastest]
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.plot(list(fastest), growth, color=GREY, linestyle=":", linewidth=1, label="the work")
    seen = next(i for i, y in enumerate(growth) if y >= low * (high / low) ** 0.1 or i == len(growth) - 1)
    axis.annotate("as the work grows", (list(fastest)[seen], growth[seen]), **NOTE, va="top", color=GREY)
    axis.set_ylim(bottom=low)
    style.plain_log(axis)
    axis.set_ylabel("time, ms (median; bars p20 to p80)")
    style.lengths(axis, view)
    style.words(axis, view, lambda row: float(row.SeqLen))
    dot: Keywords = {"color": GREY, "linestyle": "", "marker": "o"}
    hollow = Line2D([], [], **dot, **HOLLOW, label="hollow: cold, L2 flushed")
    style.legend(
        figure, view, [Line2D([], [], **dot, **MARK, label="filled: warm"), hollow] if cold else [], order=lambda row: row.KernelTime_ms
    )
    return figure


def memory(view: View, title: str, footer: str) -> Figure | None:
    """Peak device bytes of each kernel over S, beside its tensors alone and beside the S x S matrix that it may have to store."""
    rows = [row for row in view.rows if row.peak_bytes]
    if not rows:
        return None
    figure, axes = style.sheet(view, f"{title}, {style.family_words(view)}", footer, (7.6, 4.6))
    axis = axes[0]
    problems = {row.SeqLen: problem_of(row) for row in sorted(rows, key=lambda row: row.SeqLen)}
    dtype = next(iter(problems.values())).dtype
    matrix = [p.batch * p.heads_q * p.seq_q * p.seq_kv * DTYPE_BYTES[dtype] for p in problems.values()]
    tensors = [p.bytes(view.mode) for p in problems.values()]
    for text, values, dash in ((f"the S × S matrix in {dtype}", matrix, "--"), ("inputs and outputs", tensors, ":")):
        axis.plot(list(problems), values, color=GREY, linestyle=dash, linewidth=1.2, label=text, zorder=1)
    for kernel in view.kernels:
        points = sorted((row.SeqLen, row.peak_bytes) for row in view.cells(kernel).values() if row.peak_bytes)
        axis.plot([s for s, _ in points], [size for _, size in points], **look_of(kernel), **MARK, label=kernel)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.bytes_words(value)))
    axis.set_ylabel("peak device memory of one run")
    style.lengths(axis, view)
    grey = [Line2D([], [], color=GREY, linestyle=line.get_linestyle(), label=line.get_label()) for line in axis.lines[:2]]
    style.legend(figure, view, grey, order=lambda row: row.peak_bytes)
    return figure


def roofline(view: View, title: str, footer: str) -> Figure | None:
    """Every kernel at (FLOPs a byte of its problem, TFLOP/s), under the ceilings that were measured in the same run."""
    rows = [row for row in view.rows if row.TFLOPS and row.timing == view.timing]
    if not rows or not roofs(view, rows[0]):
        return None
    figure, axes = style.sheet(view, title, footer, (7.6, 4.8))
    axis = axes[0]
    for kernel in dict.fromkeys(row.Kernel for row in rows):
        points = [(intensity(row), float(row.TFLOPS or 0)) for row in rows if row.Kernel == kernel]
        look = dict(look_of(kernel)) | {"linestyle": ""}
        axis.plot([x for x, _ in points], [y for _, y in points], **look, **MARK, label=kernel)
    at = [intensity(row) for row in rows]
    copy, product, exp = view.ceilings.get("copy"), gemm(view), view.ceilings.get("exp")
    top = product.TFLOPS if product and product.TFLOPS else math.inf
    ridge = top / copy.Bandwidth_GBps * 1e3 if copy and copy.Bandwidth_GBps and math.isfinite(top) else min(at)
    xs = np.geomspace(min(*at, ridge) / 3, max(*at, ridge) * 2, 200)
    if copy and copy.Bandwidth_GBps:
        slope = copy.Bandwidth_GBps / 1e3
        axis.plot(xs[xs <= ridge], xs[xs <= ridge] * slope, color="0.2", linestyle="--", linewidth=1, label=f"{CEILING}copy", zorder=1.5)
        axis.annotate(f"copy {copy.Bandwidth_GBps:,.0f} GB/s, measured in this run", (xs[0], xs[0] * slope), **NOTE, va="top", color="0.2")
    if product and product.TFLOPS:
        ceiling(axis, product.TFLOPS, f"GEMM {product.Kernel.rpartition('-')[2]} {product.TFLOPS:,.4g} TFLOP/s, measured in this run")
    if exp and exp.TFLOPS:
        for dim, row in {row.HeadDim: row for row in rows}.items():
            rate = exp.TFLOPS * flops_an_exp(row)
            ceiling(
                axis, rate, f"{exp.TFLOPS:,.3g} T exp/s × {flops_an_exp(row):g} FLOPs an exp (D = {dim}): {rate:,.4g} TFLOP/s, measured"
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(xs[0], xs[-1])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style.plain_log(axis)
    axis.set_xlabel("FLOPs a byte (every input read once, every output written once)")
    axis.set_ylabel("TFLOP/s")
    style.legend(figure, view, lines=False, order=lambda row: row.TFLOPS)
    return figure


def error_vs_s(view: View, title: str, footer: str) -> Figure | None:
    """The largest error of each tensor against float64 over S. The legend has each kernel's arithmetic, which sets its budget."""
    tensors = [name for name in TENSORS if any(_error(row, name) for row in view.rows)]
    if not tensors:
        return None
    columns = min(3, len(tensors))
    rows = -(-len(tensors) // columns)
    figure, axes = style.sheet(view, f"{title}, {style.family_words(view)}", footer, (3.7 * columns + 0.6, 3.3 * rows + 1.4), rows, columns)
    for axis, tensor in zip(axes, tensors, strict=False):
        _errors(axis, view, tensor)
    for axis in axes[len(tensors) :]:
        axis.set_axis_off()
    classes = {k.name: f" [{k.arithmetic}]" for k in catalogue() if k.pass_ == view.mode or view.mode == "both"}
    style.legend(figure, view, suffix=classes)
    return figure


def _errors(axis: Axes, view: View, tensor: str) -> None:
    for kernel in view.kernels:
        cells = sorted((row for row in view.cells(kernel).values() if _error(row, tensor)), key=lambda row: row.SeqLen)
        points = [(row.SeqLen, _error(row, tensor)) for row in cells if math.isfinite(_error(row, tensor))]
        axis.plot([s for s, _ in points], [error for _, error in points], **look_of(kernel), **MARK, label=kernel)
        for row in cells:
            if row.Status == "FAIL":
                y = _error(row, tensor) if math.isfinite(_error(row, tensor)) else 1.0
                axis.annotate(
                    f"{kernel} FAIL", (row.SeqLen, y), xytext=(0, 5), textcoords="offset points", fontsize=6.5, color=RED, ha="center"
                )
    dtype = "float32" if tensor == "logsumexp" and view.dtype != "float64" else view.dtype
    unit = 2.0 ** -{"float16": 11, "tf32": 11, "bfloat16": 8, "float64": 53}.get(dtype, 24)
    axis.set_yscale("log")
    ceiling(axis, unit, f"half an ulp of 1 in {dtype}")
    axis.set_ylabel(f"max |error| of {tensor}")
    axis.margins(y=0.1)
    style.lengths(axis, view)


def _error(row: Row, tensor: str) -> float:
    return getattr(row, f"MaxError_{tensor}") or 0.0


def error_picture(errors: Array, title: str, path: Path) -> Path:
    """Draw an |error| map (rows x blocks of columns, as budget.error_map gives it) with its worst cell marked. Returns the path.

    Colours are logarithmic; cells that are not finite are red. Raises OSError where the file cannot be written.
    """
    values = np.asarray(errors, dtype=np.float64)
    finite = values[np.isfinite(values) & (values > 0)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (1e-12, 1.0)
    row, column = np.unravel_index(int(np.where(np.isnan(values), np.inf, values).argmax()), values.shape)
    worst = float(values[row, column])
    sns.set_theme(style="ticks", rc=style.RC)
    figure, axis = plt.subplots(figsize=(6, 4.8), layout="constrained")
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#d62728")
    norm = matplotlib.colors.LogNorm(max(low, high * 1e-6), max(high, low * 1.001), clip=True)
    image = axis.imshow(np.ma.masked_invalid(np.maximum(values, low)), aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    figure.colorbar(image, ax=axis, label="|error| (largest of the block)")
    for colour, width in (("black", 3.2), ("white", 1.6)):  # seen on every colour
        axis.plot(column, row, marker="o", markersize=14, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width)
    what = f"{worst:.3g}" if math.isfinite(worst) else "not finite (red)"
    axis.set_title(f"{style.plain(title)}\nworst: row {row}, block {column}: {what}")
    axis.set_xlabel("block of columns")
    axis.set_ylabel("row")
    return style.save(figure, path, 150)
