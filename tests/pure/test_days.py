"""The day's sample of the dear tests (tests/support/sample.py): each file is in it, each test has its day."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample


def test_each_file_has_a_dear_test_every_day_and_each_test_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty tests of eight files, 1 to 5 s each, and one of a minute: a day has some 30 s. What is not dear is always in it."""
    seconds = {f"tests/a/test_{i % 8}.py::test[{i}]": 1.0 + i % 5 for i in range(40)} | {"tests/a/test_0.py::test_long": 60.0}
    names = [*seconds, "tests/a/test_0.py::test_cheap"]
    seen = set[str]()
    for day in range(150):
        monkeypatch.setenv(sample.VARIABLE, str(day))
        drawn = set(names) - sample.another_day(names, seconds, budget=30)
        assert names[-1] in drawn and sample.another_day(names, seconds, budget=30) == set(names) - drawn
        dear = drawn & set(seconds)
        assert {name.partition("::")[0] for name in dear} == {name.partition("::")[0] for name in seconds}
        assert 30 <= sum(map(seconds.__getitem__, dear)) < 30 + 60 + 5
        seen |= drawn
    assert seen == set(names)


def test_what_is_written_of_dear_tests_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids may have spaces. Without the file no test is dear."""
    monkeypatch.setattr(sample, "DEAR", tmp_path / "dear.txt")
    assert sample.dear() == {}
    (tmp_path / "dear.txt").write_text("1.5 tests/a.py::test_a[a b]\n12.0 tests/a.py::test_b\n")
    assert sample.dear() == {"tests/a.py::test_a[a b]": 1.5, "tests/a.py::test_b": 12.0}
    assert sample.another_day(["tests/a.py::test_c"], sample.dear()) == set()
