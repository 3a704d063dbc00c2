"""Compiling ahead: every part of judging runs on a small problem, once for a GPU and a code; threads end before a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.backends import Backend, pick
from harness.check import contender as contenders
from harness.check import oracle
from harness.check.ahead import ahead, load_all
from harness.check.choose import choose
from harness.check.request import Request
from harness.fault import KernelFault
from harness.kernel import planner
from harness.problem import PASSES, Problem

SHAPES = [
    Problem.of(1, 1, 40, 16),
    Problem.of(2, 4, 30, 20, heads_kv=2, seq_kv=44, dtype="bfloat16", causal=True),
    Problem.of(1, 3, 20, 8, dtype="float16"),
    Problem.of(3, 2, 24, 16, dtype="float64"),
]


class Gpu:
    """The CPU engine under a GPU's name; loads are counted."""

    name = "cuda"

    def __init__(self) -> None:
        self.real, self.loaded = pick("cpu"), list[str]()

    def load(self, kernel: Any, problem: Problem, tiles: Any) -> None:
        self.loaded.append(kernel.label)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a cache folder of its own."""
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    return Gpu()


@pytest.fixture
def left() -> Callable[[], set[threading.Thread]]:
    """The threads that a test has started and not ended; other tests' libraries keep theirs."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


def fa2(problem: Problem, backend: Backend) -> list[contenders.Contender]:
    return choose(Request("fa2", "both", problem), backend.device())[0]


@pytest.mark.parametrize("problem", SHAPES, ids=Problem.describe)
@pytest.mark.parametrize("passes", [("forward",), PASSES, ("backward",)])
def test_every_part_runs(problem: Problem, passes: tuple[str, ...]) -> None:
    """On numpy, where whatever raises is a fault of the part: on a GPU it would only be slow."""
    classes = ["p16" if problem.dtype in ("float16", "bfloat16") else "f32"]
    for part in oracle.rehearsal(pick("cpu").xp, problem, passes, classes):
        part()


def test_few_keeps_what_kernels_depend_on() -> None:
    """One stays one, many are two; type, width, mask and scale are the problem's."""
    whole = Problem.of(16, 32, 4096, 128, heads_kv=8, seq_kv=100, dtype="bfloat16", causal=True, scale=0.1)
    assert oracle.few(whole) == Problem.of(2, 4, 512, 128, heads_kv=2, seq_kv=100, dtype="bfloat16", causal=True, scale=0.1)
    assert oracle.few(Problem.of(1, 8, 64, 59)) == Problem.of(1, 2, 64, 59)


def test_once(gpu: Any, left: Callable[[], set[threading.Thread]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker keeps the next run from it, unless a part failed or the problem is another kind. What is judged on the CPU needs none."""
    ran, fails = list[str](), list[bool]()

    def fake(*given: Any) -> list[Callable[[], object]]:
        return [lambda: ran.append("part"), lambda: fails[-1] and 1 / 0]

    monkeypatch.setattr(oracle, "rehearsal", fake)
    monkeypatch.setattr(oracle, "SMALL", 1 << 10)
    problem = Problem.of(1, 2, 64, 32)
    for broken, shape, runs in (
        (True, problem, 1),
        (False, problem, 2),
        (False, problem, 2),
        (False, Problem.of(1, 2, 64, 40), 3),
        (False, Problem.of(1, 1, 8, 16), 3),
    ):
        fails.append(broken)
        with ahead(gpu, fa2(shape, gpu), shape, PASSES) as compiling:
            compiling.checks()
            compiling.kernels()
            assert not left()
        assert len(ran) == runs
    assert sorted(set(gpu.loaded)) == ["fa2_backward", "fa2_forward"] and len(gpu.loaded) == 10


def test_a_fault_ends_it(gpu: Any, left: Callable[[], set[threading.Thread]]) -> None:
    """What the block raises is raised, and no thread is left."""
    problem = SHAPES[0]
    with pytest.raises(ValueError, match="mine"), ahead(gpu, fa2(problem, gpu), problem, PASSES):
        raise ValueError("mine")
    assert not left()


def test_a_kernel_that_does_not_load_is_a_fault(
    gpu: Any, left: Callable[[], set[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, before anything is launched: it is not compiled twice."""
    problem, tried = SHAPES[0], list[str]()

    def load(kernel: Any, *_: Any) -> None:
        tried.append(kernel.label)
        raise KernelFault("it does not compile")

    monkeypatch.setattr(gpu, "load", load)
    with pytest.raises(KernelFault, match="it does not compile"), ahead(gpu, fa2(problem, gpu), problem, ("forward",)) as compiling:
        compiling.kernels()
    assert tried == ["fa2_forward"] and not left()


def test_the_kernels_of_a_sweep(gpu: Any, left: Callable[[], set[threading.Thread]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code once: lengths are no part of it. What does not compile, or refuses its problem, is left to its own row."""
    problems = [Problem.of(1, 2, seq, dim) for seq in (32, 64, 96) for dim in (32, 40)]
    wanted = [(each, problem) for problem in problems for each in fa2(problem, gpu)]
    load_all(gpu, wanted, PASSES)
    codes = {(k.path, planner.plan(k, p, gpu.device(), each.tiles).macros) for each, p in wanted for k in each.kernels.values()}
    assert len(gpu.loaded) == len(codes) < len(wanted) * 2 and set(gpu.loaded) == {"fa2_backward", "fa2_forward"}
    assert not left()

    def load(kernel: Any, *_: Any) -> None:
        raise KernelFault("it does not compile")

    monkeypatch.setattr(gpu, "load", load)
    load_all(gpu, [*wanted, (wanted[0][0], problems[0].with_(dtype="float64"))], PASSES)
