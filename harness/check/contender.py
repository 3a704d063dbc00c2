"""A kernel or peer on one pass of a problem: loaded, run once on poisoned outputs, judged, and ready to be timed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..array import Array, every
from ..backends import Backend, Loaded
from ..dataset.storage import widen
from ..fault import EnvironmentFault, KernelFault, UsageFault
from ..files import each
from ..kernel import Kernel, planner
from ..kernel.expression import evaluate, names_of
from ..measure.sampling import Timed, Timing
from ..peers.base import Peer
from ..problem import DESCALES, WRITES, Problem
from . import budget, layout, memory
from .oracle import Oracle, arithmetic_of
from .tensors import PLACED, Bound, Outputs
from .trial import Trial

#: A peer whose errors are within this many times the budget keeps its times, and the row notes it: peers are compared with, not tested.
PEER_BUDGETS = 8.0
#: Elements of a piece of an input whose row norms are computed at once.
_PIECE = 1 << 16


@dataclass(frozen=True)
class PassResult:
    """One pass: outputs, a verdict for each, what can be timed, and the timings taken so far (warm, cold).

    outputs: host storage arrays, copied from a GPU when they are first read (tensors.Outputs). device_bytes: device memory of tensors and
    workspaces; None where it is not known. kernel and loaded are None for a peer; ran says which backend of its library ran. maps: for
    each tensor that failed, its |error| as budget.error_map gives it. broken: the rule that a later launch broke, or empty (trial.py).
    arithmetic: the class whose budget it was judged by.
    """

    name: str
    outputs: Mapping[str, Array]
    verdicts: Mapping[str, budget.Verdict]
    timed: Timed
    device_bytes: int | None
    kernel: Kernel | None = None
    loaded: Loaded | None = None
    ran: str | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)
    maps: Mapping[str, Array] = field(default_factory=dict)
    broken: str = ""
    arithmetic: str = "f32"

    def __repr__(self) -> str:
        errors = ", ".join(f"{name} {v.max_abs:.2e} of {v.budget:.2e}" for name, v in self.verdicts.items())
        return f"PassResult({self.name}: {'PASS' if self.passed else 'FAIL'}, {errors})"

    @property
    def passed(self) -> bool:
        """Whether every tensor has passed, and no later launch broke a rule; for a peer, whether its error is within PEER_BUDGETS times
        the budget."""
        return not self.broken and all(
            v.passed or (self.kernel is None and v.max_abs <= PEER_BUDGETS * v.budget) for v in self.verdicts.values()
        )

    @property
    def watched(self) -> int | None:
        """What --check has watched in its launches (Backend.watched); None without a check, and for a peer."""
        return self.timed.bound.watched if isinstance(self.timed, Trial) else None

    @property
    def seconds(self) -> tuple[float, ...]:
        """The warm samples."""
        return self.timings["warm"].seconds if "warm" in self.timings else ()

    def with_timing(self, timing: Timing) -> PassResult:
        """A copy with one more timing."""
        return replace(self, timings={**self.timings, timing.timing: timing}, broken=self.broken or timing.broken)

    def relaunched(self, repeats: int = 0) -> PassResult:
        """A copy that says whether the kernel is right in a launch on new inputs over old outputs, and in `repeats` on the same inputs, each
        in another schedule.

        For what is not timed: a launch that is timed is judged then. A peer and what has failed are returned as they are.
        """
        if not self.passed or not isinstance(self.timed, Trial):
            return self
        return replace(self, broken=self.timed.again() or (self.timed.in_schedules(repeats)))


@dataclass(frozen=True)
class Contender:
    """What is checked and timed under one name: kernels of ours (one file per pass, in one form, with tile values), or a peer.

    choose.py makes it from the text of --compute. tiles override those of the headers. deterministic: the form asked for.
    """

    name: str
    kernels: Mapping[str, Kernel] = field(default_factory=dict)  # by pass; empty for a peer
    peer: Peer | None = None
    tiles: Mapping[str, int] = field(default_factory=dict)
    deterministic: bool = False

    def __repr__(self) -> str:
        files = [kernel.path.name for kernel in self.kernels.values()] or ["a peer"]
        tiles = [f"{name}={value}" for name, value in self.tiles.items()]
        return f"Contender({self.name}: {', '.join((*files, *tiles))})"

    def refuse(self, problem: Problem, passes: Sequence[str], backend: Backend) -> None:
        """Raise UsageFault where it does not take the passes of a problem, EnvironmentFault where a peer cannot run here."""
        if self.peer:
            if absent := self.peer.absent(backend.name):
                raise EnvironmentFault(f"{self.name} cannot run here", *absent)
            for pass_ in passes:
                self.peer.refuse(problem, pass_)
        classes = {pass_: arithmetic_of(problem, kernel) for pass_, kernel in self.kernels.items()}
        if classes.get("forward") == "tf32" != classes.get("backward", "tf32"):
            raise UsageFault(
                f"{self.name} would compute gradients from an O in tf32",
                f"its backward pass computes in {classes['backward']}, and is judged by that",
                "choose another forward pass: fa-cli list",
            )
        workspaces = self.workspace_bytes(problem, backend)  # refuses what a header does
        if backend.name == "cpu":  # on a GPU an allocation that does not fit is refused
            memory.check(problem, passes, [workspaces])

    def workspace_bytes(self, problem: Problem, backend: Backend) -> int:
        """The bytes of its kernels' workspaces on a problem. Raises UsageFault where a header refuses it."""
        plans = (planner.plan(kernel, problem, backend.device(), self.tiles) for kernel in self.kernels.values())
        return sum(space.bytes for plan in plans for space in plan.workspaces)

    def run(self, backend: Backend, oracle: Oracle, pass_: str, forward: Mapping[str, Array] | None = None) -> PassResult:
        """Run a pass once on poisoned outputs and judge it; nothing is timed yet.

        A kernel's backward pass reads O and logsumexp of `forward`, by default the reference's; a peer computes its own. Raises as
        :func:`run_kernel` and Peer.prepare do.
        """
        if self.peer:
            return run_peer(self.peer, oracle, pass_)
        return run_kernel(backend, self.kernels[pass_], oracle, oracle.inputs_of(pass_, forward), self.tiles)


