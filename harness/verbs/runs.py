"""Where a run of a sweep lives, and how its rows get there: one folder a run, one run a folder.

A run writes into <output-dir>/<sweep>/. A second run replaces nothing: it writes into <sweep>-2, <sweep>-3 and so on beside the first.
A folder that holds another sweep, or rows of another device, is refused: a table of both would be read as one run.
"""

from __future__ import annotations

import itertools
import json
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .. import files
from ..fault import Dropped, UsageFault, clipped
from ..files import environment
from ..row import Row, encoded, holds_a_run, mend, read_rows
from . import results
from .sweep import ROOT, SWEEPS, Options, Sweep

if TYPE_CHECKING:
    from ..backends import Backend


def place(name: str, options: Options, backend: Backend) -> tuple[Path, Path]:
    """The folder of a sweep's rows and the folder of its figures; both are made.

    Without --record: the run to go on with, where options.resume, else a folder that holds no run. Raises UsageFault where the sweep's
    folder holds another sweep or rows of another device, DiskFault where an experiment is writing there or a folder cannot be made.
    """
    if options.record:
        if not (ROOT / "pyproject.toml").is_file():
            raise UsageFault("--record needs a checkout", "runs of record are committed beside the sources", "use --output-dir DIR")
        folder, pictures = _recorded(name, options, backend), ROOT / "plots"
    else:
        folder = pictures = _run(name, options, backend)
    for made in (folder, pictures):
        files.make_folder(made)
    return folder, pictures


def begin(folder: Path, sweep: Sweep, backend: Backend, options: Options) -> tuple[str, list[Row]]:
    """The run_id, and the rows it has already where it is resumed. Torn tables are cut to their whole lines, env.json names the run.

    env.json is written before the first row: the run to resume is the one that it names, whether that has rows or not.
    """
    table, samples = folder / "results.csv", folder / "samples.jsonl"
    if options.resume:
        mend(table, quoted=True)
        mend(samples)
        before = read_rows(table) if table.exists() else []  # before any work is done: a file of a later version is refused
        there = table.read_bytes() if table.exists() else b""
        if there and not there.startswith(encoded(table, [], anew=True)):  # of a version that had fewer columns
            files.write_files(folder, {table.name: encoded(table, before, anew=True)})
        last = environment.env_beside(table)
        if last and (drawn := last.get("seed")) != sweep.seed:
            why = f"its problems were drawn by {f'seed {drawn}' if drawn is not None else 'none'}; these are of seed {sweep.seed}"
            raise UsageFault(f"{folder} cannot be resumed", why, "leave out --resume" if drawn is None else f"add --seed {drawn}")
        if named := _named(last, before):
            rows = [row for row in before if row.run_id == named]
            cells = {results.cell(row) for row in rows}
            if samples.exists() and len(kept := results.samples_kept(samples, named, cells.__contains__)) != samples.stat().st_size:
                files.write_files(folder, {samples.name: kept})  # of rows that are lost: they are measured again
            if not last:
                files.write_files(folder, {"env.json": _environment(sweep, backend, named)})
            return named, rows
    run_id = results.new_run_id()
    contents: dict[str, bytes] = {"env.json": _environment(sweep, backend, run_id)}
    if options.record:  # a run of record replaces the last one
        contents[table.name] = encoded(table, [], anew=True)
    if options.record or samples.exists():  # of a folder whose rows are lost
        contents[samples.name] = b""
    files.write_files(folder, contents)
    return run_id, []


def begun(name: str, options: Options, backend: Backend) -> list[Row]:
    """The rows that a run with --resume would find; nothing is written. Raises UsageFault as :func:`place`."""
    table = (_recorded if options.record else _run)(name, options, backend) / "results.csv"
    before = read_rows(table) if table.exists() else []
    named = _named(environment.env_beside(table), before)
    return [row for row in before if row.run_id == named]


