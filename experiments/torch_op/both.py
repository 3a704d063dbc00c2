"""Forward and backward through autograd, ours beside torch's and FlashAttention's: python experiments/torch_op/both.py [--output-dir DIR]

What a model's training step runs: a differentiable attention on torch tensors, then its gradient, each output new. Ours is the operator,
in its fast and in its deterministic form (its default); the others are PyTorch's scaled_dot_product_attention with a backend forced, and
the FlashAttention packages. 16k tokens and a hidden size of 2048 in bfloat16, S = 4096 and 16384, D64 and D128, causal and not. Every
gradient is judged against float64, then all are timed in turns, settled. results.csv has a row each, of type BOT;
`python experiments/hopper/table.py DIR/results.csv` compares them. Two minutes on an H200; --device cpu shows that all of it is right.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import backends, peers
from harness.check.choose import AUTO, choose
from harness.check.contender import PassResult, run_peer
from harness.check.oracle import oracle_for
from harness.check.request import Request
from harness.fault import EnvironmentFault, Fault, UsageFault
from harness.files import environment, json_bytes, make_folder, write_files
from harness.measure.sampling import POLICY, measure
from harness.peers.on_torch import Step, Tensor, TorchPeer, operators
from harness.problem import Problem
from harness.row import Row, encoded
from harness.verbs import results

THEIRS = {"cuda": ("torch-cudnn", "torch-flash", "flash-attn2", "fa4"), "cpu": ("torch-cpu",)}


@dataclass(frozen=True, kw_only=True)
class Both(TorchPeer):
    """A differentiable attention whose step is its forward and its backward pass. of: the peer that it is; None: our operator."""

    of: TorchPeer | None = None
    kernel: str = AUTO

    def forced(self) -> contextlib.AbstractContextManager[object]:
        """The peer's own backend."""
        return self.of.forced() if self.of else contextlib.nullcontext()

    def start(self, problem: Problem, x: Mapping[str, Tensor], pass_: str) -> Step:
        """The forward pass with a graph, and the gradient."""
        import torch

        leaves = [x[name].detach().requires_grad_() for name in ("Q", "K", "V")]
        attend = self.of.attention(problem, leaves[0].device) if self.of else self.operator(problem)
        return lambda: torch.autograd.grad(attend(*leaves)[0], leaves, x["dO"])

    def operator(self, problem: Problem) -> Callable[..., Any]:
        """Our attention()."""
        from harness.torch_op import attention

        options: dict[str, Any] = {"causal": problem.causal, "scale": problem.scale, "kernel": self.kernel}
        return lambda q, k, v: (attention(q, k, v, **options, deterministic=self.deterministic),)

    def ran(self, step: Step, pass_: str) -> str:
        """The attention operators that torch dispatched; of a package that is not one of torch's, its version."""
        found = [name for name in operators(step) if "attention" in name or name.startswith("fa::")]
        return "+".join(found) or (self.of.ran(step, pass_) if self.of else "attention()")


def contenders(device: str, kernel: str, problem: Problem, backend: backends.Backend) -> list[Both]:
    """Ours in both forms, then theirs. Ours is named after the kernels that it takes."""
    found = []
    for deterministic in (False, True):
        name = choose(Request(kernel, "both", problem, deterministic=deterministic), backend.device())[0][0].name
        same: dict[str, Any] = {"kernel": kernel, "deterministic": deterministic, "device": device, "dtypes": (problem.dtype,)}
        found.append(Both(name=name + " deterministic" * deterministic, **same, modules=("torch",), install="pip install torch"))
    for each in THEIRS[device]:
        peer = peers.find(each)
        assert isinstance(peer, TorchPeer)
        facts = {name: getattr(peer, name) for name in Both.__dataclass_fields__ if name not in ("of", "kernel")}
        found.append(Both(**facts, of=peer))
    return found


