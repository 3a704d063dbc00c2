"""What works on this machine, what does not, and why. Quick: it asks metadata and the file system, imports no torch, starts nothing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from ..backends import cache_dir, nvidia_driver, nvrtc, parsed
from ..backends.cuda import Cuda, pip_line
from ..backends.host.build import compiler
from ..backends.mapped import CHOICE
from ..backends.nvml import driver_cuda
from ..fault import Fault, UsageFault, install_extra
from ..files import exposed, private_again, replaceable
from ..ring import probe
from ..ring.start import mpiexec, on_ranks

OK, WARN, FAIL = "OK", "WARN", "FAIL"

#: Less free than this (bytes) and a run of an ordinary size is likely to stop.
_LITTLE = 1 << 30

_TOOLS = ("ncu", "nsys", "compute-sanitizer")


@dataclass(frozen=True)
class Check:
    """One line of the doctor. FAIL only for what stops kernels from running here; WARN for what is missing or doubtful."""

    name: str
    status: str
    detail: str
    hint: str = ""


def doctor(device: str = "auto", gpus: int | None = None) -> list[Check]:
    """Check everything that the verbs rely on, with this --device. What goes wrong is a line of its own; raises UsageFault for a device
    that is none, and for a number of ranks, which only :func:`ring` starts."""
    if gpus is not None:
        raise UsageFault(f"--gpus {gpus} without --ring", "only a ring has ranks", f"fa-cli doctor --ring --gpus {gpus}")
    kind, index = parsed(device)
    gpu, gpu_checks = _gpu(index)
    return [
        _runs(gpu, kind),
        Check("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _fa_cli(),
        _compiler(gpu is not None and kind != "cpu"),
        _driver(),
        *gpu_checks,
        _cupy_wheel(),
        _nvrtc(),
        _torch(),
        _nccl(),
        _mpi(),
        _tools(gpu is not None),
        _injection(),
        _kernel_cache(needed=gpu is None),
        *([_cache("cupy cache", _cupy_cache(), "CUPY_CACHE_DIR", True, WARN)] if gpu is not None else []),
        _disk(),
        _memory(),
    ]


def _kernel_cache(needed: bool) -> Check:
    try:
        return _cache("cache", cache_dir(), "FA_CLI_CACHE_DIR", needed, FAIL if needed else WARN)
    except Fault as fault:  # a user without a home
        return Check("cache", FAIL if needed else WARN, fault.why, fault.hint)


def ring(device: str = "auto", gpus: int | None = None, timeout: float = 60.0) -> tuple[list[Check], str] | None:
    """What a ring relies on, tried by its ranks: a vector sum put together on the first rank, bytes passed all the way round, and the
    bandwidth of a message size; and what ring it is. None on the other ranks of a launcher. Raises as ring.start.on_ranks."""
    probed = on_ranks(partial(probe.probe, device, timeout), device, gpus)
    if probed is None:
        return None
    where = "; ".join(f"{rank}: {host} {name}" for rank, (host, name) in enumerate(probed.ranks))
    checks = [
        Check("ranks", OK, f"{len(probed.ranks)} by {probed.engine}: {where}"),
        Check(
            "vector sum",
            OK if probed.vector else FAIL,
            "each rank a part" if probed.vector else "the sum is wrong",
            "" if probed.vector else "fa-cli verify",
        ),
        Check(
            "once round",
            OK if probed.round else FAIL,
            "the bytes of every rank came to every rank" if probed.round else "bytes were changed",
        ),
    ]
    if probed.peers:
        checks.append(
            Check("peer access", OK if all(probed.peers) else WARN, "between " + ("all" if all(probed.peers) else "not all") + " GPUs")
        )
    if probed.copies is not None:
        hint = "rings use NCCL; nvidia-smi topo -m shows the links" if probed.copies else ""
        checks.append(Check("peer copies", WARN if probed.copies else OK, probed.copies or f"work too: {CHOICE}=peer", hint))
    checks += [Check(f"{size / (1 << 20):g} MiB", OK, f"{rate / 1e9:.4g} GB/s each way") for size, rate in probed.bandwidth]
    count, hosts = len(probed.ranks), len({host for host, _ in probed.ranks})
    return checks, f"ring of {count} rank{'s' * (count != 1)} on {hosts} host{'s' * (hosts != 1)}"


# -- what kernels run on ----------------------------------------------------------------------------------------------


def _gpu(index: int) -> tuple[Cuda | None, list[Check]]:
    """The CUDA backend if it works, and its check; no check where there is no driver, which `_driver` reports."""
    if not nvidia_driver():
        return None, []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's own about two wheels: `_cupy_wheel` says it
            backend = Cuda(index)
            count = backend.xp.cuda.runtime.getDeviceCount()
    except Fault as fault:
        return None, [Check("gpu", FAIL, f"{fault.what}: {fault.why}", fault.hint)]
    except Exception as error:  # a CuPy that does not fit its libraries can raise anything
        return None, [Check("gpu", FAIL, f"CuPy fails: {type(error).__name__}: {error}", f"{pip_line()}, or use --device cpu")]
    device = backend.device()
    sizes = f"{device.sms} multiprocessors, {device.shared_optin >> 10} KB shared memory a block, {device.l2_bytes >> 20} MB L2"
    return backend, [Check("gpu", OK, f"{count} x {device.name}, {device.arch}, {sizes}")]


def _runs(gpu: Cuda | None, kind: str) -> Check:
    if gpu is None and kind == "cuda":
        return Check("kernels", FAIL, "cannot run as asked: --device cuda, and no GPU that works", "use --device cpu")
    if gpu is not None and kind != "cpu":
        return Check("kernels", OK, "run on the GPU (--device cuda), and checked on the CPU (--device cpu) where there is a C++ compiler")
    try:
        compiler()
    except Fault as fault:
        where = "nowhere here: no GPU that works" if kind == "auto" else "not run as asked: --device cpu"
        return Check("kernels", FAIL, f"can {where}, and no C++ compiler", fault.hint)
    return Check("kernels", OK, "run on the CPU (--device cpu)")


def _compiler(gpu: bool) -> Check:
    try:
        return Check("c++ compiler", OK, " ".join(compiler()))
    except Fault as fault:
        return Check("c++ compiler", WARN if gpu else FAIL, f"{fault.what}: {fault.why}", fault.hint)


# -- packages ---------------------------------------------------------------------------------------------------------


def _text(path: str | Path) -> str:
    """A file's text, empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fa_cli() -> Check:
    version = _version("fa-harness")
    return Check("fa-cli", OK, f"{version}, from {Path(__file__).parents[2]}" if version else "a checkout that is not installed")


