"""Errors of long problems over their limits: python experiments/trust/long.py --device cuda

A line for each tensor that a kernel writes: its largest error over the budget, that of a block over the block's (the largest of all), and
its moments over their limits. The record of an H200 is long_h200.txt. Exit code 1 where a kernel is wrong.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.check.contender import run_kernel
from harness.check.oracle import oracle_for
from harness.fault import UsageFault
from harness.kernel import catalogue, planner
from harness.problem import Problem

KERNELS = {"float32": ("naive", "fa2", "split", "split_hopper"), "bfloat16": ("fa2", "mma_qreg_async", "hopper", "hopper_wide")}
#: dtype, length, head dim, key heads of two query heads.
SHAPES = (
    ("float32", 1024, 64, 2),
    ("float32", 4096, 64, 1),
    ("float32", 16384, 128, 2),
    ("bfloat16", 4096, 128, 1),
    ("bfloat16", 16384, 64, 2),
)
#: naive holds every score.
LONGEST_NAIVE = 4096


@click.command()
@click.option("--device", default="auto")
@click.option("--seconds", default=300.0, help="Start no shape after so long.")
@click.option("--longest", default=1 << 20, help="No length above this one.")
def main(device: str, seconds: float, longest: int) -> None:
    """The lines of each shape, with and without the causal mask."""
    backend, start, wrong = backends.pick(device), time.monotonic(), 0
    for dtype, length, dim, kv in SHAPES:
        for causal in (True, False):
            problem = Problem.of(1, 2, length, dim, heads_kv=kv, dtype=dtype, causal=causal)
            if length > longest:
                continue
            if time.monotonic() - start > seconds:
                click.echo(f"left out after {seconds:g} s: {problem.describe()}")
                continue
            oracle = oracle_for(problem, backend, "both", 42)
            click.echo(problem.describe())
            for kernel in catalogue():
                if kernel.name not in KERNELS[dtype] or (kernel.name == "naive" and length > LONGEST_NAIVE):
                    continue
                try:
                    planner.refuse(kernel, problem)
                except UsageFault:
                    continue
                for v in run_kernel(backend, kernel, oracle, oracle.inputs_of(kernel.pass_)).verdicts.values():
                    wrong += not v.passed
                    m, word = v.moments, "ok  " if v.passed else "FAIL"
                    largest = f"max {v.max_abs:.2e} of {v.budget:.2e} = {v.max_abs / v.budget:.2f}, block {v.of_block:.2f}"
                    moments = f"rms {m.rms:.2f} of {m.rms_budget:.2f}, bias {m.bias:.1e} of {m.bias_budget:.1e}"
                    slope = f", slope - 1 {m.slope - 1:.1e} of {m.slope_budget:.1e}" if v.tensor != "logsumexp" else ""
                    click.echo(f"  {word} {kernel.label} {v.tensor}: {largest}, {moments}{slope}")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
