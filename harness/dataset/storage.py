"""The storage types of tensors: exact widening, rounding to nearest even, tf32. The same on numpy and cupy.

bfloat16 is ml_dtypes.bfloat16 on numpy and its bits in uint16 on cupy, which has no such type; float8_e4m3 likewise, in uint8.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ..array import Array, ArrayModule, to_host

#: The numpy dtype of each storage type.
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
#: The number of each byte of float8_e4m3, and its largest.
_OF_BYTE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E4M3_MAX = 448.0


def widen(xp: ArrayModule, array: Array, dtype: str, to: str = "float64") -> Array:
    """A storage array as float64 (or `to`), exactly. bfloat16 may be ml_dtypes.bfloat16 or its bits in uint16."""
    if dtype == "bfloat16":
        bits = array if array.dtype == np.uint16 else array.view(np.uint16)
        array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e4m3":
        array = xp.asarray(_OF_BYTE)[array.view(np.uint8)]
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        return array.astype(to, copy=False)


def round_to(xp: ArrayModule, array: Array, dtype: str) -> Array:
    """An array rounded to nearest, ties to even, in a storage type. bfloat16 is ml_dtypes.bfloat16 on numpy, uint16 bits on cupy."""
    if dtype == "float8_e4m3":
        return xp.asarray(_saturated(to_host(array)) if xp is np else _saturated(to_host(array)).view(np.uint8))
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


def _saturated(array: Array) -> Array:
    """As cvt.rn.satfinite.e4m3x2.f32 rounds: beyond the largest number it is that one."""
    with np.errstate(invalid="ignore"):
        rounded: Array = np.clip(array, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return rounded


def through_e4m3(xp: ArrayModule, array: Array) -> Array:
    """A float32 array rounded to float8_e4m3 and saturated, in float32."""
    with np.errstate(invalid="ignore"):
        kept = xp.minimum(xp.maximum(array, -E4M3_MAX), E4M3_MAX)
    unit = xp.maximum(xp.frexp(kept)[1] - 1, -6)
    unit = ((unit + (127 - 3)).astype(np.uint32) << np.uint32(23)).view(np.float32)
    rounded: Array = xp.rint(kept / unit) * unit
    return rounded


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
