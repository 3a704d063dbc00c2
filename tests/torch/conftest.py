"""A test that takes `device` runs once on each device torch has here."""

from __future__ import annotations

from typing import Any

import pytest
from torch_devices import found


@pytest.fixture(params=found())
def device(request: pytest.FixtureRequest) -> Any:
    """Each device in turn."""
    import torch

    return torch.device(request.param)


@pytest.fixture(params=["Python", "node"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Gradients by Python, and by the C++ node."""
    from harness.torch_op import native

    if request.param == "Python":
        monkeypatch.setattr(native, "apply", None)
        monkeypatch.setattr(native, "wanted", lambda: None)
    else:
        assert native.get(), native.why
    return str(request.param)
