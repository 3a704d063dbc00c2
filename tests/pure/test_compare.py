"""Verdicts on samples whose truth is known, matching of rows, the gate, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import append_row

from harness.fault import DataFault, UsageFault
from harness.row import SHAPE, Row
from harness.terminal.show.report import unsettled, unsettled_rows
from harness.verbs import compare
from harness.verbs.compare import median_interval, ratio_interval, verdict

Samples = Sequence[float]


def noisy(median: float, spread: float = 0.004, n: int = 200, seed: int = 0) -> list[float]:
    """Samples as a GPU gives them: a sharp lower edge and a tail of slow runs, of a median known to a part in a thousand."""
    tail = np.random.default_rng(seed).gamma(2.0, spread / 2, n)
    return [float(x) for x in median * (1 + tail - np.median(tail))]


def row(kernel: str, samples: Samples | None, **other: Any) -> Row:
    """A row of samples in milliseconds; without them a failure."""
    facts: dict[str, Any] = {
        "Test": "S512",
        "Kernel": kernel,
        "Type": "FOR",
        "Batch": 2,
        "Heads": 8,
        "SeqLen": 512,
        "HeadDim": 64,
        "heads_kv": 8,
        "seq_kv": 512,
        "dtype": "float32",
        "causal": False,
        "scale": 0.125,
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "run_id": "20261120T184550Z-ab12",
        "source_hash": "a",
        "Status": "PASS" if samples else "FAIL",
    }
    if samples:
        low, middle, high = np.percentile(samples, (20, 50, 80)).tolist()
        facts |= {"KernelTime_ms": middle, "p20_ms": low, "p80_ms": high, "n_samples": len(samples), "timing": "warm"}
    return Row(**facts | other)


def folder(path: Path, rows: Sequence[tuple[Row, Samples | None]], keep_samples: bool = True) -> Path:
    """A folder as experiment writes it."""
    path.mkdir()
    for each, _ in rows:
        append_row(path / "results.csv", each)
    lines = []
    for each, samples in rows:
        if samples and keep_samples:
            named = {name: getattr(each, name) for name in ("run_id", "Test", "Kernel", "Type", "timing", *SHAPE)}
            lines.append(json.dumps(named | {"samples_ms": list(samples), "call_ms": [0.01]}) + "\n")
    if lines:
        (path / "samples.jsonl").write_text("".join(lines))
    return path


def two(tmp_path: Path, a: Samples | None, b: Samples | None, **how: Any) -> compare.Comparison:
    """Two folders with one row of fa2 each, compared."""
    keep = how.pop("keep_samples", True)
    changed = how.pop("changed", {})
    left = folder(tmp_path / "a", [(row("fa2", a), a)], keep)
    return compare.compare(left, folder(tmp_path / "b", [(row("fa2", b, **changed), b)], keep), **how)


# -- statistics ---------------------------------------------------------------------------------------------------------------


def test_median_interval_by_hand() -> None:
    """Order statistics of small sets, from the binomial: 1/2^n below the least sample."""
    assert median_interval(range(1, 7), 0.96) == (1, 6)  # 1 - 2/64 = 96.9%
    assert median_interval(range(1, 7), 0.97) is None
    assert median_interval(range(1, 8), 0.975) == (1, 7)  # 1 - 2/128
    assert median_interval(range(1, 21), 0.95) == (6, 15)  # the textbook's 95% ranks for 20
    assert median_interval([], 0.95) is None


def test_turns_that_disagree_widen_the_interval() -> None:
    """24 samples in 6 turns, alike within a turn: what changes from turn to turn is what another run will meet."""
    steps = [0.0, 0.1, 0.2, 0.3]
    a = [level + step for level in (101, 105, 105, 104, 104, 105) for step in steps]
    b = [level + step for level in (100, 104, 101, 101, 101, 100) for step in steps]
    alone = ratio_interval(a, b)
    assert alone and verdict(*alone) == "FASTER"
    low, high = ratio_interval(a, b, [4] * 6, [4] * 6) or (0.0, 0.0)
    assert low < alone[0] and high > alone[1] and verdict(low, high) == "UNSURE"
    even = [100 + step for _ in range(6) for step in steps]
    assert ratio_interval(even, even, [4] * 6, [4] * 6) == ratio_interval(even, even)


@pytest.mark.parametrize("n", [7, 20, 101, 3000])
def test_median_interval_covers(n: int) -> None:
    """In 400 draws of a skewed distribution the bounds hold the true median at least as often as they promise (within 2%)."""
    draw = np.random.default_rng(n)
    inside = 0
    for _ in range(400):
        low, high = median_interval(draw.exponential(size=n).tolist(), 0.9) or (0, 0)
        inside += low <= np.log(2) <= high
    assert inside >= 0.88 * 400


def test_ratio_interval() -> None:
    """The quotient's extremes; few samples widen it; fewer than 3 give none."""
    a, b = [1.0] * 7, [2.0] * 7
    assert ratio_interval(a, b) == (2.0, 2.0)
    low, high = ratio_interval([1.0, 1.0, 1.1], [1.0, 1.0, 1.1]) or (0, 0)
    assert (low, high) == (pytest.approx(1.1**-3), pytest.approx(1.1**3))
    assert ratio_interval([1.0, 1.0], b) is None and ratio_interval(a, [1.0]) is None


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.995, 1.005, "SAME"),
        (0.97, 1.03, "SAME"),
        (1.012, 1.02, "SAME"),
        (1.011, 1.05, "SLOWER"),
        (1.009, 1.05, "UNSURE"),
        (0.95, 0.989, "FASTER"),
        (0.95, 0.991, "UNSURE"),
        (0.9, 1.1, "UNSURE"),
    ],
)
def test_verdict(low: float, high: float, word: str) -> None:
    """The rule of the module, at its edges."""
    assert verdict(low, high) == word


