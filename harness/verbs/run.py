"""Kernels and peers x data x backend -> outputs, verdicts and times: the main job."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from .. import dataset
from ..array import Array
from ..backends import Backend, pick
from ..check import budget, choose, memory
from ..check.ahead import ahead
from ..check.contender import Contender, PassResult, run_kernel
from ..check.oracle import Oracle, arithmetic_of, oracle_for, small
from ..check.request import Request, with_options
from ..dataset import named
from ..dataset.generate import INPUTS
from ..fault import UsageFault
from ..files import disk_fault, locked
from ..formula import DOCUMENT, SINKS, stated
from ..measure import alone
from ..measure import sampling as measure
from ..problem import BLOCK_TABLE, MODES, PASSES, Problem, told
from ..row import html_table


@dataclass(frozen=True)
class Result:
    """What a compute did with a problem in a mode. Times are medians in milliseconds, None where a check failed or it was not run."""

    compute: str
    mode: str
    device: str
    device_name: str
    problem: Problem
    passes: Mapping[str, PassResult]
    share: float  # of all rows, the part that was compared with float64
    outputs: Path | None = None
    notes: tuple[str, ...] = ()
    seed: int | None = None
    deterministic: bool = False  # whether the deterministic form was asked for

    @property
    def passed(self) -> bool:
        """Whether every tensor of every pass is within its budget."""
        return all(p.passed for p in self.passes.values())

    @property
    def arithmetic(self) -> str:
        """The class of arithmetic that it was judged by: f32, p16, tf32 or f64; two with a + where its passes differ."""
        return "+".join(dict.fromkeys(p.arithmetic for p in self.passes.values()))

    @property
    def verdicts(self) -> dict[str, budget.Verdict]:
        """Every tensor's verdict, forward tensors first."""
        return {name: v for p in self.passes.values() for name, v in p.verdicts.items()}

    @property
    def broken(self) -> str:
        """The rules that launches after the first broke, a pass each, or an empty text."""
        return "; ".join(f"{name}: {p.broken}" for name, p in self.passes.items() if p.broken)

    @property
    def time_ms(self) -> dict[str, float | None]:
        """Median milliseconds of each pass; None for a kernel that failed a check in any pass."""
        times = {name: p.timings["warm"].median_ms for name, p in self.passes.items() if self.passed and "warm" in p.timings}
        return {name: times.get(name) for name in PASSES}

    def __repr__(self) -> str:
        times = "".join(f", {name} {ms:.4g} ms" for name, ms in self.time_ms.items() if ms)
        what = f"{self.compute} {self.mode} {self.problem.describe()} on {self.device}"
        return f"Result({what}: {'PASS' if self.passed else 'FAIL'}{times})"

    def _rate(self, work: Callable[[str], float]) -> dict[str, float | None]:
        return {name: work(name) / (ms * 1e-3) if ms else None for name, ms in self.time_ms.items()}

    @property
    def tflops(self) -> dict[str, float | None]:
        """10^12 floating-point operations a second, of visible pairs only (Problem.flops)."""
        return self._rate(lambda name: self.problem.flops(name) / 1e12)

    @property
    def gbps(self) -> dict[str, float | None]:
        """10^9 bytes a second of the least HBM traffic: every input read once, every output written once (Problem.bytes)."""
        return self._rate(lambda name: self.problem.bytes(name) / 1e9)


