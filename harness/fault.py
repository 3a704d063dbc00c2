"""Why a command ends: what happened, why, and a hint. Each kind has its exit code (README, "Exit codes"). Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterable


class Fault(Exception):
    """A reason to stop, in three parts a user can act on: what happened, why, and a hint (a command where there is one)."""

    exit_code = 1
    #: What only -v prints: a compiler's command line.
    more = ""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.hint = what, why, hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(self.why)
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the attributes, not the arguments of __init__: subclasses take other arguments."""
        return Fault.__new__, (type(self), self.what), self.__dict__


class UsageFault(Fault):
    """Asked for what does not exist or is not supported: unknown kernel, head dim, dtype, empty sequence, too large."""

    exit_code = 2


class DataFault(Fault):
    """The data is not what its record says: missing, short, long, not a regular file, another dtype, another hash, NaN."""

    exit_code = 3


class EnvironmentFault(Fault):
    """This machine lacks something: a GPU, an optional package, a compiler."""

    exit_code = 4


class KernelFault(Fault):
    """A kernel did not compile, did not launch, deadlocked or raced."""

    exit_code = 5


class DiskFault(Fault):
    """The disk is full, the folder is read-only, or another run holds it."""

    exit_code = 6


class Dropped(UserWarning):
    """Says what was left out: of a table or record that an interrupted write had torn, or a figure that could not be drawn."""


def printable(text: str) -> str:
    """A text of a file's or a user's as a terminal or a page may have it: what is neither printed nor a line break or tab is escaped.

    Escape sequences set colours and titles of a terminal; U+202E turns the rest of a line round.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def clipped(text: str, most: int = 300) -> str:
    """A text of a user's, of at most `most` characters: a message is read, so it must not be as long as a file."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """The known name that is most like an unknown one; empty where none is. least: the part of their letters that they share."""
    import difflib  # only a mistake needs it

    return next(iter(difflib.get_close_matches(name, list(known), 1, least) if len(name) <= 80 else ()), "")


def meant(name: str, known: Iterable[str]) -> str:
    """The start of a hint for an unknown name: the one that it is nearest to, as a question; empty where it is near none."""
    return f"did you mean {near}? " if (near := nearest(name, known)) else ""


def install_extra(name: str) -> str:
    """The hint that installs an optional dependency group of this package. No index has the package: its source is a path."""
    return f"pip install -e '.[{name}]' in a checkout, or 'FILE.whl[{name}]'"
