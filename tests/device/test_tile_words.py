"""The words of <fa/row.cuh>, <fa/tile.cuh> and <fa/args.cuh>, and the rest of <fa/copy.cuh>, against numpy on every backend found.

All of them are plain C++, the same text for both backends, so there are no golden vectors of a GPU for them: what they are made
of (loads, stores, float32 arithmetic) is held to an H200 by test_words.py. Products take small integers, whose sums are exact
in any order, so every comparison here is of bits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from harness.backends import Backend
from harness.bind import ARGS, Bound
from harness.kernel import INCLUDE, Kernel
from harness.problem import Problem

SOURCE = """\
// /// kernel
// title = "one word"
// dtypes = ["float32"]
// head_dims = [64]
// arch = ">=sm_70"
// causal = true
// gqa = true
// cross = true
// logits = "any"
// deterministic = true
// [[launch]]
// entry = "forward"
// grid = "1"
// block = {block}
// shared = {shared}
// ///
#include <fa/row.cuh>
#include <fa/tile.cuh>
#include <fa/warp.cuh>
using scalar = fa::{dtype};
{before}
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {{
    const scalar* a = static_cast<const scalar*>(args.Q.data);
    const scalar* b = static_cast<const scalar*>(args.K.data);
    unsigned* out = static_cast<unsigned*>(args.O.data);
    const int t = threadIdx.x;
    (void)a, (void)b, (void)t;
{body}
}}
"""
TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
STORED = [name for name in TYPES if name != "float64"]  # what the tiled kernels take
UNWRITTEN = 0xFFFFFFFF  # outputs are poisoned before a run
ROWS = 256
WORDS = ROWS * 64


def words(values: Any) -> Any:
    """An array's bytes as 32-bit words, filled up with poison to the size of a tensor here."""
    raw = np.full(4 * WORDS, 0xFF, np.uint8)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    raw[: data.size] = data
    return raw.view(np.float32).reshape(1, 1, ROWS, 64)


class Given(Bound):
    """A bound kernel that is told what a test wants in some fields of fa::Args."""

    def __init__(self, fields: dict[str, Any], *rest: Any) -> None:
        self.fields = fields
        super().__init__(*rest)

    def _parameters(self, plain: tuple[str, ...]) -> tuple[Any, ...]:
        (args,) = super()._parameters(plain)
        for name, value in self.fields.items():
            args[name] = value
        return (args,)


def bound(
    backend: Backend, folder: Path, body: str, a: Any = 0, b: Any = 0, *, dtype: str = "float32", block: int = 32, shared: int = 0,
    causal: bool = False, fields: dict[str, Any] | None = None, before: str = "",
) -> Bound:  # fmt: skip
    """A kernel of one block with its arrays a and b, given as they are; fields replaces parts of fa::Args."""
    path = folder / "word_forward.cu"
    path.write_text(SOURCE.format(block=block, shared=shared, dtype=dtype, body=body, before=before))
    problem = Problem.of(1, 1, ROWS, 64, causal=causal)
    inputs = {"Q": words(a), "K": words(b), "V": words(0)}
    return Given(fields or {}, backend, backend.load(Kernel.read(path), problem), problem, inputs)


def answer(kernel: Bound) -> Any:
    """The 32-bit words that a launch leaves in `out`."""
    return kernel.run()["O"].reshape(-1).view(np.uint32)


def run(backend: Backend, folder: Path, body: str, a: Any = 0, b: Any = 0, **more: Any) -> Any:
    """The answer of a kernel that is launched once; parameters as bound() takes them."""
    return answer(bound(backend, folder, body, a, b, **more))


def integers(*shape: int, seed: int = 0, most: int = 8) -> Any:
    """Small integers, none of them zero, exact in every type and as a sum of thousands of products."""
    draw = np.random.RandomState(seed)
    return draw.randint(1, most + 1, shape) * draw.choice([-1, 1], shape)


def f32(got: Any, *shape: int) -> Any:
    """The first words of an answer as float32 of a shape."""
    return got[: int(np.prod(shape))].view(np.float32).reshape(shape)


# -- args.cuh ---------------------------------------------------------------------------------------------------------


