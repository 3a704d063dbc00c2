"""What is the CPU engine's own: its cache, its child process for AddressSanitizer, its limits, and a user's own files on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import top

from harness import backends, kernel
from harness.backends import CompileError
from harness.backends.host import build, cache, report
from harness.backends.host.backend import Host
from harness.check.choose import contender
from harness.check.contender import run_kernel
from harness.check.oracle import oracle_for
from harness.check.request import Request
from harness.check.tensors import Bound
from harness.fault import EnvironmentFault
from harness.kernel import Kernel
from harness.kernel.new import new as plain_kernel
from harness.problem import Problem
from harness.verbs.run import check_in_memory

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = (
    top(title='"a user\'s own"', causal="false", gqa="false", cross="false")
    + """\
// [[launch]]
// entry = "forward"
// grid = ["seq_q", "heads_q", "batch"]
// block = 64
// shared = "4 * (seq_kv + 64)"
// args = ["Q", "K", "V", "O", "logsumexp", "heads_q", "seq_q", "head_dim", "scale"]
// ///
"""
)
#: Attention of one row a block, written as anyone might: plain parameters, extern and static shared memory, no word of ours.
PLAIN = """\
extern "C" __global__ void forward(const float* Q, const float* K, const float* V, float* O, float* logsumexp,
                                   int heads, int seq, int dim, float scale) {
    extern __shared__ float p[];
    __shared__ float total;
    long long head = blockIdx.z * heads + blockIdx.y, row = head * seq + blockIdx.x;
    const float* k = K + head * seq * dim;
    const float* v = V + head * seq * dim;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    float mine = 0;
    for (int j = threadIdx.x; j < seq; j += blockDim.x) {
        float s = 0;
        for (int d = 0; d < dim; ++d) s += Q[row * dim + d] * k[j * dim + d];
        p[j] = expf(s * scale);
        mine += p[j];
    }
    for (int step = 16; step; step /= 2) mine += __shfl_xor_sync(0xffffffff, mine, step);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, mine);
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float o = 0;
        for (int j = 0; j < seq; ++j) o += p[j] * v[j * dim + d];
        O[row * dim + d] = o / total;
    }
    if (threadIdx.x == 0) logsumexp[row] = logf(total);
}
"""
PTX = '    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));\n'


def own(folder: Path, body: str = PLAIN, name: str = "own_forward.cu", header: str = HEADER) -> Kernel:
    path = folder / name
    path.write_text(header + body)
    return Kernel.read(path)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_plain_kernels_of_new_are_right(pass_: str, backend: backends.Backend, tmp_path: Path) -> None:
    """At once, on every backend: masks, groups, unequal lengths, a query that sees no key, a head dim between the widths."""
    mine = contender(str(plain_kernel("mine", pass_=pass_, folder=tmp_path, plain=True)), Request(mode=pass_))
    for problem in (
        Problem.of(1, 2, 37, 32),
        Problem.of(2, 4, 45, 59, heads_kv=2, seq_kv=70, causal=True),
        Problem.of(1, 2, 40, 16, seq_kv=9, causal=True, scale=0.3),
    ):
        assert check_in_memory(mine, pass_, problem, backend).passed, problem.describe()


def test_a_plain_parameter_kernel_runs_as_it_is(backend: backends.Backend, tmp_path: Path) -> None:
    """No header of ours, parameters in the order asked for, tensors without pitch (D = 59), on every backend."""
    for problem in (Problem.of(2, 3, 67, 59), Problem.of(1, 1, 1, 64)):
        oracle = oracle_for(problem, backend, "forward")
        assert run_kernel(backend, own(tmp_path), oracle, oracle.inputs).passed
    with_size_t = own(tmp_path, "__device__ size_t twice(size_t n) { return 2 * n; }\n" + PLAIN)  # which NVRTC knows without a header
    assert run_kernel(backend, with_size_t, oracle, oracle.inputs).passed


@pytest.mark.parametrize(
    "planted, why",
    [(PTX, "inline PTX"), ("#include <cuda_fp16.h>\n", "#include <cuda_fp16.h>")],
    ids=["PTX", "a CUDA header"],
)
def test_what_only_a_gpu_understands_is_refused_with_its_line(planted: str, why: str, tmp_path: Path) -> None:
    """In the file itself and in a header of the user's own; not in a comment."""
    for file in ("own_forward.cu", "mine.cuh"):
        body = f'// asm volatile("in a comment is nothing");\n{planted}' + PLAIN
        if file == "mine.cuh":
            (tmp_path / file).write_text(planted)
            body = '#include "mine.cuh"\n' + PLAIN
        chosen = own(tmp_path, body)
        text = (tmp_path / file).read_text()
        line = text[: text.index(planted)].count("\n") + 1
        with pytest.raises(CompileError) as caught:
            Host().load(chosen, Problem.of(1, 1, 8, 64))
        assert f"{file}:{line}: {why}" in caught.value.why and caught.value.exit_code == 5


