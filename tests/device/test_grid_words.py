"""The barrier of all blocks of a launch (fa/grid.cuh): what is before it is seen behind it, and what the CPU engine says of a wrong one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import line_of, top

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.tensors import Bound
from harness.fault import KernelFault, UsageFault
from harness.kernel import Device, Kernel, planner
from harness.problem import Problem

#: Of 12 queries, each of which is a block.
PROBLEM = Problem.of(1, 1, 12, 64)
#: Twice each block adds up what all blocks have left in `parts`, and leaves what it has found there in place of its own part.
ROUNDS = (
    top(title='"blocks that meet"')
    + """\
// [workspace.parts]
// dtype = "float32"
// size = "seq_q"
// init = "none"
// [workspace.counter]
// dtype = "float32"
// size = 1
// init = "zero"
// [[launch]]
// entry = "forward"
// grid = "seq_q"
// block = 96
// cooperative = 1
// ///
#include <fa/grid.cuh>
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    float* parts = static_cast<float*>(args.workspace[WORKSPACE_PARTS]);
    int* counter = static_cast<int*>(args.workspace[WORKSPACE_COUNTER]);
    const int blocks = gridDim.x;
    if (threadIdx.x == 95) parts[blockIdx.x] = blockIdx.x + 1;  // the first part
    for (int round = 0; round < 2; ++round) {
        fa::grid_barrier(counter);  // behind the parts
        float sum = 0;
        for (int i = 0; i < blocks; ++i) sum += parts[i];  // all parts
        fa::grid_barrier(counter);  // behind the sums
        if (threadIdx.x == 95) parts[blockIdx.x] = sum + blockIdx.x;  // a part
    }
    __syncthreads();
    if (threadIdx.x < 64) fa::row_pointer<float>(args.O, 0, 0, blockIdx.x)[threadIdx.x] = parts[blockIdx.x];
    if (threadIdx.x == 0) *fa::row_pointer<float>(args.logsumexp, 0, 0, blockIdx.x) = 0;
}
"""
)
#: 1 to 12 is 78; then 12 times that and 0 to 11.
WANTED = 12 * 78 + 66 + np.arange(12, dtype=np.float32)


def rounds(folder: Path, *edits: tuple[str, str]) -> Kernel:
    """ROUNDS with some edits."""
    text = ROUNDS
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "mine_forward.cu"
    path.write_text(text)
    return Kernel.read(path)


def output(backend: Backend, kernel: Kernel) -> Any:
    """The first column of O after the second of two passes."""
    given = {name: np.zeros(PROBLEM.shape(name), np.float32) for name in ("Q", "K", "V")}
    bound = Bound(backend, backend.load(kernel, PROBLEM), PROBLEM, given)
    bound.run()
    return bound.run()["O"][0, 0, :, 0]


def test_all_blocks_meet(backend: Backend, tmp_path: Path) -> None:
    """More often than once; a second pass begins with its counter at 0 again."""
    np.testing.assert_array_equal(output(backend, rounds(tmp_path)), WANTED)


@pytest.mark.parametrize("seed", range(4))
def test_it_orders_all_blocks(seed: int, tmp_path: Path) -> None:
    """By whatever thread: the race check is silent in every schedule."""
    np.testing.assert_array_equal(output(Host(seed, "race"), rounds(tmp_path)), WANTED)


#: A barrier that is left out, and the lines of the two accesses that nothing orders then, in either order. The one behind the sums is left
#: out between two that all blocks come to: what a block does behind a barrier is not before it for those who are slow to leave it.
LEFT_OUT = {"behind the parts": ("// all parts", "// the first part|// a part"), "behind the sums": ("// all parts", "// a part")}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("barrier", LEFT_OUT)
def test_a_barrier_left_out(barrier: str, seed: int, tmp_path: Path) -> None:
    """Each is found in every schedule, with both lines."""
    wrong = rounds(tmp_path, (f"        fa::grid_barrier(counter);  // {barrier}\n", ""))
    with pytest.raises(CheckFault) as caught:
        output(Host(seed, "race"), wrong)
    reads, writes = ([line_of(wrong.path, words) for words in each.split("|")] for each in LEFT_OUT[barrier])
    said = re.search(
        r"parts\[\d+\]: thread \d+ of block \(\d+, 0, 0\) (\w+) at \S+:(\d+), thread \d+ of block \(\d+, 0, 0\) (\w+) at \S+:(\d+)",
        str(caught.value),
    )
    assert said, caught.value
    found = {said[1]: int(said[2]), said[3]: int(said[4])}
    assert found.keys() == {"reads", "writes"} and found["reads"] in reads and found["writes"] in writes, caught.value


@pytest.mark.parametrize(("writer", "reader"), [(0, 11), (11, 0)])
def test_who_is_slow_to_leave_is_not_behind_more(writer: int, reader: int, tmp_path: Path) -> None:
    """Not behind what another block has done since, although that block has come to the next barrier in this schedule."""
    first = f"static_cast<float*>(args.O.data)[0] = round;  // early\n        if (blockIdx.x == {reader} && !threadIdx.x) sum = "
    edit = f"        float sum = 0;\n        if (blockIdx.x == {writer} && !threadIdx.x) {first}static_cast<float*>(args.O.data)[0];  // late\n"
    wrong = rounds(tmp_path, ("        float sum = 0;\n", edit))
    with pytest.raises(CheckFault, match=r"race on global memory O\[0, 0, 0, 0\]") as caught:
        output(Host(check="race"), wrong)
    assert all(f":{line_of(wrong.path, words)}" in str(caught.value) for words in ("// early", "// late")), caught.value


#: What is wrong, and what the engine says of it without any check.
WRONG = {
    "not cooperative": (("// cooperative = 1\n", ""), "without `cooperative` in the header"),
    "a block that has left": (("    for (int round", "    if (blockIdx.x == 3) return;\n    for (int round"), "have ended or wait elsewhere"),
    "a counter with a value": (('size = 1\n// init = "zero"', 'size = 1\n// init = "none"'), "did not begin at 0"),
    "two counters": (("counter);  // behind the sums", "counter + blockIdx.x % 2);  // behind the sums"), "at another counter"),
    "some threads only": (("        fa::grid_barrier(counter);  // behind the sums", "        if (threadIdx.x < 64) fa::grid_barrier(counter);"), "divergent"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_barrier_that_would_hang(wrong: str, tmp_path: Path) -> None:
    """Each is a report with its line, where a GPU would wait for ever or trap."""
    edit, words = WRONG[wrong]
    kernel = rounds(tmp_path, edit)
    with pytest.raises(KernelFault, match=words) as caught:
        output(Host(), kernel)
    assert re.search(rf"{kernel.path.name}:\d+", str(caught.value)), caught.value


def test_a_grid_that_cannot_run_at_once_is_refused(tmp_path: Path) -> None:
    """132 multiprocessors with 21 blocks of 96 threads, or with the 2 that shared memory leaves; and a launch that overlaps another."""
    of = Problem.of(1, 1, 132 * 21 + 1, 64)
    device = Device("cpu", "a processor")
    assert planner.plan(rounds(tmp_path), Problem.of(1, 1, 132 * 21, 64), device).launches[0].cooperative
    with pytest.raises(UsageFault, match="cooperative: its 2773 blocks must run at once, and 132 multiprocessors hold 2772"):
        planner.plan(rounds(tmp_path), of, device)
    large = rounds(tmp_path, ("// block = 96\n", "// block = 96\n// shared = 100000\n"))
    with pytest.raises(UsageFault, match="hold 264 of them at most"):
        planner.plan(large, Problem.of(1, 1, 265, 64), device)
    launch = ROUNDS[ROUNDS.index("// [[launch]]") : ROUNDS.index("// cooperative")]
    both = rounds(tmp_path, ("// [[launch]]\n", launch + "// [[launch]]\n"), ("// cooperative = 1", "// cooperative = 1\n// overlaps = 1"))
    with pytest.raises(UsageFault, match="both cooperative and overlaps"):
        planner.plan(both, PROBLEM, device)
