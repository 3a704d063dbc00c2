"""What a training step of a language model costs with each attention: python experiments/training/steps.py [--output-dir DIR]

GPT-2 small at 16 x 1024 and at 2 x 8192 tokens, and a model of Llama 3.2 1B's sizes at 4 x 4096: bfloat16 autocast, fused AdamW, not
compiled. Our operator in its faster form, PyTorch's scaled_dot_product_attention by its flash and by its cuDNN backend, and
FlashAttention-4, each in the place of the model's attention; all else is the same: weights at the start, tokens, optimizer. They take
turns of a few steps; a line has the median of the turns, and steps.csv them all. Ninety seconds on an H200; --device cpu runs a small
model, to show that all of it works. Before that, the gradients of the first layer's qkv, of the same weights, are compared: an attention
that computes something else, as one that sees its own half of the keys, is seen there and not in a loss.

Below torchrun a model is trained on the GPUs together: with its own rows on each, which attend to themselves ("own rows"), and with a part
of the positions of all rows on each (context_parallel, by its forms). Tokens and FLOPs of a GPU are the same, and so is the sum of gradients
behind each backward pass; what is more is the attention's communication. ranks.csv and ranks.md are of that; a step is the slowest rank's.
    torchrun --nproc-per-node 2 experiments/training/steps.py [--profile]
"""

from __future__ import annotations

import contextlib
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends
from harness.files.environment import environment, write_env
from harness.torch_op import attention, context_parallel

Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Model:
    """Sizes. gated: RMSNorm and a gated perceptron as Llama has them, else LayerNorm and GELU as GPT-2."""

    name: str
    layers: int
    heads: int
    heads_kv: int
    dim: int
    inner: int
    words: int
    batch: int
    seq: int
    gated: bool = False


GPT2 = {"layers": 12, "heads": 12, "heads_kv": 12, "dim": 64, "inner": 3072, "words": 50257}
LLAMA = {"layers": 16, "heads": 32, "heads_kv": 8, "dim": 64, "inner": 8192, "words": 128256, "gated": True}
MODELS = (
    Model("GPT-2 small", **GPT2, batch=16, seq=1024),
    Model("GPT-2 small", **GPT2, batch=2, seq=8192),
    Model("Llama 3.2 1B's sizes", **LLAMA, batch=4, seq=4096),
)
SMALL = (Model("small", 2, 4, 2, 32, 64, 97, 2, 48, True),)
#: Over ranks: batch is that of a rank.
LONG = (Model("Llama 3.2 1B's sizes", **LLAMA, batch=1, seq=16384), Model("GPT-2 small", **GPT2, batch=1, seq=16384))
FORMS = ("ring", "all_to_all", "auto")
#: How far a gradient may be from another way's, relative.
FAR = 0.05
#: Of a step's time, what a kernel has to have for a line of its own in a profile.
SHARE = 0.01


class Block(torch.nn.Module):  # type: ignore[misc]
    """Causal attention and a perceptron, each behind a norm and added to its input. The places of tokens are left out: they cost nothing."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, self.model = model.heads * model.dim, model
        self.norms = torch.nn.ModuleList((torch.nn.RMSNorm if model.gated else torch.nn.LayerNorm)(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (model.heads + 2 * model.heads_kv) * model.dim, bias=not model.gated)
        self.out = torch.nn.Linear(width, width, bias=not model.gated)
        self.up = torch.nn.Linear(width, model.inner * (1 + model.gated), bias=not model.gated)
        self.down = torch.nn.Linear(model.inner, width, bias=not model.gated)

    def forward(self, x: Any, attend: Attend) -> Any:
        """(batch, rows, width) to the same."""
        m = self.model
        parts = self.qkv(self.norms[0](x)).split([heads * m.dim for heads in (m.heads, m.heads_kv, m.heads_kv)], -1)
        x = x + self.out(attend(*(t.unflatten(-1, (-1, m.dim)).transpose(1, 2) for t in parts)).transpose(1, 2).flatten(2))
        inner = self.up(self.norms[1](x))
        if m.gated:
            gate, inner = inner.chunk(2, -1)
            return x + self.down(functional.silu(gate) * inner)
        return x + self.down(functional.gelu(inner))


class Net(torch.nn.Module):  # type: ignore[misc]
    """Tokens in, the logits of the next ones out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width = model.heads * model.dim
        self.token = torch.nn.Embedding(model.words, width)
        self.blocks = torch.nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, model.words, bias=False)

    def forward(self, text: Any, attend: Attend) -> Any:
        """(batch, rows) tokens to (batch, rows, words)."""
        x = self.token(text)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def ours(q: Any, k: Any, v: Any) -> Any:
    """Our operator."""
    return attention(q, k, v, causal=True, deterministic=False)


