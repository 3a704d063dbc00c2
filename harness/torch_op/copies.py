"""Messages between GPUs of one host by copy engines: they take no multiprocessor from the attention that they travel beside.

Each rank has an inbox: memory that the others write to, a slot for each of them. Two flags belong to the slot of a sender: `free` in the
sender's memory, `arrived` in the receiver's. On the communication stream of a rank an exchange is

    for each message out: wait for `free`; copy to the slot; clear `free`, set `arrived` there
    for each message in: wait for `arrived`; copy from the slot to the tensor; clear `arrived`, set `free` there

A flag is cleared before the other one is set, so neither is set twice, and both are as before between exchanges: `free` set, `arrived`
clear. A send waits for what the receiver did in an earlier exchange, a receive for a send of the same one, so no order of ranks can
deadlock. The second copy is inside a GPU, and what is received is an ordinary tensor, which may be kept.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..backends.mapped import CHOICE, NO_FLAG, WRITE, Mapped, NoPeers, chosen
from ..fault import EnvironmentFault, Fault
from .call import backend_of

#: Bytes of the slots by sender and receiver, ranks of a group.
Room = Mapping[tuple[int, int], int]
#: Parts of messages to or from a rank: address, bytes of a row, bytes from a row to the next, rows.
Part = tuple[int, int, int, int]
Parts = Mapping[int, Sequence[Part]]
#: Enqueues something on a stream.
Enqueue = Callable[[int], None]
_ALIGNED = 512  # bytes, at which a slot begins
_POLL_SECONDS, _DRAIN_SECONDS = 0.5, 5.0
_COUNTS = 1 << 30  # exchanges are numbered from 1 to this, again and again


class Copies:
    """The messages of a rank. rank, size: of its group. gather: as Mapped has it. Raises NoPeers on all ranks, where one is out of reach."""

    def __init__(self, cuda: Any, rank: int, size: int, gather: Callable[[Any, float], list[Any]]) -> None:
        self.rank, self.size, self._runtime = rank, size, cuda.runtime
        self._others = [(rank + i) % size for i in range(1, size)]  # so that not all write to one at a time
        self._mapped = Mapped(cuda, rank, self._others, gather)
        self._room: dict[tuple[int, int], int] = {}
        self._refused: list[tuple[Room, str]] = []  # what there was no memory for, and why
        self._inbox = 0
        self._slots: dict[int, int] = {}  # where a message from a rank comes
        self._theirs: dict[int, int] = {}  # where one to a rank goes
        prepared = self._mapped.driver.prepared
        say, wait, clear = self._mapped.say, self._mapped.wait, self._mapped.clear
        self._takes = {each: prepared(wait(_free(each))) for each in self._others}
        self._tells = {each: prepared(clear(_free(each)) + say(each, _arrived(rank))) for each in self._others}
        self._waits = {each: prepared(wait(_arrived(each))) for each in self._others}
        self._frees = {each: prepared(clear(_arrived(each)) + say(each, _free(rank))) for each in self._others}
        for each in self._others:
            self._mapped.set(_free(each))
        gather(None, 1)

    def ensure(self, room: Room, stream: Any, more: Callable[[], None] = lambda: None) -> None:
        """Have slots of so many bytes at least. All ranks say the same. Where slots grow, the host waits for the stream of the messages and
        for all ranks. more: frees memory, for a second try. Raises NoPeers on all ranks, whose slots are as before."""
        if all(self._room.get(pair, 0) >= size for pair, size in room.items()):
            return
        for least, why in self._refused:
            if all(room.get(pair, 0) >= size for pair, size in least.items()):
                raise NoPeers(why)
        before = self._room
        self.forget(stream)
        try:
            self._grow({pair: max(_rounded(room.get(pair, 0)), before.get(pair, 0)) for pair in {*room, *before}}, stream, more)
        except NoPeers as fault:
            self._refused.append((dict(room), fault.why))
            if before:  # a backward pass may be still to come
                self._grow(before, stream, more)
            raise

    def _grow(self, room: Room, stream: Any, more: Callable[[], None]) -> None:
        places, sizes = _layout(room, self.size)
        why, size = "", max(sizes)
        for attempt in (more, None):
            try:
                self._inbox = self._runtime.malloc(size)
                break
            except RuntimeError as error:
                if attempt is None:
                    why = f"rank {self.rank} has no memory for messages of {size} bytes: {error}"
                else:
                    attempt()
        try:
            mapped = self._mapped.share([(self._inbox, size)], self._others, why)
        except NoPeers:
            self._mapped.forget(stream)
            if self._inbox:
                self._runtime.free(self._inbox)
            self._inbox = 0
            raise
        self._slots = {source: self._inbox + at for (source, to), at in places.items() if to == self.rank}
        self._theirs = {to: mapped[to][0] + at for (source, to), at in places.items() if source == self.rank}
        self._room = dict(room)

    def forget(self, stream: Any) -> None:
        """Give back the inbox, where there is one."""
        if self._inbox:
            self._mapped.forget(stream)
            self._runtime.free(self._inbox)
            self._inbox, self._room = 0, {}

    def exchange(self, out: Parts, into: Parts, stream: int) -> None:
        """Enqueue messages of several parts on a stream. Each is as large as its receiver's. Raises ValueError where a slot is too small."""
        pairs = {(self.rank, to): parts for to, parts in out.items()} | {(source, self.rank): parts for source, parts in into.items()}
        for pair, parts in pairs.items():
            if (size := sum(width * rows for _, width, _, rows in parts)) > (room := self._room.get(pair, 0)):
                raise ValueError(f"a message of {size} bytes from rank {pair[0]} to rank {pair[1]}, whose slot has {room}")
        for to in self._others:
            self._enqueue(out.get(to, ()), True, self._theirs.get(to, 0), self._takes[to], self._tells[to], stream)
        for source in reversed(self._others):
            self._enqueue(into.get(source, ()), False, self._slots.get(source, 0), self._waits[source], self._frees[source], stream)

    def _enqueue(self, parts: Sequence[Part], out: bool, slot: int, before: Enqueue, after: Enqueue, stream: int) -> None:
        """Copy parts out to a slot, or from it, where they lie one behind the other; before and after: what is done with its flags. Nothing
        where there are no bytes."""
        kind = self._runtime.memcpyDefault
        some = [each for each in parts if each[1] * each[3]]
        if some:
            before(stream)
        for address, width, step, rows in some:
            to, source = ((slot, width), (address, step)) if out else ((address, step), (slot, width))
            if rows == 1:  # a step between rows may have no more than 2^31 - 1 bytes, a row may
                self._runtime.memcpyAsync(to[0], source[0], width, kind, stream)
            else:
                self._runtime.memcpy2DAsync(*to, *source, width, rows, kind, stream)
            slot += width * rows
        if some:
            after(stream)

    def write(self, address: int, value: int, stream: int) -> None:
        """Have a stream write a value to an address, also of the host."""
        self._mapped.driver.prepared([(WRITE, address, value, NO_FLAG)])(stream)

    def let_go(self, ended: Callable[[], bool]) -> None:
        """End the waits of the stream, where they have not ended. What it sends then is no result."""
        if not ended():
            self._mapped.let_go(ended)

    def drained(self) -> bool:
        """Whether all that was sent has been taken: nobody writes to this rank's memory any more. The stream has come to its end."""
        return all(self._mapped.is_set(_free(each)) for each in self._others)


