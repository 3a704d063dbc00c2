"""Worlds of ranks on this machine: processes of one group, each started once, that run a job and hand back what it returns."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Seconds after which a rank gives up waiting for another, and after which a world is ended.
TIMEOUT, LIMIT = 120, 300


def run(count: int, job: Callable[..., Any], folder: Path, *given: Any, by: str = "gloo", transport: str = "") -> list[Any]:
    """What job(*given) returns on each of `count` ranks; None of one that died, the traceback (a text) of one that raised.

    job: a function of a module that other processes can import. folder: where the ranks find each other, empty. by: the group's backends;
    with NCCL each rank has a GPU of its own, and transport is FA_CLI_RING_TRANSPORT.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "harness.torch_op.training"])  # imported once for all worlds
    started = []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, count, str(folder / "ranks"), by, transport, theirs, job, given), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    until, found = time.monotonic() + LIMIT, []
    for _, ours in started:
        try:
            found.append(ours.recv() if ours.poll(max(0, until - time.monotonic())) else "it did not end")
        except EOFError:
            found.append(None)
    for process, _ in started:
        process.join(5)
        if process.is_alive():
            process.kill()
    return found


def _rank(
    rank: int, count: int, file: str, by: str, transport: str, answer: Connection, job: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"FA_CLI_THREADS": "1", "FA_CLI_RING_TRANSPORT": transport}
    torch.set_num_threads(1)
    if "nccl" in by:
        torch.cuda.set_device(rank)
    store = dist.FileStore(file, count)
    dist.init_process_group(by, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT))
    # A rank that ends while another still connects to it would end that one, too, before its job has begun.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(count)], timedelta(seconds=TIMEOUT))
    try:
        answer.send(job(*given))
    except Exception:
        answer.send(traceback.format_exc())
    dist.destroy_process_group()
