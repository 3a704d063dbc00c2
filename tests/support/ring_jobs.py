"""What the ranks of test_torch_op_ring.py do (jobs of world.run, which run on every rank), and what is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from harness.partition import shards
from harness.torch_op import context_parallel, copies, ring, ring_attention, sdpa, training


@dataclass(frozen=True)
class Case:
    """A call. lengths: rows of each rank."""

    lengths: tuple[int, ...]
    heads: int = 2
    heads_kv: int = 2
    causal: bool = True
    partition: str = "zigzag"
    form: str = "auto"
    kernel: str = "naive"
    dtype: str = "float64"
    dim: int = 4
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    documents: tuple[int, ...] | None = None
    rows_first: bool = False  # memory as (batch, rows, heads, head_dim), as projections make it

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ring_attention."""
        names = ("causal", "scale", "partition", "form", "kernel", "window", "softcap", "documents")
        return {name: getattr(self, name) for name in names}

    def whole(self) -> list[Any]:
        """Q, K, V and dO of all ranks, float64, of values that the dtype has."""
        random, rows = torch.Generator().manual_seed(sum(self.lengths)), sum(self.lengths)
        shapes = [(2, heads, rows, self.dim) for heads in (self.heads, self.heads_kv, self.heads_kv, self.heads)]
        return [torch.randn(shape, generator=random, dtype=torch.float64).to(getattr(torch, self.dtype)).double() for shape in shapes]

    def rows(self, rank: int) -> list[int]:
        """The rows of a rank."""
        return [row for chunk in shards(self.lengths, self.partition)[rank] for row in range(*chunk)]


def attend(cases: list[Case]) -> list[dict[str, Any]]:
    """O and the gradients of each case as float64 arrays of this rank's rows, how many bytes it sent, and whether twice is the same."""
    return [_attend(case) for case in cases]


def in_groups(cases: dict[str, Case]) -> dict[str, Any]:
    """The cases in a group of the last two ranks, and in a mesh of all, under autocast."""
    some = dist.new_group([1, 2])
    found = {"some": _attend(cases["some"], some)} if dist.get_rank() else {}
    with torch.autocast("cpu", torch.bfloat16):
        return found | {"mesh": _attend(cases["mesh"], init_device_mesh("cpu", (3,)))}


