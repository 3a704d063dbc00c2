"""What is computed of rows before any drawing: the latest of each, those that may share axes, families over S, ceilings.

A view is one pass on one device in one dtype and mask: rows of different views never share an axis or a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import peers
from ..files import Json
from ..kernel import catalogue
from ..row import CEILING, SHAPE, TYPES, Row, problem_of
from .palette import Look, looks

#: The columns that tell two measurements of one device apart.
KEY = ("Kernel", "Type", *SHAPE, "timing")
MODES = {short: mode for mode, short in TYPES.items()}
PREFIX = {"FOR": "", "BAC": "BACKWARD_", "BOT": "BOTH_"}  # of file names
TIMINGS = ("warm", "cold", "burst")
PASS_WORDS = {"FOR": "forward", "BAC": "backward", "BOT": "forward + backward"}
HOST_TIME = "CPU time (CPU engine), not GPU performance"
#: Lengths that make a family worth a figure where other shapes are there too.
FAMILY = 4
#: The fewest samples that bound a median.
FEWEST = 3
#: The most kernels in a figure, and how many of ours and of the peers come first among them.
SERIES, EACH = 6, 3
#: Timed steps of the ladder that make a shape worth the figure of the ladder.
LADDER = 6

#: Values of a row's columns that tell it, or its group, apart.
Key = tuple[str | float | None, ...]


def key_of(row: Row) -> Key:
    """The values of KEY in a row."""
    return tuple(getattr(row, name) for name in KEY)


def with_texts(rows: Iterable[Row], change: Callable[[str], str]) -> list[Row]:
    """Rows with their words, which are a file's, as figures or pages may have them."""

    def changed(row: Row) -> Row:
        texts: Json = {name: change(value) for name, value in vars(row).items() if isinstance(value, str)}
        return replace(row, **texts)

    return list(map(changed, rows))


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each KEY and device. One without a timing (refused, failed) stands for all until a timed one follows."""
    by_key: dict[Key, dict[str | None, Row]] = {}
    for row in rows:
        of_timing = by_key.setdefault((*key_of(row)[:-1], row.device_name), {})
        if row.timing is None:
            of_timing.clear()
        of_timing.pop(None, None)
        of_timing[row.timing] = row
    return [row for of_timing in by_key.values() for row in of_timing.values()]


def work_of(row: Row, mode: str) -> float:
    """FLOPs of a pass of a row's problem. No row has the values of tensors: what a mask of some leaves is in its TFLOP/s, else unknown, 0."""
    problem = problem_of(row)
    if row.mask is None or not problem.tensors:
        return problem.flops(mode)
    return (row.TFLOPS or 0.0) * (row.KernelTime_ms or 0.0) * 1e9


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None where there are none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def median_bounds(row: Row) -> tuple[float, float] | None:
    """Milliseconds between which a row's median is taken to lie, from what results.csv has of the samples; None where that is too little.

    6 / sqrt(n) of the way to p20 and to p80, in logarithms: twice as far as for normal noise.
    """
    middle, low, high, n = row.KernelTime_ms, row.p20_ms, row.p80_ms, row.n_samples
    if not (middle and low and high and n and n >= FEWEST):
        return None
    return middle * (low / middle) ** (6 / math.sqrt(n)), middle * (high / middle) ** (6 / math.sqrt(n))


def unsettled(row: Row, other: Row) -> bool:
    """Whether the samples of two rows do not tell which one is faster: the bounds of their medians meet."""
    one, two = median_bounds(row), median_bounds(other)
    return bool(one and two and one[0] <= two[1] and two[0] <= one[1])


