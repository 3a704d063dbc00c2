"""Writes the generated parts of the documents and the editor's settings: `make docs`. With --check it only says what is stale.

Between `<!-- generated: WHAT -->` and `<!-- end -->` of a Markdown file stands what this prints; .clangd is made whole, and
plots/house.png is drawn where what it shows has changed (support/draw_house.py).
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import draw_house  # noqa: E402
import tables  # noqa: E402

from cli import main  # noqa: E402
from harness.check import choose  # noqa: E402
from harness.check.request import Request  # noqa: E402
from harness.kernel import Device, Kernel, catalogue, planner  # noqa: E402
from harness.problem import Problem  # noqa: E402
from harness.report import summary  # noqa: E402
from harness.report.distribution import TIMES, distributions  # noqa: E402
from harness.report.views import latest  # noqa: E402
from harness.row import TYPES, Row, read_rows  # noqa: E402
from harness.terminal import show  # noqa: E402
from harness.verbs import sweep  # noqa: E402
from harness.verbs.verify.cases import windowed  # noqa: E402

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "kernels_cu" / "README.md",
    ROOT / "kernels_cu" / "NOTES.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
_MARK = re.compile(r"(<!-- generated: ([\w ./-]+) -->\n).*?(<!-- end -->)", re.S)


def ladder() -> str:
    """The kernel table, from the headers."""
    columns, rows = show.results.ladder(catalogue())
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def measured() -> str:
    """Speeds of record on the large shape of seed 002 (B8 H16 S2048 D64, float32, warm), forward and backward, torch beside them."""
    columns = ("kernel", "forward ms", "TFLOP/s", "of torch's fastest", "backward ms", "TFLOP/s", "of torch's fastest")
    cells: dict[str, list[str]] = {}
    for place, name in ((0, "forward"), (3, "backward")):
        for row in read_rows(ROOT / "experiments" / name / "results.csv"):
            if row.Test == "Stress-1" and row.timing == "warm" and row.KernelTime_ms and row.TFLOPS and row.Speedup:
                found = cells.setdefault(row.Kernel, [""] * 6)
                found[place : place + 3] = [f"{row.KernelTime_ms:.2f}", f"{row.TFLOPS:.1f}", f"{row.Speedup:.2f}x"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join([kernel, *row]) + " |" for kernel, row in cells.items()]) + "\n"


def climb(test: str) -> str:
    """The climb on one shape of the sweep `ladder`: what was measured of each step, from the runs of record; unknown cells are empty."""
    asked = sweep.load("ladder")
    problem = next(problem for name, problem in asked.shapes if name == test)
    names = [one.name for one in choose.choose(Request(asked.names("kernels", test) or "00-99", "forward", problem))[0]]
    timed = {row.Kernel: row for row in _recorded() if row.Test == test and row.timing == "warm" and row.KernelTime_ms}
    where = f"{next(iter(timed.values())).device_name}, {summary.dates_of(list(timed.values()))}" if timed else "not measured yet"
    said = f"B{problem.batch} H{problem.heads_q} S{problem.seq_q} D{problem.head_dim}, {problem.dtype}, forward, not causal ({where}):"
    columns = (
        "no",
        "name",
        "idea",
        "ms",
        "TFLOP/s",
        "% of GEMM",
        "× step before",
        "registers",
        "shared bytes",
        "bank conflicts",
        "wavefronts / ideal",
    )
    lines = [said, "", "| " + " | ".join(columns) + " |", "|---|---|---" + "|---:" * 8 + "|"]
    before: float | None = None
    for kernel in (next(k for k in catalogue() if k.name == name and k.pass_ == "forward") for name in names):
        row = timed.get(kernel.name)
        ms = row.KernelTime_ms if row else None
        rate, share = (row.TFLOPS, row.pct_of_peak) if row else (None, None)
        gain = before / ms if before and ms else None
        cells = [_number(ms, ".4g"), _number(rate, ".1f"), _number(share, ".1f"), _number(gain, ".2f")]
        cells += [_number(row and row.registers, "d"), _number(row and row.shared_bytes, "d"), *_conflicts(kernel.name, problem)]
        lines.append("| " + " | ".join([f"{kernel.number:02}", kernel.name, kernel.title, *cells]) + " |")
        before = ms or before
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _recorded() -> list[Row]:
    table = ROOT / "experiments" / "ladder" / "results.csv"
    return latest(read_rows(table)) if table.exists() else []


def _conflicts(kernel: str, problem: Problem) -> tuple[str, str]:
    """Bank conflicts of all launches of a kernel, and how many times the wavefronts that would do, from the counters of record."""
    table = ROOT / "experiments" / "counters" / "counters.csv"
    rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
    mine = [r for r in rows if (r["kernel"], r["pass"], r["problem"]) == (kernel, "forward", problem.describe())]

    def total(*names: str) -> float | None:
        values = [[float(row[name]) for name in names if row.get(name)] for row in mine]
        return sum(map(sum, values)) if values and all(values) else None

    conflicts = total("bank_conflicts")
    conflicts = total("bank_conflicts_load", "bank_conflicts_store") if conflicts is None else conflicts
    actual, ideal = total("shared_wavefronts"), total("shared_wavefronts_ideal")
    return _number(conflicts, ".3g"), _number(actual / ideal if actual and ideal else None, ".2f")


def help_of(verb: str) -> str:
    """`fa-cli VERB --help`, or the group's help for the empty verb. The exit codes are in a table of their page, and only there."""
    group = click.Context(main, info_name="fa-cli", terminal_width=110, **main.context_settings)
    context = click.Context(main.commands[verb], info_name=verb, parent=group) if verb else group
    text = re.sub(r"\n  Exit codes: .*?\n(?=\n|$)", "", context.get_help(), flags=re.S)
    return f"```\n$ fa-cli {verb + ' ' if verb else ''}--help\n{text.rstrip()}\n```\n"


