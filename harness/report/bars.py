"""Rows -> the bars on the HTML page: for each problem the fastest of our kernels next to every peer, with the ratio to the best one."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .. import peers
from ..row import Row
from .summary import heading
from .views import Key, View, geometric_mean, picojoules, views

#: Problems after which the next group of bars is folded.
OPEN = 48
#: Bars of a problem that has no peer; more of ours are shown on request.
ALONE = 6


def bars(rows: Sequence[Row]) -> str:
    """The bars of every view of rows as HTML, a card per problem. Empty where nothing has a time. All texts are escaped."""
    parts: list[str] = []
    shown = 0
    for view in views(rows):
        cells = {kernel: view.cells(kernel) for kernel in view.kernels}
        cards = [(shape, [of[shape] for of in cells.values() if shape in of]) for shape in view.shapes]
        cards = [(shape, some) for shape, some in cards if any(row.KernelTime_ms for row in some)]
        if cards:
            parts.append(_group(view, cards, shown < OPEN))
            shown += len(cards)
    return "\n".join(parts)


def ours_and_best(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """Of the rows of one problem the fastest of our kernels and the fastest peer; None where there is none with a time."""
    timed = sorted((row for row in rows if row.KernelTime_ms), key=lambda row: row.KernelTime_ms or 0)
    ours = next((row for row in timed if peers.find(row.Kernel) is None), None)
    return ours, next((row for row in timed if peers.find(row.Kernel)), None)


def _ratio(rows: Sequence[Row]) -> float | None:
    """The best peer's time over ours."""
    ours, best = ours_and_best(rows)
    return best.KernelTime_ms / ours.KernelTime_ms if ours and best and ours.KernelTime_ms and best.KernelTime_ms else None


def _group(view: View, cards: Sequence[tuple[Key, list[Row]]], unfolded: bool) -> str:
    ratios = [ratio for _, some in cards if (ratio := _ratio(some))]
    said = ""
    if len(ratios) > 1:
        below = sum(ratio < 1 for ratio in ratios)
        said = f"<p>Ours over the best peer: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}; "
        said += f"{below} of {len(ratios)} problems below 1.</p>"
    inside = "\n".join(_card(view, shape, some) for shape, some in cards)
    name = escape(heading(view, view.timing))
    return f'<details{" open" * unfolded}><summary>{name}</summary>{said}<div class="cards">\n{inside}\n</div></details>'


def _card(view: View, shape: Key, rows: Sequence[Row]) -> str:
    """The bars of one problem: ours, the peers from the fastest on, what failed; then what is shown on request, more of ours."""
    ours, best = ours_and_best(rows)
    least = min(row.KernelTime_ms for row in rows if row.KernelTime_ms)
    timed = sorted((row for row in rows if row.KernelTime_ms), key=lambda row: (row is not ours, row.KernelTime_ms))
    first = [row for row in timed if row is ours or peers.find(row.Kernel)] if best else timed[:ALONE]
    first += [row for row in rows if row.Status in ("FAIL", "ERROR")]
    more = [row for row in timed if row not in first]
    ratio = _ratio(rows)
    said = f' <b class="{"ahead" if ratio >= 1 else "behind"}">{ratio:.3f}</b>' if ratio else ""
    lines = []
    for row in (*first, *more):
        kind = "ours" if row is ours else "best" if row is best else "other"
        width = f"{100 * least / row.KernelTime_ms:.1f}%" if row.KernelTime_ms else "0"
        lines.append(
            f'<li class="{kind}{" more" * (row in more)}" tabindex="0"><span>{escape(row.Kernel)}</span>'
            f'<span class="track"><i style="width: {width}"></i></span><span>{escape(_speed(row))}</span>'
            f'<span class="tip">{escape(_numbers(row, best))}</span></li>'
        )
    return f"<section><h3>{escape(view.label(shape))}{said}</h3><ul>{''.join(lines)}</ul></section>"


def _speed(row: Row) -> str:
    """The number next to a bar: TFLOP/s on a GPU, else milliseconds; without a time the status."""
    if row.KernelTime_ms is None:
        return row.Status
    return f"{row.KernelTime_ms:.3g} ms" if row.device == "cpu" or row.TFLOPS is None else f"{row.TFLOPS:.3g}"


def _numbers(row: Row, best: Row | None) -> str:
    """What is shown where the pointer is."""
    if row.KernelTime_ms is None:
        return f"{row.Kernel}: {row.Status}. {(row.ErrorMessage or '').partition(chr(10))[0]}"
    parts = [f"{row.KernelTime_ms:.4g} ms"]
    if row.p20_ms and row.p80_ms:
        parts.append(f"20 % to 80 %: {row.p20_ms:.4g} to {row.p80_ms:.4g} ms")
    if row.TFLOPS and row.device != "cpu":
        parts.append(f"{row.TFLOPS:.4g} TFLOP/s")
    if best and best is not row and best.KernelTime_ms:
        parts.append(f"{best.KernelTime_ms / row.KernelTime_ms:.3f} times as fast as {best.Kernel}")
    if row.pct_of_peak:
        parts.append(f"{row.pct_of_peak:.0f} % of the matrix product's speed")
    if energy := picojoules(row):
        parts.append(f"{energy:.3g} pJ/FLOP at {row.power_w or 0:.0f} W")
    if row.MaxError is not None:
        parts.append(f"largest error {row.MaxError:.3g}")
    return f"{row.Kernel}: {', '.join(parts)}"
