"""Rows -> a DataFrame, figures and a summary: of any run, on any machine, from results.csv and env.json alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pandas as pd

from ..fault import DataFault, DiskFault
from ..files import Json, environment, make_folder, settle, write_files
from ..row import TYPES, read_rows, table_at
from . import figures, ladder, ratios
from .distribution import TIMES, distributions
from .page import page
from .style import drawn, plain, save
from .summary import commit_of, dates_of, summary
from .views import MODES, PASS_WORDS, PREFIX, View, by_head_dim, families, ladders, over_head_dims, shape_of, views, with_texts

if TYPE_CHECKING:
    from matplotlib import figure as plot

    from ..row import Row

Figure: TypeAlias = "Callable[[View, str, str], plot.Figure | None]"


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame, one column a field."""
    return pd.DataFrame([dataclasses.asdict(row) for row in rows])


def read(folder: Path) -> tuple[list[Row], Json]:
    """The rows and the environment record of a folder of `experiment` (or of a results.csv); no record is an empty one.

    Raises DataFault where the rows are missing or are not ours.
    """
    table = table_at(folder)
    with suppress(DiskFault):  # an experiment holds it: what it has written whole is drawn
        settle(table.parent)
    if not (rows := read_rows(table)):
        raise DataFault(f"{table} has no rows", "the run was interrupted before its first one", "fa-cli experiment writes them")
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

    The files are [name_][BACKWARD_|BOTH_]FIGURE[_what tells them apart][_cpu].png; plots/README.md lists the figures. What `name` says
    is not said again. A figure has the six kernels of View.picked, and no two figures show one number; CPU and GPU rows, dtypes and
    masks never share an axis. Of problems that a seed drew (env has it) there is one figure, of ratios. Raises DiskFault.
    """
    if isinstance(source, Path):
        source, record = read(source)
        env = record if env is None else env
    rows, title = with_texts(source, plain), plain(title)
    every = views(rows)
    if (env or {}).get("seed") is not None:
        return _ratios(rows, every[:1], out_dir, name, title, env or {}, progress)
    made: list[Path] = []
    tables = ladders(rows)
    several = [view for view in every if _compares(view, every)]
    total = len(several) + len(tables)
    for number, view in enumerate(several):
        pass_ = PASS_WORDS[view.type]
        label = _title(title or name, pass_)

        def add(
            kind: str, part: View, function: Figure, label: str = label, told: str = f"{number}/{total} draws", pass_: str = pass_
        ) -> bool:
            progress(f"{told} {kind}, {pass_} {part.dtype}")
            some = part.picked()
            draws = partial(function, some, label, _footer(some, env or {}))
            made.extend(files := _saved(draws, out_dir, _name(name, part.type, kind) + part.suffix))
            return bool(files)

        apart = view.only(())
        for part in over_head_dims(view):
            add("headdim_analysis", part, figures.headdim_analysis)
            apart = apart.only((*apart.rows, *part.rows))
        for part in families(view):
            for kind, function in OVER_S.items():
                add(kind, part, function)
            apart = apart.only((*apart.rows, *part.rows))
        some = view.only(row for row in view.rows if row.energy_mj)
        over = families(some)
        for part in over if over and sum(len(part.rows) for part in over) == len(some.rows) else (some,):
            add("energy", part, figures.energy)
        rates = len(view.shapes) <= FEW and add("roofline", view, figures.roofline)
        rest = view.only(row for row in view.rows if shape_of(row) not in apart.shapes)
        for part in by_head_dim(rest) if rest.rows and not rates else ():
            add("kernel_comparison", part, figures.kernel_comparison)
    for number, panels in enumerate(tables, len(several)):
        progress(f"{number}/{total} draws the ladder")
        first = panels[0]
        draws = partial(ladder.draw, panels, _title(title or name, PASS_WORDS[first.type]), _footer(first, env or {}))
        made += _saved(draws, out_dir, _name(name, first.type, "ladder") + "_causal" * first.causal + "_cpu" * first.cpu)
    return made


def _ratios(
    rows: Sequence[Row], first: Sequence[View], out_dir: Path, name: str, title: str, env: Json, progress: Callable[[str], None]
) -> list[Path]:
    """The figure of problems that a seed drew: ours over the best peer by device time."""
    found = [each for each in distributions(rows) if each.time == TIMES[0]]
    if not found or not first:
        return []
    progress("0/1 draws the ratios")
    footer = _footer(first[0].only(rows), env)
    draws = partial(ratios.draw, found, f"{title or name}, seed {env['seed']}", footer)
    return _saved(draws, out_dir, "_".join(filter(None, (name, "ratios"))) + "_cpu" * first[0].cpu)


def _compares(view: View, others: Sequence[View]) -> bool:
    """Whether a view is worth figures next to the others of its run: not with one kernel where another has several, nor with one shape
    where the other mask has several and is drawn. The summary has its numbers."""
    beside = [other for other in others if (other.device, other.type) == (view.device, view.type)]
    several = [other for other in beside if len(other.timed) > 1] or beside
    masks = [other for other in several if other.dtype == view.dtype]
    return any(other is view for other in several) and (len(view.shapes) > 1 or all(len(other.shapes) < 2 for other in masks))


#: The figures of a family over S.
OVER_S: dict[str, Figure] = {
    "seqlen_analysis": figures.seqlen_analysis,
    "latency_scaling": figures.latency_scaling,
    "memory": figures.memory,
    "error_vs_S": figures.error_vs_s,
}
#: The most shapes in a roofline: it has all that a problem's rates are, so they are drawn nowhere else then.
FEW = 4


def _name(name: str, type_: str, kind: str) -> str:
    """[name_][BACKWARD_|BOTH_]kind, where neither the pass nor the kind repeats a word of the name; FORWARD_ where that has another."""
    words, modes = name.lower().split("_"), [mode for mode in TYPES if mode in name.lower().split("_")]
    mode = MODES[type_]
    pass_ = "" if mode in modes else f"{mode.upper()}_" if modes else PREFIX[type_]
    first, _, more = kind.partition("_")
    rest = kind if first != words[-1] else more
    return "_".join(filter(None, (name, pass_.rstrip("_"), rest)))


def _saved(draws: Callable[[], plot.Figure | None], folder: Path, name: str) -> list[Path]:
    """The file of a figure, where there is one and it can be drawn. A name has words of rows in it, a device's: what is no letter of a
    file name becomes -."""
    file = folder / (re.sub(r"[^\w.+=()@,-]+", "-", name)[:200] + ".png")
    path = drawn(file.name, lambda: save(figure, file) if (figure := draws()) else None)
    return [path] if path else []


def redraw(
    folder: Path,
    pictures: Path | None = None,
    name: str = "",
    title: str = "",
    texts: Path | None = None,
    with_page: bool = False,
    figures: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """The figures and summary.md of a folder again, from its files alone; returns their paths.

    Figures go into pictures (default: the folder), with_page index.html next to them, which holds them; summary.md into texts (default:
    pictures). Elsewhere than in the folder their names start with `name`, since those of several experiments lie side by side there.
    Nothing else is written. title: by default the sweep's of env.json, else name. Without `figures` none is drawn.
    """
    rows, env = read(folder)
    title = title or str(env.get("title") or "") or name
    folder = folder if folder.is_dir() else folder.parent
    pictures = pictures or folder
    apart = pictures.resolve() != folder.resolve()
    make_folder(pictures)
    texts = texts or pictures
    file = f"{name}_summary.md" if apart and name and texts.resolve() != folder.resolve() else "summary.md"
    write_files(texts, {file: summary(rows, env, title or "Results").encode()})
    made = draw(rows, pictures, name if apart else "", title, env, progress) if figures else []
    if with_page:
        index = pictures / (f"{name}_index.html" if apart and name else "index.html")
        write_files(pictures, {index.name: page(rows, env, title or "Results", made).encode()})
        made.insert(0, index)
    return [texts / file, *made]


def _title(title: str, pass_: str) -> str:
    """The title with the pass, unless it names just that."""
    said, named = ({word for word in ("forward", "backward") if word in text.lower()} for text in (pass_, title))
    return title if said == named else f"{title}: {pass_}" if title else pass_


def _footer(view: View, env: Json) -> str:
    """A line that traces a figure: device, timing, day, commit, and how many kernels are in the summary alone."""
    commit = commit_of(view.rows, env)
    hidden = f"{view.hidden} more in summary.md" if view.hidden else ""
    parts = [view.device_name, view.timing, dates_of(view.rows), f"commit {commit}" if commit else "", "fa-cli", hidden]
    return plain(" · ".join(filter(None, parts)), 400)
