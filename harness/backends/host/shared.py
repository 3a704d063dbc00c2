"""What lies at a byte of a kernel's shared memory: the `__shared__` array that a report of the race check means, and the element of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...kernel import Kernel, include_closure
from ...kernel.signature import user_files, without_comments
from .dynamic import DYNAMIC
from .library import shared_arrays
from .source import GUARD

#: Bytes of an element of dynamic shared memory.
_BYTES = {"char": 1, "unsigned char": 1, "float": 4, "int": 4, "unsigned": 4, "double": 8, "float2": 8, "float4": 16}
#: Of a whole number as an array's extent, without names.
_NUMBER = re.compile(r"[\d\s+*/%()-]+")


def with_arrays(report: str, library: Path, kernel: Kernel, macros: Sequence[tuple[str, str]]) -> str:
    """A report in which each `byte N of the static arrays` is the element of an array, and one of dynamic shared memory where that has a name."""
    if "race on shared memory byte" not in report:
        return report
    texts = _texts(include_closure(kernel.path))
    arrays = shared_arrays(library)

    def element(found: re.Match[str]) -> str:
        byte = int(found[1]) + GUARD
        name, start, size = next((each for each in arrays if each[1] <= byte < each[1] + each[2]), ("", 0, 0))
        return _element(name, byte - start, size, texts, dict(macros)) if name else found[0]

    report = re.sub(r"byte (\d+) of the static arrays", element, report)
    declared = {found for text in _texts(user_files(kernel.path)) for found in DYNAMIC.findall(text)}
    return re.sub(r"byte (\d+)(?= in block)", lambda byte: _carved(int(byte[1]), declared), report)


def _texts(files: Iterable[Path]) -> list[str]:
    return [without_comments(file.read_text(encoding="utf-8-sig", errors="replace")) for file in files]


def _carved(byte: int, declared: set[tuple[str, str]]) -> str:
    """A byte of dynamic shared memory: an element, where the kernel has one name and a known type for all of it."""
    if len(declared) != 1:
        return f"byte {byte}"
    ((type_, name),) = declared
    return f"{name}[{byte // _BYTES[type_]}]" if type_ in _BYTES else f"byte {byte} of {name}"


def _element(name: str, byte: int, size: int, texts: Sequence[str], macros: Mapping[str, str]) -> str:
    """The element of an array of `size` bytes; the byte where its extents are not known."""
    for text in texts:
        if found := re.search(rf"__shared__[^;{{}}]*?\b{re.escape(name)}\s*((?:\[[^\]]*\]\s*)*)[,;=]", text):
            extents = [_value(part, text, macros) for part in re.findall(r"\[([^\]]*)\]", found[1])]
            whole = math.prod(extents)
            if whole <= 0 or size % whole:
                break
            index, at = "", byte // (size // whole)
            for extent in reversed(extents):
                index, at = f"[{at % extent}]{index}", at // extent
            return name + index
    return f"byte {byte} of {name}"


def _value(text: str, source: str, macros: Mapping[str, str], depth: int = 8) -> int:
    """The value of an extent of numbers, macros and constants of the source; 0 where it has others."""

    def known(name: re.Match[str]) -> str:
        constant = re.search(rf"\bconst(?:expr)?\b[^;{{}}()]*?\b{name[0]}\s*=\s*([^;,]+)[;,]", source)
        defined = re.search(rf"^\s*#\s*define\s+{name[0]}\s+(.+)$", source, re.M)
        given = macros.get(name[0]) or (constant or defined or ("", "0"))[1]
        return given if given.strip().isdigit() else str(_value(given, source, macros, depth - 1)) if depth else "0"

    numbers = re.sub(r"\b[A-Za-z_]\w*\b", known, text)
    try:
        return int(eval(numbers.replace("/", "//"), {"__builtins__": {}})) if _NUMBER.fullmatch(numbers) else 0
    except (SyntaxError, ArithmeticError, ValueError, TypeError):
        return 0
