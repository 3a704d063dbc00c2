"""Programs that a test writes and a command starts by name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def write(path: Path, text: str) -> Path:
    """A program in Python at a path. The shell starts it: a first line of the kernel's has no room for a Python in a path with a space."""
    path.write_text(f"#!/bin/sh\n''':'\nexec {shlex.quote(sys.executable)} \"$0\" \"$@\"\n'''\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return path
