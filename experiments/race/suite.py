"""Which races of the Indigo suite `--check race` finds: recall, false alarms, time.

    git clone https://github.com/JohnJacobsonIII/HiRace-Artifact-SC24 CLONE
    python experiments/race/suite.py CLONE > experiments/race/indigo.csv

The clone has the kernels (Indigo 1.3, Liu et al., ISPASS 2022) that HiRace (Jacobson et al., SC 2024) is measured on, and its graphs. The
name of a file says what is wrong in it: atomicBug, guardBug, syncBug and raceBug are races. As HiRace's own table does, this leaves out the
files with a boundsBug, whose reads outside of the graph are other faults. Each kernel runs on the first graph of 200 nodes, 256 blocks of
256 threads (HiRace: 1024), and on nothing else of the suite: no run of it tells the check where to look. On standard output a row for each
folder of the suite; on standard error what was missed and what was reported without a race.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.kernel import Kernel
from harness.problem import Problem

PROBLEM = Problem.of(1, 1, 64, 64)
HALF = 2048  # words of O: data1, then data2
GRAPH = "power_law_200n_1000e.egr"
TOGETHER = 16  # kernels of a compile: the check sees 128 KB of static shared memory in one
RACES = ("atomicBug", "guardBug", "syncBug", "raceBug")
#: Names of CUDA that the CPU engine does not have, of those that it has.
PRELUDE = """\
#include <fa/warp.cuh>
template <class Change> __device__ int changed(int* at, Change change) {
    for (int old = atomicAdd(at, 0);;) {
        const int seen = atomicCAS(at, old, change(old));
        if (seen == old) return old;
        old = seen;
    }
}
__device__ int atomicMin(int* at, int value) { return changed(at, [=](int old) { return min(old, value); }); }
__device__ int atomicOr(int* at, int value) { return changed(at, [=](int old) { return old | value; }); }
__device__ int __syncthreads_count(int holds) {
    __shared__ int count;
    __syncthreads();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (holds) atomicAdd(&count, 1);
    __syncthreads();
    const int all = count;
    __syncthreads();
    return all;
}
__device__ int __syncthreads_or(int holds) { return __syncthreads_count(holds) > 0; }
typedef int data_t;
extern "C" __global__ void prepare(const __grid_constant__ fa::Args args) {
    for (int i = threadIdx.x; i < 4096; i += 256) static_cast<int*>(args.O.data)[i] = static_cast<const int*>(args.V.data)[i];
}
"""
HEADER = """\
// /// kernel
// title = "a folder of the suite"
// dtypes = ["float32"]
// head_dims = [64]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = false
"""
LAUNCH = """\
// [[launch]]
// entry = "{name}"
// grid = {grid}
// block = 256
"""
ENTRY = """\
extern "C" __global__ void {name}(const __grid_constant__ fa::Args args) {{
    int* data = static_cast<int*>(args.O.data);
    int *nindex = static_cast<int*>(args.Q.data), *nlist = static_cast<int*>(args.K.data);
    of_{name}::test_kernel(nindex, nlist, data, data + {half}, {nodes});
}}
"""


class Told(NamedTuple):
    """What the check says of a kernel: "race", another fault in words, or nothing."""

    name: str
    racy: bool
    said: str
    seconds: float


def inputs(clone: Path) -> tuple[int, dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    """The nodes of the graph; its index and lists, and the first values of both data arrays (any), as bits of the tensors."""
    raw = np.fromfile(clone / "indigo/input" / GRAPH, np.int32)
    nodes, edges = int(raw[0]), int(raw[1])
    draw = np.random.RandomState(0)
    data = np.concatenate([draw.randint(0, most, HALF) for most in (nodes, edges)])
    data[[0, HALF]] = 0
    words = {"Q": raw[2 : 3 + nodes], "K": raw[3 + nodes : 3 + nodes + edges], "V": data}
    padded = {name: np.zeros(4096, np.int32) for name in words}
    for name, values in words.items():
        padded[name][: values.size] = values
    return nodes, {name: values.view(np.float32).reshape(1, 1, 64, 64) for name, values in padded.items()}


def text_of(file: Path) -> str:
    """The kernel of a file and its helpers, as device functions of a namespace."""
    text = file.read_text(encoding="utf-8")
    code = text[text.index("typedef int data_t;") : text.index("void serial_code(")]
    code = re.sub(r"^(typedef|#include).*", "", code, flags=re.M).replace("__global__", "__device__")
    return f"namespace of_{file.stem} {{\n{code}}}\n"


def told_of(files: list[Path], clone: Path, backend: Host) -> list[Told]:
    """What the check says of some kernels, which are compiled as one file."""
    nodes, given = inputs(clone)
    names = ["prepare", *(file.stem for file in files)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suite_forward.cu"
        launches = "".join(LAUNCH.format(name=name, grid=1 if name == "prepare" else 256) for name in names)
        kernels = [text_of(file) + ENTRY.format(name=file.stem, half=HALF, nodes=nodes) for file in files]
        path.write_text(HEADER + launches + "// ///\n" + PRELUDE + "".join(kernels), encoding="utf-8")
        bound = Bound(backend, backend.load(Kernel.read(path), PROBLEM), PROBLEM, given)
        first, *steps = bound.steps
        told = []
        for file, step in zip(files, steps, strict=True):
            bound.steps = [first, step]
            start, said = time.perf_counter(), ""
            try:
                bound.launch()
            except CheckFault:
                said = "race"
            except KernelFault as fault:
                said = str(fault)
            told.append(Told(file.stem, any(race in file.stem for race in RACES), said, time.perf_counter() - start))
        return told


def main(clone: Path) -> None:
    backend, out = Host(check="race"), csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["folder", "kernels", "racy", "found", "missed", "false_alarms", "other_faults", "seconds"])
    total = np.zeros(7)
    for folder in sorted((clone / "indigo/indigo_sources").iterdir()):
        files = sorted(file for file in folder.glob("*.cu") if "boundsBug" not in file.stem)
        several = [files[i : i + TOGETHER] for i in range(0, len(files), TOGETHER)]
        told = [each for some in several for each in told_of(some, clone, backend)]
        racy = [each for each in told if each.racy]
        counts = [len(told), len(racy), sum(each.said == "race" for each in racy), sum(not each.said for each in racy)]
        counts += [sum(each.said == "race" for each in told if not each.racy), sum(each.said not in ("", "race") for each in told)]
        seconds = sum(each.seconds for each in told)
        total += [*counts, seconds]
        out.writerow([folder.name, *counts, f"{seconds:.1f}"])
        sys.stdout.flush()
        for each in told:
            if (each.said == "race") != each.racy:
                print(f"{each.name}: {'missed' if each.racy else 'reported without a race'} {each.said}", file=sys.stderr)
    out.writerow(["all", *(int(count) for count in total[:-1]), f"{total[-1]:.1f}"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
