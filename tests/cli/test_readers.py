"""What files, flags and the environment may hold: told before the work, with the exit code of its kind, and nothing written elsewhere."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rows import append_row, row

from harness.problem import Problem
from harness.verbs.sweep import load

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = ("--batch", 1, "--heads", 1, "--seq", 8, "--dim", 8)
GOOD = "seq = 16, dim = 16, batch = 1, heads = 1"

BAD_SWEEPS = {
    "test = 5": f"shapes = [{{ test = 5, {GOOD} }}]",
    "test of 201": f"shapes = [{{ test = '{'x' * 201}', {GOOD} }}]",
    "test of NUL": f'shapes = [{{ test = "a\\u0000b", {GOOD} }}]',
    "test of two lines": f'shapes = [{{ test = "a\\nb", {GOOD} }}]',
    "batch and tokens": f"shapes = [{{ tokens = 32, {GOOD} }}]",
    "cpu = 0": f"cpu = 0\nshapes = [{{ {GOOD} }}]",
    "title = 3": f"title = 3\nshapes = [{{ {GOOD} }}]",
    "ceilings = 1": f"ceilings = 1\nshapes = [{{ {GOOD} }}]",
    'causal = ""': f'shapes = [{{ causal = "", {GOOD} }}]',
    "seq = 0": "shapes = [{ tokens = 64, seq = 0, dim = 16 }]",
    "tokens": "shapes = [{ tokens = 64, dim = 16 }]",
    "batch = 1.5": "shapes = [{ batch = 1.5, seq = 16 }]",
    "seq = 16.0": "shapes = [{ seq = 16.0 }]",
    "dim = nan": "shapes = [{ dim = nan }]",
    "batch = true": "shapes = [{ batch = true }]",
    "scale = inf": f"shapes = [{{ scale = inf, {GOOD} }}]",
    "nested": "shapes = " + "[" * 5000 + "]" * 5000,
    "digits": f"shapes = [{{ batch = {'9' * 5000} }}]",
    "product": "shapes = [{ batch = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], heads = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "
    "seq = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], dim = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], seq_kv = [1, 2] }]",
}


@pytest.mark.parametrize("case", BAD_SWEEPS)
def test_values_of_a_sweep_have_types(case: str, fa_cli: Run, tmp_path: Path) -> None:
    """A bad value of a sweep is exit 3 with a message, and no results.csv is begun."""
    (tmp_path / "mine.toml").write_text(BAD_SWEEPS[case])
    result = fa_cli("experiment", "mine.toml")
    assert result.exit_code == 3 and "internal" not in result.stderr and "hint: " in result.stderr, result.stderr
    assert os.listdir(tmp_path) == ["mine.toml"]


def test_a_name_of_a_test_is_read_again(tmp_path: Path) -> None:
    """The longest that there may be, with what a line of text may hold."""
    (tmp_path / "mine.toml").write_text(f"shapes = [{{ test = 'ü, \"{'x' * 196}', tokens = 64, seq = 16, dim = 16, heads = 1 }}]")
    ((test, problem),) = load(str(tmp_path / "mine.toml")).shapes
    assert len(test) == 200 and problem.batch == 4


@pytest.mark.parametrize("scale", ["nan", "inf", "-inf", "1e400", "1e39"])
def test_a_scale_that_is_not_finite_is_exit_2_before_the_work(scale: str, fa_cli: Run, tmp_path: Path) -> None:
    """Beside --data too, where the shape comes from the folder."""
    assert fa_cli("gen-data", *SHAPE).exit_code == 0
    before = sorted(os.listdir(tmp_path / "data/B1_H1_S8_D8"))
    result = fa_cli("run", "--compute", "numpy", "--data", "data/B1_H1_S8_D8", "--scale", scale)
    assert result.exit_code == 2 and "finite" in result.stderr and result.stdout == "", result.stderr
    assert sorted(os.listdir(tmp_path / "data/B1_H1_S8_D8")) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": 2**31}, "at most"),
        ({"seq": 10**400}, "at most"),
        ({"batch": True}, "integer"),
        ({"seq": 16.0}, "integer"),
        ({"dim": "64"}, "integer"),
        ({"causal": ""}, "true or false"),
        ({"scale": "1"}, "finite"),
        ({"scale": True}, "finite"),
        ({"dtype": ["float32"]}, "known"),
    ],
)
def test_a_problem_checks_types(changes: dict[str, Any], why: str) -> None:
    """Whoever makes it: a notebook, a sweep, meta.json."""
    from harness.fault import UsageFault

    with pytest.raises(UsageFault, match=why):
        Problem.of(**changes)
    names = {"seq": "seq_q", "dim": "head_dim", "heads": "heads_q"}
    with pytest.raises(UsageFault, match=why):
        Problem.of().with_(**{names.get(name, name): value for name, value in changes.items()})


def test_report_writes_into_its_folder_only(fa_cli: Run, tmp_path: Path) -> None:
    """A device's name with .. in it, and formulas that are none."""
    run = tmp_path / "a/b/c/run"
    for name in ("x/../../../NAME", "$x_{$"):
        append_row(run / "results.csv", row("$x_{$", "S128", 1.0, device_name=name, repro="\x1b[2J"))
    result = fa_cli("report", run, "--title", "$x_{$ | \\frac")
    assert result.exit_code == 0, result.stderr
    assert all(path.parent == run for path in tmp_path.rglob("*.*") if path.is_file())
    assert len(list(run.glob("*.png"))) >= 2


