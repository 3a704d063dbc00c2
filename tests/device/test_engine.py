"""The engine of the CPU engine under what could break it: odd blocks, masks, forks, threads, signals, bad addresses, atomics."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_kernel import answer, bound, f32, run

from harness.backends.host import cache
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.fault import KernelFault
from harness.kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


@SEEDS
@pytest.mark.parametrize("block", [1, 2, 31, 32, 33, 1000, 1023, 1024])
def test_blocks_of_any_size(seed: int, block: int, tmp_path: Path) -> None:
    """Barriers, votes and shuffles where the last warp is not whole: lanes that are not there take no part."""
    body = """\
    int* count = fa::dynamic_shared<int>();
    if (t == 0) *count = 0;
    for (int i = 0; i < 3; ++i) {
        __syncthreads();
        atomicAdd(count, t + 1);
    }
    __syncthreads();
    const int last = min(blockDim.x - t / 32 * 32, 32u) - 1;
    out[t] = *count;
    out[1024 + t] = __all_sync(fa::full_warp, 1) + 2 * __all_sync(fa::full_warp, t % 32 < last) +
                    4 * __any_sync(fa::full_warp, t % 32 == last);
    out[2048 + t] = __popc(__ballot_sync(fa::full_warp, 1)) + 64 * __shfl_sync(fa::full_warp, t, last);"""
    got = run(Host(seed=seed), tmp_path, body, block=block, shared=4).astype(int)
    t = np.arange(block)
    lanes = np.minimum(block - t // 32 * 32, 32)
    assert (got[:block] == 3 * block * (block + 1) // 2).all()
    assert (got[1024 : 1024 + block] == 1 + 4).all()
    assert np.array_equal(got[2048 : 2048 + block], lanes + 64 * (t // 32 * 32 + lanes - 1))


@SEEDS
def test_collectives_of_different_masks_at_once(seed: int, tmp_path: Path) -> None:
    """Halves, quarters and single lanes of one warp meet a different number of times, nested, before all meet again."""
    body = """\
    const int lane = t % 32;
    int x = lane;
    if (lane < 16) {
        for (int i = 0; i < 5; ++i) {
            x += __shfl_xor_sync(0x0000ffffu, x, 1);
            if (lane < 8) for (int j = 0; j < 3; ++j) x ^= __shfl_sync(0x000000ffu, x, 0) & 0;
            __syncwarp(1u << lane);
        }
    } else if (lane % 2) {
        for (int i = 0; i < 7; ++i) x += __shfl_sync(0xaaaa0000u, 1, 17);
    } else {
        x = __popc(__ballot_sync(0x55550000u, lane > 20));
    }
    out[t] = x + 1000 * __shfl_xor_sync(fa::full_warp, lane, 16);"""
    got = run(Host(seed=seed), tmp_path, body, block=64).astype(int)[:64].reshape(2, 32)
    lane = np.arange(32)
    pair = (lane // 2 * 4 + 1) * 16  # the sum of a pair, doubled by each further round
    want = np.where(lane < 16, pair, np.where(lane % 2, lane + 7, 5)) + 1000 * (lane ^ 16)
    assert (got == want).all()


def test_static_shared_memory_of_several_kernels(tmp_path: Path) -> None:
    """48 KB in several arrays beside another kernel's 4 bytes, both loaded: each block finds its own, and finds it poisoned."""
    large = """\
    __shared__ float a_smem[8192];
    __shared__ __align__(128) double b_smem[2048];
    out[t] = a_smem[t] != a_smem[t] && b_smem[t] != b_smem[t];
    for (int i = t; i < 8192; i += 256) a_smem[i] = i;
    for (int i = t; i < 2048; i += 256) b_smem[i] = -i;
    __syncthreads();
    out[256 + t] = __float_as_uint(a_smem[8191 - t] + float(b_smem[2047 - t]));
    out[512 + t] = unsigned((unsigned long long)(b_smem) % 128);"""
    small = "    __shared__ unsigned x;\n    if (t == 0) x = 77;\n    __syncthreads();\n    out[t] = x;"
    folders = [tmp_path / "large", tmp_path / "small"]
    for folder in folders:
        folder.mkdir()
    for _ in range(3):
        got = run(Host(), folders[0], large, block=256)
        assert (got[:256] == 1).all() and (got[512:768] == 0).all()
        assert np.array_equal(f32(got[256:], 256), 8191 - 2047 - np.zeros(256))
        assert (run(Host(), folders[1], small, block=64)[:64] == 77).all()


