"""Bytes of Q, dO and dQ that backward passes on Hopper take from memory under the causal mask, simulated: hopper at head dim 128, hopper_cluster at 256.

    python experiments/hopper_backward/traffic.py [KERNEL] [B H HKV S …]      each order of a problem and number of splits, with the best section
    python experiments/hopper_backward/traffic.py mixed [SECONDS]             the problems of experiments/mixed: what was measured over the simulated time
    python experiments/hopper_backward/traffic.py choices KERNEL [SECONDS]    how near to the best of the splits and sections what the header chooses is

No GPU is needed. Multiprocessors, or clusters, take works in the order of fa::place_in_sections, and each goes from tile to tile of queries as its
walk does: head after head, or through all heads of the group at a tile (HEADS_INNER, of hopper alone). The L2 cache keeps the tiles used last. `slower` is how
much longer a tile takes where so many of the tiles come from memory: read off 121 problems of experiments/mixed of head dim 128 (mixed prints them), whose
measured time over the one without a miss has a correlation of 0.87 with that part. GB: Q, dO and dQ read, and dQ written.
"""

import heapq
import itertools
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from harness.kernel import Device, find, planner  # noqa: E402
from harness.problem import Problem  # noqa: E402

ROWS, KEYS = 64, 128
#: Bytes of an element of Q: two of Q and of dO, four of dQ; what of 63 MB of L2 keeps them, 0.6.
ELEMENT, KEPT = 8, 37_500_000
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, l2_bytes=62914560)


class Costs(NamedTuple):
    """Of a kernel, as its header has them: blocks or clusters, head dim; microseconds of a tile, of a work, and more of one of several splits; of
    the other launches, and of each million elements of Q in them; whether a walk begins at the last query."""

    units: int
    dim: int
    tile: float
    work: float
    split: float
    launches: float
    elements: float
    backwards: bool


