"""The host backend: the same .cu files through a C++ compiler, each CUDA thread a fiber (kernels_cu/host/engine.cpp).

What it proves is that a kernel is right and waits where it must; its times are CPU times and say nothing of a GPU.
The only module that starts a compiler.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..kernel import INCLUDE, KERNELS, Device, Kernel, Plan
from ..problem import DiskFault, EnvironmentFault, KernelFault, Problem, UsageFault
from . import Call, CompileError, Loaded, cache_dir

HOST = KERNELS / "host"
CHECKS = ("race", "asan")
ASAN_CHILD = "FA_CLI_ASAN_CHILD"  # set in the child process that has AddressSanitizer loaded

_FLAGS = (
    "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fno-exceptions", "-fno-rtti", "-w",
)  # fmt: skip
_SANITIZER_EXIT = 86


class CheckFault(KernelFault):
    """The race check or AddressSanitizer found a fault in a kernel. A failed check: exit code 1."""

    exit_code = 1


class _Launch(ctypes.Structure):
    """fa_host::Launch of engine.hpp."""

    _fields_ = [
        ("entry", ctypes.c_void_p), ("parameters", ctypes.c_void_p), ("static_shared", ctypes.c_void_p),
        ("static_offset", ctypes.c_longlong), ("static_bytes", ctypes.c_longlong), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("dynamic_bytes", ctypes.c_uint), ("checks", ctypes.c_uint), ("seed", ctypes.c_ulonglong),
        ("workers", ctypes.c_int), ("report", ctypes.c_char_p), ("report_bytes", ctypes.c_int),
    ]  # fmt: skip


class Host:
    """Runs kernels on the CPU. seed: 0 runs threads in index order, else in a random order drawn from it.

    check: None, "race" (shared-memory races over barriers) or "asan" (out-of-bounds; only in the child process that
    :func:`run_under_asan` starts). Raises EnvironmentFault where there is no C++ compiler.
    """

    name = "cpu"
    xp = np

    def __init__(self, seed: int | None = None, check: str | None = None) -> None:
        if check not in (None, *CHECKS):
            raise UsageFault(f"unknown check {check!r}", f"known: {', '.join(CHECKS)}", "use --check race")
        if check == "asan" and not os.environ.get(ASAN_CHILD):
            raise UsageFault(
                "the asan check needs a process of its own", "AddressSanitizer must be loaded first", "fa-cli run --check asan"
            )
        self.seed, self.check = seed or 0, check
        self.workers = int(os.environ.get("FA_CLI_THREADS") or len(os.sched_getaffinity(0)))
        #: Bytes of poisoned memory run.py puts around each tensor; AddressSanitizer brings its own.
        self.guard_bytes = 0 if check == "asan" else 4096
        compiler()

    def device(self) -> Device:
        """The processor. The architecture and sizes are those of the GPU whose launch plans are followed (an H200)."""
        return Device("cpu", _processor(), "sm_90", 132, 50 << 20, 232448)

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile (or fetch from the cache) a kernel for a problem. Raises CompileError with file and line."""
        plan = kernel.plan(problem, self.device(), overrides)
        library = _library(kernel, plan, self.check)
        return Loaded(kernel, plan, {"library": library}, shared_bytes=max(c.shared for c in plan.launches) + library.static_bytes)

    def put(self, array: Any) -> Any:
        """A copy of an array's bytes, flat."""
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

    def get(self, buffer: Any) -> Any:
        """The buffer's bytes, copied."""
        return np.array(buffer)

    def address(self, buffer: Any) -> int:
        """Where the buffer starts."""
        return int(buffer.ctypes.data)

    def launch(self, loaded: Loaded, calls: Sequence[Call]) -> None:
        """Run the calls in order. Raises KernelFault (deadlock, divergent barrier …) or CheckFault with the engine's report."""
        library: _Library = loaded.functions["library"]
        for call in calls:
            # Parameters are copied to 64-byte aligned storage: fa::Args holds what must lie so (tensor maps).
            copies = [
                _aligned(bytes(memoryview(np.asarray(p)).cast("B") if np.asarray(p).ndim else np.asarray(p).tobytes()))
                for p in call.parameters
            ]
            pointers = (ctypes.c_void_p * len(copies))(*(c.ctypes.data for c in copies))
            report = ctypes.create_string_buffer(1 << 14)
            launch = _Launch(
                library.entries[call.entry], ctypes.addressof(pointers), library.touch, library.static_offset, library.static_bytes,
                call.grid, (call.block, 1, 1), call.shared, int(self.check == "race"), self.seed, self.workers,
                ctypes.cast(report, ctypes.c_char_p), len(report),
            )  # fmt: skip
            outcome = _engine().fa_host_run(ctypes.byref(launch))
            if outcome:
                text = _with_lines(report.value.decode(errors="replace"), library.path)
                fault = CheckFault if outcome == 2 else KernelFault
                what = "races on shared memory" if outcome == 2 else "stopped on the CPU backend"
                raise fault(f"{loaded.kernel.label}: {what} in {call.entry}", text.strip(), f"see {loaded.kernel.path}")

    def time(self, loaded: Loaded, calls: Sequence[Call]) -> float:
        """CPU seconds of the calls."""
        start = time.perf_counter()
        self.launch(loaded, calls)
        return time.perf_counter() - start


