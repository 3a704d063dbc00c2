"""`fa-cli run --debug`: the command line again under gdb, on a GPU under cuda-gdb, which stops in the first thread of each launch.

On the CPU the threads of a kernel are fibers of one OS thread. gdb needs no more than the debug build (backends/host/backend.py) and
kernels_cu/host/kernel.gdb: threadIdx and blockIdx are those of the thread that stopped, shared arrays are those of its block.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..backends import nvidia_driver
from ..check.choose import kernels
from ..check.request import Request
from ..fault import UsageFault
from ..kernel import KERNELS, Kernel
from .printing import note

SCRIPT = KERNELS / "host" / "kernel.gdb"


def debug(arguments: Sequence[str], computes: Sequence[str], mode: str, device: str, as_json: bool, watch: bool) -> None:
    """Become the debugger of a command line (a `run`) on a terminal that has one; else say its command, and the run goes on without.

    Under a debugger it does nothing. Raises UsageFault for more than one kernel, for a peer and for --watch.
    """
    if watch:
        raise UsageFault("--debug and --watch together", "a debugger holds the run that a save would end", "leave out --watch")
    files, _ = kernels(Request(computes, mode))
    if len(names := list(dict.fromkeys(kernel.name for kernel in files))) > 1:
        why = f"a debugger steps through one; here are {', '.join(names)}"
        raise UsageFault(f"--debug and {len(names)} kernels", why, f"fa-cli run {shlex.quote(computes[0])} --debug")
    if traced():
        return
    words = command(arguments, files, device.startswith("cuda") or (device == "auto" and nvidia_driver()))
    note(f"step through it: {shlex.join(words)}")
    if shutil.which(words[0]) and sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        sys.stdout.flush()
        os.execvp(words[0], words)


def command(arguments: Sequence[str], files: Sequence[Kernel], gpu: bool) -> list[str]:
    """The debugger's command line: it runs a Python command line up to the first thread of each launch of some kernels."""
    words = ["cuda-gdb", "-q", "-ex", "set breakpoint pending on"] if gpu else ["gdb", "-q", "-ix", str(SCRIPT)]
    for kernel in files:
        for entry in kernel.entries:  # a temporary breakpoint: all threads would stop at another
            for path in kernel.files:
                words += ["-ex", f"tbreak {path.name}:{entry}"]
    return [*words, "-ex", "run", "--args", sys.executable, *arguments]


def traced() -> bool:
    """Whether a debugger runs this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no Linux
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
