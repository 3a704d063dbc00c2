"""The second verdict: it finds what all elements share, and random errors, copies of rows and small cases raise no alarm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.check import alike, moments
from harness.check.oracle import Oracle
from harness.check.reference import Reference
from harness.dataset.storage import through
from harness.problem import Problem
from harness.verbs.verify.cases import Case
from harness.verbs.verify.inputs import inputs

Array = np.ndarray[Any, Any]
NOTHING = moments.Allowed(0.0, 0.0)


def drawn(draw: np.random.RandomState, kind: str, shape: tuple[int, ...]) -> Array:
    """Signed errors of right kernels: independent, heavy-tailed, shared by a row, or by all rows of a head."""
    if kind == "heavy tails":
        return draw.standard_t(1.5, shape)
    if kind == "a factor of each row":
        return draw.randn(*shape[:3], 1) * np.ones(shape)
    if kind == "copies of a row":
        return draw.randn(*shape[:2], 1, shape[3]) * np.ones(shape)
    return draw.randn(*shape)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 2, 64), (2, 2, 33, 16), (1, 2, 129, 64)], ids=str)
@pytest.mark.parametrize("kind", ["independent", "heavy tails", "a factor of each row", "copies of a row"])
def test_random_errors_raise_no_alarm(kind: str, shape: tuple[int, ...]) -> None:
    """Also where the rows are not independent, or the columns: and the worst of 50 cases is far from its limit."""
    draw = np.random.RandomState(1)
    for _ in range(50):
        reference = draw.randn(*shape) if kind != "copies of a row" else draw.randn(*shape[:2], 1, shape[3]) * np.ones(shape)
        error, first, second = (drawn(draw, kind, shape) * 1e-3 for _ in range(3))
        found = moments.judge(np, reference, error, [first, second], NOTHING, False)
        assert not found.reason("O"), found
        if kind == "copies of a row":
            continue  # of logsumexp: budget.compare sees them, and allows two ulp (Reference.spread)
        found = moments.judge(np, reference[..., :1], error[..., :1], [first[..., :1]], NOTHING, True)
        assert not found.reason("logsumexp") and math.isnan(found.slope)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_all_elements_share_is_found(dtype: str) -> None:
    """A slope of 1.001, truncation, a mean error, an RMS error of 1.7 times the baseline's: at 2 x 129 rows, and the right one passes."""
    draw = np.random.RandomState(2)
    exact = draw.randn(1, 2, 129, 64)
    unit = 2.0**-11 if dtype == "float16" else 2.0**-8
    inner = [exact * (1 + unit / 3 * draw.randn(*exact.shape)) for _ in range(3)]
    right, other, more = (through(np, each, dtype) for each in inner)
    scale = 2.0 ** np.floor(np.log2(np.abs(inner[1])))
    cut = np.trunc(inner[1] / scale / unit / 2) * scale * unit * 2
    bad = {
        "1.001": (through(np, inner[1] * 1.001, dtype), "too large: slope 1.00"),
        "cut": (cut, "too small: slope 0.99"),
        "shifted": (other + unit / 2, "too high in the mean"),
        "rough": (exact + 1.7 * 2**0.5 * (other - exact), "too rough: RMS error"),
    }
    may = moments.Allowed(1e-5, 1e-5)
    ways = [right - exact, more - exact]
    assert not moments.judge(np, exact, other - exact, ways, may, False).reason("O")
    for name, (got, words) in bad.items():
        reason = moments.judge(np, exact, got - exact, ways, may, False).reason("O")
        assert reason.startswith("O is ") and words in reason and " a right kernel has " in reason, f"{name}: {reason!r}"


def test_fewer_than_38_rows_or_columns_are_never_judged() -> None:
    """The bound holds for any number of rows, and so says nothing about few; one more and it does."""
    for rows, columns, judged in ((37, 64, False), (64, 37, False), (38, 38, True)):
        exact = np.random.RandomState(3).choice([-1.0, 1.0], (1, 1, rows, columns))
        found = moments.judge(np, exact, exact * 0.5, [exact * 1e-9], NOTHING, False)
        assert math.isfinite(found.slope_budget) is judged and math.isfinite(found.rms_budget) is judged
        assert bool(found.reason("O")) is judged


