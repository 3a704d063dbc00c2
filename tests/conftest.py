"""Fixtures that several groups of tests use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # tests already run side by side: one thread each, set before numpy loads its BLAS
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "FA_CLI_THREADS"):
        os.environ.setdefault(name, "1")

import pytest
from click.testing import CliRunner, Result


def pytest_addoption(parser: pytest.Parser) -> None:
    """--write-frozen is cli/test_frozen.py's."""
    parser.addoption("--write-frozen", action="store_true", help="Write tests/cli/frozen/ anew instead of comparing with it.")


@pytest.fixture
def fa_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """The command line, called in this process from an empty folder: fa_cli("run", "--seq", 64) -> exit_code, stdout, stderr."""
    import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA_CLI_DEVICE", "cpu")  # a GPU is not what these tests are about
    yield lambda *words, **more: CliRunner().invoke(cli.main, [str(word) for word in words], **more)
