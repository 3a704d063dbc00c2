"""The Hopper kernels of an earlier commit as files that today's harness runs: python experiments/mixed/old_kernels.py COMMIT FOLDER

Each file has what it includes of that commit in it, so today's words do not change it. Only fa::Args is today's: the harness fills it. Then
`costs.py measure --sweep hopper --old FOLDER` times today's form of each cell beside that of the commit, in turns.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDED = re.compile(r"^#include <(fa/\w+\.cuh)>\n", re.M)
ARGS = re.compile(r"struct alignas\(64\) Args \{.*?\n\};", re.S)


def inlined(text: str, words: dict[str, str], seen: set[str]) -> str:
    """A file with the words that it includes in its text, each where it is first included."""

    def word(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        seen.add(name)
        return inlined(words[name].replace("#pragma once\n", ""), words, seen)

    return INCLUDED.sub(word, text)


def main(commit: str, folder: Path) -> None:
    """Write the files."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout

    args = ARGS.search((ROOT / "kernels_cu/include/fa/args.cuh").read_text(encoding="utf-8"))
    assert args
    files = git("ls-tree", "-r", "--name-only", commit, "kernels_cu").split()
    words = {name.removeprefix("kernels_cu/include/"): git("show", f"{commit}:{name}") for name in files if name.endswith(".cuh")}
    words["fa/args.cuh"] = ARGS.sub(args[0].replace("\\", r"\\"), words["fa/args.cuh"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        if re.fullmatch(r"kernels_cu/\d\d_hopper(_\w+)?_(forward|backward)\.cu", name):
            text = inlined(git("show", f"{commit}:{name}"), words, set())
            (folder / Path(name).name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
