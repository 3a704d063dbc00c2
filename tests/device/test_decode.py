"""decode: which keys its blocks read, and how the parts divide them."""

from __future__ import annotations

import numpy as np
import pytest

from harness.array import to_host
from harness.backends import Backend
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.kernel import find, planner
from harness.kernel.plan import Device
from harness.problem import Problem

DECODE = find("decode", "forward")


@pytest.mark.parametrize("last", [0, 1])
def test_a_window_reads_its_tiles_only_and_all_parts_have_some(backend: Backend, last: int) -> None:
    """K and V are NaN outside the tiles that some row sees: a score of a hidden key may be NaN, but 0 times NaN of V would be in O."""
    problem = Problem.of(2, 4, 3, 64, 2, 4000, "bfloat16", True, mask="0 <= q - k and q - k <= 900")
    given = generate.inputs(problem, 42, ("Q", "K", "V"))
    tiles = {"PARTS": 4, "LAST": last}
    loaded = backend.load(DECODE, problem, tiles)
    size = int(loaded.plan.values["BLOCK_K"])
    first = (problem.seq_kv - problem.seq_q - 900) // size * size
    for name in ("K", "V"):
        given[name].view(np.uint16)[:, :, :first] = 0xFFFF
    bound = Bound(backend, loaded, problem, given)
    outputs = bound.run()
    assert first > 2900 and np.isfinite(outputs["O"].astype(np.float32)).all()
    sums = next(tensor for space, tensor in bound.workspaces if space.name == "sums")
    found = to_host(backend.get(sums.buffer)).view(np.float32)
    assert found.size == 2 * 4 * 3 * 4 and np.isfinite(found).all(), "a part had no key, though there are 15 tiles for 4"


def test_the_columns_of_v_are_counted_apart() -> None:
    """Head dims 192 and 128: a stage holds tiles of both widths, a part's O that of V."""
    problem = Problem.of(1, 8, 1, 192, 1, 8192, "bfloat16", dim_v=128)
    plan = planner.plan(DECODE, problem, Device("cuda", "", arch="sm_90", sms=132, shared_optin=232448))
    assert dict(plan.macros)["HEAD_DIM"] == "256" and dict(plan.macros)["HEAD_DIM_V"] == "128"
    parts, stages = int(plan.values["PARTS"]), int(plan.values["STAGES"])
    assert plan.launches[0].shared == 2 * 16 * 256 + stages * 64 * 2 * (256 + 128)
    assert next(space.elements for space in plan.workspaces if space.name == "partial") == 8 * parts * 128