def _driver() -> Check:
    if not nvidia_driver():
        return Check("nvidia driver", OK, "none, so no GPU: kernels run on the CPU engine")
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", _text("/proc/driver/nvidia/version"))
    cuda = driver_cuda()
    serves = f"serves CUDA up to {cuda[0]}.{cuda[1]}" if cuda else "its library libcuda.so.1 does not load"
    hint = "" if cuda else "reinstall the driver, or in a container start it with --gpus all"
    return Check("nvidia driver", OK if cuda else FAIL, f"{number[0] if number else 'version unknown'}, {serves}", hint)


def _cupy_wheel() -> Check:
    wheels = sorted(
        {
            f"{name} {package.version}"
            for package in metadata.distributions()
            if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-[\d-]+)?", name := re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower())
        }
    )
    if len(wheels) > 1:
        hint = f"pip uninstall {' '.join(w.split()[0] for w in wheels)}, then {pip_line()}"
        return Check("cupy", FAIL, f"two wheels overwrite each other: {', '.join(wheels)}", hint)
    if wheels:
        return Check("cupy", OK, wheels[0])
    if nvidia_driver():
        return Check("cupy", FAIL, "not installed, and it is how the GPU is reached", pip_line())
    return Check("cupy", OK, "not installed, nor needed without a GPU")


def _nvrtc() -> Check:
    try:
        return Check("nvrtc", OK, f"{nvrtc.version()}, compiles for {', '.join(nvrtc.architectures())}")
    except Fault as fault:
        return Check("nvrtc", WARN, f"{fault.what}: `fa-cli compile` needs it", fault.hint)


def _cuda_major(name: str) -> str | None:
    """The CUDA major in a package's name or version: 12 of cupy-cuda12x, nvidia-nccl-cu12, 2.11.0+cu128."""
    match = re.search(r"cu(?:da)?(1\d)", name)
    return match[1] if match else None


def _torch() -> Check:
    version = _version("torch")
    if not version:
        return Check("torch", WARN, "not installed: no torch peers to compare with", "pip install torch")
    spec = importlib.util.find_spec("torch")  # of a top-level package: finds it without importing it
    stated = _text(Path(spec.origin).parent / "version.py") if spec and spec.origin else ""
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", stated, re.M)
    if not match:
        return Check("torch", OK, f"{version}, for the CPU only")
    cuda = match[1]
    cupy = next((wheel for wheel in ("cupy-cuda12x", "cupy-cuda13x") if _version(wheel)), None)
    if cupy and _cuda_major(cupy) != cuda.split(".")[0]:
        hint = f"install the torch of CUDA {_cuda_major(cupy)}, or the CuPy wheel of CUDA {cuda.split('.')[0]}"
        return Check("torch", WARN, f"{version} for CUDA {cuda} beside {cupy}: one may load the other's libraries", hint)
    return Check("torch", OK, f"{version} for CUDA {cuda}")


