"""What is read: regular files of an exact size, JSON objects with their keys checked, and whether another user may change them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..fault import DataFault

if TYPE_CHECKING:
    from ..array import Bytes

S = TypeVar("S")
T = TypeVar("T")

#: Bytes of the largest JSON record; a larger file is refused unread. Its objects and lists are nested no deeper than JSON_DEPTH.
JSON_LIMIT, JSON_DEPTH = 1 << 20, 16
#: Bytes of the largest table (results.csv, samples.jsonl) that is read.
TABLE_LIMIT = 1 << 31
#: Bytes from which on threads share the work on several files (:func:`each`).
MANY = 1 << 24
#: A JSON object as json reads it. :func:`read_json` checks the keys that it is told of.
Json = dict[str, Any]
#: What the value of a key must be: the test, and the words for a message.
Kind = tuple[Callable[[object], bool], str]
TEXT: Kind = (lambda v: isinstance(v, str), "a text")
WHOLE: Kind = (lambda v: type(v) is int, "an integer")
TEXTS: Kind = (lambda v: isinstance(v, dict) and all(isinstance(value, str) for value in v.values()), "an object of texts")
OBJECTS: Kind = (lambda v: isinstance(v, dict) and all(isinstance(value, dict) for value in v.values()), "an object of objects")


def or_null(kind: Kind) -> Kind:
    """The kind, or null."""
    return (lambda v: v is None or kind[0](v)), f"{kind[1]} or null"


def open_regular(path: Path, hint: str = "") -> int:
    """A descriptor to read a regular file by (links are followed; a FIFO does not block). Raises DataFault as :func:`read_exact` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DataFault(f"{path} is missing", "there is no such file", hint) from None
    except (OSError, ValueError) as error:
        raise DataFault(
            f"{path} cannot be read", getattr(error, "strerror", None) or str(error), "check the file and its permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataFault(f"{path} is not a regular file", "it is a folder, a pipe or a device", hint)
    return descriptor


def read_exact(path: Path, size: int | None = None, hint: str = "", limit: int = JSON_LIMIT) -> Bytes:
    """The bytes of a regular file (links are followed). size: the bytes it must have; None takes files of up to `limit` bytes.

    Raises DataFault where it is missing, cannot be read, is not a regular file (a FIFO does not block) or has another size.
    """
    import numpy as np  # here, since `fa-cli list` reads texts only and starts without it

    data = np.empty(0, np.uint8)

    def room(count: int) -> memoryview:
        nonlocal data
        data = np.empty(count, np.uint8)
        return memoryview(data.data)

    _read(path, size, hint, limit, room)
    return data


def read_text(path: Path, hint: str = "", limit: int = TABLE_LIMIT) -> str:
    """The text of a regular file. Raises DataFault as :func:`read_exact` does, and where it is not UTF-8.

    A byte order mark, which some editors write, is no part of it."""
    data = bytearray()

    def room(count: int) -> memoryview:
        data.extend(bytes(count))
        return memoryview(data)

    _read(path, None, hint, limit, room)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFault(f"{path} cannot be read", str(error), hint) from None


def _read(path: Path, size: int | None, hint: str, limit: int, room: Callable[[int], memoryview]) -> None:
    """Read a file into the memory that room gives for its size. Raises as :func:`read_exact` does."""
    descriptor = open_regular(path, hint)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if size is None and status.st_size > limit:
            raise DataFault(f"{path} is too large to be a record", f"{status.st_size} bytes; at most {limit} are read", hint)
        if size is not None and status.st_size != size:
            how = "empty" if not status.st_size else "too short" if status.st_size < size else "too long"
            raise DataFault(f"{path} is {how}", f"it has {status.st_size} bytes, its shape and dtype need {size}", hint)
        view, done = room(status.st_size), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise DataFault(f"{path} became shorter while it was read", f"{done} of {len(view)} bytes came", hint)
            done += count


def read_json(path: Path, hint: str = "", required: Mapping[str, Kind] | None = None, optional: Mapping[str, Kind] | None = None) -> Json:
    """A JSON object from a file, with its keys checked: those required are there, and these and the optional ones are of their kinds.

    Other keys are kept as they are. Raises DataFault as :func:`read_exact` does, where it is not a JSON object (:func:`parse_json`), and
    for the first key that is missing or not of its kind.
    """
    data = read_exact(path, hint=hint)
    try:
        return parse_json(data.tobytes(), required or {}, optional or {})
    except ValueError as error:
        raise DataFault(f"{path} {error}", "it was damaged, or fa-cli did not write it", hint) from None


def parse_json(data: bytes, required: Mapping[str, Kind], optional: Mapping[str, Kind]) -> Json:
    """A JSON object, checked as :func:`read_json` says. Raises ValueError where it is none, and for what our writers never write.

    These are NaN, numbers beyond 64 bits, nesting deeper than JSON_DEPTH, and text that UTF-8 cannot hold.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        record = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"is not a JSON object: it holds a {type(record).__name__}")
    level: list[object] = [record]
    for _ in range(JSON_DEPTH):
        inner = [
            part for value in level if isinstance(value, (dict, list)) for part in (value.items() if isinstance(value, dict) else value)
        ]
        level = [part for value in inner for part in (value if isinstance(value, tuple) else (value,))]
        if wrong := next((value for value in level if not _writable(value)), None):
            raise ValueError(f"holds {wrong!r:.60}, which fa-cli does not write")
    if level:
        raise ValueError(f"is nested deeper than {JSON_DEPTH} levels")
    for key in (*required, *(key for key in optional if key in record)):
        is_kind, words = {**optional, **required}[key]
        if key not in record:
            raise ValueError(f"lacks {key!r}: {words}")
        if not is_kind(record[key]):
            raise ValueError(f"has {record[key]!r:.60} for {key!r}, which is {words}")
    return record


def _writable(value: object) -> bool:
    """Whether a value of a JSON document is one that json_bytes could have written and everything else can use."""
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def json_bytes(record: Mapping[str, object]) -> bytes:
    """A record as indented JSON. Raises ValueError for NaN and infinity, which JSON does not have (write None)."""
    return (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()


def sha256(data: bytes | memoryview) -> str:
    """The SHA-256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def each(work: Callable[[S], T], items: Iterable[S], size: int) -> list[T]:
    """work(item) of each item; where all have MANY bytes together, at once: reading, hashing and writing release the interpreter lock."""
    if size < MANY:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


# -- who may write ----------------------------------------------------------------------------------------------------


def exposed(about: os.stat_result) -> str:
    """How a file or folder could be changed by another user (root aside): its owner, or its permissions; empty where it cannot."""
    if about.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {about.st_uid}"
    return f"its mode {stat.S_IMODE(about.st_mode):04o} lets others write" if about.st_mode & 0o022 else ""


def replaceable(folder: Path) -> tuple[Path, str] | None:
    """The folder above one in which others may put another in its place, and why; None where nobody may."""
    for above in folder.resolve().parents:
        mode = above.stat().st_mode if above.exists() else 0
        if mode & 0o002 and not mode & stat.S_ISVTX:
            return above, f"its mode {stat.S_IMODE(mode):04o} lets others replace {folder}"
    return None


def private_again(path: Path, folder: Path, variable: str) -> str:
    """What helps where a path in a folder of code, or one above it, is exposed. chmod is for its owner and root alone."""
    elsewhere = f"a folder of yours: export {variable}=$HOME/.cache/fa-cli-own"
    owner = path.lstat().st_uid
    if path != folder and folder.resolve().is_relative_to(path.resolve()):
        return f"chmod o-w {shlex.quote(str(path))}, or {elsewhere}" if os.geteuid() in (0, owner) else elsewhere
    if owner not in (0, os.geteuid()):
        return elsewhere
    return f"if that was you: chmod -R go-w {shlex.quote(str(folder))}; else rm -r {shlex.quote(str(folder))}, or {elsewhere}"
