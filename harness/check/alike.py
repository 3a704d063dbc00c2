"""How far a float32 sum drifts whose terms all round alike: what the probabilistic bound on rounding errors, u sqrt(n), leaves out.

A partial sum is a multiple of its ulp U, so to add a term p is to round p to a multiple of U. Terms of any value have errors of any sign.
Equal terms, and those that differ by multiples of U, all have the same error, and it adds up as n (Higham & Mary 2019, doi
10.1137/18M1226312, ask for independent errors of mean zero). The row sum of softmax has such terms: many scores that are equal, as with
one-hot rows, or scores so near each other that all terms are nearly 1.

**One error** is at most U/2, and at most p or 1 - p, since 0 and 1 are multiples of U.

**Their mean.** Let l = 2^e (1 + t) be the whole sum, at least 1, and U/2 = u 2^e half its ulp, u = 2^-24. Let a serial sum begin with the
row maximum, a term of 1, and go on with equal terms from 1 to l. Of its steps t 2^e / (l - 1) have the ulp U, 2^(e-1) / (l - 1) have U/2,
2^(e-2) / (l - 1) have U/4 and so on to the ulp of 1. The mean of their half ulps is

    k U/2,    k = (t + (1 - 4^-e) / 3) / (1 + t - 2^-e),    k = 1 where l < 2

So a term has the weight w = min(k U/2, p, 1 - p); with large e, n terms are at most 3/8 n u of l. This serial sum is the worst of the right
ways but for the order of the keys. Lanes, each with a sum of its own, round to finer multiples, which are at most as far away. Tiles that
are summed first give n / T terms, each at most T times as far from a multiple as the T terms in it.

**How alike** terms are says their phase y = p / U - rint(p / U), a place on a circle: the sums of w c(y) and of w c(y + 1/4), with the
triangle wave c(y) = 1 - 4 |y|, -1 to 1. Where all phases are the same, |c(y)| + |c(y + 1/4)| is 1, whatever they are. So a kernel has
the same limit that refers to another maximum and thereby multiplies all terms by a factor. Where phases are independent the sums have,
with large e, a standard deviation of at most 0.22 u sqrt(n) of l each: the random error of the same roundings.

A row that sees one key, or keys of one score, has terms of 1 and no such error. Not covered: two values in equal parts whose phases are
opposite, which cancel here and need not in a sum.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..array import Array, ArrayModule

UNIT = 2.0**-24


def rounded_alike(xp: ArrayModule, p: Array, row_sum: Array) -> tuple[Array, Array]:
    """The two sums of the docstring above, relative to the row sum: two arrays (..., rows). |a| + |b| limits the drift of a row; the
    drift that rows have in common has the mean of a and the mean of b instead.

    p: exp(S - m), (..., rows, keys), float64, 0 where masked; row_sum: its sums, (..., rows). A row that is not finite has 0.
    """
    found = []
    with np.errstate(invalid="ignore", over="ignore"):
        safe = xp.where(row_sum > 0, row_sum, 1.0)
        power = safe / (2 * xp.frexp(safe)[0])  # 2^e, of l = 2^e (1 + t)
        part, half = safe / power - 1, UNIT * power
        steps = xp.where(power > 1, part + 1 - 1 / power, 1.0)
        mean = xp.where(power > 1, part + (1 - 1 / (power * power)) / 3, 1.0) / steps
        for terms in _waves(xp, p, (mean * half)[..., None], (2 * half)[..., None]):
            wave = terms.sum(axis=-1) / safe
            found.append(xp.where(xp.isfinite(wave), wave, 0.0))
    return found[0], found[1]


def _waves(xp: ArrayModule, p: Array, limit: Array, unit: Array) -> tuple[Array, Array]:
    """The terms w c(y) and w c(y + 1/4) of each p, w of at most `limit` (..., rows, 1) and y in units of `unit`."""
    if xp is not np:
        return _waves_on_gpu(xp, p, limit, unit)
    weight, phase = np.minimum(np.minimum(p, 1 - p), limit), p / unit
    phase -= np.rint(phase)
    first = weight * (1 - 4 * np.abs(phase))
    phase += 0.25
    phase -= np.rint(phase)
    weight *= 1 - 4 * np.abs(phase)
    return first, weight


def _waves_on_gpu(xp: Any, p: Array, limit: Array, unit: Array) -> tuple[Array, Array]:
    first, second = _waves_kernel(xp)(p, limit, unit)
    return first, second


@functools.cache
def _waves_kernel(xp: Any) -> Any:
    """In one pass over memory; each operation rounds by itself, as numpy's do."""
    code = """
        double weight = min(min(p, 1 - p), limit), phase = p / unit;
        phase -= rint(phase), first = weight * (1 - 4 * fabs(phase));
        phase += 0.25, phase -= rint(phase), second = weight * (1 - 4 * fabs(phase))"""
    inputs, outputs = "float64 p, float64 limit, float64 unit", "float64 first, float64 second"
    return xp.ElementwiseKernel(inputs, outputs, code, "terms_alike", options=("-fmad=false",))
