"""The second verdict on a tensor: its RMS error, its mean signed error and the slope of got on reference.

The largest error cannot see a small error that all elements share: bfloat16 outputs 0.1 % too large are each within the rounding of a
right kernel. Thousands of elements together show it, for the rounding errors of a right kernel have random signs and cancel.

**The test.** Let x_i be what row i adds to a sum that is zero in the mean, y_j what column j of a head adds. The errors of a row share its
row sum and its rounded P. Where P is nearly uniform, the rows of a head are copies of each other and share the errors of each column. So
rows and columns count as the independent units, never elements (two-way clusters: Cameron, Gelbach & Miller 2011, doi
10.1198/jbes.2010.07136). For N independent terms of either sign, whatever their sizes,

    P(|sum x_i| > t sqrt(sum x_i^2)) <= 2 exp(-t^2 / 2)

(Efron 1969, Student's t-test under symmetry conditions; Hoeffding's inequality on the signs). A sum X of both kinds of terms is within

    t (sqrt(sum x_i^2) + sqrt(sum y_j^2)),    t = SIGNIFICANCE

but for a probability of 4 exp(-6.1^2 / 2) = 3.3e-8. A case has at most 14 such sums, three for each of O, dQ, dK and dV, two for
logsumexp: 4.7e-7 false alarms, below 1e-6. A true error of all rows would widen this limit itself, so the part of X that each row has of
it is taken out first. With g_i, its share of the sum (sum g_i = 1, G = sum g_i^2), sqrt(sum x_i^2) <= sqrt(sum (x_i - X g_i)^2) +
|X| sqrt(G), and so whatever exceeds

    t / (1 - t sqrt(G)) * sqrt(sum (x_i - X g_i)^2)

exceeds the limit above. The bound holds for any number of rows. Where there are too few, t sqrt(G) >= 1, nothing is judged: with equal
shares fewer than 38 rows, or 38 columns of all heads. Nor where all elements of a head are equal, which share one error, nor where the
reference is zero: dQ and dK of one visible key, of which float64 leaves 2^-53 of what cancelled, or nothing, by the order of its sums.
There the largest error alone decides.

**The weights.** A rounding error is relative to its row, so row i counts with 1 / (its mean square + 1 % of the tensor's). Errors below
are relative in this sense; those of logsumexp are absolute.

**The statistics**, of errors e, baseline errors b and reference r. A right kernel may have in common over all rows what A says.

    slope   1 + sum e r / sum r^2, from 1 at most A + twice the worst baseline's + chance
    bias    mean of e, at most A + twice the worst baseline's + chance
    rms     the typical ratio of its RMS errors to the worst baseline's: the root of the F at which the sum over the rows of

                (q - F p) / (q + F p),    q = sum e^2 of a row,    p = sum (b^2 + a^2 / 2)

            is zero. Each term is between -1 and 1, so one bad row counts as one row (the largest error finds it). Right kernels have
            F = 1: q and p change places. F may be 2, as after one more rounding as large as all of the baseline's together; an F
            above it is significant where the sum at F = 2 exceeds chance, over the rows and also over the columns.

With u = 2^-24, n terms an element sums, D the head dim, s the mean |score| under P, and tensor cores where P is rounded or tf32, A sums

    u (3 + D / 16) s       the scale is rounded as float32, times a rounded log2(e), rounded: 2.2 u of every score. Tensor cores (D / 16)
                           truncate: a step of 16 products loses at most half an ulp, u, in the mean (Fasi et al. 2021, doi
                           10.7717/peerj-cs.330). Of steps of 8, as on sm_80, there are twice as many, at a mean partial sum of 2/3 and
                           a mean ulp of 0.72 * 2 u: 0.96 u for 16 products. tf32 has half as many products a step
    u n / 16               tensor cores: the same in the sums over keys or queries
    u sqrt(n)              rounding to nearest of the sums
    n 2^-25                float16 P or dS below its least subnormal number, where P is rounded
    2 u                    logsumexp only: the mean relative error of an exponential. ex2.approx is at most 2 u off, and on an H200
                           -0.67 u in the mean (tests/device/golden_h200.npz)
    2^-9                   O of 8 bits, whose sums are of 128 keys: four steps of 32 products, each aligned to the sum so far and cut off 13
                           bits behind its point. A product loses half a unit there in the mean, 0.36 * 2^-13 of a sum that is 1/4, 1/2
                           and 3/4 of the whole before the last three steps: 32 * 0.36 * 1.5 * 2^-13 = 2^-8.9, where V does not change
                           its sign, less what products of 8 bits that reach down to no unit do not lose
    unit * R^8             where P is rounded to 16 bits: unit is its roundoff and R the mean cosine of two rows of a head. Where rows
                           are copies, one rounding of P is shared by all. Independent scores of variance 1 have R = 1/e. Where some rows
                           are copies and others are not (a score of positions alone, queries before the first key), their part of all
                           pairs is more than R^8, and takes its place. In 8 bits that would hide all else: there the baselines round
                           P beside several references
    2 ulp                  logsumexp only, where the rows or the row sums of a head are so near each other that they are rounded alike
    drift                  logsumexp, and O in place of u sqrt(n) where it is more: what the row sums of all rows lose or gain together
                           because their terms round alike, as terms near 1 do (alike.py)

In float32, where these terms are what is measured, A also has 4 u times the RMS of Reference.row_noise over that of the tensor, both with
the weights above: what the rounding errors inside are in all, and so the most that rows can have in common of them (Cauchy-Schwarz). Of
logsumexp it is the RMS alone. A gradient beside which it is 1 and more, in any type, is smaller than the rounding errors inside it, as dQ
behind a softmax of one key a row, whose dP - delta is 0: it has no moments. a is A and the random rounding of the scores, u sqrt(D) s, for logsumexp 2 u
of its size and u sqrt(n). In a, as in A of O, what the row sums of a typical row may be off because their terms round alike replaces u
sqrt(n) where it is more. float64 has no second verdict.

Peers have the same statistics, which do not fail them (contender.run_peer): what a peer rounds besides is its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule, every, to_host
from ..problem import DSINKS, Problem
from .reference import Reference

#: Standard deviations t of the self-normalised sums; the docstring above has the rate of false alarms.
SIGNIFICANCE = 6.1
#: The unit roundoff of float32 and of the types of 16 bits that P may be rounded to.
UNIT = 2.0**-24
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: The docstring's 2^-9.
PROMOTED = 2.0**-9
_FLOOR = 0.01  # of the tensor's mean square, in the weight of a row
#: A reference below this part of its float32 baselines' errors, and a row below this part of the longest, are what float64 left of a
#: cancellation: noise, which is another on each machine.
_NOISE, _ROW_NOISE = 2.0**-24, 2.0**-40
#: Pairs below which the host finds a ratio sooner than a GPU, which waits some 50 times.
_FEW = 1 << 15
#: Halvings of an interval of 80; terms that a GPU sums in one wait, about.
_HALVINGS, _AT_ONCE = 32, 1 << 24


@dataclass(frozen=True)
class Moments:
    """A tensor's RMS error, mean signed error and slope of got on reference, each with its limit.

    rms is a multiple of the worst baseline's. bias is relative to the size of a row, of logsumexp absolute. slope_budget and bias_budget
    limit |slope - 1| and |bias|. A limit is infinite where there are too few rows; what a tensor does not have is NaN.
    """

    rms: float = math.nan
    rms_budget: float = math.nan
    bias: float = math.nan
    bias_budget: float = math.nan
    slope: float = math.nan
    slope_budget: float = math.nan

    def reason(self, tensor: str) -> str:
        """What exceeds its limit, in words: statistic, value, limit. Empty where nothing does."""
        of = "" if math.isnan(self.slope) else " of the row's size"
        off = self.slope - 1
        if abs(off) > self.slope_budget:
            side = "large" if off > 0 else "small"
            return f"{tensor} is {abs(off):.2%} too {side}: slope {self.slope:.6f}, a right kernel has 1 ± {self.slope_budget:.2g}"
        if abs(self.bias) > self.bias_budget:
            side = "high" if self.bias > 0 else "low"
            return f"{tensor} is too {side} in the mean: mean error {self.bias:.3g}{of}, a right kernel has at most {self.bias_budget:.2g}"
        if self.rms > self.rms_budget:
            times = f"RMS error {self.rms:.3g} times its baseline's"
            return f"{tensor} is too rough: {times}, a right kernel has at most {self.rms_budget:.3g}"
        return ""


@dataclass(frozen=True)
class Allowed:
    """What a right kernel may have in common over all rows (A), and in the mean square beside its baseline (a), relative or absolute."""

    bias: float
    rms: float
    #: Whether the tensor is smaller than the rounding errors inside it: what is left of them is chance, and has no baseline.
    nothing: bool = False


def terms(problem: Problem, tensor: str) -> int:
    """The terms that an element of a tensor sums."""
    if tensor == DSINKS:
        return problem.batch * problem.seq_q
    return problem.seq_kv if tensor in ("O", "dQ", "logsumexp") else problem.seq_q * (problem.heads_q // problem.heads_kv)


def allowed(reference: Reference, tensor: str, arithmetic: str, noise: float, copies: float, size: float) -> Allowed:
    """A and a of the docstring above.

    noise: 4 u times the RMS of Reference.noise, of logsumexp absolute, else as :func:`beside_size` gives it. copies: of :func:`copies`. size: the RMS of the tensor's reference.
    """
    problem, score, n = reference.problem, reference.score, terms(reference.problem, tensor)
    per_step = {"p16": 16, "tf32": 8}.get(arithmetic, 0)
    truncated = problem.head_dim / per_step if per_step else 0.0
    of_scores, summed = UNIT * (3 + truncated) * score, UNIT * math.sqrt(n)
    random = UNIT * math.sqrt(problem.head_dim) * score
    if tensor == "logsumexp":
        bias = of_scores + 2 * UNIT + copies + reference.drift
        return Allowed(bias, bias + random + 2 * UNIT * size + max(summed, reference.typical) + noise)
    bias = of_scores + (UNIT * n / per_step if per_step else 0.0)
    if arithmetic == "p16":
        bias += copies * _ROUNDOFF.get(problem.dtype, 0.0) + (n * 2.0**-25 if problem.dtype == "float16" else 0.0)
    if arithmetic == "p8":
        bias += PROMOTED
    if problem.dtype == "float32":
        bias += noise
    of_row_sum = (reference.drift, reference.typical) if tensor == "O" else (0.0, 0.0)
    return Allowed(bias + max(summed, of_row_sum[0]), bias + random + max(summed, of_row_sum[1]), noise >= 1)


def beside_size(xp: ArrayModule, expected: Array, squares: Array) -> float:
    """The RMS of errors relative to that of the tensor, by the weights of its rows. squares: of the errors, the mean of each row."""
    finite = xp.isfinite(expected)
    values = xp.where(finite, expected, 0.0)
    weight, _ = _weight(xp, finite, values, False)
    whole = float((values * values * weight).sum())
    return math.sqrt(float((squares[..., None] * weight).sum()) / whole) if whole else 0.0


def copies(xp: ArrayModule, expected: Array) -> float:
    """How much the rows of a head that are not 0 are copies of each other, 0 to 1.

    The eighth power of the mean cosine of two rows; or, where that is more, how many pairs of 64 rows have the same direction.
    """
    finite = xp.where(xp.isfinite(expected), expected, 0.0)
    length = xp.sqrt((finite * finite).sum(axis=-1, keepdims=True))
    some = length > _ROW_NOISE * length.max()
    unit = xp.where(some, finite / xp.where(some, length, 1.0), 0.0)
    count = some.sum(axis=-2)
    together = unit.sum(axis=-2) / xp.where(count > 0, count, 1)
    step = -(-expected.shape[-2] // 64)
    sample, number = unit[..., ::step, :], some[..., ::step, :].sum(axis=-2)[..., 0]
    same = xp.where(xp.matmul(sample, sample.swapaxes(-1, -2)) > 1 - 2.0**-16, 1.0, 0.0).sum(axis=-1).sum(axis=-1) - number
    few = sample.shape[-1] == 1  # one column has two directions
    pairs = 0.0 if few else float((same / xp.where(number > 1, number * number - number, 1)).max())
    return max(float((together * together).sum(axis=-1).max()) ** 8, pairs)


@dataclass(frozen=True)
class Base:
    """What judging a tensor takes of its baselines, the same for every tensor that is judged beside them where errors are finite.

    kept: the elements that count. number: of these, 0 where there is nothing to judge. worst: by rows, then by columns, the sums p of the
    docstring above. bias, slope: the largest sums of the baselines' errors, weighted as those of the tensor are.
    """

    kept: Array
    number: int
    worst: tuple[Array, ...] = ()
    bias: float = 0.0
    slope: float = 0.0


def base(xp: ArrayModule, expected: Array, finite: Array, baselines: Sequence[Array], may: Allowed, absolute: bool) -> Base:
    """The baselines' part of :func:`judge`. finite: where the error of the tensor is."""
    kept = xp.isfinite(expected) & finite
    for baseline in baselines:
        kept = kept & xp.isfinite(baseline)
    expected, *others = (xp.where(kept, baseline, 0.0) for baseline in (expected, *baselines))
    number = int(xp.where(kept, 1.0, 0.0).sum())
    weight, largest = _weight(xp, kept, expected, absolute)
    rough = max((float((baseline * baseline).mean(axis=-1).max()) for baseline in others), default=0.0)
    if may.nothing or not number or not baselines or not (absolute or float(largest) > _NOISE**2 * rough and not _one_value(xp, expected)):
        return Base(kept, 0)
    worst = []
    for axis in (-1,) if absolute else (-1, -2):
        counted = xp.where(kept, 0.5 * may.rms**2, 0.0).sum(axis=axis)
        squares = functools.reduce(xp.maximum, [(baseline * baseline * weight).sum(axis=axis) for baseline in others])
        worst.append((squares + counted).reshape(-1))
    root = xp.sqrt(weight)
    bias = max(abs(float((baseline * root).sum())) for baseline in others)
    slope = 0.0 if absolute else max(abs(float((baseline * expected * weight).sum())) for baseline in others)
    return Base(kept, number, tuple(worst), bias, slope)


