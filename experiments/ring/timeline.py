"""Draws plots/ring_timeline.png of ring_timeline.csv beside this file: python experiments/ring/timeline.py [FOLDER] [PICTURE]

One run of the ring, forward and backward, with overlap: for each rank a row for its compute stream and one for its communication
stream, in milliseconds after the first of all launches. Rows are those of one shape and the most ranks: 32k causal, where the record has it,
since there the messages are longest beside the compute. Marks are CUDA events; the ranks' common start is exact to some microseconds.
A message's bar reaches from the moment its stream may send to the moment its data is there, so it also shows waiting for the other rank.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent.parent / "plots" / "ring_timeline.png"
WANTED = {"seq": "32768", "causal": "true"}
COLORS = {"attention": "#0173b2", "merge": "#de8f05", "clear": "0.6", "round": "0.35", "K V": "#029e73", "dK dV": "#cc78bc"}
NAMES = {"merge": "merge, add to sums", "round": "round to storage type", "K V": "K, V", "dK dV": "dK, dV sums"}

Row = dict[str, str]


def chosen(rows: list[Row]) -> list[Row]:
    """The rows of one shape, with overlap, of the most ranks and the last of its runs there."""
    rows = [row for row in rows if row["overlap"] == "true"]
    rows = [row for row in rows if all(row[key] == value for key, value in WANTED.items())] or rows
    same = ("compute", "batch", "heads", "seq", "dim", "dtype", "causal", "ranks", "partition")
    last = max(rows, key=lambda row: int(row["ranks"]))
    rows = [row for row in rows if all(row[key] == last[key] for key in same)]
    made = []
    for pass_ in ("forward", "backward"):
        mine = [row for row in rows if row["pass"] == pass_]
        starts = [i for i, row in enumerate(mine) if row["rank"] == "0" and (i == 0 or mine[i - 1]["rank"] != "0")]
        made += mine[starts[-1] :] if starts else []
    return made


def draw(axis: Axes, rows: list[Row], ranks: int) -> None:
    """A pass: two rows a rank."""
    total = max(float(row["end_ms"]) for row in rows)
    for row in rows:
        place = 2 * int(row["rank"]) + (row["stream"] == "communication")
        began, length = float(row["begin_ms"]), float(row["end_ms"]) - float(row["begin_ms"])
        if row["stream"] == "communication" and row["bytes"] == "0":
            continue
        axis.broken_barh([(began, length)], (place - 0.4, 0.8), facecolor=COLORS[row["what"]], edgecolor="white", linewidth=0.3)
        if length > 0.06 * total and row["what"] in ("attention", "K V", "dK dV"):
            own = ", own keys" if int(row["step"]) % ranks == 0 else ""  # a backward pass ends with a rank's own keys
            text = f"step {row['step']}{own}" if row["what"] == "attention" else f"{int(row['bytes']) / 2**20:.3g} MiB"
            axis.text(began + length / 2, place, text, ha="center", va="center", color="white", fontsize=7)
    axis.set_yticks(range(2 * ranks), [f"rank {i // 2} {'communication' if i % 2 else 'compute'}" for i in range(2 * ranks)], fontsize=7)
    for rank in range(1, ranks):
        axis.axhline(2 * rank - 0.5, color="0.8", linewidth=0.6)
    axis.set_ylim(2 * ranks - 0.4, -0.6)
    axis.set_xlim(0, total * 1.01)
    axis.set_title(f"{rows[0]['pass']}, {total:.3g} ms", fontsize=9, loc="left")
    axis.set_xlabel("ms after the first launch", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)


def main() -> None:
    """The figure of what was recorded."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    with (folder / "ring_timeline.csv").open(encoding="utf-8", newline="") as file:
        rows = chosen(list(csv.DictReader(file)))
    facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    passes = [mine for pass_ in ("forward", "backward") if (mine := [row for row in rows if row["pass"] == pass_])]
    ranks, head = int(rows[0]["ranks"]), rows[0]
    height = 0.9 + len(passes) * (0.75 + 0.4 * ranks)
    figure, axes = plt.subplots(len(passes), 1, figsize=(9, height), squeeze=False, layout="constrained")
    for (axis,), mine in zip(axes, passes, strict=True):
        draw(axis, mine, ranks)
    shape = (
        f"B{head['batch']} H{head['heads']} S{head['seq']} D{head['dim']} {head['dtype']}{' causal' if head['causal'] == 'true' else ''}"
    )
    device = facts["device_name"] if facts["device"] == "cuda" else "CPU processes: CPU time, not a GPU's"
    figure.suptitle(f"Ring attention, {head['compute']}, {shape}, {head['partition']}, {ranks} ranks ({device})", fontsize=9)
    patches = [Patch(color=color, label=NAMES.get(what, what)) for what, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=7)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
