"""Problems drawn by a seed from the heads of models, which a sweep has in place of shapes.

    [draw]
    cases = 200                                 # unless --cases says otherwise
    models = [{ name = "Qwen2.5-7B", heads = 28, heads_kv = 4, dim = 128 }, { name = "BERT", heads = 12, dim = 64, causal = false }]

    [[draw.part]]                               # every sixth case is of a part with share 1 beside one with share 5
    share = 5
    dtype = ["bfloat16", "bfloat16", "float16"] # each as likely as it is listed
    tokens = [2048, 16384]                      # keys of a batch: batch = tokens / seq_kv, at least 1
    seq = [128, 32768]                          # at most twice the tokens
    causal = 0.85                               # the share of causal problems, of models that do not say causal = false
    longer = 0.1                                # the share of problems with more keys than queries
    peers = ["fa4", "torch-cudnn"]              # optional, as kernels: of this part in place of the sweep's

[cpu.draw] and [[cpu.draw.part]] are the smaller ones of the CPU engine. heads_kv is heads unless it is given. Tokens are drawn evenly
over their logarithm. So is a length, and half of the lengths are powers of two. The models of a part come in rounds: each once, in an
order of its own, before any comes again.

The same seed draws the same problems on every machine, and case number n does not depend on how many follow it: a generator of its own
is seeded with the text "seed, part, n". Python promises the sequence of Random.random(), and only exact arithmetic is done with it. (numpy's
RandomState promises as much, but `fa-cli list` reads sweeps and loads no numpy.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from ..fault import DataFault, Fault
from ..problem import DTYPE_BYTES, LARGEST, SPELLINGS, Problem

Wrong = Callable[[str], DataFault]

KEYS = ("cases", "models", "part")
MODEL_KEYS = ("name", "heads", "heads_kv", "dim", "causal")
PART_KEYS = ("share", "dtype", "tokens", "seq", "causal", "longer")
OWN = ("kernels", "peers")
#: The most cases of a sweep, and the largest share of a part.
MOST, LARGEST_SHARE = 10_000, 100
LONGEST_NAME = 60


class Model(NamedTuple):
    """The attention of a public model: query heads, key heads, head dim, and whether it may have a causal mask."""

    name: str
    heads: int
    heads_kv: int
    dim: int
    causal: bool = True


class Part(NamedTuple):
    """What cases of a part are drawn from; see the module's text."""

    share: int
    dtype: tuple[str, ...]
    tokens: tuple[int, int]
    seq: tuple[int, int]
    causal: float
    longer: float
    own: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Draw:
    """A [draw] table, read and checked."""

    cases: int
    models: tuple[Model, ...]
    parts: tuple[Part, ...]

    def drawn(self, seed: int, cases: int | None = None) -> Iterator[tuple[str, Problem, Mapping[str, tuple[str, ...]]]]:
        """The test, the problem and the kernels and peers of each case of a seed, in order: self.cases unless `cases` says how many.

        A test's name has the seed, the case's number, the model and the problem.
        """
        orders: dict[int, list[Model]] = {}
        cycle = [which for which, part in enumerate(self.parts) for _ in range(part.share)]
        for number in range(self.cases if cases is None else cases):
            round_, within = divmod(number, len(cycle))
            which = cycle[within]
            part = self.parts[which]
            turn, place = divmod(round_ * part.share + within - cycle.index(which), len(self.models))
            if place == 0:
                orders[which] = self._order(Random(f"{seed}, {which}, round {turn}").random)
            model = orders[which][place]
            problem = _problem(model, part, Random(f"{seed}, {which}, {number}").random)
            dtype = "_float32" if problem.dtype == "float32" else ""  # the other types are in the folder's name
            words = f"seed{seed}-{number:03}-{model.name}-{problem.folder}{dtype}" + "-causal" * problem.causal
            yield words, problem, part.own

    def _order(self, uniform: Callable[[], float]) -> list[Model]:
        """The models in a random order."""
        ranks = [uniform() for _ in self.models]
        return [self.models[place] for place in sorted(range(len(ranks)), key=ranks.__getitem__)]


