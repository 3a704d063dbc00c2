"""A kernel on trial: inputs whose answer is known although they are new, and outputs judged in any launch, also while it is timed.

New inputs cost no reference. Attention has exact symmetries: batches and key heads (with their query heads) may change places; a column
of V, with that of O and dO, may change its sign, and then that of O and dV does; a column of Q and K together, and then that of dQ and dK
does, and no score. Moving and negating are exact in every storage type, so the rounding of a kernel stays the same too. Each launch drawn
gets such a change, from the operating system's entropy, on top of the last: in every head some column of V and some column of Q and K is
negated, so an earlier answer is wrong in every head. What comes out is changed back and compared with the first launch's, which was
judged against float64; a tensor of which an element is not the same is judged against float64 again.

In such a change no tensor is new alone, and no row is as it was: a kernel that finds an old answer by a part of its inputs gets through.
So V is new alone too (the sign of one column a head), and then Q, K or a backward pass's dO, in half the rows of one head, which has a
float64 reference of its own. That launch is on tensors that lie as no other's do, where the kernel takes strides: (batch, rows, heads,
head_dim), rows further apart, addresses that are 16-byte aligned only. What is timed is also launched a drawn number of times on the same
inputs, each judged.

What it does not see: a change of inputs on a GPU that is undone before the launches end; a kernel that knows all of this.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from ..array import Array, copied, every
from ..dataset.change import SIGNS, Change
from ..problem import READS
from . import budget
from .oracle import Oracle, Part
from .tensors import Bound, Outputs

#: Elements of outputs above which no copy is kept from turn to turn.
_KEPT = 1 << 26
#: Launches of the same inputs whose bits are compared where a kernel that promises the same bits gave others on a symmetric input.
_REPEATS = 8
#: How many launches on the same inputs follow what is timed, drawn from this range, and the seconds after which they end in any case:
#: on the CPU of all its threads together, which other processes do not lengthen.
_MANY, _MANY_SECONDS = (150, 300), {"cpu": 0.5, "cuda": 0.2}
#: As many launches at least must fit into these seconds: fewer show nothing that the launches before them do not.
_FEW = 8


class Trial:
    """A bound kernel after its first, judged launch: it can be timed (measure.sampling.Timed) and judged (measure.judged.Judged).

    inputs: as they are on the device (tensors.put). outputs: of the first launch. oracle: judges outputs on the original inputs.
    """

    def __init__(
        self, bound: Bound, oracle: Oracle, inputs: Mapping[str, Array], outputs: Outputs, arithmetic: str, tiles: Mapping[str, int]
    ) -> None:
        self.bound, self.oracle, self.inputs, self.outputs = bound, oracle, inputs, outputs
        self._class, self._tiles = arithmetic, tiles
        self.deterministic = bound.loaded.kernel.deterministic
        self._xp = bound.backend.xp
        self._change = Change.none(bound.problem)
        self._taken: list[tuple[Change, dict[str, Array]]] = []
        self._last: tuple[Change, dict[str, Array]] | None = None
        self._right: dict[str, Array] | None = None  # the last outputs that were right, as they were
        self._repeated = False
        self._draw = np.random.default_rng()
        self._clock = time.process_time if bound.backend.name == "cpu" else time.perf_counter

    @property
    def _parts(self) -> tuple[str, ...]:
        """The inputs that are new alone in a part of the tensors."""
        return tuple(name for name in ("Q", "K", "dO") if name in READS[self.bound.pass_])

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
        for change, outputs in taken:
            if why := self._wrong(change, outputs, first):
                return why
        if self.elements > _KEPT:
            self._last = self._right = None
        return ""

    def ended(self) -> str:
        """After all launches: guard bands whole, inputs as they were."""
        if name := self.bound.outside():
            return f"it wrote outside {name} in a launch after its first"
        for name, array in self.inputs.items():
            if not self.bound.tensors[name].holds(self._change.of(self._xp, name, _bits(array))):
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
        outputs, back = self._now(), self._change.back()
        restored = {name: back.of(self._xp, name, bits) for name, bits in outputs.items()}
        if wrong := self._over_budget(_others(restored, self._first())):
            return f"{_LEFT} ({wrong})"
        return _CARRIED if self.deterministic and not _same_bits(last, outputs) else ""

    def again(self) -> str:
        """Two launches more: with V new alone, over the outputs of the launch before, and with Q, K or dO new alone, on tensors that lie
        otherwise. Which of these, and what is drawn, is the same for a problem: the command of a failure fails again. Then as ended."""
        seed = zlib.crc32(self.bound.problem.describe().encode())
        self._draw = np.random.default_rng(seed)
        why = self._values() or self.ended()
        name = self._parts[seed % len(self._parts)]
        return why or ("" if self.elements > _KEPT else self._alone(name, not self.bound.plain) or self.ended())

    def further(self) -> str:
        """After what was timed: launches with V, Q, K and dO new alone, the last on tensors that lie otherwise, and between them one or,
        where launching and judging are quick, many that are not new: each is new beside the launch before."""
        start, seconds = self._clock(), _MANY_SECONDS[self.bound.backend.name]
        if (why := self._values() or self.ended()) or self.elements > _KEPT:
            return why
        quick = self._clock() - start < seconds / _FEW
        *names, last = random.SystemRandom().sample(self._parts, len(self._parts))
        many = random.SystemRandom().randrange(*_MANY) if quick else 1
        for name in names:
            if why := self._alone(name, False) or self.repeat(many if name is names[-1] else 1, seconds):
                return why
        return self._alone(last, not self.bound.plain) or self.ended()

    def in_schedules(self, times: int) -> str:
        """As `repeat`, each launch in another schedule of threads and blocks where the backend has any."""
        own: dict[str, Array] = {}
        for number in range(times + 1 if times else 0):
            self.bound.poison()
            with self.bound.backend.in_schedule(number):
                self.bound.launch()
            now = self._now()
            own = own or now
            if why := _UNSTEADY if self.deterministic and not _same_bits(own, now) else self.judge():
                return f"{why} (launch {number} of {times} with the same inputs)"
        return self.ended()

    def repeat(self, times: int, seconds: float = math.inf) -> str:
        """Launch as often on the same inputs, or until the seconds have passed, outputs poisoned: the same bits each time where the
        kernel promises that, else within the budget. Returns which rule is broken, or an empty text."""
        until = self._clock() + seconds
        for number in range(times):
            if self._clock() > until:
                break
            self.bound.poison()
            self.bound.launch()
            if why := self.judge():
                return f"{why} (launch {number + 1} of {times} with the same inputs)"
        return self.ended()

    # -- one input new alone --------------------------------------------------------------------------------------------

    def _values(self) -> str:
        change = Change.of_values(self.bound.problem, self._draw)
        self._put(change)
        self._change = change.after(self._change)
        self.bound.launch()
        why = self.judge()
        return why.replace(_ONCE, _PARTLY.format("V"), 1)

    def _alone(self, name: str, elsewhere: bool) -> str:
        """A launch with an input new alone, over poison. elsewhere: on tensors that lie otherwise, and where none is new alone too."""
        part = self._part(name)
        if not (part or elsewhere):
            return ""
        wrong, old = self._elsewhere(part) if elsewhere else self._with(part)
        if wrong and elsewhere:
            here, old = self._with(part)
            if not here:
                return f"{_CONTIGUOUS} ({wrong})"
        return wrong and f"{(_PARTLY if old else _OTHERS).format(name)} ({wrong})"

    def _part(self, name: str) -> Part | None:
        bound = self.bound
        bits = {n: t.bits() for n, t in bound.tensors.items()}
        return Part.drawn(self.oracle, bound.pass_, name, bits, bound.loaded.kernel.logits, self._draw)

    def _with(self, part: Part | None) -> tuple[str, bool]:
        """What is wrong of a launch in the same place, over poison, with a part new, which is then as it was; as _wrong_with."""
        kept = {name: copied(self._xp, self.bound.tensors[name].bits()[part.place[name]]) for name in part.inputs} if part else {}
        if part:
            self._into(part, {name: _bits(array) for name, array in part.inputs.items()})
        self.bound.poison()
        self.bound.launch()
        outputs = self._now()
        if part:
            self._into(part, kept)
        return self._wrong_with(part, outputs)

    def _into(self, part: Part, inputs: Mapping[str, Array]) -> None:
        """Write bits into the buffers, at a part's place."""
        with self.bound.writable():
            for name, new in inputs.items():
                tensor = self.bound.tensors[name]
                bits = tensor.bits()
                bits[part.place[name]] = self._xp.asarray(new)
                tensor.upload(bits)  # of pages they are a copy

    def _elsewhere(self, part: Part | None) -> tuple[str, bool]:
        """What is wrong of a launch on tensors that lie otherwise; as _wrong_with. Raises as Bound.run does."""
        here = self.bound
        inputs = {name: copied(self._xp, here.tensors[name].values()) for name in READS[here.pass_]}
        if part:
            for name, array in part.inputs.items():
                _bits(inputs[name])[part.place[name]] = self._xp.asarray(_bits(array))
        bound = Bound(here.backend, here.loaded, here.problem, inputs, here)
        bound.checked()
        return self._wrong_with(part, {name: copied(self._xp, bound.tensors[name].bits()) for name in bound.writes})

    def _wrong_with(self, part: Part | None, outputs: dict[str, Array]) -> tuple[str, bool]:
        """The first tensor that is wrong, in words, of outputs of a launch with a part new; and whether it is the answer to the inputs
        before, where the part lies."""
        first, back = self._first(), self._change.back()
        if part:
            own = {name: copied(self._xp, bits[part.place[name]]) for name, bits in outputs.items()}
            arrays = {name: bits.view(self.bound.tensors[name].rows().dtype) for name, bits in own.items()}
            verdicts = part.oracle.judge(Outputs(part.oracle.problem, {}, arrays), self._class, self._tiles).values()
            # No moments: a head has too few rows of its own, and constant ones share an error that the first launch had too. And where
            # all rows of a head are equal and cancel, its own budget is that of one small number.
            for verdict in verdicts:
                if not verdict.max_abs <= max(verdict.budget, self.oracle.largest(verdict.tensor, self._class)):
                    before = self._change.of(self._xp, verdict.tensor, first[verdict.tensor])[part.place[verdict.tensor]]
                    return budget.message(verdict), _alike(own[verdict.tensor], before)
            for name, bits in outputs.items():  # of the other heads the answer is known
                bits[part.place[name]] = self._change.of(self._xp, name, first[name])[part.place[name]]
        return self._over_budget(_others({name: back.of(self._xp, name, bits) for name, bits in outputs.items()}, first)), False

    # -- details --------------------------------------------------------------------------------------------------------

    def _put(self, change: Change) -> None:
        with self.bound.writable():
            for name in READS[self.bound.pass_]:
                tensor = self.bound.tensors[name]
                tensor.upload(change.of(self._xp, name, tensor.bits()))

    def _now(self) -> dict[str, Array]:
        return {name: copied(self._xp, self.bound.tensors[name].bits()) for name in self.bound.writes}

    def _first(self) -> dict[str, Array]:
        """The bits of the first launch's outputs, on the device."""
        return {name: _bits(array) for name, array in self.outputs.on(self._xp).items()}

    def _wrong(self, change: Change, outputs: dict[str, Array], first: Mapping[str, Array]) -> str:
        """Which rule outputs break, if any. first: bits of the first launch's, on the device."""
        last, self._last = self._last, (change, outputs)
        back = change.back()
        restored = {name: back.of(self._xp, name, bits) for name, bits in outputs.items()}
        if others := _others(restored, first):
            if wrong := self._over_budget(others):
                return self._named(wrong)
            if self.deterministic and not self._repeated:
                self._repeated = True
                if why := self._unsteady(first):
                    return why
        if self.deterministic and last and last[0] is change and not _same_bits(last[1], outputs):
            return _UNSTEADY
        self._right = outputs
        return ""

    def _over_budget(self, restored: Mapping[str, Array]) -> str:
        """The first tensor that float64 does not confirm, in words. restored: none, or those that differ from the first launch's."""
        if not restored:
            return ""
        arrays = {name: bits.view(self.bound.tensors[name].rows().dtype) for name, bits in restored.items()}
        outputs = Outputs(self.bound.problem, {}, arrays)
        verdicts = self.oracle.judge(outputs, self._class, self._tiles).values()
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
        """The rule that a wrong launch broke: from what six launches more do on new inputs, four over poison, each followed by two on the
        same inputs, and two over answers; and where all of them are wrong, one on the first inputs."""
        right: dict[bool, list[bool]] = {True: [], False: []}
        kinds, steady = set(), True
        for poison in (True, True, True, True, False, False):
            self.refresh(True, poison)
            good, now = self._relaunched()
            right[poison].append(good)
            if poison and not good:
                old = any(_alike(now[n], each[n]) for n in now if n in SIGNS for each in (self._first(), self._right or self._first()))
                kinds.add("nothing" if _untouched(now) else "old" if old else "other")
            for _ in range(2 * poison):  # two: after one, all launches on new inputs would be every second launch
                self.bound.poison()
                steady &= self._relaunched()[0] == good
        if kinds == {"other"} and steady and not any(right[True]):
            self._put(self._change.back())
            self._change = Change.none(self.bound.problem)
            self.bound.poison()
            if self._relaunched()[0]:
                return f"{_BY_INPUTS.format('the first inputs')}: of {len(right[True])} others it is wrong on all ({wrong})"
        return f"{_rule(right, kinds, steady)} ({wrong})"

    def _relaunched(self) -> tuple[bool, dict[str, Array]]:
        """Whether a launch on the inputs as they are is right, and its outputs' bits."""
        self.bound.launch()
        now, back = self._now(), self._change.back()
        restored = {name: back.of(self._xp, name, bits) for name, bits in now.items()}
        return not self._over_budget(_others(restored, self._first())), now


