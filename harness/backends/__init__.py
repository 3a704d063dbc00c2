"""Where kernels run: one file per backend, chosen by :func:`pick`. A backend never falls back to another silently."""

from __future__ import annotations

import re

from ..fault import UsageFault
from .nvml import nvidia_driver as nvidia_driver
from .protocol import Backend as Backend
from .protocol import Call as Call
from .protocol import CompileError as CompileError
from .protocol import ContextLost as ContextLost
from .protocol import Fill as Fill
from .protocol import Loaded as Loaded
from .protocol import Step as Step
from .protocol import cache_dir as cache_dir


def parsed(spec: str) -> tuple[str, int]:
    """The kind of a --device auto|cuda|cuda:N|cpu, and the number of its GPU. Raises UsageFault for another spec."""
    kind, _, index = spec.partition(":")
    if kind not in ("auto", "cuda", "cpu") or (index and (kind != "cuda" or not re.fullmatch("[0-9]{1,9}", index))):
        raise UsageFault(f"unknown device {spec!r}", "known: auto, cuda, cuda:N, cpu", "use --device cpu for the CPU engine")
    return kind, int(index or 0)


def pick(spec: str = "auto", seed: int | None = None, check: str | None = None, debug: bool = False, sms: int | None = None) -> Backend:
    """The backend for --device auto|cuda|cuda:N|cpu. seed and check are for the CPU engine (see Host); debug: code for a debugger.

    sms: the number of multiprocessors in launch plans, None: those of the device. With few, persistent blocks take several tiles.

    auto takes a GPU if there is one. Raises EnvironmentFault for an NVIDIA driver without a working CuPy, UsageFault for another spec.
    """
    kind, index = parsed(spec)
    if kind == "cuda" or (kind == "auto" and nvidia_driver()):
        from .cuda import Cuda

        return Cuda(index, debug, sms)
    from .host.backend import Host

    return Host(seed, check, debug, sms)
