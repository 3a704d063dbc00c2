// What gradients on tensor cores need beside fa/fragment.cuh. In a forward pass the left operand of a product comes by rows, or from the
// accumulators of the product before. A backward pass needs the scores in three ways: as they are (dK, dV), transposed (dQ), and in warps
// that did not compute them.
//
// The columns of a product are distributed over warps round-robin, in groups of 16: of Stride warps, warp w takes groups w, w + Stride, …
// A width of 96 then divides as well as one of 128, and the first group of each warp lies in the first line of the row, from where step_16
// leads to the others.
#pragma once

#include <fa/atomic.cuh>
#include <fa/fragment.cuh>
#include <fa/sink.cuh>

namespace fa {

// The address that `lane` gives to ldmatrix_x4 for the 16 x 16 elements at (row, 16 * step) of a tile: see lane_of_a of fa/fragment.cuh.
template <int Width> __device__ __forceinline__ uint32_t lane_of_a_at(uint32_t tile_smem, int row, int step, int lane) {
    return tile_smem + chunk_at<Width>(row + lane % 16, 2 * step + lane / 16);
}
template <int Width> __device__ __forceinline__ uint32_t lane_of_b_at(uint32_t tile_smem, int row, int step, int lane) {
    return tile_smem + chunk_at<Width>(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
}

// An operand in shared memory is a lane's address and an offset in bytes, which is added behind the XOR of step_16: tiles of one shape
// share lane addresses, and the offset becomes part of the instruction.

// d += A B over K steps of 16 columns of A. A: in shared memory, in rows of WidthA.
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

// d += A^T B over K steps of 16 rows of A. A: in shared memory, in rows of WidthA; its columns are the rows of d.
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

// The offset of share_step for this lane, in bytes from the beginning of the tile: at (row, 8 * chunk), chunk a power of 2 or 0.
template <int Width> __device__ __forceinline__ uint32_t lane_of_share(int row, int chunk, int lane) {
    return chunk_at<Width>(row + lane / 4, chunk) + lane % 4 * 4;
}

// Writes an A operand to shared memory, to columns 16 * k to 16 * k + 15 from lane_of_share on: 4 bytes a lane, 8 elements of a row from a
// quad, 8 rows in 8 different places of the line, so without bank conflicts. 16 * k is less than 8 * chunk, where chunk is not 0.
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

// P^T = 0 where the query does not see the key. p[m][n][2 half + e] is of key + 16 m + 8 half and query + 8 n + e.
template <int M, int N> __device__ __forceinline__ void clear_hidden(float (&p)[M][N][4], const Args& args, int query, int key) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int visible = visible_keys(args, query + 8 * n + e) - key;
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (16 * m + 8 * half >= visible) p[m][n][2 * half + e] = 0;
        }
}

// P of a pair from q·k, by the problem's mask and score. dP - delta times `slope` is its dS: P times the derivative of the score. lse_log2:
// log2(e) * logsumexp. masked: whether the pair may be hidden.
__device__ __forceinline__ float pair_probability(const Args& args, int batch, int head, int query, int key, float product, float scale,
                                                  float lse_log2, bool masked, float& slope) {
    const float s = product * scale;
    float p = exp2_approx(score_of(args, batch, head, query, key, s) * log2e - lse_log2);
    slope = p * slope_of(args, batch, head, query, key, s);
    const bool seen = key < visible_keys(args, query) && (!has_window || key >= first_key(args, query));
    if (masked && (!seen || hidden(args, batch, head, query, key))) p = slope = 0;
    return p;
}

// The same of a tile: S^T becomes P^T, dP^T becomes dS^T. Pairs as in clear_hidden; stats: of the query, log2(e) * logsumexp, and `apart`
// floats behind it delta.
template <int M, int N>
__device__ __forceinline__ void pair_gradients(float (&p)[M][N][4], float (&d)[M][N][4], const Args& args, int batch, int head, int query,
                                               int key, float scale, const float* stats_smem, int apart, bool masked) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const Vec<float, 2> lse = load_vec<2>(stats_smem + 8 * n), delta = load_vec<2>(stats_smem + apart + 8 * n);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float slope;
                p[m][n][i] = pair_probability(args, batch, head, query + 8 * n + i % 2, key + 16 * m + i / 2 * 8, p[m][n][i], scale,
                                              lse[i % 2], masked, slope);
                d[m][n][i] = slope * (d[m][n][i] - delta[i % 2]);
            }
    }
}

// delta = dO · O - dlogsumexp of a query (FlashAttention-2, Algorithm 2, line 4, has dO · O): for the 8 neighbouring lanes that share the
// row; 0 beyond seq_q.
template <class T, int Width> __device__ __forceinline__ float delta_of(const Args& args, int batch, int head, int query, int lane) {
    float sum = 0;
    if (query < args.seq_q) {
        const T* o = row_pointer<T>(args.O, batch, head, query);  // [head_dim_v]
        const T* d_o = row_pointer<T>(args.dO, batch, head, query);  // [head_dim_v]
#pragma unroll
        for (int column = lane * vec_width<T>; column < Width; column += 8 * vec_width<T>) {
            const Vec128<T> o_reg = load_128_upto(o + column, head_dim_v(args) - column);
            const Vec128<T> do_reg = load_128_upto(d_o + column, head_dim_v(args) - column);
#pragma unroll
            for (int i = 0; i < vec_width<T>; ++i) sum += widen(o_reg[i]) * widen(do_reg[i]);
        }
        if (lane == 0) sum -= dlogsumexp_of<float>(args, batch, head, query);
    }
    return group_sum<8>(sum);
}

// Two rows of a gradient, 8 apart, from what 4 lanes hold of them in accumulators: `from` is [4 lanes][2 rows][2 columns], 8 columns in
// all, the chunk-th of the row. There are `terms` of it, `apart` floats from one to the next. Their sum, in this order, is scaled and
// rounded; rows from `rows` on and columns from `columns` on are left out.
template <class T>
__device__ __forceinline__ void store_gradient_rows(const Tensor& gradient, int rows, int columns, int batch, int head, int row, int chunk,
                                                    const float* from, float scale, int terms = 1, int64_t apart = 0) {
    Vec128<T> two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Vec<float, 4> sum = load_vec<4>(from + 4 * i);
        for (int term = 1; term < terms; ++term) {
            const Vec<float, 4> next = load_vec<4>(from + term * apart + 4 * i);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += next[e];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) two[e / 2][2 * i + e % 2] = narrow<T>(sum[e] * scale);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= rows) return;
        // The column is counted in vectors of 8: added to the pointer as elements, the compiler splits the stores at most head dims.
        auto* to = reinterpret_cast<Vec128<T>*>(row_pointer<T>(gradient, batch, head, row + 8 * half)) + chunk;
        store_128_upto(reinterpret_cast<T*>(to), two[half], columns - chunk * 8);
    }
}

}  // namespace fa
