"""`run --watch`: what counts as a save, what a change is called, and the loop end to end on the CPU engine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from harness.fault import UsageFault
from harness.terminal import watch

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


class Enough(Exception):
    """The edits of a test are used up."""


def looks(files: list[Path], *edits: Callable[[], object]) -> Iterator[list[Path]]:
    """watch.saves over files, where each pause is the next of these edits instead of time."""
    left = iter(edits)

    def pause() -> None:
        try:
            next(left)()
        except StopIteration:
            raise Enough from None

    return watch.saves(lambda: files, pause)


def nothing() -> None:
    """A pause in which nobody saves."""


def test_a_save_is_yielded_once_and_by_name(tmp_path: Path) -> None:
    """At once an empty list; then the file that was written, after the writing has ended; then nothing more."""
    one, two = tmp_path / "one.cu", tmp_path / "two.cuh"
    one.write_text("1"), two.write_text("2")
    pauses = []
    edits = (nothing, lambda: two.write_text("22"), lambda: two.write_text("222"), lambda: pauses.append("settled"), nothing)
    found = looks([one, two], *edits)
    assert next(found) == []
    assert next(found) == [two]
    assert two.read_text() == "222" and pauses == ["settled"]
    with pytest.raises(Enough):
        next(found)


def test_a_save_while_the_run_is_on_is_not_lost(tmp_path: Path) -> None:
    """Files are looked at before the run, so what is written during it is the next save, without a pause between."""
    path = tmp_path / "one.cu"
    path.write_text("1")
    found = looks([path], nothing)
    next(found)
    path.write_text("11")
    assert next(found) == [path]


def test_an_editor_that_renames_is_a_save(tmp_path: Path) -> None:
    """The file may be gone for a moment; a new one with the same size and time is another file."""
    path, new = tmp_path / "one.cu", tmp_path / "new.cu"
    path.write_text("1"), new.write_text("2")
    facts = path.stat()
    os.utime(new, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    found = looks([path], lambda: new.replace(path), nothing)
    next(found)
    assert next(found) == [path]
    found = looks([path], path.unlink, lambda: path.write_text("3"), nothing)
    next(found)
    assert next(found) == [path] and path.exists()


def test_what_is_watched(tmp_path: Path) -> None:
    """The kernels of all passes and their include closure, as it is at that moment; peers have no file; nothing at all is a fault."""
    shutil.copy(ROOT / "kernels_cu/07_fa2_forward.cu", tmp_path / "mine_forward.cu")
    spec = str(tmp_path / "mine_forward.cu")
    kernels = watch.kernel_files([spec, "torch-flash", "fa2"], "forward")
    assert kernels == [tmp_path / "mine_forward.cu", ROOT / "kernels_cu/07_fa2_forward.cu"]
    assert ROOT / "kernels_cu/include/fa/args.cuh" in watch.sources(kernels)
    (tmp_path / "mine.cuh").write_text("")
    kernels[0].write_text('#include "mine.cuh"\n')
    assert watch.sources(kernels[:1]) == [kernels[0], tmp_path / "mine.cuh"]
    kernels[0].unlink()
    assert watch.sources(kernels[:1]) == [kernels[0]]
    with pytest.raises(UsageFault, match="unknown kernel 'torch-flash'"):
        watch.kernel_files(["torch-flash"], "forward")


def test_a_change_in_words() -> None:
    """Times and compare's verdict on their ratio; an error that stayed is said once."""

    def told(ms: float, spread: float, logsumexp: float) -> watch.Told:
        seconds = [ms * 1e-3 * (1 + spread * (i - 10) / 10) for i in range(21)]
        return {"ms": ms, "seconds": seconds, "turns": [], "errors": {"O": 3.1e-7, "logsumexp": logsumexp}}

    first, second = told(1.23, 0.01, 1e-7), told(1.1, 0.01, 2e-7)
    assert watch.change("fa2 forward", None, first) == "fa2 forward: 1.23 ms; O error 3.10e-07; logsumexp error 1.00e-07"
    wanted = "fa2 forward: 1.23 ms -> 1.1 ms, 1.12 times as fast (1.1 to 1.13); O error 3.10e-07"
    assert watch.change("fa2 forward", first, second) == f"{wanted}; logsumexp error 1.00e-07 -> logsumexp error 2.00e-07"
    assert "1.23 ms -> 1.24 ms, same within noise; O" in watch.change("fa2 forward", first, told(1.24, 0.01, 1e-7))
    noise = watch.change("fa2 forward", told(9.81, 0.999, 1e-7), told(1.1, 0.999, 1e-7) | {"seconds": [1e-4, 1.1e-3, 2e-2]})
    assert "9.81 ms -> 1.1 ms, same within noise (" in noise and "8.9" not in noise
    assert "too few samples to tell" in watch.change("fa2 forward", first, second | {"seconds": [1.1e-3]})
    assert watch.change("fa2 forward", first, first | {"ms": None}).startswith("fa2 forward: 1.23 ms -> not timed; O")