def _nccl() -> Check:
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if version := _version(wheel):
            return Check("nccl", OK, f"{wheel} {version}")
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        if not nvidia_driver():
            return Check("nccl", OK, "not found, nor needed without a GPU")
        return Check("nccl", WARN, "not found: no ring over several GPUs", install_extra("ring"))
    return Check("nccl", OK, f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}, the system's")


def _mpi() -> Check:
    version, typed = _version("mpi4py"), shutil.which("mpiexec")
    try:
        launcher: str | None = mpiexec()
    except Fault:
        launcher = None
    if version and launcher and typed and not os.path.samefile(typed, launcher):
        detail = f"mpi4py {version} loads the MPI of {launcher}; `mpiexec` is {typed}, which may belong to another"
        return Check("mpi", WARN, detail, f"type {launcher}, or put {Path(launcher).parent} first in PATH")
    if version and launcher:
        return Check("mpi", OK, f"mpi4py {version}, {launcher}")
    lacks = "mpi4py" if launcher else "mpiexec" if version else "mpi4py and mpiexec"
    what = f"no {lacks}: no `mpiexec fa-cli ring`, no ranks on a CPU (--gpus N on GPUs needs none)"
    return Check("mpi", WARN, what, install_extra("ring"))


# -- tools and the process --------------------------------------------------------------------------------------------


def _tools(gpu: bool) -> Check:
    here = [tool for tool in _TOOLS if shutil.which(tool)]
    missing = [tool for tool in _TOOLS if tool not in here]
    detail = ", ".join([*here, *(f"no {tool}" for tool in missing)])
    if missing and gpu:
        return Check("profilers", WARN, detail, "install the CUDA toolkit, and put its bin folder (/usr/local/cuda/bin) on PATH")
    if gpu and "RmProfilingAdminOnly: 1" in _text("/proc/driver/nvidia/params") and os.geteuid() != 0:
        return Check("profilers", WARN, f"{detail}; only root may read the GPU's counters", "run ncu with sudo")
    return Check("profilers", OK, detail if gpu else f"{detail}; fa-cli profile --device cpu counts memory traffic")


def _injection() -> Check:
    library = os.environ.get("CUDA_INJECTION64_PATH")
    if library:
        detail = f"CUDA_INJECTION64_PATH={library}: that library is loaded into every CUDA program here, and its times mean little"
        return Check("injection", WARN, detail, "unset CUDA_INJECTION64_PATH")
    return Check("injection", OK, "no library is injected into CUDA programs")


# -- room -------------------------------------------------------------------------------------------------------------


def _cupy_cache() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _cache(name: str, folder: Path, variable: str, needed: bool, exposed_is: str) -> Check:
    """A folder of compiled code, with all below it: writable by its owner only, since the code in it is run. exposed_is: FAIL where the
    backend refuses such a folder."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        detail = f"{folder} cannot be written, so compiled kernels cannot be kept"
        return Check(name, FAIL if needed else WARN, detail, f"set {variable} to a folder of yours")
    for path in _below(folder) if there == folder else ():
        if why := exposed(path.lstat() if path != folder else path.stat()):
            hint = private_again(path, folder, variable)
            return Check(name, exposed_is, f"{path} may be another user's: {why}, and the code there is run", hint)
    if above := replaceable(folder):
        return Check(
            name, exposed_is, f"{above[0]} is open: {above[1]}, and the code there is run", private_again(above[0], folder, variable)
        )
    return Check(name, OK, str(folder))


def _below(folder: Path) -> Iterator[Path]:
    """A folder and all that is in it, links aside."""
    yield folder
    for root, folders, names in os.walk(folder):
        yield from (path for name in (*folders, *names) if not (path := Path(root, name)).is_symlink() and path.exists())


def _room(name: str, free: Callable[[], int], of: str, hint: str) -> Check:
    try:
        have = free()
    except (OSError, ValueError, IndexError) as error:
        return Check(name, WARN, f"cannot tell: {error}")
    return Check(name, WARN if have < _LITTLE else OK, f"{have / (1 << 30):.1f} GB free {of}", hint if have < _LITTLE else "")


def _disk() -> Check:
    return _room("disk", lambda: shutil.disk_usage(".").free, f"in {Path.cwd()}", "free some, or use --output-dir on another disk")


def _memory() -> Check:
    def available() -> int:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.M)
        return int(match[1]) << 10 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    return _room("memory", available, "in this machine", "close something, or use smaller problems")
