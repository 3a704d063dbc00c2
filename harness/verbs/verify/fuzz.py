"""Random cases from a seed, each judged on every kernel that takes it, with one set of inputs and one reference for all of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...check.oracle import Oracle
from ...fault import UsageFault
from ...files.child import Ended
from ...kernel import Kernel, planner
from ...problem import CACHE_DTYPES, PAGE_SIZES, UNKNOWN_DESCALES_KV, Problem
from .cases import Case, in_form, storage_types, windowed
from .inputs import DRAWN
from .judge import Backends, CaseResult, Died, Lost, each_survived, oracle_of, repro_of, run_case
from .shrink import shrink

#: Multiply-adds of one product of a case, over all heads: milliseconds on the CPU engine.
WORK = 1 << 22
#: Factors on Q and K, the first in most cases. A kernel whose header promises less leaves the larger ones out.
FACTORS = (1.0, 1e-3, 3.0, 10.0, 30.0, 100.0, 1e4)
#: The largest deviation of the scores, factor^2 |scale| sqrt(dim), at which a backward pass is judged: P is exp(S - logsumexp), and the
#: rounding of a float32 logsumexp of 10^3 is a relative error of P that no budget foresees.
STEEPEST = 100.0
#: How many failures of a kernel are shrunk. Others of the same kernel are most likely the same fault.
SHRUNK = 3
_DTYPES = ("float32", "float16", "bfloat16", "float32", "float16", "bfloat16", "bfloat16", "float64")


def draw(seed: int, number: int) -> Case:
    """Case `number` of a seed: it depends on nothing else, so one case is drawn without those before it."""
    of = random.Random(f"{seed} {number}")
    dtype = of.choice(_DTYPES)
    dim = of.choice((16, 32, 64, 96, 128, of.randint(1, 128), of.randint(1, 64), of.randint(1, 256)))
    queries = _length(of)
    keys = queries if of.random() < 0.5 else _length(of)
    batch, heads_kv = of.choice((1, 1, 2, 3, 17)), of.choice((1, 1, 2, 3))
    group = of.choice((1, 1, 1, 2, 3, 8))
    kept = of.choice(("queries", "keys"))
    while batch * heads_kv * group * queries * keys * dim > WORK:
        if batch * heads_kv * group > 2:
            batch, heads_kv, group = (batch + 1) // 2, (heads_kv + 1) // 2, (group + 1) // 2
        elif queries == keys:
            queries = keys = keys * 3 // 4
        elif kept == "keys":
            queries = max(1, queries * 3 // 4)
        else:
            keys = max(1, keys * 3 // 4)
    causal = of.random() < 0.5
    edge = of.choice((62, 63, 1, 0, of.randint(-64, 64))) + 64 * of.randint(-2, 2)
    shift = of.choice((None, None, edge, of.randint(-queries, keys - 1)))
    factor = of.choice(FACTORS[:1] * 6 + FACTORS[1:])
    # to four digits: the last one of a power is the C library's, and a case is the same everywhere
    scale = of.choice((1.0, 1.0, 1.0, -1.0, 0.0, 0.5, of.choice((-1, 1)) * float(f"{10 ** of.uniform(-3, 1):.4g}"))) * dim**-0.5
    problem = Problem.of(batch, heads_kv * group, queries, dim, heads_kv, keys, dtype, causal, scale, shift)
    family = of.choice((*["randn"] * len(DRAWN), *DRAWN))
    schedule = of.choice((0, of.randrange(1, 1 << 31)))
    return Case(number, problem, _held(factor, dtype), schedule, of.random() < 0.5, family, of.randrange(1 << 31))


def _held(factor: float, dtype: str) -> float:
    """A factor on Q and K that a type bears: float16 holds no more than 100, and the rounding of a float64 score beyond 10^4 is more than
    float64's rule, 1e-11 of the largest value."""
    return min(factor, {"float16": 100.0, "float64": 10.0}.get(dtype, factor))


def _length(of: random.Random) -> int:
    """Queries or keys: very few, at the edge of a tile, any, and rarely many."""
    edge = max(1, 32 * of.randint(1, 8) + of.randint(-1, 1))
    return of.choice((of.randint(1, 8), edge, edge, of.randint(1, 150), of.randint(1, 600), of.choice((edge, edge, of.randint(600, 2100)))))


