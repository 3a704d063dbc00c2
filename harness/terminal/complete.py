"""What the shell completes: kernels, dtypes, sweeps, peers, data folders. Only names of files are read: a Tab takes as long as --help.

And what --help says of a command where Python runs without docstrings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import peers
from ..problem import DTYPE_BYTES, MODES

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

ROOT = Path(__file__).resolve().parent.parent.parent


def kernels() -> list[str]:
    """The names of the tree's kernels, in ladder order."""
    stems = (path.stem for path in sorted((ROOT / "kernels_cu").glob("*.cu")))
    return list(dict.fromkeys(re.sub(r"^\d\d_|_(forward|backward)$", "", stem) for stem in stems))


def sweeps() -> list[str]:
    """The names of the sweeps."""
    return sorted(path.parent.name for path in (ROOT / "experiments").glob("*/sweep.toml"))


def data_folders() -> list[str]:
    """The data folders below the current folder's data/."""
    return sorted(str(path) for path in Path("data").glob("B*_H*_S*_D*") if path.is_dir())


def attach(command: click.Command) -> None:
    """Give the options and arguments of a verb that have a name of NAMES, or of NAMES after the verb's, their completion."""
    for parameter in command.params:
        names = NAMES.get(f"{command.name} {parameter.name}") or NAMES.get(parameter.name or "")
        if names:
            parameter.shell_complete = partial(_complete, names, parameter.name in LISTS)  # type: ignore[method-assign]


def _complete(names: Callable[[], Iterable[str]], is_list: bool, _context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Completes a name, or the last one of a list with commas; what is none (a path) the shell completes by its own means."""
    from click.shell_completion import CompletionItem

    head, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
    found = [CompletionItem(head + comma + name) for name in names() if name.startswith(last) and name not in head.split(",")]
    return found or [CompletionItem(incomplete, type="file")]


#: Parameters by their names in click.
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "compute": lambda: [*kernels(), *peers.names(), "auto"],
    **dict.fromkeys(("verify compute", "compile compute", "profile compute", "kernels", "source", "tune name"), kernels),
    "experiment name": sweeps,
    "peers": lambda: [*peers.names(), "none"],
    "dtype": lambda: DTYPE_BYTES,
    "mode": lambda: MODES,
    "device": lambda: ("auto", "cuda", "cpu"),
    "data": data_folders,
}
LISTS = ("compute", "peers")


def docstring(function: Callable[..., Any] | None) -> str | None:
    """A docstring where Python runs without them (-OO, PYTHONOPTIMIZE=2), from the source."""
    if sys.flags.optimize < 2 or not function:
        return None
    import ast
    import inspect

    with suppress(OSError, SyntaxError):
        (node,) = ast.parse(inspect.getsource(inspect.unwrap(function))).body
        return ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
    return None
