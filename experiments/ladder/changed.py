"""Lines of code that change from each step of the forward ladder to the next: python experiments/ladder/changed.py.

A line of code has more than a comment. What is counted is a diff's added and removed lines together.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.kernel import Kernel, catalogue

#: The last step before Hopper.
AMPERE = 14


def code(path: Path) -> list[str]:
    """The lines of a file that are more than a comment or empty."""
    return [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("//")]


def changed(before: Path, after: Path) -> int:
    """Lines that the smallest diff of the code removes and adds: all but the longest common subsequence."""
    old, new = code(before), code(after)
    common = [0] * (len(new) + 1)  # of the lines of old so far, with the first j of new
    for line in old:
        diagonal = 0
        for j, other in enumerate(new):
            above = common[j + 1]
            common[j + 1] = diagonal + 1 if line == other else max(above, common[j])
            diagonal = above
    return len(old) + len(new) - 2 * common[-1]


def transitions() -> list[tuple[Kernel, Kernel, int]]:
    """Each step of the forward ladder up to `hopper` with the one before, and the lines that change."""
    steps = sorted((k for k in catalogue() if k.pass_ == "forward"), key=lambda k: k.number)
    last = next(k.number for k in steps if k.name == "hopper")
    steps = [k for k in steps if k.number <= last]
    return [(a, b, changed(a.path, b.path)) for a, b in zip(steps, steps[1:], strict=False)]


def main() -> None:
    """Print each transition and the medians."""
    found = transitions()
    for before, after, lines in found:
        sys.stdout.write(f"{before.number:02} -> {after.number:02} {after.name:18} {lines:4} of {len(code(after.path)):4}\n")
    for what, part in (
        (f"up to {AMPERE}", [n for _, b, n in found if b.number <= AMPERE]),
        (f"above {AMPERE}", [n for _, b, n in found if b.number > AMPERE]),
    ):
        sys.stdout.write(f"median {what}: {statistics.median(part):g}\n")


if __name__ == "__main__":
    main()