# -- compiling --------------------------------------------------------------------------------------------------------


@cache
def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: FA_CLI_CXX, g++, clang++ or `python -m ziglang c++`. Raises EnvironmentFault where there is none."""
    chosen = os.environ.get("FA_CLI_CXX")
    for name in (chosen,) if chosen else ("g++", "clang++"):
        if found := shutil.which(name):
            return (found,)
    with contextlib.suppress(ImportError):
        import ziglang  # type: ignore[import-not-found]  # noqa: F401

        return (sys.executable, "-m", "ziglang", "c++")
    raise EnvironmentFault(
        f"no C++ compiler{f' {chosen}' if chosen else ''}", "the CPU backend compiles kernels with g++ or clang++",
        "apt install g++ (or: pip install ziglang)",
    )  # fmt: skip


@cache
def _toolchain() -> str:
    """What a compiled library depends on besides its source: the compiler binary, this processor's features, the engine."""
    path = Path(compiler()[0]).resolve()
    stat = path.stat()
    with contextlib.suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
        return f"{path} {stat.st_size} {stat.st_mtime_ns} {flags[0] if flags else ''}"
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _native() -> list[str]:
    gnu = "clang" not in compiler()[0] and len(compiler()) == 1
    return ["-march=native", *(["-fno-gnu-unique"] if gnu else [])]


def _build(key: str, steps: Sequence[Sequence[str]], sources: Mapping[str, str], kernel: Kernel | None) -> Path:
    """A shared library from the cache, or built into it: `steps` are compiler arguments in which {dir} is a scratch folder.

    A library whose hash differs from the one noted beside it is built again; two processes may build at once (rename decides).
    """
    folder = cache_dir() / "host" / key[:2]
    library, note = folder / f"{key}.so", folder / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(note.read_text())["sha256"] == hashlib.sha256(library.read_bytes()).hexdigest():
            return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
            for name, text in sources.items():
                Path(scratch, name).write_text(text)
            for step in steps:
                command = [*compiler(), *(argument.replace("{dir}", scratch) for argument in step)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    log = done.stderr.replace(f"{scratch}/", "")
                    if kernel:
                        raise CompileError(kernel, command, log)
                    raise EnvironmentFault("the host engine does not compile", log, "fa-cli doctor")
            built = Path(scratch, "out.so")
            digest = hashlib.sha256(built.read_bytes()).hexdigest()
            os.replace(built, library)
            Path(scratch, "note").write_text(json.dumps({"sha256": digest}))
            os.replace(Path(scratch, "note"), note)
    except OSError as error:
        raise DiskFault(f"cannot write the kernel cache {folder}", str(error), "set FA_CLI_CACHE_DIR to a writable folder") from None
    return library


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _engine() -> ctypes.CDLL:
    source = "".join((HOST / name).read_text() for name in ("engine.cpp", "engine.hpp", "race.hpp"))
    step = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-w", f"-I{HOST}", str(HOST / "engine.cpp"), "-o", "{dir}/out.so"]
    path = _build(_hash("engine", source, _toolchain(), *step), [step], {}, None)
    engine = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # kernels find the engine's symbols by name
    engine.fa_host_module_shared.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_longlong)] * 2
    return engine


