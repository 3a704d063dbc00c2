"""Problem <-> data/<folder>/*.bin + meta.json: generating, reading and writing. Every file is checked before it is used.

Inputs are raw little-endian C-order tensors in the problem's dtype. meta.json describes them. An interrupted write is completed or
discarded when the folder is next opened (harness/files). Hashes, in meta.json of the inputs and in outputs.json of a run, reveal what
was changed otherwise.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from ..array import Array
from ..fault import DataFault, DiskFault, UsageFault
from ..files import (
    TEXT,
    TEXTS,
    WHOLE,
    Json,
    Kind,
    disk_fault,
    each,
    gathered,
    json_bytes,
    locked,
    make_folder,
    or_null,
    read_exact,
    read_json,
    settle,
    sha256,
    write_files,
)
from ..problem import READS, WRITES, WRITTEN, Problem
from .generate import INPUTS, RECIPE, one_by_one
from .memory import available_memory
from .storage import STORAGE

META, OUTPUTS = "meta.json", "outputs.json"
FORMAT, LAYOUT = 1, "little-endian, C order, (batch, heads, rows, head_dim)"
_SIZES = ("batch", "heads", "seq", "dim", "heads_kv", "seq_kv")
_OTHERS = ("dim_v",)  # sizes that a folder has only where they are not the default
#: The keys of meta.json and of outputs.json that are read again.
_META: dict[str, Kind] = {
    "shape": (
        lambda v: isinstance(v, dict) and set(v) - set(_OTHERS) == set(_SIZES) and all(type(size) is int for size in v.values()),
        f"an object of the integers {', '.join(_SIZES)}",
    ),
    "dtype": TEXT,
    "seed": or_null(WHOLE),
    "sha256": TEXTS,
}
_META_OPTIONAL: dict[str, Kind] = {
    "format": (lambda v: type(v) is int and v == FORMAT, f"{FORMAT}, the one format that this fa-cli reads"),
    "layout": (lambda v: v == LAYOUT, f"{LAYOUT!r}, the one layout that this fa-cli reads"),
    "recipe": or_null(TEXT),
    "dtype_kv": TEXT,  # of K and V, where it is another than dtype
}
_OUTPUTS: dict[str, Kind] = {"inputs": TEXTS, "outputs": TEXTS}
_OUTPUTS_OPTIONAL: dict[str, Kind] = {
    "verdict": TEXT,
    "verdicts": TEXTS,  # by pass, as the arithmetic; records of earlier versions have neither
    "arithmetic": TEXTS,
    "forward": (lambda v: isinstance(v, dict) and TEXTS[0](v.get("arithmetic", {})), "an object"),
}
#: The hash of a dO.bin that is not there. Data folders of an earlier harness have none: their dO is all ones.
ONES = "ones"


@dataclass(frozen=True)
class Dataset:
    """A data folder that was opened. problem holds shape and dtype, not the mask and scale, which belong to a run.

    meta: meta.json, None where there is none. tensors: the names of the input files present. warnings: sentences for the user. hashes:
    SHA-256 by tensor name, of the tensors read so far. held: tensors that were read and checked ahead of :meth:`read`, which takes them
    from here, each with what :func:`_stamp` gave before.
    """

    folder: Path
    problem: Problem
    seed: int | None
    meta: Json | None
    tensors: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    hashes: dict[str, str] = field(default_factory=dict, compare=False)
    held: dict[str, tuple[object, Array]] = field(default_factory=dict, compare=False, repr=False)

    def read(self, name: str) -> Array:
        """An input tensor in the problem's shape and storage type, checked: a regular file of exact size and of meta.json's hash.

        dO is all ones where there is no dO.bin and meta.json does not list one. Raises DataFault.
        """
        path, listed = self.folder / f"{name}.bin", (self.meta or {}).get("sha256", {})
        if name == "dO" and name not in self.tensors and f"{name}.bin" not in listed:
            self.hashes[name] = ONES
            return np.ones(self.problem.shape(name), STORAGE[self.problem.dtype])
        if name in self.held:
            stamp, array = self.held.pop(name)
            if stamp == _stamp(path):
                return array
        remake = _remake(self.problem, self.folder)
        data = read_exact(path, self.problem.tensor_bytes(name), remake)
        self.hashes[name] = sha256(data.data)
        if self.meta is not None and listed.get(path.name) != self.hashes[name]:
            raise DataFault(
                f"{path} is not the file {META} describes",
                f"its SHA-256 is {self.hashes[name][:16]}…, {META} says {str(listed.get(path.name))[:16]}…",
                remake,
            )
        return data.view(STORAGE[self.problem.tensor_dtype(name)]).reshape(self.problem.shape(name))

    def read_inputs(self, names: Iterable[str], allow_nonfinite: bool = False) -> dict[str, Array]:
        """Several tensors by name. Raises DataFault, which names the first NaN or infinity unless these are allowed."""
        names = list(names)
        size = sum(map(self.problem.tensor_bytes, names))
        tensors = dict(zip(names, each(self.read, names, size), strict=True))
        self.held.clear()
        finite = each(lambda name: allow_nonfinite or bool(np.isfinite(tensors[name]).all()), names, size)
        for (name, array), good in zip(tensors.items(), finite, strict=True):
            if not good:
                at = tuple(int(i) for i in np.unravel_index(int(np.isfinite(array).argmin()), array.shape))
                what = f"{self.folder / name}.bin holds {float(array[at])} at index {at}"
                hint = f"add --allow-nonfinite to run all the same, or {_remake(self.problem, self.folder)}"
                raise DataFault(what, "attention of data that is not finite is not finite", hint)
        return tensors

    def digest(self, name: str) -> str:
        """The SHA-256 of an input tensor; its file is read where it has not been. Raises DataFault."""
        if name not in self.hashes:
            self.read(name)
        return self.hashes[name]


# -- inputs -----------------------------------------------------------------------------------------------------------


def write(problem: Problem, seed: int, root: Path, force: bool = False, progress: Callable[[str], None] = lambda text: None) -> Dataset:
    """Generate a problem's inputs into root/<problem.folder>; where exactly these are there already, write nothing.

    progress receives what is being done, "N/M" of the numbers while they are drawn. Takes the folder's lock. Raises DataFault where the
    folder holds other data and force is not given, DiskFault where it
    cannot be written, UsageFault where the problem is too large for this machine.
    """
    folder = root / problem.folder
    if folder.is_dir():
        settle(folder)
    if not force and _holds_data(folder):
        return _unchanged(folder, problem, seed, progress)
    check_size(problem, root)
    created = _make(folder)
    with locked(folder):
        if not force and _holds_data(folder):  # another run's, since it was looked at
            return _unchanged(folder, problem, seed, progress)
        try:
            _generated(folder, problem, seed, progress)
        except BaseException:
            if created:  # by this run, which holds it: an empty folder of another run's is not removed
                with suppress(OSError):
                    folder.rmdir()
            raise
    return open_(folder)


def _generated(folder: Path, problem: Problem, seed: int, progress: Callable[[str], None]) -> None:
    """Draw the inputs, and write them with meta.json: a tensor is hashed and written while the next is drawn."""
    with gathered(folder, (META, *(f"{name}.bin" for name in INPUTS))) as give:
        given = {
            f"{name}.bin": give(f"{name}.bin", array.view(np.uint8).reshape(-1).data)
            for name, array in one_by_one(problem, seed, progress=progress)
        }
        progress(f"writes {folder}")
        meta = {
            "format": FORMAT,
            "shape": _shape(problem),
            "dtype": problem.dtype,
            **({"dtype_kv": problem.dtype_kv} if problem.has_own_dtype_kv else {}),
            "seed": seed,
            "recipe": RECIPE,
            "layout": LAYOUT,
            "sha256": {name: made.result()["sha256"] for name, made in given.items()},
            "versions": {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__},
        }
        give(META, json_bytes(meta))


def _holds_data(folder: Path) -> bool:
    """Whether a folder has anything of a name that gen-data or the run after it would write, a dangling link among them."""
    names = (*INPUTS, *WRITTEN)
    return any(os.path.lexists(folder / name) for name in (META, OUTPUTS, *(f"{name}.bin" for name in names)))


def _make(folder: Path) -> bool:
    """Make a folder and its parents; returns whether it is new. Raises DiskFault."""
    make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        make_folder(folder)  # raises where it is a file
        return False
    except OSError as error:
        raise disk_fault(folder, error) from None
    return True


def _unchanged(folder: Path, problem: Problem, seed: int, progress: Callable[[str], None]) -> Dataset:
    """The dataset in a folder that holds exactly this problem and seed, every file checked. Raises DataFault."""
    hint = f"{_remake(problem, folder, seed)}, or use another --output-dir"
    dataset = open_(folder)
    if dataset.meta is None:
        raise DataFault(f"{folder} already holds data of unknown origin", f"it has no {META}", hint)
    if dataset.seed != seed or dataset.meta.get("recipe") != RECIPE or dataset.problem.folder != problem.folder:
        there = f"{dataset.problem.folder} of seed {dataset.seed}"
        raise DataFault(f"{folder} already holds other data", f"{there}; asked for {problem.folder} of seed {seed}", hint)
    progress(f"reads {folder}")
    stamps = {name: _stamp(folder / f"{name}.bin") for name in INPUTS}
    arrays = each(dataset.read, INPUTS, sum(map(problem.tensor_bytes, INPUTS)))
    dataset.held.update({name: (stamps[name], array) for name, array in zip(INPUTS, arrays, strict=True) if stamps[name]})
    return dataset


def _stamp(path: Path) -> object:
    """What is another after a file was written to or replaced; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_(folder: Path) -> Dataset:
    """The dataset in a folder, described by meta.json or, with a warning, by the folder's name.

    Raises DataFault where there is no such folder, its name and meta.json disagree, or neither describes it.
    """
    folder = Path(os.path.abspath(folder))  # not resolved: the shape may be in the name of a link
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
        raise DataFault(f"{folder} is not a data folder", why, "fa-cli gen-data makes one")
    settle(folder)
    named = Problem.from_folder(folder.name)
    tensors = tuple(name for name in INPUTS if os.path.lexists(folder / f"{name}.bin"))
    if not os.path.lexists(folder / META):
        if named is None:
            why = f"no {META}, and its name is not of the form B2_H8_S512_D64"
            raise DataFault(f"{folder} does not say what it holds", why, "fa-cli gen-data makes a data folder")
        warning = f"{folder} has no {META}: shape and dtype are taken from its name, nothing can be checked"
        return Dataset(folder, named, None, None, tensors, (warning,))
    hint = _remake(named, folder)
    meta = read_json(folder / META, hint, _META, _META_OPTIONAL)
    try:
        problem = Problem.of(**meta["shape"], dtype=meta["dtype"], dtype_kv=meta.get("dtype_kv"))
    except UsageFault as fault:
        raise DataFault(f"{folder / META}: {fault.what}", fault.why, hint) from None
    if named is not None and named.folder != problem.folder:
        why = f"it says {problem.folder}, the folder's name {named.folder}"
        raise DataFault(f"{folder / META} describes another problem", why, hint)
    return Dataset(folder, problem, meta["seed"], meta, tensors)


