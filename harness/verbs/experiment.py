"""An experiment: a sweep's shapes x kernels and peers -> rows, samples, an environment record, figures and a summary.

Every shape's contenders are checked first, then measured in round-robin turns, warm and on a GPU cold, then one by one what the sweep
asks for besides (burst, energy). The rows of a shape and their samples are appended together as they are done, so an interrupted run
keeps them, and --resume goes on from there. A kernel that loses the CUDA context, or on the CPU ends its process, costs its own row: a
fresh process measures the rest. One experiment at a time holds the folder.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import backends, files, peers
from ..backends import Backend, ContextLost
from ..check.ahead import load_all
from ..check.choose import AUTO, choose, named_apart
from ..check.contender import Contender
from ..check.oracle import ROWS, Oracle, oracle_for
from ..check.request import Request, with_options
from ..dataset.generate import generate
from ..fault import DiskFault, EnvironmentFault, UsageFault, install_extra, meant
from ..files import child, environment
from ..kernel import catalogue
from ..measure import ceilings
from ..measure.sampling import MANY, POLICY, Policy, Ready
from ..peers.base import installed
from ..problem import MODES, PASSES, Problem
from ..row import CEILING, TYPES, Row, Rows, read_rows
from . import operator, results, run, runs
from .sweep import Options as Options
from .sweep import Sweep, load, matches
from .workers import Share, Turns, in_rounds, serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..torch_op.training import Speed

SEED = 42
#: A shape, by its test's name, and what is measured on it.
Cells: TypeAlias = tuple[tuple[str, Problem], list[Contender]]
#: What messages of CUDA libraries say when the CUDA context is lost.
_CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}  # of FlashAttention-4: a worker finds what another one has compiled
_CROWDED = "crowded"  # what a worker says of a problem that did not fit beside the others
_LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "illegal instruction", "context is dead")


@dataclass(frozen=True)
class Outcome:
    """What a sweep gave: its rows, the files written, and notes on the choice of shapes and contenders. seed: the one that drew them."""

    rows: list[Row]
    files: list[Path]
    notes: list[str] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)  # of a sweep of trainings, which has no rows
    seed: int | None = None


class _Lost(Exception):
    """The CUDA context is lost; the row that says so is written. Its text is the run_id."""


@with_options(Options)
def experiment(options: Options) -> Rows:
    """The rows of :func:`run_sweep`, for notebooks: experiment("seqlen", device="cpu"). The arguments are the fields of Options."""
    return Rows(run_sweep(options).rows)


def run_sweep(
    options: Options,
    progress: Callable[[str], None] = lambda text: None,
    measured: Callable[[list[Row], int | None], None] = lambda rows, seed: None,
) -> Outcome:
    """Run a sweep and write results.csv and samples.jsonl (a shape at a time), env.json, summary.md and figures.

    progress is told what is being done, with N/M before it; measured is given the rows, and the seed that drew their problems if one did,
    before the figures are drawn, which takes a while.

    What fails its check, does not launch, refuses a shape or is absent is a row that says so, and the sweep goes on. On Ctrl-C
    the finished rows stay. Raises UsageFault for an unknown sweep, kernel or peer, EnvironmentFault and DiskFault for what
    stops every row.
    """
    if not (options.samples >= 0 and 0 <= options.min_time < math.inf):
        what = f"samples={options.samples}, min_time={options.min_time}"
        raise UsageFault(what, "both are at least 0, and finite", "0 is until the median is steady")
    if options.record and options.axes:
        raise UsageFault("--record beside --axis", "a run of record has the sweep's own shapes", "leave out --record, or --axis")
    sweep = load(options.name, options.seed, options.cases, options.axes)
    if sweep.training:
        return _train(sweep, options, progress)
    options = replace(options, deterministic=options.deterministic or sweep.deterministic)
    mode = options.mode or sweep.mode
    backend = backends.pick(options.device)
    small = backend.name == "cpu" and not options.full
    shapes = _selected(sweep.cpu_shapes if small else sweep.shapes, options)
    notes = (
        ["on the CPU the sweep's small [cpu] shapes were run; --full runs the stated ones"]
        if small and sweep.cpu_shapes is not sweep.shapes
        else []
    )
    notes += [f"left out: {name}: {why}" for name, why in sweep.left_out.items()]
    contenders, left_out = _contenders(options, sweep, mode, shapes, backend)
    notes += left_out
    shaped = list(zip(shapes, contenders, strict=True))
    if options.dry_run:
        left = _left(runs.begun(sweep.name, options, backend), sweep, mode, backend, shaped) if options.resume else shaped
        if options.resume:
            notes += [f"{len(shaped) - len(left)} of {len(shaped)} shapes have their rows"]
        return Outcome([], [], [*notes, *_plan(left, mode, options.deterministic, sweep.seed is not None)])
    fork = _may_fork(backend, contenders)  # before there is a folder: Ctrl-C in an import ends the process at once
    folder, pictures = runs.place(sweep.name, options, backend)
    notes += _another(folder, sweep, options)
    try:
        with files.locked(folder, "use another --output-dir"):
            try:
                rows = _measured(options, sweep, mode, backend, folder, shaped, progress, fork)
            except KeyboardInterrupt as stop:
                stop.add_note("resume" if runs.kept(folder, options) else "nothing was finished")  # the command line knows its words
                raise
            measured(rows, sweep.seed)
            drawn = _draw(folder, pictures, sweep, options, progress)
    except _Lost as lost:  # a fresh process takes the lock
        rows = _in_a_fresh_process(options, folder / "results.csv", str(lost))
        measured(rows, sweep.seed)
        with files.locked(folder, "use another --output-dir"):
            drawn = _draw(folder, pictures, sweep, options, progress)
    progress("")
    written = [table for name in ("results.csv", "samples.jsonl", "env.json") if (table := folder / name).exists()]
    return Outcome(rows, [*written, *drawn], notes, seed=sweep.seed)


def _measured(
    options: Options,
    sweep: Sweep,
    mode: str,
    backend: Backend,
    folder: Path,
    shaped: Sequence[Cells],
    progress: Callable[[str], None],
    fork: bool,
) -> list[Row]:
    """The rows of the run, those of a resumed one included, each kept in the folder as soon as its shape is done. Raises _Lost."""
    run_id, rows = runs.begin(folder, sweep, backend, options)
    if sweep.ceilings and backend.name == "cuda" and not any(row.Kernel.startswith(CEILING) for row in rows):
        rows = runs.keep(folder, rows, ceilings.rows(backend, run_id, bool(sweep.taken.get("energy"))), [])
    usual = MANY if sweep.seed is not None and backend.name == "cuda" else POLICY[backend.name]
    policy = replace(usual, asked_samples=options.samples, asked_seconds=options.min_time)
    left = _left(rows, sweep, mode, backend, shaped)
    if backend.name == "cuda":
        progress("compiles the kernels")
        load_all(backend, [(each, at[1]) for at, some in left for each in some], MODES[mode])
    done, total = 0, 2 * sum(len(some) for _, some in left)  # each is checked, then measured
    jobs = options.jobs or (sweep.jobs if backend.name == "cuda" else 1)
    if jobs > 1:
        tasks = [_Task(mode, *at, run_id, _timings(sweep, backend, at[0]), policy, some) for at, some in left]
        return _shared(options, tasks, jobs, backend, folder, rows, progress)
    for (test, problem), some in left:

        def tell(text: str, more: int, step: str = test, done: int = done) -> None:
            progress(f"{done + more}/{total} {step} {text}")

        done += 2 * len(some)
        shape = _Shape(backend, mode, test, problem, run_id, _timings(sweep, backend, test), tell, policy)
        for found, samples in _survived(fork, shape, some):
            rows = runs.keep(folder, rows, results.with_peak(found, rows), samples)
    return rows


@dataclass(frozen=True)
class _Task:
    """A shape for a worker, and its contenders that have no rows yet."""

    mode: str
    test: str
    problem: Problem
    run_id: str
    timings: Sequence[str]
    policy: Policy
    contenders: Sequence[Contender]
    compiles: bool = False  # only: it has no rows
    alone: bool = False  # on the device: beside other problems it did not fit

    def shape(self, backend: Backend, tell: Callable[[str, int], None] = lambda text, more: None) -> _Shape:
        """As _rows takes it."""
        return _Shape(backend, self.mode, self.test, self.problem, self.run_id, self.timings, tell, self.policy)


def _shared(
    options: Options,
    tasks: Sequence[_Task],
    jobs: int,
    backend: Backend,
    folder: Path,
    rows: list[Row],
    progress: Callable[[str], None],
) -> list[Row]:
    """The rows of the run with those of the tasks, which `jobs` processes do: they check at the same time, and measure in turns."""
    kept, done, total = rows, 0, sum(len(task.contenders) for task in tasks)
    seen: dict[str, set[str]] = {}  # of a task, the contenders that have rows

    def told(task: _Task, kind: str, value: tuple[list[Row], list[files.Json]]) -> None:
        nonlocal kept, done
        if kind == _CROWDED:
            share.again(
                replace(task, alone=True, contenders=[each for each in task.contenders if each.name not in seen.get(task.test, ())])
            )
            return
        found, samples = value
        kept = runs.keep(folder, kept, results.with_peak(found, kept), samples)
        names = {row.Kernel for row in found}
        seen.setdefault(task.test, set()).update(names)
        done += len(names)
        progress(f"{done}/{total} {task.test}")

    def ended(task: _Task) -> list[_Task]:
        left = [each for each in task.contenders if not task.compiles and each.name not in seen.get(task.test, ())]
        if len(left) > 1:
            return [replace(task, contenders=[each]) for each in left]
        for each in left:
            why = child.Ended(f"the process of {task.test} ended without a result")
            told(task, "rows", (task.shape(backend).without(each, why), []))
        return []

    start = partial(child.talking, partial(_work, options.device), "a worker", _CACHES)
    share = Share(start, told, ended, _size, _room(backend))
    try:
        share.run([*_compiling(tasks), *in_rounds([task for task in tasks if task.contenders], jobs, _size)], jobs)
    finally:
        runs.note(folder, spent={name: round(value, 3) for name, value in asdict(share.spent).items()}, jobs=jobs)
    return kept


def _compiling(tasks: Sequence[_Task]) -> list[_Task]:
    """Tasks that make peers compile what they need for the others, each once: small problems that no row is of."""
    found: dict[object, _Task] = {}
    for task in tasks:
        p = task.problem
        small = Problem.of(1, p.heads_q // p.heads_kv, ROWS, p.head_dim, 1, ROWS, p.dtype, p.causal, dim_v=p.head_dim_v)
        for each, pass_ in itertools.product(task.contenders, MODES[task.mode]):
            if each.peer and each.peer.compiles and pass_ in each.peer.passes:
                found[each.name, pass_, small] = replace(task, mode=pass_, problem=small, contenders=[each], compiles=True)
    return list(found.values())


def _work(device: str, pipe: Connection[Any, Any]) -> None:
    """A worker: the rows of each task that the pipe gives."""
    backend = backends.pick(device)
    turns = Turns(pipe, partial(_held, backend.xp))

    def rows(task: _Task) -> Iterator[tuple[str, tuple[list[Row], list[files.Json]]]]:
        shape = replace(task.shape(backend), quiet=turns.alone, crowded=not task.alone)
        if task.compiles:
            with suppress(Exception):  # the problem's row says so
                for peer in (each.peer for each in task.contenders if each.peer):
                    peer.prepare(task.problem, generate(task.problem, SEED), task.mode)
            return
        with suppress(_Lost):  # its row is there; the context is not
            left = list(task.contenders)
            try:
                for found in _rows(shape, task.contenders):
                    left = [each for each in left if each.name not in {row.Kernel for row in found[0]}]
                    yield "rows", found
            except Exception as error:
                if not _no_room(error):
                    raise
                if not task.alone:
                    yield _CROWDED, ([], [])
                for each in left if task.alone else ():
                    yield "rows", (shape.without(each, error), [])
            return
        sys.exit(0)

    serve(pipe, rows, turns.settle)


def _no_room(error: Exception) -> bool:
    """Whether an error of CuPy, of PyTorch or of ours says that the device has no memory left."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in ("out of memory", "has no room for"))


