"""The operator's messages by copy engines, between the GPUs of tests/support/gpus.py: right in every order of the streams, wrong with a fault.

What a GPU does with them, tests/torch/test_torch_op_ring.py must show on two.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import Deadlock, Machine, Together, on_all

torch = pytest.importorskip("torch")
from harness.backends import mapped  # noqa: E402
from harness.fault import UsageFault  # noqa: E402
from harness.torch_op import copies  # noqa: E402
from harness.torch_op.ring import Options, _plan  # noqa: E402

ROOM = 96


class World:
    """Ranks whose messages are numbered, and what each has received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, seed: int = 0, module: Any = copies) -> None:
        self.machine, self.ranks, self.order = Machine(random.Random(seed)), ranks, random.Random(seed)
        monkeypatch.setitem(mapped.Mapped.__init__.__globals__, "Driver", lambda: self.machine)
        values, barrier = [None] * ranks, threading.Barrier(ranks)
        talks = [Together(rank, values, barrier) for rank in range(ranks)]
        self.copies = self.on_all(lambda rank: module.Copies(self.machine.cupy.cuda, rank, ranks, talks[rank].gather))
        self.streams = [self.machine.stream() for _ in range(ranks)]
        self.kept: dict[int, tuple[int, int]] = {}  # by address: size and value that was sent there
        self.late = 0
        self.sent = 0

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        """A thread a rank."""
        return on_all(self.machine, self.ranks, work)

    def ensure(self, room: dict[tuple[int, int], int]) -> None:
        self.on_all(lambda rank: self.copies[rank].ensure(room, self.streams[rank]))

    def exchange(self, pairs: dict[tuple[int, int], list[int]]) -> None:
        """Messages by sender and receiver, of parts of so many bytes, all of one exchange; a part of 48 is three rows, further apart where
        they are sent."""
        out: list[dict[int, list[copies.Part]]] = [{} for _ in range(self.ranks)]
        into: list[dict[int, list[copies.Part]]] = [{} for _ in range(self.ranks)]
        for (source, to), sizes in pairs.items():
            for size in sizes:
                rows, width, step = (3, 16, 20) if size == 48 else (1, size, size)
                here, there = self.machine.malloc(rows * max(1, step)), self.machine.malloc(max(1, size))
                for row in range(rows):
                    self.sent = self.sent % 250 + 1
                    self.make(source, here + row * step, width, self.sent)
                    self.kept[there + row * width] = width, self.sent
                out[source].setdefault(to, []).append((here, width, step, rows))
                into[to].setdefault(source, []).append((there, size, size, 1))
        for rank in self.order.sample(range(self.ranks), self.ranks):
            self.copies[rank].exchange(out[rank], into[rank], self.streams[rank].ptr)
            self.look(rank, [each for parts in into[rank].values() for each in parts])

    def make(self, rank: int, address: int, size: int, value: int) -> None:
        self.streams[rank].add(lambda _: self.machine.bytes(address, size).fill(value))

    def look(self, rank: int, parts: list[copies.Part]) -> None:
        """Behind the messages: whether the parts are there."""

        def look(_: set[Any]) -> None:
            inside = {at: each for at, each in self.kept.items() if any(first <= at < first + size for first, size, _, _ in parts)}
            self.late += not all((self.machine.bytes(at, size) == value).all() for at, (size, value) in inside.items() if size)

        self.streams[rank].add(look)

    def right(self) -> bool:
        return not self.late and all((self.machine.bytes(at, size) == value).all() for at, (size, value) in self.kept.items() if size)


