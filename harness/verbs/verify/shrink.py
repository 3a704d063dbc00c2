"""A failing case made smaller: the same failure on a smaller shape, with simpler inputs and fewer options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .cases import Case
from .judge import CaseResult, Lost

#: Attempts after which the smallest case so far is good enough: a number, so that every machine finds the same case. The seconds are for
#: kernels that compile for minutes, and the message says where they ended it.
ATTEMPTS, SECONDS = 120, 120.0


def shrink(failed: CaseResult, run: Callable[[Case], CaseResult]) -> CaseResult:
    """The result of the smallest case found that fails like `failed`; its message names the case that it comes from.

    run judges a case. Simplifications are tried in turn, and from the start again after each that keeps the failure.
    """
    until, attempts, best, cut = time.monotonic() + SECONDS, 0, failed, ""
    tried = {failed.case}
    found = True
    while found:
        found = False
        for case in simpler(best.case):
            if case in tried:
                continue
            if attempts >= ATTEMPTS:
                break
            if time.monotonic() > until:
                cut = f" in {SECONDS:.0f} s, not to the end"
                break
            tried.add(case)
            attempts += 1
            result = run(case)
            if result.same_failure(failed) and not isinstance(result, Lost):
                best, found = result, True
                break
    if best is failed:
        return failed
    return replace(best, message=f"{best.message} (shrunk from {failed.case.text()}{cut})")


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are each simpler in one way, the largest steps first."""
    p = case.problem
    group = p.heads_q // p.heads_kv
    for change in (
        {"schedule": 0},
        {"deterministic": False},
        {"inputs": "randn"},
        {"input_scale": 1.0},
        {"seed": 42},
        {"sms": None},
        {"check": None},
    ):
        yield replace(case, **change)
    for heads, heads_kv in ((1, 1), (group, 1), (p.heads_kv, p.heads_kv)):
        if heads < p.heads_q:
            yield _with(case, heads_q=heads, heads_kv=heads_kv)
    if p.has_own_dim_v:
        yield _with(case, head_dim_v=None)
    if p.has_own_dtype_kv:
        yield _with(case, dtype_kv=None)
    if p.page_size:
        yield _with(case, page_size=None)
    if p.keys_text:
        yield _with(case, seq_kv=p.seq_kv)
    for name in ("batch", "seq_q", "seq_kv", "head_dim", *["head_dim_v"] * p.has_own_dim_v):
        size = getattr(p, name)
        both = {"seq_kv": size} if name == "seq_q" and p.seq_kv == p.seq_q else {}
        for less in dict.fromkeys((1, size // 2, size * 3 // 4, size - 1)):
            if 1 <= less < size:
                yield _with(case, **{name: less}, **dict.fromkeys(both, less))
    default = p.head_dim**-0.5
    if p.scale != default:
        yield _with(case, scale=default)
    for name in p.formulas:
        yield _with(case, **{name: None})
    if p.causal:
        yield _with(case, causal=False, causal_shift=None)
        if p.causal_shift != p.default_shift:
            yield _with(case, causal_shift=None)


def _with(case: Case, **changes: object) -> Case:
    """The case with a problem that is changed: a default scale follows head_dim."""
    p = case.problem
    if "head_dim" in changes and p.scale == p.head_dim**-0.5:
        changes["scale"] = float(str(changes["head_dim"])) ** -0.5
    return replace(case, problem=p.with_(**changes))
