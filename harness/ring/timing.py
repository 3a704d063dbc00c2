"""What a ring took: marks of its steps become seconds, and those of all ranks become one time, that of the slowest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .rank import Rank, run_together
from .transport import wait_for


@dataclass(frozen=True)
class Sample:
    """One pass on one rank, seconds: all of it, and of each step compute and communication; bytes sent in each step."""

    seconds: float
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class StepTime:
    """A step of a pass, the median of its runs and of the slowest rank. Messages run beside the launches of their step or the next."""

    pass_: str
    step: int
    compute_ms: float
    communication_ms: float
    bytes: int


@dataclass(frozen=True)
class PassTime:
    """A pass of all ranks: seconds of each run, the slowest rank's; its steps; the part of communication hidden behind compute."""

    seconds: tuple[float, ...]
    steps: tuple[StepTime, ...]
    hidden: float | None

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)


def run_pass(ranks: Sequence[Rank], pass_: str, count: int, timeout: float) -> list[list[Sample]]:
    """Run a pass `count` times, one behind the other without a wait between, then wait: for each rank of this process its samples.

    Raises Stuck where the device has not come to the end of a run within timeout seconds after the run before.
    """
    clock = ranks[0].transport.clock
    marks, spans = [clock.mark()], []
    for _ in range(count):
        run_together([getattr(rank, pass_) for rank in ranks])
        marks.append(clock.mark())
        spans.append([list(rank.spans) for rank in ranks])
        for rank in ranks:
            rank.spans.clear()
    for mark in marks:
        wait_for(ranks[0].transport, mark, timeout)
    return [
        [_sample(clock, marks[i], marks[i + 1], spans[i][r], rank.partition.ranks) for i in range(count)] for r, rank in enumerate(ranks)
    ]


def _sample(clock: Any, began: Any, ended: Any, spans: Sequence[Any], steps: int) -> Sample:
    found = {"compute": [0.0] * steps, "communication": [0.0] * steps}
    sent = [0] * steps
    for span in spans:
        found[span.kind][span.step] += clock.seconds(span.began, span.ended)
        sent[span.step] += span.bytes
    return Sample(clock.seconds(began, ended), tuple(found["compute"]), tuple(found["communication"]), tuple(sent))


def together(pass_: str, samples: Sequence[Sequence[Sample]]) -> PassTime:
    """The time of a pass from the samples of every rank: samples[rank][run]."""
    seconds = tuple(max(sample.seconds for sample in run) for run in zip(*samples, strict=True))
    steps = []
    for step in range(len(samples[0][0].compute)):
        compute = max(statistics.median(s.compute[step] for s in mine) for mine in samples)
        communication = max(statistics.median(s.communication[step] for s in mine) for mine in samples)
        steps.append(StepTime(pass_, step, compute * 1e3, communication * 1e3, max(mine[0].bytes[step] for mine in samples)))
    return PassTime(seconds, tuple(steps), _hidden(samples))


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
    `bandwidth` bytes a second (one after the other without overlap); a last message has nothing to hide behind."""
    (first, *_), total, carried = samples, 0.0, 0.0
    steps = together("", samples).steps
    made = []
    for step, each in enumerate(steps):
        message = max(mine[0].bytes[step] for mine in samples) / bandwidth
        compute = each.compute_ms * 1e-3
        total += max(compute, carried) if overlap else compute + carried
        carried = message
        made.append(StepTime("", step, each.compute_ms, message * 1e3, each.bytes))
    total += carried
    communication = sum(step.communication_ms for step in made) * 1e-3
    hidden = (sum(step.compute_ms for step in made) * 1e-3 + communication - total) / communication if communication else None
    return PassTime((total,) * len(first), tuple(made), hidden)
