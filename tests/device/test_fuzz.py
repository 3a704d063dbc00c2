"""verify --fuzz on the CPU engine: the day's cases on every kernel, and a planted fault that is found, shrunk and run again."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import days
import pytest
from click.testing import Result

from harness.fault import UsageFault
from harness.kernel import catalogue
from harness.verbs import verify
from harness.verbs.selftest.mutant import Mutant, mutants
from harness.verbs.verify.cases import Case

#: Cases of a day, and kernels on which each of them runs.
CASES, TAKERS = 10, 3


@pytest.mark.parametrize("number", range(CASES))
def test_the_days_cases(number: int) -> None:
    """None fails. Each case runs on a few of the kernels that take it; large scores on those that promise any, if there are some."""
    seed = int.from_bytes(days.today().encode(), "big") % (1 << 31)
    case = verify.draw(seed, number)
    takers = [chosen for chosen in catalogue() if verify.takes(chosen, case)]
    if case.input_scale > 10:
        takers = [each for each in takers if each.logits == math.inf] or takers
    chosen = random.Random(f"{seed} {number}").sample(takers, min(TAKERS, len(takers)))
    results = list(verify.fuzz(chosen, [case], verify.Backends("cpu", None, None), False, lambda result: None))
    failed = [f"{result.message}\n  {result.repro}" for result in results if not result.passed]
    assert results and not failed, "\n".join(failed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mma", "B1_H1_S1_D32_Skv98,scale=0.08838834764831845,inputs=constant_rows"),
        ("mma", "B2_H6_S1_D16_Hkv2,inputs=constant_rows,seed=2049419170"),
        ("tiled", "B1_H2_S122_D96_Hkv1,scale=0.0,inputs=constant_rows"),
        ("hopper", "B1_H1_S1_D16_bfloat16,scale=1.96609,score=73.0 * tanh(s / 73.0),inputs=constant_rows"),
        ("hopper", "B1_H1_S1_D16_bfloat16,scale=0.901562,score=32.5 * tanh(s / 32.5),inputs=constant_rows"),
    ],
)
def test_a_case_with_one_value_is_no_alarm(name: str, text: str) -> None:
    """Found on an H200 among 5,000 cases: equal columns and few queries, so the baselines' largest error is one draw. Of a softcap all scores
    have the error of the tanh at one place."""
    (result,) = verify.verify([name], device="cpu", mode="forward", case=text)
    assert result.passed, result.message


@pytest.mark.parametrize(("name", "dim"), [("hopper", 256), ("mma_qreg_async", 128)])
def test_gradients_of_nothing_are_no_alarm(name: str, dim: int) -> None:
    """A slope so steep that each row sees one key: dP - delta is 0, and dQ and dK are what rounding leaves of it. They still have their budget."""
    text = f"B1_H2_S63_D{dim}_bfloat16,causal,score=s - 100.0 * abs(q - k)"
    (result,) = verify.verify([name], device="cpu", mode="backward", case=text)
    assert result.passed, result.message


@pytest.mark.parametrize("name", ["naive", "fa2", "hopper", "hopper_keys", "wide_heads", "mma_qreg_async"])
def test_a_sink_far_above_the_scores_is_no_alarm(name: str) -> None:
    """What a kernel flushes of P, of O in delta and of 1 over the row sum is in the budget; and the sink's own P, where that is far below."""
    for text in ("sinks=88", "score=3.0 * tanh(s / 3.0),sinks=90", "sinks=-95"):
        for result in verify.verify([name], device="cpu", case=f"B1_H1_S70_D64_bfloat16,{text}"):
            assert result.passed, result.message


@pytest.mark.parametrize("name", ["naive", "hopper"])
def test_a_nan_beside_a_far_sink_is_of_its_rows_alone(name: str) -> None:
    """The least P of the other rows, by which the judge knows what a kernel may flush, is not lost in it."""
    (result,) = verify.verify([name], device="cpu", mode="forward", case="B1_H2_S70_D64_bfloat16,causal,sinks=89,inputs=nan")
    assert result.passed, result.message


