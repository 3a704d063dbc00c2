"""The options that verbs of cli.py share, and the parsing of their values."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ..fault import UsageFault
from ..problem import MODES, Problem

#: The value of an option, of the type that its click type or callback gives it.
Value = Any
F = TypeVar("F", bound=Callable[..., object])


class _Range(click.FloatRange):
    """A range that NaN is not in; click asks what is outside, and NaN never is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


class _Keys(click.ParamType[int | list[int]]):
    """Keys of each head: an integer, or one of each sequence, 700,33."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | list[int]:
        if not re.fullmatch(r"-?\d{1,19}(,\d{1,19})*", str(value), re.ASCII):
            self.fail(f"{value!r} is not a number of keys, or one of each sequence: 700,33.", param, ctx)
        found = [int(keys) for keys in str(value).split(",")]
        return found if len(found) > 1 else found[0]


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator, in the order of --help."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


# -- what the values mean -------------------------------------------------------------------------------------------------


def _verbosity(context: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        context.obj["verbosity"] = value if parameter.name == "verbose" else -1


def _names(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    names = [name for value in values for name in value.split(",") if name]
    if values and not names:
        raise click.BadParameter("it names no kernel.")
    return names


def parse_mode(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The mode; forward_backward is another name for both."""
    known = {"forward": "forward", "backward": "backward", "both": "both", "forward_backward": "both", None: None}
    if value not in known:
        raise click.BadParameter(f"{value!r} is not one of forward, backward, both.")
    return known[value]


