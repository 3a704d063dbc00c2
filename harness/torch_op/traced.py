"""A function as flex_attention takes it, mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx), as a text of the language.

It is called once, with symbols. What they meet becomes text: operators, torch's functions, and captured tensors that they index.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..formula import EXTENTS, FUNCTIONS, Mistake

_OPERATORS = {
    **dict.fromkeys(("add", "__add__"), "+"),
    **dict.fromkeys(("sub", "subtract"), "-"),
    **dict.fromkeys(("mul", "multiply"), "*"),
    **dict.fromkeys(("div", "divide", "true_divide"), "/"),
    "floor_divide": "//",
    "remainder": "%",
    **dict.fromkeys(("lt", "less"), "<"),
    **dict.fromkeys(("le", "less_equal"), "<="),
    **dict.fromkeys(("gt", "greater"), ">"),
    **dict.fromkeys(("ge", "greater_equal"), ">="),
    "eq": "==",
    **dict.fromkeys(("ne", "not_equal"), "!="),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), "and"),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), "or"),
}
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_CALLS = {"exp": "exp", "exp2": "exp2", "tanh": "tanh", "abs": "abs", "absolute": "abs"}
_CALLS |= dict.fromkeys(("minimum", "min"), "min") | dict.fromkeys(("maximum", "max"), "max")
_KEEPING = ("to", "float", "int", "long", "type_as")
_INSTEAD = "use & | ~ for and, or, not, torch.where(A, x, y) for if, (a <= b) & (b < c) for a <= b < c"
_KNOWN = "+ - * / // %, comparisons, & | ~, torch.where, tanh, exp, exp2, abs, minimum, maximum, clamp; or write it as a text"


def _untraced(what: str, why: str, hint: str = _KNOWN) -> Mistake:
    return Mistake(f"{what} cannot be traced", why, hint)


@dataclass
class _Trace:
    """What is known while a function runs. tensors: by name, those that it indexes, and whose they are."""

    kind: str
    extents: dict[str, int]
    captured: dict[int, str]
    tensors: dict[str, Any]
    known: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def element(self, tensor: Any, at: Any) -> Symbol:
        """An element of a captured tensor, which becomes a named one: its first rows where it is longer than what indexes it."""
        parts = at if isinstance(at, tuple) else (at,)
        if len(parts) != tensor.dim():
            why = f"{len(parts)} of the {tensor.dim()} dimensions of a captured tensor are indexed"
            raise _untraced("an index", why, "index all of them at once: bias[b, h, q_idx, kv_idx]")
        indices, slices = [], list[Any]()
        for part, size in zip(parts, tensor.shape, strict=True):
            if isinstance(part, Symbol) and part.index:
                if size < self.extents[part.index]:
                    why = f"{part.index} goes up to {self.extents[part.index]}, beyond the {size} elements of a captured tensor"
                    raise _untraced("an index", why, "use a tensor of that length")
                indices.append(part.index)
                slices.append(slice(0, self.extents[part.index]))
            elif type(part) is int:
                slices.append(part)
            else:
                why = f"{part.text if isinstance(part, Symbol) else f'{part!r:.40}'} is none of b, h, q_idx, kv_idx and no number"
                raise _untraced("an index", why, "make a tensor whose index is one of them before the call")
        key = (id(tensor), str(slices), self.kind)
        if key not in self.known:
            name = wanted = self.captured.get(id(tensor), "captured")
            for i in range(2, len(self.tensors) + 3):
                name = name if name not in self.tensors else f"{wanted}_{i}"
            self.known[key], self.tensors[name] = name, tensor[tuple(slices)]
        text = f"{self.known[key]}[{', '.join(indices)}]"
        if self.kind == "mask" and tensor.dtype == torch.bool:
            return Symbol(self, f"({text} != 0)", "truth")
        return Symbol(self, text)

    def of(self, value: Any) -> Symbol:
        """A value that meets a symbol, as a symbol."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, torch.Tensor):
            if value.dim():
                raise _untraced(f"a tensor of shape {tuple(value.shape)}", "it is not indexed", "index it: bias[h], or bias[q_idx, kv_idx]")
            if value.requires_grad and torch.is_grad_enabled():
                raise _untraced("a captured number", "no gradient flows to it", "detach it")
            value = value.item()
        if isinstance(value, bool):
            return Symbol(self, "(0 == 0)" if value else "(0 == 1)", "truth")
        if not isinstance(value, numbers.Real):
            raise _untraced(f"{value!r:.40}", "it is no number, symbol or tensor")
        if not math.isfinite(value):
            raise _untraced(f"{value}", "a number must be finite", "end with torch.where(A, score, -inf), or give A as the mask")
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return Symbol(self, f"({number!r})" if number < 0 else repr(number))

    def join(self, op: str, one: Any, two: Any) -> Symbol:
        a, b = self.of(one), self.of(two)
        if op in ("and", "or"):
            return Symbol(self, f"({a.truth()} {op} {b.truth()})", "truth")
        return Symbol(self, f"({a.number()} {op} {b.number()})", "truth" if op in _COMPARISONS else "number")

    def choice(self, test: Any, one: Any, two: Any) -> Symbol:
        condition, hidden = self.of(test).truth(), [isinstance(each, float) and each == -math.inf for each in map(_plain, (one, two))]
        if self.kind == "score" and any(hidden):
            kept = self.of(one if hidden[1] else two)
            return Symbol(self, kept.number(), visible=condition if hidden[1] else f"(not {condition})")
        a, b = self.of(one), self.of(two)
        if a.type == b.type == "truth":
            return Symbol(self, f"({a.text} if {condition} else {b.text})", "truth")
        return Symbol(self, f"({a.number()} if {condition} else {b.number()})")

    def call(self, function: str, *values: Any) -> Symbol:
        found = [self.of(value).number() for value in values]
        if FUNCTIONS[function] != 1 and len(found) < 2:
            raise _untraced(f"{function} of one value", "a symbol is one number", "use torch.maximum(a, b)")
        return Symbol(self, f"{function}({', '.join(found)})")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and not value.dim() else value


