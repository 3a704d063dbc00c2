// Between two products of 8 bits: P as an operand, V transposed, and what elements are worth (a problem's descales).
//
// A product of 8 bits takes both operands K-major, so V, whose rows are its K, is transposed on the way. And a thread's scores are pairs
// of columns, where an operand's registers have fours. Neither P nor a score changes its thread: the keys of V^T are in another order. In
// each 16 keys, place 4 c + 2 e + i holds key 8 e + 2 c + i, so that the registers of columns 2 c and 2 c + 1 of two neighbouring groups of 8
// are the four that a thread gives. That order is also what a transposing ldmatrix and a permutation of bytes give (Shah et al. 2024,
// arXiv 2407.08608, section 3.3).
#pragma once

#include <fa/accumulator.cuh>
#include <fa/float8.cuh>
#include <fa/fragment.cuh>

namespace fa {

// What an element of Q (0), K (1) or V (2) is worth.
__device__ __forceinline__ float descale_of(const Args& args, int tensor, int batch, int kv_head) {
#ifdef FA_DESCALES
    return static_cast<const float*>(args.workspace[FA_DESCALES + tensor])[batch * args.heads_kv + kv_head];
#else
    return 1.0f;
#endif
}

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

// A warp transposes 32 keys, from key on, of a tile in swizzled slabs of 128 columns, [Columns / 128][Keys][128], to rows of 128 keys,
// [Columns][128], swizzled too, in the order above.
template <int Keys, int Columns>
__device__ __forceinline__ void transpose_keys(unsigned char* to_smem, const unsigned char* from_smem, int key) {
    const int lane = lane_id();
    const uint32_t from = smem_u32(from_smem);
#pragma unroll 4
    for (int group = 0; group < Columns / 16; ++group) {
        uint32_t d[4];
        ldmatrix_x4_trans(d, from + group / 8 * (Keys * 128) + chunk_at<64>(key + lane, group % 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * group + lane / 4 * 2 + i % 2, half = i / 2;
            const uint32_t four = i % 2 ? odd_bytes(d[2 * half], d[2 * half + 1]) : even_bytes(d[2 * half], d[2 * half + 1]);
            *reinterpret_cast<uint32_t*>(to_smem + chunk_at<64>(column, key / 16 + half) + lane % 4 * 4) = four;
        }
    }
}

}  // namespace fa
