"""Libraries' attention to compare with: one file per family, each optional, recorded by the implementation that ran.

All get the same data and the same scope: contiguous (batch, heads, rows, head_dim) tensors, converted to a library's own layout before
any timing; a forward pass without autograd, a backward pass alone; TF32 off.
"""

from __future__ import annotations

import functools
import importlib

TYPE_CHECKING = False  # the names load nothing: the shell's completion waits for them
if TYPE_CHECKING:
    from .base import Peer

#: The peers of each family's module, in the order of tables.
FAMILIES = {
    "sdpa": ("torch-cpu", "torch-math", "torch-efficient", "torch-flash", "torch-cudnn"),
    "flash": ("flash-attn2", "fa3", "fa4"),
    "fa3_source": ("fa3-source",),
    "flashinfer": ("flashinfer",),
    "flex": ("flex", "flex-flash"),
    "triton": ("triton",),
    "xformers": ("xformers",),
    "on_numpy": ("numpy",),
}


@functools.cache
def _all() -> dict[str, Peer]:
    """Every peer by name; the modules of the families import numpy."""
    families: list[tuple[Peer, ...]] = [importlib.import_module(f".{family}", __name__).PEERS for family in FAMILIES]
    return {peer.name: peer for family in families for peer in family}


def names() -> tuple[str, ...]:
    """Every peer's name."""
    return tuple(name for family in FAMILIES.values() for name in family)


def find(name: str) -> Peer | None:
    """The peer of a name, or None."""
    return _all().get(name)


def usual(device: str) -> tuple[str, ...]:
    """The default peers of a sweep: all of a kind of device ("cpu" or "cuda"), installed or not."""
    return tuple(name for name, peer in _all().items() if peer.device == device)
