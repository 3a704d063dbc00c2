"""Rings of GPUs beside torch's context_parallel, in one run: python -m torch.distributed.run --nproc-per-node 2 experiments/ring/measure.py

The shapes of sweep.toml beside this file, forward and backward: the ring with and without overlap, the same kernel on one GPU, and
torch's context_parallel with cuDNN. A line of JSON for each on stdout of the first rank, and in ring.jsonl of the folder --output. N is the
launcher's. A line has the transport that moved the messages; `bandwidth` has a line for peer copies and one for NCCL, the rings run with
--transport. The forward pass below LONG keys and, up to --judge-backward keys, the backward pass are judged against float64 on the whole
problem; longer ones are compared with one GPU only; what was judged is also a row of ring.csv, with its steps and time line beside it
(harness/ring/record.py). Exit code 1 where a verdict is wrong.

What is compared comes first: shapes below LONG, ring and one GPU, then context_parallel, then the shapes of LONG keys in the same order,
of which none begins after --last-start. These run with overlap only; two runs of a pass count, and one of one GPU.

`other_ms` is the part of a pass that is no attention (merging, clearing, rounding), `idle_ms` the part in which neither stream of the first
rank does anything, `host_ms` what enqueuing a pass takes: of the last run, where host_ms is below ms, Python costs no time.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from harness.backends import Backend
from harness.backends.mapped import CHOICE
from harness.check import choose
from harness.check.oracle import Oracle
from harness.check.request import Request
from harness.check.tensors import Bound
from harness.dataset import generate
from harness.dataset.storage import widen
from harness.fault import EnvironmentFault
from harness.measure import sampling
from harness.partition import Partition
from harness.problem import MODES, PASSES, Problem
from harness.ring import job, place, probe, record, timing
from harness.ring.program import kernels_of, refuse
from harness.ring.rank import Rank, run_together
from harness.ring.transport import Control, Transport
from harness.verbs import sweep

TIMEOUT, RUNS, LONG = 120.0, 7, 1 << 19  # from LONG keys on a pass takes seconds: fewer runs


def runs(problem: Problem) -> int:
    """Runs of a pass, the first of which is not counted."""
    return RUNS if problem.seq_kv < LONG else 3


class Log:
    """Lines of the first rank."""

    def __init__(self, rank: int, ranks: int, path: Path) -> None:
        self.rank, self.ranks, self.path, self.began, self.transport = rank, ranks, path, time.monotonic(), ""
        self.passed = True  # every verdict

    def __call__(self, **line: Any) -> None:
        """Print a line, and keep it. Where none comes for long, every rank says where it stands."""
        faulthandler.dump_traceback_later(TIMEOUT)
        if self.rank == 0:
            text = json.dumps({**line, "ranks": self.ranks, "transport": self.transport, "at_s": round(time.monotonic() - self.began, 1)})
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            with self.path.open("a") as file:
                file.write(text + "\n")


def rate(problem: Problem, pass_: str, seconds: float, ranks: int) -> dict[str, float]:
    """Milliseconds and TFLOP/s of each GPU."""
    return {"ms": seconds * 1e3, "tflops_gpu": problem.flops(pass_) / 1e12 / seconds / ranks}


def single(backend: Backend, contender: Any, problem: Problem, inputs: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of each pass of the same kernel on one GPU, and its outputs; the backward pass reads its own O and logsumexp."""
    given, found = dict(inputs), {}
    for pass_ in PASSES:
        bound = Bound(backend, backend.load(contender.kernels[pass_], problem, contender.tiles), problem, given)
        given |= bound.run()
        bound.free_copies()
        if problem.seq_kv < LONG:
            found[pass_] = sampling.measure({"": bound}, backend, "warm", sampling.POLICY[backend.name])[""].median_ms * 1e-3
        else:
            found[pass_] = backend.enqueue(bound.loaded, bound.steps)()
    return found, given


