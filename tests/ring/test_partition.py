"""Every (query, key) pair that the mask leaves is computed once, by one rank at one step, whatever the lengths and the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from harness.fault import UsageFault
from harness.partition import KINDS, Partition, rows
from harness.problem import Problem

SHAPES = [(12, 12, None), (13, 13, None), (7, 7, None), (3, 3, None), (1, 1, None), (9, 17, None), (17, 9, None), (11, 11, -4), (11, 11, 5)]


def visible(problem: Problem) -> np.ndarray:
    """The mask as a matrix of 0 and 1."""
    queries, keys = np.arange(problem.seq_q)[:, None], np.arange(problem.seq_kv)[None, :]
    seen = keys <= queries + problem.causal_shift if problem.causal else np.ones((problem.seq_q, problem.seq_kv), bool)
    return seen.astype(int)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_visible_pair_once(shape: tuple[int, int, int | None], ranks: int, kind: str, causal: bool) -> None:
    """Lengths that nothing divides, more ranks than rows, shifted masks."""
    problem = Problem.of(1, 1, shape[0], 8, seq_kv=shape[1], causal=causal, causal_shift=shape[2])
    made = Partition.of(problem, ranks, kind)
    count = np.zeros((problem.seq_q, problem.seq_kv), int)
    for rank in range(ranks):
        q_rows = np.array([i for chunk in made.queries[rank] for i in range(*chunk)], int)
        for step in range(ranks):
            k_rows = np.array([i for chunk in made.keys[made.source(rank, step)] for i in range(*chunk)], int)
            for task in made.tasks(rank, step):
                p = task.problem
                mine, theirs = q_rows[task.q_first :][: p.seq_q], k_rows[task.k_first :][: p.seq_kv]
                assert (len(mine), len(theirs)) == (p.seq_q, p.seq_kv)
                count[np.ix_(mine, theirs)] += visible(p)
    assert (count == visible(problem)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_own_keys_in_two_parts(shape: tuple[int, int, int | None], kind: str, causal: bool) -> None:
    """Together the parts are step 0, and the first part has no key twice."""
    problem = Problem.of(1, 1, shape[0], 8, seq_kv=shape[1], causal=causal, causal_shift=shape[2])
    made = Partition.of(problem, 3, kind)
    for rank in range(3):
        whole, parts = (np.zeros((rows(made.queries[rank]), rows(made.keys[rank])), int) for _ in range(2))
        first, later = made.own_tasks(rank)
        for found, tasks in ((whole, made.tasks(rank, 0)), (parts, (*first, *later))):
            for task in tasks:
                p = task.problem
                found[task.q_first :, task.k_first :][: p.seq_q, : p.seq_kv] += visible(p)
        assert (whole == parts).all()
        keys = [key for task in first for key in range(task.k_first, task.k_first + task.problem.seq_kv)]
        assert len(keys) == len(set(keys))


def test_zigzag_is_one_launch_a_step_and_the_same_work() -> None:
    """Step 0 is one triangle; a lower rank's keys are half as many, a higher rank's queries are; no other step is masked."""
    made = Partition.of(Problem.of(1, 1, 64, 8, causal=True), 4)
    assert made.kind == "zigzag"
    for rank in range(4):
        for step in range(4):
            (task,) = made.tasks(rank, step)
            p, lower = task.problem, made.source(rank, step) < rank
            assert p.causal == (step == 0)
            expected = (0, 0, 16, 16) if step == 0 else (0, 0, 16, 8) if lower else (8, 0, 8, 16)
            assert (task.q_first, task.k_first, p.seq_q, p.seq_kv) == expected


def test_contiguous_skips_what_nobody_sees() -> None:
    """Rank r has work in r + 1 steps."""
    made = Partition.of(Problem.of(1, 1, 64, 8, causal=True), 4, "contiguous")
    assert [sum(len(made.tasks(rank, step)) for step in range(4)) for rank in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_even(kind: str) -> None:
    """No rank has more than two rows more than another, and together they have all."""
    made = Partition.of(Problem.of(1, 1, 1001, 8), 6, kind)
    sizes = [rows(chunks) for chunks in made.queries]
    assert sum(sizes) == 1001 and max(sizes) - min(sizes) <= 2


def test_what_is_refused() -> None:
    """An unknown kind, and no ranks."""
    for words in ((2, "striped"), (0, None)):
        with pytest.raises(UsageFault):
            Partition.of(Problem.of(1, 1, 8, 8), *words)
