"""The inputs of a problem, generated in memory: by RandomState, as in data folders, or above ABOVE elements by Philox in parallel.

RandomState is sequential: 2.5 billion elements take it a minute, where the kernels take a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..array import Array
from ..fault import UsageFault
from ..problem import Problem
from .memory import available_memory
from .normals import normals
from .storage import STORAGE

INPUTS = ("Q", "K", "V", "dO")
RECIPE = "numpy RandomState(seed).randn drawn Q, K, V, dO in float64, then cast"
#: Elements of Q, K, V and dO together above which Philox is used, whichever of the tensors are asked for.
ABOVE = 1 << 26
#: Elements that one generator draws: part of the recipe, so the values do not depend on the number of threads.
CHUNK = 1 << 22
#: The part of the free memory that :func:`kept` may hold: a 16th.
AFFORD = 16

#: What :func:`kept` gave last: of each tensor of what, and its elements in a row.
_last: dict[str, tuple[object, Array]] = {}


def generate(problem: Problem, seed: int, tensors: Iterable[str] = INPUTS, input_scale: float = 1.0) -> dict[str, Array]:
    """The tensors asked for, host storage arrays, by :data:`RECIPE`: standard normal elements.

    input_scale multiplies Q and K before the cast, and so the scores by its square. In float32, Q, K and V are byte for byte those of
    numpy.random.seed(seed) and randn(...).astype(float32), drawn in that order. In float64 one element of 20,000 has another last bit
    where the C library's logarithm is without fused multiply-adds (x86 before 2013); rounded to another type, one of 10^13.
    Raises UsageFault for a seed outside 0 to 2^32 - 1.
    """
    if input_scale == 1.0:
        return dict(one_by_one(problem, seed, tensors))
    wanted, random = set(tensors), np.random.RandomState(checked(seed))
    arrays: dict[str, Array] = {}
    for name in INPUTS:
        if not wanted - set(arrays):
            break
        drawn = random.randn(*problem.shape(name))  # also where it is not asked for: the next tensor depends on it
        if name in wanted:
            if name in ("Q", "K"):
                drawn *= input_scale
            with np.errstate(over="ignore"):
                arrays[name] = drawn.astype(STORAGE[problem.tensor_dtype(name)])
    return arrays


def recipe(problem: Problem) -> str:
    """What draws :func:`inputs`, as results.csv names it: RandomState or philox."""
    return "RandomState" if sum(int(np.prod(problem.shape(name))) for name in INPUTS) <= ABOVE else "philox"


def one_by_one(
    problem: Problem, seed: int, tensors: Iterable[str] = INPUTS, progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[str, Array]]:
    """The name and the values of each tensor asked for as soon as it is drawn, as :func:`generate` gives them.

    progress receives "N/M draws Q", in hundredths of all numbers. Raises UsageFault as generate does.
    """
    wanted = [name for name in INPUTS if name in set(tensors)]
    names = INPUTS[: INPUTS.index(wanted[-1]) + 1] if wanted else ()
    sizes = {name: int(np.prod(problem.shape(name))) for name in names}
    total, before, told = sum(sizes.values()), 0, -1
    drawn = STORAGE["float64" if problem.has_own_dtype_kv else problem.dtype]  # one stream for all of them
    blocks, left = normals(checked(seed), total, drawn), np.empty(0, drawn)
    for name, size in sizes.items():
        values, done = np.empty(size if name in wanted else 0, STORAGE[problem.tensor_dtype(name)]), 0
        while done < size:
            left = left if left.size else next(blocks)
            some, left = np.split(left, [min(left.size, size - done)])
            if name in wanted:
                values[done : done + some.size] = some
            done += some.size
            if (now := 100 * (before + done) // total) > told:
                progress(f"{now}/100 draws {name}")
                told = now
        before += size
        if name in wanted:
            yield name, values.reshape(problem.shape(name))


def checked(seed: int) -> int:
    """The seed. Raises UsageFault where RandomState does not take it."""
    if not 0 <= seed < 2**32:
        raise UsageFault(f"seed is {seed}", "numpy's RandomState takes 0 to 2^32 - 1", "use --seed 42")
    return seed


def inputs(problem: Problem, seed: int, tensors: Iterable[str], input_scale: float = 1.0) -> dict[str, Array]:
    """The tensors asked for, host storage arrays of standard normal elements; input_scale multiplies Q and K before the cast.

    Up to ABOVE elements as :func:`generate`, above it by Philox, a generator per CHUNK keyed by seed, tensor and position.
    """
    if recipe(problem) == "RandomState":
        return generate(problem, seed, tensors, input_scale)
    arrays = {name: np.empty(problem.shape(name), STORAGE[problem.tensor_dtype(name)]) for name in tensors}
    pieces = [(name, start) for name, array in arrays.items() for start in range(0, array.size, CHUNK)]

    def draw(piece: tuple[str, int]) -> None:
        name, start = piece
        target = arrays[name].reshape(-1)[start : start + CHUNK]
        key = np.array([seed, INPUTS.index(name) << 32 | start // CHUNK], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(target.size, np.float32)
        if name in ("Q", "K") and input_scale != 1.0:
            drawn *= np.float32(input_scale)
        with np.errstate(over="ignore"):
            target[:] = drawn

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, pieces))
    return arrays


def kept(problem: Problem, seed: int, tensors: Iterable[str]) -> dict[str, Array]:
    """As :func:`inputs`, in arrays that are read-only: those of the last call that this one draws the same numbers for.

    Numbers depend on the seed, the storage type and the elements of each tensor, by Philox of this one alone, not on its shape: the shapes
    of a sweep over sequence lengths often have as many elements, more queries change only Q, and a causal mask none. One set is held, and
    only where memory has room for AFFORD times as much.
    """
    global _last
    tensors, made = tuple(tensors), recipe(problem)
    sizes = {name: int(np.prod(problem.shape(name))) for name in INPUTS}
    keys = {name: (seed, problem.tensor_dtype(name), made, sizes[name] if made == "philox" else tuple(sizes.values())) for name in tensors}
    _last = {name: (key, array) for name, (key, array) in _last.items() if keys.get(name) == key}  # before others are drawn: never two sets
    if left := [name for name in tensors if name not in _last]:
        for name, array in inputs(problem, seed, left).items():
            array.flags.writeable = False
            _last[name] = keys[name], array.reshape(-1)
    found = {name: _last[name][1].reshape(problem.shape(name)) for name in tensors}
    if AFFORD * sum(array.nbytes for array in found.values()) > available_memory():
        _last = {}
    return found
