"""attention() on tensors of float8_e4m3fn with descales, and quantize, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.torch_op import attention, explain, quantize  # noqa: E402
from harness.torch_op.float8 import NAMES, rotated  # noqa: E402


def exact(q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None, **descales: Any) -> tuple[Any, Any]:
    """O and logsumexp in float64."""
    wide, group = [], q.shape[1] // k.shape[1]
    for name, t in zip(NAMES, (q, k, v), strict=True):
        worth = descales[name].double().cpu().expand(k.shape[:2])[..., None, None] if name in descales else 1.0
        of_group = group if t is q else 1
        worth = worth.repeat_interleave(of_group, 1) if of_group > 1 and name in descales else worth
        wide.append(t.float().double().cpu() * worth)
    q, k, v = wide[0], *(t.repeat_interleave(group, 1) for t in wide[1:])
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2] + 1)
        s = s.masked_fill(hidden, -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def of_8_bits(device: Any, *shape: int, heads_kv: int = 0, seq_kv: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    batch, heads, seq, dim = shape
    others = (batch, heads_kv or heads, seq_kv or seq, dim)
    q, k, v = (torch.randn(size).to(torch.float8_e4m3fn).to(device) for size in (shape, others, others))
    return q, k, v


@pytest.mark.parametrize("causal, dim", [(False, 64), (True, 72)])
def test_descales_are_of_each_batch_and_key_head(device: Any, causal: bool, dim: int) -> None:
    """Groups, other lengths, a head dim whose rows of 8 bits are no multiple of 16 bytes: O is bfloat16."""
    q, k, v = of_8_bits(device, 2, 4, 70, dim, heads_kv=2, seq_kv=150)
    descales = {name: torch.rand(2, 2, device=device) + 0.5 for name in NAMES}
    o, lse = attention(q, k, v, causal=causal, return_lse=True, **descales)
    wanted, lse_wanted = exact(q, k, v, causal, **descales)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(o.double().cpu(), wanted, rtol=0, atol=0.03)
    torch.testing.assert_close(lse.double().cpu(), lse_wanted, rtol=0, atol=2e-3)
    swapped = exact(q, k, v, causal, **{**descales, "v_descale": descales["v_descale"].flip(1)})[0]
    assert (o.double().cpu() - swapped).abs().max() > 0.1  # the test sees a descale of another head


def test_without_descales_they_are_1(device: Any) -> None:
    """One number counts for all. In torch.compile it is one graph with the same bits."""
    q, k, v = of_8_bits(device, 1, 2, 64, 64)
    plain = attention(q, k, v)
    torch.testing.assert_close(plain.double().cpu(), exact(q, k, v)[0], rtol=0, atol=0.03)
    half = attention(q, k, v, v_descale=torch.tensor(0.5))
    assert torch.equal(half, plain * 0.5)
    assert torch.equal(attention(q, k, v, q_descale=torch.ones(1, 2)), plain)
    made = torch.compile(lambda q, k, v: attention(q, k, v, v_descale=torch.tensor(0.5)), backend="eager", fullgraph=True)
    assert torch.equal(made(q, k, v), half)


def test_sinks_and_transposed_tensors(device: Any) -> None:
    """Strides of (batch, rows, heads, head dim), and sinks, which are computed from O and logsumexp."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in of_8_bits(device, 1, 2, 64, 64))
    o, lse = attention(q, k, v, return_lse=True, sinks=torch.tensor([0.0, 3.0], device=device))
    wanted, plain = exact(q, k, v)
    total = torch.logaddexp(plain, torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    torch.testing.assert_close(lse.double().cpu(), total, rtol=0, atol=2e-3)
    torch.testing.assert_close(o.double().cpu(), wanted * (plain - total).exp()[..., None], rtol=0, atol=0.03)


def test_explain_names_the_kernel(device: Any) -> None:
    """auto has one for 8 bits; without rows there is nothing to launch; sdpa has no descales, so 8 bits are torch's."""
    q, k, v = of_8_bits(device, 1, 2, 64, 64)
    told = explain(q, k, v, q_descale=torch.ones(1, 2))
    assert [chosen.kernel for chosen in told.passes.values()] == ["float8"]
    assert explain(q, k, v, is_causal=True).by == "torch"
    assert attention(q[:, :, :0], k, v).shape == (1, 2, 0, 64)
    assert not attention(q, k[:, :, :0], v[:, :, :0]).any()


@pytest.mark.parametrize("more, error, words", [
    ({"q_descale": 2.0}, TypeError, "q_descale is a float"),
    ({"k_descale": torch.ones(2)}, ValueError, r"k_descale is of torch.float32 with the shape \(2,\)"),
    ({"v_descale": torch.ones(1, 2, dtype=torch.int32)}, ValueError, "a number for each batch and key head"),
    ({"descale_q": torch.ones(1, 2)}, TypeError, "q_descale=descale"),
    ({"window": 8}, ValueError, "window beside q, k and v of 8 bits"),
    ({"kernel": "fa2"}, ValueError, "float8_e4m3"),
    ({"block_table": torch.zeros(1, 1), "cache_seqlens": torch.zeros(1)}, ValueError, "a cache in pages of 8 bits"),
])  # fmt: skip
def test_what_is_not_taken_is_refused(more: dict[str, Any], error: type[Exception], words: str) -> None:
    """With what it is, before anything runs; a gradient too, and descales beside other types."""
    q, k, v = of_8_bits(torch.device("cpu"), 1, 2, 64, 64)
    with pytest.raises(error, match=words):
        attention(q, k, v, **more)
    with pytest.raises(ValueError, match="no kernel of 8 bits has a backward pass"):
        attention(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match="no kernel of 8 bits has a backward pass"):
        attention(q.detach(), k, v, v_descale=torch.ones(1, 2, requires_grad=True))
    with pytest.raises(ValueError, match="v_descale beside q, k and v of torch.float32"):
        attention(*(torch.ones(1, 2, 8, 64) for _ in range(3)), v_descale=torch.ones(1, 2))


def test_quantize(device: Any) -> None:
    """Nothing is cut off, and the largest magnitude of each key head is 448; with outliers a rotation brings O nearer to that of float64."""
    torch.manual_seed(1)
    q = torch.randn(2, 4, 96, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 200, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    (q8, k8, v8), descales = quantize(q, k, v)
    assert q8.shape == q.shape and q8.dtype == torch.float8_e4m3fn and descales["q_descale"].shape == (2, 2)
    assert (k8.float().abs().amax((2, 3)) == 448).all()
    worth = descales["k_descale"][..., None, None]
    assert ((k8.float() * worth - k.float()).abs() <= k.float().abs() * 2**-4 + worth * 2**-10).all()
    spread = [t + 10 * torch.randn_like(t) * (torch.rand_like(t) < 0.001) for t in (q, k, v)]  # FlashAttention-3's section 4.3
    wanted, error = exact(*spread)[0], {}
    for rotate in (False, True):
        tensors, descales = quantize(*spread, rotate=rotate)
        error[rotate] = float((exact(*tensors, **descales)[0] - wanted).square().mean().sqrt())
    assert error[True] < 0.85 * error[False]
    zeros, descales = quantize(*(torch.zeros(1, 1, 4, 16) for _ in range(3)))
    assert not zeros[0].float().any() and float(descales["v_descale"]) == 1
    least, _ = quantize(*(torch.tensor([0.0, 1e-44]).expand(1, 1, 1, 2) for _ in range(3)))  # of denormal numbers / 448 nothing is left
    assert not least[0].float().isnan().any()
    assert quantize(*(torch.zeros(2, 0, 4, 16) for _ in range(3)))[1]["k_descale"].shape == (2, 0)
    with pytest.raises(TypeError, match="k is a list"):
        quantize(q, [1.0], v)


def test_a_rotation_is_orthogonal() -> None:
    """Products of rows are the same in float64, and a single outlier becomes n magnitudes of 1 / sqrt(n)."""
    x, y = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(rotated(x, 3) @ rotated(y, 3).mT, x @ y.mT)
    torch.testing.assert_close(rotated(torch.eye(32, dtype=torch.float64), 3).abs(), torch.full((32, 32), 32**-0.5, dtype=torch.float64))
    with pytest.raises(ValueError, match="head_dim is 80"):
        rotated(torch.ones(1, 80), 0)
