"""What is timed is what is judged: cheats planted in a kernel (harness/verbs/selftest/faults.toml), and right kernels, which are not accused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import Result

from harness import kernel
from harness.array import ArrayModule, copied, to_host
from harness.backends import Backend, pick
from harness.check import trial
from harness.check.contender import PassResult, run_kernel
from harness.check.oracle import Oracle, oracle_for
from harness.check.tensors import Bound, Tensor
from harness.check.trial import Trial, _alike, _untouched
from harness.dataset.change import Change
from harness.dataset.storage import STORAGE
from harness.kernel import Kernel
from harness.measure.judged import Judged, Watch
from harness.measure.sampling import POLICY, Policy, Timing, measure
from harness.problem import READS, Problem
from harness.verbs.selftest.mutant import edited, mutants

CHEATS = mutants("launches")
SKIPS = "skips work for inputs it has seen"


def first(backend: Backend, chosen: Kernel, problem: Problem) -> PassResult:
    """The first launch, judged."""
    oracle = oracle_for(problem, backend, chosen.pass_)
    return run_kernel(backend, chosen, oracle, oracle.inputs_of(chosen.pass_))


def timed(backend: Backend, result: PassResult) -> Timing:
    return measure({"": result.timed}, backend, "warm", POLICY[backend.name])[""]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught_while_it_is_timed(name: str, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first launch passes; the timed ones name the rule that it breaks, and it has no speed."""
    monkeypatch.setitem(trial._MANY_SECONDS, backend.name, 60.0)  # else a machine that stalls has too few launches
    fault = CHEATS[name]
    result = first(backend, fault.plant(tmp_path), fault.problem)
    assert result.passed, "a cheat that the first launch shows needs no trial"
    timing = timed(backend, result)
    for words in fault.found_by["launches"]:
        assert re.search(words, timing.broken, re.DOTALL), f"no {words!r} in {timing.broken!r}"
    assert not result.with_timing(timing).passed


#: Turns of many samples, as on a GPU.
TURNS = Policy(warm_up=0.0, settle=2e-3, min_samples=20, max_samples=60, min_seconds=0.0, noise=1.0, apart=2.0, slow=1e9)


@pytest.mark.parametrize("name", ["returns where O is written", "works in every second launch", SKIPS])
def test_turns_of_many_samples(name: str, tmp_path: Path) -> None:
    """A few of each turn are judged, two of them one after the other; the right kernel is not accused."""
    backend = pick("cpu")  # TURNS are few and short, for its speed
    fault = CHEATS[name]
    found = {"": fault.plant(tmp_path), "right": kernel.find("fa2_naive", "forward")}
    for seconds in (0.1, 0.5, 2.5):  # on a busy machine a sample takes that long
        runs = {label: first(backend, each, fault.problem).timed for label, each in found.items()}
        timings = measure(runs, backend, "warm", replace(TURNS, turn=seconds))
        if timings["right"].turns[0] > 2:
            break
    assert re.search(fault.found_by["launches"][0], timings[""].broken, re.DOTALL), timings[""].broken
    assert timings["right"].broken == "" and len(timings["right"].turns) > 1 and timings["right"].turns[0] > 2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 50])
