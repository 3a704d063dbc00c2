"""The cache of compiled libraries, attacked: what others could have written is not loaded, and what does not load is not kept."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import kernel
from harness.backends import CompileError
from harness.backends.host import cache
from harness.backends.host.build import compiler
from harness.fault import DiskFault, EnvironmentFault, Fault

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "ab0123456789"
STEP = ["-shared", "-fPIC", "{dir}/unit.cpp", "-o", "{dir}/out.so"]
RIGHT = 'extern "C" int answer() { return 42; }\n'
PLANTED = (
    '#include <cstdio>\nextern "C" int answer() {{ return 13; }}\n__attribute__((constructor)) void run() {{ fclose(fopen("{}", "w")); }}\n'
)

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, made under a umask that lets all write."""
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    yield tmp_path / "cache"
    os.umask(before)


def built(source: str = RIGHT, key: str = KEY, command: list[str] | None = None) -> int:
    """What the library says."""
    opened = cache.library(key, command or compiler(), [STEP], {"unit.cpp": source}, ["answer"])
    return int(opened.dll.answer())


def script(folder: Path, text: str) -> list[str]:
    """A compiler that is a shell script."""
    path = folder / "cxx"
    path.write_text("#!/bin/sh\nfor out; do :; done\n" + text)  # $out is the last argument: {dir}/out.so
    path.chmod(0o755)
    return [str(path)]


