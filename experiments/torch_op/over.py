"""What the operator adds to its kernels: python experiments/torch_op/over.py backward|mixed [--output FILE.csv] [--only TEST] [--seconds S]

backward: at the cells of the sweep hopper_backward, the time of a backward call through autograd over that of its kernels alone, launched
again and again on the same memory; with --peers, the times of those peers' backward calls too. mixed: on random problems of public models (the sweep mixed), the time of a call of both passes in a
loop over that of the same work replayed as a CUDA graph, which no host time touches; and, as `floor`, the time of both passes of an
autograd function that allocates the same outputs and launches nothing: an operator written in Python takes no less.
All are timed in turns, and the line has the medians of the turns: between two events of the device, the first behind the first call of a
loop. That call is left out because torch's thread for gradients, which has slept while the other's turn was, takes up to half a
millisecond to wake: a loop of 20 ms would count it as 2 %. Answers are not judged here: the sweeps do that. A GPU only.
"""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from host_time import captured

from harness import peers
from harness.fault import Fault
from harness.peers.on_torch import TorchPeer
from harness.problem import Problem
from harness.torch_op import attention, call, native, operator
from harness.verbs import sweep

TENSORS = ("Q", "K", "V", "dO")


def loops(calls: dict[str, Callable[[], Any]], seconds: float = 0.02, turns: int = 9) -> dict[str, float]:
    """Milliseconds of each call on the device's clock: medians over turns of a loop; the first turn is not counted, nor each first call."""
    counts = {}
    for name, one in calls.items():
        one()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            one()
        torch.cuda.synchronize()
        counts[name] = max(4, int(seconds / ((time.perf_counter() - began) / 3)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):
        for name, one in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            one()
            begin.record()
            for _ in range(counts[name] - 1):
                one()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / (counts[name] - 1))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def inputs(problem: Problem) -> list[Any]:
    """Q, K, V that want gradients, and dO."""
    made = [torch.randn(problem.shape(name), device="cuda", dtype=getattr(torch, problem.dtype)) for name in TENSORS]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def backward(problem: Problem, deterministic: bool, others: tuple[str, ...]) -> dict[str, float]:
    """A backward call, its kernels alone, and the backward calls of the peers that take the problem."""
    *leaves, do = inputs(problem)
    options: dict[str, Any] = {"causal": problem.causal, "deterministic": deterministic}
    for _ in range(2):  # the second call is like one before
        o, lse = attention(*leaves, **options, return_lse=True)
    q, k, v = (t.detach() for t in leaves)
    key = ("auto", (), *operator._kind(q, k, v, o, do), problem.causal, None, None, deterministic, True, False)
    ready = call.ready("backward", *key)
    assert ready is not None and ready.fixed is not None
    made = [torch.empty_like(t) for t in (q, k, v)]
    stream = torch.cuda.current_stream().cuda_stream
    starts, _held = ready.workspaces(stream, ready.allocator())
    addresses = [t.data_ptr() for t in (q, k, v, o.detach(), do, *made, lse.detach())] + starts
    fixed = ready.fixed
    calls = {"operator": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), "kernels": lambda: fixed(addresses, stream)}
    for name in others:
        peer = peers.find(name)
        assert isinstance(peer, TorchPeer)
        own = {
            of: t.detach() if peer.heads_first else t.detach().transpose(1, 2).contiguous()
            for of, t in zip(TENSORS, (*leaves, do), strict=True)
        }
        try:
            peer.refuse(problem, "backward")
            with peer.forced():
                calls[name] = peer.start(problem, own, "backward")
                calls[name]()
        except (Fault, RuntimeError) as error:
            calls.pop(name, None)
            click.echo(f"{name}: {str(error).splitlines()[0]}", err=True)
    return loops(calls)


