"""Torch peers on a CPU: right against float64, and the operator that ran is the one that is named."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from harness import peers
from harness.check import baselines, budget, reference
from harness.dataset import generate as dataset
from harness.dataset.named import drawn
from harness.fault import EnvironmentFault, KernelFault, UsageFault
from harness.peers import flashinfer, flex, on_torch, sdpa
from harness.problem import Problem

torch = pytest.importorskip("torch")

SHAPES = [
    {"seq": 65, "dim": 40},
    {"seq": 64, "dim": 32, "causal": True},
    {"seq": 48, "dim": 16, "heads": 4, "heads_kv": 2, "causal": True},
    {"seq": 33, "seq_kv": 80, "dim": 24, "heads": 6, "heads_kv": 2},
    {"seq": 40, "seq_kv": 70, "dim": 16, "causal": True, "scale": -0.3},
    {"seq": 70, "seq_kv": 40, "dim": 16, "causal": True},  # the first 30 rows see no key
    {"seq": 40, "seq_kv": 70, "dim": 16, "causal": True, "causal_shift": 0},  # torch's is_causal
    {"seq": 70, "seq_kv": 40, "dim": 16, "causal": True, "causal_shift": 0},
    {"seq": 40, "seq_kv": 70, "dim": 16, "heads_kv": 1, "causal": True, "causal_shift": -25},
    {"seq": 40, "seq_kv": 70, "dim": 16, "causal": True, "causal_shift": -40},  # no row sees a key
    {"seq": 50, "dim": 64, "dtype": "bfloat16", "causal": True},
    {"seq": 50, "dim": 64, "dtype": "float16"},
]
SDPA = {peer.name: peer for peer in sdpa.PEERS}


def problem(**shape: Any) -> Problem:
    """A small problem of two batches."""
    return Problem.of(**{"batch": 2, "heads": 2, **shape})


def here(name: str) -> sdpa.Sdpa:
    """A GPU peer, told to run on the CPU."""
    return dataclasses.replace(SDPA[name], device="cpu")


def check(peer: Any, shape: Problem, arithmetic: str = "f32") -> None:
    """Both passes of a peer within the error budget; every output there, in its storage type."""
    inputs = dataset.generate(shape, 3)
    expected = reference.reference(np, shape, inputs)
    ways = baselines.baselines(np, shape, inputs, arithmetic)
    for pass_, names in (("forward", {"O"}), ("backward", {"dQ", "dK", "dV"})):
        prepared = peer.prepare(shape, inputs, pass_)
        outputs = prepared.outputs()
        assert names <= set(outputs)
        for name, array in outputs.items():
            assert (array.shape, array.dtype) == (shape.shape(name), dataset.STORAGE[shape.tensor_dtype(name)])
        verdicts = budget.compare(expected, outputs, ways)
        assert all(v.max_abs <= v.budget for v in verdicts.values()), [budget.message(v) for v in verdicts.values()]
        assert 0 < prepared.enqueue()() < 10 and 0 < prepared.call() < 10
        assert prepared.graph() is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_cpu_is_right(shape: dict[str, Any]) -> None:
    """SDPA on the CPU, both passes, for causal, grouped heads, seq_q != seq_kv, a scale and 16-bit types."""
    made = problem(**shape)
    check(peers.find("torch-cpu"), made, "f32" if made.dtype == "float32" else "p16")


@pytest.mark.parametrize("shape", SHAPES[:10], ids=str)
def test_math_backend_is_right(shape: dict[str, Any]) -> None:
    """The code behind torch-math, with its explicit mask and enable_gqa, run on the CPU."""
    check(here("torch-math"), problem(**shape))


def test_repeated_key_heads_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch-efficient does with grouped heads, run on the CPU: torch is given as many key heads as query heads; gradients are summed."""
    run, heads = torch.nn.functional.scaled_dot_product_attention, list[int]()

    def seen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert "enable_gqa" not in options
        heads.append(k.shape[1])
        return run(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    made = problem(heads=6, heads_kv=2, causal=True)
    check(dataclasses.replace(SDPA["torch-cpu"], repeats_heads=peers.find("torch-efficient").repeats_heads), made)
    assert set(heads) == {6}


@pytest.mark.parametrize(
    ("seq_kv", "shift", "masked"), [(30, 0, False), (70, 0, False), (40, None, False), (70, None, True), (40, 3, True)]
)
def test_a_mask_tensor_only_where_torch_has_no_mask(monkeypatch: pytest.MonkeyPatch, seq_kv: int, shift: int | None, masked: bool) -> None:
    """Torch's is_causal is top-left, causal_shift 0 of any lengths; every other shift needs its mask written out."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **options: given.update(options))
    made = problem(seq=40, seq_kv=seq_kv, causal=True, causal_shift=shift)
    here("torch-math").attention(made, "cpu")(None, None, None)
    assert (given["attn_mask"] is not None, given["is_causal"]) == (masked, not masked)


def test_ran_names_the_operator() -> None:
    """torch-cpu says which operator ran; a forced math backend is seen to be math; backward names the backward operator."""
    shape = problem(seq=64, dim=32)
    inputs = dataset.generate(shape, 0)
    assert "_scaled_dot_product_flash_attention_for_cpu, torch" in SDPA["torch-cpu"].prepare(shape, inputs, "forward").ran
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in SDPA["torch-cpu"].prepare(shape, inputs, "backward").ran
    for pass_ in ("forward", "backward"):
        assert "softmax" in here("torch-math").prepare(shape, inputs, pass_).ran


def test_ran_names_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's version does not say which cuDNN the loader found."""
    monkeypatch.setattr(sdpa, "operators", lambda step: ("aten::_scaled_dot_product_cudnn_attention",))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92801)
    assert SDPA["torch-cudnn"].ran(lambda: (), "forward").endswith(f", torch {torch.__version__}, cuDNN 9.28.1")


