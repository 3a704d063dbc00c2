"""The word of <fa/merge.cuh> and the kernels of kernels_cu/ring on every backend, against numpy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_kernel import f32, run

from harness.backends import Backend, nvrtc
from harness.backends.host.backend import Host
from harness.backends.launch import launcher
from harness.dataset.storage import STORAGE, round_to, widen
from harness.fault import EnvironmentFault
from harness.kernel import KERNELS, Device, Kernel, planner
from harness.problem import Problem
from harness.ring.rank import Block
from harness.verbs.compile import compile_all

INF = np.inf
PAIRS = [(0.0, 0.0), (3.0, -2.0), (-2.0, 3.0), (80.0, -80.0), (-INF, 1.5), (1.5, -INF), (-INF, -INF), (1e4, 1e4 + 1), (-1e4, -1e4)]


def expected(running: Any, step: Any) -> tuple[Any, Any, Any]:
    """logsumexp, and the weights of both, in float64."""
    running, step = (np.asarray(x, np.float64) for x in (running, step))
    top = np.maximum(running, step)
    safe = np.where(top == -INF, 0.0, top)
    kept, added = np.exp(running - safe), np.exp(step - safe)
    whole = np.where(kept + added == 0, 1.0, kept + added)
    return np.where(top == -INF, -INF, safe + np.log(whole)), kept / whole, added / whole


def test_merge_rows(backend: Backend, tmp_path: Path) -> None:
    """Two logsumexps of any size, of which one or both may be of a row that saw no key."""
    count = len(PAIRS)
    body = f"""\
    if (t >= {count}) return;
    const fa::Merged merged = fa::merge_rows(a[t], b[t]);
    float* to = reinterpret_cast<float*>(out) + 3 * t;
    to[0] = merged.logsumexp, to[1] = merged.kept, to[2] = merged.added;"""
    first, second = (np.array(values, np.float32) for values in zip(*PAIRS, strict=True))
    got = f32(run(backend, tmp_path, body, first, second, before="#include <fa/merge.cuh>"), 3 * count).reshape(count, 3)
    for i, wanted in enumerate(expected(first, second)):
        assert np.allclose(got[:, i], wanted, rtol=2e-7, atol=1e-30), PAIRS


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wide_and_back(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """fa::load_wide and fa::store_rounded: eight values a thread as float32, a third of each, rounded once to the type, which is fa::Partial's."""
    body = """\
    if (t >= 32) return;
    static_assert(sizeof(typename fa::Partial<false, scalar>::type) == sizeof(scalar) && sizeof(typename fa::Partial<true, scalar>::type) == 4);
    fa::Vec<float, 8> wide = fa::load_wide<8>(a + 8 * t);
    for (int i = 0; i < 8; ++i) wide[i] /= 3;
    fa::store_rounded(reinterpret_cast<scalar*>(out) + 8 * t, wide);"""
    values = round_to(np, np.random.RandomState(1).randn(256).astype(np.float32), dtype)
    given = widen(np, values.view(STORAGE[dtype]), dtype).astype(np.float32)
    got = run(backend, tmp_path, body, values, dtype=dtype, before="#include <fa/merge.cuh>")
    raw = np.ascontiguousarray(got).view(np.uint8)[: 256 * STORAGE[dtype].itemsize].view(STORAGE[dtype])
    assert raw.tobytes() == round_to(np, given / np.float32(3), dtype).view(STORAGE[dtype]).tobytes()


def test_no_race_in_them(backend: Backend) -> None:
    """Also not in another schedule; what is written is watched, 16 bytes at once as one access."""
    if backend.name != "cpu":
        pytest.skip("the check is the CPU's")
    for seed in (0, 1):
        host = Host(seed, "race")
        test_the_kernels_of_a_ring(host, "bfloat16", 59)
        assert (host.watched() or 0) > 3 * 2 * 3 * 21 * 59 // 2


