"""The CUDA backend against a stand-in for CuPy: what it asks of CuPy, and what it makes of CuPy's errors. No GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import planted
import pytest

from harness import backends
from harness.backends import Call, CompileError, Loaded, cuda, nvrtc
from harness.fault import EnvironmentFault, KernelFault, UsageFault
from harness.problem import Problem

PROBLEM = Problem.of(1, 1, 64, 64)


class CompileException(Exception):
    """As cupy.cuda.compiler.CompileException: no RuntimeError."""


class Function:
    """A RawKernel: attributes, and a call that is written down."""

    shared_size_bytes, local_size_bytes, num_regs = 1024, 0, 40

    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 48 << 10
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        if self.error:
            raise self.error
        self.calls.append((grid, block, args, shared_mem))


class Fake:
    """A stand-in for the cupy module; the tests set what it answers."""

    def __init__(self) -> None:
        self.function = Function()
        self.modules: list[dict[str, Any]] = []
        self.used: list[int] = []
        self.allocators: list[Any] = []
        self.get_function: Callable[[str], Any] = lambda name: self.function
        self.synchronize: Callable[[], None] = lambda: None
        self.facts = {
            "name": b"NVIDIA H200",
            "major": 9,
            "minor": 0,
            "multiProcessorCount": 132,
            "l2CacheSize": 50 << 20,
            "sharedMemPerBlockOptin": 232448,
        }
        module: Any = ModuleType("cupy")
        module.RawModule = self._module
        module.asarray, module.asnumpy, module.empty = np.array, np.array, np.empty
        module.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: 2, getDeviceProperties=lambda i: self.facts, memGetInfo=lambda: (10, 100)),
            Device=lambda i: SimpleNamespace(use=lambda: self.used.append(i)),
            set_allocator=self.allocators.append,
            compiler=SimpleNamespace(CompileException=CompileException),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            Event=lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: self.synchronize()),
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: self.synchronize()),
            get_elapsed_time=lambda start, stop: 2.5,
        )
        self.module = module

    def _module(self, **given: Any) -> Any:
        self.modules.append(given)
        return SimpleNamespace(get_function=lambda name: self.get_function(name))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    stand_in = Fake()
    monkeypatch.setitem(sys.modules, "cupy", stand_in.module)
    monkeypatch.setattr(cuda, "nvidia_driver", lambda: True)
    monkeypatch.delenv("FA_CLI_NO_POOL", raising=False)
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    return stand_in


def test_device_says_what_the_gpu_is(fake: Fake) -> None:
    device = cuda.Cuda(1).device()
    assert (device.kind, device.name, device.arch, device.sms) == ("cuda", "NVIDIA H200", "sm_90", 132)
    assert (device.l2_bytes, device.shared_optin) == (50 << 20, 232448)
    assert fake.used == [1]


def test_load_hands_cupy_the_real_file_and_the_one_set_of_options(fake: Fake, tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path)
    loaded = cuda.Cuda().load(kernel, PROBLEM)
    (given,) = fake.modules
    assert given["code"] == f'#line 1 "{kernel.path}"\n{kernel.path.read_text()}'
    assert given["options"] == nvrtc.options(kernel, loaded.plan, None), "CuPy adds the device's own -arch"
    assert given["backend"] == "nvrtc"
    assert (loaded.registers, loaded.spill_bytes, loaded.shared_bytes) == (40, 0, 1024)


def test_an_exact_architecture_is_asked_for(fake: Fake, tmp_path: Path) -> None:
    cuda.Cuda().load(planted.kernel(tmp_path, arch='"sm_90a"'), PROBLEM)
    assert "-arch=sm_90a" in fake.modules[0]["options"]


@pytest.mark.parametrize("rule", ['">=sm_100"', '"sm_100a"'])
def test_a_kernel_for_another_gpu_is_refused_before_anything_compiles(fake: Fake, tmp_path: Path, rule: str) -> None:
    with pytest.raises(UsageFault, match="this GPU is sm_90"):
        cuda.Cuda().load(planted.kernel(tmp_path, arch=rule), PROBLEM)
    assert not fake.modules


@pytest.mark.parametrize(("dynamic", "allowed"), [(47 << 10, 48 << 10), (48 << 10, 48 << 10), (100_000, 100_000)])
def test_shared_memory_over_48_kb_is_asked_for(fake: Fake, tmp_path: Path, dynamic: int, allowed: int) -> None:
    loaded = cuda.Cuda().load(planted.kernel(tmp_path, shared=dynamic), PROBLEM)
    assert fake.function.max_dynamic_shared_size_bytes == allowed
    assert loaded.shared_bytes == 1024 + dynamic


def test_shared_memory_once_granted_is_never_lowered(fake: Fake, tmp_path: Path) -> None:
    """CuPy gives all who load the same code the same function: a smaller plan must not take from a larger one."""
    fake.function.max_dynamic_shared_size_bytes = 200_000
    cuda.Cuda().load(planted.kernel(tmp_path, shared=100_000), PROBLEM)
    assert fake.function.max_dynamic_shared_size_bytes == 200_000


def test_spills_are_ptxas_s_where_it_agrees_on_the_registers(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = planted.kernel(tmp_path)
    fake.function.local_size_bytes = 64
    said = nvrtc.Compiled("sm_90", "13.0", {"forward": nvrtc.Usage(registers=40, spill_stores=48, spill_loads=52)}, "", 0.1)
    monkeypatch.setattr(nvrtc, "resources", lambda kernel, plan, arch: said if arch == "sm_90" else None)
    assert cuda.Cuda().load(kernel, PROBLEM).spill_bytes == 52
    fake.function.num_regs = 41  # another compiler's code
    assert cuda.Cuda().load(kernel, PROBLEM).spill_bytes is None


def test_a_compile_error_keeps_log_command_and_file(fake: Fake, tmp_path: Path) -> None:
    kernel = planted.kernel(tmp_path)

    def fail(name: str) -> None:
        raise CompileException(f"{kernel.path}(18): error: no")

    fake.get_function = fail
    with pytest.raises(CompileError, match=r"\(18\): error: no") as caught:
        cuda.Cuda().load(kernel, PROBLEM)
    assert (caught.value.exit_code, caught.value.file) == (5, kernel.path)
    assert "-lineinfo" in caught.value.command


def test_an_entry_that_is_not_there_is_named(fake: Fake, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")

    fake.get_function = fail
    with pytest.raises(KernelFault, match=r'no entry .forward.: it must be `extern "C"'):
        cuda.Cuda().load(planted.kernel(tmp_path), PROBLEM)


# -- running ----------------------------------------------------------------------------------------------------------


def ready(fake: Fake, tmp_path: Path, *parameters: Any) -> tuple[cuda.Cuda, Loaded, list[Call]]:
    backend = cuda.Cuda()
    return backend, backend.load(planted.kernel(tmp_path), PROBLEM), [Call("forward", (64, 1, 1), 128, 256, parameters)]


def test_every_parameter_is_an_array_of_one_element_with_its_own_bytes(fake: Fake, tmp_path: Path) -> None:
    """CuPy passes a numpy array of size 1 by value, a Python int as 64 bits, a numpy float32 as itself: one way serves all."""
    args = np.zeros(1, dtype=[("Q", "<u8"), ("scale", "<f8")])
    args["Q"], args["scale"] = 0x1234, 0.125
    backend, loaded, calls = ready(fake, tmp_path, args, np.float32(0.5), np.int64(-3), 0x7F0000001000, b"\1\2\3")
    backend.launch(loaded, calls)
    ((grid, block, given, shared),) = fake.function.calls
    assert (grid, block, shared) == ((64, 1, 1), (128, 1, 1), 256)
    assert all(type(p) is np.ndarray and p.size == 1 for p in given)
    assert [p.tobytes() for p in given] == [
        args.tobytes(),
        np.float32(0.5).tobytes(),
        np.int64(-3).tobytes(),
        (0x7F0000001000).to_bytes(8, "little"),
        b"\1\2\3",
    ]


def test_time_is_in_seconds(fake: Fake, tmp_path: Path) -> None:
    backend, loaded, calls = ready(fake, tmp_path)
    assert backend.time(loaded, calls) == 2.5e-3
    assert len(fake.function.calls) == 1


def test_a_refused_launch_says_what_was_asked_for(fake: Fake, tmp_path: Path) -> None:
    backend, loaded, calls = ready(fake, tmp_path)
    fake.function.error = RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch")
    with pytest.raises(KernelFault, match=r"refused to launch it[\s\S]*forward: grid .* 128 threads, 256 bytes"):
        backend.launch(loaded, calls)


def test_an_illegal_access_says_the_context_is_dead_and_how_to_find_the_line(fake: Fake, tmp_path: Path) -> None:
    backend, loaded, calls = ready(fake, tmp_path)

    def die() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    fake.synchronize = die
    for run in (backend.launch, backend.time):
        with pytest.raises(KernelFault, match=r"illegal memory access[\s\S]*context is dead") as caught:
            run(loaded, calls)
        assert "compute-sanitizer" in caught.value.hint
        assert caught.value.exit_code == 5


def test_memory_is_bytes_and_get_brings_them_back(fake: Fake) -> None:
    backend = cuda.Cuda()
    buffer = backend.memory(48)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (48,))
    buffer[:] = range(48)
    assert (backend.get(buffer) == np.arange(48)).all()


def test_no_room_is_a_usage_fault(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int, dtype: Any) -> None:
        raise MemoryError

    backend = cuda.Cuda()
    monkeypatch.setattr(fake.module, "empty", full)
    with pytest.raises(UsageFault, match="no room for 4 more bytes"):
        backend.memory(4)


# -- environment ------------------------------------------------------------------------------------------------------


def test_the_pool_can_be_left_out_for_the_sanitizer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no guard bands: in one of those, an access out of a tensor's bounds is inside the allocation."""
    assert cuda.Cuda().guard_bytes > 0
    assert fake.allocators == []
    monkeypatch.setenv("FA_CLI_NO_POOL", "1")
    assert cuda.Cuda().guard_bytes == 0
    assert fake.allocators == [None]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvidia_driver", lambda: False)
    with pytest.raises(EnvironmentFault, match="no NVIDIA GPU") as caught:
        cuda.Cuda()
    assert (caught.value.exit_code, caught.value.hint) == (4, "use --device cpu")


