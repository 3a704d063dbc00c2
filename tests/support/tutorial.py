"""Plays docs/first-kernel.md: writes its files, makes its edits, runs its commands, in order. The page's outputs are real ones.

A block with a title is a file (```cpp) or an edit of one (```diff); a ```console block is commands after `$ `, each with what it prints on
stdout and then on stderr. `python tests/support/tutorial.py` plays the page in a new folder and writes the outputs anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-kernel.md"
BLOCK = re.compile(r'(?ms)^```(cpp|diff|console)(?: title="([^"]+)")?\n(.*?)^```$')
COMMAND = re.compile(r"(?m)^\$ (.*)\n((?:(?!\$ ).*\n)*)")


def edited(text: str, change: str) -> str:
    """A file after a diff without line numbers. Raises ValueError where its lines are not in the file exactly once."""
    old = "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] != "+")
    new = "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] != "-")
    if text.count(old) != 1:
        raise ValueError(f"{text.count(old)} places for the edit\n{change}")
    return text.replace(old, new)


def shell(command: str, folder: Path) -> str:
    """What a command of the page prints, the machine's and the folder's names replaced. fa-cli is this checkout's."""
    words = [sys.executable, str(ROOT / "cli.py"), *command.split()[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    text = (done.stdout + done.stderr).replace(f"{folder}/", "").replace(f"{folder.resolve()}/", "")
    return re.sub(r"(?m)(, (?:forward|backward)), on .*$", r"\1, on this CPU", text)


def play(page: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Each command of the page with the output that the page shows and the one it has."""
    for kind, title, body in BLOCK.findall(page):
        path = folder / title
        if kind == "cpp":
            path.write_text(body)
        elif kind == "diff":
            path.write_text(edited(path.read_text(), body))
        else:
            for command, shown in COMMAND.findall(body):
                yield command, shown, shell(command, folder)


def shape(output: str) -> str:
    """An output without its numbers, the widths of its columns, and what a busy machine leaves unsettled: they differ between runs."""
    output = re.sub(r"(?m)^note: .* is not settled: .*\n", "", output)
    return re.sub(r"[ -]+", " ", re.sub(r"\d[\d.,e+-]*", "#", output))


def rewritten(page: str) -> str:
    """The page with the outputs that its commands have now."""
    done, rest = "", page
    with tempfile.TemporaryDirectory() as place:
        for command, shown, now in play(page, Path(place)):
            head, rest = rest.split(f"$ {command}\n{shown}", 1)
            done += f"{head}$ {command}\n{now}"
    return done + rest


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
