"""A float32 flash attention in numpy, key tile by key tile with one accumulator an element: what a right CUDA-core kernel computes.

Each MUTANTS name plants one fault in it. The gate must pass the model and fail every mutant.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.check.reference import round_to, widen
from harness.problem import Problem

Array = np.ndarray[Any, Any]
F32 = np.float32

#: The faults of forward and of backward passes, by name.
FORWARD_MUTANTS = (
    "last key dropped",
    "key counted twice",
    "unmasked padding key",
    "missing O rescale",
    "scale 1/D",
    "base-2 logsumexp",
    "causal off by one",
    "NaN",
    "unwritten rows",
)
BACKWARD_MUTANTS = (
    "last key dropped",
    "unmasked padding key",
    "scale 1/D",
    "dK and dV swapped",
    "causal off by one",
    "NaN",
    "unwritten rows",
    "missing delta",
    "dQ not scaled",
)


def run(
    problem: Problem, tensors: dict[str, Array], mutant: str = "", tile: int = 64, ordered: bool = True, base2: bool = True
) -> dict[str, Array]:
    """Storage outputs O, logsumexp (and dQ, dK, dV where tensors holds dO). ordered adds one term at a time, else tile by tile."""
    p = problem
    scale = F32(1 / p.head_dim if mutant == "scale 1/D" else p.scale)
    unit = F32(np.log2(np.e)) if base2 else F32(1)  # scores are kept in units of log 2 where exp2 is used
    exp, log = (np.exp2, np.log2) if base2 else (np.exp, np.log)
    q = widen(np, tensors["Q"], p.dtype, "float32").reshape(-1, p.seq_q, p.head_dim)
    k, v = (np.repeat(widen(np, tensors[n], p.dtype, "float32"), p.heads_q // p.heads_kv, axis=1) for n in ("K", "V"))
    k, v = (t.reshape(-1, p.seq_kv, p.head_dim) for t in (k, v))
    if mutant == "last key dropped":
        k, v = k[:, :-1], v[:, :-1]
    elif mutant == "unmasked padding key":
        k, v = (np.concatenate([t, np.zeros_like(t[:, :1])], axis=1) for t in (k, v))
    elif mutant == "key counted twice":
        k, v = (np.concatenate([t, t[:, -1:]], axis=1) for t in (k, v))
    shift = p.causal_shift + (1 if mutant == "causal off by one" else 0)
    keys, rows = np.arange(k.shape[1]), np.arange(p.seq_q)
    hidden = (keys[None, :] > rows[:, None] + shift) & (keys[None, :] < p.seq_kv) if p.causal else np.zeros((1, len(keys)), bool)
    scores = np.where(hidden, F32(-np.inf), _dots(q, k, ordered) * F32(scale * unit))

    m, total = np.full(q.shape[:2], -np.inf, F32), np.zeros(q.shape[:2], F32)
    out = np.zeros_like(q)
    for first in range(0, len(keys), tile):
        s = scores[:, :, first : first + tile]
        top = np.maximum(m, s.max(axis=-1))
        safe = np.where(top == -np.inf, F32(0), top)
        prob, keep = exp(s - safe[..., None]), exp(m - safe)
        total = total * keep + prob.sum(axis=-1, dtype=F32)
        out = _sum_into(out if mutant == "missing O rescale" else out * keep[..., None], prob, v[:, first : first + tile], ordered)
        m = top
    some = np.where(total == 0, F32(1), total)
    out = out / some[..., None]
    lse = np.where(total == 0, F32(-np.inf), np.where(total == 0, F32(0), m) + log(some))
    if mutant != "base-2 logsumexp":
        lse = lse / unit if base2 else lse
    found = {"O": _spoil(round_to(np, out.reshape(p.shape("O")), p.dtype), mutant), "logsumexp": lse.reshape(p.shape("logsumexp"))}
    if "dO" not in tensors:
        return found

    dout = widen(np, tensors["dO"], p.dtype, "float32").reshape(q.shape)
    stored = widen(np, round_to(np, out, p.dtype), p.dtype, "float32")  # a backward pass reads O as it was stored
    delta = _row_sum(dout * stored, ordered)
    if mutant == "missing delta":
        delta = np.zeros_like(delta)
    with np.errstate(invalid="ignore", over="ignore"):
        prob = np.where(np.isneginf(scores), F32(0), exp(scores - (lse * unit)[..., None]))
    ds = prob * (_dots(dout, v, ordered) - delta[..., None])
    dq = _sum_into(np.zeros_like(q), ds, k, ordered) * (F32(1) if mutant == "dQ not scaled" else scale)
    dk, dv = (_sum_into(np.zeros_like(k), w.swapaxes(1, 2), x, ordered) for w, x in ((ds, q), (prob, dout)))
    dk = dk * scale
    full = np.zeros((dk.shape[0], p.seq_kv, p.head_dim), F32)
    grads = {"dQ": dq}
    for name, array in (("dK", dk), ("dV", dv)):
        whole = full.copy()
        whole[:, : array.shape[1]] = array[:, : p.seq_kv]
        grouped = whole.reshape(p.batch, p.heads_kv, -1, p.seq_kv, p.head_dim)
        total_heads = grouped[:, :, 0].copy()
        for head in range(1, grouped.shape[2]):
            total_heads += grouped[:, :, head]
        grads[name] = total_heads
    if mutant == "dK and dV swapped":
        grads["dK"], grads["dV"] = grads["dV"], grads["dK"]
    return found | {n: _spoil(round_to(np, a.reshape(p.shape(n)), p.dtype), mutant) for n, a in grads.items()}


def _spoil(array: Array, mutant: str) -> Array:
    if mutant == "NaN":
        array[-1, -1, -1, -1] = np.nan
    elif mutant == "unwritten rows":
        array[0, 0, -1] = 0
    return array


def _dots(a: Array, b: Array, ordered: bool) -> Array:
    """a b^T: (n, rows, D) and (n, columns, D) -> (n, rows, columns), the terms of D one after another."""
    if not ordered:
        return np.matmul(a, b.swapaxes(1, 2))
    found = np.zeros((a.shape[0], a.shape[1], b.shape[1]), F32)
    for d in range(a.shape[2]):
        found += a[:, :, d, None] * b[:, None, :, d]
    return found


def _sum_into(found: Array, weights: Array, values: Array, ordered: bool) -> Array:
    """found + weights values: (n, rows, keys) and (n, keys, D), one key after another into the same accumulators."""
    if not ordered:
        return found + np.matmul(weights, values)
    for key in range(weights.shape[2]):
        found = found + weights[:, :, key, None] * values[:, key, None, :]
    return found


def _row_sum(array: Array, ordered: bool) -> Array:
    if not ordered:
        return array.sum(axis=-1, dtype=F32)
    found = np.zeros(array.shape[:-1], F32)
    for d in range(array.shape[-1]):
        found = found + array[..., d]
    return found
