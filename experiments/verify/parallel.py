"""`fa-cli verify` and `fa-cli selftest` of all kernels by many processes that share the devices: a row a kernel, and what was not reached.

    python experiments/verify/parallel.py FOLDER --device cuda --processes 12 --seconds 280 full:hopper,split selftest quick full

Parts run in the order given: quick and full are the matrices of `fa-cli verify`, of all kernels or of those behind the colon (a case is
judged once). A case has the inputs, launches and verdict that it has in `fa-cli verify`; a failure prints the command that runs it alone.
With --device cuda the processes take all GPUs in turn. Times are not compared with anything: a device is shared. A fault that selftest
does not catch beside the others is tried again alone.
FOLDER/parallel.txt has what is printed, FOLDER/parallel.jsonl a line a case and a trial.
"""

from __future__ import annotations

import argparse
import glob
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.check.choose import kernels
from harness.check.request import Request
from harness.fault import Fault, UsageFault
from harness.kernel import Device, Kernel, catalogue, planner
from harness.verbs.selftest import selftest
from harness.verbs.selftest.mutant import mutants
from harness.verbs.selftest.trial import CHECKS
from harness.verbs.verify import Backends, Case, NoRoom, matrix, run_case
from harness.verbs.verify.cases import in_form
from harness.verbs.verify.choices import known, made
from harness.verbs.verify.judge import Lost

#: Cases, and faults, that a process takes at a time.
CASES, FAULTS = 16, 3
#: Seconds that are kept for faults that were not caught beside the others.
AGAIN = 25


@dataclass
class Item:
    """What a process takes: cases of a kernel, or faults of it."""

    part: str
    kernel: str
    cases: list[Case] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def row(self) -> tuple[str, str]:
        """The row of the table that it belongs to."""
        return self.part, self.kernel

    def __len__(self) -> int:
        return len(self.cases or self.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+", metavar="PART", help="quick[:KERNELS], full[:KERNELS] or selftest[:KERNELS]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=280, help="after which what is left is not reached")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    items = [item for part in asked.parts for item in _items(part, asked.device)]
    seen = set[tuple[str, str, str]]()
    for item in items:
        item.cases = [case for case in item.cases if (item.part, item.kernel, case.text()) not in seen]
        item.faults = [fault for fault in item.faults if (item.part, item.kernel, fault) not in seen]
        seen |= {(item.part, item.kernel, case.text()) for case in item.cases} | {(*item.row, fault) for fault in item.faults}
    items = [item for item in items if len(item)]
    with (asked.folder / "parallel.txt").open("w") as log, tempfile.TemporaryDirectory() as parts:
        report = Report(items, log)
        report.say(f"{sum(map(len, items))} cases and faults in {len(items)} pieces, {asked.processes} processes")
        pool(items, asked.device, asked.processes, start + asked.seconds, Path(parts), report)
        again = [Item(item.part, item.kernel, faults=[fault]) for item in items for fault in item.faults if fault in report.missed]
        if again and time.monotonic() < start + asked.seconds:
            report.say(f"{len(again)} faults again, alone")
            pool(again, asked.device, 1, start + asked.seconds, Path(parts), report, alone=True)
        report.end(time.monotonic() - start)
    (asked.folder / "parallel.jsonl").write_text("".join(json.dumps(line) + "\n" for line in report.lines))
    sys.exit(1 if report.failed else 0)


def _items(part: str, device: str) -> Iterator[Item]:
    """The items of a part of the command line. Cases that compile the same are beside each other."""
    name, _, spec = part.partition(":")
    chosen = kernels(Request(spec.split(",") if spec else list(dict.fromkeys(each.name for each in catalogue())), mode="both"), ())[0]
    backend = device.partition(":")[0]
    for kernel in chosen:
        if name == "selftest":
            faults = [m.name for m in mutants().values() if m.kernel == kernel.label and set(m.found_by) & set(CHECKS[backend])]
            yield from (Item(name, kernel.label, faults=faults[at : at + FAULTS]) for at in range(0, len(faults), FAULTS))
            continue
        cases = sorted(matrix(kernel, name, backend), key=lambda case, kernel=kernel: _compiled(kernel, case))
        yield from (Item(name, kernel.label, cases[at : at + CASES]) for at in range(0, len(cases), CASES))


