"""What one rank does from its inputs to the verdict, and what the first rank knows at the end."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backends import Backend, nvidia_driver, pick
from ..backends.mapped import CHOICE, chosen
from ..check import budget, choose
from ..check.contender import Contender
from ..check.oracle import Oracle, arithmetic_of
from ..check.request import Request
from ..dataset import generate
from ..dataset.folder import check_size
from ..dataset.storage import widen
from ..fault import Fault, KernelFault, UsageFault
from ..measure import sampling
from ..partition import Partition
from ..problem import MODES, PASSES, WRITES, Problem
from . import timing
from .place import Place, control
from .program import kernels_of, refuse
from .rank import Rank
from .transport import Alone, Control, Transport, agreed, local, same

#: Bytes a second each way of a simulated link: what NCCL moves between two H200s of a host.
LINK = 300e9


@dataclass(frozen=True)
class Spec:
    """What a ring is asked for: the same on every rank. Raises UsageFault where timeout or bandwidth is not a number above 0."""

    compute: str
    mode: str
    problem: Problem
    seed: int = 42
    device: str = "auto"
    partition: str | None = None
    overlap: bool = True
    timeout: float = 60.0
    deterministic: bool = False
    tiles: Mapping[str, int] | None = None
    tolerance: float | None = None
    bandwidth: float | None = None  # of a simulated link, bytes a second each way: LINK where none is given

    def __post_init__(self) -> None:
        for name in ("timeout", "bandwidth"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageFault(f"--{name} is {value}", "it is a finite number above 0", f"leave out --{name}, or give a number")


@dataclass(frozen=True)
class Outcome:
    """What a ring did. Times are the slowest rank's. single: the same kernel on one device, seconds and the greatest difference of
    each tensor. simulated: the ranks took turns on one device, and the times are predicted."""

    spec: Spec
    compute: str
    device: str
    device_name: str
    ranks: int
    partition: str
    verdicts: Mapping[str, budget.Verdict]
    times: Mapping[str, timing.PassTime]
    single: Mapping[str, float]
    differences: Mapping[str, float]
    device_bytes: int  # of the rank that has most
    repeated: bool  # whether the last run had the bits of the first
    share: float
    simulated: bool = False
    notes: tuple[str, ...] = ()
    arithmetic: str = "f32"
    transport: str = ""  # what moves the messages

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its budget."""
        return all(verdict.passed for verdict in self.verdicts.values())

    @property
    def seconds(self) -> dict[str, float | None]:
        """Median seconds of each pass; a ring whose check failed has no speed."""
        return {name: self.times[name].median if self.passed and name in self.times else None for name in PASSES}

    @property
    def efficiency(self) -> dict[str, float | None]:
        """Of each pass: the single device's time over the ring's, by the number of ranks."""
        found = self.seconds
        return {name: self.single[name] / s / self.ranks if (s := found[name]) and name in self.single else None for name in PASSES}


