"""The protocol of the backends.

A backend compiles a kernel's launch plan (:class:`Loaded`), allocates byte buffers, launches and times. The buffers' layout, guard bands
and poison are harness/check's, the same for every backend.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..array import ArrayModule, Bytes
from ..fault import EnvironmentFault, KernelFault, clipped
from ..files import Json
from ..kernel import Device, Kernel, Plan
from ..kernel.plan import TensorMap
from ..problem import Problem
from .instead import defined_again, instead


class CompileError(KernelFault):
    """A kernel did not compile. Its attributes are the compiler's command, its log and the kernel's file. hint: more than is known of the
    log."""

    def __init__(self, kernel: Kernel, command: Sequence[str], log: str, hint: str = "") -> None:
        hints = [hint, defined_again(kernel), instead(log)]
        super().__init__(f"{kernel.path.name} does not compile", clipped(log.strip(), 8000), "; ".join(filter(None, hints)))
        self.more = f"the compiler's command: {shlex.join(command)}" if command else ""
        self.command, self.log, self.file = list(command), log, kernel.path


class ContextLost(KernelFault):
    """A kernel destroyed the CUDA context: this process can run nothing more on the GPU, a new process can."""


@dataclass(frozen=True)
class Loaded:
    """A compiled kernel.

    registers, spill_bytes, stack_bytes (local memory: spills and arrays): per thread; shared_bytes: per block. Each is the maximum over the entries,
    None where the backend does not know it.
    """

    kernel: Kernel
    plan: Plan
    functions: Mapping[str, Any]  # the backend's own: CuPy's functions by entry, or the host's library
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    log: str = ""
    stack_bytes: int | None = None


class Call(NamedTuple):
    """One launch: grid and cluster in blocks, block in threads, dynamic shared memory in bytes, packed parameters (launch.py packs them).

    The parameters of a repeated call are read anew each time, and their owner may write them in between. A GPU knows the cluster from the
    entry's __cluster_dims__. overlaps: it may begin before the step before it has ended, and waits for it itself (fa/overlap.cuh).
    cooperative: all its blocks run at once (fa/grid.cuh).
    """

    entry: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    parameters: tuple[bytes | memoryview, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    overlaps: bool = False
    cooperative: bool = False


class Fill(NamedTuple):
    """Zero `size` bytes of device memory: part of a pass, and of its time, for a workspace of init "zero"."""

    address: int
    size: int


Step = Call | Fill


class Backend(Protocol):
    """What a backend offers. Buffers are uint8 arrays of `xp`; all work runs in order on one stream."""

    name: str  # "cpu" or "cuda", as --device, JSON and CSV say it
    xp: ArrayModule  # numpy or cupy
    guard_bytes: int  # of a guard band, before and after each tensor

    def device(self) -> Device:
        """The device as launch plans need it."""
        ...

    def environment(self) -> Json:
        """For records: device, driver, versions, and for a GPU its clocks, power and throttling now."""
        ...

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile a kernel for a problem, or take it from the cache. overrides: tile values.

        Raises UsageFault where the header refuses the problem or the device, CompileError with the compiler's log.
        """
        ...

    def fresh(self, loaded: Loaded) -> AbstractContextManager[Loaded]:
        """The same kernel loaded once more: module globals are as they are before a first launch."""
        ...

    def memory(self, size: int) -> Bytes:
        """A new buffer of `size` bytes of unspecified values. Raises UsageFault or MemoryError where there is no room."""
        ...

    def freeze(self, buffer: Bytes, frozen: bool) -> None:
        """Make a buffer that `memory` gave read-only, or writable again, where the backend can: a write is then a fault of the launch."""
        return

    @contextmanager
    def in_schedule(self, number: int) -> Iterator[None]:
        """Launches in it run in the number-th schedule behind the backend's own. A GPU has one, its own."""
        yield

    def threads(self) -> int:
        """The OS threads of this process that are not the backend's own: more of them after a launch than before were left by a kernel."""
        return 0

    def watched(self) -> int | None:
        """What --check has watched in all launches so far; None without a check."""
        return None

    def fill(self, buffer: Bytes, value: int) -> None:
        """Enqueue a write of one value to all bytes of a device buffer, or of a part of one."""
        buffer[:] = value

    def get(self, buffer: Bytes) -> Bytes:
        """A numpy uint8 copy of a device buffer."""
        ...

    def address(self, buffer: Bytes) -> int:
        """The address of a device buffer's first byte."""
        ...

    def tensor_map(self, map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
        """The 128 bytes of fa::TensorMap for a tensor's address and byte strides. Raises KernelFault for what TMA cannot address."""
        ...

    def movable_map(self, map_: TensorMap, strides: tuple[int, ...]) -> tuple[memoryview, Callable[[int], None]]:
        """Memory for the fa::TensorMap of tensors of these byte strides, and a function that writes it for an address.

        The function raises as tensor_map does, and the memory then holds no map.
        """
        room = memoryview(bytearray(128))

        def move(address: int) -> None:
            room[:] = self.tensor_map(map_, address, strides)

        return room, move

    def submit(self, loaded: Loaded, steps: Sequence[Step], stream: int | None = None) -> None:
        """Enqueue the steps on a stream, given by its handle (None: the current one), without waiting. All others use it."""
        ...

    def repeated(
        self, loaded: Loaded, words: memoryview, fills: Sequence[tuple[int, int]], calls: Sequence[Call]
    ) -> Callable[[int | None], None]:
        """A function of a stream that enqueues as submit does, with what the parameters of calls, writable memory, hold by then.

        fills: what is zeroed first, as the index in words of its address, and its bytes.
        """
        return lambda stream: self.submit(loaded, [*(Fill(words[at], size) for at, size in fills), *calls], stream)

    def context(self) -> int:
        """The handle of the CUDA context, in which the entries' handles may be launched by others; 0 where there is none."""
        return 0

    def handle(self, loaded: Loaded, call: Call) -> tuple[int, int]:
        """The driver's handle of a call's entry, and the attribute with which cuLaunchKernelEx must enqueue it; 0: cuLaunchKernel does."""
        return 0, 0

    def launch(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Run the steps in order and wait. Raises KernelFault for a failed launch, a deadlock, a race; ContextLost on a GPU."""
        ...

    def enqueue(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], float]:
        """Enqueue the steps between two events. The function returned waits for them and gives the device seconds between the events."""
        ...

    def time(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """Run the steps once and return their device seconds."""
        return self.enqueue(loaded, steps)()

    def call(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """Run the steps once, wait, and return the host seconds it took to enqueue them."""
        ...

    def graph(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], Callable[[], float]] | None:
        """Capture the steps as a graph. The function returned enqueues a replay, as enqueue does. None where there are no graphs."""
        ...

    def before(self, seconds: float, cold: bool) -> None:
        """Before a sample: flush the L2 cache where cold, and keep the device busy for `seconds` without waiting for it."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Makes the device the current one of this thread, where there are several."""
        return nullcontext()

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named range on a profiler's time line; nothing where there is no profiler."""
        return nullcontext()

    def told(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], address: int, size: int) -> None:
        """Which tensor or workspace lies at an address, with its strides in bytes, for the messages of a check that has addresses only."""
        return

    def state(self) -> Json:
        """Clocks, power, temperature and throttle reasons now (empty on a CPU)."""
        ...

    def meter(self) -> tuple[int, int] | None:
        """Millijoules that the device has taken so far, by a counter that only grows, and its SM clock in MHz; None: not known."""
        return None


def cache_dir() -> Path:
    """The folder of compiled kernels: $FA_CLI_CACHE_DIR, else fa-cli under $XDG_CACHE_HOME, else ~/.cache/fa-cli.

    It is not created here. Its files are executed, so other users must not be able to write there (`fa-cli doctor` checks).
    """
    own = os.environ.get("FA_CLI_CACHE_DIR")
    if own:
        return Path(own)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "fa-cli"
    try:
        return Path.home() / ".cache" / "fa-cli"
    except RuntimeError:  # no HOME, and the user has no entry in passwd, as in a container
        raise EnvironmentFault(
            "no folder for compiled kernels", "this user has no home folder", "set FA_CLI_CACHE_DIR to a folder"
        ) from None
