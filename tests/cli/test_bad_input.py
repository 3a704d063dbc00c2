"""Bad inputs through the command line: each has its exit code, one reason, a hint, no traceback, nothing half written, under 2 s."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 16, "--dim", 16)
FOLDER = "B1_H2_S16_D16"
BACKWARD = ("run", "--compute", "naive", "--mode", "backward")
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # linux/prctl.h, linux/capability.h


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and the time it was written."""
    return {str(p.relative_to(folder)): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*") if not p.is_dir()}


@pytest.fixture
def data(fa_cli: Run, tmp_path: Path) -> Path:
    """A good data folder, made by gen-data."""
    assert fa_cli("gen-data", *SHAPE).exit_code == 0
    return tmp_path / "data" / FOLDER


def refused(fa_cli: Run, code: int, why: str, *words: Any) -> None:
    """Run a command that must fail: with this exit code, a message that holds `why`, a hint, and the disk as it was."""
    before, start = listing(Path.cwd()), time.process_time()
    result = fa_cli(*words)
    seconds = time.process_time() - start
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ") and why in result.stderr, result.stderr
    assert lines[-1].startswith("hint: ") and len(lines) <= 3, result.stderr
    assert listing(Path.cwd()) == before
    assert seconds < 2


def meta(data: Path, **changes: Any) -> None:
    """Change keys of meta.json."""
    path = data / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def poke(data: Path, name: str, value: float) -> None:
    """Put a value into a tensor, with its hash put right, so that the value itself is what is wrong."""
    import hashlib

    array = np.fromfile(data / f"{name}.bin", "<f4")
    array[100] = value
    array.tofile(data / f"{name}.bin")
    hashes = json.loads((data / "meta.json").read_text())["sha256"]
    meta(data, sha256=hashes | {f"{name}.bin": hashlib.sha256(array.tobytes()).hexdigest()})


def resize(data: Path, change: int) -> None:
    """Make Q.bin longer or shorter by some bytes."""
    content = (data / "Q.bin").read_bytes()
    (data / "Q.bin").write_bytes(content[: len(content) + change] + b"\0" * max(0, change))


def replace(data: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of Q.bin."""
    (data / "Q.bin").unlink()
    make(data / "Q.bin")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "Q.bin missing": (lambda d: (d / "Q.bin").unlink(), "missing"),
    "folder missing": (lambda d: shutil.rmtree(d), "no such folder"),
    "4 bytes short": (lambda d: resize(d, -4), "too short"),
    "2 bytes short": (lambda d: resize(d, -2), "too short"),
    "3 bytes long": (lambda d: resize(d, 3), "too long"),
    "empty": (lambda d: (d / "Q.bin").write_bytes(b""), "empty"),
    "another dtype in meta": (lambda d: meta(d, dtype="float16"), "another problem"),
    "unknown dtype in meta": (lambda d: meta(d, dtype="int8"), "int8"),
    "another shape in meta": (
        lambda d: meta(d, shape={"batch": 1, "heads": 2, "seq": 8, "dim": 16, "heads_kv": 2, "seq_kv": 8}),
        "another problem",
    ),
    "meta not JSON": (lambda d: (d / "meta.json").write_text("{"), "not JSON"),
    "another hash": (lambda d: meta(d, sha256={f"{n}.bin": "0" * 64 for n in ("Q", "K", "V", "dO")}), "SHA-256"),
    "NaN in Q": (lambda d: poke(d, "Q", float("nan")), "nan"),
    "infinity in K": (lambda d: poke(d, "K", float("inf")), "inf"),
    "a FIFO": (lambda d: replace(d, os.mkfifo), "not a regular file"),
    "a link to /dev/zero": (lambda d: replace(d, lambda p: p.symlink_to("/dev/zero")), "not a regular file"),
    "a folder": (lambda d: replace(d, lambda p: p.mkdir()), "not a regular file"),
    "a dangling link": (lambda d: replace(d, lambda p: p.symlink_to("nowhere")), "missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_exit_3(case: str, fa_cli: Run, data: Path) -> None:
    """What is wrong with a data folder is said, and nothing is run."""
    spoil, why = CASES[case]
    spoil(data)
    refused(fa_cli, 3, why, "run", "--data", data)


def test_data_without_meta_runs_with_a_warning(fa_cli: Run, data: Path) -> None:
    """A folder of seed 002, without meta.json, is read by its name."""
    (data / "meta.json").unlink()
    result = fa_cli("run", "--compute", "naive", "--data", data)
    assert result.exit_code == 0, result.output
    assert "note: " in result.stderr and "meta.json" in result.stderr


def test_nonfinite_inputs_can_be_allowed(fa_cli: Run, data: Path) -> None:
    """--allow-nonfinite runs NaN through: the rows that see it are NaN in the reference too, so the check passes."""
    poke(data, "Q", float("nan"))
    assert fa_cli("run", "--compute", "naive", "--data", data, "--allow-nonfinite").exit_code == 0


def test_backward_needs_a_forward(fa_cli: Run, data: Path) -> None:
    """--mode backward without outputs of a forward, or with those of another mask, is exit 3 with the way out."""
    refused(fa_cli, 3, "--mode both", "run", "--compute", "naive", "--mode", "backward", "--data", data)
    assert fa_cli("run", "--compute", "naive", "--data", data).exit_code == 0
    refused(fa_cli, 3, "causal", "run", "--compute", "naive", "--mode", "backward", "--data", data, "--causal")
    assert fa_cli("run", "--compute", "naive", "--mode", "backward", "--data", data).exit_code == 0


def test_backward_refuses_a_wrong_forward(fa_cli: Run, data: Path, wrong: str) -> None:
    """Right gradients of a wrong O would be called wrong. A backward pass that fails, alone or behind a right forward, does not count."""
    assert fa_cli("run", "--compute", wrong, "--data", data).exit_code == 1
    refused(fa_cli, 3, "wrong wrote it, and its verdict was FAIL", *BACKWARD, "--data", data)
    assert fa_cli("run", "--compute", "naive", "--data", data).exit_code == 0
    assert fa_cli(*BACKWARD, "--data", data, "--tolerance", 1e-12).exit_code == 1
    assert fa_cli(*BACKWARD, "--data", data).exit_code == 0
    record = json.loads((data / "outputs.json").read_text())
    assert record["forward"]["arithmetic"] == {"forward": "f32"} and record["verdicts"] == {"backward": "PASS"}
    both = record | {"verdict": "FAIL", "verdicts": {"forward": "PASS", "backward": "FAIL"}}
    del both["forward"]
    (data / "outputs.json").write_text(json.dumps(both))
    assert fa_cli(*BACKWARD, "--data", data).exit_code == 0
    del both["verdicts"]  # an earlier version's: which pass failed is not known
    (data / "outputs.json").write_text(json.dumps(both))
    refused(fa_cli, 3, "its verdict was FAIL", *BACKWARD, "--data", data)
    for change in ({"verdicts": 1}, {"arithmetic": {"forward": 1}}, {"forward": {"arithmetic": "tf32"}}):
        (data / "outputs.json").write_text(json.dumps(record | change))
        refused(fa_cli, 3, f"for '{next(iter(change))}'", *BACKWARD, "--data", data)


def test_backward_refuses_a_forward_in_tf32(fa_cli: Run, data: Path) -> None:
    """What is judged as f32 would be called wrong for the error of its O; a record of an earlier version does not say its class."""
    assert fa_cli("run", "--compute", "mma", "--data", data).exit_code == 0
    record = json.loads((data / "outputs.json").read_text())
    assert record["arithmetic"] == {"forward": "tf32"} and record["verdicts"] == {"forward": "PASS"}
    refused(fa_cli, 3, "mma wrote it; naive is judged as f32", *BACKWARD, "--data", data)
    del record["arithmetic"]
    (data / "outputs.json").write_text(json.dumps(record))
    assert fa_cli(*BACKWARD, "--data", data).exit_code == 1
    half = (*SHAPE, "--dtype", "bfloat16")  # p16: its O has no error that bfloat16 has not
    assert fa_cli("run", "--compute", "mma", *half).exit_code == 0 and fa_cli(*BACKWARD, *half).exit_code == 0


def test_other_data_is_not_overwritten(fa_cli: Run, data: Path) -> None:
    """gen-data leaves the same data alone, refuses another seed, and replaces it with --force."""
    before = listing(data)
    assert fa_cli("gen-data", *SHAPE).exit_code == 0
    assert listing(data) == before
    refused(fa_cli, 3, "--force", "gen-data", *SHAPE, "--seed", 7)
    assert fa_cli("gen-data", *SHAPE, "--seed", 7, "--force").exit_code == 0
    assert json.loads((data / "meta.json").read_text())["seed"] == 7


@pytest.mark.parametrize("left", ["Q", "K", "dO", "O", "dQ"])
def test_tensors_of_a_users_own_are_not_overwritten(left: str, fa_cli: Run, data: Path) -> None:
    """A part of a set, without meta.json: gen-data and a run that would make data there refuse it; --force replaces it."""
    (data / f"{left}.bin").write_bytes(b"mine")
    for path in data.iterdir():
        if path.stem != left:
            path.unlink()
    refused(fa_cli, 3, "unknown origin", "gen-data", *SHAPE)
    refused(fa_cli, 3, "--force", "run", "--compute", "naive", *SHAPE)
    assert fa_cli("gen-data", *SHAPE, "--force").exit_code == 0 and (data / "meta.json").exists()


def test_a_dangling_link_is_not_overwritten(fa_cli: Run, data: Path) -> None:
    """Its target may lie on a disk that is not mounted."""
    shutil.rmtree(data)
    data.mkdir()
    (data / "Q.bin").symlink_to("/nowhere/Q.bin")
    refused(fa_cli, 3, "--force", "gen-data", *SHAPE)
    assert os.readlink(data / "Q.bin") == "/nowhere/Q.bin"


def test_a_folder_where_a_file_is_written_is_exit_3(fa_cli: Run, data: Path) -> None:
    """outputs.json or Q.bin: no tensor is replaced, and the next command finds no half of a set."""
    (data / "outputs.json").mkdir()
    refused(fa_cli, 3, "outputs.json is a folder", "run", "--compute", "naive", "--data", data)
    (data / "outputs.json").rmdir()
    replace(data, lambda path: path.mkdir())
    refused(fa_cli, 3, "Q.bin is a folder", "gen-data", *SHAPE, "--force")
    (data / "Q.bin").rmdir()
    assert fa_cli("gen-data", *SHAPE, "--force").exit_code == 0
    assert fa_cli("run", "--compute", "naive", "--data", data).exit_code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--compute", "nosuch"), "unknown kernel"),
        (("--compute", "²"), "unknown kernel"),
        (("--compute", "٠-٧"), "unknown kernel"),
        (("--compute", "fa2+nosuch"), "unknown kernel 'nosuch'"),
        (("--device", "cuda:²"), "unknown device"),
        (("--compute", "nosuch.cu"), "no kernel file"),
        (("--dim", 257), "head dim"),
        (("--seq", 0), "at least 1"),
        (("--batch", -1), "at least 1"),
        (("--heads", 3, "--kv-heads", 2), "evenly"),
        (("--dtype", "float8"), "float8"),
        (("--batch", 10**9), "too large"),
        (("--mode", "sideways"), "sideways"),
        (("--seed", -1), "seed"),
        (("--seed", 2**32), "seed"),
        (("--schedule-seed", -1), "schedule-seed"),
        (("--tolerance", "nan"), "tolerance"),
        (("--tolerance", -1e-3), "tolerance"),
        (("--compute", ","), "no kernel"),
        (("--scale", "nan"), "scale"),
        (("--tile", "BLOCK_Q"), "NAME=VALUE"),
        (("--tile", "BLOCK_Q=-1"), "NAME=VALUE"),
        (("--tile", "BLOCK_Q=0"), "divides by zero"),
        (("--tile", "BLOCK_Q=²"), "NAME=VALUE"),
        (("--compute", "fa1", "--mode", "backward"), "no backward pass"),
    ],
)
def test_usage_is_exit_2(words: tuple[Any, ...], why: str, fa_cli: Run) -> None:
    """What cannot be meant is refused before anything is written."""
    given = dict(zip(SHAPE[::2], SHAPE[1::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    refused(fa_cli, 2, why, "run", *(word for pair in given.items() for word in pair))


@pytest.mark.parametrize(
    "words",
    [
        ("experiment", "seqlen", "--min-time", "nan"),
        ("ring", "--timeout", "nan"),
        ("ring", "--bandwidth", "NaN"),
        ("doctor", "--device", "tpu"),
        ("doctor", "--gpus", "2"),
    ],
)
def test_an_option_of_other_verbs_is_exit_2(words: tuple[str, ...], fa_cli: Run) -> None:
    """NaN lies in no range, and no device is one that is not there, for a verb that runs nothing too."""
    refused(fa_cli, 2, words[-1], *words)


@pytest.mark.parametrize(("words", "why"), [(("--tile", "NOSUCH=4"), "NOSUCH"), (("--device", "tpu"), "tpu")])
def test_usage_with_data_is_exit_2(words: tuple[str, str], why: str, fa_cli: Run, data: Path) -> None:
    """What only the kernel or the machine can refuse leaves the data folder as it was."""
    refused(fa_cli, 2, why, "run", "--data", data, *words)


def test_data_and_a_shape_together_are_exit_2(fa_cli: Run, data: Path) -> None:
    """--seq beside --data would be ignored, so it is refused."""
    refused(fa_cli, 2, "--seq", "run", "--data", data, "--seq", 32)


def test_a_folder_in_use_is_exit_6(fa_cli: Run, data: Path) -> None:
    """Two runs on one folder: the second leaves the folder as it is."""
    from harness.files import locked

    with locked(data):
        refused(fa_cli, 6, "in use", "run", "--compute", "naive", "--data", data)


# -- what needs a process of its own ------------------------------------------------------------------------------------


def as_plain_user(folder: Path, *words: object, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process for which permissions hold, also where the tests are root's. limit: the largest file it may write."""
    prctl = ctypes.CDLL(None).prctl

    def restrict() -> None:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = os.environ | {"FA_CLI_DEVICE": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, preexec_fn=restrict)


def refused_apart(folder: Path, code: int, why: str, *words: object, limit: int | None = None) -> None:
    """As `refused`, in a process of its own."""
    before = listing(folder)
    done = as_plain_user(folder, *words, limit=limit)
    assert done.returncode == code, done.stderr
    assert why in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert listing(folder) == before


def test_an_unreadable_file_is_exit_3(tmp_path: Path) -> None:
    """Q.bin with mode 0000."""
    assert as_plain_user(tmp_path, "gen-data", *SHAPE).returncode == 0
    (tmp_path / "data" / FOLDER / "Q.bin").chmod(0)
    refused_apart(tmp_path, 3, "cannot be read", "run", "--data", f"data/{FOLDER}")


def test_a_read_only_folder_is_exit_6(tmp_path: Path) -> None:
    """Told before anything is computed."""
    assert as_plain_user(tmp_path, "gen-data", *SHAPE).returncode == 0
    (tmp_path / "data" / FOLDER).chmod(0o555)
    refused_apart(tmp_path, 6, "cannot write", "run", "--data", f"data/{FOLDER}")
    (tmp_path / "data").chmod(0o555)
    refused_apart(tmp_path, 6, "cannot write", "gen-data", "--seq", 8)


def test_a_full_disk_is_exit_6(tmp_path: Path) -> None:
    """A file that cannot grow to its size leaves nothing behind."""
    refused_apart(tmp_path, 6, "no room", "gen-data", *SHAPE, limit=1000)


@pytest.mark.parametrize("threads", ["9" * 5000, "0", "-1", "two", "1000000", "\u0661"])
def test_a_number_of_threads_that_is_none_is_exit_2(threads: str, fa_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA_CLI_THREADS, in a message that is not as long as the value."""
    monkeypatch.setenv("FA_CLI_THREADS", threads)
    result = fa_cli("run", "--device", "cpu", "--batch", 1, "--heads", 1, "--seq", 8)
    assert result.exit_code == 2 and "FA_CLI_THREADS is" in result.stderr and len(result.stderr) < 300
