"""How long the first call takes: python experiments/torch_op/first_call.py [--dtype bfloat16]. Two processes, one cache folder that is empty.

Each prints seconds: of the imports, of the first call with gradients (forward, backward), and of the first call of a second head dim.
The first process compiles; the second finds on disk what the first compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]


def one_process(dtype: str) -> str:
    """A line of seconds."""
    began, laps = [time.perf_counter()], []

    def lap(name: str) -> None:
        now = time.perf_counter()
        laps.append(f"{name} {now - began[0]:.2f}")
        began[0] = now

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ones(1, device=device).cpu()
    import torch.fx.experimental.symbolic_shapes  # torch's own first gradient imports it, and sympy: over a second

    lap("torch")
    sys.path.insert(0, str(ROOT))
    from harness.torch_op import attention

    lap("the operator's import")

    def pass_by_pass(dim: int, causal: bool) -> None:
        q, k, v = (torch.randn(2, 4, 256, dim, device=device, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
        began[0] = time.perf_counter()  # torch's first random numbers are not ours
        o = attention(q, k, v, causal=causal, deterministic=False)
        o.detach().cpu()
        lap(f"forward D{dim}{' causal' * causal}")
        torch.autograd.grad(o, (q, k, v), q.detach())[0].cpu()
        lap(f"backward D{dim}{' causal' * causal}")

    pass_by_pass(64, True)
    pass_by_pass(64, True)
    pass_by_pass(128, False)
    return ", ".join(laps)


@click.command()
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--own", is_flag=True, hidden=True)
def main(dtype: str, own: bool) -> None:
    """Print a line a process."""
    if own:
        click.echo(one_process(dtype))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("compiles", "finds it on disk"):
            caches = {"FA_CLI_CACHE_DIR": f"{folder}/fa", "CUPY_CACHE_DIR": f"{folder}/cupy"}
            done = subprocess.run(
                [sys.executable, __file__, "--own", "--dtype", dtype],
                env=os.environ | caches,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            click.echo(f"{name}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
