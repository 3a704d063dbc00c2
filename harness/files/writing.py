"""Reading and writing files such that neither a damaged file nor a full disk is taken for data.

A read takes a regular file of exactly the size expected. A write goes to a temporary name in the same folder, then fsync, a check of
the size, and rename. numpy's tofile and fromfile do none of this.

Several files are all staged before the first is renamed or appended to, and a journal lists them. The journal is the commit point: a
process killed before it leaves the old set, and after it the next one that locks the folder completes the new set.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..fault import DataFault, DiskFault
from .reading import TABLE_LIMIT, Json, each, json_bytes, open_regular, read_exact, read_json, sha256

if TYPE_CHECKING:
    from concurrent.futures import Future

#: Lists what is staged whole in a folder, while it is renamed and appended.
JOURNAL = ".journal"
_STAGED = re.compile(r"\.[^/\0]+\.[0-9a-f]{8}\.tmp")

#: How long a run waits for programs that only read its folder, under a shared lock.
READERS_SECONDS = 10.0


def write_files(folder: Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Write several files (name -> bytes) of a folder, in the order given: all of them, or none.

    A full disk leaves every old file unchanged. A process killed at any moment leaves the old files or, once the folder is locked again
    (:func:`locked`), the new ones; so the caller holds that lock where there is more than one file. Raises DiskFault, and DataFault where
    one is a folder.
    """
    _commit(folder, contents, append=False)


def append_files(folder: Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Append to several files (name -> bytes) of a folder, made where they are missing: to all of them, or to none, as :func:`write_files`.

    Raises DiskFault, and DataFault where one is not a regular file.
    """
    _commit(folder, contents, append=True)


@contextmanager
def gathered(folder: Path, names: Sequence[str]) -> Iterator[Callable[[str, bytes | memoryview], Future[Json]]]:
    """As :func:`write_files`, of files that are made one after the other: a thread stages each while the next is made.

    The function takes a name and the bytes, which then stay as they are; of what it returns, once it is there, ["sha256"] is their hash.
    At the end of the block all of `names`, each given once, are there, in this order; where it raises, none. Raises as write_files does.
    """
    from concurrent.futures import ThreadPoolExecutor  # here, as in reading.each: `fa-cli list` starts without it

    with _committed(folder) as (entry, commit), ThreadPoolExecutor(4) as pool:
        made: dict[str, Future[Json]] = {}

        def give(name: str, data: bytes | memoryview) -> Future[Json]:
            made[name] = pool.submit(entry, name, data, None)
            return made[name]

        yield give
        commit([made[name].result() for name in names], True)


def _commit(folder: Path, contents: Mapping[str, bytes | memoryview], append: bool) -> None:
    with _committed(folder) as (entry, commit):
        size = sum(memoryview(data).nbytes for data in contents.values())
        entries = each(lambda name: entry(name, contents[name], _size(folder / name) if append else None), contents, size)
        commit(entries, append or len(contents) > 1)


@contextmanager
def _committed(
    folder: Path,
) -> Iterator[tuple[Callable[[str, bytes | memoryview, int | None], Json], Callable[[list[Json], bool], None]]]:
    """What stages a file of a set, in any thread, and what commits all, with a journal or without; what is not committed is removed.

    The first takes a name, the bytes and the offset to append them at, and returns the file's entry of the journal; the second takes these.
    """
    staged: list[Path] = []

    def stage(name: str, data: memoryview) -> str:
        path = folder / f".{name}.{secrets.token_hex(4)}.tmp"
        staged.append(path)
        _stage(path, data)
        return path.name

    def entry(name: str, data: bytes | memoryview, offset: int | None) -> Json:
        if (folder / name).is_dir() and not (folder / name).is_symlink():  # no rename replaces it: a journal could not be completed
            raise DataFault(f"{folder / name} is a folder", "a file of that name is to be written", "move it away")
        view = memoryview(data).cast("B")
        return {"name": name, "staged": stage(name, view), "sha256": sha256(view), "offset": offset}

    def commit(entries: list[Json], journal: bool) -> None:
        if journal:
            os.replace(folder / stage(JOURNAL, memoryview(json_bytes({"files": entries}))), folder / JOURNAL)
        staged.clear()  # from here on the new files are what the next lock of the folder makes of it
        _sync(folder)
        try:
            _apply(folder, entries)
        except OSError:
            _undo(folder, entries)
            raise
        _finish(folder, entries)

    try:
        yield entry, commit
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


def _apply(folder: Path, entries: Sequence[Json], again: bool = False) -> None:
    """Rename and append what is staged. again: a process that was killed may have done a part of it; an append starts at its offset."""
    for entry in entries:
        if entry["offset"] is None:
            with suppress(*([FileNotFoundError] if again else [])):  # renamed before
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
    if error.errno == errno.EISDIR and (path := error.filename2 or error.filename):
        return DiskFault(f"cannot write {path}", "it is a folder, where a file is to be", "move it away")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFault(f"no room to write in {place}", reason, f"free some space: df -h {place}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        copy = f"write to a folder of your own; what is in this one goes with: cp -r {shlex.quote(str(place))} COPY && chmod -R u+w COPY"
        hint = f"chmod u+w {shlex.quote(str(place))}, or use another folder (--output-dir)" if _own(place, error) else copy
        return DiskFault(f"cannot write in {place}", reason, hint)
    return DiskFault(f"cannot write in {place}", reason, "check the folder and its disk")


def _own(place: Path, error: OSError) -> bool:
    """Whether chmod may help: the folder is this user's, and its file system can be written."""
    try:
        return error.errno != errno.EROFS and place.stat().st_uid == os.geteuid()
    except OSError:
        return False


@contextmanager
def locked(folder: Path, instead: str = "use another folder (--data or --output-dir)") -> Iterator[None]:
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
        _unlock(descriptor)


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
    while True:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise DataFault(f"{folder} is not a folder", "there is no data there", "fa-cli gen-data makes it") from None
        except OSError as error:
            raise disk_fault(folder, error) from None
        try:
            _take(descriptor)
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


def _unlock(descriptor: int) -> None:
    """Give a folder free and close it. By closing alone it stays locked while a process that another thread is starting, a compiler, has a
    copy of the descriptor: from fork to exec."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)
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


def _recover(folder: Path) -> None:
    """Complete the journal's files where all are there whole, else discard them; remove temporary files. The caller holds the lock."""
    try:
        entries = _journal(folder)
        if entries and all(_ready(folder, entry) for entry in entries):
            _apply(folder, entries, again=True)
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