def test_a_fault_is_found_shrunk_and_found_again(tmp_path: Path, fa_cli: Callable[..., Result]) -> None:
    """The causal mask off by one: two queries at most, one batch, one head. The command it prints fails in the same way."""
    fault = mutants()["causal off by one"]
    path = fault.plant(tmp_path).path
    words = ("verify", str(path), "--fuzz", 12, "--seed", 3, "--json")
    result = fa_cli(*words)
    assert result.exit_code == 1 and "fuzz with seed 3: 12 runs of kernels on 12 of 12 cases" in result.stderr
    results = verify.verify([str(path)], device="cpu", count=12, seed=3)
    failed = [each for each in results if not each.passed]
    assert failed and all(each.case.problem.causal for each in failed)
    small = failed[0].case.problem
    assert small.batch * small.heads_q == 1 and small.seq_q * small.seq_kv <= 4 and failed[0].case.inputs == "randn"
    assert "(shrunk from B" in failed[0].message
    again = fa_cli(*shlex.split(failed[0].repro)[1:])
    assert again.exit_code == 1 and failed[0].case.problem.folder in again.stdout
    assert [each.case for each in verify.verify([str(path)], device="cpu", count=12, seed=3)] == [each.case for each in results]


def test_one_case_of_a_fuzz_alone(fa_cli: Callable[..., Result]) -> None:
    """By its number; a number that is not drawn, and a text, are refused with the way to give them."""
    (result,) = verify.verify(["fa2_naive"], device="cpu", count=40, seed=3, case=str(next(n for n in range(40) if taken(n))))
    assert result.passed and taken(result.case.number)
    for case in ("40", "B1_H1_S8_D16"):
        with pytest.raises(UsageFault, match="40 cases are drawn"):
            verify.verify(["fa2_naive"], device="cpu", count=40, seed=3, case=case)
    refused = fa_cli("verify", "mma", "--case", "B1_H1_S8_D16_float64")
    assert refused.exit_code != 0 and "float64" in refused.stderr + refused.stdout


def taken(number: int) -> bool:
    """Whether fa2_naive takes a case of seed 3."""
    return verify.takes(next(chosen for chosen in catalogue() if chosen.label == "fa2_naive_forward"), verify.draw(3, number))


def test_a_nan_that_becomes_an_empty_row_is_seen(tmp_path: Path) -> None:
    """A row sum of NaN is not greater than 0: taken for a row that saw no key, its logsumexp is -inf."""
    hidden = Mutant("", "", "fa2_forward", (("sum == 0 ? -fa::infinity()", "!(sum > 0) ? -fa::infinity()"),), {"budget": []})
    cases = [case for case in verify.matrix(hidden.plant(tmp_path), "full", "cpu") if case.inputs == "nan"]
    assert {case.problem.dtype for case in cases} == {"float32", "float16", "bfloat16"}
    backend = verify.Backends("cpu", None, None).first
    for case in cases[:1]:
        result = verify.run_case(backend, hidden.plant(tmp_path), case, "full")
        assert result.wrong == {"logsumexp"}, result.message


def test_copies_are_judged_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches 8 and more read the keys of 0 and more: the first copy is right, the last is not."""
    folded = Mutant("", "", "fa2_naive_forward", (("args.K, batch, kv_head", "args.K, batch % 8, kv_head"),), {"budget": []})
    case = Case.parse("B3_H2_S65_D32,causal,copies=4")
    backend = verify.Backends("cpu", None, None).first
    assert verify.run_case(backend, folded.plant(tmp_path), case).wrong == {"O", "logsumexp"}
    right = next(chosen for chosen in catalogue() if chosen.label == "fa2_naive_forward")
    assert verify.run_case(backend, right, case).passed
    monkeypatch.setattr("harness.verbs.verify.large._free", lambda backend: 1 << 20)
    with pytest.raises(verify.NoRoom, match="was not run on .*4 times"):
        verify.verify(["fa2_naive"], device="cpu", case=case.text())
