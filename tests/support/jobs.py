"""Jobs for tests of harness/files/child.py: a process of its own finds a function by its module's name, and finds this one on sys.path."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness.backends import CompileError, ContextLost
from harness.fault import DataFault
from harness.kernel import find
from harness.ring.mpi import Mpi
from harness.ring.place import Folder, Place


def noisy(value: object) -> tuple[str, object]:
    """Prints on both streams, through Python and past it; its result is none of that."""
    print("noise on stdout", flush=True)
    print("noise on stderr", file=sys.stderr)
    os.write(1, b"\x80\xff more noise\n")
    return "came back", value


def faulty(kind: str) -> None:
    """Raises a fault: of the ground, of a higher room, of a class made from other arguments; or what is no fault."""
    if kind == "ground":
        raise DataFault("what", "why", "hint")
    if kind == "context":
        raise ContextLost("fa1 died while it ran", "an illegal memory access", "run it alone")
    if kind == "compile":
        raise CompileError(find("fa2", "forward"), ["g++", "a b.cpp"], "line 3: nonesuch")
    raise ValueError("a mistake of ours")


def command() -> list[str]:
    """What a record says was run."""
    return sys.argv


def die(number: int) -> None:
    """Dies of a signal."""
    os.kill(os.getpid(), number)


def interrupted() -> None:
    """Gets the terminal's Ctrl-C before its parent does."""
    signal.raise_signal(signal.SIGINT)


def unpicklable() -> Any:
    """Returns what cannot travel."""
    return lambda: None


def square(value: int) -> int:
    """A job of a job."""
    return value * value


def spawns(count: int) -> list[int]:
    """Has a process of its own for squares."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(square, range(count))


def linger(folder: Path) -> None:
    """Says who it is and stays; where it is interrupted, it cleans up."""
    (folder / "part").write_text(str(os.getpid()))
    (folder / "part").rename(folder / "pid")
    try:
        time.sleep(60)
    finally:
        (folder / "cleaned").touch()


def rank(what: str, place: Place) -> list[object] | None:
    """A rank of a ring without a device: all exchange a value; before that rank 1 does what is asked of it."""
    control = Folder(place, 1.0)
    control.gather(None, 20)  # all are there
    if place.rank == 1 and what != "meet":
        raise_or_die = {"raise": lambda: faulty("ground"), "kill": lambda: die(signal.SIGKILL), "stop": lambda: die(signal.SIGSTOP)}
        raise_or_die[what]()
    found = control.gather(place.rank)
    return found if place.rank == 0 else None


def hanging(place: Place) -> None:
    """A ring of MPI on CPUs in which rank 2 stops after an exchange. Its neighbour gives up later than those who wait for that one."""
    ring = Mpi(30.0)
    ring.gather(None)  # all are there
    send, receive = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    ring.exchange(send, receive).wait()
    ring.timeout = 3.1 if place.rank == 3 else 3.0
    if place.rank == 2:
        time.sleep(60)
    while True:
        ring.exchange(send, receive).wait()


def peak(kernel: str, mode: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """Bytes of resident memory that checking a kernel took at its peak, above what the process had before; what memory.need says."""
    from harness import backends
    from harness.check import choose, memory
    from harness.check.request import Request
    from harness.problem import MODES, Problem
    from harness.verbs import run

    def resident(word: str) -> int:
        return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))

    backend, problem = backends.pick("cpu"), Problem.of(**sizes)
    contender = choose.choose(Request(kernel, mode, problem), backend.device())[0][0]
    tiny = Problem.of(**sizes | {"batch": 1, "heads": 1, "heads_kv": 1, "seq": 8, "seq_kv": 8})
    assert run.check_in_memory(contender, mode, tiny, backend).passed  # what is loaded once
    before = resident("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    assert run.check_in_memory(contender, mode, problem, backend).passed
    return resident("VmHWM:") - before, memory.need(problem, MODES[mode], [contender.workspace_bytes(problem, backend)])
