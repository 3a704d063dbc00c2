"""Ranks that take turns in one process: every output is the whole problem's, within the budget of its kernel's class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.backends import Backend, pick
from harness.check import choose
from harness.check.oracle import Oracle, oracle_for
from harness.check.request import Request
from harness.kernel import KERNELS
from harness.partition import Partition
from harness.problem import MODES, Problem
from harness.ring import program, rank, timing
from harness.ring.rank import Rank, run_together
from harness.ring.transport import local


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The CPU's: what moves data is the subject, not what computes."""
    return pick("cpu")


def ring(backend: Backend, compute: str, oracle: Oracle, ranks: int, kind: str | None, overlap: bool = True) -> dict[str, Any]:
    """All outputs of both passes by a ring, put together."""
    problem = oracle.problem
    partition = Partition.of(problem, ranks, kind)
    contender = choose.contender(compute, Request(mode="both"))
    made = [Rank(backend, partition, contender, oracle.inputs, transport, overlap) for transport in local(backend, ranks)]
    found: dict[str, Any] = {}
    for pass_ in MODES["both"]:
        run_together([getattr(each, pass_) for each in made])
        for each in made:
            for name, part in each.outputs(pass_).items():
                whole = found.setdefault(name, np.zeros(problem.shape(name), part.dtype))
                chunks = each.partition.keys[each.rank] if name in ("dK", "dV") else each.partition.queries[each.rank]
                whole[:, :, [i for chunk in chunks for i in range(*chunk)]] = part
    return found


CASES = [
    ("fa2", Problem.of(1, 1, 96, 32), 3, None),
    ("fa2", Problem.of(1, 2, 101, 32, causal=True), 4, None),
    ("fa2", Problem.of(2, 4, 45, 40, heads_kv=2, causal=True, dtype="bfloat16"), 3, "contiguous"),
    ("fa2", Problem.of(1, 2, 5, 32, causal=True), 4, None),
    ("fa2", Problem.of(1, 2, 3, 32, causal=True), 8, "contiguous"),
    ("fa2", Problem.of(1, 2, 70, 32, seq_kv=33, causal=True), 2, None),
    ("naive", Problem.of(1, 2, 40, 59, dtype="float16", causal=True, scale=-0.2), 2, None),
    ("mma_qreg_async", Problem.of(1, 4, 133, 64, heads_kv=1, causal=True, dtype="bfloat16"), 4, None),
    ("mma_qreg_async", Problem.of(1, 2, 130, 64, dtype="float16"), 1, None),
    ("hopper+mma_qreg_async", Problem.of(1, 4, 133, 64, heads_kv=2, causal=True, dtype="bfloat16"), 3, None),
]


@pytest.mark.parametrize(("compute", "problem", "ranks", "kind"), CASES, ids=str)
def test_a_ring_is_right(backend: Backend, compute: str, problem: Problem, ranks: int, kind: str | None) -> None:
    """Uneven shards, empty shards, grouped heads, queries that see no key, pitches, three types, both partitions."""
    oracle = oracle_for(problem, backend, "both")
    kernel = choose.contender(compute, Request()).kernels["forward"]
    outputs = ring(backend, compute, oracle, ranks, kind)
    for verdict in oracle.judge(outputs, kernel.arithmetic_for(problem.dtype)).values():
        assert verdict.passed, (verdict.tensor, verdict.place, verdict.reason)


def test_the_same_bits_with_and_without_overlap(backend: Backend) -> None:
    """Merging follows the steps, not the arrival of messages."""
    oracle = oracle_for(Problem.of(1, 2, 50, 32, causal=True), backend, "both")
    first, second = (ring(backend, "fa2", oracle, 3, None, overlap) for overlap in (True, False))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def test_the_error_does_not_grow_with_the_ranks(backend: Backend) -> None:
    """Each step rounds its O, dQ, dK and dV to bfloat16 and is summed in float32: eight ranks lose at most twice what one does."""
    oracle = oracle_for(Problem.of(1, 2, 192, 64, causal=True, dtype="bfloat16"), backend, "both")
    errors = {}
    for ranks in (1, 2, 8):
        verdicts = oracle.judge(ring(backend, "mma_qreg_async", oracle, ranks, None), "p16")
        errors[ranks] = {name: verdict.max_abs for name, verdict in verdicts.items()}
    for name, least in errors[1].items():
        assert max(errors[2][name], errors[8][name]) <= 2 * least + 1e-6, (name, errors)


@pytest.mark.parametrize(("right", "wrong"), [("merged.kept * out_reg[i]", "out_reg[i]"), ("if (!first) ", "")])
def test_a_wrong_merge_is_seen(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """A merge that forgets the weight of what was summed before, and one that reads a sum which nobody has written."""
    text = (KERNELS / "ring" / "merge.cu").read_text()
    spoiled = tmp_path / "merge.cu"
    spoiled.write_text(text.replace(right, wrong))
    assert spoiled.read_text() != text
    monkeypatch.setattr(program, "MERGE", spoiled)
    oracle = oracle_for(Problem.of(1, 1, 64, 32), backend, "both")
    verdicts = oracle.judge(ring(backend, "fa2", oracle, 2, None), "f32")
    assert not verdicts["O"].passed and verdicts["logsumexp"].passed


def test_a_prediction_hides_messages_behind_the_steps_beside_them() -> None:
    """K and V of step 0 beside its 3 s, dK and dV of step 1 beside the own keys behind it; without overlap all add up."""
    spans = [rank.Span("compute", step, "attention", 0.0, seconds) for step, seconds in ((0, 3.0), (1, 5.0), (2, 1.0))]
    spans += [rank.Span("communication", 0, "K V", 0.0, 0.0, 400), rank.Span("communication", 1, "dK dV", 0.0, 0.0, 800)]
    samples = [[timing.Sample(9.0, (4.0, 5.0), (0.0, 0.0), (400, 800), tuple(spans))]]
    assert timing.predicted(samples, True, 100.0).median == 4.0 + 5.0 + 8.0
    assert timing.predicted(samples, False, 100.0).median == 9.0 + 4.0 + 8.0
    assert timing.predicted(samples, True, 1e9).median == pytest.approx(9.0) and not timing.predicted(samples, True, 1e9).lines
    longer = replace(samples[0][0], compute=(4.1, 5.0))  # a median of a whole step is not the sum of its parts
    assert timing.predicted([[longer]], True, 1e9).hidden == 1.0
