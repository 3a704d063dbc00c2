"""attention() on a cache in pages: block_table and cache_seqlens."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.torch_op import attention, explain  # noqa: E402

LENGTHS = [100, 1, 700, 333]


class Cache:
    """Keys and values of each sequence, and the same in pools of flash-attn's layout whose other places are NaN, in a random order."""

    def __init__(self, size: int, dtype: Any, device: Any, lengths: list[int], heads: int = 2, dim: int = 64) -> None:
        torch.manual_seed(0)
        columns = -(-max(lengths) // size) + 1
        self.size, self.table = size, torch.full((len(lengths), columns), 1 << 30, dtype=torch.int32, device=device)
        count = sum(-(-n // size) for n in lengths) + 3
        self.k, self.v = (torch.full((count, size, heads, dim), torch.nan, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.own = [tuple(torch.randn(n, heads, dim).to(device=device, dtype=dtype) for _ in range(2)) for n in lengths]
        free = torch.randperm(count).tolist()
        for b, pair in enumerate(self.own):
            for i in range(0, lengths[b], size):
                page = self.table[b, i // size] = free.pop()
                for pool, whole in zip((self.k, self.v), pair, strict=True):
                    pool[page, : min(size, lengths[b] - i)] = whole[i : i + size]

    def __call__(self, q: Any, **more: Any) -> Any:
        given = {"block_table": self.table, "cache_seqlens": self.lengths} | more
        return attention(q, self.k.transpose(1, 2), self.v.transpose(1, 2), return_lse=True, **given)

    def refuse_other(self, q: Any, got: tuple[Any, Any], **more: Any) -> None:
        """Each sequence alone, in float64."""
        for b, keys in enumerate(self.lengths.tolist()):
            k, v = (t[:keys].transpose(0, 1)[None].double().cpu() for t in self.own[b])
            wanted = attention(q[b : b + 1].double().cpu(), k, v, return_lse=True, kernel="naive", **more)
            for mine, exact, tolerance in zip(got, wanted, (1e-2, 1e-5), strict=True):
                torch.testing.assert_close(mine[b : b + 1].double().cpu(), exact.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size, dtype, seq, more", [
    (16, torch.bfloat16, 3, {}),
    (64, torch.float16, 1, {"window": 100, "softcap": 20.0}),
    (256, torch.bfloat16, 2, {"mask": "k % 3 != 1", "causal": False}),
])  # fmt: skip
def test_each_sequence_sees_its_own_keys(device: Any, size: int, dtype: Any, seq: int, more: dict[str, Any]) -> None:
    """O and logsumexp, of a window by each sequence's own last key too. NaN lies behind every last key, and the table ends in no page."""
    cache = Cache(size, dtype, device, LENGTHS)
    q = torch.randn(4, 8, seq, 64).to(device=device, dtype=dtype)
    options = {"causal": True} | more
    cache.refuse_other(q, cache(q, **options), **options)


def test_lengths_and_pages_may_change(device: Any) -> None:
    """In place, between calls; also to a sequence without a key, which gives 0 and -inf. And sinks."""
    cache = Cache(32, torch.bfloat16, device, LENGTHS)
    q = torch.randn(4, 4, 1, 64).to(device=device, dtype=torch.bfloat16)
    for lengths in ([100, 1, 700, 333], [7, 1, 650, 64]):
        cache.lengths.copy_(torch.tensor(lengths))
        cache.refuse_other(q, cache(q))
    swapped = cache.table.flip(0).contiguous()
    cache.own.reverse()
    cache.table, cache.lengths = swapped, cache.lengths.flip(0)
    cache.refuse_other(q, cache(q))
    cache.lengths[0] = 0
    o, lse = cache(q)
    assert not o[0].any() and (lse[0] == -torch.inf).all() and o[1:].all()
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0], device=device)
    torch.testing.assert_close(cache(q, sinks=sinks)[1][0, :, 0], sinks)


def test_explain_names_the_kernel_of_pages(device: Any) -> None:
    """auto has one for them; a cache that is none is refused as by attention."""
    cache = Cache(16, torch.float16, device, LENGTHS)
    q = torch.randn(4, 4, 1, 64).to(device=device, dtype=torch.float16)
    given = q, cache.k.transpose(1, 2), cache.v.transpose(1, 2)
    told = explain(*given, block_table=cache.table, cache_seqlens=cache.lengths, window=9)
    assert [chosen.kernel for chosen in told.passes.values()] == ["decode"]
    with pytest.raises(ValueError, match="block_table without cache_seqlens"):
        explain(*given, block_table=cache.table)


def test_in_torch_compile(device: Any) -> None:
    """One graph, whose values are those of a call."""
    cache = Cache(16, torch.float16, device, LENGTHS)
    q = torch.randn(4, 4, 1, 64).to(device=device, dtype=torch.float16)
    made = torch.compile(lambda q: cache(q)[0], backend="eager", fullgraph=True)
    assert torch.equal(made(q), cache(q)[0])


def test_a_graph_is_replayed_on_other_lengths(device: Any) -> None:
    """Captured once: block_table and cache_seqlens have other values in the same memory then."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs are a GPU's")
    cache = Cache(64, torch.bfloat16, device, LENGTHS)
    q = torch.randn(4, 8, 2, 64, device=device, dtype=torch.bfloat16)
    cache(q, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = cache(q, causal=True)
    for lengths in ([50, 1, 3, 333], [2, 1, 700, 1], LENGTHS):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        cache.refuse_other(q, made, causal=True)


@pytest.mark.parametrize("more, error, words", [
    ({"cache_seqlens": None}, ValueError, "block_table without cache_seqlens"),
    ({"block_table": None}, ValueError, "cache_seqlens without block_table"),
    ({"block_table": [[1]]}, TypeError, "block_table is a list"),
    ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, "for 4 sequences"),
    ({"cache_seqlens": torch.zeros(4)}, ValueError, "it has integers"),
    ({"kernel": "fa2"}, ValueError, "fa2_forward does not support a cache in pages"),
    ({"causal": True, "causal_shift": 3}, ValueError, "its last query is at its last key"),
    ({"mask": "doc[k] == 1", "tensors": {"doc": torch.zeros(768, dtype=torch.int32)}}, ValueError, "a sequence's positions are its own"),
    ({"page_table": 1}, TypeError, "it is called block_table here"),
])  # fmt: skip
def test_what_is_no_cache_is_refused(more: dict[str, Any], error: type[Exception], words: str) -> None:
    """With what it is, before anything runs."""
    cache = Cache(64, torch.bfloat16, torch.device("cpu"), LENGTHS)
    with pytest.raises(error, match=words):
        cache(torch.randn(4, 4, 1, 64, dtype=torch.bfloat16), **more)
    with pytest.raises(ValueError, match="a gradient through a cache in pages"):
        cache(torch.randn(4, 4, 1, 64, dtype=torch.bfloat16, requires_grad=True))


def test_a_page_out_of_range_is_refused_before_it_is_read() -> None:
    """On the CPU, where looking costs nothing: a page that there is none of, and more keys than the table has pages for."""
    cache = Cache(64, torch.bfloat16, torch.device("cpu"), LENGTHS)
    q = torch.randn(4, 4, 1, 64, dtype=torch.bfloat16)
    for page in (-1, len(cache.k), 2**32):  # the last is 0 in 32 bits
        table = cache.table.long()
        table[2, 10] = page
        with pytest.raises(ValueError, match=rf"block_table\[2, 10\] is {page}\nk has the pages 0 to {len(cache.k) - 1}"):
            cache(q, block_table=table)
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 769\nblock_table has 12 pages of 64 keys"):
        cache(q, cache_seqlens=torch.tensor([769, 1, 700, 333]))
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 4294967297\nblock_table has 12 pages"):
        cache(q, cache_seqlens=torch.tensor([1, 2**32 + 1, 700, 333]))


@pytest.mark.parametrize("more", [{}, {"window": 9}])
def test_vmap_over_queries_and_lengths(device: Any, more: dict[str, Any]) -> None:
    """A call for each slice: queries and lengths of their own, one cache for all."""
    cache = Cache(16, torch.bfloat16, device, [40, 20])
    q, lengths = torch.randn(3, 2, 4, 1, 64).to(device, torch.bfloat16), torch.tensor([[40, 20], [7, 1], [33, 16]], dtype=torch.int32)
    got = torch.vmap(lambda q, lengths: cache(q, cache_seqlens=lengths, causal=True, **more))(q, lengths.to(device))
    for i in range(3):
        for mine, alone in zip(got, cache(q[i], cache_seqlens=lengths[i].to(device), causal=True, **more), strict=True):
            assert torch.equal(mine[i], alone)
