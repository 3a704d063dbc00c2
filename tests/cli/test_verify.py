"""What verify prints of random cases: each failure as it comes, and at Ctrl-C what was done so far, with exit code 130."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import harness
from harness.kernel import Kernel, find, planner
from harness.kernel.new import new
from harness.verbs.selftest.mutant import mutants
from harness.verbs.verify import Case, CaseResult, draw
from harness.verbs.verify.cases import matrix

RIGHT = CaseResult("naive", "forward", draw(1, 0), True, "", 0.5, "fa-cli verify naive --case A", {"O": 1e-7})
WRONG = replace(RIGHT, case=draw(1, 1), passed=False, message="O is wrong at batch 0", repro="fa-cli verify naive --case B", exit_code=1)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """verify has two results and is then interrupted; the list gets what stdout had before."""
    before: list[str] = []

    def verify(*_: Any, progress: Callable[[CaseResult], None], note: Callable[[str], None], **__: Any) -> None:
        progress(WRONG)
        progress(RIGHT)
        buffer: Any = sys.stdout.buffer  # what the runner of click keeps
        before.append(buffer.getvalue().decode())
        note("fuzz with seed 1: 2 runs")
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.verbs.verify, "verify", verify)
    return before


def test_random_cases_are_told_as_they_come(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """The failure and its command are on stdout before the next case; at Ctrl-C counts follow, and the failure is not said again."""
    result = fa_cli("verify", "naive", "--fuzz", 9, "--device", "cpu")
    assert result.exit_code == 130 and "error: interrupted" in result.stderr and "note: fuzz with seed 1: 2 runs" in result.stderr
    assert "O is wrong at batch 0" in "".join(interrupted) and WRONG.repro in "".join(interrupted)
    assert result.stdout.count(WRONG.repro) == 1 and "FAIL 1 of 2 cases failed, then interrupted" in result.stdout


def test_a_matrix_is_told_at_its_end(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """The table first, then the failures, also at Ctrl-C."""
    result = fa_cli("verify", "naive", "--device", "cpu")
    assert result.exit_code == 130 and "".join(interrupted) == ""
    assert result.stdout.index("verdict") < result.stdout.index("O is wrong at batch 0") < result.stdout.index(WRONG.repro)


def test_a_failing_case_is_named_as_case_takes_it(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """The name in the failure's line, pasted after --case, is the same case."""
    words = fa_cli("verify", "naive", "--device", "cpu").stdout
    name = shlex.split(words[words.index(f"case {WRONG.case.number}, ") :].splitlines()[0])[2].removesuffix(":")
    assert replace(Case.parse(name), number=WRONG.case.number) == WRONG.case