def _attend(case: Case, group: Any = None) -> dict[str, Any]:
    rows = case.rows(group.get_local_rank() if hasattr(group, "get_local_rank") else dist.get_rank(group))
    device = "cuda" if "nccl" in dist.get_backend_config(dist.group.WORLD) else "cpu"
    *inputs, do = (t[:, :, rows].to(device, getattr(torch, case.dtype)) for t in case.whole())
    if case.rows_first:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    bytes_, exchange = [0], ring.exchange

    def counted(group: Any, messages: Any, *more: Any) -> Any:
        bytes_[0] += sum(tensor.numel() * tensor.element_size() for _, tensor in messages)
        return exchange(group, messages, *more)

    ring.exchange = counted
    try:
        found = []
        for _ in range(2):
            leaves = [t.detach().requires_grad_() for t in inputs]
            o = ring_attention(*leaves, group=group, **case.options)
            found.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    finally:
        ring.exchange = exchange
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    made = dict(zip(("O", "dQ", "dK", "dV"), (t.double().cpu().numpy() for t in found[0]), strict=True))
    return made | {"bytes": bytes_[0] // 2, "same": same, "dtypes": {str(t.dtype) for t in found[0]}}


def apart(case: Case, ranks: list[Any]) -> float:
    """How far O and the gradients of every row, put together from all ranks, are from those of one rank in float64: the largest
    |error| / (1 + |value|)."""
    found = []
    for name, right in zip(("O", "dQ", "dK", "dV"), expected(*case.whole(), case.causal, case.scale, case), strict=True):
        whole = torch.full_like(right, float("nan"))
        for rank, made in enumerate(ranks):
            whole[:, :, case.rows(rank)] = torch.from_numpy(made[name])
        found.append(((whole - right).abs() / (1 + right.abs())).max())
    return float(torch.stack(found).max())


def expected(q: Any, k: Any, v: Any, do: Any, causal: bool, scale: float | None, case: Case | None = None) -> list[Any]:
    """O, dQ, dK and dV by the definition, in float64. case: whose masks hold too."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    q, k, v = leaves[0], *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in leaves[1:])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if case is not None and case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    if case is not None:
        places = torch.arange(q.shape[2])
        distance = places[:, None] - places
        if case.window is not None:
            scores = scores.masked_fill((distance > case.window[0]) | (distance < -case.window[1]), float("-inf"))
        if case.documents is not None:
            of = torch.bucketize(places, torch.tensor(case.documents), right=True)
            scores = scores.masked_fill(of[:, None] != of, float("-inf"))
    o = scores.softmax(-1) @ v
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def _told(call: Callable[[], Any]) -> str:
    """What a call raises, by kind and text; what it returns where it does not."""
    try:
        return f"returned {call()}"
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def mistakes() -> dict[str, str]:
    """Calls that are wrong on one rank or on all, each told on this rank; and a right one after them."""
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1

    def tensors(heads: int = 2, rows: int = 4, dim: int = 4, dtype: Any = torch.float64) -> Any:
        return torch.ones(1, heads, rows, dim, dtype=dtype)

    def called(q: Any, k: Any = None, **options: Any) -> str:
        return _told(lambda: tuple(ring_attention(q, q if k is None else k, q if k is None else k, kernel="naive", **options).shape))

    found = {
        "dtype": called(tensors(dtype=torch.float32 if last else torch.float64)),
        "heads": called(tensors(heads=4 if last else 2)),
        "causal": called(tensors(), causal=last),
        "gradient": called(tensors().requires_grad_(last)),
        "one rank's shapes": called(tensors(), tensors(rows=3) if last else None),
        "values of another size": _told(lambda: ring_attention(tensors(), tensors(), tensors(dim=8), kernel="naive")),
        "dimensions": called(tensors()[0]),
        "partition": called(tensors(), partition="striped"),
        "form": called(tensors(), form="ulysses"),
        "no tensor": called(tensors().numpy() if last else tensors()),
        "flag": called(tensors(), causal="yes"),
        "window": called(tensors(), window=(-1, -1)),
        "borders": called(tensors(), documents=[0, 5]),
        "other borders": called(tensors(), documents=[0, 4 + last, 12]),
        "uneven window": called(tensors(rows=4 - 2 * (rank == 0)), window=3),
        "uneven zigzag": called(tensors(rows=4 - 2 * (rank == 0)), causal=True),  # torch.chunk of 10 rows by 6
        "uneven without a mask": called(tensors(rows=4 - 2 * (rank == 0))),
        "too few heads": called(tensors(), form="all_to_all"),
        "kernel": _told(lambda: ring_attention(*[tensors(dtype=torch.float64, rows=0 if last else 4)] * 3, kernel="fa2")),
        "no kernel": _told(lambda: ring_attention(*[tensors()] * 3, kernel="nobody")),
        "scale": called(tensors(), scale=float("nan")),
        "no group": _told(lambda: ring_attention(*[tensors()] * 3, group="world")),
        "another group": _told(lambda: ring_attention(*[tensors()] * 3, group=dist.GroupMember.NON_GROUP_MEMBER)),
        "rows that differ": called(tensors(rows=rank)),
        "no rows": called(tensors(rows=0)),
    }
    return found


def dies(when: str) -> str:
    """The last rank dies, before the forward pass or between both passes, or does not call; what the others are told."""
    group = dist.new_group(timeout=timedelta(seconds=2)) if when == "silent" else None
    q = torch.ones(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    last = dist.get_rank() == dist.get_world_size() - 1
    if last and when == "silent":
        time.sleep(4)
        return "silent"
    if last and when == "forward":
        os._exit(7)
    try:
        o = ring_attention(q, q, q, group=group, kernel="naive", form="ring")
        if last:
            os._exit(7)
        o.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "it was not told"


def in_context(length: int) -> dict[str, Any]:
    """What buffers are inside and after context_parallel, what each attention gives inside, and what is refused."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, length, 4, generator=random, dtype=torch.float64) for heads in (2, 1, 1))
    places, table, dropped = torch.arange(length), torch.arange(2 * length).view(length, 2), torch.ones(length)
    pair = torch.arange(2 * length + 2).view(2, -1)
    views = [pair[:, :-1], pair[:, 1:]]
    before, copies = functional.scaled_dot_product_attention, [pair.clone(), q.clone()]
    buffers, dims = [q, k, v, places, table, *views, dropped], [2, 2, 2, 0, -2, 1, 1, 0]
    found: dict[str, Any] = {}
    with context_parallel(buffers=buffers, seq_dims=dims, no_restore_buffers=[dropped]):
        found["places"], found["rows"] = places.tolist(), [t.shape[d] for t, d in zip(buffers, dims, strict=True)]
        found["views"], found["table"] = [view.tolist() for view in views], table.tolist()
        found["by torch's name"] = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).numpy()
        found["by ours"] = sdpa(q, k, v, is_causal=True, enable_gqa=True).numpy()
        found["of three dimensions"] = sdpa(q[:, 0], k[:, 0], v[:, 0]).numpy()
        found["mask"] = _told(lambda: sdpa(q, q, q, attn_mask=torch.ones(1)))
        found["other rows"] = _told(lambda: sdpa(*[torch.ones(1, 1, length + 1, 4, dtype=torch.float64)] * 3))
        gathered = torch.ones(length, requires_grad=True)[places].sum()  # its gradient needs places as they are inside
    found["backward too late"] = _told(gathered.backward)
    found["restored"] = places.tolist() == list(range(length)) and torch.equal(q, copies[1]) and torch.equal(pair, copies[0])
    found["restored"] &= torch.equal(views[1], pair[:, 1:]) and views[1].data_ptr() == pair[:, 1:].data_ptr()
    found["dropped"] = tuple(dropped.shape)
    try:
        with context_parallel(buffers=[places], seq_dims=[0]):
            raise KeyError
    except KeyError:
        found["after an error"] = len(places) == length and functional.scaled_dot_product_attention is before

    def entered(buffers: list[Any], dims: list[int], **more: Any) -> str:
        def enter() -> None:
            with context_parallel(buffers=buffers, seq_dims=dims, **more):
                pass

        return _told(enter)

    found["wrong"] = {
        "seq_dims": entered([q, k], [2]),
        "no seq_dims": entered([q], [2.5]),
        "no buffer": entered([[1, 2]], [0]),
        "twice": entered([q, q], [2, 2]),
        "no_restore": entered([q], [2], no_restore_buffers=[k]),
        "gradient": entered([q.clone().requires_grad_()], [2]),
        "dimensions": entered([places], [1]),
        "lengths": entered([places, torch.arange(length + 1)], [0, 0]),
        "length": entered([torch.arange(length + dist.get_rank())], [0]),
        "partition": entered([places], [0], partition="striped"),
    }
    with context_parallel(partition="contiguous"):  # shards that somebody else made
        found["without buffers"] = sdpa(*[torch.ones(1, 1, 2, 4, dtype=torch.float64)] * 3).shape[2]
    return found


