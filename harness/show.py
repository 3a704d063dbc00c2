"""What verbs print: tables for people (plain text where stdout is no terminal), or one JSON document; results on stdout, the rest on stderr.

Every function here returns the exit code of its verb. Verdicts are words, never only colours.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import errors

if TYPE_CHECKING:
    from .compile import CompileRow
    from .dataset import Dataset
    from .experiment import Outcome
    from .kernel import Kernel
    from .run import Result

QUIET, VERBOSE = -1, 1
HOST_TIME = "CPU time (host backend), not GPU performance"
_STYLES = {"PASS": "bold green", "OK": "green", "FAIL": "bold red", "ERROR": "bold red", "SPILLS": "bold red", "WARN": "yellow"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, numbers to the right. Where stdout is no terminal it is plain aligned text, nothing cut or wrapped."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = any(isinstance(row[index], (int, float)) for row in cells)
        made.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        made.add_row(*(Text(text := _text(value), style=_STYLES.get(text, "")) for value in row))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(made)
        return
    console = Console(highlight=False, width=100_000)
    with console.capture() as captured:
        console.print(made)
    print("\n".join(text.rstrip() for text in captured.get().splitlines()))


def line(*parts: str) -> None:
    """One line of result on stdout; of one that starts with a verdict, the verdict is coloured on a terminal."""
    word, space, rest = " ".join(p for p in parts if p).partition(" ")
    Console(highlight=False, soft_wrap=True).print(Text(word, style=_STYLES.get(word, "")) + space + rest)


def note(text: str) -> None:
    """A line about the result, on stderr."""
    print(f"note: {text}", file=sys.stderr)


def document(value: Any) -> None:
    """The one JSON document of a verb. What is not finite or not measured is null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def near(path: Path) -> Path:
    """A path as a person would type it: relative where it lies below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


def progress(verbosity: int) -> Callable[[str], None]:
    """A function that shows what is being done in one line of stderr, on a terminal only; the empty text clears it."""
    if verbosity <= QUIET or not sys.stderr.isatty():
        return lambda text: None

    def step(text: str) -> None:
        sys.stderr.write("\r\x1b[K" + text[:120])
        sys.stderr.flush()

    return step


# -- verbs ------------------------------------------------------------------------------------------------------------


def dataset(found: Dataset, as_json: bool, verbosity: int) -> int:
    """gen-data: the folder and what is in it."""
    problem = found.problem
    if as_json:
        row = {"folder": found.folder, "problem": problem, "seed": found.seed, "tensors": found.tensors}
        document({"passed": True, "rows": [row]})
        return 0
    if verbosity > QUIET:
        table(
            ("tensor", "shape", "dtype", "bytes"),
            [(n, problem.shape(n), problem.tensor_dtype(n), problem.tensor_bytes(n)) for n in found.tensors],
        )
    print(f"data     {near(found.folder)}")
    return 0


def results(found: Sequence[Result], as_json: bool, verbosity: int) -> int:
    """run: errors of each tensor, times, files. One kernel is one JSON object, several are rows."""
    passed = all(result.passed for result in found)
    if as_json:
        rows = [result_json(result) for result in found]
        document(rows[0] if len(rows) == 1 else {"passed": passed, "rows": rows})
        return 0 if passed else 1
    if verbosity > QUIET:
        _result_tables(found, verbosity)
    for result in found:
        line("PASS" if result.passed else "FAIL", result.compute, result.mode, result.problem.describe(), f"on {result.device}")
        for verdict in result.verdicts.values():
            if not verdict.passed:
                line(" ", errors.message(verdict))
    for text in dict.fromkeys(text for result in found for text in result.notes):
        note(text)
    return 0 if passed else 1


def result_json(result: Result) -> dict[str, Any]:
    """A Result as the JSON object of README, "JSON"."""
    keys = ("max_abs", "mean_abs", "mse", "max_rel", "budget", "passed")
    return {
        "compute": result.compute,
        "mode": result.mode,
        "device": result.device,
        "problem": dataclasses.asdict(result.problem),
        "passed": result.passed,
        "time_ms": dict(result.time_ms),
        "tflops": dict(result.tflops),
        "gbps": dict(result.gbps),
        "errors": {name: {key: getattr(v, key) for key in keys} for name, v in result.verdicts.items()},
        "outputs": str(result.outputs.resolve()) if result.outputs else None,
    }


def _result_tables(found: Sequence[Result], verbosity: int) -> None:
    first = found[0]
    print(f"{first.problem.describe()}, {first.mode}, on {first.device_name}")
    table(
        ("kernel", "tensor", "max |error|", "mean |error|", "MSE", "max relative", "budget", "verdict"),
        [
            (result.compute, v.tensor, v.max_abs, v.mean_abs, v.mse, v.max_rel, v.budget, "PASS" if v.passed else "FAIL")
            for result in found
            for v in result.verdicts.values()
        ],
    )
    print()
    rows = []
    for result in found:
        for name, each in result.passes.items():
            time, base = result.time_ms[name], first.time_ms[name]
            speed = base / time if base and time and result is not first else None
            rows.append((result.compute, name, time, result.tflops[name], result.gbps[name], speed, len(each.seconds)))
    cpu = first.device == "cpu"
    shown = [0, 1, 2, *(() if cpu else (3, 4)), *((5,) if len(found) > 1 else ()), 6]
    columns = ("kernel", "pass", "ms (median)", "TFLOP/s", "GB/s", f"times as fast as {first.compute}", "samples")
    table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
    print(f"({HOST_TIME})" if cpu else "(kernel time, warm)")
    if verbosity >= VERBOSE:
        for result in found:
            for name, each in result.passes.items():
                loaded = each.loaded
                used = {"registers": loaded.registers, "bytes spilled": loaded.spill_bytes, "bytes shared": loaded.shared_bytes}
                known = [
                    f"{value} {what}" for what, value in (used | {"bytes on the device": each.device_bytes}).items() if value is not None
                ]
                print(f"{name}: {each.kernel.path}, source {each.kernel.source_hash}, {', '.join(known)}")
    if first.outputs:
        names = [f"{name}.bin" for name in first.verdicts] + ["outputs.json"]
        print(f"\nwritten  {near(first.outputs)}: {' '.join(names)}" + (f" (of {first.compute})" if len(found) > 1 else ""))


def experiment(outcome: Outcome, as_json: bool, verbosity: int) -> int:
    """experiment: a line a row, and where the files are."""
    passed = all(row.Status == "PASS" for row in outcome.rows)
    if as_json:
        document({"passed": passed, "rows": outcome.rows})
        return 0 if passed else 1
    if verbosity > QUIET:
        table(
            ("test", "kernel", "pass", "max |error|", "ms", "verdict", "why"),
            [
                (r.Test, r.Kernel, r.Type, r.MaxError, r.KernelTime_ms, r.Status, (r.ErrorMessage or "").partition("\n")[0])
                for r in outcome.rows
            ],
        )
        if any(row.device == "cpu" for row in outcome.rows):
            print(HOST_TIME)
        for path in outcome.files:
            print(f"written  {path}")
    failed = sum(row.Status != "PASS" for row in outcome.rows)
    line("PASS" if passed else "FAIL", f"{len(outcome.rows) - failed} of {len(outcome.rows)} rows passed")
    return 0 if passed else 1


def compiled(rows: Sequence[CompileRow], as_json: bool, verbosity: int) -> int:
    """compile: resources of each kernel on each architecture. Exit code 5 where one does not compile, 1 where one spills."""
    code = 5 if any(row.status == "ERROR" for row in rows) else 0 if all(row.passed for row in rows) else 1
    if as_json:
        document({"passed": code == 0, "rows": rows})
        return code
    if verbosity > QUIET:
        columns = ("kernel", "pass", "dtype", "D", "arch", "registers", "spills", "shared", "seconds", "verdict", "why")
        table(
            columns,
            [
                (r.kernel, r.pass_, r.dtype, r.head_dim, r.arch, r.registers, r.spill_bytes, r.shared_bytes, r.seconds, r.status, r.message)
                for r in rows
            ],
        )
    line("PASS" if code == 0 else "FAIL", f"{sum(row.passed for row in rows)} of {len(rows)} in order")
    return code


def ladder(kernels: Sequence[Kernel]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the kernel table: a row a kernel, its passes together. The documents' tables are made of it too."""
    groups: dict[tuple[int | None, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.number, kernel.name), []).append(kernel)
    rows = []
    for (number, name), group in groups.items():
        first = group[0]
        can = [word for word, yes in (("causal", first.causal), ("gqa", first.gqa), ("cross", first.cross)) if yes]
        arch = first.arch if isinstance(first.arch, str) else ", ".join(dict.fromkeys(first.arch.values()))
        dtypes = " ".join(dict.fromkeys(dtype for kernel in group for dtype in kernel.dtypes))
        widest = f"{first.head_dims[-1]}"
        shown = "" if number is None else f"{number:02}"
        rows.append((shown, name, " ".join(k.pass_ for k in group), dtypes, widest, " ".join(can), arch, first.title))
    return ("no", "name", "passes", "dtypes", "D up to", "also", "arch", "idea"), rows


