"""What enqueuing a pass costs on the host: python experiments/launch/overhead.py > experiments/launch/overhead.txt

A warm call through harness/backends/launch.py, as an operator or a ring makes it, against its parts and an empty kernel; and the
PyTorch operator against an empty one of the same signature, which allocates the same outputs. The aim on an H200 is 15 us for a kernel
of one launch, and of the operator 15 us forward and 40 us backward above the empty one. --device cpu gives the time to look up and to
pack only: there the host is the device.
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


def sample(what: str, call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """One line: the host microseconds of a call. Returns their median."""
    found = []
    for i in range(CALLS + BURST):
        began = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - began) * 1e-3)
        if i % BURST == BURST - 1:
            wait()
    fifths, median = statistics.quantiles(found[BURST:], n=5), statistics.median(found[BURST:])
    click.echo(f"{what:58}{median:8.2f}{fifths[0]:8.2f}{fifths[3]:8.2f}")
    return median


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


def empty_operator() -> Callable[..., Any]:
    """fa::forward's signature and gradient, with nothing in it: outputs are allocated and left as they are."""
    import torch

    from harness.torch_op import operator

    def gradients(ctx: Any, do: Any, _: Any) -> tuple[Any, ...]:
        made = torch.ops.fa_empty.backward.default(do, *ctx.saved_tensors, *ctx.options)
        return (*made, None, None, None, None, None, None)

    schemas = {op: str(getattr(torch.ops.fa, op).default._schema).partition("(")[2] for op in ("forward", "backward")}
    bodies = {"forward": lambda q, *_: operator._outputs(q), "backward": lambda do, q, k, v, *_: tuple(map(operator._like, (q, k, v)))}
    made = {op: torch.library.custom_op(f"fa_empty::{op}", bodies[op], mutates_args=(), schema=f"({schemas[op]}") for op in bodies}
    made["forward"].register_autograd(gradients, setup_context=operator._save)
    op: Callable[..., Any] = torch.ops.fa_empty.forward.default
    return op


def operator(name: str, dtype: str, index: int) -> None:
    """The lines of attention() by one kernel, beside the empty operator, without a gradient, with one, and backward."""
    import torch

    from harness.torch_op import attention

    with torch.cuda.device(index):
        wait, empty = torch.cuda.synchronize, torch.ops.fa_empty.forward.default
        q, k, v, do = (torch.randn(1, 1, 128, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4))
        click.echo(f"the operator: {name} {dtype}")
        for trains in (False, True):
            for tensor in (q, k, v):
                tensor.requires_grad_(trains)
            how = "forward, inputs want gradients" if trains else "forward"
            nothing = sample(f"  empty {how}", lambda t=trains: empty(q, k, v, False, None, name, True, None, t), wait)
            above = sample(f"  attention {how}", lambda: attention(q, k, v, kernel=name), wait) - nothing
            click.echo(f"{'    above the empty one':58}{above:8.2f}")
        outputs = (empty(q, k, v, False, None, name, True, None, True)[0], attention(q, k, v, kernel=name))
        found = [
            sample(f"  {what} backward", lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), wait)
            for what, o in zip(("empty", "attention"), outputs, strict=True)
        ]
        click.echo(f"{'    above the empty one':58}{found[1] - found[0]:8.2f}")


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
        empty_operator()
        for name, dtype in (("mma_qreg_async", "bfloat16"), ("fa2", "float32")):
            operator(name, dtype, int(device.partition(":")[2] or 0))


if __name__ == "__main__":
    main()
