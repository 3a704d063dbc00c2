"""--check race and --check asan over every kernel of the tree: they find nothing, they have watched something, and they see barriers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import clean
import pytest

from harness.backends.host.backend import Host
from harness.kernel import Kernel, catalogue, planner
from harness.problem import Problem
from harness.verbs import verify
from harness.verbs.selftest.mutant import Mutant, mutants
from harness.verbs.verify import Case, CaseResult
from harness.verbs.verify.judge import in_form

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = {kernel.label: clean.cases(kernel) for kernel in catalogue()}


def every(kernels: Iterable[Kernel]) -> list[Any]:
    """Parameters of a test: each kernel with each of its cases."""
    return [pytest.param(k, case, id=f"{k.label}-{case.number}") for k in kernels for case in CASES[k.label]]


def silent(chosen: Kernel, results: list[CaseResult]) -> None:
    """No case failed, and in each the check has watched something."""
    assert not [f"{chosen.label} {r.case.text()}: {r.message}" for r in results if not r.passed]
    assert all(result.watched for result in results), "a check that watched nothing has not found nothing"


def shared(chosen: Kernel) -> bool:
    """Whether a kernel says that it has shared memory."""
    text = chosen.path.read_text(encoding="utf-8")
    return "__shared__" in text or re.search(r"^// shared =", text, re.M) is not None


def test_the_cases_cover_what_matters() -> None:
    """Of every kernel: each width, type, mask, form and group, whole and ragged rows; several tiles and the rest of one; where blocks are
    of queries, a block that sees no key."""
    for chosen in catalogue():
        cases = CASES[chosen.label]
        p = [case.problem for case in cases]
        assert {min(w for w in chosen.head_dims if w >= each.widest) for each in p} == set(chosen.head_dims)
        assert {each.has_own_dim_v for each in p} == ({True} if chosen.widest_v else {False, chosen.takes_dim_v})
        assert {each.dtype for each in p} == {"float32" if dtype == "tf32" else dtype for dtype in chosen.dtypes}
        assert {each.causal for each in p} == {False, chosen.causal and not chosen.windows_only}
        assert {case.deterministic for case in cases} == (set(chosen.forms) if len(chosen.forms) > 1 else {False})
        assert {each.heads_q // each.heads_kv for each in p} == ({8} if chosen.windows_only else {1, 2} if chosen.gqa else {1})
        assert {each.head_dim % 8 == 0 for each in p} == {True, False}
        for case in cases:
            plan = planner.plan(in_form(chosen, case), case.problem, clean.H200)
            most = clean.unseen(chosen, case.problem.head_dim, case.problem.dtype)
            tile = clean.largest_tile(chosen, plan)
            assert case.problem.seq_kv > 3 * tile and case.problem.seq_kv % tile and case.problem.seq_q % tile
            longer = planner.plan(in_form(chosen, case), case.problem.with_(seq_q=2 * case.problem.seq_q), clean.H200)
            grids = {launch.entry: launch.grid for launch in longer.launches}  # of many queries a launch more may be worth it
            for launch in plan.launches:
                if case.problem.causal and launch.grid != grids[launch.entry]:  # blocks are of queries
                    assert -(-case.problem.seq_q // launch.grid[0]) <= most, "no block is without a key"


WITH_SHARED = [kernel for kernel in catalogue() if shared(kernel)]


@pytest.mark.days(28)
@pytest.mark.parametrize(("chosen", "case"), every(WITH_SHARED))
def test_the_race_check_is_silent(chosen: Kernel, case: Case) -> None:
    """On every form."""
    silent(chosen, [verify.run_case(Host(check="race"), chosen, case, repeat=None)])


def test_the_race_check_watches_outputs_without_shared_memory() -> None:
    """Each element that is written, at least."""
    backend = Host(check="race")
    for chosen in catalogue():
        if not shared(chosen):
            result = verify.run_case(backend, chosen, Case(0, Problem.of(1, 1, 33, 16), 1.0, 0))
            assert result.passed and result.watched and result.watched >= 33 * 16


@pytest.mark.days(60)
@pytest.mark.parametrize(("chosen", "case"), every(catalogue()))
def test_asan_is_silent(chosen: Kernel, case: Case) -> None:
    """On every form, in a process of its own: asan compiles for longest."""
    silent(chosen, [clean.judged_under_asan(chosen.label, case)])


# -- the checks can fail ----------------------------------------------------------------------------------------------

#: A barrier, or a wait for copies, in the code of a kernel file.
BARRIER = re.compile(r"^[^/\n]*?((?:__syncthreads|__syncwarp|fa::cp_async_wait_group<\d+>)\(\);)", re.M)
#: What a barrier in a cold path needs besides: its condition, and as many keys that the stages of K come round; or a short sequence; or the
#: form with asynchronous copies; or a last tile in the stage that O takes; or several works of a block, of so few keys that no tile of the
#: next work is given back before the next task is written.
COLD = {
    "fa2_forward": [Case.parse("B1_H1_S130_D128_Skv500")],
    "mma_cp_async_forward": [Case.parse("B1_H1_S128_D64_Skv150_bfloat16")],
    "no_maximum_forward": [Case.parse("B1_H1_S3_D64_Skv799_bfloat16,causal,times=10.0")],
    "overlap_forward": [Case.parse("B1_H1_S3_D64_Skv799_bfloat16,causal,times=10.0")],
    "hopper_forward": [
        Case.parse(f"B1_{text}")
        for text in (
            "H1_S3_D64_Skv799_bfloat16,causal,times=10.0",
            "H1_S3_D256_Skv1100_bfloat16,causal",
            "H2_S3_D256_Skv1100_bfloat16,sms=3",
            "H1_S300_D256_Skv1100_bfloat16,causal,sms=6",
            "H1_S130_D64_Skv900_bfloat16,mask=k % 7 != 3",
        )
    ],
    "split_forward": [Case.parse("B1_H1_S65_D64")],
    "decode_forward": [Case.parse("B1_H2_S20_D64_Hkv1_Skv1100_bfloat16,mask=q - k <= 300")],
    "wide_heads_forward": [Case.parse("B1_H3_S65_D64_Hkv1_Skv330_bfloat16,causal,sms=2")],
    "wide_heads_backward": [
        Case.parse(f"B1_{text},sms=2") for text in ("H1_S10_D64_Skv200_bfloat16,causal,shift=0", "H3_S65_D64_Hkv1_Skv230_bfloat16,causal")
    ],
    "float8_forward": [Case.parse("B1_H1_S65_D64_Skv900_float8_e4m3,times=8.0"), Case.parse("B1_H5_S65_D64_Skv100_float8_e4m3,sms=1")],
    "hopper_atomic_backward": [Case.parse("B1_H3_S130_D64_Skv300_bfloat16,sms=1")],
}
#: Cases that use a launch's shared memory to its end, where the first one of a kernel does not: all stages; a launch for the merge, or
#: for many queries.
FULL = {
    "decode_forward": [Case.parse("B1_H1_S3_D64_Skv999_bfloat16,sms=1"), Case.parse("B1_H1_S64_D256_Skv600_bfloat16")],
    "float8_forward": [Case.parse("B1_H8_S150_D64_Hkv1_Skv300_float8_e4m3")],
}
#: Bytes that a kernel declares and does not use.
BEYOND = {"wide_heads_forward": 1024, "wide_heads_backward": 2048}
#: Those whose absence is no race on shared memory, by kernel and number in its file, and why.
NO_RACE = {
    ("fa1_forward", 2): "the __syncwarp before P is read orders Q's reads, the one after Q is loaded P's",
    ("flash_2d_forward", 2): "the same",
    ("mma_qreg_async_forward", 4): "the wait before has retired all copies",
    ("wgmma_tma_forward", 2): "it orders a copy behind products: without it the engine itself stops (faults.toml)",
    ("wgmma_tma_forward", 3): "the same",
    ("hopper_forward", 5): "it orders no accesses: a lane that is late would miss a phase",
    ("hopper_forward", 6): "the same",
    ("split_hopper_forward", 1): "it orders no accesses: a lane that is late misses a phase, as the seeded schedules of the matrix show",
    ("decode_forward", 1): "warps take what is Q already for the range of keys, and the engine itself stops",
    ("hopper_cluster_backward", 1): "it orders no accesses: the lanes of a warp come together before the barrier of the cluster",
    ("wide_heads_forward", 1): "it orders no accesses: a lane that is late would miss a phase",
    ("wide_heads_forward", 2): "it orders a TMA store behind writes: without it the engine itself stops",
    ("wide_heads_forward", 3): "it orders no accesses: a lane that is late would miss a phase",
    ("wide_heads_forward", 4): "as hopper_cluster's",
    ("wide_window_forward", 0): "as wide_heads_forward's third",
    ("wide_window_forward", 1): "it orders no accesses: the lanes of a warp come together before its next products",
    ("wide_heads_backward", 4): "it orders no accesses: a lane that is late would miss a phase",
    ("wide_heads_backward", 5): "as hopper_cluster's",
    ("hopper_halves_backward", 2): "as hopper_cluster's",
    ("hopper_wide_backward", 2): "every thread gives the work's number back itself, behind its own read",
    ("float8_forward", 0): "consumers give the task back behind its V^T, which comes behind all lanes' reads of the task",
    ("float8_forward", 6): "it orders no accesses: a lane that is late misses a phase, as seeded schedules show",
    ("mma_qreg_async_forward", 5): "a barrier lies behind the last read of Q already, and a warp overwrites its own rows only",
}


@pytest.mark.days(28)
@pytest.mark.parametrize("label", COLD)
def test_the_race_check_is_silent_in_cold_paths(label: str) -> None:
    """With all its barriers a kernel has no race there either."""
    chosen = next(kernel for kernel in catalogue() if kernel.label == label)
    silent(chosen, [verify.run_case(Host(check="race", sms=case.sms), chosen, case, repeat=None) for case in COLD[label]])


def barriers() -> list[tuple[str, int]]:
    """Every barrier and wait in the kernel files, as the kernel's label and its number in the file."""
    every = [(k.label, n) for k in catalogue() for n in range(len(BARRIER.findall(k.path.read_text(encoding="utf-8"))))]
    assert NO_RACE.keys() <= set(every)
    return every


