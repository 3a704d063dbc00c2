"""What profilers give: the counters asked of Nsight Compute, what its and Nsight Systems' tables say, and our CSV of them.

A metric that this GPU or this version does not know is no error: its value is None, in CSV an empty cell.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Column -> value; None where the tool did not give it. Columns end in their unit (_us, _pct, _bytes); others are counts and ratios.
Values = dict[str, float | None]

#: Column -> names of the metric; the first that this GPU and this ncu know counts. Names differ between architectures.
COUNTERS: dict[str, tuple[str, ...]] = {
    "time_us": ("gpu__time_duration.sum",),
    "registers": ("launch__registers_per_thread",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "sm_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_active",),
    "fma_pct": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",),
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "dram_bytes": ("dram__bytes.sum",),
    "dram_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "global_load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
    "global_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
    "global_store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
    "global_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "shared_pct": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",),
    # The hardware's count of conflicts includes cycles lost to tensor cores and TMA; wavefronts over the ideal do not.
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "bank_conflicts_load": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
    "bank_conflicts_store": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",),
    "shared_wavefronts": ("memory_l1_wavefronts_shared",),
    "shared_wavefronts_ideal": ("memory_l1_wavefronts_shared_ideal",),
}
#: Warps stalled for each reason, on average, per instruction issued: column stall_NAME.
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "barrier",
    "membar",
    "math_pipe_throttle",
    "mio_throttle",
    "lg_throttle",
    "tex_throttle",
    "wait",
    "not_selected",
    "selected",
    "no_instruction",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "sleeping",
    "gmma",
)
METRICS = COUNTERS | {f"stall_{name}": (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio",) for name in STALLS}

#: Units as ncu has spelled them -> what one of them is in bytes or microseconds.
_UNITS = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}
_UNITS |= {"s": 1e6, "second": 1e6}
#: nsys's columns -> ours, and what one of theirs is in ours.
_NSYS = {
    "Instances": ("launches", 1.0),
    "Avg (ns)": ("mean_us", 1e-3),
    "Med (ns)": ("median_us", 1e-3),
    "Min (ns)": ("min_us", 1e-3),
    "Max (ns)": ("max_us", 1e-3),
    "Time (%)": ("share_pct", 1.0),
}


@dataclass(frozen=True)
class Line:
    """Wavefronts of shared memory at a line of the source (place: FILE:LINE), and how many it would take without bank conflicts."""

    place: str
    wavefronts: int
    ideal: int


@dataclass(frozen=True)
class GlobalLine:
    """Requests of warps to global memory at a line of the source, the sectors of 32 bytes that they touch, and the fewest that hold the bytes.

    kind: load or store.
    """

    place: str
    kind: str
    requests: int
    sectors: int
    ideal: int


@dataclass(frozen=True)
class Counters:
    """One launch (ncu) or all launches of one entry (nsys, the CPU engine) of a kernel on a problem.

    lines, global_lines: of the CPU engine, that with the most wavefronts over its ideal first, and that with the most sectors over theirs, else the most.
    """

    kernel: str
    pass_: str
    entry: str
    problem: str
    metrics: Values
    lines: tuple[Line, ...] = ()
    global_lines: tuple[GlobalLine, ...] = ()


def per_request(metrics: Values) -> Values:
    """The counters with the sectors of a request to global memory: of 4 bytes a lane 4 where neighbours load neighbours, 32 at worst."""
    ratios: Values = {}
    for kind in ("load", "store"):
        sectors, requests = metrics[f"global_{kind}_sectors"], metrics[f"global_{kind}_requests"]
        ratios[f"sectors_per_{kind}"] = sectors / requests if sectors is not None and requests else None
    return metrics | ratios


def to_csv(rows: Sequence[Counters]) -> str:
    """The rows as CSV: kernel, pass, entry, problem, then a column a counter; what is not known is empty."""
    out = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row.metrics))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kernel", "pass", "entry", "problem", *columns])
    for row in rows:
        values = [row.metrics.get(name) for name in columns]
        writer.writerow([row.kernel, row.pass_, row.entry, row.problem, *("" if v is None else repr(v) for v in values)])
    return out.getvalue()


def read_ncu(text: str) -> list[tuple[str, Values]]:
    """(entry, counters) of each launch in what `ncu --csv --page raw` prints: a header, a line of units, a line a launch."""
    lines = _table(text, "ID", "Kernel Name")
    units = lines[0] if lines and not lines[0]["ID"] else {}
    found = []
    for cells in lines[1:] if units else lines:
        metrics: Values = {}
        for column, names in METRICS.items():
            values = (_number(cells.get(name), _UNITS.get(units.get(name, ""), 1.0)) for name in names)
            metrics[column] = next((value for value in values if value is not None), None)
        actual, ideal = metrics["shared_wavefronts"], metrics["shared_wavefronts_ideal"]
        metrics["shared_over_ideal"] = actual / ideal if actual is not None and ideal else None
        found.append((cells["Kernel Name"].partition("(")[0], per_request(metrics)))
    return found


def read_nsys(text: str) -> list[tuple[str, Values]]:
    """(entry, times) of each kernel in what `nsys stats --report cuda_gpu_kern_sum --format csv` prints."""
    lines = _table(text, "Name", "Instances")
    return [(c["Name"].partition("(")[0], {ours: _number(c.get(column), unit) for column, (ours, unit) in _NSYS.items()}) for c in lines]


def _table(text: str, *wanted: str) -> list[dict[str, str]]:
    """The lines of a CSV table that starts somewhere in a text: its header is the first line with the wanted columns."""
    rows = list(csv.reader(io.StringIO(text)))
    start = next((i for i, row in enumerate(rows) if set(wanted) <= set(row)), None)
    if start is None:
        return []
    return [dict(zip(rows[start], row, strict=True)) for row in rows[start + 1 :] if len(row) == len(rows[start])]


def _number(text: str | None, unit: float) -> float | None:
    """A number with thousands separators in units of ours; None for an empty cell, n/a, nan and anything else."""
    if text is None or not re.fullmatch(r"-?[\d,]*\.?\d+(e[+-]?\d+)?", text.strip(), re.I):
        return None
    return float(text.replace(",", "")) * unit
