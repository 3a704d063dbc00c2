"""What is being done now, how far it is and how long it will still take: one line of stderr, where that is a terminal.

A verb is given a function of a text. The first N/M that stands alone in the text is how much is done of how much (others are left out):
it becomes a bar and, from how long the first N took, an estimate of the time that is left. The line is drawn when a text comes and by no
thread: a launch on the CPU is judged by the threads that it leaves. So a fork of this process may draw it too, and nothing must be put
right after a crash.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

#: Seconds before the first line is drawn, and between two lines of the same words.
AFTER, APART = 0.5, 0.1
#: Seconds between two lines where stderr is a file or a pipe: a job's log shows that it goes on.
SELDOM = 30.0
#: Columns of the bar.
BAR = 12
_DONE = re.compile(r"(?<!\S)(\d+)/(\d+)(?!\S) ?")
_CLEAR = "\r\x1b[2K"

_told = False  # in this process: a fork may have drawn the line


def teller(verbosity: int, seldom: bool = False) -> Callable[[str], None]:
    """A function that shows what is being done; it does nothing with -q and where stderr is no terminal. An empty text ends the line.

    seldom: where it is no terminal, a line every SELDOM seconds; for a verb that runs for minutes in somebody's log.
    """
    terminal = sys.stderr.isatty()
    return _Line(terminal).tell if verbosity >= 0 and (terminal or seldom) else lambda text: None


def clear() -> None:
    """Take the line away, before anything else is printed."""
    global _told
    if _told:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
        _told = False


class _Line:
    """What was told last, and when a count began: at another total, or where less is done than before."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._began = self._counted = self._last = time.monotonic()
        self._words, self._total, self._done = "", 0, 0

    def tell(self, text: str) -> None:
        global _told
        _told = self._terminal
        found = _DONE.search(text)
        done, total = (int(found[1]), int(found[2])) if found else (0, 0)
        words, now = _DONE.sub("", text).strip(), time.monotonic()
        if total != self._total or done < self._done:
            self._counted = now
        new = (words, total) != (self._words, self._total)
        self._words, self._total, self._done = words, total, done
        if not text:
            clear()
        elif not self._terminal:
            if now - self._last >= SELDOM:
                self._last = now
                sys.stderr.write(f"{self._text(now)}\n".lstrip())
                sys.stderr.flush()
        elif now - self._began >= AFTER and (new or now - self._last >= APART):
            self._last = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        from rich.console import Console  # rich takes 20 ms to load, and most commands end before
        from rich.progress_bar import ProgressBar

        console, text = Console(stderr=True, highlight=False), self._text(now)
        with console.capture() as captured:
            if self._total:
                console.print(ProgressBar(self._total, self._done, BAR), end="")
            room = console.width - 1 - (BAR if self._total else 0)
            console.out(text if len(text) <= room else f"{text[: room - 1]}…", end="")
        sys.stderr.write(_CLEAR + captured.get().replace("\n", ""))
        sys.stderr.flush()

    def _text(self, now: float) -> str:
        text = _clock(now - self._began)
        if self._total:
            left = (now - self._counted) * (self._total - self._done) / self._done if self._done else None
            text = f" {100 * self._done // self._total:3}% {text}" + (f", {_clock(left)} left" if left is not None else "")
        return text + "  " + "".join(letter if letter.isprintable() else "?" for letter in self._words)  # a file's name may hold any


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
