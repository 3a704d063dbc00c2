"""What all figures share: size and type, axes, error bars, legends, ceilings.

A figure is as wide as a column of a paper (COLUMN), where its smallest letters are 5 points; a README shows it larger. It has one
quantity, six kernels at most (View.picked), and bars from the 20th to the 80th percentile. The font is matplotlib's DejaVu.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook shows its user's own figures in the page
    matplotlib.use("Agg")  # no display is needed, and none is opened

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..row import problem_of
from .palette import DASHES as DASHES
from .palette import look_of as look_of
from .picture import RC as RC
from .picture import Keywords as Keywords
from .picture import drawn as drawn
from .picture import plain as plain
from .picture import save as save
from .views import HOST_TIME, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

GREY, RED = "0.35", "#a11d1d"
#: Inches: a column of a paper, which a README shows at two and a half times the size; and at the bottom, for the footer.
COLUMN, FOOT = 3.35, 0.1
FOOT_PAD = FOOT * 72 / 6.3 + 0.2  # the same above a legend below the axes, in its letters
MARK: Keywords = {"markersize": 3.6, "linewidth": 1.1, "markeredgecolor": "white", "markeredgewidth": 0.3}
HOLLOW: Keywords = {"markersize": 4.2, "markerfacecolor": "none", "markeredgewidth": 0.8}
BARS: Keywords = {"fmt": "none", "ecolor": "0.1", "elinewidth": 0.7, "capsize": 2.2, "capthick": 0.7, "zorder": 3.5}
NOTE: Keywords = {"xytext": (3, -3), "textcoords": "offset points", "fontsize": 5.5}


def sheet(
    view: View, title: str, what: str, footer: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **how: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. Above them the title, then what is timed: pass, problem, dtype and mask, where the title
    does not say it; in grey the footer. CPU times are called so."""
    parts = (what, view.dtype, "causal" if view.causal else "not causal")
    said = ", ".join(part for part in parts if part and part.lower() not in title.lower().split(", "))
    head = f"{title}, {said}" if len(title) + len(said) < 48 else f"{title}\n{said}"
    return blank(head + f"\n{HOST_TIME}" * view.cpu, footer, size, rows, columns, **how)


