"""The state of a GPU as NVML tells it, without root: clocks, power, temperature, throttle reasons."""

from __future__ import annotations

from typing import Any


def state(bus: str) -> dict[str, Any]:
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
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        "power_w": milliwatts and milliwatts / 1000,
        "power_limit_w": limit and limit / 1000,
        "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }
