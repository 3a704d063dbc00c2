"""A job in a process of its own: what comes back, what is said of one that dies, and that no process is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jobs
import pytest

from harness.backends import CompileError, ContextLost
from harness.fault import DataFault, Fault, KernelFault, UsageFault
from harness.files import child
from harness.problem import Problem

pytestmark = pytest.mark.usefixtures("ctrl_c")  # a child is ended by a SIGINT of its own

ROOT = Path(__file__).resolve().parent.parent.parent
#: Stands for a profiler: a program between parent and child, which a signal to it does not pass on.
LAUNCHER = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)")


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def soon(found: Callable[[], bool], seconds: float = 2.5) -> bool:
    """Whether something comes true in a while."""
    end = time.monotonic() + seconds
    while not (true := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return true


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_result_comes_back_through_noise(capfd: pytest.CaptureFixture[str]) -> None:
    """Values of ours among the arguments; what the job prints is for a reader, on stderr, and never the result."""
    problem = Problem.of(1, 2, 7, 8, causal=True, scale=0.3)
    assert child.run(partial(jobs.noisy, problem)) == ("came back", problem)
    assert child.run(jobs.command) == sys.argv
    out, err = capfd.readouterr()
    assert out == "" and "noise on stdout" in err and "noise on stderr" in err


@pytest.mark.parametrize(
    ("kind", "wanted", "parts"),
    [
        ("ground", DataFault, ("what", "why", "hint")),
        ("context", ContextLost, ("fa1 died while it ran", "an illegal memory access", "run it alone")),
        ("compile", CompileError, ("07_fa2_forward.cu does not compile", "line 3: nonesuch", "")),
    ],
)
def test_a_fault_comes_back_as_it_was(kind: str, wanted: type[Fault], parts: tuple[str, str, str]) -> None:
    """Its class, its exit code, its three parts, and what else it carries."""
    with pytest.raises(wanted) as caught:
        child.run(partial(jobs.faulty, kind))
    fault = caught.value
    assert type(fault) is wanted and (fault.what, fault.why, fault.hint) == parts and fault.args == parts[:1]
    assert fault.more == ("the compiler's command: g++ 'a b.cpp'" if kind == "compile" else "")
    if isinstance(fault, CompileError):
        assert fault.command == ["g++", "a b.cpp"] and fault.file.name == "07_fa2_forward.cu"


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (partial(jobs.die, signal.SIGSEGV), -signal.SIGSEGV, ("die died: SIGSEGV", "hint: ", "--check asan names the line")),
        (partial(jobs.die, signal.SIGKILL), -signal.SIGKILL, ("die died: SIGKILL", "hint: was it out of memory?")),
        (partial(jobs.die, signal.SIGRTMIN + 3), -signal.SIGRTMIN - 3, (f"die died: signal {signal.SIGRTMIN + 3}",)),
        (partial(sys.exit, 3), 3, ("exit ended without a result", "exit code 3")),
        (partial(os._exit, 0), 0, ("_exit ended without a result", "exit code 0")),
        (partial(jobs.faulty, "mistake"), 1, ("faulty failed", "ValueError: a mistake of ours")),
        (jobs.unpicklable, 1, ("unpicklable failed", "<lambda>")),
    ],
    ids=["SIGSEGV", "SIGKILL", "real-time signal", "exit 3", "exit 0", "mistake", "unpicklable"],
)
def test_a_job_without_a_result_is_told_why(
    job: partial[None], code: int, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """A kernel fault, with the signal's name or the exit code; a mistake of ours shows where it was made."""
    with pytest.raises(child.Ended) as caught:
        child.run(job)
    assert isinstance(caught.value, KernelFault) and caught.value.code == code
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert ("Traceback" in capfd.readouterr().err) == (code == 1)


