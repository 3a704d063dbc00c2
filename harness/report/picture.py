"""A picture of where a tensor is wrong, and how figures are saved: what needs neither pandas nor seaborn, which take seconds to load."""

from __future__ import annotations

import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from PIL import Image

from ..array import Array
from ..fault import Dropped, Fault, clipped
from ..files import write_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Keywords of a matplotlib call, which checks them itself.
Keywords = dict[str, Any]

RC: Any = {  # of rcParams, whose names matplotlib lists as literals
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "axes.labelpad": 2.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "legend.fontsize": 6.3,
    "grid.linewidth": 0.4,
    "axes.linewidth": 0.6,
    "font.family": "DejaVu Sans",
}


@contextmanager
def _own_style(rc: Any) -> Iterator[None]:
    """matplotlib's own defaults and rc, whatever a matplotlibrc says; what it says holds again afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(rc)
        yield


def drawn(name: str, draw: Callable[[], Path | None], rc: Keywords = RC) -> Path | None:
    """What draw returns, in our own style; None where it cannot, which is a warning: no verdict hangs on a figure. Faults pass."""
    try:
        with _own_style(rc):
            return draw()
    except Fault:
        raise
    except Exception as error:
        warnings.warn(f"{name} was not drawn: {type(error).__name__}: {clipped(str(error))}", Dropped, stacklevel=2)
        return None


def error_picture(errors: Array, title: str, path: Path) -> Path | None:
    """Draw an |error| map (rows x blocks of columns, as budget.error_map gives it) with its worst cell marked. Returns the path.

    Colours are logarithmic; cells that are not finite are red. None, and a warning, where it cannot be drawn. Raises DiskFault where
    the file cannot be written.
    """
    return drawn(path.name, lambda: save(error_figure(errors, title), path, 150))


def error_figure(errors: Array, title: str) -> Figure:
    """The figure of error_picture. It is none of pyplot's, which a picture after a verdict need not load."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    values = np.asarray(errors, dtype=np.float64)
    finite = values[np.isfinite(values) & (values > 0)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (1e-12, 1.0)
    row, column = np.unravel_index(int(np.where(np.isnan(values), np.inf, values).argmax()), values.shape)
    worst = float(values[row, column])
    figure = Figure(figsize=(6, 4.8), layout="constrained")
    axis = figure.subplots()
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#d62728")
    norm = LogNorm(max(low, high * 1e-6), max(high, low * 1.001), clip=True)
    # imshow masks what is not finite.
    image = axis.imshow(np.maximum(values, low), aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    figure.colorbar(image, ax=axis, label="|error| (largest of the block)")
    for colour, width in (("black", 3.2), ("white", 1.6)):  # seen on every colour
        axis.plot(column, row, marker="o", markersize=14, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width)
    what = f"{worst:.3g}" if math.isfinite(worst) else "not finite (red)"
    axis.set_title(f"{plain(title)}\nworst: row {row}, block {column}: {what}")
    axis.set_xlabel("block of columns")
    axis.set_ylabel("row")
    return figure


def plain(text: str, most: int = 160) -> str:
    """Text of a file or an option as a figure may hold it: one line of at most `most` letters that have a shape; $ is no formula."""
    whole = "".join(letter if letter.isprintable() else " " for letter in text).replace("\\$", "$")
    return (whole if len(whole) <= most else whole[: most - 1] + "…").replace("$", r"\$")


def save(figure: Figure, path: Path, dpi: int = 300) -> Path:
    """Write a figure as a PNG file of its 256 most frequent colours, a third the size of one of all, and close it. The file is whole or
    not there. Raises DiskFault."""
    whole = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that DejaVu lacks is drawn as a box
        figure.savefig(whole, dpi=dpi)
    if pyplot := sys.modules.get("matplotlib.pyplot"):  # else the figure is none of its own
        pyplot.close(figure)
    reduced = io.BytesIO()
    _frequent(np.asarray(Image.open(whole).convert("RGB"))).save(reduced, "png", dpi=(dpi, dpi), optimize=True)
    # Not getbuffer(), a view: Python before 3.12.2 may crash where garbage is collected that holds one, and later ones complain.
    write_files(path.parent, {path.name: reduced.getvalue()})
    return path


def _frequent(pixels: Array) -> Image.Image:
    """An image (rows, columns, 3 bytes) in its 256 most frequent colours, each pixel in the nearest.

    Pillow's own choice mixes rare colours: here a kernel's is exact, also where only the legend shows it.
    """
    packed = pixels.astype(np.int32) @ np.array([65536, 256, 1], np.int32)
    colours, place, counts = np.unique(packed.ravel(), return_inverse=True, return_counts=True)
    parts = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    kept = parts[np.argsort(-counts, kind="stable")[:256]]
    nearest = np.concatenate([((some[:, None] - kept) ** 2).sum(-1).argmin(1) for some in np.array_split(parts, len(parts) // 512 + 1)])
    image = Image.fromarray(nearest.astype(np.uint8)[place].reshape(packed.shape), "P")
    image.putpalette(kept.astype(np.uint8).ravel().tolist())
    return image
