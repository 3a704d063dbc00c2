"""The words of <fa/split.cuh> and <fa/split_product.cuh> against numpy: float32 matrices as two float16 each, and their products.

They are plain C++ over the words of test_mma_words.py and test_words.py, which are held to an H200 there. Tiles hold small integers
plus a fraction that only the low parts hold, whose products are exact, so most comparisons are of bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fragment_words import PRODUCT
from word_kernel import f32, integers, run

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.kernel import find
from harness.problem import Problem

BEFORE = "#include <fa/gradient.cuh>\n#include <fa/split_product.cuh>\n" + PRODUCT.split("template <int W, bool S>")[0]
#: 2^-8 of an integer below 8, scaled to [2^14, 2^15), reaches into the low part and ends there.
FRACTION = 2.0**-15


def halves(x: Any) -> tuple[Any, Any]:
    """High and low parts as float64."""
    high = x.astype(np.float32).astype(np.float16)
    return high.astype(float), (x.astype(np.float32) - high.astype(np.float32)).astype(np.float16).astype(float)


def test_split_scale_and_its_inverse(backend: Backend, tmp_path: Path) -> None:
    """The largest element lands in [2^14, 2^15), at any size; the inverse is exact, and so is 2^-14 of it."""
    body = """\
    reinterpret_cast<float*>(out)[2 * t] = fa::split_scale(a[t]);
    reinterpret_cast<float*>(out)[2 * t + 1] = fa::inverse_power(fa::split_scale(a[t])) * 0x1p-14f;"""
    a = np.float32([0, 1e-38, 2.0**-98, 1e-20, 1e-3, 0.99999994, 1, 1.5, 2, 3e4, 65504, 1e20, 3.4e38, 2.0**127])
    got = f32(run(backend, tmp_path, body, a, before=BEFORE, block=len(a)), len(a), 2).astype(float)
    scaled = a.astype(float) * got[:, 0]
    assert ((scaled[2:] >= 2.0**14) & (scaled[2:] < 2.0**15)).all() and (scaled[:2] < 2.0**14).all()
    assert np.array_equal(got[:, 0] * got[:, 1], np.full(len(a), 2.0**-14)) and (got[:, 1] >= 2.0**-126).all()
    assert np.array_equal(np.frexp(got[:, 0])[0], np.full(len(a), 0.5))


def test_split_pair(backend: Backend, tmp_path: Path) -> None:
    """Two numbers as packed high and low parts, which together miss at most 2^-23 of them, or 2^-25."""
    body = "    fa::split_pair(out[2 * t], out[2 * t + 1], a[2 * t], a[2 * t + 1]);"
    draw = np.random.RandomState(5)
    x = (draw.randn(64) * 2.0 ** draw.randint(-20, 13, 64)).astype(np.float32)
    got = run(backend, tmp_path, body, x, before=BEFORE)[:64].view(np.float16).reshape(32, 2, 2).astype(float)
    high, low = halves(x)
    assert np.array_equal(got[:, 0].reshape(-1), high) and np.array_equal(got[:, 1].reshape(-1), low)
    assert (np.abs(high + low - x) <= np.maximum(2.0**-23 * np.abs(x), 2.0**-25)).all()


ROWS = """\
template <int W> __device__ void rows(const float* a, float* out, int head_dim) {
    using Row = fa::SplitRow<W>;
    unsigned char* tile = fa::dynamic_shared();
    constexpr int step = 2 * Row::rows_of_warp;
    for (int first = 0; first < 16; first += step) {
        const int row = first + fa::lane_id() / Row::lanes;
        Row parts[2];
        float factors[2], finite[2], own[2];
        for (int i = 0; i < 2; ++i) {
            const int at = row + i * Row::rows_of_warp;
            parts[i].load(a + at * W, head_dim, at < 15);
            parts[i].multiply(-1.0f);
            finite[i] = fa::group_max<Row::lanes>(parts[i].largest_finite());
            Row same = parts[i];
            float scale;
            own[i] = same.own_scale(scale);
            same.store_plain(tile + (32 + at) * W * 2, 16 * W * 2, scale);
        }
        fa::store_scaled(parts, factors, tile, 16 * W * 2, row, Row::rows_of_warp);
        for (int i = 0; i < 2; ++i) {
            const int at = row + i * Row::rows_of_warp;
            const bool same = own[i] == factors[i] || own[i] != own[i];
            if (fa::lane_id() % Row::lanes == 0) out[at] = factors[i], out[16 + at] = same ? finite[i] : -1;
        }
    }
    __syncwarp();
    for (int i = threadIdx.x; i < 16 * W; i += 32) {
        const uint32_t at = fa::chunk_at<W>(i / W, i % W / 8) + i % 8 * 2;
        for (int low = 0; low < 2; ++low) {
            const auto* swizzled = reinterpret_cast<const fa::float16*>(tile + at + low * 16 * W * 2);
            const auto* plain = reinterpret_cast<const fa::float16*>(tile) + (2 + low) * 16 * W + i;
            out[32 + low * 16 * W + i] = swizzled->bits == plain->bits ? fa::widen(*swizzled) : -1e9f;
        }
    }
}
"""


@pytest.mark.parametrize("width", [64, 128, 256])
def test_split_row(backend: Backend, tmp_path: Path, width: int) -> None:
    """Rows of all sizes, scaled each by its own; zero beyond the head dim and the rows; an infinity, both, a NaN. Swizzled and plain."""
    dim = width - 3
    draw = np.random.RandomState(width)
    a = (draw.randn(16, width) * 10.0 ** draw.randint(-30, 30, (16, 1))).astype(np.float32)
    a[:, dim:] = np.nan
    a[3, :dim] = 0
    a[4, 5] = -np.inf
    a[5, 7], a[5, 9] = np.inf, np.nan
    body = f"    rows<{width}>(a, reinterpret_cast<float*>(out), {dim});"
    got = f32(run(backend, tmp_path, body, a, before=BEFORE + ROWS, shared=128 * width), 32 + 32 * width).astype(float)
    factor, finite, parts = got[:16], got[16:32], got[32:].reshape(2, 16, width)
    x = -a.astype(float)
    x[:, dim:] = x[15] = 0
    sizes = np.where(np.isfinite(x), np.abs(x), 0).max(1)
    assert np.array_equal(finite, sizes)
    assert factor[4] == np.inf and np.isnan(factor[5])
    assert np.array_equal(np.nonzero(parts[0, 4])[0], [5]) and parts[0, 4, 5] == 1 and not parts[1, 4].any()
    some = [i for i in range(16) if i not in (4, 5)]
    power = 1 / factor[some, None]
    assert np.array_equal(np.frexp(power)[0], np.full(power.shape, 0.5))
    high, low = halves(x[some] * power)
    assert np.array_equal(parts[0, some], high) and np.array_equal(parts[1, some], low)
    largest = sizes[some] * power[:, 0]
    assert ((largest >= 2.0**14) & (largest < 2.0**15) | (largest == 0)).all()


PRODUCTS = """\
template <int W, int M> __device__ void products(const float* a, const float* b, const float* p_from, float* out, int t) {
    unsigned char* smem = fa::dynamic_shared();  // A [32][W], B [32][W], each high and low parts
    const uint32_t a_smem = fa::smem_u32(smem), b_smem = a_smem + 4 * 32 * W;
    for (int first = 0; first < 32; first += fa::SplitRow<W>::rows_of_warp) {
        const int row = first + fa::lane_id() / fa::SplitRow<W>::lanes;
        fa::SplitRow<W> part;
        part.load(a + row * W, W, true);
        part.store(smem, 2 * 32 * W, row, 2048.0f);
        part.load(b + row * W, W, true);
        part.store(smem + 4 * 32 * W, 2 * 32 * W, row, 2048.0f);
    }
    __syncwarp();
    float large[M][4][4], small[M][4][4] = {}, o[M][W / 8][4], p[M][4][4];
    fa::clear(large);
    fa::clear(o);
    for (auto& x : o) for (auto& y : x) for (auto& z : y) z = 3.0f;
    const uint32_t a_lane = fa::lane_of_a<W>(a_smem), b_lane = fa::lane_of_b<W>(b_smem);
    for (uint32_t column = 0; column < 2 * W; column += 128)
        fa::split_multiply_abt<W>(large, small, a_lane + column, 2 * 32 * W, b_lane + column, 2 * 32 * W);
    put(out, small);
    fa::add(large, small);
    put(out + 1024, large);
    get(p, p_from);
    fa::multiply_columns(p, p_from);
    put(out + 2048, p);
    get(p, p_from);
    uint32_t high[2][M][4], low[2][M][4];
    fa::split_a(high, low, p);
    fa::split_multiply_ab<W, 1>(o, high, low, fa::lane_of_a<W>(b_smem), 2 * 32 * W, 0x1p-11f);
    put(out + 3072, o);
}
"""


@pytest.mark.parametrize(("width", "m"), [(64, 1), (64, 2), (128, 2), (256, 1)])
def test_split_products(backend: Backend, tmp_path: Path, width: int, m: int) -> None:
    """All products but that of two low parts, to the last bit: large and small ones apart, and a group of columns from zero."""
    rows = 16 * m
    a, b, p = (
        integers(*shape, seed=i) + FRACTION * integers(*shape, seed=9 + i) for i, shape in enumerate([(32, width), (32, width), (rows, 32)])
    )
    p *= 128
    both = np.concatenate([b.reshape(-1), p.reshape(-1)]).astype(np.float32)
    body = f"    products<{width}, {m}>(a, b, b + 32 * {width}, reinterpret_cast<float*>(out), t);"
    shared = 256 * width
    got = run(backend, tmp_path, body, a.astype(np.float32), both, before=BEFORE + PRODUCTS, shared=shared)
    (ah, al), (bh, bl) = halves(a[:rows] * 2048), halves(b * 2048)
    ph, pl = halves(p)
    assert al.any() and bl.any() and pl.any() and np.array_equal(ah + al, a[:rows] * 2048)
    small = ah @ bl.T + al @ bh.T
    np.testing.assert_allclose(f32(got, rows, 32), small, rtol=2.0**-20, atol=np.abs(small).max() * 2.0**-22)
    # Integers' products are exact; the sum with the small ones is rounded once, and every mma of those may cut a bit off
    np.testing.assert_allclose(f32(got[1024:], rows, 32), ah @ bh.T + small, rtol=2.0**-22, atol=np.abs(ah @ bh.T).max() * 2.0**-23)
    np.testing.assert_array_equal(f32(got[2048:], rows, 32), (p * p.reshape(-1)[:32]).astype(np.float32))
    exact = 3 + (ph @ bh + ph @ bl + pl @ bh) / 2048
    np.testing.assert_allclose(f32(got[3072:], rows, width), exact, rtol=2.0**-21, atol=np.abs(exact).max() * 2.0**-22)
    without = 3 + (ph @ bh + ph @ bl) / 2048  # the comparison can fail: a product less is seen
    assert np.abs(without - exact).max() > 100 * np.abs(exact).max() * 2.0**-22


TILES = """\
template <int W> __device__ void tiles(const float* a, const float* b, float* out, int t) {
    unsigned char* smem = fa::dynamic_shared();  // A [32][W], B [32][W], P [32][32], each high and low parts; a copy of A; 64 floats
    constexpr uint32_t size = 4 * 32 * W, p_size = 4 * 32 * 32;
    float* maxima = reinterpret_cast<float*>(smem + 3 * size + p_size);
    const fa::SplitSizes of_a = fa::split_tile<32, W>(smem, a, W, 31, W - 3, maxima);
    const fa::SplitSizes of_b = fa::split_tile<32, W>(smem + size, b, W, 32, W, maxima + 16);
    for (int i = t; i < 32 * 16; i += 256) {  // P, whose columns are the rows of P^T B
        fa::Vec<uint32_t, 2> word;
        const float* p = b + 32 * W + i / 16 * 32 + i % 16 * 2;
        fa::split_pair(word[0], word[1], p[0], p[1]);
        for (int low = 0; low < 2; ++low)
            *reinterpret_cast<uint32_t*>(smem + 2 * size + low * p_size / 2 + fa::chunk_at<32>(i / 16, i % 16 / 4) + i % 4 * 4) = word[low];
    }
    const float largest = fa::block_max(float(t * 7 % 256), maxima + 32);
    float* copied = reinterpret_cast<float*>(smem + 2 * size + p_size);
    fa::copy_bytes<size, 256>(fa::smem_u32(copied), reinterpret_cast<const unsigned char*>(a));
    fa::cp_async_commit_group();
    fa::cp_async_wait_group<0>();
    __syncthreads();
    for (int i = t; i < 16 * W; i += 256) out[6144 + i] = copied[i] + copied[i + 16 * W];
    if (t == 0) out[0] = of_a.inverse, out[1] = of_a.norm, out[2] = of_b.inverse, out[3] = of_b.norm, out[4] = largest;
    if (t >= 32) return;
    const uint32_t a_smem = fa::smem_u32(smem), b_smem = a_smem + size, p_smem = b_smem + size;
    float s[2][4][4] = {}, d[2][W / 16][4] = {};
    fa::split_multiply_rows<W>(s, fa::lane_of_a<W>(a_smem), size / 2, fa::lane_of_b<W>(b_smem), size / 2);
    put(out + 1024, s);
    const uint32_t p_lane = fa::lane_of_b_at<32>(p_smem, 0, 0, t);
    fa::split_multiply_atb<2, 32, W, 2>(d, p_lane, p_size / 2, fa::lane_of_a_at<W>(b_smem, 0, 1, t), size / 2);
    put(out + 2048, d);
}
"""


@pytest.mark.parametrize("width", [64, 128, 256])
def test_split_tiles(backend: Backend, tmp_path: Path, width: int) -> None:
    """Tiles split by a block with one scale, their products by whole rows and by columns of A, a copy, a maximum."""
    draw = np.random.RandomState(width)
    a, b, p = draw.randn(32, width), draw.randn(32, width) * 1e-6, draw.rand(32, 32) * 2.0**14
    a, b, p = (x.astype(np.float32) for x in (a, b, p))
    b[3, 4] = np.inf
    b[3, 5:] = 0  # a row that is not finite: its sizes leave it out, and only products with it are NaN
    body = f"    tiles<{width}>(a, b, reinterpret_cast<float*>(out), t);"
    both = np.concatenate([b.reshape(-1), p.reshape(-1)])
    shared = 3 * 128 * width + 4096 + 256
    got = run(backend, tmp_path, body, a, both, before=BEFORE + TILES, block=256, shared=shared)
    inverse_a, norm_a, inverse_b, norm_b, largest = f32(got, 5).astype(float)
    wide_a, wide_b = a.astype(float), np.where(np.isfinite(b), b, 0).astype(float)
    wide_a[31] = wide_a[:, width - 3 :] = 0
    for x, inverse, norm in ((wide_a, inverse_a, norm_a), (wide_b, inverse_b, norm_b)):
        assert np.frexp(inverse)[0] == 0.5 and 2.0**14 <= np.abs(x).max() / inverse < 2.0**15
        np.testing.assert_allclose(norm, np.sqrt((x * x).sum(1)).max(), rtol=1e-5)
    assert largest == 255 and np.array_equal(f32(got[6144:], 16, width), a[:16] + a[16:])
    finite = [i for i in range(32) if i != 3]
    scores = wide_a @ wide_b.T / (inverse_a * inverse_b)
    found = f32(got[1024:], 32, 32)
    np.testing.assert_allclose(found[:, finite], scores[:, finite], rtol=0, atol=np.abs(scores).max() * 2.0**-20)
    assert np.isnan(found[:, 3]).all()
    columns = [c for c in range(width) if c // 16 % 2]
    exact = (p.T.astype(float) @ wide_b / inverse_b)[:, columns]
    np.testing.assert_allclose(f32(got[2048:], 32, width // 2), exact, rtol=0, atol=np.abs(exact).max() * 2.0**-20)


def test_split_softmax(backend: Backend, tmp_path: Path) -> None:
    """Three tiles of 32 keys, a scale for each row: every P, the sums, what becomes of O; huge scores, rows without a key."""
    body = """\
    float* scales = fa::dynamic_shared<float>();
    scales[t] = b[t];
    __syncwarp();
    fa::SplitSoftmax<2> softmax;
    float o[2][2][4] = {};
    float* to = reinterpret_cast<float*>(out);
    for (int tile = 0; tile < 3; ++tile) {
        float s[2][4][4];
        get(s, a + tile * 1024);
        softmax.step(s, o, scales + fa::fragment_row());
        put(to + tile * 1024, s);
        for (auto& x : o) for (auto& y : x) for (auto& z : y) z += 1.0f;
    }
    softmax.finish();
    put(to + 3072, o);
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * (i / 2) + i % 2 * 8 + fa::fragment_row();
        to[3584 + row] = softmax.row_sum[i / 2][i % 2], to[3616 + row] = softmax.row_max[i / 2][i % 2];
    }"""
    scale = np.float32(2.0 ** np.random.RandomState(1).randint(-20, 20, 32) * 0.3)
    s = (np.random.RandomState(3).randn(3, 32, 32) * 8 / scale[:, None]).astype(np.float32)
    s[0, 11] = s[0, 12, 4:] = s[:, 20] = -np.inf
    s[1] = np.minimum(s[1], s[0].max(1, keepdims=True))
    s[1, 5, 3] = s[0, 5].max() + np.float32(5) / scale[5]  # higher by 7.2 powers of two: not worth raising
    s[2, 9] += np.float32(1e6) / scale[9]
    s = s.astype(np.float32)
    got = run(backend, tmp_path, body, s, scale, before=BEFORE, shared=128)
    high, factor, total = np.full(32, -3.4028235e38), np.zeros(32), np.zeros(32)
    log2e = np.float32(1.44269504)
    raised = []
    for tile in range(3):
        top = s[tile].max(1).astype(float)
        with np.errstate(over="ignore"):
            raised.append(bool((((top - high) * scale * log2e) > 8).any()))
        new = np.maximum(high, top) if raised[-1] else high
        with np.errstate(over="ignore", under="ignore"):
            step = np.exp2((high - new) * scale * log2e)
            p = 128 * np.exp2((s[tile].astype(float) - new[:, None]) * (scale * log2e)[:, None].astype(float))
        factor, total, high = factor * step + 1, total * step + p.sum(1) / 128, new
        np.testing.assert_allclose(f32(got[tile * 1024 :], 32, 32), p, rtol=3e-5, atol=1e-30)
    assert raised == [True, False, True]
    np.testing.assert_allclose(f32(got[3072:], 32, 16), np.repeat(factor[:, None], 16, 1), rtol=3e-5)
    np.testing.assert_array_equal(f32(got[3616:], 32), high.astype(np.float32))
    np.testing.assert_allclose(f32(got[3584:], 32), total, rtol=3e-5)
    assert f32(got[3584:], 32)[20] == 0


def test_split_gradient(backend: Backend, tmp_path: Path) -> None:
    """Where tiles of split operands and of dQ lie, what their products are multiplied with, P from a score, and dQ by rows."""
    body = """\
    using Tiles = fa::SplitGradient<32, 64, 64, 2, 3, 5>;
    float* to = reinterpret_cast<float*>(out);
    fa::Args own = args;
    own.workspace[2] = own.workspace[3] = out, own.workspace[5] = args.K.data, own.dQ = args.O, own.dQ.data = out + 64;
    Tiles::convert(own);
    if (t > 0) return;
    const unsigned char* begin = reinterpret_cast<unsigned char*>(out);
    out[0] = Tiles::key_item(own, 1, 0, 2) - begin, out[1] = Tiles::query_item(own, Tiles::first_tile(own, 1, 1)) - begin;
    out[2] = Tiles::dq(own, 3) - Tiles::dq(own, 0), out[3] = Tiles::k_item, out[4] = Tiles::q_item;
    const Tiles::Factors factors(a, a + 4, 0.5f);
    const float all[6] = {factors.score, factors.ds_scale, factors.dp, factors.dv, factors.dk, factors.dq};
    for (int i = 0; i < 6; ++i) to[8 + i] = all[i];
    to[14] = Tiles::probability(3.0f, 0.5f, 2.0f), to[15] = Tiles::probability(9.0f, 0.5f, 2.0f);"""
    numbers = np.float32([2.0**-3, 2.0**-4, 3, 5, 2.0**-5, 2.0**-6, 7, 0])  # of queries: 1 / scale of Q and dO, norm, delta; of keys
    dq = integers(16, 64).astype(np.float32)
    layout = dq.reshape(2, 8, 8, 4, 2).transpose(2, 1, 3, 0, 4)  # [group of columns][row][lane][half][2]
    fields = {"batch": 2, "heads_q": 2, "heads_kv": 1, "seq_q": 13, "seq_kv": 150, "head_dim": 59, "scale": 0.5}
    before = BEFORE + "#include <fa/split_gradient.cuh>\n"
    got = run(backend, tmp_path, body, numbers, layout, before=before, block=64, fields=fields)
    k_item, q_item = 4 * 64 * 64 * 2 + 128, 4 * 32 * 64 * 2 + 8 * 32 + 128
    assert got[:5].tolist() == [5 * k_item, 3 * q_item, 3 * 32 * 64, k_item, q_item]
    scale = 2.0**10  # of the bound 3 * 7 + 5 = 26 to [2^14, 2^15)
    factors = [2.0**-9, scale, 2.0**-10 * scale, 2.0**-4 * 2.0**-15, 2.0**-3 / scale, 2.0**-5 / scale]
    assert f32(got[8:], 6).tolist() == factors
    assert f32(got[14:], 2)[1] == 1.5 and abs(f32(got[14:], 1)[0] - np.exp(-0.5)) < 1e-6
    rows = f32(got[64:], 16, 64)
    want = np.full((16, 64), np.nan, np.float32)
    want[:13, :59] = 0.5 * dq[:13, :59]
    assert np.array_equal(rows, want, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_splits_have_the_same_bits(causal: bool) -> None:
    """Of the deterministic form, whatever the multiprocessors and the schedule are; the parts are right for each number of splits."""
    problem = Problem.of(1, 6, 130, 64, 1, 200, "float32", causal)
    given = generate.inputs(problem, 42, ("Q", "K", "V", "dO"))
    given["O"], given["logsumexp"] = given["dO"], np.full(problem.shape("logsumexp"), 6, np.float32)
    split = find("split", "backward", True)

    def gradients(backend: Host, **tiles: int) -> list[np.ndarray[Any, Any]]:
        outputs = Bound(backend, backend.load(split, problem, tiles), problem, given).run()
        return [np.asarray(outputs[name]) for name in ("dQ", "dK", "dV")]

    wanted, alone = gradients(Host()), gradients(Host(), SPLITS=1)
    for other in (gradients(Host(5)), gradients(Host(3, sms=8))):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(wanted, other, strict=True))
    for splits in (4, 16):
        for one, several in zip(alone, gradients(Host(), SPLITS=splits), strict=True):
            np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-5 * float(np.abs(one).max()))
