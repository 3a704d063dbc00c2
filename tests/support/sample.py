"""The sample of the large matrices that `make test` runs, drawn from a seed; `make test-all` runs all of them.

The seed is the day, so a test that failed this morning is in this afternoon's sample too, and tomorrow's sample is another.
FA_CLI_TEST_SEED chooses one.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

Part = TypeVar("Part")
VARIABLE = "FA_CLI_TEST_SEED"


def seed() -> str:
    """FA_CLI_TEST_SEED, which conftest.py sets to the day where it is not set: any text."""
    return os.environ.get(VARIABLE) or datetime.date.today().isoformat()


def sample(
    name: str,
    parts: Iterable[Part],
    levels: Callable[[Part], set[Hashable]],
    size: Callable[[Part], int],
    least: int,
    cost: Callable[[Part], float] = lambda part: 1.0,
) -> list[Part]:
    """Parts that together have every level that any part has, and at least so many cases as there are.

    In an order that the seed and the name decide, each is taken that adds a level, or as long as there are too few. Of two parts the
    one of half the cost comes first twice as often.
    """
    draw = random.Random(f"{seed()} {name}")
    met: set[Hashable] = set()
    chosen: list[Part] = []
    for part in sorted(parts, key=lambda part: draw.expovariate(1.0) * cost(part)):
        if sum(map(size, chosen)) < least or not levels(part) <= met:
            met |= levels(part)
            chosen.append(part)
    return chosen


def parameters(parts: Iterable[Part], sampled: Iterable[Part], label: Callable[[Part], str]) -> list[Any]:
    """Parameters of a test: those parts that are not in the sample are marked slow."""
    inside = {label(part) for part in sampled}
    return [pytest.param(part, id=label(part), marks=() if label(part) in inside else pytest.mark.slow) for part in parts]
