"""Peer copies: a copy engine writes to the next rank's memory (CUDA IPC), for the ranks of one host. No SM takes part, and no host.

Two flags belong to each buffer that is received into. `free` is in the sender's memory: the receiver sets it once its compute stream is
done with the buffer. `arrived` is in the receiver's memory: the sender sets it behind the copy. Streams set flags and wait for them
(cuStreamBatchMemOp), and a wait polls its own GPU's memory. On the communication stream an exchange is

    set `free` at the rank before; wait for the own `free`, clear it
    copy; set `arrived` at the next rank; wait for the own `arrived`, clear it

Each rank says what is free before it waits, so no order of the ranks can deadlock. `free` is cleared before `arrived` is set, since the
next rank may say `free` again from then on; `arrived` is cleared before the buffer is said to be free again. So no flag is set twice, and
all are clear between exchanges: a CUDA graph replays them. Counters would be fixed in the graph, and a replay's waits would not wait.
A write by a stream has a fence before it, so what it tells of is visible first. A clear needs none, but has one too: the driver's calls
of version 2 refuse CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER, and those of version 1 are off unless the driver was loaded with them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..fault import EnvironmentFault
from .mpi import deadline
from .nccl import Nccl
from .transport import CHOICE, Control, Streams, Stuck, Transport, chosen

#: A flag that is set: memset can write it too. Flags are so many bytes apart, in memory of a whole page, which nothing else shares.
_SET, _APART, _PAGE = 0x01010101, 64, 2 << 20
#: An operation of a stream on 32 bits: kind, address, value, flags (cuda.h). A write takes no flag.
Operation = tuple[int, int, int, int]
_WAIT, _WRITE = 1, 2
_EQUAL, _FLUSH, _NO_FLAG = 1, 1 << 30, 0
#: Two flags of no buffer, behind the mark: set by the rank before and by the next one, when they meet.
_FROM_BEFORE, _FROM_NEXT = 64, 32
_MARK = 16  # bytes of every buffer that show a neighbour that it has mapped the right memory: a Block has as many
_PATIENCE = 5  # in timeouts, for ranks that still load kernels
_LET_GO_SECONDS = 2.0


class NoPeers(EnvironmentFault):
    """The ranks do not reach each other's memory. All ranks raise it together."""

    def __init__(self, why: str) -> None:
        super().__init__("no peer copies between the ranks", why, f"{CHOICE}=nccl, before the same command; fa-cli doctor --ring")


def between_gpus(talk: Control, timeout: float, notes: list[str]) -> Transport:
    """Peer copies where all ranks are on one host and reach their neighbours' memory, else NCCL: on two H200s the ring is faster by them
    (docs/results-ring.md). The first rank's FA_CLI_RING_TRANSPORT chooses: nccl, peer, or auto, with which notes says why it is NCCL.
    Raises as chosen, NoPeers, and as Nccl does."""
    asked = talk.gather(chosen())[0]
    if asked == "nccl" or talk.size == 1:
        return Nccl(talk, timeout)
    try:
        return Peer(talk, timeout)
    except NoPeers as fault:
        if asked == "peer":
            raise
        if asked:
            notes.append(f"{fault.what}: {fault.why}")
        return Nccl(talk, timeout)


@dataclass(frozen=True)
class Shared:
    """A buffer for other ranks. The handle is of a whole allocation, of which CuPy's pool gives away parts."""

    handle: bytes
    offset: int
    size: int
    mark: bytes  # what is in its first bytes until the others have looked


