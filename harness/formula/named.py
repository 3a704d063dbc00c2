"""Masks and scores by name: --window, --softcap."""

from __future__ import annotations

from .mistake import FLOAT32_MAX, Mistake


def window(left: int, right: int = 0) -> str:
    """The mask of a sliding window: a query sees itself, the `left` keys before it and the `right` keys after it."""
    return f"{-right} <= q - k <= {left}"


def softcap(cap: float) -> str:
    """The score that stays between -cap and cap. Raises Mistake where cap is not above 0."""
    if not 0 < cap <= FLOAT32_MAX:
        raise Mistake(f"softcap is {cap:g}", "the largest score is a finite number above 0", "use --softcap 50")
    return f"{float(cap)!r} * tanh(s / {float(cap)!r})"
