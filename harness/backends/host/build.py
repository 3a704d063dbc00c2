"""From a kernel to a loaded library: which compiler, which flags, and what all libraries share: the engine and the tensor core.

The compiler is started by cache.py.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ...fault import EnvironmentFault
from ...kernel import INCLUDE, Kernel, Plan, include_closure
from ...kernel.signature import user_files, without_comments
from ..protocol import cache_dir
from . import cache
from .library import checks_accesses, module_globals, static_shared
from .machine import tensor_core
from .source import GUARD, GUARDS, HOST, translation_unit
from .unset import starting_as_nan

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

#: g++'s note that GCC 4.6 passed vectors otherwise would stand before what is wrong with a kernel. Nothing that is compiled depends on it.
_QUIET = ("-Wno-psabi",)


@functools.cache
def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: FA_CLI_CXX, g++, clang++ or `python -m ziglang c++`. Raises EnvironmentFault where there is none."""
    chosen = os.environ.get("FA_CLI_CXX")
    for name in (chosen,) if chosen else ("g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    with contextlib.suppress(ImportError):
        import ziglang  # type: ignore[import-not-found]  # noqa: F401  # optional; found, not used

        return (sys.executable, "-m", "ziglang", "c++")
    raise EnvironmentFault(
        f"no C++ compiler{f' {chosen}' if chosen else ''}",
        "the CPU engine compiles kernels with g++ or clang++",
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


@functools.cache
def _locals_start() -> tuple[str, ...]:
    """How locals, and so what a GPU has in registers, start as bytes that no sum begins with (gcc from 12 on, clang from 8 on).

    Registers of a processor are 0 often enough for a sum that is never set to 0 to pass. unset.py says what bytes, and makes gcc's NaN.
    """
    flag = "-ftrivial-auto-var-init=pattern"
    return (flag,) if cache.understands(compiler(), flag) else ()


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


_loading = threading.Lock()


def engine() -> ctypes.CDLL:
    """The engine, loaded once: of two, kernels would find the symbols of one and be run by the other."""
    with _loading:
        return _engine()


@functools.cache
def _engine() -> ctypes.CDLL:
    source = "".join(file.read_text() for file in (HOST / "engine.cpp", *sorted(HOST.glob("*.hpp"))))
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-w"]
    step = [*flags, f"-I{HOST}", str(HOST / "engine.cpp"), "-o", "{dir}/out.so"]
    # kernels find the engine's symbols by name
    wanted = ["fa_host_run", "fa_host_module_shared"]
    key = _hash("engine", source, _toolchain(), *flags)
    dll = cache.library(key, compiler(), [step], {}, wanted, mode=ctypes.RTLD_GLOBAL).dll
    dll.fa_host_module_shared.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_longlong)] * 2
    return dll


@functools.cache
def _tensor_core(sm: int) -> None:
    """Load the products of a tensor core, once for all kernels that speak of them: all time of theirs, so -O2."""
    path = HOST / "tensor_core.cpp"
    flags = [*_FLAGS, *_dialect(), "-O2", "-shared", f"-DFA_HOST_SM={sm}"]
    step = [*_QUIET, *flags, *_includes(HOST), str(path), "-o", "{dir}/out.so"]
    key = _hash(*(file.read_text() for file in include_closure(path)), _toolchain(), _words(), *flags)
    cache.library(key, compiler(), [step], {}, [f"fa_host_sm{sm}_mma_f16"], mode=ctypes.RTLD_GLOBAL)


class Library:
    """A loaded kernel library."""

    def __init__(self, opened: cache.Opened, kernel: Kernel, lines: Callable[[], Path] | None = None) -> None:
        self.path, self.dll, self.descriptor = opened.path, opened.dll, opened.descriptor
        #: Builds it again with line numbers, which take a third more time: wanted only by a report. None where it has them.
        self.lines = lines
        self.entries = {name: ctypes.cast(getattr(self.dll, f"fa_host_entry_{name}"), ctypes.c_void_p).value for name in kernel.entries}
        self.touch = ctypes.cast(self.dll.fa_host_static_shared, ctypes.c_void_p).value
        offset, size = ctypes.c_longlong(), ctypes.c_longlong()
        engine().fa_host_module_shared(self.touch, ctypes.byref(offset), ctypes.byref(size))
        self.static_offset, self.static_bytes = offset.value - GUARD, size.value - 2 * GUARD
        #: Bytes of static shared memory by entry, as a GPU has them.
        self.static_of = static_shared(opened.path, kernel)
        #: Whether it was compiled for AddressSanitizer.
        self.checks_accesses = checks_accesses(opened.path)
        #: Name, address and bytes of its variables in global memory.
        self.globals = [(name, (self.touch or 0) + at, size) for name, at, size in module_globals(opened.path)]


#: The most libraries kept open for reuse. The oldest unused are closed here, not by a finalizer, in which Python would drop a Ctrl-C.
_OPEN_AT_MOST = 64
_open: dict[str, Library] = {}
_opening = threading.Lock()


def _keep_open(key: str, library: Library) -> Library:
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