def went(monkeypatch: pytest.MonkeyPatch, seed: int, ranks: int, module: Any = copies) -> str:
    """What becomes of exchanges of all with all, round the ring, and back: "right", "wrong" or "stuck"."""
    world = World(monkeypatch, ranks, seed, module)
    every = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    world.ensure(dict.fromkeys(every, ROOM))
    for kind in (0, 1, 2, 1, 2, 0):
        ways = [every, [(a, (a + 1) % ranks) for a in range(ranks)], [(a, (a - 1) % ranks) for a in range(ranks)]]
        world.exchange({pair: [world.order.choice((0, 1, 17, 48)) for _ in range(2)] for pair in ways[kind]})
    try:
        world.machine.run()
    except Deadlock:
        return "stuck"
    return "right" if world.right() and all(each.drained() for each in world.copies) else "wrong"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_order_is_right(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Exchanges behind one another, some of them empty, without a word between the hosts."""
    assert {went(monkeypatch, seed, ranks) for seed in range(12)} == {"right"}


_OUT = "self._takes[to], self._tells[to]"
_IN = "self._waits[source], self._frees[source]"
_SENDS = """        for to in self._others:
            self._enqueue(out.get(to, ()), True, self._theirs.get(to, 0), self._takes[to], self._tells[to], stream)
"""
_RECEIVES = """        for source in reversed(self._others):
            self._enqueue(into.get(source, ()), False, self._slots.get(source, 0), self._waits[source], self._frees[source], stream)
"""
_NOTHING = "lambda stream: None"
FAULTS = {
    "the copy does not wait for `free`": ((_OUT, f"{_NOTHING}, self._tells[to]"),),
    "`arrived` before the copy": ((_OUT, f"lambda stream: (self._takes[to](stream), self._tells[to](stream)), {_NOTHING}"),),
    "nobody waits for `arrived`": ((_IN, f"{_NOTHING}, self._frees[source]"),),
    "`free` before the slot is read": ((_IN, f"lambda stream: (self._waits[source](stream), self._frees[source](stream)), {_NOTHING}"),),
    "`free` is never said": ((_IN, f"self._waits[source], {_NOTHING}"),),
    "`free` is cleared after `arrived` is set": (
        ("prepared(clear(_free(each)) + say(each, _arrived(rank)))", "prepared(say(each, _arrived(rank)) + clear(_free(each)))"),
    ),
    "`arrived` is cleared after `free` is set": (
        ("prepared(clear(_arrived(each)) + say(each, _free(rank)))", "prepared(say(each, _free(rank)) + clear(_arrived(each)))"),
    ),
    "nothing is free at the beginning": (("            self._mapped.set(_free(each))\n", "            pass\n"),),
    "a slot of another": (("places[source, to] = ends[to]", "places[source, to] = 0"),),
    "they receive before they send": ((_SENDS + _RECEIVES, _RECEIVES + _SENDS),),
    "rows are taken for one run of bytes": (("            if rows == 1:", "            if width:"),),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_order_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In some order of the streams it reads wrong bytes, or does not end."""
    text = Path(copies.__file__).read_text()
    for before, after in FAULTS[fault]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    module = types.ModuleType("harness.torch_op.copies")
    module.__package__ = "harness.torch_op"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, "spoiled", "exec"), module.__dict__)
    assert {went(monkeypatch, seed, 2 + seed % 2, module) for seed in range(40)} != {"right"}


