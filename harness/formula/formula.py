"""A parsed mask or score, and what is made of its tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cpp import cpp
from .derivative import derivative
from .folded import folded, unscaled
from .tree import Call, Name, Node, Number, Tensor, integer, most, walk
from .value import Values, value


@dataclass(frozen=True)
class Formula:
    """A parsed mask or score. text: as messages, names and files have it; equal formulas that are spaced otherwise have one text."""

    kind: str
    text: str
    tree: Node

    @property
    def names(self) -> frozenset[str]:
        """Of s and the integers, those that it names: a mask of q and k alone is the same for every batch and head."""
        indices = (index for node in walk(self.tree) if isinstance(node, Tensor) for index in node.indices)
        return frozenset(node.name for node in walk(self.tree) if isinstance(node, Name)).union(indices)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, each with the names that index it, in order."""
        return tuple(dict.fromkeys(node for node in walk(self.tree) if isinstance(node, Tensor)))

    def below(self, limit: int, sizes: Mapping[str, int]) -> bool:
        """Whether every integer in it has a magnitude below a limit, where those of its names are those of `sizes`, and every row of its
        tensors fits 32 bits."""
        integers = (node for node in walk(self.tree) if integer(node))
        rows = (math.prod(sizes[index] for index in tensor.indices[:-1]) for tensor in self.tensors)
        return all(most(node, sizes) < limit for node in integers) and all(row < 2**31 for row in rows)

    def value(self, xp: Any, names: Mapping[str, Values], real: str = "float64", tensors: Mapping[str, Values] | None = None) -> Values:
        """Its values for arrays that broadcast. real: the type of real numbers; functions are those of float64, rounded once."""
        return value(self.tree, xp, names, real, tensors or {})

    def derivative(self) -> Formula:
        """The derivative of a score by s. At a kink, of abs, min, max and A if C else B, it is that of the side which the value is of."""
        return Formula(self.kind, f"d({self.text})/ds", derivative(self.tree))

    def folded(self, causal: bool = False) -> Formula:
        """A score in units of log2 of s / scale, for a loop over pairs: what is the same for all pairs of a head is one factor."""
        return Formula(self.kind, f"({self.text})/ln2", folded(self.tree, causal))

    def unscaled(self, causal: bool = False) -> Formula:
        """The derivative of a score, of s / scale, for the same loop."""
        return Formula(self.kind, self.text, unscaled(self.tree, causal))

    def calls(self, function: str) -> bool:
        """Whether its text has a call of a function."""
        return any(isinstance(node, Call) and node.function == function for node in walk(self.tree))

    def softcap_log2(self) -> float:
        """The bound, in units of log2, of a score that is a number times tanh of a multiple of s; 0.0 of another."""
        match folded(self.tree, False):
            case Call("tanh", (_, Name("s"), Number(factor))) if self.names == {"s"}:
                return abs(float(factor))
        return 0.0

    def cpp(self) -> str:
        """C++ without spaces, of fa/score.cuh's words: R is the type of real numbers."""
        return cpp(self.tree)
