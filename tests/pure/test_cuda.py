"""The CUDA backend against a stand-in for CuPy: what it asks of CuPy, and what it makes of CuPy's errors. No GPU is needed."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import planted
import pytest

from harness import backends
from harness.backends import Call, CompileError, Fill, Loaded, Step, cuda, nvml, nvrtc
from harness.fault import EnvironmentFault, KernelFault, UsageFault
from harness.problem import Problem

PROBLEM = Problem.of(1, 1, 64, 64)


class CompileException(Exception):
    """As cupy.cuda.compiler.CompileException: no RuntimeError."""


class Function:
    """A RawKernel: attributes, and its CUfunction's handle."""

    shared_size_bytes, local_size_bytes, num_regs = 1024, 0, 40
    kernel = SimpleNamespace(ptr=0xF00)

    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 48 << 10
        self.compiled: list[Any] = []

    def compile(self, log_stream: Any) -> None:
        """CuPy has a module for each log stream, and the limit of shared memory is the new module's."""
        self.compiled.append(log_stream)
        self.max_dynamic_shared_size_bytes = 48 << 10


class FakeDevice:
    """cupy.cuda.Device."""

    def __init__(self, cupy: Fake, index: int) -> None:
        self.cupy, self.index, self.before = cupy, index, 0

    def use(self) -> None:
        self.cupy.used.append(self.index)
        self.cupy.current = self.index

    def __enter__(self) -> None:
        self.before, self.cupy.current = self.cupy.current, self.index

    def __exit__(self, *error: object) -> None:
        self.cupy.current = self.before


class Fake:
    """A stand-in for the cupy module; the tests set what it answers."""

    def __init__(self) -> None:
        self.function = Function()
        self.current, self.threads = 0, []  # the current device, and the threads that have called the runtime
        self.sizes: tuple[int, ...] = ()  # of the parameters, which the driver reads from the function
        self.launches: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
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
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 2,
                getDeviceProperties=lambda i: self.facts,
                memGetInfo=self._memory,
                getDevice=lambda: self.current,
                setDevice=lambda i: setattr(self, "current", i),
                memsetAsync=lambda *given: self.launches.append(("memset", self.current, *given)),
            ),
            driver=SimpleNamespace(launchKernel=self._launch),
            Device=self._device,
            set_allocator=self.allocators.append,
            compiler=SimpleNamespace(CompileException=CompileException),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            Event=lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: self.synchronize()),
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: self.synchronize(), ptr=0x5),
            get_elapsed_time=lambda start, stop: 2.5,
        )
        self.module = module

    def _memory(self) -> tuple[int, int]:
        self.threads.append(threading.get_ident())
        return 10, 100

    def _device(self, index: int) -> Any:
        return FakeDevice(self, index)

    def _launch(self, function: int, *given: int) -> None:
        """As cuLaunchKernel: three sizes of the grid, three of the block, shared bytes, stream, void** parameters, extra."""
        if self.error:
            raise self.error
        *sizes, shared, stream, parameters, extra = given
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, self.sizes, strict=True)]
        assert extra == 0 and threading.get_ident() in self.threads, "a thread without a context"
        self.launches.append((function, self.current, tuple(sizes), shared, stream, values))

    def _module(self, **given: Any) -> Any:
        self.modules.append(given | {"device": self.current})
        return SimpleNamespace(get_function=lambda name: self.get_function(name))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    stand_in = Fake()
    monkeypatch.setitem(sys.modules, "cupy", stand_in.module)
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: True)
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


def test_for_cuda_gdb_nothing_is_optimised_and_no_spill_counted(fake: Fake, tmp_path: Path) -> None:
    """-G in place of -lineinfo, the rest as ever. All variables are in local memory then: that is no spill."""
    fake.function.local_size_bytes = 64
    kernel = planted.kernel(tmp_path)
    loaded = cuda.Cuda(debug=True).load(kernel, PROBLEM)
    ours = nvrtc.options(kernel, loaded.plan, None)
    assert fake.modules[0]["options"] == tuple(option.replace("-lineinfo", "-G") for option in ours) != ours
    assert loaded.spill_bytes is None