@dataclass(frozen=True)
class View:
    """Rows that may share axes. timing is the one drawn; suffix is what file names need to differ; ceilings are of the same device."""

    rows: tuple[Row, ...]
    type: str
    dtype: str
    causal: bool
    device: str
    device_name: str
    timing: str | None
    suffix: str
    ceilings: Mapping[str, Row]
    hidden: int = 0  # kernels with a time that are not among the rows

    @property
    def cpu(self) -> bool:
        """Whether the times are CPU times of the CPU engine."""
        return self.device == "cpu"

    @property
    def mode(self) -> str:
        """forward, backward or both."""
        return MODES[self.type]

    @property
    def kernels(self) -> list[str]:
        """The kernels, in the order of the rows."""
        return list(dict.fromkeys(row.Kernel for row in self.rows))

    @property
    def timed(self) -> list[str]:
        """The kernels that have a time in some shape."""
        return [kernel for kernel in self.kernels if any(row.KernelTime_ms for row in self.cells(kernel).values())]

    @property
    def looks(self) -> dict[str, Look]:
        """Colour, marker and line of each kernel."""
        return looks(tuple(self.kernels))

    def picked(self) -> View:
        """The view of SERIES kernels: the EACH fastest of ours and of the peers, then the next fastest of all, in the view's order.

        Fast is what takes little of the other kernels' least time, summed over the shapes. What has no time but an error, as it failed,
        comes last; what was refused or is absent not at all.
        """
        times = {k: {s: row.KernelTime_ms for s, row in self.cells(k).items() if row.KernelTime_ms} for k in self.kernels}
        least = {s: min(of[s] for of in times.values() if s in of) for s in self.shapes if any(s in of for of in times.values())}
        score = {kernel: sum(least[s] / ms for s, ms in of.items()) for kernel, of in times.items()}
        wrong = {row.Kernel for row in self.rows if row.Status in ("FAIL", "ERROR")}
        ranked = sorted((k for k in self.kernels if score[k] or k in wrong), key=lambda k: -score[k])
        ours, theirs = ([k for k in ranked if (peers.find(k) is not None) == peer][:EACH] for peer in (False, True))
        chosen = list(dict.fromkeys([*ours, *theirs, *ranked]))[: max(SERIES, len(ours) + len(theirs))]
        kept = [row for row in self.rows if row.Kernel in chosen]
        return replace(self, rows=tuple(kept), hidden=sum(1 for k in self.timed if k not in chosen))

    @property
    def shapes(self) -> list[Key]:
        """The problems, in the order of the rows."""
        return list(dict.fromkeys(shape_of(row) for row in self.rows))

    def only(self, rows: Iterable[Row], suffix: str = "") -> View:
        """The view of some of the rows."""
        return replace(self, rows=tuple(rows), suffix=suffix + self.suffix)

    def cells(self, kernel: str, timing: str | None = None) -> dict[Key, Row]:
        """A kernel's rows by shape, of the timing drawn (or of another) and those without one."""
        wanted = (timing or self.timing, None)
        return {shape_of(row): row for row in self.rows if row.Kernel == kernel and row.timing in wanted}

    def label(self, shape: Key) -> str:
        """A shape in words: its test's name, and the sizes that vary in this view and are not in that name."""
        row = next(row for row in self.rows if shape_of(row) == shape)
        name = row.Test or problem_of(row).folder
        sizes = {"B": "Batch", "H": "Heads", "S": "SeqLen", "D": "HeadDim", "Dv": "head_dim_v", "Hkv": "heads_kv", "Skv": "seq_kv"}
        usual = {"Dv": row.HeadDim, "Hkv": row.Heads, "Skv": row.SeqLen}
        parts = []
        for short, column in sizes.items():
            value = getattr(row, column)
            varies = len({getattr(other, column) for other in self.rows}) > 1
            if varies and f"{short}{value}" not in name.replace("-", "_").split("_") and usual.get(short) != value:
                parts.append(f"{short}{value}")
        return f"{name} ({' '.join(parts)})" if parts else name

    @property
    def reference(self) -> str | None:
        """What speed-ups are over: the fastest torch backend of the run, else the first kernel that has every shape's time."""
        if any(row.Speedup for row in self.rows):
            return "the fastest torch backend"
        whole = (k for k in self.kernels if sum(bool(row.KernelTime_ms) for row in self.cells(k).values()) == len(self.shapes))
        return next(whole, None)

    def speedup(self, row: Row) -> float | None:
        """How many times as fast as the reference a row is."""
        reference = self.reference
        if row.KernelTime_ms is None or reference is None or any(other.Speedup for other in self.rows):
            return row.Speedup
        base = self.cells(reference, row.timing).get(shape_of(row))
        return base.KernelTime_ms / row.KernelTime_ms if base and base.KernelTime_ms else None


def shape_of(row: Row) -> Key:
    """What a row's problem is, in a view."""
    return tuple(getattr(row, name) for name in SHAPE)


def views(rows: Iterable[Row]) -> list[View]:
    """The views of rows, in their order; GPU and CPU apart, the suffix of the CPU's is _cpu."""
    every = latest(rows)
    ceilings = [row for row in every if row.Kernel.startswith(CEILING)]
    groups: dict[tuple[str, str, str, str, bool], list[Row]] = {}
    for row in every:
        if row not in ceilings:
            device = "cpu" if row.device == "cpu" else "cuda"
            groups.setdefault((device, row.device_name or "unknown device", row.Type, row.dtype, row.causal), []).append(row)
    varied = [len({key[i] for key in groups}) > 1 for i in range(5)]
    several_names = any(len({k[1] for k in groups if k[0] == device}) > 1 for device in ("cpu", "cuda"))
    every_view = []
    for (device, name, type_, dtype, causal), members in groups.items():
        suffix = f"_{'-'.join(name.split())}" * several_names + f"_{dtype}" * varied[3] + ("_causal" if causal else "_full") * varied[4]
        timing = "warm" if any(row.timing == "warm" for row in members) else next((row.timing for row in members if row.timing), None)
        ours = {row.Kernel.removeprefix(CEILING): row for row in ceilings if (row.device_name or "unknown device") == name}
        every_view.append(View(tuple(members), type_, dtype, causal, device, name, timing, suffix + "_cpu" * (device == "cpu"), ours))
    return every_view


