"""Fixtures that several groups of tests use, and the choice of the day's tests."""

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
import days
import hints
import pytest
from click.testing import CliRunner, Result

#: Whether files or tests were named: set for the workers of xdist.
_NAMED = "FA_CLI_TEST_NAMED"
_LEFT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Fix the day before xdist starts its workers, which inherit it: all must collect the same tests, also around midnight."""
    os.environ[days.VARIABLE] = days.today()
    if not hasattr(config, "workerinput"):
        os.environ[_NAMED] = "" if config.args_source == pytest.Config.ArgsSource.TESTPATHS else "named"
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(cpu_times.Times(Path(file).absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is left for another day; where files or tests were named, only what is marked days."""
    marks = {item.nodeid: item.get_closest_marker("days") for item in items}
    marked = {name: int(mark.args[0]) if mark else None for name, mark in marks.items() if mark or not os.environ.get(_NAMED)}
    left = days.another_day(marked, days.changes())
    for item in items:
        if item.nodeid in left:
            item.add_marker(pytest.mark.another_day)
    config.stash[_LEFT] = len(left) if config.option.markexpr == "not another_day" else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells how many tests are left."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Workers collect the same tests."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_report_header(config: pytest.Config) -> str:
    """The day, above the tests."""
    return f"{days.VARIABLE}={days.today()} (other days have other tests; make test-all runs all of them)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests are left, and how to run again what failed, whatever the day."""
    if left := terminalreporter.config.stash.get(_LEFT, 0):
        terminalreporter.write_line(f"{left} tests were not run: they are left for another day")
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if failed:
        terminalreporter.write_line(f"the same tests: {days.VARIABLE}={days.today()} make test; one test alone:")
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
