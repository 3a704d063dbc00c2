"""Forms of the kernel of 8 bits beside each other and FlashAttention-3, in turns.

    python experiments/fp8/forms.py [--seconds 300] [--set 4k 16k 1k section] [--settle 0.03] [--output FILE]

A line a form: its tile values, ms, TFLOP/s, and its speed over the fastest peer's. The first is the header's. Every form is judged against
float64 before it is timed. It stops after so many seconds, between problems; then come the times of all forms over the header's, a line a
problem. On a CPU the set is `small`.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import peers
from harness.backends import pick
from harness.check.contender import PassResult, run_kernel, run_peer
from harness.check.oracle import oracle_for
from harness.fault import Fault
from harness.kernel import find
from harness.measure.sampling import POLICY, measure
from harness.problem import Problem

Tiles = dict[str, int]

#: By head dim, the most promising first; what is not named is the header's.
FORMS: dict[int, list[Tiles]] = {
    128: [
        {},
        {"BLOCK_K": 128, "OVERLAP": 1},
        {"BLOCK_K": 128},
        {"BLOCK_K": 128, "OVERLAP": 1, "V_FIRST": 0},
        {"TURNS": 0},
        {"PROMOTE": 0},
        {"PIECE": 128},
    ],
    64: [
        {},
        {"V_FIRST": 0},
        {"TURNS": 0},
        {"OVERLAP": 1},
        {"PROMOTE": 0},
        {"PROMOTE": 0, "OVERLAP": 1},
    ],
    256: [{}, {"PIECE": 128}, {"PIECE": 128, "TURNS": 0}, {"V_FIRST": 0}, {"TURNS": 0}, {"PROMOTE": 0}],
}
#: Of few queries, for which V is not transposed first.
SHORT: dict[int, list[Tiles]] = {
    128: [{}, {"BLOCK_K": 256, "OVERLAP": 0, "V_FIRST": 1}, {"OVERLAP": 0}, {"PROMOTE": 0}],
    64: [{}, {"V_FIRST": 1}, {"TURNS": 0}, {"PROMOTE": 0}],
    256: [{}, {"PIECE": 128}, {"V_FIRST": 1}, {"V_FIRST": 1, "PIECE": 128}, {"TURNS": 0}, {"PROMOTE": 0}],
}
#: What may hide the promotion at head dim 256: smaller pieces (four sums), larger ones.
PIECES: list[Tiles] = [{}, {"PIECE": 32, "SUMS": 4}, {"PIECE": 64}, {"PIECE": 128}, {"PROMOTE": 0}]
#: At 256 Q of the next tile is loaded while O leaves, or not. At the others few keys are also tried with a launch for V^T.
PARTS: dict[int, list[Tiles]] = {
    256: [
        {},
        {"Q_STAGES": 1, "O_PARTS": 1},
        {"V_FIRST": 1},
    ],
    128: [{}, {"TURNS": 0}, {"STAGES": 3}],
    64: [{}, {"V_FIRST": 1}, {"STAGES": 3}],
}
SECTIONS: list[Tiles] = [{"SECTION": size} for size in (8, 16, 32, 64)]


def cells(seq: int, batch: int, dims: Sequence[int] = (128, 64, 256)) -> list[tuple[Problem, list[Tiles]]]:
    """The sweep's problems of so many queries, with all forms of their head dim."""
    return [
        (Problem.of(batch, 8 if dim == 256 else 16, seq, dim, dtype="float8_e4m3", causal=causal), (FORMS if seq > 1024 else SHORT)[dim])
        for dim in dims
        for causal in (False, True)
    ]


