"""What a run's files alone give: views of the rows, the summary, the pictures and their names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rows import CPU, append_row, ceilings, lengths, row

from harness.fault import DataFault, DiskFault, Dropped
from harness.problem import Problem
from harness.report import compose as report
from harness.report.picture import error_figure, error_picture
from harness.report.summary import summary
from harness.report.views import by_head_dim, families, latest, limiter, roofs, views

ROOT = Path(__file__).resolve().parent.parent.parent


def test_faults(tmp_path: Path) -> None:
    """No rows is a data fault, a folder that cannot be made a disk fault."""
    with pytest.raises(DataFault, match=r"results\.csv is missing"):
        report.redraw(tmp_path)
    append_row(tmp_path / "results.csv", row("fa2", "S128", 1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFault):
        report.redraw(tmp_path, tmp_path / "file" / "plots")


def test_error_picture(tmp_path: Path) -> None:
    """The worst cell is marked and named; what is not finite is worse than any number; all zeros is no fault."""
    errors = np.full((64, 8), 1e-6)
    errors[40, 3] = 0.25
    first = error_figure(errors, "O of fa2")
    assert error_picture(errors, "O of fa2", tmp_path / "error_O.png").read_bytes()[:4] == b"\x89PNG"
    errors[50, 1] = np.inf
    error_picture(np.zeros((4, 1)), "zero", tmp_path / "zero.png")
    assert "worst: row 40, block 3: 0.25" in first.axes[0].get_title()
    assert "worst: row 50, block 1: not finite" in error_figure(errors, "O of fa2").axes[0].get_title()
    assert (first.axes[0].lines[0].get_xdata()[0], first.axes[0].lines[0].get_ydata()[0]) == (3, 40)
    assert "|error|" in first.axes[1].get_ylabel()


@pytest.mark.parametrize("settings", ["MPLBACKEND", "matplotlibrc"])
def test_figures_need_nothing_of_the_users_matplotlib(tmp_path: Path, settings: str) -> None:
    """Jupyter names a backend for the commands of its terminals too; a matplotlibrc may ask for a LaTeX that is not there."""
    for each in lengths("fa2", "naive"):
        append_row(tmp_path / "results.csv", each)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.family: nothing\n" * (settings == "matplotlibrc"))
    code = (
        "import sys; from pathlib import Path; import numpy as np; from harness import report\n"
        "report.error_picture(np.ones((4, 2)), 'O', Path('error_O.png')); report.redraw(Path())\n"
        "import matplotlib; print(matplotlib.rcParams['text.usetex'])"
    )
    environment = (
        os.environ
        | {"PYTHONPATH": str(ROOT)}
        | ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"} if settings == "MPLBACKEND" else {})
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == f"{settings == 'matplotlibrc'}\n", done  # a user's own figures are the user's
    assert {"error_O.png", "seqlen_analysis.png"} <= {path.name for path in tmp_path.glob("*.png")}


def test_a_figure_that_cannot_be_drawn_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, the summary and the page are there; a disk that is full is still a fault."""
    for each in lengths("fa2", "naive"):
        append_row(tmp_path / "results.csv", each)
    monkeypatch.setitem(report.OVER_S, "seqlen_analysis", lambda *_: 1 / 0)
    with pytest.warns(Dropped, match=r"^seqlen_analysis.png was not drawn: ZeroDivisionError: division by zero$"):
        made = report.redraw(tmp_path, with_page=True)
    assert [path.name for path in made] == ["summary.md", "index.html", "memory.png", "error_vs_S.png"]
    monkeypatch.setattr("harness.report.picture.error_figure", lambda *_: 1 / 0)
    with pytest.warns(Dropped, match=r"error_O.png was not drawn"):
        assert error_picture(np.zeros((4, 1)), "zero", tmp_path / "error_O.png") is None
    monkeypatch.undo()
    monkeypatch.setattr(report, "save", lambda *_: (_ for _ in ()).throw(DiskFault("full", "", "")))
    with pytest.raises(DiskFault):
        report.redraw(tmp_path)


