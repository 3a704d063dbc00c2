"""The FlashAttention packages by their own interfaces: 2 (CUDA), 3 (Hopper) and 4 (CuTe DSL). Causal masks are aligned bottom-right.

FlashAttention-2: Dao 2023, arXiv 2307.08691. FlashAttention-3: Shah et al. 2024, arXiv 2407.08608.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from ..formula import as_softcap, as_window
from ..problem import DESCALES, PASSES, Problem
from .base import installed
from .on_torch import Attention, Step, Tensor, TorchDevice, TorchPeer, module, to_torch, version

#: Up to so many queries FlashAttention-3 is asked to divide the keys as it finds best. Left to itself, it does not divide them.
FEW_QUERIES = 64


@dataclass(frozen=True, kw_only=True)
class Flash(TorchPeer):
    """A package's flash_attn_func on (B, S, H, D) tensors. lse: the keyword that makes it return logsumexp too.

    It is asked for logsumexp since our kernels write it as well: the scope is the same.
    """

    package: str  # the module flash_attn_func is in
    distribution: str
    lse: str = "return_attn_probs"
    heads_first: bool = False
    bottom_right: bool = True
    splits: bool = False  # whether num_splits = 0 lets it choose
    forms: tuple[str, ...] = ("window", "softcap")

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The function; O and logsumexp of its results."""
        run = module(self, self.package).flash_attn_func
        options: dict[str, object] = {"softmax_scale": problem.scale, "causal": problem.causal, self.lse: True}
        if self.deterministic:
            options["deterministic"] = True
        if self.splits and problem.seq_q <= FEW_QUERIES and "num_splits" in inspect.signature(run).parameters:
            options["num_splits"] = 0
        if problem.mask is not None and (window := as_window(problem.mask)):
            left, right = window  # its own causal flag is a right of 0
            options |= {"causal": False, "window_size": (left, 0 if problem.causal else right)}
        if problem.score is not None:
            options["softcap"] = as_softcap(problem.score)

        if problem.is_float8:
            options |= {f"{name[-1]}_descale": to_torch(problem.values()[name], "float32").to(device) for name in DESCALES.values()}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
            results: Sequence[Tensor] = run(q, k, v, **options)[:2]
            return results

        return attend

    def ran(self, step: Step, pass_: str) -> str:
        """The function and its package's version: a package has one implementation per GPU."""
        return f"{self.package}.flash_attn_func, {version(self.distribution)}"


def _fa3() -> Flash:
    """FlashAttention-3: the complete build (flash_attn_interface) where it is installed, else the wheel of its bfloat16 forward pass."""
    whole = installed("flash_attn_interface")
    name = "flash_attn_interface" if whole else "fa3_fwd_interface"
    return Flash(
        name="fa3",
        device="cuda",
        dtypes=("bfloat16", "float16", "float8_e4m3") if whole else ("bfloat16", "float8_e4m3"),
        passes=PASSES if whole else ("forward",),
        modules=("torch", name),
        install="pip install fa3-fwd==0.0.3",
        package=name,
        distribution="flash_attn_3" if whole else "fa3-fwd",
        row_bytes=16,
        dims_v=((range(129, 193), range(97, 129)), (range(1, 65), range(1, 257))),  # hopper/flash_api.cpp
        splits=True,
        arch=(80, 90),
    )


PEERS = (
    Flash(
        name="flash-attn2",
        device="cuda",
        dtypes=("float16", "bfloat16"),
        modules=("torch", "flash_attn_2_cuda", "flash_attn"),
        install="pip install flash-attn --no-build-isolation",
        package="flash_attn",
        distribution="flash-attn",
        arch=(80, 999),
    ),
    _fa3(),
    Flash(
        name="fa4",
        device="cuda",
        dtypes=("float16", "bfloat16"),
        modules=("torch", "cutlass", "flash_attn.cute"),
        install="pip install flash-attn-4==4.0.0b36",
        package="flash_attn.cute",
        distribution="flash-attn-4",
        lse="return_lse",
        row_bytes=16,
        dims_v=((range(8, 257), range(8, 257)),),  # on Hopper: _validate_head_dims
        arch=(90, 129),
        compiles=True,
    ),
)
