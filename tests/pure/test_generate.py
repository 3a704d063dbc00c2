"""Inputs in memory: the folders' recipe for what is small, one that threads share for what is large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.dataset import generate as draws
from harness.dataset import normals
from harness.dataset.storage import STORAGE
from harness.problem import Problem


def test_small_problems_have_the_recipe_of_data_folders() -> None:
    """To the byte."""
    problem = Problem.of(1, 2, 5, 16)
    for name, array in draws.inputs(problem, 7, ("Q", "K", "V"), 2.0).items():
        assert np.array_equal(array, draws.generate(problem, 7, ("Q", "K", "V"), 2.0)[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_problems(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal, of the dtype, another for each tensor, chunk and seed, the same whatever the threads and the tensors asked for."""
    monkeypatch.setattr(draws, "ABOVE", 1 << 16)
    monkeypatch.setattr(draws, "CHUNK", 1 << 14)
    problem = Problem.of(2, 4, 256, 64, dtype=dtype)
    found = draws.inputs(problem, 7, ("Q", "K", "V"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = draws.inputs(problem, 7, draws.INPUTS, 3.0)
    assert np.array_equal(found["V"], again["V"]) and not np.array_equal(found["Q"], again["Q"])
    assert not np.array_equal(found["V"], draws.inputs(problem, 8, ("V",))["V"])
    chunks = np.concatenate([again[name].astype(np.float32).reshape(-1, 1 << 14) for name in ("V", "dO", "Q", "K")])
    assert len({chunk.tobytes() for chunk in chunks}) == len(chunks) == 32
    for name, scale in (("Q", 3), ("V", 1), ("dO", 1)):
        values = again[name].astype(np.float64)
        assert values.shape == problem.shape(name) and again[name].dtype == STORAGE[dtype]
        assert abs(values.mean()) < 0.02 * scale and values.std() == pytest.approx(scale, rel=0.01)


@pytest.mark.parametrize("dtype", STORAGE)
def test_the_numbers_are_randns(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, over blocks that threads compute and tensors that end inside one; also where no block is sure, and all are redrawn."""
    problem = Problem.of(1, 3, 1111, 101, heads_kv=1, dtype=dtype)  # odd sizes: a pair of numbers may lie in two tensors
    total = sum(int(np.prod(problem.shape(name))) for name in draws.INPUTS)
    monkeypatch.setattr(normals, "MANY", 1 << 16)
    random, told = np.random.RandomState(11), list[str]()
    wanted = {name: random.randn(*problem.shape(name)).astype(STORAGE[dtype]).tobytes() for name in draws.INPUTS}
    assert {name: array.tobytes() for name, array in draws.one_by_one(problem, 11, progress=told.append)} == wanted
    assert draws.generate(problem, 11, ("V",))["V"].tobytes() == wanted["V"]
    assert len(told) <= 101 and told[0].endswith("/100 draws Q") and told[-1] == "100/100 draws dO" and total > 2 * normals.BLOCK
    if dtype == "float32":
        again, redrawn = normals._again, list[int]()
        monkeypatch.setattr(normals, "_again", lambda state, count: redrawn.append(count) or again(state, count))
        monkeypatch.setattr(normals, "NEAR", 2.0**-25)
        assert {name: array.tobytes() for name, array in draws.one_by_one(problem, 11)} == wanted
        assert len(redrawn) >= 3


def test_another_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numpy whose randn rounds otherwise, as with fused multiply-adds, is drawn from as it is."""
    polar = normals._polar
    assert normals._as_here(5)

    def fused(uniform: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = (2.0 * uniform - 1.0).astype(np.longdouble)
        r = (x[0::2] * x[0::2] + x[1::2] * x[1::2]).astype(float)
        kept = (r < 1) & (r != 0)
        x1, x2, r = (each[kept].astype(float) for each in (x[0::2], x[1::2], r))
        return (np.sqrt(-2.0 * np.log(r) / r)[:, None] * np.stack([x2, x1], axis=1)).reshape(-1)

    monkeypatch.setattr(normals, "_polar", fused)
    assert not normals._as_here(5)
    monkeypatch.setattr(normals, "_polar", lambda uniform: polar(uniform) * (1 + 2.0**-40))
    monkeypatch.setattr(normals, "MANY", 1)
    values = np.concatenate(list(normals.normals(5, 100, STORAGE["float32"])))[:100]
    assert values.tobytes() == np.random.RandomState(5).randn(100).astype(np.float32).tobytes()
