"""experiments/trust/budgets.csv: the budgets of 20 cases, computed again and compared digit for digit."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest

from harness.problem import WRITES
from harness.verbs.verify.cases import Case

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "trust" / "budgets.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("budgets_record", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_budget_is_as_recorded(script: ModuleType) -> None:
    """Whatever the machine. A budget that is meant to change is written again: python experiments/trust/budgets.py --write."""
    assert script.table().splitlines() == script.RECORD.read_text(encoding="utf-8").splitlines()


def test_the_record_holds_every_class_and_tensor(script: ModuleType) -> None:
    """20 cases with masks, groups, other lengths, scales and families of inputs. No baseline is beyond its own budget."""
    rows = list(csv.DictReader(io.StringIO(script.RECORD.read_text(encoding="utf-8"))))
    problems = [Case.parse(text).problem for text in script.CASES]
    assert len(set(script.CASES)) == 20 and {row["case"] for row in rows} == set(script.CASES)
    assert (
        {p.causal for p in problems}
        == {p.heads_q > p.heads_kv for p in problems}
        == {p.seq_q == p.seq_kv for p in problems}
        == {True, False}
    )
    tensors = {name for names in WRITES.values() for name in names}
    for dtype, classes in (("float32", "f32 tf32"), ("float16", "f32 p16"), ("bfloat16", "f32 p16"), ("float64", "f64")):
        cases = {text for text in script.CASES if Case.parse(text).problem.dtype == dtype}
        found = {(row["arithmetic"], row["tensor"]) for row in rows if row["case"] in cases}
        assert cases and found == {(name, tensor) for name in classes.split() for tensor in tensors}
    assert all(0 <= float(row["baseline"]) <= float(row["budget"]) for row in rows)
