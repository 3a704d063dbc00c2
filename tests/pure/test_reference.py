"""The float64 reference against plain formulas and finite differences, and the baselines against what they promise."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from harness.check import reference as ref
from harness.check.baselines import baselines
from harness.check.oracle import Oracle, Part
from harness.check.reference import reference, round_to, widen
from harness.dataset.generate import generate
from harness.dataset.storage import tf32
from harness.fault import DataFault, UsageFault
from harness.problem import Problem

Array = np.ndarray[Any, Any]


def plain(problem: Problem, tensors: dict[str, Array], shift: int | None = None) -> dict[str, Array]:
    """Attention and its gradients written out with whole matrices, head by head, in float64. shift: of the causal mask."""
    p = problem
    shift = p.seq_kv - p.seq_q if shift is None else shift
    x = {name: widen(np, array, p.dtype) for name, array in tensors.items()}
    out = {name: np.zeros(p.shape(name)) for name in ("O", "logsumexp", "dQ", "dK", "dV")}
    hidden = np.arange(p.seq_kv)[None, :] > np.arange(p.seq_q)[:, None] + shift
    for b in range(p.batch):
        for h in range(p.heads_q):
            g = h * p.heads_kv // p.heads_q
            q, k, v, dout = x["Q"][b, h], x["K"][b, g], x["V"][b, g], x["dO"][b, h]
            weights = np.exp(p.scale * q @ k.T) * ~(hidden & p.causal)
            total = weights.sum(axis=1, keepdims=True)
            prob = weights / np.where(total == 0, 1, total)
            with np.errstate(divide="ignore"):
                out["logsumexp"][b, h] = np.log(total[:, 0])
            out["O"][b, h] = prob @ v
            dprob = dout @ v.T
            ds = prob * (dprob - (prob * dprob).sum(axis=1, keepdims=True)) * p.scale
            out["dQ"][b, h] = ds @ k
            out["dK"][b, g] += ds.T @ q
            out["dV"][b, g] += prob.T @ dout
    return out


CASES = [
    Problem.of(2, 3, 17, 5),
    Problem.of(1, 6, 9, 16, heads_kv=2, causal=True),
    Problem.of(2, 4, 20, 3, heads_kv=1, seq_kv=7, causal=True),  # the first 13 rows see no key
    Problem.of(1, 2, 4, 8, seq_kv=33, causal=True, scale=0.7, dtype="float16"),
    Problem.of(1, 2, 1, 1, seq_kv=1, dtype="bfloat16"),
    Problem.of(1, 2, 5, 4, scale=-0.3, dtype="float64"),
    Problem.of(2, 4, 9, 6, heads_kv=2, seq_kv=11, causal=True, dim_v=3),
    Problem.of(1, 2, 7, 3, dim_v=8, dtype="bfloat16"),
]


@pytest.mark.parametrize("problem", CASES, ids=lambda p: p.describe())
@pytest.mark.parametrize("tile", [1, 40, 1 << 18])
def test_reference_is_attention(problem: Problem, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor agrees with the written-out formula, whatever the tiles."""
    monkeypatch.setattr(ref, "TILE_CPU", tile)
    tensors = generate(problem, 1)
    found, wanted = reference(np, problem, tensors), plain(problem, tensors)
    assert found.rows is None and found.share == 1
    assert set(found.values) == set(wanted)
    for name, array in wanted.items():
        assert found[name].shape == problem.shape(name)
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("mask", [None, "q % 3 != 1 and q - k < 4"])
def test_sinks(mask: str | None) -> None:
    """A column of its own in the softmax, whose V is 0, also of rows that see no key; dsinks by finite differences; baselines are near."""
    values = np.array([0.5, 3.0, -2.0, 40.0], np.float32)
    problem = Problem.of(2, 4, 9, 8, 2, 12, causal=True, mask=mask, sinks="sinks[h]", tensors={"sinks": values})
    x = generate(problem, 3)

    def plain(sinks: Any) -> tuple[Any, Any]:
        k, v = (np.repeat(x[name].astype(np.float64), 2, 1) for name in "KV")
        s = x["Q"].astype(np.float64) @ k.swapaxes(2, 3) * 8**-0.5
        q, keys = np.arange(9)[:, None] + 3, np.arange(12)
        seen = (keys <= q) & (True if mask is None else (q % 3 != 1) & (q - keys < 4))
        e = np.concatenate([np.exp(s) * seen, np.broadcast_to(np.exp(sinks)[:, None, None], (2, 4, 9, 1))], -1)
        return (e / e.sum(-1, keepdims=True))[..., :-1] @ v, np.log(e.sum(-1))

    found = reference(np, problem, x)
    for name, wanted in zip(("O", "logsumexp"), plain(values.astype(np.float64)), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12, atol=1e-12)
    for h in range(4):
        step = 1e-6 * np.eye(4)[h]
        high, low = ((plain(values + off)[0] * x["dO"]).sum() for off in (step, -step))
        np.testing.assert_allclose(found["dsinks"][0, h, 0], (high - low) / 2e-6, rtol=1e-5, atol=1e-7)
    for way in baselines(np, problem, x, "f32"):
        for name, array in way.items():
            np.testing.assert_allclose(array, found[name], rtol=1e-4, atol=1e-5)


