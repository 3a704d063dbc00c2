"""Attention over the ranks of a torch.distributed process group: ring_attention(), as a ring, by exchange of heads, or both.

Every message is a point-to-point one of the caller's own group, also those of the all-to-all form: no further groups are made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .. import backends
from ..check import choose
from ..check.request import Request
from ..fault import UsageFault
from ..kernel import planner
from ..partition import KINDS, Chunk, Partition, Task, joined, rows, shards
from ..problem import Problem
from .arguments import number
from .operator import attention
from .ranks import Arrival, agree, carriers, exchange, members
from .words import told

FORMS = ("auto", "ring", "all_to_all")


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    causal: bool = False,
    scale: float | None = None,
    partition: str = "zigzag",
    form: str = "auto",
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
) -> Any:
    """Attention of a sequence whose rows are shared out over the n ranks of a process group: this rank's rows of O, like q.

    q: (batch, heads_q, local rows, head_dim), k and v: (batch, heads_kv, local rows, head_dim): this rank's shards of a self-attention.
    Local rows may differ from rank to rank, and may be 0 (see partition); all else is the same on all ranks. Gradients flow to q, k and v, once; the
    backward pass sends messages too, so all ranks run it. scale, kernel and deterministic as for :func:`attention`; with
    deterministic, partial results are merged in a fixed order. Under autocast the inputs are cast as torch's are.

    group: a ProcessGroup or a one-dimensional DeviceMesh, by default the world. gloo serves CPU tensors, NCCL those of a GPU.
    partition: "zigzag": the first half of a rank's rows (rounded up) is chunk r of 2n, the second half chunk 2n - 1 - r, which balances the
    causal mask (Zhu's ring-flash-attention; Llama 3, arXiv 2407.21783). The chunks are even, as torch.tensor_split's: under the causal mask
    local rows that differ by more than one are refused. "contiguous": rank r has the r-th run of rows, as many as it likes.

    form: how the rows meet. Bytes are those that a rank sends, for B sequences, L local rows, D head dims and elements of e bytes.
    - "ring": K and V travel from rank to rank, one step ahead of the computation; partial results are merged by their logsumexp in
      float32. In the backward pass dK and dV travel behind K and V, in float32 (Ring Attention, Liu, Zaharia, Abbeel 2023,
      arXiv 2310.01889). Forward (n - 1) 2 B heads_kv L D e, backward (n - 1) 2 B heads_kv L D (e + 4).
    - "all_to_all": the ranks exchange rows for heads, so that each computes heads_q / n heads of the whole sequence, and exchange back
      (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). n divides heads_kv. Each pass (n - 1) / n (2 heads_q + 2 heads_kv) B L D e.
    - "auto": teams of u neighbouring ranks exchange heads, and n / u teams form a ring (USP, Fang & Zhao 2024, arXiv 2405.07719). u is the
      divisor of n and heads_kv for which forward and backward pass together send the fewest bytes: (u - 1) / u (2 heads_q + 2 heads_kv)
      B L D e for each pass, and n / u - 1 in place of n - 1 in the ring's terms.

    The ranks agree on shapes and arguments before the first message, in each call, by one small all_gather. For a GPU that waits for
    the device where the group is NCCL's alone; init_process_group("cpu:gloo,cuda:nccl") or :func:`context_parallel` avoids the wait.

    Raises ValueError on all ranks where they do not agree, or where the kernel does not take the case; RuntimeError without a process
    group, and where a rank has ended or does not answer within the timeout of the group (init_process_group's timeout).
    """
    scale = scale if scale is None else number("scale", scale)
    return over_ranks(q, k, v, group, Options(causal, scale, partition, form, str(kernel), deterministic))


@dataclass(frozen=True)
class Options:
    """The arguments of a call besides its tensors and its group."""

    causal: bool
    scale: float | None
    partition: str
    form: str
    kernel: str
    deterministic: bool


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def over_ranks(q: Any, k: Any, v: Any, group: Any, options: Options, agreed: dict[Any, tuple[int, ...]] | None = None) -> Any:
    """As :func:`ring_attention`. agreed: the lengths by what was agreed on, kept by a caller whose lengths do not change."""
    group = members(group)
    kind = "cuda" if q.is_cuda else q.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        q, k, v = (t if t.dtype == torch.float64 else t.to(lower) for t in (q, k, v))
    trains = [bool(torch.is_grad_enabled() and t.requires_grad) for t in (q, k, v)]
    mine = {
        **{"dimensions": q.dim(), "rows": q.shape[-2] if q.dim() > 1 else 0, "dtype": str(q.dtype).removeprefix("torch.")},
        **({"batch": q.shape[0], "heads_q": q.shape[1], "heads_kv": k.shape[1], "head_dim": q.shape[3]} if q.dim() == k.dim() == 4 else {}),
        **{"device": kind, "requires_grad": trains, **vars(options)},
    }
    key = json.dumps(mine, default=str)
    lengths = agreed.get(key) if agreed is not None else None
    if lengths is None:
        every = agree("ring_attention", mine, group, free=("rows",), wrong=_wrong(q, k, v, group, options))
        lengths = tuple(each["rows"] for each in every)
        if agreed is not None:
            agreed[key] = lengths
    if not sum(lengths) * math.prod((*q.shape[:2], q.shape[3])):
        return q.clone()
    try:
        width = _width(options.form, len(lengths), q.shape[1], k.shape[1], q.element_size())
        plan = _plan(q.shape[0], q.shape[1], q.shape[3], k.shape[1], lengths, width, mine["dtype"], options)
        _check_kernel(plan, options.kernel, options.deterministic, any(trains), str(q.device))
    except UsageFault as fault:
        raise ValueError(told(fault)) from fault
    call = _Call(group, dist.get_rank(group), plan, options.kernel, options.deterministic, any(trains))
    if width > 1:
        q, k, v = _Exchange.apply(call, True, q, k, v)
    if plan.ring.ranks > 1:
        o = _Ring.apply(call, q, k, v)
    else:
        o = attention(q, k, v, causal=options.causal, scale=options.scale, kernel=options.kernel, deterministic=options.deterministic)
    return _Exchange.apply(call, False, o)[0] if width > 1 else o


def _wrong(q: Any, k: Any, v: Any, group: Any, options: Options) -> str:
    """What is wrong with this rank's tensors and arguments; empty where nothing is."""
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"ring_attention takes (batch, heads, local rows, head_dim), not {shapes}"
    if k.shape != v.shape or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        return f"q, k and v do not belong together: {shapes}; k and v have the batch, the local rows and the head_dim of q"
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        return f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly: heads_kv divides heads_q"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        return f"q, k and v are {kinds}: they must be of one dtype and on one device"
    for name, value, known in (("partition", options.partition, KINDS), ("form", options.form, FORMS)):
        if value not in known:
            return f"unknown {name} {value!r}; known: {', '.join(known)}"
    by = carriers(group).get(q.device.type)
    if by is None or (by == "gloo" and q.device.type != "cpu"):
        return f"the process group has no messages for {q.device.type} tensors: init_process_group('gloo') is for cpu, 'nccl' for cuda"
    return ""


# -- who computes what ------------------------------------------------------------------------------------------------


def sent(width: int, ranks: int, heads_q: int, heads_kv: int, size: int) -> float:
    """Bytes that a rank sends in a forward and a backward pass, for each local row and head dim: teams of `width` ranks in a ring."""
    exchange = (width - 1) / width * 2 * (heads_q + heads_kv) * size
    return 2 * exchange + (ranks // width - 1) * 2 * heads_kv * (size + size + max(4, size))


def _width(form: str, ranks: int, heads_q: int, heads_kv: int, size: int) -> int:
    """How many neighbouring ranks exchange heads. Raises UsageFault where the heads are too few for the all-to-all form."""
    able = [width for width in range(1, ranks + 1) if ranks % width == 0 and heads_kv % width == 0]
    if form == "all_to_all" and ranks not in able:
        why = "each rank of the all-to-all form computes as many whole key heads"
        raise UsageFault(f"{heads_kv} key heads cannot be shared out evenly to {ranks} ranks", why, "use form='auto' or form='ring'")
    fewest = min(able, key=lambda width: sent(width, ranks, heads_q, heads_kv, size))
    return {"ring": 1, "all_to_all": ranks}.get(form, fewest)


@dataclass(frozen=True)
class _Plan:
    """A call without its group and its tensors. ring: teams as the ranks of a ring, with the heads that one rank of a team has.

    lengths, chunks: of each rank: how many rows, and which. width: ranks of a team.
    """

    ring: Partition
    lengths: tuple[int, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    width: int

    def team(self, rank: int) -> range:
        """The ranks of a rank's team."""
        first = rank // self.width * self.width
        return range(first, first + self.width)

    @cached_property
    def orders(self) -> list[list[tuple[int, slice]]]:
        """For each team its rows in rising order: the rank that has them, and where in its shard they are."""
        found = []
        for first in range(0, len(self.lengths), self.width):
            pieces = []
            for rank in self.team(first):
                at = 0
                for start, stop in self.chunks[rank]:
                    pieces.append((start, rank, slice(at, at + stop - start)))
                    at += stop - start
            found.append([(rank, piece) for _, rank, piece in sorted(pieces, key=lambda each: each[0])])
        return found


@lru_cache(maxsize=256)
def _plan(batch: int, heads: int, dim: int, heads_kv: int, lengths: tuple[int, ...], width: int, dtype: str, options: Options) -> _Plan:
    """Raises UsageFault as Problem.of does, and where rows under a causal mask come from chunks that are not even: torch.chunk's last one
    is smaller, and the halves of its rank's rows would be taken for other rows."""
    if options.causal and options.partition == "zigzag" and max(lengths) - min(lengths) > 1:
        what = f"ranks with {', '.join(map(str, lengths))} rows have no zigzag partition"
        why = "rank r of n has the even chunks r and 2n - 1 - r of 2n, so the rows of two ranks differ by one at most"
        hint = "chunks = x.tensor_split(2 * n, dim); torch.cat((chunks[r], chunks[2 * n - 1 - r]), dim); 'contiguous' takes any rows"
        raise UsageFault(what, why, hint)
    whole = sum(lengths)
    problem = Problem.of(batch, heads // width, whole, dim, heads_kv // width, whole, dtype, options.causal, options.scale)
    own = shards(lengths, options.partition)
    teams = tuple(
        joined(*sorted(chunk for chunks in own[first : first + width] for chunk in chunks)) for first in range(0, len(lengths), width)
    )
    return _Plan(Partition(problem, options.partition, teams, teams), lengths, own, width)


_checked: set[Any] = set()


def _check_kernel(plan: _Plan, kernel: str, deterministic: bool, trains: bool, device: str) -> None:
    """Raise UsageFault where the kernel does not take what any rank launches: on all ranks alike, before the first message."""
    problems = plan.ring.problems if plan.ring.ranks > 1 else (plan.ring.problem,)
    if (key := (problems, kernel, deterministic, trains, device)) in _checked:
        return
    place = backends.pick(device).device()
    asked = Request(kernel, "both" if trains else "forward", deterministic=deterministic)
    for problem in problems:
        for each in choose.choose(replace(asked, problem=problem), place)[0][0].kernels.values():
            planner.plan(each, problem, place)
    _checked.add(key)


# -- a call on a rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call on this rank."""

    group: Any
    rank: int
    plan: _Plan
    kernel: str
    deterministic: bool
    trains: bool

    @property
    def place(self) -> int:
        """The team of this rank, by its place in the ring."""
        return self.rank // self.plan.width

    def pass_on(self, mine: Any, step: int) -> Arrival:
        """Send what belongs to the keys of a step to the next team, and receive what belongs to those of the next step.

        mine: (2, batch, heads_kv, rows of the keys, head_dim).
        """
        ring, width, inside = self.plan.ring, self.plan.width, self.rank % self.plan.width
        after, before = ((self.place + by) % ring.ranks * width + inside for by in (1, -1))
        theirs = mine.new_empty((*mine.shape[:3], rows(ring.keys[ring.source(self.place, step + 1)]), mine.shape[4]))
        return exchange(self.group, [(after, mine)], [(before, theirs)])


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Between the ranks of a team: all heads of a rank's rows for a part of the heads of the team's rows, in rising order; or back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, to_heads: bool, *tensors: Any) -> tuple[Any, ...]:
        ctx.call, ctx.to_heads = call, to_heads
        return (_to_heads if to_heads else _to_rows)(call, tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, None, *(_to_rows if ctx.to_heads else _to_heads)(ctx.call, gradients)


def _to_heads(call: _Call, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """(batch, heads, rows of the rank, head_dim) to (batch, heads / width, rows of the team, head_dim)."""
    plan, team = call.plan, call.plan.team(call.rank)
    parts = [tensor.chunk(plan.width, 1) for tensor in tensors]
    others = [rank for rank in team if rank != call.rank]
    messages = [(rank, part[rank - team[0]].contiguous()) for rank in others for part in parts]
    expected = [(rank, part[0].new_empty((*part[0].shape[:2], plan.lengths[rank], part[0].shape[3]))) for rank in others for part in parts]
    received = exchange(call.group, messages, expected).wait()
    made = []
    for index, part in enumerate(parts):
        of = dict(zip(others, received[index :: len(parts)], strict=True)) | {call.rank: part[call.rank - team[0]]}
        pieces = [of[rank][:, :, piece] for rank, piece in plan.orders[call.place]]
        made.append(torch.cat(pieces or [part[0]], 2))
    return tuple(made)


def _to_rows(call: _Call, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """(batch, heads / width, rows of the team, head_dim) to (batch, heads, rows of the rank, head_dim)."""
    team = call.plan.team(call.rank)
    others = [rank for rank in team if rank != call.rank]
    cut = [_cut(call, tensor) for tensor in tensors]
    messages = [(rank, parts[rank]) for rank in others for parts in cut]
    expected = [(rank, torch.empty_like(parts[call.rank])) for rank in others for parts in cut]
    received = exchange(call.group, messages, expected).wait()
    made = []
    for index, parts in enumerate(cut):
        of = dict(zip(others, received[index :: len(cut)], strict=True)) | {call.rank: parts[call.rank]}
        made.append(torch.cat([of[rank] for rank in team], 1))
    return tuple(made)


def _cut(call: _Call, tensor: Any) -> dict[int, Any]:
    """A team's rows by the rank that has them."""
    pieces: dict[int, list[Any]] = {rank: [] for rank in call.plan.team(call.rank)}
    order = call.plan.orders[call.place]
    for (rank, _), part in zip(order, tensor.split([piece.stop - piece.start for _, piece in order], 2) if order else (), strict=True):
        pieces[rank].append(part)
    return {rank: torch.cat(parts or [tensor[:, :, :0]], 2).contiguous() for rank, parts in pieces.items()}


# -- the ring ---------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):  # type: ignore[misc]
    """The ring of teams: q, k and v of this rank's heads and its team's rows, to O of the same."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Any, k: Any, v: Any) -> Any:
        ring, wide = call.plan.ring, torch.float64 if q.dtype == torch.float64 else torch.float32
        total, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        held = torch.stack((k, v))
        for step in range(ring.ranks):
            arriving = call.pass_on(held, step) if step + 1 < ring.ranks else None
            for task in ring.tasks(call.place, step):
                queries, keys = _parts(task)
                given = (q[:, :, queries], held[0][:, :, keys], held[1][:, :, keys])
                o, of = torch.ops.fa.forward(*given, *_arguments(call, task), call.trains)
                _merge(total[:, :, queries], lse[:, :, queries], o, of)
            if arriving:
                (held,) = arriving.wait()
        o = total.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Any) -> tuple[Any, ...]:
        """P and delta are those of all keys, since the kernel reads O and logsumexp of all keys; so partial gradients are only added.

        The team's own keys are done in two parts: with its first queries while the first K and V arrive, with its other queries while
        its dK and dV come home.
        """
        call, (q, k, v, o, lse) = ctx.call, ctx.saved_tensors
        ring, wide = call.plan.ring, lse.dtype
        dq, own, held = q.new_zeros(q.shape, dtype=wide), k.new_zeros((2, *k.shape), dtype=wide), torch.stack((k, v))
        travelling: Arrival | None = None  # dK and dV

        def add(tasks: Sequence[Task], held: Any, dkv: Any) -> None:
            for task in tasks:
                queries, keys = _parts(task)
                do_, q_, o_, lse_ = (t[:, :, queries] for t in (do, q, o, lse))
                given = (do_, q_, held[0][:, :, keys], held[1][:, :, keys], o_, lse_)
                dq_, dk_, dv_ = torch.ops.fa.backward(*given, *_arguments(call, task))
                for sum_, part in ((dq[:, :, queries], dq_), (dkv[0][:, :, keys], dk_), (dkv[1][:, :, keys], dv_)):
                    sum_ += part

        arriving = call.pass_on(held, 0)
        first, later = ring.own_tasks(call.place)
        add(first, held, own)
        own_held, (held,) = held, arriving.wait()
        for step in range(1, ring.ranks):
            arriving = call.pass_on(held, step) if step + 1 < ring.ranks else None
            dkv = own.new_zeros(held.shape)
            add(ring.tasks(call.place, step), held, dkv)
            if travelling:
                dkv += travelling.wait()[0]
            travelling = call.pass_on(dkv, step)
            if arriving:
                (held,) = arriving.wait()
        add(later, own_held, own)
        if travelling:
            own += travelling.wait()[0]
        return None, dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)


def _parts(task: Task) -> tuple[slice, slice]:
    """The rows of the queries and of the keys of a launch."""
    p = task.problem
    return slice(task.q_first, task.q_first + p.seq_q), slice(task.k_first, task.k_first + p.seq_kv)


def _arguments(call: _Call, task: Task) -> tuple[Any, ...]:
    """The options of fa::forward and fa::backward."""
    p = task.problem
    return p.causal, p.scale, call.kernel, call.deterministic, p.causal_shift if p.causal else None


def _merge(total: Any, lse: Any, o: Any, of: Any) -> None:
    """Add a partial O, with its logsumexp, to what is there: both relative to the logsumexp of all keys up to now."""
    new = torch.logaddexp(lse, of)
    reference = new.masked_fill(new == -math.inf, 0)  # a row that has seen no key yet: exp(-inf - 0) is 0
    total.mul_(torch.exp(lse - reference).unsqueeze(-1)).add_(o * torch.exp(of - reference).unsqueeze(-1))
    lse.copy_(new)
