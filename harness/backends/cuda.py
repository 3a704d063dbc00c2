"""The CUDA backend: kernels through cupy.RawModule, timed with events, on CuPy's current stream.

The only module that imports cupy; the others get the array module from a backend's `xp`. Facts about CuPy that this file
leans on: a numpy array of one element is passed to a kernel by value from its own buffer; compiled cubins are kept by
CuPy itself (CUPY_CACHE_DIR); over 48 KB of shared memory a block must be asked for, function by function.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernel import Device, Kernel, Plan
from ..problem import EnvironmentFault, KernelFault, Problem, UsageFault
from . import Backend, Call, CompileError, Loaded, nvidia_driver, nvrtc

#: Shared memory (bytes) a block may use without asking.
SHARED_DEFAULT = 48 << 10

#: How the driver's messages say that it refused the launch, and nothing ran: anything else kills the CUDA context.
_REFUSED = ("INVALID_VALUE", "INVALID_CONFIGURATION", "OUT_OF_RESOURCES", "COOPERATIVE_LAUNCH_TOO_LARGE")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version the NVIDIA driver serves, (13, 0); None without a driver. Starts no process and no context."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def pip_line() -> str:
    """What to type to get the CuPy wheel that fits this machine's driver."""
    driver = driver_cuda()
    return f"pip install 'fa-cli[{'cuda13' if driver and driver[0] >= 13 else 'cuda12'}]'"


