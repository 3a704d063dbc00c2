"""Samples taken in turn, when they are enough, and what is done for launch-bound runs: with stand-ins for a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.measure import sampling
from harness.measure.sampling import Policy, Timing


class Stage:
    """Writes down what it is asked for."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.log: list[Any] = []
        self.states = iter([*states, {}, {}])

    def before(self, seconds: float, cold: bool) -> None:
        self.log.append(("before", seconds, cold))

    def state(self) -> dict[str, Any]:
        return next(self.states)


class Run:
    """A contender whose samples are given."""

    def __init__(self, stage: Stage, name: str, seconds: Iterator[float], call: float = 1e-6, replay: float | None = None) -> None:
        self.stage, self.name, self.seconds, self.cost, self.replay = stage, name, seconds, call, replay

    def enqueue(self) -> Callable[[], float]:
        self.stage.log.append(self.name)
        seconds = next(self.seconds)
        return lambda: seconds

    def call(self) -> float:
        return self.cost

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        return None if self.replay is None else lambda: lambda: self.replay or 0.0


def steady(seconds: float) -> Iterator[float]:
    return itertools.repeat(seconds)


QUICK = Policy(warm_up=0.0, settle=0.0, turn=0.0, min_turns=1, min_samples=4, max_samples=50, min_seconds=0.0, noise=0.01, max_seconds=60.0)


def test_contenders_take_turns_and_the_device_is_kept_busy_before_each_sample() -> None:
    """A B A B, each after twice the time the host needs; cold ones after a flush."""
    stage = Stage()
    found = sampling.measure({"a": Run(stage, "a", steady(1e-3)), "b": Run(stage, "b", steady(2e-3))}, stage, "cold", QUICK)
    samples = [entry for entry in stage.log if isinstance(entry, str)]
    assert samples[:2] == ["a", "b"], "the warm-up"
    assert samples[2:] == ["a", "b"] * 4
    waits = [entry for entry in stage.log if not isinstance(entry, str)]
    assert [cold for _, _, cold in waits] == [False] * 2 + [True] * 8
    assert all(seconds == pytest.approx(2e-6 + 2e-5) for _, seconds, _ in waits)
    assert (found["a"].median_ms, found["b"].median_ms) == pytest.approx((1, 2))
    assert found["a"].timing == "cold" and found["a"].launch == "direct"


def test_a_contender_that_is_far_slower_has_one_turn() -> None:
    """Of enough samples; whoever is nearer to the fastest, or is asked for more samples, has all turns."""
    times = {"fast": 1e-3, "near": 1.4e-3, "far": 1.6e-3, "slow": 4e-3}
    policy = replace(QUICK, turn=8e-3, min_turns=3, min_samples=4, far=1.5)
    for asked, counts in ((0, {"fast": 24, "near": 18, "far": 5, "slow": 4}), (10, {"fast": 24, "near": 18, "far": 15, "slow": 10})):
        stage = Stage()
        runs = {name: Run(stage, name, steady(seconds)) for name, seconds in times.items()}
        found = sampling.measure(runs, stage, "warm", replace(policy, asked_samples=asked))
        assert {name: len(timing.seconds) for name, timing in found.items()} == counts, "slow: a second turn, for its first has two samples"


def test_who_is_below_the_power_limit_settles_briefly() -> None:
    """After it has settled once: the clocks do not depend on who ran before. Who is held by it settles for longer, the first time too."""
    free, capped = {"throttle_reasons": 0}, {"throttle_reasons": sampling.POWER_CAP | 1}
    policy = replace(QUICK, settle=8e-3, turn=2e-3, min_turns=3, min_samples=1)
    for brief, counts in ((2e-3, [8 + 2, 12 + 2, 2 + 2, 12 + 2, 2 + 2, 12 + 2]), (None, [8 + 2] * 6)):
        stage = Stage({}, free, capped)
        sampling.measure(
            {name: Run(stage, name, steady(1e-3)) for name in ("a", "b")}, stage, "warm", replace(policy, brief=brief, held=12e-3)
        )
        names = [entry for entry in stage.log if isinstance(entry, str)][2:]
        assert [len(list(some)) for _, some in itertools.groupby(names)] == counts


def test_a_turn_is_a_burst_without_pauses() -> None:
    """As many samples as fill it, enqueued before any is waited for; only where the host is slower is the device kept busy."""
    stage = Stage()
    policy = replace(QUICK, settle=2e-3, turn=4e-3, min_turns=2, min_samples=1)
    found = sampling.measure(
        {"long": Run(stage, "long", steady(1e-3)), "short": Run(stage, "short", steady(2e-3), call=3e-3)}, stage, "warm", policy
    )
    names = [entry for entry in stage.log if isinstance(entry, str)]
    assert names[2:] == (["long"] * (2 + 4) + ["short"] * (1 + 2)) * 2
    assert len(found["long"].seconds) == 8 and len(found["short"].seconds) == 4, "what settles the clocks is not kept"
    waits = [entry[1] > 0 for entry in stage.log if not isinstance(entry, str)][2:]
    assert waits == ([True, False] + [True, False, False, False] + [True] * 3) * 2