# -- runs ---------------------------------------------------------------------------------------------------------------------


def test_two_honest_runs_are_the_same(tmp_path: Path) -> None:
    """Fifty pairs of runs, each run's clocks off by up to half a percent: all SAME."""
    drift = np.random.default_rng(7).uniform(-0.005, 0.005, (50, 2))
    rows: list[list[tuple[Row, Samples | None]]] = [[], []]
    for i, pair in enumerate(drift):
        for side, off in enumerate(pair):
            samples = noisy(0.05 * (1 + i) * (1 + off), n=40, seed=2 * i + side)
            rows[side].append((row("fa2", samples, SeqLen=64 + i), samples))
    found = compare.compare(folder(tmp_path / "a", rows[0]), folder(tmp_path / "b", rows[1]))
    assert found.counts == {"SAME": 50, "FASTER": 0, "SLOWER": 0, "UNSURE": 0}
    assert found.geomean == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (noisy(1.0), noisy(1.015, seed=1), "SAME"),  # below what two runs of one thing differ by
        (noisy(1.0), noisy(1.05, seed=1), "SLOWER"),
        (noisy(1.05), noisy(1.0, seed=1), "FASTER"),
        (noisy(1.0, 0.4, 30), noisy(1.05, 0.4, 30, 1), "UNSURE"),
        (noisy(1.0, n=2), noisy(2.0, n=200), "UNSURE"),
        (noisy(1.0, n=3), noisy(2.0, n=5), "SLOWER"),
        (noisy(1.0, 0.2, n=5), noisy(1.05, 0.2, n=5, seed=1), "UNSURE"),
    ],
    ids=["1.5% shift", "5% slower", "5% faster", "noise", "too few", "few but twice the time", "few and noisy"],
)
def test_verdict_of_samples(a: Samples, b: Samples, word: str, tmp_path: Path) -> None:
    """Synthetic samples of which the truth is known."""
    (pair,) = two(tmp_path, a, b).pairs
    assert pair.verdict == word, pair
    assert pair.ratio == pytest.approx(float(np.median(b)) / float(np.median(a)))
    assert pair.basis == f"{len(a)} and {len(b)} samples"


