"""The words for Hopper, barriers, TMA and wgmma, against numpy on every backend that has them; products also against the H200's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_kernel import HEADS, ROWS, TYPES, WIDTH, bound, with_fields
from test_mma_words import tensor_core
from test_words import golden
from word_kernel import integers, run

from harness.backends import Backend, pick
from harness.backends.host.backend import Host
from harness.fault import KernelFault

ENTRY = 'extern "C" __global__ void forward(const __grid_constant__ fa::Args args, {maps}) {{\n'
MAP_PARAMETER = "const __grid_constant__ fa::TensorMap {}_map"


def entry(*maps: str) -> str:
    """The beginning of an entry that is passed these maps."""
    return ENTRY.format(maps=", ".join(map(MAP_PARAMETER.format, maps)))


# -- barriers ---------------------------------------------------------------------------------------------------------

#: Warp 0 hands 8 numbers through 2 stages to warps 1 to 3; named barriers order these three; a peek never lies.
RING = """\
    uint64_t* full = fa::dynamic_shared<uint64_t>();  // [2]
    uint64_t* empty = full + 2;
    int* stage_smem = reinterpret_cast<int*>(empty + 2);  // [2][32]
    int* sum_smem = stage_smem + 64;                      // [96]
    if (t == 0) {
        for (int i = 0; i < 2; ++i) fa::mbarrier_init(full + i, 32), fa::mbarrier_init(empty + i, 3);
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    if (t < 32) {
        for (int i = 0; i < 8; ++i) {
            fa::mbarrier_wait_parity(empty + i % 2, (i / 2 & 1) ^ 1);
            stage_smem[i % 2 * 32 + t] = 100 * i + t;
            fa::mbarrier_arrive(full + i % 2);
        }
        fa::bar_arrive(2, 128);
    } else {
        int sum = 0;
        for (int i = 0; i < 8; ++i) {
            const bool before = fa::mbarrier_test_parity(full + i % 2, i / 2 & 1);
            fa::mbarrier_wait_parity(full + i % 2, i / 2 & 1);
            if (before && !fa::mbarrier_test_parity(full + i % 2, i / 2 & 1)) sum = -1000000;
            sum += stage_smem[i % 2 * 32 + t % 32];
            __syncwarp();
            if (t % 32 == 0) fa::mbarrier_arrive(empty + i % 2);
        }
        sum_smem[t - 32] = sum;
        if (t < 64) fa::barrier_sync(1, 96);  // by two ways
        else fa::barrier_sync(1, 96);
        const int other = sum_smem[(t + 40) % 96];
        fa::bar_sync(2, 128);
        out[t] = other + stage_smem[t % 32];
    }"""


@pytest.mark.parametrize("seed", [None, 1, "race"])
def test_barriers(seed: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """A ring of stages under mbarriers, and named barriers; on the CPU also under random schedules and without a race."""
    if seed is not None and backend.name != "cpu":
        pytest.skip("schedules are the CPU's")
    if backend.name == "cuda" and backend.device().arch != "sm_90":
        pytest.skip("no mbarrier with parity")
    chosen = backend if seed is None else Host(check="race") if seed == "race" else Host(seed=int(seed))
    got = run(chosen, tmp_path, RING, before="#include <fa/barrier.cuh>\nusing fa::uint64_t;", block=128, shared=1024).astype(int)
    t = np.arange(32, 128)
    assert np.array_equal(got[32:128], 2800 + 8 * ((t + 40) % 96 % 32) + 600 + t % 32)


#: A producer loads 8 tiles of 64 rows x 128 columns, of which the tensor has 64, through 2 stages; warp 1 sends them on to another head,
#: warp 2 looks for what is not 0 beyond the tensor.
TILES = (
    """\
#include <fa/stage.cuh>
struct Shared {
    unsigned char tile[2][2 * 8192];
    uint64_t full[2], empty[2];
};
"""
    + ENTRY.format(maps=", ".join(map(MAP_PARAMETER.format, ("k", "o"))))
    + """\
    Shared& shared = *reinterpret_cast<Shared*>(fa::dynamic_shared_1024());
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        fa::mbarrier_init_ring(shared.full, shared.empty, 2);
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    fa::RingPlace<2> place;
    if (threadIdx.x == 0) {
        for (int n = 0; n < 8; ++n, place.next()) {
            fa::mbarrier_wait_parity(&shared.empty[place.stage], place.parity ^ 1);
            fa::tma_load_tile<8192>(shared.tile[place.stage], k_map, shared.full[place.stage], 64 * n, 1, 0);
        }
    }
    if (warp == 0 || warp == 3) return;
    bool other = false;
    for (int n = 0; n < 8; ++n) {
        if (n % 2 == 0 && !fa::are_full<2>(shared.full, place)) fa::wait_full<2>(shared.full, place);  // this tile and the next
        if (threadIdx.x == 32) {
            fa::tma_store_tile<1, 8192>(o_map, shared.tile[place.stage], 64 * n, 2, 0);
            fa::bulk_commit(), fa::bulk_wait_read<0>();
        }
        for (int i = threadIdx.x % 32; i < 2048; i += 32) other |= reinterpret_cast<uint32_t*>(shared.tile[place.stage] + 8192)[i] != 0;
        __syncwarp();
        fa::release_stage(shared.empty, place);
    }
    if (warp == 2) fa::row_pointer<scalar>(args.O, 0, 3, 0)[threadIdx.x % 32] = fa::narrow<scalar>(other ? 1.0f : 0.0f);
}
"""
)


@pytest.mark.parametrize("seed", [None, 1, "race"])
def test_tiles_through_a_ring(seed: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Tiles are loaded and stored slab by slab, and a stage is given back by one lane of each warp."""
    if seed is not None and backend.name != "cpu":
        pytest.skip("schedules are the CPU's")
    chosen = backend if seed is None else Host(check="race") if seed == "race" else Host(seed=int(seed))
    k = integers(HEADS, ROWS, WIDTH).astype(float)
    maps = {"k": ("K", [64, 64, 1, 1], 128), "o": ("O", [64, 64, 1, 1], 128)}
    kernel = bound(chosen, tmp_path, TILES, maps, {"K": k})
    got = with_fields(kernel).view(TYPES["bfloat16"])[: HEADS * ROWS * WIDTH].reshape(HEADS, ROWS, WIDTH).astype(float)
    assert np.array_equal(got[2], k[1]) and (got[3, 0, :32] == 0).all()