class Empty(torch.autograd.Function):  # type: ignore[misc]
    """What an attention in Python cannot do without: outputs, what is saved, gradients."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        o, lse = operator._outputs(q, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def both(problem: Problem) -> dict[str, float]:
    """A call of both passes, the same as a CUDA graph, and both passes of a function that launches nothing."""
    *leaves, do = inputs(problem)

    def one() -> Any:
        return torch.autograd.grad(attention(*leaves, causal=problem.causal, deterministic=False), leaves, do)

    def empty() -> Any:
        return torch.autograd.grad(Empty.apply(*leaves)[0], leaves, do)

    return loops({"call": one, "graph": captured(one), "floor": empty}, 0.005, 3)


def compile_both(problem: Problem) -> None:
    """Load the kernels of both passes, as a first call does. What is refused is told when it is measured."""
    q, k, v, _ = inputs(problem)
    with contextlib.suppress(Fault):
        call.ready("forward", "auto", (), *operator._kind(q, k, v), problem.causal, None, None, False, True, False)


@click.command()
@click.argument("what", type=click.Choice(["backward", "mixed"]))
@click.option("--output", type=click.Path(path_type=Path), default=None)
@click.option("--only", default="*", help="Tests to run, as a pattern.")
@click.option("--peers", "others", default="", help="Of backward: peers, as fa4,torch-cudnn.")
@click.option("--seconds", default=1e9, help="Stop after these.")
@click.option("--seed", default=11, show_default=True, help="Of mixed.")
@click.option("--cases", default=200, show_default=True, help="Of mixed.")
def main(what: str, output: Path | None, only: str, others: str, seconds: float, seed: int, cases: int) -> None:
    """Print a line a problem, the ratio last, and a summary."""
    native.get()
    drawn = sweep.load("mixed", seed, cases) if what == "mixed" else sweep.load("hopper_backward")
    shapes = [(t, p) for t, p in drawn.shapes if fnmatch.fnmatch(t, only) and (what == "mixed" or not t.startswith("float16"))]
    names = ("floor",) if what == "mixed" else tuple(filter(None, others.split(",")))
    began, rows = time.perf_counter(), []
    file = output.open("w", newline="") if output else sys.stdout
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["Test", "problem", "ms", "of", "ratio", *names])
    if what == "mixed":
        with ThreadPoolExecutor() as pool:  # many compile at once, and none while something is timed
            for _ in pool.map(compile_both, [problem for _, problem in shapes]):
                pass
        click.echo(f"compiled in {time.perf_counter() - began:.0f} s", err=True)
    for test, problem in shapes:
        if time.perf_counter() - began > seconds:
            break
        try:
            found = both(problem) if what == "mixed" else backward(problem, False, names)
        except (RuntimeError, ValueError) as error:
            writer.writerow([test, problem.describe(), "", "", str(error).splitlines()[0]])
            continue
        finally:
            torch.cuda.empty_cache()
        ours, alone, *_ = found.values()
        rows.append((ours, alone, [found[name] for name in names if name in found]))
        times = [f"{found[name]:.4f}" if name in found else "" for name in names]
        writer.writerow([test, problem.describe(), f"{ours:.4f}", f"{alone:.4f}", f"{ours / alone:.4f}", *times])
        file.flush()
    least = 0.06 if what == "mixed" else 0.3
    click.echo(f"{len(rows)} of {len(shapes)} problems")
    summary(f"above {least} ms", [ours / alone for ours, alone, _ in rows if alone > least])
    if what == "mixed":
        click.echo(f"a function that launches nothing: median {statistics.median(floor for *_, (floor,) in rows):.4f} ms")
        summary("and longer than that function", [ours / alone for ours, alone, (floor,) in rows if alone > max(least, floor)])
    elif names:
        faster = [min(times) / ours for ours, _, times in rows if times]
        click.echo(f"the fastest of {', '.join(names)} over the operator: geometric mean {statistics.geometric_mean(faster):.4f}")


def summary(which: str, ratios: list[float]) -> None:
    """A line of the problems that are meant."""
    click.echo(f"{which}: {len(ratios)}" + (f", median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}" if ratios else ""))


if __name__ == "__main__":
    main()
