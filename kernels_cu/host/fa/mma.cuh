// The CPU meaning of <fa/mma.cuh>: the last lane to arrive does the work of all 32 on their registers, with a tensor core's bits.
#pragma once

#include <fa/async.cuh>
#include <fa/collective.cuh>
#include <fa/tensor_core.cuh>

namespace fa {

namespace host {

// Four 8 x 8 matrices: lane i is given element (i / 4, i % 4 * 2) of each and the next in its row, or in its column.
template <bool TRANSPOSED> FA_HOST_COLLECTIVE load_matrices(void* const* lanes, unsigned) {
    auto& all = *static_cast<Collective*>(lanes[0]);
    for (int m = 0; m < 4; ++m)
        for (int r = 0; r < 8; r += 1 + TRANSPOSED) {
            if constexpr (TRANSPOSED) {
                uint16_t first[8], second[8];
                __builtin_memcpy(first, all.row[8 * m + r], 16);
                __builtin_memcpy(second, all.row[8 * m + r + 1], 16);
                for (int c = 0; c < 8; ++c) all.four[4 * c + r / 2][m] = first[c] | uint32_t(second[c]) << 16;
            } else {
                uint32_t pair[4];
                __builtin_memcpy(pair, all.row[8 * m + r], 16);
                for (int c = 0; c < 4; ++c) all.four[4 * r + c][m] = pair[c];
            }
        }
    if (fa_host_self->banks) fa_host_warp_access(reinterpret_cast<const void* const*>(all.row), 16, all.code[0]);
    if (!fa_host_self->race) return;
    for (int i = 0; i < 32; ++i)
        for (int m = 0; m < 4; ++m)
            for (int second = 0; second < 2; ++second) {
                const int row = TRANSPOSED ? i % 4 * 2 + second : i / 4, column = TRANSPOSED ? i / 4 : i % 4 * 2 + second;
                fa_host_access(i, all.row[8 * m + row] + 2 * column, 2, false, all.code[i]);
            }
}

template <bool TRANSPOSED>
__forceinline__ void ldmatrix(uint32_t (&d)[4], uint32_t row_smem, const char* word, const char* file, int line) {
    Collective& all = collective(file, line);
    const int lane = fa_host_self->lane;
    all.row[lane] = shared_at(row_smem, 16, 16, word, file, line);
    if (fa_host_self->race || fa_host_self->banks) all.code[lane] = fa_host_code();
    fa_host_warp(0xffffffffu, load_matrices<TRANSPOSED>, &all, word, file, line);
    __builtin_memcpy(d, all.four[lane], 16);
}

// 16-bit and tf32 fragments have the same layout: a register is a pair of columns (rows), or one.
__forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, fa_host::Apply apply, const char* word,
                         const char* file, int line) {
    Collective& all = collective(file, line);
    const int group = fa_host_self->lane / 4, pair = fa_host_self->lane % 4;
    uint32_t* to_a = reinterpret_cast<uint32_t*>(all.a) + pair * 16 + group;
    float* both_d = reinterpret_cast<float*>(all.d) + 2 * pair * 16 + group;
    to_a[0] = a[0], to_a[8] = a[1], to_a[4 * 16] = a[2], to_a[4 * 16 + 8] = a[3];
    all.b[pair][group] = b0, all.b[pair + 4][group] = b1;
    both_d[0] = d[0], both_d[16] = d[1], both_d[8] = d[2], both_d[16 + 8] = d[3];
    fa_host_warp(0xffffffffu, apply, &all, word, file, line);
    d[0] = both_d[0], d[1] = both_d[16], d[2] = both_d[8], d[3] = both_d[16 + 8];
}

}  // namespace host

__forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_smem, FA_HOST_HERE) {
    host::ldmatrix<false>(d, row_smem, "ldmatrix_x4", file, line);
}
__forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_smem, FA_HOST_HERE) {
    host::ldmatrix<true>(d, row_smem, "ldmatrix_x4_trans", file, line);
}

// Row r of the transposed matrix holds column r, whose eight elements are with the lanes of a pair of columns.
__forceinline__ void stmatrix_x4_trans(uint32_t row_smem, const uint32_t (&d)[4], FA_HOST_HERE) {
    const int lane = fa_host_self->lane, row = lane % 8;
    auto* to = reinterpret_cast<uint16_t*>(host::shared_at(row_smem, 16, 16, "stmatrix_x4_trans", file, line));
    uint16_t mine[8];
    for (int i = 0; i < 8; ++i)
        for (int m = 0; m < 4; ++m) {
            const uint32_t two = __shfl_sync(0xffffffffu, d[m], 4 * i + row / 2);
            if (m == lane / 8) mine[i] = uint16_t(two >> (row % 2 * 16));
        }
    for (int i = 0; i < 8; ++i) to[i] = mine[i];
}

__forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::mma(d, a, b0, b1, FA_HOST_PRODUCT(mma_f16), "mma_m16n8k16_f16", file, line);
}
__forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::mma(d, a, b0, b1, FA_HOST_PRODUCT(mma_bf16), "mma_m16n8k16_bf16", file, line);
}
__forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::mma(d, a, b0, b1, FA_HOST_PRODUCT(mma_tf32), "mma_m16n8k8_tf32", file, line);
}

__forceinline__ uint32_t cvt_rna_tf32_f32(float x) {
    const uint32_t bits = __float_as_uint(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;  // a NaN keeps the upper bits of its own, as an H200 answers
    return (finite ? bits + 0x1000u : bits) & 0xffffe000u;
}

__forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    return cvt_rn_f16_f32(low).bits | uint32_t(cvt_rn_f16_f32(high).bits) << 16;
}
__forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    return cvt_rn_bf16_f32(low).bits | uint32_t(cvt_rn_bf16_f32(high).bits) << 16;
}

template <class T>
__forceinline__ void mma_m16n8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE);
template <>
__forceinline__ void mma_m16n8<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k16_f16(d, a, b0, b1, file, line);
}
template <>
__forceinline__ void mma_m16n8<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k16_bf16(d, a, b0, b1, file, line);
}
template <>
__forceinline__ void mma_m16n8<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k8_tf32(d, a, b0, b1, file, line);
}

template <class T> __forceinline__ void round_operand(uint32_t (&x)[4]) {
    if constexpr (sizeof(T) == 4)
        for (int i = 0; i < 4; ++i) x[i] = cvt_rna_tf32_f32(__uint_as_float(x[i]));
}

template <class T> __forceinline__ uint32_t pack(float low, float high);
template <> __forceinline__ uint32_t pack<float16>(float low, float high) { return cvt_rn_f16x2_f32(high, low); }
template <> __forceinline__ uint32_t pack<bfloat16>(float low, float high) { return cvt_rn_bf16x2_f32(high, low); }

}  // namespace fa
