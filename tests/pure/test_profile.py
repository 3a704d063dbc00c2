"""Profiles: what is read of the tools' tables, the CSV made of it, and what the profiled process does."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.backends.cuda import Cuda
from harness.backends.host.backend import Host
from harness.kernel import Kernel, find
from harness.problem import READS, Problem
from harness.verbs.profile import counters
from harness.verbs.profile import nsight as profile

FIXED = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC")


def line(*cells: str) -> str:
    """A line as ncu writes it: every cell quoted."""
    return ",".join(f'"{cell}"' for cell in cells) + "\n"


def report(columns: dict[str, tuple[str, ...]], units: bool = True, launches: tuple[str, ...] = ("forward",)) -> str:
    """What `ncu --csv --page raw` prints: columns is metric -> (unit, value of each launch)."""
    text = "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n" + line(*FIXED, *columns)
    if units:
        text += line(*[""] * len(FIXED), *(unit for unit, *_ in columns.values()))
    for i, name in enumerate(launches):
        fixed = (str(i), "4711", "python3", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(8, 8, 2)", "0", "9.0")
        text += line(*fixed, *(values[i] for _, *values in columns.values()))
    return text


def test_ncu_in_base_units() -> None:
    """Thousands separators, nanoseconds as microseconds, the ratio of wavefronts; what was not asked for is left out."""
    text = report(
        {
            "gpu__time_duration.sum": ("ns", "145,024"),
            "launch__registers_per_thread": ("register/thread", "168"),
            "dram__bytes.sum": ("byte", "25,427,968"),
            "lts__t_sector_hit_rate.pct": ("%", "87.25"),
            "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("", "1,000"),
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("", "16,500"),
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "1,048,576"),
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "0"),
            "memory_l1_wavefronts_shared": ("", "300"),
            "memory_l1_wavefronts_shared_ideal": ("", "200"),
            "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.73"),
            "device__attribute_architecture": ("", "384"),
        }
    )
    ((entry, found),) = counters.read_ncu(text)
    assert entry == "forward"
    known = {name: value for name, value in found.items() if value is not None}
    assert known == {
        "time_us": pytest.approx(145.024),
        "registers": 168,
        "dram_bytes": 25427968,
        "l2_hit_pct": 87.25,
        "global_load_requests": 1000,
        "global_load_sectors": 16500,
        "sectors_per_load": 16.5,
        "bank_conflicts_load": 1048576,
        "bank_conflicts_store": 0,
        "shared_wavefronts": 300,
        "shared_wavefronts_ideal": 200,
        "shared_over_ideal": 1.5,
        "stall_barrier": 0.73,
    }
    assert set(found) == {*counters.METRICS, "shared_over_ideal", "sectors_per_load", "sectors_per_store"}, (
        "what ncu did not give is there, unknown"
    )


@pytest.mark.parametrize(
    ("unit", "text", "microseconds"),
    [("us", "145.02", 145.02), ("usecond", "1,145.5", 1145.5), ("ms", "1.25", 1250), ("nsecond", "2,848", 2.848), ("second", "2", 2e6)],
)
def test_ncu_times_in_any_unit(unit: str, text: str, microseconds: float) -> None:
    """Both spellings that ncu has had."""
    ((_, found),) = counters.read_ncu(report({"gpu__time_duration.sum": (unit, text)}))
    assert found["time_us"] == pytest.approx(microseconds)


@pytest.mark.parametrize(("unit", "text", "value"), [("Kbyte", "640", 640e3), ("Mbyte", "25.43", 25.43e6), ("Gbyte", "1.5", 1.5e9)])
def test_ncu_bytes_in_any_unit(unit: str, text: str, value: float) -> None:
    """ncu counts in thousands."""
    ((_, found),) = counters.read_ncu(report({"dram__bytes.sum": (unit, text)}))
    assert found["dram_bytes"] == pytest.approx(value)


@pytest.mark.parametrize("text", ["n/a", "", "nan", "no data", "-nan", "(!) inf", "1;2"])
def test_ncu_without_a_number_is_unknown(text: str) -> None:
    """Never zero, and never a crash."""
    ((_, found),) = counters.read_ncu(report({"dram__bytes.sum": ("", text), "launch__registers_per_thread": ("", "40")}))
    assert found["dram_bytes"] is None and found["registers"] == 40


def test_ncu_names_of_other_architectures() -> None:
    """The first name with a value counts."""
    new, old = counters.METRICS["tensor_pct"]
    assert counters.read_ncu(report({new: ("%", "50.5"), old: ("%", "49")}))[0][1]["tensor_pct"] == 50.5
    assert counters.read_ncu(report({new: ("", "n/a"), old: ("%", "49")}))[0][1]["tensor_pct"] == 49


def test_ncu_launches_in_order() -> None:
    """A row a launch, named by the entry alone; without a line of units the numbers are as they stand."""
    columns = {"launch__registers_per_thread": ("register/thread", "40", "96", "96")}
    text = report(columns, launches=("delta(fa::Args)", "dk_dv", "dk_dv")) + "==WARNING== Found outstanding GPU clock reset\n"
    assert [(entry, found["registers"]) for entry, found in counters.read_ncu(text)] == [("delta", 40), ("dk_dv", 96), ("dk_dv", 96)]
    assert counters.read_ncu(report({"dram__bytes.sum": ("", "12")}, units=False))[0][1]["dram_bytes"] == 12


def test_ncu_without_a_table() -> None:
    """Nothing was profiled."""
    assert counters.read_ncu("==ERROR== ERR_NVGPUCTRPERM\n==WARNING== No kernels were profiled.\n") == []
    assert counters.read_ncu(report({"dram__bytes.sum": ("byte",)}, launches=())) == []


def test_ideal_wavefronts_of_nothing() -> None:
    """A kernel without shared memory has no ratio."""
    ((_, found),) = counters.read_ncu(report({"memory_l1_wavefronts_shared": ("", "0"), "memory_l1_wavefronts_shared_ideal": ("", "0")}))
    assert found["shared_over_ideal"] is None


@pytest.mark.parametrize("quote", ["", '"'])
def test_nsys(quote: str) -> None:
    """Microseconds, with lines before the table, quoted or not."""
    header = ["Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)", "StdDev (ns)", "Name"]
    text = "Generating SQLite file fa2.sqlite\nProcessing [fa2.sqlite] with [cuda_gpu_kern_sum.py]...\n\n"
    text += ",".join(quote + name + quote for name in header) + "\n"
    text += '75.0,"3,000,000",20,150000.0,149000.0,140000,180000,900.1,"forward(fa::Args)"\n'
    text += "25.0,1000000,20,50000.0,50000.0,50000,50000,0,delta\n"
    first, second = counters.read_nsys(text)
    assert first == (
        "forward",
        {"launches": 20, "mean_us": 150, "median_us": 149, "min_us": 140, "max_us": 180, "share_pct": 75},
    )
    assert second[0] == "delta" and second[1]["median_us"] == 50


def test_csv() -> None:
    """A column a counter, also where rows have different ones; unknown is empty, a number is whole."""
    rows = [
        counters.Counters("fa2", "forward", "forward", "B2_H8_S512_D64", {"registers": 168.0, "dram_bytes": None}),
        counters.Counters("naive", "forward", "scores", "B2_H8_S512_D64 causal", {"registers": 32.0, "l2_hit_pct": 1 / 3}),
    ]
    first, second = csv.DictReader(counters.to_csv(rows).splitlines())
    assert list(first) == ["kernel", "pass", "entry", "problem", "registers", "dram_bytes", "l2_hit_pct"]
    assert (first["kernel"], first["registers"], first["dram_bytes"], first["l2_hit_pct"]) == ("fa2", "168.0", "", "")
    assert second["problem"] == "B2_H8_S512_D64 causal" and float(second["l2_hit_pct"]) == 1 / 3


# -- the profiled process ---------------------------------------------------------------------------------------------


class Timed:
    """What run_kernel gives to be run: notes that it was."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def call(self) -> float:
        self.events.append("run")
        return 1e-5


