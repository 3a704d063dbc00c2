"""How a rank sends to the next one and receives from the one before: the protocol, its clocks, and the ring inside one process.

An exchange is asynchronous: it is posted, other work is enqueued, and :meth:`Arrival.wait` makes what follows wait for it. On a GPU
that is an order between streams, and no call here waits on the host; on a CPU the wait is a wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ..backends import Backend
from ..fault import EnvironmentFault, Fault

T = TypeVar("T")

#: The hosts of the ranks, once they have met (place.control): Stuck names them.
HOSTS: list[str] = []
#: Seconds in which a rank that says why all end is to have ended: a launcher ends all with the first that fails.
_SAYING_SECONDS = 2.0


class Told(Fault):
    """Another rank says why all end: this one ends with the same exit code, without a word."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def left_to_another(fault: Fault) -> Told:
    """What a rank raises instead of a fault that another rank tells, once that one has had its time."""
    time.sleep(_SAYING_SECONDS)
    return Told(fault.exit_code)


class Apart(EnvironmentFault):
    """MPI_Init or MPI_Finalize took longer than it may: both wait for all ranks and do not say for whom. do: "join" or "leave"."""

    def __init__(self, do: str, seconds: float) -> None:
        super().__init__(
            f"the ranks did not all {do} MPI within {seconds:g} s",
            "one was not started, hangs or cannot be reached; MPI does not say which",
            "fa-cli doctor --ring, on one node after the other, finds it; a slow start needs a longer --timeout",
        )


class Stuck(EnvironmentFault):
    """A rank waited for another longer than it may. done: exchanges that had ended there, if it waits for one; when: seconds since 1970.

    Of several ranks the one with the fewest exchanges knows best, then the first to say so: the others wait for ranks that wait."""

    def __init__(self, rank: int, waits_for: int | None, seconds: float, done: float = float("inf")) -> None:
        whom = "the others" if waits_for is None else f"rank {waits_for}"
        super().__init__(
            f"{whom} did not answer within {seconds:g} s",
            f"rank {rank}{_at(rank)} waited for {whom}{_at(waits_for)}; a rank that died or hangs stops the whole ring",
            "see what that rank printed; fa-cli doctor --ring; a slow link or a large problem needs a longer --timeout",
        )
        self.done, self.when = done, time.time()


def _at(rank: int | None) -> str:
    """A rank's host, where the ranks have several."""
    return f" on {HOSTS[rank]}" if rank is not None and len(set(HOSTS)) > 1 else ""


class Hangs(EnvironmentFault):
    """A kernel of a rank on a CPU did not end: no other thread can stop its launch, so its process ends, with these words."""

    def __init__(self, rank: int, seconds: float) -> None:
        hint = "fa-cli run with the same kernel; a large problem needs a longer --timeout"
        super().__init__(f"a kernel of rank {rank} did not end within {seconds:g} s", "the other ranks were ended", hint)


class Clock(Protocol):
    """Marks in what a device does, and the seconds between two of them."""

    def mark(self, stream: Any = None) -> Any:
        """A mark after what has been enqueued on a stream so far, by default on the current one."""
        ...

    def seconds(self, began: Any, ended: Any) -> float:
        """From one mark to another, both reached."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        ...


class HostClock:
    """A CPU has no queue: a mark is the time."""

    def mark(self, stream: Any = None) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """The difference."""
        return ended - began

    def reached(self, mark: float) -> bool:
        """Always."""
        return True


class CudaClock:
    """Marks are CUDA events. xp: CuPy."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def mark(self, stream: Any = None) -> Any:
        """An event recorded now."""
        event = self.xp.cuda.Event()
        event.record(stream or self.xp.cuda.get_current_stream())
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two events."""
        return float(self.xp.cuda.get_elapsed_time(began, ended)) * 1e-3

    def reached(self, mark: Any) -> bool:
        """Whether the event has happened; asks and does not wait."""
        return bool(mark.done)


def clock_of(backend: Backend) -> Clock:
    """The clock of a backend's device."""
    return HostClock() if backend.name == "cpu" else CudaClock(backend.xp)


