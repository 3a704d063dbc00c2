"""Damaged files for every reader: a good file, seeded mutations of its bytes and of its tree, a command that reads it, and a verdict.

A case passes where the command ends within SECONDS with an exit code that it may have, and with no word of an internal error. The tests
run a few cases a reader, experiments/trust/fuzz_readers.py 500.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from click.testing import CliRunner
from rows import append_row, row

from harness import files
from harness.backends.host import build
from harness.backends.host.backend import Host
from harness.fault import Fault
from harness.files import environment
from harness.kernel import Kernel, find, planner
from harness.problem import Problem
from harness.terminal import errors

SECONDS = 30
DEEP = "@deep@"  # nested deeper than any writer nests
#: What stands in the place of a value.
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    16.0,
    5e-324,
    1e308,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    10**30,
    10**400,
    "",
    "x",
    "é",
]
VALUES += [
    "$x_{$",
    r"\$\frac",
    "a\0b",
    "../../../x",
    "=1+1",
    "\x1b[2J",
    "a" * 200_000,
    [],
    {},
    [[]],
    [1, "a", None],
    {"a": {"b": []}},
    DEEP,
]
WORDS = [
    "",
    "nan",
    "-inf",
    "1e400",
    "-1",
    "0",
    "1.5",
    "9" * 30,
    "9" * 5000,
    "true",
    "FOR",
    "x" * 140_000,
    "$x_{$",
    '"',
    "a\0b",
    "../../../x",
    "🦆",
]
Random = random.Random


@dataclass(frozen=True)
class Reader:
    """A file that is read: `good` makes the folder, `target` is damaged by `damage`, `read` gives an exit code and what was said."""

    target: str
    good: Callable[[Path], None]
    damage: Callable[[bytes, Random], bytes]
    read: Callable[[Path, int], tuple[int, str]]
    codes: tuple[int, ...]


# -- mutations ----------------------------------------------------------------------------------------------------------


def of_bytes(data: bytes, rng: Random) -> bytes:
    """A cut, flipped, inserted, removed, doubled or recoded piece."""
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[to:],
        lambda: data[:to] + data[at:],
        lambda: data[:at] + rng.randbytes(rng.randint(1, 40)) + data[at:],
        lambda: data[:at] + b"\0" * rng.randint(1, 4000) + data[at:],
        lambda: bytes(b ^ (1 << rng.randrange(8)) if rng.random() < 3 / len(data) else b for b in data),
        lambda: data.decode().encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data[:at] + "ÿ".encode("latin-1") + data[at:],
        lambda: data[:at] + b"[" * 50_000 + data[at:],
        lambda: data.replace(b"\n", b"\r"),
        lambda: b"",
    ]
    return rng.choice(ways)()


def of_tree(tree: Any, rng: Random) -> Any:
    """A copy of a JSON or TOML tree in which one to three keys or values are others."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        level = [tree]
        while level:
            found = [(each, key) for each in level for key in (each if isinstance(each, dict) else range(len(each)))]
            places += found
            level = [each[key] for each, key in found if isinstance(each[key], (dict, list))]
        if not places:
            return tree
        holder, key = rng.choice(places)
        if isinstance(holder, dict) and rng.random() < 0.2:
            value = holder.pop(key)
            if rng.random() < 0.5:
                holder[rng.choice(["x", "", "$x_{$", str(key).upper()])] = value
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def json_text(tree: Any) -> bytes:
    """JSON, with the words and depths that JSON allows and Python's module would not write."""
    return json.dumps(tree).replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000).encode()


def toml_value(value: Any) -> str:
    """A TOML value on one line; None is no TOML."""
    if value == DEEP:
        return "[" * 3000 + "]" * 3000
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(10**400)[:400] if value == 10**400 else repr(value)
    if isinstance(value, str):
        return json.dumps(value).replace("\\u0000", "\\u0001")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(each)}" for key, each in value.items()) + "}"


def toml_text(tree: Any) -> bytes:
    """TOML, a line a key."""
    return "".join(f"{json.dumps(key)} = {toml_value(value)}\n" for key, value in tree.items()).encode()


