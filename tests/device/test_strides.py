"""Batches and heads more than 2^32 elements apart: the base of a head is 64-bit arithmetic in every kernel, on every backend.

On the CPU the memory between is mapped and never touched. A 32-bit index gives an address inside the first slab, so a fault is a wrong
result, not a crash. And rows with other columns beyond the head's, which are not numbers: no kernel reads or writes them.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.backends import Backend
from harness.backends.launch import View, prepare
from harness.check.oracle import oracle_for
from harness.dataset.storage import STORAGE
from harness.kernel import Kernel, catalogue, find, planner
from harness.problem import PASSES, READS, WRITES, Problem
from harness.verbs.selftest.mutant import edited
from harness.verbs.verify.cases import windowed

#: Elements from one batch or head to the next: 32 bits of it are FOLDED.
FOLDED = 1 << 17
APART = (1 << 32) + FOLDED


def mapped(backend: Backend, count: int) -> Any:
    """Device memory for so many batches or heads, untouched: the farthest slab of 4-byte elements, and the slab. Skips the test where a GPU
    has not as much."""
    room = 4 * (count - 1) * APART + (1 << 24)
    if backend.name == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return np.frombuffer(mmap.mmap(-1, room, flags=flags), np.uint8)
    cuda: Any = backend.xp
    free = cuda.cuda.runtime.memGetInfo()[0]
    if free < 1.1 * room:
        pytest.skip(f"needs {room / 1e9:.0f} GB of device memory, {free / 1e9:.0f} GB are free")
    return backend.memory(room)


def wrong(backend: Backend, chosen: Kernel, problem: Problem, axis: str, beyond: int = 0) -> set[str]:
    """Run a kernel with the tensors' batches, or heads, APART, and rows of so many columns beyond; the outputs that are not within their
    budget, or that were written beyond."""
    memory, start = mapped(backend, problem.batch if axis == "batch" else problem.heads_q), 0
    oracle = oracle_for(problem, backend, chosen.pass_)
    given = oracle.inputs_of(chosen.pass_)
    loaded = backend.load(chosen, problem)
    address, at, views = backend.address(memory), {}, {}
    for name in (*READS[chosen.pass_], *WRITES[chosen.pass_]):
        batches, heads, rows, *_ = problem.shape(name)
        pitch = problem.row_pitch(name) + (beyond if name != "logsumexp" else 0)
        near = rows * pitch * (heads if axis == "batch" else batches)
        batch, head = (APART, rows * pitch) if axis == "batch" else (rows * pitch, APART)
        item = STORAGE[problem.tensor_dtype(name)]
        views[name] = View(address + start, batch, head, pitch)
        for b, h in np.ndindex(batches, heads):
            first = start + (b * batch + h * head) * item.itemsize
            piece = memory[first : first + rows * pitch * item.itemsize]
            piece[:] = 0xFF
            at[name, b, h] = piece
            if name in given:
                whole = np.full((rows, pitch), np.nan, np.float32).astype(item)
                whole[:, : given[name].shape[-1] if name != "logsumexp" else 1] = given[name][b, h].reshape(rows, -1)
                piece[:] = backend.xp.asarray(whole.reshape(-1).view(np.uint8))
        start += -(-near * item.itemsize // 256) * 256
    assert start < FOLDED * min(STORAGE[problem.tensor_dtype(name)].itemsize for name in views), "the slabs fit between two folded indices"
    spaces = [backend.memory(max(1, space.bytes)) for space in loaded.plan.workspaces]
    for space in spaces:
        space[:] = 0
    for each in loaded.plan.tensors:  # what a kernel reads besides: the descales of 8 bits
        spaces.append(backend.memory(each.values.nbytes))
        spaces[-1][:] = backend.xp.asarray(each.values.reshape(-1).view(np.uint8))
    prepare(backend, loaded, problem)(views, [backend.address(space) for space in spaces])
    outputs, outside = {}, set()
    for name in WRITES[chosen.pass_]:
        batches, heads, rows, *_ = problem.shape(name)
        item = STORAGE[problem.tensor_dtype(name)]
        found = [np.asarray(backend.get(at[name, b, h])).view(item).reshape(rows, -1) for b, h in np.ndindex(batches, heads)]
        outputs[name] = np.ascontiguousarray(np.stack(found)[..., : problem.head_dim]).reshape(problem.shape(name))
        if beyond and not all((rows[:, -beyond:].view(np.uint8) == 0xFF).all() for rows in found if name != "logsumexp"):
            outside.add(name)
    verdicts = oracle.judge(outputs, chosen.arithmetic_for(problem.dtype))
    return outside | {name for name, verdict in verdicts.items() if not verdict.passed}


def problem_of(chosen: Kernel) -> Problem:
    """Two tiles of queries and keys, two batches and two heads; two key heads, and a window, where a kernel takes windows only."""
    dtype = "float32" if chosen.dtypes[-1] == "tf32" else chosen.dtypes[-1]
    problem = Problem.of(2, 2, 65, 32, dtype="float32" if dtype == "float64" else dtype, causal=chosen.causal)
    return windowed(problem) if chosen.windows_only else problem


KERNELS = catalogue()


@pytest.mark.days(14)
@pytest.mark.parametrize("chosen", KERNELS, ids=lambda chosen: chosen.label)
def test_batches_and_heads_beyond_32_bits(chosen: Kernel, backend: Backend) -> None:
    """Every output is right, where batches are far apart and where heads are."""
    for axis in ("batch", "head"):
        assert not wrong(backend, chosen, problem_of(chosen), axis), axis


@pytest.mark.parametrize("dim", [72, 96, 160])
@pytest.mark.parametrize("pass_", PASSES)
def test_no_column_beyond_the_head_is_read_or_written(pass_: str, dim: int, backend: Backend) -> None:
    """hopper's products are as wide as the head, rounded up: what TMA fills there is 0, whatever the tensor has."""
    problem = Problem.of(1, 1, 65, dim, dtype="bfloat16", causal=True)
    assert not wrong(backend, planner.variant(find("hopper", pass_), problem), problem, "batch", 64)


@pytest.mark.parametrize("axis", ["batch", "head"])
def test_a_32_bit_index_is_seen(axis: str, backend: Backend, tmp_path: Path) -> None:
    """The base of O in 32 bits: rows are written where others belong."""
    source = next(chosen for chosen in KERNELS if chosen.label == "fa2_naive_forward").path
    right = "fa::row_pointer<float>(args.O, batch, head, q_first + r)"
    folded = "(static_cast<float*>(args.O.data) + int(batch * args.O.batch + head * args.O.head) + (q_first + r) * args.O.row)"
    path = tmp_path / "fa2_naive_forward.cu"
    path.write_text(edited(source.read_text(encoding="utf-8"), (right, folded)), encoding="utf-8")
    assert wrong(backend, Kernel.read(path), problem_of(Kernel.read(path)), axis) == {"O"}
