"""Clusters of a header: planned, held to what a GPU takes, compiled into the entry, and launched by the plain call."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from planted import top

from harness.backends import nvrtc
from harness.backends.host.backend import Host
from harness.backends.launch import View, prepare
from harness.backends.protocol import Call, Loaded
from harness.fault import UsageFault
from harness.kernel import Device, Kernel, planner
from harness.kernel.signature import check_parameters
from harness.problem import Problem

DEVICE = Device("cpu", "a processor")
PROBLEM = Problem.of(2, 4, 100, 64, dtype="float16")
CLUSTERED = (
    top(title='"a test"', dtypes='["float16"]', arch='"sm_90a"')
    + """\
// [tile]
// BLOCK_K = 32
// [[launch]]
// entry = "prepare"
// grid = "batch"
// block = 32
// [[launch]]
// entry = "forward"
// grid = ["round_up(ceil_div(seq_kv, BLOCK_K), 2)", "heads_q"]
// block = 256
// cluster = 2
// ///
#include <fa/cluster.cuh>
extern "C" __global__ void prepare(const __grid_constant__ fa::Args args) {}
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(256, 1) forward(const __grid_constant__ fa::Args args) {
    fa::cluster_sync();
    if (threadIdx.x == 0) static_cast<int*>(args.O.data)[blockIdx.x] = blockIdx.x % CLUSTER;
}
"""
)
DIMS = "__cluster_dims__(CLUSTER, 1, 1) "


def clustered(folder: Path, *edits: tuple[str, str]) -> Kernel:
    """CLUSTERED with some edits."""
    text = CLUSTERED
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "mine_forward.cu"
    path.write_text(text)
    return Kernel.read(path)


def test_clusters_are_planned(tmp_path: Path) -> None:
    """A launch without the key has none; the macro is the compile's; a call carries them."""
    kernel = clustered(tmp_path)
    plan = planner.plan(kernel, PROBLEM, DEVICE)
    assert [(launch.grid, launch.cluster) for launch in plan.launches] == [((2, 1, 1), (1, 1, 1)), ((4, 4, 1), (2, 1, 1))]
    assert dict(plan.macros)["CLUSTER"] == "2"
    view = View(0, 0, 0, 0)
    steps = prepare(Host(), Loaded(kernel, plan, {}), PROBLEM).steps(dict.fromkeys(("Q", "K", "V", "O", "logsumexp"), view))
    assert [step.cluster for step in steps if isinstance(step, Call)] == [(1, 1, 1), (2, 1, 1)]
    check_parameters(kernel)


def test_a_tile_value_may_be_the_size(tmp_path: Path) -> None:
    """Of any number of dimensions; --tile then changes it, and there is one macro."""
    kernel = clustered(tmp_path, ("// BLOCK_K = 32", "// BLOCK_K = 32\n// CLUSTER = 4"), ("cluster = 2", 'cluster = ["CLUSTER // 2", 2]'))
    for size in (2, 4, 8):
        plan = planner.plan(kernel, Problem.of(2, 4, 128, 64, dtype="float16"), DEVICE, {"CLUSTER": size})
        assert [math.prod(launch.cluster) for launch in plan.launches] == [1, size]
        assert [value for name, value in plan.macros if name == "CLUSTER"] == [str(size)]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("cluster = 2", "cluster = 3", r"a grid of \(4, 4, 1\) blocks is no multiple of its clusters of \(3, 1, 1\)"),
        ("cluster = 2", "cluster = [4, 4]", r"clusters would be of \(4, 4, 1\) blocks; a GPU takes 1 to 8 in all"),
        ("cluster = 2", "cluster = 0", "a GPU takes 1 to 8 in all"),
        ("cluster = 2", 'cluster = "two"', "unknown name|two"),
        ("cluster = 2", "cluster = 2.5", r"mine_forward.cu:\d+: cluster in launch must be"),
        ('"sm_90a"', '">=sm_80"', r"mine_forward.cu:21: clusters of blocks need sm_90, and arch admits >=sm_80"),
        ("BLOCK_K = 32", "BLOCK_K = 32\n// CLUSTER = 4", "cluster and the tile value CLUSTER give 2, 4 blocks"),
        ("block = 32\n", "block = 32\n// cluster = 1\n", "cluster and the tile value CLUSTER give 1, 2 blocks"),
    ],
)
def test_wrong_clusters(old: str, new: str, word: str, tmp_path: Path) -> None:
    """Refused before any launch."""
    with pytest.raises(UsageFault, match=word) as caught:
        planner.plan(clustered(tmp_path, (old, new)), PROBLEM, DEVICE)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (DIMS, "", r"mine_forward.cu:25: forward needs __cluster_dims__\(CLUSTER, 1, 1\): its \[\[launch\]\] has clusters"),
        ("(CLUSTER, 1, 1)", "(4, 1, 1)", r"forward needs __cluster_dims__\(CLUSTER, 1, 1\)"),
        ("void prepare", f"void {DIMS}prepare", r"mine_forward.cu:24: prepare has __cluster_dims__, and its \[\[launch\]\] no cluster"),
    ],
)
def test_an_entry_has_its_launch_s_clusters(old: str, new: str, word: str, tmp_path: Path) -> None:
    """The plain launch takes them from the entry, so one without would run its blocks apart."""
    with pytest.raises(UsageFault, match=word):
        check_parameters(clustered(tmp_path, (old, new)))


def test_the_machine_code_has_the_clusters(tmp_path: Path) -> None:
    """NVRTC writes them into the entry's attributes (EIATTR_CTA_PER_CLUSTER), which every launch follows."""
    kernel = clustered(tmp_path)
    cubin = nvrtc.compile_(kernel, planner.plan(kernel, PROBLEM, DEVICE), "sm_90a").cubin
    attribute = bytes.fromhex("043d0c00") + b"".join(size.to_bytes(4, "little") for size in (2, 1, 1))
    assert cubin.count(attribute) == 1


def test_what_the_race_check_has_no_clocks_for(tmp_path: Path) -> None:
    """A cluster of more than 1024 threads is refused, not checked in part."""
    kernel = clustered(tmp_path, ("cluster = 2", "cluster = 4"), ("block = 256", "block = 288"))
    with pytest.raises(UsageFault, match="forward has clusters of 4 blocks of 288 threads; it keeps 1024 clocks"):
        Host(check="race").load(kernel, PROBLEM)
