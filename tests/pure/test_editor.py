"""What editors are told: kernel files and the engine's headers are clean C++ under .clangd's flags, the tasks are commands that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cli
from harness.terminal import debugger

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILER = shutil.which("clang++") or shutil.which("g++")
FRAGMENTS = [
    (re.search(r"PathMatch: (\S+)", text), re.search(r"Add: \[(.*)\]", text)) for text in (ROOT / ".clangd").read_text().split("---\n")[1:]
]


def flags(path: Path) -> list[str]:
    """The flags clangd adds for a file: those of every fragment whose pattern matches its whole path."""
    return [
        flag
        for pattern, add in FRAGMENTS
        if pattern and add and re.fullmatch(pattern[1], path.relative_to(ROOT).as_posix())
        for flag in add[1].split(", ")
    ]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: apt install g++")
@pytest.mark.parametrize("folder", [ROOT, ROOT / "kernels_cu"], ids=["from the project", "from the folder"])
def test_every_kernel_is_clean(folder: Path) -> None:
    """With the flags as they are, relative to the project or to the file's folder: clangd's versions differ."""
    for path in sorted((*ROOT.glob("kernels_cu/*.cu"), *ROOT.glob("kernels_cu/*/*.cu"))):
        done = subprocess.run(
            [str(COMPILER), *flags(path), "-fsyntax-only", str(path)], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: apt install g++")
def test_every_header_of_the_engine_includes_what_it_uses() -> None:
    """Each compiles by itself."""
    for path in sorted(ROOT.glob("kernels_cu/host/*.hpp")):
        unit = f'#include "{path}"\n'
        done = subprocess.run(
            [str(COMPILER), *flags(path), "-Wno-psabi", "-fsyntax-only", "-"], input=unit, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr


def test_a_fault_in_a_kernel_is_seen(tmp_path: Path) -> None:
    """The flags do not hide errors: a macro that no header sets is one."""
    path = ROOT / "kernels_cu" / "07_fa2_forward.cu"
    assert any(flag.startswith("-DHEAD_DIM=") for flag in flags(path))
    kept = [flag for flag in flags(path) if not flag.startswith("-DHEAD_DIM=")]
    if COMPILER:
        assert subprocess.run([COMPILER, *kept, "-fsyntax-only", str(path)], cwd=ROOT, capture_output=True, check=False).returncode != 0


def test_tasks_are_commands() -> None:
    """Each task of VS Code is a verb with options it has."""
    tasks = json.loads((ROOT / ".vscode" / "tasks.json").read_text())["tasks"]
    commands = [task["args"] for task in tasks if task["command"].endswith("fa-cli")]
    assert len(commands) >= 3
    for verb, *rest in commands:
        words = [word.replace("${input:pass}", "forward") for word in rest]
        cli.main.commands[verb].make_context(verb, words, parent=cli.main.make_context("fa-cli", [verb], obj={"verbosity": 0}))


def test_launches_are_commands() -> None:
    """Each launch of VS Code's debugger is a run of the open file with --debug, and gdb is given the script that the command line gives."""
    launches = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
    assert [launch["type"] for launch in launches] == ["cppdbg", "cuda-gdb"]
    for launch in launches:
        words = launch["args"].split() if isinstance(launch["args"], str) else launch["args"]
        script, verb, *rest = [word.replace("${input:pass}", "forward") for word in words]
        assert script.replace("${workspaceFolder}", str(ROOT)) == cli.__file__
        parsed = cli.main.commands[verb].make_context(verb, rest, parent=cli.main.make_context("fa-cli", [verb], obj={"verbosity": 0}))
        assert parsed.params["debug"] and parsed.params["kernels"] == ("${file}",)
    source = launches[0]["setupCommands"][0]["text"].replace("${workspaceFolder}", str(ROOT))
    assert source == f"source {debugger.SCRIPT}" and debugger.SCRIPT.is_file()