def helps() -> str:
    """The help of every verb, each below a heading of its name."""
    return "\n".join(f"### {verb}\n\n{help_of(verb)}" for verb in sorted(main.commands))


def notes() -> str:
    """The pages of notes, with the first sentence of each state."""
    lines = ["| step | state |", "|---|---|"]
    for page in sorted((ROOT / "docs" / "notes").glob("[0-9]*.md")):
        title, _, rest = page.read_text(encoding="utf-8").removeprefix("# ").partition("\n")
        state = " ".join(rest.split("## State\n")[1].split("\n## ")[0].split())
        lines.append(f"| [{title}](../docs/notes/{page.name}) | {re.split(r'(?<=[.)]) (?=[A-Z])', state)[0]} |")
    return "\n".join(lines) + "\n"


def mixed(dtype: str) -> str:
    """The distributions of the committed random problems of a dtype class, by device time and by that of a plain call."""
    found = [each for each in distributions(read_rows(ROOT / "experiments" / "mixed" / "results.csv")) if each.dtype == dtype]
    columns = ("time", "pass", "geometric mean", "least", "a tenth is below", "median", "below 1")
    lines = [
        (
            {"kernel": "on the device", "call": "of a plain call"}[each.time],
            next(name for name, short in TYPES.items() if short == each.Type),
            *(f"{value:.3f}" for value in (each.mean, each.values[0], each.tenths[0], each.tenths[4])),
            str(each.below),
        )
        for each in sorted(found, key=lambda each: TIMES.index(each.time))
    ]
    return summary.markdown_table(columns, lines) + "\n"


