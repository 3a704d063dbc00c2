"""Experiments whose problems a seed draws, as a user runs them: on the CPU, end to end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from harness.backends import ContextLost
from harness.check.contender import Contender
from harness.row import Row, read_rows
from harness.verbs import experiment, run

Run = Callable[..., Result]
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
SWEEP = """
kernels = ["naive"]
peers = ["numpy"]
[draw]
cases = 3
models = [{ name = "a", heads = 4, heads_kv = 2, dim = 16 }, { name = "b", heads = 2, dim = 8, causal = false }]
[[draw.part]]
share = 1
dtype = ["float16", "float32"]
tokens = [16, 64]
seq = [8, 32]
causal = 0.5
longer = 0.2
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "s.toml").write_text(SWEEP)
    return tmp_path / "s.toml"


def test_mixed_on_the_cpu(fa_cli: Run, tmp_path: Path) -> None:
    """Rows, the distribution, the commands of the worst, the figure and the seed's record; such a command runs."""
    result = fa_cli("experiment", "mixed", "--seed", "16", "--cases", "3", "--device", "cpu", "--peers", "numpy", "--mode", "both")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "experiment_results" / "mixed"
    rows = read_rows(folder / "results.csv")
    assert (
        len(rows) == 3 * 2 * 3 and {row.Status for row in rows} == {"PASS"} and all(str(row.Test).startswith("seed16-00") for row in rows)
    )
    assert json.loads((folder / "env.json").read_text())["seed"] == 16
    assert "ours over the best peer, seed 16" in result.stdout and "the lowest of BAC, float32:" in result.stdout
    assert "mean" in result.stdout and "max |error|" not in result.stdout  # the rows with -v only
    assert "## Ours over the best peer, seed 16" in (folder / "summary.md").read_text()
    assert [path.name for path in folder.glob("*.png")] == ["ratios_cpu.png"]
    lines = [line.partition(": ")[2] for line in result.stdout.splitlines() if "hopper" in line and "fa-cli run" in line]
    assert len(lines) == 2 * 3 and all(" --compute hopper,numpy --mode " in line for line in lines)
    assert fa_cli(*shlex.split(lines[0])[1:], "--device", "cpu").exit_code == 0


