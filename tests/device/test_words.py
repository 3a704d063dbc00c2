"""Every word of <fa/...> and of CUDA C++ that kernels here speak, against numpy, on every backend found; and against a real GPU.

golden_h200.npz holds what an H200 answered to the same inputs (made by `FA_CLI_GOLDEN=1 pytest tests/device/test_words.py` on
one). Moves and conversions must match it bit for bit, approximate functions within 2 ulp. That is what makes the CPU's meaning
of a word more than our own reading of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from planted import top

from harness.backends import Backend
from harness.check.tensors import Bound
from harness.kernel import Kernel
from harness.problem import Problem

GOLDEN = Path(__file__).with_name("golden_h200.npz")
WIDTH, ROWS = 64, 64
COUNT = WIDTH * ROWS  # elements: one thread each, 256 a block
SOURCE = (
    top(title='"one word"', causal="false", gqa="false", cross="false")
    + """\
// [[launch]]
// entry = "forward"
// grid = "seq_q * head_dim // 256"
// block = 256
// shared = 4096
// ///
#include <fa/copy.cuh>
#include <fa/warp.cuh>
using fa::uint16_t;
using fa::uint32_t;
%s
extern "C" __global__ void forward(const __grid_constant__ fa::Args args) {
    const uint32_t* in = static_cast<const uint32_t*>(args.Q.data);
    uint32_t* out = static_cast<uint32_t*>(args.O.data);
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = fa::lane_id();
    const uint32_t bits = in[i];
    const float x = __uint_as_float(bits);
    uint32_t y = 0;
    (void)x, (void)lane;
    %s
    out[i] = y;
}
"""
)


def run_word(backend: Backend, folder: Path, body: str, bits: Any, before: str = "") -> Any:
    """The 32-bit answers of a kernel body to 32-bit inputs, one thread each: `bits` (also as float `x`) to `y`."""
    path = folder / "word_forward.cu"
    path.write_text(SOURCE % (before, body))
    problem = Problem.of(1, 1, ROWS, WIDTH)
    q = bits.view(np.float32).reshape(problem.shape("Q"))
    bound = Bound(backend, backend.load(Kernel.read(path), problem), problem, {"Q": q, "K": q, "V": q})
    return bound.run()["O"].reshape(-1).view(np.uint32)


def inputs() -> Any:
    """Bits that cover float32: random patterns, ties of both 16-bit types, the edges, small and ordinary numbers."""
    draw = np.random.RandomState(7)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 3.3895314e38, 3.4e38, 1e-38, 1e-45]
    ties = (draw.randint(0, 1 << 16, 512).astype(np.uint32) << 16) | 0x8000  # bfloat16's
    half_ties = (draw.randint(0x38000000 >> 13, 0x47000000 >> 13, 512).astype(np.uint32) << 13) | 0x1000  # float16's
    small = draw.randn(1024).astype(np.float32)
    wide = (draw.uniform(-160, 160, 1024)).astype(np.float32)
    parts = [np.array(special, np.float32).view(np.uint32), ties, half_ties, small.view(np.uint32), wide.view(np.uint32)]
    rest = draw.randint(0, 1 << 32, COUNT, np.uint64).astype(np.uint32)
    return np.concatenate([*parts, rest])[:COUNT]


BITS = inputs()
X = BITS.view(np.float32)
LANE = np.arange(COUNT) % 32
NAN = np.uint32(0x7FFFFFFF)
FLUSHED = np.where(np.abs(X) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), X), X)  # CuPy compiles with -ftz=true


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32).view(np.uint32)


def to16(dtype: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = X.astype(dtype).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(X), 0x7FFF, bits)


def from16(dtype: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return (BITS & 0xFFFF).astype(np.uint16).view(dtype).astype(np.float32).view(np.uint32)


def lanes(source: Any, outside: Any = None) -> Any:
    """The value of another lane of the warp (one's own where `outside`)."""
    base = np.arange(COUNT) - LANE
    return BITS[base + np.where(outside, LANE, source) if outside is not None else base + source]


def groups(width: int, reduce: Callable[..., Any], values: Any) -> Any:
    return np.repeat(reduce(values.reshape(-1, width), axis=1), width)


def butterfly(width: int, values: Any) -> Any:
    """The sum in the order of a butterfly of shuffles, so that float32 bits can be compared."""
    lane, values = np.arange(COUNT), values.astype(np.float32)
    for step in (16, 8, 4, 2, 1):
        if step < width:
            values = values + values[lane ^ step]
    return values


SMALL = np.where(np.isfinite(X) & (np.abs(X) < 1e3) & (np.abs(X) > 1e-3), X, np.float32(1.5))
TAME = "const float t = (x - x == 0 && fabsf(x) < 1e3f && fabsf(x) > 1e-3f) ? x : 1.5f;"

#: name: kernel body, the answer by numpy (bits). Compared bit for bit, but any NaN equals any NaN where the word says nothing of it.
EXACT: dict[str, tuple[str, Callable[[], Any]]] = {
    "cvt_rn_f16_f32": ("y = fa::cvt_rn_f16_f32(x).bits;", lambda: to16(np.float16)),
    "cvt_rn_bf16_f32": ("y = fa::cvt_rn_bf16_f32(x).bits;", lambda: to16(ml_dtypes.bfloat16)),
    "narrow": (
        "y = fa::narrow<fa::float16>(x).bits | fa::narrow<fa::bfloat16>(x).bits << 16;",
        lambda: to16(np.float16) | to16(ml_dtypes.bfloat16) << 16,
    ),
    "cvt_f32_f16": ("y = __float_as_uint(fa::cvt_f32_f16({uint16_t(bits)}));", lambda: from16(np.float16)),
    "cvt_f32_bf16": ("y = __float_as_uint(fa::cvt_f32_bf16({uint16_t(bits)}));", lambda: from16(ml_dtypes.bfloat16)),
    "load_128": ("y = fa::load_128(in + i / 4 * 4)[i % 4];", lambda: BITS),
    "load_128_upto": (
        "y = fa::load_128_upto(in + i / 4 * 4, i / 4 % 6 - 1)[i % 4];",
        lambda: np.where(np.arange(COUNT) % 4 < np.arange(COUNT) // 4 % 6 - 1, BITS, 0),
    ),
    "load_vec": ("y = fa::load_vec<2>(in + i / 2 * 2)[i % 2];", lambda: BITS),
    "store_128_upto": (
        "uint32_t* shared = fa::dynamic_shared<uint32_t>(); shared[threadIdx.x] = 5; __syncthreads();"
        "if (i % 4 == 0) fa::store_128_upto(shared + threadIdx.x, fa::load_128(in + i), i / 4 % 6 - 1); "
        "__syncthreads(); y = shared[threadIdx.x];",
        lambda: np.where(np.arange(COUNT) % 4 < np.arange(COUNT) // 4 % 6 - 1, BITS, 5),
    ),
    "dynamic_shared": (
        "uint32_t* shared = fa::dynamic_shared<uint32_t>(); shared[threadIdx.x] = bits; __syncthreads(); y = shared[threadIdx.x ^ 255];",
        lambda: BITS.reshape(-1, 256)[:, ::-1].ravel(),
    ),
    "__shared__": (
        "__shared__ uint32_t tile[16][17]; tile[threadIdx.x / 16][threadIdx.x % 16] = bits; "
        "__syncthreads(); y = tile[threadIdx.x % 16][threadIdx.x / 16];",
        lambda: BITS.reshape(-1, 16, 16).transpose(0, 2, 1).ravel(),
    ),
    "extern __shared__": (
        "extern __shared__ uint32_t anything[];\n    anything[threadIdx.x] = bits; __syncthreads(); y = anything[255 - threadIdx.x];",
        lambda: BITS.reshape(-1, 256)[:, ::-1].ravel(),
    ),
    "__shfl_sync": ("y = __shfl_sync(0xffffffffu, bits, lane * 7 + 3);", lambda: lanes((LANE * 7 + 3) % 32)),
    "__shfl_sync width 8": ("y = __shfl_sync(0xffffffffu, bits, 2, 8);", lambda: lanes(LANE // 8 * 8 + 2)),
    "__shfl_xor_sync": ("y = __shfl_xor_sync(0xffffffffu, bits, 5);", lambda: lanes(LANE ^ 5)),
    "__shfl_xor_sync width 4": ("y = __shfl_xor_sync(0xffffffffu, bits, 4, 4);", lambda: lanes(LANE ^ 4, (LANE ^ 4) // 4 > LANE // 4)),
    "__shfl_up_sync": ("y = __shfl_up_sync(0xffffffffu, bits, 3);", lambda: lanes(LANE - 3, LANE < 3)),
    "__shfl_up_sync width 8": ("y = __shfl_up_sync(0xffffffffu, bits, 3, 8);", lambda: lanes(LANE - 3, LANE % 8 < 3)),
    "__shfl_down_sync": ("y = __shfl_down_sync(0xffffffffu, bits, 3);", lambda: lanes(LANE + 3, LANE > 28)),
    "__shfl_down_sync width 8": ("y = __shfl_down_sync(0xffffffffu, bits, 3, 8);", lambda: lanes(LANE + 3, LANE % 8 > 4)),
    "a shuffle among half the lanes": (
        "if (lane % 2) y = __shfl_xor_sync(0xaaaaaaaau, bits, 2); else y = __shfl_xor_sync(0x55555555u, bits, 4);",
        lambda: lanes(np.where(LANE % 2, LANE ^ 2, LANE ^ 4)),
    ),
    "__ballot_sync": (
        "y = __ballot_sync(0xffffffffu, bits & 1);",
        lambda: np.repeat(((BITS & 1).reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1), 32),
    ),
    "__any_sync, __all_sync": (
        "y = (__any_sync(0xffffffffu, (bits & 31) == 7) != 0) + 2 * (__all_sync(0xffffffffu, (bits & 63) != 7) != 0);",
        lambda: groups(32, np.max, (BITS & 31) == 7).astype(np.uint32) + 2 * groups(32, np.min, (BITS & 63) != 7),
    ),
    "group_max": (
        "y = __float_as_uint(fa::group_max<16>(x - x == 0 ? x : 0.0f));",
        lambda: f32(groups(16, np.max, np.where(np.isfinite(FLUSHED), FLUSHED, 0)) + np.float32(0)),
    ),
    "group_max of 2": (TAME + "y = __float_as_uint(fa::group_max<2>(t));", lambda: f32(groups(2, np.max, SMALL))),
    "group_sum": (TAME + "y = __float_as_uint(fa::group_sum<32>(t));", lambda: f32(butterfly(32, SMALL))),
    "group_sum of 4": (TAME + "y = __float_as_uint(fa::group_sum<4>(t));", lambda: f32(butterfly(4, SMALL))),
    "group_sum of doubles": (
        TAME + "y = __float_as_uint(float(fa::group_sum<8>(double(t))));",
        lambda: f32(groups(8, np.sum, SMALL.astype(np.float64))),
    ),
    "atomicAdd": (
        "int* count = fa::dynamic_shared<int>(); if (threadIdx.x == 0) count[0] = 0; __syncthreads();"
        "atomicAdd(count, int(bits & 7)); __syncthreads(); y = count[0];",
        lambda: groups(256, np.sum, BITS & 7),
    ),
    "atomicAdd of floats": (
        "float* sum = fa::dynamic_shared<float>(); if (threadIdx.x == 0) sum[0] = 0; __syncthreads();"
        "atomicAdd(sum, float(bits & 7)); __syncthreads(); y = uint32_t(sum[0]);",
        lambda: groups(256, np.sum, BITS & 7),
    ),
    "fmaxf of NaN": ("y = __float_as_uint(fmaxf(x, 1.0f));", lambda: f32(np.fmax(FLUSHED, np.float32(1)))),
    "infinity": ("y = __float_as_uint(-fa::infinity());", lambda: np.full(COUNT, 0xFF800000)),
}

with np.errstate(all="ignore"):
    EXP2 = np.where(X < -126, 0.0, np.exp2(X.astype(np.float64)))
    EXP2 = np.where(np.finfo(np.float32).max < EXP2, np.inf, EXP2)
    LOG = np.where(FLUSHED < 0, np.nan, np.log(np.abs(FLUSHED.astype(np.float64))))
    EXP = np.exp(X.astype(np.float64))
    EXP = np.where(np.finfo(np.float32).max < EXP, np.inf, np.where(np.finfo(np.float32).tiny > EXP, 0, EXP))
#: name: kernel body, the answer in float64, how many ulp of float32 it may be off, and an absolute slack (near a zero of log2).
APPROXIMATE: dict[str, tuple[str, Any, float, float]] = {
    "exp2_approx": ("y = __float_as_uint(fa::exp2_approx(x));", EXP2, 2, 0),
    "exp": ("y = __float_as_uint(fa::exp(x));", EXP, 2, 1e-37),
    "log": ("y = __float_as_uint(fa::log(x));", LOG, 2, 0),
    "exp of doubles": ("y = __float_as_uint(float(fa::exp(double(x))));", EXP, 1, 1e-37),
    "log of doubles": ("y = __float_as_uint(float(fa::log(double(x))));", LOG, 1, 0),
}


def ulps(bits: Any, wanted: Any, slack: float = 0.0) -> Any:
    """How many ulp of float32 the answers are from what is wanted; 0 for equal infinities and NaN; inf for one of them alone."""
    with np.errstate(all="ignore"):
        got, wanted = bits.view(np.float32).astype(np.float64), np.asarray(wanted, np.float64)
        spacing = np.spacing(np.maximum(np.abs(wanted), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
        off = np.maximum(np.abs(got - wanted) - slack, 0) / spacing
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    return np.where(same, 0, np.where(np.isfinite(got) & np.isfinite(wanted), off, np.inf))


def same_bits(got: Any, wanted: Any) -> Any:
    """Equal, or both a float32 NaN."""
    got, wanted = np.asarray(got, np.uint32), np.asarray(wanted).astype(np.uint32)
    return (got == wanted) | ((got & 0x7FFFFFFF > 0x7F800000) & (wanted & 0x7FFFFFFF > 0x7F800000))


def golden(name: str, answers: Any, backend: Backend) -> Any | None:
    """The H200's answers to the same inputs, None if it was never asked; recorded instead when FA_CLI_GOLDEN is set on a GPU."""
    if os.environ.get("FA_CLI_GOLDEN") and backend.name == "cuda":
        found = dict(np.load(GOLDEN)) if GOLDEN.exists() else {}
        np.savez_compressed(GOLDEN, **found | {name: answers})
    return np.load(GOLDEN).get(name)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, backend: Backend, tmp_path: Path) -> None:
    """Moves, conversions, shuffles, votes and sums of a fixed order: the bits numpy gives and the bits the H200 gave."""
    body, wanted = EXACT[name]
    answers = run_word(backend, tmp_path, body, BITS)
    good = same_bits(answers, wanted())
    at = int(good.argmin())
    assert good.all(), f"input {BITS[at]:#010x} at {at} gives {answers[at]:#010x}, not {int(np.asarray(wanted())[at]):#010x}"
    assert np.array_equal(answers, golden(name, answers, backend)), "not the bits of the GPU, or it was never asked"


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate(name: str, backend: Backend, tmp_path: Path) -> None:
    """Within a few ulp of the true value, and within 2 ulp of what the H200 gave."""
    body, wanted, most, slack = APPROXIMATE[name]
    answers = run_word(backend, tmp_path, body, BITS)
    off = ulps(answers, wanted, slack)
    at = int(off.argmax())
    assert off.max() <= most, f"{X[at]!r} gives {answers.view(np.float32)[at]!r}, not {wanted[at]!r} ({off[at]} ulp)"
    recorded = golden(name, answers, backend)
    assert recorded is not None and ulps(answers, recorded.view(np.float32), slack).max() <= 2


def test_reciprocals(backend: Backend, tmp_path: Path) -> None:
    """fa::rcp_approx within an ulp of the true value; subnormal values are 0."""
    answers = run_word(backend, tmp_path, "y = __float_as_uint(fa::rcp_approx(x));", BITS)
    with np.errstate(all="ignore"):
        assert ulps(answers, 1 / FLUSHED.astype(np.float64), 2.0**-126).max() <= 1


def test_a_shuffle_from_a_lane_that_does_not_take_part(tmp_path: Path) -> None:
    """Undefined on a GPU; the CPU engine gives NaN, or a pattern that stands out."""
    from harness.backends.host.backend import Host

    body = "if (lane % 2) y = __float_as_uint(__shfl_xor_sync(0xaaaaaaaau, x, 1)); else y = __shfl_xor_sync(0x55555555u, bits, 1);"
    answers = run_word(Host(), tmp_path, body, BITS)
    assert np.isnan(answers.view(np.float32)[LANE % 2 == 1]).all()
    assert (answers[LANE % 2 == 0] == 0xDEADDEAD).all()


def test_a_wrong_word_would_be_seen(tmp_path: Path) -> None:
    """The comparison can fail: truncation in place of rounding differs somewhere."""
    from harness.backends.host.backend import Host

    answers = run_word(Host(), tmp_path, "y = bits >> 16;", BITS)
    assert not same_bits(answers, to16(ml_dtypes.bfloat16)).all()
