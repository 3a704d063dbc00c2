"""Ours beside the best peer of the same run, cell by cell: python experiments/hopper/table.py [RESULTS.CSV]

Without a file it reads results.csv beside this one; those of hopper_backward and hopper_deterministic have the same form. It prints the
table and writes it as table.md beside the rows. Settled speeds are those of the turns (warm), bursts those after a rest. The best peer of
a cell is the fastest one, in the energy columns the one that takes the least. Ours is in each cell the highest step that has a time there,
which is the one that auto takes; where it is not the same in all cells, the first column of numbers names it. Means are geometric, over the
cells of one dtype in which ours and a peer have a time; what has none is named below the table. So are rows during whose energy the device
was idle: energy over power is how long a run took meanwhile, and what the device takes at rest for the difference is in their pJ/FLOP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import peers
from harness.files import write_files
from harness.kernel import catalogue
from harness.report.summary import markdown_table
from harness.report.views import geometric_mean, picojoules
from harness.row import CEILING, Row, read_rows

COLUMNS = (
    "cell",
    "settled, TF",
    "best peer",
    "ours / peer",
    "burst, TF",
    "best peer",
    "ours / peer",
    "pJ/FLOP",
    "least peer",
    "ours / peer",
)
#: The part of the time that a device may be idle while energy is counted, before the row is named.
IDLE = 0.1
#: A cell: dtype, head dim, mask, length.
Cell = tuple[str, int, bool, int]
#: Ours, the best peer's and its name; None where one of them is missing.
Pair = tuple[float, float, str] | None


def cell_of(row: Row) -> Cell:
    """The cell that a row is of."""
    return row.dtype, row.HeadDim, row.causal, row.SeqLen


def steps_of(name: str) -> tuple[int, ...]:
    """The steps of a kernel or a pair, the forward pass's first; empty for another name than the ladder's."""
    steps = {kernel.name: kernel.number or 0 for kernel in catalogue()}
    parts = name.split("+")
    return tuple(steps[part] for part in (parts[0], parts[-1])) if steps.keys() >= set(parts) else ()


def ours_of(rows: Sequence[Row]) -> dict[Cell, str]:
    """For each cell the highest step that has a time in it, else the highest one that is there. Raises UsageError where there is none."""
    found: dict[Cell, tuple[bool, tuple[int, ...], str]] = {}
    for row in rows:
        if steps := steps_of(row.Kernel):
            found[cell_of(row)] = max(found.get(cell_of(row), (False, (), "")), (row.Status == "PASS", steps, row.Kernel))
    if not found:
        raise click.UsageError("no kernel of the ladder is among the rows; name ours: --ours NAME")
    return {cell: name for cell, (_, _, name) in found.items()}


def pair(rows: Sequence[Row], ours: str, value: Callable[[Row], float | None], best: Callable[..., float]) -> Pair:
    """Ours and the best peer's value among the rows of a cell and timing."""
    found = {row.Kernel: value(row) for row in rows if row.Status == "PASS"}
    others = {each: name for name, each in found.items() if each and peers.find(name)}
    mine = found.get(ours)
    if not mine or not others:
        return None
    top = best(others)
    return mine, top, others[top]


def pairs(rows: Sequence[Row], ours: Mapping[Cell, str]) -> dict[Cell, tuple[Pair, Pair, Pair]]:
    """For each cell: settled and burst in 10^12 FLOP/s, energy in 10^-12 J a FLOP."""
    found = {}
    for cell, name in sorted(ours.items()):
        of = [row for row in rows if cell_of(row) == cell]
        warm, burst = ([row for row in of if row.timing == timing] for timing in ("warm", "burst"))
        found[cell] = (
            pair(warm, name, lambda row: row.TFLOPS, max),
            pair(burst, name, lambda row: row.TFLOPS, max),
            pair(warm, name, picojoules, min),
        )
    return found


def name_of(cell: Cell) -> str:
    """A cell in words."""
    dtype, dim, causal, seq = cell
    return f"{dtype.replace('bfloat16', '')} D{dim} S{seq}{' causal' if causal else ''}".strip()


