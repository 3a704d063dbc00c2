"""The verb: kernels over a matrix of cases, one case alone, or random ones; errors only, no times, no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ... import kernel
from ...check.choose import kernels
from ...check.request import Request, with_options
from ...fault import UsageFault
from ...files.child import Ended
from ...kernel import Kernel, planner
from .cases import Case, matrix
from .choices import known, made
from .fuzz import assigned, draw, fuzz, takes
from .judge import Backends, CaseResult, Died, compile_ahead, each_survived, repro_of, run_case
from .large import NoRoom

#: Cases of a fuzz between two notes of how far it is.
BLOCK = 50


@dataclass(frozen=True, kw_only=True)
class Verify(Request):
    """What `fa-cli verify` is asked for: of each kernel (none: of the whole tree) every pass that it has among the mode's.

    matrix: quick or full. case: only this case, by its number or its text. count: this many random cases from seed instead of the matrix.
    check, schedule_seed: as verbs.run.open_backend. repeat: further launches on the same inputs (not for random cases). progress receives
    each result; tell receives "N/M" and what is being done. note receives what was skipped and why: kernels of a range or, with
    deterministic, of the tree; cases that a kernel does not take; cases for which the device has no room.
    """

    mode: str = field(default="both", kw_only=False)
    matrix: str = "quick"
    case: str | None = None
    count: int = 0
    check: str | None = None
    schedule_seed: int | None = None
    repeat: int = 0
    progress: Callable[[CaseResult], None] = lambda result: None
    note: Callable[[str], None] = lambda text: None
    tell: Callable[[str], None] = lambda text: None


@with_options(Verify)
def verify(asked: Verify) -> list[CaseResult]:
    """Run each kernel over its matrix. One with two forms is checked in both, or with deterministic in that one.

    A backward pass reads the reference's O and logsumexp. Raises UsageFault for unknown kernels and cases, where a single kernel takes no
    case, and for random cases beside what is a matrix's.
    """
    case, note, deterministic = asked.case, asked.note, asked.deterministic
    _refuse_together(asked)
    backends = Backends(asked.device, asked.check, asked.schedule_seed)
    tree = [each for each in kernel.catalogue() if each.pass_ in asked.passes]
    every = dict.fromkeys(each.name for each in tree if not deterministic or True in each.forms)
    wanted = () if asked.mode == "both" else asked.passes
    found, left_out = kernels(replace(asked, computes=asked.specs or list(every)), wanted)
    without = [] if asked.specs else [f"{each.label} has no deterministic form" for each in tree if each.name not in every]
    for text in (*left_out, *without):
        note(text)
    if asked.count:
        return _fuzz(asked, found, backends)
    if asked.seed != Verify.seed:
        note(f"--seed {asked.seed} draws the cases of --fuzz; those of a matrix are always the same")
    given = None if case is None or case.isdecimal() else Case.parse(case)
    several = [_cases(asked, chosen, given, backends.first.name, len(found) == 1) for chosen in found]
    if case is None:
        note(_choices(found, several))
    total, results = sum(map(len, several)), list[CaseResult]()
    for chosen, cases in zip(found, several, strict=True):
        asked.tell(f"{len(results)}/{total} compiles {chosen.label}")
        compile_ahead(backends.first, [(each, chosen) for each in cases if each.copies == 1], backends.of)
        named = "" if given else asked.matrix

        def work(each: Case, chosen: Kernel = chosen, named: str = named) -> CaseResult | NoRoom:
            try:
                return run_case(backends.of(each), chosen, each, named, deterministic, repeat=asked.repeat)
            except NoRoom as fault:
                return fault

        def died(each: Case, why: Ended, chosen: Kernel = chosen, named: str = named) -> CaseResult | NoRoom:
            return Died.of(chosen, each, repro_of(backends.of(each), chosen, each, named, deterministic, asked.repeat), why)

        for result in each_survived(backends.first, cases, work, died, f"the process of {chosen.label}"):
            if isinstance(result, NoRoom) or _refused_by_its_check(result, asked.check):
                note(_left_out(result, case is not None))
                continue
            results.append(result)
            asked.progress(result)
            asked.tell(f"{len(results)}/{total} {chosen.label} {_words(result)}")
    asked.tell("")
    if case is not None and not results:
        raise _no_case(given, case, asked.matrix)
    return results


def _refuse_together(asked: Verify) -> None:
    """Raise UsageFault for random cases beside options of a matrix, which would change nothing."""
    for option, given in (("--matrix full", asked.matrix != "quick"), (f"--repeat {asked.repeat}", asked.repeat)):
        if asked.count and given:
            what = f"--fuzz {asked.count} beside {option}"
            raise UsageFault(
                what, "random cases take the matrix's place, and each is launched in its own way", f"run one with --fuzz, one with {option}"
            )


def _cases(asked: Verify, chosen: Kernel, given: Case | None, device: str, alone: bool) -> list[Case]:
    """The cases of a kernel: the one given where its header covers it or no other kernel is asked for, else those of its matrix.

    What it cannot be given is no failure of its: such cases are left out, and note receives how many and why. Raises UsageFault where
    that is all of its matrix, or the case asked for.
    """
    if given:
        return [given] if alone or takes(chosen, given) else []
    case = asked.case
    every = [each for each in matrix(chosen, asked.matrix, device) if case is None or each.number == int(case)]
    taken, refused = list[Case](), list[UsageFault]()
    for each in every:
        try:
            planner.refuse(chosen, each.problem)
            taken.append(each)
        except UsageFault as fault:
            refused.append(fault)
    if refused and not taken and alone:
        raise UsageFault(refused[0].what, refused[0].why, "leave out --case" if case else "let its header promise what it can be given")
    if refused:
        whys = "; ".join(dict.fromkeys(fault.why for fault in refused))
        asked.note(f"{chosen.label}: {len(refused)} of {len(every)} cases skipped, because it does not take them: {whys}")
    return taken


def _refused_by_its_check(result: CaseResult, check: str | None) -> bool:
    """Whether a case that is checked for races by itself has more than the check keeps: no failure of the kernel's."""
    return check is None and result.case.check is not None and result.exit_code == UsageFault.exit_code


