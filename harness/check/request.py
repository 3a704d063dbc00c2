"""What is asked, as one value: made once, by cli.py or by whoever calls from Python, and handed on whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..problem import MODES, Problem

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """Kernels and peers for the passes of a mode.

    computes: names, numbers, ranges, aliases, paths, peers or auto; a single text is a list of one. problem: None means the verb's default.
    deterministic: use the form of a kernel that gives the same bits on every run. tiles: values that override the headers'. device: auto,
    cuda, cuda:N or cpu. seed: of the inputs.
    """

    computes: str | Path | Sequence[str | Path] = ()
    mode: str = "forward"
    problem: Problem | None = None
    _: KW_ONLY
    deterministic: bool = False
    tiles: Mapping[str, Any] | None = None  # NAME=VALUE, or lists of values for tune
    device: str = "auto"
    seed: int = 42

    @property
    def specs(self) -> list[str]:
        """computes as texts."""
        return [str(spec) for spec in ([self.computes] if isinstance(self.computes, (str, Path)) else self.computes)]

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of the mode."""
        return MODES[self.mode]


def with_options(make: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """A decorator for a function of one such value: it is called as the value is made, with the same names, types and defaults."""

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(make(*args, **kwargs))

        made = inspect.signature(function).return_annotation
        vars(call)["__signature__"] = inspect.signature(make).replace(return_annotation=made)  # for help(), and completion in notebooks
        return call

    return decorate