def ring(log: Log, talk: Control, transport: Transport, backend: Backend, problem: Problem, given: argparse.Namespace, local: int) -> None:
    """The ring on one problem, with and without overlap, judged, and one GPU beside it."""
    contender = choose.choose(Request(given.compute, "both", problem), backend.device())[0][0]
    partition = Partition.of(problem, talk.size)
    refuse(partition, contender, PASSES, backend)
    for kernel, part, tiles in () if local else kernels_of(partition, contender, PASSES):  # the first of a machine compiles
        backend.load(kernel, part, tiles)
    inputs = generate.inputs(problem, 42, generate.INPUTS)
    talk.gather(None, 5)
    mode = "both" if problem.seq_kv <= given.judge_backward else "forward"
    overlaps = (True,) if given.brief or problem.seq_kv >= LONG else (False, True)
    spec = job.Spec(given.compute, mode, problem, device=given.device)
    with transport.scope():
        rank = Rank(backend, partition, contender, inputs, transport)
        times = {overlap: {pass_: timed(log, talk, rank, pass_, overlap) for pass_ in PASSES} for overlap in overlaps}
        if given.graph:
            for pass_ in PASSES:
                replayed(log, talk, rank, pass_)
        outputs = job._gathered([rank], spec, partition, talk) if problem.seq_kv < LONG else {}  # gigabytes through a store
        mine = rank.outputs("forward") | rank.outputs("backward")
    most = max(talk.gather(rank.device_bytes))
    transport.register(())  # else it keeps what neighbours may write to
    del rank
    if talk.rank == 0 and given.brief and outputs:
        judged(log, problem, Oracle(problem, {name: inputs[name] for name in "QKV"}, None, backend.xp), contender, outputs)
    if talk.rank == 0 and not given.brief:
        alone, whole = single(backend, contender, problem, inputs)
        compared(log, problem, {pass_: found.median for pass_, (found, _) in times[True].items()}, alone, talk.size)
        apart = {name: difference(backend, problem, partition, name, mine[name], whole[name]) for name in mine}
        log(what="difference to one GPU, rows of the first rank", seq=problem.seq_q, causal=problem.causal, **apart)
        if outputs:
            used = inputs if mode == "both" else {name: inputs[name] for name in ("Q", "K", "V")}
            oracle = Oracle(problem, used, None, backend.xp)
            verdicts = judged(log, problem, oracle, contender, outputs)
            device = backend.device()
            names = (contender.name, backend.name, device.name, talk.size, partition.kind)
            for overlap, passes in times.items():
                found = {pass_: passes[pass_][0] for pass_ in MODES[mode]}
                repeated = all(passes[pass_][1] for pass_ in MODES[mode])
                this = replace(spec, overlap=overlap)
                record.write(given.output, job.Outcome(this, *names, verdicts, found, alone, apart, most, repeated, oracle.reference.share))
    if backend.name == "cuda":
        backend.xp.get_default_memory_pool().free_all_blocks()
    talk.gather(None, 10)


