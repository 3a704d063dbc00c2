"""The words for numbers of 8 bits, against numpy and ml_dtypes on every backend; products in the tensor core's arithmetic, to the bit.

experiments/fp8/golden.py asks a GPU for a million products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopper_kernel import bound, needs_hopper, with_fields
from test_mma_words import tensor_core
from test_words import BITS, COUNT, X, run_word
from word_kernel import f32, integers, run

from harness.backends import Backend

FORMATS: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MOST = {"e4m3": 448, "e5m2": 57344}
LEAST = {"e4m3": -6, "e5m2": -14}
NARROWED = {"e4m3": "fa::cvt_rn_satfinite_e4m3x2_f32", "e5m2": "fa::cvt_rn_satfinite_e5m2x2_f32"}
WIDENED = {"e4m3": "fa::cvt_rn_f16x2_e4m3x2", "e5m2": "fa::cvt_rn_f16x2_e5m2x2"}
MMA = {"e4m3": "fa::mma_m16n8k32_e4m3", "e5m2": "fa::mma_m16n8k32_e5m2"}
BEFORE = "#include <fa/float8.cuh>\nusing fa::uint32_t;\nusing fa::uint16_t;\nusing fa::uint8_t;"


def saturated(name: str, x: Any) -> Any:
    """The bytes of float32 numbers, those beyond the largest as that one; NaN is 0x7f."""
    with np.errstate(invalid="ignore"):
        made = np.clip(x, -MOST[name], MOST[name]).astype(FORMATS[name]).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, made).astype(np.uint32)


@pytest.mark.parametrize("name", FORMATS)
def test_conversions(name: str, backend: Backend, tmp_path: Path) -> None:
    """Rounded to nearest even, saturated; both places of a pair, one number and four."""
    needs_hopper(backend)
    pair = f"y = {NARROWED[name]}(x, __uint_as_float(in[i / 2 * 2]));"
    mine, other = saturated(name, X), saturated(name, X[np.arange(COUNT) // 2 * 2])
    assert np.array_equal(run_word(backend, tmp_path, pair, BITS, BEFORE), mine << 8 | other)
    one = f"y = fa::narrow<fa::float8_{name}>(x).bits;"
    assert np.array_equal(run_word(backend, tmp_path, one, BITS, BEFORE), mine)
    four = (
        "const unsigned* at = in + i / 4 * 4; auto of = [&](int j) { return __uint_as_float(at[j]); };"
        f"y = fa::pack_four<fa::float8_{name}>(of(0), of(1), of(2), of(3));"
    )
    wanted = mine.reshape(-1, 4).astype(np.uint8).view(np.uint32).repeat(4)
    assert np.array_equal(run_word(backend, tmp_path, four, BITS, BEFORE), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_widening(name: str, backend: Backend, tmp_path: Path) -> None:
    """Every byte, as float16 in both places and as float32."""
    needs_hopper(backend)
    byte = np.arange(COUNT) % 256
    values = byte.astype(np.uint8).view(FORMATS[name])
    half = values.astype(np.float16)
    bits = np.where(np.isnan(half), 0x7FFF, half.view(np.uint16)).astype(np.uint32)
    both = f"y = {WIDENED[name]}(uint16_t(i % 256 << 8 | (i + 1) % 256));"
    assert np.array_equal(run_word(backend, tmp_path, both, BITS, BEFORE), bits << 16 | np.roll(bits, -1))
    one = f"y = __float_as_uint(fa::widen(fa::float8_{name}{{uint8_t(i)}}));"
    got = run_word(backend, tmp_path, one, BITS, BEFORE).view(np.float32)
    assert np.array_equal(got, values.astype(np.float32), equal_nan=True)


def operands(name: str, family: str, rows: int, columns: int, k: int) -> tuple[Any, Any, Any]:
    """A (rows, k), B (k, columns) of a format and what is added to, float32: small integers; normal numbers; of many exponents; subnormal C."""
    if family == "integers":
        small = (integers(rows, k), integers(k, columns, seed=1))
        return *(x.astype(FORMATS[name]) for x in small), np.zeros((rows, columns), np.float32)  # type: ignore[return-value]
    draw = np.random.RandomState(5)
    a, b, c = (draw.randn(*shape) for shape in ((rows, k), (k, columns), (rows, columns)))
    if family == "wide":
        a, b = (np.ldexp(x, draw.randint(LEAST[name] - 4, 6, x.shape)) * (draw.rand(*x.shape) < 0.8) for x in (a, b))
        c = np.ldexp(c, draw.randint(-30, 12, c.shape))
    elif family == "subnormal":
        a[::2], c = 0, np.ldexp(c, -135)
    return a.astype(FORMATS[name]), b.astype(FORMATS[name]), c.astype(np.float32)


FRAGMENTS = """\
    const int g = t / 4, f = 4 * (t % 4);
    const unsigned char *a8 = reinterpret_cast<const unsigned char*>(a), *b8 = reinterpret_cast<const unsigned char*>(b);
    auto of_a = [&](int row, int column) {{ return *reinterpret_cast<const uint32_t*>(a8 + row * 32 + column); }};
    auto of_b = [&](int row) {{ return *reinterpret_cast<const uint32_t*>(b8 + g * 32 + row); }};  // b is given by columns
    const float* c = reinterpret_cast<const float*>(a8 + 512);
    uint32_t a_reg[4] = {{of_a(g, f), of_a(g + 8, f), of_a(g, f + 16), of_a(g + 8, f + 16)}};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = c[(g + i / 2 * 8) * 8 + t % 4 * 2 + i % 2];
    {mma}(d, a_reg, of_b(f), of_b(f + 16));
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = __float_as_uint(d[i]);"""


@pytest.mark.parametrize("family", ["integers", "normal", "wide", "subnormal"])
@pytest.mark.parametrize("name", FORMATS)
def test_mma(name: str, family: str, backend: Backend, tmp_path: Path) -> None:
    """sm_90's mma.sync of 8 bits: float16's, of elements 4 i and 4 i + 1 of K, then of the others; C is added in float32, rounded."""
    needs_hopper(backend)
    a, b, c = operands(name, family, 16, 8, 32)
    given = np.concatenate([a.reshape(-1).view(np.uint8), c.reshape(-1).view(np.uint8)])
    got = f32(
        run(backend, tmp_path, FRAGMENTS.format(mma=MMA[name]), given, np.ascontiguousarray(b.T).view(np.uint8), before=BEFORE), 16, 8
    )
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if family == "integers":
        assert np.array_equal(got, wide_a @ wide_b)
    product = np.zeros((16, 8))
    for part in (np.arange(32) % 4 < 2, np.arange(32) % 4 > 1):
        product = tensor_core(wide_a[:, part], wide_b[part], product, "float16")
    wanted = c + product.astype(np.float32)
    assert np.array_equal(got, wanted), f"{(got != wanted).sum()} of 128 elements differ from the model"


WIDTHS = (32, 96, 256)
#: D (64, N) = C + A (64, 128) B (128, N) by four steps of 32, C a float32 for all. A: rows of Q. B by columns: rows of K.
PRODUCT = """\
#include <fa/wgmma_float8.cuh>
using byte_type = fa::float8_{name};
template <int N, bool REGISTERS> __device__ void product(const fa::Args& args, uint64_t a, uint64_t b) {{
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, four = t % 4 * 4;
    const unsigned char* q = static_cast<const unsigned char*>(args.Q.data);
    float d[N / 2];
    uint32_t a_reg[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
            a_reg[step][i] = *reinterpret_cast<const uint32_t*>(q + (row + i % 2 * 8) * 128 + 32 * step + four + i / 2 * 16);
    for (int i = 0; i < N / 2; ++i) d[i] = args.causal_shift / 8.0f;
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {{
        const uint64_t b_step = fa::descriptor_advance(b, step * 32);
        if (REGISTERS) fa::wgmma_rs<byte_type>(d, a_reg[step], b_step, step > 0 || args.causal_shift);
        else fa::wgmma_ss<byte_type>(d, fa::descriptor_advance(a, step * 32), b_step, step > 0 || args.causal_shift);
    }}
    fa::wgmma_commit();
    fa::wgmma_wait<0>(d, a_reg);
    float* out = static_cast<float*>(args.O.data);
    for (int i = 0; i < N / 2; ++i) out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}}
template <int N> __device__ void products(const fa::Args& args, uint64_t a, uint64_t b) {{
    if (args.head_dim == 0) product<N, false>(args, a, b);
    else product<N, true>(args, a, b);
}}
extern "C" __global__ void forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map,
                                   const __grid_constant__ fa::TensorMap k_map) {{
    unsigned char* q_smem = fa::dynamic_shared_1024();
    unsigned char* k_smem = q_smem + 8192;
    uint64_t* full = reinterpret_cast<uint64_t*>(k_smem + 32768);
    if (threadIdx.x == 0) {{
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, 8192 + 32768);
        fa::tma_load_4d(q_smem, &q_map, full, 0, 0, 0, 0);
        fa::tma_load_4d(k_smem, &k_map, full, 0, 0, 0, 0);
    }}
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    const uint64_t a = fa::smem_descriptor_k_major(q_smem), b = fa::smem_descriptor_k_major(k_smem);
    if (args.seq_q == 32) products<32>(args, a, b);
    if (args.seq_q == 96) products<96>(args, a, b);
    if (args.seq_q == 256) products<256>(args, a, b);
}}
"""
MAPS: dict[str, tuple[str, list[int], int]] = {"q": ("Q", [64, 64, 1, 1], 128), "k": ("K", [64, 256, 1, 1], 128)}


def exponents(x: Any, least: int) -> Any:
    """Of each element; subnormal ones have the smallest normal number's, zeros none."""
    return np.where(x == 0, -400, np.maximum(np.frexp(x)[1] - 1, least))


