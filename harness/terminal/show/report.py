"""What the verbs compare and report print, as show/results.py does for the rest. They return the exit code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..printing import QUIET, VERBOSE, document, line, near, note, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...check.contender import PassResult
    from ...row import Row
    from ...verbs.compare import Comparison
    from ...verbs.experiment import Outcome
    from ...verbs.run import Result
    from ...verbs.tune import Tuned, Variant


#: Up to so many variants, tune prints each that is pruned; of more, how many for each reason (all with -v).
FEW = 12
#: What --check counts (Backend.watched), and why it may count nothing.
WATCHED = {
    "race": ("accesses watched", "no access to shared memory, outputs or workspaces"),
    "asan": ("CUDA threads run with every access checked", "no code that AddressSanitizer checks"),
}


def watched(check: str, seen: Sequence[tuple[str, int | None, bool]], one: str, many: str) -> None:
    """What --check found, and over what. seen: the label of each case (one, many: its name in words), what was watched in it, and
    whether the check found something.

    Where nothing was watched the check does not say that it found nothing.
    """
    unit, nothing = WATCHED[check]
    findings, total = sum(finding for *_, finding in seen), sum(count or 0 for _, count, _ in seen)
    cases = [label for label, count, finding in seen if count or finding]
    if cases:
        found = "1 finding" if findings == 1 else f"{findings} findings"
        line(f"{check} {found} in {len(cases)} {one if len(cases) == 1 else many}: {total:,} {unit}")
    if blind := [label for label, count, _ in seen if count == 0]:
        line(f"{check} watched nothing in {len(blind)} {one if len(blind) == 1 else many}: {nothing} in {', '.join(dict.fromkeys(blind))}")


def distributed(rows: Sequence[Row], seed: int) -> None:
    """experiment of problems that a seed drew: the distributions of ours over the best peer, and the worst problems with their commands."""
    from ...report import distribution as of  # numpy: not for list and --help

    if not (found := of.distributions(rows)):
        return
    print(f"ours over the best peer, seed {seed}: above 1 ours is faster")
    table(of.COLUMNS, list(map(of.line_of, found)))
    if text := of.missing(found):
        print(text)
    for each in found:
        if each.time == of.TIMES[0]:
            print(f"\nthe lowest of {each.Type}, {each.dtype}:")
            for one in each.worst:
                ours, theirs = one.rates()
                rates = f"{one.ours.Kernel} {ours:.3g} TFLOP/s, {one.best.Kernel} {theirs:.3g}"
                line(f"{one.ratio:.3f}  {rates}: {one.command or one.ours.Test}")


def distributions_json(outcome: Outcome) -> dict[str, object]:
    """The keys that JSON has of problems that a seed drew; none of others."""
    if outcome.seed is None:
        return {}
    from ...report.distribution import distributions

    return {"seed": outcome.seed, "distributions": [each.json() for each in distributions(outcome.rows)]}


def comparison(found: Comparison, as_json: bool, verbosity: int) -> int:
    """compare: a line a row both runs have, means of each kernel, and what only one has. Exit code 1 where --fail-if found something."""
    code = 0 if found.passed else 1
    if as_json:
        names = ("counts", "failures", "geomean", "geomeans", "untimed", "only_a", "only_b", "notes")
        document({"passed": found.passed, "rows": found.pairs, **{name: getattr(found, name) for name in names}})
        return code
    if verbosity > QUIET:
        table(
            ("kernel", "pass", "shape", "timing", "A ms", "B ms", "B / A", "95% interval", "verdict", "from"),
            [
                (
                    p.kernel,
                    p.type,
                    p.shape,
                    p.timing,
                    p.a_ms,
                    p.b_ms,
                    f"{p.ratio:.4f}",
                    f"{p.low:.4f} to {p.high:.4f}" if p.low is not None else "-",
                    p.verdict,
                    p.basis + ", source changed" * p.source_changed,
                )
                for p in found.pairs
            ],
        )
        if found.pairs:
            line("")
            line("time of B / time of A, geometric means:")
            table(("kernel", "B / A"), [(name, f"{mean:.4f}") for name, mean in found.geomeans.items()])
        for each in found.untimed:
            line(f"no time  {each.kernel} {each.type} {each.shape}: {each.a_status} in A, {each.b_status} in B")
        for side, labels in (("A", found.only_a), ("B", found.only_b)):
            for label in labels:
                line(f"only {side}   {label}")
        for text in (*found.notes, found.advice):
            if text:
                note(text)
    for failure in found.failures:
        line("FAIL", failure)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    if not found.pairs and not found.failures and code:
        line("FAIL", "no row of both runs passed in B: nothing was compared")
        return code
    mean = f"; geometric mean of B / A {found.geomean:.4f}" if found.geomean else ""
    line("PASS" if found.passed else "FAIL", f"{len(found.pairs)} rows: {counts}{mean}")
    return code


def tuned(found: Tuned, as_json: bool, verbosity: int) -> int:
    """tune: a line a variant, the best first, those pruned by reason, and on a GPU the best as a row of choice for the header.

    Exit code 1 where a variant computes wrong, 5 where one does not launch or end, 2 where all are pruned.
    """
    statuses = {row.status for row in found.rows}
    code = 1 if "FAIL" in statuses else 5 if "ERROR" in statuses else 0 if "PASS" in statuses else 2
    if as_json:
        document({"passed": code == 0, "rows": found.rows})
        return code
    cpu = found.device == "cpu"
    if verbosity > QUIET:
        line(f"{found.kernel.label}, {found.problem.describe()}, on {found.device_name}")
        names = list(found.rows[0].tiles)
        columns = ["", *names, "registers", "spills", "shared", "status", "CPU ms" if cpu else "ms"]
        energy = any(row.energy_mj for row in found.rows)
        columns += [] if cpu else ["TFLOP/s", "times as fast as the default"]
        columns += ["mJ", "W", "MHz", "pJ/FLOP"] if energy else []
        rows = [
            (
                "default" if row.default else "",
                *(row.tiles[name] for name in names),
                row.registers,
                row.spill_bytes,
                row.shared_bytes,
                row.status,
                row.ms,
                *(() if cpu else (row.tflops, _against_default(row))),
                *((row.energy_mj, row.power_w, row.sm_clock_mhz, row.pj_per_flop) if energy else ()),
                row.why,
                row.stack_bytes,
            )
            for row in found.rows
            if row.status != "PRUNED" or verbosity >= VERBOSE or len(found.rows) <= FEW
        ]
        table([*columns, "why", "local"], rows)
        if len(rows) < len(found.rows):
            for why, count in Counter(row.why for row in found.rows if row.status == "PRUNED").most_common():
                line(f"PRUNED  {count}: {why}")
    if cpu and "PASS" in statuses:
        note("these are CPU times of the CPU engine: they say nothing about a GPU, so no [[choice]] row is printed")
    if found.best:
        line("")
        what = "takes the least energy" if found.by == "energy" else "is the fastest"
        line(f"the default {what}" if found.best.default else f"what {what}, a row for {found.kernel.path.name} before those that it has:")
        for text in found.header_lines:
            line(text)
        if found.by == "time" and found.best.vs_low and found.best.vs_low < 1 and not found.best.default:
            note("its interval reaches below 1: it may be no faster than the default")
    right = sum(row.status == "PASS" for row in found.rows)
    pruned = sum(row.status == "PRUNED" for row in found.rows)
    line("PASS" if code == 0 else "FAIL", f"{right} of {len(found.rows)} variants are right, {pruned} pruned")
    return code


def _against_default(row: Variant) -> str | None:
    interval = f" ({row.vs_low:.3g} to {row.vs_high:.3g})" if row.vs_low and row.vs_high else ""
    return f"{row.vs_default:.3g}{interval}" if row.vs_default else None


def redrawn(paths: Sequence[Path], as_json: bool, verbosity: int) -> int:
    """report: the files that were written."""
    if as_json:
        document({"passed": True, "rows": [{"file": path.resolve()} for path in paths]})
    elif verbosity > QUIET:
        for path in paths:
            line(f"written  {near(path)}")
    return 0


def error_pictures(found: Sequence[Result]) -> list[Path]:
    """Draw where each tensor that failed its check is wrong, next to the outputs: error_<tensor>.png, later kernels' with their name."""
    made: list[Path] = []
    for place, result in enumerate(found):
        if not result.outputs:
            continue
        for each in result.passes.values():
            for tensor, picture in each.maps.items():
                from ... import report  # matplotlib takes a second to load

                name = f"error_{tensor}.png" if place == 0 else f"error_{result.compute}_{tensor}.png"
                title = f"|error| of {tensor}, {result.compute}, {result.problem.describe()}"
                if path := report.error_picture(picture, title, result.outputs / name):
                    made.append(path)
    return made


