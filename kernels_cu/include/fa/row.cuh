// Rows of one head for the CUDA-core kernels: dot products and weighted sums of rows (steps 00 and 02), tiles of rows in shared
// memory, the online softmax of a row, and the output row (steps 01 to 07).
#pragma once

#include <fa/copy.cuh>
#include <fa/warp.cuh>

namespace fa {

// a · b for two rows of a tensor, n elements each, both 16-byte aligned. One partial sum for each element of 16 bytes: with a single
// sum every addition would wait for the one before.
template <class T>
__device__ __forceinline__ accumulate_t<T> dot(const T* a /* [n] */, const T* b /* [n] */, int n) {
    constexpr int width = vec_width<T>;
    accumulate_t<T> part[width] = {}, sum = 0;
    int i = 0;
    for (; i + width <= n; i += width) {
        Vec128<T> a_reg = load_128(a + i), b_reg = load_128(b + i);
#pragma unroll
        for (int j = 0; j < width; ++j) part[j] += widen(a_reg[j]) * widen(b_reg[j]);
    }
    for (; i < n; ++i) sum += widen(a[i]) * widen(b[i]);
#pragma unroll
    for (int j = 0; j < width; ++j) sum += part[j];
    return sum;
}

// sum[i] += weights[r * weight_step] * rows[r * row_step + i] for r in [first, end), i over 16 bytes of elements. Every 128 rows have
// a partial sum of their own: one float32 sum over thousands of rows has an error several times as large as a sum of sums.
template <class T>
__device__ __forceinline__ void add_weighted(accumulate_t<T> (&sum)[vec_width<T>], const accumulate_t<T>* weights, int64_t weight_step,
                                             const T* rows /* row_step apart */, int64_t row_step, int first, int end) {
    constexpr int width = vec_width<T>, run = 128;
    for (; first < end; first += run) {
        accumulate_t<T> part[width] = {};
        for (int64_t r = first; r < min(first + run, end); ++r) {
            accumulate_t<T> weight = weights[r * weight_step];
            Vec128<T> row_reg = load_128(rows + r * row_step);
#pragma unroll
            for (int i = 0; i < width; ++i) part[i] += weight * widen(row_reg[i]);
        }
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += part[i];
    }
}

// One head of a (batch, heads_q, seq_q) workspace: one value for each query, [seq_q].
template <class T>
__device__ __forceinline__ T* head_values(const Args& args, int workspace, int batch, int head) {
    return static_cast<T*>(args.workspace[workspace]) + (int64_t(batch) * args.heads_q + head) * args.seq_q;
}

// One query's row of a (batch, heads_q, seq_q, seq_kv) workspace, [seq_kv].
// 64-bit, because batch * heads * seq * seq passes 2^31 at B8 H16 S4096.
template <class T>
__device__ __forceinline__ T* matrix_row(const Args& args, int workspace, int batch, int head, int query) {
    int64_t row = (int64_t(batch) * args.heads_q + head) * args.seq_q + query;
    return static_cast<T*>(args.workspace[workspace]) + row * args.seq_kv;
}

// Rows first, first + 1, … of one head from global to shared memory: `rows` rows of `width` elements, `pitch` elements apart. Zero
// beyond row `end` and element `head_dim` (the row's poison). The copy is shared by `threads` threads, of which this is `thread`:
// neighbouring threads take neighbouring elements, so a warp's loads are coalesced. The barrier is the caller's.
template <int rows, int width, int pitch, int threads, class T>
__device__ __forceinline__ void load_rows(T* to_smem /* [rows][pitch] */, const T* from /* [rows], stride apart */, int64_t stride,
                                          int first, int end, int head_dim, int thread = threadIdx.x) {
#pragma unroll 4
    for (int i = thread; i < rows * width; i += threads) {
        int row = rows == 1 ? 0 : i / width, d = rows == 1 ? i : i % width;
        to_smem[row * pitch + d] = first + row < end && d < head_dim ? from[row * stride + d] : T{};
    }
}

// The online softmax of one row over one tile: score_reg holds Q · K of keys lane, lane + Lanes, … of the tile, of which the row sees
// the first `visible`. Scales and masks them, updates the running row maximum and row sum, and writes exp(score - row_max) to the
// row of P. Returns the rescale factor exp(old maximum - new maximum) of all that was summed under the old one. The Lanes lanes of a
// row are neighbours in one warp; the __syncwarp before P is read is the caller's.
template <int Lanes, int Keys>
__device__ __forceinline__ float online_softmax(float& row_max, float& row_sum, const float (&score_reg)[Keys],
                                                float* p_smem /* [Lanes * Keys] */, int lane, int visible, float scale) {
    float masked_reg[Keys], new_max = -infinity();
#pragma unroll
    for (int n = 0; n < Keys; ++n) {
        masked_reg[n] = lane + Lanes * n < visible ? scale * score_reg[n] : -infinity();
        new_max = max(new_max, masked_reg[n]);
    }
    new_max = max(row_max, group_max<Lanes>(new_max));
    // A row that has seen no key yet has row_max = -inf, and -inf - -inf is NaN. Against 0 its terms are exp(-inf) = 0.
    const float reference = new_max == -infinity() ? 0.0f : new_max;
    float tile_sum = 0;
#pragma unroll
    for (int n = 0; n < Keys; ++n) {
        const float p = exp(masked_reg[n] - reference);
        p_smem[lane + Lanes * n] = p;
        tile_sum += p;
    }
    const float rescale = exp(row_max - reference);
    row_sum = row_sum * rescale + group_sum<Lanes>(tile_sum);
    row_max = new_max;
    return rescale;
}

// out_reg += tile_reg. A tile is summed by itself first: one float32 sum over all keys (or queries), of which there may be thousands,
// would have an error several times as large as that of a sum of sums.
template <int Rows, int Columns>
__device__ __forceinline__ void add_tile(float (&out_reg)[Rows][Columns], const float (&tile_reg)[Rows][Columns]) {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
        for (int c = 0; c < Columns; ++c) out_reg[r][c] += tile_reg[r][c];
}

// The same with rescaling: out_reg = rescale_reg * out_reg + tile_reg, a factor for each row.
template <int Rows, int Columns>
__device__ __forceinline__ void add_tile(float (&out_reg)[Rows][Columns], const float (&rescale_reg)[Rows],
                                         const float (&tile_reg)[Rows][Columns]) {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
        for (int c = 0; c < Columns; ++c) out_reg[r][c] = rescale_reg[r] * out_reg[r][c] + tile_reg[r][c];
}

// The columns of the output row that a lane holds: vectors of V, Lanes vectors apart. V is 4 where that divides the lane's columns.
template <int Columns> constexpr int output_vec = Columns % 4 == 0 ? 4 : 2;
template <int Columns, int Lanes, int V = output_vec<Columns>> __device__ __forceinline__ int output_column(int lane, int c) {
    return V * (lane + Lanes * (c / V)) + c % V;
}

// Writes factor * out_reg of one row, narrowed to T, to global memory: the columns below head_dim. Vector 0 means output_vec.
template <class T, int Lanes, int Vector = 0, int Columns>
__device__ __forceinline__ void store_output(T* to /* [head_dim] */, const float (&out_reg)[Columns], float factor, int lane,
                                             int head_dim) {
    constexpr int v = Vector ? Vector : output_vec<Columns>;
#pragma unroll
    for (int c = 0; c < Columns; c += v) {
        const int column = output_column<Columns, Lanes, v>(lane, c);
        Vec<T, v> some;
#pragma unroll
        for (int e = 0; e < v; ++e) some[e] = narrow<T>(factor * out_reg[c + e]);
        store_vec_upto(to + column, some, head_dim - column);
    }
}

}  // namespace fa