def _compiled(kernel: Kernel, case: Case) -> str:
    """What is compiled for a case, as far as it is known without the device."""
    try:
        return repr(planner.plan(in_form(kernel, case), case.problem, Device("cpu", "", sms=case.sms or Device.sms)).macros)
    except Fault:
        return ""


def pool(items: Sequence[Item], device: str, count: int, until: float, folder: Path, report: Report, alone: bool = False) -> None:
    """Run the items in processes, each of which takes the next one; a process that ends early is replaced."""
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    processes: list[Any] = []
    started, gpus = 0, _gpus(device)
    while time.monotonic() < until - (AGAIN if report.missed and not alone else 0):
        processes = [each for each in processes if each.is_alive()]
        while len(processes) < count and taken.value < len(items) and started < count + len(items):
            path = folder / f"{'alone' if alone else 'part'}.{started}.jsonl"
            report.read_from(path)
            own = f"{device}:{started % gpus}" if gpus else device
            processes.append(context.Process(target=work, args=(items, own, taken, path), daemon=True))
            processes[-1].start()
            started += 1
        if not processes:  # what the last ones have written is read below
            break
        time.sleep(0.2)
        report.read()
    for each in processes:
        each.terminate()
    report.read()


def _gpus(device: str) -> int:
    """How many GPUs there are where the device does not name one; else 0."""
    if device != "cuda":
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def work(items: Sequence[Item], device: str, taken: Any, path: Path) -> None:
    """A process: items, one after the other, a line in its file for each case and trial."""
    of_label = {kernel.label: kernel for kernel in catalogue()}
    backends = Backends(device, None, None)
    with path.open("w") as file:
        while True:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(items):
                return
            item = items[number]
            lines = _trials(item, device) if item.faults else _judged(item, of_label[item.kernel], backends)
            for line in lines:
                file.write(json.dumps({"part": item.part, "kernel": item.kernel, **line}) + "\n")
                file.flush()
                if line.get("lost"):  # the CUDA context
                    os._exit(1)
            if hasattr(backends.first.xp, "get_default_memory_pool"):  # the memory of a GPU is for all
                backends.first.xp.get_default_memory_pool().free_all_blocks()


def _judged(item: Item, kernel: Kernel, backends: Backends) -> Iterator[dict[str, Any]]:
    for case in item.cases:
        line = {"case": case.text(), "number": case.number}
        try:
            done = run_case(backends.of(case), kernel, case, item.part)
        except NoRoom as fault:
            yield line | {"left_out": f"{fault.what}: {fault.why}"}
            continue
        if case.check and done.exit_code == UsageFault.exit_code:  # more than the race check keeps: as `fa-cli verify` has it
            yield line | {"left_out": done.message}
            continue
        said = {} if done.passed else {"message": done.message, "repro": done.repro}
        yield line | said | {"passed": done.passed, "seconds": round(done.seconds, 3), "lost": isinstance(done, Lost)}


def _trials(item: Item, device: str) -> Iterator[dict[str, Any]]:
    trials = selftest(device, only=[glob.escape(fault) for fault in item.faults])
    for fault in item.faults:
        own = [trial for trial in trials if trial.fault == fault]
        wrong = [f"{'right kernel accused' if t.control else 'not caught'} by {t.check}: {t.message}" for t in own if not t.caught]
        said = {"message": "; ".join(wrong)} if wrong else {}
        yield {"fault": fault, "passed": not wrong, "seconds": round(sum(t.seconds for t in own), 3), **said} | {
            "controls": sum(trial.control for trial in own)
        }


