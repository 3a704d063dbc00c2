"""A kernel on trial: inputs whose answer is known although they are new, and outputs judged in any launch, also while it is timed.

New inputs cost no reference. Attention has exact symmetries: batches and key heads (with their query heads) may change places; a column
of V, with that of O and dO, may change its sign, and then that of O and dV does; a column of Q and K together, and then that of dQ and dK
does, and no score. Moving and negating are exact in every storage type, so the rounding of a kernel stays the same too. Each launch drawn
gets such a change, from the operating system's entropy, on top of the last: in every head some column of V and some column of Q and K is
negated, so an earlier answer is wrong in every head. What comes out is changed back and compared with the first launch's, which was
judged against float64; a tensor of which an element is not the same is judged against float64 again.

What it does not see: a change of inputs on a GPU that is undone before the launches end; a kernel that knows these symmetries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule, copied, every
from ..problem import READS, WRITES, Problem
from . import budget
from .oracle import Oracle
from .tensors import Bound, Outputs

#: Tensors whose columns change their sign with V's, and those with Q's and K's.
_SIGNS = {"V": "values", "O": "values", "dO": "values", "dV": "values", "Q": "scores", "K": "scores", "dQ": "scores", "dK": "scores"}
#: Elements of outputs above which no copy is kept from turn to turn.
_KEPT = 1 << 26
#: Launches of the same inputs whose bits are compared where a kernel that promises the same bits gave others on a symmetric input.
_REPEATS = 8


@dataclass(frozen=True)
class Change:
    """Inputs as they are in the buffers: batch b and key head h are the original's batches[b] and heads[h], with the columns negated
    where signs["values"] and signs["scores"], bool (batch, heads_kv, head_dim), are set."""

    batches: Array
    heads: Array
    signs: Mapping[str, Array]

    @classmethod
    def none(cls, problem: Problem) -> Change:
        """The original."""
        flat = (problem.batch, problem.heads_kv, problem.head_dim)
        return cls(np.arange(flat[0]), np.arange(flat[1]), {name: np.zeros(flat, bool) for name in ("values", "scores")})

    @classmethod
    def drawn(cls, problem: Problem) -> Change:
        """A new one: in every head at least one column of each kind changes its sign."""
        draw = np.random.default_rng()
        flat = (problem.batch, problem.heads_kv, problem.head_dim)
        signs = {}
        for name in ("values", "scores"):
            signs[name] = draw.random(flat) < 0.5
            np.put_along_axis(signs[name], draw.integers(0, flat[2], (*flat[:2], 1)), True, axis=-1)
        return cls(draw.permutation(flat[0]), draw.permutation(flat[1]), signs)

    def after(self, before: Change) -> Change:
        """Both as one, this one applied last."""
        place = np.ix_(self.batches, self.heads)
        signs = {name: before.signs[name][place] ^ mask for name, mask in self.signs.items()}
        return Change(before.batches[self.batches], before.heads[self.heads], signs)

    def back(self) -> Change:
        """The change that undoes this one."""
        batches, heads = np.argsort(self.batches), np.argsort(self.heads)
        return Change(batches, heads, {name: mask[np.ix_(batches, heads)] for name, mask in self.signs.items()})

    def of(self, xp: ArrayModule, name: str, bits: Array) -> Array:
        """A tensor changed: its elements' bits, unsigned integers (batch, heads, rows[, head_dim]), in a new array."""
        group = bits.shape[1] // len(self.heads)
        heads = (self.heads[:, None] * group + np.arange(group)).reshape(-1)
        places = (self.batches[:, None] * bits.shape[1] + heads).reshape(-1)  # one index: CuPy compiles four kernels for two of them
        moved: Array = bits.reshape(-1, *bits.shape[2:])[xp.asarray(places)].reshape(bits.shape)
        if name in _SIGNS:
            mask = np.repeat(self.signs[_SIGNS[name]], group, axis=1)[:, :, None, :]
            moved ^= xp.asarray(mask.astype(bits.dtype) << np.array(8 * bits.dtype.itemsize - 1, bits.dtype))
        return moved


