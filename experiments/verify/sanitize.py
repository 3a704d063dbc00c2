"""Run every pass of every kernel on two small problems on the GPU: what compute-sanitizer is to watch (record.sh starts it).

KERNEL ... restricts it to some. With `planted TOOL`, run instead the kernels of harness/selftest/faults.toml that the tool must find.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np

from harness import choose
from harness.backends import pick
from harness.check.contender import run_kernel
from harness.check.oracle import Oracle
from harness.dataset.generate import generate
from harness.problem import Problem
from harness.selftest.mutant import mutants


def main() -> int:
    """Exit code 1 where a kernel is wrong."""
    backend = pick("cuda")
    wrong = 0
    if sys.argv[1:2] == ["planted"]:
        kernels = [fault.plant(Path(tempfile.mkdtemp())) for fault in mutants(sys.argv[2]).values()]
    else:
        kernels, _ = choose.kernels(sys.argv[1:] or ["00-99"], ("forward", "backward"))
    for chosen in kernels:
        dtypes = dict.fromkeys("float32" if d == "tf32" else d for d in chosen.dtypes)  # tf32 is arithmetic on float32 files
        forms = [chosen.made_deterministic() if deterministic else chosen for deterministic in chosen.forms]
        # At head dim 64 one tile that is not full; at 128 several, in the forms that need them.
        shapes = [shape for shape in ((3, 65, 64), (2, 256, 128)) if shape[2] <= chosen.head_dims[-1]]
        for form, dtype, shape in itertools.product(forms, dtypes, shapes):
            if dtype in ("float32", "bfloat16"):
                heads, seq, dim = shape
                problem = Problem.of(1, heads, seq, dim, heads_kv=1, dtype=dtype, causal=True)
                oracle = Oracle(problem, generate(problem, 42), None, np)
                done = run_kernel(backend, form, oracle, oracle.inputs_of(chosen.pass_))
                sys.stdout.write(
                    f"{'PASS' if done.passed else 'FAIL'} {form.label} deterministic={form.deterministic} {problem.describe()}\n"
                )
                wrong += not done.passed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
