"""What a compiler's log of an unknown name becomes: the word to write. With the compilers' own words, where there are compilers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import Result
from planted import GOOD, HEADER

from harness.backends import instead, nvrtc
from harness.backends.protocol import CompileError
from harness.kernel import Device, Kernel, planner
from harness.problem import Problem

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels_cu"
Run = Callable[..., Result]
USES = {
    "-INFINITY": "for INFINITY write fa::infinity() of <fa/math.cuh>",
    "CUDART_INF_F": "for CUDART_INF_F write fa::infinity() of <fa/math.cuh>",
    "M_LOG2E": "for M_LOG2E write fa::log2e of <fa/math.cuh>",
    "std::max(1.0f, 2.0f)": "for std::max write max",
    "std::exp(1.0f)": "for std::exp write expf",
    "__half()": "for __half write fa::float16",
}


def kernel(folder: Path, text: str, include: str = "") -> Kernel:
    """A right kernel with a function that uses something, and an include."""
    path = folder / "mine_forward.cu"
    source = HEADER.format(shared=0, tile="") + include + GOOD
    place = source.rindex("extern")
    path.write_text(source[:place] + f"__device__ void used() {{ auto x = {text}; (void)x; }}\n" + source[place:])
    return Kernel.read(path)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
@pytest.mark.parametrize(("use", "wanted"), USES.items(), ids=list(USES))
def test_the_cpu_backend_names_the_word(use: str, wanted: str, tmp_path: Path, fa_cli: Run) -> None:
    """In the hint, with exit code 5."""
    path = kernel(tmp_path, use).path
    found = fa_cli("run", "--compute", path, "--batch", 1, "--heads", 1, "--seq", 8, "--dim", 16)
    assert found.exit_code == 5 and f"hint: {wanted}" in found.stderr, found.stderr


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
@pytest.mark.parametrize("header", ["cmath", "cfloat", "cuda_fp16.h", "mma.h", "cstdio", "cassert"])
def test_a_header_that_is_not_there(header: str, tmp_path: Path, fa_cli: Run) -> None:
    """What to have in its place."""
    path = kernel(tmp_path, "1", f"#include <{header}>\n").path
    found = fa_cli("run", "--compute", path, "--batch", 1, "--heads", 1, "--seq", 8, "--dim", 16)
    assert found.exit_code == 5 and f"hint: leave out <{header}>: " in found.stderr and "fa/" in found.stderr, found.stderr
    assert "on a GPU it runs as it is" not in found.stderr


@pytest.mark.skipif(find_spec("nvidia") is None or find_spec("nvidia.cu13") is None, reason="no NVRTC: pip install '.[cuda13]'")
def test_nvrtc_has_printf_and_no_header_for_it(tmp_path: Path) -> None:
    """So what is said of <cstdio> on the CPU is true of it."""
    device, problem = Device(kind="cuda", name="sm_90", arch="sm_90", shared_optin=232448), Problem.of(1, 1, 8, 16)
    mine = kernel(tmp_path, '(printf("%d", threadIdx.x), 1)')
    assert nvrtc.compile_(mine, planner.plan(mine, problem, device), "sm_90")
    mine = kernel(tmp_path, "1", "#include <cstdio>\n")
    with pytest.raises(CompileError) as found:
        nvrtc.compile_(mine, planner.plan(mine, problem, device), "sm_90")
    assert "leave out <cstdio>: printf and assert need no header" in found.value.hint, found.value.log


@pytest.mark.skipif(find_spec("nvidia") is None or find_spec("nvidia.cu13") is None, reason="no NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize(("use", "wanted"), USES.items(), ids=list(USES))
def test_nvrtc_names_the_word(use: str, wanted: str, tmp_path: Path) -> None:
    """The same in its words."""
    mine = kernel(tmp_path, use)
    plan = planner.plan(mine, Problem.of(1, 1, 8, 16), Device(kind="cuda", name="sm_90", arch="sm_90", shared_optin=232448))
    with pytest.raises(CompileError) as found:
        nvrtc.compile_(mine, plan, "sm_90")
    assert wanted in found.value.hint, found.value.log


def test_the_words_are_there() -> None:
    """Every <fa/...> header that is named exists, and so does every fa:: name in one of those headers."""
    for text in {*instead.NAMES.values(), *instead.HEADERS.values()}:
        for word in text.replace(",", " ").replace(";", " ").split():
            if word.startswith("<fa/"):
                assert (KERNELS / "include" / word.strip("<>")).is_file(), text
            if word.startswith("fa::"):
                name = word.removeprefix("fa::").partition("(")[0]
                found = subprocess.run(["grep", "-rlw", name, str(KERNELS / "include/fa")], capture_output=True, check=False)
                assert found.stdout, text


def test_what_is_unknown_here_has_no_advice() -> None:
    """A slip of the user's own."""
    assert instead.instead("a.cu:1:2: error: 'nosuch' was not declared in this scope") == ""
