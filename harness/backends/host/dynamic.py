"""`extern __shared__` of a user's file as C++: a pointer to the block's dynamic shared memory, declared where it is used.

A thread asks for that memory when it runs, so no variable outside functions can hold it. A declaration at file scope therefore moves into
the functions after it that use its name. Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...kernel.signature import without_comments

_ALIGN = r"(?:(?:__align__|alignas)[ \t]*\([^()\n]*\)[ \t]*)?"
#: Its groups: the type of an element, the name.
DYNAMIC = re.compile(
    rf"\bextern[ \t]+{_ALIGN}__shared__[ \t]+{_ALIGN}([A-Za-z_][\w:]*(?: [A-Za-z_][\w:]*)*)[ \t]+(\w+)[ \t]*\[[ \t]*\][ \t]*;"
)
#: The same in other words, or in a header of the user's: neither is rewritten.
LEFT = re.compile(r"\bextern\b[^;{}]*\b__shared__\b|\b__shared__\s+extern\b")
#: What is before the brace of a function's body, and before one that is no scope of its own.
_FUNCTION = re.compile(r"\)(?:const|noexcept|override|final|->[^;{}()]*|\s)*$")
_OPEN = re.compile(r"^\s*(?:inline\s+)?namespace\b|^\s*extern\s*\"|\b(?:struct|class|union)\b")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
_LITERAL = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\\w+|\\.)'")
_MACRO = re.compile(r"#[ \t]*define[ \t]+(\w+)((?:[^\n\\]|\\.|\\\n)*)")


class _Body(NamedTuple):
    """A function's body, from behind its { to its }, and the text before it, which has its parameters."""

    head: str
    start: int
    end: int


def with_dynamic_shared(text: str, shared: int = 0) -> str:
    """C++ for a source with declarations `extern __shared__`. shared: bytes of the array of a debug build, which a debugger prints whole;
    0 makes it a pointer."""
    bare = _LITERAL.sub(lambda found: found[0][0] + " " * (len(found[0]) - 2) + found[0][-1], without_comments(text))
    bodies = list(_bodies(_DIRECTIVE.sub(_blank, bare)))
    edits: list[tuple[int, int, str]] = []
    for found in DYNAMIC.finditer(bare):
        local = _local(found[1], found[2], shared)
        if any(body.start <= found.start() < body.end for body in bodies):
            edits.append((found.start(), found.end(), local))
            continue
        edits.append((found.start(), found.end(), ""))
        names = re.compile(rf"\b(?:{'|'.join(_names(found[2], bare))})\b")
        for body in bodies:
            if body.start > found.end() and names.search(bare, body.start, body.end) and not names.search(body.head):
                # braces of its own: the body may have another variable of that name
                edits += [(body.start, body.start, f" {local} {{"), (body.end, body.end, "}")]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _local(type_: str, name: str, shared: int) -> str:
    if not shared:
        return f"{type_}* const {name} = fa::dynamic_shared<{type_}>();"
    array = f"[{shared} / sizeof({type_})]"
    return f"{type_} (&{name}){array} = *reinterpret_cast<{type_} (*){array}>(fa::dynamic_shared<{type_}>());"


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _names(name: str, bare: str) -> list[str]:
    """A name, and the macros that stand for something with it."""
    names, macros = [name], _MACRO.findall(bare)
    for known in names:  # which grows
        names += [macro for macro, body in macros if macro not in names and re.search(rf"\b{known}\b", body)]
    return names


def _bodies(bare: str) -> Iterator[_Body]:
    """The outermost functions of a source without comments, directives and what literals hold."""
    head, depth, start, before = 0, 0, 0, ""
    for found in re.finditer(r"[;{}]", bare):
        sign, at = found[0], found.start()
        if depth:
            depth += (sign == "{") - (sign == "}")
            if not depth and before:
                yield _Body(before, start, at)
        elif sign == "{":
            text = bare[head:at]
            before = text if _FUNCTION.search(text) else ""
            depth, start = int(bool(before) or not _OPEN.search(text)), at + 1
        if not depth:
            head = at + 1
