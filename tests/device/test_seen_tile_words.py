"""The words of <fa/seen_tiles.cuh>: the lists of the tiles of queries that see a tile of keys, and walks over them; of <fa/accumulator.cuh> those
that make P and dS of a mask and a score of the problem's own."""

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


@pytest.mark.parametrize("size", [1.0, 24.0])
def test_pairs(size: float, backend: Backend, tmp_path: Path) -> None:
    """fa::SeenPairs, fa::exponentiate_tile: P of a score, and P times its derivative, of 64 keys and 32 queries, some beyond the tensors. size:
    of the scores; with 24 a tanh is beyond its quick range."""
    mask, score = parsed("mask", "q - k <= 9 and (q + k) % 3 != 0"), parsed("score", "24.0 * tanh(s / 24.0) + 0.125 * (k - q)")
    names = {"MASK": mask, "SCORE_LOG2": score.folded(), "SCORE_SLOPE_UNSCALED": score.derivative().unscaled()}
    before = "#define FA_SCORE 1\n#define FA_SCORE_TANH 1\n" + "".join(f"#define FA_{name} {tree.cpp()}\n" for name, tree in names.items())
    body = f"""\
    float* reference = fa::dynamic_shared<float>();
    if (t < 32) reference[t] = 0.25f * t;
    __syncthreads();
    float x[16];
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    for (int i = 0; i < 16; ++i) x[i] = {size / 32}f * (((row + i / 2 % 2 * 8) * 37 + (column + i / 4 * 8 + i % 2) * 11) % 64 - 31.5f);
    fa::uint32_t operand[2][4];
    const fa::TilePlace place{{args, 0, 0, 32, 64}};
    fa::SeenPairs<16> pairs;
    pairs.find(place);
    fa::exponentiate_tile<fa::bfloat16>(x, operand, place, pairs, -0.75f, reference);
    for (int i = 0; i < 16; ++i) {{
        const int at = 32 * (row + i / 2 % 2 * 8) + column + i / 4 * 8 + i % 2;
        out[at] = __float_as_uint(x[i]), out[2048 + at] = operand[i / 8][i / 2 % 4] >> 16 * (i % 2) << 16;
    }}"""
    fields = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 60, "seq_kv": 100, "causal_shift": 40}
    got = run(backend, tmp_path, body, fields=fields, before=before + "#include <fa/accumulator.cuh>", block=128, shared=128).view(
        np.float32
    )
    k, column = np.arange(64)[:, None], np.arange(32)[None, :]
    s = -0.75 * (size / 32) * ((37 * k + 11 * column) % 64 - 31.5)
    q, k = column + 32 + 40, k + 64
    seen = (q - k <= 9) & ((q + k) % 3 != 0) & (q < 100) & (k < 100)
    p = np.where(seen, np.exp2((24 * np.tanh(s / 24) + 0.125 * (k - q)) / np.log(2) - 0.25 * column), 0)
    np.testing.assert_allclose(got[:2048].reshape(64, 32), p * (1 - np.tanh(s / 24) ** 2), rtol=3e-5, atol=0)
    np.testing.assert_allclose(got[2048:4096].reshape(64, 32), p, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("size", "groups"), [(7.0, "8"), (7.5, "8, false"), (7.5, "4, true"), (7.0, "8, true")])
