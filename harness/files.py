"""Reading and writing files such that neither a damaged file nor a full disk is taken for data.

A read takes a regular file of exactly the size expected. A write goes to a temporary name in the same folder, then fsync, a check of
the size, and rename; several files are all staged before the first is renamed. numpy's tofile and fromfile do none of this.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .array import Bytes
from .fault import DataFault, DiskFault

#: Bytes of the largest JSON record; a larger file is refused unread. Its objects and lists are nested no deeper than JSON_DEPTH.
JSON_LIMIT, JSON_DEPTH = 1 << 20, 16

#: How long a run waits for programs that only read its folder, under a shared lock.
READERS_SECONDS = 10.0

#: A JSON object as json reads it. :func:`read_json` checks the keys that it is told of.
Json = dict[str, Any]
#: What the value of a key must be: the test, and the words for a message.
Kind = tuple[Callable[[object], bool], str]
TEXT: Kind = (lambda v: isinstance(v, str), "a text")
WHOLE: Kind = (lambda v: type(v) is int, "an integer")
TEXTS: Kind = (lambda v: isinstance(v, dict) and all(isinstance(each, str) for each in v.values()), "an object of texts")
OBJECTS: Kind = (lambda v: isinstance(v, dict) and all(isinstance(each, dict) for each in v.values()), "an object of objects")


def or_null(kind: Kind) -> Kind:
    """The kind, or null."""
    return (lambda v: v is None or kind[0](v)), f"{kind[1]} or null"


def read_exact(path: Path, size: int | None = None, hint: str = "") -> Bytes:
    """The bytes of a regular file (links are followed). size: the bytes it must have; None takes files of up to JSON_LIMIT bytes.

    Raises DataFault where it is missing, cannot be read, is not a regular file (a FIFO does not block) or has another size.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DataFault(f"{path} is missing", "there is no such file", hint) from None
    except OSError as error:
        raise DataFault(f"{path} cannot be read", error.strerror or str(error), "check the file and its permissions") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataFault(f"{path} is not a regular file", "it is a folder, a pipe or a device", hint)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if size is None and found.st_size > JSON_LIMIT:
            raise DataFault(f"{path} is too large to be a record", f"{found.st_size} bytes; at most {JSON_LIMIT} are read", hint)
        if size is not None and found.st_size != size:
            how = "empty" if not found.st_size else "too short" if found.st_size < size else "too long"
            raise DataFault(f"{path} is {how}", f"it has {found.st_size} bytes, its shape and dtype need {size}", hint)
        data = np.empty(found.st_size, np.uint8)
        view, done = memoryview(data.data), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise DataFault(f"{path} became shorter while it was read", f"{done} of {len(view)} bytes came", hint)
            done += count
    return data


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
        found = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"is not a JSON object: it holds a {type(found).__name__}")
    level: list[object] = [found]
    for _ in range(JSON_DEPTH):
        inner = [part for each in level if isinstance(each, (dict, list)) for part in (each.items() if isinstance(each, dict) else each)]
        level = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        if wrong := next((each for each in level if not _writable(each)), None):
            raise ValueError(f"holds {wrong!r:.60}, which fa-cli does not write")
    if level:
        raise ValueError(f"is nested deeper than {JSON_DEPTH} levels")
    for key in (*required, *(key for key in optional if key in found)):
        is_kind, words = {**optional, **required}[key]
        if key not in found:
            raise ValueError(f"lacks {key!r}: {words}")
        if not is_kind(found[key]):
            raise ValueError(f"has {found[key]!r:.60} for {key!r}, which is {words}")
    return found


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


def write_files(folder: Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Write several files (name -> bytes) of a folder: all are staged on disk, then renamed in the order given.

    A full disk leaves every old file unchanged, and the last name is the commit point. Temporary files are removed, also on Ctrl-C.
    Raises DiskFault.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for name, data in contents.items():
            temporary = folder / f".{name}.{secrets.token_hex(4)}.tmp"
            staged.append((temporary, folder / name))
            _stage(temporary, memoryview(data).cast("B"))
        while staged:
            os.replace(*staged[0])
            staged.pop(0)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise disk_fault(folder, error) from None
    finally:
        for temporary, _ in staged:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def append_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Append JSON records to a file, one per line, in one write, and fsync. Raises DiskFault, ValueError for NaN and infinity."""
    if not records:
        return
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(text.encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_fault(path.parent, error) from None


def _stage(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done : done + (1 << 30)])
        os.fsync(descriptor)
        written = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if written != len(data):
        raise OSError(errno.EIO, f"{written} of {len(data)} bytes reached the disk")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing. Raises DiskFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_fault(folder, error) from None


def disk_fault(place: Path, error: OSError) -> DiskFault:
    """The fault for an OSError of a write in a folder, with what a user can do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFault(f"no room to write in {place}", reason, f"free some space: df -h {place}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DiskFault(f"cannot write in {place}", reason, f"choose another folder, or: chmod u+w {place}")
    return DiskFault(f"cannot write in {place}", reason, "check the folder and its disk")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one run, by flock on its own descriptor: there is no lock file, and the lock ends with the process.

    Temporary files left by a killed run are removed, since the lock's holder is the only writer. Raises DiskFault where another run
    holds the lock (the folder's listing is then unchanged), DataFault where there is no such folder.
    """

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise DataFault(f"{folder} is not a folder", "there is no data there", "fa-cli gen-data makes it") from None
    except OSError as error:
        raise disk_fault(folder, error) from None
    try:
        try:
            _take(descriptor)
        except BlockingIOError:
            raise DiskFault(f"{folder} is in use", "another run holds it", "wait for that run, or use another --data folder") from None
        except OSError as error:
            raise DiskFault(f"cannot lock {folder}", error.strerror or str(error), "use a folder on a local disk") from None
        for left in folder.glob(".*.????????.tmp"):
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """Lock a folder exclusively. Readers that share its lock (a backup) are waited for; raises BlockingIOError where a run holds it."""
    import fcntl

    until = time.monotonic() + READERS_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises where a run holds it: a run's lock is exclusive
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
