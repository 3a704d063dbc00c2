"""The ladder's figure: a panel a dtype, a bar of TFLOP/s a step in ladder order, and a line a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .. import peers
from ..kernel import catalogue
from ..row import problem_of
from . import style
from .palette import ORANGE, SKY, look_of
from .style import GREY, Keywords, ceiling
from .views import View, gemm, steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

_WHITE = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
#: The units that multiply the matrices, by whether they are tensor cores: colour and name.
UNITS = {False: (SKY, "CUDA cores"), True: (ORANGE, "tensor cores")}


def draw(panels: Sequence[View], title: str, footer: str) -> Figure:
    """A panel for each view (of one shape, as views.ladders gives them), its bars in ladder order with their values."""
    counts = [len(steps(panel)) for panel in panels]
    size = (max(style.COLUMN, 0.36 * sum(counts) + 0.7), 2.9)
    alone = len(panels) == 1  # its problem is in the figure's title
    head, what = (panels[0], _sizes(panels[0])) if alone else (replace(panels[0], dtype=""), "")
    figure, axes = style.sheet(head, title, what, footer, size, 1, len(panels), width_ratios=counts)
    units: dict[str, Patch] = {}
    beside: dict[str, list[str]] = {}  # a peer's rate in each panel
    for axis, panel in zip(axes, panels, strict=True):
        units |= _bars(axis, panel)
        for name, rate in _lines(axis, panel).items():
            beside.setdefault(name, []).append(f"{rate:.3g}")
        if (product := gemm(panel)) and product.TFLOPS:
            ceiling(axis, product.TFLOPS, f"GEMM {product.TFLOPS:,.4g}")
            axis.set_ylim(0, max(axis.get_ylim()[1], 1.08 * product.TFLOPS))
        axis.set_title("" if alone else f"{panel.dtype}, {_sizes(panel)}")
    axes[0].set_ylabel(f"{_rate(panels[0])[0]} (p20 to p80)")
    lines = [Line2D([], [], **_line(name), label=f"{name} {' and '.join(rates)}") for name, rates in beside.items()]
    style.keys(figure, [*units.values(), Line2D([], [], linestyle="", label="×: times as fast as the bar before"), *lines])
    return figure


def _sizes(view: View) -> str:
    """The problem of a view of one shape."""
    problem = problem_of(view.rows[0])
    return f"B{problem.batch} H{problem.heads_q} S{problem.seq_q} D{problem.head_dim}"


def _rate(view: View) -> tuple[str, float]:
    """The unit of a view's rates, and how many of it a TFLOP/s is: rates of the CPU engine are small."""
    small = view.cpu and max(row.TFLOPS or 0 for row in view.rows) < 0.1
    return ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1.0)


def _bars(axis: Axes, view: View) -> dict[str, Patch]:
    """Draw the steps; returns what the legend says of their colours."""
    tensor_cores = {k.name: k.tensor_cores for k in catalogue() if k.pass_ == view.mode or view.mode == "both"}
    one = _rate(view)[1]
    units: dict[str, Patch] = {}
    before: Row | None = None
    climb = steps(view)
    for place, (_, row) in enumerate(climb):
        height = (row.TFLOPS or 0) * one
        colour, words = UNITS[tensor_cores.get(row.Kernel, False)]
        units.setdefault(words, Patch(color=colour, label=f"products on {words}"))
        axis.bar(place, height, width=0.72, color=colour, zorder=2)
        ends = [height * (row.KernelTime_ms or 1) / t for t in (row.p80_ms, row.p20_ms) if t]
        axis.plot([place] * len(ends), ends, color="0.2", linewidth=0.9, zorder=3)
        above: Keywords = {
            "xy": (place, max([height, *ends])),
            "textcoords": "offset points",
            "ha": "center",
            "zorder": 4,
            "bbox": _WHITE,
        }
        if before and before.KernelTime_ms and row.KernelTime_ms:
            axis.annotate(f"×{before.KernelTime_ms / row.KernelTime_ms:.3g}", xytext=(0, 8.5), fontsize=5, color=GREY, **above)
        axis.annotate(f"{height:.3g}", xytext=(0, 2), fontsize=6, fontweight="bold", **above)
        before = row
    labels = [f"{number:02} {row.Kernel}" for number, row in climb]
    axis.set_xticks(range(len(climb)), labels, rotation=38, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.6, len(climb) - 0.4)
    axis.grid(visible=False)
    axis.grid(visible=True, axis="y", color="0.92")
    return units


def _lines(axis: Axes, view: View) -> dict[str, float]:
    """A line a peer; their rates, for the legend: beside the lines names would stand in the bars' numbers."""
    one = _rate(view)[1]
    rates = {
        row.Kernel: (row.TFLOPS or 0) * one for row in view.rows if peers.find(row.Kernel) and row.TFLOPS and row.timing == view.timing
    }
    top = max(
        [
            *rates.values(),
            *((row.TFLOPS or 0) * one * (row.KernelTime_ms or 1) / (row.p20_ms or row.KernelTime_ms or 1) for _, row in steps(view)),
        ]
    )
    axis.set_ylim(0, top * 1.18)
    for name, rate in rates.items():
        axis.axhline(rate, **_line(name), zorder=1.5)
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def _line(peer: str) -> Keywords:
    """The look of a peer's line."""
    look = look_of(peer)
    return {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 1.1}
