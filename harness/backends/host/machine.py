"""The processor that stands in for a GPU: its name, the cores that kernels may use, and device memory.

Device memory is mapped between inaccessible pages, so an access far out of bounds is a fault that names its thread. On the heap such a
write would corrupt Python itself, which then crashes without a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
from functools import cache
from pathlib import Path

import numpy as np

from ...array import Bytes
from ...fault import UsageFault, clipped

#: Bytes of inaccessible pages on each side of a buffer: address space only, no memory.
FENCE = 16 << 20
_NOTHING = 0  # PROT_NONE, which mmap has no name for


def threads() -> int:
    """How many cores to use: FA_CLI_THREADS, or all of this process's. Raises UsageFault where that is no integer of 1 to 999999."""
    asked = os.environ.get("FA_CLI_THREADS") or str(len(os.sched_getaffinity(0)))
    if not re.fullmatch(r"0*[1-9]\d{0,5}", asked, re.ASCII):
        raise UsageFault(
            f"FA_CLI_THREADS is {clipped(asked, 40)!r}", "it is how many cores the CPU engine uses, 1 or more", "unset it to use all"
        )
    return int(asked)


def tensor_core() -> int:
    """Whose tensor core's arithmetic mma and wmma have: FA_CLI_TENSOR_CORE, 80 or 90 (the default). Raises UsageFault for another."""
    asked = os.environ.get("FA_CLI_TENSOR_CORE") or "sm_90"
    if asked not in ("sm_80", "sm_90"):
        why = "sm_80 is the arithmetic of sm_80 to sm_89, sm_90 that of sm_90 and later"
        raise UsageFault(f"FA_CLI_TENSOR_CORE is {asked[:40]!r}", why, "unset it for sm_90")
    return int(asked[3:])


@cache
def processor() -> str:
    """The processor's model name, from /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        if model := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return model[1]
    return platform.machine()


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def fenced(size: int) -> Bytes:
    """`size` zero bytes between inaccessible pages, unmapped when the array and its views are gone. Raises MemoryError."""
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, pages + 2 * FENCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes: {error.strerror}") from None
    whole = np.frombuffer(memory, np.uint8)
    for start in (0, FENCE + pages):
        if _libc().mprotect(whole.ctypes.data + start, FENCE, _NOTHING):
            raise MemoryError(f"no fence around {size} bytes: errno {ctypes.get_errno()}")
    return whole[FENCE : FENCE + size]


def protect(buffer: Bytes, frozen: bool) -> None:
    """Make all pages of an array that `fenced` gave read-only, or writable again."""
    pages = -(-buffer.size // mmap.PAGESIZE) * mmap.PAGESIZE
    allowed = mmap.PROT_READ if frozen else mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mprotect(buffer.ctypes.data, pages, allowed):
        raise MemoryError(f"the protection of {buffer.size} bytes cannot be changed: errno {ctypes.get_errno()}")