def test_files_of_other_editors_run(tmp_path: Path) -> None:
    """A byte order mark at the start of a kernel, and a header whose comments are Latin-1."""
    (tmp_path / "mine.cuh").write_bytes("// caf\xe9\nconstexpr float one = 1;\n".encode("latin-1"))
    body = '#include "mine.cuh"\n' + PLAIN.replace("o / total", "one * o / total")
    assert outputs(own(tmp_path, body, header="\ufeff" + HEADER)).all()


def test_a_parameter_of_another_size_does_not_compile(tmp_path: Path) -> None:
    """Sizes are int: a long long would read four bytes of the next one. The compiler judges what a macro writes, too."""
    for old, new, why in (("int seq,", "long long seq,", "another size"), ("int seq,", "SEVERAL", "another number")):
        with pytest.raises(CompileError, match=why):
            Host().load(own(tmp_path, "#define SEVERAL int seq, int more,\n" + PLAIN.replace(old, new, 1)), Problem.of(1, 1, 8, 64))


def test_raw_ptx_and_cuda_headers_run_on_a_gpu(backend: backends.Backend, tmp_path: Path) -> None:
    """The same plants, on a GPU: what NVRTC compiles, runs."""
    if backend.name != "cuda":
        pytest.skip("a GPU test")
    body = "#include <cuda_fp16.h>\n" + PLAIN.replace(
        "    float mine = 0;\n", f"    unsigned lane;\n{PTX}    float mine = __half2float(__float2half(0.0f)) * lane;\n"
    )
    problem = Problem.of(2, 3, 67, 64)
    oracle = oracle_for(problem, backend, "forward")
    assert run_kernel(backend, own(tmp_path, body), oracle, oracle.inputs).passed


def test_a_compile_error_has_file_and_line(tmp_path: Path) -> None:
    """The compiler's log, with the kernel's real file and the line in it."""
    chosen = own(tmp_path, PLAIN.replace("expf(", "expq("))
    line = (tmp_path / "own_forward.cu").read_text()[: chosen.path.read_text().index("expq(")].count("\n") + 1
    with pytest.raises(CompileError) as caught:
        Host().load(chosen, Problem.of(1, 1, 8, 64))
    assert f"own_forward.cu:{line}:" in caught.value.log and "expq" in caught.value.log
    assert "g++" in caught.value.more or "clang" in caught.value.more


