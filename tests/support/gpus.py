"""A stand-in for the GPUs of a host: streams of several processes, which go on in any order that CUDA allows, and memory that is mapped.

A stream that is slow for a while lets the others run ahead. tests/ring/test_peer.py uses it in the place of CuPy and of the driver.
"""

from __future__ import annotations

import ctypes
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DEVICE, MAPPED = 1 << 60, 1 << 48  # addresses of the device; what rank r maps is r * MAPPED further up
Op = Callable[[set[Any]], object]  # given the events that have happened; False: it waits, and is tried again


class Deadlock(AssertionError):
    """No stream can go on."""


class Stream:
    """A queue of operations. happened: the events that it sees, of a graph its own."""

    machine: Machine

    def __init__(self, non_blocking: bool = True, priority: int = 0, happened: set[Any] | None = None) -> None:
        self.rank, self.queue = self.machine.rank, deque[Op]()
        self.happened = self.machine.happened if happened is None else happened
        self.machine.streams.append(self)
        self.ptr = len(self.machine.streams)

    def add(self, op: Op) -> None:
        captured = self.machine.captured.get(self.rank)
        (self.queue if captured is None else captured.setdefault(self, [])).append(op)

    def wait_event(self, event: Event) -> None:
        self.add(lambda happened: event in happened)

    def step(self) -> bool:
        """Whether it went on."""
        if self.queue[0](self.happened) is False:
            return False
        self.queue.popleft()
        return True

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
        """A graph: its streams begin when it is launched, and the launch ends with them."""
        held = self.machine.captured.pop(self.rank)

        def launch(stream: Stream) -> None:
            made: list[Stream] = []

            def begin(_: set[Any]) -> None:
                happened: set[Any] = set()
                for ops in held.values():
                    made.append(self.machine.stream(happened=happened))
                    made[-1].queue.extend(ops)

            stream.add(begin)
            stream.add(lambda _: not any(each.queue for each in made))

        return types.SimpleNamespace(launch=launch)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """done: recorded, in a graph or outside."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        def record(happened: set[Any]) -> None:
            happened.add(self)
            self.done = True

        stream.add(record)


class Machine:
    """The GPUs of a host, as CuPy's runtime and as the driver. order: in which the streams go on."""

    memcpyDefault, cudaIpcMemLazyEnablePeerAccess, cudaDevAttrCanFlushRemoteWrites = 4, 1, 98

    def __init__(self, order: random.Random) -> None:
        self.order, self.lock, self.here = order, threading.RLock(), threading.local()
        self.streams: list[Stream] = []
        self.slow: Stream | None = None  # goes on where no other can, for a while
        self.happened: set[Any] = set()
        self.captured: dict[int, dict[Stream, list[Op]]] = {}
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.maps: set[tuple[int, int]] = set()  # rank, allocation
        self.wrong_maps = 0  # bytes by which a mapping is wrong
        self.stream: type[Stream] = type("Stream", (Stream,), {"machine": self})
        self.cupy: Any = types.ModuleType("cupy")
        self.cupy.cuda = types.SimpleNamespace(Stream=self.stream, Event=Event, runtime=self)

    @property
    def rank(self) -> int:
        return int(getattr(self.here, "rank", 0))

    # -- the streams --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One stream goes on; False where all wait."""
        if self.order.random() < 0.02:
            self.slow = self.order.choice(self.streams)
        able = [each for each in self.streams if each.queue]
        self.order.shuffle(able)
        if self.order.random() < 0.95:
            able.sort(key=lambda each: each is self.slow)
        return any(each.step() for each in able)

    def run(self) -> None:
        while any(each.queue for each in self.streams):
            if not self.step():
                raise Deadlock

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        def copy(part: slice) -> None:
            self.bytes(to, size)[part] = self.bytes(source, size)[part]

        for part in (slice(0, size // 2), slice(size // 2, size)):
            self.streams[stream - 1].add(lambda _, part=part: copy(part))

    def memcpy2DAsync(self, to: int, to_step: int, source: int, step: int, width: int, rows: int, kind: int, stream: int) -> None:
        for row in range(rows):
            self.memcpyAsync(to + row * to_step, source + row * step, width, kind, stream)

    def prepared(self, operations: Sequence[tuple[int, int, int, int]]) -> Callable[[int], None]:
        def enqueue(stream: int) -> None:
            for kind, *about in operations:  # a wait for an equal value, a write: this device flushes no remote writes
                if about[2] != (1 if kind == 1 else 0):
                    raise RuntimeError("cuStreamBatchMemOp_v2: error 1 of the CUDA driver")
                (self.wait if kind == 1 else self.write)(stream, *about)

        return enqueue

    def write(self, stream: int, address: int, value: int, flags: int) -> None:
        self.streams[stream - 1].add(lambda _: self.bytes(address, 4).view(np.uint32).fill(value))

    def wait(self, stream: int, address: int, value: int, flags: int) -> None:
        assert address < DEVICE + MAPPED, "it polls another GPU"
        self.streams[stream - 1].add(lambda _: bool(self.bytes(address, 4).view(np.uint32)[0] == value))

    # -- memory -------------------------------------------------------------------------------------------------------

    def bytes(self, address: int, size: int) -> np.ndarray[Any, Any]:
        whose, at = divmod(address - DEVICE, MAPPED)
        base = self.base(DEVICE + at) - DEVICE
        assert whose == 0 or (whose - 1, base) in self.maps, "not mapped any more"
        assert at + size <= base + len(self.memory[base])
        return self.memory[base][at - base : at - base + size]

    def base(self, address: int) -> int:
        return DEVICE + max(each for each in self.memory if each <= address - DEVICE)

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
        """Between host and device."""
        with self.lock:
            host = np.frombuffer((ctypes.c_uint8 * size).from_address(min(to, source)), np.uint8)
            onto, what = (self.bytes(to, size), host) if to >= DEVICE else (host, self.bytes(source, size))
            onto[:] = what

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

    # -- devices ------------------------------------------------------------------------------------------------------

    deviceGetPCIBusId, deviceGetByPCIBusId = staticmethod(str), staticmethod(int)

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
        return Array(self.data.ptr, part.stop)


class Together:
    """Controls of ranks that are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found


def on_all(machine: Machine, ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What work(rank) returns on each rank, a thread each; the first exception that one raises."""
    found: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        machine.here.rank = rank
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found
