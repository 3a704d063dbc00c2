"""Matrix products and exponentials as a float32 kernel rounds them, with the same bits on every machine: for the baselines.

BLAS adds up in an order of its own, which depends on the CPU, the number of threads and the release. Here the order is stated:

    acc = round(acc + sum of CHUNK products),    chunk after chunk, each rounding to float32

A product of two float32 numbers is exact in float64, and so nearly is a sum of CHUNK of them: its error, 2^-48 at most, changes the
rounding to float32 of one sum in a million. So the sums of a chunk may be anybody's, and BLAS stays. Of the roundings that a chain of
fused multiply-adds has, this has one in CHUNK, as a tensor core has one in each step.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np

from ..array import Array, ArrayModule

#: Products between two roundings. Each rounding is a pass over the output: fewer products cost more time, and change a budget little.
CHUNK = 32
#: Products that a tensor core of 8 bits adds at once, and the bits that it keeps behind the point of the largest (arXiv 2511.10909).
STEP_8, BITS_8 = 32, 13
#: Elements of an intermediate array whose memory a thread keeps.
KEPT = 1 << 18
#: Rows and columns of the output that a block of the GPU's kernel computes, and the terms that it holds at once. Where blocks of the
#: first number of rows would be fewer than BLOCKS, some two for each multiprocessor, they have the second.
ROWS, COLUMNS, STEP, BLOCKS = (128, 32), 64, 16, 256

_kept = threading.local()

_CODE = r"""
// acc = round(acc + sum of CHUNK products in float64), for a tile of ROWS x COLUMNS outputs: 256 threads with ROWS / 16 x 4 each. Strides
// are in elements. Operands lie in shared memory as float64, since a conversion costs more than a multiply-add.
extern "C" __global__ void __launch_bounds__(256)
product(const float* a, const float* b, float* out, long long rows, long long terms, long long columns,
        long long an, long long ar, long long ak, long long bn, long long bk, long long bc,
        long long on, long long oro, long long oc, int reverse) {
    __shared__ double a_smem[ROWS][STEP + 1], b_smem[STEP][COLUMNS + 1];
    const long long row0 = (long long)blockIdx.y * ROWS, column0 = (long long)blockIdx.x * COLUMNS;
    a += blockIdx.z * an, b += blockIdx.z * bn, out += blockIdx.z * on;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float acc[ROWS / 16][4];
    for (int i = 0; i < ROWS / 16; ++i)
        for (int j = 0; j < 4; ++j) {
            const long long r = row0 + y + 16 * i, c = column0 + x + 16 * j;
            acc[i][j] = r < rows && c < columns ? out[r * oro + c * oc] : 0.0f;
        }
    const long long chunks = (terms + CHUNK - 1) / CHUNK;
    for (long long chunk = 0; chunk < chunks; ++chunk) {
        double sum[ROWS / 16][4] = {};
        for (int part = 0; part < CHUNK; part += STEP) {
            const long long first = (reverse ? chunks - 1 - chunk : chunk) * CHUNK + part;
            for (int at = threadIdx.x; at < ROWS * STEP; at += 256) {  // neighbours in memory by neighbours among the threads
                const int r = ak == 1 ? at / STEP : at % ROWS, k = ak == 1 ? at % STEP : at / ROWS;
                a_smem[r][k] = row0 + r < rows && first + k < terms ? a[(row0 + r) * ar + (first + k) * ak] : 0.0f;
            }
            for (int at = threadIdx.x; at < COLUMNS * STEP; at += 256) {
                const int c = bk == 1 ? at / STEP : at % COLUMNS, k = bk == 1 ? at % STEP : at / COLUMNS;
                b_smem[k][c] = column0 + c < columns && first + k < terms ? b[(first + k) * bk + (column0 + c) * bc] : 0.0f;
            }
            __syncthreads();
            for (int k = 0; k < STEP; ++k)
                for (int i = 0; i < ROWS / 16; ++i)
                    for (int j = 0; j < 4; ++j) sum[i][j] = fma(a_smem[y + 16 * i][k], b_smem[k][x + 16 * j], sum[i][j]);
            __syncthreads();
        }
        for (int i = 0; i < ROWS / 16; ++i)
            for (int j = 0; j < 4; ++j) acc[i][j] = (float)(acc[i][j] + sum[i][j]);
    }
    for (int i = 0; i < ROWS / 16; ++i)
        for (int j = 0; j < 4; ++j) {
            const long long r = row0 + y + 16 * i, c = column0 + x + 16 * j;
            if (r < rows && c < columns) out[r * oro + c * oc] = acc[i][j];
        }
}

