"""A ring without attention: do the ranks meet, does a message arrive unchanged, and how fast are messages of a size?"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backends import Backend
from ..backends.mapped import NoPeers
from .job import open_backend, transport_of
from .peer import Peer
from .place import Place, control
from .transport import Control, Stuck, Transport, agreed, wait_for

SIZES = tuple(1 << shift for shift in range(16, 29, 2))
#: Exchanges of a size, one after the other; on a CPU fewer, since its messages are copies by the processor.
_EXCHANGES = {"cuda": 20, "cpu": 3}


@dataclass(frozen=True)
class Probe:
    """What was found: host and device of each rank, what moves the bytes, whether they were right, and bytes a second each way."""

    ranks: tuple[tuple[str, str], ...]
    engine: str
    vector: bool
    round: bool
    peers: tuple[bool, ...]  # whether each rank's GPU reaches all others of its machine
    bandwidth: tuple[tuple[int, float], ...]
    copies: str | None  # why there are no peer copies between GPUs, "" where there are; None where it was not tried beside `engine`


def probe(device: str, timeout: float, place: Place) -> Probe | None:
    """This rank's part; what was found on the first rank, None on the others. Raises as transports do."""
    talk = control(place, timeout)
    backend = agreed(talk, lambda: open_backend(device, place.local))
    transport = transport_of(backend, talk, timeout)
    with transport.scope():
        vector = _vector_sum(backend, talk)
        arrived = _once_round(backend, transport, timeout)
        sizes = SIZES if backend.name == "cuda" else SIZES[:4]
        rates = bandwidth(backend, transport, sizes, timeout) if talk.size > 1 else []
    about = talk.gather(((platform.node(), backend.device().name), arrived, rates, _peers(backend)))
    transport.close()
    copies = _copies(backend, talk, timeout) if backend.name == "cuda" and talk.size > 1 and transport.engine != Peer.engine else None
    talk.close()
    if talk.rank:
        return None
    slowest = tuple((size, min(rates)) for size, rates in zip(sizes, zip(*(each[2] for each in about), strict=True), strict=False))
    reached = tuple(found for *_, found in about if found is not None)
    return Probe(tuple(each[0] for each in about), transport.engine, vector, all(each[1] for each in about), reached, slowest, copies)


def bandwidth(backend: Backend, transport: Transport, sizes: Sequence[int], timeout: float) -> list[float]:
    """Bytes a second each way of exchanges of each size, all ranks at once; the first exchange of a size is not counted."""
    send, receive = (backend.memory(max(sizes)) for _ in range(2))
    transport.register([receive])
    found = []
    for size in sizes:
        arrivals = []
        for _ in range(1 + _EXCHANGES[backend.name]):
            arrivals.append(transport.exchange(send[:size], receive[:size]))
            arrivals[-1].wait()
        wait_for(transport, transport.clock.mark(), timeout)
        seconds = transport.clock.seconds(arrivals[0].ended, arrivals[-1].ended)
        found.append(size * (len(arrivals) - 1) / seconds)
    return found


def _vector_sum(backend: Backend, talk: Control, length: int = 1 << 20) -> bool:
    """Each rank adds its part of two vectors on its device; the first rank has the whole."""
    first, last = (length * i // talk.size for i in (talk.rank, talk.rank + 1))
    numbers = np.arange(first, last, dtype=np.float64)
    held = backend.memory(max(8, numbers.nbytes))
    part = held[: numbers.nbytes].view(np.float64)
    part[...] = backend.xp.asarray(numbers)
    part += part
    whole = np.concatenate([np.frombuffer(each) for each in talk.gather(backend.get(held[: numbers.nbytes]).tobytes())])
    return bool((whole == 2.0 * np.arange(length)).all())


def _once_round(backend: Backend, transport: Transport, timeout: float, size: int = 4096) -> bool:
    """The bytes of each rank travel as K and V do; this rank sees those of all others, the next lower rank's first."""
    buffers = [backend.memory(size) for _ in range(2)]
    buffers[0][:] = transport.rank
    transport.register(buffers)
    right = True
    for step in range(1, transport.size):
        arrival = transport.exchange(buffers[(step - 1) % 2], buffers[step % 2])
        arrival.wait()
        wait_for(transport, transport.clock.mark(), timeout)
        right = right and bool((backend.get(buffers[step % 2]) == (transport.rank - step) % transport.size).all())
    return right


def _copies(backend: Backend, talk: Control, timeout: float) -> str:
    """Why peer copies do not work between the ranks; "" where the bytes of each come to all others by them."""
    try:
        transport = Peer(talk, timeout)
    except NoPeers as fault:
        return fault.why
    try:
        with transport.scope():
            right = _once_round(backend, transport, timeout)
    except Stuck as fault:
        transport.close(failed=True)
        return fault.what
    transport.close()
    return "" if all(talk.gather(right)) else "bytes were changed"


def _peers(backend: Backend) -> bool | None:
    """Whether this GPU may read the memory of all others that this process sees; None on a CPU."""
    if backend.name == "cpu":
        return None
    import cupy

    runtime = cupy.cuda.runtime
    here, count = runtime.getDevice(), runtime.getDeviceCount()
    return all(runtime.deviceCanAccessPeer(here, other) for other in range(count) if other != here)
