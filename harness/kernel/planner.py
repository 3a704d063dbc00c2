"""Plans a kernel's launches for a problem on a device: what it refuses, which file runs, the names of its header, the plan."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ..fault import UsageFault, meant
from ..formula import as_border
from ..problem import DESCALES, DTYPE_BYTES, WRITES, Problem
from .catalogue import catalogue
from .expression import ExpressionError, Names, names_of
from .header import MOST_SPACES, Choice, Launch, wrong_expression
from .kernel import Kernel
from .plan import Device, LaunchPlan, Plan, Workspace
from .tensor_map import tensor_maps

#: So many kernels at most are named where one refuses what they take.
FEW = 6


def refuse(kernel: Kernel, problem: Problem) -> None:
    """Raise UsageFault where the header does not cover a problem: it is refused before launch, never computed wrongly."""
    if problem.dtype not in kernel.dtypes and not (problem.dtype == "float32" and "tf32" in kernel.dtypes):
        raise UsageFault(
            f"{kernel.label} does not take {problem.dtype}",
            f"its header promises {', '.join(kernel.dtypes)}",
            f"use --dtype {kernel.dtypes[0]}, or another kernel: fa-cli list",
        )
    if problem.widest > kernel.head_dims[-1]:
        raise UsageFault(
            f"{kernel.label} does not take head dim {problem.widest}",
            f"its widest compiled head dim is {kernel.head_dims[-1]}",
            f"use a smaller --dim{'-v' * (problem.head_dim < problem.widest)}, or another kernel: fa-cli list",
        )
    if kernel.widest_v and problem.head_dim_v > kernel.widest_v:
        raise UsageFault(
            f"{kernel.label} does not take head dim {problem.head_dim_v} of V",
            f"the widest that its header promises is {kernel.widest_v}",
            "use a smaller --dim-v, or another kernel: fa-cli list",
        )
    if problem.head_dim not in kernel.head_dims and not kernel.takes_any_width:
        raise UsageFault(
            f"{kernel.label} does not take head dim {problem.head_dim}",
            f"its args name no head_dim, so it computes with a listed width only: {', '.join(map(str, kernel.head_dims))}",
            f"use --dim {next(w for w in kernel.head_dims if w >= problem.head_dim)}, or give it the parameter head_dim",
        )
    for wanted, promise, what in (
        (problem.causal, "causal", "the causal mask (--causal)"),
        (problem.heads_kv != problem.heads_q, "gqa", "grouped heads (--kv-heads)"),
        (problem.seq_kv != problem.seq_q, "cross", "unequal lengths (--seq-kv)"),
        # one without the parameter may compute it from the lengths
        (problem.causal_shift != problem.default_shift, "takes_shift", "a causal_shift but seq_kv - seq_q"),
        (problem.has_own_dim_v, "takes_dim_v", "another head dim of V than of Q and K (--dim-v)"),
        (problem.scale != problem.head_dim**-0.5, "takes_scale", "a scale but 1/sqrt(dim), for its args name none (--scale)"),
        (problem.has_own_dtype_kv, "dtypes_kv", f"K and V in {problem.dtype_kv} beside Q in {problem.dtype} (--kv-dtype)"),
        (problem.page_size > 0, "paged", "a cache in pages (--page-size)"),
        (
            problem.mask is not None and _border(kernel, problem) is None,
            "mask",
            f"a mask but {'a window (--window)' if kernel.windows_only else 'the causal one (--mask)'}",
        ),
        (problem.score is not None, "score", "a score of one's own (--score)"),
        (problem.sinks is not None, "sinks", "sinks (--sinks)"),
    ):
        if wanted and not getattr(kernel, promise):
            raise UsageFault(f"{kernel.label} does not support {what}", "its header says so", _with(promise, kernel, problem))
    if kernel.windows_only and _border(kernel, problem) is None:
        raise UsageFault(
            f"{kernel.label} takes windows only", "its header has window and no mask", "give it --window L, or use another kernel"
        )
    if kernel.windows_only and kernel.variant_of and not _runs_instead(kernel, problem):
        why = f"it runs in the place of {kernel.variant_of} where its header says: when = {str(kernel.when)!r}"
        raise UsageFault(f"{kernel.label} does not take this problem", why, f"use {kernel.variant_of}")
    if kernel.variants:
        refuse(variant(kernel, problem), problem)


def _with(promise: str, kernel: Kernel, problem: Problem) -> str:
    """What helps where one lacks a promise of the header: kernels of its pass that have it, in the problem's dtype, if they are few."""
    able = dict.fromkeys(k.name for k in catalogue() if k.pass_ == kernel.pass_ and getattr(k, promise) and problem.dtype in k.dtypes)
    if promise == "takes_scale":
        return 'add "scale" to its args, and the parameter, in that order'
    return f"use {' or '.join(able)}: fa-cli list" if 0 < len(able) <= FEW else "use another kernel: fa-cli list"