class Unforced(sdpa.Sdpa):
    """A peer that believes it forced a backend and did not."""

    def forced(self) -> Any:
        """Nothing is forced."""
        return contextlib.nullcontext()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", ["torch-math", "torch-flash"])
def test_another_backend_is_caught(name: str, pass_: str) -> None:
    """Where torch ran another operator than was forced, there is no peer of that name, and the message says what ran."""
    fields = {f.name: getattr(SDPA[name], f.name) for f in dataclasses.fields(SDPA[name])} | {"device": "cpu"}
    shape = problem(seq=64, dim=32, dtype="float16")
    with pytest.raises(UsageFault, match="did not run") as caught:
        Unforced(**fields).prepare(shape, dataset.generate(shape, 0), pass_)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in caught.value.why


def test_a_backend_torch_refuses_is_a_refusal() -> None:
    """No efficient backend on a CPU: torch's own words are the reason."""
    shape = problem(seq=32, dim=32)
    with pytest.raises(UsageFault, match="torch-efficient refuses") as caught:
        here("torch-efficient").prepare(shape, dataset.generate(shape, 0), "forward")
    assert "backend" in caught.value.why


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_storage_crosses_unchanged(dtype: str) -> None:
    """numpy -> torch -> numpy keeps every bit, NaN and infinities too; the tensor is a copy, of read-only arrays as well."""
    values = np.array([[1.5, -0.0, np.inf, np.nan], [3.0e-5, -2.0, 65504.0, 1 / 3]]).astype(dataset.STORAGE[dtype])
    tensor = on_torch.to_torch(values, dtype)
    assert tensor.dtype == getattr(torch, dtype)
    back = on_torch.to_host(tensor, dtype)
    assert back.dtype == values.dtype and back.tobytes() == values.tobytes()
    assert float(tensor[1, 1]) == -2.0
    values.flags.writeable = False
    on_torch.to_torch(values, dtype).zero_()
    assert values.tobytes() == back.tobytes()


