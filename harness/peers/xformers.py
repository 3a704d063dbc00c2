"""xFormers' memory_efficient_attention, which chooses an operator itself: the one that ran is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from ..fault import UsageFault
from ..problem import Problem
from .on_torch import Attention, Step, TorchDevice, TorchPeer, module, operators, version


@dataclass(frozen=True, kw_only=True)
class Xformers(TorchPeer):
    """memory_efficient_attention on (B, S, H, D) tensors; its bottom-right mask is an object, not a tensor."""

    heads_first: bool = False
    bottom_right: bool = True

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The function, with its mask."""
        run = module(self, "xformers.ops").memory_efficient_attention
        biases = module(self, "xformers.ops.fmha.attn_bias")
        bias = biases.LowerTriangularFromBottomRightMask() if problem.causal else None
        return lambda q, k, v: (run(q, k, v, attn_bias=bias, scale=problem.scale),)

    def ran(self, step: Step, pass_: str) -> str:
        """The operator that ran. Raises UsageFault where no attention operator did."""
        dispatched = [name for name in operators(step) if any(word in name for word in ("attention", "flash", "fmha"))]
        if not dispatched:
            raise UsageFault("xformers did not run", "no attention operator was dispatched", "leave it out: --peers")
        return f"{dispatched[0]}, {version('xformers')}"


PEERS = (
    Xformers(
        name="xformers",
        device="cuda",
        dtypes=("float32", "float16", "bfloat16"),
        modules=("torch", "xformers"),
        install="pip install xformers",
        gqa=False,
        causal="seen",
        arch=(70, 999),
        repeats=False,
    ),
)
