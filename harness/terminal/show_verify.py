"""What `fa-cli verify` prints: of random cases each failure as it comes, and at the end, or at Ctrl-C, what came of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import options
from .printing import QUIET, VERBOSE, document, line, progress, table
from .show_report import watched

if TYPE_CHECKING:
    from ..verify import CaseResult


class Told:
    """The results so far. at_once: each failure is printed when it comes, so that one that is ended by a signal leaves them."""

    def __init__(self, at_once: bool, as_json: bool, verbosity: int, check: str | None = None) -> None:
        self.found: list[CaseResult] = []
        self._at_once, self._json, self._verbosity = at_once and not as_json, as_json, verbosity
        self._check = check
        self._step = progress(verbosity)
        self._logs: set[str] = set()
        self._failed = 0

    def result(self, done: CaseResult) -> None:
        """One more."""
        self.found.append(done)
        self._failed += not done.passed
        if self._at_once and not done.passed:
            self._step("")
            self._failure(done)
        counts = f"{len(self.found)} done, {self._failed} failed: " if self._at_once else ""
        self._step(f"{counts}{done.kernel} {done.pass_} {done.case.number} {done.case.describe()}")

    def note(self, text: str) -> None:
        """A remark, on stderr, on a line of its own."""
        self._step("")
        options.note(text)

    def end(self, interrupted: bool = False) -> int:
        """A line a kernel and pass, each case that failed with the command that runs it alone, and the verdict. Returns the exit code."""
        wrong = [case for case in self.found if not case.passed]
        code = 0 if not wrong else 1 if any(case.exit_code == 1 for case in wrong) else wrong[0].exit_code or 1
        if interrupted:
            code = options.complain("interrupted", code=130)
        if self._json:
            document({"passed": not code, "rows": self.found})
            return code
        self._step("")
        if self._verbosity > QUIET:
            self._tables()
        for case in [] if self._at_once else wrong:
            self._failure(case)
        passed = f"{len(self.found) - len(wrong)} of {len(self.found)} cases passed"
        line("FAIL" if wrong else "PASS" if not interrupted else "", passed + ", then interrupted" * interrupted)
        if self._check and self._verbosity > QUIET:
            watched(self._check, [(f"{c.kernel} {c.pass_}", c.watched, c.finding) for c in self.found], "case", "cases")
        return code

    def _tables(self) -> None:
        groups: dict[tuple[str, str], list[CaseResult]] = {}
        for case in self.found:
            groups.setdefault((case.kernel, case.pass_), []).append(case)
        rows = []
        for (name, pass_), group in groups.items():
            failed = sum(not case.passed for case in group)
            rows.append((name, pass_, len(group), failed, sum(case.seconds for case in group), "FAIL" if failed else "PASS"))
        table(("kernel", "pass", "cases", "failed", "seconds", "verdict"), rows)
        if self._verbosity >= VERBOSE:
            table(("kernel", "pass", "case", "what"), [(c.kernel, c.pass_, c.case.number, c.case.describe()) for c in self.found])

    def _failure(self, case: CaseResult) -> None:
        """The failure and the command that runs it alone. A compile error is printed once, not once a case."""
        log = case.message.partition("\nhint: ")[0]
        first, more, _ = log.partition("\n")
        again = " (as above)" if more and log in self._logs else ""
        self._logs.add(log)
        what = f"{case.kernel} {case.pass_} case {case.case.number}, {case.case.describe()}"
        line("FAIL", f"{what}: {first if again else case.message}{again}")
        print(f"     {case.repro}", flush=True)
