"""The ladder's figure: a panel a dtype, a bar of TFLOP/s a step in ladder order, and a line a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .. import peers
from ..kernel.kernel import catalogue
from . import style
from .palette import DASHES, ORANGE, SKY
from .style import GREY, Keywords, ceiling
from .views import View, gemm, problem_of, steps

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
    figure, axes = style.sheet(replace(panels[0], dtype=""), title, "", footer, size, 1, len(panels), width_ratios=counts)
    units: dict[str, Patch] = {}
    for axis, panel in zip(axes, panels, strict=True):
        units |= _bars(axis, panel)
        _lines(axis, panel)
        if (product := gemm(panel)) and product.TFLOPS:
            ceiling(axis, product.TFLOPS, f"GEMM {product.TFLOPS:,.4g}")
            axis.set_ylim(0, max(axis.get_ylim()[1], 1.08 * product.TFLOPS))
        problem = problem_of(panel.rows[0])
        axis.set_title(f"{panel.dtype}, B{problem.batch} H{problem.heads_q} S{problem.seq_q} D{problem.head_dim}")
    axes[0].set_ylabel(f"{_rate(panels[0])[0]} (p20 to p80)")
    handles = [*units.values(), Line2D([], [], linestyle="", label="×: times as fast as the bar before")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, borderaxespad=style.FOOT_PAD)
    return figure


def _rate(view: View) -> tuple[str, float]:
    """The unit of a view's rates, and how many of it a TFLOP/s is: rates of the host backend are small."""
    small = view.cpu and max(row.TFLOPS or 0 for row in view.rows) < 0.1
    return ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1.0)


def _bars(axis: Axes, view: View) -> dict[str, Patch]:
    """Draw the steps; returns what the legend says of their colours."""
    tensor_cores = {k.name: k.tensor_cores for k in catalogue() if k.pass_ == view.mode or view.mode == "both"}
    one = _rate(view)[1]
    units: dict[str, Patch] = {}
    before: Row | None = None
    found = steps(view)
    for place, (_, row) in enumerate(found):
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
    labels = [f"{number:02} {row.Kernel}" for number, row in found]
    axis.set_xticks(range(len(found)), labels, rotation=38, ha="right", rotation_mode="anchor")
    axis.set_xlim(-0.6, len(found) - 0.4)
    axis.grid(visible=False)
    axis.grid(visible=True, axis="y", color="0.92")
    return units


def _lines(axis: Axes, view: View) -> None:
    """A line a peer, its name and rate at the left, where the bars of the first steps are low."""
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
    axis.set_ylim(0, top * 1.14)
    found = sorted(rates.items(), key=lambda item: item[1])
    for place, (name, rate) in enumerate(found):
        axis.axhline(rate, color="0.25", linestyle=DASHES[place % 3], linewidth=0.9, zorder=1.5)
        crowded = place + 1 < len(found) and found[place + 1][1] - rate < 0.06 * top  # the next name would be written over this one
        axis.annotate(
            f"{name} {rate:.3g}",
            (-0.55, rate),
            xytext=(0, -2 if crowded else 2),
            textcoords="offset points",
            va="top" if crowded else "bottom",
            fontsize=6,
            color="0.15",
            zorder=4,
            bbox=_WHITE,
        )