// The same sums of the terms of a row, by a warp: terms lie side by side.
extern "C" __global__ void __launch_bounds__(256)
summed(const float* a, float* out, long long rows, long long terms, int reverse) {
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32, chunks = (terms + CHUNK - 1) / CHUNK;
    if (row >= rows) return;
    float acc = 0;
    for (long long chunk = 0; chunk < chunks; ++chunk) {
        const long long at = (reverse ? chunks - 1 - chunk : chunk) * CHUNK + threadIdx.x % 32;
        double sum = at < terms ? a[row * terms + at] : 0.0f;
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        acc = (float)(acc + sum);
    }
    if (threadIdx.x % 32 == 0) out[row] = acc;
}
"""

_CODE_8 = r"""
// 2 to the exponent of x, at least `least`; 0 of 0.
__device__ float power(float x, float least) {
    return x == 0 ? 0 : fmaxf(__int_as_float(__float_as_int(x) & 0x7f800000), least);
}

// q k^T by steps of STEP_8 products, as products_of_8_bits has it: a thread an element of out, (heads, rows, keys). q: (heads, rows, dim),
// k: (heads, dim, keys), dim a multiple of STEP_8. With operations on whole arrays each product would be a pass over memory.
extern "C" __global__ void __launch_bounds__(256)
products_of_8_bits(const float* q, const float* k, float* out, long long rows, long long keys, long long size, int dim) {
    const long long at = blockIdx.x * 256ll + threadIdx.x;
    if (at >= size) return;
    q += at / keys * dim, k += at / (keys * rows) * dim * keys + at % keys;
    float sum = 0;
    for (int first = 0; first < dim; first += STEP_8) {
        float terms[STEP_8], largest = power(sum, 0x1p-126f);
        for (int i = 0; i < STEP_8; ++i) {
            const float a = q[first + i], b = k[(first + i) * keys];
            terms[i] = a * b, largest = fmaxf(largest, power(a, 0x1p-6f) * power(b, 0x1p-6f));
        }
        const float unit = (largest == 0 ? 1 : largest) * (1.0f / (1 << BITS_8));
        sum = truncf(sum / unit);
        for (int i = 0; i < STEP_8; ++i) sum += truncf(terms[i] / unit);
        sum = __int_as_float(__float_as_int(sum * unit) & -(1 << (23 - BITS_8)));
    }
    out[at] = sum;
}
"""


def product(xp: ArrayModule, a: Array, b: Array, reverse: bool = False, into: Array | None = None) -> Array:
    """a b + into, by the sums at the head of this file; reverse: from the last chunk of terms to the first.

    a: (n, rows, terms), b: (n, terms, columns), into: (n, rows, columns), which is changed; by default zeros. All float32 arrays of xp.
    """
    out = xp.zeros((*a.shape[:2], b.shape[2]), "float32") if into is None else into
    if xp is not np:
        if out.size and a.shape[2]:
            _on_gpu(xp, a, b, out, reverse)
        return out
    terms = a.shape[2]
    a, b, chunk = _wide("a", a), _wide("b", b), _scratch("chunk", out.shape)
    starts = range(0, terms, CHUNK)
    for start in reversed(starts) if reverse else starts:
        np.matmul(a[:, :, start : start + CHUNK], b[:, start : start + CHUNK], out=chunk)
        np.add(out, chunk, out=out, casting="same_kind")  # in float64, then rounded
    return out


def summed(xp: ArrayModule, terms: Array, reverse: bool = False) -> Array:
    """The sums over the last axis, of CHUNK terms at a time as those of :func:`product`. terms: (n, rows, terms), float32 -> (n, rows)."""
    if xp is np:
        return product(xp, terms, np.ones((len(terms), terms.shape[2], 1), "float32"), reverse)[:, :, 0]
    out = xp.zeros(terms.shape[:2], "float32")
    if terms.size:
        _summed_on_gpu(xp, terms, out, reverse)
    return out


def products_of_8_bits(xp: ArrayModule, q: Array, k: Array) -> Array:
    """q k^T, (n, rows, D), (n, keys, D) -> (n, rows, keys), float32, by steps of STEP_8, as a tensor core of 8 bits adds.

    The terms of a step and the sum so far are aligned to the largest exponent and cut off BITS_8 behind the point; so is their sum. All
    of it is exact in float32: a term has 15 bits, their sum 21.
    """
    out: Array = xp.zeros((q.shape[0], q.shape[1], k.shape[1]), "float32")
    if xp is not np:
        if out.size:
            _products_of_8_bits_on_gpu(xp, q, k, out)
        return out
    size_q, size_k = _power(q, -6), _power(k, -6)
    for first in range(0, q.shape[2], STEP_8):
        step = range(first, min(first + STEP_8, q.shape[2]))
        largest = _power(out, -126)
        for d in step:
            largest = np.maximum(largest, size_q[:, :, None, d] * size_k[:, None, :, d])
        unit = np.where(largest == 0, np.float32(1), largest) * np.float32(2.0**-BITS_8)
        out = np.trunc(out / unit)
        for d in step:
            out += np.trunc(q[:, :, None, d] * k[:, None, :, d] / unit)
        out *= unit
        out = (out.view(np.uint32) & np.uint32(-(1 << (23 - BITS_8)) % 2**32)).view(np.float32)
    return out


def _power(x: Array, least: int) -> Array:
    """2 to the exponent of each element, at least 2^least; 0 of zeros."""
    exponent = np.maximum(np.frexp(x)[1] - 1, least)
    return np.where(x == 0, np.float32(0), ((exponent + 127).astype(np.uint32) << np.uint32(23)).view(np.float32))


def exp(xp: ArrayModule, array: Array) -> Array:
    """exp of a float32 array, written over it: that of float64, rounded once. numpy's own of float32 differs by CPU and release."""
    if xp is not np:
        _exp_on_gpu(xp, array)
        return array
    wide = _wide("a", array)
    array[...] = np.exp(wide, out=wide)
    return array


