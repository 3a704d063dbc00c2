"""What a call of the operator costs on the host, and what it does on the device: python experiments/torch_op/host_time.py [--output-dir DIR]

At B2 H8 S512 D64, where a kernel takes less time than its call: our operator and torch's backends, forward (no gradient wanted), forward
with a graph, backward, both; eager, by torch.compile, and as a CUDA graph. `python` is ours without the C++ node (native.py). A figure is the wall-clock of a call in a loop that waits only
at its end; the table has medians over fresh processes. host.csv has every process's figure.
A process measures all ways in turns: a host may be 1.6 times as slow in one process as in the next, for every way.
All processes import, compile and capture at once, then wait; they measure one after the other, while the others sleep.
One thread: torch runs gradients in a thread of each device, and to wake it costs more than a small kernel; a caller can have them in its own.
--operations lists what the profiler sees on the device in one call of each kernel and type: kernels, memsets, copies (operations.txt);
the fill between the passes is that of dO, which is the script's.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = {"ours": None, "python": None, "cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
SHAPE = (2, 8, 512, 64)
PASSES = ("forward", "forward, graph kept", "backward", "both", "both, one thread")


def attend_by(way: str) -> Callable[..., Any]:
    """Attention of q, k and v by one way, inside of forced()."""
    from torch.nn.functional import scaled_dot_product_attention

    from harness.torch_op import attention

    return scaled_dot_product_attention if WAYS[way] else partial(attention, deterministic=False)


def forced(way: str) -> Any:
    """A context in which torch has no backend but a way's. It is entered around loops, so that no call pays for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, str(WAYS[way]))) if WAYS[way] else by_node(way == "ours")


@contextlib.contextmanager
def by_node(node: bool) -> Iterator[None]:
    """A context in which the operator's gradients are the C++ node's, or Python's."""
    from harness.torch_op import native

    if node and not native.get():
        raise RuntimeError(f"no C++ node: {native.why}")
    had = native.apply, native.wanted
    if not node:
        native.apply, native.wanted = None, lambda: None  # many calls would get it
    try:
        yield
    finally:
        native.apply, native.wanted = had


def timed(calls: dict[str, Callable[[], Any]], seconds: float = 0.015) -> dict[str, float]:
    """Microseconds of a call of each way: the least of five loops, in turns, each of which waits for the device at its end."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    counts: dict[str, int] = {}
    found: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(6):
        for way, call in calls.items():
            with forced(way):
                for _ in range(5):
                    call()
                wait()
                began, count = time.perf_counter(), 0
                while count < counts[way] if turn else time.perf_counter() - began < seconds:
                    call()
                    count += 1
                wait()
                found[way].append((time.perf_counter() - began) / count * 1e6)
                counts[way] = count
    return {way: min(each[1:]) for way, each in found.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph's replay."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def passes(attend: Callable[..., Any], tensors: list[Any]) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by the name of their pass."""
    import torch

    *inputs, do = tensors
    leaves, others = ([t.detach().requires_grad_() for t in inputs] for _ in range(2))
    for _ in range(2):  # the second call is like one before
        kept = attend(*leaves)  # it ties its leaves to this stream, so a graph is captured with the others

    def one_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(attend(*others), others, do)

    return {
        "forward": lambda: attend(*inputs),
        "forward, graph kept": lambda: attend(*others),
        "backward": lambda: torch.autograd.grad(kept, leaves, do, retain_graph=True),
        "both": lambda: torch.autograd.grad(attend(*others), others, do),
        "both, one thread": one_thread,
    }


