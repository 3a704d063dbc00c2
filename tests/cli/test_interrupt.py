"""Ctrl-C at any moment: exit code 130, `error: interrupted`, no traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import days
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
#: The doors: in a checkout, without the script's folder on the path, and the installed ones.
DOORS = {
    "cli.py": [sys.executable, str(ROOT / "cli.py")],
    "-I cli.py": [sys.executable, "-I", str(ROOT / "cli.py")],
    "-m fa_cli": [sys.executable, "-m", "fa_cli"],
}
KILLS = 7  # of each door
RUN = ["run", "--compute", "naive", "--batch", "1", "--heads", "1", "--seq", "32", "--dim", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which this checkout is the package fa_cli, as an installation has it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "fa_cli").symlink_to(ROOT, target_is_directory=True)
    return folder


def start(command: list[str], package: Path, folder: Path) -> subprocess.Popen[str]:
    """The command with its handlers as a terminal gives them, SIGINT not ignored."""
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def listens(process: subprocess.Popen[str]) -> bool:
    """Whether Python handles SIGINT in that process yet: before, the signal ends it as the shell expects."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def interrupted(command: list[str], package: Path, folder: Path, seconds: float) -> tuple[int, str] | None:
    """The exit code and stderr of a command that is interrupted after that time; None where Python had not reached our first line."""
    process = start(command, package, folder)
    while not listens(process) and process.poll() is None:
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    ours = ("cli.py", "__main__.py", "harness", "start.py")
    starting = "Failed to import the site module" in told or ("KeyboardInterrupt" in told and not any(name in told for name in ours))
    return None if starting or process.returncode == -signal.SIGINT else (process.returncode, told)


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_is_130_from_the_first_instruction_on(door: str, package: Path, tmp_path: Path) -> None:
    """Signals at random times of a run, most of them while it imports."""
    command = [*DOORS[door], *RUN]
    for _ in range(2):  # the first one compiles the kernel
        begin = time.monotonic()
        process = start(command, package, tmp_path)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        whole = time.monotonic() - begin
    random_ = random.Random(f"{days.today()} {door}")
    kills = [random_.uniform(0.0, 0.8 * whole) for _ in range(KILLS)]
    for seconds in kills:
        found = interrupted(command, package, tmp_path, seconds)
        if found and found[0] != 0:  # 0: it was done before the signal came
            assert found[0] == 130 and "Traceback" not in found[1] and "ignored" not in found[1], (seconds, found)
            assert "interrupted" in found[1], (seconds, found)


SWALLOWS = """
import os, signal, sys
sys.path.insert(0, {root!r})
from harness.terminal import interrupt
interrupt.at_once()

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)  # Python prints what __del__ raises and goes on

def main():
    {how}
    sys.exit(0)

interrupt.command(main)
"""


@pytest.mark.parametrize("how", ["import swallows", "Dropped()"])
def test_a_dropped_interrupt_is_130(how: str, tmp_path: Path) -> None:
    """A library that drops KeyboardInterrupt, while it is imported or in a finalizer, does not turn Ctrl-C into success."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\nprint('went on')\n"
    )
    (tmp_path / "program.py").write_text(SWALLOWS.format(root=str(ROOT), how=how))
    process = start([sys.executable, str(tmp_path / "program.py")], ROOT, tmp_path)
    out, told = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), told
    assert told.endswith("error: interrupted\n")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """Under nohup the run goes on."""
    process = subprocess.Popen(
        [*DOORS["cli.py"], "list"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None,
    )
    for _ in range(5):
        time.sleep(0.03)
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 0
