"""Lines of code that change from each step of the forward ladder to the next: python experiments/ladder/changed.py.

A line of code has more than a comment. What is counted is a diff's added and removed lines together: of the lines as they stand, and
of their code alone, without indentation and the comments behind it, as a reader sees that only an argument's explanation was reworded.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.kernel import Kernel, catalogue

#: The last step before Hopper.
AMPERE = "mma_qreg_async"


def code(path: Path) -> list[str]:
    """The lines of a file that are more than a comment or empty."""
    return [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("//")]


def bare(line: str) -> str:
    """The code of a line: no indentation, no comment behind it, one space where there are several."""
    return " ".join(re.sub(r"\s//.*", "", line).split())


def changed(old: list[str], new: list[str]) -> int:
    """Lines that the smallest diff removes and adds: all but the longest common subsequence."""
    common = [0] * (len(new) + 1)  # of the lines of old so far, with the first j of new
    for line in old:
        diagonal = 0
        for j, other in enumerate(new):
            above = common[j + 1]
            common[j + 1] = diagonal + 1 if line == other else max(above, common[j])
            diagonal = above
    return len(old) + len(new) - 2 * common[-1]


def transitions() -> list[tuple[Kernel, Kernel, int, int]]:
    """Each step of the forward ladder up to `hopper` with the one before, the lines that change, and those of which the code does."""
    steps = sorted((k for k in catalogue() if k.pass_ == "forward"), key=lambda k: k.number)
    last = next(k.number for k in steps if k.name == "hopper")
    steps = [k for k in steps if k.number <= last]
    lines = [code(step.path) for step in steps]
    pairs = zip(steps, steps[1:], lines, lines[1:], strict=False)
    return [(a, b, changed(old, new), changed([*map(bare, old)], [*map(bare, new)])) for a, b, old, new in pairs]


def main() -> None:
    """Print each transition and the medians."""
    found = transitions()
    for before, after, lines, of_code in found:
        sys.stdout.write(
            f"{before.number:02} -> {after.number:02} {after.name:18} {lines:4} of {len(code(after.path)):4}; code alone {of_code:4}\n"
        )
    last = 1 + next(at for at, each in enumerate(found) if each[1].name == AMPERE)
    for what, part in ((f"up to {AMPERE}", found[:last]), (f"above {AMPERE}", found[last:])):
        medians = [statistics.median(each[at] for each in part) for at in (2, 3)]
        sys.stdout.write(f"median {what}: {medians[0]:g}; code alone {medians[1]:g}\n")


if __name__ == "__main__":
    main()
