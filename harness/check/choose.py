"""What --compute means: names, numbers, ranges, aliases, paths, peers and `auto`, resolved once into contenders.

"08-14" is every kernel numbered from 8 to 14 that can do what is asked; "auto" is the highest step of the ladder that takes the
problem on this device and whose header leaves it to auto, and "hopper+mma_qreg_async" the forward pass of one kernel with the backward
pass of another, as auto gives where the highest steps of the passes differ. A path is as good as a name. After this no text travels: a
Contender holds the kernels themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .. import peers
from ..fault import UsageFault
from ..kernel import Device, Kernel, NoSuchPass, catalogue, find, planner
from ..problem import Problem
from .contender import Contender
from .oracle import arithmetic_of
from .request import Request

_RANGE = re.compile("([0-9]{1,2})-([0-9]{1,2})")
AUTO = "auto"


def choose(asked: Request, device: Device | None = None, problems: Sequence[Problem] = ()) -> tuple[list[Contender], list[str]]:
    """The contenders of what is asked, those of a range once, and notes: what each range leaves out, what `auto` is.

    problems: of a sweep, in place of the one asked for. A range stands for its kernels that have the passes and take one of the
    problems (if any are given) in the form asked for; a note names the others. `auto` needs a problem and a device, and never rounds
    float32 to tf32. Raises UsageFault for an unknown name and for a range of which no kernel is left, NoSuchPass for a kernel that
    lacks a pass.
    """
    problems = problems or ([asked.problem] if asked.problem else [])
    found: list[Contender] = []
    notes: list[str] = []
    for spec in asked.specs:
        if ends := _RANGE.fullmatch(spec):
            names, some = _range(asked, ends, asked.passes, problems)
        elif spec == AUTO:
            names, some = _auto(asked, problems, device)
        else:  # what is named twice is run twice: a kernel beside itself shows the noise
            found.append(contender(spec, asked))
            continue
        there = {kernel.path for each in found for kernel in each.kernels.values()}
        several = [contender(name, asked) for name in names]
        found += [each for each in several if not {kernel.path for kernel in each.kernels.values()} <= there]
        notes += some
    return named_apart(found), notes


def named_apart(found: Sequence[Contender]) -> list[Contender]:
    """The contenders, each name for the files of one kernel only: two versions of a kernel in two folders are mine and mine@folder.

    Tables, figures and resumed runs know a kernel by its name. Peers and kernels of the tree keep theirs, then the first does.
    """
    owners: dict[str, tuple[Path, ...]] = {}
    for each in sorted(found, key=lambda each: any(not kernel.in_tree for kernel in each.kernels.values())):
        owners.setdefault(each.name, _files(each))
    apart = []
    for each in found:
        number = 0
        while owners.setdefault(name := _other(each, number), _files(each)) != _files(each):
            number += 1
        apart.append(replace(each, name=name))
    return apart


def _files(each: Contender) -> tuple[Path, ...]:
    return tuple(kernel.path for kernel in each.kernels.values())


def _other(each: Contender, number: int) -> str:
    """The name of a contender where it is free, and what it is called where it is not: name@folder, name@folder-2, ..."""
    folder = f"@{_files(each)[0].parent.name}" if number else ""
    return each.name + folder + (f"-{number}" if number > 1 else "")


def contender(spec: str, asked: Request) -> Contender:
    """The contender of one name, number, alias or path. Raises UsageFault and NoSuchPass as :func:`choose` does."""
    if peer := peers.find(spec):
        return Contender(peer.name, peer=peer.made_deterministic() if asked.deterministic else peer, deterministic=asked.deterministic)
    kernels = {pass_: find(spec, pass_, asked.deterministic) for pass_ in asked.passes}
    name = "+".join(dict.fromkeys(kernel.name for kernel in kernels.values()))
    return Contender(name, kernels, tiles=dict(asked.tiles or {}), deterministic=asked.deterministic)


def forward_for(backward: Kernel, problem: Problem) -> Kernel | None:
    """The kernel whose O a backward pass reads where nobody names one: that of its name, else the highest step of its arithmetic.

    Steps with a backward pass of their own come first: one without is made for problems that nobody trains on. Of these, those that are
    not made for heads twice as wide. It takes the problem; None where there is none.
    """
    arithmetic, name = arithmetic_of(problem, backward), backward.variant_of or backward.name
    able = [k for k in catalogue() if k.pass_ == "forward" and k.number is not None and arithmetic_of(problem, k) == arithmetic]
    able = [k for k in able if not _cannot(k.name, ("forward",), (problem,), False)]
    trained = {k.name for k in catalogue() if k.pass_ == "backward"}
    able.sort(key=lambda k: (k.name in trained, k.head_dims[0] < 2 * max(128, problem.widest)))  # stable: by number within each
    return next((k for k in able if k.name == name), able[-1] if able else None)


def kernels(asked: Request, wanted: Sequence[str] = ()) -> tuple[list[Kernel], list[str]]:
    """The kernels of what is asked, peers not among them, in each of the passes that there is; and notes as :func:`choose`.

    wanted: passes that a kernel of a range must have. Raises UsageFault for an unknown name and for `auto`, NoSuchPass where a kernel
    has none of the passes.
    """
    found: list[Kernel] = []
    notes: list[str] = []
    for spec in asked.specs:
        if ends := _RANGE.fullmatch(spec):
            some, left_out = _range(asked, ends, wanted, ())
            notes += left_out
        elif spec == AUTO:
            some, _ = _auto(asked, (), None)  # raises: no problem is known here
        else:
            some = [spec]
        for name in some:
            there, missing = [], []
            for pass_ in asked.passes:
                try:
                    there.append(find(name, pass_, asked.deterministic))
                except NoSuchPass as fault:
                    missing.append(fault)
            if not there:
                raise missing[0]
            found += there
    return found, notes


def kernels_for(asked: Request, note: Callable[[str], None]) -> list[Kernel]:
    """The kernels of what is asked, for its passes on its problem. Raises UsageFault for a peer, and as :func:`choose`."""
    found, notes = choose(asked)
    for text in notes:
        note(text)
    if peer := next((each for each in found if each.peer), None):
        raise UsageFault(f"{peer.name} is not a kernel of this project", "it is a library's attention", "name a kernel: fa-cli list")
    return [kernel for each in found for kernel in each.kernels.values()]


def _range(asked: Request, ends: re.Match[str], passes: Sequence[str], problems: Sequence[Problem]) -> tuple[list[str], list[str]]:
    """The names of a range's kernels that can, and a note for each that cannot."""
    spec, first, last = ends[0], int(ends[1]), int(ends[2])
    # a variant runs under the name of its kernel
    within = dict.fromkeys(k.name for k in catalogue() if k.number is not None and first <= k.number <= last and not k.variant_of)
    own = {name: [kernel.pass_ for kernel in catalogue() if kernel.name == name] for name in within}
    why = {name: _cannot(name, passes or own[name], problems, asked.deterministic) for name in within}
    able = [name for name, reason in why.items() if not reason]
    if not able:
        reason = "; ".join(dict.fromkeys(filter(None, why.values()))) or "no kernel has a number in it"
        raise UsageFault(f"no kernel of the range {spec} can do this", reason, "fa-cli list shows numbers, passes and dtypes")
    return able, [f"{spec} without {name}: {reason}" for name, reason in why.items() if reason]


