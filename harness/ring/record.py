"""ring.csv, ring_steps.csv, ring_timeline.csv and env.json of rings: a row a pass, a row a step, a row a span of one run, the machine.

Rows are added to what is there.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import json_bytes, locked, make_folder, write_files
from ..files.environment import environment
from ..problem import MODES
from ..row import read_records, refuse_table, rounded
from .job import Outcome

#: What tells a ring from another: the first columns of both tables.
_SAME = ("compute", "pass", "batch", "heads", "heads_kv", "seq", "seq_kv", "dim", "dtype", "causal", "ranks", "partition", "overlap")
RING = (
    *_SAME,
    *("status", "ms", "tflops", "tflops_rank", "hidden", "single_ms", "speedup", "efficiency", "bytes_sent", "device_bytes"),
    *("max_error", "max_difference", "repeated", "simulated", "device", "device_name", "seed", "runs"),
)
STEPS = (*_SAME, "step", "compute_ms", "communication_ms", "bytes")
TIMELINE = (*_SAME, "rank", "stream", "step", "what", "begin_ms", "end_ms", "bytes")
#: The tensors of each pass, whose errors its row has the greatest of.
_TENSORS = {"forward": ("O", "logsumexp"), "backward": ("dQ", "dK", "dV")}

Cell = str | int | float | bool | None


def refuse(folder: Path | None) -> None:
    """Raise DataFault where a table in a folder has other columns, UsageFault where an experiment is in it: before a ring begins."""
    if folder:
        for name, columns in {"ring.csv": RING, "ring_steps.csv": STEPS, "ring_timeline.csv": TIMELINE}.items():
            refuse_table(folder / name, ",".join(columns))


def write(folder: Path, outcome: Outcome) -> list[Path]:
    """Add an outcome to the tables of a folder, and write env.json: the files. A ring that failed its check has no times.

    Of a torn table the whole rows are kept, with the warning Dropped. Raises as :func:`refuse`, DiskFault where the folder cannot be
    written.
    """
    make_folder(folder)
    facts = environment(device=outcome.device, device_name=outcome.device_name, ranks=outcome.ranks)
    tables = {"ring.csv": (RING, _rows(outcome)), "ring_steps.csv": (STEPS, _steps(outcome) if outcome.passed else [])}
    if outcome.passed and not outcome.simulated:
        tables["ring_timeline.csv"] = (TIMELINE, _timeline(outcome))
    with locked(folder, "use another --output-dir"):
        made = {name: _added(folder / name, columns, rows) for name, (columns, rows) in tables.items()}
        write_files(folder, made | {"env.json": json_bytes(facts)})
    return [folder / name for name in (*made, "env.json")]


def _same(outcome: Outcome, pass_: str) -> dict[str, Cell]:
    p = outcome.spec.problem
    found: dict[str, Cell] = {"compute": outcome.compute, "pass": pass_, "batch": p.batch, "heads": p.heads_q, "heads_kv": p.heads_kv}
    found |= {"seq": p.seq_q, "seq_kv": p.seq_kv, "dim": p.head_dim, "dtype": p.dtype, "causal": p.causal}
    return found | {"ranks": outcome.ranks, "partition": outcome.partition, "overlap": outcome.spec.overlap}


def _rows(outcome: Outcome) -> list[dict[str, Cell]]:
    made = []
    for name in MODES[outcome.spec.mode]:
        seconds, single, time = outcome.seconds[name], outcome.single.get(name), outcome.times[name]
        rate = outcome.spec.problem.flops(name) / 1e12 / seconds if seconds else None
        row = _same(outcome, name)
        row |= {"status": "PASS" if outcome.passed else "FAIL", "device": outcome.device, "device_name": outcome.device_name}
        row |= {"simulated": outcome.simulated, "repeated": outcome.repeated, "device_bytes": outcome.device_bytes}
        row |= {"seed": outcome.spec.seed, "runs": len(time.seconds), "bytes_sent": sum(step.bytes for step in time.steps)}
        row |= {"max_error": rounded(max(outcome.verdicts[t].max_abs for t in _TENSORS[name]))}
        row |= {"max_difference": max((outcome.differences[t] for t in _TENSORS[name] if t in outcome.differences), default=None)}
        if seconds and rate:
            row |= {"ms": seconds * 1e3, "tflops": rate, "tflops_rank": rate / outcome.ranks, "hidden": time.hidden}
        if seconds and single:
            row |= {"single_ms": single * 1e3, "speedup": single / seconds, "efficiency": outcome.efficiency[name]}
        made.append(row)
    return made


def _steps(outcome: Outcome) -> list[dict[str, Cell]]:
    return [
        _same(outcome, name)
        | {"step": step.step, "compute_ms": step.compute_ms, "communication_ms": step.communication_ms, "bytes": step.bytes}
        for name, time in outcome.times.items()
        for step in time.steps
    ]


def _timeline(outcome: Outcome) -> list[dict[str, Cell]]:
    """The last run of each pass on each rank; 0 is its first mark on any of them."""
    made = []
    for name, time in outcome.times.items():
        first = min(span.began for line in time.lines for span in line)
        for rank, line in enumerate(time.lines):
            for span in sorted(line, key=lambda span: float(span.began)):
                row = _same(outcome, name) | {"rank": rank, "stream": span.stream, "step": span.step, "what": span.what}
                row |= {"begin_ms": round((span.began - first) * 1e3, 4), "end_ms": round((span.ended - first) * 1e3, 4)}
                made.append(row | {"bytes": span.bytes})
    return made


def _added(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Cell]]) -> bytes:
    """The table with the rows behind its whole lines."""
    refuse_table(path, ",".join(columns))
    there = read_records(path, quoted=True) if os.path.lexists(path) else ""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if not there:
        writer.writerow(columns)
    for row in rows:
        writer.writerow([str(cell).lower() if isinstance(cell, bool) else cell for cell in (row.get(name) for name in columns)])
    return (there + out.getvalue()).encode()
