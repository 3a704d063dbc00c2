"""NVRTC without a GPU or a driver: the options of every CUDA compile, and the resources of a compiled kernel.

`options` is the only place of compile options: cuda.py passes them to cupy.RawModule, `compile_` to NVRTC itself. So `fa-cli compile`
on a machine without a GPU compiles the code that a GPU runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..fault import DataFault, EnvironmentFault, install_extra
from ..files import read_json
from ..kernel import INCLUDE, Kernel, Plan
from .protocol import CompileError, cache_dir

#: Architectures the project compiles for, with the most shared memory (bytes) one block may have on each.
#: Source: the CUDA C++ Programming Guide's table of technical specifications per compute capability.
SHARED_LIMIT = {
    "sm_70": 96 << 10,
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}

#: CuPy adds these to every compile (and -arch, where the caller gives none). compile_ adds the same, for the same code. They are not in
#: `options`: some NVRTC versions refuse an option given twice.
CUPY_ADDS = ("-ftz=true", "--device-as-default-execution-space")

#: How ptxas reports, as a note or a warning by version, that it serialised wgmma: the kernel is then several times slower.
SLOW = "Potential Performance Loss"
#: That, and an error of ptxas in the code of a kernel: the same for the same source, whatever else is wrong with a machine.
_REFUSED = re.compile(rf"{SLOW}|^ptxas application ptx input, line \d+; error", re.M)


@dataclass(frozen=True)
class Usage:
    """The resources of one function, from ptxas: registers, stack and spill bytes per thread; static shared memory bytes per block."""

    registers: int = 0
    stack_bytes: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture. cubin is empty where it comes from the cache of `resources`."""

    arch: str
    nvrtc: str  # version
    usage: Mapping[str, Usage]  # per function: entries, and device functions that were not inlined
    log: str
    seconds: float
    cubin: bytes = b""

    @property
    def registers(self) -> int:
        """Registers per thread: the maximum over the functions."""
        return max(u.registers for u in self.usage.values())

    @property
    def spill_bytes(self) -> int:
        """Bytes spilled per thread: the maximum over the functions, of stores or loads, whichever are more."""
        return max(max(u.spill_stores, u.spill_loads) for u in self.usage.values())

    @property
    def stack_bytes(self) -> int:
        """Bytes of stack frame per thread: the maximum over the functions. It holds spills, and arrays that are not in registers."""
        return max(u.stack_bytes for u in self.usage.values())


def has_local_arrays(stack_bytes: int | None, spill_bytes: int | None) -> bool:
    """Whether a stack frame, which is a multiple of 8 bytes, holds more than spills."""
    return (stack_bytes or 0) > ((spill_bytes or 0) + 7) // 8 * 8


#: What it then holds. Local memory is as slow as global memory.
WHY_LOCAL = "an array indexed at run time, or passed to a function that is not inlined, is not in registers"


def options(kernel: Kernel, plan: Plan, arch: str | None, debug: bool = False) -> tuple[str, ...]:
    """The compile options of a kernel's plan, for cupy.RawModule and for `compile_` alike.

    arch: "sm_90a" and the like; None leaves the choice to CuPy (the device's own). debug: for cuda-gdb, nothing is optimised. The hash
    of the include closure is an option because CuPy's cache key leaves out included headers: without it an edited header would run a
    stale kernel. There is no fast-math, which would change a kernel's plain expressions; words that approximate have it in their names.
    """
    given = [
        "-std=c++17",
        f"-I{INCLUDE}",
        f"-I{kernel.path.parent}",
        "-G" if debug else "-lineinfo",
        f"-DFA_SOURCE_HASH=0x{kernel.source_hash}",
    ]
    given += [f"-D{name}={value}" for name, value in plan.macros]
    if arch is not None:
        given.append(f"-arch={arch}")
    return tuple(given)