def test_fully_masked_rows() -> None:
    """O = 0, logsumexp = -inf, gradients 0, and no warning on the way; rows that see a key are as usual."""
    problem = Problem.of(1, 1, 6, 4, seq_kv=2, causal=True)
    found = reference(np, problem, generate(problem, 3))
    assert np.isneginf(found["logsumexp"][0, 0, :4]).all() and np.isfinite(found["logsumexp"][0, 0, 4:]).all()
    assert (found["O"][0, 0, :4] == 0).all() and (found["dQ"][0, 0, :4] == 0).all()
    np.testing.assert_allclose(found["O"][0, 0, 4], generate(problem, 3)["V"][0, 0, 0])  # row 4 sees key 0 only
    for baseline in baselines(np, problem, generate(problem, 3), "f32"):
        for name, array in baseline.items():
            assert (array[0, 0, :4] == (-np.inf if name == "logsumexp" else 0)).all() or name in ("dK", "dV")


#: Masks and scores with the same in numpy: (b, h, q, k) -> visible; (s, b, h, q, k) -> score and its derivative.
FORMULAS: list[tuple[dict[str, Any], Any, Any]] = [
    ({"mask": "0 <= q - k <= 2"}, lambda b, h, q, k: (q - k >= 0) & (q - k <= 2), None),
    ({"mask": "k < 3 and b == 1", "causal": True}, lambda b, h, q, k: (k < 3) & (b == 1) & (k <= q), None),
    ({"score": "2.0 * tanh(s / 2)"}, None, lambda s, b, h, q, k: (2 * np.tanh(s / 2), 1 - np.tanh(s / 2) ** 2)),
    (
        {"score": "s * s + exp2(-h) * (k - q)", "mask": "q % 2 == h % 2 or h_kv == 1"},
        lambda b, h, q, k: (q % 2 == h % 2) | (h // 2 == 1),
        lambda s, b, h, q, k: (s * s + 2.0**-h * (k - q), 2 * s),
    ),
    ({"score": "k / 4"}, None, lambda s, b, h, q, k: (k / 4 + 0 * s, 0 * s)),
]


@pytest.mark.parametrize(("given", "visible", "score"), FORMULAS, ids=[str(given) for given, *_ in FORMULAS])
@pytest.mark.parametrize("tile", [1, 40, 1 << 18])
@pytest.mark.parametrize("lengths", [(9, 14), (14, 9)])
def test_masks_and_scores(
    given: dict[str, Any], visible: Any, score: Any, tile: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the written-out formula, and every baseline near it, for each batch and head."""
    monkeypatch.setattr(ref, "TILE_CPU", tile)
    p = Problem.of(2, 4, lengths[0], 5, 2, lengths[1], **given)
    tensors = generate(p, 7)
    x = {name: array.astype(float) for name, array in tensors.items()}
    wanted = {name: np.zeros(p.shape(name)) for name in ("O", "logsumexp", "dQ", "dK", "dV")}
    q, k = np.arange(p.seq_q)[:, None] + p.seq_kv - p.seq_q, np.arange(p.seq_kv)[None, :]
    for b, h in np.ndindex(2, 4):
        s = p.scale * x["Q"][b, h] @ x["K"][b, h // 2].T
        scored, slope = score(s, b, h, q, k) if score else (s, np.ones_like(s))
        weights = np.exp(scored) * (visible(b, h, q, k) if visible else True)
        total = weights.sum(axis=1, keepdims=True)
        prob = weights / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            wanted["logsumexp"][b, h] = np.log(total[:, 0])
        wanted["O"][b, h] = prob @ x["V"][b, h // 2]
        dprob = x["dO"][b, h] @ x["V"][b, h // 2].T
        ds = prob * (dprob - (prob * dprob).sum(axis=1, keepdims=True)) * slope * p.scale
        wanted["dQ"][b, h] = ds @ x["K"][b, h // 2]
        wanted["dK"][b, h // 2] += ds.T @ x["Q"][b, h]
        wanted["dV"][b, h // 2] += prob.T @ x["dO"][b, h]
    found = reference(np, p, tensors)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-13, err_msg=name)
    for baseline in baselines(np, p, tensors, "f32"):
        for name, array in baseline.items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_score_that_is_not_finite() -> None:
    """It is refused where some query sees its key, and only there."""
    score = "s + 1 / (k - 3)"
    with pytest.raises(DataFault, match="not finite"):
        reference(np, Problem.of(1, 1, 5, 4, score=score), generate(Problem.of(1, 1, 5, 4), 3))
    reference(np, Problem.of(1, 1, 5, 4, score=score, mask="k != 3"), generate(Problem.of(1, 1, 5, 4), 3))


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
def test_a_sink_that_is_not_finite(logit: float) -> None:
    """It is refused: with NaN everywhere in the reference, any kernel that gives NaN would be right."""
    problem = Problem.of(1, 2, 5, 4, sinks="sinks[h]", tensors={"sinks": np.array([0, logit], np.float32)})
    with pytest.raises(DataFault, match=r'sinks "sinks\[h\]" are not finite'):
        reference(np, problem, generate(Problem.of(1, 2, 5, 4), 3))


@pytest.mark.parametrize("shift", [0, 3, -1, -6, -8, -9, -1000, 4, 5, 1000])
@pytest.mark.parametrize("arithmetic", ["f32", "p16", "tf32"])
def test_any_causal_shift(shift: int, arithmetic: str) -> None:
    """The reference is the written-out formula, each way of each class near it: top-left, shards that see all, some, nothing."""
    problem = Problem.of(1, 4, 9, 8, heads_kv=2, seq_kv=6, causal=True, causal_shift=shift, dtype="bfloat16")
    tensors = generate(problem, 5)
    found, wanted = reference(np, problem, tensors), plain(problem, tensors, shift)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-13, err_msg=name)
    blind = np.arange(9) + shift < 0
    assert np.isneginf(found["logsumexp"][:, :, blind]).all() and np.isfinite(found["logsumexp"][:, :, ~blind]).all()
    assert not found["O"][:, :, blind].any() and not found["dQ"][:, :, blind].any()
    assert blind.all() == (shift <= -9) and (not blind.all() or not any(found[name].any() for name in ("O", "dQ", "dK", "dV")))
    for way in baselines(np, problem, tensors, arithmetic):
        for name, array in way.items():
            np.testing.assert_allclose(array, wanted[name], rtol=0.03, atol=0.03, err_msg=name)


@pytest.mark.parametrize(
    "problem", [Problem.of(1, 2, 5, 4, heads_kv=1, causal=True, dtype="float64"), Problem.of(1, 1, 3, 2, dtype="float64", dim_v=3)]
)
def test_gradients_by_finite_differences(problem: Problem) -> None:
    """dQ, dK, dV are the derivatives of sum(O * dO)."""
    tensors = generate(problem, 5)
    found = reference(np, problem, tensors)
    for name in ("Q", "K", "V"):
        for at in np.ndindex(problem.shape(name)):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {n: a.copy() for n, a in tensors.items()}
                moved[name][at] += step
                ends.append(float((reference(np, problem, moved)["O"] * tensors["dO"]).sum()))
            assert found["d" + name][at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_are_the_whole_reference(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit some rows are computed: the same numbers, tile edges among them, and the share says how many."""
    problem = Problem.of(1, 2, 300, 4, heads_kv=1, seq_kv=700, causal=causal)
    tensors = generate(problem, 7)
    whole, whole_baselines = reference(np, problem, tensors), baselines(np, problem, tensors, "f32")
    monkeypatch.setattr(ref, "DENSE_SCORES", 1000)
    monkeypatch.setattr(ref, "SAMPLE", 50)
    found = reference(np, problem, tensors)
    assert found.rows is not None
    assert {0, 127, 128, 255, 256, 299} <= set(found.rows["O"].tolist())
    assert found.share == min(len(found.rows["O"]) / 300, len(found.rows["dK"]) / 700) < 0.3
    for name in whole.values:
        np.testing.assert_allclose(found[name], whole[name][:, :, found.rows[name]], rtol=1e-12, atol=1e-14)
        assert (found.select(name, whole[name]) == whole[name][:, :, found.rows[name]]).all()
    for few, all_rows in zip(baselines(np, problem, tensors, "f32"), whole_baselines, strict=True):
        for name, array in few.items():
            np.testing.assert_allclose(array, all_rows[name][:, :, found.rows[name]], rtol=1e-4, atol=1e-5)
    forward = {name: array for name, array in tensors.items() if name != "dO"}
    np.testing.assert_allclose(reference(np, problem, forward)["O"], found["O"], rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "unit"),
    [
        ("float32", "f32", 2**-24),
        ("float16", "f32", 2**-11),
        ("bfloat16", "f32", 2**-8),
        ("float16", "p16", 2**-11),
        ("float32", "tf32", 2**-11),
    ],
)
def test_baselines_lose_what_their_class_loses(dtype: str, arithmetic: str, unit: float) -> None:
    """Two forward and three backward ways (p16: four); each errs by its class's unit: not by far more, and not by nothing."""
    problem = Problem.of(1, 2, 65, 32, heads_kv=1, dtype=dtype, causal=True)
    tensors = generate(problem, 11)
    exact, ways = reference(np, problem, tensors), baselines(np, problem, tensors, arithmetic)
    forward, backward = ["O", "logsumexp"], ["dK", "dQ", "dV"]
    assert [sorted(way) for way in ways] == [forward] * 2 + [backward] * (4 if arithmetic == "p16" else 3)
    for way in ways:
        for name, array in way.items():
            finite = np.isfinite(exact[name])
            error = np.abs(array - exact[name])[finite].max() / np.abs(exact[name][finite]).max()
            if name == "logsumexp" and arithmetic != "tf32":
                assert 0 < error < 20 * 2**-24
            else:
                assert unit / 20 < error < 20 * unit, name


def test_baselines_differ_in_order() -> None:
    """Keys from last to first is another order of summation, so other last bits: else the three ways would be one."""
    problem = Problem.of(1, 1, 129, 64)
    forward = [way["O"] for way in baselines(np, problem, generate(problem, 1), "f32") if "O" in way]
    assert (forward[0] != forward[1]).any()
    np.testing.assert_allclose(forward[0], forward[1], atol=1e-6)


@pytest.mark.parametrize(("dim", "dim_v"), [(24, 9), (8, 20)])
@pytest.mark.parametrize("arithmetic", ["f32", "p16"])
def test_a_narrower_v_is_one_of_zeros(dim: int, dim_v: int, arithmetic: str) -> None:
    """Columns of zeros that fill up Q and K, or V and dO, change nothing in the others: of the reference and of every baseline."""
    own = Problem.of(1, 4, 33, dim, heads_kv=2, seq_kv=41, dtype="bfloat16", causal=True, dim_v=dim_v)
    whole = own.with_(head_dim=max(dim, dim_v), head_dim_v=None)
    x = generate(own, 3)
    filled = {name: np.zeros(whole.shape(name), array.dtype) for name, array in x.items()}
    for name, array in x.items():
        filled[name][..., : array.shape[-1]] = array
    ways = zip(baselines(np, own, x, arithmetic), baselines(np, whole, filled, arithmetic), strict=True)
    for found, wanted in ((reference(np, own, x), reference(np, whole, filled)), *ways):
        for name in ("O", "logsumexp", "dQ", "dK", "dV"):
            with contextlib.suppress(KeyError):  # a way is of one pass
                array, full = found[name], wanted[name]
                assert array.shape == own.shape(name)
                np.testing.assert_allclose(array, full[..., : array.shape[-1]], rtol=1e-6, atol=1e-7, err_msg=name)


def test_overflow_in_a_baseline_is_no_crash() -> None:
    """Gradients beyond float16 become infinite, quietly (warnings are errors in these tests)."""
    problem = Problem.of(1, 1, 8, 4, dtype="float16")
    tensors = {name: round_to(np, np.full(problem.shape(name), 3e4), "float16") for name in ("Q", "K", "V", "dO")}
    tensors["V"][0, 0, 0] = 0
    assert len(baselines(np, problem, tensors, "p16")) == 6
    assert baselines(np, Problem.of(1, 1, 2, 2, dtype="float64"), {}, "f32") == []


def test_bfloat16_rounding_is_ml_dtypes() -> None:
    """Every bfloat16 widens exactly; rounding agrees with ml_dtypes, halves, overflow and NaN included; uint16 bits are as good."""
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        exact = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(widen(np, bits.view(ml_dtypes.bfloat16), "bfloat16"), exact, equal_nan=True)
    assert np.array_equal(widen(np, bits, "bfloat16", "float32"), (bits.astype(np.uint32) << 16).view(np.float32), equal_nan=True)
    single = np.concatenate(
        [np.random.RandomState(0).randint(0, 2**32, 100000, np.uint64).astype(np.uint32), bits.astype(np.uint32) << 16 | 0x8000]
    )
    values = single.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16)
    found = round_to(np, values, "bfloat16")
    finite = ~np.isnan(values)
    assert (found.view(np.uint16)[finite] == wanted.view(np.uint16)[finite]).all()
    assert np.isnan(found[~finite].astype(np.float32)).all()


