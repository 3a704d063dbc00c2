"""What a mistake in a kernel file is answered with: the line, what to write there, and each cause once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from planted import GOOD, HEADER, WRONG

import harness
from harness.verbs.verify import Case, CaseResult

Run = Callable[..., Result]
ROOT = Path(harness.__file__).parent.parent
SHAPE = ("--batch", 1, "--heads", 1, "--seq", 40, "--dim", 32)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")

#: A right kernel of plain parameters, as a user's first one is.
PLAIN = """\
// /// kernel
// title = "one thread per query"
// dtypes = ["float32"]
// head_dims = [32]
// arch = ">=sm_70"
// causal = false
// gqa = false
// cross = false
// logits = "any"
// deterministic = true
// [[launch]]
// entry = "forward"
// grid = ["ceil_div(seq_q, 32)", "heads_q", "batch"]
// block = 32
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "scale"]
// ///

extern "C" __global__ void forward(const float* Q, const float* K, const float* V, float* O, float* logsumexp, int heads_q, int seq_q,
                                   float scale) {
    const int query = blockIdx.x * 32 + threadIdx.x;
    const long long head = (blockIdx.z * heads_q + blockIdx.y) * (long long)seq_q;
    __shared__ float k_smem[HEAD_DIM], v_smem[HEAD_DIM];
    float q[HEAD_DIM], o[HEAD_DIM] = {}, row_max = -1e30f, row_sum = 0;
    for (int d = 0; d < HEAD_DIM; ++d) q[d] = query < seq_q ? Q[(head + query) * HEAD_DIM + d] : 0;
    for (int j = 0; j < seq_q; ++j) {
        k_smem[threadIdx.x] = K[(head + j) * HEAD_DIM + threadIdx.x];
        v_smem[threadIdx.x] = V[(head + j) * HEAD_DIM + threadIdx.x];
        __syncthreads();  // arrived
        float score = 0;
        for (int d = 0; d < HEAD_DIM; ++d) score += q[d] * k_smem[d];
        const float new_max = fmaxf(row_max, scale * score);
        const float rescale = expf(row_max - new_max), p = expf(scale * score - new_max);
        row_max = new_max;
        row_sum = row_sum * rescale + p;
        for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * v_smem[d];
        __syncthreads();  // read
    }
    if (query >= seq_q) return;
    for (int d = 0; d < HEAD_DIM; ++d) O[(head + query) * HEAD_DIM + d] = o[d] / row_sum;
    logsumexp[head + query] = row_max + logf(row_sum);
}
"""


def case(number: int, text: str, message: str, code: int = 1) -> CaseResult:
    """A case that failed."""
    return CaseResult(
        "mine", "forward", replace(Case.parse(text), number=number), False, message, 0.5, f"fa-cli verify mine --case {number}", {}, code
    )


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[CaseResult]], None]:
    """verify gives these results."""

    def given(results: list[CaseResult]) -> None:
        def verify(*_: Any, progress: Callable[[CaseResult], None], **__: Any) -> None:
            for each in results:
                progress(each)

        monkeypatch.setattr(harness.verbs.verify, "verify", verify)

    return given


def test_each_cause_is_told_once(verified: Callable[[list[CaseResult]], None], fa_cli: Run) -> None:
    """The smallest case first; cases with the same wrong tensors, or a report of the same line, are counted below it."""
    wrong = "O is wrong at batch {}, head 0: got 1, expected 2; error 1 exceeds the budget 1e-6"
    fault = "mine: stopped on the CPU engine in forward\nillegal memory access in block ({}, 0, 0): thread {} at mine.cu:43\nhint: an index"
    sizes = ("B2_H2_S129_D64", "B1_H1_S33_D64", "B1_H2_S65_D64", "B2_H1_S40_D64")
    verified(
        [case(i, size, wrong.format(i)) for i, size in enumerate(sizes)]
        + [case(4 + i, s, fault.format(i, i), 5) for i, s in enumerate(sizes)]
    )
    told = fa_cli("verify", "mine").stdout
    assert [line for line in told.splitlines() if line.startswith("FAIL mine forward case ")] == [
        f"FAIL mine forward case 1, {sizes[1]}: {wrong.format(1)}",
        f"FAIL mine forward case 5, {sizes[1]}: mine: stopped on the CPU engine in forward",
    ]
    assert "FAIL mine forward: O wrong in 3 more cases: 0 2 3" in told and "FAIL mine forward: the same in 3 more cases: 4 6 7" in told
    assert "FAIL 8 of 8 cases failed" in told and told.count("mine.cu:43") == 1


def test_a_failure_under_a_mask_of_tensors_is_told(verified: Callable[[list[CaseResult]], None], fa_cli: Run) -> None:
    """Cases have no values for the tensors that a mask names; how large they are is known nevertheless."""
    masked = "B1_H1_S33_D64,mask=doc[b, q] == doc[b, k]"
    verified([case(0, "B2_H2_S129_D64", "O is wrong at batch 0"), case(1, masked, "O is wrong at batch 0")])
    told = fa_cli("verify", "mine").stdout
    assert "FAIL mine forward case 1, " in told and "doc[b, q] == doc[b, k]" in told and "O wrong in 1 more case: 0" in told


def test_random_cases_with_one_cause_are_named(verified: Callable[[list[CaseResult]], None], fa_cli: Run) -> None:
    """As they come, each with its command; only the first says all."""
    verified([case(i, "B1_H1_S33_D64", f"O is wrong at batch {i}, head 0: got 1, expected 2; error {i}") for i in range(3)])
    told = fa_cli("verify", "mine", "--fuzz", 3).stdout
    assert told.count("is wrong at") == 1 and told.count(": O wrong (as above)\n") == 2 and told.count("fa-cli verify mine --case") == 3


@needs_compiler
def test_a_compile_error_is_short(fa_cli: Run, tmp_path: Path) -> None:
    """The compiler's command and the end of a long log are printed with -v only, and the hint says so where there is no other."""
    (tmp_path / "mine_forward.cu").write_text(
        PLAIN.replace("float score = 0;", "float score = " + " + ".join(f"none{i}" for i in range(9)) + ";")
    )
    told = fa_cli("run", "./mine_forward.cu", *SHAPE)
    lines = told.stderr.splitlines()
    assert told.exit_code == 5 and "mine_forward.cu:29" in told.stderr and len(lines) <= 16
    assert lines[-1] == "hint: the same command with -v also prints the compiler's command" and re.search(
        r"… \d+ more lines: -v", told.stderr
    )
    more = fa_cli("run", "./mine_forward.cu", *SHAPE, "-v").stderr
    assert "\nthe compiler's command: /" in more and "more lines" not in more and "hint: " not in more


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "// [[launch]]",
            "// [tile]\n// THREADS = 32\n// [[launch]]",
            "THREADS is a macro, from [tile] in the header: remove its definition",
        ),
        ("THREADS = 32", "HEAD_DIM = 32", "HEAD_DIM is a macro, from head_dims in the header: remove its definition"),
        (
            "k_smem[HEAD_DIM],",
            "k_smem[99999],",
            "use dynamic shared memory: extern __shared__ float smem[]; in the kernel",
        ),
        ("__syncthreads();  // arrived", "", "put __syncthreads() between the two accesses"),
        (
            "__syncthreads();  // arrived",
            "if (threadIdx.x < 16) __syncthreads();",
            "every thread of the block must reach the same __syncthreads()",
        ),
        (
            "logsumexp[head",
            "logsumexp[1000000000000ll + head",
            "an index is out of bounds or a pointer was not set: fa-cli run --check asan",
        ),
    ],
)
def test_hints(old: str, new: str, wanted: str, fa_cli: Run, tmp_path: Path) -> None:
    """What to do, never only where to look."""
    text = PLAIN.replace("// ///\n\n", "// ///\n\nconstexpr int THREADS = 32;\n", 1)
    assert old in text
    (tmp_path / "mine_forward.cu").write_text(text.replace(old, new))
    told = fa_cli("run", "./mine_forward.cu", *SHAPE, "--check", "race")
    assert told.exit_code in (1, 5) and f"hint: {wanted}" in told.stderr, told.stderr


