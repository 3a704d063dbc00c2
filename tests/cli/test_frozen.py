"""What the command line says and leaves behind, held against frozen/*.txt: texts, files, columns, JSON keys, exit codes.

A story is a row of commands in one empty folder. Its file in frozen/ has, for each command, the exit code, stdout, stderr and the
files that were written; support/frozen.py masks what differs by run and machine. Where a change of these is meant, write them anew
and read the difference before it is committed:

    pytest -n 0 tests/cli/test_frozen.py --write-frozen [-k STORY]
    git diff tests/cli/frozen

Only the command line is used here, so the files outlive any layout of the package.
"""

from __future__ import annotations

import csv
import difflib
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import frozen
import narrow
import pytest
from click.testing import Result
from planted import GOOD, HEADER, WRONG

from harness.terminal import printing, tables

Run = Callable[..., Result]
FROZEN = Path(__file__).resolve().parent / "frozen"
S = "--batch 1 --heads 2 --seq 64 --dim 32"
SEEDS = "--batch_size 1 --num_heads 2 --seq_len 64 --head_dim 32"
TILED = WRONG.replace("// [[launch]]", "// [tile]\n// HOW = 1\n// [[launch]]").replace(
    "<fa/args.cuh>", "<fa/args.cuh>\nstatic_assert(HOW != 3);"
)
RACE = """\
    __shared__ float shared[32];
    shared[threadIdx.x / 2] = threadIdx.x;
    __syncthreads();
    if (shared[0] > 99) return;
"""
FILES = {
    "wrong_forward.cu": WRONG,
    "broken_forward.cu": WRONG.replace("= 0;", "= nosuch;", 1),
    "racy_forward.cu": WRONG.replace("    float* row", RACE + "    float* row"),
    "choice_forward.cu": TILED,
    "good_forward.cu": HEADER.format(shared=0, tile="") + GOOD,
    "header_forward.cu": WRONG.replace("// gqa", "// gqaa"),
    "two.toml": """\
title = "Two shapes"
kernels = ["naive", "fa2"]
peers = ["numpy"]
shapes = [{ batch = 1, heads = 2, seq = [16, 33], dim = 32 }]
""",
    "refused.toml": """\
kernels = ["fa2", "./wrong_forward.cu"]
peers = []
shapes = [{ batch = 1, heads = 1, seq = 8, dim = [16, 200] }]
""",
    "bad.toml": 'kernels = ["fa2"]\nshapes = 3\n',
}


@dataclass(frozen=True)
class Story:
    """Commands, the files of FILES or the committed runs they find, and what the machine must have (or, "no GPU", not have)."""

    commands: str
    files: str = ""
    runs: str = ""
    needs: str = "compiler"