def pinned_arch(kernel: Kernel, dtype: str) -> str | None:
    """The one architecture of a header's exact rule ("sm_90a", whose instructions exist only there); None for a rule like ">=sm_80"."""
    rule = kernel.arch_for(dtype)
    return None if rule.startswith(">=") else rule


def admits(kernel: Kernel, dtype: str, arch: str) -> bool:
    """Whether a kernel's header admits a compile for an architecture. An exact rule admits only that one."""
    exact = pinned_arch(kernel, dtype)
    return arch == exact if exact else kernel.runs_on(arch, dtype)


def version() -> str:
    """The version of the NVRTC in use, "13.0". Raises EnvironmentFault where there is none."""
    return _nvrtc().version


def architectures() -> tuple[str, ...]:
    """The project's architectures that this NVRTC compiles for (NVRTC 13 has no sm_70)."""
    return tuple(arch for arch in SHARED_LIMIT if int(re.sub(r"\D", "", arch)) in _nvrtc().supported)


def compile_(kernel: Kernel, plan: Plan, arch: str) -> Compiled:
    """Compile a kernel's plan to a cubin for an architecture; no GPU or driver is touched.

    Raises CompileError with NVRTC's log, whose lines name the kernel's real file and line (also where ptxas reports
    that it serialised wgmma), and EnvironmentFault where there is no NVRTC.
    """
    nvrtc = _nvrtc()
    given = (*options(kernel, plan, arch), *CUPY_ADDS, "--ptxas-options=-v", *_cuda_headers())
    start = time.perf_counter()
    ok, log, cubin = nvrtc.compile(kernel.path.read_text(encoding="utf-8-sig"), str(kernel.path), given)
    seconds = time.perf_counter() - start
    usage = _usage(log)
    if ok and not usage:
        log = f"{kernel.path}:1: it holds no __global__ function\n{log}"
    if not ok or SLOW in log or not usage:
        raise CompileError(kernel, ("nvrtc", *given, str(kernel.path)), log)
    return Compiled(arch, nvrtc.version, usage, log, seconds, cubin)


