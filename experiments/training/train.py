"""A small character GPT learns this repository's text, with our attention and with torch's: python experiments/training/train.py

The model calls torch.nn.functional.scaled_dot_product_attention; one training puts harness.torch_op.sdpa in its place, the other leaves
torch's. All else is the same: initial weights, batches, optimizer. It writes loss.csv and env.json here and draws
plots/training_loss.png of them; --draw only draws. --speed measures instead: tokens a second and peak memory of a training step with
our kernels and with each of torch's backends, in turn, into speed.csv. On a CPU everything is small, runs on the CPU engine, and its
files end in _cpu.
"""

from __future__ import annotations

import contextlib
import csv
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends, torch_op
from harness.environment import environment, read_env, write_env

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = functional.scaled_dot_product_attention
Attend = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training."""

    layers: int
    heads: int
    head_dim: int
    context: int
    batch: int
    steps: int
    lower: Any  # autocast's type, None for float32 throughout

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.head_dim


SIZES = {"cuda": Size(6, 6, 64, 512, 32, 2000, torch.bfloat16), "cpu": Size(2, 2, 32, 64, 8, 1500, None)}


class Block(torch.nn.Module):
    """Causal self-attention and a perceptron, each behind a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(size.width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(size.width, 3 * size.width), torch.nn.Linear(size.width, size.width)
        self.up, self.down = torch.nn.Linear(size.width, 4 * size.width), torch.nn.Linear(4 * size.width, size.width)

    def forward(self, x: Any) -> Any:
        """(batch, rows, width) to the same."""
        q, k, v = (t.unflatten(-1, (self.size.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(torch.nn.Module):
    """Characters in, the logits of the next ones out."""

    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.size = size
        self.token, self.place = torch.nn.Embedding(characters, size.width), torch.nn.Embedding(size.context, size.width)
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = torch.nn.LayerNorm(size.width), torch.nn.Linear(size.width, characters)

    def forward(self, text: Any) -> Any:
        """(batch, rows) characters to (batch, rows, characters)."""
        x = self.token(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Any:
    """The repository's documents, kernels and programs as numbers of characters, and how many characters there are."""
    files = [path for folder in ("", "harness/**/", "kernels_cu/**/", "tests/**/") for path in sorted(ROOT.glob(f"{folder}*.*"))]
    kinds = (".md", ".py", ".cu", ".cuh", ".hpp", ".cpp")
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files if path.suffix in kinds)
    known = {character: number for number, character in enumerate(sorted(set(whole)))}
    return torch.tensor([known[character] for character in whole]), len(known)


@contextlib.contextmanager
def attention_by(attend: Attend) -> Iterator[None]:
    """Another function where models look for scaled_dot_product_attention."""
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = TORCH


def training(size: Size, device: str, seed: int = 0) -> Callable[[], Any]:
    """A fresh model and its batches; each call is a training step and returns its loss, on the device."""
    torch.manual_seed(seed)
    characters, count = text()
    characters, places = characters.to(device), torch.arange(size.context + 1)
    model = Gpt(size, count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3 if size.lower else 3e-3)
    random = torch.Generator().manual_seed(seed)

    def step() -> Any:
        starts = torch.randint(len(characters) - size.context - 1, (size.batch, 1), generator=random)
        batch = characters[(starts + places).to(device)]
        with torch.autocast(device.partition(":")[0], size.lower, enabled=size.lower is not None):
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def losses(size: Size, device: str, attend: Attend) -> list[float]:
    """The losses of a whole training."""
    step = training(size, device)
    with attention_by(attend):
        return [float(loss) for loss in [step() for _ in range(size.steps)]]


# -- speed ------------------------------------------------------------------------------------------------------------


def contenders(device: str) -> dict[str, Attend]:
    """Our attention in both forms, and each backend of torch's, forced."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forced(backend: Any, *given: Any, **options: Any) -> Any:
        with sdpa_kernel(backend):
            return TORCH(*given, **options)

    names = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION") if device != "cpu" else ("MATH", "FLASH_ATTENTION")
    theirs = {f"torch-{name.partition('_')[0].lower()}": partial(forced, getattr(SDPBackend, name)) for name in names}
    return {"fa-cli": partial(torch_op.sdpa, deterministic=False), "fa-cli deterministic": torch_op.sdpa, **theirs}


def takes(attend: Attend, size: Size, device: str) -> bool:
    """Whether an attention takes the model's shapes and type: torch's backends refuse by a RuntimeError, with its reasons as warnings."""
    q = torch.zeros(1, size.heads, size.context, size.head_dim, device=device, dtype=size.lower or torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend(q, q, q, is_causal=True)
    except RuntimeError:
        return False
    return True


def speed(size: Size, device: str, turns: int = 9, steps: int = 20) -> list[dict[str, Any]]:
    """A row for each contender that takes the model: tokens a second (median and percentiles of the turns), a step's peak memory."""
    gpu = device != "cpu"
    wait = partial(torch.cuda.synchronize, device) if gpu else lambda: None
    steps = steps if gpu else 2
    every = {name: (attend, training(size, device)) for name, attend in contenders(device).items() if takes(attend, size, device)}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    peaks = dict.fromkeys(every, 0)
    for turn in range(turns + 1):  # the first is not counted: it compiles
        for name, (attend, step) in every.items():
            wait()
            if gpu:
                torch.cuda.reset_peak_memory_stats(device)
            before, began = torch.cuda.memory_allocated(device) if gpu else 0, time.perf_counter()
            with attention_by(attend):
                for _ in range(steps):
                    step()
            wait()
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - before if gpu else 0)
    tokens = size.batch * size.context
    return [
        {
            "attention": name,
            "tokens_per_s": round(tokens / statistics.median(found)),
            "p20": round(tokens / statistics.quantiles(found, n=5)[3]),
            "p80": round(tokens / statistics.quantiles(found, n=5)[0]),
            "step_peak_bytes": peaks[name] or "",  # above what was allocated before the step: activations, gradients, workspaces
        }
        for name, found in seconds.items()
    ]


# -- files ------------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(end: str) -> None:
    """plots/training_loss.png of loss.csv and env.json: both curves, and below them their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with (HERE / f"loss{end}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    env = read_env(HERE / f"env{end}.json")
    steps, theirs, ours = ([float(row[name]) for row in rows] for name in ("step", "torch", "fa_cli"))
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.4, 4.8), height_ratios=(3, 1), sharex=True, layout="constrained")
    many = max(1, len(steps) // 60)
    means = [[statistics.fmean(losses[max(0, i - many) : i + 1]) for i in range(len(steps))] for losses in (theirs, ours)]
    above.plot(steps, theirs, color="0.85", linewidth=0.5)
    above.plot(steps, means[0], color="0.55", linewidth=3.5, label=f"torch's scaled_dot_product_attention, mean of {many} steps")
    above.plot(steps, means[1], color="#0173b2", linewidth=1.2, label="fa_cli's sdpa in its place")
    above.set(ylabel="loss (nats a character)", title=f"A character GPT on this repository's text\n{env['device_name']}, {env['model']}")
    above.legend(frameon=False)
    below.plot(steps, [b - a for a, b in zip(theirs, ours, strict=True)], color="#0173b2", linewidth=0.7)
    below.set(ylabel="difference", xlabel="training step")
    figure.supxlabel(f"commit {(env['git_commit'] or '')[:10]}", fontsize=6, x=0.99, ha="right")
    figure.savefig(ROOT / "plots" / f"training_loss{end}.png", dpi=200)
    plt.close(figure)


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--steps", type=int, help="Training steps.  [default: 2000 on a GPU, 1500 on a CPU]")
@click.option("--speed", "fast", is_flag=True, help="Measure tokens a second and peak memory instead.")
@click.option("--draw", "only_draw", is_flag=True, help="Draw what was recorded.")
def main(device: str, steps: int | None, fast: bool, only_draw: bool) -> None:
    """Train twice, write both losses and draw them."""
    end = "_cpu" if device == "cpu" else ""
    size = SIZES["cpu" if end else "cuda"]
    if only_draw:
        return draw(end)
    if fast:
        rows = speed(size, device)
        write(HERE / f"speed{end}.csv", rows)
        for row in rows:
            click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
        return None
    size = Size(**{**vars(size), "steps": steps or size.steps})
    model = f"{size.layers} layers, {size.heads} heads of {size.head_dim}, context {size.context}, batch {size.batch}"
    record = environment(**backends.pick(device).environment(), model=f"{model}, {size.lower or 'float32'}".replace("torch.", ""))
    theirs, ours = losses(size, device, TORCH), losses(size, device, torch_op.sdpa)
    write(HERE / f"loss{end}.csv", [{"step": i, "torch": a, "fa_cli": b} for i, (a, b) in enumerate(zip(theirs, ours, strict=True), 1)])
    write_env(HERE / f"env{end}.json", record)
    draw(end)
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    click.echo(f"after {size.steps} steps: torch {theirs[-1]:.4f}, fa_cli {ours[-1]:.4f}; never further apart than {apart:.2g}")
    return None


if __name__ == "__main__":
    main()
