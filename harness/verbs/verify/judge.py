"""One kernel on one case: its inputs, the oracle, the verdict, and the command that runs the case alone."""

from __future__ import annotations

import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from ...backends import Backend
from ...backends.host.report import CheckFault
from ...backends.protocol import ContextLost
from ...check import budget
from ...check.contender import run_kernel
from ...check.oracle import Oracle
from ...dataset import generate
from ...dataset.folder import check_size
from ...dataset.named import drawn
from ...fault import Fault
from ...files.child import Ended, survived
from ...kernel import Kernel, planner
from ...problem import DTYPE_BYTES, Problem
from ...row import rounded
from ..run import open_backend
from . import large
from .cases import Case
from .cases import in_form as in_form
from .inputs import inputs

#: Types whose operations CuPy has compiled in this process.
_warmed: set[str] = set()

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class CaseResult:
    """What came of a case. message is empty where it passed; repro is the command that runs this case alone. watched: what --check has
    watched in its launches (Backend.watched); None without a check, and where a launch did not end."""

    kernel: str
    pass_: str
    case: Case
    passed: bool
    message: str
    seconds: float
    repro: str
    max_errors: dict[str, float]
    exit_code: int = 0
    watched: int | None = None

    @property
    def finding(self) -> bool:
        """Whether --check found it."""
        return isinstance(self, Found)

    def same_failure(self, other: CaseResult) -> bool:
        """Whether both failed in the same way: with the same exit code and, where it is values that are wrong, in a common tensor."""
        if self.passed or other.passed or self.exit_code != other.exit_code:
            return False
        return self.exit_code != 1 or bool(self.wrong & other.wrong)

    @property
    def wrong(self) -> set[str]:
        """The tensors that are wrong."""
        return {part.partition(" is wrong at ")[0] for part in self.message.split("; ") if " is wrong at " in part}


class Lost(CaseResult):
    """A failure that destroyed the CUDA context: this process can run nothing more on the GPU."""


class Found(CaseResult):
    """A failure that --check found."""


class Died(CaseResult):
    """A failure that ended the process of the case, which is not shrunk: each try would cost a process."""

    @classmethod
    def of(cls, chosen: Kernel, case: Case, repro: str, why: Ended) -> Died:
        """What came of a case of a kernel."""
        return cls(chosen.name, chosen.pass_, case, False, str(why), 0.0, repro, {}, why.exit_code)


class Backends:
    """The backend of each case, opened when first needed: one for each number of multiprocessors, on the CPU also for each seed of the
    schedules and each check.

    given: a seed that replaces those of the cases; check: a check that does. Raises as run.open_backend does.
    """

    def __init__(self, device: str, check: str | None, given: int | None) -> None:
        self._device, self._check, self._given = device, check, given
        self.first = open_backend(device, check, given)
        self._opened: dict[tuple[str | None, int, int | None], Backend] = {(check, given or 0, None): self.first}

    def of(self, case: Case) -> Backend:
        """The backend that runs a case. A GPU has no schedules and no checks."""
        check, seed = self._check or case.check, case.schedule if self._given is None else self._given
        if self.first.name == "cuda":
            check, seed = self._check, self._given or 0
        key = check, seed, case.sms
        if key not in self._opened:
            self._opened[key] = open_backend(self._device, check, seed, sms=case.sms)
        return self._opened[key]


def compile_ahead(backend: Backend, pairs: Iterable[tuple[Case, Kernel]], of: Callable[[Case], Backend] | None = None) -> int:
    """Compile what the kernels need for their cases, several at once, into the backend's cache; returns how many.

    of: the backend of each case (Backends.of), where they have several. On a GPU also what the reference is computed with. What fails here
    fails again in its case, which reports it. The order is random: processes that start together and share the cache find what others have
    compiled, instead of compiling all of it each.
    """
    wanted: dict[tuple[str, bool, str | None, tuple[tuple[str, str], ...]], tuple[Backend, Kernel, Case]] = {}
    seen: set[tuple[str, Problem, bool, int | None, str | None]] = set()
    for case, chosen in pairs:
        form, own = in_form(chosen, case), of(case) if of else backend
        key = str(chosen.path), drawn(case.problem), form is chosen, case.sms, case.check
        if key in seen:
            continue
        seen.add(key)
        with suppress(Fault):
            macros = planner.plan(form, drawn(case.problem), own.device()).macros
            wanted.setdefault((str(chosen.path), form.deterministic, getattr(own, "check", None), macros), (own, form, case))

    def work(job: Callable[[], object]) -> None:
        with suppress(Fault):
            job()

    jobs: list[Callable[[], object]] = [partial(own.load, form, drawn(case.problem)) for own, form, case in wanted.values()]
    if backend.xp is not np:
        jobs += [partial(_warm, backend, dtype) for dtype in DTYPE_BYTES if dtype not in _warmed]
        _warmed.update(DTYPE_BYTES)
    random.SystemRandom().shuffle(jobs)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(work, jobs))
    return len(wanted)


