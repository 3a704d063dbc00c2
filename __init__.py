"""fa-cli as a package: `from fa_cli import attention` gives the PyTorch operator, and only that loads torch (PEP 562)."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it (harness/__init__.py says why)
if TYPE_CHECKING:
    from typing import Any

    from .harness.torch_op import attention as attention
    from .harness.torch_op import attention_flash as attention_flash
    from .harness.torch_op import attention_naive as attention_naive
    from .harness.torch_op import attention_tiled as attention_tiled
    from .harness.torch_op import sdpa as sdpa

_OPERATOR = ("attention", "attention_flash", "attention_naive", "attention_tiled", "sdpa")


def __getattr__(name: str) -> Any:
    if name not in _OPERATOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .harness import torch_op

    return getattr(torch_op, name)