class Foreign:
    """An array of another module, as CuPy's are: torch knows it by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array, self.view = array, lambda dtype: Foreign(array.view(dtype))

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_of_another_module_are_copied(dtype: str) -> None:
    """By their bits, to torch and back, and whatever the strides: neither side sees what the other writes later."""
    values = dataset.generate(Problem.of(1, 2, 5, 8, dtype=dtype), 1)["Q"]
    tensor = on_torch.to_torch(Foreign(values.view(np.uint16) if dtype == "bfloat16" else values), dtype)  # type: ignore[arg-type]
    assert tensor.dtype == getattr(torch, dtype) and tensor.data_ptr() != values.ctypes.data
    back = on_torch.to_device(np, tensor, dtype)
    turned = on_torch.to_device(np, tensor.transpose(1, 2), dtype)
    assert back.dtype == (np.uint16 if dtype == "bfloat16" else values.dtype) and back.tobytes() == values.tobytes()
    assert turned.tobytes() == values.transpose(0, 2, 1, 3).tobytes() and turned.shape == (1, 5, 2, 8)
    tensor.zero_()
    assert back.tobytes() == values.tobytes() and values.view(np.uint8).any()


class Broken(sdpa.Sdpa):
    """A peer whose attention raises."""

    error: Any = None

    def attention(self, problem: Problem, device: Any) -> Any:
        """Raise."""
        raise type(self).error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), KernelFault),
        (AssertionError("head_dim must be a multiple of 8"), UsageFault),
        (NotImplementedError(), UsageFault),
        (EnvironmentFault("no"), EnvironmentFault),
    ],
)
def test_what_libraries_throw_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception, fault: type[Exception]) -> None:
    """A crash is KernelFault with its text (a lost context is known by it), a refusal UsageFault, our own faults pass."""
    monkeypatch.setattr(Broken, "error", error)
    peer = Broken(name="broken", device="cpu", dtypes=("float32",), backend="")
    shape = problem(seq=8, dim=8)
    with pytest.raises(fault) as caught:
        peer.prepare(shape, dataset.generate(shape, 0), "forward")
    assert str(error) in str(caught.value)


def test_rows_first_layout_and_logsumexp() -> None:
    """A library of (B, S, H, D) tensors that gives a logsumexp gets them so and its outputs come back as ours; +inf means no key."""

    class RowsFirst(on_torch.TorchPeer):
        def attention(self, problem: Problem, device: Any) -> Any:
            def attend(q: Any, k: Any, v: Any) -> Sequence[Any]:
                assert q.shape == (2, 70, 2, 16) and k.shape == (2, 40, 2, 16) and q.is_contiguous()
                s = torch.einsum("bqhd,bkhd->bhqk", q, k) * problem.scale
                s = s.masked_fill(~torch.ones(70, 40, dtype=torch.bool).tril(-30), float("-inf"))
                lse = s.logsumexp(-1)
                p = (s - lse[..., None]).exp().nan_to_num(0.0)
                return torch.einsum("bhqk,bkhd->bqhd", p, v), lse.masked_fill(lse == float("-inf"), float("inf"))

            return attend

        def ran(self, step: Any, pass_: str) -> str:
            return "einsum"

    peer = RowsFirst(name="rows-first", device="cpu", dtypes=("float32",), modules=(), install="", heads_first=False)
    shape = problem(seq=70, seq_kv=40, dim=16, causal=True)
    inputs = dataset.generate(shape, 3)
    outputs = peer.prepare(shape, inputs, "forward").outputs()
    expected = reference.reference(np, shape, inputs)
    verdicts = budget.compare(expected, outputs, baselines.baselines(np, shape, inputs, "f32"))
    assert set(verdicts) == {"O", "logsumexp"} and all(v.passed for v in verdicts.values())
    assert (outputs["logsumexp"][:, :, :30] == -np.inf).all()


def test_the_deterministic_form_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass runs under torch's deterministic algorithms, without the fill that would be timed; afterwards all is as it was."""
    seen = []
    real = torch.autograd.grad

    def grad(*given: Any, **options: Any) -> Any:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory))
        return real(*given, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    shape = problem(seq=33, dim=16)
    inputs = dataset.generate(shape, 1)
    for made, state in ((SDPA["torch-cpu"].made_deterministic(), (True, False)), (SDPA["torch-cpu"], (False, True))):
        seen.clear()
        prepared = made.prepare(shape, inputs, "backward")
        prepared.enqueue()()
        assert set(seen) == {state} and prepared.ran.endswith(", deterministic") == state[0]
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


#: Masks and scores of every form, as a kernel's matrix has them.
FORMS = [
    {"mask": "-5 <= q - k <= 37", "score": "3.0 * tanh(s / 3.0)"},
    {"mask": "q // 48 == k // 48", "score": "s + exp2(-h - 1) * (k - q)"},
    {"mask": "not (k < 70 or h == 0) or abs(q - k) % 5 != 3", "score": "s if s > 0 else 0.25 * min(s, h_kv, -1)"},
    {"mask": "doc[b, q] == doc[b, k] and 3 < seq_q", "score": "max(s, 0.5) - slope[h] * abs(q - k)", "causal": True},
    {"causal": True},
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_flex_has_the_same_masks_and_scores(form: dict[str, Any]) -> None:
    """The functions that the peer makes of a problem, in flex_attention itself, which is eager here."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    problem = drawn(Problem.of(2, 4, 97, 16, 2, 97 if "doc" in form.get("mask", "") else 130, **form))
    inputs = dataset.generate(problem, 3)
    mask, score = flex.functions(problem, torch.device("cpu"))
    block = mask and module.create_block_mask(mask, problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv, device="cpu")
    q, k, v = (torch.from_numpy(inputs[name]) for name in ("Q", "K", "V"))
    found = module.flex_attention(q, k, v, score_mod=score, block_mask=block, enable_gqa=True)
    expected = reference.reference(np, problem, inputs)["O"]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


class _Wrapper:
    """FlashInfer's paged wrappers as their documentation has them: NHD pools, CSR tables, rows of all sequences behind each other."""

    _backend = "fa2"

    def __init__(self, space: Any, layout: str, **more: Any) -> None:
        assert layout == "NHD" and space.dtype == torch.uint8

    def plan(self, *given: Any, causal: bool = False, **kind: Any) -> None:
        *rows, starts, pages, last, _, _, _, self.size = given
        self.rows = rows[0].tolist() if rows else list(range(len(last) + 1))
        self.causal, self.scale = causal, kind["sm_scale"]
        self.cap = kind.get("logits_soft_cap")
        self.pages = [pages[starts[b] : starts[b + 1]].long() for b in range(len(last))]
        self.last = last.tolist()

    def run(self, q: Any, pools: tuple[Any, Any], return_lse: bool) -> tuple[Any, Any]:
        made = []
        for b, pages in enumerate(self.pages):
            count = (len(pages) - 1) * self.size + self.last[b]
            k, v = (pool[pages].flatten(0, 1)[:count].double().repeat_interleave(q.shape[1] // pool.shape[2], 1) for pool in pools)
            s = torch.einsum("qhd,khd->hqk", q[self.rows[b] : self.rows[b + 1]].double(), k) * self.scale
            s = s if self.cap is None else self.cap * torch.tanh(s / self.cap)
            if self.causal:
                s = s.masked_fill(torch.ones(s.shape[1:]).triu(count - s.shape[1] + 1).bool(), -torch.inf)
            made.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v).to(q.dtype))
        return torch.cat(made), None


@pytest.mark.parametrize("shape", [
    {"seq": 1, "seq_kv": 48},
    {"seq": 3, "seq_kv": 64, "causal": True, "score": "20.0 * tanh(s / 20.0)"},
    {"seq": 2, "seq_kv": (96, 33), "page_size": 32, "causal": True},
])  # fmt: skip
def test_flashinfer_is_planned_for_the_problem(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """Rows, pages, the last page's keys and scale: a wrapper that does what FlashInfer's documentation says gives O."""
    p = problem(heads=4, heads_kv=2, dim=32, dtype="bfloat16", **shape)
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    library = type("flashinfer", (), dict.fromkeys(names, _Wrapper))
    monkeypatch.setattr(flashinfer, "module", lambda *_: library)
    inputs = dataset.inputs(p, 1, ("Q", "K", "V"))
    given = (on_torch.to_torch(inputs[name], p.dtype).transpose(1, 2).contiguous() for name in "QKV")
    step = flashinfer.PEERS[0].start(p, dict(zip("QKV", given, strict=True)), "forward")
    (o,) = step()
    assert flashinfer.PEERS[0].ran(step, "forward").startswith("flashinfer, fa2, flashinfer-python")
    wanted = reference.reference(np, p, inputs)["O"]
    assert np.abs(o.transpose(1, 2).double().numpy() - wanted).max() < 0.01
