"""experiments/hopper/table.py and merge.py on rows made up by hand: the best peer of each cell, means, the worst cell, runs made one."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from rows import append_row, row

from harness.problem import Problem
from harness.row import Row, read_rows

HOPPER = Path(__file__).resolve().parents[2] / "experiments" / "hopper"


def loaded(name: str) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"hopper_{name}", HOPPER / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def script() -> ModuleType:
    """table.py."""
    return loaded("table")


def rows_of(seq: int, times: dict[str, float | None], dtype: str = "bfloat16", causal: bool = False, dim: int = 128) -> list[Row]:
    """Warm rows of a cell with energy in proportion to the time, and bursts in which ours is as fast as in the turns, the peers slower."""
    problem = Problem.of(1, 2, seq, dim, dtype=dtype, causal=causal)
    found = []
    for name, ms in times.items():
        found.append(row(name, f"S{seq}", ms, problem, **({"energy_mj": 700 * ms * (2 if name == "fa3" else 1)} if ms else {})))
        if ms:
            found.append(row(name, f"S{seq}", ms if name == "hopper" else 2 * ms, problem, timing="burst"))
    return found


def test_a_cell_has_its_best_peer(script: ModuleType) -> None:
    """The fastest and the most frugal peer may be two; another kernel of ours, and a peer that failed, are no peers."""
    rows = rows_of(512, {"hopper": 1.0, "mma_qreg_async": 0.1, "fa3": 0.8, "torch-cudnn": 1.25, "fa4": None})
    ours = script.ours_of(rows)
    assert list(ours.values()) == ["hopper"]
    ((settled, burst, energy),) = script.pairs(rows, ours).values()
    assert settled[2] == "fa3" and settled[0] / settled[1] == pytest.approx(0.8)
    assert burst[2] == "fa3" and burst[0] / burst[1] == pytest.approx(1.6)
    assert energy[2] == "torch-cudnn" and energy[0] / energy[1] == pytest.approx(0.8)


def test_means_and_the_worst_cell(script: ModuleType) -> None:
    """Over the cells of one dtype that have both; float16 has its own line; a failure of ours is named, with its reason."""
    rows = rows_of(512, {"hopper": 1.0, "fa3": 2.0}) + rows_of(1024, {"hopper": 1.0, "fa3": 0.5}, causal=True)
    rows += rows_of(2048, {"hopper": None, "fa3": 1.0}) + rows_of(4096, {"hopper": 1.0, "fa4": 1.1}, dtype="float16")
    text = script.table(rows, script.ours_of(rows))
    settled = [line for line in text.splitlines() if line.startswith("Settled")]
    assert "bfloat16, 2 of 3 cells: 1.000; D128 2.000; D128 causal 0.500. Worst: D128 S1024 causal, 0.500; 1 below 1." in settled[0]
    assert "float16, 1 of 1 cells: 1.100" in settled[1]
    assert "| D128 S2048 |  |  |" in text and "D128 S2048: hopper FAIL, hopper is wrong" in text
    worst = next(line for line in text.splitlines() if line.startswith("Energy"))
    assert "Worst: D128 S1024 causal, 1.000" in worst, "the cell where ours takes the most"


def test_rows_with_an_idle_device_are_named(script: ModuleType) -> None:
    """A run that took longer while energy was counted than settled: 1.5 ms at 500 W for a settled millisecond; a tenth is let be."""
    rows = [replace(row, energy_mj=750.0, power_w=500.0) for row in rows_of(512, {"hopper": 1.0})]
    rows += [replace(row, energy_mj=700.0, power_w=650.0) for row in rows_of(1024, {"hopper": 1.0, "fa3": 1.0})]
    assert script.idle(rows) == ["hopper at D128 S512 33%"]
    text = script.table(rows, script.ours_of(rows))
    assert "Idle for more than 10% of the time while energy was counted: hopper at D128 S512 33%." in text
    assert "Idle" not in script.table(rows_of(512, {"hopper": 1.0}), script.ours_of(rows_of(512, {"hopper": 1.0})))


def test_ours_is_the_highest_step_of_each_cell(script: ModuleType) -> None:
    """Where it has a time, else the next; the table names it, and the step that has none. Of pairs the later pass decides, and a name that
    is not the ladder's is none."""
    rows = rows_of(512, {"hopper": 1.0, "mma_qreg_async": 0.5, "fa4": 2.0})
    rows += rows_of(512, {"hopper": 2.0, "hopper_cluster": 1.0, "fa4": 2.0}, dim=256)
    rows += rows_of(1024, {"hopper": 1.0, "hopper_cluster": None, "fa4": 2.0}, dim=256)
    rows += rows_of(2048, {"hopper": 2.0, "hopper_wide": 1.0, "fa4": 2.0}, dim=64)
    ours = script.ours_of(rows)
    assert [(cell[1], cell[3], name) for cell, name in sorted(ours.items())] == [
        (64, 2048, "hopper_wide"),
        (128, 512, "hopper"),
        (256, 512, "hopper_cluster"),
        (256, 1024, "hopper"),
    ]
    text = script.table(rows, ours)
    assert text.startswith("hopper and hopper_wide and hopper_cluster over the best peer")
    plain = script.table([replace(each, energy_mj=None) for each in rows if each.timing == "warm"], ours)
    assert "\n| cell | settled, TF | best peer | ours / peer |\n" in plain, "columns that no row has a value for are left out"
    cells = {line.split(" | ")[0]: line.split(" | ")[1:4] for line in text.splitlines() if line.startswith("| D")}
    names = ["hopper_wide", "hopper", "hopper_cluster", "hopper"]
    assert [(of[0].split()[-1], of[2]) for of in cells.values()] == [(name, "2.000") for name in names]
    assert "D256 S1024: hopper_cluster FAIL, hopper_cluster is wrong" in text and "mma_qreg_async" not in text
    pair = rows_of(512, {"hopper": 1.0, "hopper+hopper_cluster": 2.0, "hopper deterministic": 3.0, "hopper+mine": 4.0})
    assert list(script.ours_of(pair).values()) == ["hopper+hopper_cluster"]


