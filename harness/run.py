"""Kernel x data x backend -> outputs, verdicts and times: the main job."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import dataset as data
from . import errors, kernel, reference
from .backends import Backend, Loaded, pick
from .bind import Bound
from .problem import PASSES, READS, Problem, UsageFault

#: Modes of a run and the passes each consists of.
MODES = {"forward": ("forward",), "backward": ("backward",), "both": PASSES}


@dataclass(frozen=True)
class PassResult:
    """One pass of one kernel: outputs (host storage arrays), a verdict for each, and the seconds of each timed run."""

    kernel: kernel.Kernel
    loaded: Loaded
    outputs: Mapping[str, Any]
    verdicts: Mapping[str, errors.Verdict]
    seconds: tuple[float, ...]
    device_bytes: int

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its budget."""
        return all(v.passed for v in self.verdicts.values())


@dataclass(frozen=True)
class Result:
    """What a compute did with a problem in a mode. Times are medians in milliseconds, None where a check failed or it was not run."""

    compute: str
    mode: str
    device: str
    device_name: str
    problem: Problem
    passes: Mapping[str, PassResult]
    share: float  # of all rows, the part that was held against float64
    outputs: Path | None = None
    notes: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def passed(self) -> bool:
        """Whether every tensor of every pass is within its budget."""
        return all(p.passed for p in self.passes.values())

    @property
    def verdicts(self) -> dict[str, errors.Verdict]:
        """Every tensor's verdict, forward tensors first."""
        return {name: v for p in self.passes.values() for name, v in p.verdicts.items()}

    @property
    def time_ms(self) -> dict[str, float | None]:
        """Median milliseconds of each pass; a kernel whose check failed is never given a speed."""
        return {
            name: statistics.median(self.passes[name].seconds) * 1e3 if self.passed and name in self.passes and self.passes[name].seconds else None
            for name in PASSES
        }  # fmt: skip

    def _rate(self, work: Any) -> dict[str, float | None]:
        return {name: work(name) / (ms * 1e-3) if ms else None for name, ms in self.time_ms.items()}

    @property
    def tflops(self) -> dict[str, float | None]:
        """10^12 floating-point operations a second, by Problem.flops."""
        return self._rate(lambda name: self.problem.flops(name) / 1e12)

    @property
    def gbps(self) -> dict[str, float | None]:
        """10^9 bytes a second of the least traffic, by Problem.bytes."""
        return self._rate(lambda name: self.problem.bytes(name) / 1e9)


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

    def forward_outputs(self) -> dict[str, Any]:
        """The reference's O and logsumexp, rounded to storage: what verify and experiment feed a backward pass."""
        found = {}
        for name in ("O", "logsumexp"):
            dtype = self.problem.tensor_dtype(name)
            rounded = reference.round_to(self.xp, self.reference[name], dtype)
            host = rounded if self.xp is np else rounded.get()
            found[name] = host.view(data.STORAGE[dtype])
        return found


def run_pass(
    backend: Backend,
    chosen: kernel.Kernel,
    yardstick: Yardstick,
    inputs: Mapping[str, Any],
    tiles: Mapping[str, int] | None = None,
    samples: int = 5,
) -> PassResult:
    """Load a kernel, run it once on poisoned outputs, judge what it wrote and, if it is right, time `samples` more runs."""
    problem = yardstick.problem
    check_logits(chosen, problem, inputs)
    loaded = backend.load(chosen, problem, tiles)
    bound = Bound(backend, loaded, problem, inputs)
    outputs = bound.run()
    verdicts = yardstick.judge(outputs, chosen.arithmetic, int(dict(loaded.plan.macros).get("BLOCK_Q", 64)))
    seconds: list[float] = []
    while all(v.passed for v in verdicts.values()) and len(seconds) < samples and sum(seconds) < 2.0:
        seconds.append(bound.time())
    return PassResult(chosen, loaded, outputs, verdicts, tuple(seconds), bound.device_bytes)


def check_logits(chosen: kernel.Kernel, problem: Problem, inputs: Mapping[str, Any]) -> None:
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


def run_modes(
    backend: Backend,
    compute: str,
    mode: str,
    yardstick: Yardstick,
    forward: Mapping[str, Any] | None,
    tiles: Mapping[str, int] | None = None,
    samples: int = 5,
) -> dict[str, PassResult]:
    """The passes of a mode. A backward pass reads `forward` (O and logsumexp), or in mode both, where it is None, the kernel's own."""
    passes: dict[str, PassResult] = {}
    chosen = {pass_: kernel.find(compute, pass_) for pass_ in MODES[mode]}  # a missing pass is told before anything runs
    for pass_, each in chosen.items():
        inputs = dict(yardstick.inputs)
        if pass_ == "backward":
            inputs |= forward if forward is not None else passes["forward"].outputs
        passes[pass_] = run_pass(backend, each, yardstick, {name: inputs[name] for name in READS[pass_]}, tiles, samples)
    return passes


