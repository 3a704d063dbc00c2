"""What the verbs verify and compile print: a table, and below it each cause of a failure once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .printing import QUIET, VERBOSE, document, line, progress, table

if TYPE_CHECKING:
    from ..compile import CompileRow
    from ..verify import CaseResult


def cases(found: Sequence[CaseResult], as_json: bool, verbosity: int) -> int:
    """verify: a line a kernel and pass, and each case that failed with the command that runs it alone."""
    wrong = [case for case in found if not case.passed]
    code = 0 if not wrong else 1 if any(case.exit_code == 1 for case in wrong) else wrong[0].exit_code or 1
    if as_json:
        document({"passed": not wrong, "rows": found})
        return code
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for case in found:
        groups.setdefault((case.kernel, case.pass_), []).append(case)
    if verbosity > QUIET:
        progress(verbosity)("")
        rows = []
        for (name, pass_), group in groups.items():
            failed = sum(not case.passed for case in group)
            rows.append((name, pass_, len(group), failed, sum(case.seconds for case in group), "FAIL" if failed else "PASS"))
        table(("kernel", "pass", "cases", "failed", "seconds", "verdict"), rows)
        if verbosity >= VERBOSE:
            table(("kernel", "pass", "case", "what"), [(c.kernel, c.pass_, c.case.number, c.case.describe()) for c in found])
    told: dict[tuple[str, str, str], list[CaseResult]] = {}
    for case in wrong:
        told.setdefault((case.kernel, case.pass_, _cause(case)), []).append(case)
    for (name, pass_, _), same in told.items():
        case = same[0]
        line("FAIL", f"{name} {pass_} case {case.case.number}, {case.case.describe()}: {case.message}")
        print(f"     {case.repro}")
        if rest := [str(other.case.number) for other in same[1:]]:
            which = " ".join(rest if verbosity >= VERBOSE else rest[:3]) + " …" * (verbosity < VERBOSE and len(rest) > 3)
            line("FAIL", f"{name} {pass_}: the same in {len(rest)} more cases: {which}")
    line("FAIL" if wrong else "PASS", f"{len(found) - len(wrong)} of {len(found)} cases passed")
    return code


def _cause(case: CaseResult) -> str:
    """What cases with one cause share. A failure that is no compiler's stands for itself."""
    log = case.message.partition("\nhint: ")[0]
    return _first_error(log) if "\n" in log else f"case {case.case.number}"


def _first_error(log: str) -> str:
    """The first error of a compiler's log, which it may give for every dtype and architecture; the log where it has none."""
    return next((text.strip() for text in log.splitlines() if re.search(r"[:(]\d+(:\d+)?\)?: (fatal |catastrophic )?error", text)), log)


def compiled(rows: Sequence[CompileRow], as_json: bool, verbosity: int) -> int:
    """compile: resources of each kernel on each architecture. Exit code 5 where one does not compile, 1 where one spills."""
    code = 5 if any(row.status == "ERROR" for row in rows) else 0 if all(row.passed for row in rows) else 1
    if as_json:
        document({"passed": code == 0, "rows": rows})
        return code
    progress(verbosity)("")
    if verbosity > QUIET:
        columns = ("kernel", "pass", "deterministic", "dtype", "D", "arch", "registers", "spills", "shared", "seconds", "verdict")
        found = [
            (
                r.kernel,
                r.pass_,
                "yes" if r.deterministic else "no",
                r.dtype,
                r.head_dim,
                r.arch,
                r.registers,
                r.spill_bytes,
                r.shared_bytes,
                r.seconds,
                r.status,
            )
            for r in rows
        ]
        table(columns, found)
    causes: dict[tuple[str, str, str, str], list[CompileRow]] = {}
    for row in rows:
        if row.message and (verbosity > QUIET or not row.passed):
            causes.setdefault((row.status, row.kernel, row.pass_, _first_error(row.message)), []).append(row)
    for (status, name, pass_, _), same in causes.items():
        where = ", ".join(dict.fromkeys(f"{r.dtype} D{r.head_dim} {r.arch}" for r in same))
        line(status, f"{name} {pass_} ({where}): {same[0].message.strip()}")
    line("PASS" if code == 0 else "FAIL", f"{sum(row.passed for row in rows)} of {len(rows)} in order")
    return code
