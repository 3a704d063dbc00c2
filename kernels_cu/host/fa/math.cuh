// The CPU meaning of <fa/math.cuh>.
#pragma once

#include <fa/types.cuh>

namespace fa {

constexpr float log2e = 1.44269504088896340736f;
constexpr float ln2 = 0.693147180559945309417f;

__forceinline__ float infinity() { return __builtin_inff(); }

// 2^x without branches or calls, so that the compiler can do several at once: split x into the nearest integer and a rest in
// [-1/2, 1/2], a polynomial of degree 6 for the rest (minimax, error 2e-9 relative), the integer added to the exponent. Flushes to
// zero below 2^-126.
__forceinline__ float exp2_approx(float x) {
    float within = x < -127.0f ? -127.0f : x;
    within = within > 128.0f ? 128.0f : within;
    float shifted = within + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
    float rest = within - (shifted - 12582912.0f);
    float p = 1.5353362e-4f;
    p = p * rest + 1.3398875e-3f;
    p = p * rest + 9.6184369e-3f;
    p = p * rest + 5.5503324e-2f;
    p = p * rest + 2.4022648e-1f;
    p = p * rest + 6.9314718e-1f;
    p = p * rest + 1.0f;
    float y = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    y = x < -126.0f ? 0.0f : y;
    y = x >= 128.0f ? infinity() : y;
    return x != x ? x : y;
}

// Subnormal arguments are zero on a GPU under -ftz=true, which CuPy always gives; libm looks at the bits, so they are made zero here.
__forceinline__ float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

// 1 / x.
__forceinline__ float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }

__forceinline__ float exp(float x) { return ::expf(x); }
__forceinline__ double exp(double x) { return ::exp(x); }
__forceinline__ float log(float x) { return ::logf(flushed(x)); }
__forceinline__ double log(double x) { return ::log(x); }

}  // namespace fa
