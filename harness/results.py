"""Row, one line of results.csv, and env.json, what the numbers were measured on. One dataclass is the CSV header."""

from __future__ import annotations

import csv
import io
import os
import platform
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from .files import disk_fault, json_bytes, read_json, write_files
from .problem import DataFault

#: Packages whose versions a measurement depends on, asked for by name, never imported.
PACKAGES = ("fa-cli", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch")


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
        except ValueError as error:
            raise DataFault(f"{path}:{lines.line_num}: not a row of results", str(error), hint) from None
    return rows


def _line(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
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
        if cell not in ("true", "false"):
            raise ValueError(f"{name} is {cell!r}, not true or false")
        return cell == "true"
    for kind in (int, float):
        if kind in kinds:
            return kind(cell)
    return cell.removeprefix("'")


# -- the environment --------------------------------------------------------------------------------------------------


def environment(command: list[str] | None = None, **facts: Any) -> dict[str, Any]:
    """What a run of record was measured on: Python, platform, package versions, git commit, command, and the facts given.

    facts come from the backend (device, driver, clocks, compiler ...). Nothing heavy is imported to find out.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "git_commit": _git_commit(),
        "command": sys.argv if command is None else command,
        **facts,
    }


def _git_commit() -> str | None:
    """The commit the code is at, with + where the tree differs from it; None where there is no git or no repository."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed: an enclosing repository is somebody else's
        return None
    found = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


def write_env(path: Path, record: Mapping[str, Any] | None = None) -> None:
    """Write an environment record (:func:`environment` of now by default) as JSON, atomically. Raises DiskFault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_fault(path.parent, error) from None
    write_files(path.parent, {path.name: json_bytes(environment() if record is None else record)})


def read_env(path: Path) -> dict[str, Any]:
    """The record that :func:`write_env` wrote. Raises DataFault."""
    return read_json(path, "fa-cli experiment --record writes it beside results.csv")
