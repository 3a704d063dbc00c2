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


@pytest.mark.parametrize("dtype", HALVES)
def test_widening(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """Every byte in each of four places, exact: numbers, subnormal ones, both zeros; NaN is one."""
    body = """\
    for (int i = t; i < 256; i += 32) {
        const uint32_t byte = i;
        uint32_t pairs[2];
        fa::widen_four<scalar>(pairs, byte | (byte ^ 1) << 8 | (byte ^ 2) << 16 | (byte ^ 3) << 24);
        out[3 * i] = pairs[0], out[3 * i + 1] = pairs[1];
        out[3 * i + 2] = fa::from_halves<scalar>(fa::cvt_rn_f16x2_e4m3x2(fa::uint16_t(byte | (byte ^ 4) << 8)));
    }"""
    got = run(backend, tmp_path, body, dtype=dtype, before=BEFORE)[:768].view(TYPES[dtype]).reshape(256, 6).astype(np.float64)
    byte = (np.arange(256)[:, None] ^ np.array([0, 1, 2, 3, 0, 4])).astype(np.uint8)
    wanted = byte.view(E4M3).astype(np.float64)
    assert np.array_equal(got, wanted, equal_nan=True) and np.isnan(wanted).sum() == 12
    finite = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got[finite]), np.signbit(wanted[finite]))


#: S (32, 32) = 1000 + Q K^T and O (32, W) = -1000 + P V of one warp. K and V lie as TileCopy stores them; P: packed from 32 x 32 accumulators.
PRODUCTS = """\
#include <fa/cache.cuh>
using fa::uint32_t;
template <class T, class Stored, int W, bool InRegisters> __device__ void products(const T* q_from, const Stored* kv, float* s_to, float* o_to,
                                                                                 const float* p_from) {
    constexpr int wide = fa::columns_16<Stored, W>, chunks = W / 8;
    unsigned char *q_smem = fa::dynamic_shared(), *k_smem = q_smem + 32 * W * 2, *v_smem = k_smem + 32 * wide * 2;
    const int t = threadIdx.x, row = t / 4, column = t % 4 * 2;
    for (int i = t; i < 32 * chunks; i += 32)
        fa::store_operand<Stored, W>(q_smem, i / chunks, i % chunks, fa::load_128(q_from + i / chunks * W + i % chunks * 8));
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
            s[m][i / 4][i % 4] = 1000;
            p[m][i / 4][i % 4] = p_from[(16 * m + row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + column + i % 2];
        }
    for (int m = 0; m < 2; ++m)
        for (int i = 0; i < W / 2; ++i) o[m][i / 4][i % 4] = -1000;
    fa::multiply_keys<T, Stored>(s, q, fa::lane_of_b<wide>(fa::smem_u32(k_smem)));
    fa::pack_a<T>(packed, p);
    fa::multiply_values<T, Stored, W>(o, packed, fa::lane_of_a<wide>(fa::smem_u32(v_smem)));
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
    """store_operand, multiply_keys with Q in registers and not, multiply_values and store_columns, at each width of a tile."""
    kind, name = (E4M3, f"fa::{stored}") if "8" in stored else (TYPES[dtype], "scalar")
    for width in (64, 128, 256):
        q, kv, p = integers(32, width), integers(64, width, seed=1), integers(32, 32, seed=2)
        body = f"""\
    const float* p = reinterpret_cast<const float*>(b + 32 * {width});
    float* to = static_cast<float*>(args.O.data);
    products<scalar, {name}, {width}, {str(width < 128).lower()}>(b, reinterpret_cast<const {name}*>(a), to, to + 1024, p);"""
        other = np.concatenate([q.astype(TYPES[dtype]).reshape(-1).view(np.uint8), p.astype(np.float32).reshape(-1).view(np.uint8)])
        shared = 32 * width * 2 + 64 * width * np.dtype(kind).itemsize
        got = run(backend, tmp_path, body, kv.astype(kind).view(np.uint8), other, dtype=dtype, shared=shared, before=PRODUCTS)
        s, o = f32(got, 32, 32), f32(got[1024:], 32, width)
        assert np.array_equal(s, 1000 + q @ kv[:32].T), width
        assert np.array_equal(o, 0.5 * (p @ kv[32:] - 1000)), width
