"""Small kernel files of a test's own, right or with something wrong. Faults in kernels of the tree are harness/verbs/selftest's."""

from __future__ import annotations

from pathlib import Path

from harness.kernel import Kernel


def top(**edits: str) -> str:
    """The first lines of a kernel header: every key that it must have but launch. edits: values in place of these, or more, as TOML."""
    keys = {"title": '"planted for a test"', "dtypes": '["float32"]', "head_dims": "[64]", "arch": '">=sm_70"'}
    keys |= {**dict.fromkeys(("causal", "gqa", "cross"), "true"), "logits": '"any"', "deterministic": "true", **edits}
    return "// /// kernel\n" + "".join(f"// {key} = {value}\n" for key, value in keys.items())


HEADER = (
    top()
    + """\
{tile}// [[launch]]
// entry = "forward"
// grid = ["seq_q"]
// block = 128
// shared = {shared}
// ///
"""
)

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
WRONG = (
    top(title='"zeros"')
    + """\
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
)
