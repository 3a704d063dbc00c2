"""Ranges of the ladder (`--compute 00-07`) and kernels or peers of one shape of a sweep."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from harness.check.choose import AUTO, choose, kernels
from harness.check.contender import Contender
from harness.check.request import Request
from harness.fault import UsageFault
from harness.kernel import Device, catalogue, find, planner
from harness.problem import Problem
from harness.verbs import sweep

Run = Callable[..., Result]
SHAPE = ("--batch", 1, "--heads", 2, "--seq", 17, "--dim", 16)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")


def names(dtype: str, pass_: str, first: int = 0, last: int = 99) -> list[str]:
    """The kernels a range should give, by another way."""
    stored = {dtype, "tf32"} if dtype == "float32" else {dtype}  # tf32 is arithmetic on float32 files
    within = [k for k in catalogue() if k.number is not None and first <= k.number <= last and not k.variant_of]
    return [k.name for k in within if k.pass_ == pass_ and stored & set(k.dtypes)]


def choice(
    specs: Sequence[str],
    passes: Sequence[str],
    problems: Sequence[Problem] = (),
    device: Device | None = None,
    deterministic: bool = False,
) -> tuple[list[Contender], list[str]]:
    """What is chosen for some passes."""
    return choose(Request(specs, "both" if len(passes) > 1 else passes[0], deterministic=deterministic), device, problems)


def chosen(specs: list[str], passes: list[str], problems: list[Problem]) -> list[str]:
    """The names of the contenders of some specs."""
    return [one.name for one in choice(specs, passes, problems)[0]]


@pytest.mark.parametrize(("dtype", "pass_"), [("float32", "forward"), ("float64", "forward"), ("bfloat16", "backward")])
def test_a_range_is_those_that_can(dtype: str, pass_: str) -> None:
    """By pass and dtype, in ladder order, each once; why the others are left out is said; what is named twice is there twice."""
    found, left_out = choice(["00-99"], [pass_], [Problem.of(1, 1, 16, 16, dtype=dtype)])
    assert [one.name for one in found] == names(dtype, pass_)
    assert all(list(one.kernels) == [pass_] and not one.peer for one in found)
    others = dict.fromkeys(k.name for k in catalogue() if k.name not in names(dtype, pass_) and not k.variant_of)
    assert [text.partition(":")[0] for text in left_out] == [f"00-99 without {name}" for name in others]
    assert all(dtype in text or f"no {pass_} pass" in text for text in left_out)
    problems = [Problem.of(dtype="float32")]
    assert chosen(["fa2", "5-7", "naive", "torch-flash", "naive"], [pass_], problems)[-3:] == ["naive", "torch-flash", "naive"]
    assert chosen(["fa2", "5-7"], [pass_], problems).count("fa2") == 1


def test_a_path_is_as_good_as_a_name(tmp_path: Path) -> None:
    """A user's file is a contender beside the kernel of the tree that has its name; a pass it lacks is told."""
    (tmp_path / "fa2_forward.cu").write_text(find("fa2", "forward").path.read_text())
    both, _ = choice([str(tmp_path / "fa2_forward.cu"), "fa2"], ["forward"])
    assert [one.kernels["forward"].path.parent == tmp_path for one in both] == [True, False]
    with pytest.raises(UsageFault, match="backward"):
        choice([str(tmp_path / "fa2_forward.cu")], ["forward", "backward"])


def test_a_range_without_a_kernel_is_refused() -> None:
    """Nothing is numbered so, or nothing there can do it; several problems: one is enough."""
    with pytest.raises(UsageFault, match="90-99"):
        choice(["90-99"], ["forward"])
    small, wide = Problem.of(1, 1, 16, 16), Problem.of(1, 1, 16, 256)
    with pytest.raises(UsageFault, match="03-05") as caught:
        choice(["03-05"], ["forward"], [wide])
    assert "does not take head dim 256" in caught.value.why
    assert "fa1" in chosen(["03-05"], ["forward"], [wide, small])


