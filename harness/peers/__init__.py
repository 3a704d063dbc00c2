"""Libraries' attention to compare with: one file per family, each optional, recorded by the implementation that ran.

All get the same data and the same scope: contiguous (batch, heads, rows, head_dim) tensors, converted to a library's own layout before
any timing; a forward pass without autograd, a backward pass alone; TF32 off.
"""

from __future__ import annotations

import functools

from .base import Peer, Prepared

__all__ = ["Peer", "Prepared", "find", "names", "usual"]


@functools.cache
def _all() -> dict[str, Peer]:
    """Every peer by name, imported on first use: `--help` must not load numpy."""
    from . import flash, on_numpy, sdpa, triton, xformers

    families: tuple[tuple[Peer, ...], ...] = (sdpa.PEERS, flash.PEERS, triton.PEERS, xformers.PEERS, on_numpy.PEERS)
    return {peer.name: peer for family in families for peer in family}


def names() -> tuple[str, ...]:
    """Every peer's name."""
    return tuple(_all())


def find(name: str) -> Peer | None:
    """The peer of a name, or None."""
    return _all().get(name)


def usual(device: str) -> tuple[str, ...]:
    """The default peers of a sweep: all of a kind of device ("cpu" or "cuda"), installed or not."""
    return tuple(name for name, peer in _all().items() if peer.device == device)
