"""A kernel's plan for a problem: launches with their sizes, workspaces and macros; and the device that it is for."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import DTYPE_BYTES


@dataclass(frozen=True)
class Device:
    """A device, as far as plans depend on it: multiprocessors (sms), bytes of L2 cache, most bytes of shared memory per block.

    arch: "sm_90" and the like; on the CPU backend that of the GPU whose plans it follows.
    """

    kind: str  # "cuda" or "cpu"
    name: str
    arch: str = "sm_90"
    sms: int = 132
    l2_bytes: int = 50 << 20
    shared_optin: int = 232448


@dataclass(frozen=True)
class LaunchPlan:
    """One launch: grid in blocks, block in threads, dynamic shared memory in bytes."""

    entry: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Workspace:
    """A kernel's scratch memory: elements of dtype. init: none (poisoned), zero (before every run) or zero_once."""

    name: str
    dtype: str
    elements: int
    init: str

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """A kernel made ready for one problem: the compile key (macros), the launches and the workspaces."""

    macros: tuple[tuple[str, str], ...]
    launches: tuple[LaunchPlan, ...]
    workspaces: tuple[Workspace, ...]
