"""The verdict: a kernel's outputs against the float64 reference, within the rounding error of a correct kernel of its class.

No tolerance is fixed: :func:`budget` computes it from the baselines of the same problem and inputs. An element that is not finite where
the reference is finite always fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule, every, to_host
from ..dataset.storage import widen
from ..problem import DSINKS, Problem
from . import moments
from .reference import Reference

#: Stored mantissa bits, least normal exponent and largest finite value of each storage type.
_TYPES = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3": (3, -6, 448.0),
    "float64": (52, -1022, float(np.finfo(np.float64).max)),
}
#: The unit roundoff of float32, and the relative error that a float64 kernel may have.
UNIT, UNIT64 = 2.0**-24, 1e-11
#: Standard deviations of the error of an element of O that the budget has room for: beyond six lie 2e-9 of a normal distribution.
DEVIATIONS = 6
#: So few different elements are few draws of an error: their largest may be twice that of as many draws of each baseline.
FEW = 64
#: A block has at least so many rows, and so many elements; its budget is at least this part of the tensor's.
BLOCK, LEAST, PART = 64, 256, 2.0**-6


@dataclass(frozen=True)
class Verdict:
    """One tensor's errors, |got - reference|, and whether it passed: the largest is within the budget, and moments within their limits.

    max_rel counts only elements whose reference exceeds 1e-8 in size. worst is the index of the element with the largest error, in the
    whole tensor; got and expected are its values; place is worst in words (batch, head, row, tile). Where only the budget of a block is
    exceeded (:func:`of_blocks`), these are of its worst element. reason is empty where it passed. moments: RMS error, bias and slope,
    which have limits of their own. shared: whether reason is about what all elements share. of_block: the largest error of a block over
    its budget, NaN where blocks have none.
    """

    tensor: str
    max_abs: float
    mean_abs: float
    mse: float
    max_rel: float
    budget: float
    passed: bool
    worst: tuple[int, ...]
    got: float
    expected: float
    place: str
    reason: str
    moments: moments.Moments = moments.Moments()
    shared: bool = False
    of_block: float = math.nan

    def numbers(self) -> dict[str, float | bool]:
        """What JSON says of a tensor, in the order of README, "JSON"."""
        keys = ("max_abs", "mean_abs", "mse", "max_rel", "budget", "passed")
        return {key: getattr(self, key) for key in keys} | dataclasses.asdict(self.moments)


@dataclass
class Limits:
    """What a tensor is judged by: the largest error that an element may have (:func:`budget`) and those of blocks, what errors may have
    in common (None: float64 has no moments), and the baselines' part of the moments, once it is computed."""

    largest: float
    blocks: tuple[int, Array] | None
    may: moments.Allowed | None
    base: moments.Base | None = None


def ulp(value: float, dtype: str) -> float:
    """The unit in the last place of a storage type at a value; its least subnormal near zero. Raises KeyError for another type."""
    mantissa, least, _ = _TYPES[dtype]
    exponent = math.frexp(value)[1] - 1 if value else least
    return math.ldexp(1.0, max(exponent, least) - mantissa)


