// Products of float32 matrices on tensor cores: each operand is split into two float16 (fa/split.cuh), x = scale * (high + low), and of the
// four products of the parts three are computed (Markidis et al. 2018, arXiv 1803.04014; Ootomo and Yokota 2022, arXiv 2203.03341):
//
//     A B = high(A) high(B) + high(A) low(B) + low(A) high(B)        low(A) low(B) is below 2^-22 of the sum and left out
//
// A tensor core truncates each sum of 16 products and the accumulator, where float32 arithmetic rounds. The error of an accumulator thus
// grows with the number of additions, always towards zero: by 0.7 * 2^-24 of it in the mean for each. So chains should be short, small
// products should have accumulators of their own or come first, and the sums of chains are added in float32.
#pragma once

#include <fa/barrier.cuh>
#include <fa/softmax.cuh>
#include <fa/split.cuh>

namespace fa {

// d += A B^T over 64 columns, large and small products in accumulators of their own. A and B: swizzled tiles of Width, the low parts a_low
// and b_low bytes behind the high ones; A: 16 * M rows (lane_of_a), B: 8 * N rows (lane_of_b), both plus 128 bytes for each 64 columns.
template <int Width, int M, int N>
__device__ __forceinline__ void split_multiply_abt(float (&large)[M][N][4], float (&small)[M][N][4], uint32_t a_smem, uint32_t a_low,
                                                   uint32_t b_smem, uint32_t b_low) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        uint32_t a[M][4], b[N / 2][4];
#pragma unroll
        for (int n = 0; n < N / 2; ++n) ldmatrix_x4(b[n], step_16<Width>(b_smem, k) + n * rows_16<Width>);
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], step_16<Width>(a_smem, k) + m * rows_16<Width> + a_low);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < M; ++m) mma_m16n8k16_f16(small[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], step_16<Width>(a_smem, k) + m * rows_16<Width>);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < M; ++m) mma_m16n8k16_f16(large[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) ldmatrix_x4(b[n], step_16<Width>(b_smem, k) + n * rows_16<Width> + b_low);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < M; ++m) mma_m16n8k16_f16(small[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

// d += x.
template <int M, int N> __device__ __forceinline__ void add(float (&d)[M][N][4], const float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[m][n][e] += x[m][n][e];
}

// d += A B^T over a whole Width, operands as in split_multiply_abt. Small products have accumulators of their own, a chain of large ones
// has 64 columns.
template <int Width, int M, int N>
__device__ __forceinline__ void split_multiply_rows(float (&d)[M][N][4], uint32_t a_smem, uint32_t a_low, uint32_t b_smem, uint32_t b_low) {
    float small[M][N][4] = {};
#pragma unroll
    for (int first = 0; first < Width; first += 64) {
        if (first > 0) {
            float more[M][N][4] = {};
            split_multiply_abt<Width>(more, small, a_smem + 2 * first, a_low, b_smem + 2 * first, b_low);
            add(d, more);
        } else split_multiply_abt<Width>(d, small, a_smem + 2 * first, a_low, b_smem + 2 * first, b_low);
    }
    add(d, small);
}

// Each column of d times its factor.
template <int M, int N> __device__ __forceinline__ void multiply_columns(float (&d)[M][N][4], const float* factors_smem /* [8 * N] */) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const Vec<float, 2> factor = load_vec<2>(factors_smem + 8 * n + fragment_column());
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[m][n][e] *= factor[e % 2];
    }
}

// Accumulators as A operands of the next product, split. They are in the range of float16 already.
template <int M, int N>
__device__ __forceinline__ void split_a(uint32_t (&high)[N / 2][M][4], uint32_t (&low)[N / 2][M][4], const float (&d)[M][N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&pair)[4] = d[m][2 * k + i / 2];
                split_pair(high[k][m][i], low[k][m][i], pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
}

// d += factor * A B. A: 16 * M rows and 16 * K columns, in registers; B: 16 * K rows of two swizzled tiles of Width, of which every
// Stride-th group of 16 columns. A group of columns is summed from zero in 32 registers, and the sum is added in float32. The compiler
// moves nothing across the beginning of every Fence-th group: left alone it overlaps so many that registers spill.
template <int Width, int Fence, int Stride = 1, int M, int N, int K>
__device__ __forceinline__ void split_multiply_ab(float (&d)[M][N][4], const uint32_t (&high)[K][M][4], const uint32_t (&low)[K][M][4],
                                                  uint32_t b_smem /* lane_of_a */, uint32_t b_low, float factor) {
    constexpr int group = 8 / M < N ? 8 / M : N;
#pragma unroll
    for (int first = 0; first < N; first += group) {
        if (first / group % Fence == 0) schedule_fence();
        float sum[M][group][4] = {};
#pragma unroll
        for (int k = 0; k < K; ++k) {
            uint32_t b[2][group / 2][4];
#pragma unroll
            for (int pair = 0; pair < group / 2; ++pair) {
                const uint32_t at = step_16<Width>(b_smem, (first / 2 + pair) * Stride) + k * rows_16<Width>;
                ldmatrix_x4_trans(b[0][pair], at);
                ldmatrix_x4_trans(b[1][pair], at + b_low);
            }
            // Small products first. Neighbouring instructions add to different accumulators, so none waits for the one before.
#pragma unroll
            for (int product = 0; product < 3; ++product)
#pragma unroll
                for (int n = 0; n < group; ++n)
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        const uint32_t (&part)[4] = b[product == 1][n / 2];
                        mma_m16n8k16_f16(sum[m][n], product == 0 ? low[k][m] : high[k][m], part[n % 2 * 2], part[n % 2 * 2 + 1]);
                    }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < group; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) d[m][first + n][e] += factor * sum[m][n][e];
    }
}

