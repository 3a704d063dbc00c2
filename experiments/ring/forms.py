"""ring_attention in its forms beside torch's context_parallel and another library's Ulysses: torchrun --nproc-per-node N experiments/ring/forms.py

The operator that a model calls, not the command `fa-cli ring` (measure.py): K and V round ("ring"), rows for heads ("all_to_all", as in
DeepSpeed-Ulysses), or what sends the fewest bytes ("auto", both together). On SHAPES, with as many key heads as query heads and with groups
of eight, forward and both passes. A line of forms.jsonl (forms_cpu.jsonl) in the folder --output is a form, a shape and a pass: ms, the
slowest rank's median, and TFLOP/s of each GPU, of a call alone, behind a barrier, and, of short ones, of a call among CALLS in a row, as in
training, where the hosts run ahead; `by` says what carried the messages. A form that does not take a shape, or that torch refuses, has the
reason. Before it is timed, O is compared with float64 on ROWS rows of every rank, and the gradients with those of the first form; exit code 1
where one is too far away.

On CPUs (torchrun --nproc-per-node 8 experiments/ring/forms.py --device cpu, gloo) the shapes are small and context_parallel is left out, which
has no kernel there. Nothing is timed: the errors are the record.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from harness.files.environment import environment, write_env
from harness.partition import equal, shards
from harness.problem import Problem
from harness.torch_op import ring_attention
from harness.torch_op.copies import carrier

HEADS = {"64/8": (64, 8), "16": (16, 16)}
SHAPES = {
    f"{seq}k-{'causal' if causal else 'full'}-{heads}": (*HEADS[heads], seq << 10, 128, causal)
    for seq in (64, 32, 128)
    for causal in (True, False)
    for heads in HEADS
}  # in the order in which they are measured
CPU_SHAPES = {"causal-8": (8, 8, 96, 32, True), "causal-16/8": (16, 8, 96, 32, True), "full-8/2": (8, 2, 96, 32, False)}
FORMS, ROTATIONS = ("ring", "all_to_all", "auto"), ("allgather", "alltoall")
RUNS, WARM, ROWS, CALLS = 5, 2, 16, 4
#: Seconds of a call from which on calls in a row take as long as one alone.
SHORT = 0.06
#: How far bfloat16 may be from float64, and from another form's bfloat16, relative to 1 + |value|.
FAR = 2.0**-5
#: Seconds without a line after which every rank says where it stands.
PATIENCE = 120.0


class Shape:
    """A shape on this rank: tensors of the whole sequence, alike on all ranks, and this rank's rows of them."""

    def __init__(self, name: str, sizes: tuple[int, int, int, int, bool], device: str) -> None:
        heads, heads_kv, seq, dim, self.causal = sizes
        self.name, self.problem = name, Problem.of(1, heads, seq, dim, heads_kv=heads_kv, dtype="bfloat16", causal=self.causal)
        random, counts = torch.Generator(device).manual_seed(42), (heads, heads_kv, heads_kv, heads)
        self.whole = [torch.randn((1, n, seq, dim), generator=random, device=device).bfloat16() for n in counts]
        self.chunks = shards(equal(seq, dist.get_world_size()), "zigzag")[dist.get_rank()]
        self.mine = [torch.cat([t[:, :, a:b] for a, b in self.chunks], 2) for t in self.whole]

    def error(self, o: Any, chunks: Any = None) -> float:
        """The largest |error| / (1 + |value|) of some rows of O, against float64. chunks: which rows of the whole they are, by default mine."""
        rows = torch.cat([torch.arange(a, b) for a, b in chunks or self.chunks])
        some = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().long()
        places, far = rows[some].to(o.device), 0.0
        q, k, v = self.whole[0][0][:, places].double(), *(t[0].double() for t in self.whole[1:3])
        for head in range(q.shape[0]):
            of = head * k.shape[0] // q.shape[0]
            scores = q[head] @ k[of].T * q.shape[-1] ** -0.5
            if self.causal:
                scores.masked_fill_(torch.arange(scores.shape[1], device=o.device) > places[:, None], float("-inf"))
            right = scores.softmax(-1) @ v[of]
            far = max(far, float(((o[0, head, some].double() - right).abs() / (1 + right.abs())).max()))
        return far


def largest(value: float, device: str) -> float:
    """Of all ranks."""
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


def seconds(work: Callable[[], Any], calls: int) -> float:
    """The median of some runs of so many calls on GPUs, for a call, each as long as on the slowest rank."""
    found = []
    for _ in range(WARM + RUNS):
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(calls):
            work()
        marks[1].record()
        marks[1].synchronize()
        found.append(largest(marks[0].elapsed_time(marks[1]) * 1e-3, f"cuda:{torch.cuda.current_device()}"))
    return statistics.median(found[WARM:]) / calls


def ours(form: str, kernel: str, causal: bool) -> Callable[..., Any]:
    """A form of the operator, as fast as it may be: the same bits in every run are not asked for."""
    return lambda q, k, v: ring_attention(q, k, v, causal=causal, form=form, kernel=kernel, deterministic=False)


def tell(output: Path, **line: Any) -> None:
    """A line, printed and kept by the first rank."""
    faulthandler.dump_traceback_later(PATIENCE)
    if dist.get_rank() == 0:
        text = json.dumps(line)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        with output.open("a") as file:
            file.write(text + "\n")


