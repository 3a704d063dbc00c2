"""results.csv: the columns of the contract, and every value back as it went in."""

from __future__ import annotations

import csv
import errno
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rows import append_row, plain

from harness import row
from harness.fault import DataFault, DiskFault, Dropped
from harness.row import Row, columns, read_rows

#: Typed out here on purpose: the contract, which users' scripts rely on.
CONTRACT = (
    "Test,Kernel,Type,Batch,Heads,SeqLen,HeadDim,Status,MaxError,MeanError,MSE,MaxRelError,KernelTime_ms,TorchTime_ms,Speedup,TFLOPS,"
    "Bandwidth_GBps,ErrorMessage,heads_kv,seq_kv,dtype,causal,scale,seed,device,device_name,timing,n_samples,p20_ms,p80_ms,call_ms,"
    "peak_bytes,registers,spill_bytes,shared_bytes,deterministic,pct_of_peak,torch_backend,source_hash,run_id,repro,"
    "MaxError_O,MaxError_logsumexp,MaxError_dQ,MaxError_dK,MaxError_dV,arithmetic,recipe,energy_mj,power_w,sm_clock_mhz,mask,score,"
    "sinks,MaxError_dsinks,stack_bytes,head_dim_v,page_size,lengths,dtype_kv"
)


def test_header_is_the_contract(tmp_path: Path) -> None:
    """Seed 002's columns first, under their names, then ours, in the contract's order."""
    assert ",".join(columns()) == CONTRACT
    append_row(tmp_path / "results.csv", plain())
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[0] == CONTRACT
    assert lines[1].startswith(",fa2,FOR,2,8,512,64,PASS,,,,,,") and ",float32,false,0.125," in lines[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"MaxError": 1 / 3, "MSE": 5e-324, "KernelTime_ms": 0.1 + 0.2, "scale": 111**-0.5, "MaxError_dV": 1e-7},
        {"MaxError": math.inf, "causal": True, "deterministic": False, "seed": 0, "spill_bytes": 0},
        {"ErrorMessage": 'a "quoted", text\nof two lines; and ünïcode', "Test": "Stress-1"},
        {"Test": "=1+1", "Kernel": "@a", "ErrorMessage": "-x", "repro": "+y", "run_id": "'quoted", "torch_backend": "\tt"},
    ],
)
def test_values_come_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Floats to the last bit, booleans, empty as None, any text."""
    path = tmp_path / "new" / "results.csv"
    rows = [plain(**changes), plain(), plain(**changes)]
    for each in rows:
        append_row(path, each)
    assert read_rows(path) == rows


def test_formulas_are_quoted(tmp_path: Path) -> None:
    """No cell of user text starts with what a spreadsheet runs; negative numbers stay numbers."""
    append_row(tmp_path / "r.csv", plain(Test="=HYPERLINK(1)", ErrorMessage="@x", scale=-0.5))
    with open(tmp_path / "r.csv", newline="") as file:
        cells = next(csv.DictReader(file))
    assert (cells["Test"], cells["ErrorMessage"], cells["scale"]) == ("'=HYPERLINK(1)", "'@x", "-0.5")


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    """A numpy float prints as a float, not as np.float64(...)."""
    import numpy as np

    append_row(tmp_path / "r.csv", plain(MaxError=np.float64(0.1)))
    assert read_rows(tmp_path / "r.csv")[0].MaxError == 0.1


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("Kernel", "Kernels", "first line is not the header"),
        (",false,", ",False,", "causal|False"),
        (",512,64,", ",many,64,", "many"),
        (",PASS,", ",", "Status is empty"),
        (",fa2,", ",,", "Kernel is empty"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, old: str, new: str, word: str) -> None:
    """Exit 3, naming the line."""
    path = tmp_path / "r.csv"
    append_row(path, plain())
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataFault) as caught:
        read_rows(path)
    assert any(part in str(caught.value) for part in word.split("|")), str(caught.value)
    with pytest.raises(DataFault, match="is missing"):
        read_rows(tmp_path / "none.csv")


def test_a_file_from_before_a_column_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A committed run outlives a new column, which is None there; nothing is appended to it. Fewer columns than the first ones: refused."""

    @dataclass(frozen=True, kw_only=True)
    class Longer(Row):
        later: int | None = None

    path, longer = tmp_path / "old.csv", tmp_path / "new.csv"
    append_row(path, plain(MaxError_dV=0.5))
    with monkeypatch.context() as patch:
        patch.setattr("harness.row.Row", Longer)
        patch.setitem(row._TYPES, "later", (int, type(None)))
        (old,) = read_rows(path)
        assert isinstance(old, Longer) and old.later is None and old.MaxError_dV == 0.5
        with pytest.raises(DataFault, match="not a results file"):
            append_row(path, old)
        append_row(longer, Longer(**vars(old) | {"later": 7}))
        assert [r.later for r in read_rows(longer)] == [7]  # type: ignore[attr-defined]
    with pytest.raises(DataFault, match="not a results file"):
        read_rows(longer)  # of a later version
    path.write_text("".join(line.rsplit(",", 15)[0] + "\n" for line in path.read_text().splitlines()))
    with pytest.raises(DataFault, match="first line is not the header"):
        read_rows(path)