class Driver:
    """The calls of libcuda.so.1 that CuPy does not have. Each raises RuntimeError with the driver's error number.

    Raises OSError or AttributeError where the library is not there, or has no such call."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._range, self._batch = self._library.cuMemGetAddressRange_v2, self._library.cuStreamBatchMemOp_v2

    def base(self, address: int) -> int:
        """Where the allocation begins that an address is in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        _call(self._range, ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value

    def prepared(self, operations: Sequence[Operation]) -> Callable[[int], None]:
        """What enqueues operations on a stream, in their order, by one call."""
        if not operations:
            return lambda stream: None
        words = (ctypes.c_uint64 * (6 * len(operations)))()  # CUstreamBatchMemOpParams: each field begins a word
        for first, operation in zip(range(0, len(words), 6), operations, strict=True):
            words[first : first + 4] = list(operation)
        count = ctypes.c_uint(len(operations))
        return lambda stream: _call(self._batch, ctypes.c_void_p(stream), count, words, ctypes.c_uint(0))


def _call(function: Any, *arguments: Any) -> None:
    if code := function(*arguments):
        raise RuntimeError(f"{function.__name__}: error {code} of the CUDA driver")


class Peer(Streams):
    """The transport of a rank whose neighbours are on this host. Raises NoPeers on all ranks, where one does not reach a neighbour."""

    engine = "peer copies"

    def __init__(self, talk: Control, timeout: float) -> None:
        import cupy

        super().__init__(cupy, talk, timeout)
        self._talk, self._runtime = talk, cupy.cuda.runtime
        self._before, self._next = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._opened: dict[bytes, int] = {}
        self._buffers: tuple[Any, ...] = ()  # kept, while a neighbour may write to them
        self._places: dict[int, tuple[int, int, int]] = {}
        self._flags: dict[tuple[int, bool, bool], tuple[Callable[[int], None], Callable[[int], None]]] = {}
        self._page, why = 0, self._unreachable()
        try:
            self._driver = Driver()
            self._page = self._runtime.malloc(_PAGE)
            self._runtime.memset(self._page, 0, _PAGE)
            self._runtime.deviceSynchronize()
            can = self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrCanFlushRemoteWrites, self._runtime.getDevice())
            self._flush = _FLUSH if can else 0
            for operation in ((_WRITE, self._page + _FROM_BEFORE, _SET, _NO_FLAG), *self._awaited(_FROM_BEFORE)):
                self._try(operation, self.rank)
        except (OSError, AttributeError, RuntimeError) as error:  # no library, an old one, no memory
            why = why or str(error)
        (self._next_page,), (self._before_page,) = self._share([(self._page, _PAGE)], (self._next, self._before), why)
        self._pages = set(self._opened)
        self._greet()

    def register(self, buffers: Sequence[Any]) -> None:
        """Map the next rank's buffers. Raises NoPeers. The host waits for the device, and for all ranks."""
        self._forget()
        self._buffers = tuple(buffers)
        own = [(int(buffer.data.ptr), int(buffer.nbytes)) for buffer in buffers]
        (places,) = self._share(own, (self._next,))
        self._places = {address: (index, places[index], size) for index, (address, size) in enumerate(own)}

    def _enqueue(self, send: Any, receive: Any) -> Any:
        index, place, room = self._places.get(int(receive.data.ptr), (0, 0, -1))
        if max(send.nbytes, receive.nbytes) > room:
            raise ValueError(f"{send.nbytes} bytes out, {receive.nbytes} in: the buffer was not registered, or is smaller")
        kind = index, bool(send.size), bool(receive.size)
        before, after = self._flags.get(kind) or self._flags.setdefault(kind, self._operations(*kind))
        before(self.stream.ptr)
        if send.size:
            self._runtime.memcpyAsync(place, int(send.data.ptr), int(send.nbytes), self._runtime.memcpyDefault, self.stream.ptr)
        sent = self._cuda.Event(disable_timing=True)
        sent.record(self.stream)
        after(self.stream.ptr)
        return sent

    def _operations(self, index: int, sends: bool, receives: bool) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """What is enqueued before and after the copy into a buffer."""
        free, arrived = ((2 * index + i) * _APART for i in (2, 3))  # behind the mark
        before = [(_WRITE, self._before_page + free, _SET, _NO_FLAG)] if receives else []
        before += self._awaited(free) if sends else []
        after = [(_WRITE, self._next_page + arrived, _SET, _NO_FLAG)] if sends else []
        after += self._awaited(arrived) if receives else []
        return self._driver.prepared(before), self._driver.prepared(after)

    def _awaited(self, flag: int) -> list[Operation]:
        return [(_WAIT, self._page + flag, _SET, _EQUAL | self._flush), (_WRITE, self._page + flag, 0, _NO_FLAG)]

    def close(self, failed: bool = False) -> None:
        """Unmap the neighbours' memory. Where the rank failed, end the waits of its streams: freeing memory would wait for them."""
        page, self._page = self._page, 0
        if not page:
            return
        if failed:
            self._let_go(page)
            return
        self._forget()
        for handle in self._pages:
            self._runtime.ipcCloseMemHandle(self._opened.pop(handle))
        self._talk.gather(None)  # nobody has it mapped any more
        self._runtime.free(page)

    # -- what the driver takes ----------------------------------------------------------------------------------------

    def _try(self, operation: Operation, where: int) -> None:
        """Have the stream do one operation alone. Raises RuntimeError, which names it and whose memory it is on, where it is refused."""
        try:
            self._driver.prepared([operation])(self.stream.ptr)
        except RuntimeError as error:
            whose = "its own memory" if where == self.rank else f"the memory of rank {where}"
            what = f"a {'wait for a value in' if operation[0] == _WAIT else 'write to'} {whose}, flags {operation[3]:#x}"
            raise RuntimeError(f"rank {self.rank}: {what}: {error}") from None
        with deadline(self._timeout, Stuck(self.rank, None, self._timeout)):
            self.stream.synchronize()

    def _greet(self) -> None:
        """Set a flag in both neighbours' memory, and look for theirs in the own. Raises NoPeers on all ranks, where one does not arrive."""
        why = ""
        try:
            for rank, flag in ((self._next, self._next_page + _FROM_BEFORE), (self._before, self._before_page + _FROM_NEXT)):
                self._try((_WRITE, flag, _SET, _NO_FLAG), rank)
        except RuntimeError as error:
            why = str(error)
        refused = self._talk.gather(why)
        if not any(refused):
            for rank, flag in ((self._before, _FROM_BEFORE), (self._next, _FROM_NEXT)):
                if self._look(self._page + flag)[:4] != _SET.to_bytes(4, "little"):
                    why = f"a write by rank {rank} did not reach the memory of rank {self.rank}"
                for clear in self._awaited(flag)[1:]:
                    self._try(clear, self.rank)
        for reason in filter(None, (*refused, *self._talk.gather(why))):
            raise NoPeers(reason)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _unreachable(self) -> str:
        """Why a neighbour's memory is out of reach, as far as CUDA tells in advance. Raises NoPeers where ranks are on several hosts."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = platform.node(), boot.read_text() if boot.exists() else ""
        own = self._runtime.getDevice()
        about = self._talk.gather((host, self._runtime.deviceGetPCIBusId(own)))
        if any(each[0] != host for each in about):
            raise NoPeers("the ranks are on several hosts")
        for rank in (self._next, self._before):
            try:
                other = self._runtime.deviceGetByPCIBusId(about[rank][1])
            except RuntimeError:  # this process does not see it; it may be mapped all the same
                continue
            if other != own and not self._runtime.deviceCanAccessPeer(own, other):
                return f"GPU {own} has no peer access to GPU {other}"
        return ""

    def _share(self, buffers: Sequence[tuple[int, int]], ranks: Sequence[int], why: str = "") -> list[list[int]]:
        """Where the same buffers (address, size) of other ranks are mapped here. Each rank marks its own, looks for the others' marks,
        and puts back what was there. why: something is wrong already. Raises NoPeers on all ranks, where anything is on one of them."""
        mine: list[Shared] = []
        kept: dict[int, bytes] = {}
        places: list[list[int]] = []
        try:
            self._runtime.deviceSynchronize()
            for address, size in buffers if not why else ():
                shared = self._shared(address, size)
                kept[address] = self._look(address)
                self._put(address, shared.mark)
                mine.append(shared)
        except RuntimeError as error:
            why = str(error)
        about = self._talk.gather((why, mine), _PATIENCE)
        if not any(each[0] for each in about):
            try:
                places = [[self._mapped(rank, *each) for each in zip(about[rank][1], buffers, strict=True)] for rank in ranks]
            except (RuntimeError, ValueError) as error:
                why = f"rank {self.rank} does not reach a neighbour's memory: {error}"
        whys = [*(each[0] for each in about), *self._talk.gather(why)]
        for address, data in kept.items():
            self._put(address, data)
        for each in filter(None, whys):
            raise NoPeers(each)
        return places

    def _shared(self, address: int, size: int) -> Shared:
        base = self._driver.base(address)
        return Shared(bytes(self._runtime.ipcGetMemHandle(base)), address - base, size, os.urandom(_MARK))

    def _mapped(self, rank: int, shared: Shared, own: tuple[int, int]) -> int:
        """The address here of a buffer of another rank, whose mark is there. Raises ValueError where it is not, or where sizes differ."""
        if shared.handle not in self._opened:
            self._opened[shared.handle] = self._runtime.ipcOpenMemHandle(shared.handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        address = self._opened[shared.handle] + shared.offset
        if shared.size != own[1]:
            raise ValueError(f"a buffer of rank {rank} has {shared.size} bytes, and the own one {own[1]}")
        if self._look(address) != shared.mark:
            raise ValueError(f"a buffer of rank {rank} is not where it was mapped")
        return address

    def _look(self, address: int) -> bytes:
        host = np.empty(_MARK, np.uint8)
        self._runtime.memcpy(host.ctypes.data, address, _MARK, self._runtime.memcpyDefault)
        return host.tobytes()

    def _put(self, address: int, data: bytes) -> None:
        host = np.frombuffer(data, np.uint8)
        self._runtime.memcpy(address, host.ctypes.data, _MARK, self._runtime.memcpyDefault)
        self._runtime.deviceSynchronize()  # a small copy from the host returns before it has arrived

    def _forget(self) -> None:
        """Unmap the next rank's buffers; when all ranks have, the own ones may be freed."""
        if not self._buffers:
            return
        with deadline(self._timeout, Stuck(self.rank, None, self._timeout)):
            self.stream.synchronize()
        for handle in set(self._opened) - self._pages:
            self._runtime.ipcCloseMemHandle(self._opened.pop(handle))
        self._talk.gather(None)
        self._buffers, self._places = (), {}

    def _let_go(self, page: int) -> None:
        """Set all own flags until the streams have come to their end, for some seconds at most. What they send now is no result."""
        helper, until = self._cuda.Stream(non_blocking=True), time.monotonic() + _LET_GO_SECONDS
        with suppress(RuntimeError):  # the device is lost
            while not (self.stream.done and self.compute.done) and time.monotonic() < until:
                self._runtime.memsetAsync(page, _SET & 0xFF, _PAGE, helper.ptr)
                time.sleep(1e-3)
