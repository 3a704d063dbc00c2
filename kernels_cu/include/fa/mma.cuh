// Tensor cores through PTX (mma.sync and ldmatrix, PTX ISA 9.7.14). A warp multiplies D (16 x 8) += A (16 x K) B (K x 8); each lane holds
// its part of each matrix, its fragment, in registers. With group = lane / 4 (a quad of lanes) and pair = 2 * (lane % 4):
//
//     accumulator d[4]   rows group, group + 8; columns pair, pair + 1          d = {(g, p) (g, p+1) (g+8, p) (g+8, p+1)}
//     A of 16 bit a[4]   two neighbours a register: columns pair, pair + 1      a = {(g, p) (g+8, p) (g, p+8) (g+8, p+8)}
//     B of 16 bit b0 b1  two neighbours a register: rows pair, pair + 1 of column g;     b1: rows pair + 8, pair + 9
//     A of tf32   a[4]   one element a register, column lane % 4                a = {(g, c) (g+8, c) (g, c+4) (g+8, c+4)}
//     B of tf32   b0 b1  one element a register: row lane % 4 of column g;       b1: row lane % 4 + 4
//
// So two accumulators side by side, rounded and packed, are an A operand: the result of one product is an operand of the next.
#pragma once

#include <fa/types.cuh>

namespace fa {

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes, aligned);
// d[m] of lane i then holds the neighbours (i / 4, 2 * (i % 4)) and the next of matrix m: B's layout if a row is a column of B, A's
// if matrices 0 and 1 lie below each other. _trans: of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row_smem)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row_smem)
                 : "memory");
}

// The way back (sm_90): d[m] of lane i, the neighbours (i / 4, 2 * (i % 4)) and the next of matrix m, goes to shared memory transposed. Lane i
// gives the address of row i % 8 of the transposed matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_smem, const uint32_t (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                 "r"(d[3])
                 : "memory");
}

// D += A B, 16 x 8 x 16, float accumulators. Not volatile and without memory: the compiler may move it between the loads.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B, 16 x 8 x 8, of tf32 elements: float32 with a mantissa of 10 bits (see cvt_rna_tf32_f32).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nearest tf32 value, ties away from zero, as the bits of a float.
__device__ __forceinline__ uint32_t cvt_rna_tf32_f32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// Two floats rounded to nearest even, in one register. As in PTX the first goes to the upper half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// The same by storage type: mma_m16n8<T>(d, a, b0, b1) with 32 bytes of a row as K, k16 of 16-bit types and k8 of tf32 (T = float);
// round_operand<T>(x), which rounds floats to tf32; pack<T>(low, high).
template <class T>
__device__ __forceinline__ void mma_m16n8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_f16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma_m16n8<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_bf16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma_m16n8<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k8_tf32(d, a, b0, b1);
}

template <class T> __device__ __forceinline__ void round_operand(uint32_t (&x)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = cvt_rna_tf32_f32(__uint_as_float(x[i]));
    }
}

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<float16>(float low, float high) { return cvt_rn_f16x2_f32(high, low); }
template <> __device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) { return cvt_rn_bf16x2_f32(high, low); }

}  // namespace fa
