"""The test oracle: the float64 reference of a problem on given inputs and the baselines of each arithmetic class, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from ..array import Array, ArrayModule, every, to_host
from ..backends import Backend
from ..dataset import generate
from ..dataset.folder import check_size
from ..dataset.storage import STORAGE, round_to, widen
from ..fault import UsageFault
from ..kernel import Kernel
from ..problem import MODES, PASSES, READS, WRITES, Problem
from . import baselines, budget, memory, reference
from .tensors import Outputs, put

#: Elements of the largest output up to which outputs are compared on the CPU: on a GPU a verdict is some 300 small kernels and 50 waits.
ON_HOST = 1 << 16

#: Scores, and elements of a tensor, up to which `run` computes the whole oracle on the CPU: those of the default problem.
SMALL = 1 << 22


def small(problem: Problem) -> bool:
    """Whether `run` judges a problem on the CPU, by the same code on numpy, wherever its kernels run.

    That takes seconds at most. On a GPU the reference, baselines and verdicts are dozens of CuPy's kernels, and a first run would wait
    until NVRTC has compiled them, one after another. Verbs that judge many problems compute all of them on the device.
    """
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    return max(scores, *(math.prod(problem.shape(name)) for name in ("Q", "K"))) <= SMALL


#: Rows of a head that are enough for what CuPy compiles, which depends on them only by being more than one; batches and key heads likewise.
ROWS, SOME = 512, 2

#: Scores of a key head up to which a part of a problem gets a reference of its own.
PART = 1 << 26
#: The largest score, by row norms, for which one is drawn: beyond it float32 rounds scores by whole units, so of two keys whose scores are
#: near each other a right kernel may give the softmax to the other one, and among rows newly drawn there is such a pair in time.
STEEP = 1 << 20


@dataclass
class Oracle:
    """The float64 reference of a problem on given inputs, and the baselines of each arithmetic class, each computed once.

    inputs: host storage arrays Q, K, V and, for a backward pass, dO. tolerance: an absolute limit besides the budget (budget.compare).
    xp: where to compute; on cupy the inputs are copied to the GPU. progress receives what is computed, and what judging does.
    norms: the largest row norms of Q and K, once contender.check_logits has found them.
    """

    problem: Problem
    inputs: Mapping[str, Array]
    tolerance: float | None = None
    xp: ArrayModule = np
    progress: Callable[[str], None] = lambda text: None
    norms: dict[str, float] = field(default_factory=dict)
    _baselines: dict[str, list[dict[str, Array]]] = field(default_factory=dict)
    _limits: dict[tuple[str, str], budget.Limits] = field(default_factory=dict)
    _limits_on_host: dict[tuple[str, str], budget.Limits] = field(default_factory=dict)
    _on_host: dict[str, list[dict[str, Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = {name: put(self.xp, array) for name, array in self.inputs.items()}
        self.reference = reference.reference(self.xp, self.problem, self._device, self.progress)

    def judge(self, outputs: Mapping[str, Array], arithmetic: str, tiles: Mapping[str, int] | None = None) -> dict[str, budget.Verdict]:
        """A verdict for each output, storage arrays, of a kernel of an arithmetic class. tiles: as budget.compare takes them."""
        if arithmetic not in self._baselines:
            found: list[dict[str, Array]] = []
            if self.problem.dtype != "float64":
                found = baselines.baselines(self.xp, self.problem, self._device, arithmetic, self.progress)
            self._baselines[arithmetic] = found
        whole = [
            name for names in map(self.problem.writes, PASSES) if set(names) & set(outputs) for name in names
        ]  # of the passes: some may be left out
        if max(math.prod(self.problem.shape(name)) for name in whole) <= ON_HOST:
            if arithmetic not in self._on_host:
                self._on_host[arithmetic] = [{name: to_host(array) for name, array in each.items()} for each in self._baselines[arithmetic]]
            host = self._on_host[arithmetic], self.tolerance
            return budget.compare(self._host_reference, dict(outputs), *host, tiles, arithmetic, self._limits_on_host)
        here = self._baselines[arithmetic], self.tolerance
        return budget.compare(self.reference, self._on(outputs), *here, tiles, arithmetic, self._limits)

    def largest(self, tensor: str, arithmetic: str) -> float:
        """The largest error that an element of a tensor may have, 0 where none of that class has been judged."""
        limits = self._limits_on_host.get((tensor, arithmetic)) or self._limits.get((tensor, arithmetic))
        return min(limits.largest, math.inf if self.tolerance is None else self.tolerance) if limits else 0.0

    def _on(self, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs where this oracle computes."""
        return outputs.on(self.xp) if isinstance(outputs, Outputs) else {name: put(self.xp, array) for name, array in outputs.items()}

    @cached_property
    def _host_reference(self) -> reference.Reference:
        """The reference in host memory."""
        values = {name: to_host(array) for name, array in self.reference.values.items()}
        rows = self.reference.rows and {name: to_host(array) for name, array in self.reference.rows.items()}
        noise = {name: to_host(array) for name, array in self.reference.row_noise.items()}
        return replace(self.reference, xp=np, values=values, rows=rows, row_noise=noise, products=to_host(self.reference.products))

    def changed(self) -> str:
        """The input whose copy in device memory, of which all contenders are given theirs, is not what it was; empty where none is.

        A kernel that writes far outside its tensors may hit it. The next ones would then be accused.
        """
        if self.xp is np:
            return ""
        there = ((name, put(self.xp, array), self._device[name]) for name, array in self.inputs.items())
        return next((name for name, was, now in there if not every(was.view(np.uint8) == now.view(np.uint8))), "")

    def error_maps(self, outputs: Mapping[str, Array], verdicts: Mapping[str, budget.Verdict]) -> dict[str, Array]:
        """The |error| map (budget.error_map) of each output that failed."""
        failed = [name for name, verdict in verdicts.items() if not verdict.passed]
        got = self._on(outputs) if failed else {}
        return {name: budget.error_map(self.reference, name, got[name]) for name in failed}

    def inputs_of(self, pass_: str, forward: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """The host storage arrays that a pass reads, by name.

        O and logsumexp of a backward pass are those of `forward`, by default the reference's, rounded to storage.
        """
        given = dict(self.inputs)
        if pass_ == "backward":
            given |= self.forward_outputs if forward is None else forward
        return {name: given[name] for name in READS[pass_]}

    @cached_property
    def _rounded(self) -> dict[str, Array]:
        """The reference's O and logsumexp rounded to storage, arrays of xp. Raises UsageFault where the reference has a sample of rows."""
        if self.reference.rows is not None:
            what = f"a backward pass alone on {self.problem.describe()}"
            raise UsageFault(
                what, "it reads O of all rows, and at this length the reference is of a sample", "--mode both: it reads its own O"
            )
        return {name: round_to(self.xp, self.reference[name], self.problem.tensor_dtype(name)) for name in ("O", "logsumexp")}

    @cached_property
    def forward_outputs(self) -> dict[str, Array]:
        """The reference's O and logsumexp rounded to storage, host arrays."""
        return {name: to_host(array).view(STORAGE[self.problem.tensor_dtype(name)]) for name, array in self._rounded.items()}

    def placed(self, xp: ArrayModule, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs of a pass, host storage arrays, as arrays of xp: of what :meth:`inputs_of` gives, the one that all contenders share."""
        mine, here = dict(self.inputs), dict(self._device)
        if "forward_outputs" in vars(self):  # else nobody has them
            mine, here = mine | self.forward_outputs, here | self._rounded
        shared = [name for name, array in inputs.items() if xp is self.xp and array is mine.get(name)]
        return {name: here[name] if name in shared else put(xp, array) for name, array in inputs.items()}


def arithmetic_of(problem: Problem, kernel: Kernel | None = None) -> str:
    """The class of arithmetic that a kernel, or None: a peer, is judged by and tables name; f64 on float64, whatever the header says."""
    if problem.dtype == "float64":
        return "f64"
    if kernel:
        return kernel.arithmetic_for(problem.dtype)
    return "f32" if problem.dtype == "float32" else "p8" if problem.is_float8 else "p16"


def oracle_for(
    problem: Problem, backend: Backend, mode: str, seed: int = 42, progress: Callable[[str], None] = lambda text: None
) -> Oracle:
    """The oracle of inputs generated in memory, for a mode. Raises UsageFault where the problem is too large for this machine."""
    if backend.xp is np:
        memory.check(problem, MODES[mode])
    else:
        check_size(problem)
    names = ("Q", "K", "V") if mode == "forward" else generate.INPUTS
    progress("draws the inputs")
    # On the CPU the shapes of a sweep run in forks, which keep nothing for each other, and memory.check counts one set of inputs.
    inputs = generate.inputs(problem, seed, names) if backend.xp is np else generate.kept(problem, seed, names)
    return Oracle(problem, inputs, None, backend.xp, progress)


def few(problem: Problem) -> Problem:
    """A problem whose oracle compiles the same on a GPU: of the same type, width, mask and grouping, with few heads and rows."""
    kv, group = min(problem.heads_kv, SOME), min(problem.heads_q // problem.heads_kv, SOME)
    rows, keys = min(problem.seq_q, ROWS), min(problem.seq_kv, ROWS)
    sizes, own = (min(problem.batch, SOME), kv * group, rows, problem.head_dim, kv, keys), problem.head_dim_v
    return Problem.of(*sizes, problem.dtype, problem.causal, problem.scale, dim_v=own, dtype_kv=problem.dtype_kv)


def rehearsal(xp: ArrayModule, problem: Problem, passes: Sequence[str], classes: Sequence[str]) -> list[Callable[[], object]]:
    """All that an oracle does on a problem, in parts that share few operations. classes: of arithmetic."""
    drawn = generate.generate(problem, 0, ("Q", "K", "V", *("dO" for pass_ in passes if pass_ == "backward")))
    inputs = {name: put(xp, array) for name, array in drawn.items()}

    def verdict(name: str) -> None:
        """Of an output that is as its baselines are."""
        values = {each: put(xp, np.random.default_rng(0).standard_normal(problem.shape(each))) for each in {"O", name}}
        noise = dict.fromkeys((*WRITES["forward"], *WRITES["backward"]), 0.0)
        of_rows = dict.fromkeys(("O", "logsumexp", "dQ"), xp.zeros((*problem.shape("logsumexp"), 2), "float64"))
        exact = reference.Reference(problem, xp, values, None, 1.0, noise, of_rows)
        near = [{name: ((1 + off) * exact[name]).astype(np.float32)} for off in (-1e-3, 1e-3)]
        budget.compare(exact, {name: round_to(xp, exact[name], problem.tensor_dtype(name))}, near, None, arithmetic=classes[0])

    found: list[Callable[[], object]] = [partial(reference.reference, xp, problem, inputs)]
    found += [partial(baselines.baselines, xp, problem, inputs, each) for each in classes]
    written = [name for pass_ in passes for name in WRITES[pass_]]
    return found + [partial(verdict, name) for name in written if name in ("O", "logsumexp", "dQ")]


@dataclass(frozen=True)
class Part:
    """One key head, with its query heads, in which one input is new: place[name] of each tensor, and the oracle of what lies there.

    inputs: all that its pass reads, host storage arrays (1, heads, rows[, head_dim]); of a backward pass O and logsumexp are new too.
    """

    name: str
    place: Mapping[str, tuple[slice, slice]]
    oracle: Oracle
    inputs: Mapping[str, Array]

    @classmethod
    def drawn(
        cls,
        whole: Oracle,
        pass_: str,
        name: str,
        bits: Mapping[str, Array],
        logits: float,
        draw: np.random.Generator | None = None,
    ) -> Part | None:
        """A drawn head with half the rows of an input new: one drawn column there changes its sign.

        bits: of the pass's tensors as they lie in device memory, unsigned integers. None where its reference would take too long, or
        a sign would change more than signs: scores may grow beyond `logits`, the largest that the kernel takes, or STEEP; NaN, infinity.
        None too where there are sinks or the mask or score is another for another head: a part has one head, the first.
        """
        all_, draw = whole.problem, draw or np.random.default_rng()
        if all_.sinks is not None or all_.depends_on("b", "h", "h_kv"):
            return None
        problem = all_.with_(batch=1, heads_q=all_.heads_q // all_.heads_kv, heads_kv=1)
        if problem.heads_q * problem.seq_q * problem.seq_kv > PART:
            return None
        batch, head = int(draw.integers(all_.batch)), int(draw.integers(all_.heads_kv))
        groups = {each: array.shape[1] // all_.heads_kv for each, array in bits.items()}
        place = {each: (slice(batch, batch + 1), slice(head * n, head * n + n)) for each, n in groups.items()}
        inputs = {}
        for each in READS[pass_]:
            own = np.array(to_host(bits[each][place[each]]))
            if each == name:
                rows = draw.permutation(own.shape[2])[: (own.shape[2] + 1) // 2]
                own[:, :, rows, draw.integers(own.shape[3])] ^= own.dtype.type(1 << (8 * own.dtype.itemsize - 1))
            inputs[each] = own.view(STORAGE[all_.tensor_dtype(each)])
        wide: dict[str, Array] = {each: widen(np, inputs[each], all_.tensor_dtype(each)) for each in whole.inputs if each in inputs}
        longest = [float((wide[each] ** 2).sum(-1).max()) ** 0.5 for each in ("Q", "K")]
        taken = math.prod(longest) * abs(all_.scale) <= min(logits, STEEP)  # false where it is NaN
        if not taken or not all(np.isfinite(array).all() for array in wide.values()):
            return None
        oracle = Oracle(problem, {each: inputs[each] for each in wide}, whole.tolerance, whole.xp)
        return cls(name, place, oracle, inputs | oracle.inputs_of(pass_))
