"""The expression language of kernel headers: integer arithmetic over named values, interpreted from a whitelist of syntax, never `eval`.

ceil_div(seq_q, BLOCK_Q) * heads_q        176 if HEAD_DIM == 128 and not causal else 128
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ..fault import clipped, meant
from .waves import WAVES


class ExpressionError(ValueError):
    """An expression with other syntax, an unknown name, or no integer value. what: where in a header it stands, the key last."""

    def __init__(self, message: str, what: str = "", expression: int | str = "") -> None:
        super().__init__(message)
        self.what, self.expression = what, expression


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """a rounded up to a multiple of b."""
    return ceil_div(a, b) * b


def floor_pow2(a: int) -> int:
    """a rounded down to a power of two. Raises ValueError for a < 1."""
    if a < 1:
        raise ValueError(f"no power of two is at most {a}")
    return 1 << (a.bit_length() - 1)


FUNCTIONS: dict[str, Callable[..., int]] = {
    "ceil_div": ceil_div,
    "round_up": round_up,
    "floor_pow2": floor_pow2,
    "min": min,
    "max": max,
}
#: What an expression may hold, for messages.
LANGUAGE = f"integers, names, + - * // %, comparisons, and, or, not, A if C else B, and the functions {', '.join((*FUNCTIONS, *WAVES))}"
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(expression: int | str, names: Mapping[str, int]) -> int:
    """The value of a header expression, a signed 64-bit integer. Raises ExpressionError, which quotes the offending part."""
    try:
        value = expression if isinstance(expression, int) else int(_function(expression)(names))
    except ExpressionError:
        raise
    except (SyntaxError, ValueError) as error:
        raise ExpressionError(f"{clipped(str(expression), 80)!r} is not an expression: {_why(error)}") from None
    except ZeroDivisionError:
        raise ExpressionError(f"{clipped(str(expression), 80)!r} divides by zero") from None
    except (RecursionError, MemoryError):  # thousands of brackets or signs
        raise ExpressionError(f"{clipped(str(expression), 40)!r} is nested too deeply") from None
    if not -(2**63) <= value < 2**63:
        raise ExpressionError(f"{clipped(str(expression), 80)!r} has a value beyond 64 bits")
    return value


def _why(error: Exception) -> str:
    """What Python says of a text, without what a program might do about it: of a number of 5000 digits."""
    return str(getattr(error, "msg", error)).partition(";")[0]


def names_of(expression: int | str) -> frozenset[str]:
    """The names that a header expression has, its functions left out. Raises ExpressionError where it is none."""
    return _names_of(expression) if isinstance(expression, str) else frozenset()


@lru_cache(maxsize=4096)
def _names_of(expression: str) -> frozenset[str]:
    try:
        tree = _parsed(expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{clipped(expression, 80)!r} is not an expression: {_why(error)}") from None
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - FUNCTIONS.keys() - WAVES.keys()


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    """An expression's syntax tree, cached: headers hold a few dozen expressions, evaluated for each problem and tile."""
    return ast.parse(expression, mode="eval").body


#: An expression as a function of its names: built once, for headers are evaluated for each new problem and tile.
Function = Callable[[Mapping[str, int]], int]


@lru_cache(maxsize=4096)
def _function(expression: str) -> Function:
    return _built(_parsed(expression))


def _built(node: ast.expr) -> Function:
    """The function of a node. What is not allowed raises ExpressionError when it is evaluated."""
    match node:
        case ast.Constant(value=int() as value):
            number = int(value)
            return lambda names: number
        case ast.Name(id=name):
            return lambda names: _named(names, name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, other, binary = _built(left), _built(right), _BINARY[type(op)]
            return lambda names: binary(one(names), other(names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            one = _built(operand)
            return lambda names: -one(names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            one = _built(operand)
            return lambda names: not one(names)
        case ast.BoolOp(op=op, values=values):
            (one, *more), both = [_built(v) for v in values], isinstance(op, ast.And)
            for other in more:
                one = _and(one, other) if both else _or(one, other)
            return one
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, one, other = _built(test), _built(body), _built(orelse)
            return lambda names: one(names) if condition(names) else other(names)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            one, other, compared = _built(left), _built(right), _COMPARE[type(op)]
            return lambda names: compared(one(names), other(names))
        case ast.Compare(left=left, ops=ops, comparators=right) if all(type(op) in _COMPARE for op in ops):
            sides, compare = [_built(v) for v in (left, *right)], [_COMPARE[type(op)] for op in ops]
            return lambda names: _compared([side(names) for side in sides], compare)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS or name in WAVES:
            parts, waves = [_built(a) for a in args], name in WAVES
            function = WAVES[name] if waves else FUNCTIONS[name]

            def called(names: Mapping[str, int]) -> int:
                given = [part(names) for part in parts]
                try:
                    return function(names, *given) if waves else function(*given)
                except (TypeError, ValueError) as error:
                    raise ExpressionError(f"{clipped(ast.unparse(node), 80)!r}: {name} does not take these values ({error})") from None

            return called
    return lambda names: _refused(node)


def _named(names: Mapping[str, int], name: str) -> int:
    try:
        return names[name]
    except KeyError:
        raise ExpressionError(f"unknown name {clipped(name, 40)!r}; known: {', '.join(sorted(names))}") from None


def _and(one: Function, other: Function) -> Function:
    return lambda names: bool(one(names)) and bool(other(names))


def _or(one: Function, other: Function) -> Function:
    return lambda names: bool(one(names)) or bool(other(names))


def _compared(sides: list[int], compare: list[Callable[[int, int], bool]]) -> bool:
    return all(op(a, b) for op, a, b in zip(compare, sides, sides[1:], strict=False))


def _refused(node: ast.expr) -> int:
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    near = meant(called, [*FUNCTIONS, *WAVES])
    raise ExpressionError(f"{clipped(ast.unparse(node), 80)!r} is not allowed in a header expression{f'; {near}'.rstrip('; ')}")


class Names(dict[str, int]):
    """Names of a header's expressions, with their values."""

    def number(self, expression: int | str, what: str, least: int = 0) -> int:
        """The value of an expression, at least `least`; what: where it stands, the key last. Raises ExpressionError, which has both."""
        try:
            value = evaluate(expression, self)
        except ExpressionError as error:
            raise ExpressionError(str(error), what, expression) from None
        if value < least:
            raise ExpressionError(f"{expression!r} is {value}, less than {least}", what, expression)
        return value

    def linear(self, expression: int | str, over: Sequence[str], what: str) -> tuple[int, ...] | None:
        """The constant of an expression and its factors of further names, of which it must be a sum of multiples; None where it is not.

        Raises ExpressionError as :meth:`number` does.
        """
        if expression in over:
            return (0, *(int(name == expression) for name in over))
        if self.needs(expression, what).isdisjoint(over):
            return (self.number(expression, what), *(0 for _ in over))

        def at(*values: int) -> int:
            return Names(self, **dict(zip(over, values, strict=True))).number(expression, what)

        constant = at(*(0 for _ in over))
        factors = [at(*(int(i == j) for j in range(len(over)))) - constant for i in range(len(over))]
        probe = [1000 * 2**i + 9 for i in range(len(over))]
        if at(*probe) != constant + sum(a * b for a, b in zip(factors, probe, strict=True)):
            return None
        return (constant, *factors)

    def needs(self, expression: int | str, what: str) -> frozenset[str]:
        """The names of an expression. Raises ExpressionError as :meth:`number` does."""
        try:
            return names_of(expression)
        except ExpressionError as error:
            raise ExpressionError(str(error), what, expression) from None
