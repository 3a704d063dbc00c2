"""What verify prints of random cases: each failure as it comes, and at Ctrl-C what was done so far, with exit code 130."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import Result

import harness
from harness.verify import CaseResult, draw

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
