"""The NCCL transport against a stand-in for CuPy: what it enqueues, in which order, on which stream. That it works, a GPU must show."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from harness.ring.transport import Alone


class Recorder:
    """A log of calls, and objects that write into it."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def cupy(self) -> types.ModuleType:
        """As much of CuPy as the transport uses."""
        log, made = self.log, types.ModuleType("cupy")

        class Stream:
            count = 0

            def __init__(self, non_blocking: bool = False, priority: int = 0) -> None:
                assert non_blocking and (priority < 0) == (Stream.count == 1)  # the default stream would wait for the others
                Stream.count += 1
                self.ptr = Stream.count

            def synchronize(self) -> None:
                pass

            def wait_event(self, event: Any) -> None:
                log.append(("wait", self.ptr, event.name))

        class Event:
            count = 0

            def __init__(self, disable_timing: bool = False) -> None:
                Event.count += 1
                self.name = Event.count

            def record(self, stream: Stream) -> None:
                log.append(("record", stream.ptr, self.name))

        class Communicator:
            def __init__(self, size: int, identity: object, rank: int) -> None:
                log.append(("connect", size, identity, rank))

            def send(self, address: int, count: int, kind: str, peer: int, stream: int) -> None:
                log.append(("send", count, kind, peer, stream))

            def recv(self, address: int, count: int, kind: str, peer: int, stream: int) -> None:
                log.append(("recv", count, kind, peer, stream))

            def abort(self) -> None:
                log.append(("abort",))

            def destroy(self) -> None:
                log.append(("destroy",))

        nccl = types.ModuleType("cupy.cuda.nccl")
        for name in ("groupStart", "groupEnd"):
            setattr(nccl, name, lambda name=name: log.append((name,)))
        nccl.get_unique_id = lambda: "id"  # type: ignore[attr-defined]
        nccl.NcclCommunicator, nccl.NCCL_UINT8, nccl.available = Communicator, "bytes", True  # type: ignore[attr-defined]
        cuda = types.ModuleType("cupy.cuda")
        cuda.Stream, cuda.Event, cuda.nccl = Stream, Event, nccl  # type: ignore[attr-defined]
        cuda.get_current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)  # type: ignore[attr-defined]
        made.cuda, made.zeros = cuda, lambda count, dtype: Bytes(count)  # type: ignore[attr-defined]
        return made


class Bytes:
    """A device array as the transport sees it."""

    def __init__(self, size: int) -> None:
        self.size, self.nbytes, self.data = size, np.int64(size), types.SimpleNamespace(ptr=4096)

    def __getitem__(self, part: slice) -> Bytes:
        return Bytes(len(range(*part.indices(self.size))))


class Ranks(Alone):
    """A control that says it is rank 0 of 3."""

    size = 3


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """CuPy is the recorder's."""
    made = Recorder()
    cupy: Any = made.cupy()
    for name, module in (("cupy", cupy), ("cupy.cuda", cupy.cuda), ("cupy.cuda.nccl", cupy.cuda.nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_an_exchange_is_one_group_behind_the_compute_stream(recorder: Recorder) -> None:
    """Stream 1 computes, stream 2 communicates: it waits for an event of stream 1, and stream 1 for one of its own, not the host."""
    from harness.ring.nccl import Nccl

    transport = Nccl(Ranks(), 5.0)
    assert recorder.log[0] == ("connect", 3, "id", 0)
    assert [call for call in recorder.log if call[0] in ("send", "recv")] == [("send", 1, "bytes", 1, 2), ("recv", 1, "bytes", 2, 2)]
    recorder.log.clear()
    arrival = transport.exchange(Bytes(64), Bytes(48))
    arrival.wait()
    arrival.wait()  # a second time is nothing
    assert arrival.bytes == 64
    group = [("groupStart",), ("send", 64, "bytes", 1, 2), ("recv", 48, "bytes", 2, 2), ("groupEnd",)]
    assert recorder.log == [("record", 1, 4), ("wait", 2, 4), ("record", 2, 5), *group, ("record", 2, 6), ("wait", 1, 6)]


def test_empty_messages_are_not_sent(recorder: Recorder) -> None:
    """A shard without rows: its neighbours agree that there is nothing."""
    from harness.ring.nccl import Nccl

    transport = Nccl(Ranks(), 5.0)
    recorder.log.clear()
    transport.exchange(Bytes(0), Bytes(16)).wait()
    assert not [call for call in recorder.log if call[0] == "send"] and [call for call in recorder.log if call[0] == "recv"]


@pytest.mark.parametrize(("failed", "word"), [(False, "destroy"), (True, "abort")])
def test_the_end(recorder: Recorder, failed: bool, word: str) -> None:
    """A rank that failed does not wait for what is in flight."""
    from harness.ring.nccl import Nccl

    transport = Nccl(Ranks(), 5.0)
    transport.close(failed)
    transport.close(failed)
    assert [call for call in recorder.log if call[0] in ("destroy", "abort")] == [(word,)]
