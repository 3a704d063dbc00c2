"""An experiment: a sweep's shapes x kernels and peers -> rows, samples, an environment record, figures and a summary.

Every shape's contenders are checked first, then measured in round-robin turns, warm and (on a GPU) cold. Rows are appended and flushed
as they are done, so an interrupted run keeps them, and --resume goes on from there. A kernel that loses the CUDA context, or on the
CPU ends its process, costs its own row: a fresh process measures the rest.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import backends, child, environment, files, peers, results, run
from .backends import Backend, ContextLost
from .check.contender import Contender
from .check.oracle import Oracle, oracle_for
from .choose import choose
from .fault import DiskFault, EnvironmentFault, UsageFault
from .kernel import catalogue
from .measure import ceilings
from .problem import MODES, Problem
from .row import CEILING, TYPES, Row, append_row, read_rows
from .sweep import ROOT, SWEEPS, Sweep, load

SEED = 42
#: What messages of CUDA libraries say when the CUDA context is lost.
_LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "illegal instruction", "context is dead")


@dataclass(frozen=True)
class Options:
    """What to run and where to write it; the fields are the flags of `fa-cli experiment`.

    peers None: all of the kind of device. only, skip: patterns of test names.
    """

    name: str = "forward"
    mode: str | None = None
    computes: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    device: str = "auto"
    output_dir: Path = Path("experiment_results")
    record: bool = False
    full: bool = False
    resume: bool = False
    dry_run: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    deterministic: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a sweep gave: its rows, the files written, and notes on the choice of shapes and contenders."""

    rows: list[Row]
    files: list[Path]
    notes: list[str] = field(default_factory=list)


class _Lost(Exception):
    """The CUDA context is lost; the row that says so is written."""


def experiment(name: str = "forward", **options: Any) -> list[Row]:
    """The rows of :func:`run_sweep`, for notebooks: experiment("seqlen", device="cpu"). The keywords are the fields of Options."""
    return run_sweep(Options(name, **options)).rows


def run_sweep(options: Options, progress: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run a sweep and write results.csv and samples.jsonl (a shape at a time), env.json, summary.md and figures.

    What fails its check, does not launch, refuses a shape or is absent is a row that says so, and the sweep goes on. On Ctrl-C
    the finished rows stay. Raises UsageFault for an unknown sweep, kernel or peer, EnvironmentFault and DiskFault for what
    stops every row.
    """
    sweep = load(options.name)
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
    table = folder / "results.csv"
    before = read_rows(table) if options.resume and table.exists() else []
    run_id = before[-1].run_id or results.new_run_id() if before else results.new_run_id()
    rows = [row for row in before if row.run_id == run_id]
    if options.record and not options.resume:
        for stale in (table, folder / "samples.jsonl", folder / "env.json"):
            stale.unlink(missing_ok=True)
    _write_environment(folder / "env.json", backend, run_id, options.resume)
    fork = _may_fork(backend, contenders)
    try:
        if sweep.ceilings and backend.name == "cuda" and not any(row.Kernel.startswith(CEILING) for row in rows):
            rows += _keep(folder, ceilings.rows(backend, run_id), [])
        for number, ((test, problem), computes) in enumerate(zip(shapes, contenders, strict=True)):
            left = [c for c in computes if not _done(rows, test, c, mode, problem)]

            def tell(text: str, step: str = f"{number + 1}/{len(shapes)} {test}") -> None:
                progress(f"{step} {text}")

            for found, samples in _survived(fork, backend, left, mode, test, problem, run_id, tell):
                rows += _keep(folder, results.with_peak(found, rows), samples)
    except _Lost:
        rows = _in_a_fresh_process(options, table, run_id)
    progress("")
    return Outcome(rows, [table, folder / "env.json", *_draw(folder, pictures, sweep)], notes)


def _shape(
    backend: Backend,
    contenders: Sequence[Contender],
    mode: str,
    test: str,
    problem: Problem,
    run_id: str,
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
                raise _Lost from error
    for timing in ("warm", "cold") if backend.name == "cuda" else ("warm",):
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
    progress: Callable[[str], None],
) -> Iterator[tuple[list[Row], list[files.Json]]]:
    """As :func:`_shape`, with `fork` in a fork of this process, and a kernel that ends it has a row that says so.

    A fork that dies does not say for whom: those without a row are tried again, each in a fork of its own.
    """
    rest = mode, test, problem, run_id, progress
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


def _keep(folder: Path, rows: list[Row], samples: list[files.Json]) -> list[Row]:
    for row in rows:
        append_row(folder / "results.csv", row)
    files.append_lines(folder / "samples.jsonl", samples)
    return rows


def _done(rows: Sequence[Row], test: str, contender: Contender, mode: str, problem: Problem) -> bool:
    """Whether a resumed run has this cell already. Rows of a shape are written last pass last, so the mode's own row is enough."""
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim, problem.dtype, problem.causal)
    return any(
        (row.Test, row.Kernel, row.Type) == (test, contender.name, TYPES[mode])
        and (row.Batch, row.Heads, row.SeqLen, row.HeadDim, row.dtype.replace("tf32", "float32"), row.causal) == shape
        for row in rows
    )


def _in_a_fresh_process(options: Options, table: Path, run_id: str) -> list[Row]:
    try:
        child.run(partial(run_sweep, replace(options, resume=True)))
    except child.Ended as fault:
        why = f"the fresh process ended with {fault.code}"
        raise EnvironmentFault("the sweep could not go on", why, "fa-cli experiment … --resume") from fault
    return [row for row in read_rows(table) if row.run_id == run_id]


# -- what to run ------------------------------------------------------------------------------------------------------


def _selected(shapes: Sequence[tuple[str, Problem]], options: Options) -> list[tuple[str, Problem]]:
    def matches(test: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(test, p) or p in test for p in patterns)

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
    having = [{k.name for k in catalogue() if k.pass_ == pass_ and {p.dtype for p in problems} & set(k.dtypes)} for pass_ in passes]
    usual = [name for name in dict.fromkeys(k.name for k in catalogue()) if all(name in names for names in having)]
    asked = [options.computes or sweep.names("kernels", test) or usual for test, _ in shapes]
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


def _write_environment(path: Path, backend: Backend, run_id: str, resumed: bool) -> None:
    """The record of this run; those of earlier runs into the same table stay, under their run_id."""
    earlier: files.Json = {}
    if path.exists():
        last = environment.read_env(path)
        if resumed and last.get("run_id") == run_id:
            return
        earlier = last.pop("earlier", {}) | {str(last.get("run_id")): last}
    facts = {"run_id": run_id, **backend.environment(), **({"earlier": earlier} if earlier else {})}
    environment.write_env(path, environment.environment(**facts))


def _draw(folder: Path, pictures: Path, sweep: Sweep) -> list[Path]:
    from . import report  # pandas and seaborn take a second to load

    return report.redraw(folder, pictures, sweep.name if pictures != folder else "", sweep.title)
