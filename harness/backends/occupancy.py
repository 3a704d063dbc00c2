"""How many blocks a multiprocessor holds at once, and what allows no more.

Limits and granularities are those of the CUDA C++ Programming Guide's table per compute capability and of the toolkit's cuda_occupancy.h.
"""

from __future__ import annotations

from typing import NamedTuple

from .nvrtc import SHARED_LIMIT

_REGISTERS = 65536  # a multiprocessor: four parts, of which each warp has its registers in one
_PART = 256  # registers are given to a warp by so many
_THREADS = {"sm_75": 1024, "sm_89": 1536, "sm_120": 1536}  # else 2048
_BLOCKS = {"sm_75": 16, "sm_89": 24, "sm_120": 24}  # else 32


class Resident(NamedTuple):
    """Blocks and warps that a multiprocessor holds. limit: those of registers, shared, threads and blocks that allow no more."""

    blocks: int
    warps: int
    limit: str


def resident(arch: str, threads: int, registers: int, shared: int) -> Resident:
    """For a block of `threads` threads with `registers` each and `shared` bytes of shared memory, static and dynamic. No block fits: 0."""
    old = arch in ("sm_70", "sm_75")
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // _PART) * _PART
    taken = -(-shared // (256 if old else 128)) * (256 if old else 128) + (0 if old else 1024)  # the system has 1 KB of each block's
    room = SHARED_LIMIT[arch] + (0 if old else 1024)
    most = {
        "registers": _REGISTERS // 4 // max(of_warp, _PART) * 4 // warps,
        "shared": room // max(taken, 256),
        "threads": _THREADS.get(arch, 2048) // 32 // warps,
        "blocks": _BLOCKS.get(arch, 32),
    }
    least = min(most.values())
    return Resident(least, least * warps, ", ".join(name for name in most if most[name] == least))
