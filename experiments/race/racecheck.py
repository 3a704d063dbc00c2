"""What compute-sanitizer's racecheck finds in the kernels of suite.py, on a GPU: recall and false alarms.

    PYTHONPATH=. python experiments/race/racecheck.py CLONE SAMPLES [--seconds 110] [--output FOLDER]

CLONE and SAMPLES are suite.py's (of the clone only indigo/indigo_sources and indigo/input are read, 3 MB). FOLDER, by default this one, gets
racecheck.csv with a row for each folder of the suite, racecheck_env.json, and racecheck.txt, what was missed and what was reported without a
race. racecheck watches shared memory only, which the folders *_neighbors_block use and the other kernels do not: what it misses there it
does not look for. Several processes share the GPU. First come the samples and the kernels with shared memory, and what has not run when
the time is over is counted as that.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from suite import TOGETHER, Source, folders_of, inputs, ready

from harness import backends
from harness.fault import KernelFault
from harness.files.environment import environment, write_env

COLUMNS = ["folder", "kernels", "racy", "found", "missed", "false_alarms", "not_run"]


def batches(folders: dict[str, list[Source]]) -> list[list[Source]]:
    """Kernels that are compiled together, in the order in which they run."""

    def place(name: str) -> tuple[bool, float]:
        return name != "Racecheck", -sum("__shared__" in each.code for each in folders[name]) / len(folders[name])

    order = [folders[name] for name in sorted(folders, key=place)]
    return [sources[i : i + TOGETHER] for sources in order for i in range(0, len(sources), TOGETHER)]


def run_part(given: argparse.Namespace) -> None:
    """In a process that the tool watches: every n-th batch. A line says which kernel has run."""
    backend = backends.pick(given.device)
    nodes, tensors = inputs(given.clone)
    for batch in batches(folders_of(given.clone, given.samples, nodes))[given.part :: given.processes]:
        with ready(batch, tensors, backend) as passes:
            for each, bound in zip(batch, passes, strict=True):
                try:
                    bound.launch()
                    sys.stdout.write(f"ran {each.name}\n")
                except KernelFault as fault:
                    sys.stdout.write(f"failed {each.name}: {fault}\n")
                sys.stdout.flush()


def logs_of(given: argparse.Namespace) -> str:
    """What the tool and the processes under it say until the time is over."""
    program = shutil.which(given.sanitizer) or shutil.which(given.sanitizer, path="/usr/local/cuda/bin")
    if not program:
        sys.exit(f"{given.sanitizer} is not on PATH: it comes with the CUDA toolkit")
    end = time.monotonic() + given.seconds
    environ = os.environ | {"FA_CLI_NO_POOL": "1", "OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for part in range(given.processes):
            command = [program, "--tool", "racecheck", "--print-limit", "100000", "--target-processes", "all", sys.executable, __file__]
            command += [str(given.clone), str(given.samples), "--device", given.device, "--part", str(part)]
            command += ["--processes", str(given.processes)]
            with (Path(folder) / f"{part}.log").open("w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True))
        for each in running:
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(0.0, end - time.monotonic()))
        for each in running:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        return "\n".join(log.read_text(errors="replace") for log in sorted(Path(folder).glob("*.log")))


def accused(said: str, names: set[str]) -> set[str]:
    """The kernels that a race is reported in: by the name of the entry, or of the namespace of a function that was not inlined."""
    lines = re.findall(r"^=+ .*(?:Race reported|access at).*", said, re.M)
    return {word.removeprefix("of_") for line in lines for word in re.findall(r"\w+", line)} & names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--seconds", type=float, default=110.0, help="when the last process is ended")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="cpu, with a stand-in for the tool, shows that this file works")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")
    parser.add_argument("--part", type=int, help="what a process under the tool is given")
    given = parser.parse_args()
    if given.part is not None:
        return run_part(given)
    began = time.monotonic()
    folders = folders_of(given.clone, given.samples, inputs(given.clone)[0])
    said = logs_of(given)
    ran = set(re.findall(r"^ran (\w+)$", said, re.M))
    races = accused(said, {each.name for sources in folders.values() for each in sources})
    rows, told = [], [line for line in said.splitlines() if re.match(r"failed |Traceback|\w*Error: |\w*Fault: ", line)]
    for folder, sources in folders.items():
        racy, right = ({each.name for each in sources if each.racy == wanted} for wanted in (True, False))
        missed, alarms = (racy & ran) - races, right & races
        counts = [len(sources), len(racy), len(racy & races), len(missed), len(alarms), len((racy | right) - ran - races)]
        rows.append([folder, *counts])
        told += [f"{name}: missed" for name in sorted(missed)] + [f"{name}: reported without a race" for name in sorted(alarms)]
    given.output.mkdir(parents=True, exist_ok=True)
    with (given.output / "racecheck.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerows([COLUMNS, *rows, ["all", *(sum(row[i] for row in rows) for i in range(1, len(COLUMNS)))]])
    (given.output / "racecheck.txt").write_text("".join(line + "\n" for line in told), encoding="utf-8")
    facts = backends.pick(given.device).environment() if given.device != "cpu" else {"device": "cpu"}
    write_env(given.output / "racecheck_env.json", environment(**facts, seconds=round(time.monotonic() - began, 1)))
    return None


if __name__ == "__main__":
    main()
