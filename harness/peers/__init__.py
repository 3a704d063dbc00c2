"""Other people's attention, to measure against: one file a family, each optional, named by what really ran.

Everyone gets the same data and the same scope: contiguous (batch, heads, rows, head dim) tensors, laid out otherwise before any
timing where a library wants it; a forward timed without autograd, a backward timed alone; TF32 off.
"""

from __future__ import annotations

import functools

from .base import Peer, Prepared

__all__ = ["Peer", "Prepared", "find", "names", "usual"]


@functools.cache
def _all() -> dict[str, Peer]:
    """Every peer by name, imported when first asked for: `--help` has no use for numpy."""
    from . import flash, on_numpy, sdpa, triton, xformers

    families: tuple[tuple[Peer, ...], ...] = (sdpa.PEERS, flash.PEERS, triton.PEERS, xformers.PEERS, on_numpy.PEERS)
    return {peer.name: peer for family in families for peer in family}


def names() -> tuple[str, ...]:
    """Every peer's name."""
    return tuple(_all())


def find(name: str) -> Peer | None:
    """The peer of a name; None for what is no peer's."""
    return _all().get(name)


def usual(device: str) -> tuple[str, ...]:
    """The peers a sweep takes unless told otherwise: all of the kind of device ("cpu" or "cuda"), here or not."""
    return tuple(name for name, peer in _all().items() if peer.device == device)