def masked(case: Case) -> Case:
    """A case with a mask, a score or both, of numbers that it draws; in two of three cases, and beside a shifted causal mask, as it is."""
    p, of = case.problem, random.Random(f"{case.seed} mask")
    if of.random() < 2 / 3 or p.causal_shift != p.default_shift:
        return case
    n, left, right = of.randint(1, 130), of.randint(-3, 150), of.randint(0, 150)
    masks = (
        f"{-right} <= q - k <= {left}",
        f"q // {n} == k // {n}",
        f"k <= q or k < {n}",
        f"(q + b) % {n + 1} != 0 and k % 5 < 4",
        f"abs(q - k) < {n} * (h_kv + 1) or h == 1",
        f"not (q > {n} and k < seq_kv - {left})",
    )
    scores = (
        "3.0 * tanh(s / 3.0)",
        "30.0 * tanh(s / 30.0)",
        "80.0 * tanh(s / 14.0)",
        "s - exp2(-h - 1) * abs(q - k)",
        "s if s > 0 else 0.25 * s",
        f"max(s, -1) + 0.125 * (k % {n})",
    )
    which = of.choice(("mask", "score", "both"))
    mask, score = of.choice(masks) if which != "score" else None, of.choice(scores) if which != "mask" else None
    return replace(case, problem=p.with_(mask=mask, score=score))


