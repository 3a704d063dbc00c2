"""What the operator adds to its kernels: python experiments/torch_op/over.py backward|mixed [--output FILE.csv] [--seconds S]

backward: at the cells of the sweep hopper_backward, the time of a backward call through autograd over that of its kernels alone, launched
again and again on the same memory. mixed: on random problems of public models (the sweep mixed), the time of a call of both passes in a
loop over that of the same work replayed as a CUDA graph, which no host time touches. Both are timed in turns, and the line has the medians
of the turns: between two events of the device, the first behind the first call of a loop. That call is left out because torch's thread for
gradients, which has slept while the other's turn was, takes up to half a millisecond to wake: a loop of 20 ms would count it as 2 %.
Answers are not judged here: the sweeps do that. A GPU only.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from host_time import captured

from harness.problem import Problem
from harness.torch_op import attention, call, operator
from harness.verbs import sweep


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
    made = [torch.randn(problem.shape(name), device="cuda", dtype=getattr(torch, problem.dtype)) for name in ("Q", "K", "V", "dO")]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def backward(problem: Problem, deterministic: bool) -> dict[str, float]:
    """A backward call, and its kernels alone."""
    *leaves, do = inputs(problem)
    options: dict[str, Any] = {"causal": problem.causal, "deterministic": deterministic}
    o, lse = attention(*leaves, **options, return_lse=True)
    q, k, v = (t.detach() for t in leaves)
    key = ("auto", (), *operator._kind(q, k, v, o, do), problem.causal, None, None, deterministic, True, False)
    ready = call.ready("backward", *key)
    assert ready is not None and ready.fixed is not None
    made = [torch.empty_like(t) for t in (q, k, v)]
    stream = torch.cuda.current_stream().cuda_stream
    starts, _held = ready.workspaces(stream)
    addresses = [t.data_ptr() for t in (q, k, v, o.detach(), do, *made, lse.detach())] + starts
    fixed = ready.fixed
    return loops({"operator": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), "kernels": lambda: fixed(addresses, stream)})


def both(problem: Problem) -> dict[str, float]:
    """A call of both passes, and the same as a CUDA graph."""
    *leaves, do = inputs(problem)

    def one() -> Any:
        return torch.autograd.grad(attention(*leaves, causal=problem.causal, deterministic=False), leaves, do)

    return loops({"call": one, "graph": captured(one)}, 0.005, 5)


@click.command()
@click.argument("what", type=click.Choice(["backward", "mixed"]))
@click.option("--output", type=click.Path(path_type=Path), default=None)
@click.option("--seconds", default=1e9, help="Stop after these.")
@click.option("--seed", default=11, show_default=True, help="Of mixed.")
@click.option("--cases", default=200, show_default=True, help="Of mixed.")
def main(what: str, output: Path | None, seconds: float, seed: int, cases: int) -> None:
    """Print a line a problem, the ratio last, and a summary."""
    drawn = sweep.load("mixed", seed, cases) if what == "mixed" else sweep.load("hopper_backward")
    shapes = [(test, problem) for test, problem in drawn.shapes if what == "mixed" or not test.startswith("float16")]
    began, rows = time.perf_counter(), []
    file = output.open("w", newline="") if output else sys.stdout
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["Test", "problem", "ms", "of", "ratio"])
    for test, problem in shapes:
        if time.perf_counter() - began > seconds:
            break
        try:
            ours, alone = (both(problem) if what == "mixed" else backward(problem, deterministic=False)).values()
        except (RuntimeError, ValueError) as error:
            writer.writerow([test, problem.describe(), "", "", str(error).splitlines()[0]])
            continue
        finally:
            torch.cuda.empty_cache()
        rows.append((alone, ours / alone))
        writer.writerow([test, problem.describe(), f"{ours:.4f}", f"{alone:.4f}", f"{ours / alone:.4f}"])
        file.flush()
    least = 0.06 if what == "mixed" else 0.3
    long = [ratio for alone, ratio in rows if alone > least]
    click.echo(f"{len(rows)} of {len(shapes)} problems; {len(long)} above {least} ms: ", nl=False)
    click.echo(f"median {statistics.median(long):.4f}, worst {max(long):.4f}" if long else "none")


if __name__ == "__main__":
    main()
