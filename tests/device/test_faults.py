"""Faults planted in the tree's kernels (harness/verbs/selftest/faults.toml), and the check that must find each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from harness import kernel
from harness.backends import Backend, pick
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.contender import PassResult
from harness.check.oracle import oracle_for
from harness.fault import KernelFault
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.selftest.mutant import Mutant, edited, mutants
from harness.verbs.selftest.trial import CHECKS, judge

PLAIN = Problem.of(1, 2, 129, 64)
CAUSAL = Problem.of(1, 2, 129, 64, causal=True)


def of(check: str) -> Any:
    """Runs a test for each fault that a check must find; of kernels that compile for seconds not every day."""
    quick = ("fa2_naive_forward", "naive_backward")
    found = mutants(check).items()
    parts = [pytest.param(fault, id=name, marks=() if fault.kernel in quick else pytest.mark.days(28)) for name, fault in found]
    return pytest.mark.parametrize("fault", parts)


def failing(result: PassResult) -> set[str]:
    """The tensors outside their error budget."""
    return {tensor for tensor, verdict in result.verdicts.items() if not verdict.passed}


def told(fault: Mutant, check: str, backend: Backend, folder: Path) -> KernelFault:
    """What a check says of a planted kernel, which holds all the words the fault asks for."""
    with pytest.raises(KernelFault) as caught:
        judge(backend, fault.plant(folder), fault.problem)
    for words in fault.found_by[check]:
        assert re.search(words, str(caught.value), re.DOTALL), f"no {words!r} in {caught.value}"
    return caught.value


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in mutants().items()])
def test_every_fault_can_be_planted(fault: Mutant, tmp_path: Path) -> None:
    """Its text stands in the tree once, and some check that exists is to find it; those for GPUs are experiments/verify's."""
    assert fault.plant(tmp_path).label == fault.kernel
    assert fault.found_by.keys() and fault.found_by.keys() <= {*CHECKS["cpu"], "verify", "asan", "memcheck", "racecheck"}


def test_a_text_that_is_not_there_once_is_refused() -> None:
    """So a fault cannot quietly become the kernel it was planted in."""
    assert edited("a b", ("a", "c"), ("c b", "d")) == "d"
    for text in ("b", "a a"):
        with pytest.raises(ValueError, match="'a' stands . times in here, not once"):
            edited(text, ("a", "c"), where="here")


def test_a_fault_in_a_header(tmp_path: Path) -> None:
    """The header is copied beside the kernel, which then includes the copy; through others where the kernel does not name it."""
    through = Mutant("", "", "mma_forward", (("#pragma once", "#pragma once\n// planted"),), {}, "fa/softmax.cuh").plant(tmp_path)
    assert "// planted" in (tmp_path / "softmax.cuh").read_text() and '"epilogue.cuh"' in through.path.read_text()
    with pytest.raises(ValueError, match="does not include fa/gradient.cuh"):
        Mutant("", "", "mma_forward", (("#pragma once", "#pragma once "),), {}, "fa/gradient.cuh").plant(tmp_path)
    header = Mutant("", "", "fa2_naive_forward", (("#pragma once", "#pragma once\n#error planted"),), {"engine": []}, "fa/row.cuh")
    with pytest.raises(KernelFault, match="planted"):
        judge(Host(), header.plant(tmp_path), PLAIN)


def test_the_kernels_they_are_made_from_pass(backend: Backend) -> None:
    """Otherwise nothing below means anything."""
    for name, pass_ in (("fa2_naive", "forward"), ("naive", "backward")):
        for problem in (PLAIN, CAUSAL):
            assert judge(backend, kernel.find(name, pass_), problem).passed


@of("budget")
def test_wrong_numbers_are_caught_by_the_error_budget(fault: Mutant, backend: Backend, tmp_path: Path) -> None:
    """Exactly the tensors that are wrong fail."""
    several = pick(backend.name, sms=fault.sms) if fault.sms else backend
    assert failing(judge(several, fault.plant(tmp_path), fault.problem)) == set(fault.found_by["budget"])


CASES = {name: fault for name, fault in mutants().items() if fault.case}


@pytest.mark.days(28)
@pytest.mark.parametrize("fault", CASES.values(), ids=lambda fault: fault.name)
def test_the_quick_matrix_has_a_case_for_what_it_once_missed(fault: Mutant, tmp_path: Path) -> None:
    """The first of those cases that have the fault's words, and in which the kernel is wrong, passes without the fault."""
    spoiled, backends = fault.plant(tmp_path), verify.Backends("cpu", None, None)
    cases = [case for case in verify.matrix(spoiled, "quick", "cpu") if fault.case in case.text()]
    found = (verify.run_case(backends.of(case), spoiled, case, repeat=None) for case in cases)
    failed = next(result for result in found if not result.passed)
    wanted = fault.found_by.get("verify", fault.found_by.get("budget", fault.found_by.get("poison", ())))
    assert failed.wrong <= set(wanted) and (wanted or failed.finding)
    assert verify.run_case(backends.of(failed.case), fault.source, failed.case, repeat=None).passed


