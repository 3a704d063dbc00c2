"""The scripts of experiments/ against today's harness: a call that it no longer knows is found here, not on a rented GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What mypy says of names that the harness has on a device only (ArrayModule is what numpy and cupy share), and of others' packages.
ELSEWHERE = ('"ArrayModule"', "does not explicitly export", '"LayoutEngine"', '"plt.Axes"')


def test_scripts_call_what_the_harness_has(tmp_path: Path) -> None:
    """mypy finds no unknown name, attribute or argument in them, whatever it says of their types."""
    pytest.importorskip("mypy")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "experiments").rglob("*.py"))
    words = ["-m", "mypy", "--no-pretty", "--cache-dir", str(tmp_path), *files]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and f"{len(files)} source files" in done.stdout, done.stdout[-2000:] + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith(("[call-arg]", "[attr-defined]", "[name-defined]"))]
    assert not (found := [line for line in lines if not any(each in line for each in ELSEWHERE)]), "\n".join(found)
