"""The NVIDIA driver without a CUDA context: whether there is one, its CUDA version, and the state of a GPU by NVML."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path
from typing import Any

from ..files import Json


def nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver (CuPy is not asked)."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports, as (13, 0); None without a driver. Starts no process and no context."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def state(bus: str) -> Json:
    """The state of the GPU at a PCI bus id: driver, clocks in MHz, power in W, temperature in degrees C, clock event reasons.

    Empty without NVML; a value that it does not give, in a container say, is None.
    """
    if (gpu := _handle(bus)) is None:
        return {}
    import pynvml

    def ask(question: str, *more: int) -> int | None:
        try:
            answer: int | None = getattr(pynvml, question)(gpu, *more)
            return answer
        except pynvml.NVMLError:
            return None

    milliwatts, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        "power_w": milliwatts and milliwatts / 1000,
        "power_limit_w": limit and limit / 1000,
        "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }


def meter(bus: str) -> tuple[int, int] | None:
    """Millijoules that the GPU at a PCI bus id has taken since the driver was loaded, and its SM clock in MHz.

    None without NVML, and on GPUs before Volta, which do not count.
    """
    if (gpu := _handle(bus)) is None:
        return None
    import pynvml

    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    except pynvml.NVMLError:
        return None


@functools.cache
def _handle(bus: str) -> Any:
    """NVML's handle of a GPU, which has no type; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(bus)
    except pynvml.NVMLError:
        return None
