"""Row, one line of results.csv: one dataclass is the CSV header."""

from __future__ import annotations

import csv
import io
import os
import secrets
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import disk_fault
from .measure import TIMINGS, Timing, together
from .problem import PASSES, DataFault, Problem

if TYPE_CHECKING:
    from .backends import Backend
    from .contender import PassResult
    from .run import Result


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel x problem x pass x timing. Seed 002's columns come first, under its names; None is unknown (an empty cell).

    Type is FOR, BAC or BOT; Status PASS, FAIL, REFUSED, ERROR or ABSENT; MaxError is the worst tensor's; times are
    milliseconds, TFLOPS 1e12 operations and Bandwidth_GBps 1e9 bytes a second.
    """

    Test: str | None = None
    Kernel: str
    Type: str
    Batch: int
    Heads: int
    SeqLen: int
    HeadDim: int
    Status: str
    MaxError: float | None = None
    MeanError: float | None = None
    MSE: float | None = None
    MaxRelError: float | None = None
    KernelTime_ms: float | None = None
    TorchTime_ms: float | None = None
    Speedup: float | None = None
    TFLOPS: float | None = None
    Bandwidth_GBps: float | None = None
    ErrorMessage: str | None = None
    heads_kv: int
    seq_kv: int
    dtype: str
    causal: bool
    scale: float
    seed: int | None = None
    device: str | None = None
    device_name: str | None = None
    timing: str | None = None
    n_samples: int | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    call_ms: float | None = None
    peak_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    deterministic: bool | None = None
    pct_of_peak: float | None = None
    torch_backend: str | None = None
    source_hash: str | None = None
    run_id: str | None = None
    repro: str | None = None
    MaxError_O: float | None = None
    MaxError_logsumexp: float | None = None
    MaxError_dQ: float | None = None
    MaxError_dK: float | None = None
    MaxError_dV: float | None = None


#: The columns that say which problem a row is of.
SHAPE = ("Batch", "Heads", "SeqLen", "HeadDim", "heads_kv", "seq_kv", "dtype", "causal", "scale")

#: What the column Type says of each mode.
TYPES = {"forward": "FOR", "backward": "BAC", "both": "BOT"}

_TYPES = {name: (typing.get_args(kind) or (kind,)) for name, kind in typing.get_type_hints(Row).items()}


def header() -> list[str]:
    """The column names of results.csv, in order."""
    return [field.name for field in fields(Row)]


def append(path: Path, row: Row) -> None:
    """Add a row to a CSV file, with the header where the file is new. One write, then fsync: a row is there whole or not at all.

    Raises DataFault where the file has another header, DiskFault where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(0)
                first = file.readline().decode("utf-8", "replace").rstrip("\r\n")
                if first != _line(header()).rstrip("\r\n"):
                    raise DataFault(
                        f"{path} is not a results file of this version",
                        "its first line is another",
                        "write to another folder: --output-dir",
                    )
                file.seek(-1, os.SEEK_END)
                start = "" if file.read(1) == b"\n" else "\n"  # what an interrupted write left is closed, not continued
            else:
                start = _line(header())
            data = (start + _line([_text(getattr(row, name)) for name in header()])).encode()
            if os.write(file.fileno(), data) != len(data):
                os.ftruncate(file.fileno(), end)
                raise OSError(28, "No space left on device")
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_fault(path.parent, error) from None


def read(path: Path) -> list[Row]:
    """The rows of a CSV file written by :func:`append`. Raises DataFault naming file and line where it is not one."""
    hint = "fa-cli experiment writes such a file"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFault(f"{path} cannot be read", getattr(error, "strerror", None) or str(error), hint) from None
    lines = csv.reader(io.StringIO(text, newline=""))
    if next(lines, None) != header():
        raise DataFault(f"{path} is not a results file of this version", "its first line is not the header", hint)
    rows = []
    for cells in lines:
        try:
            rows.append(Row(**{name: _value(name, cell) for name, cell in zip(header(), cells, strict=True)}))
        except (ValueError, KeyError) as error:
            raise DataFault(f"{path}:{lines.line_num}: not a row of results", str(error), hint) from None
    return rows


