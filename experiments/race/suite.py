"""Which races of other people's kernels `--check race` finds: recall, false alarms, CPU seconds.

    git clone https://github.com/JohnJacobsonIII/HiRace-Artifact-SC24 CLONE
    git clone https://github.com/NVIDIA/compute-sanitizer-samples SAMPLES
    python experiments/race/suite.py CLONE SAMPLES > experiments/race/suite.csv

The clone has the kernels (Indigo 1.3, Liu et al., ISPASS 2022) that HiRace (Jacobson et al., SC 2024) is measured on, and its graphs. The
name of a file says what is wrong in it: atomicBug, guardBug, syncBug and raceBug are races. As HiRace's own table does, this leaves out the
files with a boundsBug, whose reads outside of the graph are other faults. Each kernel runs on the first graph of 200 nodes, 256 blocks of
256 threads (HiRace: 1024), in index order. The samples are compute-sanitizer's own two for racecheck. On standard output a row for each
folder; on standard error what was missed and what was reported without a race.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.backends import Backend
from harness.backends.host.backend import Host
from harness.backends.host.report import CheckFault
from harness.check.tensors import Bound
from harness.fault import KernelFault
from harness.kernel import Kernel
from harness.problem import Problem

Inputs = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
PROBLEM = Problem.of(1, 1, 64, 64)
HALF = 2048  # words of O: data1, then data2
GRAPH = "power_law_200n_1000e.egr"
TOGETHER = 16  # kernels of a compile: the check sees 128 KB of static shared memory in one
RACES = ("atomicBug", "guardBug", "syncBug", "raceBug")
#: Names of CUDA that the CPU engine does not have, of those that it has.
ON_CPU = """\
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
"""
PREPARE = """\
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
// block = {block}
"""
ENTRY = """\
extern "C" __global__ void {name}(const __grid_constant__ fa::Args args) {{
    int* data = static_cast<int*>(args.O.data);
    int *nindex = static_cast<int*>(args.Q.data), *nlist = static_cast<int*>(args.K.data);
    (void)nlist;
    of_{name}::{call};
}}
"""


class Source(NamedTuple):
    """A kernel of the suite: its code, without what is for the host, and how it is called."""

    name: str
    racy: bool
    code: str
    call: str
    grid: int
    block: int


class Told(NamedTuple):
    """What the check says of a kernel: "race", another fault in words, or nothing."""

    name: str
    racy: bool
    said: str
    seconds: float


def inputs(clone: Path) -> tuple[int, Inputs]:
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


def of_indigo(file: Path, nodes: int) -> Source:
    """A file of Indigo."""
    text = file.read_text(encoding="utf-8")
    code = text[text.index("typedef int data_t;") : text.index("void serial_code(")]
    code = re.sub(r"^(typedef|#include).*", "", code, flags=re.M)
    call = f"test_kernel(nindex, nlist, data, data + {HALF}, {nodes})"
    return Source(file.stem, any(race in file.stem for race in RACES), code, call, 256, 256)


def of_sample(file: Path) -> Source:
    """A file of compute-sanitizer's Racecheck samples, each of which has a race."""
    text = file.read_text(encoding="utf-8")
    code = text[text.index("static constexpr") : text.index("int main(")]
    return Source(file.stem, True, code, "sumKernel(nindex, data)", 1, 128 if "NumThreads = 128" in code else 64)


def folders_of(clone: Path, samples: Path | None, nodes: int) -> dict[str, list[Source]]:
    """The kernels by folder, racecheck's samples last."""
    folders = {
        folder.name: [of_indigo(file, nodes) for file in sorted(folder.glob("*.cu")) if "boundsBug" not in file.stem]
        for folder in sorted((clone / "indigo/indigo_sources").iterdir())
    }
    return folders | ({"Racecheck": [of_sample(file) for file in sorted((samples / "Racecheck").glob("*.cu"))]} if samples else {})


def text_of(sources: list[Source], on_cpu: bool) -> str:
    """A kernel file: a launch that fills data, and one for each of some kernels."""
    launches = LAUNCH.format(name="prepare", grid=1, block=256)
    launches += "".join(LAUNCH.format(name=each.name, grid=each.grid, block=each.block) for each in sources)
    code = [f"namespace of_{each.name} {{\n{each.code.replace('__global__', '__device__')}}}\n" for each in sources]
    code += [ENTRY.format(name=each.name, call=each.call) for each in sources]
    return f"{HEADER}{launches}// ///\n#include <fa/warp.cuh>\n{ON_CPU * on_cpu}{PREPARE}{''.join(code)}"


@contextmanager
def ready(sources: list[Source], given: Inputs, backend: Backend) -> Iterator[Iterator[Bound]]:
    """Some kernels, which are compiled as one file: for each what its pass launches. The file lies there until all have been launched."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suite_forward.cu"
        path.write_text(text_of(sources, isinstance(backend, Host)), encoding="utf-8")
        bound = Bound(backend, backend.load(Kernel.read(path), PROBLEM), PROBLEM, given)
        first, *steps = bound.steps

        def each() -> Iterator[Bound]:
            for step in steps:
                bound.steps = [first, step]
                yield bound

        yield each()


def told_of(sources: list[Source], given: Inputs, backend: Host) -> list[Told]:
    """What the check says of some kernels."""
    told = []
    with ready(sources, given, backend) as passes:
        for each, bound in zip(sources, passes, strict=True):
            start, said = time.process_time(), ""
            try:
                bound.launch()
            except CheckFault:
                said = "race"
            except KernelFault as fault:
                said = str(fault)
            told.append(Told(each.name, each.racy, said, time.process_time() - start))
    return told


def main(clone: Path, samples: Path | None = None) -> None:
    backend, out = Host(check="race"), csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["folder", "kernels", "racy", "found", "missed", "false_alarms", "other_faults", "seconds"])
    nodes, given = inputs(clone)
    total = np.zeros(7)
    for folder, sources in folders_of(clone, samples, nodes).items():
        told = [each for i in range(0, len(sources), TOGETHER) for each in told_of(sources[i : i + TOGETHER], given, backend)]
        racy = [each for each in told if each.racy]
        counts = [len(told), len(racy), sum(each.said == "race" for each in racy), sum(not each.said for each in racy)]
        counts += [sum(each.said == "race" for each in told if not each.racy), sum(each.said not in ("", "race") for each in told)]
        seconds = sum(each.seconds for each in told)
        total += [*counts, seconds]
        out.writerow([folder, *counts, f"{seconds:.1f}"])
        sys.stdout.flush()
        for each in told:
            if (each.said == "race") != each.racy:
                sys.stderr.write(f"{each.name}: {'missed' if each.racy else 'reported without a race'} {each.said}\n")
    out.writerow(["all", *(int(count) for count in total[:-1]), f"{total[-1]:.1f}"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
