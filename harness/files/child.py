"""A job in a child process: a function with its arguments in, its result or its Fault out.

A child process is for a job that may crash (a wild pointer, a lost CUDA context), for one that another program must start (a profiler,
mpiexec, a loader with LD_PRELOAD), and for a time limit. A job is a function of a module, with its arguments in a functools.partial.
Job and result are pickled: functions and classes are found by name, in a checkout and in an installation.

The child ends with its parent. The parent holds a lock on the job's folder, and a thread of the child waits for that lock. The thread
gets it when the parent has ended or has dropped the job, whatever programs run between the two.
"""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ..fault import Fault, KernelFault
from . import locked, write_files

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

S = TypeVar("S")
T = TypeVar("T")

#: Seconds from the signal that ends a child until it is killed.
GRACE_SECONDS = 2.0
#: The program of a child. It imports from its parent's sys.path, not from the current folder. Its sys.argv is its parent's, for
#: records. It is a file, so the command line needs no quoting in any launcher. A process that multiprocessing spawns from it reads
#: the file again and runs nothing. Until the job starts, Ctrl-C ends the child without a word: its parent speaks.
_START = """\
if __name__ == "__main__":
    import _signal, os
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
    import pickle, sys
    with open(os.path.join(os.path.dirname(__file__), "job"), "rb") as file:
        sys.path[:], sys.argv[:] = pickle.load(file)
        start = pickle.load(file)
    sys.exit(start())
"""


