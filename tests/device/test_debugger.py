"""`run --debug`: the build for a debugger, the debugger's command line, and gdb itself in a kernel, where there is one."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from planted import top

from harness.backends.host.backend import Host
from harness.fault import UsageFault
from harness.kernel import Kernel, find
from harness.problem import Problem
from harness.terminal import debugger

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
SHAPE = ("--batch", "1", "--heads", "2", "--seq", "20", "--dim", "64", "--device", "cpu")

#: A forward pass with plain parameters: a static array, an array of the launch's size, a function to step into.
OWN = (
    top(title='"a block a query, scores in shared memory"', causal="false", gqa="false", cross="false", logits="80")
    + """\
// [tile]
// THREADS = 64
// [[launch]]
// entry = "attend"
// grid = ["seq_q", "heads_q", "batch"]
// block = "THREADS"
// shared = "seq_q * 4"
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q"]
// ///
__device__ float scaled(float x) { return x * 0.125f; }

extern "C" __global__ void attend(const float* Q, const float* K, const float* V, float* O, float* logsumexp, int heads, int seq) {
    extern __shared__ float scores[];
    __shared__ float q_smem[HEAD_DIM];
    int d = threadIdx.x, query = blockIdx.x, head = blockIdx.z * heads + blockIdx.y;
    long long first = (long long)head * seq * HEAD_DIM;
    q_smem[d] = Q[first + query * HEAD_DIM + d];
    __syncthreads();  // q is whole
    for (int key = d; key < seq; key += THREADS) {
        float sum = 0;
        for (int i = 0; i < HEAD_DIM; ++i) sum += q_smem[i] * K[first + key * HEAD_DIM + i];
        scores[key] = scaled(sum);
    }
    __syncthreads();  // scores are whole
    float total = 0, o = 0;
    for (int key = 0; key < seq; ++key) {
        float p = expf(scores[key]);
        total += p;
        o += p * V[first + key * HEAD_DIM + d];
    }
    O[first + query * HEAD_DIM + d] = o / total;
    if (d == 0) logsumexp[head * seq + query] = logf(total);
}
"""
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_forward.cu"
    path.write_text(OWN)
    return path


def line(path: Path, words: str) -> str:
    """file:line of the first line that holds these words."""
    return f"{path.name}:{next(i for i, text in enumerate(path.read_text().splitlines(), 1) if words in text)}"


def gdb(path: Path, *commands: str, shape: tuple[str, ...] = SHAPE) -> str:
    """What gdb says when it runs a kernel of a file with --debug and is given these commands."""
    if not shutil.which("gdb"):
        pytest.skip("no gdb: apt install gdb")
    script = path.with_suffix(".gdb")
    script.write_text("\n".join(("set pagination off", "set width 0", *commands, "delete", "continue")))
    words = debugger.command([str(ROOT / "cli.py"), "run", str(path), "--debug", *shape], (), False)
    words[words.index("-ex") : words.index("-ex") + 2] = ["-batch", "-x", str(script)]  # in place of `run`
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=path.parent if path.parent != ROOT / "kernels_cu" else None, timeout=100
    )
    if "ptrace" in done.stderr:
        pytest.skip("no process may be traced here")
    return done.stdout + done.stderr


def test_a_breakpoint_stops_in_the_thread_asked_for(own: Path) -> None:
    """With its place, its variables and the block's shared arrays; over a barrier it stays in that thread; the verdict is as ever."""
    stop = line(own, "// q is whole")
    said = gdb(
        own,
        f"break {stop} if threadIdx.x == 3 && blockIdx.x == 2 && blockIdx.y == 1",
        "run",
        *(f"print {name}" for name in ("threadIdx", "blockIdx", "blockDim.x", "gridDim.y", "query", "sizeof(q_smem)", "q_smem[3]")),
        "print Q[first + query * 64 + 3]",
        "next",  # all other threads reach the barrier meanwhile
        "print threadIdx.x",
        "print q_smem[63] == Q[first + query * 64 + 63]",
        "next 3",
        "step",
        "finish",
        "next",
        "ptype scores",
        "print scores[3] == $",
        "print scores[19]",
    )
    values = dict(re.findall(r"^\$(\d+) = (.*)$", said, re.M))
    assert [values[n] for n in "123456"] == [
        *("{x = 3, y = 0, z = 0}", "{x = 2, y = 1, z = 0}", "64", "2", "2", "256"),
    ], said
    assert values["7"] == values["8"] and values["9"] == "3" and values["10"] == "true", said
    assert "scaled (x=" in said and re.search(rf"at {re.escape(str(own))}:\d+", said)
    assert "type = float (&)[20]" in said, "the array of the launch's size is a whole array"
    assert list(values.values())[-2:] == ["true", "-nan(0x7fffff)"], "what no thread has written yet is poison"
    assert "PASS own forward" in said and "exited normally" in said