def _size(task: _Task) -> float:
    """Bytes of device memory, about, that checking and measuring a problem takes, more rather than less.

    On an H200 problems of both passes took 300 to 550 bytes for each element of the larger of Q and K, besides 3 GB at most. The forward pass,
    without gradients and their baselines, is taken as half; what finds no memory is done again alone. torch's math in float32 has several
    tensors of all scores.
    """
    if task.alone:
        return math.inf
    p = task.problem
    scores = 20.0 * p.batch * p.heads_q * p.seq_q * p.seq_kv if p.dtype == "float32" else 0.0
    return 3e9 + (300.0 if task.mode == "forward" else 600.0) * max(math.prod(p.shape(name)) for name in ("Q", "K")) + scores


def _held(xp: Any) -> float:
    """Bytes of device memory, about, that this process holds when nothing runs and the pools have given back what is free."""
    if not hasattr(xp, "cuda"):
        return 0.0
    gc.collect()  # what only a cycle holds, as a graph and the tensors that its launches read
    xp.cuda.runtime.deviceSynchronize()
    pool = xp.get_default_memory_pool()
    pool.free_all_blocks()
    bytes_ = 1e9 + pool.total_bytes()  # a context with the modules of libraries has some 0.8 GB
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
        bytes_ += torch.cuda.memory_reserved()
    return float(bytes_)


