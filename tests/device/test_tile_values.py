"""Half and double of each tile value: a kernel refuses what it would compute wrongly, by its header or a static_assert."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest

from harness.backends import CompileError, pick
from harness.check.contender import run_kernel
from harness.check.oracle import Oracle, oracle_for
from harness.fault import UsageFault
from harness.kernel import Kernel, catalogue, planner
from harness.problem import Problem

#: SPLIT and SPLITS are one choice in two values; DIRECT is for one tile of keys.
TOGETHER = {"SPLIT", "DIRECT"}


def problem_of(kernel: Kernel) -> Problem:
    """Several tiles with a tail, a group where the kernel has them, and the mask."""
    dtype = "float32" if kernel.dtypes[0] == "tf32" else kernel.dtypes[0]
    dim = (
        min(256, kernel.head_dims[-1])
        if kernel.head_dims[0] > 128
        else max(width for width in kernel.head_dims if width <= 64 or width == kernel.head_dims[0])
    )
    mask = "0 <= q - k <= 99" if kernel.window and not kernel.mask else None
    return Problem.of(1, 2, 300, dim, 1 if kernel.gqa else 2, dtype=dtype, causal=kernel.causal, mask=mask, dim_v=kernel.dim_v(dim))


EVERY = [(kernel, name) for kernel in catalogue() for name in kernel.tile if name not in TOGETHER]


@cache
def reference(problem: Problem, pass_: str) -> Oracle:
    """The reference of one problem, for all tile values of the kernels that it is run on."""
    return oracle_for(problem, pick("cpu"), pass_)


@pytest.mark.days(28)
@pytest.mark.parametrize("part", EVERY, ids=lambda part: f"{part[0].label}-{part[1]}")
def test_half_and_double_of_a_tile_value_are_right_or_refused(part: tuple[Kernel, str]) -> None:
    """A wrong result of `--tile` is a missing static_assert."""
    kernel, name = part
    problem, backend = problem_of(kernel), pick("cpu")
    alone = kernel.variants[-1] if kernel.variants else kernel
    value = planner.names(alone, problem, backend.device())[name]
    oracle = reference(problem, kernel.pass_)
    for other in {max(0, value // 2), 2 * value or 1} - {value}:
        with suppress(CompileError, UsageFault):
            result = run_kernel(backend, alone, oracle, oracle.inputs_of(kernel.pass_), {name: other})
            assert result.passed, f"{name}={other}: {[v.tensor for v in result.verdicts.values() if not v.passed]}"
