"""What a case of verify is, its text on a command line, and the matrix of cases of a kernel.

The matrix is a covering array of strength 2: every pair of levels of any two factors occurs in some case. A fault that needs two
levels at once (a tail tile and bfloat16, grouped heads and the causal mask) is found without running the full product.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...fault import UsageFault
from ...kernel import Kernel
from ...problem import DTYPE_BYTES, PAGE_SIZES, SPELLINGS, UNKNOWN_DESCALES, UNKNOWN_DESCALES_KV, Problem
from .choices import WINDOWS, Planned, counts_multiprocessors, made, missing
from .covering import Level, covering
from .inputs import FAMILIES, VAST_V

#: Lengths around the tiles kernels use (32, 64, 128), between them, and odd ones.
EDGES = (1, 2, 3, 31, 33, 63, 64, 65, 97, 100, 113, 127, 128, 129, 200, 257, 385, 449, 1023, 1025)
#: (seq_q, seq_kv): longer and shorter, so that under the causal mask some queries see no key.
CROSS = (
    (1, 239),
    (239, 1),
    (3, 799),
    (799, 3),
    (113, 203),
    (128, 217),
    (108, 256),
    (256, 512),
    (512, 256),
    (1023, 1024),
    (1024, 1023),
)
#: Ten shapes, small to large, as the sweeps `forward` and `backward` have them: batch, heads, length; head dim 64.
SEED_SHAPES = (
    (1, 1, 128),
    (2, 4, 256),
    (2, 8, 256),
    (8, 16, 32),
    (2, 8, 512),
    (8, 16, 100),
    (4, 8, 512),
    (2, 8, 1024),
    (4, 12, 1024),
    (8, 16, 2048),
)
#: The quick matrix: a tile less one, whole tiles, a tile and one; a mask whose border is two or one off a tile; both ways across.
QUICK = ((1, 1), (63, 63), (128, 128), (64, 126), (64, 190), (128, 129), (113, 203), (129, 1), (3, 331))
QUICK_SQUARE = ((1, 1), (63, 63), (128, 128), (129, 129))
QUICK_DIMS = (1, 40, 64, 80, 96, 111, 128, 192, 256, 344, 512)
#: Its (batch, key heads) by how many query heads share a key head, in turns: 17 and 36 query heads, three and five batches.
QUICK_HEADS = {1: ((2, 2), (1, 17)), 3: ((3, 2), (1, 12)), 7: ((5, 1),)}
HEAD_DIMS = (1, 7, 16, 24, 31, 40, 56, 59, 64, 72, 80, 96, 104, 111, 120, 128, 136, 160, 200, 256, 257, 384, 456, 512)
GROUPS = (1, 3, 7, 8)
#: Factors on Q and K; beyond 10 only forward, and only for kernels that promise any logits (float16 holds no more than 100).
SCALES = {"forward": (1e-3, 1.0, 10.0, 30.0, 1e4), "backward": (1e-3, 1.0, 10.0)}
#: Those of the quick matrix, of which the third is for kernels that promise any logits.
QUICK_SCALES = {"forward": (1e-3, 1.0, 10.0, 1e4), "backward": (1e-3, 1.0, 10.0)}
#: Factors on the softmax scale 1/sqrt(dim): a kernel that ignores args.scale is wrong at the second; 0 makes all visible keys equal.
QUICK_SOFTMAX_SCALES, SOFTMAX_SCALES = (1.0, 0.0, -0.5), (1.0, 0.5, 0.0, -1.0)
#: causal_shift modulo 64, a tile of keys; None is the bottom-right alignment.
SHIFTS = (None, 1, 62, 63)
#: (batch, key heads) of the cases of the full matrix with short rows, in turn.
BATCHES = ((2, 2), (3, 5), (1, 3), (5, 1), (17, 1), (1, 17), (2, 3), (1, 12))
SCHEDULES = (0, 7)
#: The number of multiprocessors in plans, None: the device's own. With few, a persistent block takes a second work and a third.
SMS = (None, 2, 3)
MATRICES = ("quick", "full")
_MOST = {"cpu": 250, "cuda": 320}
#: Products of tiles of 64 x 64 x 64 of a case of the quick matrix, over all heads, and scores of one of the full matrix with short rows.
_PRODUCTS, _SCORES = {"cpu": 40, "cuda": 4096}, {"cpu": 1 << 19, "cuda": 1 << 24}
#: Elements of each tensor of the cases beyond 32-bit indices.
BEYOND = 1 << 31


@dataclass(frozen=True)
class Case:
    """What kernels are run on, and how. number is its place in a matrix or a fuzz.

    sms: the number of multiprocessors in the plan, None: the device's. check: the CPU engine's "race", or None. schedule: its seed, 0 is
    index order. seed, inputs and input_scale: the arguments of inputs.inputs. copies: the problem's
    batches, so many times over (large.py), which is how tensors beyond 2^31 elements are made.
    """

    number: int
    problem: Problem
    input_scale: float
    schedule: int
    deterministic: bool = False  # which form of a kernel that has two
    inputs: str = "randn"
    seed: int = 42
    copies: int = 1
    sms: int | None = None
    check: str | None = None

    @property
    def planned(self) -> Planned:
        """What a kernel's plan depends on."""
        return self.problem, self.deterministic, self.sms

    def text(self) -> str:
        """One word that :meth:`parse` makes the same case from, but for its number: B1_H2_S63_D16_float16,causal,shift=62,seed=7."""
        p = self.problem
        words = [p.folder, *["causal"] * p.causal]
        words += [f"shift={p.causal_shift}"] * (p.causal_shift != p.default_shift) + [f"scale={p.scale!r}"] * (p.scale != p.head_dim**-0.5)
        words += [f"{name}={formula.text}" for name, formula in p.formulas.items()]
        words += [f"page={p.page_size}"] * bool(p.page_size) + [f"keys={p.keys_text.replace(',', ' ')}"] * bool(p.keys_text)
        words += [f"inputs={self.inputs}"] * (self.inputs != "randn") + [f"times={self.input_scale!r}"] * (self.input_scale != 1)
        words += [f"sms={self.sms}"] * bool(self.sms) + [f"check={self.check}"] * bool(self.check)
        words += [f"seed={self.seed}"] * (self.seed != 42) + [f"schedule={self.schedule}"] * (self.schedule != 0)
        return ",".join(words + ["deterministic"] * self.deterministic + [f"copies={self.copies}"] * (self.copies != 1))

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of a text. Raises UsageFault where it is none."""
        shape, *words = _words(text)
        sizes, _, last = shape.rpartition("_")
        if (dtype := SPELLINGS.get(last)) and not shape.endswith(dtype):
            shape = sizes + f"_{dtype}" * (dtype != "float32")
        problem = Problem.from_folder(shape)
        values = dict(word.partition("=")[::2] for word in words)
        flags = ("causal", "deterministic")
        wanted = (
            "shift",
            "scale",
            "mask",
            "score",
            "sinks",
            "inputs",
            "times",
            "seed",
            "schedule",
            "copies",
            "sms",
            "check",
            "page",
            "keys",
        )
        known = all(values[name] != "" if name in wanted else name in flags and not values[name] for name in values)
        try:
            if problem is None or not known or values.get("inputs", "randn") not in FAMILIES:
                raise ValueError
            given = values.get
            p = problem
            scale, shift = (float(values["scale"]) if "scale" in values else None), (int(values["shift"]) if "shift" in values else None)
            problem = p.with_(
                causal="causal" in values, scale=scale, causal_shift=shift, mask=given("mask"), score=given("score"), sinks=given("sinks")
            )
            if p.has_own_dtype_kv:
                problem = problem.with_(tensors=UNKNOWN_DESCALES_KV)
            if "page" in values or "keys" in values:
                keys = [int(each) for each in values["keys"].split()] if "keys" in values else p.seq_kv
                problem = problem.with_(page_size=int(given("page", "0")), seq_kv=keys)
            numbers = [int(given(name, default)) for name, default in (("schedule", "0"), ("seed", "42"), ("copies", "1"))]
            sms, check = (int(values["sms"]) if "sms" in values else None), values.get("check")
            schedule, seed, copies = numbers
            if not (0 <= schedule < 1 << 63 and copies >= 1 and (sms is None or sms >= 1) and check in (None, "race")):
                raise ValueError
            factor, form, family = float(given("times", "1")), "deterministic" in values, given("inputs", "randn")
            return cls(0, problem, factor, schedule, form, family, seed, copies, sms, check)
        except ValueError:
            why = f"a case is a number, or a shape and then any of: {', '.join(flags)}, {'=, '.join(wanted)}="
            hint = f"--case B1_H2_S63_D16_float16,causal,shift=62,inputs=one_hot; inputs: {' '.join(FAMILIES)}"
            raise UsageFault(f"{text!r} is no case", why, hint) from None


def matrix(chosen: Kernel, which: str, device: str) -> list[Case]:
    """The cases of a kernel: those its header promises. quick is some 50, full at most 220 on cpu and 320 on cuda.

    Of the quick one every choice of the header is met (choices.py), of the full one every pair; on cpu the last is checked for races.
    """
    if which not in MATRICES:
        raise UsageFault(f"unknown matrix {which!r}", f"known: {', '.join(MATRICES)}", "use --matrix quick")
    return list(_matrix(chosen, which == "full", device))


@lru_cache(maxsize=256)
def _matrix(chosen: Kernel, full: bool, device: str) -> tuple[Case, ...]:
    """The same, made once: of a header with many choices it takes seconds."""
    factors = _factors(chosen, full, device)
    if full:
        rows = covering(factors, chosen.head_dims, 80)
    else:
        rows = covering(factors, chosen.head_dims, 40, _named(chosen, factors), _Compiled(chosen))
    cases: list[Case] = []
    used: Counter[tuple[int, int, int]] = Counter()
    for i, row in enumerate(rows):
        heads = _heads(row, i, device) if full else _quick_heads(row, device, used)
        problem = _problem(chosen, row, *heads)
        given = row.get("inputs", "randn")
        cases.append(Case(0, problem, row["scale"], row["schedule"], row["form"][1], given, sms=row.get("sms")))
    if full:
        two = len(chosen.forms) > 1
        extra = [*_seed_shapes(chosen, device), *_long(chosen), *(_large(chosen) if device == "cuda" else ())]
        cases += [Case(0, problem, 1.0, 0, two and i % 2 == 1) for i, problem in enumerate(extra)]
        cases += _families(chosen)
        cases += _beyond(chosen) if device == "cuda" else ()
    cases += [
        Case(0, p, 1.0, 0, deterministic, sms=sms) for p, deterministic, sms in missing(chosen, [case.planned for case in cases], full)
    ]
    cases += [
        *_formulas(chosen),
        *_sinks(chosen),
        *_dims_v(chosen, full, device),
        *_pages(chosen, full),
        *_descales(chosen),
        *_caches(chosen, full),
    ]
    cases += [Case(0, problem, 1.0, 0, sms=sms, check="race") for problem, sms in _races(chosen)] if device == "cpu" else ()
    if chosen.windows_only:
        cases = [case for case in cases if case.copies == 1]
        own = [case.problem if case.problem.mask else windowed(case.problem, WINDOWS[i % len(WINDOWS)]) for i, case in enumerate(cases)]
        cases = [replace(case, problem=problem) for case, problem in zip(cases, own, strict=True)]
    assert len(cases) <= _MOST[device], f"{len(cases)} cases: a level too many in a factor"
    return tuple(replace(case, number=i, seed=42 + i) for i, case in enumerate(cases))


def windowed(problem: Problem, window: int = WINDOWS[0]) -> Problem:
    """The same with eight query heads a key head and a window in place of its mask: for a kernel that takes windows only."""
    heads_kv = min(problem.heads_kv, 2)
    return problem.with_(heads_q=8 * heads_kv, heads_kv=heads_kv, causal=False, mask=f"0 <= q - k <= {window}")


@dataclass(frozen=True)
class _Compiled:
    """What is compiled for a row of a kernel's matrix. Two of the same kernel are equal, so `covering` remembers its rows."""

    chosen: Kernel

    def __call__(self, row: dict[str, Level]) -> frozenset[tuple[str, str]]:
        return made(self.chosen, _problem(self.chosen, row, 1, 1, row["group"]), row["form"][1], row.get("sms"))


