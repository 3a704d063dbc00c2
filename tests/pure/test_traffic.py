"""experiments/hopper_backward/traffic.py: what the walks of hopper's backward pass take from memory."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from harness.kernel import find, planner
from harness.problem import Problem

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "hopper_backward" / "traffic.py"


@pytest.fixture(scope="module")
def traffic() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("traffic", SCRIPT)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", ["hopper", "hopper_cluster"])
def test_walks_have_every_pair_of_tiles_once(traffic: ModuleType, splits: int, inner: bool, name: str) -> None:
    """Of two sequences, two key heads and groups of three: as many works meet a tile of queries as there are tiles of keys that it sees."""
    found = Counter(tile for walk in traffic.walks(traffic.KERNELS[name], 2, 6, 2, 500, splits, 8, inner) for tile in walk)
    seen = {tile: min(4, tile // 2 + 1) for tile in range(8)}  # of 64 queries and 128 keys
    assert found == {(kv_head, head, tile): seen[tile] for kv_head in range(4) for head in range(3) for tile in range(8)}


def test_what_fits_comes_once(traffic: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of all tiles misses each once; one of a tile, for works that run one after another, all but those at the borders of works."""
    costs = traffic.KERNELS["hopper"]
    found = traffic.simulate(costs, 1, 4, 1, 512, 1, 64, True)
    assert found.missed == pytest.approx(4 * 8 / (4 * (8 + 6 + 4 + 2)))
    alone = costs._replace(units=1)
    monkeypatch.setattr(traffic, "KEPT", traffic.ROWS * costs.dim * traffic.ELEMENT)
    assert traffic.simulate(alone, 1, 4, 1, 512, 1, 64, False).missed == 1
    assert traffic.simulate(alone, 1, 1, 1, 512, 1, 64, False).cached == pytest.approx(20 * costs.tile + 4 * costs.work)


def test_heads_inside_a_tile_share_more(traffic: ModuleType) -> None:
    """The lowest of the mixed problems: what decides whether the order is worth measuring."""
    outer, inner = (traffic.simulate(traffic.KERNELS["hopper"], 2, 128, 8, 1024, 1, 64, order) for order in (False, True))
    assert inner.missed < 0.5 * outer.missed and inner.gigabytes < 0.5 * outer.gigabytes
    assert inner.cached == pytest.approx(outer.cached, rel=0.01) and inner.time < outer.time


@pytest.mark.parametrize("name", ["hopper", "hopper_cluster"])
def test_costs_are_the_headers(traffic: ModuleType, name: str) -> None:
    """Those of the causal form of the kernel's head dim, there in nanoseconds."""
    costs = traffic.KERNELS[name]
    problem = Problem.of(1, 4, 512, costs.dim, 4, dtype="bfloat16", causal=True)
    known = planner.names(find(name, "backward"), problem, traffic.H200)
    assert (known["units"], known["shared_ns"]) == (costs.units, round(1e3 * costs.tile))
    divided = planner.names(find(name, "backward"), problem, traffic.H200, {"SPLITS": 2})
    assert divided["split_ns"] == round(1e3 * costs.split)
    assert known["work_ns"] - (known["split_ns"] if name == "hopper_cluster" else 0) == round(1e3 * costs.work)
    assert known["other_ns"] == pytest.approx(1e3 * traffic.others(costs, 1, 4, 512), abs=1)
