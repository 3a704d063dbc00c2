"""The backends found on this machine: a test that takes `backend` runs once on each."""

from __future__ import annotations

import pytest

from harness.backends import Backend, nvidia_driver, pick
from harness.backends.host.build import compiler
from harness.fault import EnvironmentFault


def found() -> list[str]:
    """cpu where there is a C++ compiler, cuda where there is an NVIDIA driver: a CuPy that does not work there is no reason to skip."""
    devices = []
    try:
        compiler()
        devices.append("cpu")
    except EnvironmentFault:
        pass
    if nvidia_driver():
        devices.append("cuda")
    return devices or ["cpu"]  # neither: the fault itself says what to install


@pytest.fixture(scope="session", params=found())
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend of this machine in turn, made once."""
    return pick(request.param)
