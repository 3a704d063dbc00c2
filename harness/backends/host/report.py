"""The findings of the CPU engine's checks as messages: code addresses become file and line, AddressSanitizer's report three lines."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...fault import EnvironmentFault, Fault, KernelFault, clipped
from ...files import child
from ...kernel import Kernel
from .build import places
from .library import same_code
from .shared import with_arrays

#: What :func:`named` writes.
_NAMED = re.compile(r"\x1f([^\x1f\n]+)\x1f([^\x1f\n]*)\x1f([0-9a-f]+)\x1f(\d+)\n")
#: A code address in a report of the engine.
_PC = r"pc:(0x[0-9a-f]+)"
ASAN_CHILD = "FA_CLI_ASAN_CHILD"  # set in the child process that has AddressSanitizer loaded
_SANITIZER_EXIT = 86


#: What a report says -> what to do.
_HINTS = {
    "write outside": "fa-cli run --check asan names the line",
    "divergent barrier": "every thread of the block must reach the same __syncthreads(): take it out of the if, return after the last one",
    "divergent collective": "all lanes of the mask must call the same function: take the call out of the if",
    "lane outside its own mask": "let each lane that calls be in the mask, as in __activemask() or 0xffffffff",
    "deadlock": "the lines above say what each group waits for: look for the arrive, the copy or the barrier that is missing",
    "no barrier orders them": "put __syncthreads() between the two accesses (__syncwarp() within one warp); in a loop also before its end, "
    "so that no thread begins the next iteration too early",
    "no dependency_wait": "call fa::dependency_wait() before, in this thread or before a barrier with one that has",
    "no bulk_wait": "call fa::bulk_wait<0>() behind the copy, in the thread that began it, before others are told",
    "race on global": "one block tells another: a thread that is behind the access (a barrier) calls __threadfence(), then an atomic; a thread "
    "of the other reads it by an atomic, calls __threadfence(), and a barrier joins the rest; or both add by atomicAdd",
    "may be in flight when": "call fa::fence_proxy_async_shared() in each reader behind the read, before mbarrier_arrive_remote",
    "fence_proxy_async_shared": "call fa::fence_proxy_async_shared() after the write, before the barrier that the reader waits at",
    "outside shared memory": "shared, below [[launch]] in the header, is the bytes of dynamic shared memory of a block",
    "illegal memory access": "an index is out of bounds or a pointer was not set: fa-cli run --check asan names the tensor",
    "stack overflow": "use smaller local arrays: a GPU has 255 registers for a thread, and the rest is slow",
}


class CheckFault(KernelFault):
    """The race check or AddressSanitizer found a fault in a kernel. A failed check: exit code 1."""

    exit_code = 1


def failure(
    outcome: int,
    report: str,
    library: Path,
    lines: Callable[[], Path] | None,
    kernel: Kernel,
    entry: str,
    macros: Sequence[tuple[str, str]] = (),
) -> BaseException:
    """The exception for an outcome of the engine that is not ok (enum Outcome of engine.hpp). macros: those of the plan."""
    if outcome == 3:
        return KeyboardInterrupt()
    if outcome == 4:
        return EnvironmentFault(
            f"no memory to run {kernel.label} on the CPU engine", report, "raise the limit (ulimit -v), or FA_CLI_THREADS=1"
        )
    why = with_lines(report, library, lines).strip()
    why = with_arrays(with_folders(why, kernel), library, kernel, macros)
    fault, what = (CheckFault, f"races on {_raced(why)} memory") if outcome == 2 else (KernelFault, "stopped on the CPU engine")
    hint = next((hint for sign, hint in _HINTS.items() if sign in report), f"fa-cli run {kernel.spec} --device cpu --debug starts gdb")
    return fault(f"{kernel.label}: {what} in {entry}", why, hint)


def _raced(report: str) -> str:
    return " and ".join(kind for kind in ("shared", "global") if f"race on {kind} memory" in report) or "shared"


def with_lines(report: str, library: Path, lines: Callable[[], Path] | None = None) -> str:
    """The engine's report with code addresses (pc:0x…) replaced by file:line. Races of the same lines on one tensor are one."""
    addresses = list(dict.fromkeys(re.findall(_PC, report)))
    kernel, inner = (dict(zip(addresses, lines_of(addresses, library, lines, deep), strict=False)) for deep in (False, True))
    told: dict[object, str] = {}
    for number, line in enumerate(report.splitlines(keepends=True)):
        found = re.findall(_PC, line)
        # where all are in one function that the kernel calls, the lines in it say more than that of the call
        places = inner if len(found) > 1 and len({kernel.get(each) for each in found}) == 1 else kernel
        key = (line.partition("[")[0], *map(places.get, found)) if line.startswith("race on global memory") else number
        told.setdefault(key, _placed(line, places))
    return "".join(told.values())


def _placed(line: str, places: Mapping[str, str]) -> str:
    return re.sub(_PC, lambda pc: places.get(pc[1], pc[0]), line)


