"""`extern __shared__` of a user's own file on the CPU engine, wherever it is declared, and what must not crash at the load of a library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_host import HEADER, PLAIN, ROOT, own

from harness.backends import Backend, CompileError
from harness.backends.host.backend import Host
from harness.backends.host.dynamic import with_dynamic_shared
from harness.backends.host.report import CheckFault
from harness.check.contender import run_kernel
from harness.check.oracle import oracle_for
from harness.problem import Problem

LOCAL = "    extern __shared__ float p[];\n"
FILE = "extern __shared__ float p[];\n" + PLAIN.replace(LOCAL, "")
HELPER = "__device__ void keep(int j, float x) { p[j] = x; }\n"
#: Where it is declared -> the file.
PLACES = {
    "at file scope": FILE,
    "with an alignment, in a namespace": FILE.replace(
        "extern __shared__ float p[];", "namespace { extern __shared__ __align__(16) float p[]; }"
    ),
    "behind the brace of the kernel": PLAIN.replace(LOCAL, "").replace("float scale) {", "float scale) { extern __shared__ float p[];"),
    "for a function that the kernel calls": FILE.replace('extern "C"', HELPER + 'extern "C"')
    .replace("p[j] = expf", "keep(j, expf")
    .replace("expf(s * scale);\n        mine += p[j]", "expf(s * scale));\n        mine += p[j]"),
    "under a macro": FILE.replace('extern "C"', '#define PS (p)\nextern "C"').replace("p[j]", "PS[j]"),
    "next to parameters and variables of the same name": FILE.replace(
        'extern "C"',
        "struct Twice { float x; __device__ float of() const { float p[2] = {x, x}; return p[0] + p[1]; } };\n"
        '__device__ float second(const float* p) { return p[1]; }\nextern "C"',
    ).replace("logf(total)", "logf(Twice{total}.of() / 2) + 0 * second(Q)"),
}


def right(backend: Backend, folder: Path, body: str) -> bool:
    oracle = oracle_for(Problem.of(1, 2, 70, 64), backend, "forward")
    return run_kernel(backend, own(folder, body), oracle, oracle.inputs).passed


@pytest.mark.parametrize("place", PLACES)
def test_dynamic_shared_memory_may_be_declared_anywhere(place: str, backend: Backend, tmp_path: Path) -> None:
    """As on a GPU; it was a crash at file scope, where a pointer was set when the library was loaded."""
    assert "[" in PLACES[place] and PLACES[place] != PLAIN
    assert right(backend, tmp_path, PLACES[place])


def test_a_debugger_sees_the_whole_array(tmp_path: Path) -> None:
    """It has the size of the launch."""
    assert right(Host(debug=True), tmp_path, FILE)
    assert "float (&p)[512 / sizeof(float)] =" in with_dynamic_shared(FILE, 512)


def test_lines_keep_their_numbers() -> None:
    """And nothing else changes: the declaration goes, and comes back in the one function that uses it."""
    text = "// extern __shared__ float p[];\n" + FILE + '__device__ const char* other() { return "{ p"; }\n'
    after = with_dynamic_shared(text)
    assert after.count("\n") == text.count("\n") and after.count("fa::dynamic_shared<float>()") == 1
    assert after.splitlines()[0] == text.splitlines()[0] and after.splitlines()[-1] == text.splitlines()[-1]
    with_names = FILE.replace("__shared__ float total", "__shared__ float p_total")
    assert with_dynamic_shared(with_names).count("dynamic_shared") == 1


def test_a_race_names_the_element(tmp_path: Path) -> None:
    """Also of an array that is declared at file scope."""
    oracle = oracle_for(Problem.of(1, 1, 70, 64), Host(), "forward")
    racy = FILE.replace("    __syncthreads();\n    for (int d = threadIdx.x; d < dim", "    for (int d = threadIdx.x; d < dim")
    with pytest.raises(CheckFault, match=r"race on shared memory p\[\d+\]"):
        run_kernel(Host(check="race"), own(tmp_path, racy), oracle, oracle.inputs)


@pytest.mark.parametrize(
    "body, why",
    [
        (
            FILE.replace("float p[]", "float p[], q[]"),
            r"own_forward.cu:18: write dynamic shared memory as `extern __shared__ TYPE NAME\[\];`",
        ),
        ('#include "mine.cuh"\n' + PLAIN.replace(LOCAL, ""), r"mine.cuh:2: write dynamic shared memory as"),
        ("int first = threadIdx.x;\n" + FILE, "a variable outside functions starts with a value that must be computed"),
        ("struct A { int a; __device__ A() : a(blockIdx.x) {} };\nA first;\n" + FILE, "a variable outside functions starts with a value"),
    ],
    ids=["two names", "in a header", "a variable", "a constructor"],
)
@pytest.mark.parametrize("check", [None, "race"])
def test_what_cannot_be_is_refused(body: str, why: str, check: str | None, tmp_path: Path) -> None:
    """Before the library is loaded: code that it runs then has no thread, and would crash."""
    (tmp_path / "mine.cuh").write_text("// mine\nextern __shared__ float p[];\n")
    with pytest.raises(CompileError, match=why) as caught:
        oracle = oracle_for(Problem.of(1, 1, 70, 64), Host(), "forward")
        run_kernel(Host(check=check), own(tmp_path, body), oracle, oracle.inputs)
    assert caught.value.exit_code == 5
    if "own_forward.cu:18:" in why:
        assert (HEADER + body).splitlines()[17].startswith("extern __shared__")


@pytest.mark.parametrize("written", ["__global__ void forward", "namespace mine {\n__global__ void forward"])
def test_an_entry_with_a_name_of_cpp_is_refused(written: str, tmp_path: Path) -> None:
    """As on a GPU, which would not find it; a block of extern "C" is as good as the word on the line."""
    body = PLAIN.replace('extern "C" __global__ void forward', written) + ("}\nusing mine::forward;\n" if "mine" in written else "")
    line = 17 + 1 + written.count("\n")
    problem = Problem.of(1, 1, 16, 64)
    with pytest.raises(CompileError, match=rf'own_forward.cu:{line}: forward has a C\+\+ name.* write extern "C" __global__') as caught:
        Host().load(own(tmp_path, body), problem)
    assert caught.value.exit_code == 5
    in_block = 'extern "C" {\n' + PLAIN.replace('extern "C" __global__', "__global__") + "}\n"
    assert Host().load(own(tmp_path, in_block), problem)


def test_a_kernel_that_overwrites_the_engine_is_reported(tmp_path: Path) -> None:
    """Exit code 5 and a hint, not a bare signal: the engine's own report crashes then."""
    smash = "    for (long i = 64; i < 100000; ++i) reinterpret_cast<volatile char*>(&threadIdx)[-i] = 0;\n    __trap();\n"
    own(tmp_path, PLAIN.replace("    __shared__ float total;\n", "    __shared__ float total;\n" + smash))
    command = [sys.executable, str(ROOT / "cli.py"), "run", "./own_forward.cu", "--device", "cpu", "--batch", "1", "--heads", "1"]
    done = subprocess.run([*command, "--seq", "16"], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 5, (done.returncode, done.stderr)
    assert re.search(r"^error: .*(CPU engine|stopped)", done.stderr, re.M) and "hint: " in done.stderr, done.stderr
