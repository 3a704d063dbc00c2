"""Other people's attention, to measure against: one file a family, each optional, named by what really ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..problem import Problem


class Prepared(Protocol):
    """A peer with its tensors in place, ready to be timed. ran is what really ran."""

    ran: str
    peak_bytes: int

    def outputs(self) -> dict[str, Any]: ...

    def time(self) -> float: ...

    def call(self) -> float: ...

    def graph(self) -> Callable[[], float] | None: ...


class Peer(Protocol):
    """A library's attention under one name of design section 5."""

    name: str
    passes: tuple[str, ...]

    def absent(self, device: str) -> tuple[str, str] | None: ...

    def refuse(self, problem: Problem, pass_: str) -> None: ...

    def prepare(self, problem: Problem, inputs: Mapping[str, Any], pass_: str) -> Prepared: ...


def names() -> tuple[str, ...]:
    """Every peer's name."""
    return ()


def find(name: str) -> Peer | None:
    """The peer of a name; None for what is no peer's."""
    return None


def usual(device: str) -> tuple[str, ...]:
    """The peers a sweep measures where nothing else is said: those of the device's own kind."""
    on_cpu = ("torch-cpu", "numpy")
    return tuple(name for name in names() if (name in on_cpu) == (device == "cpu"))
