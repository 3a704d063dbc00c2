"""`fa-cli tune`: which tile values are the fastest, or take the least energy? Each combination is pruned, or checked, or also measured.

Pruned is what cannot run or is not worth running: too much shared memory, too many threads or registers, a static_assert, spills.
What passes is timed in round-robin turns, settled: each turn begins with unrecorded launches (sampling.Policy.settle). Then the energy
is read, a variant at a time (measure/alone.py), where the device counts it: of all where they are ranked by it, else of the FASTEST.
The CPU engine prunes and checks in the same way, but its times say nothing about a GPU.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..backends import Backend, CompileError, ContextLost, nvrtc, pick
from ..check import budget
from ..check.choose import choose
from ..check.contender import PassResult, run_kernel
from ..check.oracle import oracle_for
from ..check.request import Request, with_options
from ..fault import EnvironmentFault, Fault, KernelFault, UsageFault
from ..files import environment, json_bytes, locked, make_folder, write_files
from ..kernel import Kernel, Plan, planner
from ..measure import alone
from ..measure.sampling import POLICY, Ready, Timing, measure
from ..problem import Problem
from ..row import read_records, refuse_table
from .compare import ratio_interval

#: Status of a variant. PRUNED is no fault; FAIL computes wrong, ERROR does not launch or end.
PASS, PRUNED, FAIL, ERROR = "PASS", "PRUNED", "FAIL", "ERROR"
#: Registers of a multiprocessor, on every architecture the project compiles for: a block that needs more does not launch.
REGISTERS = 65536
#: So many combinations are tried unasked.
MANY = 100
#: What variants are ranked by, and of how many the energy is read (1.2 s each) where that is time.
RANKS, FASTEST = ("time", "energy"), 8


@dataclass(frozen=True)
class Variant:
    """One combination of tile values and what came of it; None is unknown or not measured.

    vs_default is the default's time over this one's.
    """

    kernel: str
    pass_: str
    problem: str
    device: str
    tiles: Mapping[str, int]
    default: bool
    status: str = PASS
    why: str = ""
    registers: int | None = None
    spill_bytes: int | None = None  # a thread
    shared_bytes: int | None = None  # a block
    ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    n_samples: int | None = None
    tflops: float | None = None
    vs_default: float | None = None
    vs_low: float | None = None  # the 95 % interval of vs_default
    vs_high: float | None = None
    energy_mj: float | None = None  # a run, settled and alone
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    pj_per_flop: float | None = None
    stack_bytes: int | None = None  # a thread, in local memory: spills, and arrays that are not in registers


#: The table of variants, what it has of each beside them, and its first line.
TABLE, _FACTS = "tune.csv", ("device_name", "causal", "deterministic", "source_hash")
_HEADER = ",".join((*(field.name.rstrip("_") for field in fields(Variant)[:-1]), *_FACTS, "stack_bytes"))


@dataclass(frozen=True)
class Tuned:
    """The variants, best first, and the kernel they are of."""

    kernel: Kernel
    problem: Problem
    device: str
    device_name: str
    rows: list[Variant]
    by: str = "time"

    @property
    def best(self) -> Variant | None:
        """The best variant by what they are ranked by, None where that was not measured on a GPU."""
        first = self.rows[0]
        return first if self.device == "cuda" and (first.energy_mj if self.by == "energy" else first.ms) else None

    @property
    def header_lines(self) -> list[str]:
        """The best variant as a row of choice for the kernel's header, to stand before those that are there; nothing for the default.

        `when` names the width, the lengths and the mask. The whole problem is in the evidence: for which others it holds is to be measured.
        """
        if self.best is None or self.best.default:
            return []
        p, width = self.problem, next(w for w in self.kernel.head_dims if w >= self.problem.widest)
        lengths = f"seq_q == seq_kv == {p.seq_q}" if p.seq_q == p.seq_kv else f"seq_q == {p.seq_q} and seq_kv == {p.seq_kv}"
        return [
            "// [[choice]]",
            f'// when = "HEAD_DIM == {width} and {lengths} and {"causal" if p.causal else "not causal"}"',
            *(f"// {name} = {value}" for name, value in self.best.tiles.items()),
            f'// evidence = "fa-cli tune: {self._gain(self.best)}, {p.describe()} on {self.device_name}"',
        ]

    def _gain(self, best: Variant) -> str:
        """What the best variant gains by what they are ranked by, the default beside it."""
        default = next((row for row in self.rows if row.default), best)
        if self.by == "energy":
            return f"{best.energy_mj:.4g} mJ for {default.energy_mj:.4g}" if default.energy_mj else f"{best.energy_mj:.4g} mJ"
        interval = f" ({best.vs_low:.3g} to {best.vs_high:.3g})" if best.vs_low and best.vs_high else ""
        return f"{best.vs_default:.3g}{interval} times as fast" if best.vs_default else f"{best.ms:.4g} ms"


@dataclass(frozen=True, kw_only=True)
class Tune(Request):
    """What `fa-cli tune` is asked for: one kernel and pass. tiles: for each name a list of values. by: one of RANKS.

    one_by_one: one value of the lists is changed at a time, the others are the defaults. note receives the number of variants before the
    first is compiled.
    """

    by: str = "time"
    one_by_one: bool = False
    output_dir: Path | None = None
    note: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None


@with_options(Tune)
def tune(asked: Tune) -> Tuned:
    """Try tile values of a kernel: all combinations of the lists, or of every tile's default, half and double.

    Where no lists are given and the combinations are more than MANY, one value is changed at a time. The default is among them, as the baseline. With output_dir the variants are added to its tune.csv, with an env.json next to it; after
    Ctrl-C, those that are known by then. Raises UsageFault for an unknown or refused kernel or tile and for an output_dir with an
    experiment in it, DataFault where its tune.csv has another header, EnvironmentFault where the device does not count energy, KernelFault
    where a variant loses the CUDA context, DiskFault.
    """
    by, output_dir, problem, progress = asked.by, asked.output_dir, asked.problem or Problem.of(), asked.progress
    if output_dir:
        refuse_table(output_dir / TABLE, _HEADER)
    backend = pick(asked.device)
    if by == "energy" and backend.meter() is None:
        why = "NVML counts it, on GPUs since Volta, with the package nvidia-ml-py"
        raise EnvironmentFault(f"{backend.device().name} does not report its energy", why, "fa-cli tune --by time")
    kernel = _chosen(replace(asked, problem=problem, tiles=None), backend)
    default, swept, left = _swept(kernel, problem, backend, asked.tiles or {}, asked.one_by_one)
    variants = [Variant(kernel.name, kernel.pass_, problem.folder, backend.name, each, each == default) for each in swept]
    said = f", one value changed at a time (--tile NAME=VALUE,VALUE tries combinations, of which there are {left})" if left else ""
    said += "; CPU times say nothing about a GPU" * (backend.name == "cpu")
    asked.note(f"{len(variants)} variant{'s' * (len(variants) > 1)} of {kernel.label} to compile, check and time{said}")
    tuned = Tuned(kernel, problem, backend.name, backend.device().name, variants, by)
    right: dict[int, PassResult] = {}
    try:
        _judge(tuned, backend, right, asked.seed, progress)
        _measure(tuned, backend, right, progress)
    except KeyboardInterrupt as stop:
        known = [row for i, row in enumerate(variants) if row.status != PASS or i in right]
        if output_dir and known:
            _write(replace(tuned, rows=known), output_dir, backend)
            stop.add_note(f"{len(known)} of {len(variants)} variants are in {output_dir / TABLE}")
        raise
    progress("")
    tuned = replace(tuned, rows=sorted(variants, key=lambda row: _order(row, by)))
    if output_dir:
        _write(tuned, output_dir, backend)
    return tuned


def _judge(tuned: Tuned, backend: Backend, right: dict[int, PassResult], seed: int, progress: Callable[[str], None]) -> None:
    """Replace each of the rows by what came of it before it is timed; what can be timed goes into right, by its place."""
    kernel, variants = tuned.kernel, tuned.rows
    oracle = oracle_for(tuned.problem, backend, kernel.pass_, seed, progress)
    inputs = oracle.inputs_of(kernel.pass_)
    _pruned(variants, lambda row: _prune(kernel, tuned.problem, backend, row), progress)
    for i, row in enumerate(variants):
        if row.status == PASS:
            progress(f"{i}/{len(variants)} checks {' '.join(f'{name}={value}' for name, value in row.tiles.items())}")
            variants[i], checked = _check(row, lambda tiles: run_kernel(backend, kernel, oracle, inputs, tiles))
            if checked:
                right[i] = checked


def _measure(tuned: Tuned, backend: Backend, right: Mapping[int, PassResult], progress: Callable[[str], None]) -> None:
    """Give the rows that are right their times, and those that are metered their energy."""
    variants, problem, policy = tuned.rows, tuned.problem, POLICY[backend.name]
    contenders = {str(i): checked.timed for i, checked in right.items()}
    ready: dict[str, Ready] = {}
    timings = measure(contenders, backend, "warm", policy, progress, ready) if right else {}
    base = next((timings[str(i)] for i in right if variants[i].default and not timings[str(i)].broken), None)
    for i in right:
        variants[i] = _timed(variants[i], timings[str(i)], base, problem)
    metered = sorted((i for i in right if variants[i].ms), key=lambda i: variants[i].ms or 0.0)[: None if tuned.by == "energy" else FASTEST]
    for name, timing in alone.energy({str(i): contenders[str(i)] for i in metered}, backend, policy, progress, ready).items():
        variants[int(name)] = _metered(variants[int(name)], timing, problem)


def _pruned(rows: list[Variant], prune: Callable[[Variant], Variant], progress: Callable[[str], None]) -> None:
    """Replace the rows by what prune makes of them, several at a time: compilers release the interpreter lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for done, row in enumerate(pool.map(prune, rows), 1):
                rows[done - 1] = row
                progress(f"{done}/{len(rows)} compiles")
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it compiles all that are left first
            raise


