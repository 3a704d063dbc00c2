"""Rings of real processes on the CPU: by mpiexec and by --gpus, right against float64, and ended when a rank dies or hangs."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import pytest
from click.testing import Result
from rooms import ROOT

from harness.backends import pick
from harness.fault import DataFault, EnvironmentFault, Fault, UsageFault
from harness.kernel.new import new
from harness.problem import Problem
from harness.ring import job, place, start, transport
from harness.ring.transport import Stuck
from harness.terminal.show.ring import ring as show_ring

ON_CPU = ("--device", "cpu", "--timeout", "30")


def words(*more: object) -> list[str]:
    """The command line in this checkout."""
    return [sys.executable, str(ROOT / "cli.py"), "ring", *map(str, more)]


def ran(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    here = {**os.environ, "TMPDIR": str(folder), "FA_CLI_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=here, timeout=100)


def launched(count: int, *more: object) -> list[str]:
    """The same below mpiexec."""
    return [start.mpiexec(), "-n", str(count), *words(*more, *ON_CPU)]


RINGS = [
    (4, ("--heads", 4, "--kv-heads", 2, "--seq", 203, "--dim", 32, "--causal", "--mode", "both")),
    (3, ("--compute", "mma_qreg_async", "--seq", 131, "--heads", 2, "--kv-heads", 1, "--dtype", "bfloat16", "--causal", "--mode", "both")),
    (3, ("--seq", 100, "--dim", 40, "--partition", "contiguous", "--causal", "--no-overlap", "--mode", "backward")),
    (4, ("--seq", 3, "--dim", 32, "--causal", "--mode", "both")),
    (1, ("--seq", 65, "--dim", 32, "--dtype", "float16")),
]


@pytest.mark.parametrize(("count", "more"), RINGS, ids=str)
def test_a_ring_under_mpiexec(count: int, more: tuple[object, ...], tmp_path: Path) -> None:
    """One document, of the first rank; every tensor within its budget of float64; the same bits in every run."""
    done = ran(launched(count, *more, "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and found["ranks"] == count and found["device"] == "cpu"
    assert all(each["passed"] for each in found["errors"].values())
    assert found["repeated"] or "mma_qreg_async" in more  # its dQ is summed in the order that blocks end
    if "both" in more:
        assert set(found["errors"]) == {"O", "logsumexp", "dQ", "dK", "dV"}
    assert {step["step"] for step in found["steps"]} == set(range(count))
    sent = sum(step["bytes"] for step in found["steps"])
    assert (sent > 0) == (count > 1)


def test_a_ring_that_is_started_here(tmp_path: Path) -> None:
    """The form of seed 003, with a process a rank."""
    done = ran(words("--seq", 300, "--dim", 64, "--gpus", 3, "--output-dir", tmp_path / "out", *ON_CPU), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PASS fa2 forward 3 ranks contiguous B1_H1_S300_D64 on cpu" in done.stdout
    rows = list(csv.DictReader((tmp_path / "out" / "ring_timeline.csv").read_text().splitlines()))
    for rank in "012":
        mine = [row for row in rows if row["rank"] == rank]
        assert [row["step"] for row in mine if row["what"] == "attention"] == ["0", "1", "2"]
        assert [row["step"] for row in mine if row["what"] == "K V" and int(row["bytes"])] == ["0", "1"]
        computing = [(float(row["begin_ms"]), float(row["end_ms"])) for row in mine if row["stream"] == "compute"]
        assert all(0 <= a <= b <= c for (a, b), (c, _) in pairwise(computing)), computing  # a stream does one thing at a time
    assert min(float(row["begin_ms"]) for row in rows) == 0
    assert not list(tmp_path.glob("fa_cli*"))


def test_a_wrong_kernel_fails(tmp_path: Path) -> None:
    """Its logsumexp is too large by 0.1, so a shard that is merged has the wrong weight; and a run that fails has no speed."""
    text = (ROOT / "kernels_cu" / "07_fa2_forward.cu").read_text()
    spoiled = text.replace("top + fa::log(sum)", "top + fa::log(sum) + (args.seq_q > 20 ? 0.1f : 0.0f)")
    assert spoiled != text
    (tmp_path / "mine_forward.cu").write_text(spoiled.replace('// aliases = ["flash"]\n', ""))
    done = ran(launched(2, "--compute", tmp_path / "mine_forward.cu", "--seq", 90, "--dim", 32, "--json"), tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["passed"]
    assert found["time_ms"]["forward"] is None and not found["steps"] and found["efficiency"]["forward"] is None


def interrupted(command: list[str], folder: Path, number: int, wait: float) -> tuple[int, str, float]:
    """Send a signal to rank 2 once all ranks are there: the exit code, stderr, and seconds from the signal to the end."""
    here = {**os.environ, "TMPDIR": str(folder), "FA_CLI_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=here) as process:
        until = time.monotonic() + 30
        while len(pids := list(folder.glob("fa_cli_ring_*/pid.?"))) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(wait)
        victim = next(int(path.read_text()) for path in pids if path.name == "pid.2")
        os.kill(victim, number)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    while Path(f"/proc/{victim}").exists() and time.monotonic() < began + 20:  # mpiexec does not wait for what it has killed
        time.sleep(0.05)
    assert not Path(f"/proc/{victim}").exists()
    return process.returncode, said, seconds


LONG = ("--compute", "naive", "--seq", 3000, "--dim", 64, "--mode", "both", "--device", "cpu", "--timeout", 6, "--gpus", 4)


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """At once, with the environment's exit code and the rank's name."""
    code, said, seconds = interrupted(words(*LONG), tmp_path, signal.SIGKILL, 1.5)
    several = re.search(r"error: one of the ranks ([\d, ]+) died", said)  # seen to end at the same time, on a busy machine
    assert code == EnvironmentFault.exit_code and ("error: rank 2 died" in said or (several and "2" in several[1])), said
    assert seconds < 10


def test_a_rank_that_is_interrupted_is_the_one_that_is_named(tmp_path: Path) -> None:
    """It tells MPI to end them all, and MPI does so from the first on."""
    code, said, _ = interrupted(words(*LONG), tmp_path, signal.SIGINT, 1.5)
    assert code == EnvironmentFault.exit_code and "error: rank 2 died" in said, said


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    """A batch system's word, or timeout's: no folder, and no rank that goes on."""
    here = {**os.environ, "TMPDIR": str(tmp_path), "FA_CLI_THREADS": "1"}
    with subprocess.Popen(words(*LONG), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=here) as process:
        until = time.monotonic() + 30
        while len(found := list(tmp_path.glob("fa_cli_ring_*/pid.?"))) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)
        ranks = [Path("/proc", path.read_text()) for path in found]
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 143 and "Traceback" not in said, said
    while any(each.exists() for each in ranks) and time.monotonic() < until + 10:
        time.sleep(0.05)
    assert len(ranks) == 4 and not any(each.exists() for each in ranks) and not list(tmp_path.glob("fa_cli_*"))


def test_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    """Within the timeout; a neighbour names it."""
    code, said, seconds = interrupted(words(*LONG), tmp_path, signal.SIGSTOP, 1.5)
    assert code == EnvironmentFault.exit_code
    assert "error: rank 2 did not answer within 6 s" in said or "error: the others did not answer within 6 s" in said
    assert seconds < 30


def test_ranks_that_all_hang_in_their_kernels_end(tmp_path: Path) -> None:
    """None waits for another then, and no launch on a CPU can be stopped from outside: each rank limits its own."""
    path = new("mine", folder=tmp_path, plain=True)
    text = path.read_text()
    assert text.count("    __shared__ float p_of_warp") == 1
    spin = "    __shared__ volatile int never;\n    never = 0;\n    while (never == 0) {}\n"
    path.write_text(text.replace("    __shared__ float p_of_warp", f"{spin}    __shared__ float p_of_warp"))
    began = time.monotonic()
    done = ran(words("--compute", path, "--seq", 60, "--dim", 32, "--gpus", 2, "--device", "cpu", "--timeout", 3), tmp_path)
    assert done.returncode == EnvironmentFault.exit_code and time.monotonic() - began < 60
    assert re.search(r"^error: a kernel of rank [01] did not end within 3 s$", done.stderr, re.M), done.stderr


def test_a_killed_rank_under_mpiexec(tmp_path: Path) -> None:
    """Its launcher fails, and does not hang."""
    rank = "import os, signal, sys; os.environ['PMI_RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL); sys.argv = sys.argv[1:]; "
    rank += "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [start.mpiexec(), "-n", "3", sys.executable, "-c", rank, *words("--seq", 64, "--dim", 32, *ON_CPU)[1:]]
    assert ran(command, tmp_path).returncode != 0


def test_the_faq_has_what_mpiexec_says_of_a_killed_rank(tmp_path: Path) -> None:
    """The others are killed with it, so nobody of ours can say it."""
    row = next(line for line in (ROOT / "docs/faq.md").read_text().splitlines() if "EXIT CODE" in line)
    rank = "import os, time\nif os.environ['PMI_RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(30)"
    done = ran([start.mpiexec(), "-n", "3", sys.executable, "-c", rank], tmp_path)
    assert done.returncode == 9
    for part in row.split("|")[1].split(","):
        assert part.strip() in done.stdout + done.stderr


def test_what_a_rank_refuses_is_told_once(tmp_path: Path) -> None:
    """As the message it would be without a ring, with its exit code."""
    done = ran(words("--compute", "tiled", "--dtype", "float16", "--gpus", 2, *ON_CPU), tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: tiled_forward does not take float16")
    done = ran(words("--compute", "numpy", "--simulate", 2, *ON_CPU), tmp_path)
    assert done.returncode == 2 and "is not a kernel of this project" in done.stderr


def test_a_simulation_says_that_it_is_one(fa_cli: Callable[..., Result]) -> None:
    """Right, with predicted times: half the compute of one rank, and messages at the bandwidth that is given."""
    done = fa_cli("ring", "--simulate", 2, "--seq", 64, "--dim", 32, "--bandwidth", 1e-3, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 0 and found["simulated"] and found["passed"]
    assert found["steps"][0]["communication_ms"] == pytest.approx(2 * 32 * 32 * 4 / 1e6 * 1e3)
    assert found["time_ms"]["forward"] >= found["steps"][0]["communication_ms"]
    assert "simulated" in done.stderr or "simulated" in fa_cli("ring", "--simulate", 2, "--seq", 64, "--dim", 32).output


def test_rows_of_rings(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """A row a pass and a row a step, added to what is there; a table of another version is left alone."""
    for ranks in (1, 2):
        done = fa_cli("ring", "--simulate", ranks, "--seq", 64, "--dim", 32, "--mode", "both", "--output-dir", "out")
        assert done.exit_code == 0 and "out/ring.csv" in done.output
    rows, steps = (list(csv.DictReader((tmp_path / "out" / name).read_text().splitlines())) for name in ("ring.csv", "ring_steps.csv"))
    assert [(row["ranks"], row["pass"], row["status"]) for row in rows] == [
        (ranks, pass_, "PASS") for ranks in "12" for pass_ in ("forward", "backward")
    ]
    assert [row["bytes_sent"] for row in rows] == ["0", "0", "8192", str(8192 + 8192)]  # keys once; sums of gradients once, home
    assert all(0 < float(row["ms"]) < 1e4 and float(row["max_error"]) < 1e-4 for row in rows)
    assert len(steps) == 2 * 1 + 2 * 2 and json.loads((tmp_path / "out" / "env.json").read_text())["ranks"] == 2


def test_tables_of_rings_that_are_torn_or_of_others(fa_cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a torn one the whole rows stay; another version's, and a folder with an experiment, are refused before a ring begins."""
    words = ("ring", "--simulate", 1, "--seq", 64, "--dim", 32, "--output-dir", "out")
    assert fa_cli(*words).exit_code == 0 and fa_cli(*words).exit_code == 0
    before = {}
    for name in ("ring.csv", "ring_steps.csv"):
        before[name] = (tmp_path / "out" / name).read_text().splitlines(keepends=True)
        (tmp_path / "out" / name).write_text("".join(before[name])[:-30])
    done = fa_cli(*words)
    assert done.exit_code == 0 and done.stderr.count("no whole line") == 2, done.stderr
    for name, lines in before.items():
        now = (tmp_path / "out" / name).read_text().splitlines(keepends=True)
        assert now[:2] == lines[:2] and len(now) == 3 and now[2].count(",") == lines[0].count(",") and now[2].startswith("fa2,forward,")
    monkeypatch.setattr(start, "simulate", None)  # no ring begins
    (tmp_path / "out" / "ring_steps.csv").write_text("another\n")
    done = fa_cli(*words)
    assert done.exit_code == 3 and "ring_steps.csv has other columns" in done.stderr
    assert (tmp_path / "out" / "ring_steps.csv").read_text() == "another\n"
    (tmp_path / "out" / "results.csv").write_text("Test\n")
    done = fa_cli(*words)
    assert done.exit_code == 2 and "out holds an experiment" in done.stderr and "--output-dir" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", 2, "--simulate", 2), "--gpus and --simulate together"),
        (("--gpus", 5000, "--device", "cpu"), "5000 ranks"),
        (("--simulate", 2, "--bandwidth", "nan"), "nan is no number"),
        (("--simulate", 2, "--bandwidth", "inf"), "--bandwidth is inf"),
        (("--simulate", 2, "--timeout", "nan"), "nan is no number"),
        (("--gpus", 2, "--timeout", "inf"), "--timeout is inf"),
        (("--gpus", 2, "--bandwidth", 5), "--bandwidth without --simulate"),
        (("--gpus", 2, "--dtype", "float64"), "a ring has no float64"),
        (("--gpus", "two"), "'two' is not a valid integer.\n"),
        (("--timeout", "two"), "'two' is not a valid float.\n"),
    ],
)
def test_what_a_ring_cannot_mean_is_exit_2(words: tuple[object, ...], said: str, fa_cli: Callable[..., Result]) -> None:
    """Before a rank begins: one of two options would be ignored, and nothing can be compared with what is no number."""
    done = fa_cli("ring", *words, "--seq", 64, "--dim", 32)
    assert done.exit_code == 2 and said in done.stderr and "hint: " in done.stderr and done.stdout == "", done.output


