"""What a compiled kernel library may hold, read from its ELF tables before it is loaded: functions of a GPU, 48 KB of static shared memory.

A kernel is C++ here, so `exit` or a function that nobody defines would compile. On a GPU neither would.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernel import Kernel
from ...kernel.signature import user_files, without_comments
from ..protocol import CompileError

#: Bytes of static shared memory that a kernel may have on any GPU; more must be dynamic (CUDA C++ guide, Compute Capabilities).
STATIC_SHARED = 48 << 10
#: What a library may take from outside: what compilers add by themselves,
ALLOWED = {"memcpy", "memmove", "memset", "memcmp", "bcmp", "__memcpy_chk", "__memset_chk"}
ALLOWED |= {"__tls_get_addr", "__stack_chk_fail", "__stack_chk_guard", "__gmon_start__", "__cxa_finalize", "__cxa_atexit"}
#: and by these patterns the engine, sanitizers, arithmetic without instructions, and C's mathematics.
_ALLOWED = re.compile(
    r"fa_host_|__[atu]b?san_|__sanitizer_|_ITM_|_ZGV|__[a-z]+(?:hf|bf|sf|df|tf|xf|si|di|ti)[a-z0-9]*$|"
    r"(?:a?(?:cos|sin|tan)h?|atan2|sincos|exp|exp10|exp2|expm1|log|log10|log1p|log2|logb|ll?r(?:int|ound)|l?gamma|tgamma|erfc?|cbrt|sqrt|"
    r"hypot|pow|ldexp|frexp|scalbn|modf|fmod|remainder|remquo|ceil|floor|trunc|round|rint|nearbyint|nextafter|copysign|"
    r"f(?:abs|dim|ma|max|min))f?$"
)
_SYMTAB, _DYNSYM, _OBJECT, _TLS = 2, 11, 1, 6


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    address: int
    content: bytes
    link: int


def check_library(path: Path, kernel: Kernel) -> None:
    """Raise CompileError, with the kernel's line, for a function that no GPU has, an entry without `extern "C"` and too large static
    `__shared__` arrays, and for variables that code would have to initialise."""
    sections = _sections(path)
    for name, _, kind, value, _ in _symbols(sections, _DYNSYM):
        if value is None and kind != _TLS and name not in ALLOWED and not _ALLOWED.match(name):
            plain = _plain(name)
            why = f"a kernel on the CPU engine calls the words of <fa/...> and C's mathematics; nothing defines {name} for it"
            raise CompileError(kernel, (), f"{_line(kernel, plain)}: {plain}: {why}")
    defined = {name for name, _, _, value, _ in _symbols(sections, _SYMTAB) if value is not None}
    for entry in kernel.entries:
        if entry not in defined and any(re.match(rf"_Z.*{len(entry)}{entry}[^a-z]", name) for name in defined):
            why = f'a GPU finds it by its plain name only: write extern "C" __global__ void {entry}(...)'
            raise CompileError(kernel, (), f"{_line(kernel, entry, '__global__')}: {entry} has a C++ name: {why}")
    if any(name.startswith("_GLOBAL__sub_I_") for name in defined):  # the loader would call it, outside any thread
        why = "a variable outside functions starts with a value that must be computed; a GPU takes constants only"
        raise CompileError(kernel, (), f"{kernel.path}: {why}", "set it in the kernel, or make it constexpr")
    for entry, own in _static_arrays(sections, kernel).items():
        if sum(own.values()) > STATIC_SHARED:
            largest = max(own, key=lambda n: own[n])
            why = f"__shared__ arrays of {entry} take {sum(own.values())} bytes; a GPU has {STATIC_SHARED} for static ones"
            hint = "use dynamic shared memory: extern __shared__ float smem[]; in the kernel, shared = BYTES below [[launch]] in the header"
            raise CompileError(kernel, (), f"{_line(kernel, _plain(largest), '__shared__')}: {why}", hint)


def static_shared(path: Path, kernel: Kernel) -> dict[str, int]:
    """The bytes of static `__shared__` arrays that a block of each entry has on a GPU. A library has those of all entries side by side."""
    return {entry: sum(own.values()) for entry, own in _static_arrays(_sections(path), kernel).items()}


def shared_arrays(path: Path) -> list[tuple[str, int, int]]:
    """The name, the place in a block's static shared memory with its guard, and the bytes of each `__shared__` array of a library."""
    return [(_plain(name), at, size) for name, size, kind, at, _ in _symbols(_sections(path), _SYMTAB) if at is not None and kind == _TLS]


