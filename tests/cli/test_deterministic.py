"""--deterministic: a kernel that has two forms runs, is planned, checked and compiled in the one asked for, and results say which."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from harness import kernel
from harness.backends import nvrtc
from harness.check import choose
from harness.check.request import Request
from harness.fault import EnvironmentFault
from harness.kernel import Device, Kernel, planner
from harness.problem import Problem
from harness.verbs import compile as compiler
from harness.verbs import verify
from harness.verbs.selftest.mutant import edited

Run = Callable[..., Result]
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 33, "--dim", 16)
SWEEP = "shapes = [{ batch = 1, heads = 2, seq = 16, dim = 16 }]\n"
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


def write(folder: Path, form: str, wrong_in: str = "false") -> Path:
    """A good kernel under a header that says `form`, whose result is wrong where the C++ expression wrong_in holds."""
    text = (kernel.KERNELS / "05_fa2_naive_forward.cu").read_text().replace("deterministic = true", f"deterministic = {form}")
    path = folder / "mine_forward.cu"
    path.write_text(edited(text, ("float(args.scale)", f"(({wrong_in}) ? 0.0f : float(args.scale))")))
    return path


@pytest.mark.parametrize(("form", "fast", "asked"), [("true", "1", "1"), ("false", "0", None), ('"optional"', "0", "1")])
def test_the_macro_and_the_name(form: str, fast: str, asked: str | None, tmp_path: Path) -> None:
    """1 for true, 0 for false; of an optional kernel what was asked for."""
    found = Kernel.read(write(tmp_path, form))
    problem, device = Problem.of(1, 1, 16, 16), Device("cpu", "a processor")
    assert dict(planner.plan(found, problem, device).macros)["DETERMINISTIC"] == fast
    assert planner.names(found, problem, device)["deterministic"] == int(fast) == found.deterministic
    if asked is not None:
        made = kernel.find(str(found.path), "forward", True)
        assert dict(planner.plan(made, problem, device).macros)["DETERMINISTIC"] == asked and made.deterministic is True
        assert made.source_hash == found.source_hash


@needs_compiler
@pytest.mark.parametrize(("wrong_in", "codes"), [("DETERMINISTIC", (0, 1)), ("!DETERMINISTIC", (1, 0))])
def test_run_and_verify_take_the_form_asked_for(wrong_in: str, codes: tuple[int, int], fa_cli: Run, tmp_path: Path) -> None:
    """A fault that only one form has is met in that form alone, and verify without the flag meets it always."""
    path = write(tmp_path, '"optional"', wrong_in)
    path.write_text(edited(path.read_text(), ("head_dims = [64, 128]", "head_dims = [64]")))  # of one width, fewer compiles
    assert fa_cli("run", "--compute", "./mine_forward.cu", *SHAPE).exit_code == codes[0]
    result = fa_cli("run", "--compute", "./mine_forward.cu", "--deterministic", *SHAPE)
    assert result.exit_code == codes[1] and "deterministic on cpu" in result.stdout
    result = fa_cli("verify", "./mine_forward.cu", "--json")
    failed = [row for row in json.loads(result.stdout)["rows"] if not row["passed"]]
    assert result.exit_code == 1 and {row["case"]["deterministic"] for row in failed} == {wrong_in == "DETERMINISTIC"}
    result = fa_cli("verify", "./mine_forward.cu", "--deterministic", "--case", 2, "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert result.exit_code == codes[1] and row["repro"].endswith("--case 2 --device cpu --deterministic")


def test_the_matrix_has_both_forms(tmp_path: Path) -> None:
    """Each form meets every dtype and mask; a kernel with one form has the cases it had before there were forms."""
    both = Kernel.read(write(tmp_path, '"optional"'))
    cases = verify.matrix(both, "full", "cpu")
    assert {(c.deterministic, c.problem.causal) for c in cases} == {(f, m) for f in (False, True) for m in (False, True)}
    assert verify.matrix(both.made_deterministic(), "full", "cpu") == verify.matrix(kernel.find("fa2_naive", "forward"), "full", "cpu")


@needs_compiler
@pytest.mark.parametrize("how", ["flag", "sweep"])
def test_rows_say_which_form_ran(how: str, fa_cli: Run, tmp_path: Path) -> None:
    """The column deterministic, and the flag in repro where it was given, by the command or the sweep."""
    write(tmp_path, '"optional"')
    (tmp_path / "one.toml").write_text(SWEEP)
    sweep = ("experiment", "one.toml", "--compute", "./mine_forward.cu,naive", "--peers", "none", "-q", "--no-figures")
    assert fa_cli(*sweep).exit_code == 0
    if how == "flag":
        assert fa_cli(*sweep, "--deterministic").exit_code == 0
    else:
        (tmp_path / "one.toml").write_text("deterministic = true\n" + SWEEP)
        assert fa_cli(*sweep).exit_code == 0
    rows = []
    for name in ("one", "one-2"):
        with open(tmp_path / "experiment_results" / name / "results.csv") as file:
            rows += csv.DictReader(file)
    assert [(r["Kernel"], r["deterministic"], r["repro"].endswith(" --deterministic")) for r in rows] == [
        ("mine", "false", False),
        ("naive", "true", False),
        ("mine", "true", True),
        ("naive", "true", True),
    ]


@pytest.mark.parametrize("words", [("run", "--compute"), ("verify",), ("experiment", "--compute")])
def test_a_kernel_without_such_a_form_is_exit_2(words: tuple[str, ...], fa_cli: Run, tmp_path: Path) -> None:
    """Before anything is run, with what to do."""
    write(tmp_path, "false")
    result = fa_cli(*words, "./mine_forward.cu", "--deterministic")
    assert result.exit_code == 2 and "no deterministic form" in result.stderr and "hint: leave out --deterministic" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine_forward.cu"]


@needs_compiler
def test_the_tree_and_a_range_leave_it_out() -> None:
    """A kernel of the tree that has no such form, as hopper_cluster: with a note, and the others go on."""
    notes: list[str] = []
    of_ours = "B1_H1_S17_D256_bfloat16"
    for computes in ((), ("22-28",)):
        found = verify.verify(computes, mode="backward", device="cpu", case=of_ours, deterministic=True, note=notes.append)
        names = {one.kernel for one in found}
        assert "hopper" in names and "hopper_cluster" not in names
    assert notes[:3] == [f"hopper_{name}_backward has no deterministic form" for name in ("atomic", "wide", "cluster")]
    assert "22-28 without hopper_cluster: hopper_cluster_backward has no deterministic form" in notes
    both, left_out = choose.kernels(Request("22-28", "both", deterministic=True))
    assert {one.name for one in both} == {"hopper", "split", "split_hopper"} and len(left_out) == 2


def test_compile_compiles_both_forms(tmp_path: Path) -> None:
    """A row each, and an error of one form is in that row."""
    try:
        arch = nvrtc.architectures()[-1]
    except EnvironmentFault:
        pytest.skip("no NVRTC")
    path = write(tmp_path, '"optional"')
    path.write_text(path.read_text() + "static_assert(!DETERMINISTIC);\n")
    rows = compiler.compile_all([str(path)], arch=arch)
    assert [(row.deterministic, row.status) for row in rows] == [(False, "OK"), (True, "ERROR")]