def test_a_kernel_of_the_tree_too(tmp_path: Path) -> None:
    """Its macros are names as well: those of tiles and of CUDA; a word can be stepped into."""
    path = find("tiled", "forward").path
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    said = gdb(
        copy,
        f"break {line(copy, 'both tiles are complete')} if threadIdx.x == 40",
        "run",
        "print TILE",
        "print HEAD_DIM",
        "ptype k_smem",
        "print threadIdx.x / TILE == row",
    )
    assert re.findall(r"^(?:\$\d+|type) = (.*)$", said, re.M)[:4] == ["32", "64", "float [32][65]", "true"], said
    assert "PASS 01_tiled forward" in said or "PASS tiled forward" in said, said


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump: apt install binutils")
@pytest.mark.parametrize("name", ["fa2", "own"])
def test_a_debug_build_has_the_lines_of_the_file(own: Path, name: str) -> None:
    """The optimised build is another library, without lines. Both of a kernel that is included, and of one that is rewritten."""
    kernel = Kernel.read(own) if name == "own" else find(name, "forward")
    problem = Problem.of(1, 1, 20, 64)
    libraries = [Host(debug=debug).load(kernel, problem).functions["library"].path for debug in (True, False)]
    assert libraries[0] != libraries[1]
    lines = [subprocess.run(["objdump", "--dwarf=decodedline", path], capture_output=True, text=True).stdout for path in libraries]
    stop = next(i for i, text in enumerate(kernel.path.read_text().splitlines(), 1) if "__syncthreads();" in text and "//  " not in text)
    assert re.search(rf"^{re.escape(kernel.path.name)}\s+{stop}\s", lines[0], re.M)
    assert kernel.path.name not in lines[1]


@pytest.mark.parametrize("name", ["07", "mma_qreg_async"])
def test_kernels_run_as_they_are_built_for_a_debugger(fa_cli: Run, tmp_path: Path, name: str) -> None:
    """Tensor cores and copies in flight too: nothing of the engine needs an optimiser. It is judged, and not timed."""
    shape = ("--batch", "1", "--heads", "1", "--seq", "70", "--dtype", "bfloat16", "--device", "cpu", "--output-dir", str(tmp_path))
    done = fa_cli("run", name, "--debug", "--mode", "both", "--json", *shape)
    assert done.exit_code == 0, done.output
    assert '"passed": true' in done.stdout and '"forward": null' in done.stdout
    assert done.stderr.count("tbreak") == 1 + len(find(name, "backward").entries)


def test_the_line_is_said_where_no_terminal_is(fa_cli: Run, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fa_cli("run", str(own), "--debug", *SHAPE, "--output-dir", str(own.parent))
    (said,) = (text for text in done.stderr.splitlines() if "gdb" in text)
    words = shlex.split(said.partition(": step through it: ")[2])
    assert words[:4] == ["gdb", "-q", "-ix", str(debugger.SCRIPT)] and "tbreak own_forward.cu:attend" in words
    assert words[words.index("--args") + 1] == sys.executable
    assert done.exit_code == 0 and "PASS own forward" in done.stdout
    monkeypatch.setattr(debugger, "traced", lambda: True)
    assert "gdb" not in fa_cli("run", str(own), "--debug", *SHAPE, "--output-dir", str(own.parent)).stderr


def test_on_a_gpu_it_is_cuda_gdb() -> None:
    words = debugger.command(["cli.py", "run", "fa2", "--debug"], [find("naive", "forward")], True)
    assert words[0] == "cuda-gdb" and str(debugger.SCRIPT) not in words and "set breakpoint pending on" in words
    assert [word for word in words if word.startswith("tbreak")] == [
        f"tbreak 00_naive_forward.cu:{e}" for e in find("naive", "forward").entries
    ]


def test_on_a_terminal_the_debugger_starts(own: Path) -> None:
    """In place of the run, with its command line."""
    fake = own.with_name("gdb")
    fake.write_text('#!/bin/sh\necho "started: $@"\n')
    fake.chmod(0o700)
    ours, theirs = pty.openpty()
    path = f"{own.parent}:{os.environ['PATH']}"
    command = [sys.executable, str(ROOT / "cli.py"), "run", str(own), "--debug", *SHAPE]
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"PATH": path}, cwd=own.parent)
    assert done.wait(60) == 0
    said = os.read(ours, 1 << 16).decode()
    os.close(ours), os.close(theirs)
    assert f"started: -q -ix {debugger.SCRIPT}" in said and "PASS" not in said
    assert not (own.parent / "data").exists(), "the run is gdb's"


@pytest.mark.parametrize(
    ("more", "what"),
    [(("naive",), "2 kernels"), (("--watch",), "--watch"), (("--check", "race"), "--check race"), (("numpy",), "unknown kernel")],
)
def test_one_kernel_and_nothing_beside_it(fa_cli: Run, own: Path, more: tuple[str, ...], what: str) -> None:
    done = fa_cli("run", str(own), "--debug", *SHAPE, *more)
    assert done.exit_code == UsageFault.exit_code and what in done.stderr and "hint:" in done.stderr
    assert "gdb" not in done.stderr
