"""Compile options, what is made of ptxas's log, and the cache of its answers. Real compiles need NVRTC only, never a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import planted
import pytest

import harness.kernel
from harness.backends import CompileError, nvrtc
from harness.fault import EnvironmentFault
from harness.kernel import Device, Kernel, Plan, planner
from harness.problem import Problem

LOG_12 = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'delta' for 'sm_90a'
ptxas info    : Function properties for delta
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 896 bytes cmem[0]
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    48 bytes stack frame, 52 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 4096 bytes smem, 896 bytes cmem[0]
ptxas info    : Function properties for _Z6helperPfi
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


class FakeNvrtc:
    """A compiler that says what it is told to, and remembers what it was asked."""

    version, supported = "12.9", frozenset({70, 75, 80, 89, 90, 100, 120})

    def __init__(self, log: str = LOG_12, ok: bool = True) -> None:
        self.log, self.ok, self.asked = log, ok, list[tuple[str, ...]]()

    def compile(self, source: str, name: str, given: tuple[str, ...]) -> tuple[bool, str, bytes]:
        self.asked.append(tuple(given))
        return self.ok, self.log, b"cubin"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    compiler = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)
    return compiler


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan_of(kernel: Kernel, causal: bool = False) -> Plan:
    return planner.plan(kernel, Problem.of(1, 1, 64, 64, causal=causal), Device("cuda", "test"))


def test_options_hold_macros_hash_include_and_arch_and_no_fast_math(tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path, tile="BLOCK_Q = 48")
    given = nvrtc.options(kernel, plan_of(kernel, causal=True), "sm_90a")
    for option in ("-std=c++17", "-lineinfo", "-arch=sm_90a", "-DHEAD_DIM=64", "-DCAUSAL=1", "-DDTYPE=float32", "-DBLOCK_Q=48"):
        assert option in given
    assert f"-DFA_SOURCE_HASH=0x{kernel.source_hash}" in given
    assert f"-I{harness.kernel.INCLUDE}" in given
    assert f"-I{tmp_path}" in given, 'a user\'s #include "mine.cuh": CuPy compiles in a folder of its own'
    assert isinstance(given, tuple), "CuPy takes nothing else"
    assert not any("fast" in option or "ftz" in option for option in given)
    assert not any("arch" in option for option in nvrtc.options(kernel, plan_of(kernel), None))


def test_an_edited_header_changes_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's cache key leaves out included files: only this option keeps it from running a stale kernel."""
    include = tmp_path / "include"
    shutil.copytree(harness.kernel.INCLUDE, include)
    monkeypatch.setattr(harness.kernel.tree, "INCLUDE", include)
    kernel = planted.kernel(tmp_path)
    before = nvrtc.options(kernel, plan_of(kernel), None)
    header = include / "fa" / "types.cuh"  # reached through warp.cuh and math.cuh
    header.write_text(header.read_text() + "// edited\n")
    again = Kernel.read(kernel.path)
    assert nvrtc.options(again, plan_of(again), None) != before


def test_an_edited_file_beside_a_users_kernel_changes_the_options(tmp_path: Path) -> None:
    mine = tmp_path / "mine.cuh"
    mine.write_text("#define MINE 1\n")
    kernel = planted.kernel(tmp_path, f'#include "mine.cuh"\n{planted.GOOD}')
    before = nvrtc.options(kernel, plan_of(kernel), None)
    mine.write_text("#define MINE 2\n")
    again = Kernel.read(kernel.path)
    assert nvrtc.options(again, plan_of(again), None) != before


def test_usage_reads_each_function_of_the_log(fake: FakeNvrtc, tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path)
    found = nvrtc.compile_(kernel, plan_of(kernel), "sm_90a")
    assert found.usage == {
        "delta": nvrtc.Usage(registers=32),
        "forward": nvrtc.Usage(registers=168, stack_bytes=48, spill_stores=52, spill_loads=60, shared_bytes=4096),
        "_Z6helperPfi": nvrtc.Usage(stack_bytes=256),
    }
    assert (found.registers, found.spill_bytes, found.stack_bytes) == (168, 60, 256)
    assert (found.cubin, found.nvrtc, found.arch) == (b"cubin", "12.9", "sm_90a")


def test_the_driverless_compile_adds_what_cupy_adds(fake: FakeNvrtc, tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path)
    nvrtc.compile_(kernel, plan_of(kernel), "sm_80")
    (given,) = fake.asked
    assert {"-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v"} <= set(given)
    ours = nvrtc.options(kernel, plan_of(kernel), "sm_80")
    assert given[: len(ours)] == ours


