"""What `--check race` costs over global memory, and that it is silent: each kernel in each of its forms, on a small case of the tests.

    PYTHONPATH=.:tests/support nice python experiments/race/cost.py [KERNEL_PASS…]

Adds a row to experiments/race/cost.csv for each form that has none: what was cut off goes on where it stopped, and a form whose row is
deleted is measured again. env.json is written behind the last one.

shared_s: CPU seconds (user and system, of all threads) of a pass under the check of shared memory alone, the least of three; both_s: under
the whole check. The two take turns, so that what else runs on the machine slows both. A form whose passes take more than SLOW seconds has
two turns. tensors_kb: its tensors and workspaces. shadow_kb: the pages of shadow memory of global memory that the launches have touched.
said: empty where the check is silent.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import clean
import numpy as np

from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.files.environment import environment, write_env
from harness.kernel import Kernel, catalogue
from harness.verbs.verify.cases import Case
from harness.verbs.verify.judge import in_form, oracle_of

FOLDER = Path(__file__).parent
COLUMNS = ["kernel", "case", "shared_s", "both_s", "time", "tensors_kb", "shadow_kb", "memory", "said"]
PAGE = 4096
TURNS, SLOW = 3, 5.0


def seconds(bound: Bound) -> float:
    """The CPU time of a pass."""
    bound.poison()
    start = time.process_time()
    bound.launch()
    return time.process_time() - start


def row_of(chosen: Kernel, case: Case) -> list[str]:
    """A row of the table."""
    backend = Host(check="race")
    oracle = oracle_of(backend, case, chosen.pass_)
    loaded = backend.load(in_form(chosen, case), case.problem)
    bound = Bound(backend, loaded, case.problem, oracle.inputs_of(chosen.pass_))
    watched = dict(backend._memory)
    shared: list[float] = []
    both: list[float] = []
    said = ""
    try:
        while len(both) < (2 if sum(both[:1]) > SLOW else TURNS):
            backend._memory.clear()
            shared.append(seconds(bound))
            backend._memory.update(watched)
            both.append(seconds(bound))
    except KernelFault as fault:
        said = str(fault).partition("\n")[0]
    pages = sum(int(np.count_nonzero(whole[: whole.size // PAGE * PAGE].reshape(-1, PAGE).any(axis=1))) for _, whole in watched.values())
    least, most = min(shared, default=0.0), min(both, default=0.0)
    times = [f"{least:.3f}", f"{most:.3f}", f"{most / least:.2f}" if least else ""]
    sizes = [f"{bound.device_bytes / 1024:.0f}", f"{pages * PAGE / 1024:.0f}", f"{pages * PAGE / bound.device_bytes:.2f}"]
    return [chosen.label, case.text(), *times, *sizes, said]


def main(names: list[str]) -> None:
    path = FOLDER / "cost.csv"
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with path.open(encoding="utf-8", newline="") as file:
        done = {(row["kernel"], row["case"]) for row in csv.DictReader(file)}
    for chosen in catalogue():
        forms = {case.deterministic: case for case in reversed(clean.cases(chosen))} if not names or chosen.label in names else {}
        for case in forms.values():
            if (chosen.label, case.text()) in done:
                continue
            row = row_of(chosen, case)
            with path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
            sys.stderr.write(" ".join(row) + "\n")
    write_env(FOLDER / "env.json", environment(device="cpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