def _line(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(float(value))  # numpy's own repr says np.float64(...)
    text = str(value)
    # A spreadsheet would run such a cell as a formula. A leading apostrophe is doubled so that reading gives the text back.
    return "'" + text if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "'", "\t", "\r") else text


def _value(name: str, cell: str) -> Any:
    kinds = _TYPES[name]
    if not cell:
        if type(None) in kinds:
            return None
        raise ValueError(f"{name} is empty")
    if bool in kinds:
        return {"true": True, "false": False}[cell]
    for kind in (int, float):
        if kind in kinds:
            return kind(cell)
    return cell.removeprefix("'")


# -- rows from results ------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    """A name for a run that no other has: when it started (UTC), and four random letters."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(2)


def rows_of(result: Result, test: str, run_id: str) -> list[Row]:
    """The rows of a result: one a pass and timing, and for mode both a third of the two passes together.

    A failed check has one row a pass, without a timing and without speeds.
    """
    modes = (*PASSES, "both") if result.mode == "both" else (result.mode,)
    return [row for mode in modes for row in _rows(result, mode, test, run_id)]


def samples_of(result: Result, row: Row) -> dict[str, Any]:
    """The line of samples.jsonl that belongs to a row: which run, row and timing, and every sample in milliseconds."""
    timing = _timing(result, row.Type, row.timing)
    shape = {name: getattr(row, name) for name in SHAPE}
    return {
        "run_id": row.run_id, "Test": row.Test, "Kernel": row.Kernel, "Type": row.Type, "timing": row.timing, **shape,
        "launch": timing.launch, "samples_ms": [s * 1e3 for s in timing.seconds], "call_ms": [s * 1e3 for s in timing.call_seconds],
        "turns": list(timing.turns), "before": dict(timing.before), "after": dict(timing.after),
    }  # fmt: skip


