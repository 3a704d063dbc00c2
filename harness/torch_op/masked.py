"""attention() with a mask, score or sinks of its own: the operators fa::masked_forward and fa::masked_backward, and their gradient.

A call's tensors lie where those of the kernel's workspaces end (fa/score.cuh). All else is as in operator.py, but for its short ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ..fault import Fault
from ..formula import DOCUMENT, Given, stated
from ..problem import PASSES, Problem, told
from .arguments import looped, no_second, packed, wrong
from .call import Ready, backend_of, check, check_kinds, edited, error_of, is_capturing, kernels_of, ready, storage
from .traced import traced


@dataclass(frozen=True)
class Masked(Ready):
    """A call with the addresses of the tensors that its texts name, and of dsinks."""

    named: tuple[int, ...]

    def workspaces(self, *of: Any, **more: Any) -> tuple[list[int], Any]:
        starts, held = super().workspaces(*of, **more)
        return [*starts, *self.named], held


#: What torch.compile(fullgraph=True) says of a function.
_AS_TEXT = "a mask or score that is a function is called with symbols, which torch.compile cannot trace; with fullgraph write it as a text"


#: The name of the tensor of sinks in a problem's text.
SINKS = "sink_logits"


class Formula(NamedTuple):
    """The mask and score of a call, as texts, and the tensors that they name, as a kernel reads them; sinks, where it is the kernel that adds them."""

    values: list[Any]
    names: str  #: of the tensors; one with a + behind it never falls along a row
    mask: str | None
    score: str | None
    sinks: Any = None  #: a logit of each query head, float32

    @property
    def given(self) -> tuple[Given, ...]:
        """Its tensors without their values, in the order in which a kernel is given them."""
        named = tuple(
            Given(name.removesuffix("+"), str(value.dtype).removeprefix("torch."), tuple(value.shape), sorted=name.endswith("+"))
            for name, value in zip(self.names.split(), self.values, strict=True)
        )
        return named if self.sinks is None else (*named, Given(SINKS, "float32", tuple(self.sinks.shape)))

    def behind(self, descales: Mapping[str, Any]) -> Formula:
        """The same with what elements of 8 bits are worth, which a problem has first."""
        return self._replace(values=[*descales.values(), *self.values], names=" ".join((*descales, self.names)).strip())


def attention(
    q: Any,
    k: Any,
    v: Any,
    formulas: Mapping[str, Any],
    options: Mapping[str, Any],
    causal_shift: int | None,
    sinks: Any = None,
    descales: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """O and logsumexp. formulas: as arguments.formulas gives them; options: causal, scale, kernel and deterministic, as of the public one;
    descales: as float8.of_cache gives them."""
    q, k, v = lowered(q, k, v)
    made = formula(q, k, v, formulas, causal_shift) if formulas else Formula([], "", None, None)
    made = made.behind(descales)
    given = tuple(options[name] for name in ("causal", "scale", "kernel", "deterministic"))
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks))
    fused = made if sinks is None else made._replace(sinks=sinks.to(torch.float32).contiguous())
    if sinks is None or _takes_sinks(q, k, v, fused, given, trains):
        o, lse = _FORWARD(q, k, v, *fused, *given, trains)
        return o, lse
    o, lse = _FORWARD(q, k, v, *made, *given, trains)
    return with_sinks(sinks, o, lse)


def lowered(*tensors: Any) -> tuple[Any, ...]:
    """Tensors as autocast, where it is on, has them; a cache of 8 bits stays."""
    kind = "cuda" if tensors[0].is_cuda else tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    lower, kept = torch.get_autocast_dtype(kind), (torch.float64, torch.float8_e4m3fn)
    return tuple(t if t.dtype in kept else t.to(lower) for t in tensors)


def fuses_sinks(q: Any, k: Any, v: Any) -> bool:
    """Whether a kernel may be asked to add the sinks: not in float64, for their logits are float32, and of no call that torch transforms."""
    usual = q.dtype != torch.float64 and q.device.type in ("cpu", "cuda") and q.dim() == k.dim() == v.dim() == 4
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return usual and not transformed


def _takes_sinks(q: Any, k: Any, v: Any, formula: Formula, options: tuple[Any, ...], trains: bool) -> bool:
    """Whether the kernels of both passes are the same with sinks and without: else one that takes them may be the slower way."""
    if not fuses_sinks(q, k, v) or q.numel() == 0 or k.numel() == 0 or any(each.name == SINKS for each in formula.given[:-1]):
        return False
    (batch, heads, seq, dim), (_, heads_kv, seq_kv, _) = q.shape, k.shape
    kind = (batch, heads, seq, dim, heads_kv, seq_kv), v.shape[3], (storage(q.dtype), storage(k.dtype)), q.device
    return _same_kernels(*kind, *options, edited(options[2]), formula.mask, formula.score, formula.given, trains)


@lru_cache(maxsize=1024)
def _same_kernels(
    sizes: tuple[int, int, int, int, int, int],
    dim_v: int,
    dtypes: tuple[str, str],
    device: Any,
    causal: bool,
    scale: float | None,
    spec: str,
    deterministic: bool,
    stamp: object,
    mask: str | None,
    score: str | None,
    given: tuple[Given, ...],
    trains: bool,
) -> bool:
    found = []
    try:
        for sinks, tensors in ((f"{SINKS}[h]", given), (None, given[:-1])):
            problem = Problem.of(*sizes, dtypes[0], causal, scale, None, mask, score, tensors, sinks, dim_v, dtype_kv=dtypes[1])
            kernels = kernels_of(spec, PASSES if trains else PASSES[:1], problem, backend_of(device).device(), deterministic)
            found.append([kernel.path for kernel in kernels.values()])
    except Fault:  # of the other way it is told
        return False
    return found[0] == found[1]


def formula(q: Any, k: Any, v: Any, given: Mapping[str, Any], causal_shift: int | None) -> Formula:
    """The mask and score of a call with these tensors. given: as arguments.formulas gives it. Raises ValueError for what is wrong with it."""
    check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    (batch, heads, seq, dim), (_, heads_kv, seq_kv, _) = q.shape, k.shape
    if causal_shift is not None:
        why = "their q counts bottom-right, and a causal mask that is shifted would count otherwise"
        raise wrong("causal_shift beside a mask or score", why, f'write it as a mask, "k <= q + {causal_shift - seq_kv + seq}"')
    texts, known = {name: given[name] for name in ("mask", "score", "window", "softcap")}, dict(given["tensors"])
    documents = given["documents"]
    if callable(texts["mask"]) or callable(texts["score"]):
        texts = _texts(texts, {"batch": batch, "heads_q": heads, "heads_kv": heads_kv, "seq_q": seq, "seq_kv": seq_kv}, known)
    if documents is not None:
        if seq != seq_kv:
            why = "a query is of the document at its place"
            raise wrong(f"documents with {seq} queries and {seq_kv} keys", why, 'mask="doc_q[b, q] == doc_k[b, k]" takes ids of both')
        if DOCUMENT in known:
            hint = "give yours another name"
            raise wrong(f"a tensor called {DOCUMENT} beside documents", f"{DOCUMENT} is the tensor of documents", hint)
        known[DOCUMENT] = torch.ops.fa.documents(documents, batch, seq_kv).to(q.device)
    named, mask, score = _stated((batch, heads, seq, dim, heads_kv, seq_kv), documents is not None, tuple(texts.items()))
    used = [each[0] for each in named]
    unknown = sorted(name for name in known if name not in used)
    if unknown and batch and heads and seq and seq_kv and dim:  # the texts of a call without elements are not looked at
        raise wrong(f"neither mask nor score names {', '.join(unknown)}", f"they name {', '.join(used) or 'no tensor'}", "leave it out")
    values = [_placed(each, known, q.device) for each in named]
    names = " ".join(name + "+" * (documents is not None and name == DOCUMENT) for name in used)
    return Formula(values, names, mask, score)


def with_sinks(sinks: Any, o: Any, lse: Any) -> tuple[Any, Any]:
    """O and logsumexp with a logit of each query head in the row sum: O takes the share that the keys have of it."""
    sink = sinks.to(lse.dtype)[:, None]
    above = torch.where(sink == -math.inf, math.inf, lse - sink)  # of a row without a key -inf - -inf would be NaN
    return (o * torch.sigmoid(above)[..., None]).to(o.dtype), torch.logaddexp(lse, sink)


#: The borders of documents that were looked at, with their version and the length.
_looked_at = WeakTensorKeyDictionary()


def _documents(borders: Any, batch: int, length: int) -> Any:
    """The number of the document of each position, (batch, length), of cu_seqlens. A GPU's are looked at once, since that waits for it."""
    known = None if borders.is_inference() else (borders._version, length)
    if not (borders.is_cuda and (is_capturing() or (known and _looked_at.get(borders) == known))):
        packed(borders, length)
        if known:
            _looked_at[borders] = known
    places = torch.arange(length, device=borders.device, dtype=borders.dtype)
    return torch.searchsorted(borders.contiguous(), places, right=True, out_int32=True).expand(batch, length).contiguous()