COUNT = "    __shared__ int n;\n    if (t == 0) n = 0;\n    __syncthreads();\n    atomicAdd(&n, 1);\n    __syncthreads();\n    out[t] = n;"


def test_thousands_of_launches_from_several_threads(tmp_path: Path) -> None:
    """Python threads that come and go launch at once: right answers, and memory does not grow."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks, wrong = (1, 64, 1024), []
    folders = [tmp_path / str(block) for block in blocks]
    for folder in folders:
        folder.mkdir()
    kernels = [bound(Host(), folder, COUNT, block=block) for folder, block in zip(folders, blocks, strict=True)]

    def work(kernel: Any, block: int) -> None:
        for _ in range(50):
            if not (answer(kernel)[:block] == block).all():
                wrong.append(block)

    for job in zip(kernels, blocks, strict=True):
        work(*job)
    before = resident()
    for _ in range(16):
        threads = [threading.Thread(target=work, args=job) for job in zip(kernels, blocks, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert resident() - before < 40 << 20  # the stacks of one thread's fibers take about 10 MB


def _child(kernel: Any, block: int) -> None:
    sys.exit(0 if all((answer(kernel)[:block] == block).all() for _ in range(20)) else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_after_a_launch(tmp_path: Path) -> None:
    """multiprocessing's fork, also while another thread is in a launch: the child has a pool of its own."""
    kernel, stop = bound(Host(), tmp_path, COUNT, block=1024), threading.Event()
    assert (answer(kernel)[:1024] == 1024).all()

    def busy() -> None:
        while not stop.is_set():
            kernel.backend.launch(kernel.loaded, kernel.steps)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(8):
            time.sleep(0.02)
            child = multiprocessing.get_context("fork").Process(target=_child, args=(kernel, 1024))
            child.start()
            child.join(20)
            if child.exitcode is None:
                child.kill()
            assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()
    assert (answer(kernel)[:1024] == 1024).all()


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_bad_address_is_a_fault_of_the_kernel(tmp_path: Path) -> None:
    """Not the end of the process: who, where and which address; and the next launch is right."""
    with pytest.raises(KernelFault, match=r"illegal memory access in block \(0, 0, 0\): thread 5 at .*, address 0x1234") as caught:
        run(Host(), tmp_path, "    __syncthreads();\n    if (t == 5) *reinterpret_cast<volatile int*>(0x1234) = 1;\n    __syncthreads();")
    line = next(i for i, text in enumerate((tmp_path / "word_forward.cu").read_text().splitlines(), 1) if "0x1234" in text)
    assert caught.value.exit_code == 5
    assert "--check asan" in caught.value.why or f"word_forward.cu:{line}" in caught.value.why  # zig keeps the lines
    assert (run(Host(), tmp_path, COUNT, block=96)[:96] == 96).all()


