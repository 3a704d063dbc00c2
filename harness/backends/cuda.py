"""The CUDA backend: kernels through cupy.RawModule, timed with events, on CuPy's current stream.

The transports between GPUs (ring/) import cupy too; all else takes the array module from a backend's `xp`. What this file relies on:
It caches compiled cubins (CUPY_CACHE_DIR), and functions by device. More than 48 KB of shared memory per block is opted into function by
function. cupy.cuda.driver.launchKernel is cuLaunchKernel and takes addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..array import Bytes
from ..fault import EnvironmentFault, KernelFault, UsageFault, install_extra
from ..files import Json
from ..kernel import Device, Kernel, Plan, planner
from ..kernel.plan import TensorMap
from ..kernel.signature import check_parameters
from ..problem import Problem
from . import attributed, nvml, nvrtc, tensor_map
from .protocol import Backend, Call, CompileError, ContextLost, Fill, Loaded, Step

#: Bytes of shared memory that a block may use without opting in.
SHARED_DEFAULT = 48 << 10

#: Errors with which the driver refuses a launch, so that nothing ran. Any other error destroys the CUDA context.
_REFUSED = ("INVALID_VALUE", "INVALID_CONFIGURATION", "INVALID_CLUSTER_SIZE", "OUT_OF_RESOURCES", "COOPERATIVE_LAUNCH_TOO_LARGE")


def pip_line() -> str:
    """The command that installs the CuPy wheel for this machine's driver."""
    driver = nvml.driver_cuda()
    return install_extra("cuda13" if driver and driver[0] >= 13 else "cuda12")


