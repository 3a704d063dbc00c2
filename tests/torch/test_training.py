"""experiments/training: the same training with our attention and with torch's, what a step costs, and what is written of it."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import Result

torch = pytest.importorskip("torch")
import ring_jobs  # noqa: E402
import world  # noqa: E402

from harness.torch_op import sdpa, training  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Result]
SMALL = training.Size(layers=1, heads=2, dim=32, seq=64, batch=2, steps=8)
SWEEP = 'title = "a small one"\n[training]\nlayers = 1\nheads = 2\ndim = 32\nseq = 64\nbatch = 2\nsteps = 8\ndtype = "float32"\n'


def script(name: str) -> Any:
    """A script of experiments/training, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / "training" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_that_are_compared() -> None:
    """One that is far from the first, or not a number, in any place of the row."""
    steps, one = script("steps"), torch.tensor([3.0, 4.0])
    model = steps.Model("a small one", 1, 1, 1, 1, 1, 1, 1, 1)
    steps.compare(model, {"ours": one, "theirs": one * 1.04})
    for wrong in (one * 1.06, one * math.nan, one * math.inf):
        for gradients in ((one, wrong), (wrong, one), (one, wrong, one)):
            with pytest.raises(ClickException, match="something else"):
                steps.compare(model, dict(zip("abc", gradients, strict=False)))


@pytest.fixture(scope="module")
def train() -> Any:
    """The script, imported."""
    return script("train")


def test_parts_of_a_step() -> None:
    """Overlapping kernels count once; NCCL's, where nothing else runs; small kernels have no line."""
    kernels = [("forward(Args)", 1, 4), ("gemm", 3, 6), ("ncclDevKernel_SendRecv(x)", 5, 8), ("fill", 9.95, 10), ("forward(Args)", 10, 11)]
    found = script("steps").parts(kernels)
    assert list(found) == ["step", "computing", "communicating alone", "idle", "forward", "gemm", "ncclDevKernel_SendRecv"]
    assert [n for n, _ in found.values()] == [5, 4, 1, 0, 2, 1, 1]
    assert [ms for _, ms in found.values()] == pytest.approx([10, 6.05, 2, 1.95, 4, 3, 3])


def test_both_curves_are_the_same(device: Any) -> None:
    """Float32 losses within rounding of each other, falling, and torch's function back in its place."""
    size = dataclasses.replace(SMALL, layers=2)
    ours, theirs = (training.losses(size, str(device), attend) for attend in (sdpa, training.TORCH))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[-1] < ours[0] and torch.nn.functional.scaled_dot_product_attention is training.TORCH


def test_the_experiment_measures_each_in_turn(fa_cli: Run, tmp_path: Path, device: Any) -> None:
    """A line for each attention with its rates and the same loss; files, figure and the environment's model."""
    (tmp_path / "small.toml").write_text(SWEEP)
    asked = ("--compute", "fa2", "--peers", "torch-math", "--json")
    done = fa_cli("experiment", "small.toml", "--device", str(device), "--full", *asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["attention"] for row in rows] == ["fa2", "fa2 deterministic", "torch-math"]
    assert all(row["status"] == "PASS" and 0 < row["p20"] <= row["tokens_per_s"] <= row["p80"] for row in rows)
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 1e-2
    assert all((row["step_peak_bytes"] is None) == (device.type == "cpu") for row in rows)
    folder = tmp_path / "experiment_results" / "small"
    with open(folder / "speed.csv", newline="") as file:
        assert [row["attention"] for row in csv.DictReader(file)] == [row["attention"] for row in rows]
    assert json.loads((folder / "env.json").read_text())["model"].startswith("1 layers, 2 heads of 32")
    assert (folder / "training_speed.png").stat().st_size > 5000
    only = ("--compute", "fa2", "--peers", "none", "--no-figures")
    assert fa_cli("experiment", "small.toml", "--device", str(device), "--full", *only).exit_code == 0
    assert sorted(file.name for file in (tmp_path / "experiment_results" / "small-2").iterdir()) == ["env.json", "speed.csv"]


