"""A kernel that would end the process, or leave its shared memory, is a fault with thread and line on the CPU; the next launch is right."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import planted
import pytest
from word_kernel import run

from harness.backends import CompileError
from harness.backends.host.backend import Host
from harness.fault import KernelFault

ROOT = Path(__file__).resolve().parent.parent.parent
#: Device functions that the compiler cannot turn into loops: a frame of 256 bytes, and one of 80 KB that a guard page could lie within.
DEEP = """\
__device__ __noinline__ int deep(volatile int* p, int n) {
    volatile int a[64];
    a[n % 64] = n;
    return n < 0 ? 0 : deep(a, n + 1) + a[3];
}
__device__ __noinline__ int large(volatile int* p, int n) {
    volatile float a[20000];
    a[n % 20000] = n;
    return n < 0 ? 0 : large(p, n + 1) + a[3];
}
extern "C" { void exit(int); void abort(); }
__device__ int nowhere(int);
"""
SHARED = "    volatile int* sm = fa::dynamic_shared<int>();\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    if (t == 5) out[t] = deep(nullptr, t);  // here", r"stack overflow in block \(0, 0, 0\): thread 5 at .*128 KB stack"),
        ("    if (t == 5) out[t] = large(nullptr, t);  // here", r"stack overflow in block \(0, 0, 0\): thread 5 at .*128 KB stack"),
        ("    if (t == 5) __trap();  // here", r"trap or illegal instruction in block \(0, 0, 0\): thread 5 at "),
        (
            "    if (t == 5) reinterpret_cast<void (*)()>(out[t] & 0)();  // here",
            r"illegal memory access in block \(0, 0, 0\): thread 5 at ",
        ),
    ],
    ids=["recursion", "large frames", "trap", "a call of nothing"],
)
def test_what_would_end_the_process_is_a_fault(body: str, words: str, tmp_path: Path) -> None:
    """Told with the thread and, where it is a place in the kernel, with the line; exit code 5."""
    with pytest.raises(KernelFault, match=words) as caught:
        run(Host(), tmp_path, body, block=64, before=DEEP)
    assert caught.value.exit_code == 5
    line = planted.line_of(tmp_path / "word_forward.cu", "// here")
    if "trap" in words:
        assert f"word_forward.cu:{line}" in caught.value.why
    elif "stack" in words:
        assert "word_forward.cu:" in caught.value.why
    assert (run(Host(), tmp_path, "    out[t] = t;", block=64)[:64] == range(64)).all()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("sm[256] = t;  // here", "byte 1024 of 1024"),
        ("out[t] = sm[256];  // here", "byte 1024 of 1024"),
        ("sm[300000] = t;  // here", "byte 1200000 of 1024"),
        ("sm[-4000] = t;  // here", "byte -16000 of 1024"),
    ],
    ids=["written behind", "read behind", "far behind", "far before"],
)
def test_an_access_outside_shared_memory_has_its_line(body: str, place: str, tmp_path: Path) -> None:
    """In plain run: shared memory ends where inaccessible pages begin."""
    with pytest.raises(KernelFault, match=f"access outside shared memory in block .*: thread 0 at .*{place}") as caught:
        run(Host(), tmp_path, f"{SHARED}    {body}", block=32, shared=1024)
    assert f"word_forward.cu:{planted.line_of(tmp_path / 'word_forward.cu', '// here')}" in caught.value.why


@pytest.mark.parametrize(("index", "shared"), [(-1, 1024), (250, 1000), (3, 8)])
def test_a_write_beside_shared_memory_in_its_own_page(index: int, shared: int, tmp_path: Path) -> None:
    """No page can be inaccessible there: the bytes are compared after the block. Reads find NaN."""
    with pytest.raises(KernelFault, match=rf"write outside shared memory in block \(0, 0, 0\): byte {4 * index} of {shared}"):
        run(Host(), tmp_path, f"{SHARED}    sm[{index}] = t;", block=32, shared=shared)
    assert (run(Host(), tmp_path, f"{SHARED}    out[t] = sm[{index}];", block=32, shared=shared)[:32] == 0xFFFFFFFF).all()


STATIC = """\
template <int N> __device__ int* of_a_template() {  // its array is in a section of its own
    __shared__ int own[N];
    own[threadIdx.x] = 1;
    return own;
}
"""


@pytest.mark.parametrize("index", [-1024, -1, 96, 96 + 1023])
def test_a_write_beside_the_static_arrays(index: int, tmp_path: Path) -> None:
    """They lie on the heap, which it would destroy. The next launch is right, and what lies beside them is NaN to a read."""
    arrays = "    __shared__ volatile int own[96];\n    own[t] = t;\n"
    place = rf"in block \(0, 0, 0\): byte {4 * index} of 384"
    with pytest.raises(KernelFault, match=rf"write outside the static __shared__ arrays {place}") as caught:
        run(Host(), tmp_path, f"{arrays}    own[{index}] = t;", block=64)
    assert caught.value.exit_code == 5 and caught.value.hint == "fa-cli run --check asan names the line"
    assert (run(Host(), tmp_path, f"{arrays}    out[t] = own[{index}];", block=64)[:64] == 0xFFFFFFFF).all()


def test_every_byte_of_the_static_arrays_is_there(tmp_path: Path) -> None:
    """Of several arrays, of one that is aligned, and of a template's: all lie between the guards."""
    body = """\
    __shared__ char odd[3];
    __shared__ __align__(128) int even[64];
    if (t < 3) odd[t] = 1;
    even[t] = 1;
    __syncthreads();
    out[t] = even[t ^ 1] * of_a_template<64>()[t] * odd[t % 3];"""
    for check in (None, "race"):
        assert (run(Host(check=check), tmp_path, body, block=64, before=STATIC)[:64] == 1).all()