class Cuda(Backend):
    """One GPU of this machine. Raises EnvironmentFault where there is none, or no CuPy that can use it.

    debug: kernels are compiled for cuda-gdb. sms: as for Host, None: its own. FA_CLI_NO_POOL=1 is for compute-sanitizer: each tensor is an
    allocation of the driver, without guard bands, so the tool knows its bounds.
    """

    name = "cuda"

    def __init__(self, index: int = 0, debug: bool = False, sms: int | None = None) -> None:
        self.xp: Any = _cupy()  # CuPy has no types: what it returns is checked where it is given one
        try:
            count = self.xp.cuda.runtime.getDeviceCount()
        except RuntimeError as error:  # CuPy's CUDARuntimeError
            raise EnvironmentFault("CuPy cannot use the GPU", str(error), "fa-cli doctor, or use --device cpu") from None
        if index >= count:
            raise EnvironmentFault(f"no GPU cuda:{index}", f"CUDA shows {count} of them", "use --device cuda:0, or --device cpu")
        self._index, self._debug = index, debug
        self._thread = threading.local()
        self.xp.cuda.Device(index).use()
        sanitized = os.environ.get("FA_CLI_NO_POOL") == "1"
        if sanitized:
            self.xp.cuda.set_allocator(None)
        #: Bytes of a guard band (harness/check/tensors.py).
        self.guard_bytes = 0 if sanitized else 4096
        self._spin: Any = None  # a cupy.RawKernel
        self._flush: Any = None  # a cupy.ndarray: filled through its memory
        facts = self.xp.cuda.runtime.getDeviceProperties(index)
        sizes = sms or facts["multiProcessorCount"], facts["l2CacheSize"], facts["sharedMemPerBlockOptin"]
        self._device = Device("cuda", facts["name"].decode(), f"sm_{facts['major']}{facts['minor']}", *sizes)

    def device(self) -> Device:
        """This GPU, as launch plans need it."""
        return self._device

    def environment(self) -> Json:
        """GPU, versions of driver, CUDA, NVRTC and CuPy; clocks, power, temperature and throttle reasons now, from NVML."""
        runtime = self.xp.cuda.runtime
        facts: Json = {
            "device": self.name,
            "device_name": self._device.name,
            "arch": self._device.arch,
            "multiprocessors": self._device.sms,
            "l2_bytes": self._device.l2_bytes,
            "shared_optin": self._device.shared_optin,
            "cuda_driver": runtime.driverGetVersion(),
            "cuda_runtime": runtime.runtimeGetVersion(),
            "nvrtc": ".".join(map(str, self.xp.cuda.nvrtc.getVersion())),
            "cupy": self.xp.__version__,
        }
        return facts | nvml.state(self.xp.cuda.Device().pci_bus_id)

    # -- compiling ----------------------------------------------------------------------------------------------------

    def load(self, kernel: Kernel, problem: Problem, overrides: Mapping[str, int] | None = None) -> Loaded:
        """Compile a kernel for a problem, or take CuPy's cached cubin, and prepare its entries for launch.

        Raises UsageFault where the header refuses the problem or this GPU, CompileError with NVRTC's log, KernelFault where an entry
        is not in the file or needs more shared memory than there is.
        """
        kernel = planner.variant(kernel, problem)
        plan = planner.plan(kernel, problem, self.device(), overrides)
        if not kernel.runs_on(self._device.arch, problem.dtype):
            raise UsageFault(
                f"{kernel.label} does not run on {self._device.name}",
                f"its header says arch {kernel.arch_for(problem.dtype)}; this GPU is {self._device.arch}",
                "use another kernel: fa-cli list",
            )
        with self.xp.cuda.Device(self._index):  # CuPy compiles for the current one
            check_parameters(kernel)
            return self._load(kernel, plan)

    @contextlib.contextmanager
    def fresh(self, loaded: Loaded) -> Iterator[Loaded]:
        """A module of its own from the cached cubin. CuPy has one module for the same code, options and log stream: hence the stream."""
        kernel, plan, stream = loaded.kernel, loaded.plan, io.StringIO()
        exact = nvrtc.pinned_arch(kernel, dict(plan.macros)["DTYPE"])
        functions: dict[str, Any] = {}
        with self.xp.cuda.Device(self._index):
            module = self._module(kernel, nvrtc.options(kernel, plan, exact, self._debug))
            for entry in kernel.entries:
                try:
                    functions[entry] = module.get_function(entry)
                    functions[entry].compile(log_stream=stream)
                    _ready(functions[entry], entry, plan)
                except RuntimeError as error:  # CuPy's CUDADriverError
                    raise _load_fault(kernel, plan, entry, error) from None
        yield replace(loaded, functions=functions)

    def _module(self, kernel: Kernel, options: tuple[str, ...]) -> Any:
        path = str(kernel.path).replace("\\", "\\\\").replace('"', '\\"')
        code = f'#line 1 "{path}"\n{kernel.path.read_text(encoding="utf-8-sig")}'  # messages name the real file and line
        return self.xp.RawModule(code=code, options=options, backend="nvrtc")

    def _load(self, kernel: Kernel, plan: Plan) -> Loaded:
        exact = nvrtc.pinned_arch(kernel, dict(plan.macros)["DTYPE"])
        given = nvrtc.options(kernel, plan, exact, self._debug)  # None: CuPy adds the device's own
        module = self._module(kernel, given)
        functions: dict[str, Any] = {}
        shared = 0
        try:
            for entry in kernel.entries:
                function = functions[entry] = module.get_function(entry)
                shared = max(shared, _ready(function, entry, plan))
            registers = max(int(f.num_regs) for f in functions.values())
            local = max(int(f.local_size_bytes) for f in functions.values())
        except self.xp.cuda.compiler.CompileException as error:
            raise CompileError(kernel, ("nvrtc", *given, str(kernel.path)), _PCH.sub("", str(error))) from None
        except RuntimeError as error:  # CuPy's CUDADriverError
            raise _load_fault(kernel, plan, entry, error) from None
        if self._debug:  # every variable lies in local memory
            return Loaded(kernel, plan, functions, registers, None, shared, stack_bytes=local)
        spills = self._spills(kernel, plan, exact, registers) if local else 0
        return Loaded(kernel, plan, functions, registers, spills, shared, stack_bytes=local)

    def _spills(self, kernel: Kernel, plan: Plan, exact: str | None, registers: int) -> int | None:
        """Bytes spilled per thread, from ptxas: the driver gives all local memory. None where another ptxas compiled the kernel."""
        try:
            compiled = nvrtc.resources(kernel, plan, exact or self._device.arch)
        except (EnvironmentFault, CompileError):
            return None
        return compiled.spill_bytes if compiled.registers == registers else None

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self, size: int) -> Bytes:
        """Uninitialised device memory. Raises UsageFault where there is not enough."""
        try:
            buffer: Bytes = self.xp.empty(size, np.uint8)
            return buffer
        except self.xp.cuda.memory.OutOfMemoryError:
            free, total = self.xp.cuda.runtime.memGetInfo()
            what = f"{self._device.name} has no room for {size} more bytes"
            raise UsageFault(what, f"{free} of its {total} bytes are free", "use a smaller problem") from None

    def fill(self, buffer: Bytes, value: int) -> None:
        """As the protocol says, by the driver: what CuPy assigns is a kernel to compile."""
        memory: Any = buffer.data  # CuPy's own object, not numpy's memoryview
        memory.memset_async(value, buffer.nbytes)

    def get(self, buffer: Bytes) -> Bytes:
        """A numpy uint8 copy of a device buffer."""
        copy: Bytes = self.xp.asnumpy(buffer)
        return copy

    def address(self, buffer: Bytes) -> int:
        """The address of a device buffer's first byte."""
        memory: Any = buffer.data  # CuPy's own object, not numpy's memoryview
        return int(memory.ptr)

    def tensor_map(self, map_: TensorMap, address: int, strides: tuple[int, ...]) -> bytes:
        """The driver's opaque descriptor, kept for an address. Raises KernelFault for what TMA cannot address."""
        return tensor_map.for_cuda(map_, address, strides)

    def movable_map(self, map_: TensorMap, strides: tuple[int, ...]) -> tuple[memoryview, Callable[[int], None]]:
        """As the protocol says. The driver encodes the first address, and replaces it afterwards."""
        return tensor_map.movable_for_cuda(map_, strides)

    # -- running ------------------------------------------------------------------------------------------------------

    def submit(self, loaded: Loaded, steps: Sequence[Step], stream: int | None = None) -> None:
        """Enqueue the steps on this GPU, whichever GPU is current, without waiting. Raises as launch does."""
        self._here(partial(self._submit, loaded, steps), loaded, steps, stream)

    def repeated(
        self, loaded: Loaded, words: memoryview, fills: Sequence[tuple[int, int]], calls: Sequence[Call]
    ) -> Callable[[int | None], None]:
        """As the protocol says. The driver is given pointers to the parameters where they lie."""
        launch, memset = self.xp.cuda.driver.launchKernel, self.xp.cuda.runtime.memsetAsync
        made = []
        for call in calls:
            own = [(ctypes.c_char * memoryview(p).nbytes).from_buffer(p) for p in call.parameters]
            pointers = (ctypes.c_void_p * len(own))(*map(ctypes.addressof, own))
            size = (*call.grid, call.block, 1, 1, call.shared)
            attribute = self._attribute(call)
            config = attributed.config(call.grid, call.block, call.shared, attribute) if attribute else None
            made.append((loaded.functions[call.entry].kernel.ptr, size, config, ctypes.addressof(pointers), (pointers, own)))
        current, index, thread = self.xp.cuda.runtime.getDevice, self._index, self._thread

        def enqueue(stream: int | None = None, here: bool = False) -> None:
            """As _here, without what is only for another GPU's thread or a new one: it runs in every call of an operator."""
            if stream is None or not (here or (current() == index and hasattr(thread, "has_context"))):
                return self._here(partial(enqueue, here=True), loaded, calls, stream)
            try:
                for at, size in fills:
                    memset(words[at], 0, size, stream)
                for function, sizes, config, pointers, _ in made:
                    if config is None:
                        launch(function, *sizes, stream, pointers, 0)
                    elif error := attributed.launch(config, function, stream, pointers):
                        raise self.xp.cuda.driver.CUDADriverError(error)
            except RuntimeError as error:  # CuPy's CUDADriverError
                raise _run_fault(loaded.kernel, calls, error) from None
            return None

        return enqueue

    def _here(self, enqueue: Callable[[int], None], loaded: Loaded, steps: Sequence[Step], stream: int | None = None) -> None:
        """Enqueue on this GPU, whichever is current."""
        runtime = self.xp.cuda.runtime
        current = runtime.getDevice()
        if current != self._index:
            runtime.setDevice(self._index)
        try:
            if not hasattr(self._thread, "has_context"):  # a call of the runtime, not of the driver, gives a thread its context
                runtime.memGetInfo()
                self._thread.has_context = True
            enqueue(self.xp.cuda.get_current_stream().ptr if stream is None else stream)
        except RuntimeError as error:  # CuPy's CUDADriverError
            raise _run_fault(loaded.kernel, steps, error) from None
        finally:
            if current != self._index:
                runtime.setDevice(current)

    def _submit(self, loaded: Loaded, steps: Sequence[Step], stream: int) -> None:
        launch = self.xp.cuda.driver.launchKernel  # faster than calling a cupy function, which boxes every parameter
        for step in steps:
            if isinstance(step, Fill):
                self.xp.cuda.runtime.memsetAsync(step.address, 0, step.size, stream)
                continue
            # Pointers into the bytes objects; the driver reads them before it returns.
            pointers = (ctypes.c_char_p * len(step.parameters))(*step.parameters)  # type: ignore[misc]  # never repeated's
            function = loaded.functions[step.entry].kernel.ptr
            if attribute := self._attribute(step):
                config = attributed.config(step.grid, step.block, step.shared, attribute)
                self._attributed(config, function, stream, ctypes.addressof(pointers))
                continue
            launch(function, *step.grid, step.block, 1, 1, step.shared, stream, ctypes.addressof(pointers), 0)

    def context(self) -> int:
        """As the protocol says: CuPy's is the GPU's primary one, as torch's."""
        with self.current():
            self.xp.cuda.runtime.memGetInfo()  # gives the thread its context
            return int(self.xp.cuda.driver.ctxGetCurrent())

    def handle(self, loaded: Loaded, call: Call) -> tuple[int, int]:
        """As the protocol says."""
        return int(loaded.functions[call.entry].kernel.ptr), self._attribute(call)

    def _attribute(self, call: Call) -> int:
        """That of a call which is cooperative, or overlaps the one before, which only Hopper's GPUs and later ones can; 0: none."""
        if call.cooperative:
            return attributed.COOPERATIVE
        return attributed.OVERLAPS if call.overlaps and int(self._device.arch.removeprefix("sm_")) >= 90 else 0

    def _attributed(self, config: Any, function: int, stream: int, parameters: int) -> None:
        if error := attributed.launch(config, function, stream, parameters):
            raise self.xp.cuda.driver.CUDADriverError(error)

    def launch(self, loaded: Loaded, steps: Sequence[Step]) -> None:
        """Run the steps in order and wait. Raises KernelFault where a launch is refused, ContextLost where a kernel fails."""
        self.call(loaded, steps)

    def enqueue(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], float]:
        """Enqueue the steps between two events. The function returned waits and gives device seconds. Both raise as launch does."""
        with self._faults(loaded, steps):
            return self._between_events(lambda: self.submit(loaded, steps), lambda: self._faults(loaded, steps))

    def call(self, loaded: Loaded, steps: Sequence[Step]) -> float:
        """Run the steps once and return the host seconds it took to enqueue them. Raises as launch does."""
        with self._faults(loaded, steps):
            began = clock.perf_counter()
            self.submit(loaded, steps)
            enqueued = clock.perf_counter() - began
            self.xp.cuda.get_current_stream().synchronize()
        return enqueued

    def graph(self, loaded: Loaded, steps: Sequence[Step]) -> Callable[[], Callable[[], float]] | None:
        """Capture the steps as a CUDA graph. The function returned enqueues a replay, as enqueue does."""
        stream = self.xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            self.submit(loaded, steps)
            captured = stream.end_capture()
        null = self.xp.cuda.Stream.null
        return lambda: self._between_events(lambda: captured.launch(null), lambda: self._faults(loaded, steps))

    def before(self, seconds: float, cold: bool) -> None:
        """Where cold, flush the L2 cache by writing twice its size; then one thread spins for `seconds`."""
        if self._spin is None:
            self._spin = self.xp.RawKernel(_SPIN, "spin", backend="nvrtc")
            self._flush = self.xp.empty(2 * self._device.l2_bytes, np.uint8)
        if cold:
            self._flush.data.memset_async(0, self._flush.nbytes)
        if seconds:
            self._spin((1,), (1,), (np.uint64(seconds * 1e9),))

    def current(self) -> AbstractContextManager[object]:
        """This GPU, for what CuPy does in a thread of its own."""
        device: AbstractContextManager[object] = self.xp.cuda.Device(self._index)
        return device

    def range(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range, where this CuPy has NVTX."""
        from cupyx.profiler import time_range

        return time_range(name) if self.xp.cuda.nvtx.available else super().range(name)

    def state(self) -> Json:
        """Clocks, power, temperature and throttle reasons now, from NVML; empty without it."""
        return nvml.state(self.xp.cuda.Device().pci_bus_id)

    def meter(self) -> tuple[int, int] | None:
        """Millijoules so far and SM clock in MHz, from NVML; None where it does not count energy."""
        return nvml.meter(self.xp.cuda.Device().pci_bus_id)

    def _between_events(
        self, work: Callable[[], None], faults: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Callable[[], float]:
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record()
        work()
        stop.record()

        def seconds() -> float:
            with faults():
                stop.synchronize()
            return float(self.xp.cuda.get_elapsed_time(start, stop)) * 1e-3

        return seconds

    @contextlib.contextmanager
    def _faults(self, loaded: Loaded, steps: Sequence[Step]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # CuPy's CUDADriverError (launch) or CUDARuntimeError (while it ran)
            raise _run_fault(loaded.kernel, steps, error) from None


def _cupy() -> Any:
    if not nvml.nvidia_driver():
        raise EnvironmentFault("no NVIDIA GPU", "there is no NVIDIA driver on this machine", "use --device cpu")
    hint = f"{pip_line()}, or use --device cpu"
    os.environ.setdefault(
        "CUPY_NVRTC_USE_PCH", "1"
    )  # its own headers parsed once a process: a kernel of CuPy's compiles in 2/3 of the time
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            why = "an NVIDIA driver is here, and CuPy is how its GPU is reached"
            raise EnvironmentFault("CuPy is not installed", why, hint) from None
        raise EnvironmentFault("CuPy does not load", str(error).strip(), hint) from None
    return cupy


def _ready(function: Any, entry: str, plan: Plan) -> int:
    """Opt an entry into the dynamic shared memory of its launches; returns its bytes per block, static and dynamic."""
    static = int(function.shared_size_bytes)
    dynamic = max((launch.shared for launch in plan.launches if launch.entry == entry), default=0)
    # The limit is raised, never lowered: CuPy has one module for the same code, and another plan may need more.
    if static + dynamic > SHARED_DEFAULT and int(function.max_dynamic_shared_size_bytes) < dynamic:
        function.max_dynamic_shared_size_bytes = dynamic
    return static + dynamic


def _load_fault(kernel: Kernel, plan: Plan, entry: str, error: RuntimeError) -> KernelFault:
    if "NOT_FOUND" in str(error):
        what = f'{kernel.path}: no entry {entry!r}: it must be `extern "C" __global__ void {entry}(…)`'
        return KernelFault(what, str(error), f"name it in [[launch]] as the file does: fa-cli compile {kernel.path}")
    wanted = max((launch.shared for launch in plan.launches if launch.entry == entry), default=0)
    why = f"{error}; its launches need {wanted} bytes of dynamic shared memory"
    return KernelFault(f"{kernel.label}: entry {entry} cannot be made ready", why, "use smaller tiles (--tile)")


def _run_fault(kernel: Kernel, steps: Sequence[Step], error: RuntimeError) -> KernelFault:
    calls = [step for step in steps if isinstance(step, Call)]
    if any(word in str(error) for word in _REFUSED):
        sizes = ", ".join(
            f"{c.entry}: grid {c.grid}, {c.block} threads, {c.shared} bytes of dynamic shared memory"
            + f", clusters of {c.cluster}" * (c.cluster != (1, 1, 1))
            for c in calls
        )
        hint = "use smaller tiles (--tile), or fewer registers (__launch_bounds__)"
        return KernelFault(f"{kernel.label}: the GPU refused to launch it", f"{error}; {sizes}", hint)
    return ContextLost(
        f"{kernel.label} died while it ran ({', '.join(c.entry for c in calls)})",
        f"{error}; this process's CUDA context is dead and can run nothing more",
        "FA_CLI_NO_POOL=1 compute-sanitizer --tool memcheck, before the same command, names the line",
    )


#: What NVRTC says of precompiled headers, which our kernels have none of: they begin with #line.
_PCH = re.compile(
    r"^.*(?:warning #20283-D: |precompiled header file ).*\n(?:(?: .*)?\n)*(?:Remark: The warnings can be .*\n\s*\n)?", re.MULTILINE
)

_SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""
