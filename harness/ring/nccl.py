"""NCCL through CuPy: device memory from GPU to GPU, on a stream of its own, without a wait of the host.

An exchange is one group of a send and a receive, so that both directions of a link are used and no order of the ranks can deadlock.
It is enqueued before the launches that it runs beside, because a kernel that fills the GPU leaves NCCL's blocks no room until it ends.
There is one communicator: two of them in flight may deadlock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..fault import EnvironmentFault, install_extra
from .mpi import deadline
from .transport import Control, Streams, Stuck


class Nccl(Streams):
    """The transport of a rank with a GPU. Raises EnvironmentFault where NCCL is missing or its ranks do not find each other."""

    engine = "NCCL"

    def __init__(self, talk: Control, timeout: float) -> None:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # point to point needs no multicast
        import cupy

        super().__init__(cupy, talk, timeout)
        self._nccl: Any = None
        self._communicator: Any = None
        if self.size == 1:
            return
        try:
            from cupy.cuda import nccl

            if not nccl.available:  # CuPy's stand-in for a module that does not load
                raise ImportError("CuPy finds no libnccl.so.2")
        except ImportError as error:
            raise EnvironmentFault("NCCL does not load", str(error), install_extra("ring")) from None
        self._nccl, identity = nccl, talk.gather(nccl.get_unique_id() if talk.rank == 0 else None)[0]
        try:
            with deadline(timeout, Stuck(self.rank, None, timeout)):
                self._communicator = nccl.NcclCommunicator(self.size, identity, self.rank)
                byte = cupy.zeros(2, np.uint8)
                self._cuda.get_current_stream().synchronize()
                self.exchange(byte[:1], byte[1:])  # neighbours connect at their first message, and the host waits for it
                self.stream.synchronize()
        except RuntimeError as error:  # nccl.NcclError
            raise EnvironmentFault(
                "NCCL cannot connect the ranks", str(error), "NCCL_DEBUG=INFO, before the same command, says why"
            ) from None

    def register(self, buffers: Sequence[Any]) -> None:
        """Any memory will do."""

    def _enqueue(self, send: Any, receive: Any) -> None:
        self._nccl.groupStart()
        if send.size:
            self._communicator.send(send.data.ptr, send.size, self._nccl.NCCL_UINT8, (self.rank + 1) % self.size, self.stream.ptr)
        if receive.size:
            self._communicator.recv(receive.data.ptr, receive.size, self._nccl.NCCL_UINT8, (self.rank - 1) % self.size, self.stream.ptr)
        self._nccl.groupEnd()

    def close(self, failed: bool = False) -> None:
        """Free the communicator; where the rank failed, abort what is in flight."""
        if self._communicator is not None:
            with deadline(self._timeout, Stuck(self.rank, None, self._timeout)):  # a neighbour that hangs may hold either of them up
                self._communicator.abort() if failed else self._communicator.destroy()
            self._communicator = None
