"""The entries that a header names against those of the file; parameter lists are test_kernel_header.py's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.fault import UsageFault
from harness.kernel import Kernel
from harness.kernel.new import new as new_kernel
from harness.kernel.signature import check_parameters
from harness.verbs import compile as compiling


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "no __global__ fwd in the file; it has forward"),
        ("\n__global__ void __launch_bounds__(128) second(int a) {}\n", "no __global__ fwd in the file; it has forward, second"),
        ("\n#define fwd forward\n", ""),
        ("\n#define KERNEL(name) __global__ void name(int a) {}\nKERNEL(fwd)\n", ""),
    ],
    ids=["another name", "two", "a macro of that name", "a macro that writes it"],
)
def test_an_entry_that_is_not_there(source: str, told: str, tmp_path: Path) -> None:
    """At the line of the header, before a compiler is asked; what a macro may write is left to that."""
    path = new_kernel("mine", folder=tmp_path, plain=True)
    path.write_text(path.read_text().replace('entry = "forward"', 'entry = "fwd"') + source)
    if not told:
        return check_parameters(Kernel.read(path))
    with pytest.raises(UsageFault) as caught:
        check_parameters(Kernel.read(path))
    assert caught.value.what == f"{path}:12: {told}" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("dtypes", "type_", "told"),
    [
        ('["float32"]', "double", "the parameter scale is a double; a launch on float32 passes a float"),
        ('["float32"]', "const double", "the parameter scale is a double; a launch on float32 passes a float"),
        ('["float64"]', "float", "the parameter scale is a float; a launch on float64 passes a double"),
        ('["float32", "float64"]', "double", "the parameter scale is a double; a launch on float32 passes a float"),
        ('["float32"]', "float", ""),
        ('["float64"]', "const double", ""),
        ('["float32", "float64"]', "real", ""),
    ],
)
def test_a_scale_of_another_width(dtypes: str, type_: str, told: str, tmp_path: Path) -> None:
    """A launch passes 8 bytes of a scale on float64 and else 4; a type of the file's own is left to the compiler."""
    path = new_kernel("mine", folder=tmp_path, plain=True)
    text = path.read_text().replace('dtypes = ["float32"]', f"dtypes = {dtypes}").replace(", float scale)", f", {type_} scale)")
    assert f", {type_} scale)" in text
    path.write_text(text)
    if not told:
        return check_parameters(Kernel.read(path))
    with pytest.raises(UsageFault, match=told):
        check_parameters(Kernel.read(path))


@pytest.mark.skipif(find_spec("nvidia") is None or find_spec("nvidia.cu13") is None, reason="no NVRTC: pip install '.[cuda13]'")
def test_compile_refuses_what_run_does(tmp_path: Path) -> None:
    """A list of args one short compiles: no launch would pass the last parameter."""
    path = new_kernel("mine", folder=tmp_path, plain=True)
    path.write_text(path.read_text().replace('"seq_q", "seq_kv"', '"seq_q"'))
    (row,) = compiling.compile_kernels([Kernel.read(path)], arch="sm_90")
    assert row.status == compiling.ERROR and "forward has 12 parameters; args passes 11 (" in row.message
