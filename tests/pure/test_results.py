"""results.csv and env.json: the columns of the contract, and every value back as it went in."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import environment, files, results
from harness.check.budget import Verdict
from harness.check.contender import Contender
from harness.fault import DataFault, DiskFault
from harness.measure.sampling import Timing
from harness.problem import Problem
from harness.row import Row, append_row, columns, read_rows

ROOT = Path(__file__).resolve().parent.parent.parent

#: Typed out here on purpose: the contract, which users' scripts rely on.
CONTRACT = (
    "Test,Kernel,Type,Batch,Heads,SeqLen,HeadDim,Status,MaxError,MeanError,MSE,MaxRelError,KernelTime_ms,TorchTime_ms,Speedup,TFLOPS,"
    "Bandwidth_GBps,ErrorMessage,heads_kv,seq_kv,dtype,causal,scale,seed,device,device_name,timing,n_samples,p20_ms,p80_ms,call_ms,"
    "peak_bytes,registers,spill_bytes,shared_bytes,deterministic,pct_of_peak,torch_backend,source_hash,run_id,repro,"
    "MaxError_O,MaxError_logsumexp,MaxError_dQ,MaxError_dK,MaxError_dV"
)


def row(**changes: Any) -> Row:
    base = {
        "Kernel": "fa2",
        "Type": "FOR",
        "Batch": 2,
        "Heads": 8,
        "SeqLen": 512,
        "HeadDim": 64,
        "Status": "PASS",
        "heads_kv": 8,
        "seq_kv": 512,
        "dtype": "float32",
        "causal": False,
        "scale": 0.125,
    }
    return Row(**(base | changes))


def test_header_is_the_contract(tmp_path: Path) -> None:
    """Seed 002's columns first, under their names, then ours, in the contract's order."""
    assert ",".join(columns()) == CONTRACT
    append_row(tmp_path / "results.csv", row())
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[0] == CONTRACT
    assert lines[1].startswith(",fa2,FOR,2,8,512,64,PASS,,,,,,") and ",float32,false,0.125," in lines[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"MaxError": 1 / 3, "MSE": 5e-324, "KernelTime_ms": 0.1 + 0.2, "scale": 111**-0.5, "MaxError_dV": 1e-7},
        {"MaxError": math.inf, "causal": True, "deterministic": False, "seed": 0, "spill_bytes": 0},
        {"ErrorMessage": 'a "quoted", text\nof two lines; and ünïcode', "Test": "Stress-1"},
        {"Test": "=1+1", "Kernel": "@a", "ErrorMessage": "-x", "repro": "+y", "run_id": "'quoted", "torch_backend": "\tt"},
    ],
)
def test_values_come_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Floats to the last bit, booleans, empty as None, any text."""
    path = tmp_path / "new" / "results.csv"
    rows = [row(**changes), row(), row(**changes)]
    for each in rows:
        append_row(path, each)
    assert read_rows(path) == rows


