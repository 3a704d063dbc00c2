"""The gradient of logsumexp, and what is made of it: attention sinks, partial results that are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from harness.kernel import catalogue  # noqa: E402
from harness.torch_op import attention, explain  # noqa: E402

BACKWARD = [k for k in catalogue() if k.pass_ == "backward"]


def leaves(device: Any, dtype: Any, q: tuple[int, ...], kv: tuple[int, ...], seed: int = 3) -> list[Any]:
    """Seeded normal numbers that want a gradient."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in (q, kv, kv)]
    return [t.to(device, dtype).requires_grad_() for t in made]


def reference(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """O and logsumexp by torch's own operators, in the inputs' type; grouped heads, bottom-right mask."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def sinks(o: Any, lse: Any, sink: Any) -> Any:
    """What gpt-oss's attention gives: a logit of each head takes part in the softmax, and no value belongs to it."""
    return o * torch.sigmoid(lse - sink[:, None])[..., None].to(o.dtype)


def merged(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """O and logsumexp over the keys of all parts."""
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    return sum(o * (each - lse).exp()[..., None].to(o.dtype) for o, each in parts), lse


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_of_both_outputs(causal: bool) -> None:
    """Against differences, in float64: each output alone and both."""
    inputs = leaves("cpu", torch.float64, (1, 2, 4, 3), (1, 1, 5, 3))

    def both(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=causal, kernel="naive", return_lse=True)

    for chosen in (both, lambda *x: both(*x)[0], lambda *x: both(*x)[1], lambda *x: both(*x)[1].expand(2, 1, 2, 4)):
        assert torch.autograd.gradcheck(chosen, inputs)


def test_gradcheck_of_sinks_and_of_a_merge() -> None:
    """Sinks as gpt-oss has them, with the sink's own gradient; keys in two parts are as all of them at once."""
    q, k, v = leaves("cpu", torch.float64, (1, 2, 4, 3), (1, 2, 6, 3))
    sink = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)

    def sunk(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return sinks(*attention(q, k, v, kernel="naive", return_lse=True), sink)

    scores = torch.cat([q @ k.mT * 3**-0.5, sink[:, None, None].expand(1, 2, 4, 1)], -1)
    assert torch.allclose(sunk(q, k, v, sink), scores.softmax(-1)[..., :-1] @ v)
    assert torch.autograd.gradcheck(sunk, (q, k, v, sink))

    def parts(q: Any, k: Any, v: Any) -> Any:
        return merged([attention(q, k[:, :, at], v[:, :, at], kernel="naive", return_lse=True) for at in (slice(2), slice(2, None))])

    for one, other in zip(parts(q, k, v), attention(q, k, v, kernel="naive", return_lse=True), strict=True):
        assert torch.allclose(one, other)
    assert torch.autograd.gradcheck(parts, (q, k, v))


@pytest.mark.parametrize("kernel", BACKWARD, ids=lambda k: k.path.stem)
def test_every_backward_pass_takes_it(device: Any, kernel: Any) -> None:
    """Gradients through sinks by every kernel, beside the same in float64, to the type's rounding; grouped heads."""
    dtype = getattr(torch, kernel.dtypes[-1] if "float32" not in kernel.dtypes else "float32")
    name = kernel.variant_of or kernel.name
    wide = 256 if kernel.head_dims == (256,) else 128 if kernel.name == "hopper_atomic" else 64  # where it runs in hopper's place
    rows, heads_kv = 70, 2 if kernel.name == "hopper_atomic" else 1  # hopper is the faster one of grouped heads
    forward = "" if any(k.name == name and k.pass_ == "forward" for k in catalogue()) else "hopper+"
    given = leaves(device, dtype, (1, 2, rows, wide), (1, heads_kv, rows, wide))
    sink, do = torch.tensor([0.5, -0.5], device=device), torch.randn(1, 2, rows, wide, device=device).to(dtype)
    for deterministic in kernel.forms:
        options = {"causal": True, "kernel": f"{forward}{name}", "deterministic": deterministic}
        assert explain(*given, **options).passes["backward"].file == kernel.path.name
        o, lse = attention(*given, **options, return_lse=True)
        found = torch.autograd.grad(sinks(o, lse, sink), given, do)
        exact = [t.detach().double().requires_grad_() for t in given]
        wanted = torch.autograd.grad(sinks(*reference(*exact, True), sink.double()), exact, do.double())
        for one, other in zip(found, wanted, strict=True):
            error = (one.double() - other).norm() / other.norm()
            assert error < (2e-6 if dtype == torch.float32 else 2e-2), (deterministic, error)


def test_logsumexp_alone_and_under_compile(device: Any) -> None:
    """A loss of logsumexp alone, as z-loss is, eager, compiled and through checkpoints; nothing flows to v."""
    given = leaves(device, torch.float32, (1, 2, 9, 8), (1, 2, 9, 8))

    def z_loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, return_lse=True)[1].square().mean()

    exact = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(reference(*exact, False)[1].square().mean(), exact[:2])
    torch._dynamo.reset()
    for way in (z_loss, torch.compile(z_loss, fullgraph=True, backend="aot_eager")):
        dq, dk, dv = torch.autograd.grad(way(*given), given)
        assert torch.allclose(dq.double(), wanted[0], atol=1e-6) and torch.allclose(dk.double(), wanted[1], atol=1e-6) and not dv.any()


def test_a_kernel_that_does_not_take_it_says_so(tmp_path: Path) -> None:
    """A file whose header does not promise it gives no wrong gradient; without one of logsumexp it runs."""
    for kernel in catalogue():
        if kernel.name == "naive":
            text = kernel.path.read_text().replace("// logsumexp_gradient = true\n", "")
            (tmp_path / f"mine_{kernel.pass_}.cu").write_text(text)
    given = leaves("cpu", torch.float32, (1, 1, 4, 8), (1, 1, 4, 8))
    o, lse = attention(*given, kernel=tmp_path / "mine_forward.cu", return_lse=True)
    assert torch.autograd.grad(o.sum(), given, retain_graph=True)
    with pytest.raises(ValueError, match="(?s)takes no gradient of logsumexp.*use one of naive"):
        torch.autograd.grad(lse.sum(), given)
