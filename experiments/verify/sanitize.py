"""Run every pass of every kernel on a few small problems on the GPU: what compute-sanitizer's TOOL is to watch (record.sh starts it).

sanitize.py TOOL [KERNEL ...] restricts it to some. sanitize.py planted TOOL runs instead the kernels of harness/verbs/selftest/faults.toml that the
tool must find.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.backends.cuda import Cuda
from harness.check import choose
from harness.check.contender import run_kernel
from harness.check.oracle import Oracle
from harness.check.request import Request
from harness.dataset.generate import generate
from harness.kernel import Kernel, catalogue, planner
from harness.kernel.plan import Device
from harness.problem import Problem
from harness.verbs.selftest.mutant import mutants
from harness.verbs.verify.cases import windowed

#: Heads, key heads, tokens, head dim: one tile that is not full; several, in the forms that need them at head dim 128.
#: And one of a head dim between 64 and 128, for kernels whose products are as wide as the head.
SHAPES = ((3, 1, 65, 64), (2, 1, 256, 128), (2, 1, 130, 80))
#: Several works a block, for kernels whose blocks take works from a counter: on a GPU of two multiprocessors, as far as plans know.
MANY_WORKS = ((4, 2, 300, 64), (4, 2, 300, 128), (4, 2, 200, 256))
#: Left out by racecheck, which follows no chain of barriers (consumers, storer, producer) unless the reader itself arrives: a false alarm.
#: Texts that it accepts are slower (docs/notes/checks.md).
CHAINED = {
    "hopper_forward": MANY_WORKS,
    "wide_heads_forward": SHAPES + MANY_WORKS,
    "wide_heads_backward": SHAPES + MANY_WORKS,
}


class Small(Cuda):
    """A GPU of which plans see two multiprocessors, one cluster."""

    def device(self) -> Device:
        """This GPU with two multiprocessors."""
        return replace(super().device(), sms=2)


def main() -> int:
    """Exit code 1 where a kernel is wrong."""
    whole, small = Cuda(), Small()
    wrong = 0
    tool, *names = sys.argv[1:]
    if tool == "planted":
        kernels = [fault.plant(Path(tempfile.mkdtemp())) for fault in mutants(names[0]).values()]
    else:
        every = dict.fromkeys(kernel.name for kernel in catalogue())  # a range leaves out variants, which run under a kernel's name
        kernels, _ = choose.kernels(Request(names or list(every), "both"))

    def run(backend: Cuda, form: Kernel, problem: Problem) -> None:
        nonlocal wrong
        oracle = Oracle(problem, generate(problem, 42), None, np)
        done = run_kernel(backend, form, oracle, oracle.inputs_of(form.pass_))
        where = " on two multiprocessors" if backend is small else ""
        verdict = "PASS" if done.passed else "FAIL"
        sys.stdout.write(f"{verdict} {form.label} deterministic={form.deterministic} {problem.describe()}{where}\n")
        wrong += not done.passed

    for chosen in kernels:
        dtypes = dict.fromkeys("float32" if d == "tf32" else d for d in chosen.dtypes)  # tf32 is arithmetic on float32 files
        forms = [chosen.made_deterministic() if deterministic else chosen for deterministic in chosen.forms]
        for form, dtype, shape in itertools.product(forms, dtypes, SHAPES + MANY_WORKS):
            heads, heads_kv, seq, dim = shape
            if dtype not in ("float32", "bfloat16") or dim > chosen.head_dims[-1]:
                continue
            problem = Problem.of(1, heads, seq, dim, heads_kv=heads_kv, dtype=dtype, causal=True)
            problem = windowed(problem) if chosen.windows_only else problem
            backend = whole if shape in SHAPES else small
            if (
                backend is small
                and planner.plan(form, problem, small.device()).launches == planner.plan(form, problem, whole.device()).launches
            ):
                continue
            if tool == "racecheck" and shape in CHAINED.get(form.label, ()):
                sys.stdout.write(f"LEFT OUT {form.label} {problem.describe()}: racecheck follows no chain of barriers\n")
            else:
                run(backend, form, problem)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
