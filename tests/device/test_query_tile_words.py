"""The words of <fa/query_tiles.cuh> against numpy on every backend found: what surrounds the products of a backward pass on Hopper.

Products take small integers, whose sums are exact in any order; all comparisons are of bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hopper_kernel import HEADS, ROWS, WIDTH, with_fields
from hopper_kernel import bound as hopper_kernel
from test_hopper_words import box_of, entry, image_of
from word_kernel import TYPES, UNWRITTEN, f32, integers, run

from harness.backends import Backend

BEFORE = "#include <fa/query_tiles.cuh>\n"
#: 7 heads of 3 tiles of 64 queries and of 4 tiles of 128 keys; two query heads share a key head.
FIELDS = {"batch": 7, "heads_q": 2, "heads_kv": 1, "seq_q": 150, "seq_kv": 400, "causal_shift": 30}


@pytest.mark.parametrize(("causal", "turns"), [(False, False), (False, True), (True, False), (True, True)])
def test_works(causal: bool, turns: bool, backend: Backend, tmp_path: Path) -> None:
    """fa::Work: every tile of keys of every head once, and the tiles of queries that see it. turns: of blocks that take turns, the last
    keys first."""
    body = f"""\
    const fa::Work work = fa::QueryTiles<64, 64, 0, 1>::work<128, {str(turns).lower()}>(args, t, 1);
    const int all[6] = {{work.k_first, work.kv_head, work.batch, work.first, work.end, work.count}};
    for (int i = 0; i < 6; ++i) out[6 * t + i] = all[i];"""
    before = f"#undef DETERMINISTIC\n#define DETERMINISTIC {turns:d}\n{BEFORE}"
    got = run(backend, tmp_path, body, causal=causal, fields=FIELDS, before=before, block=28)[: 28 * 6].reshape(28, 6)
    first = {key: min(3, max(0, key - 30) // 64) if causal else 0 for key in range(0, 400, 128)}
    sections = [range(7)] if causal or turns else [range(head, head + 1) for head in range(7)]
    places = [(key, head) for heads in sections for key in sorted(first, reverse=turns) for head in heads]
    assert got.tolist() == [[key, 0, head, first[key], 3, 2 * (3 - first[key])] for key, head in places]


@pytest.mark.parametrize(("causal", "turns", "backwards"), [(False, False, False), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("splits", [2, 3, 5, 7])
def test_splits(splits: int, causal: bool, turns: bool, backwards: bool, backend: Backend, tmp_path: Path) -> None:
    """The splits of a tile of keys walk over each of its tiles of queries once, those of all heads of the group, one split after the other;
    `edge` is the tile at which a walk begins or, backwards, ends. Blocks that take turns
    have whole heads. A work's number leads to it and back, also where 1 MB are 6 heads of the 7."""
    true = {False: "false", True: "true"}
    body = f"""\
    using Tiles = fa::QueryTiles<64, 64, 0, 1>;
    const fa::Work work = Tiles::work<128, {true[turns]}, {true[backwards]}>(args, t, 1, {splits});
    auto walk = fa::Walk<{true[backwards]}>::begin(work);
    auto also = Tiles::walk_numbers<{true[backwards]}>(args, work);
    int* to = reinterpret_cast<int*>(out) + 16 * t;
    int back = -1;
    const int zeroth = Tiles::first_number<128, {true[turns]}>(args, work.batch, work.kv_head, work.k_first / 128, 1, {splits});
    for (int split = 0; split < {splits}; ++split)
        if (zeroth + split * Tiles::numbers_apart<128>(args) == t) back = split;
    to[0] = work.k_first, to[1] = work.batch, to[2] = back, to[3] = work.edge, to[4] = work.count;
    for (int n = 0; n < work.count; ++n, walk.next(work), also.next(work)) {{
        to[5 + n] = 10 * walk.head + walk.queries(work);
        if (also.number != Tiles::number(args, work.batch, walk.head, walk.queries(work))) to[5 + n] = -1;
    }}"""
    before, count = f"#undef DETERMINISTIC\n#define DETERMINISTIC {turns:d}\n{BEFORE}", 28 * splits
    got = run(backend, tmp_path, body, causal=causal, fields=FIELDS, before=before, block=count)[: 16 * count].reshape(count, 16)
    walked: dict[tuple[int, int], dict[int, list[int]]] = {}
    for key, batch, split, edge, length, *tiles in got.tolist():
        walked.setdefault((key, batch), {})[split] = tiles[:length]
        assert not length or edge == tiles[length - 1 if backwards else 0] % 10
    assert len(walked) == 28
    for (key, _), of in walked.items():
        first = min(3, max(0, key - 30) // 64) if causal else 0
        order = range(2, first - 1, -1) if backwards else range(first, 3)
        assert [tile for split in range(splits) for tile in of[split]] == [10 * head + tile for head in (0, 1) for tile in order]
        lengths = [len(of[split]) for split in range(splits)]
        assert all(length % len(order) == 0 for length in lengths if order) if turns else max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("whole", [0, 25])
def test_the_last_round(whole: int, backend: Backend, tmp_path: Path) -> None:
    """Of 28 tiles of keys those before `whole` are one work each. The others are three: the first range of each, then the second."""
    body = f"""\
    using Tiles = fa::QueryTiles<64, 64, 0, 1>;
    const fa::Work work = Tiles::work<128>(args, t, 1, 3, {whole});
    int* to = reinterpret_cast<int*>(out) + 16 * t;
    to[0] = work.k_first, to[1] = work.batch, to[2] = work.count, to[3] = Tiles::works<128>(args, 3, {whole});
    auto walk = fa::Walk<false>::begin(work);
    for (int n = 0; n < work.count; ++n, walk.next(work)) to[4 + n] = 10 * walk.head + walk.queries(work);"""
    count = whole + 3 * (28 - whole)
    before = f"#undef DETERMINISTIC\n#define DETERMINISTIC 0\n{BEFORE}"
    got = run(backend, tmp_path, body, fields=FIELDS, before=before, block=count)[: 16 * count].reshape(count, 16).tolist()
    walked = [10 * head + tile for head in (0, 1) for tile in range(3)]
    parts = [(number, walked) for number in range(whole)]
    parts += [(number, walked[2 * split : 2 * split + 2]) for split in range(3) for number in range(whole, 28)]
    for (number, tiles), found in zip(parts, got, strict=True):
        assert found[: 4 + len(tiles)] == [number % 4 * 128, number // 4, len(tiles), count, *tiles]


@pytest.mark.parametrize("backwards", [False, True])
def test_walk(backwards: bool, backend: Backend, tmp_path: Path) -> None:
    """fa::Walk: the tiles of queries of a work, head after head of its group, from either end; fa::NumberWalk: their numbers, 4 a head."""
    body = f"""\
    const fa::Work work{{0, 2, 1, 1, 4, 9, 6, 1, 1}};
    using Walk = fa::Walk<{str(backwards).lower()}>;
    Walk at = Walk::begin(work);
    fa::NumberWalk<{str(backwards).lower()}> also = fa::QueryTiles<64, 64, 0, 1>::walk_numbers<{str(backwards).lower()}>(args, work);
    for (int n = 0; n < t; ++n) at.next(work), also.next(work);
    out[3 * t] = at.head, out[3 * t + 1] = at.queries(work), out[3 * t + 2] = also.number;"""
    got = run(backend, tmp_path, body, fields={"heads_q": 12, "heads_kv": 4, "seq_q": 256}, before=BEFORE)[:27].reshape(9, 3)
    places = [(head, tile) for head in (6, 7, 8) for tile in ((3, 2, 1) if backwards else (1, 2, 3))]
    assert got.tolist() == [[head, tile, 4 * (12 + head) + tile] for head, tile in places]


def test_places(backend: Backend, tmp_path: Path) -> None:
    """A tile's number among those of all heads, and where its stats and its dQ lie in their workspaces."""
    body = """\
    using Tiles = fa::QueryTiles<128, 64, 2, 5>;
    fa::Args own = args;
    own.workspace[2] = own.workspace[5] = out;
    const int number = Tiles::number(args, t / 4, t / 2 % 2, t % 2);
    const int all[3] = {number, int(Tiles::stats(own, number) - (float*)out), int(Tiles::dq(own, number) - (float*)out)};
    for (int i = 0; i < 3; ++i) out[3 * t + i] = all[i];
    if (t == 0) out[96] = Tiles::row_parts, out[97] = Tiles::slabs, out[98] = Tiles::parts, out[99] = Tiles::part;"""
    got = run(backend, tmp_path, body, fields=FIELDS, before=BEFORE)
    assert got[: 28 * 3].reshape(28, 3).tolist() == [[n, 256 * n, 8192 * n] for n in range(28)]
    assert got[96:100].tolist() == [2, 1, 2, 4096]
    narrow = run(backend, tmp_path, body.replace("<128, 64", "<64, 80"), fields=FIELDS, before=BEFORE)
    assert narrow[: 28 * 3].reshape(28, 3)[:, 1:].tolist() == [[128 * n, 64 * 80 * n] for n in narrow[: 28 * 3 : 3]]
    assert narrow[96:100].tolist() == [1, 2, 2, 4096]


@pytest.mark.parametrize("width", [64, 80])
def test_prepare(width: int, backend: Backend, tmp_path: Path) -> None:
    """delta, log2(e) * logsumexp and zeros for 16 queries; +inf for one that sees no key, and beyond the last one."""
    o, d_o = integers(16, 64, seed=1).astype(np.float32), integers(16, 64, seed=2).astype(np.float32)
    lse = integers(16, seed=3).astype(np.float32)
    lse[5] = -np.inf
    body = f"""\
    fa::Args own = args;
    own.O = args.Q, own.dO = args.K, own.logsumexp = args.K;
    own.logsumexp.data = static_cast<float*>(args.K.data) + 1024, own.logsumexp.row = 1;
    own.workspace[2] = out, own.workspace[5] = out + 128;
    fa::QueryTiles<64, {width}, 2, 5>::prepare<scalar>(own);"""
    got = run(backend, tmp_path, body, o, np.append(d_o, lse), block=128, fields={"seq_q": 13}, before=BEFORE)
    there = np.arange(16) < 13
    seen = there & (lse > -np.inf)
    wanted = np.where(seen, np.where(seen, lse, 0) * np.float32(np.log2(np.e)), np.float32(np.inf)).astype(np.float32)
    assert np.array_equal(f32(got, 16), wanted)
    assert np.array_equal(f32(got[64:], 16), np.where(there, (o * d_o).sum(1), 0))
    assert (got[16:64] == UNWRITTEN).all() and (got[80:128] == UNWRITTEN).all()
    assert (got[128 : 128 + 16 * width] == 0).all() and (got[128 + 16 * width :] == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_convert(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """A part of dQ from the layout of the accumulators to rows, scaled and rounded; none beyond the last query or column."""
    dq = (integers(64, 64) * (1 + 2.0**-6 + 2.0**-13)).astype(np.float32)
    layout = dq.reshape(4, 2, 8, 8, 4, 2).transpose(3, 0, 2, 4, 1, 5)  # [group of columns][warp][row][lane][half][2]
    body = """\
    fa::Args own = args;
    own.dQ = args.O, own.workspace[5] = args.Q.data;
    fa::QueryTiles<128, 128, 2, 5>::convert<scalar>(own);"""
    for rows, head_dim in ((64, 64), (45, 59)):
        fields = {"seq_q": rows, "head_dim": head_dim, "scale": 0.3}
        got = run(backend, tmp_path, body, layout, dtype=dtype, block=256, fields=fields, before=BEFORE)
        out = got.view(TYPES[dtype])[: 80 * 64].reshape(80, 64).astype(float)
        want = np.full((80, 64), np.nan)
        want[:rows, :head_dim] = (dq * np.float32(0.3)).astype(TYPES[dtype]).astype(float)[:rows, :head_dim]
        assert np.array_equal(out, want, equal_nan=True), (rows, head_dim)


LOAD = (
    BEFORE
    + entry("k")
    + """\
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    uint64_t* full = reinterpret_cast<uint64_t*>(tile_smem + 3 * 8192);
    if (threadIdx.x == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::QueryTiles<64, 128, 0, 1>::load<8192, 2>(tile_smem, k_map, full, 40, 3, 0, 8192);
        fa::tma_load_4d(tile_smem + 2 * 8192, &k_map, full, 0, 40, 1, 0);
    }
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    for (int i = threadIdx.x; i < 3 * 2048; i += 128)
        static_cast<uint32_t*>(args.O.data)[i] = reinterpret_cast<const uint32_t*>(tile_smem)[i];
}
"""
)


def test_load(backend: Backend, tmp_path: Path) -> None:
    """Two slabs, the second one beyond the tensor's columns, and the bytes that come beside them."""
    tensor = np.random.RandomState(3).randint(0, 0x7C00, (1, HEADS, ROWS, WIDTH)).astype(np.uint16)
    box = [64, 64, 1, 1]
    given = {"K": tensor.view(np.float16)}
    kernel = hopper_kernel(backend, tmp_path, LOAD, {"k": ("K", box, 128)}, given, "float16", shared=3 * 8192 + 64)
    wanted = [image_of(box_of(tensor, box, at), 128) for at in ((0, 40, 3, 0), (64, 40, 3, 0), (0, 40, 1, 0))]
    assert np.array_equal(with_fields(kernel)[: 3 * 8192], np.concatenate(wanted))


#: The arrivals that end a phase of each barrier, and the barrier's name.
ARRIVALS = {
    "k_full": 1,
    "v_full": 1,
    "kv_empty": 258,
    "dkv_full[0]": 4,
    "q_full": 1,
    "do_full": 1,
    "q_empty": 8,
    "dq_full": 4,
    "dq_empty": 1,
}


def test_barriers(backend: Backend, tmp_path: Path) -> None:
    """A phase of each barrier ends with the arrivals of those who are to arrive; with one fewer the wait would hang."""
    waits = "".join(
        f"        for (int i = 0; i < {count}; ++i) fa::mbarrier_arrive(at.{name} + 1);\n        fa::mbarrier_wait_parity(at.{name} + 1, 0);\n"
        for name, count in ARRIVALS.items()
    )
    text = (
        LOAD.split("    unsigned char*")[0] + "    fa::Barriers<2>& at = *reinterpret_cast<fa::Barriers<2>*>(fa::dynamic_shared_1024());\n"
    )
    text += f"    if (threadIdx.x == 0) {{\n        at.init();\n{waits}        static_cast<uint32_t*>(args.O.data)[0] = 7;\n    }}\n}}\n"
    tensor = np.zeros((1, HEADS, ROWS, WIDTH), np.float16)
    kernel = hopper_kernel(backend, tmp_path, text, {"k": ("K", [64, 64, 1, 1], 128)}, {"K": tensor}, "float16", shared=1024)
    assert with_fields(kernel)[:4].view(np.uint32)[0] == 7
