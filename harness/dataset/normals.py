"""The numbers of numpy's RandomState(seed).randn, rounded to a storage type: the same bits, in less than half of the time.

RandomState makes normal numbers of pairs of uniform ones by the polar method (Marsaglia & Bray 1964, doi 10.1137/1006063), one pair after
another. Only the uniform numbers are a sequence, the Mersenne Twister's. They are drawn in blocks, and threads compute the rest of each
block at once:

    x1, x2 = 2 u1 - 1, 2 u2 - 1      r = x1^2 + x2^2, where 0 < r < 1      f = sqrt(-2 log(r) / r)      f x2, f x1

Every operation is numpy's own and correctly rounded, but for the logarithm: the C library's and numpy's vectorised one differ in the last
bits. So each value is known to a relative NEAR. Where all of that interval is rounded to one number, that number is randn's. Otherwise
RandomState draws the block again from the state before it: one block in 200 in float32, fewer in 16 bits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ..array import Array

#: Uniform numbers of a block, a thread's work, and of a piece of it, whose arrays stay in a core's cache.
BLOCK, PIECE = 1 << 17, 1 << 14
#: How far, relatively, a value may be from randn's: 16 units in the last place.
NEAR = 2.0**-49
#: Values from which on the threads are worth their start.
MANY = 1 << 20


def normals(seed: int, count: int, dtype: np.dtype[Any]) -> Iterator[Array]:
    """The first `count` numbers of RandomState(seed).randn rounded to a type, in order: arrays that together have so many or more.

    Each array is valid until the next one. In float64, of few numbers, and where numpy does not compute as above (fused multiply-adds),
    randn itself draws them.
    """
    if count < MANY or dtype.itemsize == 8 or not _as_here(seed):
        random = np.random.RandomState(seed)
        yield from (random.randn(min(BLOCK, count - done)).astype(dtype) for done in range(0, count, BLOCK))
        return
    bits = np.random.MT19937()
    np.random.RandomState(bits).seed(seed)
    uniform, workers = np.random.Generator(bits), min(8, os.cpu_count() or 1)
    free = [(np.empty(BLOCK), np.empty(BLOCK, dtype)) for _ in range(2 * workers)]  # memory that is there: a page fault costs more
    waiting: deque[tuple[Future[int], tuple[Array, Array]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        while count > 0:
            while free:
                state, slot = bits.state, free.pop()
                uniform.random(out=slot[0])
                waiting.append((pool.submit(_round, state, *slot), slot))
            made, slot = waiting.popleft()
            count -= made.result()
            yield slot[1][: made.result()]
            free.append(slot)


def _polar(uniform: Array) -> Array:
    """The normal numbers of pairs of uniform ones, each to a relative NEAR."""
    x = 2.0 * uniform
    x -= 1.0
    x1, x2 = x[0::2], x[1::2]
    r = x1 * x1 + x2 * x2
    kept = np.flatnonzero((r < 1.0) & (r != 0.0))
    x1, x2, r = x1[kept], x2[kept], r[kept]
    factor = np.sqrt(-2.0 * np.log(r) / r)
    normals = np.empty((factor.size, 2))
    np.multiply(factor, x2, out=normals[:, 0])
    np.multiply(factor, x1, out=normals[:, 1])
    return normals.reshape(-1)


def _round(state: Any, uniform: Array, out: Array) -> int:
    """Write the numbers of a block into out, as randn has them after rounding; returns how many. state: of before the block was drawn."""
    done, sure = 0, True
    for start in range(0, uniform.size, PIECE):
        values = _polar(uniform[start : start + PIECE])
        low, high = ((values * (1.0 + side)).astype(out.dtype) for side in (-NEAR, NEAR))
        sure &= low.tobytes() == high.tobytes()
        out[done : done + values.size] = low
        done += values.size
    if not sure:
        out[:done] = _again(state, done)
    return done


def _again(state: Any, count: int) -> Array:
    """randn's own numbers from a state of the Mersenne Twister."""
    bits = np.random.MT19937(0)
    bits.state = state
    drawn: Array = np.random.RandomState(bits).randn(count)
    return drawn


def _as_here(seed: int) -> bool:
    """Whether this numpy's randn is the formula above, on the first numbers of a seed.

    A fused multiply-add in r would show: near r = 1 the logarithm magnifies its last bit beyond NEAR, in one number of a hundred.
    """
    random = np.random.RandomState(seed)
    values = _polar(random.random_sample(PIECE))
    exact = np.random.RandomState(seed).randn(values.size)
    return bool((np.abs(values - exact) <= NEAR * np.abs(exact)).all())
