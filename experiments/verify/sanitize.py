"""Run every pass of every kernel once at 65 tokens on the GPU: what compute-sanitizer is to watch (record.sh starts it)."""

from __future__ import annotations

import sys

import numpy as np

from harness import kernel, run
from harness.backends import pick
from harness.problem import READS, Problem


def main() -> int:
    """Exit code 1 where a kernel is wrong."""
    backend = pick("cuda")
    wrong = 0
    for chosen in kernel.catalogue():
        for dtype in (d for d in chosen.dtypes if d in ("float32", "bfloat16")):
            problem = Problem.of(1, 3, 65, 64, heads_kv=1, dtype=dtype, causal=True)
            yardstick = run.Yardstick(problem, run.data.generate(problem, 42), None, np)
            inputs = dict(yardstick.inputs) | (yardstick.forward_outputs() if chosen.pass_ == "backward" else {})
            done = run.run_pass(backend, chosen, yardstick, {name: inputs[name] for name in READS[chosen.pass_]}, samples=0)
            sys.stdout.write(f"{'PASS' if done.passed else 'FAIL'} {chosen.label} {problem.describe()}\n")
            wrong += not done.passed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