@pytest.mark.parametrize(
    ("dtype", "dim", "passes", "arch", "name"),
    [
        ("float32", 64, ["forward"], "sm_90", "split_hopper"),
        ("float32", 64, ["backward"], "sm_90", "split"),
        ("float32", 64, ["forward"], "sm_80", "split"),
        ("float32", 64, ["forward", "backward"], "sm_75", "fa2"),
        ("bfloat16", 64, ["forward"], "sm_90", "hopper"),
        ("float16", 256, ["forward"], "sm_90", "hopper"),
        ("bfloat16", 64, ["forward"], "sm_80", "mma_qreg_async"),
        ("bfloat16", 64, ["forward"], "sm_100", "mma_qreg_async"),  # wgmma is sm_90a's alone
        ("bfloat16", 64, ["backward"], "sm_90", "hopper"),
        ("bfloat16", 64, ["forward", "backward"], "sm_90", "hopper"),
        ("bfloat16", 128, ["backward"], "sm_90", "hopper"),
        ("bfloat16", 136, ["backward"], "sm_90", "hopper_cluster"),
        ("float16", 256, ["backward"], "sm_90", "hopper_cluster"),
        ("bfloat16", 257, ["forward", "backward"], "sm_90", "wide_heads"),
        ("float16", 512, ["backward"], "sm_90", "wide_heads"),
        ("bfloat16", 64, ["forward", "backward"], "sm_80", "mma_qreg_async"),
        ("bfloat16", 256, ["forward", "backward"], "sm_80", "naive"),  # no backward pass of that width on tensor cores
        ("bfloat16", 64, ["forward"], "sm_75", "fa2"),  # no mma.sync of bfloat16 there
        ("float32", 256, ["forward"], "sm_90", "split_hopper"),
        ("float32", 256, ["forward", "backward"], "sm_80", "split"),
        ("float32", 256, ["forward"], "sm_75", "naive"),
        ("float64", 64, ["backward"], "sm_90", "naive"),
    ],
)
def test_auto_is_the_highest_step_that_can(dtype: str, dim: int, passes: list[str], arch: str, name: str) -> None:
    """By dtype, head dim, passes and architecture; it is said once, whatever the number of problems."""
    device = Device("cuda", "a GPU", arch)
    problems = [Problem.of(1, 2, seq, dim, dtype=dtype) for seq in (160, 192)]
    found, notes = choice([AUTO], passes, problems, device)
    assert [one.name for one in found] == [name] and len(notes) == 1 and len(found[0].kernels) == len(passes)
    assert f" {name}, " in notes[0] and {kernel.name for kernel in found[0].kernels.values()} == {name}
    above = [k for k in catalogue() if k.pass_ == passes[-1] and (k.number or 0) > (find(name, passes[-1]).number or 0)]
    able = [k for k in above if dtype in k.dtypes and dim <= k.head_dims[-1] and k.runs_on(arch, dtype)]
    assert not any(planner.for_auto(k, problem, device) for k in able for problem in problems)


def test_auto_takes_a_step_for_each_pass_and_form() -> None:
    """At head dim 256 the forward pass is hopper's, the backward pass hopper_cluster's, which has no deterministic form: there it is hopper's
    too. A name stays what it is."""
    passes, problem, device = ["forward", "backward"], Problem.of(1, 2, 96, 256, dtype="float16"), Device("cuda", "a GPU", "sm_90")
    found, notes = choice([AUTO], passes, [problem], device)
    assert [one.name for one in found] == ["hopper+hopper_cluster"]
    assert "auto is 22 hopper forward and 26 hopper_cluster backward, the highest steps it may take for" in notes[0]
    assert [one.name for one in choice([AUTO], passes, [problem], device, deterministic=True)[0]] == ["hopper"]
    assert [one.name for one in choice([AUTO], ["backward"], [problem], device, deterministic=True)[0]] == ["hopper"]
    assert choice(["hopper"], ["backward"], [problem], device)[0][0].kernels["backward"].number == 22
    with pytest.raises(UsageFault) as refused:
        choice(["26"], passes, [problem], device)
    assert "or a pair, KERNEL+hopper_cluster" in refused.value.hint, "also where a forward pass must run before it, as in a ring"


