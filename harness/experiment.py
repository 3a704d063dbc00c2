"""An experiment: a sweep's shapes x kernels and peers -> rows, samples, an environment record, figures and a summary.

Every shape's contenders are checked first, then measured in round-robin turns, warm and on a GPU cold, then one by one what the sweep
asks for besides (burst, energy). The rows of a shape and their samples are appended together as they are done, so an interrupted run
keeps them, and --resume goes on from there. A kernel that loses the CUDA context, or on the CPU ends its process, costs its own row: a
fresh process measures the rest. One experiment at a time holds the folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import backends, child, environment, files, peers, results, run
from .backends import Backend, ContextLost
from .check.contender import Contender
from .check.oracle import Oracle, oracle_for
from .choose import AUTO, choose
from .fault import DiskFault, EnvironmentFault, UsageFault, install_extra
from .kernel import catalogue
from .measure import ceilings
from .peers.base import installed
from .problem import MODES, PASSES, Problem
from .row import CEILING, TYPES, Row, Rows, encoded, mend, read_rows
from .sweep import ROOT, SWEEPS, Sweep, load, matches, with_options
from .sweep import Options as Options

if TYPE_CHECKING:
    from .torch_op.training import Speed

SEED = 42
#: What messages of CUDA libraries say when the CUDA context is lost.
_LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "illegal instruction", "context is dead")


@dataclass(frozen=True)
class Outcome:
    """What a sweep gave: its rows, the files written, and notes on the choice of shapes and contenders."""

    rows: list[Row]
    files: list[Path]
    notes: list[str] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)  # of a sweep of trainings, which has no rows


class _Lost(Exception):
    """The CUDA context is lost; the row that says so is written. Its text is the run_id."""


@with_options(Options)
def experiment(options: Options) -> Rows:
    """The rows of :func:`run_sweep`, for notebooks: experiment("seqlen", device="cpu"). The arguments are the fields of Options."""
    return Rows(run_sweep(options).rows)


def run_sweep(options: Options, progress: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run a sweep and write results.csv and samples.jsonl (a shape at a time), env.json, summary.md and figures.

    What fails its check, does not launch, refuses a shape or is absent is a row that says so, and the sweep goes on. On Ctrl-C
    the finished rows stay. Raises UsageFault for an unknown sweep, kernel or peer, EnvironmentFault and DiskFault for what
    stops every row.
    """
    sweep = load(options.name)
    if sweep.training:
        return _train(sweep, options, progress)
    options = replace(options, deterministic=options.deterministic or sweep.deterministic)
    mode = options.mode or sweep.mode
    backend = backends.pick(options.device)
    small = backend.name == "cpu" and not options.full
    shapes = _selected(sweep.cpu_shapes if small else sweep.shapes, options)
    notes = ["on the CPU the sweep's small [cpu] shapes were run; --full runs the stated ones"] if small else []
    contenders, left_out = _contenders(options, sweep, mode, shapes, backend)
    notes += left_out
    if options.dry_run:
        return Outcome([], [], [*notes, *_plan(shapes, contenders, mode)])
    folder, pictures = _place(sweep, options)
    shaped = list(zip(shapes, contenders, strict=True))
    try:
        with files.locked(folder, "use another --output-dir"):
            rows = _measured(options, sweep, mode, backend, folder, shaped, progress)
            progress("")
            drawn = _draw(folder, pictures, sweep)
    except _Lost as lost:  # a fresh process takes the lock
        rows = _in_a_fresh_process(options, folder / "results.csv", str(lost))
        progress("")
        with files.locked(folder, "use another --output-dir"):
            drawn = _draw(folder, pictures, sweep)
    return Outcome(rows, [folder / "results.csv", folder / "env.json", *drawn], notes)


def _measured(
    options: Options,
    sweep: Sweep,
    mode: str,
    backend: Backend,
    folder: Path,
    shaped: Sequence[tuple[tuple[str, Problem], list[Contender]]],
    progress: Callable[[str], None],
) -> list[Row]:
    """The rows of the run, those of a resumed one included, each kept in the folder as soon as its shape is done. Raises _Lost."""
    run_id, rows = _begin(folder, backend, options)
    if sweep.ceilings and backend.name == "cuda" and not any(row.Kernel.startswith(CEILING) for row in rows):
        rows = _keep(folder, rows, ceilings.rows(backend, run_id, bool(sweep.taken.get("energy"))), [])
    fork = _may_fork(backend, [computes for _, computes in shaped])
    for number, ((test, problem), computes) in enumerate(shaped):
        timings = ("warm", *(sweep.measures(test) if backend.name == "cuda" else ()))
        left = [c for c in computes if not _done(rows, test, c, mode, problem, timings)]

        def tell(text: str, step: str = f"{number + 1}/{len(shaped)} {test}") -> None:
            progress(f"{step} {text}")

        for found, samples in _survived(fork, backend, left, mode, test, problem, run_id, timings, tell):
            rows = _keep(folder, rows, results.with_peak(found, rows), samples)
    return rows


