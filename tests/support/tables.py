"""The tables of measured speeds in README and docs/, made from the committed rows of experiments/. tests/generate.py writes them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from harness import peers
from harness.kernel import catalogue
from harness.report import summary
from harness.report.summary import markdown_table
from harness.report.views import geometric_mean, latest
from harness.row import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
#: A few steps of each part of the climb, by the test that has their rows: the sweep, the test, and the kernels.
CLIMB = (
    ("forward", "Stress-1", ("naive", "fa1", "fa2_naive", "fa2", "split", "split_hopper")),
    ("ladder", "bfloat16", ("warp_wmma", "mma", "mma_swizzle", "mma_qreg_async", "wgmma_tma", "pingpong", "hopper")),
)
PEERS = {
    "torch-cudnn": "cuDNN",
    "fa3": "FA3",
    "fa3-source": "FA3",
    "fa4": "FA4",
    "torch-efficient": "PyTorch efficient",
    "torch-math": "PyTorch math",
}
#: A table's cell: head dim, mask, length; in it ours, the best peer's rate, its name.
Grid = dict[tuple[int, bool, int], tuple[float, float, str]]


def script(path: str) -> ModuleType:
    """A script of experiments/ as a module."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXPERIMENTS / f"{path}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(sweep: str) -> list[Row]:
    """The committed rows of a sweep, the latest of each."""
    return latest(read_rows(EXPERIMENTS / sweep / "results.csv"))


def source(sweep: str) -> str:
    """The device, the day and the commit of a run, and the command that makes it again."""
    rows, env = rows_of(sweep), json.loads((EXPERIMENTS / sweep / "env.json").read_text())
    timed = [row for row in rows if row.KernelTime_ms]
    commit = summary.commit_of(timed, env)
    return f"{timed[0].device_name}, {summary.dates_of(timed)}, commit {commit}: `fa-cli experiment {sweep} --record`"


def steps() -> str:
    """A dozen steps of the ladder: what each adds, its rate, and how many times that of the row before it is."""
    numbers = {kernel.name: (f"{kernel.number:02}", kernel.title) for kernel in catalogue() if kernel.pass_ == "forward"}
    lines = []
    for sweep, test, names in CLIMB:
        rates = {row.Kernel: row.TFLOPS or 0.0 for row in rows_of(sweep) if row.Test == test and row.timing == "warm"}
        before = 0.0
        for name in names:
            number, title = numbers[name]
            gain = f"{rates[name] / before:.1f}x" if before else ""
            lines.append([number, name, title, "float32" if test == "Stress-1" else "bfloat16", f"{rates[name]:.0f}", gain])
            before = rates[name]
    text = "| " + " | ".join(("step", "name", "idea", "dtype", "TFLOP/s", "of the row above")) + " |\n|---|---|---|---|---:|---:|\n"
    return text + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def grid(sweep: str, dtype: str = "bfloat16") -> Grid:
    """Ours and the best peer in each cell of a sweep of hopper, settled."""
    table = script("hopper/table")
    rows = read_rows(EXPERIMENTS / sweep / "results.csv")
    found: Grid = {}
    for (of, dim, causal, seq), (settled, _, _) in table.pairs(rows, table.ours_of(rows)).items():
        if of == dtype and settled:
            found[dim, causal, seq] = settled
    return found


def cell(ours: float, best: float, peer: str) -> str:
    """`676 / 648 FA3: 1.044`; a ratio below 1 is bold."""
    ratio = f"{ours / best:.3f}"
    return f"{ours:.0f} / {best:.0f} {PEERS.get(peer, peer)}: {f'**{ratio}**' if ours < best else ratio}"


def cells(sweep: str) -> str:
    """A sweep of hopper and its peers as a table over the length, and the geometric means."""
    found = grid(sweep)
    lengths = sorted({seq for _, _, seq in found})
    lines = []
    for dim, causal in dict.fromkeys(key[:2] for key in found):
        line = [f"D{dim}{' causal' if causal else ''}"]
        lines.append(line + [cell(*found[dim, causal, seq]) if (dim, causal, seq) in found else "" for seq in lengths])
    table = script("hopper/table")
    rows = read_rows(EXPERIMENTS / sweep / "results.csv")
    means = table.means(table.pairs(rows, table.ours_of(rows)), 0)
    text = markdown_table(["keys", *map(str, lengths)], lines)
    return f"{text}\n\nGeometric means of ours over the best peer:\n\n" + "".join(f"- {line}\n" for line in means) + f"\n{source(sweep)}\n"


def speed() -> str:
    """README's table: ours and the best peer at 4096 keys, a row per dtype, pass and mask; and the ratios over all lengths and head dims."""
    lines = []
    for dtype, sweeps in (("bfloat16", ("hopper", "hopper_backward", "hopper_deterministic")), ("float16", ("hopper", "hopper_backward"))):
        for sweep, pass_ in zip(sweeps, ("forward", "backward", "backward, deterministic"), strict=False):
            lines += compared(dtype, pass_, grid(sweep, dtype))
    for pass_, sweep in (("forward", "fp32"), ("backward", "fp32_backward")):
        lines += compared("float32", pass_, single(sweep))
    return markdown_table(["dtype", "pass", "D64", "D128", "D256", "mean, least"], lines) + "\n"


def compared(dtype: str, pass_: str, found: Grid) -> list[list[str]]:
    """A line per mask: the cells at 4096 keys, the geometric mean of all lengths, and the least ratio."""
    lines = []
    for causal in (False, True):
        mine = {key: three for key, three in found.items() if key[1] is causal}
        if mine:
            ratios = [ours / best for ours, best, _ in mine.values()]
            shown = [cell(*mine[dim, causal, 4096]) if (dim, causal, 4096) in mine else "" for dim in (64, 128, 256)]
            lines.append([dtype, f"{pass_}{', causal' if causal else ''}", *shown, f"{geometric_mean(ratios):.2f}, {min(ratios):.2f}"])
    return lines


def single(sweep: str) -> Grid:
    """float32, TF32 off, the long shapes: the fastest of fa2, split and split_hopper, and PyTorch's fastest backend."""
    found: Grid = {}
    for test, of in script("fp32/draw").times(sweep).items():
        rates = {name: row.TFLOPS or 0.0 for name, row in of.items()}
        row = next(iter(of.values()))
        if row.SeqLen >= 4096:
            best, name = max((rate, name) for name, rate in rates.items() if peers.find(name))
            ours = max(rate for name, rate in rates.items() if not peers.find(name))
            found[row.HeadDim, "causal" in test, row.SeqLen] = ours, best, name
    return found


def float32(which: str) -> str:
    """The two tables of float32: `small` shapes and what auto takes there, `large` ones in TFLOP/s."""
    draw = script("fp32/draw")
    recorded = {pass_: draw.times(names[0]) for pass_, names in draw.RUNS.items()}
    return f"{getattr(draw, which)(recorded)}\n\n{source('fp32')}; `fp32_backward` likewise\n"


def ring() -> str:
    """The table of two GPUs, from ring.jsonl."""
    draw = script("ring/draw")
    lines = [json.loads(text) for text in (EXPERIMENTS / "ring" / "ring.jsonl").read_text(encoding="utf-8").splitlines()]
    shapes = list(dict.fromkeys((line["seq"], line["causal"]) for line in lines if line["what"] == "both"))
    head = "| S | mask | forward | forward + backward | without overlap, forward / backward | context_parallel, forward / both |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(f"{draw.table(lines, *shape)}\n" for shape in shapes)


def embedded(path: str) -> str:
    """A table that another script has written."""
    return (EXPERIMENTS / path).read_text(encoding="utf-8")