@pytest.mark.parametrize(("b", "word"), [(noisy(1.0, seed=1), "SAME"), (noisy(1.05, seed=1), "SLOWER"), (noisy(1.0, 0.4, 20, 1), "UNSURE")])
def test_without_samples(b: Samples, word: str, tmp_path: Path) -> None:
    """From p20, p80 and their number in results.csv alone, wider than from the samples themselves."""
    a = noisy(1.0)
    (pair,) = two(tmp_path, a, b, keep_samples=False).pairs
    assert (pair.verdict, pair.basis) == (word, "p20 to p80")
    exact = ratio_interval(a, b)
    assert exact and pair.low and pair.high and pair.low < exact[0] and pair.high > exact[1]


def test_without_any_spread_it_cannot_be_said(tmp_path: Path) -> None:
    """A median alone has no interval."""
    bare = {"p20_ms": None, "p80_ms": None, "n_samples": None}
    left = folder(tmp_path / "a", [(row("fa2", [1.0] * 9, **bare), None)])
    (pair,) = compare.compare(left, folder(tmp_path / "b", [(row("fa2", [2.0] * 9, **bare), None)])).pairs
    assert (pair.verdict, pair.low, pair.high, pair.basis) == ("UNSURE", None, None, "no interval")


# -- rows ---------------------------------------------------------------------------------------------------------------------


def test_rows_are_matched_by_what_was_asked(tmp_path: Path) -> None:
    """Kernel, shape, dtype, mask, pass and timing; not by test name; what only one side has is listed; the last row counts."""
    one, two_ = [1.0] * 9, [2.0] * 9
    old = row("fa2", two_, run_id="20261119T000000Z-0000")
    a = folder(tmp_path / "a", [(old, two_), (row("fa2", one), one), (row("naive", one), one), (row("fa2", one, timing="cold"), one)])
    b = folder(tmp_path / "b", [(row("fa2", one, Test="other"), one), (row("naive", one, causal=True), one), (row("fa1", None), None)])
    found = compare.compare(a, b / "results.csv")
    assert [(p.kernel, p.timing, p.ratio, p.verdict) for p in found.pairs] == [("fa2", "warm", 1.0, "SAME")]
    shape = "FOR S512 B2 H8 S512 D64 float32"
    assert set(found.only_a) == {f"naive {shape} warm (PASS)", f"fa2 {shape} cold (PASS)"} and len(found.only_a) == 2
    assert found.only_b == ("naive FOR S512 B2 H8 S512 D64 float32 causal warm (PASS)", "fa1 FOR S512 B2 H8 S512 D64 float32 (FAIL)")


def test_means_and_source(tmp_path: Path) -> None:
    """Geometric means by kernel and over all; a changed source is said."""
    rows_a = [(row("fa2", [1.0] * 9), [1.0] * 9), (row("naive", [1.0] * 9), [1.0] * 9)]
    rows_b = [(row("fa2", [2.0] * 9, source_hash="b"), [2.0] * 9), (row("naive", [8.0] * 9), [8.0] * 9)]
    found = compare.compare(folder(tmp_path / "a", rows_a), folder(tmp_path / "b", rows_b))
    assert found.geomean == pytest.approx(4.0) and found.geomeans == pytest.approx({"fa2": 2.0, "naive": 8.0})
    assert [p.source_changed for p in found.pairs] == [True, False]


