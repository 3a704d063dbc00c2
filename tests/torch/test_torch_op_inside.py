"""The operator inside torch: compile, autocast, inference mode, checkpointing, subsets of gradients, streams, devices, graphs; sdpa."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from harness.kernel import catalogue  # noqa: E402
from harness.torch_op import attention, call, explain, operator, sdpa  # noqa: E402

#: What fa::forward takes beside q, k and v.
OPTIONS = (False, None, "naive", True, None, False)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is said once is said once a test, and no call of another test is kept."""
    call._said.clear()
    operator._KEPT.clear()
    yield


def tensors(device: Any, shape: tuple[int, ...] = (1, 2, 9, 8), count: int = 3, grad: bool = False, dtype: Any = None) -> list[Any]:
    """Seeded normal numbers."""
    random = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=random).to(device, dtype or torch.float32) for _ in range(count)]
    return [t.requires_grad_(grad) for t in made]


class Block(torch.nn.Module):  # type: ignore[misc]
    """Projections, attention and a projection, as models have it: q, k and v are strided views of one tensor."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.inner, self.outer = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        """(batch, rows, 32) to the same."""
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.inner(x).split(32, dim=-1))
        return self.outer(self.attend(q, k, v).transpose(1, 2).flatten(2))


def outcome(block: Any, x: Any) -> list[Any]:
    """The block's output and the gradients of its parameters."""
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(block.parameters()))]


def causal(kernel: str) -> Any:
    """Causal attention by a kernel."""
    return lambda q, k, v: attention(q, k, v, causal=True, kernel=kernel)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device: Any, dynamic: bool) -> None:
    """torch.compile takes a model with it as one graph, with static and with symbolic shapes: the same output and gradients."""
    block = Block(causal("naive")).to(device)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own internals
        compiled = torch.compile(copy.deepcopy(block), fullgraph=True, dynamic=dynamic, backend="aot_eager" if dynamic else "inductor")
        for rows in (9, 12)[: 1 + dynamic]:
            x = tensors(device, (2, rows, 32), 1)[0]
            for found, expected in zip(outcome(compiled, x), outcome(block, x), strict=True):
                assert torch.allclose(found, expected, atol=1e-5)


def test_a_broken_graph_does_not_trace_the_call_itself(device: Any) -> None:
    """Where torch.compile leaves the operator to eager mode, its tracer stays out of the Python that launches."""
    q, k, v = tensors(device)

    def broken(q: Any, k: Any, v: Any) -> Any:
        return sum(torch.ops.fa.forward.default(each, k, v, *OPTIONS)[0] for each in (q, q) if print(end="") is None)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(broken, backend="eager")(q, k, v), broken(q, k, v))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("way")
