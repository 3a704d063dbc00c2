"""Tasks in several processes that work at the same time, and take turns where one must have the machine to itself.

A worker says when it waits for its turn (Turns.alone). Its turn comes when no worker does anything else: each of them waits, has had its
turn or has no task. The turns of a round follow one another, then all go on. So while one is in its turn, no other process of the run
computes or launches, and what is prepared between two rounds is prepared by all of them at once. A worker that waits holds less memory than
one that works, and says how much: so a round has a problem of every worker, though few of the large ones are prepared at the same time.
So does a worker without a task: what its libraries keep for the next one is memory that another cannot have.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .sweep import MOST_JOBS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

#: What a worker says, before a value of its task's own kind.
WAITS, RESTS, DONE, RAISED = "waits", "rests", "done", "raised"


def in_rounds(tasks: Sequence[T], jobs: int, size: Callable[[T], float]) -> list[T]:
    """The tasks in the order given, but in each `jobs` of them the largest first: the others are prepared beside and after it. A run that is
    ended early has some of all sizes."""
    return [task for i in range(0, len(tasks), jobs) for task in sorted(tasks[i : i + jobs], key=lambda task: -size(task))]


@dataclass(frozen=True)
class Turns:
    """A worker's side. settle waits until nothing of this process is left on the device, frees what it can, and gives the size of the rest."""

    pipe: Connection[Any, Any]
    settle: Callable[[], float]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other worker works inside this block. Ctrl-C ends it at once: who gives turns may be gone by then."""
        self.pipe.send((WAITS, self.settle()))
        self.pipe.recv()
        try:
            yield
        except Exception:
            self._rest()
            raise
        self._rest()

    def _rest(self) -> None:
        self.pipe.send((RESTS, None))
        self.pipe.recv()


def serve(pipe: Connection[Any, Any], work: Callable[[Any], Iterator[tuple[str, Any]]], settle: Callable[[], float]) -> None:
    """In a worker: do each task that the pipe gives, and send what `work` yields, until the other end is closed.

    An exception is sent, and ends the worker. settle: as for Turns, at the end of a task.
    """
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            for said in work(task):
                pipe.send(said)
        except Exception as error:
            pipe.send((RAISED, error))
            return
        pipe.send((DONE, settle()))


@dataclass
class _Worker(Generic[T]):
    """task: what it does; None: nothing. holds: the size of what it holds now. waits: for its turn. rests: it had it, and waits for room."""

    held: ExitStack
    pipe: Connection[Any, Any]
    task: T | None = None
    holds: float = 0.0
    waits: bool = False
    rests: bool = False


@dataclass
class Spent:
    """Where the time of a run went. seconds: of all. in_rounds: of them, when one worker had the machine to itself; in the rest tasks were
    prepared. rounds, turns: how many. idle: the most that a worker without a task held, in the unit of sizes."""

    seconds: float = 0.0
    in_rounds: float = 0.0
    rounds: int = 0
    turns: int = 0
    idle: float = 0.0


@dataclass
class Share(Generic[T]):
    """Tasks shared among `jobs` workers.

    start: a worker's process, as the pipe to it. told is given what a task says. ended is told that a worker ended in a task without an
    exception, and gives the tasks to do in its place. size and room: tasks under way are together as large as `room` at most, or one alone;
    one that waits is as large as it says. spent: filled by run().
    """

    start: Callable[[], AbstractContextManager[Connection[Any, Any]]]
    told: Callable[[T, str, Any], None]
    ended: Callable[[T], Sequence[T]]
    size: Callable[[T], float] = lambda task: 0.0
    room: float = math.inf
    spent: Spent = field(default_factory=Spent)
    _workers: list[_Worker[T]] = field(default_factory=list)
    _left: deque[T] = field(default_factory=deque)

    def run(self, tasks: Sequence[T], jobs: int) -> None:
        """Do all tasks. Raises what a task raised."""
        from multiprocessing.connection import wait

        self._left.extend(tasks)
        began = time.monotonic()
        try:
            while True:
                while self._left and len(self._workers) < jobs:
                    self._hire()
                self._go_on()
                self._give(jobs)
                busy = [each for each in self._workers if each.task is not None]
                if not busy:
                    return
                if all(each.waits for each in busy):
                    self._round(busy)
                    continue
                ready = wait([each.pipe for each in busy if not each.waits and not each.rests])
                for each in busy:
                    if each.pipe in ready:
                        self._hear(each)
        finally:
            self.spent.seconds = time.monotonic() - began
            with ThreadPoolExecutor(MOST_JOBS) as pool:  # they end at the same time
                list(pool.map(lambda each: each.held.close(), self._workers))

    def again(self, task: T) -> None:
        """Do a task that was told to be done otherwise, behind all others."""
        self._left.append(task)

    def _hire(self) -> None:
        held = ExitStack()
        self._workers.append(_Worker(held, held.enter_context(self.start())))

    def _fits(self, task: T, holds: float, beside: Iterable[_Worker[T]]) -> bool:
        """Whether there is room for a task of a worker that holds so much now. Where nobody is beside it there must be."""
        return not any(beside) or sum(each.holds for each in self._workers) - holds + self.size(task) <= self.room

    def _go_on(self) -> None:
        """Those that had their turn go on, as many as there is room for; one beside those that wait in any case."""
        for each in self._workers:
            works = (other for other in self._workers if other.task is not None and not other.waits and not other.rests)
            if each.rests and each.task is not None and self._fits(each.task, each.holds, works):
                each.rests, each.holds = False, self.size(each.task)
                _send(each.pipe, None)

    def _give(self, ahead: int) -> None:
        """Give tasks to those that have none: the first that there is room for, of so many. What has none waits for the round, in which
        those that wait would else hold more than there is."""
        for each in self._workers:
            if each.task is not None or any(other.rests for other in self._workers):
                continue
            busy = [other for other in self._workers if other.task is not None]
            found = next((i for i, task in enumerate(islice(self._left, ahead)) if self._fits(task, each.holds, busy)), None)
            if found is None:
                return
            task = self._left[found]
            del self._left[found]
            each.task, each.holds = task, self.size(task)
            _send(each.pipe, task)

    def _hear(self, worker: _Worker[T]) -> str:
        """What a worker says next, after it was dealt with; empty where the worker has ended."""
        task = worker.task
        assert task is not None
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.held.close()
            self._left.extendleft(reversed(self.ended(task)))
            return ""
        if kind == RAISED:
            raise value
        if kind == WAITS:
            worker.waits, worker.holds = True, value
        elif kind == RESTS:
            worker.waits, worker.rests = False, True
        elif kind == DONE:
            worker.task, worker.holds = None, value
            self.spent.idle = max(self.spent.idle, value)
        else:
            self.told(task, kind, value)
        return str(kind)

    def _round(self, waiting: Sequence[_Worker[T]]) -> None:
        """One turn after another. Who ends in its turn is replaced after the round."""
        began = time.monotonic()
        for each in waiting:
            _send(each.pipe, None)
            while self._hear(each) not in (RESTS, ""):
                pass
        self.spent.in_rounds += time.monotonic() - began
        self.spent.rounds += 1
        self.spent.turns += len(waiting)


def _send(pipe: Connection[Any, Any], value: object) -> None:
    """To a worker that may have ended, which is heard later."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(value)
