"""The PyTorch operator on every device found: opcheck, gradcheck, gradients, strides, empty tensors, aliases, errors."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.check.oracle import Oracle
from harness.dataset.storage import STORAGE
from harness.kernel import Device, catalogue
from harness.problem import Problem

torch = pytest.importorskip("torch")
from harness import torch_op  # noqa: E402
from harness.torch_op import attention, call, operator  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is said once is said once a test, and no call of another test is kept."""
    call._said.clear()
    operator._KEPT.clear()
    yield


def made(device: Any, problem: Problem, seed: int = 0) -> list[Any]:
    """Q, K, V and dO of a problem, contiguous; Q, K and V want gradients."""
    random = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(problem.shape(name), generator=random, dtype=torch.float64).to(device, DTYPES[problem.dtype])
        for name in ("Q", "K", "V", "dO")
    ]
    return [t.requires_grad_() for t in tensors[:3]] + tensors[3:]


def to_numpy(tensor: Any, dtype: str) -> Any:
    """A tensor as a storage array of the host."""
    tensor = tensor.detach().cpu().contiguous()
    if dtype == "bfloat16":
        return tensor.view(torch.int16).numpy().view(STORAGE[dtype])
    return tensor.numpy()


def judge(problem: Problem, inputs: list[Any], outputs: dict[str, Any], arithmetic: str = "f32") -> None:
    """Each output within its error budget, by the float64 reference on the inputs' values."""
    names = ("Q", "K", "V", "dO")
    oracle = Oracle(problem, {name: to_numpy(t, problem.dtype) for name, t in zip(names, inputs, strict=True)})
    arrays = {name: to_numpy(t, problem.tensor_dtype(name)) for name, t in outputs.items()}
    for name, verdict in oracle.judge(arrays, arithmetic).items():
        assert verdict.passed, (name, verdict)
        assert outputs[name].shape == problem.shape(name)