def _free(receiver: int) -> int:
    """The number of the flag, in a sender's memory, that a rank sets when its slot is free."""
    return 2 * receiver


def _arrived(sender: int) -> int:
    return 2 * sender + 1


def _rounded(size: int) -> int:
    """To eighths of a power of two: lengths that grow a little from call to call keep their slots."""
    unit = max(_ALIGNED, 1 << max(0, size.bit_length() - 4))
    return -(-size // unit) * unit


def _layout(room: Room, size: int) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Where each slot begins in its receiver's inbox, and the bytes of each inbox."""
    places: dict[tuple[int, int], int] = {}
    ends = [0] * size
    for (source, to), its in sorted(room.items()):
        places[source, to] = ends[to]
        ends[to] += -(-its // _ALIGNED) * _ALIGNED
    return places, ends


# -- for torch --------------------------------------------------------------------------------------------------------


class Messages:
    """Copies between the ranks of a process group, on a stream of this process's GPU of a higher priority."""

    def __init__(self, group: Any, device: Any) -> None:
        xp: Any = backend_of(device).xp  # CuPy
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._copies = Copies(xp.cuda, dist.get_rank(group), dist.get_world_size(group), lambda value, _: gathered(group, value))
        self._count, self._ended = 0, torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._watch = _Watch(_timeout(group), f"rank {self._copies.rank} of {self._copies.size}", self._ended.numpy())
        atexit.register(self._drain)

    def ensure(self, room: Room) -> None:
        """As Copies has it."""
        self._copies.ensure(room, self._stream, torch.cuda.empty_cache)

    def exchange(self, messages: Sequence[tuple[int, Any]], expected: Sequence[tuple[int, Any]]) -> Any:
        """Send (rank of the group, tensor) and receive (rank, tensor to fill), behind what the current stream has so far.

        A tensor is contiguous, or its rows are, all heads of one side by side (:func:`row_major`): what arrives lies as what was sent.
        Returns an event behind it, before which none of the tensors may be freed.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._copies.exchange(_parts(messages), _parts(expected), self._stream.cuda_stream)
        ended = torch.cuda.Event()
        ended.record(self._stream)
        if not torch.cuda.is_current_stream_capturing():
            self._count = self._count % _COUNTS + 1
            self._copies.write(self._ended.data_ptr(), self._count, self._stream.cuda_stream)
            self._watch.add(self._count)
        return ended

    def _drain(self) -> None:
        """At the process's end: its memory stays until the others have written their last flag to it, for some seconds at most. A message that
        does not come ends then, too: the end of a process would wait for the stream."""
        until = time.monotonic() + _DRAIN_SECONDS
        with suppress(RuntimeError):  # the device is lost
            while time.monotonic() < until and not (self._stream.query() and self._copies.drained()):
                time.sleep(1e-3)
            self._copies.let_go(self._stream.query)
        self._watch.over.set()


def row_major(tensor: Any) -> bool:
    """Whether all heads of a row of (batch, heads, rows, head_dim) lie side by side, and rows, of all batches, evenly apart: what a model has
    whose projection gives (batch, rows, heads * head_dim), or a part of it."""
    (batch, heads, rows, dim), (of_batch, of_head, of_row, of_column) = tensor.shape, tensor.stride()
    return (of_column, of_head) == (1, dim) and of_row >= heads * dim and (batch == 1 or of_batch == rows * of_row)


def _parts(tensors: Sequence[tuple[int, Any]]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for rank, tensor in tensors:
        if tensor.is_contiguous():
            width, step, rows = tensor.nbytes, tensor.nbytes, 1
        else:
            batch, heads, rows, dim = tensor.shape
            size = tensor.element_size()
            width, step, rows = heads * dim * size, tensor.stride(2) * size, batch * rows
        found.setdefault(rank, []).append((tensor.data_ptr(), width, step, rows))
    return found


class _Watch:
    """Ends the process where a message does not come within the group's timeout, as NCCL's watchdog does: a wait of a stream has no end.

    ended: memory of the host, to which the stream writes the number of the exchange that has ended. So the thread calls nothing of CUDA,
    which might end somebody's capture of a graph.
    """

    def __init__(self, seconds: float, who: str, ended: Any) -> None:
        self._seconds, self._who, self._ended = seconds, who, ended
        self._open: deque[tuple[float, int]] = deque()
        self.over = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="messages of ring_attention").start()

    def add(self, number: int) -> None:
        """Watch an exchange."""
        self._open.append((time.monotonic() + self._seconds, number))

    def _look(self) -> None:
        while not self.over.wait(_POLL_SECONDS):
            last = int(self._ended[0])
            while self._open and (last - self._open[0][1]) % _COUNTS < _COUNTS // 2:
                self._open.popleft()
            if self._open and time.monotonic() > self._open[0][0]:
                why = "a rank ended, hangs, or is slower than that; a stream that waits for it has no end of its own"
                hint = "read what the other ranks have printed; init_process_group(timeout=...) sets how long ranks wait"
                fault = Fault(f"{self._who} has waited {self._seconds:g} s for a message of ring_attention", why, hint)
                sys.stderr.write(f"{fault}\n")
                os._exit(EnvironmentFault.exit_code)


def _timeout(group: Any) -> float:
    """Seconds that a message of a group may take."""
    seconds: float = group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    return seconds


def gathered(group: Any, value: Any) -> list[Any]:
    """Every rank's value, on every rank of a group."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


#: By group: what was asked for, and what carries its messages; None: NCCL.
_known: WeakKeyDictionary[Any, tuple[str, Messages | None]] = WeakKeyDictionary()


def carrier(group: Any) -> str:
    """What has carried a group's messages between GPUs so far, for records: "copy engines", or its backend."""
    return "copy engines" if _known.get(group, ("", None))[1] else str(dist.get_backend(group))


def messages(group: Any, device: Any, room: Room) -> Messages | None:
    """What carries a call's messages between the GPUs of one host, with slots of so many bytes; None: NCCL, where a rank is out of reach, or has
    no memory for them.

    All ranks of the group ask together. FA_CLI_RING_TRANSPORT of its first rank chooses: nccl, peer, or auto, as the default is. Raises
    UsageFault for another word, and NoPeers where peer insists, on all ranks.
    """
    asked = ""
    try:
        with torch.cuda.device(device):
            if group not in _known:
                asked = chosen(gathered(group, os.environ.get(CHOICE, ""))[0])
                _known[group] = asked, None
                _known[group] = asked, None if asked == "nccl" else Messages(group, device)
            asked, found = _known[group]
            if found:
                found.ensure(room)
            return found
    except NoPeers:
        if asked == "peer":
            if not _known[group][1]:
                del _known[group]  # the next call says it again
            raise
        return None