def _factors(chosen: Kernel, full: bool, device: str) -> dict[str, list[Level]]:
    lengths = [(s, s) for s in EDGES] if full else list(QUICK if chosen.cross else QUICK_SQUARE)
    lengths += CROSS if full and chosen.cross else ()
    factors: dict[str, list[Level]] = {
        "length": lengths,
        "dim": [d for d in (HEAD_DIMS if full else QUICK_DIMS) if d <= chosen.head_dims[-1]]
        if chosen.takes_any_width
        else list(chosen.head_dims),
        # one factor of two, so that each of its pairs is one of three: a mask in a form with a tail
        "form": list(itertools.product([False, True] if chosen.causal else [False], chosen.forms if len(chosen.forms) > 1 else [False])),
        "group": list(GROUPS if full else QUICK_HEADS) if chosen.gqa else [1],
        "dtype": storage_types(chosen),
        "scale": [s for s in (SCALES if full else QUICK_SCALES)[chosen.pass_] if s <= 10 or chosen.logits == float("inf")],
        "softmax": list(SOFTMAX_SCALES if full else QUICK_SOFTMAX_SCALES) if chosen.takes_scale else [1.0],
        "schedule": list(SCHEDULES) if device == "cpu" else [0],
    }
    if counts_multiprocessors(chosen):
        factors["sms"] = list(SMS)
    if full and chosen.causal and chosen.takes_shift:
        factors["shift"] = list(SHIFTS)
    return factors


