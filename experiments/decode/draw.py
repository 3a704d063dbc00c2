"""Draws plots/decode_speed.png of the run of record: python experiments/decode/draw.py [PICTURE]

GB/s of the least traffic over the keys of a sequence, of caches of 16 bits, a panel for each batch, a mark for each problem of the sweep, whatever its head dim,
queries and group: what auto takes, and the fastest peer. Times are cold where the sweep has them, since K and V of less than 50 MB stay in L2.
The dashed line is a copy's, which reads and writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.lines import Line2D

from harness import peers
from harness.report.compose import read
from harness.report.palette import look_of
from harness.report.style import COLUMN, GREY, RC, keys, plt, save, sns
from harness.report.summary import commit_of, dates_of
from harness.row import Row

ROOT = Path(__file__).resolve().parents[2]
THEIRS = "0.55"


def fastest(rows: list[Row]) -> dict[str, dict[bool, Row]]:
    """Of each problem our row and the fastest peer's (True), cold where there is one."""
    found: dict[str, dict[bool, Row]] = {}
    for row in sorted(rows, key=lambda row: row.timing != "cold"):
        if row.Test == "ceiling" or not row.Bandwidth_GBps or row.dtype_kv:
            continue
        of, theirs = found.setdefault(row.Test, {}), bool(peers.find(row.Kernel))
        best = of.get(theirs)
        if best is None or (best.timing == row.timing and row.Bandwidth_GBps > (best.Bandwidth_GBps or 0)):
            of[theirs] = row
    return found


def draw(picture: Path) -> None:
    """The figure."""
    rows, env = read(ROOT / "experiments" / "decode")
    problems = fastest(rows).values()
    batches = sorted({row.Batch for of in problems for row in of.values()})
    copy = next(row.Bandwidth_GBps for row in rows if row.Kernel == "ceiling-copy")
    sns.set_theme(style="whitegrid", rc=RC)
    figure, axes = plt.subplots(1, len(batches), figsize=(COLUMN, 2.1), sharey=True, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, rect=(0, 0.04, 1, 0.96))
    ours = look_of("decode")["color"]
    for axis, batch in zip(axes[0], batches, strict=True):
        for of in problems:
            if of[False].Batch != batch:
                continue
            at = [float(of[False].seq_kv or 0) * (1.06 if theirs else 0.94) for theirs in (False, True)]
            speed = [of[theirs].Bandwidth_GBps or 0 for theirs in (False, True)]
            axis.plot(at, speed, color=GREY, linewidth=0.4, zorder=2)
            axis.plot(at[:1], speed[:1], marker="o", markersize=3.2, color=ours, linestyle="", zorder=3)
            axis.plot(at[1:], speed[1:], marker="o", markersize=3.2, color=THEIRS, markerfacecolor="white", linestyle="", zorder=3)
        axis.axhline(copy, color=GREY, linestyle="--", linewidth=0.8, zorder=1)
        axis.set(xscale="log", xlim=(700, 190_000), ylim=(0, 4900), title=f"batch {batch}")
        axis.set_xticks([1024, 8192, 32768, 131072], ["1k", "8k", "", "128k"])  # 32k has no room
        axis.tick_params(axis="x", labelsize=6)
        axis.minorticks_off()
    axes[0][0].set_ylabel("GB/s")
    axes[0][len(batches) // 2].set_xlabel("keys of a sequence")
    figure.suptitle("Few queries, 1 to 16, bfloat16", fontsize=7.5)
    one = {"linestyle": "", "marker": "o", "markersize": 4}
    handles = [Line2D([], [], color=ours, label="auto: decode or hopper", **one)]
    handles += [Line2D([], [], color=THEIRS, markerfacecolor="white", label="the fastest peer", **one)]
    handles += [Line2D([], [], color=GREY, linestyle="--", linewidth=0.8, label="copy")]
    keys(figure, handles)
    figure.text(0.01, 0.005, f"{rows[0].device_name} · {dates_of(rows)} · commit {commit_of(rows, env)}", fontsize=5, color=GREY)
    save(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "plots" / "decode_speed.png")
