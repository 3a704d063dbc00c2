"""The words of <fa/accumulator.cuh> against numpy, on every backend with wgmma: masks, softmax and operands on the registers of 64 rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_kernel import TYPES, bound, with_fields
from word_kernel import integers

from harness.backends import Backend

COLUMNS = 80
#: x[row][column] from K, as a wgmma leaves it; each case writes x, two numbers a row, or an operand.
BODY = """\
#include <fa/accumulator.cuh>
constexpr int N = 80;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap q_map) {
    const scalar* in = static_cast<const scalar*>(args.K.data);
    float* out = static_cast<float*>(args.O.data);
    const int t = threadIdx.x, warp = t / 32, row = 16 * warp + t % 32 / 4, pair = t % 4 * 2;
    float x[N / 2], two[2] = {};
    for (int i = 0; i < N / 2; ++i) x[i] = fa::widen(in[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2]);
    const float factor[2] = {row % 5 - 1.0f, (row + 8) % 5 - 1.0f};
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    if (args.seq_q == 0) {
        const int visible[2] = {2 * row - 20, 2 * (row + 8) - 20};
        fa::mask_columns(x, visible);
    }
    if (args.seq_q == 1) fa::local_row_max(two, x);
    if (args.seq_q == 2) fa::exponentiate(x, two, 0.25f, factor);
    if (args.seq_q == 3) fa::scale_rows(x, factor);
    if (args.seq_q == 4) {
        uint32_t operand[N / 16][4];
        fa::pack_operand<scalar>(operand, x);
        for (int i = 0; i < N / 16 * 4; ++i) x[i] = __uint_as_float(operand[i / 4][i % 4]);
    }
    if (args.seq_q == 5) {
        for (int i = t; i < 64 * 2 * 32; i += 128) reinterpret_cast<uint32_t*>(tile_smem)[i] = 0x7f7f7f7fu;
        __syncthreads();
        fa::store_rows<scalar>(tile_smem + 16 * warp * 128, 64 * 128, x, factor);
        __syncthreads();
        for (int i = t; i < 64 * 2 * 32; i += 128) out[i] = reinterpret_cast<const float*>(tile_smem)[i];
        return;
    }
    if (args.seq_q == 6) {
        uint64_t* full = reinterpret_cast<uint64_t*>(tile_smem + 2 * 64 * 128);
        if (t == 0) {
            fa::mbarrier_init(full, 1);
            fa::mbarrier_init_fence();
            fa::mbarrier_arrive_expect_tx(full, 2 * 64 * 128);
            fa::tma_load_4d(tile_smem, &q_map, full, 0, 0, 0, 0);
            fa::tma_load_4d(tile_smem + 64 * 128, &q_map, full, 0, 0, 1, 0);
        }
        __syncthreads();
        fa::mbarrier_wait_parity(full, 0);
        float again[32];
        const uint32_t a = fa::smem_u32(tile_smem);
        fa::multiply_abt_again<scalar, 2>(again, a + 16 * warp * 128, 64 * 128, a, 64 * 128);
        for (int i = 0; i < 32; ++i) x[i] = again[i];
    }
    if (args.seq_q == 7) fa::mask_scores(x, args, row, 16);
    if (args.seq_q == 8) fa::apply_sign(x, args.scale);
    float maximum[2];
    fa::local_row_max(maximum, x);
    if (args.seq_q == 9) {
        const int visible[2] = {row % 3 * 40, (row + 8) % 3 * 40};
        fa::mask_columns(x, visible);
        fa::first_reference(two, x, 0.25f);
    }
    if (args.seq_q == 10) {
        float sum[2] = {1, 2}, raised[2];
        two[0] = factor[0], two[1] = factor[1];
        fa::raise_reference(two, sum, raised, maximum, 0.25f);
        x[0] = sum[0], x[1] = sum[1], x[2] = raised[0], x[3] = raised[1];
    }
    if (args.seq_q == 11) {
        float sum[2] = {64, 128}, o[4] = {1, 1, 1, 1};
        for (int half = 0; half < 2; ++half) two[half] = fa::group_max<4>(maximum[half]) * 0.25f - (warp < 2 ? 7 : 9);
        fa::softmax_lazily(x, o, two, sum, 0.25f, 8.0f);
        for (int half = 0; half < 2; ++half) out[t * 64 + 42 + half] = o[2 * half], out[t * 64 + 44 + half] = sum[half];
    }
    if (args.seq_q == 12) {
        float sum[2] = {max(0, row - 4) * 1.0f, row + 8.0f};
        fa::finish_row_sum(sum, two);
        x[0] = sum[0], x[1] = sum[1];
    }
    if (args.seq_q == 13) {
        fa::Args own = args;
        own.logsumexp = args.O, own.seq_q = 50;
        const float sum[2] = {row == 3 ? 0.0f : row + 1.0f, row + 9.0f};
        fa::store_logsumexp(own, 0, 0, row, factor, sum);
        return;
    }
    if (args.seq_q == 14 || args.seq_q == 15) {
        uint32_t operand[N / 16][4] = {}, *words = reinterpret_cast<uint32_t*>(tile_smem);
        for (int i = t; i < 4096; i += 128) words[i] = 0x7f7f7f7fu;
        __syncthreads();
        fa::pack_operand<scalar>(operand, x);
        fa::store_operand_transposed(tile_smem, warp, operand);
        __syncthreads();
        if (args.seq_q == 14) {
            for (int i = t; i < 4096; i += 128) out[i] = __uint_as_float(words[i]);
            return;
        }
        fa::load_operand_transposed(operand, tile_smem, warp);
        for (int i = 0; i < N / 16 * 4; ++i) out[t * 64 + 42 + i] = __uint_as_float(operand[i / 4][i % 4]);
    }
    if (args.seq_q == 16) {
        const int visible[2] = {2 * row - 20, 2 * (row + 8) - 20};
        fa::mask_columns(x, visible, 0.5f);
    }
    if (args.seq_q == 17) {
        const int first[2] = {row - 20, row - 12}, end[2] = {2 * row - 20, 2 * (row + 8) - 20};
        fa::keep_columns(x, first, end, 0.5f);
    }
    for (int i = 0; i < N / 2; ++i) out[t * 64 + i] = x[i];
    for (int half = 0; half < 2; ++half) out[t * 64 + 40 + half] = two[half];
}
"""
THREAD = np.arange(128)
ROW, PAIR = 16 * (THREAD // 32) + THREAD % 32 // 4, THREAD % 4 * 2


def registers(matrix: Any) -> Any:
    """Each thread's registers (128, N / 2) of a matrix (64, N)."""
    i = np.arange(matrix.shape[1] // 2)
    return matrix[ROW[:, None] + i // 2 % 2 * 8, i // 4 * 8 + PAIR[:, None] + i % 2]


def halves(matrix: Any) -> Any:
    """The same apart by row: (128, row, register)."""
    own = registers(matrix)
    return np.stack([own[:, np.arange(own.shape[1]) // 2 % 2 == half] for half in (0, 1)], 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accumulators(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """Each word on whole numbers, to the bit where it only moves or adds."""
    x, q = integers(64, COLUMNS).astype(float), integers(2, 64, 64, seed=1, most=3).astype(float)
    heads = np.zeros((4, 512, 64))
    heads[:2, :64] = q
    kernel = bound(backend, tmp_path, BODY, {"q": ("Q", [64, 64, 1, 1], 128)}, {"K": x, "Q": heads}, dtype, shared=16384 + 64)

    def answers(case: int, **fields: Any) -> tuple[Any, Any, Any]:
        got = with_fields(kernel, seq_q=case, **fields)
        each = got.view(np.float32)[: 128 * 64].reshape(128, 64)
        return each[:, :40], each[:, 40:42], got

    rows = np.arange(64)
    factor = (rows % 5 - 1.0)[:, None]
    masked = np.where(np.arange(COLUMNS) < (2 * rows - 20)[:, None], x, -np.inf)
    assert np.array_equal(answers(0)[0], registers(masked))
    assert np.array_equal(answers(1)[1], halves(x).max(2))
    p = np.exp2(x * 0.25 - factor)
    found, sums, _ = answers(2)
    assert np.allclose(found, registers(p), rtol=2**-21, atol=0) and np.allclose(sums, halves(p).sum(2), rtol=2**-20, atol=0)
    assert np.array_equal(answers(3)[0], registers(x * factor))
    own = registers(x.astype(TYPES[dtype]))
    assert np.array_equal(answers(4)[2].view(np.uint32)[: 128 * 64].reshape(128, 64)[:, :20], own.view(np.uint32))
    chunk = np.arange(1024)
    tile = answers(5)[2][:16384].reshape(-1, 16)[chunk ^ (chunk >> 3 & 7)].view(TYPES[dtype]).reshape(2, 64, 64)
    wanted = (x * factor).astype(TYPES[dtype])
    assert np.array_equal(tile[0], wanted[:, :64]) and np.array_equal(tile[1][:, :16], wanted[:, 64:])
    assert (tile[1][:, 16:].copy().view(np.uint8) == 0x7F).all()
    assert np.array_equal(answers(6)[0][:, :32], registers(sum(head @ head.T for head in q)))

    # the online softmax of a thread's two rows
    columns = np.arange(COLUMNS)
    assert np.array_equal(answers(7, seq_kv=60)[0], registers(np.where(columns < 44, x, -np.inf)))
    for scale, sign in ((-2.0, -1.0), (0.0, 0.0), (3.0, 1.0)):
        assert np.array_equal(answers(8, scale=scale)[0], registers(sign * x))

    def own_rows(column: Any) -> Any:
        """The values of each thread's two rows, of a column of 64."""
        return np.stack([column[ROW], column[ROW + 8]], 1)

    seen = np.where(columns < (rows % 3 * 40)[:, None], x, -np.inf).max(1) * 0.25
    assert np.array_equal(answers(9)[1], own_rows(np.where(rows % 3 == 0, 0, seen)))
    largest, before = x.max(1) * 0.25, factor[:, 0]
    raised = np.exp2(before - np.maximum(before, largest))
    sums, references, _ = answers(10)
    assert np.array_equal(references, own_rows(np.maximum(before, largest)))
    assert np.allclose(sums[:, 2:4], own_rows(raised), rtol=2**-21, atol=0)
    assert np.allclose(sums[:, :2], own_rows(raised) * [1, 2], rtol=2**-21, atol=0)
    reference = largest - np.where(rows < 32, 7, 0)  # of the upper warps it was 9 too low, more than the slack
    p, references, got = answers(11)
    o, sums = (got.view(np.float32)[: 128 * 64].reshape(128, 64)[:, first : first + 2] for first in (42, 44))
    power = np.exp2(x * 0.25 - reference[:, None])
    shrunk = own_rows(np.where(rows < 32, 1, 2.0**-9))
    assert np.array_equal(references, own_rows(reference)) and np.array_equal(o, shrunk)
    assert np.allclose(p, registers(power), rtol=2**-20, atol=0)
    assert np.allclose(sums, halves(power).sum(2) + [64, 128] * shrunk, rtol=2**-20, atol=0)
    total = own_rows(np.maximum(0, rows - 4)) * [4, 0] + own_rows(rows) * [0, 4]
    sums, inverse, _ = answers(12)
    assert np.array_equal(sums[:, :2], total) and np.allclose(inverse, np.where(total, 1 / np.maximum(1, total), 0), rtol=2**-22)
    value = np.where(rows == 3, -np.inf, (rows % 5 - 1) * np.log(2) + np.log(rows + 1))
    got = answers(13)[2].view(np.float32)
    assert np.allclose(got[:50], value[:50], rtol=1e-6, atol=1e-6) and np.isnan(got[50:64]).all(), "no row behind the last"

    # an operand transposed: a slab has a row of 64 for each of its columns
    slab = answers(14)[2][:16384].reshape(-1, 16)[chunk ^ (chunk >> 3 & 7)].view(TYPES[dtype]).reshape(128, 64)
    assert np.array_equal(slab[:COLUMNS], x.T.astype(TYPES[dtype])) and (slab[COLUMNS:].view(np.uint8) == 0x7F).all()
    packed = answers(15)[2].view(np.uint32)[: 128 * 64].reshape(128, 64)[:, 42:62]
    assert np.array_equal(packed, own.view(np.uint32))
    assert np.array_equal(answers(16)[0], registers(np.where(np.isinf(masked), 0.5, x)))
    assert np.array_equal(answers(17)[0], registers(np.where(np.isinf(masked) | (columns < (rows - 20)[:, None]), 0.5, x)))


#: Parts of 64 x 32 from K, their references and row sums from V; O and the stats of what is merged.
PARTS = """\
#include <fa/key_parts.cuh>
constexpr int R = 16, PARTS = 4;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    const scalar *in = static_cast<const scalar*>(args.K.data), *stats = static_cast<const scalar*>(args.V.data);
    float *out = static_cast<float*>(args.O.data), *parts = out + 128 * 20;
    int* arrivals = reinterpret_cast<int*>(parts + PARTS * fa::part_floats<R>);
    int* last_smem = reinterpret_cast<int*>(fa::dynamic_shared_1024());
    const int t = threadIdx.x, row = 16 * (t / 32) + t % 32 / 4, pair = t % 4 * 2, count = args.seq_q;
    if (t == 0) *arrivals = 0;
    __syncthreads();
    float x[R], reference[2], row_sum[2];
    for (int part = 0; part < count; ++part) {
        for (int i = 0; i < R; ++i) x[i] = fa::widen(in[(64 * part + row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + pair + i % 2]);
        for (int half = 0; half < 2; ++half) {
            const scalar* two = stats + (64 * part + row + 8 * half) * 2;
            reference[half] = fa::widen(two[0]), row_sum[half] = t % 4 == 1 ? fa::widen(two[1]) : 0.0f;
        }
        fa::store_part(parts + part * fa::part_floats<R>, x, reference, row_sum);
        __syncthreads();
        if (t == 0) *last_smem = fa::arrives_last(arrivals, count);
        __syncthreads();
        if (*last_smem != (part == count - 1)) __trap();
    }
    fa::merge_parts<PARTS>(x, reference, row_sum, parts, count);
    for (int i = 0; i < R; ++i) out[t * 20 + i] = x[i];
    for (int half = 0; half < 2; ++half) out[t * 20 + 16 + half] = reference[half], out[t * 20 + 18 + half] = row_sum[half];
    if (t == 0 && *arrivals != 0) __trap();
}
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_of_keys(count: int, backend: Backend, tmp_path: Path) -> None:
    """Merged parts are the sums of all keys, the last to arrive says so, and a part with no key of a row has no weight."""
    x = integers(4, 64, 32).astype(float)
    reference, row_sum = integers(4, 64, seed=1, most=4).astype(float), 1.0 + integers(4, 64, seed=2, most=3) % 4
    row_sum[1, ::3] = 0
    reference[1, ::3] = 100
    kernel = bound(
        backend,
        tmp_path,
        PARTS,
        {},
        {"K": x.reshape(256, 32), "V": np.stack([reference, row_sum], -1).reshape(256, 2)},
        "bfloat16",
        shared=64,
    )
    got = with_fields(kernel, seq_q=count).view(np.float32)[: 128 * 20].reshape(128, 20)
    x, reference, row_sum = x[:count], reference[:count], row_sum[:count]
    seen = row_sum != 0
    top = np.where(seen, reference, -np.inf).max(0)
    weight = np.where(seen, np.exp2(reference - top), 0)
    out = (np.where(seen[..., None], x, 0) * weight[..., None]).sum(0)
    assert np.allclose(got[:, :16], registers(out), rtol=2**-20, atol=2**-18)
    rows = ROW[:, None] + [0, 8]
    assert np.array_equal(got[:, 16:18], top[rows])
    assert np.allclose(got[::4, 18:], (weight * row_sum).sum(0)[rows][::4], rtol=2**-20) and not got[:, 18:].reshape(-1, 4, 2)[:, 1:].any()
