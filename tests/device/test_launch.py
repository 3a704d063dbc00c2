"""Kernels through launch.py alone, on tensors that it does not own: any strides, nothing allocated, the same on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.backends import Backend, launch
from harness.backends.launch import View
from harness.check.oracle import Oracle
from harness.check.reference import round_to
from harness.dataset.storage import STORAGE
from harness.kernel import find
from harness.problem import READS, WRITES, Problem


def buffer(backend: Backend, data: Any) -> Any:
    """Device memory with these bytes."""
    made = backend.memory(data.nbytes)
    made[:] = backend.xp.asarray(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return made


def by_rows(backend: Backend, problem: Problem, name: str, values: Any | None) -> tuple[Any, View]:
    """A tensor in the layout (batch, rows, heads, head_dim) of most frameworks, and its view; without values, all NaN."""
    shape, storage = problem.shape(name), STORAGE[problem.tensor_dtype(name)]
    if values is None:
        values = np.full(np.prod(shape) * storage.itemsize, 0xFF, np.uint8).view(storage).reshape(shape)
    made = buffer(backend, values.swapaxes(1, 2) if len(shape) == 4 else values)
    if len(shape) == 3:
        return made, View(backend.address(made), shape[1] * shape[2], shape[2], 1)
    _, heads, rows, dim = shape
    return made, View(backend.address(made), rows * heads * dim, dim, heads * dim)


def values_of(backend: Backend, problem: Problem, name: str, made: Any) -> Any:
    """The tensor as (batch, heads, rows, head_dim) again."""
    shape, flat = problem.shape(name), np.asarray(backend.get(made)).view(STORAGE[problem.tensor_dtype(name)])
    if len(shape) == 3:
        return flat.reshape(shape)
    batch, heads, rows, dim = shape
    return np.ascontiguousarray(flat.reshape(batch, rows, heads, dim).swapaxes(1, 2))


CASES = [
    ("naive", Problem.of(2, 2, 33, 64)),
    ("naive", Problem.of(1, 4, 20, 40, heads_kv=2, seq_kv=31, dtype="float16", causal=True)),
    ("fa2", Problem.of(2, 2, 70, 64, causal=True)),
    ("fa2", Problem.of(1, 4, 45, 40, heads_kv=2, seq_kv=67, dtype="bfloat16")),
    ("mma_qreg_async", Problem.of(2, 4, 70, 64, heads_kv=2, dtype="bfloat16", causal=True)),
    ("mma_qreg_async", Problem.of(1, 2, 45, 96, seq_kv=131, dtype="float16")),
]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(("name", "problem"), CASES, ids=lambda value: getattr(value, "folder", value))
def test_tensors_of_any_strides(backend: Backend, name: str, problem: Problem, pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(batch, rows, heads, head_dim) in memory, as PyTorch's transposed views are; the call itself allocates nothing."""
    random = np.random.RandomState(0)
    inputs = {
        tensor: round_to(np, random.randn(*problem.shape(tensor)), problem.dtype).view(STORAGE[problem.dtype])
        for tensor in ("Q", "K", "V", "dO")
    }
    oracle = Oracle(problem, inputs)
    given = inputs | oracle.forward_outputs
    launcher = launch.launcher(backend, find(name, pass_), problem)
    made = {tensor: by_rows(backend, problem, tensor, given[tensor]) for tensor in READS[pass_]}
    made |= {tensor: by_rows(backend, problem, tensor, None) for tensor in WRITES[pass_]}
    spaces = [buffer(backend, np.full(space.bytes, 0xFF, np.uint8)) for space in launcher.loaded.plan.workspaces]
    assert all(space.init in ("none", "zero") for space in launcher.loaded.plan.workspaces)
    with monkeypatch.context() as patch:
        for tool in ("memory", "get", "load"):
            patch.setattr(backend, tool, lambda *_, what=tool: pytest.fail(f"a call uses {what}"))
        launcher({tensor: view for tensor, (_, view) in made.items()}, [backend.address(space) for space in spaces])
    outputs = {tensor: values_of(backend, problem, tensor, made[tensor][0]) for tensor in WRITES[pass_]}
    kernel = launcher.loaded.kernel
    for verdict in oracle.judge(outputs, kernel.arithmetic_for(problem.dtype)).values():
        assert verdict.passed, f"{verdict.tensor}: {verdict.reason}"
    for tensor in READS[pass_]:
        assert values_of(backend, problem, tensor, made[tensor][0]).tobytes() == np.ascontiguousarray(given[tensor]).tobytes(), tensor
