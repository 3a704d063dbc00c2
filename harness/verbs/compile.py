"""The `compile` verb: every kernel for every architecture its header allows, with NVRTC alone: registers, spills, shared memory.

Needs no GPU and no driver. What ptxas says is remembered on disk (backends/nvrtc.py, `resources`), so a second run compiles
only what has changed. With `order` the machine code is read too (backends/sass.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backends import CompileError, nvrtc, sass
from ..backends.instead import instead
from ..backends.occupancy import Resident, resident
from ..check.choose import kernels
from ..check.request import Request
from ..fault import UsageFault, clipped
from ..files import make_folder, write_files
from ..kernel import Device, Kernel, LaunchPlan, Plan, catalogue, is_path, parts, planner
from ..kernel.expression import ExpressionError, evaluate
from ..kernel.signature import check_parameters
from ..problem import Problem

#: Status of a row. Only the first two pass: a kernel that needs more shared memory than an architecture has is not offered there.
OK, TOO_BIG, SPILLS, ERROR = "OK", "TOO BIG", "SPILLS", "ERROR"
#: Queries and keys a head. Tile values may depend on them, so `--all` compiles each form that one of these lengths has.
LENGTHS = (1024, 32, 128, 4096, 16384)
#: Heads: fewer tiles than a GPU has multiprocessors, and many times more.
HEADS = (1, 1024)
#: Head dims of Q and K with others of V that `--all` compiles too: DeepSeek's, and a narrower and a wider V of a smaller width.
DIMS_V = ((192, 128), (96, 64), (64, 128))
#: Keys before its own that a query sees, of 8 heads a key head, for a file that takes windows only.
WINDOW = 127


@dataclass(frozen=True)
class CompileRow:
    """One kernel compiled for one architecture, width and dtype. Resources are the largest of its entries; None where not compiled."""

    kernel: str
    pass_: str
    dtype: str
    head_dim: int
    causal: bool
    arch: str
    status: str
    registers: int | None = None
    spill_bytes: int | None = None  # a thread
    stack_bytes: int | None = None  # a thread, in local memory: spills, and arrays that are not in registers
    shared_bytes: int | None = None  # a block: static and dynamic
    seconds: float | None = None  # of the compile, also where it comes from the cache
    message: str = ""  # why it did not pass, or is not offered
    deterministic: bool = True  # the form that was compiled; a kernel that has two is compiled in both
    head_dim_v: int | None = None  # of V, where it is another
    dtype_kv: str | None = None  # of K and V, where it is another
    tiles: Mapping[str, int] = field(default_factory=dict)
    order: Mapping[str, str | None] | None = (
        None  # of each entry's main loop (sass.Loop.describe, inner_loops), None without; where asked for
    )
    memory: Mapping[str, str] | None = None  # of each entry, its loads and stores by kind; where the order is asked for
    blocks_per_sm: int | None = None  # of the entry with the fewest warps a multiprocessor, as the next two
    warps_per_sm: int | None = None
    limit: str | None = None  # what allows no more: registers, shared, threads, blocks
    window: int | None = None  # keys before its own that a query sees, where those are not all

    @property
    def dims(self) -> str:
        """Its head dim, and V's where it is another."""
        return f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")

    @property
    def dtypes(self) -> str:
        """Its storage type, and that of K and V where it is another."""
        return self.dtype + (f"/{self.dtype_kv}" if self.dtype_kv else "")

    @property
    def passed(self) -> bool:
        """Whether this row is in order: compiled within its header's allowance, or not offered on the architecture."""
        return self.status in (OK, TOO_BIG)


@dataclass(frozen=True)
class _Case:
    kernel: Kernel
    dtype: str
    width: int
    width_v: int | None  # of V, where it is another
    dtype_kv: str | None  # of K and V, where it is another
    causal: bool
    window: int | None
    arch: str
    seq: int
    heads: int
    order: bool
    sass: Path | None

    @property
    def problem(self) -> Problem:
        """A problem that has this form; tf32 is float32 files."""
        windowed, dtype = self.window is not None, "float32" if self.dtype == "tf32" else self.dtype
        mask, heads = (f"0 <= q - k <= {self.window}", 8 * self.heads) if windowed else (None, self.heads)
        sizes = 1, heads, self.seq, self.width, self.heads, None, dtype, self.causal and not windowed
        return Problem.of(*sizes, mask=mask, dim_v=self.width_v, dtype_kv=self.dtype_kv)

    @property
    def device(self) -> Device:
        return Device(kind="cuda", name=self.arch, arch=self.arch, shared_optin=nvrtc.SHARED_LIMIT[self.arch])

    @property
    def tiles(self) -> dict[str, int]:
        """The tile values; none where the header has a wrong expression."""
        try:
            kernel = planner.variant(self.kernel, self.problem)
            names = planner.names(kernel, self.problem, self.device)
        except (UsageFault, ExpressionError):
            return {}
        return {name: names[name] for name in kernel.tile}


