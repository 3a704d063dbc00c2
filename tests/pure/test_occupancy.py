"""Blocks and warps of a multiprocessor: NVIDIA's own calculator over many sizes, and warps that an H200 has counted."""

from __future__ import annotations

import csv
import random
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from harness.backends.nvrtc import SHARED_LIMIT
from harness.backends.occupancy import resident

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = next(iter(sorted(Path("/usr/local").glob("cuda*/include/cuda_occupancy.h"))), None)
#: Reads `major minor threads-of-SM shared-of-SM reserved optin, threads registers shared` a line, prints the blocks.
PROGRAM = """\
#include <limits.h>
#include <stdio.h>
#include "cuda_occupancy.h"
int main() {
    cudaOccDeviceProp p;
    cudaOccFuncAttributes a;
    cudaOccDeviceState s;
    p.maxThreadsPerBlock = 1024, p.regsPerBlock = p.regsPerMultiprocessor = 65536, p.warpSize = 32, p.sharedMemPerBlock = 49152, p.numSms = 1;
    a.maxThreadsPerBlock = INT_MAX, a.numBlockBarriers = 1, a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    int threads, dynamic;
    while (scanf("%d %d %d %zu %zu %zu %d %d %d", &p.computeMajor, &p.computeMinor, &p.maxThreadsPerMultiprocessor,
                 &p.sharedMemPerMultiprocessor, &p.reservedSharedMemPerBlock, &p.sharedMemPerBlockOptin, &threads, &a.numRegs, &dynamic) == 9) {
        a.maxDynamicSharedSizeBytes = dynamic;
        cudaOccResult r;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, dynamic)) return 1;
        printf("%d\\n", r.activeBlocksPerMultiprocessor);
    }
}
"""


@pytest.mark.skipif(not (HEADER and shutil.which("g++")), reason="needs cuda_occupancy.h of a CUDA toolkit, and g++")
def test_nvidias_calculator_says_the_same(tmp_path: Path) -> None:
    """Of every architecture of ours, at 2000 random sizes and the limits."""
    assert HEADER
    (tmp_path / "blocks.cpp").write_text(PROGRAM)
    subprocess.run(["g++", "-w", f"-I{HEADER.parent}", "blocks.cpp", "-o", "blocks"], cwd=tmp_path, check=True)
    draw = random.Random(1)
    sizes = [
        (32 * draw.randint(1, 32) - draw.choice((0, 5)), draw.randint(16, 255), draw.choice((0, draw.randint(0, 232448))))
        for _ in range(250)
    ]
    asked, lines = [], []
    for (arch, optin), (threads, registers, shared) in product(SHARED_LIMIT.items(), [*sizes, (1024, 64, 0), (1024, 65, 0), (32, 16, 1)]):
        major, minor = divmod(int(arch[3:].rstrip("a")), 10)
        reserved, most = (0 if major < 8 else 1024), {75: 1024, 89: 1536, 120: 1536}.get(10 * major + minor, 2048)
        if shared <= optin:
            asked.append((arch, threads, registers, shared))
            lines.append(f"{major} {minor} {most} {optin + reserved} {reserved} {optin} {threads} {registers} {shared}")
    done = subprocess.run([tmp_path / "blocks"], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert len(asked) > 1000 and [resident(*each).blocks for each in asked] == list(map(int, done.stdout.split()))


def test_warps_that_a_gpu_has_counted() -> None:
    """By hand, without shared memory: an H200 never has more warps active, and has nearly as many where the grid is large."""
    blocks = {"naive": 128, "tiled": 128}
    with (ROOT / "experiments/counters/counters.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kernel"] in blocks and row["entry"] == "softmax" or row["entry"] == "row_delta"]
    assert len(rows) >= 3
    for row in rows:
        share = 100 * resident("sm_90", 128, round(float(row["registers"])), 0).warps / 64
        assert 0.6 * share <= float(row["occupancy_pct"]) <= share, row


def test_the_scarce_resource_is_named() -> None:
    """One more register, byte or thread than fits."""
    assert resident("sm_90", 128, 128, 0) == (4, 16, "registers")
    assert resident("sm_90", 128, 129, 0) == (3, 12, "registers")
    assert resident("sm_90", 128, 32, 113 << 10) == (2, 8, "shared")
    assert resident("sm_90", 128, 32, (113 << 10) + 1) == (1, 4, "shared")
    assert resident("sm_90", 384, 168, 196784) == (1, 12, "registers, shared")
    assert resident("sm_90", 1024, 32, 0) == (2, 64, "registers, threads")
    assert resident("sm_90", 1024, 16, 0) == (2, 64, "threads")
    assert resident("sm_90", 32, 16, 0) == (32, 32, "blocks")
    assert resident("sm_75", 32, 16, 0) == (16, 16, "blocks")
    assert resident("sm_90", 1024, 65, 0) == (0, 0, "registers")
