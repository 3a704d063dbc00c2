"""Fixtures that several groups of tests use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def fa_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """The command line, called in this process from an empty folder: fa_cli("run", "--seq", 64) -> exit_code, stdout, stderr."""
    import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA_CLI_DEVICE", "cpu")  # a GPU is not what these tests are about
    yield lambda *words, **more: CliRunner().invoke(cli.main, [str(word) for word in words], **more)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a C++ compiler where there is none, saying so."""
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        for item in items:
            if item.get_closest_marker("needs_compiler"):
                item.add_marker(pytest.mark.skip(reason="no C++ compiler: apt install g++"))