@torch.compiler.disable(reason=_AS_TEXT)  # type: ignore[untyped-decorator]
def _texts(given: Mapping[str, Any], sizes: dict[str, int], tensors: dict[str, Any]) -> dict[str, Any]:
    """Words of a call whose functions are texts. What the functions capture goes to `tensors`. Raises ValueError for what has no text."""
    made = dict(given)
    try:
        with told():
            for kind in ("mask", "score"):
                if callable(made[kind]):
                    found = traced(kind, made[kind], sizes, tensors)
                    if kind == "score" and made["mask"] is not None and "mask" in found:
                        found["mask"] = f"({made['mask']}) and ({found['mask']})"
                    made |= found
    except Fault as fault:
        raise error_of(fault) from fault
    return made


#: A named tensor: its name, type and shape.
_Named = tuple[str, str, tuple[int, ...]]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _stated(
    shape: tuple[int, ...], documents: bool, given: tuple[tuple[str, Any], ...]
) -> tuple[tuple[_Named, ...], str | None, str | None]:
    """The named tensors of a call and its texts. Raises ValueError for what is wrong with them."""
    try:
        with told():
            texts = stated(shape[1], documents=documents, **dict(given))
        batch, heads, seq, dim, heads_kv, seq_kv = shape
        problem = (
            Problem.of(batch, heads, seq, dim, heads_kv, seq_kv, mask=texts.get("mask"), score=texts.get("score")) if all(shape) else None
        )
    except Fault as fault:
        raise error_of(fault) from fault
    named = tuple((each.name, each.dtype, each.shape) for each in problem.tensors) if problem else ()
    return named, texts.get("mask"), texts.get("score")


