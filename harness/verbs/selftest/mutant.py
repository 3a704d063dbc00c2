"""Wrong kernels: the named faults of faults.toml, planted in kernels of the tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dataset.named import drawn
from ...kernel import INCLUDE, Kernel, catalogue
from ...problem import DTYPE_BYTES, UNKNOWN_DESCALES, UNKNOWN_DESCALES_KV, Problem

_INCLUDE = re.compile(r"^#include <(fa/\w+\.cuh)>", re.M)


@dataclass(frozen=True)
class Mutant:
    """One fault of faults.toml, whose first lines say what each field is."""

    name: str
    kind: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    found_by: Mapping[str, list[str]]
    file: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    causal: bool = False
    scale: float | None = None
    mask: str | None = None
    score: str | None = None
    sinks: str | None = None
    page_size: int | None = None
    dtype_kv: str | None = None
    keys: tuple[int, ...] = ()
    sms: int | None = None
    schedule: int | None = None
    case: str = ""

    @property
    def problem(self) -> Problem:
        """What the mutant is judged on."""
        of = self.shape.get
        batch, heads, seq, dim = of("batch", 1), of("heads", 2), of("seq", 129), of("dim", 64)
        sizes = (batch, heads, seq, dim, of("heads_kv"), self.keys or of("seq_kv"))
        given = (self.dtype, self.causal, self.scale)
        tensors = UNKNOWN_DESCALES_KV if self.dtype_kv else UNKNOWN_DESCALES if DTYPE_BYTES[self.dtype] == 1 else {}
        texts: dict[str, Any] = {"mask": self.mask, "score": self.score, "sinks": self.sinks, "tensors": tensors}
        return drawn(Problem.of(*sizes, *given, **texts, dim_v=of("dim_v"), page_size=self.page_size, dtype_kv=self.dtype_kv))

    @property
    def source(self) -> Kernel:
        """The kernel of the tree that is spoiled."""
        return next(kernel for kernel in catalogue() if kernel.label == self.kernel)

    def plant(self, folder: Path) -> Kernel:
        """The kernel with its fault, written into a folder (a header with a fault next to it). Raises ValueError as `edited` does."""
        path = self.source.path
        text = path.read_text(encoding="utf-8")
        if self.file:
            text = self._with_header(text, folder)
        else:
            text = edited(text, *self.edits, where=path.name)
        spoiled = folder / f"{self.kernel}.cu"
        spoiled.write_text(text, encoding="utf-8")
        return Kernel.read(spoiled)

    def _with_header(self, text: str, folder: Path) -> str:
        """The text with quoted includes of copies in the folder: the spoiled header and all those through which it is included."""
        header = (INCLUDE / self.file).read_text(encoding="utf-8")
        copies = {self.file: edited(header, *self.edits, where=self.file)}

        def redirected(text: str) -> str:
            for name in _INCLUDE.findall(text):
                inner = (INCLUDE / name).read_text(encoding="utf-8")
                if name not in copies and (changed := redirected(inner)) != inner:
                    copies[name] = changed
                if name in copies:
                    text = text.replace(f"<{name}>", f'"{Path(name).name}"')
            return text

        found = redirected(text)
        if found == text:
            raise ValueError(f"{self.kernel} does not include {self.file}")
        for name, copy in copies.items():
            (folder / Path(name).name).write_text(copy, encoding="utf-8")
        return found


def mutants(check: str = "") -> dict[str, Mutant]:
    """The mutants by name: all, or those that a check must find."""
    tables = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))["fault"]
    found = {
        table["name"]: Mutant(**table | {"edits": tuple(map(tuple, table["edits"])), "keys": tuple(table.get("keys", ()))})
        for table in tables
    }
    assert len(found) == len(tables), "two faults have one name"
    return {name: fault for name, fault in found.items() if not check or check in fault.found_by}


def edited(text: str, *edits: tuple[str, str], where: str = "the text") -> str:
    """The text with each edit made, one after the other. Raises ValueError where what is replaced does not stand there exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {where}, not once")
        text = text.replace(old, new)
    return text