def _room(backend: Backend) -> float:
    """Bytes of device memory for all tasks that are done at the same time."""
    cuda = getattr(backend.xp, "cuda", None)
    return 0.75 * cuda.runtime.memGetInfo()[0] if cuda else math.inf


def _train(sweep: Sweep, options: Options, progress: Callable[[str], None]) -> Outcome:
    """The speeds of a sweep of trainings, into speed.csv, env.json and a figure. Raises UsageFault for options that ask for shapes."""
    if asked := [name for name in ("mode", "only", "skip", "resume", "samples", "min_time") if getattr(options, name)]:
        why = "it trains one model, forward and backward, and has no shapes"
        raise UsageFault(
            f"{sweep.name} takes no --{asked[0].replace('_', '-')}", why, f"fa-cli experiment {sweep.name} --compute … --peers …"
        )
    if not installed("torch"):
        raise EnvironmentFault("PyTorch is not installed", "the model is one of torch's", install_extra("torch"))
    from ..torch_op import training  # torch takes a second to load

    backend = backends.pick(options.device)
    small = backend.name == "cpu" and not options.full
    notes = ["on the CPU the sweep's small [cpu] model was trained; --full trains the stated one"] if small else []
    size = training.Size(**((sweep.cpu_training if small else sweep.training) or {}))
    device = "cpu" if backend.name == "cpu" else f"cuda:{options.device.partition(':')[2] or 0}"
    problem = Problem.of(size.batch, size.heads, size.seq, size.dim, dtype=size.dtype, causal=True)
    deterministic, paths = options.deterministic or sweep.deterministic, {kernel.path for kernel in catalogue()}
    specs = options.computes or sweep.kernels or (AUTO,)
    found, left_out = choose(Request(specs, "both", problem, deterministic=deterministic), backend.device())
    ours = {each.name: each.kernels["forward"].path for each in found if not each.peer}
    named = {name: name if path in paths else str(path) for name, path in ours.items()}
    others = options.peers if options.peers is not None else sweep.peers
    ways = training.contenders(device, named, others, deterministic)
    if options.dry_run:
        return Outcome([], [], [*notes, *left_out, f"{size.describe()}, by {', '.join(ways)}; nothing is run or written"])
    folder, pictures = runs.place(sweep.name, options, backend)
    notes += _another(folder, sweep, options)
    speeds = training.speeds(size, device, ways, progress=progress)
    progress("")
    record = environment.environment(**backend.environment(), run_id=results.new_run_id(), sweep=sweep.name, model=size.describe())
    with files.locked(folder, "use another --output-dir"):
        files.write_files(folder, {"speed.csv": training.table(speeds), "env.json": files.json_bytes(record)})
    from ..report import training as figure

    written = [folder / "speed.csv", folder / "env.json"]
    if not options.no_figures:
        made = figure.draw([asdict(speed) for speed in speeds], sweep.title, record, pictures / "training_speed.png")
        written += [made] if made else []
    return Outcome([], written, [*notes, *left_out], speeds)