class Results(list[Result]):
    """Results as a notebook shows them: a row a kernel and pass, with the tensor that is nearest to its budget."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no results"

    def _repr_html_(self) -> str:
        rows = []
        for result in self:
            for name, each in result.passes.items():
                worst = max(each.verdicts.values(), key=lambda v: v.max_abs / v.budget if v.budget else 0.0)
                of = (result.problem.describe(), result.device_name, result.compute, name, "PASS" if each.passed else "FAIL")
                rows.append((*of, worst.tensor, worst.max_abs, worst.budget, result.time_ms[name]))
        return html_table(("problem", "device", "kernel", "pass", "verdict", "tensor", "max |error|", "budget", "ms (median)"), rows)


def contend(
    backend: Backend, contender: Contender, mode: str, oracle: Oracle, forward: Mapping[str, Array] | None = None, chained: bool = False
) -> dict[str, PassResult]:
    """The passes of a mode by a contender, checked, not yet timed.

    A kernel's backward pass reads the O and logsumexp of `forward` (None: the reference's), or where chained those that its own
    forward pass has just written.
    """
    passes: dict[str, PassResult] = {}
    for pass_ in MODES[mode]:
        given = passes["forward"].outputs if chained and "forward" in passes else forward
        passes[pass_] = contender.run(backend, oracle, pass_, given)
    return passes


def time_together(
    results: Sequence[Result],
    backend: Backend,
    timing: str,
    policy: measure.Policy | None = None,
    progress: Callable[[str], None] = lambda text: None,
    ready: dict[str, dict[str, measure.Ready]] | None = None,
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Result]:
    """The results with a timing more: all that passed, pass by pass. What failed a check is never timed.

    timing: warm or cold, in round-robin turns; burst or energy, one after the other. ready: what an earlier timing of the same results
    has warmed up, by pass; it is filled. quiet: the context in which they are warmed up and sampled, in which no other process of the run
    uses the machine; the launches that are judged when all passes are timed come after it.
    """
    take = {"burst": alone.burst, "energy": alone.energy}.get(timing)
    done, found = list(results), list[tuple[str, Callable[[], dict[str, measure.Timing]]]]()
    with quiet():
        for pass_ in PASSES:
            runs = {str(i): r.passes[pass_].timed for i, r in enumerate(done) if r.passed and pass_ in r.passes}
            if not runs:
                continue
            names = ", ".join(done[int(i)].compute for i in runs)

            def tell(text: str, what: str = f"{names} {pass_}") -> None:
                progress(f"{text}: {what}")

            warm = ready.setdefault(pass_, {}) if ready is not None else None
            given = (policy or measure.POLICY[backend.name], tell, warm)
            if take:
                found.append((pass_, partial(dict, take(runs, backend, *given))))
            else:
                found.append((pass_, measure.sample(runs, backend, timing, *given).timings))
    for pass_, timings in found:
        for i, each in timings().items():
            passes = done[int(i)].passes
            done[int(i)] = replace(done[int(i)], passes={**passes, pass_: passes[pass_].with_timing(each)})
    return done


def open_backend(
    device: str, check: str | None = None, schedule_seed: int | None = None, debug: bool = False, sms: int | None = None
) -> Backend:
    """The backend for --device, --check, --schedule-seed, --debug and --sms. --check and --schedule-seed exist on the CPU only, --check and
    --debug are two builds of the kernel. Raises UsageFault otherwise."""
    if check and debug:
        why = "each is a build of its own: a debugger steps through code without a check's instructions"
        raise UsageFault(f"--debug and --check {check} together", why, "use one, then the other")
    if check or schedule_seed:
        if device.startswith("cuda"):
            raise UsageFault(
                "--check and --schedule-seed need the CPU engine",
                f"--device is {device}",
                "use --device cpu; on a GPU: compute-sanitizer --tool racecheck fa-cli run …",
            )
        return pick("cpu", check=check, seed=schedule_seed, debug=debug, sms=sms)
    return pick(device, debug=debug, sms=sms)


@dataclass(frozen=True, kw_only=True)
class Run(Request):
    """What `fa-cli run` is asked for.

    problem: by default Problem.of(). Its inputs are generated into a folder under data_root, or reused there. data_folder: a folder to use
    instead. causal and scale override the problem's. mask, score, window, softcap, alibi, prefix: as formula.stated takes them; documents: a
    file, and tensors: files by name, as dataset.named reads them. sinks: a text, or a .npy file of a logit a query head. check, schedule_seed,
    debug, sms: as :func:`open_backend`. progress receives what is being done, after "N/M " where the amount of work is known. samples: at least
    so many of each kernel and pass; 0: until the median is steady. no_time: check only.
    """

    computes: str | Path | Sequence[str | Path] = field(default="fa2", kw_only=False)
    data_folder: Path | str | None = None
    data_root: Path | str = Path("data")
    tolerance: float | None = None
    allow_nonfinite: bool = False
    check: str | None = None
    schedule_seed: int | None = None
    causal: bool | None = None
    scale: float | None = None
    mask: str | None = None
    score: str | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: bool = False
    prefix: int | None = None
    documents: Path | str | None = None
    sinks: str | None = None
    tensors: Mapping[str, Path | str] = field(default_factory=dict)
    debug: bool = False
    sms: int | None = None
    samples: int = 0
    no_time: bool = False
    progress: Callable[[str], None] = lambda text: None


@with_options(Run)
def run(asked: Run) -> Results:
    """Run kernels and peers on one problem, check every output, and time those that pass.

    The first one's outputs are written into the data folder, which is locked meanwhile. Timing is warm, in round-robin turns. With check
    or no_time each is launched once more instead of timed. With debug, which compiles for a debugger, each is launched once. A failed check is no
    exception: see Result.passed. Raises Fault for mistakes of usage, data, environment, kernel or disk.
    """
    mode, progress = asked.mode, asked.progress
    _refuse_nothing(asked)
    backend = open_backend(asked.device, asked.check, asked.schedule_seed, asked.debug, asked.sms)
    found = dataset.open_(Path(asked.data_folder)) if asked.data_folder else None
    shape = found.problem if found else asked.problem or Problem.of()
    given = {"causal": asked.causal, "scale": asked.scale}
    problem = _stated(shape.with_(**{name: value for name, value in given.items() if value is not None}), asked)
    dataset.check_size(problem)
    contenders, notes = choose.choose(asked, backend.device(), [problem])
    _refuse(contenders, problem, asked, backend)
    with ExitStack() as held:
        compiling = held.enter_context(ahead(backend, contenders, problem, asked.passes))
        found = found or dataset.write(problem, asked.seed, Path(asked.data_root), progress=progress)
        if not os.access(found.folder, os.W_OK | os.X_OK):  # said before any work is done, not after it
            raise disk_fault(found.folder, PermissionError(13, "permission denied"))
        held.enter_context(locked(found.folder))
        progress(f"reads {found.folder}")
        inputs = found.read_inputs(("Q", "K", "V") if mode == "forward" else INPUTS, asked.allow_nonfinite)
        forward = None
        if mode == "backward":
            readers = {each.name: arithmetic_of(problem, each.kernels["backward"]) for each in contenders if not each.peer}
            forward = dataset.read_forward(found, problem, readers)
        if not small(problem):
            compiling.checks(progress)
        oracle = Oracle(problem, inputs, asked.tolerance, np if small(problem) else backend.xp, progress)
        progress("compiles the kernels")
        compiling.kernels()
        results: list[Result] = []
        for each in contenders:
            passes = contend(backend, each, mode, oracle, forward, chained=mode == "both")
            result = _result(each, mode, backend, oracle, passes, found.seed)
            results.append(replace(result, outputs=found.folder, notes=(*found.warnings, *notes)))
            if len(results) == 1:
                outputs = {name: array for p in passes.values() for name, array in p.outputs.items()}
                progress(f"writes {found.folder}")
                dataset.write_outputs(found, outputs, _record(result))
    if asked.debug:
        return Results(results)
    if asked.check or asked.no_time:  # instrumented code has no speed worth printing
        done = [replace(each, passes={name: p.relaunched() for name, p in each.passes.items()}) for each in results]
    else:
        policy = replace(measure.POLICY[backend.name], asked_samples=asked.samples)
        done = time_together(results, backend, "warm", policy, progress=progress)
    if done[0].passed != results[0].passed:  # a later launch broke a rule
        with locked(found.folder):
            dataset.write_outputs(found, outputs, _record(done[0]))
    progress("")
    return Results(done)


def _refuse_nothing(asked: Run) -> None:
    """Raise UsageFault where there is nothing to run, and for a tolerance that is no absolute error."""
    if not asked.specs:
        raise UsageFault("no kernel to run", "the list of them is empty", "fa-cli list")
    if asked.samples and asked.no_time:
        raise UsageFault(f"--samples {asked.samples} beside --no-time", "nothing is sampled", "leave one of them out")
    if asked.tolerance is not None and not 0 <= asked.tolerance < math.inf:
        why = "an absolute error is a number of at least 0"
        raise UsageFault(f"tolerance is {asked.tolerance}", why, "leave it out for the budget alone")


def _refuse(contenders: Sequence[Contender], problem: Problem, asked: Run, backend: Backend) -> None:
    """Raise UsageFault, before a byte is written, where one does not take the problem, they do not fit the memory together, or an option
    that only kernels of ours have is given to peers alone."""
    only_ours = {"check": asked.check, "schedule-seed": asked.schedule_seed, "debug": asked.debug, "sms": asked.sms, "tile": asked.tiles}
    flags = [f"--{name}" for name, given in only_ours.items() if given]
    if flags and all(each.peer for each in contenders):
        names = ", ".join(each.name for each in contenders)
        raise UsageFault(f"{flags[0]} has no effect on {names}", "it is for kernels, and these are libraries", "name a kernel too")
    for each in contenders:
        each.refuse(problem, asked.passes, backend)
    if backend.name == "cpu":  # all of them have their tensors at once
        memory.check(problem, asked.passes, [each.workspace_bytes(problem, backend) for each in contenders])


def check_in_memory(
    contender: Contender, mode: str, problem: Problem, backend: Backend, seed: int = 42, oracle: Oracle | None = None
) -> Result:
    """Check a contender on data made in memory, with the reference's O and logsumexp for a kernel's backward pass; nothing is
    written, and it is not timed (:func:`time_together`). Where the reference is of a sample of rows, a kernel's backward pass reads what a
    forward pass wrote: its own, or in mode backward that of choose.forward_for.

    oracle: one made by :func:`oracle_for` may be given to save computing it again for another contender.
    """
    oracle = oracle or oracle_for(problem, backend, mode, seed)
    contender.refuse(problem, MODES[mode], backend)
    sample = oracle.reference.rows is not None and not contender.peer
    forward = None
    if sample and mode == "backward" and (kernel := choose.forward_for(contender.kernels["backward"], problem)):
        forward = run_kernel(backend, kernel, oracle, oracle.inputs_of("forward")).outputs
    passes = contend(backend, contender, mode, oracle, forward, chained=sample and mode == "both")
    return _result(contender, mode, backend, oracle, passes, seed)


def _result(
    contender: Contender, mode: str, backend: Backend, oracle: Oracle, passes: Mapping[str, PassResult], seed: int | None
) -> Result:
    return Result(
        compute=contender.name,
        mode=mode,
        device=backend.name,
        device_name=backend.device().name,
        problem=oracle.problem,
        passes=passes,
        share=oracle.reference.share,
        seed=seed,
        deterministic=contender.deterministic,
    )


def _stated(problem: Problem, asked: Run) -> Problem:
    """A problem with the masks and scores that are asked for. Raises UsageFault and DataFault for what is wrong with them."""
    if asked.prefix is not None and problem.causal:
        raise UsageFault("--prefix and --causal together", "a prefix mask is causal after its prefix", "leave out --causal")
    words = {name: getattr(asked, name) for name in ("mask", "score", "window", "softcap", "alibi", "prefix")}
    with told():
        texts = stated(problem.heads_q, documents=asked.documents is not None, **words)
    table = asked.tensors.get(BLOCK_TABLE) if problem.page_size else None
    if table:
        problem = problem.with_(block_table=named.read(Path(table)))
    if asked.sinks is not None:
        texts["sinks"] = f"{SINKS}[h]" if asked.sinks.endswith(".npy") else asked.sinks
    if not texts and len(asked.tensors) == bool(table):
        return problem
    values: dict[str, object] = {
        name: named.read(Path(path)) for name, path in asked.tensors.items() if not (table and name == BLOCK_TABLE)
    }
    if asked.documents is not None:
        values[DOCUMENT] = named.documents(Path(asked.documents), problem)
    if asked.sinks is not None and asked.sinks.endswith(".npy"):
        values[SINKS] = named.read(Path(asked.sinks))
    made = problem.with_(**texts, tensors=values)
    made.values()  # refuses a tensor that has none
    return made


def _record(result: Result) -> dict[str, object]:
    problem = result.problem
    return {
        "kernel": result.compute,
        "mode": result.mode,
        "causal": problem.causal,
        "causal_shift": problem.causal_shift,
        "scale": problem.scale,
        "mask": problem.mask,
        "score": problem.score,
        "sinks": problem.sinks,
        **problem.hashes,
        **({"page_size": problem.page_size, "lengths": list(problem.lengths)} if problem.page_size else {}),
        "dtype": problem.dtype,
        **({"dtype_kv": problem.dtype_kv} if problem.has_own_dtype_kv else {}),
        "device": result.device,
        "verdict": "PASS" if result.passed else "FAIL",
        "verdicts": {name: "PASS" if p.passed else "FAIL" for name, p in result.passes.items()},
        "arithmetic": {name: p.arithmetic for name, p in result.passes.items()},
        "source_hash": {name: p.kernel.source_hash if p.kernel else p.ran for name, p in result.passes.items()},
    }


def asan_child_needed(check: str | None) -> bool:
    """Whether this process must start itself again under AddressSanitizer (:func:`run_under_asan`)."""
    from ..backends.host.report import ASAN_CHILD

    return check == "asan" and not os.environ.get(ASAN_CHILD)


def run_under_asan(arguments: Sequence[str]) -> int:
    """Run a Python command line again with AddressSanitizer loaded; see backends/host/backend.py."""
    from ..backends.host import backend as host

    return host.run_under_asan(arguments)
