"""The host backend: the same .cu files through a C++ compiler, each CUDA thread a fiber (kernels_cu/host/engine.cpp).

It shows that a kernel is correct and has the barriers that it needs. Its times are CPU times and say nothing about a GPU. The compiler
is started by cache.py.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...array import ArrayModule, Bytes
from ...fault import EnvironmentFault, UsageFault
from ...files import Json
from ...kernel.kernel import INCLUDE, Device, Kernel, Plan
from ...kernel.plan import TensorMap
from ...problem import Problem
from .. import tensor_map
from ..protocol import Backend, Fill, Loaded, Step
from . import cache
from .library import checks_accesses
from .machine import fenced, processor, protect, tensor_core, threads
from .report import ASAN_CHILD, child_with_asan, failure
from .source import GUARD, GUARDS, HOST, translation_unit

CHECKS = ("race", "asan")

_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-fstack-clash-protection",  # a frame of more than a page touches each of its pages, and so the guard page below a stack
)


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
        ("watched", ctypes.POINTER(ctypes.c_ulonglong)),
    ]


class Host(Backend):
    """Runs kernels on the CPU. seed: 0 runs threads in index order, else in a random order drawn from it.

    check: None, "race" (shared-memory races over barriers) or "asan" (out-of-bounds; only in the child process that
    :func:`run_under_asan` starts). debug: not optimised, for a debugger, and blocks one after another on the launching thread.
    Raises EnvironmentFault where there is no C++ compiler.
    """

    name = "cpu"
    xp: ArrayModule = np

    def __init__(self, seed: int | None = None, check: str | None = None, debug: bool = False) -> None:
        if check not in (None, *CHECKS):
            raise UsageFault(f"unknown check {check!r}", f"known: {', '.join(CHECKS)}", "use --check race")
        if check == "asan" and not os.environ.get(ASAN_CHILD):
            raise UsageFault(
                "the asan check needs a process of its own", "AddressSanitizer must be loaded first", "fa-cli run --check asan"
            )
        self.seed, self.check, self.debug = seed or 0, check, debug
        self.workers = 1 if debug else threads()
        self._watched = ctypes.c_ulonglong(0)
        #: Bytes of a guard band (harness/check/tensors.py); AddressSanitizer has its own.
        self.guard_bytes = 0 if check == "asan" else 4096
        compiler()

    def device(self) -> Device:
        """The processor, with the architecture and sizes of an H200, whose launch plans it follows."""
        return Device("cpu", processor(), "sm_90", 132, 50 << 20, 232448)

    def environment(self) -> Json:
        """Processor, compiler and threads."""
        version = subprocess.run(
            [*compiler(), "--version"], capture_output=True, text=True, errors="replace", check=False
        ).stdout.partition("\n")[0]
        return {"device": self.name, "device_name": processor(), "compiler": version, "threads": self.workers, "schedule_seed": self.seed}

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile (or fetch from the cache) a kernel for a problem. Raises CompileError with file and line."""
        plan = kernel.plan(problem, self.device(), overrides)
        crowded = next(
            (c for c in plan.launches if self.check == "race" and math.prod(c.cluster) > 1 and math.prod(c.cluster) * c.block > 1024), None
        )
        if crowded:
            why = f"{crowded.entry} has clusters of {math.prod(crowded.cluster)} blocks of {crowded.block} threads; it keeps 1024 clocks"
            raise UsageFault(f"{kernel.label} is too large for the race check", why, "use smaller blocks (--tile), or no --check race")
        library = _library(kernel, plan, "debug" if self.debug else self.check)
        return Loaded(kernel, plan, {"library": library}, shared_bytes=max(c.shared for c in plan.launches) + library.static_bytes)

    @contextlib.contextmanager
    def fresh(self, loaded: Loaded) -> Iterator[Loaded]:
        """A copy of the library, closed at the end."""
        library: _Library = loaded.functions["library"]
        opened = cache.copied(cache.Opened(library.path, library.dll, library.descriptor))
        try:
            yield replace(loaded, functions={"library": _Library(opened, loaded.kernel)})
        finally:
            _ctypes.dlclose(opened.dll._handle)
            os.close(opened.descriptor)

    def memory(self, size: int) -> Bytes:
        """Memory between inaccessible pages (machine.fenced); for AddressSanitizer an array on the heap, which it guards itself."""
        return fenced(size) if self.guard_bytes else np.empty(size, np.uint8)

    def freeze(self, buffer: Bytes, frozen: bool) -> None:
        """Make a buffer's pages read-only, or writable again; nothing for AddressSanitizer, whose memory is the heap's."""
        if self.guard_bytes:
            protect(buffer, frozen)

    def threads(self) -> int:
        """The OS threads of this process but those that the engine keeps; 0 where the system does not list them."""
        with contextlib.suppress(OSError):
            return len(os.listdir("/proc/self/task")) - int(_engine().fa_host_pool_size())
        return 0

    def watched(self) -> int | None:
        """As the protocol says: for "race" accesses to shared memory, for "asan" CUDA threads whose code checks each of its accesses."""
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
        library: _Library = loaded.functions["library"]
        for call in steps:
            if isinstance(call, Fill):
                ctypes.memset(call.address, 0, call.size)
                continue
            # Parameters are copied to 64-byte aligned storage, which tensor maps need.
            copies = [_aligned(p) for p in call.parameters]
            pointers = (ctypes.c_void_p * len(copies))(*(c.ctypes.data for c in copies))
            report = ctypes.create_string_buffer(1 << 14)
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
                int(self.check == "race"),
                self.seed,
                self.workers,
                ctypes.cast(report, ctypes.c_char_p),
                len(report),
                ctypes.pointer(self._watched),
            )
            outcome = _engine().fa_host_run(ctypes.byref(launch))
            if outcome:
                raise failure(outcome, report.value.decode(errors="replace"), library.path, library.lines, loaded.kernel, call.entry)
            if library.checks_accesses:
                self._watched.value += math.prod(call.grid) * call.block

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


