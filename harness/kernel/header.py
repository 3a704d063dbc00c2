"""The header of a kernel file: a TOML block in comments (the format of PEP 723), read without compiling, every key checked.

An unknown key, a missing key and a value of another type are a UsageFault that names file and line.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..fault import UsageFault, clipped
from ..problem import DTYPE_BYTES, READS, WRITES
from .expression import LANGUAGE, ExpressionError, names_of

#: A TOML table as tomllib reads it. Its values are checked by the tables of kinds below (REQUIRED and so on) before any use.
Table = dict[str, Any]

#: The arithmetic classes: how a kernel rounds, and so its baselines (harness/check/baselines.py).
ARITHMETIC = ("f32", "p16", "p8", "tf32")

#: A kernel's sizes, 32-bit integers: in fa::Args in this order. A plain launch may name them, the tensors and scale.
SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "causal_shift", "head_dim_v")
#: The most names of [tile] that fa::Args has room for (fa::Args::runtime).
MOST_RUNTIME = 4
#: How many workspaces, and named tensors after them, fa::Args holds.
MOST_SPACES = 8
_PLAIN = {*READS["backward"], *WRITES["backward"], *SIZES, "scale"}

_NAME = re.compile(r"[A-Za-z_]\w{0,127}", re.ASCII)
_ARCH = re.compile(r"(>=)?sm_\d{2,3}a?")


def _texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _expression(value: object) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _numbers(value: object) -> TypeGuard[list[int | str]]:
    return isinstance(value, list) and bool(value) and all(map(_expression, value))


def _named(value: object) -> TypeGuard[Table]:
    """A table whose keys can be macro names."""
    return isinstance(value, dict) and all(_NAME.fullmatch(key) for key in value)


def _rising(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int and v > 0 for v in value) and value == sorted(set(value))


def _arch(value: object) -> bool:
    rules = list(value.values()) if isinstance(value, dict) else [value]
    return all(isinstance(rule, str) and _ARCH.fullmatch(rule) for rule in rules)


Kind = tuple[Callable[[object], bool], str]
_FLAG: Kind = (lambda v: isinstance(v, bool), "true or false")
_FORMS: Kind = (lambda v: isinstance(v, bool) or v == "optional", 'true, false or "optional"')
_NUMBER: Kind = (_expression, "an integer or an expression")
_FORMS_OF_TILE: Kind = (lambda v: _expression(v) or _numbers(v), "an integer or an expression, or a list of them")
_SIZES: Kind = (lambda v: _expression(v) or (_numbers(v) and len(v) <= 3), "one to three sizes")

#: What each key of a header must be. Required keys first.
REQUIRED: dict[str, Kind] = {
    "title": (lambda v: isinstance(v, str), "a text"),
    "dtypes": (
        lambda v: _texts(v) and bool(v) and all(d in DTYPE_BYTES or d == "tf32" for d in v),
        f"a list of {', '.join(DTYPE_BYTES)}, tf32",
    ),
    "head_dims": (_rising, "a list of increasing positive integers"),
    "arch": (_arch, '">=sm_80", "sm_90a", or one of these by dtype'),
    "causal": _FLAG,
    "gqa": _FLAG,
    "cross": _FLAG,
    "logits": (lambda v: v == "any" or (type(v) in (int, float) and 0 <= float(str(v)) < math.inf), 'a number of at least 0, or "any"'),
    "deterministic": _FORMS,
    "launch": (lambda v: isinstance(v, list) and bool(v) and all(isinstance(x, dict) for x in v), "one or more [[launch]]"),
}
OPTIONAL: dict[str, Kind] = {
    "aliases": (_texts, "a list of names"),
    "arithmetic": (lambda v: v in ARITHMETIC, f"one of {', '.join(ARITHMETIC)}"),
    "auto": (lambda v: isinstance(v, bool) or _expression(v), "true, false or an expression"),
    "dtypes_kv": (lambda v: v == ["float8_e4m3"], '["float8_e4m3"]'),
    "head_dim_v": _FLAG,
    "float16_products": (lambda v: type(v) is int and v > 0, "an integer of at least 1"),
    "logsumexp_gradient": _FLAG,
    "mask": _FLAG,
    "paged": _FLAG,
    "runtime": (_texts, "a list of names of [tile]"),
    "score": _FLAG,
    "sinks": _FLAG,
    "spill_bytes_allowed": (lambda v: type(v) is int and v >= 0, "an integer of at least 0"),
    "variant_of": (lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v)), "a kernel's name"),
    "when": _NUMBER,
    "widest_v": (lambda v: type(v) is int and v > 0, "an integer of at least 1"),
    "window": _FLAG,
    "tile": (lambda v: _named(v) and all(_expression(x) for x in v.values()), "a table of NAME = number or expression"),
    "choice": (lambda v: isinstance(v, list) and bool(v) and all(isinstance(x, dict) for x in v), "one or more [[choice]]"),
    "let": (lambda v: _named(v) and all(_expression(x) for x in v.values()), "a table of NAME = number or expression"),
    "workspace": (lambda v: _named(v) and all(isinstance(x, dict) for x in v.values()), "a table of tables, [workspace.NAME]"),
    "tensor_map": (lambda v: _named(v) and all(isinstance(x, dict) for x in v.values()), "a table of tables, [tensor_map.NAME]"),
}
_LAUNCH_REQUIRED: dict[str, Kind] = {
    "entry": (lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v)), "a function's name"),
    "grid": _SIZES,
    "block": _NUMBER,
}
_LAUNCH_OPTIONAL: dict[str, Kind] = {
    "shared": _NUMBER,
    "when": _NUMBER,
    "args": (_texts, "a list of parameters"),
    "cluster": _SIZES,
    "overlaps": _NUMBER,
    "cooperative": _NUMBER,
    "maps": (_texts, "a list of names of [tensor_map.NAME]"),
}
_TENSOR_MAP_REQUIRED: dict[str, Kind] = {
    "tensor": (lambda v: isinstance(v, str), "a tensor or a workspace"),
    "box": (_numbers, "a list of sizes"),
}
_TENSOR_MAP_OPTIONAL: dict[str, Kind] = {
    "swizzle": _NUMBER,
    "dims": (_numbers, "a list of sizes"),
    "strides": (lambda v: v == [] or _numbers(v), "a list of sizes"),
}
_CHOICE_REQUIRED: dict[str, Kind] = {
    "evidence": (lambda v: isinstance(v, str) and bool(v.strip()), "a text: the measurement the row stands on, or that there is none"),
}
_NO_TILE = ("when", "evidence", "cost")
_WORKSPACE: dict[str, Kind] = {
    "dtype": (lambda v: isinstance(v, str) and v in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}"),
    "size": _NUMBER,
    "init": (lambda v: v in ("none", "zero", "zero_once"), "none, zero or zero_once"),
}


@dataclass(frozen=True)
class Launch:
    """One `[[launch]]` of a header; its sizes are expressions, not yet evaluated."""

    entry: str
    grid: tuple[int | str, ...]
    block: int | str
    shared: int | str = 0
    when: int | str = 1
    args: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    cluster: tuple[int | str, ...] = ()  # none: the launch has no clusters
    overlaps: int | str = 0  # whether it may begin before the launch before has ended
    cooperative: int | str = 0  # whether all its blocks run at once, and may meet (fa/grid.cuh)

    @classmethod
    def of(cls, item: Table, maps: Iterable[str] = ()) -> Launch:
        """From a table that was checked. maps: the header's tensor maps, all of which a launch of fa::Args takes by default."""
        grid, cluster = (size if isinstance(size, list) else [size] for size in (item["grid"], item.get("cluster", [])))
        args = tuple(item.get("args", ()))
        own = tuple(item.get("maps", () if args else maps))
        return cls(
            item["entry"],
            tuple(grid),
            item["block"],
            item.get("shared", 0),
            item.get("when", 1),
            args,
            own,
            tuple(cluster),
            item.get("overlaps", 0),
            item.get("cooperative", 0),
        )


