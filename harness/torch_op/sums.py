"""What a ring adds up on a rank: partial O by their logsumexp, and partial gradients. The kernels of kernels_cu/ring do it.

torch does it where they cannot: in float64, of head dims beyond 256, of batches or heads beyond 65535, and where a row is not a whole
number of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..backends.launch import Fixed, Launcher, View, launcher
from ..kernel import ADD, MERGE, Kernel
from ..problem import DTYPE_BYTES, Problem
from .call import backend_of, current_stream, storage


class Sum:
    """A tensor of a rank's rows, the sum of parts that come one after the other, each of a run of rows: of O with their logsumexp.

    Almost all of its cost is memory traffic, and most rows have one part or two. So the first part of a row is kept as it is, and the
    last is rounded with what was before; only rows of three parts and more have a float32 sum in between. A row is rounded once.
    """

    def __init__(self, like: Any, rows: int, parts: Sequence[slice], dtype: Any = None) -> None:
        """like: a tensor (batch, heads, any rows, head_dim) in the type of the inputs. rows: how many this has. parts: the rows of every
        part that will come. dtype: of the sum itself, in place of like's; a first part of another type is converted."""
        self._stored, self._dtype, self._device = like.dtype, dtype or like.dtype, like.device
        self._shape = (*like.shape[:2], rows, like.shape[3])
        self._pieces = [_Piece(*piece) for piece in _pieces(rows, tuple((part.start, part.stop) for part in parts))]
        self._sums: dict[Any, Any] = {}  # by type: its own, and float32 for what is in between
        self._lse: Any = None

    def add(self, part: Any, rows: slice, lse: Any = None) -> None:
        """Add a part, (batch, heads, its rows, head_dim) in the type of the inputs, a gradient also in float32. lse: of a partial O,
        (batch, heads, its rows). Both are kept, and may be written to."""
        first = all(piece.now is None for piece in self._pieces)
        if part.shape == self._shape and part.dtype == self._dtype not in self._sums and part.is_contiguous() and (first or lse is None):
            self._sums[self._dtype], self._lse = part, lse  # what comes is added in its place
        for piece in self._pieces:
            if not (rows.start <= piece.start and piece.stop <= rows.stop):
                continue
            at = slice(piece.start - rows.start, piece.stop - rows.start)
            new, scores = part[:, :, at], None if lse is None else lse[:, :, at]
            piece.to_come -= 1
            if piece.now is None:
                piece.now, piece.lse = new, scores
                continue
            wide = piece.to_come and self._dtype.itemsize < 4
            after = self._sum(torch.float32 if wide else self._dtype)[:, :, piece.start : piece.stop]
            combine(self._stored, new, piece.now, after, piece.lse, scores)
            piece.now = after

    def whole(self) -> Any:
        """The sum, contiguous; rows that no part had are 0."""
        found = self._sum(self._dtype)
        for piece in self._pieces:
            _put(found[:, :, piece.start : piece.stop], piece.now, 0)
        return found

    def logsumexp(self) -> Any:
        """That of an O, (batch, heads, rows), in float32 or float64; -inf of rows that no part had."""
        if self._lse is None:
            self._lse = torch.empty(
                self._shape[:3], dtype=torch.float64 if self._stored == torch.float64 else torch.float32, device=self._device
            )
        for piece in self._pieces:
            _put(self._lse[:, :, piece.start : piece.stop], piece.lse, -math.inf)
        return self._lse

    def _sum(self, dtype: Any) -> Any:
        if dtype not in self._sums:
            self._sums[dtype] = torch.empty(self._shape, dtype=dtype, device=self._device)
        return self._sums[dtype]


@dataclass
class _Piece:
    """Rows that the same parts have."""

    start: int
    stop: int
    to_come: int  # parts
    now: Any = None  # what was added up, or the only part
    lse: Any = None


def _put(to: Any, piece: Any, otherwise: float) -> None:
    """Copy a piece to its place, unless it is there."""
    if piece is None:
        to.fill_(otherwise)
    elif piece.data_ptr() != to.data_ptr():
        to.copy_(piece)