def with_torch(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with TorchTime_ms and Speedup: against the fastest torch backend on the same kind of device."""
    fastest: dict[tuple[str | None, ...], float] = {}
    for row in rows:
        key = (row.Type, row.timing, row.device)
        if row.Kernel.startswith("torch-") and row.KernelTime_ms:
            fastest[key] = min(row.KernelTime_ms, fastest.get(key, row.KernelTime_ms))
    found = []
    for row in rows:
        torch = fastest.get((row.Type, row.timing, row.device))
        speedup = torch / row.KernelTime_ms if torch and row.KernelTime_ms else None
        found.append(replace(row, TorchTime_ms=torch, Speedup=speedup))
    return found


def with_peak(rows: Sequence[Row], ceilings: Sequence[Row]) -> list[Row]:
    """The rows with pct_of_peak: of the matrix products of their dtype measured in the same run, where they were."""
    most = {row.Kernel.removeprefix("ceiling-gemm-"): row.TFLOPS for row in ceilings if row.Kernel.startswith("ceiling-gemm-")}
    return [replace(row, pct_of_peak=100 * row.TFLOPS / peak) if row.TFLOPS and (peak := most.get(row.dtype)) else row for row in rows]


def rows_without(
    test: str, kernel: str, mode: str, problem: Problem, backend: Backend, run_id: str, seed: int, status: str, why: str,
    deterministic: bool = False,
) -> list[Row]:  # fmt: skip
    """The rows of a kernel that gave no result: status REFUSED, ERROR or ABSENT, and why."""
    modes = (*PASSES, "both") if mode == "both" else (mode,)
    message = " ".join(why.split())
    facts: dict[str, Any] = {"device": backend.name, "device_name": backend.device().name, "seed": seed, "run_id": run_id}
    return [Row(**_of_problem(test, kernel, m, problem, deterministic), Status=status, ErrorMessage=message, **facts) for m in modes]


def _of_problem(test: str, kernel: str, mode: str, problem: Problem, deterministic: bool) -> dict[str, Any]:
    p = problem
    return {
        "Test": test, "Kernel": kernel, "Type": TYPES[mode], "Batch": p.batch, "Heads": p.heads_q, "SeqLen": p.seq_q,
        "HeadDim": p.head_dim, "heads_kv": p.heads_kv, "seq_kv": p.seq_kv, "dtype": p.dtype, "causal": p.causal, "scale": p.scale,
        "repro": _repro(kernel, mode, p, deterministic),
    }  # fmt: skip


def _passes(result: Result, mode: str) -> list[PassResult]:
    return [result.passes[name] for name in (PASSES if mode == "both" else (mode,))]


def _timing(result: Result, type_: str, timing: str | None) -> Timing:
    mode = next(name for name, short in TYPES.items() if short == type_)
    return together([p.timings[timing or "warm"] for p in _passes(result, mode)])


def _rows(result: Result, mode: str, test: str, run_id: str) -> list[Row]:
    problem, passes = result.problem, _passes(result, mode)
    verdicts = {name: v for p in passes for name, v in p.verdicts.items()}
    worst = max(verdicts.values(), key=lambda v: v.max_abs)
    over = "; ".join(f"{name}: {v.reason} at {v.place}" for name, v in verdicts.items() if not v.passed)
    loaded = [p.loaded for p in passes if p.loaded]
    kernels = [p.kernel for p in passes if p.kernel]

    def most(name: str) -> int | None:
        return max((value for value in (getattr(one, name) for one in loaded) if value is not None), default=None)

    of_tensors: dict[str, Any] = {f"MaxError_{name}": v.max_abs for name, v in verdicts.items()}
    row = Row(
        **_of_problem(test, result.compute, mode, problem, result.deterministic),
        Status="PASS" if all(p.passed for p in passes) else "FAIL",
        MaxError=worst.max_abs, MeanError=worst.mean_abs, MSE=worst.mse, MaxRelError=worst.max_rel, ErrorMessage=over or None,
        seed=result.seed, device=result.device, device_name=result.device_name,
        peak_bytes=max(filter(None, (p.device_bytes for p in passes)), default=None), registers=most("registers"), spill_bytes=most("spill_bytes"),
        shared_bytes=most("shared_bytes"), deterministic=all(k.deterministic for k in kernels) if kernels else None,
        torch_backend="+".join(dict.fromkeys(p.ran for p in passes if p.ran)) or None,
        source_hash="+".join(dict.fromkeys(k.source_hash for k in kernels)) or None, run_id=run_id,
        **of_tensors,
    )  # fmt: skip
    row = replace(row, dtype="tf32") if any(k.arithmetic_for(problem.dtype) == "tf32" for k in kernels) else row  # on float32 files
    # A kernel that fails in one pass is given no speed in the other: they are one kernel to whoever reads the table.
    timings = [t for t in TIMINGS if all(t in p.timings for p in passes)] if result.passed else []
    return [_timed(row, together([p.timings[t] for p in passes]), problem, mode) for t in timings] or [row]


def _timed(row: Row, timing: Timing, problem: Problem, mode: str) -> Row:
    slow = f"THROTTLED ({timing.throttled})" if timing.throttled else None
    return replace(
        row, timing=timing.timing, KernelTime_ms=timing.median_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms, call_ms=timing.call_ms,
        n_samples=len(timing.seconds), TFLOPS=problem.flops(mode) / (timing.median_ms * 1e9),
        Bandwidth_GBps=problem.bytes(mode) / (timing.median_ms * 1e6), ErrorMessage="; ".join(filter(None, (slow, row.ErrorMessage))) or None,
    )  # fmt: skip


def _repro(kernel: str, mode: str, problem: Problem, deterministic: bool) -> str:
    """The command that runs this row again."""
    p = problem
    words = [f"fa-cli run --compute {kernel} --mode {'forward' if mode == 'forward' else 'both'}"]
    words += [f"--batch {p.batch} --heads {p.heads_q} --seq {p.seq_q} --dim {p.head_dim}"]
    words += [f"--kv-heads {p.heads_kv}"] * (p.heads_kv != p.heads_q) + [f"--seq-kv {p.seq_kv}"] * (p.seq_kv != p.seq_q)
    words += [f"--dtype {p.dtype}"] * (p.dtype != "float32") + ["--causal"] * p.causal + ["--deterministic"] * deterministic
    return " ".join(words + [f"--scale {p.scale!r}"] * (p.scale != p.head_dim**-0.5))
