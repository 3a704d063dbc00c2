"""Timing: samples of kernels and peers in interleaved turns, A B A B, warm or cold, until the median is steady.

A sample is one run on the device, between two events in the stream that runs it. The samples of a turn are enqueued back to back. Where
the host enqueues more slowly than the device runs, a spinning kernel keeps the device busy meanwhile (`Backend.before`), so a sample has
no launch gap in it. nvbench blocks the stream for the same reason (github.com/NVIDIA/nvbench, cold measurements), and its stopping
criterion, throttling check and L2 flush are the model of those here. The host's time is measured apart (`call`). No sample is dropped.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ..files import Json
from .judged import Judged, Watch
from .judged import Timed as Timed

#: A run at less than this part of the device's maximum SM clock was throttled, whatever the driver reports (nvbench's default).
SLOW_CLOCK = 0.75
#: NVML's clock event reasons that are faults of the machine: hardware slowdown, thermal (software, hardware), power brake.
FAULTS = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
#: NVML's clock event reason of a GPU at its power limit.
POWER_CAP = 0x4
TIMINGS = ("warm", "cold", "burst")


#: Seconds that are asked for end at so many samples: of a run of 10 us there would be millions.
MOST_ASKED = 20_000


@dataclass(frozen=True)
class Policy:
    """When a contender has enough samples. Times are in seconds.

    Sampling stops at noise <= `noise` once there are min_samples samples, min_turns turns and min_seconds of device time; at max_samples;
    or after max_seconds with three samples or more. Noise is the relative standard error of the median, 1.25 * 1.4826 * MAD / sqrt(n) /
    median (for normal samples the standard error of the median is sqrt(pi / 2) = 1.25 times that of the mean, and 1.4826 MAD estimates
    their standard deviation).

    A turn takes `turn` seconds of samples back to back. `settle` seconds of the same run before it and are not kept: a contender is
    measured at the clocks that its own power draw allows, not at those of the contender before it or of an idle GPU. The samples of one
    turn are correlated: few blocks, say, stay on the multiprocessors where the first run put them. Where the noise of the turns' medians
    exceeds `uneven`, turns go on for `patience` seconds.

    Where `brief` is given, a contender that has settled once and is not held by the power limit settles for `brief` seconds from then on,
    and one that is held by it for `held` seconds, the first time too.

    `warm_up` seconds run before the first sample. A run of `slow` seconds or more is warm after its first call. `apart` is the factor
    between the times on new and on repeated inputs (judged.Watch) that is looked into.

    A contender that took `far` times as long as the fastest one has enough after one turn of min_samples.

    `asked_samples` and `asked_seconds` of device time are taken whatever the noise and the limits above are, the seconds in at most
    MOST_ASKED samples.
    """

    warm_up: float = 0.05
    settle: float = 0.12
    brief: float | None = None
    held: float = 0.12
    turn: float = 0.1
    min_turns: int = 2
    min_samples: int = 20
    max_samples: int = 2000
    min_seconds: float = 0.1
    noise: float = 0.002
    max_seconds: float = 1.0
    uneven: float = 0.004
    patience: float = 3.0
    slow: float = 0.1
    apart: float = 1.25
    far: float = math.inf
    asked_samples: int = 0
    asked_seconds: float = 0.0


#: A GPU's times are steady and short. A CPU's cores are shared, and its times show only that a kernel works.
POLICY = {
    "cuda": Policy(),
    "cpu": Policy(warm_up=0.0, settle=0.0, turn=0.0, min_turns=1, min_samples=5, max_samples=5, min_seconds=0.0, noise=1.0, apart=2.0),
}
#: On a GPU, of a sweep of hundreds of problems: their distribution is asked for, not one of them. Contenders that the power limit holds settle
#: as by POLICY, the others less: who is behind one that draws less power gains 5 to 8 % for some 100 ms (experiments/mixed/settle.txt, worst.txt).
MANY = Policy(
    warm_up=0.01,
    settle=0.04,
    brief=0.01,
    turn=0.03,
    min_samples=8,
    min_seconds=0.01,
    max_samples=1000,
    noise=0.004,
    uneven=0.01,
    max_seconds=0.4,
    patience=0.8,
    far=1.25,
)


class Energy(NamedTuple):
    """What a contender takes while it runs alone, back to back: millijoules a run, mean watts, the median of the SM clock in MHz.

    The names are those of results.csv.
    """

    energy_mj: float
    power_w: float
    sm_clock_mhz: float

    @classmethod
    def together(cls, parts: Sequence[Energy]) -> Energy:
        """Runs one after the other as one: sums of energy and time, and the mean of the clock over the time."""
        taken, seconds = sum(part.energy_mj for part in parts), [part.energy_mj / part.power_w / 1e3 for part in parts]
        clock = sum(part.sm_clock_mhz * each for part, each in zip(parts, seconds, strict=True)) / sum(seconds)
        return cls(taken, taken / sum(seconds) / 1e3, clock)


@dataclass(frozen=True)
class Timing:
    """The samples of one contender: device seconds, and the host seconds of calls.

    timing: "warm", "cold" (L2 flushed before each sample), "burst" (after a rest), or "energy", which has no samples. launch: "direct" or
    "graph". throttled: why the device was throttled, or empty. before, after: the backend's state around the measurement. turns: the
    samples of each turn; empty where there were no turns. broken: the rule that a launch broke while it was timed (judged.py), or empty;
    such samples are no speed. energy: of alone.py.
    """

    timing: str
    seconds: tuple[float, ...]
    call_seconds: tuple[float, ...]
    launch: str = "direct"
    throttled: str = ""
    before: Json = field(default_factory=dict)
    after: Json = field(default_factory=dict)
    turns: tuple[int, ...] = ()
    broken: str = ""
    energy: Energy | None = None

    @property
    def median_ms(self) -> float:
        """The median of the samples, in milliseconds."""
        return statistics.median(self.seconds) * 1e3

    @property
    def p20_ms(self) -> float:
        """The 20th percentile of the samples, in milliseconds."""
        return float(np.percentile(self.seconds, 20)) * 1e3

    @property
    def p80_ms(self) -> float:
        """The 80th percentile of the samples, in milliseconds."""
        return float(np.percentile(self.seconds, 80)) * 1e3

    @property
    def call_ms(self) -> float:
        """The median host time to enqueue a run, in milliseconds."""
        return statistics.median(self.call_seconds) * 1e3


def together(timings: Sequence[Timing]) -> Timing:
    """The timing of several passes as one: sums of their samples, turn by turn, as many as the pass with the fewest has in each."""
    first = timings[0]
    if len(timings) == 1:
        return first
    energies = [t.energy for t in timings if t.energy]
    turns = tuple(min(counts) for counts in zip(*(t.turns for t in timings), strict=False))
    return Timing(
        first.timing,
        _sums([t.seconds for t in timings], [t.turns for t in timings]),
        tuple(sum(each) for each in zip(*(t.call_seconds for t in timings), strict=False)),
        "graph" if all(t.launch == "graph" for t in timings) else "direct",
        "; ".join(dict.fromkeys(t.throttled for t in timings if t.throttled)),
        first.before,
        timings[-1].after,
        turns,
        energy=Energy.together(energies) if len(energies) == len(timings) else None,
    )


def _sums(samples: Sequence[Sequence[float]], turns: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Sums of the passes' samples, first with first in each turn; where a pass has no turns, of all."""
    if not all(turns):
        return tuple(sum(each) for each in zip(*samples, strict=False))
    several = [itertools.pairwise(itertools.accumulate(counts, initial=0)) for counts in turns]
    ends = zip(*several, strict=False)
    parts = ([pass_[start:stop] for pass_, (start, stop) in zip(samples, turn, strict=True)] for turn in ends)
    return tuple(sum(each) for part in parts for each in zip(*part, strict=False))