def families(view: View) -> list[View]:
    """Parts of a view whose shapes differ in S only (at a fixed batch, or at a fixed number of tokens), for figures over S.

    A family has FAMILY lengths or more; two are enough where they are all the shapes of the view.
    """
    alike: tuple[Callable[[Row], Key], ...] = (
        lambda r: (r.Batch, r.Heads, r.heads_kv, r.HeadDim, r.head_dim_v, r.scale, r.seq_kv == r.SeqLen),
        lambda r: (r.Batch * r.SeqLen, r.Heads, r.heads_kv, r.HeadDim, r.head_dim_v, r.scale, r.seq_kv == r.SeqLen),
    )
    parts: list[View] = []
    for same in alike:
        groups: dict[Key, list[Row]] = {}
        for row in view.rows:
            if not any(row in family.rows for family in parts):
                groups.setdefault(same(row), []).append(row)
        for members in groups.values():
            lengths = {row.SeqLen for row in members}
            one_each = len({shape_of(row) for row in members}) == len(lengths)
            if one_each and (len(lengths) >= FAMILY or (len(lengths) > 1 and len(lengths) == len(view.shapes))):
                parts.append(replace(view, rows=tuple(members)))
    return [replace(f, suffix=suffix + view.suffix) for f, suffix in zip(parts, _suffixes(parts), strict=True)]


def over_head_dims(view: View) -> list[View]:
    """Parts of a view whose shapes differ in the head dimension only (and the scale that follows from it), FAMILY of them or more."""
    groups: dict[Key, list[Row]] = {}
    for row in (row for row in view.rows if row.head_dim_v in (None, row.HeadDim)):
        groups.setdefault((row.Batch, row.Heads, row.heads_kv, row.SeqLen, row.seq_kv), []).append(row)
    parts = [view.only(members) for members in groups.values() if len({row.HeadDim for row in members}) >= FAMILY]
    parts = [f for f in parts if len(f.shapes) == len({row.HeadDim for row in f.rows})]
    return parts if len(parts) < 2 else [replace(f, suffix=f"_S{f.rows[0].SeqLen}{f.suffix}") for f in parts]


def picojoules(row: Row) -> float | None:
    """Energy a FLOP of a row, in 10^-12 J, of the FLOPs that Problem.flops counts."""
    if not row.energy_mj:
        return None
    if row.Kernel.startswith(CEILING):
        return row.energy_mj / (row.TFLOPS * row.KernelTime_ms) if row.TFLOPS and row.KernelTime_ms else None
    flops = work_of(row, MODES[row.Type])
    return row.energy_mj * 1e9 / flops if flops else None


def by_head_dim(view: View, most: int = 16) -> list[View]:
    """The view, or where it has more than `most` shapes a view for each head dimension."""
    dims = list(dict.fromkeys(row.HeadDim for row in view.rows))
    if len(view.shapes) <= most or len(dims) == 1:
        return [view]
    return [view.only((row for row in view.rows if row.HeadDim == dim), f"_D{dim}") for dim in dims]


def _suffixes(found: Sequence[View]) -> list[str]:
    """The shortest names that tell families apart."""
    if len(found) == 1:
        return [""]
    firsts = [family.rows[0] for family in found]
    for columns in (("HeadDim",), ("Heads",), ("Batch",), ("Batch", "Heads", "HeadDim"), ("Batch", "Heads", "heads_kv", "HeadDim")):
        short = {"HeadDim": "D", "Heads": "H", "Batch": "B", "heads_kv": "Hkv"}
        names = ["_" + "_".join(f"{short[c]}{getattr(row, c)}" for c in columns) for row in firsts]
        if len(set(names)) == len(names):
            return names
    return [f"_{i}" for i in range(1, len(found) + 1)]


def steps(view: View) -> list[tuple[int, Row]]:
    """The ladder's kernels that have a time in a view of one shape, with their numbers, in ladder order."""
    numbers = {k.name: k.number for k in catalogue() if k.number is not None}
    return sorted((numbers[row.Kernel], row) for row in view.rows if row.timing == view.timing and row.TFLOPS and row.Kernel in numbers)


