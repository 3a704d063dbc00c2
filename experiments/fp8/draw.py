"""Draws plots/fp8_error.png of the run of record: python experiments/fp8/draw.py [PICTURE]

Error over speed at the longest sequence without a mask, a panel for each kind of inputs: RMS of O against float64 of what was not quantised,
in that of bfloat16, over TFLOP/s. A mark for each head dim, 64, 128 and 256; filled: Q and K rotated before they were quantised.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.lines import Line2D

from harness.report.palette import look_of
from harness.report.style import COLUMN, GREY, RC, keys, plt, save, sns

HERE = Path(__file__).resolve().parent
NAMES = {"float8": "ours, 8 bits", "fa3": "FlashAttention-3, 8 bits", "bfloat16": "ours, bfloat16"}
KINDS = {"normal": "normal", "outliers": "with outliers", "sinks": "with sinks"}


def draw(picture: Path) -> None:
    """The figure."""
    with (HERE / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == "cuda" and row["causal"] == "false"]
    longest = max(int(row["keys"]) for row in rows)
    colors = {"float8": look_of("float8")["color"], "fa3": look_of("fa3")["color"], "bfloat16": look_of("hopper")["color"]}
    sns.set_theme(style="whitegrid", rc=RC)
    figure, axes = plt.subplots(1, len(KINDS), figsize=(COLUMN, 2.1), sharey=True, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, rect=(0, 0.04, 1, 0.96))
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for row in rows:
            if row["inputs"] != kind or int(row["keys"]) != longest:
                continue
            name, _, rotated = row["contender"].partition(" ")
            face = colors[name] if rotated or name == "bfloat16" else "white"
            at = float(row["tflops"]), float(row["of_bf16"])
            axis.plot(*at, marker="o", markersize=3.6, color=colors[name], markerfacecolor=face, linestyle="", zorder=3)
            if row["contender"] == "float8":  # those of the others lie near it
                axis.annotate(row["dim"], at, (0, 5), textcoords="offset points", fontsize=5, color=GREY, ha="center")
        axis.set(yscale="log", xlim=(450, 1250), ylim=(0.7, 150), title=title)
        axis.set_yticks([1, 10, 100], ["1", "10", "100"])
        axis.minorticks_off()
    axes[0].set_ylabel("RMS error / bfloat16's")
    axes[1].set_xlabel("TFLOP/s")
    figure.suptitle(f"What 8 bits cost, {longest // 1024}k keys", fontsize=7.5)
    one = {"linestyle": "", "marker": "o", "markersize": 4}
    handles = [Line2D([], [], color=colors[name], label=label, **one) for name, label in NAMES.items()]
    handles += [Line2D([], [], color=GREY, markerfacecolor="white", label="not rotated", **one)]
    keys(figure, handles)
    figure.text(0.01, 0.005, rows[0]["device_name"], fontsize=5, color=GREY)
    save(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else HERE.parents[1] / "plots" / "fp8_error.png")
