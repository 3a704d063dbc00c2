"""decode's and hopper's forms for few queries beside the peers, in turns: GPU time, and GB/s of K and V read.

    python experiments/decode/forms.py [--seconds 90] [--chosen] [--kv-dtype float8_e4m3] [TEXT]

A line a form: ms and GB/s, and its tile values. The first of a kernel is what the header chooses; --chosen: no other. TEXT: only the problems whose name
holds it. --kv-dtype: of K and V; decode alone takes another than Q's. Times are warm; where the L2 cache would hold K and V they are cold. Every form is judged against float64 before it is timed. It
stops after so many seconds, between problems.
"""

import argparse
import sys
import time
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
from harness.kernel import Device, Kernel, find, planner
from harness.measure.sampling import POLICY, measure
from harness.problem import DTYPE_BYTES, Problem

Tiles = dict[str, int]

#: Batch, query heads, key heads, keys, head dim; and numbers of queries. What tells most comes first.
SHAPES = (
    (1, 32, 8, 32768, 128, (1, 8, 16)),
    (16, 32, 8, 8192, 128, (1, 8, 16)),
    (1, 32, 4, 32768, 256, (1, 4, 16)),
    (4, 64, 8, 8192, 64, (1, 4, 16)),
    (1, 32, 8, 4096, 128, (1, 16)),
    (16, 16, 16, 4096, 128, (1, 16)),
    (1, 8, 1, 32768, 256, (1, 16)),
    (8, 32, 4, 2048, 256, (1, 8)),
    (16, 32, 8, 1024, 128, (1, 4, 16)),
    (1, 32, 32, 8192, 64, (1, 16)),
    (4, 64, 8, 1024, 64, (1, 8)),
    (1, 64, 8, 131072, 128, (1, 8)),
    (64, 32, 8, 2048, 128, (1, 8)),
    (1, 32, 8, 1024, 128, (1, 16)),
    (1, 32, 8, 32768, 128, (4, 32, 64)),
    (1, 32, 4, 32768, 256, (8, 64)),
    (4, 64, 8, 8192, 64, (8, 64)),
)
PEERS = ("torch-cudnn", "fa3")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def forms(kernel: Kernel, problem: Problem, device: Device) -> list[Tiles]:
    """The header's own, then forms whose keys are divided otherwise: `each` parts have a block for each multiprocessor."""
    chosen = {name: int(value) for name, value in planner.plan(kernel, problem, device).values.items() if value.isdigit()}
    group, keys = problem.heads_q // problem.heads_kv, problem.heads_kv * problem.batch
    made: list[Tiles] = [{}]
    if kernel.name == "decode":
        works = -(-group * problem.seq_q // (chosen["WARP_ROWS"] * chosen["ROW_WARPS"])) * keys
        each, most = device.sms // works, problem.seq_kv // (2 * chosen["BLOCK_K"])
        made += [{"PARTS": parts} for parts in dict.fromkeys(min(n, most) for n in (each // 2, each, 2 * each)) if parts > 1]
        if each < 2:
            made.append({"PARTS": 1})
        if each > 1 and chosen["BLOCKS"] == 2:
            made.append({"PARTS": each, "BLOCKS": 1})
        return made
    pack = max(n for n in (8, 4, 2, 1) if group % n == 0)
    for blocks in {64: (2, 3), 128: (2,), 256: (1,)}[problem.head_dim]:
        own: Tiles = {"BLOCKS": blocks, "PACK": pack, "MERGE": 1}
        works = -(-problem.seq_q * pack // (64 * (2 if blocks == 1 else 1))) * keys * (group // pack)
        each, most = max(1, device.sms // works), max(1, problem.seq_kv // (2 * chosen["BLOCK_K"]))
        made += [{**own, "PARTS": parts} for parts in dict.fromkeys((min(each, most), min(2 * each, most))) if parts > 1]
        if each == 1:
            made.append({"BLOCKS": blocks, "PACK": pack})
    return made


def main() -> None:
    """Print the lines of all problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("text", nargs="?", default="")
    asked = parser.parse_args()
    begun, backend = time.monotonic(), pick("auto")
    kernels, device = (find("decode", "forward"), find("hopper", "forward")), backend.device()
    kernels = kernels if asked.kv_dtype == "bfloat16" else kernels[:1]
    policy = replace(POLICY[backend.name], settle=0.02, turn=0.03, max_seconds=0.1, min_seconds=0.03, patience=0.1)
    wanted: list[tuple[Problem, list[tuple[Kernel, Tiles]]]] = []
    for batch, heads, heads_kv, keys, dim, queries in SHAPES:
        for seq in queries:
            problem = Problem.of(batch, heads, seq, dim, heads_kv, keys, "bfloat16", dtype_kv=asked.kv_dtype)
            if asked.text in problem.describe():
                wanted.append(
                    (problem, [(each, tiles) for each in kernels for tiles in ([{}] if asked.chosen else forms(each, problem, device))])
                )

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
        read = 2 * problem.batch * problem.heads_kv * problem.seq_kv * problem.head_dim * DTYPE_BYTES[problem.dtype_kv]
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
        for peer in map(peers.find, PEERS if problem.seq_q == 1 else PEERS[1:]):
            assert peer
            try:
                results[peer.name] = run_peer(peer, oracle, "forward")
            except Fault as fault:
                say(f"  {peer.name}: {fault.what}: {fault.why}")
        timing = "cold" if backend.name == "cuda" and read < 1.5 * backend.device().l2_bytes else "warm"
        timings = measure({name: result.timed for name, result in results.items()}, backend, timing, policy)
        for name, timed in timings.items():
            say(f"  {timed.median_ms:8.4f} ms {read / timed.median_ms / 1e6:5.0f} GB/s {timing} {timed.launch:6} {name} {timed.broken}")
    say(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
