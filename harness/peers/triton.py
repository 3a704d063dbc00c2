"""A fused attention in Triton, forward and backward, written here (triton_kernels.py): the result of a week's work in a tile language.

The kernels are in another module, which imports Triton: finding out whether this peer is installed must not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..problem import Problem
from .on_torch import Step, Tensor, TorchPeer, module, version


@dataclass(frozen=True, kw_only=True)
class Triton(TorchPeer):
    """Our Triton kernels on (B, H, S, D) tensors. float32 is computed as IEEE float32, not TF32."""

    bottom_right: bool = True

    def start(self, problem: Problem, x: Mapping[str, Tensor], pass_: str) -> Step:
        """The launches of a pass. O and logsumexp of a backward pass are computed here."""
        step: Step = module(self, f"{__package__}.triton_kernels").step(problem, x, pass_)
        return step

    def ran(self, step: Step, pass_: str) -> str:
        """Our kernels, and the compiler's version."""
        return f"fa-cli's fused attention, {version('triton')}"


PEERS = (
    Triton(
        name="triton",
        device="cuda",
        dtypes=("float32", "float16", "bfloat16"),
        modules=("torch", "triton"),
        install="pip install triton",
        widest=128,
        arch=(80, 999),
    ),
)
