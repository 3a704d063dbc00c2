"""Bytes of Q, dO and dQ that hopper's backward pass takes from memory under the causal mask, simulated: python traffic.py [B H HKV S …]

No GPU is needed. Multiprocessors take works in the order of fa::place_in_sections, and each goes from tile to tile of queries as its walk
does: head after head, or through all heads of the group at a tile (HEADS_INNER). The L2 cache keeps the tiles used last. A tile that is there
takes the header's shared_ns, one from memory MISS times as long. Printed are, of each order, the splits and sections with the shortest time,
GB from memory (Q, dO and dQ read, dQ written) and the part of the tiles that were not in the cache. Times are of the launch of gradients
alone, at the clock of short runs: they say which order is ahead, not what a GPU takes.
"""

import heapq
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

UNITS, ROWS, KEYS, DIM = 132, 64, 128, 128
#: Bytes of an element of Q: two of Q and of dO, four of dQ; what of 60 MB of L2 keeps them (harness/kernel/waves.py: KEPT).
ELEMENT, KEPT = 8, 37_500_000
#: Microseconds of a tile, of a work, and more of one of several splits; how many times as long a tile from memory takes.
TILE, WORK, SPLIT, MISS = 2.09, 4.5, 13.8, 1.13
WORST = ((1, 64, 4, 4049), (7, 36, 4, 2048), (1, 56, 8, 4183), (8, 32, 4, 1758), (2, 128, 8, 2048), (2, 128, 8, 1024), (1, 24, 2, 8192))


class Found(NamedTuple):
    """What a form takes: microseconds, GB and the part of tiles from memory."""

    time: float
    gigabytes: float
    missed: float
    splits: int
    section: int


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
        takes = TILE
        if tile in cached:
            cached.move_to_end(tile)
        else:
            missed, takes = missed + 1, TILE * MISS
            cached[tile] = None
            if len(cached) > room:
                cached.popitem(last=False)
        heapq.heappush(ready, (now + takes, unit, walk))
    return Found(end, missed * ROWS * DIM * (ELEMENT + 4) / 1e9, missed / tiles, splits, megabytes)


def main() -> None:
    """Print two lines a problem."""
    given = [int(text) for text in sys.argv[1:]]
    for batch, heads, heads_kv, seq in [tuple(given[i : i + 4]) for i in range(0, len(given), 4)] or WORST:
        for inner in (False, True):
            every = [simulate(batch, heads, heads_kv, seq, n, mb, inner) for n in (1, 2, 4) for mb in (8, 64)]
            best = min(every)
            sys.stdout.write(
                f"B{batch} H{heads}/{heads_kv} S{seq} HEADS_INNER {int(inner)}: SPLITS {best.splits} SECTION {best.section}"
                f" {best.time:.0f} us, {best.gigabytes:.1f} GB, {best.missed:.2f} of the tiles\n"
            )


if __name__ == "__main__":
    main()
