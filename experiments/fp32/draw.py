"""Draws plots/fp32_accuracy.png of runs of record and prints the tables of docs/results-float32.md: python experiments/fp32/draw.py [PICTURE]

Error over speed at S4096, no mask: float32 on CUDA cores and split over tensor cores, TF32, bfloat16, and PyTorch's backends. The error is
the largest of O forward, of dQ, dK and dV backward, against float64, divided by that of torch-efficient, PyTorch's default for float32, at
the same head dim. PyTorch's flash and cuDNN have no float32: their bfloat16 is of `longseq` and `longseq_backward`, other runs with twice
the batch. The first table has what `--compute auto` takes on an H200 for the ten shapes, beside PyTorch's fastest float32 backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from harness import peers
from harness.check import choose
from harness.check.request import Request
from harness.kernel.plan import Device
from harness.report.compose import read
from harness.report.palette import look_of
from harness.report.style import COLUMN, GREY, RC, keys, plt, save, sns
from harness.report.summary import commit_of, dates_of, markdown_table
from harness.report.views import geometric_mean
from harness.row import Row, problem_of

ROOT = Path(__file__).resolve().parents[2]
BASE = "torch-efficient"
RUNS = {"forward": ("fp32", "longseq"), "backward": ("fp32_backward", "longseq_backward")}
#: The names beside the marks: of which head dim's mark, points to the right and up, alignment.
NAMES: dict[str, dict[str, tuple[int, int, int, str]]] = {
    "forward": {
        "torch-math": (64, -4, 6, "left"),
        "torch-efficient": (128, 2, 5, "center"),
        "fa2": (64, 0, -10, "center"),
        "split": (64, -2, -12, "center"),
        "split_hopper": (128, 0, -12, "center"),
        "mma": (128, -4, 6, "left"),
        "torch-flash": (128, 3, 6, "right"),
        "torch-cudnn": (64, 10, -11, "center"),
        "hopper": (128, 5, 6, "right"),
    },
    "backward": {
        "torch-math": (64, 8, 6, "center"),
        "torch-efficient": (128, 4, -8, "left"),
        "fa2": (128, 0, -11, "center"),
        "split": (128, 0, -11, "center"),
        "torch-flash": (128, -6, -3, "right"),
        "torch-cudnn": (64, -4, 6, "center"),
        "hopper": (128, 4, -11, "center"),
    },
}
#: What the marks nearby are, at (TFLOP/s, error over the baseline's).
GROUPS = {"bfloat16": (420, 130), "float32, three float16 products": (250, 3.5), "float32": (30, 16)}


def points(pass_: str) -> dict[str, tuple[str, dict[int, tuple[float, float]]]]:
    """The dtype of each kernel and, by head dim, (TFLOP/s, error over the baseline's)."""
    ours, theirs = (read(ROOT / "experiments" / name)[0] for name in RUNS[pass_])
    rows = [*ours, *(row for row in theirs if row.Kernel in ("torch-flash", "torch-cudnn"))]
    rows = [row for row in rows if row.SeqLen == 4096 and not row.causal and row.timing == "warm" and row.HeadDim in (64, 128)]
    base = {row.HeadDim: worst(row) for row in rows if row.Kernel == BASE}
    found: dict[str, tuple[str, dict[int, tuple[float, float]]]] = {}
    for row in rows:
        found.setdefault(row.Kernel, (row.dtype, {}))[1][row.HeadDim] = (row.TFLOPS or 0, worst(row) / base[row.HeadDim])
    return found


def worst(row: Row) -> float:
    """The largest error of O or of the gradients; logsumexp, which PyTorch does not give back, is left out."""
    return max(filter(None, (row.MaxError_O, row.MaxError_dQ, row.MaxError_dK, row.MaxError_dV)))


def draw(picture: Path) -> None:
    """The figure."""
    sns.set_theme(style="whitegrid", rc=RC)
    figure, axes = plt.subplots(2, 1, figsize=(COLUMN, 4.0), sharex=True, sharey=True, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, rect=(0, 0.025, 1, 0.975))
    for axis, pass_ in zip(axes, RUNS, strict=True):
        for kernel, (dtype, at) in points(pass_).items():
            look, dims = look_of(kernel), sorted(at)
            axis.plot([at[d][0] for d in dims], [at[d][1] for d in dims], color=look["color"], linewidth=0.8, zorder=2)
            for dim in dims:
                face = "white" if dim == 64 else look["color"]
                axis.plot(*at[dim], marker=look["marker"], markersize=5, markerfacecolor=face, markeredgecolor=look["color"], zorder=3)
            dim, right, up, side = NAMES[pass_][kernel]
            text = f"{kernel}, TF32" if dtype == "tf32" else kernel
            axis.annotate(text, at[dim], xytext=(right, up), textcoords="offset points", fontsize=6, ha=side, zorder=4)
        for text, place in GROUPS.items():
            axis.annotate(text, place, fontsize=6, fontstyle="italic", color=GREY, ha="center")
        axis.axhline(1, color=GREY, linestyle=":", linewidth=0.8, zorder=1)
        tensors = "O" if pass_ == "forward" else "dQ, dK, dV"
        axis.set_ylabel(f"max |error| of {tensors}\n(1: {BASE}'s)")
        axis.set_title(pass_, fontsize=7)
    axes[0].set(xscale="log", yscale="log", xlim=(15, 900), ylim=(0.07, 9000))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes[1].set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axes[1].xaxis.set_minor_locator(NullLocator())
    axes[1].set_xlabel("TFLOP/s")
    figure.suptitle("Float32: accuracy and speed, S4096, not causal", fontsize=7.5)
    marks = [(64, "white"), (128, GREY)]
    handles = [Line2D([], [], color=GREY, linestyle="", marker="o", markersize=4.5, markerfacecolor=f, label=f"D{d}") for d, f in marks]
    keys(figure, handles)
    rows, env = read(ROOT / "experiments" / "fp32")
    footer = f"{rows[0].device_name} · warm · {dates_of(rows)} · commit {commit_of(rows, env)} · flash, cudnn: B4, runs of longseq"
    figure.text(0.01, 0.005, footer, fontsize=5, color=GREY)
    save(figure, picture)


def times(name: str) -> dict[str, dict[str, Row]]:
    """The float32 rows with a time, by test and kernel."""
    found: dict[str, dict[str, Row]] = {}
    for row in read(ROOT / "experiments" / name)[0]:
        if row.dtype == "float32" and row.timing == "warm" and row.Test != "ceiling":
            found.setdefault(row.Test, {})[row.Kernel] = row
    return found


def fastest(of: dict[str, Row]) -> Row:
    """PyTorch's fastest backend of a shape."""
    return min((row for kernel, row in of.items() if peers.find(kernel)), key=lambda row: row.KernelTime_ms or 0)


def small(runs: dict[str, dict[str, dict[str, Row]]]) -> str:
    """What auto takes on each of the ten shapes, its time, and its speed over PyTorch's fastest; the geometric means last."""
    device, lines, ratios = Device("cuda", "NVIDIA H200"), [], {pass_: list[float]() for pass_ in runs}
    for test in (name for name in runs["forward"] if "S4096" not in name and "S16384" not in name):
        first = fastest(runs["forward"][test])
        cells = [f"{test}: B{first.Batch} H{first.Heads} S{first.SeqLen}"]
        for pass_, of in runs.items():
            ((kernel,), _) = choose.choose(Request(choose.AUTO, pass_, problem_of(first)), device)
            ms, least = (float(row.KernelTime_ms or 0) for row in (of[test][kernel.name], fastest(of[test])))
            ratios[pass_].append(least / ms)
            cells += [kernel.name, f"{1e3 * ms:,.1f}", f"{least / ms:.2f}x"]
        lines.append(cells)
    means = [f"**{geometric_mean(of):.2f}x**" for of in ratios.values()]
    lines.append(["geometric mean", "", "", means[0], "", "", means[1]])
    return markdown_table(["D64, float32", *["auto forward", "us", "of PyTorch's best", "auto backward", "us", "of PyTorch's best"]], lines)


def large(runs: dict[str, dict[str, dict[str, Row]]]) -> str:
    """TFLOP/s of our float32 kernels and of PyTorch's fastest on the long shapes."""
    lines = []
    for pass_, of in runs.items():
        for test in (name for name in of if "S4096" in name or "S16384" in name):
            best = fastest(of[test])
            cells = [f"{pass_}, {test}"]
            for kernel in ("fa2", "split", "split_hopper"):
                row = of[test].get(kernel)
                cells.append(f"{row.TFLOPS or 0:.1f} ({(row.TFLOPS or 0) / (best.TFLOPS or 1):.2f}x)" if row else "")
            lines.append([*cells, f"{best.TFLOPS or 0:.1f} ({best.Kernel.removeprefix('torch-')})"])
    return markdown_table(["TFLOP/s", "fa2", "split", "split_hopper", "PyTorch's best"], lines)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "plots" / "fp32_accuracy.png")
    recorded = {pass_: times(names[0]) for pass_, names in RUNS.items()}
    sys.stdout.write(f"{small(recorded)}\n\n{large(recorded)}\n")
