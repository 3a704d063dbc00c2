"""The header's key runtime: values of [tile] that a kernel reads from fa::Args, so that no value is a compile of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planted import top

from harness.backends import Backend
from harness.check.tensors import Bound
from harness.fault import UsageFault
from harness.kernel import Device, Kernel, planner
from harness.problem import Problem

SOURCE = (
    top(runtime='["SECTION", "PARTS"]')
    + """\
// [tile]
// SECTION = "seq_q // 4"
// PARTS = 1
// WIDTH = "16 if SECTION > 8 else 8"
// [[choice]]
// when = "seq_q > 16"
// PARTS = "SECTION - 2"
// evidence = "a test"
// [[launch]]
// entry = "forward"
// grid = "PARTS"
// block = 64
// ///
#include <fa/args.cuh>
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    const int parts = args.runtime[RUNTIME_PARTS];
    static_cast<float*>(args.O.data)[threadIdx.x] = 1000 * args.runtime[RUNTIME_SECTION] + 10 * parts + int(blockIdx.x < parts);
}
"""
)


def read(folder: Path) -> Kernel:
    path = folder / "mine_forward.cu"
    path.write_text(SOURCE)
    return Kernel.read(path)


def test_a_value_is_in_the_arguments_and_in_no_macro(backend: Backend, tmp_path: Path) -> None:
    """Of [tile], of a row of choice and of --tile; launches see it as any other, and the same code is run."""
    kernel, macros = read(tmp_path), set()
    for seq, tiles, section, parts in ((16, {}, 4, 1), (32, {}, 8, 6), (32, {"SECTION": 7}, 7, 5), (32, {"PARTS": 3}, 8, 3)):
        problem = Problem.of(1, 1, seq, 64)
        loaded = backend.load(kernel, problem, tiles)
        macros.add(loaded.plan.macros)
        assert loaded.plan.runtime == (("SECTION", section), ("PARTS", parts)) and loaded.plan.launches[0].grid == (parts, 1, 1)
        assert loaded.plan.values.items() >= {"SECTION": str(section), "PARTS": str(parts), "WIDTH": "8"}.items()
        given = {name: np.zeros(problem.shape(name), np.float32) for name in ("Q", "K", "V")}
        found = Bound(backend, loaded, problem, given).run()["O"]
        assert found.reshape(-1)[:64].tolist() == [1000 * section + 10 * parts + 1] * 64
    (only,) = macros
    assert dict(only).keys() & {"SECTION", "PARTS", "RUNTIME_SECTION", "RUNTIME_PARTS"} == {"RUNTIME_SECTION", "RUNTIME_PARTS"}
    assert dict(backend.load(kernel, Problem.of(1, 1, 64, 64)).plan.macros)["WIDTH"] == "16", "what a macro makes of one is a form"


def test_a_value_has_32_bits(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="SECTION is 2147483648"):
        planner.plan(read(tmp_path), Problem.of(1, 1, 16, 64), Device("cpu", ""), {"SECTION": 2**31})