def test_the_command_writes_what_it_prints(script: ModuleType, tmp_path: Path) -> None:
    """table.md beside the rows; rows without a kernel of ours are refused."""
    for each in rows_of(512, {"hopper": 1.0, "fa3": 2.0}):
        append_row(tmp_path / "results.csv", each)
    done = CliRunner().invoke(script.main, [str(tmp_path / "results.csv")])
    assert done.exit_code == 0 and (tmp_path / "table.md").read_text() == done.output
    named = CliRunner().invoke(script.main, [str(tmp_path / "results.csv"), "--ours", "hopper"])
    assert named.exit_code == 0 and named.output == done.output
    other = tmp_path / "other"
    append_row(other / "results.csv", rows_of(512, {"fa3": 1.0})[0])
    assert CliRunner().invoke(script.main, [str(other / "results.csv")]).exit_code == 2
    absent = CliRunner().invoke(script.main, [str(tmp_path / "results.csv"), "--ours", "nosuch"])
    assert absent.exit_code == 2 and "nosuch is not among the rows; there are" in absent.output


def test_runs_of_a_sweep_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and samples of all under the first one's run_id, its ceilings only; another GPU, or a test twice, is refused."""
    merge = loaded("merge")
    monkeypatch.setattr(merge, "SWEEPS", tmp_path / "experiments")
    for name, seq, device in (("a", 512, "x"), ("b", 1024, "x"), ("c", 2048, "y")):
        for each in [row("ceiling-copy", "ceiling", 1.0, Problem.of()), *rows_of(seq, {"hopper": 1.0}, dtype="float16")]:
            append_row(tmp_path / name / "results.csv", replace(each, run_id=name))
        (tmp_path / name / "samples.jsonl").write_text(json.dumps({"run_id": name, "Kernel": "hopper"}) + "\n")
        (tmp_path / name / "env.json").write_text(json.dumps({"run_id": name, "command": [name], "device_name": device}))
    run = partial(CliRunner().invoke, merge.main)
    done = run(["s", "--no-figures", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    found = read_rows(tmp_path / "experiments" / "s" / "results.csv")
    assert {each.run_id for each in found} == {"a"} and [each.Kernel for each in found].count("ceiling-copy") == 1
    assert (tmp_path / "experiments" / "s" / "table.md").read_text().startswith("hopper over")
    assert [each.SeqLen for each in found if each.Kernel == "hopper"] == [512, 512, 1024, 1024]
    samples = (tmp_path / "experiments" / "s" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["run_id"] for line in samples] == ["a", "a"]
    assert "another device_name" in run(["s", str(tmp_path / "a"), str(tmp_path / "c")]).output
    assert "another folder has: S512" in run(["s", str(tmp_path / "a"), str(tmp_path / "a")]).output
