"""Peers without their libraries: names, what is absent and how that reads, what is refused; and numpy, which is always there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import peers
from harness.backends import pick
from harness.check import baselines, budget, reference
from harness.check.contender import run_peer
from harness.check.oracle import oracle_for
from harness.dataset import generate as draws
from harness.dataset.storage import STORAGE
from harness.fault import UsageFault
from harness.peers import FAMILIES, base, flash, on_numpy
from harness.problem import PASSES, Problem

NAMES = (
    "torch-cpu",
    "torch-math",
    "torch-efficient",
    "torch-flash",
    "torch-cudnn",
    "flash-attn2",
    "fa3",
    "fa4",
    "fa3-source",
    "flashinfer",
    "flex",
    "flex-flash",
    "triton",
    "xformers",
    "numpy",
)


def peer(name: str) -> base.Peer:
    """A peer that must exist."""
    found = peers.find(name)
    assert found is not None
    return found


def test_names() -> None:
    """The names of results.csv's Kernel column, and nothing else is a peer."""
    assert peers.names() == NAMES
    assert all(peer(name).name == name for name in NAMES)
    assert {name: tuple(p.name for p in importlib.import_module(f"harness.peers.{name}").PEERS) for name in FAMILIES} == FAMILIES
    assert peers.find("fa2") is None
    assert peers.usual("cpu") == ("torch-cpu", "numpy")
    assert peers.usual("cuda") == NAMES[1:-1]
    assert {p for name in NAMES for p in peer(name).passes} == set(PASSES)


def test_listing_imports_no_library() -> None:
    """Names, absence and refusals are told without importing torch or any library."""
    code = (
        "import sys; from harness import peers; from harness.problem import Problem\n"
        "for name in peers.names():\n"
        "    [peers.find(name).absent(device) for device in ('cpu', 'cuda')]\n"
        "peers.find('torch-cpu').refuse(Problem.of(), 'forward')\n"
        "print([m for m in ('torch', 'triton', 'cupy', 'flash_attn', 'flashinfer', 'xformers') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- absence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A machine with no library but those put in the set."""
    there: set[str] = set()
    monkeypatch.setattr(base, "installed", lambda module: module in there)
    monkeypatch.setattr(base, "torch_has_cuda", lambda: "cuda torch" in there)
    return there


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("torch-cpu", "torch", "pip install torch"),
        ("torch-math", "torch", "pip install torch"),
        ("torch-efficient", "torch", "pip install torch"),
        ("torch-flash", "torch", "pip install torch"),
        ("torch-cudnn", "torch", "pip install torch"),
        ("flash-attn2", "flash_attn_2_cuda", "pip install flash-attn --no-build-isolation"),
        ("fa4", "flash_attn.cute", "pip install flash-attn-4==4.0.0b36"),
        ("flashinfer", "flashinfer", "pip install flashinfer-python"),
        ("flex", "triton", "pip install triton"),
        ("flex-flash", "flash_attn.cute", "pip install flash-attn-4==4.0.0b36"),
        ("triton", "triton", "pip install triton"),
        ("xformers", "xformers", "pip install xformers"),
    ],
)
def test_absent(nothing: set[str], name: str, missing: str, hint: str) -> None:
    """What is missing is named, with the pip line; once it is there, nothing is absent."""
    found = peer(name).absent(peer(name).device)
    assert found is not None
    assert missing in found[0] and "not installed" in found[0] and found[1] == hint
    nothing |= {"torch", "cuda torch", *peer(name).modules}  # type: ignore[attr-defined]  # Library has them
    assert peer(name).absent(peer(name).device) is None


def test_absent_with_a_cpu_build_of_torch(nothing: set[str]) -> None:
    """A PyTorch without CUDA serves torch-cpu only."""
    nothing.add("torch")
    assert peer("torch-cpu").absent("cpu") is None
    found = peer("torch-flash").absent("cuda")
    assert found is not None and "built for the CPU" in found[0]


