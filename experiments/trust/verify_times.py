"""The default `fa-cli verify` of an older commit and of this one, kernel by kernel: cases, choices of the header met, processor time.

    git worktree add --detach OLD 3870942
    nice python experiments/trust/verify_times.py OLD > experiments/trust/verify_times.txt

The CPU engine; seconds are user time of the command and its processes, which other work on the machine lengthens little, with all that it
needs compiled before. Choices are those of today's header (harness/verbs/verify/choices.py), also of the older commit's cases.
verify_times.csv has a row a kernel; what stands in it is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.kernel import Kernel, catalogue
from harness.verbs.verify import Case
from harness.verbs.verify.choices import known, made

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["kernel", "cases before", "cases", "choices met before", "choices met", "choices", "seconds before", "seconds"]
#: Prints the text of each case of a kernel's quick matrix, and compiles what they need.
CASES = """
import inspect, sys
try:
    from harness.verbs import verify
except ImportError:
    from harness import verify
from harness.kernel import catalogue
kernel = next(each for each in catalogue() if each.label == sys.argv[1])
cases = verify.matrix(kernel, "quick", "cpu")
backends = verify.judge.Backends("cpu", None, None)
several = "of" in inspect.signature(verify.judge.compile_ahead).parameters
verify.judge.compile_ahead(backends.first, [(each, kernel) for each in cases], *[backends.of] * several)
print("\\n".join(each.text() for each in cases))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("--kernels", help="NAME_PASS,… alone")
    parser.add_argument("--record", type=Path, default=Path(__file__).with_suffix(".csv"))
    asked = parser.parse_args()
    rows = list(csv.DictReader(asked.record.open())) if asked.record.exists() else []
    for kernel in catalogue():
        wanted = not asked.kernels or kernel.label in asked.kernels.split(",")
        if not wanted or any(row["kernel"] == kernel.label for row in rows):
            continue
        rows.append({"kernel": kernel.label, **judged(kernel, asked.old.resolve(), " before"), **judged(kernel, ROOT, "")})
        with asked.record.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(rows)
    print_table(rows)


def judged(kernel: Kernel, tree: Path, when: str) -> dict[str, str]:
    """The columns of a kernel in a tree; nothing where the tree does not have it."""
    if not list((tree / "kernels_cu").glob(f"[0-9][0-9]_{kernel.label}.cu")):
        return {}
    environment = os.environ | {"FA_CLI_DEVICE": "cpu", "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", CASES, kernel.label], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    cases = [Case.parse(line) for line in done.stdout.split()]
    met = frozenset[tuple[str, str]]().union(*(made(kernel, *case.planned) for case in cases))
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, str(tree / "cli.py"), "verify", kernel.name, "--mode", kernel.pass_, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
    found = {
        f"cases{when}": str(len(json.loads(done.stdout)["rows"])),
        f"choices met{when}": str(len(met)),
        f"seconds{when}": f"{seconds:.1f}",
    }
    return found if when else found | {"choices": str(len(known(kernel) | met))}


def print_table(rows: list[dict[str, str]]) -> None:
    """A line a kernel, and the sums of those that both trees have."""
    click.echo(f"{'kernel':28} cases before  now   choices met before  now of all   user s before    now  ratio")
    for row in rows:
        seconds = [float(row.get(name) or 0) for name in ("seconds before", "seconds")]
        ratio = f"{seconds[1] / seconds[0]:6.2f}" if seconds[0] else "     -"
        cells = [row.get(name) or "-" for name in COLUMNS[1:]]
        click.echo(
            f"{row['kernel']:28} {cells[0]:>12} {cells[1]:>4} {cells[2]:>20} {cells[3]:>4} {cells[4]:>6} {cells[5]:>15} {cells[6]:>6} {ratio}"
        )
    both = [row for row in rows if row.get("seconds before")]
    before, now = (sum(float(row[name]) for row in both) for name in ("seconds before", "seconds"))
    click.echo(f"the {len(both)} that both have: {before:.1f} s before, {now:.1f} s now, {now / before:.2f}; cases: "
               f"{sum(int(row['cases before']) for row in both)} and {sum(int(row['cases']) for row in both)}")  # fmt: skip


if __name__ == "__main__":
    main()
