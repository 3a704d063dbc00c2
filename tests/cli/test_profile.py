"""`fa-cli profile`: what it says without a GPU, a tool or a permission, and the whole way with a stand-in for ncu and nsys."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import program
import pytest
from click.testing import Result

from harness.verbs.profile import nsight as profile
from harness.verbs.selftest.mutant import edited

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 33, "--dim", 16, "--device", "auto")

NCU = """\
import re, subprocess, sys
words = sys.argv[1:]
if "--import" in words:
    assert open(words[-1]).read() == "made"
    print('"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"\\n"","","ns","register/thread"')
    print('"0","forward","145,024","168"\\n"1","forward","1,024","32"')
else:
    assert re.fullmatch(words[words.index("--kernel-name") + 1].removeprefix("regex:"), "forward")
    assert "dram__bytes.sum" in words[words.index("--metrics") + 1] and "none" == words[words.index("--clock-control") + 1]
    report = words.index("--export") + 1
    open(words[report] + ".ncu-rep", "w").write("made")
    RUN
"""
NSYS = """\
import sys
words = sys.argv[1:]
if words[0] == "profile":
    open(words[words.index("--output") + 1] + ".nsys-rep", "w").write("made")
else:
    assert words[0] == "stats" and open(words[-1]).read() == "made"
    print("Processing\\nTime (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name")
    print("100.0,3000000,20,150000.0,149000.0,140000,180000,900.1,forward")
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: for this process; the profiled one would still run on the CPU."""
    monkeypatch.setattr(profile, "nvidia_driver", lambda: True)


@pytest.fixture
def tool(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a Python program on PATH under a tool's name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, text: str) -> None:
        program.write(folder / name, text)

    return put


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_without_a_gpu_is_exit_4(device: str, fa_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said at once, and nothing is written; but where the CPU engine may count."""
    monkeypatch.setattr(profile, "nvidia_driver", lambda: device == "cpu")
    result = fa_cli("profile", "--device", device, *(() if device == "cuda" else ("--tool", "nsys")))
    assert result.exit_code == 4 and result.stdout == "" and not list(tmp_path.iterdir())
    assert "error: no GPU to profile" in result.stderr and "or rent one: experiments/cloud_modal.py of the sources" in result.stderr
    assert (ROOT / "experiments/cloud_modal.py").is_file(), "the hint names a file"


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_cpu_engine_counts_bank_conflicts(device: str, fa_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row of each entry; the line that conflicts; also as JSON. A wrong kernel is not profiled."""
    monkeypatch.setattr(profile, "nvidia_driver", lambda: device == "cpu")
    asked = ("profile", "--compute", "mma", *SHAPE[:-2], "--dtype", "float16", "--device", device)
    result = fa_cli(*asked)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^mma forward: forward: \S+11_mma_forward.cu:\d+ takes (\d+) wavefronts, without bank conflicts \d+$", result.stdout, re.M
    )
    assert "note: counted by the CPU engine" in result.stderr
    (row,) = csv.DictReader((tmp_path / "profiles/counters.csv").read_text().splitlines())
    assert float(row["shared_over_ideal"]) > 1 and row["entry"] == "forward"
    (told,) = json.loads(fa_cli(*asked, "--json").stdout)["rows"]
    assert sum(line["wavefronts"] for line in told["lines"]) == told["metrics"]["shared_wavefronts"] == float(row["shared_wavefronts"])
    requests = told["metrics"]["global_load_requests"]
    assert (
        sum(line["requests"] for line in told["global_lines"] if line["kind"] == "load") == requests == float(row["global_load_requests"])
    )
    assert re.search(
        r"^mma forward: forward: \S+_mma_forward.cu:\d+ has \d+ stores of a warp, [\d.]+ sectors each, [\d.]+ if", result.stdout, re.M
    )
    assert "takes" not in fa_cli(*asked[:2], "fa2", *asked[3:]).stdout
    text = (ROOT / "kernels_cu/07_fa2_forward.cu").read_text()
    Path("mine_forward.cu").write_text(edited(text, ("= softmax_scale * fa::log2e", "= 2 * softmax_scale * fa::log2e")))
    wrong = fa_cli(*asked[:2], "./mine_forward.cu", *asked[3:])
    assert wrong.exit_code == 1 and "mine_forward is wrong, and is not profiled" in wrong.stderr


@pytest.mark.parametrize(("name", "package"), [("ncu", "nsight-compute"), ("nsys", "nsight-systems")])
def test_without_the_tool_is_exit_4(name: str, package: str, gpu: None, fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, and the package that has it."""
    monkeypatch.setattr(shutil, "which", lambda program, path=None: None)
    result = fa_cli("profile", "--tool", name, "--device", "auto")
    assert result.exit_code == 4
    assert f"error: {name} is not on PATH" in result.stderr and f"hint: apt install {package}" in result.stderr


def test_an_unknown_kernel_is_exit_2(fa_cli: Run) -> None:
    """Before it is asked for a GPU."""
    result = fa_cli("profile", "--compute", "nonesuch")
    assert result.exit_code == 2 and "unknown kernel 'nonesuch'" in result.stderr


def test_counters_are_printed_and_written(tool: Callable[[str, str], None], fa_cli: Run, tmp_path: Path) -> None:
    """A table with a column a launch, counters.csv, the report for ncu-ui; an old report is replaced."""
    tool("ncu", NCU.replace("RUN", ""))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/fa2_forward_B1_H2_S33_D16_causal.ncu-rep").write_text("old")
    result = fa_cli("profile", "--causal", *SHAPE, "--output-dir", "out")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["time_us", "145", "1.024"] in lines and ["registers", "168", "32"] in lines and ["tensor_pct", "-", "-"] in lines
    assert result.stdout.endswith("written  out\n") and "stall_barrier" not in result.stdout
    first, second = csv.DictReader((tmp_path / "out/counters.csv").read_text().splitlines())
    assert (first["kernel"], first["pass"], first["entry"], first["problem"]) == ("fa2", "forward", "forward", "B1_H2_S33_D16 causal")
    assert float(first["time_us"]) == 145.024 and float(second["time_us"]) == 1.024 and first["tensor_pct"] == ""


def test_json(tool: Callable[[str, str], None], fa_cli: Run) -> None:
    """Rows, a launch each; two computes follow each other."""
    tool("ncu", NCU.replace("RUN", ""))
    found = json.loads(fa_cli("profile", "--compute", "fa2,fa2", "--json", *SHAPE).stdout)
    assert found["passed"] is True and len(found["rows"]) == 4
    assert found["rows"][0]["metrics"]["registers"] == 168 and found["rows"][0]["metrics"]["tensor_pct"] is None


def test_nsys(tool: Callable[[str, str], None], fa_cli: Run, tmp_path: Path) -> None:
    """Times of each entry, in a table of their own."""
    tool("nsys", NSYS)
    result = fa_cli("profile", "--tool", "nsys", *SHAPE)
    assert result.exit_code == 0, result.output
    assert ["median_us", "149"] in [line.split() for line in result.stdout.splitlines()]
    (row,) = csv.DictReader((tmp_path / "profiles/kernels.csv").read_text().splitlines())
    assert (row["launches"], row["mean_us"]) == ("20.0", "150.0")


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            4,
            ("ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0"),
        ),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", 4, ("DCGM", "hint: dcgmi profile --pause")),
        (
            "==ERROR== something new\n==WARNING== No kernels were profiled.",
            5,
            ("ncu profiled nothing", "something new", "hint: fa-cli run"),
        ),
    ],
)
def test_a_tool_that_gives_nothing(said: str, code: int, words: tuple[str, ...], tool: Callable[[str, str], None], fa_cli: Run) -> None:
    """What it said, in our words where we know them; no table is written, and an old report is not read."""
    tool("ncu", NCU.partition("else:")[0] + f"else:\n    print({said!r})\n")
    Path("profiles").mkdir()
    Path("profiles/fa2_forward_B1_H2_S33_D16.ncu-rep").write_text("made")
    result = fa_cli("profile", *SHAPE)
    assert result.exit_code == code and result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr
    assert not Path("profiles/counters.csv").exists()


@needs_compiler
@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (
            ("= softmax_scale * fa::log2e", "= 2 * softmax_scale * fa::log2e"),
            1,
            ("mine_forward is wrong, and is not profiled", "O is wrong at batch"),
        ),
        (("= softmax_scale * fa::log2e", "= softmax_scale * nonesuch"), 5, ("does not compile", "mine_forward.cu")),
        (('dtypes = ["float32", ', "dtypes = ["), 2, ("does not take float32",)),
    ],
)
def test_what_goes_wrong_in_the_profiled_process(
    edit: tuple[str, str], code: int, words: tuple[str, ...], tool: Callable[[str, str], None], fa_cli: Run
) -> None:
    """Its fault comes back with its words and its exit code, whatever the tool makes of it."""
    tool("ncu", NCU.replace("RUN", "subprocess.run(words[report + 1 :])"))
    text = (ROOT / "kernels_cu/07_fa2_forward.cu").read_text()
    Path("mine_forward.cu").write_text(edited(text, edit))
    result = fa_cli("profile", "--compute", "./mine_forward.cu", *SHAPE)
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stdout == "" and not Path("profiles/counters.csv").exists()
