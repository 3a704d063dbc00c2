"""The time of every form of the Hopper kernels on problems of the sweep `mixed`, and the costs of a tile and a work that explain them.

    python experiments/mixed/costs.py measure --seed 101 --cases 50 --output costs.csv [--until SECONDS] [--sweep NAME] [--old FOLDER]
        [--only TEST …] [--settled]
    python experiments/mixed/costs.py fit costs.csv [--test OTHER.csv]
    python experiments/mixed/costs.py weigh costs.csv

measure needs a GPU. A form is a kernel with values of the tiles in VARIED; all forms of a problem are timed in turns, GPU time alone. They
are not checked: `fa-cli verify` does that. With --old only the chosen form is timed, and beside it the file of that name in FOLDER,
which has older versions (old_kernels.py writes them), as its own header chooses (form `old`); --settled takes the turns of `fa-cli experiment`, where a
few milliseconds leave 2 % of noise. Every problem is taken in bfloat16, so that fewer
forms are compiled. A table has a line a problem and form. fit and weigh need none: fit prints for each kernel and head dim the nanoseconds
of a tile of its walk, of a work and so on, how far from the times the model is (harness/kernel/waves.py), and how near to the fastest form
what costs least by it is: of the tables that it is fitted to, or of others with --test. weigh prints how near what the headers choose is.
"""

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from harness import backends  # noqa: E402
from harness.check.ahead import load_all  # noqa: E402
from harness.check.contender import Contender  # noqa: E402
from harness.check.tensors import Bound  # noqa: E402
from harness.dataset.storage import round_to  # noqa: E402
from harness.fault import Fault  # noqa: E402
from harness.kernel import Device, Kernel, catalogue, planner  # noqa: E402
from harness.kernel.waves import key_traffic, key_waves, query_waves, tail_waves  # noqa: E402
from harness.measure.sampling import MANY, POLICY, Policy, measure  # noqa: E402
from harness.problem import PASSES, READS, Problem  # noqa: E402
from harness.verbs import sweep  # noqa: E402

H200 = Device("cuda", "NVIDIA H200", "sm_90", l2_bytes=62914560)
SHAPE = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim")
COLUMNS = ("Test", "pass", *SHAPE, "causal", "kernel", "form", "chosen", "ms")
#: The tiles whose values make forms.
VARIED = ("CONSUMERS", "PACK", "SPLITS", "SECTION")
KERNELS = ("hopper", "hopper_atomic", "hopper_wide", "hopper_keys", "hopper_cluster", "hopper_halves")
SHORT = Policy(
    warm_up=0.005, settle=0.005, turn=0.012, min_samples=8, min_seconds=0.01, noise=0.004, uneven=0.01, max_seconds=0.1, patience=0.1
)
SETTLED = replace(POLICY["cuda"], max_seconds=1.2, patience=1.2)


class Form(NamedTuple):
    """A kernel with values of some tiles; the header chooses the others."""

    kernel: Kernel
    tiles: dict[str, int]

    @property
    def words(self) -> str:
        """As NAME=VALUE, or an empty text."""
        return " ".join(f"{name}={value}" for name, value in self.tiles.items())


def kernels(pass_: str, problem: Problem) -> Iterator[Kernel]:
    """The kernels of a pass that take a problem, each by itself."""
    for kernel in catalogue():
        alone = kernel.variants[-1] if kernel.variants else kernel
        takes = problem.head_dim <= alone.head_dims[-1] and not (alone.head_dims[0] > 128 >= problem.head_dim)
        if kernel.pass_ == pass_ and kernel.name in KERNELS and takes:
            yield alone


def forms(pass_: str, problem: Problem, device: Device) -> list[Form]:
    """The forms of a problem."""
    found = []
    for kernel in kernels(pass_, problem):
        known = planner.names(kernel, problem, device)
        varied = {name: values(name, known, kernel) for name in VARIED if name in kernel.tile}
        apart: dict[tuple[int, ...], Form] = {}  # those that mean the same are one, the first
        for some in itertools.product(*varied.values()):
            form = Form(kernel, dict(zip(varied, some, strict=True)))
            means = effect(pass_, planner.names(kernel, problem, device, form.tiles), form.tiles)
            apart.setdefault(tuple(means.values()), form)
        found += apart.values()
    return found


