"""The values of a tree, with numpy or CuPy: what the float64 reference and the baselines compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tree import REAL, Binary, Call, Choice, Compare, Logic, Minus, Name, Node, Not, Number, Real, Tensor

#: Arrays or numbers of numpy or cupy.
Values = Any

OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def value(node: Node, xp: Any, names: Mapping[str, Values], real: str, tensors: Mapping[str, Values]) -> Values:
    def of(node: Node) -> Values:
        return value(node, xp, names, real, tensors)

    match node:
        case Number(number):
            return xp.asarray(number, dtype=real if isinstance(number, float) else "int64")
        case Name(name):
            return xp.asarray(names[name]).astype(real if name == "s" else "int64", copy=False)
        case Tensor(name, indices, integer):
            at = tuple(names[f"{index}_row" if index == "q" else index] for index in indices)
            return tensors[name][at].astype("int64" if integer else real, copy=False)
        case Real(inner):
            return of(inner).astype(real)
        case Minus(inner):
            return -of(inner)
        case Not(inner):
            return ~of(inner)
        case Choice(test, body, other):
            return xp.where(of(test), of(body), of(other))
        case Binary(op, left, right):
            return OPERATIONS[op](of(left), of(right))
        case Compare(op, left, right):
            return OPERATIONS[op](of(left), of(right))
        case Logic(op, left, right):
            return of(left) & of(right) if op == "and" else of(left) | of(right)
        case Call(function, (one,)) if function in REAL:
            return getattr(xp, function)(of(one).astype("float64", copy=False)).astype(real, copy=False)
        case Call("abs", (one,)):
            return xp.abs(of(one))
        case Call(function, (one, two)):
            return (xp.minimum if function == "min" else xp.maximum)(of(one), of(two))
    raise AssertionError(node)
