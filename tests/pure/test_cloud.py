"""The cloud recipe: nobody runs it here, but its own lines are run, with a stand-in for the service."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import program
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "experiments/cloud_modal.py"


class Service(ModuleType):
    """A stand-in for the package modal: a remote function is called at once, the image takes any step."""

    def __init__(self) -> None:
        super().__init__("modal")
        self.steps: list[tuple[Any, ...]] = []
        self.App = lambda name: self
        self.Image = self
        self.is_local = lambda: True

    def function(self, **options: Any) -> Callable[[Any], Any]:
        def mark(body: Any) -> Any:
            body.remote, body.options = body, options
            return body

        return mark

    def local_entrypoint(self) -> Callable[[Any], Any]:
        return lambda body: body

    def debian_slim(self, **options: Any) -> Any:
        return self

    def add_local_dir(self, *words: Any, **options: Any) -> Any:
        self.steps.append((*words, options))
        return self

    def run_commands(self, *words: str) -> Any:
        self.steps.append(words)
        return self


def test_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go along, the command runs in a folder with them, what it wrote comes back with its exit code, tensors do not."""
    service = Service()
    monkeypatch.setitem(sys.modules, "modal", service)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("FA_CLI_GPU", "L4")
    (tmp_path / "bin").mkdir()
    program.write(
        tmp_path / "bin/fa-cli",
        "import os, pathlib, sys\n"
        "assert os.listdir() == ['mine_forward.cu'] and sys.argv[1:] == ['run', '--compute', './mine_forward.cu']\n"
        "pathlib.Path('data').mkdir(); pathlib.Path('data/Q.bin').write_text('Q'); pathlib.Path('data/meta.json').write_text('{}')\n"
        "sys.exit(1)\n",
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine_forward.cu").write_text("// a kernel")
    (home / "notes.txt").write_text("stays here")
    monkeypatch.chdir(home)
    recipe = runpy.run_path(str(RECIPE))
    with pytest.raises(SystemExit) as stop:
        recipe["main"]("run --compute ./mine_forward.cu")
    assert stop.value.code == 1
    assert [p.relative_to(home).as_posix() for p in (home / "cloud_results").rglob("*.*")] == ["cloud_results/data/meta.json"]
    assert recipe["on_gpu"].options["gpu"] == "L4"
    assert service.steps[0][0] == ROOT and service.steps[1] == ("pip install '/fa-cli[cuda12]'",)


def test_recipe_says_that_it_was_not_run() -> None:
    """At its top and in the folder's README; at most 60 lines."""
    lines = RECIPE.read_text().splitlines()
    assert len(lines) <= 60 and "Not run by us" in lines[0]
    assert "cloud_modal.py" in (text := (ROOT / "experiments/README.md").read_text()) and "not run by us" in text
