"""A stand-in for the GPUs of a host: streams of several processes, which go on in any order that CUDA allows, and memory that is mapped.

A write of a copy is seen by other streams at some time before the next fence of its own stream. A wait polls. A stream that is slow for
a while lets the others run ahead. tests/ring/test_peer.py uses it in the place of CuPy and of the driver.
"""

from __future__ import annotations

import ctypes
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

DEVICE, MAPPED = 1 << 60, 1 << 48  # addresses of the device; what rank r maps is r * MAPPED further up
Op = Callable[[set[Any]], Iterator[bool]]  # goes on at every next(); False: it waits


class Deadlock(AssertionError):
    """No stream can go on."""


class Stream:
    """A queue of operations, and writes that others do not see yet."""

    machine: Machine

    def __init__(self, non_blocking: bool = True, priority: int = 0, happened: set[Any] | None = None) -> None:
        self.rank, self.queue, self.unseen, self.happened = self.machine.rank, deque[Op](), list[Callable[[], None]](), happened
        self.running: Iterator[bool] | None = None
        self.machine.streams.append(self)
        self.ptr = len(self.machine.streams)

    def add(self, op: Op) -> None:
        captured = self.machine.captured.get(self.rank)
        (self.queue if captured is None else captured.setdefault(self, [])).append(op)

    def wait_event(self, event: Event) -> None:
        def wait(happened: set[Any]) -> Iterator[bool]:
            while event not in happened:
                yield False

        self.add(wait)

    def step(self) -> bool:
        """Whether it went on."""
        self.running = self.running or self.queue[0](self.machine.happened if self.happened is None else self.happened)
        on = next(self.running, None)
        if on is None:
            self.queue.popleft()
            self.running = None
        return on is not False

    def see(self) -> None:
        """A fence."""
        for write in self.unseen:
            write()
        self.unseen.clear()

    @property
    def done(self) -> bool:
        with self.machine.lock:
            for _ in range(50):
                self.machine.step()
        return not self.queue

    def synchronize(self) -> None:
        while not self.done:
            pass

    def begin_capture(self) -> None:
        self.machine.captured[self.rank] = {}

    def end_capture(self) -> Any:
        held = self.machine.captured.pop(self.rank)
        return types.SimpleNamespace(launch=lambda stream: stream.add(lambda _: self.machine.graph(held)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    done = False

    def record(self, stream: Stream) -> None:
        def record(happened: set[Any]) -> Iterator[bool]:
            happened.add(self)
            self.done = True
            yield True

        stream.add(record)


class Machine:
    """The GPUs of a host. order: in which the streams go on."""

    def __init__(self, order: random.Random) -> None:
        self.order, self.lock, self.here = order, threading.RLock(), threading.local()
        self.streams: list[Stream] = []
        self.slow: Stream | None = None  # goes on where no other can, for a while
        self.happened: set[Any] = set()
        self.captured: dict[int, dict[Stream, list[Op]]] = {}
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.maps: set[tuple[int, int]] = set()  # rank, allocation
        self.wrong_maps = 0  # bytes by which a mapping is wrong
        cuda = types.ModuleType("cupy.cuda")
        cuda.Stream, cuda.Event = type("Stream", (Stream,), {"machine": self}), Event  # type: ignore[attr-defined]
        self.stream: type[Stream] = cuda.Stream  # type: ignore[attr-defined]
        cuda.runtime = self.runtime = self  # type: ignore[attr-defined]
        self.cupy: Any = types.ModuleType("cupy")
        self.cupy.cuda = cuda

    memcpyDefault, cudaIpcMemLazyEnablePeerAccess, cudaDevAttrCanFlushRemoteWrites = 4, 1, 98

    @property
    def rank(self) -> int:
        return int(getattr(self.here, "rank", 0))

    # -- the streams --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One stream goes on, or a write is seen; False where all wait."""
        if (unseen := [each for each in self.streams if each.unseen]) and self.order.random() < 0.2:
            stream = self.order.choice(unseen)
            stream.unseen.pop(self.order.randrange(len(stream.unseen)))()
            return True
        if self.order.random() < 0.02:
            self.slow = self.order.choice(self.streams)
        able = [each for each in self.streams if each.queue]
        self.order.shuffle(able)
        if self.order.random() < 0.95:
            able.sort(key=lambda each: each is self.slow)
        return any(each.step() for each in able) or any(each.unseen for each in self.streams)

    def run(self) -> None:
        while any(each.queue for each in self.streams):
            if not self.step():
                raise Deadlock

    def graph(self, held: dict[Stream, list[Op]]) -> Iterator[bool]:
        happened: set[Any] = set()
        made = []
        for ops in held.values():
            made.append(self.stream(happened=happened))
            made[-1].queue.extend(ops)
        yield True
        while any(each.queue for each in made):
            yield False
        for each in (*made, *held):
            each.see()

    # -- the driver and the runtime -----------------------------------------------------------------------------------

    def bytes(self, address: int, size: int) -> np.ndarray[Any, Any]:
        whose, at = divmod(address - DEVICE, MAPPED)
        base = max(each for each in self.memory if each <= at)
        assert whose == 0 or (whose - 1, base) in self.maps, "not mapped any more"
        assert at + size <= base + len(self.memory[base])
        return self.memory[base][at - base : at - base + size]

    def malloc(self, size: int) -> int:
        with self.lock:
            base = max((at + len(held) for at, held in self.memory.items()), default=0) + 4096
            self.memory[base] = np.full(min(size, 1 << 14), 0xFF, np.uint8)  # of a page its beginning
        return DEVICE + base

    def free(self, address: int) -> None:
        assert all(base != address - DEVICE for _, base in self.maps), "another rank has it mapped"
        del self.memory[address - DEVICE]

    def memset(self, address: int, value: int, size: int) -> None:
        self.bytes(address, 1 << 14)[:] = value

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self.memset(address, value, size)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        with self.lock:
            host = (ctypes.c_uint8 * size).from_address(min(to, source))
            if to >= DEVICE:
                self.bytes(to, size)[:] = np.frombuffer(host, np.uint8)
            else:
                np.frombuffer(host, np.uint8)[:] = self.bytes(source, size)

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        def copy(_: set[Any]) -> Iterator[bool]:
            for part in (slice(0, size // 2), slice(size // 2, size)):
                data = self.bytes(source, size)[part].copy()
                self.streams[stream - 1].unseen.append(lambda data=data, part=part: np.copyto(self.bytes(to, size)[part], data))
                yield True

        self.streams[stream - 1].add(copy)

    def prepared(self, operations: Sequence[tuple[int, int, int, int]]) -> Callable[[int], None]:
        def enqueue(stream: int) -> None:
            for kind, *about in operations:  # a wait for an equal value, a write: this device flushes no remote writes
                if about[2] != (1 if kind == 1 else 0):
                    raise RuntimeError("cuStreamBatchMemOp_v2: error 1 of the CUDA driver")
                (self.wait if kind == 1 else self.write)(stream, *about)

        return enqueue

    def write(self, stream: int, address: int, value: int, flags: int) -> None:
        def write(_: set[Any]) -> Iterator[bool]:
            self.streams[stream - 1].see()
            self.bytes(address, 4).view(np.uint32)[0] = value
            yield True

        self.streams[stream - 1].add(write)

    def wait(self, stream: int, address: int, value: int, flags: int) -> None:
        assert address < DEVICE + MAPPED, "it polls another GPU"

        def wait(_: set[Any]) -> Iterator[bool]:
            while self.bytes(address, 4).view(np.uint32)[0] != value:
                yield False

        self.streams[stream - 1].add(wait)

    def base(self, address: int) -> int:
        return DEVICE + max(each for each in self.memory if each <= address - DEVICE)

    def ipcGetMemHandle(self, address: int) -> Any:
        assert address - DEVICE in self.memory
        return np.int64(address - DEVICE).tobytes()

    def ipcOpenMemHandle(self, handle: Any, flags: int) -> int:
        base = int(np.frombuffer(handle, np.int64)[0])
        assert (self.rank, base) not in self.maps, "mapped twice"
        self.maps.add((self.rank, base))
        return DEVICE + (self.rank + 1) * MAPPED + base + self.wrong_maps

    def ipcCloseMemHandle(self, address: int) -> None:
        self.maps.remove((self.rank, (address - DEVICE) % MAPPED))

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"bus {device}"

    def deviceGetByPCIBusId(self, name: str) -> int:
        return int(name.split()[1])

    def deviceCanAccessPeer(self, own: int, other: int) -> bool:
        return True

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return 0

    def deviceSynchronize(self) -> None:
        pass

    def getDevice(self) -> int:
        return self.rank


class Array:
    """A uint8 array of the device."""

    def __init__(self, address: int, size: int) -> None:
        self.data, self.size, self.nbytes = types.SimpleNamespace(ptr=address), size, np.int64(size)

    def __getitem__(self, part: slice) -> Array:
        return Array(self.data.ptr + (part.start or 0), part.stop - (part.start or 0))


class Together:
    """Controls of ranks that are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier

    def gather(self, value: Any, patience: float = 1) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found

    def close(self, failed: bool = False) -> None:
        pass