@pytest.mark.parametrize("shape", [(8, 32, 2048, 64), (1, 8, 4096, 40), (16, 32, 512, 64, 8, 3072), (8, 32, 4096, 65)])
def test_auto_leaves_wide_tiles_to_those_who_name_them(shape: tuple[int, ...]) -> None:
    """hopper_wide is ahead from 4096 queries on, where works are many (experiments/hopper_backward)."""
    device, problem = Device("cuda", "a GPU", "sm_90"), Problem.of(*shape, dtype="bfloat16")
    for passes in (["forward", "backward"], ["backward"]):
        assert choice([AUTO], passes, [problem], device)[0][0].name == "hopper"
    assert choice(["hopper_wide"], ["backward"], [problem.with_(head_dim=64)], device)[0][0].name == "hopper_wide"
    long = Problem.of(4, 32, 4096, 40, dtype="bfloat16")
    assert choice([AUTO], ["backward"], [long], device)[0][0].name == "hopper_wide"
    assert choice([AUTO], ["backward"], [long.with_(causal=True)], device)[0][0].name == "hopper"


def test_a_header_says_for_which_problems_auto_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression of the problem, as split_hopper's, which begins at 65 queries; another value moves the border."""
    passes, device = ["forward", "backward"], Device("cuda", "a GPU", "sm_90")

    def names() -> list[list[str]]:
        return [[one.name for one in choice([AUTO], passes, [Problem.of(2, 64, seq, 64)], device)[0]] for seq in (64, 65)]

    assert names() == [["split"], ["split_hopper+split"]]
    moved = tuple(replace(k, auto="seq_q > 63") if k.name == "split_hopper" else k for k in catalogue())
    monkeypatch.setattr("harness.check.choose.catalogue", lambda: moved)
    assert names() == [["split_hopper+split"]] * 2


@pytest.mark.parametrize(
    ("shape", "arch", "name"),
    [
        ((1, 1, 128, 64), "sm_90", "fa2"),  # the shapes on which experiments/fp32 has fa2 ahead of split and split_hopper
        ((8, 16, 32, 64), "sm_90", "fa2"),
        ((8, 16, 32, 64), "sm_80", "fa2"),
        ((8, 16, 100, 64), "sm_90", "split_hopper"),  # four blocks a multiprocessor
        ((8, 16, 33, 64), "sm_90", "split"),
        ((1, 1, 129, 64), "sm_90", "split_hopper"),  # more keys
        ((1, 1, 129, 64), "sm_80", "split"),
        ((1, 1, 128, 65), "sm_90", "split_hopper"),  # not measured at other head dims
    ],
)
def test_auto_takes_fa2_where_float32_is_too_small_for_a_split(shape: tuple[int, int, int, int], arch: str, name: str) -> None:
    """A few keys and at most a block of 32 queries on each multiprocessor: one launch of step 07 is over before operands are split."""
    ((found,), _) = choice([AUTO], ["forward"], [Problem.of(*shape)], Device("cuda", "a GPU", arch))
    assert found.name == name


