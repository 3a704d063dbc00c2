"""A drop-in for torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..check import choose
from ..kernel import catalogue
from ..problem import DTYPE_BYTES
from .call import say_once
from .operator import attention

#: What torch calls where sdpa does not cover a case, kept in case someone puts sdpa in its place.
_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
_instead: Callable[..., Any] | None = None
_WIDEST = max(kernel.head_dims[-1] for kernel in catalogue())
_DTYPES = tuple(getattr(torch, name) for name in DTYPE_BYTES)


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention by our kernels: the same arguments, and its causal mask, aligned top-left.

    What they do not cover (attn_mask, dropout, value dims of another size, broadcasting, more than 256 head dims) goes to torch's
    own, which is said once. kernel and deterministic as for :func:`attention`, which says what is raised.
    """
    why = uncovered(query, key, value, attn_mask, dropout_p, enable_gqa)
    if why and _instead:
        raise ValueError(f"{why} inside context_parallel: torch's own would attend to this rank's rows only")
    if why:
        if not torch.compiler.is_compiling():
            say_once(f"sdpa goes to torch's own: {why}")
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _TORCH_SDPA(query, key, value, **options)
    shape = query.shape
    if query.dim() != 4:  # leading dims are heads of one batch
        query, key, value = (t.unsqueeze(0).flatten(0, -3).unsqueeze(0) for t in (query, key, value))  # reshape's -1 takes none of 0
    options = {"causal": is_causal, "scale": scale, "kernel": kernel, "deterministic": deterministic}
    if not _instead:
        options["causal_shift"] = 0 if is_causal else None
    o = (_instead or attention)(query, key, value, **options)
    return o if len(shape) == 4 else o.reshape(shape)


def put_instead(attend: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Let sdpa call another function in the place of attention, None: attention again. Returns what it called before."""
    global _instead
    before, _instead = _instead, attend
    return before


def uncovered(q: Any, k: Any, v: Any, mask: Any, dropout: float, gqa: bool) -> str:
    """What of a call of scaled_dot_product_attention is not covered; empty where all is."""
    if mask is not None:
        return "attn_mask is not covered"
    if dropout:
        return "dropout is not covered"
    if q.is_nested or k.is_nested or v.is_nested:
        return "nested tensors are not covered"
    if q.device.type not in ("cpu", "cuda"):
        return f"{q.device.type} tensors are not covered"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        return f"{q.dtype}, {k.dtype} and {v.dtype} are not covered"
    if not q.dim() == k.dim() == v.dim() >= 2 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        return "query, key and value of such shapes are not covered"
    if q.shape[-1] > _WIDEST:
        return f"a head dim over {_WIDEST} is not covered"
    same = q.shape[:-2] == k.shape[:-2]
    grouped = gqa and q.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return "" if same or grouped else "batches, or heads without enable_gqa=True, of different numbers are not covered"