class Ended(KernelFault):
    """The process of a job ended without a result. code: its exit code, negative for a signal, None after the time limit."""

    def __init__(self, what: str, why: str = "", hint: str = "", code: int | None = None) -> None:
        super().__init__(what, why, hint)
        self.code = code


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command line that runs a job, and the job's result. It is valid inside the block of :func:`command`."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    label: str
    folder: Path
    let_go: Callable[[], None]  # drops the job's lock: the child then ends

    def result(self, code: int | None = None) -> T:
        """The job's result. Raises the Fault that the job raised, Ended where there is neither. code: the exit code, if known."""
        try:
            returned, value = pickle.loads((self.folder / "result").read_bytes())
        except FileNotFoundError:
            raise _ended(self.label, code) from None
        if not returned:
            raise value
        found: T = value
        return found

    def wait(
        self,
        wrapper: Sequence[str] = (),
        timeout: float | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> tuple[int, str]:
        """Run the command to its end, behind the words of a launcher (wrapper): its exit code, and its stderr where that is a pipe.

        stdin, stdout and stderr are as subprocess.Popen takes them. Raises Ended after timeout seconds, and KeyboardInterrupt at Ctrl-C,
        here or in the child. The child has then ended.
        """
        with subprocess.Popen(
            [*wrapper, *self.argv], env=self.environment, text=True, errors="replace", stdin=stdin, stdout=stdout, stderr=stderr
        ) as process:
            try:
                _, said = process.communicate(timeout=timeout)
            except BaseException as error:
                self.let_go()
                try:
                    process.wait(GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    pass
                finally:
                    process.kill()  # nothing, where it has ended
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Ended(f"{self.label} took longer than {timeout:g} s", "its process was ended") from None
                raise
        if process.returncode in (130, -signal.SIGINT):  # Ctrl-C reached the child first
            raise KeyboardInterrupt
        return process.returncode, said or ""


def run(
    job: Callable[[], T],
    label: str = "",
    *,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> T:
    """Run a job in a child process and return its result. Its stdout goes to stderr, and it has no stdin.

    label: its name in messages. timeout: in seconds. environment: added to this process's. wrapper: the words of a launcher, before the
    command line. Raises the Fault that the job raised, in its class (ContextLost among them); Ended after the time limit, where a signal
    ended the process (the message names it), and where it failed in any other way; KeyboardInterrupt at Ctrl-C.
    """
    with command(job, label, environment) as started:
        code, _ = started.wait(wrapper, timeout, stdin=subprocess.DEVNULL, stdout=2)
        return started.result(code)


def again(
    arguments: Sequence[str], environment: Mapping[str, str], *, errors: bool = False, wrapper: Sequence[str] = ()
) -> tuple[int, str]:
    """Run a Python command line (a script and its arguments) in a child process, on this process's streams.

    wrapper: the words of a launcher, before the command line.
    Returns its exit code (negative: the signal) and, with errors, its stderr, which is then not shown. Raises KeyboardInterrupt where it
    was interrupted.
    """
    with command(partial(_script, list(arguments)), arguments[0], environment) as started:
        return started.wait(wrapper, stderr=subprocess.PIPE if errors else None)


def forked(work: Callable[[], Iterable[T]], label: str) -> Iterator[T]:
    """What `work` yields, made in a fork of this process: where a kernel of the CPU engine ends the fork, this process goes on.

    `work` may be a closure, and what it prints is shown; its values and its exception are pickled. Raises its exception, Ended where the
    fork ended without one, KeyboardInterrupt at Ctrl-C. The fork ends with the iterator and with this process. A process that has used
    OpenMP (torch) must not fork: the fork's OpenMP would wait for threads that it does not have.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS and the engine have threads, and handlers for a fork
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # an interrupted fork must not go on as this process
        process = os.fork()
    if not process:
        _yield_into(writing, work)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writing)
    status: int | None = None
    try:
        with open(reading, "rb") as pipe:
            while True:
                try:
                    kind, value = pickle.load(pipe)
                except (EOFError, pickle.UnpicklingError):
                    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    if status in (130, -signal.SIGINT):
                        raise KeyboardInterrupt from None
                    raise _ended(label, status) from None
                if kind == "ended":
                    return
                if kind == "raised":
                    raise value
                yield value
    finally:
        if status is None:
            _reap(process)


def survived(items: Iterable[S], work: Callable[[S], T], died: Callable[[S, Ended], T], label: str) -> Iterator[T]:
    """work(item) for each item, in a fork as :func:`forked` has it; died(item, why) for one that ends it, and another fork for the rest."""
    left = list(items)
    while left:
        try:
            for found in forked(lambda: map(work, left), label):
                left.pop(0)
                yield found
        except Ended as ended:
            yield died(left.pop(0), ended)


@contextmanager
def command(job: Callable[[], T], label: str = "", environment: Mapping[str, str] | None = None) -> Iterator[Command[T]]:
    """The command line of a job, for any launcher. A child that still runs at the end of the block is ended.

    Raises pickle.PicklingError or AttributeError for a job that is no function of a module.
    """
    label = label or getattr(job, "func", job).__name__
    with tempfile.TemporaryDirectory(prefix="fa_cli_", ignore_cleanup_errors=True) as name, ExitStack() as held:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((sys.path, sys.argv)) + pickle.dumps(partial(_main, job, label, folder)))
        (folder / "start.py").write_text(_START)
        held.enter_context(locked(folder))
        yield Command([sys.executable, "-P", str(folder / "start.py")], {**os.environ, **(environment or {})}, label, folder, held.close)


@contextmanager
def talking(
    job: Callable[[Connection[Any, Any]], object], label: str, environment: Mapping[str, str] | None = None
) -> Iterator[Connection[Any, Any]]:
    """A job in a child process that is given one end of a pipe; the other end. Its stdout goes to stderr, and it has no stdin.

    At the end of the block the other end is closed, and a child that has not ended GRACE_SECONDS later is ended.
    """
    from multiprocessing import Pipe

    here, there = Pipe()
    with command(partial(_talk, job, there.fileno()), label, environment) as started, here:
        with there:
            process = subprocess.Popen(started.argv, env=started.environment, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[there.fileno()])
        try:
            yield here
        finally:
            here.close()
            for last in (started.let_go, process.kill):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
                last()  # nothing, where it has ended
            process.wait()


def side_by_side(commands: Sequence[Command[T]], grace: float = GRACE_SECONDS) -> list[int | None]:
    """Run commands at the same time, each to its end: their exit codes. What they print goes to stderr.

    Where one fails, and where the first one has ended, the others have `grace` seconds more and are then ended, which is None.
    At Ctrl-C, and however it ends, none is left.
    """
    started = [subprocess.Popen(each.argv, env=each.environment, stdin=subprocess.DEVNULL, stdout=2) for each in commands]
    until: float | None = None
    try:
        while None in (codes := [process.poll() for process in started]) and (until is None or time.monotonic() < until):
            if until is None and (any(codes) or codes[0] is not None):
                until = time.monotonic() + grace
            time.sleep(0.01)
    finally:
        for each, process in zip(commands, started, strict=True):
            if process.poll() is None:
                each.let_go()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()  # nothing, where it has ended
            process.wait()
    if 130 in codes or -signal.SIGINT in codes:
        raise KeyboardInterrupt
    return codes


def signal_name(code: int) -> str:
    """The name of the signal behind a negative exit code: -11 is SIGSEGV."""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def _ended(label: str, code: int | None) -> Ended:
    if code is None or code >= 0:
        how = "" if code is None else f" with exit code {code}"
        return Ended(f"{label} ended without a result", f"its process ended{how}", code=code)
    name = signal_name(code)
    hint = "was it out of memory? dmesg says so" if name == "SIGKILL" else ""
    if name in ("SIGABRT", "SIGSEGV", "SIGBUS"):  # glibc aborts where the heap is destroyed
        hint = "a kernel that writes outside its arrays? On the CPU, fa-cli run --check asan names the line"
    return Ended(f"{label} died: {name}", "its process left no result", hint, code)


# -- in the child -----------------------------------------------------------------------------------------------------


def _main(job: Callable[[], object], label: str, folder: Path) -> int:
    """Run the job and leave its result or its fault in the folder; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # else Ctrl-C is ignored here, as in the parent
        signal.signal(signal.SIGINT, _interrupt_once)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    code, left = 0, None
    try:
        try:
            left = pickle.dumps((True, job()))
        except Fault as fault:
            code, left = fault.exit_code, pickle.dumps((False, fault))
        except Exception as error:
            traceback.print_exc()
            code, left = 1, pickle.dumps((False, Ended(f"{label} failed", f"{type(error).__name__}: {error}", code=1)))
        write_files(folder, {"result": left})
    except KeyboardInterrupt:
        return 130
    return code


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the terminal and the parent both send one: a second would interrupt the cleanup
    raise KeyboardInterrupt


def _yield_into(writing: int, work: Callable[[], Iterable[object]]) -> NoReturn:
    """In a fork: send what `work` yields, then end without this process's cleanup, which is the parent's."""
    code = 1
    try:
        try:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _interrupt_once)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            with open(writing, "wb") as pipe:
                try:
                    for each in work():
                        pipe.write(pickle.dumps(("yielded", each)))
                        pipe.flush()
                    pipe.write(pickle.dumps(("ended", None)))
                except Exception as error:
                    pipe.write(pickle.dumps(("raised", error)))
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stderr.flush()
    finally:
        os._exit(code)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value)


def _reap(process: int) -> None:
    """End a fork, after GRACE_SECONDS by force."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGINT)
    until = time.monotonic() + GRACE_SECONDS
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def _end_with_parent(folder: Path) -> None:
    import fcntl

    with suppress(OSError):  # the folder is gone: so is the parent
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGINT)  # a signal, not an exception: a launch on the CPU engine stops for nothing else
    time.sleep(GRACE_SECONDS)
    os._exit(130)


def _talk(job: Callable[[Connection[Any, Any]], object], descriptor: int) -> None:
    from multiprocessing.connection import Connection

    with Connection(descriptor) as pipe:
        job(pipe)


def _script(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
