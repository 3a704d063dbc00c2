"""A score as a tensor-core kernel computes it: from q·k instead of s, in units of log2, with as few operations a pair as may be."""

from __future__ import annotations

from .tree import Binary, Call, Choice, Compare, Logic, Minus, Name, Node, Not, Number, Real, Tensor, integer, walk

_LOG2E = Number(1.4426950408889634)
#: A constant is folded with another where their product is an ordinary number of float32.
_LEAST, _MOST = 2.0**-100, 2.0**100


def folded(node: Node, causal: bool) -> Node:
    """log2(e) times a score of s = scale * q·k, where s is q·k and `scale` a name.

    Factors that are the same for all pairs of a head are multiplied first, so that a compiler takes them out of its loop. causal: hidden
    pairs have no score, so abs(q - k) is q - k. tanh has three arguments, as fa::QuickTanh: factor * tanh(slope * x) is
    tanh(slope, x, factor).
    """
    return _times(_LOG2E, node, causal)


def unscaled(node: Node, causal: bool) -> Node:
    """The same real number where s is q·k and `scale` a name. What it has of s in common with `folded` of its score has the same form."""
    return _times(None, node, causal)


def _times(factor: Node | None, node: Node, causal: bool) -> Node:
    """A real node times a factor that is the same for all pairs of a head."""

    def times(factor: Node | None, node: Node) -> Node:
        return _times(factor, node, causal)

    match node:
        case Binary("+" | "-" as op, left, right):
            return Binary(op, times(factor, left), times(factor, right))
        case Minus(of):
            return Minus(times(factor, of))
        case Choice(test, body, other):
            return Choice(_inside(test, causal), times(factor, body), times(factor, other))
        case Binary("*", left, right) if (both := _product(factor, left)) is not None:
            return times(both, right)
        case Binary("*", left, right) if (both := _product(factor, right)) is not None:
            return times(both, left)
        case Binary("/", left, Number(float() as value)) if (both := _product(factor, _inverse(value))) is not None:
            return times(both, left)
        case Call("tanh", (of,)):
            inner, whole = times(None, of), Number(1.0) if factor is None else factor
            if isinstance(inner, Binary) and inner.op == "*" and _product(None, inner.left) is not None:
                return Call("tanh", (inner.left, inner.right, whole))
            return Call("tanh", (Number(1.0), inner, whole))
        case Name("s"):
            scale = Name("scale")
            return Binary("*", scale if factor is None else Binary("*", factor, scale), node)
    inner = _inside(node, causal)
    return inner if factor is None else Binary("*", factor, inner)


def _inside(node: Node, causal: bool) -> Node:
    """A node that takes no factor, with those below it."""

    def inside(node: Node) -> Node:
        return _inside(node, causal)

    def number(node: Node) -> Node:
        return inside(node) if integer(node) else _times(None, node, causal)

    match node:
        case Call("abs", (Binary("-", Name("q" | "k") as one, Name("q" | "k") as two),)) if causal and one != two:
            return Binary("-", Name("q"), Name("k"))
        case Call(function, arguments):
            return Call(function, tuple(number(each) for each in arguments))
        case Compare(op, left, right):
            return Compare(op, number(left), number(right))
        case Logic(op, left, right):
            return Logic(op, inside(left), inside(right))
        case Not(of):
            return Not(inside(of))
        case Real(of):
            return Real(inside(of))
        case Binary(op, left, right) if not integer(node):
            return Binary(op, number(left), number(right))
    return node


def _inverse(value: float) -> Number:
    return Number(1 / value if _LEAST < abs(value) < _MOST else 0.0)


def _product(factor: Node | None, other: Node) -> Node | None:
    """The product of a factor and a node, where that is one: the same for all pairs of a head."""
    for each in walk(other):
        if isinstance(each, Name) and each.name in ("s", "q", "k"):
            return None
        if isinstance(each, Tensor) and not {"q", "k"}.isdisjoint(each.indices):
            return None
    if isinstance(other, Number) and isinstance(factor, Number | None):
        product = float(other.value) * (1.0 if factor is None else float(factor.value))
        return Number(product) if _LEAST < abs(product) < _MOST else None
    if factor is None:
        return other
    return Binary("*", factor, other)