def budget(
    reference: Reference,
    tensor: str,
    baselines: Sequence[Mapping[str, Array]],
    arithmetic: str = "f32",
) -> float:
    """The largest absolute error that an element of a tensor may have.

    With u = 2^-24, e the largest error of the baselines, m the largest finite |reference| and n the terms that an element sums (seq_kv
    for O, dQ and logsumexp, seq_q * group for dK and dV):

        O            2 e + 2 ulp(m) + max(u sqrt(n), a) m + 4 u noise
        dQ, dK, dV   3 e + 2 ulp(m) + u sqrt(n) m + 4 u noise
        dsinks       as dQ, of n = batch * seq_q
        logsumexp    2 e + 4 ulp(m) + max(u sqrt(n), a) + 4 u noise; in p8 12 u ln 2 more
        float64      1e-11 m; of dQ and dK + 4e-11 noise

    and of O that has at most FEW different elements (one query, equal columns of V) at least 2 ulp(m) + 6 s + 4 u noise: e is then a
    draw of an error or a few, and no maximum of many. s is the standard deviation of an element. With q = Reference.products the products
    P_j V_j, each rounded to w relatively, give w q / sqrt(3), and the n partial sums, of size q where signs are independent, give
    u q sqrt(n / 3); w is the unit roundoff of what the class rounds P to (arithmetic: f32 u, tf32 2^-11, p16 and p8 that of the input type).

    u sqrt(n) is the probabilistic bound on a sum of n terms (Higham & Mary 2019, doi 10.1137/18M1226312). a is Reference.alike: what
    a row sum loses whose terms round alike, which that bound does not hold for. noise is Reference.noise: where few rows have two
    competing keys, e alone depends on chance. In dQ and dK it holds the cancellation in dP - delta, which is all of them where seq_kv = 1; and
    in all but logsumexp what subnormal numbers are flushed to 0 (reference.flushed).

    In p8 the exponent of P has the 8 of P_SCALE = 2^8 in it, as FlashAttention-3 has it (hopper/softmax.h, max_offset): reference - 8
    rounds by 8 u, the exponent by 4 u.

    baselines: what baselines.baselines gives. Raises KeyError for a tensor that is not there.
    """
    xp, problem, expected = reference.xp, reference.problem, _expected(reference, tensor)
    dtype, sizes = problem.tensor_dtype(tensor), xp.abs(reference[tensor])
    largest = min(float(xp.where(xp.isfinite(sizes), sizes, 0.0).max()), _TYPES[dtype][2])
    noise = _noise(reference, tensor)
    if problem.dtype == "float64":
        return UNIT64 * largest + noise
    terms = moments.terms(problem, tensor)
    errors = [_finite_error(xp, baseline[tensor], expected) for baseline in baselines if tensor in baseline]
    summed = UNIT * math.sqrt(terms)
    if tensor == "logsumexp":
        shifted = 12 * UNIT * math.log(2) if arithmetic == "p8" else 0.0
        return 2 * max(errors) + 4 * ulp(largest, dtype) + max(summed, reference.alike) + shifted + noise
    if tensor != "O":
        return 3 * max(errors) + 2 * ulp(largest, dtype) + summed * largest + noise
    limit = 2 * max(errors) + 2 * ulp(largest, dtype) + max(summed, reference.alike) * largest + noise
    if _different(xp, expected) > FEW:
        return limit
    deviation = _of_products(problem, arithmetic, summed) * float(reference.products.max())
    return max(limit, deviation + 2 * ulp(largest, dtype) + noise)