def both(kernel: str, problem: Problem, inputs: list[Any], **options: Any) -> dict[str, Any]:
    """O, logsumexp and the gradients of a call."""
    q, k, v, do = inputs
    o, lse = attention(q, k, v, causal=problem.causal, kernel=kernel, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    return {"O": o, "logsumexp": lse, "dQ": dq, "dK": dk, "dV": dv}


CASES = [
    ("naive", Problem.of(1, 2, 9, 5, seq_kv=12, dtype="float64", causal=True)),
    ("naive", Problem.of(2, 2, 33, 20, dtype="float32")),
    ("fa2", Problem.of(1, 4, 40, 59, heads_kv=2, seq_kv=70, causal=True)),
    ("fa2", Problem.of(2, 1, 33, 64, dtype="bfloat16", causal=True)),
    ("mma_qreg_async", Problem.of(1, 4, 70, 59, heads_kv=2, seq_kv=33, dtype="bfloat16", causal=True)),
    ("auto", Problem.of(1, 2, 33, 64, dtype="bfloat16", causal=True)),
    ("auto", Problem.of(1, 4, 70, 59, heads_kv=2, seq_kv=33, dtype="float16", causal=True)),
    ("hopper+mma_qreg_async", Problem.of(1, 2, 20, 128, dtype="bfloat16")),
    ("naive", Problem.of(1, 4, 33, 23, heads_kv=2, seq_kv=40, dtype="float64", causal=True, dim_v=40)),
    ("fa2", Problem.of(1, 4, 33, 96, heads_kv=2, seq_kv=40, dtype="float16", dim_v=59)),
    ("hopper", Problem.of(1, 4, 33, 192, heads_kv=2, seq_kv=70, dtype="bfloat16", causal=True, dim_v=128)),
    ("auto", Problem.of(1, 4, 70, 300, heads_kv=2, seq_kv=90, dtype="bfloat16", causal=True)),
]


@pytest.mark.parametrize(("kernel", "problem"), CASES, ids=lambda value: getattr(value, "folder", value))
def test_outputs_and_gradients(device: Any, kernel: str, problem: Problem) -> None:
    """O, logsumexp and all gradients against float64, of GQA, unequal lengths and head dims that are no multiple of 16 bytes."""
    inputs = made(device, problem)
    arithmetic = "p16" if kernel in ("auto", "hopper", "mma_qreg_async", "hopper+mma_qreg_async") else "f32"
    judge(problem, inputs, both(kernel, problem, inputs), arithmetic)


@pytest.mark.parametrize(("step", "dim"), [("hopper_cluster", 256), ("hopper_wide", 64)])
def test_a_pair_of_steps_in_the_fast_form(device: Any, step: str, dim: int) -> None:
    """The forward pass of hopper with the backward pass of hopper_cluster or hopper_wide, which have no deterministic form and no forward pass."""
    problem = Problem.of(1, 2, 70, dim, dtype="bfloat16", causal=True)
    inputs = made(device, problem)
    judge(problem, inputs, both(f"hopper+{step}", problem, inputs, deterministic=False), "p16")
    with pytest.raises(ValueError, match=f"{step}_backward has no deterministic form"):
        both(f"hopper+{step}", problem, inputs)
    q = inputs[0]
    with pytest.raises(ValueError, match="naive, fa2, mma_qreg_async, hopper, wide_heads, which have both passes"):
        attention(q, q, q, kernel="mma_swizzle", deterministic=False)
    with pytest.raises(ValueError, match=rf"or hopper\+{step};"):
        attention(q, q, q, kernel=step, deterministic=False)
    with pytest.raises(ValueError, match="naive, fa2, split, which have both passes; without"):  # it takes no float32
        attention(q.float(), q.float(), q.float(), kernel=step, deterministic=False)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 4, 8)])
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck(device: Any, shape: tuple[int, ...], strided: bool) -> None:
    """Schema, autograd registration, fake tensors and AOT dispatch with dynamic shapes: all of torch's checks, of both operators."""
    q, k, v, do = (torch.randn(shape, device=device, dtype=torch.float64) for _ in range(4))
    if strided:
        q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, do))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = (True, None, "naive", True, None)
    results = torch.library.opcheck(operator._FORWARD, (*leaves, *options, True))
    o, lse = attention(q, k, v, causal=True, kernel="naive", return_lse=True)
    detached = [t.detach() for t in (do, q, k, v, o, lse)]
    results |= torch.library.opcheck(operator._BACKWARD, (*detached, *options))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize(("causal", "shift"), [(False, None), (True, None), (True, 0)])
def test_gradcheck(device: Any, causal: bool, shift: int | None) -> None:
    """Numerical gradients in float64, through naive's float64 build, with shared key heads and unequal lengths."""
    q, k, v, _ = made(device, Problem.of(1, 2, 4, 3, heads_kv=1, seq_kv=6, dtype="float64"))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, causal=causal, causal_shift=shift, scale=0.7), (q, k, v), nondet_tol=0.0)


def of_layout(tensor: Any, layout: str) -> Any:
    """The same values in another layout."""
    if layout == "rows first":
        return tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # one third of a projection's output
        return torch.cat([tensor.detach()] * 3, -1)[..., : tensor.shape[-1]]
    if layout == "unaligned":
        room = tensor.new_empty(tensor.numel() + 1)
        room[1:] = tensor.detach().flatten()
        return room[1:].view(tensor.shape)
    if layout == "columns":
        return tensor.detach().mT.contiguous().mT
    return tensor.detach().new_zeros(1).expand(tensor.shape)  # "one element"


