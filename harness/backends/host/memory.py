"""The host backend's device memory: pages of its own between fences, so that a wild access is a fault that names its thread.

In the heap a kernel that writes far beyond a tensor would break Python itself, which then dies without a word.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np

#: Bytes before and after that nobody can read or write: address space, not memory.
FENCE = 16 << 20
_NOTHING = 0  # PROT_NONE, which mmap has no name for


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def fenced(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """size bytes of zeros between two fences; given back when the array and its views are gone. Raises MemoryError."""
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