def bordered(case: Case) -> Case:
    """A case with a window in place of its mask and eight query heads a key head, for a kernel that takes windows only. It may have sixteen
    times as many pairs as others, since few are visible."""
    of = random.Random(f"{case.seed} window")
    p = windowed(case.problem, of.choice((0, 127, 176, of.randint(1, 16), of.randint(1, 176))))
    while p.batch * p.heads_q * p.seq_q * p.seq_kv * p.head_dim > 16 * WORK:
        p = p.with_(batch=(p.batch + 1) // 2, seq_q=max(1, p.seq_q * 3 // 4), seq_kv=max(1, p.seq_kv * 3 // 4))
    return replace(case, problem=p)


def sunk(case: Case) -> Case:
    """A case with sinks, a logit of each head or a tensor; in two of three cases as it is. A row that sees no key has them alone."""
    of = random.Random(f"{case.seed} sinks")
    if of.random() < 2 / 3:
        return case
    texts = ["sinks[h]", f"{of.uniform(-8, 8):.3g} - 0.5 * h", f"{of.uniform(-4, 4):.3g} * tanh(h_kv - 1.0)"]
    text = of.choice(
        (*texts, *texts, f"{of.choice((-1, 1)) * of.uniform(10, 100):.3g}")
    )  # the last: P of the keys, or of the sink, is small, or 0
    return replace(case, problem=case.problem.with_(sinks=text))


def widened(chosen: Kernel, case: Case) -> Case:
    """A case with a head dim of V's own, where the kernel takes it; in two of three cases as it is."""
    of = random.Random(f"{case.seed} dim_v")
    if not chosen.takes_dim_v or of.random() < 2 / 3:
        return case
    own = replace(case, problem=case.problem.with_(head_dim_v=of.choice((32, 64, 128, of.randint(1, 128), of.randint(1, 256)))))
    return own if takes(chosen, own) else case


def stretched(chosen: Kernel, case: Case) -> Case:
    """A case with a head dim beyond those that are drawn for all, where the kernel has one and the case stays small; in half of cases as it is."""
    of, p = random.Random(f"{case.seed} dim"), case.problem
    dim = of.choice((264, 384, 512, of.randint(257, 512)))
    if chosen.head_dims[-1] < 512 or of.random() < 0.5 or p.batch * p.heads_q * p.seq_q * p.seq_kv * dim > WORK:
        return case
    return replace(case, problem=p.with_(head_dim=dim, head_dim_v=dim, scale=p.scale * (p.head_dim / dim) ** 0.5))


def paged(case: Case) -> Case:
    """A case with K and V in pages, of keys of each sequence; in one of two cases, and where the problem has no shift, as it is."""
    of, p = random.Random(f"{case.seed} pages"), case.problem
    if of.random() < 1 / 2 or p.causal_shift != p.default_shift or p.depends_on("b") or p.tensors:
        return case
    keys = [of.choice((p.seq_kv, of.randint(1, p.seq_kv))) for _ in range(p.batch)]
    return replace(case, problem=p.with_(page_size=of.choice(PAGE_SIZES), seq_kv=keys))


def cached(chosen: Kernel, case: Case) -> Case:
    """A case with K and V of 8 bits, each batch's and key head's worth something else; in two of three cases as it is."""
    of, p = random.Random(f"{case.seed} dtype_kv"), case.problem
    if not chosen.dtypes_kv or p.dtype not in CACHE_DTYPES or of.random() < 2 / 3:
        return case
    tensors = {each.name: None for each in p.tensors} | dict(UNKNOWN_DESCALES_KV)
    return replace(case, problem=p.with_(dtype_kv=chosen.dtypes_kv[0], tensors=tensors), input_scale=min(case.input_scale, 5.0))


def formed(chosen: Kernel, case: Case) -> Case:
    """A case with what a kernel takes of wide heads, masks, scores, sinks, V's own head dim, a cache of 8 bits and pages, as they are drawn."""
    case = stretched(chosen, case)
    case = masked(case) if chosen.mask and chosen.score else bordered(case) if chosen.windows_only else case
    case = sunk(case) if chosen.sinks else case
    case = widened(chosen, case) if takes(chosen, case) else case
    case = paged(case) if chosen.paged and takes(chosen, case) else case
    return cached(chosen, case) if takes(chosen, case) else case


def takes(chosen: Kernel, case: Case) -> bool:
    """Whether a kernel's header covers a case (its logits are looked at when the data is there)."""
    p = case.problem
    if chosen.pass_ == "backward":
        factor = 10 * case.input_scale if case.inputs == "one_key" else case.input_scale
        if max(case.input_scale, factor) * case.input_scale * abs(p.scale) * math.sqrt(p.head_dim) > STEEPEST:
            return False
    try:
        planner.refuse(chosen, p)
    except UsageFault:
        return False
    return True


def fitted(chosen: Kernel, case: Case) -> Case:
    """A case with what a kernel's header refuses of it replaced by what it promises: a width, type, mask, heads and lengths that it takes."""
    p = case.problem
    dtypes = storage_types(chosen)
    dtype = p.dtype if p.dtype in dtypes else dtypes[case.number % len(dtypes)]
    within = chosen.takes_any_width and p.head_dim <= chosen.head_dims[-1]
    dim = p.head_dim if within else chosen.head_dims[case.number % len(chosen.head_dims)]
    causal = p.causal and chosen.causal
    problem = Problem.of(
        p.batch,
        p.heads_q,
        p.seq_q,
        dim,
        p.heads_kv if chosen.gqa else p.heads_q,
        p.seq_kv if chosen.cross else p.seq_q,
        dtype,
        causal,
        p.scale * (p.head_dim / dim) ** 0.5 if chosen.takes_scale else None,
        p.causal_shift if causal and chosen.takes_shift else None,
    )
    factor = case.input_scale if case.input_scale <= 10 or chosen.logits == float("inf") else 1.0
    return replace(case, problem=problem, input_scale=_held(factor, dtype))


def assigned(found: Sequence[Kernel], cases: Sequence[Case]) -> list[tuple[Case, Kernel]]:
    """Each case with each kernel that takes it, those that take masks, scores or sinks last and with some, and with V's own head dim. One
    that none takes is fitted to the first of each pass, so that few are lost.
    """
    able = sorted((chosen for chosen in found if (chosen.mask and chosen.score) or chosen.sinks), key=lambda chosen: chosen.sinks)
    firsts = list({chosen.pass_: chosen for chosen in reversed(found)}.values())
    pairs: list[tuple[Case, Kernel]] = []
    for case in cases:
        taken = [(case, chosen) for chosen in found if chosen not in able and takes(chosen, case)]
        taken += [(its, chosen) for chosen in able if takes(chosen, its := formed(chosen, case))]
        pairs += taken or [(fit, chosen) for chosen in firsts if takes(chosen, fit := fitted(chosen, case))]
    return pairs


def fuzz(
    found: Sequence[Kernel], cases: Sequence[Case], backends: Backends, deterministic: bool, progress: Callable[[CaseResult], None]
) -> Iterator[CaseResult]:
    """The result of each case on each of the kernels that takes it, as they come; a failure is that of the shrunk case.

    On the CPU one fork runs them all, until a kernel ends it. It ends early where a kernel destroys the CUDA context: nothing more can
    run in this process.
    """
    shrunk: Counter[str] = Counter()
    pairs = assigned(found, cases)
    backward = {case.number for case, chosen in pairs if chosen.pass_ == "backward"}
    kept: dict[Case, Oracle] = {}  # of one case: its pairs follow one another

    def one(case: Case, chosen: Kernel) -> Case:  # the case as its command would have it
        return case if in_form(chosen, case) is not chosen else replace(case, deterministic=False)

    def work(pair: tuple[Case, Kernel]) -> CaseResult:
        case, chosen = pair
        backend = backends.of(case)
        if case not in kept:
            kept.clear()
            kept[case] = oracle_of(backend, case, "backward" if case.number in backward else "forward")
        return run_case(backend, chosen, one(case, chosen), "", deterministic, kept[case], repeat=None)

    def died(pair: tuple[Case, Kernel], why: Ended) -> CaseResult:
        case, chosen = pair
        return Died.of(chosen, one(case, chosen), repro_of(backends.first, chosen, one(case, chosen), "", deterministic, None), why)

    judged = each_survived(backends.first, pairs, work, died, "the process of the case")
    for (_, chosen), result in zip(pairs, judged, strict=False):
        if result.exit_code == UsageFault.exit_code:
            continue  # the data is beyond the logits that its header promises, or the GPU not of its architecture
        if not result.passed and not isinstance(result, Lost | Died) and shrunk[chosen.label] < SHRUNK:
            shrunk[chosen.label] += 1
            result = shrink(result, _runner(chosen, backends, deterministic))
        progress(result)
        yield result
        if isinstance(result, Lost):
            return


def _runner(chosen: Kernel, backends: Backends, deterministic: bool) -> Callable[[Case], CaseResult]:
    return lambda case: run_case(backends.of(case), chosen, case, "", deterministic, repeat=None)
