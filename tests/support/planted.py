"""Kernel files with something wrong: the named faults of faults.toml, planted in kernels of the tree, and small files of a test's own."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from harness.kernel.kernel import INCLUDE, Kernel, catalogue
from harness.problem import Problem


@dataclass(frozen=True)
class Planted:
    """One fault of faults.toml, whose first lines say what each field is."""

    name: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    found_by: dict[str, list[str]]
    file: str = ""
    seq: int = 129
    causal: bool = False
    dtype: str = "float32"
    heads: int = 2
    problem: Problem = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", Problem.of(1, self.heads, self.seq, 64, dtype=self.dtype, causal=self.causal))

    def plant(self, folder: Path) -> Kernel:
        """The kernel with its fault, written into a folder (a header with a fault beside it). Raises ValueError as `edited` does."""
        source = next(kernel for kernel in catalogue() if kernel.label == self.kernel)
        text = source.path.read_text(encoding="utf-8")
        if self.file:
            header = folder / Path(self.file).name
            header.write_text(edited((INCLUDE / self.file).read_text(encoding="utf-8"), *self.edits, where=self.file), encoding="utf-8")
            text = edited(text, (f"<{self.file}>", f'"{header.name}"'), where=source.path.name)
        else:
            text = edited(text, *self.edits, where=source.path.name)
        path = folder / f"{self.kernel}.cu"
        path.write_text(text, encoding="utf-8")
        return Kernel.read(path)


def faults(check: str = "") -> dict[str, Planted]:
    """The faults by name: all, or those that a check must find."""
    tables = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))["fault"]
    found = {table["name"]: Planted(**table | {"edits": tuple(map(tuple, table["edits"]))}) for table in tables}
    assert len(found) == len(tables), "two faults have one name"
    return {name: fault for name, fault in found.items() if not check or check in fault.found_by}


def edited(text: str, *edits: tuple[str, str], where: str = "the text") -> str:
    """The text with each edit made, one after the other. Raises ValueError where what is replaced does not stand there exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {where}, not once")
        text = text.replace(old, new)
    return text


HEADER = """\
// /// kernel
// title = "planted for a test"
// dtypes = ["float32"]
// head_dims = [64]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
{tile}// [[launch]]
// entry = "forward"
// grid = ["seq_q"]
// block = 128
// shared = {shared}
// ///
"""

#: Adds one to the first element of O; compiles everywhere.
GOOD = """\
#include <fa/warp.cuh>
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    static_cast<float*>(args.O.data)[0] += 1.0f;
}
"""

#: Keeps 128 values a thread alive over a barrier under a launch bound of 64 registers: it must spill.
SPILLING = """\
#include <fa/warp.cuh>
extern "C" __global__ void __launch_bounds__(1024) forward(const __grid_constant__ fa::Args args) {
    float* out = static_cast<float*>(args.O.data);
    float kept[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) kept[i] = out[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 128; ++i) out[(127 - i) * 1024 + threadIdx.x] = kept[i] * kept[(i * 7) % 128];
}
"""


def kernel(
    folder: Path, body: str = GOOD, *, name: str = "planted_forward.cu", shared: int | str = 0, tile: str = "", **edits: str
) -> Kernel:
    """Write a kernel file and read it. shared is the launch's, tile a line of the [tile] table, edits replace header values by key."""
    text = HEADER.format(shared=shared if isinstance(shared, int) else f'"{shared}"', tile=f"// [tile]\n// {tile}\n" if tile else "")
    for key, value in edits.items():
        line = next(line for line in text.splitlines() if line.startswith(f"// {key} ="))
        text = text.replace(line, f"// {key} = {value}")
    path = folder / "planted_forward.cu"
    path.write_text(text + body, encoding="utf-8")
    return Kernel.read(path)


def line_of(path: Path, words: str) -> int:
    """The number, from 1, of the first line of a file that holds these words."""
    return next(i for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if words in line)


#: A kernel that writes zeros: it compiles and runs, and is wrong.
WRONG = """\
// /// kernel
// title = "zeros"
// dtypes = ["float32"]
// head_dims = [64]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [[launch]]
// entry = "zeros"
// grid = ["seq_q", "heads_q", "batch"]
// block = 32
// ///
#include <fa/args.cuh>

extern "C" __global__ void zeros(const __grid_constant__ fa::Args args) {
    float* row = fa::row_pointer<float>(args.O, blockIdx.z, blockIdx.y, blockIdx.x);
    for (int d = threadIdx.x; d < args.head_dim; d += blockDim.x) row[d] = 0;
    if (threadIdx.x == 0) *fa::row_pointer<float>(args.logsumexp, blockIdx.z, blockIdx.y, blockIdx.x) = 0;
}
"""
