"""A kernel of the ladder, or any kernel file, as a PyTorch operator with a gradient: ``from fa_cli import attention``.

attention(q, k, v) enqueues a kernel on torch's current stream and on the tensors' own device; on CPU tensors it runs on the CPU engine.
Nothing is copied unless rows are not as <fa/args.cuh> wants them (16-byte aligned, head_dim contiguous), and nothing is allocated but
outputs and workspaces. The operators are fa::forward and fa::backward, made by torch.library.custom_op, so that torch.compile,
checkpointing and CUDA graphs take them as they take torch's own. ring_attention is the same over the ranks of a process group.
"""

from __future__ import annotations

from .context import context_parallel as context_parallel
from .explain import explain as explain
from .float8 import quantize as quantize
from .operator import attention as attention
from .operator import attention_flash as attention_flash
from .operator import attention_naive as attention_naive
from .operator import attention_tiled as attention_tiled
from .ring import ring_attention as ring_attention
from .sdpa import sdpa as sdpa