class Arrival:
    """An exchange that was posted: the bytes sent, and marks of its begin and end (the end is known once it was waited for)."""

    def __init__(self, size: int, began: Any, finish: Callable[[], Any]) -> None:
        self.bytes, self.began, self._finish = size, began, finish
        self.ended: Any = None

    def wait(self) -> None:
        """What is enqueued from here on comes after it. Raises Stuck where a CPU has waited too long."""
        if self.ended is None:
            self.ended = self._finish()


class Control(Protocol):
    """Small Python values between the ranks, on their hosts."""

    rank: int
    size: int

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank: also a barrier. Raises Stuck after patience timeouts.

        to_all: otherwise the other ranks than the first have None for each: outputs are gigabytes."""
        ...

    def close(self, failed: bool = False) -> None:
        """The end: of this rank alone where it failed, which must end the others."""
        ...


class Transport(Protocol):
    """Device memory between neighbours of the ring. engine: what moves the bytes."""

    rank: int
    size: int
    engine: str

    @property
    def clock(self) -> Clock:
        """Of the device that computes."""
        ...

    def register(self, buffers: Sequence[Any]) -> None:
        """Say on all ranks together, before the first exchange, which arrays will be received into; those of an earlier call no longer are.

        In an exchange every rank receives into the same one of its list, from its first byte on. Sizes are the same on all ranks.
        """
        ...

    def exchange(self, send: Any, receive: Any) -> Arrival:
        """Post: send to rank + 1 and receive from rank - 1, uint8 arrays of the backend; an empty one is no message.

        What was enqueued before may still write `send` and read `receive`: the exchange comes after it. Until it has been waited
        for, `send` must not be written and `receive` not be read.
        """
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Inside it the compute stream is the current one."""
        ...

    def close(self, failed: bool = False) -> None:
        """Free what it holds; where the rank failed, without waiting for the others."""
        ...


def wait_for(transport: Transport, mark: Any, timeout: float) -> None:
    """Wait on the host until a mark is reached. Raises Stuck after timeout seconds."""
    deadline = time.monotonic() + timeout
    while not transport.clock.reached(mark):
        if time.monotonic() > deadline:
            if isinstance(transport, Streams):
                whom, done = transport.late()
                raise Stuck(transport.rank, whom, timeout, done)
            raise Stuck(transport.rank, (transport.rank - 1) % transport.size, timeout)
        time.sleep(2e-5)


