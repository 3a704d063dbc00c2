"""How long a first contact takes: python experiments/launch/first_contact.py > experiments/launch/first_contact.txt

Each line is a command in a process of its own, from its start to its end. At first the caches of fa-cli and of CuPy and the data folder
are empty. The aims on a GPU: the first run 6 s, B4_H16_S4096_D128 3 s. With --clone the first line is `make run` in a new clone, with the
installation of the packages: it needs a package index. On a CPU the large problem is left out.

Of each run there is what it was doing when, and on a GPU what NVRTC compiled: how many programs, the seconds of each added up, the
seconds in which at least one was being compiled, and the slowest. These are recorded inside the process by this script (--child).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import json
import os
import pstats
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("--batch", "4", "--heads", "16", "--seq", "4096", "--dim", "128")
#: Rows of a profile and of the list of programs.
ROWS = 25


# -- inside the process that is timed ----------------------------------------------------------------------------------


class Recorder(importlib.abc.MetaPathFinder):
    """What a command does: the texts of its progress, and every program that CuPy gives to NVRTC."""

    def __init__(self) -> None:
        self.began, self.phases, self.programs = time.perf_counter(), list[tuple[float, str]](), list[dict[str, Any]]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """CuPy's compiler, which is changed as soon as it is loaded; it must not be loaded sooner, since it then reads its options."""
        if name != "cupy.cuda.compiler":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            load: Any = spec.loader
            run = load.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.watch(module)

            load.exec_module = exec_module
        return spec

    def watch(self, compiler: Any) -> None:
        """Record the calls of a compiler."""
        compile_ = compiler._NVRTCProgram.compile

        def timed(program: Any, *given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return compile_(program, *given, **named)
            finally:
                found = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)", program.src)
                name = (found[-1] if found else "(empty)") + (" with CUB" if "#include <cub" in program.src else "")
                self.programs.append({"name": name, "start": start - self.began, "end": time.perf_counter() - self.began})

        compiler._NVRTCProgram.compile = timed

    def tell(self, text: str) -> None:
        """A text of the progress, without its counts."""
        words = re.sub(r"(?<!\S)\d+/\d+(?!\S) ?", "", text).strip()
        if not self.phases or self.phases[-1][1] != words:
            self.phases.append((time.perf_counter() - self.began, words))


