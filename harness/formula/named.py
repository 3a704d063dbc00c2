"""Masks and scores by name, and several of them as one text."""

from __future__ import annotations

import math
from functools import lru_cache

from .mistake import Mistake
from .parse import parsed
from .tree import Binary, Compare, Logic, Minus, Name, Node, Number

#: The name of the tensor of :func:`packed`.
DOCUMENT = "doc"
#: The name of the tensor of sinks.
SINKS = "sinks"


def windowed(left: int, right: int = 0) -> str:
    """The mask of a sliding window: a query sees itself, the `left` keys before it and the `right` keys after it.

    Raises Mistake where one of them is negative: -1, which is flash-attn's word for a side without a limit, would hide every key.
    """
    if min(left, right) < 0:
        why = "a window has 0 or more keys on each side; -1, no limit in flash-attn, has another word here"
        raise Mistake(f"window is {left}, {right}", why, 'leave it out for no limit; a mask "q - k <= 128" limits the left side alone')
    return f"{-right} <= q - k <= {left}"


def as_window(text: str | None) -> tuple[int, int] | None:
    """Left and right of a mask that is a window, however it is written; None where it is none, or there is no mask."""
    left, right = _sides(text) or (None, None) if text is not None else (None, None)
    return None if left is None or right is None else (left, right)


def as_border(text: str, causal: bool) -> int | None:
    """How many keys before its own a query sees, where this mask, with the causal one if that holds too, says no more; None where it does."""
    left, right = _sides(text) or (None, None)
    return left if causal or right == 0 else None


def is_causal(text: str) -> bool:
    """Whether a mask says what the causal one says."""
    return _sides(text) == (None, 0)


@lru_cache(maxsize=256)
def _sides(text: str) -> tuple[int | None, int | None] | None:
    """How many keys a query sees before its own and behind it, None: all of them; None where the mask says more, or hides a query's own."""
    sides: list[list[int]] = [[], []]
    waiting = [parsed("mask", text).tree]
    while waiting:
        match waiting.pop():
            case Logic("and", one, other):
                waiting += [one, other]
            case Compare("<" | "<=" | ">" | ">=" as op, one, other) if apart := _apart(one, other):
                times, more = (-apart[0], -apart[1]) if op[0] == ">" else apart  # times * (q - k) + more is below 0, or 0
                sides[times < 0].append(-more - (len(op) == 1))
            case _:
                return None
    left, right = (min(side, default=None) for side in sides)
    return None if min(left or 0, right or 0) < 0 else (left, right)


def _apart(left: Node, right: Node) -> tuple[int, int] | None:
    """a and c, where left - right is a * (q - k) + c and a is 1 or -1."""
    of_q, of_k, more = (mine - its for mine, its in zip(_terms(left), _terms(right), strict=True))
    return (int(of_q), int(more)) if abs(of_q) == 1 and of_q + of_k == 0 else None


def _terms(node: Node) -> tuple[float, float, float]:
    """How often q and k are in a sum, and what is added; NaN where it is another."""
    match node:
        case Number(int() as value):
            return 0, 0, value
        case Name("q" | "k" as name):
            return name == "q", name == "k", 0
        case Minus(of):
            q, k, more = _terms(of)
            return -q, -k, -more
        case Binary("+" | "-" as op, left, right):
            sign = 1 if op == "+" else -1
            q, k, more = (mine + sign * its for mine, its in zip(_terms(left), _terms(right), strict=True))
            return q, k, more
    return math.nan, math.nan, math.nan


def as_softcap(text: str) -> float | None:
    """What :func:`capped` made a score of; None where it did not."""
    cap = text.partition(" ")[0]
    try:
        return float(cap) if text == capped(float(cap)) else None
    except (ValueError, Mistake):
        return None


def prefixed(length: int) -> str:
    """The mask of a prefix language model: every query sees the first `length` keys, and those up to itself."""
    return f"k <= q or k < {length}"


def packed() -> str:
    """The mask of packed documents: a query sees the keys of its own. doc[b, i] is the number of the document that position i is of."""
    return f"{DOCUMENT}[b, q] == {DOCUMENT}[b, k]"


def capped(cap: float) -> str:
    """The score that stays between -cap and cap. Raises Mistake for a cap that is none, or so near to 0 or float32's end that s / cap is."""
    if not 1e-30 <= cap <= 1e30:
        raise Mistake(f"softcap is {cap:g}", "the largest score is a number above 0, from 1e-30 to 1e+30", "use --softcap 50")
    return f"{float(cap)!r} * tanh(s / {float(cap)!r})"


def biased(heads: int) -> str:
    """The score of ALiBi (Press et al. 2022, arXiv 2108.12409): the slopes of n heads, a power of two, are 2^(-8 i / n), i from 1 to n.

    Of another number of heads the first n are those of the largest power of two below, the others every second one of the next.
    """
    whole = 2 ** int(math.log2(heads))
    slope = f"exp2({-8 / whole!r} * (h + 1))"
    if whole < heads:
        slope = f"({slope} if h < {whole} else exp2({-4 / whole!r} * (2 * (h - {whole}) + 1)))"
    return f"s - {slope} * abs(q - k)"


def stated(
    heads: int,
    *,
    mask: str | None = None,
    score: str | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    prefix: int | None = None,
    documents: bool = False,
) -> dict[str, str]:
    """The texts `mask` and `score` of what a caller states, without those that he does not. heads: of the queries. Masks hold together.

    Raises Mistake for a text that is none and for two scores.
    """
    stated_scores = [name for name, given in (("score", score), ("softcap", softcap), ("alibi", alibi or None)) if given is not None]
    if len(stated_scores) > 1:
        raise Mistake(f"{' and '.join(stated_scores)} are {len(stated_scores)} scores", "which comes first?", "write one --score of them")
    scores = [] if score is None else [score]
    masks = [] if mask is None else [parsed("mask", mask).text]  # a column is that of this text, not of all together
    masks += [] if window is None else [windowed(*window)]
    masks += [] if prefix is None else [prefixed(prefix)]
    masks += [packed()] * documents
    scores += [] if softcap is None else [capped(softcap)]
    scores += [biased(heads)] * alibi
    found = {"mask": " and ".join(f"({each})" for each in masks) if len(masks) > 1 else "".join(masks), "score": "".join(scores)}
    return {name: text for name, text in found.items() if text}