def test_json_at_ctrl_c_is_one_document(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """With the rows so far; an interrupted run has not passed."""
    result = fa_cli("verify", "naive", "--fuzz", 9, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 130 and found["passed"] is False and [row["passed"] for row in found["rows"]] == [False, True]


def test_what_a_kernel_cannot_be_given_is_no_failure(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """One that is told no head_dim, and is right, is judged at the widths that it lists; a case of another is refused, as run refuses it."""
    path = new("mine", folder=tmp_path, plain=True)
    text = (
        path.read_text()
        .replace(', "head_dim", ', ", ")
        .replace("int head_dim, int causal_shift", "int causal_shift")
        .replace("[32, 64, 96, 128]", "[64]")
    )
    path.write_text(text.replace("constexpr int COLUMNS", "constexpr int head_dim = HEAD_DIM;\nconstexpr int COLUMNS", 1))
    cases = matrix(Kernel.read(path), "quick", "cpu")
    assert {each.problem.head_dim for each in cases} == {64}
    done = fa_cli("verify", path, "--device", "cpu", "--json")
    assert done.exit_code == 0 and len(json.loads(done.stdout)["rows"]) == len(cases), done.output
    done = fa_cli("verify", path, "--device", "cpu", "--fuzz", 5)
    assert done.exit_code == 0 and "PASS 5 of 5" in done.stdout, done.output
    done = fa_cli("verify", path, "--device", "cpu", "--case", "B1_H1_S5_D40")
    assert done.exit_code == 2 and "does not take head dim 40" in done.output and "PASS" not in done.stdout


def test_cases_on_few_multiprocessors() -> None:
    """A case's number of multiprocessors reaches the plan: hopper launches three blocks for each, of which some take several works."""
    backends = harness.verbs.verify.Backends("cpu", None, None)
    chosen = find("hopper", "forward")
    case = Case.parse("B1_H5_S65_D64_bfloat16,sms=2")
    few, all_ = (backends.of(each).device() for each in (case, replace(case, sms=None)))
    assert (few.sms, all_.sms) == (2, 132) and backends.of(case) is backends.of(case)
    assert [planner.plan(chosen, case.problem, device).launches[0].grid[0] for device in (few, all_)] == [6, 10]
    checked = backends.of(replace(case, check="race"))
    assert (checked.check, checked.device().sms) == ("race", 2)  # type: ignore[attr-defined]


def test_a_case_that_its_race_check_cannot_keep_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out with a note; what the check finds is a failure. All other cases of the kernel are judged, and choices counted."""
    real = harness.verbs.verify.verify.__wrapped__.__globals__["run_case"]

    def refused(backend: Any, chosen: Any, case: Case, *words: Any, **more: Any) -> CaseResult:
        done = real(backend, chosen, case, *words, **more)
        return replace(done, passed=False, message="it keeps 1024 clocks", exit_code=2) if case.check else done

    cases = [case for case in harness.verbs.verify.matrix(find("fa2_naive", "forward"), "quick", "cpu") if case.number < 1 or case.check]
    monkeypatch.setitem(harness.verbs.verify.verify.__wrapped__.__globals__, "matrix", lambda *_: cases)
    monkeypatch.setitem(harness.verbs.verify.verify.__wrapped__.__globals__, "run_case", refused)
    notes: list[str] = []
    results = harness.verbs.verify.verify(["fa2_naive"], device="cpu", mode="forward", note=notes.append)
    assert [result.passed for result in results] == [True]
    assert re.match(r"the \d+ cases cover ", notes[0]) and ", not fa2_naive_forward " in notes[0]
    assert notes[1] == "not checked for races: it keeps 1024 clocks"


def test_run_on_few_multiprocessors(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """--sms: what is wrong only where a block takes a second work passes without it, and fails with it. It is no option of a peer."""
    path = mutants()["a work lost behind the first of each block"].plant(tmp_path).path
    words = ("run", path, "--batch", 1, "--heads", 8, "--seq", 65, "--dtype", "bfloat16", "--device", "cpu", "--output-dir", tmp_path)
    assert fa_cli(*words).exit_code == 0
    failed = fa_cli(*words, "--sms", 2)
    assert failed.exit_code == 1 and "O is wrong at batch 0, head 3" in failed.stdout
    assert "--sms has no effect on numpy" in fa_cli("run", "numpy", "--sms", 2, "--device", "cpu", "--output-dir", tmp_path).stderr


@pytest.mark.parametrize("options", [("--matrix", "full"), ("--repeat", 3)])
def test_random_cases_refuse_what_is_a_matrixs(options: tuple[Any, ...], fa_cli: Callable[..., Result]) -> None:
    """--fuzz beside an option that would change nothing is a usage error, not a PASS of something else."""
    result = fa_cli("verify", "naive", "--fuzz", 2, *options, "--device", "cpu")
    assert result.exit_code == 2 and f"--fuzz 2 beside {' '.join(map(str, options))}" in result.stderr and "hint:" in result.stderr
    assert not result.stdout


def test_a_seed_without_random_cases_is_told(fa_cli: Callable[..., Result]) -> None:
    """It changes nothing."""
    for words, told in ((("--seed", 3), True), ((), False)):
        result = fa_cli("verify", "naive", "--mode", "forward", "--case", "B1_H1_S8_D8", "--device", "cpu", *words)
        assert result.exit_code == 0 and ("note: --seed 3 draws the cases of --fuzz" in result.stderr) is told