def times_as_fast(mine: PassResult, base: PassResult) -> str:
    """base's time over mine, and its 95 % interval where there are samples enough."""
    from ...verbs.compare import ratio_interval

    a, b = mine.timings["warm"], base.timings["warm"]
    ratio = b.median_ms / a.median_ms
    interval = ratio_interval(a.seconds, b.seconds, a.turns, b.turns)
    return f"{ratio:.3g}" + (f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else "")


def unsettled(found: Sequence[Result]) -> list[str]:
    """A line for each result and pass whose speed the samples do not tell from that of the first result, and what to do."""
    from ...verbs.compare import ratio_interval, samples_that_tell, verdict

    lines: list[str] = []
    for result in found[1:]:
        for name, each in result.passes.items():
            if not (result.time_ms[name] and found[0].time_ms[name]):
                continue
            a, b = each.timings["warm"], found[0].passes[name].timings["warm"]
            interval = ratio_interval(a.seconds, b.seconds, a.turns, b.turns)
            if interval and (not interval[0] <= 1 <= interval[1] or verdict(*interval) == "SAME"):
                continue
            why = f"the interval {interval[0]:.3g} to {interval[1]:.3g} contains 1" if interval else "there are too few samples"
            wanted = samples_that_tell(min(len(a.seconds), len(b.seconds)), *(interval or (None, None)))
            what = f"{name}: whether {result.compute} or {found[0].compute} is faster is not settled"
            lines.append(f"{what}: {why}; {_settle(wanted)}")
    return lines


def unsettled_rows(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """The same of rows, each with the one that it is compared with: one line for all."""
    from ...report.views import median_bounds
    from ...verbs.compare import samples_that_tell, verdict

    names, wanted = list[str](), 0
    for row, base in pairs:
        if (a := median_bounds(row)) and (b := median_bounds(base)):
            low, high = b[0] / a[1], b[1] / a[0]
            if low <= 1 <= high and verdict(low, high) != "SAME":
                names.append(f"{row.Test} {row.Kernel}")
                wanted = max(wanted, samples_that_tell(min(row.n_samples or 0, base.n_samples or 0), low, high))
    if not names:
        return []
    which = ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
    return [f"whether it is faster or slower than {pairs[0][1].Kernel} is not settled: of {which}; {_settle(wanted)}"]


def _settle(wanted: int) -> str:
    """What settles which of two is faster. wanted: samples that would have told."""
    from ...verbs.compare import MOST_WANTED

    helps = f", or repeat the command with --samples {wanted}" if wanted <= MOST_WANTED else ": the times scatter too widely"
    return f"stop other work on the machine{helps}"
