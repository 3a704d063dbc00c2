"""How much memory this process may still take: the least of what the system, its control groups and its own limits leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take. root: where proc and sys/fs/cgroup lie.

    A control group of a container, a batch job or a service may allow less than the machine has free. What its files in the page cache
    take is given back when it is needed.
    """
    room = [_free(root), *(limit for limit in _groups(root))]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError, IndexError):
            room.append(address_space - int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(room))


def _free(root: Path) -> int:
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(root: Path) -> Iterator[int]:
    """What each control group of this process that has a limit leaves, from its own up to the root's; of version 2 and of version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") if kinds else ()
        limit, usage, cache = names or ("memory.max", "memory.current", "inactive_file")
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        own = PurePosixPath(path.lstrip("/"))
        for folder in (top / own, *(top / above for above in own.parents)):  # a namespace may hide some of them
            with suppress(OSError, ValueError):  # no such group, or "max": no limit
                most = int((folder / limit).read_text())
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                yield most - int((folder / usage).read_text()) + int(stat.get(cache, 0))
