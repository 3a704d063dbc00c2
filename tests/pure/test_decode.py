"""decode's sweep, which takes part of too many problems; problems with a cache in pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness import peers
from harness.fault import UsageFault
from harness.kernel import catalogue, planner
from harness.partition import Partition
from harness.problem import DTYPE_BYTES, PAGE_SIZES, Problem
from harness.verbs import sweep
from harness.verbs.verify.cases import Case
from harness.verbs.verify.fuzz import formed

GB = 1e9
VALUES = ((1, 4, 16, 64), (1024, 8192, 32768, 131072), (1, 4, 8, 16), (1, 4, 8), (64, 128, 256))


def test_the_sweep_has_all_pairs() -> None:
    """Every two values of batch, keys, queries, group and head dim occur together, in some hundred problems that a run has time for."""
    problems = [problem for _, problem in sweep.load("decode").shapes]
    rows = [(p.batch, p.seq_kv, p.seq_q, p.heads_q // p.heads_kv, p.head_dim, p.dtype_kv) for p in problems]
    assert {row[:-1] for row in rows if row[-1] != "bfloat16"} < {row[:-1] for row in rows if row[-1] == "bfloat16"}
    assert 90 <= len(rows) == len(set(rows)) <= 110
    for (i, some), (j, others) in itertools.combinations(enumerate(VALUES), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(some, others)), (i, j)


def test_the_sweep_flushes_what_the_cache_would_hold() -> None:
    """Cold times are taken of all problems whose K and V are no larger than 1.5 L2 caches of an H200, of no others; none has over 2.2 GB."""
    found = sweep.load("decode")
    for test, p in found.shapes:
        read = 2 * p.batch * p.heads_kv * p.seq_kv * p.head_dim * DTYPE_BYTES[p.dtype_kv]
        assert (read < 0.075 * GB) == ("cold" in found.measures(test)) and read < 2.2 * GB, test


PAGED = Problem.of(3, 4, 2, 64, 2, [700, 33, 1300], "bfloat16", True, page_size=16)


def test_a_paged_problem_counts_by_sequence() -> None:
    """Operations and bytes are those of three problems of one sequence each; a window is one of each sequence's own last keys."""
    for mask in (None, "0 <= q - k and q - k <= 50"):
        paged = PAGED.with_(mask=mask)
        own = [Problem.of(1, 4, 2, 64, 2, keys, "bfloat16", True, mask=mask) for keys in (700, 33, 1300)]
        assert paged.flops("forward") == sum(each.flops("forward") for each in own)
        assert paged.bytes("forward") == sum(each.bytes("forward") for each in own)
    assert (PAGED.seq_kv, PAGED.lengths, PAGED.keys_text) == (1300, (700, 33, 1300), "700,33,1300")
    assert PAGED.with_(batch=5).lengths == (700, 33, 1300, 700, 33) and PAGED.with_(seq_kv=9).keys_text == ""
    assert PAGED.depends_on("b") and not PAGED.with_(seq_kv=9).depends_on("b")


def test_every_key_has_a_place_of_its_own_in_the_pool() -> None:
    """Pages in a random order, the same every time, each in the table once, and some that no sequence has; behind a last page those."""
    table, lengths = PAGED.paging
    used = [44, 3, 82]
    places = np.concatenate([table.values[b, :count] for b, count in enumerate(used)])
    assert lengths.values.tolist() == [700, 33, 1300] and PAGED.pages == 129 + 32
    assert len(set(places.tolist())) == sum(used) and set(places.tolist()) <= set(range(PAGED.pages))
    assert (np.diff(places) != 1).any() and PAGED.paging == PAGED.with_().paging
    rest = {int(page) for b, count in enumerate(used) for page in table.values[b, count:]}
    assert rest and rest.isdisjoint(places.tolist()) and rest <= set(range(PAGED.pages))


@pytest.mark.parametrize("page, why", [(161, "the pool has the pages 0 to 160"), (-1, "the pool has"), (None, "each its own page")])
def test_a_table_out_of_range_is_refused(page: int | None, why: str) -> None:
    """Also one page for two sequences; behind a sequence's last key nothing is looked at."""
    table = PAGED.paging[0].values.copy()
    table[1, 3:] = 1 << 20
    assert PAGED.with_(block_table=table).paging[0].values is not None
    table[1, 2] = table[0, 0] if page is None else page
    with pytest.raises(UsageFault, match=why) as caught:
        PAGED.with_(block_table=table)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "of, why",
    [
        ({"page_size": 48}, "a page has 16, 32, 64, 128, 256 keys"),
        ({"page_size": 64, "seq_kv": [5, 6]}, "the batch is 3"),
        ({"seq_kv": [5, 6, 7]}, "as many for each"),
        ({"page_size": 64, "seq_kv": [5, 0, 7]}, "at least 1"),
        ({"page_size": 64, "causal": True, "causal_shift": 0}, "its last query is at its last key"),
        ({"page_size": 64, "mask": "doc[b, k] == 1"}, "positions are its own"),
    ],
)
def test_what_is_no_paged_problem(of: dict[str, Any], why: str) -> None:
    """Each with a reason, exit code 2."""
    with pytest.raises(UsageFault, match=why) as caught:
        Problem.of(3, 4, 2, 64, 2, **{"seq_kv": 100, "dtype": "bfloat16"} | of)
    assert caught.value.exit_code == 2


def test_decode_alone_takes_pages() -> None:
    """All other kernels and peers refuse them before anything runs, with exit code 2; kernels name it."""
    problem, seen = PAGED.with_(mask=None), 0
    for kernel in catalogue():
        if kernel.paged:
            planner.refuse(kernel, problem)
            assert kernel.name == "decode"
        elif kernel.pass_ == "forward" and "bfloat16" in kernel.dtypes and kernel.gqa and kernel.cross and kernel.causal:
            with pytest.raises(UsageFault, match="does not support a cache in pages") as caught:
                planner.refuse(kernel, problem)
            assert caught.value.exit_code == 2 and "decode" in caught.value.hint
            seen += 1
    assert seen > 10
    with pytest.raises(UsageFault, match="given K and V in one piece"):
        peers.find("torch-cudnn").refuse(problem, "forward")  # type: ignore[union-attr]
    with pytest.raises(UsageFault, match="in pages over several ranks"):
        Partition.of(problem, 2)


def test_a_case_of_pages_is_a_word() -> None:
    """What verify prints makes the same case; some of a fuzz have pages, with keys of each sequence."""
    text = "B2_H2_S3_D64_Skv700_bfloat16,causal,page=16,keys=700 33"
    assert Case.parse(text).text() == text and Case.parse(text).problem.lengths == (700, 33)
    assert Case.parse(text.removesuffix(",keys=700 33")).problem.lengths == (700, 700)
    with pytest.raises(UsageFault, match="is no case"):
        Case.parse(text + " x")
    decode = next(kernel for kernel in catalogue() if kernel.paged)
    drawn = [formed(decode, replace(Case.parse("B3_H2_S3_D64_Skv700_bfloat16,causal"), seed=seed)).problem for seed in range(40)]
    assert {problem.page_size for problem in drawn} == {0, *PAGE_SIZES} and any(problem.keys_text for problem in drawn)