def module_globals(path: Path) -> list[tuple[str, int, int]]:
    """The name, the address from that of fa_host_static_shared on, and the bytes of each variable in global memory that a library has."""
    sections = _sections(path)
    symbols = list(_symbols(sections, _SYMTAB))
    start = next((at for name, _, _, at, _ in symbols if name == "fa_host_static_shared"), None)
    if start is None:
        return []
    return [
        (_plain(name), at - start, size)
        for name, size, kind, at, where in symbols
        if kind == _OBJECT and at is not None and size >= 4 and sections[where].name in (".data", ".bss")
    ]


def _static_arrays(sections: list[_Section], kernel: Kernel) -> dict[str, dict[str, int]]:
    """For each entry the sizes of its arrays by symbol. Of several entries, those of other functions are left out: any may call them."""
    symbols = _symbols(sections, _SYMTAB)
    arrays = {name: size for name, size, kind, value, _ in symbols if value is not None and kind == _TLS and "fa_host_" not in name}
    alone = len(kernel.entries) == 1
    return {entry: {n: size for n, size in arrays.items() if alone or n.startswith(f"_ZZ{len(entry)}{entry}E")} for entry in kernel.entries}


def checks_accesses(path: Path) -> bool:
    """Whether a library asks AddressSanitizer about its loads or stores."""
    names = (name for name, *_ in _symbols(_sections(path), _DYNSYM))
    return any(re.match(r"__asan_(report_)?(load|store)", name) for name in names)


def same_code(a: Path, b: Path) -> bool:
    """Whether two libraries have the same instructions at the same addresses."""
    texts = [[(s.address, s.content) for s in _sections(path) if s.name == ".text"] for path in (a, b)]
    return texts[0] == texts[1] != []


def _plain(symbol: str) -> str:
    """The last name in a mangled symbol (Itanium C++ ABI): f of _ZN1a1fEi, big of _ZZ7forwardE3big."""
    name = symbol
    for start in re.finditer(r"(?<=Z|N|E)\d+", symbol):
        at = start.start()
        while length := re.match(r"\d+", symbol[at:]):
            name = symbol[at + length.end() :][: int(length[0])]
            at += length.end() + int(length[0])
    return name


def _line(kernel: Kernel, name: str, beside: str = "") -> str:
    """file:line of a name in the kernel or a header of the user's, the last where it stands beside a word or is called; else the file."""
    place = ""
    for file in user_files(kernel.path):
        for number, line in enumerate(without_comments(file.read_text(encoding="utf-8", errors="replace")).splitlines(), 1):
            if re.search(rf"(?:\b|__builtin_){re.escape(name)}\b", line) and beside in line and ("extern" not in line or not place):
                place = f"{file}:{number}"
    return place or str(kernel.path)


def _sections(path: Path) -> list[_Section]:
    """The sections of a 64-bit little-endian ELF file. A file that is none has none: the loader tells."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    heads = [struct.unpack_from("<IIQQQQI", data, start + i * size) for i in range(count)]
    texts = heads[names][4]
    return [
        _Section(_text(data, texts + name), kind, address, b"" if kind == 8 else data[offset : offset + length], link)
        for name, kind, _, address, offset, length, link in heads
    ]


def _symbols(sections: list[_Section], kind: int) -> Iterator[tuple[str, int, int, int | None, int]]:
    """Name, size, type and, where it is defined here, value of each named symbol of a table, and the number of its section."""
    for table in (section for section in sections if section.kind == kind):
        names = sections[table.link].content
        for at in range(0, len(table.content) - 23, 24):
            name, info, where, value, size = struct.unpack_from("<IBxHQQ", table.content, at)
            if name:
                yield _text(names, name), size, info & 15, value if where else None, where


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode(errors="replace")
