"""The documents of the tree as one site: which they are, where their links lead, and a copy of them with all that they link to.

`python tests/support/pages.py FOLDER` writes the copy, from which `make site` builds. Links must work in both places, so a document links
to files only, by relative paths, and a heading's anchor is made as a code host makes it.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?ms)^( *)(```+)[^\n]*\n.*?^\1\2 *$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^\s)>]+)>?[^)]*\)")


def documents() -> list[Path]:
    """Every page, as a path below the root. Generated tables of experiments are pages too, as far as pages link to them."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for pattern in (
        "docs/**/*.md",
        "kernels_cu/*.md",
        "experiments/README.md",
        "experiments/*/README.md",
        "plots/README.md",
        "data/README.md",
    ):
        found += sorted(ROOT.glob(pattern))
    return found


def prose(text: str) -> str:
    """A document without its code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Where the links and pictures of a document lead, but for other sites."""
    text = FENCE.sub("", text)
    return [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as a code host names them."""
    found: set[str] = set()
    for title in re.findall(r"(?m)^#+ +(.*?) *$", FENCE.sub("", text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def dead(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere: no such file, a folder, or no such heading."""
    found = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or ROOT not in target.parents:
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(text if target == page else target.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


def copy(folder: Path) -> None:
    """Write every page, every file that one links to, and the style of tables, below `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting, done = [*documents(), ROOT / "docs/site.css"], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in done or not path.is_file():
            continue
        done.add(path)
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.suffix == ".md":
            waiting += [(path.parent / link.partition("#")[0]).resolve() for link in links(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
