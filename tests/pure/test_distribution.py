"""Ours over the best peer: the numbers of a table made by hand, the summary's and JSON's, and the dots of the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import pyplot
from rows import row

from harness.problem import Problem
from harness.report import compose, ratios
from harness.report.distribution import COLUMNS, Distribution, distributions, line_of, missing
from harness.report.summary import summary
from harness.row import Row, encoded

P = Problem.of(2, 8, 512, 64, dtype="bfloat16")
REPRO = "fa-cli run --compute hopper --mode both --batch 2 --heads 8 --seq 512 --dim 64"


def problem(number: int, ours: float | None, *theirs: float | None, dtype: str = "bfloat16", mode: str = "backward") -> list[Row]:
    """The rows of one problem: milliseconds of ours and of two peers."""
    of = P.with_(dtype=dtype, seq_q=512 + number, seq_kv=512 + number)
    test = f"seed5-{number:03}"
    every = [row("hopper", test, ours, of, mode, repro=REPRO)]
    return every + [row(name, test, ms, of, mode) for name, ms in zip(("fa4", "torch-cudnn"), theirs, strict=True)]


ROWS = [each for number, ms in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)) for each in problem(number, 10.0, float(ms), ms + 0.5)]


def one(rows: list[Row], time: str = "kernel") -> Distribution:
    (found,) = (each for each in distributions(rows) if each.time == time)
    return found


def test_numbers_by_hand() -> None:
    """Eleven ratios of 0.1 to 1.1: the tenths are 0.2 to 1.0, the median 0.6, nine below 1, the geometric mean (11!)^(1/11) / 10."""
    found = one(ROWS)
    assert found.values == pytest.approx([n / 10 for n in range(1, 12)])
    assert found.tenths == pytest.approx([n / 10 for n in range(2, 11)]) and found.below == 9
    assert found.mean == pytest.approx(39916800 ** (1 / 11) / 10)
    assert (found.Type, found.dtype, found.without_ours, found.without_peer) == ("BAC", "16 bit", 0, 0)
    assert [each.ratio for each in found.worst] == pytest.approx([n / 10 for n in range(1, 11)])
    expected = ["16 bit", "BAC", "kernel", "11", "0.491", "0.100", *(f"0.{n}00" for n in range(2, 10)), "1.000", "1.100", "9"]
    assert list(line_of(found)) == expected and len(COLUMNS) == len(expected)
    lone = one(problem(0, 2.0, 3.0, 4.0))
    assert lone.tenths == [1.5] * 9 and lone.mean == pytest.approx(1.5)


def test_the_fastest_of_each_side() -> None:
    """Of several kernels and peers the fastest; the command runs those two, the rates are theirs."""
    rows = [*problem(0, 4.0, 3.0, 2.0), row("fa2", "seed5-000", 8.0, P, "backward", repro=REPRO.replace("hopper", "fa2"))]
    worst = one(rows).worst[0]
    assert (worst.ours.Kernel, worst.best.Kernel, worst.ratio) == ("hopper", "torch-cudnn", 0.5)
    assert worst.command == REPRO.replace("hopper", "hopper,torch-cudnn")
    assert worst.rates() == pytest.approx((P.flops("backward") / 4e9, P.flops("backward") / 2e9))


def test_a_plain_call_takes_the_longer_of_both_times() -> None:
    """The host's where it is slower: another peer may then be the best one."""
    p = P.with_()
    rows = [
        row("hopper", "seed5-000", 0.010, p, call_ms=0.030),
        row("fa4", "seed5-000", 0.008, p, call_ms=0.060),
        row("torch-cudnn", "seed5-000", 0.020, p, call_ms=0.005),
        row("torch-flash", "seed5-000", 0.001, p, timing="cold"),
    ]
    kernel, call = one(rows).worst[0], one(rows, "call").worst[0]
    assert (kernel.best.Kernel, kernel.ratio) == ("fa4", pytest.approx(0.8))
    assert (call.best.Kernel, call.ratio) == ("torch-cudnn", pytest.approx(2 / 3))


def test_the_operator_is_called_as_peers_are() -> None:
    """Where it was measured, a plain call of ours is its; device time is the kernels' alone."""
    p = P.with_()
    rows = [row("hopper", "x", 0.010, p, call_ms=0.012), row("fa4", "x", 0.020, p, call_ms=0.030)]
    rows.append(row("operator", "x", 0.008, p, call_ms=0.060))
    kernel, call = one(rows).worst[0], one(rows, "call").worst[0]
    assert (kernel.ours.Kernel, kernel.ratio) == ("hopper", 2.0) and (call.ours.Kernel, call.ratio) == ("operator", 0.5)
    failed = [*rows[:2], row("operator", "x", None, p)]
    assert one(failed, "call").worst[0].ours.Kernel == "hopper"


