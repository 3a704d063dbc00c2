"""The language of masks and scores: a text is parsed once into a tree, which has a value, C++ and a derivative by s. Never `eval`.

    --mask "q - k < 1024"                    a mask: which keys a query sees
    --score "s + exp2(-h - 1) * (k - q)"     a score: what takes the place of s before the softmax

It is the language of header expressions (kernel/expression.py) with real numbers. A mask is made of integers only, so that it is the same
in every arithmetic; a score is real. The types are checked when the text is parsed, and so are the ranges of integers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

from .fault import UsageFault, clipped

#: Arrays or numbers of numpy or cupy.
Values = Any

#: The integers of a pair (batch, query head, query, key; key head; lengths), with the largest magnitude of each.
INTEGERS = {"b": 2**31, "h": 2**31, "q": 2**32, "k": 2**31, "h_kv": 2**31, "seq_q": 2**31, "seq_kv": 2**31}
#: The only names that index a tensor.
INDICES = ("b", "h", "q", "k")
#: Names that are at least 1, so that they may divide.
_POSITIVE = ("seq_q", "seq_kv")
#: Functions, with the number of their arguments; None: two or more. Those of REAL take and give real numbers.
FUNCTIONS: dict[str, int | None] = {"exp2": 1, "exp": 1, "tanh": 1, "abs": 1, "min": None, "max": None}
REAL = ("exp2", "exp", "tanh")
#: What a text of each kind may hold, for messages.
LANGUAGES = {
    "mask": f"integers, {', '.join(INTEGERS)}, + - * // %, comparisons, and, or, not, A if C else B, abs, min, max",
    "score": f"numbers, s, {', '.join(INTEGERS)}, + - * / // %, comparisons, and, or, not, A if C else B, {', '.join(FUNCTIONS)}",
}
_LONGEST = 1000
_INT64 = 2**63 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_LN2 = 0.6931471805599453


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
    """An element of a named tensor. of: of integers, as everything in a mask is, or of real numbers."""

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
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors, each once, in order."""
        return tuple(dict.fromkeys(node.name for node in walk(self.tree) if isinstance(node, Tensor)))

    def value(self, xp: Any, names: Mapping[str, Values], real: str = "float64", tensors: Mapping[str, Values] | None = None) -> Values:
        """Its values for arrays that broadcast. real: the type of real numbers; functions are those of float64, rounded once."""
        return _value(self.tree, xp, names, real, tensors or {})

    def derivative(self) -> Formula:
        """The derivative of a score by s. At a kink, of abs, min, max and A if C else B, it is that of the side which the value is of."""
        return Formula(self.kind, f"d({self.text})/ds", _derivative(self.tree))

    def cpp(self) -> str:
        """C++ without spaces, of fa/score.cuh's words: R is the type of real numbers."""
        return _cpp(self.tree)


def window(left: int, right: int = 0) -> str:
    """The mask of a sliding window: a query sees itself, the `left` keys before it and the `right` keys after it."""
    return f"{-right} <= q - k <= {left}"


def softcap(cap: float) -> str:
    """The score that stays between -cap and cap. Raises UsageFault where cap is not above 0."""
    if not 0 < cap <= _FLOAT32_MAX:
        raise UsageFault(f"softcap is {cap:g}", "the largest score is a finite number above 0", "use --softcap 50")
    return f"{float(cap)!r} * tanh(s / {float(cap)!r})"


@lru_cache(maxsize=256)
def parsed(kind: str, text: object) -> Formula:
    """The formula of a text; kind: "mask" or "score". Raises UsageFault, with the column, where it is none."""
    if not isinstance(text, str) or not text.strip():
        raise UsageFault(f"{kind} is {text!r:.40}", f"a {kind} is a text of {LANGUAGES[kind]}", f"leave --{kind} out for none")
    return _Parser(kind, text).formula()


def walk(node: Node) -> list[Node]:
    """A node and all below it."""
    return [node, *(each for child in _children(node) for each in walk(child))]


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


# -- text -> tree -----------------------------------------------------------------------------------------------------

