"""Sweeps as a user runs them: what is selected, resumed, refused and written, on the CPU engine."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from harness import peers
from harness.backends import ContextLost, pick
from harness.backends.host import library
from harness.check import oracle, reference
from harness.check.choose import contender
from harness.check.contender import Contender
from harness.check.request import Request
from harness.fault import UsageFault
from harness.measure import alone
from harness.problem import Problem
from harness.row import Row
from harness.verbs import experiment, run
from harness.verbs.selftest.mutant import edited
from harness.verbs.sweep import load

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., Result]
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
SWEEP = """
title = "a test"
kernels = ["naive", "fa2"]
peers = []
shapes = [
    { test = "plain", batch = 1, heads = 2, seq = [16, 33], dim = 16 },
    { test = "mask", batch = 2, heads = 4, heads_kv = 2, seq = 20, seq_kv = 33, dim = 8, causal = true },
]
"""

TWO_LENGTHS = 'title = "Two lengths"\nshapes = [{ batch = 1, heads = 2, seq = [16, 33], dim = 16 }]\n'


def rows_of(folder: Path) -> list[dict[str, str]]:
    """results.csv as written."""
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(SWEEP)
    return path


@needs_compiler
def test_rates_are_of_the_work_counted_by_hand(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """FLOPs of a causal, grouped, unequal shape: queries 20, keys 33, so query i sees 14 + i keys."""
    assert fa_cli("experiment", sweep, "--mode", "both", "--only", "mask", "--no-figures").exit_code == 0
    pairs = sum(14 + i for i in range(20))
    forward = 4 * 2 * 4 * 8 * pairs  # 4 B H D pairs
    for row in rows_of(tmp_path / "experiment_results" / "s"):
        seconds = float(row["KernelTime_ms"]) * 1e-3
        work = {"FOR": forward, "BAC": 2.5 * forward, "BOT": 3.5 * forward}[row["Type"]]
        assert float(row["TFLOPS"]) == pytest.approx(work / seconds / 1e12)
        q, kv, lse = 2 * 4 * 20 * 8 * 4, 2 * 2 * 33 * 8 * 4, 2 * 4 * 20 * 4
        traffic = {"FOR": 2 * q + 2 * kv + lse, "BAC": 4 * q + 4 * kv + lse}  # Q O, K V; Q O dO dQ, K V dK dV; and logsumexp
        traffic["BOT"] = traffic["FOR"] + traffic["BAC"]
        assert float(row["Bandwidth_GBps"]) == pytest.approx(traffic[row["Type"]] / seconds / 1e9)
        assert (row["causal"], row["heads_kv"], row["seq_kv"], row["timing"], row["device"]) == ("true", "2", "33", "warm", "cpu")


@needs_compiler
def test_every_sample_is_kept(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """A line of samples.jsonl for each row that was timed; the row's median is theirs."""
    assert fa_cli("experiment", sweep, "--only", "S16", "--no-figures").exit_code == 0
    folder = tmp_path / "experiment_results" / "s"
    rows, lines = rows_of(folder), [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == 2
    for row, line in zip(rows, lines, strict=True):
        assert (row["Kernel"], row["Type"], row["run_id"]) == (line["Kernel"], line["Type"], line["run_id"])
        samples = sorted(line["samples_ms"])
        assert len(samples) == int(row["n_samples"]) and samples[len(samples) // 2] == pytest.approx(float(row["KernelTime_ms"]))


@pytest.mark.parametrize("asked", [{"min_time": float("nan")}, {"min_time": float("inf")}, {"samples": -1}])
def test_times_that_cannot_be_meant_are_refused(asked: dict[str, Any]) -> None:
    """From Python too, where no option's range is in between."""
    with pytest.raises(UsageFault, match="at least 0, and finite"):
        experiment.run_sweep(experiment.Options("seqlen", device="cpu", **asked))


@needs_compiler
def test_only_skip_and_dry_run(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """Patterns or parts of test names choose shapes; a dry run says what would be run and writes nothing."""
    result = fa_cli("experiment", sweep, "--dry-run", "--skip", "S33")
    assert result.exit_code == 0 and "2 shapes x 2 contenders" in result.stdout and "S33" not in result.stdout
    assert "GFLOP" in result.stdout and sorted(tmp_path.iterdir()) == [sweep]
    whole = fa_cli("experiment", "--dry-run")
    assert whole.stderr == "note: no sweep is named, so this is forward; fa-cli list has the others\n" and "Small-1" in whole.stdout
    assert fa_cli("experiment", sweep, "--only", "plain*", "--skip", "S16", "--no-figures").exit_code == 0
    words = ("experiment", sweep, "--resume", "--dry-run")
    left = fa_cli(*words).stdout
    assert left.startswith("1 of 3 shapes have their rows\n2 shapes x 2 contenders (naive, fa2)") and "S33" not in left
    assert "0 of 3 shapes have their rows\n3 shapes x 1 contenders (fa1)" in fa_cli(*words, "--compute", "fa1").stdout
    assert fa_cli(*words, "--only", "S33").stdout == "1 of 1 shapes have their rows\n"
    assert {row["Test"] for row in rows_of(tmp_path / "experiment_results" / "s")} == {"plain-S33"}
    assert fa_cli("experiment", sweep, "--only", "nothing").exit_code == 2


def test_an_axis_takes_the_place_of_a_shapes_own(fa_cli: Run, sweep: Path) -> None:
    """Every shape has its values, and names them; of tokens a batch takes the place; shapes that become one are one."""
    shapes = load(str(sweep), axes=("seq=20,40", "causal=true")).shapes
    assert [test for test, _ in shapes] == ["plain-S20_causal", "plain-S40_causal", "mask-S20_causal", "mask-S40_causal"]
    assert {(p.seq_q, p.seq_kv, p.causal) for _, p in shapes} == {(20, 20, True), (40, 40, True), (20, 33, True), (40, 33, True)}
    (one,) = {p.mask for _, p in load(str(sweep), axes=("mask=min(q, 9) >= k",)).shapes}
    assert one == "min(q, 9) >= k"
    sweep.write_text("shapes = [{ tokens = [64, 128], heads = 2, seq = 16, dim = [16, 32] }]")
    assert [test for test, _ in load(str(sweep), axes=("batch=2", "dim=16")).shapes] == ["D16_B2"]
    assert load(str(sweep), axes=("scale=0.5", "dtype=float16")).shapes[0][1].scale == 0.5
    for wrong in (("sq=5",), ("seq",), ("seq=0",), ("seq=4", "seq=8"), ("test=a",), ("dtype=float17",)):
        words = [word for each in wrong for word in ("--axis", each)]
        result = fa_cli("experiment", sweep, "--dry-run", *words)
        assert result.exit_code == 2 and "--axis" in result.stderr and "hint: " in result.stderr, wrong
    assert fa_cli("experiment", "mixed", "--axis", "seq=5").exit_code == 2
    assert "--record" in fa_cli("experiment", "seqlen", "--record", "--axis", "seq=64").stderr


@needs_compiler
def test_what_cannot_run_is_a_row(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """Refused, absent, wrong: each a row with its word and without a speed; only what is wrong makes the exit code 1."""
    sweep.write_text('kernels = ["fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = 8, dim = [16, 200] }]')
    assert fa_cli("experiment", sweep).exit_code == 0
    assert [(r["HeadDim"], r["Status"], bool(r["KernelTime_ms"])) for r in rows_of(tmp_path / "experiment_results" / "s")] == [
        ("16", "PASS", True),
        ("200", "REFUSED", False),
    ]
    text = (ROOT / "kernels_cu" / "05_fa2_naive_forward.cu").read_text()
    (tmp_path / "wrong_forward.cu").write_text(edited(text, (": 1 / ", ": 1.001f / ")))
    result = fa_cli("experiment", sweep, "--compute", "./wrong_forward.cu", "--only", "D16", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["rows"]
    assert (
        row["Status"] == "FAIL" and row["KernelTime_ms"] is None and row["TFLOPS"] is None and "exceeds the budget" in row["ErrorMessage"]
    )
    summary = "".join(path.read_text() for path in (tmp_path / "experiment_results").rglob("*.md"))
    assert "1.001" not in summary


@pytest.mark.usefixtures("ctrl_c")
@needs_compiler
def test_an_interrupted_sweep_is_resumed(sweep: Path, tmp_path: Path) -> None:
    """SIGINT in the middle: exit code 130, finished rows stay; --resume adds the rest to the same run, nothing twice."""
    sweep.write_text('kernels = ["naive", "fa1", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 2, seq = [16, 32, 48, 64], dim = 16 }]')
    command = [sys.executable, str(ROOT / "cli.py"), "experiment", str(sweep)]
    environment = os.environ | {"FA_CLI_DEVICE": "cpu"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    table, end = tmp_path / "experiment_results" / "s" / "results.csv", time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None and not (table.exists() and table.read_text().count("\n") > 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err.endswith(f"error: interrupted\nthe rows that are done are kept\nhint: fa-cli experiment {sweep.name} --resume\n")
    before = rows_of(table.parent)
    assert 3 <= len(before) < 12
    done = subprocess.run(
        [*command, "--resume", "--no-figures"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    after = rows_of(table.parent)
    assert after[: len(before)] == before
    assert len({(r["Test"], r["Kernel"]) for r in after}) == len(after) == 12
    assert len({r["run_id"] for r in after}) == 1


@needs_compiler
def test_a_sweep_interrupted_before_its_first_row_leaves_nothing(
    fa_cli: Run, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so, without a hint to resume; a folder that has rows stays, and one with a file of another's."""

    def stops(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    root, nothing = tmp_path / "experiment_results", "error: interrupted\nnothing was finished\n"
    with monkeypatch.context() as patched:
        patched.setattr(experiment, "_survived", stops)
        found = fa_cli("experiment", sweep)
        assert (found.exit_code, found.stderr.lstrip(), list(root.iterdir())) == (130, nothing, [])
        (root / "s").mkdir()
        (root / "s" / "mine.txt").write_text("")
        assert fa_cli("experiment", sweep).exit_code == 130 and [path.name for path in (root / "s").iterdir()] == ["mine.txt"]
    assert fa_cli("experiment", sweep, "--only", "S16", "--no-figures").exit_code == 0
    before = rows_of(root / "s")
    monkeypatch.setattr(experiment, "_survived", stops)
    found = fa_cli("experiment", sweep, "--resume")
    assert found.exit_code == 130 and "the rows that are done are kept\nhint: fa-cli experiment" in found.stderr
    assert rows_of(root / "s") == before


@needs_compiler
def test_a_resumed_sweep_measures_what_differs(sweep: Path, tmp_path: Path) -> None:
    """A shape of the same test with other key heads, keys or scale, the other form of a kernel, and one that was edited, are not done."""

    def resumed(**more: Any) -> list[Row]:
        options = experiment.Options(str(sweep), device="cpu", output_dir=tmp_path / "out", resume=True, no_figures=True, **more)
        return experiment.run_sweep(options).rows

    one = "{ test = 'gqa', batch = 1, heads = 2, seq = 32, dim = 64, dtype = 'float16', causal = true"
    head = "mode = 'backward'\nkernels = ['mma_qreg_async']\npeers = []\n"
    sweep.write_text(f"{head}shapes = [{one}, heads_kv = 2 }}]")
    first = resumed()
    sweep.write_text(f"{head}shapes = [{one}, heads_kv = 2 }}, {one}, heads_kv = 1 }}, {one}, seq_kv = 48 }}, {one}, scale = 0.5 }}]")
    rows = resumed()
    assert [(r.heads_kv, r.seq_kv, r.scale) for r in rows] == [(2, 32, 0.125), (1, 32, 0.125), (2, 48, 0.125), (2, 32, 0.5)]
    assert rows[0] == first[0]
    assert resumed() == rows
    assert {r.deterministic for r in rows} == {False}
    again = resumed(deterministic=True)
    assert len(again) == 4
    assert {(r.deterministic, r.Status) for r in again} == {(True, "PASS")}
    assert resumed(deterministic=True) == again


@needs_compiler
def test_a_resumed_sweep_measures_an_edited_kernel_again(sweep: Path, tmp_path: Path) -> None:
    """A row of the text before is no row of the text now: the wrong one is found, and the right one's row is gone."""
    mine, text = tmp_path / "mine_forward.cu", (ROOT / "kernels_cu" / "05_fa2_naive_forward.cu").read_text()
    sweep.write_text("shapes = [{ batch = 1, heads = 2, seq = 16, dim = 16 }]")
    for edits, status in ((), "PASS"), ([(": 1 / ", ": 1.001f / ")], "FAIL"):
        mine.write_text(edited(text, *edits))
        options = experiment.Options(
            str(sweep), device="cpu", output_dir=tmp_path / "out", resume=True, computes=(str(mine),), peers=(), no_figures=True
        )
        rows = experiment.run_sweep(options).rows
        assert [(row.Kernel, row.Status) for row in rows] == [("mine", status)]
        assert [row["Status"] for row in rows_of(tmp_path / "out" / "s")] == [status]


@needs_compiler
def test_a_resumed_sweep_compares_times_of_one_run(sweep: Path, tmp_path: Path) -> None:
    """Where a kernel of a shape was edited, the others are timed again beside it; a row without a time stays, and so do whole shapes."""
    mine, text = tmp_path / "mine_forward.cu", (ROOT / "kernels_cu" / "05_fa2_naive_forward.cu").read_text()
    wrong = tmp_path / "wrong_forward.cu"
    wrong.write_text(edited(text, (": 1 / ", ": 1.001f / ")))

    def resumed(shapes: str, *edits: tuple[str, str]) -> dict[tuple[str, int], Row]:
        mine.write_text(edited(text, *edits))
        sweep.write_text(f"shapes = [{{ batch = 1, heads = 2, seq = {shapes}, dim = 16 }}]")
        options = experiment.Options(
            str(sweep),
            device="cpu",
            output_dir=tmp_path / "out",
            resume=True,
            computes=(str(mine), str(wrong)),
            peers=("numpy",),
            no_figures=True,
        )
        rows = experiment.run_sweep(options).rows
        assert len(rows) == len(rows_of(tmp_path / "out" / "s"))
        return {(row.Kernel, row.SeqLen): row for row in rows}

    first = resumed("[16, 48]")
    more = resumed("[16, 48, 32]")
    assert {key: more[key] for key in first} == first and len(more) == 9
    after = resumed("[16, 48, 32]", (": 1 / ", ": 1.0f / "))
    assert {key for key in more if after[key] == more[key]} == {("wrong", 16), ("wrong", 48), ("wrong", 32)}
    assert {row.run_id for row in after.values()} == {first["numpy", 16].run_id}


@needs_compiler
def test_two_kernels_of_one_name_are_two_in_every_table(fa_cli: Run, sweep: Path, tmp_path: Path) -> None:
    """The old and the new version of a kernel, in two folders, and one with the name and number of the tree's: no verdict hides another."""
    text = (ROOT / "kernels_cu" / "05_fa2_naive_forward.cu").read_text()
    for folder, edits in ("a", []), ("b", [(": 1 / ", ": 1.001f / ")]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "05_fa2_naive_forward.cu").write_text(edited(text, *edits))
    sweep.write_text("shapes = [{ batch = 1, heads = 2, seq = 16, dim = 16 }]")
    named = "./b/05_fa2_naive_forward.cu,./a/05_fa2_naive_forward.cu,fa2_naive"
    result = fa_cli("experiment", sweep, "--compute", named, "--peers", "none")
    assert result.exit_code == 1
    rows = rows_of(tmp_path / "experiment_results" / "s")
    assert [(row["Kernel"], row["Status"]) for row in rows] == [
        ("fa2_naive@b", "FAIL"),
        ("fa2_naive@a", "PASS"),
        ("fa2_naive", "PASS"),
    ]
    (tmp_path / "a" / "own.toml").write_text(f"kernels = './05_fa2_naive_forward.cu'\npeers = []\n{sweep.read_text()}")
    assert fa_cli("experiment", "a/own.toml", "--no-figures").exit_code == 0  # a path in a sweep is from its folder
    for row, path in zip(rows, ("/b/05_fa2_naive_forward.cu ", "/a/05_fa2_naive_forward.cu ", " fa2_naive "), strict=True):
        assert path in row["repro"]
    summary = (tmp_path / "experiment_results" / "s" / "summary.md").read_text()
    assert all(row["Kernel"] in summary for row in rows)


@needs_compiler
def test_a_kernel_that_takes_the_gpu_with_it_costs_its_own_row(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that lost its CUDA context measures nothing more: a fresh one does the rest, and the row says ERROR."""
    right = run.check_in_memory

    def dies(contender: Contender, *more: Any) -> Any:
        if contender.name == "fa1":
            raise ContextLost("fa1 died while it ran", "an illegal memory access; this process's CUDA context is dead", "")
        return right(contender, *more)

    monkeypatch.setattr(run, "check_in_memory", dies)
    sweep.write_text('kernels = ["naive", "fa1", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = [16, 32], dim = 64 }]')
    options = experiment.Options(str(sweep), device="cpu", output_dir=tmp_path / "out", no_figures=True)
    rows = experiment.run_sweep(options).rows
    assert {(r.Test, r.Kernel): r.Status for r in rows} == {
        ("S16", "fa1"): "ERROR",
        ("S16", "naive"): "PASS",
        ("S16", "fa2"): "PASS",
        ("S32", "naive"): "PASS",
        ("S32", "fa1"): "PASS",
        ("S32", "fa2"): "PASS",
    }
    assert len(rows) == 6 and all(r.KernelTime_ms for r in rows if r.Status == "PASS")


@needs_compiler
def test_a_peer_of_one_pass_is_measured_in_it(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both passes are asked for, its row of the other one, and of both, says why there is no speed; --resume has nothing left."""
    numpy = peers.find("numpy")
    monkeypatch.setitem(peers._all(), "numpy", replace(numpy, passes=("forward",)))
    sweep.write_text('kernels = ["naive"]\npeers = ["numpy"]\nmode = "both"\nshapes = [{ batch = 1, heads = 1, seq = 16, dim = 64 }]')
    options = experiment.Options(str(sweep), device="cpu", output_dir=tmp_path / "out")
    rows = experiment.run_sweep(options).rows
    assert {(row.Kernel, row.Type): row.Status for row in rows} == {
        **{("naive", type_): "PASS" for type_ in ("FOR", "BAC", "BOT")},
        ("numpy", "FOR"): "PASS",
        ("numpy", "BAC"): "REFUSED",
        ("numpy", "BOT"): "REFUSED",
    }
    assert all("it has only the forward pass here" in str(row.ErrorMessage) for row in rows if row.Status == "REFUSED")
    assert [row.KernelTime_ms is None for row in rows] == [row.Status == "REFUSED" for row in rows]
    assert experiment.run_sweep(replace(options, resume=True)).rows == rows


def test_a_sweep_says_what_is_measured_beside_warm_times(tmp_path: Path) -> None:
    """Cold by default; burst and energy for the tests that its patterns name."""

    def taken(text: str) -> dict[str, tuple[str, ...]]:
        path = tmp_path / "t.toml"
        path.write_text(f"{text}\nshapes = [{{ batch = 1, heads = 1, seq = [512, 4096], dim = 64 }}]")
        found = load(str(path))
        return {test: found.measures(test) for test, _ in found.shapes}

    assert taken("") == {"S512": ("cold",), "S4096": ("cold",)}
    assert taken("cold = false\nenergy = true") == {"S512": ("energy",), "S4096": ("energy",)}
    assert taken('cold = "S512"\nburst = ["S4*"]\nenergy = ["4096", "nothing"]') == {"S512": ("cold",), "S4096": ("burst", "energy")}


@needs_compiler
def test_burst_and_energy_are_rows_of_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU engine, with a meter of 1 W: warm rows with energy, burst rows; a kernel that fails is not measured."""
    backend = pick("cpu")
    monkeypatch.setattr(backend, "meter", lambda: (int(time.perf_counter() * 1e3), 1234), raising=False)
    for name, seconds in {"REST": 0.0, "SETTLE": 0.0, "ENERGY": 0.1}.items():
        monkeypatch.setattr(alone, name, seconds)
    problem = Problem.of(1, 1, 32, 16)
    contenders = [contender("fa2", Request())]
    shape = experiment._Shape(backend, "forward", "t", problem, "run", ("warm", "burst", "energy"), lambda text, more: None)
    ((rows, samples),) = experiment._rows(shape, contenders)
    assert [(r.Kernel, r.timing, r.Status) for r in rows] == [("fa2", "warm", "PASS"), ("fa2", "burst", "PASS")]
    assert rows[0].power_w == pytest.approx(1.0, rel=0.05) and rows[0].sm_clock_mhz == 1234
    assert rows[0].energy_mj and 0 < rows[0].energy_mj < 100 and rows[1].energy_mj is None
    assert [line["timing"] for line in samples] == ["warm", "burst"] and len(samples[1]["samples_ms"]) == rows[1].n_samples


@needs_compiler
def test_a_tf32_kernel_on_float32_files_says_so(fa_cli: Run, tmp_path: Path) -> None:
    """Its rows have dtype tf32, beside the float32 of others, and a resumed run has them already."""
    sweep = tmp_path / "t.toml"
    sweep.write_text('kernels = ["mma", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = 17, dim = 16 }]\n')
    for again in ((), ("--resume",)):
        assert fa_cli("experiment", sweep, "--device", "cpu", "--no-figures", *again).exit_code == 0
        rows = rows_of(tmp_path / "experiment_results" / "t")
        assert [(row["Kernel"], row["Status"], row["dtype"], row["arithmetic"]) for row in rows] == [
            ("mma", "PASS", "tf32", "tf32"),
            ("fa2", "PASS", "float32", "f32"),
        ]


@needs_compiler
def test_experiment(fa_cli: Run, tmp_path: Path, wrong: str) -> None:
    """A failing kernel does not stop the sweep: its rows say FAIL without a time, exit code 1. A second run has its own folder."""
    (tmp_path / "two.toml").write_text(TWO_LENGTHS)
    result = fa_cli("experiment", "two.toml", "--compute", f"naive,{wrong}", "--peers", "none")
    assert result.exit_code == 1, result.output
    folder = tmp_path / "experiment_results" / "two"
    rows = rows_of(folder)
    assert [(r["Test"], r["Kernel"], r["Type"], r["Status"], bool(r["KernelTime_ms"])) for r in rows] == [
        ("S16", "naive", "FOR", "PASS", True),
        ("S16", "wrong", "FOR", "FAIL", False),
        ("S33", "naive", "FOR", "PASS", True),
        ("S33", "wrong", "FOR", "FAIL", False),
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in folder.glob("*.png")) and list(folder.glob("*_cpu.png"))
    again = fa_cli("experiment", "two.toml", "--compute", "naive", "--mode", "both", "-q", "--peers", "none", "--no-figures")
    assert again.exit_code == 0 and "note: two was run before; this run is in experiment_results/two-2\n" in again.stderr
    assert rows_of(folder) == rows
    second = rows_of(folder.with_name("two-2"))
    assert [r["Type"] for r in second] == ["FOR", "BAC", "BOT"] * 2
    record = json.loads((folder.with_name("two-2") / "env.json").read_text())
    assert (record["run_id"], record["sweep"]) == (second[-1]["run_id"], "two")


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("shapes = [", 3, "TOML"),
        ("shapes = []", 3, "shapes"),
        ("shapes = [{ sequence = 3 }]", 3, "sequence"),
        ("shapes = [{ seq = 0 }]", 3, "at least 1"),
        ('mode = "up"\nshapes = [{ seq = 1 }]', 3, "mode"),
        ("speed = 1\nshapes = [{ seq = 1 }]", 3, "speed"),
        ("energy = 1\nshapes = [{ seq = 1 }]", 3, "energy is 1; it is true, false, or patterns of tests"),
        ("jobs = 0\nshapes = [{ seq = 1 }]", 3, "jobs is 0; it is from 1 to 64"),
        ("burst = [1]\nshapes = [{ seq = 1 }]", 3, "burst"),
        ('shapes = [{ seq = 1, test = "a", peers = [] }]\ncpu.shapes = [{ seq = 1, test = "a", peers = "numpy" }]', 3, "other peers"),
        ('shapes = [{ seq = 1, test = "a" }]\ncpu.shapes = [{ seq = 1, test = "a", kernels = "naive" }]', 3, "other kernels"),
        ('kernels = ["nosuch"]\nshapes = [{ seq = 1 }]', 2, "nosuch"),
        ('mode = "backward"\nkernels = ["fa1"]\nshapes = [{ seq = 1 }]', 2, "backward"),
    ],
)
def test_a_bad_sweep(text: str, code: int, why: str, fa_cli: Run, tmp_path: Path) -> None:
    """Told before anything is run or written."""
    (tmp_path / "bad.toml").write_text(text)
    result = fa_cli("experiment", "bad.toml")
    assert result.exit_code == code, result.output
    assert why in result.stderr and "hint: " in result.stderr
    assert os.listdir(tmp_path) == ["bad.toml"]


def test_an_unknown_sweep_is_exit_2(fa_cli: Run) -> None:
    """With those there are."""
    result = fa_cli("experiment", "nosuch")
    assert result.exit_code == 2 and "seqlen" in result.stderr


@pytest.mark.usefixtures("ctrl_c")
@needs_compiler
def test_ctrl_c_keeps_finished_rows(tmp_path: Path) -> None:
    """Exit code 130, every row in the file whole."""
    (tmp_path / "long.toml").write_text(TWO_LENGTHS.replace("[16, 33]", str([16, *range(400, 800)])))
    command = [sys.executable, str(ROOT / "cli.py"), "experiment", "long.toml", "--compute", "naive", "--peers", "none", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    table = tmp_path / "experiment_results" / "long" / "results.csv"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (table.exists() and table.read_text().count("\n") >= 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err and out == ""
    rows = rows_of(table.parent)
    assert len(rows) >= 2 and all(row["Status"] == "PASS" and row["repro"] for row in rows)


@needs_compiler
def test_a_kernel_that_ends_the_process_costs_its_own_row(
    fa_cli: Run, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a kernel does it: the rows of the others are there, its own says ERROR, --resume has nothing left to do, verify goes on."""
    monkeypatch.setattr(library, "ALLOWED", {*library.ALLOWED, "_exit"})
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # of another test: with it this process would not fork, and end
    text = (ROOT / "kernels_cu" / "05_fa2_naive_forward.cu").read_text()
    ends = edited(text, (" = fa::dynamic_shared<float>();", " = fa::dynamic_shared<float>();\n    if (args.seq_q == 16) _exit(0);"))
    ends = edited(ends, ('extern "C" __global__', 'extern "C" void _exit(int);\nextern "C" __global__'))
    (tmp_path / "ends_forward.cu").write_text(ends)
    sweep.write_text("peers = []\nshapes = [{ batch = 1, heads = 1, seq = [16, 32], dim = 64 }]")
    for again in ((), ("--resume",)):
        result = fa_cli("experiment", sweep, "--compute", "naive,./ends_forward.cu,fa2", "--no-figures", *again)
        assert result.exit_code == 1, result.output
        rows = rows_of(tmp_path / "experiment_results" / "s")
        assert [(row["Test"], row["Kernel"], row["Status"]) for row in rows] == [
            ("S16", "naive", "PASS"),
            ("S16", "ends", "ERROR"),
            ("S16", "fa2", "PASS"),
            ("S32", "naive", "PASS"),
            ("S32", "ends", "PASS"),
            ("S32", "fa2", "PASS"),
        ]
        assert "exit code 0" in rows[1]["ErrorMessage"] and all(row["arithmetic"] == "f32" for row in rows)
    ends = edited(ends, ("seq_q == 16", "seq_q == 129"), ("head_dims = [64, 128]", "head_dims = [64]"))  # of one width, fewer compiles
    (tmp_path / "ends_forward.cu").write_text(ends)
    result = fa_cli("verify", "./ends_forward.cu", "--json")
    cases = json.loads(result.stdout)["rows"]
    wrong = [each for each in cases if not each["passed"]]
    assert result.exit_code == 5 and 0 < len(wrong) < len(cases) and all("ended without a result" in each["message"] for each in wrong)
    assert {each["case"]["problem"]["seq_q"] for each in wrong} == {129}


@needs_compiler
@pytest.mark.parametrize(("computes", "mode"), [("fa2", "backward"), ("fa2", "both"), ("fa2+split", "both"), ("split", "backward")])
def test_long_sequences_have_a_backward_pass(monkeypatch: pytest.MonkeyPatch, computes: str, mode: str) -> None:
    """Where the reference is of a sample of rows, it has no O to read: the pass reads a kernel's, and is judged and timed."""
    monkeypatch.setattr(reference, "DENSE_SCORES", 1 << 10)
    monkeypatch.setattr(oracle, "PART", 1 << 10)  # it is a fourth of that
    problem, backend = Problem.of(1, 2, 280, 16, heads_kv=1, causal=True), pick("cpu")
    found = run.check_in_memory(contender(computes, Request(computes, mode)), mode, problem, backend)
    assert 0 < found.share < 1 and found.passed
    (timed,) = run.time_together([found], backend, "warm")
    assert timed.passed and timed.time_ms["backward"]