class Cuda(Backend):
    """One GPU of this machine. Raises EnvironmentFault where there is none, or no CuPy that can use it.

    FA_CLI_NO_POOL=1 is for compute-sanitizer: memory comes from the driver, tensor by tensor and without guard bands, so
    that the tool knows the bounds of each. Inside CuPy's pool an access out of bounds mostly lands in a neighbour.
    """

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.xp = _cupy()
        try:
            count = self.xp.cuda.runtime.getDeviceCount()
        except RuntimeError as error:  # CuPy's CUDARuntimeError
            raise EnvironmentFault("CuPy cannot use the GPU", str(error), "fa-cli doctor, or use --device cpu") from None
        if index >= count:
            raise EnvironmentFault(f"no GPU cuda:{index}", f"CUDA shows {count} of them", "use --device cuda:0, or --device cpu")
        self.xp.cuda.Device(index).use()
        sanitized = os.environ.get("FA_CLI_NO_POOL") == "1"
        if sanitized:
            self.xp.cuda.set_allocator(None)
        #: Bytes of poisoned memory run.py puts around each tensor.
        self.guard_bytes = 0 if sanitized else 4096
        facts = self.xp.cuda.runtime.getDeviceProperties(index)
        self._device = Device(
            kind="cuda",
            name=facts["name"].decode(),
            arch=f"sm_{facts['major']}{facts['minor']}",
            sms=facts["multiProcessorCount"],
            l2_bytes=facts["l2CacheSize"],
            shared_optin=facts["sharedMemPerBlockOptin"],
        )

    def device(self) -> Device:
        """What this GPU is."""
        return self._device

    def environment(self) -> dict[str, Any]:
        """GPU, driver, CUDA, NVRTC and CuPy versions; clocks, power, temperature and throttle reasons as NVML gives them now."""
        runtime = self.xp.cuda.runtime
        facts: dict[str, Any] = {
            "device": self.name, "device_name": self._device.name, "arch": self._device.arch, "multiprocessors": self._device.sms,
            "l2_bytes": self._device.l2_bytes, "shared_optin": self._device.shared_optin, "cuda_driver": runtime.driverGetVersion(),
            "cuda_runtime": runtime.runtimeGetVersion(), "nvrtc": ".".join(map(str, self.xp.cuda.nvrtc.getVersion())),
            "cupy": self.xp.__version__,
        }  # fmt: skip
        return facts | _nvml(self.xp.cuda.Device().pci_bus_id)

    # -- compiling ----------------------------------------------------------------------------------------------------

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile a kernel for a problem (or take CuPy's cached cubin) and ready its entries for launch.

        Raises UsageFault where the header refuses the problem or this GPU, CompileError with NVRTC's log, and KernelFault
        where an entry is not in the file or asks for more shared memory than there is.
        """
        if not kernel.runs_on(self._device.arch, problem.dtype):
            raise UsageFault(
                f"{kernel.label} does not run on {self._device.name}",
                f"its header says arch {kernel.arch_for(problem.dtype)}; this GPU is {self._device.arch}",
                "use another kernel: fa-cli list",
            )
        plan = kernel.plan(problem, self._device, overrides)
        exact = nvrtc.pinned_arch(kernel, problem.dtype)
        given = nvrtc.options(kernel, plan, exact)  # None: CuPy adds the device's own
        path = str(kernel.path).replace("\\", "\\\\").replace('"', '\\"')
        code = f'#line 1 "{path}"\n{kernel.path.read_text(encoding="utf-8")}'  # messages name the real file and line
        module = self.xp.RawModule(code=code, options=given, backend="nvrtc")
        functions: dict[str, Any] = {}
        shared = 0
        try:
            for entry in kernel.entries:
                function = functions[entry] = module.get_function(entry)
                shared = max(shared, _ready(function, entry, plan))
            registers = max(int(f.num_regs) for f in functions.values())
            local = max(int(f.local_size_bytes) for f in functions.values())
        except self.xp.cuda.compiler.CompileException as error:
            raise CompileError(kernel, ("nvrtc", *given, str(kernel.path)), str(error)) from None
        except RuntimeError as error:  # CuPy's CUDADriverError
            raise _load_fault(kernel, plan, entry, error) from None
        spills = self._spills(kernel, plan, exact, registers) if local else 0
        return Loaded(kernel, plan, functions, registers, spills, shared)

    def _spills(self, kernel: Kernel, plan: Plan, exact: str | None, registers: int) -> int | None:
        """Bytes spilled, which the driver cannot tell from other local memory: ptxas knows, if the same one can be asked."""
        try:
            found = nvrtc.resources(kernel, plan, exact or self._device.arch)
        except (EnvironmentFault, CompileError):
            return None
        return found.spill_bytes if found.registers == registers else None

    # -- memory -------------------------------------------------------------------------------------------------------

    def put(self, array: Any) -> Any:
        """A device copy of a numpy array of any dtype and shape, as flat uint8."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        try:
            return self.xp.asarray(flat)
        except self.xp.cuda.memory.OutOfMemoryError:
            free, total = self.xp.cuda.runtime.memGetInfo()
            what = f"{self._device.name} has no room for {flat.nbytes} more bytes"
            raise UsageFault(what, f"{free} of its {total} bytes are free", "use a smaller problem") from None

    def get(self, buffer: Any) -> Any:
        """A numpy uint8 copy of a device buffer."""
        return self.xp.asnumpy(buffer)

    def address(self, buffer: Any) -> int:
        """Where a device buffer starts."""
        return int(buffer.data.ptr)

    # -- running ------------------------------------------------------------------------------------------------------

    def launch(self, loaded: Loaded, calls: Sequence[Call]) -> None:
        """Run the calls in order and wait. Raises KernelFault where a launch is refused or a kernel dies."""
        self._run(loaded, calls)

    def time(self, loaded: Loaded, calls: Sequence[Call]) -> float:
        """Run the calls once and return seconds from the first launch to the end of the last. Raises as launch does."""
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        self._run(loaded, calls, start, stop)
        return float(self.xp.cuda.get_elapsed_time(start, stop)) * 1e-3

    def _run(self, loaded: Loaded, calls: Sequence[Call], start: Any = None, stop: Any = None) -> None:
        ready = [(loaded.functions[c.entry], c, tuple(map(_parameter, c.parameters))) for c in calls]
        call = calls[0]
        try:
            if start is not None:
                start.record()
            for function, call, parameters in ready:
                function(call.grid, (call.block, 1, 1), parameters, shared_mem=call.shared)
            if stop is not None:
                stop.record()
            self.xp.cuda.get_current_stream().synchronize()
        except RuntimeError as error:  # CuPy's CUDADriverError (launch) or CUDARuntimeError (while it ran)
            raise _run_fault(loaded.kernel, call, error) from None


def _cupy() -> Any:
    if not nvidia_driver():
        raise EnvironmentFault("no NVIDIA GPU", "there is no NVIDIA driver on this machine", "use --device cpu")
    hint = f"{pip_line()}, or use --device cpu"
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            why = "an NVIDIA driver is here, and CuPy is how its GPU is reached"
            raise EnvironmentFault("CuPy is not installed", why, hint) from None
        raise EnvironmentFault("CuPy does not load", str(error).strip(), hint) from None
    return cupy


def _nvml(bus: str) -> dict[str, Any]:
    """The state of the GPU at a PCI bus id; empty without NVML, and what it does not tell (in a container, say) is None."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
    except pynvml.NVMLError:
        return {}

    def ask(question: str, *more: Any) -> Any:
        try:
            return getattr(pynvml, question)(gpu, *more)
        except pynvml.NVMLError:
            return None

    milliwatts, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "driver": pynvml.nvmlSystemGetDriverVersion(), "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM), "power_w": milliwatts and milliwatts / 1000,
        "power_limit_w": limit and limit / 1000, "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }  # fmt: skip


def _ready(function: Any, entry: str, plan: Plan) -> int:
    """Let an entry have the dynamic shared memory its launches want; returns its bytes a block, static and dynamic."""
    static = int(function.shared_size_bytes)
    dynamic = max((launch.shared for launch in plan.launches if launch.entry == entry), default=0)
    # Only ever raised: CuPy gives one module to all who load the same code, and another plan may want more.
    if static + dynamic > SHARED_DEFAULT and int(function.max_dynamic_shared_size_bytes) < dynamic:
        function.max_dynamic_shared_size_bytes = dynamic
    return static + dynamic


def _parameter(value: Any) -> Any:
    """A kernel parameter as CuPy passes by value: a numpy array of one element, whatever the bytes mean."""
    if isinstance(value, int):
        value = np.uint64(value)  # an address
    raw = value.tobytes() if isinstance(value, (np.ndarray, np.generic)) else bytes(value)
    return np.frombuffer(bytearray(raw), dtype=[("bytes", "u1", (len(raw),))])


def _load_fault(kernel: Kernel, plan: Plan, entry: str, error: RuntimeError) -> KernelFault:
    if "NOT_FOUND" in str(error):
        what = f'{kernel.path}: no entry {entry!r}: it must be `extern "C" __global__ void {entry}(…)`'
        return KernelFault(what, str(error), f"name it in [[launch]] as the file does: fa-cli compile {kernel.path}")
    wanted = max((launch.shared for launch in plan.launches if launch.entry == entry), default=0)
    why = f"{error}; its launches want {wanted} bytes of dynamic shared memory"
    return KernelFault(f"{kernel.label}: entry {entry} cannot be made ready", why, "use smaller tiles (--tile)")


def _run_fault(kernel: Kernel, call: Call, error: RuntimeError) -> KernelFault:
    if any(word in str(error) for word in _REFUSED):
        why = f"{error}; grid {call.grid}, {call.block} threads, {call.shared} bytes of dynamic shared memory"
        hint = "use smaller tiles (--tile), or fewer registers (__launch_bounds__)"
        return KernelFault(f"{kernel.label}: the GPU refused to launch {call.entry}", why, hint)
    return KernelFault(
        f"{kernel.label} died while it ran (launched last: {call.entry})",
        f"{error}; this process's CUDA context is dead and can run nothing more",
        "FA_CLI_NO_POOL=1 compute-sanitizer --tool memcheck, before the same command, names the line",
    )