class Stage(Protocol):
    """What measure needs of a backend (harness.backends.Backend has it)."""

    def before(self, seconds: float, cold: bool) -> None:
        """Flush the L2 cache where cold, then keep the device busy for at least `seconds`, without waiting for it."""
        ...

    def state(self) -> Json:
        """Clocks, power, temperature and throttle reasons now; empty on a CPU."""
        ...


def measure(
    contenders: Mapping[str, Timed],
    stage: Stage,
    timing: str,
    policy: Policy,
    progress: Callable[[str], None] = lambda text: None,
    ready: dict[str, Ready] | None = None,
) -> dict[str, Timing]:
    """Sample all contenders in interleaved turns until each has enough by its policy. timing: "warm" or "cold".

    A run whose enqueueing takes the host more than a quarter of its device time is replayed from a CUDA graph where it can be captured,
    as a latency-critical application would launch it; Timing.launch records it. What is Judged is judged meanwhile; what breaks a rule is
    not timed further, and Timing.broken says which. progress receives "N/M times warm", where M is what is taken at most. ready: contenders
    that are warmed up, by name, to which the others are added: another timing of the same contenders needs no second warm-up and no
    second graph. Raises what the contenders' runs raise.
    """
    return sample(contenders, stage, timing, policy, progress, ready).timings()


