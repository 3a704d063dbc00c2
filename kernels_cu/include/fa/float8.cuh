// Numbers of 8 bits, stored like float16 and bfloat16 without arithmetic of their own: e4m3 (finite up to 448, then NaN 0x7f; no infinity)
// and e5m2 (up to 57344, with infinities). Conversions and mma.sync, from sm_89 on; widen_four also before.
//
// A fragment of mma.sync is float16's with two elements for each (fa/mma.cuh), so that with group = lane / 4 and four = 4 * (lane % 4)
//
//     A a[4]    columns four to four + 3                 a = {(g, f) (g+8, f) (g, f+16) (g+8, f+16)}
//     B b0 b1   rows four to four + 3 of column g;       b1: rows four + 16 to four + 19
//
// and accumulators, of which a lane has two neighbours, are no A operand as they lie.
#pragma once

#include <fa/mma.cuh>

namespace fa {

struct float8_e4m3 {
    uint8_t bits;
};
struct float8_e5m2 {
    uint8_t bits;
};

// Two floats rounded to nearest even, in one register; beyond the largest number they are that number. As in PTX the first is upper.
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
    uint16_t y;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
// Two numbers of 8 bits as two of float16; exact.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t two) {
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(two));
    return y;
}
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e5m2x2(uint16_t two) {
    uint32_t y;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(two));
    return y;
}

// Four e4m3, the first in the lowest byte, as two pairs of float16; exact. On any GPU: before sm_89 by the bits, which are those of a float16
// that is 2^8 times smaller, subnormal ones too, but for NaN.
__device__ __forceinline__ void widen_four(uint32_t (&pairs)[2], uint32_t four) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t two = four >> 16 * i, x = (two & 0xff) << 8 | (two & 0xff00) << 16;
        const uint32_t nan = ((x & 0x7f007f00) + 0x01000100) & 0x80008000;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"((x & 0x80008000) | (x >> 1 & 0x3f803f80)), "r"(0x5c005c00));
        pairs[i] |= nan - (nan >> 15);
    }
#endif
}

// D += A B, 16 x 8 x 32, float accumulators.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k32_e5m2(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8<float8_e4m3>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k32_e4m3(d, a, b0, b1);
}

__device__ __forceinline__ float widen(float8_e4m3 x) { return cvt_f32_f16({uint16_t(cvt_rn_f16x2_e4m3x2(x.bits))}); }
__device__ __forceinline__ float widen(float8_e5m2 x) { return cvt_f32_f16({uint16_t(cvt_rn_f16x2_e5m2x2(x.bits))}); }
template <> __device__ __forceinline__ float8_e4m3 narrow<float8_e4m3>(float x) { return {uint8_t(cvt_rn_satfinite_e4m3x2_f32(0, x))}; }
template <> __device__ __forceinline__ float8_e5m2 narrow<float8_e5m2>(float x) { return {uint8_t(cvt_rn_satfinite_e5m2x2_f32(0, x))}; }

// Four floats in one register, the first in its lowest byte.
template <class T> __device__ __forceinline__ uint32_t pack_four(float x0, float x1, float x2, float x3);
template <> __device__ __forceinline__ uint32_t pack_four<float8_e4m3>(float x0, float x1, float x2, float x3) {
    return cvt_rn_satfinite_e4m3x2_f32(x1, x0) | uint32_t(cvt_rn_satfinite_e4m3x2_f32(x3, x2)) << 16;
}
template <> __device__ __forceinline__ uint32_t pack_four<float8_e5m2>(float x0, float x1, float x2, float x3) {
    return cvt_rn_satfinite_e5m2x2_f32(x1, x0) | uint32_t(cvt_rn_satfinite_e5m2x2_f32(x3, x2)) << 16;
}

// Bytes 0 and 2, or 1 and 3, of a, then of b.
__device__ __forceinline__ uint32_t even_bytes(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, 0x6420;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ uint32_t odd_bytes(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, 0x7531;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

}  // namespace fa
