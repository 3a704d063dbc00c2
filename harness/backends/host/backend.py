"""The CPU engine: the same .cu files through a C++ compiler, each CUDA thread a fiber (kernels_cu/host/engine.cpp).

It shows that a kernel is correct and has the barriers that it needs. Its times are CPU times and say nothing about a GPU. Kernels are
compiled by build.py.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import math
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...array import ArrayModule, Bytes
from ...fault import UsageFault
from ...files import Json
from ...kernel import Device, Kernel, planner
from ...kernel.plan import TensorMap
from ...problem import Problem
from .. import tensor_map
from ..launch import ARGS
from ..protocol import Backend, Call, Fill, Loaded, Step
from . import cache
from .build import Library, compiler, engine, library_of
from .machine import fenced, processor, protect, threads
from .report import ASAN_CHILD, child_with_asan, failure, lines_of, named, with_folders
from .source import GUARD

CHECKS = ("race", "asan")


class _Held(ctypes.Structure):
    """fa_host::Held of engine.hpp."""

    _fields_ = [("to", ctypes.c_void_p), ("from_", ctypes.c_void_p), ("bytes", ctypes.c_ulonglong)]


class _Watch(ctypes.Structure):
    """fa_host::Watch of engine.hpp."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("writes", ctypes.c_void_p),
        ("others", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("strides", ctypes.c_longlong * 4),
        ("rank", ctypes.c_int),
        ("generation", ctypes.c_uint),
    ]


