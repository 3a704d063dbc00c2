"""What a call of the operator runs, and why: explain(q, k, v)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..check import choose
from ..check.choose import passed_over
from ..fault import Fault
from ..kernel import Kernel, Plan, planner
from ..problem import PASSES, Problem
from . import float8, masked, native, paged
from .arguments import flags, formulas, logits, number, shift, unexpected, usual, wrong
from .call import backend_of, check, error_of, kernels_of, storage
from .sdpa import TORCH_SDPA, as_words, refused, uncovered
from .words import in_python

_OF_SDPA = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


@dataclass(frozen=True)
class Chosen:
    """The kernel of a pass. tiles: the values of its [tile] for this call; rows: the rows of choice that gave some of them.

    above: the higher steps by name, the highest first, each with why it is not taken; empty where the kernel was named. files: those that
    may run in the kernel's place by their costs, the one that runs first; empty where only one may.
    """

    kernel: str
    number: int | None
    file: str
    deterministic: bool
    tiles: Mapping[str, str]
    rows: tuple[str, ...]
    above: Mapping[str, str]
    files: str = ""

    def __str__(self) -> str:
        number = "" if self.number is None else f"{self.number:02} "
        return f"{number}{self.kernel}, {'deterministic' if self.deterministic else 'not deterministic'}, {self.file}"

    def why(self) -> list[str]:
        """Lines on tile values, what chose them, and the higher steps."""
        lines = [f"  tile values: {', '.join(f'{name} = {value}' for name, value in self.tiles.items())}"] * bool(self.tiles)
        lines += [f"  row of choice: {row}" for row in self.rows]
        lines += [f"  files by their costs: {self.files}"] * bool(self.files)
        alike: dict[str, list[str]] = {}  # a list of one reason for fifteen steps would hide the others
        for name, why in self.above.items():
            alike.setdefault(re.sub(rf"^{re.escape(name)}_(forward|backward) ", "each ", why), []).append(name)
        return lines + [f"  not {', '.join(some)}: {in_python(why if some[1:] else self.above[some[0]])}" for why, some in alike.items()]


@dataclass(frozen=True)
class Explanation:
    """What a call runs. by: "fa-cli", or "torch" where sdpa leaves it to torch's own; then backend is torch's choice and why the reason.

    error: what torch raises where it refuses the call too; there is no backend then. verbose: whether str() says all of each pass.
    node: what calls the backward pass in torch's autograd (native.py). planned: for which device, where it is none of torch's.
    """

    by: str
    passes: Mapping[str, Chosen]
    backend: str = ""
    why: str = ""
    error: str = ""
    verbose: bool = field(default=False, compare=False, repr=False)
    node: str = field(default="", compare=False)
    planned: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.error:
            return f"nothing: {self.why}, and torch's own refuses it: {self.error}"
        if self.by == "torch":
            return f"torch's own, {self.backend}: {self.why}"
        lines = []
        for pass_, chosen in self.passes.items():
            lines += [f"{pass_}: {chosen}", *(chosen.why() if self.verbose else ())]
        lines += [f"planned for {self.planned}"] * bool(self.planned and self.verbose)
        lines += [f"backward is called by {self.node}"] * bool(self.node and self.verbose)
        return "\n".join(lines) or "nothing: a tensor is empty"


def explain(
    q: Any,
    k: Any,
    v: Any,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
    return_lse: bool = False,
    causal_shift: int | None = None,
    mask: str | Callable[..., Any] | None = None,
    score: str | Callable[..., Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    documents: Any = None,
    sinks: Any = None,
    block_table: Any = None,
    cache_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    verbose: bool = False,
    **of_sdpa: Any,
) -> Explanation:
    """What attention() runs for these arguments, which are its own, or sdpa() where one of attn_mask, dropout_p, is_causal, enable_gqa is given.

    For each pass (the backward pass where an input wants a gradient) the kernel, its file and form, its tiles, the rows of choice that gave
    them, and why no higher step is taken. Nothing is launched or compiled. print it: a line for each pass, with verbose=True all of this;
    or read its fields. Autocast is not looked at.
    Raises ValueError for what the kernel does not take, as attention does, and TypeError for another argument.
    """
    if more or set(of_sdpa) - set(_OF_SDPA):
        raise unexpected(explain, more, {name: value for name, value in of_sdpa.items() if name not in _OF_SDPA})
    words = {"mask": mask, "score": score, "tensors": tensors, "window": window, "softcap": softcap, "documents": documents}
    flags(causal=causal, deterministic=deterministic, return_lse=return_lse, verbose=verbose)
    scale, made = scale if scale is None else number("scale", scale), formulas(words)
    descales = (q_descale, k_descale, v_descale)
    others = {"sinks": sinks, "block_table": block_table, "cache_seqlens": cache_seqlens, **dict(zip(float8.NAMES, descales, strict=True))}
    if of_sdpa and (causal or causal_shift is not None or made or any(value is not None for value in others.values())):
        mine = next(
            name for name, value in {"causal": causal or None, "causal_shift": causal_shift, **words, **others}.items() if value is not None
        )
        why = "one is attention's, whose causal mask is aligned bottom-right; the other is of sdpa, whose is_causal is aligned top-left"
        raise wrong(f"explain() takes no {mine} beside {min(of_sdpa)}", why, "give the arguments of one of the two", TypeError)
    if of_sdpa:
        given = _OF_SDPA | of_sdpa
        attn_mask = given["attn_mask"]
        why = uncovered(q, k, v, attn_mask, given["dropout_p"], given["is_causal"], given["enable_gqa"])
        if (attn_mask is not None or q.shape[-1] != v.shape[-1]) and not why:
            why = refused(q, k, v, attn_mask, str(kernel), deterministic)
        if why:
            return _torchs(q, k, v, {**given, "scale": scale}, why)
        causal, causal_shift = given["is_causal"], 0 if given["is_causal"] else None
        if q.dim() != 4:
            q, k, v = (t.unsqueeze(0).flatten(0, -3).unsqueeze(0) for t in (q, k, v))
        if attn_mask is not None:
            made = words | as_words(attn_mask, (*q.shape[:3], k.shape[2]))
    elif causal_shift is not None:
        causal_shift = shift(causal_shift, causal)
    usual(q, k, v, kernel)
    if sinks is not None:
        logits(sinks, q)
    size = 0
    if block_table is not None or cache_seqlens is not None:
        paged.refuse(q, k, v, block_table, cache_seqlens)
        size, kernel = k.shape[2], paged.able() if str(kernel) == choose.AUTO else kernel
        k, v = paged.whole(k, block_table), paged.whole(v, block_table)
    if float8.takes(q, k, descales) and not float8.of_cache(q, k, v, descales, causal_shift):
        float8.refuse(q, k, v, descales, made)
    passes = PASSES if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)) else PASSES[:1]
    try:
        check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
        texts = masked.formula(q, k, v, made, causal_shift) if made else None
        if not (q.numel() and k.numel()):
            return Explanation("fa-cli", {})
        (batch, heads, seq, dim), (_, heads_kv, seq_kv, _) = q.shape, k.shape
        dtype = storage(q.dtype)
        sizes = (batch, heads, seq, dim, heads_kv, seq_kv)
        problem = Problem.of(*sizes, dtype, causal, scale, causal_shift, dim_v=v.shape[3], page_size=size, dtype_kv=storage(k.dtype))
        if texts is not None:
            problem = problem.with_(mask=texts.mask, score=texts.score, tensors=texts.given)
        device = backend_of(q.device).device()
        found = {}
        for pass_, named in kernels_of(str(kernel), passes, problem, device, deterministic).items():
            above = passed_over(named, problem, device, deterministic) if str(kernel) == choose.AUTO else {}
            found[pass_] = _chosen(named, problem, planner.plan(named, problem, device), above)
    except Fault as fault:
        raise error_of(fault) from fault
    planned = f"an H200's sms = {device.sms}, for which the CPU engine stands" if device.kind == "cpu" else ""
    return Explanation("fa-cli", found, verbose=verbose, node=native.said() if len(passes) > 1 else "", planned=planned)


def _torchs(q: Any, k: Any, v: Any, given: Mapping[str, Any], why: str) -> Explanation:
    """What torch's own does with a call: it is asked with tensors that have no values."""
    try:
        every = (q, k, v, given["attn_mask"])
        *tensors, mask = (t.to("meta") if isinstance(t, torch.Tensor) and not t.is_nested else t for t in every)
        TORCH_SDPA(*tensors, **{**given, "attn_mask": mask})
        return Explanation("torch", {}, SDPBackend(torch._fused_sdp_choice(q, k, v, **given)).name, why)
    except (RuntimeError, TypeError) as error:
        return Explanation("torch", {}, why=why, error=str(error).partition("\n")[0])


def _chosen(named: Kernel, problem: Problem, plan: Plan, above: Mapping[str, str]) -> Chosen:
    runs = planner.variant(named, problem)
    tiles, rows = {name: value for name, value in plan.values.items() if name in runs.tile}, tuple(map(str, plan.choices))
    files = choose.files_weighed(named, problem)
    return Chosen(named.name, named.number, runs.path.name, runs.deterministic, tiles, rows, above, files)
