"""Attention over the ranks of a torch.distributed process group: ring_attention(), as a ring, by exchange of heads, or both.

Every message is from one rank to another, also those of the all-to-all form: between the GPUs of one host by copy engines (copies.py), else
a point-to-point one of the caller's own group; no further groups are made.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .. import backends
from ..backends.mapped import NoPeers
from ..check import choose
from ..check.request import Request
from ..fault import UsageFault, meant
from ..formula import capped, windowed
from ..kernel import planner
from ..partition import KINDS, Chunk, Partition, Task, joined, rows, shards
from ..problem import DTYPE_BYTES, Problem
from ..problem import told as problem_told
from .arguments import flags, formulas, number, packed, unexpected, usual
from .arguments import wrong as error
from .call import check
from .copies import Messages, messages, row_major
from .masked import Formula
from .operator import attention
from .ranks import Arrival, agree, carriers, exchange, members
from .sums import Sum
from .words import told

FORMS = ("auto", "ring", "all_to_all")
#: The rows of every rank, and whether K and V are row_major on all of them.
_Agreed = tuple[tuple[int, ...], bool]


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *more: Any,
    group: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    documents: Any = None,
    partition: str = "zigzag",
    form: str = "auto",
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
    **others: Any,
) -> Any:
    """Attention of a sequence whose rows are shared out over the n ranks of a process group: this rank's rows of O, like q.

    q: (batch, heads_q, local rows, head_dim), k and v: (batch, heads_kv, local rows, head_dim): this rank's shards of a self-attention.
    Local rows may differ from rank to rank, and may be 0 (see partition); all else is the same on all ranks. Gradients flow to q, k and v, once; the
    backward pass sends messages too, so all ranks run it. scale, kernel and deterministic as for :func:`attention`; with
    deterministic, partial results are merged in a fixed order. Under autocast the inputs are cast as torch's are. window, softcap and
    documents too, of the whole sequence: documents have its borders, alike on all ranks, and are read in each call.

    group: a ProcessGroup or a one-dimensional DeviceMesh, by default the world. gloo serves CPU tensors, NCCL those of a GPU.
    partition: "zigzag": the first half of a rank's rows (rounded up) is chunk r of 2n, the second half chunk 2n - 1 - r, which balances the
    causal mask (Zhu's ring-flash-attention; Llama 3, arXiv 2407.21783). The chunks are even, as torch.tensor_split's: under the causal mask
    local rows that differ by more than one are refused. "contiguous": rank r has the r-th run of rows, as many as it likes.

    form: how the rows meet. Bytes are those that a rank sends, for B sequences, L local rows, D head dims and elements of e bytes.
    - "ring": K and V travel from rank to rank, one step ahead of the computation; partial results are merged by their logsumexp in
      float32 (Ring Attention, Liu, Zaharia, Abbeel 2023, arXiv 2310.01889). The backward pass goes back, from the K and V that the forward
      pass ended with and kept; dK and dV travel with them, those of keys that have some, in float32 (of float64 as they are) where n > 2.
      Forward (n - 1) 2 B heads_kv L D e, backward at most 2 B heads_kv L D ((n - 2) e + (n - 1) 4), of two ranks 2 B heads_kv L D e.
    - "all_to_all": the ranks exchange rows for heads, so that each computes heads_q / n heads of the whole sequence, and exchange back
      (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). n divides heads_kv. Each pass (n - 1) / n (2 heads_q + 2 heads_kv) B L D e.
    - "auto": teams of u neighbouring ranks exchange heads, and n / u teams form a ring (USP, Fang & Zhao 2024, arXiv 2405.07719). u is the
      divisor of n and heads_kv for which forward and backward pass together send the fewest bytes: (u - 1) / u (2 heads_q + 2 heads_kv)
      B L D e for each pass, and n / u in place of n in the ring's terms.

    The ranks agree on shapes and arguments before the first message, in each call, by one small all_gather. For a GPU that waits for
    the device where the group is NCCL's alone; init_process_group("cpu:gloo,cuda:nccl") or :func:`context_parallel` avoids the wait.

    Raises ValueError on all ranks where they do not agree, or where the kernel does not take the case; RuntimeError without a process
    group, and where a rank has ended or does not answer within the timeout of the group (init_process_group's timeout). Where copy engines
    carry the messages, a rank that waits so long for one ends its process with exit code 4, as NCCL's watchdog would.
    """
    if more or others:
        raise unexpected(ring_attention, more, others)
    return over_ranks(q, k, v, group, Options(causal, scale, partition, form, kernel, deterministic, window, softcap, documents))


@dataclass(frozen=True)
class Options:
    """The arguments of a call besides its tensors and its group."""

    causal: bool
    scale: float | None
    partition: str
    form: str
    kernel: Any
    deterministic: bool
    window: Any = None
    softcap: float | None = None
    documents: Any = None  # a tuple of borders, once it is checked

    @property
    def formulas(self) -> dict[str, Any]:
        """Its masks and scores as arguments of :func:`attention`; empty where it has none."""
        named = {"window": self.window, "softcap": self.softcap, "documents": self.documents}
        return {name: value for name, value in named.items() if value is not None}


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def over_ranks(q: Any, k: Any, v: Any, group: Any, options: Options, agreed: dict[Any, _Agreed] | None = None) -> Any:
    """As :func:`ring_attention`. agreed: by what this rank said, kept by a caller whose lengths do not change."""
    group = members(group)
    options, wrong = _checked(q, k, v, group, options)
    trains, mine = [False], dict[str, Any]()
    if not wrong:
        kind = "cuda" if q.is_cuda else q.device.type
        if torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)
            q, k, v = (t if t.dtype == torch.float64 else t.to(lower) for t in (q, k, v))
        trains = [bool(torch.is_grad_enabled() and t.requires_grad) for t in (q, k, v)]
        mine = {"rows": q.shape[2], "dtype": str(q.dtype).removeprefix("torch.")}
        mine |= {"batch": q.shape[0], "heads_q": q.shape[1], "heads_kv": k.shape[1], "head_dim": q.shape[3]}
        mine |= {"device": kind, "requires_grad": trains, **vars(options)}
        if options.documents is not None:
            mine["documents"] = f"{len(options.documents)} borders, checksum {zlib.crc32(str(options.documents).encode()):08x}"
    key = json.dumps(mine, default=str)
    mine["row_major"] = not wrong and row_major(k) and row_major(v)  # a layout may change on some ranks alone: no part of the key
    found = agreed.get(key) if agreed is not None else None
    if found is None:
        every = agree("ring_attention", mine, group, free=("rows", "row_major"), wrong=wrong)
        found = tuple(each["rows"] for each in every), all(each["row_major"] for each in every)
        if agreed is not None:
            agreed[key] = found
    lengths, by_rows = found
    if options.documents is not None:
        packed(torch.tensor(options.documents), sum(lengths))
    if not sum(lengths) * math.prod((*q.shape[:2], q.shape[3])):
        return q.clone()
    try:
        width = _width(options.form, len(lengths), q.shape[1], k.shape[1], q.element_size())
        unread = replace(options, documents=options.documents is not None)
        plan = _plan(q.shape[0], q.shape[1], q.shape[3], k.shape[1], lengths, width, mine["dtype"], unread)
        if plan.ring.ranks > 1 and q.element_size() == 1:
            why = "partial results of 16 bits are merged, and travel, in the inputs' type"
            raise UsageFault("a ring of float8 inputs is not there", why, "use form='all_to_all', or inputs of 16 bits")
        _check_kernel(plan, options, any(trains), str(q.device))
        on_gpus = q.is_cuda and carriers(group)["cuda"] == "nccl" and len(lengths) > 1
        copies = messages(group, q.device, plan.room) if on_gpus else None
    except UsageFault as fault:
        raise ValueError(told(fault)) from fault
    except NoPeers as fault:
        raise RuntimeError(told(fault)) from fault
    call = _Call(group, dist.get_rank(group), plan, options, any(trains), copies, copies is not None and width == 1 and by_rows)
    if width > 1:
        q, k, v = _Exchange.apply(call, True, q, k, v)
    if plan.ring.ranks > 1:
        o = _Ring.apply(call, q, k, v)
    else:
        of = {name: getattr(options, name) for name in ("causal", "scale", "kernel", "deterministic")}
        o = attention(q, k, v, **of, **options.formulas)
    return _Exchange.apply(call, False, o)[0] if width > 1 else o


def _checked(q: Any, k: Any, v: Any, group: Any, options: Options) -> tuple[Options, str]:
    """The options as they are used, and what is wrong with this rank's tensors and arguments; empty where nothing is."""
    try:
        usual(q, k, v, options.kernel)
        flags(causal=options.causal, deterministic=options.deterministic)
        check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device))
        if not q.shape[2:] == k.shape[2:] == v.shape[2:]:
            what = f"q, k and v do not belong together: {', '.join(str(tuple(t.shape)) for t in (q, k, v))}"
            raise error(what, "a rank has as many rows of each, of one head_dim", "attention takes them")
        for name, value, known in (("partition", options.partition, KINDS), ("form", options.form, FORMS)):
            if value not in known:
                near = meant("all_to_all" if value == "ulysses" else str(value), known).rstrip()
                hint = near or f"leave it out for {known[-1] if name == 'partition' else known[0]}"
                raise error(f"unknown {name} {value!r:.40}", f"known: {', '.join(known)}", hint)
        by = carriers(group).get(q.device.type)
        if by is None or (by == "gloo" and q.device.type != "cpu"):
            what = f"the process group has no messages for {q.device.type} tensors"
            raise error(what, f"its backend is {dist.get_backend(group)}", "init_process_group('gloo') is for cpu, 'nccl' for cuda")
        scale = options.scale if options.scale is None else number("scale", options.scale)
        found = formulas(options.formulas)
    except (TypeError, ValueError) as fault:
        return options, str(fault)
    documents = None if options.documents is None else tuple(found["documents"].tolist())
    options = replace(options, window=found.get("window"), softcap=found.get("softcap"), documents=documents)
    return replace(options, scale=scale, kernel=str(options.kernel)), ""


