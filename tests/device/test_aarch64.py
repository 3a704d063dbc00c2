"""The CPU engine on aarch64, where it is cross-compiled and emulated: the engine, and the words of test_words.py and test_mma_words.py.

Against the H200's answers, and numpy's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_mma_words import BEFORE
from test_mma_words import EXACT as MMA_EXACT
from test_words import APPROXIMATE, BITS, COUNT, EXACT, GOLDEN, SOURCE, same_bits, ulps

from harness.backends.host.build import _FLAGS
from harness.backends.host.dynamic import with_dynamic_shared
from harness.backends.host.source import HOST
from harness.kernel import INCLUDE

CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
#: Reads the inputs, runs each entry as one launch of 256 threads a block on two workers, writes its answers.
DRIVER = """
#include <stdio.h>
static __thread char anchor;
static void* inside() { return &anchor; }
int main() {
    static unsigned in[COUNT], out[COUNT];
    static char report[4096];
    if (fread(in, 4, COUNT, stdin) != COUNT) return 2;
    fa::Args args = {};
    args.Q.data = in;
    args.O.data = out;
    void* parameters[] = {&args};
    long long offset, bytes;
    fa_host_module_shared(inside, &offset, &bytes);
    for (auto entry : entries) {
        fa_host::Launch launch = {entry, parameters, inside, offset, bytes, 0, {COUNT / 256, 1, 1}, {256, 1, 1}, {1, 1, 1}, 4096, 0, 0, 2,
                                  report, sizeof report, nullptr};
        if (fa_host_run(&launch)) return fprintf(stderr, "%s", report), 1;
        fwrite(out, 4, COUNT, stdout);
    }
}
"""


@pytest.mark.skipif(
    not (CROSS and EMULATOR), reason="needs aarch64-linux-gnu-g++ and qemu-aarch64 (apt install g++-aarch64-linux-gnu qemu-user)"
)
def test_words_on_aarch64(tmp_path: Path) -> None:
    """Fiber switches, barriers, shuffles, conversions and flushed subnormals: the bits of the H200, or within 2 ulp."""
    bodies = {name: word[0] for name, word in (EXACT | MMA_EXACT | APPROXIMATE).items()}
    code = SOURCE.partition("// ///\n#")[2].partition('extern "C"')  # the includes, and the kernel
    unit = ['#include "cuda.hpp"', "#" + code[0] % BEFORE]
    for i, body in enumerate(bodies.values()):
        kernel = (code[1] + code[2]).replace("void forward(", f"void word{i}(") % body
        unit += [
            with_dynamic_shared(kernel),
            f"static void entry{i}(void** p) {{ fa_host::Passed<sizeof(fa::Args)>::call(&word{i}, p); }}",
        ]
    unit += [f"static void (*const entries[])(void**) = {{{', '.join(f'entry{i}' for i in range(len(bodies)))}}};", DRIVER]
    (tmp_path / "unit.cpp").write_text("\n".join(unit))
    common = [CROSS, "-std=c++20", "-O2", "-fPIC", "-w", f"-I{HOST}"]
    engine = tmp_path / "engine.so"  # apart, as always: what is thread-local beside a kernel is its shared memory
    subprocess.run([*common, "-shared", HOST / "engine.cpp", "-o", engine], check=True)
    flags = [*common, *_FLAGS, f"-I{INCLUDE}", f"-DCOUNT={COUNT}", "-DCAUSAL=0", f"-Wl,-rpath,{tmp_path}"]
    products = [
        *flags,
        "-DFA_HOST_SM=90",
        "-include",
        HOST / "cuda.hpp",
        "-shared",
        HOST / "tensor_core.cpp",
        "-o",
        tmp_path / "products.so",
    ]
    subprocess.run(products, check=True)
    subprocess.run([*flags, tmp_path / "unit.cpp", engine, tmp_path / "products.so", "-o", tmp_path / "words"], check=True)
    emulate = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", tmp_path / "words"]
    done = subprocess.run(emulate, input=BITS.tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answers = np.frombuffer(done.stdout, np.uint32).reshape(len(bodies), COUNT)
    golden = np.load(GOLDEN)
    for name, got in zip(bodies, answers, strict=True):
        if name in MMA_EXACT:
            assert same_bits(got, MMA_EXACT[name][1]()).all(), name
        elif name in EXACT:
            assert np.array_equal(got, golden[name]), name
        else:
            assert ulps(got, golden[name].view(np.float32), APPROXIMATE[name][3]).max() <= 2, name
