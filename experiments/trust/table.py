"""A table of docs/notes/checks.md: kernels x checks, counted from records and faults.toml. `make docs` writes it.

Counts of the H200 are those of experiments/verify (verify.log, repeat.log), faults those of harness/verbs/selftest/faults.toml, which
`fa-cli selftest` plants.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.kernel import catalogue
from harness.verbs.selftest.mutant import mutants

ROOT = Path(__file__).resolve().parents[2]


def counted(name: str) -> Counter[tuple[str, str]]:
    """Cases that passed in a log of `fa-cli verify`, by kernel and pass. Raises ValueError where one failed."""
    found: Counter[tuple[str, str]] = Counter()
    for line in (ROOT / "experiments" / "verify" / name).read_text().splitlines():
        if match := re.match(r"(\w+) +(forward|backward) +(\d+) +(\d+) +[\d.e+-]+ +(PASS|FAIL)$", line):
            if match[4] != "0":
                raise ValueError(f"{name}: {line}")
            found[match[1], match[2]] += int(match[3])
    return found


def table() -> str:
    """The table in Markdown; an empty cell is a count of none."""
    matrix, repeats = counted("verify.log"), counted("repeat.log")
    kinds = sorted({mutant.kind for mutant in mutants().values()})
    lines = ["| kernel | H200: matrix | H200: 250 repeats at B60 | " + " | ".join(kinds) + " |", "|---" + "|---:" * (2 + len(kinds)) + "|"]
    sums: Counter[str] = Counter()
    for chosen in catalogue():
        key = chosen.name, chosen.pass_
        planted = Counter(mutant.kind for mutant in mutants().values() if mutant.kernel == chosen.label)
        sums += planted + Counter({"matrix": matrix[key], "repeats": repeats[key]})
        cells = [matrix[key] or "", repeats[key] or "", *(planted[kind] or "" for kind in kinds)]
        lines.append(f"| {chosen.number:02} {chosen.name} {chosen.pass_} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "| all | " + " | ".join(str(sums[name]) for name in ("matrix", "repeats", *kinds)) + " |"]) + "\n"


if __name__ == "__main__":
    click.echo(table())
