"""Faults planted around asynchronous copies and tensor-core words, and what the CPU engine says of each.

The kernel is not one of the tree but their pipeline alone, so that what is caught is the fault and not its numbers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from test_mma_words import BEFORE
from word_kernel import f32, run

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.fault import KernelFault
from harness.verbs.selftest.mutant import edited

ROOT = Path(__file__).resolve().parent.parent.parent

#: Tiles of 256 floats through two buffers, the next on its way while the last is summed.
PIPELINE = """\
    float* tile = fa::dynamic_shared<float>();
    const uint32_t to = fa::smem_u32(tile);
    float sum = 0;
    auto fetch = [&](int n) {
        if (n < 4) fa::cp_async_16(to + n % 2 * 1024 + 16 * t, a + 256 * n + 4 * t);
        fa::cp_async_commit_group();
    };
    fetch(0);
    for (int n = 0; n < 4; ++n) {
        fetch(n + 1);
        fa::cp_async_wait_group<1>();
        __syncthreads();  // the tile is there for all
        for (int i = 0; i < 4; ++i) sum += tile[n % 2 * 256 + (t + 1) % 64 + 64 * i];
        __syncthreads();  // nobody reads it any more
    }
    out[t] = __float_as_uint(sum);"""
NUMBERS = np.arange(1024, dtype=np.float32)
SUMS = np.roll(NUMBERS.reshape(16, 64).sum(0), -1)


def pipeline(backend: Backend, folder: Path, old: str = "", new: str = "") -> Any:
    """The sums of PIPELINE with one edit."""
    body = edited(PIPELINE, (old, new)) if old else PIPELINE
    return f32(run(backend, folder, body, NUMBERS, block=64, shared=2048, before=BEFORE), 64)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("check", [None, "race"])
def test_a_right_pipeline_passes(seed: int, check: str | None, tmp_path: Path) -> None:
    """Whenever the copies arrive, and in silence."""
    assert np.array_equal(pipeline(Host(seed, check), tmp_path), SUMS)


MISSING = {
    "a wait that lets one more group fly": ("wait_group<1>", "wait_group<2>"),
    "no wait": ("fa::cp_async_wait_group<1>();", ""),
    "no commit": ("    fa::cp_async_commit_group();", ""),
    "no barrier behind the wait": ("__syncthreads();  // the tile", "// the tile"),
    "no barrier before the next copy": ("__syncthreads();  // nobody", "// nobody"),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MISSING)
def test_reading_a_copy_in_flight_shows(name: str, seed: int, tmp_path: Path) -> None:
    """As NaN, or as a copy onto which another is begun; copies that arrived as soon as they began would hide most of these."""
    try:
        assert np.isnan(pipeline(Host(seed), tmp_path, *MISSING[name])).any()
    except KernelFault as fault:
        assert "in flight" in fault.why and "word_forward.cu:" in fault.why, fault.why


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MISSING)
def test_reading_a_copy_in_flight_is_a_race_with_both_lines(name: str, seed: int, tmp_path: Path) -> None:
    """The reader's line and that of the copy."""
    with pytest.raises(CheckFault) as caught:
        pipeline(Host(seed, "race"), tmp_path, *MISSING[name])
    path = tmp_path / "word_forward.cu"
    reads = planted.line_of(path, "sum += tile")
    assert f"reads at {path}:{reads}" in caught.value.why, caught.value.why
    assert f"at {path}:{planted.line_of(path, 'fa::cp_async_16(')}" in caught.value.why, caught.value.why  # in the lambda, not its call
    barrier = "no barrier behind" in name
    assert barrier or "copy in flight" in caught.value.why or "starts to copy" in caught.value.why


