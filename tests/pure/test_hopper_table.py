"""experiments/hopper/table.py on rows made up by hand: the best peer of each cell, means over the cells, the worst cell, what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from rows import append_row, row

from harness.problem import Problem
from harness.row import Row

TABLE = Path(__file__).resolve().parents[2] / "experiments" / "hopper" / "table.py"


@pytest.fixture
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("hopper_table", TABLE)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def rows_of(seq: int, times: dict[str, float | None], dtype: str = "bfloat16", causal: bool = False) -> list[Row]:
    """Warm rows of a cell with energy in proportion to the time, and bursts in which ours is as fast as in the turns, the peers slower."""
    problem = Problem.of(1, 2, seq, 128, dtype=dtype, causal=causal)
    found = []
    for name, ms in times.items():
        found.append(row(name, f"S{seq}", ms, problem, **({"energy_mj": 700 * ms * (2 if name == "fa3" else 1)} if ms else {})))
        if ms:
            found.append(row(name, f"S{seq}", ms if name == "hopper" else 2 * ms, problem, timing="burst"))
    return found


def test_a_cell_has_its_best_peer(script: ModuleType) -> None:
    """The fastest and the most frugal peer may be two; another kernel of ours, and a peer that failed, are no peers."""
    rows = rows_of(512, {"hopper": 1.0, "mma_qreg_async": 0.1, "fa3": 0.8, "torch-cudnn": 1.25, "fa4": None})
    assert script.ours_of(rows) == "hopper"
    ((settled, burst, energy),) = script.pairs(rows, "hopper").values()
    assert settled[2] == "fa3" and settled[0] / settled[1] == pytest.approx(0.8)
    assert burst[2] == "fa3" and burst[0] / burst[1] == pytest.approx(1.6)
    assert energy[2] == "torch-cudnn" and energy[0] / energy[1] == pytest.approx(0.8)


def test_means_and_the_worst_cell(script: ModuleType) -> None:
    """Over the cells of one dtype that have both; float16 has its own line; a failure of ours is named, with its reason."""
    rows = rows_of(512, {"hopper": 1.0, "fa3": 2.0}) + rows_of(1024, {"hopper": 1.0, "fa3": 0.5}, causal=True)
    rows += rows_of(2048, {"hopper": None, "fa3": 1.0}) + rows_of(4096, {"hopper": 1.0, "fa4": 1.1}, dtype="float16")
    text = script.table(rows, "hopper")
    settled = [line for line in text.splitlines() if line.startswith("Settled")]
    assert "bfloat16, 2 of 3 cells: 1.000; D128 2.000; D128 causal 0.500. Worst: D128 S1024 causal, 0.500; 1 below 1." in settled[0]
    assert "float16, 1 of 1 cells: 1.100" in settled[1]
    assert "| D128 S2048 |  |  |" in text and "D128 S2048: FAIL, hopper is wrong" in text
    worst = next(line for line in text.splitlines() if line.startswith("Energy"))
    assert "Worst: D128 S1024 causal, 1.000" in worst, "the cell where ours takes the most"


def test_the_command_writes_what_it_prints(script: ModuleType, tmp_path: Path) -> None:
    """table.md beside the rows; rows without a kernel of ours are refused."""
    for each in rows_of(512, {"hopper": 1.0, "fa3": 2.0}):
        append_row(tmp_path / "results.csv", each)
    done = CliRunner().invoke(script.main, [str(tmp_path / "results.csv")])
    assert done.exit_code == 0 and (tmp_path / "table.md").read_text() == done.output
    other = tmp_path / "other"
    append_row(other / "results.csv", rows_of(512, {"fa3": 1.0})[0])
    assert CliRunner().invoke(script.main, [str(other / "results.csv")]).exit_code == 2
