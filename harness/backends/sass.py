"""The order of instructions in a compiled kernel's main loop, from nvdisasm's listing of its machine code. Needs no GPU and no driver.

Source order is not machine order: ptxas may move exponentials behind the wait for a product that was to hide them, and nothing warns.
The main loop is the shortest backward branch whose body holds the products and their exponentials: with wgmma (HGMMA, of 8 bits QGMMA) two
accumulators, else mma.sync (HMMA). In it, a block that a vote of the warp jumps over is cold: what a kernel does when a bound is exceeded.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..fault import EnvironmentFault

_HINT = "pip install --upgrade nvidia-cuda-nvdisasm (5 MB, needs no GPU)"
#: A wgmma of 16 bits, and of 8.
WGMMA = ("HGMMA", "QGMMA")
_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
#: Loads and stores of global, shared and local memory: the kind, and a width of more than 4 bytes.
_ACCESS = re.compile(r"(LDGSTS|LDG|STG|LDSM|STSM|LDS|STS|LDL|STL)(?=\.|$)(?:\.(?!64\b|128\b)\w+)*(\.64|\.128)?.*")
_TARGET = re.compile(r"`\((\.L\w+)\)")


class Instruction(NamedTuple):
    """An instruction: the predicate that guards it ("P0", or empty), its name with modifiers, its operands."""

    guard: str
    name: str
    operands: str

    @property
    def written(self) -> str:
        """Its first operand."""
        return self.operands.partition(",")[0]


class Run(NamedTuple):
    """So many of the same in a row, others than the listed kinds between them left out. cold: a vote jumps over it."""

    what: str
    times: int
    cold: bool


@dataclass(frozen=True)
class Loop:
    """The main loop of an entry, from its first instruction to its backward branch. local: its loads and stores of local memory."""

    entry: str
    runs: tuple[Run, ...]
    local: int

    def describe(self) -> str:
        """The runs in order, the cold ones in brackets, then the loads and stores of local memory."""
        words, cold = "", False
        for run in self.runs:
            words += (" ]" if cold and not run.cold else "") + (" · " if words else "") + ("[ " if run.cold and not cold else "")
            words += run.what + (f" x{run.times}" if run.times > 1 else "")
            cold = run.cold
        return f"{words}{' ]' * cold} · {self.local} LDL/STL"

    @property
    def hidden(self) -> float:
        """The share of the exponentials, cold ones left out, that lie under a product: after a wait that leaves a group of wgmma in
        flight, before the wait for all. The loop goes round, so the last wait of the body stands before its first instruction too."""
        hot = [run for run in self.runs if not run.cold]
        at, counts = next((run.what for run in reversed(hot) if run.what.startswith("DEPBAR")), ""), {True: 0, False: 0}
        for run in hot:
            if run.what.startswith("DEPBAR"):
                at = run.what
            elif run.what == "MUFU.EX2":
                counts[at not in ("", "DEPBAR 0")] += run.times
        return counts[True] / max(1, sum(counts.values()))


def disassembled(cubin: bytes, lines: bool = False) -> str:
    """nvdisasm's listing of a cubin. lines: with those of the source. Raises EnvironmentFault where the program is absent, or older than the code."""
    with tempfile.TemporaryDirectory(prefix="fa_cli_") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [program(), "-c", *["--print-line-info"] * lines, str(file)], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    if done.returncode:
        raise EnvironmentFault("nvdisasm cannot read what NVRTC has compiled", done.stderr.strip(), f"{_HINT}, or another --arch")
    return done.stdout


def program() -> str:
    """The path of nvdisasm: of NVIDIA's Python package, else on PATH, else in the CUDA toolkit. Raises EnvironmentFault without it."""
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    wheels = [str(path) for folder in folders for path in sorted(Path(folder).glob("*/bin/nvdisasm"))]
    nvdisasm = next(iter(wheels), None) or shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    if not nvdisasm:
        raise EnvironmentFault("nvdisasm, NVIDIA's disassembler, is not installed", "it reads the machine code that NVRTC compiles", _HINT)
    return nvdisasm


def main_loops(listing: str) -> dict[str, Loop | None]:
    """The main loop of each function of a listing (nvdisasm -c); None where no loop has products on tensor cores and exponentials."""
    return {name: _main_loop(name, code, labels) for name, (code, labels) in _functions(listing).items()}


