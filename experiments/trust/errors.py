"""The error of every kernel and peer over the length and the scale of the inputs: python experiments/trust/errors.py --output FOLDER

Writes errors.csv, and trust_errors.png drawn of it (--draw FILE draws a csv that is there). On a GPU lengths go to 65,536, and it takes
about a minute; on the CPU they end at 512. After --seconds no further case is started. The record: errors.csv beside this file, drawn
as plots/trust_errors.png.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends, peers
from harness.array import to_host
from harness.backends import Backend
from harness.check.contender import Contender
from harness.check.oracle import Oracle
from harness.choose import contender
from harness.dataset.storage import widen
from harness.fault import Fault
from harness.kernel.kernel import catalogue
from harness.problem import PASSES, Problem
from harness.verify.cases import Case
from harness.verify.judge import oracle_of

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = {"cpu": (128, 256, 512), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)}
#: Factors on Q and K, at AT tokens; beyond 10 only forward, as in the verify matrix.
SCALES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
AT = {"cpu": 128, "cuda": 1024}
#: Steps 00 to 06 are slow, and step 00 stores S x S: no longer than this.
SLOW, LONGEST_SLOW = 6, 4096
#: Above this length only forward, where the reference checks a sample of the rows: a backward reference has to compute them all.
LONGEST_BACKWARD = 16384
KEYS = ("rms", "rms_budget", "bias", "bias_budget", "slope", "slope_budget")
COLUMNS = ("device", "kernel", "arithmetic", "dtype", "seq", "input_scale", "tensor", "passed", "max_abs", "budget", "relative_rms", *KEYS)
#: The panels of the figure: storage type and tensor.
PANELS = (("float32", "O"), ("bfloat16", "O"), ("bfloat16", "logsumexp"), ("float32", "dK"), ("bfloat16", "dK"))


def problems(device: str) -> list[tuple[Problem, float]]:
    """The cases, short before long."""
    cases = [(seq, 1.0) for seq in LENGTHS[device]] + [(AT[device], scale) for scale in SCALES if scale != 1.0]
    return [(Problem.of(1, 2 if s <= 8192 else 1, s, 64, dtype=dtype), scale) for s, scale in sorted(cases) for dtype in DTYPES]


def contenders(device: str) -> list[Contender]:
    """Every kernel of the tree with all its passes, and the peers that are here."""
    found = []
    for name in dict.fromkeys(kernel.name for kernel in catalogue()):
        passes = [kernel.pass_ for kernel in catalogue() if kernel.name == name]
        found.append(contender(name, passes))
    for name in peers.names():
        peer = peers.find(name)
        if peer and not peer.absent(device):
            found.append(Contender(name, peer=peer))
    return found


def compiled(backend: Backend, chosen: Sequence[Contender]) -> None:
    """Compile every kernel for every type, several at once; what fails here is left out below."""
    wanted = [(kernel, Problem.of(1, 2, 128, 64, dtype=dtype)) for one in chosen for kernel in one.kernels.values() for dtype in DTYPES]

    def load(each: tuple[Any, Problem]) -> None:
        with suppress(Fault):
            backend.load(*each)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(load, wanted))


def rows(backend: Backend, one: Contender, oracle: Oracle, scale: float) -> Iterator[dict[str, Any]]:
    """A row for each tensor of the passes that it has and takes."""
    problem = oracle.problem
    for pass_ in PASSES:
        if (not one.peer and pass_ not in one.kernels) or (pass_ == "backward" and "dO" not in oracle.inputs):
            continue
        if one.kernels and one.kernels[pass_].number is not None and one.kernels[pass_].number <= SLOW and problem.seq_q > LONGEST_SLOW:
            continue
        try:
            one.refuse(problem, [pass_], backend)
            done = one.run(backend, oracle, pass_)
        except Fault:  # it does not take the type, the length or the scale
            continue
        arithmetic = done.kernel.arithmetic_for(problem.dtype) if done.kernel else ""
        for tensor, v in done.verdicts.items():
            values = widen(np, to_host(oracle.reference[tensor]), "float64")
            size = math.sqrt(float(np.mean(np.where(np.isfinite(values), values, 0.0) ** 2)))
            found = {
                "device": "CPU backend" if backend.name == "cpu" else backend.device().name,
                "kernel": one.name,
                "arithmetic": arithmetic,
                "dtype": problem.dtype,
            }
            found |= {"seq": problem.seq_q, "input_scale": scale, "tensor": tensor, "passed": v.passed, "max_abs": v.max_abs}
            found |= {"budget": v.budget, "relative_rms": math.sqrt(v.mse) / size if size else math.nan}
            yield found | {key: getattr(v.moments, key) for key in KEYS}


def draw(path: Path, picture: Path) -> None:
    """The figure of a csv: relative RMS error over the length, above, and over the scale of Q and K, below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from harness.report.style import look_of

    lines = list(csv.DictReader(path.open(encoding="utf-8")))
    names = list(dict.fromkeys(line["kernel"] for line in lines))
    figure, axes = plt.subplots(2, len(PANELS), figsize=(13, 6), layout="constrained", sharey="col")
    scaled = {line["seq"] for line in lines if float(line["input_scale"]) != 1}
    for column, (dtype, tensor) in enumerate(PANELS):
        for row, axis in enumerate(axes[:, column]):
            for name in names:
                some = [line for line in lines if (line["kernel"], line["dtype"], line["tensor"]) == (name, dtype, tensor)]
                some = [line for line in some if (float(line["input_scale"]) == 1 if row == 0 else line["seq"] in scaled)]
                points = sorted((float(line["input_scale"] if row else line["seq"]), float(line["relative_rms"])) for line in some)
                if points:
                    axis.plot(*zip(*points, strict=True), label=name, **{"markersize": 4, "linewidth": 1.0, **look_of(name)})
            axis.set_xscale("log", base=10 if row else 2)
            axis.set_yscale("log")
            axis.grid(color="0.92")
            axis.set_xlabel("factor on Q and K" if row else "S", fontsize=8)
            axis.tick_params(which="both", labelsize=7)
        axes[0][column].set_title(f"{tensor}, {dtype}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("RMS error / RMS of the reference", fontsize=8)
    labelled = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=9, fontsize=7, frameon=False)
    at = next(iter(scaled), "")
    device = lines[0]["device"] if lines else ""
    figure.suptitle(f"Error against float64, B1 D64, {device}: above by length, below by the scale of Q and K at S {at}", fontsize=10)
    figure.savefig(picture, dpi=130)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "experiments" / "trust")