PLACES = [
    ({}, None),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, place.Place(3, 4, 1, "mpi")),
    ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, place.Place(2, 4, 0, "mpi")),
    ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}, place.Place(5, 8, 1, "store")),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, place.Place(1, 2, 0, "store")),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "PMIX_RANK": "1"}, place.Place(1, 2, 0, "mpi")),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
]


@pytest.mark.parametrize(("environment", "expected"), PLACES, ids=str)
def test_launchers_are_known_by_the_environment(environment: dict[str, str], expected: place.Place | None) -> None:
    """Open MPI, MPICH and Intel MPI, torchrun, Slurm with and without PMIx; nobody."""
    assert place.found(environment) == expected


def test_values_through_a_folder(tmp_path: Path) -> None:
    """How ranks with GPUs that are started here agree: every value on every rank, round after round, and no file piles up."""
    ranks = [place.Folder(place.Place(rank, 3, rank, "folder", tmp_path), 10.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for turn in range(5):
            found = list(pool.map(lambda rank, turn=turn: rank.gather((rank.rank, turn)), ranks))
            assert found == [[(rank, turn) for rank in range(3)]] * 3
        found = list(pool.map(lambda rank: rank.gather(rank.rank, to_all=False), ranks))
        assert found == [[0, 1, 2], [None] * 3, [None] * 3]
    assert len(list(tmp_path.iterdir())) <= 6


def test_a_rank_that_is_missing_from_a_folder(tmp_path: Path) -> None:
    """The others say which."""
    rank = place.Folder(place.Place(0, 2, 0, "folder", tmp_path), 0.1)
    with pytest.raises(Stuck, match="rank 1 did not answer within 0.1 s"):
        rank.gather(None)


def test_ranks_without_mpi() -> None:
    """What starts ranks with GPUs: processes of ours, whose hosts agree through a folder."""
    assert start._started(partial(jobs.rank, "meet"), 3, cpu=False) == [0, 1, 2]


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("raise", DataFault, "what"),
        ("kill", EnvironmentFault, "rank 1 died: SIGKILL"),
        ("stop", EnvironmentFault, "rank 1 did not answer within 1 s"),
    ],
)
def test_a_rank_without_mpi_that_fails(what: str, kind: type[Fault], said: str) -> None:
    """Its own fault, or its name and the environment's exit code; the others are ended."""
    with pytest.raises(kind) as caught:
        start._started(partial(jobs.rank, what), 3, cpu=False)
    assert caught.value.what == said


