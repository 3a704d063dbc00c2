"""Locals that no statement has set start as NaN, also where g++ compiles.

`-ftrivial-auto-var-init=pattern` gives each of them a value that no sum begins with. clang's floats are NaN then. gcc fills with the byte
0xFE, and no option changes it: a float of -1.7e38, which the factor 0 of a softmax's first tile takes away again, so that an accumulator
that is never set to 0 passes. So the constants are changed in the assembly that gcc writes. Each 16 bits become 0xFFFE: NaN as float16,
bfloat16, float32 and float64, and far outside of every array as an index or an address. What memset fills becomes 0xFF bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: The pattern in gcc's spellings, and what takes its place. The last is a bfloat16 widened at compile time.
_CONSTANTS = {
    "-72340172838076674": str(0xFFFE_FFFE_FFFE_FFFE - 2**64),
    "-16843010": str(0xFFFE_FFFE - 2**32),
    "0xfefefefe": "0xfffefffe",
    "movw\t$-258": f"movw\t${0xFFFE - 2**16}",
    "-16908288": str(0xFFFE_0000 - 2**32),
}
#: What a kernel may not have in its own text, where it could not be told apart: these values, and bytes that it fills or computes with.
_OWN = re.compile(
    r"\b(?:254|258|65278|16843010|16908288|4278124286|72340172838076674|18374403900871474942|0[xX](?:[fF][eE])+(?:0000)?)[uUlL]*\b"
    r"|\bmemset\b|\b(?:u?int8_t|u?char[1-4]|signed\s+char)\b"
)
_BROADCAST = re.compile(r"\tvpbroadcastb\t%(\w+), %[xyz]mm(\d+)$")
_MOVED = re.compile(r"\tvmovd\t%(\w+), %xmm\d+$")
#: What a register's value is not looked for behind: a call may change it, and after a jump stands another way.
_LEAVES = re.compile(r"\t(?:call|jmp|ret|\.cfi_endproc)\b")
#: Arithmetic with float32 and float64, and what reads its last operand too.
_FLOAT, _IN_PLACE = re.compile(r"\tv(?!mov|and|or|xor)[a-oq-z]\w*[ps][sd]\t"), re.compile(r"\tv(?:pternlog|permi2|permt2|pdp)|\{")


def starting_as_nan(assembly: str, text: str) -> str:
    """The assembly of gcc with its pattern for locals replaced; text: the source of it, where a constant of its own is looked for.

    Left as it is where the source has one. A byte of its own keeps 0xFE, as does what is spelled in another way than known here.
    """
    if _OWN.search(text):
        return assembly
    for constant, nan in _CONSTANTS.items():
        assembly = re.sub(rf"{re.escape(constant)}\b", nan, assembly)
    lines = assembly.split("\n")
    for at in [at for at, line in enumerate(lines) if line.startswith(("\tvpbroadcastb\t", "\tmovl\t$254, %esi"))]:
        if not (found := _BROADCAST.match(lines[at])):
            if "\tmemset" in next((each for each in lines[at + 1 :] if "\tcall\t" in each), ""):
                lines[at] = lines[at].replace("$254", "$255")
        elif _is_pattern(lines, at, found[1]) and _of_locals(lines, at, found[2]):
            lines[at] = lines[at].replace("vpbroadcastb", "vpbroadcastw")  # -2 as a word is 0xFFFE
    return "\n".join(lines)


def _is_pattern(lines: Sequence[str], at: int, register: str) -> bool:
    """Whether a register holds -2 at a line, by what was last written to it, or a part of it, in the lines before."""
    core = register[1:]  # mm0 of xmm0, ax of eax, si of esi, 8d of r8d
    part = rf"[xyz]{core}" if core[0] == "m" else rf"r{core[:-1]}[dwb]?" if core[0].isdigit() else rf"[er]?{core}|{core.rstrip('x')}l"
    written = re.compile(rf"\t(?!cmp|test|bt|vucomis|vcomis)\w+\t(?:.*, )?%(?:{part})$")
    for before in reversed(range(max(0, at - 2000), at)):
        if written.match(lines[before]):
            if moved := _MOVED.match(lines[before]):  # where there is no AVX-512, by way of a vector register
                return _is_pattern(lines, before, moved[1])
            return lines[before] == f"\tmovl\t$-2, %{register}"
    return False


def _of_locals(lines: Sequence[str], at: int, number: str) -> bool:
    """Whether the lines after one only store a vector register, until it is written again, or take it for floats: no bytes to compute with."""
    named = re.compile(rf"%[xyz]mm{number}\b")
    stored = re.compile(rf"\tv?mov\w+\t%[xyz]mm{number}, [^%]*\(%")
    cleared = re.compile(rf"\tvp?xor\w*\t(%[xyz]mm{number}), \1, \1$")
    for line in lines[at + 1 :]:
        if _LEAVES.match(line) or cleared.match(line):
            break
        if named.search(line) and not stored.match(line):
            others, _, last = line.rpartition(", ")
            only_written = named.fullmatch(last) and not named.search(others) and not _IN_PLACE.search(line)
            return bool(only_written or _FLOAT.match(line))
    return True
