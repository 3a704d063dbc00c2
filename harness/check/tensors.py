"""Tensors in device memory, poisoned and guarded, and a kernel bound to them: the checked buffers above backends/launch.py.

Rows start 16-byte aligned, so a row has a pitch. 0xFF bytes, NaN in every floating-point type, poison the columns between head_dim and
the pitch, the guard bands around every tensor, the outputs before a run, and the workspaces. A read of memory that was never written
then gives NaN, and a write out of bounds changes a guard band. On the CPU inputs are read-only while a kernel runs.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ..array import Array, ArrayModule, Bytes, copied, every, to_host
from ..backends import Backend, Loaded
from ..backends.launch import View, prepare
from ..dataset.storage import STORAGE
from ..fault import KernelFault
from ..formula import Given
from ..kernel.plan import Workspace
from ..problem import DSINKS, READS, Problem

POISON = 0xFF
_ALIGN = 256
_PIECE = 1 << 28
#: Bytes of a layout: an address that is 16-byte aligned and no more, and what each next tensor's rows are further apart.
_STEP = 16
#: Elements of outputs up to which a GPU keeps a copy of them, to be judged and compared with; those of more lie on the host.
PLACED = 1 << 27


def put(xp: ArrayModule, array: Array) -> Array:
    """A host storage array as one of xp, bfloat16 by its bits where that is CuPy, which has no such type. One of CuPy's stays as it is."""
    if xp is np or hasattr(array, "get"):
        return array
    array = np.ascontiguousarray(array)
    return xp.asarray(array.view(np.dtype(f"<u{array.itemsize}")) if array.dtype.kind == "V" else array)


class Tensor:
    """One tensor in device memory: (batch, heads, rows, pitch) elements between two guard bands, poisoned when it is made.

    wide: 0, or the tensor lies as no other does: as (batch, rows + 1, heads, pitch), with rows so many times 16 bytes further apart, and an
    address that is 16-byte aligned only. Of a logsumexp, whose rows are contiguous, the heads are that much further apart. Raises as
    Backend.memory does where there is no room.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: str, pitch: int, wide: int = 0) -> None:
        self.backend, self.shape, self.wide = backend, shape, wide
        self.storage = STORAGE[dtype] if dtype in STORAGE else np.dtype(dtype)
        further = wide * _STEP // self.storage.itemsize
        #: Elements from row to row; without columns, of a head or of all.
        self.pitch = pitch + further if len(shape) == 4 else shape[-1] + further
        rows = math.prod(shape[:-1])
        if wide and len(shape) == 4:
            rows += shape[0] * shape[1]
        self.bytes = rows * self.pitch * self.storage.itemsize
        guard, step = backend.guard_bytes, _STEP if wide else 0
        self._raw = backend.memory(self.bytes + 2 * guard + (_ALIGN if guard else 0) + step)
        self.poison()
        self._start = guard + (-(backend.address(self._raw) + guard) % _ALIGN if guard else 0) + step
        self.address = backend.address(self._raw) + self._start

    @property
    def buffer(self) -> Bytes:
        """The tensor's own bytes."""
        own: Bytes = self._raw[self._start : self._start + self.bytes]
        return own

    @property
    def whole(self) -> Bytes:
        """Its memory with the guard bands."""
        return self._raw

    def rows(self) -> Array:
        """A view (batch, heads, rows, pitch) in the storage type; bfloat16 as uint16 on cupy, which has no such type."""
        item = (
            self.storage if self.backend.xp is np else np.dtype(f"<u{self.storage.itemsize}") if self.storage.kind == "V" else self.storage
        )
        return self.arranged(self.buffer.view(item))

    def arranged(self, flat: Array) -> Array:
        """The view (batch, heads, rows, pitch) of a flat array of its elements, those between its rows included; without columns, its shape."""
        if len(self.shape) != 4:
            return flat.reshape(*self.shape[:-1], self.pitch)[..., : self.shape[-1]]
        batch, heads, rows, _ = self.shape
        if self.wide:
            return flat.reshape(batch, rows + 1, heads, self.pitch)[:, :rows].transpose(0, 2, 1, 3)
        return flat.reshape(batch, heads, rows, self.pitch)

    def upload(self, array: Array) -> None:
        """Copy an array of the tensor's shape and storage type, as :func:`put` takes it; the columns beyond head_dim stay poisoned.

        An array of fewer batches, a divisor of the tensor's, is repeated.
        """
        view, source = self.rows(), put(self.backend.xp, array)
        bits = np.dtype(f"<u{view.dtype.itemsize}")  # one kernel of CuPy's for all types of a size
        view, source = view.view(bits), source.view(bits)
        for first in range(0, self.shape[0], array.shape[0]):
            view[first : first + array.shape[0], ..., : array.shape[-1]] = source

    def values(self) -> Array:
        """The tensor in its shape, without the columns beyond head_dim, as an array of the backend's module."""
        view = self.rows()
        return view[..., : self.shape[-1]] if len(self.shape) == 4 else view

    def bits(self) -> Array:
        """The elements' bits as a view of unsigned integers in the tensor's shape."""
        rows = self.rows()
        view = rows.view(np.dtype(f"<u{rows.dtype.itemsize}"))
        return view[..., : self.shape[-1]] if len(self.shape) == 4 else view

    def holds(self, bits: Array) -> bool:
        """Whether the elements have these bits."""
        return every(self.bits() == bits)

    def poison(self) -> None:
        """NaN everywhere, the guard bands included."""
        self.backend.fill(self._raw, POISON)

    def intact(self) -> bool:
        """Whether the guard bands are unchanged, and what lies between rows, or heads of a logsumexp, that are further apart."""
        bands = self._raw[: self._start], self._raw[self._start + self.bytes :]
        if self.wide:
            whole = self.buffer.reshape(-1, self.pitch * self.storage.itemsize)
            if not every(whole[:, -self.wide * _STEP :] == POISON):
                return False
        if self.wide and len(self.shape) == 4:
            batch, heads, rows, _ = self.shape
            if not every(self.buffer.reshape(batch, rows + 1, heads, -1)[:, rows] == POISON):
                return False
        return all(every(self.backend.get(band) == POISON) for band in bands)

    def view(self) -> View:
        """Its address and strides in elements; for a tensor of three or four dimensions."""
        rows, heads = self.shape[2], self.shape[1]
        if len(self.shape) == 3:
            return View(self.address, heads * self.pitch, self.pitch, 1)
        if self.wide:
            return View(self.address, (rows + 1) * heads * self.pitch, self.pitch, heads * self.pitch)
        return View(self.address, heads * rows * self.pitch, rows * self.pitch, self.pitch)


