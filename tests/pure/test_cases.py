"""The cases of verify as such: their text, what a fuzz draws, the families of inputs, and how a failing case shrinks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import planted as plain
import pytest

from harness.dataset.storage import widen
from harness.fault import UsageFault
from harness.kernel import Kernel, catalogue, find
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.verify.cases import Case
from harness.verbs.verify.choices import known, made, missing
from harness.verbs.verify.fuzz import WORK, assigned, draw, fitted, takes, widened
from harness.verbs.verify.inputs import DRAWN as FUZZED
from harness.verbs.verify.inputs import FAMILIES, FINITE, inputs
from harness.verbs.verify.judge import CaseResult, Lost
from harness.verbs.verify.shrink import shrink

DRAWN = [verify.draw(5, number) for number in range(600)]


def test_a_text_is_a_case() -> None:
    """Every case of a fuzz and of the matrices is made again from its text, to the last bit of its scale."""
    cases = DRAWN + verify.matrix(find("naive", "backward"), "full", "cuda")
    for which in ("full", "quick"):  # made already where test_matrix.py and what is below are run
        cases += [case for chosen in catalogue() for case in verify.matrix(chosen, which, "cpu")]
    assert {case.sms for case in cases} == {None, 2, 3} and {case.check for case in cases} == {None, "race"}
    for case in cases:
        if case.problem.is_float8 and not case.problem.descales:
            continue  # drawn descales have no text
        assert Case.parse(case.text()) == replace(case, number=0), case.text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.5",
        "B1_H1_S8",
        "B1_H1_S8_D16,inputs=nosuch",
        "B1_H1_S8_D16,what=3",
        "B1_H1_S8_D16,shift=",
        "B1_H1_S8_D16,shift=x",
        "B1_H1_S8_D16,causal=1",
        "B1_H1_S8_D16,copies=0",
        "B1_H1_S8_D16,schedule=-1",
        "B1_H1_S8_D16,sms=0",
        "B1_H1_S8_D16,check=asan",
    ],
)
def test_what_is_no_case_is_refused(text: str) -> None:
    """With what a case is."""
    with pytest.raises(UsageFault, match="is no case"):
        Case.parse(text)


def test_a_draw_depends_on_seed_and_number_only() -> None:
    """So one case can be drawn alone."""
    assert verify.draw(5, 77) == DRAWN[77]
    assert verify.draw(6, 77) != DRAWN[77]
    assert len({case.text() for case in DRAWN}) == len(DRAWN)


def test_a_fuzz_draws_what_the_matrix_rounds_off() -> None:
    """All families and types, shifts, scales of 0 and below, long rows, many batches, dims that no list has; none takes a CPU long."""
    problems = [case.problem for case in DRAWN]
    assert {case.inputs for case in DRAWN} == set(FUZZED)
    assert {p.dtype for p in problems} == {"float32", "float16", "bfloat16", "float64"}
    assert {p.scale > 0 for p in problems} == {True, False} and any(p.scale == 0 for p in problems)
    assert len({p.causal_shift - p.default_shift for p in problems if p.causal}) > 50
    assert {62, 63, 1} <= {p.causal_shift % 64 for p in problems if p.causal}
    assert len({p.head_dim for p in problems}) > 100
    assert max(p.seq_kv for p in problems) > 1024 and max(p.batch for p in problems) == 17
    assert {p.heads_q // p.heads_kv for p in problems} >= {1, 2, 3, 8}
    assert len({case.schedule for case in DRAWN}) > 200
    for p in problems:
        assert p.batch * p.heads_q * p.seq_q * p.seq_kv * p.head_dim <= 2 * WORK


def test_each_kernel_is_judged_in_each_of_its_types() -> None:
    """A header that takes a type is met in it, causal and not. 8 bits are not drawn: a seed draws what it has always drawn."""
    for chosen in catalogue():
        if chosen.dtypes == ("float8_e4m3",) or chosen.windows_only:
            continue
        met = {(case.problem.dtype, case.problem.causal) for case in DRAWN if verify.takes(chosen, case)}
        assert met == {("float32" if d == "tf32" else d, causal) for d in chosen.dtypes for causal in (False, True)}, chosen.label


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_families(dtype: str) -> None:
    """Each is what its name says, the same every time, and finite where it is said to be."""
    problem = Problem.of(2, 4, 33, 24, 2, 47, dtype)
    plain = inputs(problem, 3, ("Q", "K", "V", "dO"))
    found = {}
    for family in FAMILIES:
        if (dtype, family) == ("float16", "vast_v"):
            continue
        tensors = inputs(problem, 3, ("Q", "K", "V", "dO"), family)
        found[family] = {name: widen(np, array, dtype) for name, array in tensors.items()}
        again = inputs(problem, 3, ("Q", "K", "V", "dO"), family)
        assert all(np.array_equal(tensors[name].view(np.uint8), again[name].view(np.uint8)) for name in tensors)
        assert all(np.isfinite(array).all() for array in found[family].values()) == (family in FINITE)
        assert (family == "randn") == all(np.array_equal(tensors[name].view(np.uint8), plain[name].view(np.uint8)) for name in tensors)
    assert ((found["one_hot"]["Q"] != 0).sum(-1) <= 1).all() and found["one_hot"]["K"].any()
    assert (found["equal_keys"]["K"] == found["equal_keys"]["K"][:, :, :1]).all()
    assert all((array == array[..., :1]).all() for array in found["constant_rows"].values())
    assert not found["zero_queries"]["Q"].any() and np.signbit(found["zero_queries"]["Q"]).any()
    assert (np.abs(found["one_key"]["K"]).max((1, 3)).argmax(-1) == np.abs(found["one_key"]["K"]).max((0, 1, 3)).argmax()).all()
    assert np.abs(found["large_v"]["V"]).max() > (8000 if dtype == "float16" else 60000)
    least = {"float16": 2.0**-14, "float64": 2.0**-1022}.get(dtype, 2.0**-126)
    sizes = np.abs(found["subnormal"]["K"])
    assert 0.15 < (sizes < least).mean() < 0.35 and ((sizes > 0) & (sizes < least)).any()
    assert np.isnan(found["nan"]["K"]).sum() == np.isinf(found["inf"]["K"]).sum() == problem.batch

    ends = {name: np.abs(found[name]["V"]).max() for name in ("vast_v", "tiny_v", "randn") if name in found}
    assert ends["tiny_v"] < 1e-2 * ends["randn"] and ends.get("vast_v", 1e25) > 1e24
    assert np.abs(found["jump"]["K"][:, :, :-47]).size == 0 and (np.abs(found["jump"]["K"]) > 15).any()  # 47 keys are one tile
    rows = {name: ~array.any(-1) for name, array in found["zero_rows"].items()}
    assert rows["Q"][:, :, ::3].all() and rows["K"][:, :, 1::3].all() and rows["Q"].mean() < 0.4
    assert np.array_equal(found["q_is_k"]["K"][:, :, :33], found["q_is_k"]["Q"][:, ::2])
    assert (found["ones_do"]["dO"] == 1).all()


@pytest.mark.parametrize("chosen", [k for k in catalogue() if not k.windows_only], ids=lambda k: k.label)
def test_the_quick_matrix_meets_by_name_what_was_missed(chosen: Kernel) -> None:
    """Works above multiprocessors, wide heads, mask borders off a tile, scales of 0 and below, many batches and heads, all families."""
    cases = verify.matrix(chosen, "quick", "cpu")
    problems = [case.problem for case in cases]
    persistent = any("sms" in str(launch.grid) for launch in chosen.launches)
    assert not persistent or {case.sms for case in cases} == {None, 2, 3}
    widest = chosen.head_dims[-1]
    assert {192, 256} <= {p.head_dim for p in problems} or widest < 256
    borders = {(p.seq_q, p.seq_kv, p.causal, case.deterministic) for p, case in zip(problems, cases, strict=True)}
    masks, forms = (False, True), chosen.forms if len(chosen.forms) > 1 else (False,)
    for (queries, keys), causal, form in itertools.product(((64, 126), (64, 190), (128, 129), (113, 203)), masks, forms):
        assert (queries, keys, causal, form) in borders
    factors = {p.scale / p.head_dim**-0.5 for p in problems}
    assert 0 in factors and min(factors) < 0
    assert {3, 5} <= {p.batch for p in problems} and {17, 36} <= {p.heads_q for p in problems}
    assert {3, 7} <= {p.heads_q // p.heads_kv for p in problems}
    assert any(p.seq_kv > 2048 and p.seq_q < 65 for p in problems)
    assert chosen.pass_ == "forward" or any(p.seq_q > 2048 and p.seq_kv < 65 and not p.causal for p in problems)
    last = "positive_v" if chosen.dtypes == ("float8_e4m3",) else "vast_v"
    names = {"jump", "zero_rows", "q_is_k", "tiny_v", last, *["ones_do"] * (chosen.pass_ == "backward")}
    assert {case.inputs for case in cases} == names | {"randn"}
    large = {p.head_dim for p, case in zip(problems, cases, strict=True) if case.input_scale == 10 and p.seq_kv > 128 and p.scale > 0}
    assert {64, min(128, widest)} <= large
    races = [case.problem.has_own_dim_v for case in cases if case.check == "race" and case.problem.scale < 0]
    assert races == [True] * chosen.takes_dim_v + [False] and cases[-1].check == "race"
    assert not any(case.check for case in verify.matrix(chosen, "quick", "cuda"))
    assert len(cases) <= 71


def test_a_fuzz_draws_head_dims_of_v() -> None:
    """For kernels that take them, and none beyond their widths; the same each time, and written as a case that is read back."""
    fa2, mma, hopper = find("fa2", "forward"), find("mma", "forward"), find("hopper", "backward")
    taken = [case for case in DRAWN[:200] if takes(fa2, case)]
    own = [widened(fa2, case) for case in taken]
    assert 0.15 < sum(case.problem.has_own_dim_v for case in own) / len(own) < 0.45
    assert own == [widened(fa2, case) for case in taken] and all(takes(fa2, case) for case in own)
    assert max(case.problem.widest for case in own) <= 128 < max(widened(hopper, case).problem.widest for case in DRAWN[:200])
    assert all(widened(mma, case) == case for case in taken)
    pairs = assigned([mma, fa2], DRAWN[:60])
    assert any(case.problem.has_own_dim_v for case, _ in pairs) and all(takes(chosen, case) for case, chosen in pairs)
    case = next(case for case in own if case.problem.has_own_dim_v and not case.problem.formulas)
    assert replace(Case.parse(case.text()), number=case.number) == case


def test_a_fuzz_draws_for_every_kernel() -> None:
    """Each has a fifth of a seed's cases in its types; one that takes masks, scores or sinks has some with, one of windows only has windows."""
    for chosen in catalogue():
        pairs = [case.problem for case, its in assigned([chosen], DRAWN[:60]) if its is chosen]
        assert len(pairs) >= 12, chosen.label
        for promise, field in (("mask", "mask"), ("score", "score"), ("sinks", "sinks")):
            assert not getattr(chosen, promise) or any(getattr(p, field) for p in pairs), (chosen.label, field)
        if chosen.windows_only:
            windows = {p.mask for p in pairs}
            assert None not in windows and len(windows) > 8 and any(p.seq_q > 176 for p in pairs) and any(p.sinks for p in pairs)


