"""The memory check counts what is really used: resident memory is measured, in a process of its own, and control groups are read."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest

from harness.check import memory
from harness.dataset import memory as host
from harness.fault import UsageFault
from harness.files import child
from harness.problem import Problem

SLOW = pytest.mark.days(14)
#: A kernel, a mode and sizes: what is largest at the peak differs (the keys' copies, queries, workspaces, gradients, padded rows).
CASES: list[Any] = [
    ("fa2", "forward", {"batch": 1, "heads": 1, "seq": 1, "seq_kv": 100_000, "dtype": "float16"}),
    ("mma", "forward", {"batch": 64, "heads": 32, "seq": 16, "dtype": "bfloat16"}),
    ("naive", "forward", {"batch": 1, "heads": 8, "seq": 640}),
    ("fa2", "both", {"batch": 32, "heads": 32, "seq": 16}),
    pytest.param("fa2", "both", {"batch": 1, "heads": 1, "seq": 1, "seq_kv": 100_000, "dtype": "float16"}, marks=SLOW),
    pytest.param("fa2", "forward", {"batch": 1, "heads": 1, "seq": 100_000, "seq_kv": 1}, marks=SLOW),
    pytest.param("fa2", "both", {"batch": 1, "heads": 1, "seq": 50_000, "seq_kv": 4, "dtype": "bfloat16"}, marks=SLOW),
    pytest.param("naive", "both", {"batch": 1, "heads": 2, "seq": 1024, "dtype": "bfloat16"}, marks=SLOW),
    pytest.param("mma_qreg_async", "both", {"batch": 64, "heads": 32, "seq": 16, "dtype": "bfloat16"}, marks=SLOW),
    pytest.param("fa2", "forward", {"batch": 16, "heads": 64, "heads_kv": 4, "seq": 32, "dim": 59, "dtype": "float16"}, marks=SLOW),
]


@pytest.mark.parametrize(("kernel", "mode", "sizes"), CASES)
def test_the_need_is_what_is_used(kernel: str, mode: str, sizes: dict[str, Any]) -> None:
    """Never less than the peak of resident memory; at most 1.5 times that where it is more than 100 MB."""
    used, needed = child.run(partial(jobs.peak, kernel, mode, sizes))
    assert used <= needed, f"{needed / used:.2f}"
    assert used < 100e6 or needed <= 1.5 * used, f"{needed / used:.2f}"


def test_several_kernels_need_more() -> None:
    """Kernels of one run have their tensors at the same time."""
    problem = Problem.of()
    one, two = (memory.need(problem, ("forward",), [0] * count) for count in (1, 2))
    assert two - one >= sum(problem.tensor_bytes(name) for name in ("Q", "K", "V", "O"))
    assert memory.need(problem, ("forward",), [1 << 30]) >= one + (1 << 30)


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem whose tensors fit and whose check does not."""
    problem = Problem.of(1, 1, 1, 64, seq_kv=400_000, dtype="float16")
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000_000)
    with pytest.raises(UsageFault, match="checking it on the CPU takes"):
        memory.check(problem, ("forward",))
    memory.check(problem.with_(seq_kv=100_000), ("forward",))


def group(folder: Path, limit: str, used: int, cache: int, one: bool = False) -> None:
    """The files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if one else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if one else "memory.current")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_inactive_file' if one else 'inactive_file'} {cache}\n")


def test_the_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the system's free memory and of what each group above the process leaves, in both versions; the cache counts as free."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert host.available_memory(tmp_path) == 8000 << 10
    top = tmp_path / "sys/fs/cgroup"
    group(top, "7000000", 1000, 0)  # a container's own root
    assert host.available_memory(tmp_path) == 6_999_000
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    group(top / "jobs", "6000000", 2_000_000, 500_000)
    group(top / "jobs/mine", "max", 100, 0)
    assert host.available_memory(tmp_path) == 4_500_000
    group(top / "jobs/mine", "1000000", 900_000, 0)
    assert host.available_memory(tmp_path) == 100_000
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/batch\n")
    group(top / "memory/batch", "3000000", 1_000_000, 10, one=True)
    assert host.available_memory(tmp_path) == 2_000_010
    (tmp_path / "proc/self/statm").write_text("100 1 1 1 0 1 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1_000_000, 1_000_000))
    assert host.available_memory(tmp_path) == 1_000_000 - 100 * resource.getpagesize()
