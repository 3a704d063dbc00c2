"""The choice of a day's tests (tests/support/days.py): each has its day, and what has changed comes sooner."""

from __future__ import annotations

import datetime
from pathlib import Path

import days
import pytest

COSTS = {f"tests/a/test_{i % 8}.py::test[{i}]": 1.0 + i % 5 for i in range(60)} | {"tests/a/test_0.py::test_long": 20.0}
PARTS = [f"tests/a/test_9.py::test[{kernel}-{part}]" for kernel in ("fa1", "fa2") for part in range(3)]


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COSTS are dear, three minutes and 20 seconds in all."""
    monkeypatch.setattr(days, "DEAR", tmp_path / "dear.txt")
    (tmp_path / "dear.txt").write_text("".join(f"{seconds} {name}\n" for name, seconds in COSTS.items()))


def drawn(monkeypatch: pytest.MonkeyPatch, day: int, *changed: str) -> set[str]:
    """The tests of a day."""
    marked = dict.fromkeys(["tests/a/test_0.py::test_cheap", *COSTS]) | dict.fromkeys(PARTS, 3)
    monkeypatch.setenv(days.VARIABLE, datetime.date.fromordinal(739_000 + day).isoformat())
    return marked.keys() - days.another_day(marked, changed)


@pytest.mark.usefixtures("costs")
def test_each_test_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in 14 days, and of those marked days(3) one of each kernel every day. No day has much more than its share; cheap ones run daily."""
    found = [drawn(monkeypatch, day) for day in range(2 * days.DAYS)]
    assert found[: days.DAYS] != found[1 : days.DAYS + 1] and drawn(monkeypatch, 0) == found[0]
    for name in COSTS:
        when = [day for day, names in enumerate(found) if name in names]
        assert len(when) == 2 and when[1] - when[0] == days.DAYS, name
    for day, names in enumerate(found):
        assert "tests/a/test_0.py::test_cheap" in names
        assert sum(COSTS.get(name, 0.0) for name in names) <= max(20.0, sum(COSTS.values()) / days.DAYS + 5)
        assert sorted(name.partition("[")[2].partition("-")[0] for name in names & set(PARTS)) == ["fa1", "fa2"]
        assert names & set(PARTS) == found[(day + 3) % len(found)] & set(PARTS) or day + 3 >= len(found)


@pytest.mark.usefixtures("costs")
def test_what_has_changed_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of tests, a module (planner: test_planner.py) and a kernel; no more than CHANGED seconds, those first that come next."""
    for day in range(3):
        own = drawn(monkeypatch, day)
        assert drawn(monkeypatch, day, "nothing") == own
        assert drawn(monkeypatch, day, "fa2") - own == {name for name in PARTS if "[fa2-" in name} - own
        for changed in ("test_3", "3"):
            assert drawn(monkeypatch, day, changed) - own >= {name for name in COSTS if "test_3.py" in name} - own
        with monkeypatch.context() as less:
            less.setattr(days, "CHANGED", 3.0)
            some = drawn(monkeypatch, day, "test_3") - own
        assert some and sum(COSTS[name] for name in some) <= 3.0


def test_what_is_written_of_dear_tests_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids may have spaces. Without the file no test is dear."""
    monkeypatch.setattr(days, "DEAR", tmp_path / "dear.txt")
    assert days.dear() == {}
    (tmp_path / "dear.txt").write_text("1.5 tests/a.py::test_a[a b]\n12.0 tests/a.py::test_b\n")
    assert days.dear() == {"tests/a.py::test_a[a b]": 1.5, "tests/a.py::test_b": 12.0}
    assert days.another_day({"tests/a.py::test_c": None}) == set()