@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_every_choice_of_a_header_is_met(chosen: Kernel) -> None:
    """By the quick matrix once, by the full one in every pair; without the cases that are added for it some are not."""
    quick = verify.matrix(chosen, "quick", "cpu")
    assert known(chosen) <= frozenset().union(*(made(chosen, *case.planned) for case in quick))
    assert not missing(chosen, [case.planned for case in verify.matrix(chosen, "full", "cpu")], pairs=True)
    assert missing(chosen, [quick[0].planned], pairs=False)


def test_the_choices_of_a_header_are_found() -> None:
    """hopper's backward pass has a form of head dim 128 under the mask, which no case without one meets."""
    hopper = next(chosen for chosen in catalogue() if chosen.label == "hopper_backward")
    assert {("BACKWARDS", "1"), ("SECTION", "64"), ("SECTION", "16"), ("AHEAD", "8"), ("EARLY", "8"), ("HEAD_DIM", "256")} <= known(hopper)
    fa2 = find("fa2", "forward")
    lanes, _, keys = (("choice", row.name) for row in fa2.choices)
    assert {lanes, keys, ("LANES", "32")} <= made(fa2, Problem.of(1, 1, 32, 64), False, None)
    assert lanes not in made(fa2, Problem.of(1, 1, 128, 64), False, 1)
    unmasked = [case.planned for case in verify.matrix(hopper, "quick", "cpu") if not case.problem.causal]
    more = [(problem.causal, problem.head_dim) for problem, form, _ in missing(hopper, unmasked, False) if not form]
    assert {(True, 112), (True, 128)} & set(more) and not missing(
        hopper, [case.planned for case in verify.matrix(hopper, "quick", "cpu")], False
    )


