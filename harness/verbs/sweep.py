"""A sweep: the question an experiment asks, a TOML file (experiments/<name>/sweep.toml, or one of your own).

    title = "Time over the sequence length"
    mode = "forward"                  # unless --mode says otherwise
    kernels = ["naive", "08-14"]      # optional: every kernel with the passes and the dtype; a range: its kernels that take the shape;
                                      # a path ("./mine_forward.cu") is from the file's folder
    peers = ["torch-cudnn", "fa3"]    # optional: every peer of the kind of device
    deterministic = true              # optional: as --deterministic; peers too, where they have such a form
    operator = true                   # optional, on a GPU: our PyTorch operator too, called as the peers are
    jobs = 8                          # optional, on a GPU: processes that prepare shapes at the same time; they measure in turns
    ceilings = true                   # optional: measure this GPU's ceilings (GEMM, copy, exp) in the same run
    cold = false                      # optional, on a GPU: no times with the L2 cache flushed
    burst = "S4096"                   # optional, on a GPU: times after a rest, 1.2 s a kernel and shape; also true
    energy = ["S4096", "S16384"]      # optional, on a GPU: energy, power and clock, 1.2 s a kernel and shape; also true
    shapes = [{ batch = 4, heads = 8, seq = [128, 256], dim = 64 }]   # a list stands for one shape each; `test` names it
    [cpu]                             # smaller shapes for the CPU engine
    shapes = [{ batch = 1, heads = 2, seq = [64, 128], dim = 64 }]

A sweep of trainings has no shapes, but a model: [training] with the keys of TRAINING_KEYS, and a smaller [cpu.training]
(experiments/training/sweep.toml). A sweep of problems that a seed draws has [draw], which draw.py documents (experiments/mixed/sweep.toml).

A shape may have masks and scores, by the names of options: mask, score, window (its left side), softcap, alibi, prefix, and documents, a text
of borders ("0 700 2048"). left_out = { name = "why" } names what a sweep leaves out: a run says so.

A shape may give `tokens` in place of `batch`: the batch is then tokens / seq, as in FlashAttention's benchmarks. `kernels` and
`peers` of a shape are for that shape in place of the sweep's, and for a shape of [cpu] with its name that has none. `cold`, `burst` and
`energy` are true, false, or patterns of the tests that they are for, as --only has them. A list of one value leaves no trace in a test's
name, but for causal = [true]: that shape has the name it has in [false, true], and may have kernels of its own.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..fault import DataFault, Fault, UsageFault, clipped, meant
from ..files import JSON_LIMIT, TEXT, Kind, read_text
from ..formula import DOCUMENT, stated
from ..kernel import KERNELS, is_path, parts
from ..kernel.header import Table
from ..problem import PASSES, SPELLINGS, Problem, told
from . import draw

P = ParamSpec("P")
R = TypeVar("R")

ROOT = KERNELS.parent
SWEEPS = ROOT / "experiments"
#: What to do with a file that is no sweep.
HINT = f"begin with a copy of {SWEEPS / 'seqlen' / 'sweep.toml'}; {__file__} documents the keys"
MEASURES = ("cold", "burst", "energy")  # what may be measured besides warm times, in this order
KEYS = (
    "title",
    "mode",
    "kernels",
    "peers",
    "operator",
    "ceilings",
    "jobs",
    "deterministic",
    *MEASURES,
    "shapes",
    "training",
    "draw",
    "cpu",
    "left_out",
)
TRAINING_KEYS = ("layers", "heads", "dim", "seq", "batch", "steps", "dtype")
_FLAG: Kind = (lambda v: isinstance(v, bool), "true or false")
_SOME: Kind = (
    lambda v: isinstance(v, bool | str) or (isinstance(v, list) and all(isinstance(each, str) for each in v)),
    "true, false, or patterns of tests",
)
MOST_JOBS = 64
_ASKED = ("shapes", "training", "draw")  # what a sweep is of: one of these
_TABLE: Kind = (lambda v: isinstance(v, dict), "a table")
_KINDS: dict[str, Kind] = {
    "title": TEXT,
    "mode": (lambda v: v in (*PASSES, "both"), "forward, backward or both"),
    "operator": _FLAG,
    "ceilings": _FLAG,
    "jobs": (lambda v: type(v) is int and 1 <= v <= MOST_JOBS, f"from 1 to {MOST_JOBS}"),
    "deterministic": _FLAG,
    **dict.fromkeys(MEASURES, _SOME),
    "training": _TABLE,
    "left_out": (lambda v: isinstance(v, dict) and all(isinstance(why, str) for why in v.values()), 'a table of name = "why"'),
    "cpu": (lambda v: isinstance(v, dict) and set(v) in [{kind} for kind in _ASKED], "a table with shapes, training or draw"),
}
#: Of a sweep with [draw], unless --seed says otherwise.
SEED = 42
#: The most shapes that the lists of one shape may stand for: more is a mistake, and would not end in a week.
MOST_SHAPES = 10_000
LONGEST_TEST = 200  # characters of a shape's `test`, which is a cell of results.csv
#: Keys of a shape that are its masks and scores, with the type of each.
FORMS = {"mask": str, "score": str, "window": int, "softcap": float, "alibi": bool, "prefix": int, "documents": str}
SHAPE_KEYS = {
    "test",
    "batch",
    "tokens",
    "heads",
    "seq",
    "dim",
    "dim_v",
    "heads_kv",
    "seq_kv",
    "dtype",
    "dtype_kv",
    "causal",
    "scale",
    "page_size",
    *FORMS,
}
OWN = ("kernels", "peers")  # keys of a shape that are no part of its problem
_TEXTS = ("mask", "score", "documents")  # in which a comma is part of the value
SHORT = {"batch": "B", "heads": "H", "seq": "S", "dim": "D", "dim_v": "Dv", "dtype": "", "dtype_kv": "KV"}  # in test names


@dataclass(frozen=True)
class Options:
    """What to run and where to write it; the fields are the flags of `fa-cli experiment`.

    peers None: all of the kind of device. only, skip: patterns of test names; a text stands for a list of one. samples, min_time: at
    least so many samples and seconds of device time of each row; 0: until the median is steady (on a CPU five samples). no_figures:
    summary.md only. seed, cases: of a sweep with [draw], which problems, and how many; None: SEED, and what the sweep says. jobs: processes
    that prepare shapes at the same time; None: what the sweep says, on a CPU 1. axes: "seq=512,1024", what every shape has in place of its own.
    """

    name: str = "forward"
    mode: str | None = None
    computes: Sequence[str] = ()
    peers: Sequence[str] | None = None
    device: str = "auto"
    output_dir: Path = Path("experiment_results")
    record: bool = False
    full: bool = False
    resume: bool = False
    dry_run: bool = False
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    deterministic: bool = False
    samples: int = 0
    min_time: float = 0.0
    no_figures: bool = False
    seed: int | None = None
    cases: int | None = None
    jobs: int | None = None
    axes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("computes", "peers", "only", "skip", "axes"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, (given,))
        object.__setattr__(self, "output_dir", Path(self.output_dir))


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked. shapes and cpu_shapes are (test name, problem); seed is the one that drew them, None: none did."""

    name: str
    title: str
    mode: str
    kernels: tuple[str, ...]
    peers: tuple[str, ...] | None
    ceilings: bool
    shapes: tuple[tuple[str, Problem], ...]
    cpu_shapes: tuple[tuple[str, Problem], ...]
    deterministic: bool = False
    own: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)  # test name -> "kernels", "peers" -> names
    training: Mapping[str, Any] | None = None  # the sizes of a model, TRAINING_KEYS, in place of shapes
    cpu_training: Mapping[str, Any] | None = None
    taken: Mapping[str, bool | str | list[str]] = field(default_factory=dict)  # MEASURES that the file names -> for which tests
    seed: int | None = None
    operator: bool = False
    jobs: int = 1
    left_out: Mapping[str, str] = field(default_factory=dict)

    def measures(self, test: str) -> tuple[str, ...]:
        """What a GPU measures of a test's contenders besides warm times, of MEASURES: cold unless the sweep says otherwise."""
        some = {name: self.taken.get(name, name == "cold") for name in MEASURES}
        return tuple(
            name for name, which in some.items() if which is True or (which and matches(test, [which] if isinstance(which, str) else which))
        )

    def names(self, what: str, test: str) -> tuple[str, ...] | None:
        """The "kernels" or "peers" of a test; None where neither its shape nor the sweep says any."""
        return self.own.get(test, {}).get(what, self.kernels or None if what == "kernels" else self.peers)


