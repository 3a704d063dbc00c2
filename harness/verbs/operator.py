"""The PyTorch operator measured as peers are: by its Python function on torch tensors, a backward pass through autograd.

A kernel's own row has its launch alone. A library's attention is called from Python, and so is this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..check.contender import Contender
from ..peers.on_torch import Attention, Step, TorchDevice, TorchPeer, version
from ..problem import DTYPE_BYTES, Problem
from ..row import OPERATOR


@dataclass(frozen=True, kw_only=True)
class Operator(TorchPeer):
    """attention() with the kernels that auto takes, in the form that is asked for; it writes logsumexp too."""

    name: str = OPERATOR
    dtypes: tuple[str, ...] = tuple(DTYPE_BYTES)
    modules: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    widest: int | None = None

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The function; O and logsumexp of its result."""
        from ..torch_op import attention  # it imports PyTorch

        shift = problem.causal_shift if problem.causal else None
        options: dict[str, Any] = {"causal": problem.causal, "scale": problem.scale, "causal_shift": shift}
        options |= {"deterministic": self.deterministic, "return_lse": True}
        return lambda q, k, v: attention(q, k, v, **options)

    def ran(self, step: Step, pass_: str) -> str:
        """The function, and PyTorch's version."""
        return f"fa_cli.attention, {version('torch')}"


def contender(device: str, deterministic: bool) -> Contender:
    """The operator on a kind of device ("cpu" or "cuda"), as a sweep's contender."""
    return Contender(OPERATOR, peer=Operator(device=device, deterministic=deterministic), deterministic=deterministic)
