"""The error of every kernel and peer over the length and the scale of the inputs: python experiments/trust/errors.py --output FOLDER

Writes errors.csv, a row at a time, and draws trust_errors.png of it (--draw FILE draws a csv that is there). Everything is compiled
first, in threads; then cases run from short to long, and none is started --seconds later. --resume goes on where errors.csv ends. On a
GPU lengths go to 65,536; on the CPU they end at 512. The record: errors.csv beside this file, drawn as plots/trust_errors.png.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends, peers
from harness.array import to_host
from harness.backends import Backend, ContextLost
from harness.check.choose import contender
from harness.check.contender import Contender
from harness.check.oracle import Oracle
from harness.check.request import Request
from harness.dataset.storage import widen
from harness.fault import Fault
from harness.kernel import catalogue
from harness.problem import PASSES, Problem
from harness.verbs.verify.cases import Case
from harness.verbs.verify.fuzz import takes
from harness.verbs.verify.judge import compile_ahead, oracle_of

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = {"cpu": (128, 256, 512), "cuda": (128, 512, 2048, 8192, 16384, 65536)}
#: Factors on Q and K, at AT tokens.
SCALES = (1e-2, 1.0, 10.0)
AT = {"cpu": 128, "cuda": 2048}
#: Steps 00 to 06 are slow, and step 00 stores S x S: no longer than this.
SLOW, LONGEST_SLOW = 6, 8192
#: Above this length only forward, where the reference checks a sample of the rows: a backward reference has to compute them all.
LONGEST_BACKWARD = 16384
KEYS = ("rms", "rms_budget", "bias", "bias_budget", "slope", "slope_budget")
COLUMNS = ("device", "kernel", "arithmetic", "dtype", "seq", "input_scale", "tensor", "passed", "max_abs", "budget", "relative_rms", *KEYS)
#: The rows of the figure: storage type, tensor, and whether over the scale of the inputs. A column is at most SERIES kernels or peers.
PANELS = (("float32", "O", False), ("bfloat16", "O", False), ("bfloat16", "dK", False), ("bfloat16", "O", True))
SERIES = 6


def cases(device: str) -> list[Case]:
    """Short before long, few heads where they are long."""
    found = [(seq, scale) for seq in LENGTHS[device] for scale in (SCALES if seq == AT[device] else (1.0,))]
    return [Case(0, Problem.of(1, 2 if s <= 2048 else 1, s, 64, dtype=dtype), scale, 0) for s, scale in found for dtype in DTYPES]


def contenders(device: str) -> list[Contender]:
    """Every kernel of the tree with all its passes, and the peers that are here."""
    found = []
    for name in dict.fromkeys(kernel.name for kernel in catalogue()):
        passes = [kernel.pass_ for kernel in catalogue() if kernel.name == name]
        found.append(contender(name, Request(mode="both" if len(passes) > 1 else passes[0])))
    for name in peers.names():
        peer = peers.find(name)
        if peer and not peer.absent(device):
            found.append(Contender(name, peer=peer))
    return found


def kept(path: Path, device: str) -> list[dict[str, str]]:
    """The rows of a csv that another run on this device began, without those of its last case, which may be incomplete."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["device"] == device]
    return [line for line in lines if place(line) != place(lines[-1])]


