"""The words of <fa/dq.cuh> against numpy, on every backend: dQ's accumulators cleared, counted and converted by the last who adds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hopper_kernel import bound, with_fields
from test_hopper_words import entry
from word_kernel import TYPES, f32, integers, run

from harness.backends import Backend

HALVES = ("float16", "bfloat16")
BEFORE = "#include <fa/dq.cuh>"


@pytest.mark.parametrize("dtype", HALVES)
def test_convert_dq(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """64 x 64 from the layout of the accumulators, scaled, rounded once: the rows and columns that there are, and nothing beside."""
    dq = (integers(64, 64) * np.float32(1 + 2**-10)).astype(np.float32)
    layout = dq.reshape(4, 2, 8, 8, 4, 2).transpose(3, 0, 2, 4, 1, 5)  # [chunk][warp][row][lane of a quad][half][2]
    body = """\
    fa::Args own = args;
    own.dQ = args.O;
    fa::convert_dq<scalar>(own, 0, 0, 0, 0, reinterpret_cast<const float*>(a), 0.3f);"""
    for rows, head_dim in ((64, 64), (61, 59), (13, 8), (3, 1), (100, 63)):
        got = run(backend, tmp_path, body, layout, dtype=dtype, fields={"seq_q": rows, "head_dim": head_dim}, before=BEFORE)
        want = np.full((70, 64), np.nan)
        want[: min(rows, 64), :head_dim] = (dq * np.float32(0.3)).astype(TYPES[dtype]).astype(float)[:rows, :head_dim]
        assert np.array_equal(got.view(TYPES[dtype])[: 70 * 64].reshape(70, 64).astype(float), want, equal_nan=True), (rows, head_dim)


@pytest.mark.parametrize("dtype", HALVES)
def test_store_zero_row(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Zeros in the columns that there are, of the rows below seq_q."""
    body = """\
    fa::Args own = args;
    own.dQ = args.O;
    fa::store_zero_row<scalar>(own, 0, 0, t / 8, t % 8);"""
    for rows, head_dim in ((16, 64), (5, 59), (16, 1)):
        fields = {"seq_q": rows, "head_dim": head_dim}
        got = run(backend, tmp_path, body, dtype=dtype, block=128, fields=fields, before=BEFORE)
        want = np.full((20, 64), np.nan)
        want[: min(rows, 16), :head_dim] = 0
        assert np.array_equal(got.view(TYPES[dtype])[: 20 * 64].reshape(20, 64).astype(float), want, equal_nan=True), (rows, head_dim)


