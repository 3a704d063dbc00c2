"""Covering arrays of strength 2: few rows in which every pair of levels of any two factors occurs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

#: A level of a factor: a pair of lengths, a width, a dtype, whether causal …
Level = Any


def covering(factors: dict[str, list[Level]], widths: Sequence[int], tries: int = 40) -> tuple[dict[str, Level], ...]:
    """Rows over the factors in which all allowed pairs of levels occur, greedily few, the same every time.

    (length, dim) is too many pairs for a matrix that runs in minutes: each length occurs with each compiled width instead.
    tries: candidates for each row, of which the best is taken.
    """
    return tuple(_rows(tuple((name, tuple(levels)) for name, levels in factors.items()), tuple(widths), tries))


@functools.cache
def _rows(levels_of: tuple[tuple[str, tuple[Level, ...]], ...], widths: tuple[int, ...], tries: int) -> list[dict[str, Level]]:
    factors, rows = dict(levels_of), list[dict[str, Level]]()
    draw = random.Random(1)
    pairs = list(itertools.combinations(factors, 2))
    wide = {dim: next(w for w in widths if w >= dim) for dim in factors["dim"]}

    def keys(row: dict[str, Level]) -> list[tuple[Level, ...]]:
        return [(a, b, row[a], wide[row[b]] if (a, b) == ("length", "dim") else row[b]) for a, b in pairs]

    wanted = {
        (a, b, x, wide[y] if (a, b) == ("length", "dim") else y)
        for a, b in pairs
        for x, y in itertools.product(factors[a], factors[b])
        if _allowed({a: x, b: y})
    }
    for seed in sorted(wanted, key=repr):  # start from a pair that no row has, so every row makes progress
        if seed not in wanted:
            continue
        best: list[tuple[Level, ...]] = []
        chosen: dict[str, Level] = {}
        gain = -1
        for _ in range(tries):
            row = {name: draw.choice(levels) for name, levels in factors.items()}
            row[seed[0]] = seed[2]
            row[seed[1]] = draw.choice([d for d in wide if wide[d] == seed[3]]) if seed[:2] == ("length", "dim") else seed[3]
            if not _allowed(row):
                continue
            found = keys(row)
            if (new := len(wanted.intersection(found))) > gain:
                chosen, best, gain = row, found, new
        wanted.difference_update(best)
        rows.append(chosen)
    return rows


def _allowed(row: dict[str, Level]) -> bool:
    """Whether levels go together: float16 holds no inputs a hundred times larger, and only a causal mask has a shift."""
    too_large = row.get("dtype") == "float16" and row.get("scale", 0) > 100
    return not too_large and not (row.get("shift") is not None and row.get("causal") is False)
