"""Data folders on disks that are full, forbidden, shared with another run, or written to by a process that is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import SMALL, fails, outputs, record

from harness import files
from harness.dataset import folder as data
from harness.dataset.generate import generate
from harness.fault import DataFault, DiskFault, Fault
from harness.problem import Problem

ROOT = Path(__file__).resolve().parent.parent.parent


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_disk_full_leaves_everything_as_it_was(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at any write: exit 6, nothing temporary, the old outputs whole; a new folder is not left behind."""
    opened = data.open_(folder)
    data.write_outputs(opened, outputs(), record())
    before, write = listing(folder), os.write
    for allowed in range(6):
        left = [allowed]

        def full(descriptor: int, content: Any, left: list[int] = left) -> int:
            if not left[0]:
                write(descriptor, bytes(content)[:3])
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            return write(descriptor, content)

        monkeypatch.setattr(os, "write", full)
        fault = fails(DiskFault, "no room", lambda: data.write_outputs(opened, outputs(fill=2.0), record()))
        assert fault.exit_code == 6 and listing(folder) == before
    fails(DiskFault, "no room", lambda: data.write(Problem.of(1, 1, 3, 3), 1, tmp_path))
    assert not (tmp_path / "B1_H1_S3_D3").exists()


def test_a_real_limit(tmp_path: Path) -> None:
    """The kernel itself refuses the write (RLIMIT_FSIZE): exit 6 and nothing half written."""
    code = "import sys; from pathlib import Path; from harness import dataset; from harness.problem import Problem\n"
    code += "try: dataset.write(Problem.of(1, 8, 512, 64), 1, Path(sys.argv[1]))\nexcept Exception as e: print(e); sys.exit(e.exit_code)"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (6, "") and "hint: " in done.stdout
    assert not list(tmp_path.iterdir())


