"""The baselines, and so the budgets, are the same wherever they are computed: on every backend, in tiles of any size, in a stated order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.array import to_host
from harness.backends import Backend
from harness.check import baselines as ways
from harness.check import budget, rounded
from harness.check.reference import reference
from harness.check.tensors import put
from harness.dataset.generate import generate
from harness.dataset.storage import through
from harness.problem import Problem

Array = np.ndarray[Any, Any]
CASES = [
    (Problem.of(1, 4, 100, 59, heads_kv=2, causal=True), "f32"),
    (Problem.of(1, 6, 70, 64, heads_kv=2, seq_kv=200, dtype="bfloat16"), "p16"),
    (Problem.of(2, 1, 33, 256, seq_kv=40, dtype="float16", causal=True), "p16"),
    (Problem.of(1, 2, 129, 32), "tf32"),
]


def _one_by_one(terms: Array, reverse: bool) -> Array:
    """The sums over the last axis, in chunks."""
    found, starts = np.zeros(terms.shape[:-1], np.float32), range(0, terms.shape[-1], rounded.CHUNK)
    for start in reversed(starts) if reverse else starts:
        found = (found + terms[..., start : start + rounded.CHUNK].astype(np.longdouble).sum(axis=-1)).astype(np.float32)
    return found


def test_a_product_is_rounded_in_the_stated_order(backend: Backend) -> None:
    """Bit for bit what a loop over chunks gives, whatever the strides, reversed too, and added to what is there."""
    random = np.random.RandomState(0)
    a, b = random.randn(3, 65, 77).astype(np.float32), random.randn(3, 77, 21).astype(np.float32)
    begin = random.randn(3, 65, 21).astype(np.float32)
    starts = range(0, 77, rounded.CHUNK)
    for reverse in (False, True):
        wanted = begin.copy()
        for start in reversed(starts) if reverse else starts:
            some = slice(start, start + rounded.CHUNK)
            exact = np.einsum("nrk,nkc->nrc", a[:, :, some].astype(np.longdouble), b[:, some].astype(np.longdouble))
            wanted = (wanted + exact).astype(np.float32)
        xp = backend.xp
        for left in (xp.asarray(a), xp.asarray(a.swapaxes(1, 2).copy()).swapaxes(1, 2)):
            for right in (xp.asarray(b), xp.asarray(b.swapaxes(1, 2).copy()).swapaxes(1, 2)):
                found = xp.asarray(begin.copy())
                assert rounded.product(xp, left, right, reverse, into=found) is found
                assert (to_host(found) == wanted).all()
        assert (to_host(rounded.summed(xp, xp.asarray(a), reverse)) == _one_by_one(a, reverse)).all()
    assert (wanted != np.matmul(a, b) + begin).any()  # the order matters: else this test sees nothing


@pytest.mark.parametrize(("problem", "arithmetic"), CASES, ids=lambda value: value if isinstance(value, str) else value.describe())
def test_budgets_are_those_of_numpy(backend: Backend, problem: Problem, arithmetic: str) -> None:
    """The baselines of a backend are numpy's, but for one rounding in a million, and the budgets agree to nine digits."""
    inputs = generate(problem, 3)
    here = {name: put(backend.xp, array) for name, array in inputs.items()}
    wanted, found = ways.baselines(np, problem, inputs, arithmetic), ways.baselines(backend.xp, problem, here, arithmetic)
    for one, other in zip(wanted, found, strict=True):
        for name, array in one.items():
            differ = np.count_nonzero(array != to_host(other[name]))
            assert differ <= array.size // 10_000, f"{name}: {differ} of {array.size}"
    exact, there = reference(np, problem, inputs), reference(backend.xp, problem, here)
    for name in exact.values:
        one = budget.budget(exact, name, wanted, arithmetic)
        other = budget.budget(there, name, found, arithmetic)
        assert other == pytest.approx(one, rel=1e-9), name


def test_rounding_through_bfloat16_is_numpys(backend: Backend) -> None:
    """Bit for bit: ties, what overflows, subnormal numbers, infinity; NaN stays NaN."""
    bits = np.random.RandomState(1).randint(0, 1 << 32, 1 << 16, np.uint64).astype(np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F801000, 0x477FF000, 0x7F7FFFFF, 0x33000000, 0x33000001, 0x00000001], np.uint32)
    array = np.concatenate([bits, ties, ties | np.uint32(1 << 31)]).view(np.float32).reshape(2, -1)
    wanted, found = through(np, array, "bfloat16"), to_host(through(backend.xp, backend.xp.asarray(array), "bfloat16"))
    same = (wanted.view(np.uint32) == found.view(np.uint32)) | (np.isnan(wanted) & np.isnan(found))
    assert same.all(), array[~same][:5]
    one = np.linspace(-90, 1, 1001, dtype=np.float32)
    near = to_host(rounded.exp(backend.xp, backend.xp.asarray(one.copy())))
    assert np.abs(near - np.exp(one.astype(np.float64))).max() <= 2.0**-24 * np.e


@pytest.mark.parametrize("tile", [1, 2000, 1 << 16])
def test_tiles_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same in tiles of other sizes, as a GPU has them: gradients sum over rows in whole chunks."""
    for problem, arithmetic in CASES:
        inputs = generate(problem, 5)
        monkeypatch.setattr(ways, "TILE_CPU", 1 << 17)
        whole = ways.baselines(np, problem, inputs, arithmetic)
        monkeypatch.setattr(ways, "TILE_CPU", tile)
        for one, other in zip(whole, ways.baselines(np, problem, inputs, arithmetic), strict=True):
            for name, array in one.items():
                assert np.array_equal(array, other[name]), f"{problem.describe()} {arithmetic} {name}"
