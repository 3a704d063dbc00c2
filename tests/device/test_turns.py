"""Blocks that take turns (hopper and hopper_keys, --deterministic): gradients have the same bits however many blocks run, in whatever schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import kernel
from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.fault import KernelFault
from harness.kernel import Kernel
from harness.problem import Problem
from harness.verbs.selftest.mutant import edited

SOURCE, KEYS = (kernel.KERNELS / f"{name}_backward.cu" for name in ("22_hopper", "25_hopper_keys"))
#: Grouped heads, other lengths of queries and keys, ragged tiles, keys that no query sees and queries that see no key.
SHAPES = {"full": (300, 400, False, 0), "causal": (400, 520, True, -30), "long queries": (520, 300, True, None)}


def bits(
    folder: Path, dim: int, shape: str, blocks: int, tiles: dict[str, int], seed: int = 0, fault: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """dQ, dK and dV from a grid of so many blocks."""
    path = folder / f"of{blocks}_backward.cu"
    path.write_text(edited((KEYS if dim == 256 else SOURCE).read_text(), ('"min(sms,', f'"min({blocks},'), *fault))
    seq_q, seq_kv, causal, shift = SHAPES[shape]
    problem = Problem.of(1, 4, seq_q, dim, 2, seq_kv, "bfloat16", causal, causal_shift=shift if causal else None)
    given = generate.inputs(problem, 42, ("Q", "K", "V", "dO"))
    given["O"], given["logsumexp"] = given["dO"], np.full(problem.shape("logsumexp"), 6, np.float32)
    backend = Host(seed)
    chosen = Kernel.read(path).made_deterministic()
    outputs = Bound(backend, backend.load(chosen, problem, tiles), problem, given).run()
    return b"".join(outputs[name].tobytes() for name in ("dQ", "dK", "dV"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dim, backwards", [(64, 0), (64, 1), (128, 0), (128, 1), pytest.param(256, 0, marks=pytest.mark.days(14))])
def test_the_same_bits(dim: int, shape: str, backwards: int, splits: int, tmp_path: Path) -> None:
    """Of two blocks, of three and of one for each work, in seeded schedules; also with one text of a tile in place of two."""
    order = {"SPLITS": splits} | ({"BACKWARDS": backwards} if dim < 256 else {})
    wanted = bits(tmp_path, dim, shape, 132, order)
    assert bits(tmp_path, dim, shape, 2, order, seed=7) == wanted
    assert bits(tmp_path, dim, shape, 132, order, seed=5) == wanted
    assert bits(tmp_path, dim, shape, 3, order | ({"AHEAD": 8} if dim < 256 else {}), seed=3) == wanted


def test_a_storer_that_is_behind(tmp_path: Path) -> None:
    """It passes a tile's turn while the reduction of the next one runs. On the CPU a storer is never behind: here it is told that it is."""
    behind = ("!is_staged()", "(wait_staged(), false)")
    wanted = bits(tmp_path, 64, "causal", 3, {})
    assert bits(tmp_path, 64, "causal", 3, {}, fault=(behind,)) == wanted
    early = ("if (later) fa::bulk_wait<1>();", "if (later) fa::bulk_wait<2>();")
    with pytest.raises(KernelFault, match="a bulk reduction that began in this turn is not complete"):
        bits(tmp_path, 64, "causal", 3, {}, fault=(behind, early))