def test_serialised_wgmma_is_a_compile_error_whatever_its_severity(fake: FakeNvrtc, tmp_path: Path) -> None:
    fake.log += "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    kernel = planted.kernel(tmp_path)
    with pytest.raises(CompileError, match="Potential Performance Loss"):
        nvrtc.compile_(kernel, plan_of(kernel), "sm_90a")


def test_a_file_without_a_kernel_is_a_compile_error(fake: FakeNvrtc, tmp_path: Path) -> None:
    fake.log = "ptxas info    : 0 bytes gmem\n"
    kernel = planted.kernel(tmp_path)
    with pytest.raises(CompileError, match=r"planted_forward\.cu:1: it holds no __global__"):
        nvrtc.compile_(kernel, plan_of(kernel), "sm_90")


def test_architectures_are_the_projects_that_this_nvrtc_knows(fake: FakeNvrtc) -> None:
    assert nvrtc.architectures() == ("sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
    fake.supported = frozenset({75, 80, 86, 89, 90, 103})  # no 70 as in NVRTC 13, no 100
    assert nvrtc.architectures() == ("sm_75", "sm_80", "sm_89", "sm_90", "sm_90a")


def test_an_exact_rule_admits_one_architecture_alone(tmp_path: Path) -> None:
    hopper = planted.kernel(tmp_path, arch='"sm_90a"')
    assert [arch for arch in nvrtc.SHARED_LIMIT if nvrtc.admits(hopper, "float32", arch)] == ["sm_90a"]
    assert nvrtc.pinned_arch(hopper, "float32") == "sm_90a"
    ampere = planted.kernel(tmp_path, arch='">=sm_80"')
    assert [arch for arch in nvrtc.SHARED_LIMIT if not nvrtc.admits(ampere, "float32", arch)] == ["sm_70", "sm_75"]
    assert nvrtc.pinned_arch(ampere, "float32") is None


# -- the cache --------------------------------------------------------------------------------------------------------


def test_resources_compile_once_and_forget_when_anything_changes(fake: FakeNvrtc, tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path)
    first = nvrtc.resources(kernel, plan_of(kernel), "sm_90")
    assert nvrtc.resources(kernel, plan_of(kernel), "sm_90") == first
    assert len(fake.asked) == 1
    nvrtc.resources(kernel, plan_of(kernel), "sm_80")  # another architecture
    nvrtc.resources(kernel, plan_of(kernel, causal=True), "sm_90")  # another macro
    changed = planted.kernel(tmp_path, planted.GOOD + "// edited\n")  # another source
    nvrtc.resources(changed, plan_of(changed), "sm_90")
    fake.version = "13.0"  # another compiler
    nvrtc.resources(kernel, plan_of(kernel), "sm_90")
    assert len(fake.asked) == 5


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"usage": {}}', '{"usage": {"forward": {"colour": 1}}}', "\0\0\0"])
def test_a_damaged_cache_is_compiled_past_and_mended(fake: FakeNvrtc, tmp_path: Path, own_cache: Path, damage: str) -> None:
    kernel = planted.kernel(tmp_path)
    first = nvrtc.resources(kernel, plan_of(kernel), "sm_90")
    (file,) = own_cache.rglob("*.json")
    file.write_text(damage)
    for _ in range(2):
        assert nvrtc.resources(kernel, plan_of(kernel), "sm_90").usage == first.usage
    assert len(fake.asked) == 2
    assert [f.name for f in file.parent.iterdir()] == [file.name], "a temporary file was left"


