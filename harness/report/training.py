"""The figure of a training's speed: tokens a second of each attention, and the memory of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from ..files import disk_fault
from .palette import BLUE
from .style import GREY, drawn

#: A column of the CSV, its unit and what it is divided by.
PANELS = (("tokens_per_s", "1000 tokens/s", 1e3), ("step_peak_bytes", "peak memory of a step (MB)", 1e6))


def draw(rows: Sequence[Mapping[str, Any]], title: str, env: Mapping[str, Any], path: Path) -> Path | None:
    """A bar for each attention that was measured, its 20th to 80th percentile as a line. On a CPU there is no memory to show.

    rows: lines of speed.csv. Returns path, None (and a warning) where it cannot be drawn. Raises DiskFault.
    """
    return drawn(path.name, partial(_draw, rows, title, env, path), {})


def _draw(rows: Sequence[Mapping[str, Any]], title: str, env: Mapping[str, Any], path: Path) -> Path:
    timed = [row for row in rows if row["tokens_per_s"]]
    panels = [panel for panel in PANELS if any(row[panel[0]] for row in timed)] or list(PANELS[:1])
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels) + 1.4, 0.36 * len(timed) + 1.9), squeeze=False, sharey=True)
    colours = [GREY if str(row["attention"]).startswith("torch-") else BLUE for row in timed]
    names = [str(row["attention"]) for row in timed]
    for axis, (column, unit, one) in zip(axes.flat, panels, strict=True):
        values = [(row[column] or 0) / one for row in timed]
        axis.barh(names, values, color=colours)
        if column == "tokens_per_s":
            below = [max(0, v - row["p20"] / one) for v, row in zip(values, timed, strict=True)]
            above = [max(0, row["p80"] / one - v) for v, row in zip(values, timed, strict=True)]
            axis.errorbar(values, names, xerr=[below, above], fmt="none", ecolor="black", elinewidth=0.8)
        for name, value in zip(names, values, strict=True):
            axis.annotate(f"{value:,.4g}", (0, name), xytext=(4, 0), textcoords="offset points", va="center", color="white", fontsize=8)
        axis.set_xlabel(unit)
    axes.flat[0].invert_yaxis()
    figure.suptitle(f"{title}\n{env.get('device_name', '')}: {env.get('model', '')}", fontsize=9)
    figure.text(0.01, 0.01, f"commit {str(env.get('git_commit') or '')[:10]} · fa-cli", fontsize=6.5, color=GREY)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=200)
    except OSError as error:
        raise disk_fault(path.parent, error) from None
    finally:
        plt.close(figure)
    return path
