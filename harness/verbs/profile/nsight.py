"""What the hardware does while a kernel runs: counters by Nsight Compute (ncu), a time line and times by Nsight Systems (nsys).

The tool starts a process of ours (:mod:`harness.files.child`), which loads one kernel for one pass, checks it, and runs it again between
cudaProfilerStart and cudaProfilerStop: nothing else is profiled. ncu replays each launch until every counter is read, with the
caches emptied before and the clocks left alone, so its times are cold and slower than `fa-cli run`'s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...backends import nvidia_driver, pick
from ...check.choose import kernels_for
from ...check.oracle import oracle_for
from ...check.request import Request, with_options
from ...fault import EnvironmentFault, KernelFault
from ...files import child, make_folder, write_files
from ...kernel import Kernel
from ...problem import Problem
from .checked import checked
from .counters import METRICS, Counters, Values, read_ncu, read_nsys, to_csv

TOOLS = {"ncu": "nsight-compute", "nsys": "nsight-systems"}  # and what installs them
RUNS = {"ncu": 1, "nsys": 20}

#: What the tools say where the machine does not let them -> why, and what to do.
_REFUSALS = {
    "ERR_NVGPUCTRPERM": (
        "the driver keeps hardware counters for the administrator",
        "run as root, in a container with --cap-add SYS_ADMIN; "
        "or set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reboot",
    ),
    "driver resource was unavailable": ("another profiler or monitor (DCGM, nsys, a debugger) holds the counters", "dcgmi profile --pause"),
}
#: The options that make the report, before the program to profile, and those that print it.
_COLLECT = {
    "ncu": (
        "--clock-control",
        "none",
        "--profile-from-start",
        "no",
        "--force-overwrite",
        "--metrics",
        ",".join(name for names in METRICS.values() for name in names),
    ),
    "nsys": (
        "profile",
        "--trace",
        "cuda,nvtx",
        "--sample",
        "none",
        "--cpuctxsw",
        "none",
        "--force-overwrite",
        "true",
        "--capture-range",
        "cudaProfilerApi",
        "--capture-range-end",
        "stop",
    ),
}
_READ = {
    "ncu": ("--csv", "--page", "raw", "--print-units", "base", "--import"),
    "nsys": ("stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--force-export", "true"),
}


@dataclass(frozen=True)
class Job:
    """What the profiled process runs."""

    kernel: Kernel
    problem: Problem
    seed: int
    device: str
    tiles: Mapping[str, int]
    runs: int


@dataclass(frozen=True, kw_only=True)
class Profile(Request):
    """What `fa-cli profile` is asked for. tool: ncu or nsys."""

    tool: str = "ncu"
    output_dir: Path = Path("profiles")
    note: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None


@with_options(Profile)
def profile(asked: Profile) -> list[Counters]:
    """Profile kernels on a problem. Writes counters.csv (ncu) or kernels.csv (nsys), and the tool's own report a kernel and pass.

    On the CPU engine, where ncu has nothing to read, counters.csv has what the engine counts of shared and global memory.

    Raises EnvironmentFault without a GPU, without the tool or where counters are not permitted; UsageFault for an unknown or
    refused kernel, KernelFault for one that does not compile or run, Fault (exit code 1) for one that is wrong, DiskFault.
    """
    tool, output_dir, problem, progress = asked.tool, asked.output_dir, asked.problem or Problem.of(), asked.progress
    kernels = kernels_for(replace(asked, problem=problem), asked.note)
    if tool == "ncu" and (asked.device == "cpu" or (asked.device == "auto" and not nvidia_driver())):
        return _without_gpu(asked, kernels, problem)
    if asked.device == "cpu" or not nvidia_driver():
        hint = "without one, fa-cli profile --device cpu counts memory traffic, fa-cli compile shows registers and spills; or rent one: experiments/cloud_modal.py of the sources"
        raise EnvironmentFault("no GPU to profile", f"{tool} reads an NVIDIA GPU", hint)
    program = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if not program:
        hint = f"apt install {TOOLS[tool]} (NVIDIA's repository), or put the CUDA toolkit's bin folder on PATH"
        raise EnvironmentFault(f"{tool} is not on PATH", f"it is a program of NVIDIA's, {TOOLS[tool]}, not a Python package", hint)
    make_folder(output_dir)
    found: list[Counters] = []
    for number, kernel in enumerate(kernels):
        progress(f"{number}/{len(kernels)} {tool} {kernel.name} {kernel.pass_} {problem.describe()}")
        job = Job(kernel, problem, asked.seed, asked.device, asked.tiles or {}, RUNS[tool])
        report = output_dir / f"{kernel.label}_{problem.describe().replace(' ', '_')}{'_deterministic' * asked.deterministic}"
        rows = _profiled(tool, program, job, report)
        found += [Counters(kernel.name, kernel.pass_, entry, problem.describe(), metrics) for entry, metrics in rows]
    progress("")
    write_files(output_dir, {"counters.csv" if tool == "ncu" else "kernels.csv": to_csv(found).encode()})
    return found


def _without_gpu(asked: Profile, kernels: Sequence[Kernel], problem: Problem) -> list[Counters]:
    from .traffic import LIMITS, counted  # loads the CPU engine

    found: list[Counters] = []
    for number, kernel in enumerate(kernels):
        asked.progress(f"{number}/{len(kernels)} {kernel.name} {kernel.pass_} {problem.describe()} on the CPU engine")
        found += counted(kernel, problem, asked.seed, asked.tiles or {}, asked.note)
    asked.progress("")
    asked.note(LIMITS)
    make_folder(asked.output_dir)
    write_files(asked.output_dir, {"counters.csv": to_csv(found).encode()})
    return found


# -- running the tools ------------------------------------------------------------------------------------------------


def _profiled(tool: str, program: str, job: Job, report: Path) -> list[tuple[str, Values]]:
    """Run a tool on the child process and read its report. The child's fault is raised here, with its exit code."""
    made = report.with_name(f"{report.name}.{tool}-rep")
    made.unlink(missing_ok=True)  # an old report is not this run's
    names = ["--kernel-name", f"regex:^({'|'.join(job.kernel.entries)})$"] if tool == "ncu" else []
    with child.command(partial(run_job, job)) as started:
        to = ["--output" if tool == "nsys" else "--export", str(report)]
        said = _printed([program, *_COLLECT[tool], *names, *to, *started.argv], started.environment)
        with suppress(child.Ended):  # the tool's own output says why
            started.result()
    text = _printed([program, *_READ[tool], str(made)]) if made.exists() else ""
    if rows := (read_ncu if tool == "ncu" else read_nsys)(text):
        return rows
    for words, (why, hint) in _REFUSALS.items():
        if words in said:
            raise EnvironmentFault(f"{tool} may not read the GPU's counters ({words})", why, hint)
    last = "\n".join((said + text).strip().splitlines()[-8:])
    raise KernelFault(f"{tool} profiled nothing", last, "fa-cli run, with the same options, shows whether the kernel runs")


def _printed(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    # The tools print numbers by the locale; this module reads them as C has them.
    done = subprocess.run(command, env={**environment, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, errors="replace")
    return done.stdout + done.stderr


# -- in the profiled process ------------------------------------------------------------------------------------------


def run_job(job: Job) -> None:
    """Check a kernel, then run it while the profiler is on. Raises Fault where it cannot run or is wrong."""
    backend = pick(job.device)
    kernel = job.kernel
    oracle = oracle_for(job.problem, backend, kernel.pass_, job.seed)
    found = checked(kernel, oracle, backend, job.tiles)
    cupy: Any = backend.xp  # has no types
    profiler = cupy.cuda.profiler
    found.timed.call()  # warm
    profiler.start()
    for _ in range(job.runs):
        found.timed.call()
    profiler.stop()
