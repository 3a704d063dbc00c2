"""The script of experiments/ring that takes the numbers on several GPUs, on ranks of the CPU: nothing else here reads it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rooms import ROOT

from harness.ring import start


def test_a_ring_beside_one_device_of_record(tmp_path: Path) -> None:
    """Every line it is to have for a shape, right against float64, and rows of ring.csv."""
    own = ["--device", "cpu", "--no-torch", "--compute", "naive", "--only", "32k-causal", "--output", str(tmp_path)]
    words = [start.mpiexec(), "-n", "2", sys.executable, str(ROOT / "experiments/ring/measure.py"), *own]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, env=os.environ | {"FA_CLI_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "ring.jsonl").read_text().splitlines()]
    found = [(line["what"], line.get("pass"), line.get("overlap")) for line in lines]
    rings = [("ring", pass_, overlap) for overlap in (False, True) for pass_ in ("forward", "backward")]
    single = [("one GPU", pass_, None) for pass_ in ("forward", "backward")]
    rest = [(what, None, None) for what in ("difference to one GPU, rows of the first rank", "verdict")]
    assert found == [("bandwidth", None, None), *rings, *single, ("both", None, None), *rest]
    assert all(lines[-1][name][0] for name in ("O", "logsumexp", "dQ", "dK", "dV"))
    rows = list(csv.DictReader((tmp_path / "ring.csv").read_text().splitlines()))
    assert [(row["pass"], row["overlap"], row["status"]) for row in rows] == [
        (pass_, overlap, "PASS") for overlap in ("false", "true") for pass_ in ("forward", "backward")
    ]


@pytest.mark.days(14)
def test_the_forms_of_the_operator_of_record(tmp_path: Path) -> None:
    """Over gloo: a shape that all-to-all does not take has the reason, and what is computed is right."""
    pytest.importorskip("torch.distributed.run")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(ROOT / "experiments/ring/forms.py")]
    own = ["--device", "cpu", "--kernel", "naive", "--only", "causal-8", "--output", str(tmp_path)]
    here = os.environ | {"FA_CLI_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words, *own], capture_output=True, text=True, check=False, timeout=200, env=here)
    assert done.returncode == 0, done.stderr
    lines = {line["form"]: line for line in map(json.loads, (tmp_path / "forms_cpu.jsonl").read_text().splitlines())}
    assert (
        set(lines) == {"ring", "all_to_all", "auto"} and "8 key heads cannot be shared out evenly to 3 ranks" in lines["all_to_all"]["why"]
    )
    for form in ("ring", "auto"):
        assert lines[form]["passed"] and 0 < lines[form]["error of O"] < 2**-8, lines[form]
    assert json.loads((tmp_path / "forms_env_cpu.json").read_text())["ranks"] == 3
