"""What the verbs of cli.py share: options, the parsing of their values, and the mapping of faults to exit codes."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from ..fault import DiskFault, Dropped, Fault, UsageFault, printable
from ..problem import MODES, Problem
from . import complete, interrupt, streams
from .progress import clear

#: The value of an option, of the type that its click type or callback gives it.
Value = Any
F = TypeVar("F", bound=Callable[..., object])

#: Letters of a line of a message at most: a compiler's command line fits.
LINE = 4000

EXIT_CODES = """\
\b
Exit codes: 0 ok; 1 a check failed; 2 usage (unknown kernel, unsupported
shape); 3 bad data; 4 environment (no GPU, package or compiler); 5 a kernel
did not compile or launch; 6 disk; 130 Ctrl-C."""

VERDICTS = """\
\b
How a verdict is reached. The ratio is time of B / time of A, with a 95%
interval: from samples.jsonl by order statistics of each median (7 samples or
more; of 3 to 6 the whole range, its width tripled), without samples from p20,
p80 and the sample count, twice as wide as for normal noise.
  SAME     the interval lies within 1 +- 3%
  FASTER, SLOWER  else, where it lies wholly beyond 1 +- 1%
  UNSURE   everything else, and fewer than 3 samples"""

CAUSAL = """\
\b
The causal mask is bottom-right aligned, as in FlashAttention: the last query
sees every key. torch's is_causal is top-left; they differ where --seq-kv
differs from --seq."""

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "auto_envvar_prefix": "FA_CLI",
    "max_content_width": 110,
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --batch_size is --batch-size
}


class FaCli(click.Group):
    """The group of verbs. A verb returns its exit code; what it raises becomes a message on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        arguments = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        obj: dict[str, Value] = {"verbosity": 0, "arguments": list(arguments)}
        streams.prepare()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", Dropped)
                warnings.showwarning = _note_dropped(warnings.showwarning)
                code = super().main(*args, **kwargs | {"standalone_mode": False, "obj": obj, "prog_name": "fa-cli"})
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = error.exit_code
        except click.ClickException as error:
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fa-cli"
            code = complain(error.format_message(), hint=f"{path} --help", code=error.exit_code)
        except click.Abort as error:  # click's word for Ctrl-C
            code = _interrupted(error, obj["arguments"])
        except Exception as error:
            code = explain(error, obj["verbosity"])
        try:
            code = streams.flushed() or code
        except OSError as error:  # a full disk, which the verb has said where it met it first
            code = code if code == DiskFault.exit_code else explain(error, obj["verbosity"])
        sys.exit(code or 0)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        complete.attach(cmd)
        cmd.help = cmd.help or complete.docstring(cmd.callback)
        super().add_command(cmd, name)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with streams.open_pipe():
            return super().make_context(*args, **kwargs)

    def get_help(self, ctx: click.Context) -> str:
        self.help = self.help or complete.docstring(self.callback)
        return super().get_help(ctx)

    def invoke(self, ctx: click.Context) -> Any:
        with streams.open_pipe():
            return super().invoke(ctx)


def _note_dropped(otherwise: Callable[..., None]) -> Callable[..., None]:
    """What shows a warning: what was dropped from a torn file as a note, any other as before."""

    def show(message: Warning | str, category: type[Warning], *more: Any) -> None:
        if issubclass(category, Dropped):
            click.echo(f"note: {message}", err=True)
        else:
            otherwise(message, category, *more)

    return show


def _interrupted(error: click.Abort, arguments: Sequence[str]) -> int:
    """Say that Ctrl-C came, and how to go on where the verb can; a run that is watched leaves that to the watch."""
    if interrupt.WATCHED in os.environ:
        return interrupt.CODE
    notes = getattr(error.__cause__, "__notes__", ())
    if "resume" not in notes:
        return complain("interrupted", "; ".join(notes), code=interrupt.CODE)
    again = [*arguments, *(() if "--resume" in arguments else ("--resume",))]
    return complain("interrupted", "the rows that are done are kept", shlex.join(["fa-cli", *again]), interrupt.CODE)


def complain(what: str, why: str = "", hint: str = "", code: int = 1) -> int:
    """Print the lines of an error on stderr and return its exit code."""
    clear()
    with suppress(BrokenPipeError):
        for label, text in (("error: ", what), ("", why), ("hint: ", hint)):
            if text:
                click.echo(label + shown(text), err=True)
    return code


def shown(text: str) -> str:
    """Text as a terminal may have it: what a file's name or content could do to it is escaped, and a line is cut at LINE letters."""
    lines = (line if len(line) <= LINE else f"{line[: LINE - 40]} … ({len(line) - LINE + 40} more)" for line in printable(text).split("\n"))
    return "\n".join(lines)


def explain(error: Exception, verbosity: int) -> int:
    """Print what a verb raised as a message, with a traceback only from -vv on. Returns the exit code."""
    if verbosity >= 2:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, Fault):
        return complain(error.what, error.why, error.hint, error.exit_code)
    if isinstance(error, FileNotFoundError) and not error.filename:  # os.getcwd's
        why = "it was removed since the shell went there"
        return complain("the working folder is gone", why, "cd to a folder that exists", DiskFault.exit_code)
    if isinstance(error, OSError) and error.errno:  # a disk fault that no module names; without a file name it is stdout's
        what = f"{error.filename or 'output'}: {error.strerror}"
        return complain(what, "", "see the folder's permissions and free space: df -h .", DiskFault.exit_code)
    if isinstance(error, MemoryError):
        return complain("out of memory", str(error), "use a smaller --batch, --heads or --seq", UsageFault.exit_code)
    return complain(f"internal error: {type(error).__name__}: {error}", "a fault of fa-cli, not of your input", "the same command with -vv")


