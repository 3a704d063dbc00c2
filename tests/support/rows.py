"""Rows of results for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.files import append_files, make_folder
from harness.problem import Problem
from harness.row import TYPES, Row, encoded, mend

GPU, CPU = {"device": "cuda", "device_name": "NVIDIA H200"}, {"device": "cpu", "device_name": "a processor"}
RUN = "20261120T184550Z-ab12"


def row(kernel: str, test: str, ms: float | None, problem: Problem | None = None, mode: str = "forward", **other: Any) -> Row:
    """A row as experiment writes it, with rates by Problem; without a time it failed."""
    p = problem or Problem.of(4, 8, int(test.strip("S")), 64)
    facts: dict[str, Any] = {
        "Test": test,
        "Kernel": kernel,
        "Type": TYPES[mode],
        "Batch": p.batch,
        "Heads": p.heads_q,
        "SeqLen": p.seq_q,
        "HeadDim": p.head_dim,
        "heads_kv": p.heads_kv,
        "seq_kv": p.seq_kv,
        "dtype": p.dtype,
        "causal": p.causal,
        "scale": p.scale,
        "Status": "PASS" if ms else "FAIL",
        "run_id": RUN,
        "ErrorMessage": None if ms else f"{kernel} is wrong",
        "MaxError_O": 1e-6,
        **GPU,
    }
    if ms:
        rates = {"TFLOPS": p.flops(mode) / (ms * 1e9), "Bandwidth_GBps": p.bytes(mode) / (ms * 1e6)}
        facts |= {
            "KernelTime_ms": ms,
            "p20_ms": ms * 0.9,
            "p80_ms": ms * 1.2,
            "n_samples": 20,
            "timing": "warm",
            "peak_bytes": 1 << 20,
            **rates,
        }
    return Row(**facts | other)


def plain(**changes: Any) -> Row:
    """A row with the columns that must not be empty, and these."""
    base = {
        "Kernel": "fa2",
        "Type": "FOR",
        "Batch": 2,
        "Heads": 8,
        "SeqLen": 512,
        "HeadDim": 64,
        "Status": "PASS",
        "heads_kv": 8,
        "seq_kv": 512,
        "dtype": "float32",
        "causal": False,
        "scale": 0.125,
    }
    return Row(**(base | changes))


def lengths(*kernels: str, upto: int = 4, **other: Any) -> list[Row]:
    """Rows of kernels over the lengths 128, 256 ..., the later kernel half as fast."""
    return [row(k, f"S{128 << i}", 4.0**i * 2.0**j, **other) for i in range(upto) for j, k in enumerate(kernels)]


def ceilings(**rates: float) -> list[Row]:
    """Rows of ceilings: gemm_float32 in TFLOP/s, copy in GB/s, exp in 10^12 a second."""
    found = []
    for name, rate in rates.items():
        kind = {"Bandwidth_GBps": rate, "TFLOPS": None} if name == "copy" else {"Bandwidth_GBps": None, "TFLOPS": rate}
        found.append(row("ceiling-" + name.replace("_", "-"), "S8192", 1.0, **kind))
    return found


def append_row(path: Path, row: Row) -> None:
    """Append a row to a CSV file as experiment does, with the header where the file is new."""
    make_folder(path.parent)
    mend(path, quoted=True)
    append_files(path.parent, {path.name: encoded(path, [row])})
