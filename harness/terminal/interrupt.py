"""Ctrl-C: the command ends with 130 and without a traceback, from its first instruction to its last.

Three handlers follow one another. While the command line is imported, and again after the verb has returned, SIGINT ends the process
at once: there is nothing to clean up. In between it raises KeyboardInterrupt, so that temporary files and child processes are removed.
Libraries drop a KeyboardInterrupt that reaches them while they are imported (an optional import in try/except, a callback of the garbage
collector). So a signal inside an import ends the process at once too, and one that was dropped elsewhere makes the exit code 130.
"""

from __future__ import annotations

# The C module: `signal` itself imports enum, 5 ms in which Ctrl-C would still be a traceback.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False  # as typing has it, which takes 8 ms to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

CODE = 130
#: In the environment of a run that `run --watch` watches: the file in which it tells what it found. Ctrl-C is the watch's, and no error.
WATCHED = "FA_CLI_WATCHED"
#: What the code of the import system says its file is.
_IMPORT = "<frozen importlib._bootstrap>"

_seen = False


def leave(_number: int = 0, _frame: FrameType | None = None) -> None:
    """End the process at once with 130. What was printed is flushed where the stream allows it."""
    try:
        if WATCHED not in os.environ:
            os.write(2, b"error: interrupted\n")
        sys.stdout.flush()
    finally:  # also where a pipe is closed, or the signal interrupted a write
        os._exit(CODE)


def at_once() -> None:
    """From here on SIGINT ends the process at once; where it is ignored (nohup) or another program's to handle, nothing changes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def wanted() -> None:
    """The Ctrl-C that came is how the verb ends: its exit code stands."""
    global _seen
    _seen = False


def command(main: Callable[[], object]) -> None:
    """Run the command line, which ends in SystemExit, under the rules above. :func:`at_once` came before."""
    if signal.getsignal(signal.SIGINT) is not leave:
        main()
        return
    try:
        try:
            signal.signal(signal.SIGINT, _interrupt)
            main()
        finally:
            signal.signal(signal.SIGINT, leave)
    except KeyboardInterrupt:
        leave()
    except SystemExit as end:
        if _seen and end.code != CODE:
            leave()
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    at = frame
    while at is not None:
        if at.f_code.co_filename == _IMPORT:
            leave()
        at = at.f_back
    raise KeyboardInterrupt
