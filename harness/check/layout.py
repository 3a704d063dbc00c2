"""Whether a wrong O is the right one of another layout: the commonest mistake of a kernel that comes from elsewhere.

Tensors are (batch, heads, rows, head_dim). flash-attn's are (batch, rows, heads, head_dim), and a kernel written for those computes
something else here, with no wrong line in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..array import Array, to_host
from ..dataset.storage import widen
from .budget import Verdict
from .oracle import Oracle
from .reference import reference

#: Scores up to which it is looked at: it takes another reference, which is a second here.
MOST = 1 << 24
#: An O of the other layout is within this part of its RMS; any other O differs from it as two draws do.
NEAR = 0.05
WORDS = "it is right for tensors of (batch, rows, heads, dim); here they are (batch, heads, rows, dim)"


def named(oracle: Oracle, outputs: Mapping[str, Array], verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts, with WORDS in the reason of an O that is wrong here and right in that layout."""
    found, p = dict(verdicts), oracle.problem
    wrong = found.get("O")
    scores = p.batch * p.heads_q * p.seq_q * p.seq_kv
    if (
        wrong is None
        or wrong.passed
        or wrong.shared
        or p.heads_q == 1
        or p.seq_q == 1
        or scores > MOST
        or oracle.reference.rows is not None
    ):
        return found
    got = _other(widen(np, to_host(outputs["O"]), p.tensor_dtype("O")))
    given = {name: _other(oracle.inputs[name]) for name in ("Q", "K", "V")}
    written = _near(got, to_host(oracle.reference["O"]))  # only O is taken so
    if written or _near(got, reference(np, p, given)["O"]):  # or all tensors are
        found["O"] = replace(wrong, reason=f"{wrong.reason}; {WORDS}")
    return found


def _other(array: Array) -> Array:
    """The elements of (batch, heads, rows, head_dim) in memory, taken for (batch, rows, heads, head_dim)."""
    batch, heads, rows, dim = array.shape
    return np.ascontiguousarray(array.reshape(batch, rows, heads, dim).swapaxes(1, 2))


def _near(got: Array, expected: Array) -> bool:
    """Whether the error is small beside the values: where both are finite, which most are."""
    finite = np.isfinite(got) & np.isfinite(expected)
    error, size = np.where(finite, got - expected, 0.0), np.where(finite, expected, 0.0)
    return bool(finite.mean() > 0.5 and (error * error).sum() < NEAR**2 * (size * size).sum())
