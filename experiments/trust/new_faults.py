"""Did the judge of an older commit see the faults that selftest has since then, by plain `run` and by the default `verify`? Does today's?

Each fault is planted in the older tree's own text of its kernel (steps were renumbered; a kernel is found by its name), and the older
harness judges it; then the same here. Both on the CPU backend.

    git worktree add --detach OLD 3870942
    nice python experiments/trust/new_faults.py OLD      # adds to new_faults.csv what is not in it, and prints the table by class
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from harness.verbs.selftest.mutant import Mutant, edited, mutants  # noqa: E402

RECORD = Path(__file__).with_suffix(".csv")
COLUMNS = ["class", "fault", "kernel", "run before", "verify before", "run", "verify", "what it is said to be"]
#: The classes of wrong kernels that an outside review found to pass, and the faults of each.
CLASSES = {
    "several works a block, registers": (
        "a work lost behind the first of each block",
        "the accumulators of the work before go on",
        "the storer waits for the phase of the first works",
        "a sum of registers that nothing has set to 0",
        "an accumulator of O that nothing has cleared",
        "accumulators of tensor cores that nothing has cleared",
        "accumulators of split products that nothing has cleared",
    ),
    "head dims over 128": ("head dims behind 128 left out of S",),
    "mask borders": ("a tile of 64 keys not masked for a query that sees 63",),
    "large and small values": ("large elements of V cut to what float16 holds", "small elements of V taken for 0"),
    "rows of choice": ("dK a tenth too large where the queries are walked backwards",),
    "scale 0 and negative": (
        "a negative scale taken for a positive one",
        "a negative scale whose sign is lost",
        "a scale of 0 taken for 1",
    ),
    "strides": ("O with the strides of Q", "an address of V taken for 32-byte aligned", "rows of K taken for contiguous"),
    "batches and heads": ("the third batch reads the first one's keys", "the seventeenth head reads the first one's keys"),
    "cheats by content or count": (
        "finds its answer by the content of K and V",
        "finds its answer by the content of K's first row",
        "finds its answer by the content of V",
        "finds its answer by the content of a row of Q",
        "zeros from its 150th launch on",
        "zeros in every 64th launch",
    ),
    "races by default": (  # these are no new faults: before, `verify --check race` alone saw them
        "no __syncwarp between lanes that write and lanes that read",
        "no barrier before the tile is replaced",
        "no barrier between two tiles",
    ),
    "what is said of a fault": ("one row wrong on all but the first inputs",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    (toml,) = asked.old.glob("harness/**/selftest/faults.toml")
    known = {table["name"] for table in tomllib.loads(toml.read_text())["fault"]}
    younger = [name for name in mutants() if name not in known and not any(name in names for names in CLASSES.values())]
    rows = list(csv.DictReader(RECORD.open())) if RECORD.exists() else []
    done = {row["fault"] for row in rows}
    todo = [(kind, name) for kind, names in CLASSES.items() for name in names if name not in done]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(lambda each: judged(*each, asked.old), todo):
            rows.append(row)
            print(",".join(row.values()), flush=True)
            with RECORD.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(sorted(rows, key=lambda row: list(CLASSES).index(row["class"])))
    print_table(rows)
    print(f"not in the table: {len(younger)} faults of steps that the older tree does not have: {', '.join(younger)}")


def judged(kind: str, name: str, old: Path) -> dict[str, str]:
    """A row of the record."""
    fault = mutants()[name]
    before, now = (verdicts(fault, tree) for tree in (old, ROOT))
    return dict(zip(COLUMNS, (kind, name, fault.kernel, before[0], before[1], now[0], now[1], now[2] or before[2]), strict=True))


def verdicts(fault: Mutant, tree: Path) -> tuple[str, str, str]:
    """Of a tree's judge: plain `run`, the default `verify` as "failed of cases", and what is said first; "-" where there is no such text."""
    name, _, pass_ = fault.kernel.rpartition("_")
    with tempfile.TemporaryDirectory() as folder:
        files = list((tree / "kernels_cu").glob(f"[0-9][0-9]_{fault.kernel}.cu"))
        path = Path(folder) / f"{fault.kernel}.cu"
        try:
            path.write_text(edited(files[0].read_text(), *fault.edits, where=files[0].name))
        except (IndexError, ValueError):
            return "-", "-", ""
        dtype = ("--dtype", fault.dtype) if fault.dtype != "float32" else ()
        run = fa_cli(tree, folder, "run", str(path), "--mode", pass_, *dtype)
        verify = fa_cli(tree, folder, "verify", str(path), "--mode", pass_, "--json")
    rows = json.loads(verify.stdout)["rows"]
    wrong = [row for row in rows if not row["passed"]]
    said = next((row["message"].splitlines()[0] for row in wrong), "")
    if not said and run.returncode:
        said = next(
            (line.strip() for line in run.stdout.splitlines() + run.stderr.splitlines() if " wrong" in line or "right " in line), ""
        )
    return "seen" if run.returncode else "passes", f"{len(wrong)} of {len(rows)}", said[:150]


def fa_cli(tree: Path, folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FA_CLI_DEVICE": "cpu", "COLUMNS": "200"}
    command = [sys.executable, str(tree / "cli.py"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in (0, 1, 5), f"{' '.join(words)}: exit {done.returncode}: {done.stderr}"
    return done


def print_table(rows: list[dict[str, str]]) -> None:
    """How many of a class were seen, by tree and command."""
    print(f"\n{'class':34} faults  run before  verify before  run  verify   (seen of those planted)")
    for kind in CLASSES:
        of = [row for row in rows if row["class"] == kind]
        seen: Counter[str] = Counter()
        for column in COLUMNS[3:7]:
            seen[column] = sum(row[column] not in ("passes", "-") and not row[column].startswith("0 of") for row in of)
        planted = sum(row["run before"] != "-" for row in of)
        print(
            f"{kind:34} {len(of):6}  {seen['run before']:5} of {planted:<2}  {seen['verify before']:8} of {planted:<2}  {seen['run']:3}  {seen['verify']:6}"
        )


if __name__ == "__main__":
    main()
