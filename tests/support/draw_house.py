"""Draws plots/house.png, the figure of CONTRIBUTING.md: the rooms, the imports between them, and the path of a .cu file to its verdict.

`make docs` draws it where it is out of date. The picture carries what it shows as text (`facts`), so that is decided without drawing:
fonts and pixels differ between machines.
"""

from __future__ import annotations

from typing import Any

from rooms import ROOMS, ROOT, arrows, direct

PICTURE = ROOT / "plots" / "house.png"
Place = tuple[float, float, float, str]
PATH, BOX, LINE, SOFT = "#c8500a", "#f3f3f1", "#8a8a8a", "#5f5f5f"

#: Floor from the top, left and right edge, and what is in the room.
PLACES: dict[str, Place] = {
    "terminal": (0, 0.0, 10.0, "options, printing, show, progress, watch; cli.py above it parses"),
    "verbs": (1, 0.0, 10.0, "run, experiment, verify, tune, compile, compare, profile, selftest, doctor; sweep, results"),
    "ring": (2, 0.0, 5.4, "attention over many ranks: NCCL, MPI"),
    "torch_op": (2, 5.6, 10.0, "kernels as PyTorch operators"),
    "check": (3, 0.0, 10.0, "--compute -> Contender; float64 reference, error budget, checked tensors, later launches"),
    "report": (4, 0.0, 4.6, "figures, tables, summary"),
    "measure": (4, 4.8, 10.0, "times in turns, ceilings, energy"),
    "peers": (5, 0.0, 4.6, "others' attention"),
    "backends": (5, 4.8, 10.0, "GPU, CPU engine, NVRTC"),
    "row": (6, 0.0, 2.3, "results.csv"),
    "dataset": (6, 2.5, 5.0, "inputs, storage"),
    "kernel": (6, 5.2, 7.5, "header, plan"),
    "partition": (6, 7.7, 10.0, "a rank's rows"),
    "problem": (7, 0.0, 4.6, "shapes, mask, FLOPs, bytes"),
    "files": (7, 4.8, 10.0, "atomic writes, exact reads, a process, env.json"),
    "fault": (8, 0.0, 2.5, "what, why, hint"),
    "formula": (8, 2.7, 5.4, "masks and scores: a tree"),
    "array": (8, 5.6, 7.4, "types of tensors"),
    "doors": (8, 7.6, 10.0, "rooms load when used"),
}

#: The path of a .cu file: the room, the function, what it does and makes.
STEPS = (
    ("terminal", "terminal.options.compute", "parses --compute ./mine_forward.cu"),
    ("verbs", "verbs.run.run", "opens the backend, calls what follows"),
    ("check", "check.choose.choose", "resolves the text, once: Contender"),
    ("kernel", "kernel.Kernel.read", "the header; compiles nothing: Kernel"),
    ("kernel", "kernel.planner.plan", "grid, block, macros, or a refusal: Plan"),
    ("dataset", "dataset.Dataset.read_inputs", "Q, K, V, dO of a data folder"),
    ("check", "check.oracle.Oracle", "the float64 reference"),
    ("backends", "backends.Backend.load", "compiles (NVRTC or C++): Loaded"),
    ("check", "check.tensors.Bound", "device tensors, poisoned and guarded"),
    ("backends", "backends.launch.prepare", "packs fa::Args: Launcher"),
    ("kernels_cu", "backends.Backend.launch", "the kernel runs, on a GPU or as fibers"),
    ("check", "check.tensors.Bound.run", "guard bands, inputs unchanged"),
    ("check", "check.oracle.Oracle.judge", "error against budget: Verdict"),
    ("measure", "measure.sampling.measure", "only what passed, in turns: Timing"),
    ("verbs", "verbs.results.rows_of", "experiment: a line a timing: Row"),
    ("row", "row.encoded", "experiment: results.csv"),
    ("report", "report.redraw", "experiment: figures, summary.md"),
    ("terminal", "terminal.show.results.results", "table or JSON, exit code"),
)
LANES = (*(room for room in ROOMS if room in {step[0] for step in STEPS}), "kernels_cu")


def facts() -> str:
    """What the figure shows, as text: it is out of date where this differs from the text inside the picture."""
    return repr((PLACES, STEPS, direct(arrows())))


def drawn() -> str:
    """The facts inside the committed picture; empty where there is none."""
    from PIL import Image

    if not PICTURE.exists():
        return ""
    with Image.open(PICTURE) as picture:
        return str(picture.info.get("Description", ""))


