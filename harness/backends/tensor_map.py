"""fa::TensorMap, 128 bytes: what TMA knows of a tensor. A GPU's is opaque and written by the driver; the CPU's is plain fields.

The driver is called through ctypes: no package but it is needed, and the map must lie 64-byte aligned where it writes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from ..fault import EnvironmentFault, KernelFault
from ..kernel.plan import TensorMap
from ..problem import DTYPE_BYTES

#: fa_host::TensorMap of kernels_cu/host/tensor_map.hpp, byte for byte. Strides in bytes, of dimensions 1 to 4; the swizzle's span in bytes.
HOST = np.dtype(
    {
        "names": ["base", "stride", "dim", "box", "rank", "element_bytes", "swizzle", "type", "magic"],
        "formats": ["<u8", ("<u8", (4,)), ("<u4", (5,)), ("<u4", (5,)), "<u4", "<u4", "<u4", "<u4", "<u8"],
        "offsets": [0, 8, 40, 60, 80, 84, 88, 92, 96],
        "itemsize": 128,
    }
)
#: "FA TMAP1": tells a map from other bytes.
MAGIC = int.from_bytes(b"FA TMAP1", "little")
_HOST_TYPE = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "float8_e4m3": 5}

#: Values of CUtensorMapDataType and CUtensorMapSwizzle of cuda.h.
_CUDA_TYPE = {"float8_e4m3": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_CUDA_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_128B = 2


def check(map_: TensorMap, address: int, strides: tuple[int, ...]) -> None:
    """Raise KernelFault where TMA cannot address a tensor: cuTensorMapEncodeTiled would only say "invalid value"."""
    wrong = ""
    if address % 16:
        wrong = f"its address {address:#x} is not 16-byte aligned"
    elif odd := [stride for stride in strides if stride % 16 or not 0 <= stride < 1 << 40]:
        wrong = f"a stride of {odd[0]} bytes is no multiple of 16 below 2^40"
    if wrong:
        hint = "give it rows that start 16-byte aligned, or use another kernel: fa-cli list"
        raise KernelFault(f"TMA cannot read {map_.tensor} through tensor_map {map_.name}", wrong, hint)


@lru_cache(maxsize=1024)
def for_host(map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
    """The CPU's map of a tensor. Raises as check does."""
    check(map_, address, strides)
    made = np.zeros((), HOST)
    made["base"], made["magic"], made["rank"], made["swizzle"] = address, MAGIC, len(map_.dims), map_.swizzle
    made["type"], made["element_bytes"] = _HOST_TYPE[map_.dtype], DTYPE_BYTES[map_.dtype]
    for field, values in (("stride", strides), ("dim", map_.dims), ("box", map_.box)):
        made[field][: len(values)] = values
    return made.tobytes()


@lru_cache(maxsize=1024)
def for_cuda(map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
    """The driver's map of a tensor (cuTensorMapEncodeTiled; out of bounds it gives zeros). Raises as check does."""
    check(map_, address, strides)
    rank = len(map_.dims)
    room = np.zeros(128 + 64, np.uint8)
    start = -room.ctypes.data % 64
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(room.ctypes.data + start),
        _CUDA_TYPE[map_.dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*map_.dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*map_.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # every element of a row
        0,  # not interleaved
        _CUDA_SWIZZLE[map_.swizzle],
        _L2_PROMOTION_128B,
        0,  # zeros, not NaN, out of bounds
    )
    if result:
        why = f"cuTensorMapEncodeTiled answers {result} to dims {map_.dims}, strides {strides} bytes, box {map_.box}"
        raise KernelFault(
            f"the driver refuses tensor_map {map_.name}", f"{why}, swizzle {map_.swizzle}", "correct it in the kernel's header"
        )
    return room[start : start + 128].tobytes()


def movable_for_cuda(map_: TensorMap, strides: tuple[int, ...]) -> tuple[memoryview, Callable[[int], None]]:
    """Backend.movable_map of a GPU: cuTensorMapEncodeTiled once, then cuTensorMapReplaceAddress, which costs a tenth of it."""
    memory = bytearray(128 + 64)
    start = -ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory)) % 64
    room = memoryview(memory)[start : start + 128]
    at = ctypes.addressof((ctypes.c_char * 128).from_buffer(room))
    encoded = False

    def move(address: int) -> None:
        nonlocal encoded
        if not encoded or _driver().cuTensorMapReplaceAddress(at, address):
            encoded = False
            room[:] = for_cuda(map_, address, strides)  # says what is wrong with an address that the driver refuses
            encoded = True

    return room, move


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuTensorMapEncodeTiled.restype = ctypes.c_int
        library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise EnvironmentFault("no tensor maps", f"the NVIDIA driver has no cuTensorMapEncodeTiled: {error}", "fa-cli doctor") from None
    return library
