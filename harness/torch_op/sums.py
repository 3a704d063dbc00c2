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
from ..problem import Problem
from ..ring.program import ADD, MERGE, ROUND
from .call import backend_of, current_stream, storage


def merge(total: Any, lse: Any, o: Any, of: Any) -> None:
    """Add a partial O, with its logsumexp, to what is there: both relative to the logsumexp of all keys up to now.

    total: (batch, heads, rows, head_dim), lse: (batch, heads, rows), float32 or float64; where lse is -inf, total is not read. o, of: the
    same of the partial result, o in the type of the inputs. (Milakov & Gimelshein 2018, arXiv 1805.02867, section 3.1.)
    """
    if _able(o, total):
        return _launch(MERGE, o, Q=_view(o), K=_view(of.unsqueeze(-1)), O=_view(total), logsumexp=_view(lse.unsqueeze(-1)))
    new = torch.logaddexp(lse, of)
    reference = new.masked_fill(new == -math.inf, 0)  # a row that has seen no key yet: exp(-inf - 0) is 0
    total.mul_(torch.exp(lse - reference).unsqueeze(-1)).add_(o * torch.exp(of - reference).unsqueeze(-1))
    lse.copy_(new)


def add(total: Any, part: Any) -> None:
    """total += part, both (batch, heads, rows, head_dim); part in the type of the inputs."""
    if _able(part, total):
        _launch(ADD, part, Q=_view(part), O=_view(total))
    else:
        total += part


def rounded(total: Any, dtype: Any) -> Any:
    """A sum in the type of the inputs, a contiguous tensor of the same shape; the sum itself where that is its type."""
    if total.dtype == dtype:
        return total
    made = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
    if not _able(made, total):
        return made.copy_(total)
    _launch(ROUND, made, Q=_view(total), O=_view(made))
    return made


def _able(stored: Any, total: Any) -> bool:
    """Whether the kernels take a tensor in the type of the inputs, and a sum."""
    columns = stored.shape[3]
    fits = columns <= Kernel.read(MERGE).head_dims[-1] and columns * stored.element_size() % 16 == 0
    return total.dtype == torch.float32 and stored.numel() > 0 and fits and _aligned(stored) and _aligned(total)


def _aligned(tensor: Any) -> bool:
    """Whether each row begins at a multiple of 16 bytes, and its elements follow each other."""
    *steps, step = tensor.stride()
    return step == 1 and not any(at & 15 for at in (tensor.data_ptr(), *(each * tensor.element_size() for each in steps)))


def _view(tensor: Any) -> View:
    return View(tensor.data_ptr(), *tensor.stride()[:3])


def _launch(path: Path, stored: Any, **views: View) -> None:
    device = stored.device
    _launcher(path, device, storage(stored.dtype), *stored.shape)(views, (), current_stream(device.index if device.type == "cuda" else None))


@lru_cache(maxsize=256)
def _launcher(path: Path, device: Any, dtype: str, batch: int, heads: int, rows: int, head_dim: int) -> Launcher:
    return launcher(backend_of(device), Kernel.read(path), Problem.of(batch, heads, rows, head_dim, dtype=dtype))