def blank(head: str, footer: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, under a head that is written as it is; in grey the footer."""
    sns.set_theme(style="whitegrid", rc=RC)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **how)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02, rect=(0, FOOT / size[1], 1, 1 - FOOT / size[1]))
    figure.suptitle(head, fontsize=7.5, linespacing=1.25)
    figure.text(0.01, 0.02 / size[1], footer, fontsize=5, color=GREY)
    return figure, list(axes.flat)


def series(axis: Axes, view: View, value: Callable[[Row], float | None], power: int, place: Callable[[Row], float]) -> None:
    """A line of a value for each kernel. power is that of time in the value: it turns p20 and p80 into bars of the value; 0: none."""
    for kernel, look in view.looks.items():
        rows = sorted((row for row in view.cells(kernel).values() if row.KernelTime_ms and value(row)), key=place)
        if not rows:
            continue
        xs, ys = [place(row) for row in rows], [float(value(row) or 0) for row in rows]
        if power:
            axis.errorbar(xs, ys, yerr=spread(rows, ys, power), **BARS)
        axis.plot(xs, ys, **look, **MARK, label=kernel)


def spread(rows: Sequence[Row], ys: Sequence[float], power: int) -> Any:
    """How far below and above values of rows those of their p20 and p80 are, (2, rows); 0 where a row has none."""
    ends = [
        sorted(y * (t / float(r.KernelTime_ms or 1)) ** power for t in (r.p20_ms, r.p80_ms) if t) for r, y in zip(rows, ys, strict=True)
    ]
    bars = [(y - e[0], e[1] - y) if len(e) == 2 else (0.0, 0.0) for y, e in zip(ys, ends, strict=True)]
    return np.maximum(np.array(bars).T, 0)


def plain_log(axis: Axes) -> None:
    """Plain tick labels on a logarithmic y axis: decades, and 2 and 5 between them where there are few."""
    low, high = axis.get_ylim()
    few = math.log10(high / low) < 2.5
    axis.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if few else (1,), numticks=20))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}" if value >= 1e-4 else f"{value:.0e}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def lengths(axis: Axes, view: View) -> None:
    """The x axis of sequence lengths: base 2, a tick at each length."""
    ticks = sorted({row.SeqLen for row in view.rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 10240 and tick % 1024 == 0 else str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("sequence length S")


def ceiling(axis: Axes, value: float, text: str, right: bool = False) -> None:
    """A measured ceiling: a dashed line with its value and origin, at its left or its right end."""
    axis.axhline(value, color="0.2", linestyle="--", linewidth=0.8, zorder=1.5)
    place: Keywords = {"xycoords": ("axes fraction", "data"), "xytext": (-2 if right else 2, 2), "textcoords": "offset points"}
    white = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    at, side = (0.99, "right") if right else (0.01, "left")
    axis.annotate(text, (at, value), **place, ha=side, fontsize=5.5, color="0.2", bbox=white, zorder=3)


def crossed(axis: Axes, value: float) -> bool:
    """Whether lines pass through the place of a ceiling's text at the left end, and through less of that at the right end."""

    def hits(low: float, high: float) -> int:
        count, into = 0, axis.transData + axis.transAxes.inverted()
        for line in axis.lines:
            xs, ys = into.transform(line.get_xydata()).T
            at = np.linspace(low, high, 30)
            above = np.interp(at, xs, ys, left=-1, right=-1) - into.transform((axis.get_xlim()[0], value))[1]
            count += int(((above > -0.01) & (above < 0.07)).sum())
        return count

    return hits(0, 0.4) > hits(0.6, 1)


def legend(
    figure: Figure,
    view: View,
    extra: Sequence[Any] = (),
    of: Sequence[str] | None = None,
    suffix: Mapping[str, str] | None = None,
    order: Callable[[Row], float | None] | None = None,
    bars: bool = False,
    lines: bool = True,
) -> None:
    """One legend below the axes: the kernels with a time, or those of `of`; by `order`, from the one that ends highest to the lowest.

    What was refused or is absent is in the summary.
    """
    kernels = list(view.timed if of is None else of)
    if order:
        kernels.sort(key=lambda kernel: -_last(view, kernel, order))
    handles: list[Any] = []
    for kernel in kernels:
        text, look = kernel + (suffix or {}).get(kernel, ""), view.looks[kernel] | ({} if lines else {"linestyle": ""})
        handles.append(Patch(**block(view, kernel), label=text) if bars else Line2D([], [], **look, **MARK, label=text))
    handles += extra
    keys(figure, handles)


def keys(figure: Figure, handles: Sequence[Any]) -> None:
    """The legend's entries below the axes, in as many columns as the figure is wide for."""
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(
        handles=handles,
        frameon=False,
        handlelength=2.2,
        columnspacing=1.0,
        labelspacing=0.25,
        handletextpad=0.5,
        borderaxespad=FOOT_PAD,
        loc="outside lower center",
        ncols=_columns(labels, figure.get_size_inches()[0]),
    )


def _columns(labels: Sequence[str], width: float) -> int:
    """How many columns of a legend's entries are no wider than `width` inches. Each is as wide as its longest entry."""

    def wide(count: int) -> float:  # filled one after the other, as matplotlib fills them
        return sum(0.047 * max(map(len, column)) + 0.36 for column in np.array_split(np.array(labels, dtype=object), count))

    return next((count for count in range(len(labels), 1, -1) if wide(count) <= width), 1)


def ringed(place: int, count: int) -> Keywords:
    """MARK for the place-th of count lines: the earlier, the larger, so that those of equal values show as rings around one another."""
    later = count - 1 - place
    return MARK | {"markersize": 3.0 + 0.55 * later, "linewidth": 0.8 + 0.22 * later}


def block(view: View, kernel: str) -> Keywords:
    """How a kernel's bars are filled: peers hatched."""
    hatch = None if view.looks[kernel]["linestyle"] == "-" else "/////"
    return {"facecolor": view.looks[kernel]["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0.2}


def _last(view: View, kernel: str, value: Callable[[Row], float | None]) -> float:
    """A kernel's value at the largest problem it has one for; 0 where it has none."""
    values = [((row.SeqLen, row.HeadDim), v) for row in view.cells(kernel).values() if (v := value(row))]
    return max(values)[1] if values else 0.0


def family_words(view: View) -> str:
    """What a family's shapes have in common."""
    problems = [problem_of(row) for row in view.rows]
    first = problems[0]
    batch = f"B{first.batch}" if len({p.batch for p in problems}) == 1 else f"{first.batch * first.seq_q:,} tokens"
    length = f" S{first.seq_q}" if len({p.seq_q for p in problems}) == 1 else ""
    dims = f" D{first.head_dim}" + f" Dv{first.head_dim_v}" * first.has_own_dim_v
    dim = dims if len({(p.head_dim, p.head_dim_v) for p in problems}) == 1 else ""
    return f"{batch} H{first.heads_q}{length}{dim}" + f" Hkv{first.heads_kv}" * (first.heads_kv != first.heads_q)


def bytes_words(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