def _placed(named: _Named, known: Mapping[str, Any], device: Any) -> Any:
    """A named tensor as a kernel reads it."""
    name, dtype, shape = named
    if name not in known:
        raise wrong(f"no values for {name}", "a mask or score names it as a tensor", f"tensors={{{name!r}: …}}")
    tensor = known[name]
    if tuple(tensor.shape) != shape:
        hint = "give it that shape; lengths and heads are those of q and k"
        raise wrong(f"{name} has the shape {tuple(tensor.shape)}", f"the text asks for {shape}", hint)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise wrong(f"no gradient flows to {name}", "gradients flow to q, k and v, and to sinks", f"{name}.detach()")
    if dtype == "int32" and (tensor.is_floating_point() or tensor.is_complex()):
        raise wrong(f"{name} is of {tensor.dtype}", "a mask takes integers", f"use {name}.int(), or name it in a score")
    return tensor.to(device=device, dtype=getattr(torch, dtype)).contiguous()


def _call(
    pass_: str, tensors: tuple[Any, ...], formula: Formula, options: tuple[Any, ...], trains: bool, dlse: bool, dsinks: Any = None
) -> Any:
    """What runs a pass; None where there is nothing to launch."""
    values, _, mask, score, sinks = formula
    causal, scale, kernel, deterministic = options
    q, k, v = tensors[:3]
    kind = ((q.shape, k.shape, v.shape), tuple(t.stride() for t in tensors), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    texts = {"mask": mask, "score": score, "tensors": formula.given, "sinks": None if sinks is None else f"{SINKS}[h]"}
    found = ready(pass_, kernel, edited(kernel), *kind, causal, scale, None, deterministic, trains, dlse, **texts)
    named = tuple(value.data_ptr() for value in (*values, sinks, dsinks) if value is not None)
    return found and Masked(**{**vars(found), "fixed": None}, named=named)


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    formula, options, trains = Formula(*rest[:5]), rest[5:9], rest[9]
    try:
        call = _call("forward", (q, k, v), formula, options, trains, False)
        if call is not None:
            o, lse = call((q, k, v))
            return o, lse
    except Fault as fault:
        raise error_of(fault) from fault
    o, lse = _fake_forward(q, k, v)
    return o.zero_(), lse.fill_(math.nan if k.shape[2] else -math.inf)


def _backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *rest: Any) -> tuple[Any, Any, Any, Any]:
    formula, options, dlse = Formula(*rest[:5]), rest[5:9], rest[9]
    dsinks = None if formula.sinks is None else torch.empty_like(formula.sinks)
    do, scores = do.to(q.dtype), [lse.contiguous()] + ([] if dlse is None else [dlse.to(lse.dtype).contiguous()])
    try:
        call = _call("backward", (q, k, v, o, do), formula, options, True, dlse is not None, dsinks)
        if call is not None:
            dq, dk, dv = call((q, k, v, o, do), tuple(scores))
            return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks
    except Fault as fault:
        raise error_of(fault) from fault
    dq, dk, dv, dsinks = (t.zero_() for t in _fake_backward(do, q, k, v, o, lse, *rest))
    return dq, dk, dv, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, values, names, mask, score, sinks, *options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, *values)
    ctx.set_materialize_grads(False)
    ctx.texts, ctx.options = (names, mask, score), options[:-1]