def test_rows_of_pages(tmp_path: Path) -> None:
    """seq_kv is the longest, lengths are all where they differ; what is no list of them is no row."""
    path = tmp_path / "results.csv"
    append_row(path, plain(Batch=2, seq_kv=700, page_size=16, lengths="700,33"))
    append_row(path, plain(Batch=2, seq_kv=700, page_size=16))
    assert [row.problem_of(each).lengths for each in read_rows(path)] == [(700, 33), (700, 700)]
    append_row(path, plain(Batch=2, seq_kv=700, page_size=16, lengths="700,x"))
    with pytest.raises(DataFault, match="not a row of results"):
        read_rows(path)


def test_a_row_from_before_a_head_dim_of_v_has_that_of_k(tmp_path: Path) -> None:
    """A file without the column reads as one whose V is as wide as K; one with it gives it back."""
    path = tmp_path / "results.csv"
    append_row(path, plain(HeadDim=192, head_dim_v=128))
    assert [each.head_dim_v for each in read_rows(path)] == [128]
    path.write_text("".join(line.rsplit(",", 4)[0] + "\n" for line in path.read_text().splitlines()))
    assert [each.head_dim_v for each in read_rows(path)] == [192]


def test_append_to_another_file(tmp_path: Path) -> None:
    """A file with another header is left alone; what an interrupted write left is dropped, and that is said."""
    path = tmp_path / "r.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataFault, match="not a results file"):
        append_row(path, plain())
    assert path.read_text() == "a,b\n1,2\n"
    path.unlink()
    append_row(path, plain())
    with open(path, "a") as file:
        file.write("half a ro")
    with pytest.warns(Dropped, match="9 bytes that are no whole line"):
        append_row(path, plain())
    assert read_rows(path) == [plain(), plain()]


@pytest.mark.parametrize("tear", [b"half,a ro", b'x,"a quoted\n', b"\0" * 4096, b"fa2,\0\0\0\n", "ünïcode".encode()[:-1]], ids=range(5))
def test_whole_rows_of_a_torn_file_are_read(tmp_path: Path, tear: bytes) -> None:
    """Mid-row, in a quoted line break, filled with zeros, in a character: the rows before it are read, and the rest is said."""
    path = tmp_path / "r.csv"
    row = plain(ErrorMessage='of "two"\nlines')
    append_row(path, row)
    whole = path.read_bytes()
    path.write_bytes(whole + tear)
    with pytest.warns(Dropped, match=f"{len(tear)} bytes"):
        assert read_rows(path) == [row]
    with pytest.warns(Dropped):
        append_row(path, plain())
    assert read_rows(path) == [row, plain()] and path.read_bytes().startswith(whole)


def test_a_file_torn_in_its_header_has_no_rows(tmp_path: Path) -> None:
    """And an empty one: the next row writes the header."""
    path = tmp_path / "r.csv"
    for left in (b"", CONTRACT.encode()[:50]):
        path.write_bytes(left)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Dropped)
            assert read_rows(path) == []
            append_row(path, plain())
        assert read_rows(path) == [plain()]


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.csv")
    for call in (lambda: read_rows(tmp_path / "r.csv"), lambda: append_row(tmp_path / "r.csv", plain())):
        with pytest.raises(DataFault, match="not a regular file"):
            call()


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not fit is not half there: exit 6, the file as it was."""
    path = tmp_path / "r.csv"
    append_row(path, plain())
    before, write = path.read_bytes(), os.write

    def full(descriptor: int, content: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):  # not the staged copy: in the midst of the append
            if len(content) < 50:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, content[: len(content) - 20])
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DiskFault, match="no room"):
            append_row(path, plain())
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault, match="cannot write"):
        append_row(tmp_path / "file" / "r.csv", plain())


def test_numbers_are_rounded_to_what_every_machine_has() -> None:
    """Six digits, or the place of the sixth digit of a limit; what is not finite stays."""
    assert row.rounded(4.177024830465115e-07) == row.rounded(4.177024829910003e-07) == 4.17702e-07
    assert (row.rounded(0.0), row.rounded(-123456.7), row.rounded(math.inf)) == (0.0, -123457.0, math.inf)
    assert math.isnan(row.rounded(math.nan, 1.0))
    assert row.rounded(0.9999999779484772, 1.149486e-5) == 0.9999999779
    assert repr(row.rounded(-1.5e-17, 1.1335e-5)) == "0.0"
    assert row.rounded(1.2345678, 0.0) == row.rounded(1.2345678, math.inf) == 1.23457
