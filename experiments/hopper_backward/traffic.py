"""Bytes of Q, dO and dQ that hopper's backward pass takes from memory under the causal mask at head dim 128, simulated.

    python experiments/hopper_backward/traffic.py [B H HKV S …]    each order of a problem, with its best splits and sections
    python experiments/hopper_backward/traffic.py mixed [SECONDS]  the problems of experiments/mixed: what was measured over the simulated time

No GPU is needed. Multiprocessors take works in the order of fa::place_in_sections, and each goes from tile to tile of queries as its walk
does: head after head, or through all heads of the group at a tile (HEADS_INNER). The L2 cache keeps the tiles used last. `slower` is how
much longer a tile takes where so many of the tiles come from memory: read off 121 problems of experiments/mixed (mixed prints them), whose
measured time over the one without a miss has a correlation of 0.87 with that part. GB: Q, dO and dQ read, and dQ written.
"""

import heapq
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNITS, ROWS, KEYS, DIM = 132, 64, 128, 128
#: Bytes of an element of Q: two of Q and of dO, four of dQ; what of 63 MB of L2 keeps them, 0.6.
ELEMENT, KEPT = 8, 37_500_000
#: As kernels_cu/22_hopper_backward.cu has them: microseconds of a tile, of a work, and more of one of several splits; of the other launches, and of each million elements of Q in them.
TILE, WORK, SPLIT, LAUNCHES, ELEMENTS = 2.09, 4.5, 13.8, 1.5, 3.37
WORST = ((1, 64, 4, 4049), (7, 36, 4, 2048), (1, 56, 8, 4183), (8, 32, 4, 1758), (2, 128, 8, 2048), (2, 128, 8, 1024), (1, 24, 2, 8192))


def slower(missed: float) -> float:
    """How many times as long as the header's shared_ns a tile takes where this part of the tiles comes from memory."""
    return 1.09 + 0.58 * max(0.0, missed - 0.3)


class Found(NamedTuple):
    """What a form takes: microseconds in all, GB, the part of tiles from memory; microseconds if none did, of the launch of gradients."""

    time: float
    gigabytes: float
    missed: float
    splits: int
    section: int
    cached: float


