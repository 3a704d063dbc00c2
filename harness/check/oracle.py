"""The test oracle: the float64 reference of a problem on given inputs and the baselines of each arithmetic class, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..array import Array, ArrayModule, to_host
from ..backends import Backend
from ..dataset import generate
from ..dataset.folder import check_size
from ..dataset.storage import STORAGE, round_to
from ..problem import MODES, READS, Problem
from . import budget, memory, reference

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


@dataclass
class Oracle:
    """The float64 reference of a problem on given inputs, and the baselines of each arithmetic class, each computed once.

    inputs: host storage arrays Q, K, V and, for a backward pass, dO. tolerance: an absolute limit beside the budget (budget.compare).
    xp: where to compute; on cupy the inputs are copied to the GPU. progress: told what is computed, and what is done by those who judge.
    """

    problem: Problem
    inputs: Mapping[str, Array]
    tolerance: float | None = None
    xp: ArrayModule = np
    progress: Callable[[str], None] = lambda text: None
    _baselines: dict[str, list[dict[str, Array]]] = field(default_factory=dict)
    _on_host: dict[str, list[dict[str, Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = {name: self._put(array) for name, array in self.inputs.items()}
        self.reference = reference.reference(self.xp, self.problem, self._device, self.progress)

    def _put(self, array: Array) -> Array:
        if self.xp is np:
            return array
        return self.xp.asarray(array.view(np.uint16) if self.problem.dtype == "bfloat16" and array.itemsize == 2 else array)

    def judge(self, outputs: Mapping[str, Array], arithmetic: str, tile: int) -> dict[str, budget.Verdict]:
        """A verdict for each output, host storage arrays, of a kernel of an arithmetic class. tile: its rows per tile, for messages."""
        if arithmetic not in self._baselines:
            found: list[dict[str, Array]] = []
            if self.problem.dtype != "float64":
                found = reference.baselines(self.xp, self.problem, self._device, arithmetic, self.progress)
            self._baselines[arithmetic] = found
        if max(array.size for array in outputs.values()) <= ON_HOST:
            if arithmetic not in self._on_host:
                self._on_host[arithmetic] = [{name: to_host(array) for name, array in each.items()} for each in self._baselines[arithmetic]]
            found, limit = self._on_host[arithmetic], self.tolerance
            return budget.compare(self.problem, outputs, self._host_reference, found, limit, self.inputs, np, tile, arithmetic)
        got = {name: self._put(array) for name, array in outputs.items()}
        return budget.compare(
            self.problem, got, self.reference, self._baselines[arithmetic], self.tolerance, self._device, self.xp, tile, arithmetic
        )

    @cached_property
    def _host_reference(self) -> reference.Reference:
        """The reference in host memory."""
        values = {name: to_host(array) for name, array in self.reference.values.items()}
        rows = self.reference.rows and {name: to_host(array) for name, array in self.reference.rows.items()}
        return replace(self.reference, values=values, rows=rows)

    def error_maps(self, outputs: Mapping[str, Array], verdicts: Mapping[str, budget.Verdict]) -> dict[str, Array]:
        """The |error| map (budget.error_map) of each output that failed."""
        failed = {name: self._put(outputs[name]) for name, v in verdicts.items() if not v.passed}
        return {name: budget.error_map(self.problem, name, array, self.reference, xp=self.xp) for name, array in failed.items()}

    def inputs_of(self, pass_: str, forward: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """The host storage arrays that a pass reads, by name.

        O and logsumexp of a backward pass are those of `forward`, by default the reference's, rounded to storage.
        """
        given = dict(self.inputs)
        if pass_ == "backward":
            given |= self.forward_outputs if forward is None else forward
        return {name: given[name] for name in READS[pass_]}

    @cached_property
    def forward_outputs(self) -> dict[str, Array]:
        """The reference's O and logsumexp rounded to storage, host arrays."""
        found = {}
        for name in ("O", "logsumexp"):
            dtype = self.problem.tensor_dtype(name)
            rounded = round_to(self.xp, self.reference[name], dtype)
            found[name] = to_host(rounded).view(STORAGE[dtype])
        return found


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