def matches(test: str, patterns: Iterable[str]) -> bool:
    """Whether a test's name has a pattern in it, or is matched by one with * and ?."""
    return any(fnmatch.fnmatch(test, pattern) or pattern in test for pattern in patterns)


def sweeps() -> dict[str, str]:
    """The sweeps there are, name -> title."""
    titles = ((path.parent.name, tomllib.loads(read_text(path))["title"]) for path in sorted(SWEEPS.glob("*/sweep.toml")))
    return dict(titles)  # no problem is made: a list starts without numpy


def load(spec: str, seed: int | None = None, cases: int | None = None, axes: Sequence[str] = ()) -> Sweep:
    """The sweep a name or a .toml path means; with [draw], the problems of a seed, and as many as `cases` says (see Options).

    Raises UsageFault for an unknown name, for a seed or cases that draw nothing or are none, for axes that it has not, DataFault for a file
    that is no sweep.
    """
    own = spec.endswith(".toml")
    path = Path(spec) if own else SWEEPS / spec / "sweep.toml"
    if not own and (not path.is_file() or Path(spec).name != spec):
        known = sorted(p.parent.name for p in SWEEPS.glob("*/sweep.toml"))
        hint = f"{meant(spec, known)}fa-cli list, or give a file ending in .toml"
        raise UsageFault(f"unknown experiment {clipped(spec, 80)!r}", f"known: {', '.join(known)}", hint)
    try:
        data = tomllib.loads(read_text(path, "fa-cli list shows the sweeps there are", JSON_LIMIT))
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise DataFault(f"{path} is not TOML", str(error), HINT) from None
    for option, given, least, most in (("--seed", seed, 0, 2**32 - 1), ("--cases", cases, 1, draw.MOST)):
        if given is not None and "draw" not in data:
            raise UsageFault(
                f"{spec} takes no {option}", "it states its shapes", f"leave out {option}, or fa-cli experiment mixed {option} …"
            )
        if given is not None and not least <= given <= most:
            raise UsageFault(f"{option} {given}", f"it is from {least} to {most}", f"use {option} {least}")
    if axes and "shapes" not in data:
        raise UsageFault(f"{spec} takes no --axis", "it states no shapes", "leave out --axis")
    return _parse(path, data, SEED if seed is None else seed, cases, _axes(axes))


