"""What a header chooses by the problem: its rows of choice, the values of its tiles, the launches it makes, and which a matrix has met.

A row such as `when = "seq_q > 1024"`, CONSUMERS = 3 is another kernel. One that no case reaches is not verified.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache

from ...fault import Fault
from ...kernel import Device, Kernel, planner
from ...kernel.expression import names_of
from ...problem import Problem

#: What is chosen, with its value: ("CONSUMERS", "3"), ("DTYPE", "bfloat16"), ("launches", "split dkv dq"), ("choice", "CONSUMERS if …").
Choice = tuple[str, str]
#: What a plan depends on: a problem, whether it is the deterministic form, and multiprocessors, None: those of an H200.
Planned = tuple[Problem, bool, int | None]
#: (seq_q, seq_kv) on both sides of what headers compare with, from few scores to many. Long on one side only, that a CPU runs them.
_LENGTHS = ((1, 1), (3, 31), (33, 33), (64, 126), (129, 129), (65, 1025), (1025, 64), (2048, 64), (2049, 64), (64, 4096), (64, 8192))
#: Keys before its own that a query sees: of a kernel that takes windows only all, in turn, of others the first.
WINDOWS = (70, 127, 176, 0)
_SQUARE = ((1, 1), (33, 33), (129, 129), (1025, 1025), (2049, 2049))


def counts_multiprocessors(chosen: Kernel) -> bool:
    """Whether its plan depends on how many multiprocessors there are."""
    return bool(re.search(r"\bsms\b", repr((chosen.tile_expressions, chosen.let, chosen.launches, chosen.workspace))))


def counts_groups(chosen: Kernel) -> bool:
    """Whether its rows of choice ask how many query heads read a key head."""
    names, more = set[str](), set[str]().union(*(names_of(str(row.when)) for row in chosen.choices))
    while more - names:
        names |= more
        more = set[str]().union(*(names_of(str(chosen.let[name])) for name in names if name in chosen.let))
    return {"heads_q", "heads_kv"} <= names


def known(chosen: Kernel) -> frozenset[Choice]:
    """Every choice of a header that some problem of the pool makes."""
    return frozenset().union(*(found for _, found in _pool(chosen)))


def missing(chosen: Kernel, planned: Iterable[Planned], pairs: bool) -> list[Planned]:
    """Problems, forms and multiprocessors, few and small, for which the header chooses what it chooses for none of those given.

    pairs: also each two choices together that it makes for any problem of the pool.
    """
    pool = [(key, _several(found, pairs)) for key, found in _pool(chosen)]
    met: set[object] = set()
    for each in planned:
        met |= _several(made(chosen, *each), pairs)
    wanted: set[object] = set().union(*(found for _, found in pool)) - met
    more: list[Planned] = []
    while wanted:
        key, found = max(pool, key=lambda each: len(wanted & each[1]))  # of equals the first, which is the smallest
        wanted -= found
        more.append(key)
    return more


def _several(found: Collection[Choice], pairs: bool) -> set[object]:
    return set(itertools.combinations(sorted(found), 2)) if pairs else set(found)


@lru_cache(maxsize=8192)  # the cases of every kernel's full matrix
def made(chosen: Kernel, problem: Problem, deterministic: bool, sms: int | None) -> frozenset[Choice]:
    """What a header chooses for a problem; nothing where it refuses it."""
    form = chosen.made_deterministic() if deterministic and len(chosen.forms) > 1 else chosen
    with suppress(Fault):
        plan = planner.plan(form, problem, Device("cpu", "", sms=sms or Device.sms))
        values = set(plan.values.items())
        rows = {("choice", row.name) for row in plan.choices}
        return frozenset({*values, *rows, ("launches", " ".join(launch.entry for launch in plan.launches))})
    return frozenset()


@lru_cache(maxsize=64)
def _pool(chosen: Kernel) -> list[tuple[Planned, frozenset[Choice]]]:
    """Problems of every length, width, mask, type and form, the smallest first, each with what the header chooses for it."""
    pool = sorted(_problems(chosen), key=lambda each: each[0].seq_q * each[0].seq_kv * each[0].head_dim * each[0].heads_q)
    return [(each, found) for each in pool if (found := made.__wrapped__(chosen, *each))]  # kept here


def _problems(chosen: Kernel) -> Iterator[Planned]:
    dtypes = ["float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes]
    masks, forms = [False, True] if chosen.causal else [False], chosen.forms if len(chosen.forms) > 1 else (False,)
    counts = (None, 2) if counts_multiprocessors(chosen) else (None,)
    macros = [name for name in chosen.let if name.isupper()]
    between = any(name in str(row.when) for row in chosen.choices for name in macros)
    widths = planner.widths(chosen) if between else chosen.head_dims
    heads = (1, 8) if counts_groups(chosen) else (1,)
    product = itertools.product(_LENGTHS if chosen.cross else _SQUARE, widths, masks, dtypes, forms, counts, heads)
    for (queries, keys), dim, causal, dtype, deterministic, sms, heads_q in product:
        # a query sees the keys before it: with the bottom-right alignment most of many queries would see none
        shift = 0 if causal and chosen.takes_shift and queries > keys else None
        of = (1, heads_q, queries, dim, 1, keys, dtype, causal)
        yield Problem.of(*of, causal_shift=shift, dim_v=chosen.dim_v(dim)), deterministic, sms
    alone = any(kernel.windows_only for kernel in (chosen, *chosen.variants))
    types, windows = (dtypes, WINDOWS) if alone else (dtypes[:1], WINDOWS[:1])
    windowed = itertools.product(chosen.head_dims if chosen.window else (), forms, types, (1, 8) if alone else (1,), windows)
    for dim, deterministic, dtype, heads_q, window in windowed:
        yield Problem.of(1, heads_q, 200, dim, 1, 200, dtype, mask=f"0 <= q - k <= {window}"), deterministic, None
    often, at_times = (129, None, dtypes[0], "3.0 * tanh(s / 3.0)"), (4096, 2, dtypes[-1], "24.0 * tanh(s / 14.0)")  # a tanh is large
    of_score = itertools.product(chosen.head_dims if chosen.score else (), forms, (often, at_times) if chosen.cross else (often,))
    for dim, deterministic, (keys, sms, dtype, score) in of_score:
        yield Problem.of(1, 3, 129, dim, 1, keys, dtype, score=score), deterministic, sms
