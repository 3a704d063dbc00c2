"""How long waves of works take: counted by hand, and the same as one work after another; the functions that headers name."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping

import pytest

from harness.kernel import expression, waves


def names(batch: int = 1, heads_q: int = 1, heads_kv: int = 1, seq_q: int = 256, seq_kv: int = 256, **more: int) -> dict[str, int]:
    given = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q, "seq_kv": seq_kv}
    return {**given, "causal": 0, "deterministic": 0, **more}


def one_by_one(units: int, groups: list[tuple[int, int]]) -> int:
    """When the last unit is ready, each work given to the unit that is ready first."""
    ready = [0] * units
    for count, time in groups:
        for _ in range(count):
            heapq.heappush(ready, heapq.heappop(ready) + time)
    return max(ready)


@pytest.mark.parametrize(
    ("units", "groups", "end"),
    [
        (4, [(1, 10)], 10),
        (4, [(4, 10)], 10),
        (4, [(5, 10)], 20),  # a last wave of one work
        (132, [(132 * 7 + 1, 3)], 24),
        (2, [(1, 10), (1, 6), (2, 4)], 14),  # 10 | 6 4, then 4 behind both, which are ready at 10
        (3, [(2, 7), (2, 5), (1, 1)], 10),  # 7 | 7 | 5 5: the last behind the first of them; 1 behind a 7
        (0, [(2, 5)], 10),  # less than one unit is one
        (4, [], 0),
    ],
)
def test_waves_counted_by_hand(units: int, groups: list[tuple[int, int]], end: int) -> None:
    assert waves.makespan(units, groups) == end


def test_works_dealt_out_in_groups_end_as_those_dealt_out_one_by_one() -> None:
    """In sections of heads: exactly, where works are few or heads in one section; else the first keep all units busy: within a work."""
    draw = random.Random(3)
    for _ in range(300):
        units, length, heads = draw.choice([1, 7, 66, 132]), draw.randint(1, 12), draw.randint(1, 60)
        section = draw.choice([1, 3, 16, 60])
        of_head = [(draw.randint(1, 2), 100 * (length - i) + draw.randint(0, 20)) for i in range(length)]
        widths = [section] * (heads // section) + [heads % section]
        groups = [(width * count, time) for width in widths for count, time in of_head]
        exact, found = one_by_one(units, groups), waves.in_sections(units, heads, section, of_head)
        if sum(count for count, _ in groups) < waves.DEALT * units:
            assert found == exact == waves.makespan(units, groups), (units, groups)
        assert abs(found - exact) <= of_head[0][1], (units, heads, section, of_head)


def test_works_of_the_last_round_in_parts() -> None:
    """Of five works of four tiles on four units the first is in two parts of 10 * 2 + 5; of three all are; of 33 rounds none is."""
    shape = {"seq_q": 500, "seq_kv": 200}
    assert waves.part_waves(names(heads_q=1, **shape), 4, 100, 50, 9, 10, 2, 5) == 25 + 40
    assert waves.part_waves(names(heads_q=1, **shape | {"seq_q": 300}), 4, 100, 50, 9, 10, 2, 5) == 2 * 25
    assert waves.part_waves(names(heads_q=33, **shape), 5, 100, 50, 9, 10, 2, 5) == 33 * 40
    # causal: works of 50, 40, 30, 20 and 10; the first in two parts of 25 + 5
    assert waves.part_waves(names(seq_q=500, seq_kv=500, causal=1), 4, 100, 100, 9, 10, 1, 5) == 50
    assert waves.part_waves(names(seq_q=500, seq_kv=500, causal=1), 4, 100, 100, 9, 10, 2, 5) == 30 + 20


def test_a_last_section_of_few_heads_is_long() -> None:
    """Four units, heads of works of 30, 20 and 10: five heads in one section, or four and then one, whose longest work starts last."""
    of_head = [(1, 30), (1, 20), (1, 10)]
    assert waves.in_sections(4, 5, 5, of_head) == 80  # 30 30 30 30 | 30 20 20 20 | 20 20 10 10 ...
    assert waves.in_sections(4, 5, 4, of_head) == 60 + 30


def test_tiles_of_queries() -> None:
    """Three tiles of 128 queries, each over tiles of 64 keys, by two units; a tile takes 10, a work 3 besides."""
    assert waves.query_waves(names(seq_q=300, seq_kv=130), 2, 128, 64, 9, 10, 3) == 2 * (3 * 10 + 3)
    # causal, bottom-right: the tiles end at queries 300, 256 and 128, which see 130, 86 and 0 keys: 3, 2 and, masked whole, 1 tile
    assert waves.query_waves(names(seq_q=300, seq_kv=130, causal=1), 2, 128, 64, 9, 10, 3) == (2 * 10 + 3) + (1 * 10 + 3)
    assert waves.query_waves(names(heads_q=4, seq_q=256, causal=1), 4, 128, 128, 9, 10, 0) == 20 + 10


def test_a_window() -> None:
    """Works over what a window leaves: tiles of 64 queries see 2 of 3 tiles of keys but the first; the last keys have fewer queries."""
    given = names(seq_q=192, seq_kv=192, causal=1, window=60)
    assert waves.query_waves(given, 1, 64, 64, 9, 10, 3) == 2 * (2 * 10 + 3) + 10 + 3
    assert waves.key_waves(given, 1, 64, 64, 9, 1, 10, 5) == 2 * (2 * 10 + 5) + 10 + 5
    # 40 keys before the first query: the first 32 have none, the next, to 63, those from 0 on
    assert waves.key_waves(names(seq_q=32, seq_kv=72, causal=1, window=9), 1, 32, 32, 9, 1, 10, 5) == 5 + 2 * (10 + 5)


def test_heads_that_share_a_tile() -> None:
    """Two heads of 100 queries, 64 of each in a tile: tiles that end at 100 and at 64, over two tiles of keys and over one."""
    assert waves.query_waves(names(heads_q=2, seq_q=100, seq_kv=100, causal=1), 1, 64, 64, 9, 10, 3, 2) == (2 * 10 + 3) + (1 * 10 + 3)
    assert waves.query_waves(names(heads_q=4, seq_q=100, seq_kv=100), 1, 64, 64, 9, 10, 3, 2) == 4 * (2 * 10 + 3)


def test_a_last_round() -> None:
    """Five works of four tiles on four units: two rounds; or the fifth in four parts of a tile, or in three, the longest of two tiles."""
    given = names(heads_q=5, heads_kv=5, seq_q=256, seq_kv=128)
    assert waves.tail_waves(given, 4, 128, 64, 1, 10, 5, 7) == 2 * (4 * 10 + 5) == waves.key_waves(given, 4, 128, 64, 9, 1, 10, 5)
    assert waves.tail_waves(given, 4, 128, 64, 4, 10, 5, 7) == (4 * 10 + 5) + (10 + 5 + 7)
    assert waves.tail_waves(given, 4, 128, 64, 3, 10, 5, 7) == (4 * 10 + 5) + (2 * 10 + 5 + 7)
    assert waves.tail_waves(given, 9, 128, 64, 2, 10, 5, 0) == waves.key_waves(given, 9, 128, 64, 9, 2, 10, 5)  # all are divided


def test_tiles_of_keys() -> None:
    """Two tiles of 128 keys of a key head, each over the tiles of 64 queries of two query heads."""
    two = names(heads_q=2, seq_q=256, seq_kv=256)
    assert waves.key_waves(two, 2, 128, 64, 9, 1, 10, 5) == 2 * 4 * 10 + 5
    assert waves.key_waves(two, 4, 128, 64, 9, 2, 10, 5) == 4 * 10 + 5
    assert waves.key_waves(two, 6, 128, 64, 9, 3, 10, 5) == 3 * 10 + 5  # of eight tiles 3, 3 and 2
    # causal: the first 128 keys are seen by 4 tiles of a head, the others by 2
    assert waves.key_waves(two | {"causal": 1}, 2, 128, 64, 9, 1, 10, 5) == 8 * 10 + 5
    assert waves.key_waves(two | {"causal": 1}, 1, 128, 64, 9, 1, 10, 5) == 12 * 10 + 10
    # deterministic: a split has whole heads
    whole = names(heads_q=3, seq_q=256, seq_kv=128, deterministic=1)
    assert (
        waves.key_waves(whole, 9, 128, 64, 9, 2, 10, 5)
        == 2 * 4 * 10 + 5
        > waves.key_waves(whole | {"deterministic": 0}, 9, 128, 64, 9, 2, 10, 5)
    )
    inner = whole | {"deterministic": 0, "HEADS_INNER": 1}
    assert waves.key_waves(inner, 9, 128, 64, 9, 2, 10, 5) == 2 * 4 * 10 + 5, "and so has one that is at a tile of all of them"
    assert waves.key_waves(whole, 9, 128, 64, 9, 3, 10, 5) == waves.key_waves(whole, 9, 128, 64, 9, 8, 10, 5) == 4 * 10 + 5
    # of 100 queries none sees keys from 200 on, and the others are one tile's
    assert waves.key_waves(names(seq_q=100, seq_kv=100, causal=1), 9, 64, 64, 9, 1, 10, 5) == 2 * 10 + 5


def test_headers_name_them() -> None:
    """As functions that read the problem; none of its own names need be given."""
    given: Mapping[str, int] = names(heads_q=5) | {"sms": 4}
    assert expression.evaluate("query_waves(sms, 128, 64, 5, 10, 3) + 100", given) == 2 * 2 * 0 + 3 * 43 + 100
    assert expression.evaluate("key_waves(sms, 128, 64, 5, 1, 10, 3)", given) == 5 * 4 * 10 + 3
    assert expression.names_of("query_waves(sms, 128, 64, 5, 10, 3)") == {"sms"}
    for wrong in ("query_waves(sms, 128)", "key_waves(sms, 0, 64, 5, 1, 10, 3)"):
        with pytest.raises(expression.ExpressionError, match="does not take these values|divides by zero"):
            expression.evaluate(wrong, given)


def test_what_a_tile_takes_longer() -> None:
    """Four units, key heads of two tiles of keys. Few heads at a time are crowded; under the mask many share less, and groups spread."""
    dense = names(heads_q=8, heads_kv=8, HEAD_DIM=64)
    assert waves.key_traffic(dense, 4, 128, 1, 1, 100, 0, 0) == 50  # without a mask two heads have the four works
    masked = names(heads_q=8, heads_kv=8, HEAD_DIM=64, causal=1)
    assert waves.key_traffic(masked, 4, 128, 8, 1, 100, 0, 0) == 25  # a section of all, of which four run
    assert [waves.key_traffic(masked, 4, 128, section, 1, 0, 160, 0) for section in (1, 3, 8)] == [40, 90, 160]
    assert waves.key_traffic(masked, 4, 128, 1, 2, 0, 160, 0) == 40, "one head, but two ranges of its queries"
    grouped = names(batch=2, heads_q=16, heads_kv=4, seq_q=1000, HEAD_DIM=125, causal=1, l2_bytes=0)
    assert waves.key_traffic(grouped, 4, 128, 8, 1, 0, 0, 10) == 20  # four heads, groups of four: two million elements
    assert waves.key_traffic(grouped, 4, 128, 8, 2, 0, 0, 10) == 10
    assert waves.key_traffic(grouped | {"HEADS_INNER": 1}, 4, 128, 8, 1, 0, 0, 10) == 0
    grouped["l2_bytes"] = 16_000_000  # of which three quarters keep a million and a half
    assert [waves.key_traffic(grouped, 4, 128, 8, splits, 0, 0, 10) for splits in (1, 2)] == [5, 0]
    grouped["seq_q"] = 100_000
    assert waves.key_traffic(grouped, 4, 128, 8, 1, 0, 0, 10) == 250, "of 200 million elements those beyond 25 cost nothing more"
    assert waves.key_traffic(names(heads_q=16, heads_kv=16, seq_q=1000, HEAD_DIM=125, causal=1), 4, 128, 8, 1, 0, 0, 10) == 0
