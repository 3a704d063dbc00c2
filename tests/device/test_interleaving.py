"""Launches with a seed: blocks meet at their atomics, in an order that the seed draws and that is the same in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import planted
import pytest

from harness import kernel
from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.kernel import Kernel
from harness.problem import Problem
from harness.verbs.selftest.mutant import edited
from harness.verbs.verify.cases import Case
from harness.verbs.verify.judge import run_case

PROBLEM = Problem.of(1, 1, 40, 64)
#: Each of 40 blocks comes to a counter twice, and leaves what it has found there; between them it has static shared memory of its own.
TWICE = """\
#include <fa/atomic.cuh>
__device__ int counter;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    int* out = static_cast<int*>(args.O.data) + blockIdx.x * 64;
    __shared__ int own[64];
    if (threadIdx.x < 64) own[threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = atomicAdd(&counter, 1);
    __syncthreads();
    if (threadIdx.x == 1) out[1] = atomicAdd(&counter, 1);
    if (threadIdx.x < 64 && threadIdx.x > 1) out[threadIdx.x] = own[threadIdx.x];
}
"""
#: Blocks hand on a number, each what it has from the one before and 1; the last leaves it. Wrong where two take the same.
HANDED_ON = """\
#include <fa/atomic.cuh>
__device__ int held, done;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    if (threadIdx.x > 0) return;
    {update}
    if (atomicAdd(&done, 1) == int(gridDim.x) - 1) static_cast<int*>(args.O.data)[0] = atomicAdd(&held, 0);
}
"""
#: Of fa2_naive: where a block begins, and the factor that a row of O gets.
ARRIVAL, INVERSE = "    const int row = fa::warp_id() * ROWS, lane = fa::lane_id();", "row_sum[r] == 0 ? 0.0f : 1 / row_sum[r]"


def run(folder: Path, body: str, seed: int, workers: int = 2, check: str | None = None) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """The words of O, a row of 64 for each block."""
    backend = Host(seed, check)
    backend.workers = workers
    given = {name: np.zeros(PROBLEM.shape(name), np.float32) for name in ("Q", "K", "V")}
    with backend.fresh(backend.load(planted.kernel(folder, body), PROBLEM)) as loaded:
        return Bound(backend, loaded, PROBLEM, given).run()["O"].view(np.int32).reshape(40, 64)


def test_a_seed_is_an_order(tmp_path: Path) -> None:
    """The same in every run and for any number of OS threads, another for another seed; shared memory is the block's own in all of them."""
    orders = []
    for seed in range(1, 6):
        found = run(tmp_path, TWICE, seed)
        assert np.array_equal(found, run(tmp_path, TWICE, seed, workers=1))
        assert np.array_equal(found, run(tmp_path, TWICE, seed, check="race"))
        assert (found[:, 2:] == np.arange(40)[:, None]).all()
        assert sorted(found[:, :2].reshape(-1).tolist()) == list(range(80)) and (found[:, 0] < found[:, 1]).all()
        orders.append(tuple(found[:, :2].reshape(-1).tolist()))
    assert len(set(orders)) == 5
    assert all(any(order[2 * i + 1] - order[2 * i] > 1 for i in range(40)) for order in orders)


@pytest.mark.parametrize("update, right", [("atomicAdd(&held, 1);", True), ("held = atomicAdd(&held, 0) + 1;", False)])
def test_an_update_in_two_steps(update: str, right: bool, tmp_path: Path) -> None:
    """Ten schedules show it; blocks one after another do not."""
    found = {int(run(tmp_path, HANDED_ON.replace("{update}", update), seed)[0, 0]) for seed in range(1, 11)}
    assert found == {40} if right else min(found) < 40
    assert run(tmp_path, HANDED_ON.replace("{update}", update), 0, workers=1)[0, 0] == 40


def test_bits_by_the_order_of_blocks(tmp_path: Path) -> None:
    """Blocks one after another always arrive in the same order; `--repeat` goes through others."""
    source = (kernel.KERNELS / "05_fa2_naive_forward.cu").read_text()
    counted = "constexpr int LANES = 32, ROWS"
    edits = [
        (counted, "__device__ int arrivals;\n" + counted),
        (
            ARRIVAL,
            "    __shared__ int place;\n    if (threadIdx.x == 0) place = atomicAdd(&arrivals, 1);\n    __syncthreads();\n" + ARRIVAL,
        ),
        (INVERSE, f"({INVERSE}) * (place % 2 ? 1.00000012f : 1.0f)"),
    ]
    path = tmp_path / "mine_forward.cu"
    path.write_text(edited(source, *edits))
    backend = Host()
    backend.workers = 1
    case = Case.parse("B1_H2_S129_D64")
    again = [run_case(backend, Kernel.read(path), case, repeat=repeat) for repeat in (0, 4)]
    assert again[0].passed
    assert "promises deterministic" in again[1].message and "(launch 1 of 4 with the same inputs)" in again[1].message


def test_a_turn_that_nobody_passes(tmp_path: Path) -> None:
    """It is told at once, without a wait."""
    body = """\
#include <fa/atomic.cuh>
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    if (threadIdx.x == 0) fa::wait_for_turn(static_cast<int*>(args.O.data), 7);
}
"""
    with pytest.raises(KernelFault, match="all blocks that run wait"):
        run(tmp_path, body, 3)


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_turn_of_a_late_warp(seed: int, tmp_path: Path) -> None:
    """Two warps of a block take turns, and either is late in some blocks: the other one waits for what only a late one can do."""
    body = """\
#include <fa/atomic.cuh>
__device__ int turn;
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    const int mine = 2 * blockIdx.x + threadIdx.x / 32, last = 2 * gridDim.x - 1;
    if (threadIdx.x % 32 > 0 || threadIdx.x >= 64) return;
    fa::wait_for_turn(&turn, mine);
    static_cast<int*>(args.O.data)[64 * blockIdx.x + threadIdx.x / 32] = 1;
    fa::pass_turn(&turn, mine == last ? 0 : mine + 1);
}
"""
    assert run(tmp_path, body, seed)[:, :2].all()
