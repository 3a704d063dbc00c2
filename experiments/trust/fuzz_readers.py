"""Damage every kind of file that fa-cli reads, and read it: no traceback, no hang, the right exit code.

    .venv/bin/python experiments/trust/fuzz_readers.py [--cases 500] [--seed 1] [--reader NAME]

Prints a table of counts and each case that failed; exit code 1 where one did. tests/support/fuzz.py has the mutations.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import fuzz  # noqa: E402  # it is found there only


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500, help="of each reader")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--reader", choices=[*fuzz.READERS], action="append")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| reader | cases | failed | seconds |\n|---|---:|---:|---:|", flush=True)
    failed = []
    for name in given.reader or fuzz.READERS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = list(fuzz.cases(name, Path(folder), given.cases, given.seed))
            os.chdir(ROOT)
        print(f"| {name} | {given.cases} | {len(found)} | {time.monotonic() - start:.0f} |", flush=True)
        failed += [f"{name} {number}: {why}" for number, why in found]
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
