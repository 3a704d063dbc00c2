"""decode's sweep, which takes part of too many problems."""

from __future__ import annotations

import itertools

from harness.problem import DTYPE_BYTES
from harness.verbs import sweep

GB = 1e9
VALUES = ((1, 4, 16, 64), (1024, 8192, 32768, 131072), (1, 4, 8, 16), (1, 4, 8), (64, 128, 256))


def test_the_sweep_has_all_pairs() -> None:
    """Every two values of batch, keys, queries, group and head dim occur together, in some hundred problems that a run has time for."""
    problems = [problem for _, problem in sweep.load("decode").shapes]
    rows = [(p.batch, p.seq_kv, p.seq_q, p.heads_q // p.heads_kv, p.head_dim) for p in problems]
    assert 90 <= len(rows) == len(set(rows)) <= 110
    for (i, some), (j, others) in itertools.combinations(enumerate(VALUES), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(some, others)), (i, j)


def test_the_sweep_flushes_what_the_cache_would_hold() -> None:
    """Cold times are taken of all problems whose K and V are no larger than 1.5 L2 caches of an H200, of no others; none has over 2.2 GB."""
    found = sweep.load("decode")
    for test, p in found.shapes:
        read = 2 * p.batch * p.heads_kv * p.seq_kv * p.head_dim * DTYPE_BYTES[p.dtype]
        assert (read < 0.075 * GB) == ("cold" in found.measures(test)) and read < 2.2 * GB, test
