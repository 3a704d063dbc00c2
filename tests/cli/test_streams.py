"""The standard streams: closed, full, without a reader, of an encoding that lacks letters; and a working folder that is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLI = [sys.executable, str(Path(__file__).resolve().parent.parent.parent / "cli.py")]
SHAPE = ["--batch", "1", "--heads", "1", "--seq", "32", "--dim", "16"]
SWEEP = 'title = "ü"\nshapes = [{ test = "ü", batch = 1, heads = 1, seq = 16, dim = 16 }]\n'

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


def ended(folder: Path, redirection: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with streams as a shell redirects them."""
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *CLI, *words]
    with_cpu = os.environ | {"FA_CLI_DEVICE": "cpu"} | environment
    return subprocess.run(command, cwd=folder, env=with_cpu, capture_output=True, text=True, check=False, timeout=120)


@needs_compiler
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_dev_null(closed: str, tmp_path: Path) -> None:
    """The work is done, the verdict is the exit code, and what is still open has what it always has."""
    done = ended(tmp_path, closed, "run", "--compute", "naive", *SHAPE)
    assert done.returncode == 0 and "error" not in done.stderr
    assert ("PASS naive forward" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert (tmp_path / "data" / "B1_H1_S32_D16" / "O.bin").stat().st_size == 32 * 16 * 4  # no other stream wrote into it
    assert ended(tmp_path, closed, "gen-data", *SHAPE).returncode == 0
    assert ended(tmp_path, closed, "rnu").returncode == 2


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--help"], ["run", "--help"]])
def test_a_closed_pipe_is_141(words: list[str], tmp_path: Path) -> None:
    """fa-cli list | true: no traceback, no message; the exit code of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*CLI, *words], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--help"]])
def test_a_full_stdout_is_exit_6(words: list[str], unbuffered: str, tmp_path: Path) -> None:
    """What could not be written is said on stderr, once, and not taken for success, whenever Python writes it."""
    done = ended(tmp_path, ">/dev/full", *words, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 6 and done.stderr.count("No space left") == 1 and "hint: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@needs_compiler
def test_an_encoding_without_a_letter_escapes_it(tmp_path: Path) -> None:
    """A sweep's names are not ASCII: it is told all the same, and JSON stays JSON."""
    (tmp_path / "s.toml").write_text(SWEEP, encoding="utf-8")
    words = ("experiment", "s.toml", "--compute", "naive", "--peers", "none", "--no-figures")
    done = ended(tmp_path, "", *words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\\xfc" in done.stdout, done.stderr
    as_json = ended(tmp_path, "", *words, "--json", PYTHONIOENCODING="ascii:strict")
    assert "ü" in json.dumps(json.loads(as_json.stdout), ensure_ascii=False)


@pytest.mark.parametrize("words", [["run"], ["doctor"], ["gen-data", *SHAPE]])
def test_a_working_folder_that_is_gone_is_said(words: list[str], tmp_path: Path) -> None:
    """It was removed in another shell."""
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *CLI, *words]
    (tmp_path / "gone").mkdir()
    done = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    assert done.returncode == 6 and done.stderr.startswith("error: the working folder is gone\n"), done.stderr
    assert done.stderr.endswith("hint: cd to a folder that exists\n")