def place(line: dict[str, Any]) -> tuple[str, int, float]:
    """The case that a row is of."""
    return str(line["dtype"]), int(line["seq"]), float(line["input_scale"])


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
        except ContextLost:
            raise
        except Fault:  # it does not take the type, the length or the scale
            continue
        except Exception as error:
            if not one.peer:
                raise
            click.echo(f"{one.name} {pass_} {problem.describe()}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        arithmetic = done.kernel.arithmetic_for(problem.dtype) if done.kernel else ""
        for tensor, v in done.verdicts.items():
            values = widen(np, to_host(oracle.reference[tensor]), "float64")
            size = math.sqrt(float(np.mean(np.where(np.isfinite(values), values, 0.0) ** 2)))
            found = {"device": named(backend), "kernel": one.name, "arithmetic": arithmetic, "dtype": problem.dtype}
            found |= {"seq": problem.seq_q, "input_scale": scale, "tensor": tensor, "passed": v.passed, "max_abs": v.max_abs}
            found |= {"budget": v.budget, "relative_rms": math.sqrt(v.mse) / size if size else math.nan}
            yield found | {key: getattr(v.moments, key) for key in KEYS}


def named(backend: Backend) -> str:
    """The device in the csv."""
    return "CPU engine" if backend.name == "cpu" else backend.device().name


def points_of(lines: list[dict[str, str]], dtype: str, tensor: str, over_scale: bool) -> dict[str, list[tuple[float, float]]]:
    """The points of a row of the figure, by kernel or peer: (length or scale, relative RMS error)."""
    some = [line for line in lines if (line["dtype"], line["tensor"]) == (dtype, tensor)]
    at = {line["seq"] for line in some if float(line["input_scale"]) != 1}
    found: dict[str, list[tuple[float, float]]] = {}
    for line in some:
        if line["seq"] in at if over_scale else float(line["input_scale"]) == 1:
            found.setdefault(line["kernel"], []).append((float(line["input_scale" if over_scale else "seq"]), float(line["relative_rms"])))
    return {name: sorted(points) for name, points in found.items()}


def groups(names: Iterable[str], ladder: Mapping[str, int]) -> list[list[str]]:
    """Kernels in the order of their steps, then peers, at most SERIES together and about as many in each."""
    found = []
    for kind in (sorted(set(names) & set(ladder), key=lambda name: ladder[name]), [name for name in names if name not in ladder]):
        number = -(-len(kind) // SERIES)
        found += [kind[i * len(kind) // number : (i + 1) * len(kind) // number] for i in range(number)]
    return found


def draw(path: Path, picture: Path) -> None:
    """The figure of a csv: relative RMS error over the length or the scale of Q and K, a row a tensor, a column a few kernels or peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from harness.report.style import look_of

    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    ladder = {kernel.name: kernel.number for kernel in catalogue() if kernel.number is not None}
    shown = [points_of(lines, *panel) for panel in PANELS]
    columns = [groups(points, ladder) for points in shown]
    across = max(1, *map(len, columns))
    figure, axes = plt.subplots(
        len(PANELS), across, figsize=(3.1 * across, 2.1 * len(PANELS)), layout="constrained", sharey="row", squeeze=False
    )
    for row, (dtype, tensor, over_scale) in enumerate(PANELS):
        for axis, names in zip(axes[row], [*columns[row], *[[]] * across], strict=False):
            axis.set_visible(bool(names))
            for name in names:
                label = f"{ladder[name]:02} {name}" if name in ladder else name
                axis.plot(*zip(*shown[row][name], strict=True), label=label, **{"markersize": 4, "linewidth": 1.0, **look_of(name)})
            axis.set_xscale("log", base=10 if over_scale else 2)
            axis.set_yscale("log")
            axis.grid(color="0.92")
            axis.set_title(
                f"{dtype} {tensor}" + f" at S {AT['cpu' if lines[0]['device'] == 'CPU engine' else 'cuda']}" * over_scale, fontsize=8
            )
            axis.set_xlabel("factor on Q and K" if over_scale else "S", fontsize=8)
            axis.tick_params(which="both", labelsize=7)
            if names:
                axis.legend(fontsize=6, frameon=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("RMS error / RMS of reference", fontsize=7)
    figure.suptitle(f"Error against float64, B1 D64, {lines[0]['device'] if lines else ''}", fontsize=10)
    figure.savefig(picture, dpi=130)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "experiments" / "trust")
@click.option("--device", default="auto")
@click.option("--seconds", default=80.0, help="Start no case after so long, once everything is compiled.")
@click.option("--resume", is_flag=True, help="Keep the cases that errors.csv in --output has.")
@click.option("--longest", default=1 << 20, help="No length above this one.")
@click.option("--draw", "only_draw", type=click.Path(path_type=Path, exists=True), help="Draw this errors.csv; run nothing.")
def main(output: Path, device: str, seconds: float, resume: bool, longest: int, only_draw: Path | None) -> None:
    """errors.csv and trust_errors.png."""
    output.mkdir(parents=True, exist_ok=True)
    if only_draw:
        draw(only_draw, output / "trust_errors.png")
        return
    start, backend = time.monotonic(), backends.pick(device)
    chosen, path = contenders(backend.name), output / "errors.csv"
    before = kept(path, named(backend)) if resume else []
    done = {place(line) for line in before}
    wanted = [case for case in cases(backend.name) if case.problem.seq_q <= longest]
    wanted = [case for case in wanted if (case.problem.dtype, case.problem.seq_q, case.input_scale) not in done]
    number = compile_ahead(backend, ((case, k) for case in wanted for one in chosen for k in one.kernels.values() if takes(k, case)))
    click.echo(f"{number} compiled in {time.monotonic() - start:.1f} s; {len(done)} cases are done, {len(wanted)} left")
    start, failed = time.monotonic(), 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(before)
        for case in wanted:
            words = f"{case.problem.describe()} input x{case.input_scale:g}"
            if time.monotonic() - start > seconds:
                click.echo(f"left out after {seconds:g} s: {words} and what follows; --resume goes on there")
                break
            oracle = oracle_of(backend, case, "both" if case.problem.seq_q <= LONGEST_BACKWARD else "forward")
            for one in chosen:
                for row in rows(backend, one, oracle, case.input_scale):
                    failed += not row["passed"] and bool(row["arithmetic"])
                    writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
                    file.flush()
            click.echo(f"{time.monotonic() - start:6.1f} s  {words}")
    draw(path, output / "trust_errors.png")
    click.echo(f"{failed} tensors of kernels failed")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
