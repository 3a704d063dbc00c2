"""The words of <fa/wmma_tile.cuh>, <fa/gradient.cuh> and <fa/epilogue.cuh>, and opaque_thread_id, against numpy on every backend found.

Products take small integers, whose sums are exact in any order, and what is rounded to 16 bit is rounded once: all comparisons but
those of softmax are of bits. The words of <fa/tf32.cuh> stand in test_fragment_words.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fragment_words import HALVES, WIDTHS, each_width
from word_kernel import TYPES, UNWRITTEN, f32, integers, run

from harness.backends import Backend, CompileError
from harness.backends.host.backend import Host

HAIR = 1 + 2.0**-6 + 2.0**-13  # times an integer: no 16-bit number, but a float

# -- warp.cuh -----------------------------------------------------------------------------------------------------------


def test_opaque_thread_id(backend: Backend, tmp_path: Path) -> None:
    """threadIdx.x, in every warp and in every turn of a loop with a barrier."""
    body = """\
    for (int i = 0; i < 3; ++i) {
        __syncthreads();
        out[96 * i + fa::opaque_thread_id()] = 1000 * i + fa::opaque_thread_id();
    }"""
    got = run(backend, tmp_path, body, block=96)
    assert got[:288].tolist() == [1000 * i + t for i in range(3) for t in range(96)]
    assert (got[288:] == UNWRITTEN).all()


# -- gradient.cuh -----------------------------------------------------------------------------------------------------

#: Two warps, that is `side`s, which take groups of 16 columns round-robin. move reads and writes accumulators by rows.
STRIDED = """\
#include <fa/epilogue.cuh>
#include <fa/gradient.cuh>
using fa::uint32_t;
template <int Stride, bool Put, class Float, int M, int N>
__device__ void move(Float* memory, int width, int side, float (&d)[M][N][4]) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i) {
                const int column = 16 * (side + n / 2 * Stride) + n % 2 * 8 + fa::fragment_column() + i % 2;
                Float& there = memory[(16 * m + i / 2 * 8 + fa::fragment_row()) * width + column];
                if constexpr (Put) there = d[m][n][i]; else d[m][n][i] = there;
            }
}
"""


def places(width: int, row: Any, chunk: Any) -> Any:
    """chunk_at as it stands in words: rows of 2 * width bytes, chunks permuted within a line by the row."""
    return 2 * width * row + 16 * (chunk ^ (row % 8 if width % 64 == 0 else row // 2 % 4))


#: A and B, 48 rows each, and P, 48 rows of 64, all swizzled. P's rows 16 to 47 are what pack_step and share_step make of two squares
#: of floats, each shared by one warp: the first in columns 32 to 63, the second before it.
PRODUCT = (
    STRIDED
    + """\
