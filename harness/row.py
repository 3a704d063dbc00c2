"""Row, one line of results.csv: one dataclass is the CSV header."""

from __future__ import annotations

import csv
import io
import os
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .fault import DataFault, Fault
from .files import disk_fault
from .problem import DTYPE_BYTES, Problem


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel x problem x pass x timing. The columns in CamelCase keep the names of an earlier harness; None is an empty cell: unknown.

    Type is FOR, BAC or BOT. Status is PASS, FAIL, REFUSED, ERROR or ABSENT. MaxError is the largest over the tensors. Times are in
    milliseconds, TFLOPS in 10^12 floating-point operations per second, Bandwidth_GBps in 10^9 bytes per second.
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


#: The columns that identify a row's problem.
SHAPE = ("Batch", "Heads", "SeqLen", "HeadDim", "heads_kv", "seq_kv", "dtype", "causal", "scale")

#: The prefix of a measured ceiling's name: ceiling-gemm-bfloat16, ceiling-copy.
CEILING = "ceiling-"

#: The column Type of each mode.
TYPES = {"forward": "FOR", "backward": "BAC", "both": "BOT"}

#: The last column of the oldest files that are read. Columns that came after it may be missing, from the last one back.
_OLDEST = "MaxError_dV"

#: What columns of words may hold. An empty cell is None where the column allows it.
_WORDS = {
    "Type": tuple(TYPES.values()),
    "Status": ("PASS", "FAIL", "REFUSED", "ERROR", "ABSENT"),
    "dtype": (*DTYPE_BYTES, "tf32"),
    "device": ("cpu", "cuda"),
    "timing": ("warm", "cold", "burst"),
}
#: Milliseconds, which are positive.
_TIMES = ("KernelTime_ms", "TorchTime_ms", "p20_ms", "p80_ms", "call_ms")

_TYPES = {name: (typing.get_args(kind) or (kind,)) for name, kind in typing.get_type_hints(Row).items()}


def columns() -> list[str]:
    """The column names of results.csv, in order."""
    return [field.name for field in fields(Row)]


def append_row(path: Path, row: Row) -> None:
    """Append a row to a CSV file, with the header where the file is new. One write, then fsync: a row is complete or absent.

    Raises DataFault where the file has another header, DiskFault where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(0)
                first = file.readline().decode("utf-8", "replace").rstrip("\r\n")
                if first != _line(columns()).rstrip("\r\n"):
                    raise DataFault(
                        f"{path} is not a results file of this version",
                        "its first line is another",
                        "write to another folder: --output-dir",
                    )
                file.seek(-1, os.SEEK_END)
                start = "" if file.read(1) == b"\n" else "\n"  # ends the partial line of an interrupted write
            else:
                start = _line(columns())
            data = (start + _line([_text(getattr(row, name)) for name in columns()])).encode()
            if os.write(file.fileno(), data) != len(data):
                os.ftruncate(file.fileno(), end)
                raise OSError(28, "No space left on device")
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_fault(path.parent, error) from None


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file written by :func:`append_row`, also by a version that had fewer columns: those are None.

    Raises DataFault naming file and line where it is not one.
    """
    hint = "fa-cli experiment writes such a file"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFault(f"{path} cannot be read", getattr(error, "strerror", None) or str(error), hint) from None
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(lines, [])
    except csv.Error:  # a first line of more than csv.field_size_limit()
        header = []
    if _OLDEST not in header or header != columns()[: len(header)]:
        raise DataFault(f"{path} is not a results file of this version", "its first line is not the header", hint)
    rows: list[Row] = []
    while True:
        try:
            if (cells := next(lines, None)) is None:
                return rows
            rows.append(_checked(Row(**{name: _value(name, cell) for name, cell in zip(header, cells, strict=True)})))
        except (ValueError, csv.Error, Fault) as error:
            why = error.what if isinstance(error, Fault) else str(error)
            raise DataFault(f"{path}:{lines.line_num}: not a row of results", why, hint) from None


def _checked(row: Row) -> Row:
    """The row, where its problem and its words are some that there are. Raises ValueError, or UsageFault as Problem.of."""
    for name, known in _WORDS.items():
        if (value := getattr(row, name)) is not None and value not in known:
            raise ValueError(f"{name} is {value!r:.60}; known: {', '.join(known)}")
    dtype = "float32" if row.dtype == "tf32" else row.dtype
    Problem.of(row.Batch, row.Heads, row.SeqLen, row.HeadDim, row.heads_kv, row.seq_kv, dtype, row.causal, row.scale)
    return row


def _line(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(float(value))  # numpy's own repr says np.float64(...)
    text = str(value)
    # A spreadsheet would evaluate such a cell as a formula. A leading apostrophe is doubled, so that read_rows restores the text.
    return "'" + text if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "'", "\t", "\r") else text


def _value(name: str, cell: str) -> Any:
    kinds = _TYPES[name]
    if not cell:
        if type(None) in kinds:
            return None
        raise ValueError(f"{name} is empty")
    if bool in kinds:
        if cell not in ("true", "false"):
            raise ValueError(f"{name} is {cell!r:.60}, neither true nor false")
        return cell == "true"
    for kind in (int, float):
        if kind in kinds:
            value = kind(cell)
            low, high = (1e-9, 1e15) if name in _TIMES else (0, 2**63)
            is_error = name.startswith(("Max", "Mean", "MSE"))  # may be infinite or NaN
            if name != "scale" and not (low <= value <= high or (is_error and not value < 0)):
                raise ValueError(f"{name} is {cell:.60}: not from {low:g} to {high:g}")
            return value
    return cell.removeprefix("'")
