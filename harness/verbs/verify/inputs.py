"""Families of inputs: what random normal elements do not show, from one-hot rows to subnormal numbers and a NaN among the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...array import Array
from ...dataset import generate
from ...problem import Problem

#: Smaller than the least normal number of the type, so partly lost: elements are multiplied by it.
_SUBNORMAL = {"float16": 2.0**-18, "bfloat16": 2.0**-130, "float32": 2.0**-130, "float64": 2.0**-1030, "float8_e4m3": 2.0**-7}
#: Rows of V so large that bfloat16 and float32 hold them and float16 (up to 65504) does not; in float16, and in 8 bits (448), what it holds.
LARGE_V = {"float16": 2.0**12, "bfloat16": 2.0**20, "float32": 2.0**20, "float64": 2.0**20, "float8_e4m3": 2.0**6}
#: Factors on V at both ends: far beyond float16, and where no bit of an exponent of 1 is left. float16 has no room for the first.
VAST_V = {"bfloat16": 2.0**80, "float32": 2.0**80, "float64": 2.0**80}
TINY_V = {"float16": 2.0**-10, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-23, "float8_e4m3": 2.0**-4}


def inputs(problem: Problem, seed: int, names: Iterable[str], family: str = "randn", factor: float = 1.0) -> dict[str, Array]:
    """The tensors asked for, host storage arrays, of a family; factor multiplies Q and K, and so the scores by its square.

    Every family starts from generate.inputs and changes it. Raises KeyError for an unknown family.
    """
    found = generate.inputs(problem, seed, names, factor)
    FAMILIES[family](problem, np.random.RandomState(seed), found)
    return found


def _randn(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """Standard normal elements."""


def _one_hot(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """Rows of Q and K have one element that is not 0: most scores are 0, few are not, and many are equal."""
    for name in ("Q", "K"):
        array = tensors[name]
        at = random.randint(problem.head_dim, size=(*array.shape[:3], 1))
        kept = np.take_along_axis(array, at, 3)
        array[:] = 0
        np.put_along_axis(array, at, kept, 3)


def _equal_keys(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """All keys of a head are the same: O is the mean of the visible rows of V."""
    tensors["K"][:] = tensors["K"][:, :, :1]


def _constant_rows(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """All elements of a row are the same, of six bits, in every tensor: dot products are exact in float32, in any order.

    With more bits the equal products of each score would all round the same way. The error of a plain sum over head_dim then grows as
    head_dim, and no longer as its root, on which the budget rests. check/alike.py has the cure for row sums, not for scores.
    """
    for array in tensors.values():
        mantissa, exponent = np.frexp(array[..., :1].astype(np.float64))
        array[:] = np.ldexp(np.round(mantissa * 64) / 64, exponent).astype(array.dtype)


def _zero_queries(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """Q is 0 and -0 in turns: all scores are equal."""
    tensors["Q"][:] = 0.0
    tensors["Q"][:, :, 1::2] = -0.0


def _one_key(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """One key of each head is ten times as large as the others: in half of the rows it has nearly all the weight."""
    at = random.randint(problem.seq_kv)
    tensors["K"][:, :, at] = (tensors["K"][:, :, at].astype(np.float64) * 10).astype(tensors["K"].dtype)


def _jump(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """The keys of the last tile of 64 are ten times as large: there the scores of most rows jump, and what came before is rescaled."""
    last = tensors["K"][:, :, (problem.seq_kv - 1) // 64 * 64 :]
    last[:] = (last.astype(np.float64) * 10).astype(last.dtype)


def _zero_rows(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """Every third row is 0 in every tensor, of Q from the first on, of the others from the second: scores of 0 among others."""
    for name, array in tensors.items():
        array[:, :, 0 if name == "Q" else 1 :: 3] = 0


def _q_is_k(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """Keys are the queries of the first head that reads them, over and over: a row's largest score is its own square."""
    group = problem.heads_q // problem.heads_kv
    tensors["K"][:] = tensors["Q"][:, ::group, np.arange(problem.seq_kv) % problem.seq_q]


def _ones_do(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """dO is 1, as of a sum of all outputs."""
    if "dO" in tensors:
        tensors["dO"][:] = tensors["dO"].dtype.type(1)


def _large_v(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """V is large."""
    _times(tensors["V"], LARGE_V[problem.dtype_kv])


def _vast_v(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """V is as large as float32 and bfloat16 alone hold it. Raises KeyError in float16."""
    _times(tensors["V"], VAST_V[problem.dtype_kv])


def _tiny_v(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """V is small."""
    _times(tensors["V"], TINY_V[problem.dtype_kv])


def _positive_v(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """No element of V is negative: sums over keys grow with their number, and what is small beside them is lost where few bits are kept."""
    tensors["V"][:] = np.abs(tensors["V"].astype(np.float64)).astype(tensors["V"].dtype)


def _times(array: Array, factor: float) -> None:
    array[:] = (array.astype(np.float64) * factor).astype(array.dtype)


def _subnormal(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """A quarter of the elements is below the least normal number. A GPU may take those of 32 bits for 0 (-ftz=true); no budget sees it."""
    for name, array in tensors.items():
        small = random.rand(*array.shape) < 0.25
        array[small] = (array[small].astype(np.float64) * _SUBNORMAL[problem.tensor_dtype(name)]).astype(array.dtype)


def _nan(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """One element of one key of the first key head is NaN: the rows that see it are NaN, the others are not."""
    tensors["K"][:, 0, problem.seq_kv * 2 // 3, problem.head_dim // 2] = np.nan


def _inf(problem: Problem, random: np.random.RandomState, tensors: dict[str, Array]) -> None:
    """The same with an infinity: its score is inf, which gives NaN, or -inf, which has weight 0."""
    tensors["K"][:, 0, problem.seq_kv * 2 // 3, problem.head_dim // 2] = np.inf


#: By name. `nan` and `inf` are for forward passes, the others have finite results.
FAMILIES: dict[str, Callable[[Problem, np.random.RandomState, dict[str, Array]], None]] = {
    "randn": _randn,
    "one_hot": _one_hot,
    "equal_keys": _equal_keys,
    "constant_rows": _constant_rows,
    "zero_queries": _zero_queries,
    "one_key": _one_key,
    "large_v": _large_v,
    "subnormal": _subnormal,
    "nan": _nan,
    "inf": _inf,
    "jump": _jump,
    "zero_rows": _zero_rows,
    "q_is_k": _q_is_k,
    "ones_do": _ones_do,
    "vast_v": _vast_v,
    "tiny_v": _tiny_v,
    "positive_v": _positive_v,
}
FINITE = tuple(name for name in FAMILIES if name not in ("nan", "inf"))
#: Those that a fuzz draws from: the others are in every matrix, and a seed draws what it has always drawn.
DRAWN = tuple(name for name in FINITE if name not in ("jump", "zero_rows", "q_is_k", "ones_do", "vast_v", "tiny_v", "positive_v"))