def inner_loops(listing: str) -> dict[str, str]:
    """Of each function that has one, the innermost loop with the most multiply-adds of CUDA cores: its length, these, loads and stores."""
    found = {}
    for name, (code, labels) in _functions(listing).items():
        ends = ((_target(each, labels), end) for end, each in enumerate(code))
        loops = [(begin, end) for begin, end in ends if begin is not None and begin < end]
        innermost = [code[b : e + 1] for b, e in loops if not any(b <= begin and end < e for begin, end in loops)]
        body = max(innermost, key=lambda body: sum(map(_multiplies, body)), default=[])
        if products := sum(map(_multiplies, body)):
            told = f"innermost loop, {len(body)} instructions: {products} {next(filter(_multiplies, body)).name.partition('.')[0]}"
            found[name] = " · ".join(filter(None, (told, _accesses(body))))
    return found


def _multiplies(each: Instruction) -> bool:
    return each.name.partition(".")[0] in ("FFMA", "FFMA2", "DFMA", "HFMA2")


def memory(listing: str) -> dict[str, str]:
    """How many loads and stores each function of a listing has of each kind and width, in words; empty where it has none."""
    return {name: _accesses(code) for name, (code, _) in _functions(listing).items()}


def _accesses(code: Sequence[Instruction]) -> str:
    counts = Counter(_ACCESS.sub(r"\1\2", i.name) for i in code if _ACCESS.match(i.name))
    return " · ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))


def _functions(listing: str) -> dict[str, tuple[list[Instruction], dict[str, int]]]:
    """The instructions of each function, and where its labels are in them."""
    functions: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := _INSTRUCTION.match(line):
            code.append(Instruction(match[1] or "", match[2], match[3]))
        elif match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := re.fullmatch(r"\.text\.([\w$.]+):", line.strip()):
            code, labels = functions.setdefault(match[1], ([], {}))
    return functions


def _main_loop(entry: str, code: Sequence[Instruction], labels: dict[str, int]) -> Loop | None:
    wgmma = any(instruction.name.startswith(WGMMA) for instruction in code)
    bodies = []
    for end, instruction in enumerate(code):
        begin = _target(instruction, labels)
        if begin is not None and begin <= end:
            body = code[begin : end + 1]
            products = {i.written for i in body if i.name.startswith(WGMMA)} if wgmma else {i.name for i in body if i.name[:4] == "HMMA"}
            if len(products) >= (2 if wgmma else 1) and any(i.name.startswith("MUFU.EX2") for i in body):
                bodies.append((end - begin, begin, end))
    if not bodies:
        return None
    _, begin, end = min(bodies)
    cold = _cold(code, labels, begin, end)
    runs: list[Run] = []
    last: tuple[str, str] | None = None
    for at in range(begin, end + 1):
        what = _kind(code[at])
        if not what:
            continue
        key = what, code[at].written if what.startswith(WGMMA) else ""  # another accumulator is another product
        if runs and last == key and runs[-1].cold == (at in cold):
            runs[-1] = runs[-1]._replace(times=runs[-1].times + 1)
        else:
            runs.append(Run(what, 1, at in cold))
        last = key
    local = sum(instruction.name.partition(".")[0] in ("LDL", "STL") for instruction in code[begin : end + 1])
    return Loop(entry, tuple(runs), local)


def _target(each: Instruction, labels: dict[str, int]) -> int | None:
    """Where a branch goes; None of another instruction."""
    match = _TARGET.search(each.operands) if each.name.partition(".")[0] == "BRA" else None
    return labels.get(match[1]) if match else None


def _cold(code: Sequence[Instruction], labels: dict[str, int], begin: int, end: int) -> set[int]:
    """What lies between a branch on a vote's result and its target, further on in the loop. A product of wgmma is never cold."""
    cold: set[int] = set()
    for at in range(begin, end + 1):
        if code[at].name.partition(".")[0] == "VOTE":
            branch = next((i for i in range(at + 1, end + 1) if _target(code[i], labels) is not None), end)
            to = _target(code[branch], labels) or 0
            skipped = range(branch + 1, to)
            if code[branch].guard == code[at].written and to <= end and not any(code[i].name.startswith(WGMMA) for i in skipped):
                cold.update(skipped)
    return cold


def _kind(each: Instruction) -> str:
    """What a run of the instruction is called; empty for what the order is not about."""
    first, *more = each.name.split(".")
    if first in (*WGMMA, "HMMA"):
        return f"{first} {more[0]}"
    if each.name.startswith("MUFU.EX2"):
        return "MUFU.EX2"
    if first == "DEPBAR" or each.name.startswith("WARPGROUP.DEPBAR"):
        return f"DEPBAR {int(each.operands.rpartition(',')[2], 0)}"
    if first in ("RED", "REDG"):
        return "REDG"
    if first == "SYNCS":
        return "SYNCS.wait" if "TRYWAIT" in more else "SYNCS.arrive" if more[0] == "ARRIVE" else ""
    return f"BAR.{more[0]}" if first == "BAR" else ""