def tensor_core_8(a: Any, b: Any, c: Any, least: int) -> Any:
    """c + a b by one wgmma of 8 bits (MMA-Sim, arXiv 2511.10909): float64 (M, 32), (32, N), (M, N) -> (M, N).

    Terms are aligned to the largest exponent and cut off 13 bits behind the point; 13 bits behind the point of their sum are kept.
    """
    of_products = exponents(a, least)[:, :, None] + exponents(b, least)[None]
    unit = np.ldexp(1.0, np.maximum(of_products.max(1), exponents(c, -126)) - 13)
    total = (np.trunc(a[:, :, None] * b[None] / unit[:, None]).sum(1) + np.trunc(c / unit)) * unit
    last = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - 13)
    return np.trunc(total / last) * last


@pytest.mark.parametrize("family", ["integers", "normal", "wide"])
@pytest.mark.parametrize("name", FORMATS)
def test_wgmma(name: str, family: str, backend: Backend, tmp_path: Path) -> None:
    """Operands from shared memory and from registers, a step after the other; not what a float32 sum would give."""
    a, b, _ = operands(name, family, 64, 256, 128)
    inputs = {"Q": np.ascontiguousarray(a).view(ml_dtypes.bfloat16), "K": np.ascontiguousarray(b.T).view(ml_dtypes.bfloat16)}
    kernel = bound(backend, tmp_path, PRODUCT.format(name=name), MAPS, inputs, shared=8192 + 32768 + 64)
    for i, n in enumerate(WIDTHS):
        for form in range(2):
            shift = (i + form) % 3
            got = with_fields(kernel, seq_q=n, head_dim=form, causal_shift=shift)[: 256 * n].view(np.float32).reshape(64, n)
            wanted = np.full((64, n), shift / 8.0)
            for k in range(0, 128, 32):
                wanted = tensor_core_8(a[:, k : k + 32].astype(np.float64), b[k : k + 32, :n].astype(np.float64), wanted, LEAST[name])
            assert np.array_equal(got, wanted), (n, form, float(np.abs(got - wanted).max()))
            exact = shift / 8.0 + a.astype(np.float64) @ b[:, :n].astype(np.float64)
            assert (np.abs(got - exact).max() > 1e-5) == (family != "integers")


