"""Commands that are killed: at their n-th fsync, rename or the like, or at a random moment; and what must then still hold.

A command runs in a forked child of this process, in which everything is imported already: a kill takes a tenth of a second. The child
patches the functions of os that change a folder, counts their calls, and ends itself with SIGKILL just before or after one of them.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
from harness import files
from harness.backends.host.build import compiler
from harness.dataset import folder as dataset
from harness.dataset.generate import INPUTS
from harness.row import read_rows
from harness.verbs import experiment

#: The functions of os at which a command is killed.
POINTS = ("fsync", "replace", "rename", "unlink", "mkdir", "ftruncate", "truncate")
SHAPE = ("--batch", "1", "--heads", "2", "--seq", "24", "--dim", "16")
NAME = "B1_H2_S24_D16"
SWEEP = """
title = "kills"
kernels = ["naive"]
peers = ["numpy"]
mode = "both"
shapes = [{ batch = 1, heads = 1, seq = [8, 12], dim = 8 }]
"""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: a signal), what it printed, how many points it passed, and its seconds."""

    code: int
    said: str
    points: int
    seconds: float


def command(*words: str, cwd: Path, kill_at: int | None = None, kill_after: float | None = None) -> Ended:
    """Run fa-cli in a forked child. kill_at: each call of POINTS passes a point before it and one after it. kill_after: seconds."""
    said, start = cwd / ".said", time.monotonic()
    said.touch()
    read, write = os.pipe()
    with warnings.catch_warnings():  # this process's other threads are idle
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _in_child(words, cwd, said, write, kill_at)
    os.close(write)
    if kill_after is not None:
        time.sleep(kill_after)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        points = len(pipe.read())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = said.read_text(errors="replace")
    said.unlink()
    return Ended(code, text, points, time.monotonic() - start)