class Report:
    """What the processes have written so far, printed: a row where a kernel's part is complete."""

    def __init__(self, items: Sequence[Item], log: Any) -> None:
        self._items = items
        self.lines: list[dict[str, Any]] = []
        self.missed: dict[str, str] = {}
        self._log, self._files = log, dict[Path, int]()
        self._of_row: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._printed = set[tuple[str, str]]()
        self._kernels = {kernel.label: kernel for kernel in catalogue()}

    @property
    def failed(self) -> bool:
        """Whether a case failed, or a fault was not caught, not even alone."""
        return bool(self.missed) or any(not line.get("passed", True) for line in self.lines if "case" in line)

    def say(self, text: str) -> None:
        """Print it, and to the log."""
        for file in (sys.stdout, self._log):
            click.echo(text, file)
            file.flush()

    def read_from(self, path: Path) -> None:
        """Another file that a process writes."""
        self._files[path] = 0

    def read(self) -> None:
        """Take the new lines of all files."""
        for path, at in self._files.items():
            if not path.exists():
                continue
            text = path.read_bytes()[at:]
            whole = text[: text.rfind(b"\n") + 1]
            self._files[path] = at + len(whole)
            for line in map(json.loads, whole.splitlines()):
                self._take(line)
        for row in {item.row for item in self._items} - self._printed:
            if len(self._of_row[row]) >= sum(len(item) for item in self._items if item.row == row):
                self._printed.add(row)
                self.say(self._words(row))

    def _take(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._of_row[line["part"], line["kernel"]].append(line)
        if "fault" in line:
            if line["passed"]:
                self.missed.pop(line["fault"], None)
            else:
                self.missed[line["fault"]] = line["message"]
        elif not line.get("passed", True):
            self.say(f"FAIL {line['kernel']} {line['case']}: {line['message'].partition(chr(10))[0]}\n     {line['repro']}")
        if "left_out" in line:
            self.say(f"left out: {line['left_out']}")

    def _words(self, row: tuple[str, str], wanted: int = 0) -> str:
        part, label = row
        lines = self._of_row[row]
        bad, out = sum(not line.get("passed", True) for line in lines), sum("left_out" in line for line in lines)
        text = f"{part:9} {label:26} {len(lines) - out:4} {'faults, not caught' if part == 'selftest' else 'cases, failed'} {bad}"
        text += f", left out {out}" * bool(out) + f", {sum(line.get('seconds', 0) for line in lines):.0f} s"
        if part != "selftest":
            kernel = self._kernels[label]
            met = frozenset[Any]().union(*(made(kernel, *Case.parse(line["case"]).planned) for line in lines if line.get("passed")))
            lost = sorted(known(kernel) - met)
            text += f", meets {len(met)} of {len(known(kernel) | met)} choices" + f", not {lost}" * bool(lost and not wanted)
        return text + f"; {wanted - len(lines)} not reached" * (wanted > len(lines))

    def end(self, seconds: float) -> None:
        """Rows that are not complete, the faults that were not caught, and a line for each part."""
        wanted: dict[tuple[str, str], int] = defaultdict(int)
        for item in self._items:
            wanted[item.row] += len(item)
        for row in wanted.keys() - self._printed:
            self.say(self._words(row, wanted[row]))
        for fault, why in self.missed.items():
            self.say(f"not caught, alone either: {fault}: {why}")
        for part in dict.fromkeys(item.part for item in self._items):
            judged = {(each["kernel"], each.get("case") or each["fault"]): each for each in self.lines if each["part"] == part}
            bad, out = sum(not each.get("passed", True) for each in judged.values()), sum("left_out" in each for each in judged.values())
            total = sum(count for (own, _), count in wanted.items() if own == part)
            right = sum(each.get("controls", 0) for each in self.lines if each["part"] == part)
            said = f"{bad} not caught, {right} times a right kernel was tried" if part == "selftest" else f"{bad} failed"
            self.say(f"{part}: {len(judged) - out} of {total} judged, {said}" + f", {out} left out" * bool(out))
        self.say(f"{'FAIL' if self.failed else 'PASS'} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
