"""The figure of problems that a seed drew: how many times as fast as the best peer ours is on each, over the problem's work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from . import style
from .distribution import Distribution
from .palette import BLACK, BLUE, ORANGE, SKY, VERMILION
from .style import GREY, Keywords
from .views import HOST_TIME, PASS_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

#: The colour of the head dims up to one, and of those beyond the last.
COLOURS, BEYOND = {64: SKY, 96: BLUE, 128: ORANGE, 256: VERMILION}, BLACK
MARKS = {"bfloat16": "o", "float16": "^", "float32": "s", "float64": "D"}
DOT: Keywords = {"linestyle": "", "markersize": 3.2, "markeredgecolor": "white", "markeredgewidth": 0.3}


def draw(distributions: Sequence[Distribution], title: str, footer: str) -> Figure:
    """A panel a pass, a dot a problem: its ratio over the FLOPs of the pass, coloured by head dim; a dashed line at each geometric mean.

    distributions: the distributions of one kind of time.
    """
    passes = list(dict.fromkeys(distribution.Type for distribution in distributions))
    rows = [ratio.ours for distribution in distributions for ratio in distribution.ratios]
    host = any(row.device == "cpu" for row in rows)
    size = (style.COLUMN, 1.5 * len(passes) + 1.0)
    figure, axes = style.blank(title + f"\n{HOST_TIME}" * host, footer, size, len(passes), sharex=True)
    for axis, pass_ in zip(axes, passes, strict=True):
        _panel(axis, [distribution for distribution in distributions if distribution.Type == pass_])
    axes[-1].set_xlabel("FLOPs of a run")
    dims = {_up_to(row.HeadDim): _colour(row) for row in sorted(rows, key=lambda row: row.HeadDim)}
    keys = [Line2D([], [], color=colour, marker="o", **DOT, label=f"head dim {words}") for words, colour in dims.items()]
    dtypes = [dtype for dtype in MARKS if any(_dtype(row) == dtype for row in rows)]
    style.keys(figure, [*keys, *(Line2D([], [], color=GREY, marker=MARKS[dtype], **DOT, label=dtype) for dtype in dtypes)])
    return figure


def _panel(axis: Axes, distributions: Sequence[Distribution]) -> None:
    """The dots of one pass, the line at 1, and the means of its dtype classes."""
    for distribution in distributions:
        for ratio in distribution.ratios:
            axis.plot([ratio.work], [ratio.ratio], color=_colour(ratio.ours), marker=MARKS[_dtype(ratio.ours)], **DOT)
        axis.axhline(distribution.mean, color=GREY, linestyle="--", linewidth=0.7, zorder=1.5)
    axis.axhline(1, color="0.2", linewidth=0.9, zorder=1.6)
    axis.set_xscale("log")
    axis.set_yscale("log", base=2)
    low, high = (
        min(distribution.values[0] for distribution in distributions),
        max(distribution.values[-1] for distribution in distributions),
    )
    axis.set_ylim(min(low, 1) / 1.1, max(high, 1) * 1.1)
    few = high / low < 8
    axis.yaxis.set_major_locator(LogLocator(2, subs=(1, 1.25, 1.5, 1.75) if few else (1,), numticks=20))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("times as fast as\nthe best peer")
    words = (
        f"{distribution.dtype} mean {distribution.mean:.3f}, {distribution.below} of {len(distribution.ratios)} below 1"
        for distribution in distributions
    )
    axis.set_title("\n".join([PASS_WORDS[distributions[0].Type], *words]), fontsize=6.5)


def _dtype(row: Row) -> str:
    return "float32" if row.dtype == "tf32" else row.dtype


def _colour(row: Row) -> str:
    return next((colour for dim, colour in COLOURS.items() if row.HeadDim <= dim), BEYOND)


def _up_to(dim: int) -> str:
    """The head dims of a colour, in words."""
    before = 0
    for last in COLOURS:
        if dim <= last:
            return f"{before + 1} to {last}"
        before = last
    return f"above {before}"
