"""Peer copies: a copy engine writes to the next rank's memory (CUDA IPC), for the ranks of one host. No SM takes part, and no host.

Two flags belong to each buffer that is received into. `free` is in the sender's memory: the receiver sets it once its compute stream is
done with the buffer. `arrived` is in the receiver's memory: the sender sets it behind the copy. On the communication stream an exchange is

    set `free` at the rank before; wait for the own `free`, clear it
    copy; set `arrived` at the next rank; wait for the own `arrived`, clear it

Each rank says what is free before it waits, so no order of the ranks can deadlock. `free` is cleared before `arrived` is set, since the
next rank may say `free` again from then on; `arrived` is cleared before the buffer is said to be free again. So no flag is set twice, and
all are clear between exchanges: a CUDA graph replays them. Counters would be fixed in the graph, and a replay's waits would not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..backends.mapped import Mapped, NoPeers, chosen
from .mpi import deadline
from .nccl import Nccl
from .transport import Control, Streams, Stuck, Transport


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


class Peer(Streams):
    """The transport of a rank whose neighbours are on this host. Raises NoPeers on all ranks, where one does not reach a neighbour."""

    engine = "peer copies"

    def __init__(self, talk: Control, timeout: float) -> None:
        import cupy

        super().__init__(cupy, talk, timeout)
        self._runtime = cupy.cuda.runtime
        self._before, self._next = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._buffers: tuple[Any, ...] = ()  # kept, while a neighbour may write to them
        self._places: dict[int, tuple[int, int, int]] = {}
        self._flags: dict[tuple[int, bool, bool], tuple[Callable[[int], None], Callable[[int], None]]] = {}
        self._closed = False
        neighbours = self._next, self._before
        self._mapped = Mapped(cupy.cuda, self.rank, neighbours, talk.gather, lambda: deadline(timeout, Stuck(self.rank, None, timeout)))

    def register(self, buffers: Sequence[Any]) -> None:
        """Map the next rank's buffers. Raises NoPeers. The host waits for the device, and for all ranks."""
        self._forget()
        self._buffers = tuple(buffers)
        own = [(int(buffer.data.ptr), int(buffer.nbytes)) for buffer in buffers]
        places = self._mapped.share(own, (self._next,))[self._next]
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
        reach, free, arrived = self._mapped, 2 * index, 2 * index + 1
        before = reach.say(self._before, free) if receives else []
        before += reach.awaited(free) if sends else []
        after = reach.say(self._next, arrived) if sends else []
        after += reach.awaited(arrived) if receives else []
        return reach.driver.prepared(before), reach.driver.prepared(after)

    def close(self, failed: bool = False) -> None:
        """Unmap the neighbours' memory. Where the rank failed, end the waits of its streams: freeing memory would wait for them."""
        if self._closed:
            return
        self._closed = True
        if failed:
            self._mapped.let_go(lambda: self.stream.done and self.compute.done)
            return
        self._forget()
        self._mapped.close()

    def _forget(self) -> None:
        if self._buffers:
            self._mapped.forget(self.stream)
            self._buffers, self._places = (), {}
