// What gradients on tensor cores need beside fa/fragment.cuh. Forward, a product's left operand comes by rows, or out of the product
// before it. Backward, the scores are needed three ways: as they are (dK, dV), transposed (dQ), and by warps that did not make them.
//
// Columns of a product are dealt out to warps in groups of 16, like cards: of Stride warps, warp w takes groups w, w + Stride, … So a
// width of 96 is as easy to share out as one of 128, and the first group of each warp lies in the first line of the row, from where
// step_16 leads to the others.
#pragma once

#include <fa/atomic.cuh>
#include <fa/fragment.cuh>

namespace fa {

// What `lane` tells ldmatrix_x4 about the 16 x 16 numbers at (row, 16 * step) of a tile: lane_of_a and lane_of_b of fa/fragment.cuh.
template <int Width> __device__ __forceinline__ uint32_t lane_of_a_at(uint32_t tile_smem, int row, int step, int lane) {
    return tile_smem + chunk_at<Width>(row + lane % 16, 2 * step + lane / 16);
}
template <int Width> __device__ __forceinline__ uint32_t lane_of_b_at(uint32_t tile_smem, int row, int step, int lane) {
    return tile_smem + chunk_at<Width>(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
}

// In all products an operand in shared memory is a lane's address, and a number of bytes to add behind the XOR of step_16: tiles of one
// shape then share the addresses, and what is added is part of the instruction.

// d += A B for K steps of 16. A: in shared memory, in rows of WidthA,
template <class T, int K, int WidthA, int Width, int Stride, int M, int N>
__device__ __forceinline__ void multiply_ab(float (&d)[M][N][4], uint32_t a_smem /* lane_of_a_at */, uint32_t a_bytes, uint32_t b_smem,
                                            uint32_t b_bytes) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], step_16<WidthA>(a_smem, k) + a_bytes + m * rows_16<WidthA>);
        multiply_strided<T, Width, Stride>(d, a, b_smem, b_bytes + k * rows_16<Width>);
    }
}

// and A transposed, which is in shared memory in rows of WidthA: its rows are the steps, its columns the rows of d.
template <class T, int K, int WidthA, int Width, int Stride, int M, int N>
__device__ __forceinline__ void multiply_atb(float (&d)[M][N][4], uint32_t a_smem /* lane_of_b_at */, uint32_t b_smem) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4_trans(a[m], step_16<WidthA>(a_smem, m) + k * rows_16<WidthA>);
        multiply_strided<T, Width, Stride>(d, a, b_smem, k * rows_16<Width>);
    }
}

// Where share_step of this lane begins, in bytes from the beginning of the tile: at (row, 8 * chunk), chunk a power of 2 or 0.
template <int Width> __device__ __forceinline__ uint32_t lane_of_share(int row, int chunk, int lane) {
    return chunk_at<Width>(row + lane / 4, chunk) + lane % 4 * 4;
}

// Writes an A operand to columns 16 * k to 16 * k + 15 behind there: 4 bytes a lane, a row of 8 numbers from 4 lanes, 8 rows in 8
// different places of the line. 16 * k is less than 8 * chunk, where chunk is not 0.
template <int Width, int M>
__device__ __forceinline__ void share_step(unsigned char* tile_smem, const uint32_t (&a)[M][4], uint32_t lane_of_share, int k) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t at = (lane_of_share ^ uint32_t((2 * k + i / 2) * 16)) + (16 * m + i % 2 * 8) * Width * 2;
            *reinterpret_cast<uint32_t*>(tile_smem + at) = a[m][i];
        }
}

}  // namespace fa