@dataclass(frozen=True)
class _Shape:
    """One shape of a run, and how it is measured. tell is told what is being done, and how many contenders are done."""

    backend: Backend
    mode: str
    test: str
    problem: Problem
    run_id: str
    timings: Sequence[str]
    tell: Callable[[str, int], None]
    policy: Policy | None = None
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext
    crowded: bool = False  # other problems are on the device: where there is no room, it is raised

    def without(self, contender: Contender, error: Exception) -> list[Row]:
        """The rows of a contender that has no times."""
        return results.rows_without(self.test, contender, self.mode, self.problem, self.backend, self.run_id, SEED, error)


def _rows(shape: _Shape, contenders: Sequence[Contender]) -> Iterator[tuple[list[Row], list[files.Json]]]:
    """The rows and samples of one shape: first of what cannot run or is wrong, then of the rest, measured in round-robin turns."""
    backend, mode, problem = shape.backend, shape.mode, shape.problem
    if pool := getattr(backend.xp, "get_default_memory_pool", None):
        pool().free_all_blocks()  # CuPy's, of the shapes before: PyTorch has a pool of its own, and would find no room
    oracle: Oracle | None = None
    good: list[run.Result] = []
    for number, contender in enumerate(contenders):
        shape.tell(f"checks {contender.name}", number)
        try:
            oracle = oracle or oracle_for(problem, backend, mode, SEED)
            own = _of_both(contender) if mode == "both" else mode
            good.append(run.check_in_memory(contender, own, problem, backend, SEED, oracle))
            if own != mode:  # the rows of the other pass, and of both
                what = f"{contender.name} does not take {problem.describe()} {mode}"
                why = UsageFault(what, f"it has only the {own} pass here", "leave it out: --peers")
                yield [row for row in shape.without(contender, why) if row.Type != TYPES[own]], []
        except DiskFault:
            raise  # it would stop every other row too
        except Exception as error:
            if shape.crowded and _no_room(error):
                raise
            yield shape.without(contender, error), []
            if isinstance(error, ContextLost) or any(text in str(error) for text in _LOST):
                raise _Lost(shape.run_id) from error
    ready: dict[str, dict[str, Ready]] = {}
    for timing in shape.timings:
        good = run.time_together(good, backend, timing, shape.policy, lambda text: shape.tell(text, len(contenders)), ready, shape.quiet)
    found = [(row, result) for result in good for row in results.rows_of(result, shape.test, shape.run_id)]
    samples = [results.samples_of(result, row) for row, result in found if row.timing]
    yield results.with_torch([row for row, _ in found]), samples


