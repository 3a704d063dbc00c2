"""Honest times: samples of kernels and peers taken in turn, A B A B, each warm or cold, until they are steady enough.

A sample is one run on the device, between two events in the stream that runs it. Samples of a turn are enqueued one behind the
other, and where the host is slower than the device it is kept busy meanwhile (`Backend.before`), so a sample holds no launch
gap: it is what the device did. What the host needs is measured apart (`call`). Every sample is kept; rates are Problem's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..files import Json

#: Below this part of the device's greatest clock a run was throttled, whatever the driver says (as nvbench has it).
SLOW_CLOCK = 0.75
#: NVML's throttle reasons that are faults of the machine: hardware slowdown, thermal (software, hardware), power brake.
FAULTS = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
TIMINGS = ("warm", "cold")


class Timed(Protocol):
    """What can be measured: a kernel or a peer, its tensors in place."""

    def enqueue(self) -> Callable[[], float]:
        """Enqueue a run between two events in its own stream; what is returned waits for it and gives device seconds."""
        ...

    def call(self) -> float:
        """Host seconds to enqueue one run (which has ended when this returns)."""
        ...

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """Capture the run as a CUDA graph: the same as enqueue by replaying it. None where it cannot be captured."""
        ...


@dataclass(frozen=True)
class Policy:
    """When enough samples were taken of a contender: at least min_samples and min_seconds, and then noise; or max_seconds.

    noise is the standard error of the median (1.25 MAD-sigma / sqrt(n)) relative to it. max_seconds ends the turns of a slow or
    noisy contender: a run of a second, whose noise is tiny beside it, is measured three times. warm_up seconds run before the
    first sample; a run of `slow` seconds or more warms up by its first call, which says how long it takes besides.
    Samples of one turn are alike (few blocks, say, stay on the multiprocessors where the first run put them), so where the medians
    of the turns disagree by more than `uneven` (standard error of their median, relative to it), turns go on for `patience` seconds.
    A turn takes `turn` seconds of samples one after the other without a pause, after `settle` seconds of the same that are not
    kept, so that a contender is measured at the clocks its own power draw leaves it, not at its neighbour's or an idle GPU's.
    """

    warm_up: float = 0.05
    settle: float = 0.12
    turn: float = 0.06
    min_turns: int = 2
    min_samples: int = 20
    max_samples: int = 2000
    min_seconds: float = 0.1
    noise: float = 0.002
    max_seconds: float = 1.0
    uneven: float = 0.004
    patience: float = 5.0
    slow: float = 0.1


#: A GPU is steady and its runs are short; a CPU shares its cores with everyone and shows only that a kernel works.
POLICY = {
    "cuda": Policy(),
    "cpu": Policy(warm_up=0.0, settle=0.0, turn=0.0, min_turns=1, min_samples=5, max_samples=5, min_seconds=0.0, noise=1.0),
}


@dataclass(frozen=True)
class Timing:
    """The samples of one contender, `turns` of them at a time (empty: not taken in turns). launch is "direct" or "graph"; throttled
    says why, or is empty; states are NVML's."""

    timing: str
    seconds: tuple[float, ...]
    call_seconds: tuple[float, ...]
    launch: str = "direct"
    throttled: str = ""
    before: Json = field(default_factory=dict)
    after: Json = field(default_factory=dict)
    turns: tuple[int, ...] = ()

    @property
    def median_ms(self) -> float:
        """The middle of the samples."""
        return statistics.median(self.seconds) * 1e3

    @property
    def p20_ms(self) -> float:
        """A fifth of the samples are faster."""
        return float(np.percentile(self.seconds, 20)) * 1e3

    @property
    def p80_ms(self) -> float:
        """A fifth of the samples are slower."""
        return float(np.percentile(self.seconds, 80)) * 1e3

    @property
    def call_ms(self) -> float:
        """Median milliseconds the host needs to enqueue a run."""
        return statistics.median(self.call_seconds) * 1e3


def together(timings: Sequence[Timing]) -> Timing:
    """The timing of passes run one after the other: sample by sample, the sums (as many as all of them have)."""
    first = timings[0]
    if len(timings) == 1:
        return first
    return Timing(
        first.timing,
        tuple(sum(each) for each in zip(*(t.seconds for t in timings), strict=False)),
        tuple(sum(each) for each in zip(*(t.call_seconds for t in timings), strict=False)),
        "graph" if all(t.launch == "graph" for t in timings) else "direct",
        "; ".join(dict.fromkeys(t.throttled for t in timings if t.throttled)),
        first.before,
        timings[-1].after,
    )


class Stage(Protocol):
    """What measure needs of a backend (harness.backends.Backend has it)."""

    def before(self, seconds: float, cold: bool) -> None:
        """Flush the L2 cache where cold, then keep the device busy for at least so long, without waiting for it."""
        ...

    def state(self) -> Json:
        """Clocks, power, temperature and throttle reasons now; empty on a CPU."""
        ...