def test_copies_of_a_kernel_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie; and what a report names is a line of the copy that ran."""
    run(Host(), tmp_path, COUNT)  # the engine is loaded
    compiled: list[Path] = []

    def compile_(command: list[str], scratch: Path, kernel: Kernel | None) -> None:
        compiled.append(kernel.path if kernel else scratch)
        real(command, scratch, kernel)

    real = cache._compile
    monkeypatch.setattr(cache, "_compile", compile_)
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    body = """\
    if (a[0] == 1) *reinterpret_cast<volatile int*>(0x1234) = 1;
    __syncwarp(a[0] == 2 ? 1u << (t + 1) % 32 : 0xffffffffu);
    out[t] = 7;"""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert run(Host(), tmp_path / name, body, np.zeros(1, np.float32))[0] == 7
    assert {path.parent.name for path in compiled} == {"one"}
    for name in ("one", "two"):
        with pytest.raises(CheckFault, match=re.escape(f" at {tmp_path / name / 'word_forward.cu'}:")):
            run(Host(check="race"), tmp_path / name, ATOMICS.format(barrier=""), block=64, shared=16)
    assert {path.parent.name for path in compiled} == {"one"}
    run(Host(), tmp_path / "two", body, np.zeros(1, np.float32))
    path = tmp_path / "two" / "word_forward.cu"
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "__syncwarp" in text)
    with pytest.raises(KernelFault, match=f" at {re.escape(str(path))}:{line}"):
        run(Host(), path.parent, body, np.full(1, 2, np.float32))
    with pytest.raises(KernelFault, match="address 0x1234") as caught:
        run(Host(), path.parent, body, np.ones(1, np.float32))
    assert "--check asan" in caught.value.why or f" at {path}:{line - 1}" in caught.value.why  # zig keeps the lines


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors give 0, as a GPU gives a number")
def test_an_integer_division_by_zero_is_a_fault_of_the_kernel(tmp_path: Path) -> None:
    """Which on x86-64 would end the process."""
    with pytest.raises(KernelFault, match="integer division by zero in block"):
        run(Host(), tmp_path, "    volatile int zero = args.batch - 1;\n    out[t] = 7 / zero;")


ATOMICS = """\
    int* n = fa::dynamic_shared<int>();
    if (t < 4) n[t] = 0;
    __syncthreads();
    atomicAdd(n, 1);
    atomicAdd(reinterpret_cast<unsigned*>(n), 2u);
    atomicMax(n + 1, t);
    atomicCAS(n + 2, 0, 9);
    atomicExch(n + 3, 5);
    __threadfence();
    {barrier}
    if (t < 4) out[t] = n[t];"""


def test_atomics_under_the_race_check(tmp_path: Path) -> None:
    """They do not race with each other; reading the sum without a barrier does, and the report names the line."""
    got = run(Host(check="race"), tmp_path, ATOMICS.format(barrier="__syncthreads();"), block=64, shared=16)
    assert got[:4].tolist() == [3 * 64, 63, 9, 5]
    with pytest.raises(CheckFault) as caught:
        run(Host(check="race"), tmp_path, ATOMICS.format(barrier=""), block=64, shared=16)
    lines = (tmp_path / "word_forward.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "out[t] = n[t]" in line)
    assert f"word_forward.cu:{at}" in caught.value.why


def test_a_race_in_a_lambda_or_a_function_is_at_the_line_of_the_access(tmp_path: Path) -> None:
    """Not at that of the call, which may be far away: also of a lambda that a word calls."""
    body = """\
    int* n = fa::dynamic_shared<int>();
    auto store = [&](int at) {
        n[at] = t;
    };
    auto twice = [&](auto&& each) { each(0), each(1); };
    out[t] = 0;
    twice([&](int at) { store(at); });"""
    with pytest.raises(CheckFault) as caught:
        run(Host(check="race"), tmp_path, body, block=64, shared=16)
    lines = (tmp_path / "word_forward.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "n[at] = t" in line)
    assert set(re.findall(r"word_forward\.cu:(\d+)", caught.value.why)) == {str(at)}


@SEEDS
def test_printf_comes_in_the_order_of_blocks_and_threads(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever order they run in; on standard error, at the end of the launch, and of a flood the first MB."""
    body = """\
    for (int i = 0; i < 2; ++i) {
        printf("%d %d %.2f %s\\n", t, i, 0.5 * t, "end");
        __syncthreads();
    }"""
    run(Host(seed=seed), tmp_path, body, block=40)
    told = capfd.readouterr()
    assert told.out == "" and told.err.splitlines() == [f"{t} {i} {0.5 * t:.2f} end" for t in range(40) for i in range(2)]
    run(Host(seed=seed), tmp_path, '    for (int i = 0; i < 1000; ++i) printf("%0100d", i);', block=32)
    told = capfd.readouterr()
    assert len(told.err) < (1 << 20) + 100
    assert told.err.endswith(f"({32 * 1000 - (1 << 20) // 100} texts more were printed: a launch keeps 1048576 bytes)\n")