def judge(xp: ArrayModule, expected: Array, error: Array, baselines: Sequence[Array], may: Allowed, absolute: bool) -> Moments:
    """The moments of a tensor: expected, signed error and signed baseline errors as (batch, heads, rows, columns), float64.

    Elements where one of them is not finite are left out. absolute: every row counts alike and has no slope (logsumexp).
    """
    return beside(xp, expected, error, base(xp, expected, xp.isfinite(error), baselines, may, absolute), may, absolute)


def beside(xp: ArrayModule, expected: Array, error: Array, of: Base, may: Allowed, absolute: bool) -> Moments:
    """As :func:`judge`, of the part that :func:`base` gave."""
    if not of.number:
        return Moments()
    kept, number = of.kept, of.number
    expected, error = (xp.where(kept, values, 0.0) for values in (expected, error))
    weight, _ = _weight(xp, kept, expected, absolute)

    # The RMS error, beside the worst baseline's of each row and column
    pairs = [((error * error * weight).sum(axis=axis).reshape(-1), worst) for axis, worst in zip((-1, -2), of.worst, strict=False)]
    rms, least = _ratio(xp, *pairs[0], 0.0), min(_ratio(xp, *pair, SIGNIFICANCE) for pair in pairs)
    rms_budget = math.sqrt(2) * rms / least if least else math.inf

    # The mean signed error
    root = xp.sqrt(weight)
    bias = float((error * root).sum()) / number
    common = 2 * of.bias / number
    bias_budget = may.bias + common + _chance(xp, error * root, xp.where(kept, 1.0, 0.0), not absolute) / number
    if absolute:
        return Moments(rms, rms_budget, bias, bias_budget)

    # The slope of got on reference
    whole = float((expected * expected * weight).sum())
    slope = float((error * expected * weight).sum()) / whole
    common = 2 * of.slope / whole
    chance = _chance(xp, error * expected * weight, expected * expected * weight) / whole
    return Moments(rms, rms_budget, bias, bias_budget, 1 + slope, may.bias + common + chance)


