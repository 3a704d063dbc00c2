"""MPI through mpi4py: the ranks' small values, and on a CPU their tensors.

MPI is finalised only where the rank has come to its end. A rank that fails aborts, and its launcher ends the others: MPI_Finalize
would wait for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..fault import EnvironmentFault, install_extra
from .transport import Apart, Arrival, Clock, HostClock, Stuck

#: Tags of gather's messages, and of the first rank's last one; exchanges have 0.
_TO_FIRST, _FROM_FIRST, _ENDED = 1, 2, 3
#: Exit code of a rank that aborts: the environment's.
_ABORTED = EnvironmentFault.exit_code
#: What to do where mpiexec and mpi4py are of different MPIs.
OWN_LAUNCHER = "use the mpiexec beside this Python (pip install '.[ring]'), or build mpi4py against the launcher's MPI"


def load() -> tuple[Any, ctypes.CDLL]:
    """mpi4py's MPI module, not yet initialised, and its library for calls that wait: mpi4py holds Python's lock in them, so that no thread
    of ours could end them; ctypes does not. Raises EnvironmentFault where there is none, or where it cannot join its launcher."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise EnvironmentFault("mpi4py does not load", str(error), install_extra("ring")) from None
    name = MPI.get_vendor()[0]
    if "PMIX_NAMESPACE" in os.environ and name == "MPICH" and "pmix" not in MPI.Get_library_version():  # its MPI_Init would abort
        why = f"mpiexec is Open MPI's, or srun's --mpi is pmix; mpi4py loads {name}, which does not speak their PMIx"
        raise EnvironmentFault("mpiexec belongs to another MPI than mpi4py's", why, f"{OWN_LAUNCHER}; with srun, --mpi=pmi2")
    return MPI, ctypes.CDLL(MPI.__file__)


class Mpi:
    """COMM_WORLD as control and, with host memory, as transport."""

    engine = "MPI"

    def __init__(self, timeout: float, late: float = 0.0) -> None:
        """late: seconds more than the timeout for the others to join, so that one rank says it first."""
        self.mpi, self._library = load()
        if not self.mpi.Is_initialized():  # by a program of the user's
            with deadline(timeout + late, Apart("join", timeout)):
                self._library.MPI_Init_thread(None, None, self.mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        self.comm = self.mpi.COMM_WORLD
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)  # as mpi4py's own MPI_Init does
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.timeout = timeout
        self.clock: Clock = HostClock()
        self._closed = False
        self._ended, self._gave_up = 0, False  # exchanges; one of them did not end
        atexit.register(self._abort)

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        """Every rank's value, by way of the first rank: a collective call would neither end by itself nor say who is missing."""
        seconds = self.timeout * patience
        limit = time.monotonic() + (seconds if self.rank == 0 else 1.5 * seconds)  # the first rank knows who is missing
        if self.rank:
            sent = self.comm.isend(value, 0, _TO_FIRST)
            self._come(0, _FROM_FIRST, limit, seconds)
            sent.wait()
            found: list[Any] = self.comm.recv(None, 0, _FROM_FIRST)
            return found
        found = [value]
        for rank in range(1, self.size):
            self._come(rank, _TO_FIRST, limit, seconds)
            found.append(self.comm.recv(None, rank, _TO_FIRST))
        given = found if to_all else [None] * self.size
        for request in [self.comm.isend(given, rank, _FROM_FIRST) for rank in range(1, self.size)]:
            while not request.Test():
                time.sleep(2e-5)
                if time.monotonic() > limit + seconds:
                    raise Stuck(self.rank, None, seconds)
        return found

    def _come(self, rank: int, tag: int, limit: float, seconds: float) -> None:
        """Wait until a message of a rank is there. Raises Stuck."""
        while not self.comm.iprobe(rank, tag):
            if time.monotonic() > limit:
                raise Stuck(self.rank, rank, seconds)
            time.sleep(2e-5)

    def register(self, buffers: Sequence[Any]) -> None:
        """Any memory will do."""

    def exchange(self, send: Any, receive: Any) -> Arrival:
        """Non-blocking send and receive; the wait is on the host."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        began = self.clock.mark()
        requests = [self.comm.Irecv([receive, self.mpi.BYTE], before)] if receive.size else []
        arriving = len(requests)
        requests += [self.comm.Isend([send, self.mpi.BYTE], after)] if send.size else []

        def finish() -> Any:
            limit = time.monotonic() + self.timeout
            while not self.mpi.Request.Testall(requests):
                if time.monotonic() > limit:
                    late, self._gave_up = arriving and not requests[0].Test(), True
                    raise Stuck(self.rank, before if late else after, self.timeout, self._ended)
                time.sleep(2e-5)
            self._ended += 1
            return self.clock.mark()

        return Arrival(send.nbytes, began, finish)

    def scope(self) -> AbstractContextManager[Any]:
        """A CPU has no streams."""
        return nullcontext()

    def close(self, failed: bool = False) -> None:
        """Finalise, all ranks at the first's time, which may have minutes of judging before it: MPI_Finalize waits, and has a limit here.

        A rank that failed does so at its exit, by aborting all, also those that wait here: what it raises is told first."""
        if failed or self._closed:
            return
        if self.rank:
            while not self.comm.iprobe(0, _ENDED):
                time.sleep(1e-3)
            self.comm.recv(None, 0, _ENDED)
        else:
            self.mpi.Request.waitall([self.comm.isend(None, rank, _ENDED) for rank in range(1, self.size)])
        self._closed = True
        with deadline(self.timeout, Apart("leave", self.timeout)):
            self._library.MPI_Finalize()

    def _abort(self) -> None:
        if not self._closed:
            sys.stderr.flush()
            if self._gave_up:  # one who knows better may come a little later, and leave its result too: the fewest exchanges count
                time.sleep(min(2.0, self.timeout / 4))
            self.comm.Abort(_ABORTED)


@contextmanager
def deadline(seconds: float, fault: EnvironmentFault) -> Iterator[None]:
    """End this process with exit code 4 and the words of a fault where the block takes longer: for calls of libraries that wait without a
    limit of their own."""

    def end() -> None:
        sys.stderr.write(f"error: {fault}\n")
        sys.stderr.flush()
        os._exit(_ABORTED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
