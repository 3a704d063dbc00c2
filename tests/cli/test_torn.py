"""Tables and records that an interrupted write has torn, two experiments in one folder, and what is no regular file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image

from harness import files
from harness.row import read_rows

Run = Callable[..., Result]
SWEEP = 'title = "a test"\nkernels = []\npeers = ["numpy"]\nshapes = [{ batch = 1, heads = 1, seq = [8, 12], dim = 8 }]\n'
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
pytestmark = needs_compiler
WORDS = ("experiment", "s.toml", "--compute", "naive", "--output-dir", "out")


@pytest.fixture
def out(fa_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an experiment of 2 shapes x 2 contenders that has ended; figures are not drawn."""
    monkeypatch.setattr("harness.report.compose.draw", lambda *given, **more: [])
    (tmp_path / "s.toml").write_text(SWEEP)
    assert fa_cli(*WORDS).exit_code == 0
    return tmp_path / "out" / "s"


def whole(folder: Path, runs: int = 1) -> None:
    """Every row of each run once, with its samples."""
    rows = read_rows(folder / "results.csv")
    cells = [(row.run_id, row.Test, row.Kernel) for row in rows]
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    record = json.loads((folder / "env.json").read_text())
    assert len(set(cells)) == len(cells) == 4 * runs
    assert sorted(cells) == sorted((line["run_id"], line["Test"], line["Kernel"]) for line in lines)
    assert rows[-1].run_id == record["run_id"] and len({row.run_id for row in rows}) == runs