def test_who_has_exchanged_least_knows_who_hangs() -> None:
    """Not who says so first: on a busy machine that may be one who waits for a rank that waits."""
    with pytest.raises(Stuck, match="rank 2 did not answer within 3.1 s") as caught:
        start._started(jobs.hanging, 4, cpu=True)
    assert caught.value.why.startswith("rank 3 waited") and caught.value.done == 1


def test_a_process_that_is_ending() -> None:
    """It has no result to leave any more, whether or not somebody has seen it end."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start._exits(process.pid)
    assert start._exits(process.pid) and not start._exits(os.getpid())


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "two"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"PMI_RANK": "2", "PMI_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "x"},
    ],
    ids=str,
)
def test_half_a_place_is_refused(environment: dict[str, str]) -> None:
    """A rank without a size, or beyond it, is somebody's variable, not a launcher."""
    with pytest.raises(EnvironmentFault, match=next(iter(environment))):
        place.found(environment)


def test_a_launcher_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would be alone in an MPI of its own, and a ring of one rank would pass."""
    mpi = pytest.importorskip("harness.ring.mpi")
    monkeypatch.setattr(mpi, "Mpi", lambda timeout, late: Talk())

    class Talk:
        size = 1

        def gather(self, value: object) -> list[object]:
            return [value]

    with pytest.raises(EnvironmentFault, match="mpiexec started 16 ranks, and the MPI that mpi4py loads sees 1"):
        place.control(place.Place(0, 16, 0, "mpi"), 1.0)
    assert place.control(place.Place(0, 1, 0, "mpi"), 1.0).size == 1


def test_a_launcher_that_speaks_pmix_is_refused(tmp_path: Path) -> None:
    """Open MPI's mpiexec, or srun --mpi=pmix: the MPI_Init of MPICH's wheel would abort, with words and a code of its own."""
    done = ran(["env", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2", "PMIX_NAMESPACE=x", *words(*ON_CPU)], tmp_path)
    assert done.returncode == EnvironmentFault.exit_code and "Abort" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: mpiexec belongs to another MPI than mpi4py's\n") and "hint: use the mpiexec beside" in done.stderr


def test_a_rank_that_never_joins(tmp_path: Path) -> None:
    """MPI_Init waits for it for ever and holds Python's lock: our error, exit code and hint all the same."""
    here = ["--device", "cpu", "--timeout", 3]
    told = ["sh", "-c", f"{shlex.join(words('--seq', 64, '--dim', 32, *here))}; code=$?; echo it ended with $code >&2; exit $code"]
    done = ran([start.mpiexec(), "-n", "1", *told, ":", "-n", "1", "sleep", "40"], tmp_path)
    # mpiexec's own code is that of the rank, or of the one that it killed then
    assert f"it ended with {EnvironmentFault.exit_code}\n" in done.stderr and done.returncode in (EnvironmentFault.exit_code, 9), done
    assert "error: the ranks did not all join MPI within 3 s\n" in done.stderr and "hint: fa-cli doctor --ring" in done.stderr
    assert "Thread 0x" not in done.stderr