def test_auto_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same kernels it adds nothing; beside one that shares a pass with it, it is another contender. `auto = false` in a header
    keeps a kernel out: the forward pass is then of one kernel, the backward pass of another.
    """
    passes, problem, device = ["forward", "backward"], Problem.of(1, 2, 64, 64, dtype="bfloat16"), Device("cuda", "a GPU", "sm_90")
    assert [one.name for one in choice(["hopper", AUTO], passes, [problem], device)[0]] == ["hopper"]
    kept_out = tuple(replace(k, auto=False) if (k.name, k.pass_) == ("hopper", "backward") else k for k in catalogue())
    monkeypatch.setattr("harness.check.choose.catalogue", lambda: kept_out)
    found, notes = choice(["hopper+15", AUTO], passes, [problem], device)
    assert [one.name for one in found] == ["hopper+mma_qreg_async"]
    assert "auto is 22 hopper forward and 15 mma_qreg_async backward, the highest steps it may take for" in notes[0]
    assert [one.name for one in choice(["15", AUTO], passes, [problem], device)[0]] == ["mma_qreg_async", "hopper+mma_qreg_async"]


def test_auto_without_a_problem_is_refused() -> None:
    """Which step is the highest depends on the problem: choose wants one, and the verbs that have none (compile, verify) say so."""
    with pytest.raises(UsageFault, match="auto needs a problem"):
        choice([AUTO], ["forward"])
    with pytest.raises(UsageFault, match="auto needs a problem"):
        kernels(Request(AUTO))


def test_one_kernel_has_many_names() -> None:
    """Number, name and every alias of every kernel mean that kernel."""
    for each in catalogue():
        for spec in (each.name, *each.aliases, *([str(each.number), f"{each.number:02}"] if each.number is not None else [])):
            assert find(spec, each.pass_) is each, spec


@needs_compiler
def test_run_and_verify(fa_cli: Run) -> None:
    """run runs the range interleaved and says on stderr whom it leaves out; verify takes those with the pass."""
    result = fa_cli("run", "--compute", "00-05", "--dtype", "float16", *SHAPE)
    assert result.exit_code == 0 and "note: 00-05 without fa1: fa1_forward does not take float16" in result.stderr
    assert result.stdout.count("PASS naive forward") == 1
    result = fa_cli("verify", "00-03", "--mode", "backward", "--case", 0, "--json")
    assert {row["kernel"] for row in json.loads(result.stdout)["rows"]} == {"naive"}
    assert "note: 00-03 without fa1: fa1 has no backward pass" in result.stderr


@needs_compiler
def test_auto_and_two_kernels(fa_cli: Run) -> None:
    """auto is one kernel for both passes. The forward pass of one, the backward pass of another, which reads its O and logsumexp: run,
    ring and their labels name both.
    """
    words = ("--mode", "both", "--dtype", "bfloat16", "--device", "cpu", *SHAPE)
    result = fa_cli("run", "auto", *words, "--causal")
    assert result.exit_code == 0 and "PASS hopper both" in result.stdout
    assert "note: auto is 22 hopper, the highest step it may take for" in result.stderr
    two = fa_cli("run", "hopper+15", *words, "--json")
    assert two.exit_code == 0 and json.loads(two.stdout)["compute"] == "hopper+mma_qreg_async"
    ring = fa_cli("ring", "--simulate", 2, "--compute", "hopper+15", *words)
    assert ring.exit_code == 0 and "PASS hopper+mma_qreg_async both 2 ranks" in ring.stdout, ring.output
    ring = fa_cli("ring", "--simulate", 2, "--compute", "auto", *words)
    assert ring.exit_code == 0 and "PASS hopper both 2 ranks" in ring.stdout, ring.output
    alone = fa_cli("run", "mma_qreg", *words)
    assert alone.exit_code == 2 and "mma_qreg has no backward pass" in alone.stderr


def test_a_range_nobody_is_in_is_exit_2(fa_cli: Run) -> None:
    """For every verb."""
    for words in (("run", "--compute"), ("verify",), ("compile",), ("experiment", "--compute"), ("profile", "--compute")):
        result = fa_cli(*words, "90-99")
        assert result.exit_code == 2 and "90-99" in result.stderr and "hint: fa-cli list" in result.stderr, words


@needs_compiler
def test_a_sweep_of_a_range(fa_cli: Run, tmp_path: Path) -> None:
    """Each shape has the kernels of the range that take it, and a shape's own kernels and peers go before the sweep's."""
    (tmp_path / "s.toml").write_text(
        'kernels = "00-03"\npeers = "numpy"\n'
        'shapes = [{ test = "a", batch = 1, heads = 1, seq = 16, dim = 16 },'
        ' { test = "b", batch = 1, heads = 1, seq = 16, dim = 16, dtype = "float16" },'
        ' { test = "c", batch = 1, heads = 1, seq = 16, dim = 16, kernels = ["fa2"], peers = [] }]\n'
    )
    plan = fa_cli("experiment", "s.toml", "--dry-run").stdout
    assert fa_cli("experiment", "s.toml", "-q", "--no-figures").exit_code == 0
    with open(tmp_path / "experiment_results" / "s" / "results.csv") as file:
        rows = [(row["Test"], row["Kernel"], row["Status"]) for row in csv.DictReader(file)]
    wanted = {"a": [*names("float32", "forward", 0, 3), "numpy"], "b": [*names("float16", "forward", 0, 3), "numpy"], "c": ["fa2"]}
    assert rows == [(test, name, "PASS") for test, some in wanted.items() for name in some]
    assert plan.splitlines()[-1].endswith("by fa2")


def test_peers_of_a_sweep_are_those_of_the_device() -> None:
    """A sweep that names a GPU's peers has the usual ones on a CPU, and one that wants none has none."""
    from harness.verbs.experiment import _peers

    assert _peers(("torch-flash", "numpy"), "cpu") == ["numpy"]
    assert _peers(("torch-flash",), "cpu") == _peers(None, "cpu") == ("torch-cpu", "numpy")
    assert _peers((), "cpu") == []
    assert _peers(("nosuch",), "cpu") == ["nosuch"], "told of as unknown"


