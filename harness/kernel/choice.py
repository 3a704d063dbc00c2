"""What a header chooses for a problem: the values of its [tile], by the rows of [[choice]] that hold, and the names of [let]."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..fault import UsageFault
from .expression import ExpressionError, evaluate, names_of
from .header import Table, wrong_expression

#: A part of an expression may be negative where the whole is not: max(32, rows).
_LEAST = -(2**63)


@dataclass(frozen=True)
class Choice:
    """One `[[choice]]` of a header: where `when` holds it gives values to names of [tile]. evidence: the measurement it stands on."""

    when: int | str
    values: tuple[tuple[str, int | str], ...]
    evidence: str

    @classmethod
    def of(cls, item: Table) -> Choice:
        """From a table that was checked."""
        values = tuple((name, value) for name, value in item.items() if name not in ("when", "evidence"))
        return cls(item.get("when", 1), values, item["evidence"])

    @property
    def name(self) -> str:
        """What tells it from the other rows of its file: of two alike the second is never taken."""
        return f"{', '.join(dict(self.values))} if {self.when}"

    def __str__(self) -> str:
        condition = "always" if self.when == 1 else f"when {self.when}"
        return f"{condition}: {', '.join(f'{name} = {value}' for name, value in self.values)} ({self.evidence})"


def choose(
    path: Path,
    tile: Mapping[str, int | str],
    choices: Sequence[Choice],
    let: Mapping[str, int | str],
    names: dict[str, int],
    given: Mapping[str, int],
) -> tuple[Choice, ...]:
    """Add to `names` every name of [tile], in its order, and of [let], each as soon as what it names is known. Returns the rows taken.

    A tile has its value of `given`; else of the first row that gives it and holds; else of [tile]. A row's `when` is evaluated when a
    tile's turn comes, so it may name the tiles above. Raises UsageFault for a wrong expression, with its line.
    """
    taken: dict[Choice, None] = {}
    waiting = dict(let)
    _settle(path, waiting, names)
    for name, value in tile.items():
        if name in given:
            names[name] = given[name]
        elif row := next((c for c in choices if name in dict(c.values) and number(path, c.when, names, "when")), None):
            names[name] = number(path, dict(row.values)[name], names, f"choice {name}")
            taken[row] = None
        else:
            names[name] = number(path, value, names, f"tile {name}")
        _settle(path, waiting, names)
    for name, value in waiting.items():  # what is left names something unknown
        names[name] = number(path, value, names, f"let {name}", _LEAST)
    return tuple(row for row in choices if row in taken)


def _settle(path: Path, waiting: dict[str, int | str], names: dict[str, int]) -> None:
    """Move to `names` what waits for nothing any more."""
    while ready := [name for name, value in waiting.items() if _named(path, name, value) <= names.keys()]:
        for name in ready:
            names[name] = number(path, waiting.pop(name), names, f"let {name}", _LEAST)


def _named(path: Path, name: str, value: int | str) -> frozenset[str]:
    try:
        return names_of(value)
    except ExpressionError as error:
        raise wrong_expression(path, f"let {name}", value, error) from None


def number(path: Path, expression: int | str, names: Mapping[str, int], what: str, least: int = 0) -> int:
    """The value of a header's expression, at least `least`; what: where it stands, the key last. Raises UsageFault with file and line."""
    try:
        value = evaluate(expression, names)
        if value < least:
            raise ExpressionError(f"{expression!r} is {value}, less than {least}")
        return value
    except ExpressionError as error:
        raise wrong_expression(path, what, expression, error) from None


def refuse_taken(path: Path, taken: Collection[str], **tables: Mapping[str, object]) -> None:
    """Raise UsageFault where a table of the header has a name that the harness gives a value."""
    for table, names in tables.items():
        if name := next((name for name in names if name in taken), None):
            what = f"{path}: {table} {name} is taken"
            raise UsageFault(what, "the harness gives that name a value", f"choose another name in [{table}]")
