// Products of float tiles on tensor cores: tf32, that is float32 with 10 bits behind the point. Operands are rounded when they are in
// registers, so memory and shared memory hold the numbers as they are.
#pragma once

#include <fa/fragment.cuh>
#include <fa/softmax.cuh>

namespace fa {

// Floats, as bits, to tf32.
__device__ __forceinline__ void round_tf32(uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = cvt_rna_tf32_f32(__uint_as_float(x[i]));
}

// d += A B^T, as multiply_abt. What ldmatrix brings are 32 bits a lane from rows of 16 bytes; it does not matter whether that is two
// numbers or one, and 4 floats of 8 rows are just what mma wants of a tf32 operand. So for ldmatrix, and all words about addresses, a
// float tile is a 16-bit tile twice as wide, and only the product differs: 32 bytes of a row are 8 numbers instead of 16.
template <int Wide, bool Swizzled, int M, int N, bool InRegisters>
__device__ __forceinline__ void multiply_abt_tf32(float (&d)[M][N][4], const OperandA<Wide, M, InRegisters, Swizzled>& rows,
                                                  uint32_t b_smem /* lane_of_b */) {
#pragma unroll
    for (int k = 0; k < Wide / 16; ++k) {
        uint32_t a[M][4];
        rows.get(a, k);
#pragma unroll
        for (int m = 0; m < M; ++m) round_tf32(a[m]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, step_16<Wide, Swizzled>(b_smem, k) + n / 2 * rows_16<Wide>);
            round_tf32(b);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k8_tf32(d[m][n], a[m], b[0], b[1]);
                mma_m16n8k8_tf32(d[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// d += P B. P: 16 * M rows and 8 * K columns, in accumulators; B: 8 * K rows of Width, plain.
// A lane holds columns pair and pair + 1 of P, and mma takes what it gives for columns c and c + 4 (c = lane % 4, pair = 2 * c). A sum
// does not mind its order: say that the product's column c is P's column 2 * c and c + 4 is 2 * c + 1, and give it B's rows likewise.
// There is no ldmatrix that transposes 32-bit numbers, so B comes by plain loads (4 rows, 8 columns a warp: a 4-way bank conflict).
template <int Width, int M, int N, int K>
__device__ __forceinline__ void multiply_pb_tf32(float (&d)[M][N][4], const float (&p)[M][K][4], const float* b_smem /* [8 * K][Width] */) {
    const float* b_lane = b_smem + fragment_column() * Width + fragment_row();
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            a[m][0] = cvt_rna_tf32_f32(p[m][k][0]);
            a[m][1] = cvt_rna_tf32_f32(p[m][k][2]);
            a[m][2] = cvt_rna_tf32_f32(p[m][k][1]);
            a[m][3] = cvt_rna_tf32_f32(p[m][k][3]);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint32_t b0 = cvt_rna_tf32_f32(b_lane[8 * k * Width + 8 * n]);
            const uint32_t b1 = cvt_rna_tf32_f32(b_lane[(8 * k + 1) * Width + 8 * n]);
#pragma unroll
            for (int m = 0; m < M; ++m) mma_m16n8k8_tf32(d[m][n], a[m], b0, b1);
        }
    }
}

}  // namespace fa
