"""What can be counted without a GPU: the wavefronts of shared memory that the CPU engine counts (kernels_cu/host/banks.hpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...backends.host.backend import Host
from ...check.oracle import oracle_for
from ...kernel import Kernel
from ...problem import Problem
from .checked import checked
from .counters import Counters, Line, Values

#: What the count leaves out.
LIMITS = "counted by the CPU engine: TMA and wgmma are not in it, and neighbouring loads that nvcc merges count one by one"


def counted(kernel: Kernel, problem: Problem, seed: int, tiles: Mapping[str, int], note: Callable[[str], None]) -> list[Counters]:
    """The counters of each entry of a kernel on a problem. Raises as :func:`checked`."""
    backend = Host(banks=True)
    found = checked(kernel, oracle_for(problem, backend, kernel.pass_, seed), backend, tiles)
    assert found.loaded is not None
    backend.wavefronts.clear()
    found.timed.call()
    if backend.uncounted:
        note(f"{kernel.label}: {backend.uncounted} accesses of threads between two barriers are too many, and not counted")
    rows = []
    for entry in dict.fromkeys(launch.entry for launch in found.loaded.plan.launches):
        lines: dict[str, Line] = {}
        for each in (each for each in backend.wavefronts if each.entry == entry):
            before = lines.get(each.place, Line(each.place, 0, 0))
            lines[each.place] = Line(each.place, before.wavefronts + each.wavefronts, before.ideal + each.ideal)
        actual, ideal = sum(line.wavefronts for line in lines.values()), sum(line.ideal for line in lines.values())
        metrics: Values = {"shared_wavefronts": actual, "shared_wavefronts_ideal": ideal}
        metrics["shared_over_ideal"] = actual / ideal if ideal else None
        worst = tuple(sorted(lines.values(), key=lambda line: (line.ideal - line.wavefronts, line.place)))
        rows.append(Counters(kernel.name, kernel.pass_, entry, problem.describe(), metrics, worst))
    return rows
