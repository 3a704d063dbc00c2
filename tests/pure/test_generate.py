"""Inputs in memory: the folders' recipe for what is small, one that threads share for what is large."""

from __future__ import annotations

import numpy as np
import pytest

from harness.dataset import folder as dataset
from harness.dataset import generate as draws
from harness.problem import Problem


def test_small_problems_have_the_recipe_of_data_folders() -> None:
    """To the byte."""
    problem = Problem.of(1, 2, 5, 16)
    for name, array in draws.inputs(problem, 7, ("Q", "K", "V"), 2.0).items():
        assert np.array_equal(array, dataset.generate(problem, 7, ("Q", "K", "V"), 2.0)[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_problems(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal, of the dtype, another for each tensor, chunk and seed, the same whatever the threads and the tensors asked for."""
    monkeypatch.setattr(draws, "ABOVE", 1 << 16)
    monkeypatch.setattr(draws, "CHUNK", 1 << 14)
    problem = Problem.of(2, 4, 256, 64, dtype=dtype)
    found = draws.inputs(problem, 7, ("Q", "K", "V"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = draws.inputs(problem, 7, dataset.INPUTS, 3.0)
    assert np.array_equal(found["V"], again["V"]) and not np.array_equal(found["Q"], again["Q"])
    assert not np.array_equal(found["V"], draws.inputs(problem, 8, ("V",))["V"])
    chunks = np.concatenate([again[name].astype(np.float32).reshape(-1, 1 << 14) for name in ("V", "dO", "Q", "K")])
    assert len({chunk.tobytes() for chunk in chunks}) == len(chunks) == 32
    for name, scale in (("Q", 3), ("V", 1), ("dO", 1)):
        values = again[name].astype(np.float64)
        assert values.shape == problem.shape(name) and again[name].dtype == dataset.STORAGE[dtype]
        assert abs(values.mean()) < 0.02 * scale and values.std() == pytest.approx(scale, rel=0.01)
