"""Every kernel of the tree over the verify matrix, on the CPU engine: shapes, types, masks, scales and schedules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import cache

import days
import pytest

from harness.kernel import Device, Kernel, catalogue, find, planner
from harness.problem import DTYPE_BYTES
from harness.verbs import verify

#: Parts of a kernel's matrix, and the days in which each part is run once.
PARTS = 90
#: Work, by `work`, of cases that share a compiled kernel, or one case that has more; what the compiling costs, as such work.
PIECE_WORK = BUILD_WORK = 4e8
#: An H200, as far as plans see it.
GPU = Device("cuda", "a GPU")
#: Work of a case, by `work`, up to which it is launched again on new inputs, as `fa-cli verify` does with every case.
AGAIN_WORK = 2e8


def work(chosen: Kernel, case: verify.Case) -> float:
    """Floating-point operations of a case in whole tiles of 64 by 64 by 64, causal or not: roughly what the CPU engine runs."""
    p = case.problem
    tiles = -(-p.seq_q // 64) * -(-p.seq_kv // 64) * -(-p.widest // 64)
    return (4 if chosen.pass_ == "forward" else 10) * p.batch * p.heads_q * tiles * 64**3


@cache
def parts(chosen: Kernel) -> list[list[verify.Case]]:
    """A kernel's full matrix on the CPU engine in parts of about equal work, of cases that mostly share a compiled kernel."""
    pieces: list[list[verify.Case]] = []
    costs: dict[int, float] = {}
    last: dict[Hashable, int] = {}
    for case in verify.matrix(chosen, "full", "cpu"):
        p, cost = case.problem, work(chosen, case)
        compiled = (next(w for w in chosen.head_dims if w >= p.widest), p.dtype, p.causal, case.deterministic)
        piece = last.get(compiled)
        if piece is None or costs[piece] + cost > BUILD_WORK + PIECE_WORK:
            piece = last[compiled] = len(pieces)
            pieces.append([])
        pieces[piece].append(case)
        costs[piece] = costs.get(piece, BUILD_WORK) + cost
    found: list[list[verify.Case]] = [[] for _ in range(PARTS)]
    for piece, part in days.dealt(costs, PARTS).items():
        found[part] += pieces[piece]
    return found


def run(chosen: Kernel, cases: list[verify.Case]) -> None:
    """No case fails, in the default and in a seeded schedule."""
    backends = verify.Backends("cpu", None, None)
    again = [0 if work(chosen, case) <= AGAIN_WORK else None for case in cases]
    paired = zip(cases, again, strict=True)
    results = [verify.run_case(backends.of(case), chosen, case, "full", repeat=n) for case, n in paired]
    failed = [f"{r.case.text()}: {r.message}\n  {r.repro}" for r in results if not r.passed]
    assert not failed, "\n".join(failed)


EVERY = [pytest.param(chosen, part, id=f"{chosen.label}-{part}") for chosen in catalogue() for part in range(PARTS)]


@pytest.mark.days(PARTS)
@pytest.mark.parametrize(("chosen", "part"), EVERY)
def test_the_matrix(chosen: Kernel, part: int) -> None:
    """Of every kernel some cases a day."""
    run(chosen, parts(chosen)[part])


#: hopper in forms that it takes only for longer problems, or more heads, than those of this matrix: the pass, head dim, mask, tile values.
LARGE = {"three consumers": ("forward", 64, False, {"CONSUMERS": 3}), "staged, from the last query": ("backward", 128, True, {})}


@pytest.mark.days(30)
@pytest.mark.parametrize(("name", "part"), [pytest.param(name, part, id=f"{name}-{part}") for name in LARGE for part in range(30)])
def test_the_forms_of_large_problems(name: str, part: int) -> None:
    """The same cases, of one head dim and mask."""
    pass_, width, causal, tiles = LARGE[name]
    hopper = find("hopper", pass_)
    rows = tuple(row for row in hopper.choices if tiles.keys().isdisjoint(dict(row.values)))
    form = replace(hopper, tile={**hopper.tile, **tiles}, choices=rows, variants=(), head_dims=(64, 128))
    of_width = [c for c in verify.matrix(form, "full", "cpu") if (64 if c.problem.widest <= 64 else 128) == width]
    run(form, [c for c in of_width if c.problem.causal is causal and not c.deterministic][part::30])


@pytest.mark.days(14)
@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_parts_are_the_matrix(chosen: Kernel) -> None:
    """Each case of the full matrix is in one part, and in one only; none is empty, and one with much work is a single case."""
    found, cases = parts(chosen), verify.matrix(chosen, "full", "cpu")
    assert sorted(case.number for part in found for case in part) == [case.number for case in cases] and all(found)
    most = 2 * (BUILD_WORK + PIECE_WORK) + sum(work(chosen, case) for case in cases) / PARTS
    assert all(len(part) == 1 or sum(work(chosen, case) for case in part) <= most for part in found)


