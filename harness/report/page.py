"""Rows -> one HTML page that needs no other file and no network: what was measured where, verdicts, figures, a table that sorts."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..fault import printable
from ..files import Json
from ..row import CEILING, Row
from .summary import ceiling_words, facts
from .views import HOST_TIME, PASS_WORDS, latest, picojoules, with_texts

#: Columns of the table: heading, and the column of results.csv, whose value each cell has in full.
COLUMNS = {
    "test": "Test",
    "kernel": "Kernel",
    "pass": "Type",
    "B": "Batch",
    "H": "Heads",
    "S": "SeqLen",
    "D": "HeadDim",
    "dtype": "dtype",
    "causal": "causal",
    "timing": "timing",
    "ms": "KernelTime_ms",
    "p20": "p20_ms",
    "p80": "p80_ms",
    "TFLOP/s": "TFLOPS",
    "GB/s": "Bandwidth_GBps",
    "vs torch": "Speedup",
    "W": "power_w",
    "MHz": "sm_clock_mhz",
    "pJ/FLOP": "",
    "max |error|": "MaxError",
    "status": "Status",
    "why": "ErrorMessage",
}
EMPTY = "<td></td>"  # a column of nothing else is left out
_ALLOWED = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 1rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; } h1 { overflow-wrap: anywhere; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } img { width: 26rem; max-width: 100%; background: white; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { cursor: pointer; position: sticky; top: 0; background: Canvas; text-align: left; } th, td { padding: .15rem .5rem; }
td[data-v] { text-align: right; white-space: nowrap; } tr:nth-child(even) td { background: rgb(128 128 128 / .08); }
.FAIL, .ERROR { color: #c0241c; font-weight: 600; } .REFUSED, .ABSENT { color: #8a6d00; } .PASS { color: #1a7f37; }
"""
_SCRIPT = """
const body = document.querySelector("tbody"), all = [...body.rows];
const value = (row, i) => { const cell = row.cells[i]; return cell.dataset.v === undefined ? cell.textContent : +cell.dataset.v; };
const compare = (a, b) => a === "" || b === "" ? (a === "") - (b === "") : a < b ? -1 : a > b ? 1 : 0;
let last, up;
document.querySelectorAll("th").forEach((head, i) => head.onclick = () => {
  up = last === i ? !up : true; last = i;
  const empty = row => value(row, i) === "";
  all.sort((a, b) => empty(a) || empty(b) ? empty(a) - empty(b) : (up ? 1 : -1) * compare(value(a, i), value(b, i)));
  body.append(...all);
});
document.querySelector("input").oninput = event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of all) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
};
"""


def page(rows: Sequence[Row], env: Json, title: str, pictures: Sequence[Path]) -> str:
    """The page of a run: its latest rows, its environment record, and PNG files, which it holds. All texts are escaped."""
    every, title = latest(with_texts(rows, printable)), printable(title)
    measured = [row for row in every if not row.Kernel.startswith(CEILING)]
    shown = {head: column for head, column in COLUMNS.items() if any(_cell(row, column) != EMPTY for row in measured)}
    counts = Counter(row.Status for row in measured)
    verdicts = ", ".join(f'<span class="{status}">{counts[status]} {status}</span>' for status in sorted(counts, key=lambda s: -counts[s]))
    about_run = facts(rows, env)
    if ceilings := [ceiling_words(row) for row in every if row.Kernel.startswith(CEILING)]:
        about_run["ceilings"] = "; ".join(ceilings)
    if any(row.device == "cpu" for row in measured):
        about_run["times"] = HOST_TIME
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(printable(str(value)))}</dd>" for name, value in about_run.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">
<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{len(measured)} rows: {verdicts}. Medians; a result counts only if every output agreed with a float64 reference.</p>
<dl>{about}</dl>
<div>{"".join(map(_figure, pictures))}</div>
<p><input type="search" placeholder="kernel, test, dtype …" aria-label="show rows with these words"> Click a heading to sort.</p>
<div class="wide"><table><thead><tr>{"".join(f"<th>{escape(head)}</th>" for head in shown)}</tr></thead><tbody>
{chr(10).join(_row(row, shown.values()) for row in measured)}
</tbody></table></div>
<script>{_SCRIPT}</script></body></html>
"""


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>\n'


def _row(row: Row, columns: Iterable[str]) -> str:
    return f"<tr>{''.join(_cell(row, column) for column in columns)}</tr>"


def _cell(row: Row, column: str) -> str:
    value = getattr(row, column) if column else picojoules(row)
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return f"<td>{'causal' if value else ''}</td>"
    if isinstance(value, float):
        return f'<td data-v="{float(value)!r}">{value:.4g}</td>'
    if isinstance(value, int):
        return f'<td data-v="{value}">{value}</td>'
    text = escape(PASS_WORDS[str(value)] if column == "Type" else str(value))
    return f'<td class="{text}">{text}</td>' if column == "Status" else f"<td>{text}</td>"
