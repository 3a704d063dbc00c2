"""Damaged files of every kind through the commands that read them: no traceback, no hang, an exit code that the command may have."""

from __future__ import annotations

from pathlib import Path

import days
import fuzz
import pytest

CASES = 50


@pytest.mark.parametrize("reader", fuzz.READERS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The day's sample. experiments/trust/fuzz_readers.py runs more, and any case again."""
    monkeypatch.chdir(tmp_path)
    assert not list(fuzz.cases(reader, tmp_path, CASES, days.today()))
