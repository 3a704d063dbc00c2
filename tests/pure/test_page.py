"""The page of report: it parses, its numbers are those of results.csv, nothing of a run is markup, and it opens without a network."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rows import CPU, append_row, ceilings, lengths, row

from harness.problem import Problem
from harness.report import compose
from harness.report.bars import bars
from harness.report.page import COLUMNS, page
from harness.row import read_rows

VOID = {"meta", "img", "input"}
EVIL = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """What a browser would see: elements, which must be closed in order, the table's cells, texts outside style and script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[tuple[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("data-v")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data


def cells(found: Page) -> list[dict[str, tuple[str, str | None]]]:
    """The rows of the table by heading; a column that is left out is empty in each."""
    head, *rows = found.rows
    shown = [text for text, _ in head]
    assert shown == [text for text in COLUMNS if text in shown]
    table = [dict(zip(shown, each, strict=True)) for each in rows]
    assert all(any(line[text] != ("", None) for line in table) for text in shown)
    return [{text: line.get(text, ("", None)) for text in COLUMNS} for line in table]


def test_its_numbers_are_those_of_the_rows(tmp_path: Path) -> None:
    """Each row once, each number in full where it sorts by, through the files; energy a FLOP by hand."""
    rows = [replace(r, TFLOPS=1 / 3, MaxError=1e-7 / 3, Speedup=1.1, p20_ms=0.1 + 0.2) for r in lengths("fa2", "torch-math")]
    rows[0] = replace(rows[0], energy_mj=2 * 4 * 4 * 8 * 64 * 128**2 / 1e9, power_w=690.5, sm_clock_mhz=1665.0)
    rows += [row("fa3", "S128", None, Status="REFUSED", ErrorMessage="it takes bfloat16"), *ceilings(gemm_float32=50.0)]
    for each in rows:
        append_row(tmp_path / "results.csv", each)
    summary, index, *pictures = compose.redraw(tmp_path, title="A run", with_page=True)
    assert (summary.name, index.name) == ("summary.md", "index.html")
    table = cells(Page(index.read_text()))
    stored = [r for r in read_rows(tmp_path / "results.csv") if r.Kernel != "ceiling-gemm-float32"]
    assert len(table) == len(stored) == 9
    for line, each in zip(table, stored, strict=True):
        for head, column in COLUMNS.items():
            value = getattr(each, column) if column else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(str(line[head][1])) == value, head
                assert float(line[head][0]) == pytest.approx(value, rel=1e-3)
            elif value is None and column:
                assert line[head] == ("", None), head
    assert table[0]["pJ/FLOP"][0] == "2" and table[1]["pJ/FLOP"] == ("", None)
    assert (table[-1]["status"][0], table[-1]["why"][0], table[-1]["pass"][0]) == ("REFUSED", "it takes bfloat16", "forward")
    words = Page(index.read_text()).words
    assert "9 rows: 8 PASS, 1 REFUSED" in words and "gemm-float32 50 TFLOP/s" in words
    assert len(pictures) == index.read_text().count("data:image/png;base64,")


def test_it_holds_its_figures_and_needs_no_network(tmp_path: Path) -> None:
    """Every picture byte for byte; no address of another place, which its policy would refuse as well."""
    for each in lengths("fa2"):
        append_row(tmp_path / "results.csv", each)
    _, index, *pictures = compose.redraw(tmp_path, tmp_path / "out", "mine", "A run", with_page=True)
    assert index == tmp_path / "out" / "mine_index.html"
    text = index.read_text()
    held = [str(a["src"]).removeprefix("data:image/png;base64,") for tag, a in Page(text).found if tag == "img"]
    assert [base64.b64decode(each) for each in held] == [path.read_bytes() for path in pictures] and held
    assert not re.search(r"https?:|//|url\(|@import|\bsrc=\"(?!data:)|href", re.sub(r"base64,[^\"]+", "", text))
    assert "default-src 'none'" in text and [tag for tag, _ in Page(text).found].count("script") == 1


@pytest.mark.parametrize("where", ["title", "Kernel", "Test", "ErrorMessage", "command", "device_name", "git_commit"])
def test_nothing_of_a_run_is_markup(where: str) -> None:
    """A name with <script> is text, wherever it comes from."""
    rows = [replace(row("fa2", "S128", 1.0), **({where: EVIL} if where in COLUMNS.values() else {}))]
    env = {"command": ["fa-cli", EVIL if where == "command" else ""], "device_name": "a GPU", "git_commit": "0"}
    env |= {where: EVIL} if where in ("device_name", "git_commit") else {}
    text = page(rows, env, EVIL if where == "title" else "t", [])
    found = Page(text)
    assert [tag for tag, _ in found.found].count("script") == 1 and text.count("<script") == 1
    assert (EVIL if where != "git_commit" else EVIL[:10]) in found.words


def test_a_cpu_says_so() -> None:
    """Times of the CPU engine are no GPU's; without a record the page is whole too."""
    assert "CPU time (CPU engine), not GPU performance" in Page(page(lengths("fa2", **CPU), {}, "t", [])).words
    assert "not GPU performance" not in Page(page(lengths("fa2"), {}, "t", [])).words
    assert cells(Page(page([], {}, "t", []))) == []


def test_bars_have_ours_first_and_the_peers_in_order() -> None:
    """The fastest of ours, then each peer by its time, then a failure without a speed; other kernels of ours wait for a click."""
    rows = [row("torch-math", "S128", 4.0), row("fa2", "S128", 2.0), row("fa1", "S128", 3.0), row("torch-flash", "S128", 1.5)]
    rows += [row("mma", "S128", None), row("fa3", "S128", None, Status="REFUSED", ErrorMessage="it takes bfloat16")]
    text = bars(rows)
    assert re.findall(r'<li class="([a-z ]+)".*?<span>(\S+)</span>', text) == [
        ("ours", "fa2"),
        ("best", "torch-flash"),
        ("other", "torch-math"),
        ("other", "mma"),
        ("other more", "fa1"),
    ]
    assert re.findall(r"width: ([\d.]+)", text) == ["75.0", "100.0", "37.5", "0", "50.0"]
    assert '<b class="behind">0.750</b>' in text and "mma: FAIL. mma is wrong" in text
    assert "fa2: 2 ms, 20 % to 80 %: 1.8 to 2.4 ms" in text and "0.750 times as fast as torch-flash" in text


def test_bars_say_the_mean_and_fold() -> None:
    """Two problems, 2 and 0.5 times the best peer: the mean is 1. Without a peer there is no ratio; CPU bars have milliseconds."""
    rows = [row(kernel, test, ms) for test, kernel, ms in (("S128", "fa2", 1), ("S128", "fa3", 2), ("S256", "fa2", 4), ("S256", "fa3", 2))]
    assert "geometric mean 1.000, least 0.500; 1 of 2 problems below 1." in bars(rows)
    alone = bars([row(f"k{i}", "S128", 1.0 + i, **CPU) for i in range(8)])
    assert "<b" not in alone and alone.count(" more") == 2 and ">1 ms<" in alone
    assert bars([row("fa2", "S128", None)]) == ""
    many = bars([row("fa2", f"S{i}", 1.0, Problem.of(1, 1, i, 64, dtype=dtype)) for dtype in ("float32", "float16") for i in range(1, 50)])
    assert many.count("<details open>") == 1 and many.count("<details>") == 1
