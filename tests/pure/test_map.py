"""CONTRIBUTING.md, docs/extending.md and its figure speak of what is there: each path, name, make target and verb in backticks exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import draw_house
import pytest
from rooms import INNER, ROOMS, ROOT, arrows, direct, floor, ours, room

from cli import main

PAGES = ("CONTRIBUTING.md", "docs/extending.md", "docs/correctness.md", "docs/cpu-engine.md")
MAP = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
FILE = re.compile(r"[\w.*/-]+\.(py|cu|cuh|hpp|cpp|md|toml|npz|png|sh|json)")
NAME = re.compile(r"[a-z_]+(\.\w+)+")
TARGETS = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
FOLDERS = ("harness", "tests", "kernels_cu", "experiments")


def named(text: str) -> Any:
    """What a dotted name below harness means. Raises AttributeError, or ImportError, where it means nothing."""
    first, *rest = text.split(".")
    found = importlib.import_module(f"harness.{first}")
    for part in rest:
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")
    return found


def exists(text: str) -> bool | None:
    """Whether what stands in backticks is there; None where it is neither path, name, make target nor verb."""
    if text.startswith("make "):
        return text.removeprefix("make ") in TARGETS
    if text.startswith("fa-cli ") and not text.startswith("fa-cli --"):
        return text.split()[1] in main.commands
    if " " in text:
        return None
    if "/" in text or FILE.fullmatch(text):
        inside = () if "/" in text else (path for folder in FOLDERS for path in (ROOT / folder).rglob(text))
        return any(True for _ in (*ROOT.glob(text.rstrip("/")), *inside))
    if text.startswith(".") or not NAME.fullmatch(text):
        return None
    try:
        named(text)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("text", [text for text in QUOTED if exists(text) is not None])
def test_what_the_map_names_is_there(text: str) -> None:
    """A path below the root (or a file of that name anywhere), a name below harness, a make target, a verb."""
    assert exists(text)


@pytest.mark.parametrize("text", ["harness/nowhere.py", "nowhere.py", "check.choose.chosen", "nowhere.at_all", "make tea", "fa-cli brew"])
def test_what_is_not_there_is_missed(text: str) -> None:
    """Or the test above could not fail."""
    assert exists(text) is False


def test_most_of_what_is_quoted_is_looked_up() -> None:
    """So the rules above still fit how the map is written."""
    assert len([text for text in QUOTED if exists(text)]) > 0.75 * len(QUOTED)


def test_every_room_is_in_the_table_on_its_floor() -> None:
    """A row each, the highest floor first; that of the verbs names the module, or the folder, of every verb."""
    rows = re.findall(r"(?m)^\| (\d) \| `harness/(\w+)(?:/|\.py)` \|", MAP.partition("### ")[0])
    assert [(int(number) - 1, name) for number, name in rows] == [(floor(name), name) for name in ROOMS]
    verbs = next(line for line in MAP.splitlines() if line.startswith("| 2 |"))
    inside = [module.split(".")[1:] for module in INNER if room(module) == "verbs" and module != "verbs.__init__"]
    assert all(f"`harness/verbs/{name[0]}/`" in verbs if name[1:] else f"`{name[0]}.py`" in verbs for name in inside)


def test_the_figure_shows_every_room_and_only_arrows_that_go_down() -> None:
    """A room that is new must be placed; a box never stands beside or above one that imports it."""
    assert draw_house.PLACES.keys() == set(ROOMS)
    for upper, lower in direct(arrows()):
        assert draw_house.PLACES[upper][0] < draw_house.PLACES[lower][0], (upper, lower)
    for step, name, _ in draw_house.STEPS:
        assert step in (*ROOMS, "kernels_cu") and named(name)


def test_an_import_of_a_whole_room_is_an_arrow() -> None:
    """`from . import peers` names a folder, not a module: its face is what is imported."""
    assert "peers.__init__" in ours("check.choose") and "peers" in arrows()["check"]


def test_the_figure_is_up_to_date() -> None:
    """What it shows is noted in the file, so no font and no pixel is compared. `make docs` draws it again."""
    assert draw_house.drawn() == draw_house.facts()


def test_the_map_stays_small() -> None:
    """The map is short enough to be read."""
    assert len(MAP.splitlines()) < 150
    assert Path(ROOT / "plots" / "house.png").stat().st_size < 1 << 20
