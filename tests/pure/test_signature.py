"""The entries that a header names against those of the file; parameter lists are test_kernel_header.py's."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fault import UsageFault
from harness.kernel.kernel import Kernel
from harness.kernel.new import new as new_kernel
from harness.kernel.signature import check_parameters


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