def _weight(xp: ArrayModule, kept: Array, expected: Array, absolute: bool) -> tuple[Array, Array]:
    """The weight of each element, 0 where it is not kept, and the largest mean square of a row, an array of one."""
    squares = (expected * expected).mean(axis=-1, keepdims=True)
    weight = squares + _FLOOR * squares.mean()
    return xp.where(kept, 1.0 if absolute else 1.0 / xp.where(weight > 0, weight, 1.0), 0.0), squares.max()


def _one_value(xp: ArrayModule, expected: Array) -> bool:
    """Whether every element of a head is the same: a scale of 0 and equal columns of V. Rows and columns then share one error."""
    first = expected[:, :, :1, :1]
    return every(xp.abs(expected - first) <= 2.0**-18 * xp.abs(first))


def _chance(xp: ArrayModule, terms: Array, share: Array, columns: bool = True) -> float:
    """What the sum of these terms may be by chance: terms (batch, heads, rows, columns), whose rows and columns are independent.

    share: not negative; what each term has of the sum where the sum is no chance. inf where there are too few rows or columns.
    """
    part, whole = terms.sum(), share.sum()
    found = []
    for axis in (-1, -2) if columns else (-1,):
        sums, mean = terms.sum(axis=axis), share.sum(axis=axis) / whole
        away = sums - part * mean
        found += [(mean * mean).sum(), (away * away).sum()]
    total, sums_of_squares = 0.0, iter(to_host(xp.stack(found, axis=0)).tolist())
    for of_mean, of_away in zip(sums_of_squares, sums_of_squares, strict=True):
        left = 1 - SIGNIFICANCE * math.sqrt(of_mean)
        if left <= 0:
            return math.inf
        total += SIGNIFICANCE / left * math.sqrt(of_away)
    return total


