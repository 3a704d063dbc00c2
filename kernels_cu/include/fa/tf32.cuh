// The product P V of float tiles on tensor cores: tf32, that is float32 with a mantissa of 10 bits. Operands are rounded in registers, so
// global and shared memory hold float32. Q K^T needs no word of its own: fa/fragment.cuh, multiply_abt<float>.
#pragma once

#include <fa/softmax.cuh>

namespace fa {

// d += P B. P: 16 * M rows and 8 * K columns, in accumulators; B: 8 * K rows of Width, not swizzled.
// An accumulator holds columns pair and pair + 1 of P; as operands, mma takes them for columns c and c + 4 (c = lane % 4, pair = 2 * c).
// A sum over k does not depend on the order of k: column c of the product is P's column 2 * c, column c + 4 is 2 * c + 1, and B's rows are
// permuted alike. ldmatrix cannot transpose 32-bit elements, so B comes by plain loads (4 rows, 8 columns a warp: a 4-way bank conflict).
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

// out += P V for any storage type. P: in accumulators; V: 8 * K rows of Width at v_smem, not swizzled.
template <class T, int Width, int M, int N, int K>
__device__ __forceinline__ void multiply_pv(float (&out)[M][N][4], const float (&p)[M][K][4], uint32_t v_smem /* [8 * K][Width] */) {
    if constexpr (sizeof(T) == 4) {
        const unsigned char* v = dynamic_shared() + (v_smem - smem_u32(dynamic_shared()));
        multiply_pb_tf32<Width>(out, p, reinterpret_cast<const float*>(v));
    } else {
        uint32_t p_reg[K / 2][M][4];
        pack_a<T>(p_reg, p);
        multiply_pb<T, Width, false>(out, p_reg, lane_of_a<Width, false>(v_smem));
    }
}

}  // namespace fa
