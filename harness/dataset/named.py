"""The files of named tensors in masks and scores: arrays of numpy, and the borders of packed documents."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ..array import Array
from ..fault import DataFault
from ..files import read_exact, read_text
from ..problem import DESCALES, Problem

#: Bytes of the largest file that is read.
_LIMIT = 1 << 31


def read(path: Path) -> Array:
    """The array of a .npy file; never a pickle. Raises DataFault where it is none."""
    data = read_exact(path, hint="numpy.save writes one", limit=_LIMIT)
    try:
        found: Array = np.load(io.BytesIO(data.tobytes()), allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
    except (ValueError, EOFError, OSError, SyntaxError):
        pass
    raise DataFault(f"{path} is no array", "it is not a .npy file of numbers", "write it with numpy.save")


def drawn(problem: Problem) -> Problem:
    """A problem whose named tensors have values, drawn ones where it has none: numbers of documents in a mask, normal ones in a score,
    powers of two with them as exponents for what elements of 8 bits are worth."""
    values = dict[str, object]()
    for each in problem.tensors:
        draw = np.random.default_rng(sum(map(ord, each.name)))
        numbers = np.sort(draw.integers(0, 4, each.shape), axis=-1) if each.dtype == "int32" else draw.standard_normal(each.shape)
        if each.name in DESCALES.values():
            numbers = np.exp2(numbers)
        values[each.name] = numbers if each.values is None else each
    return problem.with_(tensors=values) if values else problem


def documents(path: Path, problem: Problem) -> Array:
    """The document of each position, (batch, seq) int32, of a text with a line of borders a batch, or one line for all: 0 512 … seq.

    Raises DataFault where the lines are not that, UsageFault as :func:`of_borders` does.
    """
    return packed(read_text(path, _borders(problem), _LIMIT), problem, str(path))


def packed(text: str, problem: Problem, what: str) -> Array:
    """The same of a text. what: where it is from, for messages."""
    lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    if len(lines) not in (1, problem.batch):
        raise DataFault(f"{what} has {len(lines)} lines", f"the batch is {problem.batch}", _borders(problem))
    found = np.empty((problem.batch, problem.seq_kv), np.int32)
    for batch in range(problem.batch):
        number = batch % len(lines)
        if why := _no_borders(lines[number], problem.seq_kv):
            raise DataFault(f"{what}, line {number + 1} has no borders of {problem.seq_kv} positions", why, _borders(problem))
        borders = list(map(int, lines[number]))
        found[batch] = np.searchsorted(borders, np.arange(problem.seq_kv), side="right") - 1
    return found


def _borders(problem: Problem) -> str:
    """The hint for a text that has no borders."""
    return f"a line is 0 … {problem.seq_kv}, rising, as cu_seqlens of flash_attn_varlen_func; one line, or one for each batch"


def _no_borders(words: list[str], end: int) -> str:
    """Why the words of a line are no borders of so many positions; empty where they are."""
    if odd := next((word for word in words if not (word.isdecimal() and len(word) < 12)), None):
        return f"{odd!r:.40} is not an integer of at least 0"
    borders = list(map(int, words))
    if fall := next(((a, b) for a, b in zip(borders, borders[1:], strict=False) if a >= b), None):
        return f"{fall[0]}, then {fall[1]} does not rise"
    if borders[0]:
        return f"it begins at {borders[0]}, not 0"
    return f"it ends at {borders[-1]}, not {end}" * (borders[-1] != end)