@pytest.mark.parametrize(
    ("more", "variable"),
    [(("--compute", "nobody"), "FA_CLI_X=1"), (("--dtype", "float64"), "FA_CLI_X=1"), ((), "FA_CLI_RING_TRANSPORT=pear")],
)
def test_what_all_ranks_refuse_is_told_once(more: tuple[object, ...], variable: str, tmp_path: Path) -> None:
    """By the first of them, with the exit code of the mistake, and without MPI's words about an abort."""
    done = ran(["env", variable, *launched(3, *more, "--seq", 64, "--dim", 32)], tmp_path)
    assert done.returncode == 2 and done.stderr.count("error: ") == done.stderr.count("hint: ") == 1 and "Abort" not in done.stderr, done


def test_ranks_agree_on_what_stops_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is told by the first rank that has it; the others end with its code."""
    monkeypatch.setattr(transport, "_SAYING_SECONDS", 0)

    def prepare(rank: int) -> int:
        if rank == 0:
            return 7
        raise DataFault("one node's") if rank == 3 else EnvironmentFault("no GPU")

    def ends(rank: int) -> tuple[type[Fault], str, int]:
        talk = place.Folder(place.Place(rank, 4, rank, "folder", tmp_path), 10.0)
        with pytest.raises(Fault) as caught:
            transport.agreed(talk, lambda: prepare(rank))
        return type(caught.value), caught.value.what, caught.value.exit_code

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ends, range(4)))
    told = (transport.Told, "", 4)
    assert found == [told, (EnvironmentFault, "no GPU", 4), told, (DataFault, "one node's", 3)]
    assert transport.agreed(transport.Alone(), lambda: prepare(0)) == 7


def test_ranks_that_differ_end_before_they_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank tells who differs, in what and on which host; those that are alike go on."""
    monkeypatch.setattr(transport, "_SAYING_SECONDS", 0)
    monkeypatch.setattr(transport, "HOSTS", ["a", "a", "b"])

    def ends(rank: int) -> str:
        talk = place.Folder(place.Place(rank, 3, rank, "folder", tmp_path), 10.0)
        transport.same(talk, {"--seed": 1, "--tile": {"N": 2}}, UsageFault, "hint")
        try:
            transport.same(talk, {"--seed": 1, "--tile": {"N": 2 if rank < 2 else 4}}, UsageFault, "hint")
        except Fault as fault:
            return f"{type(fault).__name__} {fault.exit_code} {fault.what}"
        return "goes on"

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(ends, range(3)))
    first = "UsageFault 2 the ranks differ in --tile: {'N': 2} on rank 0 on a, {'N': 4} on rank 2 on b"
    assert found == [first, "Told 2 ", "Told 2 "]


