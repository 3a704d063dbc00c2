"""Row, one line of results.csv: one dataclass is the CSV header."""

from __future__ import annotations

import csv
import html
import io
import math
import os
import typing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .fault import DataFault, Dropped, Fault, UsageFault, clipped
from .files import TABLE_LIMIT, read_exact, write_files
from .problem import DTYPE_BYTES, Problem


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel x problem x pass x timing. The columns in CamelCase keep the names of an earlier harness; None is an empty cell: unknown.

    page_size is that of a cache in pages. lengths are the keys of each sequence, "700,33", where they differ, and seq_kv is the longest then.

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
    arithmetic: str | None = None
    recipe: str | None = None
    energy_mj: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    mask: str | None = None
    score: str | None = None
    sinks: str | None = None
    MaxError_dsinks: float | None = None
    stack_bytes: int | None = None
    head_dim_v: int | None = None
    page_size: int | None = None
    lengths: str | None = None
    dtype_kv: str | None = None

    def __repr__(self) -> str:
        shape = f"B{self.Batch}_H{self.Heads}_S{self.SeqLen}_D{self.HeadDim}"
        time = f", {self.KernelTime_ms:.4g} ms {self.timing}" if self.KernelTime_ms else ""
        return f"Row({self.Kernel} {self.Type} {shape} {self.dtype}{' causal' * self.causal}: {self.Status}{time})"


class Rows(list[Row]):
    """Rows as a notebook shows them: a small table; all columns are in `report.frame(rows)`."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no rows"

    def _repr_html_(self) -> str:
        names = [
            "Test",
            "Kernel",
            "Type",
            "Batch",
            "Heads",
            "SeqLen",
            "HeadDim",
            "dtype",
            "causal",
            "Status",
            "MaxError",
            "device",
            "timing",
            "KernelTime_ms",
            "TFLOPS",
            "Speedup",
        ]
        return html_table(names, [[getattr(row, name) for name in names] for row in self])


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; a column without any value is left out."""
    shown = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]

    def line(tag: str, cells: Sequence[object]) -> str:
        texts = ("" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in (cells[i] for i in shown))
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    return f"<table>{line('th', columns)}{''.join(line('td', row) for row in rows)}</table>"


#: The columns that identify a row's problem.
SHAPE = (
    *("Batch", "Heads", "SeqLen", "HeadDim", "heads_kv", "seq_kv", "dtype", "causal", "scale"),
    *("mask", "score", "sinks", "head_dim_v", "page_size", "lengths", "dtype_kv"),
)
#: Those that rows of an earlier version do not have.
LATER = SHAPE[9:]

#: A folder with one of these holds a run of an experiment.
TABLES = ("results.csv", "speed.csv")

#: The prefix of a measured ceiling's name: ceiling-gemm-bfloat16, ceiling-copy.
CEILING = "ceiling-"

#: The name of the PyTorch operator's rows, which a sweep may ask for: ours, called as peers are.
OPERATOR = "operator"

#: The column Type of each mode.
TYPES = {"forward": "FOR", "backward": "BAC", "both": "BOT"}

#: Significant digits of an error or a budget in files and JSON. The float64 reference comes from a BLAS, whose order of summation differs
#: by CPU, threads and release: an error of 1e-7 beside values of 1 is the same on all of them to some eight digits.
DIGITS = 6

#: The last column of the oldest files that are read. Columns that came after it may be missing, from the last one back.
_OLDEST = "MaxError_dV"

#: What columns of words may hold. An empty cell is None where the column allows it.
_WORDS = {
    "Type": tuple(TYPES.values()),
    "Status": ("PASS", "FAIL", "REFUSED", "ERROR", "ABSENT"),
    "dtype": (*DTYPE_BYTES, "tf32"),
    "dtype_kv": tuple(DTYPE_BYTES),
    "device": ("cpu", "cuda"),
    "timing": ("warm", "cold", "burst"),
}
#: Milliseconds, which are positive.
_TIMES = ("KernelTime_ms", "TorchTime_ms", "p20_ms", "p80_ms", "call_ms")

_TYPES = {name: (typing.get_args(kind) or (kind,)) for name, kind in typing.get_type_hints(Row).items()}


def columns() -> list[str]:
    """The column names of results.csv, in order."""
    return [field.name for field in fields(Row)]


def rounded(value: float, like: float | None = None) -> float:
    """A number as files and JSON have it, the same on every machine: to DIGITS significant digits. What is not finite stays.

    like: round to the decimal place that the last digit of this number has; for numbers near zero by cancellation, whose own last digits
    are noise. Where it is 0 or not finite, to the value's own digits.
    """
    if not math.isfinite(value):
        return value
    if like is None or not like or not math.isfinite(like):
        return float(f"{value:.{DIGITS - 1}e}")
    return round(value, DIGITS - 1 - int(f"{like:.{DIGITS - 1}e}".partition("e")[2])) + 0.0  # no -0.0


def encoded(path: Path, rows: Sequence[Row], anew: bool = False) -> bytes:
    """Rows as the bytes to append to a CSV file, or to write it anew. Raises DataFault where the file has another header."""
    header = _line(columns())
    if not anew and os.path.lexists(path) and (there := read_exact(path, limit=TABLE_LIMIT).tobytes()):
        if there.partition(b"\n")[0].rstrip(b"\r") != header.encode().rstrip(b"\n"):
            raise DataFault(
                f"{path} is not a results file of this version", "its first line is another", "write to another folder: --output-dir"
            )
        header = ""
    return (header + "".join(_line([_text(getattr(row, name)) for name in columns()]) for row in rows)).encode()


