"""The words for tensor cores, asynchronous copies and vector reductions, against numpy on every backend found; and against a real GPU.

As in test_words.py the H200's answers lie in golden_h200.npz (`FA_CLI_GOLDEN=1 pytest tests/device/test_words.py
tests/device/test_mma_words.py` on one writes them). Everything must match bit for bit, a tensor core's sums too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_words import BITS, COUNT, LANE, NAN, X, golden, run_word, same_bits, to16
from word_kernel import TYPES, f32, integers, run

from harness.backends import Backend, pick

BEFORE = "#include <fa/atomic.cuh>\n#include <fa/mma.cuh>\n#include <fa/wmma.cuh>\nusing fa::uint32_t;\nusing fa::uint16_t;"
THREAD = np.arange(COUNT)
WARP = THREAD // 32 * 32


def tf32() -> Any:
    """The 10 bits behind the point, ties away from zero."""
    rounded = ((BITS.astype(np.uint64) + 0x1000) & 0xFFFFE000).astype(np.uint32)
    return np.where(np.isnan(X), NAN, np.where(np.isinf(X), BITS, rounded))


def pairs(dtype: Any) -> Any:
    """This thread's number in the upper half, the next lower thread's (of a pair of them) in the lower."""
    half = to16(dtype).astype(np.uint32)
    return half << 16 | half[THREAD // 2 * 2]


def rows_of(matrix: int, first: Any, second: Any) -> Any:
    """Two 16-bit elements (row, column) of an 8 x 8 matrix of ldmatrix, whose row r is what lane 8 * matrix + r wrote: 4 words."""
    halves = np.stack([BITS & 0xFFFF, BITS >> 16], 1).reshape(-1)  # a thread's input is elements 0, 1; then + 1, + 2, + 3 of both

    def element(row: Any, column: Any) -> Any:
        thread = WARP + (8 * matrix + row) * 7 % 32
        return (halves[2 * thread + column % 2] + column // 2) & 0xFFFF

    return element(*first) | element(*second) << 16


def transposed(matrix: Any, row: Any, column: Any) -> Any:
    """Element (row, column) of what stmatrix_x4_trans stores of BITS ^ matrix: lane 4 g + p holds rows 2 p and 2 p + 1 of column g."""
    return ((BITS[WARP + 4 * column + row // 2] >> (row % 2 * 16).astype(np.uint32)) ^ matrix) & 0xFFFF


#: Each thread writes 8 elements to its row of 16 bytes; lane i tells ldmatrix the row of lane 7 i.
ROWS = """\
    const uint32_t smem = fa::smem_u32(fa::dynamic_shared());
    uint16_t* row = fa::dynamic_shared<uint16_t>() + 8 * threadIdx.x;
    for (int c = 0; c < 8; ++c) row[c] = uint16_t((c % 2 ? bits >> 16 : bits) + c / 2);
    __syncthreads();
    uint32_t d[4];
    const uint32_t address = smem + (threadIdx.x / 32 * 32 + lane * 7 % 32) * 16;"""

#: name: kernel body, the answer by numpy (bits).
EXACT: dict[str, tuple[str, Callable[[], Any]]] = {
    "cvt_rna_tf32_f32": ("y = fa::cvt_rna_tf32_f32(x);", tf32),
    "cvt_rn_f16x2_f32": ("y = fa::cvt_rn_f16x2_f32(x, __uint_as_float(in[i / 2 * 2]));", lambda: pairs(np.float16)),
    "cvt_rn_bf16x2_f32": ("y = fa::cvt_rn_bf16x2_f32(x, __uint_as_float(in[i / 2 * 2]));", lambda: pairs(TYPES["bfloat16"])),
    "pack": (
        "float low = __uint_as_float(in[i / 2 * 2]); y = lane < 16 ? fa::pack<fa::float16>(low, x) : fa::pack<fa::bfloat16>(low, x);",
        lambda: np.where(LANE < 16, pairs(np.float16), pairs(TYPES["bfloat16"])),
    ),
    "cp_async_16": (
        "const uint32_t to = fa::smem_u32(fa::dynamic_shared<uint32_t>() + 4 * threadIdx.x);"
        "fa::cp_async_16(to, i % 5 ? in + i / 4 * 4 : nullptr, i % 5 != 0); fa::cp_async_commit_group(); fa::cp_async_wait_group<0>();"
        "__syncthreads(); y = fa::dynamic_shared<uint32_t>()[4 * threadIdx.x + i % 4];",
        lambda: np.where(THREAD % 5, BITS, 0),
    ),
    "cp_async_16_upto": (
        "const uint32_t to = fa::smem_u32(fa::dynamic_shared<uint32_t>() + 4 * threadIdx.x); const int bytes = i / 4 % 9 * 2;"
        "fa::cp_async_16_upto(to, bytes ? in + i / 4 * 4 : nullptr, bytes); fa::cp_async_commit_group(); fa::cp_async_wait_group<0>();"
        "y = fa::dynamic_shared<uint32_t>()[4 * threadIdx.x + i % 4];",
        lambda: BITS & np.array([0, 0xFFFF, 0xFFFFFFFF])[np.clip(THREAD // 4 % 9 - THREAD % 4 * 2, 0, 2)],
    ),
    "cp_async_wait_group": (  # one group waited for while the next is under way, and an empty one
        "uint32_t* mine = fa::dynamic_shared<uint32_t>() + 4 * (threadIdx.x & 63); const uint32_t to = fa::smem_u32(mine);"
        "if (threadIdx.x < 64) {"
        "fa::cp_async_16(to, in + i / 4 * 4); fa::cp_async_commit_group();"
        "fa::cp_async_16(to + 1024, in + (i / 4 * 4 + 4) % 4096); fa::cp_async_commit_group();"
        "fa::cp_async_wait_group<1>(); y = mine[i % 4];"
        "fa::cp_async_commit_group(); fa::cp_async_wait_group<1>(); y ^= mine[256 + i % 4];"
        "fa::cp_async_wait_group<0>(); }",
        lambda: np.where(THREAD % 256 < 64, BITS ^ BITS[(THREAD + 4) % COUNT], 0),
    ),
    "ldmatrix_x4": (
        ROWS + "fa::ldmatrix_x4(d, address); y = d[lane % 4];",
        lambda: np.choose(LANE % 4, [rows_of(m, (LANE // 4, LANE % 4 * 2), (LANE // 4, LANE % 4 * 2 + 1)) for m in range(4)]),
    ),
    "ldmatrix_x4 of other matrices": (
        ROWS + "fa::ldmatrix_x4(d, address); y = d[(lane + lane / 8 + 1) % 4];",
        lambda: np.choose(
            (LANE + LANE // 8 + 1) % 4, [rows_of(m, (LANE // 4, LANE % 4 * 2), (LANE // 4, LANE % 4 * 2 + 1)) for m in range(4)]
        ),
    ),
    "ldmatrix_x4_trans": (
        ROWS + "fa::ldmatrix_x4_trans(d, address); y = d[(lane + lane / 4) % 4];",
        lambda: np.choose((LANE + LANE // 4) % 4, [rows_of(m, (LANE % 4 * 2, LANE // 4), (LANE % 4 * 2 + 1, LANE // 4)) for m in range(4)]),
    ),
    "stmatrix_x4_trans": (
        "uint32_t d[4]; for (int m = 0; m < 4; ++m) d[m] = bits ^ m * 0x10001;"
        "uint32_t* row = fa::dynamic_shared<uint32_t>() + 4 * threadIdx.x;"
        "fa::stmatrix_x4_trans(fa::smem_u32(row), d); __syncwarp(); y = row[lane % 4];",
        lambda: transposed(LANE // 8, LANE % 8, LANE % 4 * 2) | transposed(LANE // 8, LANE % 8, LANE % 4 * 2 + 1) << 16,
    ),
    "mma_m16n8k16": (  # mma_m16n8<T> of the 16-bit types; the layouts have tests of their own below
        "float d[4] = {1, 2, 3, 4}; uint32_t a[4], one = lane / 4 + 1;"
        "if (i / 32 % 2) { for (auto& r : a) r = fa::pack<fa::float16>(1, 2); one = fa::pack<fa::float16>(one, 3); }"
        "else { for (auto& r : a) r = fa::pack<fa::bfloat16>(1, 2); one = fa::pack<fa::bfloat16>(one, 3); }"
        "if (i / 32 % 2) fa::mma_m16n8<fa::float16>(d, a, one, one); else fa::mma_m16n8<fa::bfloat16>(d, a, one, one);"
        "y = __float_as_uint(d[i % 4]);",
        lambda: (8.0 * (LANE % 4 * 2 + THREAD % 4 % 2 + 1 + 6) + THREAD % 4 + 1).astype(np.float32).view(np.uint32),
    ),
    "red_add_v4_f32": (
        "float* to = reinterpret_cast<float*>(out) + i / 64 * 64 + 8; if (i % 64 < 4) to[i % 4] = 0; __syncthreads();"
        "fa::red_add_v4_f32(to, 1, i % 7, bits & 3, -2.5f); __syncthreads();"
        "if (i % 64 / 4 == 2) y = __float_as_uint(to[i % 4]); __syncthreads();",
        lambda: np.where(
            THREAD % 64 // 4 == 2,
            np.stack([each.reshape(-1, 64).sum(1).repeat(64) for each in (np.ones(COUNT), THREAD % 7, BITS & 3, np.full(COUNT, -2.5))])[
                THREAD % 4, THREAD
            ]
            .astype(np.float32)
            .view(np.uint32),
            0,
        ),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, backend: Backend, tmp_path: Path) -> None:
    """Conversions, copies, matrices moved between lanes: the bits numpy gives and the bits the H200 gave."""
    body, wanted = EXACT[name]
    answers = run_word(backend, tmp_path, body, BITS, BEFORE)
    good = same_bits(answers, wanted())
    at = int(good.argmin())
    assert good.all(), f"input {BITS[at]:#010x} at {at} gives {answers[at]:#010x}, not {int(np.asarray(wanted())[at]):#010x}"
    recorded = golden(name, answers, backend)
    assert recorded is None or np.array_equal(answers, recorded), "not the bits of the GPU"


# -- products ---------------------------------------------------------------------------------------------------------

#: mma's fragments as <fa/mma.cuh> says them, from global memory: a[16][K], b[K][8], and d[16][8] holding 100 * row + column before.
FRAGMENTS = """\
    const int g = t / 4, p = {per} * (t % 4);
    auto of_a = [&](int row, int column) {{ return *reinterpret_cast<const {word}*>(a + row * {k} + column); }};
    auto of_b = [&](int row) {{ return *reinterpret_cast<const {word}*>(b + g * {k} + row); }};  // b is given by columns
    uint32_t a_reg[4] = {{of_a(g, p), of_a(g + 8, p), of_a(g, p + {k} / 2), of_a(g + 8, p + {k} / 2)}};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = {before};
    {mma}(d, a_reg, of_b(p), of_b(p + {k} / 2));
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = __float_as_uint(d[i]);"""
MMA = {"fa::mma_m16n8k16_f16": ("float16", 16), "fa::mma_m16n8k16_bf16": ("bfloat16", 16), "fa::mma_m16n8k8_tf32": ("float32", 8)}


def product(backend: Backend, folder: Path, name: str, a: Any, b: Any, before: str = "100.0f * (g + i / 2 * 8) + t % 4 * 2 + i % 2") -> Any:
    """before + a b by one mma."""
    dtype, k = MMA[name]
    body = FRAGMENTS.format(per=1 if dtype == "float32" else 2, word="uint32_t", k=k, mma=name, before=before)
    return f32(run(backend, folder, body, a, np.ascontiguousarray(b.T), dtype=dtype, before=BEFORE), 16, 8)


def close(got: Any, wanted: Any, terms: Any, k: int) -> bool:
    """Within a truncation of each of k sums. terms: the sum of the absolute values added."""
    return bool((np.abs(got.astype(np.float64) - wanted) <= k * 2.0**-23 * terms).all())


@pytest.mark.parametrize("name", MMA)
def test_mma_of_integers(name: str, backend: Backend, tmp_path: Path) -> None:
    """Every element in its place, to the bit; float16's smallest numbers too, which are subnormal."""
    dtype, k = MMA[name]
    a, b = integers(16, k), integers(k, 8, seed=1)
    small = 2.0**-24 if dtype == "float16" else 1.0
    got = product(backend, tmp_path, name, (a * small).astype(TYPES[dtype]), b.astype(TYPES[dtype]), "0.0f")
    assert np.array_equal(got, (a @ b) * small)
    got = product(backend, tmp_path, name, a.astype(TYPES[dtype]), b.astype(TYPES[dtype]))
    assert np.array_equal(got, a @ b + 100 * np.arange(16)[:, None] + np.arange(8))


