"""Kernel files beside older versions of themselves, in turns: python experiments/hopper_backward/structs.py FOLDER [--seconds 100] [--only TEXT].

FOLDER has the older versions, under the names that they have in kernels_cu; each is run beside the file of that name. A line a cell: TFLOP/s
of both, their ratio, and whether their 20 to 80 % intervals overlap. Each cell is measured twice, the second time with the older one first.
Both are judged against float64 before they are timed. It stops after so many seconds, between cells.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from harness.backends import pick
from harness.check.contender import run_kernel
from harness.check.oracle import oracle_for
from harness.fault import Fault
from harness.kernel import KERNELS, Kernel
from harness.measure.sampling import POLICY, Timing, measure
from harness.problem import Problem

#: Name of the file, dtype, head dim, and the lengths at 16k tokens and 2048 columns of all heads, each with and without the causal mask.
SIZES = (
    ("hopper_forward", "float16", 128, (1024, 4096, 16384)),
    ("hopper_forward", "float16", 64, (4096,)),
    ("hopper_forward", "float16", 256, (4096,)),
    ("hopper_forward", "bfloat16", 256, (1024,)),
    ("split_hopper_forward", "float32", 64, (1024, 4096)),
    ("split_hopper_forward", "float32", 128, (1024, 4096)),
    ("split_hopper_forward", "float32", 256, (1024, 4096)),
    ("hopper_cluster_backward", "bfloat16", 256, (1024, 4096)),
    ("hopper_wide_backward", "bfloat16", 64, (4096,)),
    ("hopper_backward", "bfloat16", 64, (4096,)),
    ("hopper_backward", "bfloat16", 128, (4096,)),
    ("hopper_atomic_backward", "bfloat16", 128, (512,)),
    ("hopper_keys_backward", "bfloat16", 256, (4096,)),
)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cells(folder: Path) -> list[tuple[Problem, str, Kernel, Kernel]]:
    """The problems of the files that the folder has: problem, pass, new and old kernel."""
    found = []
    for name, dtype, dim, lengths in SIZES:
        for old in folder.glob(f"[0-9][0-9]_{name}.cu"):
            new = next(KERNELS.glob(f"[0-9][0-9]_{name}.cu"))
            for length in lengths:
                for causal in (False, True):
                    problem = Problem.of(16384 // length, 2048 // dim, length, dim, dtype=dtype, causal=causal)
                    found.append((problem, name.rpartition("_")[2], Kernel.read(new), Kernel.read(old)))
    return found


def interval(timing: Timing) -> tuple[float, float]:
    """The 20 and 80 % quantiles of the samples."""
    low, high = np.quantile(timing.seconds, (0.2, 0.8))
    return float(low), float(high)


def main() -> None:
    """Print the lines of all cells and the geometric mean of the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--only", default="", help="only cells whose line begins so")
    asked = parser.parse_args()
    begun, backend = time.monotonic(), pick("auto")
    policy = replace(POLICY[backend.name], settle=0.06, turn=0.05, min_turns=4, max_seconds=0.4, patience=0.4)
    wanted = [cell for cell in cells(asked.folder) if f"{cell[2].name} {cell[0].describe()}".startswith(asked.only)]

    def compiled(each: tuple[Kernel, Problem]) -> None:
        with suppress(Fault):
            backend.load(*each)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, [(kernel, problem) for problem, _, *both in wanted for kernel in both]))
    say(f"compiled after {time.monotonic() - begun:.0f} s")
    ratios: list[float] = []
    say(f"{'cell':52} {'new':>7} {'old':>7} {'ratio':>7} {'again':>7}")
    for problem, pass_, new, old in wanted:
        if time.monotonic() - begun > asked.seconds:
            say("out of time")
            break
        oracle = oracle_for(problem, backend, pass_)
        inputs = oracle.inputs_of(pass_)
        results = {name: run_kernel(backend, kernel, oracle, inputs, {}) for name, kernel in (("new", new), ("old", old))}
        wrong = [name for name, result in results.items() if not result.passed]
        if wrong:
            say(f"{new.name:16} {problem.describe()}: {' and '.join(wrong)} WRONG")
            continue
        line, overlap = "", False
        for order in (("new", "old"), ("old", "new")):
            timings = measure({name: results[name].timed for name in order}, backend, "warm", policy)
            speeds = {name: problem.flops(pass_) / (timing.median_ms * 1e9) for name, timing in timings.items()}
            (low, high), (other_low, other_high) = interval(timings["new"]), interval(timings["old"])
            overlap |= low <= other_high and other_low <= high
            ratios.append(speeds["new"] / speeds["old"])
            line += f" {speeds['new']:7.1f} {speeds['old']:7.1f} {ratios[-1]:7.4f}" if not line else f" {ratios[-1]:7.4f}"
        say(f"{new.name + ' ' + problem.describe():52}{line}{'' if overlap else ' apart'}")
    if ratios:
        say(f"geometric mean {float(np.exp(np.log(ratios).mean())):.4f}, least {min(ratios):.4f}; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