@pytest.mark.parametrize("shared", [0, 4, 1024, 1028, 48 << 10, 232448])
def test_every_byte_of_shared_memory_is_there(shared: int, tmp_path: Path) -> None:
    """Launches of changing sizes find their memory poisoned, writable to the last byte, and aligned to 1024."""
    body = f"""\
    unsigned char* sm = fa::dynamic_shared();
    bool poisoned = true;
    for (int i = t; i < {shared}; i += 32) poisoned &= sm[i] == 0xff, sm[i] = 1;
    out[t] = poisoned && reinterpret_cast<unsigned long long>(sm) % 1024 == 0;"""
    assert (run(Host(), tmp_path, body, block=32, shared=shared)[:32] == 1).all()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    if (t > 99) exit(0);  // here", r"exit: a kernel on the CPU"),
        ("    if (t > 99) abort();  // here", r"abort: a kernel on the CPU"),
        ("    out[t] = nowhere(t);  // here", r"nowhere: a kernel on the CPU"),
        ("    __shared__ char big[1 << 30];  // here\n    big[t] = t;\n    out[t] = big[t + 1];", r"1073741824 bytes; a GPU has 49152"),
        ("    __shared__ float big[12289];  // here\n    big[t] = t;\n    __syncthreads();\n    out[t] = big[t ^ 1];", r"49156 bytes"),
    ],
    ids=["exit", "abort", "not defined", "1 GB of shared memory", "4 bytes too many"],
)
def test_what_no_gpu_has_is_refused_with_its_line(body: str, words: str, tmp_path: Path) -> None:
    """Before it is loaded: functions of the C library, functions without a body, and more static shared memory than 48 KB."""
    with pytest.raises(CompileError, match=words) as caught:
        run(Host(), tmp_path, body, block=64, before=DEEP)
    assert f"word_forward.cu:{planted.line_of(tmp_path / 'word_forward.cu', '// here')}: " in caught.value.why
    assert caught.value.exit_code == 5


def test_mathematics_and_48_kb_are_allowed(tmp_path: Path) -> None:
    """What a plain kernel may call; exactly the most static shared memory."""
    before = 'extern "C" float sinf(float), erff(float), atan2f(float, float);'
    body = "    __shared__ float all[12288];\n    all[t] = sinf(t) + erff(t) + atan2f(t, 1);\n    out[t] = all[t] == all[t];"
    assert (run(Host(), tmp_path, body, block=64, before=before)[:64] == 1).all()


def test_little_address_space_is_told(tmp_path: Path) -> None:
    """With 400 MB it runs; with too little for the stacks of a block it ends in words, not in an abort."""
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "support")!r}]
import resource
from pathlib import Path
from word_kernel import answer, bound
from harness.backends.host import Host
from harness.fault import Fault
kernel = bound(Host(), Path({str(tmp_path)!r}), "    out[t] = t;", block=1024)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    kernel.backend.launch(kernel.loaded, kernel.steps)
except Fault as fault:
    print(fault)
    sys.exit(fault.exit_code)
"""
    environment = os.environ | {"FA_CLI_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 4 and "no memory to run word_forward" in done.stdout and "hint: " in done.stdout, done
    command = [sys.executable, str(ROOT / "cli.py"), "run", "--device", "cpu", "--batch", "1", "--heads", "1", "--seq", "32"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2),
    )
    assert done.returncode in (0, 2, 4) and "Traceback" not in done.stderr, done