class _Launch(ctypes.Structure):
    """fa_host::Launch of engine.hpp."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("static_shared", ctypes.c_void_p),
        ("static_offset", ctypes.c_longlong),
        ("static_bytes", ctypes.c_longlong),
        ("static_guard", ctypes.c_longlong),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_uint),
        ("checks", ctypes.c_uint),
        ("seed", ctypes.c_ulonglong),
        ("workers", ctypes.c_int),
        ("report", ctypes.c_char_p),
        ("report_bytes", ctypes.c_int),
        ("held", ctypes.POINTER(_Held)),
        ("held_count", ctypes.c_int),
        ("watch", ctypes.POINTER(ctypes.POINTER(_Watch))),
        ("watch_count", ctypes.c_int),
        ("interleaves", ctypes.c_bool),
        ("ordered_adds", ctypes.c_bool),
        ("watched", ctypes.POINTER(ctypes.c_ulonglong)),
        ("traffic", ctypes.c_void_p),
        ("traffic_places", ctypes.POINTER(ctypes.c_int)),
        ("traffic_lost", ctypes.POINTER(ctypes.c_ulonglong)),
        ("span", ctypes.c_void_p),
        ("spans", ctypes.c_int),
        ("cooperative", ctypes.c_bool),
    ]


class _Traffic(ctypes.Structure):
    """fa_host::Traffic of engine.hpp."""

    _fields_ = [
        ("code", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("accesses", ctypes.c_ulonglong),
        ("parts", ctypes.c_ulonglong),
        ("ideal", ctypes.c_ulonglong),
    ]


class _Span(ctypes.Structure):
    """fa_host::Span of engine.hpp."""

    _fields_ = [("start", ctypes.c_void_p), ("bytes", ctypes.c_ulonglong)]


#: max_places and Kind of engine.hpp.
_PLACES = 4096
_KINDS = ("shared", "load", "store")


class Traffic(NamedTuple):
    """What a line of a launch does with shared or global memory.

    kind "shared": accesses of warps, the wavefronts that they take (parts), and would take without bank conflicts (ideal); "load" and
    "store": requests of warps to global memory, the sectors of 32 bytes that they touch, and the fewest that would hold their bytes.
    """

    entry: str
    place: str  # FILE:LINE
    kind: str
    accesses: int
    parts: int
    ideal: int


class Host(Backend):
    """Runs kernels on the CPU. seed: 0 runs threads in index order, else in a random order drawn from it.

    check: None, "race" (accesses to shared memory, outputs, workspaces and module globals that nothing orders) or "asan" (out-of-bounds;
    only in the child process that :func:`run_under_asan` starts). debug: not optimised, for a debugger, and blocks one after another on
    the launching thread.
    sms: the number of multiprocessors in plans, None: an H200's 132. banks: count traffic (kernels_cu/host/banks.hpp).
    Raises EnvironmentFault where there is no C++ compiler.
    """

    name = "cpu"
    xp: ArrayModule = np

    def __init__(
        self, seed: int | None = None, check: str | None = None, debug: bool = False, sms: int | None = None, banks: bool = False
    ) -> None:
        if check not in (None, *CHECKS):
            raise UsageFault(f"unknown check {check!r}", f"known: {', '.join(CHECKS)}", "use --check race")
        if check == "asan" and not os.environ.get(ASAN_CHILD):
            raise UsageFault(
                "the asan check needs a process of its own", "AddressSanitizer must be loaded first", "fa-cli run --check asan"
            )
        self.seed, self.check, self.debug = seed or 0, check, debug
        self._sms = sms or Device.sms
        self.workers = 1 if debug else threads()
        self._watched = ctypes.c_ulonglong(0)
        self._banks = banks
        #: For the race check, by address: what a kernel may write, with shadow memory; and the buffers that are read-only.
        self._memory: dict[int, tuple[_Watch, Bytes]] = {}
        self._frozen: dict[int, int] = {}
        self._globals: weakref.WeakKeyDictionary[Library, list[tuple[_Watch, Bytes]]] = weakref.WeakKeyDictionary()
        #: What launches have done with memory, an item for each of their places and kinds; accesses of threads that found no room in the count.
        self.traffic: list[Traffic] = []
        self._spans: dict[int, int] = {}  # of device memory: address -> bytes
        self.uncounted = 0
        #: Bytes of a guard band (harness/check/tensors.py); AddressSanitizer has its own.
        self.guard_bytes = 0 if check == "asan" else 4096
        compiler()

    def device(self) -> Device:
        """The processor, with the architecture and sizes of an H200, whose launch plans it follows."""
        return Device("cpu", processor(), "sm_90", self._sms, 50 << 20, 232448)

    def environment(self) -> Json:
        """Processor, compiler and threads."""
        version = subprocess.run(
            [*compiler(), "--version"], capture_output=True, text=True, errors="replace", check=False
        ).stdout.partition("\n")[0]
        return {"device": self.name, "device_name": processor(), "compiler": version, "threads": self.workers, "schedule_seed": self.seed}

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile (or fetch from the cache) a kernel for a problem. Raises CompileError with file and line."""
        kernel = planner.variant(kernel, problem)
        plan = planner.plan(kernel, problem, self.device(), overrides)
        crowded = next(
            (c for c in plan.launches if self.check == "race" and math.prod(c.cluster) > 1 and math.prod(c.cluster) * c.block > 1024), None
        )
        if crowded:
            why = f"{crowded.entry} has clusters of {math.prod(crowded.cluster)} blocks of {crowded.block} threads; it keeps 1024 clocks"
            raise UsageFault(f"{kernel.label} is too large for the race check", why, "use smaller blocks (--tile), or no --check race")
        library = library_of(kernel, plan, "debug" if self.debug else "banks" if self._banks else self.check)
        shared = max(c.shared + library.static_of[c.entry] for c in plan.launches)
        return Loaded(kernel, plan, {"library": library}, shared_bytes=shared)

    @contextlib.contextmanager
    def fresh(self, loaded: Loaded) -> Iterator[Loaded]:
        """A copy of the library, closed at the end."""
        library: Library = loaded.functions["library"]
        opened = cache.copied(cache.Opened(library.path, library.dll, library.descriptor))
        try:
            yield replace(loaded, functions={"library": Library(opened, loaded.kernel)})
        finally:
            _ctypes.dlclose(opened.dll._handle)
            os.close(opened.descriptor)

    def memory(self, size: int) -> Bytes:
        """Memory between inaccessible pages (machine.fenced); for AddressSanitizer an array on the heap, which it guards itself."""
        if not self.guard_bytes:
            return np.empty(size, np.uint8)
        buffer = fenced(size)
        if self.check == "race":
            weakref.finalize(buffer, _forget, self._memory, self._frozen, self.address(buffer), size)
        if self._banks:
            self._spans[self.address(buffer)] = size
            weakref.finalize(buffer, self._spans.pop, self.address(buffer), None)
        return buffer

    def freeze(self, buffer: Bytes, frozen: bool) -> None:
        """Make a buffer's pages read-only, or writable again; nothing for AddressSanitizer, whose memory is the heap's."""
        if self.guard_bytes:
            protect(buffer, frozen)
            self._frozen.pop(self.address(buffer), None)
            if frozen:
                self._frozen[self.address(buffer)] = buffer.size

    def told(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], address: int, size: int) -> None:
        """For AddressSanitizer a line on stderr, which the parent process reads (report.child_with_asan); for the race check shadow memory."""
        if self.check == "asan":
            sys.stderr.write(named(name, shape, address, size))
        if self.check == "race" and not any(start <= address < start + bytes_ for start, bytes_ in self._frozen.items()):
            self._memory[address] = _shadowed(name.removeprefix("workspace "), address, size, strides)

    @contextlib.contextmanager
    def in_schedule(self, number: int) -> Iterator[None]:
        """Launches in it have the seed so many above the backend's."""
        own, self.seed = self.seed, self.seed + number
        try:
            yield
        finally:
            self.seed = own

    def threads(self) -> int:
        """The OS threads of this process but those that the engine keeps; 0 where the system does not list them."""
        with contextlib.suppress(OSError):
            return len(os.listdir("/proc/self/task")) - int(engine().fa_host_pool_size())
        return 0

    def watched(self) -> int | None:
        """As the protocol says: for "race" accesses, for "asan" CUDA threads whose code checks each of its accesses."""
        return self._watched.value if self.check else None

    def get(self, buffer: Bytes) -> Bytes:
        """A copy of a buffer."""
        return np.array(buffer)

    def address(self, buffer: Bytes) -> int:
        """The address of a buffer's first byte."""
        return int(buffer.ctypes.data)

    def tensor_map(self, map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
        """The fields themselves. Raises KernelFault for what TMA cannot address."""
        return tensor_map.for_host(map_, address, strides)

    def launch(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Run the steps in order. Raises KernelFault (deadlock, bad address …) or CheckFault with the engine's report."""
        self.submit(loaded, steps)

    def submit(self, loaded: Loaded, steps: Sequence[Step], stream: int | None = None) -> None:
        """The same: a CPU has no streams, and what is submitted has run when this returns."""
        library: Library = loaded.functions["library"]
        for call in steps:
            if isinstance(call, Fill):
                ctypes.memset(call.address, 0, call.size)
                continue
            # Parameters are copied to 64-byte aligned storage, which tensor maps need.
            copies = [_aligned(p) for p in call.parameters]
            pointers = (ctypes.c_void_p * len(copies))(*(c.ctypes.data for c in copies))
            report = ctypes.create_string_buffer(1 << 14)
            kept = _kept(loaded, call) if call.overlaps else {}
            held = (_Held * (len(kept) + 1))(*(_Held(address, copy.ctypes.data, copy.nbytes) for address, copy in kept.items()))
            watch = self._watch_of(library, copies)
            places, used, lost = (_Traffic * (_PLACES * self._banks))(), ctypes.c_int(0), ctypes.c_ulonglong(0)
            spans = (_Span * len(self._spans))(*(_Span(*each) for each in self._spans.items()))
            launch = _Launch(
                library.entries[call.entry],
                ctypes.addressof(pointers),
                library.touch,
                library.static_offset,
                library.static_bytes,
                GUARD,
                call.grid,
                (call.block, 1, 1),
                call.cluster,
                call.shared,
                int(self.check == "race") + 2 * self._banks,
                self.seed,
                self.workers,
                ctypes.cast(report, ctypes.c_char_p),
                len(report),
                held if call.overlaps else None,
                len(kept),
                watch,
                len(watch),
                bool(self.seed)
                or call.cooperative
                or (self.check == "race" and any(space.init == "zero_once" for space in loaded.plan.workspaces)),
                dict(loaded.plan.macros).get("DETERMINISTIC") == "1",
                ctypes.pointer(self._watched),
                ctypes.cast(places, ctypes.c_void_p),
                ctypes.pointer(used),
                ctypes.pointer(lost),
                ctypes.cast(spans, ctypes.c_void_p),
                len(spans),
                call.cooperative,
            )
            outcome = engine().fa_host_run(ctypes.byref(launch))
            if outcome:
                raise failure(
                    outcome,
                    report.value.decode(errors="replace"),
                    library.path,
                    library.lines,
                    loaded.kernel,
                    call.entry,
                    loaded.plan.macros,
                )
            self.traffic += _placed(places[: used.value], library, loaded.kernel, call.entry)
            self.uncounted += lost.value
            if library.checks_accesses:
                self._watched.value += math.prod(call.grid) * call.block

    def _watch_of(self, library: Library, parameters: Sequence[Bytes]) -> ctypes.Array[ctypes._Pointer[_Watch]]:
        """What the race check watches of the memory that a launch is given the addresses of, and of the library's own."""
        given = {word for p in parameters for word in p[: p.size // 8 * 8].view(np.uint64).tolist()} if self._memory else set()
        found = [ctypes.pointer(whole) for address, (whole, _) in self._memory.items() if address in given]
        if self.check == "race":
            if library not in self._globals:
                self._globals[library] = [_shadowed(name, address, size, (4,)) for name, address, size in library.globals]
            found += [ctypes.pointer(whole) for whole, _ in self._globals[library]]
        return (ctypes.POINTER(_Watch) * len(found))(*found)

    def enqueue(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], float]:
        """Run the steps. The function returned gives their CPU seconds."""
        start = time.perf_counter()
        self.launch(loaded, steps)
        seconds = time.perf_counter() - start
        return lambda: seconds

    def call(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """The same: here the host is the device."""
        return self.time(loaded, steps)

    def graph(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """None: a CPU has no CUDA graphs."""

    def before(self, seconds: float, cold: bool) -> None:
        """Does nothing: CPU times are not published, so its caches are not flushed."""

    def state(self) -> Json:
        """Empty: a CPU's state is not read."""
        return {}


def _placed(counts: Sequence[_Traffic], library: Library, kernel: Kernel, entry: str) -> list[Traffic]:
    """The counts of a launch with the lines of their places."""
    lines = lines_of([hex(each.code) for each in counts], library.path) if counts else []
    lines += ["an unknown line"] * (len(counts) - len(lines))
    return [
        Traffic(entry, with_folders(line, kernel), _KINDS[each.kind], each.accesses, each.parts, each.ideal)
        for each, line in zip(counts, lines, strict=True)
    ]


def _shadowed(name: str, address: int, size: int, strides: tuple[int, ...]) -> tuple[_Watch, Bytes]:
    """Memory that the race check watches, and its shadow memory, of which the system gives a page when it is written."""
    words = -(-size // 16) * 4
    shadow = np.zeros(18 * words, np.uint8)
    at = int(shadow.ctypes.data)
    parts = (at, at + 8 * words, at + 16 * words)
    return _Watch(name.encode(), address, size, *parts, (*strides, *[0] * (4 - len(strides))), len(strides)), shadow


def _forget(memory: dict[int, tuple[_Watch, Bytes]], frozen: dict[int, int], start: int, size: int) -> None:
    """A buffer is gone."""
    frozen.pop(start, None)
    for address in [each for each in list(memory) if start <= each < start + size]:
        memory.pop(address, None)


def _kept(loaded: Loaded, call: Call) -> dict[int, Bytes]:
    """Copies, by address, of the workspaces that the launches before may have filled, which are made NaN: kernels_cu/host/overlap.hpp."""
    kept: dict[int, Bytes] = {}
    addresses = np.frombuffer(call.parameters[0], ARGS, 1)["workspace"][0].tolist() if len(call.parameters[0]) >= ARGS.itemsize else []
    for address, space in zip(addresses, loaded.plan.workspaces, strict=False):
        if space.init == "none":
            kept[address] = np.frombuffer(ctypes.string_at(address, space.bytes), np.uint8)
            ctypes.memset(address, 0xFF, space.bytes)
    return kept


def _aligned(data: bytes | memoryview) -> Bytes:
    room = np.empty(len(data) + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room[start : start + len(data)]


def run_under_asan(arguments: Sequence[str]) -> int:
    """Run this command again in a child process with AddressSanitizer loaded, and return its exit code.

    Raises CheckFault for an access outside of what a launch was given, EnvironmentFault where the compiler has no AddressSanitizer.
    """
    return child_with_asan(compiler(), arguments)