@pytest.mark.parametrize(("driver", "extra"), [((13, 0), "cuda13"), ((12, 4), "cuda12"), (None, "cuda12"), ((14, 1), "cuda13")])
def test_a_driver_without_cupy_gets_the_pip_line_that_fits_it(monkeypatch: pytest.MonkeyPatch, driver: Any, extra: str) -> None:
    """And auto does not fall back to the CPU in silence."""
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(cuda, "nvidia_driver", lambda: True)
    monkeypatch.setattr(backends, "nvidia_driver", lambda: True)
    monkeypatch.setattr(cuda, "driver_cuda", lambda: driver)
    with pytest.raises(EnvironmentFault, match="CuPy is not installed") as caught:
        backends.pick("auto")
    assert f"pip install 'fa-cli[{extra}]'" in caught.value.hint


def test_a_cupy_that_cannot_reach_the_gpu_says_why(fake: Fake) -> None:
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    fake.module.cuda.runtime.getDeviceCount = fail
    with pytest.raises(EnvironmentFault, match="InsufficientDriver"):
        cuda.Cuda()


def test_a_gpu_that_is_not_there(fake: Fake) -> None:
    with pytest.raises(EnvironmentFault, match=r"no GPU cuda:2[\s\S]*shows 2"):
        cuda.Cuda(2)
