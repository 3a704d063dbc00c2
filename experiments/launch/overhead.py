"""What enqueuing a pass costs on the host: python experiments/launch/overhead.py > experiments/launch/overhead.txt

A warm call through harness/backends/launch.py, as an operator or a ring makes it, against its parts and an empty kernel; and the
PyTorch operator against an empty one of the same signature, which allocates the same outputs. The aim on an H200 is 15 us for a kernel
of one launch, and of the operator 15 us forward and 40 us backward above the empty one. With --device cpu nothing is launched: the
Python of a call is timed, on a driver that does nothing.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.backends import attributed, launch, tensor_map
from harness.backends.launch import View
from harness.check.choose import AUTO, choose
from harness.check.contender import Contender
from harness.check.request import Request
from harness.kernel import Device, find, planner
from harness.problem import READS, WRITES, Problem

EMPTY = """
extern "C" __global__ void empty() {}
struct alignas(64) Bytes { char bytes[448]; };
extern "C" __global__ void takes_448_bytes(const __grid_constant__ Bytes bytes) {}
"""
CALLS = 4000
#: Calls between two waits: the driver's queue holds about a thousand launches, and a full queue would be timed.
BURST = 100


def flagship(device: Device) -> Contender:
    """What auto takes in bfloat16."""
    return choose(Request(AUTO, "both", Problem.of(1, 1, 128, 64, dtype="bfloat16")), device)[0][0]


def sample(what: str, call: Callable[[], Any], wait: Callable[[], Any]) -> None:
    """One line: the host microseconds of a call."""
    in_turn({what: call}, wait)


def in_turn(calls: dict[str, Callable[[], Any]], wait: Callable[[], Any]) -> None:
    """A line for each call, their bursts in turn; of two, one more: the median over pairs of neighbouring bursts of the second above the first.

    In turn because the host is not the same from second to second: a thread that wakes for autograd may take 30 us more or less.
    """
    found: dict[str, list[list[float]]] = {what: [] for what in calls}
    for _ in range(CALLS // BURST + 1):
        for what, call in calls.items():
            burst = []
            for _ in range(BURST):
                began = time.perf_counter_ns()
                call()
                burst.append((time.perf_counter_ns() - began) * 1e-3)
            wait()
            found[what].append(burst)
    for what, bursts in found.items():
        every = [each for burst in bursts[1:] for each in burst]
        fifths = statistics.quantiles(every, n=5)
        click.echo(f"{what:58}{statistics.median(every):8.2f}{fifths[0]:8.2f}{fifths[3]:8.2f}")
    if len(found) == 2:
        above = [statistics.median(b) - statistics.median(a) for a, b in zip(*found.values(), strict=True)][1:]
        fifths = statistics.quantiles(above, n=5)
        click.echo(f"{'    above the empty one':58}{statistics.median(above):8.2f}{fifths[0]:8.2f}{fifths[3]:8.2f}")


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

    def gradients(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        made = torch.ops.fa_empty.backward.default(do, *ctx.saved_tensors, *ctx.options, dlse)
        return (*made, None, None, None, None, None, None)

    schemas = {op: str(getattr(torch.ops.fa, op).default._schema).partition("(")[2] for op in ("forward", "backward")}
    bodies = {
        "forward": lambda q, k, v, *_: operator._outputs(q, v),
        "backward": lambda do, q, k, v, *_: tuple(map(operator._like, (q, k, v))),
    }
    made = {op: torch.library.custom_op(f"fa_empty::{op}", bodies[op], mutates_args=(), schema=f"({schemas[op]}") for op in bodies}
    made["forward"].register_autograd(gradients, setup_context=operator._save)
    op: Callable[..., Any] = torch.ops.fa_empty.forward.default
    return op


def operator(name: str, dtype: str, device: Any, wait: Callable[[], Any]) -> None:
    """The lines of attention() by one kernel, beside the empty operator, without a gradient, with one, and backward; then its parts."""
    import torch

    from harness.torch_op import attention

    empty = torch.ops.fa_empty.forward.default
    q, k, v, do = (torch.randn(1, 1, 128, 64, device=device, dtype=getattr(torch, dtype)) for _ in range(4))
    click.echo(f"the operator: {name} {dtype}")
    for trains in (False, True):
        for tensor in (q, k, v):
            tensor.requires_grad_(trains)
        how = "forward, inputs want gradients" if trains else "forward"
        both = {
            f"  empty {how}": lambda t=trains: empty(q, k, v, False, None, name, True, None, t),
            f"  attention {how}": lambda: attention(q, k, v, kernel=name),
        }
        in_turn(both, wait)
    outputs = {"empty": empty(q, k, v, False, None, name, True, None, True)[0], "attention": attention(q, k, v, kernel=name)}
    in_turn(
        {f"  {what} backward": lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for what, o in outputs.items()}, wait
    )
    o, lse = attention(*(t.detach() for t in (q, k, v)), kernel=name, return_lse=True)
    tensors = [t.detach() for t in (q, k, v, o, do)]
    parts("forward", name, tensors[:3], lse, wait)
    parts("backward", name, tensors, lse, wait)


def parts(pass_: str, name: str, given: list[Any], lse: Any, wait: Callable[[], Any]) -> None:
    """What a call of the operator is made of, each part alone, and all of it between torch's dispatcher and the driver."""
    import torch

    from harness.torch_op import call, operator

    q, k, v = given[:3]
    options = (False, None, name, True, None)
    key = (name, call.edited(name), *operator._kind(q, k, v, *given[3:]), False, None, None, True, pass_ == "backward", False)
    ready = call.ready(pass_, *key)
    assert ready is not None and ready.fixed is not None
    forward = pass_ == "forward"
    made = (operator._like(q),) if forward else tuple(map(operator._like, (q, k, v)))
    addresses = [t.data_ptr() for t in (*given, *made, lse)]
    stream = None if ready.index is None else torch.cuda.current_stream(ready.index).cuda_stream
    starts, _held = ready.workspaces(stream, ready.allocator())
    fixed = addresses + starts
    click.echo(f"  parts, {pass_}")
    sample("    shapes, strides and the rest of the key", lambda: operator._kind(q, k, v, *given[3:]), wait)
    sample("    the key to what is kept", lambda: call.ready(pass_, *key), wait)
    sample("    outputs", lambda: [ready.allocator()(*each) for each in ready.made], wait)
    sample("    addresses", lambda: [t.data_ptr() for t in (*given, *made, lse)], wait)
    if ready.spaces:
        sample("    workspaces", lambda: ready.workspaces(stream, ready.allocator()), wait)
    sample("    write addresses and enqueue", lambda: ready.fixed(fixed, stream), wait)
    body, begin = (operator._forward, given) if forward else (operator._backward, [given[4], *given[:4], lse])
    op = torch.ops.fa.forward.default if forward else torch.ops.fa.backward.default
    last = (False,) if forward else ()
    sample("    all of it", lambda: body(*begin, *options, *last), wait)
    same = call.alike(*begin)
    assert same is not None
    sample("    whether tensors are like a call's before", lambda: same(*begin) and not operator._listened(), wait)
    with torch.no_grad():
        sample("    all of it by torch's dispatcher", lambda: op(*begin, *options, *last), wait)