// d += A^T B over K steps of 16 rows of A, as multiply_atb of fa/gradient.cuh. Small products have accumulators of their own.
template <int K, int WidthA, int Width, int Stride, int M, int N>
__device__ __forceinline__ void split_multiply_atb(float (&d)[M][N][4], uint32_t a_smem /* lane_of_b_at */, uint32_t a_low,
                                                   uint32_t b_smem /* lane_of_a_at */, uint32_t b_low) {
    float small[M][N][4] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
        uint32_t high[M][4], low[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const uint32_t from = step_16<WidthA>(a_smem, m) + k * rows_16<WidthA>;
            ldmatrix_x4_trans(high[m], from);
            ldmatrix_x4_trans(low[m], from + a_low);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[2][4];
            const uint32_t at = step_16<Width>(b_smem, n / 2 * Stride) + k * rows_16<Width>;
            ldmatrix_x4_trans(b[0], at);
            ldmatrix_x4_trans(b[1], at + b_low);
#pragma unroll
            for (int product = 0; product < 3; ++product)
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const uint32_t (&part)[4] = b[product == 2];
                        float (&sum)[4] = product == 1 ? d[m][n + e] : small[m][n + e];
                        mma_m16n8k16_f16(sum, product == 0 ? low[m] : high[m], part[2 * e], part[2 * e + 1]);
                    }
        }
    }
    add(d, small);
}

// The online softmax of scores that have a scale for each row, at any size of the scores: P = scale_of_p * exp2(scale * (S - row_max)).
// The difference is exact where it matters; 2^7 brings P, at most 2^8 here, into the range that float16 splits best.
template <int M> struct SplitSoftmax {
    static constexpr float scale_of_p = 128, slack = 8;
    float row_max[M][2];  // finite from the start, so that no difference is NaN
    float row_sum[M][2];  // of P over this lane's keys only, until finish() reduces it across the quad

    __device__ __forceinline__ SplitSoftmax() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_max[m][half] = -largest_float, row_sum[m][half] = 0;
    }

    // One tile of scores: S becomes P. Rescaling is lazy, as in Softmax::step_lazily.
    template <int N, int C>
    __device__ __forceinline__ void step(float (&s)[M][N][4], float (&out)[M][C][4], const float* factors_smem) {
        float tile_max[M][2], scale_log2e[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) scale_log2e[m][half] = factors_smem[16 * m + 8 * half] * log2e;
        Softmax<M>::local_row_max(tile_max, s);
        bool grows = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) grows |= (tile_max[m][half] - row_max[m][half]) * scale_log2e[m][half] > slack;
        if (__any_sync(full_warp, grows)) rescale(tile_max, out, scale_log2e);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0;
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s[m][n][2 * half + e];
                        x = scale_of_p * exp2_approx((x - row_max[m][half]) * scale_log2e[m][half]);
                        sum += x;
                    }
                row_sum[m][half] += sum;
            }
    }

    template <int C> __device__ __forceinline__ void rescale(const float (&tile_max)[M][2], float (&out)[M][C][4],
                                                             const float (&scale_log2e)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float new_max = max(row_max[m][half], group_max<4>(tile_max[m][half]));
                const float factor = exp2_approx((row_max[m][half] - new_max) * scale_log2e[m][half]);
                row_max[m][half] = new_max;
                row_sum[m][half] *= factor;
#pragma unroll
                for (int c = 0; c < C; ++c) out[m][c][2 * half] *= factor, out[m][c][2 * half + 1] *= factor;
            }
    }

    // After the last tile: row_sum becomes that of the whole row, without scale_of_p.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[m][half] = group_sum<4>(row_sum[m][half]) * (1 / scale_of_p);
    }
};

}  // namespace fa