def shape_row(problem: Problem, test: str, one: Both, backend: backends.Backend, run_id: str, **facts: Any) -> Row:
    """A row of type BOT."""
    p = problem
    return Row(
        Test=test,
        Kernel=one.name,
        Type="BOT",
        Batch=p.batch,
        Heads=p.heads_q,
        SeqLen=p.seq_q,
        HeadDim=p.head_dim,
        heads_kv=p.heads_kv,
        seq_kv=p.seq_kv,
        dtype=p.dtype,
        causal=p.causal,
        scale=p.scale,
        seed=42,
        device=backend.name,
        device_name=backend.device().name,
        run_id=run_id,
        **facts,
    )


def rows_of(problem: Problem, test: str, kernel: str, backend: backends.Backend, run_id: str) -> list[Row]:
    """The rows of a shape: what cannot run or is wrong says why, the others are timed in turns."""
    oracle = oracle_for(problem, backend, "backward")
    found: list[Row] = []
    right: dict[str, tuple[Both, PassResult]] = {}
    for one in contenders(backend.name, kernel, problem, backend):
        try:
            if absent := one.absent(backend.name):
                raise EnvironmentFault(f"{one.name} is not here", *absent)
            done = run_peer(one, oracle, "backward")
        except Fault as fault:
            status = "ABSENT" if isinstance(fault, EnvironmentFault) else "REFUSED" if isinstance(fault, UsageFault) else "ERROR"
            found.append(shape_row(problem, test, one, backend, run_id, Status=status, ErrorMessage=" ".join(str(fault).split())))
            continue
        wrong = [name for name, verdict in done.verdicts.items() if not verdict.passed and (one.of is None or not done.passed)]
        if wrong:
            text = f"{', '.join(wrong)} beyond the budget"
            found.append(shape_row(problem, test, one, backend, run_id, Status="FAIL", ErrorMessage=text))
        else:
            right[one.name] = one, done
    timings = measure({name: done.timed for name, (_, done) in right.items()}, backend, "warm", POLICY[backend.name])
    for name, (one, done) in right.items():
        t = timings[name]
        facts = {"KernelTime_ms": t.median_ms, "p20_ms": t.p20_ms, "p80_ms": t.p80_ms, "call_ms": t.call_ms, "n_samples": len(t.seconds)}
        rate = {"timing": "warm", "TFLOPS": problem.flops("both") / (t.median_ms * 1e9), "peak_bytes": done.device_bytes}
        errors = {f"MaxError_{tensor}": verdict.max_abs for tensor, verdict in done.verdicts.items()}
        same = {"torch_backend": done.ran, "deterministic": one.deterministic or None}
        found.append(shape_row(problem, test, one, backend, run_id, Status="PASS", **facts, **rate, **errors, **same))
    return found


@click.command()
@click.option("--device", default="auto", help="auto, cuda or cpu.")
@click.option("--kernel", default=AUTO, show_default=True, help="Ours, as attention(kernel=…) takes it.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=Path(__file__).with_name("both"), show_default=False)
def main(device: str, kernel: str, output_dir: Path) -> None:
    """Print a line a row; write results.csv and env.json. Exit code 1 where one of ours is wrong or does not run."""
    backend, rows = backends.pick(device), list[Row]()
    small = backend.name == "cpu"
    run_id, lengths = results.new_run_id(), (65, 128) if small else (4096, 16384)
    for dim in (64, 128):
        for seq in lengths:
            for causal in (False, True):
                batch, heads = (1, 1) if small else (16384 // seq, 2048 // dim)
                problem = Problem.of(batch, heads, seq, dim, dtype="bfloat16", causal=causal)
                for row in rows_of(problem, f"D{dim}-S{seq}{'_causal' * causal}", kernel, backend, run_id):
                    rows.append(row)
                    said = (
                        f"{row.KernelTime_ms:9.3f} ms {row.TFLOPS:7.1f} TF  {row.torch_backend}" if row.KernelTime_ms else row.ErrorMessage
                    )
                    click.echo(f"{row.Test or '':20}{row.Kernel:34}{row.Status:8}{said}")
    make_folder(output_dir)
    record = environment.environment(**backend.environment(), run_id=run_id)
    write_files(output_dir, {"results.csv": encoded(output_dir / "results.csv", rows, anew=True), "env.json": json_bytes(record)})
    sys.exit(any(row.Status != "PASS" for row in rows if not peers.find(row.Kernel)))


if __name__ == "__main__":
    main()
