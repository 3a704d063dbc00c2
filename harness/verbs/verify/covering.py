"""Covering arrays of strength 2: few rows in which every pair of levels of any two factors occurs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

#: A level of a factor: a pair of lengths, a width, a dtype, whether causal …
Level = Any


def covering(
    factors: dict[str, list[Level]],
    widths: Sequence[int],
    tries: int = 40,
    given: Sequence[dict[str, Level]] = (),
    compiled: Callable[[dict[str, Level]], Hashable] | None = None,
) -> tuple[dict[str, Level], ...]:
    """Rows over the factors in which all allowed pairs of levels occur, greedily few, the same every time.

    (length, dim) is too many pairs for a matrix that runs in minutes: each length occurs with each compiled width instead.
    tries: candidates for each row, of which the best is taken. given: rows that must be there, the first ones, each with the levels that
    matter to it; the rest of its levels serve the pairs. What they have besides the factors is kept.
    compiled: what is compiled for a row. One for which nothing new is may serve a pair fewer than another and is taken before it.
    """
    first = tuple(tuple(row.items()) for row in given)
    return tuple(_rows(tuple((name, tuple(levels)) for name, levels in factors.items()), tuple(widths), tries, first, compiled))


@functools.cache
def _rows(
    levels_of: tuple[tuple[str, tuple[Level, ...]], ...],
    widths: tuple[int, ...],
    tries: int,
    given: tuple[tuple[tuple[str, Level], ...], ...],
    compiled: Callable[[dict[str, Level]], Hashable] | None,
) -> list[dict[str, Level]]:
    factors: dict[str, Sequence[Level]] = dict(levels_of)
    rows: list[dict[str, Level]] = []
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

    known: set[Hashable] = set()

    def add(fixed: Mapping[str, Sequence[Level]]) -> None:
        drawn = [{name: draw.choice(levels) for name, levels in {**factors, **fixed}.items()} for _ in range(tries)]
        gains = [(len(wanted.intersection(keys(row))), row) for row in drawn if _allowed(row)]
        if not gains:
            return
        gain, chosen = max(gains, key=lambda each: each[0])
        if compiled:
            near = [(served, row) for served, row in gains if served >= gain - 1 and compiled(row) in known]
            _, chosen = max(near, key=lambda each: each[0], default=(gain, chosen))
            known.add(compiled(chosen))
        wanted.difference_update(keys(chosen))
        rows.append(chosen)

    for levels in given:
        add({name: (level,) for name, level in levels})
    for seed in sorted(wanted, key=repr):  # start from a pair that no row has, so every row makes progress
        if seed in wanted:
            a, b, x, y = seed
            same = [d for d in wide if wide[d] == y] if (a, b) == ("length", "dim") else [y]
            add({a: (x,), b: same})
    return rows


def _allowed(row: dict[str, Level]) -> bool:
    """Whether levels go together: float16 holds no inputs a hundred times larger and no vast V, and only a causal mask has a shift."""
    too_large = row.get("dtype") == "float16" and (row.get("scale", 0) > 100 or row.get("inputs") == "vast_v")
    return not too_large and not (row.get("shift") is not None and "form" in row and not row["form"][0])