def child(record: Path, arguments: Sequence[str]) -> None:
    """Run the command line in this process, and write what was recorded."""
    recorder = Recorder()
    sys.meta_path.insert(0, recorder)
    sys.path.insert(0, str(ROOT))
    import harness.terminal.progress

    harness.terminal.progress.teller = lambda verbosity, seldom=False: recorder.tell
    sys.argv = [str(ROOT / "cli.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        whole = time.perf_counter() - recorder.began
        record.write_text(json.dumps({"phases": [*recorder.phases, (whole, "")], "programs": recorder.programs}))


# -- outside -----------------------------------------------------------------------------------------------------------


@contextmanager
def empty_caches() -> Iterator[Path]:
    """A folder with caches and data of its own, for the processes started here."""
    with tempfile.TemporaryDirectory(prefix="first_contact_") as made:
        folder, before = Path(made), dict(os.environ)
        os.environ |= {"FA_CLI_CACHE_DIR": str(folder / "cache"), "CUPY_CACHE_DIR": str(folder / "cupy")}
        os.environ |= {"CUDA_CACHE_PATH": str(folder / "driver"), "PYTHONPATH": str(ROOT)}
        (folder / "cache").mkdir(mode=0o700)
        try:
            yield folder
        finally:
            os.environ.clear()
            os.environ.update(before)


def timed(what: str, command: Sequence[str], folder: Path) -> float:
    """The seconds of a command that must succeed. Raises ClickException with the end of what it printed otherwise."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise click.ClickException(f"{what} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return seconds


def step(what: str, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """A line of the table; returns what was recorded."""
    record = folder / "record.json"
    seconds = timed(what, [sys.executable, __file__, "--child", str(record), *arguments], folder)
    found: dict[str, Any] = json.loads(record.read_text())
    programs = found["programs"]
    line = f"{what:52}{seconds:8.2f}"
    if programs:
        line += f"{len(programs):10}{sum(p['end'] - p['start'] for p in programs):8.2f}{_any(programs):8.2f}"
    click.echo(line)
    return found | {"what": what}


def _any(programs: Sequence[dict[str, Any]]) -> float:
    """The seconds in which at least one program was being compiled."""
    total = until = 0.0
    for each in sorted(programs, key=lambda p: p["start"]):
        total += max(0.0, each["end"] - max(until, each["start"]))
        until = max(until, each["end"])
    return total


def details(found: dict[str, Any], programs: bool = False) -> None:
    """What a run was doing when, and with programs the slowest of NVRTC."""
    click.echo(f"\n{found['what']}: from second, for seconds")
    phases = found["phases"]
    for (start, words), (end, _) in zip(phases, phases[1:], strict=False):
        if end - start >= 0.02:
            click.echo(f"{start:8.2f}{end - start:8.2f}  {words or 'prints, ends'}")
    if programs and found["programs"]:
        click.echo(f"{found['what']}: the {ROWS} programs of NVRTC that took longest: from second, for seconds")
        for each in sorted(found["programs"], key=lambda p: p["start"] - p["end"])[:ROWS]:
            click.echo(f"{each['start']:8.2f}{each['end'] - each['start']:8.2f}  {each['name']}")


def profile(arguments: Sequence[str], folder: Path) -> None:
    """The functions of a run's main thread that took longest, in themselves and with what they call."""
    file = folder / "profile"
    timed("the profile", [sys.executable, "-m", "cProfile", "-o", str(file), str(ROOT / "cli.py"), *arguments], folder)
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(str(file), stream=text).strip_dirs().sort_stats(order).print_stats(ROWS if order == "tottime" else 2 * ROWS)
        click.echo(f"\n{' '.join(arguments)}: profile by {order}\n" + text.getvalue().partition("\n\n")[2].strip())


def measure(device: str, large: bool) -> None:
    """The table and what is below it."""
    on, mine = ("--device", device), "mine_forward.cu"
    kernel = (ROOT / "kernels_cu" / "07_fa2_forward.cu").read_text()
    click.echo(f"{'seconds':>60}{'programs':>10}{'NVRTC':>8}{'any':>8}")
    with empty_caches() as folder:
        first = step("run, everything empty", ("run", *on), folder)
        warm = step("run again", ("run", *on), folder)
        (folder / mine).write_text(kernel)
        step("run of a kernel file, new", ("run", f"./{mine}", *on), folder)
        (folder / mine).write_text(kernel + "\n// edited\n")
        edited = step("the file edited: to the verdict", ("run", f"./{mine}", *on), folder)
        step("list", ("list",), folder)
        shown = [first, warm, edited]
        if large:
            shown.append(step("run B4_H16_S4096_D128, kernels and data new", ("run", *LARGE, *on), folder))
            shutil.rmtree(folder / "data" / "B4_H16_S4096_D128")
            shown.append(step("run B4_H16_S4096_D128, data new", ("run", *LARGE, *on), folder))
            shown.append(step("run B4_H16_S4096_D128 again", ("run", *LARGE, *on), folder))
        with empty_caches() as other:
            shown.append(step("run --mode both, everything empty", ("run", "--mode", "both", *on), other))
            shown.append(step("run --mode both again", ("run", "--mode", "both", *on), other))
        for each in shown:
            details(each, programs="empty" in each["what"] or "new" in each["what"])
        if large:
            profile(("run", *LARGE, *on), folder)
        profile(("run", *on), folder)


def clone() -> None:
    """A line for `make run` in a new clone of the commit that is checked out: packages are installed, the kernels compiled."""
    with empty_caches() as folder:
        os.environ.pop("PYTHONPATH")
        began = time.perf_counter()
        timed("git clone", ["git", "clone", "--quiet", str(ROOT), "clone"], folder)
        timed("make run", ["make", "run"], folder / "clone")
        click.echo(f"{'git clone, make run':52}{time.perf_counter() - began:8.2f}")


@click.command()
@click.option("--device", default="auto", help="auto, cuda, cuda:N or cpu.")
@click.option("--clone", "cloned", is_flag=True, help="Time `make run` in a new clone, too.")
def main(device: str, cloned: bool) -> None:
    """Time first contact: processes with empty caches."""
    sys.path.insert(0, str(ROOT))
    from harness import backends

    if cloned:
        clone()
    measure(device, large=device != "cpu" and (device != "auto" or backends.nvidia_driver()))
    name = "from harness import backends; import sys; print(backends.pick(sys.argv[1]).device().name)"  # last: it would load the libraries
    done = subprocess.run([sys.executable, "-c", name, device], cwd=ROOT, capture_output=True, text=True, check=True)
    click.echo(f"\non {done.stdout.strip()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
