"""The standard streams: all three are open, their encoding never ends a verb, and a reader of stdout that goes away is an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

#: The exit code where the reader of stdout is gone (fa-cli list | head -1): the shell's for SIGPIPE. No verdict was delivered, so not 0.
CLOSED_PIPE = 141


def prepare() -> None:
    """Open what was closed (fa-cli run 2>&-) as /dev/null, and escape letters that an encoding lacks.

    Python has None for a closed stream. Its number would be the next file's, and what a compiler, a kernel or Ctrl-C says would go there.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or os.fdopen(0), sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def open_pipe() -> Iterator[None]:
    """Exit code CLOSED_PIPE where the reader of stdout goes away; click and rich would say 1."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(CLOSED_PIPE) from None
    except SystemExit as end:  # rich's
        raise click.exceptions.Exit(CLOSED_PIPE) if isinstance(end.__context__, BrokenPipeError) else end from None


def flushed() -> int:
    """Flush stdout; CLOSED_PIPE where its reader is gone. Raises OSError where it cannot be written.

    Then stdout is /dev/null: Python would flush again at its end, complain, and exit with a code of its own.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
        return CLOSED_PIPE
    return 0
