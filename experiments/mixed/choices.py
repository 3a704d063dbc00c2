"""Is what `auto` and the headers choose the fastest form of the tree? Every form on problems of the sweep `mixed`, in turn.

    python experiments/mixed/choices.py --seed 11 --cases 50 --mode backward --output choices.csv

A form is a kernel file with tile values: each of those that its header gives in [tile] and in its rows of [[choice]], in every
combination that can be planned and launched on the problem. Forms are checked, then timed in turns, like the kernels of an experiment.
The table has a line a problem: what is chosen, the fastest form, and its time over that of what is chosen; 1 is the best choice there is.
A form that fails its check is said on stderr and is not timed. On the CPU times mean nothing: the problems are the sweep's small ones.
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from harness import backends  # noqa: E402
from harness.check.ahead import load_all  # noqa: E402
from harness.check.choose import choose  # noqa: E402
from harness.check.contender import Contender  # noqa: E402
from harness.check.oracle import arithmetic_of, oracle_for  # noqa: E402
from harness.check.request import Request  # noqa: E402
from harness.fault import Fault, UsageFault  # noqa: E402
from harness.kernel import Device, Kernel, Plan, catalogue, find, planner  # noqa: E402
from harness.measure.sampling import MANY, POLICY  # noqa: E402
from harness.problem import PASSES, Problem  # noqa: E402
from harness.verbs import run, sweep  # noqa: E402

COLUMNS = ("Test", "pass", "chosen", "chosen_ms", "best", "best_ms", "ratio", "forms")
#: The first kernel of the ladder that is tried on 16-bit problems: those before it are many times as slow.
FIRST = "mma_qreg_async"


def form_of(kernel: Kernel, plan: Plan) -> str:
    """A form in words: the kernel's name, and the tile values of its plan."""
    return " ".join([kernel.name, *(f"{name}={value}" for name, value in plan.values.items() if name in kernel.tile)])


def tile_values(kernel: Kernel, problem: Problem, device: Device) -> Iterator[dict[str, int]]:
    """Every combination of the values that [tile] and the rows of [[choice]] give, those that do not fit included."""
    every: list[dict[str, int]] = [{}]
    for name, usual in kernel.tile.items():
        texts = [usual, *(text for row in kernel.choices for text in row.several.get(name, ()))]
        longer = []
        for tiles in every:  # what [tile] gives may depend on the tiles above
            names = planner.names(kernel, problem, device, tiles)
            found = [names[name]]  # what is chosen comes first
            for text in texts:
                with suppress(UsageFault):
                    found.append(names.number(text, name))
            longer += [{**tiles, name: value} for value in dict.fromkeys(found)]
        every = longer
    yield from every


def forms(pass_: str, problem: Problem, device: Device) -> dict[str, Contender]:
    """The forms of the tree that take a pass of a problem on a device, by their words."""
    found: dict[str, Contender] = {}
    number = find(FIRST, "forward").number or 0
    for kernel in catalogue():
        alone = kernel.variants[-1] if kernel.variants else kernel  # its variants are kernels of the catalogue themselves
        first = problem.dtype == "float32" or (kernel.number or 0) >= number
        exact = kernel.arithmetic_for(problem.dtype) == arithmetic_of(problem)  # float32 is not rounded to tf32
        if kernel.pass_ != pass_ or not first or not exact or (device.kind == "cuda" and not kernel.runs_on(device.arch, problem.dtype)):
            continue
        with suppress(UsageFault):
            planner.refuse(alone, problem)
            for tiles in tile_values(alone, problem, device):
                with suppress(UsageFault):
                    words = form_of(alone, planner.plan(alone, problem, device, tiles))
                    found.setdefault(words, Contender(words, {pass_: alone}, tiles=tiles))
    return found


def chosen(pass_: str, problem: Problem, device: Device) -> str:
    """The form that `auto` and the headers choose."""
    (contender,), _ = choose(Request("auto", pass_, problem), device)
    kernel = planner.variant(contender.kernels[pass_], problem)
    return form_of(kernel, planner.plan(kernel, problem, device))


def line(test: str, pass_: str, problem: Problem, backend: backends.Backend) -> dict[str, object]:
    """The line of a problem and pass; ratio is empty where the chosen form, or none, has a time."""
    every, choice = forms(pass_, problem, backend.device()), chosen(pass_, problem, backend.device())
    oracle, good = oracle_for(problem, backend, pass_, 42), []
    for words, contender in every.items():
        try:
            good.append(run.check_in_memory(contender, pass_, problem, backend, 42, oracle))
        except Fault as fault:  # static_assert, registers: no form of this problem
            sys.stderr.write(f"{test} {pass_} {words}: {fault.what}\n")
    done = run.time_together(good, backend, "warm", MANY if backend.name == "cuda" else POLICY["cpu"])
    for result in done:
        if not result.passed:
            sys.stderr.write(f"{test} {pass_} {result.compute} FAILS\n")
    times = {result.compute: ms for result in done if (ms := result.time_ms[pass_])}
    best = min(times, key=lambda words: times[words], default="")
    ratio = times[best] / times[choice] if choice in times else ""
    return dict(zip(COLUMNS, (test, pass_, choice, times.get(choice, ""), best, times.get(best, ""), ratio, len(times)), strict=True))


def main(arguments: Sequence[str]) -> int:
    """Measure, write the table, and say how many choices are within 2 % of the best form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--mode", choices=[*PASSES, "both"], default="both")
    parser.add_argument("--only", default="", help="part of a test's name, as float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=Path("choices.csv"))
    given = parser.parse_args(arguments)
    backend = backends.pick(given.device)
    drawn = sweep.load("mixed", given.seed, given.cases)
    shapes = [(test, problem) for test, problem in (drawn.cpu_shapes if backend.name == "cpu" else drawn.shapes) if given.only in test]
    passes = PASSES if given.mode == "both" else (given.mode,)
    if backend.name == "cuda":
        for pass_ in passes:
            every = [(each, problem) for _, problem in shapes for each in forms(pass_, problem, backend.device()).values()]
            load_all(backend, every, (pass_,))
    ratios: list[float] = []
    with open(given.output, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for (test, problem), pass_ in itertools.product(shapes, passes):
            found = line(test, pass_, problem, backend)
            table.writerow(found)
            file.flush()
            ratios += [found["ratio"]] if isinstance(found["ratio"], float) else []
    within = sum(ratio >= 0.98 for ratio in ratios)
    worst = f"{min(ratios):.3f}" if ratios else "unknown"
    sys.stdout.write(f"{within} of {len(ratios)} choices are within 2 % of the fastest form; the worst is at {worst} of its speed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
