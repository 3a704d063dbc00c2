"""The order of instructions in the machine code of Hopper kernels: exponentials run under a product. Needs NVRTC and nvdisasm, no GPU."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from harness.backends import nvrtc, sass
from harness.fault import EnvironmentFault
from harness.kernel import Device, find, planner
from harness.problem import Problem
from harness.verbs.compile import compile_kernels

HOPPER, BACKWARD = find("hopper", "forward"), find("hopper", "backward")
SM_90A = Device("cuda", "sm_90a", "sm_90a", shared_optin=nvrtc.SHARED_LIMIT["sm_90a"])


class Form(NamedTuple):
    """What is compiled; tile values depend on the length."""

    dtype: str
    dim: int
    causal: bool
    seq: int

    @property
    def problem(self) -> Problem:
        """The shorter ones have few tiles of queries."""
        return Problem.of(1, 1 if self.seq == 1024 else 64, self.seq, self.dim, dtype=self.dtype, causal=self.causal)

    @property
    def label(self) -> str:
        return f"{self.dtype}-D{self.dim}-{'causal' if self.causal else 'full'}-S{self.seq}"


FORMS = [Form(*each) for each in itertools.product(HOPPER.dtypes, HOPPER.head_dims, (False, True), (1024, 4096))]


@pytest.fixture(autouse=True)
def tools() -> None:
    """Skip where one is absent. The dev extra brings both, so `make test` never skips."""
    try:
        nvrtc.version(), sass.program()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))


def compiled(form: Form, **tiles: int) -> tuple[nvrtc.Compiled, sass.Loop]:
    """The kernel in a form, and its main loop."""
    found = nvrtc.compile_(
        HOPPER, planner.plan(HOPPER, form.problem, SM_90A, tiles), SM_90A.arch
    )  # raises where ptxas has serialised wgmma
    loop = sass.main_loops(sass.disassembled(found.cubin))["forward"]
    assert loop
    return found, loop


@pytest.mark.days(28)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.label)
def test_exponentials_run_under_the_product(form: Form) -> None:
    """S, O's product, the wait for S, the exponentials, the wait for O; no spills at all."""
    found, loop = compiled(form)
    assert not found.spill_bytes and not loop.local
    assert loop.hidden >= 0.9, loop.describe()
    tiles = planner.names(HOPPER, form.problem, SM_90A)
    hot = [(run.what, run.times) for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2")]
    scores, output = (f"HGMMA 64x{tiles['BLOCK_K']}x16", form.dim // 16), (f"HGMMA 64x{form.dim}x16", tiles["BLOCK_K"] // 16)
    assert hot[:3] == [scores, output, ("DEPBAR 1", 1)] and hot[-1] == ("DEPBAR 0", 1)
    assert sum(count for what, count in hot if what == "MUFU.EX2") >= tiles["BLOCK_K"] // 2, "one a score: 64 rows, 128 threads"
    assert ("HMMA 16816" in {run.what for run in loop.runs}) == (form.dtype == "bfloat16" or form.dim < 256), "the cold path"


def test_without_the_pin_the_order_is_lost() -> None:
    """The compiler moves the exponentials behind the wait for O: the check above can fail."""
    assert compiled(Form("bfloat16", 64, False, 4096), PIN=0)[1].hidden < 0.5


def test_the_verb_reads_it() -> None:
    """compile(order=True): a text for each entry, in a row that is compiled for sm_90a alone."""
    rows = compile_kernels([HOPPER], order=True)
    assert {row.arch for row in rows} == {"sm_90a"} and {row.dtype for row in rows} == set(HOPPER.dtypes)
    for row in rows:
        assert row.passed and row.order and "DEPBAR 1 · " in (row.order["forward"] or "") and "0 LDL/STL" in (row.order["forward"] or "")
        assert row.tiles["BLOCK_K"] == 64


BACKWARD_FORMS = list(itertools.product(BACKWARD.dtypes, BACKWARD.head_dims, (False, True), (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", BACKWARD_FORMS, ids=str)
def test_a_backward_pass_always_has_a_product_in_flight(form: tuple[str, int, bool, bool]) -> None:
    """Exponentials, dS and reductions each have a product behind them; no local memory in the loop. Where dQ is staged (18) a tile at a
    time, and with AHEAD below 8 a text without a mask comes first, whose other exponentials stand behind the wait for dP."""
    dtype, dim, causal, deterministic = form
    problem = Problem.of(1, 1, 1024, dim, dtype=dtype, causal=causal)
    kernel = planner.variant(BACKWARD.made_deterministic() if deterministic else BACKWARD, problem)
    found, tiles = nvrtc.compile_(kernel, planner.plan(kernel, problem, SM_90A), SM_90A.arch), planner.names(kernel, problem, SM_90A)
    loop = sass.main_loops(sass.disassembled(found.cubin))["gradients"]
    assert loop and not loop.local
    runs = [run.what for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2", "REDG")]
    order = [key for key, _ in itertools.groupby("product" if what.startswith("HGMMA") else what for what in runs)]
    if kernel.name == "hopper":
        blended = ["DEPBAR 1", "MUFU.EX2", "DEPBAR 0", "MUFU.EX2"] * (tiles["AHEAD"] < 8)
        scores = ["product", *blended, "DEPBAR 1", "MUFU.EX2", "DEPBAR 0"]  # S and dP: P, dS
        assert order == [*scores, "product", "DEPBAR 1", "product", "DEPBAR 1", "DEPBAR 0"]  # dV and dQ; dV: dK; dQ; dK
        return
    scores = ["DEPBAR 1", "MUFU.EX2", "product", "DEPBAR 1", "product", "DEPBAR 2", "product"]  # S: P; dV; dP: dS; dK and dQ; dV; next S
    late = ["REDG"] * (dim == 256 or (dim == 64 and not causal))  # half of dQ
    assert order == [*scores, "DEPBAR 1", "REDG", "product", *late]  # dK, dQ: all of dQ or half of it; the next dP


CLUSTER = find("hopper_cluster", "backward")
CLUSTER_FORMS = list(itertools.product(CLUSTER.dtypes, (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", CLUSTER_FORMS, ids=str)
def test_a_cluster_adds_dq_under_a_product(form: tuple[str, bool]) -> None:
    """A tile without a mask: half of the exponentials stand behind the wait for dP. Then one with it, whose dV is issued before that wait.
    Of a tile that is sent the reductions lie between dK's issue and its wait, in no other place; no local memory in the loop."""
    dtype, causal = form
    found = nvrtc.compile_(CLUSTER, planner.plan(CLUSTER, Problem.of(1, 1, 1024, 256, dtype=dtype, causal=causal), SM_90A), SM_90A.arch)
    loop = sass.main_loops(sass.disassembled(found.cubin))["gradients"]
    assert loop and not loop.local
    hot = [run for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2", "REDG")]
    order = [(run.what, run.times) for run in hot]
    columns, scores = "HGMMA 64x128x16", ("HGMMA 64x32x16", 16)
    blended = [("DEPBAR 1", 1), ("MUFU.EX2", 8), ("DEPBAR 0", 1), ("MUFU.EX2", 8), (columns, 4)]
    assert order[:7] == [scores, scores, *blended], "S and dP; half of P; dP's end; the other half and dS; dV"
    assert order[7:10] == [("DEPBAR 1", 1), ("MUFU.EX2", 16), (columns, 4)], "with the mask: P; dV"
    sent = [("DEPBAR 1", 1), (columns, 8), ("DEPBAR 1", 1), (columns, 4), ("DEPBAR 1", 1), ("REDG", 16), ("DEPBAR 0", 1)]
    assert order[10:17] == sent, "dS, dQ of the tile before, dV's end, dK, dQ's end and its reductions, dK's end"
    assert order[17:] == [(columns, 4), ("DEPBAR 1", 1), ("DEPBAR 0", 1)], "without a tile before"


HALVES = find("hopper_halves", "backward")
HALVES_FORMS = list(itertools.product(HALVES.dtypes, (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", HALVES_FORMS, ids=str)
def test_dq_of_a_half_is_added_under_a_product(form: tuple[str, bool]) -> None:
    """The consumer that makes P, and the one that makes dS: 80 keys are columns of all products but dQ's. No local memory in either loop."""
    dtype, causal = form
    found = nvrtc.compile_(HALVES, planner.plan(HALVES, Problem.of(1, 1, 1024, 256, dtype=dtype, causal=causal), SM_90A), SM_90A.arch)
    loop = sass.main_loops(sass.disassembled(found.cubin))["gradients"]
    assert loop and not loop.local
    hot = [run for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2", "REDG", "BAR.SYNC")]
    order = [(run.what, run.times) for run in hot]
    keys, dq, meet = ("HGMMA 64x80x16", 4), ("HGMMA 64x64x16", 5), ("BAR.SYNC", 1)
    assert order[:6] == [("HGMMA 64x80x16", 16), ("DEPBAR 0", 1), ("MUFU.EX2", 40), meet, keys, keys], "S; P; dV"
    late = [
        meet,
        dq,
        keys,
        keys,
        ("DEPBAR 3", 1),
        dq,
        ("DEPBAR 0", 1),
        ("REDG", 8),
        ("DEPBAR 0", 1),
    ]  # LATE, without the mask: all of dK first
    assert order[6:] == ([meet, dq, keys, ("DEPBAR 2", 1), dq, keys, ("DEPBAR 1", 1), ("REDG", 8), ("DEPBAR 0", 1)] if causal else late)


WIDE = find("hopper_wide", "backward")
WIDE_FORMS = list(itertools.product(WIDE.dtypes, (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", WIDE_FORMS, ids=str)
def test_a_wide_tile_always_has_a_product_in_flight(form: tuple[str, bool]) -> None:
    """Four pieces, in each P under dP and dS under dV; dQ once, and what stages it under the next S; no local memory in the loop."""
    dtype, causal = form
    found = nvrtc.compile_(WIDE, planner.plan(WIDE, Problem.of(1, 1, 1024, 64, dtype=dtype, causal=causal), SM_90A), SM_90A.arch)
    loop = sass.main_loops(sass.disassembled(found.cubin))["gradients"]
    assert loop and not loop.local
    hot = [run for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2", "BAR.SYNC", "BAR.ARV")]
    order = [(run.what, run.times) for run in hot]
    wait, product, dq = ("DEPBAR 1", 1), ("HGMMA 64x64x16", 4), ("HGMMA 64x64x16", 16)
    piece = [wait, ("MUFU.EX2", 32), product, wait, product]  # S: P; dV; dP: dS; dK
    first = [*piece[:4], ("BAR.SYNC", 1), product]  # the other consumer has read the last dS
    following = [wait, product, wait, product]  # dV: the next S; dK: the next dP
    assert order[:-7] == [*first, *following, *piece, *following, *piece, *following, *piece]
    assert order[-7:] == [("BAR.SYNC", 1), dq, wait, product, wait, ("BAR.ARV", 1), product], (
        "dQ, whose stage is given back; the next S and dP"
    )


SPLIT = find("split_hopper", "forward")
SPLIT_FORMS = list(itertools.product(SPLIT.head_dims, (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", SPLIT_FORMS, ids=str)
def test_the_softmax_of_float32_ends_before_its_turn(form: tuple[int, bool]) -> None:
    """Three products of S, the softmax, the wait for the turn, three products of P V: no exponential while the consumer has its turn."""
    dim, causal = form
    found = nvrtc.compile_(SPLIT, planner.plan(SPLIT, Problem.of(1, 1, 4096, dim, causal=causal), SM_90A), SM_90A.arch)
    loop = sass.main_loops(sass.disassembled(found.cubin))["forward"]
    assert loop and not loop.local and not found.spill_bytes
    hot = [run for run in loop.runs if not run.cold and run.what.split()[0] in ("HGMMA", "DEPBAR", "MUFU.EX2", "BAR.SYNC")]
    order = [key for key, _ in itertools.groupby("product" if run.what.startswith("HGMMA") else run.what for run in hot)]
    assert order == ["product", "DEPBAR 0", "MUFU.EX2", "BAR.SYNC", *["product", "DEPBAR 0"] * (4 if dim == 256 else 1)]
    keys = planner.names(SPLIT, Problem.of(1, 1, 4096, dim, causal=causal), SM_90A)["BLOCK_K"]
    products = sum(run.times for run in hot if run.what.startswith("HGMMA"))
    assert products == 3 * (dim // 16 + keys // 16 * (4 if dim == 256 else 1))


STEPS = ("wgmma_tma", "warp_specialized", "pingpong", "persistent", "no_maximum", "overlap")
STEP_FORMS = list(itertools.product(STEPS, (64, 128, 256), (False, True)))


@pytest.mark.days(28)
@pytest.mark.parametrize("form", STEP_FORMS, ids=str)
def test_the_steps_to_hopper_differ_by_a_barrier(form: tuple[str, int, bool]) -> None:
    """Both products, one wait, the softmax. wgmma_tma: a barrier before the copies start; warp_specialized: none; pingpong and what
    follows: the products are a turn; overlap: S first, and the softmax before the wait for O's product."""
    name, dim, causal = form
    kernel = find(name, "forward")
    found = nvrtc.compile_(kernel, planner.plan(kernel, Problem.of(1, 1, 4096, dim, dtype="bfloat16", causal=causal), SM_90A), SM_90A.arch)
    loop = sass.main_loops(sass.disassembled(found.cubin))["forward"]
    assert loop and not loop.local and not found.spill_bytes
    seen = ("HGMMA", "DEPBAR", "MUFU.EX2", "BAR.SYNC", "BAR.ARV")
    hot = [run for run in loop.runs if not run.cold and run.what.split()[0] in seen]
    keys = planner.names(kernel, Problem.of(1, 1, 4096, dim, dtype="bfloat16"), SM_90A)["BLOCK_K"]
    output, scores, softmax = (f"HGMMA 64x{dim}x16", keys // 16), (f"HGMMA 64x{keys}x16", dim // 16), ("MUFU.EX2", keys // 2)
    order = [output, scores, ("DEPBAR 0", 1), softmax]
    if name == "wgmma_tma":
        order = [*order[:3], ("BAR.SYNC", 1), softmax]
    elif name == "overlap":
        order = [("BAR.SYNC", 1), scores, output, ("BAR.ARV", 1), ("DEPBAR 1", 1), softmax, ("DEPBAR 0", 1)]
    elif name != "warp_specialized":
        order = [("BAR.SYNC", 1), output, scores, ("BAR.ARV", 1), ("DEPBAR 0", 1), softmax]
    assert [(run.what, run.times) for run in hot] == order
    assert ("HMMA 16816" in {run.what for run in loop.runs}) == (name in ("no_maximum", "overlap")), "scores computed again, a cold path"
