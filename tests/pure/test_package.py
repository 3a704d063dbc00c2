"""The package fa_cli as its users have it, from a wheel and outside of the checkout: names, types, what notebooks show."""

from __future__ import annotations

import html.parser
import inspect
import os
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rows import row

from harness.check.contender import Contender
from harness.fault import UsageFault
from harness.kernel import find
from harness.problem import Problem
from harness.row import Rows
from harness.verbs import experiment, run
from harness.verbs.sweep import Options

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = row("fa2", "S512", 1.5)

USER = """\
from pathlib import Path

import fa_cli
from fa_cli import Problem, attention, experiment, frame, run

results = run(["fa2", "naive"], "both", problem=Problem.of(batch=1, heads=2, seq=64, dim=64), device="cpu", data_root=Path("data"))
milliseconds: float | None = results[0].time_ms["forward"]
passed: bool = results[0].passed
worst: float = run(Path("mine.cu"), data_root="data")[0].verdicts["O"].max_abs
rows = experiment("seqlen", device="cpu", computes=["fa2"], peers=[], only="S1*", output_dir=Path("out"))
names: list[str] = [row.Kernel for row in rows]
table, o = frame(rows), attention
version: str = fa_cli.__version__
"""
WRONG = """\
from fa_cli import experiment, run
experiment("seqlen", devise="cpu")
experiment("seqlen", computes=3)
run("fa2", problem="B1_H2")
fast: str = run("fa2")[0].passed
experiment("seqlen")[0].Kernels
"""


@pytest.fixture(scope="session")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of the wheel alone, without what it depends on; its site-packages."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheel.extractall(packages)
    return packages


def outside(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the installed package, from another folder."""
    environment = os.environ | {"PYTHONPATH": str(installed), "FA_CLI_DEVICE": "cpu", "MPLBACKEND": "Agg"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_names_load_when_they_are_used(installed: Path, tmp_path: Path) -> None:
    """`import fa_cli` loads nothing; run brings numpy, and neither torch nor pandas."""
    code = "import sys, fa_cli; heavy = lambda: [m for m in ('numpy', 'torch', 'pandas', 'click', 'rich') if m in sys.modules]\n"
    code += "print(fa_cli.__file__, fa_cli.__version__, heavy())\n"
    code += "from fa_cli import run, experiment, Problem; print(run.__module__, experiment.__name__, Problem.of(), heavy())\n"
    code += "print(hasattr(fa_cli, 'nothing'), {'run', 'frame', 'sdpa', '__version__'} <= set(dir(fa_cli)))"
    done = outside(installed, tmp_path, "-c", code)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert done.stdout.splitlines() == [
        f"{installed / 'fa_cli' / '__init__.py'} {version} []",
        "fa_cli.harness.verbs.run experiment Problem(B2_H8_S512_D64) ['numpy']",
        "False True",
    ], done.stderr
    assert outside(installed, tmp_path, "-m", "fa_cli", "--version").stdout == f"fa-cli {version}\n"
    assert "Did you mean: 'attention'?" in outside(installed, tmp_path, "-c", "import fa_cli; fa_cli.atention").stderr


def test_the_metadata_has_addresses_and_says_typed(installed: Path) -> None:
    (metadata,) = installed.glob("fa_harness-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    urls = [line.removeprefix("Project-URL: ").partition(", ") for line in lines if line.startswith("Project-URL: ")]
    assert len(urls) >= 2 and all(address.startswith("https://") for _, _, address in urls)
    assert "Classifier: Typing :: Typed" in lines and (installed / "fa_cli" / "py.typed").is_file()


def test_a_users_script_is_typed(installed: Path, tmp_path: Path) -> None:
    """mypy --strict knows the options of experiment and run and what they return: it accepts one script, and each line of the other not."""
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    python = installed.parent.parent.parent / "bin" / "python"
    words = ["-m", "mypy", "--strict", "--no-incremental", "--python-executable", str(python), "right.py", "wrong.py"]
    said = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert [line.split(": ")[0] for line in said.splitlines() if "error:" in line] == [f"wrong.py:{n}" for n in range(2, 7)], said


def test_the_tour_runs(installed: Path, tmp_path: Path) -> None:
    """Every cell of the notebook, on the CPU; what it shows are tables of results and rows."""
    done = outside(installed, tmp_path, str(ROOT / "tests" / "support" / "notebook.py"), str(ROOT / "experiments" / "tour.ipynb"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<table>") == 3 and "FAIL" not in done.stdout
    assert "races on shared memory in attend" in done.stdout and "False; O; " in done.stdout


def test_what_is_printed_is_one_line() -> None:
    problem, kernel = Problem.of(1, 2, 64, 64, causal=True, scale=0.5), find("fa2", "backward")
    contender = Contender("fa2", {"backward": kernel}, tiles={"RESIDENT": 64})
    assert repr(problem) == "Problem(B1_H2_S64_D64 causal scale=0.5)"
    assert repr(kernel) == "Kernel(07_fa2_backward.cu)"
    assert repr(contender) == "Contender(fa2: 07_fa2_backward.cu, RESIDENT=64)"
    assert repr(ROW) == "Row(fa2 FOR B4_H8_S512_D64 float32: PASS, 1.5 ms warm)"
    assert repr(Rows([ROW, ROW])).splitlines() == [repr(ROW)] * 2


def test_results_print_and_show_as_a_table(tmp_path: Path) -> None:
    """A row a pass; and the problem's own mask is what runs."""
    results = run.run("naive", "both", problem=Problem.of(1, 1, 16, 16, causal=True), device="cpu", data_root=tmp_path)
    assert results[0].problem.causal
    assert repr(results).startswith("Result(naive both B1_H1_S16_D16 causal on cpu: PASS, forward ") and "\n" not in repr(results)
    assert repr(results[0].passes["backward"]).startswith("PassResult(naive: PASS, dQ ")
    cells = Cells(results._repr_html_())
    assert cells.found[:5] == ["problem", "device", "kernel", "pass", "verdict"] and cells.found.count("PASS") == 2


def test_run_takes_paths_and_texts(tmp_path: Path) -> None:
    """A kernel's path and a folder's, each as a Path or as a text."""
    (tmp_path / "mine_forward.cu").write_text(find("naive", "forward").path.read_text())
    small = Problem.of(1, 1, 16, 16)
    (result,) = run.run(tmp_path / "mine_forward.cu", problem=small, device="cpu", data_root=str(tmp_path))
    assert result.passed and result.outputs == tmp_path / "B1_H1_S16_D16"
    (result,) = run.run(["naive"], data_folder=str(tmp_path / "B1_H1_S16_D16"), device="cpu")
    assert result.passed


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"computes": []}, "no kernel to run"),
        ({"mode": "xx"}, "unknown mode 'xx'"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"computes": "torch-cpu", "check": "race"}, "--check has no effect on torch-cpu"),
        ({"computes": ["torch-cpu"], "schedule_seed": 1}, "--schedule-seed has no effect on torch-cpu"),
        ({"computes": "torch-cpu", "tiles": {"A": 3}}, "--tile has no effect on torch-cpu"),
    ],
)
def test_run_refuses_before_it_writes(given: dict[str, Any], what: str, tmp_path: Path) -> None:
    """What the command line cannot be given, and what would have no effect."""
    with pytest.raises(UsageFault, match=what):
        run.run(**{"problem": Problem.of(1, 1, 16, 16), "device": "cpu", "data_root": tmp_path} | given)
    assert not list(tmp_path.iterdir())


