"""A training step over the ranks of a process group: context_parallel()."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ..check import choose
from ..partition import KINDS, equal, rows, shards
from .ranks import agree, members
from .ring import Options, over_ranks
from .sdpa import put_instead, sdpa


@contextmanager
def context_parallel(
    group: Any = None,
    *,
    buffers: Sequence[Any] = (),
    seq_dims: Sequence[int] = (),
    no_restore_buffers: Sequence[Any] = (),
    partition: str = "zigzag",
    form: str = "auto",
    kernel: Any = choose.AUTO,
    deterministic: bool = True,
) -> Iterator[None]:
    """Inside, each buffer is this rank's rows of it, and scaled_dot_product_attention is over the rows of all ranks.

    It does what torch.distributed.tensor.experimental.context_parallel does, for any length. buffers: all that has a row for each token:
    inputs, targets, positions or rotary tables; whole and alike on all ranks, all of one length along their seq_dims, and without a
    gradient. They are themselves again afterwards, but for those of no_restore_buffers, whose whole tensor is freed.

    :func:`sdpa` and torch.nn.functional.scaled_dot_product_attention, looked up there when called, go to :func:`ring_attention` with
    group, partition, form, kernel and deterministic as it has them; what they hand to torch's own outside (attn_mask, dropout) raises
    ValueError. Ranks agree once for each shape and type of call. Call backward() inside too: it reads the buffers as they are here.

    A loss is this rank's: sum it over the rows and divide by the rows of all ranks, then add up the parameters' gradients over the group.
    Where the length is a multiple of twice the ranks, means of equal weight do: DistributedDataParallel's, for one.

    Raises ValueError on all ranks where buffers or arguments are wrong or differ, and as :func:`ring_attention`.
    """
    group = members(group)
    wrong = _wrong(buffers, seq_dims, no_restore_buffers, partition)
    length = buffers[0].shape[seq_dims[0]] if buffers and not wrong else None
    asked = {"partition": partition, "form": form, "kernel": str(kernel), "deterministic": deterministic}
    agree("context_parallel", {"buffers": len(buffers), "length": length, **asked}, group, wrong=wrong)
    mine = None if length is None else shards(equal(length, dist.get_world_size(group)), partition)[dist.get_rank(group)]
    agreed: dict[str, Any] | None = None if mine is None else {}  # without buffers the lengths may change from call to call

    def attend(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None, kernel: Any, deterministic: bool) -> Any:
        if mine is not None and q.shape[2] != rows(mine):
            raise ValueError(
                f"q has {q.shape[2]} rows, and this rank's part of the {length} rows of the buffers has {rows(mine)}\n"
                "inside context_parallel attention is over the sequence that the buffers have\n"
                "hint: add the tensor that this sequence comes from to buffers, or attend to it outside"
            )
        return over_ranks(q, k, v, group, Options(causal, scale, partition, form, str(kernel), deterministic), agreed)

    whole = [buffer.detach() for buffer in buffers]
    looked_up, called = functional.scaled_dot_product_attention, put_instead(attend)
    try:
        for buffer, dim in zip(buffers, seq_dims, strict=True):
            pieces = [buffer.narrow(dim, start, stop - start) for start, stop in mine or ()]
            buffer.set_(torch.cat(pieces, dim) if pieces else buffer.narrow(dim, 0, 0).clone())
        for index, buffer in enumerate(buffers):
            if any(buffer is each for each in no_restore_buffers):
                whole[index] = None
        functional.scaled_dot_product_attention = partial(sdpa, kernel=kernel, deterministic=deterministic)
        yield
    finally:
        functional.scaled_dot_product_attention = looked_up
        put_instead(called)
        for buffer, original in zip(buffers, whole, strict=True):
            if original is not None:
                buffer.set_(original)


def _wrong(buffers: Sequence[Any], seq_dims: Sequence[int], no_restore: Sequence[Any], partition: str) -> str:
    """What is wrong with the arguments; empty where nothing is."""
    if partition not in KINDS:
        return f"unknown partition {partition!r:.40}; known: {', '.join(KINDS)}\nhint: leave it out for zigzag"
    if others := [buffer for buffer in buffers if not isinstance(buffer, torch.Tensor)]:
        return f"a buffer is a {type(others[0]).__name__}\nhint: buffers are torch tensors: torch.as_tensor(values)"
    if len(buffers) != len(seq_dims) or not all(type(dim) is int for dim in seq_dims):
        what = f"{len(buffers)} buffers and the seq_dims {list(seq_dims)!r:.60}: each buffer has one, an integer"
        return f"{what}\nhint: seq_dims={[1] * len(buffers)} where rows are the second dimension"
    if len({id(buffer) for buffer in buffers}) < len(buffers):
        return "a buffer is there twice, and would be sharded twice"
    if not all(any(each is buffer for buffer in buffers) for each in no_restore):
        return "no_restore_buffers has a tensor that buffers has not"
    if any(buffer.requires_grad for buffer in buffers):
        return "a buffer wants a gradient: parameters are whole on each rank, and activations are made of the sharded buffers"
    if any(not -buffer.dim() <= dim < buffer.dim() for buffer, dim in zip(buffers, seq_dims, strict=True)):
        shapes = ", ".join(str(tuple(buffer.shape)) for buffer in buffers)
        return f"a buffer has fewer dimensions than its seq_dim asks for\nhint: the shapes are {shapes}, the seq_dims {list(seq_dims)}"
    if len(lengths := {buffer.shape[dim] for buffer, dim in zip(buffers, seq_dims, strict=True)}) > 1:
        return f"buffers of {' and '.join(map(str, sorted(lengths)))} rows: cut all to the sequence's length first"
    return ""