@needs_compiler
def test_a_file_below_this_folder_is_named_from_here(fa_cli: Run, tmp_path: Path) -> None:
    """In the lines of a report, and in the command that runs a case alone."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine_forward.cu").write_text(PLAIN.replace("__syncthreads();  // arrived", ""))
    told = fa_cli("run", "sub/mine_forward.cu", *SHAPE, "--check", "race").stderr
    assert " at sub/mine_forward.cu:26" in told and str(tmp_path) not in told
    told = fa_cli("verify", "sub/mine_forward.cu", "--case", "B1_H1_S40_D32", "--check", "race").stdout
    assert "\n     fa-cli verify sub/mine_forward.cu " in told and str(tmp_path) not in told


def test_a_name_without_its_end(fa_cli: Run, tmp_path: Path) -> None:
    """`./mine` is answered with the file of that name."""
    (tmp_path / "mine_forward.cu").write_text(HEADER.format(shared=0, tile="") + GOOD)
    told = fa_cli("run", "./mine", *SHAPE)
    assert told.exit_code == 2 and "hint: use ./mine_forward.cu" in told.stderr


@pytest.mark.parametrize(("text", "plain"), [(PLAIN, " --plain"), (WRONG, "")])
def test_the_other_pass_is_written_beside_the_first(text: str, plain: str, fa_cli: Run, tmp_path: Path) -> None:
    """The hint's command makes the file that was missing, as plain as the one that is there."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine_forward.cu").write_text(text)
    told = fa_cli("run", "there/mine_forward.cu", "--mode", "both", *SHAPE)
    command = f"fa-cli new mine{plain} --pass backward --output-dir there"
    assert told.exit_code == 2 and told.stderr.endswith(f"hint: write it: {command}\n")
    assert fa_cli(*command.split()[1:]).exit_code == 0 and (tmp_path / "there" / "mine_backward.cu").exists()


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("gqa = false", "gqa = yes", "mine_forward.cu:7: the header is not TOML: Invalid value: gqa = yes; write gqa = true"),
        ('">=sm_70"', ">=sm_70", 'mine_forward.cu:5: the header is not TOML: Invalid value: arch = >=sm_70; write arch = ">=sm_70"'),
        ("// ///\n\n", "\n", "mine_forward.cu:16: the header of line 1 is not closed: a line `// ///` ends it"),
    ],
)
def test_a_header_that_is_no_toml(old: str, new: str, wanted: str, fa_cli: Run, tmp_path: Path) -> None:
    """One line number, the line itself, and what to write."""
    (tmp_path / "mine_forward.cu").write_text(PLAIN.replace(old, new, 1))
    told = fa_cli("run", "./mine_forward.cu", *SHAPE)
    assert told.exit_code == 2 and wanted in told.stderr and "at line" not in told.stderr, told.stderr


