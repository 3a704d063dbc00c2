"""One rank of the ring: the launches and messages of a forward or backward pass, step by step.

Forward: K and V travel from rank to rank; the O and logsumexp of each step are merged into float32 sums. Backward: P and delta are
those of the whole problem, since the kernel reads the O and logsumexp of all keys; dQ is summed here. dK and dV travel behind K and V,
one hop later, from the first rank that they visit, and come home after the last. The rank's own keys are done in two parts: with its first
queries while the first K and V arrive, with its other queries while its dK and dV come home. So no message lacks work to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..backends import Backend
from ..check.contender import Contender
from ..kernel import ADD, MERGE, ROUND
from ..partition import Partition
from .memory import Block, Memory
from .mpi import Mpi, deadline
from .program import Program, Programs
from .transport import Arrival, Hangs, Transport

_WHAT = {MERGE: "merge", ADD: "merge", ROUND: "round"}


@dataclass(frozen=True)
class Span:
    """A part of a step on a stream, "compute" or "communication", between two marks of the transport's clock.

    what: "attention", "merge" (also additions), "clear" or "round"; of messages "K V" or "dK dV". A backward pass has `ranks` + 1 steps:
    in the last the rank has its own keys again, as in step 0.
    """

    stream: str
    step: int
    what: str
    began: Any
    ended: Any
    bytes: int = 0


class Rank:
    """A rank's passes. inputs: the whole problem's host storage arrays (Memory).

    Between two `yield` of forward() and backward() it does what it can without waiting for a neighbour: in one process the ranks
    take turns there, elsewhere nothing happens.
    """

    def __init__(
        self,
        backend: Backend,
        partition: Partition,
        contender: Contender,
        inputs: Mapping[str, Any],
        transport: Transport,
        overlap: bool = True,
    ) -> None:
        self.backend, self.partition, self.transport = backend, partition, transport
        self.rank, self.overlap = transport.rank, overlap
        self.spans: list[Span] = []
        self.memory = Memory(backend, partition, contender, self.rank, inputs)
        programs = Programs(backend, contender, self.memory)
        merged = np.zeros(self.memory.q_rows, np.bool_)
        for task in [task for step in range(partition.ranks) for task in partition.tasks(self.rank, step)]:
            merged[task.q_first : task.q_first + task.problem.seq_q] = True
        self._all_merged = bool(merged.all())
        self._forward = [programs.forward(step) for step in range(partition.ranks)]
        self._forward_end = programs.forward_end()
        if "dO" in inputs:
            self._backward = [programs.backward(step) for step in range(1, partition.ranks)]
            self._first, self._later = programs.backward_own()
            self._backward_end = programs.backward_end()
        transport.register([block.buffer for block in (*self.memory.kv[1:], *self.memory.sums)])

    @property
    def device_bytes(self) -> int:
        """Device memory the tensors and workspaces take."""
        return self.memory.bytes

    def outputs(self, pass_: str) -> dict[str, Any]:
        """As Memory.outputs."""
        return self.memory.outputs(pass_)

    # -- the passes ---------------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[None]:
        """Enqueue the pass. It ends with O and logsumexp of this rank's rows over all keys. Raises as launches and exchanges do."""
        sum_ = () if self._all_merged else ((self.memory.sum, self.memory.q_rows, 0),)  # the first merge of a row reads no sum
        self._clear(0, *sum_, (self.memory.lse, self.memory.q_rows, -np.inf))
        for step in range(self.partition.ranks):
            arrived = self._pass_on_keys(step) if self.overlap else None
            self._compute(step, self._forward[step])
            arrived = arrived or self._pass_on_keys(step)
            yield
            self._wait(arrived, step, "K V")
        self._compute(self.partition.ranks - 1, self._forward_end)

    def backward(self) -> Iterator[None]:
        """Enqueue the pass, after forward(). It ends with dQ, and dK and dV of this rank's keys, over all queries."""
        ranks, gradients = self.partition.ranks, None
        arrived = self._pass_on_keys(0) if self.overlap else None
        self._clear(
            0, (self.memory.sum, self.memory.q_rows, 0), (*self.memory.summed(1), 0)
        )  # the sums of the first keys that visit, or a lone rank's own
        for launches, _ in self._first:
            self._compute(0, launches)
        arrived = arrived or self._pass_on_keys(0)
        yield
        self._wait(arrived, 0, "K V")
        for step in range(1, ranks):
            arrived = self._pass_on_keys(step) if self.overlap else None
            for launches, additions in self._backward[step - 1]:
                self._compute(step, launches)
                self._wait(gradients, step - 1, "dK dV")
                self._compute(step, additions)
            self._wait(gradients, step - 1, "dK dV")
            gradients = self._pass_on(self.memory.summed(step), self.memory.summed(step + 1))
            if not self.overlap:
                yield
                self._wait(gradients, step, "dK dV")
            arrived = arrived or self._pass_on_keys(step)
            yield
            self._wait(arrived, step, "K V")
        for launches, additions in self._later:
            self._compute(ranks, launches)
            self._wait(gradients, ranks - 1, "dK dV")
            self._compute(ranks, additions)
        self._wait(gradients, ranks - 1, "dK dV")
        for _, additions in self._first:
            self._compute(ranks, additions)
        self._compute(ranks, self._backward_end)

    def meet(self) -> None:
        """A byte all the way round, enqueued: what follows begins on all ranks at the same time. It goes where K and V will arrive."""
        for _ in range(1, self.transport.size):
            self.transport.exchange(self.memory.kv[0].buffer[:1], self.memory.kv[1].buffer[:1]).wait()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _pass_on_keys(self, step: int) -> Arrival | None:
        return self._pass_on(self.memory.held(step), self.memory.held(step + 1)) if step + 1 < self.partition.ranks else None

    def _pass_on(self, mine: tuple[Block, int], theirs: tuple[Block, int]) -> Arrival:
        return self.transport.exchange(mine[0].part(mine[1]), theirs[0].part(theirs[1]))

    def _wait(self, arrival: Arrival | None, step: int, what: str) -> None:
        if arrival and arrival.ended is None:
            arrival.wait()
            self.spans.append(Span("communication", step, what, arrival.began, arrival.ended, arrival.bytes))

    # -- launches -----------------------------------------------------------------------------------------------------

    def _compute(self, step: int, program: Program) -> None:
        mark = self.transport.clock.mark() if program else None
        for path, launches in groupby(program, lambda each: each[0].kernel.path):
            for loaded, steps in launches:
                with self._limit():
                    self.backend.submit(loaded, steps)
            began, mark = mark, self.transport.clock.mark()
            self.spans.append(Span("compute", step, _WHAT.get(path, "attention"), began, mark))

    def _limit(self) -> AbstractContextManager[None]:
        """Between CPUs a launch has the limit of a wait: where all ranks hang in theirs, none waits for another."""
        if not isinstance(self.transport, Mpi):
            return nullcontext()
        return deadline(self.transport.timeout, Hangs(self.rank, self.transport.timeout))

    def _clear(self, step: int, *what: tuple[Block, int, float]) -> None:
        """Fill so many rows of blocks with a value."""
        began = self.transport.clock.mark()
        for block, count, value in what:
            if count:
                block.array(count)[...] = value
        self.spans.append(Span("compute", step, "clear", began, self.transport.clock.mark()))


def run_together(passes: list[Callable[[], Iterator[None]]]) -> None:
    """Let ranks of one process take turns to the end of a pass each."""
    running = [start() for start in passes]
    while running:
        running = [each for each in running if next(each, "ended") is None]