def test_what_is_drawn_is_said(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """A dry run lists problems and commands; --only takes some of them; JSON has the distributions."""
    plan = fa_cli("experiment", sweep, "--seed", "3", "--cases", "5", "--dry-run").stdout
    assert "5 shapes x 2 contenders" in plan and plan.count("    fa-cli run --compute naive,numpy --mode forward") == 5
    some = fa_cli("experiment", sweep, "--seed", "3", "--cases", "5", "--only", "float32", "--json", "--no-figures")
    found = json.loads(some.stdout)
    kept = {row["Test"] for row in found["rows"]}
    assert found["seed"] == 3 and kept and all("float32" in test for test in kept) and all(test in plan for test in kept)
    (kernel, call) = found["distributions"]
    assert (kernel["time"], call["time"], kernel["dtype"], kernel["cases"]) == ("kernel", "call", "float32", len(kept))
    assert len(kernel["tenths"]) == 9 and kernel["least"] <= kernel["tenths"][0] <= kernel["tenths"][8] <= kernel["most"]
    assert {each["Test"] for each in kernel["worst"]} == kept


def test_a_run_of_a_seed_is_resumed(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """With more cases too, which are added to it, and of a version with fewer columns; not by another seed, whose problems are others."""
    assert fa_cli("experiment", sweep, "--seed", "3", "--no-figures").exit_code == 0
    table = tmp_path / "experiment_results" / "s" / "results.csv"
    before = table.read_bytes()
    other = fa_cli("experiment", sweep, "--seed", "4", "--resume", "--no-figures")
    assert other.exit_code == 2 and "add --seed 3" in other.output and table.read_bytes() == before
    older = [line.rsplit(",", 2)[0] + "\n" for line in before.decode().splitlines()]
    table.write_text(older[0])  # a run that was ended before its first row
    assert fa_cli("experiment", sweep, "--seed", "3", "--resume", "--no-figures").exit_code == 0 and len(read_rows(table)) > 0
    table.write_text("".join(older))
    assert fa_cli("experiment", sweep, "--seed", "3", "--resume", "--cases", "4", "--no-figures").exit_code == 0
    assert table.read_bytes().startswith(before) and len(read_rows(table)) == 4 * 2
    assert fa_cli("experiment", sweep, "--seed", "4", "--no-figures").exit_code == 0
    assert (tmp_path / "experiment_results" / "s-2" / "results.csv").exists()


TIMES = ("KernelTime_ms", "TorchTime_ms", "Speedup", "TFLOPS", "Bandwidth_GBps", "p20_ms", "p80_ms", "call_ms", "run_id", "peak_bytes")


def timeless(rows: Sequence[Row]) -> set[tuple[object, ...]]:
    """What rows say besides their times."""
    return {tuple(value for name, value in asdict(row).items() if name not in TIMES) for row in rows}


def test_two_processes_give_the_rows_of_one(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """Apart from times and their order; each has its samples, and there is nothing left to resume."""
    for jobs, folder in ((1, "one"), (2, "two")):
        words = (
            sweep,
            "--seed",
            7,
            "--cases",
            4,
            "--mode",
            "both",
            "--jobs",
            jobs,
            "--output-dir",
            folder,
            "--device",
            "cpu",
            "--no-figures",
        )
        assert fa_cli("experiment", *map(str, words)).exit_code == 0
    one, two = (read_rows(tmp_path / folder / "s" / "results.csv") for folder in ("one", "two"))
    assert len(one) == len(two) == 4 * 2 * 3 and timeless(one) == timeless(two)
    assert all(row.KernelTime_ms and row.TFLOPS for row in two) and len({row.run_id for row in two}) == 1
    assert (tmp_path / "two" / "s" / "samples.jsonl").read_text().count("\n") == len(two)
    before = (tmp_path / "two" / "s" / "results.csv").read_bytes()
    assert fa_cli("experiment", *map(str, words), "--resume").exit_code == 0
    assert (tmp_path / "two" / "s" / "results.csv").read_bytes() == before


def dying(device: str, pipe: Any) -> None:
    """A worker in which the check of one kernel ends the process, and that of another one takes the CUDA context with it."""
    right = run.check_in_memory

    def dies(contender: Contender, *more: Any) -> Any:
        if contender.name == "fa1":
            os._exit(3)
        if contender.name == "fa2_naive":
            raise ContextLost("fa2_naive died while it ran", "an illegal memory access; this process's CUDA context is dead", "")
        return right(contender, *more)

    run.check_in_memory = dies
    experiment._work(device, pipe)


def test_a_kernel_that_ends_a_worker_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' rows are there, measured by a fresh process."""
    monkeypatch.setattr(experiment, "partial", lambda what, *given: partial(dying if what is experiment._work else what, *given))
    text = 'kernels = ["naive", "fa1", "fa2_naive", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = [16, 32], dim = 64 }]'
    (tmp_path / "s.toml").write_text(text)
    rows = experiment.run_sweep(experiment.Options(str(tmp_path / "s.toml"), device="cpu", jobs=2, output_dir=tmp_path / "out")).rows
    died = {"fa1": "ERROR", "fa2_naive": "ERROR", "naive": "PASS", "fa2": "PASS"}
    assert {(row.Test, row.Kernel): row.Status for row in rows} == {(f"S{seq}", name): died[name] for seq in (16, 32) for name in died}
    assert len(rows) == 8 and all(row.KernelTime_ms for row in rows if row.Status == "PASS")
    assert {row.ErrorMessage.partition("; ")[0] for row in rows if row.Kernel == "fa1"} == {
        "the process of S16 ended without a result",
        "the process of S32 ended without a result",
    }


def crowded(flag: Path, device: str, pipe: Any) -> None:
    """A worker in which a kernel finds no memory: fa1 the first time, fa2_naive always."""
    right = run.check_in_memory

    def crowds(contender: Contender, *more: Any) -> Any:
        if contender.name == "fa2_naive" or contender.name == "fa1" and not flag.exists():
            flag.touch()
            raise MemoryError("Out of memory allocating 8 bytes")
        return right(contender, *more)

    run.check_in_memory = crowds
    experiment._work(device, pipe)


def test_what_does_not_fit_beside_others_is_done_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its rows, once; what does not fit alone either says so."""
    own = partial(crowded, tmp_path / "flag")
    monkeypatch.setattr(experiment, "partial", lambda what, *given: partial(own if what is experiment._work else what, *given))
    text = 'kernels = ["naive", "fa1", "fa2_naive", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = [16, 32], dim = 64 }]'
    (tmp_path / "s.toml").write_text(text)
    rows = experiment.run_sweep(experiment.Options(str(tmp_path / "s.toml"), device="cpu", jobs=2, output_dir=tmp_path / "out")).rows
    assert sorted((row.Test, row.Kernel) for row in rows) == [
        (f"S{n}", name) for n in (16, 32) for name in ("fa1", "fa2", "fa2_naive", "naive")
    ]
    assert {row.Kernel for row in rows if row.Status == "PASS"} == {"naive", "fa1", "fa2"}
    assert all("Out of memory" in row.ErrorMessage for row in rows if row.Kernel == "fa2_naive")
    said = json.loads((tmp_path / "out" / "s" / "env.json").read_text())  # where the time went, beside what the run is
    assert said["jobs"] == 2 and said["run_id"] and 0 < said["spent"]["in_rounds"] < said["spent"]["seconds"]


def test_a_sweep_of_shapes_draws_nothing(fa_cli: Run) -> None:
    """Its flags are refused, as they would change nothing."""
    result = fa_cli("experiment", "--seqlen", "--seed", "1", "--device", "cpu")
    assert result.exit_code == 2 and "seqlen takes no --seed" in result.output and "experiment mixed --seed" in result.output


def test_a_variant_is_not_run_again(fa_cli: Run, tmp_path: Path) -> None:
    """A resumed run knows the row of a kernel in whose place a variant of it ran; its command names the kernel."""
    (tmp_path / "v.toml").write_text(
        'kernels = ["hopper"]\npeers = []\nshapes = [{ batch = 1, heads = 2, heads_kv = 1, seq = 32, dim = 64, dtype = "bfloat16" }]'
    )
    command = ("experiment", tmp_path / "v.toml", "--mode", "backward", "--no-figures", "--device", "cpu")
    assert fa_cli(*command).exit_code == 0
    table = tmp_path / "experiment_results" / "v" / "results.csv"
    (row,), before = read_rows(table), table.read_bytes()
    assert row.repro and "--compute hopper --mode both" in row.repro
    assert fa_cli(*command, "--resume").exit_code == 0 and table.read_bytes() == before
