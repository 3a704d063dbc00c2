"""Draws plots/climb.png, README's picture, from committed rows: python experiments/ladder/climb.py [PICTURE]

Two panels of TFLOP/s, a bar per step in the ladder's order: float32 at B8 H16 S2048 D64 (`experiments/forward`), bfloat16 at B4 H16 S4096
D128 (`experiments/ladder`). The lines of a panel are peers of the same run: the fastest, and FlashAttention-3 and -4.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import peers
from harness.kernel import catalogue
from harness.report.compose import read
from harness.report.palette import ORANGE, SKY
from harness.report.style import GREY, RC, Keywords, plt, save
from harness.report.summary import dates_of
from harness.row import Row

ROOT = Path(__file__).resolve().parents[2]
PANELS = (("forward", "Stress-1", "float32, B8 H16 S2048 D64"), ("ladder", "bfloat16", "bfloat16, B4 H16 S4096 D128"))
#: What the figure calls peers; those with a line of their own where they are not the fastest.
TITLES = {
    "torch-cudnn": "cuDNN",
    "torch-efficient": "PyTorch efficient",
    "torch-math": "PyTorch math",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}
RIVALS = ("fa3", "fa4")


def rates(sweep: str, test: str) -> dict[str, float]:
    """TFLOP/s of what passed at one shape, settled, by name."""
    rows = read(ROOT / "experiments" / sweep)[0]
    return {row.Kernel: row.TFLOPS for row in rows if row.Test == test and row.timing == "warm" and row.TFLOPS and row.Status == "PASS"}


def rows_of(sweep: str, test: str) -> list[Row]:
    """The rows of a panel, for the footer."""
    return [row for row in read(ROOT / "experiments" / sweep)[0] if row.Test == test and row.KernelTime_ms]


def line(axis: plt.Axes, rate: float, text: str, style: str, above: bool = True) -> None:
    """A peer's rate across a panel, named at its left end, above or below the line."""
    axis.axhline(rate, color="0.2", linestyle=style, linewidth=0.9, zorder=1)
    at: Keywords = {"xytext": (0, 1.5 if above else -1.5), "va": "bottom" if above else "top", "textcoords": "offset points"}
    axis.annotate(text, (0.01, rate), xycoords=("axes fraction", "data"), fontsize=6.5, **at)


def panel(axis: plt.Axes, sweep: str, test: str, title: str) -> None:
    """The bars of the steps and the line of the fastest peer."""
    found = rates(sweep, test)
    steps = [kernel for kernel in catalogue() if kernel.pass_ == "forward" and kernel.name in found]
    for place, kernel in enumerate(steps):
        rate = found[kernel.name]
        axis.bar(place, rate, width=0.74, color=ORANGE if kernel.tensor_cores or kernel.float16_products else SKY, zorder=2)
        inside = rate > 0.4 * max(found.values())  # so that no line crosses the number
        at: Keywords = {"xytext": (0, -3 if inside else 2), "va": "top" if inside else "bottom", "textcoords": "offset points"}
        axis.annotate(f"{rate:.3g}", (place, rate), ha="center", fontsize=6.5, zorder=4, **at)
    axis.set_xticks(range(len(steps)), [f"{kernel.number:02} {kernel.name}" for kernel in steps], rotation=50, ha="right", fontsize=6.5)
    best, name = max((rate, name) for name, rate in found.items() if peers.find(name))
    line(axis, best, f"{TITLES.get(name, name)}, the fastest peer: {best:.3g}", "--")
    others = {other: found[other] for other in RIVALS if other in found and other != name}
    if others:
        rate = min(others.values())
        line(axis, rate, ", ".join(f"{TITLES[other]} {each:.0f}" for other, each in others.items()), ":", above=False)
    axis.set_title(f"{title}: {max(found[k.name] for k in steps) / best:.2f} times the fastest peer", fontsize=8)
    axis.set_ylim(0, 1.08 * max(found.values()))
    axis.set_ylabel("TFLOP/s", fontsize=7)


def draw(picture: Path) -> None:
    """Both panels."""
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.5), layout="constrained", width_ratios=[10, 13])
        for axis, (sweep, test, title) in zip(axes, PANELS, strict=True):
            panel(axis, sweep, test, title)
        rows = rows_of(*PANELS[1][:2])
        footer = f"forward, not causal · {rows[0].device_name} · settled · {dates_of(rows)} · blue: CUDA cores, orange: tensor cores"
        figure.supxlabel(footer, fontsize=6, color=GREY)
        save(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "plots" / "climb.png")
