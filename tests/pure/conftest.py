"""Fixtures of these tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from datasets import SMALL

from harness.dataset import folder as data

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete data folder of SMALL with seed 42."""
    return data.write(SMALL, 42, tmp_path).folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built of the checkout, from a copy so that no build folder is left behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "B?*_H*", "experiment_results", "tests")
    shutil.copytree(ROOT, source, ignore=leave)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)], check=True, capture_output=True
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))
