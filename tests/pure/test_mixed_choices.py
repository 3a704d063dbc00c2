"""experiments/mixed/choices.py: the forms of the tree on a problem, the chosen one among them; its table, with times made up."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.kernel import Device
from harness.problem import PASSES, Problem
from harness.verbs import run, sweep

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "mixed" / "choices.py"
H200 = Device("cuda", "NVIDIA H200", "sm_90")


@pytest.fixture(scope="module")
def choices() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("mixed_choices", SCRIPT)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


#: Problems of one draw. The forms of one take a second.
DRAWN = [problem for _, problem in sweep.load("mixed", 5, 36).shapes]


@pytest.mark.days(14)
@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_the_chosen_form_is_one_of_them(number: int, choices: ModuleType) -> None:
    """On every problem that is drawn; each form is a kernel of that pass with tile values of its own, none rounds float32 to tf32."""
    problem = DRAWN[number]
    for pass_ in PASSES:
        every = choices.forms(pass_, problem, H200)
        assert choices.chosen(pass_, problem, H200) in every
        for words, form in every.items():
            kernel = form.kernels[pass_]
            assert kernel.pass_ == pass_ and words.split()[0] == kernel.name and set(form.tiles) == set(kernel.tile)
            assert all(f" {name}={value}" in words for name, value in form.tiles.items())
            assert problem.dtype in kernel.dtypes and not kernel.variants


def test_forms_have_the_values_of_the_header(choices: ModuleType) -> None:
    """hopper's forward pass: one consumer where blocks share a multiprocessor, three, and the section of every row of choice, each with
    each."""
    problem = Problem.of(5, 20, 499, 64, dtype="bfloat16", causal=True)
    tiles = [form.tiles for form in choices.forms("forward", problem, H200).values() if form.kernels["forward"].name == "hopper"]
    found = {(each["BLOCKS"], each["CONSUMERS"], each["SECTION"]) for each in tiles}
    assert found == {(*form, section) for form in ((1, 3), (2, 1), (2, 3), (3, 1), (3, 3)) for section in (16, 25, 32, 64)}


def test_the_table(choices: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a problem: the time of the fastest form over that of the chosen one. What fails its check has no time."""
    places: dict[str, int] = {}

    def checked(form: Any, mode: str, *_: Any) -> Any:
        place = places.setdefault(form.name, len(places))
        return SimpleNamespace(compute=form.name, passed=place != 1, time_ms={mode: None if place == 1 else 10.0 + place})

    monkeypatch.setattr(run, "check_in_memory", checked)
    monkeypatch.setattr(run, "time_together", lambda good, *_: good)
    monkeypatch.setattr(choices, "oracle_for", lambda *_: None)
    first = list(choices.forms("forward", sweep.load("mixed", 16, 1).cpu_shapes[0][1], Device("cpu", "a")))
    monkeypatch.setattr(choices, "chosen", lambda *_: first[2])
    assert choices.main(["--seed", "16", "--cases", "1", "--mode", "forward", "--device", "cpu", "--output", str(tmp_path / "c.csv")]) == 0
    with open(tmp_path / "c.csv", newline="") as file:
        (found,) = csv.DictReader(file)
    assert (found["chosen"], found["best"], found["forms"]) == (first[2], first[0], str(len(first) - 1))
    assert float(found["ratio"]) == pytest.approx(10 / 12)
    printed = capsys.readouterr()
    assert "0 of 1 choices are within 2 %" in printed.out and "0.833" in printed.out and f"{first[1]} FAILS" in printed.err
