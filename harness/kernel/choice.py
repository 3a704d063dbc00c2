"""What a header chooses for a problem: the values of its [tile], first those of the rows of [[choice]] that hold, and the names of [let]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..fault import UsageFault
from .expression import ExpressionError, evaluate, names_of
from .header import Table, wrong_expression


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

    A tile has its value of `given`; else of the first row that gives it and holds; else of [tile]. A row is asked when its turn comes for a
    tile, so it may name the tiles above. Raises UsageFault for a wrong expression, with its line.
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
        names[name] = number(path, value, names, f"let {name}")
    return tuple(row for row in choices if row in taken)


def _settle(path: Path, waiting: dict[str, int | str], names: dict[str, int]) -> None:
    """Move to `names` what waits for nothing any more."""
    while ready := [name for name, value in waiting.items() if _named(path, name, value) <= names.keys()]:
        for name in ready:
            names[name] = number(path, waiting.pop(name), names, f"let {name}")


def _named(path: Path, name: str, value: int | str) -> frozenset[str]:
    try:
        return names_of(value)
    except ExpressionError as error:
        raise wrong_expression(path, f"let {name}", value, error) from None


def number(path: Path, expression: int | str, names: Mapping[str, int], what: str) -> int:
    """The value of a header's expression, at least 0; what: where it stands, the key last. Raises UsageFault with file and line."""
    try:
        value = evaluate(expression, names)
        if value < 0:
            raise ExpressionError(f"{expression!r} is {value}, less than 0")
        return value
    except ExpressionError as error:
        raise wrong_expression(path, what, expression, error) from None


def refuse_taken(path: Path, taken: Mapping[str, object], **tables: Mapping[str, object]) -> None:
    """Raise UsageFault where a table has a name that the harness gives a value."""
    for table, names in tables.items():
        if name := next((name for name in names if name in taken), None):
            raise UsageFault(f"{path}: {table} {name} is taken", "the harness gives that name a value", f"choose another name in [{table}]")