def exponents(values: Any, least: int) -> Any:
    """Of each element; subnormal ones have the smallest normal number's, zeros none."""
    return np.where(values == 0, -400, np.maximum(np.frexp(values)[1] - 1, least))


def tensor_core(a: Any, b: Any, c: Any, dtype: str, sm: int = 90) -> Any:
    """c + a b in a tensor core's arithmetic (Xie et al., MMA-Sim, arXiv 2511.10909): float64 arrays (M, K), (K, N), (M, N) -> (M, N).

    Terms are aligned to the largest exponent, truncated 25 bits behind the point (24 before sm_90, where K is halved), summed, truncated.
    Zeros have no exponent, as an H200 has it.
    """
    least, bits, parts = (-14 if dtype == "float16" else -126), (25 if sm >= 90 else 24), (1 if sm >= 90 else 2)
    for a_part, b_part in zip(np.split(a, parts, 1), np.split(b, parts, 0), strict=True):
        products = a_part[:, :, None] * b_part[None]
        of_products = exponents(a_part, least)[:, :, None] + exponents(b_part, least)[None]
        unit = np.ldexp(1.0, np.maximum(of_products.max(1), exponents(c, -126)) - bits)
        total = (np.trunc(products / unit[:, None]).sum(1) + np.trunc(c / unit)) * unit
        last = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - 23)
        with np.errstate(over="ignore"):
            c = (np.trunc(total / last) * last).astype(np.float32).astype(np.float64)
    return c


