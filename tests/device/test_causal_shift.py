"""Kernels at causal shifts other than bottom-right: torch's alignment, and shards that see some keys, every key or none."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from harness import backends
from harness.backends import Backend
from harness.check.contender import run_kernel
from harness.check.oracle import Oracle
from harness.dataset.generate import generate
from harness.fault import DataFault
from harness.kernel import find
from harness.problem import READS, Problem
from harness.verbs import run

#: One kernel of each way to walk over the keys: a scores matrix, tiles on CUDA cores, mma fragments, cp.async pipelines.
KERNELS = (
    ("naive", "forward"),
    ("naive", "backward"),
    ("fa2", "forward"),
    ("fa2", "backward"),
    ("mma", "forward"),
    ("mma_qreg_async", "forward"),
    ("mma_qreg_async", "backward"),
)
#: (queries, keys, shift): tiles of 64 and 128 rows that see all, part or nothing, and lengths that no tile divides.
SHARDS = (
    (90, 150, 0),
    (150, 90, 0),
    (150, 90, 37),
    (150, 90, -70),
    (128, 128, 128),
    (128, 128, -127),
    (128, 128, -128),
    (90, 150, 10**9),
    (150, 90, -(10**9)),
)


@functools.cache
def oracle(dtype: str, shard: tuple[int, int, int]) -> Oracle:
    """The float64 reference of a shard with grouped heads, computed once for all kernels of a dtype."""
    queries, keys, shift = shard
    problem = Problem.of(1, 2, queries, 32, 1, keys, dtype, True, causal_shift=shift)
    return Oracle(problem, generate(problem, 42))


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize(("name", "pass_"), KERNELS)
def test_kernels_follow_the_shift(backend: Backend, name: str, pass_: str, shard: tuple[int, int, int]) -> None:
    """Every tensor within its budget; a query that sees no key gives O = 0 and logsumexp = -inf, a key no query sees no gradient."""
    kernel = find(name, pass_)
    made = oracle("float32" if "float32" in kernel.dtypes else "bfloat16", shard)
    given = {**made.inputs, **made.forward_outputs}
    result = run_kernel(backend, kernel, made, {tensor: given[tensor] for tensor in READS[pass_]})
    assert result.passed, [f"{v.tensor}: {v.reason} at {v.place}" for v in result.verdicts.values() if not v.passed]
    queries, keys, shift = shard
    blind, unseen = np.arange(queries) + shift < 0, np.arange(keys) > queries - 1 + shift
    for tensor, array in result.outputs.items():
        hidden = array[:, :, unseen if tensor in ("dK", "dV") else blind].astype(np.float32)
        assert (hidden == (-np.inf if tensor == "logsumexp" else 0)).all(), tensor


def test_a_backward_run_needs_the_forward_of_its_shift(tmp_path: Path) -> None:
    """run keeps the shift of its problem and records it in outputs.json, where a backward run looks for it."""
    top_left = Problem.of(1, 1, 9, 8, seq_kv=20, causal=True, causal_shift=0)
    options = {"causal": True, "data_root": tmp_path, "device": "cpu"}
    forward = run.run(["naive"], "forward", problem=top_left, **options)[0]
    assert forward.passed and forward.problem == top_left
    assert json.loads((tmp_path / top_left.folder / "outputs.json").read_text())["causal_shift"] == 0
    assert run.run(["naive"], "backward", problem=top_left, **options)[0].passed
    with pytest.raises(DataFault, match="another run's forward") as caught:
        run.run(["naive"], "backward", problem=top_left.with_(causal_shift=None), **options)
    assert "causal_shift was 0 then and is 11 now" in caught.value.why


@pytest.mark.days(14)
def test_sections_are_of_no_more_heads_than_there_are() -> None:
    """Of one key 2^22 heads have SECTION megabytes; times 1024 tiles of the heads of a group that is 2^32, and zero in 32 bits."""
    problem = Problem.of(1, 128, 1024, 64, 1, 1, "float16", True)
    made = Oracle(problem, generate(problem, 42))
    given = {tensor: made.inputs[tensor] for tensor in READS["forward"]}
    result = run_kernel(backends.pick("cpu"), find("hopper", "forward"), made, given, {"SECTION": 1024})
    assert all(verdict.passed for verdict in result.verdicts.values())
