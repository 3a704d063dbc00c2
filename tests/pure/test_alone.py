"""Burst and energy, a contender at a time: with a stand-in for a device that has a clock, a queue and an energy counter in steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.backends import nvml
from harness.fault import KernelFault
from harness.measure import alone, sampling
from harness.measure.sampling import Energy, Policy, Timing, together

POLICY = Policy(warm_up=0.0, min_samples=2)


class Gpu:
    """A device that takes `watts` while it runs, 100 W else. Host time passes by waiting for it only. Its counter has steps of 50 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: bool = True, stands: bool = False) -> None:
        self.now = self.free = self.joules = 0.0  # free: when the queue is empty; joules: up to there
        self.steps, self.counts, self.stands = [(0.0, 0.0)], counts, stands
        self.rests: list[float] = []
        self.idle = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def run(self, seconds: float, watts: float) -> float:
        """Enqueue work; returns when it ends."""
        pause = max(0.0, self.now - self.free)
        self.idle += pause
        self.steps += [(self.free + pause, self.joules + 100 * pause)] * (pause > 0)
        self.free += pause + seconds
        self.joules += 100 * pause + watts * seconds
        self.steps.append((self.free, self.joules))
        return self.free

    def before(self, seconds: float, cold: bool) -> None:
        self.run(seconds, 130)

    def state(self) -> dict[str, Any]:
        return {"sm_clock_mhz": 1900, "sm_clock_max_mhz": 1980, "at": self.now}

    def meter(self) -> tuple[int, int] | None:
        if not self.counts:
            return None
        seen = 0.0 if self.stands else int(self.now / 0.05) * 0.05
        (t0, e0), (t1, e1) = next(((a, b) for a, b in zip(self.steps, self.steps[1:], strict=False) if b[0] >= seen), (self.steps[-1],) * 2)
        joules = e0 + (e1 - e0) * (seen - t0) / (t1 - t0) if t1 > t0 else e1
        return int(joules * 1e3), 1500 if self.now > alone.SETTLE + alone.ENERGY + 0.4 else 1980


class Kernel:
    """Runs of a length and a power; enqueueing one costs the host nothing."""

    def __init__(self, gpu: Gpu, seconds: float, watts: float) -> None:
        self.gpu, self.seconds, self.watts, self.launches = gpu, seconds, watts, 0

    def enqueue(self) -> Callable[[], float]:
        self.launches += 1
        end = self.gpu.run(self.seconds, self.watts)

        def finish() -> float:
            self.gpu.now = max(self.gpu.now, end)
            return self.seconds

        return finish

    def call(self) -> float:
        self.enqueue()()
        return 1e-6

    def graph(self) -> None:
        return None


class Judged(Kernel):
    """Writes down what is asked of it, and breaks a rule where it is told so."""

    def __init__(self, gpu: Gpu, wrong: str = "", outside: str = "") -> None:
        super().__init__(gpu, 1e-3, 700)
        self.wrong, self.outside, self.log = wrong, outside, list[Any]()
        self.elements = 1

    def refresh(self, fresh: bool, poison: bool) -> None:
        self.log.append((fresh, poison, self.launches))

    def take(self) -> None: ...

    def judge(self) -> str:
        self.log.append(("judge", self.launches))
        return self.wrong

    def fresh(self) -> str:
        raise AssertionError("the turns before have done it")

    def further(self) -> str:
        raise AssertionError("the turns before have done it")

    def ended(self) -> str:
        return self.outside


@pytest.mark.parametrize(("seconds", "watts"), [(1e-4, 700), (2e-3, 450), (0.02, 690)])
def test_energy_is_that_of_a_run(monkeypatch: pytest.MonkeyPatch, seconds: float, watts: float) -> None:
    """Power between two steps of the counter, energy a run, the clock's median; the queue never runs empty meanwhile."""
    gpu = Gpu(monkeypatch)
    kernel = Kernel(gpu, seconds, watts)
    found = alone.energy({"a": kernel}, gpu, POLICY)["a"].energy
    assert found
    wrong = (alone.BATCH + 2 * seconds) / alone.ENERGY
    assert found.power_w == pytest.approx(watts, rel=wrong)
    assert found.energy_mj == pytest.approx(watts * seconds * 1e3, rel=wrong)
    assert gpu.idle < 1e-9 and gpu.rests == []
    assert alone.SETTLE + alone.ENERGY <= gpu.now <= alone.SETTLE + alone.ENERGY + 0.3, "what a sweep's time is estimated from"


def test_a_host_that_is_slower_than_a_batch_gets_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the counter that takes 18 ms leaves the device idle for a third of the time behind batches of 12 ms: not what is told."""
    gpu = Gpu(monkeypatch)
    look = gpu.meter

    def slow() -> tuple[int, int] | None:
        gpu.now += 0.018
        return look()

    monkeypatch.setattr(gpu, "meter", slow)
    found = alone.energy({"a": Kernel(gpu, 2e-4, 700)}, gpu, POLICY)["a"].energy
    assert found and gpu.idle > 0.1, "the first try was idle"
    assert found.power_w == pytest.approx(700, rel=0.09) and found.energy_mj == pytest.approx(140, rel=0.09)
    monkeypatch.setattr(alone, "TRIES", 1)
    once = alone.energy({"a": Kernel(gpu, 2e-4, 700)}, gpu, POLICY)["a"].energy
    assert once and once.power_w < 600


def test_an_energy_is_kept_where_longer_batches_end_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 0.7 s with pauses between their kernels: four in a batch are over too late for two steps of the counter."""
    gpu = Gpu(monkeypatch)
    kernel = Kernel(gpu, 0.7, 700)
    window, found = alone._window, list[Energy | None]()

    def paused() -> Callable[[], float]:
        finish = kernel.enqueue()
        return lambda: 0.9 * finish()

    def watched(run: sampling.Ready, stage: alone.Metered, batch: int) -> tuple[Energy | None, float]:
        kept, busy = window(run, stage, batch)
        found.append(kept)
        return kept, busy

    monkeypatch.setattr(alone, "_window", watched)
    last = alone._metered(sampling.Ready(paused, "direct", (), 0.7), gpu)
    assert last is found[0] is not None and found[1:] == [None]


