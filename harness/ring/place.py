"""Which rank this process is, by what its launcher says in the environment, and how the ranks' hosts talk.

mpiexec of Open MPI, MPICH and Intel MPI; srun; torchrun, whose store stands at MASTER_ADDR; and our own launcher, a folder.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..fault import EnvironmentFault, Fault
from ..files import write_files
from .transport import HOSTS, Control, Stuck, left_to_another, same


@dataclass(frozen=True)
class Place:
    """A rank of `size`. local: its number on its machine, which is the number of its GPU. by: "mpi", "store" or "folder"."""

    rank: int
    size: int
    local: int
    by: str
    folder: Path | None = None

    def told(self, fault: EnvironmentFault) -> Fault:
        """A fault that all ranks of a machine have, before they have met: the first of them tells it. One without a number there may be
        alone."""
        counted = any(local in os.environ for *_, local, _ in _LAUNCHERS)
        return left_to_another(fault) if self.local and counted else fault


#: Rank, size and number on the machine, as launchers name them, and whether mpi4py can join: the first whose rank is set.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "mpi"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "mpi"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "store"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "store"),
)


def found(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher gave this process; None where it was started by hand. A lone task of Slurm was, too.

    PMIX_RANK (srun --mpi=pmix) has no size beside it, so the size is Slurm's. Raises EnvironmentFault where a rank has no size, and where
    they are no rank of a size.
    """
    for rank, size, local, by in _LAUNCHERS:
        if rank not in environment:
            continue
        if rank == "SLURM_PROCID" and environment.get(size, "1") == "1":
            return None
        if rank == "SLURM_PROCID" and "PMIX_RANK" in environment:
            by = "mpi"
        if size not in environment:
            raise EnvironmentFault(f"{rank} is set, and {size} is not", "a launcher says both", f"unset {rank}, or use --gpus N")
        own = next(name for name in (local, "SLURM_LOCALID", rank) if name in environment)
        said = {name: environment[name] for name in (rank, size, own)}
        if not all(text.isdecimal() for text in said.values()) or int(said[rank]) >= int(said[size]):
            what = ", ".join(f"{name} is {text!r}" for name, text in said.items())
            raise EnvironmentFault(what, f"a launcher says numbers, and {rank} is below {size}", f"unset {rank}, or use --gpus N")
        return Place(int(said[rank]), int(said[size]), int(said[own]), by)
    return None


class Folder:
    """Values in files of a folder that all ranks of one machine see. Each gather has files of its own, so nothing is overwritten."""

    def __init__(self, place: Place, timeout: float) -> None:
        assert place.folder is not None
        self.rank, self.size, self.timeout, self._folder, self._count = place.rank, place.size, timeout, place.folder, 0

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        """Every rank's value."""
        self._count += 1
        write_files(self._folder, {f"{self._count}.{self.rank}": pickle.dumps(value)})
        limit = time.monotonic() + self.timeout * patience
        found = []
        for rank in range(self.size):
            path = self._folder / f"{self._count}.{rank}"
            while not path.exists():  # it is complete when it has this name
                if time.monotonic() > limit:
                    raise Stuck(self.rank, rank, self.timeout * patience)
                time.sleep(1e-3)
            found.append(pickle.loads(path.read_bytes()) if to_all or not self.rank else None)
        if self._count > 1:  # all have written this one, so all have read the one before
            (self._folder / f"{self._count - 1}.{self.rank}").unlink(missing_ok=True)
        return found

    def close(self, failed: bool = False) -> None:
        """The folder is its maker's."""


#: Bytes of one value in the store: torch 2.11 takes 8 MiB and ends the connection at more.
_PIECE = 4 << 20
_NONE = pickle.dumps(None)