@pytest.mark.parametrize("kernel", ["naive", "mma_qreg_async", "hopper+mma_qreg_async"])
@pytest.mark.parametrize(
    ("layout", "copied"), [("rows first", False), ("packed", False), ("unaligned", True), ("columns", True), ("one element", True)]
)
def test_strides(device: Any, kernel: str, layout: str, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any strides give the same bits as contiguous tensors, and copies are made only where rows are not 16-byte aligned."""
    problem = Problem.of(2, 2, 33, 64, dtype="bfloat16", causal=True)
    inputs = [of_layout(t, layout) for t in made(device, problem)]
    plain = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
    for each in (*inputs[:3], *plain[:3]):
        each.requires_grad_()
    copies: list[Any] = []
    rows_like = call.Ready.rows_like
    monkeypatch.setattr(call.Ready, "rows_like", lambda self, t: copies.append(t) or rows_like(self, t))
    found, expected = both(kernel, problem, inputs), both(kernel, problem, plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(copies) == (7 if copied else 0)  # Q, K, V forward and, with dO, backward


def test_rows_that_end_where_their_memory_ends(device: Any) -> None:
    """A slice of wider rows is read where it lies, unless the last row's 16 bytes would end behind its memory."""
    room = torch.randn(2 * 5 * 64, device=device)
    q = room.view(1, 2, 5, 64)[..., :59]
    short = torch.randn(2 * 5 * 64 - 5, device=device).as_strided((1, 2, 5, 59), (640, 320, 64, 1))
    attention(q, q, q, kernel="naive")
    ready = call.ready("forward", "naive", (), *operator._kind(q, q, q), False, None, None, True, False, False)
    assert ready is not None and ready.view(q) is not None and ready.view(short) is None
    assert torch.equal(attention(q, short, q, kernel="naive"), attention(q, short.contiguous(), q, kernel="naive"))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_tensors_keep_their_shapes(device: Any, shape: tuple[int, ...]) -> None:
    """No batch, head, query or head dim: empty outputs and gradients of the inputs' shapes; no kernel is asked."""
    q, k, v = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(3))
    o, lse = attention(q, k, v, return_lse=True)
    o.sum().backward()
    assert o.shape == shape and lse.shape == shape[:3]
    assert all(t.grad is not None and t.grad.shape == shape for t in (q, k, v))
    for options, message in ({"kernel": "nonsense"}, "unknown kernel"), ({"kernel": "torch-cpu"}, "no kernel of ours"):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **options)


def test_scores_of_no_columns_are_not_taken_for_no_scores(device: Any) -> None:
    """q and k without columns: every score is 0 and O the mean of v. attention refuses it, sdpa gives torch's."""
    q, v = torch.empty(1, 2, 5, 0, device=device), torch.randn(1, 2, 5, 8, device=device)
    for words in ({}, {"window": 2}, {"kernel": "naive"}):
        with pytest.raises(ValueError, match="(?s)head_dim of 0.*hint: sdpa"):
            attention(q, q, v, **words)
    with pytest.raises(ValueError, match="head_dim of 0"):
        torch_op.explain(q, q, v)
    with pytest.warns(UserWarning, match="a head dim of 0 is not covered"):
        o = torch_op.sdpa(q, q, v)
    assert torch.allclose(o, v.mean(2, keepdim=True).expand_as(o), atol=1e-6)


@pytest.mark.parametrize("keys", [0, 4])
@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (2, 0, 8), (2, 5, 8), (0, 5, 8), (2, 3, 2, 0, 8), (2, 0, 2, 5, 8)])
def test_sdpa_of_empty_tensors_is_as_torchs(device: Any, shape: tuple[int, ...], keys: int) -> None:
    """Leading dims of any number, queries, keys or a leading dim of 0."""
    q, k = torch.randn(shape, device=device), torch.randn(*shape[:-2], keys, 8, device=device)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    ours = torch_op.sdpa(q, k, k, kernel="naive")
    assert ours.shape == exact.shape == shape and torch.allclose(ours, exact, atol=1e-5)


def test_no_keys(device: Any) -> None:
    """Queries that see no key give zeros, logsumexp -inf, and zero gradients, also where there is no key at all."""
    for keys in (0, 3):
        q = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
        k, v = (torch.randn(1, 2, keys, 8, device=device, requires_grad=True) for _ in range(2))
        o, lse = attention(q, k, v, causal=True, causal_shift=-5, kernel="naive", return_lse=True)
        o.sum().backward()
        assert not o.any() and (lse == -torch.inf).all()
        assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))