def measure(contenders: Mapping[str, Timed], stage: Stage, timing: str, policy: Policy) -> dict[str, Timing]:
    """Take samples of all contenders in turns until each is steady.

    A run that the host takes more than a quarter of its device time to enqueue is replayed from a CUDA graph where it can be
    captured, since that is how anyone who cares would launch it; the Timing says so.
    """
    before = stage.state()
    runs = {name: _Run.ready(contender, stage, policy) for name, contender in contenders.items()}
    turns: dict[str, list[list[float]]] = {name: [] for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    waiting = list(runs)
    while waiting:
        for name in list(waiting):
            start = time.perf_counter()
            runs[name].turn(stage, timing == "cold", policy.settle, 0)
            turns[name].append(runs[name].turn(stage, timing == "cold", policy.turn, 1))
            spent[name] += time.perf_counter() - start
            if _enough(turns[name], spent[name], policy):
                waiting.remove(name)
    after = stage.state()
    throttled = throttling(before, after)
    return {
        name: Timing(
            timing,
            tuple(s for turn in turns[name] for s in turn),
            tuple(r.calls),
            r.launch,
            throttled,
            before,
            after,
            tuple(len(turn) for turn in turns[name]),
        )
        for name, r in runs.items()
    }


@dataclass(frozen=True)
class _Run:
    """A contender warmed up: how it is launched, what a call costs the host and, about, the device."""

    enqueue: Callable[[], Callable[[], float]]
    launch: str
    calls: tuple[float, ...]
    device: float

    @classmethod
    def ready(cls, contender: Timed, stage: Stage, policy: Policy) -> _Run:
        start = time.perf_counter()
        first = contender.call()  # what the first run does besides, compiling say, is nobody's time
        took = time.perf_counter() - start
        if took > policy.slow and first < 0.1 * took:  # it did not compile: the device took that long
            return cls(contender.enqueue, "direct", (first,), took)
        start, made = time.perf_counter(), list[float]()
        while len(made) < min(10, policy.min_samples) and (not made or time.perf_counter() - start < policy.slow):
            made.append(contender.call())
        calls = tuple(made)
        start, seconds = time.perf_counter(), list[float]()
        while not seconds or time.perf_counter() - start < policy.warm_up:
            stage.before(_lead(calls), False)
            seconds.append(contender.enqueue()())
        found = cls(contender.enqueue, "direct", calls, statistics.median(seconds))
        # Far from the limit on purpose: a contender near it would be launched one way in one run and the other way in the next.
        if statistics.median(calls) > 0.25 * found.device and (replay := contender.graph()):
            replay()()
            return cls(replay, "graph", calls, found.device)
        return found

    def turn(self, stage: Stage, cold: bool, wanted: float, least: int) -> list[float]:
        """Samples enqueued one behind the other for about `wanted` device seconds, at least `least` and at most 200."""
        waiting = []
        host = 2e-5 if self.launch == "graph" else statistics.median(self.calls)
        for i in range(max(least, min(200, round(wanted / self.device)))):
            # The queue empties where the host is slower than the device: then, and at first, the device is kept busy meanwhile.
            stage.before(_lead(self.calls) if i == 0 or host > 0.5 * self.device else 0.0, cold)
            waiting.append(self.enqueue())
        return [finish() for finish in waiting]


def _lead(calls: Sequence[float]) -> float:
    """Seconds to keep the device busy so that the host is done enqueueing before the first event."""
    return 2 * statistics.median(calls) + 2e-5


def _enough(turns: Sequence[Sequence[float]], spent: float, policy: Policy) -> bool:
    seconds = [sample for turn in turns for sample in turn]
    uneven = len(turns) >= 3 and _noise([statistics.median(turn) for turn in turns]) > policy.uneven
    if len(seconds) >= policy.max_samples or (spent > (policy.patience if uneven else policy.max_seconds) and len(seconds) >= 3):
        return True
    if uneven or len(seconds) < policy.min_samples or len(turns) < policy.min_turns or sum(seconds) < policy.min_seconds:
        return False
    return _noise(seconds) <= policy.noise


def _noise(values: Sequence[float]) -> float:
    """The standard error of the median, from the median distance to it, relative to it."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median([abs(value - middle) for value in values])
    return float(1.25 * spread / len(values) ** 0.5 / middle)


def throttling(before: Json, after: Json) -> str:
    """Why the device was held back during a measurement, or an empty text. Running into its power limit at full clocks is not."""
    found = []
    for state in (before, after):
        reasons = state.get("throttle_reasons") or 0
        found += [text for bit, text in FAULTS.items() if reasons & bit]
        clock, most = state.get("sm_clock_mhz"), state.get("sm_clock_max_mhz")
        if state is after and clock and most and clock < SLOW_CLOCK * most:
            found.append(f"{clock} of {most} MHz")
    return ", ".join(dict.fromkeys(found))
