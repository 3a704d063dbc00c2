"""Problems of 8 bits: what an element is worth, how numbers are rounded, and what the class p8 is judged by."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from harness.check import rounded
from harness.check.oracle import Oracle, arithmetic_of
from harness.check.rounded import products_of_8_bits
from harness.dataset import generate
from harness.dataset.storage import round_to, through_e4m3, widen
from harness.fault import UsageFault
from harness.problem import DESCALES, Problem


def test_rounding_is_that_of_ml_dtypes() -> None:
    """To nearest even, also of subnormal numbers; beyond 448 it is 448; every byte is widened exactly."""
    draw = np.random.RandomState(1)
    x = np.ldexp(draw.randn(1 << 16), draw.randint(-14, 9, 1 << 16)).astype(np.float32)
    wanted = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(through_e4m3(np, x), wanted.astype(np.float32))
    assert np.array_equal(round_to(np, x, "float8_e4m3").view(np.uint8), wanted.view(np.uint8))
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(widen(np, every, "float8_e4m3"), every.astype(np.float64), equal_nan=True)


def test_a_problem_of_8_bits() -> None:
    """One byte an element, O in bfloat16, descales of each batch and key head: 1, or one number for all, or of their shape."""
    plain = Problem.of(2, 4, 64, 80, heads_kv=2, dtype="fp8")
    assert plain.dtype == "float8_e4m3" and plain.tensor_bytes("Q") == 2 * 4 * 64 * 80 and plain.tensor_dtype("O") == "bfloat16"
    assert [each.name for each in plain.tensors] == list(DESCALES.values()) and plain.descales == {1.0} and not plain.hashes
    assert plain.with_(heads_q=2, heads_kv=1).tensors[0].shape == (2, 1)
    assert Problem.from_folder(plain.folder) == plain
    half = plain.with_(tensors={"descale_v": 0.5})
    assert half != plain and half.descales == {1.0, 0.5} and half.hashes
    with pytest.raises(UsageFault, match="descale_q has the shape"):
        plain.with_(tensors={"descale_q": np.array([1.0, 2.0])})


def test_the_reference_is_of_descaled_elements() -> None:
    """Scores with the descales of Q and K, O with that of V: float64 of the same numbers in float64 files."""
    draw = np.random.RandomState(2)
    values = {name: np.exp2(draw.randn(1, 2)).astype(np.float32) for name in DESCALES.values()}
    problem = Problem.of(1, 4, 33, 16, heads_kv=2, dtype="float8_e4m3", causal=True, tensors=values)
    inputs = generate.inputs(problem, 3, ("Q", "K", "V"))
    wide = {name: inputs[name].astype(np.float64) for name in "QKV"}
    for name in "QKV":
        worth = values[DESCALES[name]].astype(np.float64).repeat(2 if name == "Q" else 1, axis=1)
        wide[name] = wide[name] * worth[..., None, None]
    exact = Oracle(Problem.of(1, 4, 33, 16, heads_kv=2, dtype="float64", causal=True), wide).reference
    mine = Oracle(problem, inputs).reference
    assert np.abs(mine["O"] - exact["O"]).max() < 1e-12 and np.abs(mine["logsumexp"] - exact["logsumexp"]).max() < 1e-12


def test_products_of_8_bits() -> None:
    """Small integers are exact; of others an error of 13 bits, not of 23."""
    draw = np.random.RandomState(4)
    a, b = (draw.randint(-8, 9, (1, 20, 80)).astype(np.float32) for _ in range(2))
    assert np.array_equal(products_of_8_bits(np, a, b)[0], a[0] @ b[0].T)
    a, b = (through_e4m3(np, draw.randn(1, 20, 80).astype(np.float32)) for _ in range(2))
    error = np.abs(products_of_8_bits(np, a, b)[0] - a[0].astype(np.float64) @ b[0].T.astype(np.float64)).max()
    assert 2.0**-12 < error < 2.0**-6


#: What g++ wants of the GPU's words, and a loop over blocks and threads.
_HOST = r"""
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __launch_bounds__(threads)
static struct { int x; } blockIdx, threadIdx;
static int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
static float __int_as_float(int i) { float x; memcpy(&x, &i, 4); return x; }
"""
_ALL = r"""
extern "C" void all(const float* q, const float* k, float* out, long long rows, long long keys, long long size, int dim) {
    for (blockIdx.x = 0; blockIdx.x < (size + 255) / 256; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) products_of_8_bits(q, k, out, rows, keys, size, dim);
}
"""


def test_the_gpus_products_of_8_bits_are_numpys(tmp_path: Path) -> None:
    """Bit for bit, of numbers of all sizes, zeros, and sums that nearly cancel."""
    (tmp_path / "code.cpp").write_text(_HOST + rounded._CODE_8 + _ALL)
    values = [f"-DSTEP_8={rounded.STEP_8}", f"-DBITS_8={rounded.BITS_8}"]
    subprocess.run(["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", *values, "code.cpp", "-o", "code.so"], cwd=tmp_path, check=True)
    run, draw = ctypes.CDLL(str(tmp_path / "code.so")).all, np.random.RandomState(6)
    q, k = (through_e4m3(np, np.ldexp(draw.randn(3, rows, 96), draw.randint(-9, 9, (3, rows, 96))).astype(np.float32)) for rows in (20, 31))
    q[:, 3], k[:, 5], k[:, 6, ::2], k[:, 6, 1::2] = 0, 0, k[:, 7, ::2], -k[:, 7, ::2]
    out, swapped = np.empty((3, 20, 31), "float32"), np.ascontiguousarray(k.swapaxes(1, 2))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (q, swapped, out)]
    run(*pointers, *(ctypes.c_longlong(size) for size in (20, 31, out.size)), 96)
    assert np.array_equal(out, products_of_8_bits(np, q, k))


def test_the_class_sees_what_is_wrong() -> None:
    """The reference itself passes; a descale that is 2 % off, one key too many and a P that is cut off do not."""
    problem = Problem.of(1, 2, 256, 64, dtype="float8_e4m3")
    assert arithmetic_of(problem) == "p8"
    inputs = generate.inputs(problem, 5, ("Q", "K", "V"))
    oracle = Oracle(problem, inputs)
    right = oracle.forward_outputs
    assert all(verdict.passed for verdict in oracle.judge(right, "p8").values())
    more = Oracle(problem.with_(tensors={"descale_q": 1.02}), inputs).forward_outputs
    assert not oracle.judge(more, "p8")["logsumexp"].passed
    less = {"O": (right["O"].astype(np.float32) * 0.98).astype(right["O"].dtype), "logsumexp": right["logsumexp"]}
    assert not oracle.judge(less, "p8")["O"].passed
    longer = {name: np.concatenate([inputs[name], inputs[name][:, :, :1]], 2) if name != "Q" else inputs[name] for name in "QKV"}
    assert not oracle.judge(Oracle(problem.with_(seq_kv=257), longer).forward_outputs, "p8")["logsumexp"].passed


def products_of_13_bits(p: np.ndarray, v: np.ndarray, keys: int) -> np.ndarray:
    """p v with sums of `keys` keys as Hopper's tensor cores of 8 bits make them, from MMA-Sim's description (arXiv 2511.10909), in float64.

    Each 32 products, by the exponents of their factors, and the sum so far are cut off 13 bits behind the largest of them; then their sum is.
    """
    out = np.zeros((p.shape[0], v.shape[1]))
    for first in range(0, p.shape[1], keys):
        total = np.zeros_like(out)
        for step in range(first, min(first + keys, p.shape[1]), 32):
            a, b = p[:, step : step + 32, None], v[None, step : step + 32]
            exponents = np.where(a * b == 0, -99.0, sum(np.maximum(np.frexp(each)[1] - 1, -6) for each in (a, b)))
            largest = np.maximum(exponents.max(1), np.where(total == 0, -99, np.frexp(total)[1] - 1))
            unit = np.exp2(largest - 13)
            total = (np.trunc(total / unit) + np.trunc(a * b / unit[:, None]).sum(1)) * unit
            unit = np.exp2(np.frexp(total)[1] - 14.0)
            total = np.trunc(total / unit) * unit
        out += total.astype(np.float32)
    return out


@pytest.mark.parametrize("scale, seen", [(1.0, True), (0.03, False)])
def test_the_class_sees_sums_that_are_not_promoted(scale: float, seen: bool) -> None:
    """V is positive, and rows are nearly copies: a kernel that adds to float32 after 128 keys passes, one that never does loses 1.5 %.

    With the small scale the P of a row are nearly alike, and so are their roundings, of up to 2^-5: a right kernel passes, and 1.5 % does too.
    """
    problem = Problem.of(1, 1, 64, 64, 1, 1000, dtype="float8_e4m3", scale=scale / 8)
    inputs = generate.inputs(problem, 1, ("Q", "K", "V"))
    inputs["V"] = np.abs(inputs["V"].astype(np.float32)).astype(inputs["V"].dtype)
    oracle = Oracle(problem, inputs)
    q, k, v = (inputs[name][0, 0].astype(np.float64) for name in "QKV")
    s = q @ k.T * problem.scale
    p = np.exp(s - s.max(1, keepdims=True))
    passed = []
    for keys in (128, 1000):
        narrow = through_e4m3(np, (256 * p).astype(np.float32)).astype(np.float64)
        o = products_of_13_bits(narrow, v, keys) / (256 * p.sum(1, keepdims=True))
        verdict = oracle.judge({"O": o[None, None].astype(ml_dtypes.bfloat16)}, "p8")["O"]
        passed.append((verdict.passed, verdict.shared))
    assert passed == [(True, False), (not seen, seen)]
