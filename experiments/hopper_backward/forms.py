"""Forms of a pass, by default the backward one, beside each other and the peers, in turns, and the GPU time of each of its launches.

    python experiments/hopper_backward/forms.py [--pass forward] [--seconds 100] [--old FOLDER …] [--set NAME …] [--peers fa4,torch-cudnn] [--settle 0.03]
        [--output FILE]

A line a form: its file and tile values, ms, its speed over the best peer's and the spread of its samples; the first is what the header
chooses, then, under a folder's name, the same of its files. A line before it: microseconds of each launch alone, replayed from a CUDA graph.
Every form is judged against float64 before it is timed. It stops after so many seconds, between problems; then come the times of all forms
over the chosen one's, a line a problem. File "" is the one that is chosen; OVERLAPS (whether launches do) and DETERMINISTIC among the tile
values are none.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import peers
from harness.backends import Backend, Call, pick
from harness.check.contender import PassResult, run_kernel, run_peer
from harness.check.oracle import oracle_for
from harness.check.trial import Trial
from harness.fault import Fault
from harness.kernel import KERNELS, Kernel, find, planner
from harness.measure.sampling import POLICY, Ready, Timing, measure
from harness.problem import Problem

Tiles = dict[str, int]


def problem(
    batch: int, heads: int, heads_kv: int, seq: int, seq_kv: int, dim: int, mask: str, dtype: str, score: str | None = None
) -> Problem:
    """A problem by its sizes; mask: "causal", empty or the text of one."""
    causal, text = mask == "causal", mask if mask not in ("", "causal") else None
    made = Problem.of(batch, heads, seq, dim, heads_kv, dtype=dtype, causal=causal, seq_kv=seq_kv, mask=text, score=score)
    assert made.seq_kv == seq_kv
    return made


def grid(**values: Sequence[int]) -> list[Tiles]:
    """Every combination of tile values."""
    made: list[Tiles] = [{}]
    for name, each in values.items():
        made = [{**tiles, name: value} for tiles in made for value in each]
    return made


BF, HALF, FULL = "bfloat16", "float16", "float32"


def cells(
    dim: int, forms: dict[str, list[tuple[str, Tiles]]], least: int = 0, most: int = 16384
) -> list[tuple[Problem, list[tuple[str, Tiles]]]]:
    """The record's problems of a head dim, at so many queries; forms: by mask."""
    lengths = [seq for seq in (512, 1024, 2048, 4096, 8192, 16384) if least <= seq <= most]
    heads = 2048 // dim
    return [(problem(16384 // seq, heads, heads, seq, seq, dim, mask, BF), each) for seq in lengths for mask, each in forms.items()]


LONG: list[tuple[str, Tiles]] = [("", {"OVERLAPS": 1})]
PLAIN = {"BLOCK_Q": 64, "EAGER": 0}  # where a row of choice has other values without a mask
TWIN_128: list[tuple[str, Tiles]] = [("hopper", PLAIN | t) for t in ({"TWIN": 3}, {"APART": 1}, {"TWIN": 3, "APART": 1})]
BOTH_128: list[tuple[str, Tiles]] = [
    *LONG,
    *(("hopper", PLAIN | t) for t in ({}, {"APART": 1}, {"TWIN": 3}, {"TWIN": 3, "APART": 1})),
]
QUERIES_80 = {"BLOCK_Q": 80, "TWIN": 0, "EAGER": 0}
CLOSER: list[tuple[str, Tiles]] = [
    ("hopper", t) for t in (PLAIN, QUERIES_80, {**QUERIES_80, "EAGER": 1}, {**PLAIN, "TWIN": 3, "EAGER": 1}, {**PLAIN, "TWIN": 5})
]
CLOSER_CAUSAL: list[tuple[str, Tiles]] = [("hopper", t) for t in ({"TWIN": 3}, {"TWIN": 3, "EAGER": 1}, {"TWIN": 5})]
CLOSER_SHORT: list[tuple[str, Tiles]] = [("hopper", t) for t in ({}, {**QUERIES_80, "EAGER": 1}, {"TWIN": 5}, {"APART": 1})]
SHORT_128: list[tuple[str, Tiles]] = [
    ("hopper", {"APART": 1}),
    ("hopper", {"TWIN": 5}),
    ("hopper", {**PLAIN, "TWIN": 5}),
    ("hopper", {**QUERIES_80, "EAGER": 1}),
]
TURNS: list[tuple[str, Tiles]] = [("hopper", {"DETERMINISTIC": 1})]
WINDOW_64: list[Tiles] = [*({"SECTION": n} for n in (2, 4, 16, 32)), *({"AHEAD": n} for n in (2, 6, 8)), {"KV_STAGES": 1}, {"OVERLAPS": 1}]
SOFTCAP: dict[int, list[Tiles]] = {64: [{"SPLITS": 1}, {"PIN": 0}], 128: [{"PIN": 0}, {"PIN": 1}, {"BLOCK_K": 144}]}  # by head dim
SECTIONS_256: list[tuple[str, Tiles]] = [("hopper_halves", t) for t in ({}, {"LATE": 1}, {"SECTION": 64})]
HALVES_256 = {"": SECTIONS_256[:2], "causal": SECTIONS_256}
THIRDS: list[tuple[str, Tiles]] = [("hopper_thirds", t) for t in ({}, {"BACKWARDS": 0}, {"SECTION": 16}, {"SECTION": 64})]


def windows(forms: dict[int, list[Tiles]], short: list[Tiles]) -> list[tuple[Problem, list[tuple[str, Tiles]]]]:
    """Problems of windows: B2 H16 S8192, window 1024, with forms by head dim, and B2 H128 D64, window 127, with the short ones."""
    made = [(problem(2, 128, 128, 4096, 4096, 64, "0 <= q - k <= 127", BF), short)]
    made += [(problem(2, 16, 16, 8192, 8192, dim, "0 <= q - k <= 1024", BF), each) for dim, each in forms.items()]
    made += [(problem(2, 128, 128, seq, seq, 64, "0 <= q - k <= 127", BF), short) for seq in (2048, 8192)]
    return [(each, [("hopper", t) for t in tiles]) for each, tiles in made]


#: Which problems, with other forms than the header's: file and tile values.
SETS: dict[str, list[tuple[Problem, list[tuple[str, Tiles]]]]] = {
    "overlap": [  # launches that overlap, beside those that do not: nothing but the header's own form
        (problem(2, 16, 16, 1024, 1024, 80, "", HALF), []),
        (problem(7, 4, 1, 411, 411, 256, "causal", HALF), []),
        *((problem(16384 // seq, 16, 16, seq, seq, 128, mask, BF), []) for seq in (512, 1024) for mask in ("", "causal")),
        (problem(1, 14, 2, 512, 512, 64, "causal", BF), []),
    ],
    "cells_128": [  # the record's; dQ transposed, launches that overlap
        *cells(128, {"causal": TWIN_128}, 4096),
        *cells(128, {"causal": BOTH_128, "": BOTH_128}, 0, 2048),
        *cells(128, {"": TWIN_128}, 4096),
    ],
    "d128": [  # 80 queries a tile, the next S behind dK, more of K in registers; the most telling cells first
        *cells(128, {"": CLOSER}, 4096, 4096),
        *cells(128, {"": CLOSER}, 16384),
        *cells(128, {"causal": CLOSER_CAUSAL}, 4096, 4096),
        *cells(128, {"causal": CLOSER_CAUSAL}, 16384),
        *cells(128, {"": CLOSER_SHORT}, 1024, 1024),
        *cells(128, {"causal": CLOSER_CAUSAL}, 2048, 2048),
        *cells(128, {"": CLOSER_SHORT}, 512, 512),
        *cells(128, {"causal": CLOSER_SHORT}, 1024, 1024),
        *cells(128, {"": CLOSER[:3]}, 2048, 2048),
        *cells(128, {"causal": CLOSER_SHORT}, 512, 512),
    ],
    "short_128": [  # where 80 queries begin, and dV leaves through the place of dS
        *cells(128, {"causal": SHORT_128[:2], "": SHORT_128}, 1024, 2048),
        *cells(128, {"causal": SHORT_128[:2]}, 4096, 4096),
    ],
    "window": windows(
        {64: [{"SECTION": 4}, {"SECTION": 32}], 128: [{"TWIN": 0}, {"BACKWARDS": 0}, {"SECTION": 64}]},
        [{"SECTION": 32}, {"OVERLAPS": 1}],
    ),
    "window_forward": windows(
        {64: [{"BLOCKS": 3}, {"BLOCK_K": 128}], 128: [{"BLOCK_K": 96}, {"BLOCK_K": 112}, {"SECTION": 16}]}, [{"BLOCKS": 1}, {"BLOCKS": 2}]
    ),
    "window_64": [(problem(2, 16, 16, 8192, 8192, 64, "0 <= q - k <= 1024", BF), [("hopper", t) for t in WINDOW_64])],
    "softcap_forward": [  # beside causal ones, whose speed a visible FLOP it is compared with; at a cap of 8 all tiles have a large tanh
        (problem(2, 16, 16, 8192, 8192, dim, mask, BF, score), [("hopper", t) for t in SOFTCAP[dim]] if score and "30" in score else [])
        for mask, score in (("", "30.0 * tanh(s / 30.0)"), ("causal", None), ("", "8.0 * tanh(s / 8.0)"), ("", None))
        for dim in (64, 128)
    ],
    "wide": [  # DeepSeek V4's layer, windows of other lengths, and what a work of wide_heads costs, and a tile of it
        *(
            (problem(2, heads, 1, seq, seq, 512, mask, BF), [("wide_heads", {}), ("wide_heads", {"HEADS": 1})])
            for heads, seq, mask in (
                *((64, 2048, f"0 <= q - k <= {last}") for last in (127, 63, 160, 255, 383, 895)),
                (128, 4096, "0 <= q - k <= 127"),
                *((64, 2048, mask) for mask in ("causal", "")),
            )
        )
    ],
    "turns": [*cells(128, {"causal": TURNS, "": TURNS}, 0, 4096), *cells(64, {"causal": TURNS, "": TURNS}, 0, 2048)],
    "cells_64": cells(64, {"causal": LONG, "": LONG}, 0, 2048),
    "cells_256": cells(256, {"causal": [("", {"OVERLAPS": 1})], "": [("", {"OVERLAPS": 1})]}, 0, 2048),
    "halves": [  # 80 keys a block at head dim 256; the longest decide
        *cells(256, HALVES_256, 16384),
        *cells(256, HALVES_256, 4096, 4096),
        *cells(256, HALVES_256, 512, 1024),
        *cells(256, HALVES_256, 2048, 2048),
        *cells(256, HALVES_256, 8192, 8192),
    ],
    "dims_192": [  # DeepSeek's head dims, 192 of Q and K and 128 of V: beside hopper_keys, which is chosen
        (problem(16384 // seq, 16, 16, seq, seq, 192, mask, BF).with_(head_dim_v=128), THIRDS if mask else THIRDS[:1])
        for seq in (2048, 8192, 512)
        for mask in ("", "causal")
    ],
    "halves_mixed": [  # where hopper_cluster's clusters of 128 keys are ahead: few works, short ones, heads that share keys
        (problem(batch, heads, heads_kv, seq, seq, 256, mask, BF), [("hopper_halves", {})])
        for batch, heads, heads_kv, seq, mask in (
            (1, 8, 4, 2048, "causal"),
            (4, 8, 4, 512, "causal"),
            (1, 4, 1, 4096, "causal"),
            (16, 4, 1, 512, "causal"),
            (1, 16, 8, 1024, ""),
            (2, 16, 8, 3000, "causal"),
            (8, 16, 16, 256, "causal"),
            (8, 16, 16, 256, ""),
            (1, 16, 2, 2048, "causal"),
            (8, 16, 2, 700, "causal"),
            (8, 16, 2, 700, ""),
            (1, 12, 4, 1500, "causal"),
            (6, 12, 4, 1000, "causal"),
            (30, 8, 4, 200, ""),
        )
    ],
    "cells_long": [*cells(64, {"causal": LONG, "": LONG}, 4096), *cells(256, {"causal": LONG, "": LONG}, 4096)],
    "float32": [  # splits
        (problem(1, 71, 1, 2845, 2845, 64, "", FULL), [("split", t) for t in grid(SPLITS=(4, 8))]),
        (problem(6, 4, 1, 256, 256, 256, "", FULL), [("split", t) for t in grid(SPLITS=(2, 8))]),
        (problem(1, 14, 2, 2048, 2048, 64, "causal", FULL), [("split", t) for t in grid(SPLITS=(4, 8))]),
        (problem(1, 16, 16, 2048, 2048, 128, "causal", FULL), [("split", t) for t in grid(SPLITS=(2, 4))]),
    ],
    "section": [  # many more keys than queries
        (problem(5, 32, 32, 192, 2048, 128, "causal", BF), [("hopper_atomic", t) for t in grid(SECTION=(8,))]),
        (problem(4, 32, 8, 256, 4096, 128, "causal", BF), [("hopper_atomic", t) for t in grid(SECTION=(4, 8, 16))]),
        (problem(8, 32, 32, 128, 1024, 64, "causal", BF), [("hopper", t) for t in grid(SECTION=(4, 8))]),
    ],
    "group": [  # hopper or hopper_atomic where a key head has several query heads
        (problem(3, 64, 8, 1113, 1113, 128, "causal", BF), [("hopper", t) for t in grid(SPLITS=(1, 2, 4), BACKWARDS=(1,), SECTION=(64,))]),
        (problem(8, 40, 8, 367, 367, 128, "causal", BF), [("hopper", {"SPLITS": 1, "BACKWARDS": 1, "SECTION": 64})]),
        (problem(4, 28, 4, 1837, 1837, 128, "causal", BF), [("hopper", t) for t in grid(SPLITS=(2, 4), BACKWARDS=(1,), SECTION=(64,))]),
        (problem(1, 36, 4, 3390, 3390, 128, "causal", BF), [("hopper", t) for t in grid(SPLITS=(2, 4), BACKWARDS=(1,), SECTION=(64,))]),
    ],
    "inner": [  # all heads of a group at a tile of queries, beside what traffic.py says of head after head; the lowest of mixed
        *(
            (
                problem(batch, heads, heads_kv, seq, seq, 128, "causal", dtype),
                [
                    *(("hopper", t) for t in grid(HEADS_INNER=(1,))),
                    *(("hopper", t) for t in grid(HEADS_INNER=(1,), SPLITS=(splits,), SECTION=(32,))),
                    ("hopper", {"SPLITS": outer[0], "SECTION": outer[1]}),
                ],
            )
            for batch, heads, heads_kv, seq, dtype, splits, outer in (
                (1, 64, 4, 4049, BF, 2, (4, 8)),
                (2, 128, 8, 2048, BF, 1, (4, 32)),
                (1, 56, 8, 4183, BF, 1, (4, 64)),
                (8, 32, 4, 1758, BF, 1, (2, 16)),
                (7, 36, 4, 2048, HALF, 1, (2, 32)),
                (2, 128, 8, 1024, BF, 2, (4, 32)),
                (6, 128, 8, 512, BF, 1, (1, 32)),
                (1, 24, 2, 8192, HALF, 2, (4, 8)),
                (4, 32, 8, 2048, BF, 2, (1, 16)),
                (1, 40, 8, 4096, BF, 1, (2, 32)),
            )
        ),
        *(
            (problem(batch, heads, heads_kv, seq, seq, 128, "", dtype), [("hopper", t) for t in grid(HEADS_INNER=(1,))])
            for batch, heads, heads_kv, seq, dtype in ((1, 32, 4, 4096, HALF), (1, 56, 8, 4096, BF), (10, 96, 8, 445, BF))
        ),
        *(
            (problem(batch, heads, heads_kv, seq, seq, 64, "causal", BF), [("hopper", t) for t in grid(HEADS_INNER=(1,), BACKWARDS=(0, 1))])
            for batch, heads, heads_kv, seq in ((1, 14, 2, 8192), (4, 32, 8, 2048))
        ),
        (problem(3, 16, 2, 4096, 4096, 256, "causal", BF), [("hopper_cluster", t) for t in grid(SPLITS=(1, 2), SECTION=(8, 32))]),
        (problem(8, 16, 2, 700, 700, 256, "causal", BF), [("hopper_cluster", t) for t in grid(SPLITS=(1, 2), SECTION=(8, 32))]),
    ],
    "between": [  # head dims between 64, 128 and 256
        (problem(2, 16, 16, 4096, 4096, 96, "", BF), [("hopper", t) for t in grid(AHEAD=(2, 8))] + [("hopper_atomic", {})]),
        (problem(2, 16, 16, 4096, 4096, 72, "", BF), [("hopper", t) for t in grid(AHEAD=(2, 8))] + [("hopper_atomic", {})]),
        (problem(2, 32, 32, 2048, 2048, 112, "causal", BF), [("hopper", {"AHEAD": 4}), ("hopper", {"BACKWARDS": 0})]),
        *(
            (problem(batch, 32, 32, seq, seq, dim, "causal", BF), [("hopper", t) for t in grid(AHEAD=(2, 8))] + [("hopper_atomic", {})])
            for batch, seq, dim in ((5, 2015, 96), (4, 1500, 80), (2, 2048, 96))
        ),
    ],
    "many": [  # many queries a key head
        (
            problem(1, 128, 8, 1024, 3207, 128, "causal", BF),
            [("hopper_atomic", t) for t in grid(SPLITS=(1, 2, 4, 8), SECTION=(64, 1024))]
            + [("hopper", t) for t in grid(SPLITS=(1, 2, 4, 8), SECTION=(64, 1024), BACKWARDS=(0, 1))],
        ),
        (
            problem(1, 128, 8, 1024, 3207, 128, "", BF),
            [("hopper", {"SPLITS": 2}), ("hopper", {"SPLITS": 4}), ("hopper_atomic", {"SPLITS": 4})],
        ),
        (
            problem(5, 32, 32, 192, 2048, 128, "causal", BF),
            [("hopper_atomic", t) for t in grid(SECTION=(4, 16, 1024))]
            + [("hopper", t) for t in grid(SECTION=(32, 1024), BACKWARDS=(0, 1))],
        ),
        (
            problem(1, 36, 4, 3390, 3390, 128, "causal", BF),
            [("hopper", t) for t in grid(SPLITS=(2, 4, 8), SECTION=(64, 1024), BACKWARDS=(0, 1))]
            + [("hopper_atomic", t) for t in grid(SPLITS=(4, 8), SECTION=(64, 1024))],
        ),
        (
            problem(3, 40, 10, 2048, 2048, 128, "causal", BF),
            [("hopper", t) for t in grid(SPLITS=(1, 2, 4), SECTION=(64, 1024), BACKWARDS=(0, 1))]
            + [("hopper_atomic", t) for t in grid(SPLITS=(1, 2), SECTION=(64, 1024))],
        ),
        (
            problem(7, 4, 1, 411, 411, 256, "causal", HALF),
            [("hopper_keys", t) for t in grid(SPLITS=(1, 2, 4))] + [("hopper_cluster", t) for t in grid(SPLITS=(1, 4))],
        ),
        (
            problem(2, 16, 16, 1024, 1024, 80, "", HALF),
            [("hopper_atomic", {}), ("hopper_atomic", {"SPLITS": 2}), ("hopper", {"SPLITS": 2})],
        ),
    ],
}
PEERS = {BF: ("fa4", "torch-cudnn"), HALF: ("fa4", "torch-cudnn"), FULL: ("torch-efficient",)}


output: list[TextIO] = [sys.stdout]


def say(line: str) -> None:
    """Print a line at once, into the file too."""
    for each in output:
        each.write(line + "\n")
        each.flush()


def formed(kernel: Kernel, values: Tiles) -> tuple[Kernel, Tiles]:
    """A form's file and tile values."""
    tiles = dict(values)
    overlaps = tiles.pop("OVERLAPS", None)
    if tiles.pop("DETERMINISTIC", 0):
        kernel = kernel.made_deterministic()
    if overlaps is None:
        return kernel, tiles
    launches = tuple(replace(each, overlaps=overlaps if each.overlaps else 0) for each in kernel.launches)
    return replace(kernel, launches=launches), tiles


def file_of(name: str, pass_: str, folder: Path = KERNELS) -> Kernel:
    """A file by its name, not one that runs in its place."""
    return Kernel.read(next(folder.glob(f"[0-9][0-9]_{name}_{pass_}.cu")))


def launches(backend: Backend, result: PassResult) -> str:
    """Microseconds of each launch alone: ten of it in a graph, replayed ten times."""
    assert isinstance(result.timed, Trial) and result.loaded
    steps: list[Any] = result.timed.bound.steps
    parts = []
    for step in steps:
        replay = backend.graph(
            result.loaded, [step._replace(overlaps=False) if isinstance(step, Call) else step] * 10
        )  # a launch must not meet itself
        assert replay
        times = sorted([again() for again in [replay() for _ in range(10)]])
        parts.append(f"{getattr(step, 'entry', 'fill')} {times[len(times) // 2] * 1e5:.1f}")
    return ", ".join(parts)


def spread(timing: Timing) -> str:
    """The 20th and 80th percentile of the samples over their median: a form may have two speeds."""
    return f"{timing.p20_ms / timing.median_ms:.3f} to {timing.p80_ms / timing.median_ms:.3f}"


def main() -> None:
    """Print the lines of all problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--set", choices=SETS, default=["many"], nargs="+")
    parser.add_argument("--old", type=lambda text: Path(text).resolve(), action="append", default=[])
    parser.add_argument("--settle", type=float, default=0.03, help="seconds before a turn, and of one")
    parser.add_argument("--peers", type=lambda text: text.split(","))
    parser.add_argument("--output", type=Path, help="a file that gets the lines too")
    parser.add_argument("--pass", choices=("backward", "forward"), default="backward", dest="pass_")
    asked = parser.parse_args()
    if asked.output:
        output.append(asked.output.open("w", encoding="utf-8"))
    begun, backend, pass_ = time.monotonic(), pick("auto"), asked.pass_
    longest = 3 * asked.settle
    policy = replace(
        POLICY[backend.name], settle=asked.settle, turn=asked.settle, max_seconds=longest, min_seconds=asked.settle, patience=longest
    )
    wanted: list[tuple[Problem, dict[str, tuple[Kernel, Tiles]]]] = []
    for made, forms in (each for name in asked.set for each in SETS[name]):
        name = "split" if made.dtype == FULL else "hopper_cluster" if made.head_dim > 128 and not made.has_own_dim_v else "hopper"
        name = "wide_heads" if made.head_dim > 256 else "hopper" if pass_ == "forward" else name
        chosen = planner.variant(find(name, pass_, False), made)
        tiles = dict(planner.plan(chosen, made, backend.device()).macros)
        named = {
            "chosen "
            + chosen.name
            + "".join(f" {n} {tiles[n]}" for n in ("SPLITS", "SECTION", "BACKWARDS", "BLOCKS", "BLOCK_K") if n in tiles): (
                chosen,
                Tiles(),
            )
        }
        for folder in asked.old:
            with suppress(StopIteration):
                named[folder.name] = (file_of(chosen.name, pass_, folder), {})
        for file, values in forms:
            if values or (file and file != chosen.name):
                named[(file or chosen.name) + "".join(f" {n} {v}" for n, v in values.items())] = formed(
                    file_of(file or chosen.name, pass_), values
                )
        wanted.append((made, named))

    def compiled(each: tuple[Kernel, Problem, Tiles]) -> None:
        with suppress(Fault):
            backend.load(*each)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, [(kernel, made, tiles) for made, named in wanted for kernel, tiles in named.values()]))
    say(f"compiled after {time.monotonic() - begun:.0f} s")
    gains = []
    for made, named in wanted:
        if time.monotonic() - begun > asked.seconds:
            say("out of time")
            break
        oracle = oracle_for(made, backend, pass_)
        inputs = oracle.inputs_of(pass_)
        results: dict[str, PassResult] = {}
        say(f"{made.describe()}, after {time.monotonic() - begun:.0f} s")
        for name, (kernel, tiles) in named.items():
            try:
                result = run_kernel(backend, kernel, oracle, inputs, tiles)
            except Fault as fault:
                say(f"  {name}: {fault.what}: {fault.why}")
                continue
            if not result.passed:
                say(f"  {name} WRONG: {[v.tensor for v in result.verdicts.values() if not v.passed]}")
                continue
            if not results or (tiles and made.seq_q <= 2048) or kernel.path.parent in asked.old:
                say(f"  {name}: {launches(backend, result)}")
            results[name] = result
        for peer in map(peers.find, asked.peers or PEERS[made.dtype]):
            assert peer
            try:
                results[peer.name] = run_peer(peer, oracle, pass_)
            except Fault as fault:
                say(f"  {peer.name}: {fault.what}: {fault.why}")
        ready: dict[str, Ready] = {}
        timings = measure({name: result.timed for name, result in results.items()}, backend, "warm", policy, ready=ready)
        best = min((timings[name].median_ms for name in results if peers.find(name)), default=float("nan"))
        for name, timing in timings.items():
            say(f"  {name:48} {timing.median_ms:8.4f} ms {best / timing.median_ms:6.3f} ({spread(timing)}) {timing.launch} {timing.broken}")
        if (first := next(iter(named))) in timings:
            over = {name: timings[first].median_ms / timing.median_ms for name, timing in timings.items()}
            gains.append(f"{made.describe()}: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in over.items()))
    say("Times as fast as the chosen form:\n" + "\n".join(gains))
    say(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