def _train(sweep: Sweep, options: Options, progress: Callable[[str], None]) -> Outcome:
    """The speeds of a sweep of trainings, into speed.csv, env.json and a figure. Raises UsageFault for options that ask for shapes."""
    if asked := [name for name in ("mode", "only", "skip", "resume") if getattr(options, name)]:
        why = "it trains one model, forward and backward, and has no shapes"
        raise UsageFault(f"{sweep.name} takes no --{asked[0]}", why, f"fa-cli experiment {sweep.name} --compute … --peers …")
    if not installed("torch"):
        raise EnvironmentFault("PyTorch is not installed", "the model is one of torch's", install_extra("torch"))
    from .torch_op import training  # torch takes a second to load

    backend = backends.pick(options.device)
    small = backend.name == "cpu" and not options.full
    notes = ["on the CPU the sweep's small [cpu] model was trained; --full trains the stated one"] if small else []
    size = training.Size(**((sweep.cpu_training if small else sweep.training) or {}))
    device = "cpu" if backend.name == "cpu" else f"cuda:{options.device.partition(':')[2] or 0}"
    problem = Problem.of(size.batch, size.heads, size.seq, size.dim, dtype=size.dtype, causal=True)
    deterministic, paths = options.deterministic or sweep.deterministic, {kernel.path for kernel in catalogue()}
    specs = options.computes or sweep.kernels or (AUTO,)
    found, left_out = choose(specs, PASSES, [problem], backend.device(), deterministic=deterministic)
    ours = {each.name: each.kernels["forward"].path for each in found if not each.peer}
    named = {name: name if path in paths else str(path) for name, path in ours.items()}
    others = options.peers if options.peers is not None else sweep.peers
    ways = training.contenders(device, named, others, deterministic)
    if options.dry_run:
        return Outcome([], [], [*notes, *left_out, f"{size.describe()}, by {', '.join(ways)}; nothing is run or written"])
    folder, pictures = _place(sweep, options)
    speeds = training.speeds(size, device, ways, progress=progress)
    progress("")
    record = environment.environment(**backend.environment(), run_id=results.new_run_id(), model=size.describe())
    with files.locked(folder, "use another --output-dir"):
        files.write_files(folder, {"speed.csv": training.table(speeds), "env.json": files.json_bytes(record)})
    from .report import training as figure

    picture = figure.draw([asdict(speed) for speed in speeds], sweep.title, record, pictures / "training_speed.png")
    return Outcome([], [folder / "speed.csv", folder / "env.json", picture], [*notes, *left_out], speeds)


def _shape(
    backend: Backend,
    contenders: Sequence[Contender],
    mode: str,
    test: str,
    problem: Problem,
    run_id: str,
    timings: Sequence[str],
    progress: Callable[[str], None],
) -> Iterator[tuple[list[Row], list[files.Json]]]:
    """The rows and samples of one shape: first of what cannot run or is wrong, then of the rest, measured in round-robin turns."""
    oracle: Oracle | None = None
    good: list[run.Result] = []
    for contender in contenders:
        progress(f"checks {contender.name}")
        try:
            oracle = oracle or oracle_for(problem, backend, mode, SEED)
            good.append(run.check_in_memory(contender, mode, problem, backend, SEED, oracle))
        except DiskFault:
            raise  # it would stop every other row too
        except Exception as error:
            absent = isinstance(error, EnvironmentFault)
            status = "ABSENT" if absent else "REFUSED" if isinstance(error, UsageFault) else "ERROR"
            yield results.rows_without(test, contender, mode, problem, backend, run_id, SEED, status, str(error)), []
            if isinstance(error, ContextLost) or any(text in str(error) for text in _LOST):
                raise _Lost(run_id) from error
    for timing in timings:
        progress(f"measures {len(good)} {timing}")
        good = run.time_together(good, backend, timing)
    found = [(row, result) for result in good for row in results.rows_of(result, test, run_id)]
    samples = [results.samples_of(result, row) for row, result in found if row.timing]
    yield results.with_torch([row for row, _ in found]), samples