def _tiles(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    pairs = {name: value for name, _, value in (text.partition("=") for text in values)}
    if wrong := next((f"{n}={v}" for n, v in pairs.items() if not re.fullmatch("0|[1-9][0-9]{0,17}", v)), None):
        raise click.BadParameter(f"{wrong!r} is not NAME=VALUE with an integer of at least 0, as BLOCK_Q=64.")
    return {name: int(value) for name, value in pairs.items()}


def _tile_lists(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, list[int]]:
    lists = {name: some.split(",") for name, _, some in (text.partition("=") for text in values)}
    return {name: list(dict.fromkeys(_tiles(_context, _parameter, (f"{name}={v}",))[name] for v in some)) for name, some in lists.items()}


def parse_tolerance(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    """An absolute error: finite and not negative. NaN would limit nothing, a negative value would fail everything."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"{value} is not an absolute error, a number of at least 0.")
    return value


def print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """--version: what is installed, or that nothing is."""
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"fa-cli {version('fa-harness')}")
        except PackageNotFoundError:
            click.echo("fa-cli, a checkout that is not installed")
        context.exit()


def names(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated list; () for "none", None where nothing was said."""
    return None if text is None else () if text == "none" else tuple(name.strip() for name in text.split(",") if name.strip())


def problem_of(given: dict[str, Value]) -> Problem:
    """The problem that the shape options state, and the mask options where the verb has them; they are taken out of `given`."""
    sizes = {name: given.pop(name) for name in ("batch", "heads", "seq", "dim", "seq_kv", "dtype", "dim_v")}
    more = {name: given.pop(name, None) for name in ("scale", "page_size")}
    own = {"heads_kv": given.pop("kv_heads"), "dtype_kv": given.pop("kv_dtype", None)}
    return Problem.of(**sizes, **own, causal=given.pop("causal", False), **more)


def _window(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """L and R of a window."""
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})?", value, re.ASCII):
        raise click.BadParameter(f"{value!r} is not L or L,R with integers of at least 0, as 1024 or 128,128.")
    left, _, right = value.partition(",")
    return int(left), int(right or 0)


def _tensors(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Files by the name of their tensor."""
    found = dict[str, Path]()
    for value in values:
        name, equals, path = value.partition("=")
        if not (name.isidentifier() and equals and path):
            raise click.BadParameter(f"{value!r} is not NAME=FILE.npy.")
        found[name] = Path(path)
    return found


def only(computes: list[str]) -> str:
    """The one compute of a verb that takes no more. Raises UsageFault for several."""
    if len(computes) > 1:
        raise UsageFault(f"{len(computes)} kernels", "this verb runs one of them", f"use --compute {computes[0]}")
    return computes[0]


def refuse_shape_beside_data(context: click.Context) -> None:
    """Raise UsageFault where --data and a shape option are both on the command line: one of them would be ignored."""
    for name in ("batch", "heads", "seq", "dim", "dim_v", "kv_heads", "seq_kv", "dtype", "kv_dtype", "seed", "page_size"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageFault(
                f"--data and {option} together", "the folder states its own shape, dtype and seed", f"leave out --data or {option}"
            )


def refuse_from_beside_plain(context: click.Context, plain: bool) -> None:
    """Raise UsageFault where --plain and --from are both on the command line: a plain kernel is no copy."""
    if plain and context.get_parameter_source("source") is click.core.ParameterSource.COMMANDLINE:
        raise UsageFault("--plain and --from together", "a plain kernel is a copy of none", "leave out --plain or --from")


def refuse_two_sweeps(seqlen: bool, name: str | None) -> None:
    """Raise UsageFault where --seqlen and another sweep's name are both on the command line: one of them would be ignored."""
    if seqlen and name not in (None, "seqlen"):
        instead = f"fa-cli experiment --seqlen --mode {name}" if name in MODES else "fa-cli experiment --seqlen"
        raise UsageFault(f"--seqlen and {name} together", "each names a sweep", f"{instead}, or fa-cli experiment {name}")


# -- options that several verbs have -----------------------------------------------------------------------------------

folder = click.Path(path_type=Path)
printing = options(
    click.option("--json", is_flag=True, help="One JSON document on stdout."),
    click.option("-q", "--quiet", is_flag=True, expose_value=False, is_eager=True, callback=_verbosity, help="Only the verdict."),
    click.option("-v", "--verbose", count=True, expose_value=False, is_eager=True, callback=_verbosity, help="More; -vv adds tracebacks."),
)


def _shape(batch: int, heads: int, seq: int, dim: int, dtypes: str = "float32, float16, bfloat16 or float64") -> Callable[[F], F]:
    return options(
        click.option("--batch", "--batch-size", "batch", type=int, default=batch, show_default=True),
        click.option("--heads", "--num-heads", "heads", type=int, default=heads, show_default=True, help="Query heads."),
        click.option("--seq", "--seq-len", "seq", type=int, default=seq, show_default=True, help="Queries per head."),
        click.option("--dim", "--head-dim", "dim", type=int, default=dim, show_default=True, help="Head dimension."),
        click.option("--dim-v", "--head-dim-v", "dim_v", type=int, help="Head dimension of V and O.  [default: --dim]"),
        click.option("--kv-heads", type=int, help="Key/value heads (grouped queries).  [default: --heads]"),
        click.option("--seq-kv", type=_Keys(), help="Keys per head; with pages also of each sequence, 700,33.  [default: --seq]"),
        click.option("--dtype", default="float32", show_default=True, help=f"{dtypes}; or as bf16, fp16, half …"),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=42, show_default=True, help="Seed of the random values."),
    )


shape = options(
    _shape(2, 8, 512, 64),
    click.option("--kv-dtype", metavar="TEXT", help="Storage type of K and V: float8_e4m3 beside 16 bits.  [default: --dtype]"),
)
ring_shape = _shape(1, 1, 1024, 64, "float32, float16 or bfloat16")
ring = options(
    click.option(
        "--gpus", type=click.IntRange(1), metavar="N", help="Start N ranks here, one process each.  [default: 2, or the launcher's]"
    ),
    click.option("--partition", type=click.Choice(["contiguous", "zigzag"]), help="[default: zigzag where causal]"),
    click.option("--timeout", type=_Range(0, min_open=True), default=60.0, show_default=True, help="Seconds a rank waits for another."),
    click.option("--overlap/--no-overlap", default=True, show_default=True, help="Send keys during the launches, or after them."),
    click.option("--simulate", type=click.IntRange(1), metavar="N", help="N ranks take turns on one device; times are predicted."),
    click.option("--bandwidth", type=_Range(0, min_open=True), help="GB/s each way of the links of --simulate.  [default: 300]"),
)
data_root = click.option(
    "--output-dir", type=folder, default=Path("data"), show_default=True, help="Where the data folder is made or found."
)
device = click.option(
    "--device",
    default="auto",
    show_default=True,
    envvar="FA_CLI_DEVICE",
    metavar="auto|cuda|cuda:N|cpu",
    help="auto takes a GPU if there is one; cpu is the CPU engine.",
)


def _compute(text: str) -> Callable[[F], F]:
    return click.option("--compute", "--kernel", "compute", multiple=True, callback=_names, metavar="KERNEL[,KERNEL...]", help=text)


def _or_arguments(option: Callable[[F], F]) -> Callable[[F], F]:
    """--compute, and KERNEL... which says the same: a command is given one list of both, `compute`."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def joined(*given: Any, kernels: tuple[str, ...], compute: list[str], **named: Any) -> Any:
            return command(*given, compute=[*kernels, *compute], **named)

        argument = click.argument("kernels", nargs=-1, callback=lambda *given: tuple(_names(*given)), metavar="[KERNEL]...")
        return argument(option(cast("F", joined)))

    return decorate


_KERNELS = "Kernels by name, number, range of numbers (00-14: those that take the problem) or path of a .cu file"
compute = _compute(f"{_KERNELS}, or auto: the highest step of the ladder that takes the problem on this device.")
computes = _or_arguments(compute)
kernels = _or_arguments(_compute(f"{_KERNELS}."))  # of verbs without one problem on one device, which auto needs
mode = click.option(
    "--mode",
    default="forward",
    show_default=True,
    callback=parse_mode,
    metavar="forward|backward|both",
    help="backward alone reads O and logsumexp from the folder.",
)
ring_mode = click.option(
    "--mode",
    default="forward",
    show_default=True,
    callback=parse_mode,
    metavar="forward|backward|both",
    help="backward runs the forward pass first, untimed.",
)
sweep_mode = click.option("--mode", callback=parse_mode, metavar="forward|backward|both", help="[default: the sweep's]")
checks = options(
    click.option("--check", type=click.Choice(["race", "asan"]), help="On the CPU engine: find data races, or accesses out of bounds."),
    click.option(
        "--schedule-seed", type=click.IntRange(min=0), metavar="N", help="On the CPU engine: run threads and blocks in another order."
    ),
)
checks_and_sms = options(
    checks,
    click.option("--sms", type=click.IntRange(1), metavar="N", help="Launch as on N multiprocessors: fewer blocks, with more tiles each."),
)
deterministic = click.option("--deterministic", is_flag=True, help="Use the form of a kernel that gives the same bits on every run.")
mask = options(
    click.option("--causal", is_flag=True, help="Hide the keys after the query (bottom-right aligned)."),
    click.option("--scale", type=float, help="Factor of the scores.  [default: 1/sqrt(dim)]"),
)
formulas = options(
    click.option("--page-size", type=int, metavar="N", help="K and V in pages of N keys, with a block table: 16, 32, 64, 128 or 256."),
    click.option("--mask", metavar="TEXT", help="Which keys a query sees besides --causal: 'q - k < 1024'."),
    click.option("--score", metavar="TEXT", help="What takes the place of the score s: 's + exp2(-h - 1) * (k - q)'."),
    click.option("--window", metavar="L[,R]", callback=_window, help="A mask: the L keys before a query and the R after it.  [R: 0]"),
    click.option("--prefix", type=click.IntRange(min=0), metavar="N", help="A mask: the first N keys, and those up to the query."),
    click.option(
        "--documents", type=click.Path(path_type=Path), metavar="FILE", help="A mask: the query's document, of cu_seqlens in a text file."
    ),
    click.option("--softcap", type=float, metavar="C", help="A score: C * tanh(s / C)."),
    click.option("--alibi", is_flag=True, help="A score: ALiBi's bias, s - slope * abs(q - k)."),
    click.option("--sinks", metavar="FILE.npy", help="A logit of each query head that enters its rows' sums; also a text: '0.5 * h'."),
    click.option(
        "--tensor",
        "tensors",
        multiple=True,
        metavar="NAME=FILE.npy",
        callback=_tensors,
        help="Values of a tensor in --mask or --score, or block_table.",
    ),
)
drawn = options(
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        metavar="N",
        help="Seed of a sweep that draws its problems, such as mixed.  [default: 42]",
    ),
    click.option(
        "--cases", type=click.IntRange(1, 10_000), metavar="N", help="How many problems such a sweep draws.  [default: the sweep's]"
    ),
    click.option(
        "--jobs",
        type=click.IntRange(1, 64),
        metavar="N",
        help="Processes that check shapes at the same time; they measure in turns.  [default: the sweep's, on a CPU 1]",
    ),
)
samples = click.option(
    "--samples", type=click.IntRange(0, 100_000), default=0, metavar="N", help="At least N samples per row.  [default: until steady]"
)
sampled = options(
    samples,
    click.option("--min-time", type=_Range(0, 3600), default=0.0, metavar="SECONDS", help="At least this much kernel time per row."),
)
tile_lists = click.option(
    "--tile",
    multiple=True,
    callback=_tile_lists,
    metavar="NAME=VALUE[,VALUE...]",
    help="Values to try for a tile of the header; several options try every combination.  [default: each tile's own, half and double]",
)
tile = click.option("--tile", multiple=True, callback=_tiles, metavar="NAME=VALUE", help="Override a tile value of the header.")