def test_scores(size: float, groups: str, backend: Backend, tmp_path: Path) -> None:
    """fa::exponentiate_scores: P of a score and its sums, of 64 queries and 32 keys. size: of the scores; with 7.5 some threads have a tanh
    beyond its quick range, and say so. groups: how many at a time, and whether they are summed a group later. fa::apply_score: the same
    scores in units of log2, right for all."""
    score = parsed("score", "24.0 * tanh(s / 24.0) + 0.125 * (k - q)")
    before = f"#define FA_SCORE 1\n#define FA_SCORE_TANH 1\n#define FA_SCORE_LOG2 {score.folded().cpp()}\n#include <fa/accumulator.cuh>"
    body = f"""\
    float x[16], y[16], sum[2];
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    const float reference[2] = {{0.25f * row, 0.25f * (row + 8)}};
    for (int i = 0; i < 16; ++i) x[i] = y[i] = {size / 32}f * (((row + i / 2 % 2 * 8) * 37 + (column + i / 4 * 8 + i % 2) * 11) % 64 - 31.5f);
    const bool far = fa::exponentiate_scores<{groups}>(x, sum, args, 0, 0, 32 + row, 64, -0.75f, reference);
    fa::apply_score(y, args, 0, 0, 32 + row, 64, -0.75f);
    for (int i = 0; i < 16; ++i) {{
        const int at = 32 * (row + i / 2 % 2 * 8) + column + i / 4 * 8 + i % 2;
        out[at] = __float_as_uint(x[i]), out[2048 + at] = __float_as_uint(y[i]), out[4096 + at] = far;
    }}
    for (int half = 0; half < 2; ++half) out[6144 + 4 * (row + 8 * half) + t % 4] = __float_as_uint(sum[half]);"""
    fields = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 96, "seq_kv": 136, "causal_shift": 40}
    got = run(backend, tmp_path, body, fields=fields, before=before, block=128)
    p, log2, sums = (got[a:b].view(np.float32) for a, b in ((0, 2048), (2048, 4096), (6144, 6400)))
    row, column = np.arange(64)[:, None], np.arange(32)[None, :]
    s = -0.75 * (size / 32) * ((37 * row + 11 * column) % 64 - 31.5)
    wanted = (24 * np.tanh(s / 24) + 0.125 * (column + 64 - (row + 32 + 40))) / np.log(2)
    np.testing.assert_allclose(log2.reshape(64, 32), wanted, rtol=1e-6, atol=1e-5)
    beyond = (np.abs(s / 24) > 0.22).reshape(4, 2, 8, 4, 4, 2)  # warp, half, row, eight columns, thread of a quad, column
    far = beyond.any((1, 3, 5), keepdims=True)
    assert far.any() == (size > 7) and not far.all()
    assert np.array_equal(got[4096:6144].reshape(beyond.shape), np.broadcast_to(far, beyond.shape))
    right = np.broadcast_to(~far, beyond.shape).reshape(64, 32)
    np.testing.assert_allclose(p.reshape(64, 32)[right], np.exp2(wanted - 0.25 * row)[right], rtol=1e-5, atol=0)
    of_threads = p.reshape(64, 4, 4, 2).astype(float).sum((1, 3))
    np.testing.assert_allclose(sums.reshape(64, 4), of_threads, rtol=1e-6, atol=0)


def test_the_quick_tanh(backend: Backend, tmp_path: Path) -> None:
    """fa::QuickTanh: right to 3e-7 at 4,096 places of its range, of both signs. An error of one sign is that of all scores that are alike, and so
    of their logsumexp, whose budget is some units of the last place."""
    body = """\
    for (int i = 0; i < 128; ++i) {
        const float x = (t % 2 ? 1 : -1) * fa::QuickTanh::end * (t * 128 + i + 1) / 4096;
        out[(t * 128 + i) * 2] = __float_as_uint(x), out[(t * 128 + i) * 2 + 1] = __float_as_uint(fa::QuickTanh::near(1.0f, x, 73.0f));
    }"""
    got = (
        run(backend, tmp_path, body, before="#include <fa/accumulator.cuh>", block=32)[:8192].view(np.float32).reshape(-1, 2).astype(float)
    )
    np.testing.assert_allclose(got[:, 1], 73 * np.tanh(got[:, 0]), rtol=3e-7, atol=0)
    assert np.abs(got[:, 0]).max() == np.float32(0.22)


def test_all_quick(backend: Backend, tmp_path: Path) -> None:
    """fa::all_quick of sums of 16 P and a cap of 29.5, whose range ends at 2^9.2: both sums are from 1 to 2^9, and no NaN. What that
    promises: the polynomial is wrong by no more than 1.9e-5 of P at the end of the range, wherever below it a score is. fa::capped: of which
    caps."""
    body = """\
    const float sums[7] = {0.0f, 0.99f, 1.01f, 20.0f, 511.0f, 513.0f, __uint_as_float(0x7fffffffu)};
    for (int i = 0; i < 7; ++i) {
        float sum[2] = {20.0f, 20.0f};
        sum[t % 2] = sums[i];
        out[32 * i + t] = fa::all_quick<16>(sum);
    }
    const float cap = t < 16 ? 25.7f + 4 * t : -25.7f - 4 * (t - 16), near = fa::QuickTanh::at_end, log2e = fa::log2e;
    float wrong = 0;
    for (int i = 0; i < 3000; ++i) {
        const float x = (cap < 0 ? 1 : -1) * (0.2165f + i * (i < 2000 ? 0.0005f : 0.5f));
        const float got = fa::exp2_approx(fa::QuickTanh::near(1.0f, x, cap * log2e));
        wrong = max(wrong, fabsf(got - fa::exp2_approx(fa::WholeTanh()(1.0f, x, cap * log2e))));
    }
    out[224 + t] = __float_as_uint(wrong / fa::exp2_approx(-fabsf(cap) * log2e * near));
    out[256] = fa::capped<fa::bfloat16> && !fa::capped<fa::float16>;"""
    before = f"#define FA_SCORE_SOFTCAP {float(29.5 / np.log(2))!r}f\n#include <fa/accumulator.cuh>"
    got = run(backend, tmp_path, body, before=before, block=32)
    assert np.array_equal(got[:224].reshape(7, 32), np.broadcast_to(np.array([0, 0, 1, 1, 1, 0, 0])[:, None], (7, 32)))
    assert (got[224:256].view(np.float32) < 2.0e-5).all() and got[224:256].view(np.float32).max() > 1.8e-5
    assert got[256] == 1