@of("moments")
def test_small_errors_of_all_elements_are_caught_by_the_moments(fault: Mutant, backend: Backend, tmp_path: Path) -> None:
    """Exactly the tensors that are wrong fail, though each of their elements is within its budget; the unspoiled kernel passes."""
    result = judge(backend, fault.plant(tmp_path), fault.problem)
    assert failing(result) == set(fault.found_by["moments"])
    for tensor in failing(result):
        verdict = result.verdicts[tensor]
        assert verdict.max_abs <= verdict.budget and re.match(rf"{tensor} is .* a right kernel has", verdict.reason)
    name, _, pass_ = fault.kernel.rpartition("_")
    assert judge(backend, kernel.find(name, pass_), fault.problem).passed


def test_the_unmasked_key_in_bfloat16_is_seen_by_logsumexp(backend: Backend) -> None:
    """16-bit outputs hide one zero key among many; the float32 logsumexp does not."""
    oracle = oracle_for(Problem.of(1, 1, 513, 64, dtype="bfloat16"), backend, "forward")
    right = oracle.forward_outputs
    assert all(v.passed for v in oracle.judge(right, "p16").values())
    logsumexp = np.logaddexp(right["logsumexp"].astype(np.float64), 0.0)  # a key of zeros scores 0
    less = right["O"].astype(np.float64) * np.exp(right["logsumexp"] - logsumexp)[..., None]
    verdicts = oracle.judge({"O": less.astype(right["O"].dtype), "logsumexp": logsumexp.astype(np.float32)}, "p16")
    assert not verdicts["logsumexp"].passed


@of("guards")
def test_writing_outside_a_tensor_is_caught_by_the_guard_bands(fault: Mutant, backend: Backend, tmp_path: Path) -> None:
    """A row too many."""
    if not backend.guard_bytes:
        pytest.skip("under a sanitizer there are no guard bands")
    told(fault, "guards", backend, tmp_path)


def test_writing_far_outside_names_the_thread_and_leaves_python_whole(tmp_path: Path) -> None:
    """Beyond the guard band of the CPU engine is a fence: the launch stops there, and the process goes on."""
    far = "static_cast<float*>(args.O.data)[blockIdx.x == 3 ? 1 << 12 : 0] = 1.0f"
    chosen = planted.kernel(tmp_path, planted.GOOD.replace("static_cast<float*>(args.O.data)[0] += 1.0f", far))
    for _ in range(3):
        with pytest.raises(KernelFault, match=r"illegal memory access in block \(3, 0, 0\)"):
            judge(Host(), chosen, Problem.of(1, 1, 8))


@of("inputs")
def test_changing_an_input_is_caught(fault: Mutant, backend: Backend, tmp_path: Path) -> None:
    """Inputs are compared with what they were."""
    told(fault, "inputs", backend, tmp_path)


# -- what only the CPU engine sees -----------------------------------------------------------------------------------


@of("poison")
def test_a_missing_barrier_reads_poison(fault: Mutant, tmp_path: Path) -> None:
    """Shared memory starts as NaN, so reading what nobody has written yet shows in the result under the default order."""
    assert failing(judge(Host(), fault.plant(tmp_path), fault.problem)) == set(fault.found_by["poison"])


@of("race")
def test_a_missing_barrier_is_a_race_with_both_lines(fault: Mutant, tmp_path: Path) -> None:
    """--check race names file and line of both accesses, whatever the schedule and even where the result is right.

    What touches the operands of a wgmma, or what a TMA store reads, in flight stops the kernel besides, with its own exit code."""
    caught = told(fault, "race", Host(fault.schedule, "race", sms=fault.sms), tmp_path)
    stopped = re.search(r"a wgmma (that reads it was )?in flight|a TMA store from it was in flight", caught.why) is not None
    assert isinstance(caught, CheckFault) != stopped and caught.exit_code == (5 if stopped else 1)
    assert caught.why.count(".cu:") + caught.why.count(".cuh:") >= 2, caught.why
    assert "pc:" not in caught.why


@of("engine")
def test_a_deadlock_is_reported_not_hung(fault: Mutant, tmp_path: Path) -> None:
    """Threads that wait for others that never come: at a barrier, or in a word of a whole warp."""
    assert told(fault, "engine", Host(fault.schedule, sms=fault.sms), tmp_path).exit_code == 5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_results_do_not_depend_on_the_schedule(seed: int) -> None:
    """A right kernel gives the same bits under any order of threads."""
    for name, pass_ in (("fa1", "forward"), ("fa2", "forward"), ("fa2", "backward")):
        problem = Problem.of(1, 2, 67, 59, 1, 70, causal=True)
        chosen = kernel.find(name, pass_)
        first, other = judge(Host(), chosen, problem), judge(Host(seed=seed), chosen, problem)
        for tensor, values in first.outputs.items():
            assert np.array_equal(values.view(np.uint8), other.outputs[tensor].view(np.uint8)), (name, tensor)