def test_args_is_the_struct_of_bind(backend: Backend, tmp_path: Path) -> None:
    """Every field of ARGS, by name: a value of its own arrives in the kernel's field, at the offset ARGS says; and the whole size."""
    places: list[tuple[str, int]] = []  # a field in C++, its offset
    fields: dict[str, Any] = {}
    for i, (name, (kind, offset, *_)) in enumerate(ARGS.fields.items()):  # type: ignore[union-attr]
        if kind.fields:
            places += [(f"{name}.{part}", offset + kind.fields[part][1]) for part in kind.names]
            fields[name] = tuple(1000 * i + j + (1 << 40) for j in range(len(kind.names)))
        elif kind.shape:
            places += [(f"{name}[{j}]", offset + j * kind.base.itemsize) for j in range(kind.shape[0])]
            fields[name] = [1000 * i + j + (1 << 41) for j in range(kind.shape[0])]
        else:
            places.append((name, offset))
            fields[name] = 1000 * i + 7
    del fields["O"]  # where the kernel writes
    report = "\n".join(
        f"    put({i}, reinterpret_cast<const char*>(&args.{field}) - reinterpret_cast<const char*>(&args), sizeof args.{field},"
        f" &args.{field});"
        for i, (field, _) in enumerate(places)
    )
    body = f"""\
    if (t) return;
    out[0] = sizeof(fa::Args);
    out[1] = alignof(fa::Args);
    auto put = [&](int i, long long offset, int size, const void* value) {{
        out[4 * i + 4] = unsigned(offset);
        out[4 * i + 5] = size;
        for (int w = 0; w < size / 4; ++w) out[4 * i + 6 + w] = static_cast<const unsigned*>(value)[w];
    }};
{report}"""
    got = run(backend, tmp_path, body, fields=fields)
    assert (got[0], got[1]) == (ARGS.itemsize, 64)
    args = np.zeros(1, ARGS)
    for name, value in fields.items():
        args[name] = value
    raw = args.tobytes()
    for i, (field, offset) in enumerate(places):
        at, size = int(got[4 * i + 4]), int(got[4 * i + 5])
        assert at == offset, field
        if not field.startswith("O."):
            assert got[4 * i + 6 : 4 * i + 6 + size // 4].tobytes() == raw[at : at + size], field


@pytest.mark.parametrize("dtype", TYPES)
def test_row_pointer_is_64_bit(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Strides beyond 2^31 elements, in elements of the type."""
    body = """\
    fa::Tensor far = {args.Q.data, (1ll << 33) + 1, (1ll << 31) + 5, 3};
    long long bytes = reinterpret_cast<char*>(fa::row_pointer<scalar>(far, t, 2 * t, 7 * t)) - static_cast<char*>(args.Q.data);
    out[2 * t] = unsigned(bytes);
    out[2 * t + 1] = unsigned(bytes >> 32);"""
    got = run(backend, tmp_path, body, dtype=dtype)[:64].view(np.int64)
    assert got.tolist() == [t * ((2**33 + 1) + 2 * (2**31 + 5) + 7 * 3) * np.dtype(TYPES[dtype]).itemsize for t in range(32)]


def test_kv_head_of(backend: Backend, tmp_path: Path) -> None:
    """Neighbouring query heads share a key head."""
    for heads_kv in (1, 3, 8, 24):
        got = run(backend, tmp_path, "    out[t] = fa::kv_head_of(args, t);", block=24, fields={"heads_q": 24, "heads_kv": heads_kv})
        assert np.array_equal(got[:24], np.repeat(np.arange(heads_kv), 24 // heads_kv))


@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys(backend: Backend, tmp_path: Path, causal: bool) -> None:
    """As many as the rule lets through, key k for query q iff k <= q + shift; not positive where that is none."""
    key, query = np.arange(20), np.arange(32)[:, None]
    for shift in (-40, -5, 0, 3, 100):
        fields = {"seq_kv": 20, "causal_shift": shift}
        got = run(backend, tmp_path, "    out[t] = fa::visible_keys(args, t);", causal=causal, fields=fields)
        seen = (key <= query + shift) if causal else np.ones((32, 20), bool)
        assert np.array_equal(np.maximum(got[:32].view(np.int32), 0), seen.sum(1)), shift


# -- copy.cuh, warp.cuh, types.cuh: what test_words.py has not ----------------------------------------------------------


def test_stores_and_indices(backend: Backend, tmp_path: Path) -> None:
    """store_128, store_vec, store_vec_upto with less than all, lane_id and warp_id; the element types computed in."""
    body = """\
    if (t % 4 == 0) fa::store_128(reinterpret_cast<scalar*>(out) + t, fa::load_128(a + t));
    if (t % 2 == 0) fa::store_vec(reinterpret_cast<scalar*>(out) + 64 + t, fa::load_vec<2>(a + t));
    if (t % 2 == 0) fa::store_vec_upto(reinterpret_cast<scalar*>(out) + 128 + t, fa::load_vec<2>(a + t), t / 2 % 4 - 1);
    out[192 + t] = 100 * fa::warp_id() + fa::lane_id();
    if (t == 0) out[256] = sizeof(fa::accumulate_t<scalar>) + 16 * sizeof(fa::Accumulate<fa::bfloat16>::type);
    if (t < 3) out[260 + t] = __float_as_uint(t == 0 ? fa::widen(a[5]) : t == 1 ? float(fa::widen(5.0)) : fa::widen(fa::bfloat16{0x40a0}));
    if (t == 3) out[263] = __float_as_uint(fa::widen(fa::float16{0x4500}) + float(fa::narrow<double>(1.0)) + fa::narrow<float>(2.0f));
    if (t == 0) out[257] = sizeof(fa::accumulate_t<double>) + 16 * sizeof(fa::Vec<fa::float16, 4>) + 256 * alignof(fa::Vec128<scalar>);"""
    a, i = np.arange(64, dtype=np.float32), np.arange(64)
    got = run(backend, tmp_path, body, a, block=64)
    assert np.array_equal(f32(got, 2, 64), [a, a])
    assert np.array_equal(got[128:192], np.where(i % 2 < i // 2 % 4 - 1, a.view(np.uint32), UNWRITTEN))
    assert np.array_equal(got[192:256], 100 * (i // 32) + i % 32)
    assert f32(got[260:], 4).tolist() == [5, 5, 5, 5 + 1 + 2]
    assert got[256:258].tolist() == [4 + 16 * 4, 8 + 16 * 8 + 256 * 16]


# -- row.cuh ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_dot(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Any length, the empty one and those that do not fill 16 bytes too; what lies beyond n is NaN and is not used."""
    a, b = integers(64, 64).astype(TYPES[dtype]), integers(64, 64, seed=1).astype(TYPES[dtype])
    a[np.arange(64) >= np.arange(64)[:, None]] = np.nan
    got = run(backend, tmp_path, "    out[t] = __float_as_uint(float(fa::dot(a + 64 * t, b + 64 * t, t)));", a, b, dtype=dtype, block=64)
    exact = [(a[n, :n].astype(float) * b[n, :n].astype(float)).sum() for n in range(64)]
    assert f32(got, 64).tolist() == exact


@pytest.mark.parametrize("dtype", TYPES)
def test_add_weighted(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Runs longer than the inner one of 128 rows, steps of weights and rows, nothing where first = end; sum keeps what it had."""
    width, ranges = 16 // np.dtype(TYPES[dtype]).itemsize, [(0, 300), (5, 133), (130, 130), (7, 8), (1, 257)]
    wide = np.float64 if dtype == "float64" else np.float32
    weights, rows = integers(600).astype(wide), integers(300, 2 * width, seed=1).astype(TYPES[dtype])
    body = f"""\
    const int first[] = {{{", ".join(str(r[0]) for r in ranges)}}}, end[] = {{{", ".join(str(r[1]) for r in ranges)}}};
    fa::accumulate_t<scalar> sum[{width}] = {{100, 101}};
    fa::add_weighted<scalar>(sum, reinterpret_cast<const fa::accumulate_t<scalar>*>(b), 2, a, {2 * width}, first[t], end[t]);
    for (int i = 0; i < {width}; ++i) out[t * {width} + i] = __float_as_uint(float(sum[i]));"""
    got = f32(run(backend, tmp_path, body, rows, weights, dtype=dtype, block=len(ranges)), len(ranges), width)
    start = np.array([100, 101] + [0] * width)[:width]
    for answer, (first, end) in zip(got, ranges, strict=True):
        assert np.array_equal(answer, start + weights[2 * first : 2 * end : 2] @ rows[first:end, :width].astype(float))


def test_matrix_row_is_64_bit(backend: Backend, tmp_path: Path) -> None:
    """Batch 7 of B8 H16 S4096: beyond 2^31 elements."""
    body = """\
    char* base = static_cast<char*>(args.workspace[2]);
    long long bytes = reinterpret_cast<char*>(fa::matrix_row<double>(args, 2, 7, 15, 4064 + t)) - base;
    out[2 * t] = unsigned(bytes);
    out[2 * t + 1] = unsigned(bytes >> 32);"""
    fields = {"heads_q": 16, "seq_q": 4096, "seq_kv": 4099, "workspace": [64, 128, 4096, 0, 0, 0, 0, 0]}
    got = run(backend, tmp_path, body, fields=fields)[:64].view(np.int64)
    assert got.tolist() == [8 * ((7 * 16 + 15) * 4096 + 4064 + t) * 4099 for t in range(32)]


@pytest.mark.parametrize("dtype", TYPES)
def test_load_rows(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """Zero beyond the last row and the head dim, even where memory holds NaN; the columns between width and pitch are left alone."""
    body = f"""\
    const int first = args.seq_q, end = args.seq_kv, words = 13 * 26 * int(sizeof(scalar)) / 4;
    unsigned* raw = fa::dynamic_shared<unsigned>();
    for (int i = t; i < words; i += 48) raw[i] = {UNWRITTEN}u;
    __syncthreads();
    fa::load_rows<13, 24, 26, 48>(fa::dynamic_shared<scalar>(), a + first * 28, 28, first, end, args.head_dim, t);
    __syncthreads();
    for (int i = t; i < words; i += 48) out[i] = raw[i];"""
    for first, end, head_dim in [(0, 100, 24), (3, 7, 24), (2, 100, 17), (9, 9, 1)]:
        a = integers(40, 28).astype(TYPES[dtype])
        a[:, head_dim:] = np.nan
        fields = {"seq_q": first, "seq_kv": end, "head_dim": head_dim}
        got = run(backend, tmp_path, body, a, dtype=dtype, block=48, shared=13 * 26 * 8, fields=fields)
        tile = got.view(TYPES[dtype])[: 13 * 26].reshape(13, 26)
        want = np.zeros((13, 24))
        want[: min(13, max(0, end - first)), :head_dim] = a[first : min(first + 13, end), :head_dim]
        assert np.array_equal(tile[:, :24].astype(float), want), (first, end, head_dim)
        assert np.isnan(tile[:, 24:].astype(float)).all()


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
    """A permutation inside each passing row that moves quads whole; 8 passing rows of one quad stand in 8 quads of banks."""
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


# -- tile.cuh: moving and multiplying ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("store", ["store_transposed", "store_by_rows"])
def test_staged(backend: Backend, tmp_path: Path, store: str, dtype: str) -> None:
    """Memory to a tile: every element in its place, zero beyond the rows and the head dim, where memory holds NaN."""
    item, transposed = np.dtype(TYPES[dtype]).itemsize, store == "store_transposed"
    body = f"""\
    float* tile = fa::dynamic_shared<float>();
    fa::Staged<scalar, 64, 128, 64> staged;
    staged.fetch(a, int(args.K.row), args.seq_kv, args.head_dim);
    staged.{store}(tile, args.head_dim{", 0.5f" if transposed else ""});
    __syncthreads();
    for (int i = t; i < 64 * 64; i += 128) {{
        int r = i / 64, c = i % 64;
        out[i] = __float_as_uint(tile[{"fa::transposed<scalar, 64>(r, c)" if transposed else "fa::by_rows<scalar, 64>(r, c)"}]);
    }}"""
    for rows, head_dim in [(64, 64), (64, 59), (41, 33), (1, 1), (0, 64), (64, 8)]:
        pitch = -(-head_dim * item // 16) * 16 // item
        a = np.full((64, pitch), np.nan).astype(TYPES[dtype])
        a[:rows, :head_dim] = integers(rows, head_dim)
        fields = {"seq_kv": rows, "head_dim": head_dim, "K": (0, 0, 0, pitch)}
        got = f32(run(backend, tmp_path, body, a, dtype=dtype, block=128, shared=4 * 64 * 64, fields=fields), 64, 64)
        want = np.zeros((64, 64))
        want[:rows, :head_dim] = a[:rows, :head_dim]
        assert np.array_equal(got, want / 2 if transposed else want), (rows, head_dim)


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


LANES = 8  # of a row; 8 groups of them make the 64 threads below: 64 owned rows, 32 passing rows, 64 columns
THREAD = f"    const int row = t / {LANES} * fa::owned, lane = t % {LANES};\n    float* smem = fa::dynamic_shared<float>();\n"


@pytest.mark.parametrize("dtype", STORED)
def test_multiply_rows_and_share_scores(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """A · B^T of 64 owned and 32 passing rows, in two pieces of the columns, onto what was there; then every score in its place."""
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
    float score[4][fa::owned];
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < fa::owned; ++i) score[j][i] = 1000.0f;
    fa::multiply_rows<scalar, 64, {LANES}, 64>(score, smem, b_smem, row, lane, 0, 40);
    fa::multiply_rows<scalar, 64, {LANES}, 64>(score, smem, b_smem, row, lane, 40);
    fa::share_scores<{LANES}, 64>(p_smem, score, row, lane);
    __syncthreads();
    for (int i = t; i < 32 * 64; i += 64) out[i] = __float_as_uint(p_smem[fa::score_at<64>(i / 64, i % 64)]);"""
    )
    shared = 4 * (64 * 64 + 2 * 32 * 64)
    got = run(backend, tmp_path, body, a.astype(np.float32), b.astype(np.float32), dtype=dtype, block=64, shared=shared)
    assert np.array_equal(f32(got, 32, 64), 1000 + b @ a.T)


@pytest.mark.parametrize("dtype", STORED)
def test_multiply_scores_add_tile_and_store_output(backend: Backend, tmp_path: Path, dtype: str) -> None:
    """P^T · B of 32 passing rows in two parts, twice added, halved, rounded to the type; columns beyond the head dim untouched."""
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
    float tile[fa::owned][64 / {LANES}] = {{}}, sum[fa::owned][64 / {LANES}] = {{}};
    fa::multiply_scores<scalar, 64, {LANES}, 64, 32>(tile, smem, b_smem, row, lane, 0, 3);
    fa::multiply_scores<scalar, 64, {LANES}, 64, 32>(tile, smem, b_smem, row, lane, 3);
    fa::add_tile(sum, tile);
    fa::add_tile(sum, tile);
    for (int i = 0; i < fa::owned; ++i)
        fa::store_output<scalar, {LANES}>(reinterpret_cast<scalar*>(out) + (row + i) * {pitch}, sum[i], 0.25f, lane, {head_dim});"""
    )
    got = run(backend, tmp_path, body, p.astype(np.float32), b.astype(np.float32), dtype=dtype, block=64, shared=8 * 32 * 64)
    out = got.view(TYPES[dtype])[: 64 * pitch].reshape(64, pitch)
    want = (0.5 * (p.T @ b)).astype(np.float32).astype(TYPES[dtype])
    assert np.array_equal(out[:, :head_dim].astype(float), want[:, :head_dim].astype(float))
    assert np.isnan(out[:, head_dim:].astype(float)).all()


# -- no word without a test -------------------------------------------------------------------------------------------

_TEMPLATE = r"(?:template <[^{;]*?>\s+)?"
_FUNCTION = re.compile(rf"^{_TEMPLATE}__device__ __forceinline__ [\w:<>,*& ]*?(\w+)(?:<\w+>)?\(", re.M)
_CLASS = re.compile(r"^template <[^{;]*?> struct (?:alignas\([^{]*?\) )?(\w+) \{", re.M)


def words_of(header: str) -> set[str]:
    """The functions and class templates a header of words defines at namespace level."""
    bare = re.sub(r"//.*", "", header)
    return set(_FUNCTION.findall(bare)) | set(_CLASS.findall(bare))


def untested(headers: str, tests: str) -> set[str]:
    """Words that no kernel in the tests uses (as fa::word)."""
    return words_of(headers) - set(re.findall(r"\bfa::(\w+)", tests))


def test_every_word_has_a_test() -> None:
    """What a header of words defines stands as fa::word in this folder's tests."""
    headers = "\n".join(path.read_text() for path in sorted((INCLUDE / "fa").glob("*.cuh")))
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*words.py"))
    assert not untested(headers, tests)
    assert {"row_pointer", "cvt_rn_bf16_f32", "Accumulate", "Vec", "load_rows", "dot", "Staged", "multiply_rows"} <= words_of(headers)
    # and the patterns miss none: a definition at namespace level is a line that is not indented
    assert len(_FUNCTION.findall(headers)) == len(re.findall(r"^\w.*__device__ __forceinline__|^__device__", headers, re.M))
    assert len(_CLASS.findall(headers)) == len(re.findall(r"^template <\w.*\bstruct\b", headers, re.M))


def test_a_word_without_a_test_is_seen() -> None:
    """Functions, templates over two lines and class templates; a member or a comment is no word."""
    header = """\
__device__ __forceinline__ float plain(float x) { return x; }
template <class T, int N>
__device__ __forceinline__ void over_two(T (&to)[N]) {}
template <class T> struct alignas(sizeof(T)) Fragment {
    __device__ __forceinline__ T member() const;
};
// __device__ __forceinline__ int no_word();
"""
    assert words_of(header) == {"plain", "over_two", "Fragment"}
    assert untested(header, "fa::plain(x); over_two; fa::Fragment<int>") == {"over_two"}