def _of_both(contender: Contender) -> str:
    """The mode in which a contender is run where both passes are asked for: the one pass that a peer has, or both."""
    passes = [pass_ for pass_ in PASSES if not contender.peer or pass_ in contender.peer.passes]
    return passes[0] if len(passes) == 1 else "both"


def _may_fork(backend: Backend, contenders: Sequence[Sequence[Contender]]) -> bool:
    """Whether shapes run in forks: on the CPU, where a kernel can end the process, unless this one may have torch's threads already."""
    fork = backend.name == "cpu" and "torch" not in sys.modules
    libraries = [getattr(each.peer, "modules", ()) for some in contenders for each in some]
    for module in dict.fromkeys(name for names in libraries for name in names) if fork else ():
        with suppress(Exception):  # it is absent, and its row says so
            importlib.import_module(module)  # once for all forks; it has no threads before its first operation
    return fork


def _survived(fork: bool, shape: _Shape, contenders: Sequence[Contender]) -> Iterator[tuple[list[Row], list[files.Json]]]:
    """As :func:`_rows`, with `fork` in a fork of this process, and a kernel that ends it has a row that says so.

    A fork that dies does not say for whom: those without a row are tried again, each in a fork of its own.
    """
    if not fork:
        yield from _rows(shape, contenders)
        return
    left = list(contenders)
    try:
        for found, samples in child.forked(lambda: _rows(shape, contenders), f"the process of {shape.test}"):
            left = [each for each in left if each.name not in {row.Kernel for row in found}]
            yield found, samples
    except child.Ended as ended:
        if len(left) == 1:
            yield shape.without(left[0], ended), []
            return
        for each in left:
            yield from _survived(fork, shape, [each])


