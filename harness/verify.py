"""Errors only: a kernel over a matrix of shapes, types, masks, scales and schedules, each case against float64.

The matrix is a covering array of strength 2: every pair of levels of any two factors occurs in some case. A fault that needs two
levels at once (a tail tile and bfloat16, grouped heads and the causal mask) is found without running the full product.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from . import child, kernel
from .backends import Backend
from .check import budget
from .check.contender import run_kernel
from .check.oracle import oracle_for
from .choose import kernels
from .fault import Fault, UsageFault
from .problem import MODES, Problem
from .run import open_backend

#: Lengths around the tiles kernels use (32, 64, 128), and odd ones.
EDGES = (1, 2, 3, 31, 33, 63, 64, 65, 97, 100, 113, 127, 128, 129, 200, 257, 1023, 1025)
#: (seq_q, seq_kv): longer and shorter, so that under the causal mask some queries see no key.
CROSS = (
    (1, 239),
    (239, 1),
    (3, 799),
    (799, 3),
    (113, 203),
    (128, 217),
    (108, 256),
    (256, 512),
    (512, 256),
    (1023, 1024),
    (1024, 1023),
)
#: Ten shapes, small to large, as the sweeps `forward` and `backward` have them: batch, heads, length; head dim 64.
SEED_SHAPES = (
    (1, 1, 128),
    (2, 4, 256),
    (2, 8, 256),
    (8, 16, 32),
    (2, 8, 512),
    (8, 16, 100),
    (4, 8, 512),
    (2, 8, 1024),
    (4, 12, 1024),
    (8, 16, 2048),
)
#: The quick matrix: a tile less one, whole tiles, a tile and one, and both ways across.
QUICK = ((1, 1), (63, 63), (128, 128), (129, 129), (113, 203), (239, 1), (3, 799))
HEAD_DIMS = (1, 16, 40, 59, 64, 80, 96, 111, 128, 160, 256)
GROUPS = (1, 3, 8)
#: Factors on Q and K; beyond 10 only forward, and only for kernels that promise any logits (float16 holds no more than 100).
SCALES = {"forward": (1e-3, 1.0, 10.0, 30.0, 1e4), "backward": (1e-3, 1.0, 10.0)}
#: Factors on the softmax scale 1/sqrt(dim): a kernel that ignores args.scale is wrong at the second.
SOFTMAX_SCALES = (1.0, 0.5)
SCHEDULES = (0, 7)
MATRICES = ("quick", "full")
#: A level of a factor of the matrix: a pair of lengths, a width, a dtype, whether causal …
Level = Any
_MOST = {"cpu": 200, "cuda": 300}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. number is its place, for running it alone; schedule 0 is index order (the CPU backend's seeds)."""

    number: int
    problem: Problem
    input_scale: float
    schedule: int
    deterministic: bool = False  # which form of a kernel that has two

    def describe(self) -> str:
        """One line."""
        text = self.problem.describe()
        if self.input_scale != 1:
            text += f" input x{self.input_scale:g}"
        return text + (f" schedule {self.schedule}" if self.schedule else "") + " deterministic" * self.deterministic


@dataclass(frozen=True)
class CaseResult:
    """What came of a case. message is empty where it passed; repro is the command that runs this case alone."""

    kernel: str
    pass_: str
    case: Case
    passed: bool
    message: str
    seconds: float
    repro: str
    max_errors: dict[str, float]
    exit_code: int = 0


