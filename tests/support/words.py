"""How many words of prose are written by hand in each document: `python tests/support/words.py [REVISION]`.

A document is a tracked Markdown file; below experiments/ only the READMEs are, since a script writes the others. What stands between a
generated mark and its end is left out, and so is fenced code. A word is what stands between blanks and has a letter or a digit, so tables
written by hand count, without their rules. With a revision the documents are those of that commit: `words.py 3870942`.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pages
from pages import ROOT

_GENERATED = re.compile(r"(?s)<!-- generated: .*?<!-- end -->")


def count(text: str) -> int:
    """The words of a document that somebody wrote."""
    return sum(any(map(str.isalnum, word)) for word in pages.FENCE.sub("", _GENERATED.sub("", text)).split())


def git(*arguments: str) -> str:
    """What git prints in the root of the tree. Raises CalledProcessError, for one where there is no such revision."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout


def documents(revision: str = "") -> dict[str, str]:
    """The text of every document by its path, of a revision or of the tree as it stands."""
    names = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files", "--cached", "--others", "--exclude-standard")
    found = [name for name in names.splitlines() if name.endswith(".md") and (name.endswith("README.md") or "experiments/" not in name)]
    if revision:
        return {name: git("show", f"{revision}:{name}") for name in found}
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in found if (ROOT / name).exists()}


if __name__ == "__main__":
    words = {name: count(text) for name, text in documents(*sys.argv[1:2]).items()}
    for document, number in sorted(words.items()):
        print(f"{number:7,}  {document}")
    print(f"{sum(words.values()):7,}  in all")
