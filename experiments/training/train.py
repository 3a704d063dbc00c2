"""A small character GPT learns this repository's text, with our attention and with torch's: python experiments/training/train.py

One training has harness.torch_op.sdpa in the place of torch.nn.functional.scaled_dot_product_attention; the other leaves torch's. All else
is the same: initial weights, batches, optimizer. The model is that of sweep.toml. It writes loss.csv and loss_env.json here and draws
plots/training_loss.png of them (all three into --output-dir); --draw only draws. On a CPU the model is small, and its files end in _cpu.
What a training step costs is `fa-cli experiment training`.

Below torchrun the ranks share out the rows of each batch (context_parallel), and rank 0 then trains alone: loss_ranks.csv has both losses.
    torchrun --nproc-per-node 4 experiments/training/train.py --device cpu --steps 200
"""

from __future__ import annotations

import csv
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends, torch_op
from harness.files.environment import environment, read_env, write_env
from harness.torch_op.training import TORCH, Size, losses
from harness.verbs.sweep import load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def size_of(device: str) -> Size:
    """The model of the sweep."""
    sweep = load(str(HERE / "sweep.toml"))
    return Size(**((sweep.cpu_training if device == "cpu" else sweep.training) or {}))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(end: str, folder: Path = HERE, pictures: Path = ROOT / "plots") -> None:
    """plots/training_loss.png of loss.csv and loss_env.json: both curves, and below them their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with (folder / f"loss{end}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    env = read_env(folder / f"loss_env{end}.json")
    steps, theirs, ours = ([float(row[name]) for row in rows] for name in ("step", "torch", "fa_cli"))
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.4, 4.8), height_ratios=(3, 1), sharex=True, layout="constrained")
    many = max(1, len(steps) // 60)
    means = [[statistics.fmean(losses[max(0, i - many) : i + 1]) for i in range(len(steps))] for losses in (theirs, ours)]
    above.plot(steps, theirs, color="0.85", linewidth=0.5)
    above.plot(steps, means[0], color="0.55", linewidth=3.5, label=f"torch's scaled_dot_product_attention, mean of {many} steps")
    above.plot(steps, means[1], color="#0173b2", linewidth=1.2, label="fa_cli's sdpa in its place")
    above.set(ylabel="loss (nats a character)")
    above.set_title(f"A character GPT on this repository's text\n{env['device_name']}, {env['model']}", fontsize=10)
    above.legend(frameon=False)
    below.plot(steps, [b - a for a, b in zip(theirs, ours, strict=True)], color="#0173b2", linewidth=0.7)
    below.set(ylabel="difference", xlabel="training step")
    figure.supxlabel(f"commit {(env['git_commit'] or '')[:10]}", fontsize=6, x=0.99, ha="right")
    figure.savefig(pictures / f"training_loss{end}.png", dpi=200)
    plt.close(figure)


def over_ranks(device: str, size: Size, folder: Path, end: str) -> None:
    """Train over the ranks that torchrun has started, then on rank 0 alone, and write both losses."""
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    together = losses(size, device, torch_op.sdpa, dist.group.WORLD)
    dist.destroy_process_group()
    if rank:
        return
    record = environment(**backends.pick(device).environment(), model=size.describe(), ranks=ranks)
    alone = losses(size, device, torch_op.sdpa)
    rows = [{"step": i, "alone": a, "over_ranks": b} for i, (a, b) in enumerate(zip(alone, together, strict=True), 1)]
    write(folder / f"loss_ranks{end}.csv", rows)
    write_env(folder / f"loss_ranks_env{end}.json", record)
    apart = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    click.echo(
        f"after {size.steps} steps: alone {alone[-1]:.4f}, over {ranks} ranks {together[-1]:.4f}; never further apart than {apart:.2g}"
    )


@click.command()
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--steps", type=int, help="Training steps.  [default: those of sweep.toml]")
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), help="For all files.  [default: here, figures to plots]")
@click.option("--draw", "only_draw", is_flag=True, help="Draw what was recorded.")
def main(device: str, steps: int | None, output_dir: Path | None, only_draw: bool) -> None:
    """Train twice, write both losses and draw them."""
    end, folder, pictures = "_cpu" if device == "cpu" else "", output_dir or HERE, output_dir or ROOT / "plots"
    if only_draw:
        return draw(end, folder, pictures)
    size = size_of(device)
    size = dataclasses.replace(size, steps=steps or size.steps)
    if "WORLD_SIZE" in os.environ:
        return over_ranks(device, size, folder, end)
    record = environment(**backends.pick(device).environment(), model=size.describe())
    theirs, ours = losses(size, device, TORCH), losses(size, device, torch_op.sdpa)
    write(folder / f"loss{end}.csv", [{"step": i, "torch": a, "fa_cli": b} for i, (a, b) in enumerate(zip(theirs, ours, strict=True), 1)])
    write_env(folder / f"loss_env{end}.json", record)
    draw(end, folder, pictures)
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    click.echo(f"after {size.steps} steps: torch {theirs[-1]:.4f}, fa_cli {ours[-1]:.4f}; never further apart than {apart:.2g}")
    return None


if __name__ == "__main__":
    main()