def one_process(dtype: str, ways: list[str], eager: bool) -> Iterator[dict[str, Any]]:
    """The figures of one process, after an empty one, when all is prepared. What a way does not take is left out. eager: nothing is compiled."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.randn(SHAPE if device == "cuda" else (1, 1, 64, 64), device=device, dtype=getattr(torch, dtype)) for _ in range(4)]
    calls: dict[tuple[str, str], dict[str, Callable[[], Any]]] = {}
    for way in ways:
        with forced(way):
            for kind, call in prepared(way, dtype, device, attend_by(way), tensors, eager).items():
                calls.setdefault(kind, {})[way] = call
    yield {}
    for (how, name), each in calls.items():
        for way, us in timed(each).items():
            yield {"way": way, "dtype": dtype, "how": how, "pass": name, "us": round(us, 2)}


def prepared(way: str, dtype: str, device: str, attend: Any, tensors: list[Any], eager: bool) -> dict[tuple[str, str], Callable[[], Any]]:
    """The calls that are timed, by how and pass: eager, compiled, as a CUDA graph. Each has run."""
    import torch

    hows: dict[str, Any] = {"eager": attend}
    if way == "python":
        device = "cpu"  # nothing else has the node
    if device == "cuda":
        hows |= {"compiled": None if eager or way == "flash" else torch.compile(attend), "CUDA graph": attend}
    made = {}
    for how, called in hows.items():
        if called is None:
            continue
        try:
            calls = passes(called, tensors)
            for name in PASSES:
                if how == "CUDA graph" and name in ("backward", "both, one thread"):
                    continue  # a replay of both, less that of forward; a replay has no thread
                call = captured(calls[name]) if how == "CUDA graph" else calls[name]
                for _ in range(5):
                    call()
                made[how, name] = call
        except RuntimeError as error:
            click.echo(f"{way} {dtype} {how}: {str(error).splitlines()[0]}", err=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a dtype, how and pass; a column a way, the last one torch's fastest over ours; medians over the processes."""
    lines = [f"| us a call, {SHAPE} | " + " | ".join(WAYS) + " | torch / ours |", "|---|" + "---:|" * (len(WAYS) + 1)]
    for dtype, how, name in dict.fromkeys((r["dtype"], r["how"], r["pass"]) for r in rows):
        found: dict[str, dict[int, float]] = {way: {} for way in WAYS}
        for r in rows:
            if (r["dtype"], r["how"], r["pass"]) == (dtype, how, name):
                found[r["way"]][r["process"]] = r["us"]
        cells = [f"{statistics.median(each.values()):.1f}" if each else "" for each in found.values()]
        theirs = [{way: found[way][at] for way in found if WAYS[way] and at in found[way]} for at in found["ours"]]
        ratios = [min(of.values()) / us for of, us in zip(theirs, found["ours"].values(), strict=True) if of]
        cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        lines.append(f"| {dtype} {how} {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def operations() -> Iterator[str]:
    """A line for each operation on the device in a forward and a backward call of each kernel with both and type, in order.

    The first, empty line comes when all is compiled.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from harness.kernel import catalogue
    from harness.torch_op import attention

    def both(spec: str, given: list[Any]) -> None:
        o = attention(*given, causal=True, kernel=spec, deterministic=False)
        torch.autograd.grad(o, given, torch.ones_like(o))

    able = {k.name for k in catalogue() if k.pass_ == "forward"}
    cases = {}
    for kernel in catalogue():
        if kernel.pass_ != "backward" or kernel.variant_of:
            continue
        for dtype in kernel.dtypes:
            spec, width = kernel.name if kernel.name in able else f"hopper+{kernel.name}", 256 if kernel.name == "hopper_cluster" else 64
            given = [torch.randn(2, 4, 256, width, device="cuda", dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)]
            cases[spec, dtype] = given
    with ThreadPoolExecutor(8) as pool:  # a first call compiles
        first = {case: pool.submit(both, case[0], given) for case, given in cases.items()}
    yield ""
    for (spec, dtype), given in cases.items():
        yield f"{spec} {dtype}"
        try:
            first[spec, dtype].result()
            both(spec, given)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                both(spec, given)
                torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            yield f"    {str(error).splitlines()[0]}"
            continue
        for event in sorted(seen.events(), key=lambda e: e.time_range.start):
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                yield f"    {event.device_time:8.2f} us  {event.name[:100]}"


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """host.csv and host.md."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["process", "way", "dtype", "how", "pass", "us"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "host.csv").write_text(text.getvalue())
    (folder / "host.md").write_text(table(rows))


@click.command()
@click.option("--processes", default=5, show_default=True)
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--operations", "listed", is_flag=True, help="Also the operations on the device.")
@click.option("--eager", is_flag=True, help="Without torch.compile, which takes the longest.")
@click.option("--own", default="", hidden=True)
@click.option("--output-dir", type=click.Path(path_type=Path), default=Path(__file__).with_name("host"), show_default=False)
def main(processes: int, ways: str, listed: bool, eager: bool, own: str, output_dir: Path) -> None:
    """Print the table; write host.csv, host.md, operations.txt."""
    if own:  # a process: a line when all is ready, then, when it is told to, what it finds
        dtype, *of_it = own.split(",")
        lines = operations() if own == "operations" else map(json.dumps, one_process(dtype, of_it, eager))
        click.echo(next(lines))
        input()
        for line in lines:
            click.echo(line)
        click.echo()
        sys.stdin.read()  # to end costs the driver something, too
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    of_float32 = [way for way in ways.split(",") if way not in ("cudnn", "flash")]
    kinds = [f"bfloat16,{ways}", ",".join(["float32", *of_float32])]
    began = [started(kind, eager) for _ in range(processes) for kind in kinds]
    last = started("operations", eager) if listed else None
    for process in (*began, last):
        if process and process.stdout:
            process.stdout.readline()
    rows: list[dict[str, Any]] = []
    for at, process in enumerate(began):
        found = [json.loads(line) | {"process": at // len(kinds)} for line in told(process)]
        click.echo(f"{at // len(kinds)} " + ", ".join(f"{r['dtype']} {r['how']} {r['pass']} {r['way']} {r['us']}" for r in found), err=True)
        rows += found
        write(rows, output_dir)
    click.echo(table(rows))
    if last:
        with (output_dir / "operations.txt").open("w") as file:
            for line in told(last):
                file.write(line)
                file.flush()


def started(own: str, eager: bool) -> subprocess.Popen[str]:
    """A process that prepares, says a line and waits to be told to go on."""
    command = [sys.executable, __file__, "--own", own, *["--eager"] * eager]
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of many processes that compile at once
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | few)


def told(process: subprocess.Popen[str]) -> Iterator[str]:
    """What a process prints after it was told to go on, up to an empty line; nothing of one that has died before."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    yield from takewhile(str.strip, iter(process.stdout.readline, ""))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