@pytest.mark.days(14)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_matrix_is_what_it_says(chosen: Kernel, device: str) -> None:
    """All pairs of levels meet, within the limits of cases and compiles, and rows that see no key are among them."""
    cases = verify.matrix(chosen, "full", device)
    assert len(cases) <= {"cpu": 250, "cuda": 320}[device]
    assert len({(next(w for w in chosen.head_dims if w >= c.problem.head_dim), c.problem.causal, c.problem.dtype) for c in cases}) <= 24
    lengths = Counter((c.problem.seq_q, c.problem.seq_kv) for c in cases)
    assert all(lengths[s, s] for s in verify.EDGES)
    scales = [s for s in verify.SCALES[chosen.pass_] if s <= 10 or chosen.logits == float("inf")]
    dims = [d for d in verify.HEAD_DIMS if d <= chosen.head_dims[-1]]
    met = {(c.problem.head_dim, c.problem.dtype, c.input_scale) for c in cases}
    dtypes = ["float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes]  # as the files are
    for dim, dtype in itertools.product(dims, dtypes):
        assert any(m[:2] == (dim, dtype) for m in met), (dim, dtype)
    for dim, scale in itertools.product(dims, scales):
        assert any((m[0], m[2]) == (dim, scale) for m in met), (dim, scale)
    if chosen.cross:
        assert all(lengths[pair] for pair in verify.CROSS)
        masked = [c.problem for c in cases if (c.problem.mask if chosen.windows_only else c.problem.causal)]
        assert not chosen.causal or any(p.seq_q > p.seq_kv for p in masked)
    if chosen.gqa:
        plain = [
            c for c in cases if not c.problem.page_size and all(t.values is not None for t in c.problem.tensors)
        ]  # pages and descales have groups of their own
        groups = {(c.problem.heads_q // c.problem.heads_kv, c.problem.dtype) for c in plain}
        assert groups == set(itertools.product([8] if chosen.windows_only else verify.GROUPS, dtypes))
    if device == "cpu":
        assert {c.schedule for c in cases} == set(verify.SCHEDULES)


@pytest.mark.days(14)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_matrix_leaves_no_hole(chosen: Kernel, device: str) -> None:
    """Scales of 0 and below, more batches and heads, shifted masks, many keys in 16 bits, other inputs, and on a GPU 64-bit indices."""
    cases = verify.matrix(chosen, "full", device)
    problems = [c.problem for c in cases]
    dtypes = {"float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes}
    for factor in (0.0, -1.0, 0.5, 1.0):
        assert {p.dtype for p in problems if p.scale == factor * p.head_dim**-0.5} == dtypes, factor
    several = {1, 2} if chosen.windows_only else {1, 2, 3, 17}  # of eight query heads each, where windows are all it takes
    assert {p.batch for p in problems} >= {1, 2, 3, 5, 17} and {p.heads_kv for p in problems} >= several
    assert {72, 7, 120} <= {p.head_dim for p in problems} or chosen.head_dims[-1] < 120
    for dtype in dtypes:
        assert any(p.seq_kv > 1000 for p in problems if p.dtype == dtype), dtype
    assert any(257 < p.seq_q < 500 for p in problems) and any(p.seq_q == 2049 for p in problems)
    if chosen.cross:
        assert any(p.seq_kv > 1 << 16 for p in problems)
    if chosen.takes_shift and chosen.causal and not chosen.windows_only:  # a window has no shift
        shifted = [p for p in problems if p.causal_shift != p.default_shift]
        assert all(p.causal for p in shifted) and {p.causal_shift % 64 for p in shifted} >= {1, 62, 63}
    wanted = {"large_v", "nan", "inf"} if chosen.pass_ == "forward" else {"large_v"}
    assert {(c.inputs, c.problem.dtype) for c in cases if c.inputs in ("nan", "inf")} == {
        (family, dtype) for family in wanted - {"large_v"} for dtype in dtypes
    }
    assert {c.problem.dtype for c in cases if c.inputs == "large_v"} == dtypes - {"float16"}
    if device == "cuda" and not chosen.windows_only:  # its far batches are in test_strides.py
        whole = [c.problem.with_(batch=c.problem.batch * c.copies) for c in cases]
        assert any(p.batch * p.heads_q == 65536 for p in whole)
        assert any(min(p.tensor_bytes(n) for n in ("Q", "K")) // DTYPE_BYTES[p.dtype] > 1 << 31 for p in whole)
        for p, c in zip(whole, cases, strict=True):
            assert c.copies == 1 or planner.plan(chosen, p, GPU)  # no grid is too large
