"""Covering arrays of strength 2: few rows in which every pair of levels of any two factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

#: A level of a factor: a pair of lengths, a width, a dtype, whether causal …
Level = Any


def covering(factors: dict[str, list[Level]], widths: Sequence[int], tries: int = 40) -> Iterator[dict[str, Level]]:
    """Rows over the factors in which all allowed pairs of levels occur, greedily few, the same every time.

    (length, dim) is too many pairs for a matrix that runs in minutes: each length occurs with each compiled width instead.
    tries: candidates for each row, of which the best is taken.
    """
    draw = random.Random(1)
    names = list(factors)

    def keys(row: dict[str, Level]) -> Iterator[tuple[Level, ...]]:
        for a, b in itertools.combinations(names, 2):
            if (a, b) == ("length", "dim"):
                yield a, b, row[a], next(w for w in widths if w >= row[b])
            else:
                yield a, b, row[a], row[b]

    wanted: set[tuple[Level, ...]] = set()
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if not _allowed({a: x, b: y}):
                continue
            if (a, b) == ("length", "dim"):
                y = next(w for w in widths if w >= y)
            wanted.add((a, b, x, y))
    while wanted:
        seed = min(wanted, key=repr)  # start from a pair that no row has, so every row makes progress
        best: dict[str, Level] = {}
        gain = -1
        for _ in range(tries):
            row = {name: draw.choice(levels) for name, levels in factors.items()}
            row[seed[0]] = seed[2]
            dims = factors["dim"]
            row[seed[1]] = (
                seed[3] if seed[:2] != ("length", "dim") else draw.choice([d for d in dims if next(w for w in widths if w >= d) == seed[3]])
            )
            if not _allowed(row):
                continue
            found = sum(key in wanted for key in keys(row))
            if found > gain:
                best, gain = row, found
        wanted.difference_update(keys(best))
        yield best


def _allowed(row: dict[str, Level]) -> bool:
    """Whether levels go together: float16 holds no inputs a hundred times larger, and only a causal mask has a shift."""
    too_large = row.get("dtype") == "float16" and row.get("scale", 0) > 100
    return not too_large and not (row.get("shift") is not None and row.get("causal") is False)
