"""The files of named tensors in masks and scores: arrays of numpy, and the borders of packed documents."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ..array import Array
from ..fault import DataFault, clipped
from ..files import read_exact, read_text
from ..problem import Problem

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
    """A problem whose named tensors have values, drawn ones where it has none: numbers of documents in a mask, normal ones in a score."""
    values = dict[str, object]()
    for each in problem.tensors:
        draw = np.random.default_rng(sum(map(ord, each.name)))
        numbers = np.sort(draw.integers(0, 4, each.shape), axis=-1) if each.dtype == "int32" else draw.standard_normal(each.shape)
        values[each.name] = numbers if each.values is None else each
    return problem.with_(tensors=values) if values else problem


def documents(path: Path, problem: Problem) -> Array:
    """The document of each position, (batch, seq) int32, of a text with a line of borders a batch, or one line for all: 0 512 … seq.

    Raises DataFault where the lines are not that, UsageFault as :func:`of_borders` does.
    """
    return packed(read_text(path, f"write it: 0 … {problem.seq_kv} with the borders between", _LIMIT), problem, str(path))


def packed(text: str, problem: Problem, what: str) -> Array:
    """The same of a text. what: where it is from, for messages."""
    lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    hint = f"a line is 0 … {problem.seq_kv}, rising, as cu_seqlens of flash_attn_varlen_func; one line, or one for each batch"
    if len(lines) not in (1, problem.batch):
        raise DataFault(f"{what} has {len(lines)} lines", f"the batch is {problem.batch}", hint)
    found = np.empty((problem.batch, problem.seq_kv), np.int32)
    for batch in range(problem.batch):
        words = lines[batch % len(lines)]
        borders = [int(word) for word in words if word.isdecimal() and len(word) < 12]
        rises = all(a < b for a, b in zip(borders, borders[1:], strict=False))
        if len(borders) != len(words) or not rises or (borders[0], borders[-1]) != (0, problem.seq_kv):
            falls = next((f"{b} does not rise from {a}" for a, b in zip(borders, borders[1:], strict=False) if a >= b), "")
            odd = next((f"{clipped(word, 20)!r} is no integer" for word in words if not (word.isdecimal() and len(word) < 12)), "")
            why = odd or falls or f"it goes from {borders[0]} to {borders[-1]}, not from 0 to {problem.seq_kv}"
            raise DataFault(f"{what}, line {batch % len(lines) + 1} has no borders of {problem.seq_kv} positions", why, hint)
        found[batch] = np.searchsorted(borders, np.arange(problem.seq_kv), side="right") - 1
    return found