class _Range(click.FloatRange):
    """A range that NaN is not in; click asks what is outside, and NaN never is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator, in the order of --help."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def examples(*lines: str) -> str:
    """The end of a verb's help: commands that work as they stand."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


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


def note(text: str) -> None:
    """A remark on a choice, on stderr."""
    clear()
    click.echo(f"note: {shown(text)}", err=True)


def problem_of(given: dict[str, Value]) -> Problem:
    """The problem that the shape options state, and the mask options where the verb has them; the sizes are taken out of `given`."""
    sizes = {name: given.pop(name) for name in ("batch", "heads", "seq", "dim", "seq_kv", "dtype")}
    return Problem.of(**sizes, heads_kv=given.pop("kv_heads"), causal=given.get("causal", False), scale=given.get("scale"))


def only(computes: list[str]) -> str:
    """The one compute of a verb that takes no more. Raises UsageFault for several."""
    if len(computes) > 1:
        raise UsageFault(f"{len(computes)} kernels", "this verb runs one of them", f"use --compute {computes[0]}")
    return computes[0]


def without_mask(given: dict[str, Value]) -> dict[str, Value]:
    """What is left of the options once the problem is made of them."""
    return {name: value for name, value in given.items() if name not in ("causal", "scale")}


def refuse_shape_beside_data(context: click.Context) -> None:
    """Raise UsageFault where --data and a shape option are both on the command line: one of them would be ignored."""
    for name in ("batch", "heads", "seq", "dim", "kv_heads", "seq_kv", "dtype", "seed"):
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


def _shape(batch: int, heads: int, seq: int, dim: int) -> Callable[[F], F]:
    return options(
        click.option("--batch", "--batch-size", "batch", type=int, default=batch, show_default=True),
        click.option("--heads", "--num-heads", "heads", type=int, default=heads, show_default=True, help="Query heads."),
        click.option("--seq", "--seq-len", "seq", type=int, default=seq, show_default=True, help="Queries a head."),
        click.option("--dim", "--head-dim", "dim", type=int, default=dim, show_default=True, help="Head dimension."),
        click.option("--kv-heads", type=int, help="Key/value heads (grouped queries).  [default: --heads]"),
        click.option("--seq-kv", type=int, help="Keys a head.  [default: --seq]"),
        click.option(
            "--dtype", default="float32", show_default=True, help="float32, float16, bfloat16 or float64; or as bf16, fp16, half …"
        ),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=42, show_default=True, help="Of the random values."),
    )


shape = _shape(2, 8, 512, 64)
ring_shape = _shape(1, 1, 1024, 64)
ring = options(
    click.option(
        "--gpus", type=click.IntRange(1), metavar="N", help="Start N ranks here, a process each.  [default: 2, or the launcher's]"
    ),
    click.option("--partition", type=click.Choice(["contiguous", "zigzag"]), help="[default: zigzag where causal]"),
    click.option("--timeout", type=_Range(0, min_open=True), default=60.0, show_default=True, help="Seconds a rank waits for another."),
    click.option("--overlap/--no-overlap", default=True, show_default=True, help="Send keys beside the launches, or after them."),
    click.option("--simulate", type=click.IntRange(1), metavar="N", help="N ranks take turns on one device; times are predicted."),
    click.option("--bandwidth", type=_Range(0, min_open=True), default=300.0, show_default=True, help="GB/s each way, for --simulate."),
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
    help="auto takes a GPU if there is one; cpu is the host backend.",
)


def _compute(text: str) -> Callable[[F], F]:
    return click.option("--compute", "--kernel", "compute", multiple=True, callback=_names, metavar="KERNEL[,KERNEL...]", help=text)


_KERNELS = "Kernels by name, number, range of numbers (00-14: those that can) or path to a .cu file"
compute = _compute(f"{_KERNELS}, or auto: the highest step of the ladder that takes the problem on this device.")
compute_kernels = _compute(f"{_KERNELS}.")  # of verbs without one problem on one device, which auto needs
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
    help="backward alone runs the forward pass before it, not timed.",
)
sweep_mode = click.option("--mode", callback=parse_mode, metavar="forward|backward|both", help="[default: the sweep's]")
checks = options(
    click.option("--check", type=click.Choice(["race", "asan"]), help="Host backend: look for data races, or for accesses out of bounds."),
    click.option("--schedule-seed", type=click.IntRange(min=0), metavar="N", help="Host backend: run the threads in another order."),
)
checks_and_sms = options(
    checks,
    click.option("--sms", type=click.IntRange(1), metavar="N", help="As on N multiprocessors: fewer blocks, more works each."),
)
deterministic = click.option("--deterministic", is_flag=True, help="The form of kernels that gives the same bits on every run.")
kernels = click.argument("kernels", nargs=-1, callback=lambda *given: tuple(_names(*given)), metavar="[KERNEL]...")
mask = options(
    click.option("--causal", is_flag=True, help="Hide the keys after the query (bottom-right aligned)."),
    click.option("--scale", type=float, help="Of the scores.  [default: 1/sqrt(dim)]"),
)
sampled = options(
    click.option(
        "--samples", type=click.IntRange(0, 100_000), default=0, metavar="N", help="At least N samples a row.  [default: until steady]"
    ),
    click.option("--min-time", type=_Range(0, 3600), default=0.0, metavar="SECONDS", help="At least so much kernel time a row."),
)
tile_lists = click.option(
    "--tile",
    multiple=True,
    callback=_tile_lists,
    metavar="NAME=VALUE[,VALUE...]",
    help="Values of a tile of the header; several options: every combination.  [default: each tile's own, half and double]",
)
tile = click.option("--tile", multiple=True, callback=_tiles, metavar="NAME=VALUE", help="Override a tile value of the header.")
