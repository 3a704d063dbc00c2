"""Fixtures that several groups of tests use, and the seed of the sampled ones."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # tests already run side by side: one thread each, set before numpy loads its BLAS
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "FA_CLI_THREADS"):
        os.environ.setdefault(name, "1")
if sys.prefix != sys.base_prefix and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Hundreds of tests start a Python, which would compile numpy and pandas each time. What they write lies in the venv, not in the tree.
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(Path(sys.prefix) / ".pycache")
    sys.dont_write_bytecode = False

# Python looks for a folder with room where /tmp is full; the compilers that tests start do not.
os.environ.setdefault("TMPDIR", tempfile.gettempdir())

import cpu_times
import hints
import pytest
import sample
from click.testing import CliRunner, Result

#: Whether files or tests were named: set for the workers of xdist.
_WHOLE = "FA_CLI_TEST_NAMED"


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed before xdist starts its workers, which inherit it: all must collect the same tests, also around midnight."""
    os.environ[sample.VARIABLE] = sample.seed()
    if not hasattr(config, "workerinput"):
        os.environ[_WHOLE] = "" if config.args_source == pytest.Config.ArgsSource.TESTPATHS else "named"
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(cpu_times.Times(Path(file).absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Dear tests that are not of this day's are slow, where no files or tests were named."""
    if os.environ.get(_WHOLE):
        return
    own = [item for item in items if not any(item.get_closest_marker(name) for name in ("slow", "sampled"))]
    left = sample.another_day([item.nodeid for item in own], sample.dear())
    for item in own:
        if item.nodeid in left:
            item.add_marker(pytest.mark.slow)


def pytest_report_header(config: pytest.Config) -> str:
    """The seed, above the tests."""
    return f"sample: {sample.VARIABLE}={sample.seed()} (a new one each day; make test-all runs everything)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to run again what failed, whatever the seed: -m '' also takes what the day's sample leaves out."""
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if failed:
        terminalreporter.write_line(f"the same sample: {sample.VARIABLE}={sample.seed()} make test; one test alone:")
        for nodeid in dict.fromkeys(failed):
            terminalreporter.write_line(f"  .venv/bin/python -m pytest -m '' '{nodeid}'")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--write-frozen is cli/test_frozen.py's."""
    parser.addoption("--cpu-times", metavar="FILE", help="Add the CPU seconds of each test to a file (tests/support/cpu_times.py).")
    parser.addoption("--write-frozen", action="store_true", help="Write tests/cli/frozen/ anew instead of comparing with it.")


@pytest.fixture
def fa_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """The command line, called in this process from an empty folder: fa_cli("run", "--seq", 64) -> exit_code, stdout, stderr.

    Every hint that it prints is read: what it names must exist.
    """
    import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA_CLI_DEVICE", "cpu")  # a GPU is not what these tests are about

    def run(*words: object, **more: Any) -> Result:
        result = CliRunner().invoke(cli.main, [str(word) for word in words], **more)
        verb = str(words[0]) if words and str(words[0]) in cli.main.commands else None
        told = [line.removeprefix("hint: ") for line in result.stderr.splitlines() if line.startswith("hint: ")]
        missing = [each for text in told for each in hints.wrong(text, cli.main, verb)]
        assert not missing, f"a hint names what there is not: {missing}\n{result.stderr}"
        return result

    yield run


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts this process and those it starts, even where the tests were started with it ignored (nohup, `make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