def unlaunched() -> backends.Backend:
    """The CUDA backend on a driver that does nothing, so that the Python of a call is timed without a GPU."""
    from harness.backends.cuda import Cuda

    class Unlaunched(Cuda):
        def __init__(self) -> None:
            self._index, self._thread, nothing = 0, threading.local(), "".format  # a C function of any arguments
            runtime = SimpleNamespace(getDevice=int, memsetAsync=nothing, memGetInfo=nothing)
            null = SimpleNamespace(ptr=0)
            self.xp = SimpleNamespace(
                cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=nothing), runtime=runtime, get_current_stream=lambda: null)
            )
            self._device = Device("cuda", "no GPU", "sm_90", 132, 50 << 20, 232448)

        def current(self) -> Any:
            return nullcontext()

        def memory(self, size: int) -> Any:
            return np.zeros(size, np.uint8)

        def repeated(self, *given: Any) -> Any:
            enqueue = super().repeated(*given)
            self._thread.has_context = True
            return lambda stream: enqueue(0)  # a GPU's tensors have a stream

        fill = backends.Backend.fill

        def get(self, buffer: Any) -> Any:
            return buffer

        def address(self, buffer: Any) -> int:
            return int(buffer.ctypes.data)

        def load(self, kernel: Any, problem: Any, overrides: Any = None) -> Any:
            functions = {entry: SimpleNamespace(kernel=SimpleNamespace(ptr=0)) for entry in kernel.entries}
            return backends.Loaded(kernel, planner.plan(kernel, problem, self._device, overrides), functions)

    return Unlaunched()


@click.command()
@click.option("--device", default="auto", help="auto, cuda, cuda:N, or cpu for the Python alone.")
def main(device: str) -> None:
    """Print median, 20th and 80th percentile of host microseconds a call."""
    backend = backends.pick(device)
    wait = None if backend.name == "cpu" else backend.xp.cuda.get_current_stream().synchronize
    click.echo(f"host time on {backend.device().name}, B1_H1_S128_D64{'' if wait else ': nothing is launched'}")
    click.echo(f"{'us a call':58}{'median':>8}{'p20':>8}{'p80':>8}")
    highest = flagship(backend.device())
    kernel(backend, "fa2", "float32", "forward", wait)
    for pass_, chosen in highest.kernels.items():
        kernel(backend, chosen.name, "bfloat16", pass_, wait)
    if wait:
        empty(backend, wait)
    import torch

    from harness.torch_op import call

    if not wait:
        tensor_map._driver = lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0, cuTensorMapReplaceAddress=lambda *_: 0)
        answers_0 = ctypes.CDLL("libm.so.6").fegetround
        attributed._driver = lambda: answers_0
        made = unlaunched()
        call.backend_of = lambda device: made
    empty_operator()
    with torch.cuda.device(int(device.partition(":")[2] or 0)) if wait else nullcontext():
        for name, dtype in ((highest.name, "bfloat16"), ("fa2", "float32")):
            operator(name, dtype, "cuda" if wait else "cpu", torch.cuda.synchronize if wait else lambda: None)


if __name__ == "__main__":
    main()