def operands(dtype: str, k: int, family: str) -> tuple[Any, Any]:
    """A (16, k) and B (k, 8) of a dtype: normal, or of many exponents and with zeros, or at the ends of the type's range."""
    draw = np.random.RandomState(3)
    a, b = (draw.randn(*shape) for shape in ((16, k), (k, 8)))
    if family == "wide":
        a, b = (np.ldexp(x, draw.randint(-20, 12, x.shape)) * (draw.rand(*x.shape) < 0.8) for x in (a, b))
    elif family == "ends":
        low, high = (-24, 13) if dtype == "float16" else (-130, 60)
        a = np.ldexp(a, np.linspace(low, high, 16).astype(int)[:, None] + draw.randint(-3, 3, a.shape)) * (np.arange(16) % 5 > 0)[:, None]
        b = np.ldexp(b, np.linspace(low / 4, high, 8).astype(int) + draw.randint(-3, 3, b.shape))
    return a.astype(TYPES[dtype]), b.astype(TYPES[dtype])


@pytest.mark.parametrize("family", ["normal", "wide", "ends"])
@pytest.mark.parametrize("name", MMA)
def test_mma_bits(name: str, family: str, backend: Backend, tmp_path: Path) -> None:
    """The model's bits and the H200's; tf32 does not look at a float's 13 lowest bits."""
    dtype, k = MMA[name]
    a, b = operands(dtype, k, family)
    before, c = "0.0f", np.zeros((16, 8))
    if family == "wide":  # (row % 8 + 1) / 64^(column / 2)
        before, c = "(g + 1.0f) / (1 << 6 * (t % 4))", (np.arange(16)[:, None] % 8 + 1) / 64.0 ** (np.arange(8) // 2)
    got = product(backend, tmp_path, name, a, b, before)
    if dtype == "float32":
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    wanted = tensor_core(a.astype(np.float64), b.astype(np.float64), c, dtype)
    recorded = golden(name.removeprefix("fa::") + (f" {family}" if family != "normal" else ""), got, backend)
    assert np.array_equal(got, wanted), f"{(got != wanted).sum()} of {got.size} elements differ from the model"
    assert np.array_equal(got, recorded), "not the bits of the GPU, or it was never asked"
    rounded = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)
    assert not np.array_equal(got, rounded), "it could not fail"