KERNELS = {
    "hopper": Costs(132, 128, 2.09, 4.5, 13.8, 1.5, 3.37, True),
    "hopper_cluster": Costs(66, 256, 2.62, 7.64, 9.11, 2.59, 3.78, False),
}
SPLITS, SECTIONS = (1, 2, 3, 4, 6, 8), (8, 16, 32, 64, 1024)
WORST = {
    "hopper": (
        (1, 64, 4, 4049),
        (7, 36, 4, 2048),
        (1, 56, 8, 4183),
        (8, 32, 4, 1758),
        (2, 128, 8, 2048),
        (2, 128, 8, 1024),
        (1, 24, 2, 8192),
    ),
    "hopper_cluster": ((1, 32, 2, 2048), (1, 32, 2, 4096), (1, 32, 2, 8192)),
}
#: Key heads and the heads of each: of public models, and between them.
GROUPS = ((1, 4), (1, 8), (2, 8), (2, 12), (2, 16), (4, 2), (4, 3), (4, 8), (8, 2), (8, 4), (8, 5), (8, 8))


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
    costs: Costs, batch: int, heads: int, heads_kv: int, seq: int, splits: int, megabytes: int, inner: bool
) -> Iterator[list[tuple[int, int, int]]]:
    """The tiles of queries of each work, in the order of their numbers."""
    group, q_tiles, k_tiles = heads // heads_kv, -(-seq // ROWS), -(-seq // KEYS)
    rows = batch * heads_kv * splits
    section = max(1, min(rows // splits, (megabytes << 20) // (ELEMENT * costs.dim * seq * min(splits, group)))) * splits
    for begin in range(0, rows, section):
        for k_tile in range(k_tiles):
            first = KEYS * k_tile // ROWS
            order = range(q_tiles - 1, first - 1, -1) if costs.backwards else range(first, q_tiles)
            tiles = len(order)
            for row in range(begin, min(rows, begin + section)):
                kv_head, split = divmod(row, splits)
                if inner:
                    some = range(group * split // splits, group * (split + 1) // splits)
                    yield [(kv_head, head, tile) for tile in order for head in some]
                else:
                    every = range(tiles * group * split // splits, tiles * group * (split + 1) // splits)
                    yield [(kv_head, n // tiles, order[n % tiles]) for n in every]


def simulate(costs: Costs, batch: int, heads: int, heads_kv: int, seq: int, splits: int, megabytes: int, inner: bool) -> Found:
    """The launch of gradients."""
    works = walks(costs, batch, heads, heads_kv, seq, splits, megabytes, inner)
    cached: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    room = KEPT // (ROWS * costs.dim * ELEMENT)
    ready: list[tuple[float, int, Iterator[tuple[int, int, int]]]] = [(0.0, unit, iter(())) for unit in range(costs.units)]
    missed = tiles = 0
    end = 0.0
    while ready:
        now, unit, walk = heapq.heappop(ready)
        if (tile := next(walk, None)) is None:
            if (work := next(works, None)) is None:
                end = max(end, now)
            else:
                heapq.heappush(ready, (now + costs.work + costs.split * (splits > 1), unit, iter(work)))
            continue
        tiles += 1
        if tile in cached:
            cached.move_to_end(tile)
        else:
            missed += 1
            cached[tile] = None
            if len(cached) > room:
                cached.popitem(last=False)
        heapq.heappush(ready, (now + costs.tile, unit, walk))
    part = missed / tiles
    whole = end * slower(part) + others(costs, batch, heads, seq)
    return Found(whole, missed * ROWS * costs.dim * (ELEMENT + 4) / 1e9, part, splits, megabytes, end)


def others(costs: Costs, batch: int, heads: int, seq: int) -> float:
    """Microseconds of the launches before and behind that of gradients."""
    return costs.launches + costs.elements * batch * heads * seq * costs.dim / 1e6


def mixed(seconds: float) -> None:
    """A line a problem of the record: measured, simulated, and the measured time of gradients over that without a miss."""
    from harness.check.choose import choose
    from harness.check.request import Request
    from harness.row import read_rows
    from harness.verbs.sweep import load

    begun = time.monotonic()
    took = {
        (row.Test, row.Kernel.rpartition("+")[2]): row.KernelTime_ms
        for row in read_rows(ROOT / "experiments/mixed/results.csv")
        if row.Type == "BAC"
    }
    parts, ratios = list[float](), list[float]()
    for test, problem in (each for seed in (20261128, 20261129, 20261130) for each in load("mixed", seed, 200).shapes):
        size = problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q
        name = next((name for name, costs in KERNELS.items() if costs.dim == problem.head_dim), "")
        ms, tiles = took.get((test, name)), problem.batch * problem.heads_q * (problem.seq_q / ROWS) ** 2 / 4
        if not ms or ms < 0.25 or not problem.causal or problem.seq_q != problem.seq_kv or tiles > 4e5:
            continue
        contender = choose(Request(("auto",), "backward", problem), H200)[0][0]
        kernel = planner.variant(contender.kernels["backward"], problem)
        if kernel.name != name:
            continue
        if time.monotonic() - begun > seconds:
            break
        values, costs = planner.plan(kernel, problem, H200).values, KERNELS[name]
        found = simulate(costs, *size, int(values["SPLITS"]), int(values["SECTION"]), values.get("HEADS_INNER") == "1")
        parts.append(found.missed)
        ratios.append((ms * 1e3 - others(costs, problem.batch, problem.heads_q, problem.seq_q)) / found.cached)
        sys.stdout.write(f"{test}: {ms * 1e3:.0f} us, simulated {found.time:.0f}, {found.missed:.2f} from memory, {ratios[-1]:.3f}\n")
    sys.stdout.write(f"{len(parts)} problems, correlation {statistics.correlation(parts, ratios):.2f}\n")


def choices(name: str, seconds: float) -> None:
    """A line a problem with grouped heads: the time of what the header chooses over that of the best form, both simulated."""
    costs, begun, ratios = KERNELS[name], time.monotonic(), list[float]()
    for (heads_kv, group), seq, tokens in itertools.product(GROUPS, (4096, 1024, 2048, 1500, 3000, 700, 6000, 8192), (8192, 24576)):
        size = max(1, tokens // seq), heads_kv * group, heads_kv, seq
        if size[0] * size[1] * (seq / ROWS) ** 2 > 3e5:
            continue
        problem = Problem.of(size[0], size[1], seq, costs.dim, heads_kv, dtype="bfloat16", causal=True)
        values = planner.plan(find(name, "backward"), problem, H200).values
        chosen = int(values["SPLITS"]), int(values["SECTION"])
        every = {
            form: simulate(costs, *size, *form, values.get("HEADS_INNER") == "1") for form in {chosen, *itertools.product(SPLITS, SECTIONS)}
        }
        best = min(every.values())
        ratios.append(every[chosen].time / best.time)
        sys.stdout.write(
            f"B{size[0]} H{size[1]}/{heads_kv} S{seq}: SPLITS {chosen[0]} SECTION {chosen[1]} {every[chosen].time:.0f} us, {every[chosen].missed:.2f} from"
            f" memory; best SPLITS {best.splits} SECTION {best.section} {best.time:.0f} us, {best.missed:.2f}; {ratios[-1]:.3f}\n"
        )
        if time.monotonic() - begun > seconds:
            break
    sys.stdout.write(
        f"{len(ratios)} problems: {statistics.geometric_mean(ratios):.3f} of the best in the mean, at most {max(ratios):.3f}\n"
    )


def main() -> None:
    """Print a line an order and number of splits of each problem, or one of the other lists."""
    words = sys.argv[1:]
    if words[:1] == ["mixed"]:
        return mixed(float(words[1]) if len(words) > 1 else 600)
    if words[:1] == ["choices"]:
        return choices(words[1], float(words[2]) if len(words) > 2 else 600)
    name = words.pop(0) if words and words[0] in KERNELS else "hopper"
    given = [int(text) for text in words]
    some = [(given[i], given[i + 1], given[i + 2], given[i + 3]) for i in range(0, len(given), 4)] or WORST[name]
    costs = KERNELS[name]
    for size, inner, splits in itertools.product(some, (False, True) if name == "hopper" else (False,), SPLITS):
        best = min(simulate(costs, *size, splits, section, inner) for section in SECTIONS)
        sys.stdout.write(
            f"B{size[0]} H{size[1]}/{size[2]} S{size[3]} HEADS_INNER {int(inner)}: SPLITS {splits} SECTION {best.section} {best.time:.0f} us,"
            f" {5 * size[0] * size[1] * size[3] ** 2 * costs.dim / best.time / 1e6:.0f} TFLOP/s, {best.gigabytes:.1f} GB,"
            f" {best.missed:.2f} of the tiles\n"
        )


if __name__ == "__main__":
    main()