class Trial:
    """A bound kernel after its first, judged launch: it can be timed (measure.sampling.Timed) and judged (measure.judged.Judged).

    inputs: as they are on the device (tensors.put). outputs: of the first launch. oracle: judges outputs on the original inputs.
    """

    def __init__(self, bound: Bound, oracle: Oracle, inputs: Mapping[str, Array], outputs: Outputs, arithmetic: str, tile: int) -> None:
        self.bound, self.oracle, self.inputs, self.outputs = bound, oracle, inputs, outputs
        self._class, self._tile = arithmetic, tile
        self.deterministic = bound.loaded.kernel.deterministic
        self._xp = bound.backend.xp
        self._change = Change.none(bound.problem)
        self._taken: list[tuple[Change, dict[str, Array]]] = []
        self._last: tuple[Change, dict[str, Array]] | None = None
        self._right: dict[str, Array] | None = None  # the last outputs that were right, as they were
        self._repeated = False

    @property
    def elements(self) -> int:
        """Elements of its outputs."""
        return sum(math.prod(self.bound.problem.shape(name)) for name in self.outputs)

    # -- as what is timed -----------------------------------------------------------------------------------------------

    def enqueue(self) -> Callable[[], float]:
        """As Bound.enqueue."""
        return self.bound.enqueue()

    def call(self) -> float:
        """As Bound.call."""
        return self.bound.call()

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """As Bound.graph."""
        return self.bound.graph()

    # -- as what is judged ----------------------------------------------------------------------------------------------

    def refresh(self, fresh: bool, poison: bool) -> None:
        """Enqueue new inputs into the buffers, or where not fresh the same again by the same writes; with poison, poison the outputs."""
        change = (Change.drawn if fresh else Change.none)(self.bound.problem)
        self._put(change)
        if fresh:
            self._change = change.after(self._change)
        if poison:
            self.bound.poison()

    def take(self) -> None:
        """Enqueue a copy of the outputs, to be judged."""
        self._taken.append((self._change, self._now()))

    def judge(self) -> str:
        """Judge the outputs taken since the last time, and those of the last launch. Returns which rule is broken, or an empty text."""
        taken, self._taken = [*self._taken, (self._change, self._now())], []
        first = self._first()
        for change, found in taken:
            if why := self._wrong(change, found, first):
                return why
        if self.elements > _KEPT:
            self._last = self._right = None
        return ""

    def ended(self) -> str:
        """After all launches: guard bands whole, inputs as they were."""
        if name := self.bound.outside():
            return f"it wrote outside {name} in a launch after its first"
        back = self._change.back()
        for name, array in self.inputs.items():
            now = back.of(self._xp, name, self.bound.tensors[name].bits())
            if not every(now == _bits(array)):
                if shared := self.oracle.changed():
                    return f"{shared}, of which every kernel is given a copy, was changed by it or by one before it: run it alone"
                return f"it changed its input {name} in a launch after its first"
        return ""

    def fresh(self) -> str:
        """One launch of a fresh load of the module, on the inputs of the last launch: right, and the same bits where that is promised.

        A launch of a module that other problems have used may be right only by what they left there.
        """
        last = self._now()
        with self.bound.fresh():
            self.bound.poison()
            self.bound.launch()
        found, back = self._now(), self._change.back()
        restored = {name: back.of(self._xp, name, bits) for name, bits in found.items()}
        if wrong := self._over_budget(_others(restored, self._first())):
            return f"{_LEFT} ({wrong})"
        return _CARRIED if self.deterministic and not _same_bits(last, found) else ""

    def again(self) -> str:
        """One launch more, on new inputs, over the outputs of the launch before; then as judge and ended."""
        self.refresh(True, False)
        self.bound.launch()
        return self.judge() or self.ended()

    def repeat(self, times: int) -> str:
        """Launch as often on the same inputs, outputs poisoned: the same bits each time where the kernel promises that, else within
        the budget. Returns which rule is broken, or an empty text."""
        for number in range(times):
            self.bound.poison()
            self.bound.launch()
            if why := self.judge():
                return f"{why} (launch {number + 1} of {times} with the same inputs)"
        return self.ended()

    # -- details --------------------------------------------------------------------------------------------------------

    def _put(self, change: Change) -> None:
        with self.bound.writable():
            for name in READS[self.bound.pass_]:
                bits = self.bound.tensors[name].bits()
                bits[:] = change.of(self._xp, name, bits)

    def _now(self) -> dict[str, Array]:
        return {name: copied(self._xp, self.bound.tensors[name].bits()) for name in WRITES[self.bound.pass_]}

    def _first(self) -> dict[str, Array]:
        """The bits of the first launch's outputs, on the device."""
        return {name: _bits(array) for name, array in self.outputs.on(self._xp).items()}

    def _wrong(self, change: Change, found: dict[str, Array], first: Mapping[str, Array]) -> str:
        """Which rule outputs break, if any. first: bits of the first launch's, on the device."""
        last, self._last = self._last, (change, found)
        back = change.back()
        restored = {name: back.of(self._xp, name, bits) for name, bits in found.items()}
        if others := _others(restored, first):
            if wrong := self._over_budget(others):
                return self._named(wrong)
            if self.deterministic and not self._repeated:
                self._repeated = True
                if why := self._unsteady(first):
                    return why
        if self.deterministic and last and last[0] is change and not _same_bits(last[1], found):
            return _UNSTEADY
        self._right = found
        return ""

    def _over_budget(self, restored: Mapping[str, Array]) -> str:
        """The first tensor that float64 does not confirm, in words. restored: none, or those that differ from the first launch's."""
        if not restored:
            return ""
        arrays = {name: bits.view(self.bound.tensors[name].rows().dtype) for name, bits in restored.items()}
        outputs = Outputs(self.bound.problem, {}, arrays)
        verdicts = self.oracle.judge(outputs, self._class, self._tile).values()
        return next((budget.message(verdict) for verdict in verdicts if not verdict.passed), "")

    def _unsteady(self, first: Mapping[str, Array]) -> str:
        """Which rule the bits of launches on the original inputs break, if any."""
        back, self._change = self._change.back(), Change.none(self.bound.problem)
        self._put(back)
        seen: list[dict[str, Array]] = []
        for _ in range(_REPEATS):
            self.bound.launch()
            seen.append(self._now())
        if not all(_same_bits(seen[0], each) for each in seen[1:]):
            return _UNSTEADY
        return "" if _same_bits(first, seen[0]) else _CARRIED

    def _named(self, wrong: str) -> str:
        """The rule that a wrong launch broke: from what six launches more do on new inputs, four over poison and two over answers."""
        first = self._first()
        right: dict[bool, list[bool]] = {True: [], False: []}
        kinds = set()
        for poison in (True, True, True, True, False, False):
            self.refresh(True, poison)
            self.bound.launch()
            now, back = self._now(), self._change.back()
            restored = {name: back.of(self._xp, name, bits) for name, bits in now.items()}
            good = not self._over_budget(_others(restored, first))
            right[poison].append(good)
            if poison and not good:
                old = any(_alike(now[n], each[n]) for n in now if n in _SIGNS for each in (first, self._right or first))
                kinds.add("nothing" if _untouched(now) else "old" if old else "other")
        return f"{_rule(right, kinds)} ({wrong})"


