"""How a ring starts: in this process (--simulate), as the rank that a launcher made of it, or as processes that are started here.

With GPUs every rank is a process of ours. On the CPU it is mpiexec that starts the ranks, and MPI.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..backends import nvidia_driver
from ..fault import EnvironmentFault, Fault, UsageFault, install_extra
from ..files import child
from .job import Outcome, Spec, simulate, work
from .place import Place, found
from .program import refuse_type
from .transport import Apart, Hangs, Stuck, Told

T = TypeVar("T")

#: How many ranks --gpus starts at most: so many whatever the machine, and so many for each of its cores.
FEW, RANKS_A_CORE = 16, 4


def ring(
    spec: Spec, gpus: int | None = None, simulated: int | None = None, progress: Callable[[str], None] = lambda text: None
) -> Outcome | None:
    """The outcome of a ring, on the first rank; None on the others. gpus: start so many ranks here; simulated: take turns.

    progress receives what is being done; ranks with a process of their own tell nothing.

    Raises UsageFault for both, and for a bandwidth that nothing is predicted from, EnvironmentFault with the name of a rank that died or does not answer; otherwise what the ranks raise.
    """
    if simulated and gpus:
        raise UsageFault("--gpus and --simulate together", "one starts ranks, the other takes turns on one device", "leave out one of them")
    if spec.bandwidth and not simulated:
        raise UsageFault("--bandwidth without --simulate", "messages that are sent take the time they take", "add --simulate N")
    if not found():
        refuse_type(spec.problem)  # before processes start; a launcher's ranks tell it once, when they have met
    if simulated and not found():
        return simulate(spec, simulated, progress)
    if simulated:
        raise UsageFault("--simulate under a launcher", "it needs one process", "leave out mpiexec, or --simulate")
    progress(f"{gpus or 2} ranks compile, compute, and are judged" if not found() else "")
    return on_ranks(partial(work, spec), spec.device, gpus)


def on_ranks(job: Callable[[Place], T | None], device: str, gpus: int | None = None) -> T | None:
    """What a job returns on the first rank of a launcher that started this process, or of `gpus` ranks (2) that are started here.

    None on the other ranks of a launcher. Raises as :func:`ring`.
    """
    place = found()
    if place and place.by == "store" and gpus and "TORCHELASTIC_RUN_ID" not in os.environ:
        place = None  # a shell inside a job of Slurm: what is said here counts
    if place and gpus:
        why = f"it has made this process rank {place.rank} of {place.size}"
        raise UsageFault("--gpus under a launcher", why, "leave out --gpus, or the launcher")
    cpu = device == "cpu" or (device == "auto" and not nvidia_driver())
    if place:
        if cpu and place.by == "store" and place.size > 1:
            why, hint = "this launcher has no MPI", "mpiexec -n 2 fa-cli ring …, or --gpus 2 --device cpu"
            raise place.told(EnvironmentFault("ranks on CPUs exchange messages by MPI", why, hint))
        return job(place)
    if (gpus or 2) > (most := max(FEW, RANKS_A_CORE * (os.cpu_count() or 1))):
        why = f"each is a process, and this machine has {os.cpu_count()} cores: at most {most} are started"
        raise UsageFault(f"{gpus} ranks", why, f"fa-cli ring --simulate {gpus}, or fewer --gpus")
    return _started(job, gpus or 2, cpu)


def _started(job: Callable[[Place], T | None], count: int, cpu: bool) -> T:
    with _ended_by_sigterm(count > 1), tempfile.TemporaryDirectory(prefix="fa_cli_ring_") as name, ExitStack() as held:
        places = [Place(rank, count, rank, "mpi" if cpu and count > 1 else "folder", Path(name)) for rank in range(count)]
        if count == 1:
            alone = job(places[0])
            assert alone is not None
            return alone
        commands = [held.enter_context(child.command(partial(_rank, job, place), f"rank {place.rank}")) for place in places]
        if not cpu:
            codes = child.side_by_side(commands)
            return _outcome(commands, codes, [[rank] for rank, code in enumerate(codes) if code is not None and code < 0])
        order: list[list[int]] = []
        threading.Thread(target=_watch, args=(Path(name), count, order), daemon=True).start()
        with Path(name, "said").open("w+") as said:
            code, _ = commands[-1].wait(_mpmd(commands), stdin=subprocess.DEVNULL, stdout=said.fileno(), stderr=subprocess.STDOUT)
            said.seek(0)
            told = said.read()
            return _outcome(commands, [None] * count, _ended_badly(Path(name), count, told, order) if code else [], told)


@contextmanager
def _ended_by_sigterm(others: bool) -> Iterator[None]:
    """A batch system's or timeout's SIGTERM is an exception here, so that no rank and no folder is left.

    others: the kernels run in other processes. During a launch of this one the exception would wait for its end.
    """
    if not others or threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _rank(job: Callable[[Place], T | None], place: Place) -> T | None:
    """A rank in a process of its own."""
    assert place.folder is not None
    (place.folder / f"pid.{place.rank}").write_text(str(os.getpid()))
    return job(place)


def _watch(folder: Path, count: int, order: list[list[int]]) -> None:
    """Note the ranks in the order in which their processes end, those together that are seen to have ended at the same time, or to be about
    to: on a busy machine a rank that mpiexec ends because another dies may be gone before that one. mpiexec's message may name any of them.

    The first rank has most to do: one that has not ended some seconds after it hangs at its exit, and is killed.
    """
    watched: dict[int, int] = {}  # ranks by the pidfd of their process
    pids: dict[int, int] = {}
    poll, until = select.poll(), float("inf")
    while sum(map(len, order)) < count and folder.exists():
        if time.monotonic() > until:
            for fd in [fd for fd, rank in watched.items() if not any(rank in some for some in order)]:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for rank in range(count):
            with suppress(OSError, ValueError):  # not there yet, not written yet, or gone already
                if rank not in watched.values():
                    pids[rank] = int((folder / f"pid.{rank}").read_text())
                    watched[fd := os.pidfd_open(pids[rank])] = rank
                    poll.register(fd, select.POLLIN)
        seen = [fd for fd, _ in poll.poll(20)]
        gone = [watched[fd] for fd in seen]
        gone += [rank for rank in watched.values() if seen and rank not in gone and _exits(pids[rank])]
        if new := [rank for rank in gone if not any(rank in some for some in order)]:
            order.append(new)
        for fd in seen:
            until = time.monotonic() + child.GRACE_SECONDS if watched[fd] == 0 else until
            poll.unregister(fd)
    for fd in watched:
        os.close(fd)


def _exits(pid: int) -> bool:
    """Whether a process has ended or is ending: the flag PF_EXITING of proc_pid_stat(5)."""
    try:
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & 4)
    except OSError:
        return True


#: What MPICH and Open MPI say of a rank that ends them all, as one does at Ctrl-C.
_ABORTED = re.compile(r"\(rank (\d+) in comm \d+\): application called MPI_Abort|MPI_ABORT was invoked on rank (\d+)")


def _ended_badly(folder: Path, count: int, said: str, order: list[list[int]]) -> list[list[int]]:
    """The ranks to blame where mpiexec failed, those that ended first or have not begun; said: its words and theirs. A rank that gave
    up waiting for the others to join MPI is not the one to blame, nor can it know which: then nobody is named."""
    late = [rank for rank in range(count) if not (folder / f"pid.{rank}").exists()]
    if (apart := re.search(r"the ranks did not all (join|leave) MPI within ([\d.e+-]+) s", said)) and not late:
        raise Apart(apart[1], float(apart[2]))
    if hangs := re.search(r"a kernel of rank (\d+) did not end within ([\d.e+-]+) s", said):
        raise Hangs(int(hangs[1]), float(hangs[2]))
    if aborted := _ABORTED.search(said):  # MPI ends all others then, some of them before it
        return [[int(aborted[1] or aborted[2])], *order]
    return [late[:1]] if late else order


def _mpmd(commands: Sequence[child.Command[T | None]]) -> list[str]:
    """The words before the last command: mpiexec starts a program of its own for each rank, so each leaves its own result."""
    words = [mpiexec()]
    for each in commands[:-1]:
        words += ["-n", "1", *each.argv, ":"]
    return [*words, "-n", "1"]


def mpiexec() -> str:
    """The launcher of the MPI that mpi4py uses: of the runtime wheel beside this Python, else on PATH. Raises EnvironmentFault."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        raise EnvironmentFault("no mpiexec", "ranks on the CPU are started by MPI", f"{install_extra('ring')}, or use --simulate N")
    return launcher