# -- compiling --------------------------------------------------------------------------------------------------------


@functools.cache
def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: FA_CLI_CXX, g++, clang++ or `python -m ziglang c++`. Raises EnvironmentFault where there is none."""
    chosen = os.environ.get("FA_CLI_CXX")
    for name in (chosen,) if chosen else ("g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    with contextlib.suppress(ImportError):
        import ziglang  # type: ignore[import-not-found]  # noqa: F401  # optional; found, not used

        return (sys.executable, "-m", "ziglang", "c++")
    raise EnvironmentFault(
        f"no C++ compiler{f' {chosen}' if chosen else ''}",
        "the CPU backend compiles kernels with g++ or clang++",
        "apt install g++ (or: pip install ziglang)",
    )


@functools.cache
def _toolchain() -> str:
    """What a compiled library depends on besides its source: the compiler binary and this processor's features."""
    path = Path(compiler()[0]).resolve()
    stat = path.stat()
    with contextlib.suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
        return f"{path} {stat.st_size} {stat.st_mtime_ns} {flags[0] if flags else ''}"
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _clang() -> bool:
    return len(compiler()) > 1 or "clang" in Path(compiler()[0]).resolve().name


def _dialect() -> list[str]:
    """Flags that g++ and clang++ (also as c++ or zig) spell differently. A fiber's stack is 128 KB, so a frame above 96 KB is an error."""
    if _clang():
        return ["-march=native", "-Wframe-larger-than=98304", "-Werror=frame-larger-than"]
    return ["-march=native", "-Werror=frame-larger-than=98304", "-fno-gnu-unique"]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


_loading = threading.Lock()


def _engine() -> ctypes.CDLL:
    """The engine, loaded once: of two, kernels would find the symbols of one and be run by the other."""
    with _loading:
        return _load_engine()


@functools.cache
def _load_engine() -> ctypes.CDLL:
    source = "".join(file.read_text() for file in sorted(HOST.glob("*.?pp")))
    step = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-w", f"-I{HOST}", str(HOST / "engine.cpp"), "-o", "{dir}/out.so"]
    key = _hash("engine", source, _toolchain(), *step)
    # kernels find the engine's symbols by name
    engine = cache.library(key, compiler(), [step], {}, ["fa_host_run", "fa_host_module_shared"], mode=ctypes.RTLD_GLOBAL).dll
    engine.fa_host_module_shared.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_longlong)] * 2
    return engine


