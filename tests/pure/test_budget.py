"""The gate: a right float32 kernel passes it at every shape, type and scale, and every planted fault fails it by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import flash_model
import numpy as np
import pytest

from harness.check import budget, moments
from harness.check import oracle as oracles
from harness.check.baselines import baselines
from harness.check.reference import Reference, reference, round_to
from harness.dataset.generate import generate
from harness.problem import Problem

Array = np.ndarray[Any, Any]


def made(problem: Problem, values: dict[str, Array], noise: float = 0.0, rows: Any = None, products: float = 0.0) -> Reference:
    """A reference of these values, with the same noise in each row, and the same products."""
    own = {name: np.full((*value.shape[:3], 2), noise**2) for name, value in values.items()}
    of_rows = np.full(values["O"].shape[:3], products)
    return Reference(problem, np, values, rows, 1.0, dict.fromkeys(values, noise), own, products=of_rows)


@functools.lru_cache(maxsize=32)
def oracle(problem: Problem, scale: float = 1.0, backward: bool = True) -> tuple[dict[str, Array], Reference, list[dict[str, Any]]]:
    tensors = generate(problem, 42, ("Q", "K", "V", "dO") if backward else ("Q", "K", "V"), scale)
    return tensors, reference(np, problem, tensors), baselines(np, problem, tensors, "f32")


def judge(problem: Problem, scale: float = 1.0, backward: bool = True, **model: Any) -> dict[str, budget.Verdict]:
    tensors, exact, ways = oracle(problem, scale, backward)
    return budget.compare(exact, flash_model.run(problem, tensors, **model), ways)


# -- what must pass ---------------------------------------------------------------------------------------------------


@pytest.mark.days(7)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 65, 127, 128])
def test_a_right_kernel_passes(length: int, dtype: str, scale: float) -> None:
    """Terms added one after another, delta from the stored O; forward also at scale 30."""
    for dim in (1, 16, 59, 64, 128) if length <= 65 else (59, 128):
        for causal, heads in ((False, 1), (True, 3)):
            problem = Problem.of(1, heads, length, dim, heads_kv=1, dtype=dtype, causal=causal)
            for verdict in judge(problem, scale, scale <= 10, base2=dim != 64).values():
                assert verdict.passed, f"{problem.describe()}: {budget.message(verdict)}"


@pytest.mark.parametrize(
    ("length", "other", "dim", "dtype", "scale"),
    [
        (513, 513, 64, "float32", 1.0),
        (513, 513, 64, "bfloat16", 10.0),
        (2048, 2048, 16, "float32", 1e-3),
        (799, 3, 40, "float32", 1.0),
        (3, 799, 40, "float16", 1.0),
        (239, 1, 64, "bfloat16", 10.0),
        (1, 239, 111, "float32", 10.0),
    ],
)
def test_a_right_kernel_passes_long_and_cross(length: int, other: int, dim: int, dtype: str, scale: float) -> None:
    """Long sequences, and key lengths that differ, with rows that see no key."""
    problem = Problem.of(1, 1, length, dim, seq_kv=other, dtype=dtype, causal=length != 2048)
    for verdict in judge(problem, scale).values():
        assert verdict.passed, f"{problem.describe()}: {budget.message(verdict)}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 7, -20, -60, -64, 69])
def test_any_causal_shift_is_judged(shift: int, dtype: str) -> None:
    """A right kernel passes on every shard, also on one that sees nothing; one key too many fails wherever a key is hidden."""
    problem = Problem.of(1, 2, 64, 16, heads_kv=1, seq_kv=70, dtype=dtype, causal=True, causal_shift=shift)
    for verdict in judge(problem).values():
        assert verdict.passed, f"{problem.describe()}: {budget.message(verdict)}"
    failed = {name for name, verdict in judge(problem, mutant="causal off by one").items() if not verdict.passed}
    one_key = {"O", "logsumexp", "dV"}  # -64 and one more: the last query sees one key, whose score has no gradient
    assert failed == {69: set(), -64: one_key}.get(shift, one_key | {"dQ", "dK"})


def test_a_stored_value_half_way_may_go_either_way() -> None:
    """O = (V0 + V1) / 2 lies half-way between two bfloat16: a right kernel may store the other one, which is all of its dK."""
    problem = Problem.of(1, 2, 2, 1, heads_kv=1, dtype="bfloat16", causal=True)
    tensors = generate(problem, 15, input_scale=1e-3)
    exact, ways = reference(np, problem, tensors), baselines(np, problem, tensors, "f32")
    verdict = budget.compare(exact, flash_model.run(problem, tensors), ways)["dK"]
    assert verdict.passed, budget.message(verdict)


def test_float64_has_its_own_rule() -> None:
    """1e-11 of the largest value, no baselines; float32 accuracy fails it by far, also where one key leaves dQ only noise."""
    for keys in (1, 33):
        problem = Problem.of(1, 2, 33, 8, seq_kv=keys, dtype="float64")
        tensors, exact, ways = oracle(problem)
        right = {name: array * (1 + 1e-13) for name, array in exact.values.items()}
        right["dQ"] += 1e-16
        assert all(v.passed for v in budget.compare(exact, right, ways).values())
        single = {name: array.astype(np.float32).astype(np.float64) for name, array in exact.values.items()}
        verdicts = budget.compare(exact, single, ways)
        assert not any(verdicts[name].passed for name in ("O", "logsumexp", "dV") if keys > 1 or name == "logsumexp")


# -- what must fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mutant", dict.fromkeys(flash_model.FORWARD_MUTANTS + flash_model.BACKWARD_MUTANTS).keys())
def test_planted_faults_fail(mutant: str, dtype: str, length: int) -> None:
    """Each fault fails in a tensor of its pass."""
    problem = Problem.of(1, 1, length, 16, dtype=dtype, causal=mutant == "causal off by one")
    failed = {name for name, verdict in judge(problem, mutant=mutant, ordered=False).items() if not verdict.passed}
    if mutant in flash_model.FORWARD_MUTANTS:
        assert failed & {"O", "logsumexp"}, f"{mutant} passes the forward check"
    # In 16 bit one zero key among many is below the rounding of the gradients: only logsumexp shows it.
    if mutant in flash_model.BACKWARD_MUTANTS and (mutant != "unmasked padding key" or dtype == "float32"):
        assert failed & {"dQ", "dK", "dV"}, f"{mutant} passes the backward check"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [128, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_a_fault_the_same_data_pass(dtype: str, length: int, causal: bool) -> None:
    """The model that the faults are planted in is right."""
    for verdict in judge(Problem.of(1, 1, length, 16, dtype=dtype, causal=causal), ordered=False).values():
        assert verdict.passed, budget.message(verdict)


def test_each_fault_is_seen_where_it_is() -> None:
    """The verdict names the tensors a fault touches, and only those."""
    problem = Problem.of(1, 2, 128, 64)
    seen = {
        m: {n for n, v in judge(problem, mutant=m, ordered=False).items() if not v.passed} for m in ("dK and dV swapped", "dQ not scaled")
    }
    assert seen == {"dK and dV swapped": {"dK", "dV"}, "dQ not scaled": {"dQ"}}
    assert {n for n, v in judge(problem, mutant="base-2 logsumexp", backward=False).items() if not v.passed} == {"logsumexp"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["O", "logsumexp", "dQ", "dK", "dV"])
def test_not_finite_fails_always(tensor: str, value: float) -> None:
    """One NaN or infinity in one tensor fails that tensor, with any tolerance, and no other."""
    problem = Problem.of(1, 2, 9, 4)
    tensors, exact, ways = oracle(problem)
    got = flash_model.run(problem, tensors)
    got[tensor][0, 1, 5] = value
    verdicts = budget.compare(exact, got, ways, tolerance=1e30)
    assert [name for name, v in verdicts.items() if not v.passed] == [tensor]
    assert verdicts[tensor].worst[:3] == (0, 1, 5)
    assert "not finite" in verdicts[tensor].reason


def test_masked_rows_must_match_exactly() -> None:
    """-inf where the reference has it, and nowhere else: neither a large number nor +inf nor NaN will do."""
    problem = Problem.of(1, 1, 5, 4, seq_kv=2, causal=True)
    tensors, exact, ways = oracle(problem)
    good = flash_model.run(problem, tensors)
    assert np.isneginf(good["logsumexp"][0, 0, :3]).all()
    assert all(v.passed for v in budget.compare(exact, good, ways).values())
    for wrong in (-1e30, np.inf, np.nan, 0.0):
        got = {"logsumexp": good["logsumexp"].copy()}
        got["logsumexp"][0, 0, 0] = wrong
        assert not budget.compare(exact, got, ways)["logsumexp"].passed
    got = {"logsumexp": good["logsumexp"].copy()}
    got["logsumexp"][0, 0, 4] = -np.inf
    assert not budget.compare(exact, got, ways)["logsumexp"].passed


def test_overflow_of_the_storage_type() -> None:
    """What float16 cannot hold must be infinite there, with the right sign; a finite number in its place fails."""
    problem = Problem.of(1, 1, 2, 2, dtype="float16")
    tensors, exact, ways = oracle(problem)
    big = replace(exact, values={**exact.values, "dV": np.array([[[[1e5, -1e5], [1.0, 2.0]]]])})
    ways = [{"dV": big["dV"].astype(np.float32)}]
    right = round_to(np, big["dV"], "float16")
    assert budget.compare(big, {"dV": right}, ways)["dV"].passed
    for wrong in (65504.0, -np.inf):
        spoiled = right.copy()
        spoiled[0, 0, 0, 0] = wrong
        assert not budget.compare(big, {"dV": spoiled}, ways)["dV"].passed


# -- what a verdict says ----------------------------------------------------------------------------------------------


def test_metrics() -> None:
    """Worst, mean and squared error, and the relative error of references above 1e-8 only (seed 002's rule)."""
    problem = Problem.of(1, 1, 2, 2, seq_kv=1)
    exact = made(problem, {"O": np.array([[[[1.0, 2.0], [0.0, 1e-9]]]])})
    got = np.array([[[[1.5, 2.0], [0.25, 0.0]]]], np.float32)
    verdict = budget.compare(exact, {"O": got}, [{"O": exact["O"]}])["O"]
    assert (verdict.max_abs, verdict.max_rel) == (0.5, 0.5)
    assert verdict.mean_abs == pytest.approx(0.1875)
    assert verdict.mse == pytest.approx((0.25 + 0.0625) / 4)
    assert (verdict.worst, verdict.got, verdict.expected) == ((0, 0, 0, 0), 1.5, 1.0)


def test_budget_by_hand() -> None:
    """2e + 2 ulp(m) + 2^-24 sqrt(n) m for O; 3e for gradients; 2e + 4 ulp + 2^-24 sqrt(n) for logsumexp; 4 2^-24 noise on top."""
    problem = Problem.of(1, 2, 9, 4, heads_kv=1, seq_kv=16, dtype="float16")
    shapes = {name: problem.shape(name) for name in ("O", "logsumexp", "dV")}
    exact = made(problem, {name: np.full(shape, 3.0) for name, shape in shapes.items()}, 0.5)
    ways = [{name: np.full(shape, 3.0 + 2**-6) for name, shape in shapes.items()}]
    unit = 2.0**-24
    noise = 4 * unit * 0.5
    assert budget.budget(exact, "O", ways) == pytest.approx(2 * 2**-6 + 2 * 2**-9 + unit * 4 * 3 + noise, rel=1e-14)
    assert budget.budget(exact, "dV", ways) == pytest.approx(3 * 2**-6 + 2 * 2**-9 + unit * 18**0.5 * 3 + noise, rel=1e-14)
    assert budget.budget(exact, "logsumexp", ways) == pytest.approx(2 * 2**-6 + 4 * 2**-22 + unit * 4 + noise, rel=1e-14)


@pytest.mark.parametrize(("arithmetic", "rounded"), [("f32", 2.0**-24), ("p16", 2.0**-11), ("tf32", 2.0**-11)])
def test_budget_of_few_elements(arithmetic: str, rounded: float) -> None:
    """O has room for six standard deviations of its own rounding errors where a baseline happens to have none."""
    problem = Problem.of(1, 1, 1, 1, seq_kv=16, dtype="float16")
    exact = made(problem, {"O": np.full((1, 1, 1, 1), 0.5)}, products=0.25)
    wanted = 6 * (rounded + 4 * 2.0**-24) * 0.25 / 3**0.5 + 2 * 2.0**-11
    assert budget.budget(exact, "O", [{"O": exact["O"]}], arithmetic) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("exact", "got", "error"),
    [(65500.0, np.inf, 20.0), (65530.0, 65504.0, 26.0), (65530.0, np.inf, 0.0), (60000.0, np.inf, 5520.0), (-65500.0, np.inf, np.inf)],
)
def test_at_the_edge_of_overflow(exact: float, got: float, error: float) -> None:
    """In float16 65,520 is the first size that becomes infinite: the error is the way to it, whichever side of it a kernel is on."""
    problem = Problem.of(1, 1, 1, 1, seq_kv=1, dtype="float16")
    wanted = made(problem, {"dK": np.full((1, 1, 1, 1), exact), "O": np.ones((1, 1, 1, 1))})
    ways = [{"dK": wanted["dK"]}]
    verdict = budget.compare(wanted, {"dK": np.full((1, 1, 1, 1), got, np.float16)}, ways)["dK"]
    assert verdict.max_abs == error and verdict.passed == (error < 70)


