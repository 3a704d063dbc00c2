"""Sets of files: written and appended whole, completed after a kill, and nothing that only looks like a journal is believed."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness import files
from harness.fault import DataFault, DiskFault
from harness.files import writing


class Killed(BaseException):
    """In place of SIGKILL; what cleans up sees it, so a test that uses it lets nothing be cleaned up."""


def stop_at(patch: pytest.MonkeyPatch, name: str, allowed: int) -> None:
    """From the call after so many on, a function of os does nothing and raises."""
    left, call = [allowed], getattr(os, name)

    def counted(*given: Any, **more: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return call(*given, **more)

    patch.setattr(os, name, counted)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("call", range(9))
def test_an_append_is_to_all_files_or_to_none(tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at each fsync: before the journal the old bytes, after it the next lock writes the new ones, once."""
    old, new = {"a": b"1\n", "b": b""}, {"a": b"1\n2\n", "b": b"x" * 5000}
    for name, data in old.items():
        (tmp_path / name).write_bytes(data)
    with monkeypatch.context() as patch:
        stop_at(patch, "fsync", call)
        with suppress(Killed):
            files.append_files(tmp_path, {"a": b"2\n", "b": b"x" * 5000})
    files.settle(tmp_path)
    files.settle(tmp_path)
    assert contents(tmp_path) == (old if call < 3 else new), f"after {call} calls"