class _Library:
    """A loaded kernel library."""

    def __init__(self, opened: cache.Opened, kernel: Kernel, lines: Callable[[], Path] | None = None) -> None:
        self.path, self.dll, self.descriptor = opened.path, opened.dll, opened.descriptor
        #: Builds it again with line numbers, which take a third more time: wanted only by a report. None where it has them.
        self.lines = lines
        self.entries = {name: ctypes.cast(getattr(self.dll, f"fa_host_entry_{name}"), ctypes.c_void_p).value for name in kernel.entries}
        self.touch = ctypes.cast(self.dll.fa_host_static_shared, ctypes.c_void_p).value
        offset, size = ctypes.c_longlong(), ctypes.c_longlong()
        _engine().fa_host_module_shared(self.touch, ctypes.byref(offset), ctypes.byref(size))
        self.static_offset, self.static_bytes = offset.value - GUARD, size.value - 2 * GUARD
        #: Whether it was compiled for AddressSanitizer.
        self.checks_accesses = checks_accesses(opened.path)


#: The most libraries kept open for reuse. The oldest unused are closed here, not by a finalizer, in which Python would drop a Ctrl-C.
_OPEN_AT_MOST = 64
_open: dict[str, _Library] = {}
_opening = threading.Lock()


def _keep_open(key: str, library: _Library) -> _Library:
    with _opening:
        kept = _open.setdefault(key, library)
        for old in list(_open)[:-_OPEN_AT_MOST]:
            if sys.getrefcount(_open[old]) == 2:  # the table's and this call's: no Loaded holds it
                unused = _open.pop(old)
                _ctypes.dlclose(unused.dll._handle)
                os.close(unused.descriptor)
    return kept


#: For a debugger: every variable in memory, every line a place to stop, and with -g3 macros too, so that threadIdx is a name. The
#: compilers crash on the tensor core's vectors of 16 doubles where they are not optimised and the processor has AVX-512.
_DEBUG = ("-O0", "-g3", "-gdwarf-4", *(("-mno-avx512f",) if platform.machine() == "x86_64" else ()))


def _library(kernel: Kernel, plan: Plan, build: str | None) -> _Library:
    """The library of a plan; build: None, a check, or "debug"."""
    unit = translation_unit(kernel, max(launch.shared for launch in plan.launches) if build == "debug" else 0)
    flags = [*_FLAGS, *_dialect(), f"-I{HOST}", f"-I{INCLUDE}", f"-I{kernel.path.parent}", "-include", str(HOST / "cuda.hpp")]
    flags += [f"-D{name}={value}" for name, value in (*plan.macros, ("FA_HOST_SM", tensor_core()))]
    link = ["-shared", "{dir}/front.s", "{dir}/unit.o", "{dir}/behind.s", "-o", "{dir}/out.so"]
    if build == "race":  # instrumented accesses without the sanitizer's library: the engine takes the calls
        flags += ["-O1", "-g1", "-gdwarf-4", "-fsanitize=thread"]  # DWARF 5 of gcc 12 takes an included kernel for the unit
    elif build == "asan":
        flags += ["-O1", "-g1", "-gdwarf-4", "-fsanitize=address"]
        link.append("-fsanitize=address")
    elif build == "debug":
        flags += [*_DEBUG, *(("-fdebug-macro",) if _clang() else ())]
    else:
        flags.append("-O3")
    key = _hash(unit, *GUARDS.values(), kernel.source_hash, _toolchain(), _words(), *flags)
    if found := _open.get(key):
        return found
    compile_ = [*flags, "-c", "{dir}/unit.cpp", "-o", "{dir}/unit.o"]
    _engine()  # before a library that needs its symbols
    wanted = ["fa_host_static_shared", *(f"fa_host_entry_{name}" for name in kernel.entries)]

    def built(key: str, *more: str) -> cache.Opened:
        return cache.library(key, compiler(), [[*more, *compile_], link], {"unit.cpp": unit, **GUARDS}, wanted, kernel)

    lines = None if build else lambda: built(_hash(key, "lines"), "-g1", "-gdwarf-4").path
    return _keep_open(key, _Library(built(key), kernel, lines))


@functools.cache
def _words() -> str:
    return _hash(*(file.read_text() for file in (HOST / "cuda.hpp", HOST / "engine.hpp")))


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
