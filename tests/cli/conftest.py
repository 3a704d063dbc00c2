"""Fixtures of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import WRONG


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """A kernel whose check fails."""
    (tmp_path / "wrong_forward.cu").write_text(WRONG)
    return "./wrong_forward.cu"