# -- who computes what ------------------------------------------------------------------------------------------------


def sent(width: int, ranks: int, heads_q: int, heads_kv: int, size: int) -> float:
    """Bytes that a rank sends in a forward and a backward pass, for each local row and head dim: teams of `width` ranks in a ring."""
    exchange, teams = (width - 1) / width * 2 * (heads_q + heads_kv) * size, ranks // width
    gradients = size if teams == 2 else max(4, size)
    return 2 * exchange + 2 * heads_kv * ((teams - 1) * (size + gradients) + max(0, teams - 2) * size)


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

    @cached_property
    def found(self) -> dict[tuple[int, int], slice]:
        """What _Call.with_gradients has found, by team and step: masks but documents are the plan's, and these leave out no launch."""
        return {}

    @cached_property
    def room(self) -> dict[tuple[int, int], int]:
        """Bytes of the largest message from rank to rank: Q, K and V of a team's heads, and K and V, or dK and dV, of the ring."""
        p, ranks, found = self.ring.problem, self.ring.ranks, dict[tuple[int, int], int]()
        size = DTYPE_BYTES[p.dtype]
        row = p.batch * p.head_dim * size
        of_o = p.batch * p.head_dim * p.heads_q * DTYPE_BYTES[p.tensor_dtype("O")]  # wider than Q where that has 8 bits
        between = max(row * (p.heads_q + 2 * p.heads_kv), of_o) * max(self.lengths)
        most = max(rows(chunks) for chunks in self.ring.keys)
        along = row * 2 * p.heads_kv * most * (2 if ranks > 2 and size < 4 else 1)
        for rank in range(len(self.lengths)):
            found |= {(rank, other): between for other in self.team(rank) if other != rank}
            if ranks > 1:
                place, inside = divmod(rank, self.width)
                found |= {(rank, (place + way) % ranks * self.width + inside): along for way in (1, -1)}
        return found