SPECIAL = """\
extern "C" __global__ void __launch_bounds__(384, 1) forward(const __grid_constant__ fa::Args args) {
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    uint64_t* out = static_cast<uint64_t*>(args.O.data);
    float kept[4] = {1, 2, 3, 4};
    if (fa::warpgroup_index() == 0) {
        fa::setmaxnreg_dec<24>();
        fa::schedule_fence();
        if (threadIdx.x == 0) {
            out[0] = fa::smem_descriptor(tile_smem, 16, 1024) ^ fa::smem_descriptor_k_major(tile_smem);
            out[1] = fa::smem_descriptor(tile_smem, 8192, 1024) ^ fa::smem_descriptor_mn_major(tile_smem, 8192);
            out[2] = fa::smem_descriptor(tile_smem + 2048, 4096, 512) - fa::smem_descriptor(tile_smem, 0, 0);
            out[3] = fa::smem_descriptor(tile_smem, 0, 0) >> 61;
            out[4] = fa::descriptor_advance(out[2], 32);
        }
    } else {
        fa::setmaxnreg_inc<240>();
        fa::ready(kept);
        out[threadIdx.x] = uint64_t(kept[threadIdx.x % 4]) + 10 * fa::warpgroup_index();
    }
}
"""


def test_specialised_warpgroups(backend: Backend, tmp_path: Path) -> None:
    """Registers are handed over, and each thread knows its warpgroup; a descriptor's fields are where PTX has them."""
    kernel = bound(backend, tmp_path, SPECIAL, {}, {}, block=256, shared=8192)
    got = with_fields(kernel).view(np.uint64)
    step = (2048 >> 4) + (4096 >> 4 << 16) + (512 >> 4 << 32)
    assert got[:5].tolist() == [0, 0, step, 2, step + 2]
    assert np.array_equal(got[128:256], 11 + np.arange(128) % 4)