template <int W> __device__ void product(const scalar* a, const scalar* b, float* out, int which) {
    const int lane = fa::lane_id(), side = fa::warp_id();
    const uint32_t a_smem = fa::smem_u32(fa::dynamic_shared()), b_smem = a_smem + 96 * W, p_smem = b_smem + 96 * W;
    fa::TileCopy<scalar, 48, W, 64>::copy_sync(a_smem, a, W, 48, W);
    fa::TileCopy<scalar, 48, W, 64>::copy_sync(b_smem, b, W, 48, W);
    float p[2][4][4];
    move<1, false>(reinterpret_cast<const float*>(b + 48 * W) + 1024 * side, 32, 0, p);
    uint32_t packed[2][2][4];
    for (int k = 0; k < 2; ++k) {
        fa::pack_step<scalar>(packed[k], p, k);
        fa::share_step<64>(fa::dynamic_shared() + 192 * W, packed[k], fa::lane_of_share<64>(16, side == 0 ? 4 : 0, lane), k);
    }
    __syncthreads();
    const uint32_t b_lane = fa::lane_of_a_at<W>(b_smem, 0, side, lane), b_16 = fa::lane_of_a_at<W>(b_smem, 16, side, lane);
    const uint32_t a_lane = fa::lane_of_a_at<W>(a_smem, 0, 0, lane), ab_lane = fa::lane_of_b_at<W>(a_smem, 16 * side, 0, lane);
    float d[2][W / 16][4], s[2][2][4];
    for (auto& x : d) for (auto& y : x) for (auto& z : y) z = 1000.0f;
    for (auto& x : s) for (auto& y : x) for (auto& z : y) z = 1000.0f;
    if (which == 0) fa::multiply_abt<scalar>(s, fa::OperandA<W, 2, false>{a_lane, fa::rows_16<W>}, ab_lane, 112 * W);  // 8 rows into B
    if (which == 1) fa::multiply_strided<scalar, W, 2>(d, packed[1], b_lane, 2 * fa::rows_16<W>);
    if (which == 2) for (int k = 0; k < 2; ++k) fa::multiply_strided<scalar, W, 2>(d, packed[k], b_16, k * fa::rows_16<W>);
    if (which == 3)
        fa::multiply_ab<scalar, 2, 64, W, 2>(d, fa::lane_of_a_at<64>(p_smem, 0, 0, lane), fa::rows_16<64>, b_lane, fa::rows_16<W>);
    if (which == 4) fa::multiply_atb<scalar, 2, 64, W, 2>(d, fa::lane_of_b_at<64>(p_smem, 16, 2, lane), b_lane);
    if (which == 0) move<2, true>(out, 32, side, s);
    else move<2, true>(out, W, side, d);
}
"""
)


@pytest.mark.parametrize("dtype", HALVES)
def test_products(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Onto what was there: rows 16 to 47 of A by rows 8 to 39 of B, and P, from registers, shared or transposed, by 16 or 32 rows of B."""
    body = each_width("product<W>(a, b, reinterpret_cast<float*>(out), args.seq_kv);", "true")
    for width in WIDTHS:
        a, b, p = integers(48, width), integers(48, width, seed=1), (integers(2, 32, 32, seed=2) * HAIR).astype(np.float32)
        q = p.astype(TYPES[dtype]).astype(float)
        assert not np.array_equal(q, p)
        both = np.concatenate([b.astype(TYPES[dtype]).reshape(-1).view(np.uint8), p.reshape(-1).view(np.uint8)])
        own = np.arange(width) // 16 % 2 == 0  # columns of the first warp, whose P is the first square where it comes from registers
        wants = [a[16:] @ b[8:40].T, np.where(own, *(q[:, :, 16:] @ b[32:])), np.where(own, *(q @ b[16:])), q[1] @ b[16:], q[0].T @ b[:32]]
        for which, want in enumerate(wants):
            fields = {"heads_q": width, "heads_kv": 1, "seq_kv": which}
            more: dict[str, Any] = {"dtype": dtype, "block": 64, "shared": 192 * width + 96 * 64, "fields": fields, "before": PRODUCT}
            got = run(backend, tmp_path, body, a.astype(TYPES[dtype]), both, **more)
            assert np.array_equal(f32(got, *want.shape), 1000 + want), (width, which)