def _may_fork(backend: Backend, contenders: Sequence[Sequence[Contender]]) -> bool:
    """Whether shapes run in forks: on the CPU, where a kernel can end the process, unless this one may have torch's threads already."""
    fork = backend.name == "cpu" and "torch" not in sys.modules
    libraries = [getattr(each.peer, "modules", ()) for some in contenders for each in some]
    for module in dict.fromkeys(name for names in libraries for name in names) if fork else ():
        with suppress(Exception):  # it is absent, and its row says so
            importlib.import_module(module)  # once for all forks; it has no threads before its first operation
    return fork


def _survived(
    fork: bool,
    backend: Backend,
    contenders: Sequence[Contender],
    mode: str,
    test: str,
    problem: Problem,
    run_id: str,
    timings: Sequence[str],
    progress: Callable[[str], None],
) -> Iterator[tuple[list[Row], list[files.Json]]]:
    """As :func:`_shape`, with `fork` in a fork of this process, and a kernel that ends it has a row that says so.

    A fork that dies does not say for whom: those without a row are tried again, each in a fork of its own.
    """
    rest = mode, test, problem, run_id, timings, progress
    if not fork:
        yield from _shape(backend, contenders, *rest)
        return
    left = list(contenders)
    try:
        for found, samples in child.forked(lambda: _shape(backend, contenders, *rest), f"the process of {test}"):
            left = [each for each in left if each.name not in {row.Kernel for row in found}]
            yield found, samples
    except child.Ended as ended:
        if len(left) == 1:
            yield results.rows_without(test, left[0], mode, problem, backend, run_id, SEED, "ERROR", str(ended)), []
            return
        for each in left:
            yield from _survived(fork, backend, [each], *rest)


def _begin(folder: Path, backend: Backend, options: Options) -> tuple[str, list[Row]]:
    """The run_id, and the rows it has already where it is resumed. Torn tables are cut to their whole lines, env.json names the run.

    env.json is written before the first row: the run to resume is the one that it names, whether that has rows or not.
    """
    table, samples = folder / "results.csv", folder / "samples.jsonl"
    if options.record and not options.resume:
        run_id = results.new_run_id()
        anew = {table.name: encoded(table, [], anew=True), samples.name: b"", "env.json": _environment({}, backend, run_id)}
        files.write_files(folder, anew)
        return run_id, []
    mend(table, quoted=True)
    mend(samples)
    before = read_rows(table) if table.exists() else []
    encoded(table, [])  # before any work is done: a file of another version is not appended to
    last = environment.env_beside(table)
    named = last.get("run_id") or (before[-1].run_id if before else None)
    if options.resume and isinstance(named, str):
        rows = [row for row in before if row.run_id == named]
        cells = {results.cell(row) for row in rows}
        if samples.exists() and len(kept := results.samples_kept(samples, named, cells.__contains__)) != samples.stat().st_size:
            files.write_files(folder, {samples.name: kept})  # of rows that are lost: they are measured again
        if not last:
            files.write_files(folder, {"env.json": _environment({}, backend, named)})
        return named, rows
    run_id = results.new_run_id()
    files.write_files(folder, {"env.json": _environment(last, backend, run_id)})
    return run_id, []


def _keep(folder: Path, rows: list[Row], new: list[Row], samples: list[files.Json]) -> list[Row]:
    """All rows of the run, after the new ones and their samples went into the folder, both or neither.

    Rows of the run that the new ones measure again are replaced: of a cell whose row for the mode is missing, or of another mode.
    """
    if not new:
        return rows
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in samples).encode()
    table, again = folder / "results.csv", {results.cell(row) for row in new}
    kept = [row for row in rows if results.cell(row) not in again]
    if len(kept) == len(rows):
        files.append_files(folder, {"samples.jsonl": lines, table.name: encoded(table, new)})
    else:
        others = [row for row in read_rows(table) if row.run_id != new[0].run_id or results.cell(row) not in again]
        lines = results.samples_kept(folder / "samples.jsonl", new[0].run_id, lambda cell: cell not in again) + lines
        files.write_files(folder, {"samples.jsonl": lines, table.name: encoded(table, [*others, *new], anew=True)})
    return kept + new