@pytest.mark.parametrize("name", MMA)
def test_mma_bits_of_sm_80(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine's other tensor core: 24 bits, and K in two halves."""
    monkeypatch.setenv("FA_CLI_TENSOR_CORE", "sm_80")
    dtype, k = MMA[name]
    a, b = operands(dtype, k, "normal")
    body = FRAGMENTS.format(per=1 if dtype == "float32" else 2, word="uint32_t", k=k, mma=name, before="0")
    got = f32(run(pick("cpu"), tmp_path, body, a, np.ascontiguousarray(b.T), dtype=dtype, before=BEFORE), 16, 8)
    if dtype == "float32":
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert np.array_equal(got, tensor_core(a, b, np.zeros((16, 8)), dtype, 80))
    assert not np.array_equal(got, tensor_core(a, b, np.zeros((16, 8)), dtype, 90)), "it could not fail"


@pytest.mark.parametrize("name", MMA)
def test_mma_of_infinities(name: str, backend: Backend, tmp_path: Path) -> None:
    """An infinity in one row, a NaN in one column: there and nowhere else."""
    dtype, k = MMA[name]
    a, b = integers(16, k).astype(TYPES[dtype]), integers(k, 8, seed=1).astype(TYPES[dtype])
    a[5, 3], b[2, 6] = np.inf, np.nan
    got = product(backend, tmp_path, name, a, b)
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ b.astype(np.float64) + 100 * np.arange(16)[:, None] + np.arange(8)
    assert np.array_equal(got, wanted, equal_nan=True) and np.isnan(got[:, 6]).all() and np.isinf(got[5, 0])


WMMA = """\
    scalar* a_smem = fa::dynamic_shared<scalar>();        // [16][24]
    scalar* b_smem = a_smem + 16 * 24;                    // [16][32]
    float* c_smem = reinterpret_cast<float*>(b_smem + 16 * 32);  // [16][20]
    for (int i = t; i < 256; i += 32) {{
        a_smem[i / 16 * 24 + i % 16] = a[i];
        b_smem[i / 16 * 32 + i % 16] = b[i];
        c_smem[i / 16 * 20 + i % 16] = float(3 * i);
    }}
    __syncwarp();
    fa::WmmaA<scalar> a_frag;
    fa::WmmaBRow<scalar> rows;
    fa::WmmaBCol<scalar> columns;
    fa::WmmaAccumulator sum;
    fa::wmma_load_a_row(a_frag, a_smem, 24);
    fa::wmma_load_b_row(rows, b_smem, 32);
    fa::wmma_load_b_col(columns, b_smem, 32);
    fa::wmma_load_c_row(sum, c_smem, 20);
    __syncwarp();
    {products}
    for (float& each : sum.reg) each *= 0.5f;
    fa::wmma_store_d_row(c_smem, sum, 20);
    __syncwarp();
    for (int i = t; i < 256; i += 32) out[i] = __float_as_uint(c_smem[i / 16 * 20 + i % 16]);"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_wmma(layout: str, dtype: str, backend: Backend, tmp_path: Path) -> None:
    """Two products onto what was there, halved: integers to the bit, random numbers within the rounding of the sums."""
    body = WMMA.format(products=f"fa::wmma_mma(sum, a_frag, {layout}); fa::wmma_mma(sum, a_frag, {layout});")
    draw = np.random.RandomState(5)
    for a, b in ((integers(16, 16), integers(16, 16, seed=1)), (draw.randn(16, 16), draw.randn(16, 16))):
        a, b = a.astype(TYPES[dtype]), b.astype(TYPES[dtype])
        got = f32(run(backend, tmp_path, body, a, b, dtype=dtype, before=BEFORE, shared=4096), 16, 16)
        a, b = a.astype(np.float64), b.astype(np.float64)
        b = b if layout == "rows" else b.T
        before = 3.0 * np.arange(256).reshape(16, 16)
        terms = np.abs(a) @ np.abs(b) + before / 2
        assert close(got, a @ b + before / 2, terms, 0 if a.dtype == b.dtype and np.array_equal(a, a.round()) else 32)
    recorded = golden(f"wmma_mma {layout} {dtype}", got, backend)
    assert np.array_equal(got, recorded), "not the bits of the GPU, or it was never asked"
