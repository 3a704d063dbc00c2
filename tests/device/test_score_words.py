"""The words of <fa/score.cuh> on every backend: what a kernel calls, and what the text of a mask or score is made of.

Texts of every form are compared with numpy in tests/pure/test_formula.py, where this header is C++ of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from word_kernel import run

from harness.backends import Backend
from harness.formula import parsed

SEQ_Q, SEQ_KV = 12, 20
FIELDS = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": SEQ_Q, "seq_kv": SEQ_KV, "causal_shift": SEQ_KV - SEQ_Q}
MASK, SCORE = parsed("mask", "q - k < 5 and doc[k] != 2"), parsed("score", "3.0 * tanh(s / 3.0) + 0.5 * h_kv")
DOCUMENTS = np.arange(SEQ_KV, dtype=np.int32) // 6
BEFORE = f"""\
#define FA_INTEGER int32_t
#define FA_TENSORS 1
#define FA_TENSOR_doc Table<0,1>{{}}
#define FA_MASK {MASK.cpp()}
#define FA_SCORE {SCORE.cpp()}
#define FA_SCORE_SLOPE {SCORE.derivative().cpp()}
#include <fa/score.cuh>"""
HELD = "    fa::Args mine = args;\n    mine.workspace[0] = args.K.data;\n"


def test_pairs(backend: Backend, tmp_path: Path) -> None:
    """fa::hidden, fa::score_of and fa::slope_of of pairs, those beyond the tensors hidden; fa::pair_of counts q bottom-right."""
    body = (
        HELD
        + """\
    for (int query = 0; query < 14; ++query) {
        const float s = 0.25f * query - t / 8.0f;
        out[32 * query + t] = fa::hidden(mine, 0, 2, query, t);
        out[448 + 32 * query + t] = __float_as_uint(fa::score_of(mine, 0, 2, query, t, s));
        out[896 + 32 * query + t] = __float_as_uint(fa::slope_of(mine, 0, 2, query, t, s));
    }
    if (t == 0) out[1344] = fa::pair_of(mine, 0, 2, 3, 4).q;"""
    )
    got = run(backend, tmp_path, body, b=DOCUMENTS, before=BEFORE, fields=FIELDS)
    query, key = np.arange(14)[:, None], np.arange(32)[None, :]
    seen = (query + SEQ_KV - SEQ_Q - key < 5) & (np.resize(DOCUMENTS, 32) != 2) & (query < SEQ_Q) & (key < SEQ_KV)
    assert np.array_equal(got[:448].reshape(14, 32), ~seen)
    s = 0.25 * query - key / 8.0
    np.testing.assert_allclose(got[448:896].view(np.float32).reshape(14, 32), 3 * np.tanh(s / 3) + 0.5, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[896:1344].view(np.float32).reshape(14, 32), 1 - np.tanh(s / 3) ** 2, rtol=1e-5, atol=1e-6)
    assert got[1344] == 3 + SEQ_KV - SEQ_Q


def test_tiles(backend: Backend, tmp_path: Path) -> None:
    """fa::visible_in of tiles of 4 x 4, which ends where the tensors do; fa::next_keys goes to the next that may be visible."""
    body = (
        HELD
        + """\
    const int query = t % 3 * 4, key = t / 3 * 4;
    if (t < 15) {
        fa::Visible tile = fa::visible_in(mine, 0, 2, query, 4, key, 4);
        out[3 * t] = tile.may, out[3 * t + 1] = tile.must, out[3 * t + 2] = fa::next_keys<4>(mine, 0, 2, query, 4, key, 20);
    }"""
    )
    got = run(backend, tmp_path, body, b=DOCUMENTS, before=BEFORE, fields=FIELDS)[:45].reshape(5, 3, 3)
    query, key = np.arange(SEQ_Q)[:, None], np.arange(SEQ_KV)[None, :]
    seen = ((query + SEQ_KV - SEQ_Q - key < 5) & (DOCUMENTS != 2)).reshape(3, 4, 5, 4).transpose(2, 0, 1, 3)
    assert np.array_equal(got[..., 0], seen.any((2, 3))) and np.array_equal(got[..., 1], seen.all((2, 3)))
    for q in range(3):
        assert got[:, q, 2].tolist() == [next((4 * k for k in range(first, 5) if seen[k, q].any()), 20) for first in range(5)]


