"""The devices torch can use here, by the names it gives them."""

from __future__ import annotations

import importlib.util
from functools import cache

from harness.backends.host.build import compiler
from harness.fault import EnvironmentFault


@cache
def found() -> tuple[str, ...]:
    """cpu where there is a C++ compiler, and the GPUs that torch sees, two at most; nothing where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    devices = tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count())))
    try:
        compiler()
    except EnvironmentFault:
        return devices
    return ("cpu", *devices)
