"""What each verb prints of its result. Every public function returns the exit code."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..printing import QUIET, VERBOSE, document, line, near, note, table
from .report import distributed, distributions_json, error_pictures, times_as_fast, unsettled, unsettled_rows, watched

if TYPE_CHECKING:
    from ...dataset.folder import Dataset
    from ...kernel import Kernel
    from ...row import Row
    from ...verbs.doctor import Check
    from ...verbs.experiment import Outcome
    from ...verbs.profile.counters import Counters
    from ...verbs.run import Result
    from ...verbs.selftest.trial import Trial

HOST_TIME = "CPU time (CPU engine), not GPU performance"


def dataset(found: Dataset, as_json: bool, verbosity: int) -> int:
    """gen-data: the folder and what is in it."""
    problem = found.problem
    if as_json:
        row = {"folder": found.folder, "problem": problem, "seed": found.seed, "tensors": found.tensors}
        document({"passed": True, "rows": [row]})
        return 0
    if verbosity > QUIET:
        table(
            ("tensor", "shape", "dtype", "bytes"),
            [(n, problem.shape(n), problem.tensor_dtype(n), problem.tensor_bytes(n)) for n in found.tensors],
        )
    print(f"data     {near(found.folder)}")
    return 0


def results(found: Sequence[Result], as_json: bool, verbosity: int, check: str | None = None) -> int:
    """run: errors of each tensor, times, files. The largest relative error is one of a reference near zero: only JSON has it.

    One kernel is one JSON object, several are rows."""
    from ...check import budget  # numpy: not for list and --help

    passed = all(result.passed for result in found)
    if as_json:
        rows = [result_json(result) for result in found]
        document(rows[0] if len(rows) == 1 else {"passed": passed, "rows": rows})
        return 0 if passed else 1
    if verbosity > QUIET:
        _result_tables(found, verbosity)
    for result in found:
        words = result.problem.describe(), "deterministic" * result.deterministic, f"on {result.device}"
        line("PASS" if result.passed else "FAIL", result.compute, result.mode, *words)
        for verdict in result.verdicts.values():
            if not verdict.passed:
                line(" ", budget.message(verdict))
        if result.broken:
            line(" ", result.broken)
    if check and verbosity > QUIET:
        watched(check, [(f"{r.compute} {name}", each.watched, False) for r in found for name, each in r.passes.items()], "pass", "passes")
    sys.stdout.flush()  # the verdict does not wait for the pictures
    for path in error_pictures(found):
        note(f"where it is wrong: {near(path)}")
    for text in dict.fromkeys(text for result in found for text in result.notes):
        note(text)
    for text in unsettled(found) if verbosity > QUIET else ():
        note(text)
    if not check and verbosity > QUIET and (advice := _unchecked(found, passed)):
        note(advice)
    return 0 if passed else 1


def _unchecked(found: Sequence[Result], passed: bool) -> str:
    """Of a user's own kernel on the CPU engine, what other checks would see."""
    from ...kernel import KERNELS

    ran = [each.kernel for result in found if result.device == "cpu" for each in result.passes.values()]
    if all(kernel is None or kernel.path.is_relative_to(KERNELS) for kernel in ran):
        return ""
    if passed:
        return "races were not looked for: --check race does"
    return "--check race finds a missing barrier, --check asan an index out of bounds"


def result_json(result: Result) -> dict[str, object]:
    """A Result as the JSON object of README, "JSON"."""
    from ...verbs.results import errors_of  # numpy: not for list and --help

    return {
        "compute": result.compute,
        "mode": result.mode,
        "device": result.device,
        "arithmetic": result.arithmetic,
        "problem": result.problem.record,
        "passed": result.passed,
        "time_ms": dict(result.time_ms),
        "tflops": dict(result.tflops),
        "gbps": dict(result.gbps),
        "errors": {name: errors_of(v) for name, v in result.verdicts.items()},
        "outputs": str(result.outputs.resolve()) if result.outputs else None,
        **({"broken": result.broken} if result.broken else {}),
    }