def means(found: dict[Cell, tuple[Pair, Pair, Pair]], which: int) -> list[str]:
    """A line for each dtype: the geometric mean of ours over the best peer, those of head dims and masks, and the least cell."""
    lines = []
    for dtype in dict.fromkeys(cell[0] for cell in found):
        ratios = {cell: each[0] / each[1] for cell, three in found.items() if cell[0] == dtype and (each := three[which])}
        if not ratios:
            continue
        parts = [f"{dtype}, {len(ratios)} of {sum(cell[0] == dtype for cell in found)} cells: {geometric_mean(ratios.values()):.3f}"]
        groups: dict[str, list[float]] = {}
        for (_, dim, causal, _), ratio in ratios.items():
            groups.setdefault(f"D{dim}{' causal' if causal else ''}", []).append(ratio)
        parts += [f"{name} {geometric_mean(some):.3f}" for name, some in groups.items() if len(groups) > 1]
        edge = (max if which == 2 else min)(ratios, key=lambda cell: ratios[cell])  # of energy the most is the worst
        lines.append(f"{'; '.join(parts)}. Worst: {name_of(edge)}, {ratios[edge]:.3f}; {sum(r < 1 for r in ratios.values())} below 1.")
    return lines


def idle(rows: Sequence[Row]) -> list[str]:
    """The rows, in words, whose energy was counted while the device was idle for more than IDLE of the time, and for how much of it."""
    found = []
    for row in rows:
        if row.timing == "warm" and row.KernelTime_ms and row.energy_mj and row.power_w:
            part = 1 - row.KernelTime_ms * row.power_w / row.energy_mj
            if part > IDLE and not row.Kernel.startswith(CEILING):
                found.append(f"{row.Kernel} at {name_of(cell_of(row))} {part:.0%}")
    return found


def table(rows: Sequence[Row], ours: Mapping[Cell, str]) -> str:
    """The table in Markdown, with its means below."""
    found = pairs(rows, ours)
    names = sorted(set(ours.values()), key=steps_of)
    lines = []
    for cell, three in found.items():
        texts = [name_of(cell)]
        for number, each in enumerate(three):
            digits = ".3f" if number == 2 else ".0f"
            own = f" {ours[cell]}" if number == 0 and len(names) > 1 else ""
            texts += [f"{each[0]:{digits}}{own}", f"{each[1]:{digits}} {each[2]}", f"{each[0] / each[1]:.3f}"] if each else ["", "", ""]
        lines.append(texts)
    shown = [i for i in range(len(COLUMNS)) if any(texts[i] for texts in lines)]  # a sweep may have no bursts, and no energy
    cells = [[texts[i] for i in shown] for texts in lines]
    parts = [f"{' and '.join(names)} over the best peer of the same run:", markdown_table([COLUMNS[i] for i in shown], cells)]
    for which, what in enumerate(("Settled", "Burst", "Energy a FLOP (less is better)")):
        parts += [f"{what}, geometric mean of ours over the best peer's. {line}" for line in means(found, which)]
    if waited := idle(rows):
        parts.append(f"Idle for more than {IDLE:.0%} of the time while energy was counted: {', '.join(waited)}.")
    failed = {(cell_of(row), row.Kernel): row for row in rows if row.Status != "PASS" and cell_of(row) in ours}
    for (cell, name), row in failed.items():
        if name == ours[cell] or steps_of(name) > steps_of(ours[cell]):  # or auto would take another than the table shows
            parts.append(f"{name_of(cell)}: {name} {row.Status}, {row.ErrorMessage}")
    return "\n\n".join(parts) + "\n"


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=Path(__file__).with_name("results.csv"))
@click.option("--ours", help="The kernel; by default the highest step in each cell.")
def main(path: Path, ours: str | None) -> None:
    """Print the table of a results.csv and write it as table.md beside it."""
    rows = read_rows(path)
    cells = {cell_of(row): ours for row in rows if row.Kernel == ours} if ours else ours_of(rows)
    if not cells:
        raise click.UsageError(f"{ours} is not among the rows; there are {', '.join(dict.fromkeys(row.Kernel for row in rows))}")
    text = table(rows, cells)
    write_files(path.parent, {"table.md": text.encode()})
    click.echo(text, nl=False)


if __name__ == "__main__":
    main()