def test_tiles_of_several_heads(backend: Backend, tmp_path: Path) -> None:
    """fa::visible_in of heads 1 and 2, each of which sees four keys of its own: some of their tiles, all of none."""
    body = """\
    if (t < 5) {
        fa::Visible two = fa::visible_in(args, 0, 1, 0, 4, 4 * t, 4, 2), one = fa::visible_in(args, 0, 1, 0, 4, 4 * t, 4);
        out[4 * t] = two.may, out[4 * t + 1] = two.must, out[4 * t + 2] = one.may, out[4 * t + 3] = one.must;
    }"""
    before = f"#define FA_INTEGER int32_t\n#define FA_MASK {parsed('mask', '4 * h <= k and k < 4 * h + 4').cpp()}\n#include <fa/score.cuh>"
    got = run(backend, tmp_path, body, b=DOCUMENTS, before=before, fields=FIELDS)[:20].reshape(5, 4).tolist()
    assert got == [[0, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_words_of_texts(backend: Backend, tmp_path: Path) -> None:
    """Of numbers, and of ranges: fa::formula::Range holds what its numbers may give."""
    body = """\
    using namespace fa::formula;
    const int n = t - 16;
    out[8 * t] = fa::formula::floor_div(n, 5), out[8 * t + 1] = fa::formula::floor_mod(n, -5), out[8 * t + 2] = fa::formula::magnitude(n);
    out[8 * t + 3] = fa::formula::least(n, 3), out[8 * t + 4] = fa::formula::greatest(n, 3), out[8 * t + 5] = fa::formula::choose(n < 0, 1, 2);
    out[8 * t + 6] = __float_as_uint(fa::formula::exp(0.1f * n)), out[8 * t + 7] = __float_as_uint(fa::formula::exp2(0.1f * n));
    out[256 + t] = __float_as_uint(fa::formula::tanh(0.1f * n));
    Range whole = fa::formula::hull(Range(-3), Range(n));
    out[288 + 2 * t] = unsigned(whole.low), out[289 + 2 * t] = unsigned(whole.high);
    fa::Args mine = args;
    mine.workspace[1] = args.K.data;
    fa::formula::Pair<Range> tile{mine, Range(0), Range(0), Range(0, 3), Range(2, 4)};
    Range sorted = tile.integer(fa::formula::Table<1, true>{}, Range(0), tile.k, Range(20));
    if (t == 0) out[352] = unsigned(sorted.low), out[353] = unsigned(sorted.high);"""
    got = run(backend, tmp_path, body, b=DOCUMENTS, before="#include <fa/score.cuh>", fields=FIELDS)
    a = np.arange(32) - 16
    wanted = [a // 5, a % -5, np.abs(a), np.minimum(a, 3), np.maximum(a, 3), np.where(a < 0, 1, 2)]
    assert np.array_equal(got[:256].reshape(32, 8)[:, :6].astype(np.int32), np.stack(wanted, 1))
    real = got[:256].reshape(32, 8)[:, 6:].copy().view(np.float32)
    np.testing.assert_allclose(real, np.stack([np.exp(0.1 * a), np.exp2(0.1 * a)], 1), rtol=1e-5)
    np.testing.assert_allclose(got[256:288].view(np.float32), np.tanh(0.1 * a), rtol=1e-5, atol=1e-7)
    assert np.array_equal(got[288:352].reshape(32, 2).astype(np.int32), np.stack([np.minimum(a, -3), np.maximum(a, -3)], 1))
    assert got[352:354].tolist() == [0, 0]
