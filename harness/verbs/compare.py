"""Two runs compared: for every row that both have, is B the same as A, faster, slower, or is it unsure?

The ratio is time of B / time of A, of medians, with a 95% interval:
- from samples.jsonl, 7 samples or more a side: order statistics bound each median with a confidence of sqrt(95%), whatever the
  distribution; the extremes of the quotient bound the ratio. Samples of one turn are alike, so where turns disagree more than
  samples do, the bounds are those of the turns' medians (their range, where there are fewer than 7 turns).
- 3 to 6 samples: too few for that. The whole ranges are taken and their quotient's width, in logarithms, is tripled.
- without samples, from p20, p80 and n_samples of results.csv: the median is taken to lie within 6 / sqrt(n) of the way to p20 and to p80,
  in logarithms, twice as wide as for normal noise.
- fewer than 3 samples, or no p20 and p80: no interval.

SAME: the interval lies within 1 +- 3% (clocks, placement and temperature move the median of an unchanged kernel by so much
between two runs, however many samples each has). FASTER, SLOWER: else, where it lies wholly beyond 1 +- 1%. UNSURE: everything else.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, median

from ..fault import DataFault, UsageFault
from ..files import TEXT, Kind, environment, or_null, parse_json
from ..report.views import FEWEST, KEY, Key, geometric_mean, key_of, latest, median_bounds
from ..row import Row, read_records, read_rows, rounded, table_at

NEWEST = ("head_dim_v", "page_size", "lengths", "dtype_kv")
VERDICTS = ("SAME", "FASTER", "SLOWER", "UNSURE")
DEAD_ZONE, SAME_ZONE, CONFIDENCE = 0.01, 0.03, 0.95
Sample = tuple[Sequence[float], Sequence[int]]  # milliseconds, and how many of them each turn took
NO_SAMPLES: Sample = ((), ())
MOST_WANTED = 5000  # samples a row; beyond, the scatter is the machine's load, which no number of samples averages out
#: A column of KEY; a line of an earlier version has no head_dim_v, which is HeadDim there, no pages and no dtype_kv.
_CELL: Kind = (lambda v: not isinstance(v, (list, dict)), "a text, a number or null")
#: A line of samples.jsonl: the columns of KEY, and positive milliseconds.
_SAMPLE: dict[str, Kind] = {
    "samples_ms": (lambda v: isinstance(v, list) and all(type(t) in (int, float) and 0 < t < 1e15 for t in v), "a list of positive times"),
    "run_id": or_null(TEXT),
    **dict.fromkeys((name for name in KEY if name not in NEWEST), _CELL),
}
_COUNTS: Kind = (lambda v: isinstance(v, list) and all(type(count) is int and count > 0 for count in v), "a list of counts")
#: Facts of env.json that explain a difference.
FACTS = ("cuda_driver", "driver", "cuda_runtime", "nvrtc", "cupy", "compiler", "threads", "packages", "git_commit")


@dataclass(frozen=True)
class Pair:
    """One row in both runs. ratio is time B / time A; low and high bound it (None: no interval); basis says from what."""

    kernel: str
    type: str
    shape: str
    timing: str | None
    a_ms: float
    b_ms: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    basis: str
    source_changed: bool


@dataclass(frozen=True)
class Untimed:
    """A row in both runs that at least one of them has no time for."""

    kernel: str
    type: str
    shape: str
    a_status: str
    b_status: str


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what they do not. geomean and geomeans (a kernel) are of time B / time A."""

    pairs: tuple[Pair, ...]
    untimed: tuple[Untimed, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    geomean: float | None
    geomeans: Mapping[str, float]
    notes: tuple[str, ...]
    failures: tuple[str, ...]  # what --fail-if found; empty where it was not given
    advice: str = ""  # where rows are UNSURE: what to do, with a command

    @property
    def passed(self) -> bool:
        """Whether --fail-if found nothing, and B has a row that is right."""
        return not self.failures and (bool(self.pairs) or any(row.b_status == "PASS" for row in self.untimed))

    @property
    def counts(self) -> dict[str, int]:
        """How many pairs have each verdict."""
        counts = Counter(pair.verdict for pair in self.pairs)
        return {verdict: counts[verdict] for verdict in VERDICTS}


def compare(a: Path, b: Path, *, fail_if: str | None = None, ignore_device: bool = False) -> Comparison:
    """Compare two folders of `experiment` (or their results.csv). The last row of a kernel, shape, pass and timing counts.

    fail_if: "slower:5%" lists as failures the rows that are SLOWER by more than 5%, and those that passed in A but not in B, or are not
    there.
    Raises UsageFault for another fail_if, for runs on different GPUs unless ignore_device, and where no row is in both;
    DataFault where a file is not what fa-cli writes.
    """
    limit = None if fail_if is None else parse_fail_if(fail_if)
    tables = [table_at(path) for path in (a, b)]
    rows_a, rows_b = (read_rows(table) for table in tables)
    if not ignore_device:
        _same_device(rows_a, rows_b)
    matched, only_a, only_b = _match(rows_a, rows_b, ignore_device)
    if not matched:
        raise UsageFault(
            f"{a} and {b} have no row in common",
            "a row is a kernel, shape, dtype, mask, pass and timing",
            "compare two runs of one experiment",
        )
    samples_a, samples_b = (_samples(table.parent / "samples.jsonl") for table in tables)
    pairs, untimed, failures = [], [], []
    for row_a, row_b in matched:
        name = (row_a.Kernel, row_a.Type, _shape(row_b))
        if row_a.KernelTime_ms and row_b.KernelTime_ms:
            sides = (samples_a, row_a), (samples_b, row_b)
            of_a, of_b = (samples.get((row.run_id, *key_of(row)), NO_SAMPLES) for samples, row in sides)
            pair = _pair(row_a, row_b, of_a, of_b)
            pairs.append(pair)
            if limit is not None and pair.verdict == "SLOWER" and pair.ratio > 1 + limit:
                failures.append(f"{' '.join(name)} {pair.timing or ''}: slower by {pair.ratio - 1:.1%}")
        else:
            untimed.append(Untimed(*name, row_a.Status, row_b.Status))
            if limit is not None and row_a.Status == "PASS" != row_b.Status:
                failures.append(f"{' '.join(name)}: PASS became {row_b.Status}")
    if limit is not None:
        failures += [f"{label}: B has no such row" for label, row in zip(_labels(only_a), only_a, strict=True) if row.Status == "PASS"]
    kernels = dict.fromkeys(pair.kernel for pair in pairs)
    return Comparison(
        tuple(pairs),
        tuple(untimed),
        _labels(only_a),
        _labels(only_b),
        _mean(pairs),
        {k: m for k in kernels if (m := _mean([p for p in pairs if p.kernel == k])) is not None},
        _differences(tables[0].parent / "env.json", tables[1].parent / "env.json"),
        tuple(failures),
        _advice(pairs, tables[1]),
    )


def parse_fail_if(text: str) -> float:
    """The part in "slower:5%" (0.05). Raises UsageFault for any other form."""
    match = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%", text.strip())
    if not match:
        raise UsageFault(f"--fail-if {text!r} is not understood", "the one condition there is: slower:PERCENT%", "--fail-if slower:5%")
    return float(match[1]) / 100


def median_interval(samples: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Bounds of the median by order statistics, at the confidence or better for any distribution; None where samples are too few."""
    n = len(samples)
    tail = (1 - confidence) / 2
    if n > 1000:  # the binomial is a normal curve there
        rank = math.floor((n - NormalDist().inv_cdf(1 - tail) * math.sqrt(n)) / 2)
    else:
        rank, below = 0, 0
        while rank < n and below + math.comb(n, rank) <= tail * 2**n:  # P(fewer than rank + 1 samples lie below the median)
            below += math.comb(n, rank)
            rank += 1
    if rank < 1:
        return None
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[n - rank]


def ratio_interval(
    a: Sequence[float], b: Sequence[float], turns_a: Sequence[int] = (), turns_b: Sequence[int] = ()
) -> tuple[float, float] | None:
    """The 95% interval of median(b) / median(a) from samples and the sizes of their turns; None with fewer than 3 on a side."""
    if min(len(a), len(b)) < FEWEST:
        return None
    of_a, of_b = _median_bounds(a, turns_a), _median_bounds(b, turns_b)
    if of_a and of_b:
        return of_b[0] / of_a[1], of_b[1] / of_a[0]
    low, high = min(b) / max(a), max(b) / min(a)
    return low * low / high, high * high / low


def _median_bounds(samples: Sequence[float], turns: Sequence[int]) -> tuple[float, float] | None:
    confidence = math.sqrt(CONFIDENCE)
    bounds = median_interval(samples, confidence)
    if not bounds or len(turns) < FEWEST:
        return bounds
    ends = list(itertools.accumulate(turns))
    medians = [median(samples[end - count : end]) for end, count in zip(ends, turns, strict=True)]
    low, high = median_interval(medians, confidence) or (min(medians), max(medians))
    return min(low, bounds[0]), max(high, bounds[1])


def verdict(low: float, high: float) -> str:
    """SAME, FASTER, SLOWER or UNSURE of an interval of time B / time A, by the rules of this module."""
    if low >= 1 - SAME_ZONE and high <= 1 + SAME_ZONE:
        return "SAME"
    if high < 1 - DEAD_ZONE:
        return "FASTER"
    return "SLOWER" if low > 1 + DEAD_ZONE else "UNSURE"


def samples_that_tell(count: int, low: float | None, high: float | None) -> int:
    """How many samples of each side would have told which is faster, a multiple of 50, where `count` gave an interval of their ratio."""
    wanted = 50  # order statistics need 7, and a CPU's times scatter
    if count >= 7 and low and high:  # a median's interval narrows as 1 / sqrt(n)
        wanted = max(wanted, math.ceil(count * (math.log(high / low) / (2 * SAME_ZONE)) ** 2))
    return math.ceil(wanted / 50) * 50


# -- details ----------------------------------------------------------------------------------------------------------


def _mean(pairs: Sequence[Pair]) -> float | None:
    """The geometric mean of time B / time A, without the last digits of a C library's logarithm; None without pairs."""
    mean = geometric_mean(pair.ratio for pair in pairs)
    return mean and rounded(mean)


def _pair(row_a: Row, row_b: Row, a: Sample, b: Sample) -> Pair:
    a_ms, b_ms = row_a.KernelTime_ms, row_b.KernelTime_ms
    assert a_ms and b_ms
    interval, basis = None, "no interval"
    if a[0] and b[0]:
        interval, basis = ratio_interval(a[0], b[0], a[1], b[1]), f"{len(a[0])} and {len(b[0])} samples"
    elif (of_a := median_bounds(row_a)) and (of_b := median_bounds(row_b)):
        interval, basis = (of_b[0] / of_a[1], of_b[1] / of_a[0]), "p20 to p80"
    low, high = interval or (None, None)
    return Pair(
        row_a.Kernel,
        row_a.Type,
        _shape(row_b),
        row_a.timing,
        a_ms,
        b_ms,
        b_ms / a_ms,
        low,
        high,
        verdict(*interval) if interval else "UNSURE",
        basis,
        row_a.source_hash != row_b.source_hash,
    )


def _advice(pairs: Sequence[Pair], table: Path) -> str:
    """What to do about rows that are UNSURE: the command of the second run, with the samples that would have told. Empty where none is."""
    unsure = [pair for pair in pairs if pair.verdict == "UNSURE"]
    if not unsure:
        return ""
    wanted = 0
    for pair in unsure:
        counts = [int(number) for number in re.findall(r"\d+", pair.basis)] if "samples" in pair.basis else []
        wanted = max(wanted, samples_that_tell(min(counts, default=0), pair.low, pair.high))
    if wanted > MOST_WANTED:
        return (
            f"{len(unsure)} of {len(pairs)} rows are UNSURE, and samples alone do not help: the times scatter too widely (other work on the "
            "machine?); what is FASTER or SLOWER may be so for the same reason"
        )
    words = environment.env_beside(table).get("command") or []
    again = ["experiment", "NAME"] if isinstance(words, str) or "experiment" not in words else words[words.index("experiment") :]
    kept = [word for word in again if word not in ("--resume", "--record") and not word.startswith(("--samples=", "--min-time="))]
    for option in ("--samples", "--min-time"):
        if option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    command = shlex.join(["fa-cli", *kept, "--samples", str(wanted)])
    return f"{len(unsure)} of {len(pairs)} rows are UNSURE; with more samples of both runs they may tell: {command}"


def _match(rows_a: Iterable[Row], rows_b: Iterable[Row], ignore_device: bool) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Pairs of rows of the same KEY, then the rows that only A and only B have. A row without a timing matches every timing."""
    tables: list[dict[Key, dict[str | None, Row]]] = []
    for rows in (rows_a, rows_b):
        table: dict[Key, dict[str | None, Row]] = {}
        for row in latest(replace(row, device_name=None) if ignore_device else row for row in rows):
            table.setdefault((*key_of(row)[:-1], row.device_name), {})[row.timing] = row
        tables.append(table)
    pairs, only_a, only_b = [], [], []
    for key, of_a in tables[0].items():
        of_b = tables[1].pop(key, {})
        if of_b and (None in of_a or None in of_b):
            pairs.append((next(iter(of_a.values())), next(iter(of_b.values()))))
            continue
        pairs += [(row, of_b[timing]) for timing, row in of_a.items() if timing in of_b]
        only_a += [row for timing, row in of_a.items() if timing not in of_b]
        only_b += [row for timing, row in of_b.items() if timing not in of_a]
    return pairs, only_a, [*only_b, *(row for of_b in tables[1].values() for row in of_b.values())]


def _same_device(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> None:
    """Raise UsageFault where both runs used a GPU, and not the same, or have no device in common."""
    all_a, all_b = ({row.device_name for row in rows} for rows in (rows_a, rows_b))
    gpus_a, gpus_b = ({row.device_name for row in rows if row.device != "cpu"} for rows in (rows_a, rows_b))
    if (gpus_a != gpus_b) if gpus_a and gpus_b else not all_a & all_b:
        names = [", ".join(sorted(str(name) for name in names)) for names in ((gpus_a or all_a), (gpus_b or all_b))]
        raise UsageFault(
            f"the runs are of different devices: {names[0]} and {names[1]}",
            "times of two devices say nothing about a change",
            "--ignore-device compares them all the same",
        )


def _samples(path: Path) -> dict[Key, Sample]:
    """samples.jsonl as (run_id, key) -> milliseconds and the sizes of the turns; nothing where there is no such file."""
    samples_of: dict[Key, Sample] = {}
    if not path.exists():
        return samples_of
    for number, line in enumerate(read_records(path).splitlines(), 1):
        try:
            record = parse_json(line.encode(), _SAMPLE, {"turns": _COUNTS} | dict.fromkeys(NEWEST, _CELL))
        except ValueError as error:
            raise DataFault(f"{path}:{number}: not a line of samples", f"it {error}", "fa-cli experiment writes such a file") from None
        samples, turns = record["samples_ms"], record.get("turns", [])
        record = {"head_dim_v": record["HeadDim"], "page_size": None, "lengths": None, "dtype_kv": None} | record
        key = (record["run_id"], *(record[name] for name in KEY))
        samples_of[key] = samples, turns if sum(turns) == len(samples) else []
    return samples_of


def _shape(row: Row) -> str:
    text = f"{row.Test} " if row.Test else ""
    text += f"B{row.Batch} H{row.Heads} S{row.SeqLen} D{row.HeadDim}"
    text += f" Dv{row.head_dim_v}" * (row.head_dim_v not in (None, row.HeadDim))
    text += f" Hkv{row.heads_kv}" * (row.heads_kv != row.Heads) + f" Skv{row.seq_kv}" * (row.seq_kv != row.SeqLen)
    text += f" pages of {row.page_size}" * bool(row.page_size)
    return f"{text} {row.dtype}" + f" K, V {row.dtype_kv}" * bool(row.dtype_kv) + " causal" * row.causal


def _labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Rows that the other run does not have, in words."""
    return tuple(" ".join(filter(None, (row.Kernel, row.Type, _shape(row), row.timing, f"({row.Status})"))) for row in rows)


def _differences(a: Path, b: Path) -> tuple[str, ...]:
    """What of the machine and the code differs, from the two env.json; nothing where one is missing."""
    if not (a.exists() and b.exists()):
        return ()
    record_a, record_b = (environment.env_beside(path) for path in (a, b))
    flat_a, flat_b = ({**record, **(record.get("packages") or {})} for record in (record_a, record_b))
    names = sorted({*FACTS, *(record_a.get("packages") or {}), *(record_b.get("packages") or {})} - {"packages"})
    return tuple(
        f"{name:.60}: {flat_a.get(name)!s:.100} in A, {flat_b.get(name)!s:.100} in B"
        for name in names
        if flat_a.get(name) != flat_b.get(name)
    )
