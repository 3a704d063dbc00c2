"""Every GPU peer that is installed, on a GPU: right, timed, captured. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness import peers
from harness.check import baselines, budget, reference
from harness.check.contender import PEER_BUDGETS
from harness.check.tensors import Outputs, put
from harness.dataset import generate as draws
from harness.dataset.named import drawn
from harness.fault import UsageFault
from harness.problem import Problem

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

SHAPES = [
    {"seq": 256, "dim": 64},
    {"seq": 256, "dim": 128, "causal": True},
    {"seq": 200, "dim": 64, "heads": 4, "heads_kv": 2, "causal": True},
    {"seq": 130, "seq_kv": 300, "dim": 64, "causal": True, "scale": 0.2},
    {"seq": 300, "seq_kv": 130, "dim": 64, "causal": True},  # the first 170 rows see no key
    {"seq": 77, "dim": 40},
]
#: What every peer takes of the shapes above, so that a refusal of everything is seen.
TAKEN = SHAPES[:2]


@pytest.mark.parametrize("name", peers.usual("cuda"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peer_is_right(name: str, dtype: str, shape: dict[str, Any]) -> None:
    """Both passes against float64, or a refusal; the first shapes are refused by nobody who has the dtype."""
    peer = peers.find(name)
    assert peer is not None
    if absent := peer.absent("cuda"):
        pytest.skip(": ".join(absent))
    problem = Problem.of(**{"batch": 2, "heads": 2, "dtype": dtype, **shape})
    inputs = draws.generate(problem, 3)
    expected = reference.reference(np, problem, inputs)
    ways = baselines.baselines(np, problem, inputs, "f32" if dtype == "float32" else "p16")
    for pass_ in peer.passes:
        try:
            prepared = peer.prepare(problem, inputs, pass_)
        except UsageFault as fault:
            assert shape not in TAKEN or dtype not in peer.dtypes, str(fault)
            pytest.skip(fault.why)
        if name == "fa4" and pass_ == "backward" and problem.head_dim == 40:
            pytest.xfail("flash-attn-4 4.0.0b36 gives a wrong dQ in the last tile at head dim 40, seen on an H200")
        outputs = prepared.outputs()
        assert set(outputs) >= ({"O"} if pass_ == "forward" else {"dQ", "dK", "dV"})
        for verdict in budget.compare(expected, outputs, ways).values():
            assert verdict.max_abs <= PEER_BUDGETS * verdict.budget, f"{prepared.ran}: {budget.message(verdict)}"
        assert prepared.ran
        assert prepared.peak_bytes is not None and prepared.peak_bytes >= sum(inputs[t].nbytes for t in ("Q", "K", "V"))


#: By what a peer's `forms` has.
FORMS: dict[str, dict[str, Any]] = {
    "window": {"mask": "0 <= q - k <= 37"},
    "softcap": {"score": "3.0 * tanh(s / 3.0)"},
    "mask": {"mask": "doc[b, q] == doc[b, k] or k % 7 == h", "causal": True},
    "score": {"score": "s + exp2(-h - 1) * (k - q)", "mask": "q // 48 == k // 48"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", peers.usual("cuda"))
def test_masks_and_scores(name: str, form: str) -> None:
    """Those that a peer takes against float64, both passes; a library that has no such backward pass says so, and the others refuse."""
    peer = peers.find(name)
    assert peer is not None
    if absent := peer.absent("cuda"):
        pytest.skip(": ".join(absent))
    problem = drawn(Problem.of(2, 2, 256, 64, dtype="bfloat16", **FORMS[form]))
    inputs = draws.generate(problem, 3)
    expected, ways = reference.reference(np, problem, inputs), baselines.baselines(np, problem, inputs, "p16")
    for pass_ in peer.passes:
        try:
            prepared = peer.prepare(problem, inputs, pass_)
        except UsageFault as fault:
            taken = {form, "mask" if "mask" in FORMS[form] else "score"} & {*peer.forms}  # type: ignore[attr-defined]  # Library has them
            assert not taken or "is given no" not in fault.why
            pytest.skip(fault.why)
        for verdict in budget.compare(expected, prepared.outputs(), ways, arithmetic="p16").values():
            assert verdict.max_abs <= PEER_BUDGETS * verdict.budget, f"{prepared.ran}: {budget.message(verdict)}"


@pytest.mark.parametrize("name", peers.usual("cuda"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_data_that_stay_on_the_gpu(name: str, dtype: str) -> None:
    """CuPy's inputs give the same O as numpy's, and are copied: no run changes them, nor outputs of an earlier run."""
    cupy = pytest.importorskip("cupy")
    peer = peers.find(name)
    assert peer is not None
    if absent := peer.absent("cuda"):
        pytest.skip(": ".join(absent))
    problem = Problem.of(2, 2, 256, 64, dtype=dtype)
    inputs = draws.generate(problem, 3)
    placed = {tensor: put(cupy, array) for tensor, array in inputs.items()}
    for pass_ in peer.passes if dtype in peer.dtypes else ():
        host, device = (peer.prepare(problem, given, pass_) for given in (inputs, placed))
        wanted, values = host.outputs(), device.outputs(cupy)
        got = Outputs(problem, {}, values)
        assert list(got) == list(wanted)
        for tensor, array in wanted.items():
            assert (got[tensor].shape, got[tensor].dtype) == (array.shape, array.dtype)
            assert pass_ == "backward" or got[tensor].tobytes() == array.tobytes()
        for array in values.values():
            array.fill(0)
        device.enqueue()()
        assert not any(array.any() for array in values.values())
        assert all(cupy.asnumpy(array).tobytes() == inputs[tensor].tobytes() for tensor, array in placed.items())
        assert device._x["Q"].data_ptr() != placed["Q"].data.ptr  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", peers.usual("cuda"))
def test_peer_is_timed(name: str) -> None:
    """A run takes device time, and about the same replayed from a graph where it can be captured."""
    peer = peers.find(name)
    assert peer is not None
    if absent := peer.absent("cuda"):
        pytest.skip(": ".join(absent))
    problem = Problem.of(4, 16, 2048, 64, dtype="bfloat16", causal=True)
    inputs = draws.generate(problem, 0)
    for pass_ in peer.passes:
        prepared = peer.prepare(problem, inputs, pass_)
        direct = min(prepared.enqueue()() for _ in range(10))
        assert 1e-5 < direct < 0.1 and prepared.call() < 0.1
        replay = prepared.graph()
        print(
            name, pass_, prepared.ran, f"{direct * 1e3:.3f} ms", "no graph" if replay is None else f"{replay()() * 1e3:.3f} ms as a graph"
        )
        if replay is not None:
            assert min(replay()() for _ in range(10)) < 1.5 * direct
