"""Attention and its gradients in float64. baselines.py has them in the roundings that a kernel may have.

Forward, per head, with S = score(scale Q K^T) + mask (a masked score is -inf), m = rowmax(S) and l = rowsum(exp(S - m)):

    P = diag(l)^-1 exp(S - m)      O = P V      logsumexp = m + log(l)

This is the safe softmax (Milakov & Gimelshein 2018, arXiv 1805.02867, Algorithm 2). A tile holds whole rows of scores, so nothing is
rescaled as in the online softmax (their Algorithm 3). Backward (Dao 2023, arXiv 2307.08691, section 2.2 and Algorithm 2), with the
softmax scale, which the paper leaves out:

    dV = P^T dO      dP = dO V^T      delta = rowsum(dO * O)      dS = P * (dP - delta)      dQ = scale dS K      dK = scale dS^T Q

A sink is one more key of every row of a head, with a score of its own and a V of 0. It is in m and l only, and has

    dsink = - sum over batches and rows of exp(sink - logsumexp) delta

With grouped-query attention dK and dV sum over the query heads of a group (Ainslie et al. 2023, arXiv 2305.13245).

Every function takes `xp`, numpy or cupy, and arrays of it. One tile of scores is in memory at a time. Inside, heads are grouped by the
key head that they read: arrays are (batch * heads_kv, group, rows, head_dim), with group = heads_q / heads_kv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..array import Array, ArrayModule, every
from ..dataset.storage import round_to, widen
from ..fault import DataFault
from ..formula import Formula
from ..problem import DESCALES, DSINKS, Problem
from . import alike

__all__ = ["Grouped", "Loops", "Reference", "reference", "round_to", "sample", "widen"]

#: Above this many scores a head only a sample of rows is checked: the first and last row of each tile of EDGE, and SAMPLE random ones.
DENSE_SCORES = 1 << 28
EDGE, SAMPLE = 128, 256

#: Scores held at once: small enough for a CPU's cache, large enough to fill a GPU.
TILE_CPU, TILE_GPU = 1 << 18, 1 << 25


@dataclass(frozen=True)
class Reference:
    """Float64 values by tensor name, in the shapes of the problem, (batch, heads, rows, ...).

    rows: the indices on axis 2 of each tensor that the values stand for; None where they are all rows. share: the part of all rows that
    was computed, from 0 to 1. noise: for each tensor, an estimate of the largest error of an element per unit of relative rounding
    error of the dot products inside it (:class:`_Math`): a peaked softmax amplifies the last bits of a long dot product, in whatever
    order it is summed, and so does the cancellation in dP - delta. row_noise: the squares of that estimate, the largest and the mean of
    each row, (batch, heads, rows, 2). score: the mean |score| under P of the keys, over rows that see one. spread: how far the rows of a head differ, the least standard deviation of logsumexp or log(row sum) of
    the heads. products: the largest sqrt(sum_j (P_j V_j)^2) of an element of O, of each row. alike, typical, drift: how far float32 row sums may be
    off, relatively, because their terms round alike (alike.py): the worst row, the mean of the rows, and what all rows have in common.
    finite: whether all inputs are, so that every value of a right kernel is finite that does not overflow (logsumexp of masked rows: -inf).
    problem: whose attention it is. xp: numpy or cupy, whose arrays the values are.
    """

    problem: Problem
    xp: ArrayModule
    values: Mapping[str, Array]
    rows: Mapping[str, Array] | None
    share: float
    noise: Mapping[str, float]
    row_noise: Mapping[str, Array] = field(default_factory=dict)
    score: float = 0.0
    spread: float = np.inf
    products: Array = field(default_factory=lambda: np.zeros(1))
    alike: float = 0.0
    typical: float = 0.0
    drift: float = 0.0
    finite: bool = True

    def __getitem__(self, tensor: str) -> Array:
        return self.values[tensor]

    def select(self, tensor: str, array: Array) -> Array:
        """The rows of a whole tensor that the reference holds."""
        return array if self.rows is None else array[:, :, self.rows[tensor]]


# -- one attention, tile by tile --------------------------------------------------------------------------------------


def _square(array: Array) -> Array:
    """The squared length of each row, as a last axis of one."""
    lengths: Array = (array * array).sum(axis=-1, keepdims=True)
    return lengths


@dataclass
class Loops:
    """The loops over all tiles that a computation has, for progress: those of one computation have about as many tiles each."""

    what: str
    total: int
    progress: Callable[[str], None]
    done: int = 0

    def tell(self, tile: int, tiles: int) -> None:
        self.progress(f"{self.done * tiles + tile}/{self.total * tiles} {self.what}")


@dataclass(frozen=True)
class Place:
    """Where a tile of scores is: its key heads, of batch * heads_kv, query rows and keys.

    member: the query head of each of these key heads' groups that it is of, (heads, rows, keys); None: all, (heads, group, rows, keys).
    """

    heads: slice
    rows: Array
    keys: Array
    member: int | None = None


@dataclass(frozen=True)
class Grouped:
    """The tensors of a problem with their heads grouped by the key head that they read, and the tiles of its scores.

    work: the working type.
    """

    xp: ArrayModule
    problem: Problem
    work: str
    loops: Loops

    def load(self, tensors: Mapping[str, Array], name: str) -> Array:
        """A storage tensor in the working type, grouped: (batch * heads_kv, group, rows, ...)."""
        p = self.problem
        array = widen(self.xp, tensors[name], p.tensor_dtype(name), self.work)
        if p.lengths and name in ("K", "V"):  # P is 0 behind a sequence's last key
            there = self.xp.arange(p.seq_kv)[None, :] < self.xp.asarray(np.array(p.lengths))[:, None]
            array = self.xp.where(there[:, None, :, None], array, array.dtype.type(0))
        array = array.reshape(p.batch * p.heads_kv, -1, *array.shape[2:])
        return array * self.descale(name) if name in p.descaled else array

    def descale(self, name: str) -> Array:
        """What an element of Q, K or V of 8 bits is worth, (batch * heads_kv, 1, 1, 1)."""
        return self.xp.asarray(self.problem.values()[DESCALES[name]]).astype(self.work).reshape(-1, 1, 1, 1)

    def shaped(self, name: str, array: Array) -> Array:
        """A grouped array in the tensor's shape, (batch, heads, rows, ...)."""
        shape = self.problem.shape(name)
        return array.reshape(*shape[:2], -1, *shape[3:])

    def tiles(self, rows: Array, keys: int, group: int, limit: int, multiple: int = 1) -> Iterator[tuple[slice, Array]]:
        """(slice of key heads, row indices) of each tile, of `group` query heads for each key head.

        A tile has at most `limit` scores, or `multiple` rows, and is cut at multiples of so many rows.
        """
        p = self.problem
        step = max(1, min(len(rows), limit // (group * keys)))
        step = max(multiple, step // multiple * multiple)
        some = max(1, limit // (group * keys * min(step, len(rows))))
        places = [(first, row) for first in range(0, p.batch * p.heads_kv, some) for row in range(0, len(rows), step)]
        for number, (first, row) in enumerate(places):
            self.loops.tell(number, len(places))
            yield slice(first, first + some), rows[row : row + step]
        self.loops.done += 1

    def masked(self, s: Array, place: Place) -> Array:
        """Scores for s = scale * q k^T at a place: what the problem's score makes of s, and -inf where a mask hides the key.

        Raises DataFault where the score of a visible pair is not finite, and s is.
        """
        visible, formulas = self._visible(place), self.problem.formulas
        if "score" in formulas:
            scored = self._valued(formulas["score"], place, s)
            bad = self.xp.isfinite(s) & ~self.xp.isfinite(scored)
            if not every(~(bad if visible is None else bad & visible)):
                what = f'score "{self.problem.score}" is not finite for a pair of query and key'
                raise DataFault(what, "softmax has no meaning there", "bound it, as 50.0 * tanh(s / 50.0) does")
            s = scored
        return s if visible is None else self.xp.where(visible, s, s.dtype.type(-np.inf))

    def slope(self, s: Array, place: Place) -> Array | None:
        """The derivative of the problem's score by s = scale * q k^T, 0 where a mask hides the key; None where it has no score."""
        if self.problem.score is None:
            return None
        slope, visible = self._valued(self.problem.formulas["score"].derivative(), place, s), self._visible(place)
        return slope if visible is None else self.xp.where(visible, slope, s.dtype.type(0))

    def _visible(self, place: Place) -> Array | None:
        """Whether a query row sees a key, by all masks, as an array that broadcasts to scores; None where there is no mask."""
        seen = place.keys[None, :] <= place.rows[:, None] + self.problem.causal_shift if self.problem.causal else None
        if self.problem.lengths:
            keys = self._keys(place)
            last = place.rows[:, None] + keys - self.problem.seq_q
            seen = (place.keys < keys) & ((place.keys <= last) | (not self.problem.causal))
        if self.problem.mask is None:
            return seen
        mask = self._valued(self.problem.formulas["mask"], place, None)
        return mask if seen is None else mask & seen

    def _keys(self, place: Place) -> Array:
        """The keys of each sequence, of lengths, as an array that broadcasts to scores."""
        lengths = self.xp.asarray(np.repeat(self.problem.lengths, self.problem.heads_kv)[place.heads])
        return lengths.reshape(-1, *(1,) * (3 if place.member is None else 2))

    @cached_property
    def named(self) -> Mapping[str, Array]:
        """The values of the tensors that the mask and score name."""
        return self.problem.values(self.xp)

    @cached_property
    def sinks(self) -> Array | None:
        """The logit of each query head, grouped, (batch * heads_kv, group, 1); None where there are none.

        Raises DataFault for one that is not finite.
        """
        p, group = self.problem, self.problem.heads_q // self.problem.heads_kv
        if p.sinks is None:
            return None
        h_kv = (self.xp.arange(p.batch * p.heads_kv) % p.heads_kv)[:, None, None]
        h = h_kv * group + self.xp.arange(group)[:, None]
        keys = self.xp.asarray(np.repeat(p.lengths, p.heads_kv)[:, None, None]) if p.lengths else p.seq_kv
        names = {"h": h, "h_kv": h_kv, "seq_q": p.seq_q, "seq_kv": keys}
        found: Array = p.formulas["sinks"].value(self.xp, names, self.work, self.named) + self.xp.zeros(h.shape, self.work)
        if not every(self.xp.isfinite(found)):  # all rows would be NaN, and a kernel's with them
            raise DataFault(f'sinks "{p.sinks}" are not finite', "softmax has no meaning there", "give a finite logit for each query head")
        return found

    def dsinks(self, sink: Array) -> Array:
        """The sum over batches of what is grouped, (batch * heads_kv, group), as dsinks has it."""
        p = self.problem
        found: Array = sink.reshape(p.batch, p.heads_q).sum(axis=0).reshape(p.shape(DSINKS))
        return found

    def _valued(self, formula: Formula, place: Place, s: Array | None) -> Array:
        """A formula's values at a place, for scores s."""
        p, group = self.problem, self.problem.heads_q // self.problem.heads_kv
        heads = self.xp.arange(p.batch * p.heads_kv)[place.heads].reshape(-1, *(1,) * (3 if place.member is None else 2))
        h_kv = heads % p.heads_kv
        seq_kv = self._keys(place) if p.lengths else p.seq_kv
        names = {"b": heads // p.heads_kv, "h_kv": h_kv, "k": place.keys, "seq_q": p.seq_q, "seq_kv": seq_kv}
        names |= {"q_row": place.rows[:, None], "q": place.rows[:, None] + seq_kv - p.seq_q}
        member = self.xp.arange(group)[:, None, None] if place.member is None else place.member
        names |= {"h": h_kv * group + member} | ({} if s is None else {"s": s})
        found: Array = formula.value(self.xp, names, self.work, self.named)
        return found if s is None or found.shape == s.shape else self.xp.zeros_like(s) + found


@dataclass(frozen=True)
class _Math(Grouped):
    """Attention in float64. noise and row_noise receive what Reference says of it.

    **Noise.** Dot products are taken to have independent errors of mean zero, and an error moves each tensor by its derivative. In units
    of the roundoff u the squares of these errors are, with row norms |q| and D = head_dim_v,

        S_ij            |scale q_i|^2 |k_j|^2, and of S_ij - logsumexp_i in a backward pass logsumexp_i^2 more, shared by the row
        dP_ij           |dO_i|^2 |V_j|^2 + D/4 dP_ij^2
        delta_i         |dO_i|^2 |O_i|^2 (1 + n_i / 4 D) + D/4 delta_i^2

    A sum of D products of independent signs has partial sums of up to |a| |b| / sqrt(D), and so an error of 0.3 u |a| |b|. One whose
    products agree in sign has partial sums that grow to it, and an error of u sqrt(D / 3) of it at most (Higham & Mary 2019, doi
    10.1137/18M1226312): the second terms, in which dP^2 <= 2 (dP - delta)^2 + 2 delta^2. n_i keys that a row sees make its O a sum of as
    many terms, whose error delta has: u sqrt(n_i / 3) of each element of O. With P' = P times the derivative of the problem's score,

        dQ^2            scale^2 (sum_j (dS^2 S + P'^2 dP) K^2 + delta_i (sum_j P' K)^2) + logsumexp_i^2 dQ^2
        dK^2            scale^2 sum_i (dS^2 (S + logsumexp_i^2) + P'^2 (dP + delta_i)) Q^2
        dV^2            sum_i (P'^2 S + P^2 logsumexp_i^2) dO^2

    Beside them stands what :func:`flushed` may lose, over u.
    """

    noise: dict[str, float]
    row_noise: dict[str, Array]

    def note(self, name: str, columns: Array) -> Array:
        """Keep the largest noise of a tensor, of the squares that :meth:`columns` gives; returns those that are positive."""
        columns = self.xp.where(columns > 0, columns, 0.0)  # cancellation may leave squares just below zero
        self.largest(name, self.xp.sqrt(columns[..., 0]))
        return columns

    def columns(self, squares: Array) -> Array:
        """The largest and the mean of each row, (..., rows, 2); 0 in place of what is not finite."""
        squares = self.xp.where(self.xp.isfinite(squares), squares, 0.0)
        return self.xp.stack([squares.max(axis=-1), squares.mean(axis=-1)], axis=-1)

    def largest(self, name: str, values: Array) -> None:
        """Keep the largest finite value."""
        self.noise[name] = max(self.noise.get(name, 0.0), float(self.xp.where(self.xp.isfinite(values), values, 0.0).max()))

    def note_alike(self, p: Array, row_sum: Array) -> None:
        """Keep what alike.rounded_alike gives: the largest of the rows, and sums over all rows."""
        one, other = alike.rounded_alike(self.xp, p, row_sum)
        both = self.xp.abs(one) + self.xp.abs(other)
        self.noise["alike"] = max(self.noise.get("alike", 0.0), float(both.max()))
        for name, array in (("typical", both), ("drift", one), ("drift beside", other)):
            self.noise[name] = self.noise.get(name, 0.0) + float(array.sum())

    def float64_tiles(self, rows: Array, keys: int) -> Iterator[tuple[slice, Array]]:
        """Tiles with all query heads of their key heads."""
        limit = TILE_CPU if self.xp is np else TILE_GPU
        return self.tiles(rows, keys, self.problem.heads_q // self.problem.heads_kv, limit)

    def scores(self, q: Array, k: Array) -> Array:
        """scale * q k^T. q: (n, group, rows, D), k: (n, keys, D) -> (n, group, rows, keys)."""
        n, group, count, dim = q.shape
        s = self.xp.matmul(q.reshape(n, group * count, dim), k.swapaxes(1, 2))
        s *= self.problem.scale
        return s.reshape(n, group, count, -1)

    def forward(self, q: Array, k: Array, v: Array, rows: Array) -> tuple[Array, Array, Array]:
        """O (n, group, rows, Dv); the row maximum of S, 0 where fully masked, and the row sum of exp(S - maximum), (n, group, rows) each."""
        xp, keys = self.xp, self.xp.arange(self.problem.seq_kv)
        (n, group), dim = q.shape[:2], v.shape[-1]
        out = xp.empty((n, group, len(rows), dim), q.dtype)
        row_max, row_sum = xp.empty(out.shape[:3], q.dtype), xp.empty(out.shape[:3], q.dtype)
        noise = {name: xp.empty((*out.shape[:3], 2), q.dtype) for name in ("O", "logsumexp", "products")}
        done = 0
        for heads, some in self.float64_tiles(rows, len(keys)):
            at = slice(done, done + len(some))
            done = at.stop % len(rows)
            vs = v[heads, 0]
            s, place = self.scores(q[heads][:, :, some], k[heads, 0]), Place(heads, some, keys)
            slope, s = self.slope(s, place), self.masked(s, place)
            m = s.max(axis=-1)
            m = m if self.sinks is None else xp.maximum(m, self.sinks[heads])
            m = xp.where(m == -np.inf, m.dtype.type(0), m)
            sizes = xp.where(s == -np.inf, 0.0, xp.abs(s))
            s -= m[..., None]
            p = xp.exp(s, out=s)
            of_keys = p.sum(axis=-1)
            row_max[heads, :, at], row_sum[heads, :, at] = m, of_keys
            self.noise["seeing"] = self.noise.get("seeing", 0.0) + float((of_keys > 0).sum())
            if self.sinks is not None:
                away = self.sinks[heads] - m
                away = xp.exp(away, out=away)
                row_sum[heads, :, at] += away
                least = xp.minimum(xp.where(p > 0, p, np.inf).min(axis=-1), away) / row_sum[heads, :, at]
                least = xp.where(least >= 0, least, np.inf)  # a NaN is of its row alone
                self.noise["least"] = min(self.noise.get("least", np.inf), float(least.min()))
            divisor = xp.where(row_sum[heads, :, at] == 0, m.dtype.type(1), row_sum[heads, :, at])[..., None]
            p = p.reshape(p.shape[0], -1, len(keys))
            out[heads, :, at] = o = xp.matmul(p, vs).reshape(p.shape[0], group, len(some), dim) / divisor
            # d O = sum_j P_j (V_j - O) d s_j and d logsumexp = sum_j P_j d s_j
            mean = (p * sizes.reshape(p.shape)).sum(axis=-1, keepdims=True).reshape(divisor.shape)
            mean /= xp.where(of_keys > 0, of_keys, m.dtype.type(1))[..., None]
            self.noise["score"] = self.noise.get("score", 0.0) + float(xp.where(xp.isfinite(mean), mean, 0.0).sum())
            lengths, norm = _square(k[heads, 0]), xp.sqrt(_square(q[heads][:, :, some]))
            lengths = xp.where(xp.isfinite(lengths), lengths, 0.0)  # a NaN among the keys is not of the rows that do not see it
            self.note_alike(p.reshape(*divisor.shape[:3], -1), row_sum[heads, :, at])
            p *= p
            moved = p  # by a rounding of s: as much as the score is steep
            if slope is not None:
                moved = p * (slope * slope).reshape(p.shape)
            o = o.reshape(p.shape[0], -1, dim)
            of_v, of_v2, whole = (xp.matmul(moved, lengths * t) for t in (vs, vs * vs, xp.ones_like(lengths)))
            shape, factor = (p.shape[0], group, len(some), -1), (norm * self.problem.scale / divisor) ** 2
            for name, squares in (("O", of_v2 - 2 * o * of_v + o * o * whole), ("logsumexp", whole)):
                squares = squares.reshape(shape) * factor
                noise[name][heads, :, at] = self.note(name, self.columns(squares))
            noise["products"][heads, :, at] = self.columns(xp.matmul(p, vs * vs).reshape(shape) / divisor**2)
        self.row_noise.update(noise)
        return out, row_max, row_sum

    def gradients(
        self, x: Mapping[str, Array], row_max: Array, row_sum: Array, out: Array, rows: Array, keys: Array | None
    ) -> tuple[Array, Array, Array]:
        """dQ of these rows, dK and dV of these keys (None: all keys), with P = exp(S - row_max) / row_sum.

        rows also index row_max, row_sum and out, which are of all rows, (n, group, seq_q). row_noise receives those of the three.
        """
        xp, scale = self.xp, self.problem.scale
        q, dout = x["Q"], x["dO"]
        k, v = x["K"][:, 0], x["V"][:, 0]
        if keys is None:
            keys = xp.arange(self.problem.seq_kv)
        else:
            k, v = k[:, keys], v[:, keys]
        (n, group), dim = q.shape[:2], v.shape[-1]
        dq = xp.empty((n, group, len(rows), q.shape[-1]), q.dtype)
        dk, dv = xp.zeros(k.shape, q.dtype), xp.zeros(v.shape, q.dtype)
        dk_noise, dv_noise = xp.zeros_like(dk), xp.zeros_like(dv)  # of S; of the rest the largest and the mean of each row
        dk_rest, dv_rest = xp.zeros((*k.shape[:2], 2), q.dtype), xp.zeros((*k.shape[:2], 2), q.dtype)
        dq_noise = xp.empty((n, group, len(rows), 2), q.dtype)
        of_k, of_v, k_columns = _square(k), _square(v), self.columns(k * k)
        shift = logsumexp(xp, row_max, row_sum)[..., None]
        shift = xp.where(xp.isfinite(shift), shift * shift, 0.0)
        row_sum = xp.where(row_sum == 0, row_sum.dtype.type(1), row_sum)
        done = 0
        for heads, some in self.float64_tiles(rows, len(keys)):
            at = slice(done, done + len(some))
            done = at.stop % len(rows)
            qs, ds, os = q[heads][:, :, some], dout[heads][:, :, some], out[heads][:, :, some]
            flat_q, flat_d, flat_o = (t.reshape(t.shape[0], -1, t.shape[-1]) for t in (qs, ds, os))
            delta = (flat_d * flat_o).sum(axis=-1, keepdims=True)
            p, place = self.scores(qs, k[heads]), Place(heads, some, keys)
            slope, p = self.slope(p, place), self.masked(p, place)
            p -= row_max[heads][:, :, some, None]
            p = xp.exp(p, out=p)
            p /= row_sum[heads][:, :, some, None]
            flat = (p.shape[0], -1, len(keys))
            p = p.reshape(flat)
            dv[heads] += xp.matmul(p.swapaxes(1, 2), flat_d)
            moved = p if slope is None else p * slope.reshape(flat)
            dp = xp.matmul(flat_d, v[heads].swapaxes(1, 2))
            dp -= delta
            dp *= moved
            dk[heads] += xp.matmul(dp.swapaxes(1, 2), flat_q)
            its = xp.matmul(dp, k[heads])
            dq[heads, :, at] = its.reshape(qs.shape)
            of_delta = xp.matmul(moved, k[heads])

            # The squares of the errors, in the terms of the docstring above
            for array in (p, dp) if slope is None else (p, dp, moved):
                array *= array
            of_q, of_d, of_k2, of_shift = _square(flat_q), _square(flat_d), k_columns[heads], shift[heads][:, :, some].reshape(*flat[:2], 1)
            of_q2, of_d2, serial = self.columns(flat_q * flat_q), self.columns(flat_d * flat_d), dim / 2 * delta * delta
            of_o = of_d * _square(flat_o) * (1 + self.seen(place, qs.shape[:3]) / (4 * dim)) + serial / 2
            back = moved.swapaxes(1, 2)
            dv_noise[heads] += xp.matmul(back, of_q * flat_d * flat_d)
            dv_rest[heads] += xp.matmul(p.swapaxes(1, 2), of_shift * of_d2)
            both = xp.matmul(back, xp.concatenate([of_d * of_q2, (of_o + serial) * of_q2], axis=-1))
            dk_rest[heads] += of_v[heads] * both[..., :2] + both[..., 2:]
            back = dp.swapaxes(1, 2)
            dk_noise[heads] += xp.matmul(back, of_q * flat_q * flat_q)
            dk_rest[heads] += xp.matmul(back, (dim / 2 + of_shift) * of_q2)
            both = xp.matmul(moved, xp.concatenate([of_v[heads] * of_k2, of_k2], axis=-1))
            squares = (
                of_d * both[..., :2] + serial * both[..., 2:] + dim / 2 * xp.matmul(dp, of_k2) + of_o * self.columns(of_delta * of_delta)
            )
            squares += scale**2 * of_q * self.columns(xp.matmul(dp, of_k[heads] * k[heads] * k[heads])) + of_shift * self.columns(its * its)
            dq_noise[heads, :, at] = self.note("dQ", (scale**2 * squares).reshape(*ds.shape[:3], 2))
        squares = scale**2 * of_k * self.columns(dv_noise) + dv_rest
        self.row_noise.update(dQ=dq_noise, dV=self.note("dV", squares))
        squares = scale**2 * (scale**2 * of_k * self.columns(dk_noise) + dk_rest)
        self.row_noise["dK"] = self.note("dK", squares)
        dq *= scale
        dk *= scale
        return dq, dk, dv

    def seen(self, place: Place, shape: tuple[int, ...]) -> Array:
        """How many keys each row of a tile sees, (heads, group * rows, 1), by those of the place. shape: (heads, group, rows)."""
        visible, count = self._visible(place), self.xp.zeros(shape, "float64")
        if visible is None:
            count += self.problem.seq_kv
        else:
            count += visible.sum(axis=-1, dtype="float64") * (self.problem.seq_kv / len(place.keys))
        return count.reshape(shape[0], -1, 1)

    def backward(self, x: Mapping[str, Array], out: Array, row_max: Array, row_sum: Array) -> dict[str, Array]:
        """dQ, dK, dV, sampled as :func:`sample` says, from O, row_max and row_sum of all query rows."""
        picked, whole = sample(self.problem), self.xp.arange(self.problem.seq_q)
        if picked is None:
            dq, dk, dv = self.gradients(x, row_max, row_sum, out, whole, None)
        else:
            queries, keys = (self.xp.asarray(i) for i in picked)
            _, dk, dv = self.gradients(x, row_max, row_sum, out, whole, keys)
            noise, row_noise = dict(self.noise), dict(self.row_noise)
            self.noise.pop("dQ")
            dq = self.gradients(x, row_max, row_sum, out, queries, None)[0]
            for name in ("dK", "dV"):  # of all queries, and not of these
                self.noise[name], self.row_noise[name] = noise[name], row_noise[name]
        made = {name: self.shaped(name, array) for name, array in (("dQ", dq), ("dK", dk), ("dV", dv))}
        if self.sinks is None:
            return made
        delta = (x["dO"] * out).sum(axis=-1)
        return made | {DSINKS: self.sink_gradient(x, out, delta, logsumexp(self.xp, row_max, row_sum))}

    def sink_gradient(self, x: Mapping[str, Array], out: Array, delta: Array, lse: Array) -> Array:
        """dsinks. Its noise: of delta and of P, which has that of logsumexp, in each row."""
        xp, p = self.xp, self.sinks - lse
        p = xp.exp(p, out=p)
        off = p * p * (_square(x["dO"]) * _square(out))[..., 0] + (p * delta * (1 + xp.abs(lse))) ** 2
        self.largest(DSINKS, xp.sqrt(self.dsinks(off.sum(axis=-1))))
        return self.dsinks(-(p * delta).sum(axis=-1))


# -- what others call -------------------------------------------------------------------------------------------------


def sample(problem: Problem) -> tuple[Array, Array] | None:
    """The (query rows, key rows) to check, sorted indices, where a head has more than DENSE_SCORES scores; None: all rows.

    The same on every call.
    """
    if problem.seq_q * problem.seq_kv <= DENSE_SCORES:
        return None
    random = np.random.RandomState(0)

    def rows(count: int) -> Array:
        whole = np.arange(count)
        edges = whole[(whole % EDGE == 0) | (whole % EDGE == EDGE - 1) | (whole == count - 1)]
        return np.union1d(edges, random.choice(count, min(count, SAMPLE), replace=False))

    return rows(problem.seq_q), rows(problem.seq_kv)


def rows_of(xp: ArrayModule, problem: Problem, backward: bool) -> tuple[Array, dict[str, Array] | None]:
    """The query rows that a forward pass must compute, and the rows of each tensor that are returned (None: all)."""
    picked, whole = sample(problem), xp.arange(problem.seq_q)
    if picked is None:
        return whole, None
    queries, keys = (xp.asarray(i) for i in picked)
    rows = {"O": queries, "logsumexp": queries, "dQ": queries, "dK": keys, "dV": keys, DSINKS: xp.arange(1)}
    return whole if backward else queries, rows  # dK and dV need logsumexp and delta of every query


def reference(
    xp: ArrayModule, problem: Problem, tensors: Mapping[str, Array], progress: Callable[[str], None] = lambda text: None
) -> Reference:
    """Float64 O and logsumexp, and dQ, dK, dV where tensors holds dO, by the equations at the head of this file.

    tensors: Q, K, V[, dO] as arrays of xp, in the shapes and storage types of the problem. A fully masked row gives O = 0,
    logsumexp = -inf and gradients 0. progress receives "N/M" of the tiles. Raises KeyError where one of Q, K, V is missing.
    """
    noise, squares = dict[str, float](), dict[str, Array]()
    backward = "dO" in tensors
    loops = Loops("float64 reference", 1 + backward * (1 if sample(problem) is None else 2), progress)
    math = _Math(xp, problem, "float64", loops, noise, squares)
    x = {name: math.load(tensors, name) for name in ("Q", "K", "V", "dO") if name in tensors}
    rows, picked = rows_of(xp, problem, backward)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        out, row_max, row_sum = math.forward(x["Q"], x["K"], x["V"], rows)
        values = {"O": math.shaped("O", out), "logsumexp": math.shaped("logsumexp", logsumexp(xp, row_max, row_sum))}
        if backward:
            if picked:
                values = {name: value[:, :, picked[name]] for name, value in values.items()}
            values |= math.backward(x, out, row_max, row_sum)
        spread = min(_spread(xp, xp.log(row_sum)), _spread(xp, logsumexp(xp, row_max, row_sum)))
        for name, lost in flushed(xp, problem, x, noise.pop("least", 0.0)).items():
            if name in noise:
                noise[name] = float(np.hypot(noise[name], lost / alike.UNIT))
            if name in squares:
                squares[name] += (lost / alike.UNIT) ** 2
    share = 1.0 if picked is None else min(len(picked["O"]) / problem.seq_q, len(picked["dK"]) / problem.seq_kv)
    seeing = max(1.0, noise.pop("seeing"))  # rows: one that sees no key has no error of a sum
    score, largest, typical = noise.pop("score") / seeing, noise.pop("alike"), noise.pop("typical") / seeing
    squares = {name: rows.reshape(problem.batch, -1, rows.shape[-2], 2) for name, rows in squares.items()}
    if backward and picked:
        squares |= {name: squares[name][:, :, picked["O"]] for name in ("O", "logsumexp", "products")}
    drift = (abs(noise.pop("drift")) + abs(noise.pop("drift beside"))) / seeing
    finite = all(every(xp.isfinite(array)) for array in x.values())
    made = (score, spread, xp.sqrt(squares.pop("products")[..., 0]), largest, typical, drift, finite)
    return Reference(problem, xp, values, picked, share, noise, squares, *made)


def flushed(xp: ArrayModule, problem: Problem, x: Mapping[str, Array], least: float) -> dict[str, float]:
    """The most that an element of each tensor may lose because kernels take float32 values below f = 2^-126 for 0 (-ftz=true).

    It is all of a tensor where a sink is 88 above the scores, or they are 88 above a sink. With the largest finite |Q|, |K|, |V| and |dO|, n
    terms that an element sums and D = head_dim_v, P and each result lose f, and so

        O            f (1 + n |V|)
        dS, delta    e = f (3 + D |dO| (1 + (n + 2) |V|)), of P, dP, dS and delta with its O, where |dP|, |delta| <= D |dO| |V|
        dV           f (1 + n |dO|)
        dQ, dK       f + n |scale| e |K|, |Q|
        dsinks       f + n e

    least: of P, but 0, and of the sinks'; 0 without sinks. Where no P is near f, P loses nothing: then V is left out of O and e, and n of dV.
    Not covered: inputs so small, some 2^-100, that partial sums are flushed. Nothing of float64.
    """
    if problem.dtype == "float64":
        return {}
    largest = {name: float(xp.where(xp.isfinite(array), xp.abs(array), 0.0).max()) for name, array in x.items()}
    f, keys, rows = 2.0**-126, problem.seq_kv, problem.seq_q * (problem.heads_q // problem.heads_kv)
    small = least < 4 * f
    found = {"O": f * (1 + small * keys * largest["V"])}
    if "dO" not in x:
        return found
    e = f * (3 + problem.head_dim_v * largest["dO"] * (1 + small * (keys + 2) * largest["V"]))
    scaled = abs(problem.scale) * e
    found |= {"dV": f * (1 + small * rows * largest["dO"]), DSINKS: f + problem.batch * problem.seq_q * e}
    return found | {"dQ": f + keys * scaled * largest["K"], "dK": f + rows * scaled * largest["Q"]}


def logsumexp(xp: ArrayModule, row_max: Array, row_sum: Array) -> Array:
    """row_max + log(row_sum), -inf where nothing is visible (row_sum 0). The logarithm is float64's, rounded to the type of the rows."""
    safe = xp.where(row_sum == 0, row_sum.dtype.type(1), row_sum).astype("float64")
    return xp.where(row_sum == 0, row_sum.dtype.type(-np.inf), row_max + xp.log(safe).astype(row_sum.dtype))


def _spread(xp: ArrayModule, rows: Array) -> float:
    """The least standard deviation over the rows of a head, of those that are finite; rows: (..., rows)."""
    finite = xp.isfinite(rows)
    number = xp.where(finite, 1.0, 0.0).sum(axis=-1, keepdims=True)
    number = xp.where(number > 0, number, 1.0)
    away = xp.where(finite, rows, 0.0)
    away = xp.where(finite, away - away.sum(axis=-1, keepdims=True) / number, 0.0)
    return float(xp.sqrt((away * away / number).sum(axis=-1)).min())