def _timings(sweep: Sweep, backend: Backend, test: str) -> tuple[str, ...]:
    """What is measured of a test's contenders, in this order."""
    return ("warm", *(sweep.measures(test) if backend.name == "cuda" else ()))


def _left(rows: Sequence[Row], sweep: Sweep, mode: str, backend: Backend, shaped: Sequence[Cells]) -> list[Cells]:
    """The shapes with the contenders that a resumed run has to measure; none where all have their rows.

    Where one has none, those that have a time are measured again: the contenders of a shape are compared by times of one run, in turns.
    """
    left = []
    for (test, problem), some in shaped:
        found = [[row for row in rows if results.is_of(row, test, each, mode, problem)] for each in some]
        done = [_done(of, _timings(sweep, backend, test)) for of in found]
        timed = [any(row.KernelTime_ms for row in of) for of in found]
        if not all(done):
            left.append(((test, problem), [each for each, had, time in zip(some, done, timed, strict=True) if time or not had]))
    return left


def _done(found: Sequence[Row], timings: Sequence[str]) -> bool:
    """Whether these rows of a contender, of the mode's own, are all: with a time all of the timings (energy is in the warm one)."""
    return bool(found) and (found[0].timing is None or set(timings) <= {*(row.timing for row in found), "energy"})


def _in_a_fresh_process(options: Options, table: Path, run_id: str) -> list[Row]:
    try:
        child.run(partial(run_sweep, replace(options, resume=True, no_figures=True)))
    except child.Ended as fault:
        why = f"the fresh process ended with {fault.code}"
        raise EnvironmentFault("the sweep could not go on", why, "fa-cli experiment … --resume") from fault
    return [row for row in read_rows(table) if row.run_id == run_id]


# -- what to run ------------------------------------------------------------------------------------------------------


def _selected(shapes: Sequence[tuple[str, Problem]], options: Options) -> list[tuple[str, Problem]]:
    found = [(t, p) for t, p in shapes if (not options.only or matches(t, options.only)) and not matches(t, options.skip)]
    if not found:
        raise UsageFault(
            "no shape is left to run", f"the sweep has {', '.join(t for t, _ in shapes)}", "use other --only or --skip patterns"
        )
    return found


