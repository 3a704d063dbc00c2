"""Every kernel of the tree over the verify matrix, on the CPU backend: shapes, types, masks, scales and schedules."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from harness import verify
from harness.kernel.kernel import Kernel, catalogue

BACKWARD = {kernel.name for kernel in catalogue() if kernel.pass_ == "backward"}


def parts(chosen: Kernel) -> int:
    """In how many parts a kernel's matrix is run, so that the tests spread over the cores: four of the full one for kernels that have a
    backward, one of the quick one for the steps between (`fa-cli verify --matrix full --device cpu` takes minutes for all of them)."""
    return 4 if chosen.name in BACKWARD else 1


@pytest.mark.parametrize(
    ("chosen", "part"), [pytest.param(k, part, id=f"{k.label}-{part}") for k in catalogue() for part in range(parts(k))]
)
def test_the_matrix(chosen: Kernel, part: int) -> None:
    """No case fails, in the default and in a seeded schedule."""
    from harness.run import open_backend

    backends = {seed: open_backend("cpu", None, seed) for seed in verify.SCHEDULES}
    matrix = "full" if chosen.name in BACKWARD else "quick"
    cases = verify.matrix(chosen, matrix, "cpu")[part :: parts(chosen)]
    results = [verify.run_case(backends[case.schedule], chosen, case, matrix) for case in cases]
    failed = [f"{r.case.describe()}: {r.message}\n  {r.repro}" for r in results if not r.passed]
    assert not failed, "\n".join(failed)
    assert len(results) > 10


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_matrix_is_what_it_says(chosen: Kernel, device: str) -> None:
    """All pairs of levels meet, within the limits of cases and compiles, and rows that see no key are among them."""
    cases = verify.matrix(chosen, "full", device)
    assert len(cases) <= {"cpu": 200, "cuda": 300}[device]
    assert len({(next(w for w in chosen.head_dims if w >= c.problem.head_dim), c.problem.causal, c.problem.dtype) for c in cases}) <= 24
    lengths = Counter((c.problem.seq_q, c.problem.seq_kv) for c in cases)
    assert all(lengths[s, s] for s in verify.EDGES)
    scales = [s for s in verify.SCALES[chosen.pass_] if s <= 10 or chosen.logits == float("inf")]
    dims = [d for d in verify.HEAD_DIMS if d <= chosen.head_dims[-1]]
    met = {(c.problem.head_dim, c.problem.dtype, c.input_scale) for c in cases}
    dtypes = ["float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes]  # as the files are
    for dim, dtype in itertools.product(dims, dtypes):
        assert any(m[:2] == (dim, dtype) for m in met), (dim, dtype)
    for dim, scale in itertools.product(dims, scales):
        assert any((m[0], m[2]) == (dim, scale) for m in met), (dim, scale)
    if chosen.cross:
        assert all(lengths[pair] for pair in verify.CROSS)
        assert not chosen.causal or any(c.problem.causal and c.problem.seq_q > c.problem.seq_kv for c in cases)
    if chosen.gqa:
        groups = {(c.problem.heads_q // c.problem.heads_kv, c.problem.dtype) for c in cases}
        assert groups == set(itertools.product(verify.GROUPS, dtypes))
    if device == "cpu":
        assert {c.schedule for c in cases} == set(verify.SCHEDULES)
