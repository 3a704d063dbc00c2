"""`fa-cli selftest`: the checks catch what is planted, and what they do not catch is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable

import pytest
from click.testing import Result

from harness.verbs.selftest import trial
from harness.verbs.selftest.mutant import Mutant, mutants

Run = Callable[..., Result]
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


@needs_compiler
def test_the_quick_one_catches_all(fa_cli: Run) -> None:
    """Each kind of fault before each check, and right kernels before the same checks."""
    result = fa_cli("selftest", "--quick", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    checks = {row["check"] for row in found["rows"]}
    assert found["passed"] and checks == set(trial.CHECKS["cpu"]), checks
    assert any(row["control"] for row in found["rows"]) and all(row["caught"] for row in found["rows"])


@needs_compiler
def test_a_survivor_fails_it(fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is none, and a check that finds something else than it should."""
    real = mutants()["last key dropped"]
    harmless = dataclasses.replace(real, name="harmless", edits=((";  // of this tile", " + 0;  // of this tile"),))
    other = dataclasses.replace(real, name="other", found_by={"budget": ["O"]})
    found: dict[str, Mutant] = {"harmless": harmless, "other": other}
    monkeypatch.setattr(trial, "mutants", lambda: found)
    result = fa_cli("selftest", "--device", "cpu")
    assert result.exit_code == 1
    assert "with 'harmless' survives budget: it found nothing" in result.stdout
    assert "with 'other' survives budget: O is wrong at" in result.stdout and "FAIL 0 of 2 faults caught" in result.stdout


def test_a_name_that_no_fault_has(fa_cli: Run) -> None:
    """Exit code 2 and how to see the names."""
    result = fa_cli("selftest", "--only", "nothing like it", "--device", "cpu")
    assert result.exit_code == 2 and "no fault to plant" in result.stderr


def test_there_are_enough_of_each_kind() -> None:
    """Sixty wrong kernels at least, of every kind that faults.toml names."""
    kinds = [mutant.kind for mutant in mutants().values()]
    assert set(kinds) == {"numeric", "masking", "grouping", "layout", "memory", "synchronisation", "cheat"} and len(kinds) >= 60
