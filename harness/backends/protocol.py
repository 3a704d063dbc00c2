"""The protocol of the backends, the same names in each.

A backend compiles a kernel's launch plan (:class:`Loaded`), holds raw byte buffers, launches and times. What goes into the
buffers (layout, guard bands, poison) and what comes out is harness/check's, the same for every backend.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..array import ArrayModule, Bytes
from ..fault import KernelFault
from ..files import Json
from ..kernel.kernel import Device, Kernel, Plan
from ..problem import Problem


class CompileError(KernelFault):
    """A kernel did not compile. command, log and file are kept for messages and editors."""

    def __init__(self, kernel: Kernel, command: Sequence[str], log: str) -> None:
        hint = f"the command was: {shlex.join(command)}" if command else ""
        super().__init__(f"{kernel.path.name} does not compile", log.strip(), hint)
        self.command, self.log, self.file = list(command), log, kernel.path


class ContextLost(KernelFault):
    """A kernel died on the GPU: this process can run nothing more there, a fresh one can."""


@dataclass(frozen=True)
class Loaded:
    """A compiled kernel. registers and the like are per entry's maximum; None where the backend has no such thing."""

    kernel: Kernel
    plan: Plan
    functions: Mapping[str, Any]  # the backend's own: CuPy's functions by entry, or the host's library
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    log: str = ""


class Call(NamedTuple):
    """One launch ready to go, with its packed kernel parameters: fa::Args alone, or plain ones (launch.py makes both)."""

    entry: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    parameters: tuple[bytes, ...]


class Fill(NamedTuple):
    """Zero so many bytes of device memory: part of a pass, and of its time, where a kernel's workspace must start as zero."""

    address: int
    size: int


Step = Call | Fill


class Backend(Protocol):
    """What a backend offers. Buffers are uint8 arrays of `xp`; everything runs in order on one stream."""

    name: str  # "cpu" or "cuda", as --device, JSON and CSV say it
    xp: ArrayModule  # numpy or cupy
    guard_bytes: int  # poisoned memory wanted before and after each tensor

    def device(self) -> Device: ...

    def environment(self) -> Json:
        """What a record says of this backend now: device, driver, versions, and for a GPU clocks, power and throttling."""
        ...

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded: ...

    def memory(self, size: int) -> Bytes:
        """A new uint8 buffer of so many bytes, their values unspecified."""
        ...

    def get(self, buffer: Bytes) -> Bytes:
        """A numpy uint8 copy of a device buffer."""
        ...

    def address(self, buffer: Bytes) -> int: ...

    def submit(self, loaded: Loaded, steps: Sequence[Step], stream: int | None = None) -> None:
        """Enqueue the steps on a stream, given by its handle (None: the current one), and wait for nothing. What all others use."""
        ...

    def launch(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Run the steps in order and wait. Raises KernelFault for a failed launch, a deadlock, a race."""
        ...

    def enqueue(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], float]:
        """Enqueue the steps between two events. What is returned waits for them and gives device seconds from first to last."""
        ...

    def time(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """Run the steps once and return device seconds from the first to the end of the last."""
        return self.enqueue(loaded, steps)()

    def call(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """Run the steps once, wait, and return the host seconds it took to enqueue them."""
        ...

    def graph(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], Callable[[], float]] | None:
        """Capture the steps; each call of what is returned enqueues a replay, as enqueue does. None where there is no such thing."""
        ...

    def before(self, seconds: float, cold: bool) -> None:
        """Get ready for a sample: flush the L2 cache where cold, and keep the device busy for so long without waiting for it."""
        ...

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named stretch of time that a profiler's time line shows; nothing where there is no profiler."""
        return nullcontext()

    def state(self) -> Json:
        """Clocks, power, temperature and throttle reasons now (empty on a CPU)."""
        ...


def cache_dir() -> Path:
    """Where compiled things are kept between runs: $FA_CLI_CACHE_DIR, else fa-cli under $XDG_CACHE_HOME, else ~/.cache/fa-cli.

    Not created here. What lies in it is executed, so nobody else should be able to write there (`fa-cli doctor` looks).
    """
    own = os.environ.get("FA_CLI_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa-cli"