class Paged(Tensor):
    """K or V of a problem with a page_size: a pool of pages, (pages, heads_kv, page_size, pitch), all poison but the keys that sequences have.

    What is uploaded and what values and bits give is of the whole tensor, (batch, heads_kv, seq_kv, columns): a copy, with 0 behind a
    sequence's last key. wide: as of a Tensor.
    """

    def __init__(self, backend: Backend, problem: Problem, name: str, pitch: int, wide: int = 0) -> None:
        self.problem, self.name = problem, name
        pool = (problem.pages, problem.heads_kv, problem.page_size, problem.row_length(name))
        super().__init__(backend, pool, problem.tensor_dtype(name), pitch, wide)
        xp, table = backend.xp, problem.paging[0].values
        batch = np.repeat(np.arange(problem.batch), problem.lengths)
        keys = np.concatenate([np.arange(length) for length in problem.lengths])
        page, slot = table[batch, keys // problem.page_size], keys % problem.page_size
        self._keys, self._pool = (xp.asarray(batch), slice(None), xp.asarray(keys)), (xp.asarray(page), slice(None), xp.asarray(slot))

    def upload(self, array: Array) -> None:
        view, source = self.rows(), put(self.backend.xp, array)
        bits = np.dtype(f"<u{view.dtype.itemsize}")
        view.view(bits)[..., : self.shape[-1]][self._pool] = source.view(bits)[self._keys]

    def values(self) -> Array:
        return self.bits().view(self.rows().dtype)

    def bits(self) -> Array:
        pool = super().bits()
        whole = self.backend.xp.zeros(self.problem.shape(self.name), pool.dtype)
        whole[self._keys] = pool[self._pool]
        return whole

    def holds(self, bits: Array) -> bool:
        return every(self.bits()[self._keys] == bits[self._keys])


def _placed(backend: Backend, given: Given) -> Tensor:
    """A named tensor in device memory, one row of it."""
    tensor = Tensor(backend, (1, math.prod(given.shape)), given.dtype, 1)
    tensor.upload(given.values.reshape(1, -1))
    return tensor


class Outputs(Mapping[str, Array]):
    """Outputs by name, as host storage arrays that are copied from the device when they are first read: a verdict needs none of them.

    host: those that are there already. device: arrays of the device's module, as :func:`put` gives them; None: the host has all.
    """

    def __init__(self, problem: Problem, host: Mapping[str, Array], device: Mapping[str, Array] | None = None) -> None:
        self._problem, self._host, self._device = problem, dict(host), device

    def on(self, xp: ArrayModule) -> Mapping[str, Array]:
        """As arrays of xp, the device's module or numpy. What the device does not hold is copied to it."""
        if xp is np or self._device is None:
            return {name: put(xp, self[name]) for name in self}
        return self._device

    def __getitem__(self, name: str) -> Array:
        if name not in self._host and self._device is not None:
            self._host[name] = np.asarray(to_host(self._device[name])).view(STORAGE[self._problem.tensor_dtype(name)])
        return self._host[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._host if self._device is None else self._device)

    def __len__(self) -> int:
        return len(self._host if self._device is None else self._device)


class Bound:
    """A loaded kernel with its tensors in device memory, ready to launch any number of times.

    inputs: storage arrays by name (READS of the kernel's pass), as :func:`put` takes them. like: another of the same kernel and problem,
    whose workspaces it shares; its own tensors then lie as no other's do (Tensor), each with strides of its own. Raises as Backend.memory
    and launch.prepare do.
    """

    def __init__(self, backend: Backend, loaded: Loaded, problem: Problem, inputs: Mapping[str, Array], like: Bound | None = None) -> None:
        self.backend, self.loaded, self.problem = backend, loaded, problem
        self.pass_ = loaded.kernel.pass_
        self.label = f"{loaded.kernel.name} {self.pass_} {problem.describe()}"
        #: The outputs.
        self.writes = problem.writes(self.pass_)
        launcher = prepare(backend, loaded, problem)
        #: Whether it takes contiguous tensors only.
        self.plain = any(launcher.plain)
        self.tensors: dict[str, Tensor] = {}
        for i, name in enumerate((*READS[self.pass_], *self.writes)):
            pitch = (problem.row_length(name) if len(problem.shape(name)) == 4 else 1) if self.plain else problem.row_pitch(name)
            wide = i + 1 if like and name != DSINKS else 0
            paged = problem.page_size > 0 and name in ("K", "V")
            self.tensors[name] = (
                Paged(backend, problem, name, pitch, wide)
                if paged
                else Tensor(backend, problem.shape(name), problem.tensor_dtype(name), pitch, wide)
            )
        for name in READS[self.pass_]:
            self.tensors[name].upload(inputs[name])
        self._originals = {name: copied(backend.xp, self.tensors[name].buffer) for name in READS[self.pass_]}
        self._freeze(True)
        spaces = loaded.plan.workspaces
        self.workspaces: list[tuple[Workspace, Tensor]] = (
            like.workspaces if like else [(w, Tensor(backend, (w.elements,), w.dtype, 1)) for w in spaces]
        )
        for space, tensor in () if like else self.workspaces:
            if space.init != "none":
                backend.fill(tensor.buffer, 0)
        views = {name: tensor.view() for name, tensor in self.tensors.items()}
        #: What the problem's mask and score name.
        self.named: dict[str, Tensor] = like.named if like else {each.name: _placed(backend, each) for each in loaded.plan.tensors}
        spare = [self.tensors[name] for name in self.writes if name == DSINKS]  # it has no place of its own in fa::Args
        self.steps = launcher.steps(views, [t.address for t in (*(t for _, t in self.workspaces), *self.named.values(), *spare)])
        for name, tensor in self._all():
            backend.told(name, tensor.shape, tensor.rows().strides, tensor.address, tensor.bytes)
        #: What --check has watched in its launches (Backend.watched); None without a check.
        self.watched = None if backend.watched() is None else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the tensors and workspaces take, without guard bands."""
        return sum(t.bytes for t in (*self.tensors.values(), *(t for _, t in self.workspaces), *self.named.values()))

    def poison(self) -> None:
        """Poison the outputs, and the workspaces that a kernel does not find zeroed; their guard bands stay as they are."""
        for name in self.writes:
            self.backend.fill(self.tensors[name].buffer, POISON)
        for space, tensor in self.workspaces:
            if space.init == "none":
                self.backend.fill(tensor.buffer, POISON)

    def launch(self) -> None:
        """Launch and wait. Raises KernelFault as Backend.launch does, and where an input was written or a thread goes on.

        A thread that goes on is looked for where Python has one thread only: others start and end some of their own meanwhile.
        """
        alone, threads = threading.active_count() == 1, self.backend.threads()
        before = self.backend.watched()
        with self.backend.range(self.label), self._named():
            self.backend.launch(self.loaded, self.steps)
        if self.watched is not None:
            self.watched += (self.backend.watched() or 0) - (before or 0)
        if alone and self.backend.threads() > threads and threading.active_count() == 1:
            raise KernelFault(
                f"{self.loaded.kernel.label} left a thread running after its launch",
                "what it does later is not in its time, and not in order with the launches that follow",
                "do all work in the threads of the launch",
            )

    def outside(self) -> str:
        """The first tensor or workspace whose guard band has changed, or an empty text."""
        return next((name for name, tensor in self._all() if not tensor.intact()), "")

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors and workspaces, each with its name for messages."""
        yield from self.tensors.items()
        yield from ((f"workspace {space.name}", tensor) for space, tensor in self.workspaces)
        yield from self.named.items()

    def run(self) -> Outputs:
        """Poison the outputs, launch, check guard bands and inputs; returns a copy of the outputs: on a GPU there, up to PLACED elements.

        Raises KernelFault where the kernel wrote outside its outputs or changed an input, and as launch does.
        """
        self.checked()
        return self.outputs()

    def checked(self) -> None:
        """As run, without the copy."""
        self.poison()
        self.launch()
        label = self.loaded.kernel.label
        if name := self.outside():
            raise KernelFault(
                f"{label} wrote outside {name}", "a guard band around it has changed", "fa-cli run --check asan names the line (cpu)"
            )
        for name, original in self._originals.items():
            if not _same(self.tensors[name].buffer, original):
                raise KernelFault(
                    f"{label} changed its input {name}", "inputs must be as they were after a run", "write only to outputs and workspaces"
                )

    def outputs(self) -> Outputs:
        """A copy of the outputs as they are: on a GPU in its memory, up to PLACED elements, and more on the host."""
        names, xp = self.writes, self.backend.xp
        if xp is np or sum(math.prod(self.tensors[name].shape) for name in names) > PLACED:
            return Outputs(self.problem, {name: self._host(name) for name in names})
        device = {name: copied(xp, self.tensors[name].bits()).view(self.tensors[name].rows().dtype) for name in names}
        return Outputs(self.problem, {}, device)

    def _host(self, name: str) -> Array:
        tensor = self.tensors[name]
        flat = np.asarray(self.backend.get(tensor.buffer)).view(tensor.storage)
        return np.ascontiguousarray(tensor.arranged(flat)[..., : tensor.shape[-1]])

    def free_copies(self) -> None:
        """Free the copies of the inputs that run() compares with (half the memory of a forward pass), before runs that are only timed."""
        self._originals.clear()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Launches in here are of a module that was just loaded, and find workspaces of init zero_once zeroed."""
        loaded = self.loaded
        for space, tensor in self.workspaces:
            if space.init != "none":
                self.backend.fill(tensor.buffer, 0)
        try:
            with self.backend.fresh(loaded) as self.loaded:
                yield
        finally:
            self.loaded = loaded

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Inputs may be written here, by the harness."""
        self._freeze(False)
        try:
            yield
        finally:
            self._freeze(True)

    def _freeze(self, frozen: bool) -> None:
        for name in READS[self.pass_]:
            self.backend.freeze(self.tensors[name].whole, frozen)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A fault at an address of an input, which can only be a write where inputs are read-only, names the input."""
        try:
            yield
        except KernelFault as fault:
            found = re.search(r", address (0x[0-9a-f]+)", fault.why)
            for name in READS[self.pass_] if found else ():
                tensor, at = self.tensors[name], int(found[1], 16) if found else 0
                if tensor.address <= at < tensor.address + tensor.bytes:
                    hint = "write only to outputs and workspaces"
                    what = f"{self.loaded.kernel.label} changed its input {name}"
                    raise KernelFault(what, f"inputs are read-only while it runs: {fault.why}", hint) from None
                if 0 <= at - self.backend.address(tensor.whole) < tensor.whole.size:
                    raise KernelFault(f"{self.loaded.kernel.label} wrote outside {name}", fault.why, fault.hint) from None
            raise

    def enqueue(self) -> Callable[[], float]:
        """Enqueue one run, unchecked. The function returned waits for it and gives its device seconds."""
        with self.backend.range(self.label), self._named():
            return self.backend.enqueue(self.loaded, self.steps)

    def call(self) -> float:
        """Host seconds to enqueue one run."""
        with self.backend.range(self.label), self._named():
            return self.backend.call(self.loaded, self.steps)

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """As enqueue, replaying the run as a CUDA graph; None where there are no graphs."""
        return self.backend.graph(self.loaded, self.steps)


def _same(a: Bytes, b: Bytes) -> bool:
    """Whether buffers of one size are equal, compared in pieces: each comparison makes an array of its own."""
    return all(every(a[i : i + _PIECE] == b[i : i + _PIECE]) for i in range(0, a.size, _PIECE))