@pytest.mark.parametrize(("words", "what"), [(("--json",), "--watch and --json"), (("--compute", "nonesuch"), "unknown kernel 'nonesuch'")])
def test_what_cannot_be_watched_is_exit_2(words: tuple[str, ...], what: str, fa_cli: Run) -> None:
    """Before anything runs."""
    result = fa_cli("run", "--watch", *words)
    assert result.exit_code == 2 and result.stdout == ""
    assert what in result.stderr and "hint:" in result.stderr


# -- end to end -------------------------------------------------------------------------------------------------------


class Watching:
    """`fa-cli run --watch` of ./mine_forward.cu in a process of its own, its output as it comes."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.kernel, self.out = folder / "mine_forward.cu", folder / "out.txt"
        command = [sys.executable, str(ROOT / "cli.py"), "run", "--watch", "--compute", "./mine_forward.cu", "--device", "cpu", *words]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        self.read = 0

    def until(self, text: str) -> str:
        """What it prints from here to the end of the line that holds a text."""
        for _ in range(3000):
            new = self.out.read_text()[self.read :]
            if text in new and "\n" in new[new.index(text) :]:
                end = new.index("\n", new.index(text)) + 1
                self.read += end
                return new[:end]
            assert self.process.poll() is None, f"it ended without {text!r}:\n{new}"
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in five minutes:\n{new}")


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """Starts one, and kills it where the test did not end it."""
    started: list[Watching] = []

    def start(*words: str) -> Watching:
        started.append(Watching(tmp_path, *words))
        return started[0]

    shutil.copy(ROOT / "kernels_cu/00_naive_forward.cu", tmp_path / "mine_forward.cu")
    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.usefixtures("ctrl_c")
@needs_compiler
def test_watch_a_kernel_being_written(watching: Callable[..., Watching]) -> None:
    """Right; does not compile; wrong; right again, against the first; Ctrl-C is how it ends."""
    one = watching("--batch", "1", "--heads", "2", "--seq", "33", "--dim", "16")
    right = one.kernel.read_text()
    first = one.until("mine forward: ")
    assert "note: watching mine_forward.cu" in first and "PASS mine forward" in first and "->" not in first

    one.kernel.write_text(right + "\nthis is no C++;\n")
    broken = one.until("note: still watching")
    assert "saved    mine_forward.cu" in broken and "does not compile" in broken and "mine forward:" not in broken

    one.kernel.write_text(right.replace("args.scale", "(2 * args.scale)"))
    wrong = one.until("note: still watching")
    assert "FAIL mine forward" in wrong and "O is wrong at batch" in wrong and "mine forward:" not in wrong

    one.kernel.write_text(right)
    again = one.until("mine forward: ")
    assert "PASS mine forward" in again
    assert " ms -> " in again.splitlines()[-1] and "O error" in again.splitlines()[-1]

    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(300) == 0
    left = one.out.read_text()[one.read :]
    assert left.splitlines() == ["note: the watch has ended"]


@needs_compiler
def test_what_no_save_can_mend_ends_the_watch(watching: Callable[..., Watching]) -> None:
    """A missing data folder at the first run: its message and its exit code."""
    one = watching("--data", "./nowhere")
    assert one.process.wait(300) == 3
    assert "nowhere" in one.out.read_text() and "still watching" not in one.out.read_text()


@pytest.mark.usefixtures("ctrl_c")
def test_a_run_that_is_killed_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wild pointer kills the run, not the watch: it is told by the signal's name."""
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    shutil.copy(ROOT / "kernels_cu/00_naive_forward.cu", tmp_path / "mine_forward.cu")
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    assert (watch.watch([str(tmp_path / "dies.py")], [str(tmp_path / "mine_forward.cu")], "forward", False)) == 0
    found = capsys.readouterr()
    assert "FAIL the run died: SIGABRT" in found.out and "still watching" in found.err
