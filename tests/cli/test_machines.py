"""What is printed and written is the same on every machine: one story under other BLAS kernels, SIMD widths and numbers of threads.

A BLAS adds in an order of its own, numpy's exponential differs in the last bit between SIMD widths, and so does the C library's logarithm
with and without fused multiply-adds. A setting stands for a machine that this one can play. Each is a process, as libraries read it once.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

STORY = Path(__file__).resolve().parent.parent / "support" / "machine.py"
#: The variables that settings have.
VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES")
#: What a core type of OpenBLAS needs of the CPU, as Linux names it.
NEEDS = {"Haswell": {"avx2", "fma"}, "Zen": {"avx2", "fma"}, "Sandybridge": {"avx"}, "SkylakeX": {"avx512f", "avx512vl", "avx512bw"}}
NEEDS["Sapphirerapids"] = NEEDS["SkylakeX"] | {"avx512_bf16"}


def flags() -> set[str]:
    """What this CPU can do, as Linux names it; nothing where it does not say."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    return set(next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), []))


def features(width: str) -> str:
    """The value of NPY_DISABLE_CPU_FEATURES that leaves numpy no SIMD of a width, "AVX-512" or "AVX2": that one and wider."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    able = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    return " ".join(
        name for name in able if "AVX512" in name or name == "X86_V4" or (width == "AVX2" and name in ("X86_V3", "AVX2", "FMA3"))
    )


def settings() -> dict[str, dict[str, str]]:
    """The environments to compare, by name. What this CPU cannot run is left out."""
    no_fma = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-FMA,-FMA4"
    every: dict[str, tuple[str, dict[str, str]]] = {
        "Haswell, 2 threads": ("Haswell", {"OPENBLAS_NUM_THREADS": "2"}),
        "SkylakeX, 2 threads": ("SkylakeX", {"OPENBLAS_NUM_THREADS": "2"}),
        "Zen, numpy without AVX-512": ("Zen", {"NPY_DISABLE_CPU_FEATURES": features("AVX-512")}),
        "Sapphirerapids": ("Sapphirerapids", {}),
        "Haswell, numpy without AVX2": ("Haswell", {"NPY_DISABLE_CPU_FEATURES": features("AVX2")}),
        "Sandybridge, no AVX2 anywhere": ("Sandybridge", {"NPY_DISABLE_CPU_FEATURES": features("AVX2"), "GLIBC_TUNABLES": no_fma}),
    }
    found = {"as it is": {}, "2 threads": {"OPENBLAS_NUM_THREADS": "2"}}
    able = flags()
    found |= {name: {"OPENBLAS_CORETYPE": core, **more} for name, (core, more) in every.items() if NEEDS[core] <= able}
    if "SkylakeX, 2 threads" in found:
        del found["2 threads"]  # of more than one core type already
    return found


def started(setting: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """What Python did with these words under a setting."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    fixed = {"OPENBLAS_NUM_THREADS": "1", "FA_CLI_DEVICE": "cpu", "FA_CLI_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run([sys.executable, *words], env=plain | fixed | setting, capture_output=True, text=True, check=False)


def told(folder: Path, setting: dict[str, str]) -> str | None:
    """What the story prints under a setting; None where numpy itself dies, as OpenBLAS 0.3.34 with Haswell's kernels on a Zen 4."""
    folder.mkdir()
    done = started(setting, str(STORY), str(folder))
    if done.returncode < 0 and started(setting, "-c", "import numpy; a = numpy.ones((512, 512)); a @ a").returncode < 0:
        return None
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a compiler")
def test_every_digit_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """Errors, budgets and moments, in tables and in JSON, places, a shrunk case, hashes of data."""
    every = settings()
    names = list(every)
    first = told(tmp_path / "0", every[names[0]])  # alone: it compiles what is not in the cache
    assert first and '"budget": ' in first and "shrunk from" in first and '"slope": ' in first and '"Q.bin": "64bca3d87aac7a77' in first
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(told, [tmp_path / str(number) for number in range(1, len(names))], [every[name] for name in names[1:]])
        others = {name: other for name, other in zip(names[1:], found, strict=True) if other is not None}
        assert others or len(names) == 1
        wrong = [
            line
            for name, other in others.items()
            for line in difflib.unified_diff(first.splitlines(), other.splitlines(), names[0], name, n=0, lineterm="")
        ]
    assert not wrong, "\n".join(wrong)
