"""How many times as fast as the best peer a run's kernels are on each of its problems: the ratios' distribution, and the worst of them.

For runs of many problems (a sweep with [draw]), where a table of times says little. Needs neither pandas nor matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .. import peers
from ..row import CEILING, OPERATOR, SHAPE, TYPES, Row
from .views import geometric_mean, work_of

#: What a ratio is of. GPU time is that between two events: of a CUDA graph where the host would be the slower one. A plain call, one of
#: many in a row, takes that or the host's time to enqueue it, whichever is longer; ours is the operator's, where it was measured.
TIMES = ("kernel", "call")
#: dtypes that share a distribution, by the name of their class.
CLASSES = {"float16": "16 bit", "bfloat16": "16 bit", "tf32": "float32"}
WORST = 10


@dataclass(frozen=True)
class Ratio:
    """One problem and pass: the fastest of the run's kernels and of the peers, and the peer's time over the kernel's (above 1: ahead).

    ours, best: their rows, of one shape and pass.
    """

    ours: Row
    best: Row
    ratio: float

    @property
    def work(self) -> float:
        """FLOPs of the pass."""
        return work_of(self.ours, next(mode for mode, short in TYPES.items() if short == self.ours.Type))

    @property
    def command(self) -> str | None:
        """The command that runs the kernel and the peer again; None where a row has none."""
        command, _, rest = (self.ours.repro or "").partition("--compute ")
        name, _, options = rest.partition(" ")
        return f"{command}--compute {name},{self.best.Kernel} {options}" if options else None

    def rates(self, time: str = "kernel") -> tuple[float, float]:
        """TFLOP/s of the kernel and of the peer, by one of TIMES."""
        return self.work / milliseconds(self.ours, time) / 1e9, self.work / milliseconds(self.best, time) / 1e9


@dataclass(frozen=True)
class Distribution:
    """The ratios of one pass, dtype class and kind of time (TIMES), from the least to the greatest.

    Type: FOR, BAC or BOT. tenths: the nine values that divide the ratios into tenths, interpolated. without_ours, without_peer: problems
    for which none of the run's kernels, or no peer, has a time: they have no ratio.
    """

    Type: str
    dtype: str
    time: str
    ratios: tuple[Ratio, ...]
    without_ours: int
    without_peer: int

    @property
    def values(self) -> list[float]:
        """The ratios alone."""
        return [ratio.ratio for ratio in self.ratios]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geometric_mean(self.values) or 0.0

    @property
    def tenths(self) -> list[float]:
        """The nine tenths; the fifth is the median."""
        values = self.values
        return statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9

    @property
    def below(self) -> int:
        """How many are below 1."""
        return sum(value < 1 for value in self.values)

    @property
    def worst(self) -> tuple[Ratio, ...]:
        """The least WORST."""
        return self.ratios[:WORST]

    def json(self) -> dict[str, object]:
        """As JSON documents have it."""
        return {
            "Type": self.Type,
            "dtype": self.dtype,
            "time": self.time,
            "cases": len(self.ratios),
            "geometric_mean": self.mean,
            "least": self.values[0],
            "tenths": self.tenths,
            "most": self.values[-1],
            "below_1": self.below,
            "without_ours": self.without_ours,
            "without_peer": self.without_peer,
            "worst": [{"Test": r.ours.Test, "Kernel": r.ours.Kernel, "peer": r.best.Kernel, "ratio": r.ratio} for r in self.worst],
        }


#: Heads of the columns of :func:`line_of`.
COLUMNS = ("dtype", "pass", "time", "cases", "mean", "least", *(f"{tenth}0 %" for tenth in range(1, 10)), "most", "below 1")


def line_of(distribution: Distribution) -> tuple[str, ...]:
    """A distribution as texts, one for each of COLUMNS."""
    numbers = (f"{value:.3f}" for value in (distribution.mean, distribution.values[0], *distribution.tenths, distribution.values[-1]))
    return (distribution.dtype, distribution.Type, distribution.time, f"{len(distribution.ratios)}", *numbers, f"{distribution.below}")


def missing(distributions: Iterable[Distribution]) -> str:
    """A sentence on the problems that have no ratio; empty where all have one."""
    texts = []
    for distribution in distributions:
        whose = [
            f"{count} without a time of {who}"
            for count, who in ((distribution.without_ours, "ours"), (distribution.without_peer, "a peer"))
            if count
        ]
        texts += [f"{distribution.dtype} {distribution.Type}: {', '.join(whose)}"] if whose and distribution.time == TIMES[0] else []
    return f"Problems that are not counted: {'; '.join(texts)}." if texts else ""


def milliseconds(row: Row, time: str) -> float:
    """A row's time, of TIMES, in milliseconds; 0 where it has none."""
    device = row.KernelTime_ms or 0.0
    return max(device, row.call_ms or 0.0) if device and time == "call" else device


def distributions(rows: Iterable[Row]) -> list[Distribution]:
    """The distributions of a run's rows: by dtype class, then pass, then time. Cold and burst rows are none of theirs; CPU and GPU mixed
    would be compared with each other, which a run's folder never holds."""
    groups: dict[tuple[str, str], dict[tuple[object, ...], dict[str, Row]]] = {}
    for row in rows:
        if row.timing in ("warm", None) and not row.Kernel.startswith(CEILING):
            problem = (row.Test, *(getattr(row, name) for name in SHAPE if name != "dtype"), CLASSES.get(row.dtype, row.dtype))
            cells = groups.setdefault((CLASSES.get(row.dtype, row.dtype), row.Type), {})
            cells.setdefault(problem, {})[row.Kernel] = row
    every = []
    for (dtype, type_), cells in sorted(groups.items(), key=lambda item: (item[0][0], list(TYPES.values()).index(item[0][1]))):
        for time in TIMES:
            ratios, ours, theirs = _ratios(cells.values(), time)
            if ratios:
                every.append(Distribution(type_, dtype, time, tuple(ratios), ours, theirs))
    return every


def _ratios(cells: Iterable[dict[str, Row]], time: str) -> tuple[list[Ratio], int, int]:
    """The ratios in their order, and how many problems have no time of ours, and none of a peer."""
    ratios, without_ours, without_peer = list[Ratio](), 0, 0
    for rows in cells:
        timed = sorted((row for row in rows.values() if row.KernelTime_ms), key=lambda row: milliseconds(row, time))
        best = next((row for row in timed if (peer := peers.find(row.Kernel)) and (peer.called or time != "call")), None)
        called = time == "call" and any(row.Kernel == OPERATOR for row in timed)  # as the peers are
        ours = next((row for row in timed if not peers.find(row.Kernel) and (row.Kernel == OPERATOR) == called), None)
        without_ours, without_peer = without_ours + (ours is None), without_peer + (best is None)
        if ours and best:
            ratios.append(Ratio(ours, best, milliseconds(best, time) / milliseconds(ours, time)))
    return sorted(ratios, key=lambda ratio: ratio.ratio), without_ours, without_peer