@lru_cache(maxsize=256)
def _plan(batch: int, heads: int, dim: int, heads_kv: int, lengths: tuple[int, ...], width: int, dtype: str, options: Options) -> _Plan:
    """Raises UsageFault as Problem.of does, and where rows under a mask come from chunks that are not even: torch.chunk's last one is
    smaller, and the halves of its rank's rows would be taken for other rows."""
    ordered = options.causal or options.window is not None or options.documents
    if ordered and options.partition == "zigzag" and max(lengths) - min(lengths) > 1:
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


_checked_before: set[Any] = set()


def _check_kernel(plan: _Plan, options: Options, trains: bool, device: str) -> None:
    """Raise UsageFault where the kernel does not take what any rank launches: on all ranks alike, before the first message."""
    if (key := (plan, replace(options, documents=options.documents is not None), trains, device)) in _checked_before:
        return
    place = backends.pick(device).device()
    asked = Request(options.kernel, "both" if trains else "forward", deterministic=options.deterministic)
    ring = plan.ring
    problems = ring.problems if ring.ranks > 1 else (ring.problem,)
    if options.formulas:
        mask, score = _texts(options)
        whole = ring.problem.with_(causal=False, mask=mask, score=score)
        sizes = {(rows(q), rows(k)) for q in ring.queries for k in ring.keys if q and k}
        problems = tuple(whole.with_(seq_q=seq_q, seq_kv=seq_kv, tensors={}) for seq_q, seq_kv in sorted(sizes))
    for problem in problems:
        for each in choose.choose(replace(asked, problem=problem), place)[0][0].kernels.values():
            planner.plan(each, problem, place)
    _checked_before.add(key)