def test_a_fresh_load_is_another_module_of_the_same_code(fake: Fake, tmp_path: Path) -> None:
    """By a log stream of its own, the same for all entries; opted in anew; launches find its functions."""
    backend = cuda.Cuda()
    loaded = backend.load(planted.kernel(tmp_path), PROBLEM)
    made = [Function(), Function()]
    streams = []
    for function in made:
        fake.get_function = lambda name, function=function: function
        with backend.fresh(loaded) as again:
            assert set(again.functions) == set(loaded.functions) and again.functions["forward"] is function
        streams += function.compiled
    assert len(streams) == 2 and streams[0] is not streams[1] and None not in streams
    (first, *others) = ({**module, "device": 0} for module in fake.modules)
    assert len(others) == 2 and all(each == first for each in others)


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
    loaded = cuda.Cuda().load(kernel, PROBLEM)
    assert (loaded.spill_bytes, loaded.stack_bytes) == (52, 64)
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


def ready(fake: Fake, tmp_path: Path, *parameters: bytes, index: int = 0) -> tuple[cuda.Cuda, Loaded, list[Step]]:
    """A backend, a loaded kernel and one call of it."""
    backend = cuda.Cuda(index)
    fake.sizes = tuple(map(len, parameters))
    return backend, backend.load(planted.kernel(tmp_path), PROBLEM), [Call("forward", (64, 2, 3), 128, 256, parameters)]


def test_a_launch_is_the_driver_s_with_pointers_to_every_parameter(fake: Fake, tmp_path: Path) -> None:
    """Sizes as the plan has them, CuPy's current stream, and each parameter's own bytes, zeros among them."""
    given = [bytes(range(200)) + bytes(248), b"\0\0\0\1", (0x7F0000001000).to_bytes(8, "little")]
    backend, loaded, calls = ready(fake, tmp_path, *given)
    backend.launch(loaded, calls)
    assert fake.launches == [(0xF00, 0, (64, 2, 3, 128, 1, 1), 256, 0x5, given)]


def test_a_given_stream_and_the_backend_s_own_device_are_used(fake: Fake, tmp_path: Path) -> None:
    """Also from a new thread, while another device is current: it is current again afterwards, after a fault too."""
    backend, loaded, calls = ready(fake, tmp_path, index=1)
    assert fake.modules[-1]["device"] == 1
    fake.current = 0
    thread = threading.Thread(target=backend.submit, args=(loaded, [Fill(0x1000, 48), *calls], 0x77))
    thread.start()
    thread.join()
    assert fake.launches == [("memset", 1, 0x1000, 0, 48, 0x77), (0xF00, 1, (64, 2, 3, 128, 1, 1), 256, 0x77, [])]
    assert fake.current == 0
    fake.error = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(KernelFault, match="refused to launch"):
        backend.submit(loaded, calls, 0x77)
    assert fake.current == 0


def test_what_is_repeated_reads_its_parameters_anew(fake: Fake, tmp_path: Path) -> None:
    """On the backend's own device: memory that is zeroed first, then each launch with what its parameters hold by then."""
    backend, loaded, _ = ready(fake, tmp_path, bytes(448), bytes(8), index=1)
    fake.current = 0
    args = memoryview(bytearray(448))
    words, call = args.cast("q"), Call("forward", (64, 2, 3), 128, 256, (args, args[32:40]))
    enqueue = backend.repeated(loaded, words, [(36, 48)], [call])
    for turn in (1, 2):
        words[4], words[36] = 0x7F0000001000 * turn, 0x1000 * turn
        enqueue(0x77)
        launched = (0xF00, 1, (64, 2, 3, 128, 1, 1), 256, 0x77, [bytes(args), bytes(args[32:40])])
        assert fake.launches[-2:] == [("memset", 1, 0x1000 * turn, 0, 48, 0x77), launched]
    assert fake.current == 0 and len(fake.launches) == 4
    fake.error = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(KernelFault, match="refused to launch"):
        enqueue(0x77)


