"""The words of <fa/args.cuh>, <fa/row.cuh>, <fa/schedule.cuh>, <fa/key_tiles.cuh> and <fa/stage.cuh>, the rest of <fa/copy.cuh>, against
numpy on every backend, and that each word has a test.

All of them are plain C++, the same text for both backends, so there are no golden vectors of a GPU for them: what they are made
of (loads, stores, float32 arithmetic) is held to an H200 by test_words.py. Products take small integers, whose sums are exact
in any order, so every comparison here is of bits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_kernel import TYPES, UNWRITTEN, f32, integers, run

from harness.backends import Backend
from harness.backends.launch import ARGS
from harness.kernel import INCLUDE

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
            fields[name] = [1000 * i + j + (1 << 41) * (kind.base.itemsize == 8) for j in range(kind.shape[0])]
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


def test_head_dim_v(backend: Backend, tmp_path: Path) -> None:
    """Without a head dim of V's own it is that of Q and K, whatever its field holds. With one: the kernels' tests."""
    fields = {"head_dim": 24, "head_dim_v": 40}
    assert set(run(backend, tmp_path, "    out[t] = fa::head_dim_v(args) + 100 * fa::own_head_dim_v;", fields=fields)[:32].tolist()) == {24}


def test_dlogsumexp_of(backend: Backend, tmp_path: Path) -> None:
    """The value of a query by the tensor's strides; 0 where there is no tensor."""
    body = """\
    __shared__ float values[64];
    values[t] = t;
    __syncthreads();
    fa::Args given = args;
    given.dlogsumexp = {values, 32, 8, 1};
    out[t] = int(fa::dlogsumexp_of<float>(given, t / 32, t / 8 % 4, t % 8)) + 100 * int(fa::dlogsumexp_of<float>(args, 1, 2, t));"""
    assert run(backend, tmp_path, body, block=64)[:64].tolist() == list(range(64))


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


@pytest.mark.parametrize("causal", [False, True])
def test_first_query(backend: Backend, tmp_path: Path, causal: bool) -> None:
    """The least query q with key k <= q + shift, and 0 without a mask."""
    for shift in (-40, -5, 0, 3, 100):
        got = run(backend, tmp_path, "    out[t] = fa::first_query(args, t);", causal=causal, fields={"causal_shift": shift})
        want = [next(query for query in range(100) if not causal or key <= query + shift) for key in range(32)]
        assert got[:32].tolist() == want, shift


@pytest.mark.parametrize("window", [None, 0, 5])
def test_borders_of_a_window(backend: Backend, tmp_path: Path, window: int | None) -> None:
    """The first key with key >= query + shift - window, and one past the last query that sees a key; without a window 0 and seq_q."""
    first = "" if window is None else f"#define FA_WINDOW {window}"
    key, query = np.arange(32)[:, None], np.arange(20)
    for shift in (-40, -5, 0, 3, 12):
        fields = {"seq_q": 20, "seq_kv": 32, "causal_shift": shift}
        body = "    out[t] = fa::has_window ? fa::first_key(args, t) : -fa::first_key(args, t), out[32 + t] = fa::query_end(args, t);"
        got = run(backend, tmp_path, body, causal=True, fields=fields, first=first).view(np.int32)
        inside = key >= query + shift - (1000 if window is None else window)
        assert got[:20].tolist() == inside.argmax(0).tolist(), shift
        assert got[32:64].tolist() == [max((q + 1 for q in query if row[q]), default=0) for row in inside], shift


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


def test_head_values_is_64_bit(backend: Backend, tmp_path: Path) -> None:
    """Batch 2^15 and 2^17 queries: beyond 2^31 elements."""
    body = """\
    char* base = static_cast<char*>(args.workspace[1]);
    long long bytes = reinterpret_cast<char*>(fa::head_values<double>(args, 1, 1 << 15, t)) - base;
    out[2 * t] = unsigned(bytes);
    out[2 * t + 1] = unsigned(bytes >> 32);"""
    fields = {"heads_q": 32, "seq_q": 1 << 17, "workspace": [64, 128, 0, 0, 0, 0, 0, 0]}
    got = run(backend, tmp_path, body, fields=fields)[:64].view(np.int64)
    assert got.tolist() == [8 * ((1 << 15) * 32 + t) * (1 << 17) for t in range(32)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [13, 1])