def test_an_assert_names_thread_and_line(tmp_path: Path) -> None:
    """One that holds is nothing."""
    body = "    assert(t < 64);\n    assert(t != 37 || args.batch == 0);\n    out[t] = t;"
    with pytest.raises(KernelFault, match=r"assertion failed: t != 37 \|\| args.batch == 0 in block \(0, 0, 0\): thread 37 at ") as caught:
        run(Host(), tmp_path, body, block=64)
    path = tmp_path / "word_forward.cu"
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "t != 37" in text)
    assert f" at {path}:{line}" in caught.value.why


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys; sys.path[:0] = [{root!r}, {support!r}]
from pathlib import Path
from word_kernel import run
from harness.backends.host import Host, library
library.ALLOWED.add("write")
try:
    run(Host(), Path({folder!r}), {body!r}, block=64, before={before!r})
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""
#: A kernel is C++ here, so once allowed it may call the C library: the test waits for this.
BEFORE, RUNNING = 'extern "C" long write(int, const void*, unsigned long);', '    if (t == 0) write(1, "running\\n", 8);\n'
ENDLESS = {
    "barriers": "    for (volatile int i = 1; i;) __syncthreads();",
    "one thread's collectives": "    for (volatile int i = 1; i;) __syncwarp(1u << t % 32);",
    "a spin lock": "    while (atomicCAS(reinterpret_cast<int*>(out), 12, 12) != 13) {}",
    "threads that end": "    for (volatile long long i = 0; i < 400000000;) i = i + 1;",  # about a third of a second each
}


def spent(who: int) -> float:
    """Processor seconds: a busy machine makes a process wait, not work."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def interrupted(folder: Path, body: str, times: int) -> tuple[int, str, str, float]:
    """A process whose kernel gets SIGINT while it runs, again after half a second: exit code, output, what it says on a terminal, processor
    seconds from then on."""
    code = SCRIPT.format(root=str(ROOT), support=str(ROOT / "tests" / "support"), folder=str(folder), body=RUNNING + body, before=BEFORE)
    before = spent(resource.RUSAGE_CHILDREN)
    terminal, its_end = os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=its_end, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "running\n", os.read(terminal, 10_000)
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            before += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # until now: its own, and of the compilers it waited for
            for i in range(times):
                time.sleep(0.5 if i else 0.1)
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    told = os.read(terminal, 10_000).decode()
    os.close(its_end)
    os.close(terminal)
    return process.returncode, out, told, spent(resource.RUSAGE_CHILDREN) - before


AGAIN = "\r\ninterrupted; again to end at once\r\n"


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("name", ENDLESS)
def test_ctrl_c_ends_a_launch(name: str, tmp_path: Path) -> None:
    """At the next barrier, collective, atomic or end of a thread, as a KeyboardInterrupt."""
    code, out, told, seconds = interrupted(tmp_path, ENDLESS[name], 1)
    assert (code, out, told) == (130, "interrupted\n", AGAIN)
    assert seconds < 3


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_ends_a_loop_that_meets_nothing(tmp_path: Path) -> None:
    """Such a loop cannot be told from a long computation: the process ends at once."""
    code, out, told, seconds = interrupted(tmp_path, "    for (volatile int i = 1; i;) {}", 2)
    assert (code, out, told) == (130, "", AGAIN + "error: interrupted\r\n")
    assert seconds < 3
