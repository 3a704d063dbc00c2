"""Draws plots/ring_scaling.png of ring.jsonl beside this file: python experiments/ring/draw.py [PICTURE]

TFLOP/s of each GPU over the number of GPUs: the ring with and without overlap, the same kernel on one GPU, torch's context_parallel.
A panel a length and mask, forward above, forward and backward together below. It also prints the table of docs/results-ring.md, and below it what a
pass costs beside attention: compute of the steps without overlap over one GPU's time, and of the run with overlap the parts that merge
or clear or round (other), in which no stream does anything (idle), and what the host takes to enqueue it.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent.parent / "plots" / "ring_scaling.png"
LOOKS = {
    "ring": {"color": "#0173b2", "marker": "o", "linestyle": "-"},
    "ring, no overlap": {"color": "#56b4e9", "marker": "s", "linestyle": ":"},
    "context_parallel (cuDNN)": {"color": "0.2", "marker": "^", "linestyle": "--"},
}


def rates(lines: list[dict[str, Any]], seq: int, causal: bool, mode: str) -> dict[str, dict[int, float]]:
    """TFLOP/s of each GPU by number of GPUs, for each line of the figure."""
    here = [line for line in lines if line.get("seq") == seq and line.get("causal") is causal]
    alone = {line["pass"]: line for line in here if line["what"] == "one GPU"}
    found: dict[str, dict[int, float]] = {name: {} for name in LOOKS}
    for overlap, name in ((True, "ring"), (False, "ring, no overlap")):
        passes = {line["pass"]: line for line in here if line["what"] == "ring" and line["overlap"] is overlap}
        if not passes:  # a long shape
            continue
        for count, several in ((1, alone), (len(passes["forward"]["digests"]), passes)):
            wanted = [several["forward"]] if mode == "forward" else list(several.values())
            work = sum(line["ms"] * line["tflops_gpu"] for line in wanted)  # FLOPs of a GPU
            found[name][count] = work / sum(line["ms"] for line in wanted)
    ranks = max(found["ring"])
    for line in here:
        if line["what"] == "context_parallel" and line["pass"] == mode:
            found["context_parallel (cuDNN)"][ranks] = line["tflops_gpu"]
    return found


def table(lines: list[dict[str, Any]], seq: int, causal: bool) -> str:
    """A row of that table."""
    here = [line for line in lines if line.get("seq") == seq and line.get("causal") is causal]
    ring = {(line["pass"], line["overlap"]): line["tflops_gpu"] for line in here if line["what"] == "ring"}
    alone = {line["pass"]: line["efficiency"] for line in here if line["what"] == "one GPU"}
    both = next(line for line in here if line["what"] == "both")
    theirs = {line["pass"]: line["tflops_gpu"] for line in here if line["what"] == "context_parallel"}
    with_, without = (
        [f"{ring[name, overlap]:.0f}" if (name, overlap) in ring else "-" for name in ("forward", "backward")] for overlap in (True, False)
    )
    cells = [f"{seq // 1024}k", "causal" if causal else "full", f"{with_[0]} ({alone['forward']:.0%})"]
    cells += [f"{both['tflops_gpu']:.0f} ({both['efficiency']:.0%})", f"{' / '.join(without)} (with: {' / '.join(with_)})"]
    return " | ".join(["", *cells, " / ".join(f"{theirs[name]:.0f}" for name in ("forward", "both") if name in theirs), ""]).strip()


def price(lines: list[dict[str, Any]], seq: int, causal: bool, pass_: str) -> str:
    """What a pass costs beside attention."""
    here = [line for line in lines if line.get("seq") == seq and line.get("causal") is causal and line.get("pass") == pass_]
    ring = {line["overlap"]: line for line in here if line["what"] == "ring"}
    alone = next(line for line in here if line["what"] == "one GPU")
    parts = [f"{name[:-3]} {ring[True][name]:.2f} ms" for name in ("other_ms", "idle_ms", "host_ms") if name in ring[True]]
    hidden = f"{ring[True]['hidden']:.0%} hidden"
    if False in ring:
        more = sum(step[0] for step in ring[False]["steps"]) / (alone["ms"] / len(ring[True]["digests"])) - 1
        parts.insert(0, f"compute {more:+.1%}")
    return f"{seq} {'causal' if causal else 'full'} {pass_}: {ring[True]['ms']:.2f} ms, {hidden}, {', '.join(parts)}"


def main() -> None:
    """The figure of what was recorded, and its numbers."""
    lines = [json.loads(text) for text in (HERE / "ring.jsonl").read_text(encoding="utf-8").splitlines()]
    shapes = list(dict.fromkeys((line["seq"], line["causal"]) for line in lines if line["what"] == "both"))  # one that was cut off has none
    rows = [table(lines, *shape) for shape in shapes]
    rows += [price(lines, *shape, pass_) for shape in shapes for pass_ in ("forward", "backward")]
    sys.stdout.write("\n".join(rows) + "\n")
    figure, axes = plt.subplots(2, len(shapes), figsize=(2.1 * len(shapes) + 1, 5), sharey=True, squeeze=False, layout="constrained")
    for column, (seq, causal) in enumerate(shapes):
        for row, mode in enumerate(("forward", "both")):
            axis = axes[row][column]
            found = rates(lines, seq, causal, mode)
            for name, points in found.items():
                axis.plot(list(points), list(points.values()), label=name, **LOOKS[name])
            first, last = min(found["ring"]), max(found["ring"])
            share = found["ring"][last] / found["ring"][first]
            axis.annotate(f"{share:.0%}", (last, found["ring"][last]), xytext=(-4, -14), textcoords="offset points", ha="right", fontsize=8)
            axis.set_xticks([first, last])
            axis.set_xlim(first - 0.3, last + 0.3)
            axis.grid(color="0.92")
            if row == 0:
                axis.set_title(f"S {seq // 1024}k, {'causal' if causal else 'not causal'}", fontsize=9)
    axes[0][0].set_ylim(0, 1.05 * axes[0][0].get_ylim()[1])
    for row, text in enumerate(("forward", "forward + backward")):
        axes[row][0].set_ylabel(f"TFLOP/s a GPU, {text}", fontsize=8)
    with (HERE / "ring.csv").open(encoding="utf-8", newline="") as file:
        kernels = dict.fromkeys(row["compute"] for row in csv.DictReader(file) if row["dim"] == "128" and row["dtype"] == "bfloat16")
    figure.suptitle(f"Ring attention, B1 H16 D128 bfloat16, {', '.join(kernels)}", fontsize=10)
    for axis in axes[1]:
        axis.set_xlabel("GPUs (percent: of one GPU)", fontsize=8)
    axes[0][0].legend(loc="lower left", frameon=False, fontsize=7)
    figure.savefig(Path(sys.argv[1]) if sys.argv[1:] else PICTURE, dpi=150)


if __name__ == "__main__":
    main()
