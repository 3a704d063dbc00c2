"""What a ring adds up on a rank, in float32: partial O by their logsumexp, and partial gradients. The kernels of kernels_cu/ring do it.

torch does it where they cannot: in float64, of head dims beyond 256, of batches or heads beyond 65535, and where a row is not a whole
number of 16 bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..backends.launch import Fixed, Launcher, View, launcher
from ..kernel import ADD, MERGE, ROUND, Kernel
from ..problem import DTYPE_BYTES, Problem
from .call import backend_of, current_stream, storage


def merge(total: Any, lse: Any, o: Any, of: Any) -> None:
    """Add a partial O, with its logsumexp, to what is there: both relative to the logsumexp of all keys up to now.

    total: (batch, heads, rows, head_dim), lse: (batch, heads, rows), float32 or float64; where lse is -inf, total is not read. o, of: the
    same of the partial result, o in the type of the inputs. (Milakov & Gimelshein 2018, arXiv 1805.02867, section 3.1.)
    """
    if _launched(MERGE, o, total, of, lse):
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


def _launched(path: Path, stored: Any, total: Any, *scores: Any) -> bool:
    """Whether a kernel took its tensors. stored: the one in the type of the inputs, total: the sum, scores: two logsumexps, as _NAMES has
    them. Their rows may begin anywhere, which a launcher of fixed strides does not take, and costs several times as much without."""
    tensors = (stored, total, *scores)
    if (stored.data_ptr() | total.data_ptr()) & 15:
        return False
    made = _launchers(path, stored.device, storage(stored.dtype), total.dtype, stored.shape, *(each.stride() for each in tensors))
    if made is None:
        return False
    anywhere, fixed = made
    stream = current_stream(stored.device.index if stored.is_cuda else None)
    if not fixed([each.data_ptr() for each in tensors], stream):
        views = (View(each.data_ptr(), *_steps(each.stride())) for each in tensors)
        anywhere(dict(zip(_NAMES[path], views, strict=True)), stream=stream)
    return True


#: As many blocks, less one, are a grid's second and third dimension: heads and batches.
_BLOCKS = 65536
#: What fa::Args calls the tensors of a launch.
_NAMES = {MERGE: ("Q", "O", "K", "logsumexp"), ADD: ("Q", "O"), ROUND: ("O", "Q")}


@lru_cache(maxsize=256)
def _launchers(
    path: Path, device: Any, dtype: str, wide: Any, shape: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[Launcher, Fixed] | None:
    """For a shape, and for these strides; None where the kernel does not take tensors of these types and strides."""
    kernel, size = Kernel.read(path), DTYPE_BYTES[dtype]
    batch, heads, rows, columns = shape
    aligned = all(steps[3] == 1 and not any(step * size & 15 for step in steps[:3]) for steps in strides[:2])
    fits = 0 < columns <= kernel.head_dims[-1] and columns * size % 16 == 0 and rows > 0 and all(0 < n < _BLOCKS for n in (batch, heads))
    if not (aligned and fits and wide == torch.float32):
        return None
    made = launcher(backend_of(device), kernel, Problem.of(batch, heads, rows, columns, dtype=dtype))
    return made, made.fixed({name: _steps(each) for name, each in zip(_NAMES[path], strides, strict=True)})


def _steps(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """The strides of batch, head and row, of a logsumexp too."""
    return strides[0], strides[1], strides[2]