def _ratio(xp: ArrayModule, squares: Array, base: Array, significance: float) -> float:
    """The typical ratio of RMS errors over pairs of squares, or what it is at least: the F for which the terms of `rms` sum to chance."""
    if squares.size < _FEW or not every(base > 0):
        xp, squares, base = np, to_host(squares), to_host(base)
        squares, base = squares[base > 0], base[base > 0]
    left = 1 - significance / math.sqrt(max(1, base.size))
    if left <= 0:
        return 0.0
    log = _bisected(squares, base, significance / left) if xp is np else _bisected_on_gpu(xp, squares, base, significance / left)
    return 2.0 ** (log / 2) if log > -39 else 0.0


def _above(total: float, squares: float, chance: float, number: int) -> bool:
    """Whether terms sum to more than chance. squares: the sum of their squares."""
    return total > 0 and (not chance or total > chance * math.sqrt(max(0.0, squares - total * total / number)))


def _bisected(squares: Array, base: Array, chance: float) -> float:
    """log2(F) of :func:`_ratio`."""
    low, high = -40.0, 40.0
    terms, scaled = np.empty_like(base), np.empty_like(base)  # once: new memory costs more than arithmetic
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        np.multiply(base, 2.0**middle, out=scaled)
        np.subtract(squares, scaled, out=terms)
        scaled += squares
        terms /= scaled
        total = float(terms.sum())
        if chance and total > 0:
            terms *= terms
            above = _above(total, float(terms.sum()), chance, base.size)
        else:
            above = total > 0
        low, high = (middle, high) if above else (low, middle)
    return low


