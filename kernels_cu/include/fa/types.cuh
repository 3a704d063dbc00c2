// The storage types and their conversions. float16 and bfloat16 are only stored: arithmetic is in float (double for float64).
#pragma once

#include <fa/args.cuh>

namespace fa {

using float32 = float;
using float64 = double;
struct alignas(2) float16 {
    uint16_t bits;
};
struct alignas(2) bfloat16 {
    uint16_t bits;
};

// The type a kernel computes in for a storage type: float, but double for float64.
template <class T> struct Accumulate {
    using type = float;
};
template <> struct Accumulate<double> {
    using type = double;
};
template <class T> using accumulate_t = typename Accumulate<T>::type;

__device__ __forceinline__ float cvt_f32_f16(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ float16 cvt_rn_f16_f32(float x) {
    float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

__device__ __forceinline__ float cvt_f32_bf16(bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

__device__ __forceinline__ bfloat16 cvt_rn_bf16_f32(float x) {
    bfloat16 y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Round to nearest even on the bits: before sm_90 PTX has no scalar cvt to bf16 (the packed one is sm_80's).
    uint32_t bits = __float_as_uint(x);
    y.bits = x != x ? uint16_t(0x7fff) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
    return y;
}

// widen: storage type -> the type computed in. narrow<T>: back, rounded to nearest even.
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float16 x) { return cvt_f32_f16(x); }
__device__ __forceinline__ float widen(bfloat16 x) { return cvt_f32_bf16(x); }

template <class T> __device__ __forceinline__ T narrow(accumulate_t<T> x) { return x; }
template <> __device__ __forceinline__ float16 narrow<float16>(float x) { return cvt_rn_f16_f32(x); }
template <> __device__ __forceinline__ bfloat16 narrow<bfloat16>(float x) { return cvt_rn_bf16_f32(x); }

}  // namespace fa