def test_an_error_picture_loads_little(tmp_path: Path) -> None:
    """It follows the verdict of every wrong run, and these take seconds to load."""
    code = (
        "import sys; from pathlib import Path; import numpy as np; from harness import report\n"
        f"report.error_picture(np.ones((4, 2)), 'O', Path({str(tmp_path / 'error_O.png')!r}))\n"
        "print([name for name in ('pandas', 'seaborn', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "[]\n" and (tmp_path / "error_O.png").exists(), done


def test_files_are_pictures_and_the_folder_is_enough(tmp_path: Path) -> None:
    """results.csv and env.json alone give every figure at 300 dpi and the summary; elsewhere the names start with the experiment's."""
    for each in lengths("fa2", "naive", upto=2):
        append_row(tmp_path / "results.csv", each)
    (tmp_path / "env.json").write_text(json.dumps({"git_commit": "feedbeef00", "command": ["fa-cli", "experiment"]}))
    made = report.redraw(tmp_path, title="Title")
    wanted = {"seqlen_analysis", "memory", "error_vs_S"}
    assert {path.name for path in made} == {"summary.md"} | {f"{name}.png" for name in wanted}
    from PIL import Image

    for path in made[1:]:
        with Image.open(path) as image:
            assert image.format == "PNG" and round(image.info["dpi"][0]) == 300
    assert "fa-cli experiment" in (tmp_path / "summary.md").read_text()
    elsewhere = report.redraw(tmp_path, tmp_path / "plots", "seqlen")
    assert {path.name for path in elsewhere[1:]} == {"seqlen_analysis.png", "seqlen_memory.png", "seqlen_error_vs_S.png"}


def test_the_latest_row_counts() -> None:
    """A row measured again replaces the old one; a failure replaces every timing; a time replaces a failure."""
    warm = row("fa2", "S128", 1.0)
    cold, again, failed = replace(warm, timing="cold"), replace(warm, KernelTime_ms=2.0), row("fa2", "S128", None)
    assert latest([warm, cold, again]) == [again, cold]
    assert latest([warm, cold, failed]) == [failed]
    assert latest([failed, warm]) == [warm]


def test_families() -> None:
    """Shapes that differ in S only; at a fixed number of tokens too; not the ten mixed shapes of a comparison."""
    assert [f.suffix for f in families(views(lengths("fa2"))[0])] == [""]
    tokens = [row("fa2", f"S{s}", 1.0, Problem.of(4096 // s, 2048 // d, s, d)) for d in (64, 128) for s in (512, 1024, 2048, 4096)]
    (view,) = views(tokens)
    assert [f.suffix for f in families(view)] == ["_D64", "_D128"] and [len(f.rows) for f in families(view)] == [4, 4]
    mixed = [row("fa2", str(i), 1.0, Problem.of(*shape)) for i, shape in enumerate([(1, 1, 128), (2, 8, 256), (2, 8, 512), (8, 16, 32)])]
    assert families(views(mixed)[0]) == []
    assert [v.suffix for v in by_head_dim(view, most=7)] == ["_D64", "_D128"] and by_head_dim(view) == [view]


def test_what_limits_a_kernel() -> None:
    """The lowest ceiling is named with the part of it that is reached, at the largest problem; by hand for S = 1024."""
    rows = [row("fa2", "S1024", 1.0), row("naive", "S1024", 100.0)]
    (view,) = views(rows + ceilings(gemm_float32=10.0, copy=100.0, exp=0.01))
    work = 4 * 4 * 8 * 64 * 1024**2 / 1e9  # TFLOP/s in a millisecond: 8.59
    byte = 4 * 8 * 1024 * (4 * 64 + 1) * 4
    roof = {each.name: each.tflops for each in roofs(view, rows[0])}
    assert roof == pytest.approx({"memory bandwidth": 0.1 * work * 1e9 / byte, "arithmetic": 10.0, "exponentials": 0.01 * 256})
    assert [each.name for each in roofs(view, rows[0])] == ["exponentials", "arithmetic", "memory bandwidth"]
    assert "faster units" in str(limiter(view, "fa2")) and "no ceiling is near" in str(limiter(view, "naive"))
    (view,) = views(rows + ceilings(gemm_float32=10.0, copy=1e6, exp=100.0))
    assert "86% of the lowest ceiling, arithmetic (10 TFLOP/s by GEMM float32 10 TFLOP/s" in str(limiter(view, "fa2"))
    assert str(limiter(view, "fa2")).endswith("arithmetic limits it.")
    assert limiter(views(rows)[0], "fa2") is None
    (view,) = views([row("split", "S1024", 1.0), *rows, *ceilings(gemm_float32=5.0, gemm_float16=30.0, copy=1e6, exp=100.0)])
    assert "86% of the lowest ceiling, arithmetic (10 TFLOP/s by GEMM float16 30 TFLOP/s, 3 products for one" in str(limiter(view, "split"))
    assert "faster units" in str(limiter(view, "fa2")), "no split"
    pair = replace(row("split_hopper+split", "S1024", 1.0), Type="BOT")
    half = replace(pair, Kernel="fa2+split")
    (view,) = views([replace(row("split", "S1024", 1.0), Type="BOT"), pair, half, *ceilings(gemm_float32=5.0, gemm_float16=30.0)])
    assert all("10 TFLOP/s by GEMM float16 30 TFLOP/s" in str(limiter(view, kernel)) for kernel in ("split", pair.Kernel))
    assert "GEMM float32" in str(limiter(view, half.Kernel)), "only one of its passes is split"
    (view,) = views([replace(pair, Type="FOR"), *ceilings(gemm_float32=5.0, gemm_float16=30.0)])
    assert "GEMM float16" in str(limiter(view, pair.Kernel))


def test_summary() -> None:
    """Times by shape with the best in bold, failures in words, geometric means over the shapes all kernels have, machine, command."""
    rows = [row("naive", "S128", 2.0), row("fa2", "S128", 0.5), row("naive", "S256", 8.0), row("fa2", "S256", 1.0)]
    rows += [
        row("naive", "S512", None),
        row("fa2", "S512", 4.0, ErrorMessage="THROTTLED (power brake)"),
        row("fa3", "S512", None, Status="ABSENT"),
    ]
    text = summary(rows, {"device_name": "NVIDIA H200", "command": ["fa-cli", "experiment", "--seqlen"]}, "Title")
    assert text.startswith("# Title\n\n## forward, float32, not causal, warm — NVIDIA H200\n")
    assert "| shape | naive | fa2 | fa3 |" in text
    assert "| S128 | 2 | **0.5** |  |" in text and "| S512 | FAIL | **4†** | ABSENT |" in text
    assert "over the 2 of 3 shapes" in text
    assert "| naive | 4 |" in text and "| fa2 | 0.7071 |" in text  # sqrt(2 * 8), sqrt(0.5 * 1)
    assert "- naive FAIL (S512): naive is wrong" in text and "THROTTLED (power brake)" in text
    assert "Command: `fa-cli experiment --seqlen`" in text and "date 2026-11-20" in text
    near = {"p20_ms": 0.9, "p80_ms": 1.3, "n_samples": 36}  # the median lies between 0.9 and 1.3
    rows = [
        row("fa2", "S128", 1.0, **near),
        row("fa1", "S128", 1.2, **near),
        row("naive", "S128", 9.0, **near | {"p20_ms": 8, "p80_ms": 9}),
    ]
    assert "| S128 | **1** | **1.2** | 9 |" in summary(rows, {}), "what the samples do not tell from the best"
    assert "not GPU performance" not in text and "not GPU performance" in summary(lengths("fa2", **CPU), {})


def test_frame_has_a_column_a_field() -> None:
    """For notebooks."""
    frame = report.frame([row("fa2", "S128", 1.0)])
    assert frame.loc[0, "KernelTime_ms"] == 1.0 and list(frame.columns[:3]) == ["Test", "Kernel", "Type"]


def test_names_say_nothing_twice() -> None:
    """Of a sweep, a pass and a figure."""
    names = {
        ("longseq", "FOR", "seqlen_analysis"): "longseq_seqlen_analysis",
        ("seqlen", "FOR", "seqlen_analysis"): "seqlen_analysis",
        ("seqlen", "FOR", "memory"): "seqlen_memory",
        ("memory", "FOR", "memory"): "memory",
        ("roofline", "FOR", "roofline"): "roofline",
        ("backward", "BAC", "kernel_comparison"): "backward_kernel_comparison",
        ("ladder_backward", "BAC", "energy"): "ladder_backward_energy",
        ("backward", "FOR", "energy"): "backward_FORWARD_energy",
        ("both", "BOT", "energy"): "both_energy",
        ("both", "FOR", "energy"): "both_FORWARD_energy",
        ("", "BAC", "energy"): "BACKWARD_energy",
        ("mine", "BOT", "energy"): "mine_BOTH_energy",
    }
    assert {key: report._name(*key) for key in names} == names
    titles = {
        ("The ladder, backward", "backward"): "The ladder, backward",
        ("Forward and backward", "forward + backward"): "Forward and backward",
        ("Forward and backward", "forward"): "Forward and backward: forward",
        ("Lengths", "backward"): "Lengths: backward",
        ("", "forward"): "forward",
    }
    assert {key: report._title(*key) for key in titles} == titles


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler: apt install g++")
def test_the_python_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The cells of docs/, with the checkout's name of the package; tests/torch/test_torch_op.py runs those that need torch."""
    cells = [
        cell
        for page in sorted((ROOT / "docs").glob("*.md"))
        for cell in re.findall(r"```python\n(?!import torch)(.*?)```", page.read_text(), re.S)
        if "from fa_cli import" in cell  # else it is a part of the one before
    ]
    monkeypatch.chdir(tmp_path)
    for cell in cells:
        homes = {"Problem": "problem", "experiment": "verbs.experiment", "frame": "report", "run": "verbs.run"}
        names = re.search(r"^from fa_cli import (.*)$", cell, re.M)[1].split(", ")
        exec(re.sub(r"^from fa_cli .*$", "; ".join(f"from harness.{homes[n]} import {n}" for n in names), cell, flags=re.M), {})
    said = capsys.readouterr().out
    assert len(cells) == 2 and "KernelTime_ms" in said and "True" in said