class _Library:
    """A loaded kernel library; closed when nobody uses it any more."""

    def __init__(self, path: Path, kernel: Kernel) -> None:
        _engine()
        self.path = path
        self.dll = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        weakref.finalize(self, _ctypes.dlclose, self.dll._handle)
        self.entries = {name: ctypes.cast(getattr(self.dll, f"fa_host_entry_{name}"), ctypes.c_void_p).value for name in kernel.entries}
        self.touch = ctypes.cast(self.dll.fa_host_static_shared, ctypes.c_void_p).value
        offset, size = ctypes.c_longlong(), ctypes.c_longlong()
        _engine().fa_host_module_shared(self.touch, ctypes.byref(offset), ctypes.byref(size))
        self.static_offset, self.static_bytes = offset.value, size.value


_open: weakref.WeakValueDictionary[str, _Library] = weakref.WeakValueDictionary()


def _library(kernel: Kernel, plan: Plan, check: str | None) -> _Library:
    text = kernel.path.read_text(encoding="utf-8")
    _refuse_other_languages(kernel, text)
    rewritten = _DYNAMIC.sub(r"\1\2* const \3 = fa::dynamic_shared<\2>();", text)
    header = HOST / "cuda.hpp"
    include = f'#include "{kernel.path}"'
    if rewritten != text:
        include = f'#include <fa/warp.cuh>\n#line 1 "{kernel.path}"\n{rewritten}'
    entries = "\n".join(
        f'extern "C" __attribute__((visibility("default"))) void fa_host_entry_{name}(void** p) {{ fa_host::call(&{name}, p); }}'
        for name in kernel.entries
    )
    unit = f"""{include}
#line 1 "entries of {kernel.path.name}"
{entries}
static __thread char fa_host_anchor;
extern "C" __attribute__((visibility("default"))) void* fa_host_static_shared() {{ return &fa_host_anchor; }}
"""
    flags = [
        *_FLAGS,
        *_native(),
        f"-I{HOST}",
        f"-I{INCLUDE}",
        "-include",
        str(header),
        *(f"-D{name}={value}" for name, value in plan.macros),
    ]
    if check == "race":  # instrumented accesses without the sanitizer's library: the engine takes the calls
        flags += ["-O1", "-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
        link = ["-shared", "{dir}/unit.o", "-o", "{dir}/out.so"]
    elif check == "asan":
        flags += ["-O1", "-g1", "-fsanitize=address"]
        link = ["-shared", "-fsanitize=address", "{dir}/unit.o", "-o", "{dir}/out.so"]
    else:
        flags += ["-O3"]
        link = ["-shared", "{dir}/unit.o", "-o", "{dir}/out.so"]
    key = _hash(unit, kernel.source_hash, _toolchain(), _words(), *flags)
    if key not in _open:
        compile_ = [*flags, "-c", "{dir}/unit.cpp", "-o", "{dir}/unit.o"]
        library = _Library(_build(key, [compile_, link], {"unit.cpp": unit}, kernel), kernel)
        _open[key] = library
        return library
    return _open[key]


@cache
def _words() -> str:
    return _hash(*(file.read_text() for file in (HOST / "cuda.hpp", HOST / "engine.hpp")))


# extern __shared__ of a user's own file: an array the launch sizes. The line stays a line, so messages keep their numbers.
_DYNAMIC = re.compile(
    r"^([ \t]*)extern[ \t]+__shared__[ \t]+(?:__align__\(\d+\)[ \t]*)?([\w:]+(?: [\w:]+)*)[ \t]+(\w+)[ \t]*\[[ \t]*\][ \t]*;", re.M
)
_FOREIGN = re.compile(r"\b(?:asm|__asm__)\b|^[ \t]*#[ \t]*include[ \t]*[<\"](?!fa/)(?P<header>[^>\"]+)[>\"]", re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def _refuse_other_languages(kernel: Kernel, text: str) -> None:
    """Raise CompileError for inline PTX and CUDA's own headers in a kernel file, naming the line."""
    bare = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    if found := _FOREIGN.search(bare):
        line = bare.count("\n", 0, found.start()) + 1
        what = f"#include <{found['header']}>" if found["header"] else "inline PTX"
        raise CompileError(
            kernel, compiler(), f"{kernel.path}:{line}: {what} has no meaning on the CPU backend: there a kernel speaks CUDA C++ and the words "
            "of <fa/...>; on a GPU it runs as it is (--device cuda)",
        )  # fmt: skip


# -- reports ----------------------------------------------------------------------------------------------------------


def _with_lines(report: str, library: Path) -> str:
    """The engine's report with code addresses (pc:0x…) replaced by file:line, through addr2line."""
    addresses = list(dict.fromkeys(re.findall(r"pc:(0x[0-9a-f]+)", report)))
    base = None
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        if mapping.endswith(str(library)):
            base = int(mapping.split("-")[0], 16)
            break
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not addresses or base is None or tool is None:
        return report
    offsets = [hex(int(a, 16) - base - 1) for a in addresses]  # the return address lies after the call
    done = subprocess.run([tool, "-a", "-i", "-e", str(library), *offsets], capture_output=True, text=True, check=False)
    places: list[str] = []
    for block in re.split(r"^0x[0-9a-f]+\n", done.stdout, flags=re.M)[1:]:
        frames = [line.split(" (")[0] for line in block.splitlines()]
        # the outermost frame in a kernel file: words are inlined into it
        places.append(next((f for f in reversed(frames) if ".cu:" in f), frames[-1] if frames else "?"))
    for address, place in zip(addresses, places, strict=False):
        report = report.replace(f"pc:{address}", place)
    return report


def run_under_asan(arguments: Sequence[str]) -> int:
    """Run this command again in a child process with AddressSanitizer loaded; a finding is told with its line. Returns the exit code."""
    runtime = subprocess.run([compiler()[0], "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout.strip()
    if not Path(runtime).is_file():
        raise EnvironmentFault(
            "no AddressSanitizer library", f"{compiler()[0]} has no libasan.so", "apt install libasan8, or use --check race"
        )
    options = f"detect_leaks=0:detect_stack_use_after_return=0:exitcode={_SANITIZER_EXIT}:abort_on_error=0"
    environment = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options, ASAN_CHILD: "1", "PYTHONMALLOC": "malloc"}
    child = subprocess.run([sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if child.returncode != _SANITIZER_EXIT:
        sys.stderr.write(child.stderr)
        return child.returncode
    error = re.search(r"ERROR: AddressSanitizer: (.*)", child.stderr)
    access = re.search(r"^((?:READ|WRITE) of size \d+)", child.stderr, re.M)
    place = re.search(r"(\S+\.cuh?:\d+)", child.stderr)
    allocated = re.search(r"^(\S+ is located .*)$", child.stderr, re.M)
    raise CheckFault(
        f"out of bounds: {access[1] if access else 'bad access'} at {place[1] if place else 'an unknown line'}",
        "\n".join(m[1] for m in (error, allocated) if m), "the access is outside what the launch was given",
    )  # fmt: skip


def _aligned(data: bytes) -> Any:
    room = np.empty(len(data) + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room[start : start + len(data)]


@cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
    import platform

    return platform.machine()