TEARS: dict[str, Callable[[bytes], bytes]] = {
    "mid-row": lambda data: data[:-30],
    "two rows": lambda data: data[: len(data) * 7 // 10],
    "without the last newline": lambda data: data[:-1],
    "zero-filled": lambda data: data[:-300] + bytes(300),
    "zeros behind": lambda data: data + bytes(4096),
    "a header": lambda data: data[: data.index(b"\n") + 1],
    "half a header": lambda data: data[:70],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_results_csv(fa_cli: Run, out: Path, tear: str) -> None:
    """--resume measures a shape that is not whole, and each row and its samples are there once; what was dropped is said."""
    before = (out / "results.csv").read_bytes()
    (out / "results.csv").write_bytes(TEARS[tear](before))
    found = fa_cli(*WORDS, "--resume")
    assert found.exit_code == 0, found.stderr
    assert ("no whole line" in found.stderr) == (tear not in ("empty", "a header"))
    whole(out)
    kept, now = files.read_text(out / "results.csv"), before.decode().splitlines(keepends=True)
    assert kept.startswith("".join(now[: {"zeros behind": 5, "mid-row": 3, "without the last newline": 3}.get(tear, 1)]))


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_results_csv_and_a_new_run(fa_cli: Run, out: Path, tear: str) -> None:
    """A new run has a folder of its own, and the torn one stays as it is; an empty file holds no run."""
    torn = TEARS[tear]((out / "results.csv").read_bytes())
    (out / "results.csv").write_bytes(torn)
    assert fa_cli(*WORDS).exit_code == 0
    if tear == "empty":
        whole(out)
        return
    whole(out.with_name("s-2"))
    assert (out / "results.csv").read_bytes() == torn


def test_torn_files_are_reported_and_compared(fa_cli: Run, out: Path) -> None:
    """report and compare read the whole rows, and say what they left out; without one row report is exit 3."""
    for name in ("results.csv", "samples.jsonl"):
        (out / name).write_bytes((out / name).read_bytes()[:-5])
    before = (out / "results.csv").read_bytes()
    found = fa_cli("report", out, "--output-dir", "figures")
    assert found.exit_code == 0 and found.stderr.count("no whole line") == 1, found.stderr
    found = fa_cli("compare", out, out)
    assert found.exit_code == 0 and "no whole line" in found.stderr, found.stderr
    assert (out / "results.csv").read_bytes() == before
    (out / "results.csv").write_bytes(b"")
    found = fa_cli("report", out)
    assert found.exit_code == 3 and "hint: " in found.stderr


@pytest.mark.parametrize("left", [b"", b"{", b"\0" * 500, b'{"run_id": "x", "packages": {}'], ids=["empty", "cut", "zeros", "cut at }"])
def test_a_torn_env_json(fa_cli: Run, out: Path, left: bytes) -> None:
    """Resumed by the rows' run_id; a new run, compare and report go on too; what is missing is said."""
    run_id = read_rows(out / "results.csv")[-1].run_id
    (out / "env.json").write_bytes(left)
    for words in (("compare", out, out), ("report", out, "--output-dir", "figures")):
        found = fa_cli(*words)
        assert found.exit_code == 0 and "no whole record" in found.stderr, found.stderr
    found = fa_cli(*WORDS, "--resume")
    assert found.exit_code == 0 and "no whole record" in found.stderr
    whole(out)
    assert json.loads((out / "env.json").read_text())["run_id"] == run_id
    (out / "env.json").write_bytes(left)
    assert fa_cli(*WORDS).exit_code == 0
    whole(out.with_name("s-2"))


@pytest.mark.parametrize("tear", ["mid-row", "zero-filled", "zeros behind", "empty"])
def test_a_torn_samples_jsonl(fa_cli: Run, out: Path, tear: str) -> None:
    """Whole lines stay in a run that is resumed."""
    before = (out / "samples.jsonl").read_bytes()
    (out / "samples.jsonl").write_bytes(TEARS[tear](before))
    found = fa_cli(*WORDS, "--resume")
    assert found.exit_code == 0 and ("no whole line" in found.stderr) == (tear != "empty")
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == {"zeros behind": 4, "empty": 0}.get(tear, 3)


def test_a_run_that_was_killed_before_its_first_row_is_the_one_resumed(fa_cli: Run, out: Path) -> None:
    """env.json names it: --resume measures, and does not take an earlier run for done."""
    first = json.loads((out / "env.json").read_text())
    (out / "env.json").write_text(json.dumps({"run_id": "second", "earlier": {first["run_id"]: first}}))
    assert fa_cli(*WORDS, "--resume").exit_code == 0
    whole(out, 2)
    assert read_rows(out / "results.csv")[-1].run_id == "second"


def test_two_experiments_in_one_folder(fa_cli: Run, out: Path) -> None:
    """The second is refused with exit 6 and changes nothing, new or resumed; another folder is free."""
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with files.locked(out):
        for more in ((), ("--resume",)):
            found = fa_cli(*WORDS, *more)
            assert found.exit_code == 6 and "is in use" in found.stderr and "--output-dir" in found.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert fa_cli(*WORDS[:-1], "other").exit_code == 0


@pytest.mark.parametrize("name", ["results.csv", "samples.jsonl", "env.json", "s.toml"])
def test_a_fifo_does_not_hang(fa_cli: Run, out: Path, name: str) -> None:
    """Exit 3 from every command that reads it."""
    path = out.parent.parent / name if name == "s.toml" else out / name
    path.unlink()
    os.mkfifo(path)
    commands = [(*WORDS, "--resume"), *([WORDS] if name != "samples.jsonl" else [])]  # a new run does not read the samples of another
    if name != "s.toml":
        commands += [("compare", out, out)]
    if name in ("results.csv", "env.json"):
        commands += [("report", out)]
    for words in commands:
        found = fa_cli(*words)
        assert found.exit_code == 3 and "not a regular file" in found.stderr, (words, found.output)


def test_a_figure_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while it is written: the old one stays, nothing temporary."""
    import matplotlib.pyplot as plt

    from harness.fault import DiskFault
    from harness.report import style

    style.save(plt.figure(figsize=(1, 1)), tmp_path / "a.png", 50)
    before, write = (tmp_path / "a.png").read_bytes(), os.write
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (50, 50)

    def full(descriptor: int, data: memoryview) -> int:
        write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFault, match="no room"):
        style.save(plt.figure(figsize=(2, 2)), tmp_path / "a.png", 50)
    assert (tmp_path / "a.png").read_bytes() == before and os.listdir(tmp_path) == ["a.png"]