def _auto(asked: Request, problems: Sequence[Problem], device: Device | None) -> tuple[list[str], list[str]]:
    """The highest steps that take a problem on the device, for each of the problems: one for all passes, or one for each."""
    if device is None or not problems:
        raise UsageFault("auto needs a problem and a device", "the highest step depends on both", "name a kernel: fa-cli list")
    found: dict[str, str] = {}
    for problem in problems:
        steps = _highest(asked, problem, device)
        if not steps:
            why = f"each of them refuses {problem.describe()} {' and '.join(asked.passes)}"
            raise UsageFault(f"no kernel of the ladder takes this on {device.name}", why, "fa-cli list shows what each takes")
        of = {kernel.name: f"{kernel.number:02} {kernel.name}" for kernel in steps}
        if len(of) > 1:
            what = " and ".join(f"{of[kernel.name]} {kernel.pass_}" for kernel in steps) + ", the highest steps it may take for"
        else:
            what = f"{of[steps[0].name]}, the highest step it may take for"
        found.setdefault("+".join(of), f"auto is {what} {problem.describe()} on {device.name}")
    return list(found), list(found.values())


def _highest(asked: Request, problem: Problem, device: Device) -> list[Kernel]:
    """For each pass the highest step that takes the problem; the backward pass in the arithmetic of the forward pass, whose O it reads.

    Empty where there is none.
    """

    def able(pass_: str) -> Iterator[Kernel]:
        ladder = sorted((k for k in catalogue() if k.pass_ == pass_ and k.number is not None), key=lambda k: -(k.number or 0))
        return (
            k
            for k in ladder
            if not _cannot(k.name, (pass_,), (problem,), asked.deterministic, device) and planner.for_auto(k, problem, device)
        )

    for first in able(asked.passes[0]):
        wanted = first.arithmetic_for(problem.dtype)
        others = [next((k for k in able(pass_) if k.arithmetic_for(problem.dtype) == wanted), None) for pass_ in asked.passes[1:]]
        if None not in others:
            return [first, *filter(None, others)]
    return []


