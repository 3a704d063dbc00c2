"""A kernel of one block around a word or two, on any backend: what tests of <fa/...> are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from planted import top

from harness.backends import Backend
from harness.backends.launch import ARGS
from harness.check.tensors import Bound
from harness.kernel import Kernel
from harness.problem import Problem

SOURCE = (
    top(title='"one word"')
    + """\
// [[launch]]
// entry = "forward"
// grid = "1"
// block = {block}
// shared = {shared}
// ///
{first}
#include <fa/row.cuh>
#include <fa/tile.cuh>
#include <fa/warp.cuh>
using scalar = fa::{dtype};
{before}
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {{
    const scalar* a = static_cast<const scalar*>(args.Q.data);
    const scalar* b = static_cast<const scalar*>(args.K.data);
    unsigned* out = static_cast<unsigned*>(args.O.data);
    const int t = threadIdx.x;
    (void)a, (void)b, (void)t;
{body}
}}
"""
)
TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
STORED = [name for name in TYPES if name != "float64"]  # what the tiled kernels take
UNWRITTEN = 0xFFFFFFFF  # outputs are poisoned before a run
ROWS = 256
WORDS = ROWS * 64


def words(values: Any) -> Any:
    """An array's bytes as 32-bit words, filled up with poison to the size of a tensor here."""
    raw = np.full(4 * WORDS, 0xFF, np.uint8)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    raw[: data.size] = data
    return raw.view(np.float32).reshape(1, 1, ROWS, 64)


class Given(Bound):
    """A bound kernel that is told what a test wants in some fields of fa::Args."""

    def __init__(self, fields: dict[str, Any], *rest: Any) -> None:
        super().__init__(*rest)
        (call,) = self.steps
        args = np.frombuffer(call.parameters[0], ARGS).copy()
        for name, value in fields.items():
            args[name] = value
        self.steps = [call._replace(parameters=(args.tobytes(), *call.parameters[1:]))]


def bound(
    backend: Backend,
    folder: Path,
    body: str,
    a: Any = 0,
    b: Any = 0,
    *,
    dtype: str = "float32",
    block: int = 32,
    shared: int = 0,
    causal: bool = False,
    fields: dict[str, Any] | None = None,
    before: str = "",
    first: str = "",
) -> Bound:
    """A kernel of one block with its arrays a and b, given as they are; fields replaces parts of fa::Args. before: lines above the kernel;
    first: above all words."""
    path = folder / "word_forward.cu"
    path.write_text(SOURCE.format(block=block, shared=shared, dtype=dtype, body=body, before=before, first=first))
    problem = Problem.of(1, 1, ROWS, 64, causal=causal)
    inputs = {"Q": words(a), "K": words(b), "V": words(0)}
    return Given(fields or {}, backend, backend.load(Kernel.read(path), problem), problem, inputs)


def answer(kernel: Bound) -> Any:
    """The 32-bit words that a launch leaves in `out`."""
    return kernel.run()["O"].reshape(-1).view(np.uint32)


def run(backend: Backend, folder: Path, body: str, a: Any = 0, b: Any = 0, **more: Any) -> Any:
    """The answer of a kernel that is launched once; parameters as bound() takes them."""
    return answer(bound(backend, folder, body, a, b, **more))


def integers(*shape: int, seed: int = 0, most: int = 8) -> Any:
    """Small integers, none of them zero, exact in every type and as a sum of thousands of products."""
    draw = np.random.RandomState(seed)
    return draw.randint(1, most + 1, shape) * draw.choice([-1, 1], shape)


def f32(got: Any, *shape: int) -> Any:
    """The first words of an answer as float32 of a shape."""
    return got[: int(np.prod(shape))].view(np.float32).reshape(shape)
