"""What verify prints of random cases: each failure as it comes, and at Ctrl-C what was done so far, with exit code 130."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import harness
from harness.kernel import Kernel
from harness.kernel.new import new
from harness.verify import CaseResult, draw
from harness.verify.cases import matrix

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

    monkeypatch.setattr(harness.verify, "verify", verify)
    return before


def test_random_cases_are_told_as_they_come(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """The failure and its command are on stdout before the next case; at Ctrl-C counts follow, and the failure is not said again."""
    result = fa_cli("verify", "naive", "--fuzz", 9, "--device", "cpu")
    assert result.exit_code == 130 and "error: interrupted" in result.stderr and "note: fuzz with seed 1: 2 runs" in result.stderr
    assert "O is wrong at batch 0" in "".join(interrupted) and WRONG.repro in "".join(interrupted)
    assert result.stdout.count(WRONG.repro) == 1 and "FAIL 1 of 2 cases passed, then interrupted" in result.stdout


def test_a_matrix_is_told_at_its_end(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """The table first, then the failures, also at Ctrl-C."""
    result = fa_cli("verify", "naive", "--device", "cpu")
    assert result.exit_code == 130 and "".join(interrupted) == ""
    assert result.stdout.index("verdict") < result.stdout.index("O is wrong at batch 0") < result.stdout.index(WRONG.repro)


def test_json_at_ctrl_c_is_one_document(interrupted: list[str], fa_cli: Callable[..., Result]) -> None:
    """With the rows so far; an interrupted run has not passed."""
    result = fa_cli("verify", "naive", "--fuzz", 9, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 130 and found["passed"] is False and [row["passed"] for row in found["rows"]] == [False, True]


def test_what_a_kernel_cannot_be_given_is_no_failure(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """One that is told no head_dim, and is right: cases of other widths are left out, and it is said how many; one of them alone is
    refused, as run refuses it."""
    path = new("mine", folder=tmp_path, plain=True)
    text = (
        path.read_text()
        .replace(', "head_dim", ', ", ")
        .replace("int head_dim, int causal_shift", "int causal_shift")
        .replace("[32, 64, 96, 128]", "[64]")
    )
    path.write_text(text.replace("constexpr int COLUMNS", "constexpr int head_dim = HEAD_DIM;\nconstexpr int COLUMNS", 1))
    cases = [(each.number, each.problem.head_dim) for each in matrix(Kernel.read(path), "quick", "cpu")]
    taken = [number for number, dim in cases if dim == 64]
    other = next(number for number, dim in cases if dim != 64)
    done = fa_cli("verify", path, "--device", "cpu", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert [row["case"]["number"] for row in found["rows"]] == taken and 0 < len(taken) < len(cases)
    why = f"mine_forward: {len(cases) - len(taken)} of {len(cases)} cases left out, which it cannot be given: its args name no head_dim"
    assert why in " ".join(done.stderr.split())
    done = fa_cli("verify", path, "--device", "cpu", "--case", other)
    assert done.exit_code == 2 and f"does not take head dim {dict(cases)[other]}" in done.stderr and "PASS" not in done.stdout