def as_nobody(tmp_path: Path, call: Callable[[], object]) -> tuple[int, str]:
    """(exit code, message) of a call made in a child process that is not root: root may write anywhere."""
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)
    read, write = os.pipe()
    with warnings.catch_warnings():  # numpy's threads are idle, and the child calls nothing of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code, message = 0, ""
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            call()
        except Fault as fault:
            code, message = fault.exit_code, str(fault)
        except BaseException as error:
            code, message = 99, repr(error)
        os.write(write, message.encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message


def test_permissions(tmp_path: Path, folder: Path) -> None:
    """An unreadable file is exit 3; a folder that may not be written to is exit 6, and unchanged."""
    opened = data.open_(folder)
    for name in data.INPUTS:
        opened.read(name)
    before = listing(folder)
    folder.chmod(0o555)
    code, message = as_nobody(tmp_path, lambda: data.write_outputs(opened, outputs(), record()))
    assert code == 6 and "cannot write" in message and "hint: " in message
    code, message = as_nobody(tmp_path, lambda: data.write(SMALL, 1, tmp_path, force=True))
    assert code == 6 and "hint: " in message
    parent = tmp_path / "parent"
    parent.mkdir(0o555)
    code, message = as_nobody(tmp_path, lambda: data.write(SMALL, 1, parent))
    assert code == 6 and "cannot write" in message and not list(parent.iterdir())
    assert listing(folder) == before
    (folder / "K.bin").chmod(0)
    code, message = as_nobody(tmp_path, lambda: data.open_(folder).read("K"))
    assert code == 3 and "K.bin cannot be read" in message and "hint: " in message


def test_two_runs_at_once(tmp_path: Path, folder: Path) -> None:
    """The second is exit 6 and leaves the listing unchanged; the lock ends with its holder, also one that was killed."""
    code = "import sys, time; from pathlib import Path; from harness import dataset, files\n"
    code += "with files.locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    before = listing(folder)
    with subprocess.Popen([sys.executable, "-c", code, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"

        def second() -> None:
            with data.locked(folder):
                pass

        assert fails(DiskFault, "is in use", second).exit_code == 6
        fails(DiskFault, "is in use", lambda: data.write(SMALL, 1, tmp_path, force=True))
        assert listing(folder) == before
        holder.kill()
    second()
    fails(DataFault, "is not a folder", lambda: data.locked(tmp_path / "nowhere").__enter__())


def test_killed_while_writing(tmp_path: Path) -> None:
    """SIGKILL at any moment: what is read back is whole, one seed's or the other's."""
    problem = Problem.of(1, 2, 256, 64)
    folder = data.write(problem, 1, tmp_path).folder
    wanted = {seed: generate(problem, seed) for seed in (1, 2)}
    code = "import sys; from pathlib import Path; from harness import dataset; from harness.problem import Problem\n"
    code += "print('ready', flush=True)\n"
    code += "while True:\n for s in (1, 2): dataset.write(Problem.of(1, 2, 256, 64), s, Path(sys.argv[1]), force=True)"
    seen = set()
    for i in range(10):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            time.sleep(0.01 * i)
            writer.kill()
        opened = data.open_(folder)
        assert opened.seed in (1, 2)
        found = opened.read_inputs(data.INPUTS)
        seen.add(opened.seed)
        assert all(found[name].tobytes() == wanted[opened.seed][name].tobytes() for name in found)
    assert seen & {1, 2}
    data.write(problem, 3, tmp_path, force=True)
    assert sorted(listing(folder)) == ["K.bin", "Q.bin", "V.bin", "dO.bin", "meta.json"]


@pytest.mark.parametrize("new", [False, True], ids=["replaced", "a new folder"])
@pytest.mark.parametrize("renames", range(6))
def test_stopped_between_renames(tmp_path: Path, renames: int, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rename is the journal's. Before it the old files stay, after it the next reader completes the new ones; never a mixture."""
    if not new:
        data.write(SMALL, 42, tmp_path)
    left, replace = [renames], os.replace

    def stop(source: Path, target: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", stop)
        data.write(SMALL, 43, tmp_path, force=True)
    folder = tmp_path / SMALL.folder
    if not renames and new:
        assert not folder.exists()
        return
    seed = 43 if renames else 42
    assert data.open_(folder).read_inputs(data.INPUTS)["Q"].tobytes() == generate(SMALL, seed)["Q"].tobytes()
    assert data.open_(folder).seed == seed
    assert sorted(listing(folder)) == ["K.bin", "Q.bin", "V.bin", "dO.bin", "meta.json"]


def test_who_loses_the_race_for_a_new_folder_leaves_it_there(tmp_path: Path) -> None:
    """The winner has made the folder and holds it, still empty: the loser is exit 6 and does not remove it."""
    folder = tmp_path / SMALL.folder
    folder.mkdir()
    with files.locked(folder):
        fails(DiskFault, "is in use", lambda: data.write(SMALL, 42, tmp_path))
        assert folder.is_dir()
    assert data.write(SMALL, 42, tmp_path).seed == 42


def test_a_process_that_is_being_started_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Between fork and exec it has a copy of the descriptor, as a compiler has that another thread starts."""
    read, write = os.pipe()
    with files.locked(tmp_path):
        if not (copy := os.fork()):
            os.read(read, 1)  # until the parent is done
            os._exit(0)
    try:
        with files.locked(tmp_path):
            pass
    finally:
        os.write(write, b"x")
        os.waitpid(copy, 0)


def test_a_folder_that_was_removed_and_made_again_is_not_taken_for_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and flock another run removes its empty folder: the lock is taken on the one that is there now."""
    import fcntl

    folder, flock, swapped = tmp_path / "f", fcntl.flock, []
    folder.mkdir()

    def late(descriptor: int, how: int) -> None:
        if not swapped:
            swapped.append(1)
            folder.rename(tmp_path / "old")
            folder.mkdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with files.locked(folder):
        fails(DiskFault, "is in use", lambda: files.locked(folder).__enter__())