def library_of(kernel: Kernel, plan: Plan, build: str | None) -> Library:
    """The library of a plan; build: None, a check, or "debug".

    Where it may, a library has the names of `places` in it and not those of folders, and is the same wherever its files lie: a copy of
    them, as a new checkout has, finds it compiled. A debugger and AddressSanitizer need the folders.
    """
    products = HOST / "fa" / "tensor_core.cuh" in include_closure(kernel.path)
    unit = translation_unit(kernel, max(launch.shared for launch in plan.launches) if build == "debug" else 0)
    found_in = _includes(kernel.path.parent)
    flags = [
        *_FLAGS,
        *_dialect(),
        *_locals_start(),
        *(f"-D{name}={value}" for name, value in (*plan.macros, ("FA_HOST_SM", tensor_core()))),
    ]
    compiled = "{dir}/unit.o" if _clang() else "{dir}/unit.s"
    link = ["-shared", "{dir}/front.s", compiled, "{dir}/behind.s", "-o", "{dir}/out.so"]
    anywhere = build in (None, "race", "banks") and "=" not in f"{kernel.path.parent}{HOST}"  # which would end a folder's name in the flag
    if anywhere:
        found_in += [f"-ffile-prefix-map={folder}/={name}/" for name, folder in places(kernel.path).items()]
    if build == "race":  # instrumented accesses without the sanitizer's library: the engine takes the calls
        flags += [
            "-O1",
            "-fno-tree-sra",
            "-g1",
            "-gdwarf-4",
            "-fsanitize=thread",
        ]  # DWARF 5 of gcc 12 takes an included kernel for the unit
    elif build == "banks":  # the same; a vector of 16 bytes stays one access, which clang splits wherever it optimises
        flags += [*(("-O0", "-fno-sanitize=undefined") if _clang() else ("-O1", "-fno-tree-sra")), "-g1", "-gdwarf-4", "-fsanitize=thread"]
    elif build == "asan":
        flags += ["-O1", "-g1", "-gdwarf-4", "-fsanitize=address"]
        if not _clang():  # checks as calls: a kernel compiles in a third to a half of the time, and runs a tenth longer
            flags.append("--param=asan-instrumentation-with-call-threshold=0")
        link.append("-fsanitize=address")
    elif build == "debug":
        flags += [*_DEBUG, *(("-fdebug-macro",) if _clang() else ())]
    else:  # -O3 compiles for two to five times as long, and a launch is at most a sixth faster: most of it is the engine's
        flags.append("-O1")
    text = [unit.replace(str(kernel.path), "".join(places(kernel.path)) + kernel.path.name)] if anywhere else [unit, *found_in]
    key = _hash(*text, *GUARDS.values(), kernel.source_hash, _toolchain(), _words(), *flags)
    if library := _open.get(key):
        return library
    compile_ = [*_QUIET, *flags, *found_in, "-c" if _clang() else "-S", "{dir}/unit.cpp", "-o", compiled]
    engine()  # before a library that needs its symbols
    if products:
        with _loading:
            _tensor_core(tensor_core())
    wanted = ["fa_host_static_shared", *(f"fa_host_entry_{name}" for name in kernel.entries)]

    def set_locals(scratch: Path) -> None:
        file = scratch / "unit.s"
        own = [without_comments(each.read_text(encoding="utf-8-sig", errors="replace")) for each in user_files(kernel.path)]
        file.write_bytes(starting_as_nan(file.read_bytes().decode("latin-1"), "\n".join([*own, *flags])).encode("latin-1"))

    def built(key: str, *more: str) -> cache.Opened:
        steps: list[Sequence[str] | Callable[[Path], None]] = [[*more, *compile_], link]
        if _locals_start() and not _clang():
            steps.insert(1, set_locals)
        return cache.library(key, compiler(), steps, {"unit.cpp": unit, **GUARDS}, wanted, kernel)

    lines = None if build else lambda: built(_hash(key, "lines"), "-g1", "-gdwarf-4").path
    return _keep_open(key, Library(built(key), kernel, lines))


def places(path: Path) -> dict[str, Path]:
    """By which names compiled code calls the folders of its files (its words say where they stand): a report has them replaced.

    Absolute, or addr2line puts the folder before them in which the compiler ran. Of those that fit compilers take the last, or the longest.
    """
    return {"/<kernel>": path.parent, "/<include>": INCLUDE, "/<host>": HOST}


def extension(source: Path, flags: Sequence[str], versions: str, wanted: Sequence[str], compiled: bool) -> ctypes.CDLL | None:
    """A C++ file that is no kernel, as a loaded library. versions: of what else it is made of, as headers of others.

    None where it is not in the cache and is not to be compiled. Raises as cache.library does.
    """
    text = source.read_text(encoding="utf-8")
    key = _hash("extension", text, versions, _toolchain())
    if not compiled and not (cache_dir() / "host" / key[:2] / f"{key}.so").exists():
        return None
    step = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", str(source), "-o", "{dir}/out.so", *flags]
    return cache.library(key, compiler(), [step], {}, wanted).dll


def _includes(folder: Path) -> list[str]:
    """Where a file of a folder finds what it includes."""
    return [f"-I{HOST}", f"-I{INCLUDE}", f"-I{folder}", "-include", str(HOST / "cuda.hpp")]


@functools.cache
def _words() -> str:
    """What compiled kernels depend on besides their own text, and how gcc's are changed."""
    return _hash(*(file.read_text() for file in (HOST / "cuda.hpp", HOST / "engine.hpp", Path(__file__).with_name("unset.py"))))
