"""What tests cost: `pytest --cpu-times=FILE` adds a line for each, `python tests/support/cpu_times.py FILE` sums them up by file, and writes
dear.txt: the tests above DEAR seconds, which `make test` runs on their days (days.py). What it says of tests that are not in FILE stays, as
long as there are such tests. A test marked days(n) needs no line: one deals those of a kernel out by their seconds.

CPU seconds, which a busy machine changes little: those of the test's process, and of the processes that it has waited for (compilers).
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import days
import pytest

#: CPU seconds.
DEAR = 0.5


def used() -> tuple[float, ...]:
    """CPU seconds so far, of this process and of its children that have ended."""
    return tuple(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class Times:
    """A plugin of pytest. Workers of xdist write to the same file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _told(self, name: str, before: tuple[float, ...]) -> None:
        own, children = (now - then for now, then in zip(used(), before, strict=True))
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{own:.2f} {children:.2f} {name}\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """A worker's collection."""
        before = used()
        result = yield
        self._told("collection", before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """A test with its fixtures."""
        before = used()
        result = yield
        self._told(item.nodeid, before)
        return result


def main(file: Path, most: int = 30) -> None:
    """Print the costliest files and tests."""
    lines = [line.split(" ", 2) for line in file.read_text(encoding="utf-8").splitlines()]
    files = defaultdict(list)
    for own, children, name in lines:
        files[name.partition("::")[0]].append((float(own), float(children), name))
    print(f"{sum(sum(cost[:2]) for costs in files.values() for cost in costs):8.1f} s in all: of the tests' processes, of others")
    sums = [(sum(own for own, _, _ in costs), sum(child for _, child, _ in costs), name) for name, costs in files.items()]
    for table in (sums, [cost for costs in files.values() for cost in costs]):
        for own, children, name in sorted(table, key=lambda cost: -sum(cost[:2]))[:most]:
            print(f"{own + children:8.1f} {own:8.1f} {children:8.1f}  {name}")
        print()
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "", "--collect-only", "tests"]
    every = set(subprocess.run(words, cwd=days.ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    found = {name: seconds for name, seconds in days.dear().items() if name in every}
    for costs in files.values():
        for own, children, name in costs:
            found.pop(name, None)
            if own + children > DEAR and "::" in name:
                found[name] = round(own + children, 1)
    days.DEAR.write_text("".join(f"{seconds} {name}\n" for name, seconds in sorted(found.items())), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
