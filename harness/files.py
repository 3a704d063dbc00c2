"""Reading and writing files such that neither a damaged file nor a full disk is taken for data.

A read takes a regular file of exactly the size expected. A write goes to a temporary name in the same folder, then fsync, a check of
the size, and rename. numpy's tofile and fromfile do none of this.

Several files are all staged before the first is renamed or appended to, and a journal lists them. The journal is the commit point: a
process killed before it leaves the old set, and after it the next one that locks the folder completes the new set.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .array import Bytes
from .fault import DataFault, DiskFault

#: Bytes of the largest JSON record; a larger file is refused unread.
JSON_LIMIT = 1 << 20
#: Bytes of the largest table (results.csv, samples.jsonl) that is read.
TABLE_LIMIT = 1 << 31
#: Lists what is staged whole in a folder, while it is renamed and appended.
JOURNAL = ".journal"
_STAGED = re.compile(r"\.[^/\0]+\.[0-9a-f]{8}\.tmp")

#: A JSON object as json reads it. Its values are checked where they are used.
Json = dict[str, Any]


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
    descriptor = open_regular(path, hint)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if size is None and found.st_size > limit:
            raise DataFault(f"{path} is too large to be a record", f"{found.st_size} bytes; at most {limit} are read", hint)
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


def read_text(path: Path, hint: str = "", limit: int = TABLE_LIMIT) -> str:
    """The text of a regular file. Raises DataFault as :func:`read_exact` does, and where it is not UTF-8."""
    try:
        return read_exact(path, hint=hint, limit=limit).tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataFault(f"{path} cannot be read", str(error), hint) from None


def read_json(path: Path, hint: str = "") -> Json:
    """A JSON object from a file. Raises DataFault as :func:`read_exact` does, and where it is not a JSON object."""
    data = read_exact(path, hint=hint)

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        found = json.loads(data.tobytes().decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DataFault(f"{path} is not JSON", str(error), hint) from None
    if not isinstance(found, dict):
        raise DataFault(f"{path} is not a JSON object", f"it holds a {type(found).__name__}", hint)
    return found


def json_bytes(record: Mapping[str, object]) -> bytes:
    """A record as indented JSON. Raises ValueError for NaN and infinity, which JSON does not have (write None)."""
    return (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()


def sha256(data: bytes | memoryview) -> str:
    """The SHA-256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def write_files(folder: Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Write several files (name -> bytes) of a folder, in the order given: all of them, or none.

    A full disk leaves every old file unchanged. A process killed at any moment leaves the old files or, once the folder is locked again
    (:func:`locked`), the new ones; so the caller holds that lock where there is more than one file. Raises DiskFault.
    """
    _commit(folder, contents, append=False)


def append_files(folder: Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Append to several files (name -> bytes) of a folder, made where they are missing: to all of them, or to none, as :func:`write_files`.

    Raises DiskFault, and DataFault where one is not a regular file.
    """
    _commit(folder, contents, append=True)


def _commit(folder: Path, contents: Mapping[str, bytes | memoryview], append: bool) -> None:
    staged: list[Path] = []

    def stage(name: str, data: memoryview) -> str:
        staged.append(folder / f".{name}.{secrets.token_hex(4)}.tmp")
        _stage(staged[-1], data)
        return staged[-1].name

    try:
        entries: list[Json] = []
        for name, data in contents.items():
            view = memoryview(data).cast("B")
            offset = _size(folder / name) if append else None
            entries.append({"name": name, "staged": stage(name, view), "sha256": "", "offset": offset})
            if append or len(contents) > 1:
                entries[-1]["sha256"] = sha256(view)
        if append or len(contents) > 1:
            os.replace(folder / stage(JOURNAL, memoryview(json_bytes({"files": entries}))), folder / JOURNAL)
        staged.clear()  # from here on the new files are what the next lock of the folder makes of it
        _sync(folder)
        try:
            _apply(folder, entries)
        except OSError:
            _undo(folder, entries)
            raise
        _finish(folder, entries)
    except OSError as error:
        raise disk_fault(folder, error) from None
    finally:
        for path in staged:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    """The bytes of a file to append to, 0 where there is none. Raises DataFault where it is not a regular file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise DataFault(f"{path} is not a regular file", "it is a folder, a pipe or a device", "move it away")
    return found.st_size


def _apply(folder: Path, entries: Sequence[Json]) -> None:
    """Rename and append what is staged. It may be done again: an append starts at its offset."""
    for entry in entries:
        if entry["offset"] is None:
            with suppress(FileNotFoundError):  # renamed before the process was killed
                os.replace(folder / entry["staged"], folder / entry["name"])
            continue
        data = (folder / entry["staged"]).read_bytes()
        descriptor = os.open(folder / entry["name"], os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, entry["offset"])
            os.lseek(descriptor, 0, os.SEEK_END)
            _write_all(descriptor, memoryview(data))
        finally:
            os.close(descriptor)
    _sync(folder)


def _undo(folder: Path, entries: Sequence[Json]) -> None:
    """Take back what was appended before the disk was full, or a first rename that failed. Later renames are left to the next lock."""
    first = folder / entries[0]["staged"]
    if first.exists():
        for entry in entries:
            if entry["offset"] is not None and (folder / entry["name"]).exists():
                os.truncate(folder / entry["name"], entry["offset"])
        _finish(folder, entries)


def _finish(folder: Path, entries: Sequence[Json]) -> None:
    (folder / JOURNAL).unlink(missing_ok=True)
    for entry in entries:
        (folder / entry["staged"]).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stage(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, data)
        written = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if written != len(data):
        raise OSError(errno.EIO, f"{written} of {len(data)} bytes reached the disk")


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done : done + (1 << 30)])
    os.fsync(descriptor)


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
def locked(folder: Path, instead: str = "use another --data folder") -> Iterator[None]:
    """Hold a folder for one run, by flock on its own descriptor: there is no lock file, and the lock ends with the process.

    What a killed run left is completed where its journal lists it whole, and else removed: the lock's holder is the only writer. Raises
    DiskFault where another run holds the lock (the folder's listing is then unchanged; instead: what else to do), DataFault where there
    is no such folder.
    """
    descriptor = _lock(folder, instead)
    try:
        _recover(folder)
        try:
            yield
        finally:
            if os.path.lexists(folder / JOURNAL):  # interrupted between two renames
                with suppress(DiskFault):
                    _recover(folder)
    finally:
        os.close(descriptor)


def settle(folder: Path) -> None:
    """Complete or remove what a killed run left in a folder, before it is read. Raises DiskFault where a run that renames holds it."""
    try:
        left = [name for name in os.listdir(folder) if name == JOURNAL or _STAGED.fullmatch(name)]
    except OSError as error:
        raise disk_fault(folder, error) from None
    if left:
        try:
            with locked(folder):
                pass
        except DiskFault:
            if os.path.lexists(folder / JOURNAL):
                raise


def _lock(folder: Path, instead: str) -> int:
    import fcntl

    while True:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise DataFault(f"{folder} is not a folder", "there is no data there", "fa-cli gen-data makes it") from None
        except OSError as error:
            raise disk_fault(folder, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                    return descriptor
            os.close(descriptor)  # another run removed the folder, and may have made it again, before it was locked
        except BlockingIOError:
            os.close(descriptor)
            raise DiskFault(f"{folder} is in use", "another run holds it", f"wait for that run, or {instead}") from None
        except OSError as error:
            os.close(descriptor)
            raise DiskFault(f"cannot lock {folder}", error.strerror or str(error), "use a folder on a local disk") from None


def _recover(folder: Path) -> None:
    """Complete the journal's files where all are there whole, else discard them; remove temporary files. The caller holds the lock."""
    try:
        entries = _journal(folder)
        if entries and all(_ready(folder, entry) for entry in entries):
            _apply(folder, entries)
        (folder / JOURNAL).unlink(missing_ok=True)
    except OSError as error:
        raise disk_fault(folder, error) from None
    for name in filter(_STAGED.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            (folder / name).unlink()


def _journal(folder: Path) -> list[Json]:
    """The files that the folder's journal lists; none where there is no journal, or it is not one of ours."""
    try:
        found = read_json(folder / JOURNAL).get("files")
    except DataFault:
        return []
    entries = found if isinstance(found, list) else []

    def ours(entry: object) -> bool:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "staged", "sha256")):
            return False
        offset, plain = entry.get("offset"), _STAGED.fullmatch(entry["staged"]) and entry["staged"][1:-13] == entry["name"]
        return bool(plain) and (offset is None or (type(offset) is int and offset >= 0))

    return entries if all(map(ours, entries)) else []


def _ready(folder: Path, entry: Json) -> bool:
    """Whether an entry of a journal can be completed: staged whole, or renamed already. What others appended meanwhile is not cut off."""
    staged, target = folder / entry["staged"], folder / entry["name"]
    if entry["offset"] is None:
        return entry["sha256"] in (_digest(staged), _digest(target))
    if _digest(staged) != entry["sha256"]:
        return False
    try:
        there = read_exact(target, limit=TABLE_LIMIT).tobytes() if target.exists() else b""
    except DataFault:
        return False
    offset: int = entry["offset"]
    return len(there) >= offset and staged.read_bytes().startswith(there[offset:])


def _digest(path: Path) -> str | None:
    """The SHA-256 of a regular file; None where there is none."""
    try:
        descriptor = open_regular(path)
    except DataFault:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- who may write ----------------------------------------------------------------------------------------------------


def exposed(about: os.stat_result) -> str:
    """How a file or folder could be changed by another user (root aside): its owner, or its permissions; empty where it cannot."""
    if about.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {about.st_uid}"
    return f"its mode {stat.S_IMODE(about.st_mode):04o} lets others write" if about.st_mode & 0o022 else ""
