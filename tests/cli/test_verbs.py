"""The verbs: help, exit codes, JSON, streams, spellings, environment variables. Small shapes on the CPU engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pages
import pytest
from click.testing import Result
from planted import WRONG

import cli
from harness import kernel
from harness.terminal.show import checks
from harness.verbs.compile import CompileRow
from harness.verbs.selftest.mutant import edited

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 33, "--dim", 16)

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", *cli.main.commands])
def test_help(verb: str, fa_cli: Run) -> None:
    """-h and --help of every verb say the same, on stdout, and end with examples that parse."""
    words = [verb] if verb else []
    result = fa_cli(*words, "--help")
    assert result.exit_code == 0 and result.stderr == ""
    assert fa_cli(*words, "-h").stdout == result.stdout
    examples = result.stdout.split("Examples:\n")[1].splitlines()
    assert 2 <= len(examples) <= 3
    for line in examples:
        program, name, *rest = line.split()
        assert program == "fa-cli"
        cli.main.commands[name].make_context(name, rest, parent=cli.main.make_context("fa-cli", [name], obj={"verbosity": 0}))


def test_no_arguments_is_help_and_exit_2(fa_cli: Run) -> None:
    """As click has it: what could be meant, and that nothing was done."""
    result = fa_cli()
    assert result.exit_code == 2 and "Commands:" in result.stderr and result.stdout == ""


def test_run_help_says_which_causal_and_which_exit_codes(fa_cli: Run) -> None:
    """The two things that surprise: alignment of the mask, and what 3 means."""
    text = fa_cli("run", "--help").stdout
    assert "bottom-right" in text and "top-left" in text and "Exit codes:" in text


def test_version(fa_cli: Run) -> None:
    """One line."""
    result = fa_cli("--version")
    assert result.exit_code == 0 and result.stdout.startswith("fa-cli")


@pytest.mark.parametrize(("words", "hint"), [(("rnu",), "Did you mean 'run'"), (("run", "--kausal"), "--causal"), (("new",), "NAME")])
def test_a_typing_mistake_is_exit_2(words: tuple[str, ...], hint: str, fa_cli: Run) -> None:
    """What was probably meant is said, and where to look."""
    result = fa_cli(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert hint in result.stderr and "hint: fa-cli" in result.stderr


# -- run --------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_run_writes_and_tells(fa_cli: Run, tmp_path: Path) -> None:
    """Both passes: every tensor by name with PASS, CPU time called so, the files there."""
    result = fa_cli("run", "--compute", "naive", "--mode", "both", *SHAPE)
    assert result.exit_code == 0, result.output
    for tensor in ("O", "logsumexp", "dQ", "dK", "dV"):
        row = next(line.split() for line in result.stdout.splitlines() if line.split()[1:3] == ["f32", tensor])
        assert row[-1] == "PASS" and float(row[3]) <= float(row[6])
        assert (tmp_path / "data/B1_H2_S33_D16" / f"{tensor}.bin").stat().st_size > 0
    assert "CPU time (CPU engine)" in result.stdout and "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-1] == "PASS naive both B1_H2_S33_D16 on cpu"


@needs_compiler
def test_a_wrong_kernel_is_exit_1_without_a_speed(fa_cli: Run, wrong: str) -> None:
    """FAIL, the worst place in words, and no time: also in JSON, which is printed all the same."""
    result = fa_cli("run", "--compute", wrong, *SHAPE)
    assert result.exit_code == 1
    assert "FAIL wrong forward" in result.stdout and "O is wrong at batch" in result.stdout
    found = json.loads(fa_cli("run", "--compute", wrong, "--json", *SHAPE).stdout)
    assert found["passed"] is False
    assert found["time_ms"] == {"forward": None, "backward": None} == found["tflops"] == found["gbps"]
    assert found["errors"]["O"]["passed"] is False and found["errors"]["O"]["max_abs"] > 0.1


@needs_compiler
def test_no_time_checks_alone(fa_cli: Run, wrong: str) -> None:
    """No times, a wrong kernel is exit 1 as ever, and samples of nothing are refused."""
    words = ("run", "--compute", "naive", "--seq", "16", "--device", "cpu", "--no-time")
    found = fa_cli(*words, "--json")
    told = json.loads(found.stdout)
    assert found.exit_code == 0 and told["passed"] and told["time_ms"] == told["tflops"] == {"forward": None, "backward": None}
    assert fa_cli(*words[:2], wrong, *words[3:]).exit_code == 1
    assert fa_cli(*words, "--samples", "5").exit_code == 2


@needs_compiler
def test_tolerance_is_an_absolute_limit(fa_cli: Run) -> None:
    """The seeds' rule on top of the budget."""
    assert fa_cli("run", "--compute", "naive", "--tolerance", 1e-12, *SHAPE).exit_code == 1
    assert fa_cli("run", "--compute", "naive", "--tolerance", 1e-3, *SHAPE).exit_code == 0