def catalogue(kernels: Sequence[Kernel], sweeps: Mapping[str, str], as_json: bool, verbosity: int) -> int:
    """list: the kernels in ladder order, and the sweeps."""
    columns, rows = ladder(kernels)
    if as_json:
        names = ("no", "name", "passes", "dtypes", "max_head_dim", "also", "arch", "title")
        listed = [dict(zip(names, row, strict=True)) for row in rows]
        for row in listed:
            row |= {key: row[key].split() for key in ("passes", "dtypes", "also")}  # type: ignore[dict-item]
            row |= {"max_head_dim": int(row["max_head_dim"])}  # type: ignore[dict-item]
        document({"passed": True, "rows": listed, "sweeps": sweeps})
        return 0
    if verbosity <= QUIET:
        print("\n".join(row[1] for row in rows))
        return 0
    table(columns, rows)
    print()
    table(("sweep", "question"), sweeps.items())
    return 0


def new_kernel(path: Path) -> int:
    """new: the file that was written and what to do next."""
    print(f"written  {path}")
    pass_ = "backward" if path.stem.endswith("_backward") else "forward"
    spec = path if path.is_absolute() else f"./{path}"
    print(f"hint: fa-cli run --compute {spec} --mode {'both' if pass_ == 'backward' else pass_}", file=sys.stderr)
    return 0


# -- details ----------------------------------------------------------------------------------------------------------


def _cell(value: object) -> object:
    return value.item() if hasattr(value, "item") else value  # a numpy scalar


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) and (value == 0 or 1e-2 <= abs(value) < 1e5) else f"{value:.2e}"
    return str(value)


def _plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses and mappings as objects, paths as text, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = _cell(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
