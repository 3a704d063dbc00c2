"""The verbs report and compare as users run them: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rows import append_row

from harness.problem import Problem
from harness.row import Row, read_rows

Run = Callable[..., Result]


def run(folder: Path, factor: float = 1.0, device_name: str = "NVIDIA H200") -> Path:
    """A folder with rows of two kernels over two lengths, all of them `factor` as slow as they are otherwise."""
    for length in (128, 256):
        for kernel, ms in (("naive", 4.0), ("fa2", 1.0)):
            p = Problem.of(4, 8, length, 64)
            time = ms * factor * length / 128
            facts: dict[str, Any] = {
                "KernelTime_ms": time,
                "p20_ms": time * 0.999,
                "p80_ms": time * 1.001,
                "n_samples": 50,
                "timing": "warm",
            }
            each = Row(
                Test=f"S{length}",
                Kernel=kernel,
                Type="FOR",
                Batch=4,
                Heads=8,
                SeqLen=length,
                HeadDim=64,
                heads_kv=8,
                seq_kv=length,
                dtype="float32",
                causal=False,
                scale=p.scale,
                Status="PASS",
                device="cuda",
                device_name=device_name,
                TFLOPS=p.flops("forward") / (time * 1e9),
                Bandwidth_GBps=p.bytes("forward") / (time * 1e6),
                **facts,
            )
            append_row(folder / "results.csv", each)
    return folder


def test_what_a_table_of_others_holds_is_only_text(fa_cli: Run, tmp_path: Path) -> None:
    """A results.csv may come from anyone: no escape sequence, no turned line and no HTML of its cells reaches a terminal or a page."""
    nasty = "\x1b[31m\u202e<script>alert(1)</script>\x9b2J"
    (row, *_) = read_rows(run(tmp_path / "seqlen") / "results.csv")
    bad = {"Kernel": nasty, "Test": nasty, "ErrorMessage": nasty, "device_name": nasty, "commit": nasty}
    append_row(tmp_path / "seqlen" / "results.csv", replace(row, **{name: text for name, text in bad.items() if hasattr(row, name)}))
    (tmp_path / "seqlen" / "env.json").write_text(json.dumps({"device_name": nasty, "command": [nasty, "`"]}))
    printed = [fa_cli("compare", "seqlen", "seqlen"), fa_cli("report", "seqlen", "--title", f"T{nasty}")]
    assert [result.exit_code for result in printed] == [0, 0], printed
    page, text = ((tmp_path / "seqlen" / name).read_text() for name in ("index.html", "summary.md"))
    for each in (*(result.output for result in printed), page, text):
        assert not set(each) & set("\x1b\u202e\x9b")
    assert "\\x1b[31m\\u202e<script>" in printed[0].stdout
    assert page.count("<script>") == 1 and page.count("&lt;script&gt;") >= 5
    commands = [line for line in text.splitlines() if line.startswith("Command: ")]
    assert "<script>" not in text.replace(commands[0], "") and "&lt;script>" in text and commands[0].count("`") == 2


def test_report(fa_cli: Run, tmp_path: Path) -> None:
    """Figures and summary beside the rows, or elsewhere under the folder's name."""
    run(tmp_path / "seqlen")
    result = fa_cli("report", "seqlen")
    assert result.exit_code == 0, result.output
    assert {"summary.md", "index.html", "seqlen_analysis.png"} <= {p.name for p in (tmp_path / "seqlen").iterdir()}
    assert "written  seqlen/summary.md" in result.stdout
    result = fa_cli("report", "seqlen", "--output-dir", "plots", "--json")
    files = [Path(each["file"]) for each in json.loads(result.stdout)["rows"]]
    assert (
        tmp_path / "plots" / "seqlen_analysis.png" in files
        and tmp_path / "plots" / "seqlen_index.html" in files
        and all(path.is_file() for path in files)
    )


def test_report_without_rows_is_exit_3(fa_cli: Run) -> None:
    """With a hint."""
    result = fa_cli("report", "nowhere")
    assert result.exit_code == 3 and "hint: " in result.stderr