def run_kernel(
    backend: Backend, chosen: Kernel, oracle: Oracle, inputs: Mapping[str, Array], tiles: Mapping[str, int] | None = None
) -> PassResult:
    """Load a kernel, run it once on poisoned outputs and judge its outputs. inputs: READS of its pass, host storage arrays.

    Raises UsageFault where its header refuses the problem or the data, KernelFault where it does not compile, launch or terminate.
    """
    own = all(inputs[name] is oracle.inputs[name] for name in ("Q", "K"))
    check_logits(chosen, oracle.problem, inputs, oracle.norms if own else None)
    oracle.progress(f"compiles {chosen.label}")
    loaded = backend.load(chosen, oracle.problem, tiles)
    oracle.progress(f"runs {chosen.label}")
    placed = oracle.placed(backend.xp, inputs)
    bound = Bound(backend, loaded, oracle.problem, placed)
    outputs = bound.run()
    bound.free_copies()
    arithmetic = chosen.arithmetic_for(oracle.problem.dtype)
    tiles = rows_of_tiles(chosen, loaded.plan.values)
    oracle.progress(f"judges {chosen.label}")
    verdicts = oracle.judge(outputs, arithmetic, tiles)
    if not all(verdict.passed for verdict in verdicts.values()) and (name := oracle.changed()):
        what = f"{chosen.label} was given another {name} than the oracle has"
        raise KernelFault(
            what, "it, or a kernel before it, wrote outside its tensors", "run it alone; fa-cli verify … --sanitizer memcheck"
        )
    verdicts = layout.named(oracle, outputs, verdicts)
    maps = oracle.error_maps(outputs, verdicts)
    trial = Trial(bound, oracle, placed, outputs, arithmetic, tiles)
    named = arithmetic_of(oracle.problem, chosen)
    return PassResult(chosen.name, outputs, verdicts, trial, bound.device_bytes, loaded.kernel, loaded, maps=maps, arithmetic=named)


def rows_of_tiles(chosen: Kernel, values: Mapping[str, str]) -> dict[str, int]:
    """The rows of a tile of each tensor that a kernel writes, as far as its header tells: those that its grids divide seq_q or seq_kv by.

    Else BLOCK_Q or BLOCK_K. values: those of the plan.
    """
    known = {name: int(value) for name, value in values.items() if value.isdecimal()}
    grids = " ".join(str(size) for launch in chosen.launches for size in launch.grid)
    found = {}
    for axis, name, written in (("seq_q", "BLOCK_Q", ("O", "logsumexp", "dQ")), ("seq_kv", "BLOCK_K", ("dK", "dV"))):
        # ceil_div(seq_q, 16 * WARPS), round_up(seq_q, BLOCK_Q), seq_q // 64
        divisors = re.findall(rf"\b(?:ceil_div|round_up)\({axis}, ([^(),]+)\)|\b{axis} // (\w+)", grids)
        rows = {evaluate(each, known) for each in map("".join, divisors) if names_of(each) <= known.keys()}
        rows = rows if len(rows) == 1 else {known[name]} if name in known else set()
        found.update(dict.fromkeys(written, *rows) if rows else {})
    return {tensor: found[tensor] for tensor in WRITES[chosen.pass_] if tensor in found}


