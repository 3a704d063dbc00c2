"""The derivative of a tree by s, by rules on its nodes."""

from __future__ import annotations

from .tree import Binary, Call, Choice, Compare, Minus, Name, Node, Number

_LN2 = 0.6931471805599453
_ZERO, _ONE = Number(0.0), Number(1.0)


def derivative(node: Node) -> Node:
    """The derivative of a real node by s. What does not name s is a constant: integers, tensors and truth values never do."""
    match node:
        case Name("s"):
            return _ONE
        case Minus(of):
            return _minus(derivative(of))
        case Binary("+" | "-" as op, left, right):
            return _sum(op, derivative(left), derivative(right))
        case Binary("*", left, right):
            return _sum("+", _times(derivative(left), right), _times(left, derivative(right)))
        case Binary("/", left, right):
            of_left = _over(derivative(left), right)
            return _sum("-", of_left, _times(Binary("/", node, right), derivative(right)))
        case Choice(test, body, other):
            return _either(test, derivative(body), derivative(other))
        case Call("exp", (of,)):
            return _times(node, derivative(of))
        case Call("exp2", (of,)):
            return _times(_times(Number(_LN2), node), derivative(of))
        case Call("tanh", (of,)):
            return _times(Binary("-", _ONE, Binary("*", node, node)), derivative(of))
        case Call("abs", (of,)):
            inner = derivative(of)
            return inner if inner == _ZERO else _either(Compare(">=", of, _ZERO), inner, _minus(inner))
        case Call("min" | "max" as function, (one, two)):
            return _either(Compare("<=" if function == "min" else ">=", one, two), derivative(one), derivative(two))
    return _ZERO


def _minus(of: Node) -> Node:
    return of if of == _ZERO else Minus(of)


def _sum(op: str, one: Node, two: Node) -> Node:
    if two == _ZERO:
        return one
    if one == _ZERO:
        return two if op == "+" else Minus(two)
    return Binary(op, one, two)


def _times(one: Node, two: Node) -> Node:
    if _ZERO in (one, two):
        return _ZERO
    return two if one == _ONE else one if two == _ONE else Binary("*", one, two)


def _over(one: Node, two: Node) -> Node:
    return one if one == _ZERO else Binary("/", one, two)


def _either(test: Node, one: Node, two: Node) -> Node:
    return one if one == two else Choice(test, one, two)