#: an edit of PIPELINE, and the words of its fault
BAD_ADDRESSES = {
    "destination not aligned": ("16 * t, a", "16 * t + 8, a", "not aligned in block (0, 0, 0): thread 0 in cp_async_16 at"),
    "destination outside": ("n % 2 * 1024", "n % 2 * 1040", "outside shared memory in block (0, 0, 0): thread 63 in cp_async_16 at"),
    "source not aligned": ("+ 4 * t);", "+ 4 * t + 1);", "cp_async from an address that is not 16-byte aligned"),
    "source outside": ("a + 256 * n", "a + 256 * n + (t == 5 ? 1 << 20 : 0)", "illegal memory access in block (0, 0, 0): thread 5"),
    "ldmatrix not aligned": ("sum = 0;", "sum = 0; uint32_t d[4]; fa::ldmatrix_x4(d, to + 8 * t);", "thread 1 in ldmatrix_x4 at"),
    "ldmatrix outside": (
        "sum = 0;",
        "sum = 0; uint32_t d[4]; fa::ldmatrix_x4_trans(d, to + 1792 + 16 * t);",
        "16 bytes from byte 2048 of 2048",
    ),
    "ldmatrix by a pointer's bits": ("sum = 0;", "sum = 0; uint32_t d[4]; fa::ldmatrix_x4(d, 16 * t);", "outside shared memory"),
    "a static array": (
        "sum = 0;",
        "sum = 0; __shared__ float fixed[4]; sum = fa::smem_u32(fixed);",
        "not in the block's dynamic shared memory",
    ),
    "wmma not aligned": ("sum = 0;", "sum = 0; fa::WmmaAccumulator c; fa::wmma_load_c_row(c, tile + 4, 16);", "a multiple of 32"),
    "wmma beyond the end": (
        "sum = 0;",
        "sum = 0; fa::WmmaAccumulator c{}; fa::wmma_store_d_row(tile + 256, c, 20);",
        "outside shared memory",
    ),
    "wmma's stride": ("sum = 0;", "sum = 0; fa::WmmaAccumulator c; fa::wmma_load_c_row(c, tile, 18);", "stride"),
    "wmma of two tiles": (
        "sum = 0;",
        "sum = 0; fa::WmmaAccumulator c; fa::wmma_load_c_row(c, tile + t % 2 * 8, 16);",
        "different addresses",
    ),
    "red_add not aligned": ("sum = 0;", "sum = 0; fa::red_add_v4_f32(reinterpret_cast<float*>(out) + 1, 1, 1, 1, 1);", "16-byte aligned"),
    "red_add to shared memory": ("sum = 0;", "sum = 0; fa::red_add_v4_f32(tile, 1, 1, 1, 1);", "global memory only"),
}


@pytest.mark.parametrize("name", BAD_ADDRESSES)
def test_a_bad_address_is_told_in_words(name: str, tmp_path: Path) -> None:
    """Which thread, in which word, where."""
    old, new, words = BAD_ADDRESSES[name]
    with pytest.raises(KernelFault) as caught:
        pipeline(Host(), tmp_path, old, new)
    assert words in caught.value.why, caught.value.why
    assert name == "source outside" or "word_forward.cu:" in caught.value.why


def test_a_source_that_changes_in_flight_is_told(tmp_path: Path) -> None:
    """What arrives would depend on when. The source lies in O: inputs are read-only while a kernel runs."""
    body = edited(
        PIPELINE, ("a + 256 * n", "from + 256 * n"), ("fa::cp_async_wait_group<1>();", "from[4 * t] += 1.0f; fa::cp_async_wait_group<1>();")
    )
    start = "    float* from = reinterpret_cast<float*>(out) + 1024;\n"
    start += "    for (int i = t; i < 1024; i += 64) from[i] = a[i];\n    __syncthreads();\n"
    with pytest.raises(KernelFault, match="written while a copy from it was in flight"):
        run(Host(), tmp_path, start + body, NUMBERS, block=64, shared=2048, before=BEFORE)


