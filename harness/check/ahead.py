"""What a run compiles, compiled in threads while its inputs are drawn: the kernels under test, and on a GPU those of the checks.

CuPy compiles a kernel for each operation, type and number of dimensions when it is first used, one after another: at 0.1 s each, a few
for the trial of a kernel, and dozens where the oracle is computed on the GPU (oracle.small). They depend on the code that judges, not on
the values. So that code runs here on a few heads of random numbers, its parts at the same time, and CuPy keeps what they compiled. A
marker in the cache folder says that this was done for such a problem, and the next run leaves it out. Nothing that is computed here is
used, and what of it fails, fails again where it is needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..array import Array, copied, every
from ..backends import Backend, Loaded
from ..backends.protocol import cache_dir
from ..dataset.change import Change
from ..dataset.generate import generate
from ..dataset.storage import STORAGE, round_to
from ..fault import EnvironmentFault, Fault
from ..kernel import planner
from ..problem import READS, WRITES, Problem
from . import baselines, budget, oracle, reference
from .contender import Contender, arithmetic_of
from .tensors import Tensor, row_pitch

#: Rows of a head that are enough for what depends on them only by being more than one; batches and key heads likewise.
ROWS, SOME = 512, 2


class Ahead:
    """What is being compiled. Where it is needed, the threads that do it must have ended: a launch is judged by those it leaves."""

    def __init__(
        self, pool: ThreadPoolExecutor, kernels: Sequence[Future[Loaded]], checks: Sequence[Future[bool]], done: Callable[[], None]
    ) -> None:
        self._pool, self._kernels, self._checks, self._done = pool, kernels, checks, done

    def checks(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Wait for the kernels of the checks, which progress is told."""
        progress("compiles the checks")
        fine = [each.result() for each in self._checks]
        if fine and all(fine):
            self._done()

    def kernels(self) -> None:
        """Wait for all, and for the threads to end. Raises as Backend.load does, for the first kernel that does not load."""
        self.checks()
        for each in self._kernels:
            each.result()
        self._pool.shutdown()


@contextmanager
def ahead(backend: Backend, contenders: Sequence[Contender], problem: Problem, passes: Sequence[str]) -> Iterator[Ahead]:
    """Compile the contenders' kernels for the passes of a problem, and what judging them compiles, in threads that end with the block."""
    loads = [(each, each.kernels[pass_]) for each in contenders for pass_ in passes if pass_ in each.kernels]
    classes = sorted({arithmetic_of(problem, kernel) for _, kernel in loads} or {arithmetic_of(problem)})
    marker: Path | None = None
    work: list[Callable[[], object]] = []
    if backend.name == "cuda":
        with suppress(EnvironmentFault):  # no cache: nothing that is compiled would be kept
            marker = _marker(backend, problem, passes, classes)
    if marker and not marker.exists():
        work = parts(backend, small(problem), passes, classes, not oracle.small(problem))

    def tried(job: Callable[[], object]) -> bool:
        with suppress(Exception), backend.current():
            job()
            return True
        return False

    def done() -> None:
        with suppress(OSError):
            assert marker is not None
            marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            marker.touch()

    with ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 1))) as pool:
        checks = [pool.submit(tried, job) for job in work]
        kernels = [pool.submit(backend.load, kernel, problem, each.tiles) for each, kernel in loads]
        try:
            yield Ahead(pool, kernels, checks, done)
        finally:
            pool.shutdown(cancel_futures=True)


def load_all(backend: Backend, wanted: Iterable[tuple[Contender, Problem]], passes: Sequence[str]) -> None:
    """Compile the kernels of contenders for their problems at once, each code once, in threads that have ended when this returns.

    A sweep loads them one by one later. What does not compile, or refuses its problem, says so then.
    """
    jobs: dict[object, Callable[[], Loaded]] = {}
    for each, problem in wanted:
        for kernel in (each.kernels[pass_] for pass_ in passes if pass_ in each.kernels):
            with suppress(Fault):
                macros = planner.plan(kernel, problem, backend.device(), each.tiles).macros
                jobs[kernel.path, macros] = partial(backend.load, kernel, problem, each.tiles)

    def tried(job: Callable[[], Loaded]) -> None:
        with suppress(Exception):
            job()

    with ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 1))) as pool:
        list(pool.map(tried, jobs.values()))