def matrix(chosen: kernel.Kernel, which: str, device: str) -> list[Case]:
    """The cases of a kernel: those its header promises. quick is some 50, full at most 200 on cpu and 300 on cuda."""
    if which not in MATRICES:
        raise UsageFault(f"unknown matrix {which!r}", f"known: {', '.join(MATRICES)}", "use --matrix quick")
    lengths = [(s, s) for s in EDGES] + list(CROSS) if which == "full" else list(QUICK)
    if not chosen.cross:
        lengths = [pair for pair in lengths if pair[0] == pair[1]]
    scales = [s for s in SCALES[chosen.pass_] if s <= 10 or chosen.logits == float("inf")]
    factors: dict[str, list[Level]] = {
        "length": lengths,
        "dim": [d for d in HEAD_DIMS if d <= chosen.head_dims[-1] and (d <= 128 or which == "full")],
        "causal": [False, True] if chosen.causal else [False],
        "group": list(GROUPS) if chosen.gqa else [1],
        "dtype": ["float32" if d == "tf32" else d for d in chosen.dtypes],
        "scale": scales,
        "softmax": list(SOFTMAX_SCALES) if chosen.takes_scale else [1.0],
        "schedule": list(SCHEDULES) if device == "cpu" else [0],
    }
    if len(chosen.forms) > 1:
        factors["deterministic"] = list(chosen.forms)
    rows = list(covering(factors, chosen.head_dims))
    cases: list[tuple[Problem, float, int, bool]] = []
    for row in rows:
        queries, keys = row["length"]
        group = row["group"]
        batch = 1 if queries * keys > 1 << 16 else 2
        heads = {1: 2, 3: 6, 8: 8}[group] if queries * keys <= 1 << 16 else max(group, 2 if device == "cuda" else 1)
        scale = row["dim"] ** -0.5 * row["softmax"]
        problem = Problem.of(batch, heads, queries, row["dim"], heads // group, keys, row["dtype"], row["causal"], scale)
        cases.append((problem, row["scale"], row["schedule"], row.get("deterministic", False)))
    if which == "full":
        large = [*_seed_shapes(chosen, device), *(_large(chosen) if device == "cuda" else ())]
        cases += [(problem, 1.0, 0, len(chosen.forms) > 1 and i % 2 == 1) for i, problem in enumerate(large)]
    assert len(cases) <= _MOST[device], f"{len(cases)} cases: a level too many in a factor"
    return [Case(i, *case) for i, case in enumerate(cases)]


def _seed_shapes(chosen: kernel.Kernel, device: str) -> Iterator[Problem]:
    masks = [False, True] if chosen.causal and device == "cuda" else [False]
    dtypes = ["float32" if d == "tf32" else d for d in chosen.dtypes]
    for i, (batch, heads, length) in enumerate(SEED_SHAPES):
        dtype = dtypes[i % len(dtypes)]
        if device == "cpu" and length > 256:  # scaled down: a CPU takes seconds for what a GPU does in a millisecond
            batch, heads, length = 1, max(1, heads // 4), 512
        for causal in masks:
            yield Problem.of(batch, heads, length, 64, dtype=dtype, causal=causal)


def _large(chosen: kernel.Kernel) -> Iterator[Problem]:
    """Long rows, many batches, and as many heads as a grid may have blocks in y."""
    dtypes = [d for d in chosen.dtypes if d in ("float32", "bfloat16")]
    for dtype, causal in itertools.product(dtypes, [False, True] if chosen.causal else [False]):
        yield Problem.of(1, 2, 4097, 64, dtype=dtype, causal=causal)
        yield Problem.of(60, 4, 129, min(128, chosen.head_dims[-1]), dtype=dtype, causal=causal)
        yield Problem.of(1, 65535, 3, 16, dtype=dtype, causal=causal)


def covering(factors: dict[str, list[Level]], widths: Sequence[int]) -> Iterator[dict[str, Level]]:
    """Rows over the factors in which all allowed pairs of levels occur, greedily few, the same every time.

    (length, dim) is too many pairs for a matrix that runs in minutes: each length occurs with each compiled width instead.
    """
    draw = random.Random(1)
    names = list(factors)

    def keys(row: dict[str, Level]) -> Iterator[tuple[Level, ...]]:
        for a, b in itertools.combinations(names, 2):
            if (a, b) == ("length", "dim"):
                yield a, b, row[a], next(w for w in widths if w >= row[b])
            else:
                yield a, b, row[a], row[b]

    def allowed(row: dict[str, Level]) -> bool:
        return not (row["dtype"] == "float16" and row["scale"] > 100)

    wanted: set[tuple[Level, ...]] = set()
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            row = {a: x, b: y}
            if {a, b} == {"dtype", "scale"} and not allowed(row):
                continue
            if (a, b) == ("length", "dim"):
                y = next(w for w in widths if w >= y)
            wanted.add((a, b, x, y))
    while wanted:
        seed = min(wanted, key=repr)  # start from a pair that no row has, so every row makes progress
        best: dict[str, Level] = {}
        gain = -1
        for _ in range(40):
            row = {name: draw.choice(levels) for name, levels in factors.items()}
            row[seed[0]] = seed[2]
            dims = factors["dim"]
            row[seed[1]] = (
                seed[3] if seed[:2] != ("length", "dim") else draw.choice([d for d in dims if next(w for w in widths if w >= d) == seed[3]])
            )
            if not allowed(row):
                continue
            found = sum(key in wanted for key in keys(row))
            if found > gain:
                best, gain = row, found
        wanted.difference_update(keys(best))
        yield best


def verify(
    computes: Iterable[str],
    which: str = "quick",
    *,
    mode: str = "both",
    device: str = "auto",
    check: str | None = None,
    schedule_seed: int | None = None,
    case: int | None = None,
    deterministic: bool = False,
    progress: Callable[[CaseResult], None] = lambda result: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[CaseResult]:
    """Run each kernel (a name, number, range or path; none: the whole tree; every pass it has among mode's) over its matrix.

    case runs one case alone. A kernel with two forms is checked in both, or with deterministic in that one. A backward pass reads
    the reference's O and logsumexp. note is told what a range leaves out. Raises UsageFault for unknown kernels.
    """
    first = open_backend(device, check, schedule_seed)
    backends: dict[int, Backend] = {0: first} if schedule_seed is None else {schedule_seed: first}
    results = []
    every = dict.fromkeys(each.name for each in kernel.catalogue())
    wanted = () if mode == "both" else MODES[mode]
    found, left_out = kernels(list(computes) or every, MODES[mode], wanted, deterministic=deterministic)
    for text in left_out:
        note(text)
    for chosen in found:
        cases = [each for each in matrix(chosen, which, first.name) if case is None or each.number == case]
        compile_ahead(first, chosen, cases)

        def work(each: Case, chosen: kernel.Kernel = chosen) -> CaseResult:
            schedule = schedule_seed if schedule_seed is not None else each.schedule
            if schedule not in backends:
                backends[schedule] = open_backend(device, check, schedule)
            return run_case(backends[schedule], chosen, each, which, deterministic)

        def died(each: Case, why: child.Ended, chosen: kernel.Kernel = chosen) -> CaseResult:
            repro = _repro(first, chosen, each, which, deterministic)
            return CaseResult(chosen.name, chosen.pass_, each, False, str(why), 0.0, repro, {}, why.exit_code)

        # what a kernel ends on the CPU is then a process of its own; AddressSanitizer ends that and tells this process's parent
        fork = first.name == "cpu" and check != "asan" and "torch" not in sys.modules
        for result in child.survived(cases, work, died, f"the process of {chosen.label}") if fork else map(work, cases):
            results.append(result)
            progress(result)
    if case is not None and not results:
        raise UsageFault(f"there is no case {case}", f"the {which} matrix is shorter", "fa-cli verify -v without --case lists the cases")
    return results


def compile_ahead(backend: Backend, chosen: kernel.Kernel, cases: Iterable[Case]) -> None:
    """Compile what the cases need, several at once, into the backend's cache. What fails here fails again in its case, which reports it."""
    wanted: dict[tuple[tuple[str, str], ...], Case] = {}
    for each in cases:
        with suppress(Fault):
            wanted.setdefault(in_form(chosen, each).plan(each.problem, backend.device()).macros, each)

    def load(case: Case) -> None:
        with suppress(Fault):
            backend.load(in_form(chosen, case), case.problem)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(load, wanted.values()))


def in_form(chosen: kernel.Kernel, case: Case) -> kernel.Kernel:
    """The form of a kernel that a case is of."""
    return chosen.made_deterministic() if case.deterministic else chosen


def run_case(backend: Backend, chosen: kernel.Kernel, case: Case, which: str, deterministic: bool = False) -> CaseResult:
    """One case; a fault is a failed result, not an exception."""
    start = time.perf_counter()
    repro = _repro(backend, chosen, case, which, deterministic)
    largest: dict[str, float] = {}
    message, code = "", 0
    try:
        oracle = oracle_for(case.problem, backend, chosen.pass_, 42 + case.number, case.input_scale)
        done = run_kernel(backend, in_form(chosen, case), oracle, oracle.inputs_of(chosen.pass_))
        largest = {name: v.max_abs for name, v in done.verdicts.items()}
        message = "; ".join(budget.message(v) for v in done.verdicts.values() if not v.passed)
        code = 1 if message else 0
    except Fault as fault:
        message, code = str(fault), fault.exit_code
    return CaseResult(chosen.name, chosen.pass_, case, not message, message, time.perf_counter() - start, repro, largest, code)


def _repro(backend: Backend, chosen: kernel.Kernel, case: Case, which: str, deterministic: bool) -> str:
    """The command that runs a case alone."""
    command = f"fa-cli verify {shlex.quote(chosen.spec)} --mode {chosen.pass_} --matrix {which} --case {case.number}"
    return f"{command} --device {backend.name}" + " --deterministic" * deterministic
