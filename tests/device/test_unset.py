"""Locals that nothing sets start as NaN on the CPU engine, in each of its builds (harness/backends/host/unset.py)."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from planted import top

from harness.backends.host.backend import Host
from harness.backends.host.build import _clang, compiler
from harness.backends.host.unset import starting_as_nan
from harness.check.tensors import Bound
from harness.kernel import Kernel
from harness.problem import Problem

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = (
    top(title='"says how its locals start"', causal="false", gqa="false", cross="false")
    + """\
// [[launch]]
// entry = "forward"
// grid = [1]
// block = 32
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "head_dim", "scale"]
// ///
"""
)
#: O[i] is how many 16-bit words of a local are neither 0xfffe nor 0xffff: of each kind of local one i.
KINDS = ["int", "float", "double", "long long", "half", "fa::bfloat16", "Pair", "Fragment", "float2", "float4"]
SIZES = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 64, 100, 400, 1500]
BODY = """\
#include <fa/mma.cuh>
#include <fa/types.cuh>
struct Pair { unsigned low; fa::bfloat16 high[2]; };
struct Fragment { float x[8]; int count; fa::float16 half[6]; };
typedef fa::float16 half;
typedef unsigned short __attribute__((may_alias)) word;
__device__ __noinline__ int wrong(const void* local, int bytes) {
    int found = 0;
    for (int i = 0; i < bytes / 2; ++i) found += static_cast<const word*>(local)[i] < 0xfffe;
    return found;
}
template <typename T, int N> __device__ __noinline__ int in_memory() {
    T local[N];
    return wrong(local, sizeof local);
}
// Of an accumulator in registers a product with 0 is 0, unless it is NaN.
template <int N> __device__ __noinline__ float in_registers(float factor, const float* x) {
    float sum[N], all = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = factor * sum[i] + x[i];
#pragma unroll
    for (int i = 0; i < N; ++i) all += sum[i] == sum[i];
    return all;
}
extern "C" __global__ void forward(const float* Q, const float* K, const float* V, float* O, float* logsumexp,
                                   int heads, int seq, int dim, float scale) {
    if (threadIdx.x) return;
    const float factor = scale * 0;
    int at = 0;
CALLS
    O[at++] = in_registers<1>(factor, Q);
    O[at++] = in_registers<4>(factor, Q);
    O[at++] = in_registers<32>(factor, Q);
    O[at] = -1;
}
"""
CALLS = [f"    O[at++] = float(in_memory<{kind}, {size}>());" for kind in KINDS for size in SIZES if size * 8 < 20000]

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


def telling(folder: Path, body: str = BODY) -> Path:
    path = folder / "telling_forward.cu"
    path.write_text(HEADER + body.replace("CALLS", "\n".join(CALLS)))
    return path


@pytest.mark.parametrize("build", [{}, {"check": "race"}, {"debug": True}], ids=["plain", "race", "debug"])
def test_every_local_starts_as_nan(build: dict[str, str | bool], tmp_path: Path) -> None:
    """Scalars, arrays of every type and size, structs; in memory and in registers."""
    backend, problem = Host(**build), Problem.of(1, 1, 64, 64)  # type: ignore[arg-type]
    loaded = backend.load(Kernel.read(telling(tmp_path)), problem)
    x = np.ones((1, 1, 64, 64), np.float32)
    found = Bound(backend, loaded, problem, {"Q": x, "K": x, "V": x}).run()["O"].ravel()
    kinds = [*CALLS, *(f"in registers {n}" for n in (1, 4, 32))]
    assert found[len(kinds)] == -1
    assert not {kind.strip(): count for kind, count in zip(kinds, found, strict=False) if count}


def test_the_asan_build_too(tmp_path: Path) -> None:
    """Through the command, as AddressSanitizer must be loaded first."""
    body = BODY.replace("O[at] = -1;", "for (int i = 0; i < at; ++i)\n        if (O[i]) __trap();")
    path = telling(tmp_path, body)
    command = [sys.executable, str(ROOT / "cli.py"), "run", str(path), "--check", "asan", "--batch", "1", "--heads", "1", "--seq", "64"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"FA_CLI_DEVICE": "cpu"})
    assert done.returncode == 1 and "trap" not in done.stdout + done.stderr, done.stdout + done.stderr


#: 0xFE bytes of a kernel's own, computed with and stored, beside a local that nothing sets.
OWN_BYTES = """
extern "C" float sum(const float* x, int n) {
    float all[64];
    for (int i = 0; i < 64; ++i) all[i] = all[i] * 0 + x[i];
    return all[n];
}
extern "C" void even(unsigned char* x) {
    for (int i = 0; i < 256; ++i) x[i] &= ~1;
}
extern "C" void store(unsigned char* x) {
    for (int i = 0; i < 256; ++i) x[i] = FILLED;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's spellings")
@pytest.mark.parametrize("filled", ["1", "0xFE", "254u"])
def test_what_is_a_kernels_own_stays(filled: str, tmp_path: Path) -> None:
    """A mask of bytes is none of a local; a source that names the pattern is left alone."""
    if _clang():
        pytest.skip("clang's pattern is NaN already")
    source = OWN_BYTES.replace("FILLED", filled)
    (tmp_path / "unit.cpp").write_text(source)
    command = [*compiler(), "-O3", "-march=native", "-fPIC", "-ftrivial-auto-var-init=pattern"]
    subprocess.run([*command, "-S", "unit.cpp", "-o", "unit.s"], cwd=tmp_path, check=True)
    before = (tmp_path / "unit.s").read_text()
    after = starting_as_nan(before, source)
    assert (before == after) == (filled != "1")
    (tmp_path / "unit.s").write_text(after)
    subprocess.run([*command, "-shared", "unit.s", "-o", "unit.so"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "unit.so"))
    bytes_ = np.arange(256, dtype=np.uint8)
    library.even(ctypes.c_void_p(bytes_.ctypes.data))
    assert (bytes_ == np.arange(256) & 0xFE).all()
    library.store(ctypes.c_void_p(bytes_.ctypes.data))
    assert (bytes_ == int(filled.strip("u"), 0)).all()
    library.sum.restype, x = ctypes.c_float, np.ones(64, np.float32)
    assert np.isnan(library.sum(ctypes.c_void_p(x.ctypes.data), 3)) == (filled == "1")
