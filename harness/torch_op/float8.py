"""attention() on tensors of 8 bits, and what makes them: the operator fa::float8_forward, without a gradient, and quantize.

An element of float8_e4m3fn stands for itself times the descale of its batch and key head, as FlashAttention-3's interface has it (Shah et al.
2024, arXiv 2407.08608, section 3.3). O is bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..fault import Fault
from ..formula import Given
from ..problem import DESCALES
from . import masked
from .arguments import looped, usual, wrong
from .call import check, check_kinds, edited, error_of, ready

#: The largest number of float8_e4m3fn.
_MOST = 448.0
#: The least descale: of smaller numbers / 448 nothing would be left in float32, and 0 / 0 is NaN.
_LEAST = 2.0**-126
#: The arguments, in the order of DESCALES.
NAMES = ("q_descale", "k_descale", "v_descale")


def takes(q: Any, k: Any, descales: tuple[Any, ...]) -> bool:
    """Whether a call is one of 8 bits. Raises ValueError for descales beside another type."""
    if torch.float8_e4m3fn in (q.dtype, k.dtype):
        return True
    if given := [name for name, value in zip(NAMES, descales, strict=True) if value is not None]:
        why = "it is what an element of 8 bits is worth"
        raise wrong(f"{given[0]} beside q, k and v of {q.dtype}", why, "leave it out, or give float8_e4m3fn: fa_cli.quantize makes it")
    return False


def attention(
    q: Any, k: Any, v: Any, descales: tuple[Any, ...], formulas: Mapping[str, Any], options: Mapping[str, Any], causal_shift: int | None
) -> tuple[Any, Any]:
    """O, bfloat16, and logsumexp. descales: of q, k and v, or None for 1; options: as masked.attention has them. Raises ValueError."""
    refuse(q, k, v, descales, formulas)
    given = (_placed(value, q, k) for value in descales)
    o, lse = _FORWARD(q, k, v, *given, *(options[name] for name in ("causal", "scale", "kernel", "deterministic")), causal_shift)
    return o, lse


def refuse(q: Any, k: Any, v: Any, descales: tuple[Any, ...], formulas: Mapping[str, Any]) -> None:
    """Raise ValueError, or TypeError, for what a call of 8 bits does not take; values are not looked at."""
    check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    if name := next((name for name, value in formulas.items() if value is not None and name != "tensors"), ""):
        raise wrong(f"{name} beside q, k and v of 8 bits", "no kernel of 8 bits takes it", "leave it out, or use q.bfloat16(), k and v too")
    _refuse_descales(q, k, v, descales)


def of_cache(q: Any, k: Any, v: Any, descales: tuple[Any, ...], causal_shift: int | None) -> dict[str, Any]:
    """What an element of k and v of 8 bits beside q of 16 is worth, by the names of DESCALES, (batch, heads_kv), float32; nothing where they
    are of q's type. Raises ValueError, or TypeError, for what such a call does not take."""
    if k.dtype == q.dtype:
        return {}
    if descales[0] is not None:
        raise wrong(f"q_descale beside q of {q.dtype}", "it is what an element of 8 bits is worth", "leave it out")
    if causal_shift is not None:
        hint = 'leave it out, or write it as a mask, "k <= q + 3"'
        raise wrong("causal_shift beside a cache of 8 bits", "its causal mask is aligned bottom-right", hint)
    (cast,) = masked.lowered(q)
    check_kinds((cast.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    _refuse_descales(q, k, v, descales)
    return {DESCALES[name]: _placed(value, q, k) for name, value in zip("KV", descales[1:], strict=True)}


def _placed(value: Any, q: Any, k: Any) -> Any:
    """A descale as a kernel reads it, (batch, heads_kv), of one, a number for all or None, which is 1."""
    value = torch.ones((), device=q.device) if value is None else value
    return value.to(device=q.device, dtype=torch.float32).expand(q.shape[0], k.shape[1]).contiguous()


def _refuse_descales(q: Any, k: Any, v: Any, descales: tuple[Any, ...]) -> None:
    """Raise ValueError, or TypeError, for descales that are none, and where a gradient is wanted."""
    batch, heads = q.shape[0], k.shape[1]
    for name, value in zip(NAMES, descales, strict=True):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            what, why = f"{name} is a {type(value).__name__}", "it is a torch tensor, a number for each batch and key head"
            raise wrong(what, why, f"torch.full(({batch}, {heads}), 0.5)", TypeError)
        if value.dim() and tuple(value.shape) != (batch, heads) or not value.is_floating_point():
            what, why = f"{name} is of {value.dtype} with the shape {tuple(value.shape)}", "it has a number for each batch and key head"
            raise wrong(what, why, f"give it the shape ({batch}, {heads}), or one number for all")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, *descales)):
        why = "no kernel of 8 bits has a backward pass"
        raise wrong("a gradient through tensors of 8 bits", why, "call it under torch.no_grad(), or attend to q, k and v in bfloat16")


