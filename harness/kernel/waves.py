"""How long the blocks of a persistent kernel take: what the functions query_waves and key_waves of header expressions compute.

Works are dealt out in order, each to the unit (a multiprocessor, or a cluster of them) that is ready first: what a counter in global memory
does. A kernel of queries (fa::KeyTiles) keeps a tile of queries and walks over the tiles of keys that it sees. A kernel of keys
(fa::QueryTiles) keeps a tile of keys and walks over the tiles of queries that see it, of all query heads of its group. Without a mask all
works are alike, and the last wave may be nearly empty. Under the causal mask the longest come first, and the short ones fill the end.

Times are whole nanoseconds, of one tile of the walk and of one work besides. The mask is that of causal_shift = seq_kv - seq_q, and the
sections of heads in which the kernels walk are left out: both move the end of the last wave by less than a work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

#: Of works of different lengths so many a unit are dealt out one by one, the last ones. Those before keep all units busy.
DEALT = 8


def makespan(units: int, groups: Sequence[tuple[int, int]]) -> int:
    """When the last unit is ready. groups: works that are alike, one group after another: how many, and the time of each."""
    units, start = max(1, units), 0
    if len(groups) > 1:
        behind = list(accumulate(count for count, _ in reversed(groups)))[::-1]  # works of a group and of those after it
        first = max((i for i, works in enumerate(behind) if works >= DEALT * units), default=0)
        start, groups = sum(count * time for count, time in groups[:first]) // units, groups[first:]
    ready = [(start, units)]  # a heap: when, and how many units are
    for count, time in groups:
        if len(ready) == 1:
            at, _ = ready[0]
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


def query_waves(names: Mapping[str, int], units: int, rows: int, keys: int, tile: int, work: int) -> int:
    """Of works of `rows` queries of a head, over tiles of `keys` keys."""
    heads, seq_q, seq_kv = names["batch"] * names["heads_q"], names["seq_q"], names["seq_kv"]
    tiles = -(-seq_q // rows)
    if not names["causal"]:
        return makespan(units, [(heads * tiles, -(-seq_kv // keys) * tile + work)])
    ends = [min(seq_kv, min(seq_q, rows * i) + seq_kv - seq_q) for i in range(tiles, 0, -1)]  # keys that a tile's last query sees
    return makespan(units, [(heads, max(1, -(-end // keys)) * tile + work) for end in ends])


def key_waves(names: Mapping[str, int], units: int, keys: int, rows: int, splits: int, tile: int, work: int) -> int:
    """Of works of `keys` keys of a key head, over tiles of `rows` queries, divided into `splits` works: deterministic in whole heads."""
    heads, seq_q, seq_kv = names["batch"] * names["heads_kv"], names["seq_q"], names["seq_kv"]
    group, tiles, k_tiles = names["heads_q"] // names["heads_kv"], -(-seq_q // rows), -(-seq_kv // keys)
    firsts = [max(0, keys * i + seq_q - seq_kv) // rows for i in range(k_tiles)] if names["causal"] else [0]
    groups: list[tuple[int, int]] = []
    many = heads * (1 if names["causal"] else k_tiles)
    for first in firsts:
        seen = max(0, tiles - first)
        unit = seen if names["deterministic"] else 1
        each, longer = divmod(group * seen // max(1, unit), splits)
        groups += [(many * longer, (each + 1) * unit * tile + work)] * (longer > 0) + [
            (many * (splits - longer), each * unit * tile + work)
        ]
    return makespan(units, groups)


#: Of header expressions. Each reads the problem, too.
WAVES: dict[str, Callable[..., int]] = {"query_waves": query_waves, "key_waves": key_waves}
