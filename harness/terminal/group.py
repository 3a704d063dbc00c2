"""The group of verbs: a verb's exit code is the process's, and what it raises becomes a message and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from ..fault import DiskFault, Dropped
from . import complete, interrupt, streams
from .errors import complain, explain

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
        obj: dict[str, Any] = {"verbosity": 0, "arguments": list(arguments)}
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
            said = re.sub(r"(is not a valid (integer|float)) range", r"\1", error.format_message())  # the name of click's type
            code = complain(said, hint=f"{path} --help", code=error.exit_code)
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