def test_load_rows(backend: Backend, tmp_path: Path, rows: int, dtype: str) -> None:
    """Zero beyond the last row and the head dim, even where memory holds NaN; the columns between width and pitch are left alone."""
    body = f"""\
    const scalar* from = static_cast<const scalar*>(args.Q.data) + 10 * 28;  // the rows before it are not touched
    const int words = {rows} * 26 * int(sizeof(scalar)) / 4;
    unsigned* raw = fa::dynamic_shared<unsigned>();
    for (int i = t; i < words; i += 48) raw[i] = {UNWRITTEN}u;
    __syncthreads();
    fa::load_rows<{rows}, 24, 26, 48>(fa::dynamic_shared<scalar>(), from, 28, args.seq_q, args.seq_kv, args.head_dim);
    __syncthreads();
    for (int i = t; i < words; i += 48) out[i] = raw[i];"""
    for first, end, head_dim in [(0, 100, 24), (3, 7, 24), (2, 100, 17), (9, 9, 1)]:
        memory = integers(50, 28).astype(TYPES[dtype])
        memory[:, head_dim:] = np.nan
        fields = {"seq_q": first, "seq_kv": end, "head_dim": head_dim}
        got = run(backend, tmp_path, body, memory, dtype=dtype, block=48, shared=rows * 26 * 8, fields=fields)
        tile = got.view(TYPES[dtype])[: rows * 26].reshape(rows, 26)
        want, there = np.zeros((rows, 24)), min(rows, max(0, end - first))  # row `first` is row 10 of the memory
        want[:there, :head_dim] = memory[10 : 10 + there, :head_dim]
        assert np.array_equal(tile[:, :24].astype(float), want), (first, end, head_dim)
        assert np.isnan(tile[:, 24:].astype(float)).all()


def test_online_softmax(backend: Backend, tmp_path: Path) -> None:
    """Three tiles of 32 keys, rows of 16 lanes: row state, rescale factor and P; tiles seen in part, whole or not at all."""
    seen = np.array([[32, -3, 5], [0, 32, 7], [-40, 0, -1], [32, 32, 32]])  # [row][tile]
    scores, scale = np.random.RandomState(4).randn(4, 3, 32).astype(np.float32) * 8, 0.25
    body = """\
    const int lane = t % 16, row = t / 16;
    const float* in = reinterpret_cast<const float*>(a) + row * 96;
    float* to = reinterpret_cast<float*>(out) + row * 128;
    const int* visible = reinterpret_cast<const int*>(b) + row * 3;
    float row_max = -fa::infinity(), row_sum = 0;
    for (int tile = 0; tile < 3; ++tile) {
        const float score[2] = {in[32 * tile + lane], in[32 * tile + 16 + lane]};
        const float rescale = fa::online_softmax<16>(row_max, row_sum, score, to + 32 * tile, lane, visible[tile], 0.25f);
        if (lane < 3) to[96 + 3 * tile + lane] = lane == 0 ? row_max : lane == 1 ? row_sum : rescale;
    }"""
    got = f32(run(backend, tmp_path, body, scores, seen.astype(np.int32), block=64), 4, 128)
    for row in range(4):
        row_max, row_sum = -np.inf, 0.0
        for tile in range(3):
            s = np.where(np.arange(32) < seen[row, tile], scale * scores[row, tile].astype(np.float64), -np.inf)
            new_max = max(row_max, s.max())
            reference = 0.0 if new_max == -np.inf else new_max
            p, rescale = np.exp(s - reference), np.exp(row_max - reference)
            row_max, row_sum = new_max, row_sum * rescale + p.sum()
            assert np.allclose(got[row, 32 * tile : 32 * tile + 32], p, rtol=1e-6, atol=0)
            assert got[row, 96 + 3 * tile] == np.float32(row_max)
            assert np.allclose(got[row, 97 + 3 * tile : 99 + 3 * tile], [row_sum, rescale], rtol=1e-6, atol=0)


def test_store_output_with_a_vector_width(backend: Backend, tmp_path: Path) -> None:
    """Vectors of one column: lane, lane + 8, …; columns beyond the head dim are left alone."""
    body = """\
    const float out_reg[4] = {float(t), t + 8.0f, t + 16.0f, t + 24.0f};
    fa::store_output<float, 8, 1>(reinterpret_cast<float*>(out), out_reg, 2.0f, t, 29);"""
    got = run(backend, tmp_path, body, block=8)
    assert f32(got, 29).tolist() == [2.0 * c for c in range(29)] and (got[29:32] == UNWRITTEN).all()


# -- schedule.cuh, stage.cuh -------------------------------------------------------------------------------------------


