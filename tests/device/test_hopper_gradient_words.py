"""The words that a backward pass on wgmma needs beside the forward's, against numpy on every backend that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_kernel import HEADS, ROWS, TYPES, WIDTH, bound, with_fields
from test_hopper_words import chained, entry
from word_kernel import integers

from harness.backends import Backend, pick
from harness.backends.host.backend import Host
from harness.fault import KernelFault

WITHOUT_MAPS = entry().replace(", ) {", ") {")

#: D (64, N) = A^T (64, 64) B (64, N): A and B by rows, both transposed by their descriptors; D's registers hold NaN before.
TRANSPOSED = (
    "template <int N> __device__ void product(float* out, uint64_t a, uint64_t b) {\n"
    """\
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = __uint_as_float(0x7fc00000u);
    fa::discard(d);
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        fa::wgmma_ss<scalar, true, true>(d, fa::descriptor_advance(a, step * 2048), fa::descriptor_advance(b, step * 2048), step > 0);
    fa::wgmma_commit();
    fa::wgmma_wait<0>(d);
    float other[N / 2];
    for (int i = 0; i < N / 4; ++i) other[i] = d[i];
    fa::moved(other, d, N / 4);
    for (int i = 0; i < N / 2; ++i) out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2] = other[i];
}
"""
    + entry("q", "v")
    + """\
    unsigned char *q_smem = fa::dynamic_shared_1024(), *v_smem = q_smem + 8192;
    uint64_t* full = reinterpret_cast<uint64_t*>(v_smem + 16384);
    if (threadIdx.x == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, 3 * 8192);
        fa::tma_load_4d(q_smem, &q_map, full, 0, 0, 0, 0);
        for (int slab = 0; slab < 2; ++slab) fa::tma_load_4d(v_smem + 8192 * slab, &v_map, full, 0, 0, slab, 0);
    }
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    const uint64_t a = fa::descriptor_here(fa::smem_descriptor_mn_major(q_smem, 8192)), b = fa::smem_descriptor_mn_major(v_smem, 8192);
    if (args.seq_q == 64) product<64>(static_cast<float*>(args.O.data), a, b);
    else if (args.seq_q == 96) product<96>(static_cast<float*>(args.O.data), a, b);
    else product<128>(static_cast<float*>(args.O.data), a, b);
}
"""
)
MAPS: dict[str, tuple[str, list[int], int]] = {"q": ("Q", [64, 64, 1, 1], 128), "v": ("V", [64, 64, 1, 1], 128)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wgmma_of_a_transposed(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """Integers to the bit, normal numbers in a tensor core's arithmetic."""
    draw = np.random.RandomState(5)
    for a, b in ((integers(64, 64), integers(64, 128, seed=1)), (draw.randn(64, 64), draw.randn(64, 128))):
        a, b = a.astype(TYPES[dtype]), b.astype(TYPES[dtype])
        v = np.zeros((HEADS, ROWS, WIDTH), TYPES[dtype])
        v[:2, :64] = b.reshape(64, 2, 64).transpose(1, 0, 2)
        kernel = bound(backend, tmp_path, TRANSPOSED, MAPS, {"Q": a, "V": v}, dtype, shared=3 * 8192 + 64)
        for n in (64, 96, 128):
            got = with_fields(kernel, seq_q=n)[: 256 * n].view(np.float32).reshape(64, n)
            assert np.array_equal(got, chained(a.T, b[:, :n], 0, dtype)), n


