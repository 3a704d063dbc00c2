"""A GPU's first run: what CuPy must compile for the trial of a kernel, counted on numpy; what is judged on the CPU; the script."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from harness.array import copied, every
from harness.backends import pick
from harness.check import moments
from harness.check.contender import _finite, _longest, run_kernel
from harness.check.oracle import Oracle, small
from harness.check.tensors import put
from harness.dataset.generate import generate
from harness.fault import KernelFault
from harness.kernel import find
from harness.problem import Problem

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "launch" / "first_contact.py"


class Device(np.ndarray[Any, Any]):
    """An array on a GPU, on numpy: what would be a kernel of CuPy's is recorded, as operation and types."""

    seen: ClassVar[set[tuple[str, ...]]] = set()

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, out: Any = (), **named: Any) -> Any:
        kinds = tuple(str(each.dtype) if isinstance(each, np.ndarray) and each.ndim else "scalar" for each in given)
        self.seen.add((ufunc.__name__, method, *kinds))
        assert all(isinstance(each, Device) for each in given if isinstance(each, np.ndarray) and each.ndim), (
            "CuPy takes no array of numpy's"
        )
        plain = [np.asarray(each) if isinstance(each, Device) else each for each in given]
        if out:
            named["out"] = tuple(np.asarray(each) for each in out)
        found = getattr(ufunc, method)(*plain, **named)
        return out[0] if out else found.view(Device) if isinstance(found, np.ndarray) else found

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray) or (isinstance(key, tuple) and any(isinstance(each, np.ndarray) for each in key)):
            self.seen.add(("take", str(self.dtype), f"{len(key) if isinstance(key, tuple) else 1} indices"))
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """CuPy copies by the driver between arrays of the same strides, and leaves out the leading ones of what it assigns."""
        target = self[key]
        if not isinstance(value, np.ndarray):
            self.seen.add(("fill", str(self.dtype)))
        else:
            assert isinstance(value, Device), "CuPy takes no array of numpy's"
            squeezed = value.reshape(value.shape[next((i for i, n in enumerate(value.shape) if n != 1), value.ndim) :])
            same = (squeezed.shape, squeezed.strides) == (target.shape, target.strides) and target.flags.c_contiguous
            if not same:
                self.seen.add(("copy", str(value.dtype)))
        super().__setitem__(key, value)

    def copy(self, *given: Any) -> Any:
        self.seen.add(("copy", str(self.dtype)))
        return super().copy(*given)

    def get(self) -> Any:
        return np.array(np.asarray(self))

    def all(self, *given: Any, **named: Any) -> Any:
        self.seen.add(("all with CUB",))
        return super().all(*given, **named)