def _in_child(words: tuple[str, ...], cwd: Path, said: Path, write: int, kill_at: int | None) -> None:
    code = 99
    try:
        os.chdir(cwd)
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {"FA_CLI_DEVICE": "cpu", "FA_CLI_COMMIT": "0" * 40, "FA_CLI_THREADS": "1"}
        reached, turn, own = itertools.count(), threading.Lock(), os.getpid()  # threads write files side by side

        def point() -> None:
            with turn:
                if next(reached) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*given: Any, **more: Any) -> Any:
                if os.getpid() != own:  # the process of a shape: its end costs a row and not the command
                    return call(*given, **more)
                point()
                found = call(*given, **more)
                os.write(write, b".")
                point()
                return found

            return wrapped

        experiment._draw = small_figures
        for name in POINTS:
            setattr(os, name, counted(getattr(os, name)))
        cli.main(list(words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        os._exit(code)


def small_figures(folder: Path, *more: object) -> list[Path]:
    """In place of the figures, which take seconds: one file, written as they are."""
    files.write_files(folder, {"summary.md": b"summary"})
    files.write_files(folder, {"figure.png": b"png"})
    return [folder / "summary.md", folder / "figure.png"]


# -- what is killed, what comes next, and what must hold ---------------------------------------------------------------


@dataclass
class Scenario:
    """A command to kill in a folder that `before` prepared, and the next command, after which `holds` raises where something is wrong."""

    name: str
    before: tuple[tuple[str, ...], ...]
    killed: tuple[str, ...]
    next: tuple[str, ...]
    holds: Callable[[Path, Path], None]


def _whole_data(folder: Path, start: Path) -> None:
    opened = dataset.open_(folder / "data" / NAME)
    opened.read_inputs(INPUTS)
    assert opened.seed in (42, 43)
    _no_leftovers(opened.folder)


def _whole_outputs(folder: Path, start: Path) -> None:
    _whole_data(folder, start)
    place = folder / "data" / NAME
    record = json.loads((place / "outputs.json").read_text())
    for name, digest in record["outputs"].items():
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest, f"{name} is of another set"


def _rows_once(folder: Path, start: Path) -> None:
    place = max(table.parent for table in (folder / "out").glob("*/results.csv"))  # the last run of s, in s or s-2
    rows = read_rows(place / "results.csv")
    with open(place / "results.csv", newline="") as file:
        lines = [tuple(line.values()) for line in csv.DictReader(file)]
    run_ids = list(dict.fromkeys(row.run_id for row in rows))
    samples = [json.loads(line) for line in (place / "samples.jsonl").read_text().splitlines()]
    cells = [(r.run_id, r.Test, r.Kernel, r.Type, r.timing) for r in rows]
    assert len(set(cells)) == len(cells) == len(lines) and all(row.Status == "PASS" for row in rows)
    assert sorted(cells) == sorted((s["run_id"], s["Test"], s["Kernel"], s["Type"], s["timing"]) for s in samples)
    record = json.loads((place / "env.json").read_text())
    last = [row for row in rows if row.run_id == record["run_id"]]
    assert len(last) == 12, f"{len(last)} rows of the run, 2 shapes x 2 contenders x 3 passes are 12"
    assert set(run_ids) <= {record["run_id"], *record.get("earlier", {})}
    _no_leftovers(place)


def _rows_kept(folder: Path, start: Path) -> None:
    _rows_once(folder, start)
    had = start / "out" / "s" / "results.csv"
    assert not had.exists() or (folder / "out" / "s" / had.name).read_text().startswith(had.read_text()), "rows are lost or changed"


def _no_leftovers(folder: Path) -> None:
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


EXPERIMENT = ("experiment", "s.toml", "--output-dir", "out")
GEN, RUN = ("gen-data", *SHAPE), ("run", "--data", f"data/{NAME}")
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("gen-data", (), GEN, GEN, _whole_data),
        Scenario("gen-data --force", (GEN,), (*GEN, "--seed", "43", "--force"), RUN, _whole_data),
        Scenario(
            "run",
            (GEN, (*RUN, "--compute", "naive", "--mode", "both")),
            (*RUN, "--compute", "numpy", "--mode", "both"),
            (*RUN, "--compute", "naive", "--mode", "backward"),
            _whole_outputs,
        ),
        Scenario("experiment", (), EXPERIMENT, (*EXPERIMENT, "--resume"), _rows_kept),
        Scenario("second experiment", (EXPERIMENT,), EXPERIMENT, (*EXPERIMENT, "--resume"), _rows_kept),
        Scenario(
            "experiment --resume",
            ((*EXPERIMENT, "--only", "S8"),),
            (*EXPERIMENT, "--resume"),
            (*EXPERIMENT, "--resume"),
            _rows_kept,
        ),
        Scenario(
            "experiment --resume, another mode",
            ((*EXPERIMENT, "--mode", "forward"),),
            (*EXPERIMENT, "--resume"),
            (*EXPERIMENT, "--resume"),
            _rows_once,
        ),
        Scenario("run, new data", (), ("run", *SHAPE), ("run", *SHAPE, "--mode", "both"), _whole_outputs),
    )
}


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder in memory where there is one: what a kill leaves is the same, and an fsync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fa_cli_", dir=memory) as name:
        yield Path(name)


def prepared(scenario: Scenario, folder: Path) -> Path:
    """A folder in which the scenario's first commands have run. Compiles what is not in the cache, so that no kill waits for it."""
    folder.mkdir(parents=True)
    (folder / "s.toml").write_text(SWEEP)
    compiler()  # asked once, before the first fork
    for words in scenario.before:
        done = command(*words, cwd=folder)
        assert done.code == 0, done.said
    return folder


def attempt(scenario: Scenario, start: Path, folder: Path, **kill: Any) -> Ended:
    """Copy the start, run and kill the command, run the next one, and check. Returns how the killed command ended."""
    shutil.copytree(start, folder)
    killed = command(*scenario.killed, cwd=folder, **kill)
    assert killed.code in (0, -signal.SIGKILL), killed.said
    after = command(*scenario.next, cwd=folder)
    assert after.code == 0 and "Traceback" not in after.said, f"the next command: exit code {after.code}\n{after.said}"
    scenario.holds(folder, start)
    shutil.rmtree(folder)
    return killed


def points(scenario: Scenario, start: Path, folder: Path) -> tuple[int, float]:
    """The points of the scenario's command, and its seconds."""
    whole = attempt(scenario, start, folder)
    return 2 * whole.points, whole.seconds