#: D (64, 64) of each product of whole tiles. A: two heads of Q, side by side or one below the other; B: K and V likewise.
TILES = (
    "#include <fa/wgmma_tile.cuh>\n"
    + entry("q", "k", "v")
    + """\
    unsigned char* q_smem = fa::dynamic_shared_1024();
    unsigned char *k_smem = q_smem + 16384, *v_smem = k_smem + 16384;
    uint64_t* full = reinterpret_cast<uint64_t*>(v_smem + 16384);
    if (threadIdx.x == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, 6 * 8192);
        for (int slab = 0; slab < 2; ++slab) {
            fa::tma_load_4d(q_smem + 8192 * slab, &q_map, full, 0, 0, slab, 0);
            fa::tma_load_4d(k_smem + 8192 * slab, &k_map, full, 0, 0, slab, 0);
            fa::tma_load_4d(v_smem + 8192 * slab, &v_map, full, 0, 0, slab, 0);
        }
    }
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2, start = args.causal_shift;
    const uint64_t a = fa::smem_descriptor_k_major(q_smem), a_rows = fa::smem_descriptor_mn_major(q_smem, 8192);
    const uint64_t b = fa::smem_descriptor_k_major(k_smem), b_rows = fa::smem_descriptor_mn_major(v_smem, 8192);
    uint32_t a_reg[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
            a_reg[step][i] = *reinterpret_cast<const uint32_t*>(
                static_cast<const uint16_t*>(args.Q.data) + (row + i % 2 * 8) * 64 + 16 * step + pair + i / 2 * 8);
    float d[32];
    for (int i = 0; i < 32; ++i) d[i] = start;
    if (args.head_dim == 0) fa::issue_abt<scalar, 128>(d, a, 8192, b, 8192);
    if (args.head_dim == 1) fa::issue_ab<scalar>(d, a_reg, b_rows, start != 0);
    if (args.head_dim == 2) fa::issue_ab<scalar, 4>(d, a, b_rows, start != 0);
    if (args.head_dim == 3) fa::issue_atb<scalar, 128>(d, a_rows, b_rows);
    if (args.head_dim == 4) fa::issue_atb<scalar, 128>(fa::first_of<24>(d), a_rows, b_rows);  // 48 columns, the others stay
    if (args.head_dim == 5) fa::issue_atb<scalar, 128, true>(d, a_rows, b_rows);
    if (args.head_dim == 6) fa::issue_atbt<scalar, 64>(d, a_rows, b, 8192);
    if (args.head_dim == 7) fa::issue_atbt<scalar, 64, true>(d, a_rows, b, 8192);
    if (args.head_dim == 8) fa::issue_atbt<scalar, 64, false, true>(d, a_rows, b, 8192);
    fa::wgmma_wait<0>(d, a_reg);
    float* out = static_cast<float*>(args.O.data);
    for (int i = 0; i < 32; ++i) out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + pair + i % 2] = d[i];
}
"""
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_tiles(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """A B^T over two slabs, A^T B over two tiles and A^T B^T begin from zero, or add to D where they are told to; A B from registers too."""
    draw = np.random.RandomState(7)
    q, k, v = (draw.randn(2, 64, 64).astype(TYPES[dtype]) for _ in range(3))
    given = {name: np.zeros((HEADS, ROWS, WIDTH), TYPES[dtype]) for name in "QKV"}
    for name, values in zip("QKV", (q, k, v), strict=True):
        given[name][:2, :64] = values
    maps: dict[str, tuple[str, list[int], int]] = {name.lower(): (name, [64, 64, 1, 1], 128) for name in "QKV"}
    kernel = bound(backend, tmp_path, TILES, maps, given, dtype, shared=6 * 8192 + 64)
    for start in (0, 2):
        transposed = chained(np.vstack(q).T, np.vstack(v), 0, dtype)
        wanted = (
            chained(np.hstack(q), np.hstack(k).T, 0, dtype),
            chained(q[0], v[0], start, dtype),
            chained(q[0], v[0], start, dtype),
            transposed,
            np.hstack([transposed[:, :48], np.full((64, 16), start)]),
            chained(np.vstack(q).T, np.vstack(v), start, dtype),
            chained(q[0].T, k[0].T, 0, dtype),
            chained(q[0].T, k[0].T, start, dtype),
            chained(q[0].T, k[0].T, 0, dtype),
        )
        for form, want in enumerate(wanted):
            got = with_fields(kernel, head_dim=form, causal_shift=start)[:16384].view(np.float32).reshape(64, 64)
            assert np.array_equal(got, want), (form, start)


#: S and dP (64, 64) by rows in Q and K, the columns' numbers in V: reference, delta. O: P, dS, P with columns cleared, tiles of dS.
COLUMNS = (
    "#include <fa/accumulator.cuh>\n"
    + WITHOUT_MAPS
    + """\
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    float* out = static_cast<float*>(args.O.data);
    float* numbers_smem = reinterpret_cast<float*>(fa::dynamic_shared_1024() + 16384);
    numbers_smem[t] = fa::widen(static_cast<const scalar*>(args.V.data)[t]);
    __syncthreads();
    auto place = [&](int i) { return (row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + pair + i % 2; };
    float p[32], ds[32];
    for (int i = 0; i < 32; ++i) p[i] = fa::widen(static_cast<const scalar*>(args.Q.data)[place(i)]);
    for (int i = 0; i < 32; ++i) ds[i] = fa::widen(static_cast<const scalar*>(args.K.data)[place(i)]);
    uint32_t whole[4][4], half[2][4];
    auto score = [&](int ahead) {  // all at once; or a quarter, then the others a step at a time
        fa::exponentiate_columns(p, 0.5f, numbers_smem, 0, ahead);
        for (int step = 0; step < 4; ++step) {
            if (step >= ahead) fa::exponentiate_columns(p, 0.5f, numbers_smem, step, step + 1);
            fa::score_gradient(ds, p, numbers_smem + 64, step, step + 1);
            fa::pack_operand<scalar>(whole, ds, step, step + 1);
        }
    };
    if (args.causal_shift == 0) {
        fa::exponentiate_columns(p, 0.5f, numbers_smem);
        fa::score_gradient(ds, p, numbers_smem + 64);
        fa::pack_operand<scalar>(whole, ds);
    } else score(args.causal_shift < 0 ? 4 : 1);
    for (int i = 0; i < 32; ++i) out[place(i)] = p[i];
    for (int i = 0; i < 32; ++i) out[4096 + place(i)] = ds[i];
    float first_32[16];
    for (int i = 0; i < 16; ++i) first_32[i] = ds[i];
    fa::pack_operand<scalar>(half, first_32);
    unsigned char* own_smem = fa::dynamic_shared_1024() + t / 32 * 2048;
    fa::store_operand(own_smem, 8192, whole);
    fa::store_operand(own_smem + 8192, 8192, half);
    fa::store_operand(own_smem + 8192, 8192, half, 32);
    const int first[2] = {row - 3 + args.causal_shift, row + 5 + args.causal_shift};
    float seen[32];
    for (int i = 0; i < 32; ++i) seen[i] = p[i];
    fa::clear_columns(p, first);
    fa::clear_hidden(seen, args, 0, args.seq_kv - 40);
    for (int i = 0; i < 32; ++i) out[8192 + place(i)] = p[i], out[16384 + place(i)] = seen[i];
    __syncthreads();
    for (int i = t; i < 4096; i += 128) out[12288 + i] = reinterpret_cast<const float*>(fa::dynamic_shared_1024())[i];
}
"""
)


def test_columns(backend: Backend, tmp_path: Path) -> None:
    """Exponentials, gradients and masks of transposed scores take numbers by columns, at once or a step at a time; operands lie swizzled,
    whole and in halves."""
    draw = np.random.RandomState(6)
    x, dp = draw.randn(64, 64).astype(np.float16), draw.randn(64, 64).astype(np.float16)
    numbers = draw.randn(128).astype(np.float16)
    numbers[3] = np.inf
    given = {"Q": x, "K": dp, "V": numbers}
    kernel = bound(backend, tmp_path, COLUMNS, {}, given, "float16", shared=16384 + 512)
    for shift in (0, -100, 30, 100):
        got = with_fields(kernel, causal_shift=shift).view(np.float32)
        p, ds, cleared = (got[4096 * i : 4096 * (i + 1)].reshape(64, 64) for i in range(3))
        wanted = np.exp2(np.float32(0.5) * x.astype(np.float32) - numbers[:64].astype(np.float32))
        assert np.allclose(p, wanted, rtol=1e-6, atol=0)
        assert (p[:, 3] == 0).all()
        assert np.array_equal(ds, p * (dp.astype(np.float32) - numbers[64:].astype(np.float32)))
        assert np.array_equal(got[16384:20480].reshape(64, 64), np.where(np.arange(64)[:, None] < 40, p, 0))
        hidden = np.arange(64) < np.arange(64)[:, None] - 3 + shift
        assert np.array_equal(cleared, np.where(hidden, 0, p)), shift
        tiles = got[12288:].view(np.uint16)[: 2 * 4096].reshape(2, 64, 8, 8)
        chunk = np.arange(8) ^ (np.arange(64) % 8)[:, None]
        whole, halves = (tile[np.arange(64)[:, None], chunk].reshape(64, 64).view(np.float16) for tile in tiles)
        rounded = ds.astype(np.float16)
        assert np.array_equal(whole, rounded)
        assert np.array_equal(halves, np.concatenate([rounded[:, :32]] * 2, axis=1))


#: Six blocks; the turn and the sum are O's first words, -1 at first, then whether each has its turn and another.
TURNS = (
    "#include <fa/atomic.cuh>\n"
    + WITHOUT_MAPS
    + """\
    int* turn = static_cast<int*>(args.O.data);
    if (threadIdx.x >= 32) return;
    if (threadIdx.x == 5) {
        fa::wait_for_turn(turn, int(blockIdx.x) - 1);
        turn[2 + blockIdx.x] = fa::has_turn(turn, int(blockIdx.x) - 1) + 2 * fa::has_turn(turn, blockIdx.x);
    }
    __syncwarp();
    if (threadIdx.x == 7) turn[1] = 3 * turn[1] + int(blockIdx.x);
    __syncwarp();
    if (threadIdx.x == 5) fa::pass_turn(turn, blockIdx.x);
}
"""
)


def test_turns(backend: Backend, tmp_path: Path) -> None:
    """Blocks in their order, each behind what the one before has written."""
    wanted: Any = -1
    for block in range(6):
        wanted = 3 * wanted + block
    for _ in range(3):
        got = with_fields(bound(backend, tmp_path, TURNS, {}, {}, grid=6)).view(np.int32)
        assert got[:8].tolist() == [5, wanted, 1, 1, 1, 1, 1, 1]


def test_a_turn_that_nobody_can_pass_is_named(tmp_path: Path) -> None:
    """Blocks in descending order wait for blocks that have not begun: a GPU that runs all at once does not show it."""
    backward = TURNS.replace("int(blockIdx.x) - 1)", "4 - int(blockIdx.x))").replace("(turn, blockIdx.x)", "(turn, 5 - int(blockIdx.x))")
    kernel = bound(pick("cpu"), tmp_path, backward, {}, {}, grid=6)
    with pytest.raises(KernelFault, match="all blocks that run wait, this one for the turn of one that has not begun"):
        with_fields(kernel)


#: Six blocks leave a number each in O, and what each has found in the counter; the last adds all the numbers up.
ARRIVALS = (
    "#include <fa/atomic.cuh>\n__device__ int counters[2];\n"
    + WITHOUT_MAPS
    + """\
    int* out = static_cast<int*>(args.O.data);
    if (threadIdx.x > 0) return;
    out[8 + blockIdx.x] = 10 + blockIdx.x;
    const int before = out[blockIdx.x] = fa::atomic_add_acq_rel(counters, 2);
    if (before == 10) out[6] = out[8] + out[9] + out[10] + out[11] + out[12] + out[13];
    fa::reset_by_last(counters, 6);
}
"""
)


@pytest.mark.parametrize("check", [None, "race"])
def test_the_last_block(backend: Backend, check: str | None, tmp_path: Path) -> None:
    """It sees what the others have left, and the next launch finds the counters as this one did."""
    if check and backend.name != "cpu":
        pytest.skip("the check is the CPU's")
    kernel = bound(Host(check=check) if check else backend, tmp_path, ARRIVALS, {}, {}, grid=6)
    for _ in range(3):
        got = with_fields(kernel).view(np.int32)
        assert sorted(got[:6].tolist()) == [0, 2, 4, 6, 8, 10] and got[6] == 75


#: Six blocks add a number each to O's words from 32 on, which the first has cleared; the turn is its first word.
ADD_IN_TURNS = (
    "#include <fa/atomic.cuh>\n"
    + WITHOUT_MAPS
    + """\
    int* turn = static_cast<int*>(args.O.data);
    float *to = static_cast<float*>(args.O.data) + 32, *numbers_smem = reinterpret_cast<float*>(fa::dynamic_shared_1024());
    const float numbers[6] = {1.0f, 1e8f, -1e8f, 2.0f, 4.0f, 8.0f};
    if (threadIdx.x > 0) return;
    for (int i = 0; i < 64; ++i) numbers_smem[i] = numbers[blockIdx.x];
    fa::fence_proxy_async_shared();
    fa::wait_for_turn(turn, int(blockIdx.x) - 1);
    for (int i = 0; i < 64 && blockIdx.x == 0; ++i) to[i] = 0.0f;
    fa::fence_proxy_async_global();
    fa::bulk_add_f32(to, numbers_smem, 64);
    fa::bulk_commit();
    fa::bulk_wait<0>();
    fa::pass_turn(turn, blockIdx.x);
}
"""
)


def test_bulk_reductions_in_turns(backend: Backend, tmp_path: Path) -> None:
    """In the order of the turns, behind what the first block has stored: 2 any earlier, or 1 behind -1e8, gives another sum."""
    wanted = np.float32(0)
    for number in (1, 1e8, -1e8, 2, 4, 8):
        wanted += np.float32(number)
    got = with_fields(bound(backend, tmp_path, ADD_IN_TURNS, {}, {}, grid=6)).view(np.float32)
    assert wanted == 14 and (got[32:96] == wanted).all()


ADD = (
    entry("o")
    + """\
    unsigned char* zeros_smem = fa::dynamic_shared_1024();
    float* numbers_smem = reinterpret_cast<float*>(zeros_smem + 8192);
    for (int i = threadIdx.x; i < 2048; i += 128) reinterpret_cast<uint32_t*>(zeros_smem)[i] = 0, numbers_smem[i] = 0.5f * i;
    fa::fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x > 0) return;
    float* to = static_cast<float*>(args.O.data);
    fa::tma_store_4d(&o_map, zeros_smem, 0, 0, 0, 0);
    fa::bulk_commit();
    fa::bulk_wait<0>();
    fa::bulk_add_f32(to, numbers_smem, 1024);
    fa::bulk_add_f32(to + 4, numbers_smem + 1024, 16);
    fa::bulk_commit();
    fa::bulk_wait<0>();
}
"""
)


def test_bulk_reductions(backend: Backend, tmp_path: Path) -> None:
    """Floats are added where they meet, and nothing is written beside them."""
    got = with_fields(bound(backend, tmp_path, ADD, {"o": ("O", [64, 64, 1, 1], 128)}, {}, "float16", shared=16384)).view(np.float32)
    wanted = np.zeros(2048, np.float32)
    wanted[:1024] += np.arange(1024) / 2
    wanted[4:20] += np.arange(1024, 1040) / 2
    assert np.array_equal(got[:2048], wanted)
    assert (got[2048:].view(np.uint32) == 0xFFFFFFFF).all()
