"""The attention problem: shapes, dtype, mask and scale, and what follows from them: shapes, bytes and operations of each tensor and pass.

Every room above it may import it. It imports nothing of ours but the faults that it raises and the language of masks and scores.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .fault import UsageFault
from .formula import EXTENTS, Formula, Given, Mistake, checked, is_causal, parsed

#: Bytes of one element of each storage type a problem can have.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float8_e4m3": 1}

#: What else people call them.
SPELLINGS = {
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("fp8", "e4m3", "float8", "float8_e4m3fn"), "float8_e4m3"),
}
#: The tensors of a problem of 8 bits that say what an element of Q, K and V is worth: (batch, heads_kv), of each key head. A cache of 8
#: bits has those of K and V.
DESCALES = {"Q": "descale_q", "K": "descale_k", "V": "descale_v"}
#: In the place of values: each call gives its own, and verify and selftest draw them. Of Q, K and V, and of a cache of 8 bits.
UNKNOWN_DESCALES: Mapping[str, object] = dict.fromkeys(DESCALES.values())
UNKNOWN_DESCALES_KV: Mapping[str, object] = dict.fromkeys((DESCALES["K"], DESCALES["V"]))

#: What K and V may be stored as beside Q of these types: an 8-bit cache (--kv-dtype).
CACHE_DTYPES = {"float16": ("float8_e4m3",), "bfloat16": ("float8_e4m3",)}

#: Keys of a page of a paged cache, and the names of what says where the keys of each sequence are: flash_attn_with_kvcache has them too.
PAGE_SIZES = (16, 32, 64, 128, 256)
BLOCK_TABLE, CACHE_SEQLENS = "block_table", "cache_seqlens"

#: The largest size: kernels take sizes as 32-bit integers.
LARGEST = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
#: The least of float32 that is not subnormal.
FLOAT32_MIN = 2.0**-126

PASSES = ("forward", "backward")


class _Modes(dict[str, tuple[str, ...]]):
    def __missing__(self, mode: object) -> tuple[str, ...]:
        raise UsageFault(f"unknown mode {mode!r:.40}", f"known: {', '.join(self)}", "use one of these")


#: Modes of a run and the passes each consists of. An unknown one raises UsageFault.
MODES = _Modes({"forward": ("forward",), "backward": ("backward",), "both": PASSES})

#: The tensors that each pass reads and writes, in the order of tables.
READS = {"forward": ("Q", "K", "V"), "backward": ("Q", "K", "V", "O", "logsumexp", "dO")}
WRITES = {"forward": ("O", "logsumexp"), "backward": ("dQ", "dK", "dV")}
#: What a backward pass of a problem with sinks writes too.
DSINKS = "dsinks"
#: The tensors whose rows have V's head dim.
OF_V = ("V", "O", "dO", "dV")
#: Every tensor that a run may write.
WRITTEN = (*WRITES["forward"], *WRITES["backward"], DSINKS)

_FOLDER = re.compile(
    r"^B(\d{1,6})_H(\d{1,6})_S(\d{1,8})_D(\d{1,5})(?:_Dv(\d{1,5}))?(?:_Hkv(\d{1,6}))?(?:_Skv(\d{1,8}))?(?:_(float16|bfloat16|float64|float8_e4m3))?(?:_KV(float8_e4m3))?$"
)


@dataclass(frozen=True)
class Problem:
    """One attention problem: O = softmax(score(scale * Q K^T) + mask) V, per batch and head.

    Q, dQ: (batch, heads_q, seq_q, head_dim); K, dK: (batch, heads_kv, seq_kv, head_dim); O, dO: as Q, V, dV: as K, with head_dim_v in
    the place of head_dim, which may be another (DeepSeek-V2, arXiv 2405.04434, section 2.1: 192 and 128); logsumexp: (batch, heads_q, seq_q), log(sum over visible keys of exp(scale * q.k)), the natural logarithm. Query head h reads key head
    h * heads_kv // heads_q (grouped-query attention; Ainslie et al. 2023, arXiv 2305.13245). Under the causal mask key k is visible to
    query q iff k <= q + causal_shift; a query without a visible key gives O = 0, logsumexp = -inf and zero gradients. :meth:`of` makes
    one and checks it, :meth:`with_` changes one: equal masks then give equal problems.

    score and mask are texts of formula.py, or None. The score takes the place of s = scale * q.k first, then a key is visible where the
    causal mask and `mask` both say so. In their texts q counts bottom-right: query i is at q = i + seq_kv - seq_q. sinks: a text of a logit
    of each query head, which enters the row sum and logsumexp as a key with a V of 0 would. A row then always sees something. dsinks is its
    gradient, of each head the sum over batches and rows, (1, heads_q, 1). tensors: those that the texts name.

    With a page_size (0: none) K and V lie in pages of so many keys, and each sequence has its own number of keys, lengths[b]: seq_kv is
    the largest. Those of K's and V's rows behind it do not exist. Queries, the causal mask and q, k and seq_kv in texts count by the
    sequence's own length. lengths is empty where each call gives its own (the operator). block_table: which pages are whose, where it is not
    the one that :attr:`paging` draws.
    In float8_e4m3 an element of Q, K and V stands for itself times the DESCALES of its batch and key head, which are among the tensors, and
    1 where no values are given. O is bfloat16. dtype_kv is the storage type of K and V: dtype, or one of CACHE_DTYPES, which is a cache of 8
    bits. K and V alone have descales then, and Q and O are of dtype.
    """

    batch: int
    heads_q: int
    seq_q: int
    head_dim: int
    heads_kv: int
    seq_kv: int
    dtype: str
    causal: bool
    scale: float
    causal_shift: int
    mask: str | None = None
    score: str | None = None
    tensors: tuple[Given, ...] = ()
    sinks: str | None = None
    head_dim_v: int = 0
    page_size: int = 0
    lengths: tuple[int, ...] = ()
    block_table: Given | None = None
    dtype_kv: str = ""

    @classmethod
    def of(
        cls,
        batch: int = 2,
        heads: int = 8,
        seq: int = 512,
        dim: int = 64,
        heads_kv: int | None = None,
        seq_kv: int | Sequence[int] | None = None,
        dtype: str = "float32",
        causal: bool = False,
        scale: float | None = None,
        causal_shift: int | None = None,
        mask: str | None = None,
        score: str | None = None,
        tensors: Mapping[str, object] | tuple[Given, ...] = (),
        sinks: str | None = None,
        dim_v: int | None = None,
        page_size: int | None = None,
        block_table: object = None,
        dtype_kv: str | None = None,
    ) -> Problem:
        """A checked problem. heads_kv, seq_kv, dim_v and dtype_kv default to heads, seq, dim and dtype, scale to 1/sqrt(dim), causal_shift to
        seq_kv - seq.

        That default is the bottom-right alignment of FlashAttention (since version 2.1). 0 is the top-left alignment of PyTorch's
        is_causal. A shard of a longer sequence has the position of its first query minus that of its first key. The shift is clamped to
        -seq (no key is visible) and seq_kv - 1 (every key is): beyond these bounds the mask is the same, and no 32-bit index of a kernel
        can overflow. Without causal it has no effect and is the default.

        mask and score are kept in one spelling, so that equal formulas give equal problems; a mask that says "k <= q" alone is `causal`. tensors: by name, the values of those that they
        name, which are copied; without values they are given with each call, as the operator's are.

        page_size: of PAGE_SIZES; seq_kv may then be a list, of the keys of each sequence. block_table: pages of each sequence, integers
        (batch, pages of the longest), each page once; those behind a sequence's last key are not looked at.

        Raises UsageFault for sizes that are not integers of 1 to LARGEST, heads that do not group, an unknown dtype, a scale that is
        not finite in float32, a causal_shift that is no integer, or beside a mask or score another than the default, and a mask or score
        that is none; for a dtype_kv that the dtype has no cache of; for tensors of another shape or type than the texts ask for, or that no
        text names; for a list without pages or of another length than the batch, another page_size, and a block_table with a page that there
        is none of or that two have.
        """
        lengths, seq_kv = _lengths(seq_kv)
        heads_kv = heads if heads_kv is None else heads_kv
        seq_kv = seq if seq_kv is None else seq_kv
        dim_v = dim if dim_v is None else dim_v
        sizes = {"batch": batch, "heads": heads, "seq": seq, "dim": dim, "heads-kv": heads_kv, "seq-kv": seq_kv, "dim-v": dim_v}
        batch, heads, seq, dim, heads_kv, seq_kv, dim_v = (_size(name, value) for name, value in sizes.items())
        if heads % heads_kv:
            raise UsageFault(
                f"{heads} query heads cannot share {heads_kv} key heads evenly",
                "grouped-query attention needs heads to be a multiple of kv-heads",
                "choose --kv-heads from the divisors of --heads",
            )
        dtype = _dtype(dtype)
        dtype_kv = dtype if dtype_kv is None else _dtype_kv(dtype, dtype_kv)
        if not isinstance(causal, bool):
            raise UsageFault(f"causal is {causal!r}", "a mask is there or not", "use true or false")
        scale = dim**-0.5 if scale is None else _scale(scale, dtype)
        shift, texts = _shift(seq, seq_kv, causal, causal_shift), (_text("mask", mask), _text("score", score))
        if texts != (None, None) and shift != seq_kv - seq:
            why = "their q counts bottom-right, and a causal mask that is shifted would count otherwise"
            instead = f'leave causal_shift out, or write the mask "k <= q + {shift - seq_kv + seq}"'
            raise UsageFault("causal_shift beside a mask or score", why, instead)
        if texts[0] is not None and is_causal(texts[0]):  # most kernels and peers know that one by its name
            causal, texts = True, (None, texts[1])
        sizes_of = (batch, heads, seq, dim, heads_kv, seq_kv)
        plain = cls(*sizes_of, dtype, causal, scale, shift, *texts, sinks=_text("sinks", sinks), head_dim_v=dim_v, dtype_kv=dtype_kv)
        if page_size or lengths:
            plain = plain._paged(page_size or 0, lengths, block_table)
        return replace(plain, tensors=_tensors(plain, tensors)) if plain.formulas or tensors or plain.descaled else plain

    def _paged(self, page_size: int, lengths: tuple[int, ...], block_table: object) -> Problem:
        """This problem in pages, of lengths or seq_kv keys a sequence. Raises UsageFault: see :meth:`of`."""
        if not page_size:
            why = "a tensor of keys in one piece has as many for each"
            raise UsageFault("keys of each sequence without pages", why, "give --page-size 64, or one --seq-kv")
        if page_size not in PAGE_SIZES:
            known = ", ".join(map(str, PAGE_SIZES))
            raise UsageFault(f"page_size is {page_size!r:.40}", f"a page has {known} keys", "use --page-size 64")
        if lengths and len(lengths) != self.batch:
            why = f"the batch is {self.batch}"
            raise UsageFault(f"keys of {len(lengths)} sequences", why, f"give --seq-kv {self.batch} numbers, or --batch {len(lengths)}")
        if self.causal_shift != self.default_shift:
            why = "each sequence has its own: its last query is at its last key"
            raise UsageFault("causal_shift beside a page_size", why, "leave causal_shift out")
        for formula in self.formulas.values():
            if named := next((tensor.name for tensor in formula.tensors if not {"q", "q_row", "k"}.isdisjoint(tensor.indices)), None):
                why = "a sequence's positions are its own"
                raise UsageFault(f"{named} by position beside a page_size", why, f"index {named} by b or h, or leave --page-size out")
        made = replace(self, page_size=page_size, lengths=lengths or (self.seq_kv,) * self.batch)
        if block_table is None:
            return made
        with told():
            table = checked(BLOCK_TABLE, "int32", (self.batch, -(-self.seq_kv // page_size)), block_table)
        made._refuse_pages(table)
        return replace(made, block_table=table)

    def _refuse_pages(self, table: Given) -> None:
        """Raise UsageFault where the keys of a sequence are in a page that there is none of, or in one with those of another."""
        seen: dict[int, tuple[int, int]] = {}
        for at in ((b, i) for b, length in enumerate(self.lengths) for i in range(-(-length // self.page_size))):
            page = int(table.values[at])
            what = f"{BLOCK_TABLE}[{at[0]}, {at[1]}] is {page}"
            if not 0 <= page < self.pages:
                raise UsageFault(what, f"the pool has the pages 0 to {self.pages - 1}", "nothing was read: correct the table")
            if page in seen:
                raise UsageFault(what, f"so is {BLOCK_TABLE}{list(seen[page])}", "give each its own page: here no two have the same keys")
            seen[page] = at

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> str:
        """The data folder's name, B2_H8_S512_D64, with a suffix for what is not the default of head_dim_v, heads_kv, seq_kv, dtype, dtype_kv."""
        name = f"B{self.batch}_H{self.heads_q}_S{self.seq_q}_D{self.head_dim}"
        if self.has_own_dim_v:
            name += f"_Dv{self.head_dim_v}"
        if self.heads_kv != self.heads_q:
            name += f"_Hkv{self.heads_kv}"
        if self.seq_kv != self.seq_q:
            name += f"_Skv{self.seq_kv}"
        if self.dtype != "float32":
            name += f"_{self.dtype}"
        if self.has_own_dtype_kv:
            name += f"_KV{self.dtype_kv}"
        return name

    def __repr__(self) -> str:
        return f"Problem({self.describe()})"

    @classmethod
    def from_folder(cls, name: str) -> Problem | None:
        """The problem of a folder's name, without mask and scale; None where the name is not of that form. Raises UsageFault as of."""
        match = _FOLDER.fullmatch(name)
        if not match:
            return None
        b, h, s, d, dv, hkv, skv, dtype, dtype_kv = match.groups()
        heads_kv, seq_kv, dim_v = (int(given) if given else None for given in (hkv, skv, dv))
        return cls.of(int(b), int(h), int(s), int(d), heads_kv, seq_kv, dtype or "float32", dim_v=dim_v, dtype_kv=dtype_kv)

    def with_(self, **changes: object) -> Problem:
        """A copy with some fields changed. A default causal_shift follows the lengths, a default head_dim_v head_dim and a default dtype_kv
        dtype; others are kept. None asks for the default.

        Raises UsageFault as :meth:`of` does, TypeError for a field that there is none of.
        """
        p = replace(self, **changes)  # type: ignore[arg-type]  # of() checks the values
        shift = p.causal_shift if "causal_shift" in changes or self.causal_shift != self.default_shift else None
        keys: int | tuple[int, ...] = p.seq_kv
        if p.page_size and self.lengths and "seq_kv" not in changes:  # of a larger batch they come round
            keys = tuple(itertools.islice(itertools.cycle(self.lengths), p.batch))
        sizes = (p.batch, p.heads_q, p.seq_q, p.head_dim, p.heads_kv, keys)
        dim_v = p.head_dim_v if "head_dim_v" in changes or self.has_own_dim_v else None
        table = p.block_table if BLOCK_TABLE in changes or {"batch", "seq_kv", "page_size"}.isdisjoint(changes) else None
        dtype_kv = p.dtype_kv if "dtype_kv" in changes or self.has_own_dtype_kv else None
        paged = (p.page_size, table, dtype_kv)
        made = Problem.of(*sizes, p.dtype, p.causal, p.scale, shift, p.mask, p.score, p.tensors, p.sinks, dim_v, *paged)
        return replace(made, lengths=()) if self.page_size and not self.lengths else made

    def describe(self) -> str:
        """One line for messages: the folder's name, and causal, causal_shift, scale, mask and score where they are not the default."""
        text = self.folder
        if self.causal:
            text += " causal"
        if self.causal_shift != self.default_shift:
            text += f" causal_shift={self.causal_shift}"
        if self.scale != self.head_dim**-0.5:
            text += f" scale={self.scale:g}"
        if self.page_size:
            text += f" page_size={self.page_size}" + f" seq_kv={self.keys_text}" * bool(self.keys_text)
        return text + "".join(f' {name}="{given}"' for name, given in self._texts if given)

    # -- shapes -------------------------------------------------------------------------------------------------------

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor by its name: (batch, heads, rows, head_dim or head_dim_v); logsumexp is (batch, heads_q, seq_q)."""
        if tensor == "logsumexp":
            return (self.batch, self.heads_q, self.seq_q)
        if tensor == DSINKS:
            return (1, self.heads_q, 1)
        if tensor in ("K", "V", "dK", "dV"):
            return (self.batch, self.heads_kv, self.seq_kv, self.row_length(tensor))
        return (self.batch, self.heads_q, self.seq_q, self.row_length(tensor))

    def row_length(self, tensor: str) -> int:
        """Elements of a row of a tensor, but of logsumexp: head_dim, or head_dim_v."""
        return self.head_dim_v if tensor in OF_V else self.head_dim

    @property
    def has_own_dim_v(self) -> bool:
        """Whether V has another head dim than Q and K."""
        return self.head_dim_v != self.head_dim

    @property
    def widest(self) -> int:
        """The larger head dim."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def has_own_dtype_kv(self) -> bool:
        """Whether K and V are stored in another type than Q: a cache of 8 bits."""
        return self.dtype_kv != self.dtype

    @property
    def descaled(self) -> tuple[str, ...]:
        """The tensors that have DESCALES."""
        return tuple(DESCALES) if self.is_float8 else ("K", "V") if self.has_own_dtype_kv else ()

    @property
    def is_float8(self) -> bool:
        """Whether its elements, Q's too, are of 8 bits, with descales."""
        return DTYPE_BYTES[self.dtype] == 1

    def tensor_dtype(self, tensor: str) -> str:
        """The storage type of a tensor: dtype, of K and V dtype_kv; logsumexp is float32 (float64 in a float64 problem), O of 8 bits bfloat16."""
        if tensor in ("K", "V"):
            return self.dtype_kv
        if tensor in ("logsumexp", DSINKS):
            return "float64" if self.dtype == "float64" else "float32"
        return "bfloat16" if tensor == "O" and self.is_float8 else self.dtype

    def tensor_bytes(self, tensor: str) -> int:
        """Bytes of a tensor, as an exact Python integer (numpy's product would overflow silently)."""
        return math.prod(self.shape(tensor)) * DTYPE_BYTES[self.tensor_dtype(tensor)]

    # -- pages --------------------------------------------------------------------------------------------------------

    @property
    def keys_text(self) -> str:
        """The keys of each sequence as --seq-kv takes them, "700,300"; empty where all have seq_kv."""
        return ",".join(map(str, self.lengths)) if set(self.lengths) - {self.seq_kv} else ""

    @property
    def pages(self) -> int:
        """Pages of the pool: a quarter more than sequences use, one at least."""
        used = sum(-(-length // self.page_size) for length in self.lengths)
        return used + max(1, used // 4)

    @property
    def paging(self) -> tuple[Given, ...]:
        """block_table and cache_seqlens, in this order; without values where lengths are not known; none without a page_size.

        Pages are drawn in a random order, the same for equal problems. Behind a sequence's last page stand pages that no sequence has.
        """
        return _paging(self) if self.page_size else ()

    # -- cost ---------------------------------------------------------------------------------------------------------

    def row_pitch(self, tensor: str) -> int:
        """Elements from one row of a tensor in device memory to the next: rows start 16-byte aligned, so head_dim = 59 keeps 128-bit loads."""
        if tensor in ("logsumexp", DSINKS):
            return 1
        size = DTYPE_BYTES[self.tensor_dtype(tensor)]
        return -(-self.row_length(tensor) * size // 16) * 16 // size

    @property
    def default_shift(self) -> int:
        """The causal_shift of FlashAttention's bottom-right alignment: every key is visible to the last query."""
        return self.seq_kv - self.seq_q

    # -- mask and score -----------------------------------------------------------------------------------------------

    @property
    def formulas(self) -> dict[str, Formula]:
        """Its mask, score and sinks, parsed, by these names; without those that it has none of."""
        return {name: parsed(name, text) for name, text in self._texts if text is not None}

    @property
    def _texts(self) -> tuple[tuple[str, str | None], ...]:
        return ("mask", self.mask), ("score", self.score), ("sinks", self.sinks)

    def writes(self, pass_: str) -> tuple[str, ...]:
        """The tensors that a pass writes: WRITES, and with sinks their gradient."""
        return WRITES[pass_] + (DSINKS,) * (pass_ == "backward" and self.sinks is not None)

    @property
    def record(self) -> dict[str, object]:
        """Its fields for JSON, those of pages where it has some; of tensors, where there are any, their hashes by name."""
        left_out = ("tensors", BLOCK_TABLE, *("page_size", "lengths") * (not self.page_size), *("dtype_kv",) * (not self.has_own_dtype_kv))
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return fields | self.hashes

    @property
    def hashes(self) -> dict[str, object]:
        """Of its tensors, where there are any that have values: `tensors`, their hashes by name."""
        own = (self.block_table,) if self.block_table else ()
        worth_one = DESCALES.values() if self.descales == {1.0} else ()
        known = {each.name: each.digest for each in (*self.tensors, *own) if each.digest and each.name not in worth_one}
        return {"tensors": known} if known else {}

    @property
    def descales(self) -> set[float]:
        """The values of its DESCALES that it knows."""
        known = [each.values for each in self.tensors if each.name in DESCALES.values() and each.values is not None]
        return {float(value) for values in known for value in values.flat}

    def values(self, xp: Any = None) -> dict[str, Any]:
        """The values of its tensors by name, arrays of xp (numpy by default). Raises UsageFault where there are none."""
        if unknown := [each.name for each in self.tensors if each.values is None]:
            why, name = "a mask or score names it as a tensor", unknown[0]
            raise UsageFault(f"no values for {name}", why, f"give them: --tensor {name}=FILE.npy")
        return {each.name: each.values if xp is None else xp.asarray(each.values) for each in self.tensors}

    def integers_below(self, limit: int, kind: str = "") -> bool:
        """Whether every integer in its mask and score, or in that of a kind, has a magnitude below a limit."""
        names = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv")
        b, h, h_kv, seq_q, seq_kv = (getattr(self, name) for name in names)
        sizes = {"b": b, "h": h, "h_kv": h_kv, "q": max(seq_q, seq_kv), "k": seq_kv, "seq_q": seq_q, "seq_kv": seq_kv}
        return all(formula.below(limit, sizes) for formula in self.formulas.values() if kind in ("", formula.kind))

    def depends_on(self, *names: str) -> bool:
        """Whether its mask or score, or what an element of 8 bits is worth, is another for another value of one of these names: b, h, …"""
        own = ("b" in names and bool(self.keys_text)) or (len(self.descales) > 1 and not {"b", "h", "h_kv"}.isdisjoint(names))
        return own or any(not formula.names.isdisjoint(names) for formula in self.formulas.values())

    @property
    def pairs(self) -> int:
        """The (batch, query head, query, key) that the masks leave, counted exactly."""
        if self.mask is not None:
            return _counted(self.with_(score=None, sinks=None, dtype="float32", dtype_kv=None, head_dim=1, head_dim_v=1, scale=None))
        if self.lengths:
            shorter = (replace(self, lengths=(), seq_kv=n, causal_shift=n - self.seq_q) for n in self.lengths)
            return self.heads_q * sum(each.visible_pairs for each in shorter)
        return self.batch * self.heads_q * self.visible_pairs

    @property
    def visible_pairs(self) -> int:
        """The (query, key) pairs of one head that the causal mask leaves: seq_q * seq_kv without one."""
        if not self.causal:
            return self.seq_q * self.seq_kv
        first = max(0, -self.causal_shift)  # no key is visible to the queries before it
        full = min(self.seq_q, self.seq_kv - self.causal_shift)  # every key is visible to the queries from it on
        rising = (full - first) * (first + full + 2 * self.causal_shift + 1) // 2  # q + causal_shift + 1 keys are visible to query q
        return rising + (self.seq_q - full) * self.seq_kv

    def flops(self, pass_: str) -> int:
        """Floating-point operations of a pass ("forward", "backward" or "both"), as FlashAttention counts them.

        Dao 2023, arXiv 2307.08691, section 4.1: two products forward, of 2 * head_dim * pairs each (P V: head_dim_v); five backward,
        three of head_dim and two of head_dim_v. pairs is exact where the paper halves seq_q * seq_kv for a causal mask.
        """
        forward, backward = self.flops_a_pair
        return self.pairs * {"forward": forward, "backward": backward, "both": forward + backward}[pass_]

    @property
    def flops_a_pair(self) -> tuple[int, int]:
        """Those of a visible pair, forward and backward."""
        return 2 * (self.head_dim + self.head_dim_v), 2 * (3 * self.head_dim + 2 * self.head_dim_v)

    def bytes(self, pass_: str) -> int:
        """The least HBM traffic of a pass ("forward", "backward" or "both") in bytes: every input read once, every output written once.

        Of K and V in pages the keys that sequences have.
        """
        if pass_ == "both":
            return self.bytes("forward") + self.bytes("backward")
        whole = sum(self.tensor_bytes(t) for t in READS[pass_] + self.writes(pass_))
        absent = self.batch * self.seq_kv - sum(self.lengths) if self.lengths else 0
        return whole - absent * self.heads_kv * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype_kv]


@lru_cache(maxsize=64)
def _paging(problem: Problem) -> tuple[Given, ...]:
    """See Problem.paging."""
    import numpy as np

    shape = (problem.batch, -(-problem.seq_kv // problem.page_size))
    table: object = problem.block_table
    if table is None and problem.lengths:
        pages, places = iter(np.random.default_rng(problem.pages).permutation(problem.pages).tolist()), np.empty(shape, np.int32)
        used = [-(-length // problem.page_size) for length in problem.lengths]
        for b, count in enumerate(used):
            places[b, :count] = [next(pages) for _ in range(count)]
        unused = list(pages)
        for b, count in enumerate(used):
            places[b, count:] = np.resize(unused, shape[1] - count)
        table = places
    made = checked(BLOCK_TABLE, "int32", shape, table), checked(CACHE_SEQLENS, "int32", shape[:1], problem.lengths or None)
    return tuple(replace(each, sorted=False) for each in made)


def _lengths(seq_kv: object) -> tuple[tuple[int, ...], Any]:
    """The keys of each sequence where seq_kv is a list, else none, and the most. Raises UsageFault for what is no size."""
    if not isinstance(seq_kv, list | tuple):
        return (), seq_kv
    lengths = tuple(_size("seq-kv", each) for each in seq_kv)
    return lengths, max(lengths, default=0)


def _size(name: str, value: object) -> int:
    """A size as a Python integer, also of a numpy integer. Raises UsageFault for anything else and beyond the bounds."""
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # that is what it tells
    except TypeError:
        size = -1
    if 1 <= size <= LARGEST:
        return size
    if size > LARGEST:
        raise UsageFault(f"{name} is above 2^{size.bit_length() - 1}", f"every size is at most {LARGEST}", f"use a smaller --{name}")
    option = name.replace("heads-kv", "kv-heads")
    kind = "at least 1" if type(value) is int else "an integer"
    raise UsageFault(f"{name} is {value!r:.40}", f"every size of an attention problem is {kind}", f"use --{option} 1 or more")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What is wrong with the text of a mask or score, as a UsageFault."""
    try:
        yield
    except Mistake as wrong:
        raise UsageFault(wrong.what, wrong.why, wrong.hint) from None


def _dtype(given: object, option: str = "dtype", usual: str = "float32") -> str:
    """The name of a storage type, also by its SPELLINGS. Raises UsageFault for another."""
    dtype = SPELLINGS.get(given, given) if isinstance(given, str) else given
    if isinstance(dtype, str) and dtype in DTYPE_BYTES:
        return dtype
    known = f"known: {', '.join(DTYPE_BYTES)}, also as {', '.join(SPELLINGS)}"
    raise UsageFault(f"unknown {option} {given!r}", known, f"use --{option} {usual}")


def _dtype_kv(dtype: str, given: object) -> str:
    """The storage type of K and V. Raises UsageFault for one that is neither dtype nor of CACHE_DTYPES."""
    dtype_kv = _dtype(given, "kv-dtype", "float8_e4m3")
    if dtype_kv != dtype and dtype_kv not in CACHE_DTYPES.get(dtype, ()):
        why = f"beside Q in {' or '.join(CACHE_DTYPES)} they may be float8_e4m3"
        raise UsageFault(
            f"K and V in {dtype_kv} beside Q in {dtype}", why, "use --dtype bfloat16 --kv-dtype float8_e4m3, or leave --kv-dtype out"
        )
    return dtype_kv


def _text(kind: str, given: object) -> str | None:
    """A mask or score in its one spelling. Raises UsageFault where it is none."""
    if given is None:
        return None
    with told():
        return parsed(kind, given).text


def _tensors(problem: Problem, values: Mapping[str, object] | tuple[Given, ...]) -> tuple[Given, ...]:
    """The tensors that a problem's texts name. Raises UsageFault: see :meth:`Problem.of`."""
    found: dict[str, Given] = {}
    known = values if isinstance(values, Mapping) else {each.name: each for each in values}
    for name in (DESCALES[each] for each in problem.descaled):
        found[name] = _descale(name, (problem.batch, problem.heads_kv), known.get(name, 1.0))
    for formula in problem.formulas.values():
        for tensor in formula.tensors:
            shape = tuple(int(getattr(problem, EXTENTS[index])) for index in tensor.indices)
            with told():
                made = checked(tensor.name, "int32" if tensor.integer else "float32", shape, known.get(tensor.name))
            if found.setdefault(tensor.name, made) != made:
                why = f"of {made.dtype} {shape} here, of {found[tensor.name].dtype} {found[tensor.name].shape} before"
                raise UsageFault(f"{tensor.name} is used as two tensors", why, "give them two names")
    if isinstance(values, Mapping) and (unknown := [name for name in values if name not in found]):
        raise UsageFault(f"no text names {unknown[0]}", f"they name {', '.join(found) or 'none'}", "leave it out, or name it: slope[h]")
    return tuple(found.values())


def _descale(name: str, shape: tuple[int, ...], given: object) -> Given:
    """A tensor of DESCALES. given: its values, or one for all; a Given of another shape counts as one where its values are equal."""
    import numpy as np

    values: Any = given.values if isinstance(given, Given) else given
    if values is not None and np.size(values) and np.ptp(values) == 0:
        given = np.full(shape, np.ravel(values)[0])
    with told():
        return checked(name, "float32", shape, Given(name, "float32", shape) if values is None else given)


#: Pairs whose mask is evaluated at a time.
_CHUNK = 1 << 20


@lru_cache(maxsize=64)
def _counted(problem: Problem) -> int:
    """The visible pairs of a problem with a mask: all of them are looked at, of one batch or head where the mask is the same for all."""
    import numpy as np  # a problem without a mask needs none, and --help starts without it

    formula, group = problem.formulas["mask"], problem.heads_q // problem.heads_kv
    batches = problem.batch if "b" in formula.names or problem.keys_text else 1
    heads = problem.heads_q if formula.names & {"h", "h_kv"} else 1
    rows = max(1, _CHUNK // problem.seq_kv)
    total = 0
    for b, h in np.ndindex(batches, heads):
        seq_kv = problem.lengths[b] if problem.lengths else problem.seq_kv
        k = np.arange(seq_kv)
        for first in range(0, problem.seq_q, rows):
            q = np.arange(first, min(first + rows, problem.seq_q))[:, None] + seq_kv - problem.seq_q
            names: dict[str, Any] = {"b": b, "h": h, "h_kv": h // group, "q": q, "k": k}
            names |= {"seq_q": problem.seq_q, "seq_kv": seq_kv, "q_row": q - seq_kv + problem.seq_q}
            seen = formula.value(np, names, tensors=problem.values())
            seen = np.broadcast_to(seen & (k <= q) if problem.causal else seen, (len(q), len(k)))
            total += int(np.count_nonzero(seen))
    return total * (problem.batch // batches) * (problem.heads_q // heads)


def _scale(value: object, dtype: str) -> float:
    """A softmax scale. Raises UsageFault where it is no number, or not finite in float32, in which kernels take it.

    Subnormals of float32 are 0 to a GPU. Here they are before a kernel looks at it: 0 is a case of its own, since 0 times the -inf of a
    masked score is NaN."""
    try:
        scale = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # of an integer
        scale = math.inf
    if not abs(scale) <= FLOAT32_MAX:
        raise UsageFault(
            f"scale is {value!r:.40}", "the softmax scale must be finite, also in float32", "leave --scale out for 1/sqrt(dim)"
        )
    return 0.0 if abs(scale) < FLOAT32_MIN and dtype != "float64" else scale


def _shift(seq_q: int, seq_kv: int, causal: bool, given: object) -> int:
    """The causal_shift a problem stores: see :meth:`Problem.of`. Raises UsageFault where it is no integer."""
    if given is None:
        return seq_kv - seq_q
    try:
        shift = operator.index(given)  # type: ignore[arg-type]  # that is what it tells
    except TypeError:
        raise UsageFault(f"causal_shift is {given!r:.40}", "a mask is shifted by whole keys", "use an integer, or leave it out") from None
    return max(-seq_q, min(shift, seq_kv - 1)) if causal else seq_kv - seq_q
