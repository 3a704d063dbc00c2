"""--mask, --score, --window and --softcap: what runs, what refuses, and what is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


@needs_compiler
def test_named_forms_and_tensors(fa_cli: Run, tmp_path: Path) -> None:
    """Files of documents and tensors; their hashes stand beside the texts, and a backward pass refuses the O of other documents."""
    np.save("slope.npy", np.array([0.5, 0.1], np.float32))
    Path("documents.txt").write_text("0 7 40\n")
    Path("other.txt").write_text("0, 8, 40\n")
    shape = ("run", *SHAPE, "--compute", "fa2,naive")
    words = ("--score", "s + slope[h] * (k - q)", "--tensor", "slope=slope.npy", "--documents", "documents.txt", "--causal")
    ran = fa_cli(*shape, "--mode", "both", *words, "--json")
    assert ran.exit_code == 0, ran.output
    problem = json.loads(ran.stdout)["rows"][0]["problem"]
    assert problem["mask"] == "doc[b, q] == doc[b, k]" and set(problem["tensors"]) == {"slope", "doc"}
    other = fa_cli(*shape, "--mode", "backward", *words[:5], "other.txt", "--causal")
    assert other.exit_code == 3 and "tensors was" in other.output
    assert fa_cli(*shape, "--mode", "both", "--prefix", 9, "--alibi").exit_code == 0
    (tmp_path / "text.npy").write_text("0 1")
    for more, code, said in (
        (("--documents", "slope.npy"), 3, "cannot be read"),
        (("--documents", "missing.txt"), 3, "is missing"),
        (("--score", "s + slope[h]", "--tensor", "slope=text.npy"), 3, "is no array"),
        (("--score", "s + slope[k]", "--tensor", "slope=slope.npy"), 2, "shape"),
        (("--window", 3, "--tensor", "slope=slope.npy"), 2, "no text names slope"),
        (("--documents", "documents.txt", "--seq", 30, "--seq-kv", 40), 2, "shape"),
        (("--documents", "documents.txt", "--seq-kv", 50), 3, "borders of 50 positions\nit ends at 40, not 50\nhint: a line is 0 … 50"),
        (("--documents", "falls.txt"), 3, "line 1 has no borders of 40 positions\n20, then 7 does not rise\n"),
        (("--documents", "word.txt"), 3, "\n'a' is not an integer of at least 0\n"),
        (("--documents", "late.txt"), 3, "\nit begins at 3, not 0\n"),
        (("--documents", "missing.txt"), 3, "hint: a line is 0 … 40, rising"),
    ):
        for name, text in ("falls", "\n0 20 7 40"), ("word", "0 a 40"), ("late", "3 40"):
            Path(f"{name}.txt").write_text(text)
        ran = fa_cli(*shape, *more)
        assert ran.exit_code == code and said in ran.output, ran.output


@needs_compiler
def test_sinks(fa_cli: Run, tmp_path: Path) -> None:
    """A file or a text; dsinks is judged and written, and a backward pass refuses the O of other sinks, in a mode of its own."""
    np.save("sinks.npy", np.array([0.5, 3.0], np.float32))
    shape = ("run", *SHAPE, "--compute", "fa2,naive")
    ran = fa_cli(*shape, "--mode", "both", "--sinks", "sinks.npy", "--window", 7, "--json")
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["rows"]
    assert [row["problem"]["sinks"] for row in rows] == ["sinks[h]"] * 2 and all(row["errors"]["dsinks"]["passed"] for row in rows)
    assert (tmp_path / "data/B1_H2_S40_D16/dsinks.bin").stat().st_size == 8
    backward = (*shape, "--mode", "backward", "--window", 7)
    assert fa_cli(*backward, "--sinks", "sinks.npy").exit_code == 0
    other = fa_cli(*backward, "--sinks", "0.5 * h")
    assert other.exit_code == 3 and "sinks was" in other.output
    for words, code, said in (
        (("--sinks", "q"), 2, "not the same for all its rows"),
        (("--sinks", "sinks[k]"), 2, "a logit of each query head"),
        (("--sinks", "missing.npy"), 3, "is missing"),
        (("--sinks", "1.0", "--compute", "mma", "--dtype", "bfloat16"), 2, "does not support sinks"),
    ):
        ran = fa_cli(*shape, *words)
        assert ran.exit_code == code and said in ran.output, ran.output


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "dtype", "passes", "most"),
    [
        ("fa2", "float32", ("forward", "backward"), 0.4),
        ("mma_qreg_async", "float16", ("forward",), 0.6),  # of 128 queries, whose Q and O are more of it
        ("hopper", "bfloat16", ("forward",), 0.4),
    ],
)
def test_tiles_that_see_nothing_are_skipped(kernel: str, dtype: str, passes: tuple[str, ...], most: float) -> None:
    """Under a window or documents a kernel touches less memory than naively masked; `watched` counts the accesses that the race check sees."""
    from harness.verbs.run import run

    rows = 384 if kernel == "fa2" else 640
    documents = np.repeat(np.arange(rows // 64, dtype=np.int32), 64)[None]
    watched = {}
    for name, words in {
        "full": {},
        "window": {"mask": "0 <= q - k <= 40"},
        "documents": {"mask": "doc[b, q] == doc[b, k]", "tensors": {"doc": documents}},
        "not sorted": {"mask": "doc[b, q] == doc[b, k]", "tensors": {"doc": documents[:, ::-1]}},
    }.items():
        problem = Problem.of(1, 1, rows, 64, dtype=dtype, **words)  # type: ignore[arg-type]
        (result,) = run(kernel, "both" if len(passes) > 1 else passes[0], problem, device="cpu", check="race")
        watched[name] = [result.passes[each].watched or 0 for each in passes]
    for name in ("window", "documents"):  # O is watched too, which is as large as ever
        assert all(some < most * whole for some, whole in zip(watched[name], watched["full"], strict=True)), watched
    assert all(some > 0.9 * whole for some, whole in zip(watched["not sorted"], watched["full"], strict=True)), watched


@needs_compiler
def test_hopper_skips_tiles_of_queries() -> None:
    """Its backward pass leaves out tiles of queries that see nothing of 128 keys, and most of one of which half of the keys are seen."""
    from harness.backends import pick
    from harness.check.contender import run_kernel
    from harness.check.oracle import oracle_for

    (kernel,) = [kernel for kernel in catalogue() if kernel.label == "hopper_backward"]
    backend, watched = pick("cpu", check="race"), dict[str, int]()
    for name, mask in {"full": None, "all": "k >= 0", "window": "0 <= q - k <= 40", "half": "q // 64 == k // 64"}.items():
        oracle = oracle_for(Problem.of(1, 1, 512, 64, dtype="bfloat16", mask=mask), backend, "backward")
        result = run_kernel(backend, kernel, oracle, oracle.inputs_of("backward"))
        assert result.passed
        watched[name] = result.watched or 0
    assert 0.9 < watched["all"] / watched["full"] < 1.1 and watched["window"] < 0.55 * watched["full"], watched
    assert watched["half"] < 0.35 * watched["full"], watched


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
        (("--window", 3, "--compute", "fa1"), "(--mask)\nits header says so\nhint: use naive or fa2: fa-cli list"),
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
    device = Device("cpu", "")
    for kernel in catalogue():
        plain = Problem.of(1, 2, 40, 16, dtype="float32" if "float32" in kernel.dtypes else "float16")
        takes = kernel.mask and kernel.score
        assert takes == (kernel.name in ("naive", "fa2", "mma_qreg_async", "hopper", "hopper_keys", "decode", "wide_heads"))
        if plain.dtype in kernel.dtypes and not kernel.windows_only:
            assert not any(name.startswith("FA_") for name, _ in planner.plan(kernel, plain, device).macros)
        if takes:
            problem = plain.with_(dtype=kernel.dtypes[-1], **stated(2, window=(5, 0), softcap=3.0))
            made = dict(planner.plan(kernel, problem, device).macros)
            assert all(" " not in made[name] for name in ("FA_MASK", "FA_SCORE", "FA_SCORE_SLOPE"))


def test_a_ring_refuses() -> None:
    """The positions of a rank's rows are not those of the text."""
    with pytest.raises(UsageFault, match="over several ranks"):
        Partition.of(Problem.of(mask="q - k < 3"), 2)


def test_cases_have_them() -> None:
    """verify's quick matrix has cases with masks and scores; the text of each makes the same case."""
    (fa2,) = [kernel for kernel in catalogue() if kernel.label == "fa2_forward"]
    cases = [case for case in matrix(fa2, "quick", "cpu") if case.problem.formulas]
    assert {tuple(case.problem.formulas) for case in cases} == {
        ("mask",),
        ("score",),
        ("mask", "score"),
        ("mask", "score", "sinks"),
        ("sinks",),
    }
    for text in [case.text() for case in cases] + ["B1_H2_S33_D16,mask=min(abs(q - k), 3) < 2,causal"]:
        assert Case.parse(text).text() == text.replace(",mask=min(abs(q - k), 3) < 2,causal", ",causal,mask=min(abs(q - k), 3) < 2")


@needs_compiler
def test_later_launches_of_masks_of_a_head(fa_cli: Run) -> None:
    """Batches and heads do not change places in later launches where the mask or score is another for them."""
    for words in (("--alibi",), ("--mask", "(q + b + 3 * h_kv) % 5 != 0")):
        for _ in range(3):
            ran = fa_cli("run", *SHAPE, "--batch", 3, "--compute", "naive", *words)
            assert ran.exit_code == 0, ran.output
