"""Device memory of a rank: tensors side by side in one buffer, so that K and V (or dK and dV) travel as one message."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import Backend
from ..backends.launch import View
from ..dataset.storage import STORAGE

_POISON = 0xFF


class Block:
    """`count` tensors of (batch, heads, rows, pitch) elements, packed without a gap for the rows they have: at most `most`.

    dtype: their storage type. A shard of fewer rows fills the first bytes of the buffer. New memory is poisoned: NaN in every type.
    """

    def __init__(self, backend: Backend, count: int, batch: int, heads: int, most: int, pitch: int, dtype: str) -> None:
        self.backend, self.count, self.batch, self.heads, self.pitch = backend, count, batch, heads, pitch
        self.storage = STORAGE[dtype]
        self.buffer = backend.memory(max(16, self.bytes(max(1, most))))
        self.buffer[:] = _POISON

    def bytes(self, rows: int) -> int:
        """Bytes of all tensors with so many rows."""
        return self.count * self.batch * self.heads * rows * self.pitch * self.storage.itemsize

    def part(self, rows: int) -> Any:
        """The bytes of all tensors with so many rows: a message."""
        return self.buffer[: self.bytes(rows)]

    def view(self, rows: int, index: int = 0, first: int = 0) -> View:
        """Where a tensor of so many rows is, from row `first` on."""
        head = rows * self.pitch
        start = (index * self.batch * self.heads * rows + first) * self.pitch * self.storage.itemsize
        return View(self.backend.address(self.buffer) + start, self.heads * head, head, self.pitch)

    def array(self, rows: int) -> Any:
        """(count, batch, heads, rows, pitch) elements; bfloat16 as uint16 where the array module has no such type."""
        item = self.storage
        if self.backend.xp is not np and item.kind == "V":
            item = np.dtype(f"<u{item.itemsize}")
        return self.part(rows).view(item).reshape(self.count, self.batch, self.heads, rows, self.pitch)

    def upload(self, arrays: list[Any]) -> None:
        """Fill from host arrays (batch, heads, rows, columns) of the storage type; the columns up to the pitch stay poisoned."""
        rows, columns = arrays[0].shape[2:]
        if not rows:
            return
        made = self.array(rows)
        for index, array in enumerate(arrays):
            source = np.ascontiguousarray(array)
            xp = self.backend.xp
            made[index][..., :columns] = source if xp is np else xp.asarray(source.view(made.dtype))

    def download(self, rows: int, columns: int) -> list[Any]:
        """The tensors as host arrays (batch, heads, rows, columns)."""
        flat = np.asarray(self.backend.get(self.part(rows))).view(self.storage)
        whole = flat.reshape(self.count, self.batch, self.heads, rows, self.pitch)
        return [np.ascontiguousarray(each[..., :columns]) for each in whole]
