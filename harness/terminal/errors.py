"""What is said on stderr: errors, with their exit codes, and notes."""

from __future__ import annotations

import os
import re
from contextlib import suppress

import click

from ..fault import DiskFault, Fault, UsageFault, printable
from .progress import clear

#: Letters of a line of a message at most: a compiler's command line fits.
LINE = 4000
#: Lines of a reason at most, without -v: a compiler reports one mistake many times.
LINES = 12


def complain(what: str, why: str = "", hint: str = "", code: int = 1) -> int:
    """Print the lines of an error on stderr and return its exit code."""
    clear()
    with suppress(BrokenPipeError):
        for label, text in (("error: ", what), ("", why), ("hint: ", hint)):
            if text:
                click.echo(label + shown(text), err=True)
    return code


def shown(text: str) -> str:
    """Text as a terminal may have it: what a file's name or content could do to it is escaped, and a line is cut at LINE letters.

    A file below the current folder is named as seen from there.
    """
    with suppress(OSError):  # the folder is gone
        if (here := os.getcwd()) != "/":
            text = re.sub(rf"(?<![\w./-]){re.escape(here)}/(?=\w)", "", text)
    lines = (line if len(line) <= LINE else f"{line[: LINE - 40]} … ({len(line) - LINE + 40} more)" for line in printable(text).split("\n"))
    return "\n".join(lines)


def brief(text: str, verbosity: int) -> str:
    """The first LINES lines of a text and its hint; all lines with -v."""
    body, hint, advice = text.partition("\nhint: ")
    lines = body.split("\n")
    if verbosity > 0 or len(lines) <= LINES:
        return text
    return "\n".join([*lines[:LINES], f"… {len(lines) - LINES} more lines: -v prints them"]) + hint + advice


def explain(error: Exception, verbosity: int) -> int:
    """Print what a verb raised as a message, with a traceback only from -vv on. Returns the exit code."""
    if verbosity >= 2:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, Fault):
        if verbosity > 0 and error.more:
            return complain(error.what, f"{error.why}\n{error.more}", error.hint, error.exit_code)
        hint = error.hint or "the same command with -v also prints the compiler's command" * bool(error.more)
        return complain(error.what, brief(error.why, verbosity) if error.more else error.why, hint, error.exit_code)
    if isinstance(error, FileNotFoundError) and not error.filename:  # os.getcwd's
        why = "it was removed since the shell went there"
        return complain("the working folder is gone", why, "cd to a folder that exists", DiskFault.exit_code)
    if isinstance(error, OSError) and error.errno:  # a disk fault that no module names; without a file name it is stdout's
        what = f"{error.filename or 'output'}: {error.strerror}"
        return complain(what, "", "see the folder's permissions and free space: df -h .", DiskFault.exit_code)
    if isinstance(error, MemoryError):
        return complain("out of memory", str(error), "use a smaller --batch, --heads or --seq", UsageFault.exit_code)
    return complain(f"internal error: {type(error).__name__}: {error}", "a fault of fa-cli, not of your input", "the same command with -vv")


def note(text: str) -> None:
    """A remark on a choice, on stderr."""
    clear()
    click.echo(f"note: {shown(text)}", err=True)