def test_aliases_and_numbers(device: Any) -> None:
    """The names of the first torch extension, numbers, paths and the package's own attention are the same kernels."""
    q, k, v = (torch.randn(1, 2, 9, 8, device=device) for _ in range(3))
    for name, alias, spec in (
        ("naive", torch_op.attention_naive, "0"),
        ("tiled", torch_op.attention_tiled, 1),
        ("fa2", torch_op.attention_flash, ROOT / "kernels_cu" / "07_fa2_forward.cu"),
    ):
        expected = attention(q, k, v, causal=True, kernel=name)
        assert torch.equal(alias(q, k, v, causal=True), expected) and torch.equal(attention(q, k, v, causal=True, kernel=spec), expected)


REFUSED = [
    ({"kernel": "fa1"}, "fa1 has no backward pass.*mma|naive, fa2"),
    ({"kernel": "nobody"}, "unknown kernel 'nobody'"),
    ({"kernel": "mma_qreg_async"}, "mma_qreg_async_forward does not take float32"),
    ({"kernel": "torch-cpu"}, "no kernel of ours"),
    ({"kernel": "./nowhere_forward.cu"}, "no kernel file nowhere_forward.cu"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"causal_shift": 3}, "causal_shift"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value))
def test_refusals_say_what_is_possible(device: Any, options: dict[str, Any], message: str) -> None:
    """A named kernel that cannot is a ValueError with the harness's own text, never another kernel."""
    q = torch.randn(1, 2, 9, 8, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        attention(q, q, q, **options)


def test_shapes_and_dtypes_that_do_not_belong_together(device: Any) -> None:
    """Mixed dtypes, other head dims or batches, heads that do not group and unknown dtypes."""
    q = torch.randn(2, 3, 4, 8, device=device)
    for k in (q.half(), q[:1], q[..., :4], q[0], q[:, :2], q[:, :0], q[:, :2, :0]):
        with pytest.raises(ValueError):
            attention(q, k, k)
    with pytest.raises(ValueError, match="(?s)torch.int32.*kernels take float32"):
        attention(*(q.int(),) * 3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_tensor_on_meta_is_refused(device: Any, place: int) -> None:
    """torch takes such a call to the operator's entry for shapes alone: its outputs were memory that nothing had written."""
    for gradient in (False, True):
        q, k, v = (torch.randn(1, 2, 16, 8, device="meta" if i == place else device, requires_grad=gradient) for i in range(3))
        mixed = "on meta, torch.float32 on" if place < 2 else "torch.float32 on meta"
        with pytest.raises(ValueError, match=f"(?s){mixed}.*one device"):
            attention(q, k, v)
        if place:  # with q on meta it is torch's own that refuses
            with pytest.raises(ValueError, match="one device"):
                torch_op.sdpa(q, k, v)
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="(?s)on meta.*on one device"):
            torch.compile(attention, backend="eager", fullgraph=True)(q, k, v)
    assert attention(*torch.empty(3, 1, 2, 16, 8, device="meta")).shape == (1, 2, 16, 8)  # all three: shapes only, as torch has it
    o, lse = torch.ops.fa.forward(*torch.randn(3, 1, 2, 16, 8, device=device), False, None, "fa2", True, None, False)
    q, k, v = torch.randn(3, 1, 2, 16, 8, device=device)
    with pytest.raises(ValueError, match="dO, O and logsumexp are on meta"):
        torch.ops.fa.backward(o.to("meta"), q, k, v, o, lse, False, None, "fa2", True, None)


@pytest.mark.parametrize("shared", ["heads", "batches", "rows", "half rows"])
def test_rows_that_share_memory(device: Any, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA is given no map of them: what a tensor map is of is copied, and what is read by its address is not."""
    made = torch.randn(2, 2, 40, 64, device=device, dtype=torch.bfloat16)
    k = {
        "heads": lambda: made[:, :1].expand(2, 2, 40, 64),
        "batches": lambda: made[:1].expand(2, 2, 40, 64),
        "rows": lambda: made[:, :, :1].expand(2, 2, 40, 64),
        "half rows": lambda: made.as_strided((2, 2, 40, 64), (2 * 40 * 64, 40 * 64, 32, 1)),
    }[shared]()
    copies: list[Any] = []
    rows_like = call.Ready.rows_like
    monkeypatch.setattr(call.Ready, "rows_like", lambda self, t: copies.append(t) or rows_like(self, t))
    for kernel, copied in (("hopper", 1), ("mma_qreg_async", 0)):
        copies.clear()
        o = attention(made, k, made, causal=True, kernel=kernel)
        assert len(copies) == copied, kernel
        assert torch.equal(o, attention(made, k.contiguous(), made, causal=True, kernel=kernel))


def test_auto_says_once_where_it_takes_a_lower_step(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims that the highest steps have no build for, as without split: the reason is told, once; a usual case is told nothing."""
    kept_out = tuple(replace(k, auto=not k.name.startswith("split") and k.auto) for k in catalogue())
    monkeypatch.setattr("harness.check.choose.catalogue", lambda: kept_out)
    q = torch.randn(1, 1, 4, 160, device=device)
    attention(q.clone().requires_grad_(), q, q)
    gpu, passes, problem = Device("cuda", "a GPU", "sm_90"), ("forward", "backward"), Problem.of(1, 1, 4, 160)
    call._said.clear()
    with pytest.warns(UserWarning, match="computed by naive, a lower step than usual: .* does not take head dim 160$"):
        call.warn_of_lower(call.kernels_of("auto", passes, problem, gpu, True), problem, gpu, True)
    wide = Problem.of(1, 1, 64, 256, dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, q, q[..., :].clone())
        used = call.kernels_of("auto", passes, wide, gpu, False)
        call.warn_of_lower(used, wide, gpu, False)
        assert (used["backward"].number or 0) > 16, "a step for wide heads alone is a higher one"
        monkeypatch.undo()
        for batch, length, dim in ((1, 64, 64), (1, 65, 64), (133, 2, 16), (1, 4, 80)):  # fa2, split and split_hopper, by their headers
            attention(*torch.randn(3, batch, 1, length, dim, device=device))
        attention(*(q.float()[..., :64],) * 3)
    masked = problem.with_(head_dim=64, mask="q < 3")
    with pytest.warns(UserWarning, match="computed by .* does not support a mask but the causal one$"):
        call.warn_of_lower(call.kernels_of("auto", passes, masked, gpu, True), masked, gpu, True)


def test_auto_never_rounds_to_tf32(device: Any) -> None:
    """float32 stays float32: step 11 takes it only as tf32."""
    q = torch.randn(1, 1, 33, 64, device=device)
    attention(q, q, q)
    used = call.ready("forward", "auto", (), *operator._kind(q, q, q), False, None, None, True, False, False)
    assert used is not None and used.launch.loaded.kernel.arithmetic_for("float32") == "f32"


def test_the_package_gives_the_operator() -> None:
    """`from fa_cli import attention` works, and `import fa_cli` alone loads no torch."""
    code = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('fa_cli', {str(ROOT / '__init__.py')!r}, submodule_search_locations=[{str(ROOT)!r}])\n"
        "sys.modules['fa_cli'] = package = u.module_from_spec(spec); spec.loader.exec_module(package)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "from fa_cli import attention, attention_naive, attention_tiled, attention_flash, sdpa\n"
        "print(attention.__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fa_cli.harness.torch_op.operator"


@pytest.mark.parametrize("page", ["README.md", "docs/pytorch.md"])
def test_the_python_of_the_documents_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells on the operator, with the checkout's name of the package."""
    cell, *more = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / page).read_text(), re.S)
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, name, getattr(torch.nn.functional, name))  # put back behind the test
    names: dict[str, Any] = {}
    exec(cell.replace("from fa_cli ", "from harness.torch_op "), names)
    for other in more:
        exec(other.replace("from fa_cli ", "from harness.torch_op "), {})
    assert names["o"].shape == names["q"].grad.shape and torch.nn.functional.scaled_dot_product_attention is names["sdpa"]


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    """64 rows of a sequence 2^26 elements apart, as between the layers of a cache: a tile's index is beyond 2^31. Few pages are touched."""
    q = torch.empty(64 << 26, dtype=torch.float16).as_strided((1, 1, 64, 64), (64, 64, 1 << 26, 1)).normal_()
    with torch.no_grad():
        assert torch.equal(attention(q, q, q, kernel="fa2"), attention(*[q.contiguous()] * 3, kernel="fa2"))
