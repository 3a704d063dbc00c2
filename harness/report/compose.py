"""Rows -> a DataFrame, figures and a summary: of any run, on any machine, from results.csv and env.json alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from .. import environment
from ..fault import DataFault, DiskFault
from ..files import Json, make_folder, settle, write_files
from ..row import read_rows
from . import figures, ladder
from .figures import error_picture as error_picture
from .style import plain, save
from .summary import commit_of, dates_of, heading, summary
from .views import PASS_WORDS, PREFIX, View, by_head_dim, families, ladders, views

if TYPE_CHECKING:
    from matplotlib import figure as plot

    from ..row import Row

    Figure = Callable[[View, str, str], plot.Figure | None]


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame, one column a field."""
    return pd.DataFrame([dataclasses.asdict(row) for row in rows])


def read(folder: Path) -> tuple[list[Row], Json]:
    """The rows and the environment record of a folder of `experiment` (or of a results.csv); no record is an empty one.

    Raises DataFault where the rows are missing or are not ours.
    """
    table = folder / "results.csv" if folder.is_dir() else folder
    hint = "fa-cli experiment writes them; give its --output-dir"
    if not table.exists():
        raise DataFault(f"{table} is missing", "there are no rows to draw", hint)
    with suppress(DiskFault):  # an experiment holds it: what it has written whole is drawn
        settle(table.parent)
    if not (rows := read_rows(table)):
        raise DataFault(f"{table} has no rows", "the run was interrupted before its first one", hint)
    return rows, environment.env_beside(table)


def draw(
    source: Path | Sequence[Row],
    out_dir: Path,
    name: str = "",
    title: str = "",
    env: Json | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Draw every figure that rows (or those of a folder) have values for, as 300 dpi PNG files; returns their paths.

    The files are [name_][BACKWARD_|BOTH_]FIGURE[_what tells them apart][_cpu].png; plots/README.md lists the figures. A `name` of
    ladder is not repeated before the figure ladder. CPU and GPU rows, dtypes and masks never share an axis. Raises DiskFault.
    """
    if isinstance(source, Path):
        rows, found = read(source)
        env = found if env is None else env
    else:
        rows = list(source)
    rows, title = [_drawable(row) for row in rows], plain(title)
    made: list[Path] = []
    several, tables = views(rows), ladders(rows)
    for number, view in enumerate(several):
        pass_ = PASS_WORDS[view.type]
        label, footer = _title(title or name, pass_), _footer(view, env or {})
        drawn: list[tuple[str, View, Figure, str]] = [("kernel_comparison", v, figures.kernel_comparison, label) for v in by_head_dim(view)]
        drawn.append(("roofline", view, figures.roofline, f"Roofline: {pass_}"))
        for family in families(view):
            drawn += [
                ("seqlen_analysis", family, figures.seqlen_analysis, label),
                ("latency_scaling", family, figures.latency_scaling, label),
                ("memory", family, figures.memory, f"Memory: {pass_}"),
                ("error_vs_S", family, figures.error_vs_s, f"Error against float64: {pass_}"),
            ]
        for at, (kind, part, function, heading_) in enumerate(drawn, number * len(drawn)):
            progress(f"{at}/{(len(several) + len(tables)) * len(drawn)} draws {kind}, {pass_} {view.dtype}")
            if figure := function(part, heading_, footer):
                made.append(_save(figure, out_dir, f"{name}_" * bool(name) + PREFIX[view.type] + kind + part.suffix))
    for number, panels in enumerate(tables, len(several)):
        progress(f"{number}/{len(several) + len(tables)} draws the ladder")
        first, words = panels[0], " and ".join(panel.dtype for panel in panels)
        figure = ladder.draw(panels, _title(title or name, PASS_WORDS[first.type]), _footer(replace(first, dtype=words), env or {}))
        apart = "_causal" * first.causal + "_cpu" * first.cpu
        made.append(_save(figure, out_dir, f"{name}_" * (name not in ("", "ladder")) + PREFIX[first.type] + f"ladder{apart}"))
    return made


def _drawable(row: Row) -> Row:
    """A row whose texts a figure can hold."""
    texts: Json = {name: plain(value) for name, value in vars(row).items() if isinstance(value, str)}
    return replace(row, **texts)


def _save(figure: plot.Figure, folder: Path, name: str) -> Path:
    """Save a figure in the folder. A name has words of rows in it, a device's: what is no letter of a file name becomes -."""
    return save(figure, folder / (re.sub(r"[^\w.+=()@,-]+", "-", name)[:200] + ".png"))


def redraw(
    folder: Path,
    pictures: Path | None = None,
    name: str = "",
    title: str = "",
    figures: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """The figures and summary.md of a folder again, from its files alone; returns their paths.

    Figures go into pictures (default: the folder). Elsewhere than in the folder their names start with `name`, since the
    figures of several experiments lie side by side there. Without `figures` summary.md alone is written.
    """
    rows, env = read(folder)
    folder = folder if folder.is_dir() else folder.parent
    pictures = pictures or folder
    apart = pictures.resolve() != folder.resolve()
    make_folder(pictures)
    write_files(folder, {"summary.md": summary(rows, env, title or name or "Results").encode()})
    return [folder / "summary.md", *(draw(rows, pictures, name if apart else "", title, env, progress) if figures else ())]


def _title(title: str, pass_: str) -> str:
    """The title with the pass, unless it starts with that word and names no other."""
    says = title.lower()
    if says.startswith(pass_) and not any(other in says for other in PASS_WORDS.values() if other not in pass_):
        return title
    return f"{title}: {pass_}" if title else pass_


def _footer(view: View, env: Json) -> str:
    """One line below a figure: what it was measured on, when, at which commit."""
    commit = commit_of(view.rows, env)
    parts = [view.device_name, heading(view, view.timing), dates_of(view.rows), f"commit {commit}" if commit else "", "fa-cli"]
    return plain(" · ".join(filter(None, parts)), 400)