def test_tiles_of_keys(backend: Backend, tmp_path: Path) -> None:
    """As many as the walks over tiles of queries from first_query(key) on that pass a tile."""
    body = "    reinterpret_cast<int*>(out)[t] = fa::tiles_of_keys<64, 128>(args, t);"
    shifts = {1: (0,), 128: (0,), 129: (0,), 1000: (0, 63, 64, 300), 300: (-200, -1000, 1000)}
    for seq_kv, shift in [(keys, shift) for keys, some in shifts.items() for shift in some]:
        for causal in (True, False):
            of = {"causal": causal, "fields": {"seq_kv": seq_kv, "causal_shift": shift}, "before": BEFORE}
            got = run(backend, tmp_path, body, **of)[:32].view(np.int32)
            firsts = [max(0, key - shift) // 64 if causal else 0 for key in range(0, seq_kv, 128)]
            assert got.tolist() == [sum(first <= tile for first in firsts) for tile in range(32)], (seq_kv, shift, causal)


def test_prepare_queries(backend: Backend, tmp_path: Path) -> None:
    """Of 16 queries: stats, accumulators and arrivals of zeros, and dQ itself where the mask hides all keys; +inf where P must be 0."""
    o = integers(16, 64)
    lse = np.arange(16, dtype=np.float32)
    lse[3] = -np.inf
    body = """\
    fa::Args own = args;
    own.O = own.dO = args.Q, own.dQ = own.logsumexp = args.K, own.logsumexp.row = 1;
    own.dQ.data = out + 8192;
    float* floats = reinterpret_cast<float*>(out);
    const int number = fa::prepare_queries<scalar, 64, 64, 128>(own, floats, floats + 1024, reinterpret_cast<int*>(out) + 256);
    if (t == 0) reinterpret_cast<int*>(out)[260] = number;"""
    for shift in (0, -64):
        fields = {"seq_q": 13, "seq_kv": 100, "head_dim": 64, "causal_shift": shift}
        of = {"dtype": "float16", "block": 128, "causal": True, "fields": fields, "before": BEFORE}
        got = run(backend, tmp_path, body, o.astype(np.float16), lse, **of)
        stats, beyond = f32(got, 2, 64)[:, :16], np.arange(16) >= 13
        wanted = np.where(np.isinf(lse) | beyond, np.inf, lse * np.float32(np.log2(np.e)))
        assert np.allclose(stats[0], wanted, rtol=1e-6)
        assert np.array_equal(stats[1], np.where(beyond, 0, (o.astype(float) ** 2).sum(1)))
        assert not got[1024:2048].any() and (got[2048:8192] == 0xFFFFFFFF).all()
        assert got[256:261].view(np.int32).tolist() == [0, 0, -1, -1, 0]
        written = (got[8192:].view(np.uint16)[: 16 * 64].reshape(16, 64) == 0).all(1)
        assert np.array_equal(written, (shift < 0) & ~beyond)


def test_store_or_add(backend: Backend, tmp_path: Path) -> None:
    """The first stores its four over whatever there was, the others add."""
    body = """\
    float* to = reinterpret_cast<float*>(out) + 4 * t;
    if (t % 2) to[0] = to[1] = to[2] = to[3] = 0.5f;
    fa::store_or_add_v4_f32(t % 2 == 0, to, t, 2.0f, -1.0f, 3.0f);
    if (t % 3 == 0) fa::store_or_add_v4_f32(false, to, 1.0f, 1.0f, 1.0f, 1.0f);"""
    t = np.arange(32)[:, None]
    wanted = np.hstack([t, np.tile([2, -1, 3], (32, 1))]) + t % 2 * 0.5 + (t % 3 == 0)
    assert np.array_equal(f32(run(backend, tmp_path, body, before=BEFORE), 32, 4), wanted)


#: Blocks of a producer, a warp that adds and a converter: 20 tiles of 32 sums, all -1 at first, behind 20 counts. A sum goes to its place
#: behind them when all blocks have added to it.
SUMS = (
    "#include <fa/dq.cuh>\n"
    + entry()[: -len(", ) {\n")]
    + """) {
    constexpr int tiles = 20;
    uint64_t* loaded = reinterpret_cast<uint64_t*>(fa::dynamic_shared_1024());
    const fa::SumQueue<1, 1> queue{loaded + tiles};
    int *arrivals = static_cast<int*>(args.O.data), *sums = arrivals + 32, *out = sums + 32 * tiles;
    const int lane = fa::lane_id();
    if (threadIdx.x == 0) {
        for (int n = 0; n < tiles; ++n) fa::mbarrier_init(loaded + n, 1);
        queue.init();
        fa::mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int n = 0; n < tiles; ++n) queue.push(n, (n + 7 * int(blockIdx.x)) % tiles), fa::mbarrier_arrive(loaded + n);
        queue.close(tiles);
    } else if (fa::warp_id() == 1) {
        for (int n = 0; n < tiles; ++n) {
            fa::mbarrier_wait_parity(loaded + n, 0);
            const int number = (n + 7 * int(blockIdx.x)) % tiles;
            atomicAdd(sums + 32 * number + lane, 100 * int(blockIdx.x) + number + lane);
            __syncwarp();
            fa::mbarrier_arrive_if(queue.full(0, n), lane == 5);
        }
    } else if (fa::warp_id() == 2) {
        for (int n = 0;; ++n) {
            const int number = queue.pop(0, n);
            if (number < 0) break;
            if (!fa::arrives_last(arrivals + number, gridDim.x - 1)) continue;
            out[32 * number + lane] = sums[32 * number + (lane ^ 9)];
        }
    }
}
"""
)


def test_the_last_who_adds_converts(backend: Backend, tmp_path: Path) -> None:
    """Each tile once, with all that six blocks have added to it; a ring of 8 places has room for 20 tiles."""
    for _ in range(3):
        got = with_fields(bound(backend, tmp_path, SUMS, {}, {}, grid=6, shared=1024)).view(np.int32)
        lane, number = np.arange(32) ^ 9, np.arange(20)[:, None]
        assert got[:20].tolist() == [5] * 20  # -1 and six arrivals
        assert np.array_equal(got[32 + 640 : 32 + 1280].reshape(20, 32), -1 + 1500 + 6 * (number + lane))


#: P^T of 64 keys and 64 queries with what the mask hides cleared: O.
HIDDEN = (
    "#include <fa/accumulator.cuh>\n"
    + entry()[: -len(", ) {\n")]
    + """) {
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    float p[32];
    for (int i = 0; i < 32; ++i) p[i] = 1 + i;
    fa::clear_hidden_columns(p, args, 128, args.heads_q);
    for (int i = 0; i < 32; ++i) static_cast<float*>(args.O.data)[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + pair + i % 2] = p[i];
}
"""
)


def test_clear_hidden_columns(backend: Backend, tmp_path: Path) -> None:
    """Zero where the key is beyond the last; without a mask a query sees all others."""
    kernel = bound(backend, tmp_path, HIDDEN, {}, {}, "float16")
    for seq_kv in (128, 129, 150, 192, 1000):
        got = with_fields(kernel, seq_kv=seq_kv, heads_q=64)[: 4 * 4096].view(np.float32).reshape(64, 64)
        assert np.array_equal(got == 0, np.broadcast_to(128 + np.arange(64)[:, None] >= seq_kv, (64, 64))), seq_kv
