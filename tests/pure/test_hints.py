"""Every command that a message, an example or a comment at the end of one names: the verb exists, and has the options."""

from __future__ import annotations

from pathlib import Path

import hints
import pages
import pytest

import cli

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [ROOT / "cli.py", *sorted(ROOT.glob("harness/**/*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_exists(path: Path) -> None:
    """In every text of the sources, hints among them."""
    found = [f"line {line}: {each}" for line, text in hints.texts(path) if "fa-cli" in text for each in hints.wrong(text, cli.main)]
    assert not found


def test_documents_too() -> None:
    """The commands of README and the pages."""
    for path in pages.documents():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "fa-cli " in line and "--" in line]
        found = [each for line in lines for each in hints.wrong(line.partition("#")[0].replace("`", " , "), cli.main)]
        assert not found, path


@pytest.mark.parametrize(
    ("text", "verb", "wanted"),
    [
        ("fa-cli rnu --seq 3", None, ["fa-cli rnu"]),
        ("fa-cli run --force", None, ["run --force"]),
        ("add --force to replace what is there", "run", ["run --force"]),
        ("fa-cli gen-data --force, or --seed 3", "run", []),
        ("pip install --force-reinstall torch", "run", []),
        ("fa-cli compare A B --fail-if slower:5%; fa-cli list --peers", None, ["list --peers"]),
    ],
)
def test_the_check_sees_it(text: str, verb: str | None, wanted: list[str]) -> None:
    """A verb, an option of a verb, an option of the verb that was called."""
    assert hints.wrong(text, cli.main, verb) == wanted