def test_no_row_in_common(tmp_path: Path) -> None:
    """Nothing compared is not a success."""
    a = folder(tmp_path / "a", [(row("fa2", [1.0] * 9), None)])
    with pytest.raises(UsageFault, match="no row in common"):
        compare.compare(a, folder(tmp_path / "b", [(row("fa1", [1.0] * 9), None)]))


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    """Exit code 2, unless told to go on; so is a CPU against a GPU. A differing CPU beside the same GPU is not."""
    samples = [1.0] * 9
    other = {"device_name": "NVIDIA A100"}
    with pytest.raises(UsageFault, match="NVIDIA H200 and NVIDIA A100") as fault:
        two(tmp_path, samples, samples, changed=other)
    assert fault.value.exit_code == 2 and "--ignore-device" in fault.value.hint
    assert len(compare.compare(tmp_path / "a", tmp_path / "b", ignore_device=True).pairs) == 1
    cpu = folder(tmp_path / "c", [(row("fa2", samples, device="cpu", device_name="a processor"), samples)])
    with pytest.raises(UsageFault, match="different devices"):
        compare.compare(tmp_path / "a", cpu)
    pairs = []
    for name in ("x", "y"):
        peer = row("torch-cpu", samples, device="cpu", device_name=f"processor {name}")
        pairs.append(folder(tmp_path / name, [(row("fa2", samples), samples), (peer, samples)]))
    found = compare.compare(*pairs)
    assert [p.kernel for p in found.pairs] == ["fa2"] and "torch-cpu" in found.only_a[0] and "torch-cpu" in found.only_b[0]


def test_notes_say_what_else_changed(tmp_path: Path) -> None:
    """Driver, versions and commit of env.json."""
    for name, driver, torch in (("a", 12000, "2.10"), ("b", 13000, "2.10")):
        path = folder(tmp_path / name, [(row("fa2", [1.0] * 9), None)])
        (path / "env.json").write_text(json.dumps({"cuda_driver": driver, "packages": {"torch": torch}}))
    assert compare.compare(tmp_path / "a", tmp_path / "b").notes == ("cuda_driver: 12000 in A, 13000 in B",)


@pytest.mark.parametrize("text", ["{", "{}", '{"samples_ms": ["x"]}'])
def test_broken_samples(text: str, tmp_path: Path) -> None:
    """Named by file and line."""
    a = folder(tmp_path / "a", [(row("fa2", [1.0] * 9), [1.0] * 9)])
    with open(a / "samples.jsonl", "a") as file:
        file.write(text + "\n")
    with pytest.raises(DataFault, match=r"samples\.jsonl:2"):
        compare.compare(a, a)
    with pytest.raises(DataFault, match="positive time"):
        compare.compare(folder(tmp_path / "b", [(row("fa2", [1.0] * 9), [1.0, -1.0])]), a)


# -- the gate -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "fail_if", "failures"),
    [
        (1.10, None, 0),
        (1.10, "slower:5%", 1),
        (1.10, "slower:12.5%", 0),
        (1.02, "slower:0%", 0),  # SAME, whatever the limit
        (0.5, "slower:5%", 0),
    ],
)
def test_fail_if(b: float, fail_if: str | None, failures: int, tmp_path: Path) -> None:
    """Only what is surely SLOWER, and by more than the limit."""
    found = two(tmp_path, noisy(1.0), noisy(b, seed=1), fail_if=fail_if)
    assert len(found.failures) == failures and found.passed == (not failures)


def test_noise_does_not_trip_the_gate_and_a_failure_does(tmp_path: Path) -> None:
    """UNSURE is no regression; a kernel that no longer passes its check is one."""
    assert two(tmp_path, noisy(1.0, 0.9, 10), noisy(1.2, 0.9, 10, 1), fail_if="slower:5%").passed
    for name in ("c", "d"):
        folder(tmp_path / name, [(row("fa2", [1.0] * 9) if name == "c" else row("fa2", None), None)])
    found = compare.compare(tmp_path / "c", tmp_path / "d", fail_if="slower:5%")
    assert [(u.a_status, u.b_status) for u in found.untimed] == [("PASS", "FAIL")]
    assert found.failures == ("fa2 FOR S512 B2 H8 S512 D64 float32: PASS became FAIL",)
    assert compare.compare(tmp_path / "d", tmp_path / "c", fail_if="slower:5%").passed


