"""What a ring adds up on a rank, in float32: partial O by their logsumexp, and partial gradients. The kernels of kernels_cu/ring do it.

torch does it where they cannot: in float64, of head dims beyond 256, and where a row is not a whole number of 16 bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..backends.launch import Launcher, View, launcher
from ..kernel import Kernel
from ..problem import DTYPE_BYTES, Problem
from ..ring.program import ADD, MERGE, ROUND
from .call import backend_of, current_stream, storage


def merge(total: Any, lse: Any, o: Any, of: Any) -> None:
    """Add a partial O, with its logsumexp, to what is there: both relative to the logsumexp of all keys up to now.

    total: (batch, heads, rows, head_dim), lse: (batch, heads, rows), float32 or float64; where lse is -inf, total is not read. o, of: the
    same of the partial result, o in the type of the inputs. (Milakov & Gimelshein 2018, arXiv 1805.02867, section 3.1.)
    """
    if _launched(MERGE, o, total, K=of, logsumexp=lse):
        return
    new = torch.logaddexp(lse, of)
    reference = new.masked_fill(new == -math.inf, 0)  # a row that has seen no key yet: exp(-inf - 0) is 0
    total.mul_(torch.exp(lse - reference).unsqueeze(-1)).add_(o * torch.exp(of - reference).unsqueeze(-1))
    lse.copy_(new)


def add(total: Any, part: Any) -> None:
    """total += part, both (batch, heads, rows, head_dim); part in the type of the inputs."""
    if not _launched(ADD, part, total):
        total += part


def rounded(total: Any, dtype: Any) -> Any:
    """A sum in the type of the inputs, a contiguous tensor of the same shape; the sum itself where that is its type."""
    if total.dtype == dtype:
        return total
    made = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
    if not _launched(ROUND, made, total):
        made.copy_(total)
    return made


def _launched(path: Path, stored: Any, total: Any, **scores: Any) -> bool:
    """Whether a kernel took its tensors. stored: the one in the type of the inputs, Q of fa::Args, total: the sum, O; for ROUND the reverse."""
    made = _launcher(path, stored.device, storage(stored.dtype), total.dtype, stored.shape, stored.stride(), total.stride())
    if made is None or (stored.data_ptr() | total.data_ptr()) & 15:
        return False
    q, o = (total, stored) if path is ROUND else (stored, total)
    views = {"Q": View(q.data_ptr(), *q.stride()[:3]), "O": View(o.data_ptr(), *o.stride()[:3])}
    views |= {name: View(each.data_ptr(), *each.stride()) for name, each in scores.items()}
    made(views, stream=current_stream(stored.device.index if stored.is_cuda else None))
    return True


@lru_cache(maxsize=256)
def _launcher(path: Path, device: Any, dtype: str, wide: Any, shape: tuple[int, ...], *strides: tuple[int, ...]) -> Launcher | None:
    """The launcher for a shape; None where the kernel does not take tensors of these types and strides."""
    kernel, size = Kernel.read(path), DTYPE_BYTES[dtype]
    aligned = all(steps[3] == 1 and not any(step * size & 15 for step in steps[:3]) for steps in strides)
    if not (aligned and wide == torch.float32 and shape[3] <= kernel.head_dims[-1] and shape[3] * size % 16 == 0 and all(shape)):
        return None
    batch, heads, rows, columns = shape
    return launcher(backend_of(device), kernel, Problem.of(batch, heads, rows, columns, dtype=dtype))
