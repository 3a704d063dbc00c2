"""A tree as C++ of the words of fa/score.cuh. R is the type of real numbers, I that of integers: also a range of them, for a tile."""

from __future__ import annotations

from .tree import EXTENTS, Binary, Call, Choice, Compare, Logic, Minus, Name, Node, Not, Number, Real, Tensor


def cpp(node: Node) -> str:
    """Its C++, without spaces: it becomes a macro."""
    match node:
        case Number(value):
            return f"R({value!r})" if isinstance(value, float) else f"I({value}ll)"
        case Name(name):
            return name
        case Real(inner):
            return f"real_of<R>({cpp(inner)})"
        case Minus(inner):
            return f"(-{cpp(inner)})"
        case Not(inner):
            return f"(!{cpp(inner)})"
        case Choice(test, body, other):
            return f"choose({cpp(test)},{cpp(body)},{cpp(other)})"
        case Binary(op, left, right) if op in ("//", "%"):
            return f"{'floor_div' if op == '//' else 'floor_mod'}({cpp(left)},{cpp(right)})"
        case Binary(op, left, right) | Compare(op, left, right):
            return f"({cpp(left)}{op}{cpp(right)})"
        case Logic(op, left, right):
            return f"({cpp(left)}{'&&' if op == 'and' else '||'}{cpp(right)})"
        case Call(function, arguments):
            name = {"min": "least", "max": "greatest", "abs": "magnitude"}.get(function, function)
            return f"{name}({','.join(map(cpp, arguments))})"
        case Tensor(name, indices, integer):
            *rows, last = ["q_row" if index == "q" else index for index in indices]
            row = "I(0)" if not rows else rows[0]
            for at, index in zip(rows[1:], indices[1:], strict=False):
                row = f"({row}*{EXTENTS[index]}+{at})"
            return f"{'integer' if integer else 'real<R>'}(FA_TENSOR_{name},{row},{last},{EXTENTS[indices[-1]]})"
    raise AssertionError(node)
