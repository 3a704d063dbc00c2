"""--mask, --score, --window and --softcap: what runs, what refuses, and what is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from harness.fault import UsageFault
from harness.formula import stated
from harness.kernel import Device, catalogue, planner
from harness.partition import Partition
from harness.problem import Problem
from harness.verbs.verify.cases import Case, matrix

Run = Callable[..., Result]
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 40, "--dim", 16, "--device", "cpu")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


@needs_compiler
def test_run_records_them(fa_cli: Run, tmp_path: Path) -> None:
    """JSON and outputs.json have the texts; a backward pass refuses the O of another mask, and takes that of its own."""
    words = ("--compute", "naive", "--window", "5,2", "--mask", "k != 7", "--softcap", 3)
    ran = fa_cli("run", *SHAPE, *words, "--json")
    assert ran.exit_code == 0, ran.output
    problem = json.loads(ran.stdout)["problem"]
    assert (problem["mask"], problem["score"]) == ("k != 7 and -2 <= q - k <= 5", "3.0 * tanh(s / 3.0)")
    record = json.loads((tmp_path / "data/B1_H2_S40_D16/outputs.json").read_text())
    assert (record["mask"], record["score"]) == (problem["mask"], problem["score"])
    backward = (*SHAPE, "--compute", "naive", "--mode", "backward")
    other = fa_cli("run", *backward, "--window", "5,2")
    assert other.exit_code == 3 and "mask was" in other.output
    assert fa_cli("run", *backward, *words[2:]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mask", "q - x < 3"), "column 5"),
        (("--window", 3, "--mask", "q - x < 3"), "column 5"),
        (("--mask", "q < slope[h]"), "no values for slope"),
        (("--window", "x"), "is not L or L,R"),
        (("--softcap", 0), "above 0"),
        (("--softcap", 3, "--score", "s"), "which comes first"),
        (("--softcap", 3, "--alibi"), "which comes first"),
        (("--prefix", 3, "--causal"), "together"),
        (("--tensor", "slope"), "NAME=FILE.npy"),
        (("--window", 3, "--compute", "mma"), "does not support a mask"),
        (("--softcap", 3, "--compute", "mma"), "does not support a score"),
        (("--window", 3, "--compute", "numpy"), "given no mask"),
    ],
)
def test_refusals(words: tuple[object, ...], said: str, fa_cli: Run, tmp_path: Path) -> None:
    """Exit 2, before anything is written."""
    ran = fa_cli("run", *SHAPE, *words)
    assert ran.exit_code == 2 and said in ran.output, ran.output
    assert not (tmp_path / "data").exists()


def test_plans() -> None:
    """A plain problem's compile knows nothing of masks; one with a mask has the C++ of it, without spaces."""
    device, plain = Device("cpu", ""), Problem.of(1, 2, 40, 16)
    for kernel in catalogue():
        takes = kernel.mask and kernel.score
        assert takes == (kernel.name in ("naive", "fa2"))
        if kernel.dtypes[0] == "float32":
            assert not any(name.startswith("FA_") for name, _ in planner.plan(kernel, plain, device).macros)
        if takes:
            made = dict(planner.plan(kernel, plain.with_(**stated(2, window=(5, 0), softcap=3.0)), device).macros)
            assert all(" " not in made[name] for name in ("FA_MASK", "FA_SCORE", "FA_SCORE_SLOPE"))


def test_a_ring_refuses() -> None:
    """The positions of a rank's rows are not those of the text."""
    with pytest.raises(UsageFault, match="over several ranks"):
        Partition.of(Problem.of(mask="q - k < 3"), 2)


def test_cases_have_them() -> None:
    """verify's quick matrix has cases with masks and scores; the text of each makes the same case."""
    (fa2,) = [kernel for kernel in catalogue() if kernel.label == "fa2_forward"]
    cases = [case for case in matrix(fa2, "quick", "cpu") if case.problem.formulas]
    assert {tuple(case.problem.formulas) for case in cases} == {("mask",), ("score",), ("mask", "score")}
    for text in [case.text() for case in cases] + ["B1_H2_S33_D16,mask=min(abs(q - k), 3) < 2,causal"]:
        assert Case.parse(text).text() == text.replace(",mask=min(abs(q - k), 3) < 2,causal", ",causal,mask=min(abs(q - k), 3) < 2")
