// Between two products of 8 bits: P as an operand, and V transposed.
//
// A product of 8 bits takes both operands K-major, so V, whose rows are its K, is transposed on the way. And a thread's scores are pairs
// of columns, where an operand's registers have fours. Neither P nor a score changes its thread: the keys of V^T are in another order. In
// each 16 keys, place 4 c + 2 e + i holds key 8 e + 2 c + i, so that the registers of columns 2 c and 2 c + 1 of two neighbouring groups of 8
// are the four that a thread gives. That order is also what a transposing ldmatrix and a permutation of bytes give (Shah et al. 2024,
// arXiv 2407.08608, section 3.3).
#pragma once

#include <fa/accumulator.cuh>
#include <fa/descale.cuh>
#include <fa/float8.cuh>
#include <fa/fragment.cuh>

namespace fa {

// Accumulators of 32 columns, rounded to T, are an A operand for rows of B in the order above.
template <class T, int R> __device__ __forceinline__ void pack_operand_8(uint32_t (&operand)[R / 16][4], const float (&x)[R]) {
#pragma unroll
    for (int step = 0; step < R / 16; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // rows 8 (r % 2), columns 16 (r / 2)
            const float* four = x + 16 * step + 8 * (r / 2) + 2 * (r % 2);
            operand[step][r] = pack_four<T>(four[0], four[1], four[4], four[5]);
        }
}

// The power of two in a positive number, and its reciprocal's place: 2^n as a float, for n from -126 to 127.
__device__ __forceinline__ int exponent_of(float x) { return int(__float_as_uint(x) >> 23) - 127; }
__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float(uint32_t(n + 127) << 23); }

// Warp `warp` of `warps` transposes its part of a tile in swizzled slabs of 128 columns, [Columns / 128][Keys][128], to slabs of 128 keys,
// [Keys / 128][Columns][128], swizzled too, with the keys in the order above. So that eight lanes that store at the same time have eight
// rows in different banks, the columns are in another order as well: in each 16, row 8 i + c holds column 2 c + i. store_rows_8 undoes it.
template <int Keys, int Columns>
__device__ __forceinline__ void transpose_keys(unsigned char* to_smem, const unsigned char* from_smem, int warp, int warps) {
    const int lane = lane_id();
#pragma unroll 1
    for (int group = warp; group < Columns / 16; group += warps) {
        const uint32_t from = smem_u32(from_smem) + group / 8 * (Keys * 128) + chunk_at<64>(lane, group % 8);
        const uint32_t to = (16 * group + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 4;  // chunk 0; another by an XOR, as step_16
#pragma unroll
        for (int first = 0; first < Keys; first += 64) {  // two loads at a time, the stores behind them
            constexpr int most = 2;
            uint32_t d[most][4];
#pragma unroll
            for (int i = 0; i < most; ++i)
                if (first + 32 * i < Keys) ldmatrix_x4_trans(d[i], from + (first + 32 * i) * 128);
#pragma unroll
            for (int i = 0; i < 2 * most; ++i) {
                const int key = first + 16 * i;
                if (key >= Keys) continue;
                const uint32_t (&four)[4] = d[i / 2];
                const int half = i % 2;
                unsigned char* at = to_smem + key / 128 * (Columns * 128) + (to ^ uint32_t(key % 128));
                *reinterpret_cast<uint32_t*>(at) = even_bytes(four[2 * half], four[2 * half + 1]);
                *reinterpret_cast<uint32_t*>(at + 8 * 128) = odd_bytes(four[2 * half], four[2 * half + 1]);
            }
        }
    }
}

// fa::store_rows of O whose columns are in the order of transpose_keys: a thread has four neighbours.
template <class T, int R>
__device__ __forceinline__ void store_rows_8(unsigned char* tile_smem, uint32_t slab_bytes, const float (&x)[R], const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool empty = factor[half] == 0;
#pragma unroll
        for (int group = 0; group < R / 8; ++group) {
            const float* mine = x + 8 * group + 2 * half;
            const uint32_t at =
                group / 4 * slab_bytes + chunk_at<64>(8 * half + lane_id() / 4, group % 4 * 2 + lane_id() % 4 / 2) + lane_id() % 2 * 8;
            const Vec<uint32_t, 2> four = {pack<T>(mine[0] * factor[half], mine[4] * factor[half]),
                                           pack<T>(mine[1] * factor[half], mine[5] * factor[half])};
            store_vec(reinterpret_cast<uint32_t*>(tile_smem + at), empty ? Vec<uint32_t, 2>{} : four);
        }
    }
}

}  // namespace fa