def test_checkpointing(device: Any, reentrant: bool) -> None:
    """What is computed again in the backward pass is the same, bit for bit."""
    block = Block(causal("auto")).to(device)
    x = tensors(device, (2, 9, 32), 1, grad=True)[0]
    expected = outcome(block, x)
    y = checkpoint(block, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert all(torch.equal(found, wanted) for found, wanted in zip([y, *(p.grad for p in block.parameters())], expected, strict=True))


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("way")
def test_autocast(device: Any, lower: Any) -> None:
    """Under autocast float32 inputs are cast, also mixed ones, float64 is not, and gradients come back in the inputs' types."""
    q, k, v = tensors(device, (1, 2, 33, 64), grad=True)
    with torch.autocast(device.type, lower):
        o = attention(q, k.to(lower), v)
        assert attention(*tensors(device, dtype=torch.float64)).dtype == torch.float64
    assert o.dtype == lower
    o.sum().backward()
    assert q.grad.dtype == torch.float32
    assert torch.equal(o, attention(*(t.to(lower) for t in (q, k, v))))


def test_inference_mode_and_no_grad(device: Any) -> None:
    """Where no gradient is wanted there is none, and a kernel without a backward pass is fine."""
    q, k, v = tensors(device, grad=True)
    for quiet in (torch.inference_mode, torch.no_grad):
        with quiet():
            o = attention(q, k, v, kernel="fa1")
            assert not o.requires_grad and torch.allclose(o, attention(q, k, v, kernel="naive"), atol=1e-5)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
@pytest.mark.usefixtures("way")
def test_subsets_of_gradients(device: Any, wanted: str) -> None:
    """Only the inputs that want a gradient get one, the same as with all of them."""
    every, some = tensors(device, grad=True), tensors(device)
    attention(*every).sum().backward()
    for name, tensor in zip("qkv", some, strict=True):
        tensor.requires_grad_(name in wanted)
    attention(*some).sum().backward()
    for name, found, expected in zip("qkv", some, every, strict=True):
        assert torch.equal(found.grad, expected.grad) if name in wanted else found.grad is None


@pytest.mark.usefixtures("way")
def test_what_is_saved_is_looked_at_again(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward calls of one graph with dO in several layouts, by hooks that give other strides back, and where a leaf was given other memory."""
    q, k, v = tensors(device, (1, 2, 33, 16), grad=True)
    (do,) = tensors(device, (1, 2, 33, 16), 1)
    one = torch.ones((), device=device).expand(q.shape)

    def gradients(o: Any, do: Any) -> Any:
        return torch.stack(torch.autograd.grad(o, (q, k, v), do, retain_graph=True))

    o = attention(q, k, v, causal=True, kernel="naive")
    expected, of_ones = gradients(o, do), gradients(o, one.contiguous())
    lookups = call.ready.cache_info()
    assert torch.equal(gradients(o, do), expected)
    assert call.ready.cache_info() == lookups  # nothing but dO is looked at
    for layout in (do.transpose(1, 2).contiguous().transpose(1, 2), do.mT.contiguous().mT):
        assert torch.equal(gradients(o, layout), expected) and torch.equal(gradients(o, layout), expected)
    assert torch.equal(gradients(o, one), of_ones) and torch.equal(gradients(o, do), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
        hooked = attention(q, k, v, causal=True, kernel="naive")
    assert torch.equal(gradients(hooked, do), expected)
    values = k.detach().clone()
    k.data = values.mT.contiguous().mT
    assert torch.equal(gradients(o, do), expected)
    with torch.no_grad():
        v += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(o, do)


@pytest.mark.usefixtures("way")
def test_a_call_like_one_before_looks_up_nothing(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same options and kind of tensors; any other kind, also one that torch alone knows of, is looked at anew. Values stay right."""
    looked: list[str] = []
    ready = operator.ready
    monkeypatch.setattr(operator, "ready", lambda pass_, *key: looked.append(pass_) or ready(pass_, *key))
    q, k, v = tensors(device, (1, 2, 33, 16))
    expected = attention(q, k, v, causal=True, kernel="naive").clone()

    def again(*given: Any, most: int = 0) -> Any:
        looked.clear()
        o = attention(*given, causal=True, kernel="naive")
        assert len(looked) <= most, looked
        assert torch.equal(o.detach(), expected)
        return o

    again(q, k, v)
    again(*(t.clone() for t in (q, k, v)))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (leaves, [strided, k, v], [torch.nn.Parameter(q), k, v]):
        again(*given, most=1)
        again(*given)
    with torch.no_grad():
        assert not again(*leaves, most=1).requires_grad
    assert again(*leaves).requires_grad
    with torch.inference_mode():
        again(q, k, v, most=1)
    with torch.autocast(device.type, torch.bfloat16):
        assert attention(q, k, v, causal=True, kernel="naive").dtype == torch.bfloat16
        lower = [t.bfloat16() for t in (q, k, v)]
        for _ in range(2):
            assert attention(*lower, causal=True, kernel="naive").dtype == torch.bfloat16
        with torch.autocast(device.type, torch.float16):
            assert attention(*lower, causal=True, kernel="naive").dtype == torch.float16
    o = again(*leaves)
    do = torch.ones_like(o)
    first = torch.autograd.grad(again(*leaves), leaves, do)
    for _ in range(2):
        o = again(*leaves)
        looked.clear()
        assert all(map(torch.equal, torch.autograd.grad(o, leaves, do), first)) and not looked
    same = attention(q, q, q, kernel="naive")  # one tensor three times is no case of those above
    assert torch.equal(same, attention(q, q.clone(), q.clone(), kernel="naive"))
    assert torch.equal(attention(q, q, q, kernel="naive"), same)


def test_calls_that_are_kept_are_few(device: Any) -> None:
    """Of each options the last ones, and of options no more than a bound."""
    q, k, v = tensors(device)
    for rows in range(1, 9):
        attention(q[:, :, :rows], k, v, kernel="naive")
    assert [len(kept) for kept in operator._KEPT.values()] == [operator._MOST_KEPT]
    for at in range(operator._MOST_OPTIONS + 9):
        attention(q, k, v, kernel="naive", scale=1 + at / 1024)
    assert len(operator._KEPT) <= operator._MOST_OPTIONS


def test_who_listens_is_told(device: Any) -> None:
    """A profiler, a mode of functions and one of the dispatcher see a call like one before, too."""
    q, k, v = tensors(device)
    expected = attention(q, k, v)
    with torch.autograd.profiler.profile() as seen:
        attention(q, k, v)
    assert any(event.name == "fa::forward" for event in seen.function_events)

    class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
            functions.append(str(function))
            return function(*given, **(options or {}))

    functions: list[str] = []
    with Dispatched():
        assert torch.equal(attention(q, k, v), expected)
    assert "fa.forward.default" in functions
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.usefixtures("way")
def test_derivatives_that_are_not_there_are_errors(device: Any) -> None:
    """The second derivative, forward mode and torch.func.grad are errors, never zero."""
    q, k, v = tensors(device, grad=True)
    o = attention(q, k, v)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
    still = [t.detach() for t in (q, k, v)]
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(attention, tuple(still), tuple(still))
    for transformed in (
        torch.func.grad,
        torch.func.jacrev,
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: lambda q: torch.func.vjp(f, q),
    ):
        with pytest.raises(RuntimeError, match="(?s)no derivative for torch.func.*hint: use .backward"):
            transformed(lambda q: attention(q, *still[1:]).sum())(still[0][None] if transformed.__name__ == "<lambda>" else still[0])
    weighed = torch.func.grad(lambda w: (attention(*still) * w).sum())(still[0])  # it is not what torch.func differentiates
    assert torch.equal(weighed, attention(*still))


SLOPES = torch.linspace(0.1, 0.6, 6).reshape(3, 2)


@pytest.mark.parametrize("words", [
    lambda _: {},
    lambda _: {"window": 3, "causal": True},
    lambda _: {"documents": torch.tensor([0, 4, 9]), "softcap": 5.0},
    lambda slopes: {"score": "s + slope[h] * q", "tensors": {"slope": slopes}},
    lambda slopes: {"mask": "k < 7", "sinks": slopes},
])  # fmt: skip
def test_a_gradient_flows_through_vmap(device: Any, words: Any, recwarn: pytest.WarningsRecorder) -> None:
    """vmap loops over the operators, also over what masks name, with the gradient of the calls one by one and without torch's warning."""
    (x,) = tensors(device, (3, 1, 2, 9, 8), 1, grad=True)
    slopes = SLOPES.to(device)
    call = lambda each, of: attention(each, each, each, kernel="fa2", **words(of))  # noqa: E731
    y = torch.vmap(call)(x, slopes)
    expected = torch.stack([call(*each) for each in zip(x, slopes, strict=True)])
    (one,), (other,) = (torch.autograd.grad(o.square().sum(), x) for o in (y, expected))
    assert torch.allclose(y, expected, atol=1e-6) and torch.allclose(one, other, atol=1e-5)
    assert not [each for each in recwarn if "performance drop" in str(each.message)]
    with pytest.raises(RuntimeError, match="vmap over a dimension of 0"):
        torch.vmap(call)(x[:0], slopes[:0])


def test_meta_tensors_and_export() -> None:
    """Shapes without numbers, as tracing has them; torch.export keeps the operator in its graph."""
    q, k, v = tensors("cpu")
    assert attention(*(t.to("meta") for t in (q, k, v))).shape == q.shape

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return sdpa(q, k, v, is_causal=True)

    program = torch.export.export(Model(), (q, k, v))
    assert "fa.forward.default" in program.graph_module.code
    assert torch.equal(program.module()(q, k, v), sdpa(q, k, v, is_causal=True))


def test_backward_is_deterministic(device: Any) -> None:
    """By default the deterministic form of the backward pass runs; the faster form is another kernel's call."""
    problem = (1, 1, 70, 64)
    q, k, v = tensors(device, problem, grad=True, dtype=torch.bfloat16)
    grads = [torch.autograd.grad(attention(q, k, v, deterministic=form).sum(), q)[0] for form in (True, True, False)]
    assert torch.equal(grads[0], grads[1]) and torch.allclose(grads[0].float(), grads[2].float(), atol=0.05)
    call.ready.cache_clear()
    attention(q, k, v, kernel="mma_qreg_async").sum().backward()
    do = q.detach().new_ones(()).expand(q.shape)  # as sum() gives it
    hits = call.ready.cache_info().hits
    used = call.ready("backward", "mma_qreg_async", (), *operator._kind(q, k, v, q, do), False, None, None, True, True, False)
    assert used is not None and used.launch.loaded.kernel.deterministic and call.ready.cache_info().hits == hits + 1


SDPA = [
    ((2, 3, 9, 8), (2, 3, 9, 8), {}),
    ((2, 3, 9, 8), (2, 3, 12, 8), {"is_causal": True}),
    ((2, 3, 12, 8), (2, 3, 9, 8), {"is_causal": True, "scale": 0.3}),
    ((2, 4, 9, 8), (2, 2, 12, 8), {"is_causal": True, "enable_gqa": True}),
    ((3, 9, 8), (3, 12, 8), {"is_causal": True}),
    ((9, 8), (12, 8), {}),
    ((2, 2, 3, 9, 8), (2, 2, 3, 12, 8), {"is_causal": True}),
]


@pytest.mark.parametrize(("shape", "keys", "options"), SDPA, ids=str)
def test_sdpa_is_a_drop_in(device: Any, shape: tuple[int, ...], keys: tuple[int, ...], options: dict[str, Any]) -> None:
    """torch's results and gradients, with its causal mask, its grouped heads and its leading dims; nothing goes to torch's own."""
    q, k, v = (*tensors(device, shape, 1, grad=True), *tensors(device, keys, 2, grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sdpa(q, k, v, **options)
    expected = torch_sdpa(q, k, v, **options)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
    do = torch.randn_like(expected)
    for one, other in zip(torch.autograd.grad(found, (q, k, v), do), torch.autograd.grad(expected, (q, k, v), do), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


#: The shape of a mask, those of q and of k, other arguments.
MASKED = [
    ((9, 12), (2, 4, 9, 8), (2, 4, 12, 8), {}),
    ((2, 1, 1, 12), (2, 4, 9, 8), (2, 2, 12, 8), {"enable_gqa": True}),
    ((1, 4, 9, 1), (2, 4, 9, 8), (2, 4, 12, 8), {"scale": 0.3}),
    ((2, 4, 9, 12), (2, 4, 9, 8), (2, 4, 12, 8), {}),
    ((4, 9, 12), (2, 4, 9, 8), (2, 4, 12, 8), {}),
    ((1, 1), (2, 4, 9, 8), (2, 4, 12, 8), {}),
    ((9, 12), (3, 9, 8), (3, 12, 8), {}),
    ((1, 1, 1, 9, 12), (2, 2, 3, 9, 8), (2, 2, 3, 12, 8), {}),
]


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize(("shape", "queries", "keys", "options"), MASKED, ids=str)
def test_sdpa_with_a_mask(
    device: Any, shape: tuple[int, ...], queries: tuple[int, ...], keys: tuple[int, ...], options: dict[str, Any], kind: str
) -> None:
    """torch's results and gradients: dims that repeat, also by their stride, -inf, the least float, rows that see nothing."""
    q, k, v = (*tensors(device, queries, 1, grad=True), *tensors(device, keys, 2, grad=True))
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device)
    seen = (mask > -0.7) | (mask == mask.flatten()[0])
    if len(shape) > 1 and shape[-2] > 1:
        seen[..., 3, :] = False
    least = torch.finfo(mask.dtype).min
    mask = seen if kind == "boolean" else mask.masked_fill(~seen, -torch.inf)
    if kind == "additive" and shape[-2] > 1:
        mask[..., 5, :], mask[..., 6, :1], mask[..., 6, 1:] = least, 0.5, least
    if len(shape) == 2 and shape[0] > 1 and len(queries) == 4:
        mask = mask.expand(2, 4, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sdpa(q, k, v, attn_mask=mask, kernel="fa2", **options)
    expected = torch_sdpa(q, k, v, attn_mask=mask, **options)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
    do = torch.randn_like(expected)
    do[..., 5, :] = 0  # of keys that all have the least float logsumexp says no more how many they are
    for one, other in zip(torch.autograd.grad(found, (q, k, v), do), torch.autograd.grad(expected, (q, k, v), do), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_sdpa_takes_an_attn_mask_without_elements(at: int, dtype: Any) -> None:
    """Of no batch, no query or no key, as torch's takes it."""
    sizes = [2, 2, 5, 6]
    sizes[at] = 0
    batch, heads, seq, seq_kv = sizes
    q, k, mask = torch.ones(batch, heads, seq, 8), torch.ones(batch, heads, seq_kv, 8), torch.zeros(sizes, dtype=dtype)
    assert torch.equal(sdpa(q, k, k, attn_mask=mask), torch_sdpa(q, k, k, attn_mask=mask))


@pytest.mark.filterwarnings("ignore:attention is computed by")
def test_sdpa_leaves_masks_to_torch(device: Any) -> None:
    """Those that want a gradient, of another dtype, beside is_causal, for a kernel without masks; on a GPU while only a CUDA core takes them."""
    q, k, v = tensors(device, (1, 2, 9, 64), dtype=torch.bfloat16)
    mask = torch.zeros(9, 9, device=device, dtype=torch.bfloat16)
    for said, options in (
        ("a gradient of attn_mask", {"attn_mask": mask.clone().requires_grad_()}),
        ("does not support a mask", {"attn_mask": mask, "kernel": "mma"}),
        ("attn_mask of torch.float32", {"attn_mask": mask.float()}),
        ("beside is_causal", {"attn_mask": mask, "is_causal": True}),
        ("of shape", {"attn_mask": mask[:, :5]}),
    ):
        call._said.clear()
        with pytest.warns(UserWarning, match=said), contextlib.suppress(RuntimeError):
            sdpa(q, k, v, **options)
    found = explain(q, k, v, attn_mask=mask)
    taken = catalogue_takes_masks(device)
    assert found.by == ("fa-cli" if taken else "torch") and (taken or "by a kernel on tensor cores" in found.why)


def catalogue_takes_masks(device: Any) -> bool:
    """Whether auto may take a mask in 16 bit: on the CPU always, on a GPU where a kernel on tensor cores does."""
    kernels = [each for each in catalogue() if each.pass_ == "forward" and each.mask and "bfloat16" in each.dtypes]
    return device.type == "cpu" or any(each.arithmetic == "p16" for each in kernels)


def test_sdpa_with_a_mask_compiles(device: Any) -> None:
    q, k, v = tensors(device)
    mask = torch.rand(9, 9, device=device) > 0.3
    torch.compiler.reset()
    compiled = torch.compile(lambda q, mask: sdpa(q, k, v, attn_mask=mask, kernel="fa2"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, mask), sdpa(q, k, v, attn_mask=mask, kernel="fa2"))


def test_sdpa_leaves_to_torch_what_it_does_not_cover(device: Any) -> None:
    """A mask's gradient, dropout, wide heads, broadcasting: torch's own, each said once; its errors are torch's."""
    q, k, v = tensors(device)
    mask = torch.ones(9, 9, device=device, requires_grad=True)
    wide = tensors(device, (1, 1, 3, 300))
    for reason, arguments, options in (
        ("attn_mask", (q, k, v), {"attn_mask": mask}),
        ("head dim over 256", wide, {}),
        ("head dim over 256", (q, k, torch.randn(*v.shape[:3], 300, device=device)), {}),
        ("numbers", (q, k[:, :1], v[:, :1]), {}),
    ):
        with pytest.warns(UserWarning, match=reason):
            found = sdpa(*arguments, **options)
        assert torch.equal(found, torch_sdpa(*arguments, **options))
        sdpa(*arguments, **options)  # said once: another warning would be an error
        call._said.clear()
    with pytest.warns(UserWarning, match="dropout"):
        sdpa(q, k, v, dropout_p=0.5)
    with pytest.warns(UserWarning, match="shapes"), pytest.raises(RuntimeError):
        call._said.clear()
        sdpa(q, k[..., :4], v)


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_with_a_value_of_another_head_dim(device: Any, masked: bool) -> None:
    """Ours, with gradients, also of leading dims that are no batch and heads, and compiled; explain says so."""
    q, k, v = tensors(device, (5, 9, 8), grad=True)
    v = torch.randn(5, 9, 13, device=device, requires_grad=True)
    options = {"attn_mask": torch.rand(9, 9, device=device) > 0.3} if masked else {}
    found, wanted = sdpa(q, k, v, **options, kernel="fa2"), torch_sdpa(q, k, v, **options)
    assert found.shape == (5, 9, 13) and torch.allclose(found, wanted, atol=1e-5)
    gradients = (torch.autograd.grad(o, (q, k, v), torch.ones_like(o)) for o in (found, wanted))
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(*gradients, strict=True))
    told = explain(q, k, v, **({"attn_mask": None} | options), kernel="fa2")
    assert told.by == "fa-cli" and told.passes["backward"].kernel == "fa2"
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, **options, kernel="fa2"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), found)


def test_sdpa_in_place_of_torchs(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put where models look for it, it still finds torch's own."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q, k, v = tensors(device)
    with pytest.warns(UserWarning, match="dropout"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


# -- what runs --------------------------------------------------------------------------------------------------------


def test_explain(device: Any) -> None:
    """Kernel, file, form and row of each pass, as the call then has them; why not the steps above; nothing of what was named."""
    q, k, v = tensors(device, (1, 2, 70, 64), grad=True, dtype=torch.bfloat16)
    told = explain(q, k, v, causal=True)
    attention(q, k, v, causal=True).sum().backward()
    assert told.by == "fa-cli" and list(told.passes) == ["forward", "backward"]
    for pass_, strides in ("forward", (q, k, v)), ("backward", (q, k, v, q, q)):
        used = call.ready(pass_, "auto", (), *operator._kind(*strides), True, None, None, True, True, False)
        chosen = told.passes[pass_]
        assert used is not None and used.launch.loaded.kernel.path.name == chosen.file
        assert used.launch.loaded.plan.values.items() >= dict(chosen.tiles).items() and chosen.deterministic
        assert chosen.rows == tuple(map(str, used.launch.loaded.plan.choices))
    if device.type == "cpu":
        assert told.passes["forward"].kernel == "hopper" and "promises float32" not in str(told)
        assert told.passes["forward"].above["split_hopper"] == "split_hopper_forward does not take bfloat16"
        assert "split_hopper, split: each does not take bfloat16" in str(explain(q, k, v, causal=True, verbose=True))
        wide = explain(q, k, v, deterministic=False).passes["backward"]
        assert "seq_q = 70, causal = 0, sms = 132, works =" in wide.above["hopper_wide"]
        assert re.search(r"seq_kv = 70, head_dim = 64, causal = 0 \(26_hop\S+\.cu says why\); its cost is", wide.above["hopper_cluster"])
        small = torch.zeros(1, 4, 96, 32)
        told = explain(small, small, small).passes["forward"]
        assert told.kernel == "fa2" and told.above["split"] == (
            'it can compute this, but auto prefers a lower step: auto = "not (HEAD_DIM == 64 and seq_kv <= 128 and blocks <= sms)" '
            "with seq_kv = 96, HEAD_DIM = 64, sms = 132, blocks = 12 (27_split_forward.cu says why)"
        )
        attention(small, small, small, kernel="split")  # it can
        assert (wide.file, wide.kernel, wide.files) == ("22_hopper_backward.cu", "hopper", "")
        q, k, v = tensors(device, (1, 2, 33, 128), grad=True, dtype=torch.bfloat16)
        weighed = explain(q, k, v, causal=True, deterministic=False, verbose=True)
        files = re.findall(r"files by their costs: (\S+) ([\d.]+) us, (\S+) ([\d.]+) us", str(weighed))
        assert [(first, second, float(one) < float(other)) for first, one, second, other in files] == [
            ("23_hopper_atomic_backward.cu", "22_hopper_backward.cu", True)
        ]
        assert weighed.passes["backward"].file == "23_hopper_atomic_backward.cu" and " us by its cost; SPLITS = " in str(weighed)
        assert str(explain(q, k, v, causal=True, deterministic=False)) == (
            "forward: 22 hopper, deterministic, 22_hopper_forward.cu\nbackward: 22 hopper, not deterministic, 23_hopper_atomic_backward.cu"
        )
    with torch.no_grad():
        assert list(explain(q, k, v, kernel="fa2").passes) == ["forward"]
    assert explain(q, k, v, kernel="fa2").passes["backward"].above == {}
    with pytest.raises(ValueError, match="does not take bfloat16"):
        explain(q, k, v, kernel="split")
    assert str(explain(q[:, :, :0], k, v)) == "nothing: a tensor is empty"


def test_explain_says_what_sdpa_leaves_to_torch(device: Any) -> None:
    """Why, and which of torch's own; where sdpa covers the case, our kernels, with its mask."""
    q, k, v = tensors(device)
    told = explain(q, k, v, attn_mask=torch.ones(9, 9, device=device, requires_grad=True))
    assert (
        told.by == "torch"
        and told.why == "a gradient of attn_mask is not covered"
        and told.backend in torch.nn.attention.SDPBackend.__members__
    )
    assert str(told).startswith("torch's own, ")
    assert explain(q, k, v, is_causal=True) == explain(q, k, v, causal=True, causal_shift=0, verbose=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        explain(q, k, v, bias=None)
    with pytest.raises(TypeError, match=r"(?s)no causal beside is_causal\n.*bottom-right.*top-left\nhint: "):
        explain(q, k, v, causal=True, is_causal=True)


@pytest.mark.usefixtures("way")
def test_two_threads_at_once(device: Any) -> None:
    """Both passes from two threads, with parameters and workspaces of one kernel, give the bits of one thread."""
    q, k, v = tensors(device, (1, 2, 70, 64), grad=True)

    def both(_: int) -> list[Any]:
        o = attention(q, k, v, causal=True, kernel="fa2")
        return [o, *torch.autograd.grad(o.sum(), (q, k, v))]

    expected = both(0)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(both, range(6)):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# -- a GPU's own ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(device: Any) -> Any:
    """Each GPU."""
    if device.type != "cuda":
        pytest.skip("of a GPU only")
    return device


@pytest.mark.usefixtures("way")
def test_current_device_and_stream_are_left_alone(gpu: Any) -> None:
    """A call on any GPU leaves torch's current device and stream as they were; tensors of the last GPU work from the first."""
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    call.backend_of.cache_clear()
    q, k, v = tensors(gpu, (1, 2, 70, 64), grad=True)
    o = attention(q, k, v)
    o.sum().backward()
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
    assert o.device == q.grad.device == gpu
    assert torch.allclose(o, torch_sdpa(q, k, v), atol=1e-4)


@pytest.mark.usefixtures("way")
def test_a_second_cuda_device() -> None:
    """The second GPU's tensors, while the first is current, give the first one's bits, in both passes."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; torch sees {torch.cuda.device_count()}")
    found = []
    for index in (0, 1):
        q, k, v = tensors(torch.device("cuda", index), (2, 4, 200, 64), grad=True, dtype=torch.bfloat16)
        o = attention(q, k, v, causal=True)
        found.append([t.cpu() for t in (o.detach(), *torch.autograd.grad(o.float().square().sum(), (q, k, v)))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)) and torch.cuda.current_device() == 0


@pytest.mark.usefixtures("way")
def test_runs_on_torchs_current_stream(gpu: Any) -> None:
    """On another stream it waits for that stream's work, forward and backward: inputs that arrive late are seen."""
    q, k, v = tensors(gpu, (2, 4, 200, 64), grad=True, dtype=torch.bfloat16)
    expected = [attention(q, k, v).detach(), *torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))]
    for _ in range(20):
        stream = torch.cuda.Stream(gpu)
        stream.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.device(gpu), torch.cuda.stream(stream):
            late = [torch.zeros_like(t) for t in (q, k, v)]
            torch.cuda._sleep(2_000_000)
            for one, other in zip(late, (q, k, v), strict=True):
                one.copy_(other.detach())
            leaves = [t.requires_grad_() for t in late]
            o = attention(*leaves)
            found = [o.detach(), *torch.autograd.grad(o.sum(), leaves)]
        stream.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("way")
def test_two_streams_and_a_graph_at_once(gpu: Any) -> None:
    """Both passes on two streams and replays of a graph on a third run beside one another: the counters of one are not another's."""
    q, k, v = tensors(gpu, (2, 8, 700, 64), dtype=torch.bfloat16)

    def both() -> list[Any]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]  # of this stream
        o = attention(*leaves, causal=True, kernel="hopper")
        return [o.detach(), *torch.autograd.grad(o, leaves, q)]

    with torch.cuda.device(gpu):
        expected = both()
        torch.cuda.synchronize()
        streams, graph = [torch.cuda.Stream() for _ in range(3)], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[2]):
            of_graph = both()
        found = []
        for _ in range(20):
            for stream in streams[:2]:
                with torch.cuda.stream(stream):
                    found.append(both())
            with torch.cuda.stream(streams[2]):
                graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(one, other) for each in (*found, of_graph) for one, other in zip(each, expected, strict=True))


@pytest.mark.usefixtures("way")
def test_two_threads_with_a_stream_each(gpu: Any) -> None:
    """Both passes of other shapes in each thread, all at once: parameters, workspaces and streams are each call's own."""
    problems = [tensors(gpu, (2, 4, rows, 64), dtype=torch.bfloat16) for rows in (200, 700, 200, 330)]

    def both(given: list[Any]) -> list[Any]:
        with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream()):
            leaves = [t.detach().requires_grad_() for t in given]
            made = []
            for _ in range(10):
                o = attention(*leaves, causal=True)
                made.append([o.detach(), *torch.autograd.grad(o, leaves, given[0])])
            torch.cuda.current_stream().synchronize()
        assert all(torch.equal(one, other) for each in made for one, other in zip(each, made[0], strict=True))
        return made[0]

    expected = [both(given) for given in problems]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(both, problems), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # torch, of leaves used on two streams
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("way")
def test_cuda_graph(gpu: Any, dtype: Any) -> None:
    """Both passes are captured in a CUDA graph, and a replay computes with what is in the inputs then."""
    q, k, v = tensors(gpu, (1, 2, 130, 64), grad=True, dtype=dtype)

    def step() -> list[Any]:
        o = attention(q, k, v, causal=True)
        return [o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))]

    with torch.cuda.device(gpu):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        with torch.no_grad():
            for tensor in (q, k, v):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(outputs, step(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.days(14)
@pytest.mark.usefixtures("way")
def test_the_same_bits_again(gpu: Any, dtype: Any) -> None:
    """250 forward and 50 backward calls at batch 60, other work between them, give the same bits."""
    q, k, v = tensors(gpu, (60, 4, 256, 64), grad=True, dtype=dtype)
    first, do = attention(q, k, v, causal=True), torch.randn_like(q)
    grads = torch.autograd.grad(first, (q, k, v), do)
    for _ in range(250):
        assert torch.equal(attention(q, k, v, causal=True), first)
    for _ in range(50):
        again = torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), do)
        assert all(torch.equal(one, other) for one, other in zip(again, grads, strict=True))
