"""Fixtures of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import SMALL

from harness.dataset import folder as data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete data folder of SMALL with seed 42."""
    return data.write(SMALL, 42, tmp_path).folder
