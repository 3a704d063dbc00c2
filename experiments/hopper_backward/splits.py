"""Backward passes where works are few: GPU time of each number of splits and each section, beside cuDNN's and torch-flash's, in turns.

    python experiments/hopper_backward/splits.py [--seconds 200] [--chosen] [TEXT]

A line a variant: its tiles, ms, TFLOP/s, and its speed over the best peer's. The first is what the header chooses; --chosen: that alone.
TEXT: only the shapes whose name holds it. Every variant is judged against float64 before it is timed. What is short is replayed from a
CUDA graph. It stops after so many seconds, between shapes.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import peers
from harness.backends import pick
from harness.check.contender import PassResult, run_kernel, run_peer
from harness.check.oracle import oracle_for
from harness.fault import Fault
from harness.kernel import Kernel, find, planner
from harness.measure.sampling import POLICY, Ready, measure
from harness.problem import Problem

#: Batch, query heads, key heads, length, head dim, whether causal, whether deterministic.
SHAPES = (
    (1, 14, 2, 2048, 64, True, False),
    (1, 28, 4, 2048, 128, True, False),
    (4, 28, 4, 1837, 128, True, False),
    (3, 64, 8, 1113, 128, True, False),
    (1, 48, 8, 3655, 128, True, False),
    (1, 64, 8, 4096, 128, True, False),
    (9, 14, 2, 210, 64, True, False),
    (1, 20, 20, 2048, 128, True, False),
    (8, 40, 8, 367, 128, True, False),
    (1, 8, 4, 4096, 256, True, False),
    (1, 28, 4, 2048, 128, False, False),
    (1, 28, 4, 2048, 128, True, True),
    (1, 32, 8, 8192, 128, True, False),
    (4, 24, 8, 700, 128, True, False),
    (2, 32, 8, 2048, 64, True, False),
    (1, 14, 2, 1711, 64, False, False),
    (1, 40, 8, 1142, 128, False, False),
    (9, 14, 2, 210, 64, False, False),
    (1, 12, 12, 4096, 64, True, False),
    (1, 64, 8, 4096, 128, True, True),
    (1, 48, 8, 3655, 128, False, False),
)
PEERS = ("torch-cudnn", "torch-flash")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def variants(problem: Problem, kernel: Kernel, chosen: Mapping[str, str]) -> list[dict[str, int]]:
    """The header's own, then other splits, not far from those, and under the causal mask other sections."""
    splits, group = int(chosen["SPLITS"]), problem.heads_q // problem.heads_kv
    most = group * -(-problem.seq_q // (128 if problem.head_dim <= 64 else 64))
    near = [count for count in (1, 2, 3, 4, 6, 8, group) if splits < 2 * count <= 4 * splits]
    sections = (32, 64, 1024) if problem.causal and not kernel.deterministic else (int(chosen["SECTION"]),)
    every = [{"SPLITS": count, "SECTION": section} for count in sorted({*near}) for section in sections if count <= most]
    return [{}, *(each for each in every if any(chosen[name] != str(value) for name, value in each.items()))]


def main() -> None:
    """Print the lines of all shapes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("text", nargs="?", default="")
    asked = parser.parse_args()
    begun, backend = time.monotonic(), pick("auto")
    policy = replace(POLICY[backend.name], settle=0.05, turn=0.05, max_seconds=0.15, min_seconds=0.05, patience=0.15)
    wanted: list[tuple[Problem, Kernel, list[dict[str, int]]]] = []
    for batch, heads, heads_kv, length, dim, causal, deterministic in SHAPES:
        problem = Problem.of(batch, heads, length, dim, heads_kv, dtype="bfloat16", causal=causal)
        kernel = planner.variant(find("hopper_cluster" if dim > 128 else "hopper", "backward", deterministic), problem)
        if asked.text in f"{problem.describe()} {'deterministic' * deterministic}":
            chosen = planner.plan(kernel, problem, backend.device()).values
            wanted.append((problem, kernel, [{}] if asked.chosen else variants(problem, kernel, chosen)))

    def compiled(each: tuple[Kernel, Problem, dict[str, int]]) -> None:
        with suppress(Fault):
            backend.load(*each)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, [(kernel, problem, tiles) for problem, kernel, every in wanted for tiles in every]))
    say(f"compiled after {time.monotonic() - begun:.0f} s")
    for problem, kernel, every in wanted:
        if time.monotonic() - begun > asked.seconds:
            say("out of time")
            return
        oracle = oracle_for(problem, backend, "backward")
        inputs = oracle.inputs_of("backward")
        results: dict[str, PassResult] = {}
        say(f"{problem.describe()} {kernel.name}{' deterministic' * kernel.deterministic}")
        for tiles in every:
            macros = planner.plan(kernel, problem, backend.device(), tiles).values
            name = f"SPLITS {macros['SPLITS']} SECTION {macros['SECTION']}" + " chosen" * (not tiles)
            try:
                result = run_kernel(backend, kernel, oracle, inputs, tiles)
            except Fault as fault:
                say(f"  {name}: {fault.what}: {fault.why}")
                continue
            if result.passed:
                results[name] = result
            else:
                say(f"  {name} WRONG: {[v.tensor for v in result.verdicts.values() if not v.passed]}")
        for peer in map(peers.find, PEERS):
            assert peer
            try:
                results[peer.name] = run_peer(peer, oracle, "backward")
            except Fault as fault:
                say(f"  {peer.name}: {fault.what}: {fault.why}")
        ready: dict[str, Ready] = {}
        timings = measure({name: result.timed for name, result in results.items()}, backend, "warm", policy, ready=ready)
        best = min((timings[name].median_ms for name in results if name in PEERS), default=float("nan"))
        for name, timing in timings.items():
            speed = problem.flops("backward") / (timing.median_ms * 1e9)
            say(f"  {name:28} {timing.median_ms:8.4f} ms {speed:6.1f} TF  {best / timing.median_ms:5.2f} {timing.launch} {timing.broken}")
    say(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