def _result_tables(found: Sequence[Result], verbosity: int) -> None:
    first = found[0]
    print(f"{first.problem.describe()}, {first.mode}, on {first.device_name}")
    table(
        ("kernel", "arithmetic", "tensor", "max |error|", "mean |error|", "MSE", "budget", "verdict"),
        [
            (result.compute, result.arithmetic, v.tensor, v.max_abs, v.mean_abs, v.mse, v.budget, "PASS" if v.passed else "FAIL")
            for result in found
            for v in result.verdicts.values()
        ],
    )
    print()
    rows = []
    for result in found:
        for name, each in result.passes.items():
            time, base = result.time_ms[name], first.time_ms[name]
            speed = times_as_fast(each, first.passes[name]) if base and time and result is not first else None
            rows.append((result.compute, name, time, result.tflops[name], result.gbps[name], speed, len(each.seconds)))
    cpu = first.device == "cpu"
    shown = [0, 1, 2, *(() if cpu else (3, 4)), *((5,) if len(found) > 1 else ()), 6]
    columns = ("kernel", "pass", "ms (median)", "TFLOP/s", "GB/s", f"times as fast as {first.compute}", "samples")
    table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
    print(f"({HOST_TIME})" if cpu else "(kernel time, warm)")
    if verbosity >= VERBOSE:
        from ...check.choose import files_weighed

        for result in found:
            for name, each in result.passes.items():
                if not each.loaded or not each.kernel:
                    print(f"{name}: {each.ran}")
                    continue
                loaded = each.loaded
                used = {"registers": loaded.registers, "bytes spilled": loaded.spill_bytes, "bytes of local memory": loaded.stack_bytes}
                used |= {"bytes shared": loaded.shared_bytes}
                known = [
                    f"{value} {what}" for what, value in (used | {"bytes on the device": each.device_bytes}).items() if value is not None
                ]
                print(f"{name}: {each.kernel.path}, source {each.kernel.source_hash}, {', '.join(known)}")
                for text in loaded.plan.choices or ["no row of choice: the values of [tile]"] * bool(each.kernel.choices):
                    print(f"{each.kernel.path.name}: {text}")
                if files := files_weighed(each.kernel, result.problem):
                    print(f"of the kernel's files by their costs: {files}")
    if first.outputs:
        names = [f"{name}.bin" for name in first.verdicts] + ["outputs.json"]
        print(f"\nwritten  {near(first.outputs)}: {' '.join(names)}" + (f" (of {first.compute})" if len(found) > 1 else ""))


def rows(found: Sequence[Row], verbosity: int, seed: int | None = None) -> None:
    """experiment: a line a row, before the figures are drawn; of problems that a seed drew their distribution, and the rows with -v."""
    if verbosity > QUIET and (seed is None or verbosity >= VERBOSE):
        _row_table(found)
    if verbosity > QUIET and seed is not None:
        distributed(found, seed)
    if verbosity > QUIET and any(row.device == "cpu" for row in found):
        print(f"({HOST_TIME})")
    sys.stdout.flush()


def _row_table(found: Sequence[Row]) -> None:
    """The rows; of several kernels also how many times as fast as the first each one is."""
    from ...row import CEILING  # numpy: not for list and --help

    timed = list(dict.fromkeys(r.Kernel for r in found if r.KernelTime_ms and not r.Kernel.startswith(CEILING)))
    keys = [(r.Test, r.Type, r.timing, r.dtype, r.causal, r.Batch, r.SeqLen, r.HeadDim) for r in found]
    base = {key: r for key, r in zip(keys, found, strict=True) if r.Kernel == timed[0] and r.KernelTime_ms} if timed else {}
    pairs = [(r, base[key]) if key in base and r.KernelTime_ms else None for key, r in zip(keys, found, strict=True)]
    named = [f"vs {timed[0]}"] if len(timed) > 1 else []
    rate = [] if all(r.device == "cpu" for r in found) else ["TFLOP/s"]
    table(
        ("test", "kernel", "arithmetic", "pass", "timing", "max |error|", "ms", *rate, "vs torch", *named, "verdict", "why"),
        [
            (
                r.Test,
                r.Kernel,
                r.arithmetic,
                r.Type,
                r.timing,
                r.MaxError,
                r.KernelTime_ms,
                *([None if r.device == "cpu" else r.TFLOPS] if rate else []),
                r.Speedup,
                *([pair and (pair[1].KernelTime_ms or 0) / (r.KernelTime_ms or 1)] if named else []),
                r.Status,
                (r.ErrorMessage or "").partition("\n")[0],
            )
            for r, pair in zip(found, pairs, strict=True)
        ],
    )
    for text in unsettled_rows([pair for pair in pairs if pair and pair[0] is not pair[1]]):
        note(text)


