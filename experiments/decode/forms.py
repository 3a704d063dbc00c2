"""decode's forms for few queries beside hopper and the peers, in turns: GPU time, and GB/s of K and V read.

    python experiments/decode/forms.py [--seconds 90] [--chosen] [TEXT]

A line a form: ms and GB/s, and its tile values. The first is what the header chooses; --chosen: no other. TEXT: only the problems whose name
holds it. Times are warm; where the L2 cache would hold K and V they are cold. Every form is judged against float64 before it is timed. It
stops after so many seconds, between problems.
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
from harness.measure.sampling import POLICY, measure
from harness.problem import DTYPE_BYTES, Problem

Tiles = dict[str, int]

#: Batch, query heads, key heads, keys, head dim; and numbers of queries. What tells most comes first.
SHAPES = (
    (1, 32, 8, 32768, 128, (1, 4, 16)),
    (16, 32, 8, 8192, 128, (1, 4, 16)),
    (1, 8, 1, 32768, 256, (1, 4, 16)),
    (4, 64, 8, 4096, 64, (1, 4, 16)),
    (1, 32, 8, 32768, 128, (64,)),
    (16, 32, 8, 8192, 128, (64,)),
    (1, 8, 1, 32768, 256, (64,)),
    (4, 64, 8, 4096, 64, (64,)),
    (20, 32, 8, 8192, 128, (1,)),
    (40, 32, 8, 2048, 128, (1, 8)),
    (4, 32, 8, 1024, 128, (1, 8)),
)
PEERS = ("torch-cudnn", "torch-flash", "fa3")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def forms(problem: Problem, chosen: Mapping[str, str]) -> list[Tiles]:
    """The header's own, then forms in which one thing is another."""
    parts, last, blocks, rows = (int(chosen[name]) for name in ("PARTS", "LAST", "BLOCKS", "WARP_ROWS"))
    tiles = -(-problem.seq_kv // int(chosen["BLOCK_K"]))
    made: list[Tiles] = [{}]
    if problem.seq_q == 1:
        made.append({"STAGES": 2, "LAST": last})
    if parts > 1:
        made += [{"LAST": 1 - last}, {"PARTS": (parts + 1) // 2, "LAST": last}]
    if 2 * parts <= tiles:
        made.append({"PARTS": 2 * parts, "LAST": last})
    if problem.batch >= 16:
        made.append({"PARTS": 3 * parts, "LAST": last})
    if blocks == 2:
        made.append({"BLOCKS": 1, "LAST": last})
    elif problem.head_dim == 256:
        made.append({"BLOCKS": 2, "BLOCK_K": 32, "KEY_WARPS": 2, "LAST": last})
    else:
        made.append({"BLOCKS": 2, "KEY_WARPS": 4 // int(chosen["ROW_WARPS"]), "LAST": last})
        if rows * int(chosen["ROW_WARPS"]) == 64:
            made.append({"WARP_ROWS": 16, "ROW_WARPS": 4, "KEY_WARPS": 2, "LAST": last})
    return made


def main() -> None:
    """Print the lines of all problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("text", nargs="?", default="")
    asked = parser.parse_args()
    begun, backend, kernel = time.monotonic(), pick("auto"), find("decode", "forward")
    policy = replace(POLICY[backend.name], settle=0.02, turn=0.03, max_seconds=0.1, min_seconds=0.03, patience=0.1)
    wanted: list[tuple[Problem, list[tuple[Kernel, Tiles]]]] = []
    for batch, heads, heads_kv, keys, dim, queries in SHAPES:
        for seq in queries:
            problem = Problem.of(batch, heads, seq, dim, heads_kv, keys, "bfloat16")
            if asked.text in problem.describe():
                chosen = planner.plan(kernel, problem, backend.device()).values
                own = [{}] if asked.chosen else forms(problem, chosen)
                wanted.append((problem, [*((kernel, tiles) for tiles in own), (find("hopper", "forward"), {})]))

    def compiled(each: tuple[Kernel, Problem, Tiles]) -> None:
        with suppress(Fault):
            backend.load(*each)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, [(each, problem, tiles) for problem, every in wanted for each, tiles in every]))
    say(f"{backend.device().name}, compiled after {time.monotonic() - begun:.0f} s")
    for problem, every in wanted:
        if time.monotonic() - begun > asked.seconds:
            say("out of time")
            return
        oracle = oracle_for(problem, backend, "forward")
        inputs = oracle.inputs_of("forward")
        results: dict[str, PassResult] = {}
        read = 2 * problem.batch * problem.heads_kv * problem.seq_kv * problem.head_dim * DTYPE_BYTES[problem.dtype]
        say(f"{problem.describe()}: {read / 1e6:.0f} MB of K and V, after {time.monotonic() - begun:.0f} s")
        for each, tiles in every:
            values = planner.plan(each, problem, backend.device(), tiles).values
            shown = tiles or {name: values[name] for name in (*each.tile, "PARTS") if name in values}
            name = f"{each.name} {' '.join(f'{key}={value}' for key, value in shown.items())}" + " chosen" * (not tiles)
            try:
                result = run_kernel(backend, each, oracle, inputs, tiles)
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
                results[peer.name] = run_peer(peer, oracle, "forward")
            except Fault as fault:
                say(f"  {peer.name}: {fault.what}: {fault.why}")
        timing = "cold" if backend.name == "cuda" and read < 1.5 * backend.device().l2_bytes else "warm"
        timings = measure({name: result.timed for name, result in results.items()}, backend, timing, policy)
        for name, each in timings.items():
            say(f"  {each.median_ms:8.4f} ms {read / each.median_ms / 1e6:5.0f} GB/s {timing} {each.launch:6} {name} {each.broken}")
    say(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
