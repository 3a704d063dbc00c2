"""Data folders: what is written is what is read, and every bad file is a fault with its exit code, a reason and a hint."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import SMALL, fails, outputs, record

from harness import files
from harness.dataset import folder as data
from harness.dataset import generate as drawing
from harness.dataset.folder import STORAGE
from harness.dataset.generate import generate
from harness.fault import DataFault, DiskFault, UsageFault
from harness.problem import Problem

ROOT = Path(__file__).resolve().parent.parent.parent


# -- making data ------------------------------------------------------------------------------------------------------


def test_bytes_are_seed_002s() -> None:
    """Q, K and V are byte for byte numpy.random.seed(42); randn(...).astype(float32), drawn in that order; dO comes after."""
    np.random.seed(42)
    wanted = [np.random.randn(2, 8, 32, 64).astype(np.float32) for _ in range(3)]
    found = generate(Problem.of(seq=32), 42)
    for name, array in zip("QKV", wanted, strict=True):
        assert found[name].tobytes() == array.tobytes()
    assert found["dO"].tobytes() == np.random.randn(2, 8, 32, 64).astype(np.float32).tobytes()
    digest = hashlib.sha256(generate(Problem.of(1, 1, 4, 4), 42)["Q"].tobytes()).hexdigest()
    assert digest.startswith("421a11a1893a054b")


def test_subsets_and_scale() -> None:
    """A tensor does not depend on which others were asked for; input_scale multiplies Q and K only, before the cast."""
    whole = generate(SMALL, 3)
    assert list(generate(SMALL, 3, ("dO",))) == ["dO"]
    assert (generate(SMALL, 3, ("dO",))["dO"] == whole["dO"]).all()
    scaled = generate(SMALL, 3, input_scale=10.0)
    exact = np.random.RandomState(3).randn(*SMALL.shape("Q"))
    assert (scaled["Q"] == (exact * 10).astype(np.float32)).all()
    assert (scaled["V"] == whole["V"]).all() and (scaled["dO"] == whole["dO"]).all() and (scaled["K"] != whole["K"]).all()


@pytest.mark.parametrize("above", [1 << 26, 0], ids=["RandomState", "philox"])
def test_kept_are_the_numbers_drawn_anew(monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    """The next cell of a sweep: the same bits as drawn for itself, whatever was drawn before, and no caller can change the next one's."""
    monkeypatch.setattr(drawing, "ABOVE", above)
    monkeypatch.setattr(drawing, "CHUNK", 1000)
    first = Problem.of(2, 4, 96, 16, dtype="bfloat16")
    cells = [
        (first, 42, "QKV"),
        (Problem.of(4, 2, 192, 8, dtype="bfloat16", causal=True), 42, "QKV"),  # as many elements
        (first, 42, ("dO",)),  # was not drawn
        (first, 42, drawing.INPUTS),
        (first, 43, drawing.INPUTS),
        (first.with_(dtype="float16"), 43, drawing.INPUTS),
        (Problem.of(2, 4, 96, 16, heads_kv=2, dtype="float16"), 43, ("V",)),  # Q has as many: where V begins is another place
        (Problem.of(1, 8, 96, 16, heads_kv=4, dtype="float16"), 43, ("V",)),
        (first, 42, "QKV"),
        (Problem.of(2, 4, 48, 16, seq_kv=96, dtype="bfloat16"), 42, "QKV"),  # K and V have as many: by Philox only Q is drawn
    ]
    drawn = []
    real = drawing.inputs
    monkeypatch.setattr(drawing, "inputs", lambda *given: drawn.append(given) or real(*given))
    for problem, seed, names in cells:
        found, wanted = drawing.kept(problem, seed, names), real(problem, seed, names)
        assert list(found) == list(wanted)
        for name, array in wanted.items():
            assert found[name].shape == array.shape and found[name].dtype == array.dtype
            assert found[name].tobytes() == array.tobytes(), (problem, name)
            with pytest.raises(ValueError, match="read-only"):
                found[name][:] = 0
    assert [given[:2] for given in drawn] == [cells[i][:2] for i in (0, 2, 3, 4, 5, 6, 8, 9)]
    assert drawn[-1][2] == (["Q"] if above == 0 else ["Q", "K", "V"])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set, and none where memory has not AFFORD times as much. Numbers that are kept and wrong would be seen by the test above."""
    drawing.kept(SMALL, 5, "QK")
    held = drawing._last
    assert set(held) == {"Q", "K"}
    held["Q"] = held["Q"][0], np.zeros_like(held["Q"][1])
    assert not drawing.kept(SMALL, 5, "Q")["Q"].any() and set(drawing._last) == {"Q"}
    monkeypatch.setattr(drawing, "available_memory", lambda: drawing.AFFORD * 3 * held["K"][1].nbytes - 1)
    assert drawing.kept(SMALL, 6, "QKV")["Q"].any() and drawing._last == {}


@pytest.mark.parametrize("dtype", STORAGE)
def test_written_is_read(tmp_path: Path, dtype: str) -> None:
    """Every type comes back bit for bit; meta.json says what it is; nothing temporary stays."""
    problem = Problem.of(1, 4, 5, 3, heads_kv=2, seq_kv=7, dtype=dtype)
    written = data.write(problem, 7, tmp_path / "not" / "yet")
    assert sorted(p.name for p in written.folder.iterdir()) == ["K.bin", "Q.bin", "V.bin", "dO.bin", "meta.json"]
    assert (written.folder / "Q.bin").stat().st_size == problem.tensor_bytes("Q")
    opened = data.open_(written.folder)
    assert (opened.problem, opened.seed, opened.warnings) == (problem, 7, ())
    for name, array in generate(problem, 7).items():
        read = opened.read(name)
        assert read.dtype == STORAGE[dtype] and read.shape == problem.shape(name)
        assert read.tobytes() == array.tobytes()
    meta = json.loads((written.folder / "meta.json").read_text())
    assert meta["sha256"]["K.bin"] == hashlib.sha256((written.folder / "K.bin").read_bytes()).hexdigest()


def test_a_folder_whose_v_has_a_head_dim_of_its_own(tmp_path: Path) -> None:
    """Its files, name and meta.json have it, and the hint that makes it again; a folder without one says nothing of it."""
    problem = Problem.of(1, 2, 5, 3, seq_kv=7, dim_v=6)
    written = data.write(problem, 7, tmp_path)
    assert written.folder.name == "B1_H2_S5_D3_Dv6_Skv7" and json.loads((written.folder / "meta.json").read_text())["shape"]["dim_v"] == 6
    sizes = {name: (written.folder / f"{name}.bin").stat().st_size for name in drawing.INPUTS}
    assert sizes == {"Q": 4 * 30, "K": 4 * 42, "V": 4 * 84, "dO": 4 * 60}
    opened = data.open_(written.folder)
    assert opened.problem == problem and opened.read("V").shape == (1, 2, 7, 6)
    (written.folder / "V.bin").unlink()
    assert "--dim 3 --dim-v 6 --seq-kv 7" in fails(DataFault, "is missing", lambda: opened.read("V")).hint
    plain = data.write(problem.with_(head_dim_v=None), 7, tmp_path)
    assert "dim_v" not in json.loads((plain.folder / "meta.json").read_text())["shape"]


def test_again_other_seed_and_force(tmp_path: Path, folder: Path) -> None:
    """The same data are left as they are; other data are exit 3 with a hint; --force replaces them."""
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.iterdir()}
    assert data.write(SMALL, 42, tmp_path).seed == 42
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.iterdir()} == before
    fault = fails(DataFault, "already holds other data", lambda: data.write(SMALL, 43, tmp_path))
    assert fault.exit_code == 3 and "--force" in fault.hint
    assert data.write(SMALL, 43, tmp_path, force=True).seed == 43
    (folder / "meta.json").unlink()
    fails(DataFault, "unknown origin", lambda: data.write(SMALL, 43, tmp_path))
    fails(UsageFault, "seed is -1", lambda: data.write(SMALL, -1, tmp_path, force=True))


def test_what_was_compared_is_not_read_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on data that are there reads and hashes each file once; one that was changed meanwhile is read again, and found."""
    read, real = list[str](), data.read_exact

    def counted(path: Path, *given: Any) -> Any:
        read.append(path.name)
        return real(path, *given)

    monkeypatch.setattr(data, "read_exact", counted)
    found = data.write(SMALL, 42, tmp_path)
    inputs = found.read_inputs(("Q", "K", "V"))
    assert sorted(read) == ["K.bin", "Q.bin", "V.bin", "dO.bin"] and not found.held
    assert all((inputs[name] == array).all() for name, array in generate(SMALL, 42, ("Q", "K", "V")).items())
    assert found.read("Q").tobytes() == inputs["Q"].tobytes() and read[4:] == ["Q.bin"]
    for change in (lambda path: path.write_bytes(bytes(path.stat().st_size)), lambda path: path.unlink()):
        found = data.write(SMALL, 42, tmp_path)
        change(folder / "K.bin")
        fails(DataFault, "K.bin", lambda found=found: found.read_inputs(("Q", "K")))
        data.write(SMALL, 42, tmp_path, force=True)