def test_energy_of_contenders_does_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """One runs after the other has ended; each gets its own power, and the clock that was read while it ran."""
    gpu = Gpu(monkeypatch)
    found = alone.energy({"a": Kernel(gpu, 1e-3, 300), "b": Kernel(gpu, 1e-3, 700)}, gpu, POLICY)
    energies = [t.energy for t in found.values()]
    assert [e.power_w for e in energies if e] == pytest.approx([300, 700], rel=2 * alone.BATCH / alone.ENERGY)
    assert [e.sm_clock_mhz for e in energies if e] == [1980, 1500]


def test_without_a_counter_there_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not say is not waited for; a counter that stands is given up."""
    gpu = Gpu(monkeypatch, counts=False)
    kernel = Kernel(gpu, 1e-3, 700)
    assert alone.energy({"a": kernel}, gpu, POLICY) == {} and kernel.launches == 0
    gpu = Gpu(monkeypatch, stands=True)
    assert alone.energy({"a": Kernel(gpu, 1e-3, 700)}, gpu, POLICY)["a"].energy is None
    assert gpu.now <= alone.SETTLE + alone.ENERGY + alone.LIMIT + alone.AHEAD + 0.1


def test_a_burst_is_the_first_30_ms_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender rests a second; its samples are the launches of 30 ms, at most 200, enqueued without waiting."""
    gpu = Gpu(monkeypatch)
    a, b, tiny = Kernel(gpu, 1e-3, 700), Kernel(gpu, 0.05, 700), Kernel(gpu, 1e-5, 700)
    found = alone.burst({"a": a, "b": b, "tiny": tiny}, gpu, POLICY)
    assert gpu.rests == [alone.REST] * 3 == [1.0] * 3
    assert [(t.timing, len(t.seconds), t.turns) for t in found.values()] == [
        ("burst", 30, (30,)),
        ("burst", 1, (1,)),
        ("burst", 200, (200,)),
    ]
    assert found["a"].median_ms == pytest.approx(1.0) and found["a"].energy is None
    assert found["a"].after["at"] - found["a"].before["at"] < 0.035, "nothing but the burst after the rest"


@pytest.mark.parametrize("take", [alone.burst, alone.energy])
def test_a_contender_alone_is_judged_too(monkeypatch: pytest.MonkeyPatch, take: Callable[..., dict[str, Timing]]) -> None:
    """New inputs and poison before its first launch, judged after its last; what breaks a rule, or does not launch, says so."""
    gpu = Gpu(monkeypatch)
    right, wrong, outside = Judged(gpu), Judged(gpu, wrong="it is wrong"), Judged(gpu, outside="it wrote outside O")
    found = take({"right": right, "wrong": wrong, "outside": outside}, gpu, POLICY)
    assert [t.broken for t in found.values()] == ["", "it is wrong", "it wrote outside O"]
    assert right.log == [(True, True, 0), ("judge", right.launches)]
    broken = Judged(gpu)
    monkeypatch.setattr(broken, "enqueue", lambda: (_ for _ in ()).throw(KernelFault("no launch", "why")))
    assert "no launch" in take({"a": broken}, gpu, POLICY)["a"].broken


def test_passes_together_sum_their_energy() -> None:
    """600 mJ at 600 W and 300 mJ at 100 W: 900 mJ in 4 s / 1000 at 225 W; the clock counts by time."""
    parts = [Timing("energy", (), (1e-6,), energy=e) for e in (Energy(600, 600, 1600), Energy(300, 100, 2000))]
    assert together(parts).energy == pytest.approx((900, 225, 1900))
    assert together([parts[0], Timing("energy", (), (1e-6,))]).energy is None
    assert set(sampling.TIMINGS) == {"warm", "cold", "burst"}


def test_nvml_counts_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter and the SM clock of the GPU at a bus id; None where a GPU does not count, or NVML is not there."""

    class NVMLError(Exception): ...

    def refuse(*_: object) -> int:
        raise NVMLError

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId={"0": "gpu"}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption={"gpu": 123456}.__getitem__,
        nvmlDeviceGetClockInfo=lambda gpu, kind: {("gpu", 1): 1665}[gpu, kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml._handle.cache_clear()
    try:
        assert nvml.meter("0") == (123456, 1665)
        fake.nvmlDeviceGetTotalEnergyConsumption = refuse
        assert nvml.meter("0") is None
        nvml._handle.cache_clear()
        fake.nvmlInit = refuse
        assert nvml.meter("0") is None and nvml.state("0") == {}
    finally:
        nvml._handle.cache_clear()


def test_what_is_warmed_up_is_not_warmed_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two timings of one contender the device does nothing but what is measured, and what is kept serves the next."""
    gpu = Gpu(monkeypatch)
    kernel, other, ready = Kernel(gpu, 1e-3, 700), Kernel(gpu, 1e-3, 700), dict[str, sampling.Ready]()
    sampling.measure({"a": kernel}, gpu, "warm", POLICY, ready=ready)
    assert set(ready) == {"a"}
    launches = kernel.launches
    found = alone.burst({"a": kernel, "b": other}, gpu, POLICY, ready=ready)
    assert kernel.launches - launches == len(found["a"].seconds) < other.launches and set(ready) == {"a", "b"}
    assert found["a"].call_seconds == ready["a"].calls