def _shape(problem: Problem) -> dict[str, int]:
    """The inputs' sizes for meta.json. Mask and scale belong to a run (outputs.json)."""
    p = problem
    sizes = {"batch": p.batch, "heads": p.heads_q, "seq": p.seq_q, "dim": p.head_dim, "heads_kv": p.heads_kv, "seq_kv": p.seq_kv}
    return sizes | ({"dim_v": p.head_dim_v} if p.has_own_dim_v else {})


def _remake(problem: Problem | None, folder: Path, seed: int = 42) -> str:
    """The hint that generates a folder again: the command for exactly this folder, where gen-data would give it this name."""
    if problem is None or problem.folder != folder.name:
        return "generate another: fa-cli gen-data makes a data folder"
    p = problem
    text = f"generate it again: fa-cli gen-data --batch {p.batch} --heads {p.heads_q} --seq {p.seq_q} --dim {p.head_dim}"
    text += f" --dim-v {p.head_dim_v}" if p.has_own_dim_v else ""
    text += f" --kv-heads {p.heads_kv}" if p.heads_kv != p.heads_q else ""
    text += f" --seq-kv {p.seq_kv}" if p.seq_kv != p.seq_q else ""
    text += f" --dtype {p.dtype}" if p.dtype != "float32" else ""
    text += f" --kv-dtype {p.dtype_kv}" if p.has_own_dtype_kv else ""
    text += f" --seed {seed}" if seed != 42 else ""
    root = Path(os.path.relpath(folder.parent)) if folder.is_relative_to(Path.cwd()) else folder.parent
    return text + (f" --output-dir {shlex.quote(str(root))}" if root != Path("data") else "") + " --force"


