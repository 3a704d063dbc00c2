"""Attention and its gradients as a right kernel of each arithmetic class rounds them: their worst error sets the budget.

The equations are those of reference.py. Every value is rounded to float32 where a kernel keeps float32, and the roundings are the same
on every machine, whatever its BLAS, SIMD width, number of threads or GPU: products and sums are in the order of rounded.py, exponentials
and logarithms are those of float64 rounded once, and everything else is an elementwise operation, which IEEE 754 rounds correctly.

A tile holds the scores of query rows of one query head for each of some key heads. The gradients of a key head sum over the rows of a
query head from the first to the last, then over its next query head. So no sum depends on the size of a tile, which is another on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..array import Array, ArrayModule
from ..dataset.storage import tf32, through, through_e4m3, widen
from ..problem import DSINKS, Problem
from .reference import Grouped, Loops, Place, logsumexp, rows_of, sample
from .rounded import CHUNK, exp, product, products_of_8_bits, summed

#: What P is multiplied with before it is rounded to 8 bits: 1 becomes 256, and 448 is the largest number.
P_SCALE = 256
#: What else it may be multiplied with: a kernel's reference may lie below the row's maximum so far, by up to 0.75 of its exponent of 2.
REFERENCES_8 = tuple(2.0**-x for x in (0.14, 0.27, 0.41, 0.58, 0.75))

#: Scores held at once, as reference.TILE_CPU and TILE_GPU.
TILE_CPU, TILE_GPU = 1 << 17, 1 << 25


def baselines(
    xp: ArrayModule, problem: Problem, tensors: Mapping[str, Array], arithmetic: str, progress: Callable[[str], None] = lambda text: None
) -> list[dict[str, Array]]:
    """The outputs of a correct kernel of an arithmetic class, computed in several valid ways.

    arithmetic: "f32" float32 throughout, one rounding of each output; "p16" the same with P and dS rounded to the input type before
    their products; "tf32" every operand of a product rounded to tf32. tensors: Q, K, V[, dO], storage arrays of xp in the shapes of the
    problem. Values are float32, (batch, heads, rows, head_dim) or (batch, heads, rows), of the rows that the reference holds.

    Two of the dicts hold O and logsumexp: the keys in order, and reversed; in p8 five more, for P that is rounded beside other references
    (REFERENCES_8), which shows what rounding it has in common over a row whose P are alike. Where tensors holds dO there are also dicts of
    dQ, dK, dV: with P = exp(S - m) / l; with P = exp(S - logsumexp) of the float32 logsumexp; the latter with the keys reversed. delta is computed
    from O as stored, in the problem's type, which is what a backward pass reads. In 16 bits the O of these three differ by a factor of
    1 +- 2^-21 before that rounding, since a correct kernel may round a value near a tie either way. p16 has a fourth, from an O without
    rounded P: a backward pass may be given the O of its own class or a more exact one.

    Empty for a float64 problem: its budget is absolute. Raises KeyError where one of Q, K, V is missing.
    """
    if problem.dtype == "float64":
        return []
    backward, dtype = "dO" in tensors, problem.dtype
    rows, picked = rows_of(xp, problem, backward)
    loops = Loops(f"{arithmetic} baselines", 1 + backward * (1 if picked is None else 2), progress)
    narrow: Callable[[Array], Array] = partial(through, xp, dtype=dtype) if arithmetic == "p16" else _same
    if arithmetic == "p8":
        narrow = partial(_p_of_8_bits, xp)
    kind = _Eight if arithmetic == "p8" else _Math
    math = kind(xp, problem, "float32", loops, partial(tf32, xp) if arithmetic == "tf32" else _same, narrow)
    with np.errstate(over="ignore", invalid="ignore"):
        x = {name: math.load(tensors, name) for name in ("Q", "K", "V", "dO") if name in tensors}
        forward, gradients = math.forward(x, rows, more=backward and arithmetic == "p16"), list[dict[str, Array]]()
        if backward:
            gradients = math.backward(x, _backward_ways(xp, dtype, forward))
    by_way = []
    for way in forward if arithmetic == "p8" else forward[:2]:
        values = {
            "O": math.shaped("O", through(xp, way.out, problem.tensor_dtype("O"))),
            "logsumexp": math.shaped("logsumexp", way.logsumexp),
        }
        by_way.append({name: value[:, :, picked[name]] for name, value in values.items()} if backward and picked else values)
    while gradients:  # one after another: a way in its own type and rounded, not all of them
        its = gradients.pop(0)
        of_sinks = {name: its.pop(name) for name in (DSINKS,) if name in its}  # float32
        by_way.append({name: through(xp, math.shaped(name, value), dtype) for name, value in its.items()} | of_sinks)
    return by_way


@dataclass(frozen=True)
class _Forward:
    """A way of the forward pass: O before it is rounded to storage, (n, group, rows, Dv); the rest is (n, group, rows)."""

    out: Array
    row_max: Array
    row_sum: Array
    logsumexp: Array


@dataclass(frozen=True)
class _Backward:
    """A way of the backward pass, with P = exp(S - shift) / divisor, (n, group, rows); out: O as stored; reverse: the order of the keys."""

    shift: Array
    divisor: Array
    out: Array
    reverse: bool = False


def _backward_ways(xp: ArrayModule, dtype: str, forward: list[_Forward]) -> list[_Backward]:
    """The ways of :func:`baselines`, from those of the forward pass: in order, reversed and, in p16, with P that is not rounded."""
    nudge = 2.0**-21 if dtype in ("float16", "bfloat16") else 0.0
    first, reverse, *exact = forward
    ways = [_Backward(way.row_max, _divisor(xp, way.row_sum), through(xp, way.out, dtype)) for way in (first, *exact)]
    for way, factor in ((first, 1 - nudge), (reverse, 1 + nudge)):
        shift = xp.where(way.logsumexp == -np.inf, np.float32(0), way.logsumexp)
        ways.append(_Backward(shift, xp.ones_like(shift), through(xp, way.out * np.float32(factor), dtype), way is reverse))
    return ways


def _same(array: Array) -> Array:
    return array


def _p_of_8_bits(xp: ArrayModule, p: Array, reference: float = 1.0) -> Array:
    """P as float8_e4m3 of P_SCALE P, which fills the type's range and does not leave it; reference: of REFERENCES_8."""
    scale = np.float32(P_SCALE * reference)
    rounded: Array = through_e4m3(xp, p * scale) / scale
    return rounded