def test_a_message_that_does_not_come_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process whose neighbour is gone: its stream ends."""
    world = World(monkeypatch, 2)
    world.ensure({(0, 1): ROOM, (1, 0): ROOM})
    world.copies[0].exchange({1: [(world.machine.malloc(8), 8, 8, 1)]}, {1: [(world.machine.malloc(8), 8, 8, 1)]}, world.streams[0].ptr)
    with pytest.raises(Deadlock):
        world.machine.run()
    world.copies[0].let_go(lambda: world.streams[0].done)
    world.machine.run()
    assert world.streams[0].done


def test_slots_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a message needs it, then on all ranks; the old inbox is given back, and what was in flight has arrived."""
    world = World(monkeypatch, 3)
    pairs = [(0, 1), (1, 2), (2, 0)]
    world.ensure(dict.fromkeys(pairs, ROOM))
    before = set(world.machine.memory)
    world.ensure(dict.fromkeys(pairs, ROOM // 2))
    assert set(world.machine.memory) == before
    world.exchange({pair: [ROOM] for pair in pairs})
    world.ensure({(1, 0): 5000, **dict.fromkeys(pairs, ROOM)})
    world.exchange({**{pair: [ROOM, 300] for pair in pairs}, (1, 0): [5000]})
    world.machine.run()
    assert world.right() and len(before - set(world.machine.memory)) == 3
    with pytest.raises(ValueError, match="a message of 6000 bytes from rank 0 to rank 1, whose slot has 512"):
        world.copies[0].exchange({1: [(0, 3000, 3000, 2)]}, {}, world.streams[0].ptr)


def test_no_memory_is_said_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once memory was freed for a second try; a rank that has enough raises it too."""
    world, freed = World(monkeypatch, 2), list[int]()
    malloc = Machine.malloc

    def out_of_memory(machine: Machine, size: int) -> int:
        if machine.rank == 1 and not (size == 512 and freed):
            raise RuntimeError("cudaErrorMemoryAllocation")
        return malloc(machine, size)

    monkeypatch.setattr(Machine, "malloc", out_of_memory)
    ensure = lambda room: world.on_all(lambda rank: world.copies[rank].ensure(room, world.streams[rank], lambda: freed.append(rank)))  # noqa: E731
    ensure({(0, 1): 8, (1, 0): 8})
    assert freed == [1]
    with pytest.raises(mapped.NoPeers) as raised:
        ensure({(0, 1): 8, (1, 0): 1000})
    assert raised.value.why == "rank 1 has no memory for messages of 1024 bytes: cudaErrorMemoryAllocation" and len(freed) == 2
    with pytest.raises(mapped.NoPeers, match="no peer copies"):
        ensure({(0, 1): 9, (1, 0): 2000})  # not tried again
    assert len(freed) == 2
    world.exchange({(0, 1): [8], (1, 0): [8]})  # of a backward pass whose forward pass had slots
    world.machine.run()
    assert world.right()


def test_which_tensors_go_as_they_are() -> None:
    """A part of a projection's rows, of all batches; not one whose rows are of a head, nor a narrower head. What arrives lies as what was sent."""
    rows = torch.randn(2, 5, 3 * 4 + 8)
    part = rows[..., 4:16].unflatten(-1, (3, 4)).transpose(1, 2)
    assert copies.row_major(part) and copies.row_major(part[:1]) and copies.row_major(part.transpose(1, 2).contiguous().transpose(1, 2))
    assert not any(copies.row_major(each) for each in (part.contiguous(), part[..., :2], part[:, ::2], part[:, :, ::2], part[:, :, :3]))
    assert copies.row_major(part[:1, :, :3]), "the last rows of one batch may be left out"
    size = 4
    assert copies._parts([(1, part), (1, part.contiguous())]) == {1: [(part.data_ptr(), 12 * size, 20 * size, 10), unittest.mock.ANY]}


@pytest.mark.parametrize(("width", "lengths"), [(1, (7, 7)), (1, (7, 8, 7)), (2, (5, 5, 5, 4)), (4, (3, 3, 3, 3))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_room(width: int, lengths: tuple[int, ...], dtype: str) -> None:
    """As much as the largest message from one rank to another, and none between ranks that send none."""
    options = Options(True, None, "contiguous", "auto", "auto", True)
    plan = _plan(3, 8, 16, 4, lengths, width, dtype, options)
    size, ranks, most = {"bfloat16": 2, "float64": 8}[dtype], len(lengths) // width, max(lengths)
    rows = max(sum(lengths[first : first + width]) for first in range(0, len(lengths), width))
    team = 3 * 16 * size * most * (8 + 2 * 4) // width
    ring = 3 * 16 * rows * 2 * 4 // width * (4 if ranks > 2 and size == 2 else size)
    for pair, bytes_ in plan.room.items():
        assert bytes_ == (team if pair[0] // width == pair[1] // width else ring) and pair[0] != pair[1]
    assert len(plan.room) == len(lengths) * (width - 1 + min(2, ranks - 1))
    of_8_bits = _plan(3, 8, 16, 2, (5, 5), 2, "float8_e4m3", options)
    assert of_8_bits.room == dict.fromkeys([(0, 1), (1, 0)], 3 * 16 * 5 * (8 // 2) * 2), "O is of 16 bits"


class Group:
    """In the place of a process group."""


class Carrier:
    """In the place of Messages. room: what it has memory for."""

    def __init__(self, group: Any, device: Any) -> None:
        if getattr(group, "apart", False):
            raise mapped.NoPeers("the ranks are on several hosts")
        self.most = 100

    def ensure(self, room: Any) -> None:
        if max(room.values()) > self.most:
            raise mapped.NoPeers("no memory")


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's word, read once a group: NCCL where it says so, where a rank is out of reach, and for what there is no memory; peer
    insists, each time; another word is refused."""
    monkeypatch.setattr(copies, "Messages", Carrier)
    monkeypatch.setattr(copies.torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(copies.dist, "get_backend", lambda _: "nccl")
    words = iter(("auto", "nccl", "", "peer", "peer", "peer", "mpi"))
    monkeypatch.setattr(copies, "gathered", lambda group, value: [next(words), "another rank's"])
    small, large = {(0, 1): 10}, {(0, 1): 1000}
    auto, nccl, apart, insists, alone, wrong = (Group() for _ in range(6))
    apart.apart = alone.apart = True  # type: ignore[attr-defined]
    assert copies.carrier(auto) == "nccl"
    first = copies.messages(auto, "cuda:0", small)
    assert first is not None and copies.carrier(auto) == "copy engines"
    assert copies.messages(auto, "cuda:0", large) is None and copies.messages(auto, "cuda:0", small) is first
    assert copies.messages(nccl, "cuda:0", small) is None and copies.messages(apart, "cuda:0", small) is None
    assert copies.messages(apart, "cuda:0", small) is None and copies.carrier(apart) == "nccl"
    assert copies.messages(insists, "cuda:0", small)
    for group, room in ((insists, large), (insists, large), (alone, small), (alone, small)):
        with pytest.raises(mapped.NoPeers):
            copies.messages(group, "cuda:0", room)
    with pytest.raises(UsageFault, match="'mpi'"):
        copies.messages(wrong, "cuda:0", small)
    assert next(words, None) is None


def test_a_message_that_does_not_come(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its process ends with the exit code of an environment, and says whose message it is; one that comes in time is forgotten."""
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()
        threading.Event().wait()  # as a process that is gone

    monkeypatch.setattr(copies.os, "_exit", end)
    monkeypatch.setattr(copies, "_POLL_SECONDS", 0.01)
    reached, stays = np.array([7], np.int32), np.array([2], np.int32)
    quick, late = copies._Watch(0.1, "rank 1 of 2", reached), copies._Watch(0.1, "rank 3 of 4", stays)
    for number in (copies._COUNTS, 1, 7):  # the numbers have begun anew
        quick.add(number)
    late.add(2)
    late.add(3)
    assert ended.wait(5) and codes == [4]
    said = capfd.readouterr().err
    quick.over.set()
    assert not quick._open and [number for _, number in late._open] == [3]
    assert "rank 3 of 4 has waited 0.1 s for a message of ring_attention" in said and "rank 1" not in said