def open_backend(device: str, check: str | None = None, schedule_seed: int | None = None) -> Backend:
    """The backend for --device, --check and --schedule-seed; the latter two exist on the CPU only. Raises UsageFault otherwise."""
    if check or schedule_seed:
        if device.startswith("cuda"):
            raise UsageFault(
                "--check and --schedule-seed are the CPU backend's", f"--device is {device}",
                "use --device cpu; on a GPU: compute-sanitizer --tool racecheck fa-cli run …",
            )  # fmt: skip
        return pick("cpu", check=check, seed=schedule_seed)
    return pick(device)


def run(
    computes: Sequence[str],
    mode: str,
    *,
    data_folder: Path | None = None,
    problem: Problem | None = None,
    seed: int = 42,
    data_root: Path = Path("data"),
    device: str = "auto",
    tolerance: float | None = None,
    allow_nonfinite: bool = False,
    tiles: Mapping[str, int] | None = None,
    check: str | None = None,
    schedule_seed: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    samples: int = 5,
) -> list[Result]:
    """Run computes on a data folder (or a problem, generated under data_root or reused there) and write the first one's outputs.

    The folder is locked meanwhile. Raises Fault: usage, data, environment, kernel or disk; a failed check is no exception,
    it is Result.passed.
    """
    chosen = {(c, p): kernel.find(c, p) for c in computes for p in MODES[mode]}
    backend = open_backend(device, check, schedule_seed)
    samples = 0 if check else samples  # instrumented code has no speed worth printing
    found = data.open_(data_folder) if data_folder else None
    shape = found.problem if found else problem
    assert shape is not None, "either a folder or a problem"
    problem = shape.with_(causal=causal, scale=shape.scale if scale is None else scale)
    for each in chosen.values():  # refused before a byte is written
        each.plan(problem, backend.device(), tiles)
    data.check_size(problem)
    found = found or data.write(problem, seed, data_root)
    if not os.access(found.folder, os.W_OK | os.X_OK):  # told before any work is done, not after it
        raise data.disk_fault(found.folder, PermissionError(13, "permission denied"))
    with data.locked(found.folder):
        names = ("Q", "K", "V") if mode == "forward" else data.INPUTS
        inputs = found.read_inputs(names, allow_nonfinite)
        forward = dict(zip(("O", "logsumexp"), data.read_forward(found, problem), strict=True)) if mode == "backward" else None
        yardstick = Yardstick(problem, inputs, tolerance, backend.xp)
        results = []
        for i, compute in enumerate(computes):
            passes = run_modes(backend, compute, mode, yardstick, forward, tiles, samples)
            result = Result(
                chosen[compute, MODES[mode][0]].name, mode, backend.name, backend.device().name, problem, passes,
                yardstick.reference.share, found.folder, found.warnings, found.seed,
            )  # fmt: skip
            if i == 0:
                outputs = {name: array for p in passes.values() for name, array in p.outputs.items()}
                data.write_outputs(found, outputs, _record(result))
            results.append(result)
    return results


def measure_in_memory(
    compute: str, mode: str, problem: Problem, backend: Backend, seed: int = 42, samples: int = 5, yardstick: Yardstick | None = None
) -> Result:
    """As :func:`run`, with data made in memory and the reference's O and logsumexp for the backward pass; nothing is written.

    yardstick: one made by :func:`yardstick_for` may be given to save computing it again for another kernel.
    """
    yardstick = yardstick or yardstick_for(problem, backend, mode, seed)
    passes = run_modes(backend, compute, mode, yardstick, yardstick.forward_outputs() if mode != "forward" else None, None, samples)
    name = kernel.find(compute, MODES[mode][0]).name
    return Result(name, mode, backend.name, backend.device().name, problem, passes, yardstick.reference.share, seed=seed)


def yardstick_for(problem: Problem, backend: Backend, mode: str, seed: int = 42, input_scale: float = 1.0) -> Yardstick:
    """Inputs generated in memory with their reference."""
    data.check_size(problem)
    names = ("Q", "K", "V") if mode == "forward" else data.INPUTS
    return Yardstick(problem, data.generate(problem, seed, names, input_scale), None, backend.xp)


def _record(result: Result) -> dict[str, Any]:
    problem = result.problem
    return {
        "kernel": result.compute, "mode": result.mode, "causal": problem.causal, "scale": problem.scale, "dtype": problem.dtype,
        "device": result.device, "verdict": "PASS" if result.passed else "FAIL",
        "source_hash": {name: p.kernel.source_hash for name, p in result.passes.items()},
    }  # fmt: skip


def asan_child_needed(check: str | None) -> bool:
    """Whether this process must start itself again under AddressSanitizer (:func:`run_under_asan`)."""
    from .backends.host_report import ASAN_CHILD

    return check == "asan" and not os.environ.get(ASAN_CHILD)


def run_under_asan(arguments: Sequence[str]) -> int:
    """Run a Python command line again with AddressSanitizer loaded; see backends/host.py."""
    from .backends import host

    return host.run_under_asan(arguments)