def _chosen(asked: Tune, backend: Backend) -> Kernel:
    """The one kernel to tune. Raises UsageFault for a range, a peer and an unknown name."""
    found, _ = choose(asked, backend.device())
    if len(found) != 1 or found[0].peer:
        raise UsageFault(
            f"{asked.specs[0]} is not one kernel", "tune sweeps the tile values of one", "fa-cli list shows the kernels there are"
        )
    return planner.variant(found[0].kernels[asked.mode], asked.problem or Problem.of())


def _order(row: Variant, by: str) -> tuple[int, float, float, str]:
    """The best first, then those without a time; where the counter stood still there is no energy, and the time decides."""
    energy = (row.energy_mj or float("inf")) if by == "energy" else 0.0
    return (PASS, FAIL, ERROR, PRUNED).index(row.status), energy, row.ms or 0.0, row.why


def _swept(
    kernel: Kernel, problem: Problem, backend: Backend, tiles: Mapping[str, Sequence[int]], one_by_one: bool = False
) -> tuple[dict[str, int], list[dict[str, int]], int]:
    """The default's values of the tiles that are swept; what is tried, the default first; of how many combinations, where not all are."""
    planner.refuse(kernel, problem)
    if not kernel.tile:
        raise UsageFault(f"{kernel.label} has no tile values", "its header has no [tile]", "tune a kernel that has: fa-cli list")
    names = planner.names(kernel, problem, backend.device(), {name: values[0] for name, values in tiles.items()})  # refuses unknown names
    names = planner.names(kernel, problem, backend.device())
    lists = tiles or {name: sorted({max(1, names[name] // 2), names[name], 2 * names[name]}) for name in kernel.tile}
    default = {name: names[name] for name in lists}
    many = math.prod(map(len, lists.values()))
    left = 0 if tiles or many <= MANY else many
    if left or one_by_one:
        every = [default | {name: value} for name, values in lists.items() for value in values]
    else:
        every = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    return default, [default, *(tiles for tiles in every if tiles != default)], left


def _prune(kernel: Kernel, problem: Problem, backend: Backend, row: Variant) -> Variant:
    """The variant with what the compiler says of it, PRUNED with a reason where it is not worth running."""
    device = backend.device()
    try:
        plan = planner.plan(kernel, problem, device, row.tiles)
    except UsageFault as fault:
        return replace(row, status=PRUNED, why=fault.why or fault.what)
    try:
        said = nvrtc.resources(kernel, plan, nvrtc.pinned_arch(kernel, problem.dtype) or device.arch)
        if why := _too_much(kernel, plan, said, device.shared_optin, row := _with_resources(row, plan, said)):
            return replace(row, status=PRUNED, why=why)
    except CompileError as error:
        return replace(row, status=PRUNED, why=_first_error(error))
    except EnvironmentFault:
        pass  # no NVRTC: registers are not known
    try:
        loaded = backend.load(kernel, problem, row.tiles)
        row = row if row.registers else replace(row, shared_bytes=loaded.shared_bytes)
    except CompileError as error:
        return replace(row, status=PRUNED, why=_first_error(error))
    except Fault:
        pass  # a kernel that compiles and does not load is reported by its check
    return row


def _with_resources(row: Variant, plan: Plan, said: nvrtc.Compiled) -> Variant:
    static = {entry: used.shared_bytes for entry, used in said.usage.items()}
    shared = max(launch.shared + static.get(launch.entry, 0) for launch in plan.launches)
    return replace(row, registers=said.registers, spill_bytes=said.spill_bytes, shared_bytes=shared, stack_bytes=said.stack_bytes)


def _too_much(kernel: Kernel, plan: Plan, said: nvrtc.Compiled, shared_limit: int, row: Variant) -> str:
    if (row.spill_bytes or 0) > kernel.spill_bytes_allowed:
        return f"spills {row.spill_bytes} bytes a thread"
    if (row.shared_bytes or 0) > shared_limit:
        return f"it wants {row.shared_bytes} bytes of shared memory a block, the device has {shared_limit}"
    for launch in plan.launches:
        registers = said.usage[launch.entry].registers if launch.entry in said.usage else 0
        if registers * launch.block > REGISTERS:
            return f"{registers} registers x {launch.block} threads are more than the {REGISTERS} of a multiprocessor"
    return ""


def _first_error(error: CompileError) -> str:
    """The line that matters of a compiler's log: of a static_assert its message, or the line of source below it."""
    lines = [" ".join(line.split()) for line in error.log.splitlines()] or ["it does not compile"]
    at = next((i for i, line in enumerate(lines) if "error" in line), 0)
    if text := re.search(r'static assertion failed(?: with "|: )(.+?)"?$', lines[at]):  # NVRTC's form and g++'s
        return text[1]
    source = next((f": {match[0]}" for line in lines[at + 1 : at + 2] if (match := re.search("static_assert.*", line))), "")
    return re.sub(r"^\S*/", "", lines[at]) + source


def _check(row: Variant, run: Callable[[Mapping[str, int]], PassResult]) -> tuple[Variant, PassResult | None]:
    """The variant checked against float64, and what can be timed where it passes."""
    try:
        result = run(row.tiles)
    except ContextLost as fault:
        words = " ".join(f"{name}={value}" for name, value in row.tiles.items())
        raise KernelFault(f"{fault.what} (with {words})", fault.why, "leave that value out: --tile") from fault
    except Fault as fault:
        return replace(row, status=ERROR, why=" ".join(f"{fault.what}: {fault.why}".split())), None
    if result.loaded and row.registers is None:
        row = replace(row, registers=result.loaded.registers)
    if not result.passed:
        wrong = "; ".join(budget.message(v) for v in result.verdicts.values() if not v.passed)
        return replace(row, status=FAIL, why=wrong), None
    return row, result


def _timed(row: Variant, timing: Timing, base: Timing | None, problem: Problem) -> Variant:
    if timing.broken:
        return replace(row, status=FAIL, why=timing.broken)
    row = replace(row, ms=timing.median_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms, n_samples=len(timing.seconds))
    if row.device == "cpu":
        return row
    row = replace(row, tflops=problem.flops(row.pass_) / (timing.median_ms * 1e9))
    if base is None:
        return row
    low, high = ratio_interval(timing.seconds, base.seconds, timing.turns, base.turns) or (None, None)
    return replace(row, vs_default=base.median_ms / timing.median_ms, vs_low=low, vs_high=high)


def _metered(row: Variant, timing: Timing, problem: Problem) -> Variant:
    if timing.broken:
        return replace(row, status=FAIL, why=timing.broken, ms=None, tflops=None, vs_default=None, vs_low=None, vs_high=None)
    if timing.energy is None:
        return row
    return replace(row, **timing.energy._asdict(), pj_per_flop=timing.energy.energy_mj * 1e9 / problem.flops(row.pass_))


# -- the record -------------------------------------------------------------------------------------------------------


def _write(tuned: Tuned, folder: Path, backend: Backend) -> None:
    """Add the variants to tune.csv, a row each (several kernels may share the table), and write env.json.

    Of a torn table the whole rows are kept, with the warning Dropped. Raises DataFault where it has another header by now, DiskFault.
    """
    kernel = tuned.kernel
    facts = dict(zip(_FACTS, (tuned.device_name, tuned.problem.causal, kernel.deterministic, kernel.source_hash), strict=True))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in tuned.rows:
        values = vars(row) | {"tiles": " ".join(f"{name}={value}" for name, value in row.tiles.items())} | facts
        values["stack_bytes"] = values.pop("stack_bytes")  # the newest column is the last
        writer.writerow(str(value).lower() if isinstance(value, bool) else "" if value is None else value for value in values.values())
    path = folder / TABLE
    make_folder(folder)
    record = environment.environment(**backend.environment())
    with locked(folder, "use another --output-dir"):
        refuse_table(path, _HEADER)
        before = (read_records(path, quoted=True) if os.path.lexists(path) else "") or f"{_HEADER}\n"
        write_files(folder, {path.name: (before + out.getvalue()).encode(), "env.json": json_bytes(record)})
