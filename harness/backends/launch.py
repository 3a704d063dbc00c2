"""Addresses, strides, sizes and a stream become fa::Args and kernel launches: nothing is allocated, copied, checked, timed or waited for.

This is the lowest interface to a kernel. Checked buffers (harness/check/tensors.py) are built on it; a caller that owns tensors passes
their addresses here. Parameters are immutable bytes of one call, or memory that no other call has until this one returns, so launches in
flight and other threads share no mutable state: cuLaunchKernel copies a kernel's parameters before it returns (CUDA driver API), and the
CPU engine has run by then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from ..fault import KernelFault
from ..kernel import Kernel, planner
from ..kernel.header import MOST_RUNTIME, MOST_SPACES, SIZES
from ..kernel.plan import TensorMap
from ..problem import READS, WRITES, Problem
from .protocol import Backend, Call, Fill, Loaded, Step

#: The order of the tensors in fa::Args.
ARGS_TENSORS = ("Q", "K", "V", "O", "logsumexp", "dO", "dQ", "dK", "dV", "dlogsumexp")
_TENSOR = np.dtype([("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")])
#: fa::Args of <fa/args.cuh>, byte for byte (tests/device/test_plain_words.py compares them on every backend).
ARGS = np.dtype(
    {
        "names": [*ARGS_TENSORS, "workspace", *SIZES, "scale", "runtime"],
        "formats": [*([_TENSOR] * 10), ("<u8", (MOST_SPACES,)), *(["<i4"] * 8), "<f8", ("<i4", (MOST_RUNTIME,))],
        "offsets": [*(32 * i for i in range(10)), 320, *(384 + 4 * i for i in range(8)), 416, 424],
        "itemsize": 448,
    }
)
#: The part of fa::Args that differs from call to call comes first: the tensors, of four words each, then the workspaces' addresses.
_WORDS = struct.Struct(f"<{4 * len(ARGS_TENSORS) + MOST_SPACES}q")
_POINTER = struct.Struct("<q")


class View(NamedTuple):
    """A (batch, heads, rows, columns) tensor in device memory: the address of its first element, and its strides in elements.

    columns, head_dim or head_dim_v, are contiguous. Rows are as <fa/args.cuh> needs them: 16-byte aligned, readable up to the next multiple of 16 bytes.
    logsumexp is (batch, heads, rows) with row stride 1.
    """

    address: int
    batch: int
    head: int
    row: int


_ABSENT = View(0, 0, 0, 0)


@dataclass(frozen=True)
class Launcher:
    """A loaded kernel with a problem's sizes, packed once. A call with addresses enqueues the pass."""

    backend: Backend
    loaded: Loaded
    #: The last bytes of fa::Args, the same in every call: sizes, scale and runtime values.
    sizes: bytes
    #: For each launch its plain parameters: packed bytes, or the name of the tensor whose address it is; empty for fa::Args.
    plain: tuple[tuple[bytes | str, ...], ...]
    #: Index and bytes of each workspace that is zeroed before every pass.
    zeroed: tuple[tuple[int, int], ...]

    def __call__(self, tensors: Mapping[str, View], workspaces: Sequence[int] = (), stream: int | None = None) -> None:
        """Enqueue the pass and return. Raises KernelFault where a launch is refused, ContextLost where the GPU's context is dead.

        tensors: READS and WRITES of the kernel's pass, on the backend's device; for a backward pass with logsumexp_gradient also
        dlogsumexp, where there is one. workspaces: the addresses of loaded.plan.workspaces, then those of loaded.plan.tensors, in order
        and of as many bytes; the caller has zeroed those of init zero_once. stream: a CUDA stream's handle, None for the backend's
        current one. A kernel with plain parameters takes contiguous tensors only.
        """
        self.backend.submit(self.loaded, self.steps(tensors, workspaces), stream)

    def steps(self, tensors: Mapping[str, View], workspaces: Sequence[int] = ()) -> list[Step]:
        """What a call enqueues; the same steps may be enqueued repeatedly. Parameters as of a call."""
        args = (self.packed(tensors, workspaces),)
        plan = self.loaded.plan
        maps = [self.tensor_map(map_, *self._place(map_, tensors, workspaces)) for map_ in plan.tensor_maps]
        made: list[Step] = [Fill(workspaces[index], size) for index, size in self.zeroed]
        for launch, plain in zip(plan.launches, self.plain, strict=True):
            given = tuple([p if isinstance(p, bytes) else _POINTER.pack(tensors[p][0]) for p in plain]) if plain else args
            given += tuple([maps[i] for i in launch.maps])
            made.append(
                Call(launch.entry, launch.grid, launch.block, launch.shared, given, launch.cluster, launch.overlaps, launch.cooperative)
            )
        return made

    def tensor_map(self, map_: TensorMap, address: int, strides: tuple[int, int, int]) -> bytes:
        """fa::TensorMap of a tensor's address and its batch, head and row stride in elements."""
        return self.backend.tensor_map(map_, address, map_.byte_strides(*strides))

    def _place(self, map_: TensorMap, tensors: Mapping[str, View], workspaces: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
        """The address and strides of a map's tensor; a workspace has no strides of its own."""
        if view := tensors.get(map_.tensor):
            return view.address, view[1:]
        names = [space.name for space in self.loaded.plan.workspaces]
        return workspaces[names.index(map_.tensor)], (0, 0, 0)

    def packed(self, tensors: Mapping[str, View], workspaces: Sequence[int] = ()) -> bytes:
        """fa::Args of a call."""
        words: list[int] = []
        for name in ARGS_TENSORS:
            words += tensors.get(name, _ABSENT)
        words += workspaces
        words += [0] * (MOST_SPACES - len(workspaces))
        return _WORDS.pack(*words) + self.sizes

    def fixed(self, strides: Mapping[str, tuple[int, int, int]]) -> Fixed:
        """A launcher for tensors whose strides stay. strides: of each of the pass, in the order in which its addresses will be given."""
        return Fixed(self, strides)


class _Parameters(NamedTuple):
    """The parameters of a pass in memory, with the addresses that were written last."""

    words: memoryview  # fa::Args
    moves: list[tuple[Callable[[int], None], int]]  # of each tensor map, and the index of its tensor's address in a call
    enqueue: Callable[[int | None], None]
    addresses: list[int]


class Layout(NamedTuple):
    """All parameters of a pass in one piece of memory, 64-byte aligned, for a launcher that is not Python."""

    memory: bytes  # with no addresses yet
    at: list[int]  # the word in it of each address of a call
    maps: list[tuple[int, int]]  # the byte of each tensor map, and the index of its tensor's address in a call
    fills: list[tuple[int, int]]  # what is zeroed first: the index of its address, and its bytes
    calls: list[tuple[Call, list[int]]]  # each with the byte of each of its parameters, in place of these


class Fixed:
    """A launcher for tensors of fixed strides: all parameters are packed once, and a call writes the addresses that differ and enqueues.

    A call takes its parameters out of those that are free, and so has them alone: pop and append of a list are atomic.
    """

    def __init__(self, launcher: Launcher, strides: Mapping[str, tuple[int, int, int]]) -> None:
        self._launcher, self._strides = launcher, dict(strides)
        plan = launcher.loaded.plan
        names = [*strides, *(space.name for space in plan.workspaces)]
        #: The words of fa::Args that hold an address, in the order of a call.
        self._at = [4 * ARGS_TENSORS.index(name) for name in strides]
        self._at += [4 * len(ARGS_TENSORS) + i for i in range(len(plan.workspaces) + len(plan.tensors))]
        #: Of each tensor map, the index of its tensor's address in a call.
        self._mapped = [names.index(map_.tensor) for map_ in plan.tensor_maps]
        #: The bits that no address of a tensor has, in rows as <fa/args.cuh> needs them.
        self._unaligned = 0 if any(launcher.plain) else 15
        self._free: list[_Parameters] = []

    @property
    def count(self) -> int:
        """How many addresses a call has."""
        return len(self._at)

    def __call__(self, addresses: list[int], stream: int | None = None) -> bool:
        """Enqueue the pass and return True: the tensors' addresses, then those of the workspaces, then those of named tensors. Else as a call of Launcher.

        False, and nothing is enqueued, where an address is not 16-byte aligned.
        """
        try:
            parameters = self._free.pop()
        except IndexError:
            parameters = self._parameters()
        words, moves, enqueue, before = parameters
        if addresses != before:
            if reduce(or_, addresses, 0) & self._unaligned:
                self._free.append(parameters)
                return False
            for at, address in zip(self._at, addresses, strict=True):
                words[at] = address
            for move, index in moves:
                if (address := addresses[index]) != before[index]:
                    move(address)
            before[:] = addresses
        enqueue(stream)
        self._free.append(parameters)
        return True

    def layout(self, address: int) -> Layout:
        """The parameters in one piece, of a kernel without plain ones. address: one to encode tensor maps for, before they are moved."""
        made, tensors = self._launcher, len(self._strides)
        assert not any(made.plain)
        plan = made.loaded.plan
        memory = bytearray(self._args())
        maps = []
        for map_, index in zip(plan.tensor_maps, self._mapped, strict=True):
            maps.append((len(memory), index))
            memory += made.tensor_map(map_, address, self._strides.get(map_.tensor, (0, 0, 0)))
        calls = [
            (
                Call(launch.entry, launch.grid, launch.block, launch.shared, (), launch.cluster, launch.overlaps, launch.cooperative),
                [0, *(maps[i][0] for i in launch.maps)],
            )
            for launch in plan.launches
        ]
        fills = [(tensors + index, size) for index, size in made.zeroed]
        return Layout(bytes(memory), self._at, maps, fills, calls)

    def _args(self) -> bytes:
        """fa::Args with no address yet."""
        return self._launcher.packed({name: View(0, *strides) for name, strides in self._strides.items()})

    def _parameters(self) -> _Parameters:
        """Parameters with no address yet."""
        made, first = self._launcher, 4 * len(ARGS_TENSORS)
        plan, backend = made.loaded.plan, made.backend
        args = memoryview(bytearray(self._args()))
        words = args.cast("q")
        maps = [backend.movable_map(map_, map_.byte_strides(*self._strides.get(map_.tensor, (0, 0, 0)))) for map_ in plan.tensor_maps]
        calls = []
        for launch, plain in zip(plan.launches, made.plain, strict=True):
            given = [memoryview(bytearray(p)) if isinstance(p, bytes) else args[(at := 32 * ARGS_TENSORS.index(p)) : at + 8] for p in plain]
            passed = (*(given or [args]), *(maps[i][0] for i in launch.maps))
            calls.append(
                Call(launch.entry, launch.grid, launch.block, launch.shared, passed, launch.cluster, launch.overlaps, launch.cooperative)
            )
        enqueue = backend.repeated(made.loaded, words, [(first + index, size) for index, size in made.zeroed], calls)
        moves = [(move, index) for (_, move), index in zip(maps, self._mapped, strict=True)]
        return _Parameters(words, moves, enqueue, [-1] * len(self._at))


def prepare(backend: Backend, loaded: Loaded, problem: Problem) -> Launcher:
    """The launcher of a kernel that a backend loaded for a problem. Raises KernelFault where its args name what its pass is not given."""
    args = np.zeros(1, ARGS)
    for name in (*SIZES, "scale"):
        args[name] = getattr(problem, name)
    plan = loaded.plan
    args["runtime"][0, : len(plan.runtime)] = [value for _, value in plan.runtime]
    plain = tuple(tuple(_plain(loaded.kernel, problem, name) for name in launch.args) for launch in plan.launches)
    zeroed = tuple((i, space.bytes) for i, space in enumerate(plan.workspaces) if space.init == "zero")
    return Launcher(backend, loaded, args.tobytes()[_WORDS.size :], plain, zeroed)


def launcher(backend: Backend, kernel: Kernel, problem: Problem, tiles: Mapping[str, int] | None = None) -> Launcher:
    """A cached launcher: a call with the same values compiles, plans and parses nothing. Raises as Backend.load and prepare do."""
    key, kernel = tuple(sorted((tiles or {}).items())), planner.variant(kernel, problem)
    return _kept(backend, kernel, kernel.source_hash, problem, key)  # type: ignore[arg-type]  # a backend hashes by identity


@lru_cache(maxsize=256)  # sequence lengths that alternate; launchers of one compile key share its code
def _kept(backend: Backend, kernel: Kernel, source_hash: str, problem: Problem, tiles: tuple[tuple[str, int], ...]) -> Launcher:
    """source_hash is only a part of the key: an edited file, or an edited header that it includes, is loaded again."""
    return prepare(backend, backend.load(kernel, problem, dict(tiles)), problem)


def _plain(kernel: Kernel, problem: Problem, name: str) -> bytes | str:
    """A plain parameter: its bytes, or its name where it is a tensor's address."""
    if name in READS[kernel.pass_] or name in WRITES[kernel.pass_]:
        return name
    if name == "scale":
        return struct.pack("<d" if problem.dtype == "float64" else "<f", problem.scale)
    if name in SIZES:
        return struct.pack("<i", getattr(problem, name))
    raise KernelFault(f"{kernel.label} asks for {name}", f"a {kernel.pass_} kernel is not given it", "see kernels_cu/README.md, Header")
