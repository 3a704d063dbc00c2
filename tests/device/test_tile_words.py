"""The words of <fa/tile.cuh>, and those of <fa/row.cuh> for the output row, against numpy on every backend found.

All of them are plain C++, the same text for both backends, so there are no golden vectors of a GPU for them: what they are made
of (loads, stores, float32 arithmetic) is held to an H200 by test_words.py. Products take small integers, whose sums are exact
in any order, so every comparison here is of bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_kernel import STORED, TYPES, f32, integers, run

from harness.backends import Backend

# -- tile.cuh: where things stand -------------------------------------------------------------------------------------


def places(backend: Backend, folder: Path, call: str, rows: int, columns: int, dtype: str) -> Any:
    """The index that a word gives for each (row r, column c)."""
    body = f"    for (int i = t; i < {rows * columns}; i += 32) {{ int r = i / {columns}, c = i % {columns}; out[i] = {call}; }}"
    return run(backend, folder, body, dtype=dtype)[: rows * columns].reshape(rows, columns).astype(int)


def conflicts(addresses: Any) -> int:
    """How many of 8 lanes' 16-byte accesses meet in one quad of banks at a time: 1 is free of conflicts. addresses: [..., 8] floats."""
    quads = np.asarray(addresses) // 4 % 8
    return int(max(np.bincount(lanes, minlength=8).max() for lanes in quads.reshape(-1, 8)))


