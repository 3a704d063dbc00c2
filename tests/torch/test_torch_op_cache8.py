"""attention() on a cache of 8 bits: k and v of float8_e4m3fn beside q of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.torch_op import attention, explain, quantize  # noqa: E402

E4M3 = torch.float8_e4m3fn


def made(
    device: Any, dtype: Any, seq: int = 1, keys: int = 300, dim: int = 64
) -> tuple[Any, tuple[Any, Any], dict[str, Any], tuple[Any, Any]]:
    """q of 8 heads; k and v of 2, rounded; their descales, of each batch and head; and k and v as what they are worth, float64."""
    torch.manual_seed(0)
    q = torch.randn(2, 8, seq, dim).to(device=device, dtype=dtype)
    k, v = (torch.randn(2, 2, keys, dim, device=device) * torch.tensor([1.0, 7.0], device=device)[:, None, None] for _ in range(2))
    (_, *rounded), descales = quantize(q.float(), k, v)
    del descales["q_descale"]
    exact = tuple(t.double() * d.double()[..., None, None] for t, d in zip(rounded, descales.values(), strict=True))
    return q, (rounded[0], rounded[1]), descales, (exact[0], exact[1])


def near(got: tuple[Any, Any], q: Any, k: Any, v: Any, **more: Any) -> None:
    wanted = attention(q.double(), k, v, return_lse=True, kernel="naive", **more)
    assert got[0].dtype == q.dtype and got[1].dtype == torch.float32
    for mine, exact, tolerance in zip(got, wanted, (2e-2, 1e-5), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"causal": True, "window": 100, "softcap": 20.0}, {"score": "s - slope[h] * abs(q - k)"}])
def test_o_and_logsumexp(device: Any, dtype: Any, more: dict[str, Any]) -> None:
    """Of what the bytes are worth, in float64; strides of any kind; masks, scores and their tensors, which stand behind the descales."""
    q, (k, v), descales, exact = made(device, dtype, seq=3)
    more = more | ({"tensors": {"slope": torch.arange(8.0, device=device) / 64}} if "score" in more else {})
    turned = k.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT
    near(attention(q, *turned, return_lse=True, **descales, **more), q, *exact, **more)


def test_sinks_and_one_descale_for_all(device: Any) -> None:
    """A number for all heads, or none, which is 1."""
    q, (k, v), _, _ = made(device, torch.bfloat16)
    sinks = torch.linspace(-2, 5, 8, device=device)
    got = attention(q, k, v, k_descale=torch.tensor(0.125), sinks=sinks, return_lse=True)
    near(got, q, k.double() / 8, v.double(), sinks=sinks)
    near(attention(q, k, v, return_lse=True), q, k.double(), v.double())


def test_in_pages(device: Any) -> None:
    """Of a pool that has NaN where no key is; the descales are those of each sequence and head."""
    q, (k, v), descales, exact = made(device, torch.bfloat16, keys=96)
    table, lengths = torch.tensor([[4, 0, 2], [5, 1, 9]], device=device), torch.tensor([96, 50], device=device)
    pools = [torch.full((7, 2, 32, 64), torch.nan, device=device).to(E4M3) for _ in range(2)]
    for pool, whole in zip(pools, (k, v), strict=True):
        for b, n in enumerate(lengths.tolist()):
            for i in range(0, n, 32):
                pool[table[b, i // 32]].view(torch.uint8)[:, : min(32, n - i)] = whole[b, :, i : min(i + 32, n)].view(torch.uint8)
    o, lse = attention(q, *pools, block_table=table, cache_seqlens=lengths, causal=True, return_lse=True, **descales)
    for b, n in enumerate(lengths.tolist()):
        near((o[b : b + 1], lse[b : b + 1]), q[b : b + 1], *(t[b : b + 1, :, :n] for t in exact))


def test_what_runs_it(device: Any) -> None:
    """auto has one kernel for it, and explain says which, also of few keys and of pages; autocast leaves the cache; torch.compile traces it."""
    q, (k, v), descales, exact = made(device, torch.bfloat16)
    assert [each.kernel for each in explain(q, k, v, **descales).passes.values()] == ["decode"]
    with torch.autocast(q.device.type, torch.bfloat16):
        near(attention(q.float(), k, v, return_lse=True, **descales), q, *exact)
    compiled = torch.compile(lambda q: attention(q, k, v, **descales), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q), attention(q, k, v, **descales))
    paged = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "cache_seqlens": torch.ones(2, dtype=torch.int32)}
    told = explain(q, k[:, :, :32], v[:, :, :32], **paged, **descales)
    assert [each.kernel for each in told.passes.values()] == ["decode"]


@pytest.mark.parametrize("more, words", [
    ({"q_descale": torch.ones(())}, "q_descale beside q of torch.bfloat16"),
    ({"k_descale": torch.ones(2, 8)}, r"k_descale is of torch.float32 with the shape \(2, 8\)"),
    ({"causal": True, "causal_shift": 3}, "causal_shift beside a cache of 8 bits"),
    ({"kernel": "hopper"}, "hopper_forward does not support K and V in float8_e4m3 beside Q in bfloat16"),
])  # fmt: skip
def test_what_is_refused(device: Any, more: dict[str, Any], words: str) -> None:
    q, (k, v), _, _ = made(device, torch.bfloat16)
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, **more)


def test_no_gradient_and_no_other_types(device: Any) -> None:
    q, (k, v), descales, _ = made(device, torch.float16)
    with pytest.raises(ValueError, match="a gradient through tensors of 8 bits"):
        attention(q.requires_grad_(), k, v, **descales)
    with pytest.raises(ValueError, match="they must be of one dtype"):
        attention(q.detach().float(), k, v)
    with pytest.raises(ValueError, match="they must be of one dtype"):
        attention(q.detach(), k, v.half())