def test_a_full_disk_takes_an_append_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at each write: exit 6, and the files are as they were."""
    (tmp_path / "a").write_bytes(b"1\n")
    before, write = contents(tmp_path), os.write
    for allowed in range(5):
        left = [allowed]

        def full(descriptor: int, data: memoryview, left: list[int] = left) -> int:
            if not left[0]:
                write(descriptor, data[:1])
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            return write(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(DiskFault, match="no room"):
                files.append_files(tmp_path, {"a": b"2\n", "b": b"3\n"})
        found = contents(tmp_path)
        assert found == before or found == before | {"b": b""}


def journal(folder: Path, **changes: object) -> None:
    """A journal of one staged file `a`, with what is wrong in it."""
    (folder / ".a.0123abcd.tmp").write_bytes(b"new")
    entry = {"name": "a", "staged": ".a.0123abcd.tmp", "sha256": files.sha256(b"new"), "offset": None} | changes
    (folder / files.JOURNAL).write_text(json.dumps({"files": [entry]}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../out"},
        {"name": "../out", "staged": ".../out.0123abcd.tmp"},
        {"name": "b"},
        {"staged": "a"},
        {"sha256": files.sha256(b"other")},
        {"sha256": 5},
        {"offset": -1},
        {"offset": 1},
        {"offset": True},
        {"offset": 0},
    ],
    ids=str,
)
def test_a_journal_that_is_not_ours_changes_nothing(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Names that lead elsewhere, other hashes, offsets that would cut what is there: discarded."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"old")
    journal(folder, **wrong)
    files.settle(folder)
    assert contents(folder) == {"a": b"old"} and os.listdir(tmp_path) == ["folder"]
    journal(folder)
    files.settle(folder)
    assert contents(folder) == {"a": b"new"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 1}', '{"files": [1]}', '{"files": [{}]}', "\0" * 100])
def test_a_journal_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / files.JOURNAL).write_text(text)
    (tmp_path / ".a.0123abcd.tmp").touch()
    (tmp_path / ".mine.notours.tmp").touch()
    files.settle(tmp_path)
    assert os.listdir(tmp_path) == [".mine.notours.tmp"]


def test_a_folder_that_is_held(tmp_path: Path) -> None:
    """A reader does not touch what a run that holds the folder has staged; one whose files are being renamed is exit 6."""
    (tmp_path / ".a.0123abcd.tmp").touch()
    with files.locked(tmp_path):
        (tmp_path / ".a.0123abcd.tmp").touch()
        files.settle(tmp_path)
        assert (tmp_path / ".a.0123abcd.tmp").exists()
        journal(tmp_path)
        with pytest.raises(DiskFault, match="is in use"):
            files.settle(tmp_path)
    assert contents(tmp_path) == {"a": b"new"}


def test_a_fifo_is_not_appended_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DataFault, match="not a regular file"):
        files.append_files(tmp_path, {"b": b"1", "a": b"2"})
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path) -> None:
    """It is named, and no file of the set is renamed: half a set with its journal would wait for ever. A link to a folder is replaced."""
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataFault, match="/b is a folder") as caught:
        files.write_files(tmp_path, {"a": b"new", "b": b"new"})
    assert caught.value.exit_code == 3 and caught.value.why and caught.value.hint
    with pytest.raises(DataFault, match="/b is a folder"), files.gathered(tmp_path, ("a", "b")) as give:
        give("a", b"new")
        give("b", b"new")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and (tmp_path / "a").read_bytes() == b"old"
    (tmp_path / "c").symlink_to(tmp_path / "b")
    files.write_files(tmp_path, {"c": b"new"})
    assert (tmp_path / "c").read_bytes() == b"new" and (tmp_path / "b").is_dir()


def test_a_journal_that_cannot_be_completed_names_the_folder(tmp_path: Path) -> None:
    """An earlier version has left it: what is in its way is said, and once that is moved the files are completed."""
    journal(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DiskFault, match="cannot write .*/a\n"):
        files.settle(tmp_path)
    (tmp_path / "a").rmdir()
    files.settle(tmp_path)
    assert contents(tmp_path) == {"a": b"new"}


def test_gathered_files_are_there_together(tmp_path: Path) -> None:
    """Files that come one after the other, in any order: all at the end of the block, none before, none where it raises."""
    (tmp_path / "a").write_bytes(b"old")
    with files.gathered(tmp_path, ("a", "b")) as give:
        made = give("b", b"second")
        assert made.result()["sha256"] == files.sha256(b"second") and not (tmp_path / "b").exists()
        give("a", bytearray(b"first"))  # type: ignore[arg-type]
    assert contents(tmp_path) == {"a": b"first", "b": b"second"}
    for raised in (ValueError, KeyboardInterrupt):
        with pytest.raises(raised), files.gathered(tmp_path, ("a", "b")) as give:
            give("a", b"third").result()
            give("b", bytes(1 << 20))
            raise raised
        assert contents(tmp_path) == {"a": b"first", "b": b"second"}
    with pytest.raises(KeyError), files.gathered(tmp_path, ("a", "b")) as give:
        give("a", b"third")  # and b never
    assert contents(tmp_path) == {"a": b"first", "b": b"second"}


def test_gathered_files_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of a thread is the caller's, whether it asks for the hash or not, and nothing is left."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for ask in (False, True):
        with pytest.raises(DiskFault, match="no room"), files.gathered(tmp_path, ("a",)) as give:
            made = give("a", b"first")
            if ask:
                made.result()
        assert contents(tmp_path) == {}


def test_a_file_that_is_cleared_away_before_its_rename_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer without a lock, as of figures in plots/, beside a run that settles the folder: it does not end as if all were well."""
    right = writing._sync

    def settled(folder: Path) -> None:
        right(folder)
        files.settle(folder)

    monkeypatch.setattr(writing, "_sync", settled)
    with pytest.raises(DiskFault, match="cannot write in"):
        files.write_files(tmp_path, {"figure.png": b"whole"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "owner", "hint"),
    [
        (errno.EACCES, 0, "chmod u+w 'a b', or use another folder (--output-dir)"),
        (errno.EROFS, 0, "cp -r 'a b' COPY && chmod -R u+w COPY"),
        (errno.EACCES, 1, "cp -r 'a b' COPY && chmod -R u+w COPY"),
    ],
)
def test_what_helps_where_a_folder_cannot_be_written(
    number: int, owner: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chmod where the folder is one's own; of a folder of others, or on a read-only file system, a copy."""
    monkeypatch.chdir(tmp_path)
    Path("a b").mkdir()
    user = os.geteuid() + owner
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert writing.disk_fault(Path("a b"), OSError(number, "no")).hint.endswith(hint)