def small(problem: Problem) -> Problem:
    """A problem whose judging compiles the same: of the same type, width, mask and grouping, with few heads and rows."""
    kv, group = min(problem.heads_kv, SOME), min(problem.heads_q // problem.heads_kv, SOME)
    rows, keys = min(problem.seq_q, ROWS), min(problem.seq_kv, ROWS)
    return Problem.of(min(problem.batch, SOME), kv * group, rows, problem.head_dim, kv, keys, problem.dtype, problem.causal, problem.scale)


def parts(
    backend: Backend, problem: Problem, passes: Sequence[str], classes: Sequence[str], judged: bool = True
) -> list[Callable[[], object]]:
    """Everything that judging does on a problem, in parts that share few operations: the trial and, where judged, all of the oracle."""
    xp, written = backend.xp, [name for pass_ in passes for name in WRITES[pass_]]
    inputs = generate(problem, 0, ("Q", "K", "V", *("dO" for pass_ in passes if pass_ == "backward")))

    def on_device() -> dict[str, Array]:
        return {name: xp.asarray(array.view(np.uint16) if problem.dtype == "bfloat16" else array) for name, array in inputs.items()}

    def verdicts(name: str, arithmetic: str) -> None:
        """Of an output that is as its baselines are."""
        expected, dtype = _random(xp, problem, "O"), problem.tensor_dtype(name)
        right = _random(xp, problem, name)
        values = round_to(xp, right, dtype)
        whole = reference.Reference(
            problem, xp, {"O": expected, name: right}, None, 1.0, dict.fromkeys((*WRITES["forward"], *WRITES["backward"]), 0.0)
        )
        near: list[Mapping[str, Array]] = [{name: right + side * 1e-3 * right} for side in (-1, 1)]
        near = [{name: each[name].astype(np.float32)} for each in near]
        budget.compare(whole, {name: values}, near, None, on_device(), 64, arithmetic)

    if not judged:
        return [lambda: _trial(backend, problem, passes, inputs)]
    found: list[Callable[[], object]] = [lambda: reference.reference(xp, problem, on_device())]
    found += [partial(lambda arithmetic: baselines.baselines(xp, problem, on_device(), arithmetic), each) for each in classes]
    found += [partial(verdicts, name, classes[0]) for name in written if name in ("O", "logsumexp", "dQ")]
    return [*found, lambda: _trial(backend, problem, passes, inputs)]


def _random(xp: Any, problem: Problem, name: str) -> Array:
    made: Array = xp.asarray(np.random.default_rng(0).standard_normal(problem.shape(name)))
    return made


def _trial(backend: Backend, problem: Problem, passes: Sequence[str], inputs: Mapping[str, Array]) -> None:
    """Tensors with guard bands, and inputs that change places and signs (trial.py)."""
    for name in dict.fromkeys(name for pass_ in passes for name in (*READS[pass_], *WRITES[pass_])):
        dtype = problem.tensor_dtype(name)
        tensor = Tensor(backend, problem.shape(name), dtype, row_pitch(problem, name))
        tensor.upload(inputs.get(name, np.zeros(problem.shape(name), STORAGE[dtype])))
        before = copied(backend.xp, tensor.buffer)
        bits = tensor.bits()
        moved = Change.drawn(problem).of(backend.xp, name, bits)
        every(moved == copied(backend.xp, bits))
        bits[:] = moved
        tensor.buffer[:] = before
        assert tensor.intact() and every(tensor.buffer == before)
        elsewhere = Tensor(backend, problem.shape(name), dtype, row_pitch(problem, name), wide=1)
        elsewhere.upload(copied(backend.xp, tensor.values()))
        assert elsewhere.intact() and every(copied(backend.xp, elsewhere.bits()) == copied(backend.xp, bits))
        copied(backend.xp, bits[:1, :1])  # of a head, as a part that is new has it


def _marker(backend: Backend, problem: Problem, passes: Sequence[str], classes: Sequence[str]) -> Path:
    """The file that is there where such a problem was compiled ahead: for this GPU, by these versions, with this code."""
    kind = small(problem), oracle.small(problem), passes, classes
    made = hashlib.sha256(repr((backend.device(), getattr(backend.xp, "__version__", ""), *kind)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        made.update(path.read_bytes())
    made.update(os.environ.get("CUPY_CACHE_DIR", "").encode())
    return cache_dir() / f"compiled_ahead_{made.hexdigest()[:16]}"