def test_compare(fa_cli: Run, tmp_path: Path) -> None:
    """A line a row, means, a count of the verdicts; --fail-if turns it into a gate."""
    run(tmp_path / "a")
    run(tmp_path / "b", 1.1)
    result = fa_cli("compare", "a", "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("SLOWER") == 5 and "1.1000" in result.stdout
    assert "PASS 4 rows: 0 SAME, 0 FASTER, 4 SLOWER, 0 UNSURE; geometric mean of B / A 1.1000" in result.stdout
    assert fa_cli("compare", "a", "b", "--fail-if", "slower:20%").exit_code == 0
    result = fa_cli("compare", "a", "b", "--fail-if", "slower:5%")
    assert result.exit_code == 1 and "slower by 10.0%" in result.stdout
    assert fa_cli("compare", "b", "a", "--fail-if", "slower:5%", "-q").stdout.startswith("PASS 4 rows: 0 SAME, 4 FASTER")


def test_compare_of_nothing_that_passed_fails(fa_cli: Run, tmp_path: Path) -> None:
    """There is no time in either; where B is right now, that is no failure."""
    (row, *_) = read_rows(run(tmp_path / "good") / "results.csv")
    bad = replace(row, Status="FAIL", KernelTime_ms=None, timing=None)
    for name, each in (("a", bad), ("b", bad), ("c", replace(row, KernelTime_ms=None, timing=None))):
        append_row(tmp_path / name / "results.csv", each)
    result = fa_cli("compare", "a", "b")
    assert result.exit_code == 1 and "FAIL no row of both runs passed in B: nothing was compared" in result.stdout
    assert fa_cli("compare", "a", "b", "--json").exit_code == 1 and fa_cli("compare", "a", "c").exit_code == 0


def test_a_report_has_the_title_of_its_sweep(fa_cli: Run, tmp_path: Path) -> None:
    """It is in env.json; an older record has none, then it is the folder's name."""
    run(tmp_path / "seqlen")
    for record, words, title in (
        ({}, (), "seqlen"),
        ({"title": "Lengths"}, (), "Lengths"),
        ({"title": "Lengths"}, ("--title", "Mine"), "Mine"),
    ):
        (tmp_path / "seqlen" / "env.json").write_text(json.dumps(record))
        assert fa_cli("report", "seqlen", *words).exit_code == 0
        assert (tmp_path / "seqlen" / "summary.md").read_text().startswith(f"# {title}\n")
        assert f"<h1>{title}</h1>" in (tmp_path / "seqlen" / "index.html").read_text()
    assert "<th>MHz</th>" not in (tmp_path / "seqlen" / "index.html").read_text(), "a column that no row has"


def test_compare_json(fa_cli: Run, tmp_path: Path) -> None:
    """One document, also with exit code 1."""
    run(tmp_path / "a")
    run(tmp_path / "b", 1.1)
    result = fa_cli("compare", "a", "b", "--json", "--fail-if", "slower:5%")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["passed"] is False and len(found["failures"]) == 4
    assert found["rows"][0]["verdict"] == "SLOWER" and found["rows"][0]["ratio"] == pytest.approx(1.1)
    assert found["geomean"] == pytest.approx(1.1) and found["counts"]["SLOWER"] == 4 and found["only_a"] == []


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["a", "c"], 2, "different devices"),
        (["a", "a", "--fail-if", "slower"], 2, "slower:5%"),
        (["a", "nowhere"], 3, "is missing"),
        (["a"], 2, "Missing argument"),
    ],
)
def test_compare_refuses(words: list[str], code: int, why: str, fa_cli: Run, tmp_path: Path) -> None:
    """Another GPU, a condition that is not understood, a run that is not there."""
    run(tmp_path / "a")
    run(tmp_path / "c", device_name="NVIDIA A100")
    result = fa_cli("compare", *words)
    assert result.exit_code == code and why in result.stderr and "hint: " in result.stderr, result.output
    if words == ["a", "c"]:
        assert fa_cli("compare", *words, "--ignore-device").exit_code == 0
