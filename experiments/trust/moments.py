"""Every kernel of the tree and every planted fault by its moments: python experiments/trust/moments.py --output FOLDER

The evidence behind harness/check/moments.py. For each kernel a sample of the verify matrix (--every 1: all of it) is run and judged; a
line of moments.csv is a tensor of a case, with each statistic over its limit. Then the faults of harness/verbs/selftest/faults.toml that the
moments must find. moments.txt has the distributions of right kernels beside the faults. --device cuda on a GPU.
"""

from __future__ import annotations

import csv
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.backends import Backend
from harness.check.budget import Verdict
from harness.check.contender import run_kernel
from harness.fault import Fault
from harness.kernel import Kernel, catalogue
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.selftest.mutant import mutants
from harness.verbs.verify.judge import compile_ahead, in_form, oracle_of

ROOT = Path(__file__).resolve().parents[2]
STATISTICS = ("max", "of_block", "rms", "bias", "slope")


@dataclass(frozen=True)
class Line:
    """A tensor of a case: each statistic as a part of its limit, NaN where there is none."""

    kind: str
    kernel: str
    case: str
    scale: float
    tensor: str
    passed: bool
    max: float
    of_block: float
    rms: float
    bias: float
    slope: float
    rms_ratio: float
    off: float  # slope - 1

    @classmethod
    def of(cls, kind: str, kernel: str, problem: Problem, scale: float, v: Verdict) -> Line:
        """The line of a verdict."""
        m = v.moments
        with np.errstate(all="ignore"):
            parts = (v.max_abs / v.budget, v.of_block, m.rms / m.rms_budget, abs(m.bias) / m.bias_budget, abs(m.slope - 1) / m.slope_budget)
        return cls(kind, kernel, problem.describe(), scale, v.tensor, v.passed, *parts, m.rms, m.slope - 1)


def judged(kind: str, backend: Backend, chosen: Kernel, case: verify.Case) -> Iterator[Line]:
    """The lines of one run."""
    oracle = oracle_of(backend, case, chosen.pass_)
    done = run_kernel(backend, chosen, oracle, oracle.inputs_of(chosen.pass_))
    for verdict in done.verdicts.values():
        if case.problem.dtype != "float64":
            yield Line.of(kind, kind if kind != "right" else chosen.label, case.problem, case.input_scale, verdict)


def table(lines: list[Line]) -> Iterator[str]:
    """The distributions of the right kernels, a line a dtype and tensor, and the faults one by one."""
    yield f"{'right kernels':44}{'cases':>7}{'fail':>6}" + "".join(f"{f'{s}, median  largest':>24}" for s in STATISTICS)
    right = [line for line in lines if line.kind == "right"]
    for key in sorted({(dtype_of(line), line.tensor) for line in right}):
        some = [line for line in right if (dtype_of(line), line.tensor) == key]
        text = f"{key[0] + ' ' + key[1]:44}{len(some):7}{sum(not line.passed for line in some):6}"
        for name in STATISTICS:
            values = [v for line in some if np.isfinite(v := getattr(line, name))]
            text += f"{np.median(values):16.3f}{max(values):8.3f}" if values else f"{'':24}"
        yield text
    yield ""
    yield f"{'planted faults':44}{'tensor':>13}" + "".join(f"{s:>24}" for s in STATISTICS)
    for line in lines:
        if line.kind != "right":
            parts = "".join(f"{v:24.3f}" if np.isfinite(v := getattr(line, name)) else f"{'':24}" for name in STATISTICS)
            yield f"{line.kind:44}{line.tensor:>13}{parts}" + ("" if line.passed else "  FAIL")


def dtype_of(line: Line) -> str:
    """The storage type of a line's case."""
    problem = Problem.from_folder(line.case.split()[0])
    return problem.dtype if problem else ""


def sampled(chosen: Kernel, device: str, every: int, largest: float) -> Iterator[verify.Case]:
    """Every so-manieth case of a kernel's full matrix, on the CPU of those with at most so many scores times head dim."""
    for case in verify.matrix(chosen, "full", device)[chosen.number % every :: every]:
        p = case.problem
        if case.copies == 1 and (device == "cuda" or p.visible_pairs * p.batch * p.heads_q * p.head_dim <= largest):
            yield case


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "experiments" / "trust")
@click.option("--device", default="cpu")
@click.option("--every", default=8, help="Of the full matrix, every so-manieth case.")
@click.option("--only", default="", help="Kernels whose label holds this text.")
@click.option("--seconds", default=1e9, help="Start no case after so long.")
@click.option("--largest", default=5e7, help="Scores times head dim of the largest case, on the CPU.")
def main(output: Path, device: str, every: int, only: str, seconds: float, largest: float) -> None:
    """moments.csv and moments.txt."""
    backend, lines, start = backends.pick(device), [], time.monotonic()
    pairs = [(case, chosen) for chosen in catalogue() if only in chosen.label for case in sampled(chosen, backend.name, every, largest)]
    random.Random(0).shuffle(pairs)  # where --seconds ends them, some of each kernel
    if backend.name == "cuda":
        click.echo(f"{compile_ahead(backend, pairs)} compiled in {time.monotonic() - start:.0f} s")
    for number, (case, chosen) in enumerate(pairs):
        if time.monotonic() - start > seconds:
            click.echo(f"{len(pairs) - number} of {len(pairs)} cases are left out after {seconds:g} s")
            break
        found = list(judged("right", backend, in_form(chosen, case), case))
        lines += found
        for line in found:
            if not line.passed:
                click.echo(f"FAIL {line}")
    for name, fault in mutants("moments").items():
        try:
            lines += judged(name, backend, fault.plant(Path(tempfile.mkdtemp())), verify.Case(0, fault.problem, 1.0, 0))
        except Fault as raised:
            click.echo(f"{name}: {raised}")
    output.mkdir(parents=True, exist_ok=True)
    with (output / "moments.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Line.__dataclass_fields__)
        writer.writerows([f"{v:.4g}" if isinstance(v, float) else v for v in vars(line).values()] for line in lines)
    text = "\n".join(table(lines))
    (output / "moments.txt").write_text(
        f"each statistic as a part of its limit, {'CPU engine' if backend.name == 'cpu' else backend.device().name}\n\n{text}\n",
        encoding="utf-8",
    )
    click.echo(text)


if __name__ == "__main__":
    main()