@pytest.mark.parametrize("build", ["", "fa3_fwd_interface", "flash_attn_interface"])
def test_fa3_is_the_build_that_is_there(nothing: set[str], monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    """The wheel has a bfloat16 forward, the whole build both passes and float16; where there is neither, the wheel is the hint."""
    nothing |= {"torch", "cuda torch", build}
    monkeypatch.setattr(flash, "installed", lambda module: module in nothing)
    found, whole = flash._fa3(), build == "flash_attn_interface"
    missing = ("fa3_fwd_interface is not installed", "pip install fa3-fwd==0.0.3")
    assert found.absent("cuda") == (None if build else missing)
    half = Problem.of(dtype="float16")
    for problem, pass_, why in (
        (half, "forward", "float8_e4m3, not float16"),
        (half.with_(dtype="bfloat16"), "backward", "only the forward pass"),
    ):
        if whole:
            base.Library.refuse(found, problem, pass_)
        else:
            with pytest.raises(UsageFault) as caught:
                found.refuse(problem, pass_)
            assert why in caught.value.why


def test_absent_on_the_other_device(nothing: set[str]) -> None:
    """CPU peers do not run beside a GPU, nor GPU peers on a CPU."""
    assert "runs on the CPU only" in str(peer("numpy").absent("cuda"))
    assert peer("numpy").absent("cpu") is not None  # numpy is not in the set
    found = peer("fa3").absent("cpu")
    assert found is not None and "runs on a GPU only" in found[0] and found[1] == "leave fa3 out, or use --device cuda"


def test_installed_looks_into_packages_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn.cute is there as a folder or a file of a package, also of one without __init__.py; the package is not imported."""
    (tmp_path / "package_a" / "inner").mkdir(parents=True)
    (tmp_path / "package_a" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "package_b").mkdir()
    (tmp_path / "package_b" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert base.installed("package_a") and base.installed("package_a.inner")
    assert base.installed("package_b.inner")
    assert not base.installed("package_b.other") and not base.installed("package_c") and not base.installed("package_c.inner")


@pytest.mark.parametrize(("line", "has"), [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '13.0'", True)])
def test_torch_has_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, has: bool) -> None:
    """Read from torch/version.py."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert base.torch_has_cuda() is has


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "pass_", "why"),
    [
        ("torch-flash", {}, "forward", "float16, bfloat16, not float32"),
        ("torch-cudnn", {}, "forward", "not float32"),
        ("fa4", {}, "backward", "not float32"),
        ("triton", {"dtype": "float64"}, "forward", "not float64"),
        ("triton", {"dim": 160}, "forward", "widest head dim is 128"),
        ("fa4", {"dim": 264, "dtype": "bfloat16"}, "forward", "widest head dim is 256"),
        ("fa4", {"dim": 60, "dtype": "bfloat16"}, "forward", "multiple of 8 in bfloat16"),
        ("torch-efficient", {"dim": 59}, "forward", "multiple of 4 in float32"),
        ("torch-efficient", {"dim_v": 59}, "forward", "multiple of 4 in float32"),
        ("torch-cudnn", {"dim": 192, "dim_v": 264, "dtype": "bfloat16"}, "forward", "widest head dim is 256"),
        *(
            (name, {"dim": 64, "dim_v": 32, "dtype": "bfloat16"}, "backward", "of V it takes the head dim of Q and K")
            for name in ("torch-flash", "flash-attn2", "triton", "xformers", "flex-flash")
        ),
        ("fa3", {"dim": 96, "dim_v": 64, "dtype": "bfloat16"}, "forward", "only as 129 to 192 with 97 to 128, 1 to 64 with 1 to 256"),
        ("xformers", {"heads_kv": 2}, "forward", "no grouped-query attention"),
        ("flashinfer", {"dtype": "bfloat16", "seq_kv": 600}, "forward", "a page has 16 keys"),
        ("flashinfer", {"dtype": "bfloat16", "mask": "-3 <= q - k <= 9"}, "forward", "its windows end at the query"),
        ("fa3", {"dtype": "bfloat16", "seq_kv": 512, "page_size": 64}, "forward", "in one piece"),
        ("torch-flash", {"dtype": "bfloat16", "causal": True, "seq_kv": 600}, "forward", "top-left"),
        ("torch-efficient", {"causal": True, "seq_kv": 400}, "backward", "sees no key"),
        ("numpy", {"dtype": "float64"}, "forward", "not float64"),
        ("torch-flash", {"dtype": "bfloat16", "causal": True, "causal_shift": 5}, "forward", "causal_shift 0"),
        ("torch-flash", {"dtype": "bfloat16", "causal": True, "seq_kv": 600, "causal_shift": 0}, "forward", "equal sequence lengths"),
        ("torch-cudnn", {"dtype": "bfloat16", "causal": True, "causal_shift": -1}, "forward", "sees no key"),
        ("torch-efficient", {"causal": True, "seq_kv": 600, "causal_shift": -1}, "backward", "sees no key"),
        *(
            (name, {"dtype": "bfloat16", "causal": True, "seq_kv": 600, "causal_shift": 0}, "forward", "bottom-right: causal_shift 88")
            for name in ("flash-attn2", "fa3", "fa4", "triton", "xformers")
        ),
    ],
)
def test_refusals(name: str, shape: dict[str, Any], pass_: str, why: str) -> None:
    """What a library would compute wrongly, or not at all, is refused before it is imported, with the reason."""
    with pytest.raises(UsageFault, match=name) as caught:
        peer(name).refuse(Problem.of(**shape), pass_)
    assert why in caught.value.why and caught.value.hint


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("torch-cpu", {"dim": 59, "causal": True, "seq_kv": 100, "heads_kv": 2, "dtype": "float64"}),
        ("numpy", {"dim": 300, "causal": True, "seq_kv": 100, "heads_kv": 2}),
        ("torch-math", {"dim": 59, "causal": True, "seq_kv": 100, "heads_kv": 2}),
        ("torch-efficient", {"dim": 60, "causal": True, "seq_kv": 600}),
        *(
            (name, {"dim": 192, "dim_v": 128, "dtype": "bfloat16"})
            for name in ("torch-cpu", "torch-math", "torch-efficient", "torch-cudnn", "fa4", "flex", "numpy")
        ),
        ("torch-efficient", {"heads_kv": 2}),
        ("torch-efficient", {"causal": True, "seq_kv": 400, "causal_shift": 0}),
        ("torch-cudnn", {"dtype": "float16", "causal": True, "seq_kv": 400, "causal_shift": 17}),
        ("torch-flash", {"dtype": "float16", "seq_kv": 400, "causal_shift": 17}),  # no mask: no shift
        ("triton", {"causal": True, "seq_kv": 400}),
        ("torch-math", {"causal": True, "causal_shift": -600}),
    ],
)
def test_what_is_not_refused(name: str, shape: dict[str, Any]) -> None:
    """The refusals above are not of everything."""
    for pass_ in PASSES:
        peer(name).refuse(Problem.of(**shape), pass_)


