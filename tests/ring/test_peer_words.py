"""The words of the driver's memory operations, which Python lays out: as cuda.h does. What the driver does with them, a GPU must show."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest

from harness.backends import mapped
from harness.backends.host.build import compiler


def test_the_words_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuda.h has them: 48 bytes each, its fields 8 bytes apart; the driver's errors are RuntimeErrors."""
    got: list[Any] = []

    def batch(stream: Any, count: Any, words: Any, flags: Any) -> int:
        got.append((stream.value, count.value, list(words), flags.value))
        return int(stream.value == 9)

    monkeypatch.setattr(
        mapped.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuMemGetAddressRange_v2=None, cuStreamBatchMemOp_v2=batch)
    )
    two = mapped.Driver().prepared([(2, 1 << 40, 5, 0), (1, 4096, 6, 1)])
    two(7)
    assert got == [(7, 2, [2, 1 << 40, 5, 0, 0, 0, 1, 4096, 6, 1, 0, 0], 0)]
    with pytest.raises(RuntimeError, match="batch: error 1"):
        two(9)


def test_the_words_are_those_of_cuda_h(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A C++ compiler that reads cuda.h lays the same operations out in the same bytes, calls the same functions, and no flag of a write
    is used that version 2 of the calls does not take."""
    header = next((path / "cuda.h" for path in _include_folders() if (path / "cuda.h").exists()), None)
    if header is None:
        pytest.skip("cuda.h is not here: pip install nvidia-cuda-runtime")
    wait, write = (mapped.WAIT, 1 << 40 | 64, mapped.SET, mapped.EQUAL | mapped.FLUSH), (mapped.WRITE, 1 << 40 | 64, 0, mapped.NO_FLAG)
    (tmp_path / "words.cpp").write_text(_WORDS)
    subprocess.run([*compiler(), "-I", header.parent, tmp_path / "words.cpp", "-o", tmp_path / "words"], check=True)
    said = subprocess.run([tmp_path / "words"], check=True, capture_output=True, text=True).stdout.split()
    got: list[Any] = []

    def batch(stream: Any, count: Any, words: Any, flags: Any) -> int:
        got.append(bytes(words).hex())
        return 0

    monkeypatch.setattr(
        mapped.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuMemGetAddressRange_v2=None, cuStreamBatchMemOp_v2=batch)
    )
    mapped.Driver().prepared([wait, write])(7)
    assert said == ["cuStreamBatchMemOp_v2", "cuMemGetAddressRange_v2", got[0]]
    flags = re.findall(r"(CU_STREAM_WRITE_VALUE_\w+)\s*=\s*(\w+),?\s*/\*\*<(.*?)\*/", header.read_text(), re.S)
    taken = {int(value, 0) for _, value, about in flags if "not supported in the v2 API" not in about}
    assert len(flags) == 2 and mapped.NO_FLAG in taken and 1 not in taken


#: A wait and a write as cuda.h has them, in bytes; what does not matter (padding, alias) is 0. Names of functions are macros there.
_WORDS = """
#include <cuda.h>
#include <cstdio>
#include <cstring>
#define NAME(x) #x
#define SAID(x) NAME(x)
int main() {
    CUstreamBatchMemOpParams both[2];
    std::memset(both, 0, sizeof both);
    both[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    both[0].waitValue.address = (1ull << 40) | 64;
    both[0].waitValue.value = 0x01010101;
    both[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ | CU_STREAM_WAIT_VALUE_FLUSH;
    both[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    both[1].writeValue.address = (1ull << 40) | 64;
    both[1].writeValue.value = 0;
    both[1].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    std::puts(SAID(cuStreamBatchMemOp) " " SAID(cuMemGetAddressRange));
    for (unsigned i = 0; i < sizeof both; i++) std::printf("%02x", reinterpret_cast<unsigned char*>(both)[i]);
}
"""


def _include_folders() -> list[Path]:
    """Where NVIDIA's wheels and a toolkit have their headers."""
    folders = [Path(each) for each in __import__("nvidia").__path__] if importlib.util.find_spec("nvidia") else []
    return [*(path for each in folders for path in each.glob("*/include")), Path("/usr/local/cuda/include")]
