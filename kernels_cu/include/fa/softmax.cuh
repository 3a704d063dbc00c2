// The online softmax of scores in mma accumulators (fa/mma.cuh). A lane holds parts of 2 * M rows; each row is split over the 4 lanes
// of a quad. Dao 2023, arXiv 2307.08691, section 3.1.
#pragma once

#include <fa/fragment.cuh>
#include <fa/sink.cuh>

namespace fa {

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

// q·k becomes the problem's score of scale * q·k. Of the same queries and keys.
template <int M, int N>
__device__ __forceinline__ void apply_score(float (&s)[M][N][4], const Args& args, int batch, int head, int q_first, int k_first,
                                            float scale) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[m][n][i] = score_of(args, batch, head, q_first + 16 * m + i / 2 * 8, k_first + fragment_column() + 8 * n + i % 2,
                                      s[m][n][i] * scale);
}

// Scores of pairs that the problem's mask hides become -inf. Which they are is bits of a word first: a loop that needs few registers.
template <int M, int N>
__device__ __forceinline__ void hide_scores(float (&s)[M][N][4], const Args& args, int batch, int head, int q_first, int k_first) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t hides = 0;
#pragma unroll 2
            for (int i = 0; i < 2 * N; ++i)
                hides |= uint32_t(hidden(args, batch, head, q_first + 16 * m + 8 * half, k_first + fragment_column() + i / 2 * 8 + i % 2))
                         << i;
#pragma unroll
            for (int i = 0; i < 2 * N; ++i)
                if (hides >> i & 1) s[m][i / 2][2 * half + i % 2] = -infinity();
        }
}

template <int M> struct Softmax {
    float row_max[M][2];  // subtracted in P = exp(scale * (S - row_max)). Finite from the start, so that no difference is NaN
    float row_sum[M][2];  // of P over this lane's keys only, until finish() reduces it across the quad

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_max[m][half] = -1e30f, row_sum[m][half] = 0;
    }

    // The row maximum of a tile over this lane's keys.
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

    // Reduces the tile's row maximum across the quad and rescales row_sum and O to the new row maximum.
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

    // S becomes P. One multiply-add and one exp2 a score. The rounding of row_max * scale is why `logits` is bounded.
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

    // One tile of scores: S becomes P, `out` is rescaled to the new row maximum.
    template <int N, int C>
    __device__ __forceinline__ void step(float (&s)[M][N][4], float (&out)[M][C][4], float scale_log2e) {
        float tile_max[M][2];
        local_row_max(tile_max, s);
        rescale(tile_max, out, scale_log2e);
        exponentiate(s, scale_log2e);
    }

    // Lazy rescaling: the same, but row_max is raised only where some score of the warp exceeds it by more than `slack` powers of two.
    // P is then at most 2^slack, which 16-bit types hold with the same relative precision, and the division by row_sum makes up for the
    // common factor. In most tiles one __any_sync replaces the shuffles and the multiplications of O. (FlashAttention-4 does so.)
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

    // After the last tile: row_sum becomes that of the whole row, reduced across the quad. A row that saw no key has sum 0.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[m][half] = group_sum<4>(row_sum[m][half]);
    }

    // After finish(): the sink of the rows' head among their scores. The row maximum is then one of scaled scores, so `scale` becomes 1.
    template <int C> __device__ __forceinline__ void add_sink(const Args& args, int head, float (&out)[M][C][4], float& scale) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_max[m][half] *= scale;
                const float kept = fa::add_sink(args, head, row_max[m][half], row_sum[m][half]);
#pragma unroll
                for (int c = 0; c < C; ++c) out[m][c][2 * half] *= kept, out[m][c][2 * half + 1] *= kept;
            }
        scale = 1;
    }

    // After finish(): what O is multiplied with, and the natural logsumexp of the scaled scores; 0 and -inf for a row that saw no key.
    // A NaN among the scores is in row_sum (row_max drops it), so the comparison is with 0: "> 0" would take such a row for an empty one.
    __device__ __forceinline__ float inverse_sum(int m, int half) const { return row_sum[m][half] == 0 ? 0.0f : 1.0f / row_sum[m][half]; }
    __device__ __forceinline__ float logsumexp(int m, int half, float scale) const {
        return row_sum[m][half] == 0 ? -infinity() : row_max[m][half] * scale + log(row_sum[m][half]);
    }
};

}  // namespace fa
