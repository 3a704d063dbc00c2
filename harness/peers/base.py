"""The protocol of peers, how their libraries are found, and what they refuse before anything runs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from ..array import Array, ArrayModule
from ..fault import UsageFault
from ..formula import as_softcap, as_window
from ..problem import DTYPE_BYTES, LARGEST, PASSES, Problem

#: Any head dim of Q and K with any of V.
ANY_DIMS = ((range(1, LARGEST + 1), range(1, LARGEST + 1)),)


class Prepared(Protocol):
    """A peer with its tensors in place, after one run; harness/measure/sampling.py can time it (its Timed).

    ran: the implementation that ran. peak_bytes: the peak device memory of one run, inputs and outputs included; None: not known.
    """

    @property
    def name(self) -> str: ...

    @property
    def ran(self) -> str: ...

    @property
    def peak_bytes(self) -> int | None: ...

    def outputs(self, xp: ArrayModule = np) -> dict[str, Array]:
        """Storage arrays of a new run: O and, where the library returns it, logsumexp; or dQ, dK, dV. A later run does not change them.

        xp: the module whose arrays they are, for a peer on a GPU also CuPy, where bfloat16 is its bits.
        """
        ...

    def enqueue(self) -> Callable[[], float]: ...

    def call(self) -> float: ...

    def graph(self) -> Callable[[], Callable[[], float]] | None: ...


class Peer(Protocol):
    """A library's attention under one name. device: "cpu" or "cuda", where it runs."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def passes(self) -> tuple[str, ...]: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    @property
    def compiles(self) -> bool:
        """Whether a first run with another type, head dim, mask or group of heads compiles, which takes seconds."""
        ...

    @property
    def called(self) -> bool:
        """Whether its calls are those of a library, with what that does on the host: else its call times are nobody's."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether its backward pass runs in the form that gives the same bits on every run."""
        ...

    def made_deterministic(self) -> Peer:
        """The same peer in that form."""
        ...

    def absent(self, device: str) -> tuple[str, str] | None:
        """The reason why it cannot run on a device ("cpu" or "cuda") here, and a hint; None where it can. Imports nothing heavy."""
        ...

    def refuse(self, problem: Problem, pass_: str) -> None:
        """Raise UsageFault where it does not support a pass of a problem."""
        ...

    def prepare(self, problem: Problem, inputs: Mapping[str, Array], pass_: str) -> Prepared:
        """Put copies of Q, K, V (backward: and dO) in place and run once. pass_: "forward" or "backward".

        inputs: storage arrays of numpy or, for a peer on a GPU, of CuPy (bfloat16 by its bits).

        Raises UsageFault for what it refuses, or where something else ran; EnvironmentFault for a library that does not
        import; KernelFault for a run that failed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Library:
    """What a library supports, and the messages of its absence and its refusals.

    modules: they must be importable ("a.b" is found without importing a); install: the pip command for them. widest: the largest head
    dim; row_bytes: what a row of head_dim elements must be a multiple of. dims_v: which head dims of Q and K it takes with which others of V. causal: which causal masks it supports: "any"; "seen", where
    every query has a visible key (causal_shift >= 0); "square", where seq_q == seq_kv and causal_shift is 0. bottom_right: of these
    only the default causal_shift. arch: the least and the greatest compute capability, major * 10 + minor. deterministic: the form of its
    backward pass that is asked for; repeats: whether it has one that gives the same bits on every run. compiles: as
    Peer.compiles. called: as Peer.called. forms: the masks and scores that it takes: "window", "softcap", or "mask" and "score" for all of
    them. paged: whether it makes pages of K and V, which it is given in one piece.
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    modules: tuple[str, ...]
    install: str
    passes: tuple[str, ...] = PASSES
    widest: int | None = 256
    row_bytes: int = 1
    dims_v: tuple[tuple[range, range], ...] = ()
    gqa: bool = True
    causal: str = "any"
    bottom_right: bool = False
    arch: tuple[int, int] = (0, 999)
    deterministic: bool = False
    repeats: bool = True
    compiles: bool = False
    called: bool = True
    forms: tuple[str, ...] = ()
    paged: bool = False

    def made_deterministic(self) -> Self:
        """The same peer, its backward pass in the form that gives the same bits on every run."""
        return replace(self, deterministic=True)

    def absent(self, device: str) -> tuple[str, str] | None:
        """The reason why this peer cannot run on a device here, and a hint; None where it can. Imports no library."""
        if device != self.device:
            where = "a GPU" if self.device == "cuda" else "the CPU"
            return (
                f"{self.name} runs on {where} only; CPU and GPU times never share a table",
                f"leave {self.name} out, or use --device {self.device}",
            )
        missing = [module for module in self.modules if not installed(module)]
        if missing:
            return f"{', '.join(missing)} is not installed", self.install
        if self.device == "cuda" and "torch" in self.modules and not torch_has_cuda():
            return (
                "this PyTorch was built for the CPU",
                "pip install --force-reinstall torch (from pypi.org, or pytorch.org for another CUDA)",
            )
        return None

    def no(self, problem: Problem, pass_: str, why: str, hint: str) -> UsageFault:
        """The fault of a problem that it does not take."""
        return UsageFault(f"{self.name} does not take {problem.describe()} {pass_}", why, hint)

    def refuse(self, problem: Problem, pass_: str) -> None:
        """Raise UsageFault where this peer does not support a pass of a problem: it is refused, never computed wrongly."""
        no = functools.partial(self.no, problem, pass_)

        if pass_ not in self.passes:
            raise no(f"it has only the {' and '.join(self.passes)} pass here", "leave it out: --peers")
        if pass_ == "backward" and self.deterministic and not self.repeats:
            raise no("it has no deterministic backward pass", "leave it out: --peers")
        if problem.dtype not in self.dtypes:
            raise no(f"it takes {', '.join(self.dtypes)}, not {problem.dtype}", f"use --dtype {self.dtypes[0]}")
        if self.widest is not None and problem.widest > self.widest:
            raise no(f"its widest head dim is {self.widest}", f"use --dim {self.widest} or less")
        step = max(1, self.row_bytes // DTYPE_BYTES[problem.dtype])
        for option, dim in (("--dim", problem.head_dim), ("--dim-v", problem.head_dim_v)):
            if dim % step:
                raise no(f"its head dim must be a multiple of {step} in {problem.dtype}", f"use {option} {-(-dim // step) * step}")
        if problem.has_own_dim_v and not any(problem.head_dim in of_q and problem.head_dim_v in of_v for of_q, of_v in self.dims_v):
            some = ", ".join(f"{q[0]} to {q[-1]} with {v[0]} to {v[-1]}" for q, v in self.dims_v)
            raise no(
                f"of V it takes {f'other head dims only as {some}' if some else 'the head dim of Q and K'}",
                "leave --dim-v out, or the peer",
            )
        if problem.has_own_dtype_kv:
            raise no(f"it is given K and V in {problem.dtype}, as Q", "leave --kv-dtype out, or the peer")
        if problem.page_size and not self.paged:
            raise no("it is given K and V in one piece", "leave --page-size out, or the peer")
        if problem.heads_q != problem.heads_kv and not self.gqa:
            raise no("it has no grouped-query attention", "use as many --kv-heads as --heads")
        for name, formula in problem.formulas.items():
            window, softcap = name == "mask" and as_window(formula.text), name == "score" and as_softcap(formula.text)
            known = "window" if window else "softcap" if softcap else ""
            if not {name, known} & {*self.forms}:
                raise no(f"it is given no {name} but {' and '.join(self.forms) or 'the causal mask'}", f"leave --{name} out, or the peer")
        shifted = problem.causal_shift != problem.default_shift
        if shifted and self.bottom_right:
            raise no(f"its causal mask is aligned bottom-right: causal_shift {problem.default_shift}", "leave causal_shift out")
        if shifted and self.causal == "square":
            raise no("its causal mask is for equal sequence lengths and causal_shift 0", "leave causal_shift out")
        if problem.causal and problem.causal_shift and self.causal == "square":
            raise no("its causal mask is aligned top-left where seq-q != seq-kv, ours bottom-right", "use equal sequence lengths")
        if problem.causal and problem.causal_shift < 0 and self.causal == "seen":
            hint = "use a causal_shift of at least 0" if shifted else "use a --seq-kv of at least --seq"
            raise no("it promises nothing for a query that sees no key", hint)


def installed(module: str) -> bool:
    """Whether a module is installed. Neither it nor its package is imported: FlashAttention's package would load PyTorch."""
    package, _, inner = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not inner:
        return spec is not None
    folders = [Path(folder) / Path(*inner.split(".")) for folder in spec.submodule_search_locations or ()]
    return any(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, from its version.py: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    lines = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8").splitlines()
    return any(line.startswith("cuda") and not line.rstrip().endswith("None") for line in lines)
