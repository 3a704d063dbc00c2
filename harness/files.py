"""Reading and writing files such that neither a damaged file nor a full disk is taken for data.

A read takes a regular file of exactly the size expected. A write goes to a temporary name in the same folder, then fsync, a check of
the size, and rename; several files are all staged before the first is renamed. numpy's tofile and fromfile do none of this.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
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

#: A JSON object as json reads it. Its values are checked where they are used.
Json = dict[str, Any]


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
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise DataFault(f"{folder} is not a folder", "there is no data there", "fa-cli gen-data makes it") from None
    except OSError as error:
        raise disk_fault(folder, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
