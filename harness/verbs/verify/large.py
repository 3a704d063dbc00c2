"""Tensors beyond 32-bit indices: a problem's batches are repeated until they are, and some of the copies are judged.

The reference is that of the small problem. The copies are made in device memory. Cases run one at a time on a machine, whatever
processes there are, since one may take most of a GPU's memory.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...backends import Backend
from ...check import budget
from ...check.contender import check_logits
from ...check.oracle import Oracle
from ...check.tensors import Bound
from ...dataset.memory import available_memory
from ...fault import UsageFault
from ...kernel import KERNELS, Kernel
from ...problem import READS, WRITES, Problem

#: The part of the free device memory that a case may take.
SHARE = 0.9
#: Elements and bytes at which a 32-bit index, signed or not, of elements of 1 to 4 bytes overflows.
EDGES = (1 << 29, 1 << 30, 1 << 31, 1 << 32)


class NoRoom(UsageFault):
    """The device has too little free memory for a case: it is left out, which is neither a pass nor a failure."""


def judge(backend: Backend, chosen: Kernel, oracle: Oracle, copies: int) -> Mapping[str, budget.Verdict]:
    """Run a kernel on the oracle's problem with its batches `copies` times over; the worst verdict of each output.

    Judged are the first copy, the last, and those at EDGES. Raises NoRoom, and as contender.run_kernel does.
    """
    problem = oracle.problem
    whole = problem.with_(batch=problem.batch * copies)
    given = oracle.inputs_of(chosen.pass_)
    check_logits(chosen, problem, given)
    with _alone(), _returned(backend):
        loaded = backend.load(chosen, whole)
        needed, free = _needed(whole, chosen.pass_, sum(w.bytes for w in loaded.plan.workspaces)), _free(backend)
        if needed > SHARE * free:
            what = f"{chosen.label} was not run on {problem.folder}, {copies} times"
            raise NoRoom(what, f"it needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free", "use a device with more memory")
        bound = Bound(backend, loaded, whole, given)
        outputs = bound.run()
        del bound
    arithmetic = chosen.arithmetic_for(problem.dtype)
    worst: dict[str, budget.Verdict] = {}
    for copy in _judged(problem, copies):
        rows = slice(copy * problem.batch, (copy + 1) * problem.batch)
        for name, verdict in oracle.judge({name: array[rows] for name, array in outputs.items()}, arithmetic).items():
            if name not in worst or (worst[name].passed and (not verdict.passed or verdict.max_abs > worst[name].max_abs)):
                worst[name] = verdict
    return worst


def _judged(problem: Problem, copies: int) -> list[int]:
    """The copies to judge: the first, the last, and those on both sides of each of EDGES, of the tensors of Q's and of K's size."""
    found = {0, copies - 1}
    for tensor in ("Q", "K"):
        batch, heads, rows, dim = problem.shape(tensor)
        for edge in EDGES:
            at = edge // (batch * heads * rows * dim)
            found |= {copy for copy in (at - 1, at, at + 1) if 0 <= copy < copies}
    return sorted(found)


def _needed(problem: Problem, pass_: str, workspaces: int) -> int:
    """Bytes of device memory: the inputs and what they are compared with, the outputs, the workspaces, and one mask of a comparison."""
    reads, writes = (sum(problem.tensor_bytes(name) for name in names[pass_]) for names in (READS, WRITES))
    return 2 * reads + writes + workspaces + (1 << 30)


def _free(backend: Backend) -> int:
    """Free bytes of the memory that the backend's tensors are in."""
    runtime = getattr(backend.xp, "cuda", None)
    return int(runtime.runtime.memGetInfo()[0]) if runtime else available_memory()


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of this machine is in here."""
    descriptor = os.open(KERNELS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _returned(backend: Backend) -> Iterator[None]:
    """Give the memory that CuPy's pool keeps back to the device, before and after: other processes need it."""
    pool = getattr(backend.xp, "get_default_memory_pool", None)
    if pool:
        pool().free_all_blocks()
    try:
        yield
    finally:
        if pool:
            pool().free_all_blocks()
