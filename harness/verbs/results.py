"""What makes rows: results of a run -> rows of results.csv and lines of samples.jsonl."""

from __future__ import annotations

import json
import math
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..backends import Backend
from ..check.budget import UNIT, Verdict
from ..check.choose import forward_for
from ..check.contender import Contender, PassResult
from ..check.oracle import arithmetic_of
from ..dataset.generate import recipe
from ..fault import EnvironmentFault, UsageFault
from ..files import Json
from ..kernel import Kernel, planner
from ..measure.sampling import TIMINGS, Timing, together
from ..problem import PASSES, Problem
from ..row import CEILING, LATER, OPERATOR, SHAPE, TYPES, Row, read_records, rounded
from .run import Result


def new_run_id() -> str:
    """A name for a run that no other has: when it started (UTC), and four random hex digits."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(2)


def rows_of(result: Result, test: str, run_id: str) -> list[Row]:
    """The rows of a result: one a pass and timing, and for mode both a third of the two passes together. Energy is in the warm ones.

    A failed check has one row a pass, without a timing and without speeds.
    """
    modes = (*PASSES, "both") if result.mode == "both" else (result.mode,)
    return [row for mode in modes for row in _rows(result, mode, test, run_id)]


def samples_of(result: Result, row: Row) -> Json:
    """The line of samples.jsonl that belongs to a row: which run, row and timing, and every sample in milliseconds."""
    timing = _timing(result, row.Type, row.timing)
    shape = {name: getattr(row, name) for name in SHAPE}
    return {
        "run_id": row.run_id,
        "Test": row.Test,
        "Kernel": row.Kernel,
        "Type": row.Type,
        "timing": row.timing,
        **shape,
        "launch": timing.launch,
        "samples_ms": [s * 1e3 for s in timing.seconds],
        "call_ms": [s * 1e3 for s in timing.call_seconds],
        "turns": list(timing.turns),
        "before": dict(timing.before),
        "after": dict(timing.after),
    }


def errors_of(verdict: Verdict) -> dict[str, float | bool]:
    """What JSON says of a tensor, in the order of README, "JSON": Verdict.numbers, as row.rounded has them.

    Bias and slope - 1 of a right kernel are near zero. Their last digit is that of their limit, or of float32's unit roundoff where there
    is none.
    """
    numbers = verdict.numbers()
    for name, value in numbers.items():
        if name in ("bias", "slope"):
            limit = numbers[f"{name}_budget"]
            numbers[name] = rounded(value, limit if math.isfinite(limit) else UNIT)
        elif not isinstance(value, bool):
            numbers[name] = rounded(value)
    return numbers


#: What a row is of, within its run; a row without a timing stands for all of them.
Cell = tuple[object, ...]


def cell(row: Row) -> Cell:
    """What a row is of, within its run: test, kernel, pass and shape (a tf32 kernel's float32 files are float32)."""
    shape = (getattr(row, name) for name in SHAPE if name != "dtype")
    return (row.Test, row.Kernel, row.Type, row.dtype.replace("tf32", "float32"), *shape)


def is_of(row: Row, test: str, contender: Contender, mode: str, problem: Problem) -> bool:
    """Whether a row is a contender's, of a test, mode and problem, of the source and in the form (deterministic or not) that it has now."""
    of = _of_problem(test, contender.name, list(contender.kernels.values()), mode, problem, contender.deterministic)
    names = of.keys() - {"dtype", "arithmetic"}  # tf32 is written for float32 files
    return row.dtype.replace("tf32", "float32") == of["dtype"] and all(getattr(row, name) == of[name] for name in names)


def samples_kept(path: Path, run_id: str | None, keep: Callable[[Cell], bool]) -> bytes:
    """samples.jsonl without the lines of a run whose cell is not to be kept; nothing where there is no such file.

    A line that is no record of ours stays.
    """
    kept = []
    for line in read_records(path).splitlines(keepends=True) if path.exists() else ():
        try:
            record = json.loads(line)
            shape = (record.get(name) if name in LATER else record[name] for name in SHAPE if name != "dtype")
            of = (record["Test"], record["Kernel"], record["Type"], record["dtype"].replace("tf32", "float32"), *shape)
            stays = record["run_id"] != run_id or keep(of)
        except (ValueError, KeyError, TypeError, AttributeError):
            stays = True
        kept += [line] if stays else []
    return "".join(kept).encode()


def with_torch(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with TorchTime_ms and Speedup: against the fastest torch backend on the same kind of device."""
    fastest: dict[tuple[str | None, ...], float] = {}
    for row in rows:
        key = (row.Type, row.timing, row.device)
        if row.Kernel.startswith("torch-") and row.KernelTime_ms:
            fastest[key] = min(row.KernelTime_ms, fastest.get(key, row.KernelTime_ms))
    compared = []
    for row in rows:
        torch = fastest.get((row.Type, row.timing, row.device))
        speedup = torch / row.KernelTime_ms if torch and row.KernelTime_ms else None
        compared.append(replace(row, TorchTime_ms=torch, Speedup=speedup))
    return compared


def with_peak(rows: Sequence[Row], ceilings: Sequence[Row]) -> list[Row]:
    """The rows with pct_of_peak: the share of the GEMM ceiling of their dtype, where the same run measured it."""
    gemm = f"{CEILING}gemm-"
    most = {row.Kernel.removeprefix(gemm): row.TFLOPS for row in ceilings if row.Kernel.startswith(gemm)}
    return [replace(row, pct_of_peak=100 * row.TFLOPS / peak) if row.TFLOPS and (peak := most.get(row.dtype)) else row for row in rows]


def rows_without(
    test: str,
    contender: Contender,
    mode: str,
    problem: Problem,
    backend: Backend,
    run_id: str,
    seed: int,
    error: Exception,
) -> list[Row]:
    """The rows of a contender that gave no result but an error: its status is REFUSED, ABSENT or ERROR."""
    status = "ABSENT" if isinstance(error, EnvironmentFault) else "REFUSED" if isinstance(error, UsageFault) else "ERROR"
    modes = (*PASSES, "both") if mode == "both" else (mode,)
    kernels = list(contender.kernels.values())
    message = "; ".join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())
    facts: Json = {"device": backend.name, "device_name": backend.device().name, "seed": seed, "run_id": run_id}
    return [
        Row(**_of_problem(test, contender.name, kernels, m, problem, contender.deterministic), Status=status, ErrorMessage=message, **facts)
        for m in modes
    ]


def _of_problem(test: str, name: str, kernels: Sequence[Kernel], mode: str, problem: Problem, deterministic: bool, spec: str = "") -> Json:
    """The columns of a row that its test, kernels and mode say. spec: of all passes of the result, where kernels are those of one."""
    p = problem
    kernels = [planner.variant(kernel, p) for kernel in kernels]
    spec = spec or _spec(name, kernels, p)
    return {
        "Test": test,
        "Kernel": name,
        "Type": TYPES[mode],
        "Batch": p.batch,
        "Heads": p.heads_q,
        "SeqLen": p.seq_q,
        "HeadDim": p.head_dim,
        "heads_kv": p.heads_kv,
        "seq_kv": p.seq_kv,
        "dtype": p.dtype,
        "causal": p.causal,
        "scale": p.scale,
        "mask": p.mask,
        "score": p.score,
        "sinks": p.sinks,
        "head_dim_v": p.head_dim_v,
        "page_size": p.page_size or None,
        "lengths": p.keys_text or None,
        "dtype_kv": p.dtype_kv if p.has_own_dtype_kv else None,
        "repro": None if name == OPERATOR else repro(spec, mode, p, deterministic),
        "arithmetic": "+".join(dict.fromkeys(arithmetic_of(p, kernel) for kernel in kernels)) or arithmetic_of(p),
        "source_hash": "+".join(dict.fromkeys(kernel.source_hash for kernel in kernels)) or None,
    }


def _spec(name: str, kernels: Sequence[Kernel], problem: Problem) -> str:
    """The text for --compute that runs kernels again; of a backward pass alone with a forward pass, whose O it reads."""
    if not kernels or not kernels[0].in_tree:
        return shlex.quote(kernels[0].spec) if kernels else name
    names = list(dict.fromkeys(kernel.variant_of or kernel.name for kernel in kernels))
    if all(kernel.pass_ == "backward" for kernel in kernels) and (forward := forward_for(kernels[0], problem)):
        names = list(dict.fromkeys([forward.name, *names]))
    return "+".join(names)


def _passes(result: Result, mode: str) -> list[PassResult]:
    return [result.passes[name] for name in (PASSES if mode == "both" else (mode,))]


def _timing(result: Result, type_: str, timing: str | None) -> Timing:
    mode = next(name for name, short in TYPES.items() if short == type_)
    return together([p.timings[timing or "warm"] for p in _passes(result, mode)])


def _rows(result: Result, mode: str, test: str, run_id: str) -> list[Row]:
    problem, passes = result.problem, _passes(result, mode)
    verdicts = {name: v for p in passes for name, v in p.verdicts.items()}
    worst = max(verdicts.values(), key=lambda v: v.max_abs)
    over = "; ".join(
        [f"{name}: {v.reason} at {v.place}" for name, v in verdicts.items() if not v.passed] + [p.broken for p in passes if p.broken]
    )
    loaded = [p.loaded for p in passes if p.loaded]
    kernels = [p.kernel for p in passes if p.kernel]

    def most(name: str) -> int | None:
        return max((value for value in (getattr(one, name) for one in loaded) if value is not None), default=None)

    every = [p.kernel for p in result.passes.values() if p.kernel]
    spec = _spec(result.compute, every, problem)
    of_tensors: Json = {f"MaxError_{name}": rounded(v.max_abs) for name, v in verdicts.items()}
    row = Row(
        **_of_problem(test, result.compute, kernels, mode, problem, result.deterministic, spec),
        Status="PASS" if all(p.passed for p in passes) else "FAIL",
        MaxError=rounded(worst.max_abs),
        MeanError=rounded(worst.mean_abs),
        MSE=rounded(worst.mse),
        MaxRelError=rounded(worst.max_rel),
        ErrorMessage=over or None,
        seed=result.seed,
        device=result.device,
        device_name=result.device_name,
        peak_bytes=max(filter(None, (p.device_bytes for p in passes)), default=None),
        registers=most("registers"),
        spill_bytes=most("spill_bytes"),
        shared_bytes=most("shared_bytes"),
        stack_bytes=most("stack_bytes"),
        deterministic=all(k.deterministic for k in kernels) if kernels else (result.deterministic and mode != "forward") or None,
        torch_backend="+".join(dict.fromkeys(p.ran for p in passes if p.ran)) or None,
        run_id=run_id,
        recipe=recipe(problem),
        **of_tensors,
    )
    row = replace(row, dtype="tf32") if any(k.arithmetic_for(problem.dtype) == "tf32" for k in kernels) else row  # on float32 files
    # A kernel that fails in one pass has no speed in the other: a table names the kernel, not the pass, as right or wrong.
    timings = [t for t in TIMINGS if all(t in p.timings for p in passes)] if result.passed else []
    rows = [_timed(row, together([p.timings[t] for p in passes]), problem, mode) for t in timings] or [row]
    settled = [p.timings["energy"] for p in passes if "energy" in p.timings]
    energy = together(settled).energy if len(settled) == len(passes) else None
    facts: Json = energy._asdict() if energy else {}
    return [replace(row, **facts) if row.timing == "warm" else row for row in rows]


def _timed(row: Row, timing: Timing, problem: Problem, mode: str) -> Row:
    slow = f"THROTTLED ({timing.throttled})" if timing.throttled else None
    return replace(
        row,
        timing=timing.timing,
        KernelTime_ms=timing.median_ms,
        p20_ms=timing.p20_ms,
        p80_ms=timing.p80_ms,
        call_ms=timing.call_ms,
        n_samples=len(timing.seconds),
        TFLOPS=problem.flops(mode) / (timing.median_ms * 1e9),
        Bandwidth_GBps=problem.bytes(mode) / (timing.median_ms * 1e6),
        ErrorMessage="; ".join(filter(None, (slow, row.ErrorMessage))) or None,
    )


def repro(spec: str, mode: str, problem: Problem, deterministic: bool) -> str | None:
    """The command that runs this row again. None for what no option sets: a causal_shift other than the default, values of tensors."""
    p = problem
    if p.causal_shift != p.default_shift or p.hashes:
        return None
    words = [f"fa-cli run --compute {spec} --mode {'forward' if mode == 'forward' else 'both'}"]
    words += [f"--batch {p.batch} --heads {p.heads_q} --seq {p.seq_q} --dim {p.head_dim}"]
    words += [f"--dim-v {p.head_dim_v}"] * p.has_own_dim_v
    words += [f"--kv-heads {p.heads_kv}"] * (p.heads_kv != p.heads_q)
    words += [f"--seq-kv {p.keys_text or p.seq_kv}"] * (p.seq_kv != p.seq_q or bool(p.keys_text))
    words += [f"--page-size {p.page_size}"] * (p.page_size > 0)
    words += [f"--dtype {p.dtype}"] * (p.dtype != "float32") + ["--causal"] * p.causal + ["--deterministic"] * deterministic
    words += [f"--kv-dtype {p.dtype_kv}"] * p.has_own_dtype_kv
    words += [f"--scale {p.scale!r}"] * (p.scale != p.head_dim**-0.5)
    return " ".join(words + [f"--{name} {shlex.quote(formula.text)}" for name, formula in p.formulas.items()])
