"""The words for K and V of 16 bits, and of 8 beside operands of 16, against numpy on every backend: exact numbers, so equal sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from word_kernel import TYPES, f32, integers, run

from harness.backends import Backend

HALVES = ["float16", "bfloat16"]
E4M3: Any = ml_dtypes.float8_e4m3fn
BEFORE = "#include <fa/cache.cuh>\nusing fa::uint32_t;"


def test_widening(backend: Backend, tmp_path: Path) -> None:
    """Every byte in each of four places, exact: numbers, subnormal ones, both zeros; NaN is one."""
    body = """\
    for (int i = t; i < 256; i += 32) {
        const uint32_t byte = i;
        uint32_t pairs[2];
        fa::widen_four(pairs, byte | (byte ^ 1) << 8 | (byte ^ 2) << 16 | (byte ^ 3) << 24);
        out[2 * i] = pairs[0], out[2 * i + 1] = pairs[1];
    }"""
    got = run(backend, tmp_path, body, before=BEFORE)[:512].view(np.float16).reshape(256, 4).astype(np.float64)
    wanted = (np.arange(256)[:, None] ^ np.arange(4)).astype(np.uint8).view(E4M3).astype(np.float64)
    assert np.array_equal(got, wanted, equal_nan=True) and np.isnan(wanted).sum() == 8
    finite = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got[finite]), np.signbit(wanted[finite]))


def test_rows_of_bfloat16_as_float16(backend: Backend, tmp_path: Path) -> None:
    """Eight rows of four lanes: scaled by a power of two where K is of 8 bits, exact within 2^28 of a row's largest; of any size, zero, NaN."""
    x = (np.random.RandomState(3).randn(8, 32) * 2.0 ** np.array([0, 20, -20, 126, -90, -130, 3, 0])[:, None]).astype(ml_dtypes.bfloat16)
    x[6], x[7, 5], x[0, :5], x[0, 5] = 0, np.nan, 2.0**-26, 3.9
    body = """\
    const auto from = fa::load_128(b + t * 8);
    fa::Vec128<fa::float16> to;
    const float factor = fa::narrow_row<fa::float8_e4m3, 4>(to, from);
    for (int i = 0; i < 8; ++i) reinterpret_cast<float*>(out)[8 * t + i] = fa::widen(to[i]);
    out[256 + t] = __float_as_uint(factor);
    fa::Vec128<scalar> same;
    out[288 + t] = fa::narrow_row<scalar, 4>(same, from) == 1 && same[7].bits == from[7].bits;"""
    got = run(backend, tmp_path, body, 0, x.view(np.uint16), dtype="bfloat16", before=BEFORE)
    narrowed, factor = f32(got, 8, 32).astype(np.float64), f32(got[256:], 8, 4).astype(np.float64)
    wanted = x.astype(np.float64)
    assert (factor == factor[:, :1]).all() and (np.frexp(factor)[0] == 0.5).all()
    assert np.array_equal(narrowed[:5] * factor[:5, :1], wanted[:5]) and np.array_equal(
        narrowed[6:] * factor[6:, :1], wanted[6:], equal_nan=True
    )
    largest = np.abs(narrowed[:5]).max(axis=1)
    assert (largest >= 2.0**14).all() and (largest < 2.0**15).all()
    assert np.abs(narrowed[5] * factor[5, 0] - wanted[5]).max() <= 2.0**-126 and got[288:320].all()