@needs_compiler
def test_experiment_compares_own_kernels(fa_cli: Run, tmp_path: Path) -> None:
    """A column over the first kernel, as a terminal without torch has no other comparison; every file is named."""
    (tmp_path / "two.toml").write_text('kernels = ["fa1", "fa2"]\npeers = []\nshapes = [{ batch = 1, heads = 1, seq = 16, dim = 16 }]\n')
    told = fa_cli("experiment", "two.toml", "--no-figures", "--samples", 3).stdout
    header, fa1, fa2 = (re.split(r"\s{2,}", line) for line in told.splitlines()[:3])
    assert fa1[header.index("vs fa1")] == "1" and float(fa2[header.index("vs fa1")]) > 0
    assert "written  experiment_results/two/samples.jsonl" in told


@needs_compiler
def test_tune_without_a_gpu_says_why_there_is_no_row(fa_cli: Run) -> None:
    """And counts static shared memory without NVRTC."""
    told = fa_cli("tune", "fa2", "--tile", "BLOCK_K=32", *SHAPE)
    assert told.exit_code == 0 and "so no [[choice]] row is printed" in told.stderr
    rows = json.loads(fa_cli("tune", "fa2", "--tile", "BLOCK_K=32", *SHAPE, "--json").stdout)["rows"]
    assert all(row["shared_bytes"] for row in rows)


@needs_compiler
def test_a_wrong_later_launch_is_named_as_it_is_and_again(tmp_path: Path) -> None:
    """What is not the answer to earlier inputs is not called that; and the command of a failure draws the same inputs again."""
    text = PLAIN.replace("// ///\n\n", "// ///\n\n__device__ int launches = 0;\n", 1)
    text = text.replace(
        "    if (query >=",
        "    if (threadIdx.x == 0) ++launches;\n    __syncthreads();\n    if (launches > 2) row_sum *= 1.5f;\n    if (query >=",
    )
    (tmp_path / "mine_forward.cu").write_text(text)
    words = ("verify", "./mine_forward.cu", "--case", "B1_H1_S20_D32", "--device", "cpu")
    command = [sys.executable, str(ROOT / "cli.py"), *words]  # each in a process of its own: the kernel counts its launches
    told = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout for _ in range(2)]
    failures = [next(line for line in each.splitlines() if line.startswith("FAIL mine forward case")) for each in told]
    assert re.search(r": it is wrong on other inputs, of which [QK] is new \(O is wrong at ", failures[0]) and failures[0] == failures[1]


