"""One kernel or peer on one pass of one problem: loaded, run once on poisoned outputs, judged, and ready to be timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import Backend, Loaded
from ..dataset import folder as data
from ..dataset import generate as draws
from ..kernel.kernel import Kernel
from ..measure.sampling import Timed, Timing
from ..problem import Problem, UsageFault
from . import budget as errors
from . import reference
from .tensors import Bound

if TYPE_CHECKING:
    from ..peers import Peer

#: A peer is not ours to fail: one within so many budgets keeps its speed, and the row says what it exceeds.
PEER_BUDGETS = 8.0


@dataclass(frozen=True)
class PassResult:
    """One pass: outputs (host storage arrays), a verdict for each, what can be timed, and the timings taken so far (warm, cold).

    kernel and loaded are None for a peer; ran says which backend of its library really ran. maps holds for each tensor that
    failed its |error| as errors.error_map gives it.
    """

    name: str
    outputs: Mapping[str, Any]
    verdicts: Mapping[str, errors.Verdict]
    timed: Timed
    device_bytes: int | None  # None: not known
    kernel: Kernel | None = None
    loaded: Loaded | None = None
    ran: str | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)
    maps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its budget (a peer: within PEER_BUDGETS of it)."""
        most = 1.0 if self.kernel else PEER_BUDGETS
        return all(v.passed or v.max_abs <= most * v.budget for v in self.verdicts.values())

    @property
    def seconds(self) -> tuple[float, ...]:
        """The warm samples."""
        return self.timings["warm"].seconds if "warm" in self.timings else ()

    def with_timing(self, timing: Timing) -> PassResult:
        """A copy with a timing more."""
        return replace(self, timings={**self.timings, timing.timing: timing})


@dataclass
class Yardstick:
    """The float64 reference of a problem on given inputs, and the baselines of each arithmetic class, each computed once."""

    problem: Problem
    inputs: Mapping[str, Any]  # Q, K, V and, for a backward pass, dO: host storage arrays
    tolerance: float | None = None
    xp: Any = np
    _baselines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = {name: self._put(array) for name, array in self.inputs.items()}
        self.reference = reference.reference(self.xp, self.problem, self._device)

    def _put(self, array: Any) -> Any:
        if self.xp is np:
            return array
        return self.xp.asarray(array.view(np.uint16) if self.problem.dtype == "bfloat16" and array.itemsize == 2 else array)

    def judge(self, outputs: Mapping[str, Any], arithmetic: str, tile: int) -> dict[str, errors.Verdict]:
        """A verdict for each output of a kernel of an arithmetic class; tile is its rows per tile, for messages."""
        if arithmetic not in self._baselines:
            found = reference.baselines(self.xp, self.problem, self._device, arithmetic) if self.problem.dtype != "float64" else []
            self._baselines[arithmetic] = found
        got = {name: self._put(array) for name, array in outputs.items()}
        return errors.compare(
            self.problem, got, self.reference, self._baselines[arithmetic], self.tolerance, inputs=self._device, xp=self.xp, tile=tile
        )

    def error_maps(self, outputs: Mapping[str, Any], verdicts: Mapping[str, errors.Verdict]) -> dict[str, Any]:
        """The |error| map of each output that failed."""
        failed = {name: self._put(outputs[name]) for name, v in verdicts.items() if not v.passed}
        return {name: errors.error_map(self.problem, name, array, self.reference, xp=self.xp) for name, array in failed.items()}

    def forward_outputs(self) -> dict[str, Any]:
        """The reference's O and logsumexp, rounded to storage: what verify and experiment feed a backward pass."""
        found = {}
        for name in ("O", "logsumexp"):
            dtype = self.problem.tensor_dtype(name)
            rounded = reference.round_to(self.xp, self.reference[name], dtype)
            host = rounded if self.xp is np else rounded.get()
            found[name] = host.view(data.STORAGE[dtype])
        return found


def run_kernel(
    backend: Backend, chosen: Kernel, yardstick: Yardstick, inputs: Mapping[str, Any], tiles: Mapping[str, int] | None = None
) -> PassResult:
    """Load a kernel, run it once on poisoned outputs and judge what it wrote. inputs: READS of its pass, host storage arrays.

    Raises UsageFault where its header refuses the problem or the data, KernelFault where it does not compile, launch or end.
    """
    check_logits(chosen, yardstick.problem, inputs)
    loaded = backend.load(chosen, yardstick.problem, tiles)
    bound = Bound(backend, loaded, yardstick.problem, inputs)
    outputs = bound.run()
    bound.free_copies()
    arithmetic = chosen.arithmetic_for(yardstick.problem.dtype)
    verdicts = yardstick.judge(outputs, arithmetic, int(dict(loaded.plan.macros).get("BLOCK_Q", 64)))
    maps = yardstick.error_maps(outputs, verdicts)
    return PassResult(chosen.name, outputs, verdicts, bound, bound.device_bytes, chosen, loaded, maps=maps)


def run_peer(peer: Peer, yardstick: Yardstick, pass_: str) -> PassResult:
    """Prepare a peer on a pass, run it once and judge what it gives, by the rules for kernels of its dtype."""
    problem = yardstick.problem
    peer.refuse(problem, pass_)
    prepared = peer.prepare(problem, yardstick.inputs, pass_)
    outputs = prepared.outputs()
    verdicts = yardstick.judge(outputs, "f32" if problem.dtype in ("float32", "float64") else "p16", 64)
    return PassResult(peer.name, outputs, verdicts, prepared, prepared.peak_bytes, ran=prepared.ran)


def check_logits(chosen: Kernel, problem: Problem, inputs: Mapping[str, Any]) -> None:
    """Raise UsageFault where the data's largest |q.k.scale| is beyond what the kernel's header promises."""
    if chosen.logits == float("inf"):
        return
    q, k = (reference.widen(np, inputs[name], problem.dtype, "float32") for name in ("Q", "K"))
    norms = [float(np.sqrt((x.astype(np.float64) ** 2).sum(-1)).max()) for x in (q, k)]
    if norms[0] * norms[1] * abs(problem.scale) <= chosen.logits:  # Cauchy and Schwarz: no need to look at every score
        return
    group = problem.heads_q // problem.heads_kv
    largest = max(
        float(np.abs(q[b, h] @ k[b, h // group].T).max()) * abs(problem.scale) for b in range(problem.batch) for h in range(problem.heads_q)
    )
    if largest > chosen.logits:
        raise UsageFault(
            f"{chosen.label} does not take scores as large as {largest:.3g}", f"its header promises |q.k.scale| up to {chosen.logits:g}",
            'use a kernel whose header says logits = "any": fa-cli list',
        )  # fmt: skip


def yardstick_for(problem: Problem, backend: Backend, mode: str, seed: int = 42, input_scale: float = 1.0) -> Yardstick:
    """Inputs generated in memory with their reference."""
    data.check_size(problem)
    names = ("Q", "K", "V") if mode == "forward" else data.INPUTS
    return Yardstick(problem, draws.inputs(problem, seed, names, input_scale), None, backend.xp)