#: KEYS keys of COLUMNS columns by a block of WARPS warps: V in swizzled rows, transposed, and out[slab of keys][row][place] of its bytes.
TRANSPOSED = """\
    constexpr int KEYS = {keys}, COLUMNS = {columns}, SLABS = (KEYS + 127) / 128, WIDTH = COLUMNS < 128 ? 128 : COLUMNS;
    unsigned char* from_smem = fa::dynamic_shared_1024();
    unsigned char* to_smem = from_smem + KEYS * WIDTH;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(a);
    for (int i = t; i < KEYS * COLUMNS / 4; i += blockDim.x) {{
        const int key = i / (COLUMNS / 4), chunk = i % (COLUMNS / 4) / 4;
        unsigned char* slab = from_smem + chunk / 8 * KEYS * 128;
        *reinterpret_cast<uint32_t*>(slab + fa::chunk_at<64>(key, chunk % 8) + i % 4 * 4) = words[i];
    }}
    for (int i = t; i < SLABS * COLUMNS * 32; i += blockDim.x) reinterpret_cast<uint32_t*>(to_smem)[i] = 0;
    __syncthreads();
    fa::transpose_keys<KEYS, COLUMNS>(to_smem, from_smem, fa::warp_id(), blockDim.x / 32);
    __syncthreads();
    for (int i = t; i < SLABS * COLUMNS * 32; i += blockDim.x)
        out[i] = *reinterpret_cast<uint32_t*>(to_smem + fa::chunk_at<64>(i / 32, i % 32 / 4) + i % 4 * 4);"""
