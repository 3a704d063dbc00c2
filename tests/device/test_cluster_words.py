"""Thread-block clusters and their words on every backend that has them: ranks, the barrier, copies and arrivals between blocks, multicast.

On the CPU also under random schedules and the race check, and with faults planted in a ring of two blocks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from hopper_kernel import HEADS, ROWS, WIDTH, bound, with_fields
from test_hopper_words import MAP_PARAMETER, box_of, image_of

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.fault import KernelFault
from harness.selftest.mutant import edited

ENTRY = """\
#include <fa/cluster.cuh>
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    forward(const __grid_constant__ fa::Args args{maps}) {{
    unsigned char* smem = fa::dynamic_shared_1024();
    uint32_t* out = static_cast<uint32_t*>(args.O.data);
    const int t = threadIdx.x, rank = fa::cluster_rank();
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


# -- ranks and the barrier --------------------------------------------------------------------------------------------

RANKS = (
    entry()
    + """\
    const int wide = int(blockIdx.x) * 64 + t;
    __shared__ int rank_smem[64];
    rank_smem[t] = 1000 * rank + t;
    int sum = 0;
    for (int i = 0; i < 3; ++i) {  // what one block writes, all read behind the barrier
        if (rank == i % fa::cluster_size) out[512 + 64 * (3 * int(blockIdx.x / fa::cluster_size) + i) + t] = 7 * i + t;
        fa::cluster_arrive();
        fa::cluster_wait();
        sum += int(out[512 + 64 * (3 * int(blockIdx.x / fa::cluster_size) + i) + (t + 1) % 64]);
    }
    __syncthreads();
    out[wide] =
        rank + 10 * fa::cluster_size + 100 * int(blockIdx.x / fa::cluster_size) +
        (rank_smem[63 - t] == 1000 * rank + 63 - t && sum == 21 + 3 * ((t + 1) % 64)) * 10000;
}
"""
)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rank_and_barrier(size: int, how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Each block knows its place; every thread passes the barrier's phases; static shared memory stays a block's own."""
    kernel = bound(on(backend, how), tmp_path, RANKS, {}, {}, block=64, shared=1024, grid=8, cluster=size)
    got = with_fields(kernel).view(np.uint32)[:512].reshape(8, 64)
    block = np.arange(8)
    assert np.array_equal(got, np.broadcast_to((block % size + 10 * size + 100 * (block // size) + 10000)[:, None], got.shape))


# -- copies between blocks --------------------------------------------------------------------------------------------

#: Each block writes a tile and sends it to the next block of the cluster: by a bulk copy, or from registers.
EXCHANGE = (
    entry()
    + """\
    const int bytes = 128 * 16, next = (rank + 1) % fa::cluster_size;
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
    fa::mbarrier_wait_parity(full, 0);
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


# -- a ring of two blocks, and the faults in it -----------------------------------------------------------------------

#: Block 0 produces tiles and sends them to block 1 through two stages; block 1 gives each stage back by a remote arrival.
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
            if (t == 0)
                fa::bulk_copy_to_cluster(fa::map_shared(tile_smem + 512 * stage, 1), tile_smem + 512 * stage, BYTES, fa::map_shared(full + stage, 1));  // send
        }
    } else {
        uint32_t sum = 0;
        for (int n = 0; n < tiles; ++n) {
            const int stage = n % STAGES;
            if (t == 0) fa::mbarrier_arrive_expect_tx(full + stage, BYTES);
            fa::mbarrier_wait_parity(full + stage, n / STAGES & 1);  // there
            sum += tile_smem[512 * stage + 4 * (127 - t)];  // read the tile
            __syncwarp();
            if (t % 32 == 0) fa::mbarrier_arrive_remote(fa::map_shared(empty + stage, 0));  // give back
        }
        out[t] = sum;
    }
    fa::cluster_sync();  // the end
}
"""
)
MAPS: dict[str, tuple[str, list[int], int]] = {"k": ("K", [64, 64, 1, 1], 128)}


def ring(backend: Backend, folder: Path, *edits: tuple[str, str], cluster: int = 2) -> Any:
    """What RING with some edits gives."""
    code = edited(RING, *edits) if edits else RING
    kernel = bound(backend, folder, code, MAPS, {}, block=128, shared=16384, grid=4, cluster=cluster)
    return with_fields(kernel).view(np.uint32)[:128]


@pytest.mark.parametrize("how", [*RUNS, 3, 4, 5])
def test_ring(how: int | str | None, backend: Backend, tmp_path: Path) -> None:
    """Six tiles through two stages."""
    assert np.array_equal(ring(on(backend, how), tmp_path), 15000 + 6 * (127 - np.arange(128)))


FIRST, LAST = "    fa::cluster_sync();  // initialised\n", "    fa::cluster_sync();  // the end\n"
GIVE = "            if (t % 32 == 0) fa::mbarrier_arrive_remote(fa::map_shared(empty + stage, 0));  // give back\n"
SEND = (
    "fa::bulk_copy_to_cluster(fa::map_shared(tile_smem + 512 * stage, 1), tile_smem + 512 * stage, BYTES, fa::map_shared(full + stage, 1));"
)
TOUCH = "    if (rank == {} && t == 5) fa::mbarrier_arrive_remote(fa::map_shared(empty, {}));  // late\n"
#: name: edits of RING, whether the race check is needed, what the report says.
FAULTS: dict[str, tuple[list[tuple[str, str]], bool, str]] = {
    "no barrier behind the initialisation": (
        [(FIRST, "    __syncthreads();\n")],
        False,
        r"no mbarrier: never initialised.*:{// send}.* of block 1",
    ),
    "no barrier behind the initialisation, seen by the race check": (
        [
            (FIRST, "    __syncthreads();\n"),
            ("rank == 0", "rank == 1"),
            ("map_shared(tile_smem + 512 * stage, 1)", "map_shared(tile_smem + 512 * stage, 0)"),
            ("full + stage, 1));  // send", "full + stage, 0));  // send"),
            ("empty + stage, 0)", "empty + stage, 1)"),
        ],
        True,
        r"thread 0 of block 0 writes at .*, thread 0 of block 1 reads at \S+:{// send}, no barrier orders them",
    ),
    "an access behind the last barrier": (
        [(LAST, LAST + TOUCH.format(0, 1))],
        False,
        "a block of the cluster that has ended.*:{// late}, to block 1",
    ),
    "an access behind the last barrier, seen by the race check": (
        [(LAST, LAST + TOUCH.format(1, 0))],
        True,
        r"the shared memory of block .[02], 0, 0., which may have ended: thread 5 of block 1 at \S+:{// late}, no cluster barrier",
    ),
    "no barrier at the end": (
        [(LAST, "")],
        False,
        r"a block ended while a copy from its shared memory .*thread 0 of block 0 of the cluster at \S+:{// send}",
    ),
    "the receiver ends": (
        [
            ("if (rank == 0) {", "if (rank == 1 && t >= 0) return;\n    if (rank == 0) {"),
            (FIRST, FIRST + "    if (rank == 0) fa::mbarrier_test_parity(full, 0);\n"),
        ],
        False,
        "a block of the cluster that has ended.*:{// send}, to block 1",
    ),
    "a stage given back too early": (
        [(GIVE, ""), ("            sum += tile_smem", GIVE + "            sum += tile_smem")],
        True,
        r"thread \d+ of block 1 reads at \S+:{// read the tile}, thread 0 of block 0 starts to copy at \S+:{// send}, no barrier",
    ),
    "a tile written while it is sent": (
        [("(n / STAGES & 1) ^ 1);  // free", "1);  // free")],
        False,
        r"shared memory was written while a copy from it to another block was in flight.*:{// send}|more arrivals|in another phase",
    ),
    "a tile written while it is sent, seen by the race check": (
        [("(n / STAGES & 1) ^ 1);  // free", "1);  // free")],
        True,
        r"TMA reads at \S+:{// send}, thread \d+ of block 0 writes at \S+:{// write the tile}, no barrier",
    ),
    "no wait for the copy": (
        [("            fa::mbarrier_wait_parity(full + stage, n / STAGES & 1);  // there\n", "")],
        True,
        r"TMA has a copy in flight, begun at \S+:{// send}, thread \d+ of block 1 reads at \S+:{// read|more arrivals",
    ),
    "no proxy fence": (
        [("            fa::fence_proxy_async_shared();  // of the tile\n", "")],
        True,
        r"of block 0 writes at \S+:{// write the tile}, thread 0 of block 0 reads at \S+:{// send}, no fence_proxy_async",
    ),
    "no bytes expected": ([("full + stage, BYTES);", "full + stage, 0);")], False, "in another phase of its mbarrier.*:{// send}|deadlock"),
    "too many bytes expected": (
        [("full + stage, BYTES);", "full + stage, 2 * BYTES);")],
        False,
        "deadlock.*block 0 of the cluster.*block 1 of the cluster.*2048 bytes to come",
    ),
    "no arrival": (
        [(GIVE, "")],
        False,
        r"deadlock.*block 0 of the cluster.*:{// free} for phase 0 .*0 of 4 arrivals.*block 1 .*:{// there}",
    ),
    "a block that stays away from the barrier": (
        [(LAST, "    if (rank == 0) fa::cluster_sync();\n    else fa::mbarrier_wait_parity(full, tiles / STAGES & 1);  // for ever\n")],
        False,
        r"deadlock.*cluster_wait at \S+: 128 of the 256 threads of the cluster have arrived.*:{// for ever}",
    ),
    "two arrivals": ([(FIRST, "    fa::cluster_arrive();\n" + FIRST)], False, "a second cluster_arrive without a cluster_wait"),
    "a wait alone": ([(FIRST, "    fa::cluster_wait();\n" + FIRST)], False, "a cluster_wait without a cluster_arrive"),
    "a mapped address used as a local one": (
        [(FIRST, FIRST + "    fa::cp_async_16(fa::map_shared(smem, 0), args.Q.data);  // here\n")],
        False,
        "an address of map_shared in a word that takes one of the own shared memory.*:{// here}",
    ),
    "a local address used as a mapped one": (
        [(SEND, SEND.replace("fa::map_shared(tile_smem + 512 * stage, 1)", "fa::smem_u32(tile_smem + 512 * stage)"))],
        False,
        "an address of the own shared memory in a word that takes one of map_shared.*:{// send}",
    ),
    "an mbarrier of another block": (
        [("map_shared(full + stage, 1));", "map_shared(full + stage, 0));")],
        False,
        "that an mbarrier of another is to count.*:{// send}",
    ),
    "a rank outside the cluster": (
        [("map_shared(full + stage, 1));", "map_shared(full + stage, 2));")],
        False,
        "map_shared to a block outside the cluster.*:{// send}",
    ),
    "beyond shared memory": (
        [("map_shared(tile_smem + 512 * stage, 1),", "map_shared(tile_smem, 1) + 15000,")],
        False,
        "address not aligned|outside shared memory",
    ),
    "a multicast outside the cluster": (
        [(FIRST, FIRST + "    if (t == 0) fa::tma_load_4d_multicast(smem, &k_map, full, 4, 0, 0, 0, 0);  // here\n")],
        False,
        "a multicast to a block outside the cluster.*:{// here}",
    ),
    "a source that is not aligned": (
        [("1), tile_smem + 512 * stage, BYTES", "1), tile_smem + 1, BYTES")],
        False,
        "from no 16-byte aligned place.*:{// send}",
    ),
    "no mbarrier_init_fence": ([("        fa::mbarrier_init_fence();\n", "")], False, "without mbarrier_init_fence.*:{// send}"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    """With file and line of what takes part, in index order."""
    edits, race, told = FAULTS[name]
    with pytest.raises(KernelFault) as caught:
        ring(Host(check="race" if race else None), tmp_path, *edits)
    told = re.sub(r"\{([^\d{}][^{}]*)\}", lambda m: str(planted.line_of(tmp_path / "word_forward.cu", m[1])), told)
    assert re.search(told, caught.value.why, re.DOTALL), f"no {told!r} in {caught.value.why}"
    assert "pc:" not in caught.value.why
