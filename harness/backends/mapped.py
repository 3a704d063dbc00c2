"""Memory that ranks of one host map from each other (CUDA IPC), and flags in it by which their streams wait, without a host and an SM.

Streams set flags and wait for them (cuStreamBatchMemOp), and a wait polls its own GPU's memory. A write by a stream has a fence before
it, so what it tells of is visible first. A clear needs none, but has one too: the driver's calls of version 2 refuse
CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER, and those of version 1 are off unless the driver was loaded with them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..fault import EnvironmentFault, UsageFault

CHOICE = "FA_CLI_RING_TRANSPORT"
#: A flag that is set: memset can write it too. Flags are so many bytes apart, in memory of a whole page, which nothing else shares.
SET, _APART, _PAGE = 0x01010101, 64, 2 << 20
#: An operation of a stream on 32 bits: kind, address, value, flags (cuda.h). A write takes no flag.
Operation = tuple[int, int, int, int]
WAIT, WRITE = 1, 2
EQUAL, FLUSH, NO_FLAG = 1, 1 << 30, 0
_MARK = 16  # bytes of every buffer that show another rank that it has mapped the right memory
#: Behind the mark of a page: what each rank sets there when they meet. Then the flags.
_GREETINGS, _FLAGS = 64, 4096
_PATIENCE = 5  # in timeouts, for ranks that still load kernels
_LET_GO_SECONDS = 2.0
#: A small value of each rank, on every rank: also a barrier. The second argument is how many timeouts it may take.
Gather = Callable[[Any, float], list[Any]]


def chosen(asked: str | None = None) -> str:
    """The transport between GPUs that a word names, by default that of this process's environment: "", nccl, peer or auto. Raises UsageFault
    for another word."""
    asked = os.environ.get(CHOICE, "") if asked is None else asked
    if asked not in ("", "nccl", "peer", "auto"):
        raise UsageFault(f"{CHOICE} is {asked[:40]!r}", "the transports between GPUs are nccl, peer and auto", f"unset {CHOICE}")
    return asked


class NoPeers(EnvironmentFault):
    """The ranks do not reach each other's memory. All ranks raise it together."""

    def __init__(self, why: str) -> None:
        super().__init__("no peer copies between the ranks", why, f"{CHOICE}=nccl, before the same command; fa-cli doctor --ring")


@dataclass(frozen=True)
class Shared:
    """A buffer for other ranks. The handle is of a whole allocation, of which an allocator may give away parts."""

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


