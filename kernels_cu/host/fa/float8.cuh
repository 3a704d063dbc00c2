// The CPU meaning of <fa/float8.cuh>: conversions on the bits, products with a tensor core's.
#pragma once

#include <fa/mma.cuh>

namespace fa {

struct float8_e4m3 {
    uint8_t bits;
};
struct float8_e5m2 {
    uint8_t bits;
};

namespace host {

// The nearest number with FRACTION bits behind the point and exponents from LEAST on, ties to even; MOST is the largest finite one's bits.
template <int FRACTION, int LEAST, uint32_t MOST> __forceinline__ uint32_t byte_of(float x) {
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    if (size > 0x7f800000) return 0x7f;
    const int exponent = int(size >> 23) - 127;
    const int shift = 23 - FRACTION + (exponent < LEAST ? LEAST - exponent : 0);
    if (shift > 25) return sign;
    const uint32_t mantissa = (size & 0x7fffff) | 0x800000;
    const uint32_t rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    const uint32_t y = rounded + (exponent > LEAST ? uint32_t(exponent - LEAST) << FRACTION : 0);
    return sign | (y < MOST ? y : MOST);
}
__forceinline__ uint32_t byte_e4m3(float x) { return byte_of<3, -6, 0x7e>(x); }
__forceinline__ uint32_t byte_e5m2(float x) { return byte_of<2, -14, 0x7b>(x); }

// e4m3 as float16, to the bit: its subnormal numbers are normal there.
__forceinline__ uint32_t half_of_e4m3(uint32_t byte) {
    const uint32_t size = byte & 0x7f, sign = (byte & 0x80) << 8;
    if (size == 0x7f) return 0x7fff;
    if (size >= 8) return sign | ((size << 7) + (8u << 10));
    if (size == 0) return sign;
    const int high = 31 - __builtin_clz(size);  // size = 2^high (1 + ...), in units of 2^-9
    return sign | (uint32_t(high + 6) << 10) + ((size << (10 - high)) & 0x3ff);
}
__forceinline__ uint32_t half_of_e5m2(uint32_t byte) { return (byte & 0x7f) > 0x7c ? 0x7fff : byte << 8; }

}  // namespace host

__forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
    return uint16_t(host::byte_e4m3(high) << 8 | host::byte_e4m3(low));
}
__forceinline__ uint16_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
    return uint16_t(host::byte_e5m2(high) << 8 | host::byte_e5m2(low));
}
__forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t two) { return host::half_of_e4m3(two >> 8) << 16 | host::half_of_e4m3(two & 0xff); }
__forceinline__ uint32_t cvt_rn_f16x2_e5m2x2(uint16_t two) { return host::half_of_e5m2(two >> 8) << 16 | host::half_of_e5m2(two & 0xff); }

__forceinline__ void widen_four(uint32_t (&pairs)[2], uint32_t four) {
    for (int i = 0; i < 2; ++i) pairs[i] = cvt_rn_f16x2_e4m3x2(uint16_t(four >> 16 * i));
}

__forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::mma(d, a, b0, b1, FA_HOST_PRODUCT(mma_e4m3), "mma_m16n8k32_e4m3", file, line);
}
__forceinline__ void mma_m16n8k32_e5m2(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::mma(d, a, b0, b1, FA_HOST_PRODUCT(mma_e5m2), "mma_m16n8k32_e5m2", file, line);
}

template <>
__forceinline__ void mma_m16n8<float8_e4m3>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k32_e4m3(d, a, b0, b1, file, line);
}

__forceinline__ float widen(float8_e4m3 x) { return cvt_f32_f16({uint16_t(host::half_of_e4m3(x.bits))}); }
__forceinline__ float widen(float8_e5m2 x) { return cvt_f32_f16({uint16_t(host::half_of_e5m2(x.bits))}); }
template <> __forceinline__ float8_e4m3 narrow<float8_e4m3>(float x) { return {uint8_t(host::byte_e4m3(x))}; }
template <> __forceinline__ float8_e5m2 narrow<float8_e5m2>(float x) { return {uint8_t(host::byte_e5m2(x))}; }

template <class T> __forceinline__ uint32_t pack_four(float x0, float x1, float x2, float x3);
template <> __forceinline__ uint32_t pack_four<float8_e4m3>(float x0, float x1, float x2, float x3) {
    return cvt_rn_satfinite_e4m3x2_f32(x1, x0) | uint32_t(cvt_rn_satfinite_e4m3x2_f32(x3, x2)) << 16;
}
template <> __forceinline__ uint32_t pack_four<float8_e5m2>(float x0, float x1, float x2, float x3) {
    return cvt_rn_satfinite_e5m2x2_f32(x1, x0) | uint32_t(cvt_rn_satfinite_e5m2x2_f32(x3, x2)) << 16;
}

__forceinline__ uint32_t even_bytes(uint32_t a, uint32_t b) {
    return (a & 0xff) | (a >> 8 & 0xff00) | (b & 0xff) << 16 | (b << 8 & 0xff000000u);
}
__forceinline__ uint32_t odd_bytes(uint32_t a, uint32_t b) { return even_bytes(a >> 8, b >> 8); }

}  // namespace fa