def draw() -> None:
    """Write the picture."""
    from matplotlib import use

    use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 8.5})
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 11.5), height_ratios=(6.8, 5.4), layout="constrained")
    _rooms(above)
    _path(below)
    for axis in (above, below):
        axis.axis("off")
    figure.savefig(PICTURE, dpi=170, metadata={"Description": facts(), "Software": None})
    plt.close(figure)


def _rooms(axis: Any) -> None:
    """The upper half: a box for each room, and the arrows that no chain of others implies."""
    high, gap = 0.62, 1.0
    axis.set(xlim=(-0.05, 10.05), ylim=(9.2 * gap + high + 0.08, -0.5))
    axis.set_title("The rooms of harness: an arrow is an import, and runs only down", loc="left", fontsize=10.5, fontweight="bold")
    axis.text(0, -0.22, "What a chain of arrows implies is left out, so most rooms import more than is drawn", color=SOFT, va="center")
    axis.text(10, -0.22, "numbers: the path in the lower half", color=PATH, va="center", ha="right")
    for name, (floor, left, right, words) in PLACES.items():
        top = floor * gap
        axis.add_patch(_rectangle(left, top, right - left, high))
        axis.text(left + 0.1, top + 0.21, name, fontweight="bold", va="center")
        axis.text(left + 0.1, top + 0.45, words, color=SOFT, va="center", fontsize=8)
        steps = [str(i) for i, (room, _, _) in enumerate(STEPS, 1) if room == name]
        axis.text(right - 0.1, top + 0.21, " ".join(steps), color=PATH, va="center", ha="right")
    for upper, lower in direct(arrows()):
        start, end = _ends(PLACES[upper], PLACES[lower])
        style = {"arrowstyle": "-|>,head_width=0.16,head_length=0.32", "color": LINE, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", (end, PLACES[lower][0] * gap), (start, PLACES[upper][0] * gap + high), arrowprops=style)


def _ends(upper: Place, lower: Place) -> tuple[float, float]:
    """Where an arrow leaves the upper box and enters the lower one: straight down if they overlap, else as near as can be."""
    left, right = max(upper[1], lower[1]), min(upper[2], lower[2])
    if right - left > 0.3:
        return (left + right) / 2, (left + right) / 2
    towards = (lower[1] + lower[2]) / 2
    start = min(max(towards, upper[1] + 0.25), upper[2] - 0.25)
    return start, min(max(start, lower[1] + 0.25), lower[2] - 0.25)


def _rectangle(left: float, top: float, width: float, height: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.07"
    return FancyBboxPatch((left, top), width, height, boxstyle=shape, facecolor=BOX, edgecolor=LINE, linewidth=0.8, zorder=2)


def _path(axis: Any) -> None:
    """The lower half: a column for each room, a row for each step, and beside it the function and what it makes."""
    pitch, text = 0.375, 4.35
    axis.set(xlim=(-0.05, 10.05), ylim=(len(STEPS) + 0.5, -2.6))
    axis.set_title("The path of a .cu file to its verdict, and of the verdict to a figure", loc="left", fontsize=10.5, fontweight="bold")
    at = {name: 0.15 + pitch * i for i, name in enumerate(LANES)}
    for name, x in at.items():
        axis.text(x - 0.06, 0.25, name, rotation=50, rotation_mode="anchor", ha="left", va="bottom")
        axis.plot((x, x), (0.5, len(STEPS) + 0.3), color="#d9d9d6", linewidth=0.8, zorder=1)
    places = [(at[room], i) for i, (room, _, _) in enumerate(STEPS, 1)]
    axis.plot(*zip(*places, strict=True), color=PATH, linewidth=1.0, zorder=2)
    axis.scatter(*zip(*places, strict=True), s=105, facecolor="white", edgecolor=PATH, linewidth=1.0, zorder=3)
    for number, ((x, y), (_, function, words)) in enumerate(zip(places, STEPS, strict=True), 1):
        axis.text(x, y + 0.03, str(number), ha="center", va="center", fontsize=7, color=PATH, zorder=4)
        axis.text(text, y, function, va="center", family="DejaVu Sans Mono", fontsize=7.2)
        axis.text(text + 2.5, y, words, va="center", color=SOFT, fontsize=8)


if __name__ == "__main__":
    draw()
    print(f"written: {PICTURE.relative_to(ROOT)}")
