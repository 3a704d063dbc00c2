"""The trial of a mutant: whether the check that is meant to catch it does, with the words it should use."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch

from ...backends import Backend, pick
from ...backends.protocol import cache_dir
from ...check import budget
from ...check.contender import PassResult, run_kernel
from ...check.oracle import oracle_for
from ...fault import Fault, UsageFault
from ...kernel import Kernel
from ...measure.sampling import POLICY, measure
from ...problem import Problem
from .mutant import Mutant, mutants

#: The checks of each backend; what only compute-sanitizer finds is experiments/verify's.
CHECKS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("budget", "moments", "poison", "guards", "inputs", "launches", "engine", "race"),
    "cuda": ("budget", "moments", "guards", "inputs", "launches"),
}


@dataclass(frozen=True)
class Trial:
    """One mutant before one check. control: the kernel it was made from, unspoiled, which must pass. caught is whether all was right."""

    fault: str
    kind: str
    kernel: str
    check: str
    control: bool
    caught: bool
    message: str
    seconds: float


def selftest(
    device: str = "auto",
    quick: bool = False,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Plant each fault and try each check that must find it on this device, then the same check on the unspoiled kernel.

    quick: one fault of each kind before each check. only: patterns of fault names. progress receives "N/M check: fault". Raises UsageFault
    where no fault is left.
    """
    plain = pick(device)
    backends: dict[tuple[int | None, int | None, bool], Backend] = {(None, None, False): plain}

    def backend(mutant: Mutant, check: str) -> Backend:
        races = check == "race" and plain.name == "cpu"
        of = mutant.schedule, mutant.sms, races
        if of not in backends:
            backends[of] = pick(device, mutant.schedule, "race" if races else None, sms=mutant.sms)
        return backends[of]

    chosen = [mutant for mutant in mutants().values() if not only or any(fnmatch(mutant.name, pattern) for pattern in only)]
    pairs = [(mutant, check) for mutant in chosen for check in mutant.found_by if check in CHECKS[plain.name]]
    if quick:
        pairs = list({(mutant.kind, check): (mutant, check) for mutant, check in reversed(pairs)}.values())[::-1]
    if not pairs:
        raise UsageFault("no fault to plant", f"none of this name has a check on {plain.name}", "fa-cli selftest -v names them")
    planted = {mutant.name: _plant(mutant) for mutant, _ in pairs}
    wanted = [(backend(mutant, check), planted[mutant.name], mutant.problem) for mutant, check in pairs]
    controls = {
        (mutant.kernel, mutant.problem, mutant.schedule, mutant.sms, check in ("race", "launches") and check): (mutant, check)
        for mutant, check in pairs
    }
    wanted += [(backend(mutant, check), mutant.source, mutant.problem) for mutant, check in controls.values()]
    progress(f"compiles {len(planted)} faults")
    _compile_ahead(wanted)
    trials: list[Trial] = []
    for control, group in ((False, pairs), (True, list(controls.values()))):
        for mutant, check in group:
            progress(f"{len(trials)}/{len(pairs) + len(controls)} {check}: {'no fault in ' + mutant.kernel if control else mutant.name}")
            kernel = mutant.source if control else planted[mutant.name]
            trials.append(_try(backend(mutant, check), mutant, kernel, check, control))
    progress("")
    return trials


def judge(backend: Backend, kernel: Kernel, problem: Problem) -> PassResult:
    """Run a kernel on a problem made in memory, checks and all. Raises as :func:`run_kernel` does."""
    oracle = oracle_for(problem, backend, kernel.pass_)
    return run_kernel(backend, kernel, oracle, oracle.inputs_of(kernel.pass_))


def finding(backend: Backend, kernel: Kernel, problem: Problem, timed: bool = False) -> tuple[list[str], str]:
    """The tensors that fail and what is said of them; no tensor and the message where the kernel ends with a fault.

    timed: it is timed too, and the message is what the judged ones among the timed launches break.
    """
    try:
        done = judge(backend, kernel, problem)
    except Fault as fault:
        return [], str(fault)
    wrong = [verdict for verdict in done.verdicts.values() if not verdict.passed]
    if timed and not wrong:
        return [], measure({"": done.timed}, backend, "warm", POLICY[backend.name])[""].broken
    return [verdict.tensor for verdict in wrong], "; ".join(map(budget.message, wrong))


def as_expected(mutant: Mutant, check: str, tensors: Sequence[str], message: str) -> bool:
    """Whether a finding is the one that the fault's found_by asks of a check: exactly these tensors, or all these words."""
    if check in ("budget", "moments", "poison"):
        return set(tensors) == set(mutant.found_by[check])
    return not tensors and all(re.search(words, message, re.DOTALL) for words in mutant.found_by[check])


def _try(backend: Backend, mutant: Mutant, kernel: Kernel, check: str, control: bool) -> Trial:
    start = time.perf_counter()
    tensors, message = finding(backend, kernel, mutant.problem, check == "launches")
    caught = not message if control else as_expected(mutant, check, tensors, message)
    return Trial(mutant.name, mutant.kind, mutant.kernel, check, control, caught, message, time.perf_counter() - start)


def _plant(mutant: Mutant) -> Kernel:
    """In a folder that stays: the compiled kernel is found again."""
    folder = cache_dir() / "selftest" / re.sub(r"\W+", "_", mutant.name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return mutant.plant(folder)


def _compile_ahead(wanted: Iterable[tuple[Backend, Kernel, Problem]]) -> None:
    def load(each: tuple[Backend, Kernel, Problem]) -> None:
        backend, kernel, problem = each
        with suppress(Fault):
            backend.load(kernel, problem)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(load, wanted))
