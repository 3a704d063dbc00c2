"""What a new user stumbled over (an outside review, commit 3870942): each command there and here, and the test that holds it.

    git worktree add --detach OLD 3870942
    nice python experiments/trust/stumbles.py OLD > experiments/trust/stumbles.txt

Each command runs in an empty folder on the CPU engine, $FA is a tree's fa-cli. An outcome is the exit code and the line that matters. Where
a command needs more than a line (signals, another user's folder), the test alone shows it. Some need torch, and compile NVRTC.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from planted import WRONG

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--batch 1 --heads 1 --seq 32 --dim 32"
SWEEP = 'title = "Lengths"\\nmode = "forward"\\nkernels = ["flash_naive"]\\n[[shapes]]\\ntest = "S"\\nbatch = 1\\nheads = 1\\nseq = 32\\ndim = 32\\n'
META = "import torch; from harness.torch_op import {0}; q, k, v = torch.randn(3, 1, 2, 16, 8); print({0}(q, k.to('meta'), v).shape)"
NASTY = r"$'s/fa2/\e[31m<script>/'"
PLAIN = "$FA new mine --plain >/dev/null; "
NO_WIDTH = (
    'sed -i \'s/, "head_dim", /, /; s/int head_dim, int causal_shift/int causal_shift/; s/\\[32, 64, 96, 128\\]/[64]/; '
    "0,/constexpr int COLUMNS/s//constexpr int head_dim = HEAD_DIM;\\nconstexpr int COLUMNS/' mine_forward.cu; "
)


@dataclass(frozen=True)
class Stumble:
    """An item of the review: a bash command (empty: the test alone), what of its output is shown, and the test."""

    item: str
    says: str
    command: str
    shown: str
    test: str


STUMBLES = (
    Stumble("12", "attention with one tensor on meta", f'$PY -c "{META.format("attention")}"', "Error:|Size", "torch/test_torch_op.py::test_one_tensor_on_meta_is_refused"),
    Stumble("12", "sdpa likewise", f'$PY -c "{META.format("sdpa")}"', "Error:|Size", "torch/test_torch_op.py::test_one_tensor_on_meta_is_refused"),
    Stumble("13", "a failing run with Jupyter's MPLBACKEND", f"MPLBACKEND=module://matplotlib_inline.backend_inline $FA run --compute ./wrong_forward.cu {SMALL}", "internal|rror:|FAIL", "pure/test_report.py::test_figures_need_nothing_of_the_users_matplotlib"),
    Stumble("13", "... and with text.usetex", f"echo 'text.usetex: True' > matplotlibrc; $FA run --compute ./wrong_forward.cu {SMALL}", "internal|rror:|FAIL", "pure/test_report.py::test_a_figure_that_cannot_be_drawn_is_a_note"),
    Stumble("14", "printf in a kernel", f"""sed -i 's/^    float\\* row/    if (blockIdx.x + threadIdx.x == 0) printf("hello\\\\n");\\n&/' wrong_forward.cu; $FA run --compute ./wrong_forward.cu {SMALL}""", "hello|error", "device/test_engine.py::test_printf_comes_in_the_order_of_blocks_and_threads"),
    Stumble("14", "double scale in a float32 kernel", PLAIN + f"sed -i 's/, float scale)/, double scale)/' mine_forward.cu; $FA run --compute ./mine_forward.cu {SMALL}", "PASS|FAIL|error", "pure/test_signature.py::test_a_scale_of_another_width"),
    Stumble("14", "compile: an args list one short", PLAIN + """sed -i 's/"seq_q", "seq_kv"/"seq_q"/' mine_forward.cu; $FA compile ./mine_forward.cu --arch sm_90""", "args passes|PASS|error", "pure/test_signature.py::test_compile_refuses_what_run_does"),
    Stumble("15", "escape sequences of a results.csv, lines on a terminal", f"cp -r $TREE/experiments/seqlen X; sed -i {NASTY} X/results.csv; $FA compare X X | cat -v | grep -c '\\^\\['", "", "cli/test_report.py::test_what_a_table_of_others_holds_is_only_text"),
    Stumble("15", "<script> in summary.md", f"cp -r $TREE/experiments/seqlen X; sed -i {NASTY} X/results.csv; $FA report X -q >/dev/null 2>&1; grep -c '<script>' X/summary.md", "", "cli/test_report.py::test_what_a_table_of_others_holds_is_only_text"),
    Stumble("16", "tune --tile PAD=0", f"$FA tune fa2 {SMALL} --tile PAD=0", "PASS|variant|error", "cli/test_tune.py::test_a_tile_may_be_0"),
    Stumble("16", "tune at Ctrl-C", "", "", "cli/test_tune.py::test_ctrl_c_keeps_what_is_known"),
    Stumble("16", "tune: what does not compile, twice", "", "", "pure/test_nvrtc.py::test_what_ptxas_refuses_is_remembered"),
    Stumble("16", "tune: silent off a terminal", "", "", "cli/test_progress.py::test_a_line_in_a_while_where_nobody_looks"),
    Stumble("17", "report in place: the sweep's title", f"printf '{SWEEP}' > s.toml; $FA experiment s.toml --samples 1 --peers none -q >/dev/null 2>&1; $FA report experiment_results/s -q >/dev/null 2>&1; head -1 experiment_results/s/summary.md", "", "cli/test_report.py::test_a_report_has_the_title_of_its_sweep"),
    Stumble("17", "compare of two failed runs", f"printf '{SWEEP}' > s.toml; $FA experiment s.toml --compute ./wrong_forward.cu --samples 1 --peers none >/dev/null 2>&1; $FA compare experiment_results/s experiment_results/s", "PASS|FAIL|error", "cli/test_report.py::test_compare_of_nothing_that_passed_fails"),
    Stumble("17", "a byte order mark in sweep.toml", f"printf '\\xef\\xbb\\xbf{SWEEP}' > s.toml; $FA experiment s.toml --samples 1 --peers none", "PASS|rror", "cli/test_runs.py::test_a_sweep_may_have_a_byte_order_mark"),
    Stumble("17", "PYTHONOPTIMIZE=2: lines of help that say what verify does", "PYTHONOPTIMIZE=2 $FA verify --help | grep -c 'Check kernels'", "", "cli/test_complete.py::test_help_needs_no_docstrings"),
    Stumble("17", "a static_assert's text", f"$FA run --compute fa2 {SMALL} --tile LANES=4", "LANES|static|error", "pure/test_kernels_text.py::test_static_asserts_say_why"),
    Stumble("17", "a why of nine lines, empty columns", "", "", "pure/test_tables.py::test_a_long_sentence_takes_few_lines_and_nothing_takes_none"),
    Stumble("17", "the hint for a folder that cannot be written", "", "", "pure/test_files.py::test_what_helps_where_a_folder_cannot_be_written"),
    Stumble("18", "ring, SIGTERM: folders left", "mkdir t; TMPDIR=$PWD/t FA_CLI_THREADS=1 timeout 10 $FA ring --compute naive --seq 6000 --dim 64 --mode both --gpus 2 >/dev/null 2>&1; ls t | grep -c fa_cli", "", "ring/test_start.py::test_sigterm_leaves_nothing"),
    Stumble("18", "ring --gpus 5000 on a CPU", "", "", "ring/test_start.py::test_what_a_ring_cannot_mean_is_exit_2"),
    Stumble("18", "ring: SIGINT to rank 2", "", "", "ring/test_start.py::test_a_rank_that_is_interrupted_is_the_one_that_is_named"),
    Stumble("18", "ring: kill -9 of rank 2", "", "", "ring/test_start.py::test_a_killed_rank_ends_the_run"),
    Stumble("19", "a cache below a folder that others may write: the hint", f"mkdir -m 777 c; FA_CLI_CACHE_DIR=$PWD/c/x $FA run --compute naive {SMALL}", "hint", "pure/test_doctor.py::test_a_folder_above_the_cache_that_others_may_write"),
    Stumble("20", "two nodes by the page alone, MPI", "", "", "ring/test_place.py::test_the_page_tries_two_nodes_by_mpi"),
    Stumble("20", "... and torchrun", "", "", "ring/test_place.py::test_the_page_tries_two_nodes_by_torchrun"),
    Stumble("21", "verify of a right kernel without head_dim", PLAIN + NO_WIDTH + "$FA verify ./mine_forward.cu -q", "PASS|FAIL", "cli/test_verify.py::test_what_a_kernel_cannot_be_given_is_no_failure"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("--item", help="one item alone")
    asked = parser.parse_args()
    for each in STUMBLES:
        file, _, name = each.test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{each.test}: no such test"
        if asked.item not in (None, each.item):
            continue
        click.echo(f"{each.item}  {each.says}")
        if each.command:
            click.echo(f"    $ {each.command}".replace(NO_WIDTH, "(head_dim taken out of mine_forward.cu); "))
            for when, tree in (("before", asked.old.resolve()), ("now", ROOT)):
                click.echo(f"    {when:7} {outcome(each, tree)}")
        click.echo(f"    test    tests/{each.test}")


def outcome(stumble: Stumble, tree: Path) -> str:
    """The exit code of a command in a tree, and of its output the first line with the first of the words that it has, or else the last."""
    environment = os.environ | {
        "TREE": str(tree),
        "PY": sys.executable,
        "FA": f"{sys.executable} {tree / 'cli.py'}",
        "PYTHONPATH": str(tree),
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wrong_forward.cu").write_text(WRONG)
        environment |= {"FA_CLI_DEVICE": "cpu", "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            ["bash", "-c", stumble.command], cwd=folder, capture_output=True, text=True, errors="replace", check=False, env=environment
        )
    lines = [
        line.strip() for line in (done.stdout + done.stderr).replace(folder, ".").replace(str(tree), "TREE").splitlines() if line.strip()
    ]
    wanted = [line for words in stumble.shown.split("|") if words for line in lines if re.search(words, line)]
    fitting = wanted or lines[-1:] or [""]
    return f"exit {done.returncode}: {fitting[0][:150]}"


if __name__ == "__main__":
    main()
