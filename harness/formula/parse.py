"""A text -> its tree, types and ranges checked. Never `eval`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache, partial, reduce

from .formula import Formula
from .mistake import FLOAT32_MAX, FLOAT32_MIN, Mistake, clipped
from .tree import (
    EXTENTS,
    FUNCTIONS,
    INTEGERS,
    POSITIVE,
    REAL,
    Binary,
    Call,
    Choice,
    Compare,
    Logic,
    Minus,
    Name,
    Node,
    Not,
    Number,
    Real,
    Tensor,
    most,
)

#: What a text of each kind may hold, for messages.
_BOTH = f"{', '.join(INTEGERS)}, + - * // %, comparisons, and, or, not, A if C else B"
LANGUAGES = {
    "mask": f"integers, {_BOTH}, abs, min, max, tensors as doc[b, q]",
    "sinks": f"numbers, h, h_kv, seq_q, seq_kv, /, {', '.join(FUNCTIONS)}, tensors of a head as sinks[h]",
    "score": f"numbers, s, {_BOTH}, /, {', '.join(FUNCTIONS)}, tensors as slope[h]",
}
_LONGEST = 1000
_MOST_INDICES = 4
_INT64 = 2**63 - 1

_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARE: dict[type[ast.cmpop], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_TYPES = {"integer": "an integer", "real": "a real number", "bool": "a truth value"}


@lru_cache(maxsize=256)
def parsed(kind: str, text: object) -> Formula:
    """The formula of a text; kind: "mask" or "score". Raises Mistake, with the column, where it is none."""
    if not isinstance(text, str) or not text.strip():
        raise Mistake(f"{kind} is {text!r:.40}", f"a {kind} is a text of {LANGUAGES[kind]}", f"leave --{kind} out for none")
    return _Parser(kind, text).formula()


@dataclass(frozen=True)
class _Typed:
    """A node with its type, "integer", "real" or "bool"."""

    node: Node
    type: str


@dataclass(frozen=True)
class _Parser:
    kind: str
    text: str

    def formula(self) -> Formula:
        if (wrong := next((i for i, c in enumerate(self.text) if not " " <= c <= "~"), None)) is not None:
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

    def _fault(self, column: int, why: str, hint: str = "") -> Mistake:
        what = f'{self.kind} "{clipped(self.text, 80)}", column {column + 1}'
        return Mistake(what, why, hint or f"a {self.kind} may hold {LANGUAGES[self.kind]}")

    def _wrong(self, node: ast.expr, why: str, hint: str = "") -> Mistake:
        return self._fault(node.col_offset, why, hint)

    def _typed(self, node: ast.expr) -> _Typed:
        """The node of a syntax tree, its type and range checked."""
        found = self._built(node)
        if found.type == "integer" and most(found.node, INTEGERS) > _INT64:
            raise self._wrong(node, "its value may exceed 64 bits at the largest sizes", "use smaller integers")
        if found.type == "real" and self.kind == "mask":
            raise self._wrong(node, "a mask is made of integers, so that it is the same in every arithmetic", "use //, or a score")
        return found

    def _built(self, node: ast.expr) -> _Typed:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() as value):
                return _Typed(Number(value), "integer")
            case ast.Constant(value=float() as value):
                if not abs(value) <= FLOAT32_MAX:
                    raise self._wrong(node, "a number must be finite, also in float32")
                if 0 < abs(value) < FLOAT32_MIN:
                    raise self._wrong(node, f"kernels take it as 0: the least number of theirs is {FLOAT32_MIN:.3g}")
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
                return _Typed(negative, one.type)
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
                return _Typed(Choice(condition, *pair), type_)
            case ast.Compare(left=left, ops=ops, comparators=right) if all(type(op) in _COMPARE for op in ops):
                return self._compare([left, *right], [_COMPARE[type(op)] for op in ops])
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments)
        raise self._wrong(node, f"{clipped(ast.unparse(node), 40)} is not allowed")

    def _named(self, node: ast.expr, name: str) -> _Typed:
        if self.kind == "sinks" and name in ("s", "b", "q", "k"):
            raise self._wrong(node, f"sinks are a logit of each query head, and {name} is not the same for all its rows")
        if name in INTEGERS:
            return _Typed(Name(name), "integer")
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
        indices = tuple(part.id for part in parts if isinstance(part, ast.Name) and part.id in EXTENTS)
        if len(indices) != len(parts) or not 1 <= len(parts) <= _MOST_INDICES:
            wrong = next((part for part in parts if not (isinstance(part, ast.Name) and part.id in EXTENTS)), index)
            raise self._wrong(wrong, f"a tensor is indexed by one to four of {', '.join(EXTENTS)}", f"as {name}[h] or {name}[b, q]")
        if self.kind == "sinks" and not {*indices} <= {"h", "h_kv"}:
            raise self._wrong(index, "sinks are a logit of each query head", f"as {name}[h]")
        integer = self.kind == "mask"
        return _Typed(Tensor(name, indices, integer), "integer" if integer else "real")

    def _binary(self, node: ast.expr, left: ast.expr, op: str, right: ast.expr) -> _Typed:
        one, two = self._number(left), self._number(right)
        if op in ("//", "%"):
            for side, found in ((left, one), (right, two)):
                if found.type != "integer":
                    raise self._wrong(side, f"{op} is of two integers, and this is a real number", "use /")
            divisor = two.node
            if not (isinstance(divisor, Number) and divisor.value) and not (isinstance(divisor, Name) and divisor.name in POSITIVE):
                why = f"{op} divides by a number other than 0, {' or '.join(POSITIVE)}: anything else may be 0"
                raise self._wrong(right, why, "use a number")
            return _Typed(Binary(op, one.node, two.node), "integer")
        if op == "/":
            if isinstance(two.node, Number) and two.node.value == 0:
                raise self._wrong(right, "it divides by zero")
            return _Typed(Binary(op, self._real(one), self._real(two)), "real")
        type_, (a, b) = self._alike(one, two)
        return _Typed(Binary(op, a, b), type_)

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
            return _Typed(Call(name, (found[0].node,)), found[0].type)
        whole, *rest = found
        for each in rest:
            type_, pair = self._alike(whole, each)
            whole = _Typed(Call(name, pair), type_)
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