@dataclass(frozen=True)
class Taken:
    """What :func:`sample` took: of each contender its watch, its turns, and how it was launched; the backend's state before and after."""

    stage: Stage
    timing: str
    watches: Mapping[str, Watch]
    turns: Mapping[str, list[list[float]]]
    runs: Mapping[str, Ready]
    before: Json
    after: Json

    def timings(self) -> dict[str, Timing]:
        """The timings, after what is judged when nothing is timed any more: launches of a fresh load, and others (judged.Watch.close)."""
        for name, run in self.runs.items():
            with self.watches[name].guarded():
                self.watches[name].close(partial(run.sample, self.stage, self.timing == "cold"))
        throttled = throttling(self.before, self.after)
        return {
            name: Timing(
                self.timing,
                tuple(s for turn in turns for s in turn),
                self.runs[name].calls if name in self.runs else (),
                self.runs[name].launch if name in self.runs else "direct",
                throttled,
                self.before,
                self.after,
                tuple(len(turn) for turn in turns),
                self.watches[name].broken,
            )
            for name, turns in self.turns.items()
        }


def sample(
    contenders: Mapping[str, Timed],
    stage: Stage,
    timing: str,
    policy: Policy,
    progress: Callable[[str], None] = lambda text: None,
    ready: dict[str, Ready] | None = None,
) -> Taken:
    """The part of :func:`measure` that times: warm-ups and turns."""
    before = stage.state()
    watches = {name: Watch(contender if isinstance(contender, Judged) else None, policy.apart) for name, contender in contenders.items()}
    turns: dict[str, list[list[float]]] = {name: [] for name in contenders}
    runs: dict[str, Ready] = {}
    for name, contender in contenders.items():
        progress(f"0/{100 * len(contenders)} times {timing}")
        with watches[name].guarded():
            runs[name] = Ready.kept(name, contender, stage, policy, ready)
    spent, settle = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, policy.settle)
    waiting = list(runs)
    while waiting:
        for name in list(waiting):
            start = time.perf_counter()
            with watches[name].guarded():
                runs[name].turn(stage, timing == "cold", settle[name], 0)
                if policy.brief is not None and not turns[name]:
                    held = (stage.state().get("throttle_reasons") or 0) & POWER_CAP
                    if held:
                        runs[name].turn(stage, timing == "cold", policy.held - policy.settle, 0)
                    settle[name] = policy.held if held else policy.brief
                turns[name].append(runs[name].turn(stage, timing == "cold", policy.turn, 1, watches[name]))
            spent[name] += time.perf_counter() - start
            if watches[name].broken or _enough(turns[name], spent[name], policy):
                waiting.remove(name)
            share = sum(_share(turns[other], spent[other], policy) if other in waiting else 1.0 for other in runs)
            progress(f"{int(100 * share)}/{100 * len(runs)} times {timing}")
        waiting = [name for name in waiting if not _far(turns, name, policy)]
    return Taken(stage, timing, watches, turns, runs, before, stage.state())