STORIES = {
    "version": Story("--version", needs=""),
    "mistakes": Story(
        "\n".join(["", "rnu", "run --kausal", "run --seq x", "run --seed -1", "run --compute ,", "new", "compare one"]), needs=""
    ),
    "gen_data": Story(
        f"""\
        gen-data {S}
        gen-data {S}
        gen-data {S} --seed 1
        gen-data {S} --seed 1 --force --json
        gen-data {S} --kv-heads 1 --seq-kv 40 --dtype bfloat16 --output-dir other -q
        gen-data {S} --dtype float12
        gen-data {S} --kv-heads 3
        gen-data {S} --seq 0""",
        needs="",
    ),
    "run_forward": Story(
        f"""\
        run --compute naive {S}
        run --compute naive {S} -q
        run --compute naive {S} -v
        run --compute 0 {S} --json
        run --compute naive {S} --causal --scale 0.3 --kv-heads 1 --seq-kv 80 --deterministic --tile THREADS=64
        run --compute naive {S} --tolerance 1e-12 --json
        run --compute naive {S} --check race"""
    ),
    "run_backward": Story(
        f"""\
        run --compute naive {S} --mode backward
        run --compute naive {S} --mode both
        run --compute naive {S} --mode backward --json
        run --compute fa2 {S} --mode backward -q"""
    ),
    "run_several": Story(
        f"""\
        run --compute naive,fa2,numpy {S}
        run --compute naive --compute numpy {S} --mode both --json
        run --compute numpy,naive {S} -v"""
    ),
    "run_seeds_spellings": Story(
        f"""\
        gen-data {SEEDS} --output_dir elsewhere
        run --kernel naive --mode forward_backward --no-gpu-reference --data elsewhere/B1_H2_S64_D32
        run --data elsewhere/B1_H2_S64_D32 --seq 3
        run --data nodata
        run --data elsewhere"""
    ),
    "run_ranges": Story(
        f"""\
        run --compute 00-02 {S}
        run --compute 00-07 {S} --dtype float16
        run --compute 08-10 {S}
        run --compute 07-00 {S}"""
    ),
    "run_wrong": Story(
        f"""\
        run --compute ./wrong_forward.cu {S}
        run --compute naive,./wrong_forward.cu {S} --json
        run --compute ./wrong_forward.cu {S} -q""",
        files="wrong_forward.cu",
    ),
    "run_broken": Story(
        f"""\
        run --compute ./broken_forward.cu {S}
        run --compute ./header_forward.cu {S}
        run --compute ./nothing_forward.cu {S}""",
        files="broken_forward.cu header_forward.cu",
    ),
    "run_race": Story(
        f"""\
        run --compute ./racy_forward.cu {S}
        run --compute ./racy_forward.cu {S} --check race
        run --compute ./racy_forward.cu {S} --check race --json""",
        files="racy_forward.cu",
    ),
    "run_refused": Story(
        f"""\
        run --compute nosuch {S}
        run --compute naive --dim 300
        run --compute tiled --dtype float16
        run --compute naive --dtype float12
        run --compute tiled --mode both {S}
        run --compute naive --tile NOSUCH=3 {S}
        run --compute naive --tile THREADS=x {S}
        run --compute naive --mode sideways
        run --compute naive --device tpu {S}
        run --compute naive --tolerance nan""",
    ),
    "no_gpu": Story(
        f"""\
        run --compute naive --device cuda {S}
        experiment two.toml --device cuda
        verify naive --device cuda
        tune naive --device cuda {S}
        profile {S}
        profile --compute fa2 --tool nsys --mode both --device cuda {S}
        profile --compute nosuch {S}
        doctor -q
        doctor --json""",
        files="two.toml",
        needs="compiler no-gpu",
    ),
    "experiment": Story(
        """\
        experiment two.toml --dry-run
        experiment two.toml
        experiment two.toml --resume -q""",
        files="two.toml",
    ),
    "experiment_options": Story(
        """\
        experiment two.toml --only S16 --compute naive --peers none --mode both --json --output-dir one
        experiment two.toml --skip S16 --compute naive,fa2 --peers none --output-dir two -q
        experiment refused.toml --output-dir three
        experiment seqlen --dry-run
        experiment --seqlen --full --dry-run --only 512 --mode backward
        experiment nosuch
        experiment seqln
        experiment two.toml --only nothing
        experiment two.toml --peers nosuch
        experiment two.toml --compute nosuch
        experiment nothing.toml
        experiment bad.toml""",
        files="two.toml refused.toml bad.toml wrong_forward.cu",
    ),
    "verify": Story(
        """\
        verify naive --case 0
        verify naive --case 0 --json
        verify naive --mode forward --case 3 -v
        verify ./wrong_forward.cu --case 0
        verify ./wrong_forward.cu --mode forward --case 0 --json
        verify ./broken_forward.cu --case 0
        verify nosuch
        verify naive --case 100000""",
        files="wrong_forward.cu broken_forward.cu",
    ),
    "compile": Story(
        """\
        compile ./good_forward.cu --arch sm_90
        compile ./good_forward.cu --arch sm_90 --json
        compile ./good_forward.cu --arch sm_90 --all -q
        compile ./good_forward.cu --arch sm_1
        compile nosuch""",
        files="good_forward.cu",
        needs="nvrtc",
    ),
    "new": Story(
        """\
        new mine
        new mine
        new mine --from fa2 --pass backward --output-dir .
        new other --from nosuch
        new other --from tiled --pass backward
        new 7""",
        needs="",
    ),
    "tune": Story(
        f"""\
        tune naive {S} --tile THREADS=128,2048 --output-dir out
        tune naive {S} --tile THREADS=128,2048 --mode backward --json
        tune ./choice_forward.cu {S} --tile HOW=2,3 --output-dir out
        tune nosuch
        tune naive --tile NOSUCH=3
        tune naive --tile THREADS=x""",
        files="choice_forward.cu",
        needs="compiler nvrtc",
    ),
    "compare": Story(
        """\
        compare ladder_deterministic slower
        compare ladder_deterministic slower --json
        compare ladder_deterministic slower/results.csv --fail-if slower:5%
        compare ladder_deterministic slower --fail-if slower:50% -q
        compare ladder_deterministic slower --fail-if faster
        compare ladder_deterministic roofline
        compare ladder_deterministic nothing""",
        runs="ladder_deterministic roofline",
        needs="",
    ),
    "report": Story(
        """\
        report ladder_deterministic
        report roofline --output-dir figures --title Title --json
        report nothing""",
        runs="ladder_deterministic roofline",
        needs="",
    ),
    "list": Story("list\nlist --json\nlist -q", needs=""),
}
MISSING = {
    "compiler": not (shutil.which("g++") or shutil.which("clang++")),
    "nvrtc": find_spec("nvidia") is None or find_spec("nvidia.cu13") is None,
    "no-gpu": Path("/dev/nvidiactl").exists(),
}


