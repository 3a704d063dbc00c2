"""Whether the commands and options that a message names exist: a hint is typed as it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

#: Programs of others, whose options are not ours.
OTHERS = {
    *("pip", "apt", "chmod", "rm", "mv", "df", "git", "docker", "mpiexec", "modprobe", "dcgmi"),
    *("nvidia-smi", "compute-sanitizer", "container", "the"),
}
#: What follows fa-cli in a sentence about it.
SENTENCES = {"reads", "did", "does"}
#: The names of the group, of which a message may speak without a verb.
GENERAL = {"--help", "--version"}


def wrong(text: str, group: click.Group, verb: str | None = None) -> list[str]:
    """What of a hint does not exist: verbs after fa-cli, options after such a verb, and without one the options of `verb`, if given."""
    found, current = [], verb
    words = text.split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        bare = word.strip("'\"`().:")
        if bare == "fa-cli":
            name = re.sub(r"[^a-z-].*", "", following)
            current = name if name in group.commands else verb
            if name and name not in {*group.commands, *SENTENCES} and not name.startswith("-"):
                found.append(f"fa-cli {name}")
        elif bare in OTHERS:
            current = None
        elif current and (match := re.match(r"--[a-z][a-z-]+", bare)) and match[0] not in GENERAL | options(group.commands[current]):
            found.append(f"{current} {match[0]}")
        if word.endswith((",", ";")) or word in ("or", "and"):
            current = verb
    return found


def options(command: click.Command) -> set[str]:
    """Every option of a verb, its other spellings too."""
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text in a source, with its line; what an f-string fills in stands as …. Docstrings are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