def test_products_by_hand() -> None:
    """Reference.products is the largest root of the sum of (P V)^2 of an element of O."""
    problem = Problem.of(1, 1, 5, 4, seq_kv=9, scale=0.7)
    random = np.random.RandomState(3)
    tensors = {name: random.randn(*problem.shape(name)).astype(np.float32) for name in ("Q", "K", "V")}
    q, k, v = (tensors[name][0, 0].astype(np.float64) for name in ("Q", "K", "V"))
    p = np.exp(0.7 * q @ k.T)
    p /= p.sum(axis=-1, keepdims=True)
    assert reference(np, problem, tensors).products.max() == pytest.approx(np.sqrt((p * p) @ (v * v)).max(), rel=1e-12)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", np.float32), ("float16", np.float16), ("float64", np.float64)])
def test_ulp_is_the_spacing(dtype: str, kind: Any) -> None:
    """numpy's spacing, subnormals and zero included; bfloat16 has seven bits."""
    for value in (1.0, 1.5, 2.0, 3e-5, 1e-7, 0.0, 1000.0):
        assert budget.ulp(float(kind(value)), dtype) == float(np.spacing(kind(value)))
    assert budget.ulp(1.0, "bfloat16") == 2**-7


def test_tolerance_only_tightens() -> None:
    """--tolerance is an absolute limit beside the budget."""
    problem = Problem.of(1, 1, 65, 16)
    tensors, exact, ways = oracle(problem)
    got = {"O": flash_model.run(problem, tensors)["O"]}
    assert budget.compare(exact, got, ways, tolerance=1e-3)["O"].budget < 1e-4
    assert not budget.compare(exact, got, ways, tolerance=1e-12)["O"].passed


