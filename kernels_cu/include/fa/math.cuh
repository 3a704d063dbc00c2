// The functions of the softmax. exp2_approx is one instruction; exp and log are the accurate ones.
#pragma once

#include <fa/types.cuh>

namespace fa {

constexpr float log2e = 1.44269504088896340736f;
constexpr float ln2 = 0.693147180559945309417f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// 2^x within 2 ulp; 2^-inf = 0; subnormal results are flushed to zero (ex2.approx.ftz).
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x within 1 ulp; a subnormal x or result is 0 (rcp.approx.ftz).
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }
__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ double log(double x) { return ::log(x); }

}  // namespace fa