def _gradients(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, o, lse, sinks, *values = ctx.saved_tensors
    made: tuple[Any, ...] = (None, None, None, None)
    if do is not None or dlse is not None:
        given = torch.zeros_like(o) if do is None else do, q, k, v, o, lse, values
        made = _BACKWARD(*given, *ctx.texts, sinks, *ctx.options, dlse)
    gradients = [d if wanted else None for d, wanted in zip(made[:3], ctx.needs_input_grad, strict=False)]
    return (*gradients, [None] * len(values), None, None, None, None if sinks is None else made[3], *[None] * 5)


def _fake_forward(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    check_kinds((q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _fake_backward(_do: Any, q: Any, k: Any, v: Any, _o: Any, _lse: Any, *rest: Any) -> tuple[Any, Any, Any, Any]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if rest[4] is None else torch.empty_like(rest[4])


#: Formula.
_FORMULA = "Tensor[] named, str names, str? mask, str? score, Tensor? sinks"
_OPTIONS = "bool causal, float? scale, str kernel, bool deterministic"
_FORWARD_OP = torch.library.custom_op(
    "fa::masked_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_FORMULA}, {_OPTIONS}, bool trains) -> (Tensor, Tensor)",
)
_BACKWARD_OP = torch.library.custom_op(
    "fa::masked_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dO, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_FORMULA}, {_OPTIONS}, Tensor? dlse)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_FORWARD_OP.register_fake(_fake_forward)
_BACKWARD_OP.register_fake(_fake_backward)
_FORWARD_OP.register_autograd(_gradients, setup_context=_save)
_BACKWARD_OP.register_autograd(no_second)
_FORWARD_OP.register_vmap(looped(_FORWARD_OP))
_BACKWARD_OP.register_vmap(looped(_BACKWARD_OP))
_FORWARD, _BACKWARD = torch.ops.fa.masked_forward.default, torch.ops.fa.masked_backward.default

_DOCUMENTS_OP = torch.library.custom_op(
    "fa::documents", _documents, mutates_args=(), schema="(Tensor borders, SymInt batch, SymInt length) -> Tensor"
)
_DOCUMENTS_OP.register_fake(lambda borders, batch, length: torch.empty((batch, length), dtype=torch.int32, device=borders.device))
