"""experiments/fp8/forms.py: every form that it measures can be launched on an H200, and it runs through where it is short."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from harness.backends import Backend
from harness.kernel import find, planner
from harness.kernel.plan import Device

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "fp8" / "forms.py"


@pytest.fixture(scope="module")
def forms() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("fp8_forms", SCRIPT)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_form_fits(forms: ModuleType) -> None:
    """Each differs from the header's in some value, and has no more shared memory than a block of Hopper."""
    kernel, device = find("float8", "forward", False), Device("cuda", "H200", "sm_90", 132)
    for made, tried in (each for name in forms.SETS for each in forms.SETS[name]):
        own = planner.plan(kernel, made, device)
        assert own.launches[-1].shared <= 232448
        for tiles in tried[1:]:
            plan = planner.plan(kernel, made, device, tiles)
            assert plan.launches[-1].shared <= 232448, tiles
            assert plan.macros != own.macros or tiles.keys() & {"SECTION", "PIECE"}, tiles  # the length says which PIECE is the header's


def test_it_runs(forms: ModuleType, backend: Backend, tmp_path: Path) -> None:
    """Each form of the short set is right, and has a time and its speed beside the header's."""
    forms.main(["--set", "small", "--seconds", "60", "--output", str(tmp_path / "forms.txt")])
    text = (tmp_path / "forms.txt").read_text()
    assert "WRONG" not in text and "header 1.000, V_FIRST 1 " in text and text.count("TFLOP/s") >= 2 and "done after" in text