@pytest.mark.parametrize("cap", [83.0, 84.0, 182.0, 1e12])
def test_a_large_softcap(cap: float, backend: Backend, tmp_path: Path) -> None:
    """A kernel that asks fa::all_quick compiles, whatever the cap; fa::capped of which P needs no reference ends at 83."""
    body = "float sum[2] = {1, 1};\n    out[t] = fa::capped<fa::bfloat16> ? 2 + fa::all_quick<16>(sum) : fa::all_quick<16>(sum) * 0;"
    before = f"#define FA_SCORE_SOFTCAP {float(cap / np.log(2))!r}f\n#include <fa/accumulator.cuh>"
    assert run(backend, tmp_path, body, before=before, block=32)[0] == (3 if cap < 83.5 else 0)


def test_a_tanh_to_one(backend: Backend, tmp_path: Path) -> None:
    """fa::MiddleTanh: right in [-1, 1] to 2.5e-7, and says where it is beyond; under the exponentials, fa::exponentiate_scores. fa::Reach of
    fa::apply_score: a warp takes the tanh that is right for all of its scores, whatever the slope."""
    before = "#define FA_SCORE 1\n#define FA_SCORE_TANH 1\n#define FA_SCORE_LOG2 FORMULA\n#include <fa/accumulator.cuh>"
    body = """\
    float x[8], far[8] = {}, sum[2];
    const float reference[2] = {-2.0f, 3.0f}, slope = 0.03125f;
    fa::MiddleTanh inside, beyond;
    for (int i = 0; i < 8; ++i) x[i] = ((t * 8 + i) - 127.5f) / 127.5f / slope, out[8 * t + i] = __float_as_uint(inside(slope, x[i], 20.0f));
    beyond(slope, t == 7 ? 1.001f / slope : 0.0f, 1.0f);
    out[256 + t] = inside.far() + 2 * beyond.far();
    const bool wrong = fa::exponentiate_scores<4, true, true, fa::MiddleTanh>(x, sum, args, 0, 0, 0, 0, slope, reference);
    for (int i = 0; i < 8; ++i) out[288 + 8 * t + i] = wrong ? 0x7fc00000u : __float_as_uint(x[i]);
    const float slopes[6] = {slope, 0x1p-30f, 0x1p30f, slope, slope, slope}, most[6] = {0.2f, 0.0f, 0.0f, 0.3f, 0.99f, 1.01f};
    for (int n = 0; n < 6; ++n) {
        for (int i = 0; i < 8; ++i) far[i] = t == 9 && i == 3 ? most[n] / slopes[n] : 0.0f;
        out[544 + 32 * n + t] = fa::apply_score(far, args, 0, 0, 0, 0, slopes[n]);
    }"""
    before = before.replace("FORMULA", parsed("score", "20.0 * tanh(s)").folded().cpp())
    fields = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 64, "seq_kv": 64, "causal_shift": 0}
    got = run(backend, tmp_path, body, fields=fields, before=before, block=32)
    y = (np.arange(256) - 127.5) / 127.5
    np.testing.assert_allclose(got[:256].view(np.float32), 20 * np.tanh(y), rtol=2.5e-7)
    assert np.array_equal(got[256:288], np.where(np.arange(32) == 7, 2, 0))
    of_rows = np.where(np.arange(256) // 2 % 2 == 0, -2.0, 3.0)
    np.testing.assert_allclose(got[288:544].view(np.float32), np.exp2(20 * np.tanh(y) / np.log(2) - of_rows), rtol=8e-6)
    assert np.array_equal(got[544:736].reshape(6, 32), np.broadcast_to(np.array([0, 1, 1, 1, 1, 2])[:, None], (6, 32)))


@pytest.mark.parametrize("slope", [2.0**-23, 2.0**-25, 2.0**-32, -(2.0**-40), 2.0**20, 2.0**23, 2.0**60])
def test_a_tanh_of_a_flat_or_steep_slope(slope: float, backend: Backend, tmp_path: Path) -> None:
    """fa::apply_score, fa::exponentiate_scores: of x as large as a slope is small, or as small as it is large, whose powers are no float32,
    the tanh is right, or is said to be beyond its range."""
    score = parsed("score", "30.0 * tanh(s)")
    before = f"#define FA_SCORE 1\n#define FA_SCORE_TANH 1\n#define FA_SCORE_LOG2 {score.folded().cpp()}\n#include <fa/accumulator.cuh>"
    body = f"""\
    float x[8], y[8], sum[2];
    const float reference[2] = {{}};
    for (int i = 0; i < 8; ++i) x[i] = y[i] = (t * 8 + i - 128) * {0.21 / 128 / abs(slope)!r}f;
    const bool far = fa::exponentiate_scores<8>(x, sum, args, 0, 0, 0, 0, {slope!r}f, reference);
    fa::apply_score(y, args, 0, 0, 0, 0, {slope!r}f);
    for (int i = 0; i < 8; ++i) out[8 * t + i] = __float_as_uint(y[i]), out[256 + 8 * t + i] = far ? 0x7fc00000u : __float_as_uint(x[i]);"""
    fields = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 64, "seq_kv": 64, "causal_shift": 0}
    got = run(backend, tmp_path, body, fields=fields, before=before, block=32)[:512].view(np.float32).reshape(2, 256)
    wanted = 30 * np.tanh(np.sign(slope) * (np.arange(256) - 128) * 0.21 / 128) / np.log(2)
    np.testing.assert_allclose(got[0], wanted, rtol=2e-6, atol=1e-6)
    if 2.0**-24 < abs(slope) < 2.0**22:
        np.testing.assert_allclose(got[1], np.exp2(wanted), rtol=2e-5)
    else:
        assert np.isnan(got[1]).all()


