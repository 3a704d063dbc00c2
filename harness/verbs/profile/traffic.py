"""What can be counted without a GPU: wavefronts of shared memory and sectors of global memory, by the CPU engine (kernels_cu/host/banks.hpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...backends.host.backend import Host
from ...check.oracle import oracle_for
from ...kernel import Kernel
from ...problem import Problem
from .checked import checked
from .counters import Counters, GlobalLine, Line, Values, per_request

#: What the count leaves out.
LIMITS = (
    "counted by the CPU engine: TMA, wgmma and global atomics are not in it, neighbouring loads that nvcc merges count one by one, "
    "and a sector may come from a cache"
)


def counted(kernel: Kernel, problem: Problem, seed: int, tiles: Mapping[str, int], note: Callable[[str], None]) -> list[Counters]:
    """The counters of each entry of a kernel on a problem. Raises as :func:`checked`."""
    backend = Host(banks=True)
    found = checked(kernel, oracle_for(problem, backend, kernel.pass_, seed), backend, tiles)
    assert found.loaded is not None
    backend.traffic.clear()
    found.timed.call()
    if backend.uncounted:
        note(f"{kernel.label}: {backend.uncounted} accesses of threads between two barriers are too many, and not counted")
    rows = []
    for entry in dict.fromkeys(launch.entry for launch in found.loaded.plan.launches):
        total: dict[tuple[str, str], tuple[int, int, int]] = {}
        for each in (each for each in backend.traffic if each.entry == entry):
            before = total.get((each.kind, each.place), (0, 0, 0))
            total[each.kind, each.place] = before[0] + each.accesses, before[1] + each.parts, before[2] + each.ideal
        lines = [Line(place, parts, ideal) for (kind, place), (_, parts, ideal) in total.items() if kind == "shared"]
        others = [GlobalLine(place, kind, *sums) for (kind, place), sums in total.items() if kind != "shared"]
        actual, ideal = sum(line.wavefronts for line in lines), sum(line.ideal for line in lines)
        metrics: Values = {"shared_wavefronts": actual, "shared_wavefronts_ideal": ideal}
        metrics["shared_over_ideal"] = actual / ideal if ideal else None
        for kind in ("load", "store"):
            some = [line for line in others if line.kind == kind]
            metrics[f"global_{kind}_requests"] = sum(line.requests for line in some)
            metrics[f"global_{kind}_sectors"] = sum(line.sectors for line in some)
            metrics[f"global_{kind}_sectors_ideal"] = sum(line.ideal for line in some)
        worst = tuple(sorted(lines, key=lambda line: (line.ideal - line.wavefronts, line.place)))
        most = tuple(sorted(others, key=lambda line: (line.ideal - line.sectors, -line.sectors, line.place)))
        rows.append(Counters(kernel.name, kernel.pass_, entry, problem.describe(), per_request(metrics), worst, most))
    return rows