def test_tf32_keeps_ten_bits() -> None:
    """Values of ten bits stay; the half goes away from zero; infinity and NaN stay themselves."""
    values = np.array([1.0, 1 + 2**-10, 1 + 2**-11, -1 - 2**-11, 1 + 2**-12, np.inf, -np.inf, np.nan], np.float32)
    wanted = np.array([1.0, 1 + 2**-10, 1 + 2**-10, -1 - 2**-10, 1.0, np.inf, -np.inf, np.nan], np.float32)
    assert np.array_equal(tf32(np, values), wanted, equal_nan=True)


def test_a_16_bit_pass_may_be_given_an_exact_O() -> None:
    """verify gives it the reference's O. A kernel whose only error is its delta's, from that O, must be within one of the ways."""
    problem = Problem.of(2, 8, 3, 96, heads_kv=1, dtype="bfloat16", causal=True)
    tensors = generate(problem, 42)
    exact, ways = reference(np, problem, tensors), baselines(np, problem, tensors, "p16")
    errors = [np.abs(way["dQ"] - exact["dQ"]).max() for way in ways if "dQ" in way]
    assert len(errors) == 4
    stored = widen(np, round_to(np, exact["O"], "bfloat16"), "bfloat16")
    x = {name: widen(np, array, "bfloat16") for name, array in tensors.items()}
    wrong = ((stored - exact["O"]) * x["dO"]).sum(-1, keepdims=True)  # of delta
    prob = np.exp(problem.scale * x["Q"] @ x["K"].swapaxes(2, 3)) * np.tri(3)
    effect = problem.scale * (prob / prob.sum(-1, keepdims=True) * wrong) @ x["K"]
    assert 0 < np.abs(effect).max() <= 1.5 * errors[2]


