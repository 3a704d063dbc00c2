"""The small cases on which --check race and --check asan must find nothing, of every kernel and form, and a job that runs them."""

from __future__ import annotations

from functools import partial

from harness.backends.host.backend import Host
from harness.backends.host.build import compiler
from harness.backends.host.report import asan_environment
from harness.files import child
from harness.kernel import Device, Kernel, Plan, catalogue, planner
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.verify.cases import DIMS_V, windowed
from harness.verbs.verify.covering import covering
from harness.verbs.verify.judge import CaseResult

#: An H200, as far as plans see it.
H200 = Device("cpu", "a CPU")


def cases(chosen: Kernel) -> list[verify.Case]:
    """Every compiled head dim, storage type, mask and form that its header promises, each pair of them in some case.

    A pipeline of two stages needs three tiles to come back to its first stage. So there are three whole tiles of keys and queries of the
    largest tile value, and the rest of one. Under the causal mask the first queries see no key, and no query sees the last keys: as many as
    :func:`unseen` says. One case more has V's own head dim, where the kernel takes one.
    """
    factors = {
        "dim": list(chosen.head_dims),
        "dtype": ["float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes],
        "causal": [False, True] if chosen.causal else [False],
        "deterministic": list(chosen.forms),
        "group": [1, 2] if chosen.gqa else [1],
        "tail": [5, 0],
    }
    found = []
    for number, row in enumerate(covering(factors, chosen.head_dims)):
        runtime = len(chosen.head_dims) == 1 and not chosen.tensor_cores  # a single wide width is then that of a run-time value
        dim = (min(row["dim"], 128) if runtime else row["dim"]) - row["tail"]
        rows = length(chosen, dim, row["dtype"])
        more = unseen(chosen, dim, row["dtype"]) if row["causal"] else 0
        keys = rows + more + (4 if chosen.cross else 0)
        shift = -more if row["causal"] and chosen.takes_shift else None
        of = (1, row["group"], rows + more, dim, 1, keys, row["dtype"], row["causal"])
        problem = Problem.of(*of, causal_shift=shift, dim_v=chosen.dim_v(dim))
        problem = windowed(problem) if chosen.windows_only else problem
        found.append(verify.Case(number, problem, 1.0, 0, row["deterministic"] and len(chosen.forms) > 1))
    pair = next((pair for pair in DIMS_V if chosen.takes_dim_v and max(pair) <= chosen.head_dims[-1]), None)
    if pair:
        dtype = "bfloat16" if "bfloat16" in chosen.dtypes else chosen.dtypes[0]
        rows = length(chosen, pair[0], dtype, pair[1])
        problem = Problem.of(1, 2, rows, pair[0], 1, rows + 4, dtype, dim_v=pair[1])
        found.append(verify.Case(len(found), problem, 1.0, 0, chosen.forms[-1] and len(chosen.forms) > 1))
    return found


def unseen(chosen: Kernel, dim: int, dtype: str) -> int:
    """Two queries more than a block has, and 130 at least."""
    blocks = {rows: [launch.grid[0] for launch in plan_of(chosen, rows, dim, dtype).launches] for rows in (1, 192, 256, 1 << 12)}
    of_queries = [number for number, one in enumerate(blocks[1]) if blocks[1 << 12][number] > one]
    return max(rows for rows in (128, 192, 256) if rows == 128 or any(blocks[rows][i] == blocks[1][i] for i in of_queries)) + 2


def length(chosen: Kernel, dim: int, dtype: str, dim_v: int | None = None) -> int:
    """Keys of a case: three of the kernel's largest tiles and 11 more, or as many tiles as its form for short sequences does not take."""
    plan = plan_of(chosen, 512, dim, dtype, dim_v)
    values, tile = dict(plan.macros), largest_tile(chosen, plan)
    rows = 3 * tile + 11
    while rows < 512 and dict(plan_of(chosen, rows, dim, dtype, dim_v).macros) != values:
        rows += tile
    return rows


def largest_tile(chosen: Kernel, plan: Plan) -> int:
    """The largest tile value of a plan, which may be a variant's."""
    names = {name for kernel in chosen.variants or (chosen,) for name in kernel.tile}
    return max(int(value) for name, value in plan.macros if name in names)


def plan_of(chosen: Kernel, rows: int, dim: int, dtype: str, dim_v: int | None = None) -> Plan:
    """The plan for so many queries and keys."""
    problem = Problem.of(1, 1, rows, dim, dtype=dtype, dim_v=dim_v or chosen.dim_v(dim))
    return planner.plan(chosen, windowed(problem) if chosen.windows_only else problem, H200)


def _judged(label: str, case: verify.Case) -> CaseResult:
    chosen = next(kernel for kernel in catalogue() if kernel.label == label)
    return verify.run_case(Host(check="asan"), chosen, case, repeat=None)


def judged_under_asan(label: str, case: verify.Case) -> CaseResult:
    """What comes of a case of a kernel under AddressSanitizer, in a child process. A finding ends it: child.Ended, and the report on stderr."""
    return child.run(partial(_judged, label, case), "the asan check", environment=asan_environment(compiler()))