@pytest.mark.parametrize("check", [None, "race"])
def test_writing_where_a_copy_that_nobody_waits_for_may_still_arrive(check: str | None, tmp_path: Path) -> None:
    """As a block does that has no keys and skips the loop that would have waited for Q, whose place is O's afterwards."""
    body = PIPELINE.partition("    for (int n")[0] + "    tile[4 * t] = 1.0f;  // write\n    out[t] = 0;"
    with pytest.raises(KernelFault) as caught:
        run(Host(check=check), tmp_path, body, NUMBERS, block=64, shared=2048, before=BEFORE)
    path = tmp_path / "word_forward.cu"
    words = f"writes at {path}:{planted.line_of(path, '// write')}" if check else "shared memory was written, or another copy to it begun"
    assert words in caught.value.why, caught.value.why


def test_asan_names_the_kernels_line_of_a_copy_from_outside(tmp_path: Path) -> None:
    """The word reads the source in the kernel's own code, not where the copy arrives."""
    start = "    fa::cp_async_16(fa::smem_u32(fa::dynamic_shared()), static_cast<float*>(args.Q.data) + args.seq_q * 64);\n"
    body = planted.GOOD.replace("#include", "#include <fa/async.cuh>\n#include").replace("    static_cast", start + "    static_cast")
    chosen = planted.kernel(tmp_path, body, shared=16)
    command = [sys.executable, ROOT / "cli.py", "run", "--compute", "./planted_forward.cu", "--batch", "1", "--heads", "1", "--seq", "16"]
    run_it = [*command, "--device", "cpu", "--check", "asan"]
    done = subprocess.run(run_it, cwd=tmp_path, capture_output=True, text=True, check=False)
    line = planted.line_of(chosen.path, "cp_async_16")
    assert done.returncode == 1 and "out of bounds: READ of size 16 at" in done.stderr, done.stderr
    assert f"planted_forward.cu:{line}" in done.stderr.partition("\n")[0], done.stderr


def test_words_of_a_whole_warp_refuse_a_smaller_one(tmp_path: Path) -> None:
    """A last warp of 8 threads."""
    body = "float d[4] = {}; const uint32_t a_reg[4] = {}; fa::mma_m16n8k16_f16(d, a_reg, 0, 0); out[t] = 0;"
    with pytest.raises(KernelFault, match="fewer than 32 threads"):
        run(Host(), tmp_path, body, block=40, before=BEFORE)


@pytest.mark.parametrize("word", ["ldmatrix_x4", "ldmatrix_x4_trans", "wmma_load_c_row", "wmma_store_d_row"])
def test_tensor_core_words_are_seen_by_the_race_check(word: str, tmp_path: Path) -> None:
    """Against plain accesses by other lanes without a __syncwarp, with the kernel's line; and silent with one."""
    call = f"fa::WmmaAccumulator c{{}}; fa::{word}({'c, tile' if 'load' in word else 'tile, c'}, 16);"
    if word.startswith("ldmatrix"):
        call = f"uint32_t d[4]; fa::{word}(d, fa::smem_u32(tile) + 16 * t);"
    fill = "for (int i = t; i < 256; i += 32) tile[i ^ 1] = i;  // plain"
    body = f"float* tile = fa::dynamic_shared<float>();\n{fill}\nSYNC\n{call}\nout[t] = 0;"
    run(Host(check="race"), tmp_path, body.replace("SYNC", "__syncwarp();"), shared=1024, before=BEFORE)
    with pytest.raises(CheckFault) as caught:
        run(Host(check="race"), tmp_path, body.replace("SYNC", ""), shared=1024, before=BEFORE)
    path = tmp_path / "word_forward.cu"
    verb = "writes" if "store" in word else "reads"
    assert f"writes at {path}:{planted.line_of(path, 'plain')}" in caught.value.why, caught.value.why
    assert f"{verb} at {path}:{planted.line_of(path, f'fa::{word}(')}" in caught.value.why, caught.value.why