#: What each mark stands for; what comes after its first word is handed on.
PARTS: dict[str, Callable[[str], str]] = {
    "ladder": lambda _: ladder(),
    "measured": lambda _: measured(),
    "climb": lambda test: climb(test),
    "help": lambda verb: help_of(verb),
    "helps": lambda _: helps(),
    "steps": lambda _: tables.steps(),
    "speed": lambda _: tables.speed(),
    "cells": lambda sweep: tables.cells(sweep),
    "float32": lambda which: tables.float32(which),
    "ring": lambda _: tables.ring(),
    "mixed": lambda dtype: mixed(dtype),
    "notes": lambda _: notes(),
    "table": lambda path: tables.embedded(path),
    "trust": lambda _: str(tables.script("trust/table").table()),
}


def fill(text: str) -> str:
    """A document with its generated parts as they should be. Raises KeyError for a mark that means nothing."""

    def part(match: re.Match[str]) -> str:
        what, _, rest = match[2].partition(" ")
        return f"{match[1]}\n{PARTS[what](rest)}\n{match[3]}"

    return _MARK.sub(part, text)


def kernel_macros(kernel: Kernel) -> list[str]:
    """The macros a kernel is compiled with for its first dtype, its widest head dim and causal where it has it."""
    dtype = "float32" if kernel.dtypes[0] == "tf32" else kernel.dtypes[0]
    dim = kernel.head_dims[-1]
    problem = Problem.of(1, 1, 256, dim, dtype=dtype, causal=kernel.causal, dim_v=kernel.dim_v(dim))
    problem = windowed(problem) if kernel.windows_only else problem
    return [f"-D{name}={value}" for name, value in planner.plan(kernel, problem, Device("cpu", "editor")).macros]


# clangd takes the flags relative to the project or to the file's folder, depending on its version: both find the headers.
EDITOR_FLAGS = (
    "-xc++",
    "-std=c++20",
    "-Ikernels_cu/host",
    "-Ikernels_cu/include",
    "-Ihost",
    "-Iinclude",
    "-I../../host",
    "-I../../include",
    "-include",
    "cuda.hpp",
    "-Wno-psabi",
)
WORD_MACROS = ("-DHEAD_DIM=64", "-DCAUSAL=1", "-DDTYPE=float32", "-DDETERMINISTIC=1", "-DCLUSTER=2")


def clangd() -> str:
    """.clangd: kernels are C++ with the CPU engine's words, each with its own macros; PTX and fragments are not diagnosed."""

    def flags(pattern: str, flags: Sequence[str]) -> str:
        return f"---\nIf:\n  PathMatch: {pattern}\nCompileFlags:\n  Add: [{', '.join(flags)}]\n"

    text = "# Generated by `make docs` from the kernels' headers.\n"
    text += flags(r".*\.cuh?", EDITOR_FLAGS) + flags(r".*\.cuh", WORD_MACROS) + flags(r"kernels_cu/host/.*pp", ("-xc++", "-std=c++20"))
    text += flags(r"kernels_cu/host/tensor_core\.cpp", EDITOR_FLAGS)
    text += "---\nIf:  # inline PTX\n  PathMatch: kernels_cu/include/fa/.*\n"
    text += "Diagnostics:\n  Suppress: ['*']\n"
    for kernel in map(Kernel.read, sorted((ROOT / "kernels_cu").rglob("*.cu"))):  # by file: a kernel may be several
        text += flags(re.escape(kernel.path.relative_to(ROOT).as_posix()), kernel_macros(kernel))
    return text


def stale() -> dict[Path, str]:
    """The files that are not as they should be, with their right content."""
    wanted = {path: fill(path.read_text()) for path in DOCUMENTS} | {ROOT / ".clangd": clangd()}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


if __name__ == "__main__":
    check = "--check" in sys.argv
    found = stale()
    for file, content in found.items():
        if not check:
            file.write_text(content)
        print(f"{'stale' if check else 'written'}: {file.relative_to(ROOT)}")
    redraw = draw_house.drawn() != draw_house.facts()
    if redraw and not check:
        draw_house.draw()
    if redraw:
        print(f"{'stale' if check else 'written'}: {draw_house.PICTURE.relative_to(ROOT)}")
    sys.exit(check and (bool(found) or redraw))