def test_a_cache_that_cannot_be_written_is_done_without(fake: FakeNvrtc, tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    kernel = planted.kernel(tmp_path)
    assert nvrtc.resources(kernel, plan_of(kernel), "sm_90").registers == 168


@pytest.mark.parametrize(
    "log",
    [
        "ptxas application ptx input, line 7182; error   : Argument 1 of instruction 'setmaxnreg': unexpected value '264'",
        f"{LOG_12}ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized",
    ],
)
def test_what_ptxas_refuses_is_remembered(log: str, fake: FakeNvrtc, tmp_path: Path) -> None:
    """It takes as long to find as a right kernel takes to compile; another source or another NVRTC is compiled."""
    fake.log, fake.ok = log, nvrtc.SLOW in log
    kernel = planted.kernel(tmp_path)
    for _ in range(3):
        with pytest.raises(CompileError) as caught:
            nvrtc.resources(kernel, plan_of(kernel), "sm_90a")
        assert caught.value.log == log and str(kernel.path) in caught.value.command
    assert len(fake.asked) == 1
    fake.log, fake.ok = LOG_12, True
    changed = planted.kernel(tmp_path, planted.GOOD + "// changed\n")
    assert nvrtc.resources(changed, plan_of(changed), "sm_90a").registers == 168
    fake.version = "13.0"
    assert nvrtc.resources(kernel, plan_of(kernel), "sm_90a").registers == 168
    assert len(fake.asked) == 3


@pytest.mark.parametrize("log", [LOG_12, "k.cu(3): error: no such file", "ptxas fatal   : Memory allocation failure"])
def test_errors_are_not_remembered(log: str, fake: FakeNvrtc, tmp_path: Path) -> None:
    """Of the front end, found in a tenth of a second, and of the machine: a file or memory that is missing today may be there tomorrow."""
    fake.log, fake.ok = log, False
    kernel = planted.kernel(tmp_path)
    with pytest.raises(CompileError):
        nvrtc.resources(kernel, plan_of(kernel), "sm_90")
    fake.log, fake.ok = LOG_12, True
    assert nvrtc.resources(kernel, plan_of(kernel), "sm_90").registers == 168


# -- the bindings -----------------------------------------------------------------------------------------------------


def test_without_nvrtc_it_is_an_environment_fault_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "_Bindings", missing)
    monkeypatch.setattr(nvrtc, "_Cupy", missing)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(EnvironmentFault, match=r"No module named 'cuda'") as caught:
        nvrtc.version()
    assert caught.value.exit_code == 4
    assert "pip install -e '.[cuda12]'" in caught.value.hint


def test_cupys_binding_serves_where_cuda_bindings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVRTCError(Exception):
        pass

    freed: list[int] = []

    def compile_program(program: int, given: tuple[str, ...]) -> None:
        if "-bad" in given:
            raise NVRTCError

    api = SimpleNamespace(
        NVRTCError=NVRTCError,
        getVersion=lambda: (12, 9),
        getSupportedArchs=lambda: [80, 90],
        createProgram=lambda *a: 7,
        compileProgram=compile_program,
        getProgramLog=lambda p: "log\n",
        getCUBIN=lambda p: b"ELF",
        destroyProgram=freed.append,
    )
    libs = ModuleType("cupy_backends.cuda.libs")
    libs.nvrtc = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # importing it fails
    nvrtc._nvrtc.cache_clear()
    try:
        binding = nvrtc._nvrtc()
        assert (nvrtc.version(), nvrtc.architectures()) == ("12.9", ("sm_80", "sm_90", "sm_90a"))
        assert binding.compile("x", "x.cu", ("-good",)) == (True, "log", b"ELF")
        assert binding.compile("x", "x.cu", ("-bad",)) == (False, "log", b"")
        assert freed == [7, 7]
    finally:
        nvrtc._nvrtc.cache_clear()


def real() -> None:
    """Skip a test that needs the compiler itself. The dev extra brings it, so `make test` skips none."""
    nvrtc._nvrtc.cache_clear()
    try:
        nvrtc.version()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))


def test_a_real_compile_makes_an_elf_and_counts_registers(tmp_path: Path) -> None:
    real()
    kernel = planted.kernel(tmp_path)
    found = nvrtc.compile_(kernel, plan_of(kernel), "sm_80")
    assert found.cubin.startswith(b"\x7fELF")
    assert 0 < found.registers < 32
    assert (found.spill_bytes, list(found.usage)) == (0, ["forward"])


def test_a_users_own_file_may_include_cudas_headers_and_its_own(tmp_path: Path) -> None:
    real()
    (tmp_path / "mine.cuh").write_text("#define MINE 2.0f\n")
    body = (
        '#include <cuda_fp16.h>\n#include <fa/args.cuh>\n#include "mine.cuh"\n'
        'extern "C" __global__ void forward(__half* out) { out[0] = __float2half(MINE); }\n'
    )
    kernel = planted.kernel(tmp_path, body)
    assert nvrtc.compile_(kernel, plan_of(kernel), "sm_80").usage["forward"].registers > 0


def test_a_wrong_kernel_names_its_real_file_and_line(tmp_path: Path) -> None:
    real()
    kernel = planted.kernel(tmp_path, planted.GOOD.replace("args.O.data", "args.P.data"))
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_(kernel, plan_of(kernel), "sm_80")
    assert f"{kernel.path}({planted.line_of(kernel.path, 'args.P')}): error:" in caught.value.log
    assert caught.value.exit_code == 5
    assert "-arch=sm_80" in caught.value.command


def test_importing_it_loads_no_cuda_package() -> None:
    code = "import sys, harness.backends.nvrtc; sys.exit(any(m.split('.')[0] in ('cuda', 'cupy', 'cupy_backends') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=harness.kernel.KERNELS.parent, check=False).returncode == 0