def _contenders(
    options: Options, sweep: Sweep, mode: str, shapes: Sequence[tuple[str, Problem]], backend: Backend
) -> tuple[list[list[Contender]], list[str]]:
    """The kernels, then the peers of each shape, and a note for each kernel that a range leaves out.

    Kernels asked for must exist and have the passes; by default all that have them and a shape's dtype. A range, and auto, is for
    each shape those that take it.
    """
    passes, problems = MODES[mode], [problem for _, problem in shapes]
    having = {(k.name, k.pass_, dtype) for k in catalogue() for dtype in k.dtypes if not options.deterministic or True in k.forms}
    every = dict.fromkeys(k.name for k in catalogue())
    usual = {p.dtype: [name for name in every if all((name, pass_, p.dtype) in having for pass_ in passes)] for p in problems}
    asked = [options.computes or sweep.names("kernels", test) or usual[p.dtype] for test, p in shapes]
    several = [options.peers if options.peers is not None else _peers(sweep.names("peers", test), backend.name) for test, _ in shapes]
    specs = list(dict.fromkeys(spec for some in asked for spec in some))
    wanted = Request(specs, mode, deterministic=options.deterministic)
    notes = choose(wanted, backend.device(), problems)[1]
    for name in dict.fromkeys(name for some in several for name in some):
        if not peers.find(name):
            hint = f"{meant(name, peers.names())}use --peers none, or --peers {','.join(peers.usual(backend.name))}"
            raise UsageFault(f"unknown peer {name!r}", f"known: {', '.join(peers.names())}", hint)
    found = []
    for some, others, problem in zip(asked, several, problems, strict=True):
        able: list[Contender] = []
        for spec in dict.fromkeys((*some, *others)):
            with suppress(UsageFault):  # a range none of which takes this shape
                several_of_it, _ = choose(replace(wanted, computes=spec, problem=problem), backend.device())
                able += [each for each in several_of_it if each not in able]
        found.append(named_apart(able))
    if sweep.operator and backend.name == "cuda":
        found = [[*able, operator.contender(backend.name, options.deterministic)] for able in found]
    return found, notes


def _peers(named: Sequence[str] | None, device: str) -> Sequence[str]:
    """A sweep's peers that are of this kind of device; the usual ones where it names none."""
    found = [name for name in named or () if not (peer := peers.find(name)) or peer.device == device]
    return found if found or named == () else peers.usual(device)


def _plan(shaped: Sequence[Cells], mode: str, deterministic: bool, commands: bool) -> list[str]:
    """What --dry-run says: each shape with its memory, its work and its contenders; and where asked for the command that runs it alone."""
    several = [[each.name for each in some] for _, some in shaped]
    every = list(dict.fromkeys(name for names in several for name in names))
    lines = [f"{len(shaped)} shapes x {len(every)} contenders ({', '.join(every)}), mode {mode}; nothing is run or written"] * bool(shaped)
    for ((test, p), _), names in zip(shaped, several, strict=True):
        some = f" by {', '.join(names)}" if names != every else ""
        lines.append(f"{test}: {p.describe()}, {p.bytes(mode) / 1e6:.1f} MB of tensors, {p.flops(mode) / 1e9:.3g} GFLOP a run{some}")
        lines += [f"    {results.repro(','.join(names), mode, p, deterministic)}"] * commands
    return lines


def _another(folder: Path, sweep: Sweep, options: Options) -> list[str]:
    """A note where the run is not the sweep's first."""
    if folder.name == sweep.name:
        return []
    return [
        f"--resume: this is the last run of {sweep.name}, {folder}"
        if options.resume
        else f"{sweep.name} was run before; this run is in {folder}"
    ]


def _draw(folder: Path, pictures: Path, sweep: Sweep, options: Options, progress: Callable[[str], None]) -> list[Path]:
    from .. import report  # pandas and seaborn take a second to load

    if pictures != folder:
        with suppress(DiskFault):  # another sweep of record draws there
            files.settle(pictures)
    title, figures = sweep.title, not options.no_figures
    return report.redraw(
        folder, pictures, sweep.name if pictures != folder else "", title, texts=folder, figures=figures, progress=progress
    )