def variant(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel of one file, in this form, that runs a problem: of this file and the variants whose `when` holds the one that costs least.

    Where one of them has no row with a cost for the problem: the first variant whose `when` holds, else this file's own.
    """
    if not kernel.variants:
        return kernel
    return compared(kernel, problem)[0][0]


@functools.lru_cache(maxsize=1024)
def compared(kernel: Kernel, problem: Problem) -> tuple[tuple[Kernel, int | None], ...]:
    """The files of a kernel that may run a problem, that which does first, and their costs in nanoseconds on an H200's multiprocessors."""
    *forms, own = (k.made_deterministic() if kernel.deterministic else k for k in kernel.variants if kernel.deterministic in k.forms)
    able = [k for k in forms if _runs_instead(k, problem)]
    able += [own] if _holds(own, problem) or not able else []
    if len(able) == 1:
        return ((able[0], None),)
    costs = [_cost(k, problem) for k in able]
    found = tuple(zip(able, costs, strict=True))
    return tuple(sorted(found, key=lambda each: each[1] or 0)) if None not in costs else found


def _cost(kernel: Kernel, problem: Problem) -> int | None:
    """What a kernel's first row with a cost says of a problem."""
    rows = _chosen(kernel, problem, Device("cpu", ""), {})[1]
    return next((row.weighed[0][1] for row in rows if row.weighed), None)


def _holds(kernel: Kernel, problem: Problem) -> bool:
    """Whether a file has a width for a problem's head dims."""
    return problem.widest <= kernel.head_dims[-1] and (kernel.head_dim_v or not problem.has_own_dim_v)


def _runs_instead(kernel: Kernel, problem: Problem) -> bool:
    if not _holds(kernel, problem):
        return False
    with _told(kernel):
        return bool(names(kernel, problem, Device("cpu", "")).number(kernel.when, "when"))


@contextmanager
def _told(kernel: Kernel, tiles: Mapping[str, int] | None = None) -> Iterator[None]:
    """A wrong expression is a fault of the header, at its line; with tile values that are given, of these."""
    try:
        yield
    except ExpressionError as error:
        fault = wrong_expression(kernel.path, error)
        if tiles:
            given = ", ".join(f"{name}={value}" for name, value in tiles.items())
            raise UsageFault(f"{kernel.name} cannot run with the tile values {given}", fault.what, "give others") from None
        raise fault from None


def names(kernel: Kernel, problem: Problem, device: Device, tiles: Mapping[str, int] | None = None) -> Names:
    """Every name of a kernel's expressions, with its value for a problem. Raises UsageFault for an unknown or taken tile name."""
    return _chosen(kernel, problem, device, tiles or {})[0]


def _chosen(kernel: Kernel, problem: Problem, device: Device, tiles: Mapping[str, int]) -> tuple[Names, tuple[Choice, ...]]:
    """The names, and the rows of choice that gave tiles their values."""
    if unknown := set(tiles) - set(kernel.tile):
        hint = f"{meant(min(unknown), kernel.tile)}--tile takes NAME=VALUE for a name of the header's [tile]"
        raise UsageFault(
            f"{kernel.label} has no tile value {', '.join(sorted(unknown))}", f"its [tile] has {', '.join(kernel.tile) or 'nothing'}", hint
        )
    border = _border(kernel, problem)
    values = {
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "HEAD_DIM": next(w for w in kernel.head_dims if w >= problem.widest),
        "HEAD_DIM_V": next(w for w in kernel.head_dims if w >= problem.head_dim_v),
        "causal": int(problem.causal or border is not None),
        "deterministic": int(kernel.deterministic),
        "sinks": int(problem.sinks is not None),
        "sizeof_dtype": DTYPE_BYTES[problem.dtype],
        "sizeof_kv": DTYPE_BYTES[problem.dtype_kv],
        "page_size": problem.page_size,
        "mask": int(problem.mask is not None and border is None),
        "window": 0 if border is None else border + 1,  # keys that a query sees
        "score": int(problem.score is not None),
        "placed": int(_score_of_place(problem)),
        "mask_of_batch": int(_mask_names(problem, "b")),
        "mask_of_head": int(_mask_names(problem, "h", "h_kv")),
        "sms": device.sms,
        "l2_bytes": device.l2_bytes,
        "shared_optin": device.shared_optin,
    }
    known = Names(values)
    with _told(kernel, tiles):
        return known, _choose(kernel, known, tiles)


def _border(kernel: Kernel, problem: Problem) -> int | None:
    """How many keys before its own a query sees, where the kernel takes the problem's mask as a second border of the causal one."""
    if not kernel.window or problem.mask is None or problem.score is not None or problem.page_size:
        return None
    left = as_border(problem.mask, problem.causal)
    return None if left is None else min(left, problem.seq_kv)  # more hides nothing, and fits no 32 bits


def _mask_names(problem: Problem, *names: str) -> bool:
    """Whether its mask is another for another value of one of these names."""
    return problem.mask is not None and not problem.formulas["mask"].names.isdisjoint(names)


def _score_of_place(problem: Problem) -> bool:
    """Whether its score is another for another batch, head, query or key."""
    return problem.score is not None and not problem.formulas["score"].names <= {"s", "seq_q", "seq_kv"}


#: A part of an expression may be negative where the whole is not: max(32, rows).
_LEAST = -(2**63)
#: Names of [let] without a value yet: the expression of each, and the names that it needs.
_Waiting = dict[str, tuple[int | str, frozenset[str]]]


def _choose(kernel: Kernel, names: Names, given: Mapping[str, int]) -> tuple[Choice, ...]:
    """Add to `names` every name of [tile], in its order, and of [let], each as soon as what it names is known. Returns the rows taken.

    A tile has its value of `given`; else of the first row that gives it and holds; else of [tile]. A row's `when` is evaluated when a
    tile's turn comes, so it may name the tiles above. A row with a cost then gives all its tiles. Raises UsageFault for a name that is
    taken, ExpressionError.
    """
    _refuse_taken(kernel, names)
    taken: dict[Choice, Choice] = {}
    waiting = {name: (value, names.needs(value, f"let {name}")) for name, value in kernel.let.items()}
    _settle(waiting, names)
    for name, value in kernel.tile.items():
        if name in given:
            names[name] = given[name]
        elif name in names:  # of a row with a cost
            pass
        elif row := next((c for c in kernel.choices if name in dict(c.values) and names.number(c.when, "when")), None):
            if row.cost is None:
                names[name] = names.number(row.several[name][0], f"choice {name}")
                taken[row] = row
            else:
                taken[row] = _cheapest(row, names, waiting, given)
        else:
            names[name] = names.number(value, f"tile {name}")
        _settle(waiting, names)
    for name, (value, _) in waiting.items():  # what is left names something unknown
        names[name] = names.number(value, f"let {name}", _LEAST)
    return tuple(taken[row] for row in kernel.choices if row in taken)


def _cheapest(row: Choice, names: Names, waiting: _Waiting, given: Mapping[str, int]) -> Choice:
    """Give a row's tiles the values that cost least, of equal ones the first; those that are given have theirs. Returns what was taken."""
    several = {name: (given[name],) if name in given else texts for name, texts in row.several.items()}
    found: dict[tuple[int, ...], int] = {}
    for texts in itertools.product(*several.values()):
        trial, left = Names(names), dict(waiting)
        for name, text in zip(several, texts, strict=True):
            trial[name] = trial.number(text, f"choice {name}")
        if (values := tuple(trial[name] for name in several)) not in found:  # expressions of a problem may give the same
            _settle(left, trial)
            found[values] = trial.number(row.cost or 0, "cost")
    ranked = sorted(found.items(), key=lambda each: each[1])
    names.update(zip(several, ranked[0][0], strict=True))
    weighed = tuple((", ".join(f"{name} = {v}" for name, v in zip(several, values, strict=True)), cost) for values, cost in ranked)
    return replace(row, values=tuple(zip(several, ranked[0][0], strict=True)), weighed=weighed)


def _settle(waiting: _Waiting, names: Names) -> None:
    """Move to `names` what waits for nothing any more."""
    left, known = len(waiting) + 1, names.keys()
    while len(waiting) < left:  # in a header's order most wait for those above only: one time round, and one more that finds nothing
        left = len(waiting)
        for name, (value, needs) in list(waiting.items()):
            if needs <= known:
                names[name] = names.number(value, f"let {name}", _LEAST)
                del waiting[name]


def _refuse_taken(kernel: Kernel, names: Names) -> None:
    """Raise UsageFault where [tile] or [let] has a name that the harness gives a value."""
    taken = {*names, "DTYPE", "DTYPE_KV", "CAUSAL", "DETERMINISTIC", *(f"WORKSPACE_{space.upper()}" for space in kernel.workspace)}
    taken |= {f"RUNTIME_{name}" for name in kernel.runtime} | {"FA_MASK", "FA_SCORE", "FA_SCORE_LOG2", "FA_SCORE_SLOPE", "FA_INTEGER"}
    taken |= {f"FA_SCORE_{name}" for name in ("SLOPE_UNSCALED", "TANH", "NEAR", "OF_PLACE", "SOFTCAP")}
    taken |= {"FA_HEAD_DIM_V", "FA_SINKS", "FA_DSINKS"}
    taken |= {"FA_PAGE_SIZE", "FA_BLOCK_TABLE", "FA_CACHE_SEQLENS", "FA_WINDOW"}
    for table, own in (("tile", kernel.tile), ("let", kernel.let)):
        if name := next((name for name in own if name in taken), None):
            what = f"{kernel.path}: {table} {name} is taken"
            raise UsageFault(what, "the harness gives that name a value", f"choose another name in [{table}]")


def for_auto(kernel: Kernel, problem: Problem, device: Device) -> bool:
    """Whether --compute auto may take a kernel for a problem that it takes."""
    with _told(kernel):
        return bool(names(kernel, problem, device).number(kernel.auto, "auto"))


def why_not_auto(kernel: Kernel, problem: Problem, device: Device) -> str:
    """The `auto` of a header with the values of its names, the file with the evidence, and what the kernel would cost, where it has a cost."""
    if kernel.auto is False:
        told = "auto = false"
    else:
        known, used = names(kernel, problem, device), names_of(kernel.auto)
        told = f'auto = "{kernel.auto}" with ' + ", ".join(f"{name} = {known[name]}" for name in known if name in used)
    cost = _cost(variant(kernel, problem), problem)
    return f"{told} ({kernel.path.name} says why)" + (f"; its cost is {cost / 1e3:.1f} us" if cost is not None else "")


def plan(kernel: Kernel, problem: Problem, device: Device, tiles: Mapping[str, int] | None = None) -> Plan:
    """Macros, launches and workspaces for a problem on a device. Raises UsageFault where it cannot be launched.

    Plans are cached: the same values give the same object.
    """
    return _kept_plan(variant(kernel, problem), problem, device, tuple(sorted((tiles or {}).items())))


@functools.lru_cache(maxsize=1024)
def _kept_plan(kernel: Kernel, problem: Problem, device: Device, tiles: tuple[tuple[str, int], ...]) -> Plan:
    """A plan depends on these values only: the kernel's header is compared, the rest of its file has no effect."""
    refuse(kernel, problem)
    known, choices = _chosen(kernel, problem, device, dict(tiles))
    with _told(kernel, dict(tiles)):
        macros: list[tuple[str, str]] = [("HEAD_DIM", str(known["HEAD_DIM"])), ("CAUSAL", str(known["causal"]))]
        macros += [("DTYPE", problem.dtype), ("DETERMINISTIC", str(known["deterministic"]))]
        macros += [("DTYPE_KV", problem.dtype_kv)] * bool(kernel.dtypes_kv)
        macros += [("HEAD_DIM_V", str(known["HEAD_DIM_V"]))] * kernel.head_dim_v + [("FA_HEAD_DIM_V", "1")] * problem.has_own_dim_v
        macros += [(name, str(known[name])) for name in kernel.tile if name not in kernel.runtime]
        macros += [(name, str(known[name])) for name in kernel.let if name.isupper()]
        macros += _cluster_macro(kernel, known, dict(macros))
        macros += [(f"WORKSPACE_{name.upper()}", str(i)) for i, name in enumerate(kernel.workspace)]
        macros += [(f"RUNTIME_{name}", str(i)) for i, name in enumerate(kernel.runtime)]
        if (border := _border(kernel, problem)) is not None:
            macros.append(("FA_WINDOW", str(border)))
        macros += _formula_macros(problem if border is None else replace(problem, mask=None), len(kernel.workspace))
        spaces = tuple(
            Workspace(name, space["dtype"], known.number(space["size"], f"workspace {name}"), space["init"])
            for name, space in kernel.workspace.items()
        )
        maps = tensor_maps(kernel, problem, known, spaces)
        launches = [_launch(kernel, launch, known) for launch in kernel.launches if known.number(launch.when, "when")]
        launches[:1] = [replace(launch, overlaps=False) for launch in launches[:1]]  # a pass begins when all before it has ended
    if not launches:
        what = f"{kernel.label} launches nothing on {problem.describe()}"
        raise UsageFault(what, "when is 0 for each launch", "correct when in its header")
    more = len(problem.writes(kernel.pass_)) - len(WRITES[kernel.pass_])  # the address of dsinks
    tensors = (*problem.tensors, *problem.paging)
    if len(spaces) + len(tensors) + more > MOST_SPACES:
        most = MOST_SPACES - len(spaces) - more - len(problem.paging)
        raise UsageFault(f"{len(problem.tensors)} tensors in mask and score", f"{kernel.label} has room for {most}", "use fewer")
    checked = tuple(launch.checked(kernel.label, problem.folder, device) for launch in launches)
    return Plan(tuple(macros), checked, spaces, maps, choices, _runtime(kernel, known), tensors)


def _formula_macros(problem: Problem, spaces: int) -> list[tuple[str, str]]:
    """What fa/score.cuh is made of: C++ without spaces. None for a plain problem, whose compiles are then those of a kernel without it.

    spaces: the workspaces, which the tensors follow.
    """
    formulas = problem.formulas
    macros = [(f"FA_{name.upper()}", formula.cpp()) for name, formula in formulas.items()]
    if score := formulas.get("score"):
        slope = score.derivative()
        macros += [("FA_SCORE_LOG2", score.folded(problem.causal).cpp()), ("FA_SCORE_SLOPE", slope.cpp())]
        macros += [("FA_SCORE_SLOPE_UNSCALED", slope.unscaled(problem.causal).cpp())]
        macros += [("FA_SCORE_TANH", "1")] * score.calls("tanh")
        macros += [("FA_SCORE_OF_PLACE", "1")] * _score_of_place(problem)
        macros += [("FA_SCORE_SOFTCAP", f"{cap!r}f")] if (cap := score.softcap_log2()) else []
        macros += [("FA_SCORE_NEAR", "1")] * problem.integers_below(2**22, "score")
    macros += [("FA_INTEGER", "int32_t")] if formulas and problem.integers_below(2**31) else []
    macros += [("FA_DSINKS", str(spaces + len(problem.tensors)))] if problem.sinks is not None else []
    if problem.page_size:
        first = spaces + len(problem.tensors)
        macros += [("FA_PAGE_SIZE", str(problem.page_size)), ("FA_BLOCK_TABLE", str(first)), ("FA_CACHE_SEQLENS", str(first + 1))]
    if problem.descaled:  # fa::descale_of counts from Q's, which a cache of 8 bits has none of
        macros += [("FA_DESCALES", str(spaces - list(DESCALES).index(problem.descaled[0])))]
    named = [(i, each) for i, each in enumerate(problem.tensors) if each.name not in DESCALES.values()]
    tables = [(each.name, f"Table<{spaces + i},{int(each.sorted)}>{{}}") for i, each in named]
    return macros + [("FA_TENSORS", "1")] * bool(tables) + [(f"FA_TENSOR_{name}", table) for name, table in tables]


def _runtime(kernel: Kernel, known: Names) -> tuple[tuple[str, int], ...]:
    """The runtime values. Raises UsageFault for one that the 32 bits of fa::Args have no room for."""
    made = tuple((name, known[name]) for name in kernel.runtime)
    if large := [name for name, value in made if value >= 2**31]:
        raise UsageFault(f"{kernel.label}: {large[0]} is {known[large[0]]}", "a runtime value is below 2^31", "use a smaller one (--tile)")
    return made


def _launch(kernel: Kernel, launch: Launch, known: Names) -> LaunchPlan:
    x, y, z = [known.number(size, "grid") for size in launch.grid] + [1] * (3 - len(launch.grid))
    cluster = _cluster(launch, known)
    block, shared = known.number(launch.block, "block"), known.number(launch.shared, "shared")
    maps = tuple(list(kernel.tensor_map).index(name) for name in launch.maps)
    overlaps, cooperative = bool(known.number(launch.overlaps, "overlaps")), bool(known.number(launch.cooperative, "cooperative"))
    return LaunchPlan(launch.entry, (x, y, z), block, shared, launch.args, maps, cluster, overlaps, cooperative)


def _cluster(launch: Launch, known: Names) -> tuple[int, int, int]:
    x, y, z = [known.number(size, "cluster") for size in launch.cluster] + [1] * (3 - len(launch.cluster))
    return x, y, z


def _cluster_macro(kernel: Kernel, names: Names, macros: Mapping[str, str]) -> list[tuple[str, str]]:
    """The macro CLUSTER, blocks of a cluster, where launches have clusters and no tile value is that already.

    One compile has one such macro: raises UsageFault where launches, or a tile value of that name, differ.
    """
    sizes = {str(math.prod(_cluster(launch, names))) for launch in kernel.launches if launch.cluster}
    known = sizes | {value for name, value in macros.items() if name == "CLUSTER" and sizes}
    if len(known) > 1:
        why = f"cluster and the tile value CLUSTER give {', '.join(sorted(known))} blocks"
        raise UsageFault(f"{kernel.label} has clusters of different sizes", why, "a file's clusters have one size, the macro CLUSTER")
    return [("CLUSTER", size) for size in sizes if "CLUSTER" not in macros]


def widths(kernel: Kernel) -> tuple[int, ...]:
    """The compiled widths, and the head dims between that are forms of their own: a name of [let] that is a macro has another value."""
    found: dict[tuple[int, ...], int] = {}
    dtype = "float32" if kernel.dtypes[0] == "tf32" else kernel.dtypes[0]
    for problem in (Problem.of(dim=dim, dtype=dtype) for dim in sorted({*range(16, kernel.head_dims[-1], 16), *kernel.head_dims})):
        try:
            file = variant(kernel, problem)
            known = names(file, problem, Device("cuda", ""))
        except (UsageFault, ExpressionError):  # it will be a row that did not pass
            return kernel.head_dims
        constants = [name for name in file.let if name.isupper()]
        if problem.head_dim in kernel.head_dims or constants:
            found[(known["HEAD_DIM"], *(known[name] for name in constants))] = problem.head_dim
    return tuple(found.values())
