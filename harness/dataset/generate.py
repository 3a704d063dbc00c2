"""The inputs of a problem made in memory: RandomState's, as in data folders, or above ABOVE elements Philox's, which many threads draw.

RandomState draws one number after the other: two and a half billion of them take a minute, and the kernels a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..array import Array
from ..fault import UsageFault
from ..problem import Problem
from .storage import STORAGE

INPUTS = ("Q", "K", "V", "dO")
RECIPE = "numpy RandomState(seed).randn drawn Q, K, V, dO in float64, then cast"
#: Elements of Q, K, V and dO together beyond which Philox is used, whichever of them are asked for.
ABOVE = 1 << 26
#: Elements drawn by one generator: part of the recipe, so the values do not depend on the number of threads.
CHUNK = 1 << 22


def generate(problem: Problem, seed: int, tensors: Iterable[str] = INPUTS, input_scale: float = 1.0) -> dict[str, Array]:
    """The tensors asked for, by :data:`RECIPE`. input_scale multiplies Q and K before the cast (the scores by its square).

    Q, K and V are byte for byte what numpy.random.seed(seed) and randn(...).astype(float32), drawn in that order, give.
    """
    if not 0 <= seed < 2**32:
        raise UsageFault(f"seed is {seed}", "numpy's RandomState takes 0 to 2^32 - 1", "use --seed 42")
    wanted, random = set(tensors), np.random.RandomState(seed)
    found: dict[str, Array] = {}
    for name in INPUTS:
        if not wanted - set(found):
            break
        drawn = random.randn(*problem.shape(name))  # drawn even when not wanted: the next tensor depends on it
        if name in wanted:
            if name in ("Q", "K") and input_scale != 1.0:
                drawn *= input_scale
            with np.errstate(over="ignore"):
                found[name] = drawn.astype(STORAGE[problem.dtype])
    return found


def inputs(problem: Problem, seed: int, tensors: Iterable[str], input_scale: float = 1.0) -> dict[str, Array]:
    """The tensors asked for, standard normal numbers of the problem's dtype; input_scale multiplies Q and K before the cast."""
    if sum(int(np.prod(problem.shape(name))) for name in INPUTS) <= ABOVE:
        return generate(problem, seed, tensors, input_scale)
    found = {name: np.empty(problem.shape(name), STORAGE[problem.dtype]) for name in tensors}
    pieces = [(name, start) for name, array in found.items() for start in range(0, array.size, CHUNK)]

    def draw(piece: tuple[str, int]) -> None:
        name, start = piece
        target = found[name].reshape(-1)[start : start + CHUNK]
        key = np.array([seed, INPUTS.index(name) << 32 | start // CHUNK], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(target.size, np.float32)
        if name in ("Q", "K") and input_scale != 1.0:
            drawn *= np.float32(input_scale)
        with np.errstate(over="ignore"):
            target[:] = drawn

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, pieces))
    return found
