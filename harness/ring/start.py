"""How a ring starts: in this process (--simulate), as the rank that a launcher made of it, or as processes that are started here.

With GPUs every rank is a process of ours and NCCL moves the tensors. On the CPU it is mpiexec that starts the ranks, and MPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import child
from ..backends import nvidia_driver
from ..fault import EnvironmentFault, Fault, UsageFault
from .job import Outcome, Spec, simulate, work
from .place import Place, found
from .transport import Stuck

#: How Hydra, the launcher of MPICH and Intel MPI, tells which process ended badly.
_HYDRA = re.compile(r"PID (\d+) RUNNING AT")


def ring(spec: Spec, gpus: int | None = None, simulated: int | None = None) -> Outcome | None:
    """The outcome of a ring, on the first rank; None on the others. gpus: start so many ranks here; simulated: take turns.

    Raises EnvironmentFault with the name of a rank that died or does not answer; otherwise what the ranks raise.
    """
    place = found()
    if place and place.by == "store" and gpus and "TORCHELASTIC_RUN_ID" not in os.environ:
        place = None  # a shell inside a job of Slurm: what is said here counts
    if place and (gpus or simulated):
        asked = "--gpus" if gpus else "--simulate"
        raise UsageFault(f"{asked} below a launcher", f"it has made this process rank {place.rank} of {place.size}", f"leave out {asked}")
    if simulated:
        return simulate(spec, simulated)
    if place:
        return work(spec, place)
    return _start(spec, gpus or 2)


def _start(spec: Spec, count: int) -> Outcome:
    cpu = spec.device == "cpu" or (spec.device == "auto" and not nvidia_driver())
    with tempfile.TemporaryDirectory(prefix="fa_cli_ring_") as name, ExitStack() as held:
        places = [Place(rank, count, rank, "mpi" if cpu and count > 1 else "folder", Path(name)) for rank in range(count)]
        if count == 1:
            outcome = work(spec, places[0])
            assert outcome is not None
            return outcome
        if cpu:
            spec = replace(spec, device="cpu")
        commands = [held.enter_context(child.command(partial(_rank, spec, place), f"rank {place.rank}")) for place in places]
        if not cpu:
            codes = child.side_by_side(commands, grace=child.GRACE_SECONDS)
            return _outcome(commands, codes, [rank for rank, code in enumerate(codes) if code is not None and code < 0])
        code, said = commands[-1].wait(_mpmd(commands), stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE)
        died = [
            rank
            for rank in range(count)
            if code and (pid := Path(name, f"pid.{rank}")).exists() and pid.read_text() in _HYDRA.findall(said)
        ]
        if code and not died:
            sys.stderr.write(said)
        return _outcome(commands, [None] * count, died)


def _rank(spec: Spec, place: Place) -> Outcome | None:
    """A rank in a process of its own."""
    assert place.folder is not None
    (place.folder / f"pid.{place.rank}").write_text(str(os.getpid()))
    return work(spec, place)


def _mpmd(commands: Sequence[child.Command[Outcome | None]]) -> list[str]:
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
        raise EnvironmentFault("no mpiexec", "ranks on the CPU are started by MPI", "pip install 'fa-cli[ring]', or use --simulate N")
    return launcher


def _outcome(commands: Sequence[child.Command[Outcome | None]], codes: Sequence[int | None], died: Sequence[int]) -> Outcome:
    """The first rank's, or why there is none: what a rank raised, a rank that died, one that did not answer, in this order."""
    values, raised, ended, stuck = [], [], [], []
    for rank, (command, code) in enumerate(zip(commands, codes, strict=True)):
        try:
            values.append(command.result(code))
        except Stuck as fault:
            stuck.append(fault)
        except child.Ended as fault:
            ended.append((rank, fault))
        except Fault as fault:
            raised.append(fault)
    if raised:
        raise raised[0]
    gone = [(rank, fault) for rank, fault in ended if rank in died]
    if stuck and not gone:
        raise min(stuck, key=lambda fault: fault.when)
    if gone or ended:
        rank, fault = (gone or ended)[0]
        what = f"rank {rank} died" + (f": {child.signal_name(fault.code)}" if fault.code and fault.code < 0 else "")
        raise EnvironmentFault(what, f"{fault.why}; the other ranks were ended", "was it out of memory? dmesg says so")
    assert values[0] is not None
    return values[0]
