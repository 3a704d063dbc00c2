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
from ...fault import UsageFault

#: Bytes of inaccessible pages on each side of a buffer: address space only, no memory.
FENCE = 16 << 20
_NOTHING = 0  # PROT_NONE, which mmap has no name for


def threads() -> int:
    """How many cores to use: FA_CLI_THREADS, or all of this process's. Raises UsageFault where that is not a positive integer."""
    asked = os.environ.get("FA_CLI_THREADS") or str(len(os.sched_getaffinity(0)))
    if not re.fullmatch("0*[1-9][0-9]{0,8}", asked, re.ASCII):
        raise UsageFault(f"FA_CLI_THREADS is {asked!r:.60}", "it is how many cores the CPU backend uses, 1 or more", "unset it to use all")
    return int(asked)


@cache
def processor() -> str:
    """The processor's model name, from /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
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
