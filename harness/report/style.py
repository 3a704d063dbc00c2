"""What all figures share: the look of a kernel, axes, legends, the status of rows without a time, ceilings.

A kernel has one colour, marker and line wherever it appears; ours are solid, the peers' dashed. Colours are seaborn's
"colorblind"; markers tell kernels apart without colour. Sizes suit a page of two columns; the font is matplotlib's DejaVu.
"""

from __future__ import annotations

import io
import math
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook shows its user's own figures in the page
    matplotlib.use("Agg")  # no display is needed, and none is opened

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from .. import peers
from ..files import write_files
from ..kernel.kernel import catalogue
from .views import HOST_TIME, View, problem_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..row import Row

#: Keywords of a matplotlib call, which checks them itself.
Keywords = dict[str, Any]

FOOT = 0.19  # inches at the bottom, reserved for the footer
GREY, RED = "0.35", "#a11d1d"
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN, _PINK, _GREY, _, _SKY = sns.color_palette("colorblind")  # its yellow is lost on white
_BLACK = (0.1, 0.1, 0.1)
#: By a kernel's number in the ladder: fa2 (7) is blue, split (15) red, hopper (16) green.
COLOURS = (_GREY, _BROWN, _PINK, _SKY, _PURPLE, _RED, _GREEN, _BLUE, _ORANGE, _BLACK)
PEER_COLOURS = (_ORANGE, _BLACK, _BROWN, _SKY, _PINK, _GREY, _GREEN, _RED)
MARKERS = "os^DvPX<>dph"
DASHES = ((0, (4, 1.2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
MARK: Keywords = {"markersize": 5.5, "linewidth": 1.3, "markeredgecolor": "white", "markeredgewidth": 0.5}
HOLLOW: Keywords = {"markersize": 5.5, "markerfacecolor": "none", "markeredgewidth": 0.9}
NOTE: Keywords = {"xytext": (4, -4), "textcoords": "offset points", "fontsize": 7}
RC: Keywords = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.7,
    "font.family": "DejaVu Sans",
}


@cache
def look_of(kernel: str) -> Keywords:
    """Colour, marker and line of a kernel: by its number in the ladder, by a peer's place, by checksum for any other name."""
    number = {k.name: k.number for k in catalogue()}.get(kernel)
    if number is not None:
        return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": "-"}
    names = peers.names()
    if kernel in names:
        place = names.index(kernel)
        return {
            "color": PEER_COLOURS[place % len(PEER_COLOURS)],
            "marker": MARKERS[(place + 5) % len(MARKERS)],
            "linestyle": DASHES[place % 3],
        }
    number = zlib.crc32(kernel.encode())
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": "-"}


def sheet(
    view: View, title: str, footer: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **how: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with a title that says what is timed on what, a footer, and its axes, row by row."""
    sns.set_theme(style="whitegrid", rc=RC)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **how)
    where = f"{HOST_TIME}\n{view.device_name}" if view.cpu else view.device_name
    figure.suptitle(f"{title}\n{where}, {view.dtype}, {'causal' if view.causal else 'not causal'}", fontsize=10)
    margin = FOOT / size[1]
    figure.get_layout_engine().set(rect=(0, margin, 1, 1 - margin))
    figure.text(0.01, 0.3 * margin, footer, fontsize=6.5, color=GREY)
    return figure, list(axes.flat)


def series(axis: Axes, view: View, value: Callable[[Row], float | None], power: int, place: Callable[[Row], float], joined: bool) -> None:
    """Draw a value of every kernel's rows. power is that of time in the value: it turns p20 and p80 into bars of the value."""
    for kernel in view.kernels:
        rows = sorted((row for row in view.cells(kernel).values() if row.KernelTime_ms and value(row)), key=place)
        if not rows:
            continue
        xs, ys = [place(row) for row in rows], [float(value(row) or 0) for row in rows]
        look = dict(look_of(kernel)) | ({} if joined else {"linestyle": ""})
        ends = [
            sorted(y * (t / float(r.KernelTime_ms or 1)) ** power for t in (r.p20_ms, r.p80_ms) if t) for r, y in zip(rows, ys, strict=True)
        ]
        bars = np.array([(y - e[0], e[1] - y) if len(e) == 2 else (0, 0) for y, e in zip(ys, ends, strict=True)]).T
        axis.errorbar(xs, ys, yerr=np.maximum(bars, 0), fmt="none", ecolor=look["color"], elinewidth=0.8, capsize=0)
        axis.plot(xs, ys, **look, **MARK, label=kernel)


def scale(axis: Axes) -> None:
    """A logarithmic y axis with plain tick labels where the values span more than a factor of 12, else a linear one from 0."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.lines] or [np.ones(1)])
    if len(values) and values.max() > 12 * values.min() > 0:
        axis.set_yscale("log")
        plain_log(axis)
    else:
        axis.set_ylim(0, None)


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


def ceiling(axis: Axes, value: float, text: str) -> None:
    """A measured ceiling: a dashed line with its value and origin."""
    axis.axhline(value, color="0.2", linestyle="--", linewidth=1, zorder=1.5)
    axis.annotate(
        text, (0.01, value), xycoords=("axes fraction", "data"), xytext=(2, 2), textcoords="offset points", fontsize=6.5, color="0.2"
    )


def untimed(view: View) -> list[Row]:
    """Rows of the timing drawn that have no time: failed, refused, absent."""
    return [row for kernel in view.kernels for row in view.cells(kernel).values() if not row.KernelTime_ms]


def drawn(view: View) -> list[str]:
    """The kernels that have a time in some shape."""
    return [kernel for kernel in view.kernels if any(row.KernelTime_ms for row in view.cells(kernel).values())]


def words(axis: Axes, view: View, place: Callable[[Row], float], dodged: bool = False) -> None:
    """Write each row without a time at its shape, at the bottom of a time axis, unless its kernel has none at all (see the legend)."""
    rows = [row for row in untimed(view) if row.Kernel in drawn(view)]
    if not rows:
        return
    low, high = axis.get_ylim()
    if axis.get_yscale() == "log":
        axis.set_ylim(low / (high / low) ** 0.28, high)
    else:
        axis.set_ylim(-0.3 * high, high)
    seen: dict[float, int] = {}
    for row in rows:
        x = place(row)
        beside = seen.setdefault(x, 0)
        seen[x] += 1
        axis.annotate(
            f"{row.Kernel} {row.Status}",
            (x, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(0 if dodged else 7 * beside, 0),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=6,
            color=RED,
        )


def legend(
    figure: Figure,
    view: View,
    extra: Sequence[Line2D] = (),
    lines: bool = True,
    suffix: Mapping[str, str] | None = None,
    order: Callable[[Row], float | None] | None = None,
) -> None:
    """One legend outside the axes. It names every kernel of the view, those without a time with their status.

    Below the figure in the order of the rows; with `order`, at the right, from the kernel that ends highest to the lowest.
    """
    found = drawn(view)
    if order:
        found.sort(key=lambda kernel: -_last(view, kernel, order))
    why: dict[str, dict[str, None]] = {}
    for row in untimed(view):
        why.setdefault(row.Kernel, {})[row.Status] = None
    handles = []
    for kernel in found:
        look = dict(look_of(kernel)) | ({} if lines else {"linestyle": ""})
        text = kernel + (suffix or {}).get(kernel, "") + (f" ({', '.join(why[kernel])} in part)" if kernel in why else "")
        handles.append(Line2D([], [], **look, **MARK, label=text))
    handles += extra
    absent = [f"{kernel}: {', '.join(why[kernel])}" for kernel in view.kernels if kernel not in found]
    handles += [Line2D([], [], linestyle="", label=text) for text in absent]
    longest = max((len(str(handle.get_label())) for handle in handles), default=1)
    columns = max(1, min(len(handles), int(figure.get_size_inches()[0] / (0.056 * longest + 0.62))))
    place = (
        {"loc": "outside right center"}
        if order
        else {"loc": "outside lower center", "ncols": columns, "borderaxespad": FOOT * 72 / RC["legend.fontsize"] + 0.3}
    )
    made = figure.legend(handles=handles, frameon=False, handlelength=3, **place)
    for entry in made.get_texts():
        if entry.get_text() in absent:
            entry.set_color(RED)


def _last(view: View, kernel: str, value: Callable[[Row], float | None]) -> float:
    """A kernel's value at the longest sequence it has one for; 0 where it has none."""
    found = [(row.SeqLen, v) for row in view.cells(kernel).values() if (v := value(row))]
    return max(found)[1] if found else 0.0


def family_words(view: View) -> str:
    """What a family's shapes have in common."""
    problems = [problem_of(row) for row in view.rows]
    first = problems[0]
    batch = f"B{first.batch}" if len({p.batch for p in problems}) == 1 else f"{first.batch * first.seq_q:,} tokens"
    return f"{batch} H{first.heads_q} D{first.head_dim}" + f" Hkv{first.heads_kv}" * (first.heads_kv != first.heads_q)


def bytes_words(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def plain(text: str, most: int = 160) -> str:
    """Text of a file or an option as a figure may hold it: one line of at most `most` letters that have a shape; $ is no formula."""
    whole = "".join(letter if letter.isprintable() else " " for letter in text).replace("\\$", "$")
    return (whole if len(whole) <= most else whole[: most - 1] + "…").replace("$", r"\$")


def save(figure: Figure, path: Path, dpi: int = 300) -> Path:
    """Write a figure as a PNG file of 256 colours, a third the size of one of all colours, and close it. The file is whole or
    not there. Raises DiskFault."""
    whole = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that DejaVu lacks is drawn as a box
        figure.savefig(whole, dpi=dpi)
    plt.close(figure)
    reduced = io.BytesIO()
    Image.open(whole).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(reduced, "png", dpi=(dpi, dpi), optimize=True)
    write_files(path.parent, {path.name: reduced.getbuffer()})
    return path
