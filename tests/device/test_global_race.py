"""--check race over global memory (kernels_cu/host/global.hpp): what orders blocks, and what is said where nothing does."""

from __future__ import annotations

import re
from pathlib import Path

import hopper_kernel
import numpy as np
import planted
import pytest

from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.tensors import Bound
from harness.problem import Problem

PROBLEM = Problem.of(1, 1, 5, 64)
#: Each block leaves a part, the last to arrive adds all of them.
LAST = """\
#include <fa/atomic.cuh>
__device__ int arrivals;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    float* out = static_cast<float*>(args.O.data);
    __shared__ int before;
    if (threadIdx.x < 64) out[blockIdx.x * 64 + threadIdx.x] = 1 + threadIdx.x;  // a part
    __syncthreads();  // behind the part
    if (threadIdx.x == 0) {
        __threadfence();  // release
        before = atomicAdd(&arrivals, 1);  // the arrival
        __threadfence();  // acquire
    }
    __syncthreads();
    if (before < int(gridDim.x) - 1) return;
    float sum = 0;
    for (int i = 0; i < int(gridDim.x); ++i) sum += out[i * 64 + threadIdx.x % 64];  // all parts
    if (threadIdx.x < gridDim.x) static_cast<float*>(args.logsumexp.data)[threadIdx.x] = sum;
    if (threadIdx.x == 0) arrivals = 0;
}
"""
FENCES = "__threadfence();  // release\n        before = atomicAdd(&arrivals, 1);  // the arrival\n        __threadfence();"
#: A right form of it, or what is wrong and what is said of it: the words behind both lines.
RIGHT = {
    "fences": ("", ""),
    "one atomic": (FENCES, "before = fa::atomic_add_acq_rel(&arrivals, 1);"),
}
WRONG = {
    "no release": ("__threadfence();  // release", "", "no release lies between these blocks: the atomic at {arrival} is relaxed"),
    "no acquire": ("__threadfence();  // acquire", "", "no __threadfence lies behind the atomic at {arrival}, by which the second"),
    "no barrier": ("__syncthreads();  // behind the part", "", "the release at {arrival} does not cover the first"),
    "a fence of the block": ("__threadfence();  // release", "__threadfence_block();", "no release lies between these blocks"),
    "a fence of another thread": (
        "__threadfence();  // acquire",
        "} if (threadIdx.x == 32) { __threadfence();",
        "no __threadfence lies behind the atomic at {arrival}",
    ),
    "too early": ("int(gridDim.x) - 1", "int(gridDim.x) - 2", ""),
}


def run(folder: Path, body: str, workers: int) -> tuple[Path, Bound]:
    """A kernel of 5 blocks under the check, after its launch."""
    kernel = planted.kernel(folder, body)
    backend = Host(check="race")
    backend.workers = workers
    given = {name: np.zeros(PROBLEM.shape(name), np.float32) for name in ("Q", "K", "V")}
    return kernel.path, Bound(backend, backend.load(kernel, PROBLEM), PROBLEM, given)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("form", RIGHT)
def test_what_orders_blocks(form: str, workers: int, tmp_path: Path) -> None:
    """Nothing is said; twice, for a launch is behind the one before."""
    _, kernel = run(tmp_path, LAST.replace(*RIGHT[form]) if RIGHT[form][0] else LAST, workers)
    for _ in range(2):
        assert kernel.run()["logsumexp"].tolist() == [[[5.0, 10.0, 15.0, 20.0, 25.0]]]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("form", WRONG)
def test_what_does_not(form: str, workers: int, tmp_path: Path) -> None:
    """Both lines, threads and blocks are named, and the element; also where blocks run one after another."""
    old, new, words = WRONG[form]
    assert LAST.count(old) == 1
    path, kernel = run(tmp_path, LAST.replace(old, new), workers)
    with pytest.raises(CheckFault, match="races on global memory") as caught:
        kernel.run()
    line = {
        name: f"{path}:{planted.line_of(path, text)}"
        for name, text in {"arrival": "// the arrival", "part": "// a part", "all": "// all"}.items()
    }
    found = re.search(
        r"race on global memory O\[0, 0, (\d), (\d+)\]: thread (\d+) of block \((\d), 0, 0\) (writes|reads) at (\S+), "
        r"thread (\d+) of block \((\d), 0, 0\) (writes|reads) at (\S+), (.*)",
        str(caught.value),
    )
    assert found, caught.value
    row, column, one, its, _, here, two, other, _, there, why = found.groups()
    assert its != other and row in (its, other) and {int(one) % 64, int(two) % 64} == {int(column)}
    assert {here, there} == {line["part"], line["all"]}
    assert words.format(**line) in why
    assert "__threadfence()" in caught.value.hint


def test_within_a_block(tmp_path: Path) -> None:
    """Barriers order its threads, as they do for shared memory."""
    body = LAST.replace("out[i * 64 + threadIdx.x % 64]", "0; out[threadIdx.x / 2] = 0")
    with pytest.raises(
        CheckFault,
        match=r"O\[0, 0, 0, \d+\]: thread \d+ of block (\(4, 0, 0\)) writes at .* of block \1 writes at .* no barrier orders them",
    ):
        run(tmp_path, body, 1)[1].run()


