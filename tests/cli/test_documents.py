"""README and docs/: their links lead somewhere, the tutorial's commands print what the page shows, and front doors stay short."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pages
import pytest
import tutorial
import words
from pages import ROOT

DOCUMENTS = pages.documents()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the tree, and to a heading of it. A folder has no page on the site."""
    assert not pages.dead(page, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "link", ["docs/nowhere.md", "plots/no.png", "docs", "docs/speed.md#no-such-heading", "#nowhere", "../../etc/passwd"]
)
def test_a_dead_link_is_found(link: str) -> None:
    """Or the test above could not fail. What stands in code is no link."""
    text = "# Here\n\n```\n[a](nowhere.md)\n```\n"
    assert not pages.dead(ROOT / "README.md", text + "[a](docs/speed.md#sweeps-comparisons-and-reports) ![b](plots/climb.png) [c](#here)")
    assert pages.dead(ROOT / "README.md", f"{text}[a]({link})")


def test_the_copy_is_whole(tmp_path: Path) -> None:
    """The site's copy has every page and what pages link to, in the same folders. plots/ keeps what pages show, and no other picture."""
    pages.copy(tmp_path / "site")
    found = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert {*(path.relative_to(ROOT).as_posix() for path in DOCUMENTS), "docs/site.css"} <= found
    assert "extra_css: [docs/site.css]" in (ROOT / "mkdocs.yml").read_text()
    kept = set(re.findall(r"(?m)^!/(plots/.*\.png)$", (ROOT / ".gitignore").read_text()))
    assert kept == {name for name in found if name.endswith(".png")}


def test_every_page_is_in_the_menu() -> None:
    """mkdocs.yml names each page of docs/, and no other; the pages of notes are listed in kernels_cu/NOTES.md."""
    menu = set(re.findall(r": (docs/[\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert menu == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}


def test_words_are_those_written_by_hand() -> None:
    """Generated parts, code blocks and the rules of tables do not count; tables by hand do, and no generated page is a document."""
    text = "Two words\n\n<!-- generated: speed -->\n| no |\n<!-- end -->\n\n```\nno\n```\n\n| a | 3.5 |\n|---|---:|\n"
    assert words.count(text) == 4
    found = words.documents()
    assert found.keys() >= {"README.md", "docs/notes/00_naive.md", "experiments/README.md"} and "experiments/hopper/table.md" not in found


@pytest.mark.parametrize(("name", "most"), [("README.md", 250), ("CONTRIBUTING.md", 150)])
def test_front_doors_are_short(name: str, most: int) -> None:
    """Short enough to be read."""
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
def test_the_tutorial_says_what_happens(tmp_path: Path) -> None:
    """Every command of the page prints what the page shows, but for numbers; the second kernel is the faster one."""
    last = ""
    for command, shown, got in tutorial.play(tutorial.PAGE.read_text(encoding="utf-8"), tmp_path):
        assert tutorial.shape(got) == tutorial.shape(shown), command
        last = got if "times as fast as mine" in got else last
    times = {name: float(ms) for name, ms in re.findall(r"(?m)^(\w+) +forward +([\d.]+) ", last)}
    assert times["faster"] < times["mine"]


def test_the_tutorial_is_compared() -> None:
    """Numbers and the widths of columns may differ, words may not; an edit must fit one place."""
    assert tutorial.shape("PASS  0.5 ms at 1e-07") == tutorial.shape("PASS 12 ms at 3")
    assert tutorial.shape("PASS 1") != tutorial.shape("FAIL 1")
    assert tutorial.edited("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(ValueError, match="2 places"):
        tutorial.edited("b\nb\n", "-b\n+c\n")


def test_the_readme_shows_what_the_tutorial_shows() -> None:
    """Each line that its blocks print is one of the tutorial's outputs, to the digit."""
    shown = "\n".join(out for _, _, body in tutorial.BLOCK.findall(tutorial.PAGE.read_text()) for out in [body])
    blocks = [body for kind, _, body in tutorial.BLOCK.findall((ROOT / "README.md").read_text()) if kind == "console"]
    assert len(blocks) == 3
    assert not [line for block in blocks for line in block.splitlines() if line not in shown.splitlines()]
