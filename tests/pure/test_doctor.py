"""doctor says what is wrong: each fault is planted, and only what stops kernels from running is a FAIL."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.fault import EnvironmentFault, UsageFault
from harness.files import exposed
from harness.kernel import KERNELS, Device
from harness.verbs import doctor
from harness.verbs.doctor import Check


@pytest.fixture(autouse=True)
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and with a C++ compiler, whatever runs the tests."""
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_INJECTION64_PATH", raising=False)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: False)
    monkeypatch.setattr(doctor, "compiler", lambda: ("/usr/bin/g++",))
    wheels(monkeypatch)


def wheels(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Let these distributions, and no others, be installed (underscores stand for hyphens)."""
    packages = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name: str) -> str:
        if name not in packages:
            raise doctor.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = [SimpleNamespace(metadata={"Name": name}, version=number) for name, number in packages.items()]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: found)


def gpu(monkeypatch: pytest.MonkeyPatch, backend: Callable[[int], Any] | None = None) -> None:
    """Let there be a driver for CUDA 13.0 and a GPU, or what making the backend raises."""
    device = Device("cuda", "NVIDIA H200", "sm_90")
    runtime = SimpleNamespace(getDeviceCount=lambda: 8)
    works = SimpleNamespace(device=lambda: device, xp=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: True)
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(doctor, "pip_line", lambda: "pip install '.[cuda13]'")
    monkeypatch.setattr(doctor, "Cuda", backend or (lambda index: works))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def checks() -> dict[str, Check]:
    found = doctor.doctor()
    named = {check.name: check for check in found}
    assert len(named) == len(found), "two lines of one name"
    return named


def failed() -> set[str]:
    return {name for name, check in checks().items() if check.status == "FAIL"}


def test_a_machine_with_a_compiler_and_no_gpu_is_in_order() -> None:
    found = checks()
    assert failed() == set()
    assert found["kernels"].detail == "run on the CPU (--device cpu)"
    assert found["c++ compiler"].detail == "/usr/bin/g++"
    assert "gpu" not in found and "cupy cache" not in found


def test_a_device_that_is_asked_for_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """--device cuda needs a GPU, cuda:9 that one, cpu a compiler; another word is no device."""

    def fail(device: str) -> list[str]:
        return [check.name for check in doctor.doctor(device) if check.status == "FAIL"]

    assert (fail("auto"), fail("cpu"), fail("cuda"), fail("cuda:1")) == ([], [], ["kernels"], ["kernels"])
    for device in ("nonsense", "cuda:\u00b2", "cpu:1", ""):
        with pytest.raises(UsageFault, match="unknown device"):
            doctor.doctor(device)
    given: list[int] = []
    gpu(monkeypatch, lambda index: given.append(index) or raising(EnvironmentFault("no GPU", "why", "hint"))())
    wheels(monkeypatch, cupy_cuda13x="14.2.0")
    assert fail("cuda:9") == ["kernels", "gpu"] and given == [9]
    gpu(monkeypatch)
    monkeypatch.setattr(doctor, "compiler", raising(EnvironmentFault("no C++ compiler", "why", "apt install g++")))
    assert (fail("auto"), fail("cuda"), fail("cpu")) == ([], [], ["kernels", "c++ compiler"])


def test_neither_compiler_nor_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiler", raising(EnvironmentFault("no C++ compiler", "why", "apt install g++")))
    assert failed() == {"kernels", "c++ compiler"}
    assert checks()["kernels"].hint == "apt install g++"


def test_a_gpu_without_a_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    wheels(monkeypatch, cupy_cuda13x="14.2.0")
    monkeypatch.setattr(doctor, "compiler", raising(EnvironmentFault("no C++ compiler", "why", "apt install g++")))
    found = checks()
    assert failed() == set()
    assert found["c++ compiler"].status == "WARN"
    assert found["gpu"].detail == "8 x NVIDIA H200, sm_90, 132 multiprocessors, 227 KB shared memory a block, 50 MB L2"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EnvironmentFault("CuPy is not installed", "why", "pip install '.[cuda13]'"), "CuPy is not installed: why"),
        (OSError("libnvrtc.so.13: cannot open"), "CuPy fails: OSError: libnvrtc.so.13"),
    ],
)
def test_a_driver_without_a_working_cupy_fails_with_the_pip_line(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    gpu(monkeypatch, raising(error))
    found = checks()
    assert failed() == {"gpu", "cupy"}
    assert words in found["gpu"].detail
    assert "pip install '.[cuda13]'" in found["gpu"].hint
    assert found["cupy"].hint == "pip install '.[cuda13]'"


def test_a_driver_whose_library_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    wheels(monkeypatch, cupy_cuda13x="14.2.0")
    monkeypatch.setattr(doctor, "driver_cuda", lambda: None)
    assert failed() == {"nvidia driver"}


def test_two_cupy_wheels_fail_and_cupy_s_relatives_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    wheels(monkeypatch, cupy_cuda13x="14.2.0", cupy_xarray="0.1")
    assert failed() == set()
    wheels(monkeypatch, cupy_cuda13x="14.2.0", cupy_cuda12x="14.1.0")
    assert failed() == {"cupy"}
    assert checks()["cupy"].hint == "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install '.[cuda13]'"


def test_no_nvrtc_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.nvrtc, "_nvrtc", raising(EnvironmentFault("NVRTC is not here", "why", "pip install it")))
    assert checks()["nvrtc"] == Check("nvrtc", "WARN", "NVRTC is not here: `fa-cli compile` needs it", "pip install it")


@pytest.mark.parametrize(
    ("cuda", "wheel", "status"), [("'13.0'", "cupy_cuda13x", "OK"), ("'12.8'", "cupy_cuda13x", "WARN"), ("None", "cupy_cuda13x", "OK")]
)
def test_torch_of_another_cuda_than_cupy_s_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, wheel: str, status: str
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('doctor imported torch')")
    (package / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    wheels(monkeypatch, torch="2.11.0", **{wheel: "14.2.0"})
    check = checks()["torch"]
    assert check.status == status
    assert ("CPU only" if cuda == "None" else f"CUDA {cuda[1:-1]}") in check.detail


def test_nccl_and_mpi_are_named_or_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(doctor.ctypes, "CDLL", raising(OSError("no library")))
    found = checks()
    assert (found["nccl"].status, found["mpi"].status) == ("OK", "WARN"), "NCCL is for GPUs"
    with monkeypatch.context() as driver:
        driver.setattr(doctor, "nvidia_driver", lambda: True)
        assert doctor._nccl().status == "WARN"
    assert "mpi4py and mpiexec" in found["mpi"].detail
    wheels(monkeypatch, nvidia_nccl_cu12="2.28", mpi4py="4.1.2")
    assert "no mpiexec:" in checks()["mpi"].detail
    (tmp_path / "mpiexec").touch(0o755)
    found = checks()
    assert (found["nccl"].detail, found["mpi"].status) == ("nvidia-nccl-cu12 2.28", "OK")


def test_another_mpis_mpiexec_first_in_path_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mpi4py loads the MPI of the mpiexec beside this Python; a link to that one is no other."""
    wheels(monkeypatch, mpi4py="4.1.2")
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    found = checks()["mpi"]
    assert (
        found.status == "WARN" and str(tmp_path / "other" / "mpiexec") in found.detail and str(tmp_path / "own" / "mpiexec") in found.hint
    )
    monkeypatch.setenv("PATH", str(tmp_path / "own"))
    assert checks()["mpi"].status == "OK"
    (tmp_path / "link").symlink_to(tmp_path / "own")
    monkeypatch.setenv("PATH", str(tmp_path / "link"))
    assert checks()["mpi"].status == "OK"


def test_profilers_matter_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks()["profilers"].status == "OK"
    gpu(monkeypatch)
    (tmp_path / "nsys").touch(0o755)
    check = checks()["profilers"]
    assert (check.status, check.detail) == ("WARN", "nsys, no ncu, no compute-sanitizer")
    for tool in ("ncu", "compute-sanitizer"):
        (tmp_path / tool).touch(0o755)
    monkeypatch.setattr(doctor, "_text", lambda path: "RmProfilingAdminOnly: 1" if str(path).endswith("params") else "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root" in checks()["profilers"].detail


def test_an_injected_library_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks()["injection"].status == "OK"
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/libspy.so")
    assert checks()["injection"].status == "WARN"
    assert "/opt/libspy.so" in checks()["injection"].detail


def test_a_cache_others_may_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine refuses it, also for a folder or file below; CuPy does not, and it is a warning."""
    cache = tmp_path / "cache"
    assert checks()["cache"].status == "OK", "one that is not there yet is as good as made"
    cache.mkdir(mode=0o755)
    assert checks()["cache"].status == "OK"
    cache.chmod(0o757)
    assert checks()["cache"].status == "FAIL"
    assert f"chmod -R go-w {cache}" in checks()["cache"].hint
    cache.chmod(0o755)
    inner = cache / "host" / "ab"
    inner.mkdir(parents=True)
    inner.chmod(0o775)
    assert checks()["cache"].status == "FAIL" and str(inner) in checks()["cache"].detail
    inner.chmod(0o755)
    (inner / "x.so").touch()
    assert checks()["cache"].status == "OK"
    (inner / "x.so").chmod(0o666)
    assert checks()["cache"].status == "FAIL" and "x.so" in checks()["cache"].detail
    gpu(monkeypatch)
    wheels(monkeypatch, cupy_cuda13x="14.2.0")
    assert checks()["cache"].status == "WARN"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    assert checks()["cupy cache"].status == "WARN" and "x.so" in checks()["cupy cache"].detail


def test_a_folder_above_the_cache_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine refuses it too; chmod is said to whom it helps."""
    tmp_path.chmod(0o777)
    check = checks()["cache"]
    assert check.status == "FAIL" and f"{tmp_path} is open" in check.detail and check.hint.startswith(f"chmod o-w {tmp_path}, or ")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert checks()["cache"].hint.startswith("a folder of yours: export FA_CLI_CACHE_DIR=")
    tmp_path.chmod(0o1777)
    assert checks()["cache"].status == "OK"


def test_a_file_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o644)
    owner = (tmp_path / "file").stat()
    planted = SimpleNamespace(st_mode=owner.st_mode, st_gid=owner.st_gid, st_uid=4242)
    assert "user 4242" in exposed(planted)  # type: ignore[arg-type]
    assert not exposed(owner)


def test_a_cache_that_cannot_be_made_fails_where_the_cpu_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert failed() == {"cache"}
    gpu(monkeypatch)
    wheels(monkeypatch, cupy_cuda13x="14.2.0")
    assert checks()["cache"].status == "WARN"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cupy"))
    assert failed() == {"cupy cache"}


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 29))
    monkeypatch.setattr(doctor, "_text", lambda path: "MemTotal: 9 kB\nMemAvailable:   524288 kB\n")
    found = checks()
    assert (found["disk"].status, found["memory"].status) == ("WARN", "WARN")
    assert found["memory"].detail == "0.5 GB free in this machine"


def test_it_is_quick_and_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from harness.verbs.doctor import doctor; doctor(); "
        "sys.exit(' '.join({'torch', 'pandas', 'matplotlib', 'mpi4py'} & set(sys.modules)) or 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=KERNELS.parent, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10, "processor time: machines that run tests are busy"


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ("", Check("peer copies", "OK", "work too: FA_CLI_RING_TRANSPORT=peer")),
        ("a wait is refused", Check("peer copies", "WARN", "a wait is refused", "rings use NCCL; nvidia-smi topo -m shows the links")),
        (None, None),
    ],
)
def test_a_ring_says_whether_peer_copies_work(monkeypatch: pytest.MonkeyPatch, copies: str | None, said: Check | None) -> None:
    """Beside NCCL, where it was asked for; why not, where they do not. A CPU has none."""
    found = doctor.probe.Probe((("a", "H200"), ("a", "H200")), "NCCL", True, True, (True, True), ((1 << 20, 1e9),), copies)
    monkeypatch.setattr(doctor, "on_ranks", lambda *_: found)
    checks, works = doctor.ring() or ([], "")
    assert [each for each in checks if each.name == "peer copies"] == [said] * (said is not None)
    assert works == "ring of 2 ranks on 1 host"