def trained(size: training.Size) -> list[float]:
    """The losses of a training over the ranks."""
    return training.losses(size, "cpu", sdpa, dist.group.WORLD)


class Gloo:
    """In the place of copy engines: tensors as copies takes them, by the group's messages, that arrive when they are waited for."""

    def __init__(self, group: Any, room: Any) -> None:
        self.group, self.room = group, room

    def exchange(self, out: Any, into: Any) -> Any:
        """Messages as they lie in memory, in the order of the tensors. Received memory is NaN until it is waited for."""
        rank, sizes = dist.get_rank(self.group), dict[tuple[int, int], int]()
        for pairs in ({(rank, to): out_ for to, out_ in _by_rank(out).items()}, {(of, rank): in_ for of, in_ in _by_rank(into).items()}):
            sizes |= {pair: sum(tensor.nbytes for tensor in tensors) for pair, tensors in pairs.items()}
        assert all(size <= self.room.get(pair, 0) for pair, size in sizes.items()), f"{sizes} do not fit {self.room}"
        flat = [(to, _as_it_lies(tensor).clone()) for to, tensor in out if tensor.numel()]
        got = [(of, tensor, torch.empty_like(_as_it_lies(tensor))) for of, tensor in into if tensor.numel()]
        for _, tensor, _ in got:
            tensor.fill_(float("nan"))
        ways = [dist.P2POp(dist.isend, each, dist.get_global_rank(self.group, to), self.group) for to, each in flat]
        ways += [dist.P2POp(dist.irecv, each, dist.get_global_rank(self.group, of), self.group) for of, _, each in got]
        works = dist.batch_isend_irecv(ways) if ways else []
        return _Event(works, got)


