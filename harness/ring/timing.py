"""What a ring took: marks of its steps become seconds, and those of all ranks become one time, that of the slowest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .rank import Rank, Span, run_together
from .transport import wait_for


@dataclass(frozen=True)
class Sample:
    """One pass on one rank, seconds: all of it, and of each step compute and communication; bytes sent in each step.

    spans: the parts of the steps. Their marks are seconds after a start that the ranks have in common, to some microseconds.
    """

    seconds: float
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    bytes: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class StepTime:
    """A step of a pass, the median of its runs and of the slowest rank. Messages run beside the launches of their step or the next.

    In a backward pass step 0 is all that a rank does for its own keys, before and after the others.
    """

    pass_: str
    step: int
    compute_ms: float
    communication_ms: float
    bytes: int


@dataclass(frozen=True)
class PassTime:
    """A pass of all ranks: seconds of each run, the slowest rank's; its steps; the part of communication hidden behind compute.

    lines: of each rank the spans of the last run; nothing where the time is predicted.
    """

    seconds: tuple[float, ...]
    steps: tuple[StepTime, ...]
    hidden: float | None
    lines: tuple[tuple[Span, ...], ...] = ()

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)


def run_pass(ranks: Sequence[Rank], pass_: str, count: int, timeout: float) -> list[list[Sample]]:
    """Run a pass `count` times, one after the other: for each rank of this process its samples. The device always has the next run queued,
    and no more, so that its queue never fills and the host can tell that it has stopped.

    Raises Stuck where the device has not come to the end of a run within timeout seconds after the run before.
    """
    clock = ranks[0].transport.clock
    if len(ranks) == 1:
        ranks[0].meet()  # ranks of one process need not
    marks, spans = [clock.mark()], []
    for _ in range(count):
        if len(marks) > 2:
            wait_for(ranks[0].transport, marks[-2], timeout)
        run_together([getattr(rank, pass_) for rank in ranks])
        marks.append(clock.mark())
        spans.append([list(rank.spans) for rank in ranks])
        for rank in ranks:
            rank.spans.clear()
    for mark in marks:
        wait_for(ranks[0].transport, mark, timeout)
    return [[_sample(clock, marks, i, spans[i][r], rank.partition.ranks) for i in range(count)] for r, rank in enumerate(ranks)]


def replay(rank: Rank, pass_: str, count: int, timeout: float) -> tuple[float, ...]:
    """Seconds of `count` replays of a pass as a CUDA graph, one after the other: what it takes where the host does not matter. It has run
    before. Raises Stuck as :func:`run_pass`, and what a transport without graphs raises."""
    transport: Any = rank.transport
    clock = transport.clock
    again = transport.captured(lambda: run_together([getattr(rank, pass_)]))
    rank.spans.clear()
    rank.meet()
    marks = [clock.mark()]
    for _ in range(count):
        if len(marks) > 2:
            wait_for(transport, marks[-2], timeout)
        again()
        marks.append(clock.mark())
    wait_for(transport, marks[-1], timeout)
    return tuple(clock.seconds(began, ended) for began, ended in pairwise(marks))


def _sample(clock: Any, marks: Sequence[Any], run: int, spans: Sequence[Span], steps: int) -> Sample:
    found = {"compute": [0.0] * steps, "communication": [0.0] * steps}
    sent = [0] * steps
    made = []
    for span in spans:
        found[span.stream][span.step % steps] += clock.seconds(span.began, span.ended)
        sent[span.step % steps] += span.bytes
        made.append(replace(span, began=clock.seconds(marks[0], span.began), ended=clock.seconds(marks[0], span.ended)))
    seconds = clock.seconds(marks[run], marks[run + 1])
    return Sample(seconds, tuple(found["compute"]), tuple(found["communication"]), tuple(sent), tuple(made))


def together(pass_: str, samples: Sequence[Sequence[Sample]]) -> PassTime:
    """The time of a pass from the samples of every rank: samples[rank][run]."""
    seconds = tuple(max(sample.seconds for sample in run) for run in zip(*samples, strict=True))
    steps = []
    for step in range(len(samples[0][0].compute)):
        compute = max(statistics.median(s.compute[step] for s in mine) for mine in samples)
        communication = max(statistics.median(s.communication[step] for s in mine) for mine in samples)
        steps.append(StepTime(pass_, step, compute * 1e3, communication * 1e3, max(mine[0].bytes[step] for mine in samples)))
    return PassTime(seconds, tuple(steps), _hidden(samples), tuple(mine[-1].spans for mine in samples))


def _hidden(samples: Sequence[Sequence[Sample]]) -> float | None:
    """Of the slowest rank: what compute and communication would take one after the other, beyond what both took, of communication."""
    shares = []
    for run in zip(*samples, strict=True):
        slowest = max(run, key=lambda sample: sample.seconds)
        communication = sum(slowest.communication)
        if communication:
            saved = sum(slowest.compute) + communication - slowest.seconds
            shares.append(max(0.0, min(saved, communication)) / communication)
    return statistics.median(shares) if shares else None


def predicted(samples: Sequence[Sequence[Sample]], overlap: bool, bandwidth: float) -> PassTime:
    """What ranks that took turns on one device would take side by side: each step the slowest rank's compute, beside the messages at
    `bandwidth` bytes a second (one after the other without overlap).

    K and V travel beside their own step, dK and dV beside the step behind theirs.
    """
    ranks, total = len(samples[0][0].compute), 0.0
    for step in range(ranks + 1):
        compute = max(statistics.median(_spent(sample, step) for sample in mine) for mine in samples)
        beside = (("K V", step), ("dK dV", step - 1))
        message = max(sum(s.bytes for s in mine[0].spans if (s.what, s.step) in beside) for mine in samples) / bandwidth
        total += max(compute, message) if overlap else compute + message
    steps = tuple(replace(each, communication_ms=each.bytes / bandwidth * 1e3) for each in together("", samples).steps)
    communication = sum(step.communication_ms for step in steps) * 1e-3
    saved = sum(step.compute_ms for step in steps) * 1e-3 + communication - total  # steps and their parts have medians of their own
    hidden = max(0.0, min(saved, communication)) / communication if communication else None
    return PassTime((total,) * len(samples[0]), steps, hidden)


def _spent(sample: Sample, step: int) -> float:
    return sum(float(span.ended - span.began) for span in sample.spans if span.stream == "compute" and span.step == step)