EXACT = """// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 64)", "heads_q", "batch"]
// block = 64
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "scale"]
// ///
extern "C" __global__ void forward(const float*, const float*, const float*, float*, float*, int, int, float) {}
"""


def test_a_kernel_of_listed_widths_is_judged_at_them_in_every_mask(tmp_path: Path) -> None:
    """No case of the quick matrix is refused for its width; each width and mask has rows that see several keys, a tile of 128 among them.

    A fuzz fits every draw that such a kernel refuses, so that none is lost.
    """
    path = tmp_path / "mine_forward.cu"
    path.write_text(plain.top(head_dims="[64, 128]", gqa="false", cross="false") + EXACT)
    chosen = Kernel.read(path)
    problems = [case.problem for case in verify.matrix(chosen, "quick", "cpu")]
    assert {p.head_dim for p in problems} == {64, 128}
    assert {(p.head_dim, p.causal) for p in problems if p.seq_q > 1} == set(itertools.product((64, 128), (False, True)))
    assert {p.head_dim for p in problems if p.seq_q == 128} == {64, 128}
    drawn = [draw(5, number) for number in range(60)]
    assert sum(takes(chosen, case) for case in drawn) < 10
    fit = [fitted(chosen, case) for case in drawn]
    assert all(takes(chosen, case) for case in fit) and len({case.problem for case in fit}) > 50
    for case, made_to_fit in zip(drawn, fit, strict=True):
        assert math.isclose(made_to_fit.problem.scale * made_to_fit.problem.head_dim**0.5, case.problem.scale * case.problem.head_dim**0.5)
        assert made_to_fit.problem.causal == case.problem.causal and Case.parse(made_to_fit.text()).problem == made_to_fit.problem


