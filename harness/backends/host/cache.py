"""Compiled libraries: taken from the cache, or compiled into it.

What the cache holds is executed. So every folder from the cache's own down, and every file, must belong to this user or root and be
writable by nobody else; otherwise it is refused, whatever a note beside it says. Owner, hash and code are read through one descriptor,
so that a library cannot be replaced between its check and its load.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...fault import DiskFault, EnvironmentFault
from ...files import JSON_LIMIT, exposed, private_again, replaceable
from ...kernel import Kernel
from ..protocol import CompileError, cache_dir
from .library import check_library

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block
_FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large|[Ff]ile size limit exceeded")
_count = itertools.count()


@dataclass(frozen=True)
class Opened:
    """A library that is loaded: where it lies, its handle, and the descriptor it was checked and loaded through.

    The descriptor stays open as long as the library: its name, /proc/PID/fd/N, is what debuggers and sanitizers read. A debugger is
    another process, to which /proc/self would be its own.
    """

    path: Path
    dll: ctypes.CDLL
    descriptor: int


def library(
    key: str,
    command: Sequence[str],
    steps: Sequence[Sequence[str] | Callable[[Path], None]],
    sources: Mapping[str, str],
    wanted: Sequence[str],
    kernel: Kernel | None = None,
    mode: int = ctypes.RTLD_LOCAL,
) -> Opened:
    """The library of a key, from the cache, or compiled into it and loaded before it is kept: one that does not load is never cached.

    command: the compiler. steps: arguments of its runs, in which {dir} is a scratch folder with the sources (name -> text), or what is to
    be done in that folder between two runs; the last one makes {dir}/out.so. wanted: symbols that it must have. Two processes may build at once: the last rename wins. Raises CompileError
    (EnvironmentFault without a kernel) with the compiler's log, EnvironmentFault for a cache that others may write to and for a compiler
    that does not work, DiskFault.
    """
    with _folder("host") as host, _folder("host", key[:2]) as folder:
        place = cache_dir() / "host" / key[:2]
        if (descriptor := _checked(folder, key, place)) is not None:
            with contextlib.suppress(OSError):  # of no use here, although it is what was built
                return Opened(place / f"{key}.so", load(descriptor, wanted, mode), descriptor)
        with _building(host), _scratch(place) as scratch:
            for name, text in sources.items():
                (scratch / name).write_text(text, encoding="utf-8")
            for step in steps:
                if callable(step):
                    step(scratch)
                else:
                    _compile([*command, *(argument.replace("{dir}", str(scratch)) for argument in step)], scratch, kernel)
            if kernel:
                check_library(scratch / "out.so", kernel)
            descriptor, dll = _new(scratch / "out.so", command, wanted, kernel, mode)
            os.fchmod(descriptor, 0o700)
            note = os.open(scratch / "note", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(note, "w") as file:
                json.dump({"sha256": _hash(descriptor)}, file)
            os.replace(scratch / "out.so", f"{key}.so", dst_dir_fd=folder)
            os.replace(scratch / "note", f"{key}.json", dst_dir_fd=folder)
        return Opened(place / f"{key}.so", dll, descriptor)


def load(descriptor: int, wanted: Sequence[str] = (), mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
    """Load the library that a descriptor is open on. Raises OSError, with the descriptor closed, where it is none or lacks a symbol.

    The loader takes an equal name for the same library, and descriptor numbers are used again: dots make the name of each load its own.
    """
    try:
        _whole(descriptor)
        number = next(_count)
        dots = ["/." * (number >> shift & 31) for shift in (0, 5, 10, 15)]
        dll = ctypes.CDLL("{}/proc{}/{pid}{}/fd{}/{}".format(*dots, descriptor, pid=os.getpid()), mode=mode)
        for name in wanted:
            if not hasattr(dll, name):
                raise OSError(f"it has no {name}")
    except OSError:
        os.close(descriptor)
        raise
    return dll


def copied(opened: Opened) -> Opened:
    """A library loaded once more. A copy in memory is another file, and so another library to the loader, with globals of its own."""
    descriptor = os.memfd_create("kernel")
    with open(opened.descriptor, "rb", closefd=False) as there, open(descriptor, "wb", closefd=False) as here:
        there.seek(0)
        shutil.copyfileobj(there, here)
    return Opened(opened.path, load(descriptor), descriptor)


# -- who may write ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(*parts: str) -> Iterator[int]:
    """A descriptor of a folder of the cache, made where it is missing. Raises EnvironmentFault where others may write to one above it."""
    path = cache_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, _FOLDER)
    except OSError as error:
        raise _disk(path, error) from None
    try:
        if above := replaceable(path):
            raise _foreign(*above)
        _own(descriptor, path)
        for part in parts:
            path /= part
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=descriptor)
            outer, descriptor = descriptor, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(outer)
            _own(descriptor, path)
        yield descriptor
    except OSError as error:
        raise _disk(path, error) from None
    finally:
        os.close(descriptor)


def _own(descriptor: int, path: Path) -> None:
    if why := exposed(os.fstat(descriptor)):
        raise _foreign(path, why)


def _foreign(path: Path, why: str) -> EnvironmentFault:
    what = f"{path} in the cache of compiled kernels may be another user's"
    return EnvironmentFault(what, f"{why}, and the code there is run", private_again(path, cache_dir(), "FA_CLI_CACHE_DIR"))


def _disk(path: Path, error: OSError) -> DiskFault:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = f"free some space: df -h {cache_dir()}" if full else "set FA_CLI_CACHE_DIR to a writable folder"
    return DiskFault(f"cannot write the kernel cache {path}", error.strerror or str(error), hint)


def _checked(folder: int, key: str, place: Path) -> int | None:
    """A descriptor of a library that is ours and has the hash of its note; None where it is to be built."""
    descriptors = [_regular(folder, name, place) for name in (f"{key}.json", f"{key}.so")]
    note, library = descriptors
    try:
        if note is not None and library is not None:
            with contextlib.suppress(ValueError, RecursionError):
                said = json.loads(os.read(note, JSON_LIMIT))
                if isinstance(said, dict) and said.get("sha256") == _hash(library):
                    descriptors.remove(library)
                    return library
    finally:
        for descriptor in filter(None, descriptors):
            os.close(descriptor)
    return None


def _regular(folder: int, name: str, place: Path) -> int | None:
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError:  # missing, or a link: a new one takes its place
        return None
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _own(descriptor, place / name)
            return os.dup(descriptor)
    finally:
        os.close(descriptor)
    return None


def _hash(descriptor: int) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- compiling --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _building(host: int) -> Iterator[None]:
    """While libraries are built, their folder's lock is shared. Who has it alone removes the scratch folders of killed processes."""
    with contextlib.suppress(OSError):  # another process builds, or a file system without locks
        fcntl.flock(host, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in (cache_dir() / "host").glob("*/build-*"):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        fcntl.flock(host, fcntl.LOCK_SH)
    yield


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="build-", dir=place, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _compile(command: Sequence[str], scratch: Path, kernel: Kernel | None) -> None:
    """Run the compiler, with messages in English and its temporary files in the scratch folder."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        hint = "fa-cli doctor; FA_CLI_CXX chooses the compiler, apt install g++ installs one"
        raise EnvironmentFault(f"{command[0]} cannot be started", error.strerror or str(error), hint) from None
    if done.returncode:
        log = done.stderr.decode(errors="replace").replace(f"{scratch}/", "")
        if full := _FULL.search(log):
            raise DiskFault(f"no room to compile in {cache_dir()}", full[0], f"free some space: df -h {cache_dir()}")
        if kernel:
            raise CompileError(kernel, command, log)
        raise EnvironmentFault("the host engine, or the node of torch, does not compile", log, "fa-cli doctor")


def _new(path: Path, command: Sequence[str], wanted: Sequence[str], kernel: Kernel | None, mode: int) -> tuple[int, ctypes.CDLL]:
    """A library that was just compiled, open and loaded. Raises EnvironmentFault where the compiler has made none."""
    try:
        descriptor = os.open(path, _FILE)
        return descriptor, load(descriptor, wanted, mode)
    except OSError as error:
        why = error.strerror or str(error).replace(f"{path.parent}/", "")
        if kernel and "undefined symbol" in why:
            raise CompileError(kernel, command, why) from None
        what, hint = f"{' '.join(command)} made no library", "fa-cli doctor; FA_CLI_CXX chooses another compiler"
        raise EnvironmentFault(what, f"it ended with exit code 0, but: {why}", hint) from None


def _whole(descriptor: int) -> None:
    """Raise OSError where a file is no 64-bit ELF library or ends before its segments do: loading one would end the process."""
    size, head = os.fstat(descriptor).st_size, os.pread(descriptor, 64, 0)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01" or head[16:18] != b"\3\0":
        raise OSError("it is no ELF library")
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<HHHH", head, 54)
    ends = [segments + segment_bytes * segment_count, sections + section_bytes * section_count]
    if segment_bytes == 56 and ends[0] <= size:
        table = os.pread(descriptor, 56 * segment_count, segments)
        ends += [sum(struct.unpack_from("<Q16xQ", table, 56 * i + 8)) for i in range(segment_count)]
    if segment_bytes != 56 or max(ends) > size:
        raise OSError("it is cut off")


def understands(compiler: Sequence[str], flag: str) -> bool:
    """Whether a compiler takes a flag."""
    asked = [*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0