# -- masks on shards ----------------------------------------------------------------------------------------------------


def _texts(options: Options) -> tuple[str | None, str | None]:
    """The mask and score of all launches of a ring: places and documents of rows are tensors, so that one text, compiled once, serves all."""
    masks = []
    with problem_told():
        score = None if options.softcap is None else capped(options.softcap)
        if options.window is not None:
            left, right = options.window
            windowed(left, right)  # refuses -1
            masks.append(f"{0 if options.causal else -right} <= place_q[q] - place_k[k] <= {left}")
        elif options.causal:
            masks.append("place_q[q] - place_k[k] >= 0")
    if options.documents is not None:
        masks.append("doc_q[q] == doc_k[k]")
    return " and ".join(masks) or None, score


def _sees(options: Options, queries: Sequence[Chunk], keys: Sequence[Chunk]) -> bool:
    """Whether a query may see a key by the window and the causal mask."""
    left, right = (math.inf, math.inf) if options.window is None else options.window
    right = 0 if options.causal else right
    return any(q_stop - 1 - k_start >= -right and q_start - k_stop + 1 <= left for q_start, q_stop in queries for k_start, k_stop in keys)


def _formula(options: Options, queries: Sequence[Chunk], keys: Sequence[Chunk], device: Any) -> Formula:
    """The mask and score of a launch of these rows. Places and documents rise along them, so that kernels skip tiles."""
    mask, score = _texts(options)
    places = [torch.cat([torch.arange(*chunk, dtype=torch.int32) for chunk in chunks]) for chunks in (queries, keys)]
    values = places if options.causal or options.window is not None else []
    names = ["place_q+", "place_k+"] if values else []
    if options.documents is not None:
        borders = torch.tensor(options.documents, dtype=torch.int32)
        values = values + [torch.searchsorted(borders, at, right=True, out_int32=True) for at in places]
        names += ["doc_q+", "doc_k+"]
    return Formula([value.to(device) for value in values], " ".join(names), mask, score)