class Symbol:
    """A number or truth value of each pair of query and key. index: the name that it is by itself. visible: else the score is -inf."""

    __hash__ = None  # type: ignore[assignment]
    dtype = torch.float32

    def __init__(self, trace: _Trace, text: str, type_: str = "number", index: str = "", visible: str = "") -> None:
        self.trace, self.text, self.type, self.index, self.visible = trace, text, type_, index, visible

    def number(self) -> str:
        self._last()
        return self.text if self.type == "number" else f"(1 if {self.text} else 0)"

    def truth(self) -> str:
        self._last()
        if self.type != "truth":
            raise _untraced(f"{self.text} as a truth value", "it is a number", "compare it: q_idx % 2 == 0")
        return self.text

    def _last(self) -> None:
        if self.visible:
            raise _untraced("-inf inside a score", "what is not visible is the mask's", "end with torch.where(A, score, -inf)")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", "?"), kwargs or {}
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, (Symbol, tuple))]
        trace = next(each.trace for part in found for each in (part if isinstance(part, tuple) else (part,)) if isinstance(each, Symbol))
        return _applied(trace, name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _applied(self.trace, name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise _untraced(f"{self.text} as a condition of Python", "it differs from pair to pair", _INSTEAD)

    def _no_number(self) -> Any:
        raise _untraced(f"{self.text} as a number of Python", "it differs from pair to pair", _KNOWN)

    __float__ = __int__ = __index__ = _no_number

    def __neg__(self) -> Symbol:
        return Symbol(self.trace, f"(-{self.number()})")

    def __abs__(self) -> Symbol:
        return self.trace.call("abs", self)

    def __invert__(self) -> Symbol:
        return Symbol(self.trace, f"(not {self.truth()})", "truth")

    def __pow__(self, power: Any) -> Symbol:
        if power != 2:
            raise _untraced(f"a power of {power!r:.20}", "only x ** 2 and 2 ** x are")
        return self.trace.join("*", self, self)

    def __rpow__(self, base: Any) -> Symbol:
        if base != 2:
            raise _untraced(f"{base!r:.20} to a power", "only x ** 2 and 2 ** x are", "use torch.exp2(x * log2 of it)")
        return self.trace.call("exp2", self)


def _operator(op: str, turned: bool) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: self.trace.join(op, other, self) if turned else self.trace.join(op, self, other)


_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or")
for _name, _op in zip(_NAMES, ("+", "-", "*", "/", "//", "%", "and", "or"), strict=True):
    setattr(Symbol, f"__{_name}__", _operator(_op, False))
    setattr(Symbol, f"__r{_name}__", _operator(_op, True))
for _name, _op in zip(("lt", "le", "gt", "ge", "eq", "ne"), _COMPARISONS, strict=True):
    setattr(Symbol, f"__{_name}__", _operator(_op, False))


def _applied(trace: _Trace, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    """A function of torch, or a method, of symbols and what they meet."""
    if name in _KEEPING:
        whole = name in ("int", "long") or any(isinstance(t, torch.dtype) and not t.is_floating_point for t in (*args, *kwargs.values()))
        if whole and trace.kind == "score":  # a mask has integers only
            raise _untraced("a score's cast to integers", "the language does not round", "use // of integers")
        return trace.of(args[0])
    if name == "clamp":
        low, high = (kwargs.get(word, args[i] if len(args) > i else None) for i, word in ((1, "min"), (2, "max")))
        found = trace.of(args[0])
        found = found if low is None else trace.call("max", found, low)
        return found if high is None else trace.call("min", found, high)
    if not kwargs:
        if name in ("__getitem__", "getitem") and isinstance(args[0], torch.Tensor):
            return trace.element(*args)
        if name in _OPERATORS and len(args) == 2:
            return trace.join(_OPERATORS[name], *args)
        if name in ("rsub", "__rsub__") and len(args) == 2:
            return trace.join("-", args[1], args[0])
        if name == "where" and len(args) == 3:
            return trace.choice(*args)
        if name in _CALLS:
            return trace.call(_CALLS[name], *args)
        if name in ("logical_not", "bitwise_not"):
            return ~trace.of(args[0])
        if name in ("neg", "negative"):
            return -trace.of(args[0])
    raise _untraced(f"{name}", "the language of masks and scores has no such function")


def traced(kind: str, function: Callable[..., Any], sizes: dict[str, int], tensors: dict[str, Any]) -> dict[str, str]:
    """The text of a mask_mod or score_mod, by its kind; with "mask" also that of torch.where(A, score, -inf). Its tensors go to `tensors`.

    sizes: fields of Problem. q_idx counts from 0 at the first query and kv_idx at the first key, as flex_attention's do; q of the
    language counts bottom-right. Raises Mistake for what has no text.
    """
    captured = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    names = {id(value): name for part in (captured.globals, captured.nonlocals) for name, value in part.items()} if captured else {}
    usable = {key: name for key, name in names.items() if name not in {"s", "seq_q", "seq_kv", *EXTENTS, *FUNCTIONS}}
    trace = _Trace(kind, {name: sizes[extent] for name, extent in EXTENTS.items()}, usable, tensors)
    q = "q" if sizes["seq_q"] == sizes["seq_kv"] else "(q - seq_kv + seq_q)"
    symbols = [Symbol(trace, text, index=name) for name, text in (("b", "b"), ("h", "h"), ("q", q), ("k", "k"))]
    arguments = [*[Symbol(trace, "s")] * (kind == "score"), *symbols]
    form = f"{kind}({'score, ' * (kind == 'score')}b, h, q_idx, kv_idx)"
    with contextlib.suppress(ValueError):  # some functions have no signature
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise Mistake(f"the {kind} function takes other arguments", f"{error}; it is called as {form}", f"def {form}: …") from None
    try:
        found = function(*arguments)
    except TypeError as error:
        raise _untraced(f"the {kind} function", str(error)) from error
    if found is None:
        raise _untraced(f"the {kind} function", "it returned nothing", "return what it computes")
    made = trace.of(found)
    if kind == "mask":
        return {kind: made.truth()}
    hidden, made.visible = made.visible, ""
    return {kind: made.number()} | ({"mask": hidden} if hidden else {})