@pytest.mark.parametrize("dtype", STORED)
def test_by_rows(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """A permutation inside each row that moves quads whole; 8 neighbouring rows of a column stand in 8 different quads of banks."""
    at = places(backend, tmp_path, "fa::by_rows<scalar, 64>(r, c)", 32, 64, dtype)
    assert np.array_equal(np.sort(at, axis=1), np.arange(32 * 64).reshape(32, 64))
    assert np.array_equal(at[:, ::4, None] + np.arange(4), at.reshape(32, 16, 4)) and not (at[:, ::4] % 4).any()
    assert all(conflicts(at[first : first + 8, ::4].T) == 1 for first in range(25))
    spread = places(backend, tmp_path, "fa::spread<scalar>(r)", 32, 1, dtype)[:, 0]
    assert np.array_equal(at[:, 0], 64 * np.arange(32) + 4 * spread) and set(spread) == set(range(8))
    # a warp's store: 8 rows by 4 chunks of 16 bytes of T, eight lanes (two rows) at a time; chunk c is column_step floats on
    step, row = (4 if dtype == "float32" else 8), np.arange(0, 32, 2)[:, None, None] + np.arange(2)[None, :, None]
    for part in range(0, step, 4):
        assert conflicts(at[row, step * np.arange(4) + part]) == 1


@pytest.mark.parametrize("dtype", STORED)
def test_transposed(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """A permutation inside each column's line that keeps runs of 8 rows whole; a warp's 8 rows by 4 chunks take all 32 banks."""
    at = places(backend, tmp_path, "fa::transposed<scalar, 64>(r, c)", 64, 32, dtype)
    assert np.array_equal(np.sort(at, axis=0).T, np.arange(32 * 64).reshape(32, 64))
    assert np.array_equal(at[::8, None] + np.arange(8)[:, None], at.reshape(8, 8, 32))
    vec = 4 if dtype == "float32" else 8
    for first in range(0, 64, 8):
        for e in range(vec):
            banks = at[first : first + 8][:, (vec * np.arange(4) + e) % 32] % 32
            assert len(set(banks.ravel())) == 32


def test_score_at(backend: Backend, tmp_path: Path) -> None:
    """A permutation inside each streamed row that moves quads whole; 8 streamed rows of one quad stand in 8 quads of banks."""
    at = places(backend, tmp_path, "fa::score_at<64>(r, c)", 32, 64, "float32")
    assert np.array_equal(np.sort(at, axis=1), np.arange(32 * 64).reshape(32, 64))
    assert np.array_equal(at[:, ::4, None] + np.arange(4), at.reshape(32, 16, 4))
    assert all(conflicts(at[first : first + 8, ::4].T) == 1 for first in range(0, 32, 8))


def test_a_layout_without_the_xor_would_be_seen() -> None:
    """conflicts() can tell: plain rows of 64 floats all start in bank 0."""
    assert conflicts((64 * np.arange(8))[None]) == 8


@pytest.mark.parametrize(("columns", "lanes"), [(8, 8), (4, 16), (6, 16), (16, 8), (2, 8)])
def test_output_column(backend: Backend, tmp_path: Path, columns: int, lanes: int) -> None:
    """Every column belongs to one lane; a lane's come in vectors of output_vec, next to its neighbour's."""
    got = places(
        backend, tmp_path, f"fa::output_column<{columns}, {lanes}>(r, c) + 1000 * fa::output_vec<{columns}>", lanes, columns, "float32"
    )
    at, vec = got % 1000, 4 if columns % 4 == 0 else 2
    assert (got // 1000 == vec).all() and sorted(at.ravel()) == list(range(columns * lanes))
    assert np.array_equal(at[:, ::vec, None] + np.arange(vec), at.reshape(lanes, -1, vec))
    assert np.array_equal(np.diff(at[:, 0]), [vec] * (lanes - 1))


def test_groups_of_alternate_lanes(backend: Backend, tmp_path: Path) -> None:
    """group_max and group_sum with a STRIDE of 2, as two row groups alternate in a warp: 16 lanes each, and 8 with two pairs of them."""
    values = integers(32, most=1000)
    body = """\
    const float x = float(reinterpret_cast<const int*>(a)[t]);
    const float found[4] = {fa::group_max<16, 2>(x), fa::group_sum<16, 2>(x), fa::group_max<8, 2>(x), fa::group_sum<8, 2>(x)};
    for (int i = 0; i < 4; ++i) out[i * 32 + t] = __float_as_uint(found[i]);"""
    got = f32(run(backend, tmp_path, body, values.astype(np.int32), block=32), 4, 32)
    for lane in range(32):
        wide, narrow = values[lane % 2 :: 2], values[lane // 16 * 16 + lane % 2 :][:16:2]
        assert list(got[:, lane]) == [wide.max(), wide.sum(), narrow.max(), narrow.sum()], lane


# -- tile.cuh: moving and multiplying ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "dtype"), [*((s, d) for s in ("store_transposed", "store_by_rows") for d in STORED), ("copy_by_rows", "float32")]
)
def test_staged(backend: Backend, tmp_path: Path, store: str, dtype: str) -> None:
    """Memory to a tile: every element in its place, zero beyond the rows and the head dim, where memory holds NaN."""
    item, transposed = np.dtype(TYPES[dtype]).itemsize, store == "store_transposed"
    move = f"""\
    fa::Staged<scalar, 64, 128, 64> staged;
    staged.fetch(a, int(args.K.row), args.seq_kv, args.head_dim);
    staged.{store}(tile, args.head_dim{", 0.5f" if transposed else ""});"""
    at = "fa::transposed<scalar, 64>(r, c)" if transposed else "fa::by_rows<scalar, 64>(r, c)"
    if store == "copy_by_rows":
        at, move = (
            "r * 68 + c",
            """\
    for (int first = 0; first < 64; first += 32)
        fa::copy_by_rows<68, 128, 64, 32>(tile + first, a + first, int(args.K.row), args.seq_kv, args.head_dim - first);
    fa::cp_async_wait_group<0>();""",
        )
    body = f"""\
    float* tile = fa::dynamic_shared<float>();
{move}
    __syncthreads();
    for (int i = t; i < 64 * 64; i += 128) {{
        int r = i / 64, c = i % 64;
        out[i] = __float_as_uint(tile[{at}]);
    }}"""
    for rows, head_dim in [(64, 64), (64, 59), (41, 33), (1, 1), (0, 64), (64, 8)]:
        pitch = -(-head_dim * item // 16) * 16 // item
        a = np.full((64, pitch), np.nan).astype(TYPES[dtype])
        a[:rows, :head_dim] = integers(rows, head_dim)
        fields = {"seq_kv": rows, "head_dim": head_dim, "K": (0, 0, 0, pitch)}
        got = f32(run(backend, tmp_path, body, a, dtype=dtype, block=128, shared=4 * 64 * 68, fields=fields), 64, 64)
        want = np.zeros((64, 64))
        want[:rows, :head_dim] = a[:rows, :head_dim]
        assert np.array_equal(got, want / 2 if transposed else want), (rows, head_dim)


def test_plain_rows(backend: Backend, tmp_path: Path) -> None:
    """Without the swizzle: a resident tile staged, S in two pieces of the columns, P in padded rows, P · B in two parts of the rounds."""
    a, b = integers(8, 64), integers(32, 64, seed=1)
    body = """\
    float* a_smem = fa::dynamic_shared<float>();  // [64][8]
    float* k_smem = a_smem + 64 * 8;  // [32][68]
    float* v_smem = k_smem + 32 * 68;  // [32][64]
    float* p_smem = v_smem + 32 * 64;  // [32][12]
    const float* in_b = reinterpret_cast<const float*>(b);
    fa::Staged<scalar, 64, 32, 8> staged;
    staged.fetch(a, 64, 8, 64);
    staged.template store_transposed<false>(a_smem, 64);
    for (int i = t; i < 32 * 64; i += 32) k_smem[i / 64 * 68 + i % 64] = v_smem[i] = in_b[i];
    __syncthreads();
    float score[1][fa::resident_rows] = {}, tile[fa::resident_rows][2] = {};
    fa::multiply_rows<scalar, 68, 32, 8, 1, 2, false>(score, a_smem, k_smem, 0, t, 0, 40);
    fa::multiply_rows<scalar, 68, 32, 8, 1, 2, false>(score, a_smem, k_smem, 0, t, 40, 64);
    fa::share_scores<32, 12, 1, false>(p_smem, score, 0, t);
    __syncthreads();
    fa::multiply_scores<scalar, 64, 32, 12, 32, false>(tile, p_smem, v_smem, 0, t, 0, 3);
    fa::multiply_scores<scalar, 64, 32, 12, 32, false>(tile, p_smem, v_smem, 0, t, 3);
    for (int i = t; i < 32 * 8; i += 32) out[i] = __float_as_uint(p_smem[i / 8 * 12 + i % 8]);
    for (int i = 0; i < 8 * 2; ++i) out[256 + i / 2 * 64 + 2 * t + i % 2] = __float_as_uint(tile[i / 2][i % 2]);"""
    shared = 4 * (64 * 8 + 32 * 68 + 32 * 64 + 32 * 12)
    got = run(backend, tmp_path, body, a.astype(np.float32), b.astype(np.float32), dtype="float32", block=32, shared=shared)
    assert np.array_equal(f32(got, 32, 8), b @ a.T) and np.array_equal(f32(got[256:], 8, 64), (b @ a.T).T @ b)


@pytest.mark.parametrize("dtype", STORED)
def test_staged_in_pieces(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Columns 32 to 63 of a tile 64 wide, as K and V travel during the products."""
    a = integers(32, 64).astype(TYPES[dtype])
    body = """\
    float* tile = fa::dynamic_shared<float>();
    for (int i = t; i < 32 * 64; i += 64) tile[i] = 0.0f;
    __syncthreads();
    fa::Staged<scalar, 64, 64, 32, 32> staged;
    staged.fetch(a + 32, 64, 32, 29);
    staged.store_by_rows(tile + 32, 29);
    __syncthreads();
    for (int i = t; i < 32 * 64; i += 64) out[i] = __float_as_uint(tile[fa::by_rows<scalar, 64>(i / 64, i % 64)]);"""
    got = f32(run(backend, tmp_path, body, a, dtype=dtype, block=64, shared=4 * 32 * 64), 32, 64)
    want = a.astype(float)
    want[:, :32] = want[:, 61:] = 0
    assert np.array_equal(got, want)


LANES = 8  # of a row; 8 groups of them make the 64 threads below: 64 resident rows, 32 streamed rows, 64 columns
THREAD = f"    const int row = t / {LANES} * fa::resident_rows, lane = t % {LANES};\n    float* smem = fa::dynamic_shared<float>();\n"


@pytest.mark.parametrize(("dtype", "parts"), [*((dtype, 1) for dtype in STORED), ("float32", 2)])
def test_multiply_rows_and_share_scores(backend: Backend, tmp_path: Path, dtype: str, parts: int) -> None:
    """A · B^T of 64 resident and 32 streamed rows, in two pieces of the columns, onto what was there; then every score in its place."""
    a, b = integers(64, 64), integers(32, 64, seed=1)
    body = (
        THREAD
        + f"""\
    float* b_smem = smem + 64 * 64;
    float* p_smem = b_smem + 32 * 64;
    const float* in = reinterpret_cast<const float*>(a);
    const float* in_b = reinterpret_cast<const float*>(b);
    for (int i = t; i < 64 * 64; i += 64) smem[fa::transposed<scalar, 64>(i / 64, i % 64)] = in[i];
    for (int i = t; i < 32 * 64; i += 64) b_smem[fa::by_rows<scalar, 64>(i / 64, i % 64)] = in_b[i];
    __syncthreads();
    float score[4][fa::resident_rows];
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < fa::resident_rows; ++i) score[j][i] = 1000.0f;
    fa::multiply_rows<scalar, 64, {LANES}, 64>(score, smem, b_smem, row, lane, 0, 40);
    fa::multiply_rows<scalar, 64, {LANES}, 64>(score, smem, b_smem, row, lane, 40);
    for (int part = 0; part < {parts}; ++part)
        fa::share_scores<{LANES}, 64, {parts}>(p_smem + part * 32 / {parts} * 64, score, row, lane, part);
    __syncthreads();
    for (int i = t; i < 32 * 64; i += 64) out[i] = __float_as_uint(p_smem[fa::score_at<64>(i / 64, i % 64)]);"""
    )
    shared = 4 * (64 * 64 + 2 * 32 * 64)
    got = run(backend, tmp_path, body, a.astype(np.float32), b.astype(np.float32), dtype=dtype, block=64, shared=shared)
    assert np.array_equal(f32(got, 32, 64), 1000 + b @ a.T)


@pytest.mark.parametrize("dtype", STORED)
def test_multiply_scores_add_tile_and_store_output(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """P^T · B of 32 streamed rows in two parts, added, rescaled, rounded to the type; columns beyond the head dim untouched."""
    p, b = integers(32, 64), integers(32, 64, seed=1)
    b = b * (np.arange(64) % 3 + 1) * 13  # sums that 16-bit types must round
    head_dim, pitch = 59, 64
    body = (
        THREAD
        + f"""\
    float* b_smem = smem + 32 * 64;
    const float* in = reinterpret_cast<const float*>(a);
    const float* in_b = reinterpret_cast<const float*>(b);
    for (int i = t; i < 32 * 64; i += 64) {{
        smem[fa::score_at<64>(i / 64, i % 64)] = in[i];
        b_smem[fa::by_rows<scalar, 64>(i / 64, i % 64)] = in_b[i];
    }}
    __syncthreads();
    float tile[fa::resident_rows][64 / {LANES}] = {{}}, sum[fa::resident_rows][64 / {LANES}] = {{}};
    fa::multiply_scores<scalar, 64, {LANES}, 64, 32>(tile, smem, b_smem, row, lane, 0, 3);
    fa::multiply_scores<scalar, 64, {LANES}, 64, 32>(tile, smem, b_smem, row, lane, 3);
    fa::add_tile(sum, tile);
    fa::add_tile(sum, tile);
    const float half[fa::resident_rows] = {{0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}};
    fa::add_tile(sum, half, tile);
    for (int i = 0; i < fa::resident_rows; ++i)
        fa::store_output<scalar, {LANES}>(reinterpret_cast<scalar*>(out) + (row + i) * {pitch}, sum[i], 0.25f, lane, {head_dim});"""
    )
    got = run(backend, tmp_path, body, p.astype(np.float32), b.astype(np.float32), dtype=dtype, block=64, shared=8 * 32 * 64)
    out = got.view(TYPES[dtype])[: 64 * pitch].reshape(64, pitch)
    want = (0.5 * (p.T @ b)).astype(np.float32).astype(TYPES[dtype])
    assert np.array_equal(out[:, :head_dim].astype(float), want[:, :head_dim].astype(float))
    assert np.isnan(out[:, head_dim:].astype(float)).all()