def test_values_that_are_not_finite_are_left_out() -> None:
    """Masked rows, infinities on both sides, and a tensor of zeros."""
    draw = np.random.RandomState(4)
    exact, error = draw.randn(1, 2, 65, 64), draw.randn(1, 2, 65, 64) * 1e-3
    whole = moments.judge(np, exact[:, :, 1:], error[:, :, 1:], [error[:, :, 1:]], NOTHING, False)
    exact[:, :, 0], error[:, :, 0] = np.inf, np.nan
    found = moments.judge(np, exact, error, [error], NOTHING, False)
    assert found.slope == pytest.approx(whole.slope) and found.rms == pytest.approx(1) == whole.rms
    assert not moments.judge(np, np.zeros((1, 1, 2, 2)), np.ones((1, 1, 2, 2)), [np.ones((1, 1, 2, 2))], NOTHING, False).reason("dQ")


def test_what_a_right_kernel_may_have_in_common() -> None:
    """A and a of the docstring, by hand."""
    unit, problem = 2.0**-24, Problem.of(1, 1, 1024, 64, dtype="bfloat16")
    exact = Reference(problem, np, {}, None, 1.0, {}, score=2.0)
    plain = moments.allowed(exact, "O", "f32", 9.0, 1.0, 1.0)
    assert plain.bias == pytest.approx(unit * (3 * 2 + 32)) and plain.rms == pytest.approx(plain.bias + unit * 8 * 2)
    rounded = moments.allowed(exact, "O", "p16", 9.0, 0.5, 1.0)
    assert rounded.bias == pytest.approx(unit * ((3 + 4) * 2 + 32 + 64) + 0.5 * 2.0**-8)
    lse = moments.allowed(exact, "logsumexp", "p16", 0.0, 0.0, 7.0)
    assert lse.bias == pytest.approx(unit * ((3 + 4) * 2 + 2)) and lse.rms == pytest.approx(lse.bias + unit * (8 * 2 + 14 + 32))


def test_copies() -> None:
    """1 where all rows are the same, nearly 0 where they are not; where some are, their part of the pairs, of one of two heads too."""
    draw = np.random.RandomState(5)
    row = draw.randn(1, 2, 1, 16)
    assert moments.copies(np, row * np.arange(1, 9).reshape(8, 1)) == pytest.approx(1)
    assert moments.copies(np, draw.randn(1, 2, 100, 16)) < 1e-9
    some = draw.randn(1, 2, 128, 16)
    some[:, 1, :90] = row[:, 0]
    assert moments.copies(np, some) == pytest.approx((90 / 128) ** 2, abs=0.01)
    assert moments.copies(np, draw.randn(1, 1, 100, 1)) < 0.01
    few = np.zeros((1, 1, 257, 16))  # rows that see no key do not count
    few[..., 225:, :] = row[:, 0]
    assert moments.copies(np, few) == pytest.approx(1) and moments.copies(np, np.zeros((1, 1, 9, 4))) == 0


def test_what_float64_leaves_of_a_cancellation_is_no_reference() -> None:
    """A row of noise is no copy of others, and a tensor of noise has no moments: as where the sums happen to cancel to 0."""
    draw = np.random.RandomState(6)
    exact = draw.randn(1, 2, 64, 16)
    exact[:, :, 0] = 0.0
    noisy = exact.copy()
    noisy[:, :, 0] = 1e-17 * draw.randn(1, 2, 16)
    assert moments.copies(np, noisy[:, :, :4]) == moments.copies(np, exact[:, :, :4]) > 0
    noise, error = 1e-17 * draw.randn(1, 2, 64, 48), 1e-8 * draw.randn(1, 2, 64, 48)
    found = moments.judge(np, noise, error, [error], NOTHING, False)
    same = moments.judge(np, 0 * noise, error, [error], NOTHING, False)
    assert repr(found) == repr(same)  # as texts: NaN is not equal to itself
    assert math.isnan(found.rms) and math.isnan(found.slope)
    assert moments.judge(np, 1e-7 * exact[..., 1:], 1e-8 * exact[..., 1:], [error[..., :15]], NOTHING, False).slope == pytest.approx(1.1)