def _left_out(result: CaseResult | NoRoom, alone: bool) -> str:
    """Why a case is not counted. Raises NoRoom where it was asked for alone."""
    if isinstance(result, NoRoom):
        if alone:
            raise result
        return f"{result.what}: {result.why}"
    return f"not checked for races: {result.message}"


def _no_case(given: Case | None, case: str, which: str) -> UsageFault:
    """That the case which was asked for is none of any kernel."""
    if given:
        return UsageFault(f"no kernel takes {given.text()}", "their headers do not cover it", "fa-cli list shows what each takes")
    return UsageFault(f"there is no case {case}", f"the {which} matrix is shorter", "fa-cli verify -v without --case lists the cases")


def _choices(found: Sequence[Kernel], several: Sequence[Sequence[Case]]) -> str:
    """How much of what the headers choose by the problem (choices.py) the cases of each kernel meet, and what they do not."""
    chosen = [(kernel, known(kernel)) for kernel in found]
    met = [frozenset().union(*(made(kernel, *each.planned) for each in cases)) for kernel, cases in zip(found, several, strict=True)]
    lost = [f"{k.label} {name}={value}" for (k, known), own in zip(chosen, met, strict=True) for name, value in sorted(known - own)]
    every, count = sum(len(each | own) for (_, each), own in zip(chosen, met, strict=True)), sum(map(len, met))
    said = "each dtype, head dim, mask, [[choice]] row, tile value and launch"
    return f"the {sum(map(len, several))} cases cover {count} of {every} alternatives in the headers ({said})" + (
        f", not {', '.join(lost)}" if lost else ""
    )


def _words(result: CaseResult) -> str:
    """A case in words, for progress."""
    return f"case {result.case.number} {result.case.text()}"


def _fuzz(asked: Verify, found: Sequence[Kernel], backends: Backends) -> list[CaseResult]:
    """The results of `count` cases drawn from a seed, or of one of them. Every BLOCK cases, and at its end, note receives the counts."""
    count, seed, case, note, tell = asked.count, asked.seed, asked.case, asked.note, asked.tell
    if case is not None and (not case.isdecimal() or int(case) >= count):
        raise UsageFault(f"there is no case {case}", f"{count} cases are drawn, from 0 on", "leave out --fuzz to run a case by its text")
    cases = [draw(seed, number) for number in (range(count) if case is None else [int(case)])]
    start = time.perf_counter()
    tell("compiles")
    pairs = assigned(found, cases)
    compiled = compile_ahead(backends.first, pairs, backends.of)
    began = time.perf_counter()
    if count > BLOCK:
        note(f"fuzz with seed {seed}: {compiled} compiled in {began - start:.1f} s")
    results: list[CaseResult] = []
    judged: set[int] = set()
    skipped = len(cases) - len({each.number for each, _ in pairs})

    def so_far(last: bool) -> str:
        seconds, failed = time.perf_counter() - began, sum(not result.passed for result in results)
        rate = f"{seconds:.1f} s, {len(judged) / seconds:.1f} cases/s"
        rest = f"after {began - start:.1f} s of compiling" if last else f"{failed} failed"
        rest += f"; {skipped} cases skipped that none of the kernels takes" if last and skipped else ""
        return f"fuzz with seed {seed}: {len(results)} runs of kernels on {len(judged)} of {len(cases)} cases in {rate}, {rest}"

    try:
        for result in fuzz(found, cases, backends, asked.deterministic, asked.progress):
            if result.case.number not in judged and judged and len(judged) % BLOCK == 0:
                note(so_far(False))
            judged.add(result.case.number)
            results.append(result)
            tell(f"{len(results)}/{len(pairs)} {result.kernel} {result.pass_} {_words(result)}")
    finally:  # also at Ctrl-C
        tell("")
        note(so_far(True))
    if not results:
        raise UsageFault("no case was judged", "none of the kernels takes any of them", "use a larger --fuzz, or another --seed")
    return results