def test_a_sample_of_rows_is_no_input_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a long sequence has some rows of O, and a backward pass reads all of them."""
    monkeypatch.setattr(ref, "DENSE_SCORES", 1 << 12)
    problem = Problem.of(1, 1, 300, 16)
    with pytest.raises(UsageFault, match="a backward pass alone") as caught:
        Oracle(problem, generate(problem, 1)).inputs_of("backward")
    assert "--mode both" in caught.value.hint


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_row_outside_the_sample_must_be_written(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of poison in a row that float64 is not computed for fails its tensor; masked rows, whose logsumexp is -inf, do not."""
    problem = Problem.of(1, 2, 300, 4, seq_kv=200, causal=True, dtype=dtype)
    tensors = generate(problem, 7)
    whole = reference(np, problem, tensors)
    assert np.isneginf(whole["logsumexp"][:, :, :100]).all()
    outputs = {name: round_to(np, whole[name], problem.tensor_dtype(name)) for name in whole.values}
    monkeypatch.setattr(ref, "DENSE_SCORES", 1000)
    monkeypatch.setattr(ref, "SAMPLE", 50)
    oracle = Oracle(problem, tensors)
    assert all(verdict.passed for verdict in oracle.judge(outputs, "f32").values())
    for name, array in outputs.items():
        rows = oracle.reference.rows
        assert rows is not None
        last = array.shape[2] - 1
        row = max(set(range(last)) - set(rows[name].tolist()))
        torn = array.copy()
        torn[0, 1, row : row + 1].reshape(-1).view(np.uint8)[-array.itemsize :] = 0xFF
        verdict = oracle.judge({**outputs, name: torn}, "f32")[name]
        assert not verdict.passed
        assert verdict.worst[:3] == (0, 1, row)
        assert "1 values of this head are not finite" in verdict.reason


@pytest.mark.parametrize(("factor", "drawn"), [(1.0, True), (100.0, True), (10000.0, False)])
def test_a_head_is_drawn_only_where_float32_tells_scores_apart(factor: float, drawn: bool) -> None:
    """At scores of 1e9 a right kernel may take the other one of two keys: a head newly drawn would accuse it now and then."""
    problem = Problem.of(2, 4, 64, 32, heads_kv=2)
    tensors = generate(problem, 3, input_scale=factor)
    bits = {name: array.view(np.uint32) for name, array in tensors.items()}
    parts = [Part.drawn(Oracle(problem, tensors), "forward", "K", bits, float("inf")) for _ in range(3)]
    assert [part is not None for part in parts] == [drawn] * 3