def values(name: str, known: Any, kernel: Kernel) -> list[int]:
    """The values of a tile that are worth a measurement, the chosen one first."""
    first = known[name]
    if name == "CONSUMERS":
        return [first, 5 - first] if known["HEAD_DIM"] == 64 and first > 1 else [first]
    if name == "SPLITS":  # not more works than headers try
        useful = [v for v in (1, 2, 3, 4, 6, 8) if v == 1 or (known["works"] * v <= 20 * known["units"] and v * 128 <= known["seq_q"] * 8)]
        return list(dict.fromkeys([first, *useful]))
    if kernel.pass_ == "forward" or name not in kernel.runtime:
        return [first]
    return list(dict.fromkeys([first, 64, 8, 1024, 32]))


def chosen(pass_: str, problem: Problem, device: Device) -> Form:
    """The form that `auto` and the headers choose, with the values of all tiles in VARIED."""
    first = next(k for k in reversed(catalogue()) if k.pass_ == pass_ and k.name in KERNELS and usable(k, problem, device))
    kernel = planner.variant(first, problem)
    known = planner.names(kernel, problem, device)
    return Form(kernel, {name: known[name] for name in VARIED if name in kernel.tile})


def of_folder(folder: Path, pass_: str, problem: Problem, device: Device) -> list[Form]:
    """What is chosen, and the version of its file that a folder has; if it has none, the last file of those with the narrowest head dim."""
    form, found = chosen(pass_, problem, device), list[Kernel]()
    for file in sorted(folder.glob(f"[0-9][0-9]_*_{pass_}.cu")):
        with suppress(Fault):
            planner.refuse(kernel := Kernel.read(file), problem)
            found.append(kernel)
    width = {kernel: min(d for d in kernel.head_dims if d >= problem.head_dim) for kernel in found}
    narrow = [kernel for kernel in found if width[kernel] == min(width.values())]
    same = [kernel for kernel in found if kernel.name == form.kernel.name]
    return [form, *(Form(planner.variant(kernel, problem), {}) for kernel in (same or narrow)[-1:])]


def usable(kernel: Kernel, problem: Problem, device: Device) -> bool:
    """Whether auto may take a kernel."""
    with suppress(Fault):
        planner.refuse(kernel, problem)
        return not kernel.variant_of and planner.for_auto(kernel, problem, device)
    return False


def problems(name: str, seed: int | None, cases: int | None, small: bool) -> list[tuple[str, Problem]]:
    """Those of a sweep of 16 bits, in bfloat16, each once."""
    drawn = sweep.load(name, seed, cases)
    found = ((t, p.with_(dtype="bfloat16")) for t, p in (drawn.cpu_shapes if small else drawn.shapes) if p.dtype != "float32")
    return list({problem: (test, problem) for test, problem in found}.values())


# -- measuring --------------------------------------------------------------------------------------------------------