def walks(
    batch: int, heads: int, heads_kv: int, seq: int, splits: int, megabytes: int, inner: bool
) -> Iterator[list[tuple[int, int, int]]]:
    """The tiles of queries of each work, in the order of their numbers."""
    group, q_tiles, k_tiles = heads // heads_kv, -(-seq // ROWS), -(-seq // KEYS)
    rows = batch * heads_kv * splits
    section = max(1, min(rows // splits, (megabytes << 20) // (ELEMENT * DIM * seq * min(splits, group)))) * splits
    for begin in range(0, rows, section):
        for k_tile in range(k_tiles):
            for row in range(begin, min(rows, begin + section)):
                kv_head, split = divmod(row, splits)
                tiles = q_tiles - KEYS * k_tile // ROWS
                if inner:
                    some = range(group * split // splits, group * (split + 1) // splits)
                    yield [(kv_head, head, tile) for tile in range(q_tiles - 1, q_tiles - 1 - tiles, -1) for head in some]
                else:
                    every = range(tiles * group * split // splits, tiles * group * (split + 1) // splits)
                    yield [(kv_head, n // tiles, q_tiles - 1 - n % tiles) for n in every]


def simulate(batch: int, heads: int, heads_kv: int, seq: int, splits: int, megabytes: int, inner: bool) -> Found:
    """The launch of gradients."""
    works = walks(batch, heads, heads_kv, seq, splits, megabytes, inner)
    cached: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    room = KEPT // (ROWS * DIM * ELEMENT)
    ready: list[tuple[float, int, Iterator[tuple[int, int, int]]]] = [(0.0, unit, iter(())) for unit in range(UNITS)]
    missed = tiles = 0
    end = 0.0
    while ready:
        now, unit, walk = heapq.heappop(ready)
        if (tile := next(walk, None)) is None:
            if (work := next(works, None)) is None:
                end = max(end, now)
            else:
                heapq.heappush(ready, (now + WORK + SPLIT * (splits > 1), unit, iter(work)))
            continue
        tiles += 1
        if tile in cached:
            cached.move_to_end(tile)
        else:
            missed += 1
            cached[tile] = None
            if len(cached) > room:
                cached.popitem(last=False)
        heapq.heappush(ready, (now + TILE, unit, walk))
    part = missed / tiles
    return Found(end * slower(part) + others(batch, heads, seq), missed * ROWS * DIM * (ELEMENT + 4) / 1e9, part, splits, megabytes, end)


def others(batch: int, heads: int, seq: int) -> float:
    """Microseconds of the launches before and behind that of gradients."""
    return LAUNCHES + ELEMENTS * batch * heads * seq * DIM / 1e6


def mixed(seconds: float) -> None:
    """A line a problem of the record: measured, simulated, and the measured time of gradients over that without a miss."""
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    from harness.check.choose import choose
    from harness.check.request import Request
    from harness.kernel import planner
    from harness.kernel.plan import Device
    from harness.row import read_rows
    from harness.verbs.sweep import load

    begun, device = time.monotonic(), Device("cuda", "NVIDIA H200", "sm_90", UNITS, l2_bytes=62914560)
    took = {
        row.Test: row.KernelTime_ms
        for row in read_rows(root / "experiments/mixed/results.csv")
        if (row.Kernel, row.Type) == ("hopper", "BAC")
    }
    parts, ratios = list[float](), list[float]()
    for test, problem in (each for seed in (20261128, 20261129, 20261130) for each in load("mixed", seed, 200).shapes):
        size, ms = (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q), took.get(test)
        tiles = problem.batch * problem.heads_q * (problem.seq_q / ROWS) ** 2 / 4
        if not ms or ms < 0.25 or problem.head_dim != DIM or not problem.causal or problem.seq_q != problem.seq_kv or tiles > 4e5:
            continue
        contender = choose(Request(("auto",), "backward", problem), device)[0][0]
        kernel = planner.variant(contender.kernels["backward"], problem)
        values = planner.plan(kernel, problem, device).values
        if kernel.name != "hopper":
            continue
        if time.monotonic() - begun > seconds:
            break
        found = simulate(*size, int(values["SPLITS"]), int(values["SECTION"]), bool(int(values["HEADS_INNER"])))
        parts.append(found.missed)
        ratios.append((ms * 1e3 - others(problem.batch, problem.heads_q, problem.seq_q)) / found.cached)
        sys.stdout.write(f"{test}: {ms * 1e3:.0f} us, simulated {found.time:.0f}, {found.missed:.2f} from memory, {ratios[-1]:.3f}\n")
    sys.stdout.write(f"{len(parts)} problems, correlation {statistics.correlation(parts, ratios):.2f}\n")


def main() -> None:
    """Print two lines a problem, or the problems of the record."""
    if sys.argv[1:2] == ["mixed"]:
        return mixed(float(sys.argv[2]) if len(sys.argv) > 2 else 600)
    given = [int(text) for text in sys.argv[1:]]
    for batch, heads, heads_kv, seq in [tuple(given[i : i + 4]) for i in range(0, len(given), 4)] or WORST:
        for inner in (False, True):
            every = [simulate(batch, heads, heads_kv, seq, n, mb, inner) for n in (1, 2, 4) for mb in (8, 16, 32, 64)]
            best = min(every)
            sys.stdout.write(
                f"B{batch} H{heads}/{heads_kv} S{seq} HEADS_INNER {int(inner)}: SPLITS {best.splits} SECTION {best.section}"
                f" {best.time:.0f} us, {best.gigabytes:.1f} GB, {best.missed:.2f} of the tiles\n"
            )


if __name__ == "__main__":
    main()
