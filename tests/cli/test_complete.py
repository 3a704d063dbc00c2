"""Completion in the shell: names of kernels, sweeps, peers, dtypes and data folders, at the cost of --help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, ShellComplete, ZshComplete

import cli
from harness.kernel import catalogue
from harness.terminal import complete
from harness.verbs import sweep

ROOT = Path(__file__).resolve().parent.parent.parent


def completed(*words: str, shell: type[ShellComplete] = BashComplete) -> list[str]:
    """What the last of these words may become."""
    return [item.value for item in shell(cli.main, {}, "fa-cli", "_FA_CLI_COMPLETE").get_completions(list(words[:-1]), words[-1])]


def test_the_names_are_those_of_the_harness() -> None:
    """The lists that are read from file names."""
    assert complete.kernels() == list(dict.fromkeys(kernel.name for kernel in catalogue()))
    assert complete.sweeps() == sorted(sweep.sweeps())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("ver",), ["verify"]),
        (("run", "--compute", "scalar"), ["scalar2d_row_tile"]),
        (("run", "--compute", "fa2,torch-f"), ["fa2,torch-flash"]),
        (("run", "--kernel", "au"), ["auto"]),
        (("run", "--dtype", "b"), ["bfloat16"]),
        (("run", "--mode", "b"), ["backward", "both"]),
        (("run", "--device", "c"), ["cuda", "cpu"]),
        (("run", "--data", ""), ["data/B1_H2_S3_D4"]),
        (("run", "--compute", "./mine"), ["./mine"]),
        (("experiment", "longseq_"), ["longseq_backward"]),
        (("experiment", "--peers", "fa3,num"), ["fa3,numpy"]),
        (("experiment", "--peers", "no"), ["none"]),
        (("verify", "fa2", "nai"), ["naive"]),
        (("tune", "warp_w"), ["warp_wmma"]),
        (("new", "mine", "--from", "nai"), ["naive"]),
        (("compile", "--compute", "fa2,nai"), ["fa2,naive"]),
    ],
    ids=" ".join,
)
def test_completions(words: tuple[str, ...], wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a word that has begun; what is no name is left to the shell's own completion of files."""
    (tmp_path / "data" / "B1_H2_S3_D4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    known = [name for name in wanted if name != "longseq_backward" or name in complete.sweeps()]
    assert completed(*words) == (known or ["longseq_"]) == completed(*words, shell=ZshComplete)


def test_it_imports_no_numpy(tmp_path: Path) -> None:
    """As the shell calls it, in a process of its own."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['fa-cli']\nimport atexit, cli\n"
    program += "atexit.register(lambda: print(*({'numpy', 'rich', 'pandas'} & set(sys.modules)), file=sys.stderr))\ncli.main()\n"
    environment = os.environ | {"_FA_CLI_COMPLETE": "bash_complete", "COMP_WORDS": "fa-cli run --compute na", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("plain,naive\n", "\n")


def test_help_needs_no_docstrings() -> None:
    """PYTHONOPTIMIZE=2 strips them from what is imported; the words are those of every day."""
    for words in ((), ("tune",)):
        said = []
        for level in ("0", "2"):
            wide = os.environ | {"PYTHONOPTIMIZE": level}
            done = subprocess.run(
                [sys.executable, str(ROOT / "cli.py"), *words, "--help"], capture_output=True, text=True, env=wide, check=True
            )
            said.append(done.stdout)
        assert said[0] == said[1] and len(said[0]) > 500
