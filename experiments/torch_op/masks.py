"""fa2 under masks and scores, forward and backward: python experiments/torch_op/masks.py [SECONDS]

B2 H16 S8192, bfloat16 at D64 and D128, then float32 at D64: milliseconds of a call (median of five) and the speed-up over the causal mask.
Windows, documents and every float32 form are compared with float64 first, one head of them. masks.txt is its record.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.torch_op import attention

GPU = torch.cuda.is_available()
DEVICE, BATCH, HEADS, LENGTH, TIMES = ("cuda", 2, 16, 8192, 5) if GPU else ("cpu", 1, 2, 128, 1)
BORDERS = [0, LENGTH // 8, LENGTH // 8 + min(100, LENGTH // 8), LENGTH // 2, LENGTH * 3 // 4, LENGTH]
WINDOW, PREFIX = LENGTH // 8 - 1, LENGTH // 4
SLOPE = torch.linspace(0.5, 0.01, HEADS, device=DEVICE)
PLACE = torch.arange(LENGTH, device=DEVICE)
AFTER = PLACE[:, None] - PLACE
OF = torch.searchsorted(torch.tensor(BORDERS, device=DEVICE), PLACE, right=True)
ALL = AFTER > -LENGTH

#: The words of a call, the same mask, and the score of s.
FORMS: dict[str, tuple[dict[str, Any], Any, Callable[[Any], Any]]] = {
    "full": ({}, ALL, lambda s: s),
    "causal": ({"causal": True}, AFTER >= 0, lambda s: s),
    "window": ({"window": WINDOW}, (AFTER >= 0) & (AFTER <= WINDOW), lambda s: s),
    "window64": ({"window": 63}, (AFTER >= 0) & (AFTER <= 63), lambda s: s),
    "window+softcap": ({"window": WINDOW, "softcap": 50.0}, (AFTER >= 0) & (AFTER <= WINDOW), lambda s: 50 * torch.tanh(s / 50)),
    "softcap": ({"softcap": 50.0}, ALL, lambda s: 50 * torch.tanh(s / 50)),
    "causal+softcap": ({"softcap": 50.0, "causal": True}, AFTER >= 0, lambda s: 50 * torch.tanh(s / 50)),
    "alibi causal": (
        {"score": "s - slope[h] * (q - k)", "tensors": {"slope": SLOPE}, "causal": True},
        AFTER >= 0,
        lambda s: s - SLOPE[0].double() * AFTER,
    ),
    "documents causal": (
        {"documents": torch.tensor(BORDERS, device=DEVICE), "causal": True},
        (AFTER >= 0) & (OF[:, None] == OF),
        lambda s: s,
    ),
    "prefix": ({"mask": f"k <= q or k < {PREFIX}"}, (AFTER >= 0) | (PLACE < PREFIX), lambda s: s),
    "stride": ({"mask": "(q - k) % 4 == 0", "causal": True}, (AFTER >= 0) & (AFTER % 4 == 0), lambda s: s),
}


def errors(found: list[Any], given: list[Any], do: Any, form: str) -> str:
    """The largest errors of O, dQ, dK and dV of one head."""
    _, visible, score = FORMS[form]
    q, k, v = (t[:1, :1].detach().double().requires_grad_() for t in given)
    o = score(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v
    (o * do[:1, :1]).sum().backward()
    exact = [o.detach(), q.grad, k.grad, v.grad]
    return " ".join(f"{float((a.detach()[:1, :1] - b).abs().max()):.1e}" for a, b in zip(found, exact, strict=True))


def milliseconds(call: Callable[[], object]) -> float:
    """The median of several calls after one."""
    call()
    taken = []
    for _ in range(TIMES):
        if GPU:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def main() -> None:
    limit, start = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0, time.monotonic()
    click.echo(
        f"kernel dtype D form: forward ms, backward ms, times as fast as causal; on {torch.cuda.get_device_name() if GPU else 'a CPU'}"
    )
    for dtype, dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        causal = None
        for form, (words, _, _) in FORMS.items():
            if time.monotonic() - start > limit:
                return
            q, k, v, do = (torch.randn(BATCH, HEADS, LENGTH, dim, device=DEVICE, dtype=dtype, requires_grad=i < 3) for i in range(4))
            o = attention(q, k, v, kernel="fa2", **words)
            o.backward(do)
            if dtype == torch.float32 or form in ("window", "documents causal") or not GPU:
                click.echo(f"errors {dtype} {dim} {form}: {errors([o, q.grad, k.grad, v.grad], [q, k, v], do, form)}")
            plain = [t.detach() for t in (q, k, v)]
            forward = milliseconds(lambda plain=plain, words=words: attention(*plain, kernel="fa2", **words))
            o = attention(q, k, v, kernel="fa2", **words)
            backward = milliseconds(lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
            causal = (forward, backward) if form == "causal" else causal
            ratios = f"{causal[0] / forward:6.2f} {causal[1] / backward:6.2f}" if causal else ""
            click.echo(f"fa2 {str(dtype)[6:]} {dim} {form:18s} {forward:8.3f} {backward:8.3f} {ratios}")


if __name__ == "__main__":
    main()