@pytest.mark.parametrize("wrapper", [(), LAUNCHER], ids=["alone", "launched"])
def test_a_time_limit(wrapper: tuple[str, ...], tmp_path: Path, temporary: Path) -> None:
    """The job is ended where it is, and cleans up."""
    with pytest.raises(child.Ended, match="the kernel took longer than 1.5 s") as caught:
        child.run(partial(jobs.linger, tmp_path), "the kernel", timeout=1.5, wrapper=wrapper)
    assert caught.value.code is None
    assert soon(lambda: gone(int((tmp_path / "pid").read_text()))) and (tmp_path / "cleaned").exists()
    assert not list(temporary.iterdir())


def test_a_job_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it can neither clean up nor end."""
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(child.Ended, match="took longer"):
        child.run(partial(jobs.die, signal.SIGSTOP), timeout=0.5)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("wrapper", [(), LAUNCHER], ids=["alone", "launched"])
def test_ctrl_c_ends_the_child(wrapper: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the signal comes to the parent alone."""

    def interrupt() -> None:
        if soon((tmp_path / "pid").exists):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        child.run(partial(jobs.linger, tmp_path), wrapper=wrapper, timeout=10)
    assert soon(lambda: gone(int((tmp_path / "pid").read_text()))) and (tmp_path / "cleaned").exists()


def test_ctrl_c_that_finds_the_child_first(capfd: pytest.CaptureFixture[str]) -> None:
    """Is the parent's too, without a traceback."""
    with pytest.raises(KeyboardInterrupt):
        child.run(jobs.interrupted)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("wrapper", [(), LAUNCHER], ids=["alone", "launched"])
def test_no_orphan_is_left(wrapper: tuple[str, ...], tmp_path: Path, temporary: Path) -> None:
    """A parent that is killed takes the child with it, and the folder of the job."""
    code = (
        "import jobs, pathlib; from functools import partial; from harness.files import child\n"
        f"child.run(partial(jobs.linger, pathlib.Path({str(tmp_path)!r})), wrapper={wrapper!r})"
    )
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}) as parent:
        assert soon((tmp_path / "pid").exists, 10)
        parent.kill()
    assert soon(lambda: gone(int((tmp_path / "pid").read_text()))) and (tmp_path / "cleaned").exists()
    assert soon(lambda: not list(temporary.iterdir()))


def test_another_program_starts_it() -> None:
    """A launcher of its own kind: the result is read afterwards; nothing is there where it did not start the job."""
    with child.command(partial(os.getenv, "FA_CLI_TEST"), environment={"FA_CLI_TEST": "given"}) as started:
        with pytest.raises(child.Ended, match="getenv ended without a result"):
            started.result()
        subprocess.run([*LAUNCHER, *started.argv], env=started.environment, check=True)
        assert started.result() == "given"


def test_a_job_may_spawn_processes() -> None:
    """multiprocessing's children read the program of the job again, and do not run the job."""
    assert child.run(partial(jobs.spawns, 3)) == [0, 1, 4]


