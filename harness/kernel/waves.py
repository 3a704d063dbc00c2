"""How long the blocks of a persistent kernel take: what the functions of WAVES compute in header expressions.

Works are dealt out in order, each to the unit (a multiprocessor, or a cluster of them) that is ready first: what a counter in global memory
does. A kernel of queries (fa::KeyTiles) keeps a tile of queries and walks over the tiles of keys that it sees. A kernel of keys
(fa::QueryTiles) keeps a tile of keys and walks over the tiles of queries that see it, of all query heads of its group. Without a mask all
works are alike, and the last wave may be nearly empty. Under the causal mask the longest come first, and the short ones fill the end.

Heads come in sections, so that few are in the L2 cache at a time: the longest works of each section come after the short ones of the
section before, and a last section of few heads leaves units without work. Times are whole nanoseconds, of one tile of the walk and of one
work besides. The mask is that of causal_shift = seq_kv - seq_q.

A tile takes longer where the tiles of queries that blocks of keys read and add to are less shared, or more than is good: key_traffic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

#: Of works of different lengths so many a unit are dealt out one by one, the last ones. Those before keep all units busy.
DEALT = 8
#: Of an element of Q that a walk is at: two bytes of Q and of dO, four of dQ.
LIVE_BYTES = 8
#: The part of the L2 cache that keeps them (fitted, as the next number: experiments/mixed/costs.txt).
KEPT = 0.75
#: Millions of elements beyond those that the cache holds, from which on a tile finds nothing in it.
ALL_MISS = 25.0


def makespan(units: int, groups: Sequence[tuple[int, int]], start: int = 0) -> int:
    """When the last unit is ready. groups: works that are alike, one group after another: how many, and the time of each."""
    ready = [(start, max(1, units))]  # a heap: when, and how many units are
    for count, time in groups:
        if len(ready) == 1:
            (at, units), *_ = ready
            rounds, count = divmod(count, units)
            ready = [(at + rounds * time, units)]
        while count > 0:
            at, some = heapq.heappop(ready)
            taken = min(some, count)
            if taken < some:
                heapq.heappush(ready, (at, some - taken))
            heapq.heappush(ready, (at + time, taken))
            count -= taken
    return max(at for at, _ in ready)


def in_sections(units: int, heads: int, section: int, of_head: Sequence[tuple[int, int]]) -> int:
    """As makespan, of heads in sections. of_head: the works of a head, the longest first: how many are alike, and the time of each."""
    section, works = max(1, min(section, heads)), sum(count for count, _ in of_head)
    widths, left, last = divmod(heads, section), heads, list[int]()
    for width in [widths[1]] * (widths[1] > 0) + [section] * widths[0]:  # from the end
        if sum(last) * works >= DEALT * units:
            break
        last.append(width)
        left -= width
    groups = [(width * count, time) for width in reversed(last) for count, time in of_head]
    busy, behind = left * sum(count * time for count, time in of_head), sum(last) * works
    while len(groups) > 1 and behind - groups[0][0] >= DEALT * units:
        count, time = groups.pop(0)
        busy, behind = busy + count * time, behind - count
    return makespan(units, groups, busy // max(1, units))


def query_waves(names: Mapping[str, int], units: int, rows: int, keys: int, section: int, tile: int, work: int, pack: int = 1) -> int:
    """Of works of `rows` queries of a head, or of each of `pack` heads, over tiles of `keys` keys; `section` query heads at a time."""
    heads = names["batch"] * names["heads_q"] // pack
    if not names["causal"]:
        return makespan(units, [(heads * -(-names["seq_q"] // rows), -(-names["seq_kv"] // keys) * tile + work)])
    return in_sections(units, heads, section // pack, [(1, tiles * tile + work) for tiles in _walks(names, rows, keys)])


def part_waves(names: Mapping[str, int], units: int, rows: int, keys: int, section: int, tile: int, splits: int, split: int) -> int:
    """As query_waves of one head a tile, where the first of more works than units, as many as the last round has, are divided into
    `splits` parts, and of fewer works all. split: nanoseconds more of each part. Where all units have many works none is divided."""
    heads, walks = names["batch"] * names["heads_q"], _walks(names, rows, keys)
    works = heads * -(-names["seq_q"] // rows)
    if splits == 1 or works > DEALT * units:
        return query_waves(names, units, rows, keys, section, tile, 0)
    divided, groups = works if works <= units else works % units, list[tuple[int, int]]()
    width = max(1, min(section, heads)) if names["causal"] else heads
    for first in range(0, heads, width):
        for tiles in walks:
            count = min(width, heads - first)
            some = min(divided, count)
            divided -= some
            groups += [(some * splits, -(-tiles * tile // splits) + split), (count - some, tiles * tile)]
    return makespan(units, [(count, time) for count, time in groups if count])


def _walks(names: Mapping[str, int], rows: int, keys: int) -> list[int]:
    """The tiles of keys that each tile of queries sees, the longest first."""
    seq_q, seq_kv, tiles = names["seq_q"], names["seq_kv"], -(-names["seq_q"] // rows)
    if not names["causal"]:
        return [-(-seq_kv // keys)] * tiles
    ends = [min(seq_kv, min(seq_q, rows * i) + seq_kv - seq_q) for i in range(tiles, 0, -1)]  # keys that its last query sees
    before = names.get("window", 0) or seq_kv  # where its first query's window begins
    firsts = [max(0, rows * (i - 1) + 1 + seq_kv - seq_q - before) // keys for i in range(tiles, 0, -1)]
    return [max(1, -(-end // keys)) - first for end, first in zip(ends, firsts, strict=True)]


def key_waves(names: Mapping[str, int], units: int, keys: int, rows: int, section: int, splits: int, tile: int, work: int) -> int:
    """Of works of `keys` keys of a key head, over tiles of `rows` queries, divided into `splits` works: deterministic, or with the tile
    value HEADS_INNER, in whole heads; `section` key heads at a time."""
    heads, group = names["batch"] * names["heads_kv"], names["heads_q"] // names["heads_kv"]
    section = max(1, min(section, heads)) if names["causal"] else heads
    whole = bool(names["deterministic"] or names.get("HEADS_INNER"))
    shape = (names["seq_q"], names["seq_kv"], bool(names["causal"]), whole, names.get("window", 0))
    return _key_waves(heads, group, *shape, units, keys, rows, section, splits, tile, work)


@lru_cache(maxsize=256)  # of the values that a row of choice tries, many mean the same section
def _key_waves(
    heads: int,
    group: int,
    seq_q: int,
    seq_kv: int,
    causal: bool,
    whole: bool,
    window: int,
    units: int,
    keys: int,
    rows: int,
    section: int,
    splits: int,
    tile: int,
    work: int,
) -> int:
    tiles, k_tiles = -(-seq_q // rows), -(-seq_kv // keys)
    firsts = [max(0, keys * i + seq_q - seq_kv) // rows for i in range(k_tiles)] if causal else [0]
    of_head: list[tuple[int, int]] = []
    for i, first in enumerate(firsts):
        end = keys * (i + 1) + seq_q - seq_kv + window - 1  # one past the last query whose window has some of its keys
        seen = max(0, (min(tiles, max(0, -(-end // rows))) if window else tiles) - first)
        unit = seen if whole else 1
        each, longer = divmod(group * seen // max(1, unit), splits)
        some = [(longer, (each + 1) * unit * tile + work), (splits - longer, each * unit * tile + work)]
        of_head += [(count, time) for count, time in some if count]
    if not causal:
        return makespan(units, [(heads * k_tiles * count, time) for count, time in of_head])
    return in_sections(units, heads, section, of_head)


def tail_waves(names: Mapping[str, int], units: int, keys: int, rows: int, splits: int, tile: int, work: int, split: int) -> int:
    """As key_waves without a mask, of works that are divided in the last round alone. split: nanoseconds more of each part."""
    works = names["batch"] * names["heads_kv"] * -(-names["seq_kv"] // keys)
    tiles = names["heads_q"] // names["heads_kv"] * -(-names["seq_q"] // rows)
    if splits == 1:
        return makespan(units, [(works, tiles * tile + work)])
    (each, longer), divided = divmod(tiles, splits), works % units
    parts = [(longer * divided, (each + 1) * tile + work + split), ((splits - longer) * divided, each * tile + work + split)]
    return makespan(units, [(works - divided, tiles * tile + work), *((count, time) for count, time in parts if count)])


def key_traffic(names: Mapping[str, int], units: int, keys: int, section: int, splits: int, crowd: int, alone: int, spread: int) -> int:
    """What a tile of the walk of key_waves takes longer, by which tiles of queries the works that run at the same time use.

    crowd: if all works are of one key head: they add to the same tiles of dQ. alone: under the mask, if no two works are of one key head
    and split: none finds in the L2 cache what another has read. spread: of each million elements of Q in the groups of the key heads that
    run at the same time, beyond what the L2 cache keeps: works of different lengths come to the group's next head at different
    times, but for HEADS_INNER. A split walks over a part of them. Elements beyond ALL_MISS million cost nothing more.
    """
    heads, group = names["batch"] * names["heads_kv"], names["heads_q"] // names["heads_kv"]
    k_tiles = -(-names["seq_kv"] // keys)
    in_section = max(1, min(section, units)) if names["causal"] else 1
    running = min(heads, max(in_section, units / (k_tiles * splits)))
    extra = crowd / running
    if names["causal"]:
        extra += alone * (min(units, running * splits) / units) ** 2
        if group > 1 and not names.get("HEADS_INNER"):
            live = running * group * names["seq_q"] * names["HEAD_DIM"] / (1e6 * splits)
            extra += spread * min(ALL_MISS, max(0.0, live - KEPT * names["l2_bytes"] / (1e6 * LIVE_BYTES)))
    return round(extra)


#: Of header expressions. Each reads the problem, too.
WAVES: dict[str, Callable[..., int]] = {
    "query_waves": query_waves,
    "part_waves": part_waves,
    "key_waves": key_waves,
    "tail_waves": tail_waves,
    "key_traffic": key_traffic,
}
