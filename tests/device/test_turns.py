"""Blocks that take turns (step 18 backward, --deterministic): dQ has the same bits however many blocks run, in whatever schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.fault import KernelFault
from harness.kernel import kernel
from harness.kernel.kernel import Kernel
from harness.problem import Problem
from harness.verbs.selftest.mutant import edited

SOURCE = kernel.KERNELS / "18_hopper_backward.cu"
#: Grouped heads, other lengths of queries and keys, ragged tiles, keys that no query sees and queries that see no key.
SHAPES = {"full": (300, 400, False, 0), "causal": (400, 520, True, -30), "long queries": (520, 300, True, None)}


def dq_bits(
    folder: Path, dim: int, shape: str, blocks: int, tiles: dict[str, int], seed: int = 0, fault: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """dQ from a grid of so many blocks."""
    path = folder / f"of{blocks}_backward.cu"
    path.write_text(edited(SOURCE.read_text(), ('"min(sms,', f'"min({blocks},'), *fault))
    seq_q, seq_kv, causal, shift = SHAPES[shape]
    problem = Problem.of(1, 4, seq_q, dim, 2, seq_kv, "bfloat16", causal, causal_shift=shift if causal else None)
    given = generate.inputs(problem, 42, ("Q", "K", "V", "dO"))
    given["O"], given["logsumexp"] = given["dO"], np.full(problem.shape("logsumexp"), 6, np.float32)
    backend = Host(seed)
    chosen = Kernel.read(path).made_deterministic()
    return bytes(Bound(backend, backend.load(chosen, problem, tiles), problem, given).run()["dQ"].tobytes())


@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_same_bits(dim: int, shape: str, backwards: int, tmp_path: Path) -> None:
    """Of two blocks and of one for each tile of keys, in seeded schedules; also whether reductions are staged or the consumers' own."""
    order = {"BACKWARDS": backwards}
    wanted = dq_bits(tmp_path, dim, shape, 132, order)
    assert dq_bits(tmp_path, dim, shape, 2, order, seed=7) == wanted
    assert dq_bits(tmp_path, dim, shape, 132, order, seed=5) == wanted
    if dim < 256:
        staged = {"DQ_STAGED": 1, "KV_STAGES": 1 if dim == 128 else 2, "AHEAD": 8}
        for tiles in (staged, staged | {"DQ_STAGED": 0}):
            assert dq_bits(tmp_path, dim, shape, 3, order | tiles, seed=3) == wanted


def test_a_storer_that_is_behind(tmp_path: Path) -> None:
    """It passes a tile's turn while the reduction of the next one runs. On the CPU a storer is never behind: here it is told that it is."""
    peek = "!fa::mbarrier_test_parity(dq_full + consumer, q.position % 2)"
    behind = (peek, "(fa::mbarrier_wait_parity(dq_full + consumer, q.position % 2), false)")
    wanted = dq_bits(tmp_path, 64, "causal", 3, {})
    assert dq_bits(tmp_path, 64, "causal", 3, {}, fault=(behind,)) == wanted
    early = ("if (STAGED && later) fa::bulk_wait<1>();", "if (STAGED && later) fa::bulk_wait<2>();")
    with pytest.raises(KernelFault, match="a bulk reduction that began in this turn is not complete"):
        dq_bits(tmp_path, 64, "causal", 3, {}, fault=(behind, early))