# -- numpy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {"seq": 65, "dim": 40},
        {"seq": 64, "dim": 32, "causal": True},
        {"seq": 48, "dim": 16, "heads": 4, "heads_kv": 2, "causal": True},
        {"seq": 40, "seq_kv": 70, "dim": 16, "heads": 6, "heads_kv": 2, "causal": True, "scale": -0.3},
        {"seq": 70, "seq_kv": 40, "dim": 16, "causal": True},  # the first 30 rows see no key
        {"seq": 40, "seq_kv": 70, "dim": 16, "causal": True, "causal_shift": 0},
        {"seq": 70, "seq_kv": 40, "dim": 16, "causal": True, "causal_shift": 25},
        {"seq": 40, "seq_kv": 70, "dim": 16, "causal": True, "causal_shift": -1000},  # no row sees a key
        {"seq": 1, "seq_kv": 9, "dim": 16},
        {"seq": 50, "dim": 64, "dtype": "bfloat16", "causal": True},
        {"seq": 50, "dim": 64, "dtype": "float16"},
    ],
    ids=str,
)
def test_numpy_is_right(shape: dict[str, Any]) -> None:
    """Both passes within the error budget of a float32 kernel, logsumexp too; timed, and its memory counted."""
    problem = Problem.of(**{"batch": 2, "heads": 2, **shape})
    inputs = draws.generate(problem, 3)
    expected = reference.reference(np, problem, inputs)
    ways = baselines.baselines(np, problem, inputs, "f32")
    for pass_, names in (("forward", ["O", "logsumexp"]), ("backward", ["dQ", "dK", "dV"])):
        prepared = peer("numpy").prepare(problem, inputs, pass_)
        outputs = prepared.outputs()
        assert list(outputs) == names
        for name, array in outputs.items():
            assert (array.shape, array.dtype) == (problem.shape(name), STORAGE[problem.tensor_dtype(name)])
        verdicts = budget.compare(expected, outputs, ways)
        assert all(v.passed for v in verdicts.values()), [budget.message(v) for v in verdicts.values()]
        assert prepared.graph() is None and prepared.enqueue()() > 0 and prepared.call() > 0
        scores = 4 * problem.seq_q * problem.seq_kv
        assert prepared.peak_bytes is not None and prepared.peak_bytes > scores + 4 * 3 * int(np.prod(problem.shape("K")))
        assert prepared.name == "numpy" and prepared.ran.startswith("numpy 2")


def test_the_deterministic_form() -> None:
    """Who has none refuses the backward pass; who says so and gives other bits in a second run is refused too."""
    problem, half = Problem.of(1, 1, 16, 16), Problem.of(dtype="bfloat16")
    other = peer("xformers").made_deterministic()
    with pytest.raises(UsageFault, match="xformers") as caught:
        other.refuse(half, "backward")
    assert "no deterministic backward pass" in caught.value.why
    other.refuse(half, "forward")
    assert not peer("fa4").deterministic and peer("fa4").made_deterministic().deterministic

    class Changing(on_numpy.Numpy):
        def prepare(self, problem: Problem, inputs: Any, pass_: str) -> Any:
            made, runs = super().prepare(problem, inputs, pass_), iter(range(9))
            outputs = made.outputs
            made.outputs = lambda xp=np: {name: array + next(runs) for name, array in outputs().items()}  # type: ignore[method-assign]
            return made

    oracle = oracle_for(problem, pick("cpu"), "both")
    facts: dict[str, Any] = {"name": "changing", "device": "cpu", "dtypes": ("float32",), "modules": (), "install": ""}
    changing = Changing(**facts)
    assert not run_peer(changing, oracle, "backward").passed
    run_peer(changing.made_deterministic(), oracle, "forward")
    with pytest.raises(UsageFault, match="changing gave other bits in a second run"):
        run_peer(changing.made_deterministic(), oracle, "backward")
    assert run_peer(on_numpy.Numpy(**facts).made_deterministic(), oracle, "backward").passed
