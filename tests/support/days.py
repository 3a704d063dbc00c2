"""The tests of a day: `make test` runs the cheap ones, and of the others those whose day it is; `make test-all` runs all of them.

A test with a line in dear.txt has its day in every DAYS, one marked days(n) in every n. What the last commit changed comes sooner.
FA_CLI_TEST_DAY=2026-11-28 chooses another day than today.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")
VARIABLE = "FA_CLI_TEST_DAY"
#: The tests that take more than half a CPU second, with their seconds; cpu_times.py writes it.
DEAR = Path(__file__).with_name("dear.txt")
#: Each of those runs once in so many days.
DAYS = 14
#: CPU seconds a day for tests of what has changed, and those of a test that dear.txt does not know.
CHANGED, UNKNOWN = 40.0, 7.0
ROOT = DEAR.parents[2]


def today() -> str:
    """FA_CLI_TEST_DAY, which conftest.py sets to today's date where it is not set: also the seed of what tests draw."""
    return os.environ.get(VARIABLE) or datetime.date.today().isoformat()


def dear() -> dict[str, float]:
    """The CPU seconds of the tests in DEAR by their ids."""
    lines = DEAR.read_text(encoding="utf-8").splitlines() if DEAR.exists() else []
    return {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def dealt(seconds: Mapping[Name, float], days: int) -> dict[Name, int]:
    """The day, 0 to days - 1, of each name: the costliest first, to the first of the days that have least so far."""
    sums, found = [0.0] * days, dict[Name, int]()
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        found[name] = sums.index(min(sums))
        sums[found[name]] += seconds[name]
    return found


def another_day(marked: Mapping[str, int | None], changed: Iterable[str] = ()) -> set[str]:
    """Of tests, each with the days of its mark or None, those that are not of today's.

    The dear ones are dealt together, the marked ones of a kernel by themselves: the ids of a test's parts begin with its name and a
    hyphen. Tests that name what has changed come before their day, the next ones first, as long as they take CHANGED seconds in all.
    """
    seconds, groups = dear(), defaultdict[tuple[str, int], dict[str, float]](dict)
    for name, days in marked.items():
        if days is not None:
            groups[name.partition("-" if "-" in name else "[")[0], days][name] = seconds.pop(name, UNKNOWN)
    groups["", DAYS] = {name: cost for name, cost in seconds.items() if marked.get(name) is None}
    number = datetime.date.fromisoformat(today()).toordinal()
    wait, cost = dict[str, int](), dict[str, float]()
    for (group, days), costs in groups.items():
        cost |= costs
        wait |= {name: (day + zlib.crc32(group.encode()) - number) % days for name, day in dealt(costs, days).items()}
    left, room, subjects = {name for name in marked if wait.get(name)}, CHANGED, set(changed)
    for name in sorted(left, key=lambda name: (wait[name], name)):
        words = re.findall(r"\w+", name)
        if room >= cost[name] and not subjects.isdisjoint({*words, *(word.removeprefix("test_") for word in words)}):
            left.remove(name)
            room -= cost[name]
    return left


def changes() -> set[str]:
    """What was changed since the commit before the last one: the names of kernels, of modules of the harness and their folders, of files of
    tests. None where git does not tell."""
    found = set[str]()
    if not shutil.which("git"):
        return found
    for words in (["diff", "--name-only", "HEAD~1"], ["ls-files", "--others", "--exclude-standard"]):
        told = subprocess.run(
            ["git", *words, "--", "harness", "kernels_cu", "tests"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        for path in map(Path, told.stdout.splitlines()):
            found |= {re.sub(r"^\d+_", "", path.stem), *path.parts[1:-1]} if path.parts[0] != "tests" else {path.stem}
    return found