def _warm(backend: Backend, dtype: str) -> None:
    """Judge a small case of a dtype by every class: CuPy compiles each operation of each type when it is first used."""
    oracle = oracle_of(backend, Case(0, Problem.of(1, 4, 33, 16, 2, dtype=dtype, causal=True), 1.0, 0), "backward")
    for arithmetic in ("f32", "p16", "tf32"):
        oracle.judge(oracle.forward_outputs, arithmetic)


def oracle_of(backend: Backend, case: Case, pass_: str) -> Oracle:
    """The oracle of a case, for a backward pass also of the forward one. Raises UsageFault where the problem is too large.

    Under compute-sanitizer (a backend without guard bands) it computes on the CPU, so that only the kernel under test is looked at.
    """
    check_size(case.problem)
    names = ("Q", "K", "V") if pass_ == "forward" else generate.INPUTS
    xp = backend.xp if backend.guard_bytes else np
    return Oracle(drawn(case.problem), inputs(case.problem, case.seed, names, case.inputs, case.input_scale), None, xp)


def run_case(
    backend: Backend,
    chosen: Kernel,
    case: Case,
    which: str = "",
    deterministic: bool = False,
    oracle: Oracle | None = None,
    repeat: int | None = 0,
) -> CaseResult:
    """One case: a launch, another on new inputs over the first's outputs, and `repeat` on the same inputs, which must give the same bits
    where the kernel promises that (None: the first alone). A fault is a failed result, not an exception.

    which: the matrix that the case has its number in; without one the command has its text. oracle: that of the case, if there is one.
    Raises large.NoRoom.
    """
    start = time.perf_counter()
    repro = repro_of(backend, chosen, case, which, deterministic, repeat)
    largest: dict[str, float] = {}
    message, broken, code, kind, watched = "", "", 0, CaseResult, None
    try:
        oracle = oracle or oracle_of(backend, case, chosen.pass_)
        form = in_form(chosen, case)
        if case.copies > 1:
            verdicts = large.judge(backend, form, oracle, case.copies)
        else:
            done = run_kernel(backend, form, oracle, oracle.inputs_of(chosen.pass_))
            done = done if repeat is None else done.relaunched(repeat)
            verdicts, broken, watched = done.verdicts, done.broken, done.watched
        largest = {name: rounded(v.max_abs) for name, v in verdicts.items()}
        message = "; ".join(budget.message(v) for v in verdicts.values() if not v.passed) or broken
        code = 1 if message else 0
    except large.NoRoom:
        raise
    except Fault as fault:
        message, code = str(fault), fault.exit_code
        kind = Lost if isinstance(fault, ContextLost) else Found if isinstance(fault, CheckFault) else CaseResult
    seconds = time.perf_counter() - start
    return kind(chosen.name, chosen.pass_, case, not message, message, seconds, repro, largest, code, watched)


def repro_of(backend: Backend, chosen: Kernel, case: Case, which: str, deterministic: bool, repeat: int | None) -> str:
    """The command that runs a case alone."""
    named = f"--matrix {which} --case {case.number}" if which else f"--case {shlex.quote(case.text())}"
    command = f"fa-cli verify {shlex.quote(chosen.spec)} --mode {chosen.pass_} {named} --device {backend.name}"
    if (seed := getattr(backend, "seed", case.schedule)) != case.schedule:
        command += f" --schedule-seed {seed}"
    if (check := getattr(backend, "check", None)) and check != case.check:
        command += f" --check {check}"
    return command + " --deterministic" * deterministic + f" --repeat {repeat}" * bool(repeat)


def each_survived(backend: Backend, items: Sequence[T], work: Callable[[T], R], died: Callable[[T, Ended], R], label: str) -> Iterator[R]:
    """work(item) for each item; on the CPU in a fork, since a kernel may end the process it runs in: then died(item, why).

    AddressSanitizer ends its process and tells the parent of this one, and a process that has used torch's threads must not fork.
    """
    fork = backend.name == "cpu" and getattr(backend, "check", None) != "asan" and "torch" not in sys.modules
    return survived(items, work, died, label) if fork else map(work, items)
