"""What a rank of the ring has in device memory: its rows of each tensor, the K and V that travel, sums, and its launches' workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends import Backend
from ..backends.launch import Launcher, View
from ..check.contender import Contender
from ..dataset.storage import STORAGE
from ..kernel import Kernel, planner
from ..partition import Partition, rows

_POISON = 0xFF


class Block:
    """`count` tensors of (batch, heads, rows, pitch) elements, packed without a gap for the rows they have: at most `most`. K and V
    (or dK and dV) are one block, so that they travel as one message.

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


class Memory:
    """A rank's tensors. inputs: the whole problem's host storage arrays, of which it keeps its own rows; with dO for a backward pass."""

    def __init__(self, backend: Backend, partition: Partition, contender: Contender, rank: int, inputs: Mapping[str, Any]) -> None:
        self.backend, self.partition, self.rank, self.problem = backend, partition, rank, partition.problem
        self._contender = contender
        queries, keys = partition.queries[rank], partition.keys[rank]
        self.q_rows, self.k_rows = rows(queries), rows(keys)
        self._blocks: dict[str, Block] = {}
        self._spaces: dict[Any, list[Any]] = {}
        p = self.problem
        most = max(rows(chunks) for chunks in partition.keys)
        self.q = self._block("Q", 1, p.heads_q, self.q_rows)
        self.kv = [self._block(f"KV{i}", 2, p.heads_kv, most) for i in range(min(3, partition.ranks))]  # home, and two that travel
        self.out = self._block("O", 1, p.heads_q, self.q_rows)
        self.step_out = self._block("step O", 1, p.heads_q, self.q_rows)
        self.step_lse, self.lse = (self._block(name, 1, p.heads_q, self.q_rows, "float32", 1) for name in ("step logsumexp", "logsumexp"))
        self.sum = self._block("sum", 1, p.heads_q, self.q_rows, "float32")  # of O, then of dQ
        self.q.upload([_own(inputs["Q"], queries)])
        self.kv[0].upload([_own(inputs[name], keys) for name in ("K", "V")])
        self.sums: list[Block] = []  # of dK and dV
        if "dO" in inputs:
            self.d_out, self.dq, self.step_dq = (self._block(name, 1, p.heads_q, self.q_rows) for name in ("dO", "dQ", "step dQ"))
            self.dkv, self.step_dkv = (self._block(name, 2, p.heads_kv, most) for name in ("dKV", "step dKV"))
            self.sums = [self._block(f"dKV sum {i}", 2, p.heads_kv, most, "float32") for i in range(min(2, partition.ranks))]
            self.d_out.upload([_own(inputs["dO"], queries)])

    @property
    def bytes(self) -> int:
        """Device memory the tensors and workspaces take."""
        spaces = [space for made in self._spaces.values() for space in made]
        return sum(int(b.buffer.nbytes) for b in self._blocks.values()) + sum(int(space.nbytes) for space in spaces)

    def held(self, step: int) -> tuple[Block, int]:
        """The K and V of a step: where they are, and how many rows. The rank's own stay where they are, for the next run."""
        block = self.kv[0] if step == 0 else self.kv[1 + (step - 1) % (len(self.kv) - 1)]
        return block, rows(self.partition.keys[self.partition.source(self.rank, step)])

    def summed(self, step: int) -> tuple[Block, int]:
        """The dK and dV sums of a step, of the same rows; at step `ranks` they are home."""
        return self.sums[step % len(self.sums)], rows(self.partition.keys[self.partition.source(self.rank, step)])

    def outputs(self, pass_: str) -> dict[str, Any]:
        """This rank's rows of what a pass writes, host storage arrays. The device has finished."""
        dim = self.problem.head_dim
        if pass_ == "forward":
            return {"O": self.out.download(self.q_rows, dim)[0], "logsumexp": self.lse.download(self.q_rows, 1)[0][..., 0]}
        d_k, d_v = self.dkv.download(self.k_rows, dim)
        return {"dQ": self.dq.download(self.q_rows, dim)[0], "dK": d_k, "dV": d_v}

    def workspaces(self, made: Launcher) -> list[Any]:
        """Launches follow one another on one stream, so those of all tasks share their workspaces, as large as the largest needs; one
        that keeps its values from run to run (zero_once) belongs to its launch plan."""
        found = []
        for index, space in enumerate(made.loaded.plan.workspaces):
            key = (made.loaded.kernel.path, index, made.loaded.plan if space.init == "zero_once" else None)
            if key not in self._spaces:
                size = space.bytes if space.init == "zero_once" else self._most_workspace(made.loaded.kernel, index)
                self._spaces[key] = [self.backend.memory(max(16, size))]
                self._spaces[key][0][:] = 0 if space.init == "zero_once" else 0xFF
            found += self._spaces[key]
        return found

    def _most_workspace(self, kernel: Kernel, index: int) -> int:
        steps = [self.partition.tasks(self.rank, step) for step in range(self.partition.ranks)]
        mine = [task.problem for tasks in (*steps, *self.partition.own_tasks(self.rank)) for task in tasks]
        plans = [planner.plan(kernel, problem, self.backend.device(), self._contender.tiles) for problem in dict.fromkeys(mine)]
        return max(plan.workspaces[index].bytes for plan in plans)

    def _block(self, name: str, count: int, heads: int, most: int, dtype: str = "", pitch: int = 0) -> Block:
        """Rows have room for whole vectors of 16 bytes of the problem's type, also where they are float32."""
        pitch = pitch or self.problem.row_pitch("Q")
        made = self._blocks[name] = Block(self.backend, count, self.problem.batch, heads, most, pitch, dtype or self.problem.dtype)
        return made


def _own(array: Any, chunks: tuple[tuple[int, int], ...]) -> Any:
    """A rank's rows of a whole tensor, side by side."""
    return np.concatenate([array[:, :, start:stop] for start, stop in chunks] or [array[:, :, :0]], axis=2)
