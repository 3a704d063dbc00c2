"""What is wrong with a text. This room imports nothing of ours; `told` of problem.py makes a UsageFault of it."""

from __future__ import annotations

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
#: The least above 0 that is not flushed to 0: kernels are compiled with -ftz=true.
FLOAT32_MIN = 2.0**-126


class Mistake(Exception):
    """A text that is no mask or score: what, why, and a hint."""

    def __init__(self, what: str, why: str, hint: str) -> None:
        super().__init__(f"{what}\n{why}")
        self.what, self.why, self.hint = what, why, hint


def clipped(text: str, most: int) -> str:
    """A text of at most `most` characters."""
    return text if len(text) <= most else f"{text[:most]}…"
