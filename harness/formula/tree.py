"""The nodes of a parsed mask or score, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The integers of a pair (batch, query head, query, key; key head; lengths), with the largest magnitude of each.
INTEGERS = {"b": 2**31, "h": 2**31, "q": 2**32, "k": 2**31, "h_kv": 2**31, "seq_q": 2**31, "seq_kv": 2**31}
#: The only names that index a tensor, with the fields of Problem that are their numbers.
EXTENTS = {"b": "batch", "h": "heads_q", "h_kv": "heads_kv", "q": "seq_q", "k": "seq_kv"}
#: Names that are at least 1, so that they may divide.
POSITIVE = ("seq_q", "seq_kv")
#: Functions, with the number of their arguments; None: two or more. Those of REAL take and give real numbers.
FUNCTIONS: dict[str, int | None] = {"exp2": 1, "exp": 1, "tanh": 1, "abs": 1, "min": None, "max": None}
REAL = ("exp2", "exp", "tanh")


@dataclass(frozen=True)
class Number:
    """A constant: an int is an integer, a float is real."""

    value: int | float


@dataclass(frozen=True)
class Name:
    """s, or one of INTEGERS."""

    name: str


@dataclass(frozen=True)
class Tensor:
    """An element of a named tensor: of integers in a mask, of real numbers in a score. q indexes by the row of a query, from 0 on."""

    name: str
    indices: tuple[str, ...]
    integer: bool


@dataclass(frozen=True)
class Real:
    """An integer as a real number."""

    of: Node


@dataclass(frozen=True)
class Binary:
    """op: + - * of two of one type, / of two real numbers, // and % of two integers, rounded down as Python's are."""

    op: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Minus:
    of: Node


@dataclass(frozen=True)
class Compare:
    """op: < <= > >= == !=, of two of one type."""

    op: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Logic:
    """op: and, or."""

    op: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Not:
    of: Node


@dataclass(frozen=True)
class Choice:
    """body if test else other, both of one type."""

    test: Node
    body: Node
    other: Node


@dataclass(frozen=True)
class Call:
    """A function of one argument, or min or max of two."""

    function: str
    arguments: tuple[Node, ...]


Node = Number | Name | Tensor | Real | Binary | Minus | Compare | Logic | Not | Choice | Call


def walk(node: Node) -> list[Node]:
    """A node and all below it."""
    return [node, *(each for child in _children(node) for each in walk(child))]


def integer(node: Node) -> bool:
    """Whether it is an integer: neither real nor a truth value."""
    match node:
        case Number(value):
            return isinstance(value, int)
        case Name(name):
            return name != "s"
        case Tensor():
            return node.integer
        case Minus(of) | Binary("+" | "-" | "*", of, _) | Choice(_, of, _) | Call("abs" | "min" | "max", (of, *_)):
            return integer(of)
        case Binary("//" | "%"):
            return True
    return False


def most(node: Node, sizes: Mapping[str, int]) -> int:
    """The largest magnitude of an integer, and of the steps to it, where each name's is that of `sizes`."""
    match node:
        case Number(int() as value):
            return abs(value)
        case Name(name):
            return sizes[name]
        case Tensor():
            return 2**31 - 1
        case Binary("*", left, right):
            return most(left, sizes) * most(right, sizes)
        case Binary("+" | "-", left, right):
            return most(left, sizes) + most(right, sizes)
        case Binary("%", left, right):
            return max(most(left, sizes), most(right, sizes))
        case Binary("//", left, _):
            return most(left, sizes)
        case Choice(_, left, right) | Call(_, (left, right)):
            return max(most(left, sizes), most(right, sizes))
        case Minus(of) | Call(_, (of,)):
            return most(of, sizes)
    raise AssertionError(node)


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Binary(_, left, right) | Compare(_, left, right) | Logic(_, left, right):
            return left, right
        case Minus(of) | Not(of) | Real(of):
            return (of,)
        case Choice(test, body, other):
            return test, body, other
        case Call(_, arguments):
            return arguments
    return ()