def prepare(folder: Path, story: Story) -> None:
    """Write the story's files; beside committed runs lies `slower`, the first of them with every third time 1.25 as long."""
    for name in story.files.split():
        (folder / name).write_text(FILES[name])
    for name in story.runs.split():
        shutil.copytree(frozen.ROOT / "experiments" / name, folder / name, ignore=shutil.ignore_patterns("samples.jsonl"))
    if story.runs:
        first = folder / story.runs.split()[0]
        shutil.copytree(first, folder / "slower")
        with open(first / "results.csv", newline="") as source, open(folder / "slower" / "results.csv", "w", newline="") as target:
            reader = csv.DictReader(source)
            writer = csv.DictWriter(target, reader.fieldnames or ())
            writer.writeheader()
            for number, row in enumerate(reader):
                times = {name: str(float(row[name]) * 1.25) for name in ("KernelTime_ms", "p20_ms", "p80_ms") if row[name]}
                writer.writerow(row | times if number % 3 == 0 else row)


def told(run: Run, commands: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the commands and say what each did."""

    def stamps() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(folder.rglob("*")) if p.is_file()}

    parts = []
    for command in commands:
        words = shlex.split(command)
        before = stamps()
        monkeypatch.setattr(sys, "argv", ["fa-cli", *words])  # a run's record has it
        result = run(*words)
        part = [f"$ fa-cli {command}".rstrip(), f"exit code {result.exit_code}"]
        for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
            if text and (shown := frozen.printed(text, folder)):
                part.append(f"{name}:\n{_indented(shown)}")
        for path, stamp in stamps().items():
            if before.get(path) != stamp:
                text = frozen.contents(path, folder)
                many = "\n" in text
                part.append(f"file {path.relative_to(folder)}" + (f":\n{_indented(text)}" if many else f": {text}" if text else ""))
        parts.append("\n".join(part) + "\n")
    return "\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip("\n").split("\n"))


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """hold(name, text) compares a text with frozen/NAME.txt; with --write-frozen it writes that file."""

    def compare(name: str, text: str) -> None:
        path = FROZEN / f"{name}.txt"
        if request.config.getoption("--write-frozen"):
            path.write_text(text, encoding="utf-8")
            return
        before = path.read_text(encoding="utf-8")
        difference = difflib.unified_diff(before.splitlines(), text.splitlines(), f"frozen/{name}.txt", "now", lineterm="")
        assert text == before, "\n".join(difference)

    return compare


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same terminal, thread count and commit everywhere; figures by name only; every table also fits narrow terminals."""
    for name, value in (("COLUMNS", "120"), ("FA_CLI_THREADS", "1"), ("FA_CLI_COMMIT", "0123456789")):
        monkeypatch.setenv(name, value)
    right = tables.lay_out

    def held(columns: Sequence[str], rows: Sequence[Sequence[object]], *more: object) -> tables.Laid:
        for width in narrow.WIDTHS:
            narrow.hold(columns, rows, width)
        return right(columns, rows, *more)

    monkeypatch.setattr(printing, "lay_out", held)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _figure, target, **options: frozen.pictures(target, **options))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", STORIES)
def test_frozen(name: str, fa_cli: Run, hold: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the story does what it did."""
    story = STORIES[name]
    if missing := [what for what in story.needs.split() if MISSING[what]]:
        pytest.skip(f"needs {', '.join(missing)}")
    prepare(tmp_path, story)
    hold(name, told(fa_cli, [line.strip() for line in story.commands.split("\n")], tmp_path, monkeypatch))


@pytest.mark.usefixtures("quiet")
def test_frozen_help(fa_cli: Run, hold: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's help and every verb's."""
    import cli

    hold("help", told(fa_cli, ["--help", *(f"{verb} --help" for verb in cli.main.commands)], tmp_path, monkeypatch))