def test_what_is_drawn_of_a_turn(count: int) -> None:
    """At least one of each turn, half of it at most, two side by side; of turns of one launch, two in a row have new inputs."""

    class Small:
        elements = 1000

    watch = Watch(cast("Judged", Small()), 2.0)
    turns = [watch.drawn(count) for _ in range(30)]
    assert all(turn and set(turn) <= set(range(count)) for turn in turns)
    if count == 1:
        fresh = [turn[0].fresh for turn in turns]
        assert all(sum(fresh[i : i + 3]) == 2 for i in range(0, 30, 3))
        assert all(any(a and b for a, b in itertools.pairwise(fresh[i : i + 3])) for i in range(0, 30, 3))
        return
    assert all(state.fresh for turn in turns for state in turn.values())
    assert all(len(turn) == min(8, (count + 1) // 2) for turn in turns)
    assert count < 3 or all(any(i + 1 in turn for i in turn) for turn in turns)
    assert {state.poison for turn in turns for state in turn.values()} == ({False, True} if count > 2 else {False})


@pytest.mark.parametrize(
    ("name", "pass_", "dtype"),
    [
        ("naive", "forward", "float32"),
        ("naive", "backward", "float64"),
        ("fa2", "forward", "bfloat16"),
        ("fa2", "backward", "float32"),
        ("mma_qreg_async", "forward", "float16"),
        ("mma_qreg_async", "backward", "bfloat16"),
    ],
)
def test_right_kernels_are_not_accused(name: str, pass_: str, dtype: str, backend: Backend) -> None:
    """In both forms, grouped heads, the causal mask, rows that see no key, a width that does not fill a row."""
    chosen = kernel.find(name, pass_)
    for form in chosen.forms:
        result = first(backend, chosen.made_deterministic() if form else chosen, Problem.of(2, 4, 75, 59, 2, 70, dtype, causal=True))
        assert result.passed and isinstance(result.timed, Judged)
        assert timed(backend, result).broken == ""
        again = result.relaunched(repeats=3)
        assert again.passed and again.broken == ""


def test_a_cold_measurement_and_one_after_it(backend: Backend) -> None:
    """Inputs go on from where the last measurement left them; in the end they are compared with what they were."""
    result = first(backend, kernel.find("fa2", "forward"), Problem.of(1, 3, 33, 64))
    for timing in ("warm", "cold", "warm"):
        assert measure({"": result.timed}, backend, timing, POLICY[backend.name])[""].broken == ""


def test_one_head_of_one_column(backend: Backend) -> None:
    """The smallest problem still has inputs that are new."""
    assert timed(backend, first(backend, kernel.find("naive", "forward"), Problem.of(1, 1, 1, 1))).broken == ""


def test_a_head_whose_rows_are_equal_and_cancel(backend: Backend) -> None:
    """Its dV is one small number, the rest of a sum of large ones: a new K in that head alone is judged as the whole problem is."""
    problem, draw = Problem.of(1, 36, 63, 1, 12, scale=0.0), np.random.default_rng(0)
    inputs = {name: draw.standard_normal(problem.shape(name)).astype(np.float32) for name in ("Q", "K", "V", "dO")}
    inputs["dO"][:, 3:, -1] -= inputs["dO"][:, 3:].sum(axis=2)
    oracle = Oracle(problem, inputs, xp=backend.xp)
    result = run_kernel(backend, kernel.find("fa2", "backward"), oracle, oracle.inputs_of("backward"))
    assert result.passed and isinstance(result.timed, Judged)
    assert [result.timed._alone("K", False) for _ in range(6)] == [""] * 6


def test_a_part_of_k_is_new_in_pages(backend: Backend) -> None:
    """The pool holds it: else a right kernel gives the answer to earlier inputs. Q is new alone as without pages."""
    problem = Problem.of(2, 4, 2, 64, 2, [70, 33], "bfloat16", page_size=16)
    timed = first(backend, kernel.find("decode", "forward"), problem).timed
    assert [timed._alone(name, False) for name in ("K", "Q") * 3] == [""] * 6


def test_changes_undo_and_follow_each_other() -> None:
    """back() after any number of changes gives the original, bit for bit; an answer to earlier inputs is another in every head."""
    problem = Problem.of(3, 6, 5, 7, 2)
    bits = np.random.default_rng(1).integers(0, 1 << 32, problem.shape("Q"), np.uint32)
    lse = bits[..., 0].copy()
    change, now, rows = Change.none(problem), bits, lse
    for _ in range(4):
        step = Change.drawn(problem)
        before, now, rows = now, step.of(np, "Q", now), step.of(np, "logsumexp", rows)
        assert not (before == now).all(axis=(2, 3)).any()
        change = step.after(change)
        for name, original, changed in (("Q", bits, now), ("logsumexp", lse, rows)):
            assert np.array_equal(change.of(np, name, original), changed)
            assert np.array_equal(change.back().of(np, name, changed), original)


def test_one_column_of_v_is_new_in_every_head() -> None:
    """And nothing else: no place, no Q, no K."""
    problem = Problem.of(3, 6, 5, 7, 2)
    change = Change.of_values(problem)
    assert (change.signs["values"].sum(-1) == 1).all() and not change.signs["scores"].any()
    assert change.batches.tolist() == [0, 1, 2] and change.heads.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_tensor_that_lies_as_no_other_does(dtype: str, backend: Backend) -> None:
    """(batch, rows, heads, pitch) with a row more, 16-byte aligned and no more; it holds the same, and what lies between is guarded."""
    shape = (2, 3, 5, 24)
    pitch = Problem.of(2, 3, 5, 24, dtype=dtype).row_pitch("Q")
    values = np.arange(720).reshape(shape).astype(STORAGE[dtype])
    for wide in (1, 3):
        tensor = Tensor(backend, shape, dtype, pitch, wide)
        own = pitch + wide * 16 // tensor.storage.itemsize
        assert tensor.address % 32 == 16
        assert tensor.view() == (tensor.address, 6 * 3 * own, own, 3 * own)
        tensor.upload(values)
        assert np.array_equal(to_host(copied(backend.xp, tensor.bits())), values.view(f"<u{values.itemsize}")) and tensor.intact()
        at = 3 * own * tensor.storage.itemsize  # the end of row 0's last head, and of the last row, which is no row of the tensor's
        for outside in (at - 1, 5 * at):
            before = int(tensor.buffer[outside])
            tensor.buffer[outside] = 0
            assert not tensor.intact()
            tensor.buffer[outside] = before
        tensor.buffer[at] = 0
        assert tensor.intact()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_launch_elsewhere_has_strides_of_its_own(pass_: str, backend: Backend) -> None:
    """Each tensor's rows are further apart than the one's before, workspaces are shared; a kernel with plain parameters stays as it is."""
    problem = Problem.of(2, 2, 33, 59)
    trial = first(backend, kernel.find("fa2", pass_), problem).timed
    assert isinstance(trial, Trial) and not trial.bound.plain
    inputs = {name: tensor.values() for name, tensor in trial.bound.tensors.items() if name in READS[pass_]}
    bound = Bound(backend, trial.bound.loaded, problem, inputs, trial.bound)
    pitches = [tensor.view().head for name, tensor in bound.tensors.items() if name != "logsumexp"]
    assert len(set(pitches)) == len(pitches) and all(tensor.address % 32 == 16 for tensor in bound.tensors.values())
    assert bound.workspaces is trial.bound.workspaces
    for name, array in bound.run().items():
        assert np.array_equal(array, trial.outputs[name])


def test_a_part_has_one_input_new(backend: Backend) -> None:
    """Half the rows of one column of it, in one head with its query heads; of a backward pass O and logsumexp go with it."""
    problem = Problem.of(2, 4, 9, 8, 2, 11)
    for pass_, names in (("forward", "QK"), ("backward", "QK")):
        trial = first(backend, kernel.find("naive", pass_), problem).timed
        assert isinstance(trial, Trial)
        for name in names:
            part = trial._part(name)
            assert part and part.oracle.problem.heads_q == 2 and part.oracle.problem.heads_kv == 1
            differ = {n: a != to_host(trial.bound.tensors[n].values())[part.place[n]] for n, a in part.inputs.items()}
            rows = problem.shape(name)[2]
            assert differ[name].sum() == part.inputs[name].shape[1] * ((rows + 1) // 2) and differ[name].any(axis=2).sum(-1).max() == 1
            assert {n for n, a in differ.items() if a.any()} == {name} | ({"O", "logsumexp"} if pass_ == "backward" else set())


def test_no_part_beyond_what_a_header_promises(backend: Backend) -> None:
    """A sign that changes may make a score larger; of NaN and infinity it changes more than a sign."""
    trial = first(backend, kernel.find("naive", "forward"), Problem.of(1, 1, 9, 8)).timed
    assert isinstance(trial, Trial) and trial._part("K")
    whole = trial.bound.loaded
    trial.bound.loaded = replace(whole, kernel=replace(whole.kernel, logits=0.5))
    assert trial._part("K") is None
    trial.bound.loaded = whole
    with trial.bound.writable():
        trial.bound.tensors["V"].values()[0, 0, 0, 0] = np.nan
    assert trial._part("K") is None


class Device(np.ndarray[Any, Any]):
    """Stands for CuPy's arrays, which take none of numpy's, as operand or as index."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **given: Any) -> Any:
        for each in (*inputs, *given.get("out", ())):
            assert not isinstance(each, np.ndarray) or isinstance(each, Device), f"{ufunc} of a host array"
        plain = [each.view(np.ndarray) if isinstance(each, Device) else each for each in inputs]
        given |= {"out": tuple(each.view(np.ndarray) for each in given["out"])} if "out" in given else {}
        return np.asarray(getattr(ufunc, method)(*plain, **given)).view(Device)

    def __getitem__(self, key: Any) -> Any:
        for each in key if isinstance(key, tuple) else (key,):
            assert not isinstance(each, np.ndarray) or isinstance(each, Device), "a host array as an index"
        return super().__getitem__(key)


class OnDevice:
    """The array module of Device."""

    @staticmethod
    def asarray(array: Any) -> Device:
        return np.array(array).view(Device)


def test_no_host_array_meets_one_of_the_device() -> None:
    """CuPy raises TypeError where numpy would not: changes and comparisons are made of device arrays and scalars."""
    problem = Problem.of(2, 4, 3, 5, 2)
    change, xp = Change.drawn(problem), cast("ArrayModule", OnDevice)
    for dtype in (np.uint16, np.uint32, np.uint64):
        bits = np.arange(120).reshape(problem.shape("Q")).astype(dtype).view(Device)
        for name in ("Q", "O"):
            moved = change.of(xp, name, bits)
            assert isinstance(moved, Device)
            assert _alike(change.back().of(xp, name, moved), bits) and not _alike(moved, bits)
        assert not _untouched({"O": bits}) and _untouched({"O": ~(bits & dtype(0))})


def test_changed_inputs_have_the_changed_answer(backend: Backend) -> None:
    """The symmetry itself, against float64: inputs changed, outputs changed back, judged as if nothing had happened."""
    problem = Problem.of(2, 4, 9, 8, 2, 11, causal=True)
    for pass_ in ("forward", "backward"):
        oracle = oracle_for(problem, backend, pass_)
        change = Change.drawn(problem)
        inputs = oracle.inputs_of(pass_)
        changed = {name: change.of(np, name, inputs[name].view(np.uint32)).view(np.float32) for name in READS[pass_]}
        outputs = run_kernel(backend, kernel.find("naive", pass_), oracle, changed).outputs
        restored = {name: change.back().of(np, name, array.view(np.uint32)).view(np.float32) for name, array in outputs.items()}
        assert all(verdict.passed for verdict in oracle.judge(restored, "f32").values())
        assert not any(verdict.passed for name, verdict in oracle.judge(outputs, "f32").items() if name != "logsumexp")


def test_repeats_name_the_launch(backend: Backend, tmp_path: Path) -> None:
    """verify --repeat: the first launch whose bits are others."""
    fault = CHEATS["a last bit that flips from launch to launch"]
    trial = first(backend, fault.plant(tmp_path), fault.problem).timed
    assert isinstance(trial, Trial)
    assert "promises deterministic" in trial.repeat(20)


# -- the command line -------------------------------------------------------------------------------------------------

SHAPE = ("--batch", 1, "--heads", 2, "--seq", 129, "--dim", 64)


def planted_file(name: str, folder: Path) -> Path:
    """A library of its own: in that of another test of this process the module globals are as that left them."""
    folder.mkdir()
    path = CHEATS[name].plant(folder).path
    path.write_text(f"{path.read_text()}// {folder}\n")
    return path


@pytest.mark.parametrize("name", ["returns where O is written", "keeps its answer in a workspace", "works in its first nine launches"])
def test_run_fails_a_cheat_with_its_name(name: str, fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """Exit code 1, FAIL, the rule, and no speed; outputs.json says FAIL too."""
    path = planted_file(name, tmp_path / "kernel")
    done = fa_cli("run", "--compute", path, *SHAPE, "--output-dir", tmp_path)
    assert done.exit_code == 1 and "FAIL" in done.stdout
    assert re.search(CHEATS[name].found_by["launches"][0], " ".join(done.stdout.split()))
    assert not re.search(r"forward +\d+\.\d", done.stdout), "a speed"
    outputs = json.loads((tmp_path / "B1_H2_S129_D64" / "outputs.json").read_text())
    assert '"verdict": "FAIL"' in json.dumps(outputs)


@pytest.mark.parametrize("words", [(), ("--check", "race"), ("--json",)])
def test_run_in_its_other_ways(words: tuple[str, ...], fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """Not timed, or as JSON: the same verdict."""
    path = planted_file("returns where O is written", tmp_path / "kernel")
    done = fa_cli("run", "--compute", path, *SHAPE, "--output-dir", tmp_path, *words)
    assert done.exit_code == 1
    if "--json" in words:
        found = json.loads(done.stdout)
        assert found["passed"] is False and found["time_ms"]["forward"] is None and "another answer" in found["broken"]


@pytest.mark.parametrize("name", ["returns where O is written", "keeps its answer in a global"])
def test_verify_fails_a_cheat_with_its_name(name: str, fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """In one case alone, and the command that repeats it."""
    path = planted_file(name, tmp_path / "kernel")
    done = fa_cli("verify", path, "--case", 0)
    assert done.exit_code == 1
    assert re.search(CHEATS[name].found_by["launches"][0], " ".join(done.stdout.split()))


def test_verify_repeat(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """Bit-equality over launches of the same inputs: right kernels pass, a last bit that flips fails."""
    assert fa_cli("verify", "fa2", "--mode", "forward", "--case", 3, "--repeat", 5).exit_code == 0
    path = planted_file("a last bit that flips from launch to launch", tmp_path / "kernel")
    done = fa_cli("verify", path, "--case", 3, "--repeat", 5)
    assert done.exit_code == 1 and "promises deterministic" in done.stdout and "--repeat 5" in done.stdout


def test_an_experiment_gives_a_cheat_no_speed(fa_cli: Callable[..., Result], tmp_path: Path) -> None:
    """A row that says FAIL and why; the kernel beside it is timed."""
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('title = "one"\nmode = "forward"\nshapes = [{ test = "one", batch = 1, heads = 2, seq = 257, dim = 64 }]\n')
    path = planted_file(SKIPS, tmp_path / "kernel")
    done = fa_cli("experiment", sweep, "--compute", path, "--compute", "fa2_naive", "--peers", "none", "--output-dir", tmp_path / "out")
    assert done.exit_code == 1, done.output
    rows = (tmp_path / "out" / tmp_path.name / "results.csv").read_text()  # sweep.toml is named by its folder
    assert "FAIL" in rows and SKIPS.removesuffix("it has seen") in rows and rows.count("PASS") == 1


# -- a fresh load of the module ---------------------------------------------------------------------------------------


def left_behind(folder: Path) -> Kernel:
    """A kernel that is right only where a launch on fewer than 100 queries has left the scale's sign in a module global."""
    text = kernel.find("fa2_naive", "forward").path.read_text(encoding="utf-8")
    text = edited(
        text,
        ("constexpr int LANES = 32, ROWS", "__device__ float left;\nconstexpr int LANES = 32, ROWS"),
        ("    const int row = fa::warp_id() * ROWS", "    if (args.seq_q < 100) left = 1;\n    const int row = fa::warp_id() * ROWS"),
        ("float(args.scale)", "float(args.scale) * (args.seq_q < 100 ? 1.0f : left)"),
    )
    (folder / "left_forward.cu").write_text(text, encoding="utf-8")
    return Kernel.read(folder / "left_forward.cu")


def test_an_answer_that_another_problem_left_in_a_global(backend: Backend, tmp_path: Path) -> None:
    """On a module that has run another problem every launch is right, so only a fresh load shows it."""
    chosen = left_behind(tmp_path)
    assert first(backend, chosen, Problem.of(1, 2, 64, 64)).passed
    result = first(backend, chosen, Problem.of(1, 2, 129, 64))
    assert result.passed and isinstance(result.timed, Trial) and not result.timed.again()
    assert "loaded afresh, its first launch is wrong (O is wrong at" in timed(backend, result).broken
    right = first(backend, kernel.find("fa2_naive", "forward"), Problem.of(1, 2, 129, 64))
    assert not timed(backend, right).broken