#: So many combinations are told beside the one that was taken.
_TOLD = 5


@dataclass(frozen=True)
class Choice:
    """One `[[choice]]` of a header: where `when` holds it gives values to names of [tile]. evidence: the measurement it stands on.

    cost: in nanoseconds; of every combination of the values, which may be several for a name, the one that costs least is taken. weighed:
    of a row that was taken, each combination in words and its cost, the cheapest first; its `values` are those that were taken.
    """

    when: int | str
    values: tuple[tuple[str, int | str | tuple[int | str, ...]], ...]
    evidence: str
    cost: int | str | None = None
    weighed: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, item: Table) -> Choice:
        """From a table that was checked."""
        values = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in item.items() if name not in _NO_TILE)
        return cls(item.get("when", 1), values, item["evidence"], item.get("cost"))

    @property
    def name(self) -> str:
        """What tells it from the other rows of its file: of two alike the second is never taken."""
        return f"{', '.join(dict(self.values))} if {self.when}"

    @property
    def several(self) -> dict[str, tuple[int | str, ...]]:
        """The values that it may give to each name."""
        return {name: value if isinstance(value, tuple) else (value,) for name, value in self.values}

    @property
    def expressions(self) -> tuple[int | str, ...]:
        """All that decides what it gives."""
        texts = (text for some in self.several.values() for text in some)
        return (self.when, *texts, *(() if self.cost is None else (self.cost,)))

    def __str__(self) -> str:
        condition = "always" if self.when == 1 else f"when {self.when}"
        given = ", ".join(f"{name} = {value}" for name, value in self.values)
        if self.weighed:
            (_, least), *others = self.weighed
            given += f", {least / 1e3:.1f} us by its cost" + "".join(f"; {words} {cost / 1e3:.1f} us" for words, cost in others[:_TOLD])
            given += f"; {len(others) - _TOLD} more" if len(others) > _TOLD else ""
        return f"{condition}: {given} ({self.evidence})"


