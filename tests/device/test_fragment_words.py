"""The words of <fa/fragment.cuh>, <fa/softmax.cuh> and <fa/tf32.cuh>, against numpy on every backend found.

They are plain C++ over the words of test_mma_words.py, which are held to an H200 there. Tiles hold small integers, whose sums are
exact in any order, so all comparisons but those of softmax are of bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tile_words import conflicts
from word_kernel import TYPES, f32, integers, run

from harness.backends import Backend

BEFORE = "#include <fa/tf32.cuh>\nusing fa::uint32_t;\n"
WIDTHS = (32, 64, 96, 128)
HALVES = ("float16", "bfloat16")


def each_width(call: str, swizzled: str = "true, false") -> str:
    """A body that runs call for the width in args.heads_q and the layout in args.heads_kv: W and S are constants in it."""
    layouts = [s == "true" for s in swizzled.split(", ")]
    return "\n".join(
        f"    if (args.heads_q == {w} && args.heads_kv == {int(s)}) {{ "
        f"constexpr int W = {w}; constexpr bool S = {str(s).lower()}; {call} }}"
        for w in WIDTHS
        for s in layouts
    )


# -- where things stand -----------------------------------------------------------------------------------------------


def test_chunk_at_swizzle_and_step_16(backend: Backend, tmp_path: Path) -> None:
    """A permutation inside each row's lines; what ldmatrix reads of a swizzled tile meets no conflict; steps go where they say."""
    before = (
        BEFORE
        + """\
template <int W, bool S> __device__ void places(unsigned* out, int t) {
    for (int i = t; i < 16 * W / 8; i += 32) {
        const int row = i / (W / 8), chunk = i % (W / 8);
        out[2 * i] = fa::chunk_at<W, S>(row, chunk);
        out[2 * i + 1] = fa::step_16<W, S>(4096 + fa::chunk_at<W, S>(row, chunk % 2), chunk / 2) - 4096;
    }
    if (t < 16) out[1024 + t] = fa::swizzle<W>(t);
}
"""
    )
    for width in WIDTHS:
        for swizzled in (True, False):
            fields = {"heads_q": width, "heads_kv": int(swizzled)}
            got = run(backend, tmp_path, each_width("places<W, S>(out, t);"), before=before, fields=fields)
            at, stepped = got[: 4 * width].reshape(16, -1, 2).astype(int).transpose(2, 0, 1)
            assert np.array_equal(at, stepped)
            plain = 2 * width * np.arange(16)[:, None] + 16 * np.arange(width // 8)
            line = 128 if width % 64 == 0 else 64  # bytes of a row that are permuted among themselves
            assert np.array_equal(at // line, plain // line) and np.array_equal(np.sort(at, axis=1), plain)
            assert np.array_equal(at, plain) != swizzled
            turns = conflicts(at[:8].T // 4)
            assert turns == (1 if swizzled else 8 if width % 64 == 0 else 4)
            places = at[:, 0] % line // 16
            assert not swizzled or np.array_equal(got[1024:1040], places if width % 64 == 0 else places % 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("how", ["copy_async", "copy_sync"])
def test_tile_copy(backend: Backend, tmp_path: Path, how: str, dtype: str) -> None:
    """Memory to a tile of 40 rows: each element in its place, zero beyond the rows and the head dim, where memory holds NaN."""
    vec = 16 // np.dtype(TYPES[dtype]).itemsize
    call = f"{how}(smem, a, pitch, rows, args.head_dim{', fa::sign_bits<scalar>' if how == 'copy_sync' else ''})"
    before = (
        BEFORE
        + f"""\
template <int W, bool S> __device__ void bring(const scalar* a, int pitch, int rows, const fa::Args& args, scalar* out, int t) {{
    for (int i = t; i < 41 * W * int(sizeof(scalar)) / 4; i += 128) fa::dynamic_shared<unsigned>()[i] = 0xffffffffu;
    __syncthreads();
    const uint32_t smem = fa::smem_u32(fa::dynamic_shared());
    fa::TileCopy<scalar, 40, W, 128, S>::{call};
    fa::cp_async_commit_group();
    fa::cp_async_wait_group<0>();
    __syncthreads();
    for (int i = t; i < 41 * W; i += 128) {{
        const uint32_t at = fa::chunk_at<W * int(sizeof(scalar)) / 2, S>(i / W, i % W / {vec}) + i % W % {vec} * sizeof(scalar);
        out[i] = *reinterpret_cast<const scalar*>(fa::dynamic_shared() + at);
    }}
}}
"""
    )
    body = each_width("bring<W, S>(a, int(args.K.row), args.seq_kv, args, reinterpret_cast<scalar*>(out), t);")
    for i, width in enumerate(WIDTHS):
        for rows, head_dim in [(40, width), (100, width), (40, width - 5), (23, width - vec), (23, width), (1, 1), (0, width), (-7, width)]:
            pitch = -(-head_dim // vec) * vec
            a = np.full((max(rows, 1), pitch), np.nan).astype(TYPES[dtype])
            a[:, :head_dim] = integers(max(rows, 1), head_dim)
            fields = {"heads_q": width, "heads_kv": (i + rows) % 2, "head_dim": head_dim, "seq_kv": rows, "K": (0, 0, 0, pitch)}
            got = run(backend, tmp_path, body, a, dtype=dtype, block=128, shared=41 * 128 * 4, fields=fields, before=before)
            tile = got.view(TYPES[dtype])[: 41 * width].reshape(41, width).astype(float)
            want = np.zeros((40, width))
            there = max(0, min(rows, 40))
            want[:there, :head_dim] = a[:there, :head_dim].astype(float) * (-1 if how == "copy_sync" else 1)
            assert np.array_equal(tile[:40], want), (width, rows, head_dim)
            assert np.isnan(tile[40]).all()  # and nothing beyond the tile


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_apply_sign_and_clear(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """A tile times the sign of the scale, every bit of it: as it was, negated, or zero. clear makes every accumulator zero."""
    body = """\
    for (int i = t; i < 16 * 64; i += 64) fa::dynamic_shared<scalar>()[i] = a[i];
    __syncthreads();
    fa::TileCopy<scalar, 16, 64, 64>::apply_sign(fa::dynamic_shared<scalar>(), args.scale);
    if (args.scale > 0) __syncthreads();
    for (int i = t; i < 16 * 64; i += 64) reinterpret_cast<scalar*>(out)[i] = fa::dynamic_shared<scalar>()[i];
    float d[2][3][4];
    for (auto& x : d) for (auto& y : x) for (auto& z : y) z = 1.0f;
    fa::clear(d);
    bool zero = true;
    for (auto& x : d) for (auto& y : x) for (auto& z : y) zero = zero && __float_as_uint(z) == 0;
    out[2048 + t] = zero;"""
    a = integers(16, 64).astype(TYPES[dtype])
    for scale in (0.5, -0.5, 0.0):
        got = run(backend, tmp_path, body, a, dtype=dtype, block=64, shared=16 * 64 * 4, fields={"scale": scale}, before=BEFORE)
        want = a if scale > 0 else -a if scale < 0 else np.zeros_like(a)
        assert got.view(TYPES[dtype])[: 16 * 64].tobytes() == want.tobytes(), scale
        assert (got[2048:2112] == 1).all()


# -- products ---------------------------------------------------------------------------------------------------------

#: Puts tiles of 48 rows of a and 32 of b in shared memory, takes rows 16 to 47 of a, and writes accumulators by rows.
PRODUCT = (
    BEFORE
    + """\
template <int M, int N> __device__ void put(float* out, const float (&d)[M][N][4]) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i)
                out[(16 * m + i / 2 * 8 + fa::fragment_row()) * 8 * N + 8 * n + fa::fragment_column() + i % 2] = d[m][n][i];
}
template <int M, int N> __device__ void get(float (&d)[M][N][4], const float* from) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i)
                d[m][n][i] = from[(16 * m + i / 2 * 8 + fa::fragment_row()) * 8 * N + 8 * n + fa::fragment_column() + i % 2];
}
template <int W, bool S> __device__ void product(const scalar* a, const scalar* b, const float* p_from, float* out) {
    constexpr int wide = W * int(sizeof(scalar)) / 2;
    const uint32_t a_smem = fa::smem_u32(fa::dynamic_shared()), b_smem = a_smem + 48 * wide * 2;
    fa::TileCopy<scalar, 48, W, 32, S>::copy_sync(a_smem, a, W, 48, W);
    fa::TileCopy<scalar, 32, W, 32, S>::copy_sync(b_smem, b, W, 32, W);
    __syncwarp();
    float d[2][4][4], o[2][W / 8][4] = {};
    for (auto& x : d) for (auto& y : x) for (auto& z : y) z = 1000.0f;
    fa::OperandA<wide, 2, S, S> rows{fa::lane_of_a<wide, S>(a_smem, 16)};
    rows.load_registers();
    PRODUCTS
    put(out, d);
    put(out + 1024, o);
}
"""
)


def product(backend: Backend, folder: Path, products: str, layouts: str, width: int, swizzled: bool, dtype: str, *data: Any) -> Any:
    """1000 + A B^T (32 x 32) and P B (32 x width) of A (48 rows, the first 16 not used), B and P."""
    a, b, p = data
    before = PRODUCT.replace("PRODUCTS", products)
    body = each_width("product<W, S>(a, b, static_cast<const float*>(args.V.data), reinterpret_cast<float*>(out));", layouts)
    rows = np.zeros((1, 1, 256, 64), np.float32)
    rows.reshape(-1)[: p.size] = p.reshape(-1)
    body = body.replace("static_cast<const float*>(args.V.data)", "reinterpret_cast<const float*>(b + 32 * W)")
    both = np.concatenate([b.astype(TYPES[dtype]).reshape(-1).view(np.uint8), p.astype(np.float32).reshape(-1).view(np.uint8)])
    fields = {"heads_q": width, "heads_kv": int(swizzled)}
    shared = 80 * width * np.dtype(TYPES[dtype]).itemsize
    got = run(backend, folder, body, a.astype(TYPES[dtype]), both, dtype=dtype, shared=shared, fields=fields, before=before)
    return f32(got, 32, 32), f32(got[1024:], 32, width)


@pytest.mark.parametrize("dtype", HALVES)
def test_products(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """multiply_abt accumulates, operands in registers or loaded again; pack_a, which rounds, with multiply_pb or as multiply_pv."""
    products = """\
    fa::multiply_abt<scalar>(d, rows, fa::lane_of_b<wide, S>(b_smem));
    float p[2][4][4];
    get(p, p_from);
    uint32_t packed[2][2][4];
    fa::pack_a<scalar>(packed, p);
    if constexpr (S) fa::multiply_pb<scalar, wide, S>(o, packed, fa::lane_of_a<wide, S>(b_smem));
    else fa::multiply_pv<scalar, wide>(o, p, b_smem);"""
    for width in WIDTHS:
        for swizzled in (True, False):
            a, b, p = integers(48, width), integers(32, width, seed=1), integers(32, 32, seed=2) * (1 + 2.0**-6 + 2.0**-13)
            rounded = p.astype(np.float32).astype(TYPES[dtype]).astype(float)
            assert not np.array_equal(rounded, p)
            s, o = product(backend, tmp_path, products, "true, false", width, swizzled, dtype, a, b, p)
            assert np.array_equal(s, 1000 + a[16:] @ b.T), (width, swizzled)
            assert np.array_equal(o, rounded @ b), (width, swizzled)


def test_tf32_products(backend: Backend, tmp_path: Path) -> None:
    """Operands go to the nearest tf32 number: a hair below an integer is that integer, where cutting bits off would lose 2^-10."""
    products = """\
    uint32_t bits[4] = {__float_as_uint(0.99990f), __float_as_uint(-3.0004f), __float_as_uint(1e-30f), __float_as_uint(1.0f)};
    fa::round_operand<float>(bits);
    fa::multiply_abt<float>(d, rows, fa::lane_of_b<wide, S>(b_smem));
    float p[2][4][4];
    get(p, p_from);
    if constexpr (W % 64 == 0) fa::multiply_pb_tf32<W>(o, p, reinterpret_cast<const float*>(fa::dynamic_shared() + 48 * W * 4));
    else fa::multiply_pv<float, W>(o, p, b_smem);
    for (int i = 0; i < 4; ++i) out[8000 + i] = __uint_as_float(bits[i]);"""
    hair = 1 - 2.0**-13
    for width in WIDTHS:
        a, b, p = integers(48, width), integers(32, width, seed=1), integers(32, 32, seed=2)
        s, o = product(backend, tmp_path, products, "false", width, False, "float32", a * hair, b * hair, p * hair)
        assert np.array_equal(s, 1000 + a[16:] @ b.T), width
        assert np.array_equal(o, p @ b), width


# -- softmax ----------------------------------------------------------------------------------------------------------


def test_mask_scores(backend: Backend, tmp_path: Path) -> None:
    """-inf from the first key on that a query does not see, the others as they were: 32 queries from 7, keys 16 to 47."""
    body = """\
    float s[2][4][4];
    get(s, reinterpret_cast<const float*>(a));
    fa::mask_scores(s, args, 7 + fa::fragment_row(), 16);
    put(reinterpret_cast<float*>(out), s);"""
    a = integers(32, 32).astype(np.float32)
    before = PRODUCT.split("template <int W, bool S>")[0]
    for shift, seq_kv in [(0, 100), (-9, 100), (20, 41), (-60, 100), (100, 48), (100, 16)]:
        fields = {"causal_shift": shift, "seq_kv": seq_kv}
        got = f32(run(backend, tmp_path, body, a, causal=True, fields=fields, before=before), 32, 32)
        keys, queries = 16 + np.arange(32), 7 + np.arange(32)[:, None]
        assert np.array_equal(got, np.where(keys < np.minimum(seq_kv, queries + shift + 1), a, -np.inf)), (shift, seq_kv)


@pytest.mark.parametrize("lazy", [False, True])
def test_softmax(backend: Backend, tmp_path: Path, lazy: bool) -> None:
    """Three tiles of 32 keys: every P, the sums and what becomes of sums so far; rows without a key; maxima that need not be raised."""
    step = "step_lazily(s, o, scale_log2e, 3.0f)" if lazy else "step(s, o, scale_log2e)"
    body = f"""\
    const float scale_log2e = float(args.scale) * fa::log2e;
    fa::Softmax<2> softmax;
    float o[2][2][4] = {{}};
    float* to = reinterpret_cast<float*>(out);
    for (int tile = 0; tile < 3; ++tile) {{
        float s[2][4][4];
        get(s, reinterpret_cast<const float*>(a) + tile * 1024);
        softmax.{step};
        put(to + tile * 1024, s);
        for (auto& x : o) for (auto& y : x) for (auto& z : y) z += 1.0f;
    }}
    softmax.finish();
    put(to + 3072, o);
    for (int i = 0; i < 4; ++i) {{
        const int row = 16 * (i / 2) + i % 2 * 8 + fa::fragment_row();
        to[3584 + row] = softmax.row_sum[i / 2][i % 2], to[3616 + row] = softmax.row_max[i / 2][i % 2];
    }}"""
    scale = 0.25
    s = np.random.RandomState(3).randn(3, 32, 32) * 8
    s[0, 11] = s[0, 12, 4:] = s[:, 20] = -np.inf
    s[1] = np.minimum(s[1], s[0].max(1, keepdims=True))
    s[1, 5, 3] = s[0, 5].max() + (2 if lazy else 0.5)  # higher by 0.72 of a power of two: not worth raising
    s[2, 9] += 100
    before = PRODUCT.split("template <int W, bool S>")[0]
    got = run(backend, tmp_path, body, s.astype(np.float32), fields={"scale": scale}, before=before)
    high, factor = np.full(32, -1e30), np.zeros(32)
    raised = []
    for tile in range(3):
        top = s[tile].max(1)
        raised.append(not lazy or bool(((top - high) * scale * np.log2(np.e) > 3).any()))
        new = np.maximum(high, top) if raised[-1] else high
        factor = factor * np.exp((high - new) * scale) + 1
        high = new
        with np.errstate(under="ignore"):
            p = np.exp((s[tile] - high[:, None]) * scale)
        np.testing.assert_allclose(f32(got[tile * 1024 :], 32, 32), p, rtol=3e-5, atol=1e-30)
    assert raised == [True, not lazy, True]
    np.testing.assert_allclose(f32(got[3072:], 32, 16), np.repeat(factor[:, None], 16, 1), rtol=3e-5)
    np.testing.assert_array_equal(f32(got[3616:], 32), high.astype(np.float32))
    with np.errstate(under="ignore"):
        total = np.exp((s - high[:, None]) * scale).sum((0, 2))
    np.testing.assert_allclose(f32(got[3584:], 32), total, rtol=3e-5)
    assert f32(got[3584:], 32)[20] == 0
