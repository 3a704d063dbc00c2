"""attention() on a cache in pages (block_table, cache_seqlens): the operator fa::paged_forward. No gradient flows through a cache.

k and v are pools, (pages, heads_kv, page_size, head_dim). Launches depend on the most keys that the table has room for, not on the lengths:
a CUDA graph may be replayed when the values of block_table and cache_seqlens have changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..check import choose
from ..fault import Fault
from ..kernel import catalogue
from . import masked
from .arguments import looped, wrong
from .call import check, edited, error_of, ready
from .masked import Formula

_LAYOUT = (
    "k and v are (pages, heads_kv, page_size, head_dim): of flash-attn's (pages, page_size, heads_kv, head_dim) transpose(1, 2) makes it"
)


def attention(
    q: Any,
    k: Any,
    v: Any,
    pages: tuple[Any, Any],
    formulas: Mapping[str, Any],
    options: Mapping[str, Any],
    causal_shift: int | None,
    descales: Mapping[str, Any],
) -> tuple[Any, Any]:
    """O and logsumexp. pages: block_table, (batch, most pages of a sequence), and cache_seqlens, (batch), integers. formulas, options,
    descales: as masked.attention has them. Raises ValueError, TypeError where what is no tensor."""
    refuse(q, k, v, *pages)
    block_table = pages[0]
    q, k, v = masked.lowered(q, k, v)
    made = Formula([], "", None, None)
    if formulas:
        made = masked.formula(q, whole(k, block_table), whole(v, block_table), formulas, causal_shift)
    elif causal_shift is not None:
        raise wrong("causal_shift beside a block_table", "each sequence has its own: its last query is at its last key", "leave it out")
    made = made.behind(descales)
    given = (table.to(q.device) for table in pages)
    o, lse = _FORWARD(q, k, v, *given, *made[:4], *(options[name] for name in ("causal", "scale", "kernel", "deterministic")))
    return o, lse


def refuse(q: Any, k: Any, v: Any, block_table: Any, cache_seqlens: Any) -> None:
    """Raise ValueError, or TypeError, for what are no queries and no cache in pages of theirs; values are not looked at."""
    if block_table is None or cache_seqlens is None:
        name, other = ("cache_seqlens", "block_table") if cache_seqlens is None else ("block_table", "cache_seqlens")
        raise wrong(f"{other} without {name}", "a cache in pages has both", f"{name}=a tensor of int32, or leave {other} out")
    if any(t.dim() != 4 for t in (q, k, v)):
        raise wrong(f"k has the shape {tuple(k.shape)}", "attention on pages takes four dimensions", _LAYOUT)
    batch, shapes = q.shape[0], {"block_table": "(batch, pages of a sequence)", "cache_seqlens": "(batch)"}
    for name, value, dims in (("block_table", block_table, 2), ("cache_seqlens", cache_seqlens, 1)):
        if not isinstance(value, torch.Tensor):
            raise wrong(
                f"{name} is a {type(value).__name__}", "it is a torch tensor", f"torch.tensor({name}, dtype=torch.int32)", TypeError
            )
        if value.dim() != dims or value.shape[0] != batch or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            what = f"{name} is of {value.dtype} with the shape {tuple(value.shape)}"
            raise wrong(what, f"it has integers, {shapes[name]}, for {batch} sequences", f"give {name} a row for each sequence")
    if k.shape[:3] != v.shape[:3]:
        raise wrong(f"k and v are {tuple(k.shape)} and {tuple(v.shape)}", "they are pools of the same pages", _LAYOUT)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise wrong("a gradient through a cache in pages", "there is none", "call it under torch.no_grad(), or detach q, k and v")


@cache
def able() -> str:
    """The kernel that takes pages."""
    return next(kernel.name for kernel in catalogue() if kernel.paged)


def whole(pool: Any, table: Any) -> Any:
    """A pool as a tensor of the shape that K or V of all sequences would have, (batch, heads_kv, most keys, columns), whose values are none."""
    heads, columns = pool.shape[1], pool.shape[3]
    return pool.new_empty(()).expand(table.shape[0], heads, table.shape[1] * pool.shape[2], columns)


def _refuse_values(table: Any, lengths: Any, k: Any) -> None:
    """Raise ValueError for a length or page that there is no room for: of a CPU's, since a GPU's would be waited for."""
    (_, columns), (pages, _, size, _) = table.shape, k.shape
    for b, keys in enumerate(lengths.tolist()):
        if not 0 <= keys <= columns * size:
            why = f"block_table has {columns} pages of {size} keys for each sequence"
            raise wrong(f"cache_seqlens[{b}] is {keys}", why, "nothing was read: give the table more columns")
        for i, page in enumerate(table[b, : -(-keys // size)].tolist()):
            if not 0 <= page < pages:
                raise wrong(f"block_table[{b}, {i}] is {page}", f"k has the pages 0 to {pages - 1}", "nothing was read: correct the table")


def _forward(q: Any, k: Any, v: Any, table: Any, lengths: Any, *rest: Any) -> tuple[Any, Any]:
    formula, (causal, scale, kernel, deterministic) = Formula(*rest[:4]), rest[4:]
    kernel = able() if kernel == choose.AUTO else kernel
    shapes = (q.shape, *(whole(t, table).shape for t in (k, v)))
    try:
        check(shapes, (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
        if q.device.type == "cpu":
            _refuse_values(table, lengths, k)
        table, lengths = (each.to(torch.int32).contiguous() for each in (table, lengths))
        kind = (shapes, tuple(t.stride() for t in (q, k, v)), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
        texts = (formula.mask, formula.score, formula.given)
        found = ready("forward", kernel, edited(kernel), *kind, causal, scale, None, deterministic, False, False, *texts, k.shape[2])
        if found is not None:
            named = tuple(value.data_ptr() for value in (*formula.values, table, lengths))
            o, lse = masked.Masked(**{**vars(found), "fixed": None}, named=named)((q, k, v))
            return o, lse
    except Fault as fault:
        raise error_of(fault) from fault
    o, lse = _fake(q, k, v)
    return o.zero_(), lse.fill_(-math.inf)


def _fake(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


_FORWARD_OP = torch.library.custom_op(
    "fa::paged_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor cache_seqlens, Tensor[] named, str names, str? mask, str? score,"
    " bool causal, float? scale, str kernel, bool deterministic) -> (Tensor, Tensor)",
)
_FORWARD_OP.register_fake(_fake)
_FORWARD_OP.register_vmap(looped(_FORWARD_OP))
_FORWARD = torch.ops.fa.paged_forward.default