def compile_all(
    computes: Sequence[str] = (),
    everything: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    arch: str | None = None,
    note: Callable[[str], None] = lambda text: None,
    order: bool = False,
    sass_to: Path | None = None,
) -> list[CompileRow]:
    """Compile kernels by name, number, range or path: both passes of a name, one file of a path; without any, the whole tree.

    note receives what a range leaves out, and which NVRTC it was. Raises UsageFault for a kernel that does not exist or that none of the architectures takes (of
    a range: for none), and as :func:`compile_kernels` does.
    """
    found: list[Kernel] = []
    for spec in computes:
        file = is_path(spec) and parts(spec) == (spec,)
        some, left_out = ([Kernel.read(Path(spec).resolve())], []) if file else kernels(Request(spec, "both"))
        if not any(_cases(kernel, _architectures(arch), False, False) for kernel in some):
            rules = ", ".join(dict.fromkeys(kernel.arch_for(dtype) for kernel in some for dtype in kernel.dtypes))
            why = f"its header takes {rules}; asked for: {', '.join(_architectures(arch))}"
            raise UsageFault(f"{clipped(spec, 80)} cannot be compiled as asked", why, "use another --arch")
        found += some
        for text in left_out:
            note(text)
    rows = compile_kernels(found if computes else catalogue(), everything, progress, arch, order, sass_to)
    for text in _in_local_memory(rows):
        note(text)
    if not everything and any(kernel.causal or len(planner.widths(kernel)) > 1 for kernel in found or catalogue()):
        note("each dtype at the widest head dim, under the causal mask where the kernel has it; --all compiles the others")
    note(f"compiled by NVRTC {nvrtc.version()}; another version may take other registers")
    return rows


def compile_kernels(
    wanted: Sequence[Kernel],
    everything: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    arch: str | None = None,
    order: bool = False,
    sass_to: Path | None = None,
) -> list[CompileRow]:
    """Compile kernels for an architecture ("sm_90"), or for each that their headers and this NVRTC allow.

    Each dtype at the widest head dim of each file, causal where the kernel has it; everything adds the other widths, V's own (DIMS_V), both
    masks and the tiles of other LENGTHS and HEADS. order: read the main loop's order, which compiles again what is in the cache; sass_to: so does
    writing the machine code into that folder, a file a row. Rows are in the order of the kernels. A kernel that does not compile is a row that did not pass. Raises EnvironmentFault where there is no
    NVRTC, or for order and sass_to no nvdisasm, and UsageFault for an architecture that is not ours or not this NVRTC's.
    """
    archs = _architectures(arch)
    if sass_to:
        make_folder(sass_to)
    if order or sass_to:
        sass.program()  # raises before anything is compiled
    cases = [case for kernel in wanted for case in _cases(kernel, archs, everything, order, sass_to)]
    rows = []
    progress(f"0/{len(cases)} compiles")
    with ThreadPoolExecutor(2) as pool:  # NVRTC releases the interpreter lock; more than two threads gain little
        for number, row in enumerate(pool.map(_row, cases), 1):
            rows.append(row)
            progress(f"{number}/{len(cases)} {row.kernel} {row.pass_} {row.dtypes} {row.arch}")
    progress("")
    return rows


def _architectures(arch: str | None) -> tuple[str, ...]:
    """The one that was asked for, or all. Raises UsageFault as :func:`compile_kernels` does."""
    if arch is not None and arch not in nvrtc.architectures():
        why = f"NVRTC {nvrtc.version()} compiles for {', '.join(nvrtc.architectures())}"
        if arch in nvrtc.SHARED_LIMIT:
            raise UsageFault(f"this NVRTC has no {arch}", why, "install the cuda12 extra for older architectures, cuda13 for newer ones")
        raise UsageFault(f"unknown architecture {arch!r}", why, "choose one of these")
    return nvrtc.architectures() if arch is None else (arch,)


def _cases(kernel: Kernel, archs: Sequence[str], everything: bool, order: bool, sass_to: Path | None = None) -> list[_Case]:
    widths = planner.widths(kernel) if everything else tuple(dict.fromkeys(k.head_dims[-1] for k in kernel.variants or (kernel,)))
    dims: list[tuple[int, int | None, str | None]] = [(width, kernel.dim_v(width), None) for width in widths]
    dims += [
        (*pair, None)
        for pair in DIMS_V
        if everything and kernel.takes_dim_v and max(pair) <= kernel.head_dims[-1] and kernel.dim_v(pair[1]) is None
    ]
    dims += [(width, None, kind) for kind in kernel.dtypes_kv for width in widths if everything]
    masks: list[tuple[bool, int | None]] = [(True, None), (False, None)] if everything and kernel.causal else [(kernel.causal, None)]
    masks = ([] if kernel.windows_only else masks) + [(True, WINDOW)] * any(k.windows_only for k in kernel.variants or (kernel,))
    forms = [kernel, kernel.made_deterministic()] if len(kernel.forms) > 1 else [kernel]
    found = []
    for form, dtype, of, mask, arch in itertools.product(forms, kernel.dtypes, dims, masks, archs):
        if nvrtc.admits(kernel, dtype, arch):
            sizes = itertools.product(LENGTHS, HEADS) if everything else [(LENGTHS[0], HEADS[0])]
            some = [_Case(form, dtype, *of, *mask, arch, seq, heads, order, sass_to) for seq, heads in sizes]
            found += list({tuple(case.tiles.items()): case for case in reversed(some)}.values())[::-1]
    return found


