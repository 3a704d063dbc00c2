"""The names of a header's expressions, with their values for a problem: [tile] by the rows of [[choice]] that hold, and [let]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..fault import UsageFault
from .expression import ExpressionError, evaluate, names_of
from .header import Choice, wrong_expression
from .kernel import Kernel

#: A part of an expression may be negative where the whole is not: max(32, rows).
_LEAST = -(2**63)


class Names(dict[str, int]):
    """Names of the expressions in one kernel file's header, with their values."""

    def __init__(self, path: Path, values: Mapping[str, int]) -> None:
        """path: of the kernel file, which faults name."""
        super().__init__(values)
        self.path = path

    def number(self, expression: int | str, what: str, least: int = 0) -> int:
        """The value of an expression, at least `least`; what: where it stands, the key last. Raises UsageFault with file and line."""
        try:
            value = evaluate(expression, self)
            if value < least:
                raise ExpressionError(f"{expression!r} is {value}, less than {least}")
            return value
        except ExpressionError as error:
            raise wrong_expression(self.path, what, expression, error) from None


def choose(kernel: Kernel, names: Names, given: Mapping[str, int]) -> tuple[Choice, ...]:
    """Add to `names` every name of [tile], in its order, and of [let], each as soon as what it names is known. Returns the rows taken.

    A tile has its value of `given`; else of the first row that gives it and holds; else of [tile]. A row's `when` is evaluated when a
    tile's turn comes, so it may name the tiles above. Raises UsageFault for a name that is taken, and a wrong expression, with its line.
    """
    _refuse_taken(kernel, names)
    taken: dict[Choice, None] = {}
    waiting = dict(kernel.let)
    _settle(waiting, names)
    for name, value in kernel.tile.items():
        if name in given:
            names[name] = given[name]
        elif row := next((c for c in kernel.choices if name in dict(c.values) and names.number(c.when, "when")), None):
            names[name] = names.number(dict(row.values)[name], f"choice {name}")
            taken[row] = None
        else:
            names[name] = names.number(value, f"tile {name}")
        _settle(waiting, names)
    for name, value in waiting.items():  # what is left names something unknown
        names[name] = names.number(value, f"let {name}", _LEAST)
    return tuple(row for row in kernel.choices if row in taken)


def _settle(waiting: dict[str, int | str], names: Names) -> None:
    """Move to `names` what waits for nothing any more."""
    while ready := [name for name, value in waiting.items() if _named(names.path, name, value) <= names.keys()]:
        for name in ready:
            names[name] = names.number(waiting.pop(name), f"let {name}", _LEAST)


def _named(path: Path, name: str, value: int | str) -> frozenset[str]:
    try:
        return names_of(value)
    except ExpressionError as error:
        raise wrong_expression(path, f"let {name}", value, error) from None


def _refuse_taken(kernel: Kernel, names: Names) -> None:
    """Raise UsageFault where [tile] or [let] has a name that the harness gives a value."""
    taken = {*names, "DTYPE", "CAUSAL", "DETERMINISTIC", *(f"WORKSPACE_{space.upper()}" for space in kernel.workspace)}
    for table, own in (("tile", kernel.tile), ("let", kernel.let)):
        if name := next((name for name in own if name in taken), None):
            what = f"{kernel.path}: {table} {name} is taken"
            raise UsageFault(what, "the harness gives that name a value", f"choose another name in [{table}]")
