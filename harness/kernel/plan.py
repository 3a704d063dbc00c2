"""What planning a kernel gives: launches with numbers, workspaces, macros, and the device that they are planned for."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import DTYPE_BYTES


@dataclass(frozen=True)
class Device:
    """What a launch plan may depend on. arch is sm_90 and the like; on the CPU backend, the architecture it stands in for."""

    kind: str  # "cuda" or "cpu"
    name: str
    arch: str = "sm_90"
    sms: int = 132
    l2_bytes: int = 50 << 20
    shared_optin: int = 232448


@dataclass(frozen=True)
class LaunchPlan:
    """One launch with numbers: grid in blocks, block in threads, dynamic shared memory in bytes."""

    entry: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Workspace:
    """Device memory a kernel asks for: elements of dtype; init is none (poisoned), zero (every run) or zero_once."""

    name: str
    dtype: str
    elements: int
    init: str

    @property
    def bytes(self) -> int:
        """Bytes of it."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """A kernel made ready for one problem: the compile key (macros), the launches and the workspaces."""

    macros: tuple[tuple[str, str], ...]
    launches: tuple[LaunchPlan, ...]
    workspaces: tuple[Workspace, ...]