def resources(kernel: Kernel, plan: Plan, arch: str) -> Compiled:
    """The result of `compile_` without its cubin, cached on disk by source hash, options and NVRTC version.

    So is what ptxas refuses, after seconds of code generation; the front end, which may miss a file of another day, is asked again.
    A cache that cannot be read or written is ignored. Raises as `compile_` does.
    """
    key = "\0".join((kernel.source_hash, version(), *options(kernel, plan, arch)))
    file = cache_dir() / "resources" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        saved = read_json(file)  # a regular file: a FIFO there does not block
        refused = saved.get("refused")
        if isinstance(refused, str):
            raise CompileError(kernel, ("nvrtc", *options(kernel, plan, arch), str(kernel.path)), refused)
        saved["usage"] = {name: Usage(**used) for name, used in saved["usage"].items()}
        return Compiled(**saved)
    except (DataFault, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # missing, or not in this format
    try:
        compiled = replace(compile_(kernel, plan, arch), cubin=b"")
    except CompileError as error:
        if _REFUSED.search(error.log):
            _write(file, json.dumps({"refused": error.log}))
        raise
    record = asdict(compiled)
    del record["cubin"]
    _write(file, json.dumps(record))
    return compiled


def _write(file: Path, text: str) -> None:
    try:
        for folder in (file.parent.parent, file.parent):  # the cache is this user's alone: libraries in it are executed
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as out:
            out.write(text)
        os.replace(out.name, file)  # atomic, also with several writers
    except OSError:
        pass


# -- ptxas's log ------------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"(?:Compiling entry function '|Function properties for )([\w$.]+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


def _usage(log: str) -> dict[str, Usage]:
    """The resources of each function in a `ptxas -v` log. Empty where the log names none."""
    usage: dict[str, Usage] = {}
    name = ""
    for line in log.splitlines():
        if function := _FUNCTION.search(line):
            name = function[1]
            usage.setdefault(name, Usage())
        elif stack := _STACK.search(line):
            usage[name] = replace(usage[name], stack_bytes=int(stack[1]), spill_stores=int(stack[2]), spill_loads=int(stack[3]))
        elif used := _USED.search(line):
            shared = _SMEM.search(line)
            usage[name] = replace(usage[name], registers=int(used[1]), shared_bytes=int(shared[1]) if shared else 0)
    return usage


# -- the library, through whichever binding is installed --------------------------------------------------------------


class _Nvrtc(Protocol):
    version: str
    supported: frozenset[int]

    def compile(self, source: str, name: str, given: Sequence[str]) -> tuple[bool, str, bytes]: ...


class _Bindings:
    """NVRTC through NVIDIA's cuda-bindings, which finds the library in a wheel, a conda environment or a toolkit."""

    def __init__(self) -> None:
        from cuda.bindings import nvrtc

        self._api: Any = nvrtc  # no types, here and in _Cupy
        major, minor = self._call("nvrtcVersion")
        self.version = f"{major}.{minor}"
        self.supported = frozenset(self._call("nvrtcGetSupportedArchs")[0])

    def _call(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(self._api, function)(*arguments)
        if status != self._api.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function}: {status.name}")
        return tuple(values)

    def _bytes(self, what: str, program: Any) -> bytes:
        buffer = bytes(self._call(f"nvrtcGet{what}Size", program)[0])  # the bindings fill it in place
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer

    def compile(self, source: str, name: str, given: Sequence[str]) -> tuple[bool, str, bytes]:
        (program,) = self._call("nvrtcCreateProgram", source.encode(), os.fsencode(name), 0, [], [])
        try:
            (status,) = self._api.nvrtcCompileProgram(program, len(given), [os.fsencode(o) for o in given])
            ok = status == self._api.nvrtcResult.NVRTC_SUCCESS
            log = self._bytes("ProgramLog", program).replace(b"\0", b"").decode(errors="replace").strip()
            return ok, log, self._bytes("CUBIN", program) if ok else b""
        finally:
            self._call("nvrtcDestroyProgram", program)


class _Cupy:
    """NVRTC through the binding inside CuPy, for an environment that has CuPy and not cuda-bindings."""

    def __init__(self) -> None:
        from cupy_backends.cuda.libs import nvrtc

        self._api: Any = nvrtc
        major, minor = nvrtc.getVersion()
        self.version = f"{major}.{minor}"
        self.supported = frozenset(nvrtc.getSupportedArchs())

    def compile(self, source: str, name: str, given: Sequence[str]) -> tuple[bool, str, bytes]:
        program = self._api.createProgram(source, name, (), ())
        try:
            try:
                self._api.compileProgram(program, given)
            except self._api.NVRTCError:
                return False, self._api.getProgramLog(program).strip(), b""
            return True, self._api.getProgramLog(program).strip(), self._api.getCUBIN(program)
        finally:
            self._api.destroyProgram(program)


@functools.cache
def _nvrtc() -> _Nvrtc:
    reasons = []
    for binding in (_Bindings, _Cupy):
        try:
            return binding()
        except Exception as error:  # a missing module or library, or any error of loading a broken one
            reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise EnvironmentFault(
        "NVRTC, NVIDIA's run-time compiler, is not installed",
        "neither cuda-bindings nor CuPy can load it: " + "; ".join(dict.fromkeys(reasons)),
        f"pip install cuda-bindings nvidia-cuda-nvrtc; on a machine with a GPU: {install_extra('cuda12')}",
    )


@functools.cache
def _cuda_headers() -> tuple[str, ...]:
    """-I of CUDA's own headers where they are found: for a user's file that includes <cuda_fp16.h>. CuPy adds them itself."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
    except Exception:  # not installed, or too old: our own kernels need no such header
        return ()
    return (f"-I{folder}",) if folder else ()
