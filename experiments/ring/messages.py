"""Where the time of a small message goes: python experiments/ring/messages.py [--gpus 2] [--output FOLDER], about a minute on two GPUs.

Measured before, two H200s, both directions at once: 3.6, 17, 50, 118, 195, 264, 302 GB/s at 64 KiB … 256 MiB. That is 16 us a message
and 305 GB/s: 18, 31, 71 and 236 us predicted at 64 KiB, 4, 16 and 64 MiB, against 18, 36, 86 and 254. One thing at a time is varied.

| way of sending | what it leaves out | prediction |
|---|---|---|
| exchange | nothing, by NCCL: events, the order of two streams, a group | 16 us and 305 GB/s, as before |
| group | the events and the second stream | 64 KiB below 14 us: the host needs more than half of the 16 us for the events |
| graph | the host: all messages are one CUDA graph | 8 to 10 us: NCCL's kernel, its start and its handshake with both neighbours |
| four parts | nothing; four sends and receives in the group | no gain: NCCL spreads a message over its channels already |
| one way | the other direction | the same time: the directions of NVLink are separate |
| peer copy | NCCL: a copy engine writes to the neighbour's memory (CUDA IPC), in no order with it | 3 us and 370 GB/s |
| peer copy, ordered | NCCL; a flag in the neighbour's memory says that a copy has arrived | 6 us and 370 GB/s |
| peer exchange | NCCL; the ring's peer copies (harness/ring/peer.py): two flags, and both cleared | 14 us more than peer copy, 380 GB/s |

NCCL's settings act on `group`: more or fewer channels, larger chunks and buffers change less than a tenth at 4 MiB and above; a higher
threshold of the LL protocol helps below 1 MiB; its copy-engine path (NCCL_P2P_USE_CUDA_MEMCPY) has peer copy's bandwidth, not its latency.

Found (messages.jsonl, us at 64 KiB, 4 MiB, 256 MiB): exchange 40, 39, 886; group 13, 30, 875: the host's events, twice what they took on
another host. graph 9, 29, 875: the 8 us are NCCL's kernel and handshake. four parts 25, 52, 927: worse, not the same. one way 11, 22, 749:
the directions share NCCL's channels at 4 MiB and above. peer copy 3, 13, 688 (390 GB/s), ordered 12, 20, 696, peer exchange 32, 38, 712
(377 GB/s): the host's again. Settings: none helps; fewer channels and the copy-engine path are several times slower, a higher LL
threshold twice at 4 MiB.

What it is for: K and V of a step are 4 S H D / N bytes in 16 bit. At S 32k, H16 D128 they are 128 MiB on two GPUs (0.45 ms by NCCL, 0.36 by
peer copy, beside 2.7 ms of compute) and 32 MiB on eight (0.13 ms or 0.09, beside 0.17 of compute at 400 TFLOP/s). All of these
were to hide. On eight H200s NCCL was slower than on two, 73 GB/s at 16 MiB and 80 at 64: 0.45 ms for 32 MiB, which does not hide. Hence
the ring's peer copies, `peer exchange` here.

A line of messages.jsonl is a setting, a way and a size: us of a message on the slowest rank, GB/s each way, host_us to enqueue it. In a
child process for each rank and setting, since NCCL reads its environment once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from harness.ring import job, place, probe
from harness.ring.nccl import Nccl
from harness.ring.peer import Peer
from harness.ring.transport import wait_for

COUNT, PATIENCE = 20, 15.0
#: NCCL's settings, one at a time: first none, with all ways.
SETTINGS = (
    "",
    "NCCL_MIN_P2P_NCHANNELS=32",
    "NCCL_MAX_P2P_NCHANNELS=4",
    "NCCL_P2P_LL_THRESHOLD=1048576",
    "NCCL_BUFFSIZE=16777216",
    "NCCL_P2P_NVL_CHUNKSIZE=2097152",
    "NCCL_PROTO=Simple",
    "NCCL_P2P_USE_CUDA_MEMCPY=1",
)
#: Seconds for a setting, the first and the others.
LIMIT = {True: 60, False: 25}

#: A way of sending: enqueue one message of so many bytes.
Way = Callable[[int], None]


class Ways:
    """Ways of sending from this rank to the next, and receiving from the one before. send, receive: addresses of device memory.

    transport: NCCL's."""

    def __init__(self, transport: Any, talk: Any, most: int) -> None:
        import cupy

        self.peers: Any = None
        self.transport, self.talk, self.runtime, self.stream = transport, talk, cupy.cuda.runtime, transport.stream
        self.rank, self.size, self.most = talk.rank, talk.size, most
        self.send, self.receive, self.flag = (
            self.runtime.malloc(size) for size in (most, most, 2 << 20)
        )  # whole pages: the flag shares its handle with nothing
        self.runtime.memset(self.flag, 0, 256)
        self.runtime.deviceSynchronize()
        memory = [cupy.cuda.UnownedMemory(address, most, self) for address in (self.send, self.receive)]
        self.arrays = [cupy.ndarray(most, cupy.uint8, cupy.cuda.MemoryPointer(each, 0)) for each in memory]
        self.turn = 0

    def exchange(self, size: int) -> None:
        """As the ring does."""
        self.transport.exchange(self.arrays[0][:size], self.arrays[1][:size]).wait()

    def meet_peers(self) -> None:
        """The ring's peer copies. Raises NoPeers. Their streams are NCCL's, so that all ways are timed alike."""
        self.peers = Peer(self.talk, PATIENCE)
        self.peers.compute, self.peers.stream = self.transport.compute, self.stream
        self.peers.register(self.arrays[1:])

    def peer_exchange(self, size: int) -> None:
        """As the ring does it between GPUs of one host."""
        self.peers.exchange(self.arrays[0][:size], self.arrays[1][:size]).wait()

    def group(self, size: int, parts: int = 1) -> None:
        """A send and a receive on the communication stream; in parts, several."""
        nccl, communicator = self.transport._nccl, self.transport._communicator
        nccl.groupStart()
        for part in range(parts):
            first = size // parts * part
            communicator.send(self.send + first, size // parts, nccl.NCCL_UINT8, (self.rank + 1) % self.size, self.stream.ptr)
            communicator.recv(self.receive + first, size // parts, nccl.NCCL_UINT8, (self.rank - 1) % self.size, self.stream.ptr)
        nccl.groupEnd()

    def one_way(self, size: int) -> None:
        """Ranks with even numbers send, the ones behind them receive."""
        nccl, communicator = self.transport._nccl, self.transport._communicator
        if self.rank % 2:
            communicator.recv(self.receive, size, nccl.NCCL_UINT8, self.rank - 1, self.stream.ptr)
        elif self.rank + 1 < self.size:
            communicator.send(self.send, size, nccl.NCCL_UINT8, self.rank + 1, self.stream.ptr)

    def meet_peer(self) -> None:
        """Map the next rank's receive buffer and flag. Raises where CUDA IPC does not work here."""
        self.driver = ctypes.CDLL("libcuda.so.1")
        mine = [bytes(self.runtime.ipcGetMemHandle(address)) for address in (self.receive, self.flag)]
        handles = self.talk.gather(mine)[(self.rank + 1) % self.size]
        self.their_receive, self.their_flag = (self.runtime.ipcOpenMemHandle(handle, 1) for handle in handles)  # 1: enable peer access

    def peer_copy(self, size: int) -> None:
        """A copy engine writes to the neighbour. 4: the addresses say what they are."""
        self.runtime.memcpyAsync(self.their_receive, self.send, size, 4, self.stream.ptr)

    def ordered_copy(self, size: int) -> None:
        """A copy, its number into the neighbour's flag, and a wait for that number in the own one (CUDA driver API: stream memory operations)."""
        self.turn += 1
        self.peer_copy(size)
        stream, turn = ctypes.c_void_p(self.stream.ptr), ctypes.c_uint32(self.turn)
        calls = (
            (self.driver.cuStreamWriteValue32_v2, self.their_flag),
            (self.driver.cuStreamWaitValue32_v2, self.flag),
        )  # waits for >= (flag 0)
        for call, address in calls:
            if code := call(stream, ctypes.c_uint64(address), turn, ctypes.c_uint(0)):
                raise RuntimeError(f"{call.__name__}: CUDA driver error {code}")


def timed(ways: Ways, way: Way, size: int, graph: bool) -> tuple[float, float]:
    """Seconds of a message on the device, and on the host to enqueue it."""
    import cupy

    clock, stream = ways.transport.clock, ways.stream
    ways.talk.gather(None)

    def several() -> None:
        for _ in range(COUNT):
            way(size)

    enqueue: Callable[[], None] = several
    if graph:
        held = cupy.cuda.Stream(non_blocking=True)
        ways.stream = held
        try:
            held.begin_capture()
            several()
            made = held.end_capture()
        finally:
            ways.stream = stream

        def enqueue() -> None:
            made.launch(stream)

    enqueue()  # connects channels, warms up
    wait_for(ways.transport, clock.mark(stream), PATIENCE)
    ways.talk.gather(None)
    ways.group(min(probe.SIZES))  # its end is where the time begins: all ranks are there
    marks = [clock.mark(stream)]
    began = time.perf_counter()
    enqueue()
    host = time.perf_counter() - began
    marks.append(clock.mark(stream))
    wait_for(ways.transport, marks[1], PATIENCE)
    return clock.seconds(*marks) / COUNT, host / COUNT


@contextmanager
def told(ways: Ways, output: Path, **words: object) -> Any:
    """An error is a line, not the end: another way may work."""
    try:
        yield
    except Exception as error:
        if ways.rank == 0:
            write(output, **words, error=f"{type(error).__name__}: {error}")


def write(output: Path, **line: object) -> None:
    """A line, kept at once: what comes after it may hang."""
    with output.open("a") as file:
        file.write(json.dumps(line) + "\n")


def rank(given: argparse.Namespace) -> None:
    """A rank of one setting."""
    talk = place.Folder(place.Place(given.rank, given.gpus, given.rank, "folder", given.folder), PATIENCE)
    assert job.open_backend("cuda", given.rank).name == "cuda"  # the rank's GPU is the current one from here on
    transport: Any = Nccl(talk, PATIENCE)
    sizes = [size for size in probe.SIZES if size <= given.most]
    with transport.scope():
        ways = Ways(transport, talk, max(sizes))
        table: list[tuple[str, Way, bool]] = [("group", ways.group, False)]
        if not given.setting:
            table = [("exchange", ways.exchange, False), *table, ("one way", ways.one_way, False)]
            table += [("four parts", lambda size: ways.group(size, 4), False)]
            with told(ways, given.output, setting="", way="peer copy"):
                ways.meet_peer()
                table += [("peer copy", ways.peer_copy, False)]
            with told(ways, given.output, setting="", way="peer exchange"):
                ways.meet_peers()
                table += [("peer exchange", ways.peer_exchange, False)]
            table += [("graph", ways.group, True)]
            table += [("peer copy, ordered", ways.ordered_copy, False)] if ("peer copy", ways.peer_copy, False) in table else []
        for name, way, graph in table:
            with told(ways, given.output, setting=given.setting, way=name):
                for size in sizes:
                    about = talk.gather(timed(ways, way, size, graph))
                    seconds, host = (max(each[i] for each in about) for i in (0, 1))
                    if talk.rank == 0:
                        words = {"setting": given.setting, "way": name, "bytes": size, "us": round(seconds * 1e6, 2)}
                        write(given.output, **words, gbps=round(size / seconds / 1e9, 2), host_us=round(host * 1e6, 2))
    talk.gather(None)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to free in order: mapped memory and a communicator of another rank's


def ended(given: argparse.Namespace, setting: str) -> bool:
    """Run one setting in processes of its own; whether all ranks came to their end."""
    name, _, value = setting.partition("=")
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"} | ({name: value} if name else {})
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, __file__, "--gpus", str(given.gpus), "--output", str(given.output), "--setting", setting]
        own += ["--most", str(given.most), "--folder", folder]
        started = [subprocess.Popen([*own, "--rank", str(number)], env=environment) for number in range(given.gpus)]
        until = time.monotonic() + LIMIT[not setting]
        try:
            codes = [each.wait(max(0.1, until - time.monotonic())) for each in started]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for each in started:
                each.kill()
                each.wait()
    if any(codes):
        write(given.output, setting=setting, error=f"exit codes {codes}")
    return not any(codes)


def show(output: Path) -> None:
    """A row for each setting and way: us a message and GB/s of each size; for the smallest message also the host's us."""
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        name = f"{line.get('way', '')} {line['setting']}".strip()
        if "error" in line:
            sys.stdout.write(f"{name}: {line['error']}\n")
        else:
            found.setdefault(name, {})[line["bytes"]] = line
    sizes = sorted({size for row in found.values() for size in row})
    sys.stdout.write(f"{'us (GB/s)':42}" + "".join(f"{size >> 10:>9} KiB " for size in sizes) + "  host us\n")
    for name, row in found.items():
        cells = [f"{row[size]['us']:.1f} ({row[size]['gbps']:.0f})" if size in row else "" for size in sizes]
        host = min(each["host_us"] for each in row.values())
        sys.stdout.write(f"{name:42}" + "".join(f"{cell:>14}" for cell in cells) + f"{host:9.1f}\n")


def main() -> None:
    """All settings, each in a process a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "messages.jsonl")
    parser.add_argument("--most", type=int, default=max(probe.SIZES), metavar="BYTES")
    for name, kind in (("--rank", int), ("--folder", Path), ("--setting", str)):  # of a rank's own process
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank(given)
    given.output.unlink(missing_ok=True)
    right = [ended(given, setting) for setting in SETTINGS]
    show(given.output)
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
