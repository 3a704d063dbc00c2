"""A drop-in for torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..check import choose
from ..problem import DTYPE_BYTES
from .call import say_once, widest
from .operator import attention
from .words import number, unexpected

#: What torch calls where sdpa does not cover a case, kept in case someone puts sdpa in its place.
TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
_instead: Callable[..., Any] | None = None
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
    **others: Any,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention by our kernels: the same arguments, and its causal mask, aligned top-left.

    What they do not cover (attn_mask, dropout, value dims of another size, broadcasting, more than 256 head dims) goes to torch's
    own, which is said once, by torch.compile when it traces. kernel and deterministic as for :func:`attention`, which says what is raised.
    """
    if others:
        raise unexpected(sdpa, min(others))
    why = uncovered(query, key, value, attn_mask, dropout_p, enable_gqa)
    if why and _instead:
        raise ValueError(f"{why} inside context_parallel: torch's own would attend to this rank's rows only")
    if why:
        _left(why)
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return TORCH_SDPA(query, key, value, **options)
    shape = query.shape
    if query.dim() != 4:  # leading dims are heads of one batch
        query, key, value = (t.unsqueeze(0).flatten(0, -3).unsqueeze(0) for t in (query, key, value))  # reshape's -1 takes none of 0
    options = {"causal": is_causal, "scale": scale, "kernel": kernel, "deterministic": deterministic}
    if not _instead:
        options["causal_shift"] = 0 if is_causal else None
    elif scale is not None:
        options["scale"] = number(scale)
    o = (_instead or attention)(query, key, value, **options)
    return o if len(shape) == 4 else o.reshape(shape)


_ADVICE = {"attn_mask is not covered": " (for a causal mask: is_causal=True)", "dropout is not covered": " (dropout_p=0.0 is)"}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile calls it when it traces
def _left(why: str) -> None:
    """Say once that a call goes to torch's own."""
    say_once(f"fa_cli.sdpa leaves a call to torch's own: {why}{_ADVICE.get(why, '')}; fa_cli.explain with its arguments names the backend")


def put_instead(attend: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Let sdpa call another function in the place of attention, None: attention again. Returns what it called before."""
    global _instead
    before, _instead = _instead, attend
    return before


def uncovered(q: Any, k: Any, v: Any, mask: Any, dropout: float, gqa: bool) -> str:
    """What of a call of scaled_dot_product_attention is not covered; empty where all is."""
    if others := [type(t).__name__ for t in (q, k, v) if not isinstance(t, torch.Tensor)]:
        return f"{others[0]} is not covered"
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
    if q.shape[-1] > widest():
        return f"a head dim over {widest()} is not covered"
    same = q.shape[:-2] == k.shape[:-2]
    grouped = gqa and q.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return "" if same or grouped else "batches, or heads without enable_gqa=True, of different numbers are not covered"