def test_a_command_line_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A script with its words and the modules beside it, as Python would run it: on our streams, and its exit code is ours."""
    (tmp_path / "beside.py").write_text("word = 'beside'")
    (tmp_path / "script.py").write_text(
        "import beside, os, sys\nprint(__name__, sys.argv[1:], beside.word, os.environ['WORD'])\nprint('e', file=sys.stderr)\nsys.exit(7)"
    )
    words = [str(tmp_path / "script.py"), "--json", "x"]
    assert child.again(words, {"WORD": "w"}) == (7, "")
    assert capfd.readouterr() == ("__main__ ['--json', 'x'] beside w\n", "e\n")
    assert child.again(words, {"WORD": "w"}, errors=True) == (7, "e\n")
    assert capfd.readouterr().err == ""


def test_installed_it_is_the_same(tmp_path: Path) -> None:
    """Under the package's name, from a folder with files that would be found first: the fault is that package's own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/fa_cli").symlink_to(ROOT)
    for name in ("pickle.py", "numpy.py", "harness.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    code = (
        "import functools; from fa_cli.harness import fault, kernel; from fa_cli.harness.files import child\n"
        "try: child.run(functools.partial(kernel.find, 'nonesuch', 'forward'))\nexcept fault.UsageFault as error: print(error.what)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "unknown kernel 'nonesuch'" in done.stdout, done.stderr


def side_by_side(*jobs_: Callable[[], object]) -> tuple[list[int | None], list[object], float]:
    """Exit codes, results (the fault where there is none) and seconds of jobs that run at the same time."""
    with contextlib.ExitStack() as held:
        commands = [held.enter_context(child.command(job)) for job in jobs_]
        began = time.monotonic()
        codes = child.side_by_side(commands, grace=0.2)
        seconds, results = time.monotonic() - began, list[object]()
        for command, code in zip(commands, codes, strict=True):
            try:
                results.append(command.result(code))
            except Fault as fault:
                results.append(fault)
    return codes, results, seconds


def test_side_by_side(temporary: Path) -> None:
    """All end by themselves."""
    codes, results, _ = side_by_side(partial(jobs.square, 2), partial(jobs.square, 3))
    assert codes == [0, 0] and results == [4, 9]
    assert not list(temporary.iterdir())


def test_side_by_side_where_one_dies(temporary: Path) -> None:
    """The others are ended soon after, also one that is stopped; only the one that died has an exit code."""
    codes, results, seconds = side_by_side(partial(time.sleep, 60), partial(jobs.die, signal.SIGKILL), partial(jobs.die, signal.SIGSTOP))
    assert codes == [None, -signal.SIGKILL, None] and seconds < 10
    assert all(isinstance(result, child.Ended) for result in results)


def test_side_by_side_where_one_hangs_at_the_end(temporary: Path) -> None:
    """What waits for nobody any more is ended after the first job."""
    codes, results, seconds = side_by_side(partial(jobs.square, 5), partial(time.sleep, 60))
    assert codes == [0, None] and results[0] == 25 and seconds < 10


# -- a fork -----------------------------------------------------------------------------------------------------------


def _counted(end: Callable[[], object]) -> Iterator[int]:
    yield 1
    yield 2
    end()
    yield 3


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os._exit(7), "exit code 7"),
    ],
)
def test_a_fork_that_dies_leaves_what_it_gave(end: Callable[[], object], words: str) -> None:
    """Its values until then, then how it ended; also where it says that all is well."""
    got = []
    with pytest.raises(child.Ended, match=words):
        for value in child.forked(lambda: _counted(end), "a fork"):
            got.append(value)
    assert got == [1, 2]


def test_a_fork_gives_values_faults_and_ctrl_c() -> None:
    """What the work yields, as it comes, and its exception in its class."""
    assert list(child.forked(lambda: _counted(lambda: None), "a fork")) == [1, 2, 3]

    def fails() -> None:
        raise UsageFault("no", "why", "hint")

    with pytest.raises(UsageFault, match="no") as caught:
        list(child.forked(lambda: _counted(fails), "a fork"))
    assert caught.value.hint == "hint"
    with pytest.raises(KeyboardInterrupt):
        list(child.forked(lambda: _counted(lambda: os.kill(os.getpid(), signal.SIGINT)), "a fork"))


def test_a_fork_ends_with_its_iterator() -> None:
    """No process is left behind that goes on working."""
    values = child.forked(lambda: iter(os.getpid, None), "a fork")
    process = next(values)
    values.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_the_rest_survives_an_item_that_kills() -> None:
    """Each item has a result in order: its own, or that it died; all others are worked on once."""

    def work(item: int) -> str:
        if item % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{item} works"

    found = list(child.survived(range(1, 8), work, lambda item, why: f"{item} {why.what}", "it"))
    assert found == ["1 works", "2 works", "3 it died: SIGKILL", "4 works", "5 works", "6 it died: SIGKILL", "7 works"]