def _axes(texts: Iterable[str]) -> dict[str, list[object]]:
    """Keys of a shape with their values, of texts as "seq=512,1024". Raises UsageFault."""
    found: dict[str, list[object]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name not in SHAPE_KEYS - {"test"} or not equals or name in found:
            why = f"{name!r:.60} is no key of a shape" if name not in SHAPE_KEYS else "it is NAME=VALUE[,VALUE...], each name once"
            raise UsageFault(f"--axis {text!r:.80}", why, f"{meant(name, SHAPE_KEYS)}as --axis seq=512,1024")
        found[name] = [_value(each) for each in (values.split(",") if name not in _TEXTS else [values])]
    return found


def _value(text: str) -> object:
    """As TOML has it: true, false, a number or a text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _parse(path: Path, data: Table, seed: int, cases: int | None, axes: dict[str, list[object]]) -> Sweep:
    def wrong(why: str) -> DataFault:
        return DataFault(f"{path} is not a sweep", why, HINT)

    for key, value in data.items():
        if key not in KEYS:
            raise wrong(f"unknown key {key!r:.60}; known: {', '.join(KEYS)}")
        if key in _KINDS and not _KINDS[key][0](value):
            raise wrong(f"{key} is {value!r:.60}; it is {_KINDS[key][1]}")
    own: dict[str, Mapping[str, tuple[str, ...]]] = {}

    def placed(name: str) -> str:
        return os.path.join(path.parent, name) if is_path(name) else name

    def names(where: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = [where[key]] if isinstance(where[key], str) else where[key]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise wrong(f"{key} is a name, a range or a list of them; is {value!r:.60}")
        return tuple("+".join(map(placed, parts(name))) for name in value) if key == "kernels" else tuple(value)

    def shapes(items: object) -> tuple[tuple[str, Problem], ...]:
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise wrong("shapes is a list of tables, as { batch = 4, heads = 8, seq = [128, 256], dim = 64 }")
        found = []
        for item in items:
            some = _expand({key: value for key, value in item.items() if key not in OWN}, wrong)
            if axes:
                left = set(OWN) | ({"batch", "tokens"} if axes.keys() & {"batch", "tokens"} else set())
                some = _expand({key: value for key, value in item.items() if key not in left} | axes, off_axis, axes)
            mine = {key: names(item, key) for key in OWN if key in item}
            for test, _ in some:  # of one name may be a stated shape and one of [cpu], or the first may have none
                first = own.setdefault(test, mine)
                if any(first.get(key) != value for key, value in mine.items()):
                    raise wrong(f"two shapes are named {test!r:.60} and have other {' or '.join(mine)}")
            found += [each for each in some if each not in found]
        return tuple(found)

    def off_axis(why: str) -> UsageFault:
        given = " ".join(f"--axis {name}={','.join(map(str, values))}" for name, values in axes.items())
        return UsageFault(f"{path} has no such shapes: {given}", why, "use other values")

    def drawn(table: object) -> tuple[tuple[str, Problem], ...]:
        found = []
        for test, problem, mine in draw.parse(table, wrong, names).drawn(seed, cases):
            own[test] = mine
            found.append((test, problem))
        return tuple(found)

    if len(kinds := [kind for kind in _ASKED if kind in data]) > 1:
        raise wrong(f"it has {' and '.join(kinds)}")
    models = _models(data, wrong)
    read, key = (drawn, "draw") if "draw" in data else (shapes, "shapes")
    stated = read(data.get(key)) if not models[0] else ()
    cpu = read(data["cpu"].get(key)) if "cpu" in data and not models[0] else stated
    name = path.resolve().parent.name if path.name == "sweep.toml" else path.stem.strip(".") or "sweep"
    peers = names(data, "peers") if "peers" in data else None
    kernels = names(data, "kernels") if "kernels" in data else ()
    return Sweep(
        name,
        data.get("title", name),
        data.get("mode", "forward"),
        kernels,
        peers,
        bool(data.get("ceilings")),
        stated,
        cpu,
        bool(data.get("deterministic")),
        own,
        *models,
        {name: data[name] for name in MEASURES if name in data},
        seed if "draw" in data else None,
        bool(data.get("operator")),
        data.get("jobs", 1),
        data.get("left_out", {}),
    )


def _models(data: Table, wrong: Callable[[str], DataFault]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The model of a sweep of trainings, and the CPU's; None where it has shapes."""
    if "training" not in data:
        return None, None
    found = []
    for model in (data["training"], data.get("cpu", {}).get("training", data["training"])):
        if isinstance(model, dict) and isinstance(model.get("dtype"), str):
            model = model | {"dtype": SPELLINGS.get(model["dtype"], model["dtype"])}
        fits = isinstance(model, dict) and set(model) == set(TRAINING_KEYS)
        if not fits or any(not isinstance(model[key], int) or model[key] < 1 for key in TRAINING_KEYS[:-1]):
            raise wrong(f"a training has {', '.join(TRAINING_KEYS)}, whole numbers and a name; is {model!r}")
        if model["dtype"] not in ("float32", "float16", "bfloat16"):
            raise wrong(f"the dtype of a training is {model['dtype']!r}; known: float32, float16, bfloat16")
        found.append(model)
    return found[0], found[1]


def _formed(problem: Problem, forms: Table) -> Problem:
    """A problem with masks and scores by the keys of a shape. Raises UsageFault and DataFault for what is wrong with them."""
    for name, value in forms.items():
        if type(value) is not FORMS[name] and not (FORMS[name] is float and type(value) is int):
            raise UsageFault(f"{name} is {value!r:.60}", f"it is of the type {FORMS[name].__name__}", "as the option of fa-cli run")
    borders = forms.pop("documents", None)
    if "window" in forms:
        forms["window"] = (forms["window"], 0)
    with told():
        texts = stated(problem.heads_q, documents=borders is not None, **forms)
    if borders is not None:
        from ..dataset import named  # it needs numpy, without which fa-cli list starts

        return problem.with_(**texts, tensors={DOCUMENT: named.packed(borders, problem, "documents")})
    return problem.with_(**texts)


def _expand(item: Table, wrong: Callable[[str], Fault], named: Container[str] = ()) -> list[tuple[str, Problem]]:
    """One shape table as (test, problem) pairs, one for each combination of its lists. named: keys that are in every test's name."""
    if unknown := set(item) - SHAPE_KEYS:
        raise wrong(f"unknown key {sorted(unknown)[0]!r:.60} in a shape; known: {', '.join(sorted(SHAPE_KEYS))}")
    label = item.get("test", "")
    if not isinstance(label, str):
        raise wrong(f"test is {label!r:.60}; it is a text")
    if len(label) > LONGEST_TEST or not label.isprintable():
        raise wrong(f"test is {label!r:.60} ({len(label)} characters); it is printable text of at most {LONGEST_TEST}")
    if {"batch", "tokens"} <= set(item):
        raise wrong(f"shape {item!r:.200}: it gives tokens in place of batch, or batch; not both")
    lists = {key: value if isinstance(value, list) else [value] for key, value in item.items() if key != "test"}
    if (count := math.prod(len(values) for values in lists.values())) > MOST_SHAPES:
        raise wrong(f"the lists of a shape combine to {count} shapes; at most {MOST_SHAPES}")
    found = []
    for values in itertools.product(*lists.values()):
        try:
            sizes = dict(zip(lists, values, strict=True))
            if "tokens" in sizes:
                tokens = Problem.of(batch=sizes.pop("tokens"), seq=sizes["seq"])  # checks both
                sizes["batch"] = max(1, tokens.batch // tokens.seq_q)
            forms = {name: sizes.pop(name) for name in FORMS if name in sizes}
            problem = _formed(Problem.of(**sizes), forms)
        except KeyError as error:
            raise wrong(f"shape {item!r:.200}: tokens needs {error}") from None
        except Fault as fault:
            raise wrong(f"shape {item!r:.200}: {fault.what}; {fault.why}") from None
        varied = "_".join(
            f"{SHORT.get(key, key)}{value}"
            for key, value in zip(lists, values, strict=True)
            if (len(lists[key]) > 1 or key in named and key not in _TEXTS) and key != "causal"
        )
        test = "-".join(filter(None, (label, varied))) or problem.folder
        found.append((test + "_causal" * (problem.causal and isinstance(item.get("causal"), list)), problem))
    return found
