"""Finds kernels. There is no registry: the catalogue is the listing of kernels_cu/, and a path may stand for a name."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..fault import Fault, UsageFault, clipped, meant, nearest
from ..problem import PASSES
from .kernel import Kernel
from .tree import FILE, KERNELS


class NoSuchPass(UsageFault):
    """A kernel that has no file for a pass."""


@functools.cache
def catalogue() -> tuple[Kernel, ...]:
    """Every kernel of the tree, in ladder order, forward before backward."""
    kernels = [Kernel.read(path) for path in sorted(KERNELS.glob("*.cu"))]
    kernels = [with_variants(kernel, kernels) for kernel in kernels]
    return tuple(sorted(kernels, key=lambda k: (k.number if k.number is not None else 999, k.name, PASSES.index(k.pass_))))


def with_variants(kernel: Kernel, kernels: Iterable[Kernel]) -> Kernel:
    """A kernel with those of the kernels that run in its place for some problems. It then takes what one of them takes."""
    own = tuple(k for k in kernels if (k.variant_of, k.pass_) == (kernel.name, kernel.pass_))
    widths = {width for k in (kernel, *own) for width in k.head_dims}
    return replace(kernel, variants=(*own, kernel), head_dims=tuple(sorted(widths))) if own else kernel


def find(spec: str, pass_: str, deterministic: bool = False) -> Kernel:
    """The kernel of a name, a number, an alias or a path, for a pass; in its deterministic form where asked. Of "a+b", of which each is a
    name or a path, the forward pass is a's, the backward pass b's.

    Raises UsageFault, which lists the kernels, where there is none; NoSuchPass where the kernel has no such pass.
    """
    found = _find(spec, pass_)
    return found.made_deterministic() if deterministic else found


def is_path(spec: str) -> bool:
    """Whether a spec is the path of a kernel file, or of a pair one is, not a name."""
    return "/" in spec or any(part.endswith(".cu") for part in spec.split("+"))


_PAIR = re.compile(r"([\w-]+|.+?\.cu)\+([\w-]+|.+\.cu)")


def parts(spec: str) -> tuple[str, ...]:
    """The two specs of "a+b"; of any other, a path with a + in it too, itself."""
    pair = None if os.path.isfile(spec) else _PAIR.fullmatch(spec)
    return pair.groups() if pair else (spec,)


_A_PAIR = "use a pair as FORWARD+BACKWARD, each a name or a path ending in .cu"


def _find(spec: str, pass_: str) -> Kernel:
    if len(pair := parts(spec)) > 1:
        for part, of in zip(pair, PASSES, strict=True):  # also the part that this pass does not need
            _find(part, of) if is_path(part) else _of_name(part)
        return _find(pair[PASSES.index(pass_)], pass_)
    if is_path(spec):
        return _from_path(spec, pass_)
    same = _of_name(spec)
    if found := next((k for k in same if k.pass_ == pass_), None):
        return found
    other = f"a pair, KERNEL+{same[0].name}" if pass_ == "forward" else "a kernel with both passes"
    hint = f"use --mode {same[0].pass_}, or {other}: fa-cli list"
    raise NoSuchPass(f"{same[0].name} has no {pass_} pass", f"it has: {', '.join(k.pass_ for k in same)}", hint)


def _of_name(spec: str) -> list[Kernel]:
    """The passes of a name, number or alias. Raises UsageFault where there is none."""
    wanted, number = spec.lower().replace("-", "_"), int(spec) if re.fullmatch("[0-9]{1,9}", spec) else -1
    same = [k for k in catalogue() if k.number == number or wanted in (a.lower().replace("-", "_") for a in (k.name, *k.aliases))]
    if not same:
        names = list(dict.fromkeys(k.name for k in catalogue()))
        file = next((path for end in ("_forward", "_backward", "") if os.path.isfile(path := f"./{spec}{end}.cu")), None)
        hint = f"use --compute {file}" if file else f"{meant(wanted, names)}fa-cli list, or give a path ending in .cu"
        hint = _A_PAIR if "+" in spec else hint
        raise UsageFault(f"unknown kernel {clipped(spec, 80)!r}", f"known: {', '.join(names)}", hint)
    return same


def _from_path(spec: str, pass_: str) -> Kernel:
    path = Path(spec)
    match = FILE.match(path.stem)
    if not match:
        raise UsageFault(
            f"{clipped(path.name or spec, 80)} cannot name a kernel",
            "a file name may hold letters, digits and _",
            "give a path ending in .cu" if os.path.isdir(path) else "rename it to NAME_forward.cu",
        )
    stem_pass = match["pass"] or "forward"
    file = path if stem_pass == pass_ else path.with_name(f"{path.stem.removesuffix('_' + stem_pass)}_{pass_}.cu")
    if len(file.name) > 255 or not file.is_file():
        ends = (f"_{pass_}.cu", "_forward.cu", ".cu")
        found = next((name for end in ends if os.path.isfile(name := f"{spec}{end}")), None) or _near(spec)
        hint = (
            _A_PAIR
            if "+" in path.name
            else f"use {found}"
            if found
            else "fa-cli list shows the kernels there are"
            if file == path
            else _writing(path, match["name"], pass_)
        )
        raise NoSuchPass(f"no kernel file {clipped(str(file))}", f"--compute {clipped(spec)} needs it for the {pass_} pass", hint)
    return Kernel.read(file.resolve())


def _near(spec: str) -> str:
    """The file in its folder whose name is most like one that is not there; empty where none is."""
    path = Path(spec)
    with suppress(OSError):  # a name that is too long, a folder that may not be read
        if (
            path.suffix == ".cu"
            and not path.exists()
            and (near := nearest(path.name, (each.name for each in path.parent.glob("*.cu")), 0.8))
        ):
            return spec[: -len(path.name)] + near
    return ""


def _writing(other: Path, name: str, pass_: str) -> str:
    """The command that writes the file of a pass next to that of the other pass, as plain as that one is."""
    plain = False
    with suppress(Fault):
        plain = any(launch.args for launch in Kernel.read(other.resolve()).launches)
    folder = "" if other.parent == Path(".") else f" --output-dir {clipped(shlex.quote(str(other.parent)))}"
    return f"write it: fa-cli new {clipped(name, 80)}{' --plain' * plain} --pass {pass_}{folder}"
