"""What a run compiles, compiled in threads while its inputs are drawn: the kernels under test, and on a GPU those of a large oracle.

CuPy compiles a kernel for each operation, type and number of dimensions when it is first used, at 0.1 s each: dozens one after another
where the oracle is computed on the GPU (oracle.small). They depend on the code that judges, not on the values. So that code runs here on
a few heads of random numbers, its parts at the same time (oracle.rehearsal), and CuPy keeps what they compiled: without it a first run
takes 6 s more on an H200 with B4_H16_S4096_D128, and 1.4 s more with both passes at 16k keys (experiments/launch/rehearsal.txt). A marker
in the cache folder says that this was done for such a problem, and the next run leaves it out. Nothing that is computed here is used, and
what of it fails, fails again where it is needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ..backends import Backend, Loaded
from ..backends.protocol import cache_dir
from ..fault import EnvironmentFault, Fault
from ..kernel import planner
from ..problem import Problem
from . import oracle
from .contender import Contender


class Ahead:
    """What is being compiled. Where it is needed, the threads that do it must have ended: a launch is judged by those it leaves."""

    def __init__(
        self, pool: ThreadPoolExecutor, kernels: Sequence[Future[Loaded]], checks: Sequence[Future[bool]], done: Callable[[], None]
    ) -> None:
        self._pool, self._kernels, self._checks, self._done = pool, kernels, checks, done

    def checks(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Wait for the kernels of the checks, which progress receives."""
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
    marker: Path | None = None
    work: list[Callable[[], object]] = []
    if backend.name == "cuda" and not oracle.small(problem):
        kind = (
            oracle.few(problem),
            passes,
            sorted({oracle.arithmetic_of(problem, kernel) for _, kernel in loads} or {oracle.arithmetic_of(problem)}),
        )
        with suppress(EnvironmentFault):  # no cache: nothing that is compiled would be kept
            marker = _marker(backend, kind)
        work = oracle.rehearsal(backend.xp, *kind) if marker and not marker.exists() else []

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


def _marker(backend: Backend, kind: tuple[object, ...]) -> Path:
    """The file that is there where such a problem was compiled ahead: for this GPU, by these versions, with this code."""
    made = hashlib.sha256(repr((backend.device(), getattr(backend.xp, "__version__", ""), *kind)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        made.update(path.read_bytes())
    made.update(os.environ.get("CUPY_CACHE_DIR", "").encode())
    return cache_dir() / f"compiled_ahead_{made.hexdigest()[:16]}"
