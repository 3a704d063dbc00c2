"""experiments/training: the same training with our attention and with torch's, and what is written of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def train() -> Any:
    """The script, imported."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "experiments" / "training" / "train.py")
    assert spec and spec.loader
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)  # where dataclasses looks for it
    spec.loader.exec_module(module)
    return module


def test_both_curves_are_the_same(device: Any, train: Any) -> None:
    """Float32 losses within rounding of each other, falling, and torch's function back in its place."""
    size = dataclasses.replace(train.SIZES["cpu"], steps=8, batch=2)
    ours, theirs = (train.losses(size, str(device), attend) for attend in (train.torch_op.sdpa, train.TORCH))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[-1] < ours[0] and torch.nn.functional.scaled_dot_product_attention is train.TORCH


def test_speed_of_each(device: Any, train: Any) -> None:
    """A row for each contender, with tokens a second."""
    rows = train.speed(dataclasses.replace(train.SIZES["cpu"], batch=1, layers=1), str(device), turns=2, steps=1)
    assert {"fa-cli", "torch-math"} <= {row["attention"] for row in rows} and all(row["tokens_per_s"] > 0 for row in rows)


def test_the_figure_is_drawn_of_the_record(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed losses are those of both, and are drawn."""
    assert (train.HERE / "loss_cpu.csv").read_text().startswith("step,torch,fa_cli\n")
    (tmp_path / "plots").mkdir()
    monkeypatch.setattr(train, "ROOT", tmp_path)
    train.draw("_cpu")
    assert (tmp_path / "plots" / "training_loss_cpu.png").stat().st_size > 10000
