"""The sample that `make test` runs of the large matrices, and of the dear tests, drawn from a seed; `make test-all` runs all of them.

The seed is the day, so a test that failed this morning is in this afternoon's sample too, and tomorrow's sample is another.
FA_CLI_TEST_SEED chooses one.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Part = TypeVar("Part")
VARIABLE = "FA_CLI_TEST_SEED"
#: The tests that took more than a CPU second, with their seconds; cpu_times.py writes it.
DEAR = Path(__file__).with_name("dear.txt")
#: CPU seconds of the dear tests of a day, besides one of each file that has some.
BUDGET = 160


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

    Each next one is drawn by the seed and the name: of those that add a level, later of all, the one of half the cost, or of twice as many
    new levels or cases, comes first twice as often.
    """
    draw = random.Random(f"{seed()} {name}")
    left = [(draw.expovariate(1.0) * cost(part), part, levels(part)) for part in parts]
    wanted: set[Hashable] = set().union(*(found for _, _, found in left))
    chosen: list[Part] = []
    while left and (wanted or sum(map(size, chosen)) < least):
        gains = [len(found & wanted) if wanted else size(part) for _, part, found in left]
        nearest = min((i for i, gain in enumerate(gains) if gain), key=lambda i: left[i][0] / gains[i])
        _, part, found = left.pop(nearest)
        wanted -= found
        chosen.append(part)
    return chosen


def parameters(parts: Iterable[Part], sampled: Iterable[Part], label: Callable[[Part], str]) -> list[Any]:
    """Parameters of a test: those parts that are in the sample are marked sampled, the others slow."""
    inside = {label(part) for part in sampled}
    return [pytest.param(part, id=label(part), marks=pytest.mark.sampled if label(part) in inside else pytest.mark.slow) for part in parts]


def dear() -> dict[str, float]:
    """The CPU seconds of the tests in DEAR by their ids."""
    lines = DEAR.read_text(encoding="utf-8").splitlines() if DEAR.exists() else []
    return {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def another_day(names: Sequence[str], seconds: Mapping[str, float], budget: float = BUDGET) -> set[str]:
    """Of the dear tests those that are not of this day's: it has one of each file, and so many seconds of them in all if there are."""
    own = [name for name in names if name in seconds]
    file: Callable[[str], set[Hashable]] = lambda name: {name.partition("::")[0]}  # noqa: E731
    return set(own) - set(sample("dear", own, file, lambda name: round(10 * seconds[name]), round(10 * budget), seconds.__getitem__))