def test_references_of_rows_that_have_seen_no_key(backend: Backend, tmp_path: Path) -> None:
    """fa::forget_unseen, then fa::raise_to_largest: of eight rows and eight below them, four lanes each, some have a sum in one lane."""
    body = """\
    float reference[2] = {1, 50}, row_sum[2] = {t % 8 == 3 ? 2.0f : 0.0f, t / 4 % 3 == 0 && t % 4 == 1 ? 4.0f : 0.0f}, factor[2], x[8];
    fa::forget_unseen(reference, row_sum);
    for (int i = 0; i < 8; ++i) x[i] = t - i;
    for (int half = 0; half < 2; ++half) out[t * 8 + half] = __float_as_uint(reference[half]);
    fa::raise_to_largest(reference, row_sum, factor, x, 0.5f);
    for (int half = 0; half < 2; ++half) {
        out[t * 8 + 2 + half] = __float_as_uint(reference[half]), out[t * 8 + 4 + half] = __float_as_uint(factor[half]);
        out[t * 8 + 6 + half] = __float_as_uint(row_sum[half]);
    }"""
    got = run(backend, tmp_path, body, before="#include <fa/accumulator.cuh>", block=32)[:256].view(np.float32).reshape(32, 4, 2)
    t = np.arange(32)
    sums = np.stack([np.where(t % 8 == 3, 2, 0), np.where((t // 4 % 3 == 0) & (t % 4 == 1), 4, 0)], 1)
    seen = np.stack([t // 4 % 2 == 0, t // 4 % 3 == 0], 1)
    assert np.array_equal(got[:, 0], np.where(seen, [1, 50], np.float32(-1e30)))
    largest = np.stack([t // 4 * 4 + 3, t // 4 * 4 + 1], 1) * 0.5  # of rows: columns 0, 1 and 4, 5 of each lane; of those below: 2, 3, 6, 7
    raised = np.where(seen, np.maximum([1, 50], largest), largest)
    factor = np.where(seen, np.exp2([1, 50] - raised), 0)
    assert np.array_equal(got[:, 1], raised.astype(np.float32))
    np.testing.assert_allclose(got[:, 2:], np.stack([factor, sums * factor], 1), rtol=1e-6)


def test_a_score_without_tanh_is_never_beyond_its_range(backend: Backend, tmp_path: Path) -> None:
    """fa::exponentiate_scores says so of none: a tile would be computed twice."""
    before = (
        f"#define FA_SCORE 1\n#define FA_SCORE_LOG2 {parsed('score', 's + 0.5 * (k - q)').folded().cpp()}\n#include <fa/accumulator.cuh>"
    )
    body = """\
    float x[8] = {}, sum[2];
    const float reference[2] = {};
    out[t] = fa::exponentiate_scores<8>(x, sum, args, 0, 0, 0, 0, 1.0f, reference);"""
    fields = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 64, "seq_kv": 64, "causal_shift": 0}
    assert not run(backend, tmp_path, body, fields=fields, before=before, block=32)[:32].any()