def _problem(model: Model, part: Part, uniform: Callable[[], float]) -> Problem:
    """A problem of a model. uniform gives numbers evenly in [0, 1)."""
    dtype = part.dtype[int(uniform() * len(part.dtype))]
    causal, longer = uniform() < part.causal and model.causal, uniform() < part.longer
    tokens = _logarithmic(*part.tokens, uniform)
    low, high = part.seq[0], max(part.seq[0], min(part.seq[1], 2 * tokens))
    lengths = sorted(_length(low, high, uniform) for _ in range(1 + longer))
    seq, seq_kv = lengths[0], lengths[-1]
    return Problem.of(max(1, tokens // seq_kv), model.heads, seq, model.dim, model.heads_kv, seq_kv, dtype, causal)


def _length(low: int, high: int, uniform: Callable[[], float]) -> int:
    """A length from low to high: half of them powers of two, if there is one."""
    powers = [power for power in (1 << bit for bit in range(high.bit_length())) if power >= low]
    even, at = uniform() < 0.5, uniform()
    return powers[int(at * len(powers))] if even and powers else _logarithmic(low, high, uniform)


def _logarithmic(low: int, high: int, uniform: Callable[[], float]) -> int:
    """A whole number from low to high: each doubling as likely as any other, and within one each number."""
    doublings = max(1, (-(-high // low) - 1).bit_length())  # low << doublings >= high
    which = int(uniform() * doublings)
    first = low << which
    return first + int(uniform() * (first if which < doublings - 1 else high + 1 - first))


# -- reading ----------------------------------------------------------------------------------------------------------


def parse(table: Any, wrong: Wrong, names: Callable[[Mapping[str, Any], str], tuple[str, ...]]) -> Draw:
    """The Draw of a [draw] table. wrong makes the fault of a reason; names reads the kernels or the peers of a table."""
    if not isinstance(table, dict) or set(table) != set(KEYS):
        raise wrong(f"a draw has {', '.join(KEYS)}; is {table!r:.200}")
    cases, models, parts = (table[key] for key in KEYS)
    if type(cases) is not int or not 1 <= cases <= MOST:
        raise wrong(f"cases is {cases!r:.60}; it is from 1 to {MOST}")
    for what, items in (("models", models), ("parts", parts)):
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise wrong(f"the {what} of a draw are a list of tables; are {items!r:.60}")
    found = Draw(cases, tuple(_model(each, wrong) for each in models), tuple(_part(each, wrong, names) for each in parts))
    if len({model.name for model in found.models}) < len(models):
        raise wrong("two models of a draw have one name")
    return found


def _model(table: Mapping[str, Any], wrong: Wrong) -> Model:
    if not {"name", "heads", "dim"} <= set(table) <= set(MODEL_KEYS):
        raise wrong(f"a model has {', '.join(MODEL_KEYS)}, the first two and dim at least; is {table!r:.200}")
    name = table["name"]
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise wrong(f"the name of a model is {name!r:.80}; it is printable text of at most {LONGEST_NAME}")
    heads, dim, causal = table["heads"], table["dim"], table.get("causal", True)
    try:
        Problem.of(1, heads, 1, dim, table.get("heads_kv", heads), causal=causal)
    except Fault as fault:
        raise wrong(f"model {name}: {fault.what}; {fault.why}") from None
    return Model(name, heads, table.get("heads_kv", heads), dim, causal)


def _part(table: Mapping[str, Any], wrong: Wrong, names: Callable[[Mapping[str, Any], str], tuple[str, ...]]) -> Part:
    if not set(PART_KEYS) <= set(table) <= {*PART_KEYS, *OWN}:
        raise wrong(f"a part of a draw has {', '.join(PART_KEYS)}, and may have {' and '.join(OWN)}; is {table!r:.200}")
    share, dtype = table["share"], table["dtype"]
    if type(share) is not int or not 1 <= share <= LARGEST_SHARE:
        raise wrong(f"share is {share!r:.60}; it is from 1 to {LARGEST_SHARE}")
    if not isinstance(dtype, list) or not dtype or not all(isinstance(each, str) for each in dtype):
        raise wrong(f"dtype is {dtype!r:.60}; it is a list of types")
    types = tuple(str(SPELLINGS.get(each, each)) for each in dtype)
    if unknown := set(types) - set(DTYPE_BYTES):
        raise wrong(f"unknown dtype {min(unknown)!r:.60}; known: {', '.join(DTYPE_BYTES)}")
    tokens, seq = (_range(table, key, wrong) for key in ("tokens", "seq"))
    shares = [table[key] for key in ("causal", "longer")]
    if any(isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each <= 1 for each in shares):
        raise wrong(f"causal and longer are {shares!r:.60}; each is a share from 0 to 1")
    own = {key: names(table, key) for key in OWN if key in table}
    return Part(share, types, tokens, seq, float(shares[0]), float(shares[1]), own)


def _range(table: Mapping[str, Any], key: str, wrong: Wrong) -> tuple[int, int]:
    value: Sequence[Any] = table[key] if isinstance(table[key], list) else ()
    if len(value) != 2 or any(type(each) is not int for each in value) or not 1 <= value[0] <= value[1] <= LARGEST:
        raise wrong(f"{key} is {table[key]!r:.60}; it is the least and the most, as [128, 4096]")
    return value[0], value[1]