def test_place_in_sections(backend: Backend, tmp_path: Path) -> None:
    """fa::Place: every tile of every head once, section by section; the last of 7 heads by 3 has one. Its number leads back."""
    body = """\
    const fa::Place place = fa::place_in_sections(t, 4, 3, 7);
    out[3 * t] = place.tile, out[3 * t + 1] = place.head, out[3 * t + 2] = fa::number_in_sections(place, 4, 3, 7);"""
    got = run(backend, tmp_path, body, before="#include <fa/schedule.cuh>")[:84].reshape(28, 3)
    sections = [(0, 1, 2), (3, 4, 5), (6,)]
    places = [(tile, head) for heads in sections for tile in range(4) for head in heads]
    assert got.tolist() == [[tile, head, number] for number, (tile, head) in enumerate(places)]


@pytest.mark.parametrize(("causal", "shift"), [(False, 250), (True, 30), (True, -80)])
def test_key_tiles(causal: bool, shift: int, backend: Backend, tmp_path: Path) -> None:
    """fa::KeyTiles: every tile of 64 queries of every head once, and how many tiles of 64 keys it sees, at least one. Under the mask the last
    queries first, section by section: 1 MB are two key heads of 400 keys of 1200 bytes, so four of the six heads."""
    fields = {"batch": 3, "heads_q": 2, "heads_kv": 1, "seq_q": 150, "seq_kv": 400, "causal_shift": shift}
    body = """\
    using Tiles = fa::KeyTiles<64, 64>;
    const Tiles::Work work = t < 18 ? Tiles::of_number<1200>(args, t, 1) : Tiles::of_block(args);
    const int all[5] = {work.q_first, work.head, work.batch, work.tiles, Tiles::works(args)};
    for (int i = 0; i < 5; ++i) out[5 * t + i] = all[i];"""
    got = run(backend, tmp_path, body, causal=causal, fields=fields, before="#include <fa/key_tiles.cuh>", block=19)[:95].reshape(19, 5)
    last = {q: min(q + 64, 150) - 1 for q in (0, 64, 128)}
    tiles = {q: max(1, -(-min(400, max(0, row + shift + 1)) // 64)) if causal else 7 for q, row in last.items()}
    sections = [range(4), range(4, 6)]
    places = [(q, row) for heads in sections for q in (128, 64, 0) for row in heads] if causal else [(q, r) for r in range(6) for q in last]
    assert got.tolist() == [[q, row % 2, row // 2, tiles[q], 18] for q, row in (*places, (0, 0))]


def test_ring_of_stages(backend: Backend, tmp_path: Path) -> None:
    """fa::Ring and fa::RingPlace: stages in turn, and the parity of the round."""
    body = """\
    fa::Ring<3> ring;
    fa::RingPlace<3> place;
    for (int i = 0; i < t; ++i) ring.next(), place.next();
    out[4 * t] = ring.stage(), out[4 * t + 1] = ring.parity(), out[4 * t + 2] = place.stage, out[4 * t + 3] = place.parity;"""
    got = run(backend, tmp_path, body, before="#include <fa/stage.cuh>")[:128].reshape(32, 4)
    assert np.array_equal(got, np.stack([np.arange(32) % 3, np.arange(32) // 3 % 2] * 2, 1))


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
    return words_of(headers) - set(re.findall(r"\bfa::(?:formula::)?(\w+)", tests))


#: Words of a problem's own mask, score and sinks: a compile has them only with the problem's texts, so they are run through kernels
#: (tests/cli/test_formulas.py, and the faults planted in fa/score.cuh, fa/key_lists.cuh and fa/sink.cuh).
THROUGH_KERNELS = {
    *("ChosenWalk", "KeyLists", "SharedTanh", "add_sink", "exponentiate_pairs", "exponentiate_steps", "hide_scores"),
    *("lane_of_transposed", "load_columns", "merge_slice", "pair_of_score", "part_of"),
    *("needs_whole_tanh", "pair_gradients", "pair_probability", "real_of", "sees_of", "sink_of", "store_dsink"),
}


def test_every_word_has_a_test() -> None:
    """What a header of words defines stands as fa::word in this folder's tests."""
    headers = "\n".join(path.read_text() for path in sorted((INCLUDE / "fa").glob("*.cuh")))
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*words.py"))
    assert untested(headers, tests) == THROUGH_KERNELS
    assert {
        "row_pointer",
        "cvt_rn_bf16_f32",
        "Accumulate",
        "Vec",
        "load_rows",
        "online_softmax",
        "dot",
        "Staged",
        "multiply_rows",
    } <= words_of(headers)
    # and the patterns miss none but operators: a definition at namespace level is a line that is not indented
    defined = re.findall(r"^(?:\w.*__device__ __forceinline__|__device__).*", headers, re.M)
    assert len(_FUNCTION.findall(headers)) == sum("operator" not in line for line in defined)
    assert len(_CLASS.findall(headers)) == len(re.findall(r"^template <\w.*\bstruct (?!\w+<)[^;\n]*$", headers, re.M))


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