def failure(case: Case, wrong: bool, tensor: str = "O", code: int = 1) -> CaseResult:
    """A result as run_case gives it."""
    message = f"{tensor} is wrong at batch 0: got 1, expected 2" if wrong else ""
    return CaseResult("mine", "forward", case, not wrong, message, 0.0, "", {}, code if wrong else 0)


def test_a_failing_case_shrinks_to_the_least_that_fails() -> None:
    """Keys 65 or more under the causal mask fail in O; anything else fails in another way or not at all."""

    def run(case: Case) -> CaseResult:
        p = case.problem
        return failure(case, True) if p.causal and p.seq_kv >= 65 else failure(case, p.batch == 1, "logsumexp")

    problem = Problem.of(3, 6, 300, 80, 2, 411, "bfloat16", True, 0.3, 62)
    case = Case(9, problem, 10.0, 7, True, "one_hot", 99)
    done = shrink(run(case), run)
    small = done.case.problem
    assert (small.batch, small.heads_q, small.seq_q, small.seq_kv, small.head_dim, small.causal) == (1, 1, 1, 65, 1, True)
    assert done.case == Case(9, small, 1.0, 0) and small.scale == 1.0 and small.causal_shift == small.default_shift
    assert case.text() in done.message


def test_shrinking_keeps_what_is_needed_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of this case alone stays as it is, after at most so many attempts; a lost context is not a smaller case."""
    case = DRAWN[0]
    count = 0

    def run(tried: Case) -> CaseResult:
        nonlocal count
        count += 1
        return Lost(**vars(failure(tried, True)))

    start = failure(case, True)
    assert shrink(start, run) is start
    assert 5 < count <= 120
    monkeypatch.setattr("harness.verbs.verify.shrink.ATTEMPTS", 3)
    count = 0
    shrink(start, run)
    assert count == 3


def test_shrinking_that_the_clock_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are counted, so that every machine finds the same case. One that is too slow for them says that it did not."""
    case, now = DRAWN[0], itertools.count(step=50.0)
    monkeypatch.setattr("harness.verbs.verify.shrink.time.monotonic", lambda: next(now))
    done = shrink(failure(case, True), lambda tried: failure(tried, True))
    assert done.message.endswith(f"(shrunk from {case.text()} in 120 s, not to the end)")


def test_a_drawn_scale_has_four_digits() -> None:
    """Of a random one: the last digit of a power is the C library's."""
    factors = {case.number: case.problem.scale / case.problem.head_dim**-0.5 for case in DRAWN}
    assert all(math.isclose(factor, float(f"{factor:.4g}"), rel_tol=1e-14) for factor in factors.values())
    assert len(set(factors.values())) > 20
