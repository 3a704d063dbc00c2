"""Wrong kernels written after the judge was mended, and not for its cases (unseen.toml): does plain `run` see them, does the default `verify`?

    nice python experiments/trust/unseen.py > experiments/trust/unseen.txt

On the CPU engine. Of `verify` the cases of the quick matrix run in their order up to the first that fails, whose number and words are shown.
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
import tomllib
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from new_faults import ROOT, fa_cli

from harness.fault import UsageFault
from harness.verbs.selftest.mutant import Mutant
from harness.verbs.verify import Backends, Case, CaseResult, matrix, run_case
from harness.verbs.verify.judge import Died, each_survived


def main(patterns: list[str]) -> None:
    seen = {"run": 0, "verify": 0}
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    faults = [Mutant(**table | {"edits": tuple(map(tuple, table["edits"])), "found_by": {}}) for table in tables]
    faults = [fault for fault in faults if not patterns or any(fnmatch.fnmatch(fault.name, pattern) for pattern in patterns)]
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            ran, (cases, first) = _run(fault, folder), _verified(fault, Path(folder))
        seen["run"] += ran
        seen["verify"] += first is not None
        click.echo(f"{fault.kind}: {fault.name} ({fault.kernel})")
        click.echo(f"    run     {'sees it' if ran else 'passes'}")
        said = (
            f"case {first.case.number} of {cases}: {first.case.text()}: {first.message.partition(chr(10))[0][:150]}" if first else "passes"
        )
        click.echo(f"    verify  {said}")
    click.echo(f"run sees {seen['run']} of {len(faults)}, the default verify {seen['verify']}")


def _run(fault: Mutant, folder: str) -> bool:
    path = fault.plant(Path(folder)).path
    words = ["--mode", fault.kernel.rpartition("_")[2], *(["--dtype", fault.dtype] if fault.dtype != "float32" else [])]
    if "by the content" in fault.name:  # a hash of all of K and V for every row
        words += ["--batch", "1", "--heads", "2", "--seq", "129"]
    if words[1] == "backward":  # it reads O and logsumexp
        fa_cli(ROOT, folder, "run", "fa2", *words[2:], "--mode", "forward")
    return fa_cli(ROOT, folder, "run", str(path), *words).returncode != 0


def _verified(fault: Mutant, folder: Path) -> tuple[int, CaseResult | None]:
    """How many cases there are, and the first that fails."""
    kernel, backends = fault.plant(folder), Backends("cpu", None, None)
    cases = matrix(kernel, "quick", "cpu")

    def work(case: Case) -> CaseResult:
        return run_case(backends.of(case), kernel, case, "quick")

    done = each_survived(backends.first, cases, work, lambda case, why: Died.of(kernel, case, "", why), fault.name)
    refused = UsageFault.exit_code  # of a race check: more than it keeps
    return len(cases), next((each for each in done if not each.passed and not (each.case.check and each.exit_code == refused)), None)


if __name__ == "__main__":
    main(sys.argv[1:])