# -- outputs ----------------------------------------------------------------------------------------------------------


def write_outputs(dataset: Dataset, outputs: Mapping[str, Array], record: Mapping[str, object]) -> None:
    """Write a run's outputs (host storage arrays) next to its inputs, and outputs.json last. The caller holds the folder's lock.

    record: kernel, mode, causal, causal_shift, scale, mask, score, sinks, tensors, dtype, verdict, and by pass verdicts, arithmetic,
    source_hash; the hashes of inputs and outputs are added here. A backward run keeps the forward's O and logsumexp in the list, and
    their record under "forward".
    Pictures of the errors of earlier outputs are removed. Raises DiskFault, DataFault.
    """
    files: dict[str, bytes | memoryview] = {
        f"{name}.bin": np.ascontiguousarray(array).view(np.uint8).reshape(-1).data for name, array in outputs.items()
    }
    listed = dict(zip(files, each(sha256, files.values(), sum(map(len, files.values()))), strict=True))
    whole = dict(record)
    if record["mode"] == "backward":
        earlier = read_json(dataset.folder / OUTPUTS, required=_OUTPUTS)
        kept = {key: earlier[key] for key in ("arithmetic",) if key in earlier}
        whole["forward"] = earlier.get("forward", {key: earlier.get(key) for key in ("kernel", "source_hash")} | kept)
        listed |= {name: digest for name, digest in earlier["outputs"].items() if name in ("O.bin", "logsumexp.bin")}
    inputs = READS["forward"] if record["mode"] == "forward" else INPUTS
    whole |= {"inputs": {f"{name}.bin": dataset.digest(name) for name in inputs}, "outputs": listed}
    write_files(dataset.folder, {**files, OUTPUTS: json_bytes(whole)})
    for name in WRITTEN:
        for picture in dataset.folder.glob(f"error_*{name}.png"):  # where the outputs of an earlier run were wrong
            with suppress(OSError):
                picture.unlink()


