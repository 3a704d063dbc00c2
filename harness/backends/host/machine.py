"""The processor that stands in for a GPU: its name, and how many of its cores kernels may use."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from functools import cache
from pathlib import Path

from ...fault import UsageFault


def threads() -> int:
    """The cores to use: FA_CLI_THREADS, or all of this process's. Raises UsageFault where that is no count."""
    asked = os.environ.get("FA_CLI_THREADS") or str(len(os.sched_getaffinity(0)))
    if not asked.isdecimal() or int(asked) < 1:
        raise UsageFault(f"FA_CLI_THREADS is {asked!r}", "it is how many cores the CPU backend uses, 1 or more", "unset it to use all")
    return int(asked)


@cache
def processor() -> str:
    """Its model, as Linux names it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
    return platform.machine()