@needs_compiler
def test_what_was_never_written_is_called_that(fa_cli: Run, tmp_path: Path) -> None:
    """Rows that no block computes hold the poison; a NaN that was computed is another one."""
    path = tmp_path / "mine_forward.cu"
    path.write_text(PLAIN.replace("ceil_div(seq_q, 32)", "seq_q // 32"))
    assert "; 256 values in 8 rows hold the NaN of memory that was never written" in fa_cli("run", path, *SHAPE).stdout
    path.write_text(PLAIN.replace("o[d] / row_sum", "o[d] * (row_sum - row_sum) / 0.0f"))
    assert "; 1280 values in 40 rows are not finite, or finite where they should not be" in fa_cli("run", path, *SHAPE).stdout


@needs_compiler
def test_the_default_verify_sees_a_race_of_a_late_tile(fa_cli: Run, tmp_path: Path) -> None:
    """Its case that is checked for races has more tiles than a loop treats in a special way."""
    (tmp_path / "mine_forward.cu").write_text(PLAIN.replace("__syncthreads();  // read", "if (j < 192) __syncthreads();"))
    told = fa_cli("verify", "./mine_forward.cu").stdout
    assert re.search(r"FAIL mine forward case \d+, B1_H1_S200_D32,\S*check=race\S*: mine_forward: races on shared memory", told), told


def _own(text: str = PLAIN, name: str = "mine_forward.cu") -> str:
    """A kernel file in the folder of the test, as it is named in a command."""
    Path(name).write_text(text)
    return f"./{name}"


@needs_compiler
def test_a_file_of_ones_own_is_told_what_was_not_checked(fa_cli: Run) -> None:
    """Races after a PASS, what may be wrong after a FAIL; nothing of a kernel of the tree, nor where a check was asked for."""
    assert "note: races were not looked for: --check race does" in fa_cli("run", _own(), *SHAPE).stderr
    assert "--check" not in fa_cli("run", _own(), *SHAPE, "--check", "race").stderr
    assert "--check" not in fa_cli("run", "fa1", *SHAPE).stderr
    wrong = fa_cli("run", _own(PLAIN.replace("o[d] / row_sum", "o[d]")), *SHAPE)
    assert wrong.exit_code == 1
    assert "note: --check race finds a missing barrier, --check asan an index out of bounds" in wrong.stderr


@pytest.mark.parametrize(
    ("edits", "options", "code", "hint"),
    [
        ([("block = 32", "block = 2048")], (), 2, "or change block in its header"),
        ([("block = 32", 'block = 32\n// shared = "300000"')], (), 2, "or change shared in its header"),
        (
            [('"scale"]', "]"), (", int seq_q,\n" + 35 * " " + "float scale", ", int seq_q"), ("scale *", "1 *")],
            ("--scale", "0.3"),
            2,
            'add "scale" to its args',
        ),
        ([("ceil_div(seq_q, 32)", "cdiv(seq_q, 32)")], (), 2, "did you mean ceil_div?"),
    ],
    ids=["block", "shared", "scale", "function"],
)
def test_the_hint_fits_a_file_of_ones_own(
    edits: list[tuple[str, str]], options: tuple[str, ...], code: int, hint: str, fa_cli: Run
) -> None:
    """It has no tiles to choose, and is no kernel of a list."""
    text = PLAIN
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    told = fa_cli("run", _own(text), *SHAPE, *options)
    assert told.exit_code == code and hint in told.stderr, told.stderr


def test_the_nearest_file_is_named(fa_cli: Run) -> None:
    """Of a name that is not there, with its folder; not one that is quite another."""
    Path("own").mkdir()
    _own(name="own/mine_forward.cu")
    assert "hint: use own/mine_forward.cu\n" in fa_cli("run", "own/mine_forwrd.cu").stderr
    assert "mine" not in fa_cli("run", "own/theirs.cu").stderr


def test_compile_counts_what_is_not_offered_and_explains_static_memory(fa_cli: Run) -> None:
    """A kernel too large for an architecture was not compiled there; ptxas's own words have no advice."""
    pytest.importorskip("cuda.bindings.nvrtc")
    big = fa_cli("compile", _own(PLAIN.replace("block = 32", 'block = 32\n// shared = "300000"')), "--arch", "sm_90")
    assert "PASS 0 of 1 compiled as their headers promise, 1 not offered" in big.stdout
    fixed = PLAIN.replace(
        "float q[HEAD_DIM]", "__shared__ float big[16384];\n    big[seq_q] = Q[query];\n    O[0] = big[heads_q];\n    float q[HEAD_DIM]"
    )
    told = fa_cli("compile", _own(fixed), "--arch", "sm_90")
    assert (
        told.exit_code == 5 and "\0" not in told.stdout and "static __shared__ arrays have 48 KB: declare `extern __shared__" in told.stdout
    )