def experiment(outcome: Outcome, as_json: bool, verbosity: int) -> int:
    """experiment: where the files are, after :func:`rows`."""
    if outcome.speeds:
        return _trainings(outcome, as_json, verbosity)
    passed = not any(row.Status in ("FAIL", "ERROR") for row in outcome.rows)
    if as_json:
        document({"passed": passed, "rows": outcome.rows, **distributions_json(outcome)})
        return 0 if passed else 1
    if not outcome.files:  # --dry-run: the plan is the result
        print("\n".join(outcome.notes))
        return 0
    for text in outcome.notes:
        note(text)
    for path in outcome.files if verbosity > QUIET else ():
        print(f"written  {path}")
    return _counted([row.Status for row in outcome.rows])


def _counted(statuses: Sequence[str]) -> int:
    """The last line of a sweep: how many rows passed, and how many did not for each reason. Returns the exit code."""
    counts = Counter(statuses)
    passed, wrong = counts.pop("PASS", 0), counts["FAIL"] + counts["ERROR"]
    others = "".join(f", {count} {status}" for status, count in counts.items() if count)
    line("FAIL" if wrong else "PASS" if passed else "NONE", f"{passed} of {len(statuses)} rows passed{others}")
    return 1 if wrong else 0


def _trainings(outcome: Outcome, as_json: bool, verbosity: int) -> int:
    """experiment of a sweep of trainings: a line an attention."""
    wrong = sum(speed.status in ("FAIL", "ERROR") for speed in outcome.speeds)
    if as_json:
        document({"passed": not wrong, "rows": outcome.speeds})
        return 1 if wrong else 0
    for text in outcome.notes:
        note(text)
    if verbosity > QUIET:
        columns = ("attention", "tokens/s", "p20", "p80", "ms a step", "peak MB a step", "loss", "verdict", "why")
        rows = [
            (s.attention, s.tokens_per_s, s.p20, s.p80, s.step_ms, s.step_peak_bytes and s.step_peak_bytes / 1e6, s.loss, s.status, s.why)
            for s in outcome.speeds
        ]
        table(columns, rows)
        for path in outcome.files:
            print(f"written  {path}")
    return _counted([speed.status for speed in outcome.speeds])


