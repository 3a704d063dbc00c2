"""What `fa-cli ring` prints: on the first rank only. The other ranks have nothing to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...check import budget
from ...problem import MODES, PASSES
from ...verbs.results import errors_of
from ..printing import QUIET, document, line, near, note, table

if TYPE_CHECKING:
    from ...ring.job import Outcome


def ring(outcome: Outcome | None, files: Sequence[Path], as_json: bool, verbosity: int) -> int:
    """Errors of each tensor, times of each step, the ring compared with one device. Returns the exit code."""
    if outcome is None:
        return 0
    code = 0 if outcome.passed else 1
    if as_json:
        document(ring_json(outcome))
        return code
    if verbosity > QUIET:
        _tables(outcome)
    words = f"{outcome.ranks} rank{'s' * (outcome.ranks != 1)}", outcome.partition, outcome.spec.problem.describe(), f"on {outcome.device}"
    line("PASS" if outcome.passed else "FAIL", outcome.compute, outcome.spec.mode, *words)
    for verdict in outcome.verdicts.values():
        if not verdict.passed:
            line(" ", budget.message(verdict))
    for path in files:
        print(f"written  {near(path)}")
    for text in _notes(outcome):
        note(text)
    return code


def ring_json(outcome: Outcome) -> dict[str, Any]:
    """run's keys, and what a ring has besides: README, "JSON"."""
    problem, seconds, passed = outcome.spec.problem, outcome.seconds, outcome.passed
    steps = [dict(dataclasses.asdict(step)) for each in outcome.times.values() for step in each.steps]
    return {
        "compute": outcome.compute,
        "mode": outcome.spec.mode,
        "device": outcome.device,
        "arithmetic": outcome.arithmetic,
        "problem": problem.record,
        "passed": passed,
        "time_ms": {name: s * 1e3 if s else None for name, s in seconds.items()},
        "tflops": {name: problem.flops(name) / 1e12 / s if s else None for name, s in seconds.items()},
        "gbps": {name: problem.bytes(name) / 1e9 / s if s else None for name, s in seconds.items()},
        "errors": {name: errors_of(v) for name, v in outcome.verdicts.items()},
        "outputs": None,
        "ranks": outcome.ranks,
        "partition": outcome.partition,
        "steps": [{"pass": step.pop("pass_"), **step} for step in steps] if passed else [],
        "overlap": outcome.spec.overlap,
        "hidden": {name: outcome.times[name].hidden if passed and name in outcome.times else None for name in PASSES},
        "single_ms": {name: s * 1e3 if passed else None for name, s in outcome.single.items()},
        "efficiency": outcome.efficiency,
        "differences": dict(outcome.differences),
        "repeated": outcome.repeated,
        "device_bytes": outcome.device_bytes,
        "simulated": outcome.simulated,
        "transport": outcome.transport,
    }


def _tables(outcome: Outcome) -> None:
    table(
        ("tensor", "max |error|", "budget", "max |difference| to one device", "verdict"),
        [
            (v.tensor, v.max_abs, v.budget, outcome.differences.get(v.tensor), "PASS" if v.passed else "FAIL")
            for v in outcome.verdicts.values()
        ],
    )
    if not outcome.passed:
        return
    print()
    columns = ("pass", "step", "compute ms", "communication ms", "MB sent")
    steps = [s for each in outcome.times.values() for s in each.steps]
    table(columns, [(s.pass_, s.step, s.compute_ms, s.communication_ms, s.bytes / 1e6) for s in steps])
    print()
    rows = []
    for name in MODES[outcome.spec.mode]:
        seconds, single, hidden = outcome.seconds[name], outcome.single.get(name), outcome.times[name].hidden
        assert seconds is not None
        each = outcome.spec.problem.flops(name) / 1e12 / seconds / outcome.ranks
        efficiency = outcome.efficiency[name]
        if outcome.device == "cpu" and efficiency and efficiency > 1:  # ranks with cores that one process had not
            efficiency = None
        share, efficiency = (100 * x if x is not None else None for x in (hidden, efficiency))
        rows.append((name, seconds * 1e3, each, share, single and single * 1e3, single and single / seconds, efficiency))
    names = ("pass", "ms", "TFLOP/s a rank", "communication hidden %", "one device ms", "speed-up", "efficiency %")
    shown = [i for i in range(len(names)) if i != 2 or outcome.device != "cpu"]
    table([names[i] for i in shown], [[row[i] for i in shown] for row in rows])
    memory = "memory" if outcome.device == "cpu" else "device memory"
    print(f"({outcome.device_bytes / 1e6:.4g} MB of {memory} on the fullest rank)")


def _notes(outcome: Outcome) -> list[str]:
    found = list(outcome.notes)
    if outcome.simulated:
        link = outcome.spec.bandwidth
        assert link
        words = f"times are predicted from their steps and {link / 1e9:g} GB/s"
        found.append(f"simulated: {outcome.ranks} ranks took turns on one device; {words}")
    elif outcome.device == "cuda" and outcome.ranks > 1:
        found.append(f"messages between GPUs: {outcome.transport}")
    if outcome.device == "cpu":
        share = "" if outcome.simulated else "; ranks share the cores of a machine, so speed-up and efficiency mean little"
        found.append(f"CPU time (CPU engine), not GPU performance{share}")
    if not outcome.repeated:
        found.append("the last run differs from the first in some bits: see --deterministic")
    if outcome.share < 1:
        found.append(f"{100 * outcome.share:.3g} % of the rows were held against float64")
    return found