class _Event:
    def __init__(self, works: Any, got: Any) -> None:
        self.works, self.got = works, got

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for _, tensor, each in self.got:
            _as_it_lies(tensor).copy_(each)
        self.works, self.got = [], []


def _by_rank(tensors: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for rank, tensor in tensors:
        found.setdefault(rank, []).append(tensor)
    return found


def _as_it_lies(tensor: Any) -> Any:
    if tensor.is_contiguous():
        return tensor
    assert copies.row_major(tensor)
    return tensor.transpose(1, 2)


def attend_by_copies(cases: list[Case]) -> list[dict[str, Any]]:
    """As attend, by what copy engines would carry, K and V as they lie where they may."""
    make = ring._Call

    def call(group: Any, rank: int, plan: Any, options: Any, trains: bool, given: Any, by_rows: bool) -> Any:
        return make(group, rank, plan, options, trains, Gloo(group, plan.room), rows_first and plan.width == 1)

    ring._Call = call  # type: ignore[misc,assignment]
    try:
        found = []
        for case in cases:
            rows_first = case.rows_first
            found.append(_attend(case))
        return found
    finally:
        ring._Call = make  # type: ignore[misc]


def layouts(_: Any) -> list[bool]:
    """Attention inside context_parallel to a part of a projection, then to its copy: of one row both have the same strides."""
    tokens = torch.arange(3)  # 2 and 1 on two ranks
    with context_parallel(buffers=[tokens], seq_dims=[0], kernel="naive"):
        part = torch.ones(1, len(tokens), 2 * 4, dtype=torch.float64).unflatten(-1, (2, 4)).transpose(1, 2)
        return [torch.allclose(sdpa(each, each, each), each) for each in (part, part.contiguous(), part)]


def in_8_bits(_: Any) -> list[str]:
    """float8 by exchange of heads, whose O is of 16 bits, and in a ring, which refuses it."""
    found, make = [], ring._Call

    def call(group: Any, rank: int, plan: Any, options: Any, trains: bool, *_: Any) -> Any:
        return make(group, rank, plan, options, trains, Gloo(group, plan.room))

    ring._Call = call  # type: ignore[misc,assignment]
    q, k, v = (torch.ones(1, heads, 4, 16).to(torch.float8_e4m3fn) for heads in (8, 2, 2))
    for form in ("all_to_all", "ring"):
        try:
            o = ring_attention(q, k, v, form=form)
            found.append(f"{o.dtype} {bool((o == 1).all())}")
        except ValueError as refused:
            found.append(str(refused))
    ring._Call = make  # type: ignore[misc]
    return found