@lru_cache(maxsize=1024)
def _pieces(rows: int, parts: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """The rows cut where a part begins or ends: start, stop, and how many parts have them."""
    borders = sorted({0, rows, *(end for part in parts for end in part)})
    return [(start, stop, sum(first <= start and stop <= last for first, last in parts)) for start, stop in pairwise(borders)]


def combine(stored: Any, part: Any, before: Any, after: Any, lse: Any = None, of: Any = None) -> None:
    """after = before + part, computed in float32 (float64 where that is their type); of O, with logsumexps, what both are of all keys.

    part, before, after: (batch, heads, rows, head_dim), in the type of the inputs, stored, or in float32, but a part of O in stored; after
    may be one of the others. lse: of before, (batch, heads, rows), becomes that of after; of: of part (Milakov & Gimelshein 2018, arXiv 1805.02867,
    section 3.1).
    """
    given = {"Q": part, "V": before, "O": after} | ({} if of is None else {"K": of, "logsumexp": lse})
    if _launched(ADD if of is None else MERGE, stored, given):
        return
    wide = torch.float64 if stored == torch.float64 else torch.float32
    if of is None:
        after.copy_(before.to(wide) + part.to(wide))
        return
    new = torch.logaddexp(lse, of)
    reference = new.masked_fill(new == -math.inf, 0)  # a row that has seen no key yet: exp(-inf - 0) is 0
    kept, added = (torch.exp(each - reference).unsqueeze(-1) for each in (lse, of))
    after.copy_(before.to(wide) * kept + part.to(wide) * added)
    lse.copy_(new)


def _launched(path: Path, stored: Any, tensors: Mapping[str, Any]) -> bool:
    """Whether a kernel took its tensors, as fa::Args calls them. Their rows may begin anywhere, which a launcher of fixed strides does not
    take, and costs several times as much without."""
    summed = [each for name, each in tensors.items() if name in _FLOATS]
    if any(each.data_ptr() & 15 for each in summed):
        return False
    kinds = tuple((name, each.dtype, each.stride()) for name, each in tensors.items())
    made = _launchers(path, summed[0].device, stored, summed[0].shape, kinds)
    if made is None:
        return False
    anywhere, fixed = made
    stream = current_stream(summed[0].device.index if summed[0].is_cuda else None)
    if not fixed([each.data_ptr() for each in tensors.values()], stream):
        anywhere({name: View(each.data_ptr(), *_steps(each.stride())) for name, each in tensors.items()}, stream=stream)
    return True


#: As many blocks, less one, are a grid's second and third dimension: heads and batches.
_BLOCKS = 65536
#: The tile value that says whether a tensor is float32.
_FLOATS = {"Q": "FLOAT_PART", "V": "FLOAT_BEFORE", "O": "FLOAT_AFTER"}


@lru_cache(maxsize=256)
def _launchers(
    path: Path, device: Any, stored: Any, shape: tuple[int, ...], kinds: tuple[tuple[str, Any, tuple[int, ...]], ...]
) -> tuple[Launcher, Fixed] | None:
    """For a shape, and for names, types and strides; None where the kernel does not take them."""
    kernel, dtype = Kernel.read(path), storage(stored)
    batch, heads, rows, columns = shape
    of = {name: (dtype_, strides) for name, dtype_, strides in kinds}
    sizes = [(of[name], of[name][0].itemsize) for name in _FLOATS]
    aligned = all(strides[3] == 1 and not any(step * size & 15 for step in strides[:3]) for (_, strides), size in sizes)
    fits = 0 < columns <= kernel.head_dims[-1] and rows > 0 and all(0 < n < _BLOCKS for n in (batch, heads))
    known = all(each in (stored, torch.float32) for (each, _), _ in sizes) and stored != torch.float64
    if not (aligned and fits and known and columns * DTYPE_BYTES[dtype] % 16 == 0):
        return None
    tiles = {tile: int(of[name][0] != stored) for name, tile in _FLOATS.items() if tile in kernel.tile}
    made = launcher(backend_of(device), kernel, Problem.of(batch, heads, rows, columns, dtype=dtype), tiles)
    return made, made.fixed({name: _steps(strides) for name, (_, strides) in of.items()})


def _steps(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """The strides of batch, head and row, of a logsumexp too."""
    return strides[0], strides[1], strides[2]
