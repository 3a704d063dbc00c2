// Products with K and V as they are stored: in 16 bits, or a cache of 8 (e4m3), whose bytes become float16 in registers, behind ldmatrix. That
// is exact, and one instruction for two elements from sm_89 on, where bfloat16 would take four. So Q and P are float16 beside it, also those of
// a bfloat16 problem: P is at most 2^8, and rows of Q are scaled.
//
// ldmatrix moves units of 16 bits, two elements of 8. So a tile of 8 bits is one of half as many columns in chunks, swizzle and lane addresses
// (`columns_16`), and a lane receives four neighbours where an operand needs two pairs that are 8 apart:
//
//     K   four neighbours of a key, columns 4 c to 4 c + 3 of 16 (c = lane % 4), are taken for the operand's columns 2 c, 2 c + 1, 2 c + 8 and
//         2 c + 9. A sum over columns has any order, so Q lies in shared memory in that one (store_operand)
//     V   transposed, a register has two neighbouring columns of two keys. Even bytes are an operand of the even columns, odd bytes of the odd
//         ones. So of 16 columns of O a lane has four neighbours, in two accumulators (store_columns)
#pragma once

#include <fa/float8.cuh>
#include <fa/fragment.cuh>

namespace fa {

// The width of a tile of `Columns` stored elements in 16-bit units.
template <class Stored, int Columns> constexpr int columns_16 = Columns * int(sizeof(Stored)) / 2;

// What tensor cores multiply where Q is of T and K and V are Stored; whether rows of Q are scaled to have room in it.
template <class T, class Stored> struct Operand {
    using type = T;
    static constexpr bool scales = false;
};
template <> struct Operand<float16, float8_e4m3> {
    using type = float16;
    static constexpr bool scales = false;
};
template <> struct Operand<bfloat16, float8_e4m3> {
    using type = float16;
    static constexpr bool scales = true;
};

// 8 columns of a row of Q as operands. Returns what the scores of the row are to be multiplied with; Lanes neighbouring lanes have the row.
// Where it is scaled, by a power of two, its largest element is from 2^14 to 2^15: all within a factor of 2^28 of it keep their bits, and
// what the others lose is below float32's last bit of a score.
template <class Stored, int Lanes, class T, class To>
__device__ __forceinline__ float narrow_row(Vec128<To>& to, const Vec128<T>& from) {
    if constexpr (Operand<T, Stored>::scales) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, fabsf(widen(from[i])));
        const int power = max(int(__float_as_uint(group_max<Lanes>(most)) >> 23) - 127, -100) - 14;
        const float factor = __uint_as_float(uint32_t(127 - power) << 23);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = narrow<To>(widen(from[i]) * factor);
        return __uint_as_float(uint32_t(127 + power) << 23);
    } else {
        to = from;
        return 1;
    }
}

// 8 columns of a row of Q, `chunk`, into a tile of Width columns for multiply_keys.
template <class Stored, int Width, class T>
__device__ __forceinline__ void store_operand(unsigned char* tile_smem, int row, int chunk, const Vec128<T>& eight) {
    if constexpr (sizeof(Stored) == 2) store_128(reinterpret_cast<T*>(tile_smem + chunk_at<Width>(row, chunk)), eight);
    else {
        const auto& pair = reinterpret_cast<const Vec<uint32_t, 4>&>(eight);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned char* at = tile_smem + chunk_at<Width>(row, chunk / 2 * 2 + i) + chunk % 2 * 8;
            store_vec(reinterpret_cast<uint32_t*>(at), Vec<uint32_t, 2>{pair[i], pair[2 + i]});
        }
    }
}

// d += Q K^T over the whole Width. K: 8 * N rows of Width stored elements in shared memory.
template <class T, class Stored, int Width, int M, int N, bool InRegisters>
__device__ __forceinline__ void multiply_keys(float (&d)[M][N][4], const OperandA<Width, M, InRegisters>& q,
                                              uint32_t k_smem /* lane_of_b */) {
    if constexpr (sizeof(Stored) == 2) multiply_abt<T>(d, q, k_smem);
    else {
        constexpr int width = columns_16<Stored, Width>;
#pragma unroll
        for (int k = 0; k < Width / 32; ++k) {
            uint32_t a[2][M][4];
            q.get(a[0], 2 * k), q.get(a[1], 2 * k + 1);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t four[4];  // of keys 0 to 7, both halves of 32 columns; of keys 8 to 15
                ldmatrix_x4(four, step_16<width>(k_smem, k) + n / 2 * rows_16<width>);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t b[2];
                    widen_four(b, four[i]);
#pragma unroll
                    for (int m = 0; m < M; ++m) mma_m16n8<T>(d[m][n + i / 2], a[i % 2][m], b[0], b[1]);
                }
            }
        }
    }
}

// Scores times a factor of each row.
template <int M, int N> __device__ __forceinline__ void scale_rows(float (&d)[M][N][4], const float (&factor)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[m][n][e] *= factor[m][e / 2];
}

// d += P V. P: 16 * M rows and 16 * K keys, in registers; V: 16 * K rows of Width stored elements in shared memory.
template <class T, class Stored, int Width, int M, int N, int K>
__device__ __forceinline__ void multiply_values(float (&d)[M][N][4], const uint32_t (&p)[K][M][4], uint32_t v_smem /* lane_of_a */) {
    if constexpr (sizeof(Stored) == 2) multiply_pb<T, Width>(d, p, v_smem);
    else {
        constexpr int width = columns_16<Stored, Width>;
        static_assert(8 * N == Width && Width % 32 == 0, "a load has 32 columns");
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
            for (int n = 0; n < N; n += 4) {
                uint32_t two[4];  // columns 0 to 15 of keys 0 to 7, and of 8 to 15; columns 16 to 31
                ldmatrix_x4_trans(two, step_16<width>(v_smem, n / 4) + k * rows_16<width>);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t b[2];
                    const uint32_t low = two[i / 2 * 2], high = two[i / 2 * 2 + 1];
                    widen_four(b, i % 2 ? odd_bytes(low, high) : even_bytes(low, high));
#pragma unroll
                    for (int m = 0; m < M; ++m) mma_m16n8<T>(d[m][n + i], p[k][m], b[0], b[1]);
                }
            }
    }
}

// Stores a lane's part of a row of multiply_values' d, times a factor. half: which row of the 16.
template <class Stored, int N>
__device__ __forceinline__ void store_columns(float* row /* [8 * N] */, const float (&d)[N][4], int half, float factor) {
    if constexpr (sizeof(Stored) == 2) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            store_vec(row + 8 * n + fragment_column(), Vec<float, 2>{d[n][2 * half] * factor, d[n][2 * half + 1] * factor});
    } else {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const float *even = d[n] + 2 * half, *odd = d[n + 1] + 2 * half;
            store_vec(row + 8 * n + 2 * fragment_column(),
                      Vec<float, 4>{even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor});
        }
    }
}

}  // namespace fa