def _outcome(commands: Sequence[child.Command[T | None]], codes: Sequence[int | None], died: Sequence[Sequence[int]], said: str = "") -> T:
    """The first rank's, or why there is none: what a rank raised, a rank that died, one that did not answer, in this order.

    died: in the order in which they ended, those together whose order is not known.
    """
    values, raised, stuck = [], [], []
    ended: dict[int, child.Ended] = {}
    for rank, (command, code) in enumerate(zip(commands, codes, strict=True)):
        try:
            values.append(command.result(code))
        except Stuck as fault:
            stuck.append(fault)
        except child.Ended as fault:
            ended[rank] = fault
        except Told:
            continue  # another rank has the words
        except Fault as fault:
            raised.append(fault)
    if raised:
        raise raised[0]
    # The first to end had given up on another. mpiexec (no codes) ends all as soon as one dies: nobody waits out a timeout then, and where
    # somebody has, those without a result were ended after that, whichever was seen to end first.
    if stuck and (not died or died[0][0] not in ended or codes[died[0][0]] is None):
        raise min(stuck, key=lambda fault: (fault.done, fault.when))
    if ended:
        hung = [rank for rank in ended if codes[rank] is None]  # ended by us, when another had given up
        first = next(filter(None, ([rank for rank in some if rank in ended] for some in died)), hung[:1] or list(ended)[:1])
        rank = first[0]
        sys.stderr.write("" if died else said)
        gone = ended.get(rank, child.Ended("", "it left no result"))
        how = f": {child.signal_name(gone.code)}" if gone.code and gone.code < 0 else ""
        who = f"rank {rank} died{how}" if len(first) == 1 else f"one of the ranks {', '.join(map(str, sorted(first)))} died"
        raise EnvironmentFault(who, f"{gone.why}; the other ranks were ended", "was it out of memory? dmesg says so")
    assert values[0] is not None
    return values[0]