@pytest.mark.parametrize(("seconds", "samples", "runs"), [(1.5, 3, 4), (0.3, 4, 5), (0.06, 10, 24)])
def test_a_slow_contender_is_given_fewer_samples(seconds: float, samples: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of a run of a second: its turns end after max_seconds, and its first call is its warm-up. A fast one goes on."""
    clock = [0.0]
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: clock[0])
    stage = Stage()

    class Slow(Run):
        def enqueue(self) -> Callable[[], float]:
            clock[0] += seconds
            return super().enqueue()

        def call(self) -> float:
            self.enqueue()
            return 1e-5

    class Fast(Run):
        def enqueue(self) -> Callable[[], float]:
            clock[0] += 1e-3
            return super().enqueue()

    found = sampling.measure(
        {"slow": Slow(stage, "slow", steady(seconds)), "fast": Fast(stage, "fast", steady(1e-3))}, stage, "warm", Policy()
    )
    assert (len(found["slow"].seconds), stage.log.count("slow")) == (samples, runs)
    assert len(found["fast"].seconds) == 200, "two turns of 100"


def test_noise_takes_more_samples_and_steadiness_fewer() -> None:
    """A noisy contender goes on alone until its median is known to one percent, or max_samples."""
    stage = Stage()
    noisy = itertools.cycle([1e-3, 1.3e-3, 0.8e-3, 1.1e-3, 0.9e-3])
    found = sampling.measure({"a": Run(stage, "a", steady(1e-3)), "b": Run(stage, "b", noisy)}, stage, "warm", QUICK)
    assert len(found["a"].seconds) == 4 and len(found["b"].seconds) == 50


def test_a_launch_bound_run_is_replayed_from_a_graph() -> None:
    """Where the host takes longer than the device, and it can be captured."""
    stage = Stage()
    runs = {
        "bound": Run(stage, "bound", steady(1e-5), call=1e-4, replay=8e-6),
        "not captured": Run(stage, "not captured", steady(1e-5), call=1e-4),
        "long": Run(stage, "long", steady(1e-3), call=1e-4, replay=1.0),
    }
    found = sampling.measure(runs, stage, "warm", QUICK)
    assert {name: (t.launch, t.median_ms) for name, t in found.items()} == {
        "bound": ("graph", pytest.approx(8e-3)),
        "not captured": ("direct", pytest.approx(1e-2)),
        "long": ("direct", pytest.approx(1.0)),
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {}, ""),
        (
            {"throttle_reasons": 0x4, "sm_clock_mhz": 1980, "sm_clock_max_mhz": 1980},
            {"throttle_reasons": 0x4, "sm_clock_mhz": 1500, "sm_clock_max_mhz": 1980},
            "",
        ),
        ({}, {"throttle_reasons": 0x4, "sm_clock_mhz": 1400, "sm_clock_max_mhz": 1980}, "1400 of 1980 MHz"),
        ({"throttle_reasons": 0x40}, {"throttle_reasons": 0x40}, "hardware thermal slowdown"),
        ({"throttle_reasons": None}, {"throttle_reasons": 0x88}, "hardware slowdown, power brake"),
    ],
)
def test_throttling_is_told_from_full_power(before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    """Running into the power limit at high clocks is what a GPU does; heat and low clocks are not."""
    stage = Stage(before, after)
    found = sampling.measure({"a": Run(stage, "a", steady(1e-3))}, stage, "warm", QUICK)
    assert found["a"].throttled == said


def test_passes_together_are_summed_sample_by_sample() -> None:
    """As many samples as both have."""
    both = sampling.together([Timing("warm", (1.0, 2.0, 3.0), (0.1,)), Timing("warm", (10.0, 20.0), (0.2,), "graph", "hot")])
    assert (both.seconds, both.call_seconds, both.launch, both.throttled) == ((11.0, 22.0), pytest.approx((0.3,)), "direct", "hot")


def test_passes_together_keep_their_turns() -> None:
    """A turn's samples with those of the same turn, so that what turns disagree in is seen of both passes as it is of one."""
    one = Timing("warm", (1.0, 1.0, 1.0, 2.0, 2.0, 3.0), (0.1,), turns=(3, 2, 1))
    other = Timing("warm", (10.0, 10.0, 20.0, 20.0, 20.0), (0.1,), turns=(2, 3))
    both = sampling.together([one, other])
    assert both.turns == (2, 2)
    assert both.seconds == (11.0, 11.0, 22.0, 22.0)
    assert sampling.together([one, replace(other, turns=())]).turns == ()


def test_turns_that_disagree_are_followed_by_more() -> None:
    """Alike within a turn, different from turn to turn: the samples look steady and are not."""
    stage = Stage()
    policy = replace(QUICK, turn=4e-3, min_turns=2, max_samples=2000, max_seconds=60.0)
    moods = itertools.cycle([1e-3] * 5 + [1.05e-3] * 4 + [1.02e-3] * 4)
    found = sampling.measure({"even": Run(stage, "even", steady(1e-3)), "moody": Run(stage, "moody", moods)}, stage, "warm", policy)
    assert found["even"].turns == (4, 4) and len(found["even"].seconds) == 8
    moody = found["moody"].turns
    assert len(moody) > 20 and sum(moody) == len(found["moody"].seconds)