def read_forward(dataset: Dataset, problem: Problem, readers: Mapping[str, str] | None = None) -> dict[str, Array]:
    """The folder's O and logsumexp, in the problem's shapes and storage types, for a backward pass on the dataset's inputs.

    readers: the kernels that read them, name -> class of arithmetic. Raises DataFault where they are missing, not listed in outputs.json,
    of another hash, of other inputs, causal, causal_shift, scale, mask, score, sinks, tensors or dtype, wrong, or in tf32 for a kernel that is
    judged as f32. A record without causal_shift, mask, score, sinks or tensors, from an earlier version, has the default.
    """
    hint, folder = "run both passes: --mode both, or before it the forward pass of any kernel: --mode forward", dataset.folder
    record = read_json(folder / OUTPUTS, hint, _OUTPUTS, _OUTPUTS_OPTIONAL)
    _refuse_forward(folder, record, readers or {}, hint)
    inputs, listed = record["inputs"], record["outputs"]
    record = {"causal_shift": problem.default_shift, "tensors": {}, "page_size": 0, "lengths": []} | record
    for what, made, wanted in (
        *((key, record.get(key), getattr(problem, key)) for key in ("causal", "causal_shift", "scale", "mask", "score", "sinks", "dtype")),
        ("tensors", record["tensors"], problem.hashes.get("tensors", {})),
        ("page_size", record["page_size"], problem.page_size),
        ("lengths", record["lengths"], list(problem.lengths)),
        *((f"{name}.bin", inputs.get(f"{name}.bin"), dataset.digest(name)) for name in READS["forward"]),
    ):
        if made != wanted or type(made) is not type(wanted):
            raise DataFault(f"{folder} holds another run's forward", f"{what} was {made} then and is {wanted} now", hint)
    outputs = dict[str, Array]()
    for name in WRITES["forward"]:
        path = folder / f"{name}.bin"
        if path.name not in listed:
            raise DataFault(f"{folder / OUTPUTS} does not list {path.name}", "no forward pass finished here", hint)
        data = read_exact(path, problem.tensor_bytes(name), hint)
        if sha256(data.data) != listed[path.name]:
            raise DataFault(f"{path} is not the file {OUTPUTS} lists", "it was changed, or its run was interrupted", hint)
        outputs[name] = data.view(STORAGE[problem.tensor_dtype(name)]).reshape(problem.shape(name))
    return outputs