def test_no_compiler_is_an_environment_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the package to install."""

    build.compiler.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(EnvironmentFault) as caught:
            Host()
        assert caught.value.exit_code == 4 and "apt install g++" in caught.value.hint
    finally:
        build.compiler.cache_clear()


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def outputs(chosen: Kernel) -> np.ndarray:
    problem = Problem.of(1, 1, 8, 64)
    backend = Host()
    x = np.random.RandomState(1).randn(*problem.shape("Q")).astype(np.float32)
    return Bound(backend, backend.load(chosen, problem), problem, {"Q": x, "K": x, "V": x}).run()["O"]


def test_a_kernel_compiles_in_two_seconds_and_then_not_again(empty_cache: Path, tmp_path: Path) -> None:
    """The engine is built already (once a machine); the second load takes the library from the cache."""
    backend, problem = Host(), Problem.of(1, 1, 8, 64)
    backend.load(own(tmp_path), problem)
    path = tmp_path / "mine_forward.cu"  # a copy: no other test of this process has it open already
    path.write_text(kernel.find("fa2", "forward").path.read_text())
    before = os.times()
    backend.load(Kernel.read(path), problem)
    after = os.times()  # processor time, the compiler's included: a busy machine does not change it
    assert 0 < sum(after[:4]) - sum(before[:4]) < 2
    libraries = {file: file.stat().st_mtime_ns for file in empty_cache.rglob("*.so")}
    backend.load(Kernel.read(path), problem)
    assert libraries and {file: file.stat().st_mtime_ns for file in empty_cache.rglob("*.so")} == libraries


def test_an_edited_kernel_and_an_edited_header_are_compiled_again(empty_cache: Path, tmp_path: Path) -> None:
    """Never a stale kernel: the key holds the source and every header it reaches."""
    (tmp_path / "mine.cuh").write_text("constexpr float factor = 1.0f;\n")
    body = '#include "mine.cuh"\n' + PLAIN.replace("o / total", "factor * o / total")
    first = outputs(own(tmp_path, body))
    (tmp_path / "mine.cuh").write_text("constexpr float factor = 2.0f;\n")
    assert np.array_equal(outputs(own(tmp_path, body)), 2 * first)
    assert np.array_equal(outputs(own(tmp_path, body.replace("factor *", "4.0f *"))), 4 * first)


SCRIPT = """
import sys; sys.path[:0] = [{root!r}, {tests!r}, {root!r} + "/tests/support"]
from pathlib import Path
from test_host import outputs
from harness.kernel import Kernel
print(repr(float(outputs(Kernel.read(Path({path!r}))).sum())))
"""


def in_process(path: Path) -> subprocess.Popen[str]:
    code = SCRIPT.format(root=str(ROOT), tests=str(Path(__file__).parent), path=str(path))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> float:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return float(out)


def test_two_processes_may_build_at_once_and_what_is_corrupt_is_built_again(empty_cache: Path, tmp_path: Path) -> None:
    """Both answer, and nothing but libraries and their notes is left. Truncated and overwritten libraries, the engine's too, are noticed by
    their hash. One test, for an engine takes five seconds to build."""
    path = own(tmp_path).path
    (right,) = {answer(p) for p in [in_process(path), in_process(path)]}
    assert {file.suffix for file in (empty_cache / "host").rglob("*") if file.is_file()} == {".so", ".json"}
    engine, mine = sorted(empty_cache.rglob("*.so"), key=lambda file: b"fa_host_entry_forward" in file.read_bytes())
    engine.write_bytes(engine.read_bytes()[:-100])
    mine.write_bytes(b"")
    assert answer(in_process(path)) == right and mine.stat().st_size
    mine.write_bytes(b"not a library")
    assert answer(in_process(path)) == right


def test_hundreds_of_loads_in_one_process(tmp_path: Path) -> None:
    """300 different libraries, each run: no more than 64 stay open, so memory mappings do not grow with them."""
    chosen, problem, backend = own(tmp_path), Problem.of(1, 1, 8, 64), Host()
    loaded = backend.load(chosen, problem)
    x = np.ones(problem.shape("Q"), np.float32)

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    Bound(backend, loaded, problem, {"Q": x, "K": x, "V": x}).run()  # maps the stacks
    before, others = mappings(), set(build._open)  # launchers that other tests left hold theirs open
    for number in range(300):
        copy = tmp_path / f"{number}.so"
        shutil.copy(loaded.functions["library"].path, copy)  # a copy is another library to the loader
        descriptor = os.open(copy, os.O_RDONLY)
        opened = cache.Opened(copy, cache.load(descriptor), descriptor)
        library = build._keep_open(f"test {number}", build.Library(opened, chosen))
        other = replace(loaded, functions={"library": library})
        assert Bound(backend, other, problem, {"Q": x, "K": x, "V": x}).run()["O"].all()
        copy.unlink()
        del library, other
    assert len(set(build._open) - others) <= 64 + 2
    assert mappings() < before + 64 * 8


def test_local_arrays_beyond_a_fibers_stack_are_refused(tmp_path: Path) -> None:
    """Told with file and line when compiling, not met as a crash."""
    body = PLAIN.replace(
        "float mine = 0;", "volatile float much[30000]; for (int i = 0; i < 30000; ++i) much[i] = i; float mine = much[5] * 0;"
    )
    with pytest.raises(CompileError, match=r"(?s)does not compile.*own_forward.cu:\d+.*frame size"):
        Host().load(own(tmp_path, body), Problem.of(1, 1, 8, 64))


def test_shared_memory_is_that_of_one_launch(tmp_path: Path) -> None:
    """The largest of a file's launches, as on a GPU, though a library has the static arrays of all its entries."""
    launch = '[[launch]]\n// entry = "after"\n// grid = ["seq_q"]\n// block = 32\n// args = ["O"]\n'
    header = HEADER.replace('"4 * (seq_kv + 64)"', "256").removesuffix("// ///\n") + f"// {launch}// ///\n"
    body = PLAIN.replace("__shared__ float total;", "__shared__ float total, kept[256];")
    body = body.replace("float mine = 0;", "kept[threadIdx.x] = 0;\n    __syncthreads();\n    float mine = kept[dim];")
    body += 'extern "C" __global__ void after(float* O) {\n    __shared__ float other[512];\n    other[threadIdx.x] = O[0];\n'
    body += "    __syncthreads();\n    O[threadIdx.x] = other[31 - threadIdx.x];\n}\n"
    assert Host().load(own(tmp_path, body, header=header), Problem.of(1, 1, 64, 16)).shared_bytes == 2048
    assert Host().load(own(tmp_path, body, header=header.replace("256", "2048", 1)), Problem.of(1, 1, 64, 16)).shared_bytes == 2048 + 1028


