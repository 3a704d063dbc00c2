"""The tables of kernels_cu/README.md: every number from the runs of record, empty where there is none."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from rows import append_row, row

from harness.kernel import catalogue
from harness.problem import Problem
from harness.verbs import sweep

ROOT = Path(__file__).resolve().parent.parent.parent
PROBLEM = Problem.of(8, 16, 2048, 64)


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tests/generate.py, which looks for records in an empty folder."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tests" / "generate.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "ROOT", tmp_path)
    for name in ("ladder", "counters"):
        (tmp_path / "experiments" / name).mkdir(parents=True)
    return found


def cells(text: str) -> dict[str, list[str]]:
    """A table's rows by the kernel's name, from the column after the idea on."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return {line[1]: line[3:] for line in lines[1:]}


def test_without_records_cells_are_empty(generate: ModuleType) -> None:
    """A line for each step that takes the shape, in order."""
    text = generate.climb("float32")
    assert text.startswith("B8 H16 S2048 D64, float32, forward, not causal (not measured yet):")
    steps = [k.name for k in catalogue() if k.pass_ == "forward" and "float32" in k.dtypes and k.number is not None and k.number <= 7]
    assert list(cells(text)) == steps and all(not any(line) for line in cells(text).values())
    assert "fa1" not in cells(generate.climb("bfloat16")) and "fa2" in cells(generate.climb("bfloat16"))
    assert dict(sweep.load("ladder").shapes)["float32"] == PROBLEM


def test_records_fill_the_cells(generate: ModuleType, tmp_path: Path) -> None:
    """Time, rate, part of the measured GEMM rate, gain over the last step measured, resources; counters of all launches together."""
    facts = {"pct_of_peak": 12.345, "registers": 96, "shared_bytes": 4096}
    table = tmp_path / "experiments" / "ladder" / "results.csv"
    for name, ms, test, timing in (
        ("naive", 50.0, "float32", "warm"),
        ("fa1", 99.0, "float32", "warm"),
        ("fa1", 20.0, "float32", "warm"),
        ("fa2", 4.0, "float32", "warm"),
        ("fa2", 1.0, "float32", "cold"),
        ("fa2_naive", 1.0, "other", "warm"),
    ):
        append_row(table, row(name, test, ms, PROBLEM, timing=timing, **facts))
    append_row(table, row("fa2_naive", "float32", None, PROBLEM))
    counters = tmp_path / "experiments" / "counters" / "counters.csv"
    with open(counters, "w") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "pass", "entry", "problem", "bank_conflicts", "shared_wavefronts", "shared_wavefronts_ideal"])
        writer.writerow(["naive", "forward", "scores", PROBLEM.describe(), 1e6, 300.0, 100.0])
        writer.writerow(["naive", "forward", "output", PROBLEM.describe(), 2e6, 100.0, 100.0])
        writer.writerow(["naive", "backward", "dq", PROBLEM.describe(), 5e6, 1.0, 1.0])
        writer.writerow(["fa2", "forward", "forward", "B1_H1_S1_D1", 5e6, 1.0, 1.0])
        writer.writerow(["fa1", "forward", "forward", PROBLEM.describe(), "", "", ""])
    text = generate.climb("float32")
    found = cells(text)
    assert "(NVIDIA H200, 2026-11-20):" in text
    rate = f"{PROBLEM.flops('forward') / 50e9:.1f}"
    assert found["naive"] == ["50", rate, "12.3", "", "96", "4096", "3e+06", "2.00"]
    assert found["fa1"][:4] == ["20", f"{PROBLEM.flops('forward') / 20e9:.1f}", "12.3", "2.50"] and found["fa1"][6:] == ["", ""]
    assert not any(found["fa2_naive"]), "it has no time"
    assert found["fa2"][0] == "4" and found["fa2"][3] == "5.00" and found["fa2"][6:] == ["", ""]


def test_counters_of_an_older_record(generate: ModuleType, tmp_path: Path) -> None:
    """Those before there was the sum of all kinds: loads and stores."""
    with open(tmp_path / "experiments" / "counters" / "counters.csv", "w") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "pass", "entry", "problem", "bank_conflicts_load", "bank_conflicts_store"])
        writer.writerow(["fa2", "forward", "forward", PROBLEM.describe(), 700.0, 0.0])
    assert cells(generate.climb("float32"))["fa2"][6:] == ["700", ""]
