"""Every kernel of the tree over the verify matrix, on the CPU engine: shapes, types, masks, scales and schedules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

import pytest
import sample

from harness.kernel import Device, Kernel, catalogue, find, planner
from harness.problem import DTYPE_BYTES
from harness.verbs import verify

#: Work of a piece, by `work`, or one case that has more: seconds on one core.
PIECE_WORK = 5e8
#: What a piece costs besides, mostly to compile its kernel, as such work.
BUILD_WORK = 1e8
#: An H200, as far as plans see it.
GPU = Device("cuda", "a GPU")
#: Work of a case, by `work`, up to which it is launched again on new inputs, as `fa-cli verify` does with every case.
AGAIN_WORK = 2e8
#: Cases of a kernel that `make test` runs, and some more.
LEAST = 12


@dataclass(frozen=True)
class Piece:
    """Cases of a kernel's full matrix that run the same compiled kernel, so that a test compiles once and is short."""

    kernel: Kernel
    width: int
    dtype: str
    causal: bool
    deterministic: bool
    number: int
    cases: tuple[verify.Case, ...]

    @property
    def label(self) -> str:
        """The test's id: naive_forward-D64-float32-causal-0."""
        words = [self.kernel.label, f"D{self.width}", self.dtype, *["causal"] * self.causal, *["deterministic"] * self.deterministic]
        return "-".join([*words, str(self.number)])

    @property
    def cost(self) -> float:
        """Its time, as work."""
        return BUILD_WORK + sum(work(self.kernel, case) for case in self.cases)

    @property
    def levels(self) -> set[Hashable]:
        """What a sample of the pieces must have: types, masks, forms, schedules, groups, unequal lengths, inputs, signs, shifts."""
        found: set[Hashable] = {self.dtype, ("causal", self.causal), ("deterministic", self.deterministic)}
        for case in self.cases:
            p = case.problem
            found |= {("schedule", case.schedule), ("group", p.heads_q // p.heads_kv), ("cross", p.seq_q != p.seq_kv)}
            found |= {("inputs", case.inputs), ("sign", (p.scale > 0) - (p.scale < 0)), ("shifted", p.causal_shift != p.default_shift)}
            found |= {("own head dim of V", p.has_own_dim_v)}
        return found


def work(chosen: Kernel, case: verify.Case) -> float:
    """Floating-point operations of a case in whole tiles of 64 by 64 by 64, causal or not: roughly what the CPU engine runs."""
    p = case.problem
    tiles = -(-p.seq_q // 64) * -(-p.seq_kv // 64) * -(-p.widest // 64)
    return (4 if chosen.pass_ == "forward" else 10) * p.batch * p.heads_q * tiles * 64**3


def pieces(chosen: Kernel) -> list[Piece]:
    """A kernel's full matrix on the CPU engine, every case in one piece."""
    groups: dict[tuple[int, str, bool, bool], list[list[verify.Case]]] = {}
    for case in verify.matrix(chosen, "full", "cpu"):
        p = case.problem
        width = next(w for w in chosen.head_dims if w >= p.widest)
        found = groups.setdefault((width, p.dtype, p.causal, case.deterministic), [[]])
        if sum(work(chosen, c) for c in (*found[-1], case)) > PIECE_WORK and found[-1]:
            found.append([])
        found[-1].append(case)
    return [Piece(chosen, *key, i, tuple(cases)) for key, found in sorted(groups.items()) for i, cases in enumerate(found)]


PIECES = {kernel.label: pieces(kernel) for kernel in catalogue()}


def drawn(chosen: Kernel) -> list[Piece]:
    """The pieces of a kernel that `make test` runs."""
    return sample.sample(
        chosen.label, PIECES[chosen.label], lambda piece: piece.levels, lambda piece: len(piece.cases), LEAST, lambda piece: piece.cost
    )


def of_tiles(pass_: str, width: int, causal: bool, **tiles: int) -> list[Piece]:
    """hopper in a form that it takes only for longer problems, or more heads, than those of this matrix."""
    hopper = find("hopper", pass_)
    rows = tuple(row for row in hopper.choices if tiles.keys().isdisjoint(dict(row.values)))
    found = pieces(replace(hopper, tile={**hopper.tile, **tiles}, choices=rows, variants=(), head_dims=(64, 128)))
    return [p for p in found if p.width == width and p.causal is causal and not p.deterministic]


LARGE = {
    "three consumers": of_tiles("forward", 64, False, CONSUMERS=3),
    "staged, from the last query": of_tiles("backward", 128, True),
}
LARGE_DRAWN = {name: sample.sample(name, found, lambda piece: {piece.dtype}, lambda piece: 1, 1) for name, found in LARGE.items()}


@pytest.mark.parametrize("piece", [p for k in catalogue() for p in sample.parameters(PIECES[k.label], drawn(k), lambda piece: piece.label)])
def test_the_matrix(piece: Piece) -> None:
    """No case fails, in the default and in a seeded schedule."""
    backends = verify.Backends("cpu", None, None)
    again = [0 if work(piece.kernel, case) <= AGAIN_WORK else None for case in piece.cases]
    paired = zip(piece.cases, again, strict=True)
    results = [verify.run_case(backends.of(case), piece.kernel, case, "full", repeat=n) for case, n in paired]
    failed = [f"{r.case.text()}: {r.message}\n  {r.repro}" for r in results if not r.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("piece", [p for n in LARGE for p in sample.parameters(LARGE[n], LARGE_DRAWN[n], lambda piece: piece.label)])
def test_the_forms_of_large_problems(piece: Piece) -> None:
    """The same cases."""
    test_the_matrix(piece)


@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_pieces_are_the_matrix(chosen: Kernel) -> None:
    """Each case of the full matrix is in one piece, and in one only."""
    cases = [case.number for piece in PIECES[chosen.label] for case in piece.cases]
    assert sorted(cases) == [case.number for case in verify.matrix(chosen, "full", "cpu")]


@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_every_sample_has_all_that_matters(chosen: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the seed: each type, mask, form, schedule and group, as the header promises; the same seed draws the same."""
    dtypes = {"float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes}
    wanted: set[Hashable] = {("schedule", s) for s in verify.SCHEDULES}
    wanted |= {("deterministic", form) for form in chosen.forms if len(chosen.forms) > 1}
    wanted |= dtypes | {("causal", False)} | {("causal", True) for _ in range(chosen.causal)}
    wanted |= {("group", g) for g in (verify.GROUPS if chosen.gqa else (1,))} | {("cross", True) for _ in range(chosen.cross)}
    samples = []
    for seed in map(str, range(10)):
        monkeypatch.setenv(sample.VARIABLE, seed)
        found = drawn(chosen)
        assert found == drawn(chosen)
        assert set().union(*(piece.levels for piece in found)) >= wanted
        samples.append(tuple(piece.label for piece in found))
    assert len(set(samples)) > 1, "the seed changes nothing"


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
        assert not chosen.causal or any(c.problem.causal and c.problem.seq_q > c.problem.seq_kv for c in cases)
    if chosen.gqa:
        plain = [
            c for c in cases if not c.problem.page_size and all(t.values is not None for t in c.problem.tensors)
        ]  # pages and descales have groups of their own
        groups = {(c.problem.heads_q // c.problem.heads_kv, c.problem.dtype) for c in plain}
        assert groups == set(itertools.product(verify.GROUPS, dtypes))
    if device == "cpu":
        assert {c.schedule for c in cases} == set(verify.SCHEDULES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", catalogue(), ids=lambda k: k.label)
def test_the_matrix_leaves_no_hole(chosen: Kernel, device: str) -> None:
    """Scales of 0 and below, more batches and heads, shifted masks, many keys in 16 bits, other inputs, and on a GPU 64-bit indices."""
    cases = verify.matrix(chosen, "full", device)
    problems = [c.problem for c in cases]
    dtypes = {"float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes}
    for factor in (0.0, -1.0, 0.5, 1.0):
        assert {p.dtype for p in problems if p.scale == factor * p.head_dim**-0.5} == dtypes, factor
    assert {p.batch for p in problems} >= {1, 2, 3, 5, 17} and {p.heads_kv for p in problems} >= {1, 2, 3, 17}
    assert {72, 7, 120} <= {p.head_dim for p in problems} or chosen.head_dims[-1] < 120
    for dtype in dtypes:
        assert any(p.seq_kv > 1000 for p in problems if p.dtype == dtype), dtype
    assert any(257 < p.seq_q < 500 for p in problems) and any(p.seq_q == 2049 for p in problems)
    if chosen.cross:
        assert any(p.seq_kv > 1 << 16 for p in problems)
    if chosen.takes_shift and chosen.causal:
        shifted = [p for p in problems if p.causal_shift != p.default_shift]
        assert all(p.causal for p in shifted) and {p.causal_shift % 64 for p in shifted} >= {1, 62, 63}
    wanted = {"large_v", "nan", "inf"} if chosen.pass_ == "forward" else {"large_v"}
    assert {(c.inputs, c.problem.dtype) for c in cases if c.inputs in ("nan", "inf")} == {
        (family, dtype) for family in wanted - {"large_v"} for dtype in dtypes
    }
    assert {c.problem.dtype for c in cases if c.inputs == "large_v"} == dtypes - {"float16"}
    if device == "cuda":
        whole = [c.problem.with_(batch=c.problem.batch * c.copies) for c in cases]
        assert any(p.batch * p.heads_q == 65536 for p in whole)
        assert any(min(p.tensor_bytes(n) for n in ("Q", "K")) // DTYPE_BYTES[p.dtype] > 1 << 31 for p in whole)
        for p, c in zip(whole, cases, strict=True):
            assert c.copies == 1 or planner.plan(chosen, p, GPU)  # no grid is too large