# -- AddressSanitizer -------------------------------------------------------------------------------------------------


def cli(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | {"FA_CLI_DEVICE": "cpu"})


@pytest.mark.parametrize(
    "right, wrong, access, named",
    [
        ("O[row * dim + d] =", "O[(row + 1) * dim + d] =", "WRITE of size 4", " bytes after the end of O, whose shape is 1 x 1 x 16 x 64"),
        ("v[j * dim + d];", "v[(j - 1) * dim + d];", "READ of size 4", " bytes before the start of V, whose shape is 1 x 1 x 16 x 64"),
        ("o += p[j] * v[j * dim + d];", "o += p[j + 128] * v[j * dim + d];", "READ of size 4", "outside the block's shared memory"),
    ],
    ids=["after", "before", "shared"],
)
def test_asan_names_the_line_and_the_tensor_of_an_access_out_of_bounds(
    right: str, wrong: str, access: str, named: str, tmp_path: Path
) -> None:
    """In a child process, exit code 1, three lines."""
    own(tmp_path, PLAIN.replace(right, wrong))
    line = (HEADER + PLAIN)[: (HEADER + PLAIN).index(right)].count("\n") + 1
    done = cli("run", "--compute", "./own_forward.cu", "--batch", 1, "--heads", 1, "--seq", 16, "--check", "asan", cwd=tmp_path)
    assert done.returncode == 1
    assert f"out of bounds: {access} at" in done.stderr and f"own_forward.cu:{line}" in done.stderr, done.stderr
    assert named in done.stderr and "\x1f" not in done.stderr + done.stdout, done.stderr