# -- TMA --------------------------------------------------------------------------------------------------------------

LOAD = (
    entry("plain", "narrow", "half", "whole")
    + """\
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    uint64_t* full = reinterpret_cast<uint64_t*>(tile_smem + 16384);
    const int t = threadIdx.x, which = args.heads_kv;
    const int bytes[4] = {24 * 2 * 16 * 2 * 2, 32 * 16, 64 * 32, 128 * 64};
    if (t == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, bytes[which]);
        const int c = args.seq_q, r = args.seq_kv, h = args.head_dim, b = args.causal_shift;
        if (which == 0) fa::tma_load_4d(tile_smem, &plain_map, full, c, r, h, b, fa::evict_first);
        if (which == 1) fa::tma_load_4d(tile_smem, &narrow_map, full, c, r, h, b);
        if (which == 2) fa::tma_load_4d(tile_smem, &half_map, full, c, r, h, b, fa::evict_last);
        if (which == 3) fa::tma_load_4d(tile_smem, &whole_map, full, c, r, h, b);
    }
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    for (int i = t; i < bytes[which] / 4; i += 128)
        static_cast<uint32_t*>(args.O.data)[i] = reinterpret_cast<const uint32_t*>(tile_smem)[i];
}
"""
)
LOADS: dict[str, tuple[str, list[int], int]] = {
    "plain": ("K", [24, 16, 2, 2], 0),
    "narrow": ("K", [16, 16, 1, 1], 32),
    "half": ("K", [32, 32, 1, 1], 64),
    "whole": ("K", [64, 64, 1, 1], 128),
}


def box_of(tensor: Any, box: list[int], at: tuple[int, ...]) -> Any:
    """The elements of a box, (batch, head, row, column), with zeros outside the tensor."""
    places = [np.arange(c, c + b) for c, b in zip(reversed(at), reversed(box), strict=True)]
    inside = [(place >= 0) & (place < size) for place, size in zip(places, tensor.shape, strict=True)]
    found = tensor[np.ix_(*(np.clip(place, 0, size - 1) for place, size in zip(places, tensor.shape, strict=True)))]
    return np.where(np.einsum("a,b,c,d->abcd", *inside), found, 0).astype(tensor.dtype)


