"""The words of <fa/seen_tiles.cuh>: the lists of the tiles of queries that see a tile of keys, and walks over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from word_kernel import run

from harness.backends import Backend
from harness.formula import parsed

SEQ_Q, SEQ_KV, HEADS = 300, 400, 2
FIELDS = {"batch": 1, "heads_q": HEADS, "heads_kv": 1, "seq_q": SEQ_Q, "seq_kv": SEQ_KV, "causal_shift": SEQ_KV - SEQ_Q}
MASK = "-30 <= q - k <= 90 * h + 37"


def _classes(causal: bool) -> np.ndarray:
    """What tiles of 64 queries see of 64 keys, (head, tile, part): 0 nothing, 1 some, 2 all that exist and 64 of them."""
    h, q, k = np.ogrid[:HEADS, :320, :448]
    place = q + SEQ_KV - SEQ_Q
    seen = (place - k >= -30) & (place - k <= 90 * h + 37) & (~causal | (k <= place))
    there = (q < SEQ_Q) & (k < SEQ_KV)
    some = (seen & there).reshape(HEADS, 5, 64, 7, 64)
    whole = ((seen & (k < SEQ_KV)) | (q >= SEQ_Q)).reshape(HEADS, 5, 64, 7, 64)
    return some.any((2, 4)).astype(int) + (some.any((2, 4)) & whole.all((2, 4)))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("causal", "turns", "backwards"), [(False, False, False), (True, False, True), (True, True, False)])
def test_lists(causal: bool, turns: bool, backwards: bool, splits: int, backend: Backend, tmp_path: Path) -> None:
    """fa::SeenTiles, fa::ListWalk: each tile of queries of which a pair may be seen once, with what the two parts of 128 keys are seen by,
    split after split. turns: with the tile of keys that comes next, the last one first; first_turn is the last that sees a tile."""
    true = {False: "false", True: "true"}
    body = f"""\
    using Tiles = fa::QueryTiles<64, 64, 0, 1>;
    using Lists = fa::SeenTiles<64, 128, {true[backwards]}, {true[turns]}, 0>;
    fa::Args mine = args;
    mine.workspace[0] = out + 4096;
    if (t < 128) Lists::make(mine);
    __syncthreads();
    if (t < {4 * splits}) {{
        fa::Work work = Tiles::work<128, {true[turns]}, {true[backwards]}>(mine, t, 1000, {splits});
        Lists::narrow(mine, work, {splits});
        auto walk = fa::ListWalk<Lists>::begin(work);
        int* to = reinterpret_cast<int*>(out) + 64 * t;
        to[0] = work.k_first, to[1] = work.split, to[2] = work.count;
        for (int n = 0; n < work.count; ++n, walk.next(work)) {{
            to[3 + 4 * n] = 10 * walk.query_head(work) + walk.queries(work), to[4 + 4 * n] = walk.sees(0), to[5 + 4 * n] = walk.sees(1);
            to[6 + 4 * n] = {turns:d} ? walk.next_turn() : Tiles::number(mine, 0, walk.query_head(work), walk.queries(work)) - walk.number_of(mine, work);
        }}
    }}
    if (t < 10) out[2048 + t] = Lists::first_turn(mine, 0, t / 5, t % 5);"""
    before = f"#undef DETERMINISTIC\n#define DETERMINISTIC {turns:d}\n#define FA_MASK {parsed('mask', MASK).cpp()}\n#include <fa/query_tiles.cuh>"
    got = run(backend, tmp_path, body, causal=causal, fields=FIELDS, before=before, block=128).view(np.int32)
    classes = np.concatenate([_classes(causal), np.zeros((HEADS, 5, 1), int)], 2).reshape(HEADS, 5, 4, 2)
    places, lists = [(h, tile) for h in range(HEADS) for tile in range(5)], dict[int, list[list[int]]]()
    for key, split, count, *rest in sorted(got[: 256 * splits].reshape(-1, 64).tolist(), key=lambda work: work[:2]):
        assert 0 <= split < splits
        lists.setdefault(key // 128, []).extend(rest[4 * n : 4 * n + 4] for n in range(count))
    assert sorted(lists) == [0, 1, 2, 3]
    for k_tile, found in lists.items():
        wanted = [(h, tile) for h, tile in places if classes[h, tile, k_tile].any()]
        wanted = wanted[::-1] if backwards else wanted
        assert [entry[0] for entry in found] == [10 * h + tile for h, tile in wanted]
        for (h, tile), (_, *sees, more) in zip(wanted, found, strict=True):
            assert sees == classes[h, tile, k_tile].tolist(), (k_tile, h, tile)
            before_it = [k for k in range(k_tile) if classes[h, tile, k].any()]
            assert more == (max(before_it, default=-1) if turns else 0)
    if turns:
        firsts = [max(k for k in range(4) if classes[h, tile, k].any()) for h, tile in places if classes[h, tile].any()]
        assert [got[2048 + i] for i, (h, tile) in enumerate(places) if classes[h, tile].any()] == firsts