def given(batch: int, heads_kv: int) -> tuple[Given, ...]:
    """The descales of a problem whose calls have their values."""
    return tuple(Given(name, "float32", (batch, heads_kv)) for name in DESCALES.values())


def _forward(q: Any, k: Any, v: Any, descale_q: Any, descale_k: Any, descale_v: Any, *rest: Any) -> tuple[Any, Any]:
    causal, scale, kernel, deterministic, causal_shift = rest
    kind = ((q.shape, k.shape, v.shape), tuple(t.stride() for t in (q, k, v)), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    options = causal, scale, causal_shift, deterministic
    try:
        found = ready("forward", kernel, edited(kernel), *kind, *options, False, False, tensors=given(k.shape[0], k.shape[1]))
        if found is not None:
            named = tuple(value.data_ptr() for value in (descale_q, descale_k, descale_v))
            o, lse = masked.Masked(**{**vars(found), "fixed": None}, named=named)((q, k, v))
            return o, lse
    except Fault as fault:
        raise error_of(fault) from fault
    o, lse = _fake(q, k, v)
    return o.zero_(), lse.fill_(math.nan if k.shape[2] else -math.inf)


def _fake(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    check_kinds((q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.bfloat16, device=q.device)
    return o, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


_FORWARD_OP = torch.library.custom_op(
    "fa::float8_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor descale_q, Tensor descale_k, Tensor descale_v, bool causal, float? scale, str kernel,"
    " bool deterministic, SymInt? causal_shift) -> (Tensor, Tensor)",
)
_FORWARD_OP.register_fake(_fake)
_FORWARD_OP.register_vmap(looped(_FORWARD_OP))
_FORWARD = torch.ops.fa.float8_forward.default


# -- quantisation -----------------------------------------------------------------------------------------------------


def quantize(q: Any, k: Any, v: Any, rotate: bool = False, seed: int = 0) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """q, k and v rounded to float8_e4m3fn, and their descales: attention(*tensors, **descales).

    q: (batch, heads_q, seq_q, head_dim), k and v as attention takes them, of real numbers. The descale of a batch and key head, float32, is
    its largest magnitude / 448 (of q: over the query heads of the group), so that nothing is cut off; of zeros it is 1.
    rotate: q and k are multiplied by the same random orthogonal matrix first, a Hadamard matrix whose rows have random signs / sqrt(head_dim).
    q k^T is the same but for rounding, and an outlier's magnitude is spread over its row ("incoherent processing": Chee et al. 2023,
    arXiv 2307.13304; for attention Shah et al. 2024, arXiv 2407.08608, section 3.3). Raises ValueError where head_dim is no power of 2 then,
    and for what attention does not take; TypeError for what is no tensor.
    """
    usual(q, k, v, "")
    check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    q, k, v = (t.detach().to(torch.float32) for t in (q, k, v))
    if rotate:
        q, k = rotated(q, seed), rotated(k, seed)
    made = [_rounded(t, k.shape[1]) for t in (q, k, v)]
    return (made[0][0], made[1][0], made[2][0]), {name: descale for name, (_, descale) in zip(NAMES, made, strict=True)}


def rotated(x: Any, seed: int) -> Any:
    """Rows of x, (…, n), float32, times a random orthogonal matrix: signs of a seed, then a fast Hadamard transform / sqrt(n)."""
    n = int(x.shape[-1])
    if n & (n - 1):
        raise wrong(f"head_dim is {n}", "a Hadamard transform is of a power of 2", "leave rotate out, or pad q and k with zeros")
    signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)).to(x) * 2 - 1
    x, half = x * signs, 1
    while half < n:
        pairs = x.unflatten(-1, (n // (2 * half), 2, half))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        half *= 2
    return x * n**-0.5


def _rounded(x: Any, heads_kv: int) -> tuple[Any, Any]:
    """x in float8_e4m3fn, and its descales (batch, heads_kv)."""
    groups = x.unflatten(1, (heads_kv, x.shape[1] // max(heads_kv, 1)))
    most = groups.abs().amax((2, 3, 4)) if x.numel() else x.new_zeros((x.shape[0], heads_kv))
    descale = torch.where(most > 0, (most / _MOST).clamp_min(_LEAST), 1.0)
    elements = (groups / descale[:, :, None, None, None]).clamp(-_MOST, _MOST)
    return elements.flatten(1, 2).to(torch.float8_e4m3fn), descale
