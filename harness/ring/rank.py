"""One rank of the ring: its rows in device memory, and the launches and messages of a forward or backward pass, step by step.

Forward: K and V travel from rank to rank; the O and logsumexp of each step are merged into float32 sums. Backward: P and delta are
those of the whole problem, since the kernel reads the O and logsumexp of all keys; dQ is summed here. dK and dV travel behind K and V,
one hop later, from the first rank that they visit, and come home after the last. The rank's own keys are done in two parts: with its first
queries while the first K and V arrive, with its other queries while its dK and dV come home. So no message lacks work to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..backends import Backend, Loaded, Step
from ..backends.launch import Launcher, View, launcher
from ..check.contender import Contender
from ..check.tensors import row_pitch
from ..dataset.storage import STORAGE
from ..fault import UsageFault
from ..kernel.kernel import KERNELS, Kernel
from ..problem import Problem
from .mpi import Mpi, deadline
from .partition import Partition, Task, rows
from .transport import Arrival, Hangs, Transport

MERGE, ADD, ROUND = (KERNELS / "ring" / f"{name}.cu" for name in ("merge", "add", "round"))
_POISON = 0xFF
_WHAT = {MERGE: "merge", ADD: "merge", ROUND: "round"}
#: Launches in order, each of a kernel that was loaded.
Program = list[tuple[Loaded, list[Step]]]


@dataclass(frozen=True)
class Span:
    """A part of a step on a stream, "compute" or "communication", between two marks of the transport's clock.

    what: "attention", "merge" (also additions), "clear" or "round"; of messages "K V" or "dK dV". A backward pass has `ranks` + 1 steps:
    in the last the rank has its own keys again, as in step 0.
    """

    stream: str
    step: int
    what: str
    began: Any
    ended: Any
    bytes: int = 0


def kernels_of(partition: Partition, contender: Contender, passes: tuple[str, ...]) -> list[tuple[Kernel, Problem, Mapping[str, int]]]:
    """What all ranks together load: compiled by one of them first, it is in the cache for the others. Each problem once: its lengths may
    be in the compile key."""
    found: dict[Any, tuple[Kernel, Problem, Mapping[str, int]]] = {}
    for problem in partition.problems:
        for pass_ in passes:
            found.setdefault((pass_, problem), (contender.kernels[pass_], problem, contender.tiles))
    plain = rows_problem(partition.problem, partition.problem.heads_q, 1)
    return [*found.values(), *((Kernel.read(path), plain, {}) for path in (MERGE, ADD, ROUND))]


def rows_problem(problem: Problem, heads: int, count: int) -> Problem:
    """What merge, add and round are launched for: so many rows of so many heads."""
    return Problem.of(problem.batch, heads, count, problem.head_dim, dtype=problem.dtype)


def refuse(partition: Partition, contender: Contender, passes: tuple[str, ...], backend: Backend) -> None:
    """Raise UsageFault where a kernel does not take a rectangle of some rank, a type, or a head dim that the ring has no kernel for."""
    if contender.peer:
        raise UsageFault(f"{contender.name} is no kernel of ours", "the ring launches kernels on shards", "name a kernel: fa-cli list")
    if partition.problem.dtype == "float64":
        raise UsageFault("a ring has no float64", "what its ranks have found is merged in float32", "use --dtype float32")
    for problem in partition.problems:
        contender.refuse(problem, passes, backend)
    for path in (MERGE, ADD, ROUND):
        Kernel.read(path).refuse(rows_problem(partition.problem, partition.problem.heads_q, 1))


class Block:
    """`count` tensors of (batch, heads, rows, pitch) elements, packed without a gap for the rows they have: at most `most`. K and V
    (or dK and dV) are one block, so that they travel as one message.

    dtype: their storage type. A shard of fewer rows fills the first bytes of the buffer. New memory is poisoned: NaN in every type.
    """

    def __init__(self, backend: Backend, count: int, batch: int, heads: int, most: int, pitch: int, dtype: str) -> None:
        self.backend, self.count, self.batch, self.heads, self.pitch = backend, count, batch, heads, pitch
        self.storage = STORAGE[dtype]
        self.buffer = backend.memory(max(16, self.bytes(max(1, most))))
        self.buffer[:] = _POISON

    def bytes(self, rows: int) -> int:
        """Bytes of all tensors with so many rows."""
        return self.count * self.batch * self.heads * rows * self.pitch * self.storage.itemsize

    def part(self, rows: int) -> Any:
        """The bytes of all tensors with so many rows: a message."""
        return self.buffer[: self.bytes(rows)]

    def view(self, rows: int, index: int = 0, first: int = 0) -> View:
        """Where a tensor of so many rows is, from row `first` on."""
        head = rows * self.pitch
        start = (index * self.batch * self.heads * rows + first) * self.pitch * self.storage.itemsize
        return View(self.backend.address(self.buffer) + start, self.heads * head, head, self.pitch)

    def array(self, rows: int) -> Any:
        """(count, batch, heads, rows, pitch) elements; bfloat16 as uint16 where the array module has no such type."""
        item = self.storage
        if self.backend.xp is not np and item.kind == "V":
            item = np.dtype(f"<u{item.itemsize}")
        return self.part(rows).view(item).reshape(self.count, self.batch, self.heads, rows, self.pitch)

    def upload(self, arrays: list[Any]) -> None:
        """Fill from host arrays (batch, heads, rows, columns) of the storage type; the columns up to the pitch stay poisoned."""
        rows, columns = arrays[0].shape[2:]
        if not rows:
            return
        made = self.array(rows)
        for index, array in enumerate(arrays):
            source = np.ascontiguousarray(array)
            xp = self.backend.xp
            made[index][..., :columns] = source if xp is np else xp.asarray(source.view(made.dtype))

    def download(self, rows: int, columns: int) -> list[Any]:
        """The tensors as host arrays (batch, heads, rows, columns)."""
        flat = np.asarray(self.backend.get(self.part(rows))).view(self.storage)
        whole = flat.reshape(self.count, self.batch, self.heads, rows, self.pitch)
        return [np.ascontiguousarray(each[..., :columns]) for each in whole]


class Rank:
    """A rank's memory and program. inputs: the whole problem's host storage arrays, of which it keeps its own rows.

    Between two `yield` of forward() and backward() it does what it can without waiting for a neighbour: in one process the ranks
    take turns there, elsewhere nothing happens.
    """

    def __init__(
        self,
        backend: Backend,
        partition: Partition,
        contender: Contender,
        inputs: Mapping[str, Any],
        transport: Transport,
        overlap: bool = True,
    ) -> None:
        self.backend, self.partition, self.contender, self.transport = backend, partition, contender, transport
        self.rank, self.overlap, self.problem = transport.rank, overlap, partition.problem
        self.queries, self.keys = partition.queries[self.rank], partition.keys[self.rank]
        self.q_rows, self.k_rows = rows(self.queries), rows(self.keys)
        self.spans: list[Span] = []
        self._blocks: dict[str, Block] = {}
        self._spaces: dict[Any, list[Any]] = {}
        p = self.problem
        most = max(rows(chunks) for chunks in partition.keys)
        self.q = self._block("Q", 1, p.heads_q, self.q_rows)
        self.kv = [self._block(f"KV{i}", 2, p.heads_kv, most) for i in range(min(3, partition.ranks))]  # home, and two that travel
        self.out = self._block("O", 1, p.heads_q, self.q_rows)
        self.step_out = self._block("step O", 1, p.heads_q, self.q_rows)
        self.step_lse, self.lse = (self._block(name, 1, p.heads_q, self.q_rows, "float32", 1) for name in ("step logsumexp", "logsumexp"))
        self.sum = self._block("sum", 1, p.heads_q, self.q_rows, "float32")  # of O, then of dQ
        self.q.upload([_own(inputs["Q"], self.queries)])
        self.kv[0].upload([_own(inputs[name], self.keys) for name in ("K", "V")])
        merged = np.zeros(self.q_rows, np.bool_)
        for task in [task for step in range(partition.ranks) for task in partition.tasks(self.rank, step)]:
            merged[task.q_first : task.q_first + task.problem.seq_q] = True
        self._all_merged = bool(merged.all())
        self._forward = [self._forward_step(step) for step in range(partition.ranks)]
        self._forward_end = self._rounded(self.sum, self.out, p.heads_q, self.q_rows, 1)
        self.sums: list[Block] = []  # of dK and dV
        if "dO" in inputs:
            self._ready_backward(inputs["dO"], most)
        transport.register([block.buffer for block in (*self.kv[1:], *self.sums)])

    def _ready_backward(self, d_out: Any, most: int) -> None:
        p = self.problem
        self.d_out, self.dq, self.step_dq = (self._block(name, 1, p.heads_q, self.q_rows) for name in ("dO", "dQ", "step dQ"))
        self.dkv, self.step_dkv = (self._block(name, 2, p.heads_kv, most) for name in ("dKV", "step dKV"))
        self.sums = [self._block(f"dKV sum {i}", 2, p.heads_kv, most, "float32") for i in range(min(2, self.partition.ranks))]
        self.d_out.upload([_own(d_out, self.queries)])
        first, later = self.partition.own_tasks(self.rank)
        home, ranks = self._summed(self.partition.ranks)[0], self.partition.ranks
        self._first = [self._backward_task(task, self.kv[0], self.k_rows, home, self.dkv) for task in first]
        self._backward = [self._backward_step(step) for step in range(1, ranks)]
        self._later = [self._backward_task(task, self.kv[0], self.k_rows, home, self.step_dkv) for task in later]
        self._backward_end = self._rounded(self.sum, self.dq, p.heads_q, self.q_rows, 1)
        self._backward_end += self._rounded(home, self.dkv, p.heads_kv, self.k_rows, 2)

    @property
    def device_bytes(self) -> int:
        """Device memory the tensors and workspaces take."""
        spaces = [space for made in self._spaces.values() for space in made]
        return sum(int(b.buffer.nbytes) for b in self._blocks.values()) + sum(int(space.nbytes) for space in spaces)

    # -- the passes ---------------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[None]:
        """Enqueue the pass. It ends with O and logsumexp of this rank's rows over all keys. Raises as launches and exchanges do."""
        sum_ = () if self._all_merged else ((self.sum, self.q_rows, 0),)  # the first merge of a row reads no sum
        self._clear(0, *sum_, (self.lse, self.q_rows, -np.inf))
        for step in range(self.partition.ranks):
            arrived = self._pass_on_keys(step) if self.overlap else None
            self._compute(step, self._forward[step])
            arrived = arrived or self._pass_on_keys(step)
            yield
            self._wait(arrived, step, "K V")
        self._compute(self.partition.ranks - 1, self._forward_end)

    def backward(self) -> Iterator[None]:
        """Enqueue the pass, after forward(). It ends with dQ, and dK and dV of this rank's keys, over all queries."""
        ranks, gradients = self.partition.ranks, None
        arrived = self._pass_on_keys(0) if self.overlap else None
        self._clear(0, (self.sum, self.q_rows, 0), (*self._summed(1), 0))  # the sums of the first keys that visit, or a lone rank's own
        for launches, _ in self._first:
            self._compute(0, launches)
        arrived = arrived or self._pass_on_keys(0)
        yield
        self._wait(arrived, 0, "K V")
        for step in range(1, ranks):
            arrived = self._pass_on_keys(step) if self.overlap else None
            for launches, additions in self._backward[step - 1]:
                self._compute(step, launches)
                self._wait(gradients, step - 1, "dK dV")
                self._compute(step, additions)
            self._wait(gradients, step - 1, "dK dV")
            gradients = self._pass_on(self._summed(step), self._summed(step + 1))
            if not self.overlap:
                yield
                self._wait(gradients, step, "dK dV")
            arrived = arrived or self._pass_on_keys(step)
            yield
            self._wait(arrived, step, "K V")
        for launches, additions in self._later:
            self._compute(ranks, launches)
            self._wait(gradients, ranks - 1, "dK dV")
            self._compute(ranks, additions)
        self._wait(gradients, ranks - 1, "dK dV")
        for _, additions in self._first:
            self._compute(ranks, additions)
        self._compute(ranks, self._backward_end)

    def meet(self) -> None:
        """A byte all the way round, enqueued: what follows begins on all ranks at the same time. It goes where K and V will arrive."""
        for _ in range(1, self.transport.size):
            self.transport.exchange(self.kv[0].buffer[:1], self.kv[1].buffer[:1]).wait()

    def outputs(self, pass_: str) -> dict[str, Any]:
        """This rank's rows of what a pass writes, host storage arrays. The device has finished."""
        dim = self.problem.head_dim
        if pass_ == "forward":
            return {"O": self.out.download(self.q_rows, dim)[0], "logsumexp": self.lse.download(self.q_rows, 1)[0][..., 0]}
        d_k, d_v = self.dkv.download(self.k_rows, dim)
        return {"dQ": self.dq.download(self.q_rows, dim)[0], "dK": d_k, "dV": d_v}

    # -- messages -----------------------------------------------------------------------------------------------------

    def _held(self, step: int) -> tuple[Block, int]:
        """The K and V of a step: where they are, and how many rows. The rank's own stay where they are, for the next run."""
        block = self.kv[0] if step == 0 else self.kv[1 + (step - 1) % (len(self.kv) - 1)]
        return block, rows(self.partition.keys[self.partition.source(self.rank, step)])

    def _summed(self, step: int) -> tuple[Block, int]:
        """The dK and dV sums of a step, of the same rows; at step `ranks` they are home."""
        return self.sums[step % len(self.sums)], rows(self.partition.keys[self.partition.source(self.rank, step)])

    def _pass_on_keys(self, step: int) -> Arrival | None:
        return self._pass_on(self._held(step), self._held(step + 1)) if step + 1 < self.partition.ranks else None

    def _pass_on(self, mine: tuple[Block, int], theirs: tuple[Block, int]) -> Arrival:
        return self.transport.exchange(mine[0].part(mine[1]), theirs[0].part(theirs[1]))

    def _wait(self, arrival: Arrival | None, step: int, what: str) -> None:
        if arrival and arrival.ended is None:
            arrival.wait()
            self.spans.append(Span("communication", step, what, arrival.began, arrival.ended, arrival.bytes))

    # -- launches -----------------------------------------------------------------------------------------------------

    def _compute(self, step: int, program: Program) -> None:
        mark = self.transport.clock.mark() if program else None
        for path, launches in groupby(program, lambda each: each[0].kernel.path):
            for loaded, steps in launches:
                with self._limit():
                    self.backend.submit(loaded, steps)
            began, mark = mark, self.transport.clock.mark()
            self.spans.append(Span("compute", step, _WHAT.get(path, "attention"), began, mark))

    def _limit(self) -> AbstractContextManager[None]:
        """Between CPUs a launch has the limit of a wait: where all ranks hang in theirs, none waits for another."""
        if not isinstance(self.transport, Mpi):
            return nullcontext()
        return deadline(self.rank, self.transport.timeout, fault=Hangs(self.rank, self.transport.timeout))

    def _clear(self, step: int, *what: tuple[Block, int, float]) -> None:
        """Fill so many rows of blocks with a value."""
        began = self.transport.clock.mark()
        for block, count, value in what:
            if count:
                block.array(count)[...] = value
        self.spans.append(Span("compute", step, "clear", began, self.transport.clock.mark()))

    def _forward_step(self, step: int) -> Program:
        made: Program = []
        (held, k_rows), n = self._held(step), self.q_rows
        for task in self.partition.tasks(self.rank, step):
            q, p = task.q_first, task.problem
            written = {"O": self.step_out.view(n, 0, q), "logsumexp": self.step_lse.view(n, 0, q)}
            made.append(self._packed(self._attention("forward", p), self._inputs(task, held, k_rows) | written))
            merged = {"Q": written["O"], "K": written["logsumexp"], "O": self.sum.view(n, 0, q), "logsumexp": self.lse.view(n, 0, q)}
            made.append(self._packed(self._ours(MERGE, p.heads_q, p.seq_q), merged))
        return made

    def _backward_step(self, step: int) -> list[tuple[Program, Program]]:
        (held, k_rows), (sums, _) = self._held(step), self._summed(step)
        return [self._backward_task(task, held, k_rows, sums, self.step_dkv) for task in self.partition.tasks(self.rank, step)]

    def _backward_task(self, task: Task, held: Block, k_rows: int, sums: Block, part: Block) -> tuple[Program, Program]:
        """What needs no sums of dK and dV, and what does: the kernel writes its dK and dV to `part`, which is added to the sums."""
        q, k, p, n = task.q_first, task.k_first, task.problem, self.q_rows
        read = {"O": self.out, "logsumexp": self.lse, "dO": self.d_out}
        given = self._inputs(task, held, k_rows) | {name: block.view(n, 0, q) for name, block in read.items()}
        parts = [part.view(k_rows, i, k) for i in (0, 1)]
        written = {"dQ": self.step_dq.view(n, 0, q), "dK": parts[0], "dV": parts[1]}
        launches = [self._packed(self._attention("backward", p), given | written)]
        launches.append(self._packed(self._ours(ADD, p.heads_q, p.seq_q), {"Q": written["dQ"], "O": self.sum.view(n, 0, q)}))
        add = self._ours(ADD, p.heads_kv, p.seq_kv)
        return launches, [self._packed(add, {"Q": parts[i], "O": sums.view(k_rows, i, k)}) for i in (0, 1)]

    def _rounded(self, source: Block, target: Block, heads: int, count: int, tensors: int) -> Program:
        if not count:
            return []
        views = [{"Q": source.view(count, i), "O": target.view(count, i)} for i in range(tensors)]
        return [self._packed(self._ours(ROUND, heads, count), each) for each in views]

    def _inputs(self, task: Task, held: Block, k_rows: int) -> dict[str, View]:
        k, v = (held.view(k_rows, i, task.k_first) for i in (0, 1))
        return {"Q": self.q.view(self.q_rows, 0, task.q_first), "K": k, "V": v}

    def _attention(self, pass_: str, problem: Problem) -> Launcher:
        return launcher(self.backend, self.contender.kernels[pass_], problem, self.contender.tiles)

    def _ours(self, path: Any, heads: int, count: int) -> Launcher:
        return launcher(self.backend, Kernel.read(path), rows_problem(self.problem, heads, count))

    def _packed(self, made: Launcher, tensors: Mapping[str, View]) -> tuple[Loaded, list[Step]]:
        return made.loaded, made.steps(tensors, [self.backend.address(space) for space in self._workspaces(made)])

    # -- memory -------------------------------------------------------------------------------------------------------

    def _block(self, name: str, count: int, heads: int, most: int, dtype: str = "", pitch: int = 0) -> Block:
        """Rows have room for whole vectors of 16 bytes of the problem's type, also where they are float32."""
        pitch = pitch or row_pitch(self.problem, "Q")
        made = self._blocks[name] = Block(self.backend, count, self.problem.batch, heads, most, pitch, dtype or self.problem.dtype)
        return made

    def _workspaces(self, made: Launcher) -> list[Any]:
        """Launches follow one another on one stream, so those of all tasks share their workspaces, as large as the largest needs; one
        that keeps its values from run to run (zero_once) belongs to its launch plan."""
        found = []
        for index, space in enumerate(made.loaded.plan.workspaces):
            key = (made.loaded.kernel.path, index, made.loaded.plan if space.init == "zero_once" else None)
            if key not in self._spaces:
                size = space.bytes if space.init == "zero_once" else self._most_workspace(made.loaded.kernel, index)
                self._spaces[key] = [self.backend.memory(max(16, size))]
                self._spaces[key][0][:] = 0 if space.init == "zero_once" else 0xFF
            found += self._spaces[key]
        return found

    def _most_workspace(self, kernel: Kernel, index: int) -> int:
        steps = [self.partition.tasks(self.rank, step) for step in range(self.partition.ranks)]
        mine = [task.problem for tasks in (*steps, *self.partition.own_tasks(self.rank)) for task in tasks]
        plans = [kernel.plan(problem, self.backend.device(), self.contender.tiles) for problem in dict.fromkeys(mine)]
        return max(plan.workspaces[index].bytes for plan in plans)


def _own(array: Any, chunks: tuple[tuple[int, int], ...]) -> Any:
    """A rank's rows of a whole tensor, side by side."""
    return np.concatenate([array[:, :, start:stop] for start, stop in chunks] or [array[:, :, :0]], axis=2)


def run_together(passes: list[Callable[[], Iterator[None]]]) -> None:
    """Let ranks of one process take turns to the end of a pass each."""
    running = [start() for start in passes]
    while running:
        running = [each for each in running if next(each, "ended") is None]