def without(label: str, number: int, folder: Path) -> Kernel:
    """A kernel without one of its barriers."""
    path = next(kernel.path for kernel in catalogue() if kernel.label == label)
    text = path.read_text(encoding="utf-8")
    start, end = list(BARRIER.finditer(text))[number].span(1)
    (folder / path.name).write_text(f"{text[:start]};{text[end:]}", encoding="utf-8")  # also behind an if
    return Kernel.read(folder / path.name)


@pytest.mark.days(60)
@pytest.mark.parametrize("barrier", barriers(), ids=lambda each: f"{each[0]}-{each[1]}")
def test_no_barrier_can_be_left_out(barrier: tuple[str, int], tmp_path: Path) -> None:
    """The race check names what any barrier or wait of any kernel orders, in one of the kernel's cases."""
    label, number = barrier
    chosen = without(label, number, tmp_path)
    cases = [*COLD.get(label, ()), *sorted(CASES[label], key=lambda case: (not case.deterministic, not case.problem.causal))]
    found: list[CaseResult] = []
    while len(found) < len(cases) and not (found and found[-1].finding):
        case = cases[len(found)]
        found.append(verify.run_case(Host(check="race", sms=case.sms), chosen, case, repeat=None))
    assert found[-1].finding != (barrier in NO_RACE), (found[-1].message, NO_RACE.get(barrier))
    if found[-1].finding:
        assert len(re.findall(r"\.cuh?:\d+", found[-1].message)) >= 2