def table_at(path: Path) -> Path:
    """The results.csv that a folder of a run, or the path of such a file, means. Raises DataFault where there is none, with those near."""
    table = path / "results.csv" if path.is_dir() else path
    if not os.path.lexists(table):
        runs = sorted(f"{near.parent}" for near in path.glob("*/results.csv"))
        why = f"it holds the runs {clipped(', '.join(runs))}" if runs else "there is no run in it"
        raise DataFault(f"{table} is missing", why, f"give one of them: {runs[0]}" if runs else "fa-cli experiment writes one")
    return table


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file of :func:`encoded`, also by a version that had fewer columns: those are None, head_dim_v is HeadDim.

    A torn end is left out with the warning Dropped; an empty file has no rows. Raises DataFault naming file and line where it is not one.
    """
    hint = "fa-cli experiment writes such a file"
    text = read_records(path, hint, quoted=True)
    if not text:
        return []
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
            values = {name: _value(name, cell) for name, cell in zip(header, cells, strict=True)}
            rows.append(_checked(Row(**({"head_dim_v": values["HeadDim"]} | values))))
        except (ValueError, csv.Error, Fault) as error:
            why = error.what if isinstance(error, Fault) else str(error)
            raise DataFault(f"{path}:{lines.line_num}: not a row of results", why, hint) from None


def _checked(row: Row) -> Row:
    """The row, where its problem and its words are some that there are. Raises ValueError, or UsageFault as Problem.of."""
    for name, known in _WORDS.items():
        if (value := getattr(row, name)) is not None and value not in known:
            raise ValueError(f"{name} is {value!r:.60}; known: {', '.join(known)}")
    problem_of(row)
    return row


def problem_of(row: Row) -> Problem:
    """The problem a row is of; tf32 is float32 in memory. Raises ValueError, or UsageFault as Problem.of, where there is none."""
    dtype = "float32" if row.dtype == "tf32" else row.dtype
    keys = row.seq_kv if row.lengths is None else [int(length) for length in row.lengths.split(",")]
    sizes = (row.Batch, row.Heads, row.SeqLen, row.HeadDim, row.heads_kv, keys)
    plain = Problem.of(*sizes, dtype, row.causal, row.scale, dim_v=row.head_dim_v, page_size=row.page_size, dtype_kv=row.dtype_kv)
    return plain.with_(mask=row.mask, score=row.score, sinks=row.sinks)


def read_records(path: Path, hint: str = "", quoted: bool = False) -> str:
    """The whole lines of a table, as text. What an interrupted write has torn is left out, with the warning Dropped.

    quoted: a line break between double quotes is part of its line, as in CSV. Raises DataFault as read_exact, and for what is not UTF-8.
    """
    kept, dropped = whole_records(read_exact(path, hint=hint, limit=TABLE_LIMIT).tobytes(), quoted)
    if dropped:
        warnings.warn(f"{path}: {_torn(dropped)}", Dropped, stacklevel=3)
    try:
        return kept.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataFault(f"{path} cannot be read", str(error), hint) from None


def mend(path: Path, quoted: bool = False) -> None:
    """Cut a table that is there back to its whole lines, with the warning Dropped. Raises DataFault, DiskFault."""
    if os.path.lexists(path):
        kept, dropped = whole_records(read_exact(path, limit=TABLE_LIMIT).tobytes(), quoted)
        if dropped:
            write_files(path.parent, {path.name: kept})
            warnings.warn(f"{path}: {_torn(dropped)}", Dropped, stacklevel=2)


def holds_a_run(folder: Path) -> bool:
    """Whether a folder has a table of an experiment that is not empty, or something of that name that is no file."""
    tables = [folder / name for name in TABLES if os.path.lexists(folder / name)]
    return any(not table.is_file() or table.stat().st_size for table in tables)  # what is no file is refused where it is read


def refuse_table(path: Path, header: str) -> None:
    """Raise where another verb's rows do not belong into a table, so that they are refused before they are measured: UsageFault where an
    experiment is in its folder, whose env.json would be replaced, DataFault where it has another header. A torn one is none."""
    if holds_a_run(path.parent):
        why = f"the env.json there says of what machine and run, and that of {path.name} would replace it"
        raise UsageFault(f"{path.parent} holds an experiment", why, "use another --output-dir")
    if not os.path.lexists(path):
        return
    first, newline, _ = read_exact(path, limit=TABLE_LIMIT).tobytes().partition(b"\n")
    first, head = first.rstrip(b"\r\0"), header.encode()
    if first != head if newline else not head.startswith(first):
        raise DataFault(f"{path} has other columns", "its first line is another version's", "write to another folder: --output-dir")


def whole_records(data: bytes, quoted: bool = False) -> tuple[bytes, int]:
    """The whole lines of a table, and how many bytes are in none: of an unfinished last line, and of lines with NUL bytes."""
    kept: list[bytes] = []
    record, open_quote = b"", False
    for piece in io.BytesIO(data):
        if b"\0" in piece:  # the file system lost power after it had grown the file
            record, open_quote = b"", False
            continue
        record += piece
        open_quote ^= quoted and piece.count(b'"') % 2 == 1
        if not open_quote and piece.endswith(b"\n"):
            kept.append(record)
            record = b""
    whole = b"".join(kept)
    return whole, len(data) - len(whole)


def _torn(dropped: int) -> str:
    return f"an interrupted write left {dropped} bytes that are no whole line; they are dropped"


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
