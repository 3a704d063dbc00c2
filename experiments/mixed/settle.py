"""How long a turn of a contender must settle: the same problems by several policies, in turns of the same contenders.

    python experiments/mixed/settle.py --device cuda

After a contender that draws less power the next one runs at higher clocks for a while. Each line is a problem and a contender; its columns
are the median by the policy of other sweeps (sampling.POLICY) in ms, and those by shorter ones over it. `again` is our kernel a second
time, behind the slowest contender: what it differs from the first one is what settling too briefly costs.
"""

import argparse
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from costs import drawn, kernels  # noqa: E402

from harness import backends, peers  # noqa: E402
from harness.check.tensors import Bound  # noqa: E402
from harness.measure.sampling import MANY, POLICY, measure  # noqa: E402
from harness.problem import READS, Problem  # noqa: E402

PROBLEMS = (
    Problem.of(1, 32, 8192, 128, 8, dtype="bfloat16", causal=True),
    Problem.of(3, 40, 2048, 128, 10, dtype="bfloat16", causal=True),
    Problem.of(1, 24, 4096, 128, dtype="bfloat16"),
    Problem.of(4, 16, 1024, 64, dtype="bfloat16"),
    Problem.of(16, 12, 512, 64, dtype="bfloat16", causal=True),
)
SHORT = replace(MANY, warm_up=0.01, min_samples=8, min_seconds=0.01, max_seconds=0.3, patience=0.3)
POLICIES = {
    "MANY": MANY,
    "40+40": replace(SHORT, settle=0.04, turn=0.04),
    "40+10": replace(SHORT, settle=0.04, turn=0.01),
    "20+20": replace(SHORT, settle=0.02, turn=0.02),
    "20+10": replace(SHORT, settle=0.02, turn=0.01),
    "10+10": replace(SHORT, settle=0.01, turn=0.01),
    "0+5": replace(SHORT, settle=0.0, turn=0.005, min_turns=4),
}


def say(text: str) -> None:
    """A line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    backend = backends.pick(parser.parse_args().device)
    usual = POLICY[backend.name]
    for problem in PROBLEMS if backend.name == "cuda" else [Problem.of(1, 2, 32, 64, dtype="bfloat16")]:
        inputs = drawn(backend, problem, READS["forward"])
        kernel = next(kernels("forward", problem))

        def ours(kernel: Any = kernel, problem: Problem = problem, inputs: Any = inputs) -> Bound:
            return Bound(backend, backend.load(kernel, problem), problem, inputs)

        found: dict[str, Any] = {"hopper": ours()}
        for name in ("torch-cudnn", "torch-flash") if backend.name == "cuda" else ():
            with suppress(Exception):
                peer = peers.find(name)
                assert peer
                found[name] = peer.prepare(problem, inputs, "forward")
        found["again"] = ours()
        times, spent = {}, {}
        for name, policy in {"usual": usual, **(POLICIES if backend.name == "cuda" else {})}.items():
            start = time.perf_counter()
            times[name] = {which: timing.median_ms for which, timing in measure(found, backend, "warm", policy).items()}
            spent[name] = time.perf_counter() - start
        say(f"{problem.describe()}: " + " ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items()))
        for which, ms in times["usual"].items():
            say(f"  {which:12} {ms:.4f}  " + "  ".join(f"{name} {t[which] / ms:.3f}" for name, t in times.items()))


if __name__ == "__main__":
    main()
