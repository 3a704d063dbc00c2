"""A kernel's plan for a problem: launches with their sizes, workspaces and macros; and the device that it is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..fault import UsageFault
from ..formula import Given
from ..problem import DTYPE_BYTES
from .header import Choice

#: The most blocks of a cluster that every GPU with clusters takes (CUDA C++ Programming Guide, Thread Block Clusters).
MOST_CLUSTER = 8


@dataclass(frozen=True)
class Device:
    """A device, as far as plans depend on it: multiprocessors (sms), bytes of L2 cache, most bytes of shared memory per block.

    arch: "sm_90" and the like; on the CPU engine that of the GPU whose plans it follows.
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
    maps: tuple[int, ...] = ()  # those of the plan's tensor maps that it is passed, after fa::Args or args
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks
    overlaps: bool = False  # it may begin before the launch before has ended
    cooperative: bool = False  # all its blocks run at once

    def checked(self, label: str, folder: str, device: Device) -> LaunchPlan:
        """Itself. Raises UsageFault for what no GPU, or not this device, launches. label and folder: of the kernel and the problem."""
        for axis, size, most in zip("xyz", self.grid, (2**31 - 1, 65535, 65535), strict=True):
            if not 1 <= size <= most:
                raise UsageFault(
                    f"{label} cannot be launched on {folder}",
                    f"grid.{axis} would be {size}; a GPU takes 1 to {most}",
                    "use fewer heads or a smaller batch",
                )
        if not 1 <= math.prod(self.cluster) <= MOST_CLUSTER:
            why = f"its clusters would be of {self.cluster} blocks; a GPU takes 1 to {MOST_CLUSTER} in all"
            raise UsageFault(f"{label} cannot be launched on {folder}", why, "correct cluster in its header")
        if any(size % blocks for size, blocks in zip(self.grid, self.cluster, strict=True)):
            why = f"a grid of {self.grid} blocks is no multiple of its clusters of {self.cluster}"
            raise UsageFault(f"{label} cannot be launched on {folder}", why, "round the grid up in its header: round_up(blocks, CLUSTER)")
        if self.shared > device.shared_optin:
            of = "an H200, whose limits the CPU engine has," if device.kind == "cpu" else "it"
            raise UsageFault(
                f"{label} does not fit {'an H200' if device.kind == 'cpu' else device.name}",
                f"it needs {self.shared} bytes of shared memory per block, {of} has {device.shared_optin}",
                "use smaller tiles (--tile), or change shared in its header",
            )
        if not 1 <= self.block <= 1024:
            raise UsageFault(
                f"{label} needs {self.block} threads per block",
                "a GPU takes 1 to 1024",
                "use other tiles (--tile), or change block in its header",
            )
        if self.cooperative:
            self._meets(label, folder, device)
        return self

    def _meets(self, label: str, folder: str, device: Device) -> None:
        """Raises UsageFault where not all blocks can run at once, whatever their registers, which the driver counts when it launches."""
        if self.overlaps:
            why = f"the launch of {self.entry} is both cooperative and overlaps: while the one before runs, not all its blocks can"
            raise UsageFault(f"{label} cannot be launched on {folder}", why, "correct its header")
        each = min(32, 64 // -(-self.block // 32), (device.shared_optin + 1024) // (self.shared + 1024))
        if math.prod(self.grid) > device.sms * each:
            raise UsageFault(
                f"{label} cannot be launched on {folder}",
                f"{self.entry} is cooperative: its {math.prod(self.grid)} blocks must run at once, and {device.sms} multiprocessors hold "
                f"{device.sms * each} of them at most",
                "let a block take several tiles: min(sms, …) blocks in grid",
            )


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
class TensorMap:
    """How TMA reads a tensor, innermost dimension first: dims and box in elements, the swizzle's span in bytes (0: none).

    strides: in elements, of each dimension but the innermost: a constant, and multiples of the tensor's batch, head and row stride.
    """

    name: str
    tensor: str  # of fa::Args, or a workspace
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    box: tuple[int, ...]
    swizzle: int

    def byte_strides(self, batch: int, head: int, row: int) -> tuple[int, ...]:
        """The strides in bytes for a tensor's own in elements. A dimension of one element is never stepped over: it has 16."""
        size = DTYPE_BYTES[self.dtype]
        found = ((c + b * batch + h * head + r * row) * size for c, b, h, r in self.strides)
        return tuple(stride if dim > 1 else 16 for dim, stride in zip(self.dims[1:], found, strict=True))


@dataclass(frozen=True)
class Plan:
    """A kernel made ready for one problem: the compile key (macros), the launches, the workspaces and the tensor maps.

    choices: the rows of the header that gave tile values. runtime: names of [tile] whose values are no macros, in the order of
    fa::Args::runtime. tensors: those of mask and score, whose addresses follow those of the workspaces.
    """

    macros: tuple[tuple[str, str], ...]
    launches: tuple[LaunchPlan, ...]
    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...] = ()
    choices: tuple[Choice, ...] = ()
    runtime: tuple[tuple[str, int], ...] = ()
    tensors: tuple[Given, ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """Every macro but the indices into fa::Args and the C++ of mask and score, and every runtime value."""
        macros = {name: value for name, value in self.macros if not name.startswith(("WORKSPACE_", "RUNTIME_", "FA_"))}
        return macros | {name: str(value) for name, value in self.runtime}