def ladders(rows: Iterable[Row]) -> list[list[View]]:
    """The panels of each figure of the ladder: a view a dtype, cut to the shape most steps have (then the largest), if LADDER have it."""
    figures: dict[Key, list[View]] = {}
    for view in views(rows):
        shapes = [view.only(row for row in view.rows if shape_of(row) == shape) for shape in view.shapes]
        best = max(shapes, key=lambda cut: (len(steps(cut)), work_of(cut.rows[0], view.mode)))
        if len(steps(best)) >= LADDER:
            figures.setdefault((view.device_name, view.type, view.causal), []).append(best)
    return [sorted(panels, key=lambda panel: steps(panel)[-1][0]) for panels in figures.values()]


# -- what limits a kernel ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roof:
    """One ceiling over a problem: what it is called, the TFLOP/s it allows, and its measured rate in words."""

    name: str
    tflops: float
    measured: str


def intensity(row: Row) -> float:
    """FLOPs a byte of a row's problem: every input read once, every output written once."""
    mode = MODES[row.Type]
    return work_of(row, mode) / problem_of(row).bytes(mode)


def gemm(view: View) -> Row | None:
    """The measured GEMM ceiling of a view's dtype; the 16-bit types stand for each other, having one rate."""
    names = {"float16": ("float16", "bfloat16"), "bfloat16": ("bfloat16", "float16")}.get(view.dtype, (view.dtype,))
    return next((row for name in names if (row := view.ceilings.get(f"gemm-{name}")) and row.TFLOPS), None)


def roofs(view: View, row: Row) -> list[Roof]:
    """The measured ceilings over a row's problem, the lowest first."""
    ceilings = []
    copy, product, exp = view.ceilings.get("copy"), gemm(view), view.ceilings.get("exp")
    parts = _float16_products(row)
    half = view.ceilings.get("gemm-float16") if parts else None
    if copy and copy.Bandwidth_GBps:
        measured = f"copy {copy.Bandwidth_GBps:,.0f} GB/s"
        ceilings.append(Roof("memory bandwidth", copy.Bandwidth_GBps * intensity(row) / 1e3, measured))
    if half and half.TFLOPS and parts:
        ceilings.append(Roof("arithmetic", half.TFLOPS / parts, f"GEMM float16 {half.TFLOPS:,.4g} TFLOP/s, {parts} products for one"))
    elif product and product.TFLOPS:
        ceilings.append(Roof("arithmetic", product.TFLOPS, f"GEMM {product.Kernel.rpartition('-')[2]} {product.TFLOPS:,.4g} TFLOP/s"))
    if exp and exp.TFLOPS:
        ceilings.append(Roof("exponentials", exp.TFLOPS * flops_an_exp(row), f"exp {exp.TFLOPS:,.3g} T/s"))
    return sorted(ceilings, key=lambda roof: roof.tflops)


def _float16_products(row: Row) -> int | None:
    """How many products of float16 stand for one in every pass of a row; None where no header says so, or where they differ."""
    names, mode = row.Kernel.split("+"), MODES[row.Type]
    of = {"forward": names[0], "backward": names[-1]}
    counts = {k.float16_products for k in catalogue() if k.name == of[k.pass_] and mode in (k.pass_, "both")}
    return counts.pop() if len(counts) == 1 else None


def flops_an_exp(row: Row) -> float:
    """FLOPs of a pass for each exponential it needs: one a visible pair forward, one backward, two for both."""
    forward, backward = problem_of(row).flops_a_pair
    return {"FOR": float(forward), "BAC": float(backward), "BOT": (forward + backward) / 2}[row.Type]


def limiter(view: View, kernel: str) -> str | None:
    """A sentence: what limits a kernel at its largest problem, by the ceilings measured in the same run; None where there are none."""
    timed = [row for row in view.cells(kernel).values() if row.TFLOPS]
    largest = max(timed, key=lambda row: work_of(row, view.mode), default=None)
    ceilings = roofs(view, largest) if largest else []
    if not ceilings or largest is None or largest.TFLOPS is None:
        return None
    lowest, others = ceilings[0], ", ".join(f"{roof.name} would allow {roof.tflops:,.3g}" for roof in ceilings[1:])
    part = largest.TFLOPS / lowest.tflops
    text = f"{kernel} at {view.label(shape_of(largest))}: {largest.TFLOPS:,.3g} TFLOP/s, {part:.0%} of the lowest ceiling, {lowest.name} "
    text += f"({lowest.tflops:,.3g} TFLOP/s by {lowest.measured}{'; ' + others if others else ''}): "
    if part > 1.02:
        return text + "it does its products on faster units than that ceiling was measured on."
    if part >= 0.5:
        return text + f"{lowest.name} limits it."
    return text + "no ceiling is near; its own instructions, latency or occupancy limit it."