class Gpu:
    """The CPU engine under a GPU's name, with arrays that record, and a module that has two functions."""

    name = "cuda"

    def __init__(self) -> None:
        self.real = pick("cpu")
        self.xp = SimpleNamespace(
            asarray=lambda a: np.array(a).view(Device),
            empty=lambda shape, dtype: np.empty(shape, dtype).view(Device),
            stack=lambda arrays, axis: np.stack(arrays, axis).view(Device),
        )

    def memory(self, size: int) -> Any:
        return self.real.memory(size).view(Device)

    def fill(self, buffer: Any, value: int) -> None:
        np.asarray(buffer)[:] = value

    def get(self, buffer: Any) -> Any:
        return np.array(np.asarray(buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def seen() -> Iterator[set[tuple[str, ...]]]:
    Device.seen.clear()
    yield Device.seen
    Device.seen.clear()


def kernels(seen: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Those that are compiled: CuPy brings the reduction to the least with it."""
    return {each for each in seen if each[:2] != ("minimum", "reduce")}


def tried(gpu: Any, pass_: str, problem: Problem) -> bool:
    """A kernel judged by an oracle on numpy, then on trial; whether it is right."""
    oracle = Oracle(problem, generate(problem, 1))
    return run_kernel(gpu, find("fa2", pass_), oracle, oracle.inputs_of(pass_)).relaunched(2).passed


@pytest.mark.parametrize(("dtype", "most"), [("float32", 7), ("float16", 10)])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_trial_needs_few_kernels(dtype: str, most: int, pass_: str, seen: set[tuple[str, ...]]) -> None:
    """A first run waits for each of them, one after another. None of them includes CUB."""
    gpu: Any = Gpu()
    problem = Problem.of(2, 2, 40, 16, dtype=dtype)
    assert tried(gpu, pass_, problem)
    needed = kernels(seen)
    assert 3 <= len(needed) <= most, needed


def test_the_recorder_sees_what_it_should(seen: set[tuple[str, ...]]) -> None:
    """`all`, an assigned number, two indices and a copy between other strides are kernels."""
    array = np.zeros((2, 3), np.uint32).view(Device)
    array[:] = 1
    bool((array == array).all())
    array[array[:1, 0].astype(np.int64), array[:1, 0].astype(np.int64)]
    array[:, :2] = copied(Gpu().xp, array[:, 1:])  # type: ignore[arg-type]
    assert {("fill", "uint32"), ("all with CUB",), ("take", "uint32", "2 indices"), ("copy", "uint32")} <= seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contenders_share_what_is_on_the_device(dtype: str) -> None:
    """Inputs are uploaded once for all kernels, outputs come to the host where they are read, and neither is a kernel's own memory."""
    gpu: Any = Gpu()
    problem = Problem.of(2, 2, 40, 20, dtype=dtype)  # rows of float32 have no pitch, rows of 16 bits have one
    oracle = Oracle(problem, generate(problem, 1))
    given = oracle.inputs_of("backward")
    alone = run_kernel(pick("cpu"), find("fa2", "backward"), oracle, given)
    oracle.xp = gpu.xp  # the reference and the baselines stay numpy's: so small a problem is judged there
    vars(oracle)["_rounded"] = {name: put(gpu.xp, array) for name, array in oracle.forward_outputs.items()}
    oracle._device = {name: put(gpu.xp, array) for name, array in oracle.inputs.items()}
    uploads: list[int] = []
    asarray = gpu.xp.asarray

    def counted(array: Any) -> Any:
        uploads.append(array.nbytes)
        return asarray(array)

    gpu.xp.asarray = counted
    first, second = (run_kernel(gpu, find("fa2", "backward"), oracle, given) for _ in range(2))
    assert first.passed and second.passed and not uploads
    one: Any = first.timed  # a Trial
    other: Any = second.timed
    for mine, theirs in ((oracle._device["Q"], other.bound.tensors["Q"].rows()), (one.inputs["Q"], given["Q"])):
        assert not np.shares_memory(np.asarray(mine), np.asarray(theirs))
    assert one.inputs["O"] is other.inputs["O"]
    for name, array in first.outputs.items():
        assert array.dtype == given["Q"].dtype and array.tobytes() == second.outputs[name].tobytes() == alone.outputs[name].tobytes()
    before = first.outputs["dQ"].copy()
    one.bound.poison()
    assert one.outputs.on(gpu.xp)["dQ"].tobytes() == before.tobytes()
    run_kernel(gpu, find("fa2", "backward"), oracle, {**given, "Q": given["Q"].copy()})  # not the oracle's: uploaded for itself
    assert uploads[0] == given["Q"].nbytes and sum(size == given["Q"].nbytes for size in uploads) == 1
    with other.bound.writable():
        value = other.bound.tensors["V"].bits()[:1, :1, :1, :1]
        value ^= value.dtype.type(1)
    assert "changed its input V" in other.ended() and not one.ended()
    np.asarray(oracle._device["Q"]).reshape(-1).view(np.uint8)[1] ^= 64  # a write far outside a kernel's tensors: the next ones are right
    assert "Q, of which every kernel is given a copy, was changed" in one.ended()
    with pytest.raises(KernelFault, match="was given another Q"):
        run_kernel(gpu, find("fa2", "backward"), oracle, given)


def test_a_ratio_is_the_same_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many pairs it is found there, of few, and where a pair has no base, on the host: no array of one meets one of the other."""
    draw, gpu = np.random.default_rng(3), Gpu()
    for few, size, gap in ((100, 200, 0), (100, 200, 7), (1000, 200, 0)):
        monkeypatch.setattr(moments, "_FEW", few)
        squares, base = draw.random((2, size))
        base[:gap] = 0.0
        for significance in (0.0, moments.SIGNIFICANCE):
            found = moments._ratio(gpu.xp, squares.view(Device), base.view(Device), significance)  # type: ignore[arg-type]
            kept = base > 0
            assert found == moments._ratio(np, squares[kept], base[kept], significance) > 0


def test_every() -> None:
    for mask in ([], [True], [[True, True], [True, False]], [False] * 300, [True] * 300):
        assert every(np.array(mask, bool)) == np.array(mask, bool).all()


def test_what_is_small() -> None:
    """The default problem is; one of its sizes twice as large is not, be it scores or elements."""
    assert small(Problem.of()) and small(Problem.of(1, 1, 1, 64))
    assert not small(Problem.of(batch=4)) and not small(Problem.of(seq_kv=1024))
    assert not small(Problem.of(1, 1, 1, 128, seq_kv=1 << 20)) and not small(Problem.of(4, 16, 4096, 128))


def test_a_small_problem_is_judged_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU too: no function of CuPy's is called for it. A larger one is judged where the kernels run."""
    from harness.verbs import run as verb

    gpu: Any = Gpu()
    monkeypatch.setattr(verb, "open_backend", lambda *_: gpu)
    monkeypatch.setattr(verb, "time_together", lambda results, *_, **__: list(results))
    monkeypatch.setenv("FA_CLI_CACHE_DIR", str(tmp_path / "cache"))
    problem = Problem.of(1, 2, 40, 16)
    assert verb.run(problem=problem, mode="both", data_root=tmp_path)[0].passed
    monkeypatch.setattr(verb, "small", lambda problem: False)
    with pytest.raises(AttributeError, match="arange"):  # which the stand-in lacks
        verb.run(problem=problem, mode="both", data_root=tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_row_norms_in_pieces(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the whole, wherever the longest row is; NaN and infinity count as 0."""
    monkeypatch.setattr("harness.check.contender._PIECE", 64)
    array = generate(Problem.of(2, 3, 7, 20, dtype=dtype), 5)["Q"]
    for at in ((0, 0, 0, 0), (1, 2, 6, 19), (1, 0, 3, 5)):
        spoilt = array.copy()
        spoilt[at], spoilt[0, 1, 1, 1], spoilt[0, 1, 1, 2] = 50.0, np.nan, -np.inf
        whole = np.sqrt((_finite(spoilt, dtype).astype(np.float64) ** 2).sum(-1))
        assert _longest(spoilt, dtype) == pytest.approx(float(whole.max()), rel=1e-14) and _longest(spoilt, dtype) > 50


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("first_contact", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_child_records(tmp_path: Path) -> None:
    """A command runs as it would alone, with its exit code; what is recorded is written also where it fails."""
    record = tmp_path / "record.json"
    for words, code in ((("list",), 0), (("run", "--compute", "nothing", "--device", "cpu"), 2)):
        done = subprocess.run([sys.executable, str(SCRIPT), "--child", str(record), *words], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == code and json.loads(record.read_text())["programs"] == []
        record.unlink()


def test_programs_of_nvrtc(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is changed as it is loaded, and not sooner; each program is named, and its time is there also where it fails."""
    package = tmp_path / "cupy" / "cuda"
    package.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(
        "class _NVRTCProgram:\n    src = ''\n    def compile(self, options):\n        return 1 // options\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    recorder = script.Recorder()
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    compiler: Any = importlib.import_module("cupy.cuda.compiler")
    program = compiler._NVRTCProgram()
    assert program.compile(1) == 1
    program.src = '#include <cub/block/block_reduce.cuh>\nextern "C" __global__ void cupy_all(int n) {}'
    with pytest.raises(ZeroDivisionError):
        program.compile(0)
    assert [each["name"] for each in recorder.programs] == ["(empty)", "cupy_all with CUB"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)


def test_seconds_with_any_program(script: Any) -> None:
    """Those that overlap are counted once."""
    programs = [{"start": start, "end": end} for start, end in ((1.0, 2.0), (0.0, 1.5), (4.0, 5.0), (4.2, 4.4))]
    assert script._any(programs) == pytest.approx(3.0) and script._any([]) == 0.0