def test_formulas_are_quoted(tmp_path: Path) -> None:
    """No cell of user text starts with what a spreadsheet runs; negative numbers stay numbers."""
    append_row(tmp_path / "r.csv", row(Test="=HYPERLINK(1)", ErrorMessage="@x", scale=-0.5))
    with open(tmp_path / "r.csv", newline="") as file:
        cells = next(csv.DictReader(file))
    assert (cells["Test"], cells["ErrorMessage"], cells["scale"]) == ("'=HYPERLINK(1)", "'@x", "-0.5")


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    """A numpy float prints as a float, not as np.float64(...)."""
    import numpy as np

    append_row(tmp_path / "r.csv", row(MaxError=np.float64(0.1)))
    assert read_rows(tmp_path / "r.csv")[0].MaxError == 0.1


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("Kernel", "Kernels", "first line is not the header"),
        (",false,", ",False,", "causal|False"),
        (",512,64,", ",many,64,", "many"),
        (",PASS,", ",", "Status is empty"),
        (",fa2,", ",,", "Kernel is empty"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, old: str, new: str, word: str) -> None:
    """Exit 3, naming the line."""
    path = tmp_path / "r.csv"
    append_row(path, row())
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataFault) as caught:
        read_rows(path)
    assert any(part in str(caught.value) for part in word.split("|")), str(caught.value)
    with pytest.raises(DataFault, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_append_to_another_file(tmp_path: Path) -> None:
    """A file with another header is left alone; what an interrupted write left is closed, not continued."""
    path = tmp_path / "r.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataFault, match="not a results file"):
        append_row(path, row())
    assert path.read_text() == "a,b\n1,2\n"
    path.unlink()
    append_row(path, row())
    with open(path, "a") as file:
        file.write("half a ro")
    append_row(path, row())
    assert path.read_text().splitlines()[2:] == ["half a ro", path.read_text().splitlines()[1]]


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not fit is not half there: exit 6, the file as it was."""
    path = tmp_path / "r.csv"
    append_row(path, row())
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:20]))
        with pytest.raises(DiskFault, match="no room"):
            append_row(path, row())
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault, match="cannot write"):
        append_row(tmp_path / "file" / "r.csv", row())


# -- rows from results ------------------------------------------------------------------------------------------------


def result(passed: bool = True, mode: str = "both") -> Any:
    """What harness.run gives, in its shape: 1, 2 and 4 ms forward, 10 ms backward."""

    def verdicts(names: tuple[str, ...], error: float) -> dict[str, Verdict]:
        return {
            n: Verdict(n, error, error / 2, error**2, error, 1.0, passed, (0, 0, 0), 1.0, 1.0, "a place", "" if passed else "why")
            for n in names
        }

    def one(names: tuple[str, ...], error: float, seconds: tuple[float, ...], registers: int | None) -> Any:
        timings = {"warm": Timing("warm", seconds, (1e-5,) * len(seconds)), "cold": Timing("cold", tuple(2 * s for s in seconds), (1e-5,))}
        return SimpleNamespace(
            verdicts=verdicts(names, error),
            timings=timings,
            device_bytes=int(error * 100),
            passed=passed,
            ran=None,
            kernel=SimpleNamespace(deterministic=True, source_hash=str(registers), arithmetic_for=lambda dtype: "f32"),
            loaded=SimpleNamespace(registers=registers, spill_bytes=None, shared_bytes=64),
        )

    passes = {
        "forward": one(("O", "logsumexp"), 0.25, (0.004, 0.001, 0.002), 40),
        "backward": one(("dQ", "dK", "dV"), 0.5, (0.01,) * 3, 80),
    }
    return SimpleNamespace(
        compute="fa2",
        mode=mode,
        device="cpu",
        device_name="a processor",
        problem=Problem.of(2, 4, 100, 32, heads_kv=2, causal=True),
        passes={name: p for name, p in passes.items() if mode in (name, "both")},
        passed=passed,
        seed=42,
        deterministic=False,
    )


def test_rows_of_a_result() -> None:
    """Mode both is three rows; the third has both times, the worst error and every tensor's."""
    rows = results.rows_of(result(), "case", "run")
    assert [(r.Type, r.timing) for r in rows] == [(t, timing) for t in ("FOR", "BAC", "BOT") for timing in ("warm", "cold")]
    assert [r.KernelTime_ms for r in rows[1::2]] == pytest.approx([2 * (r.KernelTime_ms or 0) for r in rows[::2]])
    forward, backward, both = rows[::2]
    problem = result().problem
    assert [r.Type for r in (forward, backward, both)] == ["FOR", "BAC", "BOT"]
    assert (forward.KernelTime_ms, backward.KernelTime_ms, both.KernelTime_ms) == pytest.approx((2, 10, 12))
    assert (forward.p20_ms, forward.p80_ms, forward.n_samples) == pytest.approx((1.4, 3.2, 3))
    rates = (problem.flops("both") / 12e-3 / 1e12, problem.bytes("backward") / 10e-3 / 1e9)
    assert (both.TFLOPS, backward.Bandwidth_GBps) == pytest.approx(rates)
    assert (forward.MaxError, both.MaxError, both.MaxError_O, both.MaxError_dK, forward.MaxError_dK) == (0.25, 0.5, 0.25, 0.5, None)
    assert (both.registers, both.spill_bytes, both.source_hash, both.seed) == (80, None, "40+80", 42)
    assert both.repro == "fa-cli run --compute fa2 --mode both --batch 2 --heads 4 --seq 100 --dim 32 --kv-heads 2 --causal"
    assert [r.Type for r in results.rows_of(result(mode="backward"), "case", "run")] == ["BAC", "BAC"]
    moved = SimpleNamespace(**vars(result()) | {"problem": problem.with_(causal_shift=7)})
    assert {r.repro for r in results.rows_of(moved, "case", "run")} == {None}  # no option sets a shift


def test_samples_of_a_row() -> None:
    """Every sample in milliseconds, those of both passes added."""
    rows = results.rows_of(result(), "case", "run")
    assert results.samples_of(result(), rows[0])["samples_ms"] == pytest.approx([4, 1, 2])
    assert results.samples_of(result(), rows[-2])["samples_ms"] == pytest.approx([14, 11, 12])
    assert results.samples_of(result(), rows[-2])["timing"] == "warm" and results.samples_of(result(), rows[-2])["Type"] == "BOT"


def test_speedup_is_over_the_fastest_torch_of_the_same_device_pass_and_timing() -> None:
    """torch-cpu does not count on a GPU, nor a warm time for a cold one."""
    times = {
        ("fa2", "cuda", "warm"): 2.0,
        ("torch-math", "cuda", "warm"): 8.0,
        ("torch-flash", "cuda", "warm"): 3.0,
        ("torch-cpu", "cpu", "warm"): 1.0,
    }
    rows = [row(Kernel=k, device=d, timing=t, KernelTime_ms=ms) for (k, d, t), ms in times.items()]
    rows.append(row(Kernel="fa2", device="cuda", timing="cold", KernelTime_ms=4.0))
    rows.append(row(Kernel="fa1", device="cuda", timing="warm", Status="FAIL"))
    found = results.with_torch(rows)
    assert [r.TorchTime_ms for r in found] == [3, 3, 3, 1, None, 3]
    assert [r.Speedup for r in found] == [1.5, 3 / 8, 1, 1, None, None]


def test_a_failed_check_has_no_speed() -> None:
    """Status FAIL, the place in the message, and neither time nor rate."""
    rows = results.rows_of(result(passed=False), "case", "run")
    assert [(r.Type, r.timing) for r in rows] == [("FOR", None), ("BAC", None), ("BOT", None)]
    for each in rows:
        assert each.Status == "FAIL" and "why at a place" in (each.ErrorMessage or "")
        assert each.KernelTime_ms is each.TFLOPS is each.Bandwidth_GBps is each.p20_ms is each.n_samples is None


def test_rows_without_a_result() -> None:
    """A refusal is a row too, on one line, for each pass."""
    backend = SimpleNamespace(name="cpu", device=lambda: SimpleNamespace(name="a processor"))
    rows = results.rows_without("case", Contender("fa1"), "both", Problem.of(), backend, "run", 42, "REFUSED", "what\nwhy")  # type: ignore[arg-type]
    assert [(r.Type, r.Status, r.ErrorMessage) for r in rows] == [(t, "REFUSED", "what why") for t in ("FOR", "BAC", "BOT")]
    assert results.new_run_id() != results.new_run_id()


# -- the environment --------------------------------------------------------------------------------------------------


def test_environment(tmp_path: Path) -> None:
    """Python, platform, versions, command and the backend's facts, as strict JSON."""
    environment.write_env(tmp_path / "env.json", environment.environment(device="cpu", driver=None))
    found = environment.read_env(tmp_path / "env.json")
    assert found == json.loads((tmp_path / "env.json").read_text())
    assert found["device"] == "cpu" and found["driver"] is None
    assert found["packages"]["numpy"] == __import__("numpy").__version__
    assert found["command"] == sys.argv
    with pytest.raises(ValueError, match="JSON"):
        files.json_bytes({"clock": float("nan")})


def test_environment_names_the_commit() -> None:
    """The commit checked out, with + where the tree differs from it; None where there is no repository."""
    commit = environment.environment()["git_commit"]
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        assert commit.rstrip("+") == head
    else:
        assert commit is None


def test_environment_imports_nothing_heavy() -> None:
    """Versions are asked for by name: CuPy and torch take seconds to import."""
    code = "import sys; from harness import environment; environment.environment(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "harness.environment" in loaded
    assert not {"cupy", "torch", "pandas", "matplotlib"} & set(loaded)