@pytest.mark.parametrize(("pass_", "runs"), [("forward", 1), ("backward", 3)])
def test_only_the_kernel_runs_while_the_profiler_is_on(pass_: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check and warm-up come before the profiler starts, and each pass gets what it reads."""
    events: list[Any] = []
    switch = SimpleNamespace(start=lambda: events.append("start"), stop=lambda: events.append("stop"))
    backend = SimpleNamespace(xp=SimpleNamespace(cuda=SimpleNamespace(profiler=switch)))
    problem = Problem.of(1, 2, 7, 8, causal=True, scale=0.3)

    def run_kernel(on: Any, kernel: Kernel, oracle: Any, inputs: dict[str, Any], tiles: dict[str, int]) -> Any:
        assert on is backend and kernel.label == f"fa2_{pass_}" and oracle.problem == problem and tiles == {"BLOCK_K": 32}
        assert {name: array.shape for name, array in inputs.items()} == {name: problem.shape(name) for name in READS[pass_]}
        events.append("check")
        return SimpleNamespace(passed=True, timed=Timed(events))

    def oracle_for(problem: Problem, on: Any, mode: str, seed: int) -> Any:
        assert (mode, seed) == (pass_, 7)
        return SimpleNamespace(problem=problem, inputs_of=lambda pass_: {name: np.zeros(problem.shape(name)) for name in READS[pass_]})

    monkeypatch.setattr(profile, "pick", lambda device: backend if device == "cuda:1" else None)
    monkeypatch.setattr("harness.verbs.profile.checked.run_kernel", run_kernel)
    monkeypatch.setattr(profile, "oracle_for", oracle_for)
    profile.run_job(profile.Job(find("fa2", pass_), problem, 7, "cuda:1", {"BLOCK_K": 32}, runs))
    assert events == ["check", "run", "start", *["run"] * runs, "stop"]


def test_ranges_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a range is NVTX's, where CuPy has it; elsewhere it is nothing."""
    marks: list[str] = []

    @contextlib.contextmanager
    def time_range(name: str) -> Iterator[None]:
        marks.append(f"push {name}")
        yield
        marks.append("pop")

    module: Any = ModuleType("cupyx.profiler")
    module.time_range = time_range
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.profiler", module)
    backend = object.__new__(Cuda)
    for available in (True, False):
        backend.xp = SimpleNamespace(cuda=SimpleNamespace(nvtx=SimpleNamespace(available=available)))
        with backend.range("fa2 forward B2_H8_S512_D64"):
            marks.append("kernel")
    assert marks == ["push fa2 forward B2_H8_S512_D64", "kernel", "pop", "kernel"]
    with object.__new__(Host).range("fa2 forward B2_H8_S512_D64"):
        marks.append("on the CPU")
    assert marks[-2:] == ["kernel", "on the CPU"]