def _scratch(name: str, shape: tuple[int, ...]) -> Array:
    """A float64 array for intermediate values, valid until the next one of that name: new memory costs more than the arithmetic in it."""
    size, kept = math.prod(shape), vars(_kept)
    if size > KEPT:
        return np.empty(shape, "float64")
    if name not in kept:
        kept[name] = np.empty(KEPT, "float64")
    found: Array = kept[name][:size].reshape(shape)
    return found


def _wide(name: str, array: Array) -> Array:
    """A float32 array in float64, in the order in which it lies in memory: a copy across it takes several times as long."""
    if array.ndim == 3 and array.strides[1] < array.strides[2]:
        return _wide(name, array.swapaxes(1, 2)).swapaxes(1, 2)
    found = _scratch(name, array.shape)
    found[...] = array
    return found


def _on_gpu(xp: Any, a: Array, b: Array, out: Array, reverse: bool) -> None:
    (heads, rows, terms), columns = a.shape, b.shape[2]
    strides = [np.int64(stride // 4) for array in (a, b, out) for stride in array.strides]
    sizes = [np.int64(size) for size in (rows, terms, columns)]
    blocks, (many, few) = -(-columns // COLUMNS) * heads, ROWS
    of_block = many if blocks * -(-rows // many) >= BLOCKS else few
    grid = -(-columns // COLUMNS), -(-rows // of_block)
    for first in range(0, heads, 65535):  # the largest grid in z; in y a tile of the baselines has far fewer
        some = slice(first, first + 65535)
        arguments = (a[some], b[some], out[some], *sizes, *strides, np.int32(reverse))
        _kernels(xp, of_block).get_function("product")((*grid, min(65535, heads - first)), (256,), arguments)


def _summed_on_gpu(xp: Any, terms: Array, out: Array, reverse: bool) -> None:
    sizes = np.int64(out.size), np.int64(terms.shape[2]), np.int32(reverse)
    _kernels(xp, ROWS[0]).get_function("summed")((-(-out.size // 8),), (256,), (xp.ascontiguousarray(terms), out, *sizes))


def _exp_on_gpu(xp: Any, array: Array) -> None:
    _exp_kernel(xp)(array, array)


def _products_of_8_bits_on_gpu(xp: Any, q: Array, k: Array, out: Array) -> None:
    (heads, rows, dim), keys = q.shape, k.shape[1]
    whole = -(-dim // STEP_8) * STEP_8  # terms of 0 change no sum
    a, b = xp.zeros((heads, rows, whole), "float32"), xp.zeros((heads, whole, keys), "float32")
    a[:, :, :dim], b[:, :dim] = q, k.swapaxes(1, 2)
    sizes = np.int64(rows), np.int64(keys), np.int64(out.size), np.int32(whole)
    _kernels(xp, ROWS[0]).get_function("products_of_8_bits")((-(-out.size // 256),), (256,), (a, b, out, *sizes))


@functools.cache
def _exp_kernel(xp: Any) -> Any:
    """In one pass over memory."""
    return xp.ElementwiseKernel("float32 x", "float32 y", "y = (float)exp((double)x)", "exp_of_float64")


@functools.cache
def _kernels(xp: Any, rows: int) -> Any:
    sizes = {"CHUNK": CHUNK, "STEP": STEP, "ROWS": rows, "COLUMNS": COLUMNS, "STEP_8": STEP_8, "BITS_8": BITS_8}
    return xp.RawModule(code=_CODE + _CODE_8, options=tuple(f"-D{name}={size}" for name, size in sizes.items()))
