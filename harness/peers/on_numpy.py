"""Attention in a few lines of float32 numpy, head by head: a peer that needs no library."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule
from ..dataset.storage import round_to, widen
from ..problem import WRITES, Problem
from .base import ANY_DIMS, Library


@dataclass(frozen=True, kw_only=True)
class Numpy(Library):
    """float32 arithmetic for every storage type; one rounding of each output."""

    def prepare(self, problem: Problem, inputs: Mapping[str, Array], pass_: str) -> NumpyPrepared:
        """Widen the inputs and, for a backward pass, run the forward pass. Raises UsageFault for what it refuses."""
        self.refuse(problem, pass_)
        return NumpyPrepared(self.name, problem, inputs, pass_)


class NumpyPrepared:
    """numpy, prepared: see base.Prepared."""

    def __init__(self, name: str, problem: Problem, inputs: Mapping[str, Array], pass_: str) -> None:
        self.name, self._problem, self._pass = name, problem, pass_
        names = ("Q", "K", "V") if pass_ == "forward" else ("Q", "K", "V", "dO")
        self._x = {n: widen(np, inputs[n], problem.tensor_dtype(n), "float32") for n in names}
        saved = () if pass_ == "forward" else forward(problem, self._x)
        self._saved = dict(zip(WRITES["forward"], saved, strict=False))
        self.ran = f"numpy {np.__version__}, float32"
        tracemalloc.start()
        self._run()
        self.peak_bytes = tracemalloc.get_traced_memory()[1] + sum(a.nbytes for a in (*self._x.values(), *self._saved.values()))
        tracemalloc.stop()

    def _run(self) -> tuple[Array, ...]:
        return forward(self._problem, self._x) if self._pass == "forward" else backward(self._problem, self._x | self._saved)

    def outputs(self, xp: ArrayModule = np) -> dict[str, Array]:
        """Host storage arrays of a new run."""
        values = zip(WRITES[self._pass], self._run(), strict=True)
        return {name: round_to(np, value, self._problem.tensor_dtype(name)) for name, value in values}

    def enqueue(self) -> Callable[[], float]:
        """Run it. The function returned gives the seconds that it took."""
        seconds = self.call()
        return lambda: seconds

    def call(self) -> float:
        """Seconds of one run, which is not asynchronous."""
        start = time.perf_counter()
        self._run()
        return time.perf_counter() - start

    def graph(self) -> Callable[[], Callable[[], float]] | None:
        """None: there are no CUDA graphs on a CPU."""
        return None


def forward(problem: Problem, x: Mapping[str, Array]) -> tuple[Array, Array]:
    """O (B, H, Sq, D) and logsumexp (B, H, Sq) of float32 Q, K, V. A fully masked row gives 0 and -inf."""
    out = np.empty(problem.shape("O"), np.float32)
    lse = np.empty(problem.shape("logsumexp"), np.float32)
    for b, h in np.ndindex(problem.batch, problem.heads_q):
        g = h * problem.heads_kv // problem.heads_q
        s = _scores(problem, x["Q"][b, h], x["K"][b, g])
        row_max = s.max(axis=1, keepdims=True)
        row_max[row_max == -np.inf] = 0
        p = np.exp(s - row_max)
        row_sum = p.sum(axis=1, keepdims=True)
        out[b, h] = p @ x["V"][b, g] / np.where(row_sum == 0, np.float32(1), row_sum)
        with np.errstate(divide="ignore"):
            lse[b, h] = (row_max + np.log(row_sum))[:, 0]
    return out, lse


def backward(problem: Problem, x: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """dQ, dK, dV of float32 Q, K, V, dO and the forward's O and logsumexp; P and delta are recomputed (equations: check/reference.py)."""
    dq, dk, dv = (np.zeros(problem.shape(name), np.float32) for name in WRITES["backward"])
    for b, h in np.ndindex(problem.batch, problem.heads_q):
        g = h * problem.heads_kv // problem.heads_q
        q, k, v, dout = x["Q"][b, h], x["K"][b, g], x["V"][b, g], x["dO"][b, h]
        lse = x["logsumexp"][b, h][:, None]
        p = np.exp(_scores(problem, q, k) - np.where(lse == -np.inf, np.float32(0), lse))
        delta = (dout * x["O"][b, h]).sum(axis=1, keepdims=True)
        ds = p * (dout @ v.T - delta) * np.float32(problem.scale)
        dq[b, h] = ds @ k
        dk[b, g] += ds.T @ q
        dv[b, g] += p.T @ dout
    return dq, dk, dv


def _scores(problem: Problem, q: Array, k: Array) -> Array:
    """scale q k^T (Sq, Skv), -inf where masked."""
    s: Array = q @ k.T * np.float32(problem.scale)
    if problem.causal:
        s[~np.tri(problem.seq_q, problem.seq_kv, problem.causal_shift, dtype=bool)] = -np.inf
    return s


PEERS = (
    Numpy(
        name="numpy",
        device="cpu",
        dtypes=("float32", "float16", "bfloat16"),
        modules=("numpy",),
        install="pip install numpy",
        widest=None,
        dims_v=ANY_DIMS,
    ),
)
