"""Tasks in several processes that work at the same time, and take turns where one must have the machine to itself.

A worker says when it waits for its turn (Turns.alone). Its turn comes when no worker does anything else: each of them waits, has had its
turn or has no task. The turns of a round follow one another, then all go on. So while one is in its turn, no other process of the run
computes or launches, and what is prepared between two rounds is prepared by all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .sweep import MOST_JOBS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

#: What a worker says, before a value of its task's own kind.
WAITS, RESTS, DONE, RAISED = "waits", "rests", "done", "raised"


def in_rounds(tasks: Sequence[T], jobs: int, size: Callable[[T], float]) -> list[T]:
    """The tasks by groups of `jobs` of about one size, for a round begins when its largest task is prepared. The groups come in the order of
    their first tasks: a run that is ended early has some of all sizes."""
    by_size = sorted(range(len(tasks)), key=lambda i: -size(tasks[i]))
    groups = [by_size[i : i + jobs] for i in range(0, len(tasks), jobs)]
    return [tasks[i] for group in sorted(groups, key=min) for i in group]


@dataclass(frozen=True)
class Turns:
    """A worker's side. settle waits until nothing of this process is left on the device."""

    pipe: Connection[Any, Any]
    settle: Callable[[], None]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other worker works inside this block."""
        self.settle()
        self.pipe.send((WAITS, None))
        self.pipe.recv()
        try:
            yield
        finally:
            self.pipe.send((RESTS, None))
            self.pipe.recv()


def serve(pipe: Connection[Any, Any], work: Callable[[Any], Iterator[tuple[str, Any]]]) -> None:
    """In a worker: do each task that the pipe gives, and send what `work` yields, until the other end is closed.

    An exception is sent, and ends the worker.
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
        pipe.send((DONE, None))


@dataclass
class _Worker(Generic[T]):
    """task: what it does; None: nothing. waits: for its turn, or after it for the end of the round."""

    held: ExitStack
    pipe: Connection[Any, Any]
    task: T | None = None
    waits: bool = False


@dataclass
class Share(Generic[T]):
    """Tasks shared among `jobs` workers.

    start: a worker's process, as the pipe to it. told is given what a task says. ended is told that a worker ended in a task without an
    exception, and gives the tasks to do in its place. size and room: tasks together are as large as `room` at most, or one alone.
    """

    start: Callable[[], AbstractContextManager[Connection[Any, Any]]]
    told: Callable[[T, str, Any], None]
    ended: Callable[[T], Sequence[T]]
    size: Callable[[T], float] = lambda task: 0.0
    room: float = 0.0
    _workers: list[_Worker[T]] = field(default_factory=list)
    _left: deque[T] = field(default_factory=deque)

    def run(self, tasks: Sequence[T], jobs: int) -> None:
        """Do all tasks. Raises what a task raised."""
        from multiprocessing.connection import wait

        self._left.extend(tasks)
        try:
            while True:
                while self._left and len(self._workers) < jobs:
                    self._hire()
                self._give()
                busy = [each for each in self._workers if each.task is not None]
                if not busy:
                    return
                if all(each.waits for each in busy):
                    self._round(busy)
                    continue
                ready = wait([each.pipe for each in busy if not each.waits])
                for each in busy:
                    if each.pipe in ready:
                        self._hear(each)
        finally:
            with ThreadPoolExecutor(MOST_JOBS) as pool:  # they end at the same time
                list(pool.map(lambda each: each.held.close(), self._workers))

    def _hire(self) -> None:
        held = ExitStack()
        self._workers.append(_Worker(held, held.enter_context(self.start())))

    def _give(self) -> None:
        """Give tasks to those that have none, in the order of the tasks, as many as there is room for."""
        for each in self._workers:
            if each.task is None and self._left:
                taken = [self.size(other.task) for other in self._workers if other.task is not None]
                if taken and sum(taken) + self.size(self._left[0]) > self.room:
                    return
                each.task = self._left.popleft()
                _send(each.pipe, each.task)

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
            worker.waits = True
        elif kind == DONE:
            worker.task = None
        elif kind != RESTS:
            self.told(task, kind, value)
        return str(kind)

    def _round(self, waiting: Sequence[_Worker[T]]) -> None:
        """One turn after another; then all go on. Who ends in its turn is replaced after the round."""
        for each in waiting:
            _send(each.pipe, None)
            while self._hear(each) not in (RESTS, ""):
                pass
        for each in waiting:
            if each in self._workers:
                each.waits = False
                _send(each.pipe, None)


def _send(pipe: Connection[Any, Any], value: object) -> None:
    """To a worker that may have ended, which is heard later."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(value)
