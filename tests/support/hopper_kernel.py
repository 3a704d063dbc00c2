"""A kernel of one block, or of clusters, with tensor maps of 16-bit tensors (1, 4, 512, 64), on any backend that has TMA and wgmma."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from planted import top
from word_kernel import Given

from harness.backends import Backend
from harness.check.tensors import Bound
from harness.kernel import Kernel
from harness.problem import Problem

HEADER = (
    top(title='"words of Hopper"', dtypes='["float16", "bfloat16"]', arch='"sm_90a"')
    + """\
{maps}// [[launch]]
// entry = "forward"
// grid = {grid}
// block = {block}
// shared = {shared}
{cluster}// ///
#include <fa/tma.cuh>
#include <fa/wgmma.cuh>
using scalar = fa::DTYPE;
using fa::uint16_t;
using fa::uint32_t;
using fa::uint64_t;
"""
)
MAP = '// [tensor_map.{name}]\n// tensor = "{tensor}"\n// box = {box}\n// swizzle = {swizzle}\n'
HEADS, ROWS, WIDTH = 4, 512, 64
TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def needs_hopper(backend: Backend) -> None:
    """Skips the test on a GPU without wgmma."""
    if backend.name == "cuda" and backend.device().arch != "sm_90":
        pytest.skip(f"{backend.device().name} has no wgmma")


def bound(
    backend: Backend,
    folder: Path,
    code: str,
    maps: dict[str, tuple[str, list[int], int]],
    inputs: dict[str, Any],
    dtype: str = "bfloat16",
    block: int = 128,
    shared: int = 65536,
    grid: int | str = 1,
    cluster: int | str = 0,
) -> Bound:
    """A kernel file's code behind the header; maps: name -> tensor, box, swizzle. inputs: Q, K, V; zeros where one is left out.

    grid, cluster: in blocks, a number along x or a list; cluster 0: none.
    """
    needs_hopper(backend)
    tables = "".join(MAP.format(name=name, tensor=tensor, box=box, swizzle=swizzle) for name, (tensor, box, swizzle) in maps.items())
    path = folder / "word_forward.cu"
    path.write_text(
        HEADER.format(maps=tables, block=block, shared=shared, grid=grid, cluster=f"// cluster = {cluster}\n" * bool(cluster)) + code
    )
    problem = Problem.of(1, HEADS, ROWS, WIDTH, dtype=dtype)
    given = {name: np.zeros(problem.shape(name), TYPES[dtype]) for name in "QKV"}
    for name, values in inputs.items():
        flat = given[name].reshape(-1)
        flat[: values.size] = np.asarray(values).astype(TYPES[dtype]).reshape(-1)
    return Given({}, backend, backend.load(Kernel.read(path), problem), problem, given)


def with_fields(kernel: Bound, **fields: Any) -> Any:
    """O of a launch, its bytes; fields replaces parts of fa::Args."""
    from harness.backends.launch import ARGS

    (call,) = kernel.steps
    args = np.frombuffer(call.parameters[0], ARGS).copy()
    for name, value in fields.items():
        args[name] = value
    kernel.steps = [call._replace(parameters=(args.tobytes(), *call.parameters[1:]))]
    return np.ascontiguousarray(kernel.run()["O"]).view(np.uint8).reshape(-1)