def _named(chosen: Kernel, factors: dict[str, list[Level]]) -> list[dict[str, Level]]:
    """Rows that the quick matrix has by name: what a softmax without a maximum, a lost rescale or a narrow type does wrong.

    Scores over several tiles as large as a sum of exponentials does not hold, in two widths; then a family of inputs a row.
    """
    several = next(pair for pair in ((113, 203), (129, 129)) if pair in factors["length"])
    dims = [max((d for d in factors["dim"] if d <= most), default=factors["dim"][0]) for most in (64, 128)]
    large, plain = max(s for s in factors["scale"] if s <= 10), {"scale": 1.0, "softmax": 1.0}
    rows: list[dict[str, Level]] = []
    if chosen.cross and chosen.pass_ == "backward":  # dK and dV sum over queries; the mask would hide nearly all of these
        rows += [plain | {"length": (2100, 3), "group": 1, "form": factors["form"][0]}]
    rows += [{"length": several, "dim": dim, "scale": large, "softmax": 1.0} for dim in dims]
    rows += [{"length": several, "dim": dim, "scale": 1.0, "softmax": 1.0, "inputs": "jump"} for dim in dims]
    families = ["zero_rows", "q_is_k", "tiny_v", *["vast_v"] * any(dtype in VAST_V for dtype in storage_types(chosen))]
    families += ["ones_do"] * (chosen.pass_ == "backward")
    if chosen.gqa:  # short, so that all the heads of QUICK_HEADS fit; scores that differ, or no row shows whose keys it has read
        rows += [plain | {"length": (63, 63), "dim": dims[0], "group": group} for group in (3, 3, 7, 1)]
    rows += [plain | {"length": (3, 2100), "group": 1} for _ in range(chosen.cross)]
    return rows + [{"length": several, "dim": dims[i % 2], "scale": 1.0, "inputs": each} for i, each in enumerate(families)]


