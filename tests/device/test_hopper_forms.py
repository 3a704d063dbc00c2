"""Forms of hopper that few problems choose: heads of a group that share a tile of queries, and a last round whose works are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import kernel
from harness.backends import CompileError
from harness.backends.host.backend import Host
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.dataset.storage import widen
from harness.fault import UsageFault
from harness.kernel import Kernel, find
from harness.problem import Problem
from harness.verbs.selftest.mutant import edited

BACKWARD = kernel.KERNELS / "22_hopper_backward.cu"


def outputs(backend: Host, kernel: Kernel, problem: Problem, **tiles: int) -> dict[str, Any]:
    """What a kernel writes."""
    given = generate.inputs(problem, 42, ("Q", "K", "V", "dO"))
    given["O"], given["logsumexp"] = given["dO"], np.full(problem.shape("logsumexp"), 6, np.float32)
    return Bound(backend, backend.load(kernel, problem, tiles), problem, given).run()


@pytest.mark.parametrize(
    ("dim", "dtype", "tiles"),
    [
        (64, "bfloat16", {"BLOCKS": 3}),
        (80, "float16", {"CONSUMERS": 3}),
        (128, "bfloat16", {"SPLITS": 2}),
        (256, "float16", {}),
    ],
)
def test_heads_that_share_a_tile(dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """O and logsumexp of tiles of one head, but for the references of the softmax, which a warp's rows raise together. Ragged tiles, and
    queries that see no key."""
    problem, forward = Problem.of(1, 16, 75, dim, 2, 140, dtype, True, causal_shift=-5), find("hopper", "forward")
    wanted = outputs(Host(), forward, problem, PACK=1, **tiles)
    for pack, sms in ((2, 132), (4, 2), (8, 3)):
        found = outputs(Host(7, "race" if sms == 2 else None, sms=sms), forward, problem, PACK=pack, **tiles)
        one, several = (widen(np, each["O"], dtype) for each in (wanted, found))
        assert np.abs(several - one).max() < 0.01 * np.abs(one).max(), pack
        np.testing.assert_allclose(found["logsumexp"], wanted["logsumexp"], rtol=1e-3, atol=1e-3)


def test_heads_of_several_key_heads_do_not_share_a_tile() -> None:
    """A tile is multiplied with one key head's keys."""
    problem = Problem.of(1, 6, 75, 64, 2, dtype="bfloat16")
    for pack in (0, 2, 4, 3):
        with pytest.raises((UsageFault, CompileError)):
            outputs(Host(), find("hopper", "forward"), problem, PACK=pack)


def far(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference, as a part of the largest value of its tensor."""
    several = {name: (widen(np, found[name], "bfloat16"), widen(np, one, "bfloat16")) for name, one in wanted.items()}
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in several.values())


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_last_round_that_is_divided(dim: int, tmp_path: Path) -> None:
    """Nine tiles of keys on two, four and more multiprocessors: dK and dV of the last one, or of all, are sums of parts. One that is left
    out shows."""
    problem, backward = Problem.of(1, 6, 130, dim, 3, 300, "bfloat16"), Kernel.read(BACKWARD)
    wanted = outputs(Host(), backward, problem, SPLITS=1)
    for sms, splits, check in ((2, 3, None), (4, 4, "race"), (5, 2, None), (132, 2, None)):
        assert far(outputs(Host(3, check, sms=sms), backward, problem, SPLITS=splits), wanted) < 0.01, sms
    path = tmp_path / "less_backward.cu"
    less = ("args.runtime[RUNTIME_SECTION], splits_of(args),\n", "args.runtime[RUNTIME_SECTION], splits_of(args) - 1,\n")
    path.write_text(edited(BACKWARD.read_text(), less))
    assert far(outputs(Host(sms=4), Kernel.read(path), problem, SPLITS=3), wanted) > 0.1


@pytest.mark.parametrize(
    ("dim", "dtype", "tiles"), [(64, "bfloat16", {"BLOCKS": 3}), (80, "float16", {"BLOCKS": 2}), (256, "bfloat16", {})]
)
def test_parts_that_a_launch_of_its_own_merges(dim: int, dtype: str, tiles: dict[str, int]) -> None:
    """O and logsumexp of keys that are not divided, of any number of parts: causal queries of which some see no key, more parts than tiles."""
    problem, forward = Problem.of(2, 8, 20, dim, 1, 700, dtype, True, causal_shift=-5), find("hopper", "forward")
    wanted = outputs(Host(), forward, problem, PACK=8, MERGE=0, PARTS=1, SPLITS=1, **tiles)
    for parts, check in ((2, None), (9, "race"), (40, None)):
        found = outputs(Host(7, check), forward, problem, PACK=8, MERGE=1, PARTS=parts, SPLITS=1, **tiles)
        one, several = (widen(np, each["O"], dtype) for each in (wanted, found))
        assert np.abs(several - one).max() < 0.01 * np.abs(one).max(), parts
        np.testing.assert_allclose(found["logsumexp"], wanted["logsumexp"], rtol=1e-3, atol=1e-3)