class Mapped:
    """What a rank and some others have mapped of each other: a page of flags of each, and buffers.

    cuda: CuPy's. rank: this one. others: those whose memory it reaches, and who reach its own. limited: a context that bounds a wait of
    the host, and ends the process or raises behind it. Raises NoPeers on all ranks, where one does not reach another.
    """

    def __init__(
        self,
        cuda: Any,
        rank: int,
        others: Sequence[int],
        gather: Gather,
        limited: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.rank, self.others, self._gather, self._limited = rank, tuple(dict.fromkeys(others)), gather, limited
        self._runtime = cuda.runtime
        self._helper = cuda.Stream(non_blocking=True)
        self._opened: dict[bytes, int] = {}
        self.page, why = 0, self._unreachable()
        try:
            self.driver = Driver()
            self.page = self._runtime.malloc(_PAGE)
            self._runtime.memset(self.page, 0, _PAGE)
            self._runtime.deviceSynchronize()
            can = self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrCanFlushRemoteWrites, self._runtime.getDevice())
            self._flush = FLUSH if can else 0
            for operation in ((WRITE, self._greeting(self.page, rank), SET, NO_FLAG), *self._awaited(self._greeting(self.page, rank))):
                self._try(operation, rank)
        except (OSError, AttributeError, RuntimeError) as error:  # no library, an old one, no memory
            why = why or str(error)
        mapped = self.share([(self.page, _PAGE)], self.others, why)
        self._pages = {other: page for other, (page,) in mapped.items()}
        self._kept = set(self._opened)
        self._greet()

    # -- flags --------------------------------------------------------------------------------------------------------

    def say(self, rank: int, flag: int) -> list[Operation]:
        """Set a flag, by its number, in another rank's memory."""
        return [(WRITE, self._pages[rank] + _FLAGS + flag * _APART, SET, NO_FLAG)]

    def awaited(self, flag: int) -> list[Operation]:
        """Wait for an own flag, and clear it."""
        return self._awaited(self.page + _FLAGS + flag * _APART)

    def wait(self, flag: int) -> list[Operation]:
        """Wait for an own flag, which :meth:`clear` clears later."""
        return self.awaited(flag)[:1]

    def clear(self, flag: int) -> list[Operation]:
        """Clear an own flag."""
        return self.awaited(flag)[1:]

    def set(self, flag: int) -> None:
        """Set an own flag now. The host waits for the device."""
        self._put(self.page + _FLAGS + flag * _APART, SET.to_bytes(4, "little") * (_MARK // 4))

    def is_set(self, flag: int) -> bool:
        """Whether an own flag is set now."""
        return self._look(self.page + _FLAGS + flag * _APART)[:4] == SET.to_bytes(4, "little")

    def _awaited(self, address: int) -> list[Operation]:
        return [(WAIT, address, SET, EQUAL | self._flush), (WRITE, address, 0, NO_FLAG)]

    def _greeting(self, page: int, rank: int) -> int:
        return page + _GREETINGS + 4 * rank

    def _try(self, operation: Operation, where: int) -> None:
        """Have a stream do one operation alone. Raises RuntimeError, which names it and whose memory it is on, where it is refused."""
        try:
            self.driver.prepared([operation])(self._helper.ptr)
        except RuntimeError as error:
            whose = "its own memory" if where == self.rank else f"the memory of rank {where}"
            what = f"a {'wait for a value in' if operation[0] == WAIT else 'write to'} {whose}, flags {operation[3]:#x}"
            raise RuntimeError(f"rank {self.rank}: {what}: {error}") from None
        with self._limited():
            self._helper.synchronize()

    def _greet(self) -> None:
        """Set a flag in all others' memory, and look for theirs in the own. Raises NoPeers on all ranks, where one does not arrive."""
        why = ""
        try:
            for rank, page in self._pages.items():
                self._try((WRITE, self._greeting(page, self.rank), SET, NO_FLAG), rank)
        except RuntimeError as error:
            why = str(error)
        refused = self._gather(why, 1)
        if not any(refused):
            for rank in self.others:
                if self._look(self._greeting(self.page, rank))[:4] != SET.to_bytes(4, "little"):
                    why = f"a write by rank {rank} did not reach the memory of rank {self.rank}"
        for reason in filter(None, (*refused, *self._gather(why, 1))):
            raise NoPeers(reason)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _unreachable(self) -> str:
        """Why another's memory is out of reach, as far as CUDA tells in advance. Raises NoPeers where ranks are on several hosts."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = platform.node(), boot.read_text() if boot.exists() else ""
        own = self._runtime.getDevice()
        about = self._gather((host, self._runtime.deviceGetPCIBusId(own)), 1)
        if any(each[0] != host for each in about):
            raise NoPeers("the ranks are on several hosts")
        for rank in self.others:
            try:
                other = self._runtime.deviceGetByPCIBusId(about[rank][1])
            except RuntimeError:  # this process does not see it; it may be mapped all the same
                continue
            if other != own and not self._runtime.deviceCanAccessPeer(own, other):
                return f"GPU {own} has no peer access to GPU {other}"
        return ""

    def share(self, buffers: Sequence[tuple[int, int]], ranks: Sequence[int], why: str = "") -> dict[int, list[int]]:
        """Where the same buffers (address, size) of other ranks are mapped here. Each rank marks its own, looks for the others' marks,
        and puts back what was there. why: something is wrong already. Raises NoPeers on all ranks, where anything is on one of them."""
        mine: list[Shared] = []
        kept: dict[int, bytes] = {}
        places: dict[int, list[int]] = {}
        try:
            self._runtime.deviceSynchronize()
            for address, size in buffers if not why else ():
                shared = self._shared(address, size)
                kept[address] = self._look(address)
                self._put(address, shared.mark)
                mine.append(shared)
        except RuntimeError as error:
            why = str(error)
        about = self._gather((why, mine), _PATIENCE)
        if not any(each[0] for each in about):
            try:
                places = {rank: [self._mapped(rank, *each) for each in zip(about[rank][1], buffers, strict=True)] for rank in ranks}
            except (RuntimeError, ValueError) as error:
                why = f"rank {self.rank} does not reach a neighbour's memory: {error}"
        whys = [*(each[0] for each in about), *self._gather(why, 1)]
        for address, data in kept.items():
            self._put(address, data)
        for each in filter(None, whys):
            raise NoPeers(each)
        return places

    def _shared(self, address: int, size: int) -> Shared:
        base = self.driver.base(address)
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

    def forget(self, stream: Any) -> None:
        """Unmap the others' buffers; when all ranks have, the own ones may be freed. stream: on which copies to them are."""
        with self._limited():
            stream.synchronize()
        for handle in set(self._opened) - self._kept:
            self._runtime.ipcCloseMemHandle(self._opened.pop(handle))
        self._gather(None, 1)

    def close(self) -> None:
        """Unmap and free the pages. The buffers are forgotten before."""
        for handle in self._kept:
            self._runtime.ipcCloseMemHandle(self._opened.pop(handle))
        self._gather(None, 1)  # nobody has it mapped any more
        self._runtime.free(self.page)

    def let_go(self, ended: Callable[[], bool]) -> None:
        """Set all own flags until the streams have come to their end, for some seconds at most. What they send now is no result."""
        until = time.monotonic() + _LET_GO_SECONDS
        with suppress(RuntimeError):  # the device is lost
            while not ended() and time.monotonic() < until:
                self._runtime.memsetAsync(self.page, SET & 0xFF, _PAGE, self._helper.ptr)
                time.sleep(1e-3)
