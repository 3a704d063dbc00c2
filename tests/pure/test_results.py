"""Rows made from results: times, rates, errors and speedups."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rows import plain

from harness.check.budget import Verdict
from harness.check.contender import PEER_BUDGETS, Contender, PassResult
from harness.check.moments import Moments
from harness.fault import EnvironmentFault, UsageFault
from harness.kernel import Kernel, find
from harness.measure.sampling import Energy, Timing
from harness.problem import PASSES, Problem
from harness.verbs import results


def result(passed: bool = True, mode: str = "both") -> Any:
    """What harness.verbs.run gives, in its shape: 1, 2 and 4 ms forward, 10 ms backward."""

    def verdicts(names: tuple[str, ...], error: float) -> dict[str, Verdict]:
        return {
            n: Verdict(n, error, error / 2, error**2, error, 1.0, passed, (0, 0, 0), 1.0, 1.0, "a place", "" if passed else "why")
            for n in names
        }

    def one(names: tuple[str, ...], error: float, seconds: tuple[float, ...], registers: int | None) -> Any:
        timings = {"warm": Timing("warm", seconds, (1e-5,) * len(seconds)), "cold": Timing("cold", tuple(2 * s for s in seconds), (1e-5,))}
        return SimpleNamespace(
            verdicts=verdicts(names, error),
            timings=timings,
            device_bytes=int(error * 100),
            passed=passed,
            broken="" if passed else "it broke a rule",
            ran=None,
            kernel=SimpleNamespace(
                **{"name": "fa2", "pass_": "forward" if "O" in names else "backward", "in_tree": True, "variant_of": "", "variants": ()},
                deterministic=True,
                source_hash=str(registers),
                arithmetic_for=lambda dtype: "f32",
            ),
            loaded=SimpleNamespace(registers=registers, spill_bytes=None, shared_bytes=64, stack_bytes=registers),
        )

    passes = {
        "forward": one(("O", "logsumexp"), 0.25, (0.004, 0.001, 0.002), 40),
        "backward": one(("dQ", "dK", "dV"), 0.5, (0.01,) * 3, 80),
    }
    return SimpleNamespace(
        compute="fa2",
        mode=mode,
        device="cpu",
        device_name="a processor",
        problem=Problem.of(2, 4, 100, 32, heads_kv=2, causal=True),
        passes={name: p for name, p in passes.items() if mode in (name, "both")},
        passed=passed,
        seed=42,
        deterministic=False,
    )


def test_rows_of_a_result() -> None:
    """Mode both is three rows; the third has both times, the worst error and every tensor's."""
    rows = results.rows_of(result(), "case", "run")
    assert [(r.Type, r.timing) for r in rows] == [(t, timing) for t in ("FOR", "BAC", "BOT") for timing in ("warm", "cold")]
    assert [r.KernelTime_ms for r in rows[1::2]] == pytest.approx([2 * (r.KernelTime_ms or 0) for r in rows[::2]])
    forward, backward, both = rows[::2]
    problem = result().problem
    assert [r.Type for r in (forward, backward, both)] == ["FOR", "BAC", "BOT"]
    assert (forward.KernelTime_ms, backward.KernelTime_ms, both.KernelTime_ms) == pytest.approx((2, 10, 12))
    assert (forward.p20_ms, forward.p80_ms, forward.n_samples) == pytest.approx((1.4, 3.2, 3))
    rates = (problem.flops("both") / 12e-3 / 1e12, problem.bytes("backward") / 10e-3 / 1e9)
    assert (both.TFLOPS, backward.Bandwidth_GBps) == pytest.approx(rates)
    assert (forward.MaxError, both.MaxError, both.MaxError_O, both.MaxError_dK, forward.MaxError_dK) == (0.25, 0.5, 0.25, 0.5, None)
    assert (both.registers, both.spill_bytes, both.stack_bytes, both.source_hash, both.seed) == (80, None, 80, "40+80", 42)
    assert both.repro == "fa-cli run --compute fa2 --mode both --batch 2 --heads 4 --seq 100 --dim 32 --kv-heads 2 --causal"
    assert [r.Type for r in results.rows_of(result(mode="backward"), "case", "run")] == ["BAC", "BAC"]
    moved = SimpleNamespace(**vars(result()) | {"problem": problem.with_(causal_shift=7)})
    assert {r.repro for r in results.rows_of(moved, "case", "run")} == {None}  # no option sets a shift


