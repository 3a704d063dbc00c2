"""The devices torch has here: a test that takes `device` runs once on each."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from harness.backends.host.backend import compiler
from harness.fault import EnvironmentFault


def found() -> list[str]:
    """cpu where there is a C++ compiler, and the GPUs that torch sees, two at most."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    devices = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    try:
        compiler()
    except EnvironmentFault:
        return devices
    return ["cpu", *devices]


@pytest.fixture(params=found())
def device(request: pytest.FixtureRequest) -> Any:
    """Each device in turn."""
    import torch

    return torch.device(request.param)