class Streams:
    """What transports between GPUs have in common: the compute stream and the communication stream of a rank, without a wait of the host.

    Messages are enqueued before the launches that they run beside, on a stream of a higher priority. xp: CuPy.
    """

    def __init__(self, xp: Any, talk: Control, timeout: float) -> None:
        self.rank, self.size, self._timeout, self._cuda = talk.rank, talk.size, timeout, xp.cuda
        self.clock: Clock = CudaClock(xp)
        self.compute = xp.cuda.Stream(non_blocking=True)
        self.stream = xp.cuda.Stream(non_blocking=True, priority=-1)  # before the next blocks of a kernel that already runs
        self._posted = 0
        self._last: deque[tuple[Any, Any]] = deque(
            maxlen=4 * self.size
        )  # exchanges of two passes: when their own part ended, and their end

    def exchange(self, send: Any, receive: Any) -> Arrival:
        """Enqueue both directions behind what the compute stream has so far."""
        ready = self._cuda.Event(disable_timing=True)
        ready.record(self.compute)
        self.stream.wait_event(ready)
        began = self.clock.mark(self.stream)
        sent = self._enqueue(send, receive)
        ended = self.clock.mark(self.stream)
        self._posted += 1
        self._last.append((sent or ended, ended))

        def finish() -> Any:
            self.compute.wait_event(ended)
            return ended

        return Arrival(int(send.nbytes), began, finish)

    def _enqueue(self, send: Any, receive: Any) -> Any:
        """Both directions, on the communication stream. An event between them, after which only the rank before is waited for, or None."""
        raise NotImplementedError

    def late(self) -> tuple[int, int]:
        """Whom the communication stream waits for, the rank before where it cannot tell, and how many exchanges have ended."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for left, (sent, ended) in zip(range(len(self._last), 0, -1), self._last, strict=True):
            if not self.clock.reached(ended):
                return before if sent is ended or self.clock.reached(sent) else after, self._posted - left
        return before, self._posted

    def scope(self) -> AbstractContextManager[Any]:
        """The compute stream as CuPy's current one."""
        stream: AbstractContextManager[Any] = self.compute
        return stream

    def captured(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """What `enqueue` puts on both streams as a CUDA graph; the function returned enqueues a replay. All ranks capture and replay.

        Marks within are no times any more. The graph goes before the transport is closed.
        """
        with self.compute:
            self.compute.begin_capture()
            enqueue()
            graph = self.compute.end_capture()
        self._last.clear()  # nobody may ask for events of a graph
        return lambda: graph.launch(self.compute)


#: Patience, in timeouts, for ranks that prepare: one of each machine compiles.
_PREPARING = 5


def agreed(talk: Control, prepare: Callable[[], T]) -> T:
    """What a rank's preparation returns, where none fails. Where one does all ranks end together: the first rank with a fault raises it, the
    others with the same one, or without one, raise Told."""
    made: list[T] = []
    fault = None
    try:
        made.append(prepare())
    except Fault as error:
        fault = error
    faults = talk.gather(fault, _PREPARING)
    raised = [each for each in faults if each]
    if not raised:
        return made[0]
    talk.close()  # in order: nobody is waited for
    if fault and str(fault) not in map(str, faults[: talk.rank]):
        raise fault
    raise left_to_another(raised[0])


def same(talk: Control, mine: Mapping[str, object], kind: type[Fault], hint: str) -> None:
    """End all ranks together where what one of them has is not what the first has: the first raises a fault of this kind that names both,
    the others Told. mine: texts and numbers by their names, in an order that all ranks have."""
    first, *others = talk.gather(dict(mine))
    for rank, theirs in enumerate(others, 1):
        for name in dict.fromkeys((*first, *theirs)):
            if (here := first.get(name)) != (there := theirs.get(name)):
                what = f"the ranks differ in {name}: {here} on rank 0{_at(0)}, {there} on rank {rank}{_at(rank)}"
                fault = kind(what, "the ranks of a ring compute parts of one problem with one program", hint)
                talk.close()
                raise left_to_another(fault) if talk.rank else fault


class Alone:
    """The control of a ring inside one process: there is nobody else."""

    rank, size = 0, 1

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        """The value."""
        return [value]

    def close(self, failed: bool = False) -> None:
        """Nothing to end."""


class Local:
    """A rank of a ring inside one process, where the ranks take turns: a message is a copy in the receiver's letter box."""

    engine = "copies in one process"

    def __init__(self, backend: Backend, rank: int, boxes: list[deque[Any]]) -> None:
        self.rank, self.size, self.clock, self._boxes = rank, len(boxes), clock_of(backend), boxes

    def register(self, buffers: Sequence[Any]) -> None:
        """Any memory will do."""

    def exchange(self, send: Any, receive: Any) -> Arrival:
        """Post a copy. The wait comes when the neighbour has had its turn."""
        began = self.clock.mark()
        self._boxes[(self.rank + 1) % self.size].append(send.copy())

        def finish() -> Any:
            receive[:] = self._boxes[self.rank].popleft()
            return self.clock.mark()

        return Arrival(send.nbytes, began, finish)

    def scope(self) -> AbstractContextManager[Any]:
        """All ranks share the current stream."""
        return nullcontext()

    def close(self, failed: bool = False) -> None:
        """Nothing to free."""


def local(backend: Backend, size: int) -> list[Local]:
    """The transports of a ring inside one process."""
    boxes: list[deque[Any]] = [deque() for _ in range(size)]
    return [Local(backend, rank, boxes) for rank in range(size)]