def run_peer(peer: Peer, oracle: Oracle, pass_: str) -> PassResult:
    """Prepare a peer on a pass, run it once and judge its outputs as those of a kernel: arithmetic f32 or, in 16 bits, p16.

    Its moments are shown but do not fail it: what a peer rounds besides is its own (torch's CPU dK and dV: 1.6 times as rough).
    Raises as Peer.prepare does.
    """
    problem = oracle.problem
    peer.refuse(problem, pass_)
    oracle.progress(f"runs {peer.name} {pass_}")
    xp = oracle.xp if peer.device == "cuda" else np
    prepared = peer.prepare(problem, oracle.placed(xp, oracle.inputs), pass_)
    if sum(math.prod(problem.shape(name)) for name in WRITES[pass_]) > PLACED:
        xp = np
    values = prepared.outputs(xp)
    outputs = Outputs(problem, values) if xp is np else Outputs(problem, {}, values)
    if peer.deterministic and pass_ == "backward" and not _same_bytes(values, prepared.outputs(xp)):
        raise UsageFault(f"{peer.name} gave other bits in a second run", "its deterministic form was asked for", "leave it out: --peers")
    arithmetic = arithmetic_of(problem)
    judged = oracle.judge(outputs, arithmetic)
    verdicts = {name: replace(v, passed=True, reason="") if v.max_abs <= v.budget else v for name, v in judged.items()}
    return PassResult(peer.name, outputs, verdicts, prepared, prepared.peak_bytes, ran=prepared.ran, arithmetic=arithmetic)


def _same_bytes(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return all(every(a[name].view(np.uint8) == b[name].view(np.uint8)) for name in a)


def check_logits(chosen: Kernel, problem: Problem, inputs: Mapping[str, Array], norms: dict[str, float] | None = None) -> None:
    """Raise UsageFault where the data's largest |q.k.scale| is beyond what the kernel's header promises.

    norms: the largest row norms of these inputs where they are known; those that are computed are added. NaN and infinity count as 0: a
    kernel gives NaN for them whatever the size of the scores.
    """
    if chosen.logits == float("inf"):
        return
    norms = {} if norms is None else norms
    for name in ("Q", "K"):
        norms[name] = norms[name] if name in norms else _longest(inputs[name], problem.tensor_dtype(name))
    factor = np.full((problem.batch, problem.heads_kv), abs(problem.scale))
    for worth in problem.tensors:
        if worth.name in (DESCALES["Q"], DESCALES["K"]):
            factor = factor * np.abs(worth.values)
    if norms["Q"] * norms["K"] * float(factor.max()) <= chosen.logits:  # Cauchy-Schwarz: |q.k| <= |q| |k|
        return
    q, k = (_finite(inputs[name], problem.tensor_dtype(name)) for name in ("Q", "K"))
    group = problem.heads_q // problem.heads_kv
    largest = max(
        float(np.abs(q[b, h] @ k[b, h // group].T).max() * factor[b, h // group]) for b, h in np.ndindex(problem.batch, problem.heads_q)
    )
    if largest > chosen.logits:
        raise UsageFault(
            f"{chosen.label} does not take scores as large as {largest:.3g}",
            f"its header promises |q.k.scale| up to {chosen.logits:g}",
            'use a kernel whose header says logits = "any": fa-cli list',
        )


def _finite(array: Array, dtype: str) -> Array:
    """A storage array in float32, 0 for NaN and infinity."""
    wide = widen(np, array, dtype, "float32")
    return np.where(np.isfinite(wide), wide, np.float32(0))


def _longest(array: Array, dtype: str) -> float:
    """The largest Euclidean norm of a row, in float64, of what :func:`_finite` gives: piece by piece, each in a core's cache."""
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, _PIECE // rows.shape[1])

    def piece(first: int) -> float:
        values = _finite(rows[first : first + step], dtype).astype(np.float64)
        return float((values * values).sum(-1).max())

    return math.sqrt(max(each(piece, range(0, len(rows), step), array.nbytes)))
