// The running softmax of queries whose scores lie in mma accumulators (fa/mma.cuh): a lane holds parts of 2 * M rows, and the 4 lanes
// of a group together hold whole ones. Dao 2023, arXiv 2307.08691, section 3.1.
#pragma once

#include <fa/warp.cuh>

namespace fa {

// Score n, e of a row of a tile belongs to key 8 * n + pair + e; accumulator element 2 * half + e to row 8 * half + group.
__device__ __forceinline__ int fragment_row() { return lane_id() / 4; }
__device__ __forceinline__ int fragment_column() { return lane_id() % 4 * 2; }

// Scores of keys that a query does not see become -inf. q_first: the query of this lane's first row; k_first: the tile's first key.
template <int M, int N>
__device__ __forceinline__ void mask_scores(float (&s)[M][N][4], const Args& args, int q_first, int k_first) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int visible = visible_keys(args, q_first + 16 * m + 8 * half) - k_first - fragment_column();
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e >= visible) s[m][n][2 * half + e] = -infinity();
        }
}

template <int M> struct Softmax {
    float row_max[M][2];  // what P refers to: P = exp(scale * (S - maximum)). Finite from the start, so that no difference is NaN
    float row_sum[M][2];      // of P, of this lane's keys only: the lanes of a row meet once, at the end

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_max[m][half] = -1e30f, row_sum[m][half] = 0;
    }

    // The largest score of each row among this lane's keys.
    template <int N> static __device__ __forceinline__ void local_row_max(float (&tile_max)[M][2], const float (&s)[M][N][4]) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                tile_max[m][half] = max(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
                for (int n = 1; n < N; ++n) tile_max[m][half] = max(tile_max[m][half], max(s[m][n][2 * half], s[m][n][2 * half + 1]));
            }
    }

    // Takes the maxima of the lanes of each row together, and makes what has been summed so far refer to the new one.
    template <int C>
    __device__ __forceinline__ void rescale(const float (&tile_max)[M][2], float (&out)[M][C][4], float scale_log2e) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float new_max = max(row_max[m][half], group_max<4>(tile_max[m][half]));
                const float factor = exp2_approx((row_max[m][half] - new_max) * scale_log2e);
                row_max[m][half] = new_max;
                row_sum[m][half] *= factor;
#pragma unroll
                for (int c = 0; c < C; ++c) out[m][c][2 * half] *= factor, out[m][c][2 * half + 1] *= factor;
            }
    }

    // S becomes P. One multiply-add and one exp2 a score; what max * scale loses by rounding is why `logits` is bounded.
    template <int N> __device__ __forceinline__ void exponentiate(float (&s)[M][N][4], float scale_log2e) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float base = row_max[m][half] * scale_log2e;
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s[m][n][2 * half + e];
                        x = exp2_approx(x * scale_log2e - base);
                        row_sum[m][half] += x;
                    }
            }
    }

    // One tile of scores: S becomes P, `out` is made to refer to the same maximum.
    template <int N, int C>
    __device__ __forceinline__ void step(float (&s)[M][N][4], float (&out)[M][C][4], float scale_log2e) {
        float tile_max[M][2];
        local_row_max(tile_max, s);
        rescale(tile_max, out, scale_log2e);
        exponentiate(s, scale_log2e);
    }

    // The same, but the maximum that P refers to may stay up to 2^slack too small: P is then at most 2^slack, which 16-bit types hold
    // with the same relative precision, and the division by the sum at the end makes up for it. Nearly always nothing is to be raised,
    // and nobody has to ask the other lanes of the row. (FlashAttention-4 does so.)
    template <int N, int C>
    __device__ __forceinline__ void step_lazily(float (&s)[M][N][4], float (&out)[M][C][4], float scale_log2e, float slack) {
        float tile_max[M][2];
        local_row_max(tile_max, s);
        bool grows = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) grows |= (tile_max[m][half] - row_max[m][half]) * scale_log2e > slack;
        if (__any_sync(full_warp, grows)) rescale(tile_max, out, scale_log2e);
        exponentiate(s, scale_log2e);
    }

    // After the last tile: sum becomes that of the whole row. Returns nothing; a row that saw no key has sum 0.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[m][half] = group_sum<4>(row_sum[m][half]);
    }
};

}  // namespace fa