# -- bad input --------------------------------------------------------------------------------------------------------


def _resize(change: int) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        size = path.stat().st_size + change
        path.write_bytes((path.read_bytes() + bytes(8))[:size])

    return do


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        path.unlink()
        make(path)

    return do


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "four bytes short": (_resize(-4), "is too short"),
    "two bytes short": (_resize(-2), "is too short"),
    "three bytes long": (_resize(3), "is too long"),
    "empty": (lambda path: path.write_bytes(b"") and None, "is empty"),
    "other content": (lambda path: path.write_bytes(bytes(path.stat().st_size)) and None, "is not the file meta.json describes"),
    "a FIFO": (_replace(os.mkfifo), "is not a regular file"),
    "a link to /dev/zero": (_replace(lambda path: path.symlink_to("/dev/zero")), "is not a regular file"),
    "a folder": (_replace(Path.mkdir), "is not a regular file"),
    "a broken link": (_replace(lambda path: path.symlink_to("nowhere")), "is missing"),
    "a link to itself": (_replace(lambda path: path.symlink_to(path.name)), "cannot be read"),
}


@pytest.mark.parametrize("tensor", ["Q", "dO"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(folder: Path, case: str, tensor: str) -> None:
    """Each is exit 3 with its reason, at once; a listed dO.bin is not taken for ones; with or without meta.json where that can be."""
    spoil, word = BAD_FILES[case]
    spoil(folder / f"{tensor}.bin")
    start = time.process_time()
    fault = fails(DataFault, word, lambda: data.open_(folder).read(tensor))
    assert fault.exit_code == 3 and time.process_time() - start < 1
    assert f"{tensor}.bin" in fault.what
    if case not in ("other content", "missing"):
        (folder / "meta.json").unlink()
        fails(DataFault, word, lambda: data.open_(folder).read(tensor))


def test_a_link_to_a_file_is_followed(folder: Path, tmp_path: Path) -> None:
    """Large data may lie elsewhere."""
    wanted = (folder / "Q.bin").read_bytes()
    (folder / "Q.bin").rename(tmp_path / "elsewhere")
    (folder / "Q.bin").symlink_to(tmp_path / "elsewhere")
    assert data.open_(folder).read("Q").tobytes() == wanted


BAD_META: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "not JSON": (lambda meta: "{", "is not JSON"),
    "NaN": (lambda meta: '{"shape": NaN}', "is not JSON"),
    "not text": (lambda meta: b"\xff\xfe", "is not JSON"),
    "a list": (lambda meta: "[]", "is not a JSON object"),
    "nested without end": (lambda meta: "[" * 100000, "is not JSON"),
    "no shape": (lambda meta: {k: v for k, v in meta.items() if k != "shape"}, "lacks 'shape'"),
    "shape a list": (lambda meta: meta | {"shape": [1, 2, 6, 4]}, "for 'shape'"),
    "shape of text": (lambda meta: meta | {"shape": meta["shape"] | {"seq": "6"}}, "for 'shape'"),
    "shape of true": (lambda meta: meta | {"shape": meta["shape"] | {"batch": True}}, "for 'shape'"),
    "an empty shape": (lambda meta: meta | {"shape": meta["shape"] | {"seq": 0}}, "seq is 0"),
    "hashes a text": (lambda meta: meta | {"sha256": "abc"}, "for 'sha256'"),
    "another shape": (lambda meta: meta | {"shape": meta["shape"] | {"seq": 7, "seq_kv": 7}}, "describes another problem"),
    "another dtype": (lambda meta: meta | {"dtype": "float16"}, "describes another problem"),
    "an unknown dtype": (lambda meta: meta | {"dtype": "int8"}, "unknown dtype"),
    "no dtype": (lambda meta: {k: v for k, v in meta.items() if k != "dtype"}, "lacks 'dtype'"),
    "another format": (lambda meta: meta | {"format": 99}, "for 'format', which is 1"),
    "another layout": (lambda meta: meta | {"layout": "big-endian"}, "for 'layout'"),
    "deeply nested": (lambda meta: '{"a":' * 20 + "1" + "}" * 20, "nested deeper"),
    "a number beyond 64 bits": (lambda meta: meta | {"seed": 10**30}, "does not write"),
    "an infinite number": (lambda meta: '{"seed": 1e400}', "does not write"),
    "half a character": (lambda meta: r'{"recipe": "\ud800"}', "does not write"),
    "a number of 5000 digits": (lambda meta: '{"seed": ' + "1" * 5000 + "}", "is not JSON"),
    "a size beyond 32 bits": (lambda meta: meta | {"shape": meta["shape"] | {"batch": 2**40}}, "batch is above 2\\^40"),
    "too large": (lambda meta: " " * (files.JSON_LIMIT + 1), "too large to be a record"),
}


@pytest.mark.parametrize("case", BAD_META)
def test_bad_meta(folder: Path, case: str) -> None:
    """A record that cannot be, or that says other than the folder's name, is exit 3."""
    make, word = BAD_META[case]
    made = make(json.loads((folder / "meta.json").read_text()))
    content = made if isinstance(made, bytes) else (made if isinstance(made, str) else json.dumps(made)).encode()
    (folder / "meta.json").write_bytes(content)
    assert fails(DataFault, word, lambda: data.open_(folder)).exit_code == 3


def test_a_hash_that_is_not_listed(folder: Path) -> None:
    """meta.json must vouch for every file that is read."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["sha256"]["V.bin"]
    (folder / "meta.json").write_text(json.dumps(meta))
    fails(DataFault, "is not the file meta.json describes", lambda: data.open_(folder).read("V"))


def test_the_hint_names_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the hint makes the damaged folder again, wherever it lies; a folder of another name gets none."""
    monkeypatch.chdir(tmp_path)
    away = tmp_path.parent / f"{tmp_path.name}-away"
    for root, words in ((Path("data"), ""), (Path("my data"), " --output-dir 'my data'"), (away, f" --output-dir {away}")):
        made = data.write(SMALL, 1, root)
        (made.folder / "Q.bin").unlink()
        fault = fails(DataFault, "is missing", lambda made=made: made.read("Q"))
        assert fault.hint.endswith(f"fa-cli gen-data --batch 1 --heads 2 --seq 6 --dim 4{words} --force")
    renamed = made.folder.rename(tmp_path / "mine")
    assert "--batch" not in fails(DataFault, "is missing", lambda: data.open_(renamed).read("Q")).hint


def test_folders_that_are_none(tmp_path: Path) -> None:
    """Missing, a file, or a name that says nothing."""
    fails(DataFault, "is not a data folder", lambda: data.open_(tmp_path / "B1_H1_S1_D1"))
    (tmp_path / "B1_H1_S2_D1").write_text("")
    fails(DataFault, "is not a data folder", lambda: data.open_(tmp_path / "B1_H1_S2_D1"))
    (tmp_path / "mine").mkdir()
    fails(DataFault, "does not say what it holds", lambda: data.open_(tmp_path / "mine"))
    (tmp_path / "B1_H1_S0_D1").mkdir()
    assert fails(UsageFault, "seq is 0", lambda: data.open_(tmp_path / "B1_H1_S0_D1")).exit_code == 2


def test_without_meta_the_name_says(folder: Path) -> None:
    """Seed 002's folders: read with a warning; a missing dO.bin is all ones."""
    wanted = data.open_(folder).read("Q")
    (folder / "meta.json").unlink()
    (folder / "dO.bin").unlink()
    opened = data.open_(Path(f"{folder}/"))
    assert (opened.problem, opened.seed, opened.tensors) == (SMALL, None, ("Q", "K", "V"))
    assert len(opened.warnings) == 1 and "no meta.json" in opened.warnings[0]
    assert (opened.read("Q") == wanted).all()
    assert (opened.read("dO") == 1).all() and opened.digest("dO") == data.ONES


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("tensor", "value"), [("Q", np.nan), ("K", np.inf), ("dO", -np.inf)])
def test_data_that_are_not_finite(tmp_path: Path, tensor: str, value: float, dtype: str) -> None:
    """Exit 3, naming the first, unless they are allowed."""
    folder = tmp_path / SMALL.with_(dtype=dtype).folder
    folder.mkdir()
    for name, array in generate(SMALL.with_(dtype=dtype), 1).items():
        if name == tensor:
            array[0, 1, 2, 3:] = value
            array[0, 1, 5] = value
        array.tofile(folder / f"{name}.bin")
    opened = data.open_(folder)
    value = np.nan if dtype == "float8_e4m3" else value  # it has no infinity
    fault = fails(DataFault, rf"{tensor}.bin holds {value} at index \(0, 1, 2, 3\)", lambda: opened.read_inputs(data.INPUTS))
    assert fault.exit_code == 3 and "--allow-nonfinite" in fault.hint
    assert set(opened.read_inputs(data.INPUTS, allow_nonfinite=True)) == set(data.INPUTS)


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 10^9 is refused at once, before anything is made; so is what fits memory and not the disk."""
    fault = fails(UsageFault, "too large for this machine", lambda: data.write(Problem.of(10**9, 8, 512, 64), 1, tmp_path))
    assert fault.exit_code == 2 and not list(tmp_path.iterdir())
    data.check_size(SMALL, tmp_path / "not" / "yet")
    monkeypatch.setattr(data.shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    fails(DiskFault, "no room for", lambda: data.check_size(SMALL, tmp_path))
    assert data.available_memory() > 1 << 20


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_and_their_record(folder: Path) -> None:
    """outputs.json is written last and lists what was written, with the hashes of what it was made from."""
    opened = data.open_(folder)
    data.write_outputs(opened, outputs(), record())
    written = json.loads((folder / "outputs.json").read_text())
    assert sorted(written["outputs"]) == ["O.bin", "dK.bin", "dQ.bin", "dV.bin", "logsumexp.bin"]
    assert sorted(written["inputs"]) == ["K.bin", "Q.bin", "V.bin", "dO.bin"]
    assert written["inputs"]["Q.bin"] == hashlib.sha256((folder / "Q.bin").read_bytes()).hexdigest()
    assert written["outputs"]["dK.bin"] == hashlib.sha256((folder / "dK.bin").read_bytes()).hexdigest()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    with pytest.raises(ValueError, match="JSON"):
        data.write_outputs(opened, outputs(), record(scale=float("nan")))


def test_backward_reads_the_forward(folder: Path) -> None:
    """O and logsumexp as they were written, also after a backward run wrote beside them."""
    opened = data.open_(folder)
    forward = {name: outputs()[name] for name in ("O", "logsumexp")}
    data.write_outputs(opened, forward, record("forward", kernel="fa1"))
    assert "dO.bin" not in json.loads((folder / "outputs.json").read_text())["inputs"]
    for _ in range(2):
        out, logsumexp = data.read_forward(data.open_(folder), SMALL).values()
        assert (out == 1).all() and out.shape == SMALL.shape("O") and logsumexp.dtype == np.float32
        data.write_outputs(opened, {name: outputs()[name] for name in ("dQ", "dK", "dV")}, record("backward"))
        written = json.loads((folder / "outputs.json").read_text())
        assert written["forward"] == {"kernel": "fa1", "source_hash": "0"} and len(written["outputs"]) == 5


NOT_THIS_FORWARD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no record": (lambda folder: (folder / "outputs.json").unlink(), "outputs.json is missing"),
    "no O": (lambda folder: (folder / "O.bin").unlink(), "O.bin is missing"),
    "short logsumexp": (lambda folder: _resize(-4)(folder / "logsumexp.bin"), "logsumexp.bin is too short"),
    "O changed": (lambda folder: (folder / "O.bin").write_bytes(bytes(SMALL.tensor_bytes("O"))), "is not the file outputs.json lists"),
    "a FIFO": (lambda folder: _replace(os.mkfifo)(folder / "O.bin"), "is not a regular file"),
    "other data": (lambda folder: data.write(SMALL, 5, folder.parent, force=True), "holds another run's forward"),
    "record not JSON": (lambda folder: (folder / "outputs.json").write_text("{"), "is not JSON"),
    "record of nothing": (lambda folder: (folder / "outputs.json").write_text("{}"), "lacks 'inputs'"),
}


@pytest.mark.parametrize("case", NOT_THIS_FORWARD)
def test_backward_refuses_another_forward(folder: Path, case: str) -> None:
    """Exit 3 with the way out: --mode both."""
    data.write_outputs(data.open_(folder), outputs(), record())
    spoil, word = NOT_THIS_FORWARD[case]
    spoil(folder)
    fault = fails(DataFault, word, lambda: data.read_forward(data.open_(folder), SMALL))
    assert fault.exit_code == 3 and "--mode both" in fault.hint


@pytest.mark.parametrize("change", [{"causal": True}, {"causal_shift": 1}, {"scale": 0.25}, {"dtype": "float16"}, {"causal": 0}])
def test_backward_refuses_other_settings(folder: Path, change: dict[str, Any]) -> None:
    """A forward made with another mask, scale or type is not this problem's."""
    data.write_outputs(data.open_(folder), outputs(), record(**change))
    fails(DataFault, f"{next(iter(change))} was", lambda: data.read_forward(data.open_(folder), SMALL))


def test_a_record_without_a_shift_is_of_the_default(folder: Path) -> None:
    """Earlier versions knew no other: their record serves the default, and refuses a shift that was chosen since."""
    old = record(causal=True)
    del old["causal_shift"]
    data.write_outputs(data.open_(folder), outputs(), old)
    problem = SMALL.with_(causal=True)
    data.read_forward(data.open_(folder), problem)
    for shift in (-2, 2):
        word = f"causal_shift was 0 then and is {shift} now"
        fails(DataFault, word, lambda shift=shift: data.read_forward(data.open_(folder), problem.with_(causal_shift=shift)))
    data.write_outputs(data.open_(folder), outputs(), record(causal=True, causal_shift=2))
    data.read_forward(data.open_(folder), problem.with_(causal_shift=2))


def test_backward_refuses_what_is_not_listed(folder: Path) -> None:
    """A file that outputs.json does not name came from somewhere else."""
    data.write_outputs(data.open_(folder), outputs(), record())
    written = json.loads((folder / "outputs.json").read_text())
    del written["outputs"]["logsumexp.bin"]
    (folder / "outputs.json").write_text(json.dumps(written))
    fails(DataFault, "does not list logsumexp.bin", lambda: data.read_forward(data.open_(folder), SMALL))
