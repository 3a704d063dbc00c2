"""Rows -> one HTML page that needs no other file and no network: verdicts, bars per problem, figures, a table that sorts, the machine."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..fault import printable
from ..files import Json
from ..row import CEILING, Row
from .bars import bars
from .summary import ceiling_words, dates_of, facts
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
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --ours: #0072b2; --best: #e69f00; --other: #b4b4b4; --good: #1a7f37; --bad: #c0241c; --odd: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --ours: #56b4e9; --other: #6b6b6b; --good: #4cc26a; --bad: #ff7b72; --odd: #d9b430; } }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem; } h1, h2, h3 { overflow-wrap: anywhere; line-height: 1.2; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 1rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; } input[type=search] { font: inherit; width: 21rem; max-width: 100%; box-sizing: border-box; }
label { white-space: nowrap; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; } details p { margin: .2rem 0 .6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1rem 1.5rem; }
section h3 { display: flex; justify-content: space-between; gap: 1rem; margin: 0 0 .2rem; font-size: 14px; }
ul { list-style: none; margin: 0; padding: 0; font-size: 13px; font-variant-numeric: tabular-nums; }
li { display: grid; grid-template-columns: 7rem minmax(0, 1fr) 4.2rem; gap: .5rem; position: relative; align-items: center; }
li > span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } li > span:nth-child(3) { text-align: right; }
.track i { display: block; height: .8rem; background: var(--other); border-radius: 0 2px 2px 0; }
.ours { font-weight: 600; } .ours i { background: var(--ours); } .best i { background: var(--best); }
.tip { display: none; position: absolute; z-index: 1; left: 0; right: 0; top: 100%; padding: .4rem .6rem; font-weight: 400;
  background: Canvas; color: CanvasText; border: 1px solid var(--other); border-radius: 4px; box-shadow: 0 2px 8px rgb(0 0 0 / .3); }
li:hover .tip, li:focus .tip { display: block; } .more { display: none; } body:has(#every:checked) .more { display: grid; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-left: .6rem; } h3 b { flex: none; }
.ahead { color: var(--good); } .behind { color: var(--bad); }
figure { display: inline-block; margin: 0 1rem 1rem 0; } img { width: 26rem; max-width: 100%; background: white; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { cursor: pointer; position: sticky; top: 0; background: Canvas; text-align: left; } th, td { padding: .15rem .5rem; }
td[data-v] { text-align: right; white-space: nowrap; } tr:nth-child(even) td { background: rgb(128 128 128 / .08); }
.FAIL, .ERROR { color: var(--bad); font-weight: 600; } .REFUSED, .ABSENT { color: var(--odd); } .PASS { color: var(--good); }
"""
_SCRIPT = """
const body = document.querySelector("tbody"), all = [...body.rows], cards = [...document.querySelectorAll("section")];
const value = (row, i) => { const cell = row.cells[i]; return cell.dataset.v === undefined ? cell.textContent : +cell.dataset.v; };
const compare = (a, b) => a === "" || b === "" ? (a === "") - (b === "") : a < b ? -1 : a > b ? 1 : 0;
let last, up;
document.querySelectorAll("th").forEach((head, i) => head.onclick = () => {
  up = last === i ? !up : true; last = i;
  const empty = row => value(row, i) === "";
  all.sort((a, b) => empty(a) || empty(b) ? empty(a) - empty(b) : (up ? 1 : -1) * compare(value(a, i), value(b, i)));
  body.append(...all);
});
document.querySelector("input[type=search]").oninput = event => {
  const words = event.target.value.toLowerCase().split(/\\s+/), fits = text => words.every(word => text.toLowerCase().includes(word));
  for (const row of all) row.hidden = !fits(row.textContent);
  for (const card of cards) card.hidden = !fits(card.closest("details").querySelector("summary").textContent + " " + card.textContent);
  for (const group of document.querySelectorAll("details")) group.hidden = !group.querySelector("section:not([hidden])");
};
"""
_MORE = '<label><input type="checkbox" id="every"> show every kernel</label>'
_KEY = """<p class="key">Each bar is the speed relative to the fastest of its problem; the number is {unit}.
<i style="background: var(--ours)"></i> the fastest of ours <i style="background: var(--best)"></i> the best peer
<i style="background: var(--other)"></i> others. The ratio in each heading is ours over the best peer. Point at a bar, or tap it, for its
numbers.</p>
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
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(printable(str(value)))}</dd>" for name, value in about_run.items())
    host = any(row.device == "cpu" for row in measured)
    where = " · ".join(filter(None, (about_run.get("device"), dates_of(rows), HOST_TIME if host else "")))
    drawn = bars(measured)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">
<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(printable(where))}</p>
<p>{len(measured)} rows: {verdicts}. Times are medians. A result counts only if every output agreed with a float64 reference.</p>
<p><input type="search" placeholder="show only: kernel, shape, dtype …" aria-label="show problems and rows with these words">
{_MORE if 'more"' in drawn else ""}</p>
{_KEY.format(unit="its CPU time" if host else "TFLOP/s") if drawn else ""}{drawn}
<div>{"".join(map(_figure, pictures))}</div>
<h2>All rows</h2>
<p>Click a heading to sort.</p>
<div class="wide"><table><thead><tr>{"".join(f"<th>{escape(head)}</th>" for head in shown)}</tr></thead><tbody>
{chr(10).join(_row(row, shown.values()) for row in measured)}
</tbody></table></div>
<h2>Measured with</h2>
<dl>{about}</dl>
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
