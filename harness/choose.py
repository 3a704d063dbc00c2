"""Ranges of the ladder: "08-14" is every kernel numbered from 8 to 14 that can do what is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .fault import UsageFault
from .kernel.kernel import catalogue, find
from .problem import Problem

_RANGE = re.compile(r"(\d{1,2})-(\d{1,2})")


def expand(
    specs: Iterable[str], passes: Sequence[str], problems: Sequence[Problem] = (), deterministic: bool = False
) -> tuple[list[str], list[str]]:
    """Specs in which each range of numbers ("08-14") has become the names of its kernels, and a sentence for each that is left out.

    A range means those that can: that have the passes and take one of the problems (if any are given) in the form asked for.
    Raises UsageFault where a range has no such kernel.
    """
    found: list[str] = []
    left_out: list[str] = []
    for spec in specs:
        if not (ends := _RANGE.fullmatch(spec)):
            found.append(spec)
            continue
        within = [k.name for k in catalogue() if k.number is not None and int(ends[1]) <= k.number <= int(ends[2])]
        why = {name: _cannot(name, passes, problems, deterministic) for name in dict.fromkeys(within)}
        left_out += [f"{spec} without {name}: {reason}" for name, reason in why.items() if reason]
        able = [name for name, reason in why.items() if not reason]
        if not able:
            reason = "; ".join(dict.fromkeys(filter(None, why.values()))) or "no kernel has a number in it"
            raise UsageFault(f"no kernel of the range {spec} can do this", reason, "fa-cli list shows numbers, passes and dtypes")
        found += [name for name in able if name not in found]
    return found, left_out


def _cannot(name: str, passes: Sequence[str], problems: Sequence[Problem], deterministic: bool) -> str:
    """Why a kernel cannot do the passes of any of the problems; empty where it can."""
    try:
        kernels = [find(name, pass_, deterministic) for pass_ in passes]
    except UsageFault as fault:
        return fault.what
    reason = ""
    for problem in problems:
        try:
            for each in kernels:
                each.refuse(problem)
            return ""
        except UsageFault as fault:
            reason = fault.what
    return reason
