"""A launch with an attribute, by cuLaunchKernelEx: one that may begin before the one before it has ended, or whose blocks all run at once.

CuPy has no call for it. Through ctypes it takes 0.6 us more than CuPy's cuLaunchKernel, so no other launch goes this way. In a
stream that is captured the edge between two kernels that overlap is programmatic too (CUDA Programming Guide, Programmatic Dependent Launch).
"""

from __future__ import annotations

import ctypes
from functools import cache

#: CU_LAUNCH_ATTRIBUTE_COOPERATIVE and CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h.
COOPERATIVE, OVERLAPS = 2, 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: its value is a union of 64 bytes, which here begins with an int."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def config(grid: tuple[int, int, int], block: int, shared: int, attribute: int) -> _Config:
    """What launch is given of a kernel's sizes, with an attribute that is set to 1."""
    made = _Config(grid, (block, 1, 1), shared, None, ctypes.pointer(_Attribute(attribute, 0, (1,))), 1)
    made.at = ctypes.byref(made)
    return made


def launch(sizes: _Config, function: int, stream: int, parameters: int) -> int:
    """Enqueue a kernel on a stream; parameters: the address of the pointers to them. Returns the driver's CUresult.

    sizes hold the stream while this runs: they are one thread's.
    """
    sizes.stream = stream
    answer: int = _driver()(sizes.at, function, parameters, None)
    return answer


@cache
def _driver() -> ctypes._NamedFuncPointer:
    launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch_kernel.argtypes = [ctypes.c_void_p] * 4
    return launch_kernel
