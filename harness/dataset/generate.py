"""The inputs of a problem made in memory: RandomState's, as in data folders, or above ABOVE elements Philox's, which many threads draw.

RandomState draws one number after the other: two and a half billion of them take a minute, and the kernels a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..problem import Problem
from . import folder as dataset

#: Elements of Q, K, V and dO together beyond which Philox is used, whichever of them are asked for.
ABOVE = 1 << 26
#: Elements drawn by one generator: part of the recipe, so the values do not depend on the number of threads.
CHUNK = 1 << 22


def inputs(problem: Problem, seed: int, tensors: Iterable[str], input_scale: float = 1.0) -> dict[str, dataset.Array]:
    """The tensors asked for, standard normal numbers of the problem's dtype; input_scale multiplies Q and K before the cast."""
    if sum(int(np.prod(problem.shape(name))) for name in dataset.INPUTS) <= ABOVE:
        return dataset.generate(problem, seed, tensors, input_scale)
    found = {name: np.empty(problem.shape(name), dataset.STORAGE[problem.dtype]) for name in tensors}
    pieces = [(name, start) for name, array in found.items() for start in range(0, array.size, CHUNK)]

    def draw(piece: tuple[str, int]) -> None:
        name, start = piece
        target = found[name].reshape(-1)[start : start + CHUNK]
        key = np.array([seed, dataset.INPUTS.index(name) << 32 | start // CHUNK], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(target.size, np.float32)
        if name in ("Q", "K") and input_scale != 1.0:
            drawn *= np.float32(input_scale)
        with np.errstate(over="ignore"):
            target[:] = drawn

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, pieces))
    return found
