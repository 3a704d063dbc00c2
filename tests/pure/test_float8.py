"""Problems of 8 bits: what an element is worth, how numbers are rounded, and what the class p8 is judged by."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from harness.check.baselines import _products_of_8_bits
from harness.check.oracle import Oracle, arithmetic_of
from harness.dataset import generate
from harness.dataset.storage import round_to, through_e4m3, widen
from harness.fault import UsageFault
from harness.problem import DESCALES, Problem


def test_rounding_is_that_of_ml_dtypes() -> None:
    """To nearest even, also of subnormal numbers; beyond 448 it is 448; every byte is widened exactly."""
    draw = np.random.RandomState(1)
    x = np.ldexp(draw.randn(1 << 16), draw.randint(-14, 9, 1 << 16)).astype(np.float32)
    wanted = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(through_e4m3(np, x), wanted.astype(np.float32))
    assert np.array_equal(round_to(np, x, "float8_e4m3").view(np.uint8), wanted.view(np.uint8))
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(widen(np, every, "float8_e4m3"), every.astype(np.float64), equal_nan=True)


def test_a_problem_of_8_bits() -> None:
    """One byte an element, O in bfloat16, descales of each batch and key head: 1, or one number for all, or of their shape."""
    plain = Problem.of(2, 4, 64, 80, heads_kv=2, dtype="fp8")
    assert plain.dtype == "float8_e4m3" and plain.tensor_bytes("Q") == 2 * 4 * 64 * 80 and plain.tensor_dtype("O") == "bfloat16"
    assert [each.name for each in plain.tensors] == list(DESCALES.values()) and plain.descales == {1.0} and not plain.hashes
    assert plain.with_(heads_q=2, heads_kv=1).tensors[0].shape == (2, 1)
    assert Problem.from_folder(plain.folder) == plain
    half = plain.with_(tensors={"descale_v": 0.5})
    assert half != plain and half.descales == {1.0, 0.5} and half.hashes
    with pytest.raises(UsageFault, match="descale_q has the shape"):
        plain.with_(tensors={"descale_q": np.array([1.0, 2.0])})


def test_the_reference_is_of_descaled_elements() -> None:
    """Scores with the descales of Q and K, O with that of V: float64 of the same numbers in float64 files."""
    draw = np.random.RandomState(2)
    values = {name: np.exp2(draw.randn(1, 2)).astype(np.float32) for name in DESCALES.values()}
    problem = Problem.of(1, 4, 33, 16, heads_kv=2, dtype="float8_e4m3", causal=True, tensors=values)
    inputs = generate.inputs(problem, 3, ("Q", "K", "V"))
    wide = {name: inputs[name].astype(np.float64) for name in "QKV"}
    for name in "QKV":
        worth = values[DESCALES[name]].astype(np.float64).repeat(2 if name == "Q" else 1, axis=1)
        wide[name] = wide[name] * worth[..., None, None]
    exact = Oracle(Problem.of(1, 4, 33, 16, heads_kv=2, dtype="float64", causal=True), wide).reference
    mine = Oracle(problem, inputs).reference
    assert np.abs(mine["O"] - exact["O"]).max() < 1e-12 and np.abs(mine["logsumexp"] - exact["logsumexp"]).max() < 1e-12


def test_products_of_8_bits() -> None:
    """Small integers are exact; of others an error of 13 bits, not of 23."""
    draw = np.random.RandomState(4)
    a, b = (draw.randint(-8, 9, (1, 20, 80)).astype(np.float32) for _ in range(2))
    assert np.array_equal(_products_of_8_bits(np, a, b)[0], a[0] @ b[0].T)
    a, b = (through_e4m3(np, draw.randn(1, 20, 80).astype(np.float32)) for _ in range(2))
    error = np.abs(_products_of_8_bits(np, a, b)[0] - a[0].astype(np.float64) @ b[0].T.astype(np.float64)).max()
    assert 2.0**-12 < error < 2.0**-6


def test_the_class_sees_what_is_wrong() -> None:
    """The reference itself passes; a descale that is 2 % off, one key too many and a P that is cut off do not."""
    problem = Problem.of(1, 2, 256, 64, dtype="float8_e4m3")
    assert arithmetic_of(problem) == "p8"
    inputs = generate.inputs(problem, 5, ("Q", "K", "V"))
    oracle = Oracle(problem, inputs)
    right = oracle.forward_outputs
    assert all(verdict.passed for verdict in oracle.judge(right, "p8").values())
    more = Oracle(problem.with_(tensors={"descale_q": 1.02}), inputs).forward_outputs
    assert not oracle.judge(more, "p8")["logsumexp"].passed
    less = {"O": (right["O"].astype(np.float32) * 0.98).astype(right["O"].dtype), "logsumexp": right["logsumexp"]}
    assert not oracle.judge(less, "p8")["O"].passed
    longer = {name: np.concatenate([inputs[name], inputs[name][:, :, :1]], 2) if name != "Q" else inputs[name] for name in "QKV"}
    assert not oracle.judge(Oracle(problem.with_(seq_kv=257), longer).forward_outputs, "p8")["logsumexp"].passed