@pytest.mark.parametrize("text", ["kernels = 3", "shapes = [{ seq = 16, kernels = [7] }]"])
def test_kernels_of_a_sweep_are_names(text: str, fa_cli: Run, tmp_path: Path) -> None:
    """A sweep file with anything else is exit 3."""
    (tmp_path / "bad.toml").write_text(text + ("" if "shapes" in text else "\nshapes = [{ seq = 16 }]"))
    result = fa_cli("experiment", "bad.toml")
    assert result.exit_code == 3 and "kernels is a name, a range or a list" in result.stderr


def test_the_ladder_sweep() -> None:
    """The CUDA-core steps at float32, the others in bfloat16 on the two shapes, and the GPU's own rates in the same run."""
    found = sweep.load("ladder")
    assert found.ceilings and found.names("kernels", "float32") == ("00-07",)
    assert found.names("peers", "float32") == ("torch-math", "torch-efficient"), "also where a shape of [cpu] has that name and no peers"
    assert [p.seq_q for test, p in found.shapes if test.startswith("seed001")] == [512, 1024, 2048, 4096, 8192, 16384]
    assert set(found.names("peers", "bfloat16") or ()) == {"torch-flash", "torch-cudnn", "fa3", "fa4"}


@pytest.mark.parametrize("name", ["hopper_backward", "longseq_backward"])
def test_a_sweep_of_backward_passes_has_the_step_that_auto_takes(name: str) -> None:
    """Among those of each cell. The cells of both masks have the names by which record.sh parts them."""
    found, device = sweep.load(name), Device("cuda", "a GPU", "sm_90")
    for test, problem in found.shapes:
        kernels, _ = choice(found.names("kernels", test) or (), ["backward"], [problem], device)
        assert choice([AUTO], ["backward"], [problem], device)[0][0].name in {kernel.name for kernel in kernels}, test
        assert test.endswith("causal") == problem.causal
    masks = [
        {test.removesuffix("_causal") for test, problem in found.shapes if "D64" in test and problem.causal == causal} for causal in (0, 1)
    ]
    assert masks[0] == masks[1] == {f"D64-S{512 << i}" for i in range(6)}


def test_where_the_mask_alone_varies_it_is_the_end_of_the_name(tmp_path: Path) -> None:
    """Of the test's name, or of the folder's where a shape has none."""
    spec = tmp_path / "mine.toml"
    spec.write_text('shapes = [{ test = "one", seq = 9, causal = [false, true] }, { heads = 2, seq = 9, causal = [true] }]\n')
    assert [test for test, _ in sweep.load(str(spec)).shapes] == ["one", "one_causal", "B2_H2_S9_D64_causal"]


def test_gradients_of_an_output_in_tf32_are_refused(fa_cli: Run) -> None:
    """O of tf32 tensor cores is too coarse for a backward pass in float32, which would be called wrong. 16 bits are alike."""
    words = ("run", "mma+fa2", "--mode", "both", "--batch", 1, "--heads", 1, "--seq", 32, "--dim", 32, "--device", "cpu")
    done = fa_cli(*words)
    assert done.exit_code == 2
    assert "an O in tf32" in done.stderr
    assert fa_cli(*words, "--dtype", "float16").exit_code == 0


@needs_compiler
def test_names_of_an_argument_may_be_joined_by_commas(fa_cli: Run) -> None:
    """As those of --compute."""
    done = fa_cli("run", "fa2_naive,05", "naive", "--batch", 1, "--heads", 1, "--seq", 16, "--dim", 16, "--device", "cpu", "--json")
    assert done.exit_code == 0
    assert [row["compute"] for row in json.loads(done.stdout)["rows"]] == ["fa2_naive", "fa2_naive", "naive"]