def ladder(kernels: Sequence[Kernel]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the kernel table: a row a kernel, its passes together. The documents' tables are made of it too."""
    groups: dict[tuple[int | None, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.number, kernel.name), []).append(kernel)
    rows: list[tuple[str, ...]] = []
    for (number, name), group in groups.items():
        first = group[0]
        words = ("causal", "gqa", "cross", "mask", "score", "sinks", "head_dim_v", "paged", "dtypes_kv")
        can = [word for word in words if getattr(first, word)]
        arch = first.arch if isinstance(first.arch, str) else ", ".join(dict.fromkeys(first.arch.values()))
        dtypes = " ".join(dict.fromkeys(dtype for kernel in group for dtype in kernel.dtypes))
        widest = f"{first.head_dims[-1]}"
        shown = "" if number is None else f"{number:02}"
        rows.append((shown, name, " ".join(k.pass_ for k in group), dtypes, widest, " ".join(can), arch, first.title))
    return ("no", "name", "passes", "dtypes", "D up to", "also", "arch", "idea"), rows


def catalogue(kernels: Sequence[Kernel], sweeps: Mapping[str, str], as_json: bool, verbosity: int) -> int:
    """list: the kernels in ladder order, and the sweeps."""
    columns, rows = ladder(kernels)
    if as_json:
        names = ("no", "name", "passes", "dtypes", "max_head_dim", "also", "arch", "title")
        listed: list[dict[str, object]] = []
        for row in rows:
            words = dict(zip(names, row, strict=True))
            lists = {key: words[key].split() for key in ("passes", "dtypes", "also")}
            listed.append({**words, **lists, "max_head_dim": int(words["max_head_dim"])})
        document({"passed": True, "rows": listed, "sweeps": sweeps})
        return 0
    if verbosity <= QUIET:
        print("\n".join(row[1] for row in rows))
        return 0
    table(columns, rows)
    print("(tf32 is float32 data, judged by the budget of TF32)")
    print()
    table(("sweep", "question"), sweeps.items())
    return 0


def counters(rows: Sequence[Counters], folder: Path, as_json: bool, verbosity: int) -> int:
    """profile: a line a counter, a column a launch; of the stall reasons only those that matter; the lines with most bank conflicts, and with most sectors of global memory."""
    if as_json:
        document({"passed": True, "rows": rows})
        return 0
    if verbosity > QUIET:
        print(rows[0].problem)
        names = dict.fromkeys(name for row in rows for name in row.metrics)
        least = 0.1 if verbosity < VERBOSE else 0.0  # stalled warps per instruction issued
        table(
            ("counter", *(f"{row.kernel} {row.pass_}: {row.entry}" for row in rows)),
            [
                (name, *(row.metrics.get(name) for row in rows))
                for name in names
                if not name.startswith("stall_") or max(row.metrics.get(name) or 0.0 for row in rows) >= least
            ],
        )
        for row in rows:
            of = f"{row.kernel} {row.pass_}: {row.entry}"
            for each in [each for each in row.lines if each.wavefronts > each.ideal][:3]:
                line(f"{of}: {_near(each.place)} takes {each.wavefronts} wavefronts, without bank conflicts {each.ideal}")
            for found in [each for each in row.global_lines if each.sectors > each.ideal][:3] or row.global_lines[:1]:
                count = f"{found.requests} {found.kind}s of a warp, {found.sectors / found.requests:.3g} sectors each"
                line(f"{of}: {_near(found.place)} has {count}, {found.ideal / found.requests:.3g} if coalesced")
    print(f"written  {near(folder)}")
    return 0


def _near(place: str) -> str:
    """FILE:LINE with the file as it is best written here."""
    file, _, number = place.rpartition(":")
    return f"{near(Path(file))}:{number}" if file else place


def new_kernel(path: Path) -> int:
    """new: the file that was written and what to do next."""
    from ...kernel import Kernel
    from ...kernel.new import dtype_option

    print(f"written  {path}")
    pass_ = "backward" if path.stem.endswith("_backward") else "forward"
    spec = path if path.is_absolute() else f"./{path}"
    if pass_ == "forward" or path.with_name(f"{path.stem.removesuffix(pass_)}forward.cu").exists():
        mode = f"--mode {'both' if pass_ == 'backward' else pass_}{dtype_option(Kernel.read(path))}"
        print(f"hint: fa-cli run --compute {spec} {mode}", file=sys.stderr)
    else:  # run needs a forward pass
        print(f"hint: fa-cli verify {spec} --mode {pass_}", file=sys.stderr)
    return 0


def selftest(found: Sequence[Trial], as_json: bool, verbosity: int) -> int:
    """selftest: how many faults of each kind and check were caught, and each that survived."""
    wrong = [trial for trial in found if not trial.caught]
    if as_json:
        document({"passed": not wrong, "rows": found})
        return 1 if wrong else 0
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in found:
        groups.setdefault(("right kernels" if trial.control else trial.kind, trial.check), []).append(trial)
    if verbosity >= VERBOSE:
        columns = ("kind", "fault", "kernel", "check", "seconds", "caught")
        rows = [(t.kind, t.fault, t.kernel, t.check, t.seconds, "yes" if t.caught else "NO") for t in found if not t.control]
        table(columns, rows)
        print()
    if verbosity > QUIET:
        counts = [(*names, len(group), sum(t.caught for t in group), sum(t.seconds for t in group)) for names, group in groups.items()]
        table(("kind", "check", "trials", "as they should", "seconds"), counts)
    for trial in wrong:
        what = "is accused by" if trial.control else f"with {trial.fault!r} survives"
        line("FAIL", f"{trial.kernel} {what} {trial.check}: {trial.message or 'it found nothing'}")
        print(f"     fa-cli selftest --only {shlex.quote(trial.fault)}")
    faults, caught = [[t for t in found if not t.control and t.caught >= least] for least in (False, True)]
    line("FAIL" if wrong else "PASS", f"{len(caught)} of {len(faults)} faults caught, {len(found) - len(faults)} right kernels tried")
    return 1 if wrong else 0


def doctor(checks: Sequence[Check], works: str, as_json: bool, verbosity: int) -> int:
    """doctor: a line a check, and what to do about those that are not OK. works: what does where none FAILs; exit code 4 where one does."""
    failed = [check for check in checks if check.status == "FAIL"]
    if as_json:
        document({"passed": not failed, "rows": checks})
        return 4 if failed else 0
    if verbosity > QUIET:
        table(("", "what", "found"), [(check.status, check.name, check.detail) for check in checks])
        print()
    for check in checks:
        if check.hint and (verbosity > QUIET or check in failed):
            line(check.status, f"{check.name}: {check.hint}")
    line("FAIL" if failed else "PASS", f"{len(failed)} of {len(checks)} checks fail" if failed else works)
    return 4 if failed else 0
