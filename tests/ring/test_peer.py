"""Peer copies between the GPUs of tests/support/gpus.py: right in every order of the streams, wrong with a fault. Speed, GPUs must show."""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpus import DEVICE, Array, Deadlock, Event, Machine, Together, on_all

from harness.backends import mapped
from harness.fault import UsageFault
from harness.ring import peer
from harness.ring.transport import Stuck, wait_for


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peer copies, and a note where they are not possible."""
    monkeypatch.setenv(mapped.CHOICE, "auto")


class Ring:
    """Transports of several ranks, and K and V that go round on them."""

    ROOM = 64

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, seed: int = 0, module: Any = peer) -> None:
        self.machine = Machine(random.Random(seed))
        monkeypatch.setitem(sys.modules, "cupy", self.machine.cupy)
        monkeypatch.setitem(module.Mapped.__init__.__globals__, "Driver", lambda: self.machine)
        values, barrier = [None] * ranks, threading.Barrier(ranks)
        self.ranks, self.seen, self.passes = ranks, list[tuple[int, int, bytes]](), [0] * ranks
        self.controls = [Together(rank, values, barrier) for rank in range(ranks)]
        self.transports: list[Any] = self.on_all(lambda rank: module.between_gpus(self.controls[rank], 5.0, []))

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        """A thread a rank."""
        return on_all(self.machine, self.ranks, work)

    def ready(self) -> None:
        """Blocks: one that stays and two that travel, in one allocation, as CuPy's pool has it."""
        self.blocks: list[list[Array]] = []
        for _ in range(self.ranks):
            base = self.machine.malloc(3 * self.ROOM)
            self.blocks.append([Array(base + i * self.ROOM, self.ROOM) for i in range(3)])
        self.on_all(lambda rank: self.transports[rank].register(self.blocks[rank][1:]))

    def enqueue(self, rank: int, sizes: list[int]) -> None:
        """A pass: it makes its own K and V; in each step they go on while compute reads them."""
        transport, blocks = self.transports[rank], self.blocks[rank]
        for half in (slice(0, self.ROOM // 2), slice(self.ROOM // 2, self.ROOM)):
            transport.compute.add(lambda _, half=half: self.make(rank, half))
        for step in range(self.ranks):
            source = (rank - step) % self.ranks
            held, free = (blocks[0] if s == 0 else blocks[1 + (s - 1) % 2] for s in (step, step + 1))
            arrival = None
            if step + 1 < self.ranks:
                arrival = transport.exchange(held[: sizes[source]], free[: sizes[source - 1]])
            for _ in range(3):
                transport.compute.add(lambda _, held=held, source=source: self.read(rank, source, held.data.ptr, sizes[source]))
            if arrival:
                arrival.wait()

    def make(self, rank: int, half: slice) -> None:
        """Bytes that are of this rank and this pass."""
        self.passes[rank] += half.start == 0
        self.machine.bytes(self.blocks[rank][0].data.ptr, self.ROOM)[half] = 16 * self.passes[rank] + rank

    def read(self, rank: int, source: int, address: int, size: int) -> None:
        self.seen.append((16 * self.passes[rank] + source, size, self.machine.bytes(address, size).tobytes()))

    def right(self) -> bool:
        """Whether every read found the bytes of its source in the same pass."""
        return all(data == bytes([value]) * size for value, size, data in self.seen)


def went(monkeypatch: pytest.MonkeyPatch, seed: int, ranks: int = 3, module: Any = peer) -> str:
    """What becomes of three passes: "right", "wrong" or "stuck"."""
    ring = Ring(monkeypatch, ranks, seed, module)
    ring.ready()
    for _ in range(3):
        for rank in range(ranks):
            ring.enqueue(rank, [ring.ROOM] * ranks)
    try:
        ring.machine.run()
    except Deadlock:
        return "stuck"
    return "right" if ring.right() and len(ring.seen) == 9 * ranks * ranks else "wrong"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_order_is_right(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Passes behind one another, without a word between the hosts."""
    assert {went(monkeypatch, seed, ranks) for seed in range(12)} == {"right"}


#: A method: it has another compute stream while it enqueues.
_UNORDERED = """
    def exchange(self, send, receive):
        compute, self.compute = self.compute, self._cuda.Stream(non_blocking=True)
        try:
            return super().exchange(send, receive)
        finally:
            self.compute = compute
"""
_COPY = """        if send.size:
            self._runtime.memcpyAsync(place, int(send.data.ptr), int(send.nbytes), self._runtime.memcpyDefault, self.stream.ptr)
"""
_AFTER = "        after(self.stream.ptr)\n"
_RECORD = "        sent.record(self.stream)\n"
_CLEAR = "(WRITE, address, 0, NO_FLAG)"
FAULTS = {
    "the copy does not wait for `free`": (("reach.awaited(free) if sends", "[] if sends"),),
    "`free` is said before compute is done": (('    engine = "peer copies"\n', _UNORDERED),),
    "`arrived` before the copy": ((_RECORD + _AFTER, _RECORD), (_COPY, _AFTER + _COPY)),
    "nobody waits for `arrived`": (("reach.awaited(arrived) if receives", "[] if receives"),),
    "flags stay set": ((f", {_CLEAR}", ""),),
    "`free` is cleared after `arrived` is set": (
        ("reach.awaited(free) if sends", "reach.awaited(free)[:1] if sends"),
        ("after += reach.awaited(arrived)", "after += reach.awaited(free)[1:] + reach.awaited(arrived)"),
    ),
    "they wait before they announce": (
        ("        before += reach.awaited(free) if sends else []\n", "        before = reach.awaited(free) + before\n"),
    ),
}


def spoiled(monkeypatch: pytest.MonkeyPatch, changes: tuple[tuple[str, str], ...]) -> types.ModuleType:
    """ring/peer.py with some of its text, or of backends/mapped.py's, replaced."""
    texts = {module: Path(module.__file__ or "").read_text() for module in (mapped, peer)}
    for before, after in changes:
        assert sum(text.count(before) for text in texts.values()) == 1, before
        texts = {module: text.replace(before, after) for module, text in texts.items()}
    made = [types.ModuleType(module.__name__) for module in texts]
    for module, text in zip(made, texts.values(), strict=True):
        module.__package__ = module.__name__.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where its dataclass looks, and the other module
        exec(compile(text, "spoiled", "exec"), module.__dict__)
    return made[1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_order_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In some order of the streams it reads wrong bytes, or does not end."""
    module = spoiled(monkeypatch, FAULTS[fault])
    assert {went(monkeypatch, seed, 2 + seed % 2, module) for seed in range(40)} != {"right"}


def test_shards_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without rows: their neighbours say nothing and wait for nothing."""
    for seed in range(8):
        ring = Ring(monkeypatch, 4, seed)
        ring.ready()
        for sizes in ([0, 64, 3, 0], [1, 0, 0, 0], [64, 64, 64, 64]):
            for rank in range(4):
                ring.enqueue(rank, sizes)
        ring.machine.run()
        assert ring.right() and len(ring.seen) == 3 * 3 * 16


def test_a_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same flags again, some ranks a replay ahead."""
    for seed in range(12):
        ring = Ring(monkeypatch, 3, seed)
        ring.ready()
        again = [each.captured(partial(ring.enqueue, rank, [ring.ROOM] * 3)) for rank, each in enumerate(ring.transports)]
        assert not ring.seen
        for _ in range(3):
            for replay in again:
                replay()
        ring.machine.run()
        assert ring.right() and len(ring.seen) == 3 * 3 * 9


def test_nothing_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is mapped once, whatever it holds; a second list of buffers ends the first; a page is freed when nobody has it mapped."""
    ring = Ring(monkeypatch, 3)
    ring.ready()
    kept = [ring.machine.bytes(each.data.ptr, 16).tobytes() for each in ring.blocks[0][1:]]
    assert kept == [b"\xff" * 16] * 2  # the marks are gone
    first = set(ring.machine.maps)
    assert len(first) == 3 * 3  # two pages and the next rank's blocks
    ring.ready()
    assert len(ring.machine.maps) == 9 and ring.machine.maps != first
    ring.on_all(lambda rank: ring.transports[rank].register(()))
    assert len(ring.machine.maps) == 6
    ring.on_all(lambda rank: ring.transports[rank].close())
    assert not ring.machine.maps and len(ring.machine.memory) == 6  # two times three blocks, which are not the transport's
    ring.on_all(lambda rank: ring.transports[rank].close())


def test_a_rank_that_failed_lets_its_streams_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbour never comes: without an end of the streams the process could not free its memory, and not end."""
    ring = Ring(monkeypatch, 2)
    ring.ready()
    for _ in range(2):
        ring.enqueue(0, [64, 64])
    with pytest.raises(Deadlock):
        ring.machine.run()
    ring.transports[0].close(failed=True)
    ring.transports[0].close()
    ring.machine.run()
    assert ring.transports[0].stream.done


@pytest.mark.parametrize("stopped", [0, 1, 3])
def test_the_rank_that_stopped_is_named(monkeypatch: pytest.MonkeyPatch, stopped: int) -> None:
    """By both its neighbours, which have come less far than the others; whoever waits for them names them."""
    for seed in range(8):
        ring = Ring(monkeypatch, 5, seed)
        ring.ready()
        for rank in range(5):
            for _ in range(1 if rank == stopped else 3):
                ring.enqueue(rank, [64] * 5)
        with pytest.raises(Deadlock):
            ring.machine.run()
        faults = []
        for each in ring.transports:
            if each.rank != stopped:
                with pytest.raises(Stuck) as raised:
                    wait_for(each, Event(), 0.0)
                faults.append((raised.value.done, raised.value.what.split(" did")[0], each.rank))
        least = [fault for fault in faults if fault[0] == min(faults)[0]]
        assert least == [(4, f"rank {stopped}", rank) for rank in sorted({(stopped - 1) % 5, (stopped + 1) % 5})]


def test_wrong_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that leads elsewhere, on every rank before the first message; other sizes; a buffer that nobody was told of."""
    ring = Ring(monkeypatch, 3)
    ring.machine.wrong_maps = 64
    with pytest.raises(peer.NoPeers, match="no peer copies") as raised:
        ring.ready()
    assert "is not where it was mapped" in raised.value.why and "FA_CLI_RING_TRANSPORT=nccl" in raised.value.hint
    ring = Ring(monkeypatch, 2)
    ring.ready()
    with pytest.raises(peer.NoPeers) as raised:
        ring.on_all(lambda rank: ring.transports[rank].register([ring.blocks[rank][1][: 64 - rank]]))
    assert "bytes, and the own one" in raised.value.why
    ring = Ring(monkeypatch, 2)
    ring.ready()
    for send, receive in ((ring.blocks[0][0], ring.blocks[0][0]), (Array(DEVICE, 65), ring.blocks[0][1])):
        with pytest.raises(ValueError, match="was not registered"):
            ring.transports[0].exchange(send, receive)


def _refused(*_: object) -> None:
    raise RuntimeError("cuStreamBatchMemOp_v2: error 801")


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [
        ("rank 0: a write to its own memory, flags 0x1", _CLEAR, _CLEAR.replace("NO_FLAG", "1")),
        ("rank 0: a wait for a value in its own memory, flags 0x40000001", "FLUSH if can else 0", "FLUSH"),
        (
            "rank 0: a write to the memory of rank 1, flags 0x1",
            "self._try((WRITE, self._greeting(page, self.rank), SET, NO_FLAG)",
            "self._try((WRITE, self._greeting(page, self.rank), SET, 1)",
        ),
    ],
)
def test_the_operation_that_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch, operation: str, before: str, after: str) -> None:
    """Each kind is tried alone when ranks meet: a flag that version 2 of the calls does not take, and one that this device does not."""
    with pytest.raises(Exception, match="no peer copies") as raised:  # NoPeers of the spoiled module
        monkeypatch.setenv(mapped.CHOICE, "peer")
        Ring(monkeypatch, 2, module=spoiled(monkeypatch, ((before, after),)))
    assert raised.value.why == f"{operation}: cuStreamBatchMemOp_v2: error 1 of the CUDA driver"  # type: ignore[attr-defined]


def test_a_write_that_does_not_arrive_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes it, and it goes elsewhere."""
    monkeypatch.setenv(mapped.CHOICE, "peer")
    with pytest.raises(Exception, match="no peer copies") as raised:
        Ring(
            monkeypatch,
            3,
            module=spoiled(monkeypatch, (("self._greeting(page, self.rank), SET", "self._greeting(page, self.rank) + 64, SET"),)),
        )
    assert raised.value.why == "a write by rank 2 did not reach the memory of rank 0"  # type: ignore[attr-defined]


class Other:
    """In the place of NCCL."""

    def __init__(self, talk: Any, timeout: float) -> None:
        self.engine = "NCCL"


@pytest.mark.parametrize(
    ("asked", "reached", "engine"),
    [
        ("auto", True, "peer copies"),
        ("nccl", True, "NCCL"),
        ("", True, "peer copies"),
        ("auto", False, "NCCL"),
        ("", False, "NCCL"),
        ("peer", True, "peer copies"),
    ],
)
def test_the_choice(monkeypatch: pytest.MonkeyPatch, asked: str, reached: bool, engine: str) -> None:
    """A word in the environment chooses; auto, and without one: peer copies where neighbours reach each other."""
    monkeypatch.setattr(peer, "Nccl", Other)
    monkeypatch.setattr(Machine, "deviceCanAccessPeer", lambda *_: reached)
    monkeypatch.setenv(mapped.CHOICE, asked)
    assert {each.engine for each in Ring(monkeypatch, 3).transports} == {engine}


def test_what_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced peer copies without peer access, a word that is no transport, and hosts of other names; why goes into the notes."""
    monkeypatch.setattr(Machine, "deviceCanAccessPeer", lambda *_: False)
    monkeypatch.setenv(mapped.CHOICE, "peer")
    with pytest.raises(peer.NoPeers) as raised:
        Ring(monkeypatch, 2)
    assert raised.value.why == "GPU 0 has no peer access to GPU 1"
    monkeypatch.setattr(Machine, "deviceCanAccessPeer", lambda *_: True)
    with monkeypatch.context() as refused, pytest.raises(peer.NoPeers, match="peer copies") as raised:
        refused.setattr(Machine, "wait", _refused)
        Ring(monkeypatch, 2)
    assert raised.value.why == "rank 0: a wait for a value in its own memory, flags 0x1: cuStreamBatchMemOp_v2: error 801"
    monkeypatch.setenv(mapped.CHOICE, "mpi")
    with pytest.raises(UsageFault, match="'mpi'"):
        Ring(monkeypatch, 2)
    monkeypatch.undo()
    monkeypatch.setenv(mapped.CHOICE, "auto")
    monkeypatch.setattr(peer, "Nccl", Other)
    names = iter("abc")
    monkeypatch.setattr(mapped.platform, "node", lambda: next(names))
    ring, notes = Ring(monkeypatch, 2), list[str]()
    assert {each.engine for each in ring.transports} == {"NCCL"}
    names = iter("ab")
    ring.on_all(lambda rank: peer.between_gpus(ring.controls[rank], 5.0, notes))
    assert notes == ["no peer copies between the ranks: the ranks are on several hosts"] * 2
    monkeypatch.setenv(mapped.CHOICE, "")
    names = iter("ab")
    ring.on_all(lambda rank: peer.between_gpus(ring.controls[rank], 5.0, notes))
    assert len(notes) == 2, "the default says nothing"