def _problem(chosen: Kernel, row: dict[str, Level], batch: int, heads_kv: int, group: int) -> Problem:
    """The problem of a row."""
    queries, keys = row["length"]
    scale, shift = row["dim"] ** -0.5 * row["softmax"], row.get("shift")
    if shift is not None:
        shift += (keys - queries) // 64 * 64
    dim, form = row["dim"], row["form"]
    sizes = (batch, heads_kv * group, queries, dim, heads_kv, keys)
    return Problem.of(*sizes, row["dtype"], form[0], scale, shift, dim_v=chosen.dim_v(dim))


def _heads(row: dict[str, Level], turn: int, device: str) -> tuple[int, int, int]:
    """Batch, key heads and group of a row of the full matrix: of long rows few, else those of BATCHES in turn."""
    group, scores = row["group"], math.prod(row["length"])
    if scores > 1 << 16:
        return 1, 2 if device == "cuda" and group == 1 else 1, group
    batch, heads_kv = BATCHES[turn % len(BATCHES)]
    return (batch, heads_kv, group) if batch * heads_kv * group * scores <= _SCORES[device] else (2, 1, group)


def _quick_heads(row: dict[str, Level], device: str, used: Counter[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The same of the quick matrix: those of QUICK_HEADS that are small enough, the least used, of equals the largest; else fewer."""
    group, most = row["group"], _PRODUCTS[device] // math.prod(-(-n // 64) for n in (*row["length"], row["dim"]))
    several = [(batch, heads_kv, group) for batch, heads_kv in QUICK_HEADS[group]]
    fitting = [each for each in several if math.prod(each) <= most]
    chosen = min(fitting, key=lambda each: (used[each], -math.prod(each))) if fitting else _fewer(*several[0], most)
    used[chosen] += 1
    return chosen


def _fewer(batch: int, heads_kv: int, group: int, most: int) -> tuple[int, int, int]:
    """A batch, key heads and a group of at most so many query heads in all: batches go first, the group last."""
    if batch * heads_kv * group > most:
        batch = 1
    while heads_kv > 1 and heads_kv * group > most:
        heads_kv //= 2
    while group > 1 and group > most:
        group //= 2
    return batch, heads_kv, group


def _words(text: str) -> list[str]:
    """The words of a case: commas part them, but not those between brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words


#: Masks and scores: a window whose two ends are inside tiles; a bounded score whose tanh is never large (in choices.py it is); documents
#: with a bias by position and sinks, also of rows that see nothing else; rows that see nothing, each head its own, with a score that has a
#: kink; tensors (dataset.named.drawn), documents that end in the middle of a tile.
_FORMULAS = (
    ("-5 <= q - k <= 37", None, None),
    (None, "30.0 * tanh(s / 30.0)", None),
    ("q // 48 == k // 48 and q % 50 != 7", "s + exp2(-h - 1) * (k - q)", "3.0 - 2 * h"),
    ("(k < 70 or h == 0) and q % 50 != 7", "s if s > 0 else 0.25 * s", None),
    ("doc[b, q] == doc[b, k]", "s + bias[q, k] - slope[h] * abs(q - k)", None),
)


def _formulas(chosen: Kernel) -> list[Case]:
    """Masks and scores, for a kernel that takes them."""
    group, lengths = GROUPS[1] if chosen.gqa else 1, (113, 203) if chosen.cross else (129, 129)
    able = chosen.mask, chosen.score, chosen.sinks
    taken = [[text if takes else None for text, takes in zip(texts, able, strict=True)] for texts in _FORMULAS]
    dtypes, cases = [dtype for dtype in storage_types(chosen) if dtype != "float64"] or storage_types(chosen), []
    for i, (mask, score, sinks) in enumerate(taken):
        queries, keys = lengths if "doc" not in (mask or "") else (129, 129)
        sizes, dtype = (1, 2 * group, queries, _dim(chosen), 2, keys), dtypes[i % len(dtypes)]
        problem = Problem.of(*sizes, dtype, chosen.causal and i % 2 == 1, mask=mask, score=score, sinks=sinks)
        cases += [Case(0, problem, 1.0, 0)] if problem.formulas else []
    groups = (GROUPS[3], GROUPS[1]) if any(kernel.windows_only for kernel in chosen.variants) else GROUPS[3:]
    for group in (groups if chosen.gqa else (1,)) if chosen.window else ():
        problem = Problem.of(1, 2 * group, 130, _dim(chosen), 2, 290, dtypes[0], mask="0 <= q - k <= 70", sinks="1.0 - h")
        cases.append(Case(0, problem, 1.0, 0))
    return cases


#: Far below every score in most heads: there it is all that a row has which sees no key.
_DEEP = "2.0 * sinks[h] - 60 * h"


def _sinks(chosen: Kernel) -> Iterator[Case]:
    """Sinks without a mask of the problem's own: of queries that see no key, on few multiprocessors, where a tile of them may have several
    heads; forward also of few queries of many keys, which a kernel may divide."""
    if not chosen.sinks:
        return
    dtypes, few = storage_types(chosen), 2 if counts_multiprocessors(chosen) else None
    heads_kv, keys = 2 if chosen.gqa else 16, 65 if chosen.cross else 129
    yield Case(0, Problem.of(1, 16, 129, _dim(chosen), heads_kv, keys, dtypes[0], chosen.causal, sinks=_DEEP), 1.0, 0, sms=few)
    if chosen.cross and chosen.pass_ == "forward":
        problem = Problem.of(1, 2, 33, min(128, chosen.head_dims[-1]), 2, 1100, dtypes[1 % len(dtypes)], sinks="sinks[h]")
        yield Case(0, problem, 1.0, 0)


def _descales(chosen: Kernel) -> Iterator[Case]:
    """Elements of 8 bits that are worth something else in each batch and key head; and long sums of them that do not cancel."""
    for dtype in storage_types(chosen):
        if DTYPE_BYTES[dtype] == 1:
            sizes = (2, 4 if chosen.gqa else 2, 129, _dim(chosen), 2, 200 if chosen.cross else 129)
            yield Case(0, Problem.of(*sizes, dtype, chosen.causal, tensors=UNKNOWN_DESCALES), 1.0, 0)
            yield Case(0, Problem.of(1, 1, 64, 64, 1, 2500 if chosen.cross else 64, dtype), 1.0, 0, inputs="positive_v")


#: (head dim, V's head dim): those of DeepSeek, both ways, of the same compiled width and of two, a part of 16 bytes in each.
DIMS_V = ((192, 128), (96, 59), (40, 111), (128, 64), (64, 200), (256, 192))


def _dims_v(chosen: Kernel, full: bool, device: str) -> Iterator[Case]:
    """V's own head dim, for a kernel that takes one. The quick matrix has two: on cpu the first is that of a race case."""
    pairs, dtypes, forms = list(enumerate(_pairs_v(chosen))), storage_types(chosen), chosen.forms if len(chosen.forms) > 1 else (False,)
    group, lengths = GROUPS[1] if chosen.gqa else 1, [(129, 129), *((113, 203),) * chosen.cross]
    for i, (dim, dim_v) in pairs if full else pairs[device == "cpu" : 2]:
        queries, keys = lengths[i % len(lengths)]
        causal, form = chosen.causal and i % 2 == 0, forms[(i + 1) // 2 % len(forms)]
        problem = Problem.of(1, group, queries, dim, 1, keys, dtypes[i % len(dtypes)], causal, dim_v=dim_v)
        yield Case(0, problem, 1.0, 0, form, sms=2 if i == 0 and counts_multiprocessors(chosen) else None)


def _pairs_v(chosen: Kernel) -> list[tuple[int, int]]:
    """Those of DIMS_V that a kernel takes."""
    pairs = [pair for pair in DIMS_V if max(pair) <= chosen.head_dims[-1] and chosen.dim_v(pair[1]) is None]
    return pairs if chosen.takes_dim_v else []


#: Of a paged cache: the page size, keys of each sequence, queries, head dims, and a mask. Lengths on a page's border, one off, of a key, of
#: fewer keys than queries; many sequences; a window in long ones.
_PAGES: tuple[tuple[int, tuple[int, ...], int, tuple[int, int], str | None], ...] = (
    (16, (700, 1, 1296, 257), 3, (64, 64), None),
    (64, (100, 1600), 1, (128, 128), "0 <= q - k and q - k <= 200"),
    (256, (256, 1025, 511), 5, (192, 128), None),
    (32, tuple(range(40, 1000, 24)), 1, (64, 64), None),
    (128, (640, 640), 20, (256, 256), "k < 3 or q - k < 300"),
    (16, (9000,), 2, (128, 64), None),
)


def _pages(chosen: Kernel, full: bool) -> Iterator[Case]:
    """K and V in pages, for a kernel that takes them; half of these in the quick matrix."""
    for i, (size, keys, queries, dims, mask) in enumerate(_PAGES if chosen.paged and full else _PAGES[:3] if chosen.paged else ()):
        dtype, group = storage_types(chosen)[i % len(storage_types(chosen))], 4 if i % 2 else 1
        sizes = (len(keys), 2 * group, queries, dims[0], 2, list(keys))
        sinks = "1.0 - h" if chosen.sinks and i == 2 else None
        yield Case(0, Problem.of(*sizes, dtype, chosen.causal and i != 3, mask=mask, sinks=sinks, dim_v=dims[1], page_size=size), 1.0, 0)


#: Of a cache of 8 bits: head dims, queries, keys (of each sequence: in pages), heads of a group, and a mask, score and sinks.
_CACHES: tuple[tuple[tuple[int, int], int, int | tuple[int, ...], int, str | None, str | None, str | None], ...] = (
    ((128, 128), 1, 1500, 4, None, None, None),
    ((64, 64), 3, (700, 1, 257), 2, "0 <= q - k and q - k <= 200", None, "1.0 - h"),
    ((256, 192), 5, 333, 4, None, "3.0 * tanh(s / 3.0)", None),
    ((59, 111), 20, 600, 3, None, None, None),
    ((128, 128), 2, (1000, 64, 513), 8, None, None, None),
    ((192, 128), 1, 129, 1, "k < 3 or q - k < 100", None, "sinks[h]"),
)


def _caches(chosen: Kernel, full: bool) -> Iterator[Case]:
    """K and V of 8 bits beside Q of 16, worth something else in each batch and key head; half of these in the quick matrix."""
    for i, (dims, queries, keys, group, *texts) in enumerate(_CACHES if full else _CACHES[:3]) if chosen.dtypes_kv else ():
        lengths, size = (list(keys), PAGE_SIZES[i % 3]) if isinstance(keys, tuple) else (keys, None)
        dtype = chosen.dtypes[-1 - i % 2]
        sizes = (len(keys) if isinstance(keys, tuple) else 2, 2 * group, queries, dims[0], 2, lengths)
        more: Any = {"dim_v": dims[1], "page_size": size, "dtype_kv": chosen.dtypes_kv[0], "tensors": UNKNOWN_DESCALES_KV}
        more |= zip(("mask", "score", "sinks"), texts, strict=True)
        scale = -(dims[0] ** -0.5) if i == 3 else None
        yield Case(0, Problem.of(*sizes, dtype, chosen.causal and i % 2 == 0, scale, **more), 1.0, 0)


def _races(chosen: Kernel) -> Iterator[tuple[Problem, int | None]]:
    """Small problems with all that has borders, and multiprocessors: a mask, tails, a group, more works than multiprocessors; a scale below
    0; sinks; V's own head dim."""
    queries, keys = (65, 330) if chosen.cross else (200, 200)
    dim, heads, dtype = _dim(chosen), 3 if chosen.gqa else 1, _smallest(chosen)
    scale = -(dim**-0.5) if chosen.takes_scale else None
    sms = 2 if counts_multiprocessors(chosen) else None
    sinks = "1.0 - h" if chosen.sinks else None
    for dims in (*_pairs_v(chosen)[:1], (dim, dim)):
        yield Problem.of(1, heads, queries, dims[0], 1, keys, dtype, chosen.causal, scale, dim_v=dims[1], sinks=sinks), sms


def in_form(chosen: Kernel, case: Case) -> Kernel:
    """The form of a kernel that a case is of."""
    return chosen.made_deterministic() if case.deterministic and len(chosen.forms) > 1 else chosen


def storage_types(chosen: Kernel) -> list[str]:
    """The storage types that it takes."""
    return ["float32" if d == "tf32" else d for d in chosen.dtypes]


def _smallest(chosen: Kernel) -> str:
    """The storage type of the fewest bytes, bfloat16 before float16."""
    return min(storage_types(chosen), key=lambda dtype: (DTYPE_BYTES[dtype], dtype))


def _seed_shapes(chosen: Kernel, device: str) -> Iterator[Problem]:
    masks = [False, True] if chosen.causal and device == "cuda" else [False]
    dtypes = storage_types(chosen)
    shapes: Sequence[tuple[int, int, int]] = SEED_SHAPES
    if device == "cpu":  # scaled down: a CPU takes seconds for what a GPU does in a millisecond
        small = [(b, h, s) if s <= 256 else (1, max(1, h // 4), 512) for b, h, s in SEED_SHAPES]
        shapes = list(dict.fromkeys(small))
    for i, (batch, heads, length) in enumerate(shapes):
        dtype = dtypes[i % len(dtypes)]
        for causal in masks:
            yield Problem.of(batch, heads, length, _dim(chosen), dtype=dtype, causal=causal)


def _dim(chosen: Kernel) -> int:
    return min(64, chosen.head_dims[-1])


def _long(chosen: Kernel) -> Iterator[Problem]:
    """Many tiles: 2049 queries and keys, and a few queries of 65537 keys (more than float16 counts to), in the smallest type."""
    dtype = _smallest(chosen)
    yield Problem.of(1, 1, 2049, _dim(chosen), dtype=dtype, causal=chosen.causal)
    if chosen.cross:
        yield Problem.of(1, 1, 3, _dim(chosen), seq_kv=65537, dtype=dtype)


def _families(chosen: Kernel) -> Iterator[Case]:
    """Inputs of other families: large rows of V, and forward a NaN and an infinity among the keys, which rows before it do not see."""
    for i, (dtype, family) in enumerate(itertools.product(storage_types(chosen), ("large_v", "nan", "inf"))):
        if chosen.pass_ == "backward" if family != "large_v" else dtype == "float16":
            continue
        heads = GROUPS[1] if chosen.gqa else 1
        causal = chosen.causal and (family != "large_v" or i % 2 == 0)
        problem = Problem.of(1, heads, 129, _dim(chosen), 1, 193 if chosen.cross else 129, dtype, causal)
        yield Case(0, problem, 1.0, 0, inputs=family)


def _large(chosen: Kernel) -> Iterator[Problem]:
    """Long rows, many batches, and as many heads as a grid may have blocks in y."""
    dtypes = [d for d in chosen.dtypes if d in ("float32", "bfloat16")]
    for dtype, causal in itertools.product(dtypes, [False, True] if chosen.causal else [False]):
        yield Problem.of(1, 2, 4097, 64, dtype=dtype, causal=causal)
        yield Problem.of(60, 4, 129, min(128, chosen.head_dims[-1]), dtype=dtype, causal=causal)
        yield Problem.of(1, 65535, 3, 16, dtype=dtype, causal=causal)


def _beyond(chosen: Kernel) -> Iterator[Case]:
    """32768 heads in each of two batches, 65536 together; and more than 2^31 elements in every tensor, in the smallest type.

    Three batches of 32 heads and 129 rows are repeated. Neither 2^31 nor 2^32 elements are a multiple of three batches, so an index that
    wraps around reads other values.
    """
    dtype, dim = _smallest(chosen), min(128, chosen.head_dims[-1])
    two = len(chosen.forms) > 1
    yield Case(0, Problem.of(2, 32768, 3, min(16, dim), dtype=dtype, causal=chosen.causal), 1.0, 0, two)
    problem = Problem.of(3, 32, 129, dim, dtype=dtype, causal=chosen.causal)
    yield Case(0, problem, 1.0, 0, copies=BEYOND // (3 * 32 * 129 * dim) + 1)