def work(spec: Spec, place: Place) -> Outcome | None:
    """This process's part of a ring, one rank; the outcome on the first rank, None on the others.

    Raises as kernels and transports do, on the rank it concerns; Stuck where a neighbour does not answer. A rank that raises leaves
    its control open: at its exit MPI then ends the others.
    """
    talk = control(place, spec.timeout)
    if talk.size > 1:
        os.environ.setdefault("FA_CLI_THREADS", str(max(1, (os.cpu_count() or 1) // talk.size)))  # of the CPU engine

    def prepare() -> tuple[Backend, list[str], Contender, Partition]:
        backend = open_backend(spec.device, place.local)
        return backend, *_ready(spec, backend, talk.size)

    backend, notes, contender, partition = agreed(talk, prepare)
    same(talk, _asked(spec, backend, contender, partition), UsageFault, "give all ranks the same options, and the same kernel's file")
    # The others find it in the cache of their machine, which machines may share.
    agreed(talk, lambda: _compile(spec, backend, contender, partition) if place.local == 0 else None)
    transport = transport_of(backend, talk, spec.timeout, notes)
    try:
        with transport.scope():
            inputs = generate.inputs(spec.problem, spec.seed, _names(spec))
            rank = Rank(backend, partition, contender, inputs, transport, spec.overlap)
            samples, repeated = _run([rank], spec, talk)
            outputs = _gathered([rank], spec, partition, talk)
        about = talk.gather((samples, repeated, rank.device_bytes))
        transport.close()
    except BaseException:
        transport.close(failed=True)
        raise
    outcome = None
    if talk.rank == 0:
        del rank
        times = {name: timing.together(name, [each[0][name][0] for each in about]) for name in MODES[spec.mode]}
        found = _judged(spec, backend, contender, partition, inputs, outputs)
        found = replace(found, times=times, notes=tuple(notes), transport=transport.engine)
        outcome = replace(found, repeated=all(each[1] for each in about), device_bytes=max(each[2] for each in about))
    talk.close()
    return outcome


def simulate(spec: Spec, count: int, progress: Callable[[str], None] = lambda text: None) -> Outcome:
    """`count` ranks that take turns on one device. The outputs are a ring's; the times are predicted, from the compute of each step and
    the bandwidth. progress receives what is being done."""
    link = spec.bandwidth or LINK
    spec = replace(spec, bandwidth=link)
    progress(f"compiles {spec.compute}")
    backend, talk = open_backend(spec.device, 0), Alone()
    notes, contender, partition = _ready(spec, backend, count)
    _compile(spec, backend, contender, partition)
    progress("draws the inputs")
    inputs = generate.inputs(spec.problem, spec.seed, _names(spec))
    progress(f"{count} ranks take turns")
    transports = local(backend, count)
    ranks = [Rank(backend, partition, contender, inputs, each, spec.overlap) for each in transports]
    samples, repeated = _run(ranks, spec, talk)
    outputs = _gathered(ranks, spec, partition, talk)
    most = max(rank.device_bytes for rank in ranks)
    del ranks
    times = {name: timing.predicted(samples[name], spec.overlap, link) for name in MODES[spec.mode]}
    times = {name: replace(t, steps=tuple(replace(step, pass_=name) for step in t.steps)) for name, t in times.items()}
    found = _judged(spec, backend, contender, partition, inputs, outputs, progress)
    return replace(
        found, times=times, repeated=repeated, device_bytes=most, simulated=True, notes=tuple(notes), transport=transports[0].engine
    )


def open_backend(device: str, local_rank: int) -> Backend:
    """The device of a rank: the GPU with its number on this machine, unless --device names one, or its launcher shows it one only.

    Raises UsageFault where FA_CLI_RING_TRANSPORT names no transport."""
    chosen()
    gpu = device == "cuda" or (device == "auto" and nvidia_driver())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return pick(f"cuda:{local_rank}") if gpu and (not shown or "," in shown) else pick(device)


def transport_of(backend: Backend, talk: Control, timeout: float, notes: list[str] | None = None) -> Transport:
    """Peer copies or NCCL between GPUs, MPI between CPUs. notes receives why it is not what was asked for."""
    if backend.name == "cuda":
        from .peer import between_gpus

        return between_gpus(talk, timeout, [] if notes is None else notes)
    if notes is not None and chosen() == "peer":
        notes.append(f"{CHOICE}=peer is for GPUs: messages between CPUs are MPI's")
    if talk.size == 1:
        return local(backend, 1)[0]
    from .mpi import Mpi

    assert isinstance(talk, Mpi)  # start.on_ranks refuses the others
    return talk


# -- details ----------------------------------------------------------------------------------------------------------


def _names(spec: Spec) -> tuple[str, ...]:
    return ("Q", "K", "V") if spec.mode == "forward" else generate.INPUTS


def _passes(spec: Spec) -> tuple[str, ...]:
    """A backward pass reads the ring's own O and logsumexp, so a forward pass comes before it."""
    return ("forward",) if spec.mode == "forward" else PASSES


def _ready(spec: Spec, backend: Backend, ranks: int) -> tuple[list[str], Contender, Partition]:
    """Everything that can be refused is refused here, on every rank alike."""
    check_size(spec.problem)
    partition = Partition.of(spec.problem, ranks, spec.partition)
    passes = _passes(spec)
    mode = spec.mode if spec.mode == "forward" else "both"
    asked = Request(spec.compute, mode, spec.problem, deterministic=spec.deterministic, tiles=spec.tiles)
    contenders, notes = choose.choose(asked, backend.device())
    contender = contenders[0]
    refuse(partition, contender, passes, backend)
    return notes, contender, partition


def _asked(spec: Spec, backend: Backend, contender: Contender, partition: Partition) -> dict[str, object]:
    """What is the same on all ranks, by the names that a user knows. A GPU's number may differ."""
    options = {name: value for name, value in vars(spec).items() if name not in ("problem", "device", "compute")}
    kernels = [kernel for kernel, *_ in kernels_of(partition, contender, _passes(spec))]
    return {
        **{"--compute": contender.name, "the problem": spec.problem.describe(), "--device": backend.name},
        **{"--tile" if name == "tiles" else f"--{name}": value for name, value in options.items()},
        **{f"the source of {kernel.path.name}": kernel.source_hash for kernel in kernels},
    }


def _compile(spec: Spec, backend: Backend, contender: Contender, partition: Partition) -> None:
    for kernel, problem, tiles in kernels_of(partition, contender, _passes(spec)):
        backend.load(kernel, problem, tiles)


def _run(ranks: Sequence[Rank], spec: Spec, talk: Control) -> tuple[dict[str, list[list[timing.Sample]]], bool]:
    """Samples of each pass of the mode, for each rank of this process, and whether the last run had the bits of the first."""
    samples, repeated = {}, True
    for pass_ in _passes(spec):
        talk.gather(None)
        timing.run_pass(ranks, pass_, 1, spec.timeout)
        first = [_digest(rank.outputs(pass_)) for rank in ranks]
        if pass_ not in MODES[spec.mode]:
            continue
        talk.gather(None)
        once = timing.run_pass(ranks, pass_, 1, spec.timeout)
        slowest = max(talk.gather(max(mine[0].seconds for mine in once)))
        least, most = (5, 20) if ranks[0].backend.name == "cuda" else (2, 2)
        samples[pass_] = timing.run_pass(ranks, pass_, max(least, min(most, round(1.0 / max(slowest, 1e-6)))), spec.timeout)
        repeated = repeated and first == [_digest(rank.outputs(pass_)) for rank in ranks]
    return samples, repeated


def _digest(outputs: Mapping[str, Any]) -> str:
    made = hashlib.sha256()
    for array in outputs.values():
        made.update(array.tobytes())
    return made.hexdigest()


def _gathered(ranks: Sequence[Rank], spec: Spec, partition: Partition, talk: Control) -> dict[str, Any]:
    """The outputs of all ranks put together, on the first rank; elsewhere nothing."""
    whole: dict[str, Any] = {}
    for pass_ in MODES[spec.mode]:
        mine = [rank.outputs(pass_) for rank in ranks]
        for name in WRITES[pass_]:
            own = [each[name] for each in mine]
            parts = talk.gather(own, to_all=False) if talk.size > 1 else [[each] for each in own]
            if talk.rank:
                continue
            whole[name] = np.empty(spec.problem.shape(name), parts[0][0].dtype)
            for rank, (part,) in enumerate(parts):
                first = 0
                for start, stop in (partition.keys if name in ("dK", "dV") else partition.queries)[rank]:
                    whole[name][:, :, start:stop] = part[:, :, first : first + stop - start]
                    first += stop - start
    return whole


def _judged(
    spec: Spec,
    backend: Backend,
    contender: Contender,
    partition: Partition,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """The verdicts on the whole problem, and the same kernel on one device for comparison."""
    oracle = Oracle(spec.problem, inputs, spec.tolerance, backend.xp, progress)
    kernel = next(iter(contender.kernels.values()))
    verdicts = oracle.judge(outputs, kernel.arithmetic_for(spec.problem.dtype))
    single: dict[str, float] = {}
    differences: dict[str, float] = {}
    given: Mapping[str, Any] | None = None
    for pass_ in _passes(spec):
        try:
            result = contender.run(backend, oracle, pass_, given)
        except Fault:  # the whole problem does not fit one device: that is what rings are for
            break
        given = result.outputs
        if pass_ not in MODES[spec.mode]:
            continue
        if backend.name == "cpu":
            single[pass_] = result.timed.enqueue()()
        else:
            timing = sampling.measure({"": result.timed}, backend, "warm", sampling.POLICY["cuda"])[""]
            if timing.broken:
                raise KernelFault(
                    f"{contender.name} {pass_} on one device is wrong", timing.broken, f"fa-cli run --compute {contender.name}"
                )
            single[pass_] = timing.median_ms * 1e-3
        differences |= {name: _difference(spec.problem, name, outputs[name], array) for name, array in result.outputs.items()}
    device = backend.device()
    names = (contender.name, backend.name, device.name, partition.ranks, partition.kind)
    arithmetic = arithmetic_of(spec.problem, kernel)
    return Outcome(spec, *names, verdicts, {}, single, differences, 0, True, oracle.reference.share, arithmetic=arithmetic)


def _difference(problem: Problem, name: str, ours: Any, theirs: Any) -> float:
    """The greatest |difference| of two outputs where both are finite."""
    a, b = (widen(np, each, problem.tensor_dtype(name), "float32") for each in (ours, theirs))
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(np.where(both, a, 0) - np.where(both, b, 0)).max())
