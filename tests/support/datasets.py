"""A small data folder's problem, outputs and record, and what every fault about one must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.dataset.folder import STORAGE
from harness.fault import Fault
from harness.problem import Problem

SMALL = Problem.of(1, 2, 6, 4)


def fails(kind: type[Fault], word: str, call: Callable[[], Any]) -> Fault:
    """The fault of this kind that call raises; it says why, and has a hint."""
    with pytest.raises(kind, match=word) as caught:
        call()
    assert caught.value.why and caught.value.hint
    return caught.value


def outputs(problem: Problem = SMALL, fill: float = 1.0) -> dict[str, Any]:
    return {name: np.full(problem.shape(name), fill, STORAGE[problem.tensor_dtype(name)]) for name in ("O", "logsumexp", "dQ", "dK", "dV")}


def record(mode: str = "both", **changes: Any) -> dict[str, Any]:
    base = {
        "kernel": "naive",
        "mode": mode,
        "causal": False,
        "causal_shift": 0,
        "scale": 0.5,
        "dtype": "float32",
        "verdict": "PASS",
        "source_hash": "0",
    }
    return base | changes