def test_a_row_that_is_gone_does_not_pass_the_gate(tmp_path: Path) -> None:
    """It passed, and in B there is nothing; one that had failed is not missed."""
    several = [(row("fa2", [1.0] * 9), [1.0] * 9), (row("naive", [1.0] * 9), [1.0] * 9), (row("tiled", None), None)]
    a, b = folder(tmp_path / "a", several), folder(tmp_path / "b", several[:1])
    assert compare.compare(a, b, fail_if="slower:5%").failures == ("naive FOR S512 B2 H8 S512 D64 float32 warm (PASS): B has no such row",)
    assert compare.compare(a, b).passed
    assert compare.compare(b, a, fail_if="slower:5%").passed


@pytest.mark.parametrize("text", ["slower", "slower:5", "slower:-5%", "faster:5%", "slower:five%", "", "slower:5%,faster:1%"])
def test_bad_fail_if(text: str, tmp_path: Path) -> None:
    """Exit code 2 with the form that is understood."""
    with pytest.raises(UsageFault, match="not understood"):
        compare.parse_fail_if(text)


def test_parse_fail_if() -> None:
    """A part, not a percentage."""
    assert (compare.parse_fail_if("slower:5%"), compare.parse_fail_if("slower:0.5%")) == (0.05, 0.005)


def test_a_row_measured_twice_uses_the_samples_of_its_own_run(tmp_path: Path) -> None:
    """samples.jsonl holds every run; the run_id chooses."""
    old, new = [5.0] * 9, [1.0] * 9
    first = row("fa2", old, run_id="20261119T000000Z-0000")
    a = folder(tmp_path / "a", [(first, old), (row("fa2", new), new)])
    later = replace(row("fa2", new), run_id="20261121T000000Z-0000")
    (pair,) = compare.compare(a, folder(tmp_path / "b", [(later, new)])).pairs
    assert (pair.ratio, pair.low, pair.high, pair.basis) == (1.0, 1.0, 1.0, "9 and 9 samples")


def test_run_says_what_is_not_settled() -> None:
    """An interval of the speeds' ratio that contains 1, and samples that are too few, are told in words, with what to do."""

    def result(name: str, ms: Sequence[float]) -> Any:
        timing = SimpleNamespace(seconds=[x / 1e3 for x in ms], turns=[], median_ms=median(ms))
        return SimpleNamespace(compute=name, passes={"forward": SimpleNamespace(timings={"warm": timing})}, time_ms={"forward": median(ms)})

    first, wide = result("fa1", [1.0, 1.1, 1.2, 1.3, 1.4]), [0.5, 1.0, 1.1, 1.5, 3.0]
    (line,) = unsettled([first, result("fa2", wide)])
    assert line.startswith("forward: whether fa2 or fa1 is faster is not settled: the interval 0.0") and " contains 1; " in line
    assert line.endswith("stop other work on the machine, or repeat the command with --samples 50")
    assert "there are too few samples" in unsettled([first, result("fa2", [1.0, 1.1])])[0]
    assert unsettled([first, result("fa2", [0.1] * 5)]) == [] == unsettled([first])  # faster
    steady = [1.0 + 0.0001 * i for i in range(50)]
    assert unsettled([result("fa1", steady), result("fa2", steady)]) == []  # the same within 1 %
    scattered = [1.0 + 0.1 * (i % 50) for i in range(400)]
    assert unsettled([result("fa1", scattered), result("fa2", scattered)])[0].endswith("on the machine: the times scatter too widely")


def test_experiment_says_what_is_not_settled() -> None:
    """One line for all rows whose medians' bounds meet those of the row that they are compared with, unless they are the same within 3 %."""
    base = row("naive", [1.0, 1.1, 1.2, 1.3, 1.4])
    wide, fast = row("fa2", [0.5, 1.0, 1.1, 1.5, 3.0]), row("fa1", [0.1] * 5)
    assert unsettled_rows([(fast, base)]) == [] == unsettled_rows([(row("fa2", [1.0] * 50), row("fa1", [1.01] * 50))])
    (line,) = unsettled_rows([(wide, base), (fast, base), *[(wide, base)] * 12])
    assert line.startswith(f"whether it is faster or slower than naive is not settled: of {wide.Test} fa2, ") and " fa1" not in line
    assert " and 1 more; stop other work on the machine, or repeat the command with --samples " in line
