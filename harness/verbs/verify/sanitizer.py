"""verify under compute-sanitizer: the same command in a child process that the tool watches, without CuPy's memory pool.

In the pool most accesses out of bounds hit another tensor. The reference is computed on the CPU, so the tool sees the kernels under
test, and CuPy's fills and copies.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...backends import nvidia_driver
from ...fault import EnvironmentFault, KernelFault, UsageFault
from ...files import child

#: Set in the child process.
CHILD = "FA_CLI_SANITIZER_CHILD"
#: The tool's exit code where it has found something.
_FOUND = 99


def sanitizer_child_needed() -> bool:
    """Whether this process must start itself again under the tool."""
    return not os.environ.get(CHILD)


def run_under_sanitizer(tool: str, device: str, arguments: Sequence[str]) -> int:
    """Run a Python command line again under a tool of compute-sanitizer, and return its exit code; the tool's summary goes to stderr.

    Raises KernelFault, with what the tool says first, where it finds something; UsageFault on the CPU, EnvironmentFault without a GPU or
    without the tool.
    """
    if device == "cpu":
        raise UsageFault("--sanitizer watches a GPU", "--device is cpu", "on the CPU: --check race, --check asan")
    if not nvidia_driver():
        raise EnvironmentFault("no GPU to watch", "compute-sanitizer reads an NVIDIA GPU", "on the CPU: --check race, --check asan")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program:
        hint = "install the CUDA toolkit, or put its bin folder on PATH"
        raise EnvironmentFault("compute-sanitizer is not on PATH", "it is a program of NVIDIA's, not a Python package", hint)
    with tempfile.TemporaryDirectory(prefix="fa_cli_") as folder:
        options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "all", "--log-file", f"{folder}/%p.log"]
        code, _ = child.again(arguments, {"FA_CLI_NO_POOL": "1", CHILD: tool}, wrapper=[program, *options])
        said = "\n".join(file.read_text(errors="replace") for file in sorted(Path(folder).glob("*.log")))
    if code == _FOUND:
        lines = [line.removeprefix("=========").strip() for line in said.splitlines()]
        first = next((i for i, line in enumerate(lines) if re.match(r"(Invalid|Error|Warning|Uninitialized|Barrier|Program hit)", line)), 0)
        raise KernelFault(f"{tool} found something", "\n".join(lines[first : first + 8]), "correct the line it names, and run this again")
    return code
