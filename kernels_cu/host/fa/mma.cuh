// The CPU meaning of <fa/mma.cuh>: the last lane to come does the work of all 32 on their registers. Products are exact in float32;
// sums are rounded to nearest in the order of k, where a tensor core keeps some bits more and truncates.
#pragma once

#include <fa/async.cuh>

// What runs for all lanes at once: its accesses are told to the race check lane by lane, not as the compiler sees them.
#define FA_HOST_TOGETHER __attribute__((no_sanitize("thread"))) inline void

namespace fa {

namespace host {

typedef float Float8 __attribute__((vector_size(32)));

struct Rows {  // of four 8 x 8 matrices of 16 bits
    uint32_t* d;
    const char* row;
    const char* word;
    const char* file;
    int line;
    void* code;
};

__forceinline__ void all_lanes(unsigned mask, const char* word, const char* file, int line) {
    if (mask == 0xffffffffu) return;
    fa_host_fail("a warp of fewer than 32 threads in a word that takes all of them", file, line);
}

template <bool TRANSPOSED> FA_HOST_TOGETHER load_matrices(void* const* lanes, unsigned mask) {
    const Rows& first = *static_cast<Rows*>(lanes[__builtin_ctz(mask)]);
    all_lanes(mask, first.word, first.file, first.line);
    uint16_t element[32][8];
    for (int i = 0; i < 32; ++i) __builtin_memcpy(element[i], static_cast<Rows*>(lanes[i])->row, 16);
    for (int i = 0; i < 32; ++i) {
        uint32_t* d = static_cast<Rows*>(lanes[i])->d;
        for (int m = 0; m < 4; ++m) {
            if constexpr (TRANSPOSED) d[m] = element[8 * m + i % 4 * 2][i / 4] | uint32_t(element[8 * m + i % 4 * 2 + 1][i / 4]) << 16;
            else __builtin_memcpy(&d[m], &element[8 * m + i / 4][i % 4 * 2], 4);
        }
    }
    if (!fa_host_self->race) return;
    for (int i = 0; i < 32; ++i)
        for (int m = 0; m < 4; ++m)
            for (int half = 0; half < 2; ++half) {
                const Rows& from = *static_cast<Rows*>(lanes[8 * m + (TRANSPOSED ? i % 4 * 2 + half : i / 4)]);
                const int column = TRANSPOSED ? i / 4 : i % 4 * 2 + half;
                fa_host_access(i, from.row + 2 * column, 2, false, static_cast<Rows*>(lanes[i])->code);
            }
}

template <bool TRANSPOSED>
__forceinline__ void ldmatrix(uint32_t (&d)[4], uint32_t row_smem, const char* word, const char* file, int line) {
    Rows mine{d, shared_at(row_smem, 16, 16, word, file, line), word, file, line, fa_host_self->race ? fa_host_code() : nullptr};
    fa_host_warp(0xffffffffu, load_matrices<TRANSPOSED>, &mine, word, 0, file, line);
}

struct Mma {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
    const char* file;
    int line;
};

// The numbers of float16 bits, several at once on any processor; exact. Inputs of an infinity and NaN stay such.
__forceinline__ void widen_all(float* to, const uint16_t* from, int count, float16) {
    for (int i = 0; i < count; ++i) {
        const uint32_t bits = from[i], size = bits & 0x7fff;
        const float normal = __uint_as_float((size << 13) + (size >= 0x7c00 ? 0x70000000u : 0x38000000u));
        const float small = __uint_as_float((size << 13) + 0x38800000u) - 0x1p-14f;
        to[i] = __uint_as_float(__float_as_uint(size < 0x400 ? small : normal) | (bits & 0x8000) << 16);
    }
}

__forceinline__ void widen_all(float* to, const uint16_t* from, int count, bfloat16) {
    for (int i = 0; i < count; ++i) to[i] = __uint_as_float(uint32_t(from[i]) << 16);
}

// d (16 x 8) += a (16 x K) b (K x 8)
template <int K> __forceinline__ void multiply(Float8 (&d)[16], const float (&a)[16][K], const Float8 (&b)[K]) {
    for (int k = 0; k < K; ++k)
        for (int i = 0; i < 16; ++i) d[i] += a[i][k] * b[k];
}

__forceinline__ void gather(Float8 (&d)[16], void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
        const float* from = static_cast<Mma*>(lanes[i])->d;
        __builtin_memcpy(reinterpret_cast<float*>(&d[i / 4]) + i % 4 * 2, from, 8);
        __builtin_memcpy(reinterpret_cast<float*>(&d[i / 4 + 8]) + i % 4 * 2, from + 2, 8);
    }
}

__forceinline__ void scatter(void* const* lanes, const Float8 (&d)[16]) {
    for (int i = 0; i < 32; ++i) {
        float* to = static_cast<Mma*>(lanes[i])->d;
        __builtin_memcpy(to, reinterpret_cast<const float*>(&d[i / 4]) + i % 4 * 2, 8);
        __builtin_memcpy(to + 2, reinterpret_cast<const float*>(&d[i / 4 + 8]) + i % 4 * 2, 8);
    }
}

template <class T> FA_HOST_TOGETHER mma_16(void* const* lanes, unsigned mask) {
    const Mma& first = *static_cast<Mma*>(lanes[__builtin_ctz(mask)]);
    all_lanes(mask, "mma_m16n8k16", first.file, first.line);
    uint32_t packed[16][8];  // a, pairs of columns
    uint16_t bits[16][8];    // b
    for (int i = 0; i < 32; ++i) {
        const Mma& mine = *static_cast<Mma*>(lanes[i]);
        const int group = i / 4, pair = i % 4;
        packed[group][pair] = mine.a[0];
        packed[group + 8][pair] = mine.a[1];
        packed[group][pair + 4] = mine.a[2];
        packed[group + 8][pair + 4] = mine.a[3];
        for (int half = 0; half < 2; ++half) {
            bits[8 * half + 2 * pair][group] = uint16_t(mine.b[half]);
            bits[8 * half + 2 * pair + 1][group] = uint16_t(mine.b[half] >> 16);
        }
    }
    uint16_t a_bits[16 * 16];
    __builtin_memcpy(a_bits, packed, sizeof packed);
    float a[16][16];
    Float8 b[16], d[16];
    widen_all(a[0], a_bits, 256, T{});
    widen_all(reinterpret_cast<float*>(b), bits[0], 128, T{});
    gather(d, lanes);
    multiply(d, a, b);
    scatter(lanes, d);
}

FA_HOST_TOGETHER mma_tf32(void* const* lanes, unsigned mask) {
    const Mma& first = *static_cast<Mma*>(lanes[__builtin_ctz(mask)]);
    all_lanes(mask, "mma_m16n8k8_tf32", first.file, first.line);
    uint32_t a_bits[16][8], b_bits[8][8];
    for (int i = 0; i < 32; ++i) {
        const Mma& mine = *static_cast<Mma*>(lanes[i]);
        const int group = i / 4, column = i % 4;
        a_bits[group][column] = mine.a[0];
        a_bits[group + 8][column] = mine.a[1];
        a_bits[group][column + 4] = mine.a[2];
        a_bits[group + 8][column + 4] = mine.a[3];
        b_bits[column][group] = mine.b[0];
        b_bits[column + 4][group] = mine.b[1];
    }
    // The 13 lowest bits of a float are not looked at.
    for (auto& row : a_bits)
        for (auto& bits : row) bits &= 0xffffe000u;
    for (auto& row : b_bits)
        for (auto& bits : row) bits &= 0xffffe000u;
    float a[16][8];
    Float8 b[8], d[16];
    __builtin_memcpy(a, a_bits, sizeof a);
    __builtin_memcpy(b, b_bits, sizeof b);
    gather(d, lanes);
    multiply(d, a, b);
    scatter(lanes, d);
}

}  // namespace host

__forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_smem, FA_HOST_HERE) {
    host::ldmatrix<false>(d, row_smem, "ldmatrix_x4", file, line);
}
__forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_smem, FA_HOST_HERE) {
    host::ldmatrix<true>(d, row_smem, "ldmatrix_x4_trans", file, line);
}

__forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::Mma mine{d, a, {b0, b1}, file, line};
    fa_host_warp(0xffffffffu, host::mma_16<float16>, &mine, "mma_m16n8k16_f16", 0, file, line);
}
__forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::Mma mine{d, a, {b0, b1}, file, line};
    fa_host_warp(0xffffffffu, host::mma_16<bfloat16>, &mine, "mma_m16n8k16_bf16", 0, file, line);
}
__forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE) {
    host::Mma mine{d, a, {b0, b1}, file, line};
    fa_host_warp(0xffffffffu, host::mma_tf32, &mine, "mma_m16n8k8_tf32", 0, file, line);
}

__forceinline__ uint32_t cvt_rna_tf32_f32(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return 0x7fffffffu;
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

__forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    return cvt_rn_f16_f32(low).bits | uint32_t(cvt_rn_f16_f32(high).bits) << 16;
}
__forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    return cvt_rn_bf16_f32(low).bits | uint32_t(cvt_rn_bf16_f32(high).bits) << 16;
}

template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, FA_HOST_HERE);
template <>
__forceinline__ void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k16_f16(d, a, b0, b1, file, line);
}
template <>
__forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* file, int line) {
    mma_m16n8k16_bf16(d, a, b0, b1, file, line);
}

template <class T> __forceinline__ uint32_t pack(float low, float high);
template <> __forceinline__ uint32_t pack<float16>(float low, float high) { return cvt_rn_f16x2_f32(high, low); }
template <> __forceinline__ uint32_t pack<bfloat16>(float low, float high) { return cvt_rn_bf16x2_f32(high, low); }

}  // namespace fa
