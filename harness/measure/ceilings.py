"""The ceilings of a roofline, measured in the same run as the kernels: matrix products, a copy, exponentials, mma.sync alone.

A data sheet's peak is not reached: clocks, the power cap and the data itself (toggling bits draw power) lower it.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends import Backend
from ..row import CEILING, Row
from . import alone
from .sampling import POLICY, measure

SIZE = 8192  # of the square products
COPY_BYTES = 1 << 30
_EXP = """
extern "C" __global__ void exponentials(float* out) {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = threadIdx.x * 1e-3f + i;
    for (int n = 0; n < 512; ++n)
        for (int i = 0; i < 8; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += x[i];
    if (sum == 123.0f) out[0] = sum;
}
"""
_EXP_GRID, _EXP_BLOCK = 132 * 16, 1024

#: mma.sync from registers only: the ceiling of a kernel that does not use wgmma, which the GEMM does.
_MMA = """
extern "C" __global__ void __launch_bounds__(256) products(const unsigned* in, float* out) {
    unsigned a[4], b[2];
    float sum[16][4] = {};
    for (int i = 0; i < 4; ++i) a[i] = in[threadIdx.x * 8 + i];
    for (int i = 0; i < 2; ++i) b[i] = in[threadIdx.x * 8 + 4 + i];
    for (int n = 0; n < 1024; ++n)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float all = 0;
    for (int i = 0; i < 16; ++i) all += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
    if (all == 123.0f) out[0] = all;
}
"""
_MMA_GRID, _MMA_BLOCK = 132 * 2 * 8, 256
_MMA_FLOPS = 2.0 * 16 * 8 * 16 * 16 * 1024 * _MMA_GRID * _MMA_BLOCK / 32


class _Work:
    """A function that enqueues work on CuPy's current stream, as what sampling.measure takes (its Timed)."""

    def __init__(self, cupy: Any, work: Callable[[], object]) -> None:
        self._cupy, self._work = cupy, work

    def enqueue(self) -> Callable[[], float]:
        start, stop = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record()
        self._work()
        stop.record()

        def seconds() -> float:
            stop.synchronize()
            return float(self._cupy.cuda.get_elapsed_time(start, stop)) * 1e-3

        return seconds

    def call(self) -> float:
        start = time.perf_counter()
        finish = self.enqueue()
        seconds = time.perf_counter() - start
        finish()
        return seconds

    def graph(self) -> None:
        """None: the runs are long beside a launch."""


@dataclass(frozen=True)
class _Ceiling:
    """Work that is timed, and the operations and bytes of one run."""

    work: Callable[[], object]
    operations: float = 0.0
    bytes: float = 0.0


def rows(backend: Backend, run_id: str, energy: bool = False) -> list[Row]:
    """One row per ceiling of a CUDA backend.

    ceiling-gemm-<dtype> and ceiling-mma-bfloat16 in TFLOPS, ceiling-copy in GB/s (bytes read plus bytes written), ceiling-exp in 10^12
    exponentials per second, in the column TFLOPS. With energy, that of the products in the columns for it.
    """
    cupy: Any = backend.xp  # a GPU's array module is CuPy, which has no types
    ceilings = {CEILING + name: ceiling for name, ceiling in (_products(cupy) | _others(cupy)).items()}
    runs = {name: _Work(cupy, ceiling.work) for name, ceiling in ceilings.items()}
    timings = measure(runs, backend, "warm", POLICY["cuda"])
    products = {name: run for name, run in runs.items() if "-gemm-" in name} if energy else {}
    joules = {name: timing.energy for name, timing in alone.energy(products, backend, POLICY["cuda"]).items()}
    return [
        Row(
            Test="ceiling",
            Kernel=name,
            Type="FOR",
            Status="PASS",
            Batch=1,
            Heads=1,
            SeqLen=SIZE,
            HeadDim=SIZE,
            head_dim_v=SIZE,
            heads_kv=1,
            seq_kv=SIZE,
            dtype=name.rpartition("-")[2] if name.count("-") == 2 else "float32",
            causal=False,
            scale=1.0,
            timing="warm",
            KernelTime_ms=t.median_ms,
            p20_ms=t.p20_ms,
            p80_ms=t.p80_ms,
            n_samples=len(t.seconds),
            TFLOPS=ceilings[name].operations / (t.median_ms * 1e9) or None,
            Bandwidth_GBps=ceilings[name].bytes / (t.median_ms * 1e6) or None,
            device=backend.name,
            device_name=backend.device().name,
            run_id=run_id,
            **(each._asdict() if (each := joules.get(name)) else {}),
        )
        for name, t in timings.items()
    ]


def _products(cupy: Any) -> dict[str, _Ceiling]:
    """Square matrix products: by torch where it is installed, which has bfloat16, else by CuPy."""
    flops = 2.0 * SIZE**3
    if importlib.util.find_spec("torch"):
        import torch

        products = {}
        for dtype in ("bfloat16", "float16", "float32"):
            a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
            products[f"gemm-{dtype}"] = _Ceiling(functools.partial(torch.matmul, a, b), flops)
        return products
    a32, b32 = (cupy.random.standard_normal((SIZE, SIZE), dtype="float32") for _ in range(2))
    a16, b16 = a32.astype("float16"), b32.astype("float16")
    return {
        "gemm-float32": _Ceiling(lambda: cupy.matmul(a32, b32), flops),
        "gemm-float16": _Ceiling(lambda: cupy.matmul(a16, b16), flops),
    }


def _others(cupy: Any) -> dict[str, _Ceiling]:
    """A copy, exponentials, and mma.sync alone where the GPU has it."""
    source, target = cupy.ones(COPY_BYTES // 4, "float32"), cupy.empty(COPY_BYTES // 4, "float32")
    kernel, out = cupy.RawKernel(_EXP, "exponentials"), cupy.zeros(1, "float32")
    ceilings = {
        "copy": _Ceiling(lambda: cupy.copyto(target, source), bytes=2.0 * COPY_BYTES),
        "exp": _Ceiling(lambda: kernel((_EXP_GRID,), (_EXP_BLOCK,), (out,)), 512.0 * 8 * _EXP_GRID * _EXP_BLOCK),
    }
    if int(cupy.cuda.Device().compute_capability) >= 80:
        values = cupy.random.standard_normal(_MMA_BLOCK * 16, dtype="float32")
        pairs = (values.view("uint32") >> 16).astype("uint16").view("uint32")  # as bfloat16, rounded towards zero
        mma = cupy.RawKernel(_MMA, "products")
        ceilings["mma-bfloat16"] = _Ceiling(lambda: mma((_MMA_GRID,), (_MMA_BLOCK,), (pairs, out)), _MMA_FLOPS)
    return ceilings
