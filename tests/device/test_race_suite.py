"""experiments/race: the kernels of others under the race check, and under racecheck, for which a program stands in here."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

RACE = Path(__file__).resolve().parents[2] / "experiments/race"
#: As a file of Indigo: a sum by one warp a block; with the race its barrier is left out.
INDIGO = """\
typedef int data_t;
#include "indigo_cuda.h"
__global__ void test_kernel(int* nindex, int* nlist, data_t* data1, data_t* data2, int numv) {
    __shared__ data_t carry[256];
    carry[threadIdx.x] = data2[threadIdx.x];
    BARRIER
    if (threadIdx.x == 0) atomicMin(data1, carry[255]);
}
void serial_code(int* nindex) {}
"""
SAMPLE = """\
static constexpr int NumThreads = 128;
__global__ void sumKernel(int* data_in, int* sum_out) {
    __shared__ int one;
    if (threadIdx.x == 0) one = data_in[0];
    if (threadIdx.x == 64) *sum_out = one;
}
int main(int, char* argv[]) {}
"""
#: Runs what it is given, and says of one kernel as racecheck does that it has a race.
STAND_IN = """\
#!/bin/sh
while [ "$1" != "PYTHON" ]; do shift; done
"$@" || exit 1
echo "========= Error: Race reported between Write access at of_NAME::test_kernel(int *)+0x10 in suite_forward.cu:9"
echo "=========     and Read access at NAME+0x20 in suite_forward.cu:12 [8 hazards]"
"""


@pytest.fixture
def suite(tmp_path: Path) -> list[str]:
    """A clone with a racy kernel and a right one, and samples with one."""
    for folder in ("indigo/input", "indigo/indigo_sources/pull", "samples/Racecheck"):
        (tmp_path / folder).mkdir(parents=True)
    graph = [200, 1000, *range(0, 1001, 5), *[0] * 1000]
    np.array(graph, np.int32).tofile(tmp_path / "indigo/input/power_law_200n_1000e.egr")
    for name, barrier in (("pull", "__syncthreads();"), ("pull_syncBug", ""), ("pull_boundsBug", "no C++")):
        (tmp_path / f"indigo/indigo_sources/pull/{name}.cu").write_text(INDIGO.replace("BARRIER", barrier))
    (tmp_path / "samples/Racecheck/block_error.cu").write_text(SAMPLE)
    return [str(tmp_path), str(tmp_path / "samples")]


def said(script: str, arguments: list[str]) -> str:
    """What a script prints on standard output."""
    environ = os.environ | {"PYTHONPATH": str(RACE.parents[1])}
    done = subprocess.run([sys.executable, RACE / script, *arguments], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_race_check(suite: list[str]) -> None:
    """Both races are found, and no other."""
    rows = {row["folder"]: row for row in csv.DictReader(said("suite.py", suite).splitlines())}
    counts = {name: [row[key] for key in ("kernels", "racy", "found", "missed", "false_alarms")] for name, row in rows.items()}
    assert counts == {"pull": ["2", "1", "1", "0", "0"], "Racecheck": ["1", "1", "1", "0", "0"], "all": ["3", "2", "2", "0", "0"]}


@pytest.mark.parametrize(("accused", "of_pull"), [("pull_syncBug", ["1", "0", "0", "0"]), ("pull", ["0", "1", "1", "0"])])
def test_racecheck(accused: str, of_pull: list[str], suite: list[str], tmp_path: Path) -> None:
    """What is found, what is missed and what is reported without a race; nothing has not run."""
    tool = tmp_path / "tool"
    tool.write_text(STAND_IN.replace("NAME", accused).replace("PYTHON", sys.executable))
    tool.chmod(0o755)
    said("racecheck.py", [*suite, "--device", "cpu", "--sanitizer", str(tool), "--processes", "2", "--output", str(tmp_path / "out")])
    with (tmp_path / "out/racecheck.csv").open() as file:
        rows = {row["folder"]: [row[key] for key in ("found", "missed", "false_alarms", "not_run")] for row in csv.DictReader(file)}
    assert rows["pull"] == of_pull and rows["Racecheck"] == ["0", "1", "0", "0"]
    assert (tmp_path / "out/racecheck_env.json").exists()


def test_racecheck_that_has_no_time(suite: list[str], tmp_path: Path) -> None:
    """What has not run is no miss."""
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nsleep 600\n")
    tool.chmod(0o755)
    said("racecheck.py", [*suite, "--device", "cpu", "--sanitizer", str(tool), "--seconds", "1", "--output", str(tmp_path)])
    assert (tmp_path / "racecheck.csv").read_text().splitlines()[-1] == "all,3,2,0,0,0,3"