@pytest.mark.parametrize(
    ("kernels", "mode", "command"),
    [
        ("hopper+hopper_cluster", "both", "hopper+hopper_cluster --mode both"),
        ("hopper+hopper_cluster", "forward", "hopper --mode forward"),
        ("hopper_cluster", "backward", "hopper+hopper_cluster --mode both"),  # it has no forward pass, which run needs
        ("hopper", "backward", "hopper --mode both"),  # hopper_atomic runs in its place
    ],
)
def test_the_command_runs_the_kernels_of_the_row(kernels: str, mode: str, command: str) -> None:
    """Of a pair both, of a backward pass one of the same arithmetic before it, and never a variant, which has no other pass."""
    of = Contender(kernels, {pass_: find(kernels, pass_) for pass_ in (PASSES if mode == "both" else (mode,))})
    problem, backend = (
        Problem.of(1, 2, 32, 128, heads_kv=1, dtype="bfloat16"),
        SimpleNamespace(name="cpu", device=lambda: SimpleNamespace(name="a")),
    )
    for row in results.rows_without("test", of, mode, problem, backend, "run", 42, EnvironmentFault("why")):  # type: ignore[arg-type]
        passes = {"FOR": "forward"}.get(row.Type, "both")
        assert row.repro and row.repro.startswith(f"fa-cli run --compute {command.partition(' ')[0]} --mode {passes} --batch 1")
        assert results.is_of(row, "test", of, {"FOR": "forward", "BAC": "backward", "BOT": "both"}[row.Type], problem)


def test_samples_of_a_row() -> None:
    """Every sample in milliseconds, those of both passes added."""
    rows = results.rows_of(result(), "case", "run")
    assert results.samples_of(result(), rows[0])["samples_ms"] == pytest.approx([4, 1, 2])
    assert results.samples_of(result(), rows[-2])["samples_ms"] == pytest.approx([14, 11, 12])
    assert results.samples_of(result(), rows[-2])["timing"] == "warm" and results.samples_of(result(), rows[-2])["Type"] == "BOT"


def test_energy_is_in_the_warm_rows_and_of_both_passes_together() -> None:
    """1 J at 500 W forward and 2 J at 250 W backward: 3 J at 300 W together. Burst has rows of its own. A pass without has no sum."""
    both = result()
    burst = Timing("burst", (0.5,), (1e-5,))
    for pass_, energy in (("forward", Energy(1000.0, 500.0, 1500.0)), ("backward", Energy(2000.0, 250.0, 1000.0))):
        both.passes[pass_].timings.update(energy=Timing("energy", (), (1e-5,), energy=energy), burst=burst)
    rows = {(r.Type, r.timing): r for r in results.rows_of(both, "case", "run")}
    assert set(rows) == {(t, timing) for t in ("FOR", "BAC", "BOT") for timing in ("warm", "cold", "burst")}
    found = {type_: rows[type_, "warm"] for type_ in ("FOR", "BAC", "BOT")}
    assert [(r.energy_mj, r.power_w) for r in found.values()] == [(1000, 500), (2000, 250), (3000, pytest.approx(300))]
    assert found["FOR"].sm_clock_mhz == 1500 and found["BOT"].sm_clock_mhz == pytest.approx((1500 * 2 + 1000 * 8) / 10)
    assert all(r.energy_mj is r.power_w is r.sm_clock_mhz is None for r in rows.values() if r.timing != "warm")
    assert rows["BOT", "burst"].KernelTime_ms == 1000 and {r.recipe for r in rows.values()} == {"RandomState"}
    del both.passes["backward"].timings["energy"]
    assert [r.energy_mj for r in results.rows_of(both, "case", "run") if r.timing == "warm"] == [1000, None, None]