class Store:
    """Values in torch's TCPStore at MASTER_ADDR:MASTER_PORT, which torchrun's ranks have."""

    def __init__(self, place: Place, timeout: float) -> None:
        from .mpi import deadline

        self.rank, self.size, self.timeout, self._count = place.rank, place.size, timeout, 0
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "29500")
        if not port.isdecimal() or int(port) > 65535:
            raise place.told(EnvironmentFault(f"MASTER_PORT is {port!r}", "a port is a number up to 65535", "export MASTER_PORT=29500"))
        if not host:
            why = "without MPI the ranks find each other at MASTER_ADDR"
            hint = "export MASTER_ADDR=<first node>, or use mpiexec, or srun --mpi=pmi2 (Open MPI: pmix)"
            raise place.told(EnvironmentFault("MASTER_ADDR is not set", why, hint))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each failed try to connect prints thirty frames
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            missing = EnvironmentFault("torch.distributed does not load", str(error), "pip install torch, or use mpiexec")
            raise place.told(missing) from None
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself already serves that port
        serves, most = self.rank == 0 and not agent, timedelta(seconds=timeout)
        hint = "MASTER_ADDR is the first node's name, MASTER_PORT free there, and rank 0 runs there"
        late = EnvironmentFault(f"no store at {host}:{port} within {timeout:g} s", f"rank {self.rank} could not connect", hint)
        try:
            with deadline(timeout, late):  # torch tries each address of a host, and each for as long
                self._store = TCPStore(host, int(port), self.size, serves, most, wait_for_workers=False)
        except RuntimeError as error:
            raise EnvironmentFault(f"no store at {host}:{port}", str(error), hint) from None

    def gather(self, value: Any, patience: float = 1, to_all: bool = True) -> list[Any]:
        """Every rank's value."""
        self._count += 1
        prefix = f"{_keys()}/{self._count}"
        data = pickle.dumps(value)
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{prefix}/{self.rank}/{number}", piece)
        self._store.set(f"{prefix}/{self.rank}", str(len(pieces)))
        later = 1.5 if self.rank else 1  # the first rank says who is missing
        self._store.set_timeout(timedelta(seconds=self.timeout * patience * later))
        found = []
        for rank in range(self.size):
            try:
                count = int(self._store.get(f"{prefix}/{rank}"))
                numbers = range(count if to_all or not self.rank else 0)
                found.append(pickle.loads(b"".join(self._store.get(f"{prefix}/{rank}/{number}") for number in numbers) or _NONE))
            except RuntimeError:  # its time is up, or the store is gone
                raise Stuck(self.rank, rank, self.timeout * patience) from None
        return found

    def close(self, failed: bool = False) -> None:
        """The first rank waits for all, since the store is in its process; the others go: it may have minutes of judging before it."""
        if failed:
            return
        self._store.set(f"{_keys()}/closed/{self.rank}", "")
        for rank in range(1, self.size if self.rank == 0 else 0):
            try:
                self._store.get(f"{_keys()}/closed/{rank}")
            except RuntimeError:
                raise Stuck(self.rank, rank, self.timeout) from None


def _keys() -> str:
    """What the names of a run's values begin with: torchrun starts ranks again beside the same store."""
    return f"fa_cli/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def control(place: Place, timeout: float) -> Control:
    """How the hosts of a place's ranks talk, once all ranks are there. Raises EnvironmentFault where they cannot, Stuck where one is
    missing."""
    if place.by == "folder":  # of one machine
        return Folder(place, timeout)
    talk = _mpi(place, timeout) if place.by == "mpi" else Store(place, timeout)
    HOSTS[:] = talk.gather(platform.node())
    same(talk, {"the sources of fa-cli": _sources()}, EnvironmentFault, "check out the same commit on all nodes; git status -sb shows it")
    return talk


def _sources() -> str:
    """A digest of harness's Python files: versions and commits do not tell a file that somebody has changed."""
    digest, harness = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(harness.rglob("*.py")):
        digest.update(f"{path.relative_to(harness)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _mpi(place: Place, timeout: float) -> Control:
    from .mpi import OWN_LAUNCHER, Mpi

    try:
        talk = Mpi(timeout, 0.5 if place.rank else 0.0)
    except EnvironmentFault as fault:
        raise place.told(fault) from None
    if talk.size != place.size:  # as many processes as ranks were asked for, each alone in its own MPI
        what = f"mpiexec started {place.size} ranks, and the MPI that mpi4py loads sees {talk.size}"
        raise place.told(EnvironmentFault(what, "the launcher belongs to another MPI than mpi4py's", OWN_LAUNCHER))
    return talk
