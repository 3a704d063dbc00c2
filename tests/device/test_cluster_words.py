"""Thread-block clusters and their words on every backend that has them: the barrier, copies and arrivals between blocks, multicast.

On the CPU also under random schedules and the race check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_kernel import HEADS, ROWS, WIDTH, bound, with_fields
from test_hopper_words import MAP_PARAMETER, box_of, image_of

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.verbs.selftest.mutant import edited

ENTRY = """\
#include <fa/cluster.cuh>
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    forward(const __grid_constant__ fa::Args args{maps}) {{
    unsigned char* smem = fa::dynamic_shared_1024();
    uint32_t* out = static_cast<uint32_t*>(args.O.data);
    const int t = threadIdx.x, rank = blockIdx.x % CLUSTER;
"""
#: How a test runs: on the backend itself, and on the CPU with a schedule or the race check.
RUNS = [None, 1, 2, "race"]


def entry(*maps: str) -> str:
    """The beginning of an entry that is passed these maps."""
    return ENTRY.format(maps="".join(", " + MAP_PARAMETER.format(name) for name in maps))


def on(backend: Backend, how: int | str | None) -> Backend:
    """The backend of one of RUNS."""
    if how is not None and backend.name != "cpu":
        pytest.skip("schedules are the CPU's")
    return backend if how is None else Host(check="race") if how == "race" else Host(seed=int(how))


# -- the barrier -------------------------------------------------------------------------------------------------------

PHASES = (
    entry()
    + """\
    const int wide = int(blockIdx.x) * 64 + t;
    __shared__ int rank_smem[64];
    rank_smem[t] = 1000 * rank + t;
    int sum = 0;
    for (int i = 0; i < 3; ++i) {  // what one block writes, all read behind the barrier
        if (rank == i % CLUSTER) out[512 + 64 * (3 * int(blockIdx.x / CLUSTER) + i) + t] = 7 * i + t;
        fa::cluster_arrive();
        fa::cluster_wait();
        sum += int(out[512 + 64 * (3 * int(blockIdx.x / CLUSTER) + i) + (t + 1) % 64]);
    }
    __syncthreads();
    out[wide] =
        rank + 10 * CLUSTER + 100 * int(blockIdx.x / CLUSTER) +
        (rank_smem[63 - t] == 1000 * rank + 63 - t && sum == 21 + 3 * ((t + 1) % 64)) * 10000;
}
"""
)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_barrier(size: int, how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Every thread passes the barrier's phases; static shared memory stays a block's own."""
    kernel = bound(on(backend, how), tmp_path, PHASES, {}, {}, block=64, shared=1024, grid=8, cluster=size)
    got = with_fields(kernel).view(np.uint32)[:512].reshape(8, 64)
    block = np.arange(8)
    assert np.array_equal(got, np.broadcast_to((block % size + 10 * size + 100 * (block // size) + 10000)[:, None], got.shape))


#: Each block sends its number to the next rank.
SQUARE = """\
    uint64_t* full = reinterpret_cast<uint64_t*>(smem + 128);
    const uint32_t number = blockIdx.y * gridDim.x + blockIdx.x, next = (rank + 1) % CLUSTER;
    if (t == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
        fa::mbarrier_arrive_expect_tx(full, 16);
    }
    fa::cluster_sync();
    if (t == 0) fa::store_remote_16(fa::map_shared(smem, next), number, 0, 0, 0, fa::map_shared(full, next));
    fa::mbarrier_wait_parity(full, 0);
    out[number * 64 + t] = *reinterpret_cast<const uint32_t*>(smem);
    fa::cluster_sync();
}
"""


def test_a_cluster_of_two_dimensions(backend: Backend, tmp_path: Path) -> None:
    """Ranks go along x first, then along y."""
    code = edited(
        entry() + SQUARE,
        ("__cluster_dims__(CLUSTER, 1, 1)", "__cluster_dims__(2, 2, 1)"),
        ("rank = blockIdx.x % CLUSTER", "rank = blockIdx.x % 2 + 2 * (blockIdx.y % 2)"),
    )
    kernel = bound(backend, tmp_path, code, {}, {}, block=64, shared=1024, grid="[4, 4]", cluster="[2, 2]")
    got = with_fields(kernel).view(np.uint32)[:1024].reshape(4, 4, 64)
    for (y, x), received in np.ndenumerate(got[:, :, 0]):
        before = (x % 2 + 2 * (y % 2) - 1) % 4
        assert received == 4 * (y // 2 * 2 + before // 2) + x // 2 * 2 + before % 2
    assert (got == got[:, :, :1]).all()


# -- copies between blocks --------------------------------------------------------------------------------------------

#: Each block writes a tile and sends it to the next block of the cluster: by a bulk copy, or from registers.
EXCHANGE = (
    entry()
    + """\
    const int bytes = 128 * 16, next = (rank + 1) % CLUSTER;
    uint32_t* own_smem = reinterpret_cast<uint32_t*>(smem);              // [128][4]
    uint32_t* received_smem = reinterpret_cast<uint32_t*>(smem + bytes);  // [128][4]
    uint64_t* full = reinterpret_cast<uint64_t*>(smem + 2 * bytes);
    if (t == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    if (t == 0) fa::mbarrier_arrive_expect_tx(full, bytes);
    const uint32_t value = 1000 * blockIdx.x + t;
    if (args.heads_kv == 0) {
        for (int i = 0; i < 4; ++i) own_smem[4 * t + i] = value + 100000 * i;
        fa::fence_proxy_async_shared();
        __syncthreads();
        if (t == 0) fa::bulk_copy_to_cluster(fa::map_shared(received_smem, next), own_smem, bytes, fa::map_shared(full, next));
    } else {
        fa::store_remote_16(fa::map_shared(received_smem, next) + 16 * t, value, value + 100000, value + 200000, value + 300000,
                            fa::map_shared(full, next));
    }
    fa::mbarrier_wait_parity(full, 0);
    for (int i = 0; i < 4; ++i) out[(blockIdx.x * 128 + t) * 4 + i] = received_smem[4 * (127 - t) + i];
    if (t >= 64) return;  // the barrier does without threads that have ended
    fa::cluster_sync();
}
"""
)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("size", [2, 4])
def test_exchange(size: int, how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """A tile goes to the next block of the cluster, to the bit."""
    kernel = bound(on(backend, how), tmp_path, EXCHANGE, {}, {}, block=128, shared=8192, grid=4, cluster=size)
    block = np.arange(4)
    source = block // size * size + (block - 1) % size
    told = source[:, None, None] * 1000 + (127 - np.arange(128))[:, None] + 100000 * np.arange(4)
    for form in range(2):
        assert np.array_equal(with_fields(kernel, heads_kv=form).view(np.uint32)[:2048].reshape(4, 128, 4), told), form


# -- multicast --------------------------------------------------------------------------------------------------------

MULTICAST = (
    entry("k")
    + """\
    uint64_t* full = reinterpret_cast<uint64_t*>(smem + 16384);
    if (t == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    if (t == 0) {
        fa::mbarrier_arrive_expect_tx(full, 2 * 8192);
        fa::tma_load_4d_multicast(smem + 8192 * rank, &k_map, full, 3, 0, args.seq_q + 64 * rank, args.head_dim, 0);
    }
    if (rank == 0) fa::mbarrier_wait_parity(full, 0);
    while (rank == 1 && !fa::mbarrier_test_parity(full, 0)) {}
    for (int i = t; i < 4096; i += 128) out[4096 * rank + i] = reinterpret_cast<const uint32_t*>(smem)[i];
    fa::cluster_sync();
}
"""
)


@pytest.mark.parametrize("how", RUNS)
def test_multicast(how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Each of two blocks loads half of the rows for both, to the bit, also over the tensor's edge."""
    draw = np.random.RandomState(2)
    tensor = draw.randint(0, 1 << 15, (1, HEADS, ROWS, WIDTH)).astype(np.uint16) % 0x7C00
    maps: dict[str, tuple[str, list[int], int]] = {"k": ("K", [64, 64, 1, 1], 128)}
    inputs = {"K": tensor.view(np.float16)}
    kernel = bound(on(backend, how), tmp_path, MULTICAST, maps, inputs, "float16", shared=16384 + 64, grid=2, cluster=2)
    for row, head in ((0, 0), (100, 1), (420, 3)):
        got = with_fields(kernel, seq_q=row, head_dim=head)[:32768].reshape(2, 16384)
        told = np.concatenate([image_of(box_of(tensor, [64, 64, 1, 1], (0, row + 64 * i, head, 0)), 128) for i in range(2)])
        assert np.array_equal(got[0], told) and np.array_equal(got[1], told), (row, head)


# -- a ring of two blocks ---------------------------------------------------------------------------------------------

#: Block 0 sends tiles to block 1 by bulk copies through two stages; block 1 gives each stage back by a remote arrival.
RING = (
    entry("k")
    + """\
    constexpr int BYTES = 2048, STAGES = 2;
    uint32_t* tile_smem = reinterpret_cast<uint32_t*>(smem);       // [2][128][4]
    uint64_t* full = reinterpret_cast<uint64_t*>(smem + 2 * BYTES);  // [2]
    uint64_t* empty = full + 2;                                    // [2]
    const int tiles = 6;
    if (t == 0) {
        for (int i = 0; i < STAGES; ++i) fa::mbarrier_init(full + i, 1), fa::mbarrier_init(empty + i, 4);
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();  // initialised
    if (rank == 0) {
        for (int n = 0; n < tiles; ++n) {
            const int stage = n % STAGES;
            fa::mbarrier_wait_parity(empty + stage, (n / STAGES & 1) ^ 1);  // free
            for (int i = 0; i < 4; ++i) tile_smem[512 * stage + 4 * t + i] = 1000 * n + t + i;  // write the tile
            fa::fence_proxy_async_shared();  // of the tile
            fa::bar_sync(1, 128);
            uint32_t* tile = tile_smem + 512 * stage;
            if (t == 0) fa::bulk_copy_to_cluster(fa::map_shared(tile, 1), tile, BYTES, fa::map_shared(full + stage, 1));  // send
        }
    } else {
        uint32_t sum = 0;
        for (int n = 0; n < tiles; ++n) {
            const int stage = n % STAGES;
            if (t == 0) fa::mbarrier_arrive_expect_tx(full + stage, BYTES);
            fa::mbarrier_wait_parity(full + stage, n / STAGES & 1);  // there
            sum += tile_smem[512 * stage + 4 * (127 - t)];  // read the tile
            fa::fence_proxy_async_shared();  // of the loads
            __syncwarp();
            if (t % 32 == 0) fa::mbarrier_arrive_remote(fa::map_shared(empty + stage, 0));  // give back
        }
        out[128 * (blockIdx.x / CLUSTER) + t] = sum;
    }
    fa::cluster_sync();  // the end
}
"""
)
MAPS: dict[str, tuple[str, list[int], int]] = {"k": ("K", [64, 64, 1, 1], 128)}


def ring(backend: Backend, folder: Path, *edits: tuple[str, str], cluster: int = 2) -> Any:
    """What RING with some edits gives, of each cluster."""
    code = edited(RING, *edits) if edits else RING
    kernel = bound(backend, folder, code, MAPS, {}, block=128, shared=16384, grid=4, cluster=cluster)
    return with_fields(kernel).view(np.uint32)[:256].reshape(2, 128)


@pytest.mark.parametrize("how", [*RUNS, 3, 4, 5])
def test_ring(how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Six tiles through two stages."""
    assert np.array_equal(ring(on(backend, how), tmp_path), [15000 + 6 * (127 - np.arange(128))] * 2)


# -- what the other block has computed -----------------------------------------------------------------------------------

#: Block r multiplies its 64 rows of Q with K, which both have by multicast, and sends the product to the other block, which multiplies it
#: with V: from shared memory by a bulk copy, or from registers. The exchange of dS in a backward pass has this form.
PRODUCTS = (
    entry("q", "k", "v").replace("unsigned char* smem", "constexpr int TILE = 8192;\n    unsigned char* smem")
    + """\
    unsigned char *q_smem = smem, *k_smem = smem + TILE, *v_smem = smem + 2 * TILE;
    unsigned char *own_smem = smem + 3 * TILE, *peer_smem = smem + 4 * TILE;
    uint64_t *full = reinterpret_cast<uint64_t*>(smem + 5 * TILE), *received = full + 1;
    const int warp = t / 32, lane = t % 32, peer = rank ^ 1;
    if (t == 0) {
        fa::mbarrier_init(full, 1);
        fa::mbarrier_init(received, 1);
        fa::mbarrier_init_fence();
    }
    fa::cluster_sync();
    if (t == 0) {
        fa::mbarrier_arrive_expect_tx(received, TILE);
        fa::mbarrier_arrive_expect_tx(full, 3 * TILE);
        fa::tma_load_4d(q_smem, &q_map, full, 0, 64 * rank, 0, 0);
        if (rank == 0) fa::tma_load_4d_multicast(k_smem, &k_map, full, 3, 0, 0, 0, 0, fa::evict_last);
        if (rank == 1) fa::tma_load_4d_multicast(v_smem, &v_map, full, 3, 0, 0, 0, 0);
    }
    float s_reg[32], o_reg[32];
    fa::mbarrier_wait_parity(full, 0);
    const uint64_t q_desc = fa::smem_descriptor_k_major(q_smem), k_desc = fa::smem_descriptor_k_major(k_smem);
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) fa::wgmma_ss<scalar>(s_reg, q_desc + 2 * step, k_desc + 2 * step, step > 0);
    fa::wgmma_commit();
    fa::wgmma_wait<0>(s_reg);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, chunk = i / 4 ^ row % 8;
        reinterpret_cast<uint32_t*>(own_smem)[row * 32 + chunk * 4 + lane % 4] = fa::pack<scalar>(s_reg[i], s_reg[i + 1]);  // write S
    }
    fa::fence_proxy_async_shared();  // of S
    __syncthreads();
    if (args.heads_kv == 0 && t == 0)
        fa::bulk_copy_to_cluster(fa::map_shared(peer_smem, peer), own_smem, TILE, fa::map_shared(received, peer));  // send S
    for (int i = t; args.heads_kv == 1 && i < 512; i += 128) {
        const uint32_t *four = reinterpret_cast<const uint32_t*>(own_smem) + 4 * i, to = fa::map_shared(peer_smem, peer) + 16 * i;
        fa::store_remote_16(to, four[0], four[1], four[2], four[3], fa::map_shared(received, peer));  // store S
    }
    fa::mbarrier_wait_parity(received, 0);
    if (args.heads_kv == 1) fa::fence_proxy_async_shared();  // of the stores
    const uint64_t p_desc = fa::smem_descriptor_k_major(peer_smem), v_desc = fa::smem_descriptor_mn_major(v_smem, TILE);
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) fa::wgmma_ss<scalar, true>(o_reg, p_desc + 2 * step, v_desc + 128 * step, step > 0);  // S V
    fa::wgmma_commit();
    fa::wgmma_wait<0>(o_reg);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        reinterpret_cast<float*>(out)[(64 * rank + 16 * warp + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] =
            o_reg[i];
    fa::cluster_sync();
}
"""
)
BOXES: dict[str, tuple[str, list[int], int]] = {name: (name.upper(), [64, 64, 1, 1], 128) for name in "qkv"}
Q, K, V = (np.random.RandomState(8).randint(-1, 2, (3, 128, 64))).astype(float)


def products(backend: Backend, folder: Path, form: int, *edits: tuple[str, str]) -> Any:
    """Rows of O of both blocks, of PRODUCTS with some edits."""
    code = edited(PRODUCTS, *edits) if edits else PRODUCTS
    inputs = {"Q": Q, "K": K[:64], "V": V[:64]}
    kernel = bound(backend, folder, code, BOXES, inputs, shared=5 * 8192 + 64, grid=2, cluster=2)
    return with_fields(kernel, heads_kv=form)[:32768].view(np.float32).reshape(128, 64)


@pytest.mark.parametrize("how", RUNS)
def test_products_of_the_other_block(how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Multicast, wgmma, exchange, wgmma: sums of whole numbers, to the bit."""
    scores = Q @ K[:64].T
    told = np.concatenate([scores[64:] @ V[:64], scores[:64] @ V[:64]])
    for form in range(2):
        assert np.array_equal(products(on(backend, how), tmp_path, form), told), form
