"""The line of progress: on a terminal only, with a bar and an estimate, gone before anything else is printed. Figures come last."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.terminal import errors, printing, progress
from harness.verbs import experiment

ROOT = Path(__file__).resolve().parent.parent.parent
SWEEP = 'title = "a test"\nkernels = ["naive"]\npeers = ["numpy"]\nshapes = [{ batch = 1, heads = 1, seq = [8, 12, 16], dim = 8 }]\n'


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr, 60 columns wide. A look at the clock takes a second."""
    made, clock = Terminal(), iter(range(1000))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return made


def lines(text: str) -> list[str]:
    """What was drawn, a line after another."""
    return re.sub("\x1b\\[[0-9;]*m", "", text).split("\r\x1b[2K")[1:]


def test_a_count_becomes_a_bar_and_an_estimate(terminal: Terminal) -> None:
    """Of the count's own time, not of what came before; without a count the words alone; a long line is cut, a short one whole."""
    tell = progress.teller(0)
    tell("compiles fa2_forward")
    for done in range(3):
        tell(f"{done}/8 S512 runs fa2 5/6 \x1b]0;evil\x07")
    tell("0/8 again")
    tell("judges " + "x" * 80)
    drawn = lines(terminal.getvalue())
    assert [line.strip("━╸╺ ") for line in drawn[:5]] == [
        "0:01  compiles fa2_forward",
        "0% 0:02  S512 runs fa2 ?]0;evil?",
        "12% 0:03, 0:07 left  S512 runs fa2 ?]0;evil?",
        "25% 0:04, 0:06 left  S512 runs fa2 ?]0;evil?",
        "0% 0:05  again",
    ]
    assert drawn[5].endswith("x…") and max(map(len, drawn)) <= 60


@pytest.mark.parametrize("speak", [errors.note, lambda text: errors.complain(text), lambda text: printing.line(text)])
def test_the_line_goes_before_a_message(terminal: Terminal, speak: Callable[[str], object]) -> None:
    """Whoever speaks takes it away, once."""
    tell = progress.teller(0)
    tell("works")
    before = terminal.getvalue()
    speak("done")
    speak("again")
    assert terminal.getvalue()[len(before) :].startswith("\r\x1b[2K") and terminal.getvalue().count("\x1b[2K") == 2
    tell("")


def test_a_line_in_a_while_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    """Where stderr is a file or a pipe nothing, or a plain line every half minute of a verb that asks for it; none with -q."""
    progress.teller(-1, seldom=True)("works")
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    silent, tell = progress.teller(0), progress.teller(0, seldom=True)
    for done in range(61):
        silent(f"{done}/100 checks")
    assert not terminal.getvalue()
    for done in range(61):  # a second each
        tell(f"{done}/100 checks \x1b[31m")
    tell("")
    printing.line("done")
    assert terminal.getvalue() == "29% 0:30, 1:11 left  checks ?[31m\n59% 1:00, 0:41 left  checks ?[31m\n"


def on_a_terminal(folder: Path, *arguments: str) -> str:
    """What a command prints where stdout and stderr are one terminal."""
    leader, follower = pty.openpty()
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from harness.terminal import progress; progress.AFTER = 0.0\n"
    code += "import cli; cli.main()"
    words, wide = [sys.executable, "-c", code, str(ROOT), *arguments], os.environ | {"COLUMNS": "160"}
    with subprocess.Popen(words, cwd=folder, env=wide, stdout=follower, stderr=follower) as process:
        os.close(follower)
        said = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # Linux's end of a terminal
                part = b""
            if not part:
                break
            said += part
    os.close(leader)
    assert process.returncode == 0, said
    return re.sub("\x1b\\[[0-9;]*m", "", said.decode()).replace("\r\n", "\n")


def test_run_says_what_it_does(tmp_path: Path) -> None:
    """Every phase in its order; nothing is left of the line; with -q only the verdict."""
    said = on_a_terminal(tmp_path, "run", "--compute", "naive,numpy", "--seq", "64", "--mode", "both", "--device", "cpu")
    order = ["draws dO", "writes", "reads", "float64 reference", "compiles naive_forward", "runs naive_forward", "judges naive_forward"]
    order += [
        "f32 baselines",
        "runs naive_backward",
        "runs numpy backward",
        "times warm: naive, numpy forward",
        "times warm: naive, numpy back",
    ]
    places = [said.find(words) for words in order]
    assert -1 not in places and places == sorted(places), dict(zip(order, places, strict=True))
    assert "left" in said and "max |error|" in lines(said)[-1]
    assert on_a_terminal(tmp_path, "run", "--compute", "numpy", "--seq", "64", "--device", "cpu", "-q").startswith("PASS numpy")


def test_a_sweep_says_how_far_it_is(tmp_path: Path) -> None:
    """A fork's work is told too, in parts of the whole sweep. Without figures summary.md is written all the same."""
    (tmp_path / "mine.toml").write_text(SWEEP)
    said = on_a_terminal(tmp_path, "experiment", "mine.toml", "--device", "cpu", "--output-dir", "out", "--no-figures")
    order = ["S8 checks numpy", "S8 times warm", "66% ", "max |error|", "written  out/mine/results.csv", "PASS 6 of 6"]
    places = [said.find(words) for words in order]
    assert -1 not in places and places == sorted(places), dict(zip(order, places, strict=True))
    assert sorted(path.name for path in (tmp_path / "out" / "mine").iterdir()) == ["env.json", "results.csv", "samples.jsonl", "summary.md"]


def test_the_table_comes_before_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are handed out while the figures are still to be drawn."""
    (tmp_path / "mine.toml").write_text(SWEEP)
    order: list[object] = []
    monkeypatch.setattr("harness.report.redraw", lambda *given, **more: order.append(more["figures"]) or [])
    wanted = experiment.Options(str(tmp_path / "mine.toml"), device="cpu", output_dir=tmp_path / "out", only=("S8",))
    experiment.run_sweep(wanted, measured=lambda rows, seed: order.append([row.Test for row in rows]))
    assert order == [["S8", "S8"], True]