def test_a_kernel_that_is_launched_is_no_call() -> None:
    """fa3-source has no host's part of a library: its device time counts, its call does not."""
    p = P.with_()
    names = {"hopper": (0.03, 0.04), "fa4": (0.02, 0.06), "fa3-source": (0.01, 0.02)}
    rows = [row(name, "seed5-000", ms, p, "backward", call_ms=call) for name, (ms, call) in names.items()]
    best = {time: one(rows, time).worst[0].best.Kernel for time in ("kernel", "call")}
    assert best == {"kernel": "fa3-source", "call": "fa4"} and one(rows, "call").values == pytest.approx([1.5])


def test_what_has_no_ratio_is_told() -> None:
    """Ours that failed and peers that refuse are not left out silently; dtypes and passes are apart, float16 and bfloat16 together."""
    rows = [
        *problem(0, None, 1.0, 1.0),
        *problem(1, 1.0, None, None),
        *problem(2, 1.0, 2.0, None),
        *problem(3, 1.0, 2.0, 4.0, dtype="float16"),
    ]
    rows += [*problem(4, 1.0, 2.0, 2.0, dtype="float32"), *problem(4, 1.0, 3.0, 3.0, mode="forward")]
    found = {(each.dtype, each.Type): each for each in distributions(rows) if each.time == "kernel"}
    assert list(found) == [("16 bit", "FOR"), ("16 bit", "BAC"), ("float32", "BAC")]
    both = found["16 bit", "BAC"]
    assert (len(both.ratios), both.without_ours, both.without_peer) == (2, 1, 1)
    assert missing(found.values()) == "Problems that are not counted: 16 bit BAC: 1 without a time of ours, 1 without a time of a peer."
    assert not missing([one(ROWS)]) and not distributions(problem(0, None, 1.0, 1.0))


def test_the_summary_of_a_seed(tmp_path: Path) -> None:
    """Before the tables of times, only where env.json has a seed; each of the worst ten with its command. One figure is drawn."""
    text = summary(ROWS, {"seed": 5}, "Mixed")
    assert text.index("## Ours over the best peer, seed 5") < text.index("## backward, bfloat16")
    assert "| 16 bit | BAC | kernel | 11 | 0.491 | 0.100 | 0.200 |" in text
    assert text.count(f"`{REPRO.replace('hopper', 'hopper,fa4')}`") == 10 and "- 0.100: hopper" in text
    assert "best peer" not in summary(ROWS, {}, "Mixed") and "no problem has" in summary(problem(0, 1.0, None, None), {"seed": 5})
    (tmp_path / "results.csv").write_bytes(encoded(tmp_path / "results.csv", ROWS, anew=True))
    (tmp_path / "env.json").write_text(json.dumps({"seed": 5, "title": "Mixed", "run_id": "r"}))
    assert [path.name for path in compose.redraw(tmp_path)] == ["summary.md", "ratios.png"]
    assert [path.name for path in compose.redraw(tmp_path, tmp_path / "plots", "mixed")] == ["mixed_summary.md", "mixed_ratios.png"]


def test_the_figure_has_a_dot_a_problem() -> None:
    """At its work and its ratio, in the colour of its head dim and the mark of its dtype; a panel a pass, with the mean in its title."""
    wide = P.with_(head_dim=128, dtype="float32")
    rows = [
        *ROWS,
        row("hopper", "wide", 1.0, wide, "backward"),
        row("fa4", "wide", 3.0, wide, "backward"),
        *problem(1, 1.0, 2.0, 2.0, mode="forward"),
    ]
    figure = ratios.draw([each for each in distributions(rows) if each.time == "kernel"], "Mixed, seed 5", "footer")
    forward, backward = figure.axes
    assert forward.get_title().startswith("forward\n16 bit mean 2.000, 0 of 1 below 1")
    assert "16 bit mean 0.491, 9 of 11 below 1\nfloat32 mean 3.000, 0 of 1" in backward.get_title()
    dots = {(line.get_xdata()[0], round(line.get_ydata()[0], 9)): line for line in backward.lines if len(line.get_xdata()) == 1}
    assert len(dots) == 12
    assert dots[wide.flops("backward"), 3.0].get_marker() == "s"
    narrow = dots[P.flops("backward"), 0.1]
    assert narrow.get_marker() == "o" and narrow.get_color() != dots[wide.flops("backward"), 3.0].get_color()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["head dim 1 to 64", "head dim 97 to 128", "bfloat16", "float32"]
    pyplot.close(figure)