_UNSTEADY = "it promises deterministic = true, and two launches on the same inputs gave different bits"
_LEFT = "it is right only by what earlier launches left in a module global: loaded afresh, its first launch is wrong"
_CARRIED = (
    "it gives other bits than its first launch did on the same inputs: a module global or a zero_once workspace carries something over"
)


def _rule(right: Mapping[bool, list[bool]], kinds: set[str]) -> str:
    """The name of a rule. right: whether launches over poisoned outputs (True), and over others (False), were right; kinds: what the
    wrong ones over poison left there: nothing, an old answer, or another one."""
    if all(right[True]) and not all(right[False]):
        return "it gives another answer when its outputs, or workspaces, hold those of an earlier launch"
    if any(right[True]) and not all(right[True]):
        numbers = ", ".join(str(i + 1) for i, good in enumerate(right[True]) if not good)
        return f"it is right in some launches only: of {len(right[True])} in a row on new inputs, it is wrong in {numbers}"
    if all(right[True]):
        return "it was wrong in a launch after its first, and right when launched again"
    if kinds == {"nothing"}:
        return "it was right in its first launches only: now it writes nothing"
    if "old" in kinds:
        return "it gives the answer to earlier inputs: it keeps one, in a module global or a workspace"
    return "it was right in its first launches only: what it gives now is not the answer to its inputs"


def _bits(array: Array) -> Array:
    """The bits of a contiguous array's elements, as a view of unsigned integers."""
    return array.view(np.dtype(f"<u{array.dtype.itemsize}"))


def _alike(a: Array, b: Array) -> bool:
    """Whether all values are the same, from their bits: NaN equals NaN, and -0 equals 0. 16 bits are taken for bfloat16, whose infinity is
    the larger number: two float16 NaNs of different bits are not alike, and judged again."""
    if every(a == b):
        return True
    size = a.dtype.type((1 << (8 * a.dtype.itemsize - 1)) - 1)  # a scalar: CuPy's arrays take no array of numpy's
    infinity = a.dtype.type({2: 0x7F80, 4: 0x7F800000, 8: 0x7FF0000000000000}[a.dtype.itemsize])
    size_a, size_b = a & size, b & size
    same = (a == b) | ((size_a | size_b) == 0) | ((size_a > infinity) & (size_b > infinity))
    return every(same)


def _others(restored: Mapping[str, Array], first: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs that are not alike with the first launch's. Of the others the verdict is known: theirs."""
    return {name: bits for name, bits in restored.items() if not _alike(bits, first[name])}


def _same_bits(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return all(every(a[name] == b[name]) for name in b)


def _untouched(found: Mapping[str, Array]) -> bool:
    """Whether outputs are still poison everywhere."""
    return all(every(~bits == 0) for bits in found.values())