_BY_INPUTS = "it is right on {} only, whatever the number of the launch"
_ONCE = "it was wrong in a launch after its first, and right when launched again"
_PARTLY = "it gives the answer to earlier inputs where {} alone is new"
_OTHERS = "it is wrong on other inputs, of which {} is new"
_UNSTEADY = "it promises deterministic = true, and two launches on the same inputs gave different bits"
_LEFT = "it is right only by what earlier launches left in a module global: loaded afresh, its first launch is wrong"
_CONTIGUOUS = (
    "it is right on contiguous tensors only: on (batch, rows, heads, head_dim) strides, rows further apart and addresses that are"
    " 16-byte aligned it is wrong"
)
_CARRIED = (
    "it gives other bits than its first launch did on the same inputs: a module global or a zero_once workspace carries something over"
)


def _rule(right: Mapping[bool, list[bool]], kinds: set[str], steady: bool) -> str:
    """The name of a rule. right: whether launches over poisoned outputs (True), and over others (False), were right; kinds: what the
    wrong ones over poison left there: nothing, an old answer, or another one; steady: whether a launch on the same inputs did the same."""
    if all(right[True]) and not all(right[False]):
        return "it gives another answer when its outputs, or workspaces, hold those of an earlier launch"
    if any(right[True]) and not all(right[True]):
        numbers = ", ".join(str(i + 1) for i, good in enumerate(right[True]) if not good)
        if steady:
            return f"{_BY_INPUTS.format('some inputs')}: of {len(right[True])} that are new it is wrong on {numbers}, twice"
        return f"it is right in some launches only: of {len(right[True])} in a row on new inputs, it is wrong in {numbers}"
    if all(right[True]):
        return _ONCE
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


def _untouched(outputs: Mapping[str, Array]) -> bool:
    """Whether outputs are still poison everywhere."""
    return all(every(~bits == 0) for bits in outputs.values())
