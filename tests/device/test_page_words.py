"""The words of <fa/pages.cuh> on every backend: where a sequence's keys are, and which of them a block has."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from word_kernel import run

from harness.backends import Backend

BEFORE = """\
#define FA_PAGE_SIZE 16
#define FA_BLOCK_TABLE 0
#define FA_CACHE_SEQLENS 1
#include <fa/pages.cuh>"""
#: The lengths lie behind a table of 64 pages.
HELD = "    fa::Args mine = args;\n    mine.workspace[0] = args.K.data, mine.workspace[1] = static_cast<int*>(args.K.data) + 64;\n"


def test_a_sequence_has_its_own_length_and_pages(backend: Backend, tmp_path: Path) -> None:
    """fa::keys_of, at most seq_kv; fa::of_sequence; fa::key_row, whose table is not looked at behind the last key."""
    table = np.random.default_rng(0).permutation(60)[:20].reshape(4, 5).astype(np.int32)
    table[2, 1:] = 1 << 30  # of a key that its sequence does not have
    lengths = np.array([70, 80, 3, 1000], np.int32)
    body = (
        HELD
        + """\
    if (t < 4) {
        fa::Args own = fa::of_sequence(mine, t);
        out[t] = fa::keys_of(mine, t), out[4 + t] = own.seq_kv, out[8 + t] = own.causal_shift, out[12 + t] = own.seq_q;
        for (int key = 0; key < 80; ++key) {
            fa::Tensor pool{nullptr, 4096, 512, 32};
            auto* row = fa::key_row<unsigned char>(pool, mine, t, 3, key, own.seq_kv);
            out[16 + 80 * t + key] = unsigned(row - static_cast<const unsigned char*>(nullptr));
        }
    }"""
    )
    fields = {"batch": 4, "seq_q": 2, "seq_kv": 77, "causal_shift": 75}
    got = run(backend, tmp_path, body, b=np.concatenate([np.resize(table, 64), lengths]), before=BEFORE, fields=fields)
    keys = np.minimum(lengths, 77)
    assert got[:4].tolist() == got[4:8].tolist() == keys.tolist() and got[12:16].tolist() == [2] * 4
    assert got[8:12].astype(np.int32).tolist() == (keys - 2).tolist()
    for b, key in itertools.product(range(4), range(80)):
        page = int(table[b, key // 16]) if key < keys[b] else 0
        assert got[16 + 80 * b + key] == page * 4096 + 3 * 512 + key % 16 * 32, (b, key)


def shares(lengths: list[int], slots: int, keys: int) -> list[tuple[int, int, int, int]]:
    """What each slot has, (batch, part, parts, first), by the rule that share_of states, one sequence after another."""
    tiles = [max(0, (length - 1) // keys) for length in lengths]
    most = next(n for n in itertools.count(1) if sum(each // n for each in tiles) <= slots - len(lengths))
    parts = [each // most + 1 for each in tiles]
    found = [(b, part, count, sum(parts[:b])) for b, count in enumerate(parts) for part in range(count)]
    return found + [(-1, 0, 0, 0)] * (slots - len(found))


@pytest.mark.parametrize(
    "lengths, each",
    [([700, 33, 1300], 3), ([16] * 40, 1), ([1, 0, 100_000, 5], 8), (list(range(1, 4000, 57)), 2), ([2048] * 33, 4)],
)
def test_blocks_share_the_keys_of_all_sequences(backend: Backend, tmp_path: Path, lengths: list[int], each: int) -> None:
    """fa::share_of: every sequence has a slot and no part is lost; parts are as equal as slots allow, nearly. fa::even_share."""
    slots = each * len(lengths)
    body = (
        HELD
        + f"""\
    for (int slot = 0; slot < {slots}; ++slot) {{
        fa::Share its = fa::share_of<16>(mine, {slots}, slot), even = fa::even_share({each}, slot);
        if (t == 0) out[8 * slot] = its.batch, out[8 * slot + 1] = its.part, out[8 * slot + 2] = its.parts, out[8 * slot + 3] = its.first;
        if (t == 0) out[8 * slot + 4] = even.batch, out[8 * slot + 5] = even.part, out[8 * slot + 6] = even.parts, out[8 * slot + 7] = even.first;
    }}
    for (int batch = 0; batch < {len(lengths)}; ++batch) {{
        fa::Share its = fa::share_of<16>(mine, {slots}, batch, false);
        if (t == 0) out[8 * {slots} + 2 * batch] = its.parts, out[8 * {slots} + 2 * batch + 1] = its.first;
    }}"""
    )
    given = np.concatenate([np.zeros(64, np.int32), np.array(lengths, np.int32)])
    got = run(backend, tmp_path, body, b=given, before=BEFORE, fields={"batch": len(lengths), "seq_q": 1, "seq_kv": 1 << 20}).astype(
        np.int32
    )
    rows, of_batch = got[: 8 * slots].reshape(slots, 8), got[8 * slots : 8 * slots + 2 * len(lengths)].reshape(-1, 2)
    found = [tuple(row[:4]) for row in rows.tolist()]
    by_rule = shares(lengths, slots, 16)
    firsts = {batch: (parts, first) for batch, _, parts, first in found if batch >= 0}
    assert [tuple(row) for row in of_batch.tolist()] == [firsts[batch] for batch in range(len(lengths))]
    assert sorted(firsts) == list(range(len(lengths)))
    for batch, (parts, first) in firsts.items():
        assert found[first : first + parts] == [(batch, part, parts, first) for part in range(parts)]
    longest, best = (max(-(-lengths[b] // 16) / parts for b, _, parts, _ in each if b >= 0) for each in (found, by_rule))
    assert longest <= 2 * best, "a block has twice the keys that it could have"
    assert [tuple(row[4:]) for row in rows.tolist()] == [(s // each, s % each, each, s // each * each) for s in range(slots)]
