"""What turns cannot show, a contender at a time: the burst after a rest, and energy.

A GPU that has rested is cool and may draw more power than its limit for a while. `burst` is its speed in that while: the launches of the
first BURST seconds after REST seconds without work. Settled, a GPU at its power limit is as fast as its energy a FLOP allows.

Energy comes from the driver's counter (Metered.meter), which moves in steps of 20 to 100 ms. So a contender runs alone and without a
pause, and energy, time and launches are counted from one step of the counter to the first step ENERGY seconds later. Steps are seen
between batches of launches of about BATCH seconds: that is the error of either end.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from .judged import Judged, State, Watch
from .sampling import Energy, Policy, Ready, Stage, Timed, Timing, throttling

REST, BURST = 1.0, 0.03
#: Seconds: unrecorded work before energy is counted; for how long it is counted at least; after which a counter that stands is given up.
SETTLE, ENERGY, LIMIT = 0.2, 0.7, 3.0
#: Seconds of a batch of launches, and of the batches that wait on the device while the host looks at the counter. A look takes some
#: milliseconds: with batches of 5 ms and 30 ms ahead the device of some rows was idle for a third of the time, at 510 W of 690.
BATCH, AHEAD = 0.012, 0.15
#: The share of the time that the device must have worked. Where it has not, the host was slower than a batch: the next try has four times
#: as many launches in one, TRIES at most. The last one that found an energy counts.
BUSY, TRIES = 0.95, 2


class Metered(Stage, Protocol):
    """What energy needs of a backend (harness.backends.Backend has it)."""

    def meter(self) -> tuple[int, int] | None:
        """Millijoules that the device has taken so far, and its SM clock in MHz now; None where it does not say."""
        ...


def burst(
    contenders: Mapping[str, Timed],
    stage: Stage,
    policy: Policy,
    progress: Callable[[str], None] = lambda text: None,
    ready: dict[str, Ready] | None = None,
) -> dict[str, Timing]:
    """The launches of each contender in the first BURST seconds after a rest of REST seconds. Raises what its runs raise.

    What is Judged finds new inputs and poisoned outputs before the rest, and is judged after its last launch. ready: as for
    sampling.measure.
    """

    def one(run: Ready) -> Timing:
        time.sleep(REST)
        before = stage.state()
        seconds = run.turn(stage, False, BURST, 1)
        after = stage.state()
        facts = throttling(before, after), before, after, (len(seconds),)
        return Timing("burst", tuple(seconds), run.calls, run.launch, *facts)

    return _each(contenders, stage, policy, "burst", one, progress, ready)


def energy(
    contenders: Mapping[str, Timed],
    stage: Metered,
    policy: Policy,
    progress: Callable[[str], None] = lambda text: None,
    ready: dict[str, Ready] | None = None,
) -> dict[str, Timing]:
    """The energy of each contender, as Timing.energy; none where the device does not say. Judged as for :func:`burst`."""
    if stage.meter() is None:
        return {}

    def one(run: Ready) -> Timing:
        return Timing("energy", (), run.calls, run.launch, energy=_metered(run, stage))

    return _each(contenders, stage, policy, "energy", one, progress, ready)


def _each(
    contenders: Mapping[str, Timed],
    stage: Stage,
    policy: Policy,
    timing: str,
    one: Callable[[Ready], Timing],
    progress: Callable[[str], None],
    ready: dict[str, Ready] | None,
) -> dict[str, Timing]:
    timings = {}
    for number, (name, contender) in enumerate(contenders.items()):
        progress(f"{number}/{len(contenders)} times {timing}")
        timings[name] = _judged(contender, policy, timing, one, partial(Ready.kept, name, contender, stage, policy, ready))
    return timings


def _judged(contender: Timed, policy: Policy, timing: str, one: Callable[[Ready], Timing], ready: Callable[[], Ready]) -> Timing:
    watch = Watch(contender if isinstance(contender, Judged) else None, policy.apart)
    timed = Timing(timing, (), ())
    with watch.guarded():
        if watch.contender:
            watch.prepare(State(fresh=True, poison=True))
        timed = one(ready())
        if watch.contender:  # its times on new inputs, and a fresh load of its module, were looked at after its turns
            watch.broken = watch.contender.judge() or watch.contender.ended()
    return replace(timed, broken=watch.broken)


def _metered(run: Ready, stage: Metered) -> Energy | None:
    """Energy a run, power and clock while the device has nothing else to do. None where the counter stands still."""
    batch, energy = max(1, min(200, round(BATCH / run.device))), None
    for number in range(TRIES):
        last, busy = _window(run, stage, batch << 2 * number)
        energy = last or energy  # a longer batch of long runs may end after LIMIT
        if last is None or busy >= BUSY:
            break
    return energy


def _window(run: Ready, stage: Metered, batch: int) -> tuple[Energy | None, float]:
    """What _metered gives, by batches of so many launches, and the share of its time in which the device worked."""
    waiting = deque[list[Callable[[], float]]]()

    def finished() -> tuple[float, float, int, int]:
        """The time after one more batch, its device seconds, the millijoules so far and the clock; others wait on the device meanwhile."""
        while len(waiting) < 2 or len(waiting) * batch * run.device < AHEAD:
            waiting.append([run.enqueue() for _ in range(batch)])
        seconds = sum(finish() for finish in waiting.popleft())
        read = stage.meter()
        assert read, "it did say before"
        return time.perf_counter(), seconds, *read

    began = time.perf_counter()
    first: tuple[float, int] | None = None
    batches, worked, clocks, energy = 0, 0.0, list[int](), None
    now, _, before, _ = finished()
    while not energy and now - began < SETTLE + ENERGY + LIMIT:
        now, seconds, joules, clock = finished()
        batches, worked = batches + 1, worked + seconds
        clocks.append(clock)
        if joules != before and first is None and now - began >= SETTLE:
            first, batches, worked, clocks = (now, joules), 0, 0.0, []
        elif joules != before and first and now - first[0] >= ENERGY:
            taken, passed = joules - first[1], now - first[0]
            energy = Energy(taken / (batches * batch), taken / passed * 1e-3, statistics.median(clocks))
            worked /= passed
        before = joules
    for each in waiting:
        for finish in each:
            finish()
    return energy, worked
