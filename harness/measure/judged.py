"""What is timed is what is judged: launches drawn at random among the timed ones get inputs they have not seen, and are judged.

A kernel cannot tell which of its launches is judged. Those drawn (a few of each turn, two of them one after the other where a turn is
long enough) find other inputs in the same buffers, and outputs that are poisoned or hold the answer to the inputs before. The launches
after them go on with these inputs, and the last of each turn is judged as it stands. The times of all count.

Work that is skipped for repeated inputs changes no answer, only the time. So the times on new and on repeated inputs are compared. Where
their medians are a factor `apart` from each other, both are measured again, DOUBTS of each in a random order, each after the same writes
to the inputs: the caches are alike. One kind slower in every single launch than the other in all of its own is no chance: for launches
that do not depend on their inputs' history every order is as likely, so it happens with probability 2 / C(24, 12) = 7.4e-7. The order
is drawn from the operating system's entropy: no kernel and no seed knows it.

At the end the module is loaded once more, and its first launch is judged: what other problems left in its globals helps no kernel. Then
come launches that no time is taken of (Judged.further).
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..fault import KernelFault

#: Launches of each kind in the second look at the times.
DOUBTS = 12
#: The elements of outputs that a turn's judged launches may have together, where that is more than two launches; and from which on one
#: launch of a turn is kept, for its copy of the outputs takes much memory.
ELEMENTS, LARGE = 1 << 24, 1 << 28
#: The most launches drawn in a turn, beside its last.
MOST = 8


class Timed(Protocol):
    """What can be measured: a kernel or a peer, its tensors in place."""

    def enqueue(self) -> Callable[[], float]:
        """Enqueue a run between two events in its own stream. The function returned waits for it and gives device seconds."""
        ...

    def call(self) -> float:
        """Host seconds to enqueue one run (which has ended when this returns)."""
        ...

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """Capture the run as a CUDA graph; the function returned is enqueue by replaying it. None where it cannot be captured."""
        ...


@runtime_checkable
class Judged(Timed, Protocol):
    """What can be timed and judged meanwhile (check.trial.Trial). Texts returned say which rule is broken, and are empty otherwise."""

    @property
    def elements(self) -> int:
        """Elements of its outputs."""
        ...

    def refresh(self, fresh: bool, poison: bool) -> None:
        """Enqueue new inputs, or where not fresh the same again; poison the outputs and workspaces, or leave them as they are."""
        ...

    def take(self) -> None:
        """Enqueue a copy of the outputs, for `judge`."""
        ...

    def judge(self) -> str:
        """Judge the outputs taken and those that are there now. Nothing is enqueued but what it enqueues itself."""
        ...

    def fresh(self) -> str:
        """Launch a fresh load of its module on the same inputs, and judge that."""
        ...

    def further(self) -> str:
        """Launches that are not timed: with one input new alone, with other strides, and a drawn number on the same inputs."""
        ...

    def ended(self) -> str:
        """Whether inputs are unchanged and guard bands whole after all launches."""
        ...


class State(NamedTuple):
    """What a launch finds: inputs that it has not seen, poisoned outputs."""

    fresh: bool
    poison: bool


class Watch:
    """Draws the judged launches of one contender, and holds their times beside the others'. None are drawn of one that is None."""

    def __init__(self, contender: Judged | None, apart: float) -> None:
        self.contender, self.apart, self.broken = contender, apart, ""
        self._draw = random.SystemRandom()
        self._block: list[State] = []
        self._fresh: list[float] = []
        self._same: list[float] = []

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A launch that ends with a fault breaks a rule, if it is of a kernel that passed. Whatever ends more than that kernel is raised:
        the subclasses of KernelFault, as a lost context."""
        try:
            yield
        except KernelFault as fault:
            if self.contender is None or type(fault) is not KernelFault:
                raise
            self.broken = " ".join(f"{fault.what}, in a launch after its first: {fault.why}".split())

    def drawn(self, count: int) -> dict[int, State]:
        """Which of a turn's launches are drawn, by number, and what each finds.

        A turn of one launch is drawn always. Of three such turns one repeats its inputs, the first or the last: two launches one after
        the other have new ones, whichever the kernel counts.
        """
        if self.contender is None:
            return {}
        if count <= 1:
            return dict.fromkeys(range(count), self._next())
        elements = self.contender.elements
        wanted = min(MOST, (count + 1) // 2, max(2, ELEMENTS // elements) if elements < LARGE else 1)
        first = self._draw.randrange(count - 1)
        pair = [first, first + 1][:wanted]
        others = self._draw.sample([i for i in range(count) if i not in pair], wanted - len(pair))
        poisoned = [bool(i % 2) for i in range(wanted)]
        self._draw.shuffle(poisoned)
        return {i: State(True, poison) for i, poison in zip(sorted(pair + others), poisoned, strict=True)}

    def _next(self) -> State:
        if not self._block:
            new = [State(True, False), State(True, True)]
            self._draw.shuffle(new)
            same = [State(False, False)]
            self._block = new + same if self._draw.random() < 0.5 else same + new
        return self._block.pop()

    def prepare(self, state: State) -> None:
        """Enqueue what a launch finds."""
        assert self.contender
        self.contender.refresh(*state)

    def keep(self) -> None:
        """Enqueue a copy of what a launch wrote."""
        assert self.contender
        self.contender.take()

    def seen(self, seconds: Sequence[float], drawn: dict[int, State]) -> None:
        """Judge a turn that has ended."""
        for i, sample in enumerate(seconds):
            (self._fresh if i in drawn and drawn[i].fresh else self._same).append(sample)
        self.broken = self.contender.judge() if self.contender else ""

    def close(self, sample: Callable[[], float]) -> None:
        """After the last turn: compare the times, a fresh load, inputs and guard bands. sample runs one launch, timed as in a turn."""
        if self.broken or self.contender is None:
            return
        if self._fresh and self._same and _factor(self._fresh, self._same) >= self.apart:
            self.broken = self._doubt(self.contender, sample)
        self.broken = self.broken or self.contender.fresh() or self.contender.ended() or self.contender.further()

    def _doubt(self, contender: Judged, sample: Callable[[], float]) -> str:
        order = [True, False] * DOUBTS
        self._draw.shuffle(order)
        times: dict[bool, list[float]] = {True: [], False: []}
        for fresh in order:
            contender.refresh(fresh, False)
            times[fresh].append(sample())
            if all(times.values()) and min(times[True]) <= max(times[False]) and min(times[False]) <= max(times[True]):
                return contender.judge()
        if _factor(times[True], times[False]) < self.apart:
            return contender.judge()
        new, same = (statistics.median(times[fresh]) * 1e3 for fresh in (True, False))
        kind = "skips work for inputs that it has seen" if same < new else "does less for inputs that it has not seen"
        return f"it {kind}: {same:.3g} ms on repeated inputs, {new:.3g} ms on new ones"


def _factor(a: Sequence[float], b: Sequence[float]) -> float:
    """How far apart two medians are, as a factor of at least 1."""
    one, other = sorted((statistics.median(a), statistics.median(b)))
    return other / one if one > 0 else 1.0