def fa4(q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-4, which takes (batch, rows, heads, head_dim)."""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)[0].transpose(1, 2)


def torchs(q: Any, k: Any, v: Any) -> Any:
    """torch's own."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@contextlib.contextmanager
def way(name: str) -> Iterator[Attend]:
    """An attention, in what it has to be called in."""
    theirs = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    with sdpa_kernel(theirs[name]) if name in theirs else contextlib.nullcontext():
        yield {"ours": ours, "FA4": fa4}.get(name, torchs)


WAYS = {"cuda": ("ours", "SDPA flash", "SDPA cuDNN", "FA4"), "cpu": ("ours", "SDPA")}


def stepper(model: Model, device: str) -> Callable[..., Any]:
    """A training step by an attention: its loss, on the device. All ways go on with the same weights, one after the other.

    learns: whether the weights are changed; False: the gradient instead of the loss.
    """
    torch.manual_seed(0)
    with torch.device(device):
        net = Net(model)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    text = torch.randint(model.words, (model.batch, model.seq + 1), device=device)

    def step(attend: Attend, learns: bool = True) -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(net(text[:, :-1], attend).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        gradient = net.blocks[0].qkv.weight.grad
        if learns:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() if learns else gradient

    return step


def compare(model: Model, gradients: dict[str, Any]) -> None:
    """Say how far gradients are from the first, relative to it. Raises ClickException where one is too far away."""
    first = next(iter(gradients.values())).double()
    apart = {name: float((each.double() - first).norm() / first.norm()) for name, each in gradients.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        click.echo(f"{model.name}, {model.seq} tokens: gradients of the same weights {max(apart.values()):.1e} apart", err=True)
    if not all(each < FAR for each in apart.values()):  # a NaN is no less
        raise click.ClickException(f"one of them computes something else: {apart}")


def measured(model: Model, device: str, names: tuple[str, ...], turns: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each way and turn."""
    step, wait = stepper(model, device), torch.cuda.synchronize if device == "cuda" else lambda: None
    able, gradients = [], {}
    for name in names:
        try:
            with way(name) as attend:
                gradients[name] = step(attend, learns=False)  # of the same weights; it compiles, too
                step(attend, learns=False)
            able.append(name)
        except (RuntimeError, ValueError, ImportError, TypeError) as error:
            click.echo(f"{model.name} by {name}: {str(error).splitlines()[0][:120]}", err=True)
    compare(model, gradients)
    for turn in range(turns):
        for name in able:
            with way(name) as attend:
                wait()
                began = time.perf_counter()
                for _ in range(steps):
                    loss = step(attend)
                wait()
            took = (time.perf_counter() - began) / steps
            yield {
                "model": model.name,
                "batch": model.batch,
                "seq": model.seq,
                "attention": name,
                "turn": turn,
                "step_ms": round(took * 1e3, 3),
                "tokens_per_s": round(model.batch * model.seq / took),
                "loss": round(float(loss), 4),
            }


def over_ranks(model: Model, device: str, turns: int, steps: int, profiled: list[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each way and turn, on every rank alike. profiled: gets a row for each way, of this rank's kernels in a step."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with torch.device(device):
        net = Net(model)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    text = torch.randint(model.words, (ranks * model.batch, model.seq + 1), device=device)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    own = slice(rank * model.batch, (rank + 1) * model.batch)

    def mean(value: Any) -> Any:
        dist.all_reduce(value)
        return value.div_(ranks)

    def step(name: str, learns: bool = True) -> Any:
        whole = (
            contextlib.nullcontext()
            if name == "own rows"
            else context_parallel(buffers=[inputs, targets], seq_dims=[1, 1], form=name, deterministic=False)
        )
        with whole:
            mine, wanted = (t[own] if name == "own rows" else t for t in (inputs, targets))
            with torch.autocast(device.partition(":")[0], torch.bfloat16):
                logits = net(mine, ours if name == "own rows" else torchs)
                loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            del logits
            loss.backward()
        for parameter in net.parameters():
            mean(parameter.grad)
        gradient = net.blocks[0].qkv.weight.grad
        if learns:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean(loss.detach().clone()) if learns else gradient

    ways = ("own rows", *FORMS)
    compare(model, {name: [step(name, learns=False) for _ in range(2)][0] for name in ways})
    for turn in range(turns):
        for name in ways:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                loss = step(name)
            wait()
            took = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64, device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            row = {"model": model.name, "ranks": ranks, "batch": ranks * model.batch, "seq": model.seq, "attention": name, "turn": turn}
            yield row | {
                "step_ms": round(float(took) * 1e3, 3),
                "tokens_per_s": round(ranks * model.batch * model.seq / float(took)),
                "loss": round(float(loss), 4),
            }
    if profiled is None:
        return
    for name in ways:
        for learns in (False, True):  # the first one settles the profiler
            dist.barrier()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step(name, learns)
                wait()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("nccl:")]
        found = parts([(e.name, e.time_range.start * 1e-3, e.time_range.end * 1e-3) for e in events])
        profiled += [
            {"model": model.name, "attention": name, "part": part, "kernels": n, "ms": round(ms, 3)} for part, (n, ms) in found.items()
        ]


def parts(kernels: Sequence[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """Where a step's time goes, from the name, start and end of its kernels and copies, in ms: how many, and ms of all of it, of what computes
    (all but NCCL's), of NCCL's while nothing else does, of nothing, and of each kernel that has a SHARE of it."""

    def covered(some: Iterable[tuple[str, float, float]]) -> float:
        total, end = 0.0, float("-inf")
        for _, start, stop in sorted(some, key=lambda kernel: kernel[1]):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    computing = [kernel for kernel in kernels if "nccl" not in kernel[0].lower()]
    whole = max(stop for _, _, stop in kernels) - min(start for _, start, _ in kernels)
    busy, computed, n = covered(kernels), covered(computing), len(kernels)
    found = {
        "step": (n, whole),
        "computing": (len(computing), computed),
        "communicating alone": (n - len(computing), busy - computed),
        "idle": (0, whole - busy),
    }
    by_name: dict[str, list[float]] = {}
    for name, start, stop in kernels:
        by_name.setdefault(name.partition("(")[0][:80], []).append(stop - start)
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return found | {name: (len(each), sum(each)) for name, each in largest if sum(each) >= SHARE * whole}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a model, a column a way: tokens a second, medians of the turns."""
    names = list(dict.fromkeys(row["attention"] for row in rows))
    lines = ["| tokens a second | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for name, batch, seq in dict.fromkeys((r["model"], r["batch"], r["seq"]) for r in rows):
        cells = []
        for each in names:
            found = [r["tokens_per_s"] for r in rows if (r["model"], r["batch"], r["seq"], r["attention"]) == (name, batch, seq, each)]
            cells.append(f"{statistics.median(found):,.0f}" if found else "")
        lines.append(f"| {name}, {batch} x {seq} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path(__file__).with_name("steps"))
@click.option("--profile", is_flag=True, help="Over ranks: where a step's time goes too, ranks_parts.csv.")
def main(device: str, turns: int, output_dir: Path, profile: bool) -> None:
    """Print the table; write steps.csv, steps.md and env.json, or those of the ranks."""
    output_dir.mkdir(parents=True, exist_ok=True)
    ranks, first, names = int(os.environ.get("WORLD_SIZE", 0)), True, ("steps", "env")
    if ranks:
        device, names = device if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}", ("ranks", "ranks_env")
        if device != "cpu":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        first = dist.get_rank() == 0
    record = environment(**backends.pick(device).environment(), **({"ranks": ranks} if ranks else {}))
    rows: list[dict[str, Any]] = []
    profiled: list[dict[str, Any]] = []
    for model in SMALL if device == "cpu" else LONG if ranks else MODELS:
        steps = 4 if model.gated else 10
        for row in (
            over_ranks(model, device, turns, steps, profiled if profile else None)
            if ranks
            else measured(model, device, WAYS[device], turns, steps)
        ):
            rows.append(row)
            if first:
                click.echo(f"{row['attention']:12}{row['step_ms']:10.2f} ms{row['tokens_per_s']:10,} tokens/s", err=True)
        if device != "cpu":
            torch.cuda.empty_cache()
    if ranks:
        dist.destroy_process_group()
    if not first:
        return
    for name, lines in ((names[0], rows), (f"{names[0]}_parts", profiled)):
        if not lines:
            continue
        with (output_dir / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    (output_dir / f"{names[0]}.md").write_text(table(rows), encoding="utf-8")
    write_env(output_dir / f"{names[1]}.json", record)
    click.echo(table(rows))


if __name__ == "__main__":
    main()