def test_row_sums_of_terms_near_one_may_stagnate() -> None:
    """Scores of 1e-6: a float32 chain rounds each term to 1. Its logsumexp is too high in all rows, and right; a third more is not."""
    draw, keys = np.random.RandomState(3), 1024
    scores = 1e-6 * draw.randn(1, 1, 129, keys)
    exact = np.log(np.exp(scores).sum(-1, keepdims=True))
    top = scores.max(-1, keepdims=True)
    terms = np.exp(scores - top)
    one, other = alike.rounded_alike(np, terms, terms.sum(-1))
    drift = abs(float(one.mean())) + abs(float(other.mean()))
    chain = np.cumsum(terms.astype(np.float32), -1, dtype=np.float32)[..., -1:].astype(np.float64)
    error, rest = (top + np.log(each) - exact for each in (chain, terms.astype(np.float32).astype(np.float64).sum(-1, keepdims=True)))
    problem = Problem.of(1, 1, 129, 64, seq_kv=keys)
    typical = float((np.abs(one) + np.abs(other)).mean())
    for known, factor, right in ((drift, 1.0, True), (drift, 1.3, False), (0.0, 1.0, False)):
        its = Reference(problem, np, {}, None, 1.0, {}, score=1e-6, typical=typical, drift=known)
        may = moments.allowed(its, "logsumexp", "f32", 0.0, 0.0, float(exact.mean()))
        may = moments.Allowed(may.bias - 2 * moments.UNIT, may.rms)  # without what an exponential may be off in the mean
        assert bool(moments.judge(np, exact, factor * error, [rest], may, True).reason("logsumexp")) is not right


def chained(terms: Array, lanes: int, tile: int = 1) -> Array:
    """Row sums in float32: each lane adds every so many-th tile to its own sum. The tiles and the sums of the lanes are added exactly."""
    rows, keys = terms.shape
    padded = np.zeros((rows, -(-keys // (lanes * tile)) * lanes * tile))
    padded[:, :keys] = terms
    tiles = padded.reshape(rows, -1, tile).sum(-1).astype(np.float32)
    found: Array = np.cumsum(tiles.reshape(rows, -1, lanes), 1, dtype=np.float32)[:, -1].astype(np.float64).sum(-1)
    return found


@pytest.mark.parametrize("keys", [33, 363, 1452, 4097])
def test_equal_terms_round_alike(keys: int) -> None:
    """Chains of equal terms, and of others among them, stay within the limit, in any lanes and tiles and with any common factor.

    They are far beyond u sqrt(n), and one chain comes near the limit.
    """
    draw = np.random.default_rng(keys)
    terms = np.exp(-draw.uniform(0, 5, (300, 1))) * np.ones((300, keys))
    others = draw.random((300, keys)) < 0.02
    others[:100] = False
    terms[others] = np.exp(-draw.exponential(3, np.count_nonzero(others)))
    terms[50:, 0] = 1  # the row maximum
    terms = terms.astype(np.float32).astype(np.float64)
    limit = sum(np.abs(wave) for wave in alike.rounded_alike(np, terms, terms.sum(-1)))
    shifted = (terms * np.exp(-draw.uniform(0, 5, (300, 1)))).astype(np.float32).astype(np.float64)
    random, largest = moments.UNIT * math.sqrt(keys), 0.0
    ways = ((terms, 1, 1), (terms, 4, 1), (terms, 32, 1), (terms, 1, 4), (terms, 1, 64), (shifted, 1, 1), (shifted, 4, 1))
    for values, lanes, tile in ways:
        part = np.abs(chained(values, lanes, tile) / values.sum(-1) - 1) / (limit + random)
        largest = max(largest, float(part.max()))
        assert part.max() < 1, (lanes, tile, float(part.max()))
    assert limit.max() > 2 * random and largest > 0.4


def test_other_terms_do_not_round_alike() -> None:
    """Independent terms: the limit is that of the random errors. Terms of 1, masked keys and rows that are not finite: no error at all."""
    draw = np.random.default_rng(5)
    for keys in (64, 1000, 5000):
        for terms in (draw.random((200, keys)), np.exp(-draw.exponential(5, (200, keys)))):
            limit = sum(np.abs(wave) for wave in alike.rounded_alike(np, terms, terms.sum(-1)))
            assert np.mean(limit) < 0.6 * moments.UNIT * math.sqrt(keys) and np.max(limit) < 1.5 * moments.UNIT * math.sqrt(keys)
    terms = np.ones((4, 1000))
    terms[1, 100:], terms[2], terms[3, 7] = 0, 0, np.nan
    for wave in alike.rounded_alike(np, terms, terms.sum(-1)):
        assert not wave.any()


def test_the_false_alarm_that_equal_terms_raised() -> None:
    """One-hot rows: of 1,452 scores all but a few are 0. Right kernels were up to 5.3e-6 off, at a budget of 5.29e-6."""
    case = Case.parse("B5_H1_S5_D32_Skv1452_bfloat16,causal,scale=-0.1767766952966369,inputs=one_hot")
    oracle = Oracle(case.problem, inputs(case.problem, case.seed, ("Q", "K", "V"), case.inputs))
    limit = oracle.judge(oracle.forward_outputs, "p16")["logsumexp"].budget
    assert 1e-5 < limit < 4e-5 and oracle.reference.alike > 5 * moments.UNIT * math.sqrt(1452)
