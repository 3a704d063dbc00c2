"""Rows -> figures. The only importer, with compare.py, of pandas, matplotlib and seaborn: they take a second to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .results import Row

PASSES = {"FOR": "forward", "BAC": "backward", "BOT": "forward and backward"}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame, one column a field."""
    return pd.DataFrame([dataclasses.asdict(row) for row in rows])


def times(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """Draw kernel times into a PNG file: over the sequence length (log-log) where only that varies, else grouped by test.

    One panel a pass, one line or marker a kernel. Rows that did not pass have no time and are named under the picture. Returns the
    path, or None where no row has a time.
    """
    data = frame(rows)
    if data.empty or data["KernelTime_ms"].isna().all():
        return None
    timed = data.dropna(subset=["KernelTime_ms"])
    timed = timed.assign(KernelTime_ms=timed["KernelTime_ms"].astype(float))
    panels = [name for name in PASSES if name in set(timed["Type"])]
    over_length = timed["SeqLen"].nunique() > 1 and len(timed[["Batch", "Heads", "HeadDim"]].drop_duplicates()) == 1
    sns.set_theme(style="whitegrid", palette="colorblind")
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels) + 1, 5), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        _panel(axis, timed[timed["Type"] == panel], over_length)
        axis.set_title(PASSES[panel])
    cpu = set(data["device"]) == {"cpu"}
    unit = "CPU time (host backend), not GPU performance" if cpu else f"kernel time on {', '.join(dict.fromkeys(data['device_name']))}"
    figure.suptitle(f"{title}\n{unit}")
    absent = data[data["KernelTime_ms"].isna()]
    if not absent.empty:
        counts = (absent["Kernel"] + " " + absent["Status"]).value_counts(sort=False)
        words = ", ".join(f"{what} ({count})" for what, count in counts.items())
        figure.supxlabel(f"not drawn: {words}", fontsize="small", color="firebrick")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _panel(axis: Axes, data: pd.DataFrame, over_length: bool) -> None:
    if over_length:
        sns.lineplot(data, x="SeqLen", y="KernelTime_ms", hue="Kernel", style="Kernel", markers=True, dashes=False, ax=axis, errorbar=None)
        axis.set_xscale("log", base=2)
        lengths = sorted(data["SeqLen"].unique())
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_xlabel("sequence length S")
    else:
        # Points, not bars: on a logarithmic axis a bar's length means nothing.
        sns.scatterplot(data, x="Test", y="KernelTime_ms", hue="Kernel", style="Kernel", s=70, ax=axis)
        axis.tick_params(axis="x", rotation=45)
        for label in axis.get_xticklabels():
            label.set_horizontalalignment("right")
        axis.set_xlabel("")
    axis.set_yscale("log")
    sns.move_legend(axis, "lower right")  # times grow to the right, so that corner is empty
    axis.set_ylabel("time, ms (median; lower is better)")
