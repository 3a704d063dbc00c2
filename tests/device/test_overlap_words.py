"""Launches that overlap (fa/overlap.cuh): planned, launched, and on the CPU held to wait before they read what the one before has written."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted import line_of, top

from harness.backends import Backend, attributed
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.kernel import Device, Kernel, planner
from harness.problem import Problem

PROBLEM = Problem.of(2, 2, 64, 64)
TWO = (
    top(title='"two launches"')
    + """\
// [workspace.squares]
// dtype = "float32"
// size = "batch * heads_q * seq_q * 64"
// init = "none"
// [[launch]]
// entry = "prepare"
// grid = ["seq_q", "heads_q", "batch"]
// block = 64
// overlaps = 1
// [[launch]]
// entry = "forward"
// grid = ["seq_q", "heads_q", "batch"]
// block = 64
// overlaps = 1
// ///
#include <fa/overlap.cuh>
__device__ float* squares(const fa::Args& args) {
    const int row = (blockIdx.z * args.heads_q + blockIdx.y) * args.seq_q + blockIdx.x;
    return static_cast<float*>(args.workspace[WORKSPACE_SQUARES]) + row * 64 + threadIdx.x;
}
extern "C" __global__ void prepare(const __grid_constant__ fa::Args args) {
    fa::launch_dependents();
    const float q = fa::row_pointer<float>(args.Q, blockIdx.z, blockIdx.y, blockIdx.x)[threadIdx.x];
    *squares(args) = q * q;
}
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    __shared__ float shared[64];
    if (threadIdx.x / 32 == 0) fa::dependency_wait();
    __syncthreads();
    shared[threadIdx.x] = *squares(args);
    __syncthreads();
    fa::row_pointer<float>(args.O, blockIdx.z, blockIdx.y, blockIdx.x)[threadIdx.x] = shared[threadIdx.x];
    if (threadIdx.x == 0) *fa::row_pointer<float>(args.logsumexp, blockIdx.z, blockIdx.y, blockIdx.x) = 0;
}
"""
)


def two(folder: Path, *edits: tuple[str, str]) -> Kernel:
    """TWO with some edits."""
    text = TWO
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "mine_forward.cu"
    path.write_text(text)
    return Kernel.read(path)


def output(backend: Backend, kernel: Kernel) -> tuple[Any, Any]:
    """Squares of Q, and what the kernel says they are."""
    rng = np.random.default_rng(1)
    given = {name: rng.random(PROBLEM.shape(name), np.float32) for name in ("Q", "K", "V")}
    return given["Q"] ** 2, Bound(backend, backend.load(kernel, PROBLEM), PROBLEM, given).run()["O"]


def test_the_first_launch_of_a_pass_never_overlaps(tmp_path: Path) -> None:
    """What comes before it is another pass, for which it does not wait."""
    plan = planner.plan(two(tmp_path), PROBLEM, Device("cpu", "a processor"))
    assert [launch.overlaps for launch in plan.launches] == [False, True]


def test_what_is_read_behind_the_wait_is_there(backend: Backend, tmp_path: Path) -> None:
    """Also by threads that hear of the wait through a barrier; twice, since a GPU's second pass follows at once."""
    for _ in range(2):
        wanted, found = output(backend, two(tmp_path))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_read_before_the_wait_finds_nan(seed: int, tmp_path: Path) -> None:
    """In every schedule: here the wait of one warp, and the other reads without a barrier behind it."""
    early = two(tmp_path, ("dependency_wait();\n    __syncthreads();", "dependency_wait();"))
    wanted, found = output(Host(seed), early)
    assert np.isnan(found[0, 0, 0, 32:]).all()
    np.testing.assert_array_equal(found[1], wanted[1])  # only a first block begins early


def test_a_launch_that_never_waits(tmp_path: Path) -> None:
    """Nothing keeps what comes behind it from running before the launch before has ended."""
    with pytest.raises(KernelFault, match="no thread has come to dependency_wait"):
        output(Host(), two(tmp_path, ("if (threadIdx.x / 32 == 0) fa::dependency_wait();", "")))


WAIT = "if (threadIdx.x / 32 == 0) fa::dependency_wait();\n    __syncthreads();\n"
READ = "    shared[threadIdx.x] = *squares(args);\n"
#: What is planted in TWO, and what its second launch then does too early. The first two are what flash-attention had: pull requests 2481, a
#: kernel in which no path waits, and 2756, where the block-sparse path alone did not.
EARLY = {
    "no wait": ((WAIT, ""), "reads"),
    "no wait in one path": (("if (threadIdx.x / 32 == 0) fa::", "if (blockIdx.y == 0 && threadIdx.x / 32 == 0) fa::"), "reads"),
    "a wait too late": ((WAIT + READ, READ + "    " + WAIT), "reads"),
    "a wait of other threads": ((WAIT, WAIT.partition("\n")[0] + "\n"), "reads"),
    "a workspace of two launches in flight": ((WAIT, "*squares(args) = 0;\n    " + WAIT), "writes"),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("planted_", EARLY)
def test_the_race_check_names_what_comes_before_the_wait(planted_: str, seed: int, tmp_path: Path) -> None:
    """Both lines, and the thread of the earlier launch; of the right kernel it says nothing."""
    edit, what = EARLY[planted_]
    output(Host(seed, "race"), two(tmp_path))
    wrong = two(tmp_path, edit)
    with pytest.raises(CheckFault) as caught:
        output(Host(seed, "race"), wrong)
    first, second = (
        line_of(wrong.path, text) for text in ("*squares(args) = q * q", "= *squares" if what == "reads" else "*squares(args) = 0")
    )
    assert re.search(
        rf"squares\[\d+\]: thread \d+ of an earlier launch writes at {wrong.path}:{first}, "
        rf"thread \d+ of block \(\d+, \d+, \d+\) {what} at {wrong.path}:{second}, no dependency_wait lies before the second",
        str(caught.value),
    ), caught.value


@pytest.mark.parametrize("attribute", [attributed.OVERLAPS, attributed.COOPERATIVE])
def test_the_driver_is_given_the_attribute(attribute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of cuda.h's structures on 64-bit machines, the grid, the block, the stream and one attribute."""
    assert (ctypes.sizeof(attributed._Attribute), ctypes.sizeof(attributed._Config)) == (72, 56)
    seen: list[SimpleNamespace] = []

    def launched(config: Any, function: int, parameters: int, extra: None) -> int:
        given = config._obj
        attribute = given.attributes[0]
        seen.append(SimpleNamespace(sizes=(*given.grid, *given.block, given.shared), stream=given.stream, id=attribute.id))
        assert (given.count, attribute.value[0], function, parameters, extra) == (1, 1, 0xF00, 0xABC, None)
        return 1

    monkeypatch.setattr(attributed, "_driver", lambda: launched)
    assert attributed.launch(attributed.config((1, 2, 3), 128, 256, attribute), 0xF00, 0x77, 0xABC) == 1
    assert seen == [SimpleNamespace(sizes=(1, 2, 3, 128, 1, 1, 256), stream=0x77, id=attribute)]
