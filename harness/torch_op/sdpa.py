"""A drop-in for torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..check import choose
from ..fault import Fault
from ..problem import DTYPE_BYTES, PASSES, Problem
from .arguments import number, unexpected
from .call import automatic, backend_of, kernels_of, say_once, storage, widest
from .operator import attention

#: What torch calls where sdpa does not cover a case, kept in case someone puts sdpa in its place.
TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
_instead: Callable[..., Any] | None = None
_DTYPES = tuple(getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name))  # none of 8 bits: torch's has no descales


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

    What they do not cover (dropout, an attn_mask that wants a gradient, broadcasting, wider heads than a kernel has) goes to torch's own, which is
    said once, by torch.compile when it traces. So does, on a GPU in 16 bit, an attn_mask or a value of another head dim where no kernel on
    tensor cores takes it. kernel and deterministic as for :func:`attention`, which says what is raised.
    """
    if others:
        raise unexpected(sdpa, (), others)
    why = uncovered(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and _instead:
        why = "attn_mask is not covered"
    elif not why and (attn_mask is not None or value.shape[-1] != query.shape[-1]):
        own = "a head dim of value's own is not covered"
        why = own if _instead else refused(query, key, value, attn_mask, str(kernel), deterministic)
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
    if attn_mask is not None:
        options |= as_words(attn_mask, (*query.shape[:3], key.shape[2]))
    elif not _instead:
        options["causal_shift"] = 0 if is_causal else None
    elif scale is not None:
        options["scale"] = number("scale", scale)
    o = (_instead or attention)(query, key, value, **options)
    return o if len(shape) == 4 else o.reshape(*shape[:-1], o.shape[-1])


_ADVICE = {"attn_mask": " (for a causal mask: is_causal=True)", "dropout is not covered": " (dropout_p=0.0 is)"}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile calls it when it traces
def _left(why: str) -> None:
    """Say once that a call goes to torch's own."""
    advice = next((text for word, text in _ADVICE.items() if word in why), "")
    say_once(f"fa_cli.sdpa leaves a call to torch's own: {why}{advice}; fa_cli.explain with its arguments names the backend")


def put_instead(attend: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Let sdpa call another function in the place of attention, None: attention again. Returns what it called before."""
    global _instead
    before, _instead = _instead, attend
    return before


def uncovered(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> str:
    """What of a call of scaled_dot_product_attention is not covered; empty where all is."""
    if others := [type(t).__name__ for t in (q, k, v) if not isinstance(t, torch.Tensor)]:
        return f"{others[0]} is not covered"
    if dropout:
        return "dropout is not covered"
    if q.is_nested or k.is_nested or v.is_nested:
        return "nested tensors are not covered"
    if q.device.type not in ("cpu", "cuda"):
        return f"{q.device.type} tensors are not covered"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        return f"{q.dtype}, {k.dtype} and {v.dtype} are not covered"
    if not q.dim() == k.dim() == v.dim() >= 2 or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        return "query, key and value of such shapes are not covered"
    if v.shape[-1] and not q.shape[-1]:
        return "a head dim of 0 is not covered"
    if max(q.shape[-1], v.shape[-1]) > (most := _widest(q.dtype, q.device)):
        return f"a head dim over {most} is not covered"
    same = q.shape[:-2] == k.shape[:-2]
    if mask is not None and (wrong := _unmasked(q, k, mask, causal)):
        return wrong
    grouped = gqa and q.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    return "" if same or grouped else "batches, or heads without enable_gqa=True, of different numbers are not covered"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _widest(dtype: Any, device: Any) -> int:
    return widest(storage(dtype), backend_of(device).device())


def _unmasked(q: Any, k: Any, mask: Any, causal: bool) -> str:
    """What of an attn_mask is not covered: of torch's own rules, too, so that it says what is wrong."""
    if not isinstance(mask, torch.Tensor) or mask.is_nested or mask.device != q.device:
        return "attn_mask of that kind or device is not covered"
    if mask.requires_grad and torch.is_grad_enabled():
        return "a gradient of attn_mask is not covered"
    if causal:
        return "attn_mask beside is_causal is not covered"
    if mask.dtype != torch.bool and (mask.dtype != q.dtype or q.dtype == torch.float64):
        return f"attn_mask of {mask.dtype} is not covered"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "attn_mask under torch.func is not covered"
    sizes, leads = (*q.shape[:-1], k.shape[-2]), q.dim() - 2 if q.dim() == 4 else 0  # other leading dims become heads
    shape = (1,) * (len(sizes) - mask.dim()) + tuple(mask.shape)
    fits = len(shape) == len(sizes) and all(
        n == 1 or (n == of and i >= len(sizes) - 2 - leads) for i, (n, of) in enumerate(zip(shape, sizes, strict=True))
    )
    return "" if fits else f"attn_mask of shape {tuple(mask.shape)} is not covered"


_MINUS_INFINITY = -(1 << 23)  # its bits


def as_words(mask: Any, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """An attn_mask as mask, score and tensors of attention(); sizes: batch, query heads, queries and keys. Of a dim that repeats one value it has that.

    Additive: -inf hides, by the bits of the same memory, so that a row of it has no NaN. The least float is a score like others, as
    torch's; -1e38 stands for it, which no kernel takes for what its own mask writes.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape[-4:])) if mask.dim() <= 4 else mask.reshape(1, 1, *mask.shape[-2:])
    kept = [size == 0 or (size > 1 and mask.stride(i) != 0) for i, size in enumerate(mask.shape)]
    if not any(kept):
        mask, kept[3] = mask[:, :, :, :1].expand(-1, -1, -1, sizes[3]), True
    mask = mask[tuple(slice(None) if keep else 0 for keep in kept)]
    at = ", ".join(name for name, keep in zip("bhqk", kept, strict=True) if keep)
    if mask.dtype == torch.bool:
        return {"mask": f"attn_mask[{at}] != 0", "tensors": {"attn_mask": mask}}
    mask = mask.float().contiguous()
    words = {"mask": f"attn_bits[{at}] != {_MINUS_INFINITY}", "score": f"s + max(attn_mask[{at}], -1e+38)"}
    return {**words, "tensors": {"attn_mask": mask, "attn_bits": mask.view(torch.int32)}}


def refused(q: Any, k: Any, v: Any, mask: Any, kernel: str, deterministic: bool) -> str:
    """Why no kernel takes a call with an attn_mask that is covered, or None, or with a value of another head dim; empty where one does."""
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    (heads, seq, dim), (heads_kv, seq_kv, _) = ((1, *t.shape)[-3:] for t in (q, k))
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "added"
    return str(_refused((heads, seq, dim, heads_kv, seq_kv, v.shape[-1]), kind, q.dtype, q.device, kernel, deterministic, trains))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refused(*given: Any) -> str:
    return _kept_refusal(*given)


@cache
def _kept_refusal(sizes: tuple[int, ...], kind: str, dtype: Any, device: Any, kernel: str, deterministic: bool, trains: bool) -> str:
    """The same by all that it depends on; kind: of the mask, empty without one. A GPU's tensor cores are torch's own too: without them our kernels are not what is wanted."""
    if not all(sizes):
        return ""
    heads, seq, dim, heads_kv, seq_kv, dim_v = sizes
    what, texts = "attn_mask" if kind else "a head dim of value's own", {"mask": "q >= 0"} if kind else {}
    texts |= {"score": "s + 1.0"} if kind == "added" else {}
    of, passes = storage(dtype), PASSES if trains else PASSES[:1]
    try:
        problem = Problem.of(1, heads, seq, dim, heads_kv, seq_kv, of, **texts, dim_v=dim_v)  # type: ignore[arg-type]
        on = backend_of(device).device()
        if kernel != choose.AUTO:
            kernels_of(kernel, passes, problem, on, deterministic)
            return ""
        found = automatic(passes, problem, on, deterministic).kernels.values()
    except Fault as fault:
        return f"{what} is not covered: {fault.what}"
    slow = [each.name for each in found if on.kind == "cuda" and DTYPE_BYTES[of] == 2 and each.arithmetic_for(of) == "f32"]
    return f"{what} is not covered by a kernel on tensor cores, only by {slow[0]}" if slow else ""