def test_the_name_of_a_shared_array(tmp_path: Path) -> None:
    """And the element, by the array's extents; dynamic shared memory has a name where the kernel declares one."""
    body = """\
constexpr int ROWS = 4, COLUMNS = HEAD_DIM / 2;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    extern __shared__ float scores[];
    __shared__ float first[7], tile[ROWS][COLUMNS];
    first[threadIdx.x % 7] = threadIdx.x;
    tile[3][5] = scores[3] = threadIdx.x;
    if (threadIdx.x == 0) static_cast<float*>(args.O.data)[blockIdx.x * 64] = first[args.batch] + tile[args.batch][0];
}
"""
    kernel = planted.kernel(tmp_path, "#include <fa/warp.cuh>\n" + body, shared=64)
    backend = Host(check="race")
    given = {name: np.zeros(PROBLEM.shape(name), np.float32) for name in ("Q", "K", "V")}
    with pytest.raises(CheckFault, match="races on shared memory") as caught:
        Bound(backend, backend.load(kernel, PROBLEM), PROBLEM, given).run()
    assert {"tile[3][5]", "scores[3]"} < set(re.findall(r"race on shared memory (\S+) in block", str(caught.value))), caught.value
    assert re.search(r"shared memory first\[\d\] in", str(caught.value))


#: Block 1 writes a tile of O, block 0 copies it to shared memory and writes it to its first row.
PROXIES = """\
__device__ int turn;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args, const __grid_constant__ fa::TensorMap o_map) {
    unsigned char* tile_smem = fa::dynamic_shared_1024();
    uint64_t* full = reinterpret_cast<uint64_t*>(tile_smem + 8192);
    if (threadIdx.x == 0) fa::mbarrier_init(full, 1), fa::mbarrier_init_fence();
    __syncthreads();
    if (blockIdx.x == 1) {
        scalar* row = fa::row_pointer<scalar>(args.O, 0, 1, threadIdx.x % 64);
        for (int i = threadIdx.x / 64; i < 64; i += 2) row[i] = fa::narrow<scalar>(threadIdx.x % 64);  // store
        WRITER
        __syncthreads();
        if (threadIdx.x == 0) fa::wait_for_turn(&turn, 0), fa::pass_turn(&turn, 1);
    } else if (threadIdx.x == 0) {
        fa::wait_for_turn(&turn, 1);
        READER
        fa::mbarrier_arrive_expect_tx(full, 8192);
        fa::tma_load_4d(tile_smem, &o_map, full, 0, 0, 1, 0);  // load
        fa::mbarrier_wait_parity(full, 0);
        for (int i = 0; i < 64; ++i) *fa::row_pointer<scalar>(args.O, 0, 0, i) = reinterpret_cast<scalar*>(tile_smem)[64 * i];
        fa::pass_turn(&turn, 0);
    }
}
"""
FENCE = "fa::fence_proxy_async_global();"


@pytest.mark.parametrize("writer, reader, fenced", [(FENCE, "", True), ("", FENCE, True), ("", "", False), ("__threadfence();", "", False)])
def test_a_proxy_fence_between_a_store_and_a_bulk_copy(writer: str, reader: str, fenced: bool, tmp_path: Path) -> None:
    """On either side; without one both lines are named, though the blocks are ordered."""
    code = PROXIES.replace("WRITER", writer).replace("READER", reader)
    backend = Host(seed=1, check="race")
    kernel = hopper_kernel.bound(
        backend, tmp_path, "#include <fa/atomic.cuh>\n" + code, {"o": ("O", [64, 64, 1, 1], 0)}, {}, shared=16384, grid=2
    )
    if fenced:
        assert kernel.run()["O"][0, 0, :64, 0].astype(float).tolist() == list(range(64))
        return
    with pytest.raises(CheckFault) as caught:
        kernel.run()
    store, load = (f"{tmp_path}/word_forward.cu:{planted.line_of(tmp_path / 'word_forward.cu', text)}" for text in ("// store", "// load"))
    assert re.search(
        rf"global memory O\[0, 1, \d+, \d+\]: thread \d+ of block \(1, 0, 0\) writes at {store}, thread 0 of block \(0, 0, 0\) reads at {load}, "
        "no fence_proxy_async_global lies between them",
        str(caught.value),
    ), caught.value


@pytest.mark.parametrize("update, line", [("atomicAdd(&count[1], 1);", ""), ("count[1] = count[1] + 1;", "count[1] = ")])
def test_a_module_global(update: str, line: str, tmp_path: Path) -> None:
    """Its name and its word; nothing where atomics are used."""
    body = """\
#include <fa/warp.cuh>
namespace mine { __device__ int count[3]; }
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    using mine::count;
    if (threadIdx.x == 0) UPDATE
    if (threadIdx.x == 0) static_cast<float*>(args.O.data)[blockIdx.x * 64] = 1;
}
"""
    path, kernel = run(tmp_path, body.replace("UPDATE", update), 1)
    if not line:
        kernel.run()
        return
    with pytest.raises(CheckFault, match=r"race on global memory count\[1\]: thread 0 of block .* writes at ") as caught:
        kernel.run()
    assert str(caught.value).count(f"{path}:{planted.line_of(path, line)}") >= 2
