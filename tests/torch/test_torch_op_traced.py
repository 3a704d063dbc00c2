"""attention() with functions as flex_attention takes them: the answers of torch's flex_attention on the CPU, and of float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.torch_op import attention  # noqa: E402

BATCH, HEADS, HEADS_KV, SEQ_Q, SEQ_KV, DIM = 2, 4, 2, 70, 90, 32
SLOPE = torch.linspace(0.5, 0.01, HEADS)
DOCUMENT = (torch.arange(SEQ_KV) // 17).expand(BATCH, SEQ_KV).contiguous()
BIAS = torch.randn(BATCH, HEADS, 100, 100, generator=torch.Generator().manual_seed(5))
SEEN = BIAS[0] > -0.5
CAP = torch.tensor(3.0)
HALF = np.float64(0.5)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def nested(window: int) -> Callable[..., Any]:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal(b, h, q_idx, kv_idx) & ~(q_idx - kv_idx > window)

    return near


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.logical_or(kv_idx < 9, torch.abs(q_idx - kv_idx) * 2 % 3 != h // 2)


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPE[h] * abs(q_idx - kv_idx) + 2.0 ** (-h - 1)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return CAP * torch.tanh(score.to(score.dtype) / CAP)


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx + kv_idx > 50, score, score.clamp(-1, 1)) + BIAS[b, h, q_idx, kv_idx] - BIAS[0, h, 3, kv_idx]


def hiding(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, torch.maximum(score, HALF * score), -float("inf"))


def inputs(seq_kv: int) -> list[Any]:
    make = torch.Generator().manual_seed(3)
    shapes = [(HEADS, SEQ_Q), (HEADS_KV, seq_kv), (HEADS_KV, seq_kv), (HEADS, SEQ_Q)]
    return [torch.randn(BATCH, heads, rows, DIM, generator=make) for heads, rows in shapes]


CASES: dict[str, tuple[Any, Any]] = {
    "causal": (causal, None),
    "nested": (nested(20), None),
    "prefix": (prefix, None),
    "documents": (documents, None),
    "seen": (lambda b, h, q_idx, kv_idx: SEEN[h, q_idx, kv_idx] | (kv_idx == 0), None),
    "alibi, documents": (documents, alibi),
    "capped": (None, capped),
    "biased": (causal, biased),
    "hiding": (nested(20), hiding),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seq_kv", [SEQ_Q, SEQ_KV])
@pytest.mark.parametrize("case", CASES)
def test_as_flex_attention(case: str, seq_kv: int) -> None:
    """O is flex_attention's, which has no gradients on the CPU; gradients are those of the same functions in float64."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask, score = CASES[case]
    q, k, v, do = inputs(seq_kv)
    ours, theirs = ([t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)] for dtype in (torch.float32, torch.float64))
    o = attention(*ours, kernel="fa2", mask=mask, score=score)
    block = mask and flex.create_block_mask(mask, BATCH, HEADS, SEQ_Q, seq_kv, device="cpu")
    with torch.no_grad():
        flexed = flex.flex_attention(q, k, v, score_mod=score, block_mask=block, enable_gqa=True)
    torch.testing.assert_close(o, flexed, rtol=2e-5, atol=2e-5)
    index = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate((BATCH, HEADS, SEQ_Q, seq_kv))]
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in theirs[1:])
    s = theirs[0] @ keys.transpose(-1, -2) * DIM**-0.5
    s = s if score is None else score(s, *index)
    s = s if mask is None else s.masked_fill(~mask(*index), -torch.inf)
    (s.softmax(-1) @ values * do).sum().backward()
    (o * do).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2e-5, atol=2e-5)


def test_inside_compile() -> None:
    q, k, v, _ = inputs(SEQ_KV)
    whole = attention(q, k, v, kernel="fa2", mask=causal, score=alibi)
    compiled = torch.compile(lambda q: attention(q, k, v, kernel="fa2", mask=causal, score=alibi), backend="aot_eager")
    assert torch.equal(compiled(q), whole)


WANTS = SLOPE.clone().requires_grad_()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"mask": lambda b, h, q, k: q >= k and k > 3}, "as a condition of Python.*\n.*\n.*use & | ~"),
        ({"mask": lambda b, h, q, k: 0 <= q - k < 9}, "as a condition of Python"),
        ({"mask": lambda b, h, q, k: float(q) > 3}, "as a number of Python"),
        ({"mask": lambda b, h, q, k: torch.sin(q) > 3}, "sin cannot be traced"),
        ({"mask": lambda b, h, q, k: q.frobenius(3)}, "frobenius cannot be traced"),
        ({"mask": lambda b, h, q, k: q - k}, "as a truth value"),
        ({"mask": lambda b, h, q, k: q / 2 > k}, "a mask is made of integers"),
        ({"mask": lambda b, h, q, k: SLOPE[h] > 0}, "takes integers"),
        ({"mask": lambda b, h, q, k: DOCUMENT[b, q // 2] == 1}, "none of b, h, q_idx, kv_idx"),
        ({"mask": lambda b, h, q, k: DOCUMENT[b] == 1}, "1 of the 2 dimensions"),
        ({"mask": lambda b, h, q, k: DOCUMENT[q, k] == 1}, "beyond the 2 elements"),
        ({"mask": lambda b, h, q: q > 3}, r"it is called as mask\(b, h, q_idx, kv_idx\)"),
        ({"mask": lambda b, h, q, k: None}, "it returned nothing"),
        ({"score": lambda b, h, q, k: q}, r"it is called as score\(score, b, h, q_idx, kv_idx\)"),
        ({"score": lambda s, b, h, q, k: s + torch.where(q > k, 0.0, -torch.inf)}, "-inf inside a score"),
        ({"score": lambda s, b, h, q, k: s + WANTS[h]}, "no gradient flows to WANTS"),
        ({"score": lambda s, b, h, q, k: s + SLOPE}, "it is not indexed"),
        ({"score": lambda s, b, h, q, k: s**3}, "a power of 3"),
        ({"score": lambda s, b, h, q, k: (s / 2).int()}, "a score's cast to integers"),
        ({"score": lambda s, b, h, q, k: s.to(torch.int64)}, "a score's cast to integers"),
    ],
)
def test_refusals(words: dict[str, Any], said: str) -> None:
    q, k, v, _ = inputs(SEQ_KV)
    with pytest.raises(ValueError, match=said):
        attention(q, k, v, kernel="fa2", **words)
