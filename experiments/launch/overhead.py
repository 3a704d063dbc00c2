"""What enqueuing a pass costs on the host: python experiments/launch/overhead.py > experiments/launch/overhead.txt

A warm call through harness/backends/launch.py, as an operator or a ring makes it, against its parts and an empty kernel. The aim is
15 us for a kernel of one launch on an H200. --device cpu gives the time to look up and to pack only: there the host is the device.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.backends import launch
from harness.backends.launch import View
from harness.kernel.kernel import find
from harness.problem import READS, WRITES, Problem

CONTENDERS = (("fa2", "float32", "forward"), ("mma_qreg_async", "bfloat16", "forward"), ("mma_qreg_async", "bfloat16", "backward"))
EMPTY = """
extern "C" __global__ void empty() {}
struct alignas(64) Bytes { char bytes[448]; };
extern "C" __global__ void takes_448_bytes(const __grid_constant__ Bytes bytes) {}
"""
CALLS = 4000
#: Calls between two waits: the driver's queue holds about a thousand launches, and a full queue would be timed.
BURST = 100


def sample(what: str, call: Callable[[], Any], wait: Callable[[], Any]) -> None:
    """One line: the host microseconds of a call."""
    found = []
    for i in range(CALLS + BURST):
        began = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - began) * 1e-3)
        if i % BURST == BURST - 1:
            wait()
    fifths = statistics.quantiles(found[BURST:], n=5)
    click.echo(f"{what:58}{statistics.median(found[BURST:]):8.2f}{fifths[0]:8.2f}{fifths[3]:8.2f}")


def kernel(backend: backends.Backend, name: str, dtype: str, pass_: str, wait: Callable[[], Any] | None) -> None:
    """The lines of one kernel at a small shape, whose tensors all start as zero."""
    problem = Problem.of(1, 1, 128, 64, dtype=dtype)
    chosen = find(name, pass_)
    began = time.perf_counter()
    ready = launch.launcher(backend, chosen, problem)
    cold = time.perf_counter() - began
    memory = {tensor: backend.memory(problem.tensor_bytes(tensor)) for tensor in (*READS[pass_], *WRITES[pass_])}
    spaces = [backend.memory(space.bytes) for space in ready.loaded.plan.workspaces]
    for buffer in (*memory.values(), *spaces):
        buffer[:] = 0
    views = {}
    for tensor, buffer in memory.items():
        _, heads, rows, width = (*problem.shape(tensor), 1)[:4]
        views[tensor] = View(backend.address(buffer), heads * rows * width, rows * width, width)
    addresses = [backend.address(space) for space in spaces]
    steps = ready.steps(views, addresses)
    calls = sum(isinstance(step, backends.Call) for step in steps)
    title = f"{name} {dtype} {pass_}"
    click.echo(f"{title}: {calls} launches, {len(steps) - calls} memsets; cold, compiler or its cache included: {cold * 1e3:.0f} ms")
    sample("  look up the launcher by its values", lambda: launch.launcher(backend, chosen, problem), lambda: None)
    sample("  pack", lambda: ready.steps(views, addresses), lambda: None)
    if wait:
        sample("  enqueue what is packed", lambda: backend.submit(ready.loaded, steps), wait)
        sample("  call: pack and enqueue", lambda: ready(views, addresses), wait)
        sample("  look up and call", lambda: launch.launcher(backend, chosen, problem)(views, addresses), wait)


def empty(backend: backends.Backend, wait: Callable[[], Any]) -> None:
    """What an empty kernel costs by CuPy's call and by the driver's, without a parameter and with 448 bytes."""
    module = backend.xp.RawModule(code=EMPTY, backend="nvrtc")
    null, record = module.get_function("empty"), np.zeros(1, [("bytes", "u1", (448,))])
    taking, data = module.get_function("takes_448_bytes"), bytes(448)
    driver, stream = backend.xp.cuda.driver.launchKernel, backend.xp.cuda.get_current_stream().ptr
    pointer = (ctypes.c_char_p * 1)(data)
    click.echo("an empty kernel")
    sample("  CuPy's call, no parameter", lambda: null((1,), (32,), ()), wait)
    sample("  CuPy's call, a record of 448 bytes", lambda: taking((1,), (32,), (record,)), wait)
    function = null.kernel.ptr
    sample("  cuLaunchKernel, no parameter", lambda: driver(function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0), wait)
    other, at = taking.kernel.ptr, ctypes.addressof(pointer)
    sample("  cuLaunchKernel, 448 bytes", lambda: driver(other, 1, 1, 1, 32, 1, 1, 0, stream, at, 0), wait)


@click.command()
@click.option("--device", default="auto", help="auto, cuda, cuda:N, or cpu for the packing alone.")
def main(device: str) -> None:
    """Print median, 20th and 80th percentile of host microseconds a call."""
    backend = backends.pick(device)
    wait = None if backend.name == "cpu" else backend.xp.cuda.get_current_stream().synchronize
    click.echo(f"host time on {backend.device().name}, B1_H1_S128_D64{'' if wait else ': packing only'}")
    click.echo(f"{'us a call':58}{'median':>8}{'p20':>8}{'p80':>8}")
    for name, dtype, pass_ in CONTENDERS:
        kernel(backend, name, dtype, pass_, wait)
    if wait:
        empty(backend, wait)


if __name__ == "__main__":
    main()