def test_speedup_is_over_the_fastest_torch_of_the_same_device_pass_and_timing() -> None:
    """torch-cpu does not count on a GPU, nor a warm time for a cold one."""
    times = {
        ("fa2", "cuda", "warm"): 2.0,
        ("torch-math", "cuda", "warm"): 8.0,
        ("torch-flash", "cuda", "warm"): 3.0,
        ("torch-cpu", "cpu", "warm"): 1.0,
    }
    rows = [plain(Kernel=k, device=d, timing=t, KernelTime_ms=ms) for (k, d, t), ms in times.items()]
    rows.append(plain(Kernel="fa2", device="cuda", timing="cold", KernelTime_ms=4.0))
    rows.append(plain(Kernel="fa1", device="cuda", timing="warm", Status="FAIL"))
    found = results.with_torch(rows)
    assert [r.TorchTime_ms for r in found] == [3, 3, 3, 1, None, 3]
    assert [r.Speedup for r in found] == [1.5, 3 / 8, 1, 1, None, None]


def test_a_failed_check_has_no_speed() -> None:
    """Status FAIL, the place in the message, and neither time nor rate."""
    rows = results.rows_of(result(passed=False), "case", "run")
    assert [(r.Type, r.timing) for r in rows] == [("FOR", None), ("BAC", None), ("BOT", None)]
    for each in rows:
        assert each.Status == "FAIL" and "why at a place; it broke a rule" in (each.ErrorMessage or "")
        assert each.KernelTime_ms is each.TFLOPS is each.Bandwidth_GBps is each.p20_ms is each.n_samples is None


def test_a_multiple_of_the_budget_is_for_peers_only() -> None:
    """A kernel passes where each verdict does, whatever the verdict is of: an error that is small does not make up for it."""

    def one(error: float, passed: bool, chosen: Kernel | None) -> PassResult:
        verdict = Verdict("O", error, error, error, error, 1.0, passed, (0,), 1.0, 1.0, "a place", "" if passed else "not its error")
        timed: Any = None
        return PassResult("fa2", {}, {"O": verdict}, timed, None, chosen)

    fa2 = find("fa2", "forward")
    assert [one(0.5, True, fa2).passed, one(0.5, False, fa2).passed, one(2.0, False, fa2).passed] == [True, False, False]
    assert [one(e * PEER_BUDGETS, False, None).passed for e in (0.5, 1.0, 1.01, float("nan"))] == [True, True, False, False]


def test_rows_without_a_result() -> None:
    """A refusal is a row too, on one line, for each pass."""
    backend = SimpleNamespace(name="cpu", device=lambda: SimpleNamespace(name="a processor"))
    about = (Contender("fa1"), "both", Problem.of(), backend)
    rows = results.rows_without("case", *about, "run", 42, UsageFault("what", "why"))  # type: ignore[arg-type]
    assert [(r.Type, r.Status, r.ErrorMessage) for r in rows] == [(t, "REFUSED", "what; why") for t in ("FOR", "BAC", "BOT")]
    assert results.new_run_id() != results.new_run_id()


def test_json_has_no_digits_that_a_blas_made() -> None:
    """Six digits of an error; bias and slope to the last place of their limits, or of float32's unit roundoff where there is none."""
    its = Moments(0.02235762067, 2.40251037, -1.58892197e-10, 1.133545319e-05, 0.99999997794847, 1.1494863e-05)
    right = Verdict("O", 4.177024830465115e-07, 1 / 3, 2 / 3, 1.0, 4.239516419e-06, True, (0,), 1.0, 1.0, "", "", its)
    assert results.errors_of(right) == {
        **{"max_abs": 4.17702e-07, "mean_abs": 0.333333, "mse": 0.666667, "max_rel": 1.0, "budget": 4.23952e-06, "passed": True},
        **{"rms": 0.0223576, "rms_budget": 2.40251, "bias": -2e-10, "bias_budget": 1.13355e-05},
        **{"slope": 0.9999999779, "slope_budget": 1.14949e-05},
    }
    few = results.errors_of(replace(right, moments=replace(its, bias_budget=math.inf, slope_budget=math.inf)))
    assert (few["bias"], few["slope"]) == (-1.589e-10, 0.9999999779485)
    assert list(few) == list(right.numbers())