#: The key at each place of a row of V^T, and the column of each row.
ORDER = np.array([k // 16 * 16 + k % 4 // 2 * 8 + k % 16 // 4 * 2 + k % 2 for k in range(256)])
ROWS = np.array([r // 16 * 16 + r % 8 * 2 + r // 8 % 2 for r in range(256)])


@pytest.mark.parametrize(("keys", "columns", "warps"), [(128, 128, 4), (128, 64, 3), (96, 256, 3), (224, 64, 2)])
def test_transposed_keys(keys: int, columns: int, warps: int, backend: Backend, tmp_path: Path) -> None:
    """Each byte in its place: a row of V^T has the keys in the order of an operand, slabs of 128; nothing behind the last key."""
    needs_hopper(backend)
    v = np.random.RandomState(6).randint(0, 256, (keys, columns)).astype(np.uint8)
    before = "#include <fa/accumulator_float8.cuh>\n#include <fa/tma.cuh>\nusing fa::uint32_t;"
    slabs = -(-keys // 128)
    shared = keys * max(columns, 128) + slabs * columns * 128
    got = run(backend, tmp_path, TRANSPOSED.format(keys=keys, columns=columns), v, before=before, block=32 * warps, shared=shared)
    got = got[: slabs * columns * 32].view(np.uint8).reshape(slabs, columns, 128).swapaxes(0, 1).reshape(columns, -1)
    assert np.array_equal(got[:, :keys], v.T[ROWS[:columns]][:, ORDER[:keys]]) and not got[:, keys:].any()


def test_rows_of_transposed_columns(backend: Backend, tmp_path: Path) -> None:
    """O whose columns are V^T's rows, times a factor a row, in its own order in slabs of 64; zeros where the factor is 0."""
    needs_hopper(backend)
    body = """\
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    float x[64];
    for (int i = 0; i < 64; ++i) x[i] = reinterpret_cast<const float*>(a)[(t / 4 + i / 2 % 2 * 8) * 128 + i / 4 * 8 + t % 4 * 2 + i % 2];
    const float factor[2] = {float(t / 4 % 4), 0.5f};
    fa::store_rows_8<fa::bfloat16>(tile_smem, 16 * 128, x, factor);
    __syncwarp();
    for (int i = t; i < 2 * 16 * 32; i += 32)
        out[i] = *reinterpret_cast<uint32_t*>(tile_smem + i / 512 * 2048 + fa::chunk_at<64>(i / 32 % 16, i % 32 / 4) + i % 4 * 4);"""
    x = np.random.RandomState(8).randn(16, 128).astype(np.float32)
    x[0] = np.nan
    before = "#include <fa/accumulator_float8.cuh>\n#include <fa/tma.cuh>\nusing fa::uint32_t;"
    got = run(backend, tmp_path, body, x, before=before, shared=4096)[:1024]
    factor = np.where(np.arange(16) < 8, np.arange(16) % 4, 0.5).astype(np.float32)[:, None]
    wanted = np.zeros((16, 128), np.float32)
    wanted[:, ROWS[:128]] = np.where(factor == 0, 0, x * factor)
    mine = got.view(ml_dtypes.bfloat16).reshape(2, 16, 64).swapaxes(0, 1).reshape(16, 128)
    assert np.array_equal(mine, wanted.astype(ml_dtypes.bfloat16))


def test_powers_of_two(backend: Backend, tmp_path: Path) -> None:
    """The exponent of a positive float, and a float of an exponent."""
    body = """\
    const float x = reinterpret_cast<const float*>(a)[t];
    out[t] = fa::exponent_of(x), out[32 + t] = __float_as_uint(fa::power_of_two(8 * t - 126));"""
    x = np.ldexp(np.random.RandomState(9).rand(32) / 2 + 0.5, np.arange(-60, 68, 4)).astype(np.float32)
    x[0] = 0
    needs_hopper(backend)
    got = run(backend, tmp_path, body, x, before="#include <fa/accumulator_float8.cuh>")
    assert np.array_equal(got[:32].view(np.int32), [-127, *(np.frexp(x[1:])[1] - 1)])
    assert np.array_equal(got[32:64].view(np.float32), np.ldexp(np.float32(1), 8 * np.arange(32) - 126))


def test_scores_again(backend: Backend, tmp_path: Path) -> None:
    """Q K^T of 16 queries and 32 keys in two slabs of 128 bytes, by fa::multiply_abt_again with mma_m16n8 of 8 bits."""
    needs_hopper(backend)
    body = """\
    unsigned char* q_smem = fa::dynamic_shared_1024();
    unsigned char* k_smem = q_smem + 2 * 16 * 128;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(a);
    for (int i = t; i < 48 * 64; i += 32) {
        const int row = i / 64, chunk = i % 64 / 4;
        unsigned char* tile = row < 16 ? q_smem + chunk / 8 * 2048 : k_smem + chunk / 8 * 4096;
        *reinterpret_cast<uint32_t*>(tile + fa::chunk_at<64>(row < 16 ? row : row - 16, chunk % 8) + i % 4 * 4) = words[i];
    }
    __syncwarp();
    float x[16];
    fa::multiply_abt_again<fa::float8_e4m3, 2>(x, fa::smem_u32(q_smem), 2048, fa::smem_u32(k_smem), 4096);
    for (int i = 0; i < 16; ++i)
        reinterpret_cast<float*>(out)[(t / 4 + i / 2 % 2 * 8) * 32 + i / 4 * 8 + t % 4 * 2 + i % 2] = x[i];"""
    both = integers(48, 256).astype(FORMATS["e4m3"])
    before = "#include <fa/accumulator_float8.cuh>\n#include <fa/tma.cuh>\nusing fa::uint32_t;"
    got = run(backend, tmp_path, body, both.view(np.uint8), before=before, shared=12288)[:512].view(np.float32).reshape(16, 32)
    wide = both.astype(np.float64)
    assert np.array_equal(got, wide[:16] @ wide[16:].T)


def test_packed_operand(backend: Backend, tmp_path: Path) -> None:
    """Scores of 64 columns as registers of A, which fit the order of the keys; a descale is 1 where the problem has none."""
    needs_hopper(backend)
    body = """\
    float x[32];
    for (int i = 0; i < 32; ++i) x[i] = reinterpret_cast<const float*>(a)[(t / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + t % 4 * 2 + i % 2];
    uint32_t operand[2][4];
    fa::pack_operand_8<fa::float8_e4m3>(operand, x);
    for (int i = 0; i < 8; ++i) out[8 * t + i] = operand[i / 4][i % 4];
    if (t == 0) out[256] = __float_as_uint(fa::descale_of(args, 2, 0, 0));
    out[257 + t] = fa::even_bytes(0x03020100u + t, 0x07060504u), out[300 + t] = fa::odd_bytes(0x03020100u, 0x07060504u + t);"""
    x = np.random.RandomState(7).randn(16, 64).astype(np.float32)
    before = "#include <fa/accumulator_float8.cuh>\nusing fa::uint32_t;"
    got = run(backend, tmp_path, body, x, before=before)
    rounded = x.astype(FORMATS["e4m3"]).view(np.uint8)[:, ORDER[:64]]
    lane, i = np.arange(32)[:, None, None], np.arange(8)[None, :, None]
    row, column = lane // 4 + i % 2 * 8, i // 4 * 32 + i % 4 // 2 * 16 + lane % 4 * 4 + np.arange(4)
    assert np.array_equal(got[:256].view(np.uint8).reshape(32, 8, 4), rounded[row, column])
    assert got[256] == np.float32(1).view(np.uint32)
    t = np.arange(32, dtype=np.uint32)
    assert np.array_equal(got[257:289], 0x06040200 + t) and np.array_equal(got[300:332], 0x07050301 + (t >> 8 & 0xFF))