def _refuse_forward(folder: Path, record: Json, readers: Mapping[str, str], hint: str) -> None:
    """Raise DataFault where a forward pass failed its check, or is coarser than its readers: their gradients would be called wrong."""
    made = record.get("forward", record)  # a backward run keeps it there; its own verdict says nothing of the forward pass
    verdict = record.get("verdicts", {}).get("forward", record.get("verdict", "PASS")) if made is record else "PASS"
    if verdict != "PASS":
        raise DataFault(f"{folder} holds a wrong forward pass", f"{made.get('kernel')} wrote it, and its verdict was {verdict}", hint)
    finer = next((name for name, arithmetic in readers.items() if arithmetic != "tf32"), None)
    if finer and made.get("arithmetic", {}).get("forward") == "tf32":
        why = f"{made.get('kernel')} wrote it; {finer} is judged as {readers[finer]}, and its gradients would have the error of tf32"
        raise DataFault(f"{folder} holds a forward pass in tf32", why, f"before it the forward pass in {readers[finer]}: --mode forward")


# -- size -------------------------------------------------------------------------------------------------------------


def check_size(problem: Problem, folder: Path | None = None) -> None:
    """Raise UsageFault where inputs and outputs exceed 90 % of the free memory, DiskFault where they do of the free disk at folder."""
    need = sum(problem.tensor_bytes(name) for name in (*INPUTS, *WRITES["forward"], *WRITES["backward"]))
    text = f"its tensors take {need / 1e9:.3g} GB, 90 % of the"
    if need > 0.9 * (free := available_memory()):
        why = f"{text} memory is {0.9 * free / 1e9:.3g} GB"
        raise UsageFault(f"{problem.folder} is too large for this machine", why, "use a smaller --batch, --heads or --seq")
    if folder is None:
        return
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if need > 0.9 * (free := shutil.disk_usage(place).free):
        why = f"{text} free disk is {0.9 * free / 1e9:.3g} GB"
        raise DiskFault(
            f"no room for {problem.folder} in {place}", why, f"free some space (df -h {place}), or --output-dir on another disk"
        )