def test_experiment_refuses_a_mode_that_there_is_not(tmp_path: Path) -> None:
    """The modes are listed, and nothing is written."""
    with pytest.raises(UsageFault, match="unknown mode 'xx'"):
        experiment.experiment("seqlen", mode="xx", device="cpu", output_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_table_escapes_and_leaves_out_what_is_empty() -> None:
    cells = Cells(Rows([replace(ROW, Kernel="<b>&", TFLOPS=None, MaxError=1 / 3)])._repr_html_())
    assert "<b>&" in cells.found and "0.3333" in cells.found and "TFLOPS" not in cells.found
    assert Rows()._repr_html_() == "<table><tr></tr></table>"


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def test_experiment_takes_what_options_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same names, with the same defaults; a text stands for a list of one."""
    given: list[Options] = []
    monkeypatch.setattr(experiment, "run_sweep", lambda options: given.append(options) or experiment.Outcome([ROW], []))
    assert experiment.experiment("seqlen", computes="fa2", peers=[], output_dir="out") == [ROW]
    assert given == [Options("seqlen", computes=("fa2",), peers=[], output_dir=Path("out"))]
    signature = inspect.signature(experiment.experiment)
    assert list(signature.parameters) == list(inspect.signature(Options).parameters) and signature.return_annotation == "Rows"
    with pytest.raises(TypeError, match="devise"):
        experiment.experiment("seqlen", devise="cpu")


def test_an_operator_without_torch_says_what_to_install() -> None:
    """An ImportError with a hint, for each name of PyTorch's; a name that there is not is an AttributeError."""
    code = "import sys; sys.modules['torch'] = None\ntry: from fa_cli import ring_attention\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("ring_attention is an operator of PyTorch, which is not installed\nhint: pip install") and not done.stderr