def test_equal_errors_have_one_place() -> None:
    """The first of the largest errors, also where the last bits of float64, which a BLAS decides, make another one larger."""
    problem = Problem.of(1, 1, 4, 2)
    _, exact, ways = oracle(problem, 1.0, False)
    for noise in (-(2.0**-50), 2.0**-50):
        values = np.ones((1, 1, 4, 2))
        values[0, 0, 2, 1] += noise
        got = np.ones((1, 1, 4, 2), np.float32)
        got[0, 0, 1:] = 3
        found = budget.compare(replace(exact, values={**exact.values, "O": values}), {"O": got}, ways)["O"]
        assert found.worst == (0, 0, 1, 0)


def test_message_names_the_place() -> None:
    """One line: tensor, batch, head, row, tile, column, got, expected."""
    problem = Problem.of(2, 2, 130, 4)
    tensors, exact, ways = oracle(problem)
    got = {"dK": flash_model.run(problem, tensors)["dK"]}
    got["dK"][1, 0, 129, 3] = 77
    line = budget.message(budget.compare(exact, got, ways, tiles={"dK": 64})["dK"])
    assert line.startswith("dK is wrong at batch 1, head 0, key row 129 (tile 2 of 3, rows 128-129), column 3: got 77, expected ")
    assert "(1 of 2080 values do)" in line and "\n" not in line
    assert "key row 129, column 3: got" in budget.message(budget.compare(exact, got, ways, tiles={"O": 64})["dK"])  # tiles not known


