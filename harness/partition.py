"""Which rows of the sequence a rank has, and what it computes in each step of the ring.

At step t rank r holds the keys of rank (r - t) mod ranks. Its queries against those keys are one to four rectangles of the score
matrix, a chunk of queries by a chunk of keys. A rectangle is a Problem of its own, whose causal_shift places the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from .fault import UsageFault
from .problem import Problem

KINDS = ("contiguous", "zigzag")

#: Rows start to stop - 1 of the whole sequence.
Chunk = tuple[int, int]


@dataclass(frozen=True)
class Task:
    """A launch of a step: rows of the rank's queries by rows of the keys it holds, both counted from the shard's first row."""

    q_first: int
    k_first: int
    problem: Problem


@dataclass(frozen=True)
class Partition:
    """A problem's rows over ranks. queries and keys: for each rank its chunks, in rising order, side by side in its memory."""

    problem: Problem
    kind: str
    queries: tuple[tuple[Chunk, ...], ...]
    keys: tuple[tuple[Chunk, ...], ...]

    @classmethod
    def of(cls, problem: Problem, ranks: int, kind: str | None = None) -> Partition:
        """A problem divided over ranks; kind defaults to zigzag where it is causal. Any length: chunks differ by one row at most.

        Raises UsageFault for an unknown kind, for less than one rank, and for a problem with a mask, score, pages or a cache of 8 bits.
        """
        if problem.page_size:
            why = "a rank has its keys in one piece"
            raise UsageFault("a cache in pages over several ranks", why, "leave --page-size out")
        if problem.has_own_dtype_kv:
            why = "ranks send K and V as they store Q"
            raise UsageFault("a cache of 8 bits over several ranks", why, "leave --kv-dtype out")
        if problem.formulas:
            name = next(iter(problem.formulas))
            raise UsageFault(
                f"a {name} over several ranks", "the positions in its text are those of one rank's rows", f"leave --{name} out"
            )
        kind = kind or ("zigzag" if problem.causal else "contiguous")
        if kind not in KINDS:
            raise UsageFault(f"unknown partition {kind!r}", f"known: {', '.join(KINDS)}", "use --partition zigzag")
        if ranks < 1:
            raise UsageFault(f"a ring of {ranks} ranks", "a ring has at least one rank", "use --gpus 2")
        queries, keys = (shards(equal(length, ranks), kind) for length in (problem.seq_q, problem.seq_kv))
        return cls(problem, kind, queries, keys)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.queries)

    def source(self, rank: int, step: int) -> int:
        """The rank whose keys this rank holds at a step: keys travel from each rank to the next."""
        return (rank - step) % self.ranks

    def tasks(self, rank: int, step: int) -> tuple[Task, ...]:
        """What a rank launches at a step, nothing for what no query sees; neighbouring rectangles are one launch where one mask
        serves both."""
        return self._tasks[rank, step]

    def own_tasks(self, rank: int) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """The tasks of step 0 in two parts: the first of the rank's chunks of queries (half of an only one), and the others.

        No two tasks of the first part have a key in common: it is one chunk of queries, by one or more runs of keys.
        """
        queries = self.queries[rank]
        if len(queries) == 1:
            start, stop = queries[0]
            queries = ((start, (start + stop + 1) // 2), ((start + stop + 1) // 2, stop))
        first, rest = joined(*queries[:1]), joined(*queries[1:])
        later = _tasks(self.problem, rest, self.keys[rank])
        shifted = tuple(Task(task.q_first + rows(first), task.k_first, task.problem) for task in later)
        return _tasks(self.problem, first, self.keys[rank]), shifted

    @cached_property
    def _tasks(self) -> dict[tuple[int, int], tuple[Task, ...]]:
        every = [(rank, step) for rank in range(self.ranks) for step in range(self.ranks)]
        return {at: _tasks(self.problem, self.queries[at[0]], self.keys[self.source(*at)]) for at in every}

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """All rectangles of all ranks, each once."""
        return tuple(dict.fromkeys(task.problem for tasks in self._tasks.values() for task in tasks))

    @cached_property
    def problems_in_parts(self) -> tuple[Problem, ...]:
        """The same, and those of step 0 in two parts."""
        own = [part for rank in range(self.ranks) for part in self.own_tasks(rank)]
        return tuple(dict.fromkeys((*self.problems, *(task.problem for tasks in own for task in tasks))))


def equal(length: int, ranks: int) -> list[int]:
    """How many rows each rank has: lengths that differ by one row at most."""
    ends = [length * i // ranks for i in range(ranks + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def shards(lengths: Sequence[int], kind: str) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each rank, of a sequence of which rank r has lengths[r] rows. kind: of KINDS."""
    return contiguous(lengths) if kind == "contiguous" else zigzag(lengths)


def contiguous(lengths: Sequence[int]) -> tuple[tuple[Chunk, ...], ...]:
    """Rank r has the r-th run of rows (Ring Attention, Liu, Zaharia, Abbeel 2023, arXiv 2310.01889).

    Under the causal mask rank r has work in r + 1 of the steps, and all wait for the last: efficiency (ranks + 1) / (2 ranks).
    """
    return tuple(joined(chunk) for chunk in _side_by_side(lengths))


def zigzag(lengths: Sequence[int]) -> tuple[tuple[Chunk, ...], ...]:
    """Rank r has chunks r and 2 ranks - 1 - r of 2 ranks (Zhu's ring-flash-attention; the head-tail division of Llama 3's context
    parallelism, arXiv 2407.21783). The first chunk is half of its rows, rounded up.

    Under the causal mask every rank then has the same work in every step: at step 0 its own triangle, later all queries by the
    first half of the keys of a lower rank, or the second half of the queries by all keys of a higher one. Only step 0 is masked.
    """
    ranks = len(lengths)
    halves = _side_by_side([(length + 1) // 2 for length in lengths] + [length // 2 for length in reversed(lengths)])
    return tuple(joined(halves[rank], halves[2 * ranks - 1 - rank]) for rank in range(ranks))


def joined(*chunks: Chunk) -> tuple[Chunk, ...]:
    """Chunks in rising order, without empty ones; two that touch are one."""
    found: list[Chunk] = []
    for start, stop in chunks:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return tuple(found)


def rows(chunks: tuple[Chunk, ...]) -> int:
    """How many rows the chunks have."""
    return sum(stop - start for start, stop in chunks)


# -- details ----------------------------------------------------------------------------------------------------------


def _side_by_side(sizes: Sequence[int]) -> list[Chunk]:
    """Chunks of these sizes, each after the one before."""
    return list(pairwise(accumulate(sizes, initial=0)))


#: A run of chunks: the index of its first row in the shard, and its chunks.
_Run = tuple[int, tuple[Chunk, ...]]


def _tasks(problem: Problem, queries: tuple[Chunk, ...], keys: tuple[Chunk, ...]) -> tuple[Task, ...]:
    """The fewest launches: of everything at once, by rows of rectangles, by columns, or one by one."""
    ways = []
    for q_runs in _divisions(queries):
        for k_runs in _divisions(keys):
            made = [_merged(problem, q, k) for q in q_runs for k in k_runs]
            if all(each is not False for each in made):
                ways.append(tuple(each for each in made if isinstance(each, Task)))
    return min(ways, key=len)


def _divisions(chunks: tuple[Chunk, ...]) -> list[list[_Run]]:
    """All chunks as one run, and each as a run of its own."""
    single: list[_Run] = []
    first = 0
    for chunk in chunks:
        single.append((first, (chunk,)))
        first += chunk[1] - chunk[0]
    return [[(0, chunks)], single] if chunks else [[]]


def _merged(problem: Problem, q_run: _Run, k_run: _Run) -> Task | None | bool:
    """One launch for a run of queries by a run of keys; None where no query sees a key, False where no one shift serves.

    Two shifts are the same mask on a rectangle where they are equal once held between "sees nothing" and "sees everything".
    """
    (q_first, queries), (k_first, keys) = q_run, k_run
    q_rows, k_rows = rows(queries), rows(keys)

    def problem_of(shift: int | None) -> Problem:
        sizes = {"seq_q": q_rows, "seq_kv": k_rows}
        return problem.with_(**sizes, causal=shift is not None, causal_shift=shift)

    if not problem.causal:
        return Task(q_first, k_first, problem_of(None))
    places, row = [], 0  # of each rectangle: its size, its place in the run, its own shift
    for q_start, q_stop in queries:
        column = 0
        for k_start, k_stop in keys:
            size = q_stop - q_start, k_stop - k_start
            places.append((size, column - row, _held(problem.causal_shift + q_start - k_start, *size)))
            column += size[1]
        row += q_stop - q_start
    if all(own == -size[0] for size, _, own in places):
        return None
    if all(own == size[1] - 1 for size, _, own in places):
        return Task(q_first, k_first, problem_of(None))
    for shift in dict.fromkeys(own + offset for _, offset, own in places):
        if all(_held(shift - offset, *size) == own for size, offset, own in places):
            return Task(q_first, k_first, problem_of(shift))
    return False


def _held(shift: int, q_rows: int, k_rows: int) -> int:
    return max(-q_rows, min(shift, k_rows - 1))