def _row(case: _Case) -> CompileRow:
    kernel, limit = planner.variant(case.kernel, case.problem), nvrtc.SHARED_LIMIT[case.arch]
    of = case.kernel.name, kernel.pass_, case.dtype, case.width, case.causal, case.arch
    row = CompileRow(
        *of, OK, deterministic=kernel.deterministic, head_dim_v=case.width_v, dtype_kv=case.dtype_kv, window=case.window, tiles=case.tiles
    )
    try:
        check_parameters(kernel)
        dynamic = _dynamic_shared(kernel, case.problem, case.device)
        shared = max(dynamic.values())
        if shared > limit:
            return replace(row, status=TOO_BIG, shared_bytes=shared, message=_too_big(shared, case.arch))
        plan = planner.plan(kernel, case.problem, case.device)
        found = nvrtc.compile_(kernel, plan, case.arch) if case.order or case.sass else nvrtc.resources(kernel, plan, case.arch)
    except CompileError as error:
        return replace(row, status=ERROR, message="\n".join(filter(None, (error.log.strip(), instead(error.log)))))
    except (UsageFault, ExpressionError) as error:  # a header that cannot be planned
        return replace(row, status=ERROR, message=str(error))
    missing = [entry for entry in kernel.entries if entry not in found.usage]
    if missing:
        message = f'{kernel.path}: no `extern "C" __global__` entry {", ".join(missing)}; it has {", ".join(found.usage)}'
        return replace(row, status=ERROR, message=message)
    shared = max(found.usage[entry].shared_bytes + dynamic[entry] for entry in kernel.entries)
    blocks, warps, scarce = min((_resident(plan, found, call, case.arch) for call in plan.launches), key=lambda each: each.warps)
    row = replace(
        row,
        blocks_per_sm=blocks,
        warps_per_sm=warps,
        limit=scarce,
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        stack_bytes=found.stack_bytes,
        shared_bytes=shared,
        seconds=found.seconds,
    )
    if case.sass:
        form = f"{row.dtypes.replace('/', '_')}_D{row.dims.replace('/', '_')}{'_causal' * row.causal}{'_window' * (row.window is not None)}{'' if row.deterministic else '_fast'}_{row.arch}"
        form += "".join(f"_{name}{value}" for name, value in row.tiles.items())
        write_files(case.sass, {f"{kernel.label}_{form}.sass": sass.disassembled(found.cubin, lines=True).encode()})
    if case.order:
        listing = sass.disassembled(found.cubin)
        loops, inner, memory = sass.main_loops(listing), sass.inner_loops(listing), sass.memory(listing)
        order = {entry: loop.describe() if (loop := loops.get(entry)) else inner.get(entry) for entry in kernel.entries}
        row = replace(row, order=order, memory={entry: memory.get(entry, "") for entry in kernel.entries})
    if shared > limit:
        return replace(row, status=TOO_BIG, message=_too_big(shared, case.arch))
    if found.spill_bytes > kernel.spill_bytes_allowed:
        message = f"spills {found.spill_bytes} bytes a thread; the header allows {kernel.spill_bytes_allowed}"
        return replace(row, status=SPILLS, message=message)
    return row


def _resident(plan: Plan, found: nvrtc.Compiled, call: LaunchPlan, arch: str) -> Resident:
    used = found.usage[call.entry]
    return resident(arch, call.block, used.registers, used.shared_bytes + call.shared)


def _dynamic_shared(kernel: Kernel, problem: Problem, device: Device) -> dict[str, int]:
    """Bytes of dynamic shared memory each entry's launches need, evaluated before planner.plan, which refuses what does not fit."""
    names = planner.names(kernel, problem, device)
    wanted = dict.fromkeys(kernel.entries, 0)
    for launch in kernel.launches:
        if evaluate(launch.when, names):
            wanted[launch.entry] = max(wanted[launch.entry], evaluate(launch.shared, names))
    return wanted


def _in_local_memory(rows: Sequence[CompileRow]) -> list[str]:
    """A sentence for each kernel with more local memory than its spills take."""
    most: dict[str, int] = {}
    for row in rows:
        if nvrtc.has_local_arrays(row.stack_bytes, row.spill_bytes):
            label = f"{row.kernel} {row.pass_}"
            most[label] = max(most.get(label, 0), row.stack_bytes or 0)
    return [f"{label} has {stack} bytes of local memory a thread: {nvrtc.WHY_LOCAL}" for label, stack in most.items()]


def _too_big(shared: int, arch: str) -> str:
    return f"not offered: {shared} bytes of shared memory a block, {arch} has {nvrtc.SHARED_LIMIT[arch]}"