def test_asan_knows_a_division_by_zero(tmp_path: Path) -> None:
    """It is no access out of bounds: exit code 5, with the line."""
    right = "O[row * dim + d] ="
    own(tmp_path, PLAIN.replace(right, f"O[row * dim + d] = seq / (dim - {64}) *"))
    line = (HEADER + PLAIN)[: (HEADER + PLAIN).index(right)].count("\n") + 1
    done = cli("run", "--compute", "./own_forward.cu", "--batch", 1, "--heads", 1, "--seq", 16, "--check", "asan", cwd=tmp_path)
    assert done.returncode == 5 and f"own_forward.cu:{line}" in done.stderr, done.stderr
    assert "division by zero" in done.stderr and "out of bounds" not in done.stderr, done.stderr


def test_asan_is_silent_on_a_right_kernel(tmp_path: Path) -> None:
    """No false alarm from fibers or pools."""
    done = cli(
        "run", "--compute", "fa2", "--mode", "both", "--batch", 1, "--heads", 2, "--seq", 65, "--dim", 59, "--check", "asan", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^asan 0 findings in 2 passes: [1-9][\d,]* CUDA threads run", done.stdout, re.M), done.stdout


def test_asan_accuses_no_wrong_kernel_of_an_access(tmp_path: Path) -> None:
    """Its pictures are drawn in the same process, where matplotlib throws C++ exceptions."""
    own(tmp_path, PLAIN.replace("expf(s * scale)", "expf(s)"))
    done = cli("run", "--compute", "./own_forward.cu", "--batch", 1, "--heads", 1, "--seq", 16, "--check", "asan", cwd=tmp_path)
    assert done.returncode == 1 and "asan 0 findings in 1 pass" in done.stdout, done.stdout + done.stderr
    assert "out of bounds" not in done.stderr and "error_O.png" in done.stderr, done.stderr
    assert len(list(tmp_path.rglob("error_O.png"))) == 1


def test_what_stops_addresssanitizer_itself_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the same exit code; only its word ERROR is a finding."""
    stopped = 'AddressSanitizer: CHECK failed: asan_interceptors.cpp:335 "((__interception::real___cxa_throw)) != (0)"'
    monkeypatch.setattr(report.child, "again", lambda *_, **__: (86, stopped))
    with pytest.raises(EnvironmentFault, match="without a finding") as caught:
        report.child_with_asan(build.compiler(), ["cli.py"])
    assert caught.value.exit_code == 4 and caught.value.why == stopped
    monkeypatch.setattr(report.child, "again", lambda *_, **__: (86, "==1==ERROR: AddressSanitizer: heap-buffer-overflow on a.cu:7\n"))
    with pytest.raises(report.CheckFault, match=r"out of bounds: bad access at \S*a.cu:7"):
        report.child_with_asan(build.compiler(), ["cli.py"])


def test_threads_that_compile_at_once_share_one_engine(tmp_path: Path) -> None:
    """With an empty cache, where each thread would build an engine of its own: kernels then found one and were run by the other."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from harness.backends import pick\n"
        "from harness import kernel\n"
        "from harness.problem import Problem\n"
        "from harness.verbs.selftest.trial import judge\n"
        "backend, problem = pick('cpu'), Problem.of(1, 1, 33, 16)\n"
        "chosen = [kernel.find(name, 'forward') for name in ('fa2_naive', 'fa1', 'naive', 'tiled')]\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    list(pool.map(lambda each: backend.load(each, problem), chosen))\n"
        "assert all(judge(backend, each, problem).passed for each in chosen)\n"
    )
    environment = {**os.environ, "FA_CLI_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [0, 1])
def test_locals_start_as_a_pattern(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler has the flag for it; one that refuses it is not given it."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nexit {code}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: (str(compiler),))
    build._locals_start.cache_clear()
    assert build._locals_start() == (() if code else ("-ftrivial-auto-var-init=pattern",))
    build._locals_start.cache_clear()