@pytest.mark.parametrize(
    ("old", "new"),
    [(",FOR,", ",UP,"), (",PASS,", ",FINE,"), (",512,", ",1e3,"), (",512,", "," + "9" * 400 + ","), (",fa2,", "," + "x" * 200_000 + ",")],
)
@pytest.mark.parametrize("verb", ["compare", "report"])
def test_rows_that_cannot_be_are_exit_3(verb: str, old: str, new: str, fa_cli: Run, tmp_path: Path) -> None:
    """An unknown Type or Status, a size that is none, a field over 128 KB."""
    append_row(tmp_path / "results.csv", row("fa2", "S512", 1.0))
    text = (tmp_path / "results.csv").read_text()
    assert old in text
    (tmp_path / "results.csv").write_text(text.replace(old, new))
    result = fa_cli(verb, *(["."] if verb == "report" else [".", "."]))
    assert result.exit_code == 3 and "results.csv:2" in result.stderr and len(result.stderr) < 1000, result.stderr


def test_a_reader_of_the_folder_does_not_stop_a_run(fa_cli: Run, tmp_path: Path) -> None:
    """A backup that holds a shared lock for a moment is waited for."""
    assert fa_cli("gen-data", *SHAPE).exit_code == 0
    descriptor = os.open(tmp_path / "data/B1_H1_S8_D8", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    threading.Timer(0.3, os.close, [descriptor]).start()
    result = fa_cli("run", "--compute", "numpy", "--data", "data/B1_H1_S8_D8")
    assert result.exit_code == 0, result.stderr


def test_a_nearly_full_disk_is_exit_6(fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hint to free some space, not to take a smaller shape."""
    from types import SimpleNamespace

    from harness.dataset import folder

    monkeypatch.setattr(folder.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    result = fa_cli("gen-data", *SHAPE)
    assert result.exit_code == 6 and "df -h" in result.stderr and "--output-dir" in result.stderr, result.stderr


def test_a_user_without_a_home(fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an entry in passwd, as in a container: what needs the cache says so; the rest works."""

    def unknown(_uid: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "FA_CLI_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert fa_cli("list").exit_code == 0
    assert fa_cli("run", "--compute", "numpy", *SHAPE).exit_code == 0
    result = fa_cli("doctor")
    assert "FA_CLI_CACHE_DIR" in result.stdout and "internal" not in result.stderr, result.output
    from harness.backends import cache_dir
    from harness.fault import EnvironmentFault

    with pytest.raises(EnvironmentFault, match="no home"):
        cache_dir()


@pytest.mark.parametrize("threads", ["9" * 5000, "0", "²", "1e3"])
def test_threads_are_a_number(threads: str, fa_cli: Run) -> None:
    """Of a sensible size; told in a line."""
    result = fa_cli("run", "--compute", "naive", *SHAPE, env={"FA_CLI_THREADS": threads})
    assert result.exit_code == 2 and "FA_CLI_THREADS" in result.stderr and len(result.stderr) < 400, result.stderr


def test_asan_under_a_safe_path(tmp_path: Path) -> None:
    """The child that has AddressSanitizer finds the harness where python leaves out the script's folder."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "FA_CLI_DEVICE": "cpu"}
    words = ["run", "--compute", "naive", *map(str, SHAPE), "--check", "asan"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_large_score(value: float) -> None:
    """Where NaN and Inf are allowed a kernel with a limit on its scores runs, and shows NaN; a large finite score is refused still."""
    import numpy as np

    from harness.check.contender import check_logits
    from harness.fault import UsageFault
    from harness.kernel import find

    problem = Problem.of(1, 1, 4, 4)
    inputs = {name: np.ones((1, 1, 4, 4), np.float32) for name in "QKV"}
    inputs["K"][0, 0, 1, 2] = value
    check_logits(find("mma", "forward"), problem, inputs)
    inputs["Q"][0, 0, 0, 0] = 1e-25  # its square, and that of 1e25, are beyond float32's
    inputs["K"][0, 0, 0, 0] = 1e25
    inputs["K"][0, 0, 1:, 0] = inputs["Q"][0, 0, 1:, 0] = 0
    check_logits(find("mma", "forward"), problem, inputs)
    inputs["K"][0, 0, 2, 2] = 1e6
    with pytest.raises(UsageFault, match="scores as large as 5e"):
        check_logits(find("mma", "forward"), problem, inputs)
