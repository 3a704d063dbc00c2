"""What `--check race` costs over global memory, and that it is silent: each kernel in each of its forms, on a small case of the tests.

    PYTHONPATH=.:tests/support python experiments/race/cost.py [KERNEL_PASS…] > experiments/race/cost.csv

shared_s: CPU seconds of a pass under the check of shared memory alone, the least of three; both_s: under the whole check. tensors_kb: its
tensors and workspaces. shadow_kb: the pages of shadow memory of global memory that the launches have touched. said: empty where the check
is silent.
"""

from __future__ import annotations

import csv
import sys
import time

import clean
import numpy as np

from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.kernel import Kernel, catalogue
from harness.verbs.verify.cases import Case
from harness.verbs.verify.judge import in_form, oracle_of

PAGE = 4096


def seconds(bound: Bound) -> float:
    """The least CPU time of three passes."""
    found = []
    for _ in range(3):
        bound.poison()
        start = time.process_time()
        bound.launch()
        found.append(time.process_time() - start)
    return min(found)


def row_of(chosen: Kernel, case: Case) -> list[str]:
    """A row of the table."""
    backend = Host(check="race")
    oracle = oracle_of(backend, case, chosen.pass_)
    loaded = backend.load(in_form(chosen, case), case.problem)
    bound = Bound(backend, loaded, case.problem, oracle.inputs_of(chosen.pass_))
    watched = dict(backend._memory)
    backend._memory.clear()
    shared = seconds(bound)
    backend._memory.update(watched)
    said, both = "", 0.0
    try:
        both = seconds(bound)
    except KernelFault as fault:
        said = str(fault).partition("\n")[0]
    pages = sum(int(np.count_nonzero(whole[: whole.size // PAGE * PAGE].reshape(-1, PAGE).any(axis=1))) for _, whole in watched.values())
    sizes = [f"{bound.device_bytes / 1024:.0f}", f"{pages * PAGE / 1024:.0f}", f"{pages * PAGE / bound.device_bytes:.2f}"]
    return [chosen.label, case.text(), f"{shared:.3f}", f"{both:.3f}", f"{both / shared:.2f}", *sizes, said]


def main(names: list[str]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["kernel", "case", "shared_s", "both_s", "time", "tensors_kb", "shadow_kb", "memory", "said"])
    for chosen in catalogue():
        forms = {case.deterministic: case for case in reversed(clean.cases(chosen))} if not names or chosen.label in names else {}
        for case in forms.values():
            out.writerow(row_of(chosen, case))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
