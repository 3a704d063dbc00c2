"""What the verbs compare and report print, as show.py does for the rest. They return the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .compare import ratio_interval
from .printing import QUIET, document, line, near, note, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .compare import Comparison
    from .contender import PassResult
    from .run import Result


def comparison(found: Comparison, as_json: bool, verbosity: int) -> int:
    """compare: a line a row both runs have, means of each kernel, and what only one of them has. Exit code 1 where --fail-if found something."""
    code = 0 if found.passed else 1
    if as_json:
        rest = {
            "geomean": found.geomean,
            "geomeans": found.geomeans,
            "untimed": found.untimed,
            "only_a": found.only_a,
            "only_b": found.only_b,
        }
        document(
            {"passed": found.passed, "rows": found.pairs, "counts": found.counts, "failures": found.failures, **rest, "notes": found.notes}
        )
        return code
    if verbosity > QUIET:
        table(
            ("kernel", "pass", "shape", "timing", "A ms", "B ms", "B / A", "95% interval", "verdict", "from"),
            [
                (
                    p.kernel, p.type, p.shape, p.timing, p.a_ms, p.b_ms, f"{p.ratio:.4f}",
                    f"{p.low:.4f} to {p.high:.4f}" if p.low is not None else "-", p.verdict,
                    p.basis + ", source changed" * p.source_changed,
                )
                for p in found.pairs
            ],
        )  # fmt: skip
        if found.pairs:
            line("")
            line("time of B / time of A, geometric means:")
            table(("kernel", "B / A"), [(name, f"{mean:.4f}") for name, mean in found.geomeans.items()])
        for each in found.untimed:
            line(f"no time  {each.kernel} {each.type} {each.shape}: {each.a_status} in A, {each.b_status} in B")
        for side, labels in (("A", found.only_a), ("B", found.only_b)):
            for label in labels:
                line(f"only {side}   {label}")
        for text in found.notes:
            note(text)
    for failure in found.failures:
        line("FAIL", failure)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    mean = f"; geometric mean of B / A {found.geomean:.4f}" if found.geomean else ""
    line("PASS" if found.passed else "FAIL", f"{len(found.pairs)} rows: {counts}{mean}")
    return code


def redrawn(paths: Sequence[Path], as_json: bool, verbosity: int) -> int:
    """report: the files that were written."""
    if as_json:
        document({"passed": True, "rows": [{"file": path.resolve()} for path in paths]})
    elif verbosity > QUIET:
        for path in paths:
            line(f"written  {near(path)}")
    return 0


def error_pictures(found: Sequence[Result]) -> list[Path]:
    """Draw where each tensor that failed its check is wrong, beside the outputs: error_<tensor>.png, later kernels' with their name."""
    made: list[Path] = []
    for place, result in enumerate(found):
        if not result.outputs:
            continue
        for each in result.passes.values():
            for tensor, picture in each.maps.items():
                from . import report  # matplotlib takes a second to load

                name = f"error_{tensor}.png" if place == 0 else f"error_{result.compute}_{tensor}.png"
                title = f"|error| of {tensor}, {result.compute}, {result.problem.describe()}"
                made.append(report.error_picture(picture, title, result.outputs / name))
    return made


def times_as_fast(mine: PassResult, base: PassResult) -> str:
    """base's time over mine, and its 95 % interval where there are samples enough."""
    ratio = base.timings["warm"].median_ms / mine.timings["warm"].median_ms
    interval = ratio_interval(mine.seconds, base.seconds)
    return f"{ratio:.3g}" + (f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else "")