def read_header(path: Path) -> Table:
    """The checked header of a kernel file. Raises UsageFault naming file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(f"cannot read the kernel file {path}", str(error), "fa-cli list shows the kernels there are") from None
    lines = _block(path, text)
    if not lines:
        _not_closed(path, text)
        raise UsageFault(
            f"{path}:1: no kernel header",
            "a kernel file starts with a TOML block between `// /// kernel` and `// ///`",
            "fa-cli new NAME writes a file to start from",
        )
    try:
        head = tomllib.loads(lines.body)
    except (ValueError, RecursionError) as error:  # a ValueError is also an integer of more than 4300 digits
        raise _not_toml(lines, error) from None
    lines.integers(head)
    lacking = lines.check("", head, REQUIRED, OPTIONAL)
    for name, space in head.get("workspace", {}).items():
        lacking += lines.check(f"workspace.{name}", space, _WORKSPACE, {})
    for name, table in head.get("tensor_map", {}).items():
        lacking += lines.check(f"tensor_map.{name}", table, _TENSOR_MAP_REQUIRED, _TENSOR_MAP_OPTIONAL)
    _check_args(lines, head)
    for item in head.get("launch", ()):
        lacking += lines.check("launch", item, _LAUNCH_REQUIRED, _LAUNCH_OPTIONAL)
    if lacking:
        where = list(dict.fromkeys(place for _, place in lacking))
        names = [f"{', '.join(repr(key) for key, place in lacking if place == each)}{f' in {each}' * bool(each)}" for each in where]
        raise lines.bad(where[0], f"the header lacks the required key{'s' * (len(lacking) > 1)} {'; '.join(names)}")
    _check_choices(lines, head)
    _check_runtime(lines, head)
    if isinstance(head["arch"], dict) and (missing := [d for d in head["dtypes"] if d not in head["arch"]]):
        raise lines.bad("arch", f"arch has no rule for {', '.join(missing)}")
    maps, tensors = head.get("tensor_map", {}), {*READS["backward"], *WRITES["backward"], *head.get("workspace", {})}
    for name, table in maps.items():
        if table["tensor"] not in tensors:
            raise lines.bad("tensor", f"tensor_map.{name} is of {clipped(table['tensor'], 40)!r}; known: {', '.join(sorted(tensors))}")
    for item in head["launch"]:
        if "cluster" in item and (old := [rule for rule in _rules(head["arch"]) if int(re.sub(r"\D", "", rule)) < 90]):
            raise lines.bad("cluster", f"clusters of blocks need sm_90, and arch admits {old[0]}")
        if unknown := [name for name in item.get("maps", ()) if name not in maps]:
            raise lines.bad("maps", f"the header has no tensor_map.{clipped(unknown[0], 40)}")
    return head


def _check_choices(lines: _Lines, head: Table) -> None:
    """Raise UsageFault for a row of choice with an unknown name or a wrong expression, or without a value or evidence, at its own line."""
    tile = head.get("tile", {})
    if twice := [name for name in head.get("let", ()) if name in tile]:
        raise lines.bad(twice[0], f"{twice[0]} is in [tile] and in [let]")
    for place, item in enumerate(head.get("choice", ())):
        row = lines.of_row("choice", place)
        value = _FORMS_OF_TILE if "cost" in item else _NUMBER
        if row.check("choice", item, _CHOICE_REQUIRED, {"when": _NUMBER, "cost": _NUMBER, **dict.fromkeys(tile, value)}):
            raise row.bad("choice", "the header lacks the required key 'evidence' in choice")
        if not item.keys() & tile.keys():
            raise row.bad("choice", f"a choice gives a value to a name of [tile]: {', '.join(tile) or 'it has none'}")
        for key in item.keys() - {"evidence"}:
            try:
                for text in item[key] if isinstance(item[key], list) else [item[key]]:
                    names_of(text)
            except ExpressionError as error:
                raise row.bad(key, f"{key} in choice: {error}") from None


def _check_args(lines: _Lines, head: Table) -> None:
    """Raise UsageFault for the first unknown parameter of a launch, by its name. What is no table or list, `check` refuses."""
    launches, spaces = head.get("launch", ()), head.get("workspace", {})
    for item in launches if isinstance(launches, list) else ():
        given = item.get("args", ()) if isinstance(item, dict) else ()
        for name in given if _texts(given) else ():
            if name not in _PLAIN and name in spaces:
                why = f"only fa::Args reaches it, as args.workspace[WORKSPACE_{name.upper()}]"
                raise lines.bad("args", f"args in launch names {clipped(name, 40)!r}, a workspace: {why}, so leave args out")
            if name not in _PLAIN:
                raise lines.bad("args", f"args in launch names {clipped(name, 40)!r}; known: {', '.join(sorted(_PLAIN))}")


def _check_runtime(lines: _Lines, head: Table) -> None:
    """Raise UsageFault for a runtime value that is no name of [tile], and where fa::Args, which holds them, has no room or is not passed."""
    given, tile = head.get("runtime", []), head.get("tile", {})
    if unknown := [name for name in given if name not in tile]:
        raise lines.bad("runtime", f"runtime names {clipped(unknown[0], 40)!r}; [tile] has {', '.join(tile) or 'nothing'}")
    if len(given) > MOST_RUNTIME or len({*given}) < len(given):
        raise lines.bad("runtime", f"runtime is at most {MOST_RUNTIME} names, each once")
    if given and any("args" in item for item in head["launch"]):
        raise lines.bad("runtime", "runtime values are in fa::Args, and a launch with args is not passed it")


def _rules(arch: str | dict[str, str]) -> list[str]:
    return [arch] if isinstance(arch, str) else list(arch.values())


def _block(path: Path, text: str) -> _Lines | None:
    """The first block whose every line is a comment, from `// /// kernel` to `// ///`; None where there is none."""
    start, lines = -1, text.split("\n")
    for number, line in enumerate(lines):
        if start < 0:
            start = number if line.rstrip(" ") == "// /// kernel" else -1
        elif line.rstrip(" ") == "// ///":
            return _Lines(path, start + 2, "\n".join(each[2:].removeprefix(" ") for each in lines[start + 1 : number]))
        elif not line.startswith("//"):
            start = -1
    return None


def _not_closed(path: Path, text: str) -> None:
    """Raise UsageFault where a block begins and does not end, at the line that cannot be part of it."""
    lines = text.split("\n")
    if start := next((number for number, line in enumerate(lines, 1) if line.rstrip(" ") == "// /// kernel"), 0):
        end = next((number for number, line in enumerate(lines[start:], start + 1) if not line.startswith("//")), len(lines))
        raise bad(path, end, f"the header of line {start} is not closed: a line `// ///` ends it, before the first that is no comment")


def _not_toml(lines: _Lines, error: Exception) -> UsageFault:
    """The line that tomllib names, in the file, as it stands there; and how flags and texts are written, where it has neither."""
    said, at = str(error), re.search(r"\(at line (\d+), column \d+\)", str(error))
    number, every = int(at[1]) if at else 1, lines.body.split("\n")
    if "Unclosed array" in said:  # tomllib names the line after: that of the bracket is meant
        opened = (n for n in range(min(number, len(every)), 0, -1) if every[n - 1].count("[") > every[n - 1].count("]"))
        number = next(opened, number)
    source = clipped(every[number - 1].strip(), 80) if at and number <= len(every) else ""
    bare = re.fullmatch(r"(\w+)\s*=\s*([A-Za-z>][^\"'#\[\]{}]*?)\s*(?:#.*)?", source)
    flag = bare and {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(bare[2].lower(), bare[2].lower())
    wish = "" if not bare else f"; write {bare[1]} = {flag if flag in ('true', 'false') else json.dumps(bare[2])}"
    said = said.replace(f" {at[0]}", "") if at else said
    return bad(lines.path, lines.first + number - 1, f"the header is not TOML: {said}{f': {source}' if source else ''}{wish}")


def bad(path: Path, line: int, message: str) -> UsageFault:
    """A fault in a kernel file."""
    return UsageFault(f"{path}:{line}: {clipped(message)}", "", "kernels_cu/README.md lists the header's keys")


def wrong_expression(path: Path, error: ExpressionError) -> UsageFault:
    """A fault of an expression in a kernel file, at the line of the header that holds its text."""
    what, expression = error.what, error.expression
    lines = _block(path, path.read_text(encoding="utf-8-sig", errors="replace"))
    key, text = re.compile(rf"\b{what.split()[-1]}\b"), f'"{expression}"' if isinstance(expression, str) else str(expression)
    holding = [(number, each) for number, each in enumerate(lines.body.split("\n") if lines else ()) if text in each]
    number = next((number for number, each in holding if key.search(each)), holding[0][0] if holding else 0)
    place = f"{path}:{lines.first + number if lines else 1}"
    return UsageFault(f"{place}: {what}: {error}", f"a header expression has {LANGUAGE}", "see kernels_cu/README.md, Header")


@dataclass(frozen=True)
class _Lines:
    """A header's lines in its file, to find the line of a key."""

    path: Path
    first: int
    body: str

    def check(self, table: str, found: Table, required: dict[str, Kind], optional: dict[str, Kind]) -> list[tuple[str, str]]:
        """The required keys that a table lacks, with its name. Raises UsageFault for the first that is unknown or of another type."""
        kinds = required | optional
        where = f" in {table}" if table else ""
        for key, value in found.items():
            if key not in kinds:
                raise self.bad(key, f"unknown key {clipped(key, 40)!r}{where}; known: {', '.join(kinds)}")
            if not kinds[key][0](value):
                raise self.bad(key, f"{key}{where} must be {kinds[key][1]}; is {value!r:.100}")
        return [(key, table) for key in required if key not in found]

    def integers(self, value: object, key: str = "") -> None:
        """Raise UsageFault for an integer beyond the 64 bits of TOML, which no format of text need print."""
        if isinstance(value, dict):
            for name, each in value.items():
                self.integers(each, name)
        elif isinstance(value, list):
            for each in value:
                self.integers(each, key)
        elif type(value) is int and not -(2**63) <= value < 2**63:
            raise self.bad(key, f"{clipped(key, 40)} has an integer beyond 64 bits")

    def of_row(self, table: str, place: int) -> _Lines:
        """The lines from the [[table]] of that place on; all where tables are written in another way."""
        starts = [found.start() for found in re.finditer(rf"^\[\[{table}\]\]", self.body, re.M)]
        if place >= len(starts):
            return self
        return _Lines(self.path, self.first + self.body.count("\n", 0, starts[place]), self.body[starts[place] :])

    def bad(self, key: str, message: str) -> UsageFault:
        """A fault at the line of a key or a table of that name."""
        name = re.escape(key)
        found = re.search(rf"^\s*(?:{name}\s*=|\[+{name}\]+)", self.body, re.M) if key else None
        return bad(self.path, self.first + (self.body.count("\n", 0, found.end()) if found else 0), message)