@needs_compiler
def test_json_of_one_kernel(fa_cli: Run, tmp_path: Path) -> None:
    """The document's keys are a contract."""
    result = fa_cli("run", "--compute", "naive", "--causal", "--json", *SHAPE)
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert list(found) == ["compute", "mode", "device", "arithmetic", "problem", "passed", "time_ms", "tflops", "gbps", "errors", "outputs"]
    assert (found["compute"], found["mode"], found["device"], found["passed"]) == ("naive", "forward", "cpu", True)
    assert found["problem"]["causal"] is True and found["problem"]["seq_q"] == 33 and found["problem"]["causal_shift"] == 0
    assert found["time_ms"]["forward"] > 0 and found["time_ms"]["backward"] is None
    moments = ["rms", "rms_budget", "bias", "bias_budget", "slope", "slope_budget"]
    assert list(found["errors"]["O"]) == ["max_abs", "mean_abs", "mse", "max_rel", "budget", "passed", *moments]
    assert found["outputs"] == str(tmp_path / "data" / "B1_H2_S33_D16")
    work = 4 * 1 * 2 * 16 * (33 * 34 // 2)
    assert found["tflops"]["forward"] == pytest.approx(work / (found["time_ms"]["forward"] * 1e9))


@needs_compiler
def test_json_of_several_kernels(fa_cli: Run, wrong: str) -> None:
    """Rows, and passed only if all did."""
    result = fa_cli("run", "--compute", f"naive,{wrong}", "--json", *SHAPE)
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["passed"] is False
    assert [(row["compute"], row["passed"]) for row in found["rows"]] == [("naive", True), ("wrong", False)]


@needs_compiler
def test_quiet_and_verbose(fa_cli: Run) -> None:
    """-q: the verdict only; -v: the source and its hash too, and which rows of choice gave the tiles their values."""
    assert fa_cli("run", "--compute", "naive", "-q", *SHAPE).stdout == "PASS naive forward B1_H2_S33_D16 on cpu\n"
    assert "00_naive_forward.cu, source " in fa_cli("run", "--compute", "naive", "-v", *SHAPE).stdout
    wide = ("run", "--compute", "fa2", "-v", *SHAPE, "--dim", 64, "--output-dir", "wide")
    row = "07_fa2_forward.cu: when HEAD_DIM == 64 and batch * heads_q * ceil_div(seq_q, 32) <= 2 * sms: LANES = 32 (experiments/fp32/"
    assert row in fa_cli(*wide).stdout and "BLOCK_K = 32" not in fa_cli(*wide).stdout
    assert "07_fa2_forward.cu: no row of choice: the values of [tile]\n" in fa_cli(*wide, "--tile", "LANES=8").stdout


@needs_compiler
def test_spellings_of_the_seeds(fa_cli: Run, tmp_path: Path) -> None:
    """--batch_size and the like, forward_backward, --kernel."""
    sizes = ("--batch_size", 1, "--num_heads", 2, "--seq_len", 33, "--head_dim", 16, "--output_dir", "elsewhere")
    assert fa_cli("gen-data", *sizes).exit_code == 0
    folder = tmp_path / "elsewhere" / "B1_H2_S33_D16"
    assert (folder / "Q.bin").stat().st_size == 2 * 33 * 16 * 4
    result = fa_cli("run", "--kernel", "naive", "--mode", "forward_backward", "--no-gpu-reference", "--data", folder, "-q")
    assert (result.exit_code, result.stdout) == (0, "PASS naive both B1_H2_S33_D16 on cpu\n")


@needs_compiler
def test_environment_variables(fa_cli: Run) -> None:
    """FA_CLI_<VERB>_<OPTION> is below a flag and above the default; FA_CLI_DEVICE is every verb's."""
    names = {"FA_CLI_RUN_COMPUTE": "naive", "FA_CLI_RUN_SEQ": "17"}
    assert "naive forward B1_H2_S17_D16" in fa_cli("run", "-q", "--batch", 1, "--heads", 2, "--dim", 16, env=names).stdout
    assert "naive forward B1_H2_S33_D16" in fa_cli("run", "-q", *SHAPE, env=names).stdout
    assert fa_cli("run", *SHAPE, env={"FA_CLI_DEVICE": "tpu"}).exit_code == 2


def test_a_kernel_that_does_not_compile_is_exit_5(fa_cli: Run, tmp_path: Path) -> None:
    """With the compiler's message, which names the file and the line."""
    (tmp_path / "broken_forward.cu").write_text(WRONG.replace("= 0;", "= nosuch;", 1))
    result = fa_cli("run", "--compute", "./broken_forward.cu", *SHAPE)
    assert result.exit_code == 5, result.output
    assert "broken_forward.cu:20" in result.stderr and "nosuch" in result.stderr and "hint: " in result.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("check", "line", "planted"),
    [
        ("asan", 19, "    fa::row_pointer<float>(args.O, args.batch, 0, 0)[0] = 1;\n"),
        (
            "race",
            20,
            "    __shared__ float shared[32];\n    shared[threadIdx.x / 2] = threadIdx.x;\n"
            "    __syncthreads();\n    if (shared[0] > 99) return;\n",
        ),
    ],
)
def test_a_check_that_finds_something_is_exit_1(check: str, line: int, planted: str, tmp_path: Path) -> None:
    """Out of bounds, and a race on shared memory: the kernel's line is named, without the check nothing is noticed."""
    start = WRONG.index("    float* row")
    (tmp_path / "bad_forward.cu").write_text(WRONG[:start] + planted + WRONG[start:])
    command = [sys.executable, str(ROOT / "cli.py"), "run", "--compute", "./bad_forward.cu", "--device", "cpu", *map(str, SHAPE)]
    done = subprocess.run([*command, "--check", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"bad_forward.cu:{line}" in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr, done.stderr


@needs_compiler
def test_a_check_says_what_it_has_watched(fa_cli: Run, tmp_path: Path) -> None:
    """In run and verify; a finding is counted, and its command has the check."""
    told = fa_cli("run", "--compute", "fa2,naive", *SHAPE, "--check", "race").stdout
    assert re.search(r"^race 0 findings in 2 passes: [1-9][\d,]* accesses watched$", told, re.M), told
    assert "race " not in fa_cli("run", "--compute", "fa2", *SHAPE, "--check", "race", "-q").stdout
    (tmp_path / "bad_forward.cu").write_text(kernel.find("fa2_naive", "forward").path.read_text().replace("__syncthreads();", "", 1))
    case = ("--mode", "forward", "--case", "B1_H2_S97_D16", "--check", "race")
    done = fa_cli("verify", "fa2", "./bad_forward.cu", *case)
    assert done.exit_code == 1 and re.search(r"^race 1 finding in 2 cases: [1-9][\d,]* accesses", done.stdout, re.M), done.stdout
    assert "--case B1_H2_S97_D16 --device cpu --check race" in done.stdout
    rows = {row["kernel"]: row for row in json.loads(fa_cli("verify", "fa2", "naive", *case, "--json").stdout)["rows"]}
    assert min(row["watched"] for row in rows.values()) > 10 * 2 * 97 * 97  # ten a score


def test_no_compiler_is_exit_4(tmp_path: Path) -> None:
    """The package to install is named."""
    environment = {**os.environ, "FA_CLI_CXX": "no-such-compiler", "FA_CLI_DEVICE": "cpu"}
    command = [sys.executable, str(ROOT / "cli.py"), "run", "--compute", "naive", *map(str, SHAPE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "apt install g++" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_no_gpu_is_exit_4(fa_cli: Run) -> None:
    """--device cuda is never exchanged for the CPU."""
    result = fa_cli("run", "--compute", "naive", "--device", "cuda", *SHAPE)
    assert result.exit_code == 4 and "hint: " in result.stderr


def test_an_internal_error_is_one_line_and_a_traceback_only_with_vv(fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours is called that."""
    import harness.kernel

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(harness.kernel, "catalogue", broken)
    result = fa_cli("list")
    assert result.exit_code == 1 and "internal error: RuntimeError: planted" in result.stderr and "Traceback" not in result.stderr
    assert "Traceback" in fa_cli("list", "-vv").stderr


# -- the other verbs --------------------------------------------------------------------------------------------------


def test_gen_data_json(fa_cli: Run, tmp_path: Path) -> None:
    """Where it is and what it holds."""
    found = json.loads(fa_cli("gen-data", "--json", *SHAPE).stdout)
    assert found["passed"] is True
    assert found["rows"][0]["folder"] == str(tmp_path / "data" / "B1_H2_S33_D16")
    assert found["rows"][0]["tensors"] == ["Q", "K", "V", "dO"]


def test_list(fa_cli: Run) -> None:
    """Every kernel file is in a row, every sweep has its title; -q gives names to loop over."""
    found = json.loads(fa_cli("list", "--json").stdout)
    files = {(row["no"], row["name"], pass_) for row in found["rows"] for pass_ in row["passes"]}
    assert files == {(p.name[:2], p.stem[3:].rsplit("_", 1)[0], p.stem.rsplit("_", 1)[1]) for p in ROOT.glob("kernels_cu/*.cu")}
    assert set(found["sweeps"]) == {p.parent.name for p in ROOT.glob("experiments/*/sweep.toml")}
    assert fa_cli("list", "-q").stdout.split() == list(dict.fromkeys(row["name"] for row in found["rows"]))


def test_doctor(fa_cli: Run) -> None:
    """It says that kernels can run on a machine with a compiler, and which."""
    result = fa_cli("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["passed"] else 4)
    assert {"name", "status", "detail", "hint"} == set(found["rows"][0])


@needs_compiler
def test_verify(fa_cli: Run, wrong: str) -> None:
    """One case: counted, and for a wrong kernel the command that runs it alone."""
    result = fa_cli("verify", "naive", "--mode", "forward", "--case", 0, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["rows"][0]["passed"] is True
    result = fa_cli("verify", wrong, "--mode", "forward", "--case", 0)
    assert result.exit_code == 1 and "FAIL wrong forward case 0" in result.stdout and "--case 0" in result.stdout


@needs_compiler
def test_verify_tells_a_compile_error_once(fa_cli: Run, tmp_path: Path) -> None:
    """Every case fails of it, the compiler's log is printed for the first."""
    (tmp_path / "broken_forward.cu").write_text(WRONG.replace("= 0;", "= nosuch;", 1))
    result = fa_cli("verify", "./broken_forward.cu")
    assert result.exit_code == 5
    assert result.stdout.count("broken_forward.cu:20") == 1 and result.stdout.count("FAIL broken") == 2
    assert re.search(r"FAIL broken forward: the same in \d\d more cases: \d+ \d+ .*…", result.stdout)


def test_verify_names_the_file_that_is_wrong(fa_cli: Run, tmp_path: Path) -> None:
    """A pass that is not there is left out in mode both; a pass whose header is broken is not, nor is a path to nothing."""
    (tmp_path / "mine_forward.cu").write_text(WRONG)
    (tmp_path / "mine_backward.cu").write_text(WRONG.replace("// gqa", "// gqaa"))
    result = fa_cli("verify", "./mine_forward.cu")
    assert result.exit_code == 2 and "mine_backward.cu" in result.stderr and "gqaa" in result.stderr
    result = fa_cli("verify", "./nosuch_forward.cu")
    assert result.exit_code == 2 and "no kernel file nosuch_forward.cu" in result.stderr


@needs_compiler
def test_verify_takes_other_scales_than_the_default(fa_cli: Run, tmp_path: Path) -> None:
    """A kernel that computes 1/sqrt(dim) itself passes `run` and fails even the quick matrix."""
    text = (kernel.KERNELS / "05_fa2_naive_forward.cu").read_text()
    (tmp_path / "mine_forward.cu").write_text(edited(text, ("float(args.scale)", "(1.0f / sqrtf(float(args.head_dim)))")))
    assert fa_cli("run", "--compute", "./mine_forward.cu", *SHAPE).exit_code == 0
    result = fa_cli("verify", "./mine_forward.cu")
    assert result.exit_code == 1 and "scale=" in result.stdout and "FAIL 0 of" not in result.stdout


@needs_compiler
def test_a_new_kernel_works_as_it_is(fa_cli: Run, tmp_path: Path) -> None:
    """new, then the command its hint gives; a second time the file is not overwritten."""
    result = fa_cli("new", "mine", "--from", "naive")
    assert result.exit_code == 0 and (tmp_path / "mine_forward.cu").is_file()
    hint = result.stderr.splitlines()[-1].removeprefix("hint: fa-cli ").split()
    assert fa_cli(*hint, *SHAPE).exit_code == 0
    assert fa_cli("new", "mine").exit_code == 2
    assert fa_cli("new", "mine", "--from", "naive", "--pass", "backward").exit_code == 0
    assert fa_cli("run", "--compute", "./mine_forward.cu", "--mode", "both", *SHAPE).exit_code == 0


def test_python_runs_the_file_in_a_checkout(tmp_path: Path) -> None:
    """`python3 cli.py list` needs no installation of fa-cli, from any folder."""
    done = subprocess.run([sys.executable, str(ROOT / "cli.py"), "list", "-q"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "fa2" in done.stdout.split()


@pytest.mark.parametrize("path", pages.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_documents_exist(path: Path) -> None:
    """Every `fa-cli ...` line of a code block parses: verbs, options and choices are real."""
    blocks = "\n".join("".join(found) for found in re.findall(r"```sh\n(.*?)```|^ {4}(fa-cli [^\n]*)\n", path.read_text(), re.S | re.M))
    for line in blocks.splitlines():
        for command in line.partition("#")[0].split("&&"):
            program, *words = shlex.split(command) or [""]
            if program == "fa-cli":
                verb, *rest = words
                cli.main.commands[verb].make_context(verb, rest, parent=cli.main.make_context("fa-cli", [verb], obj={"verbosity": 0}))


@needs_compiler
def test_a_failed_check_is_drawn_and_the_speed_of_several_has_an_interval(fa_cli: Run, tmp_path: Path, wrong: str) -> None:
    """error_O.png lies beside the outputs of a wrong kernel, not of those after it; of two the second's speed-up has its interval."""
    result = fa_cli("run", "--compute", wrong, *SHAPE)
    assert result.exit_code == 1 and "where it is wrong" in result.stderr
    (picture,) = tmp_path.glob("data/*/error_O.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    result = fa_cli("run", "--compute", "fa2,naive", *SHAPE)
    assert result.exit_code == 0 and re.search(r"naive .* \([\d.e+-]+ to [\d.e+-]+\)", result.stdout), result.stdout
    assert not picture.exists()


def test_compile_says_each_cause_once_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """One error for every dtype and architecture is one line below the table, which has no column of messages."""
    log = '{0}:3: note: in {1}\n{0}(7): error: identifier "nosuch" is undefined\n'
    rows = [
        CompileRow("mine", "forward", dtype, 64, True, arch, "ERROR", message=log.format("mine.cu", arch))
        for dtype in ("float32", "float16")
        for arch in ("sm_80", "sm_90")
    ]
    rows.append(CompileRow("fa2", "backward", "float32", 128, True, "sm_120", "SPILLS", 255, 4, message="spills 4 bytes a thread"))
    assert checks.compiled(rows, False, 0) == 5
    table, _, below = capsys.readouterr().out.partition("ERROR mine forward (")
    assert "why" not in table and "nosuch" not in table and below.count("nosuch") == 1
    assert below.startswith("float32 D64 sm_80, float32 D64 sm_90, float16 D64 sm_80, float16 D64 sm_90): mine.cu:3")
    assert "SPILLS fa2 backward (float32 D128 sm_120): spills 4 bytes a thread\n" in below