def drawn(backend: backends.Backend, problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    """Standard normal tensors, drawn where the kernels run."""
    random = backend.xp.random.default_rng(0)
    return {name: round_to(backend.xp, random.standard_normal(problem.shape(name), dtype=np.float32), problem.dtype) for name in names}


def times(backend: backends.Backend, pass_: str, problem: Problem, every: Sequence[Form], policy: Policy) -> Iterator[tuple[Form, float]]:
    """The median milliseconds of each form."""
    inputs = drawn(backend, problem, ("Q", "K", "V", "dO"))
    if pass_ == "backward":
        forward = next(kernels("forward", problem))
        bound = Bound(backend, backend.load(forward, problem), problem, {name: inputs[name] for name in READS["forward"]})
        bound.launch()
        inputs |= {name: tensor.values() for name, tensor in bound.tensors.items() if name in ("O", "logsumexp")}
    bounds: dict[str, tuple[Form, Bound]] = {}
    for form in every:
        try:
            loaded = backend.load(form.kernel, problem, form.tiles)
        except Fault as fault:  # static_assert, registers, shared memory: no form of this problem
            sys.stderr.write(f"{form.kernel.name} {form.words}: {fault.what}\n")
            continue
        bound = Bound(backend, loaded, problem, {name: inputs[name] for name in READS[pass_]})
        bound.free_copies()
        bounds[f"{form.kernel.name} {form.words} {form.kernel.path}"] = form, bound
    done = measure({name: bound for name, (_, bound) in bounds.items()}, backend, "warm", policy if backend.name == "cuda" else MANY)
    for name, timing in done.items():
        yield bounds[name][0], timing.median_ms


def take(given: argparse.Namespace) -> None:
    """Measure, and write the table as it grows."""
    until, backend = time.monotonic() + given.until, backends.pick(given.device)
    wanted = problems(given.sweep, given.seed, given.cases, backend.name == "cpu")
    wanted = [each for each in wanted if not given.only or each[0] in given.only]
    passes = PASSES if given.mode == "both" else (given.mode,)
    device = backend.device()
    of = partial(of_folder, given.old) if given.old else forms
    every = {(test, pass_): of(pass_, problem, device) for test, problem in wanted for pass_ in passes}
    for pass_ in passes:
        jobs = [(Contender(f.words, {pass_: f.kernel}, tiles=f.tiles), problem) for test, problem in wanted for f in every[test, pass_]]
        load_all(backend, jobs, (pass_,))
    sys.stderr.write(f"compiled {len(jobs)} forms, {given.until - (until - time.monotonic()):.0f} s\n")
    with open(given.output, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for (test, problem), pass_ in itertools.product(wanted, passes):
            if time.monotonic() > until:
                break
            if backend.name == "cuda":
                backend.xp.get_default_memory_pool().free_all_blocks()
            taken = chosen(pass_, problem, device)
            for form, ms in times(backend, pass_, problem, every[test, pass_], SETTLED if given.settled else SHORT):
                shape = [getattr(problem, name) for name in SHAPE]
                words = "old" if given.old and form.kernel.path.parent == given.old else form.words
                row = [test, pass_, *shape, int(problem.causal), form.kernel.name, words]
                table.writerow([*row, int(form == taken), f"{ms:.6f}"])
            file.flush()


# -- what explains them -----------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a table, numbers as such."""
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    whole = (*SHAPE, "causal", "chosen")
    return [{name: float(v) if name == "ms" else int(v) if name in whole else v for name, v in line.items()} for line in lines]


def of_tables(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of several tables."""
    return [line for path in paths for line in read(path)]


def problem_of(line: dict[str, Any]) -> Problem:
    """The problem of a line."""
    heads = (line["batch"], line["heads_q"], line["seq_q"], line["head_dim"], line["heads_kv"], line["seq_kv"])
    return Problem.of(*heads, "bfloat16", bool(line["causal"]))


class Group(NamedTuple):
    """What has costs of its own: a kernel at a head dim as it is compiled; CONSUMERS of a forward pass."""

    kernel: str
    width: int
    consumers: int


#: What is fitted: nanoseconds of a tile without and with the causal mask, of a work, more of a work that is one of several splits, more of
#: a tile as key_traffic has it, of a million elements of Q, of a launch.
TERMS = ("tile", "causal", "work", "split", "crowd", "alone", "spread", "elements", "launch")
#: So many of them are nanoseconds of waves.
OF_WAVES = 7


def terms_of(line: dict[str, Any]) -> tuple[Group, Any]:
    """The group of a line, and the function of the first OF_WAVES of TERMS that gives the nanoseconds of its works."""
    problem, tiles = problem_of(line), tiles_of(line)
    kernel = next(k for k in kernels(line["pass"], problem) if k.name == line["kernel"])
    known = planner.names(kernel, problem, H200, tiles)
    group = Group(kernel.name, known["HEAD_DIM"], known.get("CONSUMERS", 0))
    splits, section = known.get("SPLITS", 1), at_once(line["pass"], known)

    def of_waves(full: int, causal: int, work: int, split: int, crowd: int, alone: int, spread: int) -> int:
        tile, whole = causal if problem.causal else full, work + split * (splits > 1)
        if line["pass"] == "forward":
            rows = known["q_rows"] * known["CONSUMERS"]
            return query_waves(known, known["sms"], rows, known["BLOCK_K"], section, tile, whole, known["PACK"])
        units, keys = known.get("units", known["sms"]), known.get("BLOCK_K", 128)  # of a cluster
        more = key_traffic(known, units, keys, section, splits, crowd, alone, spread)
        if "whole" in known and not problem.causal:
            return tail_waves(known, units, keys, known["BLOCK_Q"], splits, tile + more, work, split)
        return key_waves(known, units, keys, known["BLOCK_Q"], section, splits, tile + more, whole)

    return group, of_waves


def at_once(pass_: str, known: Mapping[str, int]) -> int:
    """The heads that a section has, of queries in a forward pass, else of keys."""
    group, heads = known["heads_q"] // known["heads_kv"], known["heads_kv"] * known["batch"]
    if pass_ == "forward":
        return max(1, (known["SECTION"] << 20) // (4 * known["HEAD_DIM"] * known["seq_kv"])) * group
    section = (known["SECTION"] << 20) // (8 * known["HEAD_DIM"] * known["seq_q"]) // min(known.get("SPLITS", 1), group)
    return max(1, min(heads, section))


def solve(lines: Sequence[tuple[Any, float, float]]) -> np.ndarray:
    """TERMS of lines: (function of those of waves, millions of elements, nanoseconds).

    The time of waves is the sum along the path that ends last: linear in the terms while that path stays the same. So it is least squares
    of relative errors, again and again, each line's weight less the farther it is off.
    """
    terms = np.array([2000.0, 2000.0, 1500.0, 500.0, 100.0, 100.0, 10.0, 2000.0, 3000.0])
    scale, step = 1000, 10000  # the functions take whole numbers
    weights = np.ones(len(lines))
    for _ in range(40):
        rows = []
        for function, elements, ns in lines:
            at = [max(1, round(scale * term)) for term in terms[:OF_WAVES]]
            base = function(*at)
            slopes = [(function(*(each + step * (i == j) for j, each in enumerate(at))) - base) / step for i in range(OF_WAVES)]
            rows.append([value / ns for value in (*slopes, elements, 1.0)])
        new = bounded(np.array(rows) * weights[:, None], weights)
        terms = 0.5 * terms + 0.5 * new
        off = np.abs(np.array(rows) @ terms - 1)
        weights = 1 / np.sqrt(np.maximum(off, 0.01))
        weights /= weights.max()
    return terms


def bounded(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares, a term that would be negative left out."""
    kept = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            terms = np.zeros(matrix.shape[1])
            terms[kept] = np.maximum(found, 0)
            return terms
        kept.pop(int(found.argmin()))


def in_groups(lines: Sequence[dict[str, Any]]) -> dict[Group, list[tuple[dict[str, Any], Any, float]]]:
    """The lines of each group, with the function of terms_of and the millions of elements of Q."""
    groups: dict[Group, list[tuple[dict[str, Any], Any, float]]] = {}
    for line in lines:
        group, function = terms_of(line)
        elements = line["batch"] * line["heads_q"] * line["seq_q"] * group.width / 1e6
        groups.setdefault(group, []).append((line, function, elements))
    return groups


def fit(lines: Sequence[dict[str, Any]], tested: Sequence[dict[str, Any]]) -> None:
    """Print the terms of each group, how far the model is from the times of those that are tested, and what choosing by it would cost."""
    fitted, groups = in_groups(lines), in_groups(tested)
    sys.stdout.write(f"{'kernel':16} width consumers  lines  {' '.join(f'{name:>8}' for name in TERMS)}   off: median  tenth  most\n")
    for group, several in sorted(groups.items()):
        if group not in fitted:
            tested = [line for line in tested if all(line is not each for each, *_ in several)]
            continue
        terms = solve([(function, elements, line["ms"] * 1e6) for line, function, elements in fitted[group]])
        for line, function, elements in several:
            line["model"] = (function(*map(round, terms[:OF_WAVES])) + terms[-2] * elements + terms[-1]) / 1e6
        off = sorted(abs(line["model"] / line["ms"] - 1) for line, *_ in several)
        numbers = " ".join(f"{term:8.0f}" for term in terms)
        far = f"{statistics.median(off):6.3f} {off[len(off) * 9 // 10]:6.3f} {off[-1]:6.3f}"
        sys.stdout.write(f"{group.kernel:16} {group.width:5} {group.consumers:9} {len(several):6}  {numbers}        {far}\n")
    ratios = []
    for (test, pass_), several in grouped(tested):
        best, taken = min(several, key=lambda line: line["ms"]), min(several, key=lambda line: line["model"])
        words = [f"{line['kernel']} {line['form']} {line['ms']:.4f} (model {line['model']:.4f})" for line in (taken, best)]
        ratios.append((best["ms"] / taken["ms"], f"{pass_} {test}: {words[0]}, the best {words[1]}"))
    told(ratios)


def grouped(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """The lines of each problem and pass."""
    for key, several in itertools.groupby(lines, key=lambda line: (line["Test"], line["pass"])):
        yield key, list(several)


def told(ratios: Sequence[tuple[float, str]]) -> None:
    """Print ratios, the lowest first, and how many are within 2 % of 1."""
    for ratio, text in sorted(ratios):
        if ratio < 0.98:
            sys.stdout.write(f"{ratio:.3f} {text}\n")
    within = sum(ratio >= 0.98 for ratio, _ in ratios)
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    sys.stdout.write(f"{within} of {len(ratios)} choices are within 2 % of the fastest form; geometric mean {mean:.4f}\n")


def weigh(lines: Sequence[dict[str, Any]]) -> None:
    """Print how near the forms that the headers choose are to the fastest of the table."""
    ratios = []
    for (test, pass_), some in grouped(lines):
        problem = problem_of(some[0])
        form = chosen(pass_, problem, H200)
        alike = [line for line in some if line["kernel"] == form.kernel.name and meant(line) == meant({**line, "form": form.words})]
        best = min(some, key=lambda line: line["ms"])
        taken = f"{form.kernel.name} {form.words}"
        if not alike:
            sys.stdout.write(f"{test} {pass_}: {taken} was not measured\n")
            continue
        ratio = best["ms"] / alike[0]["ms"]
        ratios.append((ratio, f"{pass_} {test}: {taken}, the best {best['kernel']} {best['form']}"))
    told(ratios)


def meant(line: dict[str, Any]) -> dict[str, int]:
    """The values of a line's form, heads at a time in place of SECTION: sections of all sizes have all of a few, and only under the mask."""
    kernel = next(k for k in kernels(line["pass"], problem_of(line)) if k.name == line["kernel"])
    return effect(line["pass"], planner.names(kernel, problem_of(line), H200, tiles_of(line)), tiles_of(line))


def effect(pass_: str, known: Mapping[str, int], tiles: Mapping[str, int]) -> dict[str, int]:
    """What tiles mean, with those that a line does not name: heads at a time in place of SECTION."""
    named = {name: known[name] for name in VARIED if name in known}
    return {**named, **tiles, "SECTION": at_once(pass_, known) if known["causal"] else 0}


def tiles_of(line: dict[str, Any]) -> dict[str, int]:
    """The values of a line's form; before there was PACK, a tile had the queries of one head."""
    usual = {"PACK": 1} if line["pass"] == "forward" else {}
    return usual | {name: int(value) for name, value in (each.split("=") for each in line["form"].split())}


def main(arguments: Sequence[str]) -> int:
    """Measure, fit or weigh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--sweep", default="mixed")
    measuring.add_argument("--seed", type=int)
    measuring.add_argument("--cases", type=int)
    measuring.add_argument("--mode", choices=[*PASSES, "both"], default="both")
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--until", type=float, default=1e9, help="seconds after which no problem is begun")
    measuring.add_argument("--old", type=Path, help="a folder of older versions, the only other form then")
    measuring.add_argument("--only", nargs="+", default=[], help="tests by name")
    measuring.add_argument("--settled", action="store_true")
    measuring.add_argument("--output", type=Path, default=Path("costs.csv"))
    fitting = verbs.add_parser("fit")
    fitting.add_argument("tables", type=Path, nargs="+")
    fitting.add_argument("--test", type=Path, nargs="+", help="tables that it is not fitted to")
    verbs.add_parser("weigh").add_argument("tables", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    if given.verb == "measure":
        take(given)
    elif given.verb == "fit":
        lines = of_tables(given.tables)
        fit(lines, of_tables(given.test) if given.test else lines)
    else:
        weigh(of_tables(given.tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