@click.option("--device", default="auto")
@click.option("--seconds", default=80.0, help="Start no case after so long.")
@click.option("--draw", "only_draw", type=click.Path(path_type=Path, exists=True), help="Draw this errors.csv; run nothing.")
def main(output: Path, device: str, seconds: float, only_draw: Path | None) -> None:
    """errors.csv and trust_errors.png."""
    output.mkdir(parents=True, exist_ok=True)
    if only_draw:
        draw(only_draw, output / "trust_errors.png")
        return
    start, backend = time.monotonic(), backends.pick(device)
    chosen = contenders(backend.name)
    compiled(backend, chosen)
    failed = 0
    with (output / "errors.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for problem, scale in problems(backend.name):
            if time.monotonic() - start > seconds:
                click.echo(f"left out after {seconds:g} s: {problem.describe()} input x{scale:g} and what follows")
                break
            mode = "both" if scale <= 10 and problem.seq_q <= LONGEST_BACKWARD else "forward"
            oracle = oracle_of(backend, Case(0, problem, scale, 0), mode)
            for one in chosen:
                for row in rows(backend, one, oracle, scale):
                    failed += not row["passed"] and bool(row["arithmetic"])
                    writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
            click.echo(f"{time.monotonic() - start:6.1f} s  {problem.describe()} input x{scale:g}")
    draw(output / "errors.csv", output / "trust_errors.png")
    click.echo(f"{failed} tensors of kernels failed")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
