"""What the verbs verify and compile print: a table, and below it each cause of a failure once. Of random cases each failure as it comes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import errors
from ..printing import QUIET, VERBOSE, document, line, table
from ..progress import teller
from .report import watched

if TYPE_CHECKING:
    from ...verbs.compile import CompileRow
    from ...verbs.verify import CaseResult


class Told:
    """The results so far. at_once: each failure is printed when it comes, so that one that is ended by a signal leaves them."""

    def __init__(self, at_once: bool, as_json: bool, verbosity: int, check: str | None = None) -> None:
        self.results: list[CaseResult] = []
        self._at_once, self._json, self._verbosity = at_once and not as_json, as_json, verbosity
        self._check = check
        self._step = teller(verbosity)
        self._told: set[tuple[str, str, str]] = set()
        self._failed = 0

    def all_of(self, verify: Callable[..., object]) -> int:
        """Verify, until Ctrl-C at the latest, and tell what came of it. Returns the exit code."""
        try:
            verify(progress=self.result, note=self.note, tell=self.tell)
        except KeyboardInterrupt:
            return self.end(interrupted=True)
        return self.end()

    def result(self, done: CaseResult) -> None:
        """One more."""
        self.results.append(done)
        self._failed += not done.passed
        if self._at_once and not done.passed:
            self._step("")
            self._failure(done)

    def tell(self, text: str) -> None:
        """What is being done, with N/M before it."""
        self._step(f"{text}, {self._failed} failed" if text and self._failed else text)

    def note(self, text: str) -> None:
        """A remark, on stderr, on a line of its own."""
        self._step("")
        errors.note(text)

    def end(self, interrupted: bool = False) -> int:
        """A line a kernel and pass, each case that failed with the command that runs it alone, and the verdict. Returns the exit code."""
        wrong = [case for case in self.results if not case.passed]
        code = 0 if not wrong else 1 if any(case.exit_code == 1 for case in wrong) else wrong[0].exit_code or 1
        if interrupted:
            code = errors.complain("interrupted", code=130)
        if self._json:
            document({"passed": not code, "rows": self.results})
            return code
        self._step("")
        if self._verbosity > QUIET:
            self._tables()
        if not self._at_once:
            self._failures(wrong)
        many = len(self.results)
        said = f"{len(wrong)} of {many} cases failed" if wrong else f"{many} of {many} cases passed"
        line("FAIL" if wrong else "PASS" if not interrupted else "", said + ", then interrupted" * interrupted)
        if self._check and self._verbosity > QUIET:
            watched(self._check, [(f"{c.kernel} {c.pass_}", c.watched, c.finding) for c in self.results], "case", "cases")
        return code

    def _tables(self) -> None:
        groups: dict[tuple[str, str], list[CaseResult]] = {}
        for case in self.results:
            groups.setdefault((case.kernel, case.pass_), []).append(case)
        rows = []
        for (name, pass_), group in groups.items():
            failed = sum(not case.passed for case in group)
            rows.append((name, pass_, len(group), failed, sum(case.seconds for case in group), "FAIL" if failed else "PASS"))
        table(("kernel", "pass", "cases", "failed", "seconds", "verdict"), rows)
        if self._verbosity >= VERBOSE:
            table(("kernel", "pass", "case", "what"), [(c.kernel, c.pass_, c.case.number, c.case.text()) for c in self.results])

    def _failures(self, wrong: Sequence[CaseResult]) -> None:
        """Each cause once: its smallest case with the command that runs it alone, and which cases share it."""
        causes: dict[tuple[str, str, str], list[CaseResult]] = {}
        for case in wrong:
            causes.setdefault((case.kernel, case.pass_, _cause(case)), []).append(case)
        for (name, pass_, _), same in causes.items():
            smallest = min(same, key=_size)
            self._failure(smallest)
            if rest := [str(other.case.number) for other in same if other is not smallest]:
                some = len(rest) if self._verbosity >= VERBOSE else 8
                what = ", ".join(sorted(smallest.wrong)) + " wrong" if smallest.wrong else "the same"
                listed = " ".join(rest[:some]) + " …" * (len(rest) > some)
                line("FAIL", f"{name} {pass_}: {what} in {len(rest)} more case{'s' * (len(rest) > 1)}: {listed}")

    def _failure(self, case: CaseResult) -> None:
        """The failure and the command that runs it alone. A cause that was told before is only named."""
        first = case.message.partition("\n")[0]
        again = (case.kernel, case.pass_, _cause(case)) in self._told
        self._told.add((case.kernel, case.pass_, _cause(case)))
        what = f"{case.kernel} {case.pass_} case {case.case.number}, {shlex.quote(case.case.text())}"
        said = f"{', '.join(sorted(case.wrong))} wrong" if case.wrong else first
        line("FAIL", f"{what}: {f'{said} (as above)' if again else errors.shown(errors.brief(case.message, self._verbosity))}")
        print(f"     {errors.shown(case.repro)}", flush=True)


def _size(case: CaseResult) -> int:
    """Multiplications of Q and K, hidden pairs too: how many a mask leaves is not known without the values of its tensors."""
    p = case.case.problem
    return p.batch * p.heads_q * p.seq_q * p.seq_kv * p.head_dim


def _cause(case: CaseResult) -> str:
    """What cases with one cause share: the tensors that are wrong, a compiler's first error, the first line that a report names."""
    if case.wrong:
        return " ".join(sorted(case.wrong))
    log = case.message.partition("\nhint: ")[0]
    if (error := _first_error(log)) != log:
        return error
    place, kind = re.search(r"\S+\.cuh?:\d+", log), re.sub(r"\d[\d.e+-]*", "#", log.partition("\n")[0])
    return f"{kind} {place[0] if place else ''}"


