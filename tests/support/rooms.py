"""The rooms of harness in their order, and which of them import which, read from the sources."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.glob("harness/**/*.py")}

#: The nine floors, the highest first, and the rooms on each: a folder of harness, or one file. An import goes only to a lower floor.
FLOORS = (
    ("terminal",),
    ("verbs",),
    ("ring", "torch_op"),
    ("check",),
    ("report", "measure"),
    ("peers", "backends"),
    ("row", "dataset", "kernel", "partition"),
    ("problem", "files"),
    ("fault", "formula", "array", "doors"),
)
ROOMS = tuple(name for floor in FLOORS for name in floor)
INNER = sorted(name.removeprefix("harness.") for name in MODULES if name != "harness.__init__")


def room(module: str) -> str:
    """The room a dotted name below harness is in; that of `harness` itself is empty."""
    return module.split(".")[0]


def floor(name: str) -> int:
    """The number of a room's floor, counted from the top."""
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


@functools.cache  # each of a dozen tests asks it of all files
def imports(path: Path, typing_too: bool = False) -> frozenset[str]:
    """What a file imports: outside packages by their first name, our own as `.module`, also inside functions.

    TYPE_CHECKING blocks count with typing_too.
    """
    package = path.relative_to(ROOT / "harness").parent.parts if path.is_relative_to(ROOT / "harness") else ()
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not typing_too:
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name.split(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                found.add((child.module or "").split(".")[0])
            elif isinstance(child, ast.ImportFrom):
                base = [*package[: len(package) - child.level + 1], *(child.module.split(".") if child.module else ())]
                for alias in child.names:
                    whole = ".".join([*base, alias.name])
                    is_module = {f"harness.{whole}", f"harness.{whole}.__init__"} & MODULES.keys()
                    found.add("." + (whole if is_module else ".".join(base)))
            visit(child)

    visit(ast.parse(path.read_text()))
    return frozenset(found)


def ours(module: str) -> set[str]:
    """The modules below harness that one of them imports, TYPE_CHECKING counted, itself and empty faces left out."""
    found = {item[1:] for item in imports(MODULES[f"harness.{module}"], typing_too=True) if item.startswith(".") and item != "."}
    return {f"{name}.__init__" if f"harness.{name}" not in MODULES else name for name in found} - {module}


def arrows() -> dict[str, set[str]]:
    """Each room with the rooms below it that its modules import."""
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module in INNER:
        found[room(module)] |= {room(other) for other in ours(module)} - {room(module)}
    return found


def direct(found: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no chain of other arrows implies, in the order of the rooms."""

    def reach(start: str) -> set[str]:
        return found[start].union(*(reach(below) for below in found[start]))

    return [(a, b) for a in ROOMS for b in ROOMS if b in found[a] and not any(b in reach(other) for other in found[a] - {b})]