_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARE: dict[type[ast.cmpop], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_TYPES = {"integer": "an integer", "real": "a real number", "bool": "a truth value"}


@dataclass(frozen=True)
class _Typed:
    """A node with its type, "integer", "real" or "bool", and an integer's largest magnitude."""

    node: Node
    type: str
    most: int = 0


@dataclass(frozen=True)
class _Parser:
    kind: str
    text: str

    def formula(self) -> Formula:
        if wrong := next((i for i, c in enumerate(self.text) if not " " <= c <= "~"), None):
            raise self._fault(wrong, f"{self.text[wrong]!r} is no printable ASCII character")
        if len(self.text) > _LONGEST:
            raise self._fault(_LONGEST, f"it has {len(self.text)} characters, more than {_LONGEST}")
        start = len(self.text) - len(self.text.lstrip())
        try:
            body = ast.parse(self.text[start:], mode="eval").body
            for node in ast.walk(body):  # columns are those of the text that was given
                if isinstance(node, ast.expr):
                    node.col_offset += start
            tree = self._truth(body) if self.kind == "mask" else self._real(self._number(body))
            return Formula(self.kind, ast.unparse(body), tree)
        except SyntaxError as error:
            raise self._fault(start + (error.offset or 1) - 1, f"it is not an expression: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError):  # a number of thousands of digits, thousands of brackets
            raise self._fault(0, "it is nested too deeply, or has a number that is too long") from None

    def _fault(self, column: int, why: str, hint: str = "") -> UsageFault:
        what = f'{self.kind} "{clipped(self.text, 80)}", column {column + 1}'
        return UsageFault(what, why, hint or f"a {self.kind} may hold {LANGUAGES[self.kind]}")

    def _wrong(self, node: ast.expr, why: str, hint: str = "") -> UsageFault:
        return self._fault(node.col_offset, why, hint)

    def _typed(self, node: ast.expr) -> _Typed:
        """The node of a syntax tree, its type and range checked."""
        found = self._built(node)
        if found.type == "integer" and found.most > _INT64:
            raise self._wrong(node, "its value may exceed 64 bits at the largest sizes", "use smaller integers")
        if found.type == "real" and self.kind == "mask":
            raise self._wrong(node, "a mask is made of integers, so that it is the same in every arithmetic", "use //, or a score")
        return found

    def _built(self, node: ast.expr) -> _Typed:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() as value):
                return _Typed(Number(value), "integer", abs(value))
            case ast.Constant(value=float() as value):
                if not abs(value) <= _FLOAT32_MAX:
                    raise self._wrong(node, "a number must be finite, also in float32")
                return _Typed(Number(value), "real")
            case ast.Name(id=name):
                return self._named(node, name)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self._tensor(node, name, index)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._binary(node, left, _BINARY[type(op)], right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                one = self._number(operand)
                negative = Number(-one.node.value) if isinstance(one.node, Number) else Minus(one.node)
                return _Typed(negative, one.type, one.most)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _Typed(Not(self._truth(operand)), "bool")
            case ast.BoolOp(op=op, values=values):
                word, truths = "and" if isinstance(op, ast.And) else "or", [self._truth(value) for value in values]
                return _Typed(reduce(partial(Logic, word), truths), "bool")
            case ast.IfExp(test=test, body=body, orelse=other):
                condition, one, two = self._truth(test), self._typed(body), self._typed(other)
                if (one.type == "bool") != (two.type == "bool"):
                    raise self._wrong(node, "one of its two values is a number, the other a truth value")
                type_, pair = self._alike(one, two)
                return _Typed(Choice(condition, *pair), type_, max(one.most, two.most))
            case ast.Compare(left=left, ops=ops, comparators=right) if all(type(op) in _COMPARE for op in ops):
                return self._compare([left, *right], [_COMPARE[type(op)] for op in ops])
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments)
        raise self._wrong(node, f"{clipped(ast.unparse(node), 40)} is not allowed")

    def _named(self, node: ast.expr, name: str) -> _Typed:
        if name in INTEGERS:
            return _Typed(Name(name), "integer", INTEGERS[name])
        if name == "s" and self.kind == "score":
            return _Typed(Name(name), "real")
        if name == "s":
            raise self._wrong(node, "a mask does not depend on the score s", "use a score: A if s > 0.0 else B")
        known = ", ".join((*("s",) * (self.kind == "score"), *INTEGERS))
        raise self._wrong(node, f"unknown name {clipped(name, 40)}; known: {known}")

    def _tensor(self, node: ast.expr, name: str, index: ast.expr) -> _Typed:
        if name == "s" or name in INTEGERS or name in FUNCTIONS:
            raise self._wrong(node, f"{name} has a meaning already, so no tensor has that name", "choose another name")
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        indices = tuple(part.id for part in parts if isinstance(part, ast.Name) and part.id in INDICES)
        if len(indices) != len(parts) or not 1 <= len(parts) <= 2:
            wrong = next((part for part in parts if not (isinstance(part, ast.Name) and part.id in INDICES)), index)
            raise self._wrong(wrong, f"a tensor is indexed by one or two of {', '.join(INDICES)}", f"as {name}[h] or {name}[b, q]")
        integer = self.kind == "mask"
        return _Typed(Tensor(name, indices, integer), "integer" if integer else "real", 2**31)

    def _binary(self, node: ast.expr, left: ast.expr, op: str, right: ast.expr) -> _Typed:
        one, two = self._number(left), self._number(right)
        if op in ("//", "%"):
            for side, found in ((left, one), (right, two)):
                if found.type != "integer":
                    raise self._wrong(side, f"{op} is of two integers, and this is a real number", "use /")
            divisor = two.node
            if not (isinstance(divisor, Number) and divisor.value) and not (isinstance(divisor, Name) and divisor.name in _POSITIVE):
                why = f"{op} divides by a number other than 0, {' or '.join(_POSITIVE)}: anything else may be 0"
                raise self._wrong(right, why, "use a number")
            return _Typed(Binary(op, one.node, two.node), "integer", two.most if op == "%" else one.most)
        if op == "/":
            if isinstance(two.node, Number) and two.node.value == 0:
                raise self._wrong(right, "it divides by zero")
            return _Typed(Binary(op, self._real(one), self._real(two)), "real")
        type_, (a, b) = self._alike(one, two)
        return _Typed(Binary(op, a, b), type_, one.most * two.most if op == "*" else one.most + two.most)

    def _compare(self, sides: list[ast.expr], ops: list[str]) -> _Typed:
        """a < b < c is a < b and b < c."""
        numbers, found = [self._number(side) for side in sides], list[Node]()
        for op, one, two in zip(ops, numbers, numbers[1:], strict=False):
            found.append(Compare(op, *self._alike(one, two)[1]))
        return _Typed(reduce(partial(Logic, "and"), found), "bool")

    def _call(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> _Typed:
        if name not in FUNCTIONS:
            raise self._wrong(node, f"unknown function {clipped(name, 40)}; known: {', '.join(FUNCTIONS)}")
        wanted = FUNCTIONS[name]
        if len(arguments) != wanted if wanted else len(arguments) < 2:
            raise self._wrong(node, f"{name} takes {wanted or 'two or more'} values, not {len(arguments)}")
        found = [self._number(argument) for argument in arguments]
        if name in REAL:
            return _Typed(Call(name, (self._real(found[0]),)), "real")
        if name == "abs":
            return _Typed(Call(name, (found[0].node,)), found[0].type, found[0].most)
        whole, *rest = found
        for each in rest:
            type_, pair = self._alike(whole, each)
            whole = _Typed(Call(name, pair), type_, max(whole.most, each.most))
        return whole

    def _number(self, node: ast.expr) -> _Typed:
        found = self._typed(node)
        if found.type == "bool":
            raise self._wrong(node, f"a number stands here, and this is {_TYPES['bool']}", "A if C else B makes a number of it")
        return found

    def _truth(self, node: ast.expr) -> Node:
        found = self._typed(node)
        if found.type != "bool":
            raise self._wrong(node, f"a truth value stands here, and this is {_TYPES[found.type]}", "compare it: q % 2 == 0")
        return found.node

    def _alike(self, one: _Typed, two: _Typed) -> tuple[str, tuple[Node, Node]]:
        """The type of two numbers together, and both in it."""
        if one.type == two.type:
            return one.type, (one.node, two.node)
        return "real", (self._real(one), self._real(two))

    def _real(self, found: _Typed) -> Node:
        if found.type == "real":
            return found.node
        if isinstance(found.node, Number):
            return Number(float(found.node.value))
        return Real(found.node)


# -- tree -> values, C++, derivative ----------------------------------------------------------------------------------


def _value(node: Node, xp: Any, names: Mapping[str, Values], real: str, tensors: Mapping[str, Values]) -> Values:
    def of(node: Node) -> Values:
        return _value(node, xp, names, real, tensors)

    match node:
        case Number(value):
            return xp.asarray(value, dtype=real if isinstance(value, float) else "int64")
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
            return _OPERATIONS[op](of(left), of(right))
        case Compare(op, left, right):
            return _OPERATIONS[op](of(left), of(right))
        case Logic(op, left, right):
            return of(left) & of(right) if op == "and" else of(left) | of(right)
        case Call(function, (one,)) if function in REAL:
            return getattr(xp, function)(of(one).astype("float64", copy=False)).astype(real, copy=False)
        case Call("abs", (one,)):
            return xp.abs(of(one))
        case Call(function, (one, two)):
            return (xp.minimum if function == "min" else xp.maximum)(of(one), of(two))
    raise AssertionError(node)


_OPERATIONS: dict[str, Any] = {
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


def _cpp(node: Node) -> str:
    match node:
        case Number(value):
            return f"R({value!r})" if isinstance(value, float) else f"int64_t({value}ll)"
        case Name(name):
            return name
        case Real(inner):
            return f"R({_cpp(inner)})"
        case Minus(inner):
            return f"(-{_cpp(inner)})"
        case Not(inner):
            return f"(!{_cpp(inner)})"
        case Choice(test, body, other):
            return f"({_cpp(test)}?{_cpp(body)}:{_cpp(other)})"
        case Binary(op, left, right) if op in ("//", "%"):
            return f"{'floor_div' if op == '//' else 'floor_mod'}({_cpp(left)},{_cpp(right)})"
        case Binary(op, left, right) | Compare(op, left, right):
            return f"({_cpp(left)}{op}{_cpp(right)})"
        case Logic(op, left, right):
            return f"({_cpp(left)}{'&&' if op == 'and' else '||'}{_cpp(right)})"
        case Call(function, arguments):
            name = {"min": "least", "max": "greatest", "abs": "magnitude"}.get(function, function)
            return f"{name}({','.join(map(_cpp, arguments))})"
        case Tensor(name, indices, _):
            return f"tensor_{name}({','.join(indices)})"
    raise AssertionError(node)


_ZERO, _ONE = Number(0.0), Number(1.0)


def _derivative(node: Node) -> Node:
    """The derivative of a real node by s. What does not name s is a constant: integers, tensors and truth values never do."""
    match node:
        case Name("s"):
            return _ONE
        case Minus(of):
            return _minus(_derivative(of))
        case Binary("+" | "-" as op, left, right):
            return _sum(op, _derivative(left), _derivative(right))
        case Binary("*", left, right):
            return _sum("+", _times(_derivative(left), right), _times(left, _derivative(right)))
        case Binary("/", left, right):
            of_left = _over(_derivative(left), right)
            return _sum("-", of_left, _times(Binary("/", node, right), _derivative(right)))
        case Choice(test, body, other):
            return _either(test, _derivative(body), _derivative(other))
        case Call("exp", (of,)):
            return _times(node, _derivative(of))
        case Call("exp2", (of,)):
            return _times(_times(Number(_LN2), node), _derivative(of))
        case Call("tanh", (of,)):
            return _times(Binary("-", _ONE, Binary("*", node, node)), _derivative(of))
        case Call("abs", (of,)):
            inner = _derivative(of)
            return inner if inner == _ZERO else _either(Compare(">=", of, _ZERO), inner, _minus(inner))
        case Call("min" | "max" as function, (one, two)):
            return _either(Compare("<=" if function == "min" else ">=", one, two), _derivative(one), _derivative(two))
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