def _first_error(log: str) -> str:
    """The first error of a compiler's log, which it may give for every dtype and architecture; the log where it has none."""
    return next((text.strip() for text in log.splitlines() if re.search(r"[:(]\d+(:\d+)?\)?: (fatal |catastrophic )?error", text)), log)


def _orders(rows: Sequence[CompileRow]) -> None:
    """compile --order: the form that was compiled, and a line for each entry of its file."""
    for r in rows:
        form = (f"D{r.dims}", r.arch, "causal" * r.causal, "deterministic" * r.deterministic)
        if r.order:
            line(r.kernel, r.pass_, r.dtypes, *form, *(f"{name}={value}" for name, value in r.tiles.items()))
        for entry, order in (r.order or {}).items():
            line(" ", f"{entry}: {order or 'no loop has products'}")
            line(" ", f"{entry}: {(r.memory or {}).get(entry) or 'no loads or stores'}, in all")


def compiled(rows: Sequence[CompileRow], as_json: bool, verbosity: int) -> int:
    """compile: resources of each kernel on each architecture. Exit code 5 where one does not compile, 1 where one spills."""
    code = 5 if any(row.status == "ERROR" for row in rows) else 0 if all(row.passed for row in rows) else 1
    if as_json:
        document({"passed": code == 0, "rows": rows})
        return code
    if verbosity > QUIET:
        columns = (
            "kernel",
            "pass",
            "deterministic",
            "dtype",
            "D",
            "causal",
            "arch",
            "registers",
            "spills",
            "shared",
            "blocks/SM",
            "warps/SM",
            "limit",
            "seconds",
            "verdict",
            "local",
        )
        lines = [
            (
                r.kernel,
                r.pass_,
                "yes" if r.deterministic else "no",
                r.dtypes,
                r.dims,
                "window" if r.window is not None else "yes" if r.causal else "no",
                r.arch,
                r.registers,
                r.spill_bytes,
                r.shared_bytes,
                r.blocks_per_sm,
                r.warps_per_sm,
                r.limit,
                r.seconds,
                r.status,
                r.stack_bytes,
            )
            for r in rows
        ]
        table(columns, lines)
        _orders(rows)
    causes: dict[tuple[str, str, str, str], list[CompileRow]] = {}
    for row in rows:
        if row.message and (verbosity > QUIET or not row.passed):
            causes.setdefault((row.status, row.kernel, row.pass_, _first_error(row.message)), []).append(row)
    for (status, name, pass_, _), same in causes.items():
        where = ", ".join(dict.fromkeys(f"{r.dtypes} D{r.dims} {r.arch}" for r in same))
        line(status, f"{name} {pass_} ({where}): {errors.shown(errors.brief(same[0].message.strip(), verbosity))}")
    refused = sum(row.status == "TOO BIG" for row in rows)
    said = f"{sum(row.passed for row in rows) - refused} of {len(rows)} compiled as their headers promise"
    line("PASS" if code == 0 else "FAIL", said + f", {refused} not offered" * bool(refused))
    return code
