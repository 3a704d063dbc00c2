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
