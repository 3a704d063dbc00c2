"""Did the judge of an older commit see the faults that selftest has since then, by plain `run` and by the default `verify`? Does today's?

Each fault is planted in the older tree's own text of its kernel (steps were renumbered; a kernel is found by its name), and the older
harness judges it; then the same here. Both on the CPU engine.

    git worktree add --detach OLD 3870942
    nice python experiments/trust/new_faults.py OLD > experiments/trust/new_faults.txt

new_faults.csv has a row a fault; what stands in it is not judged again.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from harness.verbs.selftest.mutant import Mutant, edited, mutants  # noqa: E402

SAID = "what is said of it now"
COLUMNS = ["class", "fault", "kernel", "run before", "verify before", "run", "verify", SAID]
#: Kernels whose cases take long, which come first.
LONGEST = ["hopper_backward", "naive_backward", "split_forward", "naive_forward", "hopper_forward", "mma_qreg_async_forward"]
#: The classes of wrong kernels that an outside review found to pass, and the faults of each.
CLASSES = {
    "several works a block, registers": (
        "a work lost behind the first of each block",
        "the accumulators of the work before go on",
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
    parser.add_argument("--record", type=Path, default=Path(__file__).with_suffix(".csv"))
    asked = parser.parse_args()
    (toml,) = asked.old.glob("harness/**/selftest/faults.toml")
    known = {table["name"] for table in tomllib.loads(toml.read_text())["fault"]}
    younger = [name for name in mutants() if name not in known and not any(name in names for names in CLASSES.values())]
    found: dict[str, dict[str, str]] = {row["fault"]: row for row in csv.DictReader(asked.record.open())} if asked.record.exists() else {}
    for kind, names in CLASSES.items():
        for name in names:
            found.setdefault(name, dict.fromkeys(COLUMNS, "") | {"class": kind, "fault": name, "kernel": mutants()[name].kernel})
    trees = {" before": asked.old.resolve(), "": ROOT}
    todo = [(name, verb + when) for name in found for verb in ("run", "verify") for when in trees if not found[name][verb + when]]
    todo.sort(key=lambda each: (*LONGEST, found[each[0]]["kernel"]).index(found[each[0]]["kernel"]))

    def judged(each: tuple[str, str]) -> None:
        name, column = each
        verb, _, when = column.partition(" ")
        found[name][column], said = verdict(mutants()[name], trees[" before" if when else ""], verb)
        found[name][SAID] = found[name][SAID] if when else said or found[name][SAID]

    with ThreadPoolExecutor(asked.jobs) as pool:
        for done in as_completed([pool.submit(judged, each) for each in todo]):
            done.result()
            with asked.record.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(found.values())
    print_table(list(found.values()))
    print(f"Not in the table: {len(younger)} faults of steps that the older tree does not have: {'; '.join(younger)}")


def verdict(fault: Mutant, tree: Path, verb: str) -> tuple[str, str]:
    """What a tree's `run` or default `verify` finds, "failed of cases", and what is said first; "no such text" where it cannot be planted."""
    with tempfile.TemporaryDirectory() as folder:
        files = list((tree / "kernels_cu").glob(f"[0-9][0-9]_{fault.kernel}.cu"))
        path = Path(folder) / f"{fault.kernel}.cu"
        try:
            path.write_text(edited(files[0].read_text(), *fault.edits, where=files[0].name))
        except (IndexError, ValueError):
            return "no such text", ""
        words = [str(path), "--mode", fault.kernel.rpartition("_")[2]]
        dtype = ["--dtype", fault.dtype] if fault.dtype != "float32" else []
        words += ["--json"] if verb == "verify" else dtype
        if verb == "run" and "by the content" in fault.name:  # a hash of K and V for every row: at run's own size it takes minutes a launch
            words += ["--batch", "1", "--heads", "2", "--seq", "129"]
        if verb == "run" and words[2] == "backward":  # it reads O and logsumexp
            fa_cli(tree, folder, verb, "fa2", "--mode", "forward", *dtype)
        done = fa_cli(tree, folder, verb, *words)
    if done.returncode == 5 or (verb == "run" and done.returncode):  # a deadlock and the like ends either
        lines = (done.stdout + done.stderr).splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith(("FAIL", "error"))), len(lines))
        return "seen", " ".join(lines[at + 1 : at + 2]).strip()[:150]
    if verb == "run":
        return "passes", ""
    rows = json.loads(done.stdout)["rows"]
    wrong = [row for row in rows if not row["passed"]]
    return f"{len(wrong)} of {len(rows)}", wrong[0]["message"].partition("\n")[0][:150] if wrong else ""


def fa_cli(tree: Path, folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FA_CLI_DEVICE": "cpu", "COLUMNS": "200"}
    command = [sys.executable, str(tree / "cli.py"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in (0, 1, 5), f"{' '.join(words)}: exit {done.returncode}: {done.stderr}"
    return done


def print_table(rows: list[dict[str, str]]) -> None:
    """How many of a class were seen, by tree and command."""
    columns = COLUMNS[3:7]
    print(f"{'class':34} faults  {'  '.join(columns)}")
    for kind in CLASSES:
        of = [row for row in rows if row["class"] == kind]
        seen = {column: sum(row[column] == "seen" or row[column][:2] not in ("", "0 ", "no", "pa") for row in of) for column in columns}
        print(f"{kind:34} {len(of):6}  {'  '.join(f'{seen[column]:{len(column)}}' for column in columns)}")


if __name__ == "__main__":
    main()
