"""env.json: the machine, the versions, the command and the commit of a measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..fault import Dropped
from . import OBJECTS, TEXT, TEXTS, WHOLE, Json, Kind, json_bytes, or_null, read_exact, read_json, write_files

#: Packages whose versions a measurement depends on. Their metadata is read; they are not imported.
PACKAGES = ("fa-harness", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch")


#: What the keys that are read again hold.
_KINDS: dict[str, Kind] = {
    "packages": TEXTS,
    "earlier": OBJECTS,
    "run_id": or_null(TEXT),
    "sweep": TEXT,
    "seed": or_null(WHOLE),
    "git_commit": or_null(TEXT),
    "device_name": or_null(TEXT),
    "python": or_null(TEXT),
    "command": (lambda v: isinstance(v, str) or (isinstance(v, list) and all(isinstance(word, str) for word in v)), "a list of texts"),
}


def environment(**facts: object) -> Json:
    """The environment of a measurement: Python, platform, package versions, git commit, this command, and the facts given.

    facts: the backend's environment() (device, driver, clocks, compiler). Imports nothing heavy.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "git_commit": _git_commit(),
        "command": sys.argv,
        **facts,
    }


def _git_commit() -> str | None:
    """The commit of the code, with + where tracked files differ from it; None where there is no git or no repository.

    FA_CLI_COMMIT gives it for a copy of the tree without .git.
    """
    if given := os.environ.get("FA_CLI_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: an enclosing repository is another project's
        return None
    found = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


def write_env(path: Path, record: Mapping[str, object] | None = None) -> None:
    """Write an environment record (:func:`environment` of now by default) as JSON, atomically. Raises DiskFault."""
    write_files(path.parent, {path.name: json_bytes(environment() if record is None else record)})


def read_env(path: Path) -> Json:
    """The record that :func:`write_env` wrote, or an older or hand-written one: no key is required. Raises DataFault."""
    return read_json(path, "fa-cli experiment writes it next to results.csv; without it the rest is still read", optional=_KINDS)


def env_beside(table: Path) -> Json:
    """The record next to a table; an empty one where there is none, and with a warning where an interrupted write has torn it.

    Raises DataFault for a whole record that is not an object, and for what is not a regular file.
    """
    path = table.parent / "env.json"
    if not os.path.lexists(path):
        return {}
    try:
        json.loads(read_exact(path).tobytes())
    except ValueError:
        warnings.warn(f"{path}: an interrupted write left no whole record; it is not used", Dropped, stacklevel=2)
        return {}
    except RecursionError:
        pass  # refused below
    return read_env(path)