def _bisected_on_gpu(xp: ArrayModule, squares: Array, base: Array, chance: float) -> float:
    """The same on a GPU, at all points of several halvings at once: between processes that share it a wait takes a millisecond."""
    at_once = max(1, min(4, (_AT_ONCE // base.size).bit_length() - 1))
    room = [xp.empty((2**at_once - 1, base.size), base.dtype) for _ in range(2)]
    low, high, left = -40.0, 40.0, _HALVINGS
    while left:
        steps = min(at_once, left)
        left, width = left - steps, (high - low) / 2**steps
        terms, scaled = (each[: 2**steps - 1] for each in room)
        scaled[...], terms[...] = base, squares
        scaled *= xp.asarray(np.exp2([low + width * i for i in range(1, 2**steps)])[:, None])
        terms -= scaled
        scaled += squares
        terms /= scaled
        totals = terms.sum(axis=-1)
        terms *= terms
        sums = to_host(xp.stack([totals, terms.sum(axis=-1)], axis=-1)).tolist()
        first, last = 0, 2**steps
        while last - first > 1:
            middle = (first + last) // 2
            total, of_squares = sums[middle - 1]
            first, last = (middle, last) if _above(total, of_squares, chance, base.size) else (first, middle)
        low, high = low + width * first, low + width * last
    return low