SETS: dict[str, list[tuple[Problem, list[Tiles]]]] = {
    "4k": cells(4096, 4),
    "16k": cells(16384, 1),
    "1k": cells(1024, 4),
    "2k": cells(2048, 4),
    "8k": cells(8192, 2),
    "d256": [(made, PIECES) for seq in (4096, 16384) for made, _ in cells(seq, 1, (256,))],
    "short": [
        (made, PARTS[made.head_dim])
        for dims in ((256,), (128, 64))
        for made, _ in cells(1024, 4, dims)
        if made.causal or made.head_dim == 256
    ],
    "parts": [(made, [{}, {"Q_STAGES": 2, "O_PARTS": 2}]) for seq in (8192, 16384) for made, _ in cells(seq, 16384 // seq, (256,))],
    "section": [(made, [{}, *SECTIONS]) for seq in (4096, 16384) for made, _ in cells(seq, 2) if made.causal],
    "small": [(Problem.of(1, 2, 160, 64, dtype="float8_e4m3", causal=True), [{}, {"V_FIRST": 1}])],
}

output: list[TextIO] = [sys.stdout]


def say(line: str) -> None:
    """Print a line at once, into the file too."""
    for each in output:
        each.write(line + "\n")
        each.flush()


def name_of(tiles: Tiles) -> str:
    """A form's tile values, or that it is the header's."""
    return " ".join(f"{name} {value}" for name, value in tiles.items()) or "header"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the lines of all problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--set", choices=SETS, default=["4k", "16k", "1k", "section", "2k", "8k"], nargs="+")
    parser.add_argument("--settle", type=float, default=0.03, help="seconds before a turn, and of one")
    parser.add_argument("--output", type=Path, help="a file that gets the lines too")
    asked = parser.parse_args(arguments)
    if asked.output:
        output.append(asked.output.open("w", encoding="utf-8"))
    begun, backend = time.monotonic(), pick("auto")
    kernel, policy = find("float8", "forward", False), POLICY[backend.name]
    if backend.name == "cuda":
        longest = 3 * asked.settle
        policy = replace(policy, settle=asked.settle, turn=asked.settle, max_seconds=longest, min_seconds=asked.settle, patience=longest)
    wanted = [each for name in (asked.set if backend.name == "cuda" else ["small"]) for each in SETS[name]]

    def compiled(each: tuple[Problem, Tiles]) -> None:
        with suppress(Fault):
            backend.load(kernel, *each)

    with ThreadPoolExecutor(16 if backend.name == "cuda" else 2) as pool:
        list(pool.map(compiled, [(made, tiles) for made, forms in wanted for tiles in forms]))
    say(f"compiled after {time.monotonic() - begun:.0f} s")
    gains, ratios = [], []
    for made, forms in wanted:
        if time.monotonic() - begun > asked.seconds:
            say("out of time")
            break
        oracle = oracle_for(made, backend, "forward")
        inputs = oracle.inputs_of("forward")
        results: dict[str, PassResult] = {}
        say(f"{made.describe()}, after {time.monotonic() - begun:.0f} s")
        for tiles in forms:
            try:
                result = run_kernel(backend, kernel, oracle, inputs, tiles)
            except Fault as fault:
                say(f"  {name_of(tiles)}: {fault.what}: {fault.why}")
                continue
            if result.passed:
                results[name_of(tiles)] = result
            else:
                say(f"  {name_of(tiles)} WRONG: {[v.tensor for v in result.verdicts.values() if not v.passed]}")
        theirs = set()
        peer = peers.find("fa3")
        assert peer
        try:
            results[peer.name] = run_peer(peer, oracle, "forward")
            theirs.add(peer.name)
        except Fault as fault:
            say(f"  {peer.name}: {fault.what}: {fault.why}")
        timings = measure({name: result.timed for name, result in results.items()}, backend, "warm", policy)
        times = {name: timing.median_ms for name, timing in timings.items()}
        best = min((times[name] for name in theirs), default=math.nan)
        for name, ms in times.items():
            say(f"  {name:48} {ms:9.4f} ms {made.flops('forward') / ms / 1e9:8.1f} TFLOP/s {best / ms:6.3f} {timings[name].broken}")
        mine = {name: ms for name, ms in times.items() if name not in theirs}
        if mine and theirs:
            ratios.append(best / min(mine.values()))
        if (first := name_of(forms[0])) in mine:
            gains.append(f"{made.describe()}: " + ", ".join(f"{name} {times[first] / ms:.3f}" for name, ms in times.items()))
    say("Times as fast as the header's form:\n" + "\n".join(gains))
    if ratios:
        say(f"the fastest form over the peer, geometric mean of {len(ratios)}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
    say(f"done after {time.monotonic() - begun:.0f} s")
    if asked.output:
        output.pop().close()


if __name__ == "__main__":
    main()