def image_of(values: Any, swizzle: int) -> Any:
    """The bytes of a box as they lie in shared memory: 16-byte chunks exchanged within the span of the swizzle."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 16)
    chunk = np.arange(len(data))
    image = np.empty_like(data)
    image[chunk ^ (chunk >> 3 & max(swizzle // 16 - 1, 0))] = data
    return image.reshape(-1)


def test_tma_loads(backend: Backend, tmp_path: Path) -> None:
    """Boxes inside, over every edge and outside of a tensor, with each swizzle, to the bit."""
    draw = np.random.RandomState(2)
    tensor = draw.randint(0, 1 << 15, (1, HEADS, ROWS, WIDTH)).astype(np.uint16) % 0x7C00
    kernel = bound(backend, tmp_path, LOAD, LOADS, {"K": tensor.view(np.float16)}, "float16", shared=16384 + 64)
    places = [
        (0, 0, 0, 0),
        (8, 100, 1, 0),
        (-8, 5, 3, 0),
        (48, 505, 2, 0),
        (0, 508, 0, 0),
        (0, -3, 3, 0),
        (8, 2, -1, 0),
        (16, 2, 5, 0),
        (0, 0, 0, 1),
        (64, 0, 0, 0),
    ]
    for which, (_, box, swizzle) in enumerate(LOADS.values()):
        for at in places:
            column, row, head, batch = at
            got = with_fields(kernel, heads_kv=which, seq_q=column, seq_kv=row, head_dim=head, causal_shift=batch)
            wanted = image_of(box_of(tensor, box, at), swizzle)
            assert np.array_equal(got[: wanted.size], wanted), (box, at)


STORE = (
    entry("o")
    + """\
    uint32_t* tile_smem = reinterpret_cast<uint32_t*>(fa::dynamic_shared_1024());
    for (int i = threadIdx.x; i < 2048; i += 128) tile_smem[i] = 2 * i | 2 * i + 1 << 16;
    fa::fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        fa::tma_store_4d(&o_map, tile_smem, args.seq_q, args.seq_kv, args.head_dim, 0);
        fa::bulk_commit();
        fa::bulk_wait_read<0>();
        fa::bulk_wait<0>();
    }
}
"""
)


@pytest.mark.parametrize(
    "at",
    [(0, 64, 1), (8, 470, 3), (64, 0, 2), (16, 512, 0), (0, 0, 4)],
    ids=["inside", "last_rows", "columns_after", "rows_after", "head_after"],
)
def test_tma_stores(at: tuple[int, int, int], backend: Backend, tmp_path: Path) -> None:
    """A swizzled tile inside, over an edge of O and behind it: what lies outside is not written, and nothing else is."""
    kernel = bound(backend, tmp_path, STORE, {"o": ("O", [64, 64, 1, 1], 128)}, {}, "float16")
    numbers = np.arange(4096).astype(np.uint16).reshape(-1, 8)
    chunk = np.arange(512)
    column, row, head = at
    got = with_fields(kernel, seq_q=column, seq_kv=row, head_dim=head).view(np.uint16).reshape(HEADS, ROWS, WIDTH)
    wanted = np.full((HEADS + 1, ROWS + 128, WIDTH + 128), 0xFFFF, np.uint16)
    wanted[head, 64 + row : 128 + row, 64 + column : 128 + column] = numbers[chunk ^ (chunk >> 3 & 7)].reshape(64, 64)
    assert np.array_equal(got, wanted[:HEADS, 64 : 64 + ROWS, 64 : 64 + WIDTH])


def test_stores_at_which_an_h200_stops_are_refused_on_the_cpu(tmp_path: Path) -> None:
    """A column that is no multiple of 16 bytes, a coordinate before the first."""
    kernel = bound(pick("cpu"), tmp_path, STORE, {"o": ("O", [64, 64, 1, 1], 128)}, {}, "float16")
    with pytest.raises(KernelFault, match=r"innermost coordinate.*\bword_forward.cu:"):
        with_fields(kernel, seq_q=3)
    with pytest.raises(KernelFault, match=r"negative coordinate.*\bword_forward.cu:"):
        with_fields(kernel, seq_q=0, seq_kv=-5)


# -- wgmma ------------------------------------------------------------------------------------------------------------

WIDTHS = (16, 64, 80, 128, 176, 256)
#: D (64, N) = start + A (64, 64) B (64, N) by four steps of 16. A: rows of Q. B by columns: rows of K; by rows: V, 64 columns a head.
PRODUCT = (
    "template <int N, bool BY_ROWS, bool REGISTERS> __device__ void product(const fa::Args& args, uint64_t a, uint64_t b) {\n"
    """\
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    const uint16_t* q = static_cast<const uint16_t*>(args.Q.data);
    float d[N / 2];
    uint32_t a_reg[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
            a_reg[step][i] = *reinterpret_cast<const uint32_t*>(q + (row + i % 2 * 8) * 64 + 16 * step + pair + i / 2 * 8);
    for (int i = 0; i < N / 2; ++i) d[i] = args.causal_shift;
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint64_t b_step = fa::descriptor_advance(b, step * (BY_ROWS ? 2048 : 32));
        if (REGISTERS) fa::wgmma_rs<scalar, BY_ROWS>(d, a_reg[step], b_step, step > 0 || args.causal_shift);
        else fa::wgmma_ss<scalar, BY_ROWS>(d, fa::descriptor_advance(a, step * 32), b_step, step > 0 || args.causal_shift);
    }
    fa::wgmma_commit();
    fa::wgmma_wait<0>(d, a_reg);
    float* out = static_cast<float*>(args.O.data);
    for (int i = 0; i < N / 2; ++i) out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2] = d[i];
}
template <int N> __device__ void products(const fa::Args& args, uint64_t a, uint64_t b, uint64_t b_rows) {
    if (args.head_dim == 0) product<N, false, false>(args, a, b);
    if (args.head_dim == 1) product<N, true, false>(args, a, b_rows);
    if (args.head_dim == 2) product<N, false, true>(args, a, b);
    if (args.head_dim == 3) product<N, true, true>(args, a, b_rows);
}
"""
    + entry("q", "k", "v")
    + """\
    unsigned char* q_smem = fa::dynamic_shared_1024();
    unsigned char *k_smem = q_smem + 8192, *v_smem = k_smem + 32768;
    uint64_t* full = reinterpret_cast<uint64_t*>(v_smem + 32768);
    if (threadIdx.x == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, 8192 + 2 * 32768);
        fa::tma_load_4d(q_smem, &q_map, full, 0, 0, 0, 0);
        fa::tma_load_4d(k_smem, &k_map, full, 0, 0, 0, 0);
        for (int slab = 0; slab < 4; ++slab) fa::tma_load_4d(v_smem + 8192 * slab, &v_map, full, 0, 0, slab, 0);
    }
    __syncthreads();
    fa::mbarrier_wait_parity(full, 0);
    const uint64_t a = fa::smem_descriptor_k_major(q_smem), b = fa::smem_descriptor_k_major(k_smem);
    const uint64_t b_rows = fa::smem_descriptor_mn_major(v_smem, 8192);
    switch (args.seq_q) {
"""
    + "".join(f"    case {n}: products<{n}>(args, a, b, b_rows); break;\n" for n in WIDTHS)
    + "    }\n}\n"
)
PRODUCTS: dict[str, tuple[str, list[int], int]] = {
    "q": ("Q", [64, 64, 1, 1], 128),
    "k": ("K", [64, 256, 1, 1], 128),
    "v": ("V", [64, 64, 1, 1], 128),
}


def chained(a: Any, b: Any, start: float, dtype: str) -> Any:
    """start + a b in a tensor core's arithmetic, a step of 16 after the other."""
    d = np.full((a.shape[0], b.shape[1]), start)
    for k in range(0, a.shape[1], 16):
        d = tensor_core(a[:, k : k + 16].astype(np.float64), b[k : k + 16].astype(np.float64), d, dtype)
    return d


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wgmma(dtype: str, backend: Backend, tmp_path: Path) -> None:
    """Every N, operands from shared memory and registers, B by columns and rows: integers to the bit, normal numbers with the H200's."""
    draw = np.random.RandomState(4)
    for family in ("integers", "normal"):
        a, b = (integers(64, 64), integers(64, 256, seed=1)) if family == "integers" else (draw.randn(64, 64), draw.randn(64, 256))
        a, b = a.astype(TYPES[dtype]), b.astype(TYPES[dtype])
        v = np.zeros((HEADS, ROWS, WIDTH), TYPES[dtype])
        v[:, :64] = b.reshape(64, 4, 64).transpose(1, 0, 2)
        kernel = bound(backend, tmp_path, PRODUCT, PRODUCTS, {"Q": a, "K": b.T, "V": v}, dtype, shared=8192 + 65536 + 64)
        for i, n in enumerate(WIDTHS):
            for form in range(4):
                start = (i + form) % 3
                got = with_fields(kernel, seq_q=n, head_dim=form, causal_shift=start)[: 256 * n].view(np.float32).reshape(64, n)
                if family == "integers":
                    assert np.array_equal(got, start + a.astype(np.float64) @ b[:, :n].astype(np.float64)), (n, form)
                    continue
                assert np.array_equal(got, chained(a, b[:, :n], start, dtype)), (n, form)
                recorded = golden(f"wgmma n{n} form {form} {dtype}", got, backend) if n in (80, 256) else None
                assert recorded is None or np.array_equal(got, recorded), "not the bits of the GPU"