@dataclass(frozen=True)
class Ready:
    """A contender warmed up: how it is launched, the host seconds of its calls and its approximate device seconds."""

    enqueue: Callable[[], Callable[[], float]]
    launch: str
    calls: tuple[float, ...]
    device: float

    @classmethod
    def kept(cls, name: str, contender: Timed, stage: Stage, policy: Policy, ready: dict[str, Ready] | None) -> Ready:
        """The one that is in `ready`, or a new one, which is kept there."""
        ready = {} if ready is None else ready
        if name not in ready:
            ready[name] = cls.of(contender, stage, policy)
        return ready[name]

    @classmethod
    def of(cls, contender: Timed, stage: Stage, policy: Policy) -> Ready:
        start = time.perf_counter()
        first = contender.call()  # its time is not kept: the first run may also compile
        took = time.perf_counter() - start
        if took > policy.slow and first < 0.1 * took:  # the device took that long, not a compiler
            return cls(contender.enqueue, "direct", (first,), took)
        start, made = time.perf_counter(), list[float]()
        while len(made) < min(10, policy.min_samples) and (not made or time.perf_counter() - start < policy.slow):
            made.append(contender.call())
        calls = tuple(made)
        start, seconds = time.perf_counter(), list[float]()
        while not seconds or time.perf_counter() - start < policy.warm_up:
            stage.before(_lead(calls), False)
            seconds.append(contender.enqueue()())
        direct = cls(contender.enqueue, "direct", calls, statistics.median(seconds))
        # A quarter, far below the point where the host is the slower one: near that point the launch would change from run to run.
        if statistics.median(calls) > 0.25 * direct.device and (replay := contender.graph()):
            replay()()
            return cls(replay, "graph", calls, direct.device)
        return direct

    def turn(self, stage: Stage, cold: bool, wanted: float, least: int, watch: Watch | None = None) -> list[float]:
        """Samples enqueued back to back for about `wanted` device seconds: at least `least`, at most 200. watch judges some of them."""
        waiting = []
        host = 2e-5 if self.launch == "graph" else statistics.median(self.calls)
        count = max(least, min(200, round(wanted / self.device)))
        drawn = watch.drawn(count) if watch else {}
        for i in range(count):
            if watch and i in drawn:
                watch.prepare(drawn[i])
            # The queue runs empty where the host is slower than the device, and where it prepares or keeps what is judged: there, and
            # before the first sample, the device spins.
            empty = i == 0 or i in drawn or i - 1 in drawn or host > 0.5 * self.device
            stage.before(_lead(self.calls) if empty else 0.0, cold)
            waiting.append(self.enqueue())
            if watch and i in drawn:
                watch.keep()
        seconds = [finish() for finish in waiting]
        if watch:
            watch.seen(seconds, drawn)
        return seconds

    def sample(self, stage: Stage, cold: bool) -> float:
        """One sample by itself."""
        stage.before(_lead(self.calls), cold)
        return self.enqueue()()


def _lead(calls: Sequence[float]) -> float:
    """Seconds to keep the device busy so that the host has enqueued the run before the first event is reached."""
    return 2 * statistics.median(calls) + 2e-5


def _enough(turns: Sequence[Sequence[float]], spent: float, policy: Policy) -> bool:
    seconds = [sample for turn in turns for sample in turn]
    if len(seconds) < policy.asked_samples or (sum(seconds) < policy.asked_seconds and len(seconds) < MOST_ASKED):
        return False
    uneven = len(turns) >= 3 and _noise([statistics.median(turn) for turn in turns]) > policy.uneven
    if len(seconds) >= policy.max_samples or (spent > (policy.patience if uneven else policy.max_seconds) and len(seconds) >= 3):
        return True
    if uneven or len(seconds) < policy.min_samples or len(turns) < policy.min_turns or sum(seconds) < policy.min_seconds:
        return False
    return _noise(seconds) <= policy.noise


def _far(turns: Mapping[str, Sequence[Sequence[float]]], name: str, policy: Policy) -> bool:
    """Whether a contender is so much slower than the fastest that its first turn is enough."""
    own = [sample for turn in turns[name] for sample in turn]
    fastest = min(statistics.median(each[0]) for each in turns.values() if each and each[0])
    asked = policy.asked_samples or policy.asked_seconds
    return not asked and len(own) >= policy.min_samples and statistics.median(own) > policy.far * fastest


def _share(turns: Sequence[Sequence[float]], spent: float, policy: Policy) -> float:
    """How much of the samples or of the time that a contender may take at most it has had."""
    return min(1.0, max(sum(map(len, turns)) / policy.max_samples, spent / policy.max_seconds))


def _noise(values: Sequence[float]) -> float:
    """The relative standard error of the median, from the median absolute deviation (see Policy)."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median([abs(value - middle) for value in values])
    return float(1.25 * spread / len(values) ** 0.5 / middle)


def throttling(before: Json, after: Json) -> str:
    """Why the device was throttled between two states, or an empty text. The power cap alone, at full clocks, does not count."""
    texts = []
    for state in (before, after):
        reasons = state.get("throttle_reasons") or 0
        texts += [text for bit, text in FAULTS.items() if reasons & bit]
        clock, most = state.get("sm_clock_mhz"), state.get("sm_clock_max_mhz")
        if state is after and clock and most and clock < SLOW_CLOCK * most:
            texts.append(f"{clock} of {most} MHz")
    return ", ".join(dict.fromkeys(texts))