def test_sampled_rows_are_named_by_their_own_number() -> None:
    """The worst row of a sampled reference is the row of the whole tensor, and rows not held must be finite, no more."""
    problem = Problem.of(1, 1, 10, 2)
    rows = np.array([0, 9])
    exact = made(problem, {"O": np.ones((1, 1, 2, 2))}, rows={"O": rows})
    got = np.ones((1, 1, 10, 2), np.float32)
    got[0, 0, 5] = 7
    ways = [{"O": exact["O"]}]
    assert budget.compare(exact, {"O": got}, ways)["O"].passed
    got[0, 0, 5] = np.nan
    torn = budget.compare(exact, {"O": got}, ways)["O"]
    assert "got nan, expected a number; 2 values of this head are not finite" in budget.message(torn)
    got[0, 0, 5] = 7
    got[0, 0, 9, 1] = 2
    assert budget.compare(exact, {"O": got}, ways)["O"].worst == (0, 0, 9, 1)


def test_error_map() -> None:
    """The worst head's |error| by row and column block; inf where a value is missing."""
    problem = Problem.of(1, 2, 6, 20)
    tensors, exact, _ = oracle(problem)
    got = flash_model.run(problem, tensors)
    got["O"][0, 1, 4, 17] += 3
    picture = budget.error_map(exact, "O", got["O"], tile=8)
    assert picture.shape == (6, 3)
    assert np.unravel_index(picture.argmax(), picture.shape) == (4, 2)
    assert picture[4, 2] == pytest.approx(3, rel=1e-5)
    got["logsumexp"][0, 0, 2] = np.nan
    picture = budget.error_map(exact, "logsumexp", got["logsumexp"])
    assert picture.shape == (6, 1) and picture[2, 0] == np.inf


