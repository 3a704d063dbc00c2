"""Faults planted in the tree's kernels, one edit each, and the check that must catch it, by name.

An edit that no longer finds its line fails here, so a mutant cannot quietly become the kernel it was made from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import planted
import pytest

from harness import kernel
from harness.backends import Backend
from harness.backends.host import Host
from harness.backends.host_report import CheckFault
from harness.contender import PassResult, run_kernel, yardstick_for
from harness.kernel import INCLUDE, KERNELS, Kernel
from harness.problem import READS, KernelFault, Problem

NAIVE_BACKWARD, FORWARD = "00_naive_backward.cu", "05_fa2_naive_forward.cu"


def mutant(folder: Path, source: str, *edits: tuple[str, str]) -> Kernel:
    """A tree kernel, with the words of <fa/row.cuh> in its own text, and each edit made once."""
    text = (KERNELS / source).read_text()
    words = (INCLUDE / "fa" / "row.cuh").read_text().replace("#pragma once\n", "")
    text = text.replace("#include <fa/row.cuh>\n", words)
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {source}"
        text = text.replace(old, new)
    path = folder / source.split("_", 1)[1]
    path.write_text(text)
    return Kernel.read(path)


def judge(backend: Backend, chosen: Kernel, problem: Problem) -> PassResult:
    """Run a kernel on a problem made in memory, checks and all."""
    yardstick = yardstick_for(problem, backend, chosen.pass_)
    inputs = dict(yardstick.inputs)
    if chosen.pass_ == "backward":
        inputs |= yardstick.forward_outputs()
    return run_kernel(backend, chosen, yardstick, {name: inputs[name] for name in READS[chosen.pass_]})


PLAIN = Problem.of(1, 2, 129, 64)
CAUSAL = Problem.of(1, 2, 129, 64, causal=True)
SCORE = "lane + Lanes * n < visible ?"

#: name: file, edits, problem, the tensors that must fail.
FAULTS: dict[str, tuple[str, list[tuple[str, str]], Problem, set[str]]] = {
    "last key dropped": (FORWARD, [("- k_first;  // of this tile", "- k_first - 1;")], PLAIN, {"O", "logsumexp"}),
    "one unmasked padding key": (FORWARD, [(SCORE, "lane + Lanes * n <= visible ?")], PLAIN, {"O", "logsumexp"}),
    "missing rescale of O": (FORWARD, [("rescale_reg[r] * out_reg[r][c] +", "out_reg[r][c] +")], PLAIN, {"O"}),
    "missing rescale of the row sum": (FORWARD, [("row_sum * rescale +", "row_sum +")], PLAIN, {"O", "logsumexp"}),
    "scale 1/D": (FORWARD, [("visible, float(args.scale))", "visible, 1.0f / args.head_dim)")], PLAIN, {"O", "logsumexp"}),
    "base-2 logsumexp": (FORWARD, [("row_max[r] + fa::log(row_sum[r])", "(row_max[r] + fa::log(row_sum[r])) * fa::log2e")], PLAIN, {"logsumexp"}),
    "causal off by one": (FORWARD, [("- k_first;  // of this tile", "- k_first + (CAUSAL ? 1 : 0);")], CAUSAL, {"O", "logsumexp"}),
    "a NaN": (FORWARD, [("out_reg[r], inverse,", "out_reg[r], query == 77 ? __uint_as_float(0x7fc00000u) : inverse,")], PLAIN, {"O"}),
    "unwritten rows": (FORWARD, [("query >= q_end) break;", "query >= args.seq_q - 1) break;")], PLAIN, {"O", "logsumexp"}),
    "dK and dV swapped": (NAIVE_BACKWARD, [("(args.dK, batch", "(args.XX, batch"), ("(args.dV, batch", "(args.dK, batch"), ("args.XX", "args.dV")], PLAIN, {"dK", "dV"}),
    "dQ without scale": (NAIVE_BACKWARD, [("fa::narrow<scalar>(real(args.scale) * dq_reg[i])", "fa::narrow<scalar>(dq_reg[i])")], PLAIN, {"dQ"}),
}  # fmt: skip


def test_the_kernels_they_are_made_from_pass(backend: Backend) -> None:
    """Otherwise nothing below means anything."""
    for name, pass_ in (("fa2_naive", "forward"), ("naive", "backward")):
        for problem in (PLAIN, CAUSAL):
            assert judge(backend, kernel.find(name, pass_), problem).passed


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_numbers_are_caught_by_the_error_budget(name: str, backend: Backend, tmp_path: Path) -> None:
    """Exactly the tensors that are wrong fail."""
    source, edits, problem, tensors = FAULTS[name]
    result = judge(backend, mutant(tmp_path, source, *edits), problem)
    assert {t for t, v in result.verdicts.items() if not v.passed} == tensors


def test_the_unmasked_key_in_bfloat16_is_seen_by_logsumexp(backend: Backend) -> None:
    """16-bit outputs hide one zero key among many; the float32 logsumexp does not."""
    yardstick = yardstick_for(Problem.of(1, 1, 513, 64, dtype="bfloat16"), backend, "forward")
    right = yardstick.forward_outputs()
    assert all(v.passed for v in yardstick.judge(right, "p16", 64).values())
    logsumexp = np.logaddexp(right["logsumexp"].astype(np.float64), 0.0)  # a key of zeros scores 0
    less = right["O"].astype(np.float64) * np.exp(right["logsumexp"] - logsumexp)[..., None]
    verdicts = yardstick.judge({"O": less.astype(right["O"].dtype), "logsumexp": logsumexp.astype(np.float32)}, "p16", 64)
    assert not verdicts["logsumexp"].passed


def test_writing_outside_a_tensor_is_caught_by_the_guard_bands(backend: Backend, tmp_path: Path) -> None:
    """A row too many."""
    if not backend.guard_bytes:
        pytest.skip("under a sanitizer there are no guard bands")
    wrong = mutant(tmp_path, FORWARD, ("if (query >= q_end) break;", "if (query > args.seq_q) break;"))
    with pytest.raises(KernelFault, match="wrote outside"):
        judge(backend, wrong, Problem.of(1, 1, 65, 64))


def test_writing_far_outside_names_the_thread_and_leaves_python_whole(tmp_path: Path) -> None:
    """Beyond the guard band of the CPU backend is a fence: the launch stops there, and the process goes on."""
    far = "static_cast<float*>(args.O.data)[blockIdx.x == 3 ? 1 << 12 : 0] = 1.0f"
    chosen = planted.kernel(tmp_path, planted.GOOD.replace("static_cast<float*>(args.O.data)[0] += 1.0f", far))
    for _ in range(3):
        with pytest.raises(KernelFault, match=r"illegal memory access in block \(3, 0, 0\)"):
            judge(Host(), chosen, Problem.of(1, 1, 8, 64))


def test_changing_an_input_is_caught(backend: Backend, tmp_path: Path) -> None:
    """Inputs are compared with what they were."""
    write = "if (lane == 0) *const_cast<float*>(fa::row_pointer<const float>(args.K, batch, kv_head, 0)) = 1.0f;\n    // Main loop"
    with pytest.raises(KernelFault, match="changed its input K"):
        judge(backend, mutant(tmp_path, FORWARD, ("    // Main loop", "    " + write)), PLAIN)


# -- what only the CPU backend sees -----------------------------------------------------------------------------------

MISSING_BARRIER = ("        __syncthreads();  // the tile, and before the first one Q, is complete\n", "")
MISSING_TRAILING_BARRIER = ("        __syncthreads();  // every warp has finished with the previous tile\n", "")
MISSING_SYNCWARP = ("        __syncwarp();  // the lanes of a row read each other's P\n", "")


def test_a_missing_barrier_reads_poison(tmp_path: Path) -> None:
    """Shared memory starts as NaN, so reading what nobody has written yet shows in the result under the default order."""
    assert not judge(Host(), mutant(tmp_path, FORWARD, MISSING_BARRIER), PLAIN).passed


@pytest.mark.parametrize(
    "edit", [MISSING_BARRIER, MISSING_TRAILING_BARRIER, MISSING_SYNCWARP], ids=["barrier", "trailing barrier", "syncwarp"]
)
def test_a_missing_barrier_is_a_race_with_both_lines(edit: tuple[str, str], tmp_path: Path) -> None:
    """--check race names file and line of both accesses, whatever the schedule and even where the result is right."""
    with pytest.raises(CheckFault) as caught:
        judge(Host(check="race"), mutant(tmp_path, FORWARD, edit), PLAIN)
    assert caught.value.exit_code == 1
    assert caught.value.why.count("fa2_naive_forward.cu:") + caught.value.why.count(".cuh:") >= 2, caught.value.why
    assert "pc:" not in caught.value.why


def test_the_race_check_is_silent_on_right_kernels() -> None:
    """No false alarm, over barriers, warps and tails."""
    for name, pass_ in (("fa1", "forward"), ("fa2_naive", "forward"), ("fa2", "forward"), ("fa2", "backward"), ("naive", "backward")):
        assert judge(Host(check="race"), kernel.find(name, pass_), Problem.of(1, 2, 67, 59, 1, 70, causal=True)).passed


def test_a_divergent_barrier_is_reported_not_hung(tmp_path: Path) -> None:
    """Warp 0 leaves the loop early: the others would wait for ever."""
    wrong = mutant(tmp_path, FORWARD, ("        __syncthreads();  // every warp", "        if (row) __syncthreads();  // every warp"))
    with pytest.raises(KernelFault) as caught:
        judge(Host(), wrong, PLAIN)
    assert "divergent barrier" in caught.value.why and "fa2_naive_forward.cu:" in caught.value.why
    assert caught.value.exit_code == 5


def test_an_early_return_past_a_barrier_is_reported(tmp_path: Path) -> None:
    """Threads that end while others wait in __syncthreads."""
    wrong = mutant(tmp_path, FORWARD, ("    // Main loop", "    if (q_first + row >= args.seq_q) return;\n    // Main loop"))
    with pytest.raises(KernelFault, match="divergent barrier: threads ended|have ended"):
        judge(Host(), wrong, PLAIN)


def test_a_lane_missing_from_a_shuffle_is_a_deadlock_in_words(tmp_path: Path) -> None:
    """Lane 0 skips the reduction that the full mask names it for."""
    wrong = mutant(tmp_path, FORWARD, ("group_max<Lanes>(new_max)", "(lane ? group_max<Lanes>(new_max) : new_max)"))
    with pytest.raises(KernelFault) as caught:
        judge(Host(), wrong, PLAIN)
    assert "deadlock" in caught.value.why or "different words" in caught.value.why
    assert "group_" in caught.value.why and "0xffffffff" in caught.value.why or "different words" in caught.value.why


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_results_do_not_depend_on_the_schedule(seed: int) -> None:
    """A right kernel gives the same bits under any order of threads."""
    for name, pass_ in (("fa1", "forward"), ("fa2", "forward"), ("fa2", "backward")):
        problem = Problem.of(1, 2, 67, 59, 1, 70, causal=True)
        chosen = kernel.find(name, pass_)
        first, other = judge(Host(), chosen, problem), judge(Host(seed=seed), chosen, problem)
        for tensor, values in first.outputs.items():
            assert np.array_equal(values.view(np.uint8), other.outputs[tensor].view(np.uint8)), (name, tensor)