@pytest.mark.parametrize("dim", [64, 59, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernels_of_a_ring(backend: Backend, dtype: str, dim: int) -> None:
    """Rows 3 to 23 of 30, of three heads in two batches: merged, added and rounded; the other rows are left alone."""
    random, pitch = np.random.RandomState(0), -(-dim * STORAGE[dtype].itemsize // 16) * 16 // STORAGE[dtype].itemsize
    problem = Problem.of(2, 3, 21, dim, dtype=dtype)

    def block(values: Any, kind: str, width: int = pitch) -> Block:
        made = Block(backend, 1, 2, 3, 30, width, kind)
        made.upload([round_to(np, values, kind).view(STORAGE[kind])])
        return made

    def launch(name: str, tiles: dict[str, int] | None = None, **blocks: Block) -> None:
        made = launcher(backend, Kernel.read(KERNELS / "ring" / f"{name}.cu"), problem, tiles)
        views = {tensor: each.view(30, 0, 3) for tensor, each in blocks.items()}
        for tensor, each in blocks.items():
            behind = views[tensor].address - backend.address(each.buffer)
            backend.told(tensor, (each.buffer.size - behind,), (1,), views[tensor].address, each.buffer.size - behind)
        made(views)

    partial, running = (random.randn(2, 3, 30, dim).astype(np.float32) for _ in range(2))
    lse, step_lse = (random.randn(2, 3, 30, 1).astype(np.float32) for _ in range(2))
    lse[0, 0, 5], step_lse[0, 0, 6], lse[1, 1, 7], step_lse[1, 1, 7] = [-INF] * 4
    step, total, out = block(partial, dtype), block(running, "float32"), block(running, dtype)
    state, step_state = block(lse, "float32", 1), block(step_lse, "float32", 1)
    stored = widen(np, step.download(30, dim)[0], dtype)
    rows = np.zeros((30, 1), bool)
    rows[3:24] = True
    launch("merge", Q=step, K=step_state, V=total, O=total, logsumexp=state)
    merged, kept, added = expected(lse, step_lse)
    assert np.allclose(state.download(30, 1)[0], np.where(rows, merged, lse), rtol=1e-6, atol=1e-6)
    running = np.where(rows, kept * running + added * stored, running)
    assert np.allclose(total.download(30, dim)[0], running, rtol=1e-6, atol=1e-6)
    launch("add", Q=step, V=total, O=total)
    running = np.where(rows, running + stored, running)
    assert np.allclose(total.download(30, dim)[0], running, rtol=1e-6, atol=2e-6)
    before = out.download(30, dim)[0]
    launch("round", Q=total, O=out)
    rounded = round_to(np, total.download(30, dim)[0], dtype).view(before.dtype)
    assert np.where(rows, rounded, before).tobytes() == out.download(30, dim)[0].tobytes()

    first, behind, wide = block(partial, dtype), block(partial, dtype), block(running, "float32")
    held, lse = widen(np, out.download(30, dim)[0], dtype), state.download(30, 1)[0]
    launch("merge", {"FLOAT_BEFORE": 0, "FLOAT_AFTER": 0}, Q=step, K=step_state, V=out, O=behind, logsumexp=state)
    merged, kept, added = expected(lse, step_lse)
    assert np.allclose(state.download(30, 1)[0], np.where(rows, merged, lse), rtol=1e-6, atol=1e-6)
    wanted, coarse = np.where(rows, kept * held + added * stored, stored), {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert np.allclose(widen(np, behind.download(30, dim)[0], dtype), wanted, rtol=coarse * 1.001, atol=1e-6)
    for floats, part, after in ((0, first, behind), (1, wide, behind), (0, first, wide)):
        tiles = {"FLOAT_PART": floats, "FLOAT_BEFORE": 0, "FLOAT_AFTER": int(after is wide)}
        given, old = widen(np, part.download(30, dim)[0], "float32" if floats else dtype), after.download(30, dim)[0]
        launch("add", tiles, Q=part, V=out, O=after)
        sums = given.astype(np.float32) + held.astype(np.float32)
        kind = "float32" if after is wide else dtype
        assert np.where(rows, round_to(np, sums, kind).view(old.dtype), old).tobytes() == after.download(30, dim)[0].tobytes()


@pytest.mark.parametrize("name", ["merge", "add", "round"])
def test_they_compile_for_every_architecture(name: str) -> None:
    """No spills, and registers for full occupancy: they are bound by memory."""
    try:
        nvrtc.version()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    rows = compile_all([str(KERNELS / "ring" / f"{name}.cu")], everything=True)
    assert len({row.arch for row in rows}) > 3
    for row in rows:
        assert row.passed and row.registers is not None and row.registers <= 40, row
    kernel = Kernel.read(KERNELS / "ring" / f"{name}.cu")
    floats = [tile for tile in kernel.tile if tile.startswith("FLOAT_")]
    for values in itertools.product((0, 1), repeat=len(floats)):
        plan = planner.plan(
            kernel, Problem.of(1, 1, 64, 64, dtype="float16"), Device("cuda", "sm_75"), dict(zip(floats, values, strict=True))
        )
        found = nvrtc.resources(kernel, plan, "sm_75")
        assert found.registers <= 40 and not found.spill_bytes, (values, found.registers)
