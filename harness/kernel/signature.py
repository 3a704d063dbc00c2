"""An entry's parameter list in the source against what its launch passes, its __cluster_dims__ against the launch's clusters.

A GPU takes the parameters as bytes, so a list of another length runs and reads whatever follows them.
"""

from __future__ import annotations

import re
from pathlib import Path

from .header import bad
from .kernel import Kernel
from .tree import KERNELS, include_closure

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(.*)$", re.M)
_ATTRIBUTES = re.compile(r"__\w+__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")  # __launch_bounds__(128)
#: Files by the hash of their sources.
_passed: set[tuple[Path, str]] = set()
_NESTED = {"(": 1, "[": 1, "{": 1, "<": 1, ")": -1, "]": -1, "}": -1, ">": -1}


def without_comments(text: str) -> str:
    """C++ source with blanks for its comments: lines keep their numbers."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def user_files(path: Path) -> list[Path]:
    """A kernel's file and the headers next to it that it includes, without those of the tree."""
    return [file for file in include_closure(path) if file == path or not file.is_relative_to(KERNELS)]


def check_parameters(kernel: Kernel) -> None:
    """Raise UsageFault, with file and line, for an entry whose parameter list is not as long as what its launch passes, or whose scale
    has another width.

    An entry or a parameter that a macro writes is not judged here: on the CPU the compiler does (Passed of host/cuda.hpp).
    A source that has passed is not read again.
    """
    if (source := (kernel.path, kernel.source_hash)) in _passed:
        return
    sources = {file: without_comments(file.read_text(encoding="utf-8-sig", errors="replace")) for file in user_files(kernel.path)}
    defined = [match for text in sources.values() for match in _DEFINE.findall(text)]
    several_at_once = {name for name, body in defined if "," in body or body.endswith("\\")}
    for entry, args in kernel.entries.items():
        maps = kernel.maps_of(entry)
        head = re.compile(rf"__global__[^;{{}}]*?\b{entry}\s*\(")
        found = [(file, text, match.end()) for file, text in sources.items() for match in head.finditer(text)]
        _check_cluster(kernel, entry, found)
        if not found:
            _check_name(kernel, entry, dict(defined))
        several = [_parameters(text[at:], several_at_once) for _, text, at in found]
        if not found or any(has is None or len(has) == (len(args) or 1) + len(maps) for has in several):
            for (file, text, at), has in zip(found, several, strict=True):
                _check_scale(kernel, args, has or [], file, text.count("\n", 0, at) + 1)
            continue
        (file, text, at), has = found[0], several[0] or []
        passed = f"args passes {len(args)} ({', '.join(args)})" if args else "without args a launch passes one, fa::Args"
        passed += f", then its tensor maps, {len(maps)} ({', '.join(maps)})" if maps else ""
        raise bad(file, text.count("\n", 0, at) + 1, f"{entry} has {len(has)} parameter{'s' * (len(has) != 1)}; {passed}")
    _passed.add(source)


def _check_scale(kernel: Kernel, args: tuple[str, ...], has: list[str], file: Path, line: int) -> None:
    """A plain scale of another width than a launch passes: a GPU would read bytes that nobody wrote, or half of it."""
    for name, parameter in zip(args, has, strict=False):
        given = re.match(r"(?:const\s+)?(float|double)\b(?!\s*(?:const\s*)?[*&])", parameter) if name == "scale" else None
        others = [dtype for dtype in kernel.dtypes if given and (dtype == "float64") != (given[1] == "double")]
        if given and others:
            of = "double" if given[1] == "float" else "float"
            raise bad(file, line, f"the parameter scale is a {given[1]}; a launch on {', '.join(others)} passes a {of}")


def _check_name(kernel: Kernel, entry: str, macros: dict[str, str]) -> None:
    """An entry that no source declares, where no macro could write its declaration."""
    texts = [without_comments(file.read_text(encoding="utf-8-sig", errors="replace")) for file in include_closure(kernel.path)]
    has = {name: None for text in texts for name in re.findall(r"__global__[^;{}]*?\b(\w+)\s*\(", _ATTRIBUTES.sub("", text))}
    written = any(re.search(rf"__global__|##|\b{entry}\b", body) for body in macros.values())
    if not has or written or entry in has or not macros.keys().isdisjoint((entry, *has)):
        return
    head = kernel.path.read_text(encoding="utf-8-sig", errors="replace")
    line = re.search(rf"^//\s*entry\s*=\s*[\"']{entry}[\"']", head, re.M)
    place = head.count("\n", 0, line.start()) + 1 if line else 1
    raise bad(kernel.path, place, f"no __global__ {entry} in the file; it has {', '.join(has)}")


def _check_cluster(kernel: Kernel, entry: str, found: list[tuple[Path, str, int]]) -> None:
    """A GPU takes the clusters of a launch from its entry: without __cluster_dims__ it would run the blocks one by one."""
    size = next(launch.cluster for launch in reversed(kernel.launches) if launch.entry == entry)
    for file, text, at in found:
        dims = re.search(r"__cluster_dims__\s*\(([^)]*)\)(?=[^;{}]*$)", text[:at])
        wanted = "CLUSTER, 1, 1" if len(size) == 1 else None
        if bool(dims) == bool(size) and (not dims or not wanted or re.sub(r"\s", "", dims[1]) in ("CLUSTER,1,1", "CLUSTER")):
            continue
        line = text.count("\n", 0, at) + 1
        if not size:
            raise bad(file, line, f"{entry} has __cluster_dims__, and its [[launch]] no cluster")
        raise bad(file, line, f"{entry} needs __cluster_dims__({wanted or 'x, y, z'}): its [[launch]] has clusters")


def _parameters(text: str, macros: set[str]) -> list[str] | None:
    """The parameters of the list that ends at the first unmatched bracket; None where only the preprocessor knows them."""
    depth, last, found = 0, 0, []
    for at, sign in enumerate(text):
        depth += _NESTED.get(sign, 0)
        if depth < 0 or (sign == "," and depth == 0):
            found.append(text[last:at].strip())
            last = at + 1
        if depth < 0:
            if found in ([""], ["void"]):
                return []
            odd = any("#" in each or re.fullmatch(r"\w+", each) or not macros.isdisjoint(re.findall(r"\w+", each)) for each in found)
            return None if odd else found
    return None