def gradients(attend: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """dQ, dK and dV of this rank's rows, after a forward pass. inputs: q, k, v and dO."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    return list(torch.autograd.grad(attend(*leaves), leaves, inputs[3]))


def timed(output: Path, shape: Shape, attend: Callable[..., Any], inputs: list[Any], /, **words: Any) -> None:
    """Time both passes of what attends to this rank's q, k and v: the lines."""

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs[:3])

    for pass_, work in (("forward", forward), ("both", lambda: gradients(attend, inputs))):
        alone = seconds(work, 1)
        found = {"": alone} | ({"_in_a_row": seconds(work, CALLS)} if alone < SHORT else {})
        share = shape.problem.flops(pass_) / 1e12 / dist.get_world_size()
        times = {f"ms{end}": took * 1e3 for end, took in found.items()} | {f"tflops_gpu{end}": share / took for end, took in found.items()}
        tell(output, **words, **{"pass": pass_}, **times)


def theirs(output: Path, shape: Shape, rotation: str, /, **words: Any) -> None:
    """torch's context_parallel with cuDNN, head-tail balance where causal."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    set_rotate_method(rotation)
    _cp_options.enable_load_balance = shape.causal
    grouped = shape.problem.heads_q != shape.problem.heads_kv
    buffers = [t.clone() for t in shape.whole]
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        timed(output, shape, attend, [t.detach().clone() for t in buffers], **words)


def ulysses(output: Path, shape: Shape, device: str, /, **words: Any) -> None:
    """yunchang's UlyssesAttention (pip install yunchang) with cuDNN between its messages: a rank has one run of rows, rows before heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from yunchang import UlyssesAttention, __version__  # type: ignore[import-not-found]
    from yunchang.kernels import AttnType  # type: ignore[import-not-found]

    grouped = shape.problem.heads_q != shape.problem.heads_kv
    chunks = shards(equal(shape.problem.seq_q, dist.get_world_size()), "contiguous")[dist.get_rank()]
    layer = UlyssesAttention(attn_type=AttnType.TORCH_CUDNN)

    def local(q: Any, k: Any, v: Any, **_: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped).transpose(1, 2)

    layer.attn_fn = local
    inputs = [torch.cat([t[:, :, a:b] for a, b in chunks], 2).transpose(1, 2).contiguous() for t in shape.whole]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with torch.no_grad():
            error = largest(shape.error(layer(*inputs[:3]).transpose(1, 2), chunks), device)
        tell(output, **words, version=__version__, **{"error of O": error})
        timed(output, shape, layer, inputs, **words)


def measured(shape: Shape, given: argparse.Namespace) -> bool:
    """All forms on one shape; whether every one is right."""
    device, first, right = given.device, None, True
    size = {"shape": shape.name, "ranks": dist.get_world_size(), "device": "cpu" if device == "cpu" else torch.cuda.get_device_name()}
    for form in FORMS:
        words = {"what": "ring_attention", "form": form, **size}
        attend = ours(form, given.kernel, shape.causal)
        try:
            error = largest(shape.error(attend(*shape.mine[:3])), device)
        except ValueError as refused:  # on all ranks alike
            tell(given.output, **words, why=str(refused).partition("\n")[0])
            continue
        words["by"] = carrier(dist.group.WORLD)
        made = gradients(attend, shape.mine)
        first = first or made
        apart = [largest(float(((a - b).abs() / (1 + b.abs())).max()), device) for a, b in zip(made, first, strict=True)]
        tell(given.output, **words, **{"error of O": error, "gradients to ring's": apart, "passed": max(error, *apart) <= FAR})
        right = right and max(error, *apart) <= FAR
        if device != "cpu":
            timed(given.output, shape, attend, shape.mine, **words)
    for rotation in () if device == "cpu" or given.no_torch else ROTATIONS:
        words = {"what": "context_parallel", "form": rotation, **size}
        try:
            theirs(given.output, shape, rotation, **words)
        except Exception as error:  # whatever it does not take, on all ranks alike
            tell(given.output, **words, why=str(error).partition("\n")[0])
    if device != "cpu" and not given.no_torch:
        words = {"what": "ulysses", "form": "yunchang", **size}
        try:
            ulysses(given.output, shape, device, **words)
        except Exception as error:  # that it is not there, for one
            tell(given.output, **words, why=str(error).partition("\n")[0])
    return right


def main() -> None:
    """Every shape, or some."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="SHAPE", help=f"some of {' '.join(SHAPES)}")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--no-torch", action="store_true", help="without context_parallel and Ulysses")
    parser.add_argument("--last-start", type=float, default=float("inf"), metavar="SECONDS", help="no shape begins later")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="FOLDER")
    given = parser.parse_args()
    began, end = time.monotonic(), "_cpu" * (given.device == "cpu")
    folder, given.output = given.output, given.output / f"forms{end}.jsonl"
    faulthandler.dump_traceback_later(PATIENCE)
    if given.device == "cuda":
        given.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(given.device)
    dist.init_process_group("gloo" if given.device == "cpu" else "cpu:gloo,cuda:nccl")
    if dist.get_rank() == 0:  # first: a run that is cut off keeps its lines
        device = "cpu" if given.device == "cpu" else torch.cuda.get_device_name()
        write_env(folder / f"forms_env{end}.json", environment(device=device, ranks=dist.get_world_size()))
    shapes, right = CPU_SHAPES if given.device == "cpu" else SHAPES, True
    for name in given.only or shapes:
        if largest(time.monotonic() - began, given.device) > given.last_start:
            tell(given.output, what="left out", shape=name, why=f"more than {given.last_start:g} s were over")
            continue
        right = measured(Shape(name, shapes[name], given.device), given) and right
    dist.destroy_process_group()
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