def json_file(data: bytes, rng: Random) -> bytes:
    """A JSON object, or the lines of a file of them, one of which is damaged."""
    if rng.random() < 0.4:
        return of_bytes(data, rng)
    lines = [data] if data.startswith(b"{\n") else data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_text(of_tree(json.loads(lines[at]), rng))
    return b"\n".join(lines) + b"\n"


def toml_file(data: bytes, rng: Random) -> bytes:
    """A sweep."""
    return of_bytes(data, rng) if rng.random() < 0.3 else toml_text(of_tree(tomllib.loads(data.decode()), rng))


def csv_file(data: bytes, rng: Random) -> bytes:
    """A table: cells replaced, removed and added, also in the header."""
    if rng.random() < 0.3:
        return of_bytes(data, rng)
    lines = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(rng.randint(1, 3)):
        cells = rng.choice(lines[1:] if rng.random() < 0.9 else lines)
        at = rng.randrange(len(cells))
        cells[at : at + (rng.random() < 0.95)] = [rng.choice(WORDS)] * (rng.random() < 0.95)
    return "\n".join(map(",".join, lines)).encode() + b"\n"


def header(data: bytes, rng: Random) -> bytes:
    """A kernel whose header is damaged; the code stays."""
    block, end, code = data.partition(b"// ///\n")
    if rng.random() < 0.4:
        return of_bytes(block, rng) + end + code
    lines = block.decode().splitlines()
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(1, len(lines))
        key, equals, _ = lines[at].partition(" = ")
        lines[at] = (
            key + equals + toml_value(rng.choice(VALUES)) if equals and rng.random() < 0.8 else rng.choice(["", lines[at] * 2, "// x"])
        )
    return "\n".join(lines).encode() + b"\n" + end + code


# -- readers ------------------------------------------------------------------------------------------------------------

SHAPE = ("--batch", "1", "--heads", "1", "--seq", "4", "--dim", "4")
DATA = Path("data/B1_H1_S4_D4")
SWEEP = """\
title = "a sweep"
mode = "forward"
kernels = ["naive", "fa2"]
peers = ["numpy"]
ceilings = false
deterministic = true
cpu = { shapes = [{ batch = 1, heads = 1, seq = 8, dim = 16 }] }
[[shapes]]
test = "a"
batch = 1
heads = [2, 4]
heads_kv = 2
seq = [8, 16]
dim = 16
dtype = "float32"
causal = [true, false]
scale = 0.5
[[shapes]]
tokens = 32
seq = 8
dim = 16
kernels = "naive"
"""


def fa_cli(*words: object) -> tuple[int, str]:
    """The command line in this process: exit code, and stderr; what escapes it is said as a traceback."""
    import cli

    done = CliRunner().invoke(cli.main, [str(word) for word in words], env={"FA_CLI_DEVICE": "cpu"})
    escaped = done.exception if not isinstance(done.exception, SystemExit) else None
    return done.exit_code, done.stderr + (f"Traceback: {escaped!r}" if escaped else "")


def make_data(folder: Path) -> None:
    """A data folder with the outputs of a forward pass."""
    assert fa_cli("gen-data", *SHAPE)[0] == 0
    assert fa_cli("run", "--compute", "numpy", "--data", DATA)[0] == 0


def make_run(folder: Path) -> None:
    """Two folders of an experiment."""
    for name in ("a", "b"):
        for test in ("S128", "S256"):
            rows = [row(kernel, test, ms) for kernel, ms in (("fa2", 1.0), ("naive", 3.0), ("mine", None))]
            for each in rows:
                append_row(folder / name / "results.csv", each)
            records = [{n: getattr(r, n) for n in ("run_id", *_key())} | {"samples_ms": [1.0, 1.1, 1.2] * 3, "turns": [3, 6]} for r in rows]
            files.append_files(folder / name, {"samples.jsonl": "".join(json.dumps(record) + "\n" for record in records).encode()})
        facts = {"run_id": "20261120T184550Z-ab12", "device_name": "NVIDIA H200", "earlier": {"x": {"git_commit": "abc"}}}
        environment.write_env(folder / name / "env.json", environment.environment(**facts))


def _key() -> tuple[str, ...]:
    from harness.report.views import KEY

    return KEY