@pytest.mark.parametrize("dtype", HALVES)
def test_share_step(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """All of a tile of 40 rows but what is shared keeps its poison: rows 8 to 39, columns from a power of 2, or from 0, on."""
    before = (
        STRIDED
        + """\
template <int W, int Chunk> __device__ void share(const float* a, unsigned* out, int t) {
    for (int i = t; i < 20 * W; i += 32) fa::dynamic_shared<unsigned>()[i] = 0xffffffffu;
    __syncwarp();
    float p[2][Chunk ? Chunk : W / 8][4];
    move<1, false>(a, Chunk ? 8 * Chunk : W, 0, p);
    for (int k = 0; k < (Chunk ? Chunk / 2 : W / 16); ++k) {
        uint32_t packed[2][4];
        fa::pack_step<scalar>(packed, p, k);
        fa::share_step<W>(fa::dynamic_shared(), packed, fa::lane_of_share<W>(8, Chunk, t), k);
    }
    __syncwarp();
    for (int i = t; i < 20 * W; i += 32) out[i] = fa::dynamic_shared<unsigned>()[i];
}
"""
    )
    for width, chunk in [(32, 0), (32, 2), (64, 0), (64, 4), (128, 0), (128, 8), (128, 4)]:
        p = (integers(32, 8 * chunk or width) * HAIR).astype(np.float32)
        body = f"    share<{width}, {chunk}>(reinterpret_cast<const float*>(a), out, t);"
        got = run(backend, tmp_path, body, p, dtype=dtype, shared=80 * width, before=before)
        at = places(width, np.arange(40)[:, None], np.arange(width // 8)) // 2
        tile = got.view(TYPES[dtype])[at[:, :, None] + np.arange(8)].reshape(40, width).astype(float)
        want = np.full((40, width), np.nan)
        want[8:, 8 * chunk : 8 * chunk + p.shape[1]] = p.astype(TYPES[dtype]).astype(float)
        assert np.array_equal(tile, want, equal_nan=True), (width, chunk)


@pytest.mark.parametrize("dtype", HALVES)
def test_round_to_tile_and_write_tile(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Scaled, rounded once, and in memory only the rows and columns that are there: nothing written behind them."""
    before = (
        STRIDED
        + """\
template <int W> __device__ void through(const fa::Args& args, const float* a, scalar* out, int t) {
    for (int i = t; i < 24 * W; i += 64) fa::dynamic_shared<unsigned>()[i] = 0;
    __syncthreads();
    float d[2][W / 16][4];
    move<2, false>(a, W, fa::warp_id(), d);
    fa::round_to_tile<scalar, W, 2>(fa::dynamic_shared(), d, 0.3f, 16, fa::warp_id());
    __syncthreads();
    fa::write_tile<scalar, 48, W, 64>(out, args.K.row, args.seq_kv, args.head_dim, fa::dynamic_shared());
}
"""
    )
    body = each_width("through<W>(args, reinterpret_cast<const float*>(a), reinterpret_cast<scalar*>(out), t);", "true")
    for width in WIDTHS:
        d = (integers(32, width) * HAIR).astype(np.float32)
        full = np.zeros((48, width))
        full[16:] = (d * np.float32(0.3)).astype(TYPES[dtype])
        for rows, head_dim in [(48, width), (41, width - 3), (100, width - 8), (17, 1), (0, width), (-5, width)]:
            pitch = -(-head_dim // 8) * 8 + 8
            fields = {"heads_q": width, "heads_kv": 1, "seq_kv": rows, "head_dim": head_dim, "K": (0, 0, 0, pitch)}
            got = run(backend, tmp_path, body, d, dtype=dtype, block=64, shared=96 * width, fields=fields, before=before)
            out = got.view(TYPES[dtype])[: 60 * pitch].reshape(60, pitch).astype(float)
            want = np.full((60, pitch), np.nan)
            want[: max(0, min(rows, 48)), :head_dim] = full[: max(0, rows), :head_dim]
            assert np.array_equal(out, want, equal_nan=True), (width, rows, head_dim)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_delta_of(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """dO · O over the columns that there are, in every lane of the row; 0 beyond the last query."""
    o, d_o = integers(16, 64, seed=1), integers(16, 64, seed=2)
    body = """\
    fa::Args own = args;
    own.O = args.Q, own.dO = args.K;
    reinterpret_cast<float*>(out)[t] = fa::delta_of<scalar, 64>(own, 0, 0, t / 8, t % 8);"""
    for head_dim in (64, 59):
        of = {"dtype": dtype, "block": 128, "fields": {"seq_q": 13, "head_dim": head_dim}, "before": "#include <fa/gradient.cuh>"}
        got = f32(run(backend, tmp_path, body, o.astype(TYPES[dtype]), d_o.astype(TYPES[dtype]), **of), 16, 8)
        want = (o * d_o)[:, :head_dim].sum(1) * (np.arange(16) < 13)
        assert np.array_equal(got, np.repeat(want[:, None], 8, 1)), head_dim


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_store_gradient_rows(backend: Backend, tmp_path: Path, dtype: str, terms: int) -> None:
    """The sum of what lies in the layout of the accumulators, scaled, rounded once: the rows and columns that there are, and nothing behind them."""
    parts = (integers(terms, 16, 64) * HAIR).astype(np.float32)
    layout = parts.reshape(terms, 2, 8, 8, 4, 2).transpose(0, 3, 2, 4, 1, 5)  # [term][chunk][row][lane][half][2]
    dq = functools.reduce(np.add, parts)
    body = f"""\
    fa::Args own = args;
    own.dQ = args.O;
    const float* from = reinterpret_cast<const float*>(a) + (t % 8 * 8 + t / 8) * 16;
    fa::store_gradient_rows<scalar>(own.dQ, own.seq_q, own.head_dim, 0, 0, t / 8, t % 8, from, 0.3f, {terms}, 1024);"""
    for rows, head_dim in ((16, 64), (13, 59), (8, 1), (3, 8)):
        of = {"dtype": dtype, "block": 64, "fields": {"seq_q": rows, "head_dim": head_dim}, "before": "#include <fa/gradient.cuh>"}
        got = run(backend, tmp_path, body, layout, **of).view(TYPES[dtype])[: 20 * 64].reshape(20, 64).astype(float)
        want = np.full((20, 64), np.nan)
        want[:rows, :head_dim] = (dq * np.float32(0.3)).astype(TYPES[dtype]).astype(float)[:rows, :head_dim]
        assert np.array_equal(got, want, equal_nan=True), (rows, head_dim)


def test_clear_hidden(backend: Backend, tmp_path: Path) -> None:
    """P of the pairs that the shifted mask hides, and of keys beyond the last, is 0; the others stay."""
    body = """\
    float p[2][3][4];
    for (int i = 0; i < 24; ++i) p[i / 12][i / 4 % 3][i % 4] = i + 1;
    fa::clear_hidden(p, args, 2 * (t % 4), t / 4);
    for (int i = 0; i < 24; ++i) reinterpret_cast<float*>(out)[24 * t + i] = p[i / 12][i / 4 % 3][i % 4];"""
    of = {"causal": True, "fields": {"seq_kv": 21, "causal_shift": 3}, "before": "#include <fa/gradient.cuh>"}
    got = f32(run(backend, tmp_path, body, **of), 32, 2, 3, 2, 2)
    t, m, n, half, e = np.indices(got.shape)
    key, query = t // 4 + 16 * m + 8 * half, 2 * (t % 4) + 8 * n + e
    number = (12 * m + 4 * n + 2 * half + e + 1).astype(np.float32)
    assert np.array_equal(got, np.where((key <= query + 3) & (key < 21), number, 0))


@pytest.mark.parametrize(("through_smem", "dtype"), [(False, "float32"), *((way, half) for way in (False, True) for half in HALVES)])
def test_store_output(backend: Backend, tmp_path: Path, through_smem: bool, dtype: str) -> None:
    """O / row_sum rounded once and the logsumexp, of two warps with 32 queries each: what the tensors have, and nothing behind it.

    Sums are powers of two, so that O / row_sum is exact before it is rounded; rows without a key get 0 and -inf.
    """
    word = "fa::store_output_smem<scalar, W>" if through_smem else "fa::store_output<scalar>"
    before = (
        STRIDED
        + f"""\
template <int W> __device__ void store(const fa::Args& args, const float* a, int t) {{
    for (int i = t; i < 32 * W; i += 64) fa::dynamic_shared<unsigned>()[i] = 0xffffffffu;
    __syncthreads();
    float d[2][W / 8][4];
    const int warp_row = 32 * fa::warp_id();
    move<1, false>(a + warp_row * W, W, 0, d);
    fa::Softmax<2> softmax;
    for (int i = 0; i < 4; ++i) {{
        const int row = warp_row + 16 * (i / 2) + 8 * (i % 2) + fa::fragment_row();
        softmax.row_max[i / 2][i % 2] = row, softmax.row_sum[i / 2][i % 2] = row % 7 == 3 ? 0 : exp2f(row % 5 - 2);
    }}
    {word}(args, 0, 0, 8, warp_row, args.seq_q, d, softmax, 0.25f);
}}
"""
    )
    out = """\
    fa::Args to = args;
    to.O.data = reinterpret_cast<char*>(out) - 8 * args.K.row * sizeof(scalar), to.O.row = args.K.row;
    to.logsumexp.data = reinterpret_cast<float*>(out + 7900) - 8, to.O.batch = to.O.head = to.logsumexp.batch = to.logsumexp.head = 0;
    to.logsumexp.row = 1;
"""
    body = out + each_width("store<W>(to, reinterpret_cast<const float*>(a), t);", "true")
    row = np.arange(64)
    total = np.where(row % 7 == 3, 0.0, 2.0 ** (row % 5 - 2))
    with np.errstate(divide="ignore"):
        inverse, logsumexp = np.where(total > 0, 1 / total, 0), np.where(total > 0, row * 0.25 + np.log(total), -np.inf)
    for width in WIDTHS[:3] if dtype == "float32" else WIDTHS:  # 66 rows have room in the output
        d = (integers(64, width) * HAIR).astype(np.float32)
        full = (d * inverse[:, None].astype(np.float32)).astype(TYPES[dtype]).astype(float)
        for rows, head_dim in [(64, width), (41, width - 3), (64, width - 8), (32, width), (17, 1)]:
            pitch = -(-head_dim // 8) * 8 + 8
            fields = {"heads_q": width, "heads_kv": 1, "seq_q": 8 + rows, "head_dim": head_dim, "K": (0, 0, 0, pitch)}
            more: dict[str, Any] = {"dtype": dtype, "block": 64, "shared": 128 * width, "fields": fields, "before": before}
            got = run(backend, tmp_path, body, d, **more)
            stored = got.view(TYPES[dtype])[: 66 * pitch].reshape(66, pitch).astype(float)
            want = np.full((66, pitch), np.nan)
            want[:rows, :head_dim] = full[:rows, :head_dim]
            assert np.array_equal(stored, want, equal_nan=True), (width, rows, head_dim)
            np.testing.assert_allclose(f32(got[7900:], rows), logsumexp[:rows], rtol=1e-6)
            assert (got[7900 + rows : 7900 + 66] == UNWRITTEN).all()


# -- wmma_tile.cuh ----------------------------------------------------------------------------------------------------

WMMA = "#include <fa/wmma_tile.cuh>\n"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [64, 128])
def test_row_copy(backend: Backend, tmp_path: Path, width: int, dtype: str) -> None:
    """64 rows by 64 threads: each element in its place, its sign turned, zero beyond the rows and the head dim, where memory holds NaN."""
    body = f"""\
    for (int i = t; i < 65 * {width} / 2; i += 64) fa::dynamic_shared<unsigned>()[i] = {UNWRITTEN}u;
    __syncthreads();
    fa::RowCopy<scalar, 64, {width}, 64>::copy_sync(fa::dynamic_shared<scalar>(), a, int(args.K.row), args.seq_kv, args.head_dim,
                                                    args.heads_q);
    __syncthreads();
    for (int i = t; i < 65 * {width} / 2; i += 64) out[i] = fa::dynamic_shared<unsigned>()[i];"""
    for i, (rows, head_dim) in enumerate(
        [(64, width), (100, width - 5), (41, width - 8), (64, width // 2 + 1), (1, 1), (0, width), (-7, 8)]
    ):
        pitch = -(-head_dim // 8) * 8
        a = np.full((100, pitch), np.nan).astype(TYPES[dtype])
        there = max(0, rows)
        a[:there, :head_dim] = integers(there, head_dim, seed=i)
        fields = {"seq_kv": rows, "head_dim": head_dim, "K": (0, 0, 0, pitch), "heads_q": -0x7FFF8000 if i % 2 else 0}  # 0x80008000
        got = run(backend, tmp_path, body, a, dtype=dtype, block=64, shared=130 * width, fields=fields, before=WMMA)
        tile = got.view(TYPES[dtype])[: 65 * width].reshape(65, width).astype(float)
        want = np.zeros((64, width))
        want[:there, :head_dim] = a[: min(there, 64), :head_dim].astype(float) * (-1 if i % 2 else 1)
        assert np.array_equal(tile[:64], want), (rows, head_dim)
        assert np.isnan(tile[64]).all()


@pytest.mark.parametrize(("dtype", "keys", "causal"), [("float16", 64, True), ("bfloat16", 32, True), ("float16", 32, False)])
def test_warp_softmax(backend: Backend, tmp_path: Path, dtype: str, keys: int, causal: bool) -> None:
    """Three tiles: every P, what becomes of sums so far, 1 / sum and logsumexp; ragged keys, rows without a key, 13 rows of 16.

    P is rounded to 16 bit (half a unit in the last place, and of float16's smallest step). The arguments of exp2 are below 2^7, so
    float32 has them to 2^-17: 1e-5 of a power of two, to which come 2 ulp; what is smaller than 1e-30 may be flushed to 0.
    """
    body = f"""\
    constexpr int Keys = {keys};
    float* s = fa::dynamic_shared<float>(), *keep = s + 16 * Keys, *to = reinterpret_cast<float*>(out);
    scalar* p = reinterpret_cast<scalar*>(keep + 256);
    fa::WarpSoftmax<scalar, Keys> softmax;
    softmax.clear();
    for (int tile = 0; tile < 3; ++tile) {{
        for (int i = t; i < 16 * Keys; i += 32) s[i] = reinterpret_cast<const float*>(a)[tile * 16 * Keys + i];
        __syncwarp();
        softmax.update(p, keep, s, float(args.scale) * fa::log2e, args, 7, tile * Keys);
        __syncwarp();
        for (int i = t; i < 16 * Keys; i += 32) to[tile * 16 * Keys + i] = fa::widen(p[i]);
        for (int i = t; i < 256; i += 32) to[4096 + tile * 256 + i] = keep[i];
        __syncwarp();
    }}
    softmax.finish(keep, to + 6000, 13, float(args.scale));
    __syncwarp();
    for (int i = t; i < 256; i += 32) to[5000 + i] = keep[i];"""
    s = np.random.RandomState(3).randn(3, 16, keys).astype(np.float32) * 8
    s[2, 9] += 100
    scale, rounded = 0.25, {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for shift, seq_kv in [(300, 300), (keys, 300), (-12, 300), (300, keys + 9), (20, 2 * keys), (-100, 300)]:
        fields = {"causal_shift": shift, "seq_kv": seq_kv, "scale": scale}
        got = run(backend, tmp_path, body, s, dtype=dtype, causal=causal, shared=96 * keys + 1024, fields=fields, before=WMMA)
        key, query = np.arange(3 * keys).reshape(3, 1, keys), 7 + np.arange(16)[:, None]
        seen = (key < seq_kv) & ((key <= query + shift) | (not causal))
        high, total, keep = np.full(16, -3.402823466e38), np.zeros(16), np.zeros((3, 16))
        with np.errstate(under="ignore", divide="ignore"):
            for tile in range(3):
                new = np.maximum(high, np.where(seen[tile], s[tile], high.min()).max(1))
                keep[tile] = np.exp((high - new) * scale)
                high = new
                p = np.where(seen[tile], np.exp(np.minimum((s[tile] - high[:, None]) * scale, 0)), 0)
                total = total * keep[tile] + p.sum(1)
                answer = f32(got[tile * 16 * keys :], 16, keys)
                np.testing.assert_allclose(answer, p, rtol=rounded + 3e-5, atol=2.0**-25 if dtype == "float16" else 1e-30)
            np.testing.assert_allclose(f32(got[4096:], 3, 16, 16), np.repeat(keep[:, :, None], 16, 2), rtol=3e-5, atol=1e-30)
            inverse, logsumexp = np.where(total > 0, 1 / total, 0), np.where(total > 0, high * scale + np.log(total), -np.inf)
        np.testing.assert_allclose(f32(got[5000:], 16, 16), np.repeat(inverse[:, None], 16, 1), rtol=3e-5)
        np.testing.assert_allclose(f32(got[6000:], 13), logsumexp[:13], rtol=1e-6, atol=3e-5)
        assert (got[6013:6016] == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_scale_rows_and_store_rows(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Each row of four fragments times its own factor, rounded once, to the rows and columns that are there, and nowhere else."""
    body = """\
    float* in = fa::dynamic_shared<float>(), *factor = in + 16 * 64, *space = factor + 256;
    for (int i = t; i < 16 * 64 + 256; i += 32) in[i] = reinterpret_cast<const float*>(a)[i];
    __syncwarp();
    fa::WmmaAccumulator o[4];
    for (int c = 0; c < 4; ++c) fa::wmma_load_c_row(o[c], in + 16 * c, 64);
    fa::scale_rows(o, factor);
    fa::store_rows(reinterpret_cast<scalar*>(out), int(args.K.row), args.seq_q, args.head_dim, o, space);"""
    o = (integers(16, 64) * HAIR).astype(np.float32)
    factor = np.random.RandomState(4).rand(16, 1).astype(np.float32) + 0.5
    given = np.concatenate([o.reshape(-1), np.repeat(factor, 16, 1).reshape(-1)])
    full = (o * factor).astype(TYPES[dtype]).astype(float)
    for rows, head_dim in [(16, 64), (13, 59), (16, 33), (5, 32), (9, 16), (1, 1), (0, 64), (-3, 64), (40, 56)]:
        pitch = -(-head_dim // 8) * 8 + 8
        fields = {"seq_q": rows, "head_dim": head_dim, "K": (0, 0, 0, pitch)}
        got = run(backend, tmp_path, body, given, dtype=dtype, shared=4 * (1024 + 256 + 512), fields=fields, before=WMMA)
        want = np.full((20, pitch), np.nan)
        want[: max(0, min(rows, 16)), :head_dim] = full[: max(0, rows), :head_dim]
        out = got.view(TYPES[dtype])[: 20 * pitch].reshape(20, pitch).astype(float)
        assert np.array_equal(out, want, equal_nan=True), (rows, head_dim)


def test_wmma_of_other_types_does_not_compile(tmp_path: Path) -> None:
    """On the CPU as on a GPU, whose wmma.mma has none of float32: no product would be a barrier only."""
    body = "    fa::WmmaA<float> left; fa::WmmaBRow<float> right; fa::WmmaAccumulator sum; fa::wmma_mma(sum, left, right);"
    with pytest.raises(CompileError, match="static assertion failed"):
        run(Host(), tmp_path, body, before="#include <fa/wmma.cuh>")
