// The CPU meaning of <fa/types.cuh>: the same types, conversions rounded the same way (tests/device holds them to the GPU's).
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

template <class T> struct Accumulate {
    using type = float;
};
template <> struct Accumulate<double> {
    using type = double;
};
template <class T> using accumulate_t = typename Accumulate<T>::type;

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using half_t = __fp16;
#else
using half_t = _Float16;
#endif

// NaN becomes PTX's canonical one here and in cvt_rn_f16_f32, as an H200 answers.
__forceinline__ float cvt_f32_f16(float16 x) {
    float y = float(__builtin_bit_cast(half_t, x.bits));
    return y != y ? __uint_as_float(0x7fffffffu) : y;
}

__forceinline__ float16 cvt_rn_f16_f32(float x) { return {x != x ? uint16_t(0x7fff) : __builtin_bit_cast(uint16_t, half_t(x))}; }

__forceinline__ float cvt_f32_bf16(bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

__forceinline__ bfloat16 cvt_rn_bf16_f32(float x) {
    uint32_t bits = __float_as_uint(x);
    return {x != x ? uint16_t(0x7fff) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

__forceinline__ float widen(float x) { return x; }
__forceinline__ double widen(double x) { return x; }
__forceinline__ float widen(float16 x) { return cvt_f32_f16(x); }
__forceinline__ float widen(bfloat16 x) { return cvt_f32_bf16(x); }

template <class T> __forceinline__ T narrow(accumulate_t<T> x) { return x; }
template <> __forceinline__ float16 narrow<float16>(float x) { return cvt_rn_f16_f32(x); }
template <> __forceinline__ bfloat16 narrow<bfloat16>(float x) { return cvt_rn_bf16_f32(x); }

}  // namespace fa