def _divisor(xp: ArrayModule, row_sum: Array) -> Array:
    """The row sum, 1 where nothing is visible."""
    return xp.where(row_sum == 0, np.float32(1), row_sum)


@dataclass(frozen=True)
class _Math(Grouped):
    """Attention in float32: how the operands of a product round, and P and dS before their products."""

    operand: Callable[[Array], Array]
    narrow: Callable[[Array], Array]

    def product(self, a: Array, b: Array, reverse: bool = False, into: Array | None = None) -> Array:
        return product(self.xp, self.operand(a), self.operand(b), reverse, into)

    def scores(self, q: Array, k: Array, heads: slice) -> Array:
        """scale * q k^T. q: (n, rows, D), k: (n, keys, D), of these key heads -> (n, rows, keys)."""
        s = self.product(q, k.swapaxes(1, 2))
        s *= np.float32(self.problem.scale)
        return s

    def weights(self, p: Array, more: bool) -> list[Array]:
        """P as the ways of the forward pass multiply it with V: in order, reversed and, with more, not rounded."""
        narrow = self.narrow(p)
        return [narrow, narrow, p] if more else [narrow, narrow]

    def forward(self, x: Mapping[str, Array], rows: Array, more: bool) -> list[_Forward]:
        """The ways of the forward pass: with the keys in order, reversed, and others in order, of which :meth:`weights` gives P."""
        xp, keys, (n, group, *_), dim = self.xp, self.xp.arange(self.problem.seq_kv), x["Q"].shape, x["V"].shape[-1]
        shape = (n, group, len(rows))
        count = len(self.weights(x["Q"][0, 0, :1], more))
        ways = [_Forward(xp.empty((*shape, dim), "float32"), *(xp.empty(shape, "float32") for _ in range(3))) for _ in range(count)]
        limit = TILE_CPU if xp is np else TILE_GPU
        for member in range(group):
            done = 0
            for heads, some in self.tiles(rows, len(keys), 1, limit):
                at = slice(done, done + len(some))
                done = at.stop % len(rows)
                k, v = x["K"][heads, 0], x["V"][heads, 0]
                s = self.masked(self.scores(x["Q"][heads, member][:, some], k, heads), Place(heads, some, keys, member))
                m = s.max(axis=-1)
                sink = None if self.sinks is None else self.sinks[heads, member]
                m = m if sink is None else xp.maximum(m, sink)
                m = xp.where(m == -np.inf, np.float32(0), m)
                s -= m[..., None]
                p = exp(xp, s)
                sums = {reverse: summed(xp, p, reverse) for reverse in (False, True)}
                if sink is not None:
                    sums = {reverse: each + exp(xp, sink - m) for reverse, each in sums.items()}
                for i, (way, its) in enumerate(zip(ways, self.weights(p, more), strict=True)):
                    reverse = i == 1
                    row_sum = sums[reverse]
                    here = heads, member, at
                    way.row_max[here], way.row_sum[here] = m, row_sum
                    way.out[here] = self.product(its, v, reverse) / _divisor(xp, row_sum)[..., None]
                    way.logsumexp[here] = logsumexp(xp, m, row_sum)
        return ways

    def backward(self, x: Mapping[str, Array], ways: list[_Backward]) -> list[dict[str, Array]]:
        """dQ, dK, dV of each way, grouped, of the rows that :func:`reference.sample` picks; the ways are of all query rows."""
        picked, whole = sample(self.problem), self.xp.arange(self.problem.seq_q)
        if picked is None:
            found = self.gradients(x, ways, whole, None)
        else:
            queries, keys = (self.xp.asarray(rows) for rows in picked)
            of_queries, of_keys = self.gradients(x, ways, queries, None), self.gradients(x, ways, whole, keys)
            found = [of_key | {"dQ": of_query["dQ"]} for of_query, of_key in zip(of_queries, of_keys, strict=True)]
        if self.sinks is not None:
            for way, its in zip(ways, found, strict=True):
                its[DSINKS] = self.sink_gradient(x["dO"], way)
        return found

    def sink_gradient(self, dout: Array, way: _Backward) -> Array:
        """dsinks of a way."""
        terms = dout * way.out
        delta = summed(self.xp, terms.reshape(-1, *terms.shape[2:])).reshape(terms.shape[:3])
        p = exp(self.xp, self.sinks - way.shift) / way.divisor
        return self.dsinks(summed(self.xp, -(p * delta)))

    def gradients(self, x: Mapping[str, Array], ways: list[_Backward], rows: Array, keys: Array | None) -> list[dict[str, Array]]:
        """dQ of these rows, dK and dV of these keys (None: all keys) and rows, of each way. S and dP are the same for all of them."""
        xp, k, v, (n, group, _, dim) = self.xp, x["K"][:, 0], x["V"][:, 0], x["Q"].shape
        k, v, keys = (k, v, xp.arange(self.problem.seq_kv)) if keys is None else (k[:, keys], v[:, keys], keys)
        gradients = [{"dQ": xp.empty((n, group, len(rows), dim), "float32")} for _ in ways]
        for its in gradients:
            its |= {"dK": xp.zeros(k.shape, "float32"), "dV": xp.zeros(v.shape, "float32")}
        limit = TILE_CPU if xp is np else TILE_GPU
        for member in range(group):
            done = 0
            for heads, some in self.tiles(rows, len(keys), 1, limit, CHUNK):
                at = slice(done, done + len(some))
                done = at.stop % len(rows)
                q, dout = (x[name][heads, member][:, some] for name in ("Q", "dO"))
                s, place = self.scores(q, k[heads], heads), Place(heads, some, keys, member)
                slope, s = self.slope(s, place), self.masked(s, place)
                dp = self.product(dout, v[heads].swapaxes(1, 2))
                for way, its in zip(ways, gradients, strict=True):
                    shift, divisor = (each[heads, member][:, some, None] for each in (way.shift, way.divisor))
                    p = exp(xp, s - shift)
                    p /= divisor
                    delta = summed(xp, dout * way.out[heads, member][:, some])
                    ds = dp - delta[..., None]
                    ds *= p
                    if slope is not None:
                        ds *= slope
                    p, ds = self.narrow(p), self.narrow(ds)
                    self.product(p.swapaxes(1, 2), dout, into=its["dV"][heads])
                    self.product(ds.swapaxes(1, 2), q, into=its["dK"][heads])
                    its["dQ"][heads, member, at] = self.product(ds, k[heads], way.reverse)
        for its in gradients:
            its["dQ"] *= np.float32(self.problem.scale)
            its["dK"] *= np.float32(self.problem.scale)
        return gradients


@dataclass(frozen=True)
class _Eight(_Math):
    """The same with Q K^T of 8 bits as Hopper's tensor cores add it up; P is narrow's, and sums of P V are float32."""

    def load(self, tensors: Mapping[str, Array], name: str) -> Array:
        """Q and K as they are stored, which is what a tensor core multiplies; V with its descales."""
        if name not in ("Q", "K"):
            return super().load(tensors, name)
        p = self.problem
        array = widen(self.xp, tensors[name], p.tensor_dtype(name), self.work)
        return array.reshape(p.batch * p.heads_kv, -1, *array.shape[2:])

    def scores(self, q: Array, k: Array, heads: slice) -> Array:
        """As _Math's; heads: the key heads of q and k, whose descales come with the scale."""
        s = products_of_8_bits(self.xp, q, k)
        s *= (self.descale("Q") * self.descale("K") * np.float32(self.problem.scale))[heads, 0]
        return s

    def weights(self, p: Array, more: bool) -> list[Array]:
        """As _Math's, and by each of REFERENCES_8."""
        return super().weights(p, False) + [_p_of_8_bits(self.xp, p, each) for each in REFERENCES_8]