# -- a call on a rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call on this rank."""

    group: Any
    rank: int
    plan: _Plan
    options: Options
    trains: bool
    copies: Messages | None = None
    #: Whether K and V are sent as they are, all heads of a row side by side; else they are contiguous.
    by_rows: bool = False

    @property
    def place(self) -> int:
        """The team of this rank, by its place in the ring."""
        return self.rank // self.plan.width

    def tasks(self, step: int, place: int | None = None) -> tuple[Task, ...]:
        """What a team, by default this rank's, launches at a step; with masks all of its queries by all keys, or nothing."""
        ring, place = self.plan.ring, self.place if place is None else place
        if not self.options.formulas:
            return ring.tasks(place, step)
        queries, keys = ring.queries[place], ring.keys[ring.source(place, step)]
        if not (queries and keys and _sees(self.options, queries, keys)):
            return ()
        return (Task(0, 0, ring.problem.with_(seq_q=rows(queries), seq_kv=rows(keys), causal=False)),)

    def launch(self, pass_: str, task: Task, step: int, *given: Any) -> Any:
        """A task by fa::forward or fa::backward, or by those with a mask."""
        p, options, ring = task.problem, self.options, self.plan.ring
        trains = (self.trains,) if pass_ == "forward" else (None,)
        if not options.formulas:
            of = (p.causal, p.scale, options.kernel, options.deterministic, p.causal_shift if p.causal else None)
            return getattr(torch.ops.fa, pass_)(*given, *of, *trains)
        formula = _formula(options, ring.queries[self.place], ring.keys[ring.source(self.place, step)], given[0].device)
        own = (False, p.scale, options.kernel, options.deterministic)
        made = getattr(torch.ops.fa, f"masked_{pass_}")(*given, *formula, *own, *trains)
        return made[:3]  # dsinks, which a ring has none of, come behind them

    def with_gradients(self, step: int, way: int = 0) -> slice:
        """Of the keys that the team `way` places further on has at a step, those from the first to the last with a gradient by then: of this
        step or of a later one, at which other teams had the same keys. Causal masks and windows leave some without."""
        ranks, place = self.plan.ring.ranks, self.place + way
        if (at := (place % ranks, step)) not in self.plan.found:
            keys = [_parts(task)[1] for later in range(step, ranks) for task in self.tasks(later, (place + later - step) % ranks)]
            ends = min((each.start for each in keys), default=0), max((each.stop for each in keys), default=0)
            self.plan.found[at] = slice(*ends)
        return self.plan.found[at]

    def pass_on(self, mine: Sequence[Any], step: int, by: int, by_rows: bool = False, coming: int | None = None) -> Arrival:
        """Send what belongs to the keys of a step to the team that has them a step later (by: 1) or before (-1), and receive what belongs to
        those that this one has then.

        mine: K and V or their gradients, (batch, heads_kv, rows of the keys, head_dim), contiguous or, with by_rows, row_major. coming: how
        many rows are received, by default all.
        """
        ring, width, inside = self.plan.ring, self.plan.width, self.rank % self.plan.width
        after, before = ((self.place + way) % ring.ranks * width + inside for way in (by, -by))
        coming = rows(ring.keys[ring.source(self.place, step + by)]) if coming is None else coming
        batch, heads, _, dim = mine[0].shape
        if by_rows:
            theirs = [(before, each.new_empty((batch, coming, heads, dim)).transpose(1, 2)) for each in mine]
        else:
            theirs = [(before, each.new_empty((batch, heads, coming, dim))) for each in mine]
        return exchange(self.group, [(after, each) for each in mine], theirs, self.copies)


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
    outgoing = [(rank, part[rank - team[0]].contiguous()) for rank in others for part in parts]
    expected = [(rank, part[0].new_empty((*part[0].shape[:2], plan.lengths[rank], part[0].shape[3]))) for rank in others for part in parts]
    received = exchange(call.group, outgoing, expected, call.copies).wait()
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
    outgoing = [(rank, parts[rank]) for rank in others for parts in cut]
    expected = [(rank, torch.empty_like(parts[call.rank])) for rank in others for parts in cut]
    received = exchange(call.group, outgoing, expected, call.copies).wait()
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
        ring = call.plan.ring
        steps = [call.tasks(step) for step in range(ring.ranks)]
        out = Sum(q, q.shape[2], [_parts(task)[0] for tasks in steps for task in tasks])
        if call.by_rows:
            k, v = (t if row_major(t) else t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        else:
            k, v = k.contiguous(), v.contiguous()
        held = [k, v]
        for step, tasks in enumerate(steps):
            arriving = call.pass_on(held, step, 1, call.by_rows) if step + 1 < ring.ranks else None
            for task in tasks:
                queries, keys = _parts(task)
                o, lse = call.launch("forward", task, step, q[:, :, queries], *(each[:, :, keys] for each in held))
                out.add(o, queries, lse)
            if arriving:
                held = arriving.wait()
        o, lse = out.whole(), out.logsumexp()
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse, *held)
        return o

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Any) -> tuple[Any, ...]:
        """P and delta are those of all keys, since the kernel reads O and logsumexp of all keys; so partial gradients are only added.

        The steps in reverse, from the keys that the forward pass ended with, so that these need no message. dK and dV travel back with K
        and V; the team's own keys come last, while their dK and dV of the other teams come home.
        """
        call, (q, k, v, o, lse, *held) = ctx.call, ctx.saved_tensors
        ring = call.plan.ring
        steps = [call.tasks(step) for step in range(ring.ranks)]
        dq = Sum(q, q.shape[2], [_parts(task)[0] for tasks in reversed(steps) for task in tasks])
        #: Between two teams dK and dV travel once, as a kernel has rounded them; else they are sums.
        travels = q.dtype if ring.ranks == 2 else lse.dtype
        travelling: Arrival | None = None  # dK and dV

        def launched(step: int, held: Sequence[Any]) -> list[tuple[slice, Sequence[Any]]]:
            """dK and dV of a step's launches, with the rows of their keys; dQ is added."""
            made = []
            for task in steps[step]:
                queries, keys = _parts(task)
                do_, q_, o_, lse_ = (t[:, :, queries] for t in (do, q, o, lse))
                dq_, *dkv = call.launch("backward", task, step, do_, q_, *(each[:, :, keys] for each in held), o_, lse_)
                dq.add(dq_, queries)
                made.append((keys, dkv))
            return made

        for step in reversed(range(ring.ranks)):
            arriving = call.pass_on(held, step, -1, call.by_rows) if step > 1 else None
            held = held if step else [k, v]
            parts = launched(step, held)
            if travelling:
                parts.insert(0, (call.with_gradients(step + 1, 1), travelling.wait()))
            its = call.with_gradients(step) if step else slice(0, held[0].shape[2])
            gradients = _summed(held, its, parts, travels if step else q.dtype)
            del parts  # nothing of a step lives through the next
            if step:
                theirs = call.with_gradients(step, 1)
                travelling = call.pass_on(gradients, step, -1, coming=theirs.stop - theirs.start)
            if arriving:
                held = arriving.wait()
        return None, dq.whole(), *gradients


def _summed(held: Sequence[Any], its: slice, parts: Sequence[tuple[slice, Sequence[Any]]], dtype: Any) -> list[Any]:
    """dK and dV of some of the keys that are held, its, in a type: sums of parts, each of some rows of these."""
    parts = [(slice(keys.start - its.start, keys.stop - its.start), dkv) for keys, dkv in parts if keys.start < keys.stop]
    sums = [Sum(each, its.stop - its.start, [keys for keys, _ in parts], dtype) for each in held]
    for keys, dkv in parts:
        for sum_, part in zip(sums, dkv, strict=True):
            sum_.add(part, keys)
    return [each.whole() for each in sums]


def _parts(task: Task) -> tuple[slice, slice]:
    """The rows of the queries and of the keys of a launch."""
    p = task.problem
    return slice(task.q_first, task.q_first + p.seq_q), slice(task.k_first, task.k_first + p.seq_kv)
