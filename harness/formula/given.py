"""The values of a named tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .mistake import Mistake


@dataclass(frozen=True)
class Given:
    """A named tensor of a mask or score. Two are equal where all but `values` is.

    dtype: int32 in a mask, float32 in a score. digest: of the values; empty where each call gives its own (the operator). sorted: no row
    of it falls, so that a tile's values lie between those of its ends. values: a numpy array that is not written to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""
    sorted: bool = False
    values: Any = field(default=None, compare=False, repr=False)


def checked(name: str, dtype: str, shape: tuple[int, ...], values: object) -> Given:
    """A named tensor of this type and shape. values: as numpy.asarray takes them, or a Given; None: each call gives its own.

    Raises Mistake where they are not of that type and shape.
    """
    if isinstance(values, Given):
        if (values.dtype, values.shape) == (dtype, shape):
            return values
        values = values.values
    if values is None:
        return Given(name, dtype, shape)
    import hashlib

    import numpy as np  # --help starts without it

    array = np.asarray(values)
    whole = dtype == "int32"
    if array.shape != shape:
        raise Mistake(
            f"{name} has the shape {array.shape}",
            f"the text asks for {shape}",
            "give it that shape; lengths and heads are those of the problem",
        )
    if array.dtype.kind not in ("biu" if whole else "biuf"):
        raise Mistake(f"{name} is of {array.dtype}", f"a {'mask' if whole else 'score'} takes {dtype}", "convert it")
    if whole and array.size and not (int(array.min()) > -(2**31) and int(array.max()) < 2**31):
        raise Mistake(f"{name} has values beyond 32 bits", "a mask takes int32", "use smaller integers")
    kept = np.array(array, dtype, order="C")
    kept.flags.writeable = False
    rises = whole and bool((kept[..., 1:] >= kept[..., :-1]).all())
    return Given(name, dtype, shape, hashlib.sha256(kept.tobytes()).hexdigest(), rises, kept)