def make_cache(folder: Path) -> None:
    """A cache with the engine and a kernel."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    _load(folder)
    note = max((folder / "cache/host").rglob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    shutil.copy(note.with_suffix(".so"), folder / "built.so")
    (folder / "c++").write_text(f'#!/bin/sh\nfor out; do :; done\ncp "{folder}/built.so" "$out"\n')  # a compiler in no time
    (folder / "c++").chmod(0o755)
    (folder / "note.json").symlink_to(note)


def _load(folder: Path) -> None:
    build._open.clear()
    with mock.patch.dict("os.environ", {"FA_CLI_CACHE_DIR": str(folder / "cache")}):
        Host().load(find("naive", "forward"), Problem.of(1, 1, 4, 4))


def read_cache(folder: Path, _number: int) -> tuple[int, str]:
    """Load a kernel from the cache, or build it again."""
    toolchain = build._toolchain()
    with mock.patch.object(build, "compiler", lambda: (str(folder / "c++"),)), mock.patch.object(build, "_toolchain", lambda: toolchain):
        return _said(lambda: _load(folder))


def read_header(folder: Path, _number: int) -> tuple[int, str]:
    """Read a kernel's file and plan its launches."""
    device = Host().device()
    return _said(lambda: planner.plan(Kernel.read(folder / "mine_forward.cu"), Problem.of(1, 2, 8, 16, causal=True), device))


def _said(act: Callable[[], object]) -> tuple[int, str]:
    try:
        act()
    except Fault as fault:
        return fault.exit_code, errors.shown(str(fault))
    except Exception as error:
        return 1, f"internal error: {error!r}"
    return 0, ""


def compare_or_report(folder: Path, number: int) -> tuple[int, str]:
    """compare; of 50 cases one is drawn too, which takes seconds."""
    code, told = fa_cli("compare", "a", "b")
    if number % 50 != 49:
        return code, told
    drawn, more = fa_cli("report", "b", "--output-dir", "drawn", "--title", "$x_{$")
    return max(code, drawn), told + more


RUN_CODES = (0, 2, 3)
READERS: dict[str, Reader] = {
    "meta.json": Reader(f"{DATA}/meta.json", make_data, json_file, lambda f, n: fa_cli("gen-data", *SHAPE), (0, 3)),
    "outputs.json": Reader(
        f"{DATA}/outputs.json",
        make_data,
        json_file,
        lambda f, n: fa_cli("run", "--compute", "numpy", "--mode", "backward", "--data", DATA),
        (0, 3),
    ),
    "env.json": Reader("b/env.json", make_run, json_file, compare_or_report, (0, 3)),
    "results.csv": Reader("b/results.csv", make_run, csv_file, compare_or_report, RUN_CODES),
    "samples.jsonl": Reader("b/samples.jsonl", make_run, json_file, compare_or_report, (0, 3)),
    "sweep.toml": Reader(
        "mine.toml",
        lambda folder: (folder / "mine.toml").write_text(SWEEP) and None,
        toml_file,
        lambda f, n: fa_cli("experiment", "mine.toml", "--dry-run"),
        RUN_CODES,
    ),
    "kernel header": Reader(
        "mine_forward.cu",
        lambda folder: shutil.copy(find("fa2", "forward").path, folder / "mine_forward.cu") and None,
        header,
        read_header,
        (0, 2),
    ),
    "cache note": Reader("note.json", make_cache, json_file, read_cache, (0, 5, 6)),
}


def cases(name: str, folder: Path, count: int, seed: str) -> Iterator[tuple[int, str]]:
    """Run cases of a reader in a folder, which is the current one: each failed case's number and why."""
    reader = READERS[name]
    reader.good(folder)
    kept = (folder / reader.target).resolve()
    good = kept.read_bytes()
    code, told = reader.read(folder, 0)
    assert code == 0, told
    for number in range(count):
        kept.write_bytes(reader.damage(good, random.Random(f"{seed} {name} {number}")))
        try:
            with _limit():
                code, told = reader.read(folder, number)
        except _Late:
            code, told = -1, f"took longer than {SECONDS} s"
        if code not in reader.codes or "internal error" in told or "Traceback" in told or len(told) > 10_000:
            yield number, f"exit code {code}: {told[:400]}"


class _Late(BaseException):
    """No Exception, which a command would explain."""


@contextmanager
def _limit() -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