def of_blocks(
    reference: Reference, tensor: str, baselines: Sequence[Mapping[str, Array]], arithmetic: str, whole: float
) -> tuple[int, Array] | None:
    """The rows of a block, and the largest absolute error that an element of each block may have, (batch, heads, blocks).

    A block is BLOCK rows of a head, more where these have fewer than LEAST elements; the last one takes the rest. Late keys
    under a causal mask, say, have gradients a hundred times as small as the first ones, and errors too. The limit is that of
    :func:`budget`, with e, m, noise and q of the block: what it would be for a problem of these rows alone. It is at least PART
    of that of the tensor (whole), since kernels may flush small values, or split operands by the largest of a tile.

    None where a head has fewer rows, or a key fewer queries: the errors of P and delta are shared by the elements of a query, so few queries
    are few draws. (Gradients of 21 queries came to 0.68 of their limit.) Nor for logsumexp, whose rows are of one size, nor in float64.
    """
    xp, problem, expected = reference.xp, reference.problem, _expected(reference, tensor)
    if tensor in ("logsumexp", DSINKS) or problem.dtype == "float64":
        return None
    count, columns = expected.shape[2:]
    rows = max(BLOCK, -(-LEAST // columns))
    if rows > count or (tensor in ("dK", "dV") and moments.terms(problem, tensor) < BLOCK):
        return None
    summed, dtype = UNIT * math.sqrt(moments.terms(problem, tensor)), problem.tensor_dtype(tensor)
    finite = xp.isfinite(expected)
    sizes = _by_blocks(xp, xp.where(finite, xp.abs(expected), 0.0), rows)
    error = xp.zeros_like(sizes)
    for baseline in baselines:
        if tensor in baseline:
            both = finite & xp.isfinite(baseline[tensor])
            error = xp.maximum(error, _by_blocks(xp, xp.where(both, xp.abs(baseline[tensor] - expected), 0.0), rows))
    mantissa, least, _ = _TYPES[dtype]
    normal = xp.maximum(sizes, 2.0**least)
    units = normal / (2 * xp.frexp(normal)[0]) * 2.0**-mantissa  # ulp() of each size
    fixed = 2 * units + 4 * UNIT * xp.sqrt(_by_blocks(xp, reference.row_noise[tensor][..., :1], rows))
    limit = (2 if tensor == "O" else 3) * error + (max(summed, reference.alike) if tensor == "O" else summed) * sizes
    if tensor == "O":
        limit = xp.maximum(limit, _of_products(problem, arithmetic, summed) * _by_blocks(xp, reference.products[..., None], rows))
    return rows, xp.minimum(xp.maximum(limit + fixed, PART * whole), whole)


def compare(
    reference: Reference,
    got: Mapping[str, Array],
    baselines: Sequence[Mapping[str, Array]],
    tolerance: float | None = None,
    tiles: Mapping[str, int] | None = None,
    arithmetic: str = "f32",
    known: dict[tuple[str, str], Limits] | None = None,
) -> dict[str, Verdict]:
    """A verdict for each tensor of `got`: whole storage arrays of the reference's xp, in the shapes of its problem.

    tolerance: an absolute limit; the smaller of it and the budget decides. tiles: of a tensor the rows of the kernel's tiles, for messages.
    arithmetic: the class of the kernel and of its baselines (baselines.baselines). known: the limits that the same reference and baselines
    gave before, by tensor and class; new ones are added.

    Raises ValueError for a tensor without elements, KeyError as :func:`budget` does.
    """
    found, known = {}, {} if known is None else known
    for tensor, array in got.items():
        if (tensor, arithmetic) not in known:
            largest = budget(reference, tensor, baselines, arithmetic)
            exact = reference.problem.dtype == "float64" or tensor == DSINKS
            may = None if exact else _allowed(reference, tensor, arithmetic)
            known[tensor, arithmetic] = Limits(largest, of_blocks(reference, tensor, baselines, arithmetic, largest), may)
        limits = known[tensor, arithmetic]
        limit = limits.largest if tolerance is None else min(limits.largest, tolerance)
        tile = (tiles or {}).get(tensor, 0)
        verdict = _judge(reference, tensor, array, limit, limits.blocks, tile)
        if reference.rows is not None and reference.finite and math.isfinite(verdict.max_abs):
            verdict = _elsewhere(reference, tensor, array, limit, tile) or verdict
        if limits.may and math.isfinite(verdict.max_abs):
            its = _moments(reference, tensor, array, baselines, limits.may, limits)
            reason = verdict.reason or its.reason(tensor)
            verdict = dataclasses.replace(verdict, moments=its, reason=reason, passed=not reason, shared=reason != verdict.reason)
        found[tensor] = verdict
    return found


@np.errstate(over="ignore")  # an error of 1e38, which a register left as it was gives, has no square
def _judge(reference: Reference, tensor: str, array: Array, limit: float, blocks: tuple[int, Array] | None, tile: int) -> Verdict:
    xp, expected, values = reference.xp, _expected(reference, tensor), _selected(reference, tensor, array)
    error = _near_overflow(reference, tensor, _error(xp, values, expected), values)
    if not error.size:
        raise ValueError(f"{tensor} has no elements to compare")
    at = _worst(error)
    worst = float(error[at])
    sizes = xp.abs(expected)
    counted = xp.isfinite(expected) & (sizes > 1e-8)
    relative = xp.where(counted, error / xp.where(counted, sizes, 1.0), 0.0)
    passed = bool(worst <= limit) and math.isfinite(limit)  # false for NaN on either side
    of_block, reason = math.nan, ""
    if passed and blocks:
        of_block, place, its = _of_block(xp, error, *blocks)
    if passed and of_block > 1:
        at = place
        reason = f"error {float(error[at]):.3g} exceeds the budget {its:.3g} of this row and its neighbours"
    elif not passed:
        bad = int(xp.count_nonzero(~xp.isfinite(error)))
        if bad:
            rows = int(xp.count_nonzero(~xp.isfinite(error.max(axis=-1) if error.ndim == 4 else error)))
            unset = int(xp.count_nonzero(~array.view(np.dtype(f"<u{array.dtype.itemsize}")) == 0))
            what = "are not finite, or finite where they should not be"
            reason = f"{bad} values in {rows} rows {'hold the NaN of memory that was never written (the output or shared memory)' if unset == bad else what}"
        else:
            over = int(xp.count_nonzero(error > limit))
            reason = f"error {worst:.3g} exceeds the budget {limit:.3g} ({over} of {error.size} values do)"
    index = at
    if reference.rows is not None:
        index = (*index[:2], int(reference.rows[tensor][index[2]]), *index[3:])
    return Verdict(
        tensor,
        worst,
        float(error.mean()),
        float((error * error).mean()),
        float(relative.max()),
        limit,
        not reason,
        index,
        float(values[at]),
        float(expected[at]),
        _place(reference.problem, tensor, index, tile),
        reason,
        of_block=of_block,
    )


def _elsewhere(reference: Reference, tensor: str, array: Array, limit: float, tile: int) -> Verdict | None:
    """The verdict of a tensor that is not finite somewhere in the rows that the reference's sample leaves out, as where none is written.

    For finite inputs: then only logsumexp of fully masked rows is -inf. Where the sample comes near to the largest value that is stored,
    others may be rounded to infinity, and NaN alone is wrong. None where nothing is.
    """
    xp, problem = reference.xp, reference.problem
    dtype = problem.tensor_dtype(tensor)
    first = max(0, -problem.causal_shift) if tensor == "logsumexp" and problem.causal and problem.sinks is None else 0
    sizes = xp.abs(reference[tensor])
    near = float(xp.where(xp.isfinite(sizes), sizes, 0.0).max()) > 0.5 * _overflow(dtype)
    for batch, head in np.ndindex(*array.shape[:2]):
        values = widen(xp, array[batch, head, first:], dtype, "float64" if dtype == "float64" else "float32")
        wrong = xp.isnan(values) if near else ~xp.isfinite(values)
        if tensor == "logsumexp" and problem.mask is not None:  # any row may be one that sees nothing
            wrong &= values != -math.inf
        if every(~wrong):
            continue
        at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
        index, got = (batch, head, first + at[0], *at[1:]), float(values[at])
        reason = f"{int(xp.count_nonzero(wrong))} values of this head are not finite, in rows that the sample of the reference leaves out"
        place = _place(problem, tensor, index, tile)
        return Verdict(tensor, math.inf, math.inf, math.inf, math.inf, limit, False, index, got, math.nan, place, reason)
    return None


def message(verdict: Verdict) -> str:
    """One line: the tensor, its worst element, the value there, the value expected, and why it failed (or its margin)."""
    if verdict.passed:
        return f"{verdict.tensor}: error {verdict.max_abs:.3g} within the budget {verdict.budget:.3g}"
    if verdict.shared:
        return f"{verdict.reason} (no element is beyond the budget: error {verdict.max_abs:.3g} within {verdict.budget:.3g})"
    wanted = "a number" if math.isnan(verdict.got) and math.isnan(verdict.expected) else f"{verdict.expected:.7g}"
    return f"{verdict.tensor} is wrong at {verdict.place}: got {verdict.got:.7g}, expected {wanted}; {verdict.reason}"


def error_map(reference: Reference, tensor: str, got: Array, tile: int = 8) -> Array:
    """|error| of the worst (batch, head) as a host array (rows, blocks of `tile` columns): the largest of each block.

    logsumexp has one column. inf marks an element that is not finite where the reference is, or the reverse. rows are those that the
    reference holds.
    """
    xp = reference.xp
    error = _error(xp, _selected(reference, tensor, got), _expected(reference, tensor))
    error = error.reshape(*error.shape[:3], -1)
    batch, head = _worst(error)[:2]
    picture = error[batch, head]
    blocks = [picture[:, c : c + tile].max(axis=1) for c in range(0, picture.shape[1], tile)]
    return to_host(xp.stack(blocks, axis=1))


def _different(xp: ArrayModule, expected: Array) -> int:
    """How many different float32 values there are; of a large tensor, among some 4096 elements all over it."""
    flat = expected.reshape(-1)
    return xp.unique(flat[:: max(1, flat.size // 4096)].astype(np.float32)).size


def _noise(reference: Reference, tensor: str) -> float:
    """The absolute term of :func:`budget`. In float64 it is the dot products' inside dQ and dK only."""
    if reference.problem.dtype == "float64":
        return 4 * UNIT64 * reference.noise[tensor] if tensor in ("dQ", "dK") else 0.0
    return 4 * UNIT * reference.noise[tensor]


def _of_products(problem: Problem, arithmetic: str, summed: float) -> float:
    """DEVIATIONS standard deviations of an element of O, for each unit of Reference.products."""
    rounded = {"f32": UNIT, "tf32": 2.0**-11}.get(arithmetic, 2.0 ** -(_TYPES[problem.dtype][0] + 1))
    return DEVIATIONS * (rounded + summed) / math.sqrt(3)


# -- details ----------------------------------------------------------------------------------------------------------


def _allowed(reference: Reference, tensor: str, arithmetic: str) -> moments.Allowed:
    """What a right kernel's errors may have in common."""
    xp, expected = reference.xp, _expected(reference, tensor)
    sizes = xp.where(xp.isfinite(expected), xp.abs(expected), 0.0)
    size = math.sqrt(float((sizes * sizes).mean()))
    if tensor == "logsumexp":
        least = ulp(float(sizes.max()), "float32")
        alike = 2 * least if reference.spread < max(64 * least, 2.0**-12) else 0.0
    else:
        alike = moments.copies(xp, expected)
    squares = reference.row_noise[tensor][..., 1]
    noise = math.sqrt(float(squares.mean())) if tensor == "logsumexp" else moments.beside_size(xp, expected, squares)
    return moments.allowed(reference, tensor, arithmetic, 4 * UNIT * noise, alike, size)


def _moments(
    reference: Reference,
    tensor: str,
    array: Array,
    baselines: Sequence[Mapping[str, Array]],
    may: moments.Allowed,
    limits: Limits,
) -> moments.Moments:
    """The moments of a tensor that is finite where it should be. limits: keeps the baselines' part, where every error is finite."""
    xp, absolute = reference.xp, tensor == "logsumexp"
    values, expected = _selected(reference, tensor, array), _expected(reference, tensor)
    shape = (*expected.shape, 1) if absolute else expected.shape
    values, expected = values.reshape(shape), expected.reshape(shape)
    with np.errstate(invalid="ignore"):
        error = values - expected
        finite = xp.isfinite(error)
        whole = every(finite)
        base = limits.base if whole else None
        if base is None:
            ways = [each[tensor].reshape(shape) - expected for each in baselines if tensor in each]
            base = moments.base(xp, expected, finite, ways, may, absolute)
        limits.base = base if whole else limits.base
        return moments.beside(xp, expected, error, base, may, absolute)


def _selected(reference: Reference, tensor: str, array: Array) -> Array:
    """The rows of a whole storage tensor that the reference holds, in float64."""
    return widen(reference.xp, reference.select(tensor, array), reference.problem.tensor_dtype(tensor))


def _expected(reference: Reference, tensor: str) -> Array:
    """The reference, infinite where it overflows the storage type: a float16 gradient of 1e5 is stored as inf."""
    xp, dtype, expected = reference.xp, reference.problem.tensor_dtype(tensor), reference[tensor]
    return xp.where(xp.abs(expected) > _overflow(dtype), xp.copysign(xp.asarray(np.inf), expected), expected)


def _overflow(dtype: str) -> float:
    """The largest size that is not rounded to infinity."""
    return _TYPES[dtype][2] + (ulp(_TYPES[dtype][2], dtype) / 2 if dtype != "float64" else 0.0)


def _worst(error: Array) -> tuple[int, ...]:
    """The index of the first of the largest errors: those that differ by the float64 noise of a BLAS are equally large."""
    flat = int((error >= error.max() * (1 - 2.0**-40)).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, error.shape))


def _error(xp: ArrayModule, values: Array, expected: Array) -> Array:
    """|values - expected|: 0 where both are the same infinity or both NaN, inf where only one of them is finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        same = (values == expected) | (xp.isnan(values) & xp.isnan(expected))
        error = xp.where(same, 0.0, xp.abs(values - expected))
    return xp.where(xp.isnan(error), np.inf, error)


def _near_overflow(reference: Reference, tensor: str, error: Array, values: Array) -> Array:
    """The error where one of value and reference overflows the storage type and the other does not, near the edge: not infinite. A
    reference of 65,429 may be rounded up to infinity in float16, one of 65,530 down to 65,504, both by a right kernel."""
    xp, exact, edge = reference.xp, reference[tensor], _overflow(reference.problem.tensor_dtype(tensor))
    size, got = xp.abs(exact), xp.abs(values)
    with np.errstate(invalid="ignore", over="ignore"):
        alike = xp.isfinite(exact) & (values * exact > 0)
        error = xp.where(alike & (got == np.inf) & (size <= edge) & (size > 0.9 * edge), edge - size, error)
        return xp.where(alike & xp.isfinite(values) & (size > edge), xp.abs(values - exact), error)


def _by_blocks(xp: ArrayModule, values: Array, rows: int) -> Array:
    """The largest value of each block of rows: (batch, heads, rows, columns) -> (batch, heads, blocks)."""
    count = values.shape[2] // rows
    most: Array = values[:, :, : count * rows].reshape(*values.shape[:2], count, -1).max(axis=-1)
    if rest := values.shape[2] - count * rows:
        most[:, :, -1] = xp.maximum(most[:, :, -1], values[:, :, -rest:].reshape(*values.shape[:2], -1).max(axis=-1))
    return most


def _of_block(xp: ArrayModule, error: Array, rows: int, limits: Array) -> tuple[float, tuple[int, ...], float]:
    """The largest error of a block over its limit, the index of this error, and the limit. error: (batch, heads, rows, columns)."""
    over = _by_blocks(xp, error, rows) / limits
    batch, head, block = _worst(over)
    end = None if block + 1 == limits.shape[2] else (block + 1) * rows
    at = _worst(error[batch, head, block * rows : end])
    return float(over[batch, head, block]), (batch, head, block * rows + at[0], at[1]), float(limits[batch, head, block])


def _finite_error(xp: ArrayModule, values: Array, expected: Array) -> float:
    """The largest error of a baseline, over the elements where both it and the reference are finite."""
    finite = xp.isfinite(values) & xp.isfinite(expected)
    return float(xp.where(finite, xp.abs(xp.where(finite, values, 0.0) - xp.where(finite, expected, 0.0)), 0.0).max())


def _place(problem: Problem, tensor: str, index: tuple[int, ...], tile: int) -> str:
    batch, head, row = index[:3]
    if tensor == DSINKS:
        return f"head {head}"
    kind = "key" if tensor in ("dK", "dV") else "query"
    count = problem.shape(tensor)[2]
    text = f"batch {batch}, head {head}, {kind} row {row}"
    if tile:
        text += f" (tile {row // tile} of {-(-count // tile)}, rows {tile * (row // tile)}-{min(count, tile * (row // tile + 1)) - 1})"
    return text + (f", column {index[3]}" if len(index) == 4 else "")
