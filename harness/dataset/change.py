"""Inputs that are new although their answer is known: by the symmetries of attention, exact in every storage type.

Batches and key heads, with their query heads, may change places. A column of V, with that of O and dO, may change its sign, and then that
of O and dV does; a column of Q and K together, and then that of dQ and dK does, and no score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule
from ..problem import DSINKS, Problem

#: Tensors whose columns change their sign with V's, and those with Q's and K's.
SIGNS = {"V": "values", "O": "values", "dO": "values", "dV": "values", "Q": "scores", "K": "scores", "dQ": "scores", "dK": "scores"}


def _columns(problem: Problem) -> dict[str, tuple[int, int, int]]:
    """The columns of each key head whose signs may change: (batch, heads_kv, columns)."""
    sizes = {"values": problem.head_dim_v, "scores": problem.head_dim}
    return {name: (problem.batch, problem.heads_kv, size) for name, size in sizes.items()}


@dataclass(frozen=True)
class Change:
    """Inputs as they are in the buffers: batch b and key head h are the original's batches[b] and heads[h], with the columns negated
    where signs["values"], bool (batch, heads_kv, head_dim_v), and signs["scores"], (batch, heads_kv, head_dim), are set."""

    batches: Array
    heads: Array
    signs: Mapping[str, Array]

    @classmethod
    def none(cls, problem: Problem) -> Change:
        """The original."""
        signs = {name: np.zeros(shape, bool) for name, shape in _columns(problem).items()}
        return cls(np.arange(problem.batch), np.arange(problem.heads_kv), signs)

    @classmethod
    def drawn(cls, problem: Problem) -> Change:
        """A new one: in every head at least one column of each kind changes its sign.

        Batches and heads stay in their places where the problem's mask or score is not the same for all of them, or there are sinks.
        """
        draw = np.random.default_rng()
        signs = {}
        for name, shape in _columns(problem).items():
            signs[name] = draw.random(shape) < 0.5
            np.put_along_axis(signs[name], draw.integers(0, shape[2], (*shape[:2], 1)), True, axis=-1)
        batches, heads = (
            np.arange(n) if problem.sinks is not None or problem.depends_on(*names) else draw.permutation(n)
            for n, names in ((problem.batch, ("b",)), (problem.heads_kv, ("h", "h_kv")))
        )
        return cls(batches, heads, signs)

    @classmethod
    def of_values(cls, problem: Problem, draw: np.random.Generator | None = None) -> Change:
        """In every head one column of V (and with it that of O and dO) changes its sign, and nothing else."""
        change = cls.none(problem)
        signs = change.signs["values"]
        np.put_along_axis(signs, (draw or np.random.default_rng()).integers(0, signs.shape[2], (*signs.shape[:2], 1)), True, axis=-1)
        return change

    def after(self, before: Change) -> Change:
        """Both as one, this one applied last."""
        place = np.ix_(self.batches, self.heads)
        signs = {name: before.signs[name][place] ^ mask for name, mask in self.signs.items()}
        return Change(before.batches[self.batches], before.heads[self.heads], signs)

    def back(self) -> Change:
        """The change that undoes this one."""
        batches, heads = np.argsort(self.batches), np.argsort(self.heads)
        return Change(batches, heads, {name: mask[np.ix_(batches, heads)] for name, mask in self.signs.items()})

    def of(self, xp: ArrayModule, name: str, bits: Array) -> Array:
        """A tensor changed: its elements' bits, unsigned integers (batch, heads, rows[, head_dim]), in a new array.

        dsinks stays as it is: it sums over batches, which stay in their places where there are sinks, as heads do.
        """
        if name == DSINKS:
            return bits.copy()
        group = bits.shape[1] // len(self.heads)
        heads = (self.heads[:, None] * group + np.arange(group)).reshape(-1)
        places = (self.batches[:, None] * bits.shape[1] + heads).reshape(-1)  # one index: CuPy compiles four kernels for two of them
        moved: Array = bits.reshape(-1, *bits.shape[2:])[xp.asarray(places)].reshape(bits.shape)
        if name in SIGNS:
            mask = np.repeat(self.signs[SIGNS[name]], group, axis=1)[:, :, None, :]
            moved ^= xp.asarray(mask.astype(bits.dtype) << np.array(8 * bits.dtype.itemsize - 1, bits.dtype))
        return moved
