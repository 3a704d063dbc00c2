"""Attention and its gradients in float64, and the same computed as a kernel of each class may round: the error budget's oracle.

Every function takes `xp`, numpy or cupy, and arrays of it, and holds one tile of scores at a time (never S x S beyond a
tile). Heads are grouped by the key head they read: arrays are (batch * heads_kv, group, rows, head_dim) inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..array import Array, ArrayModule
from ..dataset.storage import round_to, tf32, through, widen
from ..problem import Problem

__all__ = ["Reference", "baselines", "reference", "round_to", "sample", "widen"]

#: Above this many scores a head only some rows are checked: the edges of 128-row tiles and SAMPLE seeded others.
DENSE_SCORES = 1 << 28
EDGE, SAMPLE = 128, 256

#: Scores held at once: small enough for a CPU's cache, large enough to fill a GPU.
_TILE_CPU, _TILE_GPU = 1 << 18, 1 << 25


@dataclass(frozen=True)
class Reference:
    """Float64 values by tensor name; rows says which rows (axis 2) of each tensor they are, None for all of them.

    share is the part of all rows that was computed: what a report must say was checked. noise is, for each tensor, the
    greatest effect on an element of rounding the scores, were every score wrong by |q| |k| scale times a random number of
    size 1 (row norms): what a peaked softmax does to the last bits of a long dot product, whatever their order.
    """

    values: Mapping[str, Array]
    rows: Mapping[str, Array] | None
    share: float
    noise: Mapping[str, float]

    def __getitem__(self, tensor: str) -> Array:
        return self.values[tensor]

    def select(self, tensor: str, array: Array) -> Array:
        """The rows of a whole tensor that the reference holds."""
        return array if self.rows is None else array[:, :, self.rows[tensor]]


# -- one attention, at any precision ----------------------------------------------------------------------------------


def _same(array: Array) -> Array:
    return array


def _square(array: Array) -> Array:
    """The squared length of each row, as a last axis of one."""
    lengths: Array = (array * array).sum(axis=-1, keepdims=True)
    return lengths


@dataclass(frozen=True)
class _Math:
    """How one computation rounds: the type it works in, what happens to operands of a product, to P and dS, to outputs."""

    xp: ArrayModule
    problem: Problem
    work: str = "float64"
    operand: Callable[[Array], Array] = _same
    narrow: Callable[[Array], Array] = _same
    reverse: bool = False  # visit the keys from the last to the first: another legal order of summation
    noise: dict[str, float] | None = None  # where to note Reference.noise; None: do not

    def load(self, tensors: Mapping[str, Array], name: str) -> Array:
        """A storage tensor in the working type, grouped: (batch * heads_kv, group, rows, ...)."""
        p = self.problem
        array = widen(self.xp, tensors[name], p.tensor_dtype(name), self.work)
        return array.reshape(p.batch * p.heads_kv, -1, *array.shape[2:])

    def product(self, a: Array, b: Array) -> Array:
        return self.xp.matmul(self.operand(a), self.operand(b))

    def key_order(self, keys: Array | None) -> Array:
        every = self.xp.arange(self.problem.seq_kv) if keys is None else keys
        return every[::-1] if self.reverse else every

    def note(self, name: str, squares: Array, factor: Array) -> None:
        """Keep the greatest sqrt(squares) * |scale| * factor as the noise of a tensor. squares may be a little below zero."""
        assert self.noise is not None
        size = self.xp.sqrt(self.xp.where(squares > 0, squares, 0.0)) * (factor * abs(self.problem.scale))
        self.noise[name] = max(self.noise.get(name, 0.0), float(self.xp.where(self.xp.isfinite(size), size, 0.0).max()))

    def tiles(self, rows: Array, keys: int) -> Iterator[tuple[slice, Array]]:
        """(group slice, row indices) such that a tile of scores stays within the limit."""
        p, limit = self.problem, _TILE_CPU if self.xp is np else _TILE_GPU
        group = p.heads_q // p.heads_kv
        step = max(1, min(len(rows), limit // (group * keys)))
        some = max(1, limit // (group * keys * step))
        for first in range(0, p.batch * p.heads_kv, some):
            for row in range(0, len(rows), step):
                yield slice(first, first + some), rows[row : row + step]

    def scores(self, q: Array, k: Array, rows: Array, keys: Array) -> Array:
        """scale * q k^T with -inf where masked. q: (n, group, rows, D), k: (n, keys, D) -> (n, group, rows, keys)."""
        n, group, count, dim = q.shape
        s = self.product(q.reshape(n, group * count, dim), k.swapaxes(1, 2))
        s *= self.problem.scale
        s = s.reshape(n, group, count, -1)
        if self.problem.causal:
            visible = keys[None, :] <= rows[:, None] + self.problem.causal_shift
            s = self.xp.where(visible, s, s.dtype.type(-np.inf))
        return s

    def forward(self, q: Array, k: Array, v: Array, rows: Array) -> tuple[Array, Array, Array]:
        """O (n, group, rows, D), and per row the greatest score (0 where fully masked) and the sum of exp(score - greatest)."""
        xp, keys = self.xp, self.key_order(None)
        n, group, _, dim = q.shape
        out = xp.empty((n, group, len(rows), dim), q.dtype)
        top, total = xp.empty(out.shape[:3], q.dtype), xp.empty(out.shape[:3], q.dtype)
        done = 0
        for heads, some in self.tiles(rows, len(keys)):
            at = slice(done, done + len(some))
            done = at.stop % len(rows)
            s = self.scores(q[heads][:, :, some], k[heads, 0][:, keys], some, keys)
            m = s.max(axis=-1)
            m = xp.where(m == -np.inf, m.dtype.type(0), m)
            s -= m[..., None]
            p = xp.exp(s, out=s)
            top[heads, :, at], total[heads, :, at] = m, p.sum(axis=-1)
            divisor = xp.where(total[heads, :, at] == 0, m.dtype.type(1), total[heads, :, at])[..., None]
            p, vs = self.narrow(p).reshape(p.shape[0], -1, len(keys)), v[heads, 0][:, keys]
            out[heads, :, at] = o = self.product(p, vs).reshape(p.shape[0], group, len(some), dim) / divisor
            if self.noise is not None:  # d O = sum_j P_j (V_j - O) d s_j and d logsumexp = sum_j P_j d s_j
                lengths, norm = _square(k[heads, 0][:, keys]), xp.sqrt(_square(q[heads][:, :, some]))
                p *= p
                o = o.reshape(p.shape[0], -1, dim)
                of_v, of_v2, whole = (xp.matmul(p, lengths * t) for t in (vs, vs * vs, xp.ones_like(lengths)))
                shape = (p.shape[0], group, len(some), -1)
                self.note("O", (of_v2 - 2 * o * of_v + o * o * whole).reshape(shape), norm / divisor)
                self.note("logsumexp", whole.reshape(shape), norm / divisor)
        return out, top, total

    def logsumexp(self, top: Array, total: Array) -> Array:
        xp = self.xp
        safe = xp.where(total == 0, total.dtype.type(1), total)
        return xp.where(total == 0, total.dtype.type(-np.inf), top + xp.log(safe))

    def gradients(
        self, x: Mapping[str, Array], top: Array, total: Array, delta: Array, rows: Array, keys: Array | None
    ) -> tuple[Array, Array, Array]:
        """dQ of these rows, dK and dV of these keys (None: all), P = exp(score - top) / total; rows index top, total, delta too."""
        xp, scale = self.xp, self.problem.scale
        q, dout = x["Q"], x["dO"]
        order = self.key_order(keys)
        k, v = x["K"][:, 0][:, order], x["V"][:, 0][:, order]
        n, group, _, dim = q.shape
        dq = xp.empty((n, group, len(rows), dim), q.dtype)
        dk, dv = xp.zeros(k.shape, q.dtype), xp.zeros(v.shape, q.dtype)
        dk_noise, dv_noise = xp.zeros_like(dk), xp.zeros_like(dv)
        total = xp.where(total == 0, total.dtype.type(1), total)
        done = 0
        for heads, some in self.tiles(rows, len(order)):
            at = slice(done, done + len(some))
            done = at.stop % len(rows)
            qs, ds = q[heads][:, :, some], dout[heads][:, :, some]
            flat_q, flat_d = (t.reshape(t.shape[0], -1, dim) for t in (qs, ds))
            p = self.scores(qs, k[heads], some, order)
            p -= top[heads][:, :, some, None]
            p = xp.exp(p, out=p)
            p /= total[heads][:, :, some, None]
            dp = self.product(flat_d, v[heads].swapaxes(1, 2)).reshape(p.shape)
            dp -= delta[heads][:, :, some, None]
            dp *= p
            flat = (p.shape[0], -1, len(order))
            p, dp = self.narrow(p).reshape(flat), self.narrow(dp).reshape(flat)
            dv[heads] += self.product(p.swapaxes(1, 2), flat_d)
            dk[heads] += self.product(dp.swapaxes(1, 2), flat_q)
            dq[heads, :, at] = self.product(dp, k[heads]).reshape(ds.shape)
            if self.noise is not None:  # d P = P d s, and dP - delta as it is
                p *= p
                dp *= dp
                of_q = _square(flat_q)
                dv_noise[heads] += xp.matmul(p.swapaxes(1, 2), of_q * flat_d * flat_d)
                dk_noise[heads] += xp.matmul(dp.swapaxes(1, 2), of_q * flat_q * flat_q)
                self.note("dQ", xp.matmul(dp, _square(k[heads]) * k[heads] * k[heads]), xp.sqrt(of_q) * abs(scale))
        if self.noise is not None:
            of_k = xp.sqrt(_square(k))
            self.note("dV", dv_noise, of_k)
            self.note("dK", dk_noise, of_k * abs(scale))
        dq *= scale
        dk *= scale
        if self.reverse:
            dk, dv = dk[:, ::-1], dv[:, ::-1]
        return dq, dk, dv

    def backward(self, x: Mapping[str, Array], out: Array, top: Array, total: Array) -> dict[str, Array]:
        """dQ, dK, dV (sampled as :func:`sample` says) from whole-row O, top and total."""
        delta = (x["dO"] * out).sum(axis=-1)
        picked, every = sample(self.problem), self.xp.arange(self.problem.seq_q)
        if picked is None:
            dq, dk, dv = self.gradients(x, top, total, delta, every, None)
        else:
            queries, keys = (self.xp.asarray(i) for i in picked)
            dq = self.gradients(x, top, total, delta, queries, None)[0]
            _, dk, dv = self.gradients(x, top, total, delta, every, keys)
        return {name: self.shaped(name, array) for name, array in (("dQ", dq), ("dK", dk), ("dV", dv))}

    def shaped(self, name: str, array: Array) -> Array:
        """A grouped array as the tensor it is, (batch, heads, rows, ...)."""
        shape = self.problem.shape(name)
        return array.reshape(*shape[:2], -1, *shape[3:])


# -- what others call -------------------------------------------------------------------------------------------------


def sample(problem: Problem) -> tuple[Array, Array] | None:
    """(query rows, key rows) to check where a head has more than DENSE_SCORES scores, else None: all. The same on every call."""
    if problem.seq_q * problem.seq_kv <= DENSE_SCORES:
        return None
    random = np.random.RandomState(0)

    def rows(count: int) -> Array:
        every = np.arange(count)
        edges = every[(every % EDGE == 0) | (every % EDGE == EDGE - 1) | (every == count - 1)]
        return np.union1d(edges, random.choice(count, min(count, SAMPLE), replace=False))

    return rows(problem.seq_q), rows(problem.seq_kv)


def _rows(xp: ArrayModule, problem: Problem, backward: bool) -> tuple[Array, dict[str, Array] | None]:
    """The rows a forward must compute, and the rows each tensor is returned in (None: all)."""
    picked, every = sample(problem), xp.arange(problem.seq_q)
    if picked is None:
        return every, None
    queries, keys = (xp.asarray(i) for i in picked)
    rows = {"O": queries, "logsumexp": queries, "dQ": queries, "dK": keys, "dV": keys}
    return every if backward else queries, rows  # dK and dV need logsumexp and delta of every query


def reference(xp: ArrayModule, problem: Problem, tensors: Mapping[str, Array]) -> Reference:
    """Float64 O and logsumexp (and dQ, dK, dV where tensors holds dO) of storage tensors Q, K, V[, dO].

    A fully masked row gives O = 0, logsumexp = -inf, gradients 0.
    """
    noise: dict[str, float] = {}
    math, backward = _Math(xp, problem, noise=noise), "dO" in tensors
    x = {name: math.load(tensors, name) for name in ("Q", "K", "V", "dO") if name in tensors}
    rows, picked = _rows(xp, problem, backward)
    with np.errstate(over="ignore", invalid="ignore"):
        out, top, total = math.forward(x["Q"], x["K"], x["V"], rows)
        values = {"O": math.shaped("O", out), "logsumexp": math.shaped("logsumexp", math.logsumexp(top, total))}
        if backward:
            if picked:
                values = {name: value[:, :, picked[name]] for name, value in values.items()}
            values |= math.backward(x, out, top, total)
    share = 1.0 if picked is None else min(len(picked["O"]) / problem.seq_q, len(picked["dK"]) / problem.seq_kv)
    return Reference(values, picked, share, noise)


def baselines(xp: ArrayModule, problem: Problem, tensors: Mapping[str, Array], arithmetic: str) -> list[dict[str, Array]]:
    """What a right kernel of a class computes, in several legal ways; their worst error against the reference sets the budget.

    arithmetic: "f32" float32 throughout, one rounding of each output; "p16" the same with P and dS rounded to the input type
    before their products; "tf32" every operand of a product rounded to tf32. Each dict holds O and logsumexp (plain; keys
    reversed) or, where tensors holds dO, dQ, dK, dV (P normalised; P from the float32 logsumexp; the same, keys reversed).
    delta comes from O as stored (rounded to the problem's type), which is what a backward pass reads; in 16 bits the three O
    differ by 2^-21 before that rounding, because a value half-way may go either way in a right kernel; p16 has a fourth, made
    without rounding P: a pass may be given its own class's O or a more exact one. Values are float32.
    A float64 problem has no baselines: its rule is absolute.
    """
    if problem.dtype == "float64":
        return []
    found: list[dict[str, Array]] = []
    dtype, backward = problem.dtype, "dO" in tensors
    narrow: Callable[[Array], Array] = (lambda array: through(xp, array, dtype)) if arithmetic == "p16" else _same
    operand: Callable[[Array], Array] = (lambda array: tf32(xp, array)) if arithmetic == "tf32" else _same
    rows, picked = _rows(xp, problem, backward)
    with np.errstate(over="ignore", invalid="ignore"):
        for reverse in (False, True):
            math = _Math(xp, problem, "float32", operand, narrow, reverse)
            x = {name: math.load(tensors, name) for name in ("Q", "K", "V", "dO") if name in tensors}
            out, top, total = math.forward(x["Q"], x["K"], x["V"], rows)
            lse = math.logsumexp(top, total)
            values = {"O": math.shaped("O", through(xp, out, dtype)), "logsumexp": math.shaped("logsumexp", lse)}
            if backward and picked:
                values = {name: value[:, :, picked[name]] for name, value in values.items()}
            found.append(values)
            if not backward:
                continue
            from_lse = (xp.where(lse == -np.inf, lse.dtype.type(0), lse), xp.ones_like(lse))
            nudge = 2.0**-21 if dtype in ("float16", "bfloat16") else 0.0
            low, same, high = (through(xp, out * factor, dtype) for factor in (1 - nudge, 1.0, 1 + nudge))
            ways = [(*from_lse, high)] if reverse else [(top, total, same), (*from_lse, low)]
            if arithmetic == "p16" and not reverse:
                exact = _Math(xp, problem, "float32").forward(x["Q"], x["K"], x["V"], rows)[0]
                ways.append((top, total, through(xp, exact, dtype)))
            for shift, divisor, stored in ways:
                grads = math.backward(x, stored, shift, divisor)
                found.append({name: through(xp, value, dtype) for name, value in grads.items()})
    return found