@pytest.mark.parametrize(("first", "second"), [(("--seq", 64), ("--seq", 65)), (("--seed", 1), ("--seed", 2))], ids=str)
def test_ranks_with_other_options(first: tuple[object, ...], second: tuple[object, ...], tmp_path: Path) -> None:
    """They once ended in MPI's exception, or in a verdict that blamed the kernel."""
    here = ("--dim", 32, *ON_CPU)
    done = ran([start.mpiexec(), "-n", "1", *words(*first, *here), ":", "-n", "1", *words(*second, *here)], tmp_path)
    name = "the problem" if "--seq" in first else "--seed"
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("error: ") == 1, done
    assert done.stderr.startswith(f"error: the ranks differ in {name}: ") and "hint: give all ranks the same options" in done.stderr


def test_ranks_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another commit, say: rings of both may divide the rows differently."""
    mpi, hosts = pytest.importorskip("harness.ring.mpi"), list[str]()
    monkeypatch.setattr(transport, "HOSTS", hosts)
    monkeypatch.setattr(place, "HOSTS", hosts)
    monkeypatch.setattr(mpi, "Mpi", lambda timeout, late: Talk())

    class Talk:
        rank, size = 0, 2

        def gather(self, value: object) -> list[object]:
            return [value, dict.fromkeys(value, "0123") if isinstance(value, dict) else "node1"]

        def close(self) -> None: ...

    with pytest.raises(
        EnvironmentFault, match=r"the ranks differ in the sources of fa-cli: [0-9a-f]{12} on rank 0 on .*, 0123 on rank 1 on node1"
    ):
        place.control(place.Place(0, 2, 0, "mpi"), 1.0)


@pytest.mark.parametrize(("local", "compiles"), [(0, True), (1, False)])
def test_who_compiles(local: int, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of each machine, since machines may have caches of their own, while the others are patient."""
    spec = job.Spec("naive", "both", Problem.of(1, 1, 64, 32), device="cpu")
    loaded: list[str] = []
    backend = type(
        "Host", (), {"name": "cpu", "device": lambda _: pick("cpu").device(), "load": lambda _, kernel, *more: loaded.append(kernel)}
    )
    monkeypatch.setattr(job, "open_backend", lambda *_: backend())
    monkeypatch.setattr(job, "control", lambda *_: type("Talk", (), {"rank": 1, "size": 2})())
    monkeypatch.setattr(job, "agreed", lambda talk, prepare: prepare())
    monkeypatch.setattr(job, "same", lambda *_: None)
    monkeypatch.setattr(job, "transport_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.work(spec, place.Place(1, 2, local, "mpi"))
    assert bool(loaded) == compiles


def test_peer_copies_that_a_cpu_was_asked_for(fa_cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not left out without a word."""
    monkeypatch.setenv("FA_CLI_RING_TRANSPORT", "peer")
    done = fa_cli("ring", "--gpus", 1, "--seq", 64, "--dim", 32, "--device", "cpu")
    assert done.exit_code == 0 and "note: FA_CLI_RING_TRANSPORT=peer is for GPUs" in done.stderr
    assert "PASS fa2 forward 1 rank contiguous" in done.stdout and "device memory" not in done.stdout
    assert "ranks share the cores" in done.stderr


def test_a_cpu_has_no_efficiency_above_100_percent(capsys: pytest.CaptureFixture[str]) -> None:
    """Where ranks have cores that one process had not; a GPU's is shown, whatever it is."""
    spec = job.Spec("naive", "forward", Problem.of(1, 1, 64, 32), device="cpu")
    found = job.simulate(spec, 2)
    for device, single, shown in (("cpu", 2.2, "-"), ("cpu", 1.8, "90"), ("cuda", 2.2, "110")):
        times = {"forward": replace(found.times["forward"], seconds=(1.0,))}
        show_ring(replace(found, device=device, single={"forward": single}, times=times), [], False, 0)
        lines = capsys.readouterr().out.splitlines()
        header = next(i for i, line in enumerate(lines) if line.endswith("efficiency %"))
        assert lines[header + 1].split()[-1] == shown


@pytest.mark.parametrize("verb", [("ring", "--timeout", 30), ("doctor", "--ring")])
def test_cpus_below_torchrun_are_refused_before_they_wait(
    verb: tuple[object, ...], fa_cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank of another machine could make it work, and none is to blame."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(place, "control", None)
    done = fa_cli(*verb, "--device", "cpu")
    assert done.exit_code == 4 and done.stderr.startswith("error: ranks on CPUs exchange messages by MPI\n"), done.output


def test_the_first_rank_of_a_machine_tells_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a launcher has given no number on its machine may be alone there, and tells it too."""
    monkeypatch.setattr(transport, "_SAYING_SECONDS", 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    fault, ranks = EnvironmentFault("no torch"), [place.Place(rank, 4, rank % 2, "store") for rank in range(4)]
    assert [rank.told(fault) is fault for rank in ranks] == [True] * 4
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert [rank.told(fault) is fault for rank in ranks] == [True, False, True, False]
    assert (ranks[1].told(fault).exit_code, str(ranks[1].told(fault))) == (4, "")


def test_who_is_late_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are several."""
    monkeypatch.setattr(transport, "HOSTS", ["a", "a", "b"])
    assert Stuck(0, 2, 1.0).why.startswith("rank 0 on a waited for rank 2 on b; ") and "doctor --ring" in Stuck(0, 2, 1.0).hint
    monkeypatch.setattr(transport, "HOSTS", ["a", "a", "a"])
    assert Stuck(0, 2, 1.0).why.startswith("rank 0 waited for rank 2; ")


def test_gpus_below_a_launcher_is_refused(fa_cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would start a ring of its own."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    done = fa_cli("ring", "--gpus", 2)
    assert done.exit_code == 2 and "--gpus under a launcher" in done.output