def passed_over(chosen: Kernel, problem: Problem, device: Device, deterministic: bool) -> dict[str, str]:
    """The steps above a kernel in its pass, the highest first, and why auto does not take each. A variant counts as its kernel."""
    number = find(chosen.variant_of or chosen.name, chosen.pass_).number or 0
    above = [k for k in catalogue() if k.pass_ == chosen.pass_ and (k.number or 0) > number and not k.variant_of]
    why = {}
    for each in sorted(above, key=lambda k: -(k.number or 0)):
        reason = _cannot(each.name, (each.pass_,), (problem,), deterministic, device)
        if not reason and not planner.for_auto(own := find(each.name, each.pass_, deterministic), problem, device):
            reason = f"it can compute this, but auto prefers a lower step: {planner.why_not_auto(own, problem, device)}"
        why[each.name] = reason or "the forward and the backward pass of a call are of one arithmetic"
    return why


def files_weighed(kernel: Kernel, problem: Problem) -> str:
    """The files that may run a problem in the place of a kernel, or of the one whose file it is, by their costs; empty where only one may."""
    if kernel.in_tree and not kernel.variants:
        kernel = find(kernel.variant_of or kernel.name, kernel.pass_, kernel.deterministic and True in kernel.forms)
    costs = [(each, cost) for each, cost in planner.compared(kernel, problem) if cost is not None] if kernel.variants else []
    return ", ".join(f"{each.path.name} {cost / 1e3:.1f} us" for each, cost in costs)


def _cannot(
    name: str,
    passes: Sequence[str],
    problems: Sequence[Problem],
    deterministic: bool,
    device: Device | None = None,
) -> str:
    """Why a kernel cannot do the passes of any of the problems; empty where it can. With a device, for auto: on it, and not in tf32."""
    try:
        kernels = [find(name, pass_, deterministic) for pass_ in passes]
    except UsageFault as fault:
        return fault.what
    reason = ""
    for problem in problems:
        try:
            for each in kernels:
                planner.refuse(each, problem)
                if device is not None:
                    if each.arithmetic_for(problem.dtype) == "tf32":
                        raise UsageFault(f"{each.label} rounds {problem.dtype} to tf32")
                    if device.kind == "cuda" and not each.runs_on(device.arch, problem.dtype):
                        raise UsageFault(f"{each.label} does not run on {device.arch}")
                    planner.plan(each, problem, device)
            return ""
        except UsageFault as fault:
            reason = fault.what
    return reason
