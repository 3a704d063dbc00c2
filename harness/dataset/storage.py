"""The storage types of tensors: exact widening, rounding to nearest even, tf32. The same on numpy and cupy.

bfloat16 is ml_dtypes.bfloat16 on numpy and its bits in uint16 on cupy, which has no such type.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ..array import Array, ArrayModule

#: The numpy dtype of each storage type.
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def widen(xp: ArrayModule, array: Array, dtype: str, to: str = "float64") -> Array:
    """A storage array as float64 (or `to`), exactly. bfloat16 may be ml_dtypes.bfloat16 or its bits in uint16."""
    if dtype == "bfloat16":
        bits = array if array.dtype == np.uint16 else array.view(np.uint16)
        array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        return array.astype(to, copy=False)


def round_to(xp: ArrayModule, array: Array, dtype: str) -> Array:
    """An array rounded to nearest, ties to even, in a storage type. bfloat16 is ml_dtypes.bfloat16 on numpy, uint16 bits on cupy."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(dtype, copy=False)
    single = array.astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    half = xp.where(xp.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)
    if xp is not np:
        return half
    return half.view(ml_dtypes.bfloat16)


def through(xp: ArrayModule, array: Array, dtype: str) -> Array:
    """An array rounded to a storage type, in its own type again."""
    if np.dtype(array.dtype).name == dtype:
        return array
    if xp is not np and array.dtype == np.float32 and dtype == "bfloat16":
        return _bfloat16_on_gpu(xp, array)
    return widen(xp, round_to(xp, array, dtype), dtype, str(array.dtype))


def _bfloat16_on_gpu(xp: Any, array: Array) -> Array:
    found: Array = _bfloat16_kernel(xp)(array)
    return found


@functools.cache
def _bfloat16_kernel(xp: Any) -> Any:
    """As :func:`round_to` and :func:`widen`, in one pass over memory: the baselines round every P and dS."""
    code = "unsigned int u = __float_as_uint(x); y = __uint_as_float(isnan(x) ? 0x7FC00000u : (u + 0x7FFF + (u >> 16 & 1)) & ~0xFFFFu)"
    return xp.ElementwiseKernel("float32 x", "float32 y", code, "through_bfloat16")


def tf32(xp: ArrayModule, array: Array) -> Array:
    """A float32 array rounded to the 10 mantissa bits of tf32, ties away from zero, as PTX's cvt.rna.tf32.f32 does."""
    rounded = ((array.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return xp.where(xp.isfinite(array), rounded, array)
