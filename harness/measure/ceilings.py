"""What this GPU can do at most, measured in the same run as the kernels: matrix products, a copy, exponentials.

A roofline drawn from a data sheet flatters nobody but the data sheet: clocks, power and the data itself lower it.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from ..backends import Backend
from ..row import Row
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

#: mma.sync with nothing around it: what is left for a kernel that does not use a newer instruction (wgmma, which the GEMM uses).
_MMA = """
extern "C" __global__ void __launch_bounds__(256) products(const unsigned* in, float* out) {
    unsigned a[4], b[2];
    float sum[16][4] = {};
    for (int i = 0; i < 4; ++i) a[i] = in[threadIdx.x * 8 + i];
    for (int i = 0; i < 2; ++i) b[i] = in[threadIdx.x * 8 + 4 + i];
    for (int n = 0; n < 1024; ++n)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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
    """A function that enqueues work on the default stream, as measure wants it."""

    def __init__(self, xp: Any, work: Callable[[], object]) -> None:
        self._xp, self._work = xp, work

    def enqueue(self) -> Callable[[], float]:
        start, stop = self._xp.cuda.Event(), self._xp.cuda.Event()
        start.record()
        self._work()
        stop.record()

        def seconds() -> float:
            stop.synchronize()
            return float(self._xp.cuda.get_elapsed_time(start, stop)) * 1e-3

        return seconds

    def call(self) -> float:
        start = time.perf_counter()
        finish = self.enqueue()
        seconds = time.perf_counter() - start
        finish()
        return seconds

    def graph(self) -> None:
        """Long enough to be launched as it is."""


def rows(backend: Backend, run_id: str) -> list[Row]:
    """One row a ceiling: ceiling-gemm-<dtype>, ceiling-mma-bfloat16 (TFLOPS), ceiling-copy (GB/s, read and written), ceiling-exp (10^12 a second, as TFLOPS)."""
    xp = backend.xp
    work: dict[str, tuple[Callable[[], object], float, float]] = {}  # name: work, operations, bytes
    flops = 2.0 * SIZE**3
    if importlib.util.find_spec("torch"):
        import torch

        for dtype in ("bfloat16", "float16", "float32"):
            a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
            work[f"ceiling-gemm-{dtype}"] = (functools.partial(torch.matmul, a, b), flops, 0.0)
    else:
        a32, b32 = (xp.random.standard_normal((SIZE, SIZE), dtype="float32") for _ in range(2))
        a16, b16 = a32.astype("float16"), b32.astype("float16")
        work["ceiling-gemm-float32"] = (lambda: xp.matmul(a32, b32), flops, 0.0)
        work["ceiling-gemm-float16"] = (lambda: xp.matmul(a16, b16), flops, 0.0)
    source, target = xp.ones(COPY_BYTES // 4, "float32"), xp.empty(COPY_BYTES // 4, "float32")
    work["ceiling-copy"] = (lambda: xp.copyto(target, source), 0.0, 2.0 * COPY_BYTES)
    kernel, out = xp.RawKernel(_EXP, "exponentials"), xp.zeros(1, "float32")
    work["ceiling-exp"] = (lambda: kernel((_EXP_GRID,), (_EXP_BLOCK,), (out,)), 512.0 * 8 * _EXP_GRID * _EXP_BLOCK, 0.0)
    if int(xp.cuda.Device().compute_capability) >= 80:
        numbers = xp.random.standard_normal(_MMA_BLOCK * 16, dtype="float32")
        pairs = (numbers.view("uint32") >> 16).astype("uint16").view("uint32")  # as bfloat16, rounded towards zero
        mma = xp.RawKernel(_MMA, "products")
        work["ceiling-mma-bfloat16"] = (lambda: mma((_MMA_GRID,), (_MMA_BLOCK,), (pairs, out)), _MMA_FLOPS, 0.0)
    timings = measure({name: _Work(xp, w) for name, (w, _, _) in work.items()}, backend, "warm", POLICY["cuda"])
    return [
        Row(
            Test="ceiling",
            Kernel=name,
            Type="FOR",
            Batch=1,
            Heads=1,
            SeqLen=SIZE,
            HeadDim=SIZE,
            Status="PASS",
            heads_kv=1,
            seq_kv=SIZE,
            dtype=name.rpartition("-")[2] if name.count("-") == 2 else "float32",
            causal=False,
            scale=1.0,
            device=backend.name,
            device_name=backend.device().name,
            timing="warm",
            KernelTime_ms=t.median_ms,
            p20_ms=t.p20_ms,
            p80_ms=t.p80_ms,
            n_samples=len(t.seconds),
            TFLOPS=work[name][1] / (t.median_ms * 1e9) or None,
            Bandwidth_GBps=work[name][2] / (t.median_ms * 1e6) or None,
            run_id=run_id,
        )
        for name, t in timings.items()
    ]