#: S (32, 32) = Q K^T and O (32, W) = -1000 + P V of one warp. K and V lie as TileCopy stores them; P: packed from 32 x 32 accumulators.
PRODUCTS = """\
#include <fa/cache.cuh>
using fa::uint32_t;
template <class T, class Stored, int W, bool InRegisters> __device__ void products(const T* q_from, const Stored* kv, float* s_to, float* o_to,
                                                                                 const float* p_from) {
    using To = fa::Operand<T, Stored>::type;
    constexpr int wide = fa::columns_16<Stored, W>, chunks = W / 8;
    unsigned char *q_smem = fa::dynamic_shared(), *k_smem = q_smem + 32 * W * 2, *v_smem = k_smem + 32 * wide * 2;
    float *factor_smem = reinterpret_cast<float*>(v_smem + 32 * wide * 2), factor[2][2];
    const int t = threadIdx.x, row = t / 4, column = t % 4 * 2;
    for (int i = t; i < 32 * chunks; i += 32) {
        fa::Vec128<To> narrowed;
        factor_smem[i / chunks] = fa::narrow_row<Stored, chunks>(narrowed, fa::load_128(q_from + i / chunks * W + i % chunks * 8));
        fa::store_operand<Stored, W>(q_smem, i / chunks, i % chunks, narrowed);
    }
    using Copy = fa::TileCopy<Stored, 32, W, 32>;
    Copy::copy_async(fa::smem_u32(k_smem), kv, W, 32, W), Copy::copy_async(fa::smem_u32(v_smem), kv + 32 * W, W, 32, W);
    fa::cp_async_commit_group(), fa::cp_async_wait_group<0>();
    __syncthreads();
    fa::OperandA<W, 2, InRegisters> q{fa::lane_of_a<W>(fa::smem_u32(q_smem))};
    q.load_registers();
    float s[2][4][4], p[2][4][4], o[2][W / 8][4];
    uint32_t packed[2][2][4];
    for (int m = 0; m < 2; ++m)
        for (int i = 0; i < 16; ++i) {
            s[m][i / 4][i % 4] = 0, factor[m][i / 2 % 2] = factor_smem[16 * m + row + i / 2 % 2 * 8];
            p[m][i / 4][i % 4] = p_from[(16 * m + row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + column + i % 2];
        }
    for (int m = 0; m < 2; ++m)
        for (int i = 0; i < W / 2; ++i) o[m][i / 4][i % 4] = -1000;
    fa::multiply_keys<To, Stored>(s, q, fa::lane_of_b<wide>(fa::smem_u32(k_smem)));
    fa::scale_rows(s, factor);
    fa::pack_a<To>(packed, p);
    fa::multiply_values<To, Stored, W>(o, packed, fa::lane_of_a<wide>(fa::smem_u32(v_smem)));
    for (int m = 0; m < 2; ++m)
        for (int half = 0; half < 2; ++half) {
            const int its = 16 * m + 8 * half + row;
            for (int i = 0; i < 8; ++i) s_to[its * 32 + i / 2 * 8 + column + i % 2] = s[m][i / 2][2 * half + i % 2];
            fa::store_columns<Stored>(o_to + its * W, o[m], half, 0.5f);
        }
}
"""


@pytest.mark.parametrize("stored", ["the same", "float8_e4m3"])
@pytest.mark.parametrize("dtype", HALVES)
def test_products(dtype: str, stored: str, backend: Backend, tmp_path: Path) -> None:
    """narrow_row and store_operand, multiply_keys with Q in registers and not, scale_rows, multiply_values and store_columns, at each width."""
    kind, name = (E4M3, f"fa::{stored}") if "8" in stored else (TYPES[dtype], "scalar")
    for width in (64, 128, 256):
        sizes = 2.0 ** (np.arange(32)[:, None] - 16) if dtype == "bfloat16" else 1  # of rows
        q, kv, p = integers(32, width) * sizes, integers(64, width, seed=1), integers(32, 32, seed=2)
        body = f"""\
    const float* p = reinterpret_cast<const float*>(b + 32 * {width});
    float* to = static_cast<float*>(args.O.data);
    products<scalar, {name}, {width}, {str(width < 128).lower()}>(b, reinterpret_cast<const {name}*>(a), to, to + 1024, p);"""
        other = np.concatenate([q.astype(TYPES[dtype]).reshape(-1).view(np.uint8), p.astype(np.float32).reshape(-1).view(np.uint8)])
        shared = 32 * width * 2 + 64 * width * np.dtype(kind).itemsize + 128
        got = run(backend, tmp_path, body, kv.astype(kind).view(np.uint8), other, dtype=dtype, shared=shared, before=PRODUCTS)
        s, o = f32(got, 32, 32), f32(got[1024:], 32, width)
        assert np.array_equal(s, q @ kv[:32].T), width
        assert np.array_equal(o, 0.5 * (p @ kv[32:] - 1000)), width
