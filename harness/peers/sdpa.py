"""PyTorch's scaled_dot_product_attention: its own choice on a CPU, and each of its GPU backends, forced and checked to have run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..fault import UsageFault
from ..problem import Problem
from .base import ANY_DIMS
from .on_torch import Attention, Step, TorchDevice, TorchPeer, operators

HALF = ("float16", "bfloat16")
TORCH = "pip install torch"


@dataclass(frozen=True, kw_only=True)
class Sdpa(TorchPeer):
    """One backend of scaled_dot_product_attention. backend is torch's SDPBackend name ("" leaves the choice to torch).

    operator: the one that must have run; "" for math, which is composed of others, and for no forced backend. Torch's is_causal is
    aligned top-left, which is causal_shift 0. Any other mask is passed as a tensor, or refused. repeats_heads: it has no grouped heads,
    so K and V are repeated for each query head of a group, as Transformers does (repeat_kv); the copies are part of the run.
    """

    backend: str
    operator: str = ""
    repeats_heads: bool = False
    modules: tuple[str, ...] = ("torch",)
    install: str = TORCH

    def attention(self, problem: Problem, device: TorchDevice) -> Attention:
        """The function, with its mask."""
        import torch

        mask = None
        if problem.causal and problem.causal_shift:
            mask = torch.ones(problem.seq_q, problem.seq_kv, dtype=torch.bool, device=device).tril(problem.causal_shift)
        options = {"attn_mask": mask, "is_causal": problem.causal and mask is None, "scale": problem.scale}
        group = problem.heads_q // problem.heads_kv
        run = torch.nn.functional.scaled_dot_product_attention
        if group > 1 and self.repeats_heads:
            return lambda q, k, v: (run(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options),)
        if group > 1:
            options["enable_gqa"] = True
        return lambda q, k, v: (run(q, k, v, **options),)

    def forced(self) -> contextlib.AbstractContextManager[object]:
        """Only this backend."""
        if not self.backend:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        forced: contextlib.AbstractContextManager[object] = sdpa_kernel(getattr(SDPBackend, self.backend))
        return forced

    def ran(self, step: Step, pass_: str) -> str:
        """The attention operator that torch dispatched, or for math its softmax. Raises UsageFault where it is not the forced one."""
        import torch

        seen = operators(step)
        fused = [name for name in seen if "attention" in name]
        dispatched = fused or [name for name in seen if "softmax" in name]
        wanted = self.operator + ("_backward" if self.operator and pass_ == "backward" else "")
        right = not self.backend or (fused == [wanted] if wanted else not fused)
        if not right or not dispatched:
            raise UsageFault(
                f"{self.name} did not run",
                f"torch ran {', '.join(dispatched) or 'no attention'}, not {wanted or 'its math backend'}",
                "leave it out: --peers",
            )
        text = f"{dispatched[0]}{' (math)' if not fused else ''}, torch {torch.__version__}"
        if self.backend == "CUDNN_ATTENTION":
            number = torch.backends.cudnn.version()
            text += f", cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}"
        return text if self.device == "cuda" else f"{text}, {torch.get_num_threads()} threads"


PEERS = (
    Sdpa(name="torch-cpu", device="cpu", dtypes=("float32", "float16", "bfloat16", "float64"), backend="", widest=None, dims_v=ANY_DIMS),
    Sdpa(
        name="torch-math", device="cuda", dtypes=("float32", "float16", "bfloat16", "float64"), backend="MATH", widest=None, dims_v=ANY_DIMS
    ),
    Sdpa(
        name="torch-efficient",
        device="cuda",
        dtypes=("float32", *HALF),
        backend="EFFICIENT_ATTENTION",
        operator="aten::_scaled_dot_product_efficient_attention",
        widest=None,
        row_bytes=16,
        dims_v=ANY_DIMS,
        repeats_heads=True,
        causal="seen",
    ),
    Sdpa(
        name="torch-flash",
        device="cuda",
        dtypes=HALF,
        backend="FLASH_ATTENTION",
        operator="aten::_scaled_dot_product_flash_attention",
        causal="square",
        arch=(80, 999),
    ),
    Sdpa(
        name="torch-cudnn",
        device="cuda",
        dtypes=HALF,
        backend="CUDNN_ATTENTION",
        operator="aten::_scaled_dot_product_cudnn_attention",
        row_bytes=16,
        dims_v=ANY_DIMS,
        causal="seen",
        arch=(80, 999),
    ),
)