def _done(rows: Sequence[Row], test: str, contender: Contender, mode: str, problem: Problem, timings: Sequence[str]) -> bool:
    """Whether a resumed run has this cell already: the mode's own row, with a time all of the timings (energy is in the warm one)."""
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim, problem.dtype, problem.causal)
    found = [
        row.timing
        for row in rows
        if (row.Test, row.Kernel, row.Type) == (test, contender.name, TYPES[mode])
        and (row.Batch, row.Heads, row.SeqLen, row.HeadDim, row.dtype.replace("tf32", "float32"), row.causal) == shape
    ]
    return bool(found) and (found[0] is None or set(timings) <= {*found, "energy"})


def _in_a_fresh_process(options: Options, table: Path, run_id: str) -> list[Row]:
    try:
        child.run(partial(run_sweep, replace(options, resume=True)))
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
    having = {(k.name, k.pass_, dtype) for k in catalogue() for dtype in k.dtypes}
    every = dict.fromkeys(k.name for k in catalogue())
    usual = {p.dtype: [name for name in every if all((name, pass_, p.dtype) in having for pass_ in passes)] for p in problems}
    asked = [options.computes or sweep.names("kernels", test) or usual[p.dtype] for test, p in shapes]
    several = [options.peers if options.peers is not None else _peers(sweep.names("peers", test), backend.name) for test, _ in shapes]
    specs = list(dict.fromkeys(spec for some in asked for spec in some))
    notes = choose(specs, passes, problems, backend.device(), deterministic=options.deterministic)[1]
    for name in dict.fromkeys(name for some in several for name in some):
        if not peers.find(name):
            raise UsageFault(f"unknown peer {name!r}", f"known: {', '.join(peers.names())}", "use --peers none, or names from fa-cli list")
    found = []
    for some, others, problem in zip(asked, several, problems, strict=True):
        able: list[Contender] = []
        for spec in dict.fromkeys((*some, *others)):
            with suppress(UsageFault):  # a range none of which takes this shape
                several_of_it, _ = choose([spec], passes, [problem], backend.device(), deterministic=options.deterministic)
                able += [each for each in several_of_it if each not in able]
        found.append(able)
    return found, notes


def _peers(named: Sequence[str] | None, device: str) -> Sequence[str]:
    """A sweep's peers that are of this kind of device; the usual ones where it names none."""
    found = [name for name in named or () if not (peer := peers.find(name)) or peer.device == device]
    return found if found or named == () else peers.usual(device)


def _plan(shapes: Sequence[tuple[str, Problem]], contenders: Sequence[Sequence[Contender]], mode: str) -> list[str]:
    """What --dry-run says: each shape with its memory, its work and its contenders."""
    several = [[each.name for each in some] for some in contenders]
    every = list(dict.fromkeys(name for names in several for name in names))
    lines = [f"{len(shapes)} shapes x {len(every)} contenders ({', '.join(every)}), mode {mode}; nothing is run or written"]
    for (test, p), names in zip(shapes, several, strict=True):
        some = f" by {', '.join(names)}" if names != every else ""
        lines.append(f"{test}: {p.describe()}, {p.bytes(mode) / 1e6:.1f} MB of tensors, {p.flops(mode) / 1e9:.3g} GFLOP a run{some}")
    return lines


# -- where it goes ----------------------------------------------------------------------------------------------------


def _place(sweep: Sweep, options: Options) -> tuple[Path, Path]:
    """The folder of the rows and the folder of the figures; both are made."""
    if options.record and not (ROOT / "pyproject.toml").is_file():
        raise UsageFault("--record needs a checkout", "runs of record are committed beside the sources", "use --output-dir DIR")
    folder = SWEEPS / sweep.name if options.record else options.output_dir
    pictures = ROOT / "plots" if options.record else options.output_dir
    for made in (folder, pictures):
        files.make_folder(made)
    return folder, pictures


def _environment(last: files.Json, backend: Backend, run_id: str) -> bytes:
    """env.json of this run; the records of earlier runs into the same table stay, under their run_id."""
    last = dict(last)
    found = last.pop("earlier", None)
    earlier = (found if isinstance(found, dict) else {}) | ({str(last.get("run_id")): last} if last else {})
    facts = {"run_id": run_id, **backend.environment(), **({"earlier": earlier} if earlier else {})}
    return files.json_bytes(environment.environment(**facts))


def _draw(folder: Path, pictures: Path, sweep: Sweep) -> list[Path]:
    from . import report  # pandas and seaborn take a second to load

    if pictures != folder:
        with suppress(DiskFault):  # another sweep of record draws there
            files.settle(pictures)
    return report.redraw(folder, pictures, sweep.name if pictures != folder else "", sweep.title)
