"""report's HTML page in a real browser: it sorts and filters, shows a bar's numbers, follows the dark mode, fits a phone, and runs no
script of the data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from harness.files import environment
from harness.report.page import page
from harness.row import read_rows

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TITLE = "<script>document.body.dataset.broken = 1</script>"
#: Acts as a reader does, and writes what is then on the page into an attribute.
READER = """
const rows = () => [...document.querySelectorAll("tbody tr")].filter(row => !row.hidden);
const heads = [...document.querySelectorAll("th")], at = heads.findIndex(head => head.textContent === "TFLOP/s");
const rates = () => rows().map(row => row.cells[at].dataset.v).filter(value => value !== undefined).map(Number);
const found = {errors: 0, all: rows().length, broken: "broken" in document.body.dataset, title: document.title};
onerror = () => { found.errors += 1; };
heads[at].click(); found.up = rates();
heads[at].click(); found.down = rates();
const search = document.querySelector("input[type=search]");
search.value = "hopper bfloat16"; search.dispatchEvent(new Event("input"));
found.kept = rows().map(row => row.textContent);
const problems = () => [...document.querySelectorAll("section")].filter(card => card.getBoundingClientRect().height);
found.cards = problems().map(card => card.closest("details").querySelector("summary").textContent);
search.value = ""; search.dispatchEvent(new Event("input")); found.again = rows().length;
const bars = () => [...document.querySelectorAll("li")].filter(bar => bar.getBoundingClientRect().height);
found.first = bars().length; document.querySelector("#every").click(); found.every = bars().length;
const bar = bars()[0], tip = bar.querySelector(".tip");
found.hidden = tip.getBoundingClientRect().height; bar.focus();
found.shown = tip.getBoundingClientRect().height; found.tip = tip.textContent;
document.documentElement.style.width = "400px";  // a window is 500 at least
const outside = [...document.body.querySelectorAll("*")].filter(element => !element.closest(".wide"));
found.wide = Math.max(...outside.map(element => element.getBoundingClientRect().left + element.scrollWidth));
found.background = getComputedStyle(heads[0]).backgroundColor;
document.body.dataset.found = JSON.stringify(found);
"""

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser: apt install chromium")


def read(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the reader finds on the page of the ladder's committed rows, and what the browser's console says."""
    folder = ROOT / "experiments" / "ladder"
    text = page(read_rows(folder / "results.csv"), environment.env_beside(folder / "results.csv"), TITLE, [])
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{READER}</script></body>"), encoding="utf-8")
    words = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    words += ["--enable-logging=stderr", "--virtual-time-budget=5000", *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    return json.loads(unescape(match[1])), said


@needs_browser
def test_the_page_sorts_filters_and_runs_nothing_of_the_data(tmp_path: Path) -> None:
    """A heading sorts, again the other way; words filter; a title that is a script is a text; the console is silent."""
    found, said = read(tmp_path)
    assert not said and not found["errors"] and not found["broken"] and found["title"] == TITLE
    assert len(found["up"]) > 50 and found["up"] == sorted(found["up"]) and found["down"] == sorted(found["up"], reverse=True)
    assert 0 < len(found["kept"]) < found["all"] == found["again"]
    assert all("hopper" in text and "bfloat16" in text for text in found["kept"])


@needs_browser
def test_a_bar_shows_its_numbers(tmp_path: Path) -> None:
    """Words filter the problems too. At first a problem has the fastest of ours and the peers, on request every kernel; a bar in focus has
    its numbers below it."""
    found, _ = read(tmp_path)
    assert found["cards"] and all("bfloat16" in text for text in found["cards"])
    assert 0 < found["first"] < found["every"]
    assert found["hidden"] == 0 < found["shown"] and re.match(r"fa2: [\d.]+ ms, .* TFLOP/s, 1\.\d+ times as fast as torch-", found["tip"])


@needs_browser
def test_the_page_fits_a_phone_in_the_dark(tmp_path: Path) -> None:
    """400 pixels wide only the table scrolls; where the reader prefers dark, headings are dark."""
    narrow, _ = read(tmp_path, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert 0 < narrow["wide"] <= 400
    light, _ = read(tmp_path, "--blink-settings=preferredColorScheme=1")
    dark, bright = (sum(map(int, re.findall(r"\d+", of["background"])[:3])) for of in (narrow, light))
    assert dark < 200 < 600 < bright
