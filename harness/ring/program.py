"""What a rank of the ring launches: the attention kernel on each of its rectangles, then merge, add and round, packed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backends import Backend, Loaded, Step
from ..backends.launch import Launcher, View, launcher
from ..check.contender import Contender
from ..fault import UsageFault
from ..kernel import ADD, MERGE, ROUND, Kernel, planner
from ..partition import Partition, Task
from ..problem import Problem
from .memory import Block, Memory

#: Launches in order, each of a kernel that was loaded.
Program = list[tuple[Loaded, list[Step]]]


def kernels_of(partition: Partition, contender: Contender, passes: tuple[str, ...]) -> list[tuple[Kernel, Problem, Mapping[str, int]]]:
    """What all ranks together load: compiled by one of a machine first, it is in the cache for the others. Each problem once: its lengths may
    be in the compile key."""
    found: dict[Any, tuple[Kernel, Problem, Mapping[str, int]]] = {}
    for problem in partition.problems_in_parts:
        for pass_ in passes:
            found.setdefault((pass_, problem), (contender.kernels[pass_], problem, contender.tiles))
    plain = rows_problem(partition.problem, partition.problem.heads_q, 1)
    return [*found.values(), *((Kernel.read(path), plain, {}) for path in (MERGE, ADD, ROUND))]


def rows_problem(problem: Problem, heads: int, count: int) -> Problem:
    """What merge, add and round are launched for: so many rows of so many heads."""
    return Problem.of(problem.batch, heads, count, problem.head_dim, dtype=problem.dtype)


def refuse(partition: Partition, contender: Contender, passes: tuple[str, ...], backend: Backend) -> None:
    """Raise UsageFault where a kernel does not take a rectangle of some rank, a type, or a head dim that the ring has no kernel for."""
    refuse_type(partition.problem)
    if contender.peer:
        raise UsageFault(
            f"{contender.name} is not a kernel of this project", "the ring launches kernels on shards", "name a kernel: fa-cli list"
        )
    if partition.problem.has_own_dim_v:
        raise UsageFault("a ring has one head dim", "its ranks send K and V as one tensor", "leave --dim-v out")
    for problem in partition.problems_in_parts:
        contender.refuse(problem, passes, backend)
    for path in (MERGE, ADD, ROUND):
        planner.refuse(Kernel.read(path), rows_problem(partition.problem, partition.problem.heads_q, 1))


def refuse_type(problem: Problem) -> None:
    """Raise UsageFault for float64."""
    if problem.dtype == "float64":
        raise UsageFault("a ring has no float64", "what its ranks have found is merged in float32", "use --dtype float32")


class Programs:
    """The launches of a rank's passes, on its memory."""

    def __init__(self, backend: Backend, contender: Contender, memory: Memory) -> None:
        self._backend, self._contender, self._memory = backend, contender, memory
        self._partition, self._rank, self._problem = memory.partition, memory.rank, memory.problem

    def forward(self, step: int) -> Program:
        """A step's keys: the kernel's O and logsumexp, merged into the sums."""
        made: Program = []
        (held, k_rows), n = self._memory.held(step), self._memory.q_rows
        for task in self._partition.tasks(self._rank, step):
            q, p = task.q_first, task.problem
            written = {"O": self._memory.step_out.view(n, 0, q), "logsumexp": self._memory.step_lse.view(n, 0, q)}
            made.append(self._packed(self._attention("forward", p), self._inputs(task, held, k_rows) | written))
            merged = {
                "Q": written["O"],
                "K": written["logsumexp"],
                "V": self._memory.sum.view(n, 0, q),
                "O": self._memory.sum.view(n, 0, q),
                "logsumexp": self._memory.lse.view(n, 0, q),
            }
            made.append(self._packed(self._ours(MERGE, p.heads_q, p.seq_q), merged))
        return made

    def forward_end(self) -> Program:
        """O, rounded from its sum."""
        return self._rounded(self._memory.sum, self._memory.out, self._problem.heads_q, self._memory.q_rows, 1)

    def backward(self, step: int) -> list[tuple[Program, Program]]:
        """A step's keys, which are another rank's."""
        (held, k_rows), (sums, _) = self._memory.held(step), self._memory.summed(step)
        return [self._gradients(task, held, k_rows, sums, self._memory.step_dkv) for task in self._partition.tasks(self._rank, step)]

    def backward_own(self) -> tuple[list[tuple[Program, Program]], list[tuple[Program, Program]]]:
        """The rank's own keys: with its first queries, and with the later ones."""
        m, (first, later) = self._memory, self._partition.own_tasks(self._rank)
        home = m.summed(self._partition.ranks)[0]
        early = [self._gradients(task, m.kv[0], m.k_rows, home, m.dkv) for task in first]
        return early, [self._gradients(task, m.kv[0], m.k_rows, home, m.step_dkv) for task in later]

    def backward_end(self) -> Program:
        """dQ, dK and dV, rounded from their sums."""
        m, p = self._memory, self._problem
        home = m.summed(self._partition.ranks)[0]
        return self._rounded(m.sum, m.dq, p.heads_q, m.q_rows, 1) + self._rounded(home, m.dkv, p.heads_kv, m.k_rows, 2)

    def _gradients(self, task: Task, held: Block, k_rows: int, sums: Block, part: Block) -> tuple[Program, Program]:
        """What needs no sums of dK and dV, and what does: the kernel writes its dK and dV to `part`, which is added to the sums."""
        q, k, p, n = task.q_first, task.k_first, task.problem, self._memory.q_rows
        read = {"O": self._memory.out, "logsumexp": self._memory.lse, "dO": self._memory.d_out}
        given = self._inputs(task, held, k_rows) | {name: block.view(n, 0, q) for name, block in read.items()}
        parts = [part.view(k_rows, i, k) for i in (0, 1)]
        written = {"dQ": self._memory.step_dq.view(n, 0, q), "dK": parts[0], "dV": parts[1]}
        launches = [self._packed(self._attention("backward", p), given | written)]
        add = self._added(p.heads_q, p.seq_q, written["dQ"], self._memory.sum.view(n, 0, q))
        later = [self._added(p.heads_kv, p.seq_kv, parts[i], sums.view(k_rows, i, k)) for i in (0, 1)]
        return [*launches, add], later

    def _added(self, heads: int, count: int, part: View, sum_: View) -> tuple[Loaded, list[Step]]:
        return self._packed(self._ours(ADD, heads, count), {"Q": part, "V": sum_, "O": sum_})

    def _rounded(self, source: Block, target: Block, heads: int, count: int, tensors: int) -> Program:
        if not count:
            return []
        views = [{"Q": source.view(count, i), "O": target.view(count, i)} for i in range(tensors)]
        return [self._packed(self._ours(ROUND, heads, count), each) for each in views]

    def _inputs(self, task: Task, held: Block, k_rows: int) -> dict[str, View]:
        k, v = (held.view(k_rows, i, task.k_first) for i in (0, 1))
        return {"Q": self._memory.q.view(self._memory.q_rows, 0, task.q_first), "K": k, "V": v}

    def _attention(self, pass_: str, problem: Problem) -> Launcher:
        return launcher(self._backend, self._contender.kernels[pass_], problem, self._contender.tiles)

    def _ours(self, path: Any, heads: int, count: int) -> Launcher:
        return launcher(self._backend, Kernel.read(path), rows_problem(self._problem, heads, count))

    def _packed(self, made: Launcher, tensors: Mapping[str, View]) -> tuple[Loaded, list[Step]]:
        return made.loaded, made.steps(tensors, [self._backend.address(space) for space in self._memory.workspaces(made)])