@pytest.mark.parametrize("on_host", [0, 1 << 20])
def test_limits_are_computed_once(on_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an oracle, for a tensor and a class; a second verdict is the same, and the limits that are kept are those it is judged by."""
    monkeypatch.setattr(oracles, "ON_HOST", on_host)
    problem = Problem.of(1, 2, 64, 16, dtype="float16")
    judge = oracles.Oracle(problem, generate(problem, 1))
    outputs = {name: round_to(np, judge.reference[name], problem.tensor_dtype(name)) for name in ("O", "logsumexp", "dQ")}
    first = judge.judge(outputs, "p16")
    real = budget.budget
    monkeypatch.setattr(budget, "budget", lambda *given: 0.0)
    with monkeypatch.context() as once:
        once.setattr(moments, "base", None)
        again = judge.judge({"dQ": outputs["dQ"]}, "p16") | judge.judge(outputs, "p16")
        # As texts: the moments of logsumexp hold NaN, and from Python 3.13 on a dataclass with one is not even equal to itself.
        assert {name: repr(again[name]) for name in first} == {name: repr(each) for name, each in first.items()}
        rough = judge.judge({"dQ": outputs["dQ"] * np.float16(1.01)}, "p16")["dQ"]
        assert "too large: slope" in rough.reason or "exceeds the budget" in rough.reason
    assert all(verdict.passed for verdict in first.values())
    assert not any(verdict.passed for verdict in judge.judge(outputs, "f32").values())  # another class, by limits of 0
    monkeypatch.setattr(budget, "budget", real)
    assert not any(verdict.passed for verdict in judge.judge(outputs, "f32").values())