def test_what_is_made_is_ours_alone(top: Path) -> None:
    """Whatever the umask: no folder or file that others may write to; and it is taken from there the next time."""
    assert built() == 42 and built("not C++") == 42
    assert not [path for path in (top, *top.rglob("*")) if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    assert sorted(path.name for path in top.rglob("*")) == ["ab", f"{KEY}.json", f"{KEY}.so", "host"]


@pytest.mark.parametrize("where", [".", "host", "host/ab", f"host/ab/{KEY}.so", f"host/ab/{KEY}.json"])
@pytest.mark.parametrize("how", ["group", "world", "owner"])
def test_a_planted_library_is_not_run(top: Path, where: str, how: str, tmp_path: Path) -> None:
    """With a note that vouches for it: refused with exit 4 and a hint, and its constructor does not run."""
    assert built() == 42
    marker, place = tmp_path / "was run", top / where
    (tmp_path / "p.cpp").write_text(PLANTED.format(marker))
    library, note = top / "host" / "ab" / f"{KEY}.so", top / "host" / "ab" / f"{KEY}.json"
    subprocess.run([*compiler(), "-shared", "-fPIC", tmp_path / "p.cpp", "-o", tmp_path / "p.so"], check=True)
    library.write_bytes((tmp_path / "p.so").read_bytes())
    note.write_text(json.dumps({"sha256": cache.hashlib.sha256(library.read_bytes()).hexdigest()}))
    if how == "owner":
        if os.getuid():
            pytest.skip("only root gives a file away")
        os.chown(place, 4242, -1)
    else:
        place.chmod(place.stat().st_mode | (0o020 if how == "group" else 0o002))
    with pytest.raises(EnvironmentFault, match="may be another user's") as caught:
        built()
    hint = caught.value.hint  # chmod does not help where the file is another user's
    assert caught.value.exit_code == 4 and "export FA_CLI_CACHE_DIR=" in hint and ("chmod -R go-w" in hint) == (how != "owner")
    assert not marker.exists()


def test_a_folder_above_that_others_may_rename_in(top: Path, tmp_path: Path) -> None:
    """They could put a cache of their own in its place; a sticky folder as /tmp does not let them."""
    tmp_path.chmod(0o777)
    with pytest.raises(EnvironmentFault, match="may be another user's") as caught:
        built()
    assert caught.value.hint.startswith(f"chmod o-w {tmp_path}, or a folder of yours: export FA_CLI_CACHE_DIR=")
    tmp_path.chmod(0o1777)
    assert built() == 42


def test_links_in_the_cache_are_not_followed(top: Path, tmp_path: Path) -> None:
    """A linked folder is exit 6; a linked library is built again in its place."""
    assert built() == 42
    library = top / "host" / "ab" / f"{KEY}.so"
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert built(RIGHT.replace("42", "43")) == 43 and not library.is_symlink()
    shutil.move(top / "host" / "ab", tmp_path / "ab")
    (top / "host" / "ab").symlink_to(tmp_path / "ab")
    with pytest.raises(DiskFault):
        built()


NOTES = ["", "{", "{}", "[]", "null", "3", '{"sha256": null}', '{"sha256": []}', '{"tha256": "x"}', "[" * 10000, "\0\0", "\udcff"]


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_note_that_says_nothing(top: Path, note: str) -> None:
    """Built again, without a traceback."""
    assert built() == 42
    (top / "host" / "ab" / f"{KEY}.json").write_bytes(note.encode(errors="surrogateescape"))
    assert built(RIGHT.replace("42", "43")) == 43
    assert built() == 43


@pytest.mark.parametrize("name", [f"{KEY}.so", f"{KEY}.json"])
def test_a_fifo_in_the_cache_does_not_block(top: Path, name: str) -> None:
    assert built() == 42
    (top / "host" / "ab" / name).unlink()
    os.mkfifo(top / "host" / "ab" / name, 0o600)
    assert built(RIGHT.replace("42", "43")) == 43


BROKEN: dict[str, tuple[str, type[Fault], str]] = {
    "nothing": ("exit 0", EnvironmentFault, "made no library"),
    "garbage": ("echo garbage > $out", EnvironmentFault, "it is no ELF library"),
    "empty": (": > $out", EnvironmentFault, "it is no ELF library"),
    "a FIFO": ("mkfifo $out", EnvironmentFault, "made no library"),
    "a folder": ("mkdir $out", EnvironmentFault, "made no library"),
    "cut off": ('{cxx} "$@" && head -c 9000 $out > $out.x && mv $out.x $out', EnvironmentFault, "it is cut off"),
    "without a symbol": (
        "echo 'int x;' > $out.cpp && {cxx} -shared -fPIC $out.cpp -o $out",
        EnvironmentFault,
        "it has no answer",
    ),
    "not UTF-8": (r"printf '\377\376 wrong\n' >&2; exit 1", EnvironmentFault, "wrong"),
    "full": ("echo 'fatal error: error writing to /x/cc.s: No space left on device' >&2; exit 1", DiskFault, "no room"),
    "quota": ("echo 'as: out.o: Disk quota exceeded' >&2; exit 1", DiskFault, "no room"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_compiler_that_does_not_work(top: Path, kind: str, tmp_path: Path) -> None:
    """Exit 4, or 6 for a full disk; nothing is cached, so a compiler that works then builds."""
    text, fault, word = BROKEN[kind]
    with pytest.raises(fault, match=r"(?s)" + word) as caught:
        built(command=script(tmp_path, text.format(cxx=compiler()[0])))
    assert caught.value.hint and caught.value.why
    assert [path.name for path in top.rglob("*") if path.is_file()] == []
    assert built() == 42


def test_what_is_no_program(top: Path, tmp_path: Path) -> None:
    """Text without #!, or a file that may not be run: exit 4, and a hint at FA_CLI_CXX."""
    (tmp_path / "cxx").write_text("hello")
    for mode in (0o755, 0o644):
        (tmp_path / "cxx").chmod(mode)
        with pytest.raises(EnvironmentFault, match="cannot be started") as caught:
            built(command=[str(tmp_path / "cxx")])
        assert "FA_CLI_CXX" in caught.value.hint


def test_an_undefined_symbol_of_a_kernel_is_its_own(top: Path) -> None:
    """Exit 5, not the compiler's fault."""
    source = 'extern "C" int nonesuch(); extern "C" int answer() { return nonesuch(); }\n'
    with pytest.raises(CompileError, match="nonesuch: a kernel on the CPU engine calls") as caught:
        cache.library(KEY, compiler(), [STEP], {"unit.cpp": source}, ["answer"], kernel.find("fa2", "forward"))
    assert caught.value.exit_code == 5


def test_a_full_disk(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sources are written: exit 6, with the folder to free."""

    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFault, match="No space left") as caught:
        built()
    assert "df -h" in caught.value.hint


def test_equal_descriptor_numbers_are_not_one_library(top: Path) -> None:
    """Closed and loaded again through the same number: each load is of its own file."""
    numbers = set()
    for value in range(5):
        opened = cache.library(f"ab{value}", compiler(), [STEP], {"unit.cpp": RIGHT.replace("42", str(value))}, ["answer"])
        assert opened.dll.answer() == value
        numbers.add(opened.descriptor)
        os.close(opened.descriptor)  # the library stays open under its name
    assert len(numbers) < 5


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    assert done()


def test_scratch_folders_of_a_killed_build_are_removed(top: Path, tmp_path: Path) -> None:
    """SIGTERM while it compiles leaves one. The next build removes it, but not that of a process that still builds."""
    slow = script(tmp_path, "exec sleep 60")
    code = f"import sys; sys.path[0] = {str(ROOT)!r}\nfrom harness.backends.host import cache\n"
    code += f"cache.library('cd12', {slow!r}, [{STEP!r}], {{'unit.cpp': ''}}, [])"
    scratch = (top / "host").glob
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        wait(lambda: any(scratch("cd/build-*/unit.cpp")))
        assert built() == 42 and any(scratch("cd/build-*"))
        os.killpg(process.pid, 15)
    assert any(scratch("cd/build-*"))
    assert built(key="ef34") == 42
    assert not any(scratch("*/build-*"))


def test_loading_needs_a_library(tmp_path: Path) -> None:
    """A descriptor of anything else is closed."""
    (tmp_path / "x").write_bytes(b"\x7fELF\x02\x01" + bytes(10) + b"\3\0" + b"\xff" * 60)
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    with pytest.raises(OSError, match="cut off"):
        cache.load(descriptor, mode=ctypes.RTLD_LOCAL)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
