"""One folder a run, one run a folder: what a second run, another sweep and another device find; what report and compare say."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from harness.row import read_rows

Run = Callable[..., Result]
SWEEP = 'title = "a test"\nkernels = ["naive"]\npeers = ["numpy"]\nshapes = [{ batch = 1, heads = 1, seq = [8, 12], dim = 8 }]\n'
WORDS = ("experiment", "s.toml", "-q")
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


@pytest.fixture
def results(fa_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """experiment_results with one run of the sweep s; figures are not drawn."""
    monkeypatch.setattr("harness.report.compose.draw", lambda *given, **more: [])
    (tmp_path / "s.toml").write_text(SWEEP)
    assert fa_cli(*WORDS).exit_code == 0
    return tmp_path / "experiment_results"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_sweeps_and_two_runs_do_not_meet(fa_cli: Run, results: Path, tmp_path: Path) -> None:
    """Each in a folder of its own; --resume goes on with the last one; env.json says whose run it is."""
    first = contents(results)
    (tmp_path / "t.toml").write_text(SWEEP.replace("[8, 12]", "9"))
    for words, folder in ((("experiment", "t.toml", "-q"), "t"), (WORDS, "s-2"), ((*WORDS, "--only", "S8"), "s-3")):
        found = fa_cli(*words)
        assert found.exit_code == 0 and (results / folder / "results.csv").is_file(), found.stderr
        assert json.loads((results / folder / "env.json").read_text())["sweep"] == folder[0]
    assert {name: data for name, data in contents(results).items() if name.startswith("s/")} == first
    resumed = fa_cli(*WORDS, "--resume")
    assert resumed.exit_code == 0 and "note: --resume: this is the last run of s, experiment_results/s-3\n" in resumed.stderr
    assert len(read_rows(results / "s-3" / "results.csv")) == 4 and not (results / "s-4").exists()


def test_another_sweep_or_device_in_the_folder_is_refused(fa_cli: Run, results: Path, tmp_path: Path) -> None:
    """Exit code 2 with what to do, new or resumed, and nothing is changed."""
    shutil.copytree(results / "s", results / "t")
    (tmp_path / "t.toml").write_text(SWEEP)
    table = tmp_path / "other" / "s" / "results.csv"
    shutil.copytree(results / "s", table.parent)
    table.write_text(table.read_text().replace(str(read_rows(table)[0].device_name), "Another CPU"))
    for folder, words, what in (
        (results, ("experiment", "t.toml"), "holds another sweep, s"),
        (table.parent.parent, (*WORDS, "--output-dir", "other"), "holds a run of another device"),
    ):
        before = contents(folder)
        for more in ((), ("--resume",)):
            found = fa_cli(*words, *more)
            assert found.exit_code == 2 and what in found.stderr and "hint: use --output-dir " in found.stderr, found.output
        assert contents(folder) == before


def test_a_run_of_record_is_not_resumed_on_another_device(
    fa_cli: Run, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed rows of a GPU and those of this CPU would be one run. Exit code 2, also of a dry run, and nothing is changed."""
    monkeypatch.setattr("harness.verbs.runs.SWEEPS", results)
    monkeypatch.setattr("harness.verbs.runs.ROOT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    table = results / "s" / "results.csv"
    whole = table.read_text()
    table.write_text(whole.replace(str(read_rows(table)[0].device_name), "Another CPU"))
    before = contents(results)
    for more in ((), ("--dry-run",)):
        found = fa_cli(*WORDS, "--record", "--resume", *more)
        assert found.exit_code == 2 and "holds a run of another device" in found.stderr and "hint: leave out --record" in found.stderr
    assert contents(results) == before
    table.write_text("".join(whole.splitlines(keepends=True)[:3]))
    assert fa_cli(*WORDS, "--record", "--resume").exit_code == 0 and len(read_rows(table)) == 4


def test_report_writes_nothing_into_what_it_reads(fa_cli: Run, results: Path, tmp_path: Path) -> None:
    """With --output-dir; a folder of runs is no run, and the hint names them."""
    before = contents(results)
    found = fa_cli("report", results / "s", "--output-dir", "figures")
    assert found.exit_code == 0 and contents(results) == before
    assert (tmp_path / "figures" / "s_summary.md").read_text().startswith("# a test\n")
    for words in (("report", "experiment_results"), ("compare", "experiment_results", "experiment_results/s")):
        found = fa_cli(*words)
        assert found.exit_code == 3 and "hint: give one of them: experiment_results/s" in found.stderr


def test_what_did_not_pass_is_not_counted_as_passed(fa_cli: Run, results: Path, tmp_path: Path) -> None:
    """REFUSED and ABSENT are told apart from PASS; no row at all that passed is no PASS."""
    (tmp_path / "r.toml").write_text('kernels = ["fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = 8, dim = [16, 200] }]')
    assert "PASS 1 of 2 rows passed, 1 REFUSED\n" in fa_cli("experiment", "r.toml", "-q").stdout
    found = fa_cli("experiment", "r.toml", "-q", "--only", "200")
    assert (found.exit_code, found.stdout) == (0, "NONE 0 of 1 rows passed, 1 REFUSED\n")


def test_a_sweep_beside_seqlen_is_a_mistake(fa_cli: Run, tmp_path: Path) -> None:
    """One of the two would be ignored; a pass's name is what --mode takes."""
    found = fa_cli("experiment", "--seqlen", "forward")
    assert found.exit_code == 2 and "hint: fa-cli experiment --seqlen --mode forward, or fa-cli experiment forward" in found.stderr
    assert fa_cli("experiment", "--seqlen", "seqlen", "--dry-run").exit_code == 0 and not list(tmp_path.iterdir())


def test_samples_that_are_asked_for(fa_cli: Run, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--samples N: N of each row at least. compare of few is UNSURE, and says the command that takes more."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/fa-cli", *WORDS, "--resume", "--samples", "3"])  # env.json has it
    assert fa_cli(*WORDS).exit_code == 0
    found = fa_cli("compare", results / "s", results / "s-2")
    assert "UNSURE; with more samples of both runs they may tell: fa-cli experiment s.toml -q --samples 50\n" in found.stderr, found.stderr
    assert fa_cli(*WORDS, "--samples", 31).exit_code == 0
    assert all((row.n_samples or 0) >= 31 for row in read_rows(results / "s-3" / "results.csv"))
    assert fa_cli(*WORDS, "--compute", "naive", "--peers", "none", "--min-time", 0.02).exit_code == 0
    lines = [json.loads(line) for line in (results / "s-4" / "samples.jsonl").read_text().splitlines()]
    assert lines and all(sum(line["samples_ms"]) >= 20 for line in lines)


def test_a_sweep_may_have_a_byte_order_mark(fa_cli: Run, tmp_path: Path) -> None:
    """Some editors write one."""
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbfshapes = [{ batch = 1, heads = 1, seq = [16, 33], dim = 8 }]\n")
    result = fa_cli("experiment", "bom.toml", "--dry-run")
    assert result.exit_code == 0 and "2 shapes" in result.output, result.output