def judged(log: Log, problem: Problem, oracle: Oracle, contender: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    """The verdict of each tensor, against float64 on the whole problem."""
    outputs = {name: outputs[name] for name in outputs if "dO" in oracle.inputs or name in ("O", "logsumexp")}
    verdicts = oracle.judge(outputs, contender.kernels["forward"].arithmetic_for(problem.dtype))
    words = {v.tensor: [v.passed, v.max_abs, v.budget] for v in verdicts.values()}
    log.passed = log.passed and all(v.passed for v in verdicts.values())
    log(what="verdict", seq=problem.seq_q, causal=problem.causal, share=oracle.reference.share, **words)
    return verdicts


def replayed(log: Log, talk: Control, rank: Rank, pass_: str) -> None:
    """A pass of all ranks as a CUDA graph, and whether it has the bits of the launches."""
    problem, first = rank.partition.problem, job._digest(rank.outputs(pass_))
    talk.gather(None)
    samples = timing.replay(rank, pass_, runs(problem), TIMEOUT)[1:]
    about = talk.gather((samples, job._digest(rank.outputs(pass_)) == first))
    if talk.rank == 0:
        seconds = [max(run) for run in zip(*(each[0] for each in about), strict=True)]
        words = {"what": "graph", "seq": problem.seq_q, "causal": problem.causal, "pass": pass_}
        found = rate(problem, pass_, statistics.median(seconds), talk.size)
        log(**words, **found, range_ms=[min(seconds) * 1e3, max(seconds) * 1e3], same_bits=[each[1] for each in about])


def timed(log: Log, talk: Control, rank: Rank, pass_: str, overlap: bool) -> tuple[timing.PassTime, bool]:
    """A pass of all ranks, and whether its last run had the bits of the first, which from LONG keys on nobody looks at: gigabytes.
    Every rank's digest of its outputs is in the line."""
    rank.overlap, problem, first = overlap, rank.partition.problem, ""
    if problem.seq_kv < LONG:
        timing.run_pass([rank], pass_, 2, TIMEOUT)
        first = job._digest(rank.outputs(pass_))
    talk.gather(None)
    began = time.perf_counter()
    run_together([getattr(rank, pass_)])
    host = time.perf_counter() - began
    rank.spans.clear()
    samples = timing.run_pass([rank], pass_, runs(problem), TIMEOUT)[0][1:]
    digest = job._digest(rank.outputs(pass_))
    about = talk.gather((samples, digest[:12], first in ("", digest), host))
    found = timing.together(pass_, [each[0] for each in about])
    line = found.lines[0]
    log(
        **{"what": "ring", "seq": problem.seq_q, "causal": problem.causal, "pass": pass_, "overlap": overlap},
        **rate(problem, pass_, found.median, talk.size),
        range_ms=[min(found.seconds) * 1e3, max(found.seconds) * 1e3],
        hidden=found.hidden,
        steps=[(round(s.compute_ms, 3), round(s.communication_ms, 3), s.bytes) for s in found.steps],
        other_ms=sum(span.ended - span.began for span in line if span.stream == "compute" and span.what != "attention") * 1e3,
        idle_ms=(samples[-1].seconds - covered([(span.began, span.ended) for span in line])) * 1e3,
        host_ms=max(each[3] for each in about) * 1e3,
        digests=[each[1] for each in about],
        gb=rank.device_bytes / 1e9,
    )
    return found, all(each[2] for each in about)


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def compared(log: Log, problem: Problem, ours: dict[str, float], alone: dict[str, float], ranks: int) -> None:
    """One GPU, and the ring's efficiency against it."""
    words = {"seq": problem.seq_q, "causal": problem.causal}
    for pass_, seconds in alone.items():
        log(what="one GPU", **words, **{"pass": pass_}, **rate(problem, pass_, seconds, 1), efficiency=seconds / ours[pass_] / ranks)
    both = sum(ours.values())
    log(what="both", **words, efficiency=sum(alone.values()) / both / ranks, **rate(problem, "both", both, ranks))


def difference(backend: Backend, problem: Problem, partition: Partition, name: str, ours: Any, theirs: Any) -> float:
    """The greatest |difference| of the first rank's rows of an output to those of one GPU."""
    xp, dtype = backend.xp, problem.tensor_dtype(name)
    chunks = (partition.keys if name in ("dK", "dV") else partition.queries)[0]
    theirs = np.concatenate([theirs[:, :, start:stop] for start, stop in chunks], axis=2)
    bits = [xp.asarray(array.view(f"u{array.itemsize}")) for array in (np.ascontiguousarray(ours), theirs)]
    a, b = (widen(xp, each if dtype == "bfloat16" else each.view(dtype), dtype, "float32") for each in bits)
    return float(xp.nan_to_num(abs(a - b)).max())


def torch_ring(log: Log, problem: Problem) -> None:
    """torch's context_parallel with cuDNN: its default, one all-gather of K and V; head-tail balance where causal."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, ranks = init_device_mesh("cuda", (dist.get_world_size(),)), dist.get_world_size()
    _cp_options.enable_load_balance = problem.causal
    shape = problem.shape("Q")
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def timed(work: Any) -> float:
        seconds = []
        for _ in range(runs(problem) + 2):
            dist.barrier()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            work()
            marks[1].record()
            marks[1].synchronize()
            slowest = torch.tensor([marks[0].elapsed_time(marks[1]) * 1e-3], device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds.append(float(slowest))
        return statistics.median(seconds[2:])

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
        q, k, v, d_out = (each.detach().clone() for each in tensors)
        with torch.no_grad():
            forward = timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal))
        for each in (q, k, v):
            each.requires_grad_()

        def both() -> None:
            for each in (q, k, v):
                each.grad = None
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal).backward(d_out)

        whole = timed(both)
    torch.cuda.empty_cache()  # rings come after
    for pass_, seconds in (("forward", forward), ("both", whole)):
        words = {"what": "context_parallel", "seq": problem.seq_q, "causal": problem.causal, "pass": pass_}
        log(**words, **rate(problem, pass_, seconds, ranks))


@contextmanager
def used(log: Log, talk: Control, backend: Backend, name: str) -> Iterator[Any]:
    """A transport by its name, closed at the end; None, and a line that says why, where there is none."""
    os.environ[CHOICE] = "" if name == "auto" else name
    try:
        transport = job.transport_of(backend, talk, TIMEOUT)
    except EnvironmentFault as fault:
        log(what="no transport", asked=name, why=str(fault))
        yield None
        return
    log.transport = transport.engine
    yield transport
    transport.close()
    log.transport = ""


def bandwidth(log: Log, talk: Control, backend: Backend, transport: Transport | None) -> None:
    """GB/s each way of messages of all sizes, all ranks at once: the slowest rank's."""
    if transport:
        sizes = probe.SIZES if backend.name == "cuda" else probe.SIZES[:3]
        with transport.scope():
            rates = talk.gather(probe.bandwidth(backend, transport, sizes, TIMEOUT))
            transport.register(())
        log(what="bandwidth", gbps={f"{size >> 10} KiB": round(min(r) / 1e9, 2) for size, *r in zip(sizes, *rates, strict=True)})


def begins(log: Log, talk: Control, problem: Problem, given: argparse.Namespace) -> bool:
    """Whether there is time for a shape, by the clock of the first rank; a line where there is none."""
    late = problem.seq_kv >= LONG and talk.gather(time.monotonic() - log.began)[0] > given.last_start
    if late:
        log(what="left out", seq=problem.seq_q, causal=problem.causal, why=f"more than {given.last_start:g} s were over")
    return not late


def rings(log: Log, talk: Control, local: int, backend: Backend, problems: list[Problem], given: argparse.Namespace) -> None:
    """Some shapes, on each transport."""
    for name in given.transport if backend.name == "cuda" else ("auto",):
        with used(log, talk, backend, name) as transport:
            if backend.name == "cpu":
                bandwidth(log, talk, backend, transport)
            for problem in problems if transport else ():
                if begins(log, talk, problem, given):
                    ring(log, talk, transport, backend, problem, given, local)


def torch_rings(log: Log, talk: Control, local: int, problems: list[Problem], given: argparse.Namespace) -> None:
    """context_parallel on some shapes. Its process group stays: a second one would find the first one's keys in the launcher's store."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    for problem in problems:
        if begins(log, talk, problem, given):
            torch_ring(log, problem)


def options() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="TEST", help="some of the sweep's shapes: 32k-causal 32k 128k-causal 128k ...")
    parser.add_argument("--compute", default=choose.AUTO)
    parser.add_argument("--judge-backward", type=int, default=32768, metavar="KEYS")
    parser.add_argument("--device", default="cuda", help="cpu, under mpiexec, shows that this file works")
    parser.add_argument("--brief", action="store_true", help="the ring with overlap and context_parallel only; below LONG O is judged")
    parser.add_argument("--graph", action="store_true", help="each pass also as a CUDA graph")
    parser.add_argument("--transport", nargs="+", choices=("auto", "peer", "nccl"), default=["auto"], help="the rings with each of them")
    parser.add_argument("--no-torch", action="store_true", help="without context_parallel")
    parser.add_argument("--no-ring", action="store_true", help="context_parallel only; lines are added to ring.jsonl")
    parser.add_argument("--last-start", type=float, default=float("inf"), metavar="SECONDS", help="no shape of LONG keys begins later")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="FOLDER")
    return parser.parse_args()


def main() -> None:
    """Shapes below LONG first. Two communicators are never in flight together: the ring's is closed before torch's computes, and torch's
    is made after the first rings and is idle while others run."""
    given = options()
    faulthandler.dump_traceback_later(TIMEOUT)
    where = place.found()
    assert where, "start it with torch.distributed.run or mpiexec"
    talk = place.control(where, TIMEOUT)
    log = Log(talk.rank, talk.size, given.output / "ring.jsonl")
    backend = job.open_backend(given.device, where.local)
    asked = sweep.load("ring")
    shapes = asked.shapes if backend.name == "cuda" else asked.cpu_shapes
    problems = [problem for test, problem in shapes if test in (given.only or [test])]
    assert problems, f"--only names none of {', '.join(test for test, _ in shapes)}"
    for name in ("peer", "nccl") if backend.name == "cuda" and talk.size > 1 and not given.no_ring else ():
        with used(log, talk, backend, name) as transport:
            bandwidth(log, talk, backend, transport)
    for some in ([each for each in problems if (each.seq_kv >= LONG) is long] for long in (False, True)):
        if some and not given.no_ring:
            rings(log, talk, where.local, backend, some, given)
        if some and not given.no_torch:
            torch_rings(log, talk, where.local, some, given)
    if not given.no_torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    sys.exit(0 if log.passed else 1)


if __name__ == "__main__":
    main()