def lines_of(addresses: Sequence[str], library: Path, lines: Callable[[], Path] | None = None, deep: bool = False) -> list[str]:
    """The file:line of each code address (0x…), through addr2line; empty where that is not known.

    lines: builds the same library with line numbers, where it has none. deep: in the header whose code it is, where that is no word's.
    """
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(library))]
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not addresses or not mappings or tool is None:
        return []
    base = int(mappings[0].split("-")[0], 16)
    # the return address lies after the call; one that is not in the library (a call of a null pointer) has no line
    offsets = [hex(max(int(a, 16) - base - 1, 0)) for a in addresses]
    if lines:
        with suppress(Fault):
            built = lines()
            library = built if same_code(built, library) else library
    done = subprocess.run([tool, "-a", "-i", "-e", str(library), *offsets], capture_output=True, text=True, check=False)
    found: list[str] = []
    for block in re.split(r"^0x[0-9a-f]+\n", done.stdout, flags=re.M)[1:]:
        known = (line.split(" (")[0] for line in block.splitlines())  # without -g there is no line, or that of our launcher
        frames = [frame for frame in known if not re.match(r"\?\?|.*entries of ", frame)]
        # the innermost frame in a kernel file: words are inlined into it, and so are its lambdas and functions, where the access is
        kernel = next((f for f in frames if ".cu:" in f), frames[-1] if frames else "a line that --check asan names")
        found.append(next((f for f in frames if not f.startswith("/<host>")), kernel) if deep else kernel)
    return found


def with_folders(text: str, kernel: Kernel) -> str:
    """A text in which files have their folders (build.places)."""
    for name, folder in places(kernel.path).items():
        text = text.replace(f"{name}/", f"{folder}/")
    return text


def asan_environment(compiler: Sequence[str]) -> dict[str, str]:
    """The environment of a child process that has AddressSanitizer loaded. Raises EnvironmentFault where the compiler has none."""

    def file_of(name: str) -> str:
        told = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()
        return told if Path(told).is_absolute() else ""

    # gcc's first: it finds lines without llvm-symbolizer
    runtime = file_of("libasan.so") or file_of(f"libclang_rt.asan-{platform.machine()}.so")
    if not runtime:
        why = f"{' '.join(compiler)} has no libasan.so"
        raise EnvironmentFault("no AddressSanitizer library", why, "apt install libasan8, or use --check race")
    options = f"detect_leaks=0:detect_stack_use_after_return=0:exitcode={_SANITIZER_EXIT}:abort_on_error=0"
    # AddressSanitizer looks for __cxa_throw where it starts, and ends the process at any C++ exception (matplotlib has them) without it
    preload = " ".join(filter(None, (runtime, file_of("libstdc++.so.6"))))
    return {"LD_PRELOAD": preload, "ASAN_OPTIONS": options, ASAN_CHILD: "1", "PYTHONMALLOC": "malloc"}


def child_with_asan(compiler: Sequence[str], arguments: Sequence[str]) -> int:
    """Run this command again in a child process with AddressSanitizer loaded, and return its exit code.

    Raises CheckFault, with the line, for an access out of bounds, EnvironmentFault where the compiler has no AddressSanitizer and where
    AddressSanitizer itself stopped.
    """
    code, told = child.again(arguments, asan_environment(compiler), errors=True)
    names = {int(start, 16): (name, shape, int(size)) for name, shape, start, size in _NAMED.findall(told)}  # the last one there
    told = _NAMED.sub("", told)
    if code != _SANITIZER_EXIT:
        sys.stderr.write(told)
        return code
    error = re.search(r"ERROR: AddressSanitizer: (.*)", told)
    if not error:  # a check of its own, of what is not the kernel's
        raise EnvironmentFault("AddressSanitizer stopped, without a finding", clipped(told.strip(), 1000), "use --check race, or none")
    access = re.search(r"^((?:READ|WRITE) of size \d+)", told, re.M)
    stack = told[access.start() if access else 0 :].partition("\n\n")[0]
    # the kernel's line if it is known: words are inlined into it
    place = re.search(r"(\S+\.cu:\d+)", stack) or re.search(r"(\S+\.cuh?:\d+)", told)
    where = place[1] if place else "an unknown line"
    why, hint = _outside(error[1], told, names)
    if error[1].startswith("FPE"):  # no access, but it comes through AddressSanitizer's handler of signals
        raise KernelFault(f"division by zero at {where}", why, "the divisor of an integer division or remainder was 0")
    raise CheckFault(f"out of bounds: {access[1] if access else 'bad access'} at {where}", why, hint)


def named(name: str, shape: tuple[int, ...], address: int, size: int) -> str:
    """A line that tells :func:`child_with_asan` which tensor lies at an address."""
    return f"\x1f{name}\x1f{' x '.join(map(str, shape))}\x1f{address:x}\x1f{size}\n"


def _outside(error: str, told: str, names: Mapping[int, tuple[str, str, int]]) -> tuple[str, str]:
    """Why an access is out of bounds, and what to do: with the tensor that it is next to, where AddressSanitizer knows a region."""
    kind = re.sub(r" (on|at|for|in) .*", "", error)
    found = re.search(r"is located (\d+) bytes (.+?) (?:of )?(\d+)-byte region \[0x([0-9a-f]+),", told)
    if kind == "use-after-poison":  # the engine poisons what lies round a block's shared memory, and nothing else
        return f"{kind}: outside the block's shared memory", "compare the index of that line with the size of the shared array"
    if not found:
        return error, "no tensor is near: look at the pointer of that line, and at an index that is negative or was not set"
    distance, side, size, start = int(found[1]), found[2], found[3], int(found[4], 16)
    side = "after the end of" if side in ("to the right", "after") else "before the start of" if side in ("to the left", "before") else side
    if start not in names:
        return f"{kind}: {distance} bytes {side} a region of {size} bytes that is no tensor of the launch", "look at the index of that line"
    name, shape, whole = names[start]
    what = f"{kind}: {distance} bytes {side} {name}, whose shape is {shape}: {whole} bytes"
    return what, f"compare the index of that line with the shape of {name.removeprefix('workspace ')}"
