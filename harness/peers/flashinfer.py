"""FlashInfer's attention on a paged cache (Ye et al. 2025, arXiv 2501.01005), whose kernels its JIT compiles where there is no wheel of them.

A cache in one piece is one of pages of 16 keys that lie in order, which is the same memory. Planning, on the host, is not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..formula import as_softcap, as_window
from ..problem import Problem
from .on_torch import Attention, Step, Tensor, TorchDevice, TorchPeer, module, version

#: Keys of a page of a problem without pages; bytes that a plan divides the keys in.
PAGE, WORKSPACE = 16, 128 << 20


@dataclass(frozen=True, kw_only=True)
class FlashInfer(TorchPeer):
    """The paged wrappers on (B, S, H, D) tensors: that of decoding for one query, on tensor cores, so that a group shares its keys; else that
    of prefilling. It is asked for logsumexp, since our kernels write it as well, but its own is to base 2 and is left out."""

    heads_first: bool = False
    bottom_right: bool = True
    paged: bool = True

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The wrapper's run, planned."""
        import torch

        library, p = module(self, "flashinfer"), problem
        lengths, page = p.lengths or (p.seq_kv,) * p.batch, p.page_size or PAGE
        each = -(-p.seq_kv // page)  # pages of a sequence, in the order of the batch
        used = torch.tensor([-(-length // page) for length in lengths])
        pages = torch.cat([torch.arange(b * each, b * each + int(n)) for b, n in enumerate(used)])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), used.cumsum(0)])
        last = torch.tensor(lengths) - (used - 1) * page
        places = [t.to(device=device, dtype=torch.int32) for t in (starts, pages, last)]
        queries = torch.arange(p.batch + 1, device=device, dtype=torch.int32) * p.seq_q
        kind = {"q_data_type": getattr(torch, p.dtype), "kv_data_type": getattr(torch, p.dtype), "sm_scale": p.scale}
        if p.mask is not None and (window := as_window(p.mask)):
            kind["window_left"] = window[0]
        if p.score is not None:
            kind["logits_soft_cap"] = as_softcap(p.score)
        space, heads = torch.empty(WORKSPACE, dtype=torch.uint8, device=device), (p.heads_q, p.heads_kv, p.head_dim)
        if p.seq_q == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            wrapper.plan(*places, *heads, page, **kind)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
            wrapper.plan(queries, *places, *heads, page, causal=p.causal or "window_left" in kind, **kind)

        return functools.partial(run, wrapper, page)

    def refuse(self, problem: Problem, pass_: str) -> None:
        """As TorchPeer.refuse; and keys that fill no page, and a window without a last key."""
        super().refuse(problem, pass_)
        page = problem.page_size or PAGE
        if problem.seq_kv % page:
            raise self.no(problem, pass_, f"a page has {page} keys, and the last one must be whole", f"use a --seq-kv that {page} divides")
        window = as_window(problem.mask) if problem.mask is not None else None
        if window and window[1] and not problem.causal:
            raise self.no(problem, pass_, "its windows end at the query", "use --window with --causal, or leave it out")

    def ran(self, step: Step, pass_: str) -> str:
        """The backend that planning chose, and the package's version: release 0.7.4 takes fa2 on Hopper up to 64 queries and fa3 above."""
        assert isinstance(step, functools.partial)  # of run, below, with the tensors
        return f"flashinfer, {step.args[0]._backend}, {version('flashinfer-python')}"


def run(wrapper: Any, page: int, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """(O,) of a planned wrapper: q (B, S, H, D); k and v the same with their own S and H, seen as pools of pages of `page` keys."""
    rows, pools = q.flatten(0, 1), tuple(t.view(-1, page, *t.shape[2:]) for t in (k, v))
    return (wrapper.run(rows, pools, return_lse=True)[0].view(q.shape),)


PEERS = (
    FlashInfer(
        name="flashinfer",
        device="cuda",
        dtypes=("float16", "bfloat16"),
        passes=("forward",),
        modules=("torch", "flashinfer"),
        install="pip install flashinfer-python",
        row_bytes=16,
        arch=(80, 999),
        compiles=True,
        forms=("window", "softcap"),
    ),
)