def test_a_loss_that_does_not_fall_and_a_kernel_that_cannot_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that gives NaN fails; one that refuses the model's type costs its own line; the others go on."""
    ways = training.contenders("cpu", {"mma_qreg_async": "mma_qreg_async"}, ("torch-math",), True)
    ways["broken"] = lambda q, *_, **__: q * float("nan")
    refused, fine, broken = training.speeds(SMALL, "cpu", ways, turns=2, steps=2)
    assert refused.status == "REFUSED" and "does not take float32" in refused.why and refused.tokens_per_s is None
    assert fine.status == "PASS" and fine.steps == 6
    assert broken.status == "FAIL" and broken.why.endswith("to nan") and broken.loss is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "both"), "takes no --mode"),
        (("--only", "S16"), "takes no --only"),
        (("--peers", "fa3"), "fa3 is no attention of a training"),
        (("--compute", "nobody"), "unknown kernel 'nobody'"),
    ],
)
def test_what_a_training_has_not_is_refused(fa_cli: Run, arguments: tuple[str, ...], message: str) -> None:
    """Exit code 2, before anything is trained or written."""
    done = fa_cli("experiment", "training", "--device", "cpu", *arguments)
    assert done.exit_code == 2 and message in done.output


def test_the_plan_names_the_model_and_the_attentions(fa_cli: Run, tmp_path: Path) -> None:
    """--dry-run runs and writes nothing."""
    done = fa_cli("experiment", "training", "--device", "cpu", "--dry-run")
    assert (
        done.exit_code == 0
        and "2 layers, 2 heads of 32" in done.output
        and "by fa2+split, fa2+split deterministic, torch-math" in done.output
    )
    assert not (tmp_path / "experiment_results").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SWEEP.replace("layers = 1", "layers = 0"), "a training has layers"),
        (SWEEP.replace("steps = 8\n", ""), "a training has layers"),
        (SWEEP.replace("float32", "int8"), "the dtype of a training is 'int8'"),
        ("shapes = [{ batch = 1, heads = 2, seq = 16, dim = 16 }]\n" + SWEEP, "it has shapes and training"),
    ],
)
def test_a_model_that_is_none_is_refused(fa_cli: Run, tmp_path: Path, text: str, message: str) -> None:
    """A file that is no sweep, by name and reason."""
    (tmp_path / "wrong.toml").write_text(text)
    done = fa_cli("experiment", "wrong.toml", "--device", "cpu")
    assert done.exit_code == 3 and message in done.output


def test_the_figure_is_drawn_of_the_record(train: Any, tmp_path: Path) -> None:
    """The committed losses are those of both, and are drawn."""
    assert (train.HERE / "loss_cpu.csv").read_text().startswith("step,torch,fa_cli\n")
    train.draw("_cpu", pictures=tmp_path)
    assert (tmp_path / "training_loss_cpu.png").stat().st_size > 10000


def test_a_training_over_four_ranks_has_the_same_losses(tmp_path: Path) -> None:
    """The rows of each batch shared out, of a length that four ranks do not divide: every rank has the single one's losses."""
    size = dataclasses.replace(SMALL, layers=2, seq=62)  # fewer steps than its 8 gain less than texts differ
    alone = training.losses(size, "cpu", sdpa)
    for mine in world.run(4, ring_jobs.trained, tmp_path, size):
        assert mine == pytest.approx(alone, abs=1e-4), mine
    assert alone[-1] < alone[0]


def below_torchrun(name: str, folder: Path, *more: str) -> list[dict[str, str]]:
    """The rows that a script of experiments/training writes on two ranks."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "experiments" / "training" / f"{name}.py")]
    more = ("--device", "cpu", *more, "--output-dir", str(folder))
    done = subprocess.run([sys.executable, *words, *more], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    with open(next(folder.glob("*ranks*.csv")), newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.days(14)
def test_the_script_below_torchrun(tmp_path: Path) -> None:
    """Two ranks write one file, of both trainings, whose losses agree."""
    rows = below_torchrun("train", tmp_path, "--steps", "3")
    assert [float(row["over_ranks"]) for row in rows] == pytest.approx([float(row["alone"]) for row in rows], abs=1e-4) and len(rows) == 3
    assert json.loads((tmp_path / "loss_ranks_env_cpu.json").read_text())["ranks"] == 2


@pytest.mark.days(14)
def test_what_a_step_costs_below_torchrun(tmp_path: Path) -> None:
    """A line for each turn with own rows and with each form; with the same weights their gradients agree, or the script fails."""
    rows = below_torchrun("steps", tmp_path, "--turns", "2")
    assert [row["attention"] for row in rows] == 2 * ["own rows", "ring", "all_to_all", "auto"]
    assert all(float(row["step_ms"]) > 0 and int(row["tokens_per_s"]) > 0 and row["ranks"] == "2" for row in rows)
    assert json.loads((tmp_path / "ranks_env.json").read_text())["ranks"] == 2
    assert not (tmp_path / "ranks_parts.csv").exists() and "| small, 4 x 48 |" in (tmp_path / "ranks.md").read_text()
