"""Where the kernels of the tree lie, how their files are named, and which headers a file includes."""

from __future__ import annotations

import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels_cu"
#: What a ring adds up between its steps: partial O by their logsumexp, gradients; and rounds at the end.
MERGE, ADD, ROUND = (KERNELS / "ring" / f"{name}.cu" for name in ("merge", "add", "round"))
INCLUDE = KERNELS / "include"

#: A kernel file's name without .cu: NN_name_pass, the number and the pass may be left out.
FILE = re.compile(r"^(?:(?P<number>\d\d)_)?(?P<name>\w+?)(?:_(?P<pass>forward|backward))?$")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<(fa/[\w./]+)>|"([^"\n]+)")', re.M)


def include_closure(path: Path) -> list[Path]:
    """The file and the headers of ours that it includes, directly or not, in a fixed order: <fa/...> (of the GPU and the host), "..."."""
    seen: dict[Path, None] = {path: None}
    queue = [path]
    while queue:
        includer = queue.pop()
        for word, beside in _INCLUDE.findall(includer.read_text(encoding="utf-8", errors="replace")):
            for file in (INCLUDE / word, KERNELS / "host" / word) if word else (includer.parent / beside,):
                if file.is_file() and file not in seen:
                    seen[file] = None
                    queue.append(file)
    return [path, *sorted(f for f in seen if f != path)]