def test_a_launch_with_an_attribute_goes_its_own_way(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call and repeated; one that overlaps on a GPU before Hopper as any other; what the driver answers is a fault."""
    seen: list[tuple[int, int, int]] = []
    answer = 0

    def launched(config: Any, function: int, stream: int, parameters: int) -> int:
        seen.append((function, stream, config.attributes[0].id))
        return answer

    monkeypatch.setattr(cuda.attributed, "launch", launched)
    fake.module.cuda.driver.CUDADriverError = lambda code: RuntimeError(f"CUDA_ERROR_INVALID_VALUE: {code}")
    args = memoryview(bytearray(448))
    backend, loaded, _ = ready(fake, tmp_path, bytes(448))
    call = Call("forward", (64, 2, 3), 128, 256, (args,), overlaps=True)
    backend.submit(loaded, [call._replace(parameters=(bytes(448),))], 0x77)
    backend.repeated(loaded, args.cast("q"), [], [call])(0x78)
    backend.submit(loaded, [call._replace(parameters=(bytes(448),), overlaps=False, cooperative=True)], 0x79)
    assert seen == [(0xF00, 0x77, 6), (0xF00, 0x78, 6), (0xF00, 0x79, 2)] and not fake.launches
    answer = 1
    with pytest.raises(KernelFault, match="refused to launch"):
        backend.submit(loaded, [call._replace(parameters=(bytes(448),))], 0x77)
    fake.facts |= {"major": 8}
    old, loaded, _ = ready(fake, tmp_path, bytes(448))
    old.submit(loaded, [call._replace(parameters=(bytes(448),))], 0x77)
    assert len(seen) == 4 and len(fake.launches) == 1


def test_a_kernel_is_loaded_on_the_backend_s_own_device(fake: Fake, tmp_path: Path) -> None:
    """CuPy compiles for the device that is current when a function is asked for."""
    first, _ = cuda.Cuda(0), cuda.Cuda(1)
    first.load(planted.kernel(tmp_path), PROBLEM)
    assert (fake.modules[-1]["device"], fake.current) == (0, 1)


def test_time_is_in_seconds(fake: Fake, tmp_path: Path) -> None:
    backend, loaded, calls = ready(fake, tmp_path)
    assert backend.time(loaded, calls) == 2.5e-3
    assert len(fake.launches) == 1


def test_a_refused_launch_says_what_was_asked_for(fake: Fake, tmp_path: Path) -> None:
    backend, loaded, calls = ready(fake, tmp_path)
    fake.error = RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch")
    with pytest.raises(KernelFault, match=r"refused to launch it[\s\S]*forward: grid .* 128 threads, 256 bytes"):
        backend.launch(loaded, calls)
    fake.error = RuntimeError("CUDA_ERROR_INVALID_CLUSTER_SIZE: cluster misconfiguration")
    with pytest.raises(KernelFault, match=r"refused to launch it[\s\S]*CLUSTER_SIZE.*256 bytes .*, clusters of \(2, 1, 1\)"):
        backend.launch(loaded, [calls[0]._replace(cluster=(2, 1, 1))])


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
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: False)
    with pytest.raises(EnvironmentFault, match="no NVIDIA GPU") as caught:
        cuda.Cuda()
    assert (caught.value.exit_code, caught.value.hint) == (4, "use --device cpu")


@pytest.mark.parametrize(("driver", "extra"), [((13, 0), "cuda13"), ((12, 4), "cuda12"), (None, "cuda12"), ((14, 1), "cuda13")])
def test_a_driver_without_cupy_gets_the_pip_line_that_fits_it(monkeypatch: pytest.MonkeyPatch, driver: Any, extra: str) -> None:
    """And auto does not fall back to the CPU in silence."""
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: True)
    monkeypatch.setattr(backends, "nvidia_driver", lambda: True)
    monkeypatch.setattr(nvml, "driver_cuda", lambda: driver)
    with pytest.raises(EnvironmentFault, match="CuPy is not installed") as caught:
        backends.pick("auto")
    assert f"pip install -e '.[{extra}]'" in caught.value.hint


def test_a_cupy_that_cannot_reach_the_gpu_says_why(fake: Fake) -> None:
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    fake.module.cuda.runtime.getDeviceCount = fail
    with pytest.raises(EnvironmentFault, match="InsufficientDriver"):
        cuda.Cuda()


def test_a_gpu_that_is_not_there(fake: Fake) -> None:
    with pytest.raises(EnvironmentFault, match=r"no GPU cuda:2[\s\S]*shows 2"):
        cuda.Cuda(2)


def test_what_nvrtc_says_of_precompiled_headers_is_left_out() -> None:
    """CuPy asks for them; the lines of a kernel's own errors and warnings stay, and so does a log without such words."""
    errors = "mine.cu(7): error: expected an identifier\n  using scalar = x;\n                 ^\n\n1 error detected in the compilation.\n"
    told = 'mine.cu(1): warning #20283-D: PCH creation disabled because #line directive encountered\n  #line 1 "mine.cu"\n   ^\n\n'
    told += 'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n\n'
    more = "fa/tile.cuh(183): warning #20283-D: could not create PCH file\n  }  // namespace fa\n  ^\n\n"
    assert cuda._PCH.sub("", told + more + errors) == cuda._PCH.sub("", errors) == errors