def kept(folder: Path, options: Options) -> bool:
    """Whether an interrupted run has a row to go on from. The folder of one that has none is removed, if no other file is there."""
    if options.record or holds_a_run(folder):
        return True
    for name in ("env.json", "samples.jsonl"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
    return False


def keep(folder: Path, rows: list[Row], new: list[Row], samples: list[files.Json]) -> list[Row]:
    """All rows of the run, after the new ones and their samples went into the folder, both or neither.

    Rows of the run that the new ones measure again are replaced: of a cell whose row for the mode is missing, or of another mode.
    """
    if not new:
        return rows
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in samples).encode()
    table, again = folder / "results.csv", {results.cell(row) for row in new}
    kept = [row for row in rows if results.cell(row) not in again]
    if len(kept) == len(rows):
        files.append_files(folder, {"samples.jsonl": lines, table.name: encoded(table, new)})
    else:
        others = [row for row in read_rows(table) if row.run_id != new[0].run_id or results.cell(row) not in again]
        lines = results.samples_kept(folder / "samples.jsonl", new[0].run_id, lambda cell: cell not in again) + lines
        files.write_files(folder, {"samples.jsonl": lines, table.name: encoded(table, [*others, *new], anew=True)})
    return kept + new


def note(folder: Path, **facts: object) -> None:
    """Add facts of a run, as it ends, to its env.json."""
    path = folder / "env.json"
    files.write_files(folder, {path.name: files.json_bytes({**json.loads(path.read_text(encoding="utf-8")), **facts})})


# -- details ----------------------------------------------------------------------------------------------------------


def _named(last: files.Json, before: Sequence[Row]) -> str | None:
    """The run to resume: the one that env.json names, else that of the last row; None where there is none."""
    return last.get("run_id") or (before[-1].run_id if before else None)


def _recorded(name: str, options: Options, backend: Backend) -> Path:
    """The folder of a run of record, which replaces the last one or, where options.resume, goes on with it."""
    folder = SWEEPS / name
    if options.resume:
        _refuse_another(folder, name, backend, "leave out --record, or leave out --resume to replace the run of record")
    return folder


def _run(name: str, options: Options, backend: Backend) -> Path:
    """The folder to write into, below options.output_dir."""
    before: Path | None = None
    for folder in _numbered(options.output_dir, name):
        if not holds_a_run(folder):
            break
        _refuse_another(folder, name, backend)
        before = folder
    if before and not options.resume:  # two runs at a time would measure each other
        with files.locked(before, "use another --output-dir on another machine"):
            pass
    begun = (folder / "env.json").exists()  # interrupted before its first row
    return before if before and options.resume and not begun else folder


def _numbered(root: Path, name: str) -> Iterator[Path]:
    yield root / name
    for number in itertools.count(2):
        yield root / f"{name}-{number}"


def _refuse_another(folder: Path, name: str, backend: Backend, hint: str = "") -> None:
    """Raise UsageFault where a folder holds another sweep or rows of another device. hint: for another than to use another folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Dropped)  # said where the run goes on with it
        record = environment.env_beside(folder / "results.csv")
        table = folder / "results.csv"
        devices = {str(row.device_name) for row in read_rows(table)} if table.exists() else set()
    if not devices and record.get("device_name"):
        devices = {str(record["device_name"])}
    other = shlex.quote(f"{folder.parent}_{'cpu' if backend.name == 'cpu' else 'gpu'}")
    hint = hint or f"use --output-dir {other}"
    if record.get("sweep", name) != name:
        why = f"one table of both would be read as one run; this is {name}"
        raise UsageFault(f"{folder} holds another sweep, {clipped(str(record['sweep']), 60)}", why, hint)
    if others := sorted(devices - {backend.device().name}):
        why = f"its rows are of {clipped(', '.join(others), 100)}; this is {backend.device().name}"
        raise UsageFault(f"{folder} holds a run of another device", why, hint)


def _environment(sweep: Sweep, backend: Backend, run_id: str) -> bytes:
    facts = {"seed": sweep.seed} if sweep.seed is not None else {}
    return files.json_bytes(environment.environment(run_id=run_id, sweep=sweep.name, **backend.environment(), title=sweep.title, **facts))