def asan(path: Path, pass_: str, case: Case) -> tuple[int, str]:
    """Exit code of verify --check asan on one case of a kernel's file, and what it prints."""
    words = ["verify", str(path), "--mode", pass_, "--case", case.text(), "--check", "asan"]
    done = subprocess.run([sys.executable, str(ROOT / "cli.py"), *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


PLANTED = mutants("asan")
SHARED = [kernel for kernel in catalogue() if re.search(r"^// shared = ", kernel.path.read_text(encoding="utf-8"), re.M)]


@pytest.mark.days(28)
@pytest.mark.parametrize("fault", PLANTED.values(), ids=lambda fault: fault.name)
def test_a_planted_access_out_of_bounds_is_named(fault: Mutant, tmp_path: Path) -> None:
    """By asan, with the kernel's line."""
    code, told = asan(fault.plant(tmp_path).path, fault.source.pass_, Case(0, fault.problem, 1.0, 0))
    assert code == 1, told
    for words in fault.found_by["asan"]:
        assert re.search(words, told), told


@pytest.mark.days(28)
@pytest.mark.parametrize("chosen", SHARED, ids=lambda kernel: kernel.label)
def test_shared_memory_declared_too_small_is_named(chosen: Kernel, tmp_path: Path) -> None:
    """By asan, or by a word that takes an address, for every launch of every kernel: 32 bytes too few (four floats may be padding), and as
    many as it declares beyond its last barrier."""
    text = chosen.path.read_text(encoding="utf-8")
    own = next(c for c in CASES[chosen.label] if c.deterministic == (len(chosen.forms) > 1) and c.problem.head_dim in chosen.head_dims)
    for found in re.finditer(r'^// shared = "(.*)"', text, re.M):
        few = 32 + BEYOND.get(chosen.label, 0)
        (tmp_path / chosen.path.name).write_text(f"{text[: found.end(1)]} - {few}{text[found.end(1) :]}", encoding="utf-8")
        every = (asan(tmp_path / chosen.path.name, chosen.pass_, case) for case in FULL.get(chosen.label, [own]))
        code, told = next((each for each in every if each[0] != 0), (0, "nothing was found"))
        assert (code == 1 and "out of bounds: " in told) or (code == 5 and "outside shared memory" in told), told
        assert re.search(r"\.cuh?:\d+", told), told
