"""env.json: with what a run was made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import files
from harness.files import environment

ROOT = Path(__file__).resolve().parent.parent.parent


def test_environment(tmp_path: Path) -> None:
    """Python, platform, versions, command and the backend's facts, as strict JSON."""
    environment.write_env(tmp_path / "env.json", environment.environment(device="cpu", driver=None))
    found = environment.read_env(tmp_path / "env.json")
    assert found == json.loads((tmp_path / "env.json").read_text())
    assert found["device"] == "cpu" and found["driver"] is None
    assert found["packages"]["numpy"] == __import__("numpy").__version__
    assert found["command"] == sys.argv
    with pytest.raises(ValueError, match="JSON"):
        files.json_bytes({"clock": float("nan")})


def test_environment_names_the_commit() -> None:
    """The commit checked out, with + where the tree differs from it; None where there is no repository."""
    commit = environment.environment()["git_commit"]
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        assert commit.rstrip("+") == head
    else:
        assert commit is None


def test_environment_imports_nothing_heavy() -> None:
    """Versions are asked for by name: CuPy and torch take seconds to import."""
    code = "import sys; from harness.files import environment; environment.environment(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "harness.files.environment" in loaded
    assert not {"cupy", "torch", "pandas", "matplotlib"} & set(loaded)
